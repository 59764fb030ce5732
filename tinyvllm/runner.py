"""Turns a scheduled batch into one int32 array and one call of a captured graph: there is one for each bucket (a batch
is padded to a power of two) and kind of sampler. Owns what stays on the device: the block tensors of the KV cache,
allocated once, the block tables and the last tokens. Opens the device."""
import concurrent.futures, ctypes, functools, importlib.metadata, os, shutil, sqlite3, sys, threading, time
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, UOp, codegen, dtypes, helpers
from tinygrad.codegen import do_to_program
from tinygrad.dtype import AddrSpace, DType
from tinygrad.engine.jit import GraphRunner
from tinygrad.runtime.ops_cpu import ClangRenderer, CPUDevice, CPUProgram, libc
from tinygrad.uop.ops import KernelInfo, Ops

from .config import EngineConfig, ModelConfig, check, logger
from .kernels import cpu_cores, scatter_kernel
from .sampling import sample
from .scheduler import MAX_BANNED, Sequence

Shape = tuple[int, int, bool]   # of a step: its tokens, samples at most, whether all are greedy
# What the sampler is told of each of these: temperature, top_p, min_p; seed; top_k; banned ids
FIELDS = np.dtype([("floats", "f4", 3), ("seed", "u8"), ("top_k", "i4"), ("banned", "i4", MAX_BANNED)])
WORDS, SPINS = 32, 2**15   # of a call by a core, a function's address and its arguments; looks at a semaphore at most


@helpers.diskcache
def tinyvllm_lowered(ast: UOp, renderer: Any, *config: Any) -> UOp: return do_to_program(ast, renderer)
# In tinygrad's cache on disk, under this function's name, by all its arguments. config: what else the result hangs on


def wait_kernel() -> UOp:
  """Wait for a semaphore, whose value is its first word in Linux's C libraries: some microseconds awake, as to sleep
  takes longer than most kernels do, then by sem_wait, over again where a signal ends it."""
  semaphore, wait = UOp.param(0, dtypes.uint32, (1,), volatile=True), UOp.param(1, dtypes.uint64, (1,))
  count, loop, again = UOp.placeholder((1,), dtypes.uint32, 100, AddrSpace.REG), UOp.loop(0), UOp.loop(1)
  count = count.after(count[0].store(0), loop)
  looks = count[0].load() + 1 + semaphore.after(loop)[0].load() * SPINS
  spun = count[0].store(looks).end(loop, looks < SPINS)
  failed = wait.after(spun, again)[0].load().call(semaphore.after(spun, again)[0], ret_dtype=dtypes.int32)
  return failed.end(again, failed != 0).sink(arg=KernelInfo("wait"), tag=1)


def calls_kernel(n: UOp) -> UOp:
  """Go through a list of n calls, each a function's address and its arguments."""
  calls, i = UOp.param(0, dtypes.uint64, (2**26,)), UOp.range(n, 0)
  function, *arguments = [calls.index(i * WORDS + j).load() for j in range(WORDS)]
  return function.call(*arguments, ret_dtype=dtypes.void).end(i).sink(arg=KernelInfo("calls"), tag=1)


