"""Matrix multiplication x @ W.T and RMS norm as UOps with a fixed schedule: linear_tc and linear_many for tensor cores,
linear for all other devices. Each kernel defines its loops, the work of each thread and its stores."""
import functools
from collections.abc import Sequence
from math import gcd, inf
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp, dtypes, helpers
from tinygrad.dtype import AddrSpace, DType
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import AxisType, Ops, sint

from tinyvllm import backend
from tinyvllm.backend import cpu_cores, renderer

from .cpu import cpu_sums
from .kv_cache import FACTOR, half_bits
from .quantized import E2M1, Quantized, is_small_float, narrow
from .schedule import Routes, axes, axis, divisor, end, fold, kernel_of, lane_axis, shared_by, unrolled
from .shards import local_ids, partial_sums
from .shared_memory import MMA, SharedBuffers, mma, shared_tiles, wait
from .stored_weights import stored_weights

PREFETCH = 4096   # bytes that a CPU core prefetches ahead of its current weights
# A lane's elements of w, x and the sum, by four axes numbered from 6: which pair of 4 inputs, half of 16 outputs,
# input in the pair, and one of two rows of x
ELEMENTS = tuple(tuple(enumerate(extents, 6)) for extents in ((2, 2, 2, 1), (2, 1, 2, 1), (1, 2, 1, 2)))

# Maximum rows of x, outputs and bits per weight; then tiles of 16 outputs and of 8 rows per warp, warps per sum
# (split-K), and steps of 32 inputs per iteration. Measured on an H200, one row on an H100 (tests/benchmarks/LOG.md)
TILES = [(1, 4096, 8, 1, 1, 16, 2), (1, inf, 4, 1, 1, 8, 4), (1, inf, 8, 1, 1, 16, 2), (1, inf, 16, 1, 1, 16, 1),
         (8, inf, 8, 1, 1, 8, 2), (8, 3072, 16, 1, 1, 16, 1), (8, inf, 16, 1, 1, 8, 2), (16, inf, 16, 1, 2, 8, 2),
         (32, inf, 8, 2, 4, 4, 2), (32, 8192, 16, 1, 2, 8, 1), (32, 16384, 16, 2, 4, 8, 2), (32, inf, 16, 2, 4, 4, 2),
         (64, 8192, 16, 2, 8, 4, 2), (64, inf, 16, 4, 8, 2, 2), (inf, 8192, 16, 4, 8, 2, 2), (inf, inf, 16, 4, 8, 1, 2)]
# Storage order of the axes of W, (out / 16, 16, in) or (out / 16, 2, 8, in / 32, 4, 2, 2, 2), and of scales, by ndim
STORED = {3: (0, 2, 1), 4: (0, 3, 2, 1), 8: (0, 3, 5, 6, 2, 4, 1, 7)}
MAX_SPLITS = 8   # maximum split-K in linear_many


def speaks_cuda() -> bool:
  """Return whether kernels are compiled from CUDA C++ and may contain its statements."""
  return isinstance(renderer(), CUDARenderer)


def stored_shape(out_features: int, in_features: int, dtype: DType) -> tuple[int, ...]:
  """Return W's stored shape for x of this dtype, where neighbouring lanes read neighbours in memory."""
  tile = gcd(out_features, 16)
  if tile == 16 and in_features % 32 == 0 and (MMA, dtype) in [(c.dims, c.dtype_in) for c in renderer().tensor_cores]:
    return out_features // 16, in_features // 32, 2, 2, 8, 4, 2, 2
  return out_features // tile, in_features, tile


