"""Speculative decoding: random requests, aborts and failures with a fake model, whose texts are known."""
import contextlib
import dataclasses
import itertools
import random

import pytest
from helpers.engines import check_invariants
from helpers.faults import Failed, break_steps
from helpers.hash_model import HalfRightModel, HashDevice, HashModel
from helpers.models import VOCAB
from helpers.parameters import slow
from helpers.requests import prompt, tokens
from helpers.speculation import (Counts, Oracle, STYLES, always_draft, check_preemptions)

from tinyvllm import LLM, SamplingParams


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


@pytest.mark.parametrize("seed", [20, 21, *slow(22, 23, 24, 25)])
@pytest.mark.parametrize("drafter", ["itself", "other"])
def test_random_operations_with_draft_model_equal_expected_outputs(words_folder, monkeypatch, drafter, seed):
  (_, proposed, accepted), _ = fuzz(words_folder, monkeypatch, seed, 80, drafter)
  assert accepted > 20 and (accepted == proposed) == (drafter == "itself")
