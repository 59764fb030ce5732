"""Turns a scheduled batch into one int32 array and one call of a captured graph: there is one for each bucket (a batch is
padded to a power of two) and kind of sampler. Owns what stays on the device: the block tensors of the KV cache, allocated
once, the block tables and the last tokens. Opens the device."""
import ctypes, os, shutil, sqlite3, sys, threading, time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, UOp, dtypes, helpers
from tinygrad.codegen import do_to_program
from tinygrad.dtype import AddrSpace, DType
from tinygrad.engine.jit import GraphRunner
from tinygrad.runtime.ops_cpu import CPUDevice, CPUProgram, signal_prog, wait_prog
from tinygrad.uop.ops import KernelInfo, Ops

from .config import EngineConfig, ModelConfig, check, logger
from .kernels import cpu_cores, scatter_kernel
from .llama import Llama
from .sampling import sample
from .sequence import MAX_BANNED, Sequence

Shape = tuple[int, int, bool]   # of a step: its tokens, samples at most, whether all are greedy
Step = tuple[Shape, list[Sequence]]   # which is packed on the device, and the sequences that get a token from it
# What the sampler is told of each of these: temperature, top_p, min_p; seed; top_k; banned ids
FIELDS = np.dtype([("floats", "f4", 3), ("seed", "i8"), ("top_k", "i4"), ("banned", "i4", MAX_BANNED)])
WORDS = 32   # of a call by a core: a function's address and its arguments


def calls_kernel(calls: UOp, n: UOp) -> UOp:
  """Go through a list of calls, each a function's address and its arguments, behind a fence."""
  i = UOp.range(n, 0)
  function, *arguments = [calls.index(i * WORDS + j).load() for j in range(WORDS)]
  function = UOp(Ops.CUSTOMI, dtypes.uint64, (function,), "({{ __sync_synchronize(); {0}; }})")
  return function.call(*arguments, ret_dtype=dtypes.void).end(i).sink(arg=KernelInfo("calls"), tag=1)


def use_all_cores(device: CPUDevice, cores: int) -> None:
  """tinygrad 0.14 runs a captured step on a CPU from Python, 50 us a kernel, and the parts of a threaded kernel one after
  another. Here each core goes through a list of calls of its own, without Python: its part of each kernel, then it says
  so and waits for all others. To be dropped as soon as tinygrad has a graph for CPUs."""
  pool, lock = ThreadPoolExecutor(max(1, cores - 1), "tinyvllm-core"), threading.Lock()
  n = UOp.param(1, dtypes.int32, (), vmin_vmax=(0, 2**31 - 1), name="n", addrspace=AddrSpace.ALU)
  program = do_to_program(calls_kernel(UOp.param(0, dtypes.uint64, (2**26,)), n), device.renderer)
  run_calls = CPUProgram(device, program.to_elf())

  class CPUGraph(GraphRunner):
    @staticmethod
    def supports_uop(batch_devs: list, new_call: UOp) -> bool:
      if not GraphRunner.supports_uop(batch_devs, new_call) or len(new_call.src) >= WORDS: return False
      return all(v.expr == "core_id" for v in new_call.src[0].arg.vars) and Ops.PARAM not in [x.op for x in new_call.src]

    def __init__(self, *args: Any, **kwargs: Any):
      super().__init__(*args, **kwargs)
      self.done, calls = np.zeros(cores, np.uint32), [[] for _ in range(cores)]
      done = [self.done.ctypes.data + 4 * core for core in range(cores)]
      for k, ((_, program, buffers, _), kernel) in enumerate(zip(self.calls, self.runtimes, strict=True), 1):
        parts, addresses = program.arg.launch_dims({})[0][0], [buffers[i]._buf.va_addr for i in program.arg.globals]
        for core, own in enumerate(calls):
          if core < parts: own.append([kernel.addr, *addresses, core])
          own.append([device.prgs[signal_prog].addr, done[core], k])
          own += [[device.prgs[wait_prog].addr, other, k] for other in done[:core] + done[core + 1:]]
      self.lists = [np.array([call + [0] * (WORDS - len(call)) for call in own], np.uint64) for own in calls]

    def __call__(self, *args: Any, **kwargs: Any) -> float:
      def run(calls: np.ndarray) -> None: run_calls.fxn(*map(ctypes.c_uint64, (calls.ctypes.data, len(calls))))
      with lock:
        started, self.done[:] = time.perf_counter(), 0
        others = [pool.submit(run, calls) for calls in self.lists[1:]]
        run(self.lists[0])   # ctypes lets go of the GIL meanwhile
        for other in others: other.result()
        return time.perf_counter() - started
  device.graph = CPUGraph


