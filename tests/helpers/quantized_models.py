"""Models in the formats of quantization tools."""
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tinyvllm_extra import weights
from tinyvllm_extra.quantization import dequantize
from .models import random_weights, tiny_config, tiny_model, write_safetensors


MEASURE_PEAK_MEMORY = """
import sys
from tinyvllm import LLM
def peak():   # not ru_maxrss, which includes the parent process
  return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
options = dict(max_model_len=16, num_gpu_blocks_override=2, max_num_seqs=1)
LLM(sys.argv[1], **options)   # memory of the libraries
before = peak()
LLM(sys.argv[2], **options)
print(peak() - before)
"""


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
def is_projection(name: str) -> bool: return name.endswith(tuple(f"{x}.weight" for x in PROJECTIONS))


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)   # output column of each nibble of a word


def words(numbers: np.ndarray, bits: int, axis: int, order=range(8)) -> np.ndarray:
  """Pack neighbors along an axis into int32 words, as a stream of bits, the lowest first. 3-bit values cross words."""
  numbers = np.moveaxis(numbers, axis, -1)
  assert numbers.min() >= 0 and numbers.max() < 2**bits
  ordered = numbers.reshape(*numbers.shape[:-1], -1, 8)[..., [*order]]
  stream = (ordered[..., None] >> np.arange(bits) & 1).reshape(*numbers.shape[:-1], -1)
  packed = np.packbits(stream.astype(np.uint8), axis=-1, bitorder="little").view(np.int32)
  return np.ascontiguousarray(np.moveaxis(packed, -1, axis))


def random_quantized_matrix(rng, out: int, inputs: int, group: int, bits: int, symmetric: bool):
  """Return random q (out, inputs), scale and zero point (out, groups) of a matrix."""
  groups = inputs // group
  q = rng.integers(0, 2**bits, (out, inputs))
  scale = (rng.random((out, groups)) * 0.02 + 0.002).astype(np.float16)
  zero = np.full((out, groups), 2 ** (bits - 1)) if symmetric else rng.integers(0, 2**bits, (out, groups))
  return q, scale, zero


def matrix(q, scale, zero, group_of) -> np.ndarray:
  """Return (q - zero) * scale, in a plain loop."""
  w = np.zeros(q.shape, np.float32)
  for o, i in np.ndindex(q.shape):
    g = group_of[i]
    w[o, i] = (float(q[o, i]) - float(zero[o, g])) * float(scale[o, g])
  return w


def awq(name, q, scale, zero, group_of, bits):
  return {f"{name}.qweight": words(q.T, 4, 1, AWQ_ORDER), f"{name}.qzeros": words(zero.T, 4, 1, AWQ_ORDER),
          f"{name}.scales": np.ascontiguousarray(scale.T)}


