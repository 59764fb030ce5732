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
    self.inputs: dict[tuple[int, int, bool], Tensor] = {}
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
    sampled = [seq.row for seq in sampling]
    lines = ((ids, 0), (positions, 0), (slots, 0), (rows, spare), (samples, 0), (sampled, spare))
    packed = [np.array(values + [empty] * (T - len(values)), np.int32) for values, empty in lines]   # of T each
    fields = np.zeros(0, np.int32) if greedy else _sampler_fields(sampling, S)
    array = np.concatenate([*packed, fields])
    if (shape := (T, S, greedy)) not in self.inputs:
      self.inputs[shape] = Tensor.zeros(len(array), dtype=dtypes.int32).contiguous().realize()
    buffer = self.inputs[shape].uop.buffer
    buffer.allocator._copyin(buffer._buf, memoryview(array).cast("B"))   # Tensor(array) would be scheduled: 1 ms a step
    return Step(self.inputs[shape], shape, sampling)

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
      tokens, fields = packed[:6 * T].reshape(6, T), packed[6 * T:]
      ids, samples = tokens[0], tokens[4, :S]
      ids = (ids < 0).where(self.last_token[tokens[3]], ids).contiguous()
      logits = self.model(ids, samples, Batch(tokens, self.table, self.rope), self.caches)   # (S, vocab)
      if greedy: return self._keep(logits.argmax(1).cast(dtypes.int32), tokens)
      fields = fields.reshape(S, NUM_FIELDS).contiguous()
      floats, seeds = fields.bitcast(dtypes.float32), fields[:, 3:5].bitcast(dtypes.uint32)
      kept = (floats[:, 0], fields[:, 5], floats[:, 1], floats[:, 2])   # temperature, top_k, top_p, min_p
      return self._keep(sample(logits, *kept, seeds, tokens[1][samples], fields[:, 6:]), tokens)
    if self.config.enforce_eager: return step
    graph = TinyJit(step)
    graph.cnt = 1   # capture at the first call: all that it reads is realized, a plain run before it only costs time
    return graph

  def _keep(self, ids: Tensor, tokens: Tensor) -> Tensor:
    last = self.last_token.custom_kernel(ids := ids.contiguous(), tokens, fxn=_last_token_kernel)[0]
    Tensor.realize(ids, last)
    return ids


def _last_token_kernel(last: UOp, ids: UOp, tokens: UOp) -> UOp:
  i = UOp.range(ids.shape[0], 0)
  return last[tokens[5, i].load()].store(ids[i]).end(i).sink(arg=KernelInfo(name="last_token"))


def _sampler_fields(sampling: list[Sequence], S: int) -> np.ndarray:
  floats = [(seq.params.temperature, seq.params.top_p, seq.params.min_p) for seq in sampling]
  ints = [(seq.params.top_k, *seq.banned, *[-1] * (MAX_BANNED - len(seq.banned))) for seq in sampling]
  seeds = np.array([[seq.seed] for seq in sampling], np.int64)
  fields = np.hstack([np.array(floats, np.float32).view(np.int32), seeds.view(np.int32), np.array(ints, np.int32)])
  return np.pad(fields, ((0, S - len(sampling)), (0, 0))).ravel()
