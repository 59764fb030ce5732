"""Quantized weights, w = q * scale + offset in groups of consecutive inputs: int8 and int4 quantized at load; AWQ (Lin
et al. 2023), GPTQ (Frantar et al. 2022) and compressed-tensors; e4m3 and e2m1; bitsandbytes with 4 bits (Dettmers et
al. 2023), which is dequantized."""
import concurrent.futures, functools, json, math, pathlib, typing
from collections.abc import Callable, Sequence

import numpy as np

from tinyvllm.config import JsonObject, check, logger, read_json
from tinyvllm_extra.models.matrices import E2M1, E4M3, SMALL_FLOATS, Matrix, Quantized, is_small_float, narrow

if typing.TYPE_CHECKING: from .weights import FastCheckpoint

GROUP = 32         # inputs that share a scale in weights quantized at load
CHUNK = 2**17      # weights that a thread quantizes at a time: they fit a core's cache


class Layout(typing.NamedTuple):
  """The storage of a quantized matrix: suffixes of its tensors' names, and the packing of consecutive values along one
  axis into 32-bit words."""
  weight: str = "qweight"
  scale: str = "scales"
  zero: str = "qzeros"           # zero point of each group, packed along the outputs
  group: str = "g_idx"           # group of each input
  outputs_first: bool = False    # (out, in), else (in, out)
  packed: int | None = 1         # packed axis of (out, in); None: not packed
  bit_order: Sequence[int] = range(8)   # position in the word of each of eight values
  zero_shift: int = 0            # added to the stored zero points; may carry into the next one


# layouts: arguments of Layout by name. methods: by quant_method, the field of quantization_config that names a variant,
# the supported numbers of bits, and the names of each variant's layouts. The first variant is the default
TABLES = read_json(pathlib.Path(__file__).with_suffix(".json"))


def find_layouts(config: JsonObject) -> list[Layout]:
  """Return the layouts for a quantization_config of config.json. Raises InputError if it is not supported."""
  if not config: return []
  method = TABLES["methods"].get(config.get("quant_method"), {"field": "quant_method", "variants": {}})
  field = "is_marlin_format" if config.get("is_marlin_format") else method["field"]
  variant = str(config.get(field) or next(iter(method["variants"]), None)).lower()
  text = f"is not supported: use another checkpoint of the model; supported: {TABLES['supported']}"
  check(variant in method["variants"], f"quantization_config: {field}={config.get(field)!r} {text}")

  def is_supported(weights, *activations):   # activations may be e4m3 in the tool's kernels: the weights are the same
    if weights.get("type") == "float": return weights.get("num_bits") == 8 and weights.get("strategy") != "group"
    return weights.get("num_bits") in method["bits"] and not any(activations)
  groups = [[group.get(x) or {} for x in ("weights", "input_activations", "output_activations")]
            for group in config.get("config_groups", {}).values()] or [[{"num_bits": config.get("bits")}]]
  supported = all(is_supported(*group) for group in groups) and not config.get("transform_config")
  check(supported, f"quantization_config={config} {text}")
  return [Layout(**TABLES["layouts"][name]) for name in method["variants"][variant]]


def describe(config: JsonObject) -> str:
  """Return method, bits and group size of a quantization_config: "awq int4, groups of 128"."""
  def describe_weights(x):
    if "bnb_4bit_quant_type" in x: return f" {x['bnb_4bit_quant_type']}"
    bits = next((x[name] for name in ("num_bits", "bits", "w_bit") if name in x), None)
    size = x.get("group_size") or 0
    grouping = f"groups of {size}" if size > 0 else f"per {x.get('strategy') or 'channel'}"
    return f" {x.get('type', 'int')}{bits}, {grouping}" if bits else ""
  weights = [group.get("weights") or {} for group in config.get("config_groups", {}).values()] or [config]
  return config["quant_method"] + " and".join(dict.fromkeys(map(describe_weights, weights)))


def to_float32(x: np.ndarray) -> np.ndarray:
  """Decode uint16 as bfloat16, whose bits are the upper half of a float32. Cast other dtypes."""
  return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32, copy=False)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
  """Round float32 to the nearest bfloat16, as uint16; of two equally near ones, to the even one."""
  bits = x.view(np.uint32)
  return (bits + 0x7fff + (bits >> 16 & 1) >> 16).astype(np.uint16)


