"""Decides what each step computes (Yu et al. 2022, Orca): one token for every decoding sequence, then chunks of
prompts, together at most max_num_batched_tokens. The oldest running sequence of the highest priority always makes
progress."""
import bisect, collections, math, time

from .config import EngineConfig, logger
from .sequence import Sequence


class BlockManager:
  """Owns the physical blocks of the KV cache: who holds each, and which are free. free + used == num_blocks - 1, as
  block 0 takes padding's writes and is nobody's."""
  def __init__(self, num_blocks: int, block_size: int):
    self.num_blocks, self.block_size, self.num_tokens = num_blocks, block_size, (num_blocks - 1) * block_size
    self.free_blocks, self.ref_counts = collections.deque(range(1, num_blocks)), [0] * num_blocks

  def num_free(self) -> int: return len(self.free_blocks)
  def num_used(self) -> int: return self.num_blocks - 1 - self.num_free()

  def can_allocate(self, table: list[int], num_tokens: int) -> bool:
    return num_tokens <= (len(table) + self.num_free()) * self.block_size

  def allocate(self, table: list[int], num_tokens: int) -> None:
    """Grow `table` until it holds `num_tokens`. The caller has asked `can_allocate`."""
    while len(table) * self.block_size < num_tokens:
      table.append(block := self.free_blocks.popleft())
      self.ref_counts[block] = 1

  def free(self, table: list[int]) -> None:
    """Let go of a table's blocks, newest first, and empty it."""
    while table:
      self.ref_counts[block := table.pop()] -= 1
      if self.ref_counts[block] == 0: self.free_blocks.append(block)


class Scheduler:
  def __init__(self, config: EngineConfig, blocks: BlockManager):
    self.budget, self.blocks, self.num_preemptions = config.max_num_batched_tokens, blocks, 0
    self.waiting: list[Sequence] = []   # in order
    self.running: list[Sequence] = []
    self.free_rows = list(range(config.max_num_seqs))[::-1]

  def add(self, seq: Sequence) -> None: bisect.insort(self.waiting, seq, key=lambda s: s.order)

  def schedule(self) -> dict[Sequence, int]:
    """The sequences of the next step and how many tokens of each, with blocks allocated. May preempt sequences, and
    finish with "length" one that alone outgrows the pool."""
    batch: dict[Sequence, int] = {}
    preemptions = self.num_preemptions
    for seq in sorted(self.running, key=lambda s: (s.remaining() > 1, s.order)):
      n = 0 if seq.exhausted else seq.remaining()
      if n > 1: n = min(n, self.budget - sum(batch.values()))   # there is always room for a decode
      if n and seq.row is not None and self._make_room(seq, n, batch): batch[seq] = n
    while self.waiting and self.free_rows and preemptions == self.num_preemptions and sum(batch.values()) < self.budget:
      seq = self.waiting[0]   # room for all of it, or the chunks of several would preempt each other
      if not self.blocks.can_allocate([], len(seq.tokens)): break
      self.running.append(self.waiting.pop(0))
      seq.row = self.free_rows.pop()
      if math.isnan(seq.metrics.first_scheduled_time): seq.metrics.first_scheduled_time = time.monotonic()
      batch[seq] = min(len(seq.tokens), self.budget - sum(batch.values()))
      self.blocks.allocate(seq.block_table, batch[seq])
    return batch

  def _make_room(self, seq: Sequence, n: int, batch: dict[Sequence, int]) -> bool:
    while not self.blocks.can_allocate(seq.block_table, seq.num_computed + n):
      if self.running == [seq] and seq.length > len(seq.tokens): return False   # it still gets a token
      if self.running == [seq]:
        logger.warning("request %s ends after %d tokens, which fill the KV cache: raise gpu_memory_utilization or "
                       "num_gpu_blocks_override", seq.request_id, len(seq.tokens))
        self.finish(seq, "length")
        return False
      victim = max(self.running, key=lambda s: s.order)
      batch.pop(victim, None)
      self.preempt(victim)
      if victim is seq: return False
    self.blocks.allocate(seq.block_table, seq.num_computed + n)
    return True

  def preempt(self, seq: Sequence) -> None:
    """Take a sequence's blocks; it waits in its old place in the order, and computes its tokens again."""
    self._release(seq)
    seq.num_computed, seq.length = 0, len(seq.tokens)
    self.num_preemptions += 1
    self.add(seq)

  def advance(self, batch: dict[Sequence, int]) -> None:
    """Count what a step that is about to run computes, and the tokens that come of it: they may be scheduled unread."""
    for seq, n in batch.items():
      seq.length += n == seq.remaining()
      seq.num_computed += n

  def update(self, sampled: dict[Sequence, int]) -> None:
    """Take the tokens of a step."""
    for seq, token in sampled.items():
      if seq.finish_reason: continue   # aborted, or stopped, while the device worked
      seq.append(token)
      if seq.finish_reason: self.finish(seq, seq.finish_reason)

  def finish(self, seq: Sequence, reason: str) -> None:
    """End a sequence wherever it is, and free what it holds."""
    seq.finish_reason, seq.metrics.finished_time = reason, time.monotonic()
    if seq.row is not None: self._release(seq)
    elif seq in self.waiting: self.waiting.remove(seq)

  def _release(self, seq: Sequence) -> None:
    self.blocks.free(seq.block_table)
    self.running.remove(seq)
    self.free_rows += [seq.row] if seq.row is not None else []
    seq.row = None
