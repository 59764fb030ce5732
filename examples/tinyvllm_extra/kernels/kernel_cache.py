"""A cache of lowered and compiled kernels on disk."""
import contextlib, dataclasses, hashlib, importlib.metadata, os, pathlib, pickle, zlib

from tinygrad import UOp, codegen
from tinygrad.codegen import do_to_program
from tinygrad.renderer import Renderer

from tinyvllm import __version__

from .cpu import EXP2

TINYGRAD = importlib.metadata.version("tinygrad")
PATCHES = pathlib.Path(__file__).with_name("tinygrad_patches.py")   # change the program of an unchanged kernel


@dataclasses.dataclass
class KernelFolder:
  """A replacement for tinygrad's do_to_program that reads the kernels of earlier runs with the same compiler."""
  path: pathlib.Path
  compiler: tuple     # name, size and modification time
  compiled = 0   # kernels of this process that were not in a folder; counted in the class

  def __call__(self, ast: UOp, renderer: Renderer) -> UOp:
    path = self.file(renderer, ast.key, ast.tag)
    with contextlib.suppress(OSError, zlib.error):   # the file is missing or damaged
      return pickle.loads(zlib.decompress(path.read_bytes()))
    KernelFolder.compiled += 1
    program = do_to_program(ast, renderer)
    write(path, zlib.compress(pickle.dumps(program)))
    return program

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
