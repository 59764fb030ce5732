"""Building blocks of kernels: loops and reductions with a fixed schedule, token fields, RoPE, and the accumulators of
online softmax."""
import dataclasses, functools, math
from collections.abc import Callable, Sequence

from tinygrad import Tensor, UOp, dtypes
from tinygrad.codegen.opt import Opt
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, sint

from tinyvllm.backend import TOKENS, cpu_cores

LOWEST = -1e30   # score with weight 0; not -inf, because inf - inf is NaN
LOG2_E = math.log2(math.e)


def axes(first: int, *extents: sint) -> list[UOp]:
  """Return one range per extent, numbered from `first`."""
  return [UOp.range(extent, first + i, AxisType.WEAK) for i, extent in enumerate(extents)]


def kernel_of(name: str, store: UOp, opts: tuple[Opt, ...] | None = None) -> UOp:
  """Return a kernel that runs `store` over all its ranges. opts: tinygrad optimizations; None: its heuristics."""
  return store.end(*store.ranges).sink(arg=KernelInfo(name=name, opts_to_apply=opts))


def divisor(n: sint, limit: int) -> int:
  """Return the largest divisor of n up to `limit`."""
  return max((c for c in range(1, limit + 1) if n % c == 0), default=1)


def axis(extent: sint, axis_id: int, axis_type: AxisType = AxisType.REDUCE) -> UOp:
  return UOp.range(extent, axis_id, axis_type) if extent > 1 else UOp.const(0)   # a reduce over one element fails


def unrolled(extent: sint, by: int, axis_id: int) -> UOp:
  """Return an index over `extent`: a loop around `by` unrolled iterations."""
  by = math.gcd(extent, by)
  return axis(extent // by, axis_id) * by + axis(by, axis_id + 1, AxisType.UNROLL)


def fold(x: UOp, op: Ops = Ops.ADD) -> UOp:
  """Reduce x with `op` over its REDUCE and UNROLL axes."""
  return x.reduce(*[a for a in x.ranges if a.arg[1] in (AxisType.REDUCE, AxisType.UNROLL)], arg=op)


def end(store: UOp) -> UOp:
  """End a store's UPCAST axes. Other axes, such as threads, stay open."""
  return store.end(*[a for a in store.ranges if a.arg[1] == AxisType.UPCAST])


def lane_axis() -> tuple[AxisType, AddrSpace]:
  """Return the axis type of parallel lanes and the memory they share: SIMD and registers on a CPU, else threads."""
  return (AxisType.UPCAST, AddrSpace.REG) if cpu_cores() else (AxisType.LOCAL, AddrSpace.LOCAL)


def field(tokens: UOp, name: str, t: UOp) -> UOp:
  """Load a column of TOKENS. tokens: (columns, T) int32."""
  return tokens[[*TOKENS.formats].index(name), t].load().cast(dtypes.weakint)


def largest(numbers: Sequence[UOp]) -> UOp: return functools.reduce(UOp.maximum, [x.maximum(-x) for x in numbers])


def mean(values: Sequence[UOp], logs: Sequence[UOp], sinks: Sequence[UOp] = (), head: UOp | int = 0) -> UOp:
  """Return the weighted mean of values. logs: base-2 logarithms of the weights. sinks: none, or a tensor of scores,
  (H,), where `head`'s is a weight without a value."""
  logs = [*logs, *[x[head].load().float() * LOG2_E for x in sinks]]
  highest = functools.reduce(UOp.maximum, logs)
  weights = [(x - highest).exp2() for x in logs]
  # A sink's value is 0
  return UOp.usum(*[x * weight for x, weight in zip(values, weights, strict=False)]) / UOp.usum(*weights)


def call(kernel: Callable[[dict[str, UOp]], UOp], **tensors: Tensor | None) -> list[Tensor]:
  """Return the tensors after a kernel. It gets one device's operands by name, without None."""
  operands = {name: x for name, x in tensors.items() if x is not None}
  def run(*uops: UOp) -> UOp: return kernel(dict(zip(operands, uops, strict=True)))
  return Tensor.custom_kernel(*operands.values(), fxn=run)


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
    """Return the macros of all sources of attention. tensors: see tensor_cores.attend."""
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
