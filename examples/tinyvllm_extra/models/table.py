"""Architectures like LLaMA: a row has the options of its layers, read from config.json. To add one, add a function and
its name in the `architectures` of config.json to ROWS."""
import pathlib
from collections.abc import Callable
from typing import Any

from tinyvllm.config import ModelConfig, check

from .layers import Config, Model
from .ropes import SCALINGS


def windows(hf: dict[str, Any], default: Callable[[int], bool] = lambda i: True) -> tuple[int, ...]:
  """Return each layer's window. default: whether layer i has one, if config.json has no layer_types."""
  types = hf.get("layer_types") or ["sliding" * default(i) for i in range(hf["num_hidden_layers"])]
  return tuple((hf.get("sliding_window") or 0) * ("sliding" in x) for x in types)


def qwen2(hf: dict[str, Any]) -> dict[str, Any]:
  has_windows = hf.get("use_sliding_window", False)
  return {"qkv_bias": True, "windows": windows(hf, lambda i: has_windows and i >= hf.get("max_window_layers", 28))}


def qwen3(hf: dict[str, Any]) -> dict[str, Any]: return qwen2(hf) | {"qkv_bias": False, "qk_norm": "head"}
def mistral(hf: dict[str, Any]) -> dict[str, Any]: return {"windows": windows(hf)}


ROWS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
  "Qwen2ForCausalLM": qwen2, "Qwen3ForCausalLM": qwen3, "MistralForCausalLM": mistral}


def read_rope(hf: dict[str, Any], path: pathlib.Path) -> dict[str, Any]:
  """Return config.json's parameters of RoPE as transformers 5 writes them."""
  rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
  rope = {"rope_theta": 10000.0, **{x: hf[x] for x in ("rope_theta", "partial_rotary_factor") if hf.get(x)},
          "rope_type": rope.get("type", "default"), **rope}
  kind = rope["rope_type"]
  check(kind in SCALINGS, f"{path}: rope_type {kind!r} is not supported; supported: {', '.join(SCALINGS)}")
  return rope


def make_row(options: Callable[[dict[str, Any]], dict[str, Any]], model_class: type[Model] = Model) -> Any:
  """Return a function that reads config.json's content; see MODELS."""
  def read(hf: dict[str, Any], path: pathlib.Path) -> tuple[Config, type[Model]]:
    core = ModelConfig.from_hf({**hf, "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
                                "rope_parameters": {"rope_type": "default"}}, path)
    count = core.num_hidden_layers
    values = {"ropes": (read_rope(hf, path),), "rope_kinds": (0,) * count, "windows": (0,) * count, **options(hf)}
    return Config(**vars(core) | values), model_class
  return read
