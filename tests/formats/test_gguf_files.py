"""GGUF files: damaged and split ones, the output folder of a conversion, and commands."""
import errno
import functools
import random
import re
import sys

import gguf
import numpy as np
import pytest
from helpers.commands import process
from helpers.engines import ENGINE
from helpers.gguf_files import check_conversion, write_gguf
from helpers.models import load, tiny_model
from helpers.requests import flags
from helpers import gguf_files

from tinyvllm import LLM
from tinyvllm_extra import gguf as loader
from tinyvllm_extra.cli import main
from tinyvllm_extra.gguf_export import convert
from tinyvllm_extra.models import find_model
from tinyvllm_extra.weights import open_checkpoint
from tinyvllm_extra.packages import MissingPackage

WIDE = {"hidden_size": 256, "intermediate_size": 512}   # blocks have up to 256 inputs


# Invalid files

def write_empty_gguf(path, architecture="llama", vocabulary=True, **values):
  """Write a GGUF file without tensors: these integer fields and optionally a vocabulary of one token."""
  writer = gguf.GGUFWriter(path, architecture)
  for key, value in values.items(): writer.add_uint32(key.replace("__", "."), value)
  if vocabulary: writer.add_token_list(["a"])
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def open_tokenizer(path):
  """Read all metadata of a file, but no weights."""
  checkpoint = open_checkpoint(path)
  find_model(checkpoint.hf_config, path)
  return checkpoint.tokenizer()


def check_refused(path, folder, *parts):
  """Check that convert and load raise the same one-line error with these parts, and that no file is left."""
  before = sorted(folder.parent.rglob("*"))
  with pytest.raises(ValueError) as e: convert(path, folder)
  message = str(e.value)
  with pytest.raises(ValueError) as e: open_tokenizer(path)
  assert str(e.value) == message
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


@pytest.mark.parametrize("architecture", ["gpt2", "mamba"])
def test_unsupported_architecture_raises(tmp_path, architecture):
  path = write_empty_gguf(tmp_path / "model.gguf", architecture)
  check_refused(path, tmp_path / "converted", architecture, "llama, qwen2, qwen3")


@pytest.mark.parametrize("kind,name", [(gguf.GGMLQuantizationType.IQ3_S, "IQ3_S"),
                                       (gguf.GGMLQuantizationType.TQ1_0, "TQ1_0")])
def test_unsupported_type_raises_with_tensor_name(tmp_path, kind, name):
  block, size = gguf.GGML_QUANT_SIZES[kind]
  writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
  writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, size), np.uint8), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  check_refused(tmp_path / "model.gguf", tmp_path / "converted", "blk.0.ffn_up.weight", name, "Q4_0, Q4_1",
                "Q2_K, Q3_K", "IQ4_NL, IQ4_XS")


@pytest.mark.parametrize("options,parts", [
  ({"pre": "poro-chat"}, ["tokenizer.ggml.pre", "poro-chat", "llama-bpe"]),
  ({"tokenizer": "bert"}, ["tokenizer.ggml.model", "bert", "gpt2, llama"]),
  ({"tokens": ["a"] * 400}, ["400 tokens", " 320"]), ({"merges": ["a missing"]}, ["vocabulary", "gpt2"])])
def test_unsupported_tokenizer_raises_with_value(tmp_path, options, parts):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf"), **options)
  check_refused(path, tmp_path / "converted", *parts)


@pytest.mark.parametrize("edit,parts", [
  (lambda w: w.pop("model.layers.1.mlp.up_proj.weight"), ["blk.1.ffn_up.weight", " missing"]),
  (lambda w: w.update({"model.layers.0.self_attn.q_proj.weight": np.zeros((8, 32), np.float32)}),
   ["blk.0.attn_q.weight", "8 rows", " 32"])])
def test_missing_or_misshapen_tensor_raises_with_name(tmp_path, monkeypatch, edit, parts):
  config, weights = load(tiny_model(tmp_path / "hf"))
  weights = dict(weights)
  edit(weights)
  monkeypatch.setattr(gguf_files, "load", lambda folder: (config, weights))
  check_refused(write_gguf(tmp_path / "model.gguf", tmp_path / "hf"), tmp_path / "converted", *parts)


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
  path.write_bytes(b"PK but no GGUF")
  check_refused(path, tmp_path / "converted", "GGUF")
  path.write_bytes(b"GGUF but no more")
  check_refused(path, tmp_path / "converted", "version")
  path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(16))   # big-endian
  check_refused(path, tmp_path / "converted", "version", "2, 3")


@pytest.mark.parametrize("name", ["foo", "blk.0.ffn_gate_exps.weight"])
def test_unknown_tensor_raises_with_name(tmp_path, monkeypatch, name):
  read_header = loader.read_header
  def read(path):
    metadata, tensors = read_header(path)
    return metadata, {**tensors, name: tensors["output_norm.weight"]}
  monkeypatch.setattr(loader, "read_header", read)
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf"))
  check_refused(path, tmp_path / "converted", f"tensor {name}", "attn_q")


# Split files

