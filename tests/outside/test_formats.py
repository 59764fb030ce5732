"""Checkpoints written by the libraries that users quantize with (pip install --group formats). The reference is a plain
numpy LLaMA in float64 with the weights that the library itself dequantizes."""
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.data import read_data
from helpers.engines import ENGINE, PROMPT_IDS, check_logits
from helpers.models import random_weights, tiny_config, tiny_model
from helpers.quantized_models import Matrices, SIZES, is_projection

from tinyvllm import LLM, Backend, InputError
from tinyvllm_extra.formats import weights
from tinyvllm_extra.formats.quantization import Quantized, decode_float, dequantize
from tinyvllm_extra.formats.hub import open_checkpoint
from tinyvllm_extra.models.matrices import E4M3

WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 384}   # multiples of 128


def check_model(folder: Path, weights: dict[str, np.ndarray], sizes: dict[str, Any] = SIZES, **options: Any) -> None:
  """Check that the checkpoint in `folder` gives the same greedy ids as `weights`, and in float32 logits within
  1e-3 of theirs, with activations in float."""
  check_logits(folder, tiny_model(folder / "dequantized", weights=weights, **sizes), PROMPT_IDS, atol=1e-3, **options)


# compressed-tensors

def write_compressed(folder: Path, form: str, activations: dict[str, Any] | None = None,
                     **arguments: Any) -> dict[str, np.ndarray]:
  """Write a model as llm-compressor does, with min-max scales. Return the weights that the library decompresses.
  activations, arguments: of QuantizationArgs, for the inputs and for the weights."""
  import torch
  from compressed_tensors.compressors import ModelCompressor
  from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
  from compressed_tensors.quantization.utils import calculate_qparams
  from safetensors.torch import save_file
  from transformers import LlamaConfig, LlamaForCausalLM
  model = LlamaForCausalLM(LlamaConfig(**tiny_config(**SIZES)))
  model.load_state_dict({name: torch.tensor(x) for name, x in random_weights(tiny_config(**SIZES)).items()})
  group = {"targets": ["Linear"], "weights": QuantizationArgs(**arguments)}
  if activations: group["input_activations"] = QuantizationArgs(num_bits=8, type="float", **activations)
  apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"]))
  for module in model.modules():
    if not hasattr(module, "weight_scale"): continue
    shape = module.weight_scale.shape
    rows, columns = shape if len(shape) == 2 else (1, 1)
    blocks = module.weight.detach().unflatten(1, (columns, -1)).unflatten(0, (rows, -1))
    scale, zero_point = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), group["weights"])
    module.weight_scale.data = scale.reshape(shape)
    if hasattr(module, "weight_zero_point"): module.weight_zero_point.data = zero_point.reshape(shape)
    if hasattr(module, "input_scale"): module.input_scale.data.fill_(0.02)
  compressor = ModelCompressor.from_pretrained_model(model, form)
  compressor.compress_model(model)
  tiny_model(folder, **SIZES)
  save_file(model.state_dict(), folder / "model.safetensors")
  compressor.update_config(folder)
  compressor.decompress_model(model)
  names = random_weights(tiny_config(**SIZES))
  return {name: x.float().numpy() for name, x in model.state_dict().items() if name in names}


# arguments of write_compressed, and the description of the checkpoint
@pytest.mark.parametrize("arguments,description", read_data("compressed_tensors.json"), ids=str)
def test_compressed_tensors_logits_equal_decompressed_model(tmp_path, arguments, description):
  check_model(tmp_path, write_compressed(tmp_path, **arguments))
  text = f"compressed-tensors {description}; embed_tokens, lm_head float32"
  assert open_checkpoint(tmp_path).describe() == text


# 8-bit floats

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
  """Quantize with transformers, which requires complete blocks: smaller ones are padded with zeros."""
  def quantize(name, w):
    from torch.nn.functional import pad
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
    from transformers.utils.quantization_config import FineGrainedFP8Config
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=(size, size)))
    rows, columns = w.shape
    stored = Fp8Quantize(quantizer).convert({name: pad(w, (0, -columns % size, 0, -rows % size))})
    (_, q), (key, scale) = stored.items()
    matrix = Fp8Dequantize(quantizer)._dequantize_one(q, scale)
    return {name: q[:rows, :columns], key: scale}, matrix[:rows, :columns]
  return quantize


