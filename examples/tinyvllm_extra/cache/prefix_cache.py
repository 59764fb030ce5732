"""Saves the prefix cache, cached blocks with their hashes, to a file for a restarted engine. A file is only loaded into
an engine that would compute the same blocks, and a block with a wrong checksum is never loaded."""
import collections, os, pathlib, time, weakref

import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, dtypes

from tinyvllm import backend
from tinyvllm.config import JsonObject, check, logger
from tinyvllm.engine import Engine
from tinyvllm_extra.formats import hub
from tinyvllm_extra.formats.prefix_file import FORMAT, StoredBlocks, fingerprint, replaceable, replacing, write_blocks
from tinyvllm_extra.kernels.buffers import buffers_of, copy_to_devices, write
from tinyvllm_extra.models.recurrent import state_shapes
from tinyvllm_extra.sampling.speculation import SpeculativeProposer

MAX_BYTES = 2**26   # maximum bytes of blocks to copy at a time, but at least one block

identities = weakref.WeakKeyDictionary[Engine, dict[str, str]]()


def identity(engine: Engine) -> dict[str, str]:
  """Return everything that an engine's blocks and hashes depend on. The first call reads the model's files: call it
  early, as they may be replaced while the engine runs."""
  if engine in identities: return identities[engine]
  check(not any(state_shapes(engine.model_config)), f"{engine.path.name}: prefix caches of models with recurrent "
        "layers cannot be saved: their snapshots are in memory only")
  options = vars(engine.config)   # an LLMConfig's
  check(not options["merge_lora"], "merge_lora: prefix caches of a model with an adapter cannot be saved: leave it out")
  layouts = collections.Counter(f"{x.dtype.name} {x.shape[1:]}" for x in cache_tensors(engine))
  values: JsonObject = {
    "format": FORMAT, "model": fingerprint(engine.path, engine.model_config),
    "dtype": getattr(dtypes, options["dtype"]).name, "activation_quantization": options["activation_quantization"],
    "quantization": options["quantization"] if options["quantization"] in ("int8", "int4") else None,
    **{name: options[name] for name in ("kv_cache_dtype", "block_size", "tensor_parallel_size")},
    "parts": ", ".join(f"{count} of {layout}" for layout, count in layouts.items())}
  if isinstance(engine.proposer, SpeculativeProposer) and engine.proposer.runners:
    draft = engine.proposer.config
    draft_model = fingerprint(hub.local_path(str(draft.model)), engine.proposer.runners[0].model.config)
    values["draft model"] = f"{draft_model}, quantization {draft.quantization}"
  return identities.setdefault(engine, {name: str(value) for name, value in values.items()})


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
    copies = [(x, y, self.block_ids[x.device]) for x, y in zip(tensors, staging, strict=True)]
    self.gather = TinyJit(lambda: Tensor.realize(*[y.assign(x[ids]) for x, y, ids in copies]))
    self.scatter = TinyJit(lambda: Tensor.realize(*[x.custom_kernel(ids, y, fxn=backend.scatter_kernel)[0]
                                                    for x, y, ids in copies]))
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
    with Context(SPLIT_REDUCEOP=0): self.gather()   # else tinygrad gathers from many blocks in two slow kernels
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


def save_prefix_cache(engine: Engine, path: str | os.PathLike) -> int:
  """Write all cached blocks to a file, most recently used first, and return their number. Replaces an earlier file, but
  writes nothing if no block is cached. The model's files must not have changed since the engine loaded them, unless
  load_prefix_cache was called before. Raises OSError, and leaves the file unchanged, if it cannot be written or is not
  a prefix cache."""
  started = time.perf_counter()
  with engine.driving(), backend.exclusive:
    target = replaceable(path)
    pool = engine.blocks
    in_use = [block for seq in engine.scheduler.running for block in seq.block_table]
    cached = [block for block in dict.fromkeys([*in_use, *reversed(pool.evictable)]) if pool.is_cached(block)]
    if not cached: return 0
    with replacing(target) as file:
      blocks = Blocks(engine)
      parts = (blocks.read(cached[i:i + blocks.count]) for i in range(0, len(cached), blocks.count))
      write_blocks(file, identity(engine), [pool.block_hashes[block] for block in cached], blocks.row_bytes, parts)
  logger.info(f"prefix cache: {len(cached)} blocks, {target.stat().st_size / 2**20:.0f} MiB, written to {path} in "
              f"{time.perf_counter() - started:.1f} s")
  return len(cached)


def load_prefix_cache(engine: Engine, path: str | os.PathLike) -> int:
  """Add a file's blocks to the prefix cache, most recently used first, until no uncached free block is left, and return
  their number. Raises InputError, and leaves the engine unchanged, for a file that is missing, damaged or written by
  another model or with other options."""
  prefix = f"prefix cache {str(path)!r}"
  check(engine.config.enable_prefix_caching, f"{prefix} has no effect with enable_prefix_caching=False: remove one")
  started = time.perf_counter()
  with engine.driving(), backend.exclusive:
    metadata = identity(engine)
    file = pathlib.Path(path).expanduser()
    check(file.exists(), f"{prefix} does not exist")
    pool, blocks = engine.blocks, Blocks(engine)
    stored = StoredBlocks(file, metadata, blocks.row_bytes, prefix)
    uncached = [i for i, key in enumerate(stored.keys) if key not in pool.cached_blocks]
    targets = dict(zip(uncached, reversed(pool.free_blocks), strict=False))   # row of the file -> free block
    for start in range(0, len(stored.keys), blocks.count):
      batch = [i for i in range(start, start + blocks.count) if i in targets]
      if batch: blocks.write([targets[i] for i in batch], stored.rows(batch))
    del pool.free_blocks[len(pool.free_blocks) - len(targets):]   # when all blocks are on the device
    for i, block in reversed(targets.items()):
      pool.block_hashes[block] = stored.keys[i]
      pool.cached_blocks[stored.keys[i]] = block
    # Least recently used first: the engine's own blocks are more recent than the file's
    pool.evictable = collections.OrderedDict.fromkeys([*reversed(targets.values()), *pool.evictable])
  logger.info(f"prefix cache: {len(targets)} blocks of {path} in {time.perf_counter() - started:.1f} s")
  return len(targets)
