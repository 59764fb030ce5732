"""What a request asks for and has so far, and what each step computes (Yu et al. 2022, Orca): one token for every
decoding sequence, then chunks of prompts, together at most max_num_batched_tokens. A sequence stores one counter of
progress, `num_computed`: the tokens whose K and V are in the cache, 0 <= num_computed <= len(tokens); all else is
derived from it. The oldest running sequence of the highest priority always makes progress."""
import bisect, collections, hashlib, math, time
from dataclasses import dataclass, field
from typing import Annotated, Any

from .config import EngineConfig, Options, check, logger

TOTALS = ("steps", "prompt_tokens", "generation_tokens", "requests_finished", "num_preemptions", "num_swapped",
          "prefix_cache_queries", "prefix_cache_hits")
MAX_BANNED = 16   # stop ids that min_tokens can hold back: their number is a constant of the sampler's graph


@dataclass(frozen=True)
class SamplingParams(Options):
  """How to choose a request's tokens and when to stop, with vLLM's names."""
  n: Annotated[int, 1, 1024] = 1                        # samples of one prompt; their seeds follow each other
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


class Sequence:
  """One run of tokens: the prompt's, then those generated."""
  def __init__(self, request_id: str, tokens: list[int], order: tuple[int, ...], seed: int, params: SamplingParams,
               stop_ids: frozenset[int], max_len: int, metrics: RequestMetrics):
    self.request_id, self.tokens, self.params, self.seed, self.stop_ids = request_id, tokens, params, seed, stop_ids
    self.max_len, self.order, self.metrics = min(max_len, len(tokens) + params.max_tokens), order, metrics
    self.num_prompt = self.length = len(tokens)   # length: with what the device has sampled and the host has not read
    self.num_computed = self.num_cached = 0       # num_cached: those that were found when it first ran
    self.saved, self.num_saved = list[Any](), 0   # while it waits: the content of its blocks, for so many tokens
    self.forks: list[Sequence] = []               # with the same prompt; they wait until it is computed
    self.block_table: list[int] = []
    self.row: int | None = None                   # its place in the device's block tables while it runs
    self.finish_reason: str | None = None
    self.stop_reason: int | str | None = None     # the stop string or id that ended it; None for the model's end token

  def remaining(self) -> int: return self.length - self.num_computed
  num_generated = property(lambda self: len(self.tokens) - self.num_prompt)
  exhausted = property(lambda self: self.length >= self.max_len)
  banned = property(lambda self: list(self.stop_ids) if self.length < self.num_prompt + self.params.min_tokens else [])

  def append(self, token: int) -> None:
    """Take the next token, and finish where it, or the length, says so."""
    self.tokens.append(token)
    self.length = max(self.length, len(self.tokens))
    self.metrics.num_generated += 1
    if self.metrics.num_generated == 1: self.metrics.first_token_time = time.monotonic()
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
  """Owns the physical blocks of the KV cache: who holds each, what is found in them, and in which order those that
  nobody holds are reused. free + used == num_blocks - 1, as block 0 takes padding's writes and is nobody's. A full
  block is found by the hash of its tokens and all before them (vLLM's automatic prefix caching), also while it is
  free."""
  def __init__(self, num_blocks: int, config: EngineConfig):
    self.num_blocks, self.block_size, self.caching = num_blocks, config.block_size, config.enable_prefix_caching
    self.free_blocks, self.ref_counts = collections.OrderedDict.fromkeys(range(1, num_blocks)), [0] * num_blocks
    self.num_tokens, self.keys = (num_blocks - 1) * self.block_size, [b""] * num_blocks   # of what is in each, or b""
    self.cached: dict[bytes, int] = {}   # the first block with a key

  def num_free(self) -> int: return len(self.free_blocks)
  def num_used(self) -> int: return self.num_blocks - 1 - self.num_free()

  def can_allocate(self, table: list[int], num_tokens: int) -> bool:
    return num_tokens <= (len(table) + self.num_free()) * self.block_size

  def allocate(self, table: list[int], num_tokens: int) -> None:
    """Grow `table` until it holds `num_tokens`. The caller has asked `can_allocate`."""
    while len(table) * self.block_size < num_tokens:
      block, _ = self.free_blocks.popitem(last=False)
      table.append(block)
      self.ref_counts[block] = 1
      if self.cached.get(self.keys[block]) == block: del self.cached[self.keys[block]]
      self.keys[block] = b""

  def free(self, seq: Sequence) -> None:
    """Let go of a sequence's blocks. What nobody can find is reused first, else what was let go of longest ago, and of
    one sequence the newest block."""
    for block in reversed(seq.block_table):
      self.ref_counts[block] -= 1
      if self.ref_counts[block] == 0:
        self.free_blocks[block] = None
        self.free_blocks.move_to_end(block, last=self.keys[block] in self.cached)
    seq.block_table, seq.num_computed = [], 0   # a new list: the device knows them apart

  def _key(self, seq: Sequence, i: int) -> bytes:
    tokens = seq.tokens[i * self.block_size:(i + 1) * self.block_size]
    return hashlib.sha256((self.keys[seq.block_table[i - 1]] if i else b"") + str(tokens).encode()).digest()

  def match(self, seq: Sequence) -> None:
    """Give a sequence without blocks those in which its tokens are found; the last token is always computed."""
    for i in range((len(seq.tokens) - 1) // self.block_size if self.caching else 0):
      if not (block := self.cached.get(self._key(seq, i))): break
      seq.block_table.append(block)
      self.ref_counts[block] += 1
      self.free_blocks.pop(block, None)
    seq.num_computed = len(seq.block_table) * self.block_size

  def publish(self, seq: Sequence) -> None:
    """Let a sequence's full blocks be found, once a step has computed them."""
    full = min(seq.num_computed, len(seq.tokens)) // self.block_size
    if not self.caching or not full or self.keys[seq.block_table[full - 1]]: return
    for i, block in enumerate(seq.block_table[:full]):
      self.keys[block] = self.keys[block] or self._key(seq, i)
      self.cached.setdefault(self.keys[block], block)


class Scheduler:
  """storage.save(block) gives the content of a block, for up to num_host_blocks, and storage.load(block, content) puts
  it into another."""
  def __init__(self, config: EngineConfig, blocks: BlockManager, storage: Any = None, num_host_blocks: int = 0):
    self.config, self.blocks, self.storage, self.num_host_blocks = config, blocks, storage, num_host_blocks
    self.warned, self.totals = -math.inf, collections.Counter(dict.fromkeys(TOTALS, 0))
    self.waiting: list[Sequence] = []   # in order
    self.running: list[Sequence] = []
    self.free_rows = list(range(config.max_num_seqs))[::-1]

  def num_swapped(self) -> int: return sum(len(seq.saved) for seq in self.waiting)

  def add(self, seq: Sequence) -> None: bisect.insort(self.waiting, seq, key=lambda s: s.order)

  def schedule(self) -> dict[Sequence, int]:
    """The sequences of the next step and how many tokens of each, with blocks allocated. May preempt sequences, and
    finish with "length" one that alone outgrows the pool."""
    batch: dict[Sequence, int] = {}
    budget, before = self.config.max_num_batched_tokens, self.totals["num_preemptions"]
    for seq in self.running: self.blocks.publish(seq)
    for seq in sorted(self.running, key=lambda s: (s.remaining() > 1, s.order)):
      n = 0 if seq.exhausted else seq.remaining()
      if n > 1: n = min(n, budget - sum(batch.values()))   # there is always room for a decode
      if n and seq.row is not None and self._make_room(seq, n, batch): batch[seq] = n
    while self.waiting and self.free_rows and before == self.totals["num_preemptions"] and budget > sum(batch.values()):
      self.blocks.match(seq := self.waiting[0])
      # Room for all of it, or the chunks of several would preempt each other
      if not self.blocks.can_allocate(seq.block_table, len(seq.tokens)):
        self.blocks.free(seq)
        break
      self.running.append(self.waiting.pop(0))
      seq.row = self.free_rows.pop()
      found = len(seq.block_table)
      self.blocks.allocate(seq.block_table, seq.num_saved)
      for i in range(found, len(seq.saved)): self.storage.load(seq.block_table[i], seq.saved[i])
      seq.num_computed, seq.saved, seq.num_saved = max(seq.num_computed, seq.num_saved), [], 0
      self.totals.update(prefix_cache_queries=len(seq.tokens), prefix_cache_hits=found * self.blocks.block_size)
      if math.isnan(seq.metrics.first_scheduled_time):
        self.totals["prompt_tokens"] += seq.num_prompt
        seq.metrics.first_scheduled_time, seq.num_cached = time.monotonic(), seq.num_computed
      batch[seq] = min(seq.remaining(), budget - sum(batch.values()))
      self.blocks.allocate(seq.block_table, seq.num_computed + batch[seq])
    return batch

  def _make_room(self, seq: Sequence, n: int, batch: dict[Sequence, int]) -> bool:
    while not self.blocks.can_allocate(seq.block_table, seq.num_computed + n):
      if self.running == [seq]:
        if seq.length > len(seq.tokens): return False   # it still gets a token
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

  def preempt(self, seq: Sequence, lost: bool = False) -> None:
    """Take a sequence's blocks. It waits in its old place in the order, with their content in host memory if there is
    room and it is not `lost`, else it computes again what is not found then."""
    used = [] if lost else seq.block_table[:-(-seq.num_computed // self.blocks.block_size)]
    if self.num_swapped() + len(used) <= self.num_host_blocks:
      seq.saved, seq.num_saved = [self.storage.save(block) for block in used], 0 if lost else seq.num_computed
    self.totals.update(num_preemptions=1, num_swapped=bool(seq.saved))
    self._release(seq)
    seq.length = len(seq.tokens)
    self.add(seq)
    if self.totals["num_preemptions"] % 8 == 0 and (now := time.monotonic()) > self.warned + 10:
      self.warned = now
      logger.warning("%(num_preemptions)d preemptions (%(num_swapped)d swapped): lower max_num_seqs", self.totals)

  def advance(self, batch: dict[Sequence, int]) -> None:
    """Count what a step that is about to run computes, and the tokens that come of it: they may be scheduled unread."""
    for seq, n in batch.items():
      seq.length += n == seq.remaining()
      seq.num_computed += n

  def update(self, sampled: dict[Sequence, int]) -> None:
    """Take the tokens of a step."""
    for seq, token in sampled.items():
      seq.append(token)
      while seq.forks: self.add(seq.forks.pop())
      if seq.finish_reason: self.finish(seq, seq.finish_reason)

  def finish(self, seq: Sequence, reason: str) -> None:
    """End a sequence wherever it is, and free what it holds."""
    seq.finish_reason, seq.metrics.finished_time = reason, time.monotonic()
    if reason != "abort": self.blocks.publish(seq)   # of an aborted one a step may still be at work
    if seq.row is not None: self._release(seq)
    elif seq in self.waiting: self.waiting.remove(seq)

  def _release(self, seq: Sequence) -> None:
    self.blocks.free(seq)
    self.running.remove(seq)
    self.free_rows += [seq.row] if seq.row is not None else []
    seq.row = None
