"""The tensor types of GGUF (ggml-common.h): the layouts of their blocks, and their weights as q * scale + offset."""
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import DTypeLike

from tinyvllm.config import read_json
from tinyvllm_extra.models.quantized import Quantized


class Format(NamedTuple):
  """The integer format of a quantized weight."""
  bits: int
  group_size: int    # inputs that share a scale
  has_offset: bool


class Packing(NamedTuple):
  """The packing of integers: value = low + (high << bits of low) - zero_point."""
  low: tuple[int, int] = (16, 4)           # arguments of `unpack_planes` for the field NAME
  high: tuple[int, int] | None = None      # and for NAME_high, if it exists
  zero_point: int = 0


class TensorType(NamedTuple):
  """The layout of a GGUF tensor type: a row is a sequence of blocks of `inputs` weights, each a numpy record of
  `fields`, named as in ggml: q, d (scale), m (offset) or dmin (minus offset), and scales (factors of d, then dmin)."""
  name: str
  inputs: int
  fields: DTypeLike
  quant_format: Format | None = None   # None: not quantized
  q: Packing = Packing()
  scales: Packing | None = None        # None: none, or as `unpack_k_scales` reads them
  levels: Sequence[int] = ()           # value of each q; (): q itself


SIGNS = {"d": 1, "m": 1, "dmin": -1}
NESTED = {"quant_format": Format, "q": Packing, "scales": Packing}   # fields of a TensorType that are lists in the file
# By GGUF type id; lists are arguments. numpy has no bfloat16. levels: kvalues_iq4nl in ggml-common.h
TYPES = {int(type_id): TensorType(**{key: NESTED[key](*x) if key in NESTED else x for key, x in row.items()})
         for type_id, row in read_json(pathlib.Path(__file__).with_suffix(".json")).items()}


def unpack_planes(data: np.ndarray, width: int, bits: int) -> np.ndarray:
  """Unpack uint8, (..., n), to (..., n * 8 / bits): of every `width` bytes first their lowest `bits` bits, then the
  next ones."""
  shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
  planes = data.reshape(*data.shape[:-1], -1, 1, width) >> shifts
  planes &= np.uint8(2**bits - 1)
  return planes.reshape(*data.shape[:-1], -1)


def unpack(blocks: np.ndarray, name: str, packing: Packing) -> np.ndarray:
  """Return the integers of a field, (..., n) int8."""
  values = unpack_planes(blocks[name], *packing.low)
  if packing.high: values |= unpack_planes(blocks[f"{name}_high"], *packing.high) << np.uint8(packing.low[1])
  values -= np.uint8(packing.zero_point)
  return values.view(np.int8)


def unpack_k_scales(data: np.ndarray) -> np.ndarray:
  """Unpack 12 bytes to 8 scales and 8 minima of 6 bits each. Bytes 0-3 and 4-7 hold the first four of each; their upper
  2 bits and the nibbles of bytes 8-11 form the last four."""
  scales, minima, nibbles = np.split(data, 3, -1)
  return np.concatenate([scales & 63, nibbles & 15 | scales >> 2 & 48,
                         minima & 63, nibbles >> 4 | minima >> 2 & 48], -1)


def decode(tensor_type: TensorType, blocks: np.ndarray) -> Quantized:
  """Return int8 weights with float32 scales and offsets. blocks: (rows, blocks per row)."""
  fields = blocks.dtype.names or ()
  q = unpack(blocks, "q", tensor_type.q)
  if tensor_type.levels:   # indexing an array would convert q to int64
    levels = np.array(tensor_type.levels, np.int8).tobytes().ljust(256)
    q = np.frombuffer(bytearray(q).translate(levels), np.int8)
  terms = [blocks[name].astype(np.float32)[..., None] * sign for name, sign in SIGNS.items() if name in fields]
  if "scales" in fields:
    packing = tensor_type.scales
    scales = unpack(blocks, "scales", packing) if packing else unpack_k_scales(blocks["scales"])
    terms = [x * y for x, y in zip(terms, np.split(scales, len(terms), -1), strict=True)]
  q, scale, *offset = [x.reshape(len(blocks), -1) for x in (q, *terms)]
  return Quantized(q, scale, offset[0] if offset else None, np.arange(q.shape[1]))


def common_format(types: Sequence[TensorType]) -> Format | str:
  """Return the format or dtype for matrices that are fused: their own if all have the same; the most bits and
  the smallest group if all are quantized, which represent each exactly; else F32."""
  formats = [tensor_type.quant_format or tensor_type.name for tensor_type in types]
  quantized = [x for x in formats if isinstance(x, Format)]
  if len({*formats}) == 1: return formats[0]
  if len(quantized) < len(formats): return "F32"
  bits, group_sizes, has_offset = zip(*quantized, strict=True)
  return Format(max(bits), min(group_sizes), any(has_offset))
