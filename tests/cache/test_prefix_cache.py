"""The prefix cache in a file: a restarted engine gives the same outputs and cache hits as the old one; blocks of other
engines or damaged blocks are never loaded; a file is replaced atomically. Most tests simulate a restart:
they empty an engine's cache and fill its blocks with noise."""
import asyncio
import errno
import json
import logging
import os
import random
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from helpers.engines import ENGINE, check_invariants, run_to_end, set_overlap
from helpers.models import tiny_model
from helpers.reference import reference_greedy
from helpers.requests import greedy, ids_of, prompt, tokens
from helpers.servers import LocalServer, wait_until
from safetensors import safe_open
from tinygrad import Device, Tensor, dtypes

from tinyvllm import LLM
from tinyvllm.backend import Devices
from tinyvllm_extra import prefix_cache
from tinyvllm_extra.prefix_cache import Blocks
from tinyvllm_extra.server import AsyncLLM

BS = ENGINE["block_size"]
SMALL = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4}   # few graphs
SERVE = [x for name, value in SMALL.items() for x in ("--" + name.replace("_", "-"), str(value))]
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


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


@pytest.fixture(scope="module")
def engine(folder): return LLM(folder, **ENGINE)


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
  """A file with the blocks of three prompts, and the cached blocks of the engine that wrote it."""
  restart(engine)
  run(engine, *[prompt(5 * BS + i, "saved", i) for i in range(3)])
  path = tmp_path_factory.mktemp("saved") / "cache"
  assert engine.save_prefix_cache(path) == len(engine.blocks.cached_blocks)
  return path, contents(engine)


@pytest.fixture
def file(saved, tmp_path):
  """A copy of the saved file."""
  return Path(shutil.copy(saved[0], tmp_path / "cache"))


def check_refused(engine, path, *parts):
  """Check that loading raises a one-line ValueError with these parts and leaves the engine unchanged."""
  before = state(engine)
  with pytest.raises(ValueError) as error: engine.load_prefix_cache(path)
  message = str(error.value)
  assert "\n" not in message and str(path) in message
  assert all(part in message for part in parts), message
  assert state(engine) == before


# Cache hits after a restart

def test_load_in_new_engine_gives_equal_outputs_and_hits(engine, folder, tmp_path, caplog):
  restart(engine)
  first = [prompt(7 * BS + 1, "a", i) for i in range(3)]
  answers, _ = run(engine, *first)
  again = [*first, first[0] + answers[0] + prompt(3, "b"), first[1][:3 * BS] + prompt(9, "c"), prompt(20, "d")]
  with caplog.at_level(logging.INFO, "tinyvllm"):
    count = engine.save_prefix_cache(tmp_path / "cache")
    new = LLM(folder, **ENGINE)
    assert new.load_prefix_cache(str(tmp_path / "cache")) == count == len(engine.blocks.cached_blocks)
  assert sum(f"prefix cache: {count} blocks" in line for line in caplog.messages) == 2
  assert contents(new) == contents(engine) and lru_order(new) == lru_order(engine)
  check_invariants(new)
  old_ids, num_cached = run(engine, *again)
  assert run(new, *again) == (old_ids, num_cached) and old_ids == [reference_greedy(folder, ids, 6) for ids in again]
  assert num_cached[:3] == [7 * BS] * 3 and num_cached[3] >= 7 * BS and num_cached[4:] == [3 * BS, 0]
  assert new.get_metrics()["prefix_cache_hits"] == sum(num_cached)
  assert lru_order(new) == lru_order(engine)


def test_load_after_captures_gives_hits(engine, folder, tmp_path):
  restart(engine)
  first = prompt(6 * BS + 1, "captured")
  expected, _ = run(engine, first)
  engine.save_prefix_cache(tmp_path / "cache")
  assert run(restart(engine), first) == (expected, [0]), "the restart empties the cache"
  restart(engine).load_prefix_cache(tmp_path / "cache")
  assert run(engine, first) == (expected, [6 * BS])


