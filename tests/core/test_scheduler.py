"""The scheduler and the block manager alone, under random operations. The fake model's next token depends on the length
of the sequence, and its cache holds for each position the tokens up to it, so that every read can be checked."""
import collections
import hashlib
import random
from unittest.mock import Mock

import pytest
from helpers.engines import check_pool, check_scheduler, check_states
from helpers.parameters import slow

from tinyvllm import SamplingParams
from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine
from tinyvllm.request import Sequence
from tinyvllm.scheduler import BlockManager, Scheduler
from tinyvllm_extra.cache.snapshots import StatePool
from tinyvllm_extra.serving.engine_metrics import MeteredScheduler, RequestMetrics
from tinyvllm_extra.options import LLMConfig


class ReadingProcessor:
  """A LogitsProcessor whose logits depend on the output."""
  depends_on_output = True
  def accept(self, token): return False


def make_sequence(tokens=(1,), order=(0, 0), max_len=64, processor=None, **options):
  params = SamplingParams(**{"temperature": 0.0, **options})
  return Sequence(request_id=str(order[1]), tokens=list(tokens), params=params, seed=0, order=order, index=order[-1],
                  stop_ids=set(), max_len=min(max_len, len(tokens) + params.max_tokens), processor=processor)


class FakeEngine:
  """A scheduler with a fake model, checked after every operation. max_len: maximum tokens of a sequence, limited by the
  pool as in the engine. caching: enable the prefix cache. overlaps: read a step after the next one is scheduled, as on
  a GPU. unread: the launched but unread step: its positions, its sampled tokens and the cache content it writes."""
  proposer = None   # Engine._needs_sync reads it

  def __init__(self, blocks=12, block_size=4, seqs=4, budget=8, policy="fcfs", max_len=64, caching=False,
               overlaps=False):
    self.config = LLMConfig(block_size=block_size, max_num_seqs=seqs, max_num_batched_tokens=budget,
                               max_model_len=max_len, scheduling_policy=policy, enable_prefix_caching=caching)
    self.blocks = BlockManager(blocks + 1, self.config)
    self.scheduler = MeteredScheduler(self.config, self.blocks)
    self.max_len, self.overlaps, self.has_samples = min(max_len, blocks * block_size), overlaps, False
    self.seqs, self.content, self.streams = [], {}, {}
    self.unread = self.no_step = {}, {}, {}

  def add(self, prompt=3, n=5, priority=0, family=0, samples=1, reads=False):
    """Prompts of one family have a common prefix. reads: sampling needs the previous token to have been read."""
    assert prompt < self.max_len, "the engine refuses longer prompts"
    tokens, i = [10_000 * family + j for j in range(prompt)], len(self.seqs)
    runs = [make_sequence(tokens, (priority, i, k), self.max_len, ReadingProcessor() if reads else None, max_tokens=n)
            for k in range(samples)]
    RequestMetrics(runs)
    runs[0].siblings += runs[1:]
    self.has_samples |= samples > 1
    self.seqs += runs
    self.scheduler.add(runs[0])
    self.check()
    return runs[0]

  def tokens_up_to(self, seq, position):
    """Return the expected cache content of a position: all tokens up to it, including unread ones."""
    return (*seq.tokens[:position + 1], *range(1000 + len(seq.tokens), 1001 + position))

  def cache_position(self, seq, position):
    return seq.block_table[position // self.blocks.block_size], position % self.blocks.block_size

  def step(self, failure=None):
    """Run a step as the engine does, check its batch and return it. failure: "launch", or "record", the update with the
    results that are read."""
    scheduler = self.scheduler
    if any(Engine._needs_sync(self, seq) for seq in scheduler.running):   # the engine then reads the results first
      self.read(self.unread)
      self.unread = self.no_step
    running = {*scheduler.running}
    unread = {s for s in self.unread[1] if s.processor and not s.finish_reason}   # needs the results
    decoding = {s for s in running - unread if s.num_remaining == 1 and not s.reached_max_len}
    # With priorities or parallel samples, the oldest may wait for a slot and blocks; otherwise it is never delayed
    may_wait = self.config.scheduling_policy == "priority" or self.has_samples
    waiting = [] if may_wait and scheduler.running else scheduler.waiting
    oldest = min([*scheduler.running, *waiting], key=lambda s: s.order, default=None)
    batch = scheduler.schedule()
    assert sum(batch.values()) <= self.config.max_num_batched_tokens and len(batch) <= self.config.max_num_seqs
    check_pool(self.blocks, [seq.block_table for seq in self.seqs])
    assert all(s in batch for s in decoding if s.slot is not None), "a decoding sequence must get a token in every step"
    assert not unread & {*batch}, "a step needs an unread token"
    order = [seq.num_remaining > 1 for seq in batch if seq in running]
    assert order == sorted(order), "decodes must precede prefills"
    assert not oldest or oldest.reached_max_len or oldest in unread or oldest in batch, "the oldest makes no progress"
    assert oldest not in running or oldest.slot is not None, "the oldest was preempted"
    for seq, n in batch.items():
      assert seq.slot is not None and 1 <= n <= seq.num_remaining
      assert len(seq.block_table) == -(-(seq.num_computed + n) // self.blocks.block_size), "too few or too many blocks"
      for i in range(seq.num_computed):
        assert self.content[self.cache_position(seq, i)] == self.tokens_up_to(seq, i), "wrong content"
    sampled = {seq: 1000 + seq.length for seq, n in batch.items() if n == seq.num_remaining}
    computed = {seq: range(seq.num_computed, seq.num_computed + n) for seq, n in batch.items()}
    scheduler.start_step(batch)
    step = computed, sampled, self.write(computed)
    ready, self.unread = (self.unread, step) if self.overlaps else (step, self.no_step)
    if failure == "launch":
      self.content |= dict.fromkeys([*ready[2], *step[2]], "garbage")
      self.recover()
    else:
      self.read(ready, failure)
      if failure: self.recover()
    self.check()
    return batch

  def read(self, step, failure=None):
    """Append the tokens of a step; on a failure, only every other one."""
    sampled = {seq: token for seq, token in step[1].items() if not seq.finish_reason}
    self.scheduler.update(step[0], sampled if failure is None else dict([*sampled.items()][::2]))

  def write(self, computed):
    """Write the cache content of a step and return it by block and offset."""
    entries, readable = {}, {*+self.blocks.shared, *self.blocks.cached_blocks.values()}
    for seq, positions in computed.items():
      for i in positions:
        block, offset = self.cache_position(seq, i)
        assert block not in readable, "a write to a shared or cached block"
        assert (block, offset) not in entries, "two tokens at one cache position"
        entries[block, offset] = self.tokens_up_to(seq, i)
    self.content |= entries
    return entries

  def recover(self):
    """Reset as the engine does after a failed step."""
    self.unread = self.no_step
    forks = {fork for seq in self.seqs for fork in seq.siblings}
    self.scheduler.reset({seq for seq in self.seqs if not seq.finish_reason} - forks)
    assert not self.scheduler.running and self.blocks.num_used() == 0

  def abort(self, seq):
    for run in [seq, *seq.siblings]: self.scheduler.finish(run, "abort")
    seq.siblings = []
    self.check()

  def check(self):
    check_scheduler(self.scheduler, self.blocks)
    alive, forks = {*self.scheduler.running, *self.scheduler.waiting}, {f for s in self.seqs for f in s.siblings}
    assert alive | forks == {s for s in self.seqs if not s.finish_reason}, "a request is lost"
    assert not alive & forks, "a sample runs before its prompt is computed"
    for seq in self.seqs:
      if seq not in alive: assert not seq.block_table and seq.slot is None
    for key, block in self.blocks.cached_blocks.items():
      entries = [(block, offset) for offset in range(self.blocks.block_size)]
      content = self.streams.setdefault(key, self.content[entries[-1]])
      expected = [content[:len(content) - i] for i in range(len(entries))][::-1]
      assert [self.content[entry] for entry in entries] == expected
      assert not {*entries} & {*self.unread[2]}, "a block is cached before its step was read"

  def check_end(self):
    """Finish all requests, and check that all blocks are free and no token was lost or repeated."""
    for _ in range(sum(seq.max_len for seq in self.seqs) + 10):   # a step advances at least one of them by one token
      if self.scheduler.running or self.scheduler.waiting: self.step()
    assert not self.scheduler.running and not self.scheduler.waiting, "the requests do not finish"
    assert self.blocks.num_used() == 0
    for seq in self.seqs:
      output = seq.tokens[seq.num_prompt:]
      assert output == [1000 + i for i in range(seq.num_prompt, len(seq.tokens))], "a token was lost or repeated"
      assert seq.finish_reason in ("length", "abort")
      assert seq.finish_reason == "abort" or len(seq.tokens) == seq.max_len, "finished too early"


def run_random(engine, rng, make_request):
  """Run a thousand random operations, and finish all requests. make_request: returns the arguments of `add`."""
  for _ in range(1000):
    live = [*engine.scheduler.running, *engine.scheduler.waiting]
    if len(live) < 8 and rng.random() < 0.4: engine.add(*make_request())
    elif live and rng.random() < 0.05: engine.abort(rng.choice(live))
    else: engine.step(failure=rng.choice(["launch", "record"]) if rng.random() < 0.02 else None)
  engine.check_end()


@pytest.mark.parametrize("seed", [*range(8), *slow(*range(8, 20))])
def test_scheduler_thousand_random_operations_keep_invariants(seed):
  rng, (size, caching) = random.Random(seed), [(4, True), (1, True), (3, True), (4, False)][seed % 4]
  engine = FakeEngine(64 // size, size, 5, 16, "priority" if seed % 3 == 0 else "fcfs", 64, caching, seed // 4 % 2 == 1)

  def make_request():
    priority = rng.randint(-2, 2) if seed % 3 == 0 else 0
    samples, reads = rng.choice([1, 1, 1, 2, 3]), rng.random() < 0.3
    return rng.randint(1, 40), rng.randint(1, 24), priority, rng.randint(0, 2), samples, reads
  run_random(engine, rng, make_request)
  totals = engine.scheduler.counters
  assert totals["num_preemptions"] > 10 and (totals["prefix_cache_hits"] > 100) == caching, "too few cases"


class FakeStates(StatePool):
  """Recurrent states that hold the tokens up to a position. rows: by number."""
  def __init__(self, slots, num_snapshots):
    self.padding, self.num_hits = slots, 0
    self.free_rows = [*range(slots + 1, slots + 1 + num_snapshots)]
    self.snapshots, self.rows = collections.OrderedDict(), {}

  def copy(self, pairs): self.rows |= {target: self.rows[source] for source, target in pairs}


class HybridEngine(FakeEngine):
  """A FakeEngine of a model with recurrent states, which checks each state that a step reads."""
  def __init__(self, num_snapshots, *args):
    super().__init__(*args)
    self.num_snapshots, self.states = num_snapshots, FakeStates(self.config.max_num_seqs, num_snapshots)
    self.scheduler.states = self.states

  def write(self, computed):
    for seq, positions in computed.items():
      if positions.start: assert self.states.rows[seq.slot] == self.tokens_up_to(seq, positions.start - 1)
      self.states.rows[seq.slot] = self.tokens_up_to(seq, positions.stop - 1)
    return super().write(computed)

  def recover(self):
    self.states.rows |= dict.fromkeys(range(self.states.padding + 1), "garbage")
    super().recover()

  def check(self):
    super().check()
    check_states(self.states, self.num_snapshots)


@pytest.mark.parametrize("seed", [*range(4), *slow(*range(4, 20))])
def test_hybrid_thousand_random_operations_lose_no_state(seed, monkeypatch):
  """With no, one and few snapshots, and sequences as long as the pool."""
  monkeypatch.setattr("tinyvllm_extra.cache.snapshots.INTERVAL", 12)
  rng, size = random.Random(seed), [4, 1, 3, 4][seed % 4]
  engine = HybridEngine([40, 8, 1, 0][seed % 4], 64 // size, size, 5, 16, "fcfs", 64, True, seed // 4 % 2 == 0)
  run_random(engine, rng, lambda: (
    rng.choice([rng.randint(1, 40), 62]), rng.randint(1, 24), 0, rng.randint(0, 2), rng.choice([1, 1, 3])))
  assert engine.scheduler.counters["num_preemptions"] > 10
  assert (engine.states.num_hits > 20) == (engine.num_snapshots > 0)


def test_schedule_decodes_first_then_fills_budget_with_prefills():
  engine = FakeEngine(blocks=40, seqs=4, budget=8)
  a, b = engine.add(prompt=2), engine.add(prompt=3)
  assert engine.step() == {a: 2, b: 3}
  c, d = engine.add(prompt=9), engine.add(prompt=5)
  assert list(engine.step().items()) == [(a, 1), (b, 1), (c, 6)]
  assert list(engine.step().items()) == [(a, 1), (b, 1), (c, 3), (d, 3)]
  assert list(engine.step().items()) == [(a, 1), (b, 1), (c, 1), (d, 2)]


def test_schedule_gives_token_budget_of_preempted_sequence_to_the_next():
  """The newest sequence decodes first; then the oldest one's prefill needs its block."""
  config = EngineConfig(block_size=4, max_num_batched_tokens=8, max_num_seqs=4)
  scheduler = Scheduler(config, BlockManager(6, config))
  first, second, newest = (make_sequence(range(1, n), order=(0, i)) for i, n in enumerate((10, 10, 3)))
  for slot, (seq, num_computed) in enumerate([(first, 4), (second, 5), (newest, 1)]):
    scheduler.blocks.allocate(seq.block_table, num_computed)
    seq.num_computed, seq.slot = num_computed, slot
    scheduler.running.append(seq)
  assert scheduler.schedule() == {first: 5, second: 3} and scheduler.waiting == [newest]


@pytest.mark.parametrize(("num_blocks", "jobs", "is_enough"), [
  (4, [(4, 5)] * 2, True), (3, [(4, 5)] * 2, False),   # the ninth token needs no K and V
  (10, [(20, 19), (24, 3)], True)])   # a prompt waits until all of it fits, not only its first chunks
def test_sequences_that_fit_the_pool_are_not_preempted(num_blocks, jobs, is_enough):
  engine = FakeEngine(blocks=num_blocks, seqs=2, budget=8)
  for prompt, n in jobs: engine.add(prompt, n)
  engine.check_end()
  assert (engine.scheduler.counters["num_preemptions"] == 0) == is_enough


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 12])
def test_sequence_ends_at_the_length_that_fills_the_pool(block_size, overlaps):
  """The oldest one is never preempted; the others are, some with all tokens except the last."""
  engine = FakeEngine(blocks=12 // block_size, block_size=block_size, seqs=3, overlaps=overlaps)
  for prompt, family in ((5, 0), (5, 1), (5, 2), (10, 3), (10, 4)): engine.add(prompt, n=99, family=family)
  engine.check_end()
  assert [len(seq.tokens) for seq in engine.seqs] == [12] * 5


def test_allocate_reuses_uncached_blocks_then_least_recently_used():
  engine = FakeEngine(blocks=12, seqs=2, budget=48, caching=True)
  for family, prompt in ((0, 8), (1, 8), (2, 12)):
    engine.add(prompt=prompt, n=2, family=family)   # 2, 2 and 3 full blocks, and one partial block each
    engine.check_end()
  assert (len(engine.blocks.evictable), len(engine.blocks.free_blocks)) == (7, 5)
  engine.add(prompt=16, n=5, family=3)   # takes the five free blocks
  engine.check_end()
  assert (len(engine.blocks.evictable), len(engine.blocks.free_blocks)) == (12, 0), "all five are full and cached"
  engine.add(prompt=4, n=1, family=4)
  engine.check_end()
  hits = []
  for family, prompt in ((3, 17), (2, 13), (1, 9), (0, 9)):
    seq = make_sequence([10_000 * family + j for j in range(prompt)])
    engine.blocks.match_prefix(seq)
    hits.append(seq.num_computed)
    engine.blocks.free(seq)
  assert hits == [16, 12, 8, 4], "only the last block of the first prompt was evicted"


def test_waiting_prompt_hashes_each_block_once(monkeypatch):
  engine, sha256 = FakeEngine(blocks=12, budget=48, caching=True), Mock(wraps=hashlib.sha256)
  monkeypatch.setattr("tinyvllm.scheduler.hashlib.sha256", sha256)
  engine.add(prompt=24, n=20)
  engine.step()
  waiting, num_steps = engine.add(prompt=47, n=1), 0   # needs all 12 blocks and shares only 6 of the 7 used ones
  while waiting in engine.scheduler.waiting:
    engine.step()
    num_steps += 1
  engine.check_end()
  assert num_steps > 10 and sha256.call_count <= sum(len(seq.tokens) // 4 for seq in engine.seqs)


def test_preemption_is_logged_at_powers_of_two(caplog):
  engine = FakeEngine(blocks=6, seqs=4, budget=24)
  with caplog.at_level("WARNING", "tinyvllm"):
    while engine.scheduler.counters["num_preemptions"] < 20:
      for _ in range(3): engine.add(prompt=7, n=17)
      engine.check_end()
  counts = [int(record.getMessage().split(" preemptions: ")[0]) for record in caplog.records]
  assert counts == [2**i for i in range(engine.scheduler.counters["num_preemptions"].bit_length())]
  assert all(option in caplog.text for option in ("max_num_seqs", "gpu_memory_utilization")), "a remedy is missing"
