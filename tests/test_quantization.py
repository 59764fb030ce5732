"""Weights of 8 and 4 bits: as they were published, by the formulas of each format; made while loading; the kernels that
read them. What decides is the same model with its matrices dequantized by hand, in float32."""
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from reference import (
  ENGINE,
  random_weights,
  read_safetensors,
  reference_greedy,
  slow,
  slow_but,
  tiny_config,
  tiny_model,
  write_safetensors,
)
from safetensors.numpy import load_file, save_file
from tinygrad import Device, Tensor, dtypes

from tinyvllm import LLM, SamplingParams
from tinyvllm.backend import Backend, Devices
from tinyvllm.config import ModelConfig
from tinyvllm.llama import Llama
from tinyvllm_extra import kernels, parallel
from tinyvllm_extra.kernels.matmul import GateUp, Linear, pack, pack_numbers, scales_shape, stored_shape
from tinyvllm_extra.quantization import Quantized, dequantize, quantize
from tinyvllm_extra.weights import open_checkpoint

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)   # the output that each nibble of a word is of
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 17, 99, 250, 31]


def words(numbers: np.ndarray, bits: int, axis: int, order=range(8)) -> np.ndarray:
  """Neighbours along an axis in words of 32 bits, one by one."""
  numbers = np.moveaxis(numbers, axis, -1)
  per = 32 // bits
  out = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // per), np.uint64)
  for place in np.ndindex(out.shape):
    for j in range(per):
      value = int(numbers[(*place[:-1], place[-1] * per + [*order][j])])
      assert 0 <= value < 2**bits
      out[place] |= np.uint64(value << (bits * j))
  return np.ascontiguousarray(np.moveaxis(out, -1, axis).astype(np.uint32).view(np.int32))


def numbers_of(rng, out: int, inputs: int, group: int, bits: int, symmetric: bool):
  """q, scale and zero of a matrix, and the input that is in each group's place."""
  groups = inputs // group
  q = rng.integers(0, 2**bits, (out, inputs))
  scale = (rng.random((out, groups)) * 0.02 + 0.002).astype(np.float16)
  zero = np.full((out, groups), 2 ** (bits - 1)) if symmetric else rng.integers(1, 2**bits, (out, groups))
  return q, scale, zero


def matrix(q, scale, zero, group_of) -> np.ndarray:
  """(q - zero) * scale, one by one."""
  w = np.zeros(q.shape, np.float32)
  for o, i in np.ndindex(q.shape):
    g = group_of[i]
    w[o, i] = (float(q[o, i]) - float(zero[o, g])) * float(scale[o, g])
  return w


def awq(name, q, scale, zero, group_of, bits):
  return {f"{name}.qweight": words(q.T, 4, 1, AWQ_ORDER), f"{name}.qzeros": words(zero.T, 4, 1, AWQ_ORDER),
          f"{name}.scales": np.ascontiguousarray(scale.T)}


def gptq(name, q, scale, zero, group_of, bits, minus=1):
  return {f"{name}.qweight": words(q.T, bits, 0), f"{name}.qzeros": words(zero.T - minus, bits, 1),
          f"{name}.scales": np.ascontiguousarray(scale.T), f"{name}.g_idx": np.array(group_of, np.int32),
          f"{name}.bias": np.zeros(len(q), np.float16)}   # as its tools write where a model has none


def gptq_v2(*args): return gptq(*args, minus=0)


def packed(name, q, scale, zero, group_of, bits):
  zeros = {f"{name}.weight_zero_point": words(zero, bits, 0)} if (zero != 2 ** (bits - 1)).any() else {}
  return {f"{name}.weight_packed": words(q, bits, 1), f"{name}.weight_scale": scale,
          f"{name}.weight_shape": np.array(q.shape, np.int64), **zeros}


def plain(name, q, scale, zero, group_of, bits):
  return {f"{name}.weight": (q - 128).astype(np.int8), f"{name}.weight_scale": scale}


def plain_with_zeros(name, q, scale, zero, group_of, bits):
  return plain(name, q, scale, zero, group_of, bits) | {f"{name}.weight_zero_point": (zero - 128).astype(np.int8)}


