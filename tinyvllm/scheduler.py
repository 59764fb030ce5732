"""What a request asks for and has so far, and what each step computes (Yu et al. 2022, Orca): one token for every
decoding sequence, then chunks of prompts, together at most max_num_batched_tokens. A sequence stores one counter of
progress, `num_computed`: the tokens whose K and V are in the cache, 0 <= num_computed <= len(tokens); all else is
derived from it. The oldest running sequence of the highest priority always makes progress."""
import bisect, collections, math, time
from dataclasses import dataclass, field
from typing import Annotated

from .config import EngineConfig, Options, check, logger

MAX_BANNED = 16   # stop ids that min_tokens can hold back: their number is a constant of the sampler's graph


@dataclass(frozen=True)
class SamplingParams(Options):
  """How to choose a request's tokens and when to stop, with vLLM's names."""
  max_tokens: Annotated[int, 1, 2**31 - 1] = 256        # tokens to generate at most
  min_tokens: Annotated[int, 0, 2**31 - 1] = 0          # tokens before an end token, stop id or stop string may come
  temperature: Annotated[float | int, 0, 100] = 1.0     # below 1e-5: greedy
  top_k: Annotated[int, -1, 2**31 - 1] = 0              # keep the k most probable tokens; 0 or -1: all
  top_p: Annotated[float | int, 1e-6, 1] = 1.0          # keep the most probable tokens that together reach p
  min_p: Annotated[float | int, 0, 1] = 0.0             # keep tokens at least min_p times as probable as the best
  seed: Annotated[int | None, -2**63, 2**63 - 1] = None   # the same seed gives the same text in any batch
  stop: Annotated[list | str | None, str] = None        # end before any of these strings
  stop_token_ids: Annotated[list | None, int] = None    # end at any of these ids
  include_stop_str_in_output: bool = False              # keep the stop string, or the text of the stop id
  ignore_eos: bool = False                              # go on after the model's end token
  skip_special_tokens: bool = True                      # leave special tokens out of the text

  def __post_init__(self) -> None:
    if isinstance(self.stop, str): object.__setattr__(self, "stop", [self.stop])
    super().__post_init__()
    check(self.min_tokens <= self.max_tokens, f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")


@dataclass
class RequestMetrics:
  """Monotonic times of a request's events, and the seconds between them; NaN for what has not happened."""
  arrival_time: float = field(default_factory=time.monotonic)
  first_scheduled_time: float = math.nan
  first_token_time: float = math.nan
  finished_time: float = math.nan
  num_generated: int = 0

  queue_time = property(lambda self: self.first_scheduled_time - self.arrival_time)
  ttft = property(lambda self: self.first_token_time - self.arrival_time)
  tpot = property(lambda self: (self.finished_time - self.first_token_time) / max(1, self.num_generated - 1))
  latency = property(lambda self: self.finished_time - self.arrival_time)


@dataclass(eq=False)
class Sequence:
  """One run of tokens: the prompt's, then those generated. `row` is its place in the device's block tables while it
  runs."""
  request_id: str
  tokens: list[int]
  num_prompt: int
  params: SamplingParams
  seed: int
  stop_ids: frozenset[int]
  max_len: int
  priority: int
  arrival: int
  length: int   # its tokens, with those that the device has sampled and the host has not read
  num_computed: int = 0
  block_table: list[int] = field(default_factory=list)
  row: int | None = None
  finish_reason: str | None = None
  stop_reason: int | str | None = None   # the stop string or stop id that ended it; None for the model's end token
  metrics: RequestMetrics = field(default_factory=RequestMetrics)

  def remaining(self) -> int: return self.length - self.num_computed
  order = property(lambda self: (self.priority, self.arrival))   # who goes first
  num_generated = property(lambda self: len(self.tokens) - self.num_prompt)
  exhausted = property(lambda self: self.length >= min(self.max_len, self.num_prompt + self.params.max_tokens))
  banned = property(lambda self: list(self.stop_ids) if self.length < self.num_prompt + self.params.min_tokens else [])

  def append(self, token: int) -> None:
    """Take the next token, and finish where it, or the length, says so."""
    self.tokens.append(token)
    self.length = max(self.length, len(self.tokens))
    self.metrics.num_generated = self.num_generated
    if self.num_generated == 1: self.metrics.first_token_time = time.monotonic()
    if token in self.stop_ids:
      self.finish_reason, self.stop_reason = "stop", token if token in (self.params.stop_token_ids or ()) else None
    elif self.length == len(self.tokens) and self.exhausted: self.finish_reason = "length"


@dataclass
class CompletionOutput:
  """One generated text. finish_reason: None, "stop", "length" or "abort"."""
  index: int
  text: str
  token_ids: list[int]
  finish_reason: str | None
  stop_reason: int | str | None


@dataclass
class RequestOutput:
  """A request after a step. `step` and `generate` give the text and ids so far, `generate_stream` the new ones."""
  request_id: str
  prompt: str | None
  prompt_token_ids: list[int]
  outputs: list[CompletionOutput]
  metrics: RequestMetrics
  num_cached_tokens: int = 0
  finished = property(lambda self: all(output.finish_reason for output in self.outputs))


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
