"""Paged attention (Kwon et al. 2023, arXiv:2309.06180), and RoPE with the write of K and V: for any device, from
attention.c on a CPU, and from attention.cu and attention_hopper.cu on NVIDIA tensor cores. The kernels read K and V
through the block table, without a copy of the context. Reads must use the tensors that a write returns, because these
carry the order.

The cache has floats, int8 with a scale per token and head, or fp8 (e4m3, Micikevicius et al. 2022, arXiv:2209.05433).
Conversion from and to fp8 uses integers, so that any device with float16 supports it. keys: (num_blocks, KV, D / n,
block_size), values: (num_blocks, KV, block_size, D / n). An element holds n dimensions: a float, a byte on a CPU, or a
uint32 word of four bytes on a GPU, where tinygrad does not combine byte loads. An int8 byte is 128 + number / scale.
scales: (num_blocks, KV, 2, block_size) in float32, for K and V. On tensor cores, where a lane loads neighbours in
memory, blocks of K and V are (KV, D / 32, 16, 32) in float16; for int8 and fp8 (KV, D / 32, 16, 8) uint32 words of four
dimensions.

qkv: (T, (H + 2 KV) * D), a flat batch. tokens: (columns of TOKENS, T) int32. rope: (length, 2, D / 2), cosines and
sines. block_tables: (slots, max_blocks) int32. G = H / KV query heads share a K/V head."""
import dataclasses, functools, itertools, math
from collections.abc import Iterator, Sequence

from tinygrad import Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import AxisType, Ops, sint

from tinyvllm.backend import TOKENS, cpu_cores, renderer

from . import cpu, cuda_source
from .cuda_source import Launch
from .schedule import axis, call, end, fold, kernel_of, lane_axis, unrolled

LOWEST = -1e30   # score with weight 0; not -inf, because inf - inf is NaN
LOG2_E = math.log2(math.e)
SMALLEST = 1e-30   # lower limit of a head's largest number, to avoid division by 0
BS = 16   # positions in a block
MAX_DECODE = 64   # tokens of a step for which a work group has all query heads of a token
STAGE = 4    # blocks of a chunk's context that a work group copies together
MIN_WORK_GROUPS = 128   # to keep a GPU busy
DECODE_WARPS = 1024     # warps of a decode step, 2 to 16 in a work group (measured on an H200)
SHARED_BYTES = 2**16    # limit for the shared memory of a decode's work group, on Hopper twice as much
HOPPER_BYTES = 231424   # shared memory of attention_hopper.cu
NEAR = 4                # dimensions in each half of a head that a lane rotates
TOKENS_OF_GROUP = 4     # maximum tokens of a work group that rotates


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
  """Options of Backend.attend. Scores are base-2 logarithms of softmax weights."""
  scale: float = 0
  window: int = 0
  cap: float = 0

  def factor(self, D: int) -> float:
    """Return the factor from q . k to a score."""
    return LOG2_E * (self.scale or D**-0.5)

  def definitions(self, tensors: dict[str, Tensor]) -> dict[str, object]:
    """Return the macros of all sources of attention. tensors: see attend."""
    (T, KV, G, D), max_blocks = tensors["q"].max_shape, tensors["table"].max_shape[1]
    columns = [*TOKENS.formats]
    return {"T": T, "KV": KV, "G": G, "D": D, "MAX_BLOCKS": max_blocks, "SLOT": columns.index("slot"),
            "POSITION": columns.index("position"), "WINDOW": self.window, "CAP": f"{self.cap:f}f",
            "UNIT": f"{self.factor(D):.9f}f", "LOWEST": f"{LOWEST}f", "LOG2_E": f"{LOG2_E:.9f}f"}

  def sees(self, position: UOp, at: UOp) -> UOp:
    return (at <= position) & (at > position - self.window) if self.window else at <= position

  def first_block(self, position: UOp, max_blocks: sint, block_size: sint) -> UOp | int:
    """Return the index of the first block that a token at `position` sees."""
    return (position - self.window + 1).maximum(0) // block_size % max_blocks if self.window else 0


