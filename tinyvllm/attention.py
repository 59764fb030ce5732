"""RoPE with the write of K and V, and paged attention (Kwon et al. 2023, arXiv:2309.06180). K and V are written by slot
and read through the block table, so that nothing copies the context. A tensor that a write returns carries the order:
what reads after must use it.

tokens: (T, fields of TOKEN) int32, a flat batch. keys: (num_blocks, KV, D, block_size), values: (num_blocks, KV,
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

POSITION, SLOT, ROW = [TOKEN.names.index(name) for name in ("position", "slot", "row")]
LOWEST = -1e30   # a score that weighs nothing, and yet is no infinity: inf - inf is not a number


def rope_kernel(q: UOp, keys: UOp, values: UOp, qkv: UOp, rope: UOp, tokens: UOp) -> UOp:
  """Turn q and k by their positions, the first half of each head against the second (Su et al. 2021), and store k and v
  at their slots. q: (T, KV, G, D), filled. qkv: (T, (KV * G + 2 KV) * D). rope: (length, 2, D/2), cosines and sines."""
  T, KV, G, D = q.shape
  pages, _, BS, _ = values.shape
  t, h, i = [UOp.range(extent, n) for n, extent in enumerate((T, KV, D // 2))]
  position = tokens[t, POSITION].cast(dtypes.weakint) % rope.shape[0]
  slot = tokens[t, SLOT].cast(dtypes.weakint)
  page = slot // BS % pages
  offset = slot % BS
  cos, sin = rope[position, 0, i], rope[position, 1, i]
  halves = (i, i + D // 2)

  def turned(head: UOp) -> list[UOp]:
    a, b = [qkv[t, head * D + d].cast(dtypes.float32) for d in halves]
    return [(a * cos - b * sin).cast(q.dtype), (b * cos + a * sin).cast(q.dtype)]
  stores = [q[t, h, g, d].store(x) for g in range(G) for d, x in zip(halves, turned(h * G + g), strict=True)]
  stores += [keys[page, h, d, offset].store(x) for d, x in zip(halves, turned(KV * G + h), strict=True)]
  stores += [values[page, h, offset, d].store(qkv[t, (KV * G + KV + h) * D + d]) for d in halves]
  return UOp.group(*stores).end(t, h, i).sink(arg=KernelInfo(name="rope_and_write"))


class Tiling(NamedTuple):
  """How a work group, which has a token and a K/V head, goes over the token's sequence. Its lanes score `positions` at
  once for all G queries, and then sum as many dimensions of V, so that these share what is read."""
  lanes: int
  positions: int
  wide: int     # neighbouring positions, and then dimensions, of a lane of a GPU
  unroll: int   # rounds of an inner loop at once
  shares: int   # sets of lanes, each with positions of its own, which few tokens are worth


def choose_tiling(T: int, G: int, D: int, BS: int, cores: int) -> Tiling:
  """Tried on an H200 (tests/benchmarks/LOG.md); on a CPU lanes are SIMD."""
  simd = math.gcd(D, 16, BS)
  if cores: return Tiling(simd, simd, wide=1, unroll=1, shares=1)
  wide = math.gcd(D, BS, 4 if T > 64 else 2)
  shares = 1 if T > 64 else max(1, min(256 // D, 1024 // (G * D)))
  return Tiling(D // wide, D, wide, 64 // wide, shares)


class State(NamedTuple):
  """Online softmax in float32 (Dao et al. 2022), for each share and query g: what was summed, up to the highest score so
  far, of the turns of the loop before."""
  scores: UOp    # (shares, G, positions): of this turn
  weights: UOp   # (shares, G, positions): exp2(score - highest)
  total: UOp     # (shares, D / lanes, G, lanes): of weights times V
  highest: UOp   # (G,)
  weight: UOp    # (G,): the weights' sum
  turns: UOp     # (1,): done

  @classmethod
  def make(cls, tile: Tiling, G: int, D: int, shared: AddrSpace) -> "State":
    scored = (tile.shares, G, tile.positions)
    sizes = (scored, scored, (tile.shares, D // tile.lanes, G, tile.lanes), (G,), (G,), (1,))
    spaces = [shared] * 3 + [AddrSpace.REG] * 3   # registers: of each lane its own
    kinds = [dtypes.float32] * 5 + [dtypes.int32]
    return cls(*[UOp.placeholder(size, kind, 100 + i, space)   # tinygrad numbers its own from 0
                 for i, (size, kind, space) in enumerate(zip(sizes, kinds, spaces, strict=True))])

  def after(self, *done: UOp) -> "State": return State(*[x.after(*done) for x in self])


class Work(NamedTuple):
  """A work group's axes, and what its token says."""
  t: UOp
  h: UOp
  g: UOp
  share: UOp
  lane: UOp
  part: UOp       # of the dimensions, or positions, of a lane
  position: UOp   # the token's
  row: UOp        # of the table
  tile: Tiling
  simd: bool

  # What a loop over a lane's numbers ends: on a CPU the lanes with it
  inside = property(lambda self: (self.lane,) if self.simd else ())
  scored = property(lambda self: (self.g, self.lane) if self.simd else (self.g, self.part))

  @property
  def own(self) -> UOp:
    """The position of a turn that a lane scores."""
    return self.lane if self.simd else self.lane * self.tile.wide + self.part

  @property
  def dimension(self) -> UOp:
    """The dimension of V that it sums."""
    return self.part * self.tile.lanes + self.lane if self.simd else self.own


