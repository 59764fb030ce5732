"""Adjusts logits and computes log probabilities. Owns the LogitsPlan, the operations on logits in a step's graph."""
import itertools, math, typing

import numpy as np
from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import KernelInfo

from tinyvllm.backend import Sampler, Table
from tinyvllm.llama import Llama
from tinyvllm.request import SamplerMode
from tinyvllm.runner import UNKNOWN, Results, Row, Runner
from tinyvllm_extra.models.layers import Embedder
from tinyvllm_extra.text.huggingface import ChatTokenizer

from .params import ALL, Logprob

# An adjustment of one logit: x = logit + bias, divided by factor if x > 0, else multiplied by it, minus penalty. row:
# index of the row of logits, NO_ROW for padding
ADJUSTMENTS = Table(row="i", token="i", bias="f", factor="f", penalty="f")
NO_ROW = -1
NUM_BEST = 20   # most probable tokens that the device ranks, besides the requested one; the host ranks more
CHUNK = 64      # logits per chunk in the search for the best tokens, which compares the chunks' maxima first


class LogitsPlan(typing.NamedTuple):
  """The operations on logits in a step's graph, part of its GraphKey. vocab_size: V."""
  vocab_size: int
  has_logprobs: bool
  num_adjustments: int
  has_bitmask: bool
  has_all_logprobs: bool = False   # for the whole vocabulary
  has_adapters: bool = False       # LoRA adapters of some sequences

  def words(self, batch: "LogitsBatch | None", num_rows: int) -> np.ndarray:
    """Return a step's int32 words: ADJUSTMENTS, a token bitmask for each row of logits, then for each row the
    token to return the log probability of, UNKNOWN for the sampled one."""
    masks = np.full((num_rows if self.has_bitmask else 0, -(-self.vocab_size // 32)), -1, np.int32)
    for row, mask in batch.bitmasks.items() if batch else (): masks[row] = mask
    adjustments = ADJUSTMENTS.write(batch.adjustments if batch else [], self.num_adjustments, row=NO_ROW)
    targets = np.full(num_rows if self.has_logprobs else 0, UNKNOWN, np.int32)
    if batch and self.has_logprobs: targets[:len(batch.targets)] = batch.targets
    return np.concatenate([adjustments, masks.ravel(), targets])

  def apply(self, logits: Tensor, words: Tensor) -> Tensor:
    """Return masked and adjusted logits, (S, V). words: as `words` returns them."""
    size = ADJUSTMENTS.num_words * self.num_adjustments
    if self.has_bitmask:
      masks = words[size:size + logits.shape[0] * -(-self.vocab_size // 32)].reshape(logits.shape[0], -1)
      logits = apply_bitmask(logits, masks).contiguous()
    elif self.num_adjustments: logits = logits.clone()   # the kernel works in place, but logprobs need the raw logits
    if not self.num_adjustments: return logits
    return logits.custom_kernel(words[:size].reshape(ADJUSTMENTS.num_words, -1).contiguous(), fxn=adjust_kernel)[0]

  def logprobs(self, logits: Tensor, sampled: Tensor, words: Tensor, sampler: Sampler) -> list[Tensor]:
    """Return `top_logprobs` in a list, empty if no request needs them."""
    if not self.has_logprobs: return []
    targets = words[words.shape[0] - sampled.shape[0]:]
    k = ALL if self.has_all_logprobs else NUM_BEST
    return [top_logprobs(logits, (targets == UNKNOWN).where(sampled, targets), sampler, k)]

  def record(self, results: Results, tokenizer: ChatTokenizer) -> None:
    """Store a step's log probabilities in the sequences that requested them."""
    for sampled, row, (own, rank, *best) in zip(results.token_ids, results.step.rows, *results.logprobs, strict=False):
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


def graph_variants(model: Llama, optional: bool, has_adapters: bool) -> list[tuple[SamplerMode, LogitsPlan | None]]:
  """Return sampler and plan of the graphs to capture at startup; with `optional` the graphs for optional features."""
  plan = LogitsPlan(model.vocab_size, True, 128, True, has_adapters=has_adapters)
  if isinstance(model, Embedder):   # has one kind of step
    return [] if optional else [(SamplerMode.GREEDY, HiddenStatesPlan(plan.vocab_size, True, 0, False))]
  if optional: return [(SamplerMode.RANDOM, None), (SamplerMode.FILTERED, plan)]
  plans = [None, LogitsPlan(model.vocab_size, False, 0, False, has_adapters=True)][:1 + has_adapters]
  return [(mode, plan) for plan in plans for mode in (SamplerMode.GREEDY, SamplerMode.FILTERED)]


class LogitsBatch:
  """The adjustments, token bitmasks and log probabilities that a step's sequences need, by row of logits."""
  def __init__(self, rows: list[Row], runner: Runner):
    # Logits of known tokens (prompt_logprobs) and of tokens that a step in flight samples are not changed
    sampled = [(i, row, processor) for i, row in enumerate(rows)
               if row.position >= row.seq.length and (processor := row.seq.processor)]
    lists = {i: processor.adjustments(row.seq, row.position) for i, row, processor in sampled}
    values = np.fromiter(itertools.chain(*itertools.chain(*lists.values())), float).reshape(-1, 4)
    self.adjustments = np.rec.fromarrays([[i for i, x in lists.items() for _ in x], *values.T], ADJUSTMENTS.dtype)
    self.bitmasks = {i: mask for i, _, processor in sampled if (mask := processor.bitmask()) is not None}
    self.targets = [row.seq.tokens[row.position] if row.position < len(row.seq.tokens) else UNKNOWN for row in rows]
    counts = [k for seq in {row.seq for row in rows}
              for k in (seq.params.logprobs, seq.params.prompt_logprobs if seq.index == 0 else None) if k is not None]
    has_all = any(k == ALL or k > NUM_BEST for k in counts)
    # Padded to few graph shapes: 16, 128, 1024, ...
    size = 16 * 8 ** -(-((len(self.adjustments) - 1) // 16).bit_length() // 3) if len(self.adjustments) else 0
    plan_class = HiddenStatesPlan if isinstance(runner.model, Embedder) else LogitsPlan
    self.plan = plan_class(runner.model.vocab_size, bool(counts), size, bool(self.bitmasks), has_all)


class ProcessedLogits:
  """Implements the core's seam Logits for all LogitsProcessors."""
  batch = LogitsBatch

  def record(self, results: Results, tokenizer: ChatTokenizer) -> None:
    if results.logprobs: results.step.key.plan.record(results, tokenizer)


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
  return logit.store((x > 0).where(x / factor, x * factor) - penalty).end(i).sink(arg=KernelInfo(name="adjust_logits"))


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
    best_chunks, _ = largest(chunks.max(2).contiguous(), Tensor.arange(chunks.shape[1]).reshape(1, -1), sampler, k)
    tokens = (CHUNK * best_chunks.unsqueeze(2) + Tensor.arange(CHUNK)).flatten(1).contiguous()
    x = chunks.flatten(1).gather(1, tokens).contiguous()                # (S, k * CHUNK)
  best, values = largest(x, tokens, sampler, min(k, size))
  return Tensor.cat(*columns, best.stack(values, dim=2).flatten(1), dim=1).contiguous()
