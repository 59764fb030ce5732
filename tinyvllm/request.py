"""A request's sampling parameters, the state of its sequences, and its outputs. Declares two seams: LogitsProcessor and
Proposer."""
import dataclasses, enum, itertools
from typing import Any, Protocol

import numpy as np

from .config import ModelConfig, Options, option

# Fields that the sampler reads
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")
# Fields whose default the model's generation_config.json sets
SAMPLING_DEFAULTS = (*SAMPLING_FIELDS, "repetition_penalty")
MAX_INT = 2**31 - 1


# The sampler of a step; a higher mode also serves rows of the lower ones. FILTERED: with top_k and top_p
SamplerMode = enum.IntEnum("SamplerMode", ["GREEDY", "RANDOM", "FILTERED"], start=0)


@dataclasses.dataclass(frozen=True)
class SamplingParams(Options):
  """Sampling parameters of a request, under vLLM's names. `tinyvllm.SamplingParams` is the extension's subclass with
  vLLM's other parameters, which need a LogitsProcessor."""
  n: int = option(1, "Number of samples per prompt; their seeds are consecutive", min=1, max=1024)
  max_tokens: int | None = option(256, "Maximum tokens to generate", min=1, max=MAX_INT)   # None: up to max_model_len
  temperature: float = option(1.0, "Sampling randomness; 0: greedy", min=0, max=100)
  top_k: int = option(0, "Keep the k best tokens; 0: all", min=-1, max=MAX_INT)
  top_p: float = option(1.0, "Keep the most probable tokens, with total probability p", min=1e-6, max=1)
  min_p: float = option(0.0, "Drop tokens less probable than min_p times the best one", min=0, max=1)
  seed: int | None = option(None, "Seed; equal seeds give equal text in any batch", min=-2**63, max=2**63 - 1)
  stop: list[str] | str | None = option(None, "Strings that end the text (default: none)")
  stop_token_ids: list[int] | None = option(None, "Token ids that end the text (default: none)")
  include_stop_str_in_output: bool = option(False, "Keep the stop string, or the text of the stop token")
  ignore_eos: bool = option(False, "Continue after the model's end token")
  skip_special_tokens: bool = option(True, "Leave special tokens out of the text")
  min_tokens, logprobs, prompt_logprobs = 0, None, None   # type: int, int | None, int | None   # fields of the subclass

  def __post_init__(self) -> None:
    if self.max_tokens is None: vars(self)["max_tokens"] = MAX_INT
    if isinstance(self.stop, str): vars(self)["stop"] = [self.stop]
    super().__post_init__()

  def processor(self, tokenizer: Any, model: ModelConfig) -> "LogitsProcessor | None": return None   # for a sequence

  sampler_mode = property(lambda self: SamplerMode.GREEDY if self.temperature < 1e-5 else SamplerMode.FILTERED
                          if self.top_k > 0 or self.top_p < 1 else SamplerMode.RANDOM)


class LogitsProcessor(Protocol):
  """Restricts and changes the logits of one sequence, and keeps its log probabilities (seam; logits.py). Override
  `SamplingParams.processor` in a subclass to add one."""
  depends_on_output: bool   # whether the logits of a token depend on the tokens generated before it

  def accept(self, token: int) -> bool:
    """Take the sequence's next token. Return True if the text must end after it."""
  def bitmask(self) -> np.ndarray | None:
    """One bit per token of the vocabulary that may come next, (ceil(vocab / 32),) int32; None: all may."""
  def adjustments(self, seq: "Sequence", position: int) -> list[tuple[int, float, float, float]]:
    """(token id, bias, factor, penalty) of each logit to change for the token at `position`, each id once:
    x = logit + bias, divided by factor if x > 0, else multiplied by it, minus penalty."""
  def output_logprobs(self, seq: "Sequence", start: int) -> tuple[list[dict[int, Any]] | None, float | None]:
    """Log probabilities of the tokens from position `start` on, and the sum over all generated ones, if requested."""


