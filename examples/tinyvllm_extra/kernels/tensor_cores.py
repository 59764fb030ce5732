"""Paged attention on NVIDIA tensor cores (FlashAttention-2, Dao 2023, arXiv:2307.08691): a warp multiplies 16 query
rows by 16 positions, and the scores stay in registers to weight V.

A lane loads neighbours in memory. Blocks of K: (KV, D / 32, 16, 32), of V: (KV, D, 16) in float16; for int8 and fp8
(KV, D / 32, 16, 8) and (KV, D / 4, 16) uint32 words of four dimensions."""
import dataclasses, functools, itertools, math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, sint

from tinyvllm.backend import TOKENS, renderer
from tinyvllm.config import ModelConfig
from tinyvllm_extra.options import LLMConfig

from . import generic, kv_cache
from .kv_cache import SMALLEST, half_bits
from .matmul import speaks_cuda
from .schedule import (DEFAULT_OPTIONS, LOWEST, ScoreOptions, State, axes, axis, field, kernel_of, largest, location,
                       mean, rotate, separate)
from .shared_memory import MMA, mma

BS = 16   # positions in a block
TILE = 64   # tokens in a query tile
MIN_WORK_GROUPS = 128   # to keep a GPU busy
SHARED_BYTES = 2**15    # limit for a work group's results in shared memory
SCALE_FACTOR = 64       # keeps products of softmax weights and V's scales in float16's normal range
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
         options: ScoreOptions = DEFAULT_OPTIONS, sinks: Sequence[Tensor] = ()) -> Tensor:
  """Attend to the cache. q: (T, KV, G, D). Return the same shape."""
  T, KV, *_ = q.shape
  kernel = functools.partial(decode_kernel if T <= TILE else prefill_kernel, options=options)
  # Split-KV: with few tokens and possibly long contexts, several work groups share a token and a K/V head
  context = min(block_tables.shape[1] * BS, options.window or 2**31)
  splits = max(1, MIN_WORK_GROUPS // (T * KV)) if context > 1024 else 1
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

def rope_kernel(q: UOp, keys: UOp, values: UOp, *rest: UOp) -> UOp:
  """Like generic.rope_kernel. A lane rotates NEAR dimensions in each half of a head. Neighbouring lanes have
  neighbouring tokens, because their V is contiguous in a block."""
  *scales, qkv, rope, tokens = rest
  sizes: Any = q.shape
  T, KV, G, D = sizes
  side = math.gcd(T, BS)
  group, h = axes(0, T // side, KV, axis_type=AxisType.GLOBAL)
  token = axis(side, 2, AxisType.LOCAL)
  i = UOp.range(D // 2 // NEAR, 3, AxisType.LOCAL)
  t = group * side + token
  block, position, offset = location(tokens, t, keys.shape[0], BS)
  waves = [[rope[position % rope.shape[0], z, i * NEAR + j] for j in range(NEAR)] for z in range(2)]   # cos, sin

  def plain(head):   # both halves of a head
    return [[qkv[t, head * D + z * (D // 2) + i * NEAR + j].float() for j in range(NEAR)] for z in range(2)]
  def rotated(head): return [*zip(*[rotate(*pair) for pair in zip(*plain(head), *waves, strict=True)], strict=True)]

  stores = []
  for g in range(G):
    stores += [q[t, h, g, d].store(x[0].cast(q.dtype)) for d, x in runs(rotated(h * G + g), i, D, 1)]
  n = D // values.shape[2]   # dimensions per element
  for kv, halves in enumerate([rotated(KV * G + h), plain(KV * G + KV + h)]):   # K and V
    if scales:
      scale = head_scale([x for half in halves for x in half], token, i, side, D // 2 // NEAR, kv)
      stores.append(scales[0][block, h, kv, offset].store(scale))   # by every lane of the head
      halves = [[x / scale for x in half] for half in halves]
    for d, numbers in runs(halves, i, D, n):
      cell = values[block, h, d, offset] if kv else keys[block, h, d // (32 // n), offset, d % (32 // n)]
      stores.append(cell.store(kv_cache.pack(numbers, keys.dtype, bool(scales))))
  return kernel_of("rope_and_write", UOp.group(*stores), ())


def runs(halves: Sequence[Sequence[UOp]], i: UOp, D: int, n: int) -> Iterator[tuple[UOp, Sequence[UOp]]]:
  """Yield a lane's dimensions in runs of n neighbours: the index of the run within the head, and the numbers."""
  for z, j in itertools.product(range(2), range(0, NEAR, n)):
    yield (z * (D // 2) + i * NEAR + j) // n, halves[z][j:j + n]


def head_scale(numbers: list[UOp], token: UOp, i: UOp, tokens: int, lanes: int, kv: int) -> UOp:
  """Return the int8 scale of a head whose numbers are spread over `lanes` lanes. kv: 0 for K, 1 for V."""
  shared = UOp.placeholder((tokens, lanes), dtypes.float32, 100 + kv, AddrSpace.LOCAL)
  shared = shared.after(shared[token, i].store(largest(numbers)))
  maxima = [shared[token, j] for j in range(lanes)]
  return functools.reduce(UOp.maximum, maxima).maximum(SMALLEST) / 127


# Attention

def decode_kernel(out: UOp, q: UOp, keys: UOp, values: UOp, *rest: UOp, options: ScoreOptions) -> UOp:
  """Compute attention for up to TILE tokens. A work group has a token and a K/V head. Its warps split the context, and
  each has the G query heads as rows.
  out: (T, KV, G, D), or with split-KV (splits, T, KV, G, D) in float32. rest: see separate; with split-KV no sinks, but
  logs, (splits, T, KV, G): log2 of the sum of the weights."""
  sizes: Any = q.shape
  T, KV, G, D = sizes
  splits = out.shape[0] if len(out.shape) == 5 else 1
  scales, table, tokens, sinks = separate(rest[:-1] if splits > 1 else rest)
  split = UOp.special(splits, "gidx2") if splits > 1 else UOp.const(0)
  warp = decode_warp(sizes, table, tokens, split, splits, options)
  means, logs = warp_results(warp, q, Cache(keys, values, scales, table))
  stores = []
  for n in range(-(-G * D // (32 * warp.count))):
    i = n * 32 * warp.count + warp.index * 32 + warp.lane   # index in the G * D outputs of the K/V head
    g = (i // D).minimum(G - 1)
    warp_logs = [logs[w, g] for w in range(warp.count)]
    x = mean([means[w, g, i % D] for w in range(warp.count)], warp_logs, sinks, warp.kv_head * G + g)
    to = row_start(sizes, warp, 0, 0) + i
    if splits > 1:
      row = (split * T + warp.first) * KV * G + warp.kv_head * G + g
      highest = functools.reduce(UOp.maximum, warp_logs)
      total: Any = sum((x - highest).exp2() for x in warp_logs)
      log_sum = total.log2() + highest
      stores.append(rest[-1].base.index(row.valid((i < G * D) & (i % D < 1))).store(log_sum))
      to = to + split * T * KV * G * D
    stores.append(out.base.index(to.valid(i < G * D)).store(x.cast(out.dtype)))
  return attend_sink(stores)


def decode_warp(sizes: tuple[int, ...], table: UOp, tokens: UOp, split: UOp, splits: Any,
                options: ScoreOptions) -> "Warp":
  T, KV, G, D = sizes
  count = min(TILE // 16 if T * KV > 256 else 16, 1 << (SHARED_BYTES // (G * D * 4)).bit_length() - 1)
  index = UOp.special(count, "lidx1")
  lane = UOp.special(32, "lidx0")
  first = UOp.special(T, "gidx1")
  position = field(tokens, "position", first) % (table.shape[1] * BS)
  rows: list[tuple[Any, UOp]] = [(0, (lane // 4 + row).minimum(G - 1)) for row in range(0, 8 if G <= 8 else 16, 8)]
  return Warp(lane, index, count, G, UOp.special(KV, "gidx0"), first, field(tokens, "slot", first) % table.shape[0],
              rows, [position for _ in rows], position, options, options.first_block(position, table.shape[1], BS),
              split * count + index, splits * count)


def prefill_kernel(out: UOp, q: UOp, keys: UOp, values: UOp, *rest: UOp, options: ScoreOptions) -> UOp:
  """Compute attention for more than TILE tokens. A work group has a query head and a query tile (up to TILE consecutive
  tokens of a sequence), 16 tokens per warp. For a tile of up to 16 tokens, the warps split the context instead.
  out: (T, KV, G, D). rest: see separate."""
  sizes: Any = q.shape
  scales, table, tokens, sinks = separate(rest)
  number = UOp.special(min(sizes[0], sizes[0] // TILE + table.shape[0] - 1), "gidx1")
  tile = tokens[TOKENS.num_words, number].load().cast(dtypes.weakint)   # see add_query_tiles
  size = (tile < 0).where(0, tile % TILE + 1)
  splits_context = size <= 16
  warp = prefill_warp(sizes, table, tokens, tile, size, splits_context, options)
  means, logs = warp_results(warp, q, Cache(keys, values, scales, table))
  r = UOp.range(16, 1, AxisType.LOOP)
  token = splits_context.where(0, warp.index * 16) + r
  is_own = (token < size) & (splits_context.ne(True) | (r % warp.count).eq(warp.index))
  warp_logs = [(splits_context | warp.index.eq(w)).where(logs[w, r], LOWEST) for w in range(warp.count)]
  stores = []
  for d in range(0, sizes[3], 32):
    warp_means = [means[w, r, d + warp.lane] for w in range(warp.count)]
    x = mean(warp_means, warp_logs, sinks, warp.kv_head * sizes[2] + warp.rows[0][1])
    to = row_start(sizes, warp, token, warp.rows[0][1]) + d + warp.lane
    stores.append(out.base.index(to.valid(is_own)).store(x.cast(out.dtype)))
  return attend_sink([UOp.group(*stores).end(r)])


def prefill_warp(sizes: tuple[int, ...], table: UOp, tokens: UOp, tile: UOp, size: UOp, splits_context: UOp,
                 options: ScoreOptions) -> "Warp":
  T, KV, G, _ = sizes
  count = TILE // 16
  lane = UOp.special(32, "lidx0")
  index = UOp.special(count, "lidx1")
  head = UOp.special(KV * G, "gidx0")
  first = tile.maximum(0) // TILE % T
  rows = [(splits_context.where(0, index * 16) + (lane // 4 + row), head % G) for row in (0, 8)]
  position = field(tokens, "position", first) % (table.shape[1] * BS)
  last = position + size - 1
  # Rows after the tile are limited, too, because their NaN would reach the mean over the warps
  visible = [(position + token).minimum(last) for token, _ in rows]
  return Warp(lane, index, count, 16, head // G, first, field(tokens, "slot", first) % table.shape[0], rows, visible,
              last, options, options.first_block(position, table.shape[1], BS), splits_context.where(index, 0),
              splits_context.where(count, 1), (exit_if(tile < 0),))   # padding


def attend_sink(stores: list[UOp]) -> UOp:
  return UOp.group(*stores).sink(arg=KernelInfo(name="attend_tc", opts_to_apply=()))


@dataclasses.dataclass(frozen=True)
class Warp:
  """A warp's query rows, and the part of the context that it reads. A lane has row `lane // 4`, and with more than 8
  rows also row `lane // 4 + 8`."""
  lane: UOp
  index: UOp                             # index in the work group
  count: int                             # warps in the work group
  num_rows: Any                          # query rows
  kv_head: UOp
  first: UOp                             # token of the first row in the flat batch
  slot: UOp                              # the sequence's slot in block_tables
  rows: list[tuple[Any, UOp]]            # the lane's rows: token relative to `first`, query head within the K/V head
  visible: list[UOp]                     # last position that each of the lane's rows attends to
  last: UOp                              # last position that any row attends to
  options: ScoreOptions
  start: Any                             # first block that any row attends to
  split: UOp                             # the warp reads blocks start + split, start + split + splits, ...
  splits: Any
  guard: tuple[UOp, ...] = ()            # statements to run before the loads

  row = property(lambda self: self.lane // 4)
  column = property(lambda self: self.lane % 4)


# A block of the context. start: its first position. base: physical block * KV + K/V head
Block = NamedTuple("Block", [("start", UOp), ("base", UOp)])


@dataclasses.dataclass(frozen=True)
class Cache:
  """Loads a layer's K and V as matrix fragments: a lane's elements in mma's order. Fragments of int8 and fp8 are
  `factor` times too small, and int8 includes its offset of 128."""
  keys: UOp
  values: UOp
  scales: list[UOp]   # one tensor for int8, else empty
  table: UOp

  has_words = property(lambda self: self.keys.dtype != dtypes.half)
  factor = property(lambda self: kv_cache.FACTOR[bool(self.scales)] if self.has_words else 1)

  def block(self, warp: Warp, i: UOp) -> Block:
    max_blocks = self.table.shape[1]
    physical = self.table[warp.slot, i.minimum(max_blocks - 1)].load().cast(dtypes.weakint) % self.keys.shape[0]
    return Block(i * BS, physical * self.keys.shape[1] + warp.kv_head)

  def halves(self, low: UOp, high: UOp) -> list[UOp]:
    """Return two bytes as float16."""
    bits = half_bits(low | high << 16, bool(self.scales))
    return [(bits >> 16 * i).cast(dtypes.uint16).bitcast(dtypes.half) for i in range(2)]

  def key(self, warp: Warp, block: Block, half: int, step: int) -> list[UOp]:
    """Load K of eight positions, 16 dimensions from 16 * step: a lane has four dimensions of one position."""
    at = (block.base * self.keys.shape[2] + step // 2) * BS + warp.row // 2 * 4 + half * 2 + warp.row % 2
    def load(i): return self.keys.base.index(i.valid(block.start <= warp.last)).load()
    if not self.has_words: return [load(at * 32 + warp.column * 8 + step % 2 * 4 + e) for e in range(4)]
    word = load(at * 8 + warp.column * 2 + step % 2)
    return [x for i in range(2) for x in self.halves(word >> 8 * i & 255, word >> 8 * i + 16 & 255)]

  def value(self, warp: Warp, block: Block, n: int) -> list[UOp]:
    """Load V of 16 positions, the n-th eight dimensions: a lane has four positions of one dimension."""
    d = (n // 4 * 8 if self.has_words else n * 8) + warp.row
    at = (block.base * self.values.shape[2] + d) * BS + warp.column * 4
    position = block.start + warp.column * 4
    elements = [self.values.base.index((at + e).valid(position <= warp.last)).load() for e in range(4)]
    if not self.has_words:   # unwritten positions may hold NaN
      return [(position + e <= warp.last).where(x, HALF_ZERO) for e, x in enumerate(elements)]
    return [x for e in (0, 2) for x in self.halves(*[word >> n % 4 * 8 & 255 for word in elements[e:e + 2]])]

  def dimension(self, n: int, i: Any) -> Any:
    """Return the dimension at index i of the n-th eight."""
    return n // 4 * 32 + i * 4 + n % 4 if self.has_words else n * 8 + i

  def scale(self, block: Block, kv: int, i: UOp) -> UOp:
    """Load the int8 scale of K (kv 0) or V (1) at the block's i-th position."""
    return self.scales[0].base.index((block.base * 2 + kv) * BS + i).load()


@dataclasses.dataclass(frozen=True)
class WarpState(State):
  """A lane's accumulators. total: (D / 8 * rows * 2,), the others: (rows,). weight: over the lane's own positions."""
  scaled_weight: UOp   # sum of the weights times V's scales (int8)


HALF_ZERO = UOp.const(0.0, dtypes.half)
ZEROS = UOp.const((0.0,) * 4, dtypes.float32)


def accumulate(warp: Warp, q: UOp, cache: Cache) -> WarpState:
  """Attend the warp's rows to its split of the context, one block per iteration."""
  D: Any = q.shape[3]
  queries = [query(warp, q, cache, step) for step in range(D // 16)]
  rows = len(warp.rows)
  initial: Any = {"total": (D // 8 * rows * 2, 0.0), "highest": (rows, LOWEST), "weight": (rows, 0.0),
                  "scaled_weight": (rows, 0.0), "iteration": (1, 0)}   # size and initial value
  registers = {name: UOp.placeholder((size,), dtypes.int32 if name == "iteration" else dtypes.float32, 100 + i,
                                     AddrSpace.REG) for i, (name, (size, _)) in enumerate(initial.items())}
  resets = [registers[name].after(*warp.guard)[i].store(value)
            for name, (size, value) in initial.items() for i in range(size)]
  state = WarpState(**registers)
  loop = UOp.loop(0)
  current = state.after(UOp.group(*resets), loop)
  iteration = current.index(cache.table.shape[1])
  block = cache.block(warp, warp.start + iteration * warp.splits + warp.split)
  stores = [current.iteration[0].store(current.iteration[0].load() + 1),
            *add_block(warp, cache, block, current, scores(warp, cache, block, queries), D)]
  return state.after(UOp.group(*stores).end(loop, (warp.start + (iteration + 1) * warp.splits) * BS <= warp.last))


def query(warp: Warp, q: UOp, cache: Cache, step: int) -> list[UOp]:
  """Load the query fragment of 16 dimensions from 16 * step, in the order of Cache.key."""
  order = (0, 2, 1, 3) if cache.has_words else range(4)
  starts = [row_start(q.shape, warp, *row) + step // 2 * 32 + warp.column * 8 + step % 2 * 4 for row in warp.rows]
  return fragment([[q.base.after(*warp.guard).index(start + e).load() for e in order] for start in starts])


def scores(warp: Warp, cache: Cache, block: Block, queries: list[list[UOp]]) -> list[list[UOp]]:
  """Return the scores of the lane's rows and four positions."""
  unit = warp.options.factor(16 * len(queries))
  sums = ZEROS   # sums of the query's numbers, to subtract int8's offset of 128
  for a in queries: sums = mma(a, [UOp.const(1.0, dtypes.half)] * 4, sums) if cache.scales else ZEROS
  result: list[list[UOp]] = [[] for _ in warp.rows]
  for half in range(2):
    dot = ZEROS
    for step, a in enumerate(queries): dot = mma(a, cache.key(warp, block, half, step), dot)
    for r, e in itertools.product(range(len(warp.rows)), range(2)):
      i = warp.column * 4 + half * 2 + e   # position in the block
      score = dot.index(r * 2 + e) * (cache.factor * unit)
      if cache.scales: score = (score - sums.index(r * 2) * (128 * unit)) * cache.scale(block, 0, i)
      result[r].append(warp.options.masked(score, warp.visible[r], block.start + i))
  return result


def add_block(warp: Warp, cache: Cache, block: Block, state: WarpState, scores: list[list[UOp]], D: int) -> list[UOp]:
  """Return the stores of online softmax: rescale the accumulators, and add a block's weighted V."""
  rows = range(len(warp.rows))
  highest = [over_row(functools.reduce(UOp.maximum, row, state.highest[r].load()), UOp.maximum)
             for r, row in enumerate(scores)]
  rescales = [(state.highest[r].load() - highest[r]).exp2() for r in rows]
  weights = [[(x - highest[r]).exp2() for x in row] for r, row in enumerate(scores)]
  scaled = weights
  if cache.scales:
    scales = [cache.scale(block, 1, warp.column * 4 + e) * SCALE_FACTOR for e in range(4)]
    position = block.start + warp.column * 4
    scaled = [[(position + e <= warp.last).where(x * scales[e], 0.0) for e, x in enumerate(row)] for row in weights]
  factors = [[x.cast(dtypes.half) for x in row] for row in scaled]
  stores = []
  for r in rows:
    weight = state.weight[r] * rescales[r] + sum(weights[r])
    stores += [state.highest[r].store(highest[r]), state.weight[r].store(weight)]
    if not cache.scales: continue
    added = sum(x.float() for x in factors[r])
    stores.append(state.scaled_weight[r].store(state.scaled_weight[r] * rescales[r] + added))
  for n in range(D // 8):
    indices = [(n * len(rows) + r) * 2 + e for r in rows for e in range(2)]
    total = [state.total[j] * rescales[i // 2] for i, j in enumerate(indices)]
    total += [UOp.const(0.0, dtypes.float32)] * (4 - len(total))
    product = mma(fragment(factors), cache.value(warp, block, n), UOp.stack(*total))
    stores += [state.total[j].store(product.index(i)) for i, j in enumerate(indices)]
  return stores


def warp_results(warp: Warp, q: UOp, cache: Cache) -> tuple[UOp, UOp]:
  """Attend, and store each warp's results in shared memory. Return the mean of V, (warps, rows, D), and log2 of the
  weights' sum, (warps, rows)."""
  D: Any = q.shape[3]
  state = accumulate(warp, q, cache)
  means = UOp.placeholder((warp.count, warp.num_rows, D), dtypes.float32, 110, AddrSpace.LOCAL)
  logs = UOp.placeholder((warp.count, warp.num_rows), dtypes.float32, 111, AddrSpace.LOCAL)
  factor = cache.factor / SCALE_FACTOR if cache.scales else cache.factor
  stores = []
  for r in range(len(warp.rows)):
    row = warp.index * warp.num_rows + warp.row + 8 * r
    exists = warp.row + 8 * r < warp.num_rows
    weight = over_row(state.weight[r].load(), UOp.add)
    offset = over_row(state.scaled_weight[r].load(), UOp.add) * (128 / SCALE_FACTOR) if cache.scales else 0
    log = state.highest[r].load() + weight.log2()
    stores.append(logs.base.index(row.valid(exists & (warp.column < 1))).store(log))
    for n, e in itertools.product(range(D // 8), range(2)):
      total = state.total[(n * len(warp.rows) + r) * 2 + e] * factor - offset
      to = row * D + cache.dimension(n, warp.column * 2 + e)
      stores.append(means.base.index(to.valid(exists)).store(total / weight))
  done = UOp.group(*stores)
  return means.after(done), logs.after(done)


def row_start(shape: tuple[sint, ...], warp: Warp, token: Any, g: Any) -> UOp:
  """Return the index of a query row's first element in a flat tensor of `shape`, (T, KV, G, D)."""
  T, KV, G, D = shape
  return (((warp.first + token).minimum(T - 1) * KV + warp.kv_head) * G + g) * D


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
