"""The samplers of the core and of the extension compared with a sort-based reference in numpy: allowed tokens and their
frequencies. Seeded ids depend on the seed only."""
import functools

import numpy as np
import pytest
from helpers.engines import SAMPLING_ENGINE
from helpers.parameters import slow
from helpers.reference import chi_square_passes, reference_logits, reference_probabilities, reference_sampling_mask
from tinygrad import Tensor, TinyJit, dtypes

from tinyvllm import LLM, SamplingParams
from tinyvllm.backend import Sampler, gumbel_noise
from tinyvllm.request import SAMPLING_FIELDS, SamplerMode
from tinyvllm_extra.kernels import sampling
from tinyvllm_extra.logits import apply_bitmask

ROWS, V = 4096, 24   # one shape, compiled once
rng = np.random.default_rng(0)
PEAKED = (2 * rng.standard_normal(V)).astype(np.float32)
TIED = np.repeat(np.array([3.0, 2.0, 2.0, 0.0], np.float32), [1, 2, 3, 18])   # probabilities with ties of 5, then of 18


@functools.cache
def compiled(sampler):
  """sampler.sample as one graph. words: a bitmask of the tokens that may be sampled."""
  def sample(logits, words, *columns):
    rows = dict(zip((*SAMPLING_FIELDS, "seed_low", "seed_high", "position"), columns, strict=True))
    return sampler.sample(apply_bitmask(logits, words), rows, SamplerMode.FILTERED).realize()
  return TinyJit(sample)


@pytest.fixture(scope="module", params=[sampling.Sampler(), *slow(Sampler())], ids=["extension", "core"])
def draw(request):
  """draw(logits, ...) samples ROWS ids. Each row has its own seed, or with `position` one seed and its own position."""
  def draw(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=None, banned=()):
    def full(x, dtype): return np.broadcast_to(np.asarray(x, dtype), ROWS).copy()
    seeds = [full(np.arange(ROWS) if position is None else 12345, np.uint32), full(seed, np.uint32)]
    positions = full(7, np.int32) if position is None else np.arange(ROWS, dtype=np.int32) + position
    words = np.full((ROWS, 1), -1 - sum(1 << int(i) for i in banned), np.int32)
    arrays = (np.broadcast_to(logits, (ROWS, V)).copy(), words, full(temperature, np.float32), full(top_k, np.int32),
              full(top_p, np.float32), full(min_p, np.float32), *seeds, positions)
    for _ in range(2):   # the first call captures
      ids = compiled(request.param)(*[Tensor(x).realize() for x in arrays]).numpy()
    return ids
  return draw


SETTINGS = [
  {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 5}, {"top_k": V + 9}, {"top_k": -1}, {"top_p": 0.8},
  {"top_p": 0.3}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.9},
  {"temperature": 1.5, "top_k": 10, "top_p": 0.7, "min_p": 0.05},
]


@pytest.mark.slow
@pytest.mark.parametrize("logits", [PEAKED, TIED], ids=["peaked", "tied"])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_sample_frequencies_match_reference(draw, logits, options):
  keep = reference_sampling_mask(logits, **{"temperature": 1.0, **options})
  ids = draw(logits, **options)
  assert keep[ids].all(), f"{sorted(set(ids[~keep[ids]].tolist()))} must not be sampled"
  p = np.where(keep, reference_probabilities(logits, options.get("temperature", 1.0)), 0.0)
  assert chi_square_passes(ids, p / p.sum())


def test_noise_of_adjacent_positions_is_independent(draw):
  """Pairs of ids at positions i and i + 1 of one seed fit the product of their probabilities."""
  logits = np.where(np.arange(V) < 4, PEAKED, -np.inf).astype(np.float32)
  ids, p = draw(logits, position=0), reference_probabilities(logits, 1.0)[:4]
  assert chi_square_passes(ids[0::2] * 4 + ids[1::2], np.outer(p, p).ravel())


def test_top_p_keeps_token_that_crosses_p(draw):
  logits = np.log(np.array([0.5, 0.3, 0.15] + [0.05 / 21] * 21, np.float32))
  for top_p, count in ((0.4, 1), (0.55, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, V)):
    assert set(draw(logits, top_p=top_p)) == set(range(count)), top_p


def test_ties_at_threshold_are_kept(draw):
  assert set(draw(TIED, top_k=2)) == {0, 1, 2, 3, 4, 5}
  assert set(draw(TIED, top_p=0.5)) == {0, 1, 2, 3, 4, 5}
  assert set(draw(np.zeros(V, np.float32), top_k=1)) == set(range(V))


def test_extreme_temperatures_are_valid(draw):
  assert set(draw(PEAKED, temperature=2e-5)) == {PEAKED.argmax()}
  flat = np.full(V, 1 / V)
  assert chi_square_passes(draw((PEAKED / 100).astype(np.float32), temperature=100.0), flat)
  assert set(draw((PEAKED * 1000).astype(np.float32), temperature=1e-4)) == {PEAKED.argmax()}


# The engine

def params(i, **options):
  common = {"seed": 1000 + i, "max_tokens": 16, "ignore_eos": True, "temperature": 0.9, "top_p": 0.95}
  return SamplingParams(**{**common, **options})


@pytest.fixture(scope="module")
def llm(folder): return LLM(folder, **SAMPLING_ENGINE)


def test_first_token_frequencies_match_model_probabilities(llm, folder):
  ids = [5, 9, 200]
  logits = reference_logits(folder, ids)[-1]
  options = {"max_tokens": 1, "temperature": 0.8, "top_p": 1.0, "top_k": 12}
  first = llm.generate([{"prompt_token_ids": ids}] * 600, [params(i, **options) for i in range(600)])
  keep = reference_sampling_mask(logits, 0.8, top_k=12)
  p = np.where(keep, reference_probabilities(logits, 0.8), 0.0)
  ids_sampled = np.array([o.outputs[0].token_ids[0] for o in first])
  assert keep[ids_sampled].all() and chi_square_passes(ids_sampled, p / p.sum())


def test_noise_of_largest_hash_is_finite():
  """The largest hash must not become a uniform number of 1 in float32: its noise would be infinite and select the token
  whatever its logit."""
  size, limit = 1 << 20, np.float32(2**-23)
  def hash32(x):   # lowbias32 of Wellons' hash-prospector
    for shift, factor in ((16, 0x7feb352d), (15, 0x846ca68b)): x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))
  ids, position = hash32(np.arange(size, dtype=np.uint32)), np.zeros(1, np.uint32)
  seeds = np.arange(1, 200, dtype=np.uint32)
  seed = next(seed for seed in seeds if hash32(ids ^ hash32(seed ^ hash32(hash32(position)))).max() >= 2**32 - 2**8)
  words = [Tensor([x], dtype=dtypes.uint32) for x in (int(seed), 0)]
  noise = gumbel_noise(*words, Tensor([0], dtype=dtypes.int32), size).numpy()
  assert np.isfinite(noise).all() and noise.max() < -np.log(limit / 2) + 1
