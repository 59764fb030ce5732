"""A cache of lowered and compiled kernels on disk."""
import concurrent.futures, contextlib, copy, dataclasses, functools, hashlib, importlib.metadata, os, pathlib, pickle
import zlib
from collections.abc import Callable

from tinygrad import UOp, codegen, device as devices
from tinygrad.codegen import do_to_program
from tinygrad.engine import realize
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import Ops

from tinyvllm import __version__

from .cpu import EXP2


TINYGRAD = importlib.metadata.version("tinygrad")
PATCHES = pathlib.Path(__file__).with_name("tinygrad_patches.py")   # change the program of an unchanged kernel


@dataclasses.dataclass
class KernelFolder:
  """A replacement for tinygrad's lower_and_compile that reads the kernels of earlier runs with the same compiler. It
  compiles a new kernel in another thread while it lowers the next one."""
  path: pathlib.Path
  compiler: tuple     # name, size and modification time
  compiled = 0   # kernels of this process that were not in a folder; counted in the class
  thread = concurrent.futures.ThreadPoolExecutor(1, "tinyvllm-compiler")

  def __call__(self, linear: UOp) -> UOp:
    calls = [realize._get_call_to_compile(call) for call in linear.src]   # kernel and renderer, or None
    kernels = {codegen.to_program_key(*kernel): kernel for kernel in calls if kernel}
    kernels = {key: kernel for key, kernel in kernels.items() if key not in codegen.to_program_cache}
    pending = {key: self.begin(*kernel) for key, kernel in kernels.items()}
    codegen.to_program_cache |= {key: finish() for key, finish in pending.items()}
    return linear.replace(src=tuple(call.replace(src=(codegen.to_program(*kernel), *call.src[1:])) if kernel else call
                                    for call, kernel in zip(linear.src, calls, strict=True)))

  def begin(self, ast: UOp, renderer: Renderer) -> Callable[[], UOp]:
    """Read a kernel's program, or lower it and start the compiler. Return a function that waits for the program."""
    path = self.file(renderer, ast.key, ast.tag)
    with contextlib.suppress(OSError, zlib.error):   # the file is missing or damaged
      return functools.partial(pickle.loads, zlib.decompress(path.read_bytes()))
    KernelFolder.compiled += 1
    source_renderer = copy.copy(renderer)
    source_renderer.compiler = devices.Compiler()   # returns the source
    program = do_to_program(ast, source_renderer)
    binary = self.thread.submit(renderer.compiler.compile, program.src[-1].arg.decode())

    def finish():
      compiled = program.replace(src=(*program.src[:-1], UOp(Ops.BINARY, arg=binary.result())))
      write(path, zlib.compress(pickle.dumps(compiled)))
      return compiled
    return finish

  def file(self, renderer: Renderer, *content: object) -> pathlib.Path:
    """Return the file of what `renderer` makes of `content` with these versions, flags and settings."""
    settings = [x.value for x in codegen.to_program_config]
    version = TINYGRAD, __version__, PATCHES.read_bytes(), EXP2
    compiler = type(renderer), renderer.target, getattr(renderer.compiler, "args", None), self.compiler
    return self.path / hashlib.sha256(repr((content, compiler, settings, version)).encode()).hexdigest()


def write(path: pathlib.Path, data: bytes) -> None:
  """Write a file at once, since another process may be reading it. Does nothing if the disk is full."""
  new = path.with_suffix(f".{os.getpid()}")
  with contextlib.suppress(OSError):
    new.write_bytes(data)
    new.replace(path)
