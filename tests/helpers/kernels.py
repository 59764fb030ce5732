"""Tensors as kernels read them."""
import numpy as np
from tinygrad import Tensor

from tinyvllm.backend import cpu_cores


def on_device(x: np.ndarray) -> Tensor: return Tensor(np.ascontiguousarray(x)).contiguous().realize()


def as_stored(cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Convert K and V, (2, blocks, block_size, KV, D), to the kernels' block layout."""
  return cache[0].transpose(0, 2, 3, 1), cache[1].transpose(0, 2, 1, 3)


def bytes_as_stored(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Convert uint8 K and V, (blocks, block_size, KV, D), to the block layout: bytes on a CPU, else words of four."""
  if cpu_cores(): return keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)
  keys, values = (np.ascontiguousarray(x).view(np.uint32) for x in (keys, values))
  return keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)