def test_saved_file_is_valid_safetensors(saved, engine):
  path, expected = saved
  with safe_open(path, "numpy") as file:
    shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}   # noqa: SIM118   # not a dict
    keys = [key.tobytes() for key in file.get_tensor("keys")]
    rows = [row.tobytes() for row in file.get_tensor("blocks")]
    assert file.metadata()["format"] == "1"
  n = len(expected)
  assert shapes == {"keys": [n, 32], "blocks": [n, len(next(iter(expected.values())))], "checksums": [n]}
  assert dict(zip(keys, rows, strict=True)) == expected
  assert path.stat().st_mode & 0o77 == 0, "only the owner may read the file"


def test_load_keeps_eviction_order(engine, folder, tmp_path):
  """Allocating blocks evicts the loaded ones in the saved order."""
  restart(engine)
  old = [prompt(4 * BS, "old", i) for i in range(4)]
  run(engine, *old, old[1])   # now the most recently used
  engine.save_prefix_cache(tmp_path / "cache")
  expected = lru_order(engine)
  restart(engine).load_prefix_cache(tmp_path / "cache")
  assert lru_order(engine) == expected
  engine.scheduler.reset([])   # as after a failed step
  assert lru_order(engine) == expected
  table = []
  engine.blocks.allocate(table, (engine.blocks.num_blocks - 1 - len(expected) + 5) * BS)
  assert lru_order(engine) == expected[5:]
  engine.blocks.free_blocks += table
  check_invariants(engine)


def test_save_writes_blocks_of_running_requests_first(engine, folder, tmp_path):
  restart(engine)
  earlier, prompts = prompt(4 * BS, "before"), [prompt(3 * BS + 2, "runs", i) for i in range(2)]
  run(engine, earlier)
  for i, ids in enumerate(prompts): engine.add_request(str(i), tokens(ids), greedy(12))
  for _ in range(4): engine.step()
  table_blocks = [block for seq in engine.scheduler.running for block in seq.block_table]
  running_keys = {key for key, block in engine.blocks.cached_blocks.items() if block in table_blocks}
  count = engine.save_prefix_cache(tmp_path / "cache")
  assert count == len(engine.blocks.cached_blocks) and len(running_keys) >= 6
  with safe_open(tmp_path / "cache", "numpy") as file: keys = [key.tobytes() for key in file.get_tensor("keys")]
  assert {*keys[:len(running_keys)]} == running_keys and {*keys} == {*engine.blocks.cached_blocks}
  assert engine.load_prefix_cache(tmp_path / "cache") == 0, "all blocks are cached"
  last = run_to_end(engine, 100)
  assert [ids_of(last[str(i)]) for i in range(2)] == [reference_greedy(folder, ids, 12) for ids in prompts]


@pytest.mark.parametrize("overlaps", ["", "overlapped"])
def test_load_does_not_change_running_requests(engine, folder, file, overlaps, monkeypatch):
  """Also with a step in flight."""
  set_overlap(monkeypatch, engine.runner, overlaps)
  restart(engine)
  prompts = [prompt(3 * BS + 2, "load", i) for i in range(3)]
  for i, ids in enumerate(prompts): engine.add_request(str(i), tokens(ids), greedy(12))
  for _ in range(4): engine.step()
  engine.abort_request("2")   # the step in flight may still write to its blocks
  assert engine.load_prefix_cache(file) > 0
  check_invariants(engine)
  engine.add_request("3", tokens(prompt(5 * BS, "saved", 0)), greedy(4))
  last = run_to_end(engine, 100)
  assert [ids_of(last[str(i)]) for i in range(2)] == [reference_greedy(folder, ids, 12) for ids in prompts[:2]]
  assert last["3"].num_cached_tokens == 4 * BS and ids_of(last["3"]) == reference_greedy(folder, prompt(
    5 * BS, "saved", 0), 4)


