"""RoPE with the write of K and V, and paged attention (Kwon et al. 2023, arXiv:2309.06180) for any device, as UOps that
state their schedule: work groups share a token's context, a lane has several of its positions, and cores several
tokens. K and V are written to blocks and read through their table, so that nothing copies the context. A tensor that
a write returns carries the order: what reads after must use it. K and V may be of 8 bits, too.

tokens: (fields of TOKEN, T) int32, a flat batch. keys: (num_blocks, KV, D, block_size), values: (num_blocks, KV,
block_size, D), so that neighbours in memory are what neighbouring lanes read. table: (rows, max_blocks). G query heads
share a K/V head.

Of 8 bits the elements of a block are uint8, or four dimensions to a uint32: a byte is an e4m3 (Micikevicius et al.
2022, arXiv:2209.05433), or, where there are scales, 128 + number / scale. scales: of each token and head, (num_blocks,
KV, 2, block_size), for K and for V."""
import functools, importlib, itertools, math
from typing import Any, NamedTuple

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType, Ops

from tinyvllm.backend import cpu_cores, renderer
from tinyvllm.config import EngineConfig, ModelConfig

from .schedule import LOWEST, axes, axis, divisor, end, field, fold, kernel_of, lane_axis, shared_by, unrolled

SMALLEST = 1e-30   # of the largest number that a scale is for: nothing is divided by 0


def in_8_bits() -> Any: return importlib.import_module("tinyvllm_extra.kernels.kv_cache")   # when it is needed


def block_parts(model: ModelConfig, config: EngineConfig, dtype: DType) -> list[tuple[tuple[int, ...], DType]]:
  """K, (n_kv_heads, head_dim, block_size), V, its last axes the other way round; of 8 bits with scales, (n_kv_heads, 2,
  block_size), if there are any. Raises ValueError for what the device, or the model, cannot have."""
  KV = model.num_key_value_heads
  D = model.head_dim
  if config.kv_cache_dtype == "auto": return [((KV, D, config.block_size), dtype), ((KV, config.block_size, D), dtype)]
  return in_8_bits().block_parts(config.kv_cache_dtype, KV, D, config.block_size)


