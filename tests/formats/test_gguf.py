"""GGUF files: the weights equal the output of ggml's own decoder, the package gguf; damaged and split files."""
import json
import random
import re
import sys

import gguf
import numpy as np
import pytest
from helpers.commands import ROOT, check_error, flags, run_command
from helpers.data import read_data
from helpers.engines import ENGINE, PROMPT_IDS, LogitsRecorder
from helpers.gguf_files import decoded, read_matrices, write_gguf
from helpers.models import CORPUS, VARIANTS, load, tiny_model, write_safetensors
from helpers.quantized_models import load_model
from helpers.record_models import write_model
from helpers.reference import reference_greedy
from tinygrad import Tensor, dtypes, nn

from tinyvllm import LLM
from tinyvllm.backend import Backend
from tinyvllm_extra.formats.gguf import make_tokenizer
from tinyvllm_extra.formats.hub import open_checkpoint
from tinyvllm_extra.models import find_model
from tinyvllm_extra.models.matrices import Quantized
from tinyvllm_extra.options import MissingPackage
from tinyvllm_extra.text.huggingface import load_tokenizer

WIDE = {"hidden_size": 256, "intermediate_size": 512}   # blocks have up to 256 inputs
KINDS = read_data("gguf_kinds.json")   # bits, group size, with offsets: int4 always has them
WIDE_SCALES = {x for x in KINDS if x.endswith(("_K", "_XS"))}   # products of two numbers, which float16 would round


def write_model_file(tmp_path, kind, config=WIDE, **options):
  return write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf", **config), kind, **options)


