"""Checkpoints whose weights are not integers with a scale. The oracle is each library's own dequantization."""
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.engines import ENGINE
from helpers.library_models import check_logits, torch_llama
from helpers.models import random_weights, tiny_config, tiny_model
from helpers.quantized_models import Matrices, SIZES, is_projection

from tinyvllm import LLM
from tinyvllm.backend import Backend
from tinyvllm.config import InputError
from tinyvllm_extra import weights
from tinyvllm_extra.quantization import E4M3, Quantized, decode_float, dequantize

WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 384}   # multiples of 128


# 8-bit floats

def write_e4m3(folder: Path, sizes: dict[str, Any], config: dict[str, Any], quantize: Any) -> dict[str, np.ndarray]:
  """Write a model with e4m3 projections. quantize: takes a name and a matrix, and returns the tensors to store and the
  dequantized matrix. Return the dequantized weights."""
  import torch
  from safetensors.torch import save_file
  tiny_model(folder, **sizes, quantization_config=config)
  plain = random_weights(tiny_config(**sizes))
  tensors = {name: torch.tensor(x) for name, x in plain.items()}
  for name in filter(is_projection, plain):
    stored, matrix = quantize(name, tensors.pop(name))
    tensors |= stored
    plain[name] = matrix.float().numpy()
  save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
  return plain


def per_tensor(suffix: str, *shape: int, dtype: str = "float32", **others: float) -> Any:
  """Quantize as vLLM does with one scale per tensor. shape: of the stored scale. others: scales of activations."""
  def quantize(name, w):
    import torch
    scale = (w.abs().max() / 440).to(getattr(torch, dtype))
    q = (w / scale).to(torch.float8_e4m3fn)
    extra = {name.removesuffix("weight") + key: torch.tensor(x) for key, x in others.items()}
    return {name: q, f"{name}_{suffix}": scale.reshape(shape)} | extra, q.float() * scale.float()
  return quantize


def per_block(size: int) -> Any:
  """Quantize with transformers. Its own inverse requires complete blocks."""
  def quantize(name, w):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=(size, size)))
    stored = Fp8Quantize(quantizer).convert({name: w})
    assert len(stored) == 2
    return stored, Fp8Dequantize(quantizer)._dequantize_one(*stored.values())
  return quantize


def per_incomplete_block(name: str, w: Any) -> Any:
  """Quantize in a plain loop with the scales that weight_dequant in DeepSeek-V3's kernel.py expects: one for each
  128 x 128 block. The last blocks are smaller."""
  import torch
  scales = torch.zeros(math.ceil(w.shape[0] / 128), math.ceil(w.shape[1] / 128))
  q, matrix = torch.zeros(w.shape, dtype=torch.float8_e4m3fn), torch.zeros(w.shape)
  for i, j in np.ndindex(*scales.shape):
    block = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
    scales[i, j] = w[block].abs().max() / 448
    q[block] = (w[block] / scales[i, j]).to(torch.float8_e4m3fn)
    matrix[block] = q[block].float() * scales[i, j]
  return {name: q, f"{name}_scale_inv": scales}, matrix


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
FP8_FORMATS = {   # quantization_config, sizes, function that quantizes a matrix
  "static": (STATIC, SIZES, per_tensor("scale", input_scale=0.02)),
  "kv cache": (STATIC, SIZES, per_tensor("scale", 1, k_scale=1.0, v_scale=1.0)),
  "mistral": ({**STATIC, "weight_block_size": None}, SIZES,
              per_tensor("scale_inv", dtype="bfloat16", activation_scale=0.02)),
  "blocks": (BLOCKS, WIDE, per_block(128)),
  "small blocks": ({**FP8, "weight_block_size": [32, 32]}, SIZES, per_block(32)),
  "incomplete blocks": (BLOCKS, {**SIZES, "hidden_size": 192, "intermediate_size": 336}, per_incomplete_block)}


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_fp8_logits_equal_dequantized_model(tmp_path, name, caplog):
  config, sizes, quantize = FP8_FORMATS[name]
  expected = write_e4m3(tmp_path, sizes, config, quantize)
  with caplog.at_level(logging.INFO, "tinyvllm"): check_logits(tmp_path, expected, sizes)
  assert "(fp8; embed_tokens, lm_head float32) in float32" in caplog.text


E4M3_ARGUMENTS: dict[str, dict[str, Any]] = {
  "tensor": {"strategy": "tensor"}, "channel": {"strategy": "channel"},
  "block": {"strategy": "block", "block_structure": [32, 32]}}


