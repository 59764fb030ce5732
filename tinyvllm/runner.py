"""Turns a scheduled batch into one int32 array, one call of a captured graph, and the sampled ids. One graph per bucket (the batch padded to a power of
two) and kind of sampler; the context length is a variable of the graph."""
import logging
import time
from collections.abc import Callable

import numpy as np
from tinygrad import Tensor, TinyJit, UOp, dtypes

from .config import EngineConfig, ModelConfig
from .kv_cache import allocate_caches
from .llama import Llama, rope_table
from .sampling import sample
from .sequence import MAX_BANNED, Sequence

logger = logging.getLogger("tinyvllm")
NUM_FIELDS = 6 + MAX_BANNED   # temperature, top_k, top_p, min_p, two words of seed, banned ids


class Runner:
  def __init__(self, model: Llama, model_config: ModelConfig, config: EngineConfig, max_model_len: int, num_blocks: int):
    self.model, self.config = model, config
    dtype = model.norm.weight.dtype
    self.caches = allocate_caches(model_config, num_blocks, config.block_size, dtype)
    self.rope = rope_table(model_config, max_model_len).realize()
    max_blocks = -(-max_model_len // config.block_size)
    self.table = Tensor.zeros(config.max_num_seqs + 1, max_blocks, dtype=dtypes.int32).contiguous().realize()   # the last row is padding's
    self.num_blocks = UOp.variable("num_blocks", 0, max_blocks - 1)
    self.graphs: dict[tuple[int, bool], Callable] = {}

  def run(self, batch: dict[Sequence, int]) -> dict[Sequence, int]:
    """Compute n tokens of each sequence; a next token for those that this brings to their end."""
    total, bs = sum(batch.values()), self.config.block_size
    T = min(1 << (total - 1).bit_length(), self.config.max_num_batched_tokens)   # the bucket
    S = min(T, self.config.max_num_seqs)
    tokens = np.zeros((4, T), np.int32)   # id, position, slot, row
    tokens[3] = self.config.max_num_seqs
    sampling: list[Sequence] = []
    samples, start = np.zeros(S, np.int32), 0
    for seq, n in batch.items():
      positions, part = np.arange(seq.num_computed, seq.num_computed + n), slice(start, start := start + n)
      tokens[0, part], tokens[1, part], tokens[3, part] = seq.tokens[seq.num_computed:seq.num_computed + n], positions, seq.row
      tokens[2, part] = np.array(seq.block_table)[positions // bs] * bs + positions % bs
      if n == seq.remaining:
        samples[len(sampling)] = start - 1
        sampling.append(seq)
    greedy = all(seq.params.greedy and not seq.banned for seq in sampling)
    parts = [tokens.ravel(), samples] + ([] if greedy else [self._sampler_fields(sampling, S)])
    longest = max(seq.num_computed + n for seq, n in batch.items())
    ids = self._graph(T, S, greedy)(Tensor(np.concatenate(parts)).realize(), self.num_blocks.bind((longest - 1) // bs)).numpy()
    return dict(zip(sampling, ids.tolist(), strict=False))

  def _sampler_fields(self, sampling: list[Sequence], S: int) -> np.ndarray:
    fields = np.full((S, NUM_FIELDS), -1, np.int32)
    floats = fields.view(np.float32)
    fields[:, 0], floats[:, 2] = 0, 1.0   # unused rows: greedy, everything kept
    for i, seq in enumerate(sampling):
      p = seq.params
      floats[i, 0], fields[i, 1], floats[i, 2], floats[i, 3] = p.temperature, p.top_k, p.top_p, p.min_p
      fields[i, 4:6] = np.array([seq.seed], np.int64).view(np.int32)
      fields[i, 6:6 + len(seq.banned)] = seq.banned
    return fields.ravel()

  def _graph(self, T: int, S: int, greedy: bool) -> Callable:
    if (T, greedy) in self.graphs: return self.graphs[T, greedy]

    def step(packed: Tensor, num_blocks: UOp) -> Tensor:
      packed = packed.clone()   # slices of a buffer of the graph are resolved once, slices of its input at every call
      tokens = [packed[i * T:(i + 1) * T] for i in range(4)]
      samples, fields = packed[4 * T:4 * T + S], packed[4 * T + S:]
      logits = self.model(*tokens, samples, self.rope, self.caches, self.table, num_blocks + 1)   # (S, vocab)
      if greedy: return logits.argmax(1).cast(dtypes.int32).realize()
      fields = fields.reshape(S, NUM_FIELDS).contiguous()
      floats, seeds = fields.bitcast(dtypes.float32), fields[:, 4:6].bitcast(dtypes.uint32)
      positions = tokens[1][samples]   # (S,)
      return sample(logits, floats[:, 0], fields[:, 1], floats[:, 2], floats[:, 3], seeds, positions, fields[:, 6:]).realize()

    if self.config.enforce_eager: return step
    graph: TinyJit = TinyJit(step)
    graph.cnt = 1   # capture at the first call: everything that it reads is realized, so an uncaptured run would only cost time

    def capture(packed: Tensor, num_blocks: UOp) -> Tensor:
      started = time.perf_counter()
      ids = graph(packed, num_blocks)
      logger.info("captured the step of %d tokens%s in %.1f s", T, "" if greedy else " with sampling", time.perf_counter() - started)
      self.graphs[T, greedy] = graph
      return ids
    return capture
