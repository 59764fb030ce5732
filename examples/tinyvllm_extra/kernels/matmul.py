"""x @ W.T as UOps that state their schedule, once for tensor cores and once for all other devices, and the norm before
it. A custom kernel gets its buffers, and says what to loop over, what each thread does and where results go."""
import functools
from collections.abc import Sequence
from math import gcd, inf
from typing import Any, NamedTuple

import numpy as np
from tinygrad import Tensor, UOp, dtypes, helpers
from tinygrad.dtype import AddrSpace, DType
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import AxisType, Ops, sint

from tinyvllm import backend
from tinyvllm.backend import cpu_cores, renderer

from ..quantization import Quantized
from ..parallel import local_ids, partial_sums
from .cpu import cpu_sums
from .schedule import axes, axis, divisor, end, fold, kernel_of, lane_axis, shared_by, unrolled

MMA = (8, 16, 16)   # the tensor core used here: n, m, k
AHEAD = 4096   # bytes, by which a CPU's core asks for weights before it needs them
# Elements of w, x and the sum in a lane, by four axes, from the 6th on: which two of 4 inputs, which eight of 16
# outputs, which of the two inputs, which of two rows of x
ELEMENTS = tuple(tuple(enumerate(extents, 6)) for extents in ((2, 2, 2, 1), (2, 1, 2, 1), (1, 2, 1, 2)))


# By rows of x, outputs and bits of W, at most: tiles of 16 outputs and of 8 rows to a warp, warps that share a sum,
# steps of 32 inputs at once. Found by trying them on an H200 (tests/benchmarks/LOG.md): few outputs want more warps
TILES = [(1, inf, 8, 1, 1, 16, 2), (1, inf, 16, 1, 1, 16, 1), (8, inf, 8, 1, 1, 8, 2), (8, 3072, 16, 1, 1, 16, 1),
         (8, inf, 16, 1, 1, 8, 2), (16, inf, 16, 1, 2, 8, 2), (32, inf, 8, 2, 4, 4, 2), (32, 8192, 16, 1, 2, 8, 1),
         (32, 16384, 16, 2, 4, 8, 2), (32, inf, 16, 2, 4, 4, 2), (64, 8192, 16, 2, 8, 4, 2), (64, inf, 16, 4, 8, 2, 2),
         (inf, 8192, 16, 4, 8, 2, 2), (inf, inf, 16, 4, 8, 1, 2)]
# How the axes of W, (out / 16, 16, in) or (out / 16, 2, 8, in / 32, 4, 2, 2, 2), or of scales lie, by their number
STORED = {3: (0, 2, 1), 4: (0, 3, 2, 1), 8: (0, 3, 5, 6, 2, 4, 1, 7)}
PARTS = 8   # of a matrix's inputs, at most
MANY = 192   # work groups, from which on it is faster that their warps share what they read: an H200 has 132 cores
# CUDA's copy of 16 bytes to shared memory {0} from memory {1}, if {2}: who asks for it goes on. What was asked for
# until COMMIT is a group, and WAIT is for all groups but the last few
COPY = ('asm volatile("{{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}}" :: '
        '"r"((uint)__cvta_generic_to_shared({0})), "l"({1}), "r"({2}) : "memory");')
COMMIT = '0; asm volatile("cp.async.commit_group;" ::: "memory")'   # behind an int, see `copied`
WAIT = 'asm volatile("cp.async.wait_group %d;" ::: "memory");'


class Shared(NamedTuple):
  """What a work group takes whose warps share what they read."""
  n: int        # tiles of 16 outputs to a warp
  t: int        # tiles of 8 rows of x
  wide: int     # warps side by side in outputs
  high: int     # and in rows
  buffers: int  # each of 32 inputs: how far copies are ahead, in 48 KiB together

  @property
  def outputs(self) -> int: return 16 * self.n * self.wide

  @property
  def rows(self) -> int: return 8 * self.t * self.high


# The first that gives MANY work groups is taken. Found by trying them on an H200 (tests/benchmarks/LOG.md)
SHARED = [Shared(4, 4, 2, 4, 3), Shared(2, 4, 2, 2, 6), Shared(2, 4, 2, 1, 8)]


