"""Paged attention on NVIDIA tensor cores, see attention.cu: the layout of the cache, RoPE and the write of K and V.

A lane loads neighbours in memory. Blocks of K and V: (KV, D / 32, 16, 32) in float16; for int8 and fp8
(KV, D / 32, 16, 8) uint32 words of four dimensions."""
import functools, math

from tinygrad import Tensor, UOp, dtypes

from tinyvllm.backend import TOKENS

from . import cuda_source, generic
from .cuda_source import Launch
from .schedule import ScoreOptions, axes, kernel_of, mean

BS = 16   # positions in a block
MAX_DECODE = 64   # tokens of a step for which a work group has all query heads of a token
STAGE = 4    # blocks of a chunk's context that a work group copies together
MIN_WORK_GROUPS = 128   # to keep a GPU busy
DECODE_WARPS = 1024     # warps of a decode step, 2 to 16 in a work group (measured on an H200)
SHARED_BYTES = 2**16    # limit for the shared memory of a decode's work group, on Hopper twice as much
HOPPER_BYTES = 231424   # shared memory of attention_hopper.cu
NEAR = 4                # dimensions in each half of a head that a lane rotates
TOKENS_OF_GROUP = 4     # maximum tokens of a work group that rotates


# Tokens per query tile in a step of T tokens
def tile_size(T: int) -> int: return 64 if T <= 512 and not cuda_source.has_wgmma() else 128


def attend(qkv: Tensor, cache: list[Tensor], rope: Tensor, tokens: Tensor, block_tables: Tensor, num_heads: int,
           scale: float = 0, window: int = 0, cap: float = 0, sinks: Tensor | None = None) -> Tensor:
  """Like Backend.attend, for both layouts. tokens: for tensor cores, see `add_query_tiles`."""
  writer, read = (LaneWriter, read_tiles) if cache[0].ndim == 5 else (generic.HeadWriter, generic.read)
  KV = cache[0].shape[1]
  q = Tensor.empty(len(qkv), KV, num_heads // KV, qkv.shape[1] // (num_heads + 2 * KV), dtype=qkv.dtype,
                   device=qkv.device)                                   # (T, KV, G, D)
  q, keys, values, *scales = q.custom_kernel(
    *cache, qkv, rope, tokens, fxn=functools.partial(generic.rope_kernel, writer=writer))[:-3]
  tensors = {"out": q.empty_like(), "q": q, "keys": keys, "values": values, "table": block_tables, "tokens": tokens,
             "scales": scales[0] if scales else None, "sinks": sinks}
  return read({name: x for name, x in tensors.items() if x is not None}, ScoreOptions(scale, window, cap)).flatten(1)


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
  launch = launch_attention(tensors, options, splits, False)
  sinks = [tensors.pop("sinks")] if "sinks" in tensors else []
  means, logs = [Tensor.empty(splits, *x, dtype=dtypes.float32, device=q.device) for x in (q.shape, q.shape[:3])]
  means, *_, logs = cuda_source.run(launch, **tensors | {"out": means, "logs": logs})
  return out.custom_kernel(means, logs, *sinks, fxn=combine_kernel)[0]


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
  """A HeadWriter whose neighbouring lanes have NEAR neighbouring dimensions of each half of a head."""
  def lane(self) -> tuple[UOp, UOp, list[UOp]]:
    lanes, count = self.D // 2 // NEAR, math.gcd(self.T, TOKENS_OF_GROUP)
    # Not ranges, which tinygrad splits: neighbouring lanes would be far from each other in memory
    h, group, i = map(UOp.special, (self.KV, self.T // count, count * lanes), ("gidx0", "gidx1", "lidx0"))
    return group * count + i // lanes, h, [i % lanes * NEAR + j for j in range(NEAR)]

  def cell(self, kv: int, d: UOp) -> UOp:
    n = 32 // self.in_element
    return (self.values if kv else self.keys)[self.block, self.h, d // n, self.offset, d % n]
