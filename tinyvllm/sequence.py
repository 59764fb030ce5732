"""What a request asks for, what it has so far, and what it gets. A sequence stores one counter of progress,
`num_computed`: the tokens whose K and V are in the cache, 0 <= num_computed <= len(tokens). All else is derived from
it."""
import math, time
from dataclasses import dataclass, field
from typing import Annotated

from .config import Options, check

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
  stop: list | str | None = None                        # end before any of these strings
  stop_token_ids: list | None = None                    # end at any of these ids
  include_stop_str_in_output: bool = False              # keep the stop string, or the text of the stop id
  ignore_eos: bool = False                              # go on after the model's end token
  skip_special_tokens: bool = True                      # leave special tokens out of the text

  def __post_init__(self) -> None:
    if isinstance(self.stop, str): object.__setattr__(self, "stop", [self.stop])
    super().__post_init__()
    for name, kind in (("stop", str), ("stop_token_ids", int)):
      for x in getattr(self, name) or ():
        check(type(x) is kind and x != "", f"{name}={getattr(self, name)!r} must list {kind.__name__}s, none empty")
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
