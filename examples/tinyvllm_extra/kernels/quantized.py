"""A quantized matrix, w = q * scale + offset in groups of consecutive inputs, as numpy arrays."""
from typing import NamedTuple

import numpy as np

E4M3 = np.dtype("V1")   # 8-bit floats, which numpy lacks: raw bytes, unlike uint8 (int4)
E2M1 = np.dtype([("e2m1", "u1")])   # 4-bit floats (MXFP4): a byte from 0 to 15 each
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


class Quantized(NamedTuple):
  """A quantized matrix. Groups divide the inputs evenly."""
  q: np.ndarray               # (out, in): int8, int4 as uint8 from 0 to 15, E4M3 or E2M1
  scale: np.ndarray           # (out, groups)
  offset: np.ndarray | None   # (out, groups); None: zeros
  order: np.ndarray           # (in,): input of each column


Matrix = np.ndarray | Quantized   # (out, in)


def narrow(x: np.ndarray, exact: bool = True) -> np.ndarray:
  """Cast to float16 if that is exact or, without `exact`, does not overflow."""
  with np.errstate(over="ignore"): half = x.astype(np.float16)
  return half if (np.array_equal(half, x) if exact else np.isfinite(half).all()) else x


def is_small_float(w: Matrix) -> bool: return isinstance(w, Quantized) and w.q.dtype.kind == "V"
