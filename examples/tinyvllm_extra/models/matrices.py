"""Matrices of weights as numpy arrays: quantized ones, w = q * scale + offset in groups of consecutive inputs, whose
number format says how q is stored in words and how kernels decode it; the source of a module's weights, the extension's
Checkpoint or one with only the core's methods; and the storage order of W and of its scales, which are reordered and
packed once, as kernels read them."""
import dataclasses, math, typing
from collections.abc import Sequence

import numpy as np
from tinygrad import Tensor, UOp, dtypes, helpers
from tinygrad.dtype import DType, fp8_to_float

from tinyvllm.backend import Linear, Module
from tinyvllm.llama import Checkpoint

# Small floats, which numpy lacks: a byte each, in a field with the format's name
E4M3 = np.dtype([("e4m3", np.uint8)])
E2M1 = np.dtype([("e2m1", np.uint8)])   # in the lower 4 bits (MXFP4)
SMALL_FLOATS = {   # the numbers of all codes, by dtype (Micikevicius et al. 2022; OCP Microscaling Formats 1.0)
  E4M3: np.array([fp8_to_float(i, dtypes.fp8e4m3) for i in range(256)], np.float32),
  E2M1: np.array([x * sign for sign in (1, -1) for x in (0.0, 0.5, 1, 1.5, 2, 3, 4, 6)], np.float32)}
# Storage order of the axes of W, (out / 16, 16, in) or (out / 16, 2, 8, in / 32, 4, 2, 2, 2), and of scales, by ndim
STORED = {3: (0, 2, 1), 4: (0, 3, 2, 1), 8: (0, 3, 5, 6, 2, 4, 1, 7)}


@dataclasses.dataclass(frozen=True)
class NumberFormat:
  """A number format of q. Kernels decode its bits to float16 with integer operations."""
  bits: int
  word: str   # dtype of a packed word; floats and integers differ, as layers with equal dtypes share traced calls
  zero_point: int = 0      # added to integers for tensor cores
  factor: int = 1          # small floats: q / decoded number, a part of the stored scales

  in_element = property(lambda self: 8 if self.bits == 4 else 1)   # numbers per element of W, not for tensor cores
  is_float = property(lambda self: self.factor > 1)

  def value(self, element: UOp, k: UOp) -> UOp:
    """Return the number of input k in float32. element: of W, not for tensor cores, which holds that input."""
    if self.bits == 4: element = element.cast(dtypes.uint32) >> (k % 8 * 4).cast(dtypes.uint32) & 15
    if not self.is_float: return element.float()
    bits = element.cast(dtypes.uint32)   # of the small float, then of float16
    bits = (bits & 7) << 9 | (bits & 8) << 12 if self.bits == 4 else (bits & 0x7f) << 7 | (bits & 0x80) << 8
    return bits.cast(dtypes.uint16).bitcast(dtypes.half).float()


NUMBER_FORMATS = {   # by the dtype of q
  np.dtype(np.int8): NumberFormat(8, "uint32", zero_point=128), np.dtype(np.uint8): NumberFormat(4, "uint32"),
  E4M3: NumberFormat(8, "int32", factor=2**8), E2M1: NumberFormat(4, "int32", factor=2**14)}
UNQUANTIZED = NumberFormat(16, "uint32")   # floats, which are not packed


class Quantized(typing.NamedTuple):
  """A quantized matrix. Groups divide the inputs evenly."""
  q: np.ndarray               # (out, in): int8, int4 as uint8 from 0 to 15, E4M3 or E2M1: see NUMBER_FORMATS
  scale: np.ndarray           # (out, groups)
  offset: np.ndarray | None   # (out, groups); None: zeros
  order: np.ndarray           # (in,): input of each column

  @property
  def number_format(self) -> NumberFormat: return NUMBER_FORMATS[self.q.dtype]


Matrix = np.ndarray | Quantized   # (out, in)


def narrow(x: np.ndarray, exact: bool = True) -> np.ndarray:
  """Cast to float16 if that is exact or, without `exact`, does not overflow."""
  with np.errstate(over="ignore"): half = x.astype(np.float16)
  return half if (np.array_equal(half, x) if exact else np.isfinite(half).all()) else x


def is_small_float(w: Matrix) -> bool: return isinstance(w, Quantized) and w.number_format.is_float


def stored_shape(out_features: int, in_features: int, has_tensor_cores: bool) -> tuple[int, ...]:
  """Return W's stored shape, where neighbouring lanes read neighbours in memory."""
  tile = math.gcd(out_features, 16)
  if tile == 16 and in_features % 32 == 0 and has_tensor_cores:
    return out_features // 16, in_features // 32, 2, 2, 8, 4, 2, 2
  return out_features // tile, in_features, tile


