"""All kernels, as UOps that state their schedule: x @ W.T once for tensor cores and once for all other devices, the
norm before it, RoPE with the write of K and V, and paged attention (Kwon et al. 2023, arXiv:2309.06180). They write K
and V by slot and read both through the block table, so that nothing copies the context. A tensor that a write returns
carries the order: what reads after must use it.

tokens, (4 or more, T) int32, says of each token of a flat batch its id, position, slot (block * block_size + offset)
and row of the table. keys: (num_blocks, KV, D, block_size), values: (num_blocks, KV, block_size, D), so that neighbours
in memory are what neighbouring lanes read. table: (rows, max_blocks). G query heads share a K/V head."""
import functools, itertools, math
from typing import Any

from tinygrad import Device, UOp, dtypes
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.dtype import AddrSpace, DType
from tinygrad.helpers import DEV
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

POSITION, SLOT, ROW = 1, 2, 3
# A score that weighs nothing, and yet is no infinity: inf - inf is not a number; the tensor core used here: n, m, k
LOWEST, MMA = -1e30, (8, 16, 16)
# By rows of x and outputs, at most: tiles of 16 outputs and of 8 rows to a warp, warps that share a sum, steps of 32
# inputs at once. Found by trying them on an H200 (tests/benchmarks/LOG.md): few outputs want smaller tiles, more warps
TILES = [(8, 2**30, (1, 1, 16, 1)), (16, 2**30, (1, 2, 8, 1)), (32, 8192, (1, 4, 8, 1)), (32, 2**30, (2, 4, 4, 2)),
         (64, 8192, (2, 8, 4, 2)), (2**30, 2**30, (4, 8, 2, 2))]


def renderer() -> Any: return Device[Device.DEFAULT].renderer


def has_tensor_cores(dtype: DType) -> bool:
  return (MMA, dtype, dtypes.float32) in [(c.dims, c.dtype_in, c.dtype_out) for c in renderer().tensor_cores]


def largest_tensor() -> int:
  """Bytes that a tensor may have: 128 MiB are WebGPU's limit for a binding, and the least of OpenCL's for a buffer."""
  return 2**27 if Device.DEFAULT in ("CL", "WEBGPU") else 2**63


def cpu_cores() -> int:
  """Cores that share a kernel, where the device is a CPU; else 0. A few read all that memory gives, all cost."""
  return 0 if renderer().has_local else min(8, renderer().global_max[0])


def divisor(n: Any, limit: int) -> int: return max((c for c in range(1, limit + 1) if n % c == 0), default=1)


def loops(axes: tuple[UOp, ...]) -> tuple[UOp, ...]: return tuple(a for a in axes if a.op is Ops.RANGE)


def axis(extent: Any, number: int, kind: AxisType = AxisType.REDUCE) -> UOp:
  return UOp.range(extent, number, kind) if extent > 1 else UOp.const(0)   # tinygrad takes no reduce over one


