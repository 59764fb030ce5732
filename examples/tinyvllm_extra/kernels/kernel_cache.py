"""Caches on disk of lowered and compiled kernels, and of captured steps: a later process neither lowers nor traces
them."""
import contextlib, dataclasses, functools, hashlib, importlib.metadata, io, os, pathlib, pickle, types, typing, zlib

from tinygrad import Tensor, UOp, codegen, helpers
from tinygrad.codegen import do_to_program
from tinygrad.engine.jit import CapturedJit, _TinyJit
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import Ops

import tinyvllm
from tinyvllm.backend import Backend, renderer
from tinyvllm.runner import GraphKey, Runner
from tinyvllm_extra.graph_policy import PaddedGraphs

from . import cpu, matmul

TINYGRAD = importlib.metadata.version("tinygrad")
PATCHES = pathlib.Path(__file__).with_name("tinygrad_patches.py")   # change the program of an unchanged kernel
# Packages whose code and objects may determine a step; a step with others is not stored, since they may change
PACKAGES = {"tinyvllm", "tinyvllm_extra", "tinygrad", "builtins", "collections", "enum", "functools", "pathlib"}


@dataclasses.dataclass
class KernelFolder:
  """A replacement for tinygrad's do_to_program that reads the kernels of earlier runs with the same compiler."""
  path: pathlib.Path
  compiler: tuple     # name, size and modification time

  def __call__(self, ast: UOp, renderer: Renderer) -> UOp:
    path = self.file(renderer, ast.key, ast.tag)
    with contextlib.suppress(OSError, zlib.error):   # the file is missing or damaged
      return pickle.loads(zlib.decompress(path.read_bytes()))
    PaddedGraphs.num_kernels += 1
    program = do_to_program(ast, renderer)
    write(path, zlib.compress(pickle.dumps(program)))
    return program

  def file(self, renderer: Renderer, *content: object) -> pathlib.Path:
    """Return the file of what `renderer` makes of `content` with these versions, flags and settings."""
    settings = [x.value for x in codegen.to_program_config]
    version = TINYGRAD, tinyvllm.__version__, PATCHES.read_bytes(), cpu.EXP2
    compiler = type(renderer), renderer.target, getattr(renderer.compiler, "args", None), self.compiler
    return self.path / hashlib.sha256(repr((content, compiler, settings, version)).encode()).hexdigest()


def write(path: pathlib.Path, data: bytes) -> None:
  """Write a file at once, since another process may be reading it. Does nothing if the disk is full."""
  new = path.with_suffix(f".{os.getpid()}")
  with contextlib.suppress(OSError):
    new.write_bytes(data)
    new.replace(path)


@functools.cache
def source_hash(*folders: pathlib.Path) -> str:
  """Return a hash of all code in these folders."""
  files = [x for kind in ("py", "cu*", "c", "json") for folder in folders for x in folder.rglob(f"*.{kind}")]
  return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


class StoredStep(pickle.Pickler):
  """The file of a step, by the code, the state that its runner reads, and the key of its graph. It pickles this state,
  then the step. A buffer becomes its number, in order of appearance."""
  def __init__(self, folder: KernelFolder, runner: Runner, words: Tensor, key: GraphKey):
    """Raises PicklingError if other packages determine the step."""
    self.stream = io.BytesIO()
    super().__init__(self.stream)
    self.numbers: dict[UOp, int] = {}
    tables = [x for x in vars(runner).values() if isinstance(x, Tensor)]   # a subclass may have more
    self.dump([runner.model, runner.config, runner.logits, runner.kv_caches, runner.ropes, tables, words])
    code = source_hash(pathlib.Path(tinyvllm.__file__).parent, pathlib.Path(__file__).parents[1])
    self.path = folder.file(renderer(), self.stream.getvalue(), key, code, matmul.choices)

  def persistent_id(self, x: object) -> tuple | None:
    if isinstance(x, Tensor): return self.persistent_id(x.uop.base), x.shape
    if not isinstance(x, UOp) or x.op is not Ops.BUFFER or x.arg.device is None: return None
    return self.numbers.setdefault(x, len(self.numbers)), x.device, *x.shape, x.dtype

  def reducer_override(self, x: object) -> typing.Any:
    """Keep of a compiled kernel only what runs it, and of a backend its class."""
    if isinstance(x, Backend): return type(x), ()
    if isinstance(x, type | types.FunctionType) and x.__module__.partition(".")[0] not in PACKAGES:
      raise pickle.PicklingError(f"{x} may change")
    if not isinstance(x, UOp) or x.op is not Ops.PROGRAM: return NotImplemented
    sink, instructions, source, binary = x.src
    parameters = tuple(op for op in instructions.src if op.op is Ops.PARAM)
    kept = UOp.sink(arg=sink.arg), instructions.replace(src=parameters), source.replace(arg=""), binary
    return UOp, (x.op, x.dtype, kept, x.arg)

  def load(self) -> tuple[UOp, list[UOp]]:
    """Read the step, with the buffers of the runner's state and, for its own ones, new buffers."""
    buffers = dict(enumerate(self.numbers))   # by number
    class Reader(pickle.Unpickler):
      def persistent_load(self, x: tuple) -> UOp: return buffers.setdefault(x[0], UOp.new_buffer(*x[1:]))
    return Reader(io.BytesIO(zlib.decompress(self.path.read_bytes()))).load()

  def save(self, step: CapturedJit) -> None:
    self.stream.truncate(self.stream.seek(0))
    self.clear_memo()
    self.dump((step._linear, [x.uop for x in step.ret]))
    write(self.path, zlib.compress(self.stream.getvalue(), 1))


def restore(runner: Runner, graph: object, key: GraphKey) -> StoredStep | None:
  """Give a graph that is not captured its step, if that is stored. Return where to save it if it is not."""
  folder = codegen.do_to_program
  if not (isinstance(graph, _TinyJit) and isinstance(folder, KernelFolder) and helpers.CACHELEVEL >= 2
          and len(runner.model.devices.names) == 1): return None
  stored: StoredStep | None = None
  # An object cannot be pickled, or the file is missing or damaged
  with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError, OSError, zlib.error):
    stored = StoredStep(folder, runner, runner.graphs[key][0], key)
    linear, outputs = stored.load()
    graph.captured = CapturedJit([Tensor(x) for x in outputs], linear, [], [])
    graph.cnt += 1
  return None if graph.captured else stored
