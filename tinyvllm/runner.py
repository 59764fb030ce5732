"""Turns a scheduled batch into one int32 array and one call of a captured graph. There is a graph for
each bucket (a batch is padded to a power of two) and kind of sampler."""
import logging
import os
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tinygrad import Context, Tensor, TinyJit, UOp, dtypes
from tinygrad.uop.ops import KernelInfo

from .config import EngineConfig
from .linear import cpu_cores
from .llama import Batch, Llama
from .sampling import sample
from .sequence import MAX_BANNED, Sequence

logger = logging.getLogger("tinyvllm")
KINDS = {True: "greedy", False: "sampling"}
NUM_FIELDS = 6 + MAX_BANNED   # of the sampler: temperature, top_p, min_p, two words of seed, top_k, banned ids


class Step(NamedTuple):
  """A batch, packed for the device. sampling: the sequences that get a token from it."""
  packed: Tensor
  shape: tuple[int, int, bool]   # tokens, samples, greedy
  sampling: list[Sequence]


def bucket(n: int) -> int: return 1 << (n - 1).bit_length()


class Runner:
  """rope: (max_model_len, 2, head_dim / 2). caches: a block tensor per layer."""
  def __init__(self, model: Llama, config: EngineConfig, rope: Tensor, caches: list[Tensor]):
    self.model, self.config, self.rope, self.caches = model, config, rope, caches
    rows = config.max_num_seqs + 1   # the last is padding's
    max_blocks = -(-int(rope.shape[0]) // config.block_size)
    self.table, self.last_token = (Tensor.zeros(*shape, dtype=dtypes.int32).contiguous().realize()
                                   for shape in ((rows, max_blocks), (rows,)))
    self.overlaps = not cpu_cores()   # a CPU returns from a launch when all is done
    self.graphs: dict[tuple[int, int, bool], Callable] = {}

  def prepare(self, batch: dict[Sequence, int]) -> Step:
    """Pack the next n tokens of each sequence. A token that the host has not read is the device's last of a row."""
    size, spare = self.config.block_size, self.config.max_num_seqs
    T, sampling = bucket(sum(batch.values())), [seq for seq, n in batch.items() if n == seq.remaining]
    S, end = min(T, bucket(spare)), 0
    ids, positions, slots, rows, samples = [], [], [], [], []
    for seq, n in batch.items():
      span, end = range(seq.num_computed, seq.num_computed + n), end + n
      known = seq.tokens[span.start:span.stop]
      ids += known + [-1] * (n - len(known))
      positions += span
      slots += [seq.block_table[position // size] * size + position % size for position in span]
      rows += [seq.row] * n
      if n == seq.remaining: samples.append(end - 1)
    greedy = all(seq.params.temperature < 1e-5 and not seq.banned for seq in sampling)
    fields = np.zeros(0, np.int32) if greedy else _sampler_fields(sampling, S)
    columns = ((ids, T, 0), (positions, T, 0), (slots, T, 0), (rows, T, spare), (samples, S, 0),
               ([seq.row for seq in sampling], S, spare))
    packed = [np.array(values + [empty] * (size - len(values)), np.int32) for values, size, empty in columns]
    return Step(Tensor(np.concatenate([*packed, fields])).realize(), (T, S, greedy), sampling)

  def launch(self, step: Step) -> Tensor:
    """Start a step; returns its ids, (S,), which can be read once it is done."""
    started, graph = time.perf_counter(), self.graphs.get(step.shape) or self._graph(*step.shape)
    with Context(**({"PARALLEL": 0} if (os.cpu_count() or 1) <= 4 else {})):   # few cores: workers only start slowly
      ids = graph(step.packed)
    if step.shape not in self.graphs and not self.config.enforce_eager:
      self.graphs[step.shape] = graph
      T, _, greedy = step.shape
      logger.info("captured the %s step of %d tokens in %.1f s", KINDS[greedy], T, time.perf_counter() - started)
    return ids

  def _graph(self, T: int, S: int, greedy: bool) -> Callable:
    def step(packed: Tensor) -> Tensor:
      packed = packed.clone()   # slices of a buffer of the graph are resolved once, slices of its input at every call
      parts = packed.split([T, T, T, T, S, S, int(packed.shape[0]) - 4 * T - 2 * S])
      ids, positions, slots, rows, samples, sampled_rows, fields = parts
      ids = (ids < 0).where(self.last_token[rows], ids)
      batch = Batch(positions, slots, rows, self.rope[positions].contiguous(), self.table)
      logits = self.model(ids, samples, batch, self.caches)   # (S, vocab)
      if greedy: return self._keep(logits.argmax(1).cast(dtypes.int32), sampled_rows)
      fields = fields.reshape(S, NUM_FIELDS).contiguous()
      floats, seeds = fields.bitcast(dtypes.float32), fields[:, 3:5].bitcast(dtypes.uint32)
      kept = (floats[:, 0], fields[:, 5], floats[:, 1], floats[:, 2])   # temperature, top_k, top_p, min_p
      return self._keep(sample(logits, *kept, seeds, positions[samples], fields[:, 6:]), sampled_rows)
    if self.config.enforce_eager: return step
    graph = TinyJit(step)
    graph.cnt = 1   # capture at the first call: all that it reads is realized, a plain run before it only costs time
    return graph

  def _keep(self, ids: Tensor, rows: Tensor) -> Tensor:
    last = self.last_token.custom_kernel(ids := ids.contiguous(), rows, fxn=_last_token_kernel)[0]
    Tensor.realize(ids, last)
    return ids


def _last_token_kernel(last: UOp, ids: UOp, rows: UOp) -> UOp:
  i = UOp.range(ids.shape[0], 0)
  return last[rows[i].load()].store(ids[i]).end(i).sink(arg=KernelInfo(name="last_token"))


def _sampler_fields(sampling: list[Sequence], S: int) -> np.ndarray:
  floats = [(seq.params.temperature, seq.params.top_p, seq.params.min_p) for seq in sampling]
  ints = [(seq.params.top_k, *seq.banned, *[-1] * (MAX_BANNED - len(seq.banned))) for seq in sampling]
  seeds = np.array([[seq.seed] for seq in sampling], np.int64)
  fields = np.hstack([np.array(floats, np.float32).view(np.int32), seeds.view(np.int32), np.array(ints, np.int32)])
  return np.pad(fields, ((0, S - len(sampling)), (0, 0))).ravel()
