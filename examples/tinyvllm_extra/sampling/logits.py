"""Penalties, logit bias, allowed and banned tokens, structured outputs and log probabilities. Owns a request's
LogitsProcessor and the LogitsPlan, the operations on logits in a step's graph."""
import collections, dataclasses, itertools, math
from typing import Any, NamedTuple

import numpy as np
from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import KernelInfo

from tinyvllm import request
from tinyvllm.backend import Sampler, Table
from tinyvllm.config import ModelConfig, check, check_ids, option
from tinyvllm.llama import Llama
from tinyvllm.request import MAX_INT, SamplerMode, Sequence
from tinyvllm.runner import UNKNOWN, Results, Row, Runner
from tinyvllm_extra.models.embedder import Embedder
from tinyvllm_extra.text.huggingface import ChatTokenizer

from . import structured_outputs

# An adjustment of one logit: x = logit + bias, divided by factor if x > 0, else multiplied by it, minus penalty. row:
# index of the row of logits, NO_ROW for padding
ADJUSTMENTS = Table(row="i", token="i", bias="f", factor="f", penalty="f")
NO_ROW = -1
ALL = -1        # log probabilities of the whole vocabulary
NUM_BEST = 20   # most probable tokens that the device ranks, besides the requested one; the host ranks more
CHUNK = 64      # logits per chunk in the search for the best tokens, which compares the chunks' maxima first


class Logprob(NamedTuple):
  """The log probability of a token, from the raw logits: before penalties and temperature."""
  logprob: float
  rank: int             # 1 for the most probable token
  decoded_token: str


@dataclasses.dataclass(frozen=True)
class SamplingParams(request.SamplingParams):
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
  structured_outputs: Any = option(None, 'Required format, as in {"regex": "[0-9]+"} (default: any)')

  # vLLM's parameters that are neither flags nor request fields. detokenize=False: leave the text empty
  best_of: dataclasses.InitVar[int | None] = None
  detokenize: dataclasses.InitVar[bool] = True
  truncate_prompt_tokens: dataclasses.InitVar[int | None] = None   # keep the last ones
  guided_decoding: dataclasses.InitVar[Any] = None                 # former name of structured_outputs
  spaces_between_special_tokens: dataclasses.InitVar[bool] = True  # no effect: the tokenizer adds none
  logits_processors: dataclasses.InitVar[list | None] = None
  extra_args: dataclasses.InitVar[dict | None] = None

  def __post_init__(self, *init_values: Any) -> None:
    best_of, detokenize, limit, guided_decoding, _, logits_processors, extra_args = init_values
    for name, x in {"logits_processors": logits_processors, "extra_args": extra_args}.items():
      check(not x, f"{name} is not supported: use logit_bias, allowed_token_ids, bad_words or structured_outputs")
    check(limit is None or type(limit) is int and limit > 0, f"truncate_prompt_tokens={limit!r} must be at least 1")
    check(best_of in (None, self.n), f"best_of={best_of!r} is not supported, only n={self.n}: leave it out")
    check(detokenize or not self.stop, "detokenize=False conflicts with stop: use stop_token_ids")
    vars(self).update(truncate_prompt_tokens=limit, detokenize=detokenize)
    if guided_decoding is not None: vars(self)["structured_outputs"] = guided_decoding
    if isinstance(self.logit_bias, dict):   # JSON has keys of type str
      vars(self)["logit_bias"] = {int(i) if str(i).isdecimal() else i: x for i, x in self.logit_bias.items()}
      invalid = [i for i in self.logit_bias if type(i) is not int][:1]
      check(not invalid, f"logit_bias={self.logit_bias!r}: keys must be token ids (int), not {invalid}",
            self.logit_bias)
    if self.structured_outputs is not None: vars(self)["structured_outputs"] = structured_outputs.normalize(vars(self))
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

  def processor(self, tokenizer: ChatTokenizer, model: ModelConfig) -> "Processor | None":
    own_fields = dataclasses.fields(self)[len(dataclasses.fields(request.SamplingParams)):]
    is_plain = all(getattr(self, field.name) == field.default for field in own_fields)
    return None if is_plain else Processor(self, tokenizer, model)