def reorder(weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Reorder W, (out, in), or its scales to a stored shape."""
  order = STORED[len(shape)]
  return weight.reshape([shape[i] for i in helpers.argsort(order)]).transpose(order)


def scales_shape(stored: tuple[int, ...], groups: int) -> tuple[int, ...]:
  """Return the stored shape of scales, (out, groups), for the stored shape of a quantized W."""
  return (stored[0], groups, 8, 2) if len(stored) == 8 else (stored[0], groups, stored[-1])


def pack_numbers(q: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """Reorder q of a quantized W, (out, in). int8 is stored unchanged, and e4m3 as uint8. int4 and layouts for tensor
  cores are packed into uint32 (e4m3: int32) words: (out / 16, in / 8, 16) or (out / 16, in / 32, 8, 4, bits / 2)."""
  bits = 4 if q.dtype in (np.uint8, E2M1) else 8
  word = np.int32 if q.dtype.kind == "V" else np.uint32
  if len(shape) == 3:
    if bits == 8: return reorder(q if q.dtype == np.int8 else q.view(np.uint8), shape)
    numbers: Any = q.view(np.uint8).reshape(shape[0], shape[2], -1, 8).swapaxes(1, 2)   # (out / 16, in / 8, 16, 8)
  else:
    octets = q.view(np.uint8) ^ np.uint8(128 * (q.dtype == np.int8))   # int8 to unsigned
    # (out / 16, in / 32, 8, 4, then 16 numbers of a lane)
    lanes: Any = reorder(octets, shape).transpose(0, 1, 4, 5, 2, 3, 6, 7)
    # A word holds pairs of neighbours, one in its lower half and one in its upper half
    numbers = lanes.reshape(*lanes.shape[:4], bits // 2, 16 // bits, 2).swapaxes(-1, -2)
    numbers = numbers.reshape(*lanes.shape[:4], bits // 2, 32 // bits)
  if bits == 4: numbers = numbers[..., ::2] | numbers[..., 1::2] << 4
  return np.ascontiguousarray(numbers).view(word)[..., 0]


def prepare_scales(w: Quantized, dtype: DType) -> np.ndarray:
  """Return the scales of W for x of this dtype: for floats, which kernels read FACTOR times too small, in `dtype`."""
  if not is_small_float(w): return w.scale
  scale = w.scale.astype(np.float32) * (2**14 if w.q.dtype == E2M1 else FACTOR[False])
  return narrow(scale, w.q.dtype == E2M1) if dtype == dtypes.half else scale


def new(like: Tensor, columns: sint, dtype: DType | None = None) -> Tensor:
  """Return an uninitialized tensor, (rows of `like`, columns), as a kernel's output. Traced functions may return it."""
  return Tensor.invalids(like.shape[0] * columns, dtype=dtype or like.dtype, device=like.device).reshape(-1, columns)


class Linear(backend.Linear):
  """A linear layer with W (float, int8 or int4) stored in the order that lanes load it."""
  def __init__(self, in_features: int, sources: dict[str, int], bias: bool, dtype: DType, axis: int = 0):
    super().__init__(in_features, sources, bias, dtype, axis)
    self.weight = Tensor.empty(*stored_shape(self.out_features, in_features, dtype), dtype=dtype)
    self.scales: list[Tensor] = []   # scales and zero-point offsets, if W is quantized
    self.order: Tensor | None = None   # (in,) int32: input of each column of W, if permuted (GPTQ)

  def ordered(self, w: np.ndarray) -> np.ndarray:
    """Return the rows of W, or of its scales, in the order for `reorder`."""
    return w

  def load(self, checkpoint: Any) -> None:
    """Read W and the bias, one shard per device, into their stored layout."""
    weights = stored_weights(checkpoint)
    if self.bias is not None: self.bias.replace(weights.place(self, weights.vectors(self, "bias"), self.bias.dtype))
    shards = weights.matrices(self)
    shape: Any = self.weight.shape
    dtype = self.weight.dtype
    if not isinstance(shards[0], Quantized):
      self.weight.replace(weights.place(self, [reorder(self.ordered(w), shape) for w in shards], self.weight.dtype))
      return
    self.weight = weights.place(self, [pack_numbers(self.ordered(w.q), shape) for w in shards])
    terms = zip(*[(prepare_scales(w, dtype), w.offset) for w in shards], strict=True)
    self.scales = [weights.place(self, [reorder(self.ordered(x), scales_shape(shape, x.shape[1])) for x in term])
                   for term in terms if term[0] is not None]
    order = shards[0].order
    if (np.diff(order) != 1).any(): self.order = weights.place(self, [order.astype(np.int32)] * len(shards))

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    """Like backend.Linear. With split-K, return the partial sums stacked along the first axis."""
    return self.multiply(new(x, max(1, self.splits(x)) * self.out_features, dtype).reshape(-1, self.out_features), x)

  def multiply(self, out: Tensor, x: Tensor, **options: str) -> Tensor:
    if self.order is not None: x = x[:, self.order].contiguous()
    bias = () if self.bias is None else (self.bias,)
    kernel: Any = linear_kernel if self.weight.ndim == 3 else tensor_core_linear_kernel
    if self.splits(x): kernel = many_rows_linear_kernel
    return out.custom_kernel(x, self.weight, *self.scales, *bias, fxn=functools.partial(kernel, **options))[0]

  def splits(self, x: Tensor) -> int:
    """Return the split-K factor of linear_many, or 0 if that kernel is not used."""
    if self.weight.ndim not in (5, 8) or not speaks_cuda() or not self.fits_shared(x.dtype): return 0
    limit = gcd(self.weight.shape[1], MAX_SPLITS) if self.axis == 1 and self.bias is None else 1
    splits = [n for n in range(1, limit + 1) if limit % n == 0]
    tiles = shared_tiles(x.shape[0], self.out_features, splits, bool(self.scales))
    return tiles[1] if tiles else 0

  def fits_shared(self, dtype: DType) -> bool:
    """Return whether x and each scale are float16, and a scale covers whole iterations of 32 inputs. True without
    scales."""
    return all(dtype == s.dtype == dtypes.half and self.weight.shape[1] % s.shape[1] == 0 for s in self.scales)

  def rows(self, ids: Tensor, dtype: DType) -> Tensor:
    out = new(ids, self.weight.numel() // self.out_features, dtype)
    return out.custom_kernel(local_ids(ids, self.out_features), self.weight, fxn=rows_kernel)[0]


class GateUp(backend.GateUp, Linear):
  """activation(gate) * up. On tensor cores, a tile's 16 outputs are eight rows of gate and the same eight of up."""
  def ordered(self, w: np.ndarray) -> np.ndarray:
    return w if self.weight.ndim == 3 else w.reshape(2, -1, 8, w.shape[1]).swapaxes(0, 1)   # a view

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    if self.weight.ndim == 3: return super().__call__(x, dtype)
    return self.multiply(new(x, self.out_features // 2, dtype), x, activation=self.activation)


def rows_kernel(out: UOp, ids: UOp, weight: UOp) -> UOp:
  """Read rows of W, or zeros for ids out of range. out: (T, K). ids: (T,). weight: W, (N, K), in a stored shape."""
  t, k = axes(0, *out.shape)
  plain = weight.permute(helpers.argsort(STORED[weight.ndim])).reshape(-1, out.shape[1])
  row = ids[t].load()
  last = plain.shape[0] - 1
  value = plain[row.maximum(0).minimum(last).cast(dtypes.weakint), k].cast(out.dtype)
  # Not row.valid(...), because tinygrad 0.14 drops that condition if T == 1
  return kernel_of("rows", out[t, k].store(((row >= 0) & (row <= last)).where(value, value.const_like(0))))


def add_bias(total: UOp, rest: Sequence[UOp], column: UOp) -> UOp:
  return sum((x[column].cast(total.dtype) for x in rest if len(x.shape) == 1), total)


def store(out: UOp, total: UOp, rest: Sequence[UOp], row: UOp, column: UOp) -> UOp:
  """Return the store of a result plus bias, if its row exists."""
  total = add_bias(total, rest, column)
  column = column % out.shape[1]   # an expert's column
  return out.base.index((row * out.shape[1] + column).valid(row < out.shape[0])).store(total.cast(out.dtype))


def store_tile(out: UOp, total: UOp, rest: Sequence[UOp], weight: UOp, t: UOp, n16: UOp, r: UOp, row: UOp,
               activation: str) -> UOp:
  """Return the store of a lane's sums for output tile n16. r: which half of the tile. If out has half as many columns
  as W has rows, store activation(gate) * up (W in GateUp's order)."""
  if out.shape[1] == weight.shape[0] * 16 or any(len(x.shape) == 2 for x in rest):   # routed
    return store(out, total, rest, t, n16 * 16 + r * 8 + row)
  total = add_bias(total, rest, r * out.shape[1] + n16 * 8 + row)
  # Separate the halves; tinygrad simplifies the zeros away
  gate, up = [r.eq(i).where(total, 0).reduce(r, arg=Ops.ADD) for i in range(2)]
  return store(out, getattr(gate, activation)() * up, (), t, n16 * 8 + row)


@functools.cache   # greedy and sampled steps share kernels
def tensor_core_linear_kernel(out: UOp, x: UOp, weight: UOp, *rest: UOp, activation: str = "silu") -> UOp:
  """Multiply on tensor cores. A warp computes tiles of 16 outputs by 8 rows of x over one split of the inputs. A lane
  loads 8 neighbours out of 32 inputs of x and their weights, 4 at a time. In mma.m16n8k16 (PTX ISA) a lane has 8
  elements of w, 4 of x and 4 of the sum."""
  K32 = weight.shape[1]
  routes = Routes(out, x, weight, rest, 10, AxisType.GLOBAL)
  T, N16 = routes.num_rows, routes.num_tiles
  scales = [x for x in rest if len(x.shape) > 2]
  bits = weight.shape[-1] * 2 if scales else 16
  is_float = not scales or weight.dtype == dtypes.int32   # e4m3 or e2m1
  group = K32 * 32 // scales[0].shape[1] if scales else 32
  # Scale the sums if there are few rows, else the weights
  scales_sums = T <= 8 and group % 32 == 0 and x.dtype == dtypes.float16
  candidates = (tiles for rows, outputs, max_bits, *tiles in TILES
                if rows >= T and outputs >= N16 * 16 and max_bits >= bits)
  n_tiles, t_tiles, splits, steps = next(candidates)
  n_tiles = gcd(N16, n_tiles)
  iterations: Any = -(-K32 // splits)   # per warp; the last warp may have fewer
  splits = -(-K32 // iterations)   # type: ignore[assignment]
  # With a single iteration tinygrad 0.14 may drop the condition k < K32
  steps = gcd(iterations, steps) if iterations > steps else 1
  t, n = axes(0, -(-T // 8) // t_tiles, N16 // n_tiles, axis_type=AxisType.GLOBAL)
  column, row = axes(2, 4, 8, axis_type=AxisType.LOCAL)   # lane = row * 4 + column
  k = (axis(iterations // steps, 5) * splits + axis(splits, 4, AxisType.GROUP_REDUCE)) * steps
  h, r, p, e = axes(6, 2, 2, 2, 2, axis_type=AxisType.UPCAST)
  # 1 for each element of w, in a form that tinygrad does not simplify to a constant without axes
  element = h * 4 + r * 2 + p
  one = (element * element - element * 7 < 1).where(UOp.const(1.0, x.dtype), UOp.const(0.0, x.dtype))

  # e4m3: q * 2**-8. Integers: q * 2**-24 (q as subnormal float16 bits) if scales_sums, else 1024 + q
  def number(n16, k, i):
    pair_index = h * 2 + r
    in_half = 16 // bits
    word = weight[n16, k, row, column, (i * 4 + pair_index) // in_half]
    pair = word.cast(dtypes.uint32) >> (pair_index % in_half * bits).cast(dtypes.uint32)
    pair = half_bits(pair, False, int(bits)) if is_float else pair & (2**bits - 1) * 0x10001
    if not is_float and not scales_sums: pair = pair | 0x64006400
    return (pair >> (p * 16).cast(dtypes.uint32)).cast(dtypes.uint16).bitcast(dtypes.half)

  def product(n16, first, k):   # over 32 inputs, zeros after the last one
    first_input = (k * 32 + column * 8).valid(k < K32)
    k = k.minimum(K32 - 1)
    def times(w):
      inputs = [x[routes.source(first + row), first_input + i * 4 + h * 2 + p] for i in range(2)]
      zero = UOp.const((0.0,) * 4, dtypes.float32)
      return sum(UOp.wmma(w[i], inputs[i], zero, MMA, "CUDA", 32, ELEMENTS) for i in range(2))
    if not scales: return times([weight[n16, k, i, h, row, column, r, p] for i in range(2)])
    scale, offset = [s[n16, (k * 32 + column * 8) // group, row, r] for s in scales] + [0] * (2 - len(scales))
    q = [number(n16, k, i) for i in range(2)]
    if is_float and scales_sums: return times(q) * scale.float()
    if is_float: return times([(y * scale).cast(x.dtype) for y in q])
    zero_point = 128 if bits == 8 else 0
    if not scales_sums: return times([((y - (1024 + zero_point)) * scale + offset).cast(x.dtype) for y in q])
    return times(q) * (scale.float() * 2**24) + times([one, one]) * (offset - scale.float() * zero_point)

  def tile(n16, first):
    total = fold(sum(product(n16, first, k + step) for step in range(steps)))
    return store_tile(out, total, rest, weight, routes.target(first + column * 2 + e), n16, r, row, activation)
  tiles = [tile(routes.first_tile + n * n_tiles + i, (t * t_tiles + j) * 8) for i, j in np.ndindex(n_tiles, t_tiles)]
  return kernel_of("linear_tc", UOp.group(*tiles), ())


@functools.cache
def many_rows_linear_kernel(out: UOp, x: UOp, weight: UOp, *rest: UOp, activation: str = "silu") -> UOp:
  """Multiply on tensor cores with x and W in shared memory. In each iteration of 32 inputs, the warps start the copies
  for a later iteration and multiply the complete buffer. One barrier suffices, because the buffer being written was
  read one iteration ago. out: (T, N), or with split-K one (T, N) per split, stacked along the first axis."""
  T, splits = x.shape[0], out.shape[0] // x.shape[0]
  scales = [s for s in rest if len(s.shape) > 1]
  tiles, _ = shared_tiles(T, weight.shape[0] * 16, [splits], bool(scales))   # type: ignore[misc]
  iterations = weight.shape[1] // splits
  split = UOp.special(splits, "gidx2")
  shared = SharedBuffers(tiles, [x, weight, *scales], split, iterations)
  iteration = UOp.range(iterations, 11, AxisType.REDUCE)
  copies = shared.load(UOp.const(0))
  for i in range(1, tiles.buffers - 1): copies = shared.load(UOp.const(i), copies)
  loads = shared.load(iteration + tiles.buffers - 1, wait(copies, iteration, tiles.buffers - 2))
  w = [shared.weights(iteration, loads, n) for n in range(tiles.n)]
  inputs = [shared.inputs(iteration, loads, t) for t in range(tiles.t)]
  pairs = list(np.ndindex(tiles.n, tiles.t))
  sums = [UOp.placeholder((2, 2), dtypes.float32, 300 + i, AddrSpace.REG) for i in range(len(pairs))]
  adds = []
  for total, (n, t) in zip(sums, pairs, strict=True):
    total = total.after(UOp.group(*[total[i].store(0.0) for i in np.ndindex(2, 2)]), iteration)
    product = mma(w[n][0], inputs[t][0], UOp.stack(*[total[i] for i in np.ndindex(2, 2)]))
    product = mma(w[n][1], inputs[t][1], product)
    adds += [total[divmod(i, 2)].store(product.index(i)) for i in range(4)]
  done = UOp.group(*adds).end(iteration)
  r, e = axes(6, 2, 2, axis_type=AxisType.UPCAST)

  def store_sum(total, n, t):
    run = (shared.group_t * tiles.high + shared.warp % tiles.high) * tiles.t + t
    tile = (shared.group_n * tiles.wide + shared.warp // tiles.high) * tiles.n + n
    return store_tile(out, total, rest, weight, split * T + run * 8 + shared.column * 2 + e, tile, r, shared.row,
                      activation)
  stores = [store_sum(total.after(done)[r, e], n, t) for total, (n, t) in zip(sums, pairs, strict=True)]
  return kernel_of("linear_many", UOp.group(*stores), ())


def fetch(buffer: UOp, index: UOp, size: Any) -> UOp:
  """Prefetch `size` bytes, PREFETCH bytes after an index, and return 0."""
  offsets = range(PREFETCH, PREFETCH + size, 64)
  lines = [f"__builtin_prefetch({{0}} + {offset // buffer.dtype.itemsize}), " for offset in offsets]
  return UOp(Ops.CUSTOMI, dtypes.int32, (buffer.base.index(index),), f"({''.join(lines)}0)")


def linear_kernel(out: UOp, x: UOp, weight: UOp, *rest: UOp) -> UOp:
  """Multiply in one pass over the weights: the weights of 16 outputs stay in the cache for all rows of x. A CPU keeps
  as many sums of 16 lanes as fit in its registers, for several rows of x or, with few rows, several splits."""
  K = x.shape[1]
  _, words, lanes = weight.shape
  routes = Routes(out, x, weight, rest, 1)
  T, N16 = routes.num_rows, routes.num_tiles
  in_word = K // words   # inputs per word
  scales = [x for x in rest if len(x.shape) > 2]
  groups = scales[0].shape[1] if scales else 1
  simd = cpu_cores() and lanes == 16
  lane_type = AxisType.UPCAST if simd else AxisType.WEAK
  sums = cpu_sums() if simd else 1
  rows = gcd(T, sums)
  splits = gcd(K // groups, sums // rows) if rows < 4 else 1   # 4 rows with 2 splits take 1.5 times as long
  n = routes.first_tile + axis(N16, 0, AxisType.WEAK)
  t = axis(T // rows, 2, AxisType.WEAK) * rows + axis(rows, 4, lane_type)
  group = axis(groups, 3)
  first = group * (K // groups) + axis(K // groups // splits, 5) * splits
  k = first + axis(splits, 6, AxisType.UNROLL)
  lane = axis(lanes, 7, lane_type)
  w = weight[n, k // in_word, lane]
  if in_word > 1: w = w.cast(dtypes.uint32) >> (k % 8 * 4).cast(dtypes.uint32) & 15   # int4 or e2m1
  if weight.dtype in (dtypes.uint8, dtypes.int32):   # e4m3 or e2m1
    word = w.cast(dtypes.uint32)
    w = half_bits(word, False, 4 if weight.dtype == dtypes.int32 else 8).cast(dtypes.uint16).bitcast(dtypes.half)
  w = w.float()
  for op, scale in zip((UOp.mul, UOp.add), scales, strict=False): w = op(w, scale[n, group, lane].float())
  # Prefetch if one pass computes all rows, because then the core waits for weights
  size = splits * lanes * weight.dtype.itemsize // in_word
  ahead = fetch(weight, (n * words + first // in_word) * lanes, size) if simd and rows == T else 0
  # Sum each split, then the splits
  row = routes.source(t)
  total = fold(fold(x[row, k + ahead].float() * w, types=(AxisType.REDUCE,)))
  # Less work is finished before another core has started
  threads = divisor(N16, cpu_cores()) if T * K * N16 > 8192 else 1
  result = store(out, total, rest, routes.target(t), n * lanes + lane)
  return kernel_of("linear", result, shared_by(threads) if simd else None)


class Norm(backend.Norm):
  axis = None   # every device has the whole weight

  def load(self, checkpoint: Any) -> None:
    weights = stored_weights(checkpoint)
    self.weight.replace(weights.place(self, weights.vectors(self, "weight"), self.weight.dtype))

  def __call__(self, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return Tensor.empty_like(rows).custom_kernel(rows, self.weight, fxn=self.kernel)[0].reshape(x.shape)

  def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    normed = Tensor.empty_like(x)
    outputs = normed.custom_kernel(x, self.weight, new(x, x.shape[1]), *partial_sums(delta), fxn=self.kernel)
    return outputs[3], outputs[0]

  def kernel(self, out: UOp, x: UOp, weight: UOp, total: UOp | None = None, *partials: UOp) -> UOp:
    """Normalize a row per work group: each lane sums the squares of its columns, and the lanes share the sums. x:
    (T, K). weight: (K,). total: output, the sum of x and the partial sums, which is normalized instead of x. partials:
    (T, K), or several stacked along the first axis."""
    T, K = x.shape
    lane_type, memory = lane_axis()
    wide = 1 if cpu_cores() else gcd(K, 8)   # neighbours per load
    lanes = gcd(K, 16) if cpu_cores() else divisor(K // wide, 256)
    iterations: Any = K // wide // lanes
    t = UOp.range(T, 0)
    lane = UOp.range(lanes, 1, lane_type)
    def own(loop_type, wide_type, first):   # a lane's numbers: index in registers, and column
      i = axis(iterations, first, loop_type)
      j = axis(wide, first + 1, wide_type)
      return (i, lane if cpu_cores() else j), (i * lanes + lane) * wide + j
    values = UOp.placeholder((iterations, lanes if cpu_cores() else wide), dtypes.float32, 101, AddrSpace.REG)
    register, column = own(AxisType.LOOP, AxisType.UPCAST, 8)
    value = sum(term[i + t, column].float() for term in (x, *partials) for i in range(0, term.shape[0], T))
    stores = [values[register].store(value)]
    if total is not None: stores.append(total[t, column].store(value.cast(total.dtype)))
    values = values.after(end(UOp.group(*stores), AxisType.LOOP))
    x = values[own(AxisType.REDUCE, AxisType.UNROLL, 2)[0]]
    sums = UOp.placeholder((lanes,), dtypes.float32, 100, memory)
    sums = sums.after(end(sums[lane].store(fold(x * x))))
    scale = (fold(sums[unrolled(lanes, 32, 4)]) / K + self.eps).rsqrt()
    register, column = own(AxisType.LOOP, AxisType.UPCAST, 6)
    return kernel_of("rms_norm", store(out, values[register] * scale * weight[column].float(), (), t, column), ())