def use_all_cores(device: CPUDevice, cores: int) -> None:
  """tinygrad 0.14 runs a captured step on a CPU from Python, 50 us a kernel, and the parts of a threaded kernel one
  after another. Here each core goes through a list of calls of its own, without Python: its part of each kernel, then
  it says so to all others and waits for them, asleep if it takes long: another program may have the core that they
  need. To be dropped as soon as tinygrad has a graph for CPUs."""
  lock, pool = threading.Lock(), concurrent.futures.ThreadPoolExecutor(max(1, cores - 1), "tinyvllm-core")
  n = UOp.param(1, dtypes.int32, (), vmin_vmax=(0, 2**31 - 1), name="n", addrspace=AddrSpace.ALU)
  run_calls, wait = (CPUProgram(device, do_to_program(kernel, device.renderer).to_elf())
                     for kernel in (calls_kernel(n), wait_kernel()))
  post, sem_wait = ctypes.cast(libc.dll.sem_post, ctypes.c_void_p).value, device.func_ptr("sem_wait")._buf.va_addr

  class CPUGraph(GraphRunner):
    @staticmethod
    def supports_uop(batch_devs: list, new_call: UOp) -> bool:
      return (GraphRunner.supports_uop(batch_devs, new_call) and Ops.PARAM not in [x.op for x in new_call.src] and
              len(new_call.src) < WORDS and {v.expr for v in new_call.src[0].arg.vars} <= {"core_id"})

    def __init__(self, *args: Any, **kwargs: Any):
      super().__init__(*args, **kwargs)
      self.semaphores, calls = np.zeros((cores, 32), np.uint8), [[] for _ in range(cores)]   # type: ignore
      at = [semaphore.ctypes.data for semaphore in self.semaphores]   # of each core, for all others to post
      for (_, program, buffers, _), kernel in zip(self.calls, self.runtimes, strict=True):
        parts, addresses = program.arg.launch_dims({})[0][0], [buffers[i]._buf.va_addr for i in program.arg.globals]
        for core, own in enumerate(calls):
          if core < parts: own.append([kernel.addr, *addresses, core])   # type: ignore[union-attr]
          own += [[post, at[i]] for i in range(cores) if i != core] + [[wait.addr, at[core], sem_wait]] * (cores - 1)
      self.lists = [np.array([call + [0] * (WORDS - len(call)) for call in own], np.uint64) for own in calls]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
      def run(calls: np.ndarray) -> Any: return run_calls.fxn(*map(ctypes.c_uint64, (calls.ctypes.data, len(calls))))
      with lock:
        others, _ = pool.map(run, self.lists[1:]), run(self.lists[0])   # ctypes lets go of the GIL meanwhile
        list(others)
  device.graph = CPUGraph


