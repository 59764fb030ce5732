"""Opens a device of tinygrad's, and tells what the engine must know of it: its compiler, free memory, types, limits.
Adds what tinygrad 0.14 lacks: lowered kernels kept on disk."""
import concurrent.futures, contextlib, copy, ctypes, dataclasses, functools, hashlib, importlib.metadata, os, pathlib
import pickle, shutil, sys, threading, zlib
from collections.abc import Callable
from typing import Any

from tinygrad import Device, UOp, codegen, device as devices, dtypes, helpers
from tinygrad.codegen import do_to_program
from tinygrad.engine import realize
from tinygrad.runtime.ops_cpu import CPUAllocator
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import Ops, PatternMatcher, UPat

from .config import logger
from .cpu import CPUGraph, allocate

WIDE = "-mprefer-vector-width=512"   # else clang takes half of AVX-512's vectors
# What Linux says of a CPU
CPU_FLAGS = pathlib.Path("/proc/cpuinfo").read_text() if os.path.exists("/proc/cpuinfo") else ""
# tinygrad's capture of a graph takes in whatever any thread computes meanwhile: one loads or captures at a time
exclusive = threading.RLock()


def renderer() -> Any:
  """Of the default device, also while a layer is traced, when tinygrad lets no device be asked for otherwise."""
  with helpers.Context(ALLOW_DEVICE_USAGE=1): return Device.default.renderer


def cpu_cores() -> int:
  """Cores that share a kernel, where the device is a CPU; else 0. A few read all that memory gives, all cost."""
  return 0 if renderer().has_local else min(8, renderer().global_max[0])


@functools.cache
def cpu_sums() -> int:
  """Of 16 float32, as many as a CPU's registers hold beside what is added to them: more spill, fewer wait."""
  return 8 if "avx512f" in CPU_FLAGS else 4


def largest_tensor() -> int:
  """Bytes that a tensor may have: 128 MiB are WebGPU's limit for a binding, and the least of OpenCL's for a buffer."""
  return 2**27 if Device.DEFAULT in ("CL", "WEBGPU") else 2**63


def free_memory(device: str) -> int:
  """Free bytes of the device; of the host where the device shares its memory or does not tell."""
  if device == "CUDA":
    from tinygrad.runtime.autogen import cuda
    free = ctypes.c_size_t()
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
    if cpu_cores():
      Device.default.graph = Device.default.graph or CPUGraph
      CPUAllocator._alloc = allocate   # type: ignore[method-assign]
      if cpu_sums() == 8 and WIDE not in renderer().compiler.args: renderer().compiler.args.append(WIDE)
      os.environ["DMC"] = "1"   # else tinygrad packs loads into float4, and clang stays in 128-bit vectors
      helpers.getenv.cache_clear()   # type: ignore[attr-defined]
    if Device.DEFAULT == "CUDA":
      from tinygrad.runtime.autogen import nvrtc
      compiler = getattr(nvrtc.dll, "_name", compiler)   # nvcc needs no nvrtc
      # Machine code, as the driver takes long to make it of PTX; tinygrad prints PTX only
      renderer().compiler.ptx = helpers.DEBUG >= 5
    patch_tinygrad(compiler or os.environ["CC"])
    return free_memory(Device.DEFAULT)
  except Exception as e:   # a backend fails to open in its own way
    raise RuntimeError(f"tinygrad finds no usable device ({str(e).strip().splitlines()[0]}). For the CPU: pip install "
                       "'tinyvllm[cpu]', which brings a compiler; or name another: DEV=CUDA, METAL, AMD, ...") from e


