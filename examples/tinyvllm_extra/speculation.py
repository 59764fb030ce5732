"""Drafts of what comes next (Leviathan et al. 2022, arXiv:2211.17192). A step that checks some takes little longer than
one without, as it is the weights that take time to read. Noise is a function of seed, position and token id, so that a
draft is right exactly where it is what would be drawn: the text is that without drafts. The engine checks drafts; who
makes them, how many, and what is done with those that did not come true is said here."""
import collections, copy, dataclasses, itertools, pathlib
from collections.abc import Callable
from typing import Annotated, Any

from tinygrad import dtypes, nn

from tinyvllm.batch import DRAFT_ROWS, Step, bucket
from tinyvllm.config import EngineConfig, InputError, ModelConfig, Options, check, logger
from tinyvllm.device import cpu_cores
from tinyvllm.llama import Llama
from tinyvllm.request import SamplingParams, Sequence
from tinyvllm.runner import Runner
from tinyvllm.scheduler import BlockManager, Scheduler
from tinyvllm.tokenizer import Tokenizer, load_tokenizer
from tinyvllm.weights import load_weights
from tinyvllm_extra.kernels.cpu import cpu_sums


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig(Options):
  """Who drafts, and how much, with vLLM's names."""
  num_speculative_tokens: Annotated[int | None, 1, 16] = None   # of a sequence in one step, at most
  method: Annotated[str | None, "ngram", "draft_model"] = None   # None: a draft model, if there is one
  model: str | pathlib.Path | None = None   # the draft model's folder
  quantization: Annotated[str | None, "int8", "int4", "awq", "gptq", "compressed-tensors"] = None   # the draft model's
  prompt_lookup_max: Annotated[int, 1, 16] = 4   # tokens of the longest end of a text that is looked for in it
  prompt_lookup_min: Annotated[int, 1, 16] = 2   # and of the shortest

  def __post_init__(self) -> None:
    super().__post_init__()
    check(self.num_speculative_tokens, "num_speculative_tokens is missing: 5, say")
    check((self.method == "ngram") == (self.model is None), f"method={self.method!r} with model={self.model!r}: give "
          "method='ngram', or the folder of a draft model")
    others = ["quantization"] if self.model is None else ["prompt_lookup_max", "prompt_lookup_min"]
    changed = [f"{name}={getattr(self, name)!r}" for name in others if getattr(self, name) != getattr(type(self), name)]
    check(not changed, f"{', '.join(changed)} changes nothing where this method drafts: leave it out")
    check(self.prompt_lookup_min <= self.prompt_lookup_max, f"prompt_lookup_min={self.prompt_lookup_min} must be at "
          f"most prompt_lookup_max={self.prompt_lookup_max}")


HOPE = 0.95   # that a draft comes true, while nobody knows


class Drafter:
  """Of a sequence: its drafts, and how likely one is to come true, which says how many are worth a check. A draft model
  makes them."""
  num_behind = 1   # drafts whose K and V are not in all caches: of its last one a draft model has none

  def __init__(self, config: SpeculativeConfig, params: SamplingParams):
    self.params = dataclasses.replace(params, logprobs=None, prompt_logprobs=None)   # the draft model's
    self.most: int = config.num_speculative_tokens   # type: ignore[assignment]   # by now a number
    self.hope = HOPE

  def judge(self, proposed: int, accepted: int) -> None:
    """Learn of the last ones: those behind one that did not come true were not tried."""
    self.hope = (4 * self.hope + accepted) / (4 + min(proposed, accepted + 1))

  def rest(self) -> None:
    """It had none in a step: after a while it may try again."""
    self.hope += (HOPE - self.hope) / 256

  def wanted(self) -> int: return self.most if self.hope > 0.1 else 0

  def waits(self, seq: Sequence) -> bool:
    """Whether a sequence's next step waits until the host has read the token before, for drafts."""
    return True

  def propose(self, tokens: list[int], n: int) -> list[int]:
    """n drafts, or none. Here places for them."""
    return [0] * n


