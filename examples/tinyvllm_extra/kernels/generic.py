"""RoPE with the write of K and V, and paged attention (Kwon et al. 2023, arXiv:2309.06180), for any device. The kernels
read K and V through the block table, without a copy of the context. Reads must use the tensors that a write returns,
because these carry the order.

qkv: (T, (H + 2 KV) * D), a flat batch. tokens: (columns of TOKENS, T) int32. rope: (length, 2, D / 2), cosines and
sines. block_tables: (slots, max_blocks) int32. G = H / KV query heads share a K/V head. Cache: see
models/kv_cache.py."""
import functools, math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, Ops

from tinyvllm.backend import cpu_cores, renderer
from tinyvllm_extra.models.kv_cache import SMALLEST, dimensions_in, pack, unpack

from .schedule import (LOWEST, ScoreOptions, axes, axis, call, divisor, end, field, fold, kernel_of, lane_axis,
                       largest, mean, shared_by, unrolled)


def rotate_and_write(qkv: Tensor, cache: list[Tensor], rope: Tensor, tokens: Tensor, num_heads: int,
                     writer: "type[HeadWriter]") -> tuple[Tensor, list[Tensor]]:
  """Run a HeadWriter. Return q, (T, KV, G, D), and the cache after the write."""
  KV = cache[0].shape[1]
  D = qkv.shape[1] // (num_heads + 2 * KV)
  q = Tensor.empty(qkv.shape[0], KV, num_heads // KV, D, dtype=qkv.dtype, device=qkv.device)
  q, *cache = q.custom_kernel(*cache, qkv, rope, tokens, fxn=functools.partial(rope_kernel, writer=writer))[:-3]
  return q, cache


def read(tensors: dict[str, Tensor], options: ScoreOptions) -> Tensor:
  """Attend to the cache. tensors: out and q, (T, KV, G, D), keys, values and scales (int8 only) of the cache, table,
  (slots, max_blocks), tokens, and sinks, (H,), if there are any. Return `out`."""
  def run(operands: dict[str, UOp]) -> UOp: return attend_kernel(options, **operands)
  return call(run, **tensors)[0]


class HeadWriter:
  """Rotates q and k of a token and a K/V head, and writes k and v to the token's block. RoPE rotates the first half of
  a head with the second. inputs: q, (T, KV, G, D), as output; keys, values, scales (int8 only), qkv, rope, tokens."""
  def __init__(self, *inputs: UOp):
    self.q, self.keys, self.values, *self.scales, self.qkv, self.rope, tokens = inputs
    self.T, self.KV, self.G, self.D = self.q.max_shape
    self.in_element = dimensions_in(self.keys.dtype)
    self.t, self.h, self.dimensions = self.lane()
    self.block = field(tokens, "block", self.t) % self.keys.shape[0]
    self.position = field(tokens, "position", self.t)
    self.offset = self.position % self.keys.shape[3]

  def lane(self) -> tuple[UOp, UOp, list[UOp]]:
    """Return the lane's token, K/V head, and dimensions in the first half of a head."""
    n = self.in_element
    t, h, i = axes(0, self.T, self.KV, self.D // n // 2)
    return t, h, [i * n + j for j in range(n)]

  def cell(self, kv: int, d: UOp) -> UOp:
    """Return the d-th element of the head in the cache, of K (kv 0) or V (1)."""
    if kv: return self.values[self.block, self.h, self.offset, d]
    return self.keys[self.block, self.h, d, self.offset]

  def highest(self, kv: int) -> UOp:
    """Return the largest absolute value in the head."""
    return fold(largest(self.pair(kv, unrolled(self.D // 2, 8, 3 + 2 * kv))), Ops.MAX)

  def numbers(self, head: UOp, i: UOp, is_rotated: bool = True) -> Sequence[UOp]:
    """Return the i-th numbers of both halves of a head, with RoPE (Su et al. 2021, arXiv:2104.09864)."""
    a, b = [self.qkv[self.t, head * self.D + d].float() for d in (i, i + self.D // 2)]
    cos, sin = [self.rope[self.position % self.rope.shape[0], z, i] for z in range(2)]
    return [a * cos - b * sin, b * cos + a * sin] if is_rotated else [a, b]

  def pair(self, kv: int, i: UOp) -> Sequence[UOp]:
    """Return the i-th numbers of both halves of K (kv 0) or V (1)."""
    return self.numbers(self.KV * (self.G + kv) + self.h, i, not kv)

  def stores(self) -> Iterator[UOp]:
    h, half_size, n = self.h, self.D // 2, self.in_element
    for g in range(self.G):
      pairs = [self.numbers(h * self.G + g, d) for d in self.dimensions]
      for z, half in enumerate(zip(*pairs, strict=True)):
        for d, number in zip(self.dimensions, half, strict=True):
          yield self.q[self.t, h, g, z * half_size + d].store(number.cast(self.q.dtype))
    for kv in range(2):
      pairs = [self.pair(kv, d) for d in self.dimensions]
      for scales in self.scales:
        scale = self.highest(kv).maximum(SMALLEST) / 127
        yield scales[self.block, h, kv, self.offset].store(scale)   # by every lane of the head
        pairs = [[x / scale for x in pair] for pair in pairs]
      for z, half in enumerate(zip(*pairs, strict=True)):
        for j in range(0, len(half), n):
          element = pack(half[j:j + n], self.keys.dtype, bool(self.scales))
          yield self.cell(kv, (z * half_size + self.dimensions[j]) // n).store(element)


def rope_kernel(*inputs: UOp, writer: type[HeadWriter] = HeadWriter) -> UOp:
  return kernel_of("rope_and_write", UOp.group(*writer(*inputs).stores()))


def tiling(T: int, G: int, D: int, block_size: int) -> tuple[int, int, int]:
  """Choose how a work group iterates over a context, D positions at a time. Each lane scores a few positions for all G
  queries, then sums a few dimensions of V, so that lanes share loads.
  Return positions (and dimensions) per lane, the unroll factor of inner loops, and the number of splits of a token's
  context (split-KV, for few tokens). GPU values were measured on an H200 (tests/benchmarks/LOG.md)."""
  if cpu_cores(): return D // math.gcd(D, 16, block_size), 1, 1   # lanes are SIMD
  width = math.gcd(D, block_size, 4 if T > 64 else 2)
  limit = 2048 if renderer().tensor_cores else 1024   # 12 bytes each in GroupState; WebGPU has 16 KiB shared memory
  return width, 64 // width, 1 if T > 64 else max(1, min(256 // D, limit // (G * D)))


class GroupState(NamedTuple):
  """A work group's accumulators of online softmax, in float32 (Dao et al. 2022, arXiv:2205.14135). total, scores,
  weights: (splits, G, D). highest, weight: (G,)."""
  total: UOp     # weighted sum of V
  highest: UOp   # highest score
  weight: UOp    # sum of the weights
  scores: UOp    # q . k in this iteration
  weights: UOp   # exp2(score - highest)
  iteration: UOp # (1,) int32

  def after(self, *stores: UOp) -> "GroupState":
    return GroupState(*[x.after(*stores) for x in self])


class WorkGroup:
  """A token, a K/V head, and the axes of the lanes that attend to the token's context. scales: one tensor for int8,
  else empty. table: block_tables."""
  def __init__(self, q: UOp, scales: list[UOp], table: UOp, tokens: UOp, block_size: int, options: ScoreOptions):
    self.q, self.scales, self.table, self.block_size, self.options = q, scales, table, block_size, options
    T, KV, G, D = q.max_shape
    width, self.unroll, self.splits = tiling(T, G, D, block_size)
    self.t, self.h = axes(0, T, KV)
    self.g = UOp.range(G, 2, AxisType.UPCAST)                       # one of the K/V head's G query heads
    self.split = axis(self.splits, 3, AxisType.LOCAL)
    lane = UOp.range(D // width, 4, lane_axis()[0])
    i = axis(width, 12, AxisType.UPCAST)
    # A lane's positions, or dimensions of V, are first + near
    self.near = lane if cpu_cores() else i
    self.first = i * (D // width) if cpu_cores() else lane * width
    self.own = self.split, self.g, self.first + self.near
    self.position = field(tokens, "position", self.t)
    self.slot = field(tokens, "slot", self.t)
    self.start = options.first_block(self.position, table.shape[1], block_size) * block_size   # first position to score

  def load(self, tensor: UOp, at: UOp, index: UOp, is_visible: UOp) -> UOp:
    """Load from the block of position `at`, or 0 if it is not visible. index: within the block's head."""
    num_blocks, KV, *size = tensor.shape
    slots, max_blocks = self.table.shape
    i = (at // self.block_size).minimum(max_blocks - 1)
    block = self.table[self.slot % slots, i].cast(dtypes.weakint) % num_blocks
    return tensor.base.index(((block * KV + self.h) * math.prod(size) + index).valid(is_visible)).load()


def attend_kernel(options: ScoreOptions, out: UOp, q: UOp, keys: UOp, values: UOp, table: UOp, tokens: UOp,
                  scales: UOp | None = None, sinks: UOp | None = None) -> UOp:
  """Compute causal attention of each token over its own sequence, up to the sequence's length. See read."""
  group = WorkGroup(q, [] if scales is None else [scales], table, tokens, keys.max_shape[3], options)
  mean_value = result(group, accumulate(group, keys, values), [] if sinks is None else [sinks]).cast(out.dtype)
  threads = divisor(q.shape[0], cpu_cores()) if q.numel() > 2**12 else 1
  return kernel_of("attend", out[group.t, group.h, *group.own[1:]].store(mean_value), shared_by(threads))


def accumulate(group: WorkGroup, keys: UOp, values: UOp) -> GroupState:
  """Attend to the context, D positions per iteration."""
  _, _, G, D = group.q.max_shape
  size = (group.splits, G, D)
  scores, weights, total = [UOp.placeholder(size, dtypes.float32, 100 + i, lane_axis()[1]) for i in range(3)]
  highest, weight = [UOp.placeholder((G,), dtypes.float32, 103 + i, AddrSpace.REG) for i in range(2)]
  iteration = UOp.placeholder((1,), dtypes.int32, 105, AddrSpace.REG)
  state = GroupState(total, highest, weight, scores, weights, iteration)
  loop = UOp.loop(5)
  current = state.after(state.iteration.after(group.t, group.h)[0].store(0), loop)
  # The limit keeps index arithmetic in 32 bits
  limit = -(-group.table.shape[1] * group.block_size // (group.splits * D))
  iteration = current.iteration[0].load().cast(dtypes.weakint) % limit
  stores = add_values(group, add_scores(group, current, keys, iteration), values, iteration)
  next_position = group.start + (iteration + 1) * group.splits * D
  return state.after(UOp.group(*stores).end(loop, next_position <= group.position))


def add_scores(group: WorkGroup, state: GroupState, keys: UOp, iteration: UOp) -> GroupState:
  """Score D positions."""
  D = group.q.max_shape[3]
  BS = group.block_size
  n = dimensions_in(keys.dtype)
  at = group.start + (iteration * group.splits + group.split) * D + group.first
  d = unrolled(D, group.unroll, 6)
  # Load whole blocks; on a CPU without the condition, which clang would turn into branches
  exists = (at // BS * BS <= group.position) | bool(cpu_cores())
  element = group.load(keys, at, d // n * BS + at % BS + group.near, exists)
  k = unpack(element, d % n, bool(group.scales))
  score = fold(group.q[group.t, group.h, group.g, d].float() * k) * group.options.factor(D)
  for scale in group.scales: score *= group.load(scale, at, at % BS + group.near, exists)
  score = group.options.masked(score, group.position, at + group.near)
  return state._replace(scores=state.scores.after(end(state.scores[group.own].store(score))))


def add_values(group: WorkGroup, state: GroupState, values: UOp, iteration: UOp) -> list[UOp]:
  """Return the stores of online softmax: rescale the accumulators, and add the weighted V of the scored positions."""
  D = group.q.max_shape[3]
  n = dimensions_in(values.dtype)
  split, g, d = group.own
  def previous(x, initial): return (iteration < 1).where(initial, x)
  def add(x, terms): return end(x.store(previous(x * rescale, 0.0) + fold(terms)))
  highest = previous(state.highest[g], LOWEST).maximum(fold(state.scores[split, g, unrolled(D, 32, 8)], Ops.MAX))
  rescale = (state.highest[g] - highest).exp2()
  weights = state.weights.after(end(state.weights[group.own].store((state.scores[group.own] - highest).exp2())))
  i = unrolled(D, group.unroll, 10)
  at = group.start + (iteration * group.splits + split) * D + i
  is_visible = group.options.sees(group.position, at)
  v = group.load(values, at, at % group.block_size * values.shape[3] + d // n, is_visible)
  v = unpack(v, d % n, bool(group.scales))
  for scale in group.scales: v *= group.load(scale, at, group.block_size + at % group.block_size, is_visible)
  weight = weights[split, g, i]
  return [add(state.total[group.own], weight * v), add(state.weight[g], weight), end(state.highest[g].store(highest)),
          state.iteration[0].store(state.iteration[0].load() + 1)]


def result(group: WorkGroup, state: GroupState, sinks: list[UOp]) -> UOp:
  """Return the weighted mean of V over all splits."""
  own = state.total[group.own] / state.weight[group.g]
  if group.splits == 1 and not sinks: return own
  log = state.scores[group.own].store(state.highest[group.g] + state.weight[group.g].log2())
  state = state.after(UOp.group(end(log), end(state.total[group.own].store(own))))
  values, logs = [[x[i, *group.own[1:]] for i in range(group.splits)] for x in (state.total, state.scores)]
  return mean(values, logs, sinks, group.h * group.q.shape[2] + group.g)
