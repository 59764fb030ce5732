"""Files of the prefix cache that do not fit or are damaged are refused and leave the engine unchanged; a failed save
keeps the old file."""
import errno
import os
import random
import shutil
from unittest.mock import patch

import pytest
from helpers.data import read_data
from helpers.engines import BS, ENGINE, check_invariants, prompt
from helpers.prefix_cache import check_refused, contents, header_of, restart, run, state, with_metadata

from tinyvllm import LLM
from tinyvllm_extra.cache import prefix_cache

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


@pytest.mark.parametrize("name", ["keys", "blocks", "checksums"])
def test_load_file_with_flipped_byte_loads_nothing(llm, file, name, monkeypatch):
  """The last block is damaged; good ones have been written to the device before."""
  raw, (header, start) = bytearray(file.read_bytes()), header_of(file)
  raw[start + header[name]["data_offsets"][1] - 1] ^= 4
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
  with pytest.raises(FileExistsError, match="'.*notes' is not a prefix cache: remove it"):
    llm.save_prefix_cache(other)
  assert other.read_text() == "hello " * 1000
  for size in (0, 5, 8, 60):
    file.write_bytes(file.read_bytes()[:size])
    assert llm.save_prefix_cache(file) == restart(llm).load_prefix_cache(file) > 0
