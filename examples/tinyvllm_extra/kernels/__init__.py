"""Faster kernels: attention for any device and for tensor cores, an int8 or fp8 KV cache, matrix multiplication, and
changes to tinygrad (tinygrad_patches.py). Remove each as soon as tinygrad is as fast."""
import importlib

from tinygrad import Device

from . import tinygrad_patches
from .matmul import GateUp, Linear, Norm
from .tensor_cores import attend, block_parts


def extend(compiler: str) -> None:
  """Give the default device these kernels, which `tinyvllm.device.best` finds. compiler: the C compiler of a CPU."""
  for kernel in (Linear, GateUp, Norm, attend, block_parts): setattr(Device.default, kernel.__name__, kernel)
  if Device.DEFAULT == "CUDA":
    cuda = importlib.import_module(f"{__name__}.cuda")
    Device.default.start_reading = cuda.start_reading   # type: ignore[attr-defined]   # used by the runner
  tinygrad_patches.apply(compiler)
