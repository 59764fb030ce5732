"""A tensor in a file, and the reader of safetensors files."""
import dataclasses, math, pathlib

import numpy as np
from safetensors import SafetensorError, safe_open

from tinyvllm.config import check
from tinyvllm_extra.models.quantized import E4M3

# numpy's dtypes by their names in the files. It has no bfloat16
FLOATS: dict[str, np.dtype] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
NUMBERS: dict[str, np.dtype] = {   # in quantized matrices
  "U8": np.dtype("u1"), "I8": np.dtype("i1"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"), "F8_E4M3": E4M3}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a file. Each read maps it anew, as the pages of one map of the file would stay in resident memory."""
  path: pathlib.Path
  dtype: np.dtype
  shape: tuple[int, ...]
  start: int               # byte offset in the file
  is_transposed: bool = dataclasses.field(default=False, kw_only=True)   # the file stores rows as columns

  nbytes = property(lambda self: math.prod(self.shape) * self.dtype.itemsize)

  T = property(lambda self: dataclasses.replace(self, shape=self.shape[::-1], is_transposed=not self.is_transposed))

  def read(self) -> np.ndarray:
    if self.is_transposed: return self.T.read().T
    return np.memmap(self.path, self.dtype, "c", self.start, self.shape)
  # The bytes in the file
  def raw(self) -> np.ndarray: return np.memmap(self.path, np.uint8, "c", self.start, (self.nbytes,))


def read_safetensors(path: pathlib.Path, supported: dict[str, np.dtype]) -> dict[str, StoredTensor]:
  """Return the tensors of a file by name. supported: dtypes by their names in the file. Raises InputError for another
  dtype or an unreadable file."""
  try:
    with safe_open(path, "np") as file: slices = {name: file.get_slice(name) for name in file.offset_keys()}
  except (OSError, SafetensorError) as e: check(False, f"model: {path} is missing, damaged or truncated: {e}")
  tensors = {}
  start = 8 + int(np.fromfile(path, "<u8", 1)[0])   # the tensors follow the header without gaps
  for name, x in slices.items():
    dtype = x.get_dtype()
    check(dtype in supported, f"model: {path}: tensor {name} is {dtype}; supported: {', '.join(supported)}")
    tensors[name] = StoredTensor(path, supported[dtype], tuple(x.get_shape()), start)
    start += tensors[name].nbytes
  return tensors
