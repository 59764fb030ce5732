"""The scheduler and the block manager alone, under random operations, with a model that is a function of the tokens."""
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import check_pool, check_scheduler

from tinyvllm import SamplingParams
from tinyvllm.config import EngineConfig
from tinyvllm.scheduler import BlockManager, Scheduler, Sequence


class Bench:
  """A scheduler with a fake model, checked after every operation."""
  def __init__(self, blocks=12, block_size=4, seqs=4, budget=8, policy="fcfs", max_len=64):
    config = EngineConfig(block_size=block_size, max_num_seqs=seqs, max_num_batched_tokens=budget,
                          max_model_len=max_len, scheduling_policy=policy)
    self.config, self.blocks, self.max_len = config, BlockManager(blocks + 1, block_size), max_len
    self.scheduler = Scheduler(config, self.blocks)
    self.all, self.steps = [], 0

  def add(self, prompt=3, n=5, priority=0):
    params = SamplingParams(temperature=0.0, max_tokens=n)
    i, tokens = len(self.all), list(range(prompt))
    self.all.append(seq := Sequence(str(i), tokens, prompt, params, 0, frozenset(), self.max_len, priority, i, prompt))
    self.scheduler.add(seq)
    self.check()
    return seq

  def step(self):
    """A step as the engine makes it, and what must hold of its batch. Returns the batch."""
    scheduler = self.scheduler
    decoding = {s for s in scheduler.running if s.remaining() == 1}
    waiting = [] if self.config.scheduling_policy == "priority" and scheduler.running else scheduler.waiting
    oldest = min([*scheduler.running, *waiting], key=lambda s: s.order, default=None)   # none is put off
    batch = scheduler.schedule()
    self.steps += 1
    assert sum(batch.values()) <= self.config.max_num_batched_tokens and len(batch) <= self.config.max_num_seqs
    assert all(seq.row is not None and 1 <= n <= seq.remaining() for seq, n in batch.items())
    room = {seq: len(seq.block_table) * self.blocks.block_size for seq in batch}
    assert all(room[seq] >= seq.num_computed + n for seq, n in batch.items()), "tokens without a block"
    check_pool(self.blocks, [seq.block_table for seq in self.all])
    left_out = {s for s in decoding if s.row is not None and s not in batch}
    assert not left_out, "a running sequence that decodes gets its token, whatever prompts there are"
    order = [seq.remaining() > 1 for seq in batch]
    assert order == sorted(order) or self.fresh(batch), "decodes before prefills"
    if oldest and not oldest.finish_reason: assert oldest in batch, "the oldest does not progress"
    sampled = {seq: 1000 + len(seq.tokens) for seq, n in batch.items() if n == seq.remaining()}
    scheduler.advance(batch)
    scheduler.update(sampled)
    self.check()
    return batch

  def fresh(self, batch):
    """The batch is in order but for prompts of one token, which are admitted behind the chunks of others."""
    order = [seq.remaining() > 1 for seq in batch if seq.num_generated or seq.num_prompt > 1]
    return order == sorted(order)

  def abort(self, seq):
    self.scheduler.finish(seq, "abort")
    self.check()

  def check(self):
    check_scheduler(self.scheduler, self.blocks)
    live = {*self.scheduler.running, *self.scheduler.waiting}
    assert live == {s for s in self.all if not s.finish_reason}, "every request is somewhere until it ends"
    for seq in self.all:
      if seq not in live: assert not seq.block_table and seq.row is None

  def finish(self):
    """Every request ends within the steps that all take if each step advances one of them by one token."""
    for _ in range(sum(seq.max_len for seq in self.all) + 10):
      if not self.scheduler.running and not self.scheduler.waiting: return
      self.step()
    raise AssertionError("requests that do not end")


operations = st.lists(st.one_of(
  st.tuples(st.just("add"), st.integers(1, 40), st.integers(1, 30), st.integers(-2, 2)),
  st.tuples(st.just("step"), st.integers(1, 6)), st.tuples(st.just("abort"), st.integers(0, 100))), max_size=40)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(operations, st.integers(11, 30), st.sampled_from([1, 2, 4]), st.integers(1, 6), st.integers(0, 12),
       st.sampled_from(["fcfs", "priority"]))
def test_any_sequence_of_operations_keeps_the_invariants_and_ends(todo, blocks, size, seqs, more, policy):
  bench = Bench(blocks * 4 // size, size, seqs, seqs + more, policy)   # a pool of blocks * 4 tokens
  for what, *args in todo:
    if what == "add": bench.add(args[0], args[1], args[2] if policy == "priority" else 0)
    elif what == "step":
      for _ in range(args[0]): bench.step()
    elif live := [seq for seq in bench.all if not seq.finish_reason]: bench.abort(live[args[0] % len(live)])
  bench.finish()
  assert bench.blocks.num_used() == 0
  for seq in bench.all:
    if seq.finish_reason == "length":
      made = [1000 + i for i in range(seq.num_prompt, len(seq.tokens))]
      assert seq.tokens[seq.num_prompt:] == made, "a token lost or twice"
      wanted = min(seq.params.max_tokens, bench.max_len - seq.num_prompt)
      assert len(made) == wanted or len(seq.tokens) > 4 * blocks, "ended before its time"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.booleans()), max_size=60), st.integers(2, 20),
       st.integers(1, 7))
