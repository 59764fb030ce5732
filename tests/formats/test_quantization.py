"""int8 and int4 weights: pre-quantized formats, quantization while loading, and the kernels. The reference is the same
model in float32, its matrices dequantized here by the formula of the format."""
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.engines import ENGINE
from helpers.gguf_files import write_gguf
from helpers.models import load, random_weights, tiny_config, tiny_model, write_safetensors
from helpers.parameters import slow
from helpers.quantized_models import (AWQ, FORMATS, GPTQ, Matrices, SIZES, check_matrices, compressed, is_projection,
                                      quantized_model)
from helpers.reference import random_numbers, reference_greedy
from helpers.requests import greedy, tokens
from safetensors.numpy import load_file, save_file
from tinygrad import Device, Tensor, dtypes

from tinyvllm import LLM, InputError
from tinyvllm.backend import Backend, Devices
from tinyvllm.config import ModelConfig
from tinyvllm.llama import Llama
from tinyvllm_extra import kernels, parallel
from tinyvllm_extra.kernels.matmul import (GateUp, Linear, reorder, pack_numbers, prepare_scales, scales_shape,
                                           stored_shape)
from tinyvllm_extra.quantization import (COMPRESSED, E4M3, Quantized, dequantize, describe, find_layouts, quantize,
                                         read_matrix, split, stack)
from tinyvllm_extra.weights import open_checkpoint

PROMPT = [5, 17, 99, 250, 31]


def generate(folder: Path, **options) -> tuple[list[int], list[float]]:
  params = greedy(8, logprobs=0)
  output = LLM(folder, **ENGINE, **options).generate(tokens(PROMPT), params)[0].outputs[0]
  return output.token_ids, [x[i].logprob for i, x in zip(output.token_ids, output.logprobs, strict=True)]


@pytest.mark.parametrize("name", FORMATS)
def test_format_weights_equal_dequantized_model(tmp_path, name):
  """The tolerance allows for rounding to float16."""
  quantized, plain = quantized_model(tmp_path, name)
  check_matrices(quantized, load(plain)[1])


@pytest.mark.parametrize("name", ["awq", "gptq, act-order", "compressed-tensors, zero points",
                                  "compressed-tensors, int8, zero points"])
