"""Reads a model's files, safetensors whole or sharded, one tensor at a time, each checked against the shape that the
config promises. A weight stays in its file's type where that is narrower than the one that is computed in."""
import json, pathlib
from functools import partial
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Tensor, dtypes, helpers
from tinygrad.dtype import DType

from .config import check, read_json
from .device import largest_tensor, renderer
from .llama import Llama
from .matmul import Linear, Norm, pack

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}   # numpy has no bfloat16: its bits


def read_files(folder: pathlib.Path) -> dict[str, Any]:
  """The tensors of model.safetensors, or of the shards that model.safetensors.index.json names: by name, what reads
  each."""
  reader: dict[str, Any] = {}
  index = read_json(folder / "model.safetensors.index.json")
  for path in {folder / name for name in index.get("weight_map", {"": "model.safetensors"}).values()}:
    try: safe_open(path, "np")   # it checks the file, but cannot read bfloat16
    except (OSError, SafetensorError) as e: raise ValueError(f"{path} is missing, damaged or cut short: {e}") from e
    with path.open("rb") as file:
      size = int.from_bytes(file.read(8), "little")
      header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    for name, entry in header.items():   # each is mapped by itself: the pages of a whole file would count as ours
      kind = entry["dtype"]
      check(kind in DTYPES, f"{path}: tensor {name} is {kind}; supported: {', '.join(DTYPES)}")
      start = 8 + size + entry["data_offsets"][0]
      reader[name] = partial(np.memmap, path, DTYPES[kind], "c", start, tuple(entry["shape"]))
  return reader


def to_device(array: np.ndarray, compute: DType) -> Tensor:
  """A tensor of the array's type, or of the one to compute in where that is no wider or the device lacks the other."""
  brain = array.dtype == np.uint16
  stored = dtypes.bfloat16 if brain else dtypes.float16 if array.itemsize == 2 else dtypes.float32
  if stored.itemsize < compute.itemsize and stored in renderer().supported_dtypes():
    tensor = Tensor(array).bitcast(stored) if brain else Tensor(array)
    return tensor.contiguous().realize()
  if brain: array = (array.astype(np.uint32) << 16).view(np.float32)   # the upper half of float32
  if compute == dtypes.float32: array = array.astype(np.float32)   # here, or the device keeps a buffer of either kind
  return Tensor(array).cast(compute).contiguous().realize()


def load_weights(model: Llama, folder: pathlib.Path, compute: DType) -> None:
  """Fill the model's tensors. compute: the type of what is computed with them. Raises ValueError naming the file and the
  tensor that is missing, surplus or misshapen."""
  reader = read_files(folder)

  def take(name: str, *shape: int) -> np.ndarray:
    check(name in reader, f"{folder}: tensor {name} is missing")
    array = reader.pop(name)()
    check(array.shape == shape, f"{folder}: tensor {name} has shape {list(array.shape)}; its config says {list(shape)}")
    return array

  def fill(part: Linear | Norm, kind: str, *columns: int) -> None:
    tensor = getattr(part, kind)
    arrays = [take(f"{name}.{kind}", rows, *columns) for name, rows in part.sources.items()]
    array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    if columns: array = pack(array, tensor.shape)
    check(array.nbytes <= largest_tensor(), f"{folder}: {', '.join(part.sources)}: {array.nbytes} bytes, of "
          f"{largest_tensor()} that this device takes in one tensor: choose another one, as in DEV=CPU")
    tensor.replace(to_device(np.ascontiguousarray(array), compute))

  for part in helpers.tqdm(model.parts(), desc="loading weights", disable=None):
    fill(part, "weight", *([part.in_features] if isinstance(part, Linear) else []))
    if getattr(part, "bias", None): fill(part, "bias")
  surplus = [name for name in reader if name != "lm_head.weight" and not name.endswith(".inv_freq")]   # both derived
  check(not surplus, f"{folder}: tensor {' '.join(surplus[:1])} has no place in the model that its config describes")
