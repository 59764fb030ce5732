"""Speculative decoding: counters, drafts in every step, known drafts, and comparison with outputs without drafts."""
import dataclasses
import random

import pytest

from tinyvllm_extra.sampling.speculation import Drafter, SpeculativeProposer

from .data import read_data
from .engines import assert_same_outputs, greedy
from .models import VOCAB

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
METRICS = ["spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


class Counts:
  """The increase of an engine's draft counters, which must be consistent at any time."""
  def __init__(self, engine): self.engine, self.start = engine, engine.get_metrics()

  def __call__(self):
    metrics = self.engine.get_metrics()
    if not self.engine.config.speculative_config: return 0, 0, 0
    drafts, proposed, accepted = (metrics[name] - self.start[name] for name in METRICS)
    per_position, before = metrics[PER_POSITION], self.start[PER_POSITION]
    growth = [x - y for x, y in zip(per_position, before, strict=True)]
    assert sum(growth) == accepted <= proposed
    assert growth == sorted(growth, reverse=True), "a draft is accepted only if all drafts before it are"
    assert growth[0] <= drafts
    return drafts, proposed, accepted

  steps = property(lambda self: self.engine.get_metrics()["steps"] - self.start["steps"])


def always_draft(monkeypatch):
  """Propose as many drafts as possible, regardless of the acceptance rate."""
  monkeypatch.setattr(Drafter, "rate", property(lambda self: 0.99, lambda self, value: None), raising=False)


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


class Oracle:
  """Replaces Drafter's lookup with known outputs. style: how the drafts differ from the right ones. patience: the
  probability that a step waits for the one in flight. model: the fake model, if any."""
  def __init__(self, monkeypatch, style="right", seed=0, patience=1.0, model=None):
    self.texts, self.style, self.rng, self.requested_sizes, self.model = [], style, random.Random(seed), [], model
    monkeypatch.setattr(Drafter, "propose", lambda drafter, ids, n: self.propose(list(ids), n))
    monkeypatch.setattr(SpeculativeProposer, "needs_sync", lambda proposer, seq: bool(seq.draft_token_ids) or (
      proposer.drafter(seq).rate > 0.1 and self.rng.random() < patience))

  def propose(self, ids, n):
    self.requested_sizes.append(n)
    text = next((text for text in self.texts if text[:len(ids)] == ids), ids)
    right = [*text[len(ids):], *[self.rng.randrange(VOCAB) for _ in range(n)]][:n]   # random tokens after the end
    return STYLES[self.style](self.rng, right)[:n]

  def expect(self, ids, n):
    """Return the next `n` greedy tokens of the fake model. From now on they are drafted."""
    expected, _ = self.model.text(ids, greedy(n), 0, n)
    self.texts.append([*ids, *expected])
    return expected


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


CASES = read_data("sampling_fields.json")["speculation"]
NO_DRAFTS = ["repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "structured_outputs"]


def add_outputs(oracle, plain, jobs, params):
  """Add the requests' outputs to the oracle: without drafts and stops, and with 8 more tokens."""
  fields = {"stop": None, "stop_token_ids": None, "ignore_eos": True, "min_tokens": 0, "logprobs": None,
            "prompt_logprobs": None}
  longer = [dataclasses.replace(p, **fields, max_tokens=p.max_tokens + 8) for p in params]
  for output in plain.generate(jobs, longer, False):
    oracle.texts += [[*output.prompt_token_ids, *c.token_ids] for c in output.outputs]


def check_equal_to_plain(plain, engine, jobs, params):
  """Check that a batch, and each request alone, gives the outputs of an engine without drafts, and return them."""
  expected = plain.generate(jobs, params, False)
  check_same(engine.generate(jobs, params, False), expected)
  for job, p, output in zip(jobs, params, expected, strict=True):
    check_same(engine.generate([job], [p], False), [output])
  return expected


def flat(output):
  """Return the samples and log probabilities of an output in one list."""
  values = []
  for c in output.outputs:
    values += [c.index, *c.token_ids, c.text, c.finish_reason, c.stop_reason, c.cumulative_logprob]
  for entries in (output.prompt_logprobs, *(c.logprobs for c in output.outputs)):
    values.append(entries is None)
    for entry in entries or (): values += [x for i, logprob in (entry or {}).items() for x in (i, *logprob)]
  return values


def check_same(actual, expected):
  """Check that outputs are equal: ids, text, finish reasons and log probabilities."""
  assert_same_outputs(actual, expected)
  for a, b in zip(actual, expected, strict=True): assert flat(a) == pytest.approx(flat(b), abs=1e-4)
