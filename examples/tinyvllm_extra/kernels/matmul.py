"""Linear layers, with CUDA sources for tensor cores (linear.cu and, on Hopper, wgmma.cu), a C source for CPUs
(linear.c), and linear_kernel for other devices and shapes; RMS norm. A kernel in UOps defines its loops, the work of
each thread and its stores."""
import contextvars, ctypes, dataclasses, functools, json, math, pathlib
from collections.abc import Callable, Sequence

import numpy as np
from tinygrad import Device, Tensor, UOp, dtypes, helpers
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.dtype import DType
from tinygrad.uop.ops import AxisType, sint

from tinyvllm.backend import TOKENS, GateUp, Linear, Norm, cpu_cores
from tinyvllm.llama import Checkpoint
from tinyvllm_extra.models.layers import group_rows
from tinyvllm_extra.models.matrices import (STORED, UNQUANTIZED, Matrix, Quantized, narrow, pack_numbers,
                                            prepare_scales, reorder, scales_shape, stored_shape, stored_weights)

from . import buffers, cpu, cuda_source
from .schedule import axis, call, divisor, end, fold, kernel_of, lane_axis, unrolled

ACTIVATIONS = {"": "x", "silu": "x / (1 + __expf(-(x)))",   # by method of Tensor
               "gelu": "x / (1 + __expf(x * (-1.5957691f - 0.0713548f * x * x)))"}
LARGE = 2**25    # numbers of a W for which wgmma.cu is the fastest from 64 rows on, with x in e4m3
SHARED_BYTES = 230400   # shared memory of a Hopper multiprocessor, less the barriers
COUNT = TOKENS.num_words + 1   # row of `tokens` that holds the number of tokens, see attention.add_query_tiles
# The tokens of the step whose layers are traced, see attention.add_query_tiles. Products skip rows of padding, so
# that the graph of a large step runs smaller ones in less time
current = contextvars.ContextVar[Tensor | None]("current", default=None)
# LoRA's adapters of those tokens: see FastExperts.group_rows, and `adapters` of linear.cu
adapters = contextvars.ContextVar[tuple[Tensor, Tensor] | None]("adapters", default=None)


