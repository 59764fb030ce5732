"""Tiles of a matrix multiplication in shared memory: asynchronous copies of x, W and its scales, and the fragments that
a lane multiplies on tensor cores. Only for NVIDIA GPUs: the statements are PTX."""
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops

from .quantized import half_of
from .schedule import Operands

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
  splits: int = 1         # work groups per sum (split-K)

  @property
  def outputs(self) -> int: return 16 * self.n * self.wide

  @property
  def rows(self) -> int: return 8 * self.t * self.high


# The first one with enough work groups is used. Quantized: fewer warps share the same outputs, because each warp
# dequantizes its own. Measured on an H100 and an H200 (tests/benchmarks/LOG.md)
SHARED = {False: [Shared(2, 16, 4, 1, 3), Shared(2, 4, 2, 2, 6), Shared(2, 4, 2, 1, 8)],
          True: [Shared(2, 16, 4, 1, 3, 200), Shared(2, 8, 4, 1, 4, 128), Shared(1, 4, 4, 1, 8), Shared(1, 4, 2, 1, 8),
                 Shared(1, 2, 2, 1, 8)]}


def shared_tiles(rows: int, outputs: int, splits: Sequence[int], is_quantized: bool) -> Shared | None:
  """Return the tiles of linear_many, or None if there would be too few work groups. splits: candidates, in order."""
  candidates = [x._replace(splits=n) for x in SHARED[is_quantized] for n in splits]
  return next((x for x in candidates if rows % x.rows == 0 == outputs % x.outputs
               and rows // x.rows * (outputs // x.outputs) * x.splits >= x.min_groups), None)


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
  8 rows, W and the scales in their stored order."""
  def __init__(self, operands: Operands, tiles: Shared):
    self.operands, self.tiles = operands, tiles
    N16, self.K32 = operands.weight.max_shape[:2]
    self.iterations = self.K32 // tiles.splits
    self.split = UOp.special(tiles.splits, "gidx2")
    self.first_tile = UOp.special(N16 * 16 // tiles.outputs, "gidx1") * (tiles.outputs // 16)
    self.first_row = UOp.special(operands.x.max_shape[0] // tiles.rows, "gidx0") * tiles.rows
    self.lane, self.warp = UOp.special(32, "lidx0"), UOp.special(tiles.wide * tiles.high, "lidx1")
    self.row, self.column = self.lane // 4, self.lane % 4
    self.warp_tile = self.warp // tiles.high * tiles.n   # the warp's first tile of W and run of x in the work group
    self.warp_run = self.warp % tiles.high * tiles.t
    # Elements of 16 outputs and 32 inputs of W, and of each operand in an iteration
    self.tile_size = 64 * operands.number_format.bits // operands.weight.dtype.itemsize
    self.sizes = {"x": tiles.rows * 32, "weight": tiles.outputs // 16 * self.tile_size, "scale": tiles.outputs,
                  "offset": tiles.outputs}
    self.sources = {name: x for name, x in operands._asdict().items() if name in self.sizes and x is not None}
    self.buffers = {name: UOp.placeholder((tiles.buffers * self.sizes[name],), source.dtype, 200 + i, AddrSpace.LOCAL)
                    for i, (name, source) in enumerate(self.sources.items())}

  def load(self, i: UOp, *after: UOp) -> UOp:
    """Start the copies of iteration i."""
    tiles, warps = self.tiles, self.tiles.wide * self.tiles.high
    copies: list[tuple[UOp, UOp, UOp]] = []
    k = self.split * self.iterations + i
    def copy(name: str, offset: UOp, start: UOp, condition: UOp) -> None:   # offset: within the iteration
      to = self.buffers[name].after(*after).index(i % tiles.buffers * self.sizes[name] + offset)
      copies.append((to, self.sources[name].base.index(start), condition))
    # A row of x is a tile of 32 inputs; a tile of W has 16 outputs and 32 inputs
    for name, first, size in (("x", self.first_row, 32), ("weight", self.first_tile, self.tile_size)):
      in_copy = 16 // self.sources[name].dtype.itemsize
      for part in range(0, -(-self.sizes[name] // in_copy // 32), warps):
        n = ((part + self.warp) * 32 + self.lane) * in_copy   # element in the iteration
        copy(name, n, ((first + n // size) * self.K32 + k) * size + n % size, n < self.sizes[name])
    for j, name in enumerate(name for name in ("scale", "offset") if name in self.sources):
      # One warp copies scales, one offsets: two lanes per 16 outputs
      groups = self.sources[name].max_shape[1]
      start = ((self.first_tile + self.lane // 2) * groups + k * groups // self.K32) * 16
      copy(name, self.lane * 8, start + self.lane % 2 * 8, self.warp.eq(j) & (self.lane < tiles.outputs // 8))
    return copy_async(copies, i < self.iterations)

  def inputs(self, iteration: UOp, loads: UOp, t: int) -> list[list[UOp]]:
    """Return the fragments of 8 rows of x, for the first and the last 16 of the 32 inputs."""
    start = iteration % self.tiles.buffers * self.sizes["x"] + (self.warp_run + t) * 256 + self.lane * 8
    x = self.buffers["x"].after(loads)
    return [[x[start + i * 4 + j] for j in range(4)] for i in range(2)]

  def weights(self, iteration: UOp, loads: UOp, n: int) -> list[list[UOp]]:
    """Return the fragments of 16 outputs of W, for the first and the last 16 of the 32 inputs."""
    number_format = self.operands.number_format
    current = iteration % self.tiles.buffers
    w, tile = self.buffers["weight"].after(loads), self.warp_tile + n
    start = current * self.sizes["weight"] + tile * self.tile_size
    if self.operands.scale is None:
      start = start + self.lane * 4
      return [[w[start + i * 256 + h * 128 + j] for h in range(2) for j in range(4)] for i in range(2)]
    num_words = number_format.bits // 2
    words = [w[start + self.lane * num_words + i].load() for i in range(num_words)]
    def pair_of(name: str, r: int) -> UOp:   # an output's scale or offset, twice
      if name not in self.buffers: return UOp.const(0, dtypes.uint32)
      x = self.buffers[name].after(loads)[current * self.tiles.outputs + tile * 16 + self.row * 2 + r]
      return x.bitcast(dtypes.uint16).cast(dtypes.uint32) * 0x10001
    scale, offset = [[pair_of(name, r) for r in range(2)] for name in ("scale", "offset")]
    bias = int(np.float16(number_format.bias).view(np.uint16)) * 0x10001
    def pair(i: int) -> list[UOp]:
      word = number_format.pair(words[i // (16 // number_format.bits)], UOp.const(i))
      return [half_of(scale_pair(word, bias, scale[i % 2], offset[i % 2]), UOp.const(p)) for p in range(2)]
    return [[x for j in range(4) for x in pair(i * 4 + j)] for i in range(2)]
