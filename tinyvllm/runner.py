"""Runs packed steps, each as one call of a captured graph: there is one for each shape. Owns what stays on the device:
the block tensors of the KV cache, allocated once, the block tables and the last tokens."""
import collections, functools, math, operator, time
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Context, Device, Tensor, UOp, dtypes
from tinygrad.dtype import DType

from .attention import block_parts
from .batch import DRAFT_ROWS, DRAWN_BY, LOGITS, TOKEN, Shape, Step, bucket
from .config import EngineConfig, ModelConfig, check, logger
from .device import best, cpu_cores, kernel_of, largest_tensor, num_compiled
from .llama import Llama, rope_table
from .sampling import argmax, edit_kernel, restrict, sample, top_logprobs


OFTEN = 16   # times that a shape is met before it is worth a capture of its own


def allocate_caches(model: ModelConfig, config: EngineConfig, max_model_len: int, dtype: DType, left: int,
                    device: Any = None) -> list:
  """For each layer K, V and, for some types, their scales: a first axis of num_blocks, and what block_parts says.
  num_blocks, of which block 0 takes padding's writes, is the override, or what fits `left` bytes, at most what
  max_num_seqs sequences of max_model_len can use. n_kv_heads, left: of each device, where there are several. Raises
  ValueError where not one such sequence fits."""
  BS = config.block_size
  parts = best(block_parts)(model, config, dtype)
  sizes = [math.prod(shape) * kind.itemsize for shape, kind in parts]   # bytes
  size = model.num_hidden_layers * sum(sizes)
  per_sequence = -(-max_model_len // BS)
  most = largest_tensor() // max(sizes)
  fit = min(left // size, most)
  fit -= fit % (1 << max(0, fit.bit_length() - 6))   # one of few sizes: kernels know and cache it
  if cpu_cores(): fit = min(fit, max(2**32 // size, per_sequence + 1))   # 4 GiB will do: it is the user's memory
  check(fit > 1 or config.num_gpu_blocks_override, f"gpu_memory_utilization={config.gpu_memory_utilization} leaves "
        f"{left / 2**30:.2f} GiB for the KV cache: raise it, free some memory, or choose a smaller model")
  check(fit > per_sequence or config.num_gpu_blocks_override, f"max_model_len={max_model_len} needs "
        f"{per_sequence * size / 2**30:.2f} GiB of KV cache, of {left / 2**30:.2f} GiB free: lower it to "
        f"{(fit - 1) * BS} or raise gpu_memory_utilization={config.gpu_memory_utilization}")
  num_blocks = config.num_gpu_blocks_override or min(fit, config.max_num_seqs * per_sequence + 1)
  check(num_blocks <= most, f"num_gpu_blocks_override={num_blocks} must be at most {most} on {Device.DEFAULT}")
  tokens = (num_blocks - 1) * BS
  logger.log(30 if num_blocks <= per_sequence else 20, f"KV cache: {num_blocks - 1} blocks of {BS} tokens = {tokens} "
             f"tokens, {num_blocks * size / 2**30:.2f} GiB: {tokens / max_model_len:.1f} sequences of {max_model_len}")
  def new(shape, kind): return Tensor.empty(num_blocks, *shape, dtype=kind, device=device).contiguous().realize()
  return [[new(*part) for part in parts] for _ in range(model.num_hidden_layers)]


def scatter_kernel(out: UOp, index: UOp, values: UOp) -> UOp:
  """Store each value at its index in out, seen flat."""
  i = UOp.range(index.shape[0], 0)
  return kernel_of("scatter", out.base.index(index[i].load()).store(values[i]))


def upload(tensor: Tensor, array: np.ndarray) -> None:
  """Fill a tensor on the device. Tensor(array) would be scheduled, which takes 1 ms."""
  buffer: Any = tensor.uop.buffer
  buffer.allocator._copyin(buffer._buf, array.data.cast("B"))


def zeros(*shape: int) -> Tensor: return Tensor.zeros(*shape, dtype=dtypes.int32).contiguous().realize()


class Runner:
  """left: bytes of the device, or of each of several, that the caches may take."""
  def __init__(self, model: Llama, config: EngineConfig, max_model_len: int, left: int):
    self.model = model
    self.jit: Any = functools.partial if config.enforce_eager else model.jit   # of a computation; eager: itself
    self.rope = rope_table(model.config, max_model_len).to(model.devices).realize()
    self.caches = allocate_caches(model.config, config, max_model_len, model.dtype, left, model.devices)
    self.num_blocks = len(self.caches[0][0])
    self.overlaps = not cpu_cores()   # whether a launched step goes on while the host does other things
    # tinygrad waits for the device whenever it reads, for all that was launched
    self.reads_early = hasattr(Device.default, "start_reading")
    self.start_reading: Any = getattr(Device.default, "start_reading", lambda tensor: tensor.tolist)
    self.max_blocks = -(-max_model_len // config.block_size)
    self.max_tokens = bucket(config.max_num_batched_tokens)   # type: ignore[arg-type]   # by now a number
    # Of logits, but where a prompt's are wanted
    self.max_rows = bucket(max(config.max_num_seqs, DRAFT_ROWS if config.speculative_config else 1))
    self.sizes: list[int] = []   # tokens of the steps that are captured before they are met, if any are
    self.met: collections.Counter[Shape] = collections.Counter()
    self.table = zeros(config.max_num_seqs + 1, self.max_blocks)   # the last row is padding's
    self.last_token = zeros(config.max_num_seqs + 1)
    self.steps: dict[Shape, tuple[Tensor, Any]] = {}   # what each graph reads, and itself
    self.known: dict[int | None, list[int]] = {}   # the block tables that the device has, by row

  def fit(self, need: Shape) -> Shape:
    """The shape to compute in: the smallest of the few that there are, but at first a captured one that takes less than
    twice its time; where steps were captured before they were met, any of these."""
    tokens = min([size for size in self.sizes if size >= need.tokens], default=bucket(need.tokens))
    exact = need._replace(
      tokens=tokens, rows=min(tokens, self.max_rows) if need.rows <= self.max_rows else tokens,
      edits=16 * 8 ** -(-(need.edits // 16).bit_length() // 3) if need.edits else 0)   # few sizes
    best = min([x for x in self.steps if all(map(operator.ge, x, exact))], key=Shape.cost, default=exact)
    self.met[exact] += 1
    return best if self.sizes or self.met[exact] <= OFTEN and best.cost() < 2 * exact.cost() else exact

  def launch(self, step: Step) -> Callable[[], tuple]:
    """Start a step. What it returns waits for its end, and gives the step, the ids that its rows of logits chose, and
    what top_logprobs says of each, if it was asked for."""
    started = time.perf_counter()
    known = num_compiled()
    if step.shape not in self.steps:
      words = zeros(len(step.array))
      graph = self.jit(functools.partial(self._compute, words, step.shape))
      graph.cnt = 1   # TinyJit's count of calls: capture at the first one, as all that it reads is realized
      self.steps[step.shape] = words, graph
    words, graph = self.steps[step.shape]
    stale = any(self.known.get(seq.row) is not seq.block_table for seq, places in step.computed.items() if places.start)
    self.known |= {seq.row: seq.block_table for seq in step.computed}
    if stale:   # tokens bring the blocks of their own places, but a new sequence may begin with others
      tables = np.zeros(self.table.shape, np.int32)
      for row, block_table in self.known.items(): tables[row, :len(block_table)] = block_table
      upload(self.table, tables)
    upload(words, step.array)
    with Context(JIT_BATCH_SIZE=0, MAX_KERNEL_BUFFERS=8): ids, logprobs = graph()   # 8: WebGPU's
    if graph.cnt == 2:   # that call has captured it
      Device.default.synchronize()
      logger.log(10 if self.sizes else 20, f"captured a step of {step.shape.tokens} tokens in "
                 f"{time.perf_counter() - started:.1f} s, {num_compiled() - known} new kernels")
    reads = [self.start_reading(tensor) for tensor in (ids, logprobs)]
    return lambda: (step, *[read() for read in reads])

  def _compute(self, words: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """The graph. Returns the ids of all rows of logits, (S,), and what top_logprobs says of them, or of none."""
    T, S, sampler, scored, E, masked = shape
    packed = words[:16 * T].reshape(16, T)
    rest = words[16 * T:]
    token = dict(zip(TOKEN.names, packed, strict=False))   # type: ignore[call-overload]   # (T,) each
    logit = dict(zip(LOGITS.names, packed[len(TOKEN.names):, :S], strict=False))   # type: ignore[call-overload]
    table = self.table.custom_kernel(token["entry"], token["block"], fxn=scatter_kernel)[0]
    ids = (token["id"] < 0).where(self.last_token[token["row"]], token["id"]).contiguous()   # (T,)
    raw = self.model(ids, logit["token"], packed, table, self.rope, self.caches)   # (S, vocab)
    logits = restrict(raw, rest[5 * E:].reshape(S, -1)).contiguous() if masked else raw.clone() if E else raw
    if E: logits = logits.custom_kernel(rest[:5 * E].reshape(5, E).contiguous(), fxn=edit_kernel)[0]   # in place
    params: Any = {name: logit[name].bitcast(dtypes.float32) for name in DRAWN_BY}
    params |= {"positions": logit["position"], "seeds": packed[14:, :S].bitcast(dtypes.uint32).T}   # seeds: (S, 2)
    chosen = (sample(logits, filtered=sampler > 1, **params) if sampler else argmax(logits)).contiguous()   # (S,)
    last_token = self.last_token.custom_kernel(logit["last_row"], chosen, fxn=scatter_kernel)[0]
    wanted = (logit["target"] < 0).where(chosen, logit["target"])
    logprobs = top_logprobs(raw, wanted).contiguous() if scored else Tensor.empty(0)
    Tensor.realize(chosen, last_token, logprobs)
    return chosen, logprobs
