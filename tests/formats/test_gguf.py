"""GGUF files, loaded and converted: the weights equal the output of ggml's own decoder, the package gguf. A loaded file
equals its converted folder bit for bit."""
import json
import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.engines import ENGINE, LogitsRecorder
from helpers.gguf_files import check_conversion, decoded, tensors_of, write_gguf
from helpers.models import CORPUS, tiny_model, write_safetensors
from helpers.reference import reference_greedy
from helpers.requests import greedy, ids_of, tokens
from safetensors import safe_open
from tinygrad import Tensor, dtypes, nn

import tinyvllm
from tinyvllm import LLM
from tinyvllm.backend import Backend, Devices
from tinyvllm.config import ModelConfig
from tinyvllm_extra import kernels, parallel
from tinyvllm_extra.gguf_export import convert
from tinyvllm_extra.gguf_tokenizer import make_tokenizer
from tinyvllm_extra.models import find_model
from tinyvllm_extra.huggingface import load_tokenizer
from tinyvllm_extra.weights import open_checkpoint

IDS = [3, 50, 99, 301]
WIDE = {"hidden_size": 256, "intermediate_size": 512}   # blocks have up to 256 inputs
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
KINDS = {   # bits, group size, with offsets
  "Q4_0": (4, 32, False), "Q4_1": (4, 32, True), "Q5_0": (8, 32, False), "Q5_1": (8, 32, True), "Q8_0": (8, 32, False),
  "Q2_K": (4, 16, True), "Q3_K": (4, 16, False), "Q4_K": (4, 32, True), "Q5_K": (8, 32, True), "Q6_K": (8, 16, False),
  "IQ4_NL": (8, 32, False), "IQ4_XS": (8, 32, False)}
WIDE_SCALES = {x for x in KINDS if x.endswith(("_K", "_XS"))}   # products of two numbers, which float16 would round
ARCHITECTURES = ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]


def convert_model(tmp_path, kind="F32", config=WIDE, **options):
  """Write a tiny model as tmp_path/model.gguf, convert it, and return the folder."""
  write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf", **config), kind, **options)
  return convert(tmp_path / "model.gguf", tmp_path / "converted")


def groups_of(folder):
  """Return ((bits, group size, with offsets), format) of each module, from config.json."""
  config = json.loads((folder / "config.json").read_text()).get("quantization_config", {"config_groups": {}})
  return {name: ((g["weights"]["num_bits"], g["weights"]["group_size"], not g["weights"]["symmetric"]), g["format"])
          for g in config["config_groups"].values() for name in g["targets"]}


# Weights

@pytest.mark.parametrize("config", [WIDE, {**WIDE, "head_dim": 128, "num_hidden_layers": 1, "intermediate_size": 768,
                                           "vocab_size": 323}], ids=["square", "rectangular"])
@pytest.mark.parametrize("kind", KINDS)
def test_convert_type_equals_gguf_package(tmp_path, kind, config):
  folder = convert_model(tmp_path, kind, config)
  check_conversion(folder, tmp_path / "model.gguf")
  modules = groups_of(folder)
  assert {form for form, _ in modules.values()} == {KINDS[kind]} and "lm_head" in modules
  tensors = tensors_of(folder)
  assert all((f"{name}.weight_packed" in tensors) == (KINDS[kind][0] == 4) for name in modules)
  scale_dtype = np.float32 if kind in WIDE_SCALES else np.float16
  assert {tensors[f"{name}.weight_scale"].dtype for name in modules} == {np.dtype(scale_dtype)}
  quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
  assert quantization["format"] == ("pack-quantized" if KINDS[kind][0] == 4 else "int-quantized")
  assert quantization["quant_method"] == "compressed-tensors" and quantization["ignore"] == []


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_convert_floats_keeps_dtype_and_values(tmp_path, kind):
  folder = convert_model(tmp_path, kind, {})
  assert "quantization_config" not in json.loads((folder / "config.json").read_text())
  with safe_open(folder / "model.safetensors", "np") as file:
    kinds = {name: file.get_slice(name).get_dtype() for name in file.offset_keys()}
  assert {x for name, x in kinds.items() if "norm" not in name} == {kind}
  assert {x for name, x in kinds.items() if "norm" in name} == {"F32"}
  if kind != "BF16": check_conversion(folder, tmp_path / "model.gguf")   # numpy has no bfloat16