def shared_tiles(rows: Any, outputs: Any, parts: Sequence[Any]) -> tuple[Shared, int] | None:
  """Tiles for MANY work groups, and the parts into which they divide the inputs; None: there would be less. rows: of
  x. outputs: of W. parts: how many there may be, in order; by the one that was found come the same tiles again."""
  fits = [x for x in SHARED if rows % x.rows == 0 == outputs % x.outputs]
  groups = [rows // x.rows * (outputs // x.outputs) for x in fits]
  return next(((x, p) for x, n in zip(fits, groups, strict=True) for p in parts if n * p >= MANY), None)


def speaks_cuda() -> bool: return isinstance(renderer(), CUDARenderer)


def stored_shape(out_features: int, in_features: int, dtype: DType) -> tuple[int, ...]:
  """Of a W for rows of x of this type: neighbours in memory are what neighbouring lanes read."""
  tile = gcd(out_features, 16)
  if tile == 16 and in_features % 32 == 0 and (MMA, dtype) in [(c.dims, c.dtype_in) for c in renderer().tensor_cores]:
    return out_features // 16, in_features // 32, 2, 2, 8, 4, 2, 2
  return out_features // tile, in_features, tile


def pack(weight: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """W, (out, in), or what belongs to it, its first axis whole or in parts, in the order of a stored shape."""
  order = STORED[len(shape)]
  return weight.reshape([shape[i] for i in helpers.argsort(order)]).transpose(order)


def scales_shape(stored: tuple[int, ...], groups: int) -> tuple[int, ...]:
  """The stored shape of scales, (out, groups), of a quantized W with a stored shape: tiles, or as tensor cores' lanes
  read them."""
  return (stored[0], groups, 8, 2) if len(stored) == 8 else (stored[0], groups, stored[-1])


def pack_numbers(q: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
  """As `pack`, for q of a quantized W, (out, in). int8 is stored as it is, int4 and what tensor cores read as uint32:
  (out / 16, in / 8, 16) or (out / 16, in / 32, 8, 4, bits / 2)."""
  bits = 4 if q.dtype == np.uint8 else 8
  if len(shape) == 3:
    if bits == 8: return pack(q, shape)
    numbers = q.reshape(shape[0], shape[2], -1, 8).swapaxes(1, 2)   # (out / 16, in / 8, 16, 8)
  else:
    if bits == 8: q = q.view(np.uint8) ^ 128   # 0 and above
    lanes = pack(q, shape).transpose(0, 1, 4, 5, 2, 3, 6, 7)   # (out / 16, in / 32, 8, 4, and 16 numbers of a lane)
    # The pairs of neighbors in a word follow each other, each in the lower and the upper half
    numbers = lanes.reshape(*lanes.shape[:4], bits // 2, 16 // bits, 2).swapaxes(-1, -2)
    numbers = numbers.reshape(*lanes.shape[:4], bits // 2, 32 // bits)
  if bits == 4: numbers = numbers[..., ::2] | numbers[..., 1::2] << 4
  return np.ascontiguousarray(numbers).view(np.uint32)[..., 0]


def new(like: Tensor, columns: sint, dtype: DType | None = None) -> Tensor:
  """A tensor for a kernel to fill, (rows of another one, columns): scratch that a traced function may return."""
  return Tensor.invalids(like.shape[0] * columns, dtype=dtype or like.dtype, device=like.device).reshape(-1, columns)


class Linear(backend.Linear):
  """W as neighbouring lanes read it; also of 8 and 4 bits."""
  def __init__(self, in_features: int, sources: dict[str, int], bias: bool, dtype: DType, axis: int = 0):
    super().__init__(in_features, sources, bias, dtype, axis)
    self.weight = Tensor.empty(*stored_shape(self.out_features, in_features, dtype), dtype=dtype)
    self.scales: list[Tensor] = []   # of a quantized W: what each number is multiplied by, and what is added to that
    self.order: Tensor | None = None   # (in,): of a W whose columns are for the inputs in another order

  def ordered(self, w: np.ndarray) -> np.ndarray: return w   # W, or what belongs to its rows, for `pack`

  def load(self, checkpoint: Any) -> None:
    """Read W and the bias from a weights.Checkpoint, a part for each device, into their stored layout."""
    if self.bias is not None:
      self.bias.replace(checkpoint.place(self, checkpoint.vectors(self, "bias"), self.bias.dtype))
    parts = checkpoint.matrices(self)
    shape: Any = self.weight.shape
    if not isinstance(parts[0], Quantized):
      self.weight.replace(checkpoint.place(self, [pack(self.ordered(w), shape) for w in parts], self.weight.dtype))
      return
    self.weight = checkpoint.place(self, [pack_numbers(self.ordered(w.q), shape) for w in parts])
    terms = zip(*[(w.scale, w.offset) for w in parts], strict=True)   # each a part for each device
    self.scales = [checkpoint.place(self, [pack(self.ordered(x), scales_shape(shape, x.shape[1])) for x in term])
                   for term in terms if term[0] is not None]
    order = parts[0].order
    if (np.diff(order) != 1).any(): self.order = checkpoint.place(self, [order.astype(np.int32)] * len(parts))

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    """As backend.Linear's; where each device has a part of a sum, maybe several of (T, out) below each other."""
    return self.fill(new(x, max(1, self.splits(x)) * self.out_features, dtype).reshape(-1, self.out_features), x)

  def fill(self, out: Tensor, x: Tensor) -> Tensor:
    if self.order is not None: x = x[:, self.order].contiguous()
    added = () if self.bias is None else (self.bias,)
    kernel = linear_kernel if self.weight.ndim == 3 else tensor_core_linear_kernel
    if self.splits(x): kernel = many_rows_linear_kernel
    return out.custom_kernel(x, self.weight, *self.scales, *added, fxn=kernel)[0]

  def splits(self, x: Tensor) -> int:
    """Parts into which inputs are divided for work groups whose warps share what they read; 0: none do."""
    if self.weight.ndim != 8 or self.scales or not speaks_cuda(): return 0
    most = gcd(self.weight.shape[1], PARTS) if self.axis == 1 and self.bias is None else 1
    found = shared_tiles(x.shape[0], self.out_features, [p for p in range(1, most + 1) if most % p == 0])
    return found[1] if found else 0

  def rows(self, ids: Tensor, dtype: DType) -> Tensor:
    out = new(ids, self.weight.numel() // self.out_features, dtype)
    return out.custom_kernel(local_ids(ids, self.out_features), self.weight, fxn=rows_kernel)[0]


class GateUp(backend.GateUp, Linear):
  """On tensor cores 16 outputs are eight of gate and the same of up: a lane has both, and stores the product."""
  def ordered(self, w: np.ndarray) -> np.ndarray:
    return w if self.weight.ndim == 3 else w.reshape(2, -1, 8, w.shape[1]).swapaxes(0, 1)   # no copy

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    if self.weight.ndim == 3: return super().__call__(x, dtype)
    return self.fill(new(x, self.out_features // 2, dtype), x)


def rows_kernel(out: UOp, ids: UOp, weight: UOp) -> UOp:
  """out: (T, K). ids: (T,). weight: W, (N, K), as it is stored."""
  t, k = axes(0, *out.shape)
  plain = weight.permute(helpers.argsort(STORED[weight.ndim])).reshape(-1, out.shape[1])
  row = ids[t].load()
  last = plain.shape[0] - 1
  value = plain[row.maximum(0).minimum(last).cast(dtypes.weakint), k].cast(out.dtype)
  # Not row.valid(…): of a lone row tinygrad 0.14 drops that condition
  return kernel_of("rows", out[t, k].store(((row >= 0) & (row <= last)).where(value, value.const_like(0))))


def biased(total: UOp, rest: Sequence[UOp], column: UOp) -> UOp:
  return sum((x[column].cast(total.dtype) for x in rest if len(x.shape) == 1), total)


def put(out: UOp, total: UOp, rest: Sequence[UOp], row: UOp, column: UOp) -> UOp:
  """The store of a result, with its bias, unless its row is one too many."""
  total = biased(total, rest, column)
  return out.base.index((row * out.shape[1] + column).valid(row < out.shape[0])).store(total.cast(out.dtype))


def put_tile(out: UOp, total: UOp, rest: Sequence[UOp], weight: UOp, t: UOp, n16: UOp, r: UOp, row: UOp) -> UOp:
  """The store of a lane's sums of 16 outputs, in eights. Where out has half as many columns as W has rows, it is
  silu(gate) * up, and W as GateUp orders it."""
  if out.shape[1] == weight.shape[0] * 16: return put(out, total, rest, t, n16 * 16 + r * 8 + row)
  total = biased(total, rest, r * out.shape[1] + n16 * 8 + row)
  # A lane's sums of either r by itself: the others' zeros are gone from the code
  gate, up = [r.eq(i).where(total, 0).reduce(r, arg=Ops.ADD) for i in range(2)]
  return put(out, gate.silu() * up, (), t, n16 * 8 + row)


@functools.cache   # for greedy steps and for sampled ones
def tensor_core_linear_kernel(out: UOp, x: UOp, weight: UOp, *rest: UOp) -> UOp:
  """A warp: some tiles of 16 outputs, some of 8 rows of x, and the k-th share of the inputs. Of 32 inputs a lane takes
  8 neighbours of x and the weights that belong to them, 4 at a time, which lie as lanes ask for them. The tensor cores
  take 8, 4 and 4 elements of w, x and the sum from a lane (PTX ISA, mma.m16n8k16)."""
  T, _ = out.shape
  N16, K32, *_ = weight.shape
  scales = [x for x in rest if len(x.shape) > 1]
  bits = weight.shape[-1] * 2 if scales else 16
  group = K32 * 32 // scales[0].shape[1] if scales else 32
  # Of few rows sums are scaled, of many the weights
  scaled_sums = T <= 8 and group % 32 == 0 and x.dtype == dtypes.float16
  fits = (tiles for rows, outputs, most, *tiles in TILES if rows >= T and outputs >= N16 * 16 and most >= bits)
  n_tiles, t_tiles, shares, steps = next(fits)
  n_tiles = gcd(N16, n_tiles)
  rounds: Any = -(-K32 // shares)   # of a warp, as even as can be: the last one's may be less
  shares = -(-K32 // rounds)   # type: ignore[assignment]
  # Where one round is all, tinygrad 0.14 may lose the condition of what is too many
  steps = gcd(rounds, steps) if rounds > steps else 1
  t, n = axes(0, -(-T // 8) // t_tiles, N16 // n_tiles, kind=AxisType.GLOBAL)
  column, row = axes(2, 4, 8, kind=AxisType.LOCAL)   # lane = row * 4 + column
  k = (axis(rounds // steps, 5) * shares + axis(shares, 4, AxisType.GROUP_REDUCE)) * steps
  h, r, p, e = axes(6, 2, 2, 2, 2, kind=AxisType.UPCAST)
  # 1 for each element of w, in a form that is not seen to be constant: that would have no axes
  element = h * 4 + r * 2 + p
  one = (element * element - element * 7 < 1).where(UOp.const(1.0, x.dtype), UOp.const(0.0, x.dtype))

  def number(n16, k, i):   # q * 2**-24 without arithmetic: its bits are a half's last. Of many rows 1024 + q
    place = h * 2 + r
    in_half = 16 // bits
    word = weight[n16, k, row, column, (i * 4 + place) // in_half]
    pair = word >> (place % in_half * bits).cast(dtypes.uint32) & (2**bits - 1) * 0x10001
    if not scaled_sums: pair = pair | 0x64006400
    return (pair >> (p * 16).cast(dtypes.uint32)).cast(dtypes.uint16).bitcast(dtypes.half)

  def product(n16, first, k):   # of 32 inputs; where there are no more, of zeros
    places = (k * 32 + column * 8).valid(k < K32)
    k = k.minimum(K32 - 1)
    def times(w):
      inputs = [x[(first + row).minimum(T - 1), places + i * 4 + h * 2 + p] for i in range(2)]
      zero = UOp.const((0.0,) * 4, dtypes.float32)
      return sum(UOp.wmma(w[i], inputs[i], zero, MMA, "CUDA", 32, ELEMENTS) for i in range(2))
    if not scales: return times([weight[n16, k, i, h, row, column, r, p] for i in range(2)])
    scale, offset = [s[n16, (k * 32 + column * 8) // group, row, r] for s in scales] + [0] * (2 - len(scales))
    q = [number(n16, k, i) for i in range(2)]
    middle = 128 if bits == 8 else 0   # what stands for 0
    if not scaled_sums: return times([((y - (1024 + middle)) * scale + offset).cast(x.dtype) for y in q])
    return times(q) * (scale.float() * 2**24) + times([one, one]) * (offset - scale.float() * middle)

  def tile(n16, first):
    total = fold(sum(product(n16, first, k + step) for step in range(steps)))
    return put_tile(out, total, rest, weight, first + column * 2 + e, n16, r, row)
  tiles = [tile(n * n_tiles + i, (t * t_tiles + j) * 8) for i, j in np.ndindex(n_tiles, t_tiles)]
  return kernel_of("linear_tc", UOp.group(*tiles), ())


def copied(pairs: Sequence[tuple[UOp, UOp]], wanted: UOp) -> UOp:
  """A group of copies is asked for, of 16 bytes each; if they are not wanted, an empty one, so that WAIT may count. To
  tinygrad it is a store: that stays in its place, where other statements may be moved or dropped."""
  wanted = wanted.cast(dtypes.int32)
  copies = [UOp(Ops.CUSTOM, dtypes.void, (*pair, wanted), COPY) for pair in pairs]
  nothing = UOp.placeholder((1,), dtypes.int32, 299, AddrSpace.REG)
  return nothing[0].store(UOp(Ops.CUSTOM, dtypes.int32, (wanted, *copies), COMMIT))   # of the first one's shape


def arrived(copies: UOp, turn: UOp, last: int) -> UOp:
  """All warps' copies have been made, but for each one's last groups, and what a turn before was to read has been."""
  return UOp(Ops.BARRIER, src=(UOp(Ops.CUSTOM, dtypes.void, (copies, turn), WAIT % last),))


@functools.cache
def many_rows_linear_kernel(out: UOp, x: UOp, weight: UOp, *rest: UOp) -> UOp:
  """Warps of some outputs and rows of x each share what they read. In a turn, of 32 inputs, they ask for the x and W of
  a turn to come, and multiply what has arrived. The buffer that is filled was read a turn ago: one barrier will do. In
  a buffer each 8 rows of x lie by themselves, and W as it is stored. out: (T, N), or below each other what parts of the
  inputs give."""
  T, splits = x.shape[0], out.shape[0] // x.shape[0]
  N16, K32, *_ = weight.shape
  tiles, _ = shared_tiles(T, N16 * 16, [splits])   # type: ignore[misc]
  turns = K32 // splits
  split = UOp.special(splits, "gidx2")
  group_n, group_t = UOp.special(N16 * 16 // tiles.outputs, "gidx1"), UOp.special(T // tiles.rows, "gidx0")
  lane, warp = UOp.special(32, "lidx0"), UOp.special(tiles.wide * tiles.high, "lidx1")
  row, column = lane // 4, lane % 4
  warp_n, warp_t = warp // tiles.high, warp % tiles.high
  turn = UOp.range(turns, 11, AxisType.REDUCE)
  h, r, p, e = axes(6, 2, 2, 2, 2, kind=AxisType.UPCAST)
  x_size, w_size = tiles.rows * 32, tiles.outputs * 32   # numbers of a turn
  xs, ws = [UOp.placeholder((tiles.buffers * size,), x.dtype, 200 + i, AddrSpace.LOCAL)
            for i, size in enumerate((x_size, w_size))]

  def ask(turn, *after):   # each lane for 8 neighbours: a warp for 8 rows of x at once, or for half of a tile of W
    pairs = []
    buffer = turn % tiles.buffers
    k = split * turns + turn
    for part in range(0, tiles.rows // 8, tiles.wide * tiles.high):
      t = (group_t * (tiles.rows // 8) + part + warp) * 8 + row
      place = buffer * x_size + (part + warp) * 256 + lane * 8
      pairs.append((xs.after(*after).index(place), x.base.index((t * K32 + k) * 32 + column * 8)))
    for part in range(0, tiles.outputs // 8, tiles.wide * tiles.high):
      half = part + warp
      tile = (group_n * (tiles.outputs // 16) + half // 2) * K32 + k
      place = buffer * w_size + half * 256 + lane * 8
      pairs.append((ws.after(*after).index(place), weight.base.index(tile * 512 + half % 2 * 256 + lane * 8)))
    return copied(pairs, turn < turns)
  asked = ask(UOp.const(0))
  for ahead in range(1, tiles.buffers - 1): asked = ask(UOp.const(ahead), asked)
  ready = arrived(asked, turn, tiles.buffers - 2)   # in each turn
  xs, ws = [buffer.after(ask(turn + tiles.buffers - 1, ready)) for buffer in (xs, ws)]

  def product(n, t):
    at_w = turn % tiles.buffers * w_size + (warp_n * tiles.n + n) * 512 + lane * 4
    at_x = turn % tiles.buffers * x_size + (warp_t * tiles.t + t) * 256 + lane * 8
    w = [ws[at_w + i * 256 + h * 128 + r * 2 + p] for i in range(2)]
    inputs = [xs[at_x + i * 4 + h * 2 + p] for i in range(2)]
    zero = UOp.const((0.0,) * 4, dtypes.float32)
    return sum(UOp.wmma(w[i], inputs[i], zero, MMA, "CUDA", 32, ELEMENTS) for i in range(2))
  places = list(np.ndindex(tiles.n, tiles.t))
  sums = [UOp.placeholder((2, 2), dtypes.float32, 300 + i, AddrSpace.REG) for i in range(len(places))]
  begun = [a.after(UOp.group(*[a[i].store(0.0) for i in np.ndindex(2, 2)]), turn) for a in sums]
  adds = [a[r, e].store(a[r, e] + product(n, t)) for a, (n, t) in zip(begun, places, strict=True)]
  done = UOp.group(*adds).end(h, e, p, r, turn)
  def put_one(total, n, t):
    at = split * T + ((group_t * tiles.high + warp_t) * tiles.t + t) * 8 + column * 2 + e
    return put_tile(out, total, rest, weight, at, (group_n * tiles.wide + warp_n) * tiles.n + n, r, row)
  stores = [put_one(a.after(done)[r, e], n, t) for a, (n, t) in zip(sums, places, strict=True)]
  return kernel_of("linear_many", UOp.group(*stores), ())


def fetch(buffer: UOp, index: UOp, size: Any) -> UOp:
  """0, and the core is told to fetch so many bytes from AHEAD of an index on."""
  lines = [f"__builtin_prefetch({{0}} + {at // buffer.dtype.itemsize}), " for at in range(AHEAD, AHEAD + size, 64)]
  return UOp(Ops.CUSTOMI, dtypes.int32, (buffer.base.index(index),), f"({''.join(lines)}0)")


def linear_kernel(out: UOp, x: UOp, weight: UOp, *rest: UOp) -> UOp:
  """One pass over the weights: 16 outputs stay in the cache while the rows of x go by. A CPU has as many sums of 16
  lanes as its registers hold, of rows of x and, where these are few, of shares of the inputs."""
  T, K = x.shape
  N16, words, lanes = weight.shape
  in_word = K // words   # inputs
  scales = [x for x in rest if len(x.shape) > 1]
  groups = scales[0].shape[1] if scales else 1
  simd = cpu_cores() and lanes == 16
  kind = AxisType.UPCAST if simd else AxisType.WEAK
  sums = cpu_sums() if simd else 1
  rows = gcd(T, sums)
  shares = gcd(K // groups, sums // rows) if rows < 4 else 1   # of four rows and two shares C is slower by half
  n = axis(N16, 0, AxisType.WEAK)
  t = axis(T // rows, 1, AxisType.WEAK) * rows + axis(rows, 4, kind)
  group = axis(groups, 2)
  first = group * (K // groups) + axis(K // groups // shares, 5) * shares
  k = first + axis(shares, 6, AxisType.UNROLL)
  lane = axis(lanes, 7, kind)
  w = weight[n, k // in_word, lane]
  if in_word > 1: w = w >> (k % 8 * 4).cast(dtypes.uint32) & 15   # its nibble
  w = w.float()
  for op, scale in zip((UOp.mul, UOp.add), scales, strict=False): w = op(w, scale[n, group, lane].float())
  # Where all rows go by at once, a core waits for weights
  size = shares * lanes * weight.dtype.itemsize // in_word
  ahead = fetch(weight, (n * words + first // in_word) * lanes, size) if simd and rows == T else 0
  # Each share by itself, and then their sum
  total = fold(fold(x[t, k + ahead].float() * w, kinds=(AxisType.REDUCE,)))
  # A core's part of less is done before the other is there
  threads = divisor(N16, cpu_cores()) if T * K * N16 > 8192 else 1
  return kernel_of("linear", put(out, total, rest, t, n * lanes + lane), shared_by(threads) if simd else None)


class Norm(backend.Norm):
  axis = None   # each device has all of the weight

  def load(self, checkpoint: Any) -> None:
    self.weight.replace(checkpoint.place(self, checkpoint.vectors(self, "weight"), self.weight.dtype))

  def __call__(self, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return Tensor.empty_like(rows).custom_kernel(rows, self.weight, fxn=self.kernel)[0].reshape(x.shape)

  def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    normed = Tensor.empty_like(x)
    outputs = normed.custom_kernel(x, self.weight, new(x, x.shape[1]), *partial_sums(delta), fxn=self.kernel)
    return outputs[3], outputs[0]

  def kernel(self, out: UOp, x: UOp, weight: UOp, total: UOp | None = None, *parts: UOp) -> UOp:
    """A work group takes a row, of which each lane squares a part; they share the sums. x: (T, K). weight: (K,).
    total: the sum of x and the parts, (T, K) or several below each other, whose norm is then meant."""
    T, K = x.shape
    kind, shared = lane_axis()
    wide = 1 if cpu_cores() else gcd(K, 8)   # neighbours that a thread reads at once
    lanes = gcd(K, 16) if cpu_cores() else divisor(K // wide, 256)
    rounds: Any = K // wide // lanes
    t = UOp.range(T, 0)
    lane = UOp.range(lanes, 1, kind)
    def own(round_kind, kind, first):   # a lane's part: its rounds, the neighbours within them, and where these are
      i = axis(rounds, first, round_kind)
      j = axis(wide, first + 1, kind)
      return (i, lane if cpu_cores() else j), (i * lanes + lane) * wide + j
    kept = UOp.placeholder((rounds, lanes if cpu_cores() else wide), dtypes.float32, 101, AddrSpace.REG)
    place, column = own(AxisType.LOOP, AxisType.UPCAST, 8)
    value = sum(term[i + t, column].float() for term in (x, *parts) for i in range(0, term.shape[0], T))
    stores = [kept[place].store(value)]
    if total is not None: stores.append(total[t, column].store(value.cast(total.dtype)))
    kept = kept.after(end(UOp.group(*stores), AxisType.LOOP))
    part = kept[own(AxisType.REDUCE, AxisType.UNROLL, 2)[0]]
    sums = UOp.placeholder((lanes,), dtypes.float32, 100, shared)
    sums = sums.after(end(sums[lane].store(fold(part * part))))
    scale = (fold(sums[unrolled(lanes, 32, 4)]) / K + self.eps).rsqrt()
    place, column = own(AxisType.LOOP, AxisType.UPCAST, 6)
    return kernel_of("rms_norm", put(out, kept[place] * scale * weight[column].float(), (), t, column), ())
