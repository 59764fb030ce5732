"""SamplingParams fields implemented by a LogitsProcessor: penalties, logit bias, allowed and banned tokens, log
probabilities. Each function, and then the whole engine, is compared with plain numpy."""
import functools

import numpy as np
import pytest
from hypothesis import Phase, given, settings, strategies as st
from helpers.engines import ENGINE
from helpers.models import tiny_model
from helpers.reference import (END, SPM, changed, chi_square_passes, encodings, end_ids, reference_greedy,
                               reference_logits, reference_probabilities, reference_sampling_mask)
from helpers.requests import ids_of, tokens
from tinygrad import Tensor, TinyJit

from tinyvllm import LLM, Logprob, SamplingParams
from tinyvllm.request import SAMPLING_FIELDS, SamplerMode
from tinyvllm_extra.kernels.sampling import Sampler
from tinyvllm_extra.logits import ADJUSTMENTS, adjust_kernel, apply_bitmask, top_logprobs

pytestmark = pytest.mark.slow

ROWS = 128
SAMPLER = Sampler()


# Functions

def cases(*strategies):
  """Run a test on 10,240 random cases: two vocabularies (one fills the last word of a bitmask), 40 calls, 128 rows."""
  repeat = settings(max_examples=40, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
  with_rng = given(st.builds(np.random.default_rng, st.integers(0, 2**32 - 1)), *strategies)
  return lambda test: pytest.mark.parametrize("V", [64, 50])(repeat(with_rng(test)))


@functools.cache
def jit(function, shape, *constants): return TinyJit(lambda *x: function(*x, *constants).realize())
def call(function, *arrays, constants=()):
  return jit(function, arrays[0].shape, *constants)(*[Tensor(x).realize() for x in arrays]).numpy()


def adjust(logits, adjustments): return logits.clone().custom_kernel(adjustments, fxn=adjust_kernel)[0]


def best_logprobs(logits, ids, k): return top_logprobs(logits, ids, SAMPLER, k)


def sample(logits, *columns):
  rows = dict(zip((*SAMPLING_FIELDS, "seed_low", "seed_high", "position"), columns, strict=True))
  return SAMPLER.sample(logits, rows, SamplerMode.FILTERED)


def make_adjustments(is_adjusted, bias, factor, penalty):
  """Return ADJUSTMENTS of all logits, (S, V), as int32 words, (columns, S * V). The row is -1 for no adjustment."""
  adjustments = np.zeros(is_adjusted.shape, ADJUSTMENTS.dtype)
  row, token = np.indices(is_adjusted.shape)
  columns = {"row": np.where(is_adjusted, row, -1), "token": token, "bias": bias, "factor": factor, "penalty": penalty}
  for name, values in columns.items(): adjustments[name] = values
  return np.ascontiguousarray(adjustments.view(np.int32).reshape(-1, ADJUSTMENTS.num_words).T)


def log_softmax(x):
  x = x - x.max(1, keepdims=True)
  return x - np.log(np.exp(x).sum(1, keepdims=True))


def random_logits(rng, V):
  """Return logits, (ROWS, V): peaked and flat rows, with many or few ties, with and without a large offset. Rounded to
  a grid that is exact in float32, so that logits are equal or differ by more than rounding."""
  scale, grid = rng.choice([0.05, 1, 3, 8], (ROWS, 1)), rng.choice([1, 4, 256], (ROWS, 1))
  x = np.round(rng.standard_normal((ROWS, V)) * scale * grid) / grid + rng.choice([-16, 0, 0, 16], (ROWS, 1))
  return x.astype(np.float32)


@cases()
def test_apply_bitmask_removes_tokens_without_bit(V, rng):
  logits, bits = random_logits(rng, V), rng.random((ROWS, 64)) < rng.choice([0.02, 0.5, 0.98], (ROWS, 1))
  words = (bits.reshape(ROWS, 2, 32) << np.arange(32, dtype=np.uint32)).sum(2, dtype=np.uint32).view(np.int32)
  np.testing.assert_array_equal(call(apply_bitmask, logits, words), np.where(bits[:, :V], logits, -np.inf))


@cases()
def test_adjust_adds_bias_scales_and_subtracts_penalty(V, rng):
  logits = random_logits(rng, V)
  is_adjusted = rng.random((ROWS, V)) < rng.choice([0, 0.1, 0.9], (ROWS, 1))
  logits[rng.random((ROWS, V)) < rng.choice([0, 0.5, 0.98], (ROWS, 1))] = -np.inf
  choices = np.arange(-100, 100.1, 0.25), [1, 1, 0.01, 0.3, 1.1, 2, 100], np.arange(-10, 10.1, 0.125)
  bias, factor, penalty = (rng.choice(x, (ROWS, V)).astype(np.float32).astype(float) for x in choices)
  adjusted = call(adjust, logits, make_adjustments(is_adjusted, bias, factor, penalty))
  x = logits + bias
  is_finite = np.isfinite(logits)
  assert np.isneginf(adjusted[~is_finite]).all(), "a masked token must stay masked"
  changed = is_finite & is_adjusted
  scaled = np.where(x > 0, x / factor, x * factor)[changed]
  error = np.abs(adjusted[changed] - (scaled - penalty[changed]))
  assert (error <= 1e-6 * (np.abs(scaled) + np.abs(penalty[changed]))).all()
  np.testing.assert_array_equal(adjusted[~is_adjusted], logits[~is_adjusted])


@cases(st.sampled_from([0, 20]))
def test_top_logprobs_equals_log_softmax(V, rng, k):
  logits, ids = random_logits(rng, V), rng.integers(0, V, (ROWS, 1)).astype(np.int32)
  rows, best = call(best_logprobs, logits, ids[:, 0], constants=(k,)), np.argsort(-logits, 1, kind="stable")[:, :k]
  assert rows.shape == (ROWS, 2 + 2 * k)
  np.testing.assert_array_equal(rows[:, 1:2], 1 + (logits > np.take_along_axis(logits, ids, 1)).sum(1, keepdims=True))
  np.testing.assert_array_equal(rows[:, 2::2], best)
  expected = np.take_along_axis(log_softmax(logits.astype(float)), np.hstack([ids, best]), 1)
  np.testing.assert_allclose(np.hstack([rows[:, :1], rows[:, 3::2]]), expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("V", [2560, 2561, 5000, 8192])
def test_top_logprobs_of_large_vocabulary_ranks_equal_logits_by_id(V):
  rng = np.random.default_rng(V)
  logits = rng.integers(0, 40, (ROWS, V)).astype(np.float32)   # the best 20 are ties, or nearly all
  logits[:, rng.integers(0, V, V // 2)] = 0
  rows = call(best_logprobs, logits, np.zeros(ROWS, np.int32), constants=(20,))
  best = np.argsort(-logits, 1, kind="stable")[:, :20]
  np.testing.assert_array_equal(rows[:, 2::2], best)
  np.testing.assert_allclose(rows[:, 3::2], np.take_along_axis(log_softmax(logits.astype(float)), best, 1), atol=2e-6,
                             rtol=1e-6)


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


@cases()
def test_sample_ids_are_in_reference_mask(V, rng):
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
  ids = call(sample, logits, *columns, *seeds, positions)
  for row, i in enumerate(ids): assert keep[row][i], (i, rows[row], logits[row].tolist())


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
  columns = [np.full(ROWS, value, kind) for value, kind in zip(filters.values(), "fiff", strict=True)]
  seeds = [np.full((2, ROWS), seed, np.uint32) for seed in range(32)]
  ids = np.concatenate([call(sample, adjusted, *columns, *seed, positions) for seed in seeds])
  assert frequencies_fit(ids, x, **filters) and not frequencies_fit(ids, logits, **filters)


# The engine, compared with each step's adjusted reference logits


def params(size, **o): return SamplingParams(**{"temperature": 0.0, "max_tokens": size, "ignore_eos": True, **o})
def seeded(size, seed, **options): return params(size, **{"temperature": 0.9, "top_p": 0.95, "seed": seed, **options})
def samples(output): return [c.token_ids for c in output.outputs]
def prompt(length, salt=0): return [259 + (7 * i + 5 * salt + i * i) % 61 for i in range(length)]


def naive_greedy(folder, prompt_ids, n, encode=SPM.EncodeAsIds, penalized=None, **options):
  """Return the greedy ids after a prompt. penalized: the prompt tokens that penalties count (default: all)."""
  ids = []
  while len(ids) < n and not end_ids(options) & {*ids}:
    logits = reference_logits(folder, [*prompt_ids, *ids])[-1]
    x = changed(logits, penalized or prompt_ids, ids, options, encode)
    best = np.sort(x[np.isfinite(x)])[-2:]
    assert len(best) == 1 or best[1] > best[0] + 1e-4, "rounding may break a tie: choose another prompt"
    ids.append(int(x.argmax()))
  return ids


CASES = {name: (prompt(3 + salt % 7, salt), options) for name, (salt, options) in {
  "repetition_penalty": (5, {"repetition_penalty": 1.5}),
  "repetition_penalty below 1": (2, {"repetition_penalty": 0.6}),
  "presence_penalty": (9, {"presence_penalty": 1.5}), "presence_penalty below 0": (1, {"presence_penalty": -1.5}),
  "frequency_penalty": (8, {"frequency_penalty": 0.6}), "frequency_penalty below 0": (4, {"frequency_penalty": -1.25}),
  "logit_bias -100": (16, {"logit_bias": {278: -100, 274: -100.0}}),
  "logit_bias 100": (17, {"logit_bias": {300: 100.0}}),
  "logit_bias with str keys": (18, {"logit_bias": {"300": 3.5, "7": 6, "306": 2}}),
  "min_tokens": (10, {"ignore_eos": False, "min_tokens": 6}),
  "allowed_token_ids": (7, {"allowed_token_ids": [*range(259, 320, 4), 6]}),
  "bad_words of one token": (19, {"bad_words": ["n", "is"]}),
  "bad_words of several tokens": (2, {"bad_words": ["wm", "oyl", "a"]}),
  "three stop_token_ids": (22, {"stop_token_ids": [312, 282, 9], "min_tokens": 9}),
  "300 stop_token_ids": (23, {"stop_token_ids": [*range(3, 303)], "min_tokens": 8}),
  "all fields": (10, {
    "repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {"302": 2.5, 306: -1},
    "allowed_token_ids": [*range(3, 60), *range(261, 320)], "bad_words": ["wm", "s"], "min_tokens": 7,
    "stop_token_ids": [*range(285, 305)], "ignore_eos": False, "temperature": 1e-6, "top_k": 4, "top_p": 0.5})}.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tiny_model(tmp_path_factory.mktemp("fields"), words=True, eos_token_id=[2, END])


@pytest.fixture(scope="module")
def llm(folder): return LLM(folder, **{**ENGINE, "max_num_seqs": 16})


@pytest.fixture(scope="module")
def small(folder):   # two sequences, 10 blocks of 4 tokens
  return LLM(folder, num_gpu_blocks_override=11, **{**ENGINE, "max_num_seqs": 2, "max_num_batched_tokens": 2})


@pytest.fixture(scope="module")
def expected(folder):   # by the case's name and whether its options are set
  return {(name, is_set): naive_greedy(folder, ids, N, **options if is_set else {})
          for is_set in (True, False) for name, (ids, options) in CASES.items()}


def generate(engine, jobs):
  options = [params(N, **CASES[name][1] if is_set else {}) for name, is_set in jobs]
  return [ids_of(o) for o in engine.generate([tokens(CASES[name][0]) for name, _ in jobs], options)]


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids_equal_argmax_of_adjusted_logits(llm, expected, name):
  assert expected[name, True] != expected[name, False][:len(expected[name, True])], "the options must have an effect"
  for job in ((name, True), (name, False), (name, True)): assert generate(llm, [job]) == [expected[job]]


def test_mixed_batch_equals_single_also_after_preemption(llm, small, expected):
  jobs, before = [(name, True) for name in CASES], small.get_metrics()["num_preemptions"]
  mixed = [(name, i % 3 > 0) for i, name in enumerate([*CASES] * 3)]   # 48 requests in 16 slots, or in 2
  for engine, batch in ((llm, jobs), (llm, mixed), (small, mixed)):
    assert generate(engine, batch) == [expected[job] for job in batch]
  assert small.get_metrics()["num_preemptions"] > before + 3, "the KV cache must be too small"


def test_penalties_count_chunked_and_cached_prompts(llm, folder):
  options = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "bad_words": ["n", "no"], "logit_bias": {306: -2}}
  for salt in (31, 32, 33):
    prompt_ids = prompt(45, salt)   # chunks of 16 tokens
    ids = naive_greedy(folder, prompt_ids, N, **options)
    last_chunk = naive_greedy(folder, prompt_ids, N, penalized=prompt_ids[-13:], **options)
    assert ids != last_chunk, "the first chunks must have an effect"
    outputs = [llm.generate(tokens(prompt_ids), params(N, **options))[0] for _ in range(2)]
    assert [ids_of(o) for o in outputs] == [ids, ids] and [o.num_cached_tokens for o in outputs] == [0, 44]


def test_bad_word_starting_in_prompt_is_allowed(llm, folder):
  w, m = SPM.EncodeAsIds("wm")
  for bias, first in ({m: 8.0}, m), ({w: 1.0}, w):
    prompt_ids, options = [*prompt(4, 1), w], {"bad_words": ["wm"], "allowed_token_ids": [w, m], "logit_bias": bias}
    ids = ids_of(llm.generate(tokens(prompt_ids), params(N, **options))[0])
    assert ids == naive_greedy(folder, prompt_ids, N, **options) and ids[0] == first
    assert (w, m) not in zip(ids, ids[1:], strict=False)


def test_bad_word_with_leading_space_is_banned(tmp_path):
  """In a byte-level tokenizer a leading space is part of the token."""
  from test_tokenizer import byte_level_bpe
  model = byte_level_bpe()
  model.save(str(tmp_path / "tokenizer.json"))
  folder = tiny_model(tmp_path, tokenizer=False, vocab_size=model.get_vocab_size())
  def encode(text): return model.encode(text).ids
  forms = encode("the") + encode(" the")
  options = {"bad_words": ["the"], "logit_bias": dict.fromkeys(forms, 9.0)}
  assert len(forms) == 2 and encodings(["the"], encode) == [[i] for i in forms]
  unbanned = naive_greedy(folder, [5, 6, 7], 1, **{**options, "bad_words": []})
  assert unbanned == forms[1:], "without bad_words, the form with a space must come first"
  ids = ids_of(LLM(folder, **ENGINE).generate(tokens([5, 6, 7]), params(4, **options))[0])
  assert ids == naive_greedy(folder, [5, 6, 7], 4, encode, **options) and not {*ids} & {*forms}


def test_allowed_ids_all_banned_by_min_tokens_are_sampled(llm, folder):
  options = {"allowed_token_ids": [300, 301], "stop_token_ids": [*range(320)], "min_tokens": 3}
  ids = ids_of(llm.generate(tokens(prompt(5, 3)), params(6, **options))[0])
  assert ids[:1] == naive_greedy(folder, prompt(5, 3), 1, **options) and {*ids} <= {300, 301}


@pytest.mark.parametrize("kind", [{}, {"temperature": 0.8, "seed": 1}], ids=["greedy", "sampled"])
def test_batch_without_processors_uses_plain_graphs(llm, kind):
  jobs, graphs, all_graphs = [tokens(prompt(9, 60 + i)) for i in range(3)], llm.runner.graphs, llm.runner.graphs.copy()
  fields = {"repetition_penalty": 1.5, "logit_bias": {5: 1.0}, "allowed_token_ids": [*range(99)]}
  llm.generate(jobs, params(2))   # caches the prompts
  graphs.clear()
  llm.generate(jobs, params(3, **kind))
  plain = graphs.copy()
  llm.generate(jobs, params(3, **kind, **fields))
  assert len(graphs) > len(plain)
  all_graphs |= graphs
  for key in {*graphs} - {*plain}: del graphs[key]
  llm.generate(jobs, params(3, **kind, repetition_penalty=1.0))   # the default value
  assert {*graphs} == {*plain}
  graphs.update(all_graphs)


def test_first_token_frequencies_match_adjusted_logits(llm, folder):
  prompt_ids, filters = prompt(17, 50), {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
  options = {"repetition_penalty": 1.6, "logit_bias": {prompt_ids[0]: 3.0, 306: -1.5}}
  logits = reference_logits(folder, prompt_ids)[-1]
  outputs = llm.generate([tokens(prompt_ids)] * 600, [seeded(1, i, **options, **filters) for i in range(600)])
  ids = np.array([ids_of(o)[0] for o in outputs])
  assert frequencies_fit(ids, changed(logits, prompt_ids, [], options), **filters)
  assert not frequencies_fit(ids, logits, **filters), "the test must be able to fail"


# Seeds

PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
SEEDED = [(tokens(prompt(17, 70 + i)), {"seed": 900 + i, **PENALTIES}) for i in range(16)]


@pytest.fixture(scope="module")
def alone(llm): return [ids_of(llm.generate(job, seeded(N, **o))[0]) for job, o in SEEDED]


def test_seeded_output_in_batch_and_after_preemption_equals_single(llm, small, alone):
  (jobs, options), before = map(list, zip(*SEEDED, strict=True)), small.get_metrics()["num_preemptions"]
  for engine, n in ((llm, N), (small, N), (llm, 1)):
    assert [ids_of(o) for o in engine.generate(jobs, [seeded(n, **o) for o in options])] == [ids[:n] for ids in alone]
  assert small.get_metrics()["num_preemptions"] > before + 3, "the KV cache must be too small"
  assert len({*map(tuple, alone)}) == 16 and ids_of(llm.generate(jobs[3], seeded(N, 8, **PENALTIES))[0]) != alone[3]


@pytest.mark.parametrize("order", range(3))
def test_seeded_output_in_any_arrival_order_is_equal(llm, alone, order):
  waiting, last = np.random.default_rng(order).permutation(16).tolist(), {}
  while waiting or llm.has_unfinished_requests():
    for i in [waiting.pop() for _ in range(min(4, len(waiting)))]:   # four new requests per step
      llm.add_request(str(i), SEEDED[i][0], seeded(N, **SEEDED[i][1]))
    last |= {o.request_id: ids_of(o) for o in llm.step()}
  assert [last[str(i)] for i in range(16)] == alone


def test_samples_with_penalties_equal_single_requests(llm, folder):
  job = tokens(prompt(17, 40))
  alone = [ids_of(llm.generate(job, seeded(N, 60 + i, **PENALTIES))[0]) for i in range(4)]
  assert samples(llm.generate(job, seeded(N, 60, n=4, **PENALTIES))[0]) == alone and len({*map(tuple, alone)}) == 4
  expected = naive_greedy(folder, prompt(17, 40), N, **PENALTIES)
  assert samples(llm.generate(job, params(N, n=3, **PENALTIES))[0]) == [expected] * 3


# Log probabilities

def check_entries(folder, entries, prefix, ids, k):
  """Check that the log probabilities of `ids` after `prefix` equal the reference's."""
  rows = log_softmax(reference_logits(folder, [*prefix, *ids])[len(prefix) - 1:-1])
  for entry, token, row in zip(entries, ids, rows, strict=True):
    best = np.argsort(-row, kind="stable")[:k].tolist()
    assert [*entry] == [token, *[i for i in best if i != token]] and len(entry) in (k, k + 1)
    for i, logprob in entry.items():
      assert isinstance(logprob, Logprob) and type(logprob.rank) is int and abs(logprob.logprob - row[i]) < 1e-4
      assert logprob.rank == (best.index(i) if i in best else (row > row[i]).sum()) + 1
      assert i < 259 or logprob.decoded_token == SPM.DecodeIds([i])   # lower ids are bytes or special tokens


def check(output, folder, k=None, prompt_k=None, n=1):
  """Check that an output of n samples has the requested log probabilities and no others."""
  ids, entries = output.prompt_token_ids, output.prompt_logprobs
  assert (entries is None if prompt_k is None else entries[0] is None) and len(output.outputs) == n
  if prompt_k is not None: check_entries(folder, entries[1:], ids[:1], ids[1:], prompt_k)
  for c in output.outputs:
    assert k is not None or c.logprobs is c.cumulative_logprob is None
    if k is None: continue
    check_entries(folder, c.logprobs, ids, c.token_ids, k)
    logprobs = [entry[token].logprob for entry, token in zip(c.logprobs, c.token_ids, strict=True)]
    assert abs(c.cumulative_logprob - sum(logprobs)) < 1e-4


def test_logprobs_in_mixed_batch_equal_raw_logits(llm, folder):
  kinds = [{}, {"temperature": 1.7, "seed": 3, **PENALTIES}, {"repetition_penalty": 1.8, "logit_bias": {300: 3.0}}]
  requests = [(k, options) for k in (0, 1, 5, 20, None) for options in kinds]
  jobs = [tokens(prompt(17, 70 + i)) for i in range(len(requests))]
  plain = [ids_of(o) for o in llm.generate(jobs, [params(10, **options) for _, options in requests])]
  outputs = llm.generate(jobs, [params(10, logprobs=k, **options) for k, options in requests])
  assert [ids_of(o) for o in outputs] == plain, "logprobs must not change the output"
  for output, (k, _) in zip(outputs, requests, strict=True): check(output, folder, k)
  assert any(len(entry) == 6 for entry in outputs[7].outputs[0].logprobs), "a token must be outside the best five"


@pytest.mark.parametrize("k", [0, 2, 20])
def test_prompt_logprobs_chunked_and_cached_are_complete(llm, folder, k):
  other = prompt(7, 3)
  for length in (1, 2, 16, 17, 45):   # chunks of 16 tokens
    ids = prompt(length, 80 + length)
    llm.generate(tokens(ids), params(2))
    output, other_output = llm.generate([tokens(ids), tokens(other)], [params(5, prompt_logprobs=k), params(N)])
    check(output, folder, prompt_k=k)
    check(other_output, folder)
    assert output.num_cached_tokens == 0 and ids_of(output) == reference_greedy(folder, ids, 5)
    assert ids_of(other_output) == reference_greedy(folder, other, N)
  assert llm.generate(tokens(ids), params(2))[0].num_cached_tokens == 44, "later requests must hit the prefix cache"


def test_logprobs_after_preemption_are_complete(small, folder):
  counts = [(3, 4), (None, 4), (4, None), (3, 3), (None, None)]   # logprobs, prompt_logprobs
  jobs, before = [tokens(prompt(13 + i, 90 + i)) for i in range(5)], small.get_metrics()["num_preemptions"]
  outputs = small.generate(jobs, [params(16, logprobs=k, prompt_logprobs=p) for k, p in counts])
  assert small.get_metrics()["num_preemptions"] > before, "the KV cache must be too small"
  for output, (k, p) in zip(outputs, counts, strict=True):
    assert ids_of(output) == reference_greedy(folder, output.prompt_token_ids, 16)
    check(output, folder, k, p)


def test_logprobs_of_samples_and_streams_match_new_tokens(llm, folder):
  ids, joined, fields = prompt(13, 96), [[], []], seeded(10, 77, n=2, logprobs=3, prompt_logprobs=3)
  whole, = llm.generate(tokens(ids), fields)
  check(whole, folder, 3, 3, n=2)
  assert samples(whole)[0] != samples(whole)[1]
  for output in llm.generate_stream(tokens(ids), fields):
    for i, c in enumerate(output.outputs):
      assert [next(iter(entry)) for entry in c.logprobs] == c.token_ids
      joined[i] += c.logprobs
      assert abs(c.cumulative_logprob - sum([*x.values()][0].logprob for x in joined[i])) < 1e-4
  for entries, c in zip(joined, whole.outputs, strict=True):
    check_entries(folder, entries, ids, c.token_ids, 3)
    assert [[*entry] for entry in entries] == [[*entry] for entry in c.logprobs]


def test_logprobs_of_vocabulary_of_7_have_7_entries(tmp_path):
  small = tiny_model(tmp_path, vocab_size=7, eos_token_id=None)
  output, = LLM(small, **ENGINE).generate(tokens([3, 6, 4]), params(3, logprobs=20))
  rows = log_softmax(reference_logits(small, [3, 6, 4, *ids_of(output)])[2:-1])
  for entry, row in zip(output.outputs[0].logprobs, rows, strict=True):
    assert {i: p.rank for i, p in entry.items()} == {i: 1 + (row > row[i]).sum() for i in range(7)}
    np.testing.assert_allclose([entry[i].logprob for i in range(7)], row, atol=1e-4)


# Errors

@pytest.mark.parametrize("name,value", [
  ("logit_bias", {320: 1.0}), ("logit_bias", {"5": 1, "320": 1}), ("logit_bias", {-1: 1.0}),
  ("allowed_token_ids", [5, 320]), ("allowed_token_ids", [-1]), ("stop_token_ids", [320])], ids=str)
def test_ids_outside_vocabulary_raise_and_queue_nothing(llm, folder, name, value):
  def bad(): return params(8, **{name: value})
  good, bad_id = tokens(prompt(5, 2)), "-1" if "-1" in str(value) else "320"
  for running in ([], ["in flight"]):
    for request_id in running: llm.add_request(request_id, good, params(8, **PENALTIES))
    if running: llm.step()
    for submit in (lambda: llm.add_request("bad", good, bad()), lambda: llm.generate([good, good], [params(2), bad()]),
                   lambda: llm.generate_stream(good, bad())):
      with pytest.raises(ValueError, match=name) as error: submit()
      assert bad_id in str(error.value)
      assert llm.has_unfinished_requests() is bool(running) and [*llm.requests] == running
  while llm.has_unfinished_requests(): output, = llm.step() or [None]
  assert ids_of(output) == naive_greedy(folder, prompt(5, 2), 8, **PENALTIES)


def test_conflict_with_structured_outputs_names_both_fields():
  for name, value in {"min_tokens": 3, "ignore_eos": True, "allowed_token_ids": [5, 6], "bad_words": ["a"]}.items():
    with pytest.raises(ValueError, match=f"{name}.*structured_outputs|structured_outputs.*{name}"):
      SamplingParams(**{name: value}, structured_outputs={"regex": "a"})