class NGram(Drafter):
  """Prompt lookup: what followed the end of the text where that was there before, the last time; the longest end."""
  num_behind = 0

  def __init__(self, config: SpeculativeConfig, params: SamplingParams):
    super().__init__(config, params)
    self.sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
    self.places: dict[tuple[int, ...], int] = {}   # of what has followed these tokens last
    self.num_known = 0   # places that are in there

  def find(self, tokens: list[int]) -> int | None:
    """The place of what has followed the end of these tokens, which are those of the last time and perhaps more."""
    for place in range(self.num_known, len(tokens)):
      for size in self.sizes: self.places[tuple(tokens[max(0, place - size):place])] = place
    self.num_known = len(tokens)
    ends = (tuple(tokens[-size:]) for size in self.sizes)
    return next((self.places[end] for end in ends if end in self.places), None)

  def waits(self, seq: Sequence) -> bool:
    return bool(seq.drafts) or self.wanted() > 0 and self.find(seq.tokens) is not None

  def propose(self, tokens: list[int], n: int) -> list[int]:   # what was repeated without a break goes on so
    place = self.find(tokens) if n else None
    return [] if place is None else (tokens[place:place + n] * n)[:n]


def size_of(model: Llama) -> int:
  """Bytes of the weights."""
  return sum(x.nbytes() for part in model.parts() for x in nn.state.get_parameters(part))


def step_time(n: int) -> float:
  """Of a step of n tokens, in the time of one among many: to read the weights takes as long as some, and a CPU reads
  them again for more rows than its registers hold. As on two cores and on an H200 (tests/benchmarks/LOG.md)."""
  if not cpu_cores(): return max(35 + n / 2, 27 + n)
  return 9 + n / 3 if n <= cpu_sums() else 10 + 0.9 * n


