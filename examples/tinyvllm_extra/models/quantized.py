"""A quantized matrix, w = q * scale + offset in groups of consecutive inputs, as numpy arrays. A number format
says how q is stored in words, and how kernels decode it."""
import dataclasses
from typing import NamedTuple

import numpy as np
from tinygrad import UOp, dtypes

# Small floats, which numpy lacks: a byte each, in a field with the format's name
E4M3 = np.dtype([("e4m3", np.uint8)])
E2M1 = np.dtype([("e2m1", np.uint8)])   # in the lower 4 bits (MXFP4)
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@dataclasses.dataclass(frozen=True)
class NumberFormat:
  """A number format of q. Kernels decode its bits to float16 with integer operations."""
  bits: int
  word: str   # dtype of a packed word; floats and integers differ, as layers with equal dtypes share traced calls
  zero_point: int = 0      # added to integers for tensor cores
  factor: int = 1          # small floats: q / decoded number, a part of the stored scales

  in_element = property(lambda self: 8 if self.bits == 4 else 1)   # numbers per element of W, not for tensor cores
  is_float = property(lambda self: self.factor > 1)

  def value(self, element: UOp, k: UOp) -> UOp:
    """Return the number of input k in float32. element: of W, not for tensor cores, which holds that input."""
    if self.bits == 4: element = element.cast(dtypes.uint32) >> (k % 8 * 4).cast(dtypes.uint32) & 15
    if not self.is_float: return element.float()
    bits = element.cast(dtypes.uint32)   # of the small float, then of float16
    bits = (bits & 7) << 9 | (bits & 8) << 12 if self.bits == 4 else (bits & 0x7f) << 7 | (bits & 0x80) << 8
    return bits.cast(dtypes.uint16).bitcast(dtypes.half).float()


NUMBER_FORMATS = {   # by the dtype of q
  np.dtype(np.int8): NumberFormat(8, "uint32", zero_point=128), np.dtype(np.uint8): NumberFormat(4, "uint32"),
  E4M3: NumberFormat(8, "int32", factor=2**8), E2M1: NumberFormat(4, "int32", factor=2**14)}
UNQUANTIZED = NumberFormat(16, "uint32")   # floats, which are not packed


class Quantized(NamedTuple):
  """A quantized matrix. Groups divide the inputs evenly."""
  q: np.ndarray               # (out, in): int8, int4 as uint8 from 0 to 15, E4M3 or E2M1: see NUMBER_FORMATS
  scale: np.ndarray           # (out, groups)
  offset: np.ndarray | None   # (out, groups); None: zeros
  order: np.ndarray           # (in,): input of each column

  @property
  def number_format(self) -> NumberFormat: return NUMBER_FORMATS[self.q.dtype]


Matrix = np.ndarray | Quantized   # (out, in)


def narrow(x: np.ndarray, exact: bool = True) -> np.ndarray:
  """Cast to float16 if that is exact or, without `exact`, does not overflow."""
  with np.errstate(over="ignore"): half = x.astype(np.float16)
  return half if (np.array_equal(half, x) if exact else np.isfinite(half).all()) else x


def is_small_float(w: Matrix) -> bool: return isinstance(w, Quantized) and w.number_format.is_float
