"""From logits to token ids, on the device, batched, in the graph of the step. Every number depends on its own row only,
so that a request's text does not depend on the batch that it runs in."""
from tinygrad import Tensor, dtypes


def _hash(x: Tensor) -> Tensor:
  """Mix 32 bits; the constants are lowbias32's, from Wellons' hash-prospector."""
  x = (x ^ x.rshift(16)) * 0x7feb352d
  x = (x ^ x.rshift(15)) * 0x846ca68b
  return x ^ x.rshift(16)


def _gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
  """Gumbel noise, (S, V), a pure function of seed, position and token id. seeds: (S, 2) uint32. positions: (S,)."""
  key = _hash(positions.cast(dtypes.uint32))
  key = _hash(seeds[:, 0] ^ _hash(seeds[:, 1] ^ key)).unsqueeze(1)   # (S, 1)
  ids = Tensor.arange(vocab_size).cast(dtypes.uint32).unsqueeze(0)
  bits = _hash(_hash(ids) ^ key).rshift(8)   # (S, V), 24 bits
  uniform = (bits.cast(dtypes.float32) + 0.5) * 2.0**-24   # 0 < uniform < 1
  return -(-uniform.log()).log()


def _threshold(p: Tensor, weight: Tensor, target: Tensor) -> Tensor:
  """The least t such that the weights of all p > t sum to less than target, by bisection on p's bits, which order as p
  does: exact after 30 sums, and no sort of the vocabulary. p: (S, V) in 0..1. weight: (S, V). target: (S, 1). Returns
  (S, 1)."""
  bits = p.bitcast(dtypes.int32)
  middle = target.const_like(1 << 29).cast(dtypes.int32).contiguous()   # the bits of 1.0 are below 2**30
  for _ in range(30):   # middle's lowest set bit is the step, so that every round is the same two kernels
    above = (bits >= middle).where(weight, 0.0).sum(1, keepdim=True)
    step = middle & -middle
    middle = (above >= target).where(middle + step // 2, middle + step // 2 - step).contiguous()
  return middle.bitcast(dtypes.float32)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor,
           seeds: Tensor, positions: Tensor, banned: Tensor) -> Tensor:
  """Next ids, (S,), from logits, (S, V) in float32: temperature, then min_p, top_k, top_p (which keeps the token that
  crosses p), then the argmax of logits plus Gumbel noise. The rest is (S,), but seeds (S, 2) uint32 and banned (S, B),
  ids that may not come, -1 for none."""
  V = int(logits.shape[1])
  temperature, top_k, top_p, min_p = (x.unsqueeze(1) for x in (temperature, top_k, top_p, min_p))   # (S, 1)
  random = temperature >= 1e-5
  forbidden = (banned.unsqueeze(1) == Tensor.arange(V).reshape(1, V, 1)).any(2)   # (S, V)
  x = forbidden.where(-float("inf"), logits / random.where(temperature, 1.0)).contiguous()
  p = (x - x.max(1, keepdim=True)).exp()   # unnormalised: 1 at the best token
  p = (p >= min_p).where(p, 0.0).contiguous()
  most = (top_k > 0).where(top_k, V).cast(dtypes.float32)
  p = (p >= _threshold(p, p.const_like(1.0), most)).where(p, 0.0).contiguous()
  mass = _threshold(p, p, top_p * p.sum(1, keepdim=True))
  kept = (p > 0.0) & (p >= (top_p < 1.0).where(mass, 0.0))
  noise = random.where(_gumbel(seeds, positions, V), 0.0)
  return kept.where(x + noise, -float("inf")).argmax(1).cast(dtypes.int32)
