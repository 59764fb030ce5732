"""On CUDA: kernels of a captured step wait for no more than they have to."""
from typing import Any

from tinygrad.runtime.graph.cuda import CUDAGraph


class RangedGraph(CUDAGraph):
  """A captured step whose kernels wait for those that use the same part of a buffer. tinygrad's wait for all that use
  any of it, and as most of a step's memory is one buffer, devices that read each other's results would take turns."""
  def new_node(self, bufs: Any, write: Any) -> Any: return super().new_node(self.calls[len(self.nodes)][2], write)
