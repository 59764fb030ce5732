"""Speculative decoding: the output equals the output without drafts, whatever proposes them, and drafts delay no other
request. Most tests use a fake model, which hashes a step's array and the content of its blocks into the next tokens:
one wrong token, position or block table changes the output."""
import contextlib
import dataclasses
import functools
import itertools
import json
import random
import re

import numpy as np
import pytest
import sentencepiece
from reference import ENGINE, VOCAB, check_invariants, reference_greedy, run_to_end, same_outputs, slow, tiny_model
from server import Server
from test_failed_steps import PLACES, Failed, break_steps, once

from tinyvllm import LLM, SamplingParams
from tinyvllm.runner import LOGITS, TOKENS
from tinyvllm_extra.cli import main
from tinyvllm_extra.logits import LogitsPlan
from tinyvllm_extra.server.metrics import draft_statistics
from tinyvllm_extra.speculation import Drafter, NGramDrafter, SpeculativeConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
# One graph serves all requests
OPTIONS = {**ENGINE, "max_num_seqs": 16}
METRICS = ["spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


def greedy(size, **options):
  return SamplingParams(**{"temperature": 0.0, "max_tokens": size, "ignore_eos": True, **options})


def sampled(size, seed=0, **options):
  return SamplingParams(**{"temperature": 0.9, "seed": seed, "max_tokens": size, "ignore_eos": True, **options})


def tokens(ids): return {"prompt_token_ids": list(ids)}
def ids_of(output): return output.outputs[0].token_ids


def prompt(length, *salt):
  """Random words, different for each salt."""
  rng = random.Random(str(salt))
  return [rng.randrange(259, 320) for _ in range(length)]


class Counts:
  """The growth of an engine's draft counters, which must be consistent at any time."""
  def __init__(self, engine):
    self.engine, self.start = engine, engine.get_metrics()

  def __call__(self):
    now = self.engine.get_metrics()
    if not self.engine.config.speculative_config: return 0, 0, 0
    drafts, proposed, accepted = (now[name] - self.start[name] for name in METRICS)
    per_position, before = now[PER_POSITION], self.start[PER_POSITION]
    grown = [x - y for x, y in zip(per_position, before, strict=True)]
    assert sum(grown) == accepted <= proposed
    assert grown == sorted(grown, reverse=True), "a draft is accepted only if all drafts before it are"
    assert grown[0] <= drafts
    return drafts, proposed, accepted

  steps = property(lambda self: self.engine.get_metrics()["steps"] - self.start["steps"])
  preemptions = property(lambda self: self.engine.get_metrics()["num_preemptions"] - self.start["num_preemptions"])


def hopeful(monkeypatch):
  """Verify as many drafts as possible, however few were accepted."""
  monkeypatch.setattr(Drafter, "rate", property(lambda self: 0.99, lambda self, value: None), raising=False)


class Oracle:
  """Replaces NGramDrafter's lookup by known outputs. style(rng, right) changes the right drafts. patience: the
  probability that a step waits for the one in flight."""
  def __init__(self, monkeypatch, style=None, seed=0, patience=1.0):
    self.texts, self.style, self.rng, self.asked = [], style or STYLES["right"], random.Random(seed), []
    monkeypatch.setattr(NGramDrafter, "propose", lambda drafter, ids, n: self.propose(list(ids), n))
    monkeypatch.setattr(NGramDrafter, "needs_sync", lambda drafter, seq: bool(seq.draft_token_ids) or (
      drafter.rate > 0.1 and self.rng.random() < patience))

  def propose(self, ids, n):
    self.asked.append(n)
    text = next((text for text in self.texts if text[:len(ids)] == ids), ids)
    right = [*text[len(ids):], *[self.rng.randrange(VOCAB) for _ in range(n)]][:n]   # after its end: random tokens
    return self.style(self.rng, right)[:n]


def other_than(token): return 259 + (token - 258) % 61   # a different word token


def spoilt(rng, right):
  """Drafts that are wrong from some position on, or right, or fewer."""
  if not right: return right
  at, kind = rng.randrange(len(right)), rng.randrange(4)
  if kind == 0: return right[:at]
  if kind == 1: return right
  if kind == 2: return [*right[:at], other_than(right[at]), *right[at + 1:]]
  return [*right[:at], *[rng.randrange(VOCAB) for _ in right[at:]]]


STYLES = {"right": lambda rng, right: right, "wrong": lambda rng, right: [other_than(x) for x in right],
          "spoilt": spoilt, "none": lambda rng, right: []}


# Prompt lookup

def lookup(ids, n, longest, shortest):
  """The up to n tokens after the last earlier occurrence of the longest n-gram that ends ids."""
  for size in range(min(longest, len(ids) - 1), shortest - 1, -1):
    for end in range(len(ids) - 1, size - 1, -1):
      if ids[end - size:end] == ids[-size:]: return ids[end:end + n]
  return []


@pytest.mark.parametrize("longest, shortest", [(4, 2), (3, 1), (1, 1), (2, 2), (8, 3)])
def test_ngram_drafter_equals_naive_lookup(longest, shortest):
  rng, found, missed = random.Random(longest), 0, 0
  config = SpeculativeConfig(**NGRAM | {"prompt_lookup_max": longest, "prompt_lookup_min": shortest})
  for _ in range(150):
    drafter, letters, ids = NGramDrafter(config, SamplingParams()), rng.choice([1, 2, 3, 5, 12]), []
    for _ in range(rng.randrange(2, 12)):
      ids += [rng.randrange(letters) for _ in range(rng.randrange(1, 6))]   # several at once, as with accepted drafts
      n = rng.randrange(1, 9)
      expected = lookup(ids, n, longest, shortest)
      got = drafter.propose(list(ids), n)
      assert got[:len(expected)] == expected and len(got) <= n, (ids, n)
      # If fewer than n tokens follow, a repetition continues
      assert got == (expected * n)[:len(got)] and bool(got) == bool(expected), (ids, n)
      found += bool(got)
      missed += not got
  assert found > 100 and (missed > 100 or longest == 1), "both cases must occur"


def test_ngram_drafter_proposes_at_most_n_tokens():
  drafter = NGramDrafter(SpeculativeConfig(**NGRAM), SamplingParams())
  for n in (0, 1, 3): assert len(drafter.propose([7, 8, 9] * 4, n)) == n


class Watched(list):
  """A list that counts the items read."""
  def __init__(self, *items):
    super().__init__(*items)
    self.read = 0

  def __getitem__(self, i):
    out = super().__getitem__(i)
    self.read += len(out) if isinstance(i, slice) else 1
    return out

  def __iter__(self):
    self.read += len(self)
    return super().__iter__()


def test_ngram_drafter_reads_only_new_tokens():
  rng, ids = random.Random(0), Watched()
  drafter = NGramDrafter(SpeculativeConfig(**NGRAM), SamplingParams())
  ids += [rng.randrange(20) for _ in range(8000)]
  drafter.propose(ids, 5)
  for _ in range(20):
    ids += [rng.randrange(20) for _ in range(3)]
    ids.read = 0
    drafter.propose(ids, 5)
    assert 0 < ids.read < 100


# A fake model

MASK = 2**64 - 1


def mix(x):
  """splitmix64's finalizer."""
  x &= MASK
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 & MASK
  x = (x ^ x >> 27) * 0x94d049bb133111eb & MASK
  return x ^ x >> 31


WEIGHTS = [mix(i + 1) | 1 for i in range(1024)]   # by position in the sequence
WEIGHTS_ARRAY = np.array(WEIGHTS, np.uint64)


class Hashes:
  """A model with an alphabet. Its state is the sum of a value for each earlier position, as attention sums over V."""
  def __init__(self, alphabet): self.alphabet = alphabet

  def fold(self, state, token, position):
    """The cached value of a token, and the state after it."""
    value = mix(state ^ (token + 1) * 0x9e3779b97f4a7c15)
    return value, state + value * WEIGHTS[position] & MASK

  def choose(self, state, seed, salt=0, banned=(), allowed=None):
    pool = allowed or self.alphabet
    pool = [token for token in pool if token not in banned] or pool
    return pool[mix(state ^ mix(seed) ^ mix(salt + 7)) % len(pool)]

  def score(self, state, token): return -(mix(state ^ token * 0x632be59bd9b4e019) % 4096) / 64

  def read(self, ids):
    """The state after a sequence, and the score of each of its tokens except the first."""
    state, scores = 0, [None]
    for position, token in enumerate(ids):
      if position: scores.append(self.score(state, token))
      _, state = self.fold(state, token, position)
    return state, scores

  def text(self, ids, params, seed, n, stop_ids=()):
    """The next n tokens and their scores. End tokens do not end them."""
    (state, _), out, scores = self.read(ids), [], []
    for _ in range(n):
      banned = stop_ids if len(out) < params.min_tokens else ()
      pool = params.allowed_token_ids
      if pool and {*pool} <= {*banned}: banned = ()
      bias = sum(token * int(16 * x) for token, x in (params.logit_bias or {}).items() if token not in banned)
      salt = bias + sum(int(16 * params.presence_penalty) * token for token in {*out})
      out.append(self.choose(state, seed if params.temperature else 0, salt, banned, pool and sorted(pool)))
      scores.append(self.score(state, out[-1]))
      _, state = self.fold(state, out[-1], len(ids) + len(out) - 1)
    return out, scores


class HalfRight(Hashes):
  """A draft model that often agrees with the model."""
  def choose(self, state, *args):
    token = super().choose(state, *args)
    return token if mix(state + 1) % 3 else self.alphabet[(self.alphabet.index(token) + 1) % len(self.alphabet)]


class Device:
  """Replaces a runner's graphs. It sees only the step's words, block tables, last tokens and a cache. A write to a
  shared or cached block, or of two tokens to one entry, is an error."""
  def __init__(self, engine, runner, monkeypatch, model):
    config = engine.config
    self.engine, self.model, self.spare, self.width = engine, model, config.max_num_seqs, runner.max_blocks
    self.cache = np.zeros((runner.num_blocks, config.block_size), np.uint64)
    self.table = np.zeros(runner.block_tables.shape, np.int32)
    self.last = [-1] * (self.spare + 1)
    self.most = 0   # maximum number of tokens in a step
    launch, device = runner.launch, self

    class Graphs(dict):
      """A captured graph of every key."""
      def get(self, key):
        def graph(): return device.compute(key)
        graph.cnt = 2   # captured
        return None, graph

    def upload(tensor, array):
      if tensor is None: self.words = array.copy()
      else: self.table = array.copy()

    def launched(step):
      self.rows = len(step.rows)
      monkeypatch.setattr("tinyvllm.runner.upload", upload)
      return launch(step)
    runner.graphs, runner.launch = Graphs(), launched
    runner.backend.start_reading = lambda array: array.tolist

  def compute(self, key):
    T, S = key.num_tokens, key.num_rows
    plan = key.plan or LogitsPlan(VOCAB, False, 0, False)
    E = plan.num_adjustments
    packed, rest = self.words[:16 * T].reshape(16, T), self.words[16 * T:]
    ids, positions, rows, entries, blocks = packed[[TOKENS.dtype.names.index(x) for x in
                                                    ("id", "position", "slot", "table_index", "block")]].tolist()
    logits = dict(zip(LOGITS.dtype.names, packed[len(TOKENS.dtype.names):, :S], strict=False))
    self.table.ravel()[entries] = blocks
    states = self.write(ids, positions, rows, blocks)
    temperatures = logits["temperature"].view(np.float32).tolist()
    seeds = np.ascontiguousarray(packed[14:, :S].T).view(np.uint64)[:, 0].tolist()
    fields = rest[:5 * E].reshape(5, E)
    numbers = fields[2:].view(np.float32)
    edits = [(*fields[:2, i].tolist(), *numbers[:, i].tolist()) for i in np.flatnonzero(fields[0] >= 0)]
    num_masks = S * -(-VOCAB // 32) * plan.has_bitmask
    masks = rest[5 * E:5 * E + num_masks].reshape(S, -1) if num_masks else None
    targets = rest[5 * E + num_masks:].tolist() if plan.has_logprobs else [-1] * S
    chosen, scores, given = [0] * S, [[0.0] * 4] * S, set()
    for i, (token, position, slot) in enumerate(zip(
        *[logits[x][:self.rows].tolist() for x in ("token", "position", "slot")], strict=True)):
      assert positions[token] == position
      mine = [edit[1:] for edit in edits if edit[0] == i]
      banned = {t for t, bias, _, _ in mine if bias == -np.inf}
      salt = sum(t * int(16 * (bias if bias > -np.inf else 0) + 16 * penalty) for t, bias, _, penalty in mine)
      allowed = None
      if masks is not None and (masks[i] != -1).any():
        allowed = np.flatnonzero(np.unpackbits(masks[i].view(np.uint8), bitorder="little")).tolist()
      state = states[token]
      chosen[i] = self.model.choose(state, seeds[i] if temperatures[i] > 0 else 0, salt, banned, allowed)
      wanted = chosen[i] if targets[i] < 0 else targets[i]
      scores[i] = [self.model.score(state, wanted), 1.0 + wanted, 5, self.model.score(state, 5)]
      if slot != self.spare:   # two threads would write in any order
        self.last[slot] = -9 if slot in given else chosen[i]
        given.add(slot)
    return [np.array(chosen), *([np.array(scores)] if plan.has_logprobs else [])]

  def write(self, ids, positions, rows, blocks):
    """Fill the cache. Returns the state after each token."""
    states, written, size = {}, set(), self.cache.shape[1]
    kept = {*self.engine.blocks.shared, *self.engine.blocks.cached_blocks.values()}
    for i, row in enumerate(rows):
      if row == self.spare: continue
      position, token = positions[i], self.last[row] if ids[i] < 0 else ids[i]
      assert 0 <= token < VOCAB, "an unknown token"
      page, offset = divmod(position, size)
      block = blocks[i]
      assert 0 < block == self.table[row, page]
      assert (block, offset) not in written, "two tokens in one cache entry"
      assert block not in kept, "a write to a shared or cached block"
      written.add((block, offset))
      if i and rows[i - 1] == row and positions[i - 1] == position - 1: state = states[i - 1]
      else:
        before = self.cache[self.table[row, :page + 1]].ravel()[:position]
        state = int((before * WEIGHTS_ARRAY[:position]).sum())
      self.cache[block, offset], states[i] = self.model.fold(state, token, position)
    self.most = max(self.most, len(written))
    assert len(written) <= self.engine.config.max_num_batched_tokens, "a step above its token budget"
    return states


def watch_preemptions(engine):
  """No sequence is preempted while the pool holds the blocks that all running ones need without drafts."""
  scheduler, blocks, schedule = engine.scheduler, engine.blocks, engine.scheduler.schedule

  def watched():
    before = scheduler.counters["num_preemptions"]
    needs = sum(-(-seq.length // blocks.block_size) - len(seq.block_table) for seq in scheduler.running)
    enough = needs <= blocks.num_free()
    batch = schedule()
    assert not enough or scheduler.counters["num_preemptions"] == before, "preempted for drafts"
    assert sum(batch.values()) <= engine.config.max_num_batched_tokens
    return batch
  scheduler.schedule = watched


def watch_drafts(engine, model):
  """A draft model's drafts must equal its own continuation of the tokens, whatever was drafted before."""
  run_draft_model = engine.proposer.run_draft_model

  def watched(runner, batch):
    run_draft_model(runner, batch)
    for seq in batch:
      if seq.draft_token_ids and seq.num_generated >= seq.params.min_tokens:
        params = dataclasses.replace(seq.params, min_tokens=0)
        said, _ = model.text(seq.tokens, params, seq.seed % 2**64, len(seq.draft_token_ids))
        assert seq.draft_token_ids == said, "the drafts differ from the draft model's continuation"
  engine.proposer.run_draft_model = watched


@pytest.fixture(autouse=True)
def wide_registers(monkeypatch):
  """The best number of drafts depends on the CPU: assume the registers of AVX-512."""
  monkeypatch.setattr("tinyvllm_extra.speculation.cpu_sums", lambda: 8)


@pytest.fixture
def fake(words_folder, monkeypatch):
  """fake(...): an engine with a fake device, and its model."""
  def make(drafts=NGRAM, alphabet=range(259, 320), overlaps=False, **options):
    engine = LLM(words_folder, **{**ENGINE, "max_model_len": 512, **options}, speculative_config=drafts)
    engine.runner.is_async, model = overlaps, Hashes([*alphabet])
    engine.device, *_ = [Device(engine, runner, monkeypatch, model) for runner in engine.runners]
    watch_preemptions(engine)
    return engine, model
  return make


run = functools.partial(run_to_end, limit=5000)


def test_fake_model_detects_wrong_cache_and_token(fake):
  """Without faults it gives the expected text; a wrong value in a block or a wrong token changes it."""
  engine, model = fake(None)
  expected, _ = model.text(prompt(20, "fake"), greedy(30), 0, 30)
  assert ids_of(engine.generate(tokens(prompt(20, "fake")), greedy(30), False)[0]) == expected
  for what in ("cache", "last token"):
    engine.add_request(what, tokens(prompt(20, "fake")), greedy(30))
    for _ in range(5): output, = engine.step() or [None]
    seq, = engine.scheduler.running
    if what == "cache": engine.device.cache[seq.block_table[1], 2] += np.uint64(1)
    else: seq.tokens[-1] = other_than(seq.tokens[-1])
    last = run(engine)[what]
    assert ids_of(last)[:3] == expected[:3] and ids_of(last)[-20:] != expected[-20:]
    engine.blocks.cached_blocks.clear()
    engine.blocks.reset()


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
  return Job(params, ids, [], model.read(ids)[1])


def expect(job, engine, model, oracle):
  """Fill in the job's expected outputs. The oracle gets them with further tokens after their end."""
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
  """The output must be a prefix of the expected text, and after its end all of it."""
  params = job.params
  if params.prompt_logprobs is not None:
    got = [x and x[token].logprob for x, token in zip(output.prompt_logprobs, job.prompt, strict=True)]
    if any(len(c.token_ids) for c in output.outputs): assert got == job.scores
  for completion, (ids, scores, reason, stop) in zip(output.outputs, job.texts, strict=True):
    n = len(completion.token_ids)
    assert completion.token_ids == ids[:n], f"{completion.token_ids} instead of {ids}"
    if params.logprobs is not None:
      got = [x[token].logprob for x, token in zip(completion.logprobs, completion.token_ids, strict=True)]
      assert got == scores[:n], "log probabilities of other tokens"
      assert all((5 in x) == (params.logprobs > 0) or token == 5
                 for x, token in zip(completion.logprobs, completion.token_ids, strict=True))
    if completion.finish_reason == "abort": assert job.aborted
    elif completion.finish_reason:
      assert (n, completion.finish_reason, completion.stop_reason) == (len(ids), reason, stop)
    else: assert n < len(ids), "it must have ended"


def fuzz(words_folder, monkeypatch, seed, cases, drafter="ngram"):
  """Run random requests, aborts and failures on an engine of random size until `cases` samples have ended. drafter:
  "ngram", "itself" (the target as draft model) or "other". Returns the counts."""
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
  model, real = Hashes([*alphabet]), len(alphabet) < 10
  draft_model = HalfRight(model.alphabet) if drafter == "other" else model
  for runner, its in zip(engine.runners, (model, draft_model), strict=False): Device(engine, runner, monkeypatch, its)
  watch_preemptions(engine)
  if drafter != "ngram": watch_drafts(engine, draft_model)
  style, patience = STYLES[rng.choice(["right", "spoilt", "spoilt"])], rng.choice([0.5, 1.0])
  oracle = None if real or drafter != "ngram" else Oracle(monkeypatch, style, seed, patience)
  if rng.random() < 0.7: hopeful(monkeypatch)   # however many were wrong
  fails = rng.choice([0, 0, 0.02])
  break_steps(engine, monkeypatch, lambda place: rng.random() < fails)
  for runner in engine.runners[1:]:   # steps of a draft model
    launch = runner.launch

    def faulty_launch(step, launch=launch):
      if rng.random() < fails: raise Failed("draft")
      return launch(step)
    runner.launch = faulty_launch
  families, jobs, done, generated, count = [prompt(40, seed, i) for i in range(3)], {}, 0, 0, Counts(engine)
  for number in itertools.count():
    if done >= cases and not jobs: break
    if done < cases and len(jobs) < 8 and rng.random() < 0.5:
      name, job = str(number), random_job(rng, engine, model, families)
      expect(job, engine, model, oracle)
      priority = rng.randrange(-2, 3) if policy == "priority" else 0
      engine.add_request(name, tokens(job.prompt), job.params, priority)
      jobs[name] = job
    if jobs and rng.random() < 0.01:
      name = rng.choice([*jobs])
      jobs[name].aborted = True
      engine.abort_request(name)
      done += jobs.pop(name).params.n
    outputs = []
    with contextlib.suppress(Failed): outputs = engine.step()
    check_invariants(engine)
    for output in outputs:
      name, job = output.request_id, jobs[output.request_id]
      check_output(job, output)
      if output.finished:
        assert all(c.finish_reason != "abort" for c in output.outputs)
        generated += sum(len(c.token_ids) for c in output.outputs)
        assert output.metrics.num_generated == sum(len(c.token_ids) for c in output.outputs)
        assert output.metrics.num_accepted_tokens <= output.metrics.num_draft_tokens
        done += job.params.n
        if oracle: oracle.texts = [text for text in oracle.texts if text[:len(job.prompt)] != job.prompt or any(
          text[:len(other.prompt)] == other.prompt for other_name, other in jobs.items() if other_name != name)]
        del jobs[name]
    assert number < 400 * cases + 2000, "the requests do not end"
  assert engine.get_metrics()["generation_tokens"] >= generated
  return count(), count.preemptions


@pytest.mark.parametrize("seed", [*range(5), *slow(*range(5, 12))])
def test_random_operations_equal_expected_texts(words_folder, monkeypatch, seed):
  (drafts, _, accepted), _ = fuzz(words_folder, monkeypatch, seed, 100)
  assert drafts > 10 and accepted > 5, "the test must reach this case"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_ten_thousand_random_texts_equal_expected(words_folder, monkeypatch, seed):
  fuzz(words_folder, monkeypatch, seed, 200)


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
  assert accepted == proposed == 200 - count.steps, "each step gives one token and the accepted drafts"
  # More than seven drafts may not pay off
  assert -(-200 // (k + 1)) <= count.steps <= 200 // (min(k, 7) + 1) + 6, "drafts soon reach their maximum"
  assert max(oracle.asked) == k == len(engine.get_metrics()[PER_POSITION])
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

def test_wrong_drafts_become_rare_and_are_retried(fake, monkeypatch):
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
  assert 0 < proposed[200] <= 60 and proposed[400] - proposed[200] <= 30, "one in seven, after some time"
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
  assert ids_of(output) == expected and count()[2] > 150 and max(oracle.asked[-5:]) == 5
  assert count.steps < 64 + 10 + 300 // 6 + 10, "drafting is retried within 64 tokens"


@pytest.mark.parametrize("overlaps", [False, True])
def test_wrong_drafts_in_small_pool_change_no_step(fake, monkeypatch, overlaps):
  """Preemptions are equal to those without drafts, and so are steps unless they overlap."""
  told = []
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
    told.append((count.preemptions, count.steps))
  assert count()[1] > 0 and told[0][0] > 0, "the test must reach this case"
  if not overlaps: assert told[0] == told[1]


@pytest.mark.parametrize("style", ["right", "spoilt", "wrong"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_in_small_pool_cause_no_preemption(fake, monkeypatch, style,
                                                                                          overlaps):
  """fake() checks each preemption."""
  for blocks in (10, 13, 17):
    engine, model = fake(num_gpu_blocks_override=blocks, max_model_len=64, overlaps=overlaps)
    oracle, jobs = Oracle(monkeypatch, STYLES[style]), [prompt(3 + 4 * i, "small", i) for i in range(5)]
    expected = [model.text(ids, greedy(60), 0, min(30, engine.max_model_len - len(ids)))[0] for ids in jobs]
    oracle.texts += [[*ids, *text] for ids, text in zip(jobs, expected, strict=True)]
    for i, ids in enumerate(jobs): engine.add_request(str(i), tokens(ids), greedy(30))
    last = run(engine)
    assert [ids_of(last[str(i)]) for i in range(5)] == expected


def test_drafts_need_free_blocks(fake, monkeypatch):
  engine, model = fake(num_gpu_blocks_override=11, block_size=4, max_model_len=64)
  oracle, count = Oracle(monkeypatch), Counts(engine)
  ids, other = prompt(19, "a"), prompt(15, "b")
  oracle.texts += [[*x, *model.text(x, greedy(9), 0, 9)[0]] for x in (ids, other)]
  engine.add_request("a", tokens(ids), greedy(2))
  engine.add_request("b", tokens(other), greedy(6))
  while not engine.blocks.num_free() < 2: engine.step()
  assert count()[0] == 0, "5 and 4 blocks of 10 are used: the last one may be needed"
  run(engine)
  count = Counts(engine)
  engine.generate(tokens(prompt(3, "c")), greedy(1), False)
  oracle.texts.append([*ids, *model.text(ids, greedy(12), 0, 12)[0]])
  engine.generate(tokens(ids), greedy(12), False)
  assert count()[2] > 4


def test_prompts_fill_token_budget_before_drafts(fake, monkeypatch):
  """A long prompt takes the rest of the budget of 16 after decoding sequences."""
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
    assert count() == (0, 0, 0) and engine.device.most <= 16
    if i < 4: assert engine.scheduler.running[1].num_computed == 15 * i
  last = run(engine)
  assert ids_of(last["a"]) == expected and count()[0] > 0 and drafting.finish_reason


@pytest.mark.parametrize("style", ["spoilt", "wrong", "right"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_prefix_cache_after_drafts_is_correct(fake, monkeypatch, style, overlaps):
  engine, model = fake(overlaps=overlaps)
  oracle, ids = Oracle(monkeypatch, STYLES[style]), prompt(6, "found")
  hopeful(monkeypatch)
  expected, _ = model.text(ids, greedy(60), 0, 60)
  oracle.texts.append([*ids, *expected])
  assert ids_of(engine.generate(tokens(ids), greedy(41), False)[0]) == expected[:41]
  for n in (41, 40, 33, 5):
    output, = engine.generate(tokens([*ids, *expected[:n]]), greedy(60 - n), False)
    assert output.num_cached_tokens == (6 + n - 1) // 4 * 4, "all except the last token"
    assert ids_of(output) == expected[n:]


def test_rejected_drafts_in_mixed_step_are_not_cached(fake, monkeypatch):
  """One sequence has only wrong drafts, the other one only right ones."""
  engine, model = fake()
  oracle, jobs = Oracle(monkeypatch), [prompt(6, "wrong"), prompt(6, "right")]
  hopeful(monkeypatch)
  said = [model.text(ids, greedy(40), 0, 40)[0] for ids in jobs]
  wrong, right = ([*ids, *text] for ids, text in zip(jobs, said, strict=True))
  oracle.texts += [wrong, right]
  propose = oracle.propose
  oracle.propose = lambda ids, n: [*map(other_than, propose(ids, n))] if ids == wrong[:len(ids)] else propose(ids, n)
  for _ in range(2):
    outputs = engine.generate([tokens(ids) for ids in jobs], greedy(40), False)
    assert [ids_of(output) for output in outputs] == said


@pytest.mark.parametrize("length", [16, 17, 20, 33])
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_after_last_prompt_chunk_are_counted_once_verified(fake, monkeypatch, length,
                                                                                         overlaps):
  """Chunks of 16 tokens: when a chunk's results are read, a later step with drafts may be in flight."""
  engine, model = fake(max_num_batched_tokens=16, overlaps=overlaps)
  oracle, ids, count = Oracle(monkeypatch), prompt(length, "chunk", overlaps), Counts(engine)
  said, _ = model.text(ids, greedy(30), 0, 30)
  oracle.texts.append([*ids, *said])
  assert ids_of(engine.generate(tokens(ids), greedy(30), False)[0]) == said
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


def endless(params):
  """Parameters of the same output with 8 more tokens, without an end."""
  return dataclasses.replace(params, stop=None, stop_token_ids=None, ignore_eos=True, min_tokens=0, logprobs=None,
                             prompt_logprobs=None, max_tokens=params.max_tokens + 8)


def tell(oracle, plain, jobs, params):
  """Tell the oracle the outputs of the requests."""
  for output in plain.generate(jobs, [endless(p) for p in params], False):
    oracle.texts += [[*output.prompt_token_ids, *c.token_ids] for c in output.outputs]


def same(got, expected):
  """Outputs must be equal: ids, text, finish reasons and log probabilities."""
  same_outputs(got, expected)
  for a, b in zip(got, expected, strict=True):
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
  # Logits that depend on earlier tokens: nothing is drafted
  "repetition_penalty": {"repetition_penalty": 1.3}, "presence_penalty": {"presence_penalty": 0.5},
  "frequency_penalty": {"frequency_penalty": -0.5, "temperature": 0.0}, "bad_words": {"bad_words": ["the", "a cat"]},
  "structured_outputs": {"structured_outputs": {"regex": "[a-z ]{30}"}, "ignore_eos": False},
}
UNDRAFTED = ["repetition_penalty", "presence_penalty", "frequency_penalty", "bad_words", "structured_outputs"]


@pytest.mark.parametrize("engine", ["overlapped", *slow("plain")], indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_those_without_drafts(plain, engine, monkeypatch, case):
  params = [sampled(24, **{"seed": i, **CASES[case]}) for i in range(3)]
  jobs = [tokens(prompt(5 + 6 * i, case, i)) for i in range(3)]
  expected = plain.generate(jobs, params, False)
  count = Counts(engine)
  looked_up = engine.generate(jobs, params, False)   # n-grams that occur by chance
  same(looked_up, expected)
  oracle = Oracle(monkeypatch, STYLES["spoilt"])
  if case not in UNDRAFTED: tell(oracle, plain, jobs, params)
  same(engine.generate(jobs, params, False), expected)
  for style in ("right", "spoilt"):
    oracle.style = STYLES[style]
    for job, p, output in zip(jobs, params, expected, strict=True): same(engine.generate([job], [p], False), [output])
  assert (count()[2] > 0) == (case not in UNDRAFTED) and (count()[0] > 0) == (case not in UNDRAFTED)
  check_invariants(engine)


def test_repetitive_prompt_gives_accepted_drafts(plain, engine):
  """The text repeats itself because few tokens are allowed."""
  params = [sampled(60, seed=i, allowed_token_ids=[265, 300], temperature=[0.0, 0.5, 1.0][i]) for i in range(3)]
  jobs, count = [tokens([265, 300] * 6 + [i + 270]) for i in range(3)], Counts(engine)
  same(engine.generate(jobs, params, False), plain.generate(jobs, params, False))
  assert count()[2] > 20


def test_stop_string_within_drafts_ends_text(plain, engine, monkeypatch):
  ids, whole = prompt(7, "stops"), sampled(24, seed=4, top_k=3)
  text = plain.generate(tokens(ids), whole, False)[0].outputs[0].text
  params = [dataclasses.replace(whole, stop=[text[i:i + 1 + i % 4], "#"], include_stop_str_in_output=i % 2 == 0,
                                min_tokens=i % 3 * 4, logprobs=1) for i in range(2, len(text) - 4, 2)]
  assert len(params) > 10
  oracle, count, jobs = Oracle(monkeypatch), Counts(engine), [tokens(ids)] * len(params)
  tell(oracle, plain, jobs[:1], [whole])
  expected = plain.generate(jobs, params, False)
  same(engine.generate(jobs, params, False), expected)
  for job, p, output in zip(jobs, params, expected, strict=True): same(engine.generate([job], [p], False), [output])
  assert sum(o.outputs[0].finish_reason == "stop" for o in expected) > 7 and count()[2] > 30
  assert len({len(ids_of(o)) for o in expected}) > 6, "they end at many positions"
  assert engine.blocks.num_used() == 0


def test_stop_id_within_drafts_ends_text(plain, engine, monkeypatch):
  ids, whole = prompt(7, "stop ids"), sampled(24, seed=5)
  said = ids_of(plain.generate(tokens(ids), whole, False)[0])
  params = [dataclasses.replace(whole, stop_token_ids=[token], min_tokens=i % 3 * 5) for i, token in enumerate(said)]
  oracle, count, jobs = Oracle(monkeypatch), Counts(engine), [tokens(ids)] * len(params)
  tell(oracle, plain, jobs[:1], [whole])
  expected = plain.generate(jobs, params, False)
  for job, p, output in zip(jobs, params, expected, strict=True): same(engine.generate([job], [p], False), [output])
  assert sum(o.outputs[0].finish_reason == "stop" for o in expected) > 15 and count()[2] > 40
  count = Counts(engine)
  for p in params[::3]: engine.generate(jobs[:1], p, False)
  assert count()[1] == count()[2] > 20, "drafts after the end do not count"


@pytest.mark.parametrize("caching", [False, True])
def test_batches_with_prompt_chunks_equal_those_without_drafts(plain, engine, monkeypatch, caching):
  monkeypatch.setattr(engine.scheduler, "config", dataclasses.replace(engine.config, enable_prefix_caching=caching))
  engine.blocks.cached_blocks.clear()
  engine.blocks.reset()
  jobs = [tokens(prompt([3, 50, 7, 41, 1][i % 5], "chunks", i)) for i in range(10)]
  params = [[greedy(30), sampled(30, seed=i)][i % 2] for i in range(10)]
  oracle, count = Oracle(monkeypatch, STYLES["spoilt"]), Counts(engine)
  tell(oracle, plain, jobs, params)
  expected = plain.generate(jobs, params, False)
  for _ in range(2): same(engine.generate(jobs, params, False), expected)
  assert count()[2] > 5 and (len(engine.blocks.cached_blocks) > 0) == caching


def test_long_text_equals_reference(engine, words_folder, monkeypatch):
  oracle, ids, count = Oracle(monkeypatch, STYLES["spoilt"]), prompt(11, "reference"), Counts(engine)
  expected = reference_greedy(words_folder, ids, 60)
  oracle.texts.append([*ids, *expected])
  assert ids_of(engine.generate(tokens(ids), greedy(60), False)[0]) == expected and count()[2] > 10
  again, = engine.generate(tokens([*ids, *expected[:40]]), greedy(20), False)
  assert again.num_cached_tokens == 48 and ids_of(again) == expected[40:]


def test_stream_delivers_accepted_drafts_together(plain, engine, monkeypatch):
  ids, params = prompt(9, "stream"), sampled(40, seed=2, logprobs=0)
  oracle = Oracle(monkeypatch)
  tell(oracle, plain, [tokens(ids)], [params])
  expected, = plain.generate(tokens(ids), params, False)
  pieces = [output.outputs[0] for output in engine.generate_stream(tokens(ids), params)]
  assert "".join(piece.text for piece in pieces) == expected.outputs[0].text
  assert [token for piece in pieces for token in piece.token_ids] == ids_of(expected)
  assert [len(piece.logprobs) for piece in pieces] == [len(piece.token_ids) for piece in pieces]
  assert len(pieces) < 20 and max(len(piece.token_ids) for piece in pieces) == 6
  assert pieces[-1].finish_reason == "length"


def test_abort_with_drafts_leaves_others_and_cache_correct(plain, engine, monkeypatch):
  oracle = Oracle(monkeypatch, STYLES["spoilt"])
  hopeful(monkeypatch)
  for number in range(2, 9):
    jobs, params = [prompt(5, "abort", number, i) for i in range(3)], [greedy(20), sampled(20, seed=1, n=2), greedy(20)]
    tell(oracle, plain, [tokens(ids) for ids in jobs], params)
    expected = plain.generate([tokens(ids) for ids in jobs], params, False)
    for i, (ids, p) in enumerate(zip(jobs, params, strict=True)): engine.add_request(str(i), tokens(ids), p)
    for _ in range(number): engine.step()
    for name in ("0", "1"): engine.abort_request(name)
    check_invariants(engine)
    last = run(engine)
    assert ids_of(last["2"]) == ids_of(expected[2]) if "2" in last else number > 6
    same(engine.generate([tokens(ids) for ids in jobs], params, False), expected)
    stream = engine.generate_stream(tokens(jobs[0]), params[0])
    for _ in range(2): next(stream)
    stream.close()
    assert engine.blocks.num_used() == 0
    same(engine.generate([tokens(jobs[0])], params[:1], False), expected[:1])


@pytest.mark.parametrize("place", PLACES)
def test_failed_step_with_drafts_loses_and_repeats_no_token(engine, words_folder, monkeypatch, place):
  hopeful(monkeypatch)
  for number, style in itertools.product(range(1, 6), ("right", "spoilt")):
    oracle, last, failures = Oracle(monkeypatch, STYLES[style]), {}, 0
    jobs = {name: prompt(length, "fails", name) for name, length in (("a", 3), ("b", 20), ("c", 6))}
    expected = {name: reference_greedy(words_folder, ids, 16) for name, ids in jobs.items()}
    oracle.texts += [[*ids, *expected[name]] for name, ids in jobs.items()]
    engine.blocks.cached_blocks.clear()
    engine.blocks.reset()
    for name, ids in jobs.items(): engine.add_request(name, tokens(ids), greedy(14, logprobs=0))
    with monkeypatch.context() as patched:
      break_steps(engine, patched, once(place, number))
      for _ in range(200):
        if not engine.has_unfinished_requests(): break
        try: last |= {output.request_id: output for output in engine.step()}
        except Failed: failures += 1
        check_invariants(engine)
    assert failures == 1, f"{place} {number} must fail"
    assert {name: ids_of(output) for name, output in last.items()} == {name: x[:14] for name, x in expected.items()}
    assert all(len(output.outputs[0].logprobs) == 14 for output in last.values())
    again = engine.generate([tokens(ids) for ids in jobs.values()], greedy(14, logprobs=0), False)
    same(again, [last[name] for name in jobs])


# Options

@pytest.mark.parametrize("config, said", [
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
def test_invalid_config_raises_with_remedy(words_folder, config, said):
  with pytest.raises(ValueError) as e: LLM(words_folder, **ENGINE, speculative_config=config)
  assert all(x in str(e.value) for x in said), str(e.value)


@pytest.mark.parametrize("config", [
  None, {"method": "ngram", "num_speculative_tokens": 1}, {"method": "ngram", "num_speculative_tokens": 16},
  {**NGRAM, "prompt_lookup_min": 4}])
def test_valid_config_is_accepted(words_folder, config): LLM(words_folder, **ENGINE,
                                                                          speculative_config=config)


def flags(**options): return [x for k, v in options.items() for x in ("--" + k.replace("_", "-"), str(v))]


SMALL = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4}


def test_command_line_takes_json_config(words_folder, plain, capsys):
  command = ["generate", "the cat", "--model", str(words_folder), *flags(**SMALL), "--max-tokens", "12"]
  assert main(command) == 0
  expected = capsys.readouterr().out
  assert main([*command, "--speculative-config", json.dumps(NGRAM)]) == 0
  assert capsys.readouterr().out == expected
  assert main([*command, "--speculative-config", '{"method": "eagle", "num_speculative_tokens": 2}']) == 1
  assert "method='eagle'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_commands_have_speculative_config_option(command, capsys):
  with pytest.raises(SystemExit): main([command, "--help"])
  assert "--speculative-config" in capsys.readouterr().out


@pytest.mark.slow
def test_server_metrics_count_drafts(words_folder):
  with Server(words_folder, *flags(**SMALL), "--speculative-config", json.dumps(NGRAM)) as server:
    said = dict(re.findall(r"^# HELP tinyvllm:(\w+) (.*)$", server.get("/metrics").text, re.M))
    before = server.metrics()
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 60, "logit_bias": {"300": 100}, "ignore_eos": True}
    assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 60
    found = server.metrics()
    names = ["drafts_total", "draft_tokens_total", "accepted_tokens_total"]
    drafts, proposed, accepted = (found["spec_decode_num_" + name] for name in names)
    assert [before["spec_decode_num_" + name] for name in names] == [0, 0, 0]
    assert 10 <= drafts <= proposed and 30 < accepted <= proposed
    per_position = {name: x for name, x in found.items() if "per_pos" in name}
    assert found["spec_decode_num_accepted_tokens_per_pos_total{position=0}"] == max(per_position.values()) <= drafts
    assert sum(per_position.values()) == accepted
    assert {"spec_decode_num_drafts", "spec_decode_num_accepted_tokens_per_pos"} <= {
      name.removesuffix("_total") for name in said}
    assert server.stop() == 0


# Draft models

@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
  """A smaller model with the same vocabulary."""
  return tiny_model(tmp_path_factory.mktemp("other"), seed=7, words=True, num_hidden_layers=1, hidden_size=16)


@pytest.fixture(scope="module")
def twins(words_folder):
  """A model that is its own draft model."""
  engine = LLM(words_folder, **OPTIONS, speculative_config={"model": str(words_folder), "num_speculative_tokens": 3})
  for _ in engine.capture([16], optional=True): pass
  return engine


@pytest.fixture(scope="module")
def strangers(words_folder, other_folder):
  engine = LLM(words_folder, **OPTIONS, speculative_config={"model": other_folder, "num_speculative_tokens": 3})
  for _ in engine.capture([16], optional=True): pass
  return engine


class TestDraftModel:
  @pytest.mark.parametrize("case", [case for case in CASES if case not in UNDRAFTED and case != "n"] + ["n"])
  def test_own_draft_model_is_always_accepted(self, plain, twins, case):
    params = [sampled(24, **{"seed": i, **CASES[case]}) for i in range(3)]
    jobs = [tokens(prompt(5 + 6 * i, case, i)) for i in range(3)]
    count, expected = Counts(twins), plain.generate(jobs, params, False)
    same(twins.generate(jobs, params, False), expected)
    for job, p, output in zip(jobs, params, expected, strict=True): same(twins.generate([job], [p], False), [output])
    _, proposed, accepted = count()
    assert accepted == proposed and (proposed > 50 or params[0].max_tokens == 3 or not params[0].ignore_eos)
    check_invariants(twins)

  @pytest.mark.parametrize("case", CASES)
  def test_other_draft_model_gives_equal_outputs(self, plain, strangers, case):
    params = [sampled(24, **{"seed": i, **CASES[case]}) for i in range(3)]
    jobs = [tokens(prompt(5 + 6 * i, case, i)) for i in range(3)]
    count, expected = Counts(strangers), plain.generate(jobs, params, False)
    same(strangers.generate(jobs, params, False), expected)
    for job, p, output in zip(jobs, params, expected, strict=True):
      same(strangers.generate([job], [p], False), [output])
    assert (count()[1] > 0) == (case not in UNDRAFTED)
    check_invariants(strangers)

  @pytest.mark.parametrize("seed", [20, 21, *slow(22, 23, 24, 25)])
  @pytest.mark.parametrize("drafter", ["itself", "other"])
  def test_random_operations_equal_expected_texts(self, words_folder, monkeypatch, drafter, seed):
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
  @pytest.mark.parametrize("seed", range(200, 208))
  @pytest.mark.parametrize("drafter", ["itself", "other"])
  def test_thousands_of_random_texts_equal_expected(self, words_folder, monkeypatch, drafter, seed):
    (_, proposed, accepted), _ = fuzz(words_folder, monkeypatch, seed, 200, drafter)
    assert accepted == proposed or drafter == "other"

  def test_own_draft_model_after_prefix_cache_hit_is_accepted(self, plain, twins):
    ids, count = prompt(30, "twins' cache"), Counts(twins)
    expected, = plain.generate(tokens(ids), greedy(50), False)
    for n in (0, 3, 17, 30):
      output, = twins.generate(tokens([*ids, *ids_of(expected)[:n]]), greedy(50 - n), False)
      assert ids_of(output) == ids_of(expected)[n:] and (n == 0 or output.num_cached_tokens >= 28)
    assert count()[1] == count()[2] > 80

  def test_own_draft_model_with_chunks_and_aborts_is_accepted(self, plain, twins):
    rng, count = random.Random(0), Counts(twins)
    jobs = [tokens(prompt([3, 50, 7, 41, 1][i % 5], "twins", i // 2)) for i in range(20)]
    params = [[greedy(30), sampled(20, seed=i), sampled(25, n=2, seed=i)][i % 3] for i in range(20)]
    expected, waiting, last = plain.generate(jobs, params, False), [*range(20)], {}
    while waiting or twins.has_unfinished_requests():
      if waiting and rng.random() < 0.5:
        i = waiting.pop()
        twins.add_request(str(i), jobs[i], params[i])
      if rng.random() < 0.05 and twins.requests:
        name = rng.choice([*twins.requests])
        twins.abort_request(name)
        waiting.append(int(name))
      last |= {output.request_id: output for output in twins.step()}
      check_invariants(twins)
    same([last[str(i)] for i in range(20)], expected)
    assert count()[1] == count()[2] > 100

  def test_own_draft_model_after_preemptions_and_failures_is_accepted(self, plain, words_folder, monkeypatch):
    engine = LLM(words_folder, **ENGINE, num_gpu_blocks_override=13,
                 speculative_config={"model": words_folder, "num_speculative_tokens": 3})
    count, jobs = Counts(engine), [prompt(3 + 3 * i, "twins", "small", i) for i in range(5)]
    expected = [ids_of(o) for o in plain.generate([tokens(ids) for ids in jobs], greedy(28), False)]
    for fails in (lambda place: False, once("launch", 6), once("read", 9), once("amid update", 12)):
      engine.blocks.cached_blocks.clear()
      engine.blocks.reset()
      for i, ids in enumerate(jobs): engine.add_request(str(i), tokens(ids), greedy(28))
      last = {}
      with monkeypatch.context() as patched:
        break_steps(engine, patched, fails)
        while engine.has_unfinished_requests():
          with contextlib.suppress(Failed): last |= {output.request_id: output for output in engine.step()}
          check_invariants(engine)
      assert [ids_of(last[str(i)]) for i in range(5)] == expected
    assert count()[1] == count()[2] > 50 and count.preemptions > 0

  def test_quantized_draft_model_is_mostly_accepted(self, plain, words_folder):
    config = {"method": "draft_model", "model": str(words_folder), "num_speculative_tokens": 2, "quantization": "int8"}
    engine, jobs = LLM(words_folder, **ENGINE, speculative_config=config), [tokens(prompt(9, "int8"))]
    count = Counts(engine)
    same_outputs(engine.generate(jobs, greedy(30), False), plain.generate(jobs, greedy(30), False))
    assert count()[1] >= count()[2] > 10, "int8 weights are nearly the same"

  @pytest.mark.parametrize("config, said", [
    ({"model": "/nowhere"}, ["/nowhere"]), ({"method": "ngram", "model": "words"}, ["method='ngram'", "model"]),
    ({"model": "words", "quantization": "int5"}, ["quantization='int5'", "int8"]), ({"model": 5}, ["model=5"]),
  ])
  def test_invalid_draft_model_config_raises(self, words_folder, config, said):
    config = {"num_speculative_tokens": 2, **config}
    if config["model"] == "words": config["model"] = str(words_folder)
    with pytest.raises(ValueError) as e: LLM(words_folder, **ENGINE, speculative_config=config)
    assert all(x in str(e.value) for x in said), str(e.value)

  @pytest.mark.parametrize("config, name", [
    ({"method": "ngram", "quantization": "int8"}, "quantization='int8'"),
    ({"model": "words", "prompt_lookup_max": 3}, "prompt_lookup_max=3")])
  def test_option_without_effect_raises(self, words_folder, config, name):
    with pytest.raises(ValueError, match=f"{name} has no effect"):
      LLM(words_folder, **ENGINE, speculative_config={"num_speculative_tokens": 2, **config})

  def test_draft_statistics_of_server_log(self):
    assert draft_statistics({"steps": 5}) == draft_statistics({"spec_decode_num_draft_tokens": 0}) == ""
    found = {"spec_decode_num_drafts": 4, "spec_decode_num_draft_tokens": 20, "spec_decode_num_accepted_tokens": 15}
    assert draft_statistics(found) == ", Draft acceptance rate: 75.0%, Mean acceptance length: 4.75"

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
    free = 300_000   # bytes: room for one of the two
    monkeypatch.setattr("tinyvllm.backend.Backend.free_memory", lambda backend, device: free)
    LLM(words_folder, **ENGINE)
    with pytest.raises(ValueError) as e:
      LLM(words_folder, **ENGINE, speculative_config={"model": words_folder, "num_speculative_tokens": 2})
    assert "speculative_config" in str(e.value) or "draft" in str(e.value)
    assert any(x in str(e.value) for x in ("raise", "lower", "smaller", "free"))
