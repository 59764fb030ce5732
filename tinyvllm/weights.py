"""Reads a model's files, safetensors whole or sharded, one tensor at a time, each checked against the shape that the
config promises. A weight stays in its file's type where that is narrower than the one that is computed in."""
import json, pathlib
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Tensor, dtype, dtypes, helpers, nn

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
    size = int(np.fromfile(path, "<u8", 1)[0])
    header = json.loads(bytes(np.fromfile(path, np.uint8, size, offset=8)))
    header.pop("__metadata__", None)
    for name, entry in header.items():
      check(entry["dtype"] in DTYPES, f"{path}: tensor {name} is {entry['dtype']}; supported: {', '.join(DTYPES)}")
      maps[name] = path, DTYPES[entry["dtype"]], "c", 8 + size + entry["data_offsets"][0], tuple(entry["shape"])
  return maps


def to_device(array: np.ndarray, compute: dtype.DType) -> Tensor:
  """A tensor of the array's type, or of the one to compute in where that is no wider or the device lacks the other."""
  brain = array.dtype == np.uint16
  stored = Tensor(array).bitcast(dtypes.bfloat16) if brain else Tensor(array)
  if array.itemsize < compute.itemsize and stored.dtype in renderer().supported_dtypes(): return stored.contiguous()
  if brain: array = (array.astype(np.uint32) << 16).view(np.float32)   # the upper half of float32
  if compute == dtypes.float32: array = array.astype(np.float32)   # here, or the device keeps a buffer of either kind
  return Tensor(array).cast(compute).contiguous()


def load_weights(model: Llama, folder: pathlib.Path, compute: dtype.DType) -> None:
  """Fill the model's tensors. compute: the type of what is computed with them. Raises ValueError naming the file and
  the tensor that is missing, surplus or misshapen."""
  maps = read_files(folder)

  def take(name, *shape):
    found = list(maps[name][-1]) if name in maps else "missing"
    check(found == [*shape], f"{folder}: tensor {name} is {found}; its config says {[*shape]}")
    return np.memmap(*maps.pop(name))

  for part in helpers.tqdm(model.parts(), desc="loading weights", disable=None):
    for kind, tensor in nn.state.get_state_dict(part).items():   # its weight, its bias
      columns = [tensor.numel() // sum(part.sources.values())] if tensor.ndim > 1 else []
      arrays = [take(f"{name}.{kind}", rows, *columns) for name, rows in part.sources.items()]
      array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
      stored = to_device(np.ascontiguousarray(pack(array, tensor.shape)), compute)   # type: ignore[arg-type]
      size = max(array.nbytes, stored.nbytes())   # it is brought as it is, and then cast
      check(size <= largest_tensor(), f"{folder}: {', '.join(part.sources)}: {size} bytes, of "
            f"{largest_tensor()} that this device takes in one tensor: choose another one, as in DEV=CPU")
      tensor.replace(stored.realize())
  rest = next((name for name in maps if name != "lm_head.weight" and not name.endswith(".inv_freq")), None)   # derived
  check(rest is None, f"{folder}: tensor {rest} has no place in the model that its config describes")
