"""GGUF files: damaged and split ones, and commands."""
import random
import re
import sys

import gguf
import numpy as np
import pytest
from helpers.commands import check_error, flags, run_command
from helpers.data import read_data
from helpers.engines import ENGINE
from helpers.gguf_files import read_matrices, write_gguf
from helpers.models import tiny_model

from tinyvllm_extra.models import find_model
from tinyvllm_extra.formats.hub import open_checkpoint
from tinyvllm_extra.packages import MissingPackage

WIDE = {"hidden_size": 256, "intermediate_size": 512}   # blocks have up to 256 inputs
# Arguments of write_gguf, with a number of tokens and shapes of tensors (None: missing), and parts of the message
REFUSED = read_data("refused_gguf.json")


# Invalid files

def load(path):
  """Return the checkpoint, with all metadata read, but no weights."""
  checkpoint = open_checkpoint(path)
  find_model(checkpoint.hf_config, path)
  checkpoint.tokenizer()
  return checkpoint


def check_refused(path, *parts): check_error(lambda: load(path), path, *parts)


def test_gguf_without_tokenizers_raises_with_extra(tmp_path, monkeypatch):
  folder = tiny_model(tmp_path / "hf")
  path = write_gguf(tmp_path / "model.gguf", folder)
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  with pytest.raises(MissingPackage, match=r"tokenizers.*pip install 'tinyvllm\[hf\]'"): load(path)
  load(write_gguf(path, folder, tokenizer="llama"))   # sentencepiece needs no package


@pytest.mark.parametrize("options,parts", REFUSED)
def test_unsupported_or_wrong_content_raises_with_value(tmp_path, options, parts):
  tensors = {name: shape and np.zeros(shape) for name, shape in options.get("tensors", {}).items()}
  options = {**options, "tensors": tensors, "tokens": ["a"] * options.get("tokens", 0)}
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf", **WIDE), **options)
  check_refused(path, *parts)


