"""Files of the prefix cache that do not fit or are damaged are refused and leave the engine unchanged; a failed save
keeps the old file."""
import errno
import json
import os
import random
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from helpers.engines import ENGINE, check_invariants
from helpers.models import tiny_model
from helpers.prefix_cache import (BS, check_refused, contents, header_of, restart, run, state,
                                  with_metadata)
from helpers.requests import prompt

from tinyvllm import LLM
from tinyvllm_extra import prefix_cache


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
