"""Matrix products from sources: linear.cu and, on Hopper, wgmma.cu for NVIDIA tensor cores, and linear.c for CPUs."""
import contextvars, ctypes, dataclasses, functools, json, math, pathlib
from typing import TYPE_CHECKING

import numpy as np
from tinygrad import Device, Tensor, dtypes

from tinyvllm.backend import TOKENS, cpu_cores

from . import cuda_source
from .buffers import new, new_tensor

if TYPE_CHECKING: from .matmul import FastLinear

ACTIVATIONS = {"": "x", "silu": "x / (1 + __expf(-(x)))",   # by method of Tensor
               "gelu": "x / (1 + __expf(x * (-1.5957691f - 0.0713548f * x * x)))"}
MAX_SPLITS = 8   # maximum split-K of linear.cu
LARGE = 2**25    # numbers of a W for which wgmma.cu is the fastest from 64 rows on, with x in e4m3
SHARED_BYTES = 230400   # shared memory of a Hopper multiprocessor, less the barriers
COUNT = TOKENS.num_words + 1   # row of `tokens` that holds the number of tokens, see tensor_cores.add_query_tiles
# The tokens of the step whose layers are traced, see tensor_cores.add_query_tiles. Products skip rows of padding, so
# that the graph of a large step runs smaller ones in less time
current: contextvars.ContextVar[Tensor | None] = contextvars.ContextVar("current", default=None)


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


# The first ones with a fitting number of work groups are used, those for few rows also if there are fewer than their
# rows. Quantized: fewer warps share the same outputs, as each warp dequantizes its own. With at most 132 work groups,
# the multiprocessors of an H100 or H200, smaller ones would leave some idle, and each may use all shared memory.
# Measured on both cards (tests/benchmarks/LOG.md)
TABLES = {key: [Tiles(*sizes) for sizes in table] for key, table in
          json.loads(pathlib.Path(__file__).with_name("tiles.json").read_text()).items()}
WGMMA = [Tiles(1, 32, 8, 1, 0), Tiles(1, 16, 8, 1, 0), Tiles(1, 8, 8, 1, 0)]
choices: dict[str, str] = {}   # by key of `candidates`: `str` of the tiles to use (programs.tiles_path)


def choose_tiles(layer: "FastLinear", x: Tensor, row_groups: Tensor | None = None) -> Tiles | None:
  """Return the tiles for x, (T, K), or None if W is not in the layout for tensor cores. row_groups: see
  matmul.linear_kernel."""
  if layer.weight.ndim < 5: return None
  key, tiles = candidates(layer, x, row_groups)
  return next((x for x in tiles if str(x) == choices.get(key)), tiles[0])