@pytest.mark.parametrize("activations", [None, {"dynamic": True, "strategy": "token"}, {"strategy": "tensor"}],
                         ids=["weights", "dynamic", "static"])
@pytest.mark.parametrize("strategy", E4M3_ARGUMENTS)
def test_float_quantized_logits_equal_decompressed_model(tmp_path, strategy, activations):
  from compressed_tensors.compressors import ModelCompressor
  from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
  from safetensors.torch import save_file
  args = QuantizationArgs(num_bits=8, type="float", **E4M3_ARGUMENTS[strategy])
  group = {"targets": ["Linear"], "weights": args}
  if activations: group["input_activations"] = QuantizationArgs(num_bits=8, type="float", **activations)
  model = torch_llama()
  apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"]))
  for module in model.modules():
    if not hasattr(module, "weight_scale"): continue
    rows, columns = module.weight_scale.shape if module.weight_scale.ndim == 2 else (1, 1)
    blocks = module.weight.detach().unflatten(1, (columns, -1)).unflatten(0, (rows, -1))
    module.weight_scale.data = (blocks.abs().amax((1, 3)) / 448).reshape(module.weight_scale.shape)
    if hasattr(module, "input_scale"): module.input_scale.data.fill_(0.02)
  compressor = ModelCompressor.from_pretrained_model(model, "float-quantized")
  compressor.compress_model(model)
  tiny_model(tmp_path, **SIZES)
  save_file(model.state_dict(), tmp_path / "model.safetensors")
  compressor.update_config(tmp_path)
  compressor.decompress_model(model)
  names = random_weights(tiny_config(**SIZES))
  check_logits(tmp_path, {name: x.float().numpy() for name, x in model.state_dict().items() if name in names})


@pytest.mark.parametrize("write", [lambda folder: write_e4m3(folder, SIZES, STATIC, per_tensor("scale")),
                                   lambda folder: write_bitsandbytes(folder, "nf4", True, "bfloat16", "uint8")],
                         ids=["fp8", "bitsandbytes"])
def test_core_backend_logits_equal_dequantized_model(tmp_path, write):
  check_logits(tmp_path, write(tmp_path), backend=Backend())


def test_decode_e4m3_equals_torch():
  import torch
  codes = np.arange(256, dtype=np.uint8)
  expected = torch.tensor(codes).view(torch.float8_e4m3fn).float().numpy()
  np.testing.assert_array_equal(decode_float(codes.view(E4M3)), expected)
  assert np.signbit(decode_float(codes.view(E4M3)[128:129])).all()


QKV = {f"model.layers.0.self_attn.{x}_proj": n for x, n in (("q", 256), ("k", 128), ("v", 128))}
DOWN = {"model.layers.0.mlp.down_proj": 256}


