"""Paged attention on tensor cores, as FlashAttention-2 has it (Dao 2023, arXiv:2307.08691): the scores of 16 rows of
queries at 16 positions leave them in the places in which they then take the weights of V.

As in tinyvllm.attention, but that a block of K is (D / 32, 16, 32), and one of V (D, 16): what a lane reads at once are
neighbours. Of 8 bits they are (D / 32, 16, 8) and (D / 4, 16) words, of four dimensions each."""
import functools, math
from typing import Any, NamedTuple

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from tinyvllm.backend import renderer
from tinyvllm.config import EngineConfig, ModelConfig
from tinyvllm.runner import TILE

from . import generic as attention
from .generic import SMALLEST, in_8_bits
from .matmul import MMA, speaks_cuda
from .schedule import LOWEST, axes, axis, field, kernel_of

BS = 16       # positions in a block
LIFT = 64     # what weights with V's scales are multiplied by, lest they are too small for float16
ROOM = 2**15  # bytes that a work group shares, at most
ENOUGH = 128  # work groups, for a GPU to be busy


def block_parts(model: ModelConfig, config: EngineConfig, dtype: DType) -> list[tuple[tuple[int, ...], DType]]:
  parts = attention.block_parts(model, config, dtype)
  kind = parts[0][1]
  heads = model.num_key_value_heads
  D = model.head_dim
  fits = config.block_size == BS and D in (32, 64, 96, 128) and model.num_attention_heads <= 16 * heads
  takes = speaks_cuda() and (MMA, dtype) in [(core.dims, core.dtype_in) for core in renderer().tensor_cores]
  if not fits or not takes or dtype != dtypes.half: return parts   # of bfloat16 tinygrad joins no loads
  each = 1 if dtype == kind else 4
  return [((heads, D // 32, BS, 32 // each), kind), ((heads, D // each, BS), kind), *parts[2:]]


def attend(q: Tensor, cache: list[Tensor], qkv: Tensor, rope: Tensor, table: Tensor, tokens: Tensor) -> Tensor:
  if cache[0].ndim == 4: return attention.attend(q, cache, qkv, rope, table, tokens)
  q, *cache = q.custom_kernel(*cache, qkv, rope, tokens, fxn=rope_kernel)[:-3]
  return read(q, cache, table, tokens)


def read(q: Tensor, cache: list[Tensor], table: Tensor, tokens: Tensor) -> Tensor:
  """Attention of q, (T, KV, G, D), over what is written."""
  T, KV, *_ = q.shape
  # Work groups that share a token and a K/V head, where these are few, and sequences may be long
  parts = max(1, ENOUGH // (T * KV)) if table.shape[1] * BS > 1024 else 1
  if parts == 1: return q.empty_like().custom_kernel(q, *cache, table, tokens, fxn=attend_kernel)[0]
  means, logs = [Tensor.empty(parts, *shape, dtype=dtypes.float32, device=q.device) for shape in (q.shape, q.shape[:3])]
  means, *_, logs = means.custom_kernel(q, *cache, table, tokens, logs, fxn=attend_kernel)
  return q.empty_like().custom_kernel(means, logs, fxn=combine_kernel)[0]


def rope_kernel(q: UOp, keys: UOp, values: UOp, *rest: UOp) -> UOp:
  """As tinyvllm.attention's. A lane has 16 numbers of a head, and its neighbours have those of the tokens that follow,
  whose values lie side by side in a block."""
  *scales, qkv, rope, tokens = rest
  sizes: Any = q.shape
  T, KV, G, D = sizes
  near = 8   # neighbours of either half of a head
  side = math.gcd(T, BS)
  group, h = axes(0, T // side, KV, kind=AxisType.GLOBAL)
  own = axis(side, 2, AxisType.LOCAL)
  i = UOp.range(D // 2 // near, 3, AxisType.LOCAL)
  t = group * side + own
  page = field(tokens, "block", t) % keys.shape[0]
  position = field(tokens, "position", t)
  offset = position % BS
  waves = [[rope[position % rope.shape[0], z, i * near + j] for j in range(near)] for z in range(2)]

  def plain(head):   # in two halves
    return [[qkv[t, head * D + z * (D // 2) + i * near + j].float() for j in range(near)] for z in range(2)]
  def turned(head):
    terms = [*zip(*plain(head), *waves, strict=True)]
    return [[a * cos - b * sin for a, b, cos, sin in terms], [b * cos + a * sin for a, b, cos, sin in terms]]

  stores = []
  def put(halves, together, place):   # elements of so many neighbours
    for z, j in [(z, j) for z in range(2) for j in range(0, near, together)]:
      stores.append(place((z * (D // 2) + i * near + j) // together, halves[z][j:j + together]))
  for n in range(G): put(turned(h * G + n), 1, lambda d, x, n=n: q[t, h, n, d].store(x[0].cast(q.dtype)))
  each = D // values.shape[2]
  width = 32 // each
  for kind, halves in enumerate([turned(KV * G + h), plain(KV * G + KV + h)]):   # K and V
    if scales:
      lanes = UOp.placeholder((side, D // 2 // near), dtypes.float32, 100 + kind, AddrSpace.LOCAL)
      largest = functools.reduce(UOp.maximum, [x.maximum(-x) for half in halves for x in half])
      lanes = lanes.after(lanes[own, i].store(largest))
      scale = functools.reduce(UOp.maximum, [lanes[own, j] for j in range(D // 2 // near)]).maximum(SMALLEST) / 127
      stores.append(scales[0][page, h, kind, offset].store(scale))   # each i does
      halves = [[x / scale for x in half] for half in halves]
    def place(d, x, kind=kind):
      to = values[page, h, d, offset] if kind else keys[page, h, d // width, offset, d % width]
      return to.store(x[0].cast(keys.dtype) if each == 1 else in_8_bits().stored(x, keys.dtype, bool(scales)))
    put(halves, each, place)
  return kernel_of("rope_and_write", UOp.group(*stores), ())


def combine_kernel(out: UOp, means: UOp, logs: UOp) -> UOp:
  """The mean of parts by the logarithms, to the base of 2, of their weights. means: (parts, T, KV, G, D)."""
  t, h, g, d = axes(0, *out.shape)
  terms = [means[i, t, h, g, d] for i in range(means.shape[0])]
  found = mean(terms, [logs[i, t, h, g] for i in range(means.shape[0])])
  return kernel_of("combine", out[t, h, g, d].store(found.cast(out.dtype)))


def mean(terms: list[UOp], logs: list[UOp]) -> Any:
  highest = functools.reduce(UOp.maximum, logs)
  fades = [(x - highest).exp2() for x in logs]
  return sum(x * fade for x, fade in zip(terms, fades, strict=True)) / sum(fades)


def of_row(x: UOp, op: Any) -> UOp:
  """Of the four lanes that share a row."""
  for bit in (1, 2): x = op(x, exchanged(x, bit))
  return x


def exchanged(x: UOp, bit: int) -> UOp:
  """What the lane has whose number differs in this bit."""
  return UOp(Ops.CUSTOM, x.dtype, (x,), f"__shfl_xor_sync(0xffffffffu, {{0}}, {bit})")


def leave(condition: UOp) -> UOp:
  """A work group has nothing to do. Goes into what comes after: tinygrad keeps barriers there, and drops statements."""
  return UOp(Ops.CUSTOM, dtypes.void, (condition,), "if ({0}) return;").barrier()


def mma(a: list[UOp], b: list[UOp], total: UOp) -> UOp:
  """total + a @ b, of which a lane has 8, 4 and 4 elements (PTX ISA, mma.m16n8k16)."""
  return UOp.wmma(UOp.stack(*a), UOp.stack(*b), total, MMA, "CUDA", 32)


class State(NamedTuple):
  """Of a lane's online softmax in registers. It has one row of queries, or two that are 8 apart."""
  total: UOp     # (D / 8 * rows * 2,): V summed by its weights
  highest: UOp   # (rows,): score so far
  weight: UOp    # (rows,): the sum of weights, of the lane's own positions
  lifted: UOp    # (rows,): of the weights with V's scales
  turn: UOp      # (1,): of the loop

  def after(self, *done: UOp) -> "State": return State(*[x.after(*done) for x in self])


def attend_kernel(out: UOp, q: UOp, keys: UOp, values: UOp, *rest: UOp) -> UOp:
  """A warp has 16 rows of queries. In a step of up to TILE tokens they are a token's, of a K/V head, and the warps of a
  work group share its context; of more tokens 16 of a tile's, of a head, and warps share the context of a tile of so
  few. out: (T, KV, G, D), or (parts, T, KV, G, D) in float32 where as many work groups share a context. rest: scales,
  if there are any; table; tokens; logs, of the weights' sum in each part, (parts, T, KV, G), if there are parts."""
  sizes: Any = q.shape
  T, KV, G, D = sizes
  *parts, _, _, _, _ = out.shape
  *scales, table, tokens = rest[:-1] if parts else rest
  pages = keys.shape[0]
  rows, max_blocks = table.shape
  words = D // values.shape[2] > 1
  of_token = T <= TILE
  used = G if of_token else 16   # rows of a warp
  lane_rows = range(1 if used <= 8 else 2)
  warps = TILE // 16
  if of_token: warps = min(warps if T * KV > 256 else 16, 1 << (ROOM // (G * D * 4)).bit_length() - 1)
  lane = UOp.special(32, "lidx0")
  warp = UOp.special(warps, "lidx1")
  head = UOp.special(KV if of_token else KV * G, "gidx0")
  row = lane // 4
  column = lane % 4
  begin = []
  count: Any = 1
  together: Any = True   # whether all warps have the same rows
  if of_token:
    first = UOp.special(T, "gidx1")
    h = head
    part = UOp.special(parts[0], "gidx2") if parts else UOp.const(0)
    share = part * warps + warp
    shares: Any = math.prod(parts) * warps
  else:
    tile = field(tokens, "tile", UOp.special(min(T, T // TILE + rows - 1), "gidx1"))
    begin = [leave(tile < 0)]   # there may be fewer
    first = tile.maximum(0) // TILE % T
    count = (tile < 0).where(0, tile % TILE + 1)
    h = head // G
    together = count <= 16
    share = together.where(warp, 0)
    shares = together.where(warps, 1)
  own = field(tokens, "position", first) % (max_blocks * BS)
  last = own + count - 1   # of the positions that there are for the tile
  blocks = field(tokens, "row", first) % rows

  def place(r):   # a row's token within the tile, and its head of the K/V head's
    at = row + 8 * r
    return (0, at.minimum(G - 1)) if of_token else (together.where(0, warp * 16) + at, head % G)

  # The last position that a row sees. One beyond the tile sees no more: its NaN would be in the mean of all warps
  reach = [own if of_token else (own + place(r)[0]).minimum(last) for r in lane_rows]

  def flat(token, g): return (((first + token).minimum(T - 1) * KV + h) * G + g) * D

  def pairs(low, high):   # of numbers in 8 bits the halves, in which they are factor times smaller
    bits = in_8_bits().half_bits(low | high << 16, bool(scales))
    return [(bits >> 16 * p).cast(dtypes.uint16).bitcast(dtypes.half) for p in range(2)]
  factor = in_8_bits().FACTOR[bool(scales)] if words else 1
  zero = UOp.const(0.0, dtypes.half)

  def rows_of(numbers):   # as mma takes its 16 rows: (row, elements) of 16 columns of theirs
    low, high = numbers if len(numbers) == 2 else (*numbers, [zero] * 4)
    return [*low[:2], *high[:2], *low[2:], *high[2:]]

  order = (0, 2, 1, 3) if words else range(4)
  def query(step, r):   # of 16 dimensions the lane's four
    at = flat(*place(r)) + step // 2 * 32 + column * 8 + step % 2 * 4
    return [q.base.after(*begin).index(at + e).load() for e in order]
  asked = [rows_of([query(step, r) for r in lane_rows]) for step in range(D // 16)]
  none = UOp.const((0.0,) * 4, dtypes.float32)
  sums = none   # of the queries' numbers
  for a in asked: sums = mma(a, [UOp.const(1.0, dtypes.half)] * 4, sums) if scales else none

  n = len(lane_rows)
  kinds: list[Any] = [(D // 8 * n * 2, 0.0), (n, LOWEST), (n, 0.0), (n, 0.0), (1, 0)]   # numbers, and the first of each
  made = State(*[UOp.placeholder((size,), dtypes.float32 if i < 4 else dtypes.int32, 100 + i, AddrSpace.REG)
                 for i, (size, _) in enumerate(kinds)])
  begun = [x.after(*begin)[i].store(y) for x, (size, y) in zip(made, kinds, strict=True) for i in range(size)]
  loop = UOp.loop(0)
  state = made.after(UOp.group(*begun), loop)
  turn = state.turn[0].load().cast(dtypes.weakint) % max_blocks
  block = turn * shares + share
  start = block * BS
  page = table[blocks, block.minimum(max_blocks - 1)].load().cast(dtypes.weakint) % pages * KV + h

  def key(tile, step):   # of 8 positions a row's, and of 16 dimensions the lane's four
    at = (page * (D // 32) + step // 2) * BS + row // 2 * 4 + tile * 2 + row % 2
    def read(i): return keys.base.index(i.valid(start <= last)).load()
    if not words: return [read(at * 32 + column * 8 + step % 2 * 4 + e) for e in range(4)]
    word = read(at * 8 + column * 2 + step % 2)
    return [x for i in range(2) for x in pairs(word >> 8 * i & 255, word >> 8 * i + 16 & 255)]

  def value(n):   # of the lane's positions, of 8 dimensions a row's
    at = (page * values.shape[2] + (n // 4 * 8 if words else n * 8) + row) * BS + column * 4
    found = [values.base.index((at + e).valid(start + column * 4 <= last)).load() for e in range(4)]
    if not words: return [(start + column * 4 + e <= last).where(x, zero) for e, x in enumerate(found)]   # not NaN
    return [x for e in (0, 2) for x in pairs(*[y >> n % 4 * 8 & 255 for y in found[e:e + 2]])]

  def dimension(n, i): return n // 4 * 32 + i * 4 + n % 4 if words else n * 8 + i

  scores: list[list[UOp]] = [[] for _ in lane_rows]   # of four positions of the lane's
  for j in range(2):
    dot = none
    for step in range(D // 16): dot = mma(asked[step], key(j, step), dot)
    for r, e in [(r, e) for r in lane_rows for e in range(2)]:
      at = column * 4 + j * 2 + e
      score = dot.index(r * 2 + e) * (factor * math.log2(math.e) / math.sqrt(D))
      if scales:
        score = score - sums.index(r * 2) * (128 * math.log2(math.e) / math.sqrt(D))
        score = score * scales[0].base.index(page * 2 * BS + at).load()
      scores[r].append((start + at <= reach[r]).where(score, LOWEST))
  tops = [of_row(functools.reduce(UOp.maximum, x, state.highest[r].load()), UOp.maximum) for r, x in enumerate(scores)]
  fades = [(state.highest[r].load() - top).exp2() for r, top in enumerate(tops)]
  weights = [[(x - top).exp2() for x in row] for row, top in zip(scores, tops, strict=True)]
  taken = weights   # as V is weighed
  if scales:
    lifts = [scales[0].base.index((page * 2 + 1) * BS + column * 4 + e).load() * LIFT for e in range(4)]
    taken = [[(start + column * 4 + e <= last).where(x * lifts[e], 0.0) for e, x in enumerate(row)] for row in weights]
  taken = [[x.cast(dtypes.half) for x in row] for row in taken]
  stores = [state.turn[0].store(state.turn[0].load() + 1)]
  for r, (top, fade) in enumerate(zip(tops, fades, strict=True)):
    stores += [state.highest[r].store(top), state.weight[r].store(state.weight[r] * fade + sum(weights[r]))]
    if scales: stores.append(state.lifted[r].store(state.lifted[r] * fade + sum(x.float() for x in taken[r])))
  for n in range(D // 8):
    places = [(n * len(lane_rows) + r) * 2 + e for r in lane_rows for e in range(2)]
    before = [state.total[i] * fades[k // 2] for k, i in enumerate(places)]
    before += [UOp.const(0.0, dtypes.float32)] * (4 - len(before))
    added = mma(rows_of(taken), value(n), UOp.stack(*before))
    stores += [state.total[i].store(added.index(k)) for k, i in enumerate(places)]
  state = made.after(UOp.group(*stores).end(loop, (turn + 1) * shares * BS <= last))

  # What each warp found, for all of them
  means = UOp.placeholder((warps, used, D), dtypes.float32, 110, AddrSpace.LOCAL)
  known = UOp.placeholder((warps, used), dtypes.float32, 111, AddrSpace.LOCAL)
  stores = []
  for r in lane_rows:
    at = warp * used + row + 8 * r
    is_row = row + 8 * r < used
    weight = of_row(state.weight[r].load(), UOp.add)
    lifted = of_row(state.lifted[r].load(), UOp.add) * (128 / LIFT) if scales else 0
    stores.append(known.base.index(at.valid(is_row & (column < 1))).store(state.highest[r].load() + weight.log2()))
    for n, e in [(n, e) for n in range(D // 8) for e in range(2)]:
      total = state.total[(n * len(lane_rows) + r) * 2 + e] * (factor / LIFT if scales else factor) - lifted
      stores.append(means.base.index((at * D + dimension(n, column * 2 + e)).valid(is_row)).store(total / weight))
  done = UOp.group(*stores)
  means = means.after(done)
  known = known.after(done)
  def of_warps(r, d, of=range(warps)):
    counted = [known[w, r] if of_token else (together | warp.eq(w)).where(known[w, r], LOWEST) for w in of]
    return mean([means[w, r, d] for w in of], counted), counted
  stores = []
  if of_token:
    for n in range(-(-G * D // (32 * warps))):
      at = n * 32 * warps + warp * 32 + lane
      g = (at // D).minimum(G - 1)
      x, counted = of_warps(g, at % D)
      to = flat(0, 0) + at
      if parts:
        highest = functools.reduce(UOp.maximum, counted)
        log = sum((y - highest).exp2() for y in counted).log2() + highest
        row_of = (part * T + first) * KV * G + h * G + g
        stores.append(rest[-1].base.index(row_of.valid((at < G * D) & (at % D < 1))).store(log))
        to = to + part * T * KV * G * D
      stores.append(out.base.index(to.valid(at < G * D)).store(x.cast(out.dtype)))
  else:
    r = UOp.range(16, 1, AxisType.LOOP)
    token = together.where(0, warp * 16) + r
    mine = (token < count) & (together.ne(True) | (r % warps).eq(warp))
    for d in range(0, D, 32):
      x, _ = of_warps(r, d + lane)
      stores.append(out.base.index((flat(token, head % G) + d + lane).valid(mine)).store(x.cast(out.dtype)))
    stores = [UOp.group(*stores).end(r)]
  return UOp.group(*stores).sink(arg=KernelInfo(name="attend_tc", opts_to_apply=()))
