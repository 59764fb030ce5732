"""RoPE with the write of K and V, and paged attention (Kwon et al. 2023, arXiv:2309.06180), as UOps that state their
schedule. K and V are written to blocks and read through their table, so that nothing copies the context. A tensor that
a write returns carries the order: what reads after must use it.

tokens: (fields of TOKEN, T) int32, a flat batch. keys: (num_blocks, KV, D, block_size), values: (num_blocks, KV,
block_size, D), so that neighbours in memory are what neighbouring lanes read. table: (rows, max_blocks). G query heads
share a K/V head. tinyvllm_extra.kernels has the same for lanes that share more, for 8 bits and for tensor cores."""
import math
from typing import Any, NamedTuple

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType, Ops

from .batch import TOKEN
from .config import EngineConfig, ModelConfig, check
from .device import axes, cpu_cores, kernel_of

LOWEST = -1e30   # a score that weighs nothing, and yet is no infinity: inf - inf is not a number


def field(tokens: UOp, name: str, t: UOp) -> UOp: return tokens[TOKEN.names.index(name), t].load().cast(dtypes.weakint)


def block_parts(model: ModelConfig, config: EngineConfig, dtype: DType) -> list[tuple[tuple[int, ...], DType]]:
  """What a block is in each tensor of a layer, as the kernels read them: K, (n_kv_heads, head_dim, block_size), and V,
  its last axes the other way round. Raises ValueError for what the device, or the model, cannot have."""
  asked = config.kv_cache_dtype
  check(asked == "auto", f"kv_cache_dtype={asked!r} needs tinyvllm_extra.kernels, which is not here: auto will do")
  KV = model.num_key_value_heads
  D = model.head_dim
  return [((KV, D, config.block_size), dtype), ((KV, config.block_size, D), dtype)]


