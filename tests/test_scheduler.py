"""The scheduler and the block manager alone, under random operations. The fake model's next token depends on the length
of the sequence, and its cache holds for each position the tokens up to it, so that every read can be checked."""
import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from reference import check_pool, check_scheduler

from tinyvllm import SamplingParams
from tinyvllm.config import EngineConfig
from tinyvllm.engine import LLMEngine
from tinyvllm.request import Sequence
from tinyvllm.scheduler import BlockManager, Scheduler
from tinyvllm_extra.metrics import MeteredScheduler, RequestMetrics


class ReadsOutput:
  """A LogitsProcessor whose logits depend on the output."""
  depends_on_output = True
  def accept(self, token): return False


def make_sequence(tokens=(1,), order=(0, 0), max_len=64, processor=None, **options):
  params = SamplingParams(**{"temperature": 0.0, **options})
  return Sequence(request_id=str(order[1]), tokens=list(tokens), params=params, seed=0, order=order, index=order[-1],
                  stop_ids=set(), max_len=min(max_len, len(tokens) + params.max_tokens), processor=processor)


class Bench:
  """A scheduler with a fake model, checked after every operation. max_len: maximum tokens of a sequence; at most those
  that the pool holds, as in the engine. caching: the prefix cache. overlaps: a step is read after the next one was
  scheduled, as on a GPU. unread: the launched step that was not read, its tokens and the cache positions it writes."""
  proposer = None   # as in an engine without one

  def __init__(self, blocks=12, block_size=4, seqs=4, budget=8, policy="fcfs", max_len=64, caching=False,
               overlaps=False):
    config = EngineConfig(block_size=block_size, max_num_seqs=seqs, max_num_batched_tokens=budget,
                          max_model_len=max_len, scheduling_policy=policy, enable_prefix_caching=caching)
    self.config, self.overlaps = config, overlaps
    self.blocks = BlockManager(blocks + 1, config)
    self.max_len = min(max_len, self.blocks.num_free() * block_size)
    self.scheduler = MeteredScheduler(config, self.blocks)
    self.samples = False
    self.all, self.steps, self.content, self.streams = [], 0, {}, {}
    self.unread = self.nothing = {}, {}, {}

  def add(self, prompt=3, n=5, priority=0, family=0, samples=1, reads=False):
    """Prompts of one family have a common prefix. reads: sampling needs the token before, which must have been read."""
    assert prompt < self.max_len, "the engine would refuse it"
    tokens, i = [10_000 * family + j for j in range(prompt)], len(self.all)
    runs = [make_sequence(tokens, (priority, i, k), self.max_len, ReadsOutput() if reads else None, max_tokens=n)
            for k in range(samples)]
    RequestMetrics(runs)
    runs[0].siblings += runs[1:]
    self.samples |= samples > 1
    self.all += runs
    self.scheduler.add(runs[0])
    self.check()
    return runs[0]

  def text(self, seq, position):
    """The cache content that belongs to a position: all tokens up to it, including unread ones."""
    return (*seq.tokens[:position + 1], *range(1000 + len(seq.tokens), 1001 + position))

  def place(self, seq, position):
    return seq.block_table[position // self.blocks.block_size], position % self.blocks.block_size

  def step(self, fails=None):
    """Run a step as the engine does, check its batch and return it. fails: "launch", or "record", the update with the
    results of the step that is read."""
    scheduler = self.scheduler
    if any(LLMEngine._needs_sync(self, seq) for seq in scheduler.running):   # then all wait for the results
      self.read(self.unread)
      self.unread = self.nothing
    running = {*scheduler.running}
    unread = {s for s in self.unread[1] if s.processor and not s.finish_reason}   # must be read first
    decoding = {s for s in running - unread if s.num_remaining == 1 and not s.reached_max_len}
    # The oldest one is never delayed, except by the wait for a slot and blocks: with priorities, or for a sample
    later = self.config.scheduling_policy == "priority" or self.samples
    waiting = [] if later and scheduler.running else scheduler.waiting
    oldest = min([*scheduler.running, *waiting], key=lambda s: s.order, default=None)
    batch = scheduler.schedule()
    self.steps += 1
    assert sum(batch.values()) <= self.config.max_num_batched_tokens and len(batch) <= self.config.max_num_seqs
    assert all(seq.slot is not None and 1 <= n <= seq.num_remaining for seq, n in batch.items())
    room = {seq: len(seq.block_table) * self.blocks.block_size for seq in batch}
    assert all(room[seq] >= seq.num_computed + n for seq, n in batch.items()), "tokens without a block"
    check_pool(self.blocks, [seq.block_table for seq in self.all])
    left_out = {s for s in decoding if s.slot is not None and s not in batch}
    assert not left_out, "a decoding sequence gets a token in every step"
    assert not unread & {*batch}, "a step needs a token that was not read"
    order = [seq.num_remaining > 1 for seq in batch if seq in running]
    assert order == sorted(order), "decodes before prefills"
    assert not oldest or oldest.reached_max_len or oldest in unread or oldest in batch, "the oldest makes no progress"
    assert oldest not in running or oldest.slot is not None, "the oldest was preempted"
    for seq in batch:
      for i in range(seq.num_computed): assert self.content[self.place(seq, i)] == self.text(seq, i), "wrong content"
    sampled = {seq: 1000 + seq.length for seq, n in batch.items() if n == seq.num_remaining}
    computed = {seq: range(seq.num_computed, seq.num_computed + n) for seq, n in batch.items()}
    scheduler.start_step(batch)
    step = computed, sampled, self.write(computed)
    ready, self.unread = (self.unread, step) if self.overlaps else (step, self.nothing)
    if fails == "launch":
      self.content |= dict.fromkeys([*ready[2], *step[2]], "garbage")
      self.recover()
    else:
      self.read(ready, fails)
      if fails: self.recover()
    self.check()
    return batch

  def read(self, step, fails=None):
    """Append the tokens of a step; if that fails, only every other one."""
    sampled = {seq: token for seq, token in step[1].items() if not seq.finish_reason}
    self.scheduler.update(step[0], sampled if fails is None else dict([*sampled.items()][::2]))

  def write(self, computed):
    """Write the cache content of a step, and return it by block and offset."""
    places, readable = {}, {*self.blocks.shared, *self.blocks.cached_blocks.values()}
    for seq, positions in computed.items():
      for i in positions:
        block, offset = self.place(seq, i)
        assert block not in readable, "a write to a block that others read"
        assert (block, offset) not in places, "two tokens at one cache position"
        places[block, offset] = self.text(seq, i)
    self.content |= places
    return places

  def recover(self):
    """Reset as the engine does after a failed step."""
    self.unread = self.nothing
    forks = {fork for seq in self.all for fork in seq.siblings}
    self.scheduler.reset({seq for seq in self.all if not seq.finish_reason} - forks)
    assert not self.scheduler.running and self.blocks.num_used() == 0

  def abort(self, seq):
    for run in [seq, *seq.siblings]: self.scheduler.finish(run, "abort")
    seq.siblings = []
    self.check()

  def check(self):
    check_scheduler(self.scheduler, self.blocks)
    live, forks = {*self.scheduler.running, *self.scheduler.waiting}, {f for s in self.all for f in s.siblings}
    assert live | forks == {s for s in self.all if not s.finish_reason}, "a request is lost"
    assert not live & forks, "a sample runs before its prompt is computed"
    for seq in self.all:
      if seq not in live: assert not seq.block_table and seq.slot is None
    for key, block in self.blocks.cached_blocks.items():
      places = [(block, offset) for offset in range(self.blocks.block_size)]
      text = self.streams.setdefault(key, self.content[places[-1]])
      assert [self.content[place] for place in places] == [text[:len(text) - i] for i in range(len(places))][::-1]
      assert not {*places} & {*self.unread[2]}, "a block is cached before its step was read"

  def finish(self):
    """Step until all requests end: each step must advance at least one of them by one token."""
    for _ in range(sum(seq.max_len for seq in self.all) + 10):
      if not self.scheduler.running and not self.scheduler.waiting: return
      self.step()
    raise AssertionError("requests do not end")

  def ended_well(self):
    """Finish, and check that all blocks are free and no token was lost or repeated."""
    self.finish()
    assert self.blocks.num_used() == 0
    for seq in self.all:
      output = seq.tokens[seq.num_prompt:]
      assert output == [1000 + i for i in range(seq.num_prompt, len(seq.tokens))], "a token was lost or repeated"
      assert seq.finish_reason in ("length", "abort")
      assert seq.finish_reason == "abort" or len(seq.tokens) == seq.max_len, "ended too early"


class Machine(RuleBasedStateMachine):
  """Requests of a few families, with samples, priorities, aborts and failed steps, in a pool that is too small."""
  @initialize(size=st.sampled_from([1, 2, 4, 16]), blocks=st.integers(11, 30), seqs=st.integers(1, 6),
              more=st.integers(0, 12), policy=st.sampled_from(["fcfs", "priority"]), caching=st.booleans(),
              overlaps=st.booleans())
  def start(self, size, blocks, seqs, more, policy, caching, overlaps):
    self.bench = Bench(max(3, blocks * 4 // size), size, seqs, seqs + more, policy, 64, caching, overlaps)

  @rule(prompt=st.integers(1, 40), n=st.integers(1, 30), priority=st.integers(-2, 2), family=st.integers(0, 2),
        samples=st.sampled_from([1, 1, 1, 2, 3]), reads=st.booleans())
  def add(self, prompt, n, priority, family, samples, reads):
    priority = priority if self.bench.config.scheduling_policy == "priority" else 0
    self.bench.add(prompt, n, priority, family, samples, reads)

  @rule(fails=st.sampled_from([None] * 9 + ["launch", "record"]))
  def step(self, fails): self.bench.step(fails)

  @rule(times=st.integers(2, 8))
  def steps(self, times):
    for _ in range(times): self.bench.step()

  @rule(i=st.integers(0, 100))
  def abort(self, i):
    if live := [*self.bench.scheduler.running, *self.bench.scheduler.waiting]: self.bench.abort(live[i % len(live)])

  @invariant()
  def holds(self):
    if hasattr(self, "bench"): self.bench.check()

  def teardown(self):
    if hasattr(self, "bench"): self.bench.ended_well()


@pytest.mark.slow
def test_scheduler_any_operations_keep_invariants_and_end_every_request():
  """10,000 operations chosen by hypothesis, which shrinks failures; the next test runs 20,000 more."""
  run_state_machine_as_test(Machine, settings=settings(max_examples=200, stateful_step_count=50, deadline=None,
                                                       derandomize=True))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_scheduler_thousand_random_operations_keep_invariants(seed):
  rng, (size, caching) = random.Random(seed), [(4, True), (1, True), (2, True), (4, False)][seed % 4]
  bench = Bench(64 // size, size, 5, 16, "priority" if seed % 3 == 0 else "fcfs", 64, caching, seed // 4 % 2 == 1)
  for _ in range(1000):
    live = [*bench.scheduler.running, *bench.scheduler.waiting]
    if len(live) < 8 and rng.random() < 0.4:
      priority = rng.randint(-2, 2) if seed % 3 == 0 else 0
      samples, reads = rng.choice([1, 1, 1, 2, 3]), rng.random() < 0.3
      bench.add(rng.randint(1, 40), rng.randint(1, 24), priority, rng.randint(0, 2), samples, reads)
    elif live and rng.random() < 0.05: bench.abort(rng.choice(live))
    else: bench.step(fails=rng.choice(["launch", "record"]) if rng.random() < 0.02 else None)
  bench.ended_well()
  totals = bench.scheduler.counters
  assert totals["num_preemptions"] > 10 and (totals["prefix_cache_hits"] > 100) == caching, "cases not reached"


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_sequence_recomputes_only_uncached_tokens(caching):
  bench = Bench(blocks=12, seqs=4, budget=48, caching=caching)
  first, second, third = (bench.add(prompt=12, n=30, family=i) for i in range(3))
  computed = lost = 0
  while bench.scheduler.running or bench.scheduler.waiting:
    had = {seq: seq.num_computed for seq in bench.scheduler.running}
    computed += sum(bench.step().values())
    lost += sum(n for seq, n in had.items() if seq in bench.scheduler.waiting)
  again = computed - sum(len(seq.tokens) - 1 for seq in bench.all)   # without the last token's K and V
  totals = bench.scheduler.counters
  assert totals["num_preemptions"] >= 2 and [seq.num_generated for seq in (first, second, third)] == [30] * 3
  assert again == lost - totals["prefix_cache_hits"] > 12 and (totals["prefix_cache_hits"] > 0) == caching


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.booleans()), max_size=60), st.integers(2, 20),
       st.integers(1, 7))
def test_block_manager_never_loses_or_duplicates_a_block(todo, num_blocks, block_size):
  blocks, seqs = BlockManager(num_blocks, EngineConfig(block_size=block_size)), [make_sequence() for _ in range(6)]
  for i, n, release in todo:
    table, old = seqs[i].block_table, list(seqs[i].block_table)
    if release: blocks.free(seqs[i])
    elif blocks.can_allocate(table, n):
      blocks.allocate(table, n)
      assert table[:len(old)] == old and len(table) == max(len(old), -(-n // block_size))
    else: assert -(-n // block_size) - len(table) > blocks.num_free()
    check_pool(blocks, [seq.block_table for seq in seqs])


def test_allocate_grows_a_table_only_when_needed():
  blocks, table = BlockManager(9, EngineConfig(block_size=4)), []
  for n, held in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
    blocks.allocate(table, n)
    assert len(table) == held == blocks.num_used()


def test_sequence_holds_no_unneeded_block():
  bench = Bench(blocks=20, budget=8)
  seq = bench.add(prompt=11, n=10)
  while not seq.finish_reason:
    bench.step()
    if not seq.finish_reason: assert len(seq.block_table) == -(-seq.num_computed // 4)


def test_schedule_puts_decodes_first_and_fills_budget_with_prompts():
  bench = Bench(blocks=40, seqs=4, budget=8)
  a, b = bench.add(prompt=2), bench.add(prompt=3)
  assert bench.step() == {a: 2, b: 3}
  c, d = bench.add(prompt=9), bench.add(prompt=5)
  assert list(bench.step().items()) == [(a, 1), (b, 1), (c, 6)]
  assert list(bench.step().items()) == [(a, 1), (b, 1), (c, 3), (d, 3)]
  assert list(bench.step().items()) == [(a, 1), (b, 1), (c, 1), (d, 2)]


def test_request_preempted_just_before_filling_the_pool_resumes():
  bench = Bench(blocks=3, block_size=1, seqs=2, budget=8)
  first, second = bench.add(prompt=1, n=9), bench.add(prompt=1, n=9)
  bench.step()
  bench.step()
  assert bench.scheduler.waiting == [second] and len(second.tokens) == 2
  bench.ended_well()
  assert first.num_generated == second.num_generated == 2, "the pool holds two more tokens than the prompt"


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 12])
def test_one_sequence_may_fill_the_pool_without_preemption(block_size, overlaps):
  bench = Bench(blocks=12 // block_size, block_size=block_size, seqs=3, overlaps=overlaps)
  first, others = bench.add(prompt=5, n=99), [bench.add(prompt=5, n=99, family=i) for i in (1, 2)]
  before = 0
  while not first.finish_reason:
    bench.step()
    if not first.reached_max_len: assert first.slot is not None and first.num_computed > before, "a token in every step"
    before = first.num_computed
  bench.ended_well()
  assert [len(seq.tokens) for seq in (first, *others)] == [12] * 3


def test_two_sequences_filling_the_pool_exactly_are_not_preempted():
  bench = Bench(blocks=4, seqs=2, budget=8)
  first, second = bench.add(prompt=4, n=5), bench.add(prompt=4, n=5)   # the ninth token needs no K and V
  most = 0
  while not second.finish_reason:
    bench.step()
    most = max(most, bench.blocks.num_used())
  assert most == 4 and bench.scheduler.counters["num_preemptions"] == 0
  bench.ended_well()
  assert first.num_generated == second.num_generated == 5


def test_tokens_in_flight_at_abort_or_failure_are_not_cached():
  for fails in (None, "launch", "record"):
    bench = Bench(blocks=20, budget=16, caching=True, overlaps=True)
    first, other = bench.add(prompt=9, n=9), bench.add(prompt=1, n=30, family=1)
    bench.step()   # in flight
    bench.abort(first)
    bench.step(fails)
    again = bench.add(prompt=9, n=9)
    bench.step()
    assert again.num_cached == 0 and len(bench.blocks.cached_blocks) == 0
    bench.ended_well()
    assert other.finish_reason == "length"


def test_allocate_reuses_uncached_blocks_then_least_recently_used():
  bench = Bench(blocks=12, seqs=2, budget=48, caching=True)
  for family, prompt in ((0, 8), (1, 8), (2, 12)):
    bench.add(prompt=prompt, n=2, family=family)   # 2, 2 and 3 full blocks, and one partial block each
    bench.ended_well()
  assert (len(bench.blocks.evictable), len(bench.blocks.free_blocks)) == (7, 5)
  bench.add(prompt=16, n=5, family=3)   # takes the five free blocks
  bench.ended_well()
  assert (len(bench.blocks.evictable), len(bench.blocks.free_blocks)) == (12, 0), "all five are full and cached"
  bench.add(prompt=4, n=1, family=4)
  bench.ended_well()
  hits = []
  for family, prompt in ((3, 17), (2, 13), (1, 9), (0, 9)):
    seq = make_sequence([10_000 * family + j for j in range(prompt)])
    bench.blocks.match_prefix(seq)
    hits.append(seq.num_computed)
    bench.blocks.free(seq)
  assert hits == [16, 12, 8, 4], "the first prompt lost its newest block"


def test_allocate_reuses_the_uncached_copy_of_a_block_first():
  bench = Bench(blocks=12, budget=48, caching=True)
  twins = [bench.add(prompt=9, n=2) for _ in range(2)]
  bench.step()
  tables = [[*twin.block_table] for twin in twins]
  assert not {*tables[0]} & {*tables[1]} and len(bench.blocks.cached_blocks) == 2
  bench.ended_well()
  cached = {*bench.blocks.cached_blocks.values()}
  assert cached == {*bench.blocks.evictable} == {*tables[0][:2]}
  bench.add(prompt=40, n=1, family=1)   # all blocks except these two
  bench.step()
  assert {*bench.blocks.cached_blocks.values()} >= cached
  bench.ended_well()


class NotIterable(list):
  """A queue that refuses iteration."""
  def __iter__(self): raise AssertionError("a step iterates over the queue")
  def __contains__(self, x): raise AssertionError("a step searches the queue")


def test_schedule_does_not_iterate_over_the_waiting_queue():
  config = EngineConfig(block_size=4, max_num_seqs=2, max_num_batched_tokens=8)
  blocks = BlockManager(12, config)
  scheduler = Scheduler(config, blocks)
  scheduler.waiting = NotIterable()
  for i in range(100): scheduler.add(make_sequence([1, 2, 3], (0, i, 0), max_tokens=3))
  while len(scheduler.waiting) > 10:
    batch = scheduler.schedule()
    computed = {seq: range(seq.num_computed, seq.num_computed + n) for seq, n in batch.items()}
    scheduler.start_step(batch)
    scheduler.update(computed, dict.fromkeys(batch, 7))


def test_schedule_runs_at_most_max_num_seqs():
  bench = Bench(blocks=40, seqs=2, budget=8)
  a, b, c = (bench.add(prompt=1, n=n) for n in (2, 4, 2))
  assert set(bench.step()) == {a, b} and c in bench.scheduler.waiting
  bench.step()
  assert a.finish_reason == "length" and set(bench.step()) == {b, c}


def test_waiting_request_is_not_overtaken_by_a_smaller_one():
  bench = Bench(blocks=10, seqs=4, budget=40)
  bench.add(prompt=20, n=8)
  bench.step()
  big, small = bench.add(prompt=30), bench.add(prompt=1)
  assert big not in (batch := bench.step()) and small not in batch
  assert bench.scheduler.waiting == [big, small]


def test_prompt_waits_until_all_of_it_fits():
  bench = Bench(blocks=10, seqs=2, budget=8)
  first, second = bench.add(prompt=20, n=19), bench.add(prompt=24, n=3)
  bench.ended_well()
  assert bench.scheduler.counters["num_preemptions"] == 0, "only its first chunks would have fit"
  assert first.num_generated == 19 and second.num_generated == 3


def test_preempt_newest_of_lowest_priority_which_keeps_its_order():
  bench = Bench(blocks=6, seqs=4, budget=24, policy="priority")
  high, low, lower = (bench.add(prompt=7, n=20, priority=p) for p in (0, 1, 2))
  assert set(bench.step()) == {high, low, lower}
  later = bench.add(prompt=1, n=1, priority=3)
  while not bench.scheduler.counters["num_preemptions"]: bench.step()
  assert bench.scheduler.running == [high, low] and bench.scheduler.waiting == [lower, later]
  assert lower.num_computed == 0 and lower.num_generated > 0, "its tokens are kept and recomputed"


def test_preemption_warnings_come_at_powers_of_two(caplog):
  bench = Bench(blocks=6, seqs=4, budget=24)
  with caplog.at_level(logging.WARNING, "tinyvllm"):
    while bench.scheduler.counters["num_preemptions"] < 20:
      for _ in range(3): bench.add(prompt=7, n=17)
      bench.finish()
  counts = [int(record.getMessage().split(" preemptions: ")[0]) for record in caplog.records]
  assert counts == [2**i for i in range(bench.scheduler.counters["num_preemptions"].bit_length())]
  assert all(option in caplog.text for option in ("max_num_seqs", "gpu_memory_utilization")), "a remedy is missing"


def test_finish_of_a_waiting_or_finished_sequence_changes_nothing_else():
  bench = Bench(seqs=1)
  a, b, c = (bench.add() for _ in range(3))
  bench.step()
  bench.abort(b)
  bench.abort(a)
  assert bench.scheduler.waiting == [c] and not bench.scheduler.running and bench.blocks.num_used() == 0
  bench.finish()
  assert c.finish_reason == "length" and c.num_generated == 5


@pytest.mark.parametrize("budget", [1, 2, 5, 16])
def test_single_request_takes_the_fewest_steps(budget):
  bench = Bench(blocks=20, seqs=1, budget=budget)
  bench.add(prompt=16, n=6)
  bench.finish()
  assert bench.steps == -(-16 // budget) + 5


@pytest.mark.parametrize("block_size", [1, 4, 12])
@pytest.mark.parametrize("overlaps", [False, True])
def test_two_sequences_filling_the_pool_exactly_run_together(block_size, overlaps):
  bench = Bench(blocks=24 // block_size, block_size=block_size, budget=24, overlaps=overlaps)
  first, second = bench.add(prompt=12, n=1), bench.add(prompt=12, n=1, family=1)
  assert bench.step() == {first: 12, second: 12}, "the prompts alone fill the pool"
  bench.finish()
  first, second = bench.add(prompt=4, n=9), bench.add(prompt=4, n=9, family=1)   # 12 of 13 tokens are computed
  most = 0
  while bench.scheduler.running or bench.scheduler.waiting:
    bench.step()
    most = max(most, bench.blocks.num_used())
  bench.ended_well()
  assert bench.blocks.num_free() == 24 // block_size and bench.scheduler.counters["num_preemptions"] == 0
  assert first.num_generated == second.num_generated == 9


def test_step_of_an_aborted_sequence_caches_no_blocks():
  bench = Bench(blocks=20, budget=16, caching=True)
  first = bench.add(prompt=9)
  bench.scheduler.start_step(bench.scheduler.schedule())
  bench.abort(first)
  second = bench.add(prompt=9)
  assert bench.step() == {second: 9}
  bench.ended_well()


# Reuse of free blocks in a pool of 6 blocks of 4 tokens, where a prompt of 9 tokens and one output token fill 2 blocks
# and part of a third

def num_hits(bench, **request):
  """Run a request, and return the number of its tokens found in the prefix cache."""
  before = bench.scheduler.counters["prefix_cache_hits"]
  bench.add(**request)
  bench.finish()
  return bench.scheduler.counters["prefix_cache_hits"] - before


def test_allocate_takes_uncached_blocks_before_cached_ones():
  bench = Bench(blocks=6, budget=16, caching=True)
  for family in (1, 2): assert num_hits(bench, prompt=9, n=1, family=family) == 0
  assert num_hits(bench, prompt=5, n=1, family=3) == 0, "it takes the two partial blocks"
  assert [num_hits(bench, prompt=9, n=1, family=family) for family in (1, 2)] == [8, 8]


def test_allocate_evicts_the_least_recently_used_cached_blocks():
  bench = Bench(blocks=6, budget=16, caching=True)
  for family in (1, 2, 1): num_hits(bench, prompt=9, n=1, family=family)
  assert num_hits(bench, prompt=13, n=1, family=3) == 0, "it takes the two partial blocks and the second prompt's two"
  assert [num_hits(bench, prompt=9, n=1, family=family) for family in (1, 2)] == [8, 0]


def test_second_copy_of_a_block_is_uncached_and_reused_first():
  bench = Bench(blocks=6, budget=24, caching=True)
  copies = [bench.add(prompt=9, n=n) for n in (1, 2)]
  assert bench.step() == dict.fromkeys(copies, 9), "blocks that are being written are not shared"
  bench.finish()
  assert bench.blocks.num_free() == 6
  assert num_hits(bench, prompt=13, n=1, family=1) == 0, "it takes the two partial blocks and the two copies"
  assert num_hits(bench, prompt=9, n=1) == 8


def test_reuse_of_a_second_copy_keeps_the_first_cached():
  bench = Bench(blocks=6, budget=24, caching=True)
  first, second = bench.add(prompt=9, n=4), bench.add(prompt=9, n=2)
  assert bench.step() == {first: 9, second: 9}
  assert bench.step() == {first: 1, second: 1} and second.finish_reason
  other = bench.add(prompt=9, n=1, family=1)
  assert bench.step() == {first: 1, other: 9}, "it takes all blocks of the second"
  again = bench.add(prompt=9, n=1)
  assert bench.step() == {first: 1, again: 1}, "8 tokens are cached"
  bench.ended_well()
