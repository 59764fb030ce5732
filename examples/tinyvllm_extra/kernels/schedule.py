"""Building blocks of kernels: loops and reductions with a fixed schedule."""
import math
from collections.abc import Callable

from tinygrad import Tensor, UOp
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import AxisType, KernelInfo, Ops, sint

from tinyvllm.backend import cpu_cores


def kernel_of(name: str, store: UOp, opts: tuple | None = None) -> UOp:
  """Return a kernel that runs `store` over all its ranges. opts: tinygrad's Opts; None: its heuristics."""
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


def call(kernel: Callable[[dict[str, UOp]], UOp], **tensors: Tensor | None) -> list[Tensor]:
  """Return the tensors after a kernel. It gets one device's operands by name, without None."""
  operands = {name: x for name, x in tensors.items() if x is not None}
  def run(*uops: UOp) -> UOp: return kernel(dict(zip(operands, uops, strict=True)))
  return Tensor.custom_kernel(*operands.values(), fxn=run)
