"""Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192). A step that verifies some draft tokens takes little
longer than one without, as most of its time goes into reading the weights. Sampling noise is a function of seed,
position and token id, so a draft is accepted exactly if it is what would be sampled: the text is the same without
drafts. The engine verifies; this module decides who drafts and how much, and drops rejected drafts."""
import collections, copy, dataclasses, itertools, math, pathlib
from collections.abc import Callable
from typing import Any

from tinygrad import dtypes, nn

from tinyvllm import request
from tinyvllm.backend import Devices, cpu_cores
from tinyvllm.config import QUANTIZATIONS, InputError, Options, check, logger, option
from tinyvllm.engine import LLMEngine, LoadedModel
from tinyvllm.llama import Llama
from tinyvllm.request import Sequence
from tinyvllm.runner import Results, Runner, build_step, next_power_of_two
from tinyvllm.scheduler import BlockManager, Scheduler

from .kernels.cpu import cpu_sums
from .logits import SamplingParams
from .models import find_model
from .weights import open_checkpoint


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig(Options):
  """Speculative decoding, under vLLM's names."""
  num_speculative_tokens: int | None = option(None, "maximum draft tokens per sequence and step", min=1, max=16)
  method: str | None = option(None, "what drafts; None: a draft model", choices=("ngram", "draft_model"))
  model: str | pathlib.Path | None = option(None, "folder of the draft model")
  quantization: str | None = option(None, "weight format of the draft model", choices=QUANTIZATIONS)
  prompt_lookup_max: int = option(4, "maximum tokens of the n-gram to look up", min=1, max=16)
  prompt_lookup_min: int = option(2, "minimum tokens of the n-gram to look up", min=1, max=16)

  def __post_init__(self) -> None:
    super().__post_init__()
    check(self.num_speculative_tokens, "num_speculative_tokens is missing: try 5")
    check((self.method == "ngram") == (self.model is None), f"method={self.method!r} with model={self.model!r}: give "
          "method='ngram', or the folder of a draft model")
    others = ["quantization"] if self.model is None else ["prompt_lookup_max", "prompt_lookup_min"]
    changed = [f"{name}={getattr(self, name)!r}" for name in others if getattr(self, name) != getattr(type(self), name)]
    check(not changed, f"{', '.join(changed)} has no effect with this method: leave it out")
    check(self.prompt_lookup_min <= self.prompt_lookup_max, f"prompt_lookup_min={self.prompt_lookup_min} must be at "
          f"most prompt_lookup_max={self.prompt_lookup_max}")


INITIAL_RATE = 0.95   # acceptance rate of a draft token before any was verified
DRAFT_ROWS = 64       # maximum rows of logits in a step with drafts


class Drafter:
  """The drafts of a sequence and their acceptance rate, which decides how many are worth a verification. This one
  leaves room for a draft model's tokens."""
  def __init__(self, config: SpeculativeConfig, params: request.SamplingParams):
    self.params = params   # for the draft model
    if isinstance(params, SamplingParams): self.params = params.without_logprobs()
    self.max_drafts: int = config.num_speculative_tokens   # type: ignore[assignment]   # by now an int
    self.rate = INITIAL_RATE

  def update(self, num_proposed: int, num_accepted: int) -> None:
    """Learn from verified drafts. Those after a rejected one were not tried."""
    self.rate = (4 * self.rate + num_accepted) / (4 + min(num_proposed, num_accepted + 1))

  def decay(self) -> None:
    """Call it in a step without drafts: after some time the sequence may try again."""
    self.rate += (INITIAL_RATE - self.rate) / 256

  def num_wanted(self) -> int: return self.max_drafts if self.rate > 0.1 else 0
  def needs_sync(self, seq: Sequence) -> bool: return True

  def propose(self, tokens: list[int], n: int) -> list[int]:
    """Up to n draft tokens; here zeros, which the draft model replaces."""
    return [0] * n


