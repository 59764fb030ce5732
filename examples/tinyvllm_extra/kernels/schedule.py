"""What these kernels are written with."""
from math import gcd

from tinygrad import UOp, dtypes
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, sint

from tinyvllm.backend import cpu_cores
from tinyvllm.runner import TOKENS

LOWEST = -1e30   # a score without weight that is not infinite: inf - inf is not a number
NAMES = {"row": "slot", "tile": "query_tile"}


def field(tokens: UOp, name: str, t: UOp) -> UOp:
  return tokens[TOKENS.dtype.names.index(NAMES.get(name, name)), t].load().cast(dtypes.weakint)


def axes(first: int, *extents: sint, kind: AxisType = AxisType.WEAK) -> list[UOp]:
  """Ranges of these extents, numbered from `first`."""
  return [UOp.range(extent, first + i, kind) for i, extent in enumerate(extents)]


def kernel_of(name: str, store: UOp, opts: tuple[Opt, ...] | None = None) -> UOp:
  """A kernel of this store for all of its ranges. opts: tinygrad's optimizations; None: its heuristics."""
  return store.end(*store.ranges).sink(arg=KernelInfo(name=name, opts_to_apply=opts))


def divisor(n: sint, limit: int) -> int: return max((c for c in range(1, limit + 1) if n % c == 0), default=1)


def axis(extent: sint, number: int, kind: AxisType = AxisType.REDUCE) -> UOp:
  return UOp.range(extent, number, kind) if extent > 1 else UOp.const(0)   # tinygrad takes no reduce over one


def unrolled(extent: sint, by: int, number: int) -> UOp:
  """An index that runs over extent: a loop and, within it, `by` rounds at once."""
  by = gcd(extent, by)
  return axis(extent // by, number) * by + axis(by, number + 1, AxisType.UNROLL)


def fold(x: UOp, op: Ops = Ops.ADD, kinds: tuple = (AxisType.REDUCE, AxisType.UNROLL, AxisType.GROUP_REDUCE)) -> UOp:
  """The sum, unless another op is said, over the axes of these kinds."""
  return x.reduce(*[a for a in x.ranges if a.arg[1] in kinds], arg=op)


def end(store: UOp, *kinds: AxisType) -> UOp:
  """What is repeated side by side is done, and in axes of these kinds. Threads go on to the kernel's end, as do loops
  that hold more than this."""
  return store.end(*[a for a in store.ranges if a.arg[1] in (AxisType.UPCAST, *kinds)])


def lane_axis() -> tuple[AxisType, AddrSpace]:
  """What lanes that work side by side are, and where they share numbers: SIMD and registers on a CPU, else threads."""
  return (AxisType.UPCAST, AddrSpace.REG) if cpu_cores() else (AxisType.LOCAL, AddrSpace.LOCAL)


def shared_by(threads: int) -> tuple[Opt, ...]:
  """What is done to a kernel whose first axis so many threads share, and no more."""
  return (Opt(OptOps.THREAD, 0, threads),) if threads > 1 else ()