def open_device() -> int:
  """Open tinygrad's default device, with the clang that pip put beside this Python if none is on the PATH. Returns its
  free bytes."""
  beside = shutil.which("clang", path=os.path.dirname(sys.executable))
  if "CC" not in os.environ and not shutil.which("clang") and beside: os.environ["CC"] = beside
  if helpers.CACHELEVEL >= 1:   # tinygrad's cache on disk answers only the thread that opened it; steps come from any
    # It holds what compilers make. Kernels as tinygrad has lowered them, which takes longer, go in too
    config = importlib.metadata.version("tinygrad"), *[x.value for x in codegen.to_program_config]
    codegen.do_to_program = lambda ast, renderer: tinyvllm_lowered(ast, renderer, *config)
    helpers.db_connection()
    helpers._db_connection = sqlite3.connect(   # type: ignore[assignment]
      helpers.CACHEDB, timeout=60, isolation_level="IMMEDIATE", check_same_thread=False)
  try:
    device = Device[Device.DEFAULT]
    if isinstance(device, CPUDevice) and isinstance(device.renderer, ClangRenderer) and sys.platform == "linux":
      if not device.graph: use_all_cores(device, cpu_cores())
    return free_memory(Device.DEFAULT)
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
  available = "SC_AVPHYS_PAGES" in os.sysconf_names
  return os.sysconf("SC_AVPHYS_PAGES" if available else "SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def allocate_caches(model: ModelConfig, config: EngineConfig, max_model_len: int, dtype: DType,
                    left: int) -> list[list[Tensor]]:
  """For each layer K, (num_blocks, n_kv_heads, head_dim, block_size), and V, its last axes the other way round, as the
  kernels read them. num_blocks, of which block 0 takes padding's writes, is the override, or what fits `left` bytes, at
  most what max_num_seqs sequences of max_model_len can use. Raises ValueError where not one such sequence fits."""
  KV, D, BS = model.num_key_value_heads, model.head_dim, config.block_size
  size = 2 * model.num_hidden_layers * KV * D * BS * dtype.itemsize
  per_sequence, fit = -(-max_model_len // config.block_size), left // size
  fit -= fit % (1 << max(0, fit.bit_length() - 6))   # one of few sizes: kernels know it, and are found in the cache
  check(fit > per_sequence or config.num_gpu_blocks_override, f"max_model_len={max_model_len} needs "
        f"{per_sequence * size / 2**30:.2f} GiB of KV cache, of {left / 2**30:.2f} GiB free: lower it to "
        f"{max(0, fit - 1) * config.block_size} or raise gpu_memory_utilization={config.gpu_memory_utilization}")
  num_blocks = config.num_gpu_blocks_override or min(fit, config.max_num_seqs * per_sequence + 1)
  logger.info("KV cache: %d blocks of %d tokens = %d tokens, %.2f GiB: %.1f sequences of %d", num_blocks - 1, BS,
              (num_blocks - 1) * BS, num_blocks * size / 2**30, (num_blocks - 1) * BS / max_model_len, max_model_len)
  shapes = (num_blocks, KV, D, BS), (num_blocks, KV, BS, D)
  return [[Tensor.empty(*shape, dtype=dtype).contiguous().realize() for shape in shapes]
          for _ in range(model.num_hidden_layers)]


def bucket(n: int) -> int: return 1 << (n - 1).bit_length()


def _upload(tensor: Tensor, array: np.ndarray) -> None:
  """Fill a tensor on the device. Tensor(array) would be scheduled, which takes 1 ms."""
  buffer: Any = tensor.uop.buffer
  buffer.allocator._copyin(buffer._buf, array.data.cast("B"))


def _zeros(*shape: int) -> Tensor: return Tensor.zeros(*shape, dtype=dtypes.int32).contiguous().realize()


class Runner:
  """model: a Llama. rope: (max_model_len, 2, head_dim / 2). caches: as allocate_caches makes them."""
  def __init__(self, model: Callable[..., Tensor], config: EngineConfig, rope: Tensor, caches: list[list[Tensor]]):
    self.model, self.config, self.rope, self.caches = model, config, rope, caches
    self.num_blocks, self.max_blocks = int(caches[0][0].shape[0]), -(-int(rope.shape[0]) // config.block_size)
    rows, self.overlaps = config.max_num_seqs + 1, not cpu_cores()   # the last row: padding's; a CPU's launch waits
    self.table, self.last_token = _zeros(rows, self.max_blocks), _zeros(rows)
    self.steps: dict[Shape, tuple[Tensor, Any]] = {}   # what each reads, and itself
    self.tables: dict[int | None, list[int]] = {}   # that the device has, by row

  def _parts(self, block: int) -> list[Any]:
    parts: list[Any] = [(x.uop.buffer, x.uop.buffer.size // self.num_blocks) for layer in self.caches for x in layer]
    return [x.view(n, x.dtype, block * n * x.dtype.itemsize).ensure_allocated() for x, n in parts]

  def save(self, block: int) -> list[memoryview]:
    """What is in a block, of all layers."""
    content = [memoryview(bytearray(part.nbytes)) for part in self._parts(block)]
    for part, data in zip(self._parts(block), content, strict=True): part.allocator._copyout(data, part._buf)
    return content

  def load(self, block: int, content: list[memoryview]) -> None:
    for part, data in zip(self._parts(block), content, strict=True): part.allocator._copyin(part._buf, data)

  def prepare(self, batch: dict[Sequence, int]) -> tuple[Shape, list[Sequence]]:
    """Put the next n tokens of each sequence on the device. One that the host has not read is the device's last of a
    row. Returns the step's shape and the sequences that get a token from it."""
    size, spare, T = self.config.block_size, self.config.max_num_seqs, bucket(sum(batch.values()))
    tokens = [(seq.tokens[i] if i < len(seq.tokens) else -1, i, seq.block_table[i // size] * size + i % size, seq.row)
              for seq, n in batch.items() for i in range(seq.num_computed, seq.num_computed + n)]
    ends = zip(batch, np.cumsum([*batch.values()]), strict=True)
    samples = {seq: end - 1 for seq, end in ends if batch[seq] == seq.remaining()}   # and where in the batch
    packed = np.zeros((8, T), np.int32)   # id, position, slot, row; index in the table, block; of a sample: index, row
    packed[3], packed[7] = spare, spare
    packed[:4, :len(tokens)] = np.array(tokens).T
    packed[4:6] = packed[3] * self.max_blocks + packed[1] // size, packed[2] // size
    packed[6:, :len(samples)] = np.array([(at, seq.row) for seq, at in samples.items()]).reshape(-1, 2).T
    greedy = all(seq.params.temperature < 1e-5 and not seq.banned for seq in samples)
    fields = [((p.temperature, p.top_p, p.min_p), seq.seed % 2**64, p.top_k, np.resize(seq.banned or -1, MAX_BANNED))
              for seq in samples if not greedy for p in [seq.params]]
    shape = T, min(T, bucket(spare)), greedy
    array = np.concatenate([packed.ravel(), np.resize(np.array(fields, FIELDS), 0 if greedy else shape[1]).view("i4")])
    if shape not in self.steps:
      compute = functools.partial(self._compute, input := _zeros(len(array)), *shape)
      self.steps[shape] = input, compute if self.config.enforce_eager else TinyJit(compute)
    _upload(self.steps[shape][0], array)
    known, self.tables = self.tables, self.tables | {seq.row: seq.block_table for seq in batch}
    if any(known.get(seq.row) is not seq.block_table and seq.num_computed for seq in batch):
      array = np.zeros(self.table.shape, np.int32)   # it begins with blocks that no token of the batch brings
      for row, table in self.tables.items(): array[row, :len(table)] = table
      _upload(self.table, array)
    return shape, list(samples)

  def launch(self, step: tuple[Shape, list[Sequence]]) -> tuple[list[Sequence], Tensor]:
    """Start a step; returns who gets a token, and the tokens, (S,), which can be read once it is done."""
    (shape, sampling), started, graph = step, time.perf_counter(), self.steps[step[0]][1]
    if first := getattr(graph, "cnt", 1) == 0: graph.cnt = 1   # capture now: all that it reads is realized
    # Few cores: a pool of compilers only starts slowly
    with Context(JIT_BATCH_SIZE=0, **({"PARALLEL": 0} if (os.cpu_count() or 1) <= 4 else {})): ids = graph()
    if first: logger.info("captured the %s step of %d tokens in %.1f s", "greedy" if shape[2] else "sampling", shape[0],
                          time.perf_counter() - started)
    return sampling, ids

  def _compute(self, packed: Tensor, T: int, S: int, greedy: bool) -> Tensor:
    tokens, fields = packed[:8 * T].reshape(8, T), packed[8 * T:]
    ids, samples = tokens[0], tokens[6, :S]
    table = self.table.custom_kernel(tokens[4], tokens[5], fxn=scatter_kernel)[0]
    ids = (ids < 0).where(self.last_token[tokens[3]], ids).contiguous()
    logits = self.model(ids, samples, tokens, table, self.rope, self.caches)   # (S, vocab)
    if greedy: ids = logits.argmax(1).cast(dtypes.int32).contiguous()
    else:
      f = fields.reshape(S, FIELDS.itemsize // 4).contiguous()   # in the order of FIELDS
      x, seeds = f.bitcast(dtypes.float32), f[:, 3:5].bitcast(dtypes.uint32)
      ids = sample(logits, x[:, 0], f[:, 5], x[:, 1], x[:, 2], seeds, tokens[1][samples], f[:, 6:]).contiguous()
    Tensor.realize(ids, self.last_token.custom_kernel(tokens[7, :S], ids, fxn=scatter_kernel)[0])
    return ids