def bitsandbytes(kind: str, nested: bool, dtype: str = "float32", storage: str = "uint8") -> tuple[Any, ...]:
  """Return a row of FORMATS. The matrix is the one that bitsandbytes dequantizes."""
  def quantize(name, w):
    import torch
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit
    linear = Linear4bit(w.shape[1], w.shape[0], bias=False)
    linear.weight = Params4bit(w.to(getattr(torch, dtype)), requires_grad=False, quant_type=kind, module=linear,
                               compress_statistics=nested, quant_storage=getattr(torch, storage))
    linear.to("cpu")
    stored = {name.removesuffix("weight") + key: x for key, x in linear.state_dict().items()}
    state = linear.weight.quant_state
    state.shape = (w.numel(),)   # bitsandbytes 0.50's kernel for CPUs misreads rows that end within a block
    return stored, dequantize_4bit(linear.weight.data, state).reshape(w.shape)
  config = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
            "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": storage}
  return config, SIZES, quantize


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
# quantization_config, sizes, function that takes a name and a matrix, and returns the tensors to store and the
# dequantized matrix
FORMATS: dict[str, tuple[Any, ...]] = {
  "static": (STATIC, SIZES, per_tensor("scale", input_scale=0.02)),
  "kv cache": (STATIC, SIZES, per_tensor("scale", 1, k_scale=1.0, v_scale=1.0)),
  "mistral": ({**STATIC, "weight_block_size": None}, SIZES,
              per_tensor("scale_inv", dtype="bfloat16", activation_scale=0.02)),
  "blocks": (BLOCKS, WIDE, per_block(128)),
  "small blocks": ({**FP8, "weight_block_size": [32, 32]}, SIZES, per_block(32)),
  "incomplete blocks": (BLOCKS, {**SIZES, "hidden_size": 192, "intermediate_size": 336}, per_block(128)),
  "nf4": bitsandbytes("nf4", False), "nf4 nested": bitsandbytes("nf4", True),
  "nf4 float16": bitsandbytes("nf4", True, "float16", "bfloat16"),
  "nf4 bfloat16": bitsandbytes("nf4", True, "bfloat16"),
  "fp4": bitsandbytes("fp4", False), "fp4 nested": bitsandbytes("fp4", True)}


def write(folder: Path, config: dict[str, Any], sizes: dict[str, Any], quantize: Any) -> dict[str, np.ndarray]:
  """Write a model with quantized projections, and return the dequantized weights."""
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


@pytest.mark.parametrize("name", FORMATS)
def test_float_logits_equal_dequantized_model(tmp_path, name, caplog):
  config, sizes, _ = FORMATS[name]
  expected = write(tmp_path, *FORMATS[name])
  with caplog.at_level("INFO", "tinyvllm"): check_model(tmp_path, expected, sizes)
  kind = config.get("bnb_4bit_quant_type")
  text = f"bitsandbytes {kind}, dequantized" if kind else "fp8"
  assert f"({text}; embed_tokens, lm_head float32) in float32" in caplog.text


@pytest.mark.parametrize("name", ["static", "nf4 bfloat16"])
def test_core_backend_logits_equal_dequantized_model(tmp_path, name):
  check_model(tmp_path, write(tmp_path, *FORMATS[name]), backend=Backend())


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
  expected = write(tmp_path, BLOCKS, {**WIDE, "intermediate_size": 512}, per_block(128))
  shards = Matrices(tmp_path, 2).shards(axis, sources, inputs)
  halves = [np.split(expected[f"{name}.weight"], 2, axis) for name in sources]
  for shard, *parts in zip(shards, *halves, strict=True):
    assert isinstance(shard, Quantized) == is_native
    if is_native: assert shard.q.dtype == E4M3 and shard.scale.shape == (len(shard.q), shard.q.shape[1] // 128)
    np.testing.assert_array_equal(dequantize(shard, np.float32), np.concatenate(parts))


@pytest.mark.parametrize("method,name", [("fp8", "static"), ("bitsandbytes", "nf4 nested")])
def test_quantization_option_names_method_of_checkpoint(tmp_path, method, name):
  check_model(tmp_path, write(tmp_path, *FORMATS[name]), quantization=method)
  for other in {"fp8", "bitsandbytes", "gguf", "int8"} - {method}:
    text = f"^quantization='{other}' does not match .*{tmp_path.name}, which is {method}: use '{method}' or "
    with pytest.raises(InputError, match=text): LLM(tmp_path, quantization=other, **ENGINE)


# Damaged checkpoints

KEY = "model.layers.1.mlp.down_proj."
@pytest.mark.parametrize("name,change,suffix,message", read_data("refused_weights.json")["damaged matrices"])
def test_damaged_matrix_raises_with_tensor(tmp_path, name, change, suffix, message):
  from safetensors.torch import load_file, save_file
  write(tmp_path, *FORMATS[name])
  tensors = load_file(tmp_path / "model.safetensors")
  tensor = tensors.pop(KEY + suffix)
  if change == "cut": tensors[KEY + suffix] = tensor[:-1]
  save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "model.safetensors")
  with pytest.raises(InputError, match=KEY + message): Matrices(tmp_path).shards(0, {KEY[:-1]: 64}, 96)
