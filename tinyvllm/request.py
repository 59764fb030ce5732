"""What a request asks for, what each of its sequences has so far, and what comes back. Token ids only, no text."""
import collections, dataclasses, importlib, math, time
from typing import Annotated, Any, NamedTuple, TypedDict

import numpy as np

from .config import Options, check

# What is done to a logit before a token is chosen: bias is added, then factor divides it if it is positive and else
# multiplies it, then penalty is subtracted. row: of the step's logits, -1 for none
EDIT: Any = np.dtype([("row", "i4"), ("token", "i4"), ("bias", "f4"), ("factor", "f4"), ("penalty", "f4")])


@dataclasses.dataclass(frozen=True)
class SamplingParams(Options):
  """How to choose a request's tokens and when to stop, with vLLM's names."""
  n: Annotated[int, 1, 1024] = 1                        # samples of one prompt; their seeds follow each other
  max_tokens: Annotated[int | None, 1, 2**31 - 1] = 256   # tokens to generate at most; None: as many as fit
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
  structured_outputs: object = None                     # what the text must be: StructuredOutputsParams

  def __post_init__(self) -> None:
    values = vars(self)   # in which is replaced what JSON has in another form
    if self.max_tokens is None: values["max_tokens"] = 2**31 - 1
    if isinstance(self.stop, str): values["stop"] = [self.stop]
    if isinstance(self.logit_bias, dict):
      values["logit_bias"] = {int(i) if str(i).isdecimal() else i: x for i, x in self.logit_bias.items()}
    if self.structured_outputs is not None:
      values["structured_outputs"] = importlib.import_module("tinyvllm_extra.structured_outputs").taken(self)
    super().__post_init__()
    most = values["max_tokens"]
    check(self.min_tokens <= most, f"min_tokens={self.min_tokens} is above max_tokens={most}")
    check(self.allowed_token_ids != [], "allowed_token_ids=[] allows nothing: None allows all")

  def clone(self) -> "SamplingParams": return dataclasses.replace(self)

  # Whether logits hang on the tokens before; 0: the best token, 1: one drawn of all, 2: one drawn of the best
  penalized = property(lambda self: self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty)
  sampler = property(lambda self: 0 if self.temperature < 1e-5 else 2 if self.top_k > 0 or self.top_p < 1 else 1)


# vLLM's names for a prompt's two plain forms
class TextPrompt(TypedDict): prompt: str
class TokensPrompt(TypedDict): prompt_token_ids: list[int]


class Logprob(NamedTuple):
  """Of a token at its place, by the model's own logits."""
  logprob: float
  rank: int             # 1 for the most probable
  decoded_token: str


@dataclasses.dataclass
class RequestMetrics:
  """Monotonic times of a request's events, and the seconds between them; NaN for what has not happened."""
  arrival_time: float = dataclasses.field(default_factory=time.monotonic)
  first_scheduled_time: float = math.nan
  first_token_time: float = math.nan
  finished_time: float = math.nan
  num_generated: int = 0   # by all samples
  num_draft_tokens: int = 0      # that were guessed, and checked
  num_accepted_tokens: int = 0   # of these, that came true

  queue_time = property(lambda self: self.first_scheduled_time - self.arrival_time)
  ttft = property(lambda self: self.first_token_time - self.arrival_time)
  tpot = property(lambda self: (self.finished_time - self.first_token_time) / max(1, self.num_generated - 1))
  latency = property(lambda self: self.finished_time - self.arrival_time)


