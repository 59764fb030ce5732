"""Linear layers, with CUDA sources for tensor cores, a C source for CPUs, and linear_kernel for other devices and
shapes; RMS norm. A kernel in UOps defines its loops, the work of each thread and its stores."""
import functools
from collections.abc import Callable, Sequence
from math import gcd

import numpy as np
from tinygrad import Tensor, UOp, dtypes, helpers
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.dtype import DType
from tinygrad.uop.ops import AxisType

from tinyvllm.backend import GateUp, Linear, Norm, cpu_cores
from tinyvllm.llama import Checkpoint
from tinyvllm_extra.models.matrices import (STORED, UNQUANTIZED, Matrix, Quantized, narrow, pack_numbers,
                                            prepare_scales, reorder, scales_shape, stored_shape, stored_weights)

from . import cuda_source, products
from .buffers import local_ids, new, partial_sums
from .cpu import SUMS
from .schedule import axis, call, divisor, end, fold, kernel_of, lane_axis, unrolled


class FastLinear(Linear):
  """A linear layer with W (float or quantized) stored in the order that lanes load it."""
  number_format = UNQUANTIZED
  order: Tensor | None = None   # (in,) int32: input of each column of W, if permuted (GPTQ)
  flags: Tensor | None = None   # see products.new_flags
  has_8bit_inputs = False   # linear.c quantizes x to int8
  has_e4m3_inputs = False   # products of at least 64 rows are in e4m3, see wgmma.cu
  adds = False   # its products to `total`, in place: B of LoRA

  def __init__(self, in_features: int, sources: dict[str, int], bias: bool, dtype: DType, axis: int = 0,
               num_experts: int = 1):
    super().__init__(in_features, sources, bias, dtype, axis)
    self.in_features = in_features
    self.num_experts = num_experts   # matrices that are stacked in W
    tiles, *tile = stored_shape(self.out_features // num_experts, in_features, cuda_source.has_mma(dtype))
    self.weight = Tensor.empty(num_experts * tiles, *tile, dtype=dtype)
    if bias: self.bias = Tensor.empty(self.out_features, dtype=dtypes.float32)
    self.scales: dict[str, Tensor] = {}   # scale and offset of a quantized W

  def ordered(self, w: np.ndarray) -> np.ndarray:
    """Return the rows of W, or of its scales, in the order for `reorder`."""
    return w

  def load(self, checkpoint: Checkpoint) -> None:
    """Read W and the bias, one shard per device, into their stored layout."""
    weights = stored_weights(checkpoint)
    # A bias in float16 or bfloat16 is placed unchanged, but sources read float32
    if self.bias is not None:
      self.bias = weights.place(self, weights.vectors(self, "bias")).float().contiguous().realize()
    self.store(weights.matrices(self), functools.partial(weights.place, self), weights.activations)

  def store(self, shards: Sequence[Matrix], place: Callable[..., Tensor], activations: str = "none") -> None:
    """Store W. shards: one per device. place, activations: see StoredWeights; x is quantized to int8 if the device
    supports it for this W."""
    if plain := [reorder(self.ordered(w), self.weight.max_shape) for w in shards if isinstance(w, np.ndarray)]:
      self.weight.replace(place(plain, self.weight.dtype))
    elif quantized := [w for w in shards if isinstance(w, Quantized)]:
      self.store_quantized(quantized, place, activations)
      self.has_e4m3_inputs = activations == "fp8" and self.weight.ndim == 5
    self.flags = products.new_flags(self.weight.device)

  def store_quantized(self, quantized: list[Quantized], place: Callable[..., Tensor], activations: str) -> None:
    (N, K), groups = quantized[0].q.shape, quantized[0].scale.shape[1]
    self.number_format = quantized[0].number_format
    can_be_int8 = fits_c(self) and not self.number_format.is_float and K // groups % 8 == 0
    self.has_8bit_inputs = can_be_int8 and activations in ("auto", "int8")
    scales = {"scale": [prepare_scales(w, self.weight.dtype) for w in quantized],
              "offset": [w.offset for w in quantized if w.offset is not None]}
    if self.weight.ndim == 8:   # scales in float16, each of a part or a multiple of 32 inputs, else the generic layout
      halves = {name: [narrow(x, False) for x in arrays] for name, arrays in scales.items()}
      fits = all(x.dtype == np.float16 for arrays in halves.values() for x in arrays)
      if fits and gcd(K // groups, 32) in (32, K // groups): scales = halves
      else: self.weight = Tensor.empty(N // 16, K, 16, dtype=self.weight.dtype)
    shape = self.weight.max_shape
    self.weight = place([pack_numbers(self.ordered(w.q), shape, self.has_8bit_inputs) for w in quantized])
    self.scales = {name: place([reorder(self.ordered(x), scales_shape(shape, x.shape[1])) for x in arrays])
                   for name, arrays in scales.items() if arrays}
    order = quantized[0].order
    if (np.diff(order) != 1).any(): self.order = place([order.astype(np.int32)] * len(quantized))

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    """Like Linear. With split-K, return the partial sums stacked along the first axis."""
    return self.multiply(x, dtype)

  def multiply(self, x: Tensor, dtype: DType | None = None, activation: str = "", row_groups: Tensor | None = None,
               count: int = 0, total: Tensor | None = None) -> Tensor:
    """Return the products, or with an activation GateUp's. row_groups: the experts of x, (R, in), see linear_kernel;
    then return (count, out), each row of x for count / R of them. total: where a layer that `adds` adds them."""
    if self.order is not None: x = x[:, self.order].contiguous()
    tiles = products.choose_tiles(self, x, row_groups)
    num_rows = count or x.max_shape[0] * (tiles.splits if tiles else 1)
    width = self.out_features // self.num_experts // (1 + bool(activation))
    out = new(x, num_rows, width, dtype=dtype) if total is None else total
    if tiles or uses_c(self, x): return products.multiply(self, out, x, tiles, activation, row_groups, count)
    def run(operands: dict[str, UOp]) -> UOp: return linear_kernel(self, **operands)
    return call(run, out=out, x=x, weight=self.weight, **self.scales, bias=self.bias, row_groups=row_groups)[0]

  def rows(self, ids: Tensor, dtype: DType) -> Tensor:
    # In two steps: tinygrad 0.14 makes two kernels of an index in 2**15 or more rows
    ids, tile = local_ids(ids, self.out_features), gcd(self.out_features, 16)
    tiles = self.weight.permute(helpers.argsort(STORED[self.weight.ndim])).reshape(self.out_features // tile, tile, -1)
    x = tiles[ids // tile]                                              # (T, tile, in)
    return x.gather(1, (ids % tile).reshape(-1, 1, 1).expand(-1, 1, x.shape[2])).squeeze(1).cast(dtype)


class FastGateUp(GateUp, FastLinear):
  """activation(gate) * up. On tensor cores, a tile's 16 outputs are eight rows of gate and the same eight of up."""
  def ordered(self, w: np.ndarray) -> np.ndarray:
    return w if self.weight.ndim == 3 else w.reshape(2, -1, 8, w.shape[1]).swapaxes(0, 1)   # a view

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    has_tiles = self.weight.ndim > 3 or uses_c(self, x) and self.out_features % 32 == 0
    return self.multiply(x, dtype, self.activation) if has_tiles else super().__call__(x, dtype)


class FastExperts(FastLinear):
  """Matrices of several experts, stacked in one W in stored layout. sources: the first expert's, the second's, ..."""
  def group_rows(self, ids: Tensor) -> Tensor:
    """Return row_groups for kernels (see linear_kernel), sorted by expert: (G, 1 + rows) int32, each group's expert and
    up to `rows` pairs of it, P for none. With few pairs, each has its own group. ids: (T, k) int32, the experts of each
    token, whose P = T * k pairs are numbered in this order."""
    experts = ids.flatten()                                             # (P,)
    num_pairs, count = experts.max_shape[0], self.num_experts
    if num_pairs <= count: return experts.reshape(-1, 1).contiguous()
    rows = SUMS if cpu_cores() else (8, 32)[num_pairs > 16 * count]   # few or many rows of each expert
    num_groups = (num_pairs + count * (rows - 1)) // rows               # at most
    expert, pair = Tensor.arange(count), Tensor.arange(num_pairs)
    def sums(x: Tensor) -> Tensor: return x.sum(1, dtype=dtypes.int32)
    groups = ((sums(experts == expert.unsqueeze(1)) + rows - 1) // rows).contiguous()   # (E,), of each expert
    before = sums((expert < experts.unsqueeze(1)).where(groups, 0))     # (P,), groups of earlier experts
    rank = sums((experts == experts.unsqueeze(1)) & (pair < pair.unsqueeze(1)))   # (P,), earlier pairs of the expert
    place = (before * rows + rank).contiguous()                         # (P,), a pair's place in the groups
    places = Tensor.arange(num_groups * rows).unsqueeze(1)
    targets = (sums((place == places).where(pair - num_pairs, 0)) + num_pairs).reshape(-1, rows).contiguous()
    group_experts = experts[targets[:, :1].minimum(num_pairs - 1)]      # (G, 1), of a group without pairs: any
    return group_experts.cat(targets, dim=1).contiguous()


# Whether linear.c can read W, and multiply it by x
def fits_c(layer: FastLinear) -> bool: return layer.weight.max_shape[2:] == (16,) and cuda_source.speaks_c()
def uses_c(layer: FastLinear, x: Tensor) -> bool: return x.dtype == dtypes.float32 and fits_c(layer)


def store(out: UOp, value: UOp, row: UOp, column: UOp) -> UOp:
  """Return the store of an element of `out`, if its row exists."""
  column = column % out.shape[1]   # an expert's column
  return out.base.index((row * out.shape[1] + column).valid(row < out.shape[0])).store(value.cast(out.dtype))


def linear_kernel(layer: FastLinear, out: UOp, x: UOp, weight: UOp, scale: UOp | None = None,
                  offset: UOp | None = None, bias: UOp | None = None, row_groups: UOp | None = None) -> UOp:
  """Compute out = x @ W.T + bias, with one matrix or with the experts that are stacked in W. x: (T, K). weight: W in a
  stored shape, see stored_shape. scale, offset: (N, groups) in a stored shape, if W is quantized. bias: (N,).

  row_groups: (G, 1 + rows), each group's expert and its rows of out; a missing row is out's number of rows. (G, 1)
  holds the expert of each row of out. Consecutive rows of out are products of the same row of x."""
  target, source, expert = routed_rows(out, x, row_groups)
  K, num_tiles = x.max_shape[1], out.max_shape[1] // weight.max_shape[2]
  group_size = K if scale is None else K // scale.max_shape[1]
  n = expert % (weight.max_shape[0] // num_tiles) * num_tiles + axis(num_tiles, 0, AxisType.WEAK)
  scale_group = axis(K // group_size, 3)
  k = scale_group * group_size + axis(group_size, 5)
  lane = axis(weight.max_shape[2], 7, AxisType.WEAK)
  w = layer.number_format.value(weight[n, k // layer.number_format.in_element, lane], k)
  if scale is not None: w = w * scale[n, scale_group, lane].float()
  if offset is not None: w = w + offset[n, scale_group, lane].float()
  total = fold(x[source, k].float() * w)
  if bias is not None: total = total + bias[n * weight.max_shape[2] + lane].cast(total.dtype)
  n = n * weight.max_shape[2] + lane   # the output
  if layer.adds: total = total + out[target, n % out.shape[1]].load().cast(total.dtype)
  return kernel_of("linear", store(out, total, target, n))


def routed_rows(out: UOp, x: UOp, row_groups: UOp | None) -> tuple[UOp, UOp, UOp | int]:
  """Return the index of a row of out, of a row of x, and of their expert. See linear_kernel."""
  if row_groups is None:
    t = axis(x.max_shape[0], 2, AxisType.WEAK)
    return t, t, 0
  group, t = axis(row_groups.shape[0], 1, AxisType.WEAK), axis(row_groups.max_shape[1] - 1, 2, AxisType.WEAK)
  target = group if row_groups.max_shape[1] == 1 else row_groups[group, 1 + t].load().cast(dtypes.weakint)
  source = (target // (out.max_shape[0] // x.max_shape[0])).maximum(0).minimum(x.max_shape[0] - 1)
  return target, source, row_groups[group, 0].load().cast(dtypes.weakint)


def sum_of_lanes(number: UOp, lane: UOp, lanes: int) -> UOp:
  """Return the sum of the numbers of all lanes. Each lane adds up every `few`-th one, then `few` such sums. Uses axes 4
  to 7."""
  few = gcd(lanes, 32)
  def share(number: UOp, i: UOp, count: int, slot: int) -> UOp:   # lanes with the same i have the same number
    shared = UOp.placeholder((count,), dtypes.float32, slot, lane_axis()[1])
    return shared.after(end(shared[i].store(number)))
  sums, i = share(number, lane, lanes, 100), lane % few
  if few < lanes: sums = share(fold(sums[unrolled(lanes // few, 32, 4) * few + i]), i, few, 101)
  return fold(sums[unrolled(few, 32, 6)])


class FastNorm(Norm):
  def load(self, checkpoint: Checkpoint) -> None:
    weights = stored_weights(checkpoint)
    self.weight.replace(weights.place(self, weights.vectors(self, "weight"), self.weight.dtype))

  def __call__(self, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return Tensor.empty_like(rows).custom_kernel(rows, self.weight, fxn=self.kernel)[0].reshape(x.shape)

  def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    inputs = x, self.weight, new(x, *x.shape), *partial_sums(delta)
    normed, _, _, total, *_ = Tensor.empty_like(x).custom_kernel(*inputs, fxn=self.kernel)
    return total, normed

  def kernel(self, out: UOp, x: UOp, weight: UOp, total: UOp | None = None, *partials: UOp) -> UOp:
    """Normalize a row per work group: each lane sums the squares of its columns, and the lanes share the sums. x:
    (T, K). weight: (K,). total: output, the sum of x and the partial sums, which is normalized instead of x. partials:
    (T, K), or several stacked along the first axis."""
    T, K = x.max_shape
    wide = 1 if cpu_cores() else gcd(K, 8)   # neighbours per load
    # With CUDA's larger groups, a row of up to 8,192 columns is read once: a lane keeps its `wide` columns
    lanes = gcd(K, 16) if cpu_cores() else divisor(K // wide, 1024 if cuda_source.speaks_cuda() else 256)
    t, lane = UOp.special(T, "gidx0"), UOp.special(lanes, "lidx0")   # tinygrad would split ranges of lanes
    if cpu_cores(): t, lane = UOp.range(T, 0), UOp.range(lanes, 1, AxisType.UPCAST)
    def load(loop_type: AxisType, wide_type: AxisType, first: int) -> tuple[UOp, UOp]:   # a lane's column and number
      column = (axis(K // wide // lanes, first, loop_type) * lanes + lane) * wide + axis(wide, first + 1, wide_type)
      return column, UOp.usum(*[y[i + t, column].float() for y in (x, *partials) for i in range(0, y.max_shape[0], T)])
    value = load(AxisType.REDUCE, AxisType.UNROLL, 2)[1]
    scale = (sum_of_lanes(fold(value * value), lane, lanes) / K + self.eps).rsqrt()
    column, value = load(AxisType.LOOP, AxisType.UPCAST, 8)
    stores = [store(out, value * scale * weight[column].float(), t, column)]
    if total is not None: stores.append(total[t, column].store(value.cast(total.dtype)))
    threads = divisor(T, cpu_cores() * (T * K > 8192))   # less work is finished before another core has started
    return kernel_of("rms_norm", UOp.group(*stores), (Opt(OptOps.THREAD, 0, threads),) * (threads > 1))
