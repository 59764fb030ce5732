"""Saves the prefix cache, cached blocks with their hashes, to a file for a restarted engine. A file is only loaded into
an engine that would compute the same blocks, a block with a wrong checksum is never loaded, and a file is replaced
completely or not at all."""
import collections, contextlib, functools, hashlib, json, math, os, pathlib, tempfile, time, weakref, zlib
from collections.abc import Mapping
from typing import IO, Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes

from tinyvllm.backend import exclusive
from tinyvllm.config import JsonObject, ModelConfig, check, logger
from tinyvllm.engine import Engine
from tinyvllm_extra.formats.hub import open_checkpoint
from tinyvllm_extra.kernels.buffers import buffers_of, copy_to_devices, write
from tinyvllm_extra.kernels.schedule import kernel_of
from tinyvllm_extra.models.recurrent import state_shapes
from tinyvllm_extra.sampling.speculation import SpeculativeProposer

MAGIC = b'{"__metadata__": {"format": "'   # start of the JSON header
FORMAT = "1"           # change it when the hashes, the blocks or the file layout change
MAX_BYTES = 2**26      # maximum bytes of blocks to copy at a time, but at least one block
SAMPLE_BYTES = 2**16   # bytes of a weight to hash, at each of four offsets

identities = weakref.WeakKeyDictionary[Engine, dict[str, str]]()


def copy_kernel(out: UOp, source: UOp, blocks: UOp, is_scatter: bool) -> UOp:
  """out[i] = source[blocks[i]], or with is_scatter out[blocks[i]] = source[i], in place."""
  size = math.prod(out.shape[1:])
  i = UOp.range(blocks.shape[0], 0)
  j = UOp.range(size, 1)
  starts = [i * size, blocks[i].load() * size]
  value = source.base.index(starts[not is_scatter] + j)
  return kernel_of("copy_blocks", out.base.index(starts[is_scatter] + j).store(value))


def copy_blocks(out: list[Tensor], source: list[Tensor], blocks: Mapping[Any, Tensor], is_scatter: bool) -> None:
  """Copy blocks on the device. blocks: their numbers by device."""
  kernel = functools.partial(copy_kernel, is_scatter=is_scatter)
  Tensor.realize(*[x.custom_kernel(y, blocks[x.device], fxn=kernel)[0] for x, y in zip(out, source, strict=True)])


