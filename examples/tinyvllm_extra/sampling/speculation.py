"""Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192). Verifying a few draft tokens makes a step little
longer, because reading the weights dominates. Sampling noise is a function of seed, position and token id, so a draft
token is accepted if and only if it equals the token that would be sampled: the output does not change. The engine's
step computes the logits; this module drafts, verifies, and drops rejected draft tokens."""
import collections, copy, dataclasses, itertools, math, pathlib, weakref
from collections.abc import Callable

from tinygrad import dtypes

from tinyvllm import backend, llama
from tinyvllm.config import InputError, JsonObject, Options, check, logger, option
from tinyvllm.engine import Engine, LoadedModel
from tinyvllm.request import Sequence
from tinyvllm.runner import Results, Runner, build_step, next_power_of_two
from tinyvllm.scheduler import BlockManager, Scheduler
from tinyvllm_extra import models, options
from tinyvllm_extra.formats import fit, hub
from tinyvllm_extra.kernels.cpu import SUMS
from tinyvllm_extra.models.recurrent import state_shapes


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig(Options):
  """Speculative decoding, under vLLM's names."""
  num_speculative_tokens: int | None = option(None, "maximum draft tokens per sequence and step", min=1, max=16)
  method: str | None = option(None, "drafting method; None: a draft model", choices=("ngram", "draft_model"))
  model: str | pathlib.Path | None = option(None, "folder of the draft model")
  quantization: str | None = option(None, "weight format of the draft model", choices=options.FORMATS)
  prompt_lookup_max: int = option(4, "maximum tokens of the n-gram to look up", min=1, max=16)
  prompt_lookup_min: int = option(2, "minimum tokens of the n-gram to look up", min=1, max=16)

  def __post_init__(self) -> None:
    super().__post_init__()
    check(self.num_speculative_tokens, "num_speculative_tokens is missing: try 5")
    check((self.method == "ngram") == (self.model is None), f"method={self.method!r} with model={self.model!r}: use "
          "method='ngram' or set model to the folder of a draft model")
    others = ["quantization"] if self.model is None else ["prompt_lookup_max", "prompt_lookup_min"]
    changed = [f"{name}={getattr(self, name)!r}" for name in others if getattr(self, name) != getattr(type(self), name)]
    check(not changed, f"{', '.join(changed)} has no effect with this method: remove it")
    check(self.prompt_lookup_min <= self.prompt_lookup_max, f"prompt_lookup_min={self.prompt_lookup_min} must be at "
          f"most prompt_lookup_max={self.prompt_lookup_max}")


INITIAL_RATE = 0.95   # acceptance rate before any draft token was verified
DRAFT_ROWS = 64       # maximum rows of logits in a step with draft tokens


class Drafter:
  """Drafts for a sequence by prompt lookup: the tokens that followed the last occurrence of the longest n-gram at its
  end. The proposer updates its acceptance rate, which limits the number of draft tokens."""
  def __init__(self, config: SpeculativeConfig):
    self.config = config
    self.rate = INITIAL_RATE
    self.positions: dict[tuple[int, ...], int] = {}   # n-gram -> position after its last occurrence
    self.num_indexed = 0

  def num_to_draft(self) -> int: return self.config.num_speculative_tokens or 0 if self.rate > 0.1 else 0

  def propose(self, tokens: list[int], n: int) -> list[int]:
    """Return up to n draft tokens; zeros if there is a draft model, which replaces them. `tokens` may only grow between
    calls."""
    if self.config.method != "ngram" or not n: return [0] * n
    sizes = range(self.config.prompt_lookup_max, self.config.prompt_lookup_min - 1, -1)
    for position in range(self.num_indexed, len(tokens)):
      for size in sizes: self.positions[tuple(tokens[max(0, position - size):position])] = position
    self.num_indexed = len(tokens)
    ngrams = (tuple(tokens[-size:]) for size in sizes)
    position = next((self.positions[ngram] for ngram in ngrams if ngram in self.positions), len(tokens))
    return (tokens[position:position + n] * n)[:n]   # a shorter continuation is repeated


