"""Tiles of a matrix multiplication in shared memory: asynchronous copies of x, W and its scales, and the fragments that
a lane multiplies on tensor cores. Only for NVIDIA GPUs: the statements are PTX."""
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops

from .kv_cache import half_bits

MMA = (8, 16, 16)   # the tensor core used here: n, m, k
# Asynchronous copy of 16 bytes from global memory {1} to shared memory {0} if {2}. COMMIT closes a group of copies.
# WAIT waits for all groups except the last %d
COPY = ('asm volatile("{{.reg .pred p; setp.ne.b32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}}" :: '
        '"r"((uint)__cvta_generic_to_shared({0})), "l"({1}), "r"({2}) : "memory");')
COMMIT = '0; asm volatile("cp.async.commit_group;" ::: "memory")'   # follows an int, see copy_async
WAIT = 'asm volatile("cp.async.wait_group %d;" ::: "memory");'
# ({0} - {1}) * {2} + {3}, each two float16 in a word
SCALE = ('[&]{{uint r; asm("sub.f16x2 %0, %1, %2; fma.rn.f16x2 %0, %0, %3, %4;" : "=&r"(r) : '
         '"r"({0}), "r"({1}), "r"({2}), "r"({3})); return r;}}()')


class Shared(NamedTuple):
  """Sizes of a work group of linear_many, whose warps share x and W in shared memory."""
  n: int        # tiles of 16 outputs per warp
  t: int        # tiles of 8 rows of x per warp
  wide: int     # warps along the outputs
  high: int     # warps along the rows
  buffers: int  # buffers of 32 inputs for asynchronous copies, at most 48 KiB in total
  min_groups: int = 192   # minimum number of work groups for this kernel to be the fastest

  @property
  def outputs(self) -> int: return 16 * self.n * self.wide

  @property
  def rows(self) -> int: return 8 * self.t * self.high


# The first one with enough work groups is used. Quantized: fewer warps share the same outputs, because each warp
# dequantizes its own. Measured on an H100 and an H200 (tests/benchmarks/LOG.md)
SHARED = {False: [Shared(2, 16, 4, 1, 3), Shared(2, 4, 2, 2, 6), Shared(2, 4, 2, 1, 8)],
          True: [Shared(2, 16, 4, 1, 3, 200), Shared(2, 8, 4, 1, 4, 128), Shared(1, 4, 4, 1, 8), Shared(1, 4, 2, 1, 8),
                 Shared(1, 2, 2, 1, 8)]}


