"""GGUF files: the weights equal the output of ggml's own decoder, the package gguf."""
import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.data import read_data
from helpers.engines import ENGINE, LogitsRecorder
from helpers.gguf_files import decoded, read_matrices, write_gguf
from helpers.models import CORPUS, VARIANTS, load, tiny_model, write_safetensors
from helpers.quantized_models import load_model
from helpers.record_models import write_model
from helpers.reference import reference_greedy
from tinygrad import Tensor, dtypes, nn

import tinyvllm
from tinyvllm import LLM
from tinyvllm.backend import Backend
from tinyvllm_extra.formats.gguf_tokenizer import make_tokenizer
from tinyvllm_extra.text.huggingface import load_tokenizer
from tinyvllm_extra.formats.hub import open_checkpoint
from tinyvllm_extra.models.quantized import Quantized

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
  ids = [3, 50, 99, 301]
  expected, logits = LogitsRecorder(LLM(folder, **ENGINE)).generate(ids, 8)
  assert expected == reference_greedy(folder, ids, 8)
  own_ids, own_logits = LogitsRecorder(LLM(path, **ENGINE, activation_quantization="none")).generate(ids, 8)
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


def test_raw_tensors_differ_with_weights_and_cover_all(tmp_path):
  paths = [write_gguf(tmp_path / f"{seed}.gguf", tiny_model(tmp_path / str(seed), seed), "Q8_0") for seed in (0, 1)]
  pieces = [{name: (x.dtype.str, x.shape, x.raw().tobytes()) for name, x in checkpoint.stored_tensors().items()}
            for checkpoint in map(open_checkpoint, (*paths, paths[0]))]
  assert pieces[0] == pieces[2] != pieces[1] and len(pieces[0]) == len(gguf.GGUFReader(paths[0]).tensors)
  kind, shape, raw = pieces[0]["model.layers.0.mlp.up_proj.weight"]
  assert shape == (64, 32) and len(raw) == 64 * 34 and kind == "|V34", "blocks of 34 bytes"


# Tokenizers

@pytest.mark.parametrize("bundled", [True, False])
def test_sentencepiece_tokenizer_equals_original(tmp_path, bundled):
  own = Path(tinyvllm.__file__).parent / "default_model"
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
