"""Checkpoints whose weights are not integers with a scale, and GPTQ with 2 and 3 bits. The oracle is each library's own
dequantization. gptqmodel 7.7 needs a newer torch than the other libraries, and SqueezeLLM is no package: for these two,
the packing code that they published is reimplemented here in plain loops."""
import logging
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.engines import ENGINE
from helpers.models import random_weights, tiny_config, tiny_model
from helpers.quantized_models import GPTQ, PROJECTIONS
from safetensors.numpy import load_file, save_file
from test_formats import SIZES, check_logits, torch_llama

from tinyvllm import LLM
from tinyvllm.backend import Backend
from tinyvllm.config import InputError
from tinyvllm_extra import weights
from tinyvllm_extra.quantization import E4M3, Quantized, decode_float, dequantize, split, stack

WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 384}   # multiples of 128


def is_projection(name: str) -> bool: return name.endswith(tuple(f"{x}.weight" for x in PROJECTIONS))


class Matrices(weights.Checkpoint):
  """A checkpoint that is read without a model, for `count` devices."""
  def __init__(self, folder: Path, count: int = 1):
    super().__init__(folder)
    self.model: Any = SimpleNamespace(config=SimpleNamespace(head_dim=16))
    self.dtype, self.bits, self.num_devices = np.float32, None, count
    self.tensors = self.stored_tensors()
    self.layouts = weights.find_layouts(self.quantization_config)

  def shards(self, axis: int, sources: dict[str, int], inputs: int) -> list[Any]:
    rows, columns = [(self.num_devices, 1), (1, self.num_devices)][axis]
    sources = {name: n // rows for name, n in sources.items()}
    weight = SimpleNamespace(numel=lambda: sum(sources.values()) * inputs // columns)
    return self.matrices(SimpleNamespace(axis=axis, sources=sources, out_features=sum(sources.values()), weight=weight))


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


@pytest.mark.formats
@pytest.mark.parametrize("name", FP8_FORMATS)
def test_fp8_logits_equal_dequantized_model(tmp_path, name, caplog):
  config, sizes, quantize = FP8_FORMATS[name]
  expected = write_e4m3(tmp_path, sizes, config, quantize)
  with caplog.at_level(logging.INFO, "tinyvllm"): check_logits(tmp_path, expected, sizes)
  assert "(fp8; embed_tokens, lm_head float32) in float32" in caplog.text


E4M3_ARGUMENTS: dict[str, dict[str, Any]] = {
  "tensor": {"strategy": "tensor"}, "channel": {"strategy": "channel"},
  "block": {"strategy": "block", "block_structure": [32, 32]}}


@pytest.mark.formats
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


@pytest.mark.formats
@pytest.mark.parametrize("write", [lambda folder: write_e4m3(folder, SIZES, STATIC, per_tensor("scale")),
                                   lambda folder: write_bitsandbytes(folder, "nf4", True, "bfloat16", "uint8")],
                         ids=["fp8", "bitsandbytes"])
def test_core_backend_logits_equal_dequantized_model(tmp_path, write):
  check_logits(tmp_path, write(tmp_path), backend=Backend())


@pytest.mark.formats
def test_decode_e4m3_equals_torch():
  import torch
  codes = np.arange(256, dtype=np.uint8)
  expected = torch.tensor(codes).view(torch.float8_e4m3fn).float().numpy()
  np.testing.assert_array_equal(decode_float(codes.view(E4M3)), expected)
  assert np.signbit(decode_float(codes.view(E4M3)[128:129])).all()


def random_e4m3(rng: np.random.Generator, outputs: int, inputs: int, groups: int) -> Quantized:
  q = rng.integers(0, 127, (outputs, inputs), np.uint8).view(E4M3)
  return Quantized(q, rng.random((outputs, groups)).astype(np.float32) / 100, None, np.arange(inputs))


@pytest.mark.parametrize("groups", [1, 4])
def test_e4m3_stack_and_split_equal_dequantized_matrices(groups):
  rng = np.random.default_rng(0)
  matrices = [random_e4m3(rng, outputs, 512, groups) for outputs in (64, 32)]
  whole = stack(matrices)
  expected = np.concatenate([dequantize(w) for w in matrices])
  assert whole.q.dtype == E4M3
  np.testing.assert_array_equal(dequantize(whole), expected)
  for axis in range(2):
    shards = split(whole, 2, axis)
    assert all(isinstance(w, Quantized) and w.q.dtype == E4M3 for w in shards)
    np.testing.assert_array_equal(np.concatenate([dequantize(w) for w in shards], axis), expected)


QKV = {f"model.layers.0.self_attn.{x}_proj": n for x, n in (("q", 256), ("k", 128), ("v", 128))}
DOWN = {"model.layers.0.mlp.down_proj": 256}


@pytest.mark.formats
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


# GPTQ

def pack(q: np.ndarray, bits: int) -> np.ndarray:
  """Pack each column of q, (n, columns), as QuantLinear.pack of GPTQ, AutoGPTQ and SqueezeLLM does."""
  q = q.astype(np.uint32)
  words = np.zeros((len(q) // 32 * bits, q.shape[1]), np.uint32)
  i = row = 0
  while row < len(words):
    if bits in (2, 4, 8):
      for j in range(i, i + 32 // bits): words[row] |= q[j] << np.uint32(bits * (j - i))
      i += 32 // bits
      row += 1
      continue
    for j in range(i, i + 10): words[row] |= q[j] << np.uint32(3 * (j - i))
    i += 10
    words[row] |= q[i] << np.uint32(30)
    row += 1
    words[row] |= q[i] >> np.uint32(2) & np.uint32(1)
    i += 1
    for j in range(i, i + 10): words[row] |= q[j] << np.uint32(3 * (j - i) + 1)
    i += 10
    words[row] |= q[i] << np.uint32(31)
    row += 1
    words[row] |= q[i] >> np.uint32(1) & np.uint32(3)
    i += 1
    for j in range(i, i + 10): words[row] |= q[j] << np.uint32(3 * (j - i) + 2)
    i += 10
    row += 1
  return words.view(np.int32)


def write_gptq(folder: Path, bits: int, shift: int, act_order: bool, symmetric: bool) -> dict[str, np.ndarray]:
  """Write a model as gptqmodel does, with random numbers. shift: subtracted from stored zero points, see
  convert_gptq_v2_to_v1_format_module: from all values of a word at once, so that zeros borrow from the next value, but
  with 3 bits from each value."""
  rng = np.random.default_rng(0)
  config = {**GPTQ, "bits": bits, "desc_act": act_order, "checkpoint_format": "gptq" if shift else "gptq_v2"}
  tiny_model(folder, **SIZES, quantization_config=config)
  plain = random_weights(tiny_config(**SIZES))
  tensors = dict(plain)
  orders = {n: rng.permutation(n) if act_order else np.arange(n) for n in (64, 96)}
  for name in filter(is_projection, plain):
    outputs, inputs = tensors.pop(name).shape
    q = rng.integers(0, 2**bits, (inputs, outputs))
    scale = (rng.random((inputs // 32, outputs)) * 0.2 / 2**bits + 0.002).astype(np.float16)
    zero = rng.integers(0, 2**bits, scale.shape) if not symmetric else np.full(scale.shape, 2 ** (bits - 1))
    group = (orders[inputs] // 32).astype(np.int32)
    plain[name] = ((q - zero[group]) * scale[group].astype(np.float32)).T
    module = name.removesuffix("weight")
    words = pack(((zero - shift) % 8 if bits == 3 else zero).T, bits).T
    if bits != 3: words = words - np.int32(shift * {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}[bits])
    tensors |= {f"{module}qweight": pack(q, bits), f"{module}scales": scale, f"{module}g_idx": group,
                f"{module}qzeros": np.ascontiguousarray(words)}
  save_file(tensors, folder / "model.safetensors")
  return plain


@pytest.mark.formats
@pytest.mark.parametrize("shift,act_order,symmetric", [(1, False, True), (1, True, False), (0, False, False)],
                         ids=["symmetric", "act-order", "v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_logits_equal_dequantized_model(tmp_path, bits, shift, act_order, symmetric):
  check_logits(tmp_path, write_gptq(tmp_path, bits, shift, act_order, symmetric))


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_gptq_few_bits_become_int4(tmp_path, bits):
  """int4 holds 2 and 3 bits exactly and has a kernel."""
  expected = write_gptq(tmp_path, bits, 1, True, False)
  name = "model.layers.1.mlp.down_proj"
  matrix, = Matrices(tmp_path).shards(0, {name: 64}, 96)
  assert matrix.q.dtype == np.uint8 and matrix.q.max() == 2**bits - 1
  np.testing.assert_allclose(dequantize(matrix, np.float32), expected[f"{name}.weight"], atol=1e-7)


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


@pytest.mark.formats
@pytest.mark.parametrize("kind,nested,dtype,storage", [
  ("nf4", False, "float32", "uint8"), ("nf4", True, "float32", "uint8"), ("nf4", True, "float16", "bfloat16"),
  ("nf4", True, "bfloat16", "uint8"),
  ("fp4", False, "float32", "uint8"), ("fp4", True, "float32", "uint8")])
def test_bitsandbytes_logits_equal_dequantized_model(tmp_path, kind, nested, dtype, storage, caplog):
  expected = write_bitsandbytes(tmp_path, kind, nested, dtype, storage)
  with caplog.at_level(logging.INFO, "tinyvllm"): check_logits(tmp_path, expected)
  assert f"(bitsandbytes {kind}, dequantized; embed_tokens, lm_head float32) in float32" in caplog.text


# SqueezeLLM

def write_squeezellm(folder: Path, bits: int, sparse: bool) -> dict[str, np.ndarray]:
  """Write a model as the paper's QuantLinearLUT.pack2 does: tables of random centroids, and outliers minus the
  centroid that stands for zero. Return the weights that its kernels multiply by."""
  rng = np.random.default_rng(0)
  tiny_model(folder, **SIZES, quantization_config={"quant_method": "squeezellm", "wbits": bits})
  plain = random_weights(tiny_config(**SIZES))
  tensors = dict(plain)
  for name in filter(is_projection, plain):
    w = tensors.pop(name)
    module = name.removesuffix("weight")
    outliers = np.where(np.abs(w) > 2 * w.std(), w, 0) if sparse else np.zeros_like(w)
    table = np.sort(rng.standard_normal((len(w), 2**bits)).astype(np.float32) * 1.5 * w.std(), 1)
    q = np.abs((w - np.where(outliers, w, 0))[..., None] - table[:, None]).argmin(2)
    rows, columns, values = [0], [], []
    for i, j in np.ndindex(w.shape):
      if outliers[i, j]:
        columns.append(j)
        values.append(outliers[i, j] - table[i, np.abs(table[i]).argmin()])
      if j == w.shape[1] - 1: rows.append(len(columns))
      plain[name][i, j] = table[i, q[i, j]]
    for i in range(len(w)):
      for at in range(rows[i], rows[i + 1]): plain[name][i, columns[at]] += values[at]
    tensors |= {f"{module}qweight": pack(q.T, bits), f"{module}lookup_table": table}
    if sparse: tensors |= {f"{module}rows": np.array(rows, np.int32), f"{module}cols": np.array(columns, np.int32),
                           f"{module}vals": np.array(values, np.float32), f"{module}startrows": np.zeros(128, np.int32)}
  save_file(tensors, folder / "model.safetensors")
  return plain


@pytest.mark.formats
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("bits", [3, 4])
def test_squeezellm_logits_equal_dequantized_model(tmp_path, bits, sparse, caplog):
  expected = write_squeezellm(tmp_path, bits, sparse)
  with caplog.at_level(logging.INFO, "tinyvllm"): check_logits(tmp_path, expected)
  assert f"(squeezellm int{bits}, per channel, dequantized; embed_tokens, lm_head float32)" in caplog.text


# The option quantization, which may state the format of the checkpoint

WRITERS: dict[str, Any] = {   # quant_method: function that writes a checkpoint
  "fp8": lambda folder: write_e4m3(folder, SIZES, STATIC, per_tensor("scale")),
  "bitsandbytes": lambda folder: write_bitsandbytes(folder, "nf4", True, "float32", "uint8"),
  "squeezellm": lambda folder: write_squeezellm(folder, 4, True)}


@pytest.mark.formats
@pytest.mark.parametrize("method", WRITERS)
def test_quantization_option_names_method_of_checkpoint(tmp_path, method):
  check_logits(tmp_path, WRITERS[method](tmp_path), quantization=method)
  for other in [*WRITERS, "gguf", "int8"]:
    text = f"^quantization='{other}' does not match .*{tmp_path.name}, which is {method}: use '{method}' or "
    if other != method:
      with pytest.raises(InputError, match=text): LLM(tmp_path, quantization=other, **ENGINE)


@pytest.mark.parametrize("method", [*WRITERS, "gguf"])
def test_quantization_option_names_method_of_plain_checkpoint_raises(method):
  text = f"^quantization='{method}' does not match .*default_model, which is not quantized: use 'int8', 'int4' or "
  with pytest.raises(InputError, match=text): LLM(**ENGINE, quantization=method)


# Damaged checkpoints

KEY = "model.layers.1.mlp.down_proj."
def remove(suffix): return lambda tensors: tensors.pop(KEY + suffix)
def cut(suffix): return lambda tensors: tensors.update({KEY + suffix: tensors[KEY + suffix][:-1]})
def move(suffix): return lambda tensors: tensors[KEY + suffix].fill(96)


@pytest.mark.parametrize("change,message", [
  (remove("qweight"), "qweight is missing"), (cut("qweight"), r"qweight is \[11, 64\]"),
  (cut("lookup_table"), r"lookup_table is \[63, 16\]"), (cut("vals"), "vals is"), (cut("rows"), "rows is"),
  (remove("cols"), "cols is missing"), (move("cols"), "cols: the outliers are not in")])
def test_damaged_squeezellm_raises_with_tensor(tmp_path, change, message):
  write_squeezellm(tmp_path, 4, True)
  tensors = load_file(tmp_path / "model.safetensors")
  change(tensors)
  save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, tmp_path / "model.safetensors")
  with pytest.raises(InputError, match=KEY + message): Matrices(tmp_path).shards(0, {KEY[:-1]: 64}, 96)


@pytest.mark.formats
@pytest.mark.parametrize("change,message", [
  (remove("weight_scale_inv"), "weight_scale is missing"), (cut("weight"), r"weight is \[63, 96\]"),
  (cut("weight_scale_inv"), r"weight_scale_inv has shape \(1, 3\), not \(2, 3\) or \(64, 1\) or \(1, 1\)")])
def test_damaged_e4m3_raises_with_tensor(tmp_path, change, message):
  check_damage(tmp_path, change, message, write_e4m3, SIZES, {**FP8, "weight_block_size": [32, 32]}, per_block(32))


@pytest.mark.formats
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
