"""Opens a device of tinygrad's, and tells what the engine must know of it: its compiler, free memory, types, limits.
Also what kernels are written with: a custom kernel gets its buffers, and says as UOps what to loop over, what each
thread does and where results go."""
import ctypes, importlib.util, os, shutil, sys, threading
from typing import Any

from tinygrad import Device, UOp, dtypes, helpers
from tinygrad.codegen.opt import Opt
from tinygrad.engine import realize
from tinygrad.uop.ops import AxisType, KernelInfo, sint

from .config import logger

# tinygrad's capture of a graph takes in whatever any thread computes meanwhile: one loads or captures at a time
exclusive = threading.RLock()


def renderer() -> Any:
  """Of the default device, also while a layer is traced, when tinygrad lets no device be asked for otherwise."""
  with helpers.Context(ALLOW_DEVICE_USAGE=1): return Device.default.renderer


def cpu_cores() -> int:
  """Cores that share a kernel, where the device is a CPU; else 0. A few read all that memory gives, all cost."""
  return 0 if renderer().has_local else min(8, renderer().global_max[0])


def largest_tensor() -> int:
  """Bytes that a tensor may have: 128 MiB are WebGPU's limit for a binding, and the least of OpenCL's for a buffer."""
  return 2**27 if Device.DEFAULT in ("CL", "WEBGPU") else 2**63


def free_memory(device: str) -> int:
  """Free bytes of the device; of the host where the device shares its memory or does not tell."""
  if device.startswith("CUDA"):
    from tinygrad.runtime.autogen import cuda
    free = ctypes.c_size_t()
    cuda.cuCtxSetCurrent(Device[device].context)   # type: ignore[attr-defined]
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(ctypes.c_size_t()))
    return free.value
  return os.sysconf(os.sysconf_names.get("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")


def pick_dtype(asked: str) -> str:
  """The name of the dtype asked for, or where the device lacks it, of one that it has; a line of the log says so."""
  if asked == "auto": asked = "float32" if Device.DEFAULT == "CPU" else "float16"
  taken = next(x for x in (asked, "float16", "float32") if getattr(dtypes, x) in renderer().supported_dtypes())
  if taken != asked: logger.warning(f"{Device.DEFAULT} has no {asked}: computing in {taken}")
  return taken


def find_compiler() -> str | None:
  """The C compiler for a CPU: $CC, but for gcc, which will not do, or clang on the PATH, or beside this Python, where
  pip puts it; None if there is none."""
  named = os.environ.get("CC") or "echo"   # echo: as open_device leaves it where there is none
  if named != "echo" and "gcc" not in os.path.basename(named): return named
  return shutil.which("clang") or shutil.which("clang", path=os.path.dirname(sys.executable))


def open_device() -> int:
  """Open tinygrad's default device, and return its free bytes. Raises RuntimeError where none opens."""
  compiler = find_compiler()
  os.environ["CC"] = compiler or "echo"   # tinygrad wants a command, though it may never need what that makes
  try:
    if compiler is None: helpers.DEV.value = f"{repr(helpers.DEV) or Device.DEFAULT};CPU:X86"   # GPUs open one, too
    if Device.DEFAULT == "CPU" and (compiler is None or helpers.DEV.renderer == "X86"):
      raise RuntimeError("no C compiler found, and tinygrad's own assembler will not do")
    renderer()   # opens it
    if importlib.util.find_spec("tinyvllm_extra"):   # without it starts take longer, and steps on a CPU
      importlib.import_module("tinyvllm_extra.kernels").extend(os.environ["CC"])
  except Exception as e:   # a backend fails to open in its own way
    raise RuntimeError(f"tinygrad finds no usable device ({str(e).strip().splitlines()[0]}). For the CPU: pip install "
                       "'tinyvllm[cpu]', which brings a compiler; or name another: DEV=CUDA, METAL, AMD, ...") from e
  return free_memory(Device.DEFAULT)


def best(kind: Any) -> Any:
  """The class or function itself, or what does the same faster here, which a package beside the engine brings."""
  return getattr(Device.default, kind.__name__, kind)


def num_compiled() -> int: return getattr(realize.lower_and_compile, "compiled", 0)   # kernels that no file had


def axes(first: int, *extents: sint, kind: AxisType = AxisType.WEAK) -> list[UOp]:
  """Of these extents, numbered from the first."""
  return [UOp.range(extent, first + i, kind) for i, extent in enumerate(extents)]


def kernel_of(name: str, store: UOp, opts: tuple[Opt, ...] | None = None) -> UOp:
  """A kernel of this store for all axes. opts: what tinygrad does to it; None: what it sees fit."""
  return store.end(*store.ranges).sink(arg=KernelInfo(name=name, opts_to_apply=opts))