@pytest.mark.parametrize("axis,sources,inputs", [(0, QKV, 256), (1, DOWN, 512)], ids=["qkv", "down"])
@pytest.mark.parametrize("is_native", [False, True])
def test_switch_keeps_e4m3_shards(tmp_path, monkeypatch, is_native, axis, sources, inputs):
  """Both ways give the same weights. Scales repeat for the outputs of a block and hold for groups of 128 inputs."""
  monkeypatch.setattr(weights, "supports_e4m3", lambda: is_native)
  expected = write_e4m3(tmp_path, {**WIDE, "intermediate_size": 512}, BLOCKS, per_block(128))
  shards = Matrices(tmp_path, 2).shards(axis, sources, inputs)
  halves = [np.split(expected[f"{name}.weight"], 2, axis) for name in sources]
  for shard, *parts in zip(shards, *halves, strict=True):
    assert isinstance(shard, Quantized) == is_native
    if is_native: assert shard.q.dtype == E4M3 and shard.scale.shape == (len(shard.q), shard.q.shape[1] // 128)
    np.testing.assert_array_equal(dequantize(shard, np.float32), np.concatenate(parts))


# bitsandbytes

def write_bitsandbytes(folder: Path, kind: str, nested: bool, dtype: str, storage: str) -> dict[str, np.ndarray]:
  """Write a model as transformers does, and return the weights that bitsandbytes dequantizes."""
  import torch
  from bitsandbytes.functional import dequantize_4bit
  from bitsandbytes.nn import Linear4bit, Params4bit
  from safetensors.torch import save_file
  config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": storage}
  tiny_model(folder, **SIZES, quantization_config=config)
  plain = random_weights(tiny_config(**SIZES))
  tensors = {name: torch.tensor(x) for name, x in plain.items()}
  for name in filter(is_projection, plain):
    w = tensors.pop(name)
    linear = Linear4bit(w.shape[1], w.shape[0], bias=False)
    linear.weight = Params4bit(w.to(getattr(torch, dtype)), requires_grad=False, quant_type=kind, module=linear,
                               compress_statistics=nested, quant_storage=getattr(torch, storage))
    linear.to("cpu")
    tensors |= {name.removesuffix("weight") + key: x for key, x in linear.state_dict().items()}
    state = linear.weight.quant_state
    state.shape = (w.numel(),)   # bitsandbytes 0.50's kernel for CPUs misreads rows that end within a block
    plain[name] = dequantize_4bit(linear.weight.data, state).float().numpy().reshape(w.shape)
  save_file(tensors, folder / "model.safetensors")
  return plain


@pytest.mark.parametrize("kind,nested,dtype,storage", [
  ("nf4", False, "float32", "uint8"), ("nf4", True, "float32", "uint8"), ("nf4", True, "float16", "bfloat16"),
  ("nf4", True, "bfloat16", "uint8"),
  ("fp4", False, "float32", "uint8"), ("fp4", True, "float32", "uint8")])
def test_bitsandbytes_logits_equal_dequantized_model(tmp_path, kind, nested, dtype, storage, caplog):
  expected = write_bitsandbytes(tmp_path, kind, nested, dtype, storage)
  with caplog.at_level(logging.INFO, "tinyvllm"): check_logits(tmp_path, expected)
  assert f"(bitsandbytes {kind}, dequantized; embed_tokens, lm_head float32) in float32" in caplog.text


# The option quantization, which may state the format of the checkpoint

WRITERS: dict[str, Any] = {   # quant_method: function that writes a checkpoint
  "fp8": lambda folder: write_e4m3(folder, SIZES, STATIC, per_tensor("scale")),
  "bitsandbytes": lambda folder: write_bitsandbytes(folder, "nf4", True, "float32", "uint8")}


@pytest.mark.parametrize("method", WRITERS)
def test_quantization_option_names_method_of_checkpoint(tmp_path, method):
  check_logits(tmp_path, WRITERS[method](tmp_path), quantization=method)
  for other in [*WRITERS, "gguf", "int8"]:
    text = f"^quantization='{other}' does not match .*{tmp_path.name}, which is {method}: use '{method}' or "
    if other != method:
      with pytest.raises(InputError, match=text): LLM(tmp_path, quantization=other, **ENGINE)


# Damaged checkpoints

KEY = "model.layers.1.mlp.down_proj."
def remove(suffix): return lambda tensors: tensors.pop(KEY + suffix)
def cut(suffix): return lambda tensors: tensors.update({KEY + suffix: tensors[KEY + suffix][:-1]})


@pytest.mark.parametrize("change,message", [
  (remove("weight_scale_inv"), "weight_scale is missing"), (cut("weight"), r"weight is \[63, 96\]"),
  (cut("weight_scale_inv"), r"weight_scale_inv has shape \(1, 3\), not \(2, 3\) or \(64, 1\) or \(1, 1\)")])
def test_damaged_e4m3_raises_with_tensor(tmp_path, change, message):
  check_damage(tmp_path, change, message, write_e4m3, SIZES, {**FP8, "weight_block_size": [32, 32]}, per_block(32))


@pytest.mark.parametrize("change,message", [
  (remove("weight.absmax"), "weight.absmax is missing"), (remove("weight.quant_map"), "weight.quant_map is missing"),
  (cut("weight.quant_map"), r"weight.quant_map is \[15\]"), (cut("weight"), "weight has 6142 weights"),
  (cut("weight.absmax"), "weight has 6144 weights and scales for 6080"),
  (remove("weight.nested_quant_map"), "weight.nested_quant_map is missing"),
  (remove("weight.quant_state.bitsandbytes__nf4"), r"weight is \[3072, 1\]")])
def test_damaged_bitsandbytes_raises_with_tensor(tmp_path, change, message):
  check_damage(tmp_path, change, message, write_bitsandbytes, "nf4", True, "float32", "uint8")


def check_damage(folder: Path, change: Any, message: str, write: Any, *arguments: Any) -> None:
  """Write a model, change its tensors and check the error of the matrix KEY."""
  from safetensors.torch import load_file, save_file
  write(folder, *arguments)
  tensors = load_file(folder / "model.safetensors")
  change(tensors)
  save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
  with pytest.raises(InputError, match=KEY + message): Matrices(folder).shards(0, {KEY[:-1]: 64}, 96)
