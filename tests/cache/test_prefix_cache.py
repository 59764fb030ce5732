"""The prefix cache in a file: a restarted engine gives the same outputs and cache hits as the old one; blocks of other
engines or damaged blocks are never loaded; a file is replaced atomically. Most tests simulate a restart:
they empty an engine's cache and fill its blocks with noise."""
import errno
import os
import random
import shutil
import zlib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from helpers.data import read_data
from helpers.engines import BS, ENGINE, check_invariants, greedy, ids_of, prompt, run_to_end, set_overlap, tokens
from helpers.models import tiny_model
from helpers.prefix_cache import (buffers, check_refused, contents, header_of, lru_order, restart, run, state,
                                  with_metadata)
from helpers.reference import reference_greedy
from helpers.servers import wait_until
from safetensors import safe_open
from tinygrad import Tensor, dtypes

from tinyvllm import LLM, AsyncLLM
from tinyvllm.backend import Devices
from tinyvllm_extra.cache import prefix_cache


@pytest.fixture(scope="module")
def saved(llm, tmp_path_factory):
  """A file with the blocks of three prompts, and the cached blocks of the engine that wrote it."""
  restart(llm)
  run(llm, *[prompt(5 * BS + i, "saved", i) for i in range(3)])
  path = tmp_path_factory.mktemp("saved") / "cache"
  assert llm.save_prefix_cache(path) == len(llm.blocks.cached_blocks)
  return path, contents(llm)


@pytest.fixture
def file(saved, tmp_path):
  """A copy of the saved file."""
  return Path(shutil.copy(saved[0], tmp_path / "cache"))


# Cache hits after a restart

def test_load_in_new_engine_gives_equal_outputs_and_hits(llm, folder, tmp_path, caplog):
  first = [prompt(7 * BS + 1, "a", i) for i in range(3)]
  answers, _ = run(restart(llm), *first, first[1])   # the second is the most recently used
  again = [*first, first[0] + answers[0] + prompt(3, "b"), first[1][:3 * BS] + prompt(9, "c"), prompt(20, "d")]
  (tmp_path / "link").symlink_to(tmp_path / "cache")
  with caplog.at_level("INFO", "tinyvllm"):
    count, new = llm.save_prefix_cache(tmp_path / "link"), LLM(folder, **ENGINE)
    assert new.load_prefix_cache(str(tmp_path / "link")) == count == len(llm.blocks.cached_blocks)
  assert sum(f"prefix cache: {count} blocks" in line for line in caplog.messages) == 2
  assert (tmp_path / "link").is_symlink(), "the file that it names is replaced"
  assert contents(new) == contents(llm) and lru_order(new) == lru_order(llm) == [*new.blocks.cached_blocks]
  check_invariants(new)
  ids, num_cached = run(new, *again)
  assert (ids, num_cached) == run(llm, *again) and ids == [reference_greedy(folder, ids, 6) for ids in again]
  assert num_cached[:3] == [7 * BS] * 3 and num_cached[3] >= 7 * BS and num_cached[4:] == [3 * BS, 0]
  assert new.get_metrics()["prefix_cache_hits"] == sum(num_cached) and lru_order(new) == lru_order(llm)


def test_saved_file_is_valid_safetensors(saved, llm):
  path, expected = saved
  with safe_open(path, "numpy") as file:
    rows = [row.tobytes() for row in file.get_tensor("blocks")]
    assert file.metadata()["format"] == "2" and [*file.keys()] == ["blocks"]
  assert len(rows) == len(expected) and {row[4:36]: row[36:] for row in rows} == expected
  assert [zlib.crc32(row[4:]).to_bytes(4, "little") for row in rows] == [row[:4] for row in rows]
  assert path.stat().st_mode & 0o77 == 0, "only the owner may read the file"