def unpack_words(words: np.ndarray, bits: int, axis: int, bit_order: Sequence[int], shift: int) -> np.ndarray:
  """Unpack 32-bit words to uint8 values along the axis. 3-bit values may lie in two words. shift: what GPTQ's tools
  subtract from words or 3-bit values."""
  words = np.moveaxis(words.view(np.uint32), axis, -1)
  if shift and bits != 3: words = words + np.uint32(shift * (2**32 - 1) // (2**bits - 1))
  if bits < 4:   # eight values in 2 or 3 bytes
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(*words.shape[:-1], -1, bits)
    words = np.pad(octets, [(0, 0)] * words.ndim + [(0, 4 - bits)]).view(np.uint32)[..., 0]
  shifts = np.array(bit_order[:32 // bits], np.uint32) * bits
  values = words[..., None] >> shifts & (1 << bits) - 1
  if shift and bits == 3: values = values + np.uint32(shift) & 7
  return np.moveaxis(values.astype(np.uint8).reshape(*values.shape[:-2], -1), -1, axis)


# E4M3 or E2M1 in float32
def decode_float(x: np.ndarray) -> np.ndarray: return SMALL_FLOATS[x.dtype][x.view(np.uint8)]


def round_scales(w: Matrix) -> Matrix:
  """Round the scales and offsets of groups to float16, unless they overflow. A scale per output stays."""
  if not isinstance(w, Quantized) or is_small_float(w) or w.scale.shape[1] == 1: return w
  return w._replace(scale=narrow(w.scale, False), offset=None if w.offset is None else narrow(w.offset, False))


def find_packing(source: "FastCheckpoint", name: str, shape: tuple[int, int]) -> tuple[Layout, int, int] | None:
  """Return a stored matrix's layout, with whole names, and its numbers of groups and bits; None if it is not packed.
  Raises InputError for uneven groups, or a number of bits that is not supported."""
  layouts = [x._replace(weight=f"{name}.{x.weight}", scale=f"{name}.{x.scale}", zero=f"{name}.{x.zero}",
                        group=f"{name}.{x.group}") for x in source.layouts]
  stored = source.tensors
  layout = next((x for x in layouts if x.weight in stored and stored[x.weight].dtype.kind == "i"), None)
  if layout is None: return None
  # (out, in) each
  sizes = {x: stored[x].shape[::1 if layout.outputs_first else -1] for x in layout[:2] if x in stored}
  num_groups = (*sizes.get(layout.scale, ())[1:], 1)[0]   # reading it raises if it is missing
  check(shape[1] % num_groups == 0, f"{layout.scale}: {num_groups} groups do not divide {shape[1]} inputs")
  bits = 8 if layout.packed is None else 32 * sizes[layout.weight][layout.packed] // shape[layout.packed]
  weight_shape = [*stored[layout.weight].shape]
  check(bits in (2, 3, 4, 8), f"{layout.weight} has shape {weight_shape}, not 2, 3, 4 or 8 bits of {[*shape]}")
  return layout, num_groups, bits


def read_matrix(source: "FastCheckpoint", name: str, shape: tuple[int, int]) -> Matrix:
  """Read the matrix `name`, (out, in): Quantized if it is stored in one of the source's layouts. Raises InputError
  naming a tensor that is missing or has the wrong shape, or if bits or group size differ from the quantization_config.
  """
  packing = find_packing(source, name, shape)
  if packing is None: return source.array(f"{name}.weight", *shape)
  layout, num_groups, bits = packing

  def read(key: str, *size: int) -> np.ndarray:   # with the outputs first
    return source.array(key, *size) if layout.outputs_first else source.array(key, *size[::-1]).T
  def read_integers(key: str, axis: int | None, *size: int, shift: int = 0) -> np.ndarray:
    if layout.packed is None or axis is None: return read(key, *size)
    words = read(key, *[n * bits // 32 if i == axis else n for i, n in enumerate(size)])
    return unpack_words(words, bits, axis, layout.bit_order, shift)
  q = read_integers(layout.weight, layout.packed, *shape)
  scale = to_float32(read(layout.scale, shape[0], num_groups))
  zeros = np.full((1, 1), 0 if layout.packed is None else 1 << bits - 1)   # symmetric if not stored
  if layout.zero in source.tensors: zeros = read_integers(layout.zero, 0, *scale.shape, shift=layout.zero_shift)
  offset = -to_float32(zeros) * scale
  if bits == 8 and layout.packed is not None:   # 0 to 255 does not fit int8
    q = (q ^ 128).view(np.int8)
    offset = offset + 128 * scale
  in_order = np.arange(shape[1]) // (shape[1] // num_groups)   # group of each column
  index = np.array(source.array(layout.group, shape[1])) if layout.group in source.tensors else in_order
  order = np.argsort(index, kind="stable")   # makes each group consecutive
  check(np.array_equal(index[order], in_order), f"{layout.group}: its {num_groups} groups must have the same size")
  for key, found in (("bits", bits), ("group_size", shape[1] // num_groups)):
    value = source.quantization_config.get(key, found)
    is_same = value == found or key == "group_size" and num_groups == 1 and not 0 < value < shape[1]
    is_same = is_same or "dynamic" in source.quantization_config
    check(is_same, f"quantization_config: {key}={value}, but {layout.weight} has {found}")
  return Quantized(q[:, order], narrow(scale), narrow(offset) if offset.any() else None, order)


# Matrices of other formats than integers with a scale. A reader leaves a matrix without its tensors to read_matrix

# Endings of tensors that are not read: derived from others, or scales of activations and of the KV cache
UNUSED = (".weight_shape", ".input_scale", ".output_scale", ".activation_scale", ".k_scale", ".v_scale")


def read_any(source: "FastCheckpoint", name: str) -> np.ndarray:
  """Read a tensor in its own shape. Raises InputError if it is missing."""
  return source.array(name, *(source.tensors[name].shape if name in source.tensors else ()))


def read_e4m3(source: "FastCheckpoint", name: str, shape: tuple[int, int]) -> Matrix:
  """Read e4m3 with one scale per matrix, output or block. A block's scale is repeated for its outputs. A smaller last
  block makes smaller groups."""
  weight, tensors, config = f"{name}.weight", source.tensors, source.quantization_config
  if weight not in tensors or tensors[weight].dtype != E4M3: return read_matrix(source, name, shape)
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


def read_bitsandbytes(source: "FastCheckpoint", name: str, shape: tuple[int, int]) -> Matrix:
  """Read nf4 or fp4: indices into a table of 16 values, times the maximum of each block of consecutive weights. With
  double quantization these maxima are indices, too. Like bitsandbytes, round to the dtype of the original weights."""
  state = next((x for x in source.tensors if x.startswith(f"{name}.weight.quant_state.")), None)
  if state is None: return read_matrix(source, name, shape)
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
  return weight.astype(config["dtype"]) if config["dtype"] != "bfloat16" else to_bfloat16(weight)


def read_mxfp4(source: "FastCheckpoint", name: str, shape: tuple[int, int]) -> Matrix:
  """Read e2m1 in blocks of 32 along the inputs with a power of two as their scale (OCP Microscaling Formats 1.0)."""
  if f"{name}.blocks" not in source.tensors: return read_matrix(source, name, shape)
  groups = shape[0], shape[1] // 32
  blocks, scales = source.array(f"{name}.blocks", *groups, 16), source.array(f"{name}.scales", *groups)
  q = np.stack([blocks & 15, blocks >> 4], -1).reshape(shape).view(E2M1)
  return Quantized(q, np.ldexp(np.float32(1), scales.astype(np.int32) - 127), None, np.arange(shape[1]))


# By quant_method
READERS = {"fp8": read_e4m3, "compressed-tensors": read_e4m3, "bitsandbytes": read_bitsandbytes, "mxfp4": read_mxfp4}


# Operations on matrices

def map_rows(function: Callable[[np.ndarray], np.ndarray], w: Matrix) -> Matrix:
  """Apply a function to a matrix, or to q, scale and offset of a quantized one."""
  if isinstance(w, np.ndarray): return function(w)
  return w._replace(q=function(w.q), scale=function(w.scale), offset=None if w.offset is None else function(w.offset))


def dequantize(w: Matrix, dtype: type[np.floating] = np.float16) -> np.ndarray:
  """Return the matrix, (out, in), in `dtype` if it was quantized."""
  if isinstance(w, np.ndarray): return w
  q = decode_float(w.q) if is_small_float(w) else w.q
  by_group = q.reshape(*w.scale.shape, -1) * w.scale[..., None].astype(np.float32)
  if w.offset is not None: by_group += w.offset[..., None]
  weight = by_group.reshape(w.q.shape).astype(dtype, copy=False)
  return weight[:, np.argsort(w.order)] if (np.diff(w.order) != 1).any() else weight   # a copy takes most of the time


def stack(matrices: Sequence[Matrix]) -> Matrix:
  """Stack the rows of matrices with the same quantization or, in float32 if their dtypes differ, of arrays."""
  if len(matrices) == 1: return matrices[0]
  arrays = [x for x in matrices if isinstance(x, np.ndarray)]
  quantized = [x for x in matrices if isinstance(x, Quantized)]
  is_alike = len({(x.q.dtype, x.scale.shape[1], x.order.tobytes()) for x in quantized}) + bool(arrays) == 1
  check(is_alike, "quantization_config: q, k and v of a layer, or gate and up, are not quantized alike: quantize them "
        "together")
  if arrays: return np.concatenate([to_float32(x) for x in arrays] if len({x.dtype for x in arrays}) > 1 else arrays)
  has_offset = any(x.offset is not None for x in quantized)
  offsets = [np.zeros_like(x.scale) if x.offset is None else x.offset for x in quantized if has_offset]
  return Quantized(np.concatenate([x.q for x in quantized]), np.concatenate([x.scale for x in quantized]),
                   np.concatenate(offsets) if has_offset else None, quantized[0].order)


def pad_rows(w: Matrix, count: int) -> Matrix:
  """Append rows of zeros to a matrix until there are `count`."""
  return map_rows(lambda x: x if len(x) == count else np.pad(x, ((0, count - len(x)), (0, 0))), w)


def split(w: Matrix, count: int, axis: int, dtype: type[np.floating] = np.float16) -> list[Matrix]:
  """Return equal shards by outputs (axis 0) or inputs (1). The latter are dequantized if the inputs are reordered, or
  if a shard ends within a group or, in int4, within a word of eight."""
  if axis == 1 and count > 1 and isinstance(w, Quantized):
    groups = w.scale.shape[1]
    splits_group = groups > 1 and groups % count or w.q.dtype == np.uint8 and len(w.order) // count % 8
    if splits_group or (np.diff(w.order) != 1).any():
      logger.warning("a matrix is dequantized: tensor_parallel_size=%d cannot split its groups", count)
      w = dequantize(w, dtype)
    else: w = w._replace(order=np.arange(len(w.order) // count))
  def shard(x: np.ndarray, i: int) -> np.ndarray:   # all inputs may share a scale
    return x if axis == 1 and x.shape[1] == 1 else np.split(x, count, axis)[i]
  return [map_rows(functools.partial(shard, i=i), w) for i in range(count)]


def quantize(weight: np.ndarray, bits: int) -> Matrix:
  """Quantize a matrix, (out, in). int8: symmetric. int4: scale and offset minimize the squared error."""
  rows = max(1, CHUNK // weight.shape[1])
  chunks = [weight[i:i + rows] for i in range(0, len(weight), rows)]
  with concurrent.futures.ThreadPoolExecutor() as pool:
    return stack([*pool.map(lambda chunk: quantize_rows(chunk, bits), chunks)])


def quantize_rows(weight: np.ndarray, bits: int) -> Quantized:
  groups = weight.shape[1] // GROUP if weight.shape[1] % GROUP == 0 else 1
  w = to_float32(weight).reshape(len(weight), groups, -1)   # (out, groups, group size)
  lowest, highest = (0, 15) if bits == 4 else (-127, 127)
  offset = w.min(-1) if bits == 4 else np.zeros(w.shape[:2], np.float32)
  scale = (w.max(-1) - offset) / 15 if bits == 4 else np.abs(w).max(-1) / 127

  def quantized_values():
      return np.clip(np.rint((w - offset[..., None]) / np.where(scale == 0, 1, scale)[..., None]), lowest, highest)
  for _ in range(4 if bits == 4 else 0):   # alternate: round q, then fit scale and offset by least squares
    q = quantized_values()
    centered = q - q.mean(-1, keepdims=True)
    scale = (centered * w).sum(-1) / np.maximum((centered * centered).sum(-1), 1e-9)
    offset = w.mean(-1) - scale * q.mean(-1)
  scale = scale.astype(np.float16)
  offset = offset.astype(np.float16)
  q = quantized_values().astype(np.uint8 if bits == 4 else np.int8).reshape(weight.shape)
  return Quantized(q, scale, offset if bits == 4 else None, np.arange(weight.shape[1]))
