"""The prefix cache: what an engine has cached, simulated restarts, and changed files."""
import json
import random
from pathlib import Path

import numpy as np

from .commands import check_error
from .engines import greedy, ids_of, tokens


def buffers(engine):
  """Return the buffers of all cache tensors on each device."""
  whole_buffers = [cache.uop.buffer for runner in engine.runners for layer in runner.kv_caches for cache in layer]
  return [part.ensure_allocated() for buffer in whole_buffers for part in getattr(buffer, "bufs", [buffer])]


def contents(engine):
  """Return the bytes of the cached blocks by hash, read without the code under test."""
  parts = [np.frombuffer(x.as_memoryview(), np.uint8).reshape(engine.blocks.num_blocks, -1) for x in buffers(engine)]
  return {key: b"".join(part[block].tobytes() for part in parts) for key, block in engine.blocks.cached_blocks.items()}


def lru_order(engine):
  """Return the hashes of the evictable blocks, least recently used first."""
  return [engine.blocks.block_hashes[block] for block in engine.blocks.evictable]


def state(engine):
  """Return the state of the pool and the content of its cached blocks."""
  blocks = engine.blocks
  return dict(blocks.cached_blocks), [*blocks.evictable], [*blocks.free_blocks], contents(engine)


def restart(engine):
  """Simulate a restart: empty the prefix cache and fill the blocks with noise."""
  assert not engine.has_unfinished_requests()
  engine.blocks.cached_blocks.clear()
  engine.blocks.block_hashes = [b""] * engine.blocks.num_blocks
  engine.blocks.reset()
  noise = random.Random(7).randbytes(max(x.nbytes for x in buffers(engine)))
  for x in buffers(engine): x.allocator._copyin(x._buf, memoryview(bytearray(noise[:x.nbytes])))
  return engine


def run(engine, *prompts, n=6):
  """Run the prompts one after another. Return the output ids and the number of cached tokens of each."""
  outputs = [engine.generate(tokens(ids), greedy(n), use_tqdm=False)[0] for ids in prompts]
  return [ids_of(output) for output in outputs], [output.num_cached_tokens for output in outputs]


def header_of(path):
  """Return the header and the offset of the data."""
  raw = Path(path).read_bytes()
  size = 8 + int.from_bytes(raw[:8], "little")
  return json.loads(raw[8:size]), size


def with_metadata(path, **changes):
  """Change metadata in the header of a file."""
  header, size = header_of(path)
  header["__metadata__"] |= changes
  text = json.dumps(header).encode()
  path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[size:])


def check_refused(engine, path, *parts):
  """Check that loading raises a one-line ValueError with these parts and leaves the engine unchanged."""
  before = state(engine)
  check_error(lambda: engine.load_prefix_cache(path), path, *parts)
  assert state(engine) == before
