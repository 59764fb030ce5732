"""All patches of tinygrad itself. `apply` installs them when a device is opened; an import changes nothing. Each patch
states its reason and when to remove it."""
import functools, operator, os, pathlib, shutil, threading
from collections.abc import Callable

from tinygrad import Device, codegen, helpers
from tinygrad.device import BufferSpec, LRUAllocator
from tinygrad.engine.jit import CapturedJit, GraphRunner
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.runtime.ops_cpu import CPUAllocator
from tinygrad.uop.ops import Ops

from tinyvllm.backend import cpu_cores, renderer
from tinyvllm.config import logger

from . import cpu, kernel_cache

VERSION = "0.14.0"   # the patches were checked with it; for the next version, see examples/docs/tinygrad.md


def wrap(owner: type, name: str, function: Callable[..., object]) -> None:
  """Replace a method of a tinygrad class. function: gets the object, tinygrad's method and the method's arguments."""
  setattr(owner, name, functools.partialmethod(function, getattr(owner, name)))


@functools.cache
def apply(device: str) -> None:
  """Apply the patches for the default device, `device`. A repeated call changes nothing."""
  compiler = os.environ["CC"]
  if kernel_cache.TINYGRAD != VERSION:
    logger.warning(f"tinygrad {kernel_cache.TINYGRAD} is installed; tinyvllm needs tinygrad=={VERSION}")
  if cpu_cores(): patch_cpu()
  if device == "CUDA": compiler = patch_cuda() or compiler
  # Lock the cache of freed buffers: engines on several threads copy to and from a device at the same time, and tinygrad
  # takes a buffer in two operations. Checked with 0.14.0. Remove when LRUAllocator is thread-safe
  lock = threading.RLock()
  def alloc_locked(self: LRUAllocator, alloc: Callable, size: int, options: BufferSpec | None = None) -> object:
    with lock: return alloc(self, size, options)
  wrap(LRUAllocator, "alloc", alloc_locked)
  # Replace do_to_program with a KernelFolder, and lower kernels in this process, which has the patches. tinygrad lowers
  # all kernels again at each start. Checked with 0.14.0. Remove when tinygrad caches lowered kernels
  helpers.PARALLEL.value = 0
  renderer().compiler.cachekey = None   # another cache, whose keys lack the compiler's version
  if helpers.CACHELEVEL < 1: return
  file = os.stat(shutil.which(compiler, os.F_OK) or os.devnull)   # its size and time identify the version
  codegen.do_to_program = kernel_cache.KernelFolder(cache_folder(), (compiler, file.st_size, file.st_mtime_ns))


def patch_cpu() -> None:
  """Apply the patches for a CPU, or for a device with its renderer."""
  # Run captured steps with CPUGraph. tinygrad needs 50 us per kernel, and does not run its threads in parallel.
  # Checked with 0.14.0. Remove when tinygrad runs a CPU's graph on several threads
  Device.default.graph = cpu.CPUGraph
  # Allocate CPU buffers in huge pages. tinygrad uses pages of 4 KiB, which halves the memory bandwidth. Checked with
  # 0.14.0. Remove when CPUAllocator requests huge pages
  wrap(CPUAllocator, "_alloc", cpu.allocate)
  # Only build the steps that a thread captures in advance. tinygrad runs each captured step once. Checked with
  # 0.14.0. Remove when TinyJit can capture without running
  wrap(CapturedJit, "__call__", cpu.run_captured)
  # Render exp2 as a call of cpu.EXP2. tinygrad's expansion has branches, which compilers do not vectorize. Checked with
  # 0.14.0. Remove when softmax is equally fast without this patch
  ClangRenderer.code_for_op = {**ClangRenderer.code_for_op, Ops.EXP2: lambda x, dtype: f"tv_exp2({x})"}
  wrap(ClangRenderer, "_render_defines", lambda self, defines, uops: [cpu.EXP2, *defines(self, uops)])
  # Make clang use the widest vectors. It prefers 256 bits on AVX-512, and tinygrad's float4 loads limit it to 128.
  # Checked with 0.14.0. Remove when kernels.py (tests/benchmarks) shows the same speed without this
  if cpu.AVX512 and isinstance(renderer(), ClangRenderer): renderer().compiler.args.append("-mprefer-vector-width=512")
  os.environ["DMC"] = "1"   # turns float4 off
  helpers.getenv.cache_clear()   # type: ignore[attr-defined]


def patch_cuda() -> str | None:
  """Apply the patches for CUDA. Return nvrtc's file, if known."""
  from tinygrad.runtime.autogen import nvrtc
  from tinygrad.runtime.graph.cuda import CUDAGraph
  from tinygrad.runtime.ops_cuda import CUDAProgram
  from tinygrad.runtime.support.compiler_cuda import NVRTCCompiler   # all slow to import
  # Make a captured kernel wait only for kernels that use the same range of a buffer, and for none that another of them
  # waits for. tinygrad's wait for any use of the buffer: most of a step's memory is one buffer, so that devices that
  # read each other's results would serialize. And a second edge delays a kernel by 2 us. Checked with 0.14.0. Remove
  # when CUDAGraph compares ranges of buffers and omits such edges
  wrap(CUDAGraph, "_access_resources", required_nodes)
  # Load kernels whose name ends in smemN with N bytes of dynamic shared memory. tinygrad's have none, and 48 KiB at
  # most. Checked with 0.14.0. Remove when a PROGRAM says how many bytes it needs
  def shared_bytes(name: str) -> int: return int(name.partition("_smem")[2] or 0)
  wrap(CUDAProgram, "__init__", lambda self, load, owner, elf: load(self, owner, elf, shared_bytes(elf.name)))
  # Have nvrtc return machine code, for all instructions of Hopper. tinygrad requests PTX, which the driver compiles
  # slowly at each start, and has no wgmma. Checked with 0.14.0. Remove when NVRTCCompiler returns cubins for CUDA
  def compile_cubin(self: NVRTCCompiler, _: object, source: str) -> bytes:   # on all devices
    self.ptx = helpers.DEBUG >= 5   # tinygrad prints PTX only
    self.compile_options[0] = f"--gpu-architecture={self.arch.replace('sm_90', 'sm_90a')}"   # has wgmma
    return self.compile(source)
  wrap(NVRTCCompiler, "compile_cached", compile_cubin)
  return getattr(nvrtc.dll, "_name", None)


def required_nodes(graph: GraphRunner, access: Callable, _: object, write: list[int], new_dependency: object) -> list:
  """Return the nodes that a CUDAGraph's next kernel must wait for. A node is left out if another one waits for it.
  access: tinygrad's method, which returns all nodes that use the given buffers."""
  nodes = access(graph, graph.calls[len(vars(graph)["nodes"])][2], write, new_dependency)
  waits = vars(graph).setdefault("waits", {})   # by id of a node: itself, the highest bit, and all that it waits for
  sets = [waits[id(node)] for node in nodes]
  waits[id(new_dependency)] = functools.reduce(operator.or_, sets, 1 << len(vars(graph)["nodes"]))
  return [node for node, x in zip(nodes, sets, strict=True) if sum(y >> x.bit_length() - 1 & 1 for y in sets) == 1]


def cache_folder() -> pathlib.Path: return pathlib.Path(helpers.CACHEDB).parent / "tinyvllm"
