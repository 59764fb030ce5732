"""int8, int4 and e4m3 weights, w = q * scale + offset in groups of consecutive inputs: quantized at load, or
pre-quantized by AWQ (Lin et al. 2023), GPTQ (Frantar et al. 2022) or compressed-tensors. Depends only on numpy."""
import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tinyvllm.config import check, logger
from tinyvllm_extra.kernels.quantized import E2M1, E2M1_VALUES, Matrix, Quantized, is_small_float, narrow

GROUP = 32         # inputs that share a scale in weights quantized at load
CHUNK = 2**17      # weights that a thread quantizes at a time: they fit a core's cache


class Layout(NamedTuple):
  """The storage of a quantized matrix: suffixes of its tensors' names, and the packing of consecutive values along one
  axis into 32-bit words."""
  weight: str = "qweight"
  scale: str = "scales"
  zero: str = "qzeros"           # zero point of each group, packed along the outputs
  group: str = "g_idx"           # group of each input
  outputs_first: bool = False    # (out, in), else (in, out)
  packed: str | None = "in"      # packed axis; None: not packed
  bit_order: tuple = tuple(range(8))   # position in the word of each of eight values
  zero_shift: int = 0            # added to the stored zero points; may carry into the next one


COMPRESSED = [Layout("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", True),
              Layout("weight", "weight_scale", "weight_zero_point", "weight_g_idx", True, None)]
# By quant_method and variant. VARIANTS: the field that names the variant; default: the first one
LAYOUTS: dict[str, dict[str, list[Layout]]] = {
  "awq": {"gemm": [Layout(packed="out", bit_order=(0, 4, 1, 5, 2, 6, 3, 7))]},
  "gptq": {"gptq": [Layout(zero_shift=1)], "gptq_v2": [Layout()]},
  "compressed-tensors": dict.fromkeys(("pack-quantized", "int-quantized", "float-quantized", "mixed-precision"),
                                      COMPRESSED),
  "fp8": {"e4m3": []}, "bitsandbytes": {"false": []}, "mxfp4": {"mxfp4": []},
  "squeezellm": {"4": [], "3": []}}   # see float_formats.py
VARIANTS = {"awq": "version", "gptq": "checkpoint_format", "compressed-tensors": "format", "fp8": "fmt",
            "bitsandbytes": "load_in_8bit", "squeezellm": "wbits"}
BITS = {"awq": (4,), "gptq": (2, 3, 4, 8), "compressed-tensors": (4, 8)}
SUPPORTED = ("awq (gemm, int4), gptq (2, 3, 4 or 8 bits), compressed-tensors (weights only, pack-quantized int4 or "
             "int8, int-quantized, or float-quantized), fp8 (e4m3), bitsandbytes (4 bits), squeezellm (3 or 4 bits)")


def find_layouts(config: dict[str, Any]) -> list[Layout]:
  """Return the layouts for a quantization_config of config.json. Raises InputError if it is not supported."""
  if not config: return []
  method = config.get("quant_method", "")
  layouts = LAYOUTS.get(method, {})
  field = "is_marlin_format" if config.get("is_marlin_format") else VARIANTS.get(method, "quant_method")
  variant = str(config.get(field) or next(iter(layouts), None)).lower()
  text = f"is not supported: use another checkpoint of the model; supported: {SUPPORTED}"
  check(variant in layouts, f"quantization_config: {field}={config.get(field)!r} {text}")

  def is_supported(weights, *activations):   # activations may be e4m3 in the tool's kernels: the weights are the same
    if weights.get("type") == "float": return weights.get("num_bits") == 8 and weights.get("strategy") != "group"
    return weights.get("num_bits") in BITS.get(method, (None,)) and not any(activations)
  groups = [[group.get(x) or {} for x in ("weights", "input_activations", "output_activations")]
            for group in config.get("config_groups", {}).values()] or [[{"num_bits": config.get("bits")}]]
  supported = all(is_supported(*group) for group in groups) and not config.get("transform_config")
  check(supported, f"quantization_config={config} {text}")
  return layouts[variant]


