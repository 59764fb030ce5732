"""Model files: what they may be, what is refused with file's and tensor's name, and the memory that loading takes."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from reference import (
  LogitsRecorder,
  load,
  random_weights,
  reference_greedy,
  reference_logits,
  tiny_config,
  tiny_model,
  write_safetensors,
)
from tinygrad import Device, dtypes, nn

from tinyvllm import LLM, InputError, SamplingParams
from tinyvllm.backend import Backend

SMALL = {"max_model_len": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 4}
IDS = [3, 50, 99, 301]


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}


def check(model, folder):
  """The model's greedy ids are those of the reference with the weights in `folder`."""
  params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
  output, = LLM(model, **SMALL).generate({"prompt_token_ids": IDS}, params)
  assert output.outputs[0].token_ids == reference_greedy(folder, IDS, 8)


def edited(folder, edit, dtype="float32", **config):
  """A tiny model whose weights `edit` has changed."""
  tiny_model(folder, **config)
  weights = random_weights(tiny_config(**config))
  edit(weights)
  write_safetensors(folder / "model.safetensors", weights, dtype)
  return folder


def refused(folder, *parts):
  with pytest.raises(ValueError) as e: LLM(folder, **SMALL)
  message = str(e.value)
  for part in parts: assert str(part) in message, f"{part} is not in: {message}"
  assert len(message.splitlines()) == 1


@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_files_of_every_dtype_whole_or_sharded(tmp_path, dtype, shards):
  check(tmp_path, tiny_model(tmp_path, dtype=dtype, shards=shards))


def test_the_engine_may_run_in_half_precision(tmp_path):
  folder = tiny_model(tmp_path)
  ids, logits = LogitsRecorder(LLM(folder, dtype="float16", **SMALL)).generate([3], 4)
  expected = reference_logits(folder, [3, *ids])[:-1]
  np.testing.assert_allclose(logits, expected, atol=0.05)
  assert np.abs(logits - expected).max() > 1e-4, "this was not half precision"


@pytest.mark.parametrize(("dtype", "tied"), [("float16", False), ("bfloat16", True)])
def test_a_weight_stays_in_its_files_type_and_is_computed_with_in_float32(tmp_path, dtype, tied):
  """As many bytes as the file has; and what a float32 file of the same rounded weights gives, to the bit."""
  config = {"tie_word_embeddings": tied, "attention_bias": True, "mlp_bias": True}
  narrow, wide = (tiny_model(tmp_path / name, dtype=dtype, **config) for name in ("narrow", "wide"))
  weights = {name: x.astype(np.float32) for name, x in load(narrow)[1].items()}
  write_safetensors(wide / "model.safetensors", weights)
  recorders = [LogitsRecorder(LLM(folder, dtype="float32", **SMALL)) for folder in (narrow, wide)]
  kinds = [{x.dtype for x in nn.state.get_parameters(recorder.engine.runner.model.model)} for recorder in recorders]
  assert kinds == [{getattr(dtypes, dtype)}, {dtypes.float32}]
  (ids, logits), (same_ids, same_logits) = (recorder.generate(IDS, 8) for recorder in recorders)
  assert ids == same_ids == reference_greedy(narrow, IDS, 8)
  np.testing.assert_array_equal(logits, same_logits)
  np.testing.assert_allclose(logits, reference_logits(narrow, [*IDS, *ids])[len(IDS) - 1:-1], atol=1e-4)
  params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
  jobs = [{"prompt_token_ids": [3 + 40 * i, 7, 300 - i]} for i in range(4)]
  together = [o.outputs[0].token_ids for o in recorders[0].engine.generate(jobs, params)]
  assert together == [reference_greedy(narrow, job["prompt_token_ids"], 6) for job in jobs]


@pytest.mark.parametrize("dtype, size", [("float16", 2 * 20480), ("bfloat16", 20480), ("float32", 2 * 20480)])
def test_what_is_too_large_for_the_device_as_it_will_lie_there_is_refused(tmp_path, monkeypatch, dtype, size):
  """320 rows of 32, on a device without float16."""
  folder, renderer = tiny_model(tmp_path, dtype=dtype), type(Device[Device.DEFAULT].renderer)
  has = renderer.supported_dtypes
  monkeypatch.setattr(renderer, "supported_dtypes", lambda self: has(self) - {dtypes.float16})
  monkeypatch.setattr("tinyvllm.backend.Backend.largest_tensor", lambda self: size - 1)
  refused(folder, folder, "embed_tokens", f"{size} bytes", size - 1)
  monkeypatch.setattr("tinyvllm.backend.Backend.largest_tensor", lambda self: size)
  assert LLM(folder, **SMALL).generate({"prompt_token_ids": IDS}, SamplingParams(max_tokens=1))[0].finished


