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


def experts(hf: dict[str, Any]) -> dict[str, Any]:
  count = hf.get("num_experts") or hf["num_local_experts"]
  return {"num_experts": count, "num_experts_per_tok": hf["num_experts_per_tok"],
          "moe_intermediate_size": hf.get("moe_intermediate_size") or hf["intermediate_size"]}


def qwen3_moe(hf: dict[str, Any]) -> dict[str, Any]:
  step, layers = hf.get("decoder_sparse_step") or 1, range(hf["num_hidden_layers"])
  dense = tuple(i for i in layers if i in (hf.get("mlp_only_layers") or ()) or (i + 1) % step)
  return qwen3(hf) | experts(hf) | {"dense_layers": dense, "norm_topk_prob": hf.get("norm_topk_prob", False)}


def mixtral(hf: dict[str, Any]) -> dict[str, Any]:
  name = "block_sparse_moe.experts.{}"
  return mistral(hf) | experts(hf) | {"router": "block_sparse_moe.gate", "gate_up": (f"{name}.w1", f"{name}.w3"),
                                      "down": (f"{name}.w2",)}


def olmoe(hf: dict[str, Any]) -> dict[str, Any]:
  check(hf.get("clip_qkv") is None, f"model: clip_qkv={hf.get('clip_qkv')} is not supported; supported: null")
  return experts(hf) | {"qk_norm": "all", "norm_topk_prob": hf.get("norm_topk_prob", False)}


def gpt_oss(hf: dict[str, Any]) -> dict[str, Any]:
  return mistral(hf) | experts(hf) | {
    "router": "mlp.router", "gate_up": ("mlp.experts.gate_up_proj",), "down": ("mlp.experts.down_proj",),
    "expert_bias": True, "has_sinks": True, "swiglu": (hf.get("swiglu_alpha", 1.702), hf.get("swiglu_limit", 7.0))}


MIXTURES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
  "Qwen3MoeForCausalLM": qwen3_moe, "MixtralForCausalLM": mixtral, "OlmoeForCausalLM": olmoe,
  "GptOssForCausalLM": gpt_oss}
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
    return model_class.config_class(**vars(core) | values), model_class
  return read
