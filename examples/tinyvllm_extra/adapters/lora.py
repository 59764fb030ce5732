"""LoRA (Hu et al. 2021, arXiv:2106.09685): adapters, which add the product of two narrow matrices to a model's
matrices, in PEFT's files. Here one adapter is merged into the weights while they load."""
import pathlib, re

import numpy as np

from tinyvllm.config import check, read_json
from tinyvllm_extra.formats import hub
from tinyvllm_extra.formats.quantization import to_float32
from tinyvllm_extra.formats.weights import FLOATS, FastCheckpoint, read_safetensors
from tinyvllm_extra.options import LLMConfig

TARGETS = re.compile(r"base_model\.model\.(.*\.(?:self_attn|mlp)\.\w+_proj)\.lora_([AB])\.weight")
# Fields of adapter_config.json with the only value that is supported, or that means the same when it is missing
PLAIN = {"peft_type": "LORA", "bias": "none", "use_dora": False, "lora_bias": False, "fan_in_fan_out": False,
         "modules_to_save": None, "trainable_token_indices": None, "target_parameters": None, "layer_replication": None}


def scale_of(config: dict, name: str, rank: int) -> float:
  """Return the factor of a matrix's product. alpha_pattern has regular expressions for the ends of names."""
  patterns = config.get("alpha_pattern") or {}
  key = next((x for x in patterns if re.match(rf"(.*\.)?({x})$", name)), None)
  alpha = config["lora_alpha"] if key is None else patterns[key]
  return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def read_adapter(path: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Return A, (rank, in), and B with its scale, (out, rank), by the name of their matrix. Raises InputError."""
  folder = pathlib.Path(path).expanduser()
  config = read_json(folder / "adapter_config.json")
  check(config, f"merge_lora={path!r} has no adapter_config.json: name a folder that PEFT wrote")
  for name, value in PLAIN.items():
    found = config.get(name) or value
    check(found == value, f"merge_lora={path!r}: {name}={found!r} is not supported: use {value!r}")
  pairs: dict[str, dict[str, np.ndarray]] = {}
  for name, tensor in read_safetensors(folder / "adapter_model.safetensors", FLOATS).items():
    match = TARGETS.fullmatch(name)
    check(match, f"merge_lora={path!r}: tensor {name} is not supported: only matrices of attention and MLPs are")
    if match: pairs.setdefault(match[1], {})[match[2]] = to_float32(tensor.read())
  return {name: (x["A"], x["B"] * np.float32(scale_of(config, name, len(x["A"])))) for name, x in pairs.items()}


def open_checkpoint(path: pathlib.Path, config: LLMConfig) -> FastCheckpoint:
  """Open a model, whose weights will include the adapter, if the config names one."""
  checkpoint = hub.open_checkpoint(path, config.quantization, config.activation_quantization)
  if config.merge_lora: checkpoint.adapter = read_adapter(config.merge_lora)
  return checkpoint
