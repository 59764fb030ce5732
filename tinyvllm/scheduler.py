"""Decides what each step computes (Yu et al. 2022, Orca): one token for every decoding sequence, then chunks of
prompts, together at most max_num_batched_tokens. The oldest running sequence of the highest priority always makes
progress."""
import bisect
import logging
import time
from math import isnan

from .block_manager import BlockManager
from .config import EngineConfig
from .sequence import Sequence

logger = logging.getLogger("tinyvllm")


class Scheduler:
  def __init__(self, config: EngineConfig, blocks: BlockManager):
    self.budget, self.blocks = config.max_num_batched_tokens, blocks
    self.waiting: list[Sequence] = []   # in order
    self.running: list[Sequence] = []
    self.free_rows = list(range(config.max_num_seqs))[::-1]
    self.num_preemptions = 0

  @staticmethod
  def order(seq: Sequence) -> tuple[int, int]: return seq.priority, seq.arrival

  def add(self, seq: Sequence) -> None: bisect.insort(self.waiting, seq, key=self.order)

  def schedule(self) -> dict[Sequence, int]:
    """The sequences of the next step and how many tokens of each, with blocks allocated. May preempt sequences, and
    finish with "length" one that alone outgrows the pool."""
    batch: dict[Sequence, int] = {}
    preemptions = self.num_preemptions
    for seq in sorted(self.running, key=lambda s: (s.remaining > 1, self.order(s))):
      n = min(seq.remaining, self.budget - sum(batch.values()))
      if n and seq.row is not None and self._make_room(seq, n, batch): batch[seq] = n
    while self.waiting and self.free_rows and preemptions == self.num_preemptions and sum(batch.values()) < self.budget:
      seq = self.waiting[0]   # room for all of it, or the chunks of several would preempt each other
      if not self.blocks.can_allocate([], len(seq.tokens)): break
      self.running.append(self.waiting.pop(0))
      seq.row = self.free_rows.pop()
      if isnan(seq.metrics.first_scheduled_time): seq.metrics.first_scheduled_time = time.monotonic()
      batch[seq] = min(len(seq.tokens), self.budget - sum(batch.values()))
      self.blocks.allocate(seq.block_table, batch[seq])
    return batch

  def _make_room(self, seq: Sequence, n: int, batch: dict[Sequence, int]) -> bool:
    while not self.blocks.can_allocate(seq.block_table, seq.num_computed + n):
      if self.running == [seq]:
        logger.warning("request %s ends after %d tokens, which fill the KV cache: raise gpu_memory_utilization or "
                       "num_gpu_blocks_override", seq.request_id, len(seq.tokens))
        self.finish(seq, "length")
        return False
      victim = max(self.running, key=self.order)
      batch.pop(victim, None)
      self.preempt(victim)
      if victim is seq: return False
    self.blocks.allocate(seq.block_table, seq.num_computed + n)
    return True

  def preempt(self, seq: Sequence) -> None:
    """Take a sequence's blocks; it waits in its old place in the order, and computes its tokens again."""
    self._release(seq)
    seq.num_computed = 0
    self.num_preemptions += 1
    self.add(seq)

  def update(self, batch: dict[Sequence, int], sampled: dict[Sequence, int]) -> None:
    """Record a step: what was computed, and the token that each sequence at its end got."""
    for seq, n in batch.items():
      if seq.finish_reason: continue   # aborted while the device worked
      seq.num_computed += n
      if seq in sampled: seq.append(sampled[seq])
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