@pytest.mark.parametrize("overlaps", ["", "overlapped"])
def test_save_and_load_do_not_change_running_requests(llm, folder, file, tmp_path, overlaps, monkeypatch):
  """Also with a step in flight. A save writes the blocks of running requests first."""
  set_overlap(monkeypatch, llm.runner, overlaps)
  prompts, cached = [prompt(3 * BS + 2, "runs", i) for i in range(3)], prompt(5 * BS, "saved", 0)
  run(restart(llm), prompt(4 * BS, "before"))
  for i, ids in enumerate(prompts): llm.add_request(str(i), tokens(ids), greedy(12))
  for _ in range(4): llm.step()
  table_blocks = {block for seq in llm.scheduler.running for block in seq.block_table}
  running_keys = {key for key, block in llm.blocks.cached_blocks.items() if block in table_blocks}
  assert llm.save_prefix_cache(tmp_path / "own") == len(llm.blocks.cached_blocks) and len(running_keys) >= 9
  with safe_open(tmp_path / "own", "numpy") as own: keys = [x.tobytes() for x in own.get_tensor("blocks")[:, 4:36]]
  assert {*keys[:len(running_keys)]} == running_keys and {*keys} == {*llm.blocks.cached_blocks}
  assert llm.load_prefix_cache(tmp_path / "own") == 0, "all blocks are cached"
  llm.abort_request("2")   # the step in flight may still write to its blocks
  assert llm.load_prefix_cache(file) > 0
  check_invariants(llm)
  llm.add_request("3", tokens(cached), greedy(4))
  last = run_to_end(llm, 100)
  assert [ids_of(last[str(i)]) for i in range(2)] == [reference_greedy(folder, ids, 12) for ids in prompts[:2]]
  assert last["3"].num_cached_tokens == 4 * BS and ids_of(last["3"]) == reference_greedy(folder, cached, 4)


def test_load_fills_free_blocks_with_most_recent_blocks(small_llm, llm, folder, tmp_path):
  """A pool of 12 blocks: a running request uses some, and others are cached."""
  texts, path = [prompt(5 * BS, "small", i) for i in range(4)], tmp_path / "cache"
  run(restart(llm), *texts, n=1)
  keys = [*reversed(lru_order(llm))]
  assert llm.save_prefix_cache(path) == len(keys) == 20
  small = restart(small_llm)
  run(small, texts[0], n=1)   # cached before the load
  own_blocks = [*small.blocks.evictable]
  small.add_request("0", tokens(prompt(2 * BS, "runs")), greedy(3))
  small.step()
  num_free = len(small.blocks.free_blocks)
  assert num_free > 0 and small.load_prefix_cache(path) == num_free
  check_invariants(small)
  assert [*small.blocks.evictable][num_free:] == own_blocks, "own cached blocks are newer than loaded ones"
  assert lru_order(small)[:num_free] == keys[:num_free][::-1]
  assert not small.blocks.free_blocks and small.load_prefix_cache(path) == 0, "no block is free"
  run_to_end(small, 100)
  restart(small).load_prefix_cache(path)
  answers, num_cached = run(small, texts[3], texts[2], texts[0], n=1)
  assert answers == [reference_greedy(folder, texts[i], 1) for i in (3, 2, 0)] and num_cached == [4 * BS, 4 * BS, 0]


def test_blocks_of_any_dtypes_and_shapes_are_read_and_written():
  """For example an int8 KV cache with scales, or a cache on two devices."""
  n, rng = 11, np.random.default_rng(3)
  kinds = [(dtypes.bfloat16, (2, 3)), (dtypes.int8, (5,)), (dtypes.uint32, (2, 2)), (dtypes.float16, (1, 4, 2)),
           (dtypes.uint8, (3,))]
  caches = [Tensor.empty(n, *shape, dtype=kind).contiguous().realize() for kind, shape in kinds]
  caches.append(Tensor.empty(n, 4, 2, device=("CPU:1", "CPU:2")).contiguous().realize())
  model = SimpleNamespace(devices=Devices())
  runners = [SimpleNamespace(kv_caches=[part], model=model) for part in (caches[:2], caches[2:])]
  fake = SimpleNamespace(runners=runners, blocks=SimpleNamespace(num_blocks=n))
  for x in buffers(fake): x.allocator._copyin(x._buf, memoryview(bytearray(rng.bytes(x.nbytes))))
  blocks = prefix_cache.Blocks(fake)
  expected = np.concatenate([np.frombuffer(x.as_memoryview(), np.uint8).reshape(n, -1) for x in buffers(fake)], 1)
  assert blocks.count == n and (blocks.read([3, 1, 10]) == expected[[3, 1, 10]]).all()
  expected[[4, 9]] = rng.integers(0, 256, (2, blocks.row_bytes), np.uint8)
  blocks.write([4, 9], expected[[4, 9]])
  assert (blocks.read([*range(1, n)]) == expected[1:]).all(), "only the null block may get padding"