def packed_in_order(name, q, scale, zero, group_of, bits):
  return packed(name, q, scale, zero, group_of, bits) | {f"{name}.weight_g_idx": np.array(group_of, np.int32)}


def with_offsets(name, q, scale, zero, group_of, bits):
  """As `tinyvllm convert` writes what is no multiple of the scale."""
  return {f"{name}.weight_packed": words(q, 4, 1), f"{name}.weight_scale": scale,
          f"{name}.weight_offset": (-zero * scale.astype(np.float32)).astype(np.float16)}


def compressed(bits, form="pack-quantized", **weights):
  return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {
    "targets": ["Linear"], "input_activations": None, "weights": {"num_bits": bits, "type": "int", **weights}}}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
# Name: what config.json says, who writes a matrix, bits, inputs in a group (0: all), symmetric, groups in disorder
FORMATS = {
  "awq": (AWQ, awq, 4, 32, False),
  "gptq": (GPTQ, gptq, 4, 32, False), "gptq, symmetric": (GPTQ, gptq, 4, 32, True),
  "gptq, a group for all": ({**GPTQ, "group_size": -1}, gptq, 4, 0, True),
  "gptq, 8 bits": ({**GPTQ, "bits": 8}, gptq, 8, 32, False), "gptq v2": (
    {**GPTQ, "checkpoint_format": "gptq_v2"}, gptq_v2, 4, 32, False),
  "gptq, act-order": ({**GPTQ, "desc_act": True}, gptq, 4, 32, False),
  "compressed-tensors": (compressed(4), packed, 4, 32, True),
  "compressed-tensors, zero points": (compressed(4, symmetric=False), packed, 4, 16, False),
  "compressed-tensors, 8 bits packed": (compressed(8), packed, 8, 32, True),
  "compressed-tensors, int8 by channel": (compressed(8, "int-quantized"), plain, 8, 0, True),
  "compressed-tensors, int8 by group": (compressed(8, "int-quantized"), plain, 8, 16, True),
  "compressed-tensors, int8, zero points": (compressed(8, symmetric=False), plain_with_zeros, 8, 32, False),
  "compressed-tensors, act-order": (compressed(4, actorder="group"), packed_in_order, 4, 32, True),
  "offsets": (compressed(4), with_offsets, 4, 32, False)}


def quantized_model(folder: Path, name: str, seed: int = 0) -> tuple[Path, Path]:
  """A model in this format, and the same in float32."""
  config, write, bits, group, symmetric = FORMATS[name]
  rng = np.random.default_rng(seed)
  weights = random_weights(tiny_config(**SIZES), seed)
  tensors = {}
  order: dict[int, np.ndarray] = {}   # of a number of inputs
  for key, w in list(weights.items()):
    if not key.endswith(tuple(f"{x}.weight" for x in PROJECTIONS)):
      tensors[key] = w.astype(np.float32)
      continue
    size = group or w.shape[1]
    numbers = numbers_of(rng, *w.shape, size, bits, symmetric)
    group_of = np.arange(w.shape[1]) // size
    if "act-order" in name: group_of = order.setdefault(w.shape[1], rng.permutation(group_of))
    tensors |= write(key.removesuffix(".weight"), *numbers, group_of, bits)
    weights[key] = matrix(*numbers, group_of)
    if write is with_offsets:
      q, scale, _ = numbers
      offset = tensors[key.removesuffix("weight") + "weight_offset"].astype(np.float32)
      weights[key] = q * scale.astype(np.float32)[:, group_of] + offset[:, group_of]
  tiny_model(folder / "float", **SIZES)
  write_safetensors(folder / "float" / "model.safetensors", weights)
  tiny_model(folder / "quantized", **SIZES, quantization_config=config)
  save_file(tensors, folder / "quantized" / "model.safetensors")
  return folder / "quantized", folder / "float"


def answer(folder: Path, **options) -> tuple[list[int], list[float]]:
  params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
  output = LLM(folder, **ENGINE, **options).generate({"prompt_token_ids": PROMPT}, params)[0].outputs[0]
  return output.token_ids, [x[i].logprob for i, x in zip(output.token_ids, output.logprobs, strict=True)]


