"""Paged attention on NVIDIA tensor cores (FlashAttention-2, Dao 2023, arXiv:2307.08691): a warp multiplies 16 query
rows by 16 positions, and the scores stay in registers to weight V.

A lane loads neighbours in memory. Blocks of K: (KV, D / 32, 16, 32), of V: (KV, D, 16) in float16; for int8 and fp8
(KV, D / 32, 16, 8) and (KV, D / 4, 16) uint32 words of four dimensions."""
import dataclasses, functools, itertools, math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from tinyvllm.backend import TOKENS, renderer
from tinyvllm.config import ModelConfig
from tinyvllm_extra.options import LLMConfig

from . import generic, kv_cache
from .generic import sizes
from .kv_cache import half_bits
from .matmul import speaks_cuda
from .schedule import LOWEST, ScoreOptions, State, axes, axis, field, kernel_of, largest, mean, separate
from .shared_memory import MMA, mma

BS = 16   # positions in a block
TILE = 64   # tokens in a query tile
MIN_WORK_GROUPS = 128   # to keep a GPU busy
SHARED_BYTES = 2**15    # limit for a work group's results in shared memory
SCALE_FACTOR = 64       # keeps products of softmax weights and V's scales in float16's normal range
ATTEND = KernelInfo(name="attend_tc", opts_to_apply=())
NEAR = 8                # dimensions in each half of a head that a lane rotates