def test_draft_model_blocks_are_saved(folder, tmp_path, monkeypatch):
  """As many drafts are accepted as without the restart: noise in the blocks would give wrong drafts."""
  monkeypatch.setattr(prefix_cache, "MAX_BYTES", 4096)
  llm = LLM(folder, speculative_config={"model": str(folder), "num_speculative_tokens": 3}, **ENGINE)
  first, results = prompt(8 * BS + 1, "draft"), []
  for i in range(3):
    if i == 2:
      count, before = llm.save_prefix_cache(tmp_path / "cache"), contents(llm)
      assert restart(llm).load_prefix_cache(tmp_path / "cache") == count and contents(llm) == before
    output, = llm.generate(tokens(first), greedy(20), use_tqdm=False)
    results.append((ids_of(output), output.num_cached_tokens, output.metrics.num_accepted_tokens))
  assert results[2] == results[1] and results[1][:2] == (reference_greedy(folder, first, 20), 8 * BS)
  assert results[1][2] > 10


# AsyncLLM

async def test_async_llm_saves_between_steps(folder, tmp_path):
  path = tmp_path / "cache"
  llm = AsyncLLM(folder, prefix_cache_file=str(path), **ENGINE)
  ids, output_ids = prompt(6 * BS + 1, "async"), []
  async for output in llm.generate(tokens(ids), greedy(40)):
    output_ids += ids_of(output)
    if not path.exists(): llm.save_prefix_cache()
  assert output_ids == reference_greedy(folder, ids, 40)
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


def test_async_llm_with_unusable_file_warns_and_continues(folder, file, caplog):
  """At startup and at shutdown, one line each."""
  with_metadata(file, format="0")
  with caplog.at_level("WARNING", "tinyvllm"):
    llm = AsyncLLM(folder, prefix_cache_file=str(file), **ENGINE)
    run(llm.llm, prompt(20, "unusable"))
    file.unlink()
    file.mkdir()
    llm.shutdown()
  assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
  assert "format '0'" in caplog.text and "is not written" in caplog.text and [*file.parent.iterdir()] == [file]


# Files that do not fit or are damaged are refused and leave the engine unchanged; a failed save keeps the old file

REFUSED = read_data("refused_prefix_caches.json")


# Errors

