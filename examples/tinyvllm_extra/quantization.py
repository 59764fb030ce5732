"""Weights of 8 and 4 bits, w = q * scale + offset by groups of neighbouring inputs: made of any model while it loads,
or read as they were published by AWQ (Lin et al. 2023), GPTQ (Frantar et al. 2022) and compressed-tensors."""
import concurrent.futures, pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tinyvllm.config import check, logger
from tinyvllm.llama import Llama
from tinyvllm.weights import floats
from tinyvllm_extra.kernels.matmul import Linear, pack

GROUP = 32   # inputs that share a scale, where it is made here
PART = 2**17   # numbers that a thread quantizes at once: so many stay in a core's cache


class Quantized(NamedTuple):
  """Of a matrix. Groups are equal parts of the inputs."""
  q: np.ndarray               # (out, in): int8, or uint8 from 0 to 15
  scale: np.ndarray           # (out, groups)
  offset: np.ndarray | None   # (out, groups); None: zeros
  order: np.ndarray           # (in,): the input that each column is for


class Layout(NamedTuple):
  """How files hold a matrix: words of 32 bits with neighbours of one axis, or a number by itself."""
  weight: str = "qweight"        # what follows the matrix's name
  scale: str = "scales"
  zero: str = "qzeros"           # of a scale, in words of neighbouring outputs: what q is when w is 0
  group: str = "g_idx"           # of each input
  outputs_first: bool = False    # (out, in), else (in, out)
  packed: str | None = "in"      # the axis that words are of
  places: tuple = tuple(range(8))   # of neighbours, in a word of eight
  zero_is: int = 0               # more than the file says


LAYOUTS = {
  "awq": [Layout(packed="out", places=(0, 4, 1, 5, 2, 6, 3, 7))], "gptq": [Layout(zero_is=1)],
  "compressed-tensors": [Layout("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", True),
                         Layout("weight", "weight_scale", "weight_zero_point", "weight_g_idx", True, None)]}
KNOWN = ("awq (gemm, 4 bits), gptq (4 or 8 bits), compressed-tensors (weights alone, pack-quantized of 4 or 8 bits or "
         "int-quantized)")


def layouts_of(config: dict[str, Any]) -> list[Layout]:
  """Those that a model's quantization_config stands for. Raises ValueError for others than are read."""
  if not config: return []
  method = config.get("quant_method", "")
  groups = config.get("config_groups", {}).values()
  kinds = [group.get("weights") or {} for group in groups] or [{"num_bits": config.get("bits")}]
  bits = (4,) if method == "awq" else (4, 8)
  known = (method in LAYOUTS and config.get("version", "gemm").lower() == "gemm"
           and all(kind.get("num_bits") in bits and kind.get("type", "int") == "int" for kind in kinds)
           and not any(group.get("input_activations") or group.get("output_activations") for group in groups))
  check(known, f"quantization_config={config} is not supported; supported: {KNOWN}")
  if config.get("checkpoint_format") == "gptq_v2": return [Layout()]
  return LAYOUTS[method]