def test_truncated_file_raises(tmp_path):
  path = write_gguf(tmp_path / "whole.gguf", tiny_model(tmp_path / "hf"), "Q8_0", tokenizer="llama")
  data = path.read_bytes()
  load(path)
  truncated = tmp_path / "truncated.gguf"
  for size in [0, 1, 3, 4, 5, 8, 16, 24, 25, *range(30, len(data), len(data) // 300), len(data) - 32]:
    truncated.write_bytes(data[:size])
    check_refused(truncated)
  check_refused(truncated, len(data) - 32)


def test_damaged_file_raises_or_loads(tmp_path):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf"), "Q8_0", tokenizer="llama")
  data = path.read_bytes()
  rng = random.Random(0)
  end = data.index(b"output_norm.weight")   # most of the bytes before the tensor data
  for i in range(300):
    damaged = bytearray(data)
    for _ in range(rng.randrange(1, 4)): damaged[rng.randrange(end)] = rng.choice([0, 1, 8, 9, 127, 255, i % 256])
    path.write_bytes(damaged)
    try:
      for tensor in load(path).all_tensors.values(): tensor.read_matrix(None)
    except ValueError as e: assert str(path) in str(e)


def test_file_of_other_format_raises(tmp_path):
  path = tmp_path / "model.gguf"
  check_refused(path)
  big_endian = b"GGUF" + (3).to_bytes(4, "big") + bytes(16)
  for data, *parts in ((b"PK but no GGUF", "GGUF"), (b"GGUF but no more", "version"), (big_endian, "version", "2, 3")):
    path.write_bytes(data)
    check_refused(path, *parts)


# Split files

def write_split(folder):
  """Write a tiny model, 21 tensors, as three GGUF files and return them."""
  write_gguf(folder / "model.gguf", tiny_model(folder / "hf"), "Q8_0", tensors_per_file=8)
  paths = [folder / f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
  assert sorted(folder.glob("*.gguf")) == paths
  return paths


@pytest.mark.parametrize("options", [
  {"tensors_per_file": 8}, {"tensors_per_file": 11, "small_first_shard": True},
  {"metadata": {"split.no": 0, "split.count": 0}}], ids=["three parts", "first part empty", "merged"])
def test_split_file_equals_whole_file(tmp_path, options):
  """llama-gguf-split --merge writes split.count=0."""
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf"), "Q8_0", **options)
  assert len([*tmp_path.glob("*.gguf")]) == (3 if "tensors_per_file" in options else 1)
  assert bool(gguf.GGUFReader(path).tensors) != ("small_first_shard" in options)
  whole = write_gguf(tmp_path / "whole.gguf", tmp_path / "hf", "Q8_0")
  checkpoints = [open_checkpoint(path), open_checkpoint(whole)]
  pieces = [{name: (x.dtype, x.shape, x.raw().tobytes()) for name, x in checkpoint.stored_tensors().items()}
            for checkpoint in checkpoints]
  assert pieces[0] == pieces[1] and len(pieces[0]) == 21
  assert checkpoints[0].hf_config == checkpoints[1].hf_config
  read_matrices(path)


def test_split_missing_later_or_renamed_part_raises_with_expected_name(tmp_path):
  paths = write_split(tmp_path)
  for i in (1, 2): check_refused(paths[i], f"part {i + 1} of 3", paths[0])
  renamed = paths[0].rename(tmp_path / "renamed.gguf")
  check_refused(renamed, "part 1 of 3", "-00001-of-00003.gguf")
  renamed.rename(paths[0])
  paths[1].unlink()
  check_refused(paths[0], "part 1 of 3", f"{paths[1]} is missing")


def test_split_part_of_other_split_raises_with_its_name(tmp_path):
  paths = write_split(tmp_path)
  write_gguf(tmp_path / "four.gguf", tmp_path / "hf", "Q8_0", tensors_per_file=6)
  write_gguf(tmp_path / "tied.gguf", tiny_model(tmp_path / "tied", tie_word_embeddings=True), tensors_per_file=8)
  for other, numbers in ((paths[1].name, "[1, 3, 21]"), ("four-00003-of-00004.gguf", "[2, 4, 21]"),
                         ("tied-00003-of-00003.gguf", "[2, 3, 20]")):
    paths[2].write_bytes((tmp_path / other).read_bytes())
    check_refused(paths[0], paths[2], numbers, "expected [2, 3, 21]")


def test_split_wrong_number_of_tensors_raises(tmp_path):
  paths, key = write_split(tmp_path), b"split.tensors.count\5\0\0\0"   # an int32
  for path in paths: path.write_bytes(path.read_bytes().replace(key + b"\x15", key + b"\x17"))
  check_refused(paths[0], "21 tensors", "split.tensors.count=23")


# Commands

@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_generate_command_quantization_gguf_names_the_file_type(tmp_path, words_folder, kind):
  """Like vLLM, also for a file without quantized weights."""
  path = write_gguf(tmp_path / "words.gguf", words_folder, kind, tokenizer="llama")
  before = sorted(tmp_path.rglob("*"))
  options = ["generate", "the cat", "--model", str(path), "--max-tokens", "8", *flags(**ENGINE)]
  runs = [run_command(*options), run_command(*options, "--quantization", "gguf")]
  assert runs[0].stdout == runs[1].stdout and [run.returncode for run in runs] == [0, 0]
  assert sorted(tmp_path.rglob("*")) == before, "no file is written"
  run = run_command(*options, "--quantization", "fp8")
  assert run.returncode == 1
  assert re.search(r"quantization='fp8' does not match .*words.gguf, which is (gguf|not quantized): use '(gguf|int8)'",
                   run.stderr)


@pytest.mark.parametrize("command", ["generate a --model", "chat --model", "serve", "serve --model"])
def test_command_with_damaged_gguf_prints_its_path(tmp_path, command):
  (tmp_path / "bad.gguf").write_bytes(b"GGUF")
  run = run_command(*command.split(), tmp_path / "bad.gguf")
  assert run.returncode == 1 and "bad.gguf" in run.stderr and [*tmp_path.iterdir()] == [tmp_path / "bad.gguf"]
