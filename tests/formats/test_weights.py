"""Model files: dtypes, shards, quantized formats, errors that name the file and the tensor, and the memory that loading
needs."""
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.commands import check_error, run_python
from helpers.data import read_data
from helpers.engines import ENGINE, PROMPT_IDS, LogitsRecorder, check_logits
from helpers.gguf_files import write_gguf
from helpers.kernels import random_quantized, store, swiglu
from helpers.models import load, random_weights, tiny_config, tiny_model, write_safetensors
from helpers.parameters import slow
from helpers.quantized_models import (FORMATS, SIZES, check_matrices, compressed, is_projection, load_model,
                                      quantized_model)
from helpers.reference import reference_greedy, reference_logits
from safetensors.numpy import load_file, save_file
from tinygrad import Device, Tensor, dtypes, nn

from tinyvllm import LLM, InputError, SamplingParams
from tinyvllm.backend import Backend
from tinyvllm_extra import programs
from tinyvllm_extra.formats import weights
from tinyvllm_extra.formats.hub import open_checkpoint
from tinyvllm_extra.formats.quantization import dequantize, describe, find_layouts, quantize, read_matrix
from tinyvllm_extra.kernels.matmul import FastGateUp, FastLinear

AUTO = {**ENGINE, "dtype": "auto"}


def check_refused(folder, *parts): check_error(lambda: LLM(folder, **AUTO), *parts)