def kv_layout(model: ModelConfig, config: LLMConfig, dtype: DType) -> list[tuple[tuple[int, ...], DType]]:
  """Return the shape and dtype of a block in each cache tensor: the layout for tensor cores if model and device support
  it, else the generic one."""
  layout = kv_cache.kv_layout(model, config, dtype)
  element = layout[0][1]
  heads = model.num_key_value_heads
  D = model.head_dim
  fits_model = config.block_size == BS and D in (32, 64, 96, 128) and model.num_attention_heads <= 16 * heads
  fits_device = speaks_cuda() and (MMA, dtype) in [(core.dims, core.dtype_in) for core in renderer().tensor_cores]
  # tinygrad does not combine bfloat16 loads
  if not fits_model or not fits_device or dtype != dtypes.half: return layout
  n = 1 if dtype == element else 4   # dimensions per element
  return [((heads, D // 32, BS, 32 // n), element), ((heads, D // n, BS), element), *layout[2:]]


def is_own_layout(cache: list[Tensor]) -> bool: return cache[0].ndim == 5


def attend(qkv: Tensor, cache: list[Tensor], rope: Tensor, tokens: Tensor, block_tables: Tensor, num_heads: int,
           scale: float = 0, window: int = 0, cap: float = 0, sinks: Tensor | None = None) -> Tensor:
  """Like Backend.attend, for both layouts. tokens: for tensor cores, see `add_query_tiles`."""
  options = ScoreOptions(scale, window, cap)
  kernel = rope_kernel if is_own_layout(cache) else generic.rope_kernel
  q, cache = generic.rotate_and_write(qkv, cache, rope, tokens, num_heads, kernel)
  attend_to = read if is_own_layout(cache) else generic.read
  return attend_to(q, cache, tokens, block_tables, options, [] if sinks is None else [sinks]).flatten(1)


def add_query_tiles(tokens: Tensor, block_tables: Tensor) -> Tensor:
  """Return tokens with another column, which only a prefill_kernel reads: its row n describes query tile n, up to TILE
  consecutive tokens of a sequence: TILE * first token + number of further tokens, or -1 for no tile."""
  slot = TOKENS.read(tokens)["slot"]                                    # (T,)
  t = Tensor.arange(slot.shape[0], dtype=dtypes.int32)
  is_earlier = t < t.unsqueeze(1)                                       # (T, T)
  is_same = slot == slot.unsqueeze(1)
  def count(x: Tensor) -> Tensor: return x.sum(1, dtype=dtypes.int32).contiguous()
  begins = count(is_same & is_earlier) % TILE == 0
  begins = (begins & (slot < int(block_tables.shape[0]) - 1)).contiguous()   # padding has the last slot
  number = count(is_earlier & begins)                                   # tiles that begin earlier
  tile = t * TILE + (count(is_same & is_earlier.logical_not()) - 1).minimum(TILE - 1)
  tiles = count(((number == t.unsqueeze(1)) & begins).where(tile + 1, 0)) - 1
  return tokens[:TOKENS.num_words].cat(tiles.unsqueeze(0)).contiguous()


def read(q: Tensor, cache: list[Tensor], tokens: Tensor, block_tables: Tensor,
         options: ScoreOptions, sinks: Sequence[Tensor]) -> Tensor:
  """Attend to the cache. q: (T, KV, G, D). Return the same shape."""
  T, KV = [int(n) for n in q.shape[:2]]
  # Split-KV: with few tokens and possibly long contexts, several work groups share a token and a K/V head
  context = min(block_tables.shape[1] * BS, options.window or 2**31)
  splits = max(1, MIN_WORK_GROUPS // (T * KV)) if context > 1024 and T <= TILE else 1
  decode = functools.partial(decode_kernel, options=options, splits=splits)
  kernel = decode if T <= TILE else functools.partial(prefill_kernel, options=options)
  if splits == 1: return q.empty_like().custom_kernel(q, *cache, block_tables, tokens, *sinks, fxn=kernel)[0]
  means = Tensor.empty(splits, *q.shape, dtype=dtypes.float32, device=q.device)
  logs = Tensor.empty(splits, *q.shape[:3], dtype=dtypes.float32, device=q.device)
  means, *_, logs = means.custom_kernel(q, *cache, block_tables, tokens, logs, fxn=kernel)
  return q.empty_like().custom_kernel(means, logs, *sinks, fxn=combine_kernel)[0]


def combine_kernel(out: UOp, means: UOp, logs: UOp, *sinks: UOp) -> UOp:
  """Combine the splits of split-KV. means: (splits, T, KV, G, D). logs: (splits, T, KV, G), log2 of weight sums. sinks:
  (KV * G,), optional."""
  t, h, g, d = axes(0, *out.shape)
  splits = range(means.shape[0])
  values, weight_logs = [means[i, t, h, g, d] for i in splits], [logs[i, t, h, g] for i in splits]
  combined = mean(values, weight_logs, sinks, h * out.shape[2] + g)
  return kernel_of("combine", out[t, h, g, d].store(combined.cast(out.dtype)))


# RoPE and the write of K and V

class LaneWriter(generic.HeadWriter):
  """A HeadWriter whose lanes have NEAR dimensions of each half. Neighbouring lanes have neighbouring tokens, because
  their V is contiguous in a block."""
  def lane(self) -> tuple[UOp, UOp, list[UOp]]:
    self.num_tokens = math.gcd(self.T, BS)
    group, h = axes(0, self.T // self.num_tokens, self.KV, axis_type=AxisType.GLOBAL)
    self.token = axis(self.num_tokens, 2, AxisType.LOCAL)
    self.i = UOp.range(self.D // 2 // NEAR, 3, AxisType.LOCAL)
    return group * self.num_tokens + self.token, h, [self.i * NEAR + j for j in range(NEAR)]

  def cell(self, kv: int, d: UOp) -> UOp:
    if kv: return self.values[self.block, self.h, d, self.offset]
    n = 32 // self.in_element
    return self.keys[self.block, self.h, d // n, self.offset, d % n]

  def highest(self, kv: int) -> UOp:
    halves = zip(*[self.pair(kv, d) for d in self.dimensions], strict=True)
    lanes = self.D // 2 // NEAR
    shared = UOp.placeholder((self.num_tokens, lanes), dtypes.float32, 100 + kv, AddrSpace.LOCAL)
    shared = shared.after(shared[self.token, self.i].store(largest([x for half in halves for x in half])))
    return functools.reduce(UOp.maximum, [shared[self.token, j] for j in range(lanes)])


def rope_kernel(*inputs: UOp) -> UOp:
  """Run a LaneWriter."""
  return kernel_of("rope_and_write", UOp.group(*LaneWriter(*inputs).stores()), ())


# Attention

def decode_kernel(out: UOp, *inputs: UOp, options: ScoreOptions, splits: int) -> UOp:
  """Compute attention for up to TILE tokens. A work group has a token and a K/V head. Its warps split the context, and
  each has the G query heads as rows.
  out: (T, KV, G, D), or with split-KV (splits, T, KV, G, D) in float32. inputs: see Warp; with split-KV no sinks, but
  logs, (splits, T, KV, G): log2 of the sum of the weights."""
  inputs, split_logs = (inputs[:-1], inputs[-1:]) if splits > 1 else (inputs, ())
  return UOp.group(*DecodeWarp(options, inputs, splits).stores(out, split_logs)).sink(arg=ATTEND)


def prefill_kernel(out: UOp, *inputs: UOp, options: ScoreOptions) -> UOp:
  """Compute attention for more than TILE tokens. A work group has a query head and a query tile (see add_query_tiles),
  16 tokens per warp. For a tile of up to 16 tokens, the warps split the context instead.
  out: (T, KV, G, D). inputs: see Warp."""
  return UOp.group(PrefillWarp(options, inputs).stores(out)).sink(arg=ATTEND)


# A block of the context. start: its first position. base: physical block * KV + K/V head
Block = NamedTuple("Block", [("start", UOp), ("base", UOp)])


class Warp:
  """A warp's query rows, and the part of the context that it reads. A lane has row `lane // 4`, and with more than 8
  rows also row `lane // 4 + 8`. inputs: q, (T, KV, G, D), keys, values, then see `separate`. Fragments of int8 and fp8
  are `factor` times too small, and int8 includes its offset of 128.

  index: of the warp in its work group. count: warps in a work group. first: token of the first row in the flat batch.
  num_rows: query rows. rows: the lane's rows: token relative to `first`, query head within the K/V head. visible: last
  position that each of the lane's rows attends to. last: last position that any row attends to. start: first block that
  any row attends to. split, splits: the warp reads blocks start + split, start + split + splits, ... guard: statements
  to run before the loads."""
  num_rows: int
  rows: list[tuple[UOp | int, UOp]]
  visible: list[UOp]
  last: UOp
  split: UOp
  splits: UOp | int
  guard: tuple[UOp, ...] = ()

  def __init__(self, options: ScoreOptions, inputs: Sequence[UOp], count: int, kv_head: UOp, first: UOp):
    self.q, self.keys, self.values, *rest = inputs
    self.scales, self.table, tokens, self.sinks = separate(rest)
    self.T, self.KV, self.G, self.D = sizes(self.q)
    self.options, self.count, self.kv_head, self.first = options, count, kv_head, first
    self.index = UOp.special(count, "lidx1")
    self.lane = UOp.special(32, "lidx0")
    self.row, self.column = self.lane // 4, self.lane % 4
    slots, max_blocks = sizes(self.table)
    self.slot = field(tokens, "slot", first) % slots
    self.position = field(tokens, "position", first) % (max_blocks * BS)
    self.start = options.first_block(self.position, max_blocks, BS)
    self.has_words = self.keys.dtype != dtypes.half
    self.factor = kv_cache.FACTOR[bool(self.scales)] if self.has_words else 1

  def row_start(self, token: UOp | int, g: UOp | int) -> UOp:
    """Return the index of a query row's first element in a flat tensor of q's shape."""
    return (((self.first + token).minimum(self.T - 1) * self.KV + self.kv_head) * self.G + g) * self.D

  def block(self, i: UOp) -> Block:
    """Return the i-th block of the context."""
    num_blocks, heads = self.keys.shape[:2]
    entry = self.table[self.slot, i.minimum(self.table.shape[1] - 1)].load()
    return Block(i * BS, entry.cast(dtypes.weakint) % num_blocks * heads + self.kv_head)

  def halves(self, low: UOp, high: UOp) -> list[UOp]:
    """Return two bytes as float16."""
    bits = half_bits(low | high << 16, bool(self.scales))
    return [(bits >> 16 * i).cast(dtypes.uint16).bitcast(dtypes.half) for i in range(2)]

  def key(self, block: Block, half: int, step: int) -> list[UOp]:
    """Load K of eight positions, 16 dimensions from 16 * step: a lane has four dimensions of one position."""
    at = (block.base * self.keys.shape[2] + step // 2) * BS + self.row // 2 * 4 + half * 2 + self.row % 2
    def load(i): return self.keys.base.index(i.valid(block.start <= self.last)).load()
    if not self.has_words: return [load(at * 32 + self.column * 8 + step % 2 * 4 + e) for e in range(4)]
    word = load(at * 8 + self.column * 2 + step % 2)
    return [x for i in range(2) for x in self.halves(word >> 8 * i & 255, word >> 8 * i + 16 & 255)]

  def value(self, block: Block, n: int) -> list[UOp]:
    """Load V of 16 positions, the n-th eight dimensions: a lane has four positions of one dimension."""
    d = (n // 4 * 8 if self.has_words else n * 8) + self.row
    at = (block.base * self.values.shape[2] + d) * BS + self.column * 4
    position = block.start + self.column * 4
    elements = [self.values.base.index((at + e).valid(position <= self.last)).load() for e in range(4)]
    if not self.has_words:   # unwritten positions may hold NaN
      return [(position + e <= self.last).where(x, HALF_ZERO) for e, x in enumerate(elements)]
    return [x for e in (0, 2) for x in self.halves(*[word >> n % 4 * 8 & 255 for word in elements[e:e + 2]])]

  def scale(self, block: Block, kv: int, i: UOp) -> UOp:
    """Load the int8 scale of K (kv 0) or V (1) at the block's i-th position."""
    return self.scales[0].base.index((block.base * 2 + kv) * BS + i).load()


class DecodeWarp(Warp):
  """A warp whose rows are the G query heads of a token. The warps of all splits share the context."""
  def __init__(self, options: ScoreOptions, inputs: Sequence[UOp], splits: int):
    T, KV, G, D = sizes(inputs[0])
    count = min(TILE // 16 if T * KV > 256 else 16, 1 << (SHARED_BYTES // (G * D * 4)).bit_length() - 1)
    super().__init__(options, inputs, count, UOp.special(KV, "gidx0"), UOp.special(T, "gidx1"))
    self.num_rows = G
    self.rows = [(0, (self.row + row).minimum(G - 1)) for row in range(0, 8 if G <= 8 else 16, 8)]
    self.visible = [self.position for _ in self.rows]
    self.last = self.position
    self.part = UOp.special(splits, "gidx2") if splits > 1 else UOp.const(0)
    self.split = self.part * count + self.index
    self.splits = splits * count

  def stores(self, out: UOp, split_logs: Sequence[UOp]) -> list[UOp]:
    """Return the stores of the mean over the warps and, with split-KV, of the logs in `split_logs`."""
    means, logs = warp_results(self)
    stores = []
    for n in range(-(-self.G * self.D // (32 * self.count))):
      i = n * 32 * self.count + self.index * 32 + self.lane   # index in the G * D outputs of the K/V head
      g = (i // self.D).minimum(self.G - 1)
      warp_logs = [logs[w, g] for w in range(self.count)]
      warp_means = [means[w, g, i % self.D] for w in range(self.count)]
      x = mean(warp_means, warp_logs, self.sinks, self.kv_head * self.G + g)
      to = self.row_start(0, 0) + i
      for log in split_logs:
        row = (self.part * self.T + self.first) * self.KV * self.G + self.kv_head * self.G + g
        stores.append(log.base.index(row.valid((i < self.G * self.D) & (i % self.D < 1))).store(log_of_sum(warp_logs)))
        to = to + self.part * math.prod(sizes(self.q))
      stores.append(out.base.index(to.valid(i < self.G * self.D)).store(x.cast(out.dtype)))
    return stores


class PrefillWarp(Warp):
  """A warp whose rows are tokens of a query tile, for one query head: 16 of its tokens or, if it has up to 16, all of
  them and a part of the context."""
  def __init__(self, options: ScoreOptions, inputs: Sequence[UOp]):
    T, KV, G, _ = sizes(inputs[0])
    _, table, tokens, _ = separate(inputs[3:])
    number = UOp.special(min(T, T // TILE + sizes(table)[0] - 1), "gidx1")
    tile = tokens[TOKENS.num_words, number].load().cast(dtypes.weakint)
    head = UOp.special(KV * G, "gidx0")
    super().__init__(options, inputs, TILE // 16, head // G, tile.maximum(0) // TILE % T)
    self.num_rows = 16
    self.size = (tile < 0).where(0, tile % TILE + 1)   # tokens of the tile
    self.splits_context = self.size <= 16
    self.rows = [(self.splits_context.where(0, self.index * 16) + (self.row + row), head % G) for row in (0, 8)]
    self.last = self.position + self.size - 1
    # Rows after the tile are limited, too, because their NaN would reach the mean over the warps
    self.visible = [(self.position + token).minimum(self.last) for token, _ in self.rows]
    self.split = self.splits_context.where(self.index, 0)
    self.splits = self.splits_context.where(self.count, 1)
    self.guard = (exit_if(tile < 0),)   # padding

  def stores(self, out: UOp) -> UOp:
    """Return the stores of the warp's rows; with a split context, of the mean over the warps."""
    means, logs = warp_results(self)
    g = self.rows[0][1]
    r = UOp.range(16, 1, AxisType.LOOP)
    token = self.splits_context.where(0, self.index * 16) + r
    is_own = (token < self.size) & (self.splits_context.ne(True) | (r % self.count).eq(self.index))
    warp_logs = [(self.splits_context | self.index.eq(w)).where(logs[w, r], LOWEST) for w in range(self.count)]
    stores = []
    for d in range(0, self.D, 32):
      warp_means = [means[w, r, d + self.lane] for w in range(self.count)]
      x = mean(warp_means, warp_logs, self.sinks, self.kv_head * self.G + g)
      to = self.row_start(token, g) + d + self.lane
      stores.append(out.base.index(to.valid(is_own)).store(x.cast(out.dtype)))
    return UOp.group(*stores).end(r)


@dataclasses.dataclass(frozen=True)
class WarpState(State):
  """A lane's accumulators. total: (D / 8 * rows * 2,), the others: (rows,). weight: over the lane's own positions."""
  scaled_weight: UOp   # sum of the weights times V's scales (int8)


HALF_ZERO = UOp.const(0.0, dtypes.half)
ZEROS = UOp.const((0.0,) * 4, dtypes.float32)


def accumulate(warp: Warp) -> WarpState:
  """Attend the warp's rows to its split of the context, one block per iteration."""
  queries = [query(warp, step) for step in range(warp.D // 16)]
  rows = len(warp.rows)
  initial = {"total": (warp.D // 8 * rows * 2, 0.0), "highest": (rows, LOWEST), "weight": (rows, 0.0),
                  "scaled_weight": (rows, 0.0), "iteration": (1, 0)}   # size and initial value
  registers = {name: UOp.placeholder((size,), dtypes.int32 if name == "iteration" else dtypes.float32, 100 + i,
                                     AddrSpace.REG) for i, (name, (size, _)) in enumerate(initial.items())}
  resets = [registers[name].after(*warp.guard)[i].store(value)
            for name, (size, value) in initial.items() for i in range(size)]
  state = WarpState(**registers)
  loop = UOp.loop(0)
  current = state.after(UOp.group(*resets), loop)
  iteration = current.index(warp.table.shape[1])
  block = warp.block(warp.start + iteration * warp.splits + warp.split)
  stores = [current.iteration[0].store(current.iteration[0].load() + 1),
            *add_block(warp, block, current, scores(warp, block, queries))]
  return state.after(UOp.group(*stores).end(loop, (warp.start + (iteration + 1) * warp.splits) * BS <= warp.last))


def query(warp: Warp, step: int) -> list[UOp]:
  """Load the query fragment of 16 dimensions from 16 * step, in the order of Warp.key."""
  order = (0, 2, 1, 3) if warp.has_words else range(4)
  starts = [warp.row_start(*row) + step // 2 * 32 + warp.column * 8 + step % 2 * 4 for row in warp.rows]
  return fragment([[warp.q.base.after(*warp.guard).index(start + e).load() for e in order] for start in starts])


def scores(warp: Warp, block: Block, queries: list[list[UOp]]) -> list[list[UOp]]:
  """Return the scores of the lane's rows and four positions."""
  unit = warp.options.factor(16 * len(queries))
  sums = ZEROS   # sums of the query's numbers, to subtract int8's offset of 128
  for a in queries: sums = mma(a, [UOp.const(1.0, dtypes.half)] * 4, sums) if warp.scales else ZEROS
  result: list[list[UOp]] = [[] for _ in warp.rows]
  for half in range(2):
    dot = ZEROS
    for step, a in enumerate(queries): dot = mma(a, warp.key(block, half, step), dot)
    for r, e in itertools.product(range(len(warp.rows)), range(2)):
      i = warp.column * 4 + half * 2 + e   # position in the block
      score = dot.index(r * 2 + e) * (warp.factor * unit)
      if warp.scales: score = (score - sums.index(r * 2) * (128 * unit)) * warp.scale(block, 0, i)
      result[r].append(warp.options.masked(score, warp.visible[r], block.start + i))
  return result


def add_block(warp: Warp, block: Block, state: WarpState, scores: list[list[UOp]]) -> list[UOp]:
  """Return the stores of online softmax: rescale the accumulators, and add a block's weighted V."""
  rows = range(len(warp.rows))
  highest = [over_row(functools.reduce(UOp.maximum, row, state.highest[r].load()), UOp.maximum)
             for r, row in enumerate(scores)]
  rescales = [(state.highest[r].load() - highest[r]).exp2() for r in rows]
  weights = [[(x - highest[r]).exp2() for x in row] for r, row in enumerate(scores)]
  factors = [[x.cast(dtypes.half) for x in row] for row in times_scales(warp, block, weights)]
  stores = []
  for r in rows:
    weight = state.weight[r] * rescales[r] + sum(weights[r])
    stores += [state.highest[r].store(highest[r]), state.weight[r].store(weight)]
    if not warp.scales: continue
    added = sum(x.float() for x in factors[r])
    stores.append(state.scaled_weight[r].store(state.scaled_weight[r] * rescales[r] + added))
  for n in range(warp.D // 8):
    indices = [(n * len(rows) + r) * 2 + e for r in rows for e in range(2)]
    total = [state.total[j] * rescales[i // 2] for i, j in enumerate(indices)]
    total += [UOp.const(0.0, dtypes.float32)] * (4 - len(total))
    product = mma(fragment(factors), warp.value(block, n), UOp.stack(*total))
    stores += [state.total[j].store(product.index(i)) for i, j in enumerate(indices)]
  return stores


def times_scales(warp: Warp, block: Block, weights: list[list[UOp]]) -> list[list[UOp]]:
  """Return the weights times V's int8 scales, or the weights themselves."""
  if not warp.scales: return weights
  scales = [warp.scale(block, 1, warp.column * 4 + e) * SCALE_FACTOR for e in range(4)]
  position = block.start + warp.column * 4
  return [[(position + e <= warp.last).where(x * scales[e], 0.0) for e, x in enumerate(row)] for row in weights]


def warp_results(warp: Warp) -> tuple[UOp, UOp]:
  """Attend, and store each warp's results in shared memory. Return the mean of V, (warps, rows, D), and log2 of the
  weights' sum, (warps, rows)."""
  state = accumulate(warp)
  means = UOp.placeholder((warp.count, warp.num_rows, warp.D), dtypes.float32, 110, AddrSpace.LOCAL)
  logs = UOp.placeholder((warp.count, warp.num_rows), dtypes.float32, 111, AddrSpace.LOCAL)
  factor = warp.factor / SCALE_FACTOR if warp.scales else warp.factor
  stores = []
  for r in range(len(warp.rows)):
    row = warp.index * warp.num_rows + warp.row + 8 * r
    exists = warp.row + 8 * r < warp.num_rows
    weight = over_row(state.weight[r].load(), UOp.add)
    offset = over_row(state.scaled_weight[r].load(), UOp.add) * (128 / SCALE_FACTOR) if warp.scales else 0
    log = state.highest[r].load() + weight.log2()
    stores.append(logs.base.index(row.valid(exists & (warp.column < 1))).store(log))
    for n, e in itertools.product(range(warp.D // 8), range(2)):
      total = state.total[(n * len(warp.rows) + r) * 2 + e] * factor - offset
      i = warp.column * 2 + e   # in the n-th eight dimensions
      d = n // 4 * 32 + i * 4 + n % 4 if warp.has_words else n * 8 + i
      stores.append(means.base.index((row * warp.D + d).valid(exists)).store(total / weight))
  done = UOp.group(*stores)
  return means.after(done), logs.after(done)


def log_of_sum(logs: Sequence[UOp]) -> UOp:
  """Return log2 of the sum of 2**log."""
  highest = functools.reduce(UOp.maximum, logs)
  return functools.reduce(UOp.add, [(x - highest).exp2() for x in logs]).log2() + highest


def fragment(rows: list[list[UOp]]) -> list[UOp]:
  """Return the mma fragment of 16 rows by 16 columns: four columns of the lane's row and of the row 8 below (or 0)."""
  low, high = rows if len(rows) == 2 else (*rows, [HALF_ZERO] * 4)
  return [*low[:2], *high[:2], *low[2:], *high[2:]]


def over_row(x: UOp, op: Callable[[UOp, UOp], UOp]) -> UOp:
  """Reduce x over the four lanes of a row."""
  for bit in (1, 2): x = op(x, shuffle_xor(x, bit))
  return x


def shuffle_xor(x: UOp, bit: int) -> UOp:
  """Return x of the lane whose number differs in `bit`."""
  return UOp(Ops.CUSTOM, x.dtype, (x,), f"__shfl_xor_sync(0xffffffffu, {{0}}, {bit})")


def exit_if(condition: UOp) -> UOp:
  """Return a statement that ends a work group: a barrier, because tinygrad would drop any other statement."""
  return UOp(Ops.CUSTOM, dtypes.void, (condition,), "if ({0}) return;").barrier()
