"""Architectures beyond the core's. One that is like LLaMA is a row in table.py, with options of the layers in layers.py
and experts.py. For any other, write models/NAME.py with a class like llama.Llama and a function that reads its
config.json, as in gpt2.py, and add the function to MODELS, under its name in config.json's `architectures`. The core
looks here first. A model is built from the backend's modules, so that every weight format and kernel works with it;
their `sources` name the checkpoint's tensors. The config is a ModelConfig or a subclass."""
import pathlib
from collections.abc import Callable
from typing import Any

from tinyvllm.config import ModelConfig, check
from tinyvllm.llama import Llama

from .embedder import Embedder, is_embedder
from .gpt2 import read_gpt2
from .table import ROWS

MODELS: dict[str, Callable[[dict[str, Any], pathlib.Path], tuple[ModelConfig, type[Llama]]]] = {
  "GPT2LMHeadModel": read_gpt2, **ROWS}


def find_model(hf_config: dict[str, Any], path: pathlib.Path,
               runner: str = "auto") -> tuple[ModelConfig, type[Llama]]:
  """Return the config and the class of a model: from MODELS if its architecture is there, else the core's. An embedding
  model has no lm_head. Raises InputError for another architecture."""
  architecture = next(iter(hf_config.get("architectures") or []), None)
  core = "LlamaForCausalLM"
  check(architecture in (*MODELS, core, None), f"{path}: architecture {architecture!r} is not supported; supported: "
        f"{', '.join(sorted([*MODELS, core]))}")
  read = MODELS.get(architecture, lambda *source: (ModelConfig.from_hf(*source), Llama))   # type: ignore[arg-type]
  config, model_class = read(hf_config, path)
  return config, type("Embedder", (Embedder, model_class), {}) if is_embedder(path, runner) else model_class