def test_what_can_be_derived_is_passed_over(tmp_path):
  def more(weights):
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
  edited(tmp_path, more, tie_word_embeddings=True)
  check(tmp_path, tiny_model(tmp_path / "plain", tie_word_embeddings=True))


def test_the_order_of_tensors_in_a_file_does_not_matter(tmp_path):
  weights = random_weights(tiny_config())
  tiny_model(tmp_path)
  write_safetensors(tmp_path / "model.safetensors", dict(reversed(weights.items())))
  check(tmp_path, tmp_path)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight",
                                  "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"])
def test_a_missing_tensor_is_named(tmp_path, name):
  refused(edited(tmp_path, lambda weights: weights.pop(name)), tmp_path, name, "missing")


def test_a_missing_bias_is_named(tmp_path):
  def edit(weights): del weights["model.layers.1.self_attn.v_proj.bias"]
  refused(edited(tmp_path, edit, attention_bias=True), tmp_path, "model.layers.1.self_attn.v_proj.bias")


@pytest.mark.parametrize("name", ["model.layers.2.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.bias",
                                  "model.layers.0.mlp.experts.weight"])
def test_a_surplus_tensor_is_named(tmp_path, name):
  more = {name: np.ones((8, 8), np.float32)}
  refused(edited(tmp_path, lambda weights: weights.update(more)), tmp_path, name)


@pytest.mark.parametrize("name,shape", [
  ("model.embed_tokens.weight", (319, 32)), ("model.norm.weight", (16,)), ("lm_head.weight", (320, 16)),
  ("model.layers.0.self_attn.q_proj.weight", (24, 32)), ("model.layers.0.self_attn.k_proj.weight", (16, 31)),
  ("model.layers.1.mlp.down_proj.weight", (64, 32)), ("model.layers.1.mlp.gate_proj.weight", (64, 32, 1)),
  ("model.layers.1.input_layernorm.weight", (32, 1)), ("model.layers.0.self_attn.o_proj.weight", (1024,)),
])
def test_a_misshapen_tensor_is_named_with_its_shape(tmp_path, name, shape):
  folder = edited(tmp_path, lambda weights: weights.update({name: np.ones(shape, np.float32)}))
  refused(folder, tmp_path, name, list(shape))


