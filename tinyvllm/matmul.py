"""x @ W.T as UOps that state their schedule, once for tensor cores and once for all other devices, and the norm before
it. A custom kernel gets its buffers, and says what to loop over, what each thread does and where results go."""
import itertools, math
from typing import Any

import numpy as np
from tinygrad import Tensor, UOp, dtypes, helpers
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from .device import cpu_cores, renderer

MMA = (8, 16, 16)   # the tensor core used here: n, m, k


# By rows of x and outputs, at most: tiles of 16 outputs and of 8 rows to a warp, warps that share a sum, steps of 32
# inputs at once. Found by trying them on an H200 (tests/benchmarks/LOG.md): few outputs want smaller tiles, more warps
TILES = [(8, 2**30, (1, 1, 16, 1)), (16, 2**30, (1, 2, 8, 1)), (32, 8192, (1, 4, 8, 1)), (32, 2**30, (2, 4, 4, 2)),
         (64, 8192, (2, 8, 4, 2)), (2**30, 2**30, (4, 8, 2, 2))]
# How the axes of W, (out / 16, 16, in) or (out / 16, 2, 8, in / 32, 4, 2, 2, 2), are stored, by their number
STORED = {3: (0, 2, 1), 8: (0, 3, 5, 6, 2, 4, 1, 7)}


def divisor(n: Any, limit: int) -> int: return max((c for c in range(1, limit + 1) if n % c == 0), default=1)


def axis(extent: Any, number: int, kind: AxisType = AxisType.REDUCE) -> UOp:
  return UOp.range(extent, number, kind) if extent > 1 else UOp.const(0)   # tinygrad takes no reduce over one


