"""int8 and int4 weights: pre-quantized formats, quantization while loading, and the kernels. The reference is the same
model in float32, its matrices dequantized here by the formula of the format."""
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.data import read_data
from helpers.engines import ENGINE, check_logits
from helpers.gguf_files import write_gguf
from helpers.kernels import store_quantized
from helpers.models import load, random_weights, tiny_config, tiny_model, write_safetensors
from helpers.parameters import slow
from helpers.quantized_models import (FORMATS, SIZES, check_matrices, compressed, is_projection,
                                      load_model, quantized_model)
from helpers.reference import random_numbers
from safetensors.numpy import load_file, save_file
from tinygrad import Device, Tensor, dtypes, nn

from tinyvllm import LLM, InputError
from tinyvllm.backend import Backend
from tinyvllm_extra import programs
from tinyvllm_extra.kernels.matmul import FastGateUp, FastLinear
from tinyvllm_extra.formats.quantization import Quantized, dequantize, describe, find_layouts, quantize, read_matrix
from tinyvllm_extra.formats.hub import open_checkpoint

PROMPT = [5, 17, 99, 250, 31]
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
  check_logits(quantized, plain, PROMPT)
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
  check_logits(four, plain, PROMPT)


def test_fused_matrix_that_is_partly_quantized_raises(tmp_path):
  quantized, plain = quantized_model(tmp_path, "gptq")
  mix(quantized, {"0.self_attn.k_proj": plain})
  with pytest.raises(InputError, match="quantization_config: q, k and v"): load_model(quantized)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("intermediate", [96, *slow(72, 44)])   # groups of 32, one group, and not a multiple of 8
def test_quantize_while_loading_equals_dequantized_weights(tmp_path, bits, intermediate):
  """Embeddings and the head are not quantized."""
  sizes = {**SIZES, "intermediate_size": intermediate, "mlp_bias": True}
  folder, dequantized = (tiny_model(tmp_path / name, **sizes) for name in ("float", "dequantized"))
  weights = random_weights(tiny_config(**sizes))
  for key in filter(is_projection, weights):
    w = quantize(weights[key], bits if weights[key].shape[1] % 8 == 0 else 8)
    weights[key] = dequantize(w, np.float32)
  write_safetensors(dequantized / "model.safetensors", weights)
  check_logits(folder, dequantized, PROMPT, quantization=f"int{bits}")


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


def stored(w: Quantized, dtype, kind=FastLinear) -> FastLinear:
  linear = kind(w.q.shape[1], {"w": len(w.q)}, False, dtype)
  store_quantized(linear, w)
  return linear


@pytest.mark.parametrize("rows", [1, 16, 128, *slow(5, 32, 64)])
@pytest.mark.parametrize("out,inputs,group", [(48, 64, 32), (40, 72, 72), *slow((32, 96, 16), (16, 128, 128))])
@pytest.mark.parametrize("bits,offset", [(8, False), (8, True), (4, True), ("e4m3", False)])
def test_kernels_multiply_quantized_weights_equals_numpy(rows, out, inputs, group, bits, offset):
  if Device.DEFAULT == "PYTHON" and sys.version_info < (3, 12) and rows <= 8:
    pytest.skip("tinygrad's interpreter rounds small float16 to 0 before Python 3.12")
  programs.prepare_device()
  dtype = dtypes.float32 if Device.DEFAULT == "CPU" else dtypes.float16
  rng = np.random.default_rng(rows)
  q, numbers = random_numbers(rng, (out, inputs), bits)
  scale = (rng.random((out, inputs // group)) * 0.01 + 0.001).astype(np.float16)
  offsets = rng.standard_normal((out, inputs // group)).astype(np.float16) if offset else None
  x = rng.standard_normal((rows, inputs)).astype(np.float16)
  w = numbers * np.repeat(scale.astype(np.float32), group, 1)
  if offsets is not None: w = w + np.repeat(offsets.astype(np.float32), group, 1)
  product = x.astype(np.float32) @ w.T
  gate, up = np.split(product, 2, 1)
  with np.errstate(over="ignore"): swiglu = gate / (1 + np.exp(-gate)) * up
  for kind, expected in ((FastLinear, product), (FastGateUp, swiglu)):
    linear = stored(Quantized(q, scale, offsets, np.arange(inputs)), dtype, kind)
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


@pytest.mark.parametrize(("name", "message"), [
  ("awq", "an fp8 checkpoint"),
  ("compressed-tensors, packed int8", ".* but model.layers.0.*proj has 2 scales and 64 inputs")])
def test_fp8_activations_need_fp8_weights(tmp_path, monkeypatch, name, message):
  monkeypatch.setattr("tinyvllm_extra.formats.hub.has_wgmma", lambda: True)
  with pytest.raises(InputError, match=f"^activation_quantization='fp8' needs {message}: use 'auto'"):
    LLM(quantized_model(tmp_path, name)[0], **ENGINE, activation_quantization="fp8")


def test_quantization_option_may_name_the_method(tmp_path, caplog):
  """vLLM's scripts do. The engine's log describes the checkpoint."""
  with caplog.at_level("INFO", "tinyvllm"): LLM(quantized_model(tmp_path, "gptq")[0], **ENGINE, quantization="gptq")
  start = "loaded quantized (gptq int4, groups of 32; embed_tokens, lm_head float32) in float32 on CPU in "
  assert caplog.records[0].getMessage().startswith(start)
