"""The sampler against a sort-based one in numpy: what may come, how often, and that a seed fixes the text."""
import functools

import numpy as np
import pytest
from reference import SAMPLING_ENGINE, reference_keep, reference_logits, reference_probabilities
from tinygrad import Tensor, TinyJit, dtypes

from tinyvllm import LLM, SamplingParams
from tinyvllm.sampling_defaults import _gumbel, restrict, sample

ROWS, V = 4096, 24   # one shape, compiled once
rng = np.random.default_rng(0)
PEAKED = (2 * rng.standard_normal(V)).astype(np.float32)
TIED = np.repeat(np.array([3.0, 2.0, 2.0, 0.0], np.float32), [1, 2, 3, 18])   # probabilities with ties of 5, then of 18


@functools.cache
def sampler(): return TinyJit(lambda logits, allowed, *arrays: sample(restrict(logits, allowed), *arrays).realize())


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=None, banned=()):
  """ROWS ids. Each row has its own seed; or one seed for all and its own position."""
  def full(x, dtype): return np.broadcast_to(np.asarray(x, dtype), ROWS).copy()
  seeds = np.zeros((ROWS, 2), np.uint32)
  seeds[:, 0], seeds[:, 1] = (np.arange(ROWS), seed) if position is None else (12345, seed)
  positions = full(7, np.int32) if position is None else np.arange(ROWS, dtype=np.int32) + position
  allowed = np.full((ROWS, 1), -1 - sum(1 << int(i) for i in banned), np.int32)   # a word of bits
  arrays = (np.broadcast_to(logits, (ROWS, V)).copy(), allowed, full(temperature, np.float32), full(top_k, np.int32),
            full(top_p, np.float32), full(min_p, np.float32), seeds, positions)
  for _ in range(2): out = sampler()(*[Tensor(x).realize() for x in arrays]).numpy()   # the first call of all captures
  return out


def chi_square_passes(ids, p):
  """Whether counts of ids fit probabilities p, by Wilson-Hilferty's critical value at 1e-4. Rare ids count as one."""
  counts, expected = np.bincount(ids, minlength=len(p)).astype(float), len(ids) * p
  rare = expected < 5
  groups = [(counts[i], expected[i]) for i in np.flatnonzero(~rare)]
  if expected[rare].sum() >= 5: groups.append((counts[rare].sum(), expected[rare].sum()))
  statistic, freedom = sum((c - e)**2 / e for c, e in groups), max(1, len(groups) - 1)
  critical = freedom * (1 - 2 / (9 * freedom) + 3.719 * np.sqrt(2 / (9 * freedom)))**3
  return statistic <= critical