def test_load_fills_free_blocks_with_most_recent_blocks(small_llm, engine, folder, tmp_path):
  """A pool of 12 blocks: a running request uses some, and others are cached."""
  restart(engine)
  texts = [prompt(5 * BS, "small", i) for i in range(4)]
  run(engine, *texts, n=1)
  path = tmp_path / "cache"
  assert engine.save_prefix_cache(path) == 20
  with safe_open(path, "numpy") as file: keys = [key.tobytes() for key in file.get_tensor("keys")]
  small = restart(small_llm)
  run(small, texts[0], n=1)   # cached before the load
  own_blocks = [*small.blocks.evictable]
  small.add_request("0", tokens(prompt(2 * BS, "runs")), greedy(3))
  small.step()
  table_blocks = [block for seq in small.scheduler.running for block in seq.block_table]
  num_free = len(small.blocks.free_blocks)
  assert 0 < num_free == 12 - len(table_blocks) - len(own_blocks)
  assert small.load_prefix_cache(path) == num_free
  check_invariants(small)
  assert [*small.blocks.evictable][num_free:] == own_blocks, "own cached blocks are newer than loaded ones"
  assert lru_order(small)[:num_free] == keys[:num_free][::-1]
  assert not small.blocks.free_blocks and small.load_prefix_cache(path) == 0, "no block is free"
  run_to_end(small, 100)
  restart(small).load_prefix_cache(path)
  check_invariants(small)
  answers, num_cached = run(small, texts[3], texts[2], texts[0], n=1)
  assert answers == [reference_greedy(folder, texts[i], 1) for i in (3, 2, 0)] and num_cached == [4 * BS, 4 * BS, 0]


def test_load_and_save_in_several_batches_are_complete(engine, file, saved, monkeypatch):
  """Batches have three blocks. Some blocks are cached before the load."""
  _, expected = saved
  restart(engine)
  run(engine, prompt(5 * BS + 1, "saved", 1))
  monkeypatch.setattr(prefix_cache, "MAX_BYTES", 3 * len(next(iter(expected.values()))) + 5)
  assert Blocks(engine).count == 3
  missing = {*expected} - {*engine.blocks.cached_blocks}
  assert 3 < len(missing) < len(expected) and engine.load_prefix_cache(file) == len(missing)
  assert contents(engine) == expected
  before = file.read_bytes()
  restart(engine).load_prefix_cache(file)
  assert engine.save_prefix_cache(file) == len(expected)
  assert file.read_bytes() == before


def test_blocks_of_any_dtypes_and_shapes_are_read_and_written():
  """For example an int8 KV cache with scales."""
  n, rng = 11, np.random.default_rng(3)
  kinds = [(dtypes.bfloat16, (2, 3)), (dtypes.int8, (5,)), (dtypes.uint32, (2, 2)), (dtypes.float16, (1, 4, 2)),
           (dtypes.uint8, (3,))]
  caches = [Tensor.empty(n, *shape, dtype=kind).contiguous().realize() for kind, shape in kinds]
  model = SimpleNamespace(devices=Devices())
  runners = [SimpleNamespace(kv_caches=[part], model=model) for part in (caches[:2], caches[2:])]
  fake = SimpleNamespace(runners=runners, blocks=SimpleNamespace(num_blocks=n))
  for x in buffers(fake): x.allocator._copyin(x._buf, memoryview(bytearray(rng.bytes(x.nbytes))))
  def bytes_of(x): return np.frombuffer(x.as_memoryview(), np.uint8).reshape(n, -1)
  def whole(): return np.concatenate([bytes_of(x) for x in buffers(fake)], 1)
  blocks, before = Blocks(fake), whole()
  assert blocks.count == n and blocks.row_bytes == before.shape[1]
  assert (blocks.read([3, 1, 10]) == before[[3, 1, 10]]).all()
  rows = rng.integers(0, 256, (2, blocks.row_bytes), np.uint8)
  blocks.write([4, 9], rows)
  expected = before.copy()
  expected[[4, 9]] = rows
  assert (whole()[1:] == expected[1:]).all(), "only the null block may get padding"


