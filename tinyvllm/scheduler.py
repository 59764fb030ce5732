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
    self.num_blocks, self.num_tokens = num_blocks, (num_blocks - 1) * config.block_size
    self.config, self.block_size = config, config.block_size
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

  def num_free(self) -> int: return len(self.empty) + len(self.unused)
  def num_used(self) -> int: return self.num_blocks - 1 - self.num_free()
  def can_allocate(self, table: list[int], n: int) -> bool: return n <= (len(table) + self.num_free()) * self.block_size

  def allocate(self, table: list[int], num_tokens: int) -> None:
    """Grow `table` until it holds `num_tokens`. The caller has asked `can_allocate`."""
    while len(table) * self.block_size < num_tokens:
      if not self.empty: self._evict(next(iter(self.unused)))
      table.append(self.empty.pop())
      self.ref_counts[table[-1]] = 1

  def _evict(self, block: int) -> None:
    del self.unused[block], self.cached[self.keys[block]]
    self.keys[block] = b""
    self.empty.append(block)

  def free(self, seq: Sequence) -> None:
    """Let go of a sequence's blocks, the newest first."""
    for block in reversed(seq.block_table):
      self.ref_counts[block] -= 1
      if self.ref_counts[block] == 1: self.num_shared -= 1
      if self.ref_counts[block] > 0: continue
      self.unused[block] = None
      if self.cached.get(self.keys[block]) == block: continue
      del self.unused[block]   # it cannot be found
      self.keys[block] = b""
      self.empty.append(block)
    seq.restart()

  def _key(self, seq: Sequence, i: int) -> bytes:
    tokens = seq.tokens[i * self.block_size:(i + 1) * self.block_size]
    return hashlib.sha256((self.keys[seq.block_table[i - 1]] if i else b"") + str(tokens).encode()).digest()

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
    blocks = seq.block_table[:num_tokens // self.block_size] if self.config.enable_prefix_caching else []
    new = len(blocks)
    while new and not self.keys[blocks[new - 1]]: new -= 1
    for i in range(new, len(blocks)):
      self.keys[blocks[i]] = self._key(seq, i)
      self.cached.setdefault(self.keys[blocks[i]], blocks[i])


class Scheduler:
  """Who runs, who waits, and how many tokens of each sequence the next step computes."""
  def __init__(self, config: EngineConfig, blocks: BlockManager):
    self.config, self.blocks = config, blocks
    self.waiting: list[Sequence] = []   # in order
    self.running: list[Sequence] = []
    self.totals: Counter = Counter(
      steps=0, scheduled=0, seconds=0, num_preemptions=0, prompt_tokens=0, generation_tokens=0, requests_finished=0,
      prefix_cache_queries=0, prefix_cache_hits=0)

  def add(self, seq: Sequence) -> None: bisect.insort(self.waiting, seq, key=lambda s: s.order)

  def schedule(self) -> dict[Sequence, int]:
    """The sequences of the next step and how many tokens of each, with blocks allocated. May preempt sequences, but
    never the oldest one of the highest priority: the pool holds any one alone."""
    batch: dict[Sequence, int] = {}
    before = self.totals["num_preemptions"]
    for seq in sorted(self.running, key=lambda s: (s.remaining() > 1, s.order)):
      n = min(seq.remaining(), self._left(batch)) if seq.ready() else 0
      while n and not self.blocks.can_allocate(seq.block_table, seq.num_computed + n):
        victim = max(self.running, key=lambda s: s.order)
        self.preempt(victim)
        batch.pop(victim, None)
        if victim is seq: n = 0
      if n: self._take(batch, seq, n)
    rows = {*range(self.config.max_num_seqs)} - {seq.row for seq in self.running}
    while self.waiting and rows and self._left(batch) and self.totals["num_preemptions"] == before:
      seq = self.waiting[0]
      if self.config.enable_prefix_caching and not seq.scores_prompt: self.blocks.match(seq)
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
      self._take(batch, seq, min(seq.remaining(), self._left(batch)))
    return batch

  def _left(self, batch: dict[Sequence, int]) -> int: return self.config.max_num_batched_tokens - sum(batch.values())

  def _take(self, batch: dict[Sequence, int], seq: Sequence, n: int) -> None:
    self.blocks.allocate(seq.block_table, seq.num_computed + n)
    batch[seq] = n

  def preempt(self, seq: Sequence) -> None:
    """Take a sequence's blocks. It waits in its old place in the order, and computes again what is not found then."""
    self.running.remove(seq)
    self.blocks.free(seq)
    self.add(seq)
    self.totals["num_preemptions"] += 1
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
    self.totals["generation_tokens"] += len(sampled)

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
    for seq in self.waiting: seq.restart()
    self.blocks.reset()
