"""GGUF files: damaged and split ones, the output folder of a conversion, and commands."""
import errno
import random
import re
import sys

import gguf
import numpy as np
import pytest
from helpers.commands import process
from helpers.engines import ENGINE
from helpers.gguf_files import check_conversion, write_gguf
from helpers.models import tiny_model
from helpers.requests import flags

from tinyvllm_extra.formats import gguf as loader
from tinyvllm_extra.cli import main
from tinyvllm_extra.cli.convert import convert
from tinyvllm_extra.models import find_model
from tinyvllm_extra.formats.checkpoints import open_checkpoint
from tinyvllm_extra.packages import MissingPackage

WIDE = {"hidden_size": 256, "intermediate_size": 512}   # blocks have up to 256 inputs


# Invalid files

def check_refused(path, folder, *parts):
  """Check that convert and load raise the same one-line error with these parts, and that no file is left."""
  before = sorted(folder.parent.rglob("*"))
  with pytest.raises(ValueError) as e: convert(path, folder)
  message = str(e.value)
  with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):   # reads all metadata, but no weights
    checkpoint = open_checkpoint(path)
    find_model(checkpoint.hf_config, path)
    checkpoint.tokenizer()
  for part in (path, *parts): assert str(part) in message, f"{part} is not in: {message}"
  assert len(message.splitlines()) == 1
  assert sorted(folder.parent.rglob("*")) == before


def test_convert_without_tokenizers_raises_with_extra(tmp_path, monkeypatch):
  folder = tiny_model(tmp_path / "hf")
  path = write_gguf(tmp_path / "model.gguf", folder)
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  with pytest.raises(MissingPackage, match=r"tokenizers.*pip install 'tinyvllm\[hf\]'"):
    convert(path, tmp_path / "converted")
  convert(write_gguf(path, folder, tokenizer="llama"), tmp_path / "converted")   # sentencepiece needs no package


@pytest.mark.parametrize("options,parts", [
  *[({"metadata": {"general.architecture": x}}, [x, "llama, qwen2, qwen3"]) for x in ("gpt2", "mamba")],
  *[({"kinds": {"ffn_up": x}}, ["blk.0.ffn_up.weight", x, "Q4_0, Q4_1", "Q2_K, Q3_K", "IQ4_NL, IQ4_XS"])
    for x in ("IQ3_S", "TQ1_0")],
  ({"metadata": {"tokenizer.ggml.pre": "poro-chat"}}, ["tokenizer.ggml.pre", "poro-chat", "llama-bpe"]),
  ({"tokenizer": "bert"}, ["tokenizer.ggml.model", "bert", "gpt2, llama"]),
  ({"tokens": ["a"] * 400}, ["400 tokens", " 320"]), ({"merges": ["a missing"]}, ["vocabulary", "gpt2"]),
  ({"tensors": {"blk.1.ffn_up.weight": None}}, ["blk.1.ffn_up.weight", " missing"]),
  ({"tensors": {"blk.0.attn_q.weight": np.zeros((8, 256))}}, ["blk.0.attn_q.weight", "8 rows", " 256"]),
  *[({"tensors": {x: np.zeros(256)}}, [f"tensor {x}", "attn_q"]) for x in ("foo", "blk.0.ffn_gate_exps.weight")],
  *[({"metadata": {"split.no": x, "split.count": y}}, [f"split.no={x}", f"split.count={y}"])
    for x, y in ((5, 3), (0, 2**30))]])
def test_unsupported_or_wrong_content_raises_with_value(tmp_path, options, parts):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf", **WIDE), **options)
  check_refused(path, tmp_path / "converted", *parts)


