"""A tensor's buffers on its devices."""
import math

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.device import Buffer, MultiBuffer
from tinygrad.dtype import DType, _from_np_dtype
from tinygrad.uop.ops import sint


def buffers_of(tensor: Tensor) -> list[Buffer]:
  """Return the tensor's buffer on each device."""
  buffer = tensor.uop.buffer
  return [x.ensure_allocated() for x in (buffer.bufs if isinstance(buffer, MultiBuffer) else [buffer])]


def write(buffer: Buffer, array: np.ndarray) -> None: buffer.allocator._copyin(buffer._buf, array.data.cast("B"))


def dtype_of(array: np.ndarray) -> DType:
  """Return the dtype of a file's numbers. numpy has no bfloat16; uint16 stands for it."""
  return dtypes.bfloat16 if array.dtype == np.uint16 else _from_np_dtype(array.dtype)


def new(like: Tensor, *shape: sint, dtype: DType | None = None) -> Tensor:
  """Return an uninitialized tensor as a kernel's output. Traced functions may return it."""
  return Tensor.invalids(math.prod(shape), dtype=dtype or like.dtype, device=like.device).reshape(shape)


def new_tensor(array: np.ndarray, device: str) -> Tensor:
  """Return a tensor with the array's numbers. Scheduling a Tensor(array) would take milliseconds."""
  tensor = Tensor.empty(*array.shape, dtype=dtype_of(array), device=device)
  copy_to_devices(tensor, array)
  return tensor


def copy_to_devices(tensor: Tensor, array: np.ndarray) -> None:
  """Copy the whole array to each device."""
  for buffer in buffers_of(tensor): write(buffer, array)
