"""Paged attention (Kwon et al. 2023, arXiv:2309.06180) as UOp kernels: they write K and V by slot and read both through
the block table, so that nothing copies the context. A tensor that a write returns carries the order: what reads after
must use it."""
import functools
import math

from tinygrad import Tensor, UOp, dtypes
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.uop.ops import AxisType, KernelInfo, Ops


def _write_table_kernel(block_size: int, table: UOp, rows: UOp, positions: UOp, slots: UOp) -> UOp:
  t = UOp.range(rows.shape[0], 0)
  entry = table[rows[t], positions[t] // block_size]
  return entry.store(slots[t] // block_size).end(t).sink(arg=KernelInfo(name="write_table"))


def _write_kv_kernel(cache: UOp, k: UOp, v: UOp, slots: UOp) -> UOp:
  t, h, d = [UOp.range(extent, axis) for axis, extent in enumerate(k.shape)]
  block, offset = slots[t] // cache.shape[2], slots[t] % cache.shape[2]
  stores = [cache[i, block, offset, h, d].store(x[t, h, d]) for i, x in enumerate((k, v))]
  return UOp.group(*stores).end(t, h, d).sink(arg=KernelInfo(name="write_kv"))


def _opts(simd: bool, extents: tuple, axis: int, amount: int, unroll: int) -> tuple[Opt, ...] | None:
  """For a CPU: compute `amount` outputs of an axis at once, and unroll the first reduced axis; else tinygrad's
  heuristics. Measured against them: up to twice as fast, and a fifth of their time to compile."""
  position = sum(extent != 1 for extent in extents[:axis])   # axes of extent 1 are gone when opts are applied
  opts = ((OptOps.UNROLL, 0, unroll), (OptOps.UPCAST, position, amount))
  return tuple(Opt(*opt) for opt in opts if opt[2] > 1) if simd else None


def _scores_kernel(simd: bool, num_blocks: UOp, scores: UOp, q: UOp, cache: UOp, table: UOp, rows: UOp) -> UOp:
  extents = (*q.shape[:3], num_blocks, cache.shape[2])
  t, h, g, m, s = [UOp.range(extent, axis) for axis, extent in enumerate(extents)]
  d = UOp.range(q.shape[3], 5, AxisType.REDUCE)
  product = q[t, h, g, d] * cache[0, table[rows[t], m], s, h, d]
  dot = product.cast(dtypes.float32).reduce(d, arg=Ops.ADD)
  G, D = (int(extent) for extent in q.shape[2:])   # the heads of a group share what is loaded of K
  opts = _opts(simd, extents, 2, G if G < 9 else 1, math.gcd(D, 4))
  info = KernelInfo(name="paged_scores", opts_to_apply=opts)
  return scores[t, h, g, m, s].store(dot).end(t, h, g, m, s).sink(arg=info)


def _values_kernel(simd: bool, num_blocks: UOp, out: UOp, p: UOp, cache: UOp, table: UOp, rows: UOp,
                   positions: UOp) -> UOp:
  t, h, g, d = [UOp.range(extent, axis) for axis, extent in enumerate(out.shape)]
  m = UOp.range(num_blocks, 4, AxisType.REDUCE)
  s = UOp.range(cache.shape[2], 5, AxisType.REDUCE)
  v = cache[1, table[rows[t], m], s, h, d].cast(dtypes.float32)
  seen = m * cache.shape[2] + s <= positions[t]   # beyond lies whatever the block held before, NaN included
  total = seen.where(p[t, h, g, m, s] * v, 0.0).reduce(m, s, arg=Ops.ADD)
  opts = _opts(simd, out.shape, 3, math.gcd(int(out.shape[3]), 16), 1)
  info = KernelInfo(name="paged_values", opts_to_apply=opts)
  return out[t, h, g, d].store(total).end(t, h, g, d).sink(arg=info)


def write_table(table: Tensor, rows: Tensor, positions: Tensor, slots: Tensor, block_size: int) -> Tensor:
  """Enter the block of each token's slot into its row's block table, (rows, max_blocks). A sequence only ever writes to
  blocks that its table names, so this alone keeps the device's tables up to date."""
  kernel = functools.partial(_write_table_kernel, block_size)
  return table.custom_kernel(rows, positions, slots, fxn=kernel)[0]


def write_kv(cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> Tensor:
  """Store k and v, (T, KV, D), at `slots`, (T,), of the block tensor (2, num_blocks, block_size, KV, D), in place."""
  k, v = (x.cast(cache.dtype).contiguous() for x in (k, v))
  return cache.custom_kernel(k, v, slots, fxn=_write_kv_kernel)[0]


def paged_attention(q: Tensor, cache: Tensor, table: Tensor, rows: Tensor, positions: Tensor, blocks: UOp,
                    simd: bool = False) -> Tensor:
  """Causal attention of each token over positions 0..positions[t] of its own sequence, in float32. q: (T, KV, G, D), G
  query heads to each K/V head. cache: as `write_kv` returns it. table: (rows, max_blocks). rows, positions: (T,).
  blocks: a bound variable, the most blocks that any of the sequences holds. simd: schedule for a CPU. Returns (T, KV,
  G, D)."""
  (T, KV, G, D), max_blocks, block_size = q.shape, int(table.shape[1]), int(cache.shape[2])
  in_kernel = UOp.variable("num_blocks", 0, max_blocks - 1, dtypes.int, param=True) + 1   # as kernels see it
  empty = functools.partial(Tensor.empty, T, KV, G, dtype=dtypes.float32, device=q.device)
  kernel = functools.partial(_scores_kernel, simd, in_kernel)
  scores = empty(max_blocks, block_size).custom_kernel(q.contiguous(), cache, table, rows, fxn=kernel)[0]
  scores = scores[:, :, :, :blocks] / math.sqrt(D)   # (T, KV, G, M, BS)
  index = Tensor.arange(max_blocks)[:blocks].reshape(blocks, 1) * block_size + Tensor.arange(block_size)
  seen = index.reshape(1, 1, 1, blocks, block_size) <= positions.reshape(T, 1, 1, 1, 1)
  scores = seen.where(scores, -1e30)
  p = empty(max_blocks, block_size)   # a custom kernel takes buffers of constant shape only
  exp = (scores - scores.max((3, 4), keepdim=True)).exp()
  p = Tensor(p.uop.after(p[:, :, :, :blocks].uop.store(exp.uop)))
  kernel = functools.partial(_values_kernel, simd, in_kernel)
  out = empty(D).custom_kernel(p, cache, table, rows, positions, fxn=kernel)[0]
  return out / p[:, :, :, :blocks].sum((3, 4)).reshape(T, KV, G, 1)