def test_convert_mixture_gives_fused_projections_one_format(tmp_path):
  """llama.cpp's Q4_K_M has attn_v and ffn_down in Q6_K."""
  kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K", "ffn_gate": "Q4_0", "ffn_up": "Q8_0",
           "token_embd": "F16"}
  folder = convert_model(tmp_path, "Q4_K", kinds=kinds)
  check_conversion(folder, tmp_path / "model.gguf")
  modules = groups_of(folder)
  layer = "model.layers.1"
  assert {modules[f"{layer}.self_attn.{x}_proj"] for x in "qkv"} == {((8, 16, True), "int-quantized")}
  assert {modules[f"{layer}.mlp.{x}_proj"] for x in ("gate", "up")} == {((8, 32, False), "int-quantized")}
  assert modules[f"{layer}.self_attn.o_proj"] == ((4, 32, True), "pack-quantized")
  assert modules[f"{layer}.mlp.down_proj"] == modules["lm_head"] == ((8, 16, False), "int-quantized")
  quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
  assert quantization["format"] == "mixed-precision" and quantization["ignore"] == ["model.embed_tokens"]


@pytest.mark.parametrize("kind,others,expected", [
  ("Q2_K", {"attn_v": "Q3_K", "ffn_up": "Q4_0"}, (4, 16, True)), ("Q3_K", {"attn_v": "Q5_K"}, (8, 16, True)),
  ("Q4_0", {"attn_v": "Q4_1", "ffn_gate": "Q3_K"}, (4, 32, True)), ("IQ4_XS", {"attn_v": "Q2_K"}, (8, 16, True))])
def test_convert_fused_int4_types_stay_int4(tmp_path, kind, others, expected):
  """llama.cpp's Q2_K has attn_v in Q3_K or Q4_K, its Q3_K_M has attn_v in Q5_K."""
  folder = convert_model(tmp_path, kind, kinds=others)
  check_conversion(folder, tmp_path / "model.gguf")
  assert groups_of(folder)["model.layers.1.self_attn.q_proj"][0] == expected
  check_weights_equal(load_model(tmp_path / "model.gguf"), load_model(folder))


# Architectures


def generate(model, **options):
  """Return 8 greedy ids and their log probabilities, (8, V), computed in float32."""
  ids, logits = LogitsRecorder(LLM(model, **ENGINE, **options)).generate(IDS, 8)
  shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
  return ids, shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


@pytest.mark.parametrize("kind,tied", [("Q4_0", False), ("Q4_K", True), ("Q6_K", False)])
def test_gguf_ids_and_logits_equal_decoded_weights(tmp_path, kind, tied):
  """All matrices are quantized, also the embeddings. The file gives the log probabilities of the weights that gguf
  decodes, in float32."""
  folder = tiny_model(tmp_path / "hf", **WIDE, tie_word_embeddings=tied)
  path = write_gguf(tmp_path / "model.gguf", folder, kind)
  write_safetensors(folder / "model.safetensors", decoded(path))
  expected = generate(folder)
  assert expected[0] == reference_greedy(folder, IDS, 8)
  ids, logprobs = generate(path)
  assert ids == expected[0]
  np.testing.assert_allclose(logprobs, expected[1], 0, 1e-5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_convert_architecture_keeps_weights_and_config(tmp_path, architecture, kind):
  folder = convert_model(tmp_path, kind, {**WIDE, "architectures": [architecture]})
  check_conversion(folder, tmp_path / "model.gguf")
  source, converted, from_gguf = [find_model(open_checkpoint(path).hf_config, path)[0]
                                  for path in (tmp_path / "hf", folder, tmp_path / "model.gguf")]
  assert converted.eos_token_ids == (2,) and vars(from_gguf) == vars(converted)
  for field in ModelConfig.__match_args__: assert getattr(source, field) == getattr(converted, field)


@pytest.mark.parametrize("kind,options", [
  ("F32", {}), ("F16", {"tie_word_embeddings": True}),
  ("F32", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
  ("F32", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}), ("F32", {"num_key_value_heads": None}),
  ("F32", {"attention_bias": True, "mlp_bias": True}), ("BF16", {"architectures": ["Qwen2ForCausalLM"]}),
  ("F32", {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16})])
def test_gguf_ids_equal_safetensors(tmp_path, kind, options):
  dtype = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
  folder = tiny_model(tmp_path / "hf", dtype=dtype, **options)
  path = write_gguf(tmp_path / "model.gguf", folder, kind)
  expected = reference_greedy(folder, IDS, 8)
  for model in (path, convert(path, tmp_path / "converted")):
    output, = LLM(model, **{**ENGINE, "dtype": "auto"}).generate(tokens(IDS), greedy(8))
    assert ids_of(output) == expected


# Loading without conversion

def load_model(path, dtype=dtypes.float32, count=1, backend=None):
  """Load the model in a folder or a file, on `count` devices."""
  checkpoint = open_checkpoint(path)
  config, model_class = find_model(checkpoint.hf_config, path)
  devices = Devices() if count == 1 else parallel.Devices(parallel.device_names(count))
  model = model_class(config, dtype, backend or kernels.make_backend(), devices)
  checkpoint.load(model)
  return model


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


MIXTURES = {"Q4_K_M": {"attn_v": "Q6_K", "ffn_down": "Q6_K", "output": "Q6_K"},
            "one fused matrix of three types": {"attn_q": "Q4_0", "attn_k": "Q5_1", "attn_v": "Q8_0"},
            "one fused matrix partly quantized": {"attn_v": "F16", "ffn_up": "BF16"},
            "embeddings in float16": {"token_embd": "F16", "output": "BF16"}}


@pytest.mark.parametrize("dtype,count", [(dtypes.float16, 1), (dtypes.float32, 2)], ids=["one device", "two devices"])
@pytest.mark.parametrize("kind", [*KINDS, "F32", "F16", "BF16"])
def test_loaded_weights_equal_converted_weights(tmp_path, kind, count, dtype):
  folder = convert_model(tmp_path, kind)
  check_weights_equal(load_model(tmp_path / "model.gguf", dtype, count), load_model(folder, dtype, count))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "IQ4_XS"])
