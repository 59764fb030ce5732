"""Schedules each step (Yu et al. 2022, Orca): one token of every decoding sequence, then prefill chunks, up to
max_num_batched_tokens. The oldest running sequence of the highest priority always makes progress."""
import bisect, hashlib
from collections import Counter, OrderedDict

from .config import EngineConfig
from .request import Sequence


class BlockManager:
  """Owns the KV cache's physical blocks: reference counts, the prefix cache and LRU eviction.
  A full block is cached under the hash of its tokens and all tokens before it, also while it is free.
  Invariant: num_free() + num_used() == num_blocks - 1 (block 0 is the null block, which padding writes to)."""
  def __init__(self, num_blocks: int, config: EngineConfig):
    self.num_blocks, self.block_size = num_blocks, config.block_size
    self.block_hashes = [b""] * num_blocks         # hash of the last content of each block
    self.cached_blocks: dict[bytes, int] = {}      # hash -> the first block with that content
    self.reset()

  def reset(self) -> None:
    """Free all blocks. The prefix cache stays."""
    self.shared: Counter[int] = Counter()          # block -> number of further block tables that hold it, or 0
    self.evictable = OrderedDict.fromkeys(self.cached_blocks.values())   # free but cached, least recently used first
    self.free_blocks = [block for block in range(self.num_blocks - 1, 0, -1) if block not in self.evictable]

  def num_free(self) -> int: return len(self.free_blocks) + len(self.evictable)
  def num_used(self) -> int: return self.num_blocks - 1 - self.num_free()

  def can_allocate(self, block_table: list[int], num_tokens: int) -> bool:
    """Return whether enough blocks are free to grow `block_table` until it holds `num_tokens`."""
    return num_tokens <= (len(block_table) + self.num_free()) * self.block_size

  def allocate(self, block_table: list[int], num_tokens: int) -> None:
    """Grow `block_table` until it holds `num_tokens`. The caller has checked `can_allocate`."""
    while len(block_table) * self.block_size < num_tokens:
      block = self.free_blocks.pop() if self.free_blocks else self.evictable.popitem(last=False)[0]
      if self.is_cached(block): del self.cached_blocks[self.block_hashes[block]]
      block_table.append(block)

  def is_cached(self, block: int) -> bool: return self.cached_blocks.get(self.block_hashes[block]) == block

  def free(self, seq: Sequence, num_kept: int = 0) -> None:
    """Free a sequence's blocks after the first `num_kept`, newest first. A sequence without blocks restarts."""
    for block in reversed(seq.block_table[num_kept:]):
      if self.shared[block]: self.shared[block] -= 1
      elif self.is_cached(block): self.evictable[block] = None
      else: self.free_blocks.append(block)
    if num_kept: del seq.block_table[num_kept:]
    else: seq.restart()

  def block_hash(self, seq: Sequence, i: int) -> bytes:
    """Return the hash of a sequence's i-th block, which must be full. Each hash is computed once."""
    while len(seq.block_hashes) <= i:
      start = len(seq.block_hashes) * self.block_size
      parent = seq.block_hashes[-1] if start else seq.salt
      seq.block_hashes.append(hashlib.sha256(parent + str(seq.tokens[start:start + self.block_size]).encode()).digest())
    return seq.block_hashes[i]

  def match_prefix(self, seq: Sequence) -> None:
    """Start a sequence's empty block table with the cached blocks of its tokens. The last token is always computed."""
    for i in range((len(seq.tokens) - 1) // self.block_size):
      block = self.cached_blocks.get(self.block_hash(seq, i))
      if block is None: break
      if block in self.evictable: del self.evictable[block]
      else: self.shared[block] += 1
      seq.block_table.append(block)
    seq.num_computed = len(seq.block_table) * self.block_size

  def cache_full_blocks(self, seq: Sequence, positions: range) -> None:
    """Add the blocks filled by these positions to the prefix cache. Call it after the step's results have been read."""
    for i in range(positions.start // self.block_size, positions.stop // self.block_size):
      block = seq.block_table[i]
      self.block_hashes[block] = self.block_hash(seq, i)
      self.cached_blocks.setdefault(self.block_hashes[block], block)


class Scheduler:
  """Owns the queue of waiting sequences and the running ones, and chooses the tokens of each step."""
  def __init__(self, config: EngineConfig, blocks: BlockManager):
    self.config, self.blocks, self.match_prefix = config, blocks, blocks.match_prefix
    self.waiting, self.running = list[Sequence](), list[Sequence]()   # the first is sorted

  def add(self, seq: Sequence) -> None: bisect.insort(self.waiting, seq)

  def schedule(self, budget: int = 0) -> dict[Sequence, int]:
    """Return the sequences of the next step and the number of tokens of each, with their blocks allocated.
    budget: maximum number of tokens (default: max_num_batched_tokens).
    There is no prefill or decode phase: each sequence has a number of tokens left to compute. May preempt sequences,
    but never the oldest one of the highest priority, because all blocks together hold any single sequence."""
    batch: dict[Sequence, int] = {}
    budget = budget or self.config.max_num_batched_tokens or 0   # the engine has set it
    num_running = len(self.running)
    for seq in sorted(self.running, key=lambda seq: (seq.num_remaining > 1, seq)):   # decodes first
      num_tokens = 0 if seq.slot is None or seq.reached_max_len else min(seq.num_remaining, budget)
      while not self.blocks.can_allocate(seq.block_table, seq.num_computed + num_tokens):
        victim = max(self.running)
        self.preempt(victim)
        budget += batch.pop(victim, 0)
        if victim is seq: num_tokens = 0
      budget -= self._schedule_tokens(batch, seq, num_tokens)
    free_slots = {*range(self.config.max_num_seqs)} - {seq.slot for seq in self.running}
    while self.waiting and free_slots and budget and len(self.running) >= num_running:   # nothing was preempted
      seq = self.waiting[0]
      if not self.start(seq, free_slots): break
      budget -= self._schedule_tokens(batch, seq, min(seq.num_remaining, budget))
    return batch

  def _schedule_tokens(self, batch: dict[Sequence, int], seq: Sequence, num_tokens: int) -> int:
    self.blocks.allocate(seq.block_table, seq.num_computed + num_tokens)
    if num_tokens: batch[seq] = num_tokens
    return num_tokens

  def start(self, seq: Sequence, free_slots: set[int]) -> bool:
    """Start the first waiting sequence with the cached blocks of its tokens. Return False if the free blocks do not
    hold all of its tokens: otherwise the chunks of several prompts would preempt each other."""
    if not seq.wants_prompt_logprobs: self.match_prefix(seq)
    if not self.blocks.can_allocate(seq.block_table, len(seq.tokens)):
      self.blocks.free(seq)
      return False
    self.running.append(self.waiting.pop(0))
    seq.slot = free_slots.pop()
    if seq.num_cached is None: seq.num_cached = seq.num_computed
    return True

  def preempt(self, seq: Sequence) -> None:
    """Free a running sequence's blocks and put it back in the queue by its order. Uncached blocks are recomputed."""
    self.running.remove(seq)
    self.blocks.free(seq)
    self.add(seq)

  def start_step(self, batch: dict[Sequence, int], num_behind: int = 0) -> None:
    """Count the tokens that the step computes and samples. A sampled token can be scheduled before it is read.
    num_behind: number of draft tokens to compute again, see Proposer."""
    for seq, num_tokens in batch.items():
      if num_tokens >= seq.num_remaining: seq.num_in_flight += 1
      seq.num_computed += num_tokens
      if seq.draft_token_ids: seq.num_computed -= num_behind

  def update(self, computed: dict[Sequence, range], sampled: dict[Sequence, int]) -> None:
    """Process the results of a step: cache the blocks it filled, append the sampled tokens, finish sequences.
    computed: positions whose K and V the step wrote. Blocks freed since then and rejected drafts are not cached."""
    for seq, positions in computed.items() if self.config.enable_prefix_caching else ():
      self.blocks.cache_full_blocks(seq, range(positions.start, min(positions.stop, seq.num_computed, len(seq.tokens))))
    for seq, token in sampled.items():
      seq.append(token)
      while seq.siblings: self.add(seq.siblings.pop())
      if seq.finish_reason: self.finish(seq, seq.finish_reason)

  def finish(self, seq: Sequence, reason: str) -> None:
    """End a waiting or running sequence, and free its blocks."""
    seq.finish_reason = reason
    queue = self.waiting if seq.slot is None else self.running
    if seq in queue: queue.remove(seq)
    self.blocks.free(seq)

  def reset(self, unfinished: list[Sequence]) -> None:
    """Return all unfinished sequences to the queue, without blocks, after a failed step."""
    self.running, self.waiting = [], sorted(unfinished)
    for seq in self.waiting: seq.restart()
    self.blocks.reset()