def formats_of(matrices):
  """Return (bits, group size, with offsets) of each quantized matrix."""
  return {name: (8 if w.q.dtype == np.int8 else 4, w.q.shape[1] // w.scale.shape[1], w.offset is not None)
          for name, w in matrices.items() if isinstance(w, Quantized)}


def bits_of(tensor):
  """Return each device's part of a tensor as numpy, bfloat16 as uint16."""
  parts = [tensor] if isinstance(tensor.device, str) else [
    Tensor(tensor.uop.mselect(i)) for i in range(len(tensor.device))]
  return [part.bitcast(dtypes.uint16).numpy() if part.dtype == dtypes.bfloat16 else part.numpy() for part in parts]


def check_weights_equal(a, b):
  for one, other in zip(a.modules(), b.modules(), strict=True):
    tensors = [nn.state.get_state_dict(module) for module in (one, other)]
    assert tensors[0].keys() == tensors[1].keys(), one.sources
    for name, tensor in tensors[0].items():
      assert tensor.dtype == tensors[1][name].dtype, (one.sources, name)
      for x, y in zip(bits_of(tensor), bits_of(tensors[1][name]), strict=True): np.testing.assert_array_equal(x, y)


# Weights

@pytest.mark.parametrize("config", [WIDE, {**WIDE, "head_dim": 128, "num_hidden_layers": 1, "intermediate_size": 768,
                                           "vocab_size": 323}], ids=["square", "rectangular"])
@pytest.mark.parametrize("kind", KINDS)
def test_type_equals_gguf_package(tmp_path, kind, config):
  """A model that computes in float16 rounds scales to float16."""
  path = write_model_file(tmp_path, kind, config)
  matrices = read_matrices(path)
  assert {*formats_of(matrices).values()} == {(*KINDS[kind],)} and isinstance(matrices["lm_head"], Quantized)
  exact = "float32" if kind in WIDE_SCALES else "float16"
  assert {w.scale.dtype for w in matrices.values()} == {np.dtype(exact)}
  for dtype, count in ((dtypes.float32, 2), (dtypes.float16, 1), (dtypes.bfloat16, 1)):
    model = load_model(path, dtype, count)
    scales = {scale.dtype for module in model.modules() for scale in getattr(module, "scales", {}).values()}
    assert scales == {getattr(dtypes, exact) if dtype == dtypes.float32 else dtypes.float16}
    assert model.embed_tokens.weight.dtype == dtype


# Type, exceptions, and formats of matrices. llama.cpp's Q4_K_M, Q2_K and Q3_K_M are like the first three
MIXTURES = read_data("gguf_mixtures.json")


@pytest.mark.parametrize("kind,kinds,expected", MIXTURES)
def test_mixture_gives_fused_projections_one_format(tmp_path, kind, kinds, expected):
  formats = formats_of(read_matrices(write_model_file(tmp_path, kind, kinds=kinds))).items()
  assert expected.items() <= {name.split(".")[-1]: [*x] for name, x in formats}.items()


@pytest.mark.parametrize("kind,dtype", [("F32", dtypes.float32), ("F16", dtypes.float16), ("BF16", dtypes.bfloat16)])
def test_floats_keep_dtype_and_values(tmp_path, kind, dtype):
  path = write_model_file(tmp_path, kind)
  assert formats_of(read_matrices(path)) == {}
  expected = decoded(path, load(tmp_path / "hf")[1])["lm_head.weight"]
  np.testing.assert_array_equal(load_model(path, backend=Backend()).lm_head.weight.numpy(), expected)
  assert load_model(path).lm_head.weight.dtype == dtype


@pytest.mark.parametrize("kind,tied", [("Q4_0", False), ("Q4_K", True), ("Q6_K", False)])
def test_quantized_ids_and_logits_equal_decoded_weights(tmp_path, kind, tied):
  """All matrices are quantized, also the embeddings. The core's backend loads the weights that gguf decodes."""
  path = write_model_file(tmp_path, kind, {**WIDE, "tie_word_embeddings": tied})
  folder = tmp_path / "hf"
  write_safetensors(folder / "model.safetensors", decoded(path, load(folder)[1]))
  expected, logits = LogitsRecorder(LLM(folder, **ENGINE)).generate(PROMPT_IDS, 8)
  assert expected == reference_greedy(folder, PROMPT_IDS, 8)
  own_ids, own_logits = LogitsRecorder(LLM(path, **ENGINE, activation_quantization="none")).generate(PROMPT_IDS, 8)
  assert own_ids == expected
  np.testing.assert_allclose(own_logits, logits, 1e-6, 1e-5)
  check_weights_equal(load_model(path, backend=Backend()), load_model(folder, backend=Backend()))


# Architectures

RECORDED = ("gemma2", "gemma3", "granite", "mistral", "mistral3", "ministral3", "olmo2", "olmo3", "phi3", "phi3_short",
            "phi3_long", "qwen3_vl", "smollm3")


@pytest.mark.parametrize("name", [*(x for x in VARIANTS if x != "Mistral"), *RECORDED])
def test_architecture_equals_safetensors(tmp_path, name):
  """Weights, config and RoPE. GGUF lacks query_pre_attn_scalar, which llama.cpp assumes to be head_dim."""
  if name in VARIANTS: folder = tiny_model(tmp_path / "hf", **VARIANTS[name])
  else: folder = write_model(tmp_path / "hf", name, **{"query_pre_attn_scalar": 8} if "gemma" in name else {})
  metadata = {"granite.attention.head_count_kv": [2] * 4} if name == "granite" else {}   # as of Granite 4
  path = write_gguf(tmp_path / "model.gguf", folder, metadata=metadata)
  source, model = load_model(folder), load_model(path)
  check_weights_equal(source, model)
  assert type(source) is type(model)
  different = {x for x, value in vars(source.config).items() if value != getattr(model.config, x)}
  assert different <= {"ropes", "rope_scaling", "rope_theta", "norm_offset"}   # of tables and weights
  for length in (16, 64):
    for expected, table in zip(source.ropes(length), model.ropes(length), strict=True):
      np.testing.assert_allclose(table.numpy(), expected.numpy(), atol=1e-6)


def raw_tensors(path):
  return {name: (x.dtype.str, x.shape, x.raw().tobytes()) for name, x in open_checkpoint(path).stored_tensors().items()}


def test_raw_tensors_differ_with_weights_and_cover_all(tmp_path):
  paths = [write_gguf(tmp_path / f"{seed}.gguf", tiny_model(tmp_path / str(seed), seed), "Q8_0") for seed in (0, 1)]
  first, other, again = map(raw_tensors, (*paths, paths[0]))
  assert first == again != other and len(first) == len(gguf.GGUFReader(paths[0]).tensors)
  kind, shape, raw = first["model.layers.0.mlp.up_proj.weight"]
  assert shape == (64, 32) and len(raw) == 64 * 34 and kind == "|V34", "blocks of 34 bytes"


# Tokenizers

@pytest.mark.parametrize("bundled", [True, False])
def test_sentencepiece_tokenizer_equals_original(tmp_path, bundled):
  own = ROOT / "tinyvllm/default_model"
  folder = own if bundled else tiny_model(tmp_path / "hf")
  template = json.loads((own / "tokenizer_config.json").read_text())["chat_template"]
  path = write_gguf(tmp_path / "model.gguf", folder, tokenizer="llama", template=template)
  expected, rng = load_tokenizer(folder), random.Random(0)
  letters = [*"abc de.,<>▁\n\t09éλ日\u0301\U0001f642", "</s>", "<s>", "<0x41>", "  ", "the ", " house"]
  texts = [*CORPUS, "", " ", "  two  spaces  "]
  texts += ["".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(300)]
  tokenizer = open_checkpoint(path).tokenizer()
  for text in texts:
    ids = expected.encode(text)
    assert tokenizer.encode(text) == ids and tokenizer.decode(ids) == expected.decode(ids), repr(text)
  assert (tokenizer.eos_token_id, tokenizer.config["bos_token"], tokenizer.prefix) == (2, "<s>", [1])
  messages = [{"role": "user", "content": "hello"}]
  if bundled: assert tokenizer.apply_chat_template(messages) == expected.apply_chat_template(messages)
  assert tokenizer.config["chat_template"] == template


def test_byte_level_added_tokens_are_encoded_whole(tmp_path):
  alphabet = [chr(i) for i in range(33, 127)]
  tokens = [*alphabet, "<think>", "<end>", "Ġ"]
  kv = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [], "tokenizer.ggml.token_type": [1] * len(alphabet) + [4, 3, 1],
        "tokenizer.ggml.eos_token_id": len(alphabet) + 1}
  tokenizer = make_tokenizer(tmp_path / "model.gguf", kv, 200)
  ids = tokenizer.encode("a <think>b<end>")
  assert [tokens[i] for i in ids] == ["a", "Ġ", "<think>", "b", "<end>"]
  assert tokenizer.decode(ids) == "a <think>b" and tokenizer.eos_token_id == ids[-1], "only <end> is special"