def test_truncated_file_raises(tmp_path):
  path = write_gguf(tmp_path / "whole.gguf", tiny_model(tmp_path / "hf"), "Q8_0", tokenizer="llama")
  data = path.read_bytes()
  convert(path, tmp_path / "whole")
  truncated = tmp_path / "truncated.gguf"
  for size in [0, 1, 3, 4, 5, 8, 16, 24, 25, *range(30, len(data), len(data) // 300), len(data) - 32]:
    truncated.write_bytes(data[:size])
    check_refused(truncated, tmp_path / "converted")
  check_refused(truncated, tmp_path / "converted", len(data) - 32)


def test_damaged_file_raises_or_converts(tmp_path):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf"), "Q8_0", tokenizer="llama")
  data = path.read_bytes()
  rng = random.Random(0)
  end = data.index(b"output_norm.weight")   # most of the bytes before the tensor data
  for i in range(300):
    damaged = bytearray(data)
    for _ in range(rng.randrange(1, 4)): damaged[rng.randrange(end)] = rng.choice([0, 1, 8, 9, 127, 255, i % 256])
    path.write_bytes(damaged)
    try: convert(path, tmp_path / f"converted{i}")
    except ValueError as e: assert str(path) in str(e) and not (tmp_path / f"converted{i}").exists()


def test_file_of_other_format_raises(tmp_path):
  path = tmp_path / "model.gguf"
  check_refused(path, tmp_path / "converted")
  big_endian = b"GGUF" + (3).to_bytes(4, "big") + bytes(16)
  for data, *parts in ((b"PK but no GGUF", "GGUF"), (b"GGUF but no more", "version"), (big_endian, "version", "2, 3")):
    path.write_bytes(data)
    check_refused(path, tmp_path / "converted", *parts)


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
  check_conversion(convert(path, tmp_path / "converted"), path)


def test_split_missing_later_or_renamed_part_raises_with_expected_name(tmp_path):
  paths, converted = write_split(tmp_path), tmp_path / "converted"
  for i in (1, 2): check_refused(paths[i], converted, f"part {i + 1} of 3", paths[0])
  renamed = paths[0].rename(tmp_path / "renamed.gguf")
  check_refused(renamed, converted, "part 1 of 3", "-00001-of-00003.gguf")
  renamed.rename(paths[0])
  paths[1].unlink()
  check_refused(paths[0], converted, "part 1 of 3", f"{paths[1]} is missing")


def test_split_part_of_other_split_raises_with_its_name(tmp_path):
  paths = write_split(tmp_path)
  write_gguf(tmp_path / "four.gguf", tmp_path / "hf", "Q8_0", tensors_per_file=6)
  write_gguf(tmp_path / "tied.gguf", tiny_model(tmp_path / "tied", tie_word_embeddings=True), tensors_per_file=8)
  for other, numbers in ((paths[1].name, "[1, 3, 21]"), ("four-00003-of-00004.gguf", "[2, 4, 21]"),
                         ("tied-00003-of-00003.gguf", "[2, 3, 20]")):
    paths[2].write_bytes((tmp_path / other).read_bytes())
    check_refused(paths[0], tmp_path / "converted", paths[2], numbers, "expected [2, 3, 21]")


def test_split_wrong_number_of_tensors_raises(tmp_path):
  paths, key = write_split(tmp_path), b"split.tensors.count\5\0\0\0"   # an int32
  for path in paths: path.write_bytes(path.read_bytes().replace(key + b"\x15", key + b"\x17"))
  check_refused(paths[0], tmp_path / "converted", "21 tensors", "split.tensors.count=23")


# The output folder

def test_convert_into_nonempty_folder_raises_and_keeps_it(tmp_path):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf"))
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "mine").write_text("mine")
  for name in ("full", "full/mine", "hf"):
    with pytest.raises(ValueError, match=f"{tmp_path / name} .*empty"): convert(path, tmp_path / name)
  assert (tmp_path / "full" / "mine").read_text() == "mine"
  (tmp_path / "empty").mkdir()
  for name in ("empty", "new/in/new"):
    assert convert(path, tmp_path / name) == tmp_path / name
    assert {x.name for x in (tmp_path / name).iterdir()} == {"config.json", "model.safetensors", "tokenizer.json",
                                                            "tokenizer_config.json"}
  assert {x.name for x in tmp_path.iterdir()} == {"model.gguf", "hf", "full", "empty", "new"}, "no temporary files"


@pytest.mark.parametrize("error,expected,message,code", [
  (OSError(errno.ENOSPC, "No space left on device"), ValueError, "/a/b: No space left on device$", 1),
  (KeyboardInterrupt(), KeyboardInterrupt, None, 130)])
def test_convert_failure_leaves_no_files(tmp_path, monkeypatch, error, expected, message, code):
  path, read = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf")), loader.GGUFTensor.read
  before = sorted(tmp_path.rglob("*"))

  def fail(tensor):
    if tensor.start > path.stat().st_size / 2: raise error
    return read(tensor)
  monkeypatch.setattr(loader.GGUFTensor, "read", fail)
  with pytest.raises(expected, match=message): convert(path, tmp_path / "a" / "b")
  assert main(["convert", str(path), str(tmp_path / "a" / "b")]) == code
  assert sorted(tmp_path.rglob("*")) == before


# Commands


def test_convert_command_needs_no_compiler_or_device(tmp_path, capsys):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf", hidden_size=256, intermediate_size=512),
                    "Q4_K", tokenizer="llama")
  env = {"PATH": str(tmp_path / "nowhere"), "DEV": "NOSUCH", "CC": "/nowhere/clang"}
  result = process("convert", path, tmp_path / "converted", **env)
  assert (result.returncode, result.stdout, result.stderr) == (0, f"{tmp_path / 'converted'}\n", "")
  check_conversion(tmp_path / "converted", path)
  assert main(["convert", str(path), str(tmp_path / "converted")]) == 1
  output = capsys.readouterr()
  assert output.out == "" and len(output.err.splitlines()) == 1
  assert output.err.startswith(f"tinyvllm: {tmp_path / 'converted'} ")


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_generate_command_quantization_gguf_names_the_file_type(tmp_path, words_folder, capfd, kind):
  """Like vLLM, also for a file without quantized weights."""
  path = write_gguf(tmp_path / "words.gguf", words_folder, kind, tokenizer="llama")
  before = sorted(tmp_path.rglob("*"))
  options = ["generate", "the cat", "--model", str(path), "--max-tokens", "8", *flags(**ENGINE)]
  assert main(options) == main([*options, "--quantization", "gguf"]) == 0
  texts = capfd.readouterr().out.splitlines()
  assert len(texts) == 2 and texts[0] == texts[1] and sorted(tmp_path.rglob("*")) == before, "no file is written"
  assert main([*options, "--quantization", "fp8"]) == 1
  assert re.search(r"quantization='fp8' does not match .*words.gguf, which is (gguf|not quantized): use '(gguf|int8)'",
                   capfd.readouterr().err)


@pytest.mark.parametrize("command", ["generate a --model", "chat --model", "serve", "serve --model"])
def test_command_with_damaged_gguf_prints_its_path(tmp_path, capfd, command):
  (tmp_path / "bad.gguf").write_bytes(b"GGUF")
  assert main([*command.split(), str(tmp_path / "bad.gguf")]) == 1
  assert "bad.gguf" in capfd.readouterr().err and [*tmp_path.iterdir()] == [tmp_path / "bad.gguf"]