class NGramDrafter(Drafter):
  """Prompt lookup: what followed the longest n-gram at the end of the text the last time it occurred."""
  def __init__(self, config: SpeculativeConfig, params: request.SamplingParams):
    super().__init__(config, params)
    self.sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
    self.positions: dict[tuple[int, ...], int] = {}   # n-gram -> position after its last occurrence
    self.num_indexed = 0

  def find(self, tokens: list[int]) -> int | None:
    """The position of what followed the end of these tokens. They only grow from call to call."""
    for position in range(self.num_indexed, len(tokens)):
      for size in self.sizes: self.positions[tuple(tokens[max(0, position - size):position])] = position
    self.num_indexed = len(tokens)
    ngrams = (tuple(tokens[-size:]) for size in self.sizes)
    return next((self.positions[ngram] for ngram in ngrams if ngram in self.positions), None)

  def needs_sync(self, seq: Sequence) -> bool:
    return bool(seq.draft_token_ids) or self.num_wanted() > 0 and self.find(seq.tokens) is not None

  def propose(self, tokens: list[int], n: int) -> list[int]:
    position = self.find(tokens) if n else None
    return [] if position is None else (tokens[position:position + n] * n)[:n]   # a repetition goes on


def weight_bytes(model: Llama) -> int:
  return sum(x.nbytes() for module in model.modules() for x in nn.state.get_parameters(module))


def step_time(num_tokens: int) -> float:
  """Relative time of a step; 1 is a token among many. Reading the weights takes as long as some tokens, and a CPU reads
  them again for more rows than its registers hold. Measured on two cores and an H200 (tests/benchmarks/LOG.md)."""
  if not cpu_cores(): return max(35 + num_tokens / 2, 27 + num_tokens)
  return 9 + num_tokens / 3 if num_tokens <= cpu_sums() else 10 + 0.9 * num_tokens


def verify(results: Results) -> dict[Sequence, list[int]]:
  """The new tokens of each sequence: sampled tokens up to the first one that differs from its draft."""
  new_tokens: dict[Sequence, list[int]] = {}
  for token, row in zip(results.token_ids, results.step.rows, strict=False):   # rows of padding are left over
    ids = new_tokens.setdefault(row.seq, [])
    all_accepted = row.seq.draft_token_ids[:len(ids)] == ids
    if row.position == len(row.seq.tokens) + len(ids) and all_accepted and not row.seq.finish_reason: ids.append(token)
  return {seq: ids for seq, ids in new_tokens.items() if ids}