@pytest.mark.parametrize("shards,backend", [(1, None), (2, None), (5, None), (1, Backend())],
                         ids=["1", "2", "5", "core"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_load_each_dtype_and_shard_count_equals_reference(tmp_path, dtype, shards, backend):
  """The model has every optional part."""
  folder = tiny_model(tmp_path, dtype=dtype, shards=shards, head_dim=16, attention_bias=True, mlp_bias=True,
                      num_key_value_heads=None, tie_word_embeddings=True)
  check_logits(folder, folder, PROMPT_IDS, dtype="auto", backend=backend)


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
  (ids, logits), (same_ids, same_logits) = (recorder.generate(PROMPT_IDS, 8) for recorder in recorders)
  assert ids == same_ids == reference_greedy(narrow, PROMPT_IDS, 8)
  np.testing.assert_array_equal(logits, same_logits)


@pytest.mark.parametrize("dtype, size", [("float16", 2 * 20480), ("bfloat16", 20480), ("float32", 2 * 20480)])
def test_tensor_above_largest_tensor_raises_with_sizes(tmp_path, monkeypatch, dtype, size):
  """Embeddings of (320, 32) on a device without float16: float16 weights become float32."""
  folder, renderer = tiny_model(tmp_path, dtype=dtype), type(Device[Device.DEFAULT].renderer)
  supported_dtypes = renderer.supported_dtypes
  monkeypatch.setattr(renderer, "supported_dtypes", lambda self: supported_dtypes(self) - {dtypes.float16})
  monkeypatch.setattr("tinyvllm.backend.Memory.largest_tensor", lambda self: size - 1)
  check_refused(folder, f"{folder}: model.embed_tokens: ", f"{size} bytes", size - 1, "DEV=CPU")
  monkeypatch.setattr("tinyvllm.backend.Memory.largest_tensor", lambda self: size)
  assert LLM(folder, **AUTO).generate({"prompt_token_ids": PROMPT_IDS}, SamplingParams(max_tokens=1))[0].finished


def test_order_and_derived_tensors_do_not_matter(tmp_path):
  weights = random_weights(tiny_config(tie_word_embeddings=True))
  weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
  weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
  plain = tiny_model(tmp_path / "plain", tie_word_embeddings=True)
  derived = tiny_model(tmp_path / "derived", weights=dict(reversed(weights.items())), tie_word_embeddings=True)
  check_logits(derived, plain, PROMPT_IDS)


# Files that are refused

REFUSED_WEIGHTS = read_data("refused_weights.json")


@pytest.mark.parametrize("shapes,parts", REFUSED_WEIGHTS["shapes"], ids=str)   # of tensors; None: missing
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


@pytest.mark.parametrize("config,parts", REFUSED_WEIGHTS["configs"])
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


@pytest.mark.parametrize("options,message", REFUSED_WEIGHTS["core options"])
def test_core_backend_option_of_the_extension_raises(tmp_path, options, message):
  with pytest.raises(InputError, match=message): LLM(tiny_model(tmp_path), backend=Backend(), **AUTO, **options)


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


# int8 and int4 weights: pre-quantized formats, quantization while loading, and the kernels. The reference is the same
# model in float32, its matrices dequantized here by the formula of the format

REFUSED = read_data("refused_quantization.json")
KEY = "model.layers.1.mlp.down_proj."


@pytest.mark.parametrize("name", FORMATS)
def test_format_weights_equal_dequantized_model(tmp_path, name):
  """int4 holds also 2 and 3 bits and has a kernel."""
  quantized, plain = quantized_model(tmp_path, name)
  matrix, bits = check_matrices(quantized, load(plain)[1]), FORMATS[name][2]
  assert matrix.q.dtype == (np.uint8 if bits <= 4 else np.int8)


@pytest.mark.parametrize("name", ["awq", "gptq, act-order", "compressed-tensors, zero points",
                                  "compressed-tensors, int8, zero points"])
def test_format_outputs_equal_dequantized_model(tmp_path, name):
  """Greedy ids and logits. The core's backend loads the dequantized weights."""
  quantized, plain = quantized_model(tmp_path, name)
  check_logits(quantized, plain, PROMPT_IDS)
  parameters = [nn.state.get_parameters(load_model(x, backend=Backend()).modules()) for x in (quantized, plain)]
  for weight, expected in zip(*parameters, strict=True):
    np.testing.assert_allclose(weight.numpy(), expected.numpy(), rtol=1e-3, atol=1e-6)


def mix(folder: Path, parts: dict[str, Path]) -> None:
  """Replace tensors in `folder` whose names contain a key of parts by those in the other folder."""
  tensors = load_file(folder / "model.safetensors")
  for part, other in parts.items():
    tensors = {name: x for name, x in tensors.items() if part not in name}
    tensors |= {name: x for name, x in load_file(other / "model.safetensors").items() if part in name}
  save_file(tensors, folder / "model.safetensors")


def test_mixed_formats_in_one_model_equal_dequantized_model(tmp_path):
  """int4, int8 and float32 layers, as in GGUF mixtures."""
  four, plain = quantized_model(tmp_path / "four", "compressed-tensors", 1)
  eight, plain_eight = quantized_model(tmp_path / "eight", "compressed-tensors, int8 per group", 1)
  mix(four, {"layers.1.": plain, "layers.0.mlp": eight})
  mix(plain, {"layers.0.mlp": plain_eight})
  check_logits(four, plain, PROMPT_IDS)


def test_fused_matrix_that_is_partly_quantized_raises(tmp_path):
  quantized, plain = quantized_model(tmp_path, "gptq")
  mix(quantized, {"0.self_attn.k_proj": plain})
  with pytest.raises(InputError, match="quantization_config: q, k and v"): load_model(quantized)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("intermediate", [96, *slow(72, 44)])   # groups of 32, one group, and not a multiple of 8
def test_quantize_while_loading_equals_dequantized_weights(tmp_path, bits, intermediate):
  """Embeddings and the head are not quantized."""
  sizes = {**SIZES, "intermediate_size": intermediate, "mlp_bias": True}
  weights = random_weights(tiny_config(**sizes))
  for key in filter(is_projection, weights):
    w = quantize(weights[key], bits if weights[key].shape[1] % 8 == 0 else 8)
    weights[key] = dequantize(w, np.float32)
  dequantized = tiny_model(tmp_path / "dequantized", weights=weights, **sizes)
  check_logits(tiny_model(tmp_path / "float", **sizes), dequantized, PROMPT_IDS, quantization=f"int{bits}")


def test_bfloat16_scales_equal_dequantized_model():
  """Many compressed-tensors models have scales in bfloat16."""
  q, scale = np.arange(16, dtype=np.int8).reshape(2, 8), np.array([[0x3f80], [0x4020]], np.uint16)   # 1.0, 2.5
  tensors = {"x.weight": q, "x.weight_scale": scale}
  layouts = find_layouts({"quant_method": "compressed-tensors", "bits": 4})
  source: Any = SimpleNamespace(tensors=tensors, layouts=layouts, quantization_config={},
                                array=lambda name, *shape: tensors[name].reshape(shape))
  w = read_matrix(source, "x", q.shape)
  np.testing.assert_array_equal(dequantize(w, np.float32), q * np.array([[1.0], [2.5]]))


def test_quantize_error_is_at_most_half_a_step_and_below_min_max_scaling():
  w = np.random.default_rng(0).standard_normal((64, 8, 32)).astype(np.float32)   # in groups
  errors = {}
  for bits, share in ((8, 0.9999), (4, 0.98)):   # int4 may clip outliers
    quantized = quantize(w.reshape(64, 256), bits)
    errors[bits] = np.abs(dequantize(quantized).astype(np.float32).reshape(w.shape) - w)
    is_within = errors[bits] <= 0.51 * quantized.scale[..., None].astype(np.float32) + 2e-3
    assert is_within.mean() > share
  low, high = w.min(-1, keepdims=True), w.max(-1, keepdims=True)
  step = (high - low) / 15
  by_range = np.rint((w - low) / step) * step + low
  assert (errors[4] ** 2).mean() < 0.93 * ((by_range - w) ** 2).mean()


@pytest.mark.parametrize("w", [np.zeros((16, 32)), np.full((16, 32), 0.5), np.eye(16, 32) * 1e-9, np.eye(16, 32) * 3e4])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantize_constant_tiny_and_huge_groups_stay_accurate(w, bits):
  dequantized = dequantize(quantize(w.astype(np.float32), bits)).astype(np.float32)
  np.testing.assert_allclose(dequantized, w, atol=max(1e-6, np.abs(w).max() / (12 if bits == 4 else 250)))


@pytest.mark.parametrize("rows", [1, 16, 128, *slow(5, 32, 64)])
@pytest.mark.parametrize("out,inputs,group", [(48, 64, 32), (40, 72, 72), *slow((32, 96, 16), (16, 128, 128))])
@pytest.mark.parametrize("bits,offset", [(8, False), (8, True), (4, True), ("e4m3", False)])
def test_kernels_multiply_quantized_weights_equals_numpy(rows, out, inputs, group, bits, offset):
  if Device.DEFAULT == "PYTHON" and sys.version_info < (3, 12) and rows <= 8:
    pytest.skip("tinygrad's interpreter rounds small float16 to 0 before Python 3.12")
  programs.prepare_device()
  dtype = dtypes.float32 if Device.DEFAULT == "CPU" else dtypes.float16
  rng = np.random.default_rng(rows)
  matrix, w = random_quantized(rng, (out, inputs), bits, group, has_offset=offset)
  x = rng.standard_normal((rows, inputs)).astype(np.float16)
  product = x.astype(np.float32) @ w.T
  for kind, expected in ((FastLinear, product), (FastGateUp, swiglu(product))):
    linear = kind(inputs, {"w": out}, False, dtype)
    store(linear, matrix)
    output = linear(Tensor(x).cast(dtype).contiguous().realize(), dtype=dtypes.float32).numpy()
    tolerance = 1e-5 if dtype == dtypes.float32 else 2e-3
    np.testing.assert_allclose(output, expected, atol=np.abs(expected).max() * tolerance)


# Damaged and unsupported models

CHANGES = {"remove": lambda x: None, "cut": lambda x: np.ascontiguousarray(x[:-1]),
           "append 99": lambda x: np.append(x[:-1], np.int32(99)),
           "fill": lambda x: np.full(3, 1, np.float32) if x is None else np.full_like(x, 1)}


@pytest.mark.parametrize("name,suffix,change,message", REFUSED["tensors"])
def test_damaged_tensor_raises_with_its_name(tmp_path, name, suffix, change, message):
  folder, _ = quantized_model(tmp_path, name)
  tensors = load_file(folder / "model.safetensors")
  tensors[KEY + suffix] = CHANGES[change](tensors.get(KEY + suffix))
  save_file({name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors")
  with pytest.raises(InputError, match=KEY + message): load_model(folder)


@pytest.mark.parametrize("field,value,actual", [("bits", 8, 4), ("bits", 2, 4), ("group_size", 64, 32)])
def test_config_that_contradicts_the_shapes_is_refused(tmp_path, field, value, actual):
  folder, _ = quantized_model(tmp_path, "gptq")
  config = json.loads((folder / "config.json").read_text())
  config["quantization_config"][field] = value
  (folder / "config.json").write_text(json.dumps(config))
  with pytest.raises(InputError, match=f"{field}={value}, but .* has {actual}"): load_model(folder)


@pytest.mark.parametrize("text,config", REFUSED["unsupported"].items())
def test_unsupported_quantization_config_raises_with_supported_methods(text, config):
  """Marlin's matrices are permuted."""
  with pytest.raises(InputError, match=f"^quantization_config.*{text}.* is not supported: .*awq .*gptq .*compressed"):
    find_layouts(config)


# Descriptions and the option quantization

def test_describe_names_formats_of_matrices(tmp_path):
  for name, text in (("awq", "awq int4, groups of 32"), ("gptq, int8", "gptq int8, groups of 32"),
                     ("gptq, one group", "gptq int4, per channel")):
    folder, plain = quantized_model(tmp_path / name, name)
    assert open_checkpoint(folder).describe() == f"{text}; embed_tokens, lm_head float32"
    assert open_checkpoint(plain).describe() == "float32"
  folder = tiny_model(tmp_path / "bfloat16", dtype="bfloat16", shards=3, hidden_size=64)
  assert open_checkpoint(folder).describe() == "bfloat16"
  path = write_gguf(tmp_path / "model.gguf", folder, "Q4_0",
                    kinds={"ffn_down": "Q8_0", "attn_v": "Q8_0", "output": "F16"})
  assert open_checkpoint(path).describe() == "GGUF Q4_0; down_proj, v_proj GGUF Q8_0; lm_head GGUF F16"


def test_describe_mixed_groups_names_both():
  """llm-compressor quantizes some matrices to int8 and others to int4."""
  config, eight = compressed(4, "mixed-precision"), compressed(8, group_size=None, strategy="channel")
  config["config_groups"] = {"8": eight["config_groups"]["group_0"], "4": config["config_groups"]["group_0"]}
  assert describe(config) == "compressed-tensors int8, per channel and int4, groups of 32"
  assert describe({"quant_method": "fp8"}) == "fp8"


@pytest.mark.parametrize("model,option,message", REFUSED["options"])
def test_quantization_option_invalid_or_conflicting_raises(tmp_path, model, option, message):
  quantized, plain = quantized_model(tmp_path, "gptq")
  with pytest.raises(InputError, match=f"^quantization='{option}'.*{message}"):
    LLM(plain if model == "float" else quantized, **ENGINE, quantization=option)


@pytest.mark.parametrize(("name", "message"), REFUSED["fp8 activations"])
def test_fp8_activations_need_fp8_weights(tmp_path, monkeypatch, name, message):
  monkeypatch.setattr("tinyvllm_extra.formats.hub.has_wgmma", lambda: True)
  with pytest.raises(InputError, match=f"^activation_quantization='fp8' needs {message}: use 'auto'"):
    LLM(quantized_model(tmp_path, name)[0], **ENGINE, activation_quantization="fp8")


def test_quantization_option_may_name_the_method(tmp_path, caplog):
  """vLLM's scripts do. The engine's log describes the checkpoint."""
  with caplog.at_level("INFO", "tinyvllm"): LLM(quantized_model(tmp_path, "gptq")[0], **ENGINE, quantization="gptq")
  start = "loaded quantized (gptq int4, groups of 32; embed_tokens, lm_head float32) in float32 on CPU in "
  assert caplog.records[0].getMessage().startswith(start)