def attend(qkv: Tensor, cache: list[Tensor], rope: Tensor, tokens: Tensor, block_tables: Tensor, num_heads: int,
           scale: float = 0, window: int = 0, cap: float = 0, sinks: Tensor | None = None) -> Tensor:
  """Like Backend.attend, for both layouts. tokens: for tensor cores, see `add_query_tiles`."""
  KV = cache[0].shape[1]
  q = Tensor.empty(len(qkv), KV, num_heads // KV, qkv.shape[1] // (num_heads + 2 * KV), dtype=qkv.dtype,
                   device=qkv.device)                                   # (T, KV, G, D)
  q, keys, values, *scales = q.custom_kernel(*cache, qkv, rope, tokens, fxn=rope_kernel)[:-3]
  tensors = {"out": q.empty_like(), "q": q, "keys": keys, "values": values, "table": block_tables, "tokens": tokens,
             "scales": scales[0] if scales else None, "sinks": sinks}
  reader = read_tiles if keys.ndim == 5 else read
  return reader({name: x for name, x in tensors.items() if x is not None}, ScoreOptions(scale, window, cap)).flatten(1)


# Kernels for any device, and attention.c

def field(tokens: UOp, name: str, t: UOp) -> UOp:
  """Load a column of TOKENS. tokens: (columns, T) int32."""
  return tokens[[*TOKENS.formats].index(name), t].load().cast(dtypes.weakint)


def largest(numbers: Sequence[UOp]) -> UOp: return functools.reduce(UOp.maximum, [x.maximum(-x) for x in numbers])


def mean(values: Sequence[UOp], logs: Sequence[UOp]) -> UOp:
  """Return the weighted mean of values. logs: base-2 logarithms of the weights; the last may be of a sink, without a
  value."""
  highest = functools.reduce(UOp.maximum, logs)
  weights = [(x - highest).exp2() for x in logs]
  return UOp.usum(*[x * weight for x, weight in zip(values, weights, strict=False)]) / UOp.usum(*weights)


