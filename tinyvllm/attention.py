"""RoPE with the write of K and V, and paged attention (Kwon et al. 2023, arXiv:2309.06180), as UOps that state their
schedule. K and V are written by slot and read through the block table, so that nothing copies the context. A tensor that
a write returns carries the order: what reads after must use it.

tokens: (fields of TOKEN, T) int32, a flat batch. keys: (num_blocks, KV, D, block_size), values: (num_blocks, KV,
block_size, D), so that neighbours in memory are what neighbouring lanes read. table: (rows, max_blocks). G query heads
share a K/V head."""
import functools, math
from typing import NamedTuple

from tinygrad import UOp, dtypes
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.dtype import AddrSpace
from tinygrad.helpers import DEV
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from .batch import TOKEN
from .device import cpu_cores
from .matmul import axis, divisor, end, fold, lane_axis, unrolled

LOWEST = -1e30   # a score that weighs nothing, and yet is no infinity: inf - inf is not a number


def field(tokens: UOp, name: str, t: UOp) -> UOp: return tokens[TOKEN.names.index(name), t].load().cast(dtypes.weakint)


def rope_kernel(q: UOp, keys: UOp, values: UOp, qkv: UOp, rope: UOp, tokens: UOp) -> UOp:
  """Turn q and k by their positions, the first half of each head against the second (Su et al. 2021), and store k and v
  at their slots. q: (T, KV, G, D), filled. qkv: (T, (KV * G + 2 KV) * D). rope: (length, 2, D/2), cosines and sines."""
  T, KV, G, D = q.shape
  t, h, i, half = UOp.range(T, 0), UOp.range(KV, 1), UOp.range(D // 2, 2), D // 2
  slot, (pages, _, _, BS) = field(tokens, "slot", t), keys.shape
  cos, sin = [rope[field(tokens, "position", t) % rope.shape[0], z, i] for z in range(2)]
  stores = []
  for n in range(G + 1):   # the queries of a K/V head, and its key
    head = h * G + n if n < G else KV * G + h
    a, b = [qkv[t, head * D + d].cast(dtypes.float32) for d in (i, i + half)]
    for d, x in ((i, a * cos - b * sin), (i + half, b * cos + a * sin)):
      to = q[t, h, n, d] if n < G else keys[slot // BS % pages, h, d, slot % BS]
      stores.append(to.store(x.cast(q.dtype)))
  stores += [values[slot // BS % pages, h, slot % BS, d].store(qkv[t, (KV * G + KV + h) * D + d]) for d in (i, i + half)]
  return UOp.group(*stores).end(t, h, i).sink(arg=KernelInfo(name="rope_and_write"))


class Tiling(NamedTuple):
  """How a work group, which has a token and a K/V head, goes over the token's sequence: D positions at a time. Its lanes
  score some each for all G queries, and then sum as many dimensions of V, so that these share what is read."""
  lanes: int
  parts: int    # positions, and then dimensions, of a lane
  unroll: int   # rounds of an inner loop at once
  shares: int   # sets of lanes, each with positions of its own, which few tokens are worth

  @classmethod
  def choose(cls, T: int, G: int, D: int, block_size: int) -> "Tiling":
    """On a CPU lanes are SIMD. What a GPU takes was tried on an H200 (tests/benchmarks/LOG.md)."""
    simd = math.gcd(D, 16, block_size)
    if cpu_cores(): return cls(simd, D // simd, 1, 1)
    wide = math.gcd(D, block_size, 4 if T > 64 else 2)
    return cls(D // wide, wide, 64 // wide, 1 if T > 64 else max(1, min(256 // D, 1024 // (G * D))))


class State(NamedTuple):
  """Of online softmax in float32 (Dao et al. 2022), for each share and query g."""
  scores: UOp    # (shares, G, D): of this turn of the loop
  weights: UOp   # (shares, G, D): exp2(score - highest)
  total: UOp     # (shares, G, D): V summed by its weights
  highest: UOp   # (G,): of the scores so far
  weight: UOp    # (G,): the weights' sum
  turns: UOp     # (1,): done

  @classmethod
  def make(cls, shared: AddrSpace, *size: int) -> "State":
    sizes = [size] * 3 + [size[1:2]] * 2 + [(1,)]
    return cls(*[UOp.placeholder(size, dtypes.int32 if i == 5 else dtypes.float32, 100 + i,
                                 shared if i < 3 else AddrSpace.REG) for i, size in enumerate(sizes)])

  def after(self, *done: UOp) -> "State": return State(*[x.after(*done) for x in self])


def attend_kernel(out: UOp, q: UOp, keys: UOp, values: UOp, table: UOp, tokens: UOp) -> UOp:
  """Causal attention of each token over its own sequence: no memory but for out, (T, KV, G, D), and no work beyond the
  sequence's length."""
  (T, KV, G, D), (pages, _, _, BS) = q.shape, keys.shape
  cores, tile = cpu_cores(), Tiling.choose(T, G, D, BS)
  kind, shared = lane_axis()
  t, h, g = UOp.range(T, 0), UOp.range(KV, 1), UOp.range(G, 2, AxisType.UPCAST)
  share, lane = axis(tile.shares, 3, AxisType.LOCAL), UOp.range(tile.lanes, 4, kind)
  part = axis(tile.parts, 12, AxisType.UPCAST)
  # Of what a lane has to do: neighbours in one block, and where these begin
  near, begin = (lane, part * tile.lanes) if cores else (part, lane * tile.parts)
  own, inside = (share, g, begin + near), (g, part, lane) if cores else (g, part)
  position, row = field(tokens, "position", t), field(tokens, "row", t) % table.shape[0]

  def read(cache: UOp, at: UOp, index: UOp, seen: UOp) -> UOp:
    page = table[row, (at // BS).minimum(table.shape[1] - 1)].cast(dtypes.weakint) % pages
    return cache.base.index(((page * KV + h) * D * BS + index).valid(seen)).cast(dtypes.float32)

  def scored(state: State, first: UOp) -> State:
    """With the scores of D positions: q . k / sqrt(D), for exp2."""
    at = first + begin
    d, over = unrolled(D, tile.unroll, 6)
    k = read(keys, at, d * BS + at % BS + near, at // BS * BS <= position)   # a block is read as a whole
    score = fold(Ops.ADD, q[t, h, g, d].cast(dtypes.float32) * k, *over) * (math.log2(math.e) / math.sqrt(D))
    seen = (at + near <= position).where(score, LOWEST)   # what is not may be anything, NaN too
    return state._replace(scores=state.scores.after(end(state.scores[own].store(seen), *inside)))

  def summed(state: State, first: UOp, turn: UOp) -> UOp:
    """The stores that add V by the weights of these scores to what the turns before have left."""
    def before(x: UOp, unset: float) -> UOp: return (turn < 1).where(unset, x)
    i, over = unrolled(D, 32, 8)
    top = before(state.highest[g], LOWEST).maximum(fold(Ops.MAX, state.scores[share, g, i], *over))
    fade = (state.highest[g] - top).exp2()
    weights = state.weights.after(end(state.weights[own].store((state.scores[own] - top).exp2()), *inside))
    i, over = unrolled(D, tile.unroll, 10)
    at, w = first + i, weights[share, g, i]
    v = read(values, at, at % BS * D + own[2], at <= position)
    return UOp.group(end(state.total[own].store(before(state.total[own] * fade, 0.0) + fold(Ops.ADD, w * v, *over)), *inside),
                     state.weight[g].store(before(state.weight[g] * fade, 0.0) + fold(Ops.ADD, w, *over)).end(g),
                     state.highest[g].store(top).end(g), state.turns[0].store(state.turns[0].load() + 1))

  def combined(state: State) -> UOp:
    """The mean of V, of all shares by the logarithms of their weights' sums."""
    mean = state.total[own] / state.weight[g]
    if tile.shares == 1: return mean
    log_sum = state.scores[own].store(state.highest[g] + state.weight[g].log2())
    state = state.after(UOp.group(end(log_sum, *inside), end(state.total[own].store(mean), *inside)))
    sums, means = [[x[i, *own[1:]] for i in range(tile.shares)] for x in (state.scores, state.total)]
    fades = [(x - functools.reduce(UOp.maximum, sums)).exp2() for x in sums]
    return sum(fade * x for fade, x in zip(fades, means, strict=True)) / sum(fades)

  made, step = State.make(shared, tile.shares, G, D), tile.shares * D
  most = -(-table.shape[1] * BS // step)
  counted = DEV.renderer == "X86"   # tinygrad's assembler knows no loop that ends by a condition
  loop = UOp.range(most, 5) if counted else UOp.loop(5)
  state = made.after(made.turns.after(t, h)[0].store(0), loop)
  turn = state.turns[0].load().cast(dtypes.weakint) % most   # so that 32 bits hold all that is computed of it
  first = turn * step + share * D
  done = summed(scored(state, first), first, turn).end(loop, *([] if counted else [(turn + 1) * step <= position]))
  stored = end(out[t, h, *own[1:]].store(combined(made.after(done)).cast(out.dtype)), *inside)
  threads = divisor(T, cores) if T >= 8 else 1
  opts = (Opt(OptOps.THREAD, 0, threads),) if threads > 1 else ()
  outside = (t, h) if cores else (t, h, share, lane)
  return end(stored, *outside).sink(arg=KernelInfo(name="attend", opts_to_apply=opts))