def shared_tiles(rows: Any, outputs: Any, splits: Sequence[Any], is_quantized: bool) -> tuple[Shared, int] | None:
  """Return the tiles of linear_many and the number of splits, or None if there would be too few work groups. splits:
  candidates, in order."""
  tiles = [x for x in SHARED[is_quantized] if rows % x.rows == 0 == outputs % x.outputs]
  return next(((x, n) for x in tiles for n in splits
               if rows // x.rows * (outputs // x.outputs) * n >= x.min_groups), None)


def copy_async(copies: Sequence[tuple[UOp, UOp, UOp]], is_needed: UOp) -> UOp:
  """Start a group of asynchronous copies of 16 bytes, (to, from, condition) each, or an empty group, because WAIT
  counts groups. The statement is a store, because tinygrad may move or drop other statements."""
  statements = [UOp(Ops.CUSTOM, dtypes.void, (to, source, (is_needed & condition).cast(dtypes.int32)), COPY)
                for to, source, condition in copies]
  unused = UOp.placeholder((1,), dtypes.int32, 299, AddrSpace.REG)
  zero = UOp.const(0, dtypes.int32)   # gives the statement its shape
  return unused[0].store(UOp(Ops.CUSTOM, dtypes.int32, (zero, *statements), COMMIT))


def wait(copies: UOp, iteration: UOp, num_pending: int) -> UOp:
  """Wait until all warps have finished the previous iteration and their copies, except the last num_pending groups."""
  return UOp(Ops.BARRIER, src=(UOp(Ops.CUSTOM, dtypes.void, (copies, iteration), WAIT % num_pending),))


def mma(a: Sequence[UOp], b: Sequence[UOp], total: UOp) -> UOp:
  """Return total + a @ b. A lane has 8, 4 and 4 elements (PTX ISA, mma.m16n8k16)."""
  return UOp.wmma(UOp.stack(*a), UOp.stack(*b), total, MMA, "CUDA", 32)


def scale_pair(pair: UOp, zero_point: int, scale: UOp, offset: UOp) -> UOp:
  """Return (pair - zero_point) * scale + offset for two float16 in the halves of each word."""
  return UOp(Ops.CUSTOM, dtypes.uint32, (pair, UOp.const(zero_point, dtypes.uint32), scale, offset), SCALE)


class SharedBuffers:
  """x, W and its scales in shared memory: a ring of tiles.buffers iterations, of 32 inputs each. x is stored in runs of
  8 rows, W and the scales in their stored order. sources: x, W, then scales and offsets if W is quantized."""
  def __init__(self, tiles: Shared, sources: Sequence[UOp], split: UOp, iterations: Any):
    self.tiles, self.sources, self.iterations = tiles, sources, iterations
    self.first = split * iterations
    shape: Any = sources[1].shape
    N16, self.K32, *_ = shape
    self.bits = shape[-1] * 2 if len(sources) > 2 else 16
    self.group_n = UOp.special(N16 * 16 // tiles.outputs, "gidx1")
    self.group_t = UOp.special(sources[0].shape[0] // tiles.rows, "gidx0")
    self.lane, self.warp = UOp.special(32, "lidx0"), UOp.special(tiles.wide * tiles.high, "lidx1")
    self.row, self.column = self.lane // 4, self.lane % 4
    self.tile_size = 64 * self.bits // sources[1].dtype.itemsize   # elements of 16 outputs and 32 inputs
    self.sizes = [tiles.rows * 32, tiles.outputs // 16 * self.tile_size, *[tiles.outputs for _ in sources[2:]]]
    self.buffers = [UOp.placeholder((tiles.buffers * size,), source.dtype, 200 + i, AddrSpace.LOCAL)
                    for i, (size, source) in enumerate(zip(self.sizes, sources, strict=True))]

  def load(self, i: UOp, *after: UOp) -> UOp:
    """Start the copies of iteration i."""
    warps = self.tiles.wide * self.tiles.high
    copies: list[tuple[UOp, UOp, UOp]] = []
    k = self.first + i
    def copy(buffer, offset, start, condition):   # offset: within the iteration
      to = self.buffers[buffer].after(*after).index(i % self.tiles.buffers * self.sizes[buffer] + offset)
      copies.append((to, self.sources[buffer].base.index(start), condition))
    for part in range(0, self.tiles.rows // 8, warps):   # a warp copies 8 rows of x
      run = part + self.warp
      t = (self.group_t * (self.tiles.rows // 8) + run) * 8 + self.row
      copy(0, run * 256 + self.lane * 8, (t * self.K32 + k) * 32 + self.column * 8, run < self.tiles.rows // 8)
    in_copy = 16 // self.sources[1].dtype.itemsize
    num_copies = self.sizes[1] // in_copy
    first_tile = self.group_n * (self.tiles.outputs // 16)
    for part in range(0, -(-num_copies // 32), warps):
      n = ((part + self.warp) * 32 + self.lane) * in_copy   # element in the iteration
      start = ((first_tile + n // self.tile_size) * self.K32 + k) * self.tile_size + n % self.tile_size
      copy(1, n, start, n < self.sizes[1])
    for j, scale in enumerate(self.sources[2:]):   # one warp copies scales, one offsets: two lanes per 16 outputs
      start = ((first_tile + self.lane // 2) * scale.shape[1] + k * scale.shape[1] // self.K32) * 16
      copy(2 + j, self.lane * 8, start + self.lane % 2 * 8, self.warp.eq(j) & (self.lane < self.tiles.outputs // 8))
    return copy_async(copies, i < self.iterations)

  def inputs(self, iteration: UOp, loads: UOp, t: int) -> list[list[UOp]]:
    """Return the fragments of 8 rows of x, for the first and the last 16 of the 32 inputs."""
    run = self.warp % self.tiles.high * self.tiles.t + t
    start = iteration % self.tiles.buffers * self.sizes[0] + run * 256 + self.lane * 8
    x = self.buffers[0].after(loads)
    return [[x[start + i * 4 + j] for j in range(4)] for i in range(2)]

  def weights(self, iteration: UOp, loads: UOp, n: int) -> list[list[UOp]]:
    """Return the fragments of 16 outputs of W, for the first and the last 16 of the 32 inputs."""
    current, bits = iteration % self.tiles.buffers, self.bits
    tile = self.warp // self.tiles.high * self.tiles.n + n
    w = self.buffers[1].after(loads)
    start = current * self.sizes[1] + tile * self.tile_size + self.lane * (4 if bits == 16 else bits // 2)
    if bits == 16:
      return [[w[start + i * 256 + h * 128 + j] for h in range(2) for j in range(4)] for i in range(2)]
    words = [w[start + j].load().cast(dtypes.uint32) for j in range(bits // 2)]
    scales = [[buffer.after(loads)[current * self.tiles.outputs + tile * 16 + self.row * 2 + r] for r in range(2)]
              for buffer in self.buffers[2:]]
    scales += [[UOp.const(0.0, dtypes.half)] * 2] * (2 - len(scales))   # no offset
    scale, offset = [[x.bitcast(dtypes.uint16).cast(dtypes.uint32) * 0x10001 for x in pair] for pair in scales]

    is_float = self.sources[1].dtype == dtypes.int32   # e4m3
    zero_point = 0 if is_float else 0x64806480 if bits == 8 else 0x64006400
    def pair(i, h, r):
      number, in_half = (i * 2 + h) * 2 + r, 16 // bits
      word = words[number // in_half] >> UOp.const(number % in_half * bits, dtypes.uint32)
      # In float16: q * 2**-8, or 1024 + q
      word = half_bits(word, False) if is_float else word & (2**bits - 1) * 0x10001 | 0x64006400
      word = scale_pair(word, zero_point, scale[r], offset[r])
      return [(word >> UOp.const(16 * p, dtypes.uint32)).cast(dtypes.uint16).bitcast(dtypes.half) for p in range(2)]
    return [[x for h, r in np.ndindex(2, 2) for x in pair(i, h, r)] for i in range(2)]
