"""Tensors whose shards are on several devices, and captured steps on several devices. For tinygrad, most shards are
copies of one tensor."""
from collections.abc import Sequence
from typing import Any

from tinygrad import Context, Device, Tensor, UOp
from tinygrad.engine.jit import _TinyJit
from tinygrad.uop.ops import AxisType


class Graph(_TinyJit):
  """A captured step on several devices. step: a partial of Runner._compute whose last argument is the GraphKey."""
  def __init__(self, devices: tuple[str, ...], step: Any):
    super().__init__(step)
    self.devices = devices
    # Devices wait before they reuse memory that others read. Small steps need so little that none is reused
    self.no_reuse = int(step.args[-1].num_tokens <= 64)

  def __call__(self, *args: object, **kwargs: object) -> object:
    if self.cnt != 1: return super().__call__(*args, **kwargs)   # no Context, which all threads would share
    with Context(NO_MEMORY_PLANNER=self.no_reuse): results = super().__call__(*args, **kwargs)
    # A capture changes CUDA's current device, in whose stream steps run: synchronize the engine's, the first, last
    for name in reversed(self.devices[1:]): Device[name].synchronize()
    return results


def stack(tensors: Sequence[Tensor]) -> Tensor:
  """Return one tensor whose shards are `tensors`, each on its device."""
  return Tensor(UOp.mstack(*[x.uop for x in tensors])).clone().realize()


def local_ids(ids: Tensor, num_rows: int) -> Tensor:
  """Return the index of each id's row in each device's embeddings, num_rows or more for no row. ids: (T,)."""
  if isinstance(ids.device, tuple):
    ids = ids - Tensor(UOp.range(len(ids.device), -1, AxisType.DEVICE)).cast(ids.dtype) * num_rows   # not in place
  return (ids < 0).where(num_rows, ids)


def partial_sums(x: Tensor) -> list[Tensor]:
  """Return every device's partial sum x as a tensor that all devices can read."""
  if not isinstance(x.device, tuple): return [x]
  count = len(x.device)
  return [Tensor(UOp.mstack(*[x.uop.mselect(i)] * count)) for i in range(count)]
