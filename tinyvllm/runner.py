"""Turns a scheduled batch into one int32 array, one call of a captured graph, and the sampled ids. There is a graph for
each bucket (a batch is padded to a power of two) and kind of sampler; the context's length is a variable of the
graph."""
import logging
import os
import time
from collections.abc import Callable

import numpy as np
from tinygrad import Context, Tensor, TinyJit, UOp, dtypes

from .config import EngineConfig
from .llama import Batch, Llama
from .sampling import sample
from .sequence import MAX_BANNED, Sequence

logger = logging.getLogger("tinyvllm")
Packed = tuple[np.ndarray, list[Sequence], int, int, bool, int]
KINDS = {True: "greedy", False: "sampling"}
NUM_FIELDS = 6 + MAX_BANNED   # of the sampler: temperature, top_p, min_p, two words of seed, top_k, banned ids


class Runner:
  """rope: (max_model_len, 2, head_dim / 2). caches: a block tensor per layer."""
  def __init__(self, model: Llama, config: EngineConfig, rope: Tensor, caches: list[Tensor]):
    self.model, self.config, self.rope, self.caches = model, config, rope, caches
    max_blocks = -(-int(rope.shape[0]) // config.block_size)
    shape = (config.max_num_seqs + 1, max_blocks)   # the last row is padding's
    self.table = Tensor.zeros(*shape, dtype=dtypes.int32).contiguous().realize()
    self.num_blocks = UOp.variable("num_blocks", 0, max_blocks - 1)
    self.graphs: dict[tuple[int, bool], Callable] = {}

  def pack(self, batch: dict[Sequence, int]) -> Packed:
    """All that a step needs of its sequences, n tokens of each, for they may be aborted while it runs: one int32 array,
    the sequences that get a token, tokens and samples with padding, whether all are greedy, the longest context's last
    block."""
    total, block_size = sum(batch.values()), self.config.block_size
    T = min(1 << (total - 1).bit_length(), self.config.max_num_batched_tokens)   # the bucket
    tokens, samples = np.zeros((4, T), np.int32), np.zeros(min(T, self.config.max_num_seqs), np.int32)
    tokens[3] = self.config.max_num_seqs
    sampling: list[Sequence] = []
    start = longest = 0
    for seq, n in batch.items():
      positions = np.arange(seq.num_computed, longest_here := seq.num_computed + n)
      slots = np.array(seq.block_table)[positions // block_size] * block_size + positions % block_size
      part = seq.tokens[seq.num_computed:longest_here], positions, slots, np.full(n, seq.row)
      tokens[:, start:start + n] = np.stack(part)
      start, longest = start + n, max(longest, longest_here)
      if n == seq.remaining:
        samples[len(sampling)] = start - 1
        sampling.append(seq)
    greedy = all(seq.params.temperature < 1e-5 and not seq.banned for seq in sampling)
    fields = np.zeros(0, np.int32) if greedy else _sampler_fields(sampling, len(samples))
    array = np.concatenate([tokens.ravel(), samples, fields])
    return array, sampling, T, len(samples), greedy, (longest - 1) // block_size

  def run(self, step: Packed) -> dict[Sequence, int]:
    """Compute a step; returns the next token of the sequences that it brings to their end."""
    array, sampling, T, S, greedy, blocks = step
    packed = Tensor(array).realize()
    started, graph = time.perf_counter(), self.graphs.get((T, greedy)) or self._graph(T, S, greedy)
    with Context(**({"PARALLEL": 0} if (os.cpu_count() or 1) <= 4 else {})):   # few cores: workers only start slowly
      ids = graph(packed, self.num_blocks.bind(blocks)).tolist()
    if (T, greedy) not in self.graphs and not self.config.enforce_eager:
      self.graphs[T, greedy] = graph
      logger.info("captured the %s step of %d tokens in %.1f s", KINDS[greedy], T, time.perf_counter() - started)
    return dict(zip(sampling, ids, strict=False))

  def _graph(self, T: int, S: int, greedy: bool) -> Callable:
    def step(packed: Tensor, num_blocks: UOp) -> Tensor:
      packed = packed.clone()   # slices of a buffer of the graph are resolved once, slices of its input at every call
      ids, positions, slots, rows, samples, fields = packed.split([T, T, T, T, S, int(packed.shape[0]) - 4 * T - S])
      batch = Batch(positions, slots, rows, self.rope[positions].contiguous(), self.table, num_blocks + 1)
      logits = self.model(ids, samples, batch, self.caches)   # (S, vocab)
      if greedy: return logits.argmax(1).cast(dtypes.int32).realize()
      fields = fields.reshape(S, NUM_FIELDS).contiguous()
      floats, seeds = fields.bitcast(dtypes.float32), fields[:, 3:5].bitcast(dtypes.uint32)
      kept = (floats[:, 0], fields[:, 5], floats[:, 1], floats[:, 2])   # temperature, top_k, top_p, min_p
      return sample(logits, *kept, seeds, positions[samples], fields[:, 6:]).realize()
    if self.config.enforce_eager: return step
    graph = TinyJit(step)
    graph.cnt = 1   # capture at the first call: all that it reads is realized, a plain run before it only costs time
    return graph


def _sampler_fields(sampling: list[Sequence], S: int) -> np.ndarray:
  floats = [(seq.params.temperature, seq.params.top_p, seq.params.min_p) for seq in sampling]
  ints = [(seq.params.top_k, *seq.banned, *[-1] * (MAX_BANNED - len(seq.banned))) for seq in sampling]
  seeds = np.array([[seq.seed] for seq in sampling], np.int64)
  fields = np.hstack([np.array(floats, np.float32).view(np.int32), seeds.view(np.int32), np.array(ints, np.int32)])
  return np.pad(fields, ((0, S - len(sampling)), (0, 0))).ravel()