def gptq(name, q, scale, zero, group_of, bits, minus=1):
  """As gptqmodel's convert_gptq_v2_to_v1_format_module: subtract from all zero points of a word at once, so that zeros
  borrow from the next value, but with 3 bits from each value."""
  zeros = words((zero.T - minus) % 8 if bits == 3 else zero.T, bits, 1)
  if bits != 3: zeros = (zeros.view(np.uint32) - np.uint32(minus * (2**32 - 1) // (2**bits - 1))).view(np.int32)
  return {f"{name}.qweight": words(q.T, bits, 0), f"{name}.qzeros": zeros,
          f"{name}.scales": np.ascontiguousarray(scale.T), f"{name}.g_idx": np.array(group_of, np.int32),
          f"{name}.bias": np.zeros(len(q), np.float16)}   # GPTQ tools write zeros if a model has no bias


def gptq_v2(*args): return gptq(*args, minus=0)


def pack_quantized(name, q, scale, zero, group_of, bits):
  zeros = {f"{name}.weight_zero_point": words(zero, bits, 0)} if (zero != 2 ** (bits - 1)).any() else {}
  return {f"{name}.weight_packed": words(q, bits, 1), f"{name}.weight_scale": scale,
          f"{name}.weight_shape": np.array(q.shape, np.int64), **zeros}


def int_quantized(name, q, scale, zero, group_of, bits):
  return {f"{name}.weight": (q - 128).astype(np.int8), f"{name}.weight_scale": scale}


def int_quantized_with_zeros(name, q, scale, zero, group_of, bits):
  tensors = int_quantized(name, q, scale, zero, group_of, bits)
  return tensors | {f"{name}.weight_zero_point": (zero - 128).astype(np.int8)}


def pack_quantized_with_g_idx(name, q, scale, zero, group_of, bits):
  return pack_quantized(name, q, scale, zero, group_of, bits) | {f"{name}.weight_g_idx": np.array(group_of, np.int32)}


def pack_quantized_with_offsets(name, q, scale, zero, group_of, bits):
  """`tinyvllm convert` writes this format if offsets are not multiples of the scale."""
  return {f"{name}.weight_packed": words(q, 4, 1), f"{name}.weight_scale": scale,
          f"{name}.weight_offset": (-zero * scale.astype(np.float32)).astype(np.float16)}


def compressed(bits, form="pack-quantized", **weights):
  """Return a quantization_config with all keys that compressed-tensors 0.20 writes (tests/test_formats.py)."""
  weights = {"dynamic": False, "group_size": 32, "num_bits": bits, "strategy": "group", "symmetric": True,
             "type": "int"} | weights
  group = {"format": form, "input_activations": None, "output_activations": None, "targets": ["Linear"],
           "weights": weights}
  return {"config_groups": {"group_0": group}, "format": form, "global_compression_ratio": None, "ignore": ["lm_head"],
          "kv_cache_scheme": None, "moe_sparsity_config": None, "quant_method": "compressed-tensors",
          "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {}, "version": "0.20.0"}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
# Name: quantization_config, function that writes a matrix, bits, group size (0: all inputs), symmetric
FORMATS = {
  "awq": (AWQ, awq, 4, 32, False),
  "gptq": (GPTQ, gptq, 4, 32, False), "gptq, symmetric": (GPTQ, gptq, 4, 32, True),
  "gptq, one group": ({**GPTQ, "group_size": -1}, gptq, 4, 0, True),
  "gptq, int8": ({**GPTQ, "bits": 8}, gptq, 8, 32, False), "gptq v2": (
    {**GPTQ, "checkpoint_format": "gptq_v2"}, gptq_v2, 4, 32, False),
  "gptq, 2 bits": ({**GPTQ, "bits": 2}, gptq, 2, 32, False), "gptq, 3 bits": (
    {**GPTQ, "bits": 3, "desc_act": True}, gptq, 3, 32, False),
  "gptq v2, 3 bits": ({**GPTQ, "bits": 3, "checkpoint_format": "gptq_v2"}, gptq_v2, 3, 32, False),
  "gptq, act-order": ({**GPTQ, "desc_act": True}, gptq, 4, 32, False),
  "compressed-tensors": (compressed(4), pack_quantized, 4, 32, True),
  "compressed-tensors, zero points": (compressed(4, symmetric=False), pack_quantized, 4, 16, False),
  "compressed-tensors, packed int8": (compressed(8), pack_quantized, 8, 32, True),
  "compressed-tensors, int8 per channel": (compressed(8, "int-quantized"), int_quantized, 8, 0, True),
  "compressed-tensors, int8 per group": (compressed(8, "int-quantized"), int_quantized, 8, 16, True),
  "compressed-tensors, int8, zero points": (compressed(8, symmetric=False), int_quantized_with_zeros, 8, 32, False),
  "compressed-tensors, act-order": (compressed(4, actorder="group"), pack_quantized_with_g_idx, 4, 32, True),
  "offsets": (compressed(4), pack_quantized_with_offsets, 4, 32, False)}


def quantized_model(folder: Path, name: str, seed: int = 0) -> tuple[Path, Path]:
  """Write a model in this format and the same model in float32. Return both folders."""
  config, write, bits, group, symmetric = FORMATS[name]
  rng = np.random.default_rng(seed)
  plain = random_weights(tiny_config(**SIZES), seed)
  tensors = {}
  g_idx: dict[int, np.ndarray] = {}   # by number of inputs
  for key, w in list(plain.items()):
    if not is_projection(key):
      tensors[key] = w.astype(np.float32)
      continue
    size = group or w.shape[1]
    numbers = random_quantized_matrix(rng, *w.shape, size, bits, symmetric)
    group_of = np.arange(w.shape[1]) // size
    if config.get("desc_act") or "act-order" in name: group_of = g_idx.setdefault(w.shape[1], rng.permutation(group_of))
    tensors |= write(key.removesuffix(".weight"), *numbers, group_of, bits)
    plain[key] = matrix(*numbers, group_of)
    if write is pack_quantized_with_offsets:
      q, scale, _ = numbers
      offset = tensors[key.removesuffix("weight") + "weight_offset"].astype(np.float32)
      plain[key] = q * scale.astype(np.float32)[:, group_of] + offset[:, group_of]
  tiny_model(folder / "float", **SIZES)
  write_safetensors(folder / "float" / "model.safetensors", plain)
  tiny_model(folder / "quantized", **SIZES, quantization_config=config)
  save_file(tensors, folder / "quantized" / "model.safetensors")
  return folder / "quantized", folder / "float"


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


def check_matrices(folder: Path, expected: dict[str, np.ndarray]) -> None:
  """Check that the matrices of a layer, fused as in the model, equal those of `expected` by name."""
  name = "model.layers.1."
  for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
                ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)):
    parts = {f"{name}{x}": expected[f"{name}{x}.weight"] for x in fused}
    whole = np.concatenate([*parts.values()])
    matrix, = Matrices(folder).shards(0, {module: len(x) for module, x in parts.items()}, whole.shape[1])
    np.testing.assert_allclose(dequantize(matrix, np.float32), whole, rtol=1e-3, atol=1e-6)
