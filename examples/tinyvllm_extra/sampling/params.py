"""Sampling parameters of a request, and its LogitsProcessor: penalties, logit bias, allowed and banned tokens,
structured outputs. The command line makes flags of the fields, so that nothing here imports numpy or tinygrad early."""
import collections, dataclasses, math, typing

from tinyvllm.config import InputError, JsonObject, ModelConfig, check, check_ids, option
from tinyvllm.request import MAX_INT, SamplingParams as CoreSamplingParams, Sequence
from tinyvllm_extra.options import SAMPLING_DEFAULTS

if typing.TYPE_CHECKING:
  import numpy as np

  from tinyvllm_extra.text.huggingface import ChatTokenizer

ALL = -1   # log probabilities of the whole vocabulary


class Logprob(typing.NamedTuple):
  """The log probability of a token, from the raw logits: before penalties and temperature."""
  logprob: float
  rank: int             # 1 for the most probable token
  decoded_token: str


@dataclasses.dataclass(frozen=True)
class SamplingParams(CoreSamplingParams):
  """Sampling parameters of a request, under vLLM's names."""
  skip_special_tokens: bool = option(True, "Leave special tokens out of the text")
  min_tokens: int = option(0, "Minimum tokens before an end token or a stop string", min=0, max=MAX_INT)
  repetition_penalty: float = option(1.0, "Penalty for tokens in the prompt or output; 1: none", min=0.01, max=100)
  presence_penalty: float = option(0.0, "Penalty for tokens in the output", min=-2, max=2)
  frequency_penalty: float = option(0.0, "Penalty for tokens in the output, times their count", min=-2, max=2)
  logit_bias: dict[int, float] | None = option(None, "Logit bias by token id (default: none)", min=-100, max=100)
  allowed_token_ids: list[int] | None = option(None, "The only token ids to sample (default: all)")
  bad_words: list[str] | None = option(None, "Words that must not be generated (default: none)")
  logprobs: int | None = option(None, "Log probabilities per token, besides its own; -1: all (default: off)",
                                min=-1, max=MAX_INT)
  prompt_logprobs: int | None = option(None, "Log probabilities per prompt token (default: off)", min=-1, max=MAX_INT)
  structured_outputs: typing.Any = option(None, 'Required format, as in {"regex": "[0-9]+"} (default: any)')

  # vLLM's parameters that are neither flags nor request fields
  detokenize: dataclasses.InitVar[bool] = option(True, "Return text; False: only token ids")
  truncate_prompt_tokens: dataclasses.InitVar[int | None] = option(None, "Keep the prompt's last tokens (default: all)")
  spaces_between_special_tokens: dataclasses.InitVar[bool] = option(True, "No effect: the tokenizer adds none")
  extra_args: dataclasses.InitVar[dict | None] = option(None, "Must be None")

  def __post_init__(self, detokenize: bool, limit: int | None, _: bool, extra_args: dict | None) -> None:
    check(not extra_args, "extra_args is not supported: use logit_bias, bad_words or structured_outputs")
    check(limit is None or type(limit) is int and limit > 0, f"truncate_prompt_tokens={limit!r} must be at least 1")
    check(detokenize or not self.stop, "detokenize=False conflicts with stop: use stop_token_ids")
    vars(self).update(truncate_prompt_tokens=limit, detokenize=detokenize)
    if isinstance(self.logit_bias, dict):   # JSON has keys of type str
      vars(self)["logit_bias"] = {int(i) if str(i).isdecimal() else i: x for i, x in self.logit_bias.items()}
      wrong = [i for i in self.logit_bias if type(i) is not int][:1]
      check(not wrong, f"logit_bias={self.logit_bias!r}: keys must be token ids (int), not {wrong}", self.logit_bias)
    if self.structured_outputs is not None:
      from .structured_outputs import normalize   # here, as it imports numpy
      vars(self)["structured_outputs"] = normalize(vars(self))
    super().__post_init__()
    low, high = self.min_tokens, self.max_tokens
    check(low <= (high or 0), f"min_tokens={low} must be at most max_tokens={high}")
    check(self.allowed_token_ids != [], "allowed_token_ids=[] must not be empty: use None to allow all tokens")

  def check_logprobs(self, limit: int, vocab_size: int) -> None:
    """Raise InputError if the log probabilities per token exceed `limit` (--max-logprobs; -1: none)."""
    for name in ("logprobs", "prompt_logprobs"):
      value = getattr(self, name)
      number = vocab_size if value == ALL else value or 0
      check(limit == ALL or number <= limit, f"{name}={value} must be between 0 and {limit}: raise max_logprobs", value)

  def clone(self) -> "SamplingParams": return dataclasses.replace(self)

  def processor(self, tokenizer: "ChatTokenizer", model: ModelConfig) -> "Processor | None":
    # After skip_special_tokens, which changes no logits
    own_fields = dataclasses.fields(self)[len(dataclasses.fields(CoreSamplingParams)) + 1:]
    return Processor(self, tokenizer, model) if any(getattr(self, x.name) != x.default for x in own_fields) else None


