"""Model files: dtypes, shards, errors that name the file and the tensor, and the memory that loading needs."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.engines import ENGINE, LogitsRecorder
from helpers.models import load, random_weights, tiny_config, tiny_model, write_safetensors
from helpers.quantized_models import MEASURE_PEAK_MEMORY
from helpers.reference import reference_greedy, reference_logits
from helpers.requests import greedy, ids_of, tokens
from tinygrad import Device, dtypes, nn

from tinyvllm import LLM, InputError, SamplingParams
from tinyvllm.backend import Backend

AUTO = {**ENGINE, "dtype": "auto"}
IDS = [3, 50, 99, 301]


def check_ids(model, folder):
  """Check that the model's greedy ids equal the reference with the weights in `folder`."""
  output, = LLM(model, **AUTO).generate(tokens(IDS), greedy(8))
  assert ids_of(output) == reference_greedy(folder, IDS, 8)


def edited_model(folder, edit, dtype="float32", **config):
  """Write a tiny model, its weights changed by `edit`, and return the folder."""
  tiny_model(folder, **config)
  weights = random_weights(tiny_config(**config))
  edit(weights)
  write_safetensors(folder / "model.safetensors", weights, dtype)
  return folder


def check_refused(folder, *parts):
  with pytest.raises(ValueError) as e: LLM(folder, **AUTO)
  message = str(e.value)
  for part in parts: assert str(part) in message, f"{part} is not in: {message}"
  assert len(message.splitlines()) == 1


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_load_each_dtype_and_shard_count_equals_reference(tmp_path, dtype, shards):
  check_ids(tmp_path, tiny_model(tmp_path, dtype=dtype, shards=shards))


def test_dtype_float16_logits_are_close_to_reference(tmp_path):
  folder = tiny_model(tmp_path)
  ids, logits = LogitsRecorder(LLM(folder, **{**ENGINE, "dtype": "float16"})).generate([3], 4)
  expected = reference_logits(folder, [3, *ids])[:-1]
  np.testing.assert_allclose(logits, expected, atol=0.05)
  assert np.abs(logits - expected).max() > 1e-4, "computed in float32, not float16"


@pytest.mark.parametrize(("dtype", "tied"), [("float16", False), ("bfloat16", True)])
def test_weights_keep_file_dtype_and_compute_in_float32(tmp_path, dtype, tied):
  """A float32 file with the same rounded weights gives the same logits, bit for bit."""
  config = {"tie_word_embeddings": tied, "attention_bias": True, "mlp_bias": True}
  narrow, wide = (tiny_model(tmp_path / name, dtype=dtype, **config) for name in ("narrow", "wide"))
  weights = {name: x.astype(np.float32) for name, x in load(narrow)[1].items()}
  write_safetensors(wide / "model.safetensors", weights)
  recorders = [LogitsRecorder(LLM(folder, **ENGINE)) for folder in (narrow, wide)]
  kinds = [{x.dtype for x in nn.state.get_parameters(recorder.engine.runner.model.model)} for recorder in recorders]
  assert kinds == [{getattr(dtypes, dtype)}, {dtypes.float32}]
  (ids, logits), (same_ids, same_logits) = (recorder.generate(IDS, 8) for recorder in recorders)
  assert ids == same_ids == reference_greedy(narrow, IDS, 8)
  np.testing.assert_array_equal(logits, same_logits)
  np.testing.assert_allclose(logits, reference_logits(narrow, [*IDS, *ids])[len(IDS) - 1:-1], atol=1e-4)


