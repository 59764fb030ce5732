"""Experts of a mixture on fast backends: one matrix kernel that reads the selected experts' weights only."""
from tinygrad import Tensor, dtypes
from tinygrad.dtype import DType

from tinyvllm.backend import cpu_cores

from . import matmul
from .cpu import cpu_sums

ROWS = (8, 32)   # rows per group on GPUs, for few and for many rows of each expert


def numbers(count: int) -> Tensor: return Tensor.arange(count, dtype=dtypes.int32)
def sums(x: Tensor) -> Tensor: return x.sum(1, dtype=dtypes.int32)


class Experts(matmul.Linear):
  """Matrices of several experts, stacked in one W in stored layout. sources: the first expert's, the second's, ..."""
  def __init__(self, num_experts: int, in_features: int, sources: dict[str, int], bias: bool, dtype: DType):
    super().__init__(in_features, sources, bias, dtype)
    self.num_experts = num_experts
    tiles, *tile = matmul.stored_shape(self.out_features // num_experts, in_features, dtype)
    self.weight = Tensor.empty(num_experts * tiles, *tile, dtype=dtype)

  def plan(self, ids: Tensor) -> Tensor:
    """Return the plan for kernels (see schedule.Routes), which sorts by expert. ids: (T, k) int32, experts of each
    token. With few tokens, each row has its own group."""
    experts = ids.flatten()                                             # (P,)
    pairs, count = int(experts.shape[0]), self.num_experts
    if pairs <= count: return experts.reshape(-1, 1).contiguous()
    rows = cpu_sums() if cpu_cores() else ROWS[pairs > 16 * count]
    num_groups = (pairs + count * (rows - 1)) // rows                   # at most
    number, pair = numbers(count), numbers(pairs)
    sizes = sums(experts == number.unsqueeze(1))                        # (E,), pairs of each expert
    groups = ((sizes + rows - 1) // rows).contiguous()
    before = sums((number < experts.unsqueeze(1)).where(groups, 0))     # (P,), groups of earlier experts
    rank = sums((experts == experts.unsqueeze(1)) & (pair < pair.unsqueeze(1)))   # (P,), earlier pairs of the expert
    place = (before * rows + rank).contiguous()                         # (P,), a pair's place in the plan
    places = numbers(num_groups * rows).unsqueeze(1)
    targets = sums((place == places).where(pair - pairs, 0)) + pairs    # (G * rows,)
    ends = sums((number <= number.unsqueeze(1)).where(groups, 0)).contiguous()   # (E,)
    expert = sums(ends <= numbers(num_groups).unsqueeze(1)).minimum(count - 1)   # (G,)
    return expert.reshape(-1, 1).cat(targets.reshape(-1, rows), dim=1).contiguous()

  def route(self, x: Tensor, plan: Tensor, count: int) -> Tensor:
    """Return the products, (count, out), of x with the experts of its plan. x: (R, in), each row for count / R."""
    out = Tensor.invalids(count * self.out_features // self.num_experts, dtype=x.dtype).reshape(count, -1)
    bias = () if self.bias is None else (self.bias,)
    kernel = matmul.linear_kernel if self.weight.ndim == 3 else matmul.tensor_core_linear_kernel
    return out.custom_kernel(x, self.weight, *self.scales, *bias, plan, fxn=kernel)[0]
