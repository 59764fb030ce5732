"""Paged attention (Kwon et al. 2023, arXiv:2309.06180) as UOp kernels: they write K and V by slot and read both through
the block table, so that nothing copies the context. A tensor that a write returns carries the order: what reads after
must use it."""
import functools
import math
from collections.abc import Callable

from tinygrad import Tensor, UOp, dtypes
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from .linear import cpu_cores, has_tensor_cores, mma

LOWEST = -1e30   # a score that weighs nothing, and yet is no infinity: inf - inf is not a number


def _write_table_kernel(block_size: int, table: UOp, rows: UOp, positions: UOp, slots: UOp) -> UOp:
  t = UOp.range(rows.shape[0], 0)
  entry = table[rows[t], positions[t] // block_size]
  return entry.store(slots[t] // block_size).end(t).sink(arg=KernelInfo(name="write_table"))


def write_table(table: Tensor, rows: Tensor, positions: Tensor, slots: Tensor, block_size: int) -> Tensor:
  """Enter the block of each token's slot into its row's block table, (rows, max_blocks). A sequence only ever writes to
  blocks that its table names, so this alone keeps the device's tables up to date."""
  kernel = functools.partial(_write_table_kernel, block_size)
  return table.custom_kernel(rows, positions, slots, fxn=kernel)[0]


def _rope_kernel(q: UOp, cache: UOp, qkv: UOp, rope: UOp, slots: UOp) -> UOp:
  (T, KV, G, D), BS = q.shape, cache.shape[2]
  t, h, i = [UOp.range(extent, axis) for axis, extent in enumerate((T, KV, D // 2))]
  cos, sin, slot = rope[t, 0, i], rope[t, 1, i], slots[t].cast(dtypes.weakint)
  k, v = [functools.partial(cache.index, UOp.const(z), slot // BS % cache.shape[1], slot % BS, h) for z in range(2)]
  stores = []
  for head, to in [(h * G + g, functools.partial(q.index, t, h, UOp.const(g))) for g in range(G)] + [(KV * G + h, k)]:
    a, b = (qkv[t, head, i + half].cast(dtypes.float32) for half in (0, D // 2))
    stores += [to(i).store((a * cos - b * sin).cast(q.dtype)), to(i + D // 2).store((b * cos + a * sin).cast(q.dtype))]
  stores += [v(i + half).store(qkv[t, KV * (G + 1) + h, i + half]) for half in (0, D // 2)]
  return UOp.group(*stores).end(t, h, i).sink(arg=KernelInfo(name="rope_and_write"))


def rope_and_write(qkv: Tensor, cache: Tensor, rope: Tensor, slots: Tensor, groups: int) -> tuple[Tensor, Tensor]:
  """Turn q and k by their positions, the first half of each head against the second, and store k and v at `slots`,
  (T,), of the block tensor (2, num_blocks, block_size, KV, D), in place. qkv: (T, KV * groups + 2 KV, D). rope: (T, 2,
  D/2), cosines and sines. Returns q, (T, KV, groups, D), and the cache."""
  T, KV, D = qkv.shape[0], int(cache.shape[3]), qkv.shape[2]
  q = Tensor.empty(T, KV, groups, D, dtype=cache.dtype, device=qkv.device)
  return tuple(q.custom_kernel(cache, qkv, rope, slots, fxn=_rope_kernel)[:2])   # type: ignore[return-value]


def _maximum(*values: UOp) -> UOp: return functools.reduce(lambda a, b: a.maximum(b), values)


def _state(slot: int, size: int, dtype: DType = dtypes.float32, space: AddrSpace = AddrSpace.REG) -> UOp:
  return UOp.placeholder((size,), dtype, slot, space)


def _attend_kernel(threads: int, out: UOp, q: UOp, cache: UOp, table: UOp, rows: UOp, positions: UOp) -> UOp:
  """On any device: each token and K/V head by itself, a block at a time. state: per query head the highest score so far,
  the sum of weights and, in `total`, that of weighted values."""
  (T, KV, G, D), (_, NB, BS, _, _) = q.shape, cache.shape
  lanes = math.gcd(D, 16)
  t, h, i, j, d, e, e2 = [UOp.range(x, axis) for axis, x in enumerate((T, KV, G * D, G, D, D // lanes, D // lanes))]
  g, s, lane = (UOp.range(x, 7 + axis, kind) for axis, (x, kind) in enumerate((
    (G, AxisType.UPCAST), (BS, AxisType.UNROLL), (lanes, AxisType.UPCAST))))
  own, loop = positions[t].load().cast(dtypes.weakint), UOp.loop(10)
  total, highest, weight, count = _state(0, G * D), _state(1, G), _state(2, G), _state(3, 1, dtypes.int32)
  start = [total.after(t, h)[i].store(0.0).end(i), count.after(t, h)[0].store(0),
           UOp.group(highest.after(t, h)[j].store(LOWEST), weight.after(t, h)[j].store(0.0)).end(j)]
  total, highest, weight, count = (x.after(UOp.group(*start), loop) for x in (total, highest, weight, count))
  block = count[0].load()
  m = block.cast(dtypes.weakint)
  page = table[rows[t], m % table.shape[1]].cast(dtypes.weakint) % NB
  seen = m * BS + s <= own   # beyond lies whatever the block held before, NaN included
  product = q[t, h, g, d].cast(dtypes.float32) * cache[0, page, s, h, d].cast(dtypes.float32)
  score = seen.where(product.reduce(d, arg=Ops.ADD) * (math.log2(math.e) / math.sqrt(D)), LOWEST)   # (G, BS)
  top = highest[g].maximum(score.reduce(s, arg=Ops.MAX))
  fade, p = (highest[g] - top).exp2(), (score - top).exp2()
  at, v = (e * G + g) * lanes + lane, seen.where(cache[1, page, s, h, e * lanes + lane].cast(dtypes.float32), 0.0)
  stores = [total[at].store(total[at] * fade + (p * v).reduce(s, arg=Ops.ADD)).end(e, g, lane),
            weight[g].store(weight[g] * fade + p.reduce(s, arg=Ops.ADD)).end(g), highest[g].store(top).end(g)]
  end = UOp.group(*stores, count[0].store(block + 1)).end(loop, (m + 1) * BS <= own)
  mean = total.after(end)[(e2 * G + g) * lanes + lane] / weight.after(end)[g]
  sink = out[t, h, g, e2 * lanes + lane].store(mean.cast(out.dtype)).end(e2, g, lane).end(t, h)
  cores = max(c for c in range(1, threads + 1) if T % c == 0) if threads else 1
  opts = (Opt(OptOps.THREAD, 0, cores),) if cores > 1 else ()
  return sink.sink(arg=KernelInfo(name="attend", opts_to_apply=opts))


def _attend_tensor_core_kernel(out: UOp, q: UOp, cache: UOp, table: UOp, rows: UOp, positions: UOp) -> UOp:
  """On tensor cores, as FlashAttention-2 (Dao 2023): a warp takes a token, a K/V head and up to 8 of its query heads, the
  rows of q @ k.T. The weights come out as p @ v takes them in. Of a block a lane takes 8 bytes of K and V at a time. Up to
  64 tokens `shares` warps part a token's context; more, and the warps of a work group are tokens, who share its K and V."""
  (T, KV, G, D), (_, NB, BS, _, _) = q.shape, cache.shape
  tokens, shares = (1, 4) if T <= 64 else (4, 1)
  first, h, group = UOp.special(T // tokens, "gidx2") * tokens, UOp.special(KV, "gidx0"), UOp.special(-(-G // 8), "gidx1")
  lane, warp = UOp.special(32, "lidx0"), UOp.special(tokens * shares, "lidx1")
  column, row, share, t = lane % 4, lane // 4, warp % shares, first + warp // shares
  g, half, loop = (group * 8 + row) % G, UOp.const(0.0, cache.dtype), UOp.loop(0)
  own, *others = [positions[x].load().cast(dtypes.weakint) for x in (t, *(first + i for i in range(tokens)))]
  total, highest, weight, count = _state(0, D // 2), _state(1, 1), _state(2, 1), _state(3, 1, dtypes.int32)
  start = [total[i].store(0.0) for i in range(D // 2)] + [highest[0].store(LOWEST), weight[0].store(0.0), count[0].store(0)]
  total, highest, weight, count = (x.after(UOp.group(*start), loop) for x in (total, highest, weight, count))
  turn = count[0].load()
  m = turn.cast(dtypes.weakint) * shares + share
  page = table[rows[t].cast(dtypes.weakint) % table.shape[0], m % table.shape[1]].cast(dtypes.weakint) % NB

  def seen(s: UOp) -> UOp: return m * BS + s <= own   # beyond lies whatever the block held before, NaN included
  def at(z: int, s: UOp, d: UOp) -> UOp: return cache.base.index(((((z * NB + page) * BS + s) * KV + h) * D + d).valid(seen(s)))
  scores = []
  for j in range(2):   # of the block's positions j * 8 to j * 8 + 7
    dot = UOp.const((0.0,) * 4, dtypes.float32)
    for d in range(0, D, 16):
      a = [q[t, h, g, d + column * 4 + e] for e in range(4)]
      dot = mma([*a[:2], half, half, *a[2:], half, half], [at(0, j * 8 + row, d + column * 4 + e) for e in range(4)], dot)
    scores += [seen(j * 8 + column * 2 + e).where(dot.index(e) * (math.log2(math.e) / math.sqrt(D)), LOWEST) for e in range(2)]
  shared = _state(0, tokens * shares * 32, space=AddrSpace.LOCAL).reshape(tokens * shares, 8, 4)
  put = shared[warp, row, column].store(_maximum(*scores))
  top = _maximum(old := highest[0].load(), *[shared.after(put)[warp, row, i] for i in range(4)])
  fade, p = (old - top).exp2(), [(x - top).exp2() for x in scores]
  stores = [highest[0].store(top), weight[0].store(weight[0] * fade + sum(p)), count[0].store(turn + 1)]
  a = [x.cast(cache.dtype) for x in p]
  for n in range(D // 8):
    v = [at(1, column * 2 + s, n // 4 * 32 + row * 4 + n % 4) for s in (0, 1, 8, 9)]
    o = mma([*a[:2], half, half, *a[2:], half, half], v, UOp.stack(*[total[n * 4 + e] * (fade if e < 2 else 1.0) for e in range(4)]))
    stores += [total[n * 4 + e].store(o.index(e)) for e in range(4)]
  end = UOp.group(*stores).end(loop, (turn.cast(dtypes.weakint) + 1) * shares * BS <= _maximum(*others))
  parts = _state(1, tokens * shares * 8 * D, space=AddrSpace.LOCAL).reshape(tokens * shares, 32, D // 4)
  stats = _state(2, tokens * shares * 64, space=AddrSpace.LOCAL).reshape(tokens * shares, 8, 4, 2)
  put = UOp.group(*[parts[warp, lane, n * 2 + e].store(total.after(end)[n * 4 + e]) for n in range(D // 8) for e in range(2)],
                  *[stats[warp, row, column, i].store(x.after(end)[0]) for i, x in enumerate((highest, weight))])
  parts, stats, warps = parts.after(put), stats.after(put), [warp - share + i for i in range(shares)]
  top = _maximum(*[stats[w, row, 0, 0] for w in warps])
  fades = [(stats[w, row, 0, 0] - top).exp2() for w in warps]
  scale = 1 / sum(f * stats[w, row, i, 1] for w, f in zip(warps, fades, strict=True) for i in range(4))
  stores = []
  for i in range(D // 8 // shares):
    n = share * (D // 8 // shares) + i
    for e in range(2):
      value = sum(f * parts[w, lane, n * 2 + e] for w, f in zip(warps, fades, strict=True)) * scale
      to = ((t * KV + h) * G + g) * D + n // 4 * 32 + (column * 2 + e) * 4 + n % 4
      stores.append(out.base.index(to).store(value.cast(out.dtype)))
  return UOp.group(*stores).sink(arg=KernelInfo(name="attend_tc", opts_to_apply=()))


def attention_kernel(dtype: DType, head_dim: int, block_size: int) -> Callable:
  """The kernel for the device and these sizes."""
  if has_tensor_cores(dtype) and head_dim % 32 == 0 and block_size == 16: return _attend_tensor_core_kernel
  return functools.partial(_attend_kernel, cpu_cores())


def paged_attention(kernel: Callable, q: Tensor, cache: Tensor, table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
  """Causal attention of each token over positions 0..positions[t] of its own sequence: online softmax in float32 (Dao et
  al. 2022), memory for q and the result only. q: (T, KV, G, D), G query heads to each K/V head. cache: as
  `rope_and_write` returns it. table: (rows, max_blocks). rows, positions: (T,). Returns (T, KV, G, D)."""
  out = Tensor.empty(*q.shape, dtype=q.dtype, device=q.device)
  return out.custom_kernel(q, cache, table, rows, positions, fxn=kernel)[0]
