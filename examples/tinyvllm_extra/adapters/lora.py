"""LoRA (Hu et al. 2021, arXiv:2106.09685): an adapter adds the product of two narrow matrices to each of a model's
matrices. Reads PEFT's files, and merges one adapter into the weights while they load."""
import pathlib, re

import numpy as np

from tinyvllm.config import check, read_json
from tinyvllm_extra.formats import hub
from tinyvllm_extra.formats.quantization import to_float32
from tinyvllm_extra.formats.weights import FLOATS, FastCheckpoint, read_safetensors
from tinyvllm_extra.options import LLMConfig

TARGETS = re.compile(r"base_model\.model\.(.*\.(?:self_attn|mlp)\.\w+_proj)\.lora_([AB])\.weight")
# Values of fields in adapter_config.json that give the plain product. A field that is in neither table must be empty:
# PEFT's other variants and initializations also change the model, or the base weights (PiSSA, OLoRA)
PLAIN: dict[str, list[object]] = {
  "peft_type": ["LORA"], "bias": ["none"], "init_lora_weights": [True, "gaussian", "eva", "orthogonal"],
  **{name: [False] for name in ("use_dora", "use_qalora", "lora_bias", "fan_in_fan_out")}}
HARMLESS = {"lora_alpha", "alpha_pattern", "use_rslora", "r", "rank_pattern", "target_modules", "exclude_modules",
            "layers_to_transform", "layers_pattern", "lora_dropout", "task_type", "auto_mapping",
            "peft_version", "base_model_name_or_path", "revision", "inference_mode", "megatron_core",
            "qalora_group_size", "eva_config", "runtime_config"}


def scale_of(config: dict, name: str, rank: int) -> float:
  """Return the factor of a matrix's product. alpha_pattern has regular expressions for the ends of names."""
  patterns = config.get("alpha_pattern") or {}
  key = next((x for x in patterns if re.match(rf"(.*\.)?({x})$", name)), None)
  alpha = config.get("lora_alpha", 8) if key is None else patterns[key]   # PEFT's default
  return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def read_adapter(path: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Return A, (rank, in), and B with its scale, (out, rank), by the name of their matrix. Raises InputError."""
  folder = pathlib.Path(path).expanduser()
  config = read_json(folder / "adapter_config.json")
  check(config, f"merge_lora={path!r} has no adapter_config.json: name a folder that PEFT wrote")
  for name, value in config.items():
    plain = PLAIN.get(name, [None])
    check(not value or name in HARMLESS or value in plain,
          f"merge_lora={path!r}: {name}={value!r} is not supported: use {plain[0]!r}")
  pairs: dict[str, dict[str, np.ndarray]] = {}
  for name, tensor in read_safetensors(folder / "adapter_model.safetensors", FLOATS).items():
    match = TARGETS.fullmatch(name)
    check(match, f"merge_lora={path!r}: tensor {name} is not supported: only matrices of attention and MLPs are")
    if match: pairs.setdefault(match[1], {})[match[2]] = to_float32(tensor.read())
  for name, pair in pairs.items(): check(len(pair) == 2, f"merge_lora={path!r}: {name} lacks lora_A or lora_B")
  return {name: (x["A"], x["B"] * np.float32(scale_of(config, name, len(x["A"])))) for name, x in pairs.items()}


def open_checkpoint(path: pathlib.Path, config: LLMConfig) -> FastCheckpoint:
  """Open a model, whose weights will include the adapter, if the config names one."""
  checkpoint = hub.open_checkpoint(path, config.quantization, config.activation_quantization)
  if config.merge_lora: checkpoint.adapter = read_adapter(config.merge_lora)
  return checkpoint