def candidates(layer: "FastLinear", x: Tensor, row_groups: Tensor | None = None) -> tuple[str, list[Tiles]]:
  """Return the key of a choice of tiles, and all that fit, the built-in ones first. See choose_tiles."""
  sizes = sizes_of(layer, x, row_groups)
  T, K, N, num_groups, limit = sizes["NUM_ROWS"], sizes["K"], sizes["N"], sizes["NUM_GROUPS"], 1
  if row_groups is None:
    least = 64 if layer.has_e4m3_inputs and N * K >= LARGE else 128   # rows for which wgmma.cu is the fastest
    fitting = [x for x in WGMMA if x.rows >= least and T % x.rows == 0 == K % 64]
    if fitting and layer.flags is not None: return "", fitting
    if layer.axis == 1 and layer.bias is None: limit = math.gcd(K // 32, MAX_SPLITS)

  def fits(x: Tiles, any_blocks: bool = False) -> bool:
    has_memory = layer.flags is not None or x.max_groups != 132   # Hopper's
    fits_rows = min(T, 64) <= x.rows < 2 * max(T, 8) if x in few else T % x.rows == 0
    blocks = -(-T // x.rows) * num_groups * (N // x.outputs) * x.splits
    return has_memory and fits_rows and N % x.outputs == 0 and (any_blocks or x.min_groups <= blocks <= x.max_groups)
  many, few = [TABLES[f"{rows} {'quantized' if layer.scales else 'floats'}"] for rows in ("many", "few")]
  short = [Tiles(4, max(1, T // 8), 4, 1, 2, 0)] if row_groups is not None and K <= 64 else []   # for LoRA's B
  tiles = short + [dataclasses.replace(x, splits=n) for x in many for n in range(1, limit + 1) if limit % n == 0] + few
  first = next(filter(fits, tiles))
  key = f"linear {T} {K} {N} {layer.number_format.bits} {num_groups} {first.splits}"
  return key, [first, *[x for x in tiles if fits(x, True) and x.splits == first.splits and x != first]]


def sizes_of(layer: "FastLinear", x: Tensor, row_groups: Tensor | None = None, activation: str = "") -> dict[str, int]:
  """Return sizes of a product for a source. row_groups: see matmul.linear_kernel; their groups have NUM_ROWS rows."""
  (T, K), scale, numbers = x.max_shape, layer.scales.get("scale"), layer.number_format
  num_groups, row_group = (1, 0) if row_groups is None else row_groups.max_shape
  return {"T": T, "K": K, "N": layer.out_features // layer.num_experts, "EXPERTS": layer.num_experts,
          "NUM_GROUPS": num_groups, "ROW_GROUP": row_group, "NUM_ROWS": max(1, row_group - 1) if row_group else T,
          "GROUPS": 1 if scale is None else scale.max_shape[1], "BITS": numbers.bits,
          "ZERO_POINT": numbers.zero_point, "IS_FLOAT": int(numbers.is_float), "IS_GATED": int(bool(activation)),
          "ADDS": int(layer.adds)}


def multiply(layer: "FastLinear", out: Tensor, x: Tensor, tiles: Tiles | None, activation: str,
             row_groups: Tensor | None = None, count: int = 0) -> Tensor:
  """Return `out` with x @ W.T + bias or a GateUp's activations: (T, N), or with split-K one (T, N) per split, stacked
  along the first axis. Rows of the step's padding are undefined. tiles: None for linear.c. row_groups, count: see
  matmul.FastLinear.multiply."""
  sizes = sizes_of(layer, x, row_groups, activation)
  T, K = sizes["T"], sizes["K"]
  sizes["ROWS_OUT"] = count or T
  tokens = current.get() if row_groups is None else None
  if tokens is not None and tokens.shape != (COUNT + 1, T): tokens = None   # without their number, or of other rows
  definitions: dict[str, object] = {
    **sizes, "IS_FLOAT32": int(out.dtype == dtypes.float32), "ACTIVATED(x)": ACTIVATIONS[activation],
    "TYPE": f'"{cuda_source.TYPES.get(x.dtype, "f16")}"',   # in PTX, as a string in C
    "ROWS_OF_STEP": sizes["NUM_ROWS"] if tokens is None else f"tokens[{COUNT * T}]"}   # without padding
  if tiles is None: launch, scratch = launch_c(layer, x, sizes, definitions)
  elif tiles.buffers or layer.flags is None: launch, scratch = launch_linear(sizes, definitions, tiles), {}
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


def launch_c(layer: "FastLinear", x: Tensor, sizes: dict[str, int],
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


def launch_linear(sizes: dict[str, int], definitions: dict[str, object], tiles: Tiles) -> cuda_source.Launch:
  """Return the launch of linear.cu."""
  N, K, bits = sizes["N"], sizes["K"], sizes["BITS"]
  row_tiles, sets = -(-sizes["NUM_ROWS"] // tiles.rows), max(1, sizes["GROUPS"] * 32 // K)
  buffer = tiles.rows * 64 + tiles.outputs * 4 * (bits + (bits < 16) * sets)   # bytes
  ring = max(tiles.buffers * buffer, tiles.rows * tiles.outputs * 4 * (tiles.deep > 1))   # finally holds sums
  own = {**{name.upper(): n for name, n in vars(tiles).items()}, "ROWS": tiles.rows, "OUTPUTS": tiles.outputs,
         "BUFFER": buffer, "RING": ring, "ROW_TILES": row_tiles}
  blocks = row_tiles * sizes["NUM_GROUPS"], N // tiles.outputs, tiles.splits
  threads = 32 * tiles.wide * tiles.high * tiles.deep
  return cuda_source.Launch(f"linear_{N}_{K}", "linear.cu", definitions | own, blocks, threads, tiles.deep * ring)


@functools.cache
def new_flags(devices: str | tuple[str, ...]) -> Tensor | None:
  """Return flags for the blocks that share a tile, eight for each multiprocessor of each device: zeros, also after each
  kernel. None if the devices are not Hopper."""
  if not cuda_source.has_wgmma(): return None
  from tinygrad.runtime.autogen import cuda   # slow to import
  # 16: the number of multiprocessors
  cuda.cuDeviceGetAttribute(ctypes.byref(count := ctypes.c_int()), 16, vars(Device.default)["cu_device"])
  return new_tensor(np.zeros(8 * count.value, np.uint32), devices)
