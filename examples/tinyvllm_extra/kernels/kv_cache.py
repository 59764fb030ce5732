"""K and V in 8 bits: e4m3 (Micikevicius et al. 2022, arXiv:2209.05433) made of bits, so that every device with float16
has it, or 128 + number / scale, with a scale for each token and head."""
import functools
from collections.abc import Sequence

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from tinyvllm.config import check
from tinyvllm.backend import cpu_cores, renderer


def kind_of(asked: str, head_dim: int) -> DType:
  """Of the cache's elements: bytes on a CPU, else words of four, as tinygrad joins no loads of bytes on a GPU. asked:
  "int8" or "fp8". Raises ValueError for what the device, or the model, cannot have."""
  said = f"kv_cache_dtype={asked!r} needs"
  check(asked == "int8" or dtypes.half in renderer().supported_dtypes(), f"{said} float16: int8 will do")
  kind = dtypes.uint8 if cpu_cores() else dtypes.uint32
  least = 2 * kind.itemsize   # RoPE takes neighbours of either half
  check(head_dim % least == 0, f"{said} a head_dim that {least} divides, not {head_dim}: auto will do")
  return kind


def block_parts(asked: str, heads: int, head_dim: int, block_size: int) -> list[tuple[tuple[int, ...], DType]]:
  """As tinyvllm.attention's."""
  kind = kind_of(asked, head_dim)
  words = head_dim // kind.itemsize
  scales = [((heads, 2, block_size), dtypes.float32)] if asked == "int8" else []
  return [((heads, words, block_size), kind), ((heads, block_size, words), kind), *scales]


def stored(numbers: Sequence[UOp], kind: DType, scaled: bool) -> UOp:
  """The cache's element for neighbours along D, a byte of each."""
  def byte(x):
    if scaled: return (x.round() + 128).cast(dtypes.uint32)
    size = x.maximum(-x).minimum(448)   # e4m3's largest
    bits = size.bitcast(dtypes.uint32)
    normal = bits - (120 << 23) + 0x7ffff + (bits >> 20 & 1) >> 20   # 4 bits of the exponent and 3 of what follows
    return (size < 2**-6).where((size * 2**9).round().cast(dtypes.uint32), normal) | (x < 0).where(128, 0)
  return functools.reduce(UOp.__or__, [byte(x) << 8 * i for i, x in enumerate(numbers)]).cast(kind)


# What a half of half_bits is multiplied by, to be a number that has no scale, or 128 + one that has
FACTOR = {False: 2**8, True: 2**24}


def half_bits(pair: UOp, scaled: bool) -> UOp:
  """Of two bytes, the lower ones of a word's halves, the bits of two float16, FACTOR times smaller."""
  return pair if scaled else (pair & 0x7f007f) << 7 | (pair & 0x800080) << 8


def number(element: UOp, i: UOp, scaled: bool) -> UOp:
  """In float32 the i-th of the neighbours that an element of the cache holds."""
  byte = element >> (i * 8).cast(dtypes.uint32) & 255 if element.dtype == dtypes.uint32 else element
  if scaled: return byte.float() - 128
  byte = byte.cast(dtypes.uint16)
  return ((byte & 127) << 7 | (byte & 128) << 8).bitcast(dtypes.half).float() * 256
