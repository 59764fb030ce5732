"""The prefix cache in a file: cached blocks with their hashes, so that a restarted engine finds what an earlier one has
computed. A file is only loaded into an engine whose blocks would be the same, a block with a wrong checksum is never
loaded, and a file is replaced completely or not at all."""
import collections, contextlib, functools, hashlib, json, math, os, pathlib, tempfile, time, weakref, zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes

from tinyvllm.backend import exclusive
from tinyvllm.config import ModelConfig, check, logger

from .kernels.schedule import kernel_of
from .weights import open_checkpoint

if TYPE_CHECKING: from tinyvllm.engine import Engine

MAGIC = b'{"__metadata__": {"format": "'   # start of the JSON header
FORMAT = "1"           # change it if hashes, blocks or the file are made differently
MAX_BYTES = 2**26      # bytes of blocks to copy at a time, or one block if it is larger
SAMPLE_BYTES = 2**16   # bytes of a weight to hash, at each of four offsets

identities: "weakref.WeakKeyDictionary[Engine, dict[str, str]]" = weakref.WeakKeyDictionary()


def fingerprint(path: pathlib.Path, config: ModelConfig) -> str:
  """Hash a model's config and samples of each of its weights: fine-tuned ones differ, and few bytes are read."""
  checkpoint = open_checkpoint(path)
  digest = hashlib.sha256(repr((config, checkpoint.hf_config.get("quantization_config"))).encode())
  for name, dtype, shape, data in checkpoint.fingerprint_pieces():
    digest.update(repr((name, dtype, shape)).encode())
    for start in range(0, len(data), max(SAMPLE_BYTES, len(data) // 4)):
      digest.update(data[start:start + SAMPLE_BYTES].data)
  return digest.hexdigest()[:32]


def identity(engine: "Engine") -> dict[str, str]:
  """Everything that an engine's blocks and hashes depend on. The first call reads the model's files: call it early, as
  they may be replaced while the engine runs."""
  if engine in identities: return identities[engine]
  config = engine.config
  parts = collections.Counter(f"{x.dtype.name} {x.shape[1:]}" for x in cache_tensors(engine))
  values: dict[str, Any] = {
    "format": FORMAT, "model": fingerprint(engine.path, engine.model_config), "dtype": engine.runner.model.dtype.name,
    "quantization": config.quantization if config.quantization in ("int8", "int4") else None,   # else the model's
    **{name: getattr(config, name) for name in ("kv_cache_dtype", "block_size", "tensor_parallel_size")},
    "parts": ", ".join(f"{count} of {part}" for part, count in parts.items())}
  for runner in engine.runners[1:]:   # of a draft model
    draft: Any = engine.proposer.config   # type: ignore[union-attr]
    draft_model = fingerprint(pathlib.Path(draft.model).expanduser(), runner.model.config)
    values["draft model"] = f"{draft_model}, quantization {draft.quantization}"
  identities[engine] = {name: str(value) for name, value in values.items()}
  return identities[engine]


def cache_tensors(engine: "Engine") -> list[Tensor]:
  """All tensors that hold a part of each block."""
  return [tensor for runner in engine.runners for layer in runner.kv_caches for tensor in layer]


def buffers_of(tensor: Tensor) -> list[Any]:
  """The tensor's buffer on each device."""
  buffer: Any = tensor.uop.buffer
  return [part.ensure_allocated() for part in getattr(buffer, "bufs", [buffer])]


def copy_kernel(out: UOp, targets: UOp, source: UOp, blocks: UOp) -> UOp:
  """out[targets[i]] = source[blocks[i]], in place."""
  size = math.prod(out.shape[1:])
  i = UOp.range(targets.shape[0], 0)
  j = UOp.range(size, 1)
  value = source.base.index(blocks[i].load() * size + j)
  return kernel_of("copy_blocks", out.base.index(targets[i].load() * size + j).store(value))


def copy_blocks(out: list[Tensor], targets: dict[Any, Tensor], source: list[Tensor], blocks: dict[Any, Tensor]) -> None:
  """Copy blocks on the device. targets, blocks: block numbers by device."""
  copied = [x.custom_kernel(targets[x.device], y, blocks[x.device], fxn=copy_kernel)[0]
            for x, y in zip(out, source, strict=True)]
  Tensor.realize(*copied)


def fill(tensor: Tensor, array: np.ndarray) -> None:
  """Copy the whole array to each device."""
  for part in buffers_of(tensor): part.allocator._copyin(part._buf, array.data.cast("B"))


class Blocks:
  """An engine's blocks as rows of bytes, read or written up to `count` at a time through a staging tensor on the device
  for each cache tensor. Works for any number of cache tensors of any dtypes and shapes."""
  def __init__(self, engine: "Engine"):
    tensors = cache_tensors(engine)
    self.devices = engine.runners[0].model.devices.names
    self.row_bytes = sum(part.nbytes for x in tensors for part in buffers_of(x)) // engine.blocks.num_blocks
    self.count = max(1, min(MAX_BYTES // self.row_bytes, engine.blocks.num_blocks))
    def new(device, dtype, *shape): return Tensor.empty(*shape, dtype=dtype, device=device).contiguous().realize()
    def new_ids(): return {device: new(device, dtypes.int32, self.count) for device in {x.device for x in tensors}}
    staging = [new(x.device, x.dtype, self.count, *x.shape[1:]) for x in tensors]
    self.parts = [part for x in staging for part in buffers_of(x)]
    self.block_ids = new_ids()
    rows = new_ids()
    for x in rows.values(): fill(x, np.arange(self.count, dtype=np.int32))
    self.gather = TinyJit(functools.partial(copy_blocks, staging, rows, tensors, self.block_ids))
    self.scatter = TinyJit(functools.partial(copy_blocks, tensors, self.block_ids, staging, rows))
    self._synchronize()

  def _synchronize(self) -> None:
    """Wait for all devices, the first one last: CUDA runs the next step in the stream that was used last."""
    for name in reversed(self.devices): Device[name].synchronize()

  def _select(self, blocks: list[int]) -> None:
    """Choose the blocks to copy, padded with the null block 0."""
    padded = np.zeros(self.count, np.int32)
    padded[:len(blocks)] = blocks
    for x in self.block_ids.values(): fill(x, padded)

  def read(self, blocks: list[int]) -> np.ndarray:
    """Return the content of blocks, (len(blocks), row_bytes) uint8."""
    self._select(blocks)
    self.gather()
    columns = [np.frombuffer(part.as_memoryview(allow_zero_copy=True), np.uint8) for part in self.parts]
    rows = np.concatenate([x.reshape(self.count, -1)[:len(blocks)] for x in columns], 1)
    self._synchronize()
    return rows

  def write(self, blocks: list[int], rows: np.ndarray) -> None:
    """Fill blocks, each with a row of bytes."""
    self._select(blocks)
    ends = np.cumsum([part.nbytes // self.count for part in self.parts])
    padded = np.zeros((self.count, self.row_bytes), np.uint8)
    padded[:len(rows)] = rows
    for part, columns in zip(self.parts, np.split(padded, ends[:-1], 1), strict=True):
      part.allocator._copyin(part._buf, np.ascontiguousarray(columns).data.cast("B"))
    self.scatter()
    self._synchronize()


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[Any]:
  """Open a new file that replaces `path` after it was written and flushed to disk; after an error it is deleted."""
  handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")   # readable by its owner only
  try:
    with os.fdopen(handle, "wb") as file:
      yield file
      file.flush()
      os.fsync(handle)
    os.replace(name, path)
  except BaseException:
    os.unlink(name)
    raise


def save_prefix_cache(engine: "Engine", path: str | os.PathLike) -> int:
  """Write all cached blocks to a file, most recently used first, and return their number; without any, write nothing.
  Replaces an earlier file. The model's files must not have changed since the engine loaded them, unless
  load_prefix_cache was called before. Raises OSError if the file cannot be written or holds something else; it is then
  left unchanged."""
  with engine.driving(), exclusive: return _save(engine, path)


def _save(engine: "Engine", path: str | os.PathLike) -> int:
  started = time.perf_counter()
  target = pathlib.Path(path).expanduser().resolve()
  start = b""
  with contextlib.suppress(FileNotFoundError), open(target, "rb") as old: start = old.read(8 + len(MAGIC))[8:]
  if not MAGIC.startswith(start):
    raise FileExistsError(f"{str(path)!r} is not a prefix cache: remove it, or choose another file")
  pool = engine.blocks
  held = [block for seq in engine.scheduler.running for block in seq.block_table]
  most_recent = dict.fromkeys([*held, *reversed(pool.evictable)])
  cached = [block for block in most_recent if pool.is_cached(block)]
  if not cached: return 0
  blocks = Blocks(engine)
  header: dict[str, Any] = {"__metadata__": identity(engine)}
  end = 0
  for name, dtype, row_bytes in (("keys", "U8", 32), ("blocks", "U8", blocks.row_bytes), ("checksums", "U32", 4)):
    shape = [len(cached), row_bytes] if dtype == "U8" else [len(cached)]
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + row_bytes * len(cached)]}
    end += row_bytes * len(cached)
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  checksums = []
  # safetensors' own functions take all tensors of a file at once, and these may be as large as the device's memory
  with replacing(target) as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.write(b"".join(pool.block_hashes[block] for block in cached))
    for i in range(0, len(cached), blocks.count):
      batch = cached[i:i + blocks.count]
      rows = blocks.read(batch)
      checksums += [zlib.crc32(row, zlib.crc32(pool.block_hashes[block]))
                    for block, row in zip(batch, rows, strict=True)]
      file.write(rows.data)
    file.write(np.array(checksums, "<u4").data)
  seconds = time.perf_counter() - started
  logger.info(f"prefix cache: {len(cached)} blocks, {end / 2**20:.0f} MiB, written to {path} in {seconds:.1f} s")
  return len(cached)


def load_prefix_cache(engine: "Engine", path: str | os.PathLike) -> int:
  """Add a file's blocks to the prefix cache, most recently used first, as far as there are free blocks without cached
  content, and return their number. Raises InputError for a file that is missing, damaged or made by another model or
  with other options; the engine is then unchanged."""
  prefix = f"prefix cache {str(path)!r}"
  check(engine.config.enable_prefix_caching, f"{prefix} has no use with enable_prefix_caching=False: leave one out")
  started = time.perf_counter()
  with engine.driving(), exclusive:
    identity(engine)
    source = pathlib.Path(path).expanduser()
    check(source.exists(), f"{prefix} does not exist")
    try:
      with safe_open(source, "numpy") as file: count = read_blocks(engine, file, prefix)
    except (OSError, SafetensorError) as e: check(False, f"{prefix} is damaged ({e}): remove it")
  logger.info(f"prefix cache: {count} blocks of {path} in {time.perf_counter() - started:.1f} s")
  return count


def read_blocks(engine: "Engine", file: Any, prefix: str) -> int:
  """Check and load the blocks of a safetensors file. prefix: of errors."""
  expected = identity(engine)
  metadata = file.metadata() or {}
  differences = [f"{name} {metadata.get(name)!r}, here {expected[name]!r}"
                 for name in expected if metadata.get(name) != expected[name]]
  check(expected.keys() == metadata.keys() and not differences, f"{prefix} has blocks that do not fit this engine "
        f"({'; '.join(differences)}): remove it, or choose another file")
  blocks = Blocks(engine)
  slices = {name: file.get_slice(name) for name in ("keys", "blocks", "checksums")}
  n = slices["keys"].get_shape()[0]
  layout = [(x.get_dtype(), x.get_shape()) for x in slices.values()]
  check(layout == [("U8", [n, 32]), ("U8", [n, blocks.row_bytes]), ("U32", [n])], f"{prefix} is damaged: remove it")
  hashes = [row.tobytes() for row in slices["keys"][:]]
  checksums = slices["checksums"][:]
  pool = engine.blocks
  new = [i for i, block_hash in enumerate(hashes) if block_hash not in pool.cached_blocks]
  targets = dict(zip(new, reversed(pool.free_blocks), strict=False))   # row of the file -> free block
  for start in range(0, n, blocks.count):
    batch = [i for i in range(start, min(n, start + blocks.count)) if i in targets]
    if not batch: continue
    rows = slices["blocks"][batch[0]:batch[-1] + 1][[i - batch[0] for i in batch]]
    damaged = [i for i, row in zip(batch, rows, strict=True) if zlib.crc32(row, zlib.crc32(hashes[i])) != checksums[i]]
    check(not damaged, f"{prefix} is damaged (block {damaged[:1]}): remove it")
    blocks.write([targets[i] for i in batch], rows)   # these are not cached yet
  del pool.free_blocks[len(pool.free_blocks) - len(targets):]
  for i, block in reversed(targets.items()):
    pool.block_hashes[block] = hashes[i]
    pool.cached_blocks[hashes[i]] = block
  # Least recently used first: the engine's own blocks are newer than the file's
  pool.evictable = collections.OrderedDict.fromkeys([*reversed(targets.values()), *pool.evictable])
  return len(targets)
