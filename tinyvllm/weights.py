"""Reads a model's files, safetensors whole or sharded, one tensor at a time, each checked against the shape that the
config promises. A weight stays in its file's type where that is narrower than the one that is computed in."""
import importlib, json, pathlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Tensor, UOp, dtype, dtypes, helpers, nn

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
  """Fill the model's tensors, on each of its devices with that one's part. compute: the type of what is computed with
  them. quantization: what is made of the layers' matrices, "int8" or "int4", or what they are. Raises ValueError naming
  the file and the tensor that is missing, surplus or misshapen."""
  count = len(model.devices)
  published = read_json(folder / "config.json").get("quantization_config") or {}
  fill = None
  if published or quantization:
    fill = importlib.import_module("tinyvllm_quantization").filler(model, folder, published, quantization)
  maps = read_files(folder, DTYPES | INTEGERS if published else DTYPES)

  def take(name, *shape):
    found = list(maps[name][-1]) if name in maps else "missing"
    check(found == [*shape], f"{folder}: tensor {name} is {found}; its config says {[*shape]}")
    return np.memmap(*maps.pop(name))

  def shares(w, axis):   # a device's each
    if axis is None: return [w] * count
    if axis == w.ndim: return [w] + [np.zeros_like(w)] * (count - 1)   # a bias, added once
    return np.split(w, count, axis)

  def place(part, arrays, kind=compute):   # one for each device
    tensors = []
    for array, device in zip(map(np.ascontiguousarray, arrays), model.devices, strict=True):
      stored = to_device(array, kind, device)
      size = max(array.nbytes, stored.nbytes())   # it is brought as it is, and then cast
      check(size <= largest_tensor(), f"{folder}: {', '.join(part.sources)}: {size} bytes, of "
            f"{largest_tensor()} that this device takes in one tensor: choose another one, as in DEV=CPU")
      tensors.append(stored.realize().uop)
    return Tensor(tensors[0]) if count == 1 else Tensor(UOp.mstack(*tensors)).clone().realize()

  for part in helpers.tqdm(model.parts(), desc="loading weights", disable=None):
    for kind, tensor in nn.state.get_state_dict(part).items():   # its weight, its bias
      above, beside = [count if part.axis == axis else 1 for axis in range(2)]   # as many as it in the files
      columns = [tensor.numel() // sum(part.sources.values()) * beside] if tensor.ndim > 1 else []
      shapes = {name: (rows * above, *columns) for name, rows in part.sources.items()}
      if fill and columns: fill(part, shapes, maps, take, place)
      else:
        matrices = [shares(take(f"{name}.{kind}", *shape), part.axis) for name, shape in shapes.items()]
        weights = [own[0] if len(own) == 1 else np.concatenate(own) for own in zip(*matrices, strict=True)]
        if isinstance(part, Linear) and columns: weights = [*map(part.stored, weights)]
        tensor.replace(place(part, weights))
  rest = [name for name in maps if name != "lm_head.weight" and not name.endswith((".inv_freq", ".weight_shape"))
          and not (published and name.endswith(".bias") and not np.memmap(*maps[name]).any())]   # derived, or nothing
  check(not rest, f"{folder}: tensor {next(iter(rest), None)} has no place in the model that its config describes")
