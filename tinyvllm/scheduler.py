"""What each step computes (Yu et al. 2022, Orca): one token for every decoding sequence, then chunks of prompts, together
at most max_num_batched_tokens. The oldest running sequence of the highest priority always makes progress."""
import bisect, hashlib, math, time
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from .config import EngineConfig, logger
from .request import Sequence


class Written(NamedTuple):
  """What a step computes of a sequence: K and V of its tokens from start to end, in the blocks that it had then."""
  seq: Sequence
  block_table: list[int]
  start: int
  end: int


class BlockManager:
  """Owns the physical blocks of the KV cache: who holds each, what is found in them, and in which order those that
  nobody holds are reused. free + used == num_blocks - 1, as block 0 takes padding's writes and is nobody's. A full
  block is found by the hash of its tokens and all before them (vLLM's automatic prefix caching), also while it is
  free."""
  def __init__(self, num_blocks: int, config: EngineConfig):
    self.num_blocks = num_blocks
    self.block_size = config.block_size
    self.caching = config.enable_prefix_caching
    self.cached: dict[bytes, int] = {}   # the first block with a key
    self.reset()

  def reset(self) -> None:
    """Nobody holds a block. What is found stays so."""
    found = {block: key for key, block in self.cached.items()}
    self.keys = [found.get(block, b"") for block in range(self.num_blocks)]   # of what is in each, or b""
    self.ref_counts = [0] * self.num_blocks
    self.num_shared = 0   # blocks that several hold
    self.unused = dict.fromkeys(found)   # free blocks that are found, the one let go of longest ago first
    self.empty = [block for block in range(self.num_blocks - 1, 0, -1) if block not in found]   # the other free ones

  num_tokens = property(lambda self: (self.num_blocks - 1) * self.block_size)
  def num_free(self) -> int: return len(self.empty) + len(self.unused)
  def num_used(self) -> int: return self.num_blocks - 1 - self.num_free()
  def can_allocate(self, table: list[int], n: int) -> bool: return n <= (len(table) + self.num_free()) * self.block_size

  def allocate(self, table: list[int], num_tokens: int) -> None:
    """Grow `table` until it holds `num_tokens`. The caller has asked `can_allocate`."""
    while len(table) * self.block_size < num_tokens:
      block = self.empty.pop() if self.empty else self._evict()
      self.ref_counts[block] = 1
      table.append(block)

  def _evict(self) -> int:
    block = next(iter(self.unused))
    del self.unused[block], self.cached[self.keys[block]]
    self.keys[block] = b""
    return block

  def free(self, seq: Sequence) -> None:
    """Let go of a sequence's blocks, the newest first. Its table is a new list then: the device knows them apart."""
    for block in reversed(seq.block_table):
      self.ref_counts[block] -= 1
      if self.ref_counts[block] == 1: self.num_shared -= 1
      if self.ref_counts[block] > 0: continue
      if self.cached.get(self.keys[block]) == block: self.unused[block] = None
      else:
        self.keys[block] = b""
        self.empty.append(block)
    seq.block_table = []
    seq.num_computed = seq.num_unread = 0
    seq.row = None

  def _key(self, seq: Sequence, i: int) -> bytes:
    parent = self.keys[seq.block_table[i - 1]] if i else b""
    tokens = seq.tokens[i * self.block_size:(i + 1) * self.block_size]
    return hashlib.sha256(parent + str(tokens).encode()).digest()

  def match(self, seq: Sequence) -> None:
    """Give a sequence without blocks those in which its tokens are found. The last token is always computed."""
    for i in range((len(seq.tokens) - 1) // self.block_size):
      block = self.cached.get(self._key(seq, i))
      if block is None: break
      self.unused.pop(block, None)
      self.ref_counts[block] += 1
      if self.ref_counts[block] == 2: self.num_shared += 1
      seq.block_table.append(block)
    seq.num_computed = len(seq.block_table) * self.block_size

  def publish(self, seq: Sequence, num_tokens: int) -> None:
    """Let the full blocks of a sequence's first tokens be found: a step has computed them, and has been read."""
    full = num_tokens // self.block_size if self.caching else 0
    known = next((i for i in range(full, 0, -1) if self.keys[seq.block_table[i - 1]]), 0)
    for i in range(known, full):
      block = seq.block_table[i]
      self.keys[block] = self._key(seq, i)
      self.cached.setdefault(self.keys[block], block)


class Scheduler:
  """Who runs, who waits, and how many tokens of each sequence the next step computes."""
  def __init__(self, config: EngineConfig, blocks: BlockManager):
    self.config = config
    self.blocks = blocks
    self.waiting: list[Sequence] = []   # in order
    self.running: list[Sequence] = []
    self.totals = Counter(dict.fromkeys(("num_preemptions", "prompt_tokens", "prefix_cache_queries",
                                         "prefix_cache_hits"), 0))

  def add(self, seq: Sequence) -> None: bisect.insort(self.waiting, seq, key=lambda s: s.order)

  def schedule(self) -> dict[Sequence, int]:
    """The sequences of the next step and how many tokens of each, with blocks allocated. May preempt sequences, but
    never the oldest one of the highest priority: the pool holds any one alone."""
    batch: dict[Sequence, int] = {}
    budget = self.config.max_num_batched_tokens
    preempted = self.totals["num_preemptions"]
    for seq in sorted(self.running, key=lambda s: (s.remaining() > 1, s.order)):
      waits = seq.row is None or seq.exhausted or (seq.reads and seq.num_unread)
      n = 0 if waits else min(seq.remaining(), budget)   # there is always room for a decode
      while n and not self.blocks.can_allocate(seq.block_table, seq.num_computed + n):
        victim = max(self.running, key=lambda s: s.order)
        self.preempt(victim)
        budget += batch.pop(victim, 0)
        if victim is seq: n = 0
      if n:
        self.blocks.allocate(seq.block_table, seq.num_computed + n)
        batch[seq] = n
        budget -= n
    if self.totals["num_preemptions"] == preempted: self._admit(batch, budget)
    return batch

  def _admit(self, batch: dict[Sequence, int], budget: int) -> None:
    """Let those who wait run, in order, while there are rows, tokens of the budget and blocks."""
    rows = {*range(self.config.max_num_seqs)} - {seq.row for seq in self.running}
    while self.waiting and rows and budget:
      seq = self.waiting[0]
      if self.blocks.caching and not seq.scores_prompt: self.blocks.match(seq)
      if not self.blocks.can_allocate(seq.block_table, len(seq.tokens)):
        self.blocks.free(seq)   # room for all of it, or the chunks of several would preempt each other
        break
      self.running.append(self.waiting.pop(0))
      seq.row = rows.pop()
      self.totals.update(prefix_cache_queries=len(seq.tokens), prefix_cache_hits=seq.num_computed)
      if math.isnan(seq.metrics.first_scheduled_time):
        self.totals["prompt_tokens"] += seq.num_prompt
        seq.metrics.first_scheduled_time = time.monotonic()
        seq.num_cached = seq.num_computed
      batch[seq] = min(seq.remaining(), budget)
      budget -= batch[seq]
      self.blocks.allocate(seq.block_table, seq.num_computed + batch[seq])

  def preempt(self, seq: Sequence) -> None:
    """Take a sequence's blocks. It waits in its old place in the order, and computes again what is not found then."""
    self.totals["num_preemptions"] += 1
    self.running.remove(seq)
    self.blocks.free(seq)
    self.add(seq)
    times = self.totals["num_preemptions"]
    if times.bit_count() == 1:   # ever more rarely
      logger.warning("%d preemptions: lower max_num_seqs or raise gpu_memory_utilization", times)

  def advance(self, batch: dict[Sequence, int]) -> None:
    """Count what a step that is about to run computes, and the tokens that come of it: they may be scheduled unread."""
    for seq, n in batch.items():
      if n == seq.remaining(): seq.num_unread += 1
      seq.num_computed += n

  def update(self, written: Iterable[Written], sampled: dict[Sequence, int]) -> None:
    """Take the tokens of a step that has been read. Of those who have been preempted since nothing can be found."""
    for seq, block_table, _, end in written:
      if seq.block_table is block_table: self.blocks.publish(seq, end)
    for seq, token in sampled.items():
      seq.append(token)
      while seq.forks: self.add(seq.forks.pop())
      if seq.finish_reason: self.finish(seq, seq.finish_reason)

  def finish(self, seq: Sequence, reason: str) -> None:
    """End a sequence wherever it is, and free what it holds."""
    seq.finish_reason = reason
    seq.metrics.finished_time = time.monotonic()
    queue = self.waiting if seq.row is None else self.running
    if seq in queue: queue.remove(seq)
    self.blocks.free(seq)

  def reset(self, unfinished: Iterable[Sequence]) -> None:
    """After a failed step all who are unfinished wait, without blocks, wherever the step has left them."""
    self.running = []
    self.waiting = sorted(unfinished, key=lambda s: s.order)
    for seq in self.waiting:
      seq.block_table = []
      seq.num_computed = seq.num_unread = 0
      seq.row = None
    self.blocks.reset()
