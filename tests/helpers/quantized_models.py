"""Models in the formats of quantization tools."""
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tinygrad import dtypes

from tinyvllm.backend import Devices
from tinyvllm_extra import kernels
from tinyvllm_extra.kernels import parallel
from tinyvllm_extra.formats.hub import open_checkpoint
from tinyvllm_extra.models import find_model
from tinyvllm_extra.formats.quantization import dequantize, find_layouts
from tinyvllm_extra.formats.weights import FastCheckpoint
from .data import read_data
from .models import random_weights, tiny_config, tiny_model


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


def awq(name, q, scale, zero, group_of, bits, config):
  return {f"{name}.qweight": words(q.T, 4, 1, AWQ_ORDER), f"{name}.qzeros": words(zero.T, 4, 1, AWQ_ORDER),
          f"{name}.scales": np.ascontiguousarray(scale.T)}


def gptq(name, q, scale, zero, group_of, bits, config):
  """As gptqmodel's convert_gptq_v2_to_v1_format_module: subtract from all zero points of a word at once, so that zeros
  borrow from the next value, but with 3 bits from each value."""
  minus = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
  zeros = words((zero.T - minus) % 8 if bits == 3 else zero.T, bits, 1)
  if bits != 3: zeros = (zeros.view(np.uint32) - np.uint32(minus * (2**32 - 1) // (2**bits - 1))).view(np.int32)
  return {f"{name}.qweight": words(q.T, bits, 0), f"{name}.qzeros": zeros,
          f"{name}.scales": np.ascontiguousarray(scale.T), f"{name}.g_idx": np.array(group_of, np.int32),
          f"{name}.bias": np.zeros(len(q), np.float16)}   # GPTQ tools write zeros if a model has no bias


def compressed_tensors(name, q, scale, zero, group_of, bits, config):
  weights = config["config_groups"]["group_0"]["weights"]
  packed = config["format"] == "pack-quantized"
  tensors = {"weight_scale": scale}
  if packed: tensors |= {"weight_packed": words(q, bits, 1), "weight_shape": np.array(q.shape, np.int64)}
  else: tensors["weight"] = (q - 128).astype(np.int8)
  if not weights["symmetric"]:
    tensors["weight_zero_point"] = words(zero, bits, 0) if packed else (zero - 128).astype(np.int8)
  if "actorder" in weights: tensors["weight_g_idx"] = np.array(group_of, np.int32)
  return {f"{name}.{suffix}": x for suffix, x in tensors.items()}


def compressed(bits, form="pack-quantized", **weights):
  """Return a quantization_config with all keys that compressed-tensors 0.20 writes."""
  config = read_data("compressed_tensors_config.json")
  group = config["config_groups"]["group_0"]
  return config | {"format": form, "config_groups": {
    "group_0": group | {"format": form, "weights": group["weights"] | {"num_bits": bits, **weights}}}}


WRITERS = {"awq": awq, "gptq": gptq, "compressed_tensors": compressed_tensors}
CONFIGS = {"awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
           "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}}
# quantization_config, function that writes a matrix, bits, group size (0: all inputs), symmetric
FORMATS: dict[str, tuple[Any, ...]] = {}
for name, (method, fields, bits, *others) in read_data("quantized_formats.json").items():
  config = CONFIGS[method] | fields if method in CONFIGS else compressed(bits, **fields)
  FORMATS[name] = config, WRITERS[method], bits, *others


def quantized_model(folder: Path, name: str, seed: int = 0) -> tuple[Path, Path]:
  """Write a model in this format and the same model in float32. Return both folders."""
  config, write, bits, group, symmetric = FORMATS[name]
  rng = np.random.default_rng(seed)
  plain = random_weights(tiny_config(**SIZES), seed)
  tensors = {key: w for key, w in plain.items() if not is_projection(key)}
  g_idx: dict[int, np.ndarray] = {}   # by number of inputs
  for key in filter(is_projection, plain):
    out, inputs = plain[key].shape
    group_of = np.arange(inputs) // (group or inputs)
    shape = out, group_of[-1] + 1
    q = rng.integers(0, 2**bits, (out, inputs))
    scale = (rng.random(shape) * 0.02 + 0.002).astype(np.float16)
    zero = np.full(shape, 2 ** (bits - 1)) if symmetric else rng.integers(0, 2**bits, shape)
    if config.get("desc_act") or "act-order" in name: group_of = g_idx.setdefault(inputs, rng.permutation(group_of))
    tensors |= write(key.removesuffix(".weight"), q, scale, zero, group_of, bits, config)
    plain[key] = (q - zero[:, group_of]) * scale.astype(np.float32)[:, group_of]
  tiny_model(folder / "float", weights=plain, **SIZES)
  tiny_model(folder / "quantized", **SIZES, quantization_config=config)
  save_file(tensors, folder / "quantized" / "model.safetensors")
  return folder / "quantized", folder / "float"


def open_model(path: Path, dtype: Any = dtypes.float32, count: int = 1, backend: Any = None) -> Any:
  """Open a folder or a GGUF file. Return the checkpoint with its model on `count` devices, without weights."""
  checkpoint = open_checkpoint(path)
  config, model_class = find_model(checkpoint.hf_config, path)
  devices = Devices() if count == 1 else parallel.ShardedDevices(parallel.device_names(count))
  checkpoint.model = model_class(config, dtype, backend or kernels.make_backend(), devices)
  checkpoint.tensors = checkpoint.stored_tensors()
  return checkpoint


def load_model(path: Path, *args: Any, **options: Any) -> Any:
  """Return the model of open_model with its weights."""
  checkpoint = open_model(path, *args, **options)
  checkpoint.load(checkpoint.model)
  return checkpoint.model


class Matrices(FastCheckpoint):
  """A checkpoint that is read without a model, for `count` devices."""
  def __init__(self, folder: Path, count: int = 1):
    super().__init__(folder)
    devices = SimpleNamespace(shards=("CPU",) * count)
    self.model: Any = SimpleNamespace(config=SimpleNamespace(head_dim=16), devices=devices, embed_tokens=None)
    self.dtype, self.tensors = np.float32, self.stored_tensors()
    self.layouts = find_layouts(self.quantization_config)

  def shards(self, axis: int, sources: dict[str, int], inputs: int) -> list[Any]:
    count = len(self.model.devices.shards)
    rows, columns = [(count, 1), (1, count)][axis]
    sources = {name: n // rows for name, n in sources.items()}
    weight = SimpleNamespace(max_numel=lambda: sum(sources.values()) * inputs // columns)
    return self.matrices(SimpleNamespace(axis=axis, sources=sources, out_features=sum(sources.values()), weight=weight))


def check_matrices(folder: Path, expected: dict[str, np.ndarray]) -> Any:
  """Check that the matrices of a layer, fused as in the model, equal those of `expected` by name, but for rounding to
  float16. Return the last one as stored."""
  name = "model.layers.1."
  for fused in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("self_attn.o_proj",),
                ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)):
    parts = {f"{name}{x}": expected[f"{name}{x}.weight"] for x in fused}
    whole = np.concatenate([*parts.values()])
    matrix, = Matrices(folder).shards(0, {module: len(x) for module, x in parts.items()}, whole.shape[1])
    np.testing.assert_allclose(dequantize(matrix, np.float32), whole, rtol=1e-3, atol=1e-6)
  return matrix