def describe(config: dict[str, Any]) -> str:
  """Return method, bits and group size of a quantization_config: "awq int4, groups of 128"."""
  def describe_weights(x):
    if "bnb_4bit_quant_type" in x: return f" {x['bnb_4bit_quant_type']}"
    bits = next((x[name] for name in ("num_bits", "bits", "w_bit", "wbits") if name in x), None)
    size = x.get("group_size") or 0
    grouping = f"groups of {size}" if size > 0 else f"per {x.get('strategy') or 'channel'}"
    return f" {x.get('type', 'int')}{bits}, {grouping}" if bits else ""
  weights = [group.get("weights") or {} for group in config.get("config_groups", {}).values()] or [config]
  return config["quant_method"] + " and".join(dict.fromkeys(map(describe_weights, weights)))


def to_float32(x: np.ndarray) -> np.ndarray:
  """Decode uint16 as bfloat16, whose bits are the upper half of a float32. Cast other dtypes."""
  return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32, copy=False)


def unpack_words(words: np.ndarray, bits: int, axis: int, bit_order: tuple = tuple(range(8))) -> np.ndarray:
  """Unpack 32-bit words to uint8 values along the axis. 3-bit values may lie in two words."""
  words = np.moveaxis(words.view(np.uint32), axis, -1)
  if bits < 4:   # eight values in 2 or 3 bytes
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape[:-1], -1, bits)
    words = np.pad(octets, [(0, 0)] * words.ndim + [(0, 4 - bits)]).view(np.uint32)[..., 0]
  shifts = np.array(bit_order[:32 // bits], np.uint32) * bits
  values = words[..., None] >> shifts & (1 << bits) - 1
  return np.moveaxis(values.astype(np.uint8).reshape(*values.shape[:-2], -1), -1, axis)


def decode_float(x: np.ndarray) -> np.ndarray:
  """Decode E2M1, or 8-bit floats with 4 bits of exponent and 3 of mantissa (Micikevicius et al. 2022), to float32."""
  if x.dtype == E2M1: return np.concatenate([E2M1_VALUES, -E2M1_VALUES])[x.view(np.uint8)]
  codes = np.arange(128)
  exponent, mantissa = np.maximum(codes >> 3, 1), (codes & 7) + 8 * (codes > 7)   # 0 to 7 are subnormal
  values = np.where(codes < 127, np.ldexp(mantissa.astype(np.float32), exponent - 10), np.float32(np.nan))
  return np.concatenate([values, -values])[x.view(np.uint8)]


def round_scales(w: Matrix) -> Matrix:
  """Round the scales and offsets of groups to float16, unless they overflow. A scale per output stays."""
  if not isinstance(w, Quantized) or is_small_float(w) or w.scale.shape[1] == 1: return w
  return w._replace(scale=narrow(w.scale, False), offset=None if w.offset is None else narrow(w.offset, False))


def read_matrix(name: str, shape: tuple[int, int], layouts: list[Layout], tensors: dict[str, Any],
                read: Callable[..., np.ndarray], config: dict[str, Any] | None = None) -> Matrix:
  """Read the matrix `name`, (out, in): Quantized if it is stored in one of the layouts. read: returns the tensor with a
  name and a shape. Raises InputError naming a tensor that is missing or has the wrong shape, or uneven groups, or whose
  bits or group size differ from `config`, the quantization_config."""
  integers = [x for x in tensors if x.startswith(f"{name}.") and np.dtype(tensors[x].dtype).kind == "i"]
  layout = next((x for x in layouts if f"{name}.{x.weight}" in integers), None)
  if layout is None: return read(f"{name}.weight", *shape)

  def stored(*sizes): return sizes if layout.outputs_first else sizes[::-1]
  def shape_of(name): return tensors[name].shape if name in tensors else ()
  out_features, in_features = shape
  outputs, inputs = stored(0, 1)
  weight, scale, zero, order = [f"{name}.{x}" for x in (layout.weight, layout.scale, layout.zero, layout.group)]
  groups = dict(enumerate(shape_of(scale))).get(inputs, 1)   # `read` raises if it is missing
  check(in_features % groups == 0, f"{scale}: {groups} groups do not divide {in_features} inputs")
  axis = {"in": inputs, "out": outputs, None: 0}[layout.packed]
  bits = 32 * shape_of(weight)[axis] // stored(*shape)[axis] if layout.packed else 8
  check(bits in (2, 3, 4, 8), f"{weight} has shape {list(shape_of(weight))}, not 2, 3, 4 or 8 bits of {[*shape]}")

  def read_packed(name: str, axis: int, *sizes, shift: int = 0):   # GPTQ's tools add shift to words, or to 3-bit values
    words = read(name, *[n * bits // 32 if layout.packed and i == axis else n for i, n in enumerate(stored(*sizes))])
    if not layout.packed: return words
    if shift and bits != 3: words = words.view(np.uint32) + np.uint32(shift * (2**32 - 1) // (2**bits - 1))
    values = unpack_words(words, bits, axis, layout.bit_order)
    return values + np.uint8(shift) & 7 if shift and bits == 3 else values
  q = read_packed(weight, axis, *shape)
  scales = to_float32(read(scale, *stored(out_features, groups)))
  zeros: Any = 1 << bits - 1 if layout.packed else 0   # symmetric if not stored
  if zero in tensors: zeros = to_float32(read_packed(zero, outputs, out_features, groups, shift=layout.zero_shift))
  offset = -zeros * scales
  if bits == 8 and layout.packed:   # 0 to 255 does not fit int8
    q = (q ^ 128).view(np.int8)
    offset = offset + 128 * scales
  if f"{name}.weight_offset" in tensors: offset = to_float32(read(f"{name}.weight_offset", out_features, groups))
  q, scales, offset = [x if layout.outputs_first else x.T for x in (q, scales, offset)]
  in_order = np.arange(in_features) // (in_features // groups)
  index = np.array(read(order, in_features)) if order in tensors else in_order
  columns = np.argsort(index, kind="stable")
  check(np.array_equal(index[columns], in_order), f"{order}: its {groups} groups must have the same size")
  size = in_features // groups
  for field, actual in (("bits", bits), ("group_size", size)):
    value = (config or {}).get(field, actual)
    is_same = value == actual or field == "group_size" and groups == 1 and not 0 < value < in_features
    check(is_same or "dynamic" in (config or {}), f"quantization_config: {field}={value}, but {weight} has {actual}")
  return Quantized(q[:, columns], narrow(scales), narrow(offset) if offset.any() else None, columns)


def dequantize(w: Matrix, dtype: Any = np.float16) -> np.ndarray:
  """Return the matrix, (out, in), in `dtype` if it was quantized."""
  if isinstance(w, np.ndarray): return w
  q = decode_float(w.q) if is_small_float(w) else w.q
  by_group = q.reshape(*w.scale.shape, -1) * w.scale[..., None].astype(np.float32)
  if w.offset is not None: by_group += w.offset[..., None]
  weight = by_group.reshape(w.q.shape).astype(dtype, copy=False)
  return weight[:, np.argsort(w.order)] if (np.diff(w.order) != 1).any() else weight   # a copy takes most of the time


def concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
  """Stack the rows of arrays, in float32 if their dtypes differ."""
  mixed = len({x.dtype for x in arrays}) > 1
  return np.concatenate([to_float32(x) for x in arrays] if mixed else arrays)


def stack(matrices: Sequence[Matrix]) -> Matrix:
  """Stack the rows of matrices with the same quantization, or none."""
  if len(matrices) == 1: return matrices[0]
  arrays = [x for x in matrices if isinstance(x, np.ndarray)]
  quantized = [x for x in matrices if isinstance(x, Quantized)]
  if not quantized: return concatenate(arrays)
  formats = {(x.q.dtype, x.scale.shape[1], x.order.tobytes()) for x in quantized}
  check(not arrays and len(formats) == 1,
        "quantization_config: q, k and v of a layer, or gate and up, are not quantized alike: quantize them together")
  if any(x.offset is not None for x in quantized):
    quantized = [x._replace(offset=np.zeros_like(x.scale) if x.offset is None else x.offset) for x in quantized]
  q, scale, offset, _ = [None if term[0] is None else np.concatenate(term) for term in zip(*quantized, strict=True)]
  return Quantized(q, scale, offset, quantized[0].order)   # type: ignore[arg-type]   # q and scale are arrays


def pad_rows(w: Any, count: int) -> Any:
  """Append rows of zeros to a Matrix or a part of it until there are `count`."""
  if isinstance(w, Quantized): return Quantized._make([*[pad_rows(x, count) for x in w[:3]], w.order])
  return w if w is None or len(w) == count else np.pad(w, ((0, count - len(w)), (0, 0)))


def split(w: Matrix, count: int, axis: int, dtype: Any = np.float16) -> list[Matrix]:
  """Return equal shards by outputs (axis 0) or inputs (1). The latter are dequantized if the inputs are reordered, or
  if a shard ends within a group or, in int4, within a word of eight."""
  if count == 1: return [w]
  if isinstance(w, np.ndarray): return [*np.split(w, count, axis)]
  groups = w.scale.shape[1]
  splits_group = groups > 1 and groups % count or w.q.dtype == np.uint8 and len(w.order) // count % 8
  if axis == 1 and ((np.diff(w.order) != 1).any() or splits_group):
    logger.warning("a matrix is dequantized: tensor_parallel_size=%d cannot split its groups", count)
    return [*np.split(dequantize(w, dtype), count, 1)]
  def split_array(x):
    if x is None or axis == 1 and x.shape[1] == 1: return [x] * count
    return np.split(x, count, axis)
  shards = zip(split_array(w.q), split_array(w.scale), split_array(w.offset), strict=True)
  return [Quantized(*shard, np.arange(shard[0].shape[1]) if axis == 1 else w.order) for shard in shards]


def quantize(weight: np.ndarray, bits: int) -> Quantized:
  """Quantize a matrix, (out, in). int8: symmetric. int4: scale and offset minimize the squared error."""
  rows = max(1, CHUNK // weight.shape[1])
  chunks = [weight[i:i + rows] for i in range(0, len(weight), rows)]
  with concurrent.futures.ThreadPoolExecutor() as pool:
    return stack([*pool.map(lambda chunk: quantize_rows(chunk, bits), chunks)])   # type: ignore[return-value]


def quantize_rows(weight: np.ndarray, bits: int) -> Quantized:
  groups = weight.shape[1] // GROUP if weight.shape[1] % GROUP == 0 else 1
  w = to_float32(weight).reshape(len(weight), groups, -1)   # (out, groups, group size)
  lowest, highest = (0, 15) if bits == 4 else (-127, 127)
  offset = w.min(-1) if bits == 4 else np.zeros(w.shape[:2], np.float32)
  scale = (w.max(-1) - offset) / 15 if bits == 4 else np.abs(w).max(-1) / 127

  def quantized_values():
    step = np.where(scale == 0, 1, scale)
    return np.clip(np.rint((w - offset[..., None]) / step[..., None]), lowest, highest)
  for _ in range(4 if bits == 4 else 0):   # alternate: round q, then fit scale and offset by least squares
    q = quantized_values()
    centered = q - q.mean(-1, keepdims=True)
    scale = (centered * w).sum(-1) / np.maximum((centered * centered).sum(-1), 1e-9)
    offset = w.mean(-1) - scale * q.mean(-1)
  scale = scale.astype(np.float16)
  offset = offset.astype(np.float16)
  q = quantized_values().astype(np.uint8 if bits == 4 else np.int8).reshape(weight.shape)
  return Quantized(q, scale, offset if bits == 4 else None, np.arange(weight.shape[1]))