class SpeculativeProposer:
  """A Proposer: n-gram lookup, or a draft model with its own runner."""
  blocks: BlockManager   # the target's

  def __init__(self, config: SpeculativeConfig):
    self.config = config
    self.runners: list[Runner] = []   # of the draft model, if there is one
    self.draft_time = 0.0             # relative time of a draft model's step
    self.num_behind = 0 if config.model is None else 1
    self.counters = collections.Counter(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0)
    self.accepted_at: collections.Counter[int] = collections.Counter()   # accepted tokens by index among the drafts

  def drafter(self, seq: Sequence) -> Drafter:
    drafter_class = NGramDrafter if self.config.model is None else Drafter
    if seq.draft_state is None: seq.draft_state = drafter_class(self.config, seq.params)
    return seq.draft_state

  def needs_sync(self, seq: Sequence) -> bool: return self.drafter(seq).needs_sync(seq)

  def propose(self, scheduler: Scheduler, batch: dict[Sequence, int]) -> None:
    blocks = self.blocks = scheduler.blocks
    budget = (scheduler.config.max_num_batched_tokens or 0) - sum(batch.values())
    for seq, drafts in self.choose(batch, budget).items():
      num_tokens = seq.length + len(drafts)
      # Leave a block for each running sequence: it may need one before the drafts have been verified
      if not blocks.can_allocate(seq.block_table, num_tokens + len(scheduler.running) * blocks.block_size): continue
      blocks.allocate(seq.block_table, num_tokens)
      seq.draft_token_ids = drafts
      batch[seq] += len(drafts)
    for runner in self.runners: self.run_draft_model(runner, batch)

  def run_draft_model(self, runner: Runner, batch: dict[Sequence, int]) -> None:
    """Let the draft model compute what the target is about to, then draft a token of each sequence at a time, with the
    same noise as the target."""
    copies = {seq: copy.copy(seq) for seq in batch}   # whose tokens are followed by the drafts so far
    for seq, clone in copies.items():
      vars(clone).update(tokens=[*seq.tokens], draft_token_ids=[], params=self.drafter(seq).params,
                         processor=seq.processor and seq.processor.without_constraint())   # type: ignore[attr-defined]
    todo = {copies[seq]: n - len(seq.draft_token_ids) for seq, n in batch.items()}
    while todo:
      results = runner.launch(build_step(todo, runner))()
      for token, row in zip(results.token_ids, results.step.rows, strict=False):
        if row.position == len(row.seq.tokens): row.seq.tokens.append(token)
        row.seq.num_computed = len(row.seq.tokens) - 1
      todo = {clone: 1 for seq, clone in copies.items()
              if len(clone.tokens) < len(seq.tokens) + len(seq.draft_token_ids)}
    for seq, clone in copies.items():
      seq.draft_token_ids = clone.tokens[len(seq.tokens):][:len(seq.draft_token_ids)]

  def choose(self, batch: dict[Sequence, int], budget: int) -> dict[Sequence, list[int]]:
    """Drafts for sequences that get a token in this step: the likeliest ones, as many as maximize tokens per time
    within the budget."""
    seqs = [seq for seq, n in batch.items() if n == seq.num_remaining and not seq.num_in_flight
            and not (seq.processor and seq.processor.depends_on_output)]
    def propose(seq: Sequence) -> list[int]:
      drafter = self.drafter(seq)
      return drafter.propose(seq.tokens, min(drafter.num_wanted(), seq.max_len - seq.length - 1))
    drafts = [propose(seq) for seq in seqs]
    # Probability that a draft and all before it are accepted, its index, its sequence
    ranked = sorted(((self.drafter(seqs[k]).rate ** (i + 1), i, k) for k, tokens in enumerate(drafts)
                     for i in range(len(tokens))), reverse=True)[:max(0, min(budget, DRAFT_ROWS - len(batch)))]
    expected = [*itertools.accumulate((p for p, *_ in ranked), initial=len(batch))]   # tokens, by number of drafts
    rounds = [*itertools.accumulate((i + 1 for _, i, _ in ranked), max, initial=0)]   # of the draft model
    num_tokens = sum(batch.values())
    def throughput(n: int) -> float:
      return expected[n] / (step_time(next_power_of_two(num_tokens + n)) + self.draft_time * rounds[n])
    counts = collections.Counter(k for *_, k in ranked[:max(range(len(expected)), key=throughput)])
    for k, seq in enumerate(seqs):
      if not counts[k]: self.drafter(seq).decay()
    return {seqs[k]: drafts[k][:n] for k, n in counts.items() if n}

  def update(self, engine: LLMEngine, results: Results) -> None:
    """Verify, then append the new tokens one at a time, as a text may end at each."""
    computed = results.step.computed
    new_tokens = verify(results)
    # Only a step with rows after drafts verifies them: the drafts may belong to the step in flight
    lengths = {row.seq: len(row.seq.tokens) for row in results.step.rows
               if row.seq.draft_token_ids and row.position > len(row.seq.tokens)}
    for i in range(max(map(len, new_tokens.values()), default=1)):
      sampled = {seq: ids[i] for seq, ids in new_tokens.items() if i < len(ids) and not seq.finish_reason}
      engine.append({seq: computed[seq] for seq in sampled} if i else computed, sampled)
    for seq, length in lengths.items(): self.update_drafts(seq, len(seq.tokens) - length - 1)

  def update_drafts(self, seq: Sequence, num_accepted: int) -> None:
    """Count what became of a sequence's drafts, and drop them and the blocks of rejected ones."""
    # A sequence that ended within its drafts has none left: those after the end do not count
    num_proposed = max(num_accepted, len(seq.draft_token_ids))
    seq.metrics.num_draft_tokens += num_proposed
    seq.metrics.num_accepted_tokens += num_accepted
    self.counters.update(num_drafts=min(1, num_proposed), num_draft_tokens=num_proposed,
                         num_accepted_tokens=num_accepted)
    self.accepted_at.update(range(num_accepted))
    self.drafter(seq).update(num_proposed, num_accepted)
    seq.draft_token_ids = []
    seq.num_computed = min(seq.num_computed, seq.length - 1)
    if seq.block_table: self.blocks.free(seq, -(-seq.num_computed // self.blocks.block_size))

  def metrics(self) -> dict[str, Any]:
    by_index = [self.accepted_at[i] for i in range(self.config.num_speculative_tokens or 0)]
    counters: dict[str, Any] = {f"spec_decode_{name}": count for name, count in self.counters.items()}
    return counters | {"spec_decode_num_accepted_tokens_per_pos": by_index}


def open_proposer(target: LoadedModel, new_runner: Callable[[int], Runner],
                  num_bytes: int) -> tuple[SpeculativeProposer, list[Runner]]:
  """The Proposer of an engine, the target's runner, which `new_runner` makes of the bytes for its KV cache, and the
  runner of the draft model, if there is one, with as many blocks. Raises InputError for a bad speculative_config or a
  draft model that does not match the target or does not fit next to it."""
  options: Any = target.config.speculative_config
  try: proposer = SpeculativeProposer(SpeculativeConfig(**options))
  except InputError as e: raise InputError(f"speculative_config={options!r}: {e}") from e
  if proposer.config.model is None: runners = [new_runner(num_bytes)]
  else:
    model = load_draft_model(target, proposer.config, num_bytes)
    own_bytes = weight_bytes(model)
    def size(config): return config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    target_size, draft_size = size(target.model_config), size(model.config)
    runner = new_runner((num_bytes - own_bytes) * target_size // (target_size + draft_size))
    config = dataclasses.replace(target.config, num_gpu_blocks_override=runner.num_blocks)
    proposer.runners = [Runner(model, config, num_bytes)]
    # At most a quarter: a slower model gains nothing, but was asked for
    proposer.draft_time = step_time(1) * min(0.25, own_bytes / weight_bytes(runner.model))
    runners = [runner, *proposer.runners]
  for runner in runners: runner.max_rows = next_power_of_two(max(runner.max_rows, DRAFT_ROWS))
  return proposer, runners


def load_draft_model(target: LoadedModel, config: SpeculativeConfig, num_bytes: int) -> Llama:
  path = pathlib.Path(str(config.model)).expanduser()
  prefix = f"speculative_config: the draft model {str(path)!r}"
  checkpoint = open_checkpoint(path)
  model_config, model_class = find_model(checkpoint.hf_config, path)
  vocab_size = target.model_config.vocab_size
  check(model_config.vocab_size == vocab_size, f"{prefix} has a vocab_size of {model_config.vocab_size}, the target "
        f"{vocab_size}: choose one of the same family")
  if any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
    tokenizer = checkpoint.tokenizer()
    decode = target.tokenizer.decode
    differing = [i for i in range(0, vocab_size, 17) if tokenizer.decode([i], False) != decode([i], False)]
    check(not differing, f"{prefix} has another vocabulary, in which id {differing[:1]} is another text: choose one of "
          "the same family")
  limit = model_config.max_position_embeddings
  check(limit >= (target.config.max_model_len or math.inf), f"{prefix} takes {limit} tokens: use max_model_len={limit}")
  model = model_class(model_config, getattr(dtypes, target.config.dtype), target.backend, Devices())
  checkpoint.load(model, config.quantization)
  size = weight_bytes(model)
  check(size < num_bytes, f"{prefix} has {size / 2**30:.2f} GiB of weights, of {num_bytes / 2**30:.2f} GiB that the "
        "target's leave: choose a smaller one, quantize it or the target, or raise gpu_memory_utilization")
  logger.info(f"loaded {path.name} as draft model")
  return model