def reorder(weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Reorder W, (out, in), or its scales to a stored shape."""
  order = STORED[len(shape)]
  return weight.reshape([shape[i] for i in helpers.argsort(order)]).transpose(order)


def scales_shape(stored: tuple[int, ...], groups: int) -> tuple[int, ...]:
  """Return the stored shape of scales, (out, groups), for the stored shape of a quantized W."""
  return (stored[0], groups, 8, 2) if len(stored) == 8 else (stored[0], groups, stored[-1])


def pack_numbers(q: np.ndarray, shape: tuple[int, ...], is_for_int8: bool) -> np.ndarray:
  """Reorder q of a quantized W, (out, in). 8 bits are stored unchanged as int8 or uint8. 4 bits and layouts for tensor
  cores are packed into words of 32 bits: (out / 16, in / 8, 16) or (out / 16, in / 32, 8, 4, bits / 2).

  is_for_int8: linear.c multiplies by int8. It reads words of unsigned numbers, (out / 16, inputs, 16): 4 inputs, 128
  added, or 8 inputs in int4, the first 4 in the lower halves of the word's bytes."""
  number_format = NUMBER_FORMATS[q.dtype]
  bits = number_format.bits
  octets: np.ndarray = q.view(np.uint8)
  if is_for_int8 or len(shape) > 3: octets = octets ^ np.uint8(number_format.zero_point)   # adds 128 to int8
  elif bits == 8: return reorder(q if q.dtype == np.int8 else octets, shape)
  if len(shape) == 3: numbers: np.ndarray = octets.reshape(shape[0], shape[2], -1, 32 // bits).swapaxes(1, 2)
  else:
    # (out / 16, in / 32, 8, 4, then 16 numbers of a lane)
    lanes = reorder(octets, shape).transpose(0, 1, 4, 5, 2, 3, 6, 7)
    # A word holds pairs of neighbours, one in its lower half and one in its upper half
    numbers = lanes.reshape(*lanes.shape[:4], bits // 2, 16 // bits, 2).swapaxes(-1, -2)
    numbers = numbers.reshape(*lanes.shape[:4], bits // 2, 32 // bits)
  if bits == 4:
    low, high = np.split(numbers, 2, -1) if is_for_int8 else (numbers[..., ::2], numbers[..., 1::2])
    numbers = low | high << 4
  return np.ascontiguousarray(numbers).view(number_format.word)[..., 0]


def prepare_scales(w: Quantized, dtype: DType) -> np.ndarray:
  """Return the scales of W for x of this dtype: with the factor of small floats, and for these in `dtype`."""
  if not w.number_format.is_float: return w.scale
  scale = w.scale.astype(np.float32) * w.number_format.factor
  return narrow(scale, w.q.dtype == E2M1) if dtype == dtypes.half else scale


class StoredWeights:
  """The weights that a module's `load` reads from a checkpoint. This class reads a Checkpoint with only the core's
  methods, not quantized, for one device; FastCheckpoint overrides it.

  Each list has one array, or Quantized, per device. vectors: a norm's weight or a bias, (out,). matrices: W, (out, in).
  place: copy the arrays to their devices, in `dtype`, or in their own dtype if it is None. activations: LLMConfig's
  activation_quantization; "fp8" only for matrices in e4m3 with one scale per output and a multiple of 128 inputs."""
  activations = "none"

  def __init__(self, checkpoint: Checkpoint): self.checkpoint = checkpoint

  def vectors(self, module: Module, suffix: str) -> list[np.ndarray]: return self.rows(module, suffix)

  def matrices(self, module: Linear) -> Sequence[Matrix]:
    return self.rows(module, "weight", module.weight.max_numel() // module.out_features)

  def rows(self, module: Module, suffix: str, *columns: int) -> list[np.ndarray]:
    parts = [self.checkpoint.read(f"{name}.{suffix}", n, *columns) for name, n in module.sources.items()]
    return [np.concatenate([part.to(None).cast(dtypes.float32).numpy() for part in parts])]

  def place(self, module: Module, arrays: Sequence[np.ndarray], dtype: DType | None = None) -> Tensor:
    tensor = Tensor(np.ascontiguousarray(arrays[0]))
    return tensor.cast(dtype or tensor.dtype).contiguous().realize()


def stored_weights(checkpoint: Checkpoint) -> StoredWeights:
  """Return the checkpoint itself, unless it has only the core's methods."""
  return checkpoint if isinstance(checkpoint, StoredWeights) else StoredWeights(checkpoint)
