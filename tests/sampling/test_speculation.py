"""Speculative decoding: outputs equal those without drafts, whatever proposes them, and drafts delay no other request.
Most tests use a fake model, which hashes a step's inputs and the content of its blocks into the next tokens: one wrong
token, position or block table changes the output."""
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import re

import pytest
import sentencepiece
from helpers.engines import ENGINE, assert_same_outputs, check_invariants, run_to_end
from helpers.faults import Failed, PLACES, break_steps, fail_once
from helpers.hash_model import HalfRightModel, HashDevice, HashModel
from helpers.models import VOCAB, tiny_model
from helpers.parameters import slow
from helpers.reference import reference_greedy
from helpers.requests import flags, greedy, ids_of, prompt, sampled, tokens
from helpers.servers import LocalServer
from helpers.speculation import Counts, NGRAM, PER_POSITION, always_draft

from tinyvllm import LLM, SamplingParams
from tinyvllm_extra.cli import main
from tinyvllm_extra.server.metrics import draft_statistics
from tinyvllm_extra.speculation import NGramDrafter, SpeculativeConfig

# One graph serves all requests
OPTIONS = {**ENGINE, "max_num_seqs": 16}


class Oracle:
  """Replaces NGramDrafter's lookup with known outputs. style(rng, right) changes the right drafts. patience: the
  probability that a step waits for the one in flight."""
  def __init__(self, monkeypatch, style=None, seed=0, patience=1.0):
    self.texts, self.style, self.rng, self.requested_sizes = [], style or STYLES["right"], random.Random(seed), []
    monkeypatch.setattr(NGramDrafter, "propose", lambda drafter, ids, n: self.propose(list(ids), n))
    monkeypatch.setattr(NGramDrafter, "needs_sync", lambda drafter, seq: bool(seq.draft_token_ids) or (
      drafter.rate > 0.1 and self.rng.random() < patience))

  def propose(self, ids, n):
    self.requested_sizes.append(n)
    text = next((text for text in self.texts if text[:len(ids)] == ids), ids)
    right = [*text[len(ids):], *[self.rng.randrange(VOCAB) for _ in range(n)]][:n]   # random tokens after the end
    return self.style(self.rng, right)[:n]


def other_than(token): return 259 + (token - 258) % 61   # a different token of the same range


def partly_wrong(rng, right):
  """Return right drafts, fewer drafts, or drafts with one wrong token or random ones from some position on."""
  if not right: return right
  position, kind = rng.randrange(len(right)), rng.randrange(4)
  if kind == 0: return right[:position]
  if kind == 1: return right
  if kind == 2: return [*right[:position], other_than(right[position]), *right[position + 1:]]
  return [*right[:position], *[rng.randrange(VOCAB) for _ in right[position:]]]


STYLES = {"right": lambda rng, right: right, "wrong": lambda rng, right: [other_than(x) for x in right],
          "partly wrong": partly_wrong, "none": lambda rng, right: []}


# Prompt lookup

def naive_lookup(ids, n, longest, shortest):
  """Return up to n tokens after the last earlier occurrence of the longest n-gram at the end of ids."""
  for size in range(min(longest, len(ids) - 1), shortest - 1, -1):
    for end in range(len(ids) - 1, size - 1, -1):
      if ids[end - size:end] == ids[-size:]: return ids[end:end + n]
  return []


@pytest.mark.parametrize("longest, shortest", [(4, 2), (3, 1), (1, 1), (2, 2), (8, 3)])
def test_ngram_drafter_equals_naive_lookup(longest, shortest):
  rng, num_hits, num_misses = random.Random(longest), 0, 0
  config = SpeculativeConfig(**NGRAM | {"prompt_lookup_max": longest, "prompt_lookup_min": shortest})
  for _ in range(150):
    drafter, letters, ids = NGramDrafter(config, SamplingParams()), rng.choice([1, 2, 3, 5, 12]), []
    for _ in range(rng.randrange(2, 12)):
      ids += [rng.randrange(letters) for _ in range(rng.randrange(1, 6))]   # several per call, as with accepted drafts
      n = rng.randrange(1, 9)
      expected = naive_lookup(ids, n, longest, shortest)
      drafts = drafter.propose(list(ids), n)
      assert drafts[:len(expected)] == expected and len(drafts) <= n, (ids, n)
      # If fewer than n tokens follow, a repetition continues
      assert drafts == (expected * n)[:len(drafts)] and bool(drafts) == bool(expected), (ids, n)
      num_hits += bool(drafts)
      num_misses += not drafts
  assert num_hits > 100 and (num_misses > 100 or longest == 1), "both cases must occur"


def test_ngram_drafter_proposes_at_most_n_tokens():
  drafter = NGramDrafter(SpeculativeConfig(**NGRAM), SamplingParams())
  for n in (0, 1, 3): assert len(drafter.propose([7, 8, 9] * 4, n)) == n


class CountingList(list):
  """A list that counts the items that are read."""
  def __init__(self, *items):
    super().__init__(*items)
    self.num_read = 0

  def __getitem__(self, i):
    out = super().__getitem__(i)
    self.num_read += len(out) if isinstance(i, slice) else 1
    return out

  def __iter__(self):
    self.num_read += len(self)
    return super().__iter__()


def test_ngram_drafter_reads_only_new_tokens():
  rng, ids = random.Random(0), CountingList()
  drafter = NGramDrafter(SpeculativeConfig(**NGRAM), SamplingParams())
  ids += [rng.randrange(20) for _ in range(8000)]
  drafter.propose(ids, 5)
  for _ in range(20):
    ids += [rng.randrange(20) for _ in range(3)]
    ids.num_read = 0
    drafter.propose(ids, 5)
    assert 0 < ids.num_read < 100


# A fake model