def test_format_outputs_equal_dequantized_model(tmp_path, name):
  """Greedy ids and log probabilities. The core's backend loads the dequantized weights."""
  quantized, plain = quantized_model(tmp_path, name)
  ids, logprobs = generate(quantized)
  expected_ids, expected = generate(plain)
  assert ids == expected_ids == reference_greedy(plain, PROMPT, 8)
  np.testing.assert_allclose(logprobs, expected, atol=1e-4)
  checkpoint = open_checkpoint(quantized)
  model = Llama(ModelConfig.from_hf(checkpoint.hf_config, quantized), dtypes.float32, Backend(), Devices())
  checkpoint.load(model)
  weight = load(plain)[1]["model.layers.1.mlp.down_proj.weight"]
  np.testing.assert_allclose(model.layers[1].down_proj.weight.numpy(), weight, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_few_bits_become_int4(tmp_path, bits):
  """int4 holds 2 and 3 bits exactly and has a kernel."""
  folder, _ = quantized_model(tmp_path, f"gptq, {bits} bits" if bits < 4 else "gptq")
  matrix, = Matrices(folder).shards(0, {KEY[:-1]: 64}, 96)
  assert matrix.q.dtype == np.uint8 and matrix.q.max() == 2**bits - 1


def test_mixed_formats_in_one_model_equal_dequantized_model(tmp_path):
  """int4, int8 and float32 layers, as in GGUF mixtures."""
  four, four_plain = quantized_model(tmp_path / "four", "compressed-tensors", 1)
  eight, eight_plain = quantized_model(tmp_path / "eight", "compressed-tensors, int8 per group", 1)
  def mixed(attention, mlp, rest):
    tensors = load_file(rest / "model.safetensors")
    tensors = {k: v for k, v in tensors.items() if "layers.0.self" not in k and "layers.0.mlp" not in k}
    for folder, part in ((attention, "layers.0.self"), (mlp, "layers.0.mlp")):
      tensors |= {k: v for k, v in load_file(folder / "model.safetensors").items() if part in k}
    return tensors
  save_file(mixed(four, eight, four_plain), four / "model.safetensors")
  save_file(mixed(four_plain, eight_plain, four_plain), four_plain / "model.safetensors")
  assert generate(four)[0] == generate(four_plain)[0] == reference_greedy(four_plain, PROMPT, 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("intermediate", [96, *slow(72, 44)])   # groups of 32, one group, and not a multiple of 8
def test_quantize_while_loading_equals_dequantized_weights(tmp_path, bits, intermediate):
  """Embeddings and the head are not quantized."""
  sizes = {**SIZES, "intermediate_size": intermediate}
  folder = tiny_model(tmp_path / "float", **sizes)
  weights = random_weights(tiny_config(**sizes), 0)
  for key, w in weights.items():
    if is_projection(key):
      quantized = quantize(w, bits if w.shape[1] % 8 == 0 else 8)
      scale = quantized.scale[..., None].astype(np.float32)   # (outputs, groups, 1)
      offset = 0 if quantized.offset is None else quantized.offset[..., None].astype(np.float32)
      by_group = quantized.q.reshape(*quantized.scale.shape, -1).astype(np.float32)
      weights[key] = (by_group * scale + offset).reshape(w.shape)
  tiny_model(tmp_path / "dequantized", **sizes)
  write_safetensors(tmp_path / "dequantized" / "model.safetensors", weights)
  assert generate(folder, quantization=f"int{bits}")[0] == reference_greedy(tmp_path / "dequantized", PROMPT, 8)


def test_bfloat16_scales_equal_dequantized_model():
  """Many compressed-tensors models have scales in bfloat16."""
  q, scale = np.arange(16, dtype=np.int8).reshape(2, 8), np.array([[0x3f80], [0x4020]], np.uint16)   # 1.0, 2.5
  tensors = {"x.weight": q, "x.weight_scale": scale}
  w = read_matrix("x", q.shape, COMPRESSED, tensors, lambda name, *shape: tensors[name].reshape(shape))
  np.testing.assert_array_equal(dequantize(w, np.float32), q * np.array([[1.0], [2.5]]))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantize_error_is_at_most_half_a_step(bits):
  w = np.random.default_rng(0).standard_normal((32, 96)).astype(np.float32)
  quantized = quantize(w, bits)
  error = np.abs(dequantize(quantized).astype(np.float32) - w).reshape(32, 3, 32)
  is_within = error <= 0.51 * quantized.scale[..., None].astype(np.float32) + 2e-3
  assert is_within.mean() > (0.98 if bits == 4 else 0.9999)   # int4 may clip outliers


def test_quantize_int4_error_is_below_min_max_scaling():
  w = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
  by_group = w.reshape(64, 8, 32)
  low, high = by_group.min(-1, keepdims=True), by_group.max(-1, keepdims=True)
  step = (high - low) / 15
  by_range = np.rint((by_group - low) / step) * step + low
  error = ((dequantize(quantize(w, 4)).astype(np.float32) - w) ** 2).mean()
  assert error < 0.93 * ((by_range - by_group) ** 2).mean()


@pytest.mark.parametrize("w", [np.zeros((16, 32)), np.full((16, 32), 0.5), np.eye(16, 32) * 1e-9, np.eye(16, 32) * 3e4])
@pytest.mark.parametrize("bits", [8, 4])
def test_quantize_constant_tiny_and_huge_groups_stay_accurate(w, bits):
  dequantized = dequantize(quantize(w.astype(np.float32), bits)).astype(np.float32)
  np.testing.assert_allclose(dequantized, w, atol=max(1e-6, np.abs(w).max() / (12 if bits == 4 else 250)))


@pytest.mark.parametrize("groups", [1, 4])
def test_e4m3_stack_and_split_equal_dequantized_matrices(groups):
  rng = np.random.default_rng(0)
  matrices = [Quantized(rng.integers(0, 127, (outputs, 512), np.uint8).view(E4M3),
                        rng.random((outputs, groups)).astype(np.float32) / 100, None, np.arange(512))
              for outputs in (64, 32)]
  whole = stack(matrices)
  expected = np.concatenate([dequantize(w) for w in matrices])
  assert whole.q.dtype == E4M3
  np.testing.assert_array_equal(dequantize(whole), expected)
  for axis in range(2):
    shards = split(whole, 2, axis)
    assert all(isinstance(w, Quantized) and w.q.dtype == E4M3 for w in shards)
    np.testing.assert_array_equal(np.concatenate([dequantize(w) for w in shards], axis), expected)


def swiglu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
  with np.errstate(over="ignore"): return gate / (1 + np.exp(-gate)) * up


def stored(w: Quantized, dtype, kind=Linear) -> Linear:
  linear = kind(w.q.shape[1], {"w": len(w.q)}, False, dtype)
  shape = stored_shape(*w.q.shape, dtype)
  linear.weight = Tensor(pack_numbers(linear.ordered(w.q), shape)).realize()
  linear.scales = [Tensor(np.ascontiguousarray(reorder(linear.ordered(x), scales_shape(shape, x.shape[1])))).realize()
                   for x in (prepare_scales(w, dtype), w.offset) if x is not None]
  return linear


@pytest.mark.parametrize("rows", [1, 16, 128, *slow(5, 32, 64)])
@pytest.mark.parametrize("out,inputs,group", [(48, 64, 32), (40, 72, 72), *slow((32, 96, 16), (16, 128, 128))])
@pytest.mark.parametrize("bits,offset", [(8, False), (8, True), (4, True), ("e4m3", False)])
def test_kernels_multiply_quantized_weights_equals_numpy(rows, out, inputs, group, bits, offset):
  if Device.DEFAULT == "PYTHON" and sys.version_info < (3, 12) and rows <= 8:
    pytest.skip("tinygrad's interpreter rounds small float16 to 0 before Python 3.12")
  kernels.prepare_device()
  dtype = dtypes.float32 if Device.DEFAULT == "CPU" else dtypes.float16
  rng = np.random.default_rng(rows)
  q, numbers = random_numbers(rng, (out, inputs), bits)
  scale = (rng.random((out, inputs // group)) * 0.01 + 0.001).astype(np.float16)
  offsets = rng.standard_normal((out, inputs // group)).astype(np.float16) if offset else None
  x = rng.standard_normal((rows, inputs)).astype(np.float16)
  w = numbers * np.repeat(scale.astype(np.float32), group, 1)
  if offsets is not None: w = w + np.repeat(offsets.astype(np.float32), group, 1)
  product = x.astype(np.float32) @ w.T
  for kind, expected in ((Linear, product), (GateUp, swiglu(*np.split(product, 2, 1)))):
    linear = stored(Quantized(q, scale, offsets, np.arange(inputs)), dtype, kind)
    output = linear(Tensor(x).cast(dtype).contiguous().realize(), dtype=dtypes.float32).numpy()
    tolerance = 1e-5 if dtype == dtypes.float32 else 2e-3
    np.testing.assert_allclose(output, expected, atol=np.abs(expected).max() * tolerance)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_gate_and_up_weights_load_in_kernel_order(tmp_path, bits, count):
  """Each device has its part of both, with biases."""
  kernels.prepare_device()
  dtype = dtypes.float32 if Device.DEFAULT == "CPU" else dtypes.float16
  tiny_model(tmp_path, num_hidden_layers=1, hidden_size=64, intermediate_size=80, mlp_bias=True, dtype="float16")
  checkpoint = open_checkpoint(tmp_path, None if bits == 16 else f"int{bits}")
  config = ModelConfig.from_hf(checkpoint.hf_config, tmp_path)
  devices = Devices() if count == 1 else parallel.Devices(parallel.device_names(count))
  model = Llama(config, dtype, kernels.make_backend(), devices)
  checkpoint.load(model)
  weights, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp."
  x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float16)
  def linear(kind):
    w = weights[f"{name}{kind}_proj.weight"]
    if bits < 16: w = dequantize(quantize(w, bits))
    return x.astype(np.float32) @ w.T.astype(np.float32) + weights[f"{name}{kind}_proj.bias"]
  expected = swiglu(linear("gate"), linear("up"))
  inputs = Tensor(x).cast(dtype).to(devices.names if count > 1 else None).contiguous().realize()
  output = model.layers[0].gate_up_proj(inputs)
  parts = [output] if count == 1 else [Tensor(output.realize().uop.mselect(i)) for i in range(count)]
  for part, expected_part in zip(parts, np.split(expected, count, 1), strict=True):
    np.testing.assert_allclose(part.numpy(), expected_part, atol=np.abs(expected).max() * 5e-3)


KEY = "model.layers.1.mlp.down_proj."
def drop_row(key): return lambda tensors, _: tensors.update({KEY + key: np.ascontiguousarray(tensors[KEY + key][:-1])})
def remove(key): return lambda tensors, _: tensors.pop(KEY + key)
def store_plain(tensors, plain):
  """Replace a fused matrix by one that is not quantized."""
  name = "model.layers.0.self_attn.k_proj."
  for key in [x for x in tensors if x.startswith(name)]: tensors.pop(key)
  tensors[f"{name}weight"] = plain[f"{name}weight"]


def set_group_out_of_range(tensors, _): tensors[KEY + "g_idx"][3] = 99


@pytest.mark.parametrize("field,value,actual", [("bits", 8, 4), ("bits", 2, 4), ("group_size", 64, 32)])
def test_config_that_contradicts_the_shapes_is_refused(tmp_path, field, value, actual):
  folder, _ = quantized_model(tmp_path, "gptq")
  config = json.loads((folder / "config.json").read_text())
  config["quantization_config"][field] = value
  (folder / "config.json").write_text(json.dumps(config))
  with pytest.raises(InputError, match=f"{field}={value}, but .* has {actual}"): LLM(folder, **ENGINE)


@pytest.mark.parametrize("name,change,message", [
  ("gptq", drop_row("qweight"), KEY + "qweight"), ("gptq", remove("scales"), KEY + "scales"),
  ("gptq", set_group_out_of_range, KEY + "g_idx"), ("gptq", drop_row("scales"), KEY + "(scales|qzeros)"),
  ("awq", drop_row("qzeros"), KEY + "qzeros"), ("awq", remove("qweight"), KEY + "weight"),
  ("compressed-tensors", drop_row("weight_packed"), KEY + "weight_packed"),
  ("compressed-tensors", remove("weight_scale"), KEY + "weight_scale"),
  ("compressed-tensors", lambda tensors, _: tensors.update({KEY + "other": np.ones(3, np.float32)}), KEY + "other"),
  ("gptq", lambda tensors, _: tensors[KEY + "bias"].fill(1), KEY + "bias"),
  ("gptq", store_plain, "quantization_config: q, k and v")])
def test_damaged_tensor_raises_with_its_name(tmp_path, name, change, message):
  folder, plain = quantized_model(tmp_path, name)
  tensors = load_file(folder / "model.safetensors")
  change(tensors, load_file(plain / "model.safetensors"))
  save_file(tensors, folder / "model.safetensors")
  with pytest.raises(InputError, match=message): LLM(folder, **ENGINE)


@pytest.mark.parametrize("config,text", [
  ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"), ({"quant_method": "hqq"}, "quant_method='hqq'"),
  ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit=True"), ({**GPTQ, "bits": 5}, "'bits': 5"),
  ({"quant_method": "squeezellm", "wbits": 2}, "wbits=2"), ({"quant_method": "awq", "bits": 8}, "'bits': 8"),
  ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version='gemv'"), (compressed(3), "'num_bits': 3"),
  ({**compressed(4), "transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "hadamard"),
  (compressed(8, type="float"), "'type': 'float'"), ({"quant_method": "compressed-tensors", "config_groups": {
    "g": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8}}}}, "input_activations"),
  # Marlin's matrices are permuted
  ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
  ({**GPTQ, "is_marlin_format": True}, "is_marlin_format=True"), ({**AWQ, "version": "marlin"}, "version='marlin'"),
  ({**GPTQ, "quant_method": "marlin"}, "quant_method='marlin'"), (compressed(4, "marlin-24"), "format='marlin-24'")])
def test_unsupported_quantization_config_raises_with_supported_methods(config, text):
  with pytest.raises(InputError, match=f"^quantization_config.*{text}.* is not supported: .*awq .*gptq .*compressed"):
    find_layouts(config)


@pytest.mark.parametrize("name,text", [
  ("awq", "awq int4, groups of 32"), ("gptq, int8", "gptq int8, groups of 32"),
  ("gptq, one group", "gptq int4, per channel")])
def test_describe_names_format_bits_group_size_and_float_matrices(tmp_path, name, text):
  folder, plain = quantized_model(tmp_path, name)
  assert open_checkpoint(folder).describe() == f"{text}; embed_tokens, lm_head float32"
  assert open_checkpoint(plain).describe() == "float32"


def test_describe_mixed_groups_names_both():
  """llm-compressor quantizes some matrices to int8 and others to int4."""
  config = compressed(4, "mixed-precision")
  config["config_groups"] |= compressed(8, group_size=None, strategy="channel")["config_groups"] | {
    "group_1": config["config_groups"]["group_0"]}
  assert describe(config) == "compressed-tensors int8, per channel and int4, groups of 32"
  assert describe({"quant_method": "fp8"}) == "fp8"


def test_describe_bfloat16_shards_and_gguf_mixture(tmp_path):
  folder = tiny_model(tmp_path, dtype="bfloat16", shards=3, hidden_size=64)
  assert open_checkpoint(folder).describe() == "bfloat16"
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "float", hidden_size=64), "Q4_0",
                    kinds={"ffn_down": "Q8_0", "attn_v": "Q8_0", "output": "F16"})
  assert open_checkpoint(path).describe() == "GGUF Q4_0; down_proj, v_proj GGUF Q8_0; lm_head GGUF F16"


def test_engine_log_describes_checkpoint(tmp_path, caplog):
  folder, _ = quantized_model(tmp_path, "gptq")
  with caplog.at_level("INFO", "tinyvllm"): LLM(folder, **ENGINE)
  start = "loaded quantized (gptq int4, groups of 32; embed_tokens, lm_head float32) in float32 on CPU in "
  assert caplog.records[0].getMessage().startswith(start)


@pytest.mark.parametrize("option,message", [
  ("int3", "int8, int4, awq"), ("int4", "gptq: use 'gptq' or "), ("awq", "gptq: use 'gptq' or ")])
def test_quantization_option_invalid_or_conflicting_raises(tmp_path, option, message):
  quantized, _ = quantized_model(tmp_path, "gptq")
  with pytest.raises(InputError, match=f"^quantization='{option}'.*{message}"):
    LLM(quantized, **ENGINE, quantization=option)
  LLM(quantized, **ENGINE, quantization="gptq")   # vLLM's scripts name the model's method


@pytest.mark.parametrize("method", ["awq", "fp8", "bitsandbytes", "squeezellm", "gguf"])
def test_quantization_option_names_method_of_plain_checkpoint_raises(method):
  text = f"^quantization='{method}' does not match .*default_model, which is not quantized: use 'int8', 'int4' or "
  with pytest.raises(InputError, match=text): LLM(**ENGINE, quantization=method)


def test_generate_command_accepts_quantization(tmp_path, capsys):
  from tinyvllm_extra.cli import main
  folder = tiny_model(tmp_path, words=True, **SIZES)
  flags = ["--model", str(folder), "--max-tokens", "4"]
  assert main(["generate", "the cat", *flags, "--quantization", "int8"]) == 0
  assert main(["generate", "the cat", *flags, "--quantization", "int5"]) == 1
  assert "quantization='int5'" in capsys.readouterr().err