def fingerprint(path: pathlib.Path, config: ModelConfig) -> str:
  """Hash a model's config and samples of each weight, which differ between fine-tuned models. Reads few bytes."""
  checkpoint = open_checkpoint(path)
  digest = hashlib.sha256(repr((config, checkpoint.hf_config.get("quantization_config"))).encode())
  for name, tensor in sorted(checkpoint.stored_tensors().items()):
    data = tensor.raw()
    digest.update(repr((name, tensor.dtype.str, tensor.shape)).encode())
    for start in range(0, len(data), max(SAMPLE_BYTES, len(data) // 4)):
      digest.update(data[start:start + SAMPLE_BYTES].data)
  return digest.hexdigest()[:32]


def identity(engine: Engine) -> dict[str, str]:
  """Return everything that an engine's blocks and hashes depend on. The first call reads the model's files: call it
  early, as they may be replaced while the engine runs."""
  if engine in identities: return identities[engine]
  check(not any(state_shapes(engine.model_config)), f"{engine.path.name}: prefix caches of models with recurrent "
        "layers cannot be saved: their snapshots are in memory only")
  options = vars(engine.config)   # an LLMConfig's
  layouts = collections.Counter(f"{x.dtype.name} {x.shape[1:]}" for x in cache_tensors(engine))
  values: JsonObject = {
    "format": FORMAT, "model": fingerprint(engine.path, engine.model_config),
    "dtype": getattr(dtypes, options["dtype"]).name, "activation_quantization": options["activation_quantization"],
    "quantization": options["quantization"] if options["quantization"] in ("int8", "int4") else None,
    **{name: options[name] for name in ("kv_cache_dtype", "block_size", "tensor_parallel_size")},
    "parts": ", ".join(f"{count} of {layout}" for layout, count in layouts.items())}
  if isinstance(engine.proposer, SpeculativeProposer) and engine.proposer.runners:
    draft = engine.proposer.config
    draft_model = fingerprint(pathlib.Path(str(draft.model)).expanduser(), engine.proposer.runners[0].model.config)
    values["draft model"] = f"{draft_model}, quantization {draft.quantization}"
  identities[engine] = {name: str(value) for name, value in values.items()}
  return identities[engine]


def cache_tensors(engine: Engine) -> list[Tensor]:
  """Return all tensors of the KV cache. Each holds a part of every block."""
  return [tensor for runner in engine.runners for layer in runner.kv_caches for tensor in layer]


class Blocks:
  """Reads and writes an engine's blocks as rows of bytes, up to `count` at a time, through a staging tensor on the
  device for each cache tensor. Works for any number of cache tensors of any dtypes and shapes."""
  def __init__(self, engine: Engine):
    tensors = cache_tensors(engine)
    self.devices = engine.runners[0].model.devices.names
    self.row_bytes = sum(buffer.nbytes for x in tensors for buffer in buffers_of(x)) // engine.blocks.num_blocks
    self.count = max(1, min(MAX_BYTES // self.row_bytes, engine.blocks.num_blocks))
    def allocate(device, dtype, *shape): return Tensor.empty(*shape, dtype=dtype, device=device).contiguous().realize()
    staging = [allocate(x.device, x.dtype, self.count, *x.shape[1:]) for x in tensors]
    self.staging_buffers = [buffer for x in staging for buffer in buffers_of(x)]
    self.block_ids = {x: allocate(x, dtypes.int32, self.count) for x in {tensor.device for tensor in tensors}}
    self.gather = TinyJit(functools.partial(copy_blocks, staging, tensors, self.block_ids, False))
    self.scatter = TinyJit(functools.partial(copy_blocks, tensors, staging, self.block_ids, True))
    self._synchronize()

  def _synchronize(self) -> None:
    """Wait for all devices, the first one last, as CUDA runs the next step in the last used stream."""
    for name in reversed(self.devices): Device[name].synchronize()

  def _select(self, blocks: list[int]) -> None:
    """Set the blocks to copy, padded with the null block 0."""
    padded = np.pad(np.array(blocks, np.int32), (0, self.count - len(blocks)))
    for x in self.block_ids.values(): copy_to_devices(x, padded)

  def read(self, blocks: list[int]) -> np.ndarray:
    """Return the content of blocks, (len(blocks), row_bytes) uint8."""
    self._select(blocks)
    self.gather()
    columns = [np.frombuffer(x.as_memoryview(allow_zero_copy=True), np.uint8) for x in self.staging_buffers]
    rows = np.concatenate([x.reshape(self.count, -1)[:len(blocks)] for x in columns], 1)
    self._synchronize()
    return rows

  def write(self, blocks: list[int], rows: np.ndarray) -> None:
    """Write rows, (len(blocks), row_bytes) uint8, to blocks."""
    self._select(blocks)
    ends = np.cumsum([buffer.nbytes // self.count for buffer in self.staging_buffers])
    padded = np.pad(rows, ((0, self.count - len(rows)), (0, 0)))
    for buffer, columns in zip(self.staging_buffers, np.split(padded, ends[:-1], 1), strict=True):
      write(buffer, np.ascontiguousarray(columns))
    self.scatter()
    self._synchronize()


def checksum(block_hash: bytes, row: np.ndarray) -> int: return zlib.crc32(row.data, zlib.crc32(block_hash))


def save_prefix_cache(engine: Engine, path: str | os.PathLike) -> int:
  """Write all cached blocks to a file, most recently used first, and return their number. Replaces an earlier file, but
  writes nothing if no block is cached. The model's files must not have changed since the engine loaded them, unless
  load_prefix_cache was called before. Raises OSError, and leaves the file unchanged, if it cannot be written or is not
  a prefix cache."""
  started = time.perf_counter()
  target = pathlib.Path(path).expanduser().resolve()
  magic = b""
  with engine.driving(), exclusive:
    with contextlib.suppress(FileNotFoundError), open(target, "rb") as old: magic = old.read(8 + len(MAGIC))[8:]
    if not MAGIC.startswith(magic):
      raise FileExistsError(f"{str(path)!r} is not a prefix cache: remove it, or choose another file")
    pool = engine.blocks
    in_use = [block for seq in engine.scheduler.running for block in seq.block_table]
    most_recent = dict.fromkeys([*in_use, *reversed(pool.evictable)])
    cached = [block for block in most_recent if pool.is_cached(block)]
    if not cached: return 0
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:   # an error deletes it
      with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:   # readable only by its owner
        write_blocks(engine, file, cached)
        file.flush()
        os.fsync(file.fileno())
      os.replace(file.name, target)
  logger.info(f"prefix cache: {len(cached)} blocks, {target.stat().st_size / 2**20:.0f} MiB, written to {path} in "
              f"{time.perf_counter() - started:.1f} s")
  return len(cached)


def layout(count: int, row_bytes: int) -> dict[str, tuple[str, list[int]]]:
  """Return the dtypes and shapes of a file's tensors, in their order."""
  return {"keys": ("U8", [count, 32]), "blocks": ("U8", [count, row_bytes]), "checksums": ("U32", [count])}


def write_blocks(engine: Engine, file: IO[bytes], cached: list[int]) -> None:
  """Write a safetensors file, the blocks in parts: all of them may be as large as the device's memory. safetensors' own
  writer needs all tensors in memory."""
  blocks = Blocks(engine)
  header: JsonObject = {"__metadata__": identity(engine)}
  end = 0
  for name, (dtype, shape) in layout(len(cached), blocks.row_bytes).items():
    start, end = end, end + math.prod(shape) * int(dtype[1:]) // 8
    header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
  text = json.dumps(header).encode()
  text = text.ljust(-(-len(text) // 8) * 8)
  hashes = [engine.blocks.block_hashes[block] for block in cached]
  checksums = list[int]()
  file.write(len(text).to_bytes(8, "little") + text + b"".join(hashes))
  for i in range(0, len(cached), blocks.count):
    rows = blocks.read(cached[i:i + blocks.count])
    checksums += map(checksum, hashes[i:i + blocks.count], rows)
    file.write(rows.data)
  file.write(np.array(checksums, "<u4").data)


def load_prefix_cache(engine: Engine, path: str | os.PathLike) -> int:
  """Add a file's blocks to the prefix cache, most recently used first, until no uncached free block is left, and return
  their number. Raises InputError, and leaves the engine unchanged, for a file that is missing, damaged or written by
  another model or with other options."""
  prefix = f"prefix cache {str(path)!r}"
  check(engine.config.enable_prefix_caching, f"{prefix} has no effect with enable_prefix_caching=False: remove one")
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


def read_blocks(engine: Engine, file: safe_open, prefix: str) -> int:
  """Validate a safetensors file and load its blocks. prefix: start of error messages."""
  found = file.metadata() or {}
  differences = [f"{x} {found.get(x)!r}, here {own!r}" for x, own in identity(engine).items() if found.get(x) != own]
  check(found == identity(engine), f"{prefix} has blocks that do not fit this engine ({'; '.join(differences)}): "
        "remove it, or choose another file")
  blocks = Blocks(engine)
  pool = engine.blocks
  slices = {name: file.get_slice(name) for name in ("keys", "blocks", "checksums")}
  actual = {name: (x.get_dtype(), x.get_shape()) for name, x in slices.items()}
  n = actual["keys"][1][0]
  check(actual == layout(n, blocks.row_bytes), f"{prefix} is damaged: remove it")
  hashes = [row.tobytes() for row in slices["keys"][:]]
  checksums = slices["checksums"][:]
  uncached = [i for i in range(n) if hashes[i] not in pool.cached_blocks]
  targets = dict(zip(uncached, reversed(pool.free_blocks), strict=False))   # row of the file -> free block
  for start in range(0, n, blocks.count):
    batch = [i for i in range(start, min(n, start + blocks.count)) if i in targets]
    if not batch: continue
    rows = slices["blocks"][batch[0]:batch[-1] + 1][[i - batch[0] for i in batch]]
    damaged = [i for i, row in zip(batch, rows, strict=True) if checksum(hashes[i], row) != checksums[i]]
    check(not damaged, f"{prefix} is damaged (block {damaged[:1]}): remove it")
    blocks.write([targets[i] for i in batch], rows)   # not in the prefix cache until all are written
  del pool.free_blocks[len(pool.free_blocks) - len(targets):]
  for i, block in reversed(targets.items()):
    pool.block_hashes[block] = hashes[i]
    pool.cached_blocks[hashes[i]] = block
  # Least recently used first: the engine's own blocks are more recent than the file's
  pool.evictable = collections.OrderedDict.fromkeys([*reversed(targets.values()), *pool.evictable])
  return len(targets)