class Proposer(Protocol):
  """Drafts tokens for speculative decoding (Leviathan et al. 2023; seam; speculation.py). A step computes the drafts
  with the tokens before them; a draft is accepted if it equals the sampled token, so the text does not change."""
  num_behind: int   # last draft tokens of a sequence that a draft model's own cache lacks: 1, or 0 without a model

  def needs_sync(self, seq: "Sequence") -> bool:
    """Whether to draft for this sequence the tokens that the step in flight samples must be known."""
  def propose(self, scheduler: Any, batch: dict["Sequence", int]) -> None:
    """Set `draft_token_ids` of scheduled sequences, allocate their blocks and add their number to the batch."""
  def update(self, engine: Any, results: Any) -> None:
    """Verify the drafts of a step, `engine.append` the new tokens, drop the drafts and the blocks of rejected ones."""


table_versions = itertools.count()


@dataclasses.dataclass(eq=False, kw_only=True)
class Sequence:
  """A run of tokens; the cache holds K and V of the first `num_computed` ones."""
  request_id: str
  tokens: list[int]                # prompt, then output
  params: SamplingParams
  seed: int
  order: tuple[int, ...]           # scheduling order: priority, arrival
  index: int                       # number of the sample
  stop_ids: set[int]               # token ids that end it, the model's end tokens included
  max_len: int                     # maximum number of tokens, prompt included
  metrics: Any = None              # the request's, of the extension's metrics.py
  processor: LogitsProcessor | None = None
  draft_state: Any = None          # the Proposer's
  siblings: list["Sequence"] = dataclasses.field(default_factory=list)   # further samples; added after the first token
  num_cached: int | None = None    # prompt tokens found in the prefix cache when it first ran
  logprobs: dict[int, dict[int, Any]] = dataclasses.field(default_factory=dict)   # by position
  block_hashes: list[bytes] = dataclasses.field(default_factory=list)   # one for each full block, computed on demand
  finish_reason: str | None = None
  stop_reason: int | str | None = None   # the stop string or token id that ended it

  def __post_init__(self) -> None:
    self.num_prompt = len(self.tokens)
    self.restart()

  def restart(self) -> None:
    """Forget all that the device holds. The block table gets a new version, so that the device's copy is refreshed."""
    self.block_table: list[int] = []
    self.table_version = next(table_versions)
    self.slot: int | None = None    # row of the device's block tables, while it runs
    self.num_computed = 0
    self.num_in_flight = 0          # tokens that the device has sampled and the host has not read
    self.draft_token_ids: list[int] = []

  def __lt__(self, other: "Sequence") -> bool: return self.order < other.order

  length = property(lambda self: len(self.tokens) + self.num_in_flight)
  num_remaining = property(lambda self: self.length - self.num_computed)
  num_generated = property(lambda self: len(self.tokens) - self.num_prompt)
  reached_max_len = property(lambda self: self.length >= self.max_len)
  wants_prompt_logprobs = property(lambda self: self.index == 0 and self.params.prompt_logprobs is not None)

  def append(self, token: int) -> None:
    """Add the next token. Set finish_reason if it, the logits processor or the length ends the sequence."""
    done = self.processor is not None and self.processor.accept(token)
    is_end = done or token in self.stop_ids
    # No calls from here on: a KeyboardInterrupt finds either all of the changes made, or none
    if is_end or len(self.tokens) + 1 >= self.max_len: self.finish_reason = "stop" if is_end else "length"
    if token in (self.params.stop_token_ids or ()): self.stop_reason = token
    if self.num_in_flight: self.num_in_flight -= 1
    self.tokens.append(token)


@dataclasses.dataclass
class CompletionOutput:
  """One generated text."""
  index: int                             # number of the sample
  text: str
  token_ids: list[int]
  cumulative_logprob: float | None       # sum over the generated tokens
  logprobs: list[dict[int, Any]] | None   # per token: its own Logprob and the best ones, by token id
  finish_reason: str | None              # "stop", "length" or "abort"
  stop_reason: int | str | None          # the stop string or token id that ended it; None for the model's end token


@dataclasses.dataclass
class RequestOutput:
  """The state of a request: from `step` and `generate` its whole text so far, from `generate_stream` the new part."""
  request_id: str
  prompt: str | None                     # None if the prompt was given as token ids
  prompt_token_ids: list[int]
  prompt_logprobs: list[dict[int, Any] | None] | None   # None for the first token
  outputs: list[CompletionOutput]
  metrics: Any                           # RequestMetrics; None without the extension
  num_cached_tokens: int                 # prompt tokens found in the prefix cache

  finished = property(lambda self: all(output.finish_reason for output in self.outputs))
