"""On CUDA: kernels of a captured step wait for no more than they have to, and neither does who reads its results; they
come as machine code."""
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, helpers
from tinygrad.device import BufferSpec
from tinygrad.dtype import _to_np_dtype
from tinygrad.runtime.autogen import nvrtc
from tinygrad.runtime.graph.cuda import CUDAGraph
from tinygrad.runtime.ops_cuda import check, cuda, init_c_var

PINNED = BufferSpec(host=True)


def take_machine_code(compiler: Any) -> str | None:
  """Have it from the compiler, as the driver takes long to make it of PTX; tinygrad prints PTX only. Returns the file
  of nvrtc, if there is one: nvcc needs none."""
  compiler.ptx = helpers.DEBUG >= 5
  return getattr(nvrtc.dll, "_name", None)


class RangedGraph(CUDAGraph):
  """A captured step whose kernels wait for those that use the same part of a buffer. tinygrad's wait for all that use
  any of it, and as most of a step's memory is one buffer, devices that read each other's results would take turns."""
  def new_node(self, bufs: Any, write: Any) -> Any: return super().new_node(self.calls[len(self.nodes)][2], write)


def start_reading(tensor: Tensor) -> Callable[[], Any]:
  """Copy a tensor to the host behind what the device has been given. What is returned waits for that and gives its
  numbers. tinygrad would wait for all that the device is given later, too."""
  if not tensor.numel(): return tensor.tolist
  device: Any = Device.default
  buffer: Any = tensor.uop.buffer
  check(cuda.cuCtxSetCurrent(device.context))
  host = device.allocator.alloc(buffer.nbytes, PINNED)
  check(cuda.cuMemcpyDtoHAsync_v2(host, buffer._buf, buffer.nbytes, None))
  event = init_c_var(cuda.CUevent, lambda x: check(cuda.cuEventCreate(ctypes.byref(x), 0)))
  check(cuda.cuEventRecord(event, None))
  uploads, device.pending_copyin = device.pending_copyin, []   # are done by then, too

  def read():
    check(cuda.cuEventSynchronize(event))
    check(cuda.cuEventDestroy_v2(event))
    values = np.frombuffer(ctypes.string_at(host, buffer.nbytes), _to_np_dtype(tensor.dtype))
    for memory in (*uploads, (host, buffer.nbytes, PINNED)): device.allocator.free(*memory)
    return values.reshape(tensor.shape).tolist()
  return read


def free_memory(device: str) -> int:
  """Free bytes of a CUDA device."""
  free = ctypes.c_size_t()
  check(cuda.cuCtxSetCurrent(Device[device].context))   # type: ignore[attr-defined]
  check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(ctypes.c_size_t())))
  return free.value