SETTINGS = [
  {}, {"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 5}, {"top_k": V + 9}, {"top_k": -1}, {"top_p": 0.8},
  {"top_p": 0.3}, {"min_p": 0.1}, {"top_k": 8, "top_p": 0.9},
  {"temperature": 1.5, "top_k": 10, "top_p": 0.7, "min_p": 0.05},
]


@pytest.mark.slow
@pytest.mark.parametrize("logits", [PEAKED, TIED], ids=["peaked", "tied"])
@pytest.mark.parametrize("options", SETTINGS, ids=str)
def test_only_tokens_the_reference_keeps_come_each_as_often_as_it_should(logits, options):
  keep = reference_keep(logits, **{"temperature": 1.0, **options})
  ids = draw(logits, **options)
  assert keep[ids].all(), f"{sorted(set(ids[~keep[ids]].tolist()))} should not come"
  p = np.where(keep, reference_probabilities(logits, options.get("temperature", 1.0)), 0.0)
  assert chi_square_passes(ids, p / p.sum())


def test_the_chi_square_test_can_fail():
  assert not chi_square_passes(draw(PEAKED), reference_probabilities(PEAKED, 1.25))


def test_noise_is_as_good_over_positions_as_over_seeds():
  p = reference_probabilities(PEAKED, 1.0)
  for seed in range(3): assert chi_square_passes(draw(PEAKED, seed=seed, position=seed * 1000), p)


def test_neighbouring_positions_are_independent():
  """Pairs of ids at positions i and i + 1 of one seed fit the product of their probabilities."""
  logits = np.where(np.arange(V) < 4, PEAKED, -np.inf).astype(np.float32)
  ids, p = draw(logits, position=0), reference_probabilities(logits, 1.0)[:4]
  assert chi_square_passes(ids[0::2] * 4 + ids[1::2], np.outer(p, p).ravel())


def test_top_p_keeps_the_token_that_crosses_p():
  logits = np.log(np.array([0.5, 0.3, 0.15] + [0.05 / 21] * 21, np.float32))
  for top_p, kept in ((0.4, 1), (0.55, 2), (0.79, 2), (0.81, 3), (0.94, 3), (0.96, V)):
    assert set(draw(logits, top_p=top_p)) == set(range(kept)), top_p


def test_top_p_counts_what_top_k_kept():
  logits = np.log(np.array([0.3, 0.2, 0.1] + [0.4 / 21] * 21, np.float32))
  assert set(draw(logits, top_k=2, top_p=0.55)) == {0}, "0.3 of the 0.5 kept is 0.6"
  assert set(draw(logits, top_p=0.55)) == {0, 1, 2}


def test_ties_at_the_threshold_are_kept():
  assert set(draw(TIED, top_k=2)) == {0, 1, 2, 3, 4, 5}
  assert set(draw(TIED, top_p=0.5)) == {0, 1, 2, 3, 4, 5}
  assert set(draw(np.zeros(V, np.float32), top_k=1)) == set(range(V))


def test_one_kept_token_is_greedy():
  cold = {"temperature": 0.0}
  for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, cold, {**cold, "top_k": 5}):
    assert set(draw(PEAKED, **options)) == {PEAKED.argmax()}, options


def test_all_but_one_masked():
  logits = np.full(V, -np.inf, np.float32)
  logits[17] = -50.0
  for options in ({}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}): assert set(draw(logits, **options)) == {17}


def test_restricted_ids_never_come():
  banned = np.argsort(PEAKED)[::-1][:16]
  keep = np.ones(V, bool)
  keep[banned] = False
  masked = np.where(keep, PEAKED, -np.inf)
  assert set(draw(PEAKED, banned=banned, temperature=0.0)) == {masked.argmax()}
  for options in ({}, {"top_k": 4}, {"top_p": 0.5}):
    ids, kept = draw(PEAKED, banned=banned, **options), reference_keep(masked, 1.0, **options) & keep
    p = np.where(kept, reference_probabilities(masked, 1.0), 0.0)
    assert kept[ids].all() and chi_square_passes(ids, p / p.sum())


def test_extreme_temperatures_give_tokens():
  assert set(draw(PEAKED, temperature=2e-5)) == {PEAKED.argmax()}
  flat = np.full(V, 1 / V)
  assert chi_square_passes(draw((PEAKED / 100).astype(np.float32), temperature=100.0), flat)
  assert set(draw((PEAKED * 1000).astype(np.float32), temperature=1e-4)) == {PEAKED.argmax()}


