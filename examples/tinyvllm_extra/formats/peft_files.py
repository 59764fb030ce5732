"""Reads the files that PEFT writes for a LoRA adapter."""
import pathlib, re

import numpy as np

from tinyvllm.config import check, read_json

from . import quantization, weights

MATRIX = r".*\.(?:self_attn|mlp)\.\w+_proj"   # names of matrices that may have an adapter
TENSOR = re.compile(rf"base_model\.model\.({MATRIX})\.lora_([AB])\.weight")
# Fields of adapter_config.json. plain: values that give the plain product. Fields in neither list must be empty: PEFT's
# other variants and initializations also change the model, or the base weights (PiSSA, OLoRA)
FIELDS = read_json(pathlib.Path(__file__).with_name("peft_fields.json"))
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]   # A, (rank, in), and B with its scale, (out, rank), by matrix


def scale_of(config: dict, name: str, rank: int) -> float:
  """Return the factor of a matrix's product. alpha_pattern has regular expressions for the ends of names."""
  patterns = config.get("alpha_pattern") or {}
  key = next((x for x in patterns if re.match(rf"(.*\.)?({x})$", name)), None)
  alpha = config.get("lora_alpha", 8) if key is None else patterns[key]   # PEFT's default
  return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def read_adapter(path: str, option: str) -> Pairs:
  """Read a folder that PEFT wrote. option: how the user named it. Raises InputError."""
  folder, text = pathlib.Path(path).expanduser(), f"{option}={path!r}"
  config = read_json(folder / "adapter_config.json")
  check(config, f"{text} has no adapter_config.json: name a folder that PEFT wrote")
  for name, value in config.items():
    plain = FIELDS["plain"].get(name, [None])
    is_supported = not value or name in FIELDS["harmless"] or value in plain
    check(is_supported, f"{text}: {name}={value!r} is not supported: use {plain[0]!r}")
  pairs: dict[str, dict[str, np.ndarray]] = {}
  for name, tensor in weights.read_safetensors(folder / "adapter_model.safetensors", weights.FLOATS).items():
    match = TENSOR.fullmatch(name)
    check(match, f"{text}: tensor {name} is not supported: only matrices of attention and MLPs are")
    if match: pairs.setdefault(match[1], {})[match[2]] = quantization.to_float32(tensor.read())
  for name, pair in pairs.items(): check(len(pair) == 2, f"{text}: {name} lacks lora_A or lora_B")
  return {name: (x["A"], x["B"] * np.float32(scale_of(config, name, len(x["A"])))) for name, x in pairs.items()}
