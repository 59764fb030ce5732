"""RoPE with the write of K and V, and paged attention (Kwon et al. 2023, arXiv:2309.06180), for any device. The kernels
read K and V through the block table, without a copy of the context. Reads must use the tensors that a write returns,
because these carry the order.

qkv: (T, (H + 2 KV) * D), a flat batch. tokens: (columns of TOKENS, T) int32. rope: (length, 2, D / 2), cosines and
sines. block_tables: (slots, max_blocks) int32. G = H / KV query heads share a K/V head. Cache: see kv_cache.py."""
import dataclasses, functools, math
from collections.abc import Callable
from typing import Any

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, Ops

from tinyvllm.backend import cpu_cores, renderer

from .kv_cache import SMALLEST, pack, unpack
from .schedule import (DEFAULT_OPTIONS, LOWEST, ScoreOptions, State, axes, axis, divisor, end, field, fold, kernel_of,
                       lane_axis, largest, location, mean, rotate, separate, shared_by, unrolled)


def rotate_and_write(qkv: Tensor, cache: list[Tensor], rope: Tensor, tokens: Tensor, num_heads: int,
                     kernel: Callable[..., UOp]) -> tuple[Tensor, list[Tensor]]:
  """Run a rope_kernel. Return q, (T, KV, G, D), and the cache after the write."""
  KV = cache[0].shape[1]
  D = qkv.shape[1] // (num_heads + 2 * KV)
  q = Tensor.empty(qkv.shape[0], KV, num_heads // KV, D, dtype=qkv.dtype, device=qkv.device)
  q, *cache = q.custom_kernel(*cache, qkv, rope, tokens, fxn=kernel)[:-3]
  return q, cache


def read(q: Tensor, cache: list[Tensor], tokens: Tensor, block_tables: Tensor, options: ScoreOptions,
         sinks: list[Tensor]) -> Tensor:
  """Attend to the cache. q: (T, KV, G, D). sinks: none, or one tensor, (H,). Return q's shape."""
  kernel = functools.partial(attend_kernel, options=options)
  return q.empty_like().custom_kernel(q, *cache, block_tables, tokens, *sinks, fxn=kernel)[0]


def rope_kernel(q: UOp, keys: UOp, values: UOp, *rest: UOp) -> UOp:
  """Rotate the first half of each head of q and k with the second, and write k and v to their blocks.
  q: (T, KV, G, D), output. rest: scales (int8 only), qkv, rope, tokens."""
  *scales, qkv, rope, tokens = rest
  sizes: Any = q.shape
  T, KV, G, D = sizes
  num_blocks, _, elements, BS = keys.shape
  n = D // elements   # dimensions per element
  t, h, i = axes(0, T, KV, elements // 2)
  block, position, offset = location(tokens, t, num_blocks, BS)

  def plain(head, i): return tuple(qkv[t, head * D + d].float() for d in (i, i + D // 2))
  def rotated(head, i): return rotate(*plain(head, i), *[rope[position % rope.shape[0], z, i] for z in range(2)])

  stores = []
  dimensions = [i * n + j for j in range(n)]
  for g in range(G):
    for d in dimensions:
      stores += [q[t, h, g, d + z * (D // 2)].store(x.cast(q.dtype)) for z, x in enumerate(rotated(h * G + g, d))]
  for kv, (source, head) in enumerate([(rotated, KV * G + h), (plain, KV * G + KV + h)]):   # K and V
    pairs = [source(head, d) for d in dimensions]
    if scales:
      highest = fold(largest(source(head, unrolled(D // 2, 8, 3 + 2 * kv))), Ops.MAX)
      scale = highest.maximum(SMALLEST) / 127
      stores.append(scales[0][block, h, kv, offset].store(scale))   # once per i
      pairs = [tuple(x / scale for x in pair) for pair in pairs]
    for z, numbers in enumerate(zip(*pairs, strict=True)):
      d = i + z * (elements // 2)
      cell = values[block, h, offset, d] if kv else keys[block, h, d, offset]
      stores.append(cell.store(pack(numbers, keys.dtype, bool(scales))))
  return kernel_of("rope_and_write", UOp.group(*stores))


def tiling(T: Any, G: Any, D: Any, block_size: Any) -> tuple[int, int, int]:
  """Choose how a work group iterates over a context, D positions at a time. Each lane scores a few positions for all G
  queries, then sums a few dimensions of V, so that lanes share loads.
  Return positions (and dimensions) per lane, the unroll factor of inner loops, and the number of splits of a token's
  context (split-KV, for few tokens). GPU values were measured on an H200 (tests/benchmarks/LOG.md)."""
  if cpu_cores(): return D // math.gcd(D, 16, block_size), 1, 1   # lanes are SIMD
  width = math.gcd(D, block_size, 4 if T > 64 else 2)
  lanes = 512 if T <= 8 and G == 1 else 256
  limit = 2048 if renderer().tensor_cores else 1024   # 12 bytes each in GroupState; WebGPU has 16 KiB shared memory
  return width, 64 // width, 1 if T > 64 else max(1, min(lanes // D, limit // (G * D)))


@dataclasses.dataclass(frozen=True)
class GroupState(State):
  """A work group's accumulators. total, scores, weights: (splits, G, D). highest, weight: (G,)."""
  scores: UOp    # q . k in this iteration
  weights: UOp   # exp2(score - highest)


class WorkGroup:
  """A token, a K/V head, and the axes of the lanes that attend to the token's context. scales: one tensor for int8,
  else empty. table: block_tables."""
  def __init__(self, q: UOp, scales: list[UOp], table: UOp, tokens: UOp, block_size: int, options: ScoreOptions):
    self.q, self.scales, self.table, self.block_size, self.options = q, scales, table, block_size, options
    sizes: Any = q.shape
    T, KV, G, D = sizes
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


def attend_kernel(out: UOp, q: UOp, keys: UOp, values: UOp, *rest: UOp,
                  options: ScoreOptions = DEFAULT_OPTIONS) -> UOp:
  """Compute causal attention of each token over its own sequence, up to the sequence's length. out: (T, KV, G, D).
  rest: see separate."""
  scales, table, tokens, sinks = separate(rest)
  sizes: Any = q.shape
  T, KV, G, D = sizes
  BS: Any = keys.shape[3]
  group = WorkGroup(q, scales, table, tokens, BS, options)
  size = (group.splits, G, D)
  accumulators = {"scores": size, "weights": size, "total": size, "highest": (G,), "weight": (G,)}
  arrays = {name: UOp.placeholder(size, dtypes.float32, 100 + i, lane_axis()[1] if len(size) > 1 else AddrSpace.REG)
            for i, (name, size) in enumerate(accumulators.items())}
  state = GroupState(iteration=UOp.placeholder((1,), dtypes.int32, 105, AddrSpace.REG), **arrays)
  loop = UOp.loop(5)
  current = state.after(state.iteration.after(group.t, group.h)[0].store(0), loop)
  iteration = current.index(-(-table.shape[1] * BS // (group.splits * D)))
  stores = add_values(group, add_scores(group, current, keys, iteration), values, iteration)
  state = state.after(UOp.group(*stores).end(loop, group.start + (iteration + 1) * group.splits * D <= group.position))
  threads = divisor(T, cpu_cores()) if T * KV * G * D > 2**12 else 1
  mean_value = result(group, state, sinks).cast(out.dtype)
  return kernel_of("attend", out[group.t, group.h, *group.own[1:]].store(mean_value), shared_by(threads))


def add_scores(group: WorkGroup, state: GroupState, keys: UOp, iteration: UOp) -> GroupState:
  """Score D positions."""
  D: Any = group.q.shape[3]
  BS = group.block_size
  n = D // keys.shape[2]   # dimensions in an element
  at = group.start + (iteration * group.splits + group.split) * D + group.first
  d = unrolled(D, group.unroll, 6)
  # Load whole blocks; on a CPU without the condition, which clang would turn into branches
  exists = (at // BS * BS <= group.position) | bool(cpu_cores())
  k = unpack(group.load(keys, at, d // n * BS + at % BS + group.near, exists), d % n, bool(group.scales))
  score = fold(group.q[group.t, group.h, group.g, d].float() * k) * group.options.factor(D)
  for scale in group.scales: score *= group.load(scale, at, at % BS + group.near, exists)
  score = group.options.masked(score, group.position, at + group.near)
  return dataclasses.replace(state, scores=state.scores.after(end(state.scores[group.own].store(score))))


def add_values(group: WorkGroup, state: GroupState, values: UOp, iteration: UOp) -> list[UOp]:
  """Return the stores of online softmax: rescale the accumulators, and add the weighted V of the scored positions."""
  D: Any = group.q.shape[3]
  n = D // values.shape[3]   # dimensions in an element
  split, g, d = group.own
  def previous(x, initial): return (iteration < 1).where(initial, x)
  def add(x, terms): return end(x.store(previous(x * rescale, 0.0) + fold(terms)))
  highest = previous(state.highest[g], LOWEST).maximum(fold(state.scores[split, g, unrolled(D, 32, 8)], Ops.MAX))
  rescale = (state.highest[g] - highest).exp2()
  weights = state.weights.after(end(state.weights[group.own].store((state.scores[group.own] - highest).exp2())))
  i = unrolled(D, group.unroll, 10)
  at = group.start + (iteration * group.splits + split) * D + i
  offset = at % group.block_size
  is_visible = group.options.sees(group.position, at)
  v = unpack(group.load(values, at, offset * values.shape[3] + d // n, is_visible), d % n, bool(group.scales))
  for scale in group.scales: v *= group.load(scale, at, group.block_size + offset, is_visible)
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