def _block(work: Work, cache: UOp, table: UOp, block_size: int, position: UOp) -> UOp:
  """Where the block of a position begins in a cache, seen flat."""
  block = table[work.row, (position // block_size).minimum(table.shape[1] - 1)].cast(dtypes.weakint)
  return (block % cache.shape[0] * cache.shape[1] + work.h) * cache.shape[2] * cache.shape[3]


def _score(work: Work, state: State, q: UOp, keys: UOp, table: UOp, first: UOp) -> State:
  """The scores of the positions from `first` on: q . k / sqrt(D), in bits, as exp2 is what a device has."""
  *_, D, BS = keys.shape
  near, far = (work.lane, first) if work.simd else (work.part, first + work.lane * work.tile.wide)
  d, over = unrolled(D, work.tile.unroll, 6)
  index = _block(work, keys, table, BS, far) + d * BS + far % BS + near
  whole = index.valid(far // BS * BS <= work.position)   # neighbours are in one block, which is read as a whole
  k = keys.base.index(whole).cast(dtypes.float32)
  score = fold(Ops.ADD, q[work.t, work.h, work.g, d].cast(dtypes.float32) * k, *over) * (math.log2(math.e) / math.sqrt(D))
  seen = (far + near <= work.position).where(score, LOWEST)   # what is not may be anything, NaN too
  stored = end(state.scores[work.share, work.g, work.own].store(seen), *work.scored)
  return state._replace(scores=state.scores.after(stored))


def _accumulate(work: Work, state: State, values: UOp, table: UOp, first: UOp, turn: UOp) -> UOp:
  """Add V by the weights that the scores give. Returns the stores of a turn."""
  tile, g = work.tile, work.g
  *_, BS, D = values.shape
  def before(x: UOp, unset: float) -> UOp: return (turn < 1).where(unset, x)
  i, over = unrolled(tile.positions, 32, 8)
  top = before(state.highest[g], LOWEST).maximum(fold(Ops.MAX, state.scores[work.share, g, i], *over))
  fade = (state.highest[g] - top).exp2()
  weight = (state.scores[work.share, g, work.own] - top).exp2()
  weights = state.weights.after(end(state.weights[work.share, g, work.own].store(weight), *work.scored))
  i, over = unrolled(tile.positions, tile.unroll, 10)
  near, far = (i, first) if work.simd else (0, first + i)
  index = _block(work, values, table, BS, far) + (far % BS + near) * D + work.dimension
  v = values.base.index(index.valid(far + near <= work.position)).cast(dtypes.float32)
  w = weights[work.share, g, i]
  total = state.total[work.share, work.part, g, work.lane]
  return UOp.group(
    end(total.store(before(total * fade, 0.0) + fold(Ops.ADD, w * v, *over)), work.part, g, *work.inside),
    state.weight[g].store(before(state.weight[g] * fade, 0.0) + fold(Ops.ADD, w, *over)).end(g),
    state.highest[g].store(top).end(g),
    state.turns[0].store(state.turns[0].load() + 1))


def _combine(work: Work, state: State) -> UOp:
  """The mean of V over all shares, which are put together by the logarithms of their weights' sums."""
  mean = state.total[work.share, work.part, work.g, work.lane] / state.weight[work.g]
  if work.tile.shares == 1: return mean
  log_sum = state.highest[work.g] + state.weight[work.g].log2()
  done = UOp.group(state.scores[work.share, work.g, work.lane].store(log_sum).end(work.g),
                   state.total[work.share, work.part, work.g, work.lane].store(mean).end(work.g))
  state = state.after(done)
  sums = [state.scores[i, work.g, work.lane] for i in range(work.tile.shares)]
  fades = [(x - functools.reduce(UOp.maximum, sums)).exp2() for x in sums]
  means = [state.total[i, work.part, work.g, work.lane] for i in range(work.tile.shares)]
  return sum(fade * x for fade, x in zip(fades, means, strict=True)) / sum(fades)


def attend_kernel(out: UOp, q: UOp, keys: UOp, values: UOp, table: UOp, tokens: UOp) -> UOp:
  """Causal attention of each token over its own sequence: no memory but for out, (T, KV, G, D), and no work beyond the
  sequence's length."""
  T, KV, G, D = q.shape
  BS = keys.shape[3]
  cores = cpu_cores()
  tile = choose_tiling(T, G, D, BS, cores)
  kind, space = lane_axis()
  t, h = UOp.range(T, 0), UOp.range(KV, 1)
  position, row = [tokens[t, field].load().cast(dtypes.weakint) for field in (POSITION, ROW)]
  work = Work(t, h, g=UOp.range(G, 2, AxisType.UPCAST), share=axis(tile.shares, 3, AxisType.LOCAL),
              lane=UOp.range(tile.lanes, 4, kind), part=axis(D // tile.lanes, 12, AxisType.UPCAST),
              position=position, row=row % table.shape[0], tile=tile, simd=cores > 0)
  made = State.make(tile, G, D, space)
  step = tile.shares * tile.positions
  most = -(-table.shape[1] * BS // step)
  counted = DEV.renderer == "X86"   # tinygrad's assembler knows no loop that ends by a condition
  loop = UOp.range(most, 5) if counted else UOp.loop(5)
  state = made.after(made.turns.after(t, h)[0].store(0), loop)
  turn = state.turns[0].load().cast(dtypes.weakint) % most   # so that 32 bits hold all that is computed of it
  first = turn * step + work.share * tile.positions
  state = _score(work, state, q, keys, table, first)
  done = _accumulate(work, state, values, table, first, turn)
  done = done.end(loop) if counted else done.end(loop, (turn + 1) * step <= position)
  mean = _combine(work, made.after(done)).cast(out.dtype)
  stored = end(out[t, h, work.g, work.dimension].store(mean), work.part, work.g, *work.inside)
  threads = divisor(T, cores) if T >= 8 else 1
  opts = (Opt(OptOps.THREAD, 0, threads),) if threads > 1 else ()
  outside = (t, h) if work.simd else (t, h, work.share, work.lane)
  return end(stored, *outside).sink(arg=KernelInfo(name="attend", opts_to_apply=opts))
