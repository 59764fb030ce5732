"""Runs packed steps, each as one call of a captured graph: there is one for each shape. Owns what stays on the device:
the block tensors of the KV cache, allocated once, the block tables and the last tokens."""
import functools, os, time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.dtype import DType
from tinygrad.uop.ops import KernelInfo

from .batch import FILTERED, GREEDY, LOGITS, TOKEN, Shape, Step
from .config import EngineConfig, ModelConfig, check, logger
from .device import cpu_cores, largest_tensor
from .llama import Llama, rope_table
from .sampling import argmax, edit_kernel, restrict, sample, top_logprobs


class Results(NamedTuple):
  """Of each row of a step's logits: the token chosen, and what top_logprobs gives, if it was asked for."""
  ids: list[int]
  logprobs: list[list[float]]


def allocate_caches(model: ModelConfig, config: EngineConfig, max_model_len: int, dtype: DType, left: int) -> list:
  """For each layer K, (num_blocks, n_kv_heads, head_dim, block_size), and V, its last axes the other way round, as the
  kernels read them. num_blocks, of which block 0 takes padding's writes, is the override, or what fits `left` bytes, at
  most what max_num_seqs sequences of max_model_len can use. Raises ValueError where not one such sequence fits."""
  KV, D, BS, layers = model.num_key_value_heads, model.head_dim, config.block_size, model.num_hidden_layers
  size = 2 * layers * KV * D * BS * dtype.itemsize   # of a block
  per_sequence = -(-max_model_len // BS)
  most = largest_tensor() * 2 * layers // size
  fit = min(left // size, most)
  fit -= fit % (1 << max(0, fit.bit_length() - 6))   # one of few sizes: kernels know and cache it
  check(fit > per_sequence or config.num_gpu_blocks_override, f"max_model_len={max_model_len} needs "
        f"{per_sequence * size / 2**30:.2f} GiB of KV cache, of {left / 2**30:.2f} GiB free: lower it to "
        f"{max(0, fit - 1) * BS} or raise gpu_memory_utilization={config.gpu_memory_utilization}")
  num_blocks = config.num_gpu_blocks_override or min(fit, config.max_num_seqs * per_sequence + 1)
  check(num_blocks <= most, f"num_gpu_blocks_override={num_blocks} must be at most {most}, which is all that "
        f"{Device.DEFAULT} takes in one tensor")
  tokens = (num_blocks - 1) * BS
  logger.log(30 if num_blocks <= per_sequence else 20, "KV cache: %d blocks of %d tokens = %d tokens, %.2f GiB: %.1f "
             "sequences of %d", num_blocks - 1, BS, tokens, num_blocks * size / 2**30, tokens / max_model_len,
             max_model_len)
  shapes = (num_blocks, KV, D, BS), (num_blocks, KV, BS, D)
  return [[Tensor.empty(*shape, dtype=dtype).contiguous().realize() for shape in shapes] for _ in range(layers)]


def table_kernel(block_size: int, table: UOp, tokens: UOp) -> UOp:
  """Store the block of each token's slot in the block tables, (rows, max_blocks)."""
  t = UOp.range(tokens.shape[0], 0)
  position, slot, row = [tokens[t, TOKEN.names.index(name)].load().cast(dtypes.weakint)
                         for name in ("position", "slot", "row")]
  stored = table[row, position // block_size].store((slot // block_size).cast(dtypes.int32))
  return stored.end(t).sink(arg=KernelInfo(name="table"))


def last_token_kernel(last_token: UOp, rows: UOp, ids: UOp) -> UOp:
  """Store each id, (S,), as the last token of the row of tables that `rows`, (fields of LOGITS, S), says."""
  i = UOp.range(ids.shape[0], 0)
  row = rows[LOGITS.names.index("row"), i].load()
  return last_token[row].store(ids[i]).end(i).sink(arg=KernelInfo(name="last_token"))


def upload(tensor: Tensor, array: np.ndarray) -> None:
  """Fill a tensor on the device. Tensor(array) would be scheduled, which takes 1 ms."""
  buffer: Any = tensor.uop.buffer
  buffer.allocator._copyin(buffer._buf, array.data.cast("B"))


def zeros(*shape: int) -> Tensor: return Tensor.zeros(*shape, dtype=dtypes.int32).contiguous().realize()


class Runner:
  """caches: as allocate_caches makes them. overlaps: whether a launched step goes on while the host does other things."""
  def __init__(self, model: Llama, shape: ModelConfig, config: EngineConfig, max_model_len: int, caches: list):
    self.model: Callable[..., Tensor] = model
    self.config = config
    self.caches = caches
    self.rope = rope_table(shape, max_model_len).realize()
    self.num_blocks = int(caches[0][0].shape[0])
    self.overlaps = not cpu_cores()
    self.table = zeros(config.max_num_seqs + 1, -(-max_model_len // config.block_size))   # the last row is padding's
    self.last_token = zeros(config.max_num_seqs + 1)
    self.steps: dict[Shape, tuple[Tensor, Callable]] = {}   # what each graph reads, and itself
    self.known: dict[int, list[int]] = {}   # the block tables that the device has, by row

  def launch(self, step: Step) -> Callable[[], Results]:
    """Start a step. What it returns waits for its end, and gives the results."""
    if step.shape not in self.steps: self._prepare(step.shape)
    given, graph = self.steps[step.shape]
    self._bring_tables(step)
    upload(given, step.array)
    if getattr(graph, "captured", graph) is None: ids, logprobs = self._capture(step.shape, graph)
    else: ids, logprobs = graph()
    return lambda: Results(ids.tolist(), logprobs.tolist() if step.shape.logprobs else [])

  def _prepare(self, shape: Shape) -> None:
    given = zeros(shape.slices()[-1].stop)
    compute = functools.partial(self._compute, given, shape)
    self.steps[shape] = given, compute if self.config.enforce_eager else TinyJit(compute)

  def _capture(self, shape: Shape, graph: Any) -> tuple[Tensor, Tensor]:
    started = time.perf_counter()
    parallel = {"PARALLEL": 0} if (os.cpu_count() or 1) <= 4 else {}   # a pool of compilers only starts slowly
    graph.cnt = 1   # capture at the first call: all that it reads is realized
    with Context(JIT_BATCH_SIZE=0, MAX_KERNEL_BUFFERS=8, **parallel): results = graph()   # 8: WebGPU's
    logger.info("captured a step of %d tokens in %.1f s", shape.tokens, time.perf_counter() - started)
    return results

  def _bring_tables(self, step: Step) -> None:
    """Tokens bring the blocks of their own slots: tables that begin with others are brought here."""
    written = [x for x in step.written if x.seq.row is not None]   # none that was aborted since
    unknown = [x for x in written if x.start and self.known.get(x.seq.row) is not x.block_table]
    self.known |= {x.seq.row: x.block_table for x in written}
    if not unknown: return
    array = np.zeros(self.table.shape, np.int32)
    for row, block_table in self.known.items(): array[row, :len(block_table)] = block_table
    upload(self.table, array)

  def _compute(self, given: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """The graph. Returns the ids of all rows of logits, (S,), and what top_logprobs says of them, or the ids again."""
    tokens, rows, edits, masks = [given[part] for part in shape.slices()]
    tokens = tokens.reshape(shape.tokens, -1)   # (T, fields of TOKEN)
    rows = rows.reshape(shape.rows, -1).T.contiguous()   # (fields of LOGITS, S)
    fields = {name: rows[i] for i, name in enumerate(LOGITS.names)}
    table = self.table.custom_kernel(tokens, fxn=functools.partial(table_kernel, self.config.block_size))[0]
    ids = tokens[:, TOKEN.names.index("id")]
    ids = (ids < 0).where(self.last_token[tokens[:, TOKEN.names.index("row")]], ids).contiguous()   # (T,)
    raw = self.model(ids, fields["token"], tokens, table, self.rope, self.caches)   # (S, vocab)
    logits = raw
    if shape.mask_words: logits = restrict(raw, masks.reshape(shape.rows, -1)).contiguous()
    if shape.edits:   # in place, of a copy
      logits = logits if shape.mask_words else raw.clone()
      logits = logits.custom_kernel(edits.reshape(shape.edits, -1).contiguous(), fxn=edit_kernel)[0]
    ids = (argmax(logits) if shape.sampler == GREEDY else self._draw(logits, fields, shape)).contiguous()   # (S,)
    outputs = [ids, self.last_token.custom_kernel(rows, ids, fxn=last_token_kernel)[0]]
    if shape.logprobs:
      target = (fields["target"] < 0).where(ids, fields["target"])
      outputs.append(top_logprobs(raw, target).contiguous())   # (S, 2 + 2 TOP)
    Tensor.realize(*outputs)
    return ids, outputs[-1]

  def _draw(self, logits: Tensor, fields: dict[str, Tensor], shape: Shape) -> Tensor:
    temperature, top_p, min_p = [fields[name].bitcast(dtypes.float32) for name in ("temperature", "top_p", "min_p")]
    seeds = Tensor.stack(fields["seed_low"], fields["seed_high"], dim=1).bitcast(dtypes.uint32)   # (S, 2)
    return sample(logits, temperature, fields["top_k"], top_p, min_p, seeds, fields["position"],
                  shape.sampler == FILTERED)