class Processor:
  """The LogitsProcessor for all fields of SamplingParams."""
  def __init__(self, params: SamplingParams, tokenizer: "ChatTokenizer", model: ModelConfig):
    check_ids(model.vocab_size, allowed_token_ids=params.allowed_token_ids, logit_bias=params.logit_bias)
    self.params = params
    spellings = [space + word.lstrip() for word in params.bad_words or () for space in ("", " ")]
    self.bad_words = [*filter(None, (tokenizer.encode(spelling, False) for spelling in spellings))]
    import numpy as np
    ids, num_bits = params.allowed_token_ids, -(-model.vocab_size // 32) * 32
    self.allowed = np.packbits(np.isin(np.arange(num_bits), ids), bitorder="little").view(np.int32) if ids else None
    structured = params.structured_outputs
    self.constraint = structured and structured.constraint(tokenizer, model.vocab_size, model.eos_token_ids)
    self.has_penalty = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    self.depends_on_output = bool(self.has_penalty or self.bad_words or self.constraint)
    self.rows = {i: (i, x, 1.0, 0.0) for i, x in (params.logit_bias or {}).items()}   # by token id, see adjustments
    self.counts = collections.Counter[int]()   # output tokens
    self.num_read = 0   # tokens of the sequence in `rows` and `counts`

  def accept(self, token: int) -> bool: return bool(self.constraint and self.constraint.accept(token))
  def bitmask(self) -> "np.ndarray | None": return self.constraint.bitmask() if self.constraint else self.allowed

  def adjustments(self, seq: Sequence, position: int) -> list[tuple[int, float, float, float]]:
    p = self.params
    banned = {word[-1] for word in self.bad_words   # if its other tokens end the output
              if seq.tokens[max(seq.num_prompt, len(seq.tokens) - len(word) + 1):] == word[:-1]}
    if position < seq.num_prompt + p.min_tokens: banned |= seq.stop_ids
    if p.allowed_token_ids and banned.issuperset(p.allowed_token_ids): banned.clear()   # else no token would be left
    new = seq.tokens[self.num_read:] if self.has_penalty else []   # older tokens are in `rows` already
    self.counts.update(seq.tokens[max(self.num_read, seq.num_prompt):] if new else [])
    for i in new if p.repetition_penalty != 1 else self.counts.keys() & new:
      penalty = self.counts[i] * p.frequency_penalty + bool(self.counts[i]) * p.presence_penalty
      self.rows[i] = i, (p.logit_bias or {}).get(i, 0.0), p.repetition_penalty, penalty
    self.num_read += len(new)
    return [*(self.rows | {i: (i, -math.inf, *self.rows.get(i, (i, 0.0, 1.0, 0.0))[2:]) for i in banned}).values()]

  def output_logprobs(self, seq: Sequence, start: int) -> tuple[list[dict[int, Logprob]] | None, float | None]:
    if self.params.logprobs is None: return None, None
    total = sum(seq.logprobs[i][seq.tokens[i]].logprob for i in range(seq.num_prompt, len(seq.tokens)))
    return [seq.logprobs[i] for i in range(start, len(seq.tokens))], total


def sampling_defaults(fields: JsonObject) -> JsonObject:
  """Return override_generation_config under the names of SamplingParams. Raises InputError for an invalid field."""
  names = (*SAMPLING_DEFAULTS, "max_new_tokens")
  for name in fields: check(name in names, f"override_generation_config: {name!r} must be one of {', '.join(names)}")
  defaults = {name.replace("max_new_tokens", "max_tokens"): x for name, x in fields.items() if x is not None}
  try: SamplingParams(**defaults)
  except InputError as error: raise InputError(f"override_generation_config: {error}") from error
  return defaults
