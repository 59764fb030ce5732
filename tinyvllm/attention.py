"""Paged attention (Kwon et al. 2023, arXiv:2309.06180) as UOp kernels: they write K and V by slot and read both through
the block table, so that nothing copies the context. A tensor that a write returns carries the order: what reads after
must use it.

tokens, (6 or more, T) int32, says of each token of a flat batch its id, position, slot (block * block_size + offset)
and row of the table. cache: (2, num_blocks, block_size, KV, D). table: (rows, max_blocks). G query heads share a K/V
head. Softmax is online, in float32 (Dao et al. 2022): there is no memory but for q and the result."""
import functools
import math
from collections.abc import Callable

from tinygrad import Tensor, UOp, dtypes
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from .linear import cpu_cores, divisor, has_tensor_cores, mma

POSITION, SLOT, ROW = 1, 2, 3
LOWEST = -1e30   # a score that weighs nothing, and yet is no infinity: inf - inf is not a number


def write_table_kernel(block_size: int, table: UOp, tokens: UOp) -> UOp:
  """Enter the block of each token's slot into its row's block table. A sequence only ever writes to blocks that its table
  names, so this alone keeps the device's tables up to date."""
  t = UOp.range(tokens.shape[1], 0)
  entry = table[tokens[ROW, t], tokens[POSITION, t] // block_size]
  return entry.store(tokens[SLOT, t] // block_size).end(t).sink(arg=KernelInfo(name="write_table"))


def rope_kernel(q: UOp, cache: UOp, qkv: UOp, rope: UOp, tokens: UOp) -> UOp:
  """Turn q and k by their positions, the first half of each head against the second (Su et al. 2021), and store k and v
  at their slots. q: (T, KV, G, D), filled. qkv: (T, (KV * G + 2 KV) * D). rope: (length, 2, D/2), cosines and sines."""
  (T, KV, G, D), BS = q.shape, cache.shape[2]
  t, h, i = [UOp.range(extent, axis) for axis, extent in enumerate((T, KV, D // 2))]
  position, slot = tokens[POSITION, t].cast(dtypes.weakint), tokens[SLOT, t].cast(dtypes.weakint)
  cos, sin = [rope[position % rope.shape[0], z, i] for z in range(2)]
  k, v = [functools.partial(cache.index, UOp.const(z), slot // BS % cache.shape[1], slot % BS, h) for z in range(2)]
  stores = [v(i + half).store(qkv[t, (KV * (G + 1) + h) * D + i + half]) for half in (0, D // 2)]
  for head, to in [(h * G + g, functools.partial(q.index, t, h, UOp.const(g))) for g in range(G)] + [(KV * G + h, k)]:
    a, b = (qkv[t, head * D + i + half].cast(dtypes.float32) for half in (0, D // 2))
    stores += [to(i).store((a * cos - b * sin).cast(q.dtype)), to(i + D // 2).store((b * cos + a * sin).cast(q.dtype))]
  return UOp.group(*stores).end(t, h, i).sink(arg=KernelInfo(name="rope_and_write"))


def _maximum(*values: UOp) -> UOp: return functools.reduce(UOp.maximum, values)


def _shared(slot: int, *shape: int) -> UOp: return UOp.placeholder(shape, dtypes.float32, slot, AddrSpace.LOCAL)


def _page(table: UOp, cache: UOp, row: UOp, m: UOp) -> UOp:
  row, pages = row.cast(dtypes.weakint) % table.shape[0], cache.shape[1]   # bounds that tinygrad can see
  return table[row, m % table.shape[1]].cast(dtypes.weakint) % pages


def _registers(number: int, outer: tuple[UOp, ...], *sizes: int) -> tuple[UOp, list[UOp]]:
  """A loop whose end depends on data; sums of weighted values, the highest scores so far, the sums of weights and the
  number of the round."""
  kinds = [(dtypes.float32, 0.0), (dtypes.float32, LOWEST), (dtypes.float32, 0.0), (dtypes.int32, 0)]
  registers = [UOp.placeholder((size,), dtype, slot, AddrSpace.REG)
               for slot, (size, (dtype, _)) in enumerate(zip((*sizes, 1), kinds, strict=True))]
  start = [x.after(*outer)[i].store(fill) for x, (_, fill) in zip(registers, kinds, strict=True) for i in range(x.shape[0])]
  loop = UOp.loop(number)
  return loop, [x.after(UOp.group(*start), loop) for x in registers]


def _attend_kernel(cores: int, out: UOp, q: UOp, cache: UOp, table: UOp, tokens: UOp) -> UOp:
  """On any device: each token and K/V head by itself, a block at a time."""
  (T, KV, G, D), BS, lanes = q.shape, cache.shape[2], math.gcd(q.shape[3], 16)
  t, h, d, e, e2 = [UOp.range(x, i) for i, x in enumerate((T, KV, D, D // lanes, D // lanes))]
  g, lane, s = [UOp.range(x, 5 + i, AxisType.UNROLL if i == 2 else AxisType.UPCAST) for i, x in enumerate((G, lanes, BS))]
  loop, (total, highest, weight, count) = _registers(8, (t, h), G * D, G, G)
  own, turn = tokens[POSITION, t].load().cast(dtypes.weakint), count[0].load()
  m = turn.cast(dtypes.weakint)
  page, seen = _page(table, cache, tokens[ROW, t], m), m * BS + s <= own   # beyond lies what was there before, NaN too
  product = q[t, h, g, d].cast(dtypes.float32) * cache[0, page, s, h, d].cast(dtypes.float32)
  score = seen.where(product.reduce(d, arg=Ops.ADD) * (math.log2(math.e) / math.sqrt(D)), LOWEST)   # (G, BS)
  top = highest[g].maximum(score.reduce(s, arg=Ops.MAX))
  fade, p = (highest[g] - top).exp2(), (score - top).exp2()
  v = seen.where(cache[1, page, s, h, e * lanes + lane].cast(dtypes.float32), 0.0)
  at = (e * G + g) * lanes + lane
  stores = [total[at].store(total[at] * fade + (p * v).reduce(s, arg=Ops.ADD)).end(e, g, lane), highest[g].store(top).end(g),
            weight[g].store(weight[g] * fade + p.reduce(s, arg=Ops.ADD)).end(g), count[0].store(turn + 1)]
  end = UOp.group(*stores).end(loop, (m + 1) * BS <= own)
  mean = total.after(end)[(e2 * G + g) * lanes + lane] / weight.after(end)[g]
  sink = out[t, h, g, e2 * lanes + lane].store(mean.cast(out.dtype)).end(e2, g, lane).end(t, h)
  opts = (Opt(OptOps.THREAD, 0, divisor(T, cores)),) if divisor(T, cores) > 1 else ()
  return sink.sink(arg=KernelInfo(name="attend", opts_to_apply=opts))


def _attend_tensor_core_kernel(out: UOp, q: UOp, cache: UOp, table: UOp, tokens: UOp) -> UOp:
  """As FlashAttention-2 (Dao 2023): a warp takes a token, a K/V head and up to 8 of its query heads, the rows of q @ k.T;
  their weights come out of it as p @ v takes them in. A lane reads K and V 8 bytes at a time. Of up to 64 tokens, four
  warps share the blocks of each; of more, four neighbours, most often of one sequence, walk through K and V together."""
  (T, KV, G, D), BS, half = q.shape, cache.shape[2], UOp.const(0.0, cache.dtype)
  shares = 4 if T <= 64 else 1
  tiles, h, group = [UOp.special(n, f"gidx{i}") for i, n in ((2, T * shares // 4), (0, KV), (1, -(-G // 8)))]
  lane, warp = UOp.special(32, "lidx0"), UOp.special(4, "lidx1")
  column, row, share, first = lane % 4, lane // 4, warp % shares, tiles * (4 // shares)
  t, g = first + warp // shares, (group * 8 + row) % G
  loop, (total, highest, weight, count) = _registers(0, (), D // 2, 1, 1)
  own, *others = [tokens[POSITION, x].load().cast(dtypes.weakint) for x in (t, *[first + i for i in range(4 // shares)])]
  turn = count[0].load()
  m = turn.cast(dtypes.weakint) * shares + share
  page = _page(table, cache, tokens[ROW, t], m)

  def seen(s: UOp) -> UOp: return m * BS + s <= own   # beyond lies what was there before, NaN too
  def read(z: int, s: UOp, d: UOp) -> UOp:
    return cache.base.index(((((z * cache.shape[1] + page) * BS + s) * KV + h) * D + d).valid(seen(s)))
  def product(a: list[UOp], b: list[UOp], total: UOp) -> UOp: return mma([*a[:2], half, half, *a[2:], half, half], b, total)

  scores = []
  for j in (0, 8):   # of positions j to j + 7 of the block
    dot = UOp.const((0.0,) * 4, dtypes.float32)
    for d in range(0, D, 16):
      lanes = [d + column * 4 + e for e in range(4)]
      dot = product([q[t, h, g, x] for x in lanes], [read(0, j + row, x) for x in lanes], dot)
    dots = [dot.index(e) * (math.log2(math.e) / math.sqrt(D)) for e in range(2)]
    scores += [seen(j + column * 2 + e).where(x, LOWEST) for e, x in enumerate(dots)]
  tops = _shared(0, 4, 8, 4)
  tops = tops.after(tops[warp, row, column].store(_maximum(*scores)))
  top = _maximum(old := highest[0].load(), *[tops[warp, row, i] for i in range(4)])
  fade, p = (old - top).exp2(), [(x - top).exp2() for x in scores]
  stores = [highest[0].store(top), weight[0].store(weight[0] * fade + sum(p)), count[0].store(turn + 1)]
  where = [n // 4 * 32 + n % 4 for n in range(D // 8)]   # the lanes of 8 rows read 32 neighbours of v in 4 turns
  for n, d in enumerate(where):
    v = [read(1, column * 2 + s, d + row * 4) for s in (0, 1, 8, 9)]
    faded = UOp.stack(*[total[n * 4 + e] * (fade if e < 2 else 1.0) for e in range(4)])
    o = product([x.cast(cache.dtype) for x in p], v, faded)
    stores += [total[n * 4 + e].store(o.index(e)) for e in range(4)]
  end = UOp.group(*stores).end(loop, (turn.cast(dtypes.weakint) + 1) * shares * BS <= _maximum(*others))
  parts, tops, weights = _shared(1, 4, 32, D // 4), _shared(2, 4, 8), _shared(3, 4, 8, 4)
  put = UOp.group(*[parts[warp, lane, n * 2 + e].store(total.after(end)[n * 4 + e]) for n in range(D // 8) for e in range(2)],
                  tops[warp, row].store(highest.after(end)[0]), weights[warp, row, column].store(weight.after(end)[0]))
  parts, tops, weights = parts.after(put), tops.after(put), weights.after(put)
  warps = [warp - share + i for i in range(shares)]
  top = _maximum(*[tops[w, row] for w in warps])
  fades = [(tops[w, row] - top).exp2() for w in warps]
  scale = 1 / sum(f * weights[w, row, i] for w, f in zip(warps, fades, strict=True) for i in range(4))
  stores = []
  for i in range(D // 8 // shares * 2):   # each warp of those that share a token writes a part of the result
    n, e = share * (D // 8 // shares) + i // 2, i % 2
    value = sum(f * parts[w, lane, n * 2 + e] for w, f in zip(warps, fades, strict=True)) * scale
    to = ((t * KV + h) * G + g) * D + n // 4 * 32 + (column * 2 + e) * 4 + n % 4
    stores.append(out.base.index(to).store(value.cast(out.dtype)))
  return UOp.group(*stores).sink(arg=KernelInfo(name="attend_tc", opts_to_apply=()))


def attention_kernel(dtype: DType, head_dim: int, block_size: int) -> Callable[..., UOp]:
  """Causal attention of each token over its own sequence, for the device and these sizes. To be called as `paged_attention`
  does."""
  fits = has_tensor_cores(dtype) and head_dim % 32 == 0 and block_size == 16
  return _attend_tensor_core_kernel if fits else functools.partial(_attend_kernel, cpu_cores())


def paged_attention(kernel: Callable[..., UOp], q: Tensor, cache: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
  """q: (T, KV, G, D). Returns as much."""
  return Tensor.empty_like(q).custom_kernel(q, cache, table, tokens, fxn=kernel)[0]
