"""What a request asks for, what it has so far, and what it gets. A sequence stores one counter of progress, `num_computed`: the tokens whose K and V
are in the cache, 0 <= num_computed <= len(tokens). All else is derived from it."""
import time
from dataclasses import dataclass, field
from typing import Any

from .config import Options, option

MAX_BANNED = 16   # stop ids that min_tokens can hold back: their number is a constant of the sampler's graph


@dataclass(frozen=True)
class SamplingParams(Options):
  """How to choose a request's tokens and when to stop, with vLLM's names. A temperature below 1e-5 is greedy. top_k 0 or -1, top_p 1 and min_p 0 keep
  every token. stop: strings, stop_token_ids: token ids, that end the text."""
  max_tokens: int = option(256, int, 1, help="tokens to generate at most")
  min_tokens: int = option(0, int, 0, help="tokens before an end token or stop id may come")
  temperature: float = option(1.0, float, 0.0, 100.0, help="0 is greedy")
  top_k: int = option(0, int, -1, help="keep the k most probable tokens; 0: all")
  top_p: float = option(1.0, float, 1e-6, 1.0, help="keep the most probable tokens that together reach p")
  min_p: float = option(0.0, float, 0.0, 1.0, help="keep tokens at least min_p times as probable as the best")
  seed: int | None = option(None, int, -2**63, 2**63 - 1, help="the same seed gives the same text in any batch")
  stop: str | list[str] | None = option(None, list, help="end before this text")
  stop_token_ids: list[int] | None = option(None, list, help="end at these token ids")
  include_stop_str_in_output: bool = option(False, bool, help="keep the stop string in the text")
  ignore_eos: bool = option(False, bool, help="go on after the model's end token")
  skip_special_tokens: bool = option(True, bool, help="leave special tokens out of the text")

  def __post_init__(self) -> None:
    if isinstance(self.stop, str): object.__setattr__(self, "stop", [self.stop])
    super().__post_init__()
    for name, kind in (("stop", str), ("stop_token_ids", int)):
      for x in getattr(self, name) or ():
        if not isinstance(x, kind) or x == "" or isinstance(x, bool):
          raise ValueError(f"{name}={getattr(self, name)!r} must be a list of {kind.__name__}, none empty: remove {x!r}")
    if self.min_tokens > self.max_tokens: raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}")

  @property
  def greedy(self) -> bool: return self.temperature < 1e-5


@dataclass
class RequestMetrics:
  """Monotonic times in seconds of a request's events, None before they happen."""
  arrival_time: float = field(default_factory=time.monotonic)
  first_scheduled_time: float | None = None
  first_token_time: float | None = None
  finished_time: float | None = None
  num_generated: int = 0

  def _since(self, start: float | None, end: float | None) -> float | None: return None if start is None or end is None else end - start
  @property
  def queue_time(self) -> float | None: return self._since(self.arrival_time, self.first_scheduled_time)
  @property
  def ttft(self) -> float | None:
    """Time to first token, seconds."""
    return self._since(self.arrival_time, self.first_token_time)
  @property
  def latency(self) -> float | None: return self._since(self.arrival_time, self.finished_time)
  @property
  def tpot(self) -> float | None:
    """Mean time per output token after the first, seconds."""
    total = self._since(self.first_token_time, self.finished_time)
    return None if total is None or self.num_generated < 2 else total / (self.num_generated - 1)


@dataclass(eq=False)
class Sequence:
  """One run of tokens: the prompt's, then those generated. `row` is its place in the device's block tables while it runs."""
  request_id: str
  tokens: list[int]
  num_prompt: int
  params: SamplingParams
  seed: int
  stop_ids: frozenset[int]
  max_len: int
  priority: int = 0
  arrival: int = 0
  num_computed: int = 0
  block_table: list[int] = field(default_factory=list)
  row: int | None = None
  finish_reason: str | None = None
  stop_reason: int | str | None = None
  metrics: RequestMetrics = field(default_factory=RequestMetrics)

  @property
  def remaining(self) -> int: return len(self.tokens) - self.num_computed
  @property
  def num_generated(self) -> int: return len(self.tokens) - self.num_prompt
  @property
  def banned(self) -> list[int]:
    """The ids that may not come next."""
    return sorted(self.stop_ids) if self.num_generated < self.params.min_tokens else []

  def append(self, token: int) -> None:
    """Take the next token, and finish where it, or the length, says so."""
    self.tokens.append(token)
    self.metrics.num_generated = self.num_generated
    if self.num_generated == 1: self.metrics.first_token_time = time.monotonic()
    if token in self.stop_ids:
      self.finish_reason, self.stop_reason = "stop", token if token in (self.params.stop_token_ids or ()) else None
    elif self.num_generated >= self.params.max_tokens or len(self.tokens) >= self.max_len: self.finish_reason = "length"


@dataclass
class CompletionOutput:
  """One generated text. finish_reason: None, "stop", "length" or "abort"; stop_reason: the stop string or stop id that ended it, None for an end token."""
  index: int
  text: str
  token_ids: list[int]
  finish_reason: str | None = None
  stop_reason: int | str | None = None


@dataclass
class RequestOutput:
  """A request's state after a step. From `step` and `generate` the text and ids are all so far; from `generate_stream` the new ones."""
  request_id: str
  prompt: str | None
  prompt_token_ids: list[int]
  outputs: list[CompletionOutput]
  finished: bool
  metrics: RequestMetrics
  num_cached_tokens: int = 0


Prompt = str | dict[str, Any]
