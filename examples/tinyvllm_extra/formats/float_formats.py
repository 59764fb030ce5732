"""Reads matrices of published formats that are not integers with a scale: floats (e4m3, e2m1) and bitsandbytes with 4
bits (Dettmers et al. 2023). A reader returns None for a matrix without its tensors."""
import json, math
from collections.abc import Callable

import numpy as np

from tinyvllm.config import check
from tinyvllm_extra.models.quantized import E2M1, E4M3, Matrix, Quantized, narrow

from .quantization import TensorSource, to_float32

# Endings of tensors that are not read: derived from others, or scales of activations and of the KV cache
UNUSED = (".weight_shape", ".input_scale", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")


def read_any(source: TensorSource, name: str) -> np.ndarray:
  """Read a tensor in its own shape. Raises InputError if it is missing."""
  return source.array(name, *(source.unread[name].shape if name in source.unread else ()))


def read_e4m3(source: TensorSource, name: str, shape: tuple[int, int]) -> Matrix | None:
  """Read e4m3 with one scale per matrix, output or block. A block's scale is repeated for its outputs. A smaller last
  block makes smaller groups."""
  weight, tensors, config = f"{name}.weight", source.unread, source.quantization_config
  if weight not in tensors or tensors[weight].dtype != E4M3: return None
  key = next((x for x in (f"{weight}_scale_inv", f"{weight}_scale") if x in tensors), f"{weight}_scale")
  scale = np.atleast_1d(to_float32(read_any(source, key)))   # a factor, in spite of the name weight_scale_inv
  scale = scale.reshape(len(scale), -1)
  blocks = [group["weights"].get("block_structure") for group in config.get("config_groups", {}).values()]
  blocks += [config.get("weight_block_size"), (1, shape[1]), shape]
  grids = {(-(-shape[0] // rows), -(-shape[1] // columns)): (rows, columns) for rows, columns in filter(None, blocks)}
  check(scale.shape in grids, f"{key} has shape {scale.shape}, not {' or '.join(map(str, grids))}: download it again")
  rows, columns = grids[scale.shape]
  group = math.gcd(shape[1], columns)
  scale = scale.repeat(rows, 0)[:shape[0]].repeat(columns // group, 1)[:, :shape[1] // group]
  return Quantized(source.array(weight, *shape), narrow(scale), None, np.arange(shape[1]))


def read_bitsandbytes(source: TensorSource, name: str, shape: tuple[int, int]) -> Matrix | None:
  """Read nf4 or fp4: indices into a table of 16 values, times the maximum of each block of consecutive weights. With
  double quantization these maxima are indices, too. Like bitsandbytes, round to the dtype of the original weights."""
  state = next((x for x in source.unread if x.startswith(f"{name}.weight.quant_state.")), None)
  if state is None: return None
  def read(suffix): return read_any(source, f"{name}.weight{suffix}").ravel()
  config = json.loads(read_any(source, state).tobytes())
  q, scale, table = read("").view(np.uint8), read(".absmax"), source.array(f"{name}.weight.quant_map", 16)
  if "nested_offset" in config:
    nested = read(".nested_absmax").repeat(config["nested_blocksize"])[:len(scale)]
    scale = read(".nested_quant_map")[scale] * nested + np.float32(config["nested_offset"])
  scale = scale.repeat(config["blocksize"])[:2 * len(q)]
  check(len(scale) == 2 * len(q) == math.prod(shape),
        f"{name}.weight has {2 * len(q)} weights and scales for {len(scale)}, not {[*shape]}: download it again")
  pairs = np.stack([table.repeat(16), np.tile(table, 16)], 1).view(np.uint64)[:, 0]   # by byte, its upper bits first
  weight = (pairs[q].view(np.float32) * scale).reshape(shape)
  if config["dtype"] != "bfloat16": return weight.astype(config["dtype"])
  bits = weight.view(np.uint32)
  return (bits + 0x7fff + (bits >> 16 & 1) >> 16).astype(np.uint16)   # to nearest, ties to even


def read_stacked(source: TensorSource, name: str, shape: tuple[int, int]) -> Matrix | None:
  """Read matrices of all experts, (experts, in, out), as one with stacked rows."""
  stored = source.unread.get(f"{name}.weight")
  if stored is None or len(stored.shape) != 3 or ".experts." not in name: return None
  count = stored.shape[0]
  weight = source.array(f"{name}.weight", count, shape[1], shape[0] // count)
  return np.ascontiguousarray(weight.swapaxes(1, 2)).reshape(shape)


def read_mxfp4(source: TensorSource, name: str, shape: tuple[int, int]) -> Matrix | None:
  """Read e2m1 in blocks of 32 along the inputs with a power of two as their scale (OCP Microscaling Formats 1.0)."""
  stored = source.unread.get(f"{name}.blocks")
  if stored is None: return read_stacked(source, name, shape)
  count, groups = stored.shape[0], shape[1] // 32
  sizes = count, shape[0] // count, groups
  blocks, scales = source.array(f"{name}.blocks", *sizes, 16), source.array(f"{name}.scales", *sizes)
  q = np.stack([blocks & 15, blocks >> 4], -1).reshape(shape).view(E2M1)
  scale = np.ldexp(np.float32(1), scales.astype(np.int32) - 127).reshape(shape[0], groups)
  return Quantized(q, scale, None, np.arange(shape[1]))


READERS: dict[str | None, Callable[[TensorSource, str, tuple[int, int]], Matrix | None]] = {   # by quant_method
  "fp8": read_e4m3, "compressed-tensors": read_e4m3, "bitsandbytes": read_bitsandbytes, "mxfp4": read_mxfp4}