@pytest.mark.parametrize("seed", range(3))
def test_chats_with_random_restarts_equal_reference(engine, folder, tmp_path, seed):
  rng = random.Random(seed)
  restart(engine)
  chats = [prompt(rng.randrange(1, 20), "chat", seed, i) for i in range(3)]
  path = tmp_path / "cache"
  for turn in range(8):
    i = rng.randrange(3)
    chats[i] += prompt(rng.randrange(1, 6), "turn", seed, turn)
    (answer,), (num_cached,) = run(engine, chats[i], n=4)
    assert answer == reference_greedy(folder, chats[i], 4)
    if num_cached: chats[i] += answer
    if rng.random() < 0.5:
      count = engine.save_prefix_cache(path)
      before = lru_order(engine), contents(engine)
      assert restart(engine).load_prefix_cache(path) == count
      assert (lru_order(engine), contents(engine)) == before
    check_invariants(engine)


# Errors

def test_load_file_of_other_weights_raises(tmp_path, file):
  check_refused(LLM(tiny_model(tmp_path / "other", seed=1), **ENGINE), file, "model ", "remove it")


def test_load_file_of_model_with_one_changed_norm_raises(folder, tmp_path, file):
  shutil.copytree(folder, tmp_path / "tuned")
  path = tmp_path / "tuned" / "model.safetensors"
  raw = bytearray(path.read_bytes())
  start, end = header_of(path)[0]["model.layers.1.input_layernorm.weight"]["data_offsets"]
  position = header_of(path)[1] + (start + end) // 2 + 21
  raw[position] ^= 1
  path.write_bytes(raw)
  check_refused(LLM(tmp_path / "tuned", **ENGINE), file, "model ")


@pytest.mark.parametrize(("options", "parts"), [
  ({"block_size": 8}, ["block_size '4', here '8'"]), ({"dtype": "float16"}, ["dtype 'float', here 'half'"]),
  ({"quantization": "int8"}, ["quantization 'None', here 'int8'"]),
  ({"speculative_config": {"model": "FOLDER", "num_speculative_tokens": 2}}, ["draft model None, here", "parts "]),
], ids=lambda x: next(iter(x)) if isinstance(x, dict) else "")
def test_load_file_with_other_block_layout_raises(folder, file, options, parts):
  options = json.loads(json.dumps(options).replace("FOLDER", str(folder)))
  check_refused(LLM(folder, **{**ENGINE, **options}), file, *parts)


def test_load_with_ngram_drafts_loads_all_blocks(folder, file, saved):
  new = LLM(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 2}, **ENGINE)
  assert new.load_prefix_cache(file) == len(saved[1])


@pytest.mark.parametrize(("changes", "part"), [
  ({"format": "0"}, "format '0', here '1'"), ({"tensor_parallel_size": "2"}, "tensor_parallel_size '2', here '1'"),
  ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype 'fp8'"), ({"parts": "4 of half (2, 8, 4)"}, "parts '4 of half"),
  ({"more": "1"}, "do not fit this engine")])
def test_load_file_of_other_format_raises(engine, file, changes, part):
  with_metadata(file, **changes)
  check_refused(engine, file, part)


def test_load_other_files_raises(engine, folder, tmp_path):
  (tmp_path / "empty").write_bytes(b"")
  (tmp_path / "noise").write_bytes(random.Random(1).randbytes(5000))
  (tmp_path / "text").write_text("hello " * 1000)
  (tmp_path / "folder").mkdir()
  for name in ("empty", "noise", "text", "folder"): check_refused(engine, tmp_path / name, "is damaged", "remove it")
  check_refused(engine, tmp_path / "missing", "does not exist")
  check_refused(engine, folder / "model.safetensors", "do not fit this engine")


def test_load_truncated_file_raises(engine, file):
  raw = file.read_bytes()
  restart(engine)
  _, start = header_of(file)
  for size in (*range(0, start, 37), start, start + 1, start + 32 * 5, *range(start, len(raw), 1777), len(raw) - 1):
    file.write_bytes(raw[:size])
    check_refused(engine, file, "is damaged")
  file.write_bytes(raw + b"\0")
  check_refused(engine, file, "is damaged")


