"""x @ W.T, and the norm before it, as UOp kernels that state their schedule. Of matmuls there are two: one for tensor cores,
with W stored in the order in which they take it, and one for all other devices."""
import functools
import math
from typing import Any

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import argsort
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

MMA = (8, 16, 16)   # the tensor core that the kernels here are written for: n, m, k
# How the axes of a split W, (out / 16, 16, in) or (out / 16, 2, 8, in / 32, 4, 2, 2, 2), are stored, by their number
STORED = {3: (0, 2, 1), 8: (0, 3, 5, 6, 2, 4, 1, 7)}
# By rows of x at most: tiles of 16 outputs and of 8 rows to a warp, warps that share a sum, steps of 32 inputs at once
TILES = {8: (1, 1, 16, 1), 16: (2, 2, 4, 2), 32: (2, 4, 4, 2), 1 << 30: (4, 8, 2, 2)}


def has_tensor_cores(dtype: DType) -> bool:
  cores = Device[Device.DEFAULT].renderer.tensor_cores
  return any(c.dims == MMA and c.dtype_in == dtype and c.dtype_out == dtypes.float32 for c in cores)


def cpu_cores() -> int:
  """Cores that share a kernel, where the device is a CPU; else 0."""
  renderer = Device[Device.DEFAULT].renderer
  return 0 if renderer.has_local else renderer.global_max[0]


def divisor(n: int, limit: int) -> int: return max((c for c in range(1, limit + 1) if n % c == 0), default=1)


def pack(weight: Any, shape: tuple) -> Any:
  """W, (out, in), in the order of a stored shape."""
  axes = STORED[len(shape)]
  return weight.reshape([shape[i] for i in argsort(axes)]).transpose(axes)


def features(shape: tuple) -> tuple[int, int]:
  """(out, in) of a stored W."""
  return (shape[0] * 16, shape[1] * 32) if len(shape) == 8 else (shape[0] * shape[2], shape[1])


def unpack(stored: Tensor) -> Tensor:
  """A stored W as (out, in)."""
  return stored.permute(argsort(STORED[stored.ndim])).reshape(features(stored.shape))


def axis(extent: int, number: int, kind: AxisType = AxisType.REDUCE) -> UOp:
  return UOp.range(extent, number, kind) if extent > 1 else UOp.const(0)   # tinygrad takes no reduce over one


def add_up(x: UOp, *axes: UOp) -> UOp:
  axes = tuple(a for a in axes if a.op is Ops.RANGE)
  return UOp(Ops.REDUCE, src=(x, *axes), arg=(Ops.ADD, 0)) if axes else x


def mma(w: list[UOp], x: list[UOp], total: UOp) -> UOp:
  """total + w @ x on the tensor cores, a warp's share: 8, 4 and 4 elements a lane (PTX ISA, mma.m16n8k16)."""
  return UOp.wmma(UOp.stack(*w), UOp.stack(*x), total, MMA, "CUDA", 32)


def _store(to: UOp, total: UOp, *residual: UOp) -> UOp:
  return to.store((total + sum(r.cast(dtypes.float32) for r in residual)).cast(to.dtype))