def attend(qkv: Tensor, cache: list[Tensor], rope: Tensor, tokens: Tensor, table: Tensor, num_heads: int) -> Tensor:
  """Rotate q and k by their positions, write k and v to the cache, and attend. Returns (T, num_heads * D)."""
  KV, D = cache[0].shape[1:3]
  q = Tensor.empty(qkv.shape[0], KV, num_heads // KV, D, dtype=qkv.dtype, device=qkv.device)
  q, *cache = q.custom_kernel(*cache, qkv, rope, tokens, fxn=rope_kernel)[:-3]
  return q.empty_like().custom_kernel(q, *cache, table, tokens, fxn=attend_kernel)[0].flatten(1)


def rope_kernel(q: UOp, keys: UOp, values: UOp, qkv: UOp, rope: UOp, tokens: UOp) -> UOp:
  """Turn q and k by their positions, the first half of each head against the second (Su et al. 2021), and store k and v
  in their blocks. q: (T, KV, G, D), filled. qkv: (T, (KV * G + 2 KV) * D). rope: (length, 2, D/2), of cos and sin."""
  T, KV, G, D = q.shape
  pages, *_, BS = keys.shape
  t, h, i = axes(0, T, KV, D // 2)
  page = field(tokens, "block", t) % pages
  position = field(tokens, "position", t)
  offset = position % BS
  cos, sin = [rope[position % rope.shape[0], z, i] for z in range(2)]

  def plain(head): return [qkv[t, head * D + d].float() for d in (i, i + D // 2)]
  def turned(head):
    a, b = plain(head)
    return [a * cos - b * sin, b * cos + a * sin]

  stores = []
  for z, d in enumerate((i, i + D // 2)):
    stores += [q[t, h, n, d].store(turned(h * G + n)[z].cast(q.dtype)) for n in range(G)]
    stores.append(keys[page, h, d, offset].store(turned(KV * G + h)[z].cast(keys.dtype)))
    stores.append(values[page, h, offset, d].store(plain(KV * G + KV + h)[z].cast(values.dtype)))
  return kernel_of("rope_and_write", UOp.group(*stores))


class State(NamedTuple):
  """Of online softmax in float32 (Dao et al. 2022), for each query g."""
  scores: UOp    # (G, D): of this turn of the loop
  weights: UOp   # (G, D): exp2(score - highest)
  total: UOp     # (G, D): V summed by its weights
  highest: UOp   # (G,): of the scores so far
  weight: UOp    # (G,): the weights' sum

  def after(self, *done: UOp) -> "State": return State(*[x.after(*done) for x in self])


def attend_kernel(out: UOp, q: UOp, keys: UOp, values: UOp, table: UOp, tokens: UOp) -> UOp:
  """Causal attention of each token over its own sequence: no memory but for out, (T, KV, G, D), and no work beyond the
  sequence's length. A work group has a token and a K/V head, and goes over the sequence D positions at a time: its D
  lanes score one each for all G queries, and then sum one dimension of V each."""
  T, KV, G, D = q.shape
  pages, *_, BS = keys.shape
  rows, max_blocks = table.shape
  kind, shared = (AxisType.UPCAST, AddrSpace.REG) if cpu_cores() else (AxisType.LOCAL, AddrSpace.LOCAL)
  t, h = axes(0, T, KV)
  g = UOp.range(G, 2, AxisType.UPCAST)
  width = math.gcd(D, 16, BS) if cpu_cores() else D   # vectors are of no more than 16, and of one block
  lane = UOp.range(D // width, 8, AxisType.UPCAST) * width + UOp.range(width, 3, kind)
  position, row = [field(tokens, name, t) for name in ("position", "row")]
  loop = UOp.loop(4)
  turns = UOp.placeholder((1,), dtypes.int32, 105, AddrSpace.REG)
  begun = turns.after(t, h)[0].store(0)
  done = turns.after(begun, loop)[0]
  # Of no more than there can be, so that 32 bits hold all that is computed of it
  turn = done.load().cast(dtypes.weakint) % -(-max_blocks * BS // D)
  first = turn * D   # position

  def end(store): return store.end(*[a for a in store.ranges if a.arg[1] is AxisType.UPCAST])   # done for all of them
  def page(at): return table[row % rows, (at // BS).minimum(max_blocks - 1)].cast(dtypes.weakint) % pages

  def scored(state):
    """With the scores of D positions: q . k / sqrt(D), for exp2."""
    at = first + lane
    d = UOp.range(D, 5, AxisType.REDUCE)
    dot = (q[t, h, g, d].float() * keys[page(at), h, d, at % BS].float()).reduce(d, arg=Ops.ADD)
    seen = (at <= position).where(dot * (math.log2(math.e) / math.sqrt(D)), LOWEST)   # what is not may be NaN
    return state._replace(scores=state.scores.after(end(state.scores[g, lane].store(seen))))

  def summed(state):
    """The stores that add V by the weights of these scores to what the turns before have left."""
    def before(x, unset): return (turn < 1).where(unset, x)
    def add(x, terms): return end(x.store(before(x * fade, 0.0) + terms.reduce(i, arg=Ops.ADD)))
    j = UOp.range(D, 6, AxisType.REDUCE)
    top = before(state.highest[g], LOWEST).maximum(state.scores[g, j].reduce(j, arg=Ops.MAX))
    fade = (state.highest[g] - top).exp2()
    weights = state.weights.after(end(state.weights[g, lane].store((state.scores[g, lane] - top).exp2())))
    i = UOp.range(D, 7, AxisType.REDUCE)
    at = first + i
    v = (at <= position).where(values[page(at), h, at % BS, lane].float(), 0.0)
    return UOp.group(add(state.total[g, lane], weights[g, i] * v), add(state.weight[g], weights[g, i]),
                     end(state.highest[g].store(top)), done.store(done.load() + 1))

  sizes: list[Any] = [((G, D), shared)] * 3 + [((G,), AddrSpace.REG)] * 2
  made = State(*[UOp.placeholder(size, dtypes.float32, 100 + i, space) for i, (size, space) in enumerate(sizes)])
  state = made.after(summed(scored(made.after(begun, loop))).end(loop, (turn + 1) * D <= position))
  mean = state.total[g, lane] / state.weight[g]
  return kernel_of("attend", out[t, h, g, lane].store(mean.cast(out.dtype)), ())