def test_scales_are_float16_if_exact_or_model_computes_in_float16(tmp_path, kind):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf", **WIDE), kind)
  for dtype in (dtypes.float32, dtypes.float16, dtypes.bfloat16):
    model = load_model(path, dtype)
    scales = [scale for module in model.modules() for scale in getattr(module, "scales", ())]
    is_exact = dtype == dtypes.float32 and kind in WIDE_SCALES
    assert {x.dtype for x in scales} == {dtypes.float32 if is_exact else dtypes.float16}
    assert model.embed_tokens.weight.dtype == dtype


@pytest.mark.parametrize("name", MIXTURES)
def test_loaded_mixtures_equal_converted_mixtures(tmp_path, name):
  folder = convert_model(tmp_path, "Q4_K", kinds=MIXTURES[name])
  check_weights_equal(load_model(tmp_path / "model.gguf"), load_model(folder))


def test_core_backend_loads_dequantized_weights(tmp_path):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf", **WIDE), "Q8_0")
  plain = load_model(path, backend=Backend())
  tensors = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
             for tensor in gguf.GGUFReader(path).tensors}
  for name, module in (("token_embd", plain.embed_tokens), ("blk.1.ffn_down", plain.layers[1].down_proj)):
    np.testing.assert_array_equal(module.weight.numpy(), tensors[f"{name}.weight"])
  rows = tensors["blk.0.attn_q.weight"].reshape(4, -1, 2, 256).swapaxes(1, 2).reshape(-1, 256)
  np.testing.assert_array_equal(plain.layers[0].qkv_proj.weight.numpy()[:256], rows)


def test_fingerprint_pieces_cover_every_tensor_and_differ_with_weights(tmp_path):
  paths = [write_gguf(tmp_path / f"{seed}.gguf", tiny_model(tmp_path / str(seed), seed), "Q8_0") for seed in (0, 1)]
  checkpoints = [open_checkpoint(path) for path in (*paths, paths[0])]
  pieces = [{name: (kind, shape, raw.tobytes()) for name, kind, shape, raw in checkpoint.fingerprint_pieces()}
            for checkpoint in checkpoints]
  assert pieces[0] == pieces[2] != pieces[1] and len(pieces[0]) == len(gguf.GGUFReader(paths[0]).tensors)
  kind, shape, raw = pieces[0]["model.layers.0.mlp.up_proj.weight"]
  assert shape == (64, 32) and len(raw) == 64 * 34 and kind == "|V34", "blocks of 34 bytes"


# Tokenizers

def texts():
  letters = [*"abc de.,<>▁\n\t09éλ日\u0301\U0001f642", "</s>", "<s>", "<0x41>", "  ", "the ", " house"]
  rng = random.Random(0)
  random_texts = ["".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(300)]
  return [*CORPUS, "", " ", "  two  spaces  ", *random_texts]


@pytest.mark.parametrize("bundled", [True, False])
def test_sentencepiece_tokenizer_equals_original(tmp_path, bundled):
  own = Path(tinyvllm.__file__).parent / "default_model"
  folder = own if bundled else tiny_model(tmp_path / "hf")
  template = json.loads((own / "tokenizer_config.json").read_text())["chat_template"]
  path = write_gguf(tmp_path / "model.gguf", folder, tokenizer="llama", template=template)
  expected = load_tokenizer(folder)
  for tokenizer in (open_checkpoint(path).tokenizer(), load_tokenizer(convert(path, tmp_path / "converted"))):
    for text in texts():
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