def step_time(num_tokens: int) -> float:
  """Return the relative time of a step; 1 is the time of a token in a large step. The constant is the time to read the
  weights, which a CPU reads again for more rows than its registers hold. Measured on two CPU cores and an H200
  (tests/benchmarks/LOG.md)."""
  if not backend.cpu_cores(): return max(35 + num_tokens / 2, 27 + num_tokens)
  return 9 + num_tokens / 3 if num_tokens <= SUMS else 10 + 0.9 * num_tokens


def verify(results: Results) -> dict[Sequence, list[int]]:
  """Return the new tokens of each sequence: sampled tokens up to the first one that differs from its draft token."""
  new_tokens: dict[Sequence, list[int]] = {}
  for token, row in zip(results.token_ids, results.step.rows, strict=False):   # token_ids may end with padding
    ids = new_tokens.setdefault(row.seq, [])
    all_accepted = row.seq.draft_token_ids[:len(ids)] == ids
    if row.position == len(row.seq.tokens) + len(ids) and all_accepted and not row.seq.finish_reason: ids.append(token)
  return new_tokens


class SpeculativeProposer:
  """A Proposer that uses n-gram lookup, or a draft model with its own runner."""
  def __init__(self, config: SpeculativeConfig):
    self.config = config
    self.runners: list[Runner] = []   # the draft model's, if any
    self.draft_time = 0.0             # relative time of a draft model step
    self.num_behind = 0 if config.model is None else 1
    self.counters = collections.Counter(spec_decode_num_drafts=0, spec_decode_num_draft_tokens=0)
    self.drafters = weakref.WeakKeyDictionary[Sequence, Drafter]()
    self.num_accepted_per_pos = [0] * (config.num_speculative_tokens or 0)   # by index of the draft token

  def drafter(self, seq: Sequence) -> Drafter: return self.drafters.setdefault(seq, Drafter(self.config))

  def needs_sync(self, seq: Sequence) -> bool:
    drafter = self.drafter(seq)   # a draft model needs every token
    return bool(self.runners or seq.draft_token_ids or drafter.propose(seq.tokens, min(1, drafter.num_to_draft())))

  def propose(self, scheduler: Scheduler, batch: dict[Sequence, int]) -> None:
    blocks = scheduler.blocks
    for seq, draft_token_ids in self.choose_drafts(batch, scheduler.config.max_num_batched_tokens or 0).items():
      num_tokens = seq.length + len(draft_token_ids)
      # Leave a block for each running sequence: it may need one before the draft tokens are verified
      if not blocks.can_allocate(seq.block_table, num_tokens + len(scheduler.running) * blocks.block_size): continue
      blocks.allocate(seq.block_table, num_tokens)
      seq.draft_token_ids = draft_token_ids
      batch[seq] += len(draft_token_ids)
    for runner in self.runners: self.run_draft_model(runner, batch)

  def run_draft_model(self, runner: Runner, batch: dict[Sequence, int]) -> None:
    """Run the draft model on the batch's tokens, then draft one token per sequence and step, with the target's sampling
    noise."""
    clones = {seq: copy.copy(seq) for seq in batch}   # with the draft tokens so far appended
    for seq, clone in clones.items():   # the processors of the others may depend on the output
      vars(clone).update(tokens=[*seq.tokens], draft_token_ids=[], params=copy.copy(seq.params),
                         processor=seq.processor if seq.draft_token_ids else None)
      vars(clone.params).update(logprobs=None, prompt_logprobs=None)
    draft_batch = {clones[seq]: n - len(seq.draft_token_ids) for seq, n in batch.items()}
    while draft_batch:
      results = runner.launch(build_step(draft_batch, runner))()
      for token, row in zip(results.token_ids, results.step.rows, strict=False):
        if row.position == len(row.seq.tokens): row.seq.tokens.append(token)
        row.seq.num_computed = len(row.seq.tokens) - 1
      draft_batch = {clone: 1 for seq, clone in clones.items()
                     if len(clone.tokens) < len(seq.tokens) + len(seq.draft_token_ids)}
    for seq, clone in clones.items():
      seq.draft_token_ids = clone.tokens[len(seq.tokens):][:len(seq.draft_token_ids)]

  def choose_drafts(self, batch: dict[Sequence, int], budget: int) -> dict[Sequence, list[int]]:
    """Return draft tokens for sequences that sample a token in this step: the most probable ones, as many as maximize
    tokens per time. budget: maximum tokens of the step."""
    drafters = {seq: self.drafter(seq) for seq, n in batch.items() if n == seq.num_remaining and not seq.num_in_flight
                and not (seq.processor and seq.processor.depends_on_output)}
    drafts = {seq: drafter.propose(seq.tokens, min(drafter.num_to_draft(), seq.max_len - seq.length - 1))
              for seq, drafter in drafters.items()}
    total = sum(batch.values())
    # (probability that a draft token and all before it are accepted, its index, its sequence)
    candidates = sorted(((drafters[seq].rate ** (i + 1), i, seq) for seq, ids in drafts.items()
                     for i in range(len(ids))), reverse=True)[:max(0, min(budget - total, DRAFT_ROWS - len(batch)))]
    num_expected = [*itertools.accumulate((p for p, *_ in candidates), initial=len(batch))]   # by number of drafts
    draft_steps = [*itertools.accumulate((i + 1 for _, i, _ in candidates), max, initial=0)]
    def throughput(n: int) -> float:
      return num_expected[n] / (step_time(next_power_of_two(total + n)) + self.draft_time * draft_steps[n])
    counts = collections.Counter(seq for *_, seq in candidates[:max(range(len(num_expected)), key=throughput)])
    for seq, drafter in drafters.items():   # without draft tokens the rate rises slowly, so that it drafts again later
      if seq not in counts: drafter.rate += (INITIAL_RATE - drafter.rate) / 256
    return {seq: drafts[seq][:n] for seq, n in counts.items()}

  def update(self, engine: Engine, results: Results) -> None:
    """Verify the draft tokens, then append the new tokens one at a time, as each may end a sequence."""
    computed = results.step.computed
    new_tokens = verify(results)
    # A step without rows after draft tokens does not verify them: they belong to the step in flight
    lengths = {row.seq: len(row.seq.tokens) for row in results.step.rows
               if row.seq.draft_token_ids and row.position > len(row.seq.tokens)}
    for i in range(max([1, *map(len, new_tokens.values())])):
      sampled = {seq: ids[i] for seq, ids in new_tokens.items() if i < len(ids) and not seq.finish_reason}
      engine.append({seq: computed[seq] for seq in sampled} if i else computed, sampled)
    for seq, length in lengths.items(): self.update_drafts(engine.blocks, seq, len(seq.tokens) - length - 1)

  def update_drafts(self, blocks: BlockManager, seq: Sequence, num_accepted: int) -> None:
    """Count a sequence's accepted draft tokens and update its acceptance rate. Then drop its draft tokens, and free the
    rejected ones' blocks."""
    # A finished sequence has no draft tokens left: the ones after its end do not count
    num_proposed = max(num_accepted, len(seq.draft_token_ids))
    seq.metrics.num_draft_tokens += num_proposed
    seq.metrics.num_accepted_tokens += num_accepted
    self.counters.update(spec_decode_num_drafts=min(1, num_proposed), spec_decode_num_draft_tokens=num_proposed)
    for i in range(num_accepted): self.num_accepted_per_pos[i] += 1
    drafter = self.drafter(seq)   # draft tokens after a rejected one were not verified
    drafter.rate = (4 * drafter.rate + num_accepted) / (4 + min(num_proposed, num_accepted + 1))
    seq.draft_token_ids = []
    seq.num_computed = min(seq.num_computed, seq.length - 1)
    if seq.block_table: blocks.free(seq, -(-seq.num_computed // blocks.block_size))

  def metrics(self) -> JsonObject:
    return {**self.counters, "spec_decode_num_accepted_tokens": sum(self.num_accepted_per_pos),
            "spec_decode_num_accepted_tokens_per_pos": [*self.num_accepted_per_pos]}


def open_proposer(target: LoadedModel, new_runner: Callable[[int], Runner],
                  num_bytes: int) -> tuple[SpeculativeProposer | None, list[Runner]]:
  """Return an engine's Proposer and its runners: the target's, and the draft model's, if any, with as many blocks.
  new_runner: creates the target's from the bytes for its KV cache. Raises InputError for an invalid speculative_config,
  or a draft model that does not match the target or does not fit in memory with it."""
  fields = vars(target.config)["speculative_config"]   # a field of LLMConfig
  if fields is None: return None, [new_runner(num_bytes)]
  try: proposer = SpeculativeProposer(SpeculativeConfig(**fields))
  except InputError as e: raise InputError(f"speculative_config={fields!r}: {e}") from e
  if proposer.config.model is None: runners = [new_runner(num_bytes)]
  else:
    model, draft_bytes = load_draft_model(target, proposer.config, num_bytes)
    # Elements of K, or of V, per token
    sizes = [x.num_hidden_layers * x.num_key_value_heads * x.head_dim for x in (target.model_config, model.config)]
    runner = new_runner((num_bytes - draft_bytes) * sizes[0] // sum(sizes))
    config = dataclasses.replace(target.config, num_gpu_blocks_override=runner.num_blocks)
    proposer.runners = [Runner(model, config, num_bytes, target.parts.logits)]
    # At most 1/4: the user requested a draft model, even if it is too slow to gain anything
    proposer.draft_time = step_time(1) * min(0.25, draft_bytes / fit.weight_bytes(fit.model_weights(runner.model)))
    runners = [runner, *proposer.runners]
  for runner in runners: runner.max_rows = next_power_of_two(max(runner.max_rows, DRAFT_ROWS))
  return proposer, runners


def load_draft_model(target: LoadedModel, config: SpeculativeConfig, num_bytes: int) -> tuple[llama.Llama, int]:
  """Return the draft model and the bytes of its weights. num_bytes: the ones left next to the target's."""
  path = hub.local_path(str(config.model))
  prefix = f"speculative_config: the draft model {str(path)!r}"
  checkpoint = hub.open_checkpoint(path, config.quantization, vars(target.config)["activation_quantization"])
  model_config, model_class = models.find_model(checkpoint.hf_config, path)
  vocab_size = target.model_config.vocab_size
  check(not any(state_shapes(model_config)), f"{prefix} has recurrent layers, which a draft model must not have")
  check(model_config.vocab_size == vocab_size, f"{prefix} has a vocab_size of {model_config.vocab_size}, the target "
        f"{vocab_size}: choose one of the same family")
  if any((path / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
    own = checkpoint.tokenizer()
    ids = [i for i in range(0, vocab_size, 17) if own.decode([i], False) != target.tokenizer.decode([i], False)]
    check(not ids, f"{prefix} has another vocabulary (id {ids[:1]} has different text): choose one of the same family")
  limit = model_config.max_position_embeddings
  check(limit >= (target.config.max_model_len or math.inf), f"{prefix} needs max_model_len={limit} or less")
  model = model_class(model_config, getattr(dtypes, target.config.dtype), target.backend, backend.Devices())
  checkpoint.load(model)
  size = fit.weight_bytes(fit.model_weights(model))
  check(size < num_bytes, f"{prefix} has {size / 2**30:.2f} GiB of weights, but {num_bytes / 2**30:.2f} GiB are left "
        "next to the target's: choose a smaller one, quantize it or the target, or raise gpu_memory_utilization")
  logger.info(f"loaded {path.name} as draft model")
  return model, size