def unrolled(extent: Any, by: int, number: int) -> tuple[UOp, list[UOp]]:
  """An index that runs over extent, and its axes: a loop and, within it, `by` rounds at once."""
  by = math.gcd(extent, by)
  axes = [axis(extent // by, number), axis(by, number + 1, AxisType.UNROLL)]
  return axes[0] * by + axes[1], axes


def loops(axes: tuple[UOp, ...]) -> tuple[UOp, ...]: return tuple(a for a in axes if a.op is Ops.RANGE)


def end(x: UOp, *axes: UOp) -> UOp: return x.end(*loops(axes))


def fold(op: Ops, x: UOp, *axes: UOp) -> UOp:
  """Reduce over those of the axes that are longer than one."""
  return UOp(Ops.REDUCE, src=(x, *loops(axes)), arg=(op, 0)) if loops(axes) else x


def lane_axis() -> tuple[AxisType, AddrSpace]:
  """What lanes that work side by side are, and where they share numbers: SIMD and registers on a CPU, else threads."""
  return (AxisType.UPCAST, AddrSpace.REG) if cpu_cores() else (AxisType.LOCAL, AddrSpace.LOCAL)


def stored_shape(out_features: int, in_features: int, dtype: DType) -> tuple[int, ...]:
  """Of a W for rows of x of this type: neighbours in memory are what neighbouring lanes read."""
  tile, cores = math.gcd(out_features, 16), [(core.dims, core.dtype_in) for core in renderer().tensor_cores]
  if (MMA, dtype) in cores and tile == 16 and in_features % 32 == 0:
    return out_features // 16, in_features // 32, 2, 2, 8, 4, 2, 2
  return out_features // tile, in_features, tile


def pack(weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """W, (out, in), in the order of a stored shape."""
  order = STORED[len(shape)]
  return weight.reshape([shape[i] for i in helpers.argsort(order)]).transpose(order)


def unpack(stored: Tensor) -> Tensor:
  """A stored W as (out, in)."""
  plain, rows = stored.permute(helpers.argsort(STORED[stored.ndim])), 2 if stored.ndim == 3 else 3
  return plain.flatten(rows).flatten(0, rows - 1)


class Linear:
  """x @ W.T + bias, accumulated in float32. sources: the matrices of the files whose rows follow each other in W, and
  how many each has. dtype: of x, and of W unless its file is narrower."""
  def __init__(self, in_features: int, sources: dict[str, int], bias: bool, dtype: DType):
    self.in_features, self.out_features, self.sources = in_features, sum(sources.values()), sources
    self.weight = Tensor.empty(*stored_shape(self.out_features, in_features, dtype), dtype=dtype)
    self.bias = Tensor.empty(self.out_features, dtype=dtype) if bias else None

  def __call__(self, x: Tensor, *residual: Tensor, dtype: DType | None = None) -> Tensor:
    """x: (T, in). residual: (T, out), added to the result. Returns (T, out), of x's type unless said."""
    out = Tensor.empty(x.shape[0], self.out_features, dtype=dtype or x.dtype, device=x.device)   # (T, out)
    added = residual if self.bias is None else (self.bias.unsqueeze(0), *residual)
    kernel = linear_kernel if self.weight.ndim == 3 else tensor_core_linear_kernel
    return out.custom_kernel(x, self.weight, *added, fxn=kernel)[0]

  def rows(self, ids: Tensor, dtype: DType) -> Tensor:
    """Of each id, (T,), a row of W: (T, in)."""
    return unpack(self.weight)[ids].cast(dtype).contiguous()


def _plus(total: UOp, added: tuple[UOp, ...], row: UOp, column: UOp) -> UOp:
  return sum([x[row % x.shape[0], column].cast(total.dtype) for x in added], total)


def tensor_core_linear_kernel(out: UOp, x: UOp, weight: UOp, *added: UOp) -> UOp:
  """A warp: some tiles of 16 outputs, some of 8 rows of x, and the k-th share of the inputs. Of 32 inputs a lane takes
  8 neighbours of x and the weights that belong to them, 4 at a time, which lie as lanes ask for them. The tensor cores
  take 8, 4 and 4 elements of w, x and the sum from a lane (PTX ISA, mma.m16n8k16)."""
  (T, K), N16 = x.shape, weight.shape[0]
  n_tiles, t_tiles, shares, steps = next(tiles for rows, outputs, tiles in TILES if rows >= T and outputs >= N16 * 16)
  steps, n_tiles = math.gcd(K // 32, steps), math.gcd(N16, n_tiles)
  shares = math.gcd(K // 32 // steps, shares)
  t, n = UOp.range(-(-T // 8) // t_tiles, 0, AxisType.GLOBAL), UOp.range(N16 // n_tiles, 1, AxisType.GLOBAL)
  column, row = UOp.range(4, 2, AxisType.LOCAL), UOp.range(8, 3, AxisType.LOCAL)   # lane = row * 4 + column
  share = axis(shares, 4, AxisType.GROUP_REDUCE)
  step = axis(K // 32 // steps // shares, 5)
  eight = list(itertools.product(range(2), repeat=3))
  parts = [((step * shares + share) * steps + u, i) for u in range(steps) for i in range(2)]   # 16 inputs each
  stores = []
  for tile in range(n_tiles):
    ws = [UOp.stack(*[weight[n * n_tiles + tile, k, i, h, row, column, r, p] for h, r, p in eight]) for k, i in parts]
    for first in [(t * t_tiles + j) * 8 for j in range(t_tiles)]:
      total = UOp.const((0.0,) * 4, dtypes.float32)
      for w, (k, i) in zip(ws, parts, strict=True):
        four = [x[(first + row).minimum(T - 1), k * 32 + column * 8 + i * 4 + e] for e in range(4)]
        total = UOp.wmma(w, UOp.stack(*four), total, MMA, "CUDA", 32)
      total = fold(Ops.ADD, total, step, share)
      for e in range(4):
        to_row = first + column * 2 + e % 2
        to = (n * n_tiles + tile) * 16 + e // 2 * 8 + row
        value = _plus(total.index(e), added, to_row.minimum(T - 1), to).cast(out.dtype)
        stores.append(out.base.index((to_row * out.shape[1] + to).valid(to_row < T)).store(value))
  return UOp.group(*stores).end(t, n, column, row).sink(arg=KernelInfo(name="linear_tc", opts_to_apply=()))


def linear_kernel(out: UOp, x: UOp, weight: UOp, *added: UOp) -> UOp:
  """One pass over the weights: 16 outputs stay in the cache while the rows of x go by. A CPU has 4 sums of 16 lanes in
  registers, of rows of x and tiles of outputs, or of one row in shares of the inputs: more spill, fewer wait."""
  (T, K), (N16, _, lanes) = x.shape, weight.shape
  simd = cpu_cores() > 0 and lanes == 16
  kind = AxisType.UPCAST if simd else AxisType.WEAK
  rows = math.gcd(T, 4 if T > 8 else 2) if simd else 1
  tiles = math.gcd(N16, 4 // rows) if simd and T > 1 else 1
  shares = math.gcd(K, 4) if simd and T == 1 else 1
  n, t, k = axis(N16 // tiles, 0, AxisType.WEAK), axis(T // rows, 1, AxisType.WEAK), axis(K // shares, 2)
  tile, row, lane = axis(tiles, 3, kind), axis(rows, 4, kind), axis(lanes, 5, kind)
  share = axis(shares, 6, AxisType.UNROLL)
  to_row, to_tile, of = t * rows + row, n * tiles + tile, k * shares + share
  product = x[to_row, of].cast(dtypes.float32) * weight[to_tile, of, lane].cast(dtypes.float32)
  column = to_tile * lanes + lane
  total = _plus(fold(Ops.ADD, fold(Ops.ADD, product, k), share), added, to_row, column)
  stored = end(out[to_row, column].store(total.cast(out.dtype)), n, t, tile, row, lane)
  # Below 2**16 products another core is not awake in time
  threads = divisor(N16 // tiles, cpu_cores()) if simd and T * K * N16 > 2**16 else 1
  opts = (Opt(OptOps.THREAD, 0, threads),) if threads > 1 else ()
  return stored.sink(arg=KernelInfo(name="linear", opts_to_apply=opts if simd else None))


class Norm:
  """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019), in float32. sources: the weight's name and size."""
  def __init__(self, name: str, size: int, eps: float, dtype: DType):
    self.sources, self.eps, self.weight = {name: size}, eps, Tensor.empty(size, dtype=dtype)

  def __call__(self, x: Tensor) -> Tensor:
    """x: (..., size). Returns the same shape."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return Tensor.empty_like(rows).custom_kernel(rows, self.weight, fxn=self.kernel)[0].reshape(x.shape)

  def kernel(self, out: UOp, x: UOp, weight: UOp) -> UOp:
    """A work group takes a row, of which each lane squares a part; they share the sums. x: (T, K). weight: (K,)."""
    (T, K), (kind, shared), cores = x.shape, lane_axis(), cpu_cores()
    lanes = math.gcd(K, 16) if cores else divisor(K, 256)
    t, lane, k, j = UOp.range(T, 0), UOp.range(lanes, 1, kind), axis(K // lanes, 2), axis(K // lanes, 3, AxisType.LOOP)
    inside, outside = ((lane,), (t,)) if cores else ((), (t, lane))
    part, sums = x[t, k * lanes + lane].cast(dtypes.float32), UOp.placeholder((lanes,), dtypes.float32, 100, shared)
    sums = sums.after(end(sums[lane].store(fold(Ops.ADD, part * part, k)), *inside))
    i, over = unrolled(lanes, 32, 4)
    scale = (fold(Ops.ADD, sums[i], *over) / K + self.eps).rsqrt()
    column = j * lanes + lane
    value = x[t, column].cast(dtypes.float32) * scale * weight[column].cast(dtypes.float32)
    stored = end(out[t, column].store(value.cast(out.dtype)), j, *inside)
    return end(stored, *outside).sink(arg=KernelInfo(name="rms_norm", opts_to_apply=()))