def test_rows_do_not_see_each_other():
  """Every row with settings of its own equals the same row among equals."""
  options = [{"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5, "temperature": 1.5}, {"min_p": 0.2}]
  defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
  which = np.arange(ROWS) % len(options)
  mixed = draw(PEAKED, **{k: np.array([o.get(k, d) for o in options])[which] for k, d in defaults.items()})
  for i, o in enumerate(options): assert (mixed[which == i] == draw(PEAKED, **o)[which == i]).all()


# through the engine

def params(i, **options):
  common = {"seed": 1000 + i, "max_tokens": 16, "ignore_eos": True, "temperature": 0.9, "top_p": 0.95}
  return SamplingParams(**{**common, **options})


def ids_of(outputs): return [o.outputs[0].token_ids for o in outputs]


PROMPTS = [{"prompt_token_ids": [5 + i, 9, 200 - i][:1 + i % 3] * 2} for i in range(8)]


@pytest.fixture(scope="module")
def llm(folder): return LLM(folder, **SAMPLING_ENGINE)


@pytest.fixture(scope="module")
def alone(llm): return [ids_of(llm.generate(p, params(i)))[0] for i, p in enumerate(PROMPTS)]


@pytest.mark.slow
def test_seeded_text_is_the_same_alone_and_in_a_batch_of_8(llm, alone):
  assert ids_of(llm.generate(PROMPTS, [params(i) for i in range(8)])) == alone


@pytest.mark.slow
def test_seeded_text_is_the_same_in_any_arrival_order(llm, alone):
  order = np.random.default_rng(1).permutation(8).tolist()
  assert ids_of(llm.generate([PROMPTS[i] for i in order], [params(i) for i in order])) == [alone[i] for i in order]


@pytest.mark.slow
def test_seeded_text_is_the_same_after_preemption(folder, alone):
  small = LLM(folder, num_gpu_blocks_override=13, **SAMPLING_ENGINE)
  assert ids_of(small.generate(PROMPTS, [params(i) for i in range(8)])) == alone
  assert small.get_metrics()["num_preemptions"] > 0


def test_greedy_and_random_requests_share_a_batch(llm, alone):
  mixed = [params(i) if i % 2 else params(i, temperature=0.0) for i in range(8)]
  greedy = ids_of(llm.generate(PROMPTS, params(0, temperature=0.0)))
  assert ids_of(llm.generate(PROMPTS, mixed)) == [alone[i] if i % 2 else greedy[i] for i in range(8)]


def test_different_seeds_differ(llm):
  texts = ids_of(llm.generate([PROMPTS[0]] * 12, [params(i) for i in range(12)]))
  assert len(set(map(tuple, texts))) == 12
  words = ids_of(llm.generate([PROMPTS[0]] * 3, [params(0, seed=s) for s in (1, 1 + 2**32, -1)]))
  assert len(set(map(tuple, words))) == 3, "all 64 bits of a seed count"


def test_requests_without_a_seed_differ_and_the_engines_seed_repeats_them(llm, folder):
  def four(seed):
    fresh = LLM(folder, seed=seed, **SAMPLING_ENGINE)
    return ids_of(fresh.generate([{"prompt_token_ids": [5]}] * 4, params(0, seed=None)))
  first = four(1)
  assert len(set(map(tuple, first))) == 4 and four(1) == first and four(2) != first


def test_the_first_sampled_token_is_as_frequent_as_the_models_probabilities_say(llm, folder):
  ids = [5, 9, 200]
  logits = reference_logits(folder, ids)[-1]
  options = {"max_tokens": 1, "temperature": 0.8, "top_p": 1.0, "top_k": 12}
  first = llm.generate([{"prompt_token_ids": ids}] * 600, [params(i, **options) for i in range(600)])
  keep = reference_keep(logits, 0.8, top_k=12)
  p = np.where(keep, reference_probabilities(logits, 0.8), 0.0)
  drawn = np.array([o.outputs[0].token_ids[0] for o in first])
  assert keep[drawn].all() and chi_square_passes(drawn, p / p.sum())


def test_noise_is_finite_for_the_largest_hash_too():
  """Of 2**24 words of noise one is the largest. In float32 it must not become 1 as it is put between 0 and 1: the noise
  would be infinite, and its token drawn whatever its logit."""
  size, limit = 1 << 20, np.float32(2**-23)
  def mixed(x):   # lowbias32 of Wellons' hash-prospector
    for shift, factor in ((16, 0x7feb352d), (15, 0x846ca68b)): x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))
  ids, position = mixed(np.arange(size, dtype=np.uint32)), np.zeros(1, np.uint32)
  seeds = np.arange(1, 200, dtype=np.uint32)
  found = next(seed for seed in seeds if mixed(ids ^ mixed(seed ^ mixed(mixed(position)))).max() >= 2**32 - 2**8)
  noise = _gumbel(Tensor([[int(found), 0]], dtype=dtypes.uint32), Tensor([0], dtype=dtypes.int32), size).numpy()
  assert np.isfinite(noise).all() and noise.max() < -np.log(limit / 2) + 1
