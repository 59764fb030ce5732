"""GGUF files, loaded and converted: the weights equal the output of ggml's own decoder, the package gguf. A loaded file
equals its converted folder bit for bit."""
import errno
import functools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.engines import LogitsRecorder
from helpers.gguf_files import write_gguf
from helpers.models import CORPUS, load, tiny_model, write_safetensors
from helpers.reference import reference_greedy
from helpers.servers import Server
from safetensors import safe_open
from tinygrad import Tensor, dtypes, nn
from tinygrad.helpers import CACHEDB

import tinyvllm
from tinyvllm import LLM, SamplingParams
from tinyvllm.backend import Backend, Devices
from tinyvllm.config import ModelConfig
from tinyvllm_extra import gguf as loader
from tinyvllm_extra import kernels, parallel
from tinyvllm_extra.cli import main
from tinyvllm_extra.gguf_export import convert
from tinyvllm_extra.gguf_tokenizer import make_tokenizer
from tinyvllm_extra.models import find_model
from tinyvllm_extra.huggingface import load_tokenizer
from tinyvllm_extra.weights import open_checkpoint
from tinyvllm_extra.packages import MissingPackage

SMALL = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 4}
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
HEADS = {"attn_q": 4, "attn_k": 2}


def convert_model(tmp_path, kind="F32", config=WIDE, **options):
  """Write a tiny model as tmp_path/model.gguf, convert it, and return the folder."""
  write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf", **config), kind, **options)
  return convert(tmp_path / "model.gguf", tmp_path / "converted")


def tensors_of(folder):
  with safe_open(folder / "model.safetensors", "np") as file: return {x: file.get_tensor(x) for x in file.offset_keys()}


def groups_of(folder):
  """Return ((bits, group size, with offsets), format) of each module, from config.json."""
  config = json.loads((folder / "config.json").read_text()).get("quantization_config", {"config_groups": {}})
  return {name: ((g["weights"]["num_bits"], g["weights"]["group_size"], not g["weights"]["symmetric"]), g["format"])
          for g in config["config_groups"].values() for name in g["targets"]}