def test_load_file_of_model_with_one_changed_norm_raises(folder, tmp_path, file):
  path = shutil.copytree(folder, tmp_path / "tuned") / "model.safetensors"
  raw, (header, position) = bytearray(path.read_bytes()), header_of(path)
  raw[position + sum(header["model.layers.1.input_layernorm.weight"]["data_offsets"]) // 2 + 21] ^= 1
  path.write_bytes(raw)
  check_refused(LLM(tmp_path / "tuned", **ENGINE), file, "model ", "remove it")


@pytest.mark.parametrize("options, part", REFUSED["engines"], ids=str)
def test_load_file_with_other_block_layout_raises(folder, file, options, part):
  if "model" in options: options = {"speculative_config": {"model": folder, "num_speculative_tokens": 2}}
  check_refused(LLM(folder, **{**ENGINE, **options}), file, part, *["parts "] * ("speculative_config" in options))


def test_load_with_ngram_drafts_loads_all_blocks(folder, file, saved):
  new = LLM(folder, speculative_config={"method": "ngram", "num_speculative_tokens": 2}, **ENGINE)
  assert new.load_prefix_cache(file) == len(saved[1])


@pytest.mark.parametrize("changes, part", REFUSED["metadata"])
def test_load_file_of_other_format_raises(llm, file, changes, part):
  with_metadata(file, **changes)
  check_refused(llm, file, part)


def test_load_other_or_truncated_file_raises(llm, folder, file, tmp_path):
  check_refused(llm, tmp_path / "missing", "does not exist")
  check_refused(llm, tmp_path, "is damaged", "remove it")
  check_refused(llm, folder / "model.safetensors", "do not fit this engine")
  raw, (_, start) = file.read_bytes(), header_of(file)
  sizes = [*range(0, start, 37), start, start + 1, start + 32 * 5, *range(start, len(raw), 1777), len(raw) - 1]
  restart(llm)
  for content in (random.Random(1).randbytes(5000), b"hello " * 1000, raw + b"\0", *(raw[:size] for size in sizes)):
    file.write_bytes(content)
    check_refused(llm, file, "is damaged", "remove it")


@pytest.mark.parametrize("place", [0, 4, -1], ids=["checksum", "key", "block"])
def test_load_file_with_flipped_byte_loads_nothing(llm, file, place, monkeypatch):
  """The last block is damaged; good ones have been written to the device before."""
  raw, (header, _) = bytearray(file.read_bytes()), header_of(file)
  raw[place % header["blocks"]["shape"][1] - header["blocks"]["shape"][1]] ^= 4
  file.write_bytes(raw)
  monkeypatch.setattr(prefix_cache, "MAX_BYTES", 4096)
  ids = prompt(4 * BS, "unharmed")
  expected, _ = run(restart(llm), ids)
  check_refused(llm, file, "is damaged (block", "remove it")
  assert run(llm, ids) == (expected, [3 * BS])


def test_load_file_with_random_flips_loads_no_wrong_block(llm, saved, tmp_path):
  path, expected = saved
  rng, raw, (_, start) = random.Random(0), path.read_bytes(), header_of(path)
  for _ in range(150):
    damaged = bytearray(raw)
    for _ in range(rng.randint(1, 3)): damaged[rng.randrange(rng.choice([start, len(raw)]))] ^= rng.randrange(1, 256)
    (tmp_path / "damaged").write_bytes(damaged)
    before = state(restart(llm))
    try: llm.load_prefix_cache(tmp_path / "damaged")
    except ValueError: assert state(llm) == before
    else: assert contents(llm).items() <= expected.items()
    check_invariants(llm)


def test_without_prefix_caching_save_writes_nothing_and_load_raises(folder, file, tmp_path):
  plain = LLM(folder, enable_prefix_caching=False, **ENGINE)
  run(plain, prompt(20, "plain"))
  assert plain.save_prefix_cache(tmp_path / "none") == 0 and not (tmp_path / "none").exists()
  check_refused(plain, file, "enable_prefix_caching=False")


# Saving

@pytest.mark.parametrize("place, before_error", [
  ("os.replace", []), ("os.fsync", []), ("tinyvllm_extra.formats.prefix_file.zlib.crc32", [0, 0])])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_failed_save_keeps_old_file(llm, file, place, before_error, error):
  before, ids = file.read_bytes(), prompt(5 * BS, "fails")
  assert restart(llm).save_prefix_cache(file) == 0 and file.read_bytes() == before, "no block is cached"
  expected, _ = run(llm, ids)
  with patch(place, side_effect=[*before_error, error]), pytest.raises(type(error)): llm.save_prefix_cache(file)
  assert file.read_bytes() == before and os.listdir(file.parent) == [file.name]
  assert run(llm, ids) == (expected, [4 * BS]), "the engine continues"
  assert llm.save_prefix_cache(file) > 0 and file.read_bytes() != before


def test_save_overwrites_damaged_prefix_cache_but_no_other_file(llm, file, tmp_path):
  run(restart(llm), prompt(5 * BS, "other"))
  other = tmp_path / "notes"
  other.write_text("hello " * 1000)
  with pytest.raises(FileExistsError, match="'.*notes' is not a prefix cache: remove it"): llm.save_prefix_cache(other)
  assert other.read_text() == "hello " * 1000
  for size in (0, 5, 8, 60):
    file.write_bytes(file.read_bytes()[:size])
    assert llm.save_prefix_cache(file) == restart(llm).load_prefix_cache(file) > 0