def unpacked(words: np.ndarray, bits: int, axis: int, places: tuple) -> np.ndarray:
  """The numbers in words of 32 bits, in their order along the axis, as uint8."""
  shifts = np.array(places[:32 // bits], np.uint32) * bits
  numbers = np.moveaxis(words.view(np.uint32), axis, -1)[..., None] >> shifts & (1 << bits) - 1
  return np.moveaxis(numbers.astype(np.uint8).reshape(*numbers.shape[:-2], -1), -1, axis)


def narrow(x: np.ndarray) -> np.ndarray:
  """In 16 bits, where those hold it."""
  with np.errstate(over="ignore"): half = x.astype(np.float16)
  return half if np.array_equal(half, x) else x


def read(name: str, shape: tuple[int, int], layouts: list[Layout], maps: dict[str, Any], take: Callable) -> Any:
  """A matrix of this shape, (out, in), Quantized if it is in one of these layouts. maps: of the files' tensors. take:
  reads the tensor of a name and shape. Raises ValueError naming the tensor that is missing or misshapen, or whose
  groups are not of one size."""
  shapes = {x: entry[-1] for x, entry in maps.items() if x.startswith(f"{name}.")}
  integers = [x for x in shapes if np.dtype(maps[x][1]).kind == "i"]
  layout = next((x for x in layouts if f"{name}.{x.weight}" in integers), None)
  if layout is None: return take(f"{name}.weight", *shape)

  def sized(*sizes): return sizes if layout.outputs_first else sizes[::-1]
  out_features, in_features = shape
  outputs, inputs = (0, 1) if layout.outputs_first else (1, 0)
  weight, scale, zero, order = [f"{name}.{x}" for x in (layout.weight, layout.scale, layout.zero, layout.group)]
  groups = dict(enumerate(shapes.get(scale, ()))).get(inputs, 1)   # missing: to take it says so
  check(in_features % groups == 0, f"{scale}: {groups} groups do not divide {in_features} inputs")
  axis = {"in": inputs, "out": outputs, None: 0}[layout.packed]
  bits = 8 if layout.packed is None else 32 * shapes[weight][axis] // sized(*shape)[axis]
  check(bits in (4, 8), f"{weight} is {list(shapes[weight])}: neither 4 nor 8 bits of {[*shape]}")

  def words(of: str, axis: int, *sizes):
    stored = take(of, *[n * bits // 32 if layout.packed and i == axis else n for i, n in enumerate(sized(*sizes))])
    return stored if layout.packed is None else unpacked(stored, bits, axis, layout.places)
  q = words(weight, axis, *shape)
  scales = floats(take(scale, *sized(out_features, groups)))
  zeros: Any = 0 if layout.packed is None else 1 << bits - 1   # where the file has none
  if zero in shapes: zeros = words(zero, outputs, out_features, groups) + np.float32(layout.zero_is)
  offset = -zeros * scales
  if bits == 8 and layout.packed:   # from 0 to 255, which int8 does not hold
    q = (q ^ 128).view(np.int8)
    offset = offset + 128 * scales
  if f"{name}.weight_offset" in shapes: offset = floats(take(f"{name}.weight_offset", out_features, groups))
  q, scales, offset = [x if layout.outputs_first else x.T for x in (q, scales, offset)]
  in_order = np.arange(in_features) // (in_features // groups)
  index = np.array(take(order, in_features)) if order in shapes else in_order
  columns = np.argsort(index, kind="stable")
  check(np.array_equal(index[columns], in_order), f"{order}: its {groups} groups must be of one size")
  return Quantized(q[:, columns], narrow(scales), narrow(offset) if offset.any() else None, columns)


def dequantized(w: Any) -> np.ndarray:
  """The matrix, (out, in), in 16 bits, if it was quantized."""
  if isinstance(w, np.ndarray): return w
  by_group = w.q.reshape(*w.scale.shape, -1) * w.scale[..., None].astype(np.float32)
  if w.offset is not None: by_group += w.offset[..., None]
  return by_group.reshape(w.q.shape)[:, np.argsort(w.order)].astype(np.float16)


def joined(matrices: Sequence[Any]) -> Any:
  """Matrices below each other, all quantized in the same way or none."""
  if len(matrices) == 1: return matrices[0]
  if not any(isinstance(x, Quantized) for x in matrices): return np.concatenate(matrices)
  kinds = {isinstance(x, Quantized) and (x.q.dtype, x.scale.shape[1], x.order.tobytes()) for x in matrices}
  check(len(kinds) == 1, "quantization_config: q, k and v of a layer, or gate and up, are not quantized alike")
  if any(x.offset is not None for x in matrices):
    matrices = [x._replace(offset=np.zeros_like(x.scale) if x.offset is None else x.offset) for x in matrices]
  q, scale, offset, _ = [None if parts[0] is None else np.concatenate(parts) for parts in zip(*matrices, strict=True)]
  return Quantized(q, scale, offset, matrices[0].order)   # type: ignore[arg-type]


def split(w: Any, count: int, axis: int) -> list[Any]:
  """Equal parts by outputs (axis 0) or by inputs (1); these in 16 bits where inputs are in another order, or a part's
  end is within a group or, of 4 bits, a word of eight."""
  if count == 1: return [w]
  if isinstance(w, np.ndarray): return np.split(w, count, axis)
  groups = w.scale.shape[1]
  within = groups > 1 and groups % count or w.q.dtype == np.uint8 and len(w.order) // count % 8
  if axis == 1 and ((np.diff(w.order) != 1).any() or within):
    logger.warning("a matrix stays in 16 bits: its groups cannot be split by tensor_parallel_size=%d", count)
    return np.split(dequantized(w), count, 1)
  def cut(x):
    if x is None or axis == 1 and x.shape[1] == 1: return [x] * count
    return np.split(x, count, axis)
  parts = zip(cut(w.q), cut(w.scale), cut(w.offset), strict=True)
  return [Quantized(*part, np.arange(part[0].shape[1]) if axis == 1 else w.order) for part in parts]


def quantize(weight: np.ndarray, bits: int) -> Quantized:
  """A matrix, (out, in), by groups of inputs. 8 bits: symmetric. 4 bits: scale and offset of least squared error."""
  rows = max(1, PART // weight.shape[1])
  parts = [weight[i:i + rows] for i in range(0, len(weight), rows)]
  with concurrent.futures.ThreadPoolExecutor() as pool:
    return joined([*pool.map(lambda part: quantize_part(part, bits), parts)])


def quantize_part(weight: np.ndarray, bits: int) -> Quantized:
  """As `quantize`, of some rows."""
  groups = weight.shape[1] // GROUP if weight.shape[1] % GROUP == 0 else 1
  w = floats(weight).reshape(len(weight), groups, -1)   # (out, groups, in a group)
  lowest, highest = (0, 15) if bits == 4 else (-127, 127)
  offset = w.min(-1) if bits == 4 else np.zeros(w.shape[:2], np.float32)
  scale = (w.max(-1) - offset) / 15 if bits == 4 else np.abs(w).max(-1) / 127

  def rounded():
    step = np.where(scale == 0, 1, scale)
    return np.clip(np.rint((w - offset[..., None]) / step[..., None]), lowest, highest)
  for _ in range(4 if bits == 4 else 0):   # q for these scales and offsets, these for that q, and so on
    q = rounded()
    apart = q - q.mean(-1, keepdims=True)
    scale = (apart * w).sum(-1) / np.maximum((apart * apart).sum(-1), 1e-9)
    offset = w.mean(-1) - scale * q.mean(-1)
  scale, offset = [x.astype(np.float16) for x in (scale, offset)]
  q = rounded().astype(np.uint8 if bits == 4 else np.int8).reshape(weight.shape)
  return Quantized(q, scale, offset if bits == 4 else None, np.arange(weight.shape[1]))


def scales_shape(stored: tuple[int, ...], groups: int) -> tuple[int, ...]:
  """Of a quantized W's scales, where W has this stored shape: by tiles, and (…, 8, 2) as tensor cores' lanes ask."""
  return (stored[0], groups, 8, 2) if len(stored) == 8 else (stored[0], groups, stored[-1])


def pack_numbers(q: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """As `pack`, of a quantized W, (out, in), int8 or uint8 from 0 to 15, for W of a stored shape: bytes by themselves,
  but nibbles, and what tensor cores take, in uint32, (out / 16, in / 8, 16) or (out / 16, in / 32, 8, 4, bits / 2)."""
  bits = 4 if q.dtype == np.uint8 else 8
  if len(shape) == 3:
    if bits == 8: return pack(q, shape)
    numbers = q.reshape(shape[0], shape[2], -1, 8).swapaxes(1, 2)   # (out / 16, in / 8, 16, 8)
  else:
    if bits == 8: q = q.view(np.uint8) ^ 128   # from 0 on
    lanes = pack(q, shape).transpose(0, 1, 4, 5, 2, 3, 6, 7)   # (out / 16, in / 32, 8, 4, and 16 numbers of a lane)
    # A word's pairs of neighbours follow each other, each in the lower and in the upper half
    numbers = lanes.reshape(*lanes.shape[:4], bits // 2, 16 // bits, 2).swapaxes(-1, -2)
    numbers = numbers.reshape(*lanes.shape[:4], bits // 2, 32 // bits)
  if bits == 4: numbers = numbers[..., ::2] | numbers[..., 1::2] << 4
  return np.ascontiguousarray(numbers).view(np.uint32)[..., 0]


def filler(model: Llama, folder: pathlib.Path, published: dict[str, Any], quantization: str | None) -> Callable:
  """What fills a Linear of a model's with the matrices of its files: as its quantization_config, `published`, says that
  they are, or as `quantization` asks for. Raises ValueError where these do not agree."""
  layouts = layouts_of(published)
  method = published.get("quant_method")
  bits = {"int8": 8, "int4": 4}.get(quantization or "")
  said = f"{method} already" if method else "not quantized"
  check(quantization in (None, method) or bits and not method,
        f"quantization={quantization!r}: the model in {folder} is {said}")

  def fill(part: Linear, shapes: dict[str, tuple[int, int]], maps: dict[str, Any], take: Callable,
           place: Callable) -> None:
    """On each device with its part. shapes: of the matrices, by name. maps: of the files' tensors. take: reads one of
    a name and shape. place: brings arrays to the devices."""
    matrices = [read(name, shape, layouts, maps, take) for name, shape in shapes.items()]
    for name in shapes if published else ():   # what says nothing: the shape, and zeros where a model has no bias
      maps.pop(f"{name}.weight_shape", None)
      bias = maps.get(f"{name}.bias")
      if bias and part.bias is None and not np.memmap(*bias).any(): del maps[f"{name}.bias"]
    parts = [split(w, len(model.devices), part.axis) for w in matrices]
    weights = [joined(own) for own in zip(*parts, strict=True)]
    if bits and part not in (model.embed_tokens, model.lm_head):   # of 4 bits there are eight to a word
      weights = [quantize(w, bits if w.shape[1] % 8 == 0 else 8) for w in weights]
    if part is model.embed_tokens: weights = [dequantized(w) for w in weights]
    stored: Any = part.weight.shape
    if isinstance(weights[0], np.ndarray):
      part.weight.replace(place(part, [*map(part.stored, weights)]))
      return
    part.weight = place(part, [pack_numbers(part.ordered(w.q), stored) for w in weights], None)
    for terms in zip(*[(w.scale, w.offset) for w in weights], strict=True):   # offsets if there are any
      if terms[0] is not None:
        part.scales.append(place(part, [pack(part.ordered(x), scales_shape(stored, x.shape[1])) for x in terms], None))
    order = weights[0].order
    if (np.diff(order) != 1).any(): part.order = place(part, [order.astype(np.int32)] * len(weights), None)
  return fill
