"""Model files: dtypes, shards, errors that name the file and the tensor, and the memory that loading needs."""
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import check_error, run_python
from helpers.data import read_data
from helpers.engines import ENGINE, LogitsRecorder, check_logits
from helpers.models import load, random_weights, tiny_config, tiny_model, write_safetensors
from helpers.reference import reference_greedy, reference_logits
from tinygrad import Device, dtypes, nn

from tinyvllm import LLM, InputError, SamplingParams
from tinyvllm.backend import Backend
from tinyvllm_extra.formats import weights

AUTO = {**ENGINE, "dtype": "auto"}
IDS = [3, 50, 99, 301]


def check_refused(folder, *parts): check_error(lambda: LLM(folder, **AUTO), *parts)


@pytest.mark.parametrize("shards,backend", [(1, None), (2, None), (5, None), (1, Backend())],
                         ids=["1", "2", "5", "core"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_load_each_dtype_and_shard_count_equals_reference(tmp_path, dtype, shards, backend):
  """The model has every optional part."""
  folder = tiny_model(tmp_path, dtype=dtype, shards=shards, head_dim=16, attention_bias=True, mlp_bias=True,
                      num_key_value_heads=None, tie_word_embeddings=True)
  check_logits(folder, folder, IDS, dtype="auto", backend=backend)


def test_dtype_float16_logits_are_close_to_reference(tmp_path):
  folder = tiny_model(tmp_path)
  ids, logits = LogitsRecorder(LLM(folder, **{**ENGINE, "dtype": "float16"})).generate([3], 4)
  expected = reference_logits(folder, [3, *ids])[:-1]
  np.testing.assert_allclose(logits, expected, atol=0.05)
  assert np.abs(logits - expected).max() > 1e-4, "computed in float32, not float16"


@pytest.mark.parametrize(("dtype", "tied"), [("float16", False), ("bfloat16", True)])
def test_weights_keep_file_dtype_and_compute_in_float32(tmp_path, dtype, tied):
  """A float32 file with the same rounded weights gives the same logits, bit for bit. Biases are float32."""
  config = {"tie_word_embeddings": tied, "attention_bias": True, "mlp_bias": True}
  narrow, wide = (tiny_model(tmp_path / name, dtype=dtype, **config) for name in ("narrow", "wide"))
  weights = {name: x.astype(np.float32) for name, x in load(narrow)[1].items()}
  write_safetensors(wide / "model.safetensors", weights)
  recorders = [LogitsRecorder(LLM(folder, **ENGINE)) for folder in (narrow, wide)]
  modules = [[*recorder.engine.runner.model.model.modules()] for recorder in recorders]
  kinds = [{x.dtype for name, x in nn.state.get_state_dict(part).items() if "bias" not in name} for part in modules]
  assert kinds == [{getattr(dtypes, dtype)}, {dtypes.float32}]
  (ids, logits), (same_ids, same_logits) = (recorder.generate(IDS, 8) for recorder in recorders)
  assert ids == same_ids == reference_greedy(narrow, IDS, 8)
  np.testing.assert_array_equal(logits, same_logits)


@pytest.mark.parametrize("dtype, size", [("float16", 2 * 20480), ("bfloat16", 20480), ("float32", 2 * 20480)])
def test_tensor_above_largest_tensor_raises_with_sizes(tmp_path, monkeypatch, dtype, size):
  """Embeddings of (320, 32) on a device without float16: float16 weights become float32."""
  folder, renderer = tiny_model(tmp_path, dtype=dtype), type(Device[Device.DEFAULT].renderer)
  supported_dtypes = renderer.supported_dtypes
  monkeypatch.setattr(renderer, "supported_dtypes", lambda self: supported_dtypes(self) - {dtypes.float16})
  monkeypatch.setattr("tinyvllm.backend.Memory.largest_tensor", lambda self: size - 1)
  check_refused(folder, folder, "embed_tokens", f"{size} bytes", size - 1)
  monkeypatch.setattr("tinyvllm.backend.Memory.largest_tensor", lambda self: size)
  assert LLM(folder, **AUTO).generate({"prompt_token_ids": IDS}, SamplingParams(max_tokens=1))[0].finished


def test_order_and_derived_tensors_do_not_matter(tmp_path):
  folder, plain = (tiny_model(tmp_path / name, tie_word_embeddings=True) for name in ("derived", "plain"))
  weights = random_weights(tiny_config(tie_word_embeddings=True))
  weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
  weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
  write_safetensors(folder / "model.safetensors", dict(reversed(weights.items())))
  check_logits(folder, plain, IDS)


# Files that are refused

REFUSED = read_data("refused_weights.json")


@pytest.mark.parametrize("shapes,parts", REFUSED["shapes"], ids=str)   # of tensors; None: missing
def test_missing_unexpected_or_misshapen_tensor_raises_with_name(tmp_path, shapes, parts):
  weights = {name: x for name, x in random_weights(tiny_config()).items() if name not in shapes}
  weights |= {name: np.ones(shape, np.float32) for name, shape in shapes.items() if shape}
  write_safetensors(tiny_model(tmp_path) / "model.safetensors", weights)
  check_refused(tmp_path, tmp_path, *parts)


def test_damaged_or_missing_file_raises_with_path(tmp_path):
  file = tiny_model(tmp_path / "one") / "model.safetensors"
  data = file.read_bytes()
  for size in (0, 5, 20, 5000, -1):
    file.write_bytes(data[:size])
    check_refused(file.parent, file)
  file.unlink()
  check_refused(file.parent, file)
  shard = tiny_model(tmp_path / "three", shards=3) / "model-00002-of-00003.safetensors"
  shard.unlink()
  check_refused(shard.parent, shard)
  check_refused(tiny_model(tmp_path / "tokenizer", tokenizer=False), tmp_path / "tokenizer", "tokenizer.model")


@pytest.mark.parametrize("name,dtype", (weights.FLOATS | weights.NUMBERS).items())
def test_tensor_in_file_keeps_dtype_and_bytes(tmp_path, name, dtype):
  """float8, which numpy lacks, too. The library validates the file."""
  data, path = bytes(range(6 * dtype.itemsize)), tmp_path / "model.safetensors"
  header = json.dumps({"x": {"dtype": name, "shape": [2, 3], "data_offsets": [0, len(data)]}}).encode()
  path.write_bytes(len(header).to_bytes(8, "little") + header + data)
  tensor = weights.read_safetensors(path, {name: dtype})["x"]
  assert (tensor.dtype, tensor.shape, tensor.read().tobytes()) == (dtype, (2, 3), data)


def test_unsupported_file_dtype_raises_with_tensor_name(tmp_path):
  file = tiny_model(tmp_path, dtype="int32") / "model.safetensors"
  check_refused(tmp_path, file, "model.embed_tokens.weight", "I32", "BF16")


@pytest.mark.parametrize("config,parts", REFUSED["configs"])
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


@pytest.mark.parametrize("name", ["nowhere", "nowhere.gguf", "file.bin", "model.gguf", "folder.gguf"])
def test_missing_or_invalid_model_path_raises_with_path(tmp_path, name):
  (tmp_path / "file.bin").write_bytes(b"x")
  (tmp_path / "model.gguf").write_bytes(b"GGUF but no more")
  (tmp_path / "folder.gguf").mkdir()
  check_refused(tmp_path / name, tmp_path / name, *["config.json"] * (name == "folder.gguf"))


@pytest.mark.parametrize("options,message", REFUSED["core options"])
def test_core_backend_option_of_the_extension_raises(tmp_path, options, message):
  folder = tiny_model(tmp_path)
  with pytest.raises(InputError, match=message): LLM(folder, backend=Backend(), **AUTO, **options)


# Memory

PRINT_PEAKS = """
import sys
from tinyvllm import LLM
for path in sys.argv[1:]:
  LLM(path, max_model_len=16, num_gpu_blocks_override=2, max_num_seqs=1)
  # Not ru_maxrss, which includes the parent process
  print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from Linux's /proc")
@pytest.mark.parametrize("shards", [1, 4])
def test_loading_peak_memory_is_at_most_1_3_models(tmp_path, shards):
  sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
           "num_key_value_heads": 2, "vocab_size": 2048}
  small, big = tiny_model(tmp_path / "small"), tiny_model(tmp_path / "big", shards=shards, **sizes)
  size = sum(f.stat().st_size for f in big.glob("*.safetensors"))
  assert size > 60e6
  run = run_python(PRINT_PEAKS, small, big)
  assert run.returncode == 0, run.stderr
  libraries, peak = [1024 * int(line) for line in run.stdout.splitlines()]
  assert 0.9 * size < peak - libraries <= 1.3 * size, f"{(peak - libraries) / size:.2f} times the model's bytes"


def test_head_beside_tied_embeddings_is_reported(tmp_path, caplog):
  folder = tiny_model(tmp_path, tie_word_embeddings=True)
  weights = load(folder)[1]
  LLM(folder, **ENGINE)
  assert "lm_head" not in caplog.text
  write_safetensors(folder / "model.safetensors", {**weights, "lm_head.weight": np.ones((320, 32), np.float32)})
  LLM(folder, **ENGINE)
  assert "lm_head.weight is not used" in caplog.text
