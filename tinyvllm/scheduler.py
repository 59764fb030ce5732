"""What a request asks for and has so far, and what each step computes (Yu et al. 2022, Orca): one token for every
decoding sequence, then chunks of prompts, together at most max_num_batched_tokens. A sequence stores one counter of
progress, `num_computed`: the tokens whose K and V are in the cache, 0 <= num_computed <= len(tokens); all else is
derived from it. The oldest running sequence of the highest priority always makes progress."""
import bisect, collections, hashlib, math, time, types
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, cast

import numpy as np

from .config import EngineConfig, Options, check, logger

# Of a token at its place, by the model's own logits; rank: 1 for the most probable
Logprob = NamedTuple("Logprob", [("logprob", float), ("rank", int), ("decoded_token", str)])   # noqa: UP014
# 1 + a token; of its logit: what is added, then divides it if positive (else multiplies), then is subtracted
CHANGE = np.dtype([("at", "i4"), ("bias", "f4"), ("factor", "f4"), ("penalty", "f4")])


class StructuredOutputsParams(types.SimpleNamespace):
  """What a text must be, exactly one of json: a JSON schema, str or dict; regex: str; choice: a list of texts; grammar:
  str, in Lark's or GBNF's notation; json_object: True, any JSON object."""
  def __init__(self, **given: Any):
    kinds: dict[str, Any] = {"json": (str, dict), "regex": str, "choice": list, "grammar": str, "json_object": bool}
    super().__init__(**{kind: value for kind, value in given.items() if value not in (None, False)})
    ok = [isinstance(value, kinds.get(kind, ())) and bool(value) for kind, value in vars(self).items()] == [True]
    check(ok and {*map(type, given.get("choice") or "-")} == {str}, f"structured_outputs={given}: use one of {*kinds,}")


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
  repetition_penalty: Annotated[float | int, 0.01, 100] = 1.0   # divides logits of what is in prompt or output, if > 0
  presence_penalty: Annotated[float | int, -2, 2] = 0.0   # taken from the logits of what is in the output
  frequency_penalty: Annotated[float | int, -2, 2] = 0.0   # and as often as it is there
  logit_bias: Annotated[dict | None, -100, 100] = None  # what is added to the logits of token ids
  allowed_token_ids: Annotated[list | None, int] = None   # no others may come
  bad_words: Annotated[list | None, str] = None         # texts whose tokens may not come one after another
  logprobs: Annotated[int | None, 0, 20] = None         # log probabilities of each token and of so many best ones
  prompt_logprobs: Annotated[int | None, 0, 20] = None  # the same of the prompt's
  structured_outputs: StructuredOutputsParams | None = None   # what the text must be

  def __post_init__(self) -> None:
    (bias, structured), new = (self.logit_bias, self.structured_outputs), vars(self).update   # as JSON has them
    if isinstance(self.stop, str): new(stop=[self.stop])
    if isinstance(bias, dict): new(logit_bias={int(i) if str(i).isdecimal() else i: x for i, x in bias.items()})
    if isinstance(structured, dict): new(structured_outputs=StructuredOutputsParams(**structured))
    super().__post_init__()
    check(self.min_tokens <= self.max_tokens, f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
    check(self.allowed_token_ids != [], "allowed_token_ids=[] allows nothing: None allows all")
    for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words") if structured else ():
      check(not getattr(self, name), f"{name}={getattr(self, name)!r} and structured_outputs are in conflict: drop one")

  # 0: the best token; 1: one drawn of all; 2: one drawn of the best
  sampler = property(lambda self: 0 if self.temperature < 1e-5 else 2 if self.top_k > 0 or self.top_p < 1 else 1)


class RequestMetrics:
  """Monotonic times of a request's events, and the seconds between them; NaN for what has not happened."""
  first_scheduled_time = first_token_time = finished_time = math.nan
  def __init__(self) -> None: self.arrival_time, self.num_generated = time.monotonic(), 0

  queue_time = property(lambda self: self.first_scheduled_time - self.arrival_time)
  ttft = property(lambda self: self.first_token_time - self.arrival_time)
  tpot = property(lambda self: (self.finished_time - self.first_token_time) / max(1, self.num_generated - 1))
  latency = property(lambda self: self.finished_time - self.arrival_time)


class Sequence:
  """One run of tokens: the prompt's, then those generated. bad_words: their ids. matcher: what follows a grammar."""
  def __init__(self, request_id: str, tokens: list[int], order: tuple[int, ...], seed: int, params: SamplingParams,
               stop_ids: frozenset[int], limit: int, metrics: RequestMetrics, bad_words: Any = (), matcher: Any = None):
    self.request_id, self.tokens, self.order, self.seed, self.params = request_id, tokens, order, seed, params
    self.stop_ids, self.metrics, self.bad_words, self.matcher = stop_ids, metrics, bad_words, matcher
    self.num_prompt = self.length = len(tokens)   # length: with what the device has sampled and the host has not read
    self.max_len = min(limit, len(tokens) + params.max_tokens)
    self.num_computed = self.num_cached = 0       # num_cached: those that were found when it first ran
    self.forks, self.block_table = list[Sequence](), list[int]()   # forks: of the same prompt, until it is computed
    # row: int, its place in the device's block tables while it runs; stop_reason: the stop string or id that ended it
    self.row = self.finish_reason = self.stop_reason = cast(Any, None)
    self.prompt_logprobs = None if order[-1] else params.prompt_logprobs   # the first of n samples has them
    self.logprobs, self.places = dict[int, dict[int, Logprob]](), dict[int, int]()   # places: of tokens, in `changes`
    bias, seen = params.logit_bias or {}, tokens if params.repetition_penalty != 1 else []
    changed = bias or seen or params.presence_penalty or params.frequency_penalty
    self.changes = np.zeros(self.max_len + len(bias) if changed else 0, CHANGE)
    for token in {*bias, *seen}: self._change(token)
    self.reads = bool(changed or bad_words or matcher)   # the last token decides on the next one: it must be read

  def _change(self, token: int) -> None:
    p, times = self.params, self.tokens[self.num_prompt:].count(token)
    bias, factor = (p.logit_bias or {}).get(token, 0), p.repetition_penalty if token in self.tokens else 1
    self.changes[self.places.setdefault(token, len(self.places))] = (
      token + 1, bias, factor, times * p.frequency_penalty + min(times, 1) * p.presence_penalty)

  def allowed(self, words: int) -> np.ndarray | None:
    """A bit for each token that may come next, in words of 32; None: all may."""
    allowed, said = self.params.allowed_token_ids, self.tokens[self.num_prompt:] if self.bad_words else []
    banned = [*self.stop_ids] if self.length < self.num_prompt + self.params.min_tokens else []
    banned += [w[-1] for w in self.bad_words if w and said[max(0, len(said) - len(w) + 1):] == w[:-1]]
    if self.matcher: return np.pad(np.frombuffer(self.matcher.compute_bitmask(), np.int32), (0, words))[:words]
    if not banned and not allowed: return None
    bits = np.full(words * 32, not allowed)
    bits[allowed or []] = True
    if not {*(allowed or [-1])} <= {*banned}: bits[banned] = False   # else nothing would be left
    return np.packbits(bits, bitorder="little").view(np.int32)

  def remaining(self) -> int: return self.length - self.num_computed
  num_generated = property(lambda self: len(self.tokens) - self.num_prompt)
  exhausted = property(lambda self: self.length >= self.max_len)

  def append(self, token: int) -> None:
    """Take the next token, and finish where it, the grammar or the length says so."""
    self.tokens.append(token)
    self.length = max(self.length, len(self.tokens))
    self.metrics.num_generated += 1
    if self.metrics.num_generated == 1: self.metrics.first_token_time = time.monotonic()
    if len(self.changes): self._change(token)
    complete = self.matcher and (self.matcher.consume_token(token), self.matcher.is_stopped())[1]
    if token in self.stop_ids or complete: self.finish_reason = "stop"
    elif self.length == len(self.tokens) and self.exhausted: self.finish_reason = "length"
    if token in (self.params.stop_token_ids or ()): self.stop_reason = token


class CompletionOutput(types.SimpleNamespace):
  """One generated text. index: int, of n samples. text: str. token_ids: list[int]. finish_reason: None, "stop",
  "length" or "abort". stop_reason: the stop string or id that ended it, None for the model's end token. logprobs: None,
  or of each token a dict[int, Logprob], itself and the best. cumulative_logprob: None, or its own ones' sum."""


class RequestOutput(types.SimpleNamespace):
  """A request after a step; `step` and `generate` give text and ids so far, `generate_stream` the new ones. request_id:
  str. prompt: str, or None if it came as ids. prompt_token_ids: list[int]. outputs: list[CompletionOutput]. metrics:
  RequestMetrics. num_cached_tokens: int, of the prompt, found in the prefix cache. prompt_logprobs: None, or of each
  prompt token a dict[int, Logprob], None for the first."""
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
  def can_allocate(self, table: list[int], n: int) -> bool: return n <= (len(table) + self.num_free()) * self.block_size

  def allocate(self, table: list[int], num_tokens: int) -> None:
    """Grow `table` until it holds `num_tokens`. The caller has asked `can_allocate`."""
    while len(table) * self.block_size < num_tokens:
      table.append(block := self.free_blocks.popitem(last=False)[0])
      if self.cached.get(self.keys[block]) == block: del self.cached[self.keys[block]]
      self.ref_counts[block], self.keys[block] = 1, b""

  def free(self, seq: Sequence) -> None:
    """Let go of a sequence's blocks. What nobody can find is reused first, else what was let go of longest ago, and of
    one sequence the newest block. Its table is a new list then: the device knows them apart."""
    for block in reversed(seq.block_table):
      self.ref_counts[block] -= 1
      if self.ref_counts[block] == 0:
        self.free_blocks[block] = None
        self.free_blocks.move_to_end(block, last=self.keys[block] in self.cached)
    seq.block_table, seq.num_computed, seq.row, seq.length = [], 0, None, len(seq.tokens)

  def _key(self, seq: Sequence, i: int) -> bytes:
    tokens = seq.tokens[i * self.block_size:(i + 1) * self.block_size]
    return hashlib.sha256((self.keys[seq.block_table[i - 1]] if i else b"") + str(tokens).encode()).digest()

  def match(self, seq: Sequence) -> None:
    """Give a sequence without blocks those in which its tokens are found; the last token is always computed, and all
    where logits of the prompt are wanted."""
    for i in range((len(seq.tokens) - 1) // self.block_size * (self.caching and seq.prompt_logprobs is None)):
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
  """Who runs, who waits, and how many tokens of each sequence the next step computes."""
  def __init__(self, config: EngineConfig, blocks: BlockManager):
    self.config, self.blocks = config, blocks
    self.totals = collections.Counter(steps=0, prompt_tokens=0, generation_tokens=0, requests_finished=0, seconds=0,
                                      num_preemptions=0, prefix_cache_queries=0, prefix_cache_hits=0, scheduled=0)
    self.waiting, self.running = list[Sequence](), list[Sequence]()   # waiting: in order

  def add(self, seq: Sequence) -> None: bisect.insort(self.waiting, seq, key=lambda s: s.order)

  def schedule(self) -> dict[Sequence, int]:
    """The sequences of the next step and how many tokens of each, with blocks allocated. May preempt sequences, but
    never the oldest one of the highest priority: the pool holds any one alone."""
    batch: dict[Sequence, int] = {}
    budget, before = self.config.max_num_batched_tokens, self.totals["num_preemptions"]
    for seq in self.running: self.blocks.publish(seq)
    for seq in sorted(self.running, key=lambda s: (s.remaining() > 1, s.order)):
      n = 0 if seq.exhausted or seq.reads and seq.length > len(seq.tokens) else seq.remaining()
      if n > 1: n = min(n, budget - sum(batch.values()))   # there is always room for a decode
      while n and seq.row is not None and not self.blocks.can_allocate(seq.block_table, seq.num_computed + n):
        self.preempt(victim := max(self.running, key=lambda s: s.order))
        batch.pop(victim, None)
      if n and seq.row is not None:
        self.blocks.allocate(seq.block_table, seq.num_computed + n)
        batch[seq] = n
    rows = {*range(self.config.max_num_seqs)} - {seq.row for seq in self.running}
    while self.waiting and rows and before == self.totals["num_preemptions"] and budget > sum(batch.values()):
      self.blocks.match(seq := self.waiting[0])
      # Room for all of it, or the chunks of several would preempt each other
      if not self.blocks.can_allocate(seq.block_table, len(seq.tokens)):
        self.blocks.free(seq)
        break
      self.running.append(self.waiting.pop(0))
      seq.row = rows.pop()
      self.totals.update(prefix_cache_queries=len(seq.tokens), prefix_cache_hits=seq.num_computed)
      if math.isnan(seq.metrics.first_scheduled_time):
        self.totals["prompt_tokens"] += seq.num_prompt
        seq.metrics.first_scheduled_time, seq.num_cached = time.monotonic(), seq.num_computed
      batch[seq] = min(seq.remaining(), budget - sum(batch.values()))
      self.blocks.allocate(seq.block_table, seq.num_computed + batch[seq])
    return batch

  def preempt(self, seq: Sequence) -> None:
    """Take a sequence's blocks. It waits in its old place in the order, and computes again what is not found then."""
    self.totals["num_preemptions"] += 1
    self.running.remove(seq)
    self.blocks.free(seq)
    self.add(seq)
    if (n := self.totals["num_preemptions"]) & n - 1 == 0:   # ever more rarely
      logger.warning("%d preemptions: lower max_num_seqs or raise gpu_memory_utilization", n)

  def advance(self, batch: dict[Sequence, int]) -> None:
    """Count what a step that is about to run computes, and the tokens that come of it: they may be scheduled unread."""
    for seq, n in batch.items():
      seq.length, seq.num_computed = seq.length + (n == seq.remaining()), seq.num_computed + n

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
    self.running, self.waiting = ([s for s in queue if s is not seq] for queue in (self.running, self.waiting))
    self.blocks.free(seq)
