"""Runs steps. The host builds each step as one int32 array with numpy, and a captured graph reads it. Batches are
padded to a few graph shapes. Owns the state on the device: KV cache, block tables, last token of each slot."""
import functools, math, operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
from tinygrad import Context, Device, Tensor, dtypes, nn

from .backend import LOGITS, NUM_WORDS, TOKENS, cpu_cores, exclusive, scatter_kernel
from .config import EngineConfig, check, logger
from .llama import Llama
from .request import SAMPLING_FIELDS, SamplerMode, Sequence

UNKNOWN = -1      # token id that is still on the device
sampling_fields = operator.attrgetter(*SAMPLING_FIELDS)


class GraphKey(NamedTuple):
  """The shape of a graph. The graph also runs any step that is smaller in every field."""
  num_tokens: int
  num_rows: int                       # rows of logits
  sampler_mode: SamplerMode = SamplerMode.GREEDY
  plan: Any = None                    # operations on the logits, see Logits: hashable


# A row of logits, for sampling the token of `seq` at `position`. token: batch index of the previous token
Row = NamedTuple("Row", [("seq", Sequence), ("position", int), ("token", int)])
# A step for the device. words: the tables TOKENS and LOGITS, then the words of the logits plan. computed: the
# positions of K and V that it writes
Step = NamedTuple("Step", [("key", GraphKey), ("words", np.ndarray), ("rows", list[Row]),
                           ("computed", dict[Sequence, range])])
# The sampled token of each row of logits, and the log probabilities (see logits.py) if the plan has any
Results = NamedTuple("Results", [("step", Step), ("token_ids", list[int]), ("logprobs", list)])


def next_power_of_two(n: int) -> int: return 1 << max(0, n - 1).bit_length()