def read(tensors: dict[str, Tensor], options: ScoreOptions) -> Tensor:
  """Attend to the cache. tensors: out and q, (T, KV, G, D), keys, values and scales (int8 only) of the cache, table,
  (slots, max_blocks), tokens, and sinks, (H,), if there are any. Return `out`."""
  if not cuda_source.speaks_c(): return call(lambda operands: attend_kernel(options, **operands), **tensors)[0]
  (T, _, G, D), keys, cores = tensors["q"].max_shape, tensors["keys"], cpu_cores()
  block_size = keys.max_shape[3]
  launch = Launch(f"attend_{T}", "attention.c", options.definitions(tensors) | {
    "ELEMENT": keys.dtype.name, "half": "_Float16", "BLOCK_SIZE": block_size, "CORES": cores, "TILE": max(1, 48 // G),
    "STEP": max(1, 64 // block_size) * block_size, "LANES": math.gcd(-(-D // 16) * 16, 64 if cpu.AVX512 else 16),
    "ROWS": 6 if T > 64 else min(G, 6)}, (cores, 1, 1))
  return cuda_source.run(launch, **tensors)[0]


# Dimensions of a head in an element of the cache
def dimensions_in(element: DType) -> int: return 1 if element in dtypes.floats else element.itemsize


def pack(numbers: Sequence[UOp], dtype: DType, scaled: bool) -> UOp:
  """Return a cache element that holds neighbours along D. scaled: numbers are already divided by their int8 scale."""
  if dtype in dtypes.floats: return numbers[0].cast(dtype)
  def byte(x):
    if scaled: return (x.round() + 128).cast(dtypes.uint32)
    size = x.maximum(-x).minimum(448)   # e4m3's largest number
    bits = size.bitcast(dtypes.uint32)
    normal = bits - (120 << 23) + 0x7ffff + (bits >> 20 & 1) >> 20   # 4 bits of the exponent and 3 of the mantissa
    return (size < 2**-6).where((size * 2**9).round().cast(dtypes.uint32), normal) | (x < 0).where(128, 0)
  return functools.reduce(UOp.__or__, [byte(x) << 8 * i for i, x in enumerate(numbers)]).cast(dtype)


def unpack(element: UOp, i: UOp, scaled: bool) -> UOp:
  """Return the i-th number of a cache element in float32; int8 (scaled) is not yet multiplied by its scale."""
  if element.dtype in dtypes.floats: return element.float()
  byte = element >> (i * 8).cast(dtypes.uint32) & 255 if element.dtype == dtypes.uint32 else element
  if scaled: return byte.float() - 128
  byte = byte.cast(dtypes.uint16)
  return ((byte & 127) << 7 | (byte & 128) << 8).bitcast(dtypes.half).float() * 256


class HeadWriter:
  """Rotates q and k of a token and a K/V head, and writes k and v to the token's block. RoPE rotates the first half of
  a head with the second. On tensor cores, neighbouring lanes have NEAR neighbouring dimensions of each half. inputs: q,
  (T, KV, G, D), as output; keys, values, scales (int8 only), qkv, rope, tokens."""
  def __init__(self, *inputs: UOp):
    self.q, self.keys, self.values, *self.scales, self.qkv, self.rope, tokens = inputs
    self.T, self.KV, self.G, self.D = self.q.max_shape
    n = self.in_element = dimensions_in(self.keys.dtype)
    if self.keys.ndim == 4 or cpu_cores():
      self.t, self.h, i = [UOp.range(size, axis_id) for axis_id, size in enumerate((self.T, self.KV, self.D // n // 2))]
      self.dimensions = [i * n + j for j in range(n)]   # the lane's, in the first half of a head
    else:
      lanes, count = self.D // 2 // NEAR, math.gcd(self.T, TOKENS_OF_GROUP)
      # Not ranges, which tinygrad splits: neighbouring lanes would be far from each other in memory
      self.h, group, i = map(UOp.special, (self.KV, self.T // count, count * lanes), ("gidx0", "gidx1", "lidx0"))
      self.t, self.dimensions = group * count + i // lanes, [i % lanes * NEAR + j for j in range(NEAR)]
    self.block = field(tokens, "block", self.t) % self.keys.shape[0]
    self.position = field(tokens, "position", self.t)
    self.offset = self.position % self.keys.shape[3]

  def cell(self, kv: int, d: UOp) -> UOp:
    """Return the d-th element of the head in the cache, of K (kv 0) or V (1)."""
    cache, n = self.values if kv else self.keys, 32 // self.in_element
    if cache.ndim == 5: return cache[self.block, self.h, d // n, self.offset, d % n]
    return cache[self.block, self.h, *((self.offset, d) if kv else (d, self.offset))]

  def numbers(self, head: UOp, i: UOp, is_rotated: bool = True) -> Sequence[UOp]:
    """Return the i-th numbers of both halves of a head, with RoPE (Su et al. 2021, arXiv:2104.09864)."""
    a, b = [self.qkv[self.t, head * self.D + d].float() for d in (i, i + self.D // 2)]
    cos, sin = [self.rope[self.position % self.rope.shape[0], z, i] for z in range(2)]
    return [a * cos - b * sin, b * cos + a * sin] if is_rotated else [a, b]

  def stores(self) -> Iterator[UOp]:
    h, half_size, n = self.h, self.D // 2, self.in_element
    for g, d in itertools.product(range(self.G), self.dimensions):
      for z, number in enumerate(self.numbers(h * self.G + g, d)):
        yield self.q[self.t, h, g, z * half_size + d].store(number.cast(self.q.dtype))
    for kv in range(2):
      head = self.KV * (self.G + kv) + h
      pairs = [self.numbers(head, d, not kv) for d in self.dimensions]
      for scales in self.scales:
        highest = fold(largest(self.numbers(head, unrolled(half_size, 8, 3 + 2 * kv), not kv)), Ops.MAX)
        scale = highest.maximum(SMALLEST) / 127
        yield scales[self.block, h, kv, self.offset].store(scale)   # by every lane of the head
        pairs = [[x / scale for x in pair] for pair in pairs]
      for z, half in enumerate(zip(*pairs, strict=True)):
        for j in range(0, len(half), n):
          element = pack(half[j:j + n], self.keys.dtype, bool(self.scales))
          yield self.cell(kv, (z * half_size + self.dimensions[j]) // n).store(element)


def rope_kernel(*inputs: UOp) -> UOp:
  # A kernel with lanes is complete: tinygrad's heuristics would share its sums among lanes of different heads
  return kernel_of("rope_and_write", UOp.group(*HeadWriter(*inputs).stores()), None if inputs[1].ndim == 4 else ())


class WorkGroup:
  """A token, a K/V head, and the axes of the lanes that attend to the token's context, D positions per iteration. Each
  lane scores `width` positions for all G queries, then sums as many dimensions of V, so that lanes share loads. With
  few tokens, `splits` parts of a context are attended to in parallel (split-KV). Values for GPUs were measured on an
  H200 (tests/benchmarks/LOG.md). scales: one tensor for int8, else empty. table: block_tables."""
  def __init__(self, q: UOp, scales: list[UOp], table: UOp, tokens: UOp, block_size: int, options: ScoreOptions):
    self.q, self.scales, self.table, self.block_size, self.options = q, scales, table, block_size, options
    T, KV, G, self.D = q.max_shape
    width = math.gcd(self.D, block_size, 4 if T > 64 else 2)
    limit = 2048 if renderer().tensor_cores else 1024   # 12 bytes per dimension; WebGPU has 16 KiB shared memory
    self.splits = 1 if T > 64 or cpu_cores() else max(1, min(256 // self.D, limit // (G * self.D)))
    self.unroll = 1 if cpu_cores() else 64 // width   # of inner loops
    self.t, self.h = UOp.range(T, 0), UOp.range(KV, 1)
    self.g = UOp.range(G, 2, AxisType.UPCAST)   # one of the K/V head's G query heads
    self.split = axis(self.splits, 3, AxisType.LOCAL)
    self.near = axis(width, 12, AxisType.UPCAST)
    # A lane's positions, or dimensions of V, are first + near
    self.first = UOp.range(self.D // width, 4, lane_axis()[0]) * width
    self.own = self.split, self.g, self.first + self.near
    self.position, self.slot = [field(tokens, name, self.t) for name in ("position", "slot")]
    self.start = options.first_block(self.position, table.shape[1], block_size) * block_size   # first position to score

  def load(self, tensor: UOp, at: UOp, index: UOp, is_visible: UOp) -> UOp:
    """Load from the block of position `at`, or 0 if it is not visible. index: within the block's head."""
    num_blocks, KV, *size = tensor.shape
    i = (at // self.block_size).minimum(self.table.shape[1] - 1)
    block = self.table[self.slot % self.table.shape[0], i].cast(dtypes.weakint) % num_blocks
    return tensor.base.index(((block * KV + self.h) * math.prod(size) + index).valid(is_visible)).load()

  def number(self, kv: int, tensor: UOp, at: UOp, near: UOp | int, d: UOp, is_visible: UOp) -> UOp:
    """Load the d-th number of K (kv 0) or V (1) of position `at` + near, which is in the block of `at`."""
    n, offset = dimensions_in(tensor.dtype), at % self.block_size + near
    index = offset * tensor.shape[3] + d // n if kv else d // n * self.block_size + offset
    x = unpack(self.load(tensor, at, index, is_visible), d % n, bool(self.scales))
    for scale in self.scales: x *= self.load(scale, at, kv * self.block_size + offset, is_visible)
    return x


def attend_kernel(options: ScoreOptions, out: UOp, q: UOp, keys: UOp, values: UOp, table: UOp, tokens: UOp,
                  scales: UOp | None = None, sinks: UOp | None = None) -> UOp:
  """Compute causal attention of each token over its own sequence, up to the sequence's length. See read."""
  group = WorkGroup(q, [] if scales is None else [scales], table, tokens, keys.max_shape[3], options)
  mean_value = result(group, accumulate(group, keys, values), [] if sinks is None else [sinks]).cast(out.dtype)
  return kernel_of("attend", out[group.t, group.h, *group.own[1:]].store(mean_value), ())


def accumulate(group: WorkGroup, keys: UOp, values: UOp) -> list[UOp]:
  """Attend to the context, D positions per iteration. Return the accumulators of online softmax, in float32 (Dao et al.
  2022, arXiv:2205.14135): the weighted sum of V, (splits, G, D), the highest score and the sum of the weights, (G,),
  and memory for scores, (splits, G, D)."""
  _, _, G, D = group.q.max_shape
  sums, scores, weights = [UOp.placeholder((group.splits, G, D), dtypes.float32, 100 + i, lane_axis()[1])
                           for i in range(3)]
  highest, weight = [UOp.placeholder((G,), dtypes.float32, 103 + i, AddrSpace.REG) for i in range(2)]
  memory = [sums, highest, weight, scores, weights, UOp.placeholder((1,), dtypes.int32, 105, AddrSpace.REG)]
  loop, start = UOp.loop(5), memory[-1].after(group.t, group.h)[0].store(0)
  *current, number = [x.after(start, loop) for x in memory]   # number: of the iteration
  # The limit keeps index arithmetic in 32 bits
  iteration = number[0].load().cast(dtypes.weakint) % -(-group.table.shape[1] * group.block_size // (group.splits * D))
  stores = [*add_values(group, current, keys, values, iteration), number[0].store(number[0].load() + 1)]
  next_position = group.start + (iteration + 1) * group.splits * D
  return [x.after(UOp.group(*stores).end(loop, next_position <= group.position)) for x in memory[:4]]


def add_scores(group: WorkGroup, scores: UOp, keys: UOp, iteration: UOp) -> UOp:
  """Score D positions, LOWEST if the token does not see one. Return `scores` after their store."""
  at = group.start + (iteration * group.splits + group.split) * group.D + group.first
  d, first = unrolled(group.D, group.unroll, 6), at // group.block_size * group.block_size
  k = group.number(0, keys, at, group.near, d, first <= group.position)   # loads whole blocks
  x = fold(group.q[group.t, group.h, group.g, d].float() * k) * group.options.factor(group.D)
  if cap := group.options.cap:   # cap * tanh(x / cap); a larger exponent than 126 could overflow and changes nothing
    x = 2 * cap * LOG2_E / (1 + (x * (-2 / cap)).minimum(126).exp2()) - cap * LOG2_E
  is_visible = group.options.sees(group.position, at + group.near)
  return scores.after(end(scores[group.own].store(is_visible.where(x, LOWEST))))   # unwritten positions may hold NaN


def add_values(group: WorkGroup, memory: list[UOp], keys: UOp, values: UOp, iteration: UOp) -> list[UOp]:
  """Return the stores of online softmax: rescale the accumulators, and add the weighted V of D positions."""
  split, g, d = group.own
  sums, highest, weight, scores, weights = memory
  scores = add_scores(group, scores, keys, iteration)
  def previous(x, initial): return (iteration < 1).where(initial, x)
  high = previous(highest[g], LOWEST).maximum(fold(scores[split, g, unrolled(group.D, 32, 8)], Ops.MAX))
  factor = (highest[g] - high).exp2()
  weights = weights.after(end(weights[group.own].store((scores[group.own] - high).exp2())))
  i = unrolled(group.D, group.unroll, 10)
  at = group.start + (iteration * group.splits + split) * group.D + i
  v = group.number(1, values, at, 0, d, group.options.sees(group.position, at))
  def add(x, terms): return end(x.store(previous(x * factor, 0.0) + fold(terms)))
  return [add(sums[group.own], weights[split, g, i] * v), add(weight[g], weights[split, g, i]),
          end(highest[g].store(high))]


def result(group: WorkGroup, memory: list[UOp], sinks: list[UOp]) -> UOp:
  """Return the weighted mean of V over all splits. memory: see accumulate."""
  sums, highest, weight, scores = memory
  own = sums[group.own] / weight[group.g]
  if group.splits == 1 and not sinks: return own
  log = scores[group.own].store(highest[group.g] + weight[group.g].log2())
  stored = UOp.group(end(log), end(sums[group.own].store(own)))
  values, logs = [[x.after(stored)[i, *group.own[1:]] for i in range(group.splits)] for x in (sums, scores)]
  return mean(values, [*logs, *[x[group.h * group.q.shape[2] + group.g].load().float() * LOG2_E for x in sinks]])


# Tensor cores

# Tokens per query tile in a step of T tokens
def tile_size(T: int) -> int: return 64 if T <= 512 and not cuda_source.has_wgmma() else 128


def add_query_tiles(tokens: Tensor, block_tables: Tensor) -> Tensor:
  """Return tokens, (columns, T) int32, with two more columns. Row n of the first one describes query tile n, up to
  tile_size consecutive tokens of a sequence: tile_size * first token + number of further tokens, or -1 for no tile. A
  sequence's only token is in no tile if it is among the first ones, up to the number of slots, where the scheduler has
  decodes: see read. Each row of the second column, matmul.COUNT, is the number of tokens without padding."""
  size, slots = tile_size(int(tokens.shape[1])), int(block_tables.shape[0])
  slot = TOKENS.read(tokens)["slot"]                                    # (T,)
  t = Tensor.arange(slot.shape[0], dtype=dtypes.int32)
  is_earlier = t < t.unsqueeze(1)                                       # (T, T)
  is_same = slot == slot.unsqueeze(1)
  def count(x: Tensor) -> Tensor: return x.sum(1, dtype=dtypes.int32).contiguous()
  exists = slot < slots - 1                                             # padding has the last slot
  before, after = count(is_same & is_earlier), count(is_same & is_earlier.logical_not()) - 1
  begins = ((before % size == 0) & exists & ((before + after > 0) | (t >= slots))).contiguous()
  number = count(is_earlier & begins)                                   # tiles that begin earlier
  tiles = count(((number == t.unsqueeze(1)) & begins).where(t * size + after.minimum(size - 1) + 1, 0)) - 1
  num_tokens = exists.sum(dtype=dtypes.int32).expand(1, t.shape[0])
  return tokens[:TOKENS.num_words].cat(tiles.unsqueeze(0), num_tokens).contiguous()


def read_tiles(tensors: dict[str, Tensor], options: ScoreOptions) -> Tensor:
  """Attend to the cache. tensors: see attend. Return `out`. A step with prompts has query tiles, and before them work
  groups for the tokens without a tile."""
  out, q, table = tensors["out"], tensors["q"], tensors["table"]
  T, KV = [int(n) for n in q.shape[:2]]
  # Split-KV: with few tokens and possibly long contexts, several work groups share a token and a K/V head
  context = min(table.shape[1] * BS, options.window or 2**31)
  splits = max(1, MIN_WORK_GROUPS // (T * KV)) if context > 1024 and T <= MAX_DECODE else 1
  for is_prefill in (False, True)[:1 + (T > MAX_DECODE)] if splits == 1 else ():
    out = cuda_source.run(launch_attention(tensors, options, splits, is_prefill), **tensors | {"out": out})[0]
  if splits == 1: return out
  sinks = [(tensors.pop("sinks").reshape(1, *q.shape[1:3], 1).float() * LOG2_E).uop] if "sinks" in tensors else []
  means, logs = [Tensor.empty(splits, *x, dtype=dtypes.float32, device=q.device) for x in (q.shape, q.shape[:3])]
  launch = launch_attention(tensors, options, splits, False)
  means, *_, logs = cuda_source.run(launch, **tensors | {"out": means, "logs": logs})
  values, weights = [[x[i].uop for i in range(splits)] for x in (means, logs.unsqueeze(4))]
  return Tensor(mean(values, weights + sinks)).cast(q.dtype).contiguous()


def launch_attention(tensors: dict[str, Tensor], options: ScoreOptions, splits: int, is_prefill: bool) -> Launch:
  """Return the launch of attention.cu or, for chunks on Hopper, attention_hopper.cu. out: (T, KV, G, D), or with
  split-KV (splits, T, KV, G, D) in float32. logs: (splits, T, KV, G), log2 of the sum of the weights."""
  (T, KV, G, D), slots = tensors["q"].max_shape, tensors["table"].max_shape[0]
  is_bytes, num_decodes = tensors["keys"].dtype != dtypes.half, min(T, slots) if T > MAX_DECODE else T
  block_bytes = 2 * BS * D * (1 if is_bytes else 2)
  # Shared memory has two stages of K and V, then the results of each warp
  limit = (SHARED_BYTES << cuda_source.has_wgmma()) // max(2 * block_bytes, G * (D + 1) * 4)
  warps = min(16, max(2, DECODE_WARPS // (num_decodes * KV)), limit)
  tile_warps = 4 if D <= 128 else tile_size(T) // 16   # with 16 rows of 256 numbers, a warp's registers are full
  tile, warps, rows = (tile_size(T), tile_warps, tile_size(T) // tile_warps) if is_prefill else (1, warps, G)
  definitions = options.definitions(tensors) | {
    "TYPE": f'"{cuda_source.TYPES[tensors["q"].dtype]}"', "WARPS": warps, "M": max(1, rows // 16), "SPLITS": splits,
    "IS_PREFILL": int(is_prefill), "IS_BYTES": int(is_bytes), "TILE": tile, "HAS_TILES": int(T > MAX_DECODE),
    "STAGE": STAGE if is_prefill else 1, "NUM_WORDS": TOKENS.num_words}
  groups = (KV * G, min(T, T // tile + slots - 1), 1) if is_prefill else (KV, num_decodes, splits)
  if (is_prefill and D in (64, 128) and cuda_source.has_wgmma()
      and not (is_bytes or options.window or options.cap or "sinks" in tensors)):
    return Launch(f"attend_{T}", "attention_hopper.cu", definitions | cuda_source.wgmma(D), groups, 384, HOPPER_BYTES)
  shared_bytes = max(warps * rows * (D + 1) * 4, 2 * block_bytes * (STAGE if is_prefill else warps))
  return Launch(f"attend_{T}", "attention.cu", definitions, groups, 32 * warps, shared_bytes)
