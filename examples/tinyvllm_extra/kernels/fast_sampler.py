"""Sampling with fewer, wider kernels."""
import math
from collections.abc import Callable

from tinygrad import Tensor, dtypes, function

from tinyvllm import backend
from tinyvllm.backend import cpu_cores


class FastSampler(backend.Sampler):
  def reduce(self, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Return a sum or maximum over V of (S, V, ...): (S, 1, ...), in two steps to keep a GPU busy with few rows."""
    size = int(x.shape[1])
    common = math.gcd(size, 1 if cpu_cores() else 256)
    columns = common * max(n for n in (1, 2, 3, 4) if size // common % n == 0)
    partial = function(x.unflatten(1, (-1, columns)), 1).contiguous()   # (S, columns, ...)
    return function(partial, 1, keepdim=True).contiguous()

  def keep_top(self, p: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """Like backend.Sampler's, but with two bits of the threshold per round: 15 sums of three values each."""
    threshold = target.const_like(1 << 28).cast(dtypes.int32).contiguous()   # the bits of 1.0 are below 2**30

    @function(precompile=True)   # scheduled once for all rounds
    def narrow(threshold: Tensor, p: Tensor, weights: Tensor, target: Tensor) -> Tensor:
      step = threshold & -threshold   # the lowest set bit, so that every round runs the same few kernels
      candidates = (threshold + step * Tensor.arange(3)).unsqueeze(1)   # (S, 1, 3)
      above = (p.bitcast(dtypes.int32).unsqueeze(2) >= candidates).where(weights.unsqueeze(2), 0.0)   # (S, V, 3)
      count = (self.reduce(Tensor.sum, above) >= target.unsqueeze(1)).sum(2)   # (S, 1)
      return (threshold + step * (count - 1) + step // 4).contiguous()
    for _ in range(15): threshold = narrow(threshold, p, weights, target.contiguous())
    return (p >= threshold.bitcast(dtypes.float32)).where(p, 0.0)
