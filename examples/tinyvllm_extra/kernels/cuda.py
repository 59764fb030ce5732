"""CUDA: read-back that does not wait for later steps."""
import ctypes, typing, weakref
from collections.abc import Callable

import numpy as np
from tinygrad import Tensor
from tinygrad.device import Buffer, BufferSpec
from tinygrad.dtype import _to_np_dtype
from tinygrad.runtime.ops_cuda import CUDADevice, check, cuda, init_c_var

from .fast_backend import FastBackend

PINNED = BufferSpec(host=True)


class CUDABackend(FastBackend):
  """The backend for NVIDIA GPUs."""
  reads_early = True

  def start_reading(self, tensor: Tensor) -> Callable[[], typing.Any]:
    """Start to copy a tensor to the host. Return a function that waits for the copy and returns nested lists.
    tinygrad's own read-back also waits for kernels that were launched later."""
    if not tensor.numel(): return tensor.tolist
    buffer = typing.cast(Buffer, tensor.uop.buffer)
    device = typing.cast(CUDADevice, buffer.allocator.dev)   # Device.default is forbidden while another thread captures
    check(cuda.cuCtxSetCurrent(device.context))
    host = device.allocator.alloc(buffer.nbytes, PINNED)
    check(cuda.cuMemcpyDtoHAsync_v2(host, buffer._buf, buffer.nbytes, None))
    event = init_c_var(cuda.CUevent, lambda x: check(cuda.cuEventCreate(ctypes.byref(x), 0)))
    check(cuda.cuEventRecord(event, None))
    memory = [*device.pending_copyin, (host, buffer.nbytes, PINNED)]   # its use ends with this copy
    device.pending_copyin = []

    def finish() -> list:
      check(cuda.cuCtxSetCurrent(device.context))
      check(cuda.cuEventSynchronize(event))
      values = np.frombuffer(ctypes.string_at(host, buffer.nbytes), _to_np_dtype(tensor.dtype))
      check(cuda.cuEventDestroy_v2(event))
      for part in memory: device.allocator.free(*part)
      return values.reshape(tensor.shape).tolist()

    def read() -> typing.Any: return finalizer()
    finalizer = weakref.finalize(read, finish)   # also if a failed step drops the function without a call
    finalizer.atexit = False   # the driver may be gone by then
    return read