def _tensor_core_kernel(out: UOp, x: UOp, weight: UOp, *residual: UOp) -> UOp:
  """A warp: some tiles of 16 outputs, some of 8 rows of x, and the k-th share of the inputs. Of 32 inputs a lane takes
  8 neighbours of x and the weights that belong to them, 4 at a time, which lie as lanes ask for them."""
  (T, K), N16 = x.shape, weight.shape[0]
  n_tiles, t_tiles, shares, steps = next(tiles for rows, tiles in TILES.items() if rows >= T)
  steps, n_tiles = math.gcd(K // 32, steps), math.gcd(N16, n_tiles)
  shares = math.gcd(K // 32 // steps, shares)
  t, n = UOp.range(-(-T // 8) // t_tiles, 0, AxisType.GLOBAL), UOp.range(N16 // n_tiles, 1, AxisType.GLOBAL)
  column, row = UOp.range(4, 2, AxisType.LOCAL), UOp.range(8, 3, AxisType.LOCAL)   # lane = row * 4 + column
  share, step = axis(shares, 4, AxisType.GROUP_REDUCE), axis(K // 32 // steps // shares, 5)
  stores = []
  parts = [((step * shares + share) * steps + u, i) for u in range(steps) for i in range(2)]   # 16 inputs each
  for tile in range(n_tiles):
    w = [[weight[n * n_tiles + tile, k, i, h, row, column, r, p] for h in range(2) for r in range(2) for p in range(2)]
         for k, i in parts]
    for j in range(t_tiles):
      first = (t * t_tiles + j) * 8
      at = first + row if T >= 8 else row.minimum(T - 1)
      total = UOp.const((0.0,) * 4, dtypes.float32)
      for lanes, (k, i) in zip(w, parts, strict=True):
        total = mma(lanes, [x[at, k * 32 + column * 8 + i * 4 + e] for e in range(4)], total)
      total = add_up(total, step, share)
      for e in range(4):
        to_row = first + column * 2 + e % 2
        to = (to_row * N16 * 16 + (n * n_tiles + tile) * 16 + e // 2 * 8 + row).valid(to_row < T)
        stores.append(_store(out.base.index(to), total.index(e), *[r.base.index(to) for r in residual]))
  sink = UOp.group(*stores).end(t, n, column, row)
  return sink.sink(arg=KernelInfo(name="linear_tc", opts_to_apply=()))


def _kernel(cores: int, out: UOp, x: UOp, weight: UOp, *residual: UOp) -> UOp:
  """One pass over the weights: a tile of 16 outputs stays in the cache while the rows of x go by."""
  N16, K, lanes = weight.shape
  n, t, lane = [UOp.range(extent, i) for i, extent in enumerate((N16, x.shape[0], lanes))]
  k = axis(K, 3)
  dot = add_up((x[t, k] * weight[n, k, lane]).cast(dtypes.float32), k)
  to, opts = (t, n * lanes + lane), []
  if cores and lanes == 16:   # a CPU: 16 outputs x 2 rows in registers (more spill), the tiles shared among the cores
    of_t, rows = int(N16 > 1), math.gcd(x.shape[0], 2)   # an axis of extent 1 is gone when opts are applied
    opts = [(OptOps.UPCAST, of_t + (x.shape[0] > 1), 16), (OptOps.UPCAST, of_t, rows), (OptOps.THREAD, 0, divisor(N16, cores))]
  sink = _store(out[to], dot, *[r[to] for r in residual]).end(n, t, lane)
  return sink.sink(arg=KernelInfo(name="linear", opts_to_apply=tuple(Opt(*o) for o in opts if o[2] > 1) if opts else None))


class Linear:
  """x @ W.T + bias, accumulated in float32."""
  def __init__(self, in_features: int, out_features: int, bias: bool = False, dtype: DType = dtypes.float32):
    tile = math.gcd(out_features, 16)
    tensor_cores = tile == 16 and in_features % 32 == 0 and has_tensor_cores(dtype)
    shape = (out_features // tile, tile, in_features)
    if tensor_cores: shape = (out_features // 16, 2, 8, in_features // 32, 4, 2, 2, 2)
    self.weight = Tensor.empty(*[shape[i] for i in STORED[len(shape)]], dtype=dtype)
    if bias: self.bias = Tensor.empty(out_features, dtype=dtype)
    self.kernel = _tensor_core_kernel if tensor_cores else functools.partial(_kernel, cpu_cores())

  def __call__(self, x: Tensor, residual: Tensor | None = None, dtype: DType | None = None) -> Tensor:
    """x: (T, in). residual: (T, out), added to the result. Returns (T, out)."""
    out = Tensor.empty(x.shape[0], features(self.weight.shape)[0], dtype=dtype or x.dtype, device=x.device)
    inputs = [x, self.weight, *([residual] if residual is not None else [])]
    out = out.custom_kernel(*inputs, fxn=self.kernel)[0]   # (T, out)
    return out + self.bias if hasattr(self, "bias") else out


def _norm_kernel(lanes: int, eps: float, out: UOp, x: UOp, weight: UOp) -> UOp:
  """A work group takes a row, and each of its lanes every lanes-th number."""
  T, K = x.shape
  few, of_few = K // lanes <= 32, math.gcd(lanes, 32)   # then without a loop: all loads at once
  t, lane = UOp.range(T, 0), UOp.range(lanes, 1, AxisType.LOCAL)
  o = UOp.range(K // lanes, 2, AxisType.UPCAST if few else AxisType.LOOP)
  i, j, k = axis(K // lanes, 3, AxisType.UNROLL if few else AxisType.REDUCE), axis(lanes // of_few, 4), axis(of_few, 5, AxisType.UNROLL)
  number = x[t, i * lanes + lane].cast(dtypes.float32)
  total = add_up(number * number, i)
  if lanes > 1:
    shared = UOp.placeholder((lanes,), dtypes.float32, 0, AddrSpace.LOCAL)
    total = add_up(shared.after(shared[lane].store(total))[j * of_few + k], j, k)
  scale = (total / K + eps).sqrt().reciprocal()
  at = o * lanes + lane
  value = (x[t, at].cast(dtypes.float32) * scale).cast(x.dtype) * weight[at]
  return out[t, at].store(value).end(o).end(t, lane).sink(arg=KernelInfo(name="rms_norm", opts_to_apply=()))


class RMSNorm:
  """x / sqrt(mean(x^2) + eps) * weight, over the last axis, in one kernel (Zhang and Sennrich 2019)."""
  def __init__(self, size: int, eps: float, dtype: DType):
    self.weight = Tensor.empty(size, dtype=dtype)
    self.kernel = functools.partial(_norm_kernel, 1 if cpu_cores() else math.gcd(size, 256), eps)

  def __call__(self, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return Tensor.empty_like(rows).custom_kernel(rows, self.weight, fxn=self.kernel)[0].reshape(x.shape)
