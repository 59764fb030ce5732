"""The samplers of the core and of the extension, and the functions of logits, in graphs: random cases compared with a
sort-based reference in numpy, and the frequencies of sampled ids."""
import functools

import numpy as np
import pytest
from helpers.parameters import slow
from helpers.reference import (chi_square_passes, log_softmax, mix_bits, reference_probabilities,
                               reference_sampling_mask)
from helpers.tensor_cores import run_on_cpu
from tinygrad import Tensor, TinyJit, dtypes

from tinyvllm.backend import Sampler, gumbel_noise
from tinyvllm.request import SAMPLING_FIELDS, SamplerMode
from tinyvllm_extra.kernels.fast_backend import FastSampler
from tinyvllm_extra.sampling.logits import ADJUSTMENTS, adjust_kernel, apply_bitmask, top_logprobs

ROWS = 128
SAMPLERS = {"extension": FastSampler(), "core": Sampler()}
# Each test runs on random cases of two vocabularies (one fills the last word of a bitmask), 20 calls of 128 rows each
cases = pytest.mark.parametrize(("V", "seed"), [(V, seed) for V in (64, 50) for seed in range(20)])


@pytest.fixture
def rng(seed): return np.random.default_rng(seed)


@functools.cache
def jit(function, shape, *constants): return TinyJit(lambda *x: function(*x, *constants).realize())


def call(function, *arrays, constants=()):
  return jit(function, arrays[0].shape, *constants)(*[Tensor(x).realize() for x in arrays]).numpy()


def adjust(logits, adjustments): return logits.clone().custom_kernel(adjustments, fxn=adjust_kernel)[0]


def best_logprobs(logits, ids, k): return top_logprobs(logits, ids, SAMPLERS["extension"], k)


def sample_with(name, logits, *columns):
  rows = dict(zip((*SAMPLING_FIELDS, "seed_low", "seed_high", "position"), columns, strict=True))
  return SAMPLERS[name].sample(logits, rows, SamplerMode.FILTERED)


sample = {name: functools.partial(sample_with, name) for name in SAMPLERS}   # one function per graph


