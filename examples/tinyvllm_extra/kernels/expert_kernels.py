"""Experts of a mixture on fast backends: one matrix kernel that reads the selected experts' weights only."""
from tinygrad import Tensor
from tinygrad.dtype import DType

from tinyvllm.backend import cpu_cores
from tinyvllm_extra.models.experts import group_by_expert

from . import matmul
from .cpu import cpu_sums

ROWS = (8, 32)   # rows per group on GPUs, for few and for many rows of each expert


class FastExperts(matmul.FastLinear):
  """Matrices of several experts, stacked in one W in stored layout. sources: the first expert's, the second's, ..."""
  def __init__(self, num_experts: int, in_features: int, sources: dict[str, int], bias: bool, dtype: DType):
    super().__init__(in_features, sources, bias, dtype)
    self.num_experts = num_experts
    tiles, *tile = matmul.stored_shape(self.out_features // num_experts, in_features, dtype)
    self.weight = Tensor.empty(num_experts * tiles, *tile, dtype=dtype)

  def group_rows(self, ids: Tensor) -> Tensor:
    """Return row_groups for kernels (see schedule.Routes), sorted by expert. ids: (T, k) int32, experts of each token.
    With few tokens, each row has its own group."""
    experts = ids.flatten()                                             # (P,)
    num_pairs, count = experts.max_shape[0], self.num_experts
    if num_pairs <= count: return experts.reshape(-1, 1).contiguous()
    rows = cpu_sums() if cpu_cores() else ROWS[num_pairs > 16 * count]
    return group_by_expert(experts, count, rows)

  def route(self, x: Tensor, row_groups: Tensor, count: int) -> Tensor:
    """Return the products, (count, out), of x with the experts of its groups. x: (R, in), each row for count / R."""
    out = Tensor.invalids(count * self.out_features // self.num_experts, dtype=x.dtype).reshape(count, -1)
    return self.multiply(out, x, row_groups)