class Speculation:
  """Of an engine: who drafts, which drafts a step checks, and what has come of them."""
  def __init__(self, config: dict[str, Any]):
    try: self.config = SpeculativeConfig(**config)
    except InputError as e: raise InputError(f"speculative_config={config!r}: {e}") from e
    self.draft_time = 0.0   # of a draft model's step
    self.runners: list[Runner] = []   # the draft model's, if there is one
    self.totals = collections.Counter(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0)
    self.accepted_at: collections.Counter[int] = collections.Counter()   # by their place among those of a step

  def drafter(self, params: SamplingParams) -> Drafter:
    """Of a sequence."""
    return (NGram if self.config.model is None else Drafter)(self.config, params)

  def open(self, target: Callable[[int], Runner], target_shape: ModelConfig, tokenizer: Tokenizer,
           config: EngineConfig, max_model_len: int, left: int) -> list[Runner]:
    """The target's runner, which is made of the bytes that its caches may take, and that of the draft model, if there
    is one, with caches of as many blocks. left: bytes of the device. Raises ValueError for a draft model that does not
    go with the target, or does not fit beside it."""
    if self.config.model is None: return [target(left)]
    folder = pathlib.Path(self.config.model).expanduser()
    shape = ModelConfig.load(folder)
    said = f"speculative_config: the draft model {str(folder)!r}"
    check(shape.vocab_size == target_shape.vocab_size, f"{said} has a vocab_size of {shape.vocab_size}, the target "
          f"{target_shape.vocab_size}: choose one of the same family")
    if any((folder / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
      other = load_tokenizer(folder)
      differ = [i for i in range(0, shape.vocab_size, 17) if other.decode([i], False) != tokenizer.decode([i], False)]
      check(not differ, f"{said} has another vocabulary, in which id {differ[:1]} is another text: choose one of the "
            "same family")
    check(shape.max_position_embeddings >= max_model_len, f"{said} takes {shape.max_position_embeddings} tokens: "
          f"max_model_len={shape.max_position_embeddings} would do")
    model = Llama(shape, getattr(dtypes, config.dtype))
    load_weights(model, folder, model.dtype, self.config.quantization)
    size = size_of(model)
    check(size < left, f"{said} has {size / 2**30:.2f} GiB of weights, of {left / 2**30:.2f} GiB that the target's "
          f"leave: choose a smaller one, quantize it or the target, or raise gpu_memory_utilization")
    logger.info(f"loaded {folder.name} as draft model")
    of_token, of_draft = [x.num_hidden_layers * x.num_key_value_heads * x.head_dim for x in (target_shape, shape)]
    runner = target((left - size) * of_token // (of_token + of_draft))
    config = dataclasses.replace(config, num_gpu_blocks_override=runner.num_blocks)
    self.runners = [Runner(model, config, max_model_len, left)]
    # At most a quarter: with one that takes longer nothing is gained, but it was asked for
    self.draft_time = step_time(1) * min(0.25, size / size_of(runner.model))
    return [runner, *self.runners]

  def draft(self, scheduler: Scheduler, batch: dict[Sequence, int], pack: Callable[..., Step]) -> None:
    """Let a step that is scheduled check drafts, too, as many as it has room and blocks for."""
    blocks = scheduler.blocks
    left = scheduler.config.max_num_batched_tokens - sum(batch.values())   # type: ignore[operator]   # by now a number
    for seq, drafts in self.choose(batch, left).items():
      most = seq.length + len(drafts)
      # A block is left for each that runs: it may want one before the drafts have been checked
      if not blocks.can_allocate(seq.block_table, most + len(scheduler.running) * blocks.block_size): continue
      blocks.allocate(seq.block_table, most)
      seq.drafts = drafts
      batch[seq] += len(drafts)
    self.fill(batch, pack)

  def fill(self, batch: dict[Sequence, int], pack: Callable[..., Step]) -> None:
    """Let the draft model, if there is one, compute what the target is about to, and then draft, a token of each
    sequence at a time, by the same noise. pack: of the target's engine."""
    for runner in self.runners:
      copies = {seq: copy.copy(seq) for seq in batch}   # with the drafts so far
      for seq, made in copies.items():
        vars(made).update(tokens=[*seq.tokens], drafts=[], params=(seq.drafter or seq).params, constraint=None)
      todo = {copies[seq]: n - len(seq.drafts) for seq, n in batch.items()}
      while todo:
        step, ids, _ = runner.launch(pack(todo, fit=runner.fit))()
        for token, (seq, place, _) in zip(ids, step.targets, strict=False):
          if place == len(seq.tokens): seq.tokens.append(token)
          seq.num_computed = len(seq.tokens) - 1
        todo = {made: 1 for seq, made in copies.items() if len(made.tokens) < len(seq.tokens) + len(seq.drafts)}
      for seq, made in copies.items(): seq.drafts = made.tokens[len(seq.tokens):][:len(seq.drafts)]

  def choose(self, batch: dict[Sequence, int], left: int) -> dict[Sequence, list[int]]:
    """Drafts for those of a step who are to get a token, the likeliest first, as many as make most tokens of the time
    and the step has room for."""
    seqs = [seq for seq, n in batch.items() if n == seq.remaining() and not seq.num_unread and not seq.reads]
    drafts = [seq.drafter.propose(seq.tokens, min(seq.drafter.wanted(), seq.max_len - seq.length - 1)) for seq in seqs]
    ranked = sorted(((seqs[k].drafter.hope ** (i + 1), i, k) for k, tokens in enumerate(drafts)
                     for i in range(len(tokens))), reverse=True)
    ranked = ranked[:max(0, min(left, DRAFT_ROWS - len(batch)))]
    expected = [*itertools.accumulate((worth for worth, *_ in ranked), initial=len(batch))]   # tokens, by drafts
    rounds = [*itertools.accumulate((i + 1 for _, i, _ in ranked), max, initial=0)]   # of a draft model
    def rate(n): return expected[n] / (step_time(bucket(sum(batch.values()) + n)) + self.draft_time * rounds[n])
    counts = collections.Counter(k for *_, k in ranked[:max(range(len(expected)), key=rate)])
    for k, seq in enumerate(seqs):
      if not counts[k]: seq.drafter.rest()
    return {seqs[k]: drafts[k][:n] for k, n in counts.items() if n}

  def judge(self, blocks: BlockManager, seq: Sequence, accepted: int) -> None:
    """So many of a sequence's drafts came true: it goes on behind these, and without the blocks of the others. Those
    behind the end of a text do not count."""
    proposed = max(accepted, len(seq.drafts))
    seq.metrics.num_draft_tokens += proposed
    seq.metrics.num_accepted_tokens += accepted
    self.totals.update(num_drafts=min(1, proposed), num_draft_tokens=proposed, num_accepted_tokens=accepted)
    self.accepted_at.update(range(accepted))
    seq.drafter.judge(proposed, accepted)
    seq.drafts = []
    seq.num_computed = min(seq.num_computed, seq.length - 1)
    if seq.block_table: blocks.free(seq, -(-seq.num_computed // blocks.block_size))

  def metrics(self) -> dict[str, Any]:
    """vLLM's, of get_metrics."""
    by_place = [self.accepted_at[i] for i in range(self.config.num_speculative_tokens or 0)]
    counts: dict[str, Any] = {f"spec_decode_{name}": count for name, count in self.totals.items()}
    return counts | {"spec_decode_num_accepted_tokens_per_pos": by_place}
