"""From logits to token ids, on the device, batched, in the graph of the step. Every number depends on its own row only,
so that a request's text does not depend on the batch that it runs in."""
import math
from collections.abc import Callable

from tinygrad import Tensor, UOp, dtypes, function

from .device import cpu_cores, kernel_of
from .request import EDIT

TOP = 20   # tokens whose log probabilities come with those of a token


def _hash(x: Tensor) -> Tensor:
  """Mix 32 bits; the constants are lowbias32's, from Wellons' hash-prospector."""
  for shift, factor in ((16, 0x7feb352d), (15, 0x846ca68b)): x = (x ^ x.rshift(shift)) * factor
  return x ^ x.rshift(16)


def _gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
  """Gumbel noise, (S, V), a pure function of seed, position and token id. seeds: (S, 2) uint32. positions: (S,)."""
  key = _hash(seeds[:, 0] ^ _hash(seeds[:, 1] ^ _hash(positions.cast(dtypes.uint32)))).unsqueeze(1)   # (S, 1)
  # (S, V), 23 bits: with the half added, float32 has no room for more
  bits = _hash(_hash(Tensor.arange(vocab_size, dtype=dtypes.uint32)) ^ key).rshift(9)
  return -(-((bits.cast(dtypes.float32) + 0.5) * 2.0**-23).log()).log()   # of a uniform number above 0 and below 1


def _rows(reduce: Callable[..., Tensor], x: Tensor) -> Tensor:
  """A sum or maximum over V of (S, V, ...): (S, 1, ...), in two steps, as few rows would leave most of a GPU idle."""
  common = math.gcd(int(x.shape[1]), 1 if cpu_cores() else 256)
  columns = common * max(n for n in (1, 2, 3, 4) if x.shape[1] // common % n == 0)
  # (S, columns, ...), and then of these
  return reduce(reduce(x.unflatten(1, (-1, columns)), 1).contiguous(), 1, keepdim=True).contiguous()


def argmax(x: Tensor) -> Tensor:
  """The index of each row's maximum, the first if there are several: (S,) int32, of (S, V)."""
  best = x == _rows(Tensor.max, x)
  return -_rows(Tensor.max, best.where(-Tensor.arange(x.shape[1]), 1 - x.shape[1])).squeeze(1)


def _greatest(p: Tensor, weight: Tensor, target: Tensor) -> Tensor:
  """p, (S, V) in 0..1, but 0 where it is below the greatest t such that the weights, (S, V), of all p >= t sum to
  target, (S, 1), or more: a target beyond reach keeps all. By two of p's bits a round, which order as p does: exact
  after 15 sums for three values each, and no sort of the vocabulary."""
  low = target.const_like(1 << 28).cast(dtypes.int32).contiguous()   # the bits of 1.0 are below 2**30

  @function(precompile=True)   # scheduled once for all rounds
  def narrowed(low: Tensor, p: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    step = low & -low   # its lowest set bit, so that every round is the same few kernels
    tries = (low + step * Tensor.arange(3)).unsqueeze(1)   # (S, 1, 3)
    kept = (p.bitcast(dtypes.int32).unsqueeze(2) >= tries).where(weight.unsqueeze(2), 0.0)   # (S, V, 3)
    count = (_rows(Tensor.sum, kept) >= target.unsqueeze(1)).sum(2)   # (S, 1)
    return (low + step * (count - 1) + step // 4).contiguous()
  for _ in range(15): low = narrowed(low, p, weight, target.contiguous())
  return (p >= low.bitcast(dtypes.float32)).where(p, 0.0)


def restrict(logits: Tensor, allowed: Tensor) -> Tensor:
  """Logits, (S, V), of what may come. allowed: (S, W) int32, 32 tokens to a word."""
  bits = allowed.unsqueeze(2).rshift(Tensor.arange(32)) & 1   # (S, W, 32)
  return bits.flatten(1)[:, :logits.shape[1]].ne(0).where(logits, -math.inf)


def edit_kernel(logits: UOp, edits: UOp) -> UOp:
  """Change single logits, (S, V), in place. edits: (fields of EDIT, E), of which no two are of one logit."""
  i = UOp.range(edits.shape[1], 0)
  row, token, *words = [edits[field, i].load() for field in range(len(EDIT))]
  bias, factor, penalty = [word.bitcast(dtypes.float32) for word in words]
  logit = logits[row.cast(dtypes.weakint).valid(row >= 0), token.cast(dtypes.weakint)]
  x = logit.load() + bias
  return kernel_of("edit", logit.store((x > 0).where(x / factor, x * factor) - penalty))


def top_logprobs(logits: Tensor, ids: Tensor, k: int = TOP) -> Tensor:
  """Of ids, (S,), the log probability and the rank, then the k best tokens' ids and log probabilities: (S, 2 + 2k)."""
  x = logits.log_softmax(1).contiguous()   # (S, V)
  own = x.gather(1, ids.unsqueeze(1))   # (S, 1)
  columns = [own, 1 + (x > own).sum(1, keepdim=True)]
  for _ in range(min(k, int(x.shape[1]))):
    best = argmax(x).unsqueeze(1)
    columns += [best, x.gather(1, best)]
    x = (Tensor.arange(x.shape[1]) == best).where(-math.inf, x).contiguous()
  return Tensor.cat(*columns, dim=1)   # ids below 2**24 are exact


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seeds: Tensor,
           positions: Tensor, filtered: bool = True) -> Tensor:
  """Next ids, (S,), from logits, (S, V) in float32: temperature, then min_p and, if `filtered`, top_k and top_p (which
  keeps the token that crosses p), then the argmax of logits plus Gumbel noise. The rest is (S,), but seeds (S, 2)."""
  temperature, top_k, top_p, min_p = [x.unsqueeze(1) for x in (temperature, top_k, top_p, min_p)]   # (S, 1)
  random = temperature >= 1e-5
  x = (logits / random.where(temperature, 1.0)).contiguous()   # (S, V)
  p = (x - _rows(Tensor.max, x)).exp()   # unnormalised: 1 at the best token
  p = (p >= min_p).where(p, 0.0).contiguous()
  if filtered:
    p = _greatest(p, p.const_like(1.0), (top_k > 0).where(top_k.float(), math.inf)).contiguous()
    p = _greatest(p, p, (top_p < 1.0).where(top_p * _rows(Tensor.sum, p), math.inf))
  x = x + random.where(_gumbel(seeds, positions, int(p.shape[1])), 0.0)
  return argmax((p > 0.0).where(x, -math.inf).contiguous())