def draw(x, seeds, positions, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
  """Sample ROWS ids from logits (V,). seeds: the low and the high word."""
  values = zip((temperature, top_k, top_p, min_p, *seeds, positions), "fiffIIi", strict=True)
  return call(sample["extension"], np.tile(x, (ROWS, 1)), *[np.full(ROWS, value, kind) for value, kind in values])


def make_adjustments(is_adjusted, bias, factor, penalty):
  """Return ADJUSTMENTS of all logits, (S, V), as int32 words, (columns, S * V). The row is -1 for no adjustment."""
  row, token = np.indices(is_adjusted.shape)
  table = np.rec.fromarrays([np.where(is_adjusted, row, -1), token, bias, factor, penalty], ADJUSTMENTS.dtype)
  return np.ascontiguousarray(table.ravel().view(np.int32).reshape(-1, ADJUSTMENTS.num_words).T)


def random_logits(rng, V):
  """Return logits, (ROWS, V): peaked and flat rows, with many or few ties, with and without a large offset. Rounded to
  a grid that is exact in float32, so that logits are equal or differ by more than rounding."""
  scale, grid = rng.choice([0.05, 1, 3, 8], (ROWS, 1)), rng.choice([1, 4, 256], (ROWS, 1))
  x = np.round(rng.standard_normal((ROWS, V)) * scale * grid) / grid + rng.choice([-16, 0, 0, 16], (ROWS, 1))
  return x.astype(np.float32)


@cases
def test_apply_bitmask_removes_tokens_without_bit(V, rng):
  logits, bits = random_logits(rng, V), rng.random((ROWS, 64)) < rng.choice([0.02, 0.5, 0.98], (ROWS, 1))
  words = (bits.reshape(ROWS, 2, 32) << np.arange(32, dtype=np.uint32)).sum(2, dtype=np.uint32).view(np.int32)
  np.testing.assert_array_equal(call(apply_bitmask, logits, words), np.where(bits[:, :V], logits, -np.inf))


@cases
def test_adjust_adds_bias_scales_and_subtracts_penalty(V, rng):
  logits = random_logits(rng, V)
  is_adjusted = rng.random((ROWS, V)) < rng.choice([0, 0.1, 0.9], (ROWS, 1))
  logits[rng.random((ROWS, V)) < rng.choice([0, 0.5, 0.98], (ROWS, 1))] = -np.inf
  choices = np.arange(-100, 100.1, 0.25), [1, 1, 0.01, 0.3, 1.1, 2, 100], np.arange(-10, 10.1, 0.125)
  bias, factor, penalty = (rng.choice(x, (ROWS, V)).astype(np.float32).astype(float) for x in choices)
  adjusted = call(adjust, logits, make_adjustments(is_adjusted, bias, factor, penalty))
  finite = np.isfinite(logits)
  assert np.isneginf(adjusted[~finite]).all(), "a masked token must stay masked"
  x = np.where(finite, logits + bias, 0)
  scaled = np.where(x > 0, x / factor, x * factor)
  expected = np.where(is_adjusted, scaled - penalty, logits)
  tolerance = 1e-6 * (np.abs(scaled) + np.abs(penalty)) * is_adjusted
  assert (np.abs(adjusted[finite] - expected[finite]) <= tolerance[finite]).all()


def check_top_logprobs(logits, ids, k):
  rows, best = call(best_logprobs, logits, ids[:, 0], constants=(k,)), np.argsort(-logits, 1, kind="stable")[:, :k]
  assert rows.shape == (ROWS, 2 + 2 * k)
  np.testing.assert_array_equal(rows[:, 1:2], 1 + (logits > np.take_along_axis(logits, ids, 1)).sum(1, keepdims=True))
  np.testing.assert_array_equal(rows[:, 2::2], best)
  expected = np.take_along_axis(log_softmax(logits.astype(float)), np.hstack([ids, best]), 1)
  np.testing.assert_allclose(np.hstack([rows[:, :1], rows[:, 3::2]]), expected, atol=2e-6, rtol=1e-6)


@cases
@pytest.mark.parametrize("k", [1, 20])
def test_top_logprobs_equals_log_softmax(V, rng, k):
  check_top_logprobs(random_logits(rng, V), rng.integers(0, V, (ROWS, 1)).astype(np.int32), k)


@pytest.mark.parametrize("V", [2560, 2561, 5000, 8192])
def test_top_logprobs_of_large_vocabulary_ranks_equal_logits_by_id(V):
  rng = np.random.default_rng(V)
  logits = rng.integers(0, 40, (ROWS, V)).astype(np.float32)   # the best 20 are ties, or nearly all
  logits[:, rng.integers(0, V, V // 2)] = 0
  check_top_logprobs(logits, np.zeros((ROWS, 1), np.int32), 20)


def random_sampling_fields(rng, V):
  """Return temperature, top_k, top_p and min_p of a row, exact in float32: limits, or random values between them."""
  choices = ([0, 0.05, 0.5, 1, 1, 2, 30, rng.uniform(0.1, 3)],
             [-1, 0, 0, 1, 2, rng.integers(1, V), V - 1, V, V + 9, 2**31 - 1],
             [1, 1, 1e-6, 0.999, rng.uniform(1e-3, 1), rng.uniform(0.8, 1)],
             [0, 0, 1, rng.uniform(0, 1)**4, rng.uniform(0, 0.1)])
  return [np.array(rng.choice(x), kind).item() for x, kind in zip(choices, "fiff", strict=True)]


def is_robust_to_rounding(logits, temperature, top_k, top_p, min_p):
  """Return True if float32 rounding cannot change which tokens may be sampled."""
  if temperature == 0: return True
  x = logits[np.isfinite(logits)].astype(float) / temperature
  tolerance = 1e-6 + 3e-7 * np.abs(x).max()   # relative error of p: the float32 error of its logit
  ratio = np.exp(x - x.max())
  if (np.abs(ratio - min_p) <= tolerance * min_p)[ratio < 1].any(): return False
  ratio = np.sort(ratio[ratio >= min_p])[::-1]
  if 0 < top_k < len(ratio): ratio = ratio[ratio >= ratio[top_k - 1]]
  return top_p == 1 or (np.abs(np.cumsum(ratio) / ratio.sum() - top_p) > tolerance).all()


@cases
@pytest.mark.parametrize("sampler", ["extension", *slow("core")])
def test_sample_ids_are_in_reference_mask(V, rng, sampler):
  logits, rows = random_logits(rng, V), []
  is_masked = rng.random((ROWS, V)) < rng.choice([0, 0, 0.5, 0.9, 1], (ROWS, 1))
  is_masked[np.arange(ROWS), rng.integers(0, V, ROWS)] = False   # at least one token per row remains
  logits[is_masked] = -np.inf
  for x in logits:
    while not is_robust_to_rounding(x, *(row := random_sampling_fields(rng, V))): pass
    rows.append(row)
  columns = [np.array(column, kind) for column, kind in zip(zip(*rows, strict=True), "fiff", strict=True)]
  keep = [reference_sampling_mask(x, *row) & np.isfinite(x) if row[0] else np.arange(V) == x.argmax()
          for x, row in zip(logits, rows, strict=True)]
  seeds, positions = rng.integers(0, 2**32, (2, ROWS), np.uint32), rng.integers(0, 2**20, ROWS).astype(np.int32)
  ids = call(sample[sampler], logits, *columns, *seeds, positions)
  for row, i in enumerate(ids): assert keep[row][i], (i, rows[row], logits[row].tolist())


@pytest.mark.parametrize("source", ["C", "CUDA"])
def test_keep_top_of_large_vocabulary_equals_sorting(source, monkeypatch):
  if source == "CUDA": run_on_cpu(monkeypatch)
  rng, sampler = np.random.default_rng(1), SAMPLERS["extension"]
  p = rng.permuted(np.tile(np.arange(5000, dtype=np.float32), (6, 1)), axis=1) / 8192   # sums are exact
  numbers = Tensor(p).realize()
  for weights in (numbers, numbers.const_like(1.0)):
    kept = np.array([1, 7, 2500, 4999, 5000, 5001])[:, None]   # the last row does not reach its target
    best = np.flip(np.arange(5001, dtype=np.float32) - 1, 0)[None, :] / 8192
    sums = np.cumsum(best if weights is numbers else np.ones_like(best), 1)
    target = np.take_along_axis(sums.repeat(6, 0), kept - 1, 1) + (kept > 5000)
    out = sampler.keep_top(numbers, weights, Tensor(target.astype(np.float32))).numpy()
    np.testing.assert_array_equal(out, np.where(p >= (5000 - kept) / 8192, p, 0))
    out = sampler.keep_top(numbers, weights, Tensor.full((6, 1), float("inf"))).numpy()
    np.testing.assert_array_equal(out, p)


def frequencies_fit(ids, logits, temperature, **filters):
  p = reference_probabilities(logits, temperature) * reference_sampling_mask(logits, temperature, **filters)
  return (p[ids] > 0).all() and chi_square_passes(ids, p / p.sum())


def test_frequencies_after_adjustments_and_filters_match_reference():
  logits = 2 * np.random.default_rng(0).standard_normal(50, np.float32)
  order, filters = np.argsort(-logits), {"temperature": 1.4, "top_k": 14, "top_p": 0.93, "min_p": 0.03}
  bias, factor, penalty = np.zeros(50), np.ones(50), np.zeros(50)
  bias[order[[3, 12, 30]]], factor[order[[0, 5, 45]]], penalty[order[:8:3]] = (-1.5, 2, 4), (1.8, 0.6, 3), (1, -1, 2)
  x = np.where(logits + bias > 0, (logits + bias) / factor, (logits + bias) * factor) - penalty
  assert 6 < reference_sampling_mask(x, **filters).sum() < 14, "top_p and min_p must remove tokens too"
  rows = [np.tile(value, (ROWS, 1)) for value in (logits, np.ones(50, bool), bias, factor, penalty)]
  adjusted, positions = call(adjust, rows[0], make_adjustments(*rows[1:])), np.arange(ROWS, dtype=np.int32)
  ids = np.concatenate([draw(adjusted[0], (seed, seed), positions, **filters) for seed in range(32)])
  assert frequencies_fit(ids, x, **filters) and not frequencies_fit(ids, logits, **filters)


def test_noise_of_adjacent_positions_is_independent():
  """Pairs of ids at positions i and i + 1 of one seed fit the product of their probabilities."""
  logits = np.where(np.arange(50) < 4, np.arange(50) / 2, -np.inf).astype(np.float32)
  ids = np.concatenate([draw(logits, (12345, 0), np.arange(i, i + ROWS)) for i in range(0, 32 * ROWS, ROWS)])
  p = reference_probabilities(logits, 1.0)[:4]
  assert chi_square_passes(ids[0::2] * 4 + ids[1::2], np.outer(p, p).ravel())


def test_noise_of_largest_hash_is_finite():
  """The largest hash must not become a uniform number of 1 in float32: its noise would be infinite and select the token
  whatever its logit."""
  size, limit = 1 << 20, np.float32(2**-23)
  seeds, ids = np.arange(1, 200, dtype=np.uint32), mix_bits(np.arange(size, dtype=np.uint32))
  keys = mix_bits(seeds ^ mix_bits(mix_bits(np.zeros(1, np.uint32))))
  seed = next(seed for seed, key in zip(seeds, keys, strict=True) if mix_bits(ids ^ key).max() >= 2**32 - 2**8)
  words = [Tensor([x], dtype=dtypes.uint32) for x in (int(seed), 0)]
  noise = gumbel_noise(*words, Tensor([0], dtype=dtypes.int32), size).numpy()
  assert np.isfinite(noise).all() and noise.max() < -np.log(limit / 2) + 1
