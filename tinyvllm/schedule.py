"""What kernels are written with: a custom kernel gets its buffers, and says as UOps what to loop over, what each thread
does and where results go."""
from tinygrad import UOp
from tinygrad.codegen.opt import Opt
from tinygrad.uop.ops import AxisType, KernelInfo, sint


def axes(first: int, *extents: sint, kind: AxisType = AxisType.WEAK) -> list[UOp]:
  """Of these extents, numbered from the first."""
  return [UOp.range(extent, first + i, kind) for i, extent in enumerate(extents)]


def kernel_of(name: str, store: UOp, opts: tuple[Opt, ...] | None = None) -> UOp:
  """A kernel of this store for all axes. opts: what tinygrad does to it; None: what it sees fit."""
  return store.end(*store.ranges).sink(arg=KernelInfo(name=name, opts_to_apply=opts))
