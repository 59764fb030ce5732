"""A tensor's buffers on its devices, and tensors whose shards are on several devices. For tinygrad, most shards are
copies of one tensor."""
import numpy as np
from tinygrad import Tensor, UOp, dtypes
from tinygrad.device import Buffer, MultiBuffer
from tinygrad.dtype import DType, _from_np_dtype


def buffers_of(tensor: Tensor) -> list[Buffer]:
  """Return the tensor's buffer on each device."""
  buffer = tensor.uop.buffer
  return [x.ensure_allocated() for x in (buffer.bufs if isinstance(buffer, MultiBuffer) else [buffer])]


def write(buffer: Buffer, array: np.ndarray) -> None: buffer.allocator._copyin(buffer._buf, array.data.cast("B"))


def dtype_of(array: np.ndarray) -> DType:
  """Return the dtype of a file's numbers. numpy has no bfloat16; uint16 stands for it."""
  return dtypes.bfloat16 if array.dtype == np.uint16 else _from_np_dtype(array.dtype)


def new_tensor(array: np.ndarray, device: str | tuple[str, ...]) -> Tensor:
  """Return a tensor with the array's numbers on each device. Scheduling a Tensor(array) would take milliseconds."""
  tensor = Tensor.empty(*array.shape, dtype=dtype_of(array), device=device)
  copy_to_devices(tensor, array)
  return tensor


def copy_to_devices(tensor: Tensor, array: np.ndarray) -> None:
  """Copy the whole array to each device."""
  for buffer in buffers_of(tensor): write(buffer, array)


def stack_shards(tensors: list[Tensor]) -> Tensor:
  """Return one tensor whose shards are `tensors`, each on its device."""
  return Tensor(UOp.mstack(*[x.uop for x in tensors])).clone().realize()
