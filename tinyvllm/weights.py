"""Reads a model's files, safetensors whole or sharded, one tensor at a time, each checked against the shape that the
config promises. A weight stays in its file's type where that is narrower than the one that is computed in."""
import importlib, json, pathlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Device, Tensor, dtype, dtypes, helpers, nn

from .config import check, read_json
from .device import largest_tensor, renderer
from .llama import Linear, Llama

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}   # numpy has no bfloat16: its bits
INTEGERS = {"I8": np.int8, "I32": np.int32, "I64": np.int64}   # of quantized matrices


def read_files(folder: pathlib.Path, kinds: dict[str, Any]) -> dict[str, Any]:
  """The tensors of model.safetensors, or of the shards that model.safetensors.index.json names: by name, the arguments
  of the np.memmap that reads each, as the pages of a whole file in one would count as ours."""
  maps = {}
  index = read_json(folder / "model.safetensors.index.json")
  for path in {folder / name for name in index.get("weight_map", {"": "model.safetensors"}).values()}:
    try: safe_open(path, "np")   # it checks the file, but cannot read bfloat16
    except (OSError, SafetensorError) as e: raise ValueError(f"{path} is missing, damaged or cut short: {e}") from e
    size = int(np.fromfile(path, "<u8", 1)[0])
    header = json.loads(bytes(np.fromfile(path, np.uint8, size, offset=8)))
    header.pop("__metadata__", None)
    for name, entry in header.items():
      check(entry["dtype"] in kinds, f"{path}: tensor {name} is {entry['dtype']}; supported: {', '.join(kinds)}")
      maps[name] = path, kinds[entry["dtype"]], "c", 8 + size + entry["data_offsets"][0], tuple(entry["shape"])
  return maps


def floats(x: np.ndarray) -> np.ndarray:
  """In float32. uint16: bfloat16's bits, which numpy has not, and which are the upper half of float32's."""
  return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)


def to_device(array: np.ndarray, compute: dtype.DType | None, device: str) -> Tensor:
  """A tensor of the array's type, or of the one to compute in, if there is one, where that is no wider or the device
  lacks the other."""
  brain = array.dtype == np.uint16
  stored = Tensor(array, device=device)
  if brain: stored = stored.bitcast(dtypes.bfloat16)
  if compute is None or (array.itemsize < compute.itemsize and stored.dtype in renderer().supported_dtypes()):
    return stored.contiguous()
  if brain or compute == dtypes.float32: array = floats(array)   # here, or the device keeps a buffer of either kind
  return Tensor(array, device=device).cast(compute).contiguous()


def load_weights(model: Llama, folder: pathlib.Path, compute: dtype.DType, quantization: str | None = None) -> None:
  """Fill the model's tensors. compute: the type of what is computed with them. quantization: what is made of the
  layers' matrices, "int8" or "int4", or what they are. Raises ValueError naming the file and the tensor that is
  missing, surplus or misshapen."""
  published = read_json(folder / "config.json").get("quantization_config") or {}
  fill = None
  if published or quantization:
    fill = importlib.import_module("tinyvllm_extra.quantization").filler(model, folder, published, quantization)
  maps = read_files(folder, DTYPES | INTEGERS if published else DTYPES)

  def take(name, *shape):
    found = list(maps[name][-1]) if name in maps else "missing"
    check(found == [*shape], f"{folder}: tensor {name} is {found}; its config says {[*shape]}")
    return np.memmap(*maps.pop(name))

  def place(part, arrays, kind=compute, device=Device.DEFAULT):   # the one that a device has
    array = np.ascontiguousarray(*arrays)
    stored = to_device(array, kind, device)
    size = max(array.nbytes, stored.nbytes())   # it is brought as it is, and then cast
    check(size <= largest_tensor(), f"{folder}: {', '.join(part.sources)}: {size} bytes, of "
          f"{largest_tensor()} that this device takes in one tensor: choose another one, as in DEV=CPU")
    return stored.realize()

  for part in helpers.tqdm(model.parts(), desc="loading weights", disable=None):
    for kind, tensor in nn.state.get_state_dict(part).items():   # its weight, its bias
      columns = [tensor.numel() // sum(part.sources.values())] if tensor.ndim > 1 else []
      shapes = {name: (rows, *columns) for name, rows in part.sources.items()}
      if model.fill: model.fill(part, kind, shapes, fill, maps, take, place)
      elif fill and columns: fill(part, shapes, maps, take, place)
      else:
        arrays = [take(f"{name}.{kind}", *shape) for name, shape in shapes.items()]
        whole = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        tensor.replace(place(part, [part.stored(whole) if isinstance(part, Linear) and columns else whole]))
  rest = [name for name in maps if name != "lm_head.weight" and not name.endswith(".inv_freq")]   # tied, and derived
  check(not rest, f"{folder}: tensor {next(iter(rest), None)} has no place in the model that its config describes")