USUAL = "awq", "gptq, act-order", "compressed-tensors, zero points", "compressed-tensors, int8, zero points"


@pytest.mark.parametrize("name", slow_but(USUAL, FORMATS))
def test_a_published_format_gives_what_its_formula_says(tmp_path, name):
  quantized, plain = quantized_model(tmp_path, name)
  ids, logprobs = answer(quantized)
  expected_ids, expected = answer(plain)
  assert ids == expected_ids == reference_greedy(plain, PROMPT, 8)
  np.testing.assert_allclose(logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["awq", "gptq, act-order", "compressed-tensors, zero points"])
def test_core_backend_reads_published_formats_dequantized(tmp_path, name):
  """Within the rounding of weights to float16."""
  quantized, plain = quantized_model(tmp_path, name)
  models = []
  for folder in (quantized, plain):
    checkpoint = open_checkpoint(folder)
    config = ModelConfig.from_hf(checkpoint.hf_config, folder)
    models.append(Llama(config, dtypes.float32, Backend(), Devices()))
    checkpoint.load(models[-1])
  for got, expected in zip(*[model.modules() for model in models], strict=True):
    np.testing.assert_allclose(got.weight.numpy(), expected.weight.numpy(), rtol=1e-3, atol=1e-6)


def test_layers_of_several_kinds_are_read_each_as_it_is(tmp_path):
  """As in GGUF's mixtures: 4 bits, 8 bits and none."""
  four, four_plain = quantized_model(tmp_path / "four", "compressed-tensors", 1)
  eight, eight_plain = quantized_model(tmp_path / "eight", "compressed-tensors, int8 by group", 1)
  def chosen(a, b, c): return {**{k: v for k, v in load_file(a / "model.safetensors").items() if "layers.0.self" in k},
    **{k: v for k, v in load_file(b / "model.safetensors").items() if "layers.0.mlp" in k},
    **{k: v for k, v in load_file(c / "model.safetensors").items() if "layers.0.self" not in k and ".0.mlp" not in k}}
  save_file(chosen(four, eight, four_plain), four / "model.safetensors")
  save_file(chosen(four_plain, eight_plain, four_plain), four_plain / "model.safetensors")
  assert answer(four)[0] == answer(four_plain)[0] == reference_greedy(four_plain, PROMPT, 8)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("intermediate", [96, *slow(72, 44)])   # groups of 32; of all; and no words of eight
def test_what_is_made_while_loading_is_what_is_nearest(tmp_path, bits, intermediate):
  """Greedy ids are those of the model whose matrices are dequantized by hand; embeddings and the head stay."""
  sizes = {**SIZES, "intermediate_size": intermediate}
  folder = tiny_model(tmp_path / "float", **sizes)
  weights = random_weights(tiny_config(**sizes), 0)
  for key, w in weights.items():
    if key.endswith(tuple(f"{x}.weight" for x in PROJECTIONS)):
      made = quantize(w, bits if w.shape[1] % 8 == 0 else 8)
      by_group = made.q.reshape(len(w), made.scale.shape[1], -1).astype(np.float32)
      weights[key] = (by_group * made.scale[..., None].astype(np.float32)
                      + (0 if made.offset is None else made.offset[..., None].astype(np.float32))).reshape(w.shape)
  tiny_model(tmp_path / "by_hand", **sizes)
  write_safetensors(tmp_path / "by_hand" / "model.safetensors", weights)
  assert answer(folder, quantization=f"int{bits}")[0] == reference_greedy(tmp_path / "by_hand", PROMPT, 8)


@pytest.mark.parametrize("bits", [8, 4])
def test_bfloat16_is_what_it_stands_for(tmp_path, bits):
  """Of matrices that are quantized here."""
  brain = tiny_model(tmp_path / "brain", dtype="bfloat16", **SIZES)
  tiny_model(tmp_path / "same", **SIZES)
  write_safetensors(tmp_path / "same" / "model.safetensors", read_safetensors(brain / "model.safetensors"))
  assert answer(brain, quantization=f"int{bits}") == answer(tmp_path / "same", quantization=f"int{bits}")