@pytest.mark.parametrize("dtype, size", [("float16", 2 * 20480), ("bfloat16", 20480), ("float32", 2 * 20480)])
def test_tensor_above_largest_tensor_raises_with_sizes(tmp_path, monkeypatch, dtype, size):
  """Embeddings of (320, 32) on a device without float16: float16 weights become float32."""
  folder, renderer = tiny_model(tmp_path, dtype=dtype), type(Device[Device.DEFAULT].renderer)
  supported_dtypes = renderer.supported_dtypes
  monkeypatch.setattr(renderer, "supported_dtypes", lambda self: supported_dtypes(self) - {dtypes.float16})
  monkeypatch.setattr("tinyvllm.backend.Backend.largest_tensor", lambda self: size - 1)
  check_refused(folder, folder, "embed_tokens", f"{size} bytes", size - 1)
  monkeypatch.setattr("tinyvllm.backend.Backend.largest_tensor", lambda self: size)
  assert LLM(folder, **AUTO).generate({"prompt_token_ids": IDS}, SamplingParams(max_tokens=1))[0].finished


def test_derived_tensors_are_ignored(tmp_path):
  def add_derived(weights):
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
  edited_model(tmp_path, add_derived, tie_word_embeddings=True)
  check_ids(tmp_path, tiny_model(tmp_path / "plain", tie_word_embeddings=True))


def test_tensor_order_in_file_does_not_matter(tmp_path):
  weights = random_weights(tiny_config())
  tiny_model(tmp_path)
  write_safetensors(tmp_path / "model.safetensors", dict(reversed(weights.items())))
  check_ids(tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight",
                                  "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_missing_tensor_raises_with_name(tmp_path, name):
  check_refused(edited_model(tmp_path, lambda weights: weights.pop(name)), tmp_path, name, " missing")


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias",
                                  "model.layers.0.mlp.experts.weight"])
def test_unexpected_tensor_raises_with_name(tmp_path, name):
  extra = {name: np.ones((8, 8), np.float32)}
  check_refused(edited_model(tmp_path, lambda weights: weights.update(extra)), tmp_path, name)


@pytest.mark.parametrize("name,shape", [
  ("model.embed_tokens.weight", (319, 32)), ("model.norm.weight", (16,)), ("lm_head.weight", (320, 16)),
  ("model.layers.0.self_attn.q_proj.weight", (24, 32)), ("model.layers.0.self_attn.k_proj.weight", (16, 31)),
  ("model.layers.1.mlp.down_proj.weight", (64, 32)), ("model.layers.1.mlp.gate_proj.weight", (64, 32, 1)),
  ("model.layers.1.input_layernorm.weight", (32, 1)), ("model.layers.0.self_attn.o_proj.weight", (1024,)),
])
def test_misshapen_tensor_raises_with_name_and_shape(tmp_path, name, shape):
  folder = edited_model(tmp_path, lambda weights: weights.update({name: np.ones(shape, np.float32)}))
  check_refused(folder, tmp_path, name, list(shape))