def token_rows(seq: Sequence, positions: range, block_size: int) -> Iterator[tuple]:
  """Yield the rows of TOKENS of a sequence and its drafts."""
  inputs = [*seq.tokens[positions.start:positions.stop], *seq.draft_token_ids, UNKNOWN]
  for position, token in zip(positions, inputs, strict=False):   # UNKNOWN may be surplus
    yield token, position, seq.slot, seq.block_table[position // block_size]


def logits_rows(seq: Sequence, positions: range, first_token: int) -> Iterator[Row]:
  """Yield the rows of logits that a sequence needs: for its last token and drafts, or for its prompt."""
  in_prompt = seq.wants_prompt_logprobs and positions.start < seq.num_prompt
  for position in range(max(positions.start, 0 if in_prompt else seq.length - 1), positions.stop):
    yield Row(seq, position + 1, first_token + position - positions.start)


def build_step(batch: dict[Sequence, int], runner: "Runner", key: GraphKey | None = None) -> Step:
  """Build the step that computes the next tokens of each sequence, padded to `key` (default: the runner's choice)."""
  computed = {seq: range(seq.num_computed, seq.num_computed + n) for seq, n in batch.items()}
  padding = runner.config.max_num_seqs   # slot
  tokens, rows = list[tuple](), list[Row]()
  for seq, positions in computed.items():
    rows += logits_rows(seq, positions, len(tokens))
    tokens += token_rows(seq, positions, runner.config.block_size)
  mode = max([row.seq.params.sampler_mode for row in rows], default=SamplerMode.GREEDY)
  logits_batch = runner.logits.batch(rows, runner) if runner.logits and any(seq.processor for seq in batch) else None
  key = key or runner.choose_key(GraphKey(len(tokens), len(rows), mode, logits_batch.plan if logits_batch else None))
  logits = [(row.token, row.position - 1, row.seq.slot if row.position >= row.seq.length else padding,
             *sampling_fields(row.seq.params), row.seq.seed % 2**32, row.seq.seed // 2**32 % 2**32) for row in rows]
  words = [table.write(x, key.num_tokens, slot=padding) for table, x in ((TOKENS, tokens), (LOGITS, logits))]
  if key.plan: words.append(key.plan.words(logits_batch, key.num_rows))
  return Step(key, np.concatenate(words), rows, computed)


def allocate_kv_caches(model: Llama, config: EngineConfig, num_bytes: int) -> list[list[Tensor]]:
  """Allocate the cache tensors of each layer with K and V, (num_blocks, *block) each, within `num_bytes` per device,
  but no more than max_num_seqs sequences of max_model_len need. Raises InputError if one such sequence does not fit,
  unless it is the model's own limit: then longer requests are refused."""
  layouts = [model.backend.kv_layout(model.config, config, model.dtype) if x.has_kv else [] for x in model.layers]
  sizes = [math.prod(shape) * dtype.itemsize for layout in layouts for shape, dtype in layout]
  block_bytes = sum(sizes)
  length = config.max_model_len or 0   # the engine has set it
  per_sequence = -(-length // config.block_size)   # blocks
  required = per_sequence if length != model.config.max_position_embeddings else 1   # blocks
  limit = model.backend.memory.largest_tensor() // max(sizes)
  max_blocks = min(model.backend.memory.max_blocks(num_bytes, block_bytes, per_sequence + 1), limit)
  num_blocks = config.num_gpu_blocks_override or min(max_blocks, config.max_num_seqs * per_sequence + 1)
  check(config.num_gpu_blocks_override or max_blocks > required,
        f"max_model_len={length} needs {per_sequence * block_bytes / 2**30:.2f} GiB of KV cache, but "
        f"gpu_memory_utilization={config.gpu_memory_utilization} leaves {num_bytes / 2**30:.2f} GiB: "
        f"{f'lower max_model_len to {(max_blocks - 1) * config.block_size}, ' if max_blocks > 1 else ''}raise "
        "gpu_memory_utilization or choose a smaller model")
  check(num_blocks <= limit, f"num_gpu_blocks_override={num_blocks} must be at most {limit} on {Device.DEFAULT}")
  logger.log(30 if num_blocks <= per_sequence else 20, f"KV cache: {num_blocks - 1} blocks = "
             f"{(num_blocks - 1) * config.block_size} tokens: {(num_blocks - 1) / per_sequence:.1f} sequences of "
             f"{length}, {num_blocks * block_bytes / 2**30:.2f} GiB{' when all are used' if cpu_cores() else ''}")
  def new(layer, shape, dtype):   # on the devices of the layer's weights
    return Tensor.empty(num_blocks, *shape, dtype=dtype, device=nn.state.get_parameters(layer)[0].device).contiguous()
  return [[new(layer, *part).realize() for part in layout] for layer, layout in zip(model.layers, layouts, strict=True)]


def upload(tensor: Tensor, array: np.ndarray) -> None:
  """Copy an array to a tensor on the device. Scheduling a Tensor(array) would take 1 ms."""
  tensor.uop.buffer.allocator._copyin(tensor.uop.buffer._buf, array.data.cast("B"))   # type: ignore[union-attr]


def capture(run: Callable[[], list[Tensor]]) -> list[Tensor]:
  """Run and capture a step as one graph. Its kernels have at most 8 buffers, which is WebGPU's limit."""
  with exclusive, Context(JIT_BATCH_SIZE=0, MAX_KERNEL_BUFFERS=8): return run()


def zeros(*shape: int) -> Tensor: return Tensor.zeros(*shape, dtype=dtypes.int32).contiguous().realize()


class Logits(Protocol):
  """Applies the LogitsProcessors of a step (seam; logits.py). The `plan` of a batch is part of the step's
  GraphKey: its `words` are uploaded with the step, `apply` changes the logits, `logprobs` returns more outputs."""
  def batch(self, rows: list[Row], runner: Any) -> Any:
    """Return the inputs of the LogitsProcessors of these rows of logits, an object with a `plan`."""
  def record(self, results: Results, tokenizer: Any) -> None:
    """Store the step's log probabilities in its sequences."""


class Runner:
  """Launches steps of a model. num_bytes: memory per device for the KV cache."""
  def __init__(self, model: Llama, config: EngineConfig, num_bytes: int, logits: Logits | None = None):
    self.model, self.config, self.logits = model, config, logits
    self.backend, self.is_async = model.backend, model.backend.is_async
    length = config.max_model_len or 0   # the engine has set it
    self.ropes = [table.to(model.devices.names).realize() for table in model.ropes(length)]
    self.kv_caches = allocate_kv_caches(model, config, max(0, num_bytes))
    self.num_blocks = len(max(self.kv_caches, key=len)[0])
    self.max_blocks = -(-length // config.block_size)
    self.max_rows = next_power_of_two(config.max_num_seqs)   # rows of logits, except prompt logprobs
    self.block_tables = zeros(config.max_num_seqs + 1, self.max_blocks)   # the last slot is for padding
    self.last_tokens = zeros(config.max_num_seqs + 1)
    self.graphs: dict[GraphKey, tuple[Tensor, Any]] = {}   # key -> words that the graph reads, graph
    self.device_tables: dict[int | None, list[int]] = {}   # slot -> block table on the device

  def choose_key(self, key: GraphKey) -> GraphKey:
    """Return the graph shape for a step: its sizes, rounded up."""
    num_tokens = next_power_of_two(key.num_tokens)
    num_rows = min(num_tokens, self.max_rows) if key.num_rows <= self.max_rows else num_tokens
    return self.backend.graphs.choose(self, key._replace(num_tokens=num_tokens, num_rows=num_rows))

  def launch(self, step: Step) -> Callable[[], Results]:
    """Start a step. Return a function that waits for its results."""
    words, graph = self.graphs.get(step.key) or self._new_graph(step)
    self._refresh_block_tables(step)
    upload(words, step.words)
    run = functools.partial(self.backend.graphs.run, self, graph, step.key)
    reads = [self.backend.start_reading(tensor) for tensor in (run() if graph.cnt > 1 else capture(run))]
    return lambda: Results(step, reads[0](), [read() for read in reads[1:]])

  def _new_graph(self, step: Step) -> tuple[Tensor, Any]:
    with exclusive: words = zeros(len(step.words))
    graph: Any = functools.partial(self._compute, words, step.key)
    if not self.config.enforce_eager: graph = self.model.devices.jit(graph)
    graph.cnt = 1   # capture at the first call, as all inputs are realized
    return self.graphs.setdefault(step.key, (words, graph))

  def _refresh_block_tables(self, step: Step) -> None:
    """Upload the block tables if a sequence starts with cached blocks. A step's own tokens carry their blocks."""
    is_stale = any(positions.start and self.device_tables.get(seq.slot) is not seq.block_table
                   for seq, positions in step.computed.items())
    self.device_tables |= {seq.slot: seq.block_table for seq in step.computed}
    if not is_stale: return
    tables = np.zeros(self.block_tables.shape, np.int32)
    for slot, block_table in self.device_tables.items(): tables[slot, :len(block_table)] = block_table
    upload(self.block_tables, tables)

  def _compute(self, words: Tensor, key: GraphKey) -> list[Tensor]:
    """Compute a step (this is captured). Return sampled tokens, (S,), and log probabilities."""
    T, S = key.num_tokens, key.num_rows
    columns = words[:NUM_WORDS * T].reshape(NUM_WORDS, T)
    tokens = TOKENS.read(columns)
    rows = LOGITS.read(columns[TOKENS.num_words:, :S])
    index = (tokens["slot"] * self.max_blocks + tokens["position"] // self.config.block_size).contiguous()
    block_tables = self.block_tables.custom_kernel(index, tokens["block"], fxn=scatter_kernel)[0]
    ids = (tokens["id"] == UNKNOWN).where(self.last_tokens[tokens["slot"]], tokens["id"]).contiguous()   # (T,)
    raw = self.model(ids, rows["token"], columns, block_tables, self.ropes, self.kv_caches)   # (S, V)
    logits = key.plan.apply(raw, words[NUM_WORDS * T:]) if key.plan else raw
    sampled = self.backend.sampler.sample(logits, rows, key.sampler_mode).contiguous()       # (S,)
    last_tokens = self.last_tokens.custom_kernel(rows["slot"], sampled, fxn=scatter_kernel)[0]
    outputs = [sampled]
    if key.plan: outputs += key.plan.logprobs(raw, sampled, words[NUM_WORDS * T:], self.backend.sampler)
    Tensor.realize(last_tokens, *outputs)
    return outputs