def unrolled(extent: Any, by: int, number: int) -> tuple[UOp, list[UOp]]:
  """An index that runs over extent, and its axes: a loop and, within it, `by` rounds at once."""
  by = math.gcd(extent, by)
  axes = [axis(extent // by, number), axis(by, number + 1, AxisType.UNROLL)]
  return axes[0] * by + axes[1], axes


def fold(op: Ops, x: UOp, *axes: UOp) -> UOp:
  """Reduce over those of the axes that are longer than one."""
  return UOp(Ops.REDUCE, src=(x, *loops(axes)), arg=(op, 0)) if loops(axes) else x


def _finish(total: UOp, extras: tuple[UOp, ...], row: UOp, column: UOp) -> UOp:
  """Of a sum's further inputs, a factor for each row, (T, 1), multiplies it; a residual, (T, out), is added."""
  for x in extras: total = total * x[row, 0] if x.shape[1] == 1 else total + x[row, column].cast(total.dtype)
  return total


def tensor_core_linear_kernel(start: int, out: UOp, x: UOp, weight: UOp, *extras: UOp) -> UOp:
  """A warp: some tiles of 16 outputs, some of 8 rows of x, and the k-th share of the inputs. Of 32 inputs a lane takes
  8 neighbours of x and the weights that belong to them, 4 at a time, which lie as lanes ask for them. The tensor cores
  take 8, 4 and 4 elements of w, x and the sum from a lane (PTX ISA, mma.m16n8k16)."""
  (T, K), N16 = x.shape, weight.shape[0]
  n_tiles, t_tiles, shares, steps = next(tiles for rows, outputs, tiles in TILES if rows >= T and outputs >= N16 * 16)
  steps, n_tiles = math.gcd(K // 32, steps), math.gcd(N16, n_tiles)
  shares = math.gcd(K // 32 // steps, shares)
  t, n = UOp.range(-(-T // 8) // t_tiles, 0, AxisType.GLOBAL), UOp.range(N16 // n_tiles, 1, AxisType.GLOBAL)
  column, row = UOp.range(4, 2, AxisType.LOCAL), UOp.range(8, 3, AxisType.LOCAL)   # lane = row * 4 + column
  share, step = axis(shares, 4, AxisType.GROUP_REDUCE), axis(K // 32 // steps // shares, 5)
  stores, eight = [], list(itertools.product(range(2), repeat=3))
  parts = [((step * shares + share) * steps + u, i) for u in range(steps) for i in range(2)]   # 16 inputs each
  for tile in range(n_tiles):
    w = [UOp.stack(*[weight[n * n_tiles + tile, k, i, h, row, column, r, p] for h, r, p in eight]) for k, i in parts]
    for first in [(t * t_tiles + j) * 8 for j in range(t_tiles)]:
      total = UOp.const((0.0,) * 4, dtypes.float32)
      for lanes, (k, i) in zip(w, parts, strict=True):
        four = UOp.stack(*[x[(first + row).minimum(T - 1), k * 32 + column * 8 + i * 4 + e] for e in range(4)])
        total = UOp.wmma(lanes, four, total, MMA, "CUDA", 32)
      total = fold(Ops.ADD, total, step, share)
      for e in range(4):
        to_row, to = first + column * 2 + e % 2, start + (n * n_tiles + tile) * 16 + e // 2 * 8 + row
        value = _finish(total.index(e), extras, to_row.minimum(T - 1), to)
        stores.append(out.base.index((to_row * out.shape[1] + to).valid(to_row < T)).store(value.cast(out.dtype)))
  return UOp.group(*stores).end(t, n, column, row).sink(arg=KernelInfo(name="linear_tc", opts_to_apply=()))


def linear_kernel(cores: int, start: int, out: UOp, x: UOp, weight: UOp, *extras: UOp) -> UOp:
  """One pass over the weights: a tile of 16 outputs stays in the cache while the rows of x go by."""
  T, (N16, K, lanes) = x.shape[0], weight.shape
  n, t, lane, k = *[UOp.range(extent, i) for i, extent in enumerate((N16, T, lanes))], axis(K, 3)
  to = start + n * lanes + lane
  total = _finish(fold(Ops.ADD, (x[t, k] * weight[n, k, lane]).cast(dtypes.float32), k), extras, t, to)
  opts: list[Any] = []
  if cores and lanes == 16:   # a CPU: 16 outputs x 2 rows in registers (more spill), the tiles shared among the cores
    of_t, rows = int(N16 > 1), math.gcd(T, 2)   # an axis of extent 1 is gone when opts are applied
    threads = divisor(N16, cores) if T * K * N16 > 2**16 else 1   # below, another core is not awake in time
    opts = [(OptOps.UPCAST, of_t + (T > 1), 16), (OptOps.UPCAST, of_t, rows), (OptOps.THREAD, 0, threads)]
  info = KernelInfo(name="linear", opts_to_apply=tuple(Opt(*o) for o in opts if o[2] > 1) or None)
  return out[t, to].store(total.cast(out.dtype)).end(n, t, lane).sink(arg=info)


def scatter_kernel(out: UOp, index: UOp, values: UOp) -> UOp:
  """Store each value at its index in out, seen flat."""
  i = UOp.range(index.shape[0], 0)
  return out.base.index(index[i].load()).store(values[i]).end(i).sink(arg=KernelInfo(name="scatter"))


def adjust_kernel(logits: UOp, changes: UOp) -> UOp:
  """Change single logits in place, by (E, 4) words: 1 + an index into them, seen flat (0: none), then in float32 what
  is added, what then divides a positive logit and multiplies another, and what is subtracted from that."""
  i = UOp.range(changes.shape[0], 0)
  at, (bias, factor, penalty) = changes[i, 0].load(), [changes[i, j].load().bitcast(dtypes.float32) for j in (1, 2, 3)]
  place = logits.base.index((at.cast(dtypes.weakint) - 1).valid(at > 0))
  x = place.load() + bias
  return place.store((x > 0).where(x / factor, x * factor) - penalty).end(i).sink(arg=KernelInfo(name="adjust"))


def rope_kernel(q: UOp, keys: UOp, values: UOp, qkv: UOp, rope: UOp, tokens: UOp) -> UOp:
  """Turn q and k by their positions, the first half of each head against the second (Su et al. 2021), and store k and v
  at their slots. q: (T, KV, G, D), filled. qkv: (T, (KV * G + 2 KV) * D). rope: (length, 2, D/2), cosines and sines."""
  (T, KV, G, D), (pages, _, BS, _) = q.shape, values.shape
  t, h, i = [UOp.range(extent, n) for n, extent in enumerate((T, KV, D // 2))]
  position, slot = tokens[POSITION, t].cast(dtypes.weakint), tokens[SLOT, t].cast(dtypes.weakint)
  cos, sin = [rope[position % rope.shape[0], z, i] for z in range(2)]
  page, offset, stores = slot // BS % pages, slot % BS, []   # type: ignore[var-annotated]
  for head in [h * G + g for g in range(G)] + [KV * G + h]:
    a, b = (qkv[t, head * D + i + half].cast(dtypes.float32) for half in (0, D // 2))
    for d, turned in ((i, a * cos - b * sin), (i + D // 2, b * cos + a * sin)):
      to = q[t, h, len(stores) // 2, d] if len(stores) < 2 * G else keys[page, h, d, offset]
      stores.append(to.store(turned.cast(q.dtype)))
  stores += [values[page, h, offset, d].store(qkv[t, (KV * (G + 1) + h) * D + d]) for d in (i, i + D // 2)]
  return UOp.group(*stores).end(t, h, i).sink(arg=KernelInfo(name="rope_and_write"))


def _end(x: UOp, *axes: UOp) -> UOp: return x.end(*loops(axes))


def attend_kernel(cores: int, out: UOp, q: UOp, keys: UOp, values: UOp, table: UOp, tokens: UOp) -> UOp:
  """Causal attention of each token over its own sequence, with online softmax in float32 (Dao et al. 2022): no memory
  but for out, (T, KV, G, D), and no work beyond the sequence's length. A work group takes a token and a K/V head, and P
  positions at a time; each of its lanes scores some for all G queries, and then sums as many dimensions of V, so that
  these share what is read. Few tokens are each shared by several such sets of lanes. cores: of a CPU, where lanes are
  SIMD; 0: else. What a lane takes, unrolls and shares on a GPU was tried on an H200 (tests/benchmarks/LOG.md)."""
  (T, KV, G, D), (pages, *_, BS) = q.shape, keys.shape
  kind, space = (AxisType.UPCAST, AddrSpace.REG) if cores else (AxisType.LOCAL, AddrSpace.LOCAL)
  wide = math.gcd(D, BS, 4 if T > 64 else 2)   # neighbours that a lane of a GPU takes at once
  lanes, P, steps = (math.gcd(D, 16, BS), math.gcd(D, 16, BS), 1) if cores else (D // wide, D, 64 // wide)
  shares = 1 if cores or T > 64 else max(1, min(256 // D, 1024 // (G * D)))
  t, h, g = UOp.range(T, 0), UOp.range(KV, 1), UOp.range(G, 2, AxisType.UPCAST)
  share, lane, e = axis(shares, 3, AxisType.LOCAL), UOp.range(lanes, 4, kind), axis(D // lanes, 12, AxisType.UPCAST)
  inside, outside, scored = ((lane,), (t, h), (g, lane)) if cores else ((), (t, h, share, lane), (g, e))
  s, dim = (lane, e * lanes + lane) if cores else (lane * wide + e, lane * wide + e)   # its position, and dimension
  own, row = tokens[POSITION, t].load().cast(dtypes.weakint), tokens[ROW, t].cast(dtypes.weakint) % table.shape[0]

  sizes: list[Any] = [(shares, G, P), (shares, G, P), (shares, D // lanes, G, lanes), (G,), (G,), (1,)]
  state = [UOp.placeholder(size, dtypes.float32 if i < 5 else dtypes.int32, 100 + i, space if i < 3 else AddrSpace.REG)
           for i, size in enumerate(sizes)]   # tinygrad numbers its own from 0
  # tinygrad's assembler knows no loop with a condition: there it is one over all that a table holds
  turns, counted = -(-table.shape[1] * BS // (shares * P)), DEV.renderer == "X86"
  count, loop, at = state[-1].after(t, h), UOp.range(turns, 5) if counted else UOp.loop(5), (share, e, g, lane)
  scores, weights, total, highest, weight, count = [x.after(count[0].store(0), loop) for x in state]
  turn = count[0].load().cast(dtypes.weakint) % turns   # so that 32 bits hold all that is computed of it
  first = (turn * shares + share) * P   # the first position of the share

  def place(near: Any, far: UOp) -> tuple[UOp, UOp, UOp]:   # its page's start, the offset in it, whether it is seen
    page = table[row, (far // BS).minimum(table.shape[1] - 1)].cast(dtypes.weakint) % pages
    return (page * KV + h) * D * BS, far % BS + near, far + near <= own   # what is not may be anything, NaN too
  def load(cache: UOp, index: UOp, ok: UOp) -> UOp: return cache.base.index(index.valid(ok)).cast(dtypes.float32)

  (d, over_d), (near, far) = unrolled(D, steps, 6), (lane, first) if cores else (e, first + lane * wide)
  page, offset, seen = place(near, far)
  k = load(keys, page + d * BS + offset, far // BS * BS <= own)   # neighbours are in one page, read as a whole
  score = fold(Ops.ADD, q[t, h, g, d].cast(dtypes.float32) * k, *over_d) * (math.log2(math.e) / math.sqrt(D))
  scores = scores.after(_end(scores[share, g, s].store(seen.where(score, LOWEST)), *scored))
  x, over_x = unrolled(P, 32, 8)
  def before(x: UOp, unset: float) -> UOp: return (turn < 1).where(unset, x)
  top = before(highest[g], LOWEST).maximum(fold(Ops.MAX, scores[share, g, x], *over_x))
  fade = (highest[g] - top).exp2()
  weights = weights.after(_end(weights[share, g, s].store((scores[share, g, s] - top).exp2()), *scored))
  x, over_x = unrolled(P, steps, 10)
  page, offset, seen = place(x, first) if cores else place(0, first + x)
  w, v = weights[share, g, x], load(values, page + offset * D + dim, seen)
  stores = [_end(total[at].store(before(total[at] * fade, 0.0) + fold(Ops.ADD, w * v, *over_x)), e, g, *inside),
            weight[g].store(before(weight[g] * fade, 0.0) + fold(Ops.ADD, w, *over_x)).end(g),
            highest[g].store(top).end(g), count[0].store(count[0].load() + 1)]
  end = UOp.group(*stores).end(loop, *([] if counted else [(turn + 1) * shares * P <= own]))

  scores, _, total, highest, weight, _ = [x.after(end) for x in state]
  mean = total[at] / weight[g]
  if shares > 1:   # put together what each has, by the logarithms of their sums
    put = UOp.group(scores[share, g, lane].store(highest[g] + weight[g].log2()).end(g), total[at].store(mean).end(g))
    sums, means = [[x.after(put)[i, *to] for i in range(shares)] for x, to in ((state[0], at[2:]), (state[2], at[1:]))]
    fades = [(x - functools.reduce(UOp.maximum, sums)).exp2() for x in sums]
    mean = sum(f * x for f, x in zip(fades, means, strict=True)) / sum(fades)
  sink = _end(_end(out[t, h, g, dim].store(mean.cast(out.dtype)), e, g, *inside), *outside)
  opts = (Opt(OptOps.THREAD, 0, divisor(T, cores)),) if divisor(T, cores) > 1 and T >= 8 else ()
  return sink.sink(arg=KernelInfo(name="attend", opts_to_apply=opts))