@dataclasses.dataclass(eq=False, kw_only=True)
class Sequence:
  """One run of tokens, of which `num_computed` have their K and V in the cache."""
  request_id: str
  tokens: list[int]                # the prompt's, then those generated
  params: SamplingParams
  seed: int
  order: tuple[int, ...]           # by which it is scheduled: priority, arrival
  index: int                       # of the samples of its prompt
  stop_ids: frozenset[int]         # that end it, the model's end tokens among them
  max_len: int                     # tokens, with the prompt's
  metrics: RequestMetrics = dataclasses.field(default_factory=RequestMetrics)
  bad_words: list[list[int]] = dataclasses.field(default_factory=list)
  constraint: Any = None           # of structured output: mask(), accept(token), done
  drafter: Any = None              # of its next tokens: tinyvllm_extra.speculation's Drafter
  forks: list["Sequence"] = dataclasses.field(default_factory=list)   # its prompt's others: they wait for it
  num_cached: int = 0              # tokens of the prompt that were found when it first ran
  logprobs: dict[int, dict[int, Logprob]] = dataclasses.field(default_factory=dict)   # by place
  finish_reason: str | None = None
  stop_reason: int | str | None = None   # the stop string or id that ended it

  def __post_init__(self) -> None:
    self.num_prompt = len(self.tokens)
    self.restart()

  def restart(self) -> None:
    """Without blocks: what the device has is lost. Its table is a new list: the device knows them apart."""
    self.block_table: list[int] = []
    self.row: int | None = None   # of the device's block tables, while it runs
    self.num_computed = 0
    self.num_unread = 0           # tokens that the device has chosen and the host has not read
    self.drafts: list[int] = []   # of its next tokens, which a step checks

  def __lt__(self, other: "Sequence") -> bool: return self.order < other.order

  length = property(lambda self: len(self.tokens) + self.num_unread)
  num_generated = property(lambda self: len(self.tokens) - self.num_prompt)
  exhausted = property(lambda self: self.length >= self.max_len)
  # Whether logits of all its prompt are wanted, so that all of it is computed
  scores_prompt = property(lambda self: self.index == 0 and self.params.prompt_logprobs is not None)
  # Whether the choice of a token hangs on which came before: behind a draft nobody knows
  reads = property(lambda self: bool(self.params.penalized or self.bad_words or self.constraint))
  def remaining(self) -> int: return self.length - self.num_computed

  def waits(self) -> bool:
    """Whether the host has not read what the choice of its next token hangs on."""
    return bool(self.num_unread and (self.reads or self.drafter and self.drafter.waits(self)))

  def append(self, token: int) -> None:
    """Take the next token, and finish where it, the constraint or the length says so."""
    if self.constraint: self.constraint.accept(token)
    stops = token in self.stop_ids or self.constraint and self.constraint.done
    if self.metrics.num_generated == 0: self.metrics.first_token_time = time.monotonic()
    # Once the first of these is set nothing is called before the token is there: an interrupt comes before all of them,
    # or behind
    if stops or len(self.tokens) + 1 >= self.max_len: self.finish_reason = "stop" if stops else "length"
    if token in (self.params.stop_token_ids or ()): self.stop_reason = token
    self.metrics.num_generated += 1
    if self.num_unread: self.num_unread -= 1
    self.tokens.append(token)

  def mask(self, vocab_size: int) -> np.ndarray | None:
    """A bit for each token that may come next, in int32 words; None: all may."""
    if self.constraint: return self.constraint.mask()
    if not self.params.allowed_token_ids: return None
    bits = np.isin(np.arange(-(-vocab_size // 32) * 32), self.params.allowed_token_ids)
    return np.packbits(bits, bitorder="little").view(np.int32)

  def edits(self, place: int) -> list[tuple[int, float, float, float]]:
    """What is done to the logits of the token at a place, as EDIT has it behind the row, for each that is touched."""
    p = self.params
    banned = {word[-1] for word in self.bad_words   # whose others are there
              if self.tokens[max(self.num_prompt, len(self.tokens) - len(word) + 1):] == word[:-1]}
    if place < self.num_prompt + p.min_tokens: banned |= self.stop_ids
    if p.allowed_token_ids and banned.issuperset(p.allowed_token_ids): banned.clear()   # or nothing would be left
    bias = {**(p.logit_bias or {}), **dict.fromkeys(banned, -math.inf)}
    said = collections.Counter(self.tokens[self.num_prompt:] if p.penalized else ())
    seen = {*(said if p.repetition_penalty == 1 else self.tokens)}
    return [(i, bias.get(i, 0.0), p.repetition_penalty if i in seen else 1.0,
             said[i] * p.frequency_penalty + min(said[i], 1) * p.presence_penalty) for i in seen | bias.keys()]


@dataclasses.dataclass
class CompletionOutput:
  """One generated text."""
  index: int                             # of n samples
  text: str
  token_ids: list[int]
  cumulative_logprob: float | None       # the sum of its tokens'
  logprobs: list[dict[int, Logprob]] | None   # of each token, itself and the best
  finish_reason: str | None              # "stop", "length" or "abort"
  stop_reason: int | str | None          # the stop string or id that ended it, None for the model's end token


@dataclasses.dataclass
class RequestOutput:
  """A request after a step: `step` and `generate` give text and ids so far, `generate_stream` the new ones."""
  request_id: str
  prompt: str | None                     # None if it came as ids
  prompt_token_ids: list[int]
  prompt_logprobs: list[dict[int, Logprob] | None] | None   # None for the first token
  outputs: list[CompletionOutput]
  metrics: RequestMetrics
  num_cached_tokens: int                 # of the prompt, found in the prefix cache

  finished = property(lambda self: all(output.finish_reason for output in self.outputs))