# Invalid files

# Arguments of write_gguf, with a number of tokens and shapes of tensors (None: missing), and parts of the message
REFUSED = read_data("refused_gguf.json")


def open_file(path):
  """Return the checkpoint, with all metadata read, but no weights."""
  checkpoint = open_checkpoint(path)
  find_model(checkpoint.hf_config, path)
  checkpoint.tokenizer()
  return checkpoint


def check_refused(path, *parts): check_error(lambda: open_file(path), path, *parts)


def test_gguf_without_tokenizers_raises_with_extra(tmp_path, monkeypatch):
  folder = tiny_model(tmp_path / "hf")
  path = write_gguf(tmp_path / "model.gguf", folder)
  monkeypatch.setitem(sys.modules, "tokenizers", None)
  with pytest.raises(MissingPackage, match=r"tokenizers.*pip install 'tinyvllm\[hf\]'"): open_file(path)
  open_file(write_gguf(path, folder, tokenizer="llama"))   # sentencepiece needs no package


@pytest.mark.parametrize("options,parts", REFUSED)
def test_unsupported_or_wrong_content_raises_with_value(tmp_path, options, parts):
  tensors = {name: shape and np.zeros(shape) for name, shape in options.get("tensors", {}).items()}
  options = {**options, "tensors": tensors, "tokens": ["a"] * options.get("tokens", 0)}
  check_refused(write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf", **WIDE), **options), *parts)


def test_truncated_file_raises(tmp_path):
  path = write_gguf(tmp_path / "whole.gguf", tiny_model(tmp_path / "hf"), "Q8_0", tokenizer="llama")
  data = path.read_bytes()
  open_file(path)
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
      for tensor in open_file(path).all_tensors.values(): tensor.read_matrix(None)
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
  assert raw_tensors(path) == raw_tensors(whole) and len(raw_tensors(path)) == 21
  assert open_checkpoint(path).hf_config == open_checkpoint(whole).hf_config
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
