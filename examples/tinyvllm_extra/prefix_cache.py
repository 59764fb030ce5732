"""The prefix cache on disk: the blocks in which something is found, with their keys, so that an engine that starts anew
has what another had computed. Only an engine whose blocks would be the same takes a file, a block whose checksum is
wrong is never found, and a file is replaced as a whole or not at all."""
import collections, contextlib, functools, hashlib, json, math, os, pathlib, tempfile, time, zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes

from tinyvllm.config import InputError, ModelConfig, check, logger, read_json
from tinyvllm.device import kernel_of
from tinyvllm.engine import LLMEngine
from tinyvllm.weights import DTYPES, INTEGERS, read_files

BEGIN = b'{"__metadata__": {"format": "'   # of a file's header
FORMAT = "1"     # another one wherever keys, blocks or the file are made otherwise
MOST = 2**26     # bytes of blocks that are on their way at once, but for one that is larger
PIECE = 2**16    # bytes of a weight that are looked at, in four places


def fingerprint(folder: pathlib.Path, shape: ModelConfig) -> str:
  """Of a model's shape and of pieces of each of its weights: those of a fine-tune differ, and few bytes are read."""
  quantized = read_json(folder / "config.json").get("quantization_config")
  digest = hashlib.sha256(repr((shape, quantized)).encode())
  for name, (path, kind, mode, offset, axes) in sorted(read_files(folder, DTYPES | INTEGERS).items()):
    digest.update(repr((name, np.dtype(kind).str, axes)).encode())
    weight = np.memmap(path, np.uint8, mode, offset, (math.prod(axes) * np.dtype(kind).itemsize,))
    for place in range(0, len(weight), max(PIECE, len(weight) // 4)): digest.update(weight[place:place + PIECE].data)
  return digest.hexdigest()[:32]


def identity(engine: LLMEngine) -> dict[str, str]:
  """What an engine's blocks and keys hang on. Its models' files are read the first time only, which should be soon: by
  the time that a server ends others may lie in their place."""
  known = vars(engine).get("blocks_identity")
  if known: return known
  config = engine.config
  drafts = engine.speculation.config if len(engine.runners) > 1 else None
  found: dict[str, Any] = {"format": FORMAT, "model": fingerprint(engine.folder, engine.model_config)}
  if drafts:
    folder = pathlib.Path(drafts.model).expanduser()
    found["draft model"] = f"{fingerprint(folder, ModelConfig.load(folder))}, quantization {drafts.quantization}"
  found["dtype"] = engine.runner.model.dtype.name
  found["quantization"] = config.quantization if config.quantization in ("int8", "int4") else None   # else the files'
  for name in ("kv_cache_dtype", "block_size", "tensor_parallel_size"): found[name] = getattr(config, name)
  parts = collections.Counter(f"{x.dtype.name} {x.shape[1:]}" for x in tensors_of(engine))
  found["parts"] = ", ".join(f"{count} of {part}" for part, count in parts.items())
  known = vars(engine)["blocks_identity"] = {name: str(value) for name, value in found.items()}
  return known


def tensors_of(engine: LLMEngine) -> list[Tensor]:
  """Those that have a part of each block."""
  return [tensor for runner in engine.runners for layer in runner.caches for tensor in layer]


def buffers_of(tensor: Tensor) -> list[Any]:
  """A device's each."""
  buffer: Any = tensor.uop.buffer
  return [part.ensure_allocated() for part in getattr(buffer, "bufs", [buffer])]


def copy_kernel(out: UOp, places: UOp, source: UOp, blocks: UOp) -> UOp:
  """Write some of source's blocks to places of out's."""
  size = math.prod(out.shape[1:])
  i = UOp.range(places.shape[0], 0)
  j = UOp.range(size, 1)
  value = source.base.index(blocks[i].load() * size + j)
  return kernel_of("copy_blocks", out.base.index(places[i].load() * size + j).store(value))


def copy_blocks(out: list[Tensor], places: dict[Any, Tensor], source: list[Tensor], blocks: dict[Any, Tensor]) -> None:
  """On the device. places, blocks: their numbers, on each device that there is."""
  copied = [x.custom_kernel(places[x.device], y, blocks[x.device], fxn=copy_kernel)[0]
            for x, y in zip(out, source, strict=True)]
  Tensor.realize(*copied)


def fill(tensor: Tensor, array: np.ndarray) -> None:
  """Each device's part with all of the array."""
  for part in buffers_of(tensor): part.allocator._copyin(part._buf, array.data.cast("B"))


class Blocks:
  """An engine's blocks as rows of bytes, at most `count` at a time, by way of as many on the device in tensors of the
  same kinds. So nothing hangs on how many tensors hold a block, or on their types."""
  def __init__(self, engine: LLMEngine):
    tensors = tensors_of(engine)
    self.devices = engine.runners[0].model.devices
    self.row = sum(part.nbytes for x in tensors for part in buffers_of(x)) // engine.blocks.num_blocks   # bytes of one
    self.count = max(1, min(MOST // self.row, engine.blocks.num_blocks))
    def new(device, dtype, *shape): return Tensor.empty(*shape, dtype=dtype, device=device).contiguous().realize()
    def numbers(): return {device: new(device, dtypes.int32, self.count) for device in {x.device for x in tensors}}
    staged = [new(x.device, x.dtype, self.count, *x.shape[1:]) for x in tensors]
    self.parts = [part for x in staged for part in buffers_of(x)]
    self.blocks = numbers()   # those that are copied
    rows = numbers()
    for x in rows.values(): fill(x, np.arange(self.count, dtype=np.int32))
    # From the third time on these are graphs
    self.gather = TinyJit(functools.partial(copy_blocks, staged, rows, tensors, self.blocks))
    self.scatter = TinyJit(functools.partial(copy_blocks, tensors, self.blocks, staged, rows))
    self._settle()

  def _settle(self) -> None:
    """Wait, for the first device last: CUDA runs the next step in the stream of the one that was last used."""
    for name in reversed(self.devices): Device[name].synchronize()

  def _choose(self, blocks: list[int]) -> None:
    """Those that are copied next; for those that are wanting block 0, which is nobody's."""
    padded = np.zeros(self.count, np.int32)
    padded[:len(blocks)] = blocks
    for x in self.blocks.values(): fill(x, padded)

  def read(self, blocks: list[int]) -> np.ndarray:
    """(len(blocks), row) bytes."""
    self._choose(blocks)
    self.gather()
    columns = [np.frombuffer(part.as_memoryview(allow_zero_copy=True), np.uint8) for part in self.parts]
    rows = np.concatenate([x.reshape(self.count, -1)[:len(blocks)] for x in columns], 1)
    self._settle()
    return rows

  def write(self, blocks: list[int], rows: np.ndarray) -> None:
    """Fill blocks, each with a row of bytes."""
    self._choose(blocks)
    ends = np.cumsum([part.nbytes // self.count for part in self.parts])
    padded = np.zeros((self.count, self.row), np.uint8)
    padded[:len(rows)] = rows
    for part, columns in zip(self.parts, np.split(padded, ends[:-1], 1), strict=True):
      part.allocator._copyin(part._buf, np.ascontiguousarray(columns).data.cast("B"))
    self.scatter()
    self._settle()


@contextlib.contextmanager
def replaced(path: pathlib.Path) -> Iterator[Any]:
  """A file that takes the place of another, if there is one, once all is written and on the disk; else it goes."""
  handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")   # its owner's alone
  try:
    with os.fdopen(handle, "wb") as file:
      yield file
      file.flush()
      os.fsync(handle)
    os.replace(name, path)
  except BaseException:
    os.unlink(name)
    raise


def save(engine: LLMEngine, path: str | os.PathLike) -> int:
  """Write the blocks in which something is found to a file, the one used last first, in the place of what was there.
  Returns how many; where there are none nothing is written. Raises OSError where the file cannot be written, or another
  one is there: what was there stays. Unless a load was tried before, the model's files must still be those that the
  engine was made of."""
  started = time.perf_counter()
  to = pathlib.Path(path).expanduser().resolve()
  begin = b""
  with contextlib.suppress(FileNotFoundError), open(to, "rb") as there: begin = there.read(8 + len(BEGIN))[8:]
  if not BEGIN.startswith(begin):
    raise FileExistsError(f"{str(path)!r} is no prefix cache: remove it, or name another file")
  pool = engine.blocks
  held = [block for seq in engine.scheduler.running for block in seq.block_table]
  recent = [*dict.fromkeys([*held, *reversed(pool.unused)])]
  found = [block for block in recent if pool.cached.get(pool.keys[block]) == block]
  if not found: return 0
  blocks = Blocks(engine)
  header: dict[str, Any] = {"__metadata__": identity(engine)}
  end = 0
  for name, kind, row in (("keys", "U8", 32), ("blocks", "U8", blocks.row), ("checksums", "U32", 4)):
    shape = [len(found), row] if kind == "U8" else [len(found)]
    header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + row * len(found)]}
    end += row * len(found)
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  sums = []
  # By hand, as safetensors' own functions take all of a file's tensors at once, and these may be as large as a device
  with replaced(to) as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.write(b"".join(pool.keys[block] for block in found))
    for i in range(0, len(found), blocks.count):
      some = found[i:i + blocks.count]
      rows = blocks.read(some)
      sums += [zlib.crc32(row, zlib.crc32(pool.keys[block])) for block, row in zip(some, rows, strict=True)]
      file.write(rows.data)
    file.write(np.array(sums, "<u4").data)
  seconds = time.perf_counter() - started
  logger.info(f"prefix cache: {len(found)} blocks, {end / 2**20:.0f} MiB, written to {path} in {seconds:.1f} s")
  return len(found)


def load(engine: LLMEngine, path: str | os.PathLike) -> int:
  """Let what is in a file's blocks be found, those used last first, as many as there are blocks that are free and hold
  nothing that is found. Returns how many. Raises ValueError for a file that is not there, damaged, or of another
  engine's blocks: the engine then is as it was."""
  said = f"prefix cache {str(path)!r}"
  check(engine.config.enable_prefix_caching, f"{said}: enable_prefix_caching=False finds nothing: leave one out")
  started = time.perf_counter()
  identity(engine)
  there = pathlib.Path(path).expanduser()
  check(there.exists(), f"{said} is not there")
  try:
    with safe_open(there, "numpy") as file: count = _load(engine, file, said)
  except (OSError, SafetensorError) as e: raise InputError(f"{said} is damaged ({e}): remove it") from e
  logger.info(f"prefix cache: {count} blocks of {path} in {time.perf_counter() - started:.1f} s")
  return count


def _load(engine: LLMEngine, file: Any, said: str) -> int:
  own = identity(engine)
  theirs = file.metadata() or {}
  differ = [f"{name} {theirs.get(name)!r}, here {own[name]!r}" for name in own if theirs.get(name) != own[name]]
  check(own.keys() == theirs.keys() and not differ, f"{said} is of other blocks ({'; '.join(differ)}): remove it, or "
        "name another file")
  blocks = Blocks(engine)
  slices = {name: file.get_slice(name) for name in ("keys", "blocks", "checksums")}
  n = slices["keys"].get_shape()[0]
  kinds = [(x.get_dtype(), x.get_shape()) for x in slices.values()]
  check(kinds == [("U8", [n, 32]), ("U8", [n, blocks.row]), ("U32", [n])], f"{said} is damaged: remove it")
  keys = [key.tobytes() for key in slices["keys"][:]]
  sums = slices["checksums"][:]
  pool = engine.blocks
  new = [i for i, key in enumerate(keys) if key not in pool.cached]
  taken = dict(zip(new, reversed(pool.empty), strict=False))   # rows of the file, and the blocks that they go to
  for start in range(0, n, blocks.count):
    some = [i for i in range(start, min(n, start + blocks.count)) if i in taken]
    if not some: continue
    rows = slices["blocks"][some[0]:some[-1] + 1][[i - some[0] for i in some]]
    damaged = [i for i, row in zip(some, rows, strict=True) if zlib.crc32(row, zlib.crc32(keys[i])) != sums[i]]
    check(not damaged, f"{said} is damaged (block {damaged[:1]}): remove it")
    blocks.write([taken[i] for i in some], rows)   # nothing is found there yet
  del pool.empty[len(pool.empty) - len(taken):]
  for i, block in reversed(taken.items()):
    pool.keys[block] = keys[i]
    pool.cached[keys[i]] = block
  # In the order in which they were let go of, before what this engine has let go of since
  pool.unused = collections.OrderedDict.fromkeys([*reversed(taken.values()), *pool.unused])
  return len(taken)