def values(tensors, module):
  """Return a module's dequantized weight."""
  if f"{module}.weight_packed" in tensors:
    rows, columns = tensors[f"{module}.weight_shape"]
    words = tensors[f"{module}.weight_packed"].view(np.uint32)
    q = np.array([[word >> 4 * i & 15 for word in row for i in range(8)] for row in words.tolist()], np.float32)
    assert q.shape == (rows, columns)
    if f"{module}.weight_offset" not in tensors: q -= 8
  else:
    q = tensors[f"{module}.weight"]
    if f"{module}.weight_scale" not in tensors: return q.astype(np.float32)
    assert q.dtype == np.int8
  scale = tensors[f"{module}.weight_scale"]
  offset = tensors.get(f"{module}.weight_offset", np.zeros_like(scale))
  scale, offset = (x.astype(np.float32).repeat(q.shape[1] // x.shape[1], 1) for x in (scale, offset))
  return q * scale + offset


def decoded(path):
  """Return the tensors of one or more files by Hugging Face's names, dequantized by gguf."""
  names = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
  parts = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
           "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
           "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
           "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
  readers = [gguf.GGUFReader(x) for x in sorted(path.parent.glob(path.name.replace("-00001-of-", "-*-of-")))]
  llama = readers[0].fields["general.architecture"].contents() == "llama"
  tensors = {}
  for tensor in (x for reader in readers for x in reader.tensors):
    first, *rest = tensor.name.split(".")
    module = f"model.layers.{rest[0]}.{parts[rest[1]]}" if first == "blk" else names[first]
    x = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if llama and (heads := HEADS.get(rest[1] if first == "blk" else "")):
      x = x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    tensors[f"{module}.{rest[-1]}"] = x
  return tensors


def check_conversion(folder, path):
  """Check that the folder has all tensors of the file, with the values that gguf decodes, and no others."""
  tensors = tensors_of(folder)
  checked = set()
  for name, expected in decoded(path).items():
    module, _, suffix = name.rpartition(".")
    np.testing.assert_array_equal(tensors[name] if suffix == "bias" else values(tensors, module), expected, name)
    checked |= {name for name in tensors if name.startswith(f"{module}.")}
  assert checked == tensors.keys()


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


@pytest.mark.parametrize("kind", ["Q4_0", "Q5_1", "Q8_0", "IQ4_NL"])
def test_convert_blocks_of_32_accepts_rows_below_256(tmp_path, kind):
  check_conversion(convert_model(tmp_path, kind, {}), tmp_path / "model.gguf")


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


def test_convert_fused_matrix_partly_in_16_bits_is_not_quantized(tmp_path):
  folder = convert_model(tmp_path, "Q8_0", kinds={"attn_v": "F16", "ffn_up": "BF16"})
  check_conversion(folder, tmp_path / "model.gguf")
  assert tensors_of(folder)["model.layers.0.self_attn.q_proj.weight"].dtype == np.float32
  assert {name.split(".")[-1] for name in groups_of(folder)} == {"embed_tokens", "lm_head", "o_proj", "down_proj"}


# Architectures

def check_ids(model, folder):
  """Check that the model's greedy ids equal the reference with the weights in `folder`."""
  params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
  output, = LLM(model, **SMALL).generate({"prompt_token_ids": IDS}, params)
  assert output.outputs[0].token_ids == reference_greedy(folder, IDS, 8)


def generate(model, **options):
  """Return 8 greedy ids and their log probabilities, (8, V), computed in float32."""
  ids, logits = LogitsRecorder(LLM(model, dtype="float32", **SMALL, **options)).generate(IDS, 8)
  shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
  return ids, shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


@pytest.mark.parametrize("kind,tied", [
  *((kind, False) for kind in KINDS), ("Q8_0", True), ("Q4_K", True), ("Q6_K", True)])
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
  check_ids(path, folder)
  check_ids(convert(path, tmp_path / "converted"), folder)


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


@pytest.mark.parametrize("kind", KINDS)
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
  params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
  outputs = [LLM(path, **SMALL).generate({"prompt_token_ids": IDS}, params)
             for path in (tmp_path / "model.gguf", folder)]
  assert outputs[0][0].outputs[0].token_ids == outputs[1][0].outputs[0].token_ids


def test_core_backend_loads_dequantized_weights(tmp_path):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf", **WIDE), "Q8_0")
  plain = load_model(path, backend=Backend())
  tensors = {tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
             for tensor in gguf.GGUFReader(path).tensors}
  for name, module in (("token_embd", plain.embed_tokens), ("blk.1.ffn_down", plain.layers[1].down_proj)):
    np.testing.assert_array_equal(module.weight.numpy(), tensors[f"{name}.weight"])
  rows = tensors["blk.0.attn_q.weight"].reshape(4, -1, 2, 256).swapaxes(1, 2).reshape(-1, 256)
  np.testing.assert_array_equal(plain.layers[0].qkv_proj.weight.numpy()[:256], rows)


def test_quantization_option_for_quantized_gguf_raises(tmp_path):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf"), "Q8_0")
  with pytest.raises(ValueError, match="quantization='int4'.*model.gguf.* gguf"):
    LLM(path, quantization="int4", **SMALL)


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
  import reference
  config, weights = load(tiny_model(tmp_path / "hf"))
  weights = dict(weights)
  edit(weights)
  monkeypatch.setattr(reference, "load", lambda folder: (config, weights))
  check_refused(write_gguf(tmp_path / "model.gguf", tmp_path / "hf"), tmp_path / "converted", *parts)


def test_unsupported_rope_scaling_raises(tmp_path):
  folder = tiny_model(tmp_path / "hf", rope_scaling={"rope_type": "yarn", "factor": 4.0})
  check_refused(write_gguf(tmp_path / "model.gguf", folder), tmp_path / "converted", "'yarn'", "default")


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
  check_weights_equal(load_model(path), load_model(whole))
  checkpoints = [open_checkpoint(path), open_checkpoint(whole)]
  pieces = [[(*x, raw.tobytes()) for *x, raw in checkpoint.fingerprint_pieces()] for checkpoint in checkpoints]
  assert pieces[0] == pieces[1] and len(pieces[0]) == 21
  assert checkpoints[0].hf_config == checkpoints[1].hf_config
  check_conversion(convert(path, tmp_path / "converted"), path)
  write_safetensors(tmp_path / "hf" / "model.safetensors", decoded(path))
  check_ids(path, tmp_path / "hf")


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


def test_split_missing_part_raises_with_its_name(tmp_path):
  paths = write_split(tmp_path)
  paths[1].unlink()
  check_refused(paths[0], tmp_path / "converted", "part 1 of 3", f"{paths[1]} is missing")


@pytest.mark.parametrize("part", [1, 2])
def test_split_later_part_raises_with_name_of_first(tmp_path, part):
  paths = write_split(tmp_path)
  check_refused(paths[part], tmp_path / "converted", f"part {part + 1} of 3", paths[0])


def test_split_renamed_file_raises_with_expected_name(tmp_path):
  path = write_split(tmp_path)[0].rename(tmp_path / "renamed.gguf")
  check_refused(path, tmp_path / "converted", "part 1 of 3", "-00001-of-00003.gguf")


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

def run(*arguments, **env):
  return subprocess.run([sys.executable, "-m", "tinyvllm", *map(str, arguments)], capture_output=True, text=True,
                        check=False, timeout=120, cwd=Path(__file__).parents[2], env={**os.environ, **env})


def test_convert_command_needs_no_compiler_or_device(tmp_path):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf", **WIDE), "Q4_K", tokenizer="llama")
  env = {"PATH": str(tmp_path / "nowhere"), "DEV": "NOSUCH", "CC": "/nowhere/clang"}
  process = run("convert", path, tmp_path / "converted", **env)
  assert (process.returncode, process.stdout, process.stderr) == (0, f"{tmp_path / 'converted'}\n", "")
  check_conversion(tmp_path / "converted", path)
  process = run("convert", path, tmp_path / "converted", **env)
  assert process.returncode == 1 and process.stdout == "" and len(process.stderr.splitlines()) == 1
  assert process.stderr.startswith(f"tinyvllm: {tmp_path / 'converted'} ")
  assert "convert" in run("--help").stdout and "GGUF" in run("convert", "--help").stdout


@pytest.fixture
def words(words_folder, tmp_path): return write_gguf(tmp_path / "words-F16.gguf", words_folder, tokenizer="llama")


def test_generate_command_gguf_equals_folder(words, words_folder, tmp_path, capfd):
  options = ["--max-tokens", "8", "--max-model-len", "64"]
  texts = []
  before = sorted(tmp_path.rglob("*"))
  for model in (words_folder, words):
    assert main(["generate", "the cat", "--model", str(model), *options]) == 0
    texts.append(capfd.readouterr().out)
  assert texts[0] == texts[1] and sorted(tmp_path.rglob("*")) == before, "no file is written"


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_generate_command_quantization_gguf_names_the_file_type(tmp_path, words_folder, capfd, kind):
  """Like vLLM, also for a file without quantized weights."""
  path = write_gguf(tmp_path / "words.gguf", words_folder, kind, tokenizer="llama")
  options = ["generate", "the cat", "--model", str(path), "--max-tokens", "8", "--max-model-len", "64"]
  assert main(options) == main([*options, "--quantization", "gguf"]) == 0
  texts = capfd.readouterr().out.splitlines()
  assert len(texts) == 2 and texts[0] == texts[1]
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


def test_server_model_id_is_gguf_file_name(words):
  options = ["--max-model-len", 64, "--max-num-seqs", 1, "--max-num-batched-tokens", 8, "--cudagraph-capture-sizes", 8]
  with Server(words, *options, environment={"CACHEDB": CACHEDB}) as server:
    assert server.get("/v1/models").json()["data"][0]["id"] == "words-F16"