def test_scales_in_bfloat16_are_read(tmp_path):
  """As compressed-tensors' files often have them."""
  quantized, plain = quantized_model(tmp_path, "compressed-tensors")
  tensors = load_file(quantized / "model.safetensors")
  bits = {key: (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16) for key, x in tensors.items()
          if key.endswith("weight_scale")}
  weights = load_file(plain / "model.safetensors")
  for key, x in bits.items():
    name = key.removesuffix("_scale")
    rounded = (x.astype(np.uint32) << 16).view(np.float32)
    of = weights[name].reshape(*rounded.shape, -1) / tensors[key].astype(np.float32)[..., None]
    weights[name] = (np.rint(of) * rounded[..., None]).reshape(weights[name].shape)
  write_safetensors(plain / "model.safetensors", weights)
  header, offset, data = {}, 0, []
  for key, x in {**tensors, **bits}.items():
    kind = {"uint16": "BF16", "int32": "I32", "int64": "I64", "float32": "F32"}[x.dtype.name]
    header[key] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
    offset += x.nbytes
    data.append(x.tobytes())
  text = json.dumps(header).encode()
  text += b" " * (-len(text) % 8)
  (quantized / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
  assert answer(quantized)[0] == answer(plain)[0] == reference_greedy(plain, PROMPT, 8)


@pytest.mark.parametrize("bits,levels", [(8, 254), (4, 15)])
def test_no_number_is_further_from_its_weight_than_half_a_step(bits, levels):
  w = np.random.default_rng(0).standard_normal((32, 96)).astype(np.float32)
  made = quantize(w, bits)
  error = np.abs(dequantize(made).astype(np.float32) - w).reshape(32, 3, 32)
  inside = error <= 0.51 * made.scale[..., None].astype(np.float32) + 2e-3
  assert inside.mean() > (0.98 if bits == 4 else 0.9999)   # of 4 bits the outermost may be cut


def test_4_bits_err_less_than_by_the_range_alone():
  w = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
  by_group = w.reshape(64, 8, 32)
  low, high = by_group.min(-1, keepdims=True), by_group.max(-1, keepdims=True)
  step = (high - low) / 15
  by_range = np.rint((by_group - low) / step) * step + low
  error = ((dequantize(quantize(w, 4)).astype(np.float32) - w) ** 2).mean()
  assert error < 0.93 * ((by_range - by_group) ** 2).mean()


@pytest.mark.parametrize("w", [np.zeros((16, 32)), np.full((16, 32), 0.5), np.eye(16, 32) * 1e-9, np.eye(16, 32) * 3e4])
@pytest.mark.parametrize("bits", [8, 4])
def test_groups_without_a_range_and_very_small_and_large_ones(w, bits):
  made = dequantize(quantize(w.astype(np.float32), bits)).astype(np.float32)
  np.testing.assert_allclose(made, w, atol=max(1e-6, np.abs(w).max() / (12 if bits == 4 else 250)))


def silu_product(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
  with np.errstate(over="ignore"): return gate / (1 + np.exp(-gate)) * up


def stored(w: Quantized, dtype, kind=Linear) -> Linear:
  linear = kind(w.q.shape[1], {"w": len(w.q)}, False, dtype)
  shape = stored_shape(*w.q.shape, dtype)
  linear.weight = Tensor(pack_numbers(linear.ordered(w.q), shape)).realize()
  linear.scales = [Tensor(np.ascontiguousarray(pack(linear.ordered(x), scales_shape(shape, x.shape[1])))).realize()
                   for x in (w.scale, w.offset) if x is not None]
  return linear


@pytest.mark.parametrize("rows", [1, 16, 128, *slow(5, 32, 64)])
@pytest.mark.parametrize("out,inputs,group", [(48, 64, 32), (40, 72, 72), *slow((32, 96, 16), (16, 128, 128))])
@pytest.mark.parametrize("bits,offset", [(8, False), (8, True), (4, True)])
def test_the_kernels_multiply_what_they_read(rows, out, inputs, group, bits, offset):
  if Device.DEFAULT == "PYTHON" and sys.version_info < (3, 12) and rows <= 8:
    pytest.skip("tinygrad's interpreter makes halves by itself before Python 3.12, and of the smallest it makes 0")
  kernels.prepare_device()
  dtype = dtypes.float32 if Device.DEFAULT == "CPU" else dtypes.float16
  rng = np.random.default_rng(rows)
  q = rng.integers(-128, 128, (out, inputs)).astype(np.int8) if bits == 8 else rng.integers(
    0, 16, (out, inputs)).astype(np.uint8)
  scale = (rng.random((out, inputs // group)) * 0.01 + 0.001).astype(np.float16)
  offsets = rng.standard_normal((out, inputs // group)).astype(np.float16) if offset else None
  x = rng.standard_normal((rows, inputs)).astype(np.float16)
  w = q * np.repeat(scale.astype(np.float32), group, 1)
  if offsets is not None: w = w + np.repeat(offsets.astype(np.float32), group, 1)
  product = x.astype(np.float32) @ w.T
  for kind, expected in ((Linear, product), (GateUp, silu_product(*np.split(product, 2, 1)))):
    linear = stored(Quantized(q, scale, offsets, np.arange(inputs)), dtype, kind)
    got = linear(Tensor(x).cast(dtype).contiguous().realize(), dtype=dtypes.float32).numpy()
    np.testing.assert_allclose(got, expected, atol=np.abs(expected).max() * (1e-5 if dtype == dtypes.float32 else 2e-3))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_gate_and_up_are_loaded_in_the_order_that_their_kernel_reads(tmp_path, bits, count):
  """On each device its part of both, with biases."""
  kernels.prepare_device()
  dtype = dtypes.float32 if Device.DEFAULT == "CPU" else dtypes.float16
  tiny_model(tmp_path, num_hidden_layers=1, hidden_size=64, intermediate_size=80, mlp_bias=True, dtype="float16")
  checkpoint = open_checkpoint(tmp_path)
  config = ModelConfig.from_hf(checkpoint.hf_config, tmp_path)
  devices = Devices() if count == 1 else parallel.Devices(parallel.device_names(count))
  model = Llama(config, dtype, kernels.make_backend(), devices)
  checkpoint.load(model, None if bits == 16 else f"int{bits}")
  weights, name = load_file(tmp_path / "model.safetensors"), "model.layers.0.mlp."
  x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float16)
  def linear(kind):
    w = weights[f"{name}{kind}_proj.weight"]
    if bits < 16: w = dequantize(quantize(w, bits))
    return x.astype(np.float32) @ w.T.astype(np.float32) + weights[f"{name}{kind}_proj.bias"]
  expected = silu_product(linear("gate"), linear("up"))
  x_there = Tensor(x).cast(dtype).to(devices.names if count > 1 else None).contiguous().realize()
  got = model.layers[0].gate_up_proj(x_there)
  parts = [got] if count == 1 else [Tensor(got.realize().uop.mselect(i)) for i in range(count)]
  for part, wanted in zip(parts, np.split(expected, count, 1), strict=True):
    np.testing.assert_allclose(part.numpy(), wanted, atol=np.abs(expected).max() * 5e-3)


def broken(name, change):
  """A model of this format after a change to its tensors."""
  def make(folder):
    quantized, _ = quantized_model(folder, name)
    tensors = load_file(quantized / "model.safetensors")
    change(tensors)
    save_file(tensors, quantized / "model.safetensors")
    return quantized
  return make


KEY = "model.layers.1.mlp.down_proj."
def cut(key): return lambda tensors: tensors.update({KEY + key: np.ascontiguousarray(tensors[KEY + key][:-1])})
def lost(key): return lambda tensors: tensors.pop(KEY + key)
def far(tensors): tensors[KEY + "g_idx"][3] = 99


@pytest.mark.parametrize("name,change,said", [
  ("gptq", cut("qweight"), KEY + "qweight"), ("gptq", lost("scales"), KEY + "scales"), ("gptq", far, KEY + "g_idx"),
  ("gptq", cut("scales"), "do not divide|qzeros"), ("awq", cut("qzeros"), KEY + "qzeros"),
  ("awq", lost("qweight"), KEY + "weight"), ("compressed-tensors", cut("weight_packed"), KEY + "weight_packed"),
  ("compressed-tensors", lost("weight_scale"), KEY + "weight_scale"),
  ("compressed-tensors", lambda tensors: tensors.update({KEY + "other": np.ones(3, np.float32)}), "no place"),
  ("gptq", lambda tensors: tensors[KEY + "bias"].fill(1), KEY + "bias has no place")])
def test_a_damaged_tensor_is_named(tmp_path, name, change, said):
  with pytest.raises(ValueError, match=said): LLM(broken(name, change)(tmp_path), **ENGINE)


@pytest.mark.parametrize("config", [
  {"quant_method": "fp8"}, {"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "squeezellm"},
  {**GPTQ, "bits": 3}, {"quant_method": "awq", "bits": 8}, {"quant_method": "awq", "bits": 4, "version": "gemv"},
  compressed(3), compressed(8, type="float"), {"quant_method": "compressed-tensors", "config_groups": {
    "g": {"weights": {"num_bits": 8, "type": "int"}, "input_activations": {"num_bits": 8}}}}], ids=str)
def test_what_is_not_read_is_named_with_what_is(tmp_path, config):
  folder = tiny_model(tmp_path, **SIZES, quantization_config=config)
  with pytest.raises(ValueError, match=r"quantization_config=.* is not supported; supported: awq .*gptq .*compressed"):
    LLM(folder, **ENGINE)


def test_other_bits_and_a_model_that_is_quantized_are_refused(tmp_path):
  with pytest.raises(ValueError, match="quantization='int3' must be one of int8, int4, awq"):
    LLM(**ENGINE, quantization="int3")
  quantized, _ = quantized_model(tmp_path, "gptq")
  with pytest.raises(ValueError, match="quantization='int4'.*is gptq already"):
    LLM(quantized, **ENGINE, quantization="int4")
  with pytest.raises(ValueError, match="quantization='awq'.*is gptq"): LLM(quantized, **ENGINE, quantization="awq")
  with pytest.raises(ValueError, match="is not quantized"): LLM(**ENGINE, quantization="awq")
  assert answer(quantized, quantization="gptq") == answer(quantized)   # as vLLM's scripts say


def test_members_of_one_matrix_that_differ_are_refused(tmp_path):
  quantized, plain = quantized_model(tmp_path, "gptq")
  tensors = load_file(quantized / "model.safetensors")
  name = "model.layers.0.self_attn.k_proj."
  tensors = {k: v for k, v in tensors.items() if not k.startswith(name)}
  tensors[name + "weight"] = load_file(plain / "model.safetensors")[name + "weight"]
  save_file(tensors, quantized / "model.safetensors")
  with pytest.raises(ValueError, match="not quantized alike"): LLM(quantized, **ENGINE)


@pytest.mark.slow
def test_everything_else_works_as_with_any_weights(tmp_path):
  """Batch and single, a small pool, a prefix that is found, seeds."""
  quantized, _ = quantized_model(tmp_path, "awq")
  prompts = [{"prompt_token_ids": [7 * i + j + 5 for j in range(9)]} for i in range(6)]
  params = SamplingParams(temperature=0.8, seed=3, max_tokens=10, ignore_eos=True)
  llm = LLM(quantized, **ENGINE)
  alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
  small = LLM(quantized, **{**ENGINE, "max_model_len": 32}, num_gpu_blocks_override=12)
  for engine in (llm, small):
    assert [output.outputs[0].token_ids for output in engine.generate(prompts, params)] == alone


def test_the_command_line_takes_it(tmp_path, capsys):
  from tinyvllm_extra.cli import main
  folder = tiny_model(tmp_path, words=True, **SIZES)
  flags = ["--model", str(folder), "--max-tokens", "4"]
  assert main(["generate", "the cat", *flags, "--quantization", "int8"]) == 0
  assert main(["generate", "the cat", *flags, "--quantization", "int5"]) == 1
  assert "quantization='int5'" in capsys.readouterr().err
