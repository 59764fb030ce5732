"""Reads a model's files, safetensors whole or sharded, one tensor at a time, each checked against the shape that the
config promises. A weight stays in its file's type where that is narrower than the one that is computed in."""
import json, pathlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Tensor, dtypes, helpers, nn
from tinygrad.dtype import DType

from .config import check, read_json
from .device import largest_tensor, renderer
from .llama import Llama
from .matmul import pack

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}   # numpy has no bfloat16: its bits


def read_files(folder: pathlib.Path) -> dict[str, Any]:
  """The tensors of model.safetensors, or of the shards that model.safetensors.index.json names: by name, the arguments
  of the np.memmap that reads each, as the pages of a whole file in one would count as ours."""
  maps = {}
  index = read_json(folder / "model.safetensors.index.json")
  for path in {folder / name for name in index.get("weight_map", {"": "model.safetensors"}).values()}:
    try: safe_open(path, "np")   # it checks the file, but cannot read bfloat16
    except (OSError, SafetensorError) as e: raise ValueError(f"{path} is missing, damaged or cut short: {e}") from e
    with path.open("rb") as file:
      size = int.from_bytes(file.read(8), "little")
      header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    for name, entry in header.items():
      kind = entry["dtype"]
      check(kind in DTYPES, f"{path}: tensor {name} is {kind}; supported: {', '.join(DTYPES)}")
      start = 8 + size + entry["data_offsets"][0]
      maps[name] = path, DTYPES[kind], "c", start, tuple(entry["shape"])
  return maps


def to_device(array: np.ndarray, compute: DType) -> Tensor:
  """A tensor of the array's type, or of the one to compute in where that is no wider or the device lacks the other."""
  brain = array.dtype == np.uint16
  stored = Tensor(array).bitcast(dtypes.bfloat16) if brain else Tensor(array)
  if array.itemsize < compute.itemsize and stored.dtype in renderer().supported_dtypes():
    return stored.contiguous()
  if brain: array = (array.astype(np.uint32) << 16).view(np.float32)   # the upper half of float32
  if compute == dtypes.float32: array = array.astype(np.float32)   # here, or the device keeps a buffer of either kind
  return Tensor(array).cast(compute).contiguous()


def load_weights(model: Llama, folder: pathlib.Path, compute: DType) -> None:
  """Fill the model's tensors. compute: the type of what is computed with them. Raises ValueError naming the file and
  the tensor that is missing, surplus or misshapen."""
  maps = read_files(folder)

  def take(name, *shape):
    check(name in maps, f"{folder}: tensor {name} is missing")
    array = np.memmap(*maps.pop(name))
    check(array.shape == shape, f"{folder}: tensor {name} has shape {list(array.shape)}; its config says {list(shape)}")
    return array

  for part in helpers.tqdm(model.parts(), desc="loading weights", disable=None):
    for kind, tensor in nn.state.get_state_dict(part).items():   # its weight, its bias
      columns = [part.in_features] if tensor.ndim > 1 else []   # type: ignore[union-attr]
      arrays = [take(f"{name}.{kind}", rows, *columns) for name, rows in part.sources.items()]
      array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
      if columns: array = pack(array, tensor.shape)   # type: ignore[arg-type]
      stored = to_device(np.ascontiguousarray(array), compute)
      size = max(array.nbytes, stored.nbytes())   # it is brought as it is, and then cast
      check(size <= largest_tensor(), f"{folder}: {', '.join(part.sources)}: {size} bytes, of "
            f"{largest_tensor()} that this device takes in one tensor: choose another one, as in DEV=CPU")
      tensor.replace(stored.realize())
  for name in maps:   # but for what is derived
    check(name == "lm_head.weight" or name.endswith(".inv_freq"),
          f"{folder}: tensor {name} has no place in the model that its config describes")