def attend(q: Tensor, cache: list[Tensor], qkv: Tensor, rope: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
  q, *cache = q.custom_kernel(*cache, qkv, rope, tokens, fxn=rope_kernel)[:-3]
  return q.empty_like().custom_kernel(q, *cache, table, tokens, fxn=attend_kernel)[0]


def number(element: UOp, i: UOp, scaled: bool) -> UOp:
  """In float32 what an element of the cache holds; of 8 bits, and so of several neighbours along D, the i-th."""
  return element.float() if element.dtype in dtypes.floats else in_8_bits().number(element, i, scaled)


def rope_kernel(q: UOp, keys: UOp, values: UOp, *rest: UOp) -> UOp:
  """Turn q and k by their positions, the first half of each head against the second (Su et al. 2021), and store k and v
  in their blocks. q: (T, KV, G, D), filled. rest: scales, if there are any; qkv, (T, (KV * G + 2 KV) * D); rope,
  (length, 2, D / 2), of cos and sin; tokens."""
  *scales, qkv, rope, tokens = rest
  T, KV, G, D = q.shape
  pages, _, elements, BS = keys.shape
  together = D // elements   # neighbours in one element of the cache
  t, h, i = axes(0, T, KV, elements // 2)
  page = field(tokens, "block", t) % pages
  position = field(tokens, "position", t)
  offset = position % BS

  def plain(head, i): return [qkv[t, head * D + d].float() for d in (i, i + D // 2)]
  def turned(head, i):
    cos, sin = [rope[position % rope.shape[0], z, i] for z in range(2)]
    a, b = plain(head, i)
    return [a * cos - b * sin, b * cos + a * sin]

  stores = []
  near = [i * together + j for j in range(together)]
  for n, j in itertools.product(range(G), near):
    stores += [q[t, h, n, j + z * (D // 2)].store(x.cast(q.dtype)) for z, x in enumerate(turned(h * G + n, j))]
  for kind, (made, head) in enumerate([(turned, KV * G + h), (plain, KV * G + KV + h)]):   # K and V
    pairs = [made(head, j) for j in near]
    if scales:
      largest = UOp.maximum(*[x.maximum(-x) for x in made(head, unrolled(D // 2, 8, 3 + 2 * kind))])
      scale = fold(largest, Ops.MAX).maximum(SMALLEST) / 127
      stores.append(scales[0][page, h, kind, offset].store(scale))   # each i does
      pairs = [[x / scale for x in pair] for pair in pairs]
    for z, numbers in enumerate(zip(*pairs, strict=True)):
      d = i + z * (elements // 2)
      place = values[page, h, offset, d] if kind else keys[page, h, d, offset]
      whole = keys.dtype in dtypes.floats
      stores.append(place.store(numbers[0].cast(keys.dtype) if whole else in_8_bits().stored(
        numbers, keys.dtype, bool(scales))))
  return kernel_of("rope_and_write", UOp.group(*stores))


def tiling(T: Any, G: Any, D: Any, block_size: Any) -> tuple[int, int, int]:
  """How a work group, which has a token and a K/V head, goes over the token's sequence: D positions at a time. Its
  lanes score some each for all G queries, and then sum as many dimensions of V, so that these share what is read.
  Returns how many these parts of a lane are, how many rounds of an inner loop go at once, and the sets of lanes, each
  with positions of its own, that share a token, which few tokens are worth. On a CPU lanes are SIMD. What a GPU takes
  was tried on an H200 (tests/benchmarks/LOG.md)."""
  if cpu_cores(): return D // math.gcd(D, 16, block_size), 1, 1
  parts = math.gcd(D, block_size, 4 if T > 64 else 2)
  lanes = 512 if T <= 8 and G == 1 else 256
  most = 2048 if renderer().tensor_cores else 1024   # of State's numbers by 12 bytes: WebGPU has room for 16 KiB
  return parts, 64 // parts, 1 if T > 64 else max(1, min(lanes // D, most // (G * D)))


class State(NamedTuple):
  """Of online softmax in float32 (Dao et al. 2022), for each share and query g."""
  scores: UOp    # (shares, G, D): of this turn of the loop
  weights: UOp   # (shares, G, D): exp2(score - highest)
  total: UOp     # (shares, G, D): V summed by its weights
  highest: UOp   # (G,): of the scores so far
  weight: UOp    # (G,): the weights' sum

  def after(self, *done: UOp) -> "State": return State(*[x.after(*done) for x in self])


def attend_kernel(out: UOp, q: UOp, keys: UOp, values: UOp, *rest: UOp) -> UOp:
  """Causal attention of each token over its own sequence: no memory but for out, (T, KV, G, D), and no work beyond the
  sequence's length. rest: scales, if there are any; table, tokens."""
  *scales, table, tokens = rest
  T, KV, G, D = q.shape
  pages, _, elements, BS = keys.shape
  together = D // elements   # neighbours in one element of the cache
  rows, max_blocks = table.shape
  parts, unroll, shares = tiling(T, G, D, BS)
  kind, shared = lane_axis()
  t, h = axes(0, T, KV)
  g = UOp.range(G, 2, AxisType.UPCAST)
  share = axis(shares, 3, AxisType.LOCAL)
  lane = UOp.range(D // parts, 4, kind)
  part = axis(parts, 12, AxisType.UPCAST)
  # Of what a lane has to do: neighbours in one block, and where these begin
  near, begin = (lane, part * (D // parts)) if cpu_cores() else (part, lane * parts)
  own = share, g, begin + near
  position, row = [field(tokens, name, t) for name in ("position", "row")]
  loop = UOp.loop(5)
  turns = UOp.placeholder((1,), dtypes.int32, 105, AddrSpace.REG)
  begun = turns.after(t, h)[0].store(0)
  done = turns.after(begun, loop)[0]
  # Of no more than there can be, so that 32 bits hold all that is computed of it
  turn = done.load().cast(dtypes.weakint) % -(-max_blocks * BS // (shares * D))
  first = (turn * shares + share) * D   # the first position of the share

  def read(cache, at, index, seen):
    page = table[row % rows, (at // BS).minimum(max_blocks - 1)].cast(dtypes.weakint) % pages
    return cache.base.index(((page * KV + h) * math.prod(cache.shape[2:]) + index).valid(seen)).load()

  def scored(state):
    """With the scores of D positions: q . k / sqrt(D), for exp2."""
    at = first + begin
    d = unrolled(D, unroll, 6)
    # A block is read as a whole; on a CPU without a question, which clang would make branches of
    there = (at // BS * BS <= position) | bool(cpu_cores())
    k = number(read(keys, at, d // together * BS + at % BS + near, there), d % together, bool(scales))
    score = fold(q[t, h, g, d].float() * k) * (math.log2(math.e) / math.sqrt(D))
    for scale in scales: score *= read(scale, at, at % BS + near, there)
    seen = (at + near <= position).where(score, LOWEST)   # what is not may be anything, NaN too
    return state._replace(scores=state.scores.after(end(state.scores[own].store(seen))))

  def summed(state):
    """The stores that add V by the weights of these scores to what the turns before have left."""
    def before(x, unset): return (turn < 1).where(unset, x)
    def add(x, terms): return end(x.store(before(x * fade, 0.0) + fold(terms)))
    top = before(state.highest[g], LOWEST).maximum(fold(state.scores[share, g, unrolled(D, 32, 8)], Ops.MAX))
    fade = (state.highest[g] - top).exp2()
    weights = state.weights.after(end(state.weights[own].store((state.scores[own] - top).exp2())))
    i = unrolled(D, unroll, 10)
    at = first + i
    w = weights[share, g, i]
    d = own[2]
    v = number(read(values, at, at % BS * elements + d // together, at <= position), d % together, bool(scales))
    for scale in scales: v *= read(scale, at, BS + at % BS, at <= position)
    return UOp.group(add(state.total[own], w * v), add(state.weight[g], w), end(state.highest[g].store(top)),
                     done.store(done.load() + 1))

  def combined(state):
    """The mean of V, of all shares by the logarithms of their weights' sums."""
    mean = state.total[own] / state.weight[g]
    if shares == 1: return mean
    log_sum = state.scores[own].store(state.highest[g] + state.weight[g].log2())
    state = state.after(UOp.group(end(log_sum), end(state.total[own].store(mean))))
    sums, means = [[x[i, *own[1:]] for i in range(shares)] for x in (state.scores, state.total)]
    fades = [(x - functools.reduce(UOp.maximum, sums)).exp2() for x in sums]
    return sum(fade * x for fade, x in zip(fades, means, strict=True)) / sum(fades)

  kinds: list[Any] = [((shares, G, D), shared)] * 3 + [((G,), AddrSpace.REG)] * 2
  made = State(*[UOp.placeholder(size, dtypes.float32, 100 + i, space) for i, (size, space) in enumerate(kinds)])
  state = made.after(summed(scored(made.after(begun, loop))).end(loop, (turn + 1) * shares * D <= position))
  threads = divisor(T, cpu_cores()) if T * KV * G * D > 2**12 else 1
  return kernel_of("attend", out[t, h, *own[1:]].store(combined(state).cast(out.dtype)), shared_by(threads))