def write_split(folder, per_file=8):
  """Write a tiny model, 21 tensors, as three GGUF files and return them."""
  write_gguf(folder / "model.gguf", tiny_model(folder / "hf"), "Q8_0", tensors_per_file=per_file)
  paths = [folder / f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
  assert sorted(folder.glob("*.gguf")) == paths
  return paths


@pytest.mark.parametrize("per_file,small_first_shard", [(8, False), (11, True)])
def test_split_file_equals_whole_file(tmp_path, monkeypatch, per_file, small_first_shard):
  """The first part may have no tensors."""
  writer = gguf.GGUFWriter
  monkeypatch.setattr(gguf, "GGUFWriter", functools.partial(writer, small_first_shard=small_first_shard))
  path = write_split(tmp_path, per_file)[0]
  monkeypatch.setattr(gguf, "GGUFWriter", writer)
  assert bool(gguf.GGUFReader(path).tensors) != small_first_shard
  whole = write_gguf(tmp_path / "whole.gguf", tmp_path / "hf", "Q8_0")
  checkpoints = [open_checkpoint(path), open_checkpoint(whole)]
  pieces = [[(*x, raw.tobytes()) for *x, raw in checkpoint.fingerprint_pieces()] for checkpoint in checkpoints]
  assert pieces[0] == pieces[1] and len(pieces[0]) == 21
  assert checkpoints[0].hf_config == checkpoints[1].hf_config
  check_conversion(convert(path, tmp_path / "converted"), path)


def test_merged_file_with_zero_parts_is_whole(tmp_path, monkeypatch):
  """llama-gguf-split --merge writes split.count=0."""
  add_bos = gguf.GGUFWriter.add_bos_token_id

  def add_split(writer, token):
    add_bos(writer, token)
    writer.add_uint16("split.no", 0)
    writer.add_uint16("split.count", 0)
  monkeypatch.setattr(gguf.GGUFWriter, "add_bos_token_id", add_split)
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf"))
  check_conversion(convert(path, tmp_path / "converted"), path)


@pytest.mark.parametrize("change,parts", [
  (lambda paths: (paths[1].unlink(), paths[0])[1], ["part 1 of 3", "model-00002-of-00003.gguf is missing"]),
  (lambda paths: paths[1], ["part 2 of 3", "model-00001-of-00003.gguf"]),
  (lambda paths: paths[2], ["part 3 of 3", "model-00001-of-00003.gguf"]),
  (lambda paths: paths[0].rename(paths[0].with_name("renamed.gguf")), ["part 1 of 3", "-00001-of-00003.gguf"])])
def test_split_missing_later_or_renamed_part_raises_with_expected_name(tmp_path, change, parts):
  check_refused(change(write_split(tmp_path)), tmp_path / "converted", *parts)


def test_split_part_of_other_split_raises_with_its_name(tmp_path):
  paths = write_split(tmp_path)
  paths[2].write_bytes(paths[1].read_bytes())
  check_refused(paths[0], tmp_path / "converted", paths[2], "[1, 3, 21]", "expected [2, 3, 21]")
  write_gguf(tmp_path / "other.gguf", tmp_path / "hf", "Q8_0", tensors_per_file=6)
  paths[2].write_bytes((tmp_path / "other-00003-of-00004.gguf").read_bytes())
  check_refused(paths[0], tmp_path / "converted", paths[2], "[2, 4, 21]", "expected [2, 3, 21]")
  write_gguf(tmp_path / "other.gguf", tiny_model(tmp_path / "tied", tie_word_embeddings=True), tensors_per_file=8)
  paths[2].write_bytes((tmp_path / "other-00003-of-00003.gguf").read_bytes())
  check_refused(paths[0], tmp_path / "converted", paths[2], "[2, 3, 20]", "expected [2, 3, 21]")


def test_split_wrong_number_of_tensors_raises(tmp_path):
  paths = write_split(tmp_path)
  for path in paths:
    data = path.read_bytes()
    end = data.index(b"split.tensors.count") + len("split.tensors.count")
    path.write_bytes(data[:end + 4] + (23).to_bytes(4, "little") + data[end + 8:])   # after the value's type
  check_refused(paths[0], tmp_path / "converted", "21 tensors", "split.tensors.count=23")


@pytest.mark.parametrize("number,count", [(5, 3), (0, 2**31)])
def test_split_invalid_numbers_raise_with_values(tmp_path, number, count):
  path = write_empty_gguf(tmp_path / "model.gguf", split__no=number, split__count=count)
  check_refused(path, tmp_path / "converted", f"split.no={number}", f"split.count={count}")


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


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_convert_failure_leaves_no_files(tmp_path, monkeypatch, error):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf"))
  original_read = loader.StoredTensor.read
  calls = []

  def read(tensor):
    calls.append(tensor)
    if len(calls) == 9: raise error
    return original_read(tensor)
  monkeypatch.setattr(loader.StoredTensor, "read", read)
  before = sorted(tmp_path.rglob("*"))
  kind = ValueError if isinstance(error, OSError) else KeyboardInterrupt
  with pytest.raises(kind) as e: convert(path, tmp_path / "a" / "b")
  assert kind is KeyboardInterrupt or str(e.value) == f"{tmp_path / 'a' / 'b'}: No space left on device"
  calls.clear()
  assert main(["convert", str(path), str(tmp_path / "a" / "b")]) == (1 if kind is ValueError else 130)
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


def test_missing_or_damaged_gguf_raises_with_path(tmp_path, capfd):
  (tmp_path / "folder.gguf").mkdir()
  with pytest.raises(ValueError, match="folder.gguf.*config.json"): LLM(tmp_path / "folder.gguf")
  with pytest.raises(ValueError, match="nowhere.gguf"): LLM("nowhere.gguf")
  (tmp_path / "bad.gguf").write_bytes(b"GGUF")
  for command in (["generate", "a", "--model"], ["chat", "--model"], ["serve"], ["serve", "--model"]):
    assert main([*command, str(tmp_path / "bad.gguf")]) == 1
    assert "bad.gguf" in capfd.readouterr().err
  assert not [*tmp_path.rglob("bad")]
