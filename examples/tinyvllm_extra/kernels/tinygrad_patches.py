"""All patches of tinygrad itself. `apply` installs them when a device is opened; an import changes nothing. Each patch
states its reason and when to remove it."""
import functools, os, pathlib, shutil, threading
from typing import Any

from tinygrad import Device, UOp, codegen, helpers
from tinygrad.device import BufferSpec, LRUAllocator, TinyELF
from tinygrad.engine.jit import CapturedJit
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.runtime.ops_cpu import CPUAllocator
from tinygrad.uop.ops import Ops

from tinyvllm.backend import cpu_cores, renderer
from tinyvllm.config import logger

from .cpu import AVX512, EXP2, CPUGraph, allocate, run_captured
from .kernel_cache import TINYGRAD, KernelFolder

replace = setattr   # a method of a tinygrad class; type checkers refuse an assignment to it
VERSION = "0.14.0"   # the patches were checked with it; for the next version, see examples/docs/tinygrad.md


@functools.cache
def apply(device: str) -> None:
  """Apply the patches for the default device, `device`. A repeated call changes nothing."""
  compiler = os.environ["CC"]
  if TINYGRAD != VERSION:
    logger.warning(f"tinygrad {TINYGRAD} is installed; tinyvllm needs tinygrad=={VERSION}")
  if cpu_cores():
    # Run captured steps with CPUGraph. tinygrad needs 50 us per kernel, and does not run its threads in parallel.
    # Checked with 0.14.0. Remove when tinygrad runs a CPU's graph on several threads
    Device.default.graph = CPUGraph
    # Allocate CPU buffers in huge pages. tinygrad uses pages of 4 KiB, which halves the memory bandwidth. Checked with
    # 0.14.0. Remove when CPUAllocator requests huge pages
    replace(CPUAllocator, "_alloc", allocate)
    # Only build the steps that a thread captures in advance. tinygrad runs each captured step once. Checked with
    # 0.14.0. Remove when TinyJit can capture without running
    replace(CapturedJit, "__call__", run_captured)
    compute_exp2_without_branches()
    # Make clang use the widest vectors. It prefers 256 bits on AVX-512, and tinygrad's float4 loads limit it to 128.
    # Checked with 0.14.0. Remove when kernels.py (tests/benchmarks) shows the same speed without this
    if AVX512 and isinstance(renderer(), ClangRenderer): renderer().compiler.args.append("-mprefer-vector-width=512")
    os.environ["DMC"] = "1"   # turns float4 off
    helpers.getenv.cache_clear()   # type: ignore[attr-defined]
  if device == "CUDA":
    order_kernels_by_ranges()
    use_dynamic_shared_memory()
    compiler = compile_machine_code() or compiler
  lock_allocators()
  # Replace do_to_program with a KernelFolder, and lower kernels in this process, which has the patches. tinygrad lowers
  # all kernels again at each start. Checked with 0.14.0. Remove when tinygrad caches lowered kernels
  helpers.PARALLEL.value = 0
  renderer().compiler.cachekey = None   # another cache, whose keys lack the compiler's version
  if helpers.CACHELEVEL < 1: return
  file = os.stat(shutil.which(compiler, os.F_OK) or os.devnull)   # its size and time identify the version
  codegen.do_to_program = KernelFolder(cache_folder(), (compiler, file.st_size, file.st_mtime_ns))


def compute_exp2_without_branches() -> None:
  """Render exp2 as a call of cpu.EXP2. tinygrad's expansion has branches, which compilers do not vectorize.
  Checked with 0.14.0. Remove when softmax is equally fast without this patch."""
  defines = ClangRenderer._render_defines
  def with_exp2(self: ClangRenderer, uops: list[UOp]) -> list[str]: return [EXP2, *defines(self, uops)]
  ClangRenderer.code_for_op = {**ClangRenderer.code_for_op, Ops.EXP2: lambda x, dtype: f"tv_exp2({x})"}
  replace(ClangRenderer, "_render_defines", with_exp2)


def lock_allocators() -> None:
  """Lock the cache of freed buffers: engines on several threads copy to and from a device at the same time, and
  tinygrad takes a buffer in two operations. Checked with 0.14.0. Remove when LRUAllocator is thread-safe."""
  lock, alloc = threading.RLock(), LRUAllocator.alloc

  def alloc_locked(self: LRUAllocator, size: int, options: BufferSpec | None = None) -> object:
    with lock: return alloc(self, size, options)
  replace(LRUAllocator, "alloc", alloc_locked)


def order_kernels_by_ranges() -> None:
  """Capture CUDA steps with RangedGraph. tinygrad orders kernels by whole buffers, which serializes devices that
  read each other's results. Checked with 0.14.0. Remove when CUDAGraph compares ranges of buffers."""
  from tinygrad.runtime.graph.cuda import CUDAGraph   # slow to import

  class RangedGraph(CUDAGraph):
    """A captured step whose kernels wait only for kernels that use the same range of a buffer. tinygrad's graphs wait
    for any use of the buffer. Most of a step's memory is one buffer, so that devices would serialize."""
    def new_node(self, bufs: list, write: list[int]) -> tuple:
      return super().new_node(self.calls[len(self.nodes)][2], write)
  Device.default.graph = RangedGraph


def use_dynamic_shared_memory() -> None:
  """Load kernels whose name ends in smemN with N bytes of dynamic shared memory. tinygrad's have none, and 48 KiB at
  most. Checked with 0.14.0. Remove when a PROGRAM says how many bytes it needs."""
  from tinygrad.runtime.ops_cuda import CUDAProgram   # slow to import
  load = CUDAProgram.__init__
  def load_with_shared_memory(self: CUDAProgram, dev: Any, obj: TinyELF) -> None:
    load(self, dev, obj, int(obj.name.partition("_smem")[2] or 0))
  replace(CUDAProgram, "__init__", load_with_shared_memory)


def compile_machine_code() -> str | None:
  """Have nvrtc return machine code, for all instructions of Hopper. tinygrad requests PTX, which the driver compiles
  slowly at each start, and has no wgmma.
  Checked with 0.14.0. Remove when tinygrad's NVRTCCompiler returns cubins for CUDA. Return nvrtc's file, if known."""
  from tinygrad.runtime.autogen import nvrtc
  compiler = renderer().compiler
  compiler.ptx = helpers.DEBUG >= 5   # tinygrad prints PTX only
  compiler.compile_options[0] = f"--gpu-architecture={compiler.arch.replace('sm_90', 'sm_90a')}"   # has wgmma
  return getattr(nvrtc.dll, "_name", None)


def cache_folder() -> pathlib.Path: return pathlib.Path(helpers.CACHEDB).parent / "tinyvllm"
