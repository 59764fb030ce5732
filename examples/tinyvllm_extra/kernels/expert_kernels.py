"""Experts of a mixture on fast backends: one matrix kernel that reads the selected experts' weights only."""
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinyvllm.backend import cpu_cores

from . import matmul
from .cpu import cpu_sums

ROWS = (8, 32)   # rows per group on GPUs, for few and for many rows of each expert


def numbers(count: int) -> Tensor: return Tensor.arange(count, dtype=dtypes.int32)
def sums(x: Tensor) -> Tensor: return x.sum(1, dtype=dtypes.int32)


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
    num_groups = (num_pairs + count * (rows - 1)) // rows               # at most
    expert, pair = numbers(count), numbers(num_pairs)
    sizes = sums(experts == expert.unsqueeze(1))                        # (E,), pairs of each expert
    groups = ((sizes + rows - 1) // rows).contiguous()
    before = sums((expert < experts.unsqueeze(1)).where(groups, 0))     # (P,), groups of earlier experts
    rank = sums((experts == experts.unsqueeze(1)) & (pair < pair.unsqueeze(1)))   # (P,), earlier pairs of the expert
    place = (before * rows + rank).contiguous()                         # (P,), a pair's place in the groups
    places = numbers(num_groups * rows).unsqueeze(1)
    targets = sums((place == places).where(pair - num_pairs, 0)) + num_pairs    # (G * rows,)
    ends = sums((expert <= expert.unsqueeze(1)).where(groups, 0)).contiguous()   # (E,)
    group_experts = sums(ends <= numbers(num_groups).unsqueeze(1)).minimum(count - 1)   # (G,)
    return group_experts.reshape(-1, 1).cat(targets.reshape(-1, rows), dim=1).contiguous()

  def route(self, x: Tensor, row_groups: Tensor, count: int) -> Tensor:
    """Return the products, (count, out), of x with the experts of its groups. x: (R, in), each row for count / R."""
    out = Tensor.invalids(count * self.out_features // self.num_experts, dtype=x.dtype).reshape(count, -1)
    return self.multiply(out, x, row_groups)