@pytest.mark.parametrize("name", ["keys", "blocks", "checksums"])
def test_load_file_with_flipped_byte_loads_nothing(engine, file, name, monkeypatch):
  """The last block is damaged; good ones have been written to the device before."""
  header, start = header_of(file)
  raw = bytearray(file.read_bytes())
  raw[start + header[name]["data_offsets"][1] - 1] ^= 4
  file.write_bytes(raw)
  monkeypatch.setattr(prefix_cache, "MAX_BYTES", 4096)
  restart(engine)
  ids = prompt(4 * BS, "unharmed")
  expected = run(engine, ids)
  check_refused(engine, file, "is damaged (block", "remove it")
  assert run(engine, ids) == (expected[0], [3 * BS])


@settings(max_examples=150, deadline=None, suppress_health_check=[*HealthCheck])
@given(st.data())
def test_load_file_with_random_flips_loads_no_wrong_block(engine, saved, tmp_path_factory, data):
  path, expected = saved
  raw = bytearray(path.read_bytes())
  _, start = header_of(path)
  for _ in range(data.draw(st.integers(1, 3))):
    position = data.draw(st.integers(0, start - 1) | st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
  damaged = tmp_path_factory.getbasetemp() / "damaged"
  damaged.write_bytes(raw)
  restart(engine)
  before = state(engine)
  try: engine.load_prefix_cache(damaged)
  except ValueError: assert state(engine) == before
  else: assert contents(engine).items() <= expected.items()
  check_invariants(engine)


def test_without_prefix_caching_save_writes_nothing_and_load_raises(folder, file, tmp_path):
  plain = LLM(folder, enable_prefix_caching=False, **ENGINE)
  run(plain, prompt(20, "plain"))
  assert plain.save_prefix_cache(tmp_path / "none") == 0 and not (tmp_path / "none").exists()
  check_refused(plain, file, "enable_prefix_caching=False")


# Saving

def test_save_empty_cache_keeps_old_file(engine, file):
  before = file.read_bytes()
  assert restart(engine).save_prefix_cache(file) == 0 and file.read_bytes() == before


@pytest.mark.parametrize("place", ["os.replace", "os.fsync", "tinyvllm_extra.prefix_cache.zlib.crc32"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_failed_save_keeps_old_file(engine, file, place, error, monkeypatch):
  before, calls = file.read_bytes(), []
  restart(engine)
  expected = run(engine, prompt(5 * BS, "fails"))[0]

  def fail(*args):
    calls.append(args)
    if len(calls) > 2 or place.startswith("os"): raise error
    return 0
  with monkeypatch.context() as patch:
    patch.setattr(place, fail)
    with pytest.raises(type(error)): engine.save_prefix_cache(file)
  assert calls and file.read_bytes() == before and os.listdir(file.parent) == [file.name]
  assert run(engine, prompt(5 * BS, "fails")) == (expected, [4 * BS]), "the engine continues"
  assert engine.save_prefix_cache(file) > 0 and file.read_bytes() != before


def test_save_to_impossible_path_raises_os_error(engine, tmp_path):
  restart(engine)
  run(engine, prompt(5 * BS, "nowhere"))
  (tmp_path / "folder").mkdir()
  for path in (tmp_path / "missing" / "cache", tmp_path / "folder"):
    with pytest.raises(OSError): engine.save_prefix_cache(path)
  assert os.listdir(tmp_path) == ["folder"] and not os.listdir(tmp_path / "folder")


def test_save_overwrites_damaged_prefix_cache_but_no_other_file(engine, file, tmp_path):
  restart(engine)
  run(engine, prompt(5 * BS, "other"))
  other = tmp_path / "notes"
  other.write_text("hello " * 1000)
  with pytest.raises(FileExistsError, match="'.*notes' is not a prefix cache: remove it"):
    engine.save_prefix_cache(other)
  assert other.read_text() == "hello " * 1000
  for size in (0, 5, 8, 60):
    file.write_bytes(file.read_bytes()[:size])
    assert engine.save_prefix_cache(file) == restart(engine).load_prefix_cache(file) > 0


def test_save_follows_symlink(engine, file, tmp_path):
  restart(engine)
  run(engine, prompt(5 * BS, "link"))
  (tmp_path / "link").symlink_to(file)
  count = engine.save_prefix_cache(tmp_path / "link")
  assert (tmp_path / "link").is_symlink() and restart(engine).load_prefix_cache(file) == count


# Draft model and several devices

@pytest.mark.slow
def test_draft_model_blocks_are_saved(folder, tmp_path, monkeypatch):
  """As many drafts are accepted as without the restart: noise in the blocks would give wrong drafts."""
  monkeypatch.setattr(prefix_cache, "MAX_BYTES", 4096)
  llm = LLM(folder, speculative_config={"model": str(folder), "num_speculative_tokens": 3}, **ENGINE)
  first = prompt(8 * BS + 1, "draft")
  path = tmp_path / "cache"

  def cached_and_accepted():
    before = llm.get_metrics()["spec_decode_num_accepted_tokens"]
    (answer,), (num_cached,) = run(llm, first, n=20)
    assert answer == reference_greedy(folder, first, 20)
    return num_cached, llm.get_metrics()["spec_decode_num_accepted_tokens"] - before
  cached_and_accepted()
  count = llm.save_prefix_cache(path)
  before = contents(llm)
  expected = cached_and_accepted()
  assert expected[0] == 8 * BS and expected[1] > 10
  assert restart(llm).load_prefix_cache(path) == count and contents(llm) == before
  assert cached_and_accepted() == expected


@pytest.mark.slow
@pytest.mark.skipif(Device.DEFAULT != "CPU", reason="the number of other devices is fixed")
def test_blocks_of_two_devices_are_saved(folder, tmp_path, file, monkeypatch):
  monkeypatch.setattr(prefix_cache, "MAX_BYTES", 2048)
  llm = LLM(folder, tensor_parallel_size=2, **ENGINE)
  check_refused(llm, file, "tensor_parallel_size '1', here '2'")
  first = prompt(6 * BS + 1, "devices")
  expected, _ = run(llm, first)
  count = llm.save_prefix_cache(tmp_path / "cache")
  before = contents(llm)
  assert restart(llm).load_prefix_cache(tmp_path / "cache") == count and contents(llm) == before
  assert run(llm, first) == (expected, [6 * BS]) and expected == [reference_greedy(folder, first, 6)]


# AsyncLLM and the server

@pytest.mark.slow
def test_async_llm_saves_between_steps(folder, tmp_path):
  path = tmp_path / "cache"
  llm = AsyncLLM(folder, prefix_cache_file=str(path), **ENGINE)
  ids = prompt(6 * BS + 1, "async")

  async def stream_and_save():
    output_ids = []
    async for output in llm.generate(tokens(ids), greedy(40)):
      output_ids += ids_of(output)
      if not path.exists(): llm.save_prefix_cache()
    return output_ids
  assert asyncio.run(stream_and_save()) == reference_greedy(folder, ids, 40)
  wait_until(path.exists, "the file exists")
  path.unlink()
  llm.shutdown()
  again = AsyncLLM(folder, prefix_cache_file=str(path), **ENGINE)
  assert again.llm.generate(tokens(ids), greedy(1), use_tqdm=False)[0].num_cached_tokens == 6 * BS
  again.shutdown()


def test_model_replaced_before_shutdown_refuses_old_blocks(folder, tmp_path):
  """For example if a server restarts after a model update."""
  path, model = tmp_path / "cache", Path(shutil.copytree(folder, tmp_path / "model"))
  llm = AsyncLLM(model, prefix_cache_file=str(path), **ENGINE)
  run(llm.llm, prompt(20, "replaced"))
  tiny_model(model, seed=1)
  llm.shutdown()
  check_refused(LLM(model, **ENGINE), path, "model ")
  assert LLM(folder, **ENGINE).load_prefix_cache(path) > 0


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
  folder = tiny_model(tmp_path_factory.mktemp("served"), words=True)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
  return folder


def ask(server, question):
  """Return the answer and the number of cached prompt tokens."""
  messages = [{"role": "system", "content": "the cat sat on the mat and the dog ran to the red house " * 2},
              {"role": "user", "content": question}]
  body = {"messages": messages, "temperature": 0.0, "max_tokens": 8}
  answer = server.post("/v1/chat/completions", body).raise_for_status().json()
  return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def warnings_of(server):
  return [line for line in server.log.splitlines() if "prefix cache '" in line and "does not exist" not in line]


@pytest.mark.slow
def test_server_keeps_prefix_cache_across_restarts(chat_folder, tmp_path):
  """Saved on SIGUSR1 and SIGTERM, loaded at startup. A damaged or unwritable file gives one line in the log."""
  path = tmp_path / "cache"
  options = [*SERVE, "--prefix-cache-file", path]
  with LocalServer(chat_folder, *options) as server:
    assert server.log.count("prefix cache") == 1 and "does not exist; starting without it" in server.log
    first, num_cached = ask(server, "hello")
    assert num_cached == 0
    server.signal(signal.SIGUSR1)
    wait_until(path.exists, "SIGUSR1 saves the file")
    answer, num_cached = ask(server, "hello")
    assert answer == first and num_cached > 40
    path.unlink()
    assert server.stop() == 0, server.log
    assert path.exists() and os.listdir(tmp_path) == ["cache"] and "Traceback" not in server.log
  raw = path.read_bytes()
  with LocalServer(chat_folder, *options) as server:
    assert ask(server, "hello") == (first, num_cached)
    assert ask(server, "the dog")[1] > 20, "the system prompt is cached"
    assert not warnings_of(server)
    server.signal(signal.SIGKILL)
    server.wait()
  assert path.read_bytes() == raw
  path.write_bytes(raw[:-7])
  shutil.copytree(tmp_path, tmp_path.parent / "gone")
  options[-1] = tmp_path.parent / "gone" / "cache"
  with LocalServer(chat_folder, *options) as server:
    assert len(warnings_of(server)) == 1 and "damaged" in warnings_of(server)[0] and "Traceback" not in server.log
    assert ask(server, "hello") == (first, 0)
    shutil.rmtree(tmp_path.parent / "gone")
    assert server.stop() == 0, server.log
    assert len(warnings_of(server)) == 2 and "is not written" in warnings_of(server)[1]
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_signals_during_save_do_not_damage_file(chat_folder, tmp_path):
  path, slow = tmp_path / "cache", tmp_path / "slow"
  fault = f"""
import os, pathlib, time, tinyvllm_extra.prefix_cache
replace = os.replace
def slowly(*paths):
  pathlib.Path({str(slow)!r}).touch()
  time.sleep(2)
  replace(*paths)
os.replace = slowly
"""
  with LocalServer(chat_folder, *SERVE, "--prefix-cache-file", path, before=fault) as server:
    ask(server, "hello")
    server.signal()
    wait_until(slow.exists, "the save starts")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT): server.signal(number)
    code = server.wait()
    assert path.exists() and sorted(os.listdir(tmp_path)) == ["cache", "slow"] and "Traceback" not in server.log
    assert code in (0, 130), server.log
  with LocalServer(chat_folder, *SERVE, "--prefix-cache-file", path) as server:
    assert ask(server, "hello")[1] > 40 and not warnings_of(server)


def test_async_llm_with_unusable_file_warns_and_starts(folder, file, caplog):
  with_metadata(file, format="0")
  with caplog.at_level(logging.WARNING, "tinyvllm"):
    llm = AsyncLLM(folder, prefix_cache_file=str(file), **ENGINE)
    llm.shutdown()
  assert [record.levelname for record in caplog.records] == ["WARNING"] and "format '0'" in caplog.text