def test_shapes_that_only_add_up_are_refused(tmp_path):
  def edit(weights):
    for n in "qk": weights[f"model.layers.0.self_attn.{n}_proj.weight"] = np.ones((24, 32), np.float32)   # 32 and 16
  refused(edited(tmp_path, edit), tmp_path, "model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("left", [0, 5, 20, 5000, -1])
def test_a_file_cut_short_is_named(tmp_path, left):
  file = tiny_model(tmp_path) / "model.safetensors"
  file.write_bytes(file.read_bytes()[:left])
  refused(tmp_path, file)


def test_a_missing_file_or_shard_is_named(tmp_path):
  shard = tiny_model(tmp_path, shards=3) / "model-00002-of-00003.safetensors"
  shard.unlink()
  refused(tmp_path, shard)
  file = tiny_model(tmp_path / "whole") / "model.safetensors"
  file.unlink()
  refused(tmp_path / "whole", file)


def test_an_unsupported_dtype_is_named(tmp_path):
  folder = edited(tmp_path, lambda weights: None, dtype="int32")
  refused(folder, tmp_path / "model.safetensors", "model.embed_tokens.weight", "I32", "BF16")


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
  refused(tiny_model(tmp_path, tokenizer=False), tmp_path, "tokenizer")


@pytest.mark.parametrize("config,parts", [
  ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
  ({"architectures": None}, ["LlamaForCausalLM"]),
  ({"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
  ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "llama3", "linear"]),
  ({"hidden_size": None}, ["hidden_size"]),
])
def test_a_model_that_is_not_supported_says_what_is(tmp_path, config, parts):
  folder = tiny_model(tmp_path)
  (folder / "config.json").write_text(json.dumps(tiny_config(**config)))
  refused(folder, folder, *parts)


@pytest.mark.parametrize("config, longest", [
  ({}, 512), ({"sliding_window": None}, 512), ({"sliding_window": 64}, 64), ({"sliding_window": 1024}, 512),
  ({"sliding_window": 64, "use_sliding_window": True}, 64), ({"sliding_window": 64, "use_sliding_window": False}, 512)])
def test_a_sliding_window_limits_the_length_within_which_the_model_is_plain(tmp_path, config, longest):
  folder = tiny_model(tmp_path, architectures=["MistralForCausalLM"], **config)
  options = {**SMALL, "max_model_len": None}
  assert LLM(folder, **options).max_model_len == longest
  with pytest.raises(ValueError, match=f"{longest}"): LLM(folder, **{**SMALL, "max_model_len": longest + 1})


@pytest.mark.parametrize("name", ["nowhere", "file.bin", "model.gguf"])
def test_a_model_that_is_not_there_is_named(tmp_path, name):
  (tmp_path / "file.bin").write_bytes(b"x")
  (tmp_path / "model.gguf").write_bytes(b"GGUF but no more")
  refused(tmp_path / name, tmp_path / name)


def test_the_model_may_be_a_str_with_a_home(tmp_path, monkeypatch):
  folder = tiny_model(tmp_path / "model")
  monkeypatch.setenv("HOME", str(tmp_path))
  check("~/model", folder)


# parts of the core

@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_core_backend_reads_files_of_every_dtype(tmp_path, dtype):
  folder = tiny_model(tmp_path, dtype=dtype, attention_bias=True)
  params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
  output, = LLM(folder, backend=Backend(), **SMALL).generate({"prompt_token_ids": IDS}, params)
  assert output.outputs[0].token_ids == reference_greedy(folder, IDS, 4)


@pytest.mark.parametrize("options,said", [
  ({"tensor_parallel_size": 2}, "tensor_parallel_size=2 must be 1: Backend's Linear, Norm, GateUp"),
  ({"quantization": "int8"}, "quantization='int8' must be None: Backend's Linear")])
def test_core_backend_refuses_what_its_parts_cannot_load(tmp_path, options, said):
  folder = tiny_model(tmp_path)
  with pytest.raises(InputError, match=said): LLM(folder, backend=Backend(), **SMALL, **options)


# memory

MEASURE = """
import sys
from tinyvllm import LLM
def peak():   # not ru_maxrss: that counts the process that started this one, too
  return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
options = dict(max_model_len=16, num_gpu_blocks_override=2, max_num_seqs=1)
LLM(sys.argv[1], **options)   # what the libraries take
before = peak()
LLM(sys.argv[2], **options)
print(peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize("shards", [1, 4])
def test_loading_takes_little_more_memory_than_the_model(tmp_path, shards):
  sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
           "num_key_value_heads": 2, "vocab_size": 2048}
  small, big = tiny_model(tmp_path / "small"), tiny_model(tmp_path / "big", shards=shards, **sizes)
  size = sum(f.stat().st_size for f in big.glob("*.safetensors"))
  assert size > 60e6
  run = subprocess.run([sys.executable, "-c", MEASURE, small, big], capture_output=True, text=True, check=False,
                       cwd=Path(__file__).parents[1], timeout=120)
  assert run.returncode == 0, run.stderr
  assert 0.9 * size < int(run.stdout) <= 1.3 * size, f"{int(run.stdout) / size:.2f} times the model's bytes"


@pytest.mark.parametrize("window,limit", [
  ({"sliding_window": 64}, 64), ({"sliding_window": 64, "use_sliding_window": True}, 64),
  ({"sliding_window": 64, "use_sliding_window": False}, 512), ({"sliding_window": 4096}, 512),
  ({"sliding_window": None}, 512)], ids=str)
def test_a_text_ends_where_the_models_window_would_slide_unless_the_model_does_without(tmp_path, window, limit):
  tiny_model(tmp_path, architectures=["MistralForCausalLM"], **window)
  with pytest.raises(ValueError, match=f"max_model_len=1000 must be at most the model's {limit}$"):
    LLM(tmp_path, max_model_len=1000)
