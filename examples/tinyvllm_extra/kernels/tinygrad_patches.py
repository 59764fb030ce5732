"""Lowered kernels kept on disk, cheap captures, and halves that are parts of words in CUDA's C++."""
import concurrent.futures, contextlib, copy, dataclasses, functools, hashlib, importlib.metadata, os, pathlib, pickle
import shutil, zlib
from collections.abc import Callable
from typing import Any

from tinygrad import UOp, codegen, device as devices, dtypes, helpers
from tinygrad.codegen import do_to_program
from tinygrad.engine import realize
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import Ops, PatternMatcher, UPat

from tinyvllm.config import logger

from .cpu import EXP2


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
    version = importlib.metadata.version("tinygrad"), EXP2
    key = codegen.to_program_key(ast, renderer), ast.tag, version, self.compiler, flags
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


def whole_words(ctx: Any, x: UOp) -> str | None:
  """In C++, halves that are the parts of words: a compiler takes these apart and joins them, where they come singly."""
  words = [half.src[0].src[0] for half in x.src[::2] if half.op is Ops.BITCAST and half.src[0].op is Ops.CAST]
  upper = UOp.const(16).cast(dtypes.uint32)
  parts = [part for word in words for part in (word, word.alu(Ops.SHR, upper))]
  if x.src != tuple(part.cast(dtypes.uint16).bitcast(dtypes.half) for part in parts): return None
  return f"tg_bitcast<{ctx.render_type(x)}>(make_uint{len(words)}({', '.join(ctx[word] for word in words)}))"


def num_compiled() -> int:
  """The number of kernels compiled by this process, which no file had."""
  return getattr(realize.lower_and_compile, "compiled", 0)


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
