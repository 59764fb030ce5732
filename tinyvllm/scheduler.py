"""What each step computes (Yu et al. 2022, Orca): one token for every decoding sequence, then chunks of prompts,
at most max_num_batched_tokens together. The oldest running sequence of the highest priority always makes progress."""
import bisect, hashlib, math, time
from collections import Counter, OrderedDict
from collections.abc import Iterator

from .config import EngineConfig, logger
from .request import Sequence


class BlockManager:
  """Owns the physical blocks of the KV cache: who holds each, what is found in them, and in which order those that
  nobody holds are reused. free + used == num_blocks - 1, as block 0 takes padding's writes and is nobody's. A full
  block is found by the hash of its tokens and all before them (vLLM's automatic prefix caching), also while it is
  free."""
  def __init__(self, num_blocks: int, config: EngineConfig):
    self.num_blocks = num_blocks
    self.block_size = config.block_size
    self.num_tokens = (num_blocks - 1) * config.block_size
    self.keys = [b""] * num_blocks   # of what has last filled each
    self.cached: dict[bytes, int] = {}   # the first block with a key
    self.reset()

  def reset(self) -> None:
    """Nobody holds a block. What is found stays so."""
    self.shared: Counter[int] = Counter()   # blocks that several hold, and by how many more than one
    # Free blocks: those that are found, the one let go of longest ago first, and the rest
    self.unused = OrderedDict.fromkeys(self.cached.values())
    self.empty = [block for block in range(self.num_blocks - 1, 0, -1) if block not in self.unused]

  def num_free(self) -> int: return len(self.empty) + len(self.unused)
  def num_used(self) -> int: return self.num_blocks - 1 - self.num_free()

  def can_allocate(self, table: list[int], n: int) -> bool:
    """Whether a table may grow until it holds n tokens."""
    return n <= (len(table) + self.num_free()) * self.block_size

  def allocate(self, table: list[int], num_tokens: int) -> None:
    """Grow `table` until it holds `num_tokens`. The caller has asked `can_allocate`."""
    while len(table) * self.block_size < num_tokens:
      block = self.empty.pop() if self.empty else self.unused.popitem(last=False)[0]
      if self.cached.get(self.keys[block]) == block: del self.cached[self.keys[block]]
      table.append(block)

  def free(self, seq: Sequence, kept: int = 0) -> None:
    """Let go of a sequence's blocks, the newest first, but for so many: without any it has to begin anew."""
    for block in reversed(seq.block_table[kept:]):
      if block in self.shared:
        self.shared[block] -= 1
        if not self.shared[block]: del self.shared[block]
      elif self.cached.get(self.keys[block]) == block: self.unused[block] = None
      else: self.empty.append(block)   # it cannot be found
    if kept: del seq.block_table[kept:]
    else: seq.restart()

  def _key(self, seq: Sequence, i: int) -> bytes:
    parent = self.keys[seq.block_table[i - 1]] if i else b""
    return hashlib.sha256(parent + str(seq.tokens[i * self.block_size:(i + 1) * self.block_size]).encode()).digest()

  def match(self, seq: Sequence) -> None:
    """Give a sequence without blocks those in which its tokens are found. The last token is always computed."""
    for i in range((len(seq.tokens) - 1) // self.block_size):
      block = self.cached.get(self._key(seq, i))
      if block is None: break
      if block in self.unused: del self.unused[block]
      else: self.shared[block] += 1
      seq.block_table.append(block)
    seq.num_computed = len(seq.block_table) * self.block_size

  def publish(self, seq: Sequence, computed: range) -> None:
    """Let the blocks that the tokens in these places have filled be found: a step computed them, and was read."""
    for i in range(computed.start // self.block_size, computed.stop // self.block_size):
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
    self.totals = Counter(steps=0, scheduled=0, seconds=0, num_preemptions=0, prompt_tokens=0, generation_tokens=0,
                          requests_finished=0, prefix_cache_queries=0, prefix_cache_hits=0)

  def add(self, seq: Sequence) -> None: bisect.insort(self.waiting, seq)

  def schedule(self) -> dict[Sequence, int]:
    """The sequences of the next step and how many tokens of each, with blocks allocated. May preempt sequences, but
    never the oldest one of the highest priority: the pool holds any one alone."""
    batch: dict[Sequence, int] = {}
    left: int = self.config.max_num_batched_tokens   # type: ignore[assignment]   # by now a number
    for seq in self._candidates():
      n = 0 if seq.row is None or seq.exhausted else min(seq.remaining(), left)   # None: it was preempted just now
      while not self.blocks.can_allocate(seq.block_table, seq.num_computed + n):
        victim = max(self.running)
        self.preempt(victim)
        left += batch.pop(victim, 0)
        if victim is seq: n = 0
      self.blocks.allocate(seq.block_table, seq.num_computed + n)
      if n: batch[seq] = n
      left -= n
      if not left: break
    return batch

  def _candidates(self) -> Iterator[Sequence]:
    """Those who run, what is left of prompts last, and then, unless one has been preempted meanwhile, those who wait:
    each begins to run when it is asked for."""
    running = sorted(self.running, key=lambda seq: (seq.remaining() > 1, seq))
    yield from running
    rows = {*range(self.config.max_num_seqs)} - {seq.row for seq in self.running}
    while self.waiting and rows and len(self.running) >= len(running):
      seq = self.waiting[0]
      if not seq.scores_prompt: self.blocks.match(seq)
      if not self.blocks.can_allocate(seq.block_table, len(seq.tokens)):
        return self.blocks.free(seq)   # room for all of it, or the chunks of several would preempt each other
      self.running.append(self.waiting.pop(0))
      seq.row = rows.pop()
      self.totals.update(prefix_cache_queries=len(seq.tokens), prefix_cache_hits=seq.num_computed)
      if math.isnan(seq.metrics.first_scheduled_time):
        self.totals["prompt_tokens"] += seq.num_prompt
        seq.metrics.first_scheduled_time = time.monotonic()
        seq.num_cached = seq.num_computed
      yield seq

  def preempt(self, seq: Sequence) -> None:
    """Take a sequence's blocks. It waits in its old place in the order, and computes again what is not found then."""
    self.running.remove(seq)
    self.blocks.free(seq)
    self.add(seq)
    times = self.totals["num_preemptions"] = self.totals["num_preemptions"] + 1
    if times.bit_count() == 1:   # ever more rarely
      logger.warning(f"{times} preemptions: lower max_num_seqs or raise gpu_memory_utilization")

  def advance(self, batch: dict[Sequence, int]) -> None:
    """Count what a step that is about to run computes, and the tokens that come of it: they may be scheduled unread."""
    for seq, n in batch.items():
      if n >= seq.remaining(): seq.num_unread += 1
      seq.num_computed += n
      if seq.drafts: seq.num_computed -= seq.drafter.num_behind

  def update(self, computed: dict[Sequence, range], sampled: dict[Sequence, int]) -> None:
    """Take the results of a step that has been read. computed: the places of each sequence's tokens whose K and V it
    wrote. Of those who have lost their blocks since nothing can be found, nor of drafts that did not come true."""
    for seq, places in computed.items() if self.config.enable_prefix_caching else ():
      self.blocks.publish(seq, range(places.start, min(places.stop, seq.num_computed, len(seq.tokens))))
    for seq, token in sampled.items():
      seq.append(token)
      while seq.forks: self.add(seq.forks.pop())
      if seq.finish_reason: self.finish(seq, seq.finish_reason)
    self.totals.update(generation_tokens=len(sampled))

  def finish(self, seq: Sequence, reason: str) -> None:
    """End a sequence wherever it is, and free what it holds."""
    seq.finish_reason = reason
    seq.metrics.finished_time = time.monotonic()
    queue = self.waiting if seq.row is None else self.running
    if seq in queue: queue.remove(seq)
    self.blocks.free(seq)

  def reset(self, unfinished: list[Sequence]) -> None:
    """After a failed step all who are unfinished wait, without blocks, wherever the step has left them."""
    self.running = []
    self.waiting = sorted(unfinished)
    for seq in self.waiting: seq.restart()
    self.blocks.reset()