@dataclasses.dataclass
class KernelFolder:
  """tinygrad's lower_and_compile, but for kernels that a run with the same compiler has left in a folder. A new one is
  compiled in another thread while the next is lowered."""
  path: pathlib.Path
  compiler: tuple
  compiled: int = 0   # which were not there
  thread = concurrent.futures.ThreadPoolExecutor(1, "tinyvllm-compiler")

  def __call__(self, linear: UOp) -> UOp:
    found = [realize._get_call_to_compile(call) for call in linear.src]   # kernel and renderer; None: nothing to do
    kernels = {codegen.to_program_key(*kernel): kernel for kernel in found if kernel}
    begun = {key: self.begin(*kernel) for key, kernel in kernels.items() if key not in codegen.to_program_cache}
    codegen.to_program_cache |= {key: finish() for key, finish in begun.items()}
    return linear.replace(src=tuple(call.replace(src=(codegen.to_program(*kernel), *call.src[1:])) if kernel else call
                                    for call, kernel in zip(linear.src, found, strict=True)))

  def begin(self, ast: UOp, renderer: Any) -> Callable[[], UOp]:
    """Read a kernel's program, or lower it. What it returns waits for the compiler."""
    flags = getattr(renderer.compiler, "args", None)
    key = codegen.to_program_key(ast, renderer), ast.tag, importlib.metadata.version("tinygrad"), self.compiler, flags
    path = self.path / hashlib.sha256(repr(key).encode()).hexdigest()
    with contextlib.suppress(OSError, zlib.error):   # it is not there, or damaged
      return functools.partial(pickle.loads, zlib.decompress(path.read_bytes()))
    self.compiled += 1
    beside = copy.copy(renderer)
    beside.compiler = devices.Compiler()   # which returns the source
    program = do_to_program(ast, beside)
    binary = self.thread.submit(renderer.compiler.compile, program.src[-1].arg.decode())

    def finish():
      done = program.replace(src=(*program.src[:-1], UOp(Ops.BINARY, arg=binary.result())))
      new = path.with_suffix(f".{os.getpid()}")
      with contextlib.suppress(OSError):   # the disk is full
        new.write_bytes(zlib.compress(pickle.dumps(done)))
        new.replace(path)   # at once, as another process may read it
      return done
    return finish


def num_compiled() -> int: return getattr(realize.lower_and_compile, "compiled", 0)   # kernels that no file had


def whole_words(ctx: Any, x: UOp) -> str | None:
  """In C++, halves that are the parts of words: a compiler takes these apart and joins them, where they come singly."""
  words = [half.src[0].src[0] for half in x.src[::2] if half.op is Ops.BITCAST and half.src[0].op is Ops.CAST]
  upper = UOp.const(16).cast(dtypes.uint32)
  parts = [part for word in words for part in (word, word.alu(Ops.SHR, upper))]
  if x.src != tuple(part.cast(dtypes.uint16).bitcast(dtypes.half) for part in parts): return None
  return f"tg_bitcast<{ctx.render_type(x)}>(make_uint{len(words)}({', '.join(ctx[word] for word in words)}))"


@functools.cache
def patch_tinygrad(compiler: str) -> None:
  """Make captures cheap. compiler: of kernels, whose file's size and age tell its version without a start of it."""
  rules = PatternMatcher([(UPat(Ops.STACK, dtypes.half, name="x"), whole_words)])
  CUDARenderer.string_rewrite = rules + CUDARenderer.string_rewrite
  shape = vars(UOp)["_shape"]
  # A slice in a loop takes long to check
  shape.fxn = lambda x, of=shape.fxn: x.src[2].as_shape if x.op is Ops.SHRINK and x.src[1].ranges else of(x)
  if helpers.CACHELEVEL < 1: return
  file = os.stat(shutil.which(compiler, os.F_OK) or os.devnull)
  folder = pathlib.Path(helpers.CACHEDB).parent / "tinyvllm"
  realize.lower_and_compile = KernelFolder(folder, (compiler, file.st_size, file.st_mtime_ns))
  try: folder.mkdir(parents=True, exist_ok=True)
  except OSError as e: logger.warning(f"each start compiles all kernels, as {folder} cannot be made: {e.strerror}")
