"""The KV cache's blocks and number formats: floats, int8 with a scale per token and head, and fp8 (e4m3, Micikevicius
et al. 2022, arXiv:2209.05433). Conversion from and to fp8 uses integers, so that any device with float16 supports it.

keys: (num_blocks, KV, D / n, block_size), values: (num_blocks, KV, block_size, D / n). An element holds n dimensions: a
float, a byte on a CPU, or a uint32 word of four bytes on a GPU, where tinygrad does not combine byte loads. An int8
byte is 128 + number / scale. scales: (num_blocks, KV, 2, block_size) in float32, for K and V."""
import functools
from collections.abc import Sequence

from tinygrad import UOp, dtypes
from tinygrad.dtype import DType

from tinyvllm.backend import cpu_cores, renderer
from tinyvllm.config import ModelConfig, check
from tinyvllm_extra.options import LLMConfig

SMALLEST = 1e-30   # lower limit of a head's largest number, to avoid division by 0


def kv_layout(model: ModelConfig, config: LLMConfig, dtype: DType) -> list[tuple[tuple[int, ...], DType]]:
  """Return the shape and dtype of a block in each cache tensor of a layer: K, V and, for int8, the scales.
  Raises InputError if the device or the model does not support `config.kv_cache_dtype`."""
  cache_dtype = config.kv_cache_dtype
  heads = model.num_key_value_heads
  size = config.block_size
  element = dtype if cache_dtype == "auto" else dtypes.uint8 if cpu_cores() else dtypes.uint32
  elements = model.head_dim // dimensions_in(element)
  check(cache_dtype in ("auto", "int8") or dtypes.half in renderer().supported_dtypes(),
        f"kv_cache_dtype={cache_dtype!r} needs float16, which this device does not support; use 'int8'")
  multiple = 2 * element.itemsize   # RoPE rotates neighbours of both halves of a head
  check(cache_dtype == "auto" or model.head_dim % multiple == 0, f"kv_cache_dtype={cache_dtype!r} needs a head_dim "
        f"that is a multiple of {multiple}, not {model.head_dim}; use 'auto'")
  scales = [((heads, 2, size), dtypes.float32)] if cache_dtype == "int8" else []
  return [((heads, elements, size), element), ((heads, size, elements), element), *scales]


def dimensions_in(element: DType) -> int: return 1 if element in dtypes.floats else element.itemsize


def pack(numbers: Sequence[UOp], dtype: DType, scaled: bool) -> UOp:
  """Return a cache element that holds neighbours along D. scaled: numbers are already divided by their int8 scale."""
  if dtype in dtypes.floats: return numbers[0].cast(dtype)
  def byte(x):
    if scaled: return (x.round() + 128).cast(dtypes.uint32)
    size = x.maximum(-x).minimum(448)   # e4m3's largest number
    bits = size.bitcast(dtypes.uint32)
    normal = bits - (120 << 23) + 0x7ffff + (bits >> 20 & 1) >> 20   # 4 bits of the exponent and 3 of the mantissa
    return (size < 2**-6).where((size * 2**9).round().cast(dtypes.uint32), normal) | (x < 0).where(128, 0)
  return functools.reduce(UOp.__or__, [byte(x) << 8 * i for i, x in enumerate(numbers)]).cast(dtype)


def unpack(element: UOp, i: UOp, scaled: bool) -> UOp:
  """Return the i-th number of a cache element in float32; int8 (scaled) is not yet multiplied by its scale."""
  if element.dtype in dtypes.floats: return element.float()
  byte = element >> (i * 8).cast(dtypes.uint32) & 255 if element.dtype == dtypes.uint32 else element
  if scaled: return byte.float() - 128
  byte = byte.cast(dtypes.uint16)
  return ((byte & 127) << 7 | (byte & 128) << 8).bitcast(dtypes.half).float() * 256