@dataclasses.dataclass(frozen=True)
class Tiles:
  """Sizes of a work group, whose warps share x and W in shared memory."""
  n_tiles: int  # tiles of 16 outputs per warp
  t_tiles: int  # tiles of 8 rows of x per warp
  wide: int     # warps along the outputs
  high: int     # warps along the rows
  buffers: int  # buffers of 32 inputs for asynchronous copies, of all groups up to 96 KiB; 0: wgmma.cu
  min_groups: int = 192   # numbers of work groups for which linear.cu is the fastest
  max_groups: int = 2**31
  deep: int = 1           # groups of warps that divide K
  splits: int = 1         # work groups per sum (split-K)

  outputs = property(lambda self: 16 * self.n_tiles * self.wide)
  rows = property(lambda self: 8 * self.t_tiles * self.high)

  def grid(self, sizes: dict[str, int]) -> tuple[int, int, int]:
    """Return the numbers of work groups of linear.cu. sizes: see sizes_of."""
    outputs = sizes["N"] // self.outputs - -sizes["ADAPTERS"] * sizes["RANK"] // self.outputs
    return -(-sizes["NUM_ROWS"] // self.rows) * sizes["NUM_GROUPS"], outputs, self.splits


# The first ones with a fitting number of work groups are used, those for few rows also if there are fewer than their
# rows. Quantized: fewer warps share the same outputs, as each warp dequantizes its own. With at most 132 work groups,
# the multiprocessors of an H100 or H200, smaller ones would leave some idle, and each may use all shared memory.
# Measured on both cards (tests/benchmarks/LOG.md). wgmma: the tiles of wgmma.cu, the largest first
TABLES = {key: [Tiles(*sizes) for sizes in table] for key, table in
          json.loads(pathlib.Path(__file__).with_name("tiles.json").read_text()).items()}
choices: dict[str, str] = {}   # by key of `candidates`: `str` of the tiles to use (programs.tiles_path)


def new(like: Tensor, *shape: sint, dtype: DType | None = None) -> Tensor:
  """Return an uninitialized tensor as a kernel's output. Traced functions may return it."""
  return Tensor.invalids(math.prod(shape), dtype=dtype or like.dtype, device=like.device).reshape(shape)


class FastLinear(Linear):
  """A linear layer with W (float or quantized) stored in the order that lanes load it."""
  number_format = UNQUANTIZED
  order: Tensor | None = None   # (in,) int32: input of each column of W, if permuted (GPTQ)
  flags: Tensor | None = None   # see new_flags
  has_8bit_inputs = False   # linear.c quantizes x to int8
  has_e4m3_inputs = False   # products of at least 64 rows are in e4m3, see wgmma.cu
  adds = False   # its products to `total`, in place: B of LoRA
  lora: dict[str, Tensor] | None = None   # operands of linear.cu, if that computes LoRA's products: a, b and flags

  def __init__(self, in_features: int, sources: dict[str, int], bias: bool, dtype: DType, axis: int = 0,
               num_experts: int = 1):
    super().__init__(in_features, sources, bias, dtype, axis)
    self.in_features = in_features
    self.num_experts = num_experts   # matrices that are stacked in W
    tiles, *tile = stored_shape(self.out_features // num_experts, in_features, cuda_source.has_mma(dtype))
    self.weight = Tensor.empty(num_experts * tiles, *tile, dtype=dtype)
    if bias: self.bias = Tensor.empty(self.out_features, dtype=dtypes.float32)
    self.scales: dict[str, Tensor] = {}   # scale and offset of a quantized W

  def ordered(self, w: np.ndarray) -> np.ndarray: return w   # the rows of W, or of its scales, in the order for reorder

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
    self.flags = new_flags(self.weight.device)

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
      if fits and math.gcd(K // groups, 32) in (32, K // groups): scales = halves
      else: self.weight = Tensor.empty(N // 16, K, 16, dtype=self.weight.dtype, device=self.weight.device)
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
    tiles = choose_tiles(self, x, row_groups)
    num_rows = count or x.max_shape[0] * (tiles.splits if tiles else 1)
    width = self.out_features // self.num_experts // (1 + bool(activation))
    out = new(x, num_rows, width, dtype=dtype) if total is None else total
    if tiles or uses_c(self, x): return multiply(self, out, x, tiles, activation, row_groups, count)
    def run(operands: dict[str, UOp]) -> UOp: return linear_kernel(self, **operands)
    return call(run, out=out, x=x, weight=self.weight, **self.scales, bias=self.bias, row_groups=row_groups)[0]

  def rows(self, ids: Tensor, dtype: DType) -> Tensor:
    if isinstance(ids.device, tuple):   # their index in each device's embeddings; not in place
      ids = ids - Tensor(UOp.range(len(ids.device), -1, AxisType.DEVICE)).cast(ids.dtype) * self.out_features
    ids = (ids < 0).where(self.out_features, ids)   # no row
    # In two steps: tinygrad 0.14 makes two kernels of an index in 2**15 or more rows
    tile = math.gcd(self.out_features, 16)
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
    """Return row_groups for this device's kernels, see layers.group_rows. ids: the experts of each token, (T, k)."""
    return group_rows(ids.flatten(), self.num_experts, (cpu.SUMS, cpu.SUMS) if cpu_cores() else (8, 32))


# Whether linear.c can read W, and multiply it by x
def fits_c(layer: FastLinear) -> bool: return layer.weight.max_shape[2:] == (16,) and cuda_source.speaks_c()
def uses_c(layer: FastLinear, x: Tensor) -> bool: return x.dtype == dtypes.float32 and fits_c(layer)


# Products from sources

def choose_tiles(layer: FastLinear, x: Tensor, row_groups: Tensor | None = None) -> Tiles | None:
  """Return the tiles for x, (T, K), or None if W is not in the layout for tensor cores. row_groups: see
  linear_kernel."""
  if layer.weight.ndim < 5: return None
  key, tiles = candidates(layer, x, row_groups)
  return next((x for x in tiles if str(x) == choices.get(key)), tiles[0])


def candidates(layer: FastLinear, x: Tensor, row_groups: Tensor | None = None) -> tuple[str, list[Tiles]]:
  """Return the key of a choice of tiles, and all that fit, the built-in ones first. See choose_tiles."""
  sizes = sizes_of(layer, x, row_groups)
  T, K, N, num_groups, limit = sizes["NUM_ROWS"], sizes["K"], sizes["N"], sizes["NUM_GROUPS"], 1
  if row_groups is None:
    least = 64 if layer.has_e4m3_inputs and N * K >= LARGE else 128   # rows for which wgmma.cu is the fastest
    fitting = [x for x in TABLES["wgmma"] if x.rows >= least and T % x.rows == 0 == K % 64]
    if fitting and layer.flags is not None: return "", fitting
    if layer.axis == 1 and layer.bias is None: limit = math.gcd(K // 32, 8)   # maximum split-K

  def fits(x: Tiles, any_blocks: bool = False) -> bool:
    has_memory = layer.flags is not None or x.max_groups != 132   # Hopper's
    fits_rows = min(T, 64) <= x.rows < 2 * max(T, 8) if x in few else T % x.rows == 0
    fits_blocks = any_blocks or x.min_groups <= math.prod(x.grid(sizes)) <= x.max_groups
    return has_memory and fits_rows and N % x.outputs == 0 and fits_blocks
  many, few = [TABLES[f"{rows} {'quantized' if layer.scales else 'floats'}"] for rows in ("many", "few")]
  short = [Tiles(4, max(1, T // 8), 4, 1, 2, 0)] if row_groups is not None and K <= 64 else []   # for LoRA's B
  tiles = short + [dataclasses.replace(x, splits=n) for x in many for n in range(1, limit + 1) if limit % n == 0] + few
  first = next(filter(fits, tiles))
  key = f"linear {T} {K} {N} {layer.number_format.bits} {num_groups} {first.splits}"
  return key, [first, *[x for x in tiles if fits(x, True) and x.splits == first.splits and x != first]]


def sizes_of(layer: FastLinear, x: Tensor, row_groups: Tensor | None, count: int = 0) -> dict[str, int]:
  """Return sizes of a product for a source. row_groups: see linear_kernel; their groups have NUM_ROWS rows. count: see
  FastLinear.multiply."""
  (T, K), scale, numbers = x.max_shape, layer.scales.get("scale"), layer.number_format
  num_groups, row_group = (1, 0) if row_groups is None else row_groups.max_shape
  tiles, rank = layer.lora["b"].max_shape[:2] if layer.lora and adapters.get() else (0, 1)   # 16 outputs, 32 ranks each
  return {"T": T, "K": K, "N": layer.out_features // layer.num_experts, "EXPERTS": layer.num_experts,
          "NUM_GROUPS": num_groups, "ROW_GROUP": row_group, "NUM_ROWS": max(1, row_group - 1) if row_group else T,
          "GROUPS": 1 if scale is None else scale.max_shape[1], "BITS": numbers.bits,
          "ZERO_POINT": numbers.zero_point, "IS_FLOAT": int(numbers.is_float), "ADDS": int(layer.adds),
          "ROWS_OUT": count or T, "ADAPTERS": max(1, 16 * tiles // layer.out_features) - 1, "RANK": 32 * rank}


def multiply(layer: FastLinear, out: Tensor, x: Tensor, tiles: Tiles | None, activation: str,
             row_groups: Tensor | None = None, count: int = 0) -> Tensor:
  """Return `out` with x @ W.T + bias or a GateUp's activations: (T, N), or with split-K one (T, N) per split, stacked
  along the first axis. Rows of the step's padding are undefined. tiles: None for linear.c. row_groups, count: see
  FastLinear.multiply."""
  sizes = sizes_of(layer, x, row_groups, count)
  T, K = sizes["T"], sizes["K"]
  tokens = current.get() if row_groups is None else None
  if tokens is not None and tokens.shape != (COUNT + 1, T): tokens = None   # without their number, or of other rows
  definitions: dict[str, object] = {
    **sizes, "IS_FLOAT32": int(out.dtype == dtypes.float32), "IS_GATED": int(bool(activation)),
    "ACTIVATED(x)": ACTIVATIONS[activation], "TYPE": f'"{cuda_source.TYPES.get(x.dtype, "f16")}"',   # in PTX
    "ROWS_OF_STEP": sizes["NUM_ROWS"] if tokens is None else f"tokens[{COUNT * T}]"}   # without padding
  if tiles is None: launch, scratch = launch_c(layer, x, sizes, definitions)
  elif tiles.buffers or layer.flags is None: launch, scratch = launch_linear(layer, x, sizes, definitions, tiles)
  else:
    is_e4m3, num_flags = layer.has_e4m3_inputs, int(layer.flags.shape[0])   # eight of each block
    definitions |= {"ROWS": tiles.rows, "IS_E4M3": int(is_e4m3)}
    macros = {name: definitions[name] for name in ("T", "K", "ROWS", "ROWS_OF_STEP", "TYPE", "IS_E4M3")}
    packed = new(x, T, K + 4, dtype=dtypes.uint8) if is_e4m3 else new(x, T, K)   # with a scale per row
    pack = cuda_source.Launch(f"pack_{T}_{K}", "pack.cu", macros, (T, 1, 1), 256, 32)
    x = cuda_source.run(pack, out=packed, x=x, tokens=tokens)[0]
    scratch = {"partial": new(x, num_flags * 16 * tiles.rows, dtype=dtypes.float32),   # 128 per row for each block
               "flags": layer.flags}
    stage = tiles.rows * 128 + (1024 * sizes["BITS"] << is_e4m3)
    definitions |= {"STAGES": SHARED_BYTES // stage, **cuda_source.wgmma(tiles.rows, is_e4m3)}
    launch = cuda_source.Launch(f"wgmma_{tiles.rows}_{sizes['N']}_{K}", "wgmma.cu", definitions,
                                (num_flags // 8, 1, 1), 384, SHARED_BYTES // stage * stage + 2048)
  return cuda_source.run(launch, out=out, weight=layer.weight, x=x, tokens=tokens, **scratch, **layer.scales,
                         bias=layer.bias, row_groups=row_groups)[0]


def launch_c(layer: FastLinear, x: Tensor, sizes: dict[str, int],
             definitions: dict[str, object]) -> tuple[cuda_source.Launch, dict[str, Tensor]]:
  """Return the launch of linear.c, and its memory by name."""
  K, work = sizes["K"], sizes["ROWS_OUT"] * sizes["K"] * sizes["N"]
  rows = min(sizes["NUM_ROWS"], 64, max(8, 2**18 // K))   # that a core copies or quantizes at once, in its cache
  blocks, cores = sizes["NUM_GROUPS"] * -(-sizes["NUM_ROWS"] // rows), cpu_cores() if work > 2**17 else 1
  row_parts = 1 if sizes["ROW_GROUP"] else math.gcd(blocks, cores)
  types = {"weight": layer.weight, "scale": layer.weight, "offset": layer.weight, **layer.scales}
  own = {"IS_INT": int(layer.has_8bit_inputs), "X_GROUP": math.gcd(32, K // sizes["GROUPS"]), "BLOCKS": blocks,
         "BLOCK_ROWS": rows, "ROW_PARTS": row_parts, "OUTPUT_PARTS": cores // row_parts, "half": "_Float16",
         "__expf(x)": "tv_exp2((x) * 1.44269504f)", **{name.upper(): w.dtype.name for name, w in types.items()}}
  scratch = new(x, cpu_cores() * rows * 4 * (K + 16), dtype=dtypes.uint8)   # x, or its q, scales and sums
  name = f"linear_c_{sizes['T']}_{K}_{sizes['N']}"
  return cuda_source.Launch(name, "linear.c", definitions | own, (cores, 1, 1)), {"scratch": scratch}


def launch_linear(layer: FastLinear, x: Tensor, sizes: dict[str, int], definitions: dict[str, object],
                  tiles: Tiles) -> tuple[cuda_source.Launch, dict[str, Tensor]]:
  """Return the launch of linear.cu, and LoRA's operands by name: none in steps without adapters."""
  N, K, bits = sizes["N"], sizes["K"], sizes["BITS"]
  row_tiles, sets = -(-sizes["NUM_ROWS"] // tiles.rows), max(1, sizes["GROUPS"] * 32 // K)
  buffer = tiles.rows * 64 + tiles.outputs * 4 * (bits + (bits < 16) * sets)   # bytes
  ring = max(tiles.buffers * buffer, tiles.rows * tiles.outputs * 4 * (tiles.deep > 1))   # finally holds sums
  own = {**{name.upper(): n for name, n in vars(tiles).items()}, "ROWS": tiles.rows, "OUTPUTS": tiles.outputs,
         "BUFFER": buffer, "RING": ring, "ROW_TILES": row_tiles}
  blocks, threads = tiles.grid(sizes), 32 * tiles.wide * tiles.high * tiles.deep
  launch = cuda_source.Launch(f"linear_{N}_{K}", "linear.cu", definitions | own, blocks, threads, tiles.deep * ring)
  if not (layer.lora and (step := adapters.get())): return launch, {}
  ax = new(x, tiles.splits * sizes["T"], sizes["ADAPTERS"] * sizes["RANK"])
  return launch, {**layer.lora, "ax": ax, "adapters": step[1]}


@functools.cache
def new_flags(devices: str | tuple[str, ...]) -> Tensor | None:
  """Return flags for the blocks that share a tile, eight for each multiprocessor of each device: zeros, also after each
  kernel. None if the devices are not Hopper."""
  if not cuda_source.has_wgmma(): return None
  from tinygrad.runtime.autogen import cuda   # slow to import
  # 16: the number of multiprocessors
  cuda.cuDeviceGetAttribute(ctypes.byref(count := ctypes.c_int()), 16, vars(Device.default)["cu_device"])
  return buffers.new_tensor(np.zeros(8 * count.value, np.uint32), devices)


# Kernels in UOps

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
  few = math.gcd(lanes, 32)
  def share(number: UOp, i: UOp, count: int, slot: int) -> UOp:   # lanes with the same i have the same number
    shared = UOp.placeholder((count,), dtypes.float32, slot, lane_axis()[1])
    return shared.after(end(shared[i].store(number)))
  sums, i = share(number, lane, lanes, 100), lane % few
  if few < lanes: sums = share(fold(sums[unrolled(lanes // few, 32, 4) * few + i]), i, few, 101)
  return fold(sums[unrolled(few, 32, 6)])


def partial_sums(x: Tensor) -> list[Tensor]:
  """Return every device's partial sum x as a tensor that all devices can read."""
  if not isinstance(x.device, tuple): return [x]
  return [Tensor(UOp.mstack(*[x.uop.mselect(i)] * len(x.device))) for i in range(len(x.device))]


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
    wide = 1 if cpu_cores() else math.gcd(K, 8)   # neighbours per load
    # With CUDA's larger groups, a row of up to 8,192 columns is read once: a lane keeps its `wide` columns
    lanes = math.gcd(K, 16) if cpu_cores() else divisor(K // wide, 1024 if cuda_source.speaks_cuda() else 256)
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