def check_preemptions(engine):
  """Check that no sequence is preempted while enough blocks are free for all running sequences without drafts."""
  scheduler, blocks, schedule = engine.scheduler, engine.blocks, engine.scheduler.schedule

  def checked_schedule():
    before = scheduler.counters["num_preemptions"]
    num_needed = sum(-(-seq.length // blocks.block_size) - len(seq.block_table) for seq in scheduler.running)
    enough = num_needed <= blocks.num_free()
    batch = schedule()
    assert not enough or scheduler.counters["num_preemptions"] == before, "preempted for drafts"
    assert sum(batch.values()) <= engine.config.max_num_batched_tokens
    return batch
  scheduler.schedule = checked_schedule


def check_drafts(engine, model):
  """Check that a draft model's drafts equal its own continuation of the tokens, whatever it drafted before."""
  run_draft_model = engine.proposer.run_draft_model

  def checked_run(runner, batch):
    run_draft_model(runner, batch)
    for seq in batch:
      if seq.draft_token_ids and seq.num_generated >= seq.params.min_tokens:
        params = dataclasses.replace(seq.params, min_tokens=0)
        expected, _ = model.text(seq.tokens, params, seq.seed % 2**64, len(seq.draft_token_ids))
        assert seq.draft_token_ids == expected, "the drafts differ from the draft model's continuation"
  engine.proposer.run_draft_model = checked_run


@pytest.fixture(autouse=True)
def wide_registers(monkeypatch):
  """Assume AVX-512 registers: the best number of drafts depends on the CPU."""
  monkeypatch.setattr("tinyvllm_extra.speculation.cpu_sums", lambda: 8)


@pytest.fixture
def fake(words_folder, monkeypatch):
  """Makes an engine with a fake device. Returns the engine and its model."""
  def make(drafts=NGRAM, alphabet=range(259, 320), overlaps=False, **options):
    engine = LLM(words_folder, **{**ENGINE, "max_model_len": 512, **options}, speculative_config=drafts)
    engine.runner.is_async, model = overlaps, HashModel([*alphabet])
    engine.device, *_ = [HashDevice(engine, runner, model) for runner in engine.runners]
    check_preemptions(engine)
    return engine, model
  return make


run = functools.partial(run_to_end, limit=5000)


# Random operations

@dataclasses.dataclass
class Job:
  params: SamplingParams
  prompt: list
  texts: list   # by sample: ids, scores, finish_reason, stop_reason
  scores: list   # by prompt token
  aborted: bool = False


def random_job(rng, engine, model, families):
  length = rng.randrange(1, min(30, engine.max_model_len - 2))
  family = rng.choice(families)
  shared = length if rng.random() < 0.5 else rng.randrange(length)
  ids = [*family[:shared], *prompt(length, rng.random())][:length]
  stops = rng.sample(model.alphabet, min(len(model.alphabet), rng.choice([0, 0, 1, 2])))
  options = {"n": rng.choice([1, 1, 1, 2, 3]), "max_tokens": rng.randrange(1, 40), "seed": rng.randrange(-2**62, 2**62),
             "temperature": rng.choice([0.0, 1.0]), "stop_token_ids": stops, "ignore_eos": rng.random() < 0.5,
             "logprobs": rng.choice([None, None, None, 0, 1]), "prompt_logprobs": rng.choice([None] * 7 + [0])}
  options["min_tokens"] = rng.choice([0, 0, rng.randrange(options["max_tokens"] + 1)])
  if rng.random() < 0.1: options["presence_penalty"] = 0.5
  if rng.random() < 0.1: options["logit_bias"] = {rng.choice(model.alphabet): 1.5}
  if rng.random() < 0.1: options["allowed_token_ids"] = rng.sample(model.alphabet, min(len(model.alphabet), 3))
  params = SamplingParams(**options)
  return Job(params, ids, [], model.state_and_scores(ids)[1])


def add_expected(job, engine, model, oracle):
  """Add the expected outputs to the job, and to the oracle with 20 more tokens."""
  params, ids = job.params, job.prompt
  most = min(params.max_tokens, engine.max_model_len - len(ids))
  stops = {*params.stop_token_ids, *(() if params.ignore_eos else engine.model_config.eos_token_ids)}
  for i in range(params.n):
    out, scores = model.text(ids, params, (params.seed + i) % 2**64, most + 20, stops)
    if oracle: oracle.texts.append([*ids, *out])
    end = next((j + 1 for j, token in enumerate(out[:most]) if token in stops), most)
    stopped = out[end - 1] in stops
    job.texts.append((out[:end], scores[:end], "stop" if stopped else "length",
                      out[end - 1] if stopped and out[end - 1] in params.stop_token_ids else None))


def check_output(job, output):
  """Check that the output is a prefix of the expected one, and equal to it once finished."""
  params = job.params
  if params.prompt_logprobs is not None:
    logprobs = [x and x[token].logprob for x, token in zip(output.prompt_logprobs, job.prompt, strict=True)]
    if any(len(c.token_ids) for c in output.outputs): assert logprobs == job.scores
  for completion, (ids, scores, reason, stop) in zip(output.outputs, job.texts, strict=True):
    n = len(completion.token_ids)
    assert completion.token_ids == ids[:n], f"{completion.token_ids} instead of {ids}"
    if params.logprobs is not None:
      logprobs = [x[token].logprob for x, token in zip(completion.logprobs, completion.token_ids, strict=True)]
      assert logprobs == scores[:n], "log probabilities of other tokens"
      assert all((5 in x) == (params.logprobs > 0) or token == 5
                 for x, token in zip(completion.logprobs, completion.token_ids, strict=True))
    if completion.finish_reason == "abort": assert job.aborted
    elif completion.finish_reason:
      assert (n, completion.finish_reason, completion.stop_reason) == (len(ids), reason, stop)
    else: assert n < len(ids), "the request must have finished"


def fuzz(words_folder, monkeypatch, seed, num_samples, drafter="ngram"):
  """Run random requests, aborts and failures on an engine of random size until `num_samples` samples have finished.
  drafter: "ngram", "itself" (the target as draft model) or "other". Return the draft counts and preemptions."""
  rng = random.Random(seed)
  size, k = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 3, 5, 8, 16])
  seqs, overlaps, policy = rng.randrange(1, 7), seed % 2 == 1, ["fcfs", "priority"][seed // 2 % 2]
  drafts = {"method": "ngram", "prompt_lookup_min": 1} if drafter == "ngram" else {"model": words_folder}
  engine = LLM(words_folder, max_model_len=64, block_size=size, max_num_seqs=seqs, dtype="float32",
               max_num_batched_tokens=rng.choice([seqs, 8, 16, 32]), scheduling_policy=policy,
               num_gpu_blocks_override=rng.choice([56, 80, 200]) // size + 1, enable_prefix_caching=seed % 3 > 0,
               speculative_config={**drafts, "num_speculative_tokens": k})
  engine.runner.is_async = overlaps
  alphabet = rng.choice([[2, 300], [2, 261, 262], range(VOCAB), range(VOCAB)])
  model, real_drafter = HashModel([*alphabet]), len(alphabet) < 10
  draft_model = HalfRightModel(model.alphabet) if drafter == "other" else model
  for runner, its_model in zip(engine.runners, (model, draft_model), strict=False):
    HashDevice(engine, runner, its_model)
  check_preemptions(engine)
  if drafter != "ngram": check_drafts(engine, draft_model)
  style, patience = STYLES[rng.choice(["right", "partly wrong", "partly wrong"])], rng.choice([0.5, 1.0])
  oracle = None if real_drafter or drafter != "ngram" else Oracle(monkeypatch, style, seed, patience)
  if rng.random() < 0.7: always_draft(monkeypatch)
  failure_rate = rng.choice([0, 0, 0.02])
  break_steps(engine, monkeypatch, lambda place: rng.random() < failure_rate)
  for runner in engine.runners[1:]:   # steps of a draft model
    launch = runner.launch

    def faulty_launch(step, launch=launch):
      if rng.random() < failure_rate: raise Failed("draft")
      return launch(step)
    runner.launch = faulty_launch
  families, jobs, num_finished, num_tokens, counts = [prompt(40, seed, i) for i in range(3)], {}, 0, 0, Counts(engine)
  for number in itertools.count():
    if num_finished >= num_samples and not jobs: break
    if num_finished < num_samples and len(jobs) < 8 and rng.random() < 0.5:
      name, job = str(number), random_job(rng, engine, model, families)
      add_expected(job, engine, model, oracle)
      priority = rng.randrange(-2, 3) if policy == "priority" else 0
      engine.add_request(name, tokens(job.prompt), job.params, priority)
      jobs[name] = job
    if jobs and rng.random() < 0.01:
      name = rng.choice([*jobs])
      jobs[name].aborted = True
      engine.abort_request(name)
      num_finished += jobs.pop(name).params.n
    outputs = []
    with contextlib.suppress(Failed): outputs = engine.step()
    check_invariants(engine)
    for output in outputs:
      name, job = output.request_id, jobs[output.request_id]
      check_output(job, output)
      if output.finished:
        assert all(c.finish_reason != "abort" for c in output.outputs)
        num_tokens += sum(len(c.token_ids) for c in output.outputs)
        assert output.metrics.num_generated == sum(len(c.token_ids) for c in output.outputs)
        assert output.metrics.num_accepted_tokens <= output.metrics.num_draft_tokens
        num_finished += job.params.n
        if oracle: oracle.texts = [text for text in oracle.texts if text[:len(job.prompt)] != job.prompt or any(
          text[:len(other.prompt)] == other.prompt for other_name, other in jobs.items() if other_name != name)]
        del jobs[name]
    assert number < 400 * num_samples + 2000, "the requests do not finish"
  assert engine.get_metrics()["generation_tokens"] >= num_tokens
  return counts(), counts.preemptions


@pytest.mark.parametrize("seed", [*range(5), *slow(*range(5, 12))])
def test_random_operations_equal_expected_outputs(words_folder, monkeypatch, seed):
  (drafts, _, accepted), _ = fuzz(words_folder, monkeypatch, seed, 100)
  assert drafts > 10 and accepted > 5, "the test must reach this case"


# Counters

@pytest.mark.parametrize("k", [1, 3, 5, 7, 16])
def test_right_drafts_are_all_accepted_and_save_steps(fake, monkeypatch, k):
  engine, model = fake({**NGRAM, "num_speculative_tokens": k}, max_num_batched_tokens=32)
  oracle, count, ids = Oracle(monkeypatch), Counts(engine), prompt(9, k)
  expected, _ = model.text(ids, greedy(200), 0, 200)
  oracle.texts.append([*ids, *expected])
  output, = engine.generate(tokens(ids), greedy(200), False)
  drafts, proposed, accepted = count()
  assert ids_of(output) == expected
  assert accepted == proposed == 200 - count.steps, "a step gives one token and the accepted drafts"
  # More than seven drafts may not save time
  assert -(-200 // (k + 1)) <= count.steps <= 200 // (min(k, 7) + 1) + 6, "drafts soon reach their maximum"
  assert max(oracle.requested_sizes) == k == len(engine.get_metrics()[PER_POSITION])
  assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (proposed, accepted)
  assert drafts == engine.get_metrics()[PER_POSITION][0]


def test_repetitive_text_takes_fewer_steps(fake):
  engine, _ = fake(NGRAM, alphabet=[300])
  count = Counts(engine)
  output, = engine.generate(tokens(prompt(5)), greedy(120), False)
  _, proposed, accepted = count()
  assert ids_of(output) == [300] * 120 and accepted == 120 - count.steps and count.steps < 40
  assert accepted == proposed == output.metrics.num_accepted_tokens


def test_request_metrics_count_drafts_of_all_samples(fake, monkeypatch):
  engine, model = fake()
  oracle, count, params, ids = Oracle(monkeypatch), Counts(engine), sampled(40, seed=3, n=2), prompt(6, "own")
  for i in range(2): oracle.texts.append([*ids, *model.text(ids, params, 3 + i, 40)[0]])
  alone = prompt(7, "own", 1)
  outputs = engine.generate([tokens(ids), tokens(alone)], [params, greedy(40)], False)
  _, proposed, accepted = count()
  metrics = [output.metrics for output in outputs]
  assert sum(m.num_accepted_tokens for m in metrics) == accepted > 40
  assert sum(m.num_draft_tokens for m in metrics) == proposed
  assert metrics[0].num_accepted_tokens >= metrics[0].num_draft_tokens - 4 > 40 > metrics[1].num_draft_tokens
  assert metrics[1].num_accepted_tokens < 3


def test_without_speculative_config_drafts_nothing(fake):
  engine, _ = fake(None, alphabet=[300])
  count = Counts(engine)
  output, = engine.generate(tokens(prompt(5)), greedy(50), False)
  assert count() == (0, 0, 0) and count.steps == 50
  assert output.metrics.num_draft_tokens == output.metrics.num_accepted_tokens == 0


@pytest.mark.parametrize("drafts", [None, NGRAM], ids=["without", "with"])
def test_max_tokens_and_max_model_len_are_never_exceeded(fake, monkeypatch, drafts):
  engine, model = fake(drafts, max_model_len=64)
  oracle = Oracle(monkeypatch)
  for length, n in [(5, n) for n in range(1, 14)] + [(64 - n, 100) for n in range(1, 14)]:
    ids = prompt(length, n, "length")
    expected, _ = model.text(ids, greedy(100), 0, 40)
    oracle.texts = [[*ids, *expected]]
    output, = engine.generate(tokens(ids), greedy(n), False)
    assert ids_of(output) == expected[:min(n, 64 - length)] and output.outputs[0].finish_reason == "length"
    check_invariants(engine)


# Wrong drafts

def test_wrong_drafts_become_rare_but_are_retried(fake, monkeypatch):
  engine, model = fake()
  oracle, count, ids = Oracle(monkeypatch, STYLES["wrong"]), Counts(engine), prompt(9, "wrong")
  expected, _ = model.text(ids, greedy(400), 0, 400)
  oracle.texts.append([*ids, *expected])
  engine.add_request("a", tokens(ids), greedy(400))
  proposed = [0]
  while engine.has_unfinished_requests():
    engine.step()
    proposed.append(count()[1])
  assert len(proposed) == 401 and count()[2] == 0
  assert 0 < proposed[200] <= 60 and proposed[400] - proposed[200] <= 30, "one step in seven at most, after some time"
  assert proposed[400] > proposed[200] or proposed[200] > proposed[100], "drafting is retried"


def test_right_drafts_after_wrong_ones_reach_maximum(fake, monkeypatch):
  engine, model = fake()
  oracle, ids = Oracle(monkeypatch, STYLES["wrong"]), prompt(9, "again")
  expected, _ = model.text(ids, greedy(400), 0, 400)
  oracle.texts.append([*ids, *expected])
  engine.add_request("a", tokens(ids), greedy(400))
  for _ in range(100): engine.step()
  oracle.style, count = STYLES["right"], Counts(engine)
  output = run(engine)["a"]
  assert ids_of(output) == expected and count()[2] > 150 and max(oracle.requested_sizes[-5:]) == 5
  assert count.steps < 64 + 10 + 300 // 6 + 10, "drafting is retried within 64 tokens"


@pytest.mark.parametrize("overlaps", [False, True])
def test_wrong_drafts_in_small_pool_change_no_step(fake, monkeypatch, overlaps):
  """Preemptions equal those without drafts; steps do, too, unless they overlap."""
  results = []
  for drafts in (None, NGRAM):
    engine, model = fake(drafts, num_gpu_blocks_override=13, max_num_seqs=4, max_num_batched_tokens=32,
                         overlaps=overlaps)
    oracle, count = Oracle(monkeypatch, STYLES["wrong"]), Counts(engine)
    jobs = [prompt(5 + i, "tight", i) for i in range(6)]
    expected = [model.text(ids, greedy(30), 0, 30)[0] for ids in jobs]
    oracle.texts += [[*ids, *text] for ids, text in zip(jobs, expected, strict=True)]
    for i, ids in enumerate(jobs): engine.add_request(str(i), tokens(ids), greedy(30))
    last = run(engine)
    assert [ids_of(last[str(i)]) for i in range(6)] == expected
    results.append((count.preemptions, count.steps))
  assert count()[1] > 0 and results[0][0] > 0, "the test must reach this case"
  if not overlaps: assert results[0] == results[1]


@pytest.mark.parametrize("style", ["right", "partly wrong", "wrong"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_in_small_pool_cause_no_preemption(fake, monkeypatch, style, overlaps):
  """The fixture `fake` checks each preemption."""
  for blocks in (10, 13, 17):
    engine, model = fake(num_gpu_blocks_override=blocks, max_model_len=64, overlaps=overlaps)
    oracle, jobs = Oracle(monkeypatch, STYLES[style]), [prompt(3 + 4 * i, "small", i) for i in range(5)]
    expected = [model.text(ids, greedy(60), 0, min(30, engine.max_model_len - len(ids)))[0] for ids in jobs]
    oracle.texts += [[*ids, *text] for ids, text in zip(jobs, expected, strict=True)]
    for i, ids in enumerate(jobs): engine.add_request(str(i), tokens(ids), greedy(30))
    last = run(engine)
    assert [ids_of(last[str(i)]) for i in range(5)] == expected


def test_drafts_without_free_blocks_are_not_proposed(fake, monkeypatch):
  engine, model = fake(num_gpu_blocks_override=11, block_size=4, max_model_len=64)
  oracle, count = Oracle(monkeypatch), Counts(engine)
  ids, other = prompt(19, "a"), prompt(15, "b")
  oracle.texts += [[*x, *model.text(x, greedy(9), 0, 9)[0]] for x in (ids, other)]
  engine.add_request("a", tokens(ids), greedy(2))
  engine.add_request("b", tokens(other), greedy(6))
  while not engine.blocks.num_free() < 2: engine.step()
  assert count()[0] == 0, "9 of 10 blocks are used: a sequence may need the last one"
  run(engine)
  count = Counts(engine)
  engine.generate(tokens(prompt(3, "c")), greedy(1), False)
  oracle.texts.append([*ids, *model.text(ids, greedy(12), 0, 12)[0]])
  engine.generate(tokens(ids), greedy(12), False)
  assert count()[2] > 4


def test_prompts_fill_token_budget_before_drafts(fake, monkeypatch):
  """A long prompt takes what decodes leave of the budget of 16 tokens."""
  engine, model = fake(max_num_batched_tokens=16)
  oracle, ids = Oracle(monkeypatch), prompt(3, "decodes")
  expected, _ = model.text(ids, greedy(60), 0, 60)
  oracle.texts.append([*ids, *expected])
  engine.add_request("a", tokens(ids), greedy(60))
  for _ in range(6): engine.step()
  count, drafting = Counts(engine), engine.scheduler.running[0]
  engine.add_request("b", tokens(prompt(60, "long")), greedy(1))
  for i in range(1, 5):
    engine.step()
    assert count() == (0, 0, 0)
    if i < 4: assert engine.scheduler.running[1].num_computed == 15 * i
  last = run(engine)
  assert ids_of(last["a"]) == expected and count()[0] > 0 and drafting.finish_reason


@pytest.mark.parametrize("style", ["partly wrong", "wrong", "right"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_prefix_cache_after_drafts_is_correct(fake, monkeypatch, style, overlaps):
  engine, model = fake(overlaps=overlaps)
  oracle, ids = Oracle(monkeypatch, STYLES[style]), prompt(6, "found")
  always_draft(monkeypatch)
  expected, _ = model.text(ids, greedy(60), 0, 60)
  oracle.texts.append([*ids, *expected])
  assert ids_of(engine.generate(tokens(ids), greedy(41), False)[0]) == expected[:41]
  for n in (41, 40, 33, 5):
    output, = engine.generate(tokens([*ids, *expected[:n]]), greedy(60 - n), False)
    assert output.num_cached_tokens == (6 + n - 1) // 4 * 4, "all except the last token"
    assert ids_of(output) == expected[n:]


def test_rejected_drafts_in_mixed_step_are_not_cached(fake, monkeypatch):
  """One sequence has only wrong drafts, the other only right ones."""
  engine, model = fake()
  oracle, jobs = Oracle(monkeypatch), [prompt(6, "wrong"), prompt(6, "right")]
  always_draft(monkeypatch)
  expected = [model.text(ids, greedy(40), 0, 40)[0] for ids in jobs]
  wrong, right = ([*ids, *text] for ids, text in zip(jobs, expected, strict=True))
  oracle.texts += [wrong, right]
  propose = oracle.propose
  oracle.propose = lambda ids, n: [*map(other_than, propose(ids, n))] if ids == wrong[:len(ids)] else propose(ids, n)
  for _ in range(2):
    outputs = engine.generate([tokens(ids) for ids in jobs], greedy(40), False)
    assert [ids_of(output) for output in outputs] == expected


@pytest.mark.parametrize("length", [16, 17, 20, 33])
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_after_last_prompt_chunk_are_counted_once_verified(fake, monkeypatch, length, overlaps):
  """Chunks of 16 tokens: when a chunk's results are read, a later step with drafts may be in flight."""
  engine, model = fake(max_num_batched_tokens=16, overlaps=overlaps)
  oracle, ids, count = Oracle(monkeypatch), prompt(length, "chunk", overlaps), Counts(engine)
  expected, _ = model.text(ids, greedy(30), 0, 30)
  oracle.texts.append([*ids, *expected])
  assert ids_of(engine.generate(tokens(ids), greedy(30), False)[0]) == expected
  drafts, proposed, accepted = count()
  assert accepted == proposed == 30 - (count.steps - overlaps - (length - 1) // 16) and drafts < 10


# The engine with a real model

@pytest.fixture(scope="module")
def plain(words_folder):
  engine = LLM(words_folder, **OPTIONS)
  for _ in engine.capture([16], optional=True): pass
  return engine


@pytest.fixture(scope="module")
def drafting(words_folder):
  engine = LLM(words_folder, **OPTIONS, speculative_config=NGRAM | {"prompt_lookup_min": 1})
  for _ in engine.capture([16], optional=True): pass
  return engine


@pytest.fixture(params=["plain", "overlapped"])
def engine(drafting, monkeypatch, request):
  monkeypatch.setattr(drafting.runner, "is_async", request.param == "overlapped")
  yield drafting
  for name in list(drafting.requests): drafting.abort_request(name)   # so that only the failed test fails


def without_stops(params):
  """Return params for the same output without stops and with 8 more tokens."""
  return dataclasses.replace(params, stop=None, stop_token_ids=None, ignore_eos=True, min_tokens=0, logprobs=None,
                             prompt_logprobs=None, max_tokens=params.max_tokens + 8)


def add_outputs(oracle, plain, jobs, params):
  """Add the requests' outputs without drafts to the oracle."""
  for output in plain.generate(jobs, [without_stops(p) for p in params], False):
    oracle.texts += [[*output.prompt_token_ids, *c.token_ids] for c in output.outputs]


def check_same(actual, expected):
  """Check that outputs are equal: ids, text, finish reasons and log probabilities."""
  assert_same_outputs(actual, expected)
  for a, b in zip(actual, expected, strict=True):
    assert len(a.outputs) == len(b.outputs)
    scores = [(a.prompt_logprobs, b.prompt_logprobs)]
    for x, y in zip(a.outputs, b.outputs, strict=True):
      assert (x.index, x.token_ids, x.text, x.finish_reason, x.stop_reason) == (
        y.index, y.token_ids, y.text, y.finish_reason, y.stop_reason)
      assert x.cumulative_logprob == pytest.approx(y.cumulative_logprob, abs=1e-3)
      scores.append((x.logprobs, y.logprobs))
    for mine, other in scores:
      assert (mine is None) == (other is None)
      for p, q in zip(mine or [], other or [], strict=True):
        assert (p is None) == (q is None) and [*(p or ())] == [*(q or ())]
        for i in p or ():
          assert p[i].logprob == pytest.approx(q[i].logprob, abs=1e-4)
          assert (p[i].rank, p[i].decoded_token) == (q[i].rank, q[i].decoded_token)


CASES = {
  "greedy": {"temperature": 0.0}, "temperature": {}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.7},
  "min_p": {"min_p": 0.1}, "all": {"top_k": 30, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
  "n": {"n": 3}, "logprobs": {"logprobs": 3}, "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 0, "n": 2},
  "logit_bias": {"logit_bias": {270: 3.0, 280: -100.0, 290: 2.5}},
  "allowed_token_ids": {"allowed_token_ids": [260, 270, 280], "logprobs": 1},
  "min_tokens": {"min_tokens": 20, "ignore_eos": False, "stop_token_ids": [*range(262, 300)]},
  "eos": {"ignore_eos": False, "logit_bias": {2: 4.0}}, "max_tokens": {"max_tokens": 3},
  "seed": {"seed": -2**63}, "no seed": {"seed": None, "temperature": 0.0},
  # Logits that depend on earlier tokens: no drafts
  "repetition_penalty": {"repetition_penalty": 1.3}, "presence_penalty": {"presence_penalty": 0.5},
  "frequency_penalty": {"frequency_penalty": -0.5, "temperature": 0.0}, "bad_words": {"bad_words": ["the", "a cat"]},
  "structured_outputs": {"structured_outputs": {"regex": "[a-z ]{30}"}, "ignore_eos": False},
}
NO_DRAFTS = ["repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "structured_outputs"]


@pytest.mark.parametrize("engine", ["overlapped", *slow("plain")], indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_outputs_with_drafts_equal_outputs_without(plain, engine, monkeypatch, case):
  params = [sampled(24, **{"seed": i, **CASES[case]}) for i in range(3)]
  jobs = [tokens(prompt(5 + 6 * i, case, i)) for i in range(3)]
  expected = plain.generate(jobs, params, False)
  count = Counts(engine)
  outputs = engine.generate(jobs, params, False)   # n-grams that repeat by chance
  check_same(outputs, expected)
  oracle = Oracle(monkeypatch, STYLES["partly wrong"])
  if case not in NO_DRAFTS: add_outputs(oracle, plain, jobs, params)
  check_same(engine.generate(jobs, params, False), expected)
  for style in ("right", "partly wrong"):
    oracle.style = STYLES[style]
    for job, p, output in zip(jobs, params, expected, strict=True):
      check_same(engine.generate([job], [p], False), [output])
  assert (count()[2] > 0) == (case not in NO_DRAFTS) and (count()[0] > 0) == (case not in NO_DRAFTS)
  check_invariants(engine)


def test_stop_string_within_drafts_ends_text(plain, engine, monkeypatch):
  ids, whole = prompt(7, "stops"), sampled(24, seed=4, top_k=3)
  text = plain.generate(tokens(ids), whole, False)[0].outputs[0].text
  params = [dataclasses.replace(whole, stop=[text[i:i + 1 + i % 4], "#"], include_stop_str_in_output=i % 2 == 0,
                                min_tokens=i % 3 * 4, logprobs=1) for i in range(2, len(text) - 4, 2)]
  assert len(params) > 10
  oracle, count, jobs = Oracle(monkeypatch), Counts(engine), [tokens(ids)] * len(params)
  add_outputs(oracle, plain, jobs[:1], [whole])
  expected = plain.generate(jobs, params, False)
  check_same(engine.generate(jobs, params, False), expected)
  for job, p, output in zip(jobs, params, expected, strict=True):
    check_same(engine.generate([job], [p], False), [output])
  assert sum(o.outputs[0].finish_reason == "stop" for o in expected) > 7 and count()[2] > 30
  assert len({len(ids_of(o)) for o in expected}) > 6, "they must end at many positions"
  assert engine.blocks.num_used() == 0


def test_stop_token_within_drafts_ends_text(plain, engine, monkeypatch):
  ids, whole = prompt(7, "stop ids"), sampled(24, seed=5)
  output_ids = ids_of(plain.generate(tokens(ids), whole, False)[0])
  params = [dataclasses.replace(whole, stop_token_ids=[token], min_tokens=i % 3 * 5)
            for i, token in enumerate(output_ids)]
  oracle, count, jobs = Oracle(monkeypatch), Counts(engine), [tokens(ids)] * len(params)
  add_outputs(oracle, plain, jobs[:1], [whole])
  expected = plain.generate(jobs, params, False)
  for job, p, output in zip(jobs, params, expected, strict=True):
    check_same(engine.generate([job], [p], False), [output])
  assert sum(o.outputs[0].finish_reason == "stop" for o in expected) > 15 and count()[2] > 40
  count = Counts(engine)
  for p in params[::3]: engine.generate(jobs[:1], p, False)
  assert count()[1] == count()[2] > 20, "drafts after the end are not counted"


def test_stream_delivers_accepted_drafts_together(plain, engine, monkeypatch):
  ids, params = prompt(9, "stream"), sampled(40, seed=2, logprobs=0)
  oracle = Oracle(monkeypatch)
  add_outputs(oracle, plain, [tokens(ids)], [params])
  expected, = plain.generate(tokens(ids), params, False)
  pieces = [output.outputs[0] for output in engine.generate_stream(tokens(ids), params)]
  assert "".join(piece.text for piece in pieces) == expected.outputs[0].text
  assert [token for piece in pieces for token in piece.token_ids] == ids_of(expected)
  assert [len(piece.logprobs) for piece in pieces] == [len(piece.token_ids) for piece in pieces]
  assert len(pieces) < 20 and max(len(piece.token_ids) for piece in pieces) == 6
  assert pieces[-1].finish_reason == "length"


@pytest.mark.parametrize("place", PLACES)
def test_failed_step_with_drafts_loses_and_repeats_no_token(engine, words_folder, monkeypatch, place):
  always_draft(monkeypatch)
  for number, style in itertools.product(range(1, 6), ("right", "partly wrong")):
    oracle, last, failures = Oracle(monkeypatch, STYLES[style]), {}, 0
    jobs = {name: prompt(length, "fails", name) for name, length in (("a", 3), ("b", 20), ("c", 6))}
    expected = {name: reference_greedy(words_folder, ids, 16) for name, ids in jobs.items()}
    oracle.texts += [[*ids, *expected[name]] for name, ids in jobs.items()]
    engine.blocks.cached_blocks.clear()
    engine.blocks.reset()
    for name, ids in jobs.items(): engine.add_request(name, tokens(ids), greedy(14, logprobs=0))
    with monkeypatch.context() as patch:
      break_steps(engine, patch, fail_once(place, number))
      for _ in range(200):
        if not engine.has_unfinished_requests(): break
        try: last |= {output.request_id: output for output in engine.step()}
        except Failed: failures += 1
        check_invariants(engine)
    assert failures == 1, f"{place} {number} must fail"
    assert {name: ids_of(output) for name, output in last.items()} == {name: x[:14] for name, x in expected.items()}
    assert all(len(output.outputs[0].logprobs) == 14 for output in last.values())
    again = engine.generate([tokens(ids) for ids in jobs.values()], greedy(14, logprobs=0), False)
    check_same(again, [last[name] for name in jobs])


# Options

@pytest.mark.parametrize("config, parts", [
  ({**NGRAM, "num_speculative_token": 3}, ["num_speculative_token'", "num_speculative_tokens"]),
  ({**NGRAM, "method": "eagle"}, ["method='eagle'", "ngram"]),
  ({**NGRAM, "num_speculative_tokens": 0}, ["num_speculative_tokens=0", "1", "16"]),
  ({**NGRAM, "num_speculative_tokens": 17}, ["num_speculative_tokens=17", "1", "16"]),
  ({**NGRAM, "num_speculative_tokens": "5"}, ["num_speculative_tokens='5'", "int"]),
  ({**NGRAM, "num_speculative_tokens": True}, ["num_speculative_tokens=True", "int"]),
  ({"method": "ngram"}, ["num_speculative_tokens", "missing"]),
  ({**NGRAM, "prompt_lookup_min": 5}, ["prompt_lookup_min=5", "prompt_lookup_max=4"]),
  ({**NGRAM, "prompt_lookup_min": 0}, ["prompt_lookup_min=0", "1"]),
  ({**NGRAM, "prompt_lookup_max": -1}, ["prompt_lookup_max=-1", "1"]),
  ({"num_speculative_tokens": 5}, ["method", "model", "ngram"]),
  ({"num_speculative_tokens": 5, "method": "draft_model"}, ["method='draft_model'", "model"]),
  ({}, ["num_speculative_tokens"]),
  ([("method", "ngram")], ["speculative_config", "dict"]), ("ngram", ["speculative_config='ngram'", "dict"]),
  (5, ["speculative_config=5", "dict"]), (True, ["speculative_config=True", "dict"]),
])
def test_invalid_config_raises_with_remedy(words_folder, config, parts):
  with pytest.raises(ValueError) as error: LLM(words_folder, **ENGINE, speculative_config=config)
  assert all(x in str(error.value) for x in parts), str(error.value)


@pytest.mark.parametrize("config", [
  None, {"method": "ngram", "num_speculative_tokens": 1}, {"method": "ngram", "num_speculative_tokens": 16},
  {**NGRAM, "prompt_lookup_min": 4}])
def test_valid_config_is_accepted(words_folder, config): LLM(words_folder, **ENGINE, speculative_config=config)


SMALL = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4}


def test_command_line_takes_json_config(words_folder, plain, capsys):
  command = ["generate", "the cat", "--model", str(words_folder), *flags(**SMALL), "--max-tokens", "12"]
  assert main(command) == 0
  expected = capsys.readouterr().out
  assert main([*command, "--speculative-config", json.dumps(NGRAM)]) == 0
  assert capsys.readouterr().out == expected
  assert main([*command, "--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}']) == 1
  assert "method='eagle'" in capsys.readouterr().err


@pytest.mark.slow
def test_server_metrics_count_drafts(words_folder):
  with LocalServer(words_folder, *flags(**SMALL), "--speculative-config", json.dumps(NGRAM)) as server:
    help_texts = dict(re.findall(r"^# HELP tinyvllm:(\w+) (.*)$", server.get("/metrics").text, re.M))
    before = server.metrics()
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 60, "logit_bias": {"300": 100}, "ignore_eos": True}
    assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 60
    metrics = server.metrics()
    names = ["drafts_total", "draft_tokens_total", "accepted_tokens_total"]
    drafts, proposed, accepted = (metrics["spec_decode_num_" + name] for name in names)
    assert [before["spec_decode_num_" + name] for name in names] == [0, 0, 0]
    assert 10 <= drafts <= proposed and 30 < accepted <= proposed
    per_position = {name: x for name, x in metrics.items() if "per_pos" in name}
    assert metrics["spec_decode_num_accepted_tokens_per_pos_total{position=0}"] == max(per_position.values()) <= drafts
    assert sum(per_position.values()) == accepted
    assert {"spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos"} <= {
      name.removesuffix("_total") for name in help_texts}
    assert server.stop() == 0


# Draft models

@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
  """A smaller model with the same vocabulary."""
  return tiny_model(tmp_path_factory.mktemp("other"), seed=7, words=True, num_hidden_layers=1, hidden_size=16)


@pytest.fixture(scope="module")
def own_draft_llm(words_folder):
  """An engine whose draft model is the target model."""
  engine = LLM(words_folder, **OPTIONS, speculative_config={"model": str(words_folder), "num_speculative_tokens": 3})
  for _ in engine.capture([16], optional=True): pass
  return engine


@pytest.fixture(scope="module")
def other_draft_llm(words_folder, other_folder):
  """An engine whose draft model is another, smaller model."""
  engine = LLM(words_folder, **OPTIONS, speculative_config={"model": other_folder, "num_speculative_tokens": 3})
  for _ in engine.capture([16], optional=True): pass
  return engine


class TestDraftModel:
  @pytest.mark.parametrize("case", [case for case in CASES if case not in NO_DRAFTS and case != "n"] + ["n"])
  def test_own_draft_model_is_always_accepted(self, plain, own_draft_llm, case):
    params = [sampled(24, **{"seed": i, **CASES[case]}) for i in range(3)]
    jobs = [tokens(prompt(5 + 6 * i, case, i)) for i in range(3)]
    count, expected = Counts(own_draft_llm), plain.generate(jobs, params, False)
    check_same(own_draft_llm.generate(jobs, params, False), expected)
    for job, p, output in zip(jobs, params, expected, strict=True):
      check_same(own_draft_llm.generate([job], [p], False), [output])
    _, proposed, accepted = count()
    assert accepted == proposed and (proposed > 50 or params[0].max_tokens == 3 or not params[0].ignore_eos)
    check_invariants(own_draft_llm)

  @pytest.mark.parametrize("case", CASES)
  def test_other_draft_model_gives_equal_outputs(self, plain, other_draft_llm, case):
    params = [sampled(24, **{"seed": i, **CASES[case]}) for i in range(3)]
    jobs = [tokens(prompt(5 + 6 * i, case, i)) for i in range(3)]
    count, expected = Counts(other_draft_llm), plain.generate(jobs, params, False)
    check_same(other_draft_llm.generate(jobs, params, False), expected)
    for job, p, output in zip(jobs, params, expected, strict=True):
      check_same(other_draft_llm.generate([job], [p], False), [output])
    assert (count()[1] > 0) == (case not in NO_DRAFTS)
    check_invariants(other_draft_llm)

  @pytest.mark.parametrize("seed", [20, 21, *slow(22, 23, 24, 25)])
  @pytest.mark.parametrize("drafter", ["itself", "other"])
  def test_random_operations_with_draft_model_equal_expected_outputs(self, words_folder, monkeypatch, drafter, seed):
    (_, proposed, accepted), _ = fuzz(words_folder, monkeypatch, seed, 80, drafter)
    assert accepted > 20 and (accepted == proposed) == (drafter == "itself")

  @pytest.mark.parametrize("overlaps", [False, True])
  def test_draft_model_saves_steps(self, fake, words_folder, overlaps):
    engine, model = fake({"model": words_folder, "num_speculative_tokens": 3}, overlaps=overlaps)
    count, ids = Counts(engine), prompt(9, "steps")
    expected, _ = model.text(ids, greedy(120), 0, 120)
    assert ids_of(engine.generate(tokens(ids), greedy(120), False)[0]) == expected
    assert count()[1] == count()[2] >= 75 and (overlaps or count.steps == 120 - count()[2])

  @pytest.mark.slow
  @pytest.mark.parametrize("seed", range(200, 204))
  @pytest.mark.parametrize("drafter", ["itself", "other"])
  def test_thousands_of_random_outputs_with_draft_model_equal_expected(self, words_folder, monkeypatch, drafter, seed):
    (_, proposed, accepted), _ = fuzz(words_folder, monkeypatch, seed, 200, drafter)
    assert accepted == proposed or drafter == "other"

  def test_own_draft_model_after_prefix_cache_hit_is_accepted(self, plain, own_draft_llm):
    ids, count = prompt(30, "twins' cache"), Counts(own_draft_llm)
    expected, = plain.generate(tokens(ids), greedy(50), False)
    for n in (0, 3, 17, 30):
      output, = own_draft_llm.generate(tokens([*ids, *ids_of(expected)[:n]]), greedy(50 - n), False)
      assert ids_of(output) == ids_of(expected)[n:] and (n == 0 or output.num_cached_tokens >= 28)
    assert count()[1] == count()[2] > 80

  def test_own_draft_model_with_chunks_and_aborts_is_accepted(self, plain, own_draft_llm):
    rng, count = random.Random(0), Counts(own_draft_llm)
    jobs = [tokens(prompt([3, 50, 7, 41, 1][i % 5], "twins", i // 2)) for i in range(20)]
    params = [[greedy(30), sampled(20, seed=i), sampled(25, n=2, seed=i)][i % 3] for i in range(20)]
    expected, waiting, last = plain.generate(jobs, params, False), [*range(20)], {}
    while waiting or own_draft_llm.has_unfinished_requests():
      if waiting and rng.random() < 0.5:
        i = waiting.pop()
        own_draft_llm.add_request(str(i), jobs[i], params[i])
      if rng.random() < 0.05 and own_draft_llm.requests:
        name = rng.choice([*own_draft_llm.requests])
        own_draft_llm.abort_request(name)
        waiting.append(int(name))
      last |= {output.request_id: output for output in own_draft_llm.step()}
      check_invariants(own_draft_llm)
    check_same([last[str(i)] for i in range(20)], expected)
    assert count()[1] == count()[2] > 100

  def test_own_draft_model_after_preemptions_and_failures_is_accepted(self, plain, words_folder, monkeypatch):
    engine = LLM(words_folder, **ENGINE, num_gpu_blocks_override=13,
                 speculative_config={"model": words_folder, "num_speculative_tokens": 3})
    count, jobs = Counts(engine), [prompt(3 + 3 * i, "twins", "small", i) for i in range(5)]
    expected = [ids_of(o) for o in plain.generate([tokens(ids) for ids in jobs], greedy(28), False)]
    for place, number in (("never", 1), ("launch", 6), ("read", 9), ("amid update", 12)):
      engine.blocks.cached_blocks.clear()
      engine.blocks.reset()
      for i, ids in enumerate(jobs): engine.add_request(str(i), tokens(ids), greedy(28))
      last = {}
      with monkeypatch.context() as patch:
        break_steps(engine, patch, fail_once(place, number))
        while engine.has_unfinished_requests():
          with contextlib.suppress(Failed): last |= {output.request_id: output for output in engine.step()}
          check_invariants(engine)
      assert [ids_of(last[str(i)]) for i in range(5)] == expected
    assert count()[1] == count()[2] > 50 and count.preemptions > 0

  def test_quantized_draft_model_is_mostly_accepted(self, plain, words_folder):
    config = {"method": "draft_model", "model": str(words_folder), "num_speculative_tokens": 2, "quantization": "int8"}
    engine, jobs = LLM(words_folder, **ENGINE, speculative_config=config), [tokens(prompt(9, "int8"))]
    count = Counts(engine)
    assert_same_outputs(engine.generate(jobs, greedy(30), False), plain.generate(jobs, greedy(30), False))
    assert count()[1] >= count()[2] > 10, "int8 weights are nearly the same"

  @pytest.mark.parametrize("config, parts", [
    ({"model": "/nowhere"}, ["/nowhere"]), ({"method": "ngram", "model": "words"}, ["method='ngram'", "model"]),
    ({"model": "words", "quantization": "int5"}, ["quantization='int5'", "int8"]), ({"model": 5}, ["model=5"]),
  ])
  def test_invalid_draft_model_config_raises(self, words_folder, config, parts):
    config = {"num_speculative_tokens": 2, **config}
    if config["model"] == "words": config["model"] = str(words_folder)
    with pytest.raises(ValueError) as error: LLM(words_folder, **ENGINE, speculative_config=config)
    assert all(x in str(error.value) for x in parts), str(error.value)

  @pytest.mark.parametrize("config, name", [
    ({"method": "ngram", "quantization": "int8"}, "quantization='int8'"),
    ({"model": "words", "prompt_lookup_max": 3}, "prompt_lookup_max=3")])
  def test_option_without_effect_raises(self, words_folder, config, name):
    with pytest.raises(ValueError, match=f"{name} has no effect"):
      LLM(words_folder, **ENGINE, speculative_config={"num_speculative_tokens": 2, **config})

  def test_draft_statistics_of_server_log(self):
    assert draft_statistics({"steps": 5}) == draft_statistics({"spec_decode_num_draft_tokens": 0}) == ""
    metrics = {"spec_decode_num_drafts": 4, "spec_decode_num_draft_tokens": 20, "spec_decode_num_accepted_tokens": 15}
    assert draft_statistics(metrics) == ", Draft acceptance rate: 75.0%, Mean acceptance length: 4.75"

  def test_draft_model_with_other_vocab_size_raises(self, words_folder, tmp_path):
    folder = tiny_model(tmp_path, vocab_size=333, tokenizer=False)
    with pytest.raises(ValueError, match="vocab_size") as e:
      LLM(words_folder, **ENGINE, speculative_config={"model": folder, "num_speculative_tokens": 2})
    assert "333" in str(e.value) and "320" in str(e.value)

  def test_draft_model_with_other_vocabulary_raises(self, words_folder, tmp_path):
    folder = tiny_model(tmp_path, words=True)
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(["zebra quilts jump vex", "pyx fjord waltz bog", "sphinx of black quartz judge my vow",
                              "how vexingly quick daft zebras jump", "pack my box with five dozen liquor jugs"]),
      model_prefix=str(tmp_path / "tokenizer"), vocab_size=VOCAB, model_type="bpe", byte_fallback=True,
      character_coverage=1.0, hard_vocab_limit=False, num_threads=1, minloglevel=2)
    with pytest.raises(ValueError, match="another vocabulary"):
      LLM(words_folder, **ENGINE, speculative_config={"model": folder, "num_speculative_tokens": 2})

  def test_draft_model_without_memory_raises(self, words_folder, monkeypatch):
    free = 300_000   # bytes: enough for one of the two models
    monkeypatch.setattr("tinyvllm_extra.kernels.FastBackend.free_memory", lambda backend, device: free)
    LLM(words_folder, **ENGINE)
    with pytest.raises(ValueError) as e:
      LLM(words_folder, **ENGINE, speculative_config={"model": words_folder, "num_speculative_tokens": 2})
    assert "speculative_config" in str(e.value) or "draft" in str(e.value)
    assert any(x in str(e.value) for x in ("raise", "lower", "smaller", "free"))