def test_fused_projection_sizes_with_only_sum_right_raise(tmp_path):
  def edit(weights):
    for name in ("q_proj", "k_proj"):   # 24 + 24 rows instead of 32 + 16
      weights[f"model.layers.0.self_attn.{name}.weight"] = np.ones((24, 32), np.float32)
  check_refused(edited_model(tmp_path, edit), tmp_path, "model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("size", [0, 5, 20, 5000, -1])
def test_truncated_file_raises_with_path(tmp_path, size):
  file = tiny_model(tmp_path) / "model.safetensors"
  file.write_bytes(file.read_bytes()[:size])
  check_refused(tmp_path, file)


def test_missing_file_or_shard_raises_with_path(tmp_path):
  shard = tiny_model(tmp_path, shards=3) / "model-00002-of-00003.safetensors"
  shard.unlink()
  check_refused(tmp_path, shard)
  file = tiny_model(tmp_path / "whole") / "model.safetensors"
  file.unlink()
  check_refused(tmp_path / "whole", file)


def test_unsupported_file_dtype_raises_with_tensor_name(tmp_path):
  folder = edited_model(tmp_path, lambda weights: None, dtype="int32")
  check_refused(folder, tmp_path / "model.safetensors", "model.embed_tokens.weight", "I32", "BF16")


def test_folder_without_tokenizer_raises_with_path(tmp_path):
  check_refused(tiny_model(tmp_path, tokenizer=False), tmp_path, "tokenizer.model")


@pytest.mark.parametrize("config,parts", [
  ({"architectures": ["BertModel"]}, ["BertModel", "LlamaForCausalLM", "Gemma3ForCausalLM", "Qwen3ForCausalLM"]),
  ({"architectures": ["Qwen3ForCausalLM"], "hidden_act": "relu"}, ["hidden_act", "relu", "silu"]),
  ({"architectures": ["Qwen3ForCausalLM"], "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
  ({"architectures": None}, ["LlamaForCausalLM"]),
  ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
  ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "llama3", "linear"]),
  ({"hidden_size": None}, ["hidden_size"]),
])
def test_unsupported_model_config_raises_with_supported_values(tmp_path, config, parts):
  folder = tiny_model(tmp_path)
  (folder / "config.json").write_text(json.dumps(tiny_config(**config)))
  check_refused(folder, folder, *parts)


@pytest.mark.parametrize("window", [None, 64, 1024])
def test_sliding_window_does_not_limit_max_model_len(tmp_path, window):
  folder = tiny_model(tmp_path, architectures=["MistralForCausalLM"], sliding_window=window)
  options = {**AUTO, "max_model_len": None}
  assert LLM(folder, **options).max_model_len == 512
  with pytest.raises(ValueError, match=r"max_model_len=513 .*\b512\b"): LLM(folder, **{**options, "max_model_len": 513})


@pytest.mark.parametrize("name", ["nowhere", "file.bin", "model.gguf"])
def test_missing_or_invalid_model_path_raises_with_path(tmp_path, name):
  (tmp_path / "file.bin").write_bytes(b"x")
  (tmp_path / "model.gguf").write_bytes(b"GGUF but no more")
  check_refused(tmp_path / name, tmp_path / name)


def test_model_path_with_tilde_is_expanded(tmp_path, monkeypatch):
  folder = tiny_model(tmp_path / "model")
  monkeypatch.setenv("HOME", str(tmp_path))
  check_ids("~/model", folder)


# Core backend

@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_core_backend_reads_files_of_every_dtype(tmp_path, dtype):
  folder = tiny_model(tmp_path, dtype=dtype, attention_bias=True)
  output, = LLM(folder, backend=Backend(), **AUTO).generate(tokens(IDS), greedy(4))
  assert ids_of(output) == reference_greedy(folder, IDS, 4)


@pytest.mark.parametrize("options,message", [
  ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 .*1: Backend"),
  ({"quantization": "int8"}, "quantization='int8' .*None: Backend")])
def test_core_backend_parallel_or_quantized_raises(tmp_path, options, message):
  folder = tiny_model(tmp_path)
  with pytest.raises(InputError, match=message): LLM(folder, backend=Backend(), **AUTO, **options)


# Memory


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize("shards", [1, 4])
def test_loading_peak_memory_is_at_most_1_3_models(tmp_path, shards):
  sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
           "num_key_value_heads": 2, "vocab_size": 2048}
  small, big = tiny_model(tmp_path / "small"), tiny_model(tmp_path / "big", shards=shards, **sizes)
  size = sum(f.stat().st_size for f in big.glob("*.safetensors"))
  assert size > 60e6
  command = [sys.executable, "-c", MEASURE_PEAK_MEMORY, small, big]
  run = subprocess.run(command, capture_output=True, text=True, check=False,
                       cwd=Path(__file__).parents[2], timeout=120)
  assert run.returncode == 0, run.stderr
  assert 0.9 * size < int(run.stdout) <= 1.3 * size, f"{int(run.stdout) / size:.2f} times the model's bytes"


def test_head_beside_tied_embeddings_is_reported(tmp_path, caplog):
  folder = tiny_model(tmp_path, tie_word_embeddings=True)
  weights = load(folder)[1]
  LLM(folder, **ENGINE)
  assert "lm_head" not in caplog.text
  write_safetensors(folder / "model.safetensors", {**weights, "lm_head.weight": np.ones((320, 32), np.float32)})
  LLM(folder, **ENGINE)
  assert "lm_head.weight is not used" in caplog.text
