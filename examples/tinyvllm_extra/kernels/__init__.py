"""What tinygrad 0.14 lacks, and the engine is faster with: attention whose lanes share more, on tensor cores too and of
8 bits, matrices there and in a CPU's registers, a step that all cores of a CPU go through together, memory in huge
pages, powers of two without branches, the widest vectors, lowered kernels kept on disk, GPUs that do not take turns.
To be dropped as soon as tinygrad has them."""
import importlib

from tinygrad import Device
from tinygrad.runtime.ops_cpu import CPUAllocator

from tinyvllm.device import cpu_cores

from .cpu import CPUGraph, allocate, patch_exp2, widen
from .tinygrad_patches import patch_tinygrad
from .matmul import GateUp, Linear, Norm
from .tensor_cores import attend, block_parts


def extend(compiler: str) -> None:
  """Give the default device what it lacks. compiler: of C."""
  for better in (Linear, GateUp, Norm, attend, block_parts): setattr(Device.default, better.__name__, better)
  if cpu_cores():
    Device.default.graph = Device.default.graph or CPUGraph
    CPUAllocator._alloc = allocate   # type: ignore[method-assign]
    patch_exp2()
    widen(Device.default.renderer.compiler)
  if Device.DEFAULT == "CUDA":
    cuda = importlib.import_module(f"{__name__}.cuda")
    Device.default.graph = cuda.RangedGraph
    Device.default.start_reading = cuda.start_reading   # type: ignore[attr-defined]   # the engine looks for it
    compiler = cuda.take_machine_code(Device.default.renderer.compiler) or compiler
  patch_tinygrad(compiler)