def open_device() -> None:
  """Open tinygrad's default device, with the clang that pip put beside this Python if none is on the PATH."""
  beside = Path(sys.executable).parent / "clang"
  if "CC" not in os.environ and not shutil.which("clang") and beside.exists(): os.environ["CC"] = str(beside)
  if helpers.CACHELEVEL >= 1:   # tinygrad's cache on disk answers only the thread that opened it; steps come from any
    helpers.db_connection()
    shared = sqlite3.connect(helpers.CACHEDB, timeout=60, isolation_level="IMMEDIATE", check_same_thread=False)
    helpers._db_connection = shared   # type: ignore[assignment]
  try:
    if isinstance(device := Device[Device.DEFAULT], CPUDevice) and not device.graph: use_all_cores(device, cpu_cores())
  except Exception as e:   # a backend fails to open in its own way
    raise RuntimeError(f"tinygrad finds no usable device ({str(e).strip().splitlines()[0]}). For the CPU: pip install "
                       "'tinyvllm[cpu]', which brings a compiler; or name another: DEV=CUDA, METAL, AMD, ...") from e


def free_memory(device: str) -> int:
  """Free bytes of the device; of the host where the device shares its memory or does not tell."""
  if device == "CUDA":
    from tinygrad.runtime.autogen import cuda
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    return free.value
  pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
  return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def allocate_caches(model: ModelConfig, config: EngineConfig, max_model_len: int, dtype: DType) -> list[list[Tensor]]:
  """For each layer K, (num_blocks, n_kv_heads, head_dim, block_size), and V, its last axes the other way round, as the
  kernels read them. num_blocks, of which block 0 takes padding's writes, is the override, or what fits the share of free
  memory, at most what max_num_seqs sequences of max_model_len can use. Raises ValueError where not one such sequence
  fits."""
  KV, D, BS = model.num_key_value_heads, model.head_dim, config.block_size
  size = 2 * model.num_hidden_layers * KV * D * BS * dtype.itemsize
  per_sequence, free = -(-max_model_len // config.block_size), free_memory(Device.DEFAULT)
  fit = int(free * config.gpu_memory_utilization) // size
  check(fit > per_sequence or config.num_gpu_blocks_override, f"max_model_len={max_model_len} needs "
        f"{per_sequence * size / 2**30:.2f} GiB of KV cache, of {free / 2**30:.2f} GiB free: lower it to "
        f"{max(0, fit - 1) * config.block_size} or raise gpu_memory_utilization={config.gpu_memory_utilization}")
  num_blocks = config.num_gpu_blocks_override or min(fit, config.max_num_seqs * per_sequence + 1)
  tokens = (num_blocks - 1) * config.block_size
  logger.info("KV cache: %d blocks of %d tokens = %d tokens, %.2f GiB: %.1f sequences of %d", num_blocks - 1,
              config.block_size, tokens, num_blocks * size / 2**30, tokens / max_model_len, max_model_len)
  shapes = (num_blocks, KV, D, BS), (num_blocks, KV, BS, D)
  return [[Tensor.empty(*shape, dtype=dtype).contiguous().realize() for shape in shapes]
          for _ in range(model.num_hidden_layers)]


def bucket(n: int) -> int: return 1 << (n - 1).bit_length()


def _zeros(*shape: int) -> Tensor: return Tensor.zeros(*shape, dtype=dtypes.int32).contiguous().realize()


class Runner:
  """rope: (max_model_len, 2, head_dim / 2). caches: as allocate_caches makes them."""
  def __init__(self, model: Llama, config: EngineConfig, rope: Tensor, caches: list[list[Tensor]]):
    self.model, self.config, self.rope, self.caches = model, config, rope, caches
    rows, self.max_blocks = config.max_num_seqs + 1, -(-int(rope.shape[0]) // config.block_size)   # the last: padding's
    self.table, self.last_token = _zeros(rows, self.max_blocks), _zeros(rows)
    self.overlaps = not cpu_cores()   # a CPU returns from a launch when all is done
    self.inputs: dict[Shape, Tensor] = {}
    self.graphs: dict[Shape, Callable[[], Tensor]] = {}

  def prepare(self, batch: dict[Sequence, int]) -> Step:
    """Pack the next n tokens of each sequence. A token that the host has not read is the device's last of a row."""
    size, spare, T = self.config.block_size, self.config.max_num_seqs, bucket(sum(batch.values()))
    tokens = [(seq.tokens[i] if i < len(seq.tokens) else -1, i, seq.block_table[i // size] * size + i % size, seq.row)
              for seq, n in batch.items() for i in range(seq.num_computed, seq.num_computed + n)]
    last = dict(zip(batch, np.cumsum([*batch.values()]) - 1, strict=True))   # where in the batch
    sampling = [seq for seq, n in batch.items() if n == seq.remaining()]
    packed = np.zeros((8, T), np.int32)   # id, position, slot, row; where in the table, and block; of a sample: index, row
    packed[3], packed[7] = spare, spare
    packed[:4, :len(tokens)] = np.transpose(tokens)
    packed[4:6] = packed[3] * self.max_blocks + packed[1] // size, packed[2] // size
    packed[6:, :len(sampling)] = [last[seq] for seq in sampling], [seq.row for seq in sampling]
    greedy = all(seq.params.temperature < 1e-5 and not seq.banned() for seq in sampling)
    fields = np.zeros(0 if greedy else min(T, bucket(spare)), FIELDS)
    for i, (seq, p) in enumerate((seq, seq.params) for seq in sampling[:len(fields)]):
      banned = seq.banned() + [-1] * (MAX_BANNED - len(seq.banned()))
      fields[i] = (p.temperature, p.top_p, p.min_p), seq.seed, p.top_k, banned
    array, shape = np.concatenate([packed.ravel(), fields.view(np.int32)]), (T, min(T, bucket(spare)), greedy)
    if shape not in self.inputs: self.inputs[shape] = _zeros(len(array))
    buffer = self.inputs[shape].uop.buffer
    buffer.allocator._copyin(buffer._buf, memoryview(array).cast("B"))   # Tensor(array) would be scheduled: 1 ms a step
    return shape, sampling

  def launch(self, step: Step) -> tuple[list[Sequence], Tensor]:
    """Start a step; returns who gets a token, and the tokens, (S,), which can be read once it is done."""
    (shape, sampling), started = step, time.perf_counter()
    graph = self.graphs.get(shape) or TinyJit(partial(self._compute, *shape))
    graph.cnt += not graph.cnt   # capture at the first call: all that it reads is realized
    # Few cores: a pool of compilers is slow to start. On a CPU the host has nothing to do beside a graph: one is enough.
    with Context(**({"PARALLEL": 0} if (os.cpu_count() or 1) <= 4 else {}), **({} if self.overlaps else {"JIT_BATCH_SIZE": 0})):
      ids = self._compute(*shape) if self.config.enforce_eager else graph()
    if shape not in self.graphs and not self.config.enforce_eager:
      self.graphs[shape], kind = graph, "greedy" if shape[2] else "sampling"
      logger.info("captured the %s step of %d tokens in %.1f s", kind, shape[0], time.perf_counter() - started)
    return sampling, ids

  def _compute(self, T: int, S: int, greedy: bool) -> Tensor:
    packed = self.inputs[T, S, greedy]
    tokens, fields = packed[:8 * T].reshape(8, T), packed[8 * T:]
    ids, samples = tokens[0], tokens[6, :S]
    table = self.table.custom_kernel(tokens[4], tokens[5], fxn=scatter_kernel)[0]
    ids = (ids < 0).where(self.last_token[tokens[3]], ids).contiguous()
    logits = self.model(ids, samples, tokens, table, self.rope, self.caches)   # (S, vocab)
    if greedy: ids = logits.argmax(1).cast(dtypes.int32).contiguous()
    else:
      fields = fields.reshape(S, FIELDS.itemsize // 4).contiguous()
      floats, seeds = fields.bitcast(dtypes.float32), fields[:, 3:5].bitcast(dtypes.uint32)
      kept = (floats[:, 0], fields[:, 5], floats[:, 1], floats[:, 2])   # temperature, top_k, top_p, min_p
      ids = sample(logits, *kept, seeds, tokens[1][samples], fields[:, 6:]).contiguous()
    Tensor.realize(ids, self.last_token.custom_kernel(tokens[7, :S], ids, fxn=scatter_kernel)[0])
    return ids