class Processor:
  """The LogitsProcessor for all fields of SamplingParams."""
  def __init__(self, params: SamplingParams, tokenizer: ChatTokenizer, model: ModelConfig):
    for name in ("allowed_token_ids", "logit_bias"): check_ids(name, getattr(params, name), model.vocab_size)
    self.params = params
    spellings = [space + word.lstrip() for word in params.bad_words or () for space in ("", " ")]
    self.bad_words = [*filter(None, (tokenizer.encode(spelling, False) for spelling in spellings))]
    bits = np.zeros(-(-model.vocab_size // 32) * 32, bool)
    bits[params.allowed_token_ids or []] = True
    self.allowed = np.packbits(bits, bitorder="little").view(np.int32) if params.allowed_token_ids else None
    structured = params.structured_outputs
    self.constraint = structured and structured.constraint(tokenizer, model.vocab_size, model.eos_token_ids)
    self.has_penalty = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    self.depends_on_output = bool(self.has_penalty or self.bad_words or self.constraint)

  def accept(self, token: int) -> bool: return bool(self.constraint and self.constraint.accept(token))
  def bitmask(self) -> np.ndarray | None: return self.constraint.bitmask() if self.constraint else self.allowed

  def adjustments(self, seq: Sequence, position: int) -> list[tuple[int, float, float, float]]:
    p = self.params
    banned = {word[-1] for word in self.bad_words   # if its other tokens end the output
              if seq.tokens[max(seq.num_prompt, len(seq.tokens) - len(word) + 1):] == word[:-1]}
    if position < seq.num_prompt + p.min_tokens: banned |= seq.stop_ids
    if p.allowed_token_ids and banned.issuperset(p.allowed_token_ids): banned.clear()   # else no token would be left
    bias = {**(p.logit_bias or {}), **dict.fromkeys(banned, -math.inf)}
    counts = collections.Counter(seq.tokens[seq.num_prompt:] if self.has_penalty else ())
    repeated = {*(counts if p.repetition_penalty == 1 else seq.tokens)}
    return [(i, bias.get(i, 0.0), p.repetition_penalty if i in repeated else 1.0,
             counts[i] * p.frequency_penalty + min(counts[i], 1) * p.presence_penalty) for i in repeated | bias.keys()]

  def output_logprobs(self, seq: Sequence, start: int) -> tuple[list[dict[int, Logprob]] | None, float | None]:
    if self.params.logprobs is None: return None, None
    total = sum(seq.logprobs[i][seq.tokens[i]].logprob for i in range(seq.num_prompt, len(seq.tokens)))
    return [seq.logprobs[i] for i in range(start, len(seq.tokens))], total


class LogitsPlan(NamedTuple):
  """The operations on logits in a step's graph, part of its GraphKey. vocab_size: V."""
  vocab_size: int
  has_logprobs: bool
  num_adjustments: int
  has_bitmask: bool
  has_all_logprobs: bool = False   # for the whole vocabulary

  def words(self, batch: "LogitsBatch | None", num_rows: int) -> np.ndarray:
    """Return a step's int32 words: ADJUSTMENTS, a token bitmask for each row of logits, then for each row the
    token to return the log probability of, UNKNOWN for the sampled one."""
    all_tokens = np.full(-(-self.vocab_size // 32), -1, np.int32)
    bitmasks = batch.bitmasks if batch else {}
    masks = [bitmasks.get(row, all_tokens) for row in range(num_rows if self.has_bitmask else 0)]
    adjustments = ADJUSTMENTS.write(batch.adjustments if batch else [], self.num_adjustments, row=NO_ROW)
    targets = np.full(num_rows if self.has_logprobs else 0, UNKNOWN, np.int32)
    if batch and self.has_logprobs: targets[:len(batch.targets)] = batch.targets
    return np.concatenate([adjustments, *masks, targets])

  def apply(self, logits: Tensor, words: Tensor) -> Tensor:
    """Return masked and adjusted logits, (S, V). words: as `words` returns them."""
    size = ADJUSTMENTS.num_words * self.num_adjustments
    if self.has_bitmask:
      masks = words[size:size + logits.shape[0] * -(-self.vocab_size // 32)].reshape(logits.shape[0], -1)
      logits = apply_bitmask(logits, masks).contiguous()
    elif self.num_adjustments: logits = logits.clone()   # the kernel works in place, but logprobs need the raw logits
    if not self.num_adjustments: return logits
    adjustments = words[:size].reshape(ADJUSTMENTS.num_words, -1).contiguous()
    return logits.custom_kernel(adjustments, fxn=adjust_kernel)[0]

  def logprobs(self, logits: Tensor, sampled: Tensor, words: Tensor, sampler: Sampler) -> list[Tensor]:
    """Return `top_logprobs` in a list, empty if no request needs them."""
    if not self.has_logprobs: return []
    targets = words[words.shape[0] - sampled.shape[0]:]
    k = ALL if self.has_all_logprobs else NUM_BEST
    return [top_logprobs(logits, (targets == UNKNOWN).where(sampled, targets), sampler, k)]

  def record(self, results: Results, tokenizer: ChatTokenizer) -> None:
    """Store a step's log probabilities in the sequences that requested them."""
    rows = zip(results.token_ids, results.step.rows, *results.logprobs, strict=False)
    for sampled, row, (own, rank, *best) in rows:
      seq = row.seq
      k = seq.params.logprobs if row.position >= seq.num_prompt else seq.params.prompt_logprobs
      if k is None: continue
      token = seq.tokens[row.position] if row.position < len(seq.tokens) else sampled
      end = None if k == ALL else k
      if self.has_all_logprobs:
        best = [x for i in np.argsort(-np.array(best), kind="stable")[:end].tolist() for x in (i, best[i])]
      pairs = [*zip(best[::2], best[1::2], itertools.count(1), strict=False)][:end]
      seq.logprobs[row.position] = {
        int(i): Logprob(x, int(r), tokenizer.decode([int(i)], False)) for i, x, r in [(token, own, rank), *pairs]}


class HiddenStatesPlan(LogitsPlan):
  """The plan of an embedding model: returns the hidden states, (S, hidden), that are in place of logits."""
  def logprobs(self, logits: Tensor, sampled: Tensor, words: Tensor, sampler: Sampler) -> list[Tensor]: return [logits]
  def record(self, results: Results, tokenizer: ChatTokenizer) -> None:
    for row, hidden in zip(results.step.rows, *results.logprobs, strict=False): row.seq.logprobs[row.position] = hidden


class ProcessedLogits:
  """Implements the core's seam Logits for all LogitsProcessors."""
  def batch(self, rows: list[Row], runner: Runner) -> "LogitsBatch": return LogitsBatch(rows, runner)

  def record(self, results: Results, tokenizer: ChatTokenizer) -> None:
    if results.logprobs: results.step.key.plan.record(results, tokenizer)


def graph_variants(model: Llama, optional: bool) -> list[tuple[SamplerMode, LogitsPlan | None]]:
  """Return sampler and plan of the graphs to capture at startup; with `optional` those of the optional features."""
  plan = LogitsPlan(model.vocab_size, True, 128, True)
  if isinstance(model, Embedder):   # has one kind of step
    return [] if optional else [(SamplerMode.GREEDY, HiddenStatesPlan(plan.vocab_size, True, 0, False))]
  if optional: return [(SamplerMode.RANDOM, None), (SamplerMode.FILTERED, plan)]
  return [(SamplerMode.GREEDY, None), (SamplerMode.FILTERED, None)]


class LogitsBatch:
  """The adjustments, token bitmasks and log probabilities that a step's sequences need, by row of logits."""
  def __init__(self, rows: list[Row], runner: Runner):
    # Logits of known tokens (prompt_logprobs) and of tokens that a step in flight samples are not changed
    sampled = [(i, row, processor) for i, row in enumerate(rows)
               if row.position >= row.seq.length and (processor := row.seq.processor)]
    self.adjustments = [(i, *x) for i, row, processor in sampled for x in processor.adjustments(row.seq, row.position)]
    self.bitmasks = {i: mask for i, _, processor in sampled if (mask := processor.bitmask()) is not None}
    self.targets = [row.seq.tokens[row.position] if row.position < len(row.seq.tokens) else UNKNOWN for row in rows]
    counts = [k for seq in {row.seq for row in rows}
              for k in (seq.params.logprobs, seq.params.prompt_logprobs if seq.index == 0 else None) if k is not None]
    has_all = any(k == ALL or k > NUM_BEST for k in counts)
    # Padded to few graph shapes: 16, 128, 1024, ...
    size = 16 * 8 ** -(-((len(self.adjustments) - 1) // 16).bit_length() // 3) if self.adjustments else 0
    plan_class = HiddenStatesPlan if isinstance(runner.model, Embedder) else LogitsPlan
    self.plan = plan_class(runner.model.vocab_size, bool(counts), size, bool(self.bitmasks), has_all)


def apply_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
  """Return logits, (S, V), with -inf for tokens whose bit is 0. bitmask: (S, ceil(V / 32)) int32."""
  bits = bitmask.unsqueeze(2).rshift(Tensor.arange(32)) & 1             # (S, W, 32)
  return bits.flatten(1)[:, :logits.shape[1]].ne(0).where(logits, -math.inf)


def adjust_kernel(logits: UOp, adjustments: UOp) -> UOp:
  """Adjust logits, (S, V), in place. adjustments: (columns of ADJUSTMENTS, E), at most one for each logit."""
  i = UOp.range(adjustments.shape[1], 0)
  row, token, *words = [adjustments[column, i].load() for column in range(ADJUSTMENTS.num_words)]
  bias, factor, penalty = [word.bitcast(dtypes.float32) for word in words]
  logit = logits[row.cast(dtypes.weakint).valid(row >= 0), token.cast(dtypes.weakint)]
  x = logit.load() + bias
  store = logit.store((x > 0).where(x / factor, x * factor) - penalty)
  return store.end(i).sink(arg=KernelInfo(name="adjust_logits"))


def largest(x: Tensor, ids: Tensor, sampler: Sampler, k: int) -> list[Tensor]:
  """Return the ids and values, (S, k) each, of the k largest elements of each row of x, (S, N), in descending order; of
  equal elements, the lowest id first. ids: (1, N) or (S, N)."""
  columns = []
  for _ in range(k):
    value = sampler.reduce(Tensor.max, x)
    best = -sampler.reduce(Tensor.max, (x == value).where(-ids, -dtypes.int32.max))
    columns.append((best, value))
    x = (ids == best).where(-math.inf, x).contiguous()
  return [Tensor.cat(*column, dim=1).contiguous() for column in zip(*columns, strict=True)]


def top_logprobs(logits: Tensor, ids: Tensor, sampler: Sampler, k: int = NUM_BEST) -> Tensor:
  """Return (S, 2 + 2k): log probability and rank of ids, (S,), then id and log probability of the k best tokens.
  For k = ALL return (S, 2 + V): the log probabilities of all tokens instead. Ids below 2**24 are exact in float32."""
  x = logits.log_softmax(1).contiguous()                                # (S, V)
  own = x.gather(1, ids.unsqueeze(1))                                   # (S, 1)
  columns = [own, 1 + (x > own).sum(1, keepdim=True)]
  size = int(x.shape[1])
  if k == ALL: return Tensor.cat(*columns, x, dim=1).contiguous()
  tokens = Tensor.arange(size).reshape(1, -1)
  if int(x.shape[0]) > 1 and size > 2 * k * CHUNK:   # the k chunks with the largest maximum hold the k best tokens
    chunks = x.pad((None, (0, -size % CHUNK)), value=-math.inf).unflatten(1, (-1, CHUNK))
    chunk_ids = Tensor.arange(chunks.shape[1]).reshape(1, -1)
    best_chunks, _ = largest(chunks.max(2).contiguous(), chunk_ids, sampler, k)
    tokens = (CHUNK * best_chunks.unsqueeze(2) + Tensor.arange(CHUNK)).flatten(1).contiguous()
    x = chunks.flatten(1).gather(1, tokens).contiguous()                # (S, k * CHUNK)
  best, values = largest(x, tokens, sampler, min(k, size))
  return Tensor.cat(*columns, best.stack(values, dim=2).flatten(1), dim=1).contiguous()