def test_the_block_manager_never_loses_or_doubles_a_block(todo, num_blocks, block_size):
  blocks, tables = BlockManager(num_blocks, block_size), [[] for _ in range(6)]
  for i, n, release in todo:
    table, old = tables[i], list(tables[i])
    if release: blocks.free(table)
    elif blocks.can_allocate(table, n):
      blocks.allocate(table, n)
      assert table[:len(old)] == old and len(table) == max(len(old), -(-n // block_size))
    else: assert -(-n // block_size) - len(table) > blocks.num_free()
    check_pool(blocks, tables)


def test_a_table_grows_only_when_its_next_token_needs_a_block():
  blocks, table = BlockManager(9, 4), []
  for n, held in ((1, 1), (4, 1), (5, 2), (8, 2), (9, 3)):
    blocks.allocate(table, n)
    assert len(table) == held == blocks.num_used()


def test_a_sequence_holds_no_block_that_its_tokens_do_not_need():
  bench = Bench(blocks=20, budget=8)
  seq = bench.add(prompt=11, n=10)
  while not seq.finish_reason:
    bench.step()
    if not seq.finish_reason: assert len(seq.block_table) == -(-seq.num_computed // 4)


def test_decodes_come_first_and_prompts_fill_the_rest_of_the_budget():
  bench = Bench(blocks=40, seqs=4, budget=8)
  a, b = bench.add(prompt=2), bench.add(prompt=3)
  assert bench.step() == {a: 2, b: 3}
  c, d = bench.add(prompt=9), bench.add(prompt=5)
  assert list(bench.step().items()) == [(a, 1), (b, 1), (c, 6)]
  assert list(bench.step().items()) == [(a, 1), (b, 1), (c, 3), (d, 3)]
  assert list(bench.step().items()) == [(a, 1), (b, 1), (c, 1), (d, 2)]


def test_a_request_preempted_when_its_tokens_fill_the_pool_comes_back():
  bench = Bench(blocks=2, block_size=1, seqs=2, budget=8)
  first, second = bench.add(prompt=1, n=2), bench.add(prompt=1, n=2)
  bench.step()
  bench.step()
  assert bench.scheduler.waiting == [second] and len(second.tokens) == 2
  bench.finish()
  assert first.num_generated == second.num_generated == 2


def test_no_more_sequences_run_than_max_num_seqs():
  bench = Bench(blocks=40, seqs=2, budget=8)
  a, b, c = (bench.add(prompt=1, n=n) for n in (2, 4, 2))
  assert set(bench.step()) == {a, b} and c in bench.scheduler.waiting
  bench.step()
  assert a.finish_reason == "length" and set(bench.step()) == {b, c}


def test_a_waiting_request_is_not_overtaken_by_a_smaller_one():
  bench = Bench(blocks=10, seqs=4, budget=40)
  bench.add(prompt=20, n=8)
  bench.step()
  big, small = bench.add(prompt=30), bench.add(prompt=1)
  assert big not in (batch := bench.step()) and small not in batch
  assert bench.scheduler.waiting == [big, small]


def test_the_newest_of_the_lowest_priority_is_preempted_and_waits_in_its_old_place():
  bench = Bench(blocks=6, seqs=4, budget=24, policy="priority")
  high, low, lower = (bench.add(prompt=7, n=20, priority=p) for p in (0, 1, 2))
  assert set(bench.step()) == {high, low, lower}
  later = bench.add(prompt=1, n=1, priority=3)
  while not bench.scheduler.num_preemptions: bench.step()
  assert bench.scheduler.running == [high, low] and bench.scheduler.waiting == [lower, later]
  assert lower.num_computed == 0 and lower.num_generated > 0, "its tokens are kept and computed again"


def test_finishing_one_that_waits_or_has_finished_changes_nothing_else():
  bench = Bench(seqs=1)
  a, b, c = (bench.add() for _ in range(3))
  bench.step()
  bench.abort(b)
  bench.abort(a)
  assert bench.scheduler.waiting == [c] and not bench.scheduler.running and bench.blocks.num_used() == 0
  bench.finish()
  assert c.finish_reason == "length" and c.num_generated == 5


@pytest.mark.parametrize("budget", [1, 2, 5, 16])
def test_a_lone_request_takes_the_fewest_steps(budget):
  bench = Bench(blocks=20, seqs=1, budget=budget)
  bench.add(prompt=16, n=6)
  bench.finish()
  assert bench.steps == -(-16 // budget) + 5
