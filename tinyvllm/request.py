"""Sampling parameters, sequences and outputs of a request. Declares two seams: LogitsProcessor and Proposer."""
import dataclasses, enum
from typing import TYPE_CHECKING, Any, Protocol

from .config import ModelConfig, Options, option

if TYPE_CHECKING: import numpy as np

# Fields that the sampler reads
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p")
MAX_INT = 2**31 - 1
TokenLogprobs = dict[int, Any]   # token id -> Logprob, see params.py of the extension


# Sampling code of a step. A higher mode also handles rows of the lower ones. FILTERED adds top_k and top_p
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
  min_tokens, logprobs, prompt_logprobs = 0, None, None   # type: int, int | None, int | None   # fields of the subclass

  def __post_init__(self) -> None:
    if self.max_tokens is None: vars(self)["max_tokens"] = MAX_INT
    if isinstance(self.stop, str): vars(self)["stop"] = [self.stop]
    super().__post_init__()

  def processor(self, tokenizer: Any, model: ModelConfig) -> "LogitsProcessor | None": return None   # for a sequence

  sampler_mode = property(lambda self: SamplerMode.GREEDY if self.temperature < 1e-5 else SamplerMode.FILTERED
                          if self.top_k > 0 or self.top_p < 1 else SamplerMode.RANDOM)


class LogitsProcessor(Protocol):
  """Masks and adjusts the logits of one sequence, and stores its log probabilities (seam; params.py). To add one,
  override `SamplingParams.processor` in a subclass."""
  depends_on_output: bool   # whether the logits of a token depend on the tokens generated before it

  def accept(self, token: int) -> bool:
    """Take the sequence's next token. Return True if the text must end after it."""
  def bitmask(self) -> "np.ndarray | None":
    """Return the token bitmask, (ceil(vocab / 32),) int32: one bit per token id that may come next; None: all."""
  def adjustments(self, seq: "Sequence", position: int) -> list[tuple[int, float, float, float]]:
    """Return (token id, bias, factor, penalty) of each logit to adjust at `position`, each id once:
    x = logit + bias, divided by factor if x > 0, else multiplied by it, minus penalty."""
  def output_logprobs(self, seq: "Sequence", start: int) -> tuple[list[TokenLogprobs] | None, float | None]:
    """Return log probabilities of the tokens from position `start` on, and their sum over all generated tokens."""


class Proposer(Protocol):
  """Drafts tokens for speculative decoding (Leviathan et al. 2023; seam; speculation.py). A step computes the drafts
  with the tokens before them; a draft is accepted if it equals the sampled token, so the text does not change."""
  num_behind: int   # draft tokens that a draft model's own KV cache lacks: 1, or 0 without a draft model

  def needs_sync(self, seq: "Sequence") -> bool:
    """Return whether drafting for this sequence needs tokens that the step in flight samples."""
  def propose(self, scheduler: Any, batch: dict["Sequence", int]) -> None:
    """Set `draft_token_ids` of scheduled sequences, allocate their blocks and add their count to the batch."""
  def update(self, engine: Any, results: Any) -> None:
    """Verify a step's draft tokens, `engine.append` the new tokens, and free the blocks of rejected drafts."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Sequence:
  """The tokens of one sample. The KV cache holds K and V of the first `num_computed` tokens."""
  request_id: str
  tokens: list[int]                # prompt, then output
  params: SamplingParams
  seed: int
  order: tuple[int, ...]           # scheduling order: priority, arrival
  index: int                       # which of the n samples
  stop_ids: set[int]               # token ids that end it, including the model's end tokens
  max_len: int                     # maximum number of tokens, including the prompt
  metrics: Any = None              # the request's metrics, see engine_metrics.py of the extension
  processor: LogitsProcessor | None = None
  siblings: list["Sequence"] = dataclasses.field(default_factory=list)   # other samples; start after the first token
  num_cached: int | None = None    # prompt tokens in the prefix cache when it first ran
  logprobs: dict[int, TokenLogprobs] = dataclasses.field(default_factory=dict)   # by position
  block_hashes: list[bytes] = dataclasses.field(default_factory=list)   # one per full block, computed on demand
  salt: bytes = b""                # only sequences with the same salt share blocks
  finish_reason: str | None = None
  stop_reason: int | str | None = None   # the stop string or token id that ended it

  def __post_init__(self) -> None:
    self.num_prompt = len(self.tokens)
    self.restart()

  def restart(self) -> None:
    """Discard all state on the device. A new list makes the runner upload the block table again."""
    self.block_table: list[int] = []
    self.slot: int | None = None    # index into the device's block tables while running
    self.num_computed = 0
    self.num_in_flight = 0          # sampled tokens that the host has not read yet
    self.draft_token_ids: list[int] = []

  def __lt__(self, other: "Sequence") -> bool: return self.order < other.order

  length = property(lambda self: len(self.tokens) + self.num_in_flight)
  num_remaining = property(lambda self: self.length - self.num_computed)
  num_generated = property(lambda self: len(self.tokens) - self.num_prompt)
  reached_max_len = property(lambda self: self.length >= self.max_len)
  wants_prompt_logprobs = property(lambda self: self.index == 0 and self.params.prompt_logprobs is not None)

  def append(self, token: int) -> None:
    """Append the next token. Set finish_reason if the token, the logits processor or the length ends the sequence."""
    is_end = self.processor is not None and self.processor.accept(token) or token in self.stop_ids
    # No function calls below, so a KeyboardInterrupt cannot leave these changes half done
    if is_end or len(self.tokens) + 1 >= self.max_len: self.finish_reason = "stop" if is_end else "length"
    if token in (self.params.stop_token_ids or ()): self.stop_reason = token
    if self.num_in_flight: self.num_in_flight -= 1
    self.tokens.append(token)


@dataclasses.dataclass
class CompletionOutput:
  """One generated text."""
  index: int                             # which of the n samples
  text: str
  token_ids: list[int]
  cumulative_logprob: float | None       # sum over the generated tokens
  logprobs: list[TokenLogprobs] | None   # per token: its own Logprob and the best ones, by token id
  finish_reason: str | None              # "stop", "length" or "abort"
  stop_reason: int | str | None          # the stop string or token id that ended it; None for the model's end token


@dataclasses.dataclass
class RequestOutput:
  """The output of a request. `step` and `generate` return all of it so far, `generate_stream` only the new part."""
  request_id: str
  prompt: str | None                     # None if the prompt was given as token ids
  prompt_token_ids: list[int]
  prompt_logprobs: list[TokenLogprobs | None] | None   # None for the first token
  outputs: list[CompletionOutput]
  metrics: Any                           # RequestMetrics; None without the extension
  num_cached_tokens: int                 # prompt tokens in the prefix cache

  finished = property(lambda self: all(output.finish_reason for output in self.outputs))
