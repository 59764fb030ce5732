"""`tinyvllm convert`: converts a GGUF file to a folder in Hugging Face's layout, for other programs. Quantized weights
keep their bits, in compressed-tensors' format with our extension `weight_offset`. Opens no device."""
import collections, json, os, pathlib, tempfile
from collections.abc import Iterator

import numpy as np

from tinyvllm.config import InputError, JsonObject, check
from tinyvllm_extra.formats.gguf import GGUFCheckpoint, GGUFTensor
from tinyvllm_extra.formats.gguf_tokenizer import read_tokenizer
from tinyvllm_extra.formats.gguf_types import Format, TensorType, common_format
from tinyvllm_extra.formats.tensor_files import write_safetensors
from tinyvllm_extra.models import find_model

FUSED = {**dict.fromkeys(["q_proj", "k_proj", "v_proj"], "qkv"), **dict.fromkeys(["gate_proj", "up_proj"], "gate_up")}


def matrix_formats(tensors: dict[str, GGUFTensor]) -> dict[str, Format | str]:
  """Return the format or dtype of each matrix by its module's name, equal for fused matrices."""
  fused: dict[str, dict[str, TensorType]] = collections.defaultdict(dict)
  for name in [name.removesuffix(".weight") for name, tensor in tensors.items() if len(tensor.shape) == 2]:
    parent, _, module = name.rpartition(".")
    fused[f"{parent}.{FUSED.get(module, module)}"][name] = tensors[f"{name}.weight"].tensor_type
  common = {key: common_format([*types.values()]) for key, types in fused.items()}
  return {name: common[key] for key, types in fused.items() for name in types}


def quantization_config(formats: dict[str, Format | str]) -> JsonObject:
  """Return compressed-tensors' config for the formats, empty if no weight is quantized."""
  used = dict.fromkeys(x for x in formats.values() if isinstance(x, Format))
  if not used: return {}
  packings = {x: "pack-quantized" if x.bits == 4 else "int-quantized" for x in used}
  groups = [{"targets": [name for name, y in formats.items() if y == x], "format": packing, "weights": {
    "num_bits": x.bits, "type": "int", "symmetric": not x.has_offset, "strategy": "group",
    "group_size": x.group_size}} for x, packing in packings.items()]
  return {"quantization_config": {
    "quant_method": "compressed-tensors", "quantization_status": "compressed",
    "format": "mixed-precision" if len({*packings.values()}) > 1 else next(iter(packings.values())),
    "config_groups": {f"group_{i}": x for i, x in enumerate(groups)},
    "ignore": [name for name, x in formats.items() if isinstance(x, str)]}}


def export(tensors: dict[str, GGUFTensor], formats: dict[str, Format | str]) -> Iterator[tuple[str, np.ndarray]]:
  """Yield the tensors of model.safetensors."""
  for name, tensor in tensors.items():
    module = name.removesuffix(".weight")
    target = formats.get(module)
    if not isinstance(target, Format):
      yield name, tensor.read_float32() if target == "F32" else tensor.read()
      continue
    w = tensor.read_quantized(target)
    if target.bits == 8: yield f"{module}.weight", w.q
    else:
      yield f"{module}.weight_packed", (w.q[:, ::2] | w.q[:, 1::2] << np.uint8(4)).view("<i4")
      yield f"{module}.weight_shape", np.array(w.q.shape, "<i8")
    yield f"{module}.weight_scale", w.scale
    if target.has_offset and w.offset is not None: yield f"{module}.weight_offset", w.offset


def convert(path: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Write the folder and return it. Raises InputError, and writes nothing, for a file that cannot be loaded or a folder
  that is not empty."""
  is_free = folder.is_dir() and not any(folder.iterdir()) or not os.path.lexists(folder)
  check(is_free, f"{folder} already exists: choose an empty or a new folder")
  checkpoint = GGUFCheckpoint(path)
  config = checkpoint.hf_config
  find_model(config, path)   # raises for an unsupported architecture
  formats = matrix_formats(checkpoint.all_tensors)
  library, settings = read_tokenizer(path, checkpoint.metadata, config["vocab_size"])
  files = {"config.json": json.dumps(config | quantization_config(formats), indent=2).encode(),
           "tokenizer_config.json": json.dumps(settings).encode()}
  if isinstance(library, bytes): files["tokenizer.model"] = library
  else: files["tokenizer.json"] = library.to_str().encode()
  parent = next(parent for parent in folder.absolute().parents if parent.is_dir())
  try:
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=parent) as temporary:
      target = pathlib.Path(temporary) / "model"
      target.mkdir()
      for name, content in files.items(): (target / name).write_bytes(content)
      with (target / "model.safetensors").open("wb") as file:
        write_safetensors(file, export(checkpoint.all_tensors, formats), 1024 * len(checkpoint.all_tensors))
      folder.parent.mkdir(parents=True, exist_ok=True)
      if folder.is_dir(): folder.rmdir()
      target.replace(folder)
  except OSError as e: raise InputError(f"{folder}: {e.strerror}") from e
  return folder


def main(args: JsonObject) -> int:
  """Run `tinyvllm convert` and return 0. Raises InputError as `convert` does."""
  print(convert(args["file"].expanduser(), args["folder"].expanduser()))
  return 0
