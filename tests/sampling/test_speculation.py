"""Speculative decoding: outputs equal those without drafts, whatever proposes them, and drafts delay no other request.
A fake model hashes a step's inputs and the content of its blocks into the next tokens: one wrong token, position or
block table changes the output."""
import dataclasses
import itertools
import random
from types import SimpleNamespace

import pytest
from helpers.engines import (ENGINE, assert_all_blocks_freed, check_invariants, greedy, ids_of, prompt, run_to_end,
                             sampled, tokens)
from helpers.faults import Failed, add_fault, break_steps, step
from helpers.hash_model import HalfRightModel, HashDevice, HashModel
from helpers.models import VOCAB, tiny_model
from helpers.parameters import slow
from helpers.speculation import (CASES, NGRAM, NO_DRAFTS, PER_POSITION, Counts, Oracle, add_outputs, always_draft,
                                 check_equal_to_plain, check_preemptions)

from tinyvllm import LLM, SamplingParams

# Counters

@pytest.mark.parametrize("k", [1, 3, 5, 7, 16])
def test_right_drafts_are_all_accepted_and_save_steps(fake, k):
  engine, oracle, count = fake({**NGRAM, "num_speculative_tokens": k}, max_num_batched_tokens=32)
  ids = prompt(9, k)
  expected = oracle.expect(ids, 200)
  output, = engine.generate(tokens(ids), greedy(200), False)
  (drafts, proposed, accepted), per_position = count(), engine.get_metrics()[PER_POSITION]
  assert ids_of(output) == expected
  assert accepted == proposed == 200 - count.steps, "a step gives one token and the accepted drafts"
  # More than seven drafts may not save time
  assert -(-200 // (k + 1)) <= count.steps <= 200 // (min(k, 7) + 1) + 6, "drafts soon reach their maximum"
  assert max(oracle.requested_sizes) == k == len(per_position) and drafts == per_position[0]
  assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (proposed, accepted)


def test_request_metrics_count_drafts_of_all_samples(fake):
  engine, oracle, count = fake()
  params, ids = sampled(40, seed=3, n=2), prompt(6, "own")
  oracle.texts = [[*ids, *oracle.model.text(ids, params, 3 + i, 40)[0]] for i in range(2)]
  outputs = engine.generate([tokens(ids), tokens(prompt(7, "own", 1))], [params, greedy(40)], False)
  _, proposed, accepted = count()
  metrics = [output.metrics for output in outputs]
  assert sum(m.num_accepted_tokens for m in metrics) == accepted > 40
  assert sum(m.num_draft_tokens for m in metrics) == proposed
  assert metrics[0].num_accepted_tokens >= metrics[0].num_draft_tokens - 4 > 40 > metrics[1].num_draft_tokens
  assert metrics[1].num_accepted_tokens < 3


# Wrong drafts

def test_wrong_drafts_become_rare_but_are_retried(fake):
  engine, oracle, count = fake(style="wrong")
  ids, proposed = prompt(9, "wrong"), [0]
  expected = oracle.expect(ids, 500)
  engine.add_request("a", tokens(ids), greedy(500))
  for _ in range(300):
    engine.step()
    proposed.append(count()[1])
  assert 0 < proposed[200] <= 60 and count()[2] == 0
  assert 0 < proposed[300] - proposed[100] <= 30, "one step in seven at most, after some time"
  oracle.style, count = "right", Counts(engine)
  assert ids_of(run_to_end(engine, 5000)["a"]) == expected
  assert count()[2] > 80 and max(oracle.requested_sizes[-5:]) == 5
  assert count.steps < 64 + 10 + 130 // 6 + 10, "drafting is retried within 64 tokens"


def test_prompts_fill_token_budget_before_drafts(fake):
  """A long prompt takes what decodes leave of the budget of 16 tokens."""
  engine, oracle, _ = fake(max_num_batched_tokens=16)
  ids = prompt(3, "decodes")
  expected = oracle.expect(ids, 60)
  engine.add_request("a", tokens(ids), greedy(60))
  for _ in range(6): engine.step()
  count = Counts(engine)
  engine.add_request("b", tokens(prompt(60, "long")), greedy(1))
  for i in range(1, 5):
    engine.step()
    assert count() == (0, 0, 0)
    if i < 4: assert engine.scheduler.running[1].num_computed == 15 * i
  assert ids_of(run_to_end(engine, 5000)["a"]) == expected and count()[0] > 0


@pytest.mark.parametrize("length", [16, 17, 20, 33])
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_after_last_prompt_chunk_are_counted_once_verified(fake, length, overlaps):
  """Chunks of 16 tokens: when a chunk's results are read, a later step with drafts may be in flight."""
  engine, oracle, count = fake(max_num_batched_tokens=16, overlaps=overlaps)
  ids = prompt(length, "chunk", overlaps)
  assert oracle.expect(ids, 30) == ids_of(engine.generate(tokens(ids), greedy(30), False)[0])
  drafts, proposed, accepted = count()
  assert accepted == proposed == 30 - (count.steps - overlaps - (length - 1) // 16) and drafts < 10


# Random requests, aborts and failures

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


def random_job(rng, engine, model, families):
  """Return a request with its expected result. samples: ids, scores, finish_reason and stop_reason of each. texts: the
  prompt and each sample's ids, 20 more than requested. scores: of the prompt's tokens."""
  length = rng.randrange(1, min(30, engine.max_model_len - 2))
  family = rng.choice(families)
  shared = length if rng.random() < 0.5 else rng.randrange(length)
  ids = [*family[:shared], *prompt(length, rng.random())][:length]
  stop_ids = rng.sample(model.alphabet, min(len(model.alphabet), rng.choice([0, 0, 1, 2])))
  options = {"n": rng.choice([1, 1, 1, 2, 3]), "max_tokens": rng.randrange(1, 40), "seed": rng.randrange(-2**62, 2**62),
             "temperature": rng.choice([0.0, 1.0]), "stop_token_ids": stop_ids, "ignore_eos": rng.random() < 0.5,
             "logprobs": rng.choice([None, None, None, 0, 1]), "prompt_logprobs": rng.choice([None] * 7 + [0])}
  options["min_tokens"] = rng.choice([0, 0, rng.randrange(options["max_tokens"] + 1)])
  if rng.random() < 0.1: options["presence_penalty"] = 0.5
  if rng.random() < 0.1: options["logit_bias"] = {rng.choice(model.alphabet): 1.5}
  if rng.random() < 0.1: options["allowed_token_ids"] = rng.sample(model.alphabet, min(len(model.alphabet), 3))
  params = SamplingParams(**options)
  job = SimpleNamespace(params=params, ids=ids, samples=[], texts=[], scores=model.state_and_scores(ids)[1])
  most = min(params.max_tokens, engine.max_model_len - length)
  ends = {*stop_ids, *(() if params.ignore_eos else engine.model_config.eos_token_ids)}
  for i in range(params.n):
    out, scores = model.text(ids, params, (params.seed + i) % 2**64, most + 20, ends)
    end = next((j + 1 for j, token in enumerate(out[:most]) if token in ends), most)
    last = out[end - 1]
    job.texts.append([*ids, *out])
    reason, stop_reason = "stop" if last in ends else "length", last if last in stop_ids else None
    job.samples.append((out[:end], scores[:end], reason, stop_reason))
  return job


def check_output(job, output):
  """Check that the output is a prefix of the expected one, and equal to it once finished."""
  params, completions = job.params, output.outputs
  if params.prompt_logprobs is not None and any(c.token_ids for c in completions):
    assert [x and x[i].logprob for x, i in zip(output.prompt_logprobs, job.ids, strict=True)] == job.scores
  for completion, (ids, scores, reason, stop_reason) in zip(completions, job.samples, strict=True):
    n = len(completion.token_ids)
    assert completion.token_ids == ids[:n], f"{completion.token_ids} instead of {ids}"
    if params.logprobs is not None:
      assert [x[i].logprob for x, i in zip(completion.logprobs, ids[:n], strict=True)] == scores[:n]
      assert all((5 in x) == (params.logprobs > 0 or i == 5) for x, i in zip(completion.logprobs, ids[:n], strict=True))
    expected = (len(ids), reason, stop_reason) if completion.finish_reason else (min(n, len(ids) - 1), None, None)
    assert (n, completion.finish_reason, completion.stop_reason) == expected
  if output.finished:
    assert output.metrics.num_generated == sum(len(c.token_ids) for c in completions)
    assert output.metrics.num_accepted_tokens <= output.metrics.num_draft_tokens


def fuzz(words_folder, monkeypatch, seed, num_samples, drafter="ngram"):
  """Run random requests, aborts and failures on an engine of random size until `num_samples` samples have finished.
  drafter: "ngram", "itself" (the target as draft model) or "other". Return the draft counts."""
  rng = random.Random(seed)
  size, k = rng.choice([1, 2, 4, 8]), rng.choice([1, 2, 3, 5, 8, 16])
  seqs, policy = rng.randrange(1, 7), ["fcfs", "priority"][seed // 2 % 2]
  drafts = {"method": "ngram", "prompt_lookup_min": 1} if drafter == "ngram" else {"model": words_folder}
  engine = LLM(words_folder, max_model_len=64, block_size=size, max_num_seqs=seqs, dtype="float32",
               max_num_batched_tokens=rng.choice([seqs, 8, 16, 32]), scheduling_policy=policy,
               num_gpu_blocks_override=rng.choice([56, 80, 200]) // size + 1, enable_prefix_caching=seed % 3 > 0,
               speculative_config={**drafts, "num_speculative_tokens": k})
  engine.runner.is_async = seed % 2 == 1
  alphabet = rng.choice([[2, 300], [2, 261, 262], range(VOCAB), range(VOCAB)])
  model = HashModel([*alphabet])
  draft_model = HalfRightModel(model.alphabet) if drafter == "other" else model
  for runner, its_model in zip(engine.runners, (model, draft_model), strict=False):
    HashDevice(engine, runner, its_model)
  check_preemptions(engine)
  if drafter != "ngram": check_drafts(engine, draft_model)
  style, patience = rng.choice(["right", "partly wrong", "partly wrong"]), rng.choice([0.5, 1.0])
  has_oracle = drafter == "ngram" and len(alphabet) > 10   # in other texts n-grams repeat
  oracle = Oracle(monkeypatch, style, seed, patience) if has_oracle else SimpleNamespace()
  if rng.random() < 0.7: always_draft(monkeypatch)
  failure_rate = rng.choice([0, 0, 0.02])
  break_steps(engine, monkeypatch, lambda place: rng.random() < failure_rate)
  for runner in engine.runners[1:]:   # steps of a draft model
    add_fault(monkeypatch, runner, "launch", Failed("draft"), lambda step: rng.random() < failure_rate)
  families, jobs, num_finished, counts = [prompt(40, seed, i) for i in range(3)], {}, 0, Counts(engine)
  for number in itertools.count():
    if num_finished >= num_samples and not jobs: return counts()
    if num_finished < num_samples and len(jobs) < 8 and rng.random() < 0.5:
      job = jobs[str(number)] = random_job(rng, engine, model, families)
      priority = rng.randrange(-2, 3) if policy == "priority" else 0
      engine.add_request(str(number), tokens(job.ids), job.params, priority)
    if jobs and rng.random() < 0.01:
      name = rng.choice([*jobs])
      engine.abort_request(name)
      num_finished += jobs.pop(name).params.n
    oracle.texts, outputs = [text for job in jobs.values() for text in job.texts], {}
    step(engine, outputs)
    for name, output in outputs.items():
      check_output(jobs[name], output)
      if output.finished: num_finished += jobs.pop(name).params.n
    assert number < 400 * num_samples + 2000, "the requests do not finish"


@pytest.mark.parametrize("seed", [*range(5), *slow(*range(5, 12))])
def test_random_operations_equal_expected_outputs(words_folder, monkeypatch, seed):
  drafts, _, accepted = fuzz(words_folder, monkeypatch, seed, 100)
  assert drafts > 10 and accepted > 5, "the test must reach this case"


@pytest.mark.parametrize("seed", [20, 21, *slow(22, 23, 24, 25)])
@pytest.mark.parametrize("drafter", ["itself", "other"])
def test_random_operations_with_draft_model_equal_expected_outputs(words_folder, monkeypatch, drafter, seed):
  _, proposed, accepted = fuzz(words_folder, monkeypatch, seed, 80, drafter)
  assert accepted > 20 and (accepted == proposed) == (drafter == "itself")


# Engines with draft models: outputs equal those without drafts, for each field and each source of drafts

@pytest.fixture(scope="module")
def engines(words_folder, tmp_path_factory):
  """By source of drafts: n-grams, the target as draft model, or a smaller model with the same vocabulary."""
  small = tiny_model(tmp_path_factory.mktemp("small"), seed=7, words=True, num_hidden_layers=1, hidden_size=16)
  configs = {"n-grams": NGRAM | {"prompt_lookup_min": 1}, "own model": {"model": words_folder},
             "small model": {"model": small}}
  options = {**ENGINE, "max_num_seqs": 16}
  return {name: LLM(words_folder, **options, speculative_config={"num_speculative_tokens": 3, **config})
          for name, config in configs.items()}


@pytest.fixture(params=["plain", "overlapped"])
def engine(engines, monkeypatch, request):
  engine = engines["n-grams"]
  monkeypatch.setattr(engine.runner, "is_async", request.param == "overlapped")
  with assert_all_blocks_freed(engine): yield engine


@pytest.mark.parametrize("source, overlaps", [("n-grams", True), *slow(("n-grams", False)), ("own model", False),
                                              ("small model", False)])
@pytest.mark.parametrize("case", CASES)
def test_outputs_with_drafts_equal_outputs_without(plain, engines, monkeypatch, source, overlaps, case):
  engine = engines[source]
  monkeypatch.setattr(engine.runner, "is_async", overlaps)
  params = [sampled(24, **{"seed": i, **CASES[case]}) for i in range(3)]
  jobs, count = [tokens(prompt(5 + 6 * i, case, i)) for i in range(3)], Counts(engine)
  check_equal_to_plain(plain, engine, jobs, params)   # n-grams that repeat by chance
  if source == "n-grams":
    oracle = Oracle(monkeypatch, "partly wrong")
    if case not in NO_DRAFTS: add_outputs(oracle, plain, jobs, params)
    check_equal_to_plain(plain, engine, jobs, params)
    oracle.style = "right"
    check_equal_to_plain(plain, engine, jobs, params)
  _, proposed, accepted = count()
  assert (proposed > 0) == (case not in NO_DRAFTS) and (accepted > 0 or source != "n-grams" or not proposed)
  if source == "own model":
    assert accepted == proposed and (proposed > 50 or case in ("max_tokens", "min_tokens", "eos", *NO_DRAFTS))
  check_invariants(engine)


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_stop_within_drafts_ends_text(plain, engine, monkeypatch, field):
  ids, whole = prompt(7, field), sampled(24, seed=4, top_k=3)
  output = plain.generate(tokens(ids), whole, False)[0].outputs[0]
  pieces = [output.text[i:i + 1 + i % 4] for i in range(2, len(output.text) - 4, 2)]
  stops = [[x] for x in (pieces if field == "stop" else output.token_ids)]
  params = [dataclasses.replace(whole, include_stop_str_in_output=i % 2 == 0, min_tokens=i % 3 * 4, logprobs=1,
                                **{field: stop}) for i, stop in enumerate(stops)]
  oracle, jobs, count = Oracle(monkeypatch), [tokens(ids)] * len(params), Counts(engine)
  add_outputs(oracle, plain, jobs[:1], [whole])
  expected = check_equal_to_plain(plain, engine, jobs, params)
  assert sum(o.outputs[0].finish_reason == "stop" for o in expected) > 7 and count()[2] > 30
  assert len({len(ids_of(o)) for o in expected}) > 6, "they must end at many positions"
  count = Counts(engine)
  for p in params[::3]: engine.generate(jobs[:1], p, False)
  assert count()[1] == count()[2] > 20, "drafts after the end are not counted"
