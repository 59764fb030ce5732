"""Architectures beyond the core's. One that is like LLaMA is a row in table.py and table.json, with options of the
layers in layers.py, experts.py and recurrent.py. For another one, write models/NAME.py with a class like llama.Llama,
as gpt2.py, and add a function that reads its config.json to MODELS, under its name in config.json's `architectures`. A
model is built from the backend's modules, so that every weight format and kernel works with it; their `sources` name
the checkpoint's tensors. The config is a ModelConfig or a subclass."""
import pathlib

from tinyvllm.config import JsonObject, ModelConfig, check
from tinyvllm.llama import Llama

from .gpt2 import GPT2, GPT2Layer, gpt2
from .recurrent import HYBRIDS
from .table import ROWS, Reader, make_row

MODELS: dict[str, Reader] = {"LlamaForCausalLM": lambda hf, path: (ModelConfig.from_hf(hf, path), Llama),
                             "GPT2LMHeadModel": make_row(gpt2, GPT2Layer, GPT2), **HYBRIDS, **ROWS}


def find_model(hf_config: JsonObject, path: pathlib.Path) -> tuple[ModelConfig, type[Llama]]:
  """Return the config and the class of a model of MODELS. Raises InputError for another architecture, or none."""
  architecture = (hf_config.get("architectures") or [None])[0]
  check(architecture in (*MODELS, None), f"{path}: architecture {architecture!r} is not supported; supported: "
        f"{', '.join(sorted(MODELS))}")
  return MODELS[architecture or "LlamaForCausalLM"](hf_config, path)
