"""Turns a scheduled batch into one int32 array and one call of a captured graph: there is one for each bucket (a batch
is padded to a power of two) and kind of sampler. Owns what stays on the device: the block tensors of the KV cache,
allocated once, the block tables and the last tokens. Opens the device."""
import concurrent.futures, ctypes, functools, importlib.metadata, itertools, os, shutil, sqlite3, sys, time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, UOp, codegen, dtypes, helpers
from tinygrad.codegen import do_to_program
from tinygrad.engine.jit import GraphRunner
from tinygrad.uop.ops import Ops

from .config import EngineConfig, ModelConfig, check, logger
from .kernels import adjust_kernel, cpu_cores, largest_tensor, renderer, scatter_kernel
from .sampling import argmax, restrict, sample, top_logprobs
from .scheduler import CHANGE, Sequence


@helpers.diskcache
def tinyvllm_lowered(ast: UOp, renderer: Any, *config: Any) -> UOp: return do_to_program(ast, renderer)
# In tinygrad's cache on disk, under this function's name, by all its arguments. config: what else the result hangs on


def use_all_cores(device: Any, cores: int) -> None:
  """tinygrad 0.14 runs a captured step on a CPU at 50 us a kernel, and a threaded kernel's parts in sequence. Here each
  part is a call prepared beforehand, and parts run side by side, as ctypes lets go of the GIL; to wake a core takes
  100 us, which kernels know. To be dropped as soon as tinygrad has a graph for CPUs."""
  pool = concurrent.futures.ThreadPoolExecutor(max(1, cores - 1), "tinyvllm-core")

  class CPUGraph(GraphRunner):
    supports_uop = staticmethod(lambda devices, call: GraphRunner.supports_uop(devices, call) and Ops.PARAM not in [
      x.op for x in call.src] and {v.expr for v in call.src[0].arg.vars} <= {"core_id"})   # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any):
      super().__init__(*args, **kwargs)
      self.parts: list[list[Callable[[], Any]]] = []   # of each kernel
      for (_, program, buffers, _), kernel in zip(self.calls, cast(Any, self.runtimes), strict=True):
        at, parts = [buffers[i]._buf.va_addr for i in program.arg.globals], program.arg.launch_dims({})[0][0]
        self.parts.append([functools.partial(kernel.fxn, *map(ctypes.c_uint64, (*at, i))) for i in range(parts)])

    def __call__(self, *args: Any, **kwargs: Any) -> None:
      for own, *others in self.parts:
        running, _ = [pool.submit(part) for part in others], own()
        for part in running: part.result()
  device.graph = CPUGraph


def find_compiler() -> str | None:
  """The C compiler for a CPU: $CC, but for gcc, which will not do, or clang on the PATH, or beside this Python, where
  pip puts it; None if there is none."""
  found = os.environ.get("CC"), *[shutil.which("clang", path=p) for p in (None, os.path.dirname(sys.executable))]
  return next((path for path in found if path and path != "echo" and "gcc" not in os.path.basename(path)), None)


def open_device() -> int:
  """Open tinygrad's default device, and return its free bytes. A CPU without a compiler takes tinygrad's assembler for
  x86-64; what its device compiles as it opens is then never called, but there has to be a command."""
  os.environ["CC"] = compiler = find_compiler() or "echo"
  if helpers.CACHELEVEL >= 1:   # tinygrad's cache on disk answers only the thread that opened it; steps come from any
    # It holds what compilers make. Kernels as tinygrad has lowered them, which takes longer, go in too
    config = importlib.metadata.version("tinygrad"), compiler, *[x.value for x in codegen.to_program_config]
    codegen.do_to_program = lambda ast, renderer: tinyvllm_lowered(ast, renderer, *config)
    helpers.db_connection()
    helpers._db_connection = sqlite3.connect(   # type: ignore[assignment]
      helpers.CACHEDB, timeout=60, isolation_level="IMMEDIATE", check_same_thread=False)
  try:
    if compiler == "echo":
      DEV, helpers.CCACHE.value = helpers.DEV, 0   # else what echo makes is kept
      if Device.DEFAULT == "CPU": logger.warning("no C compiler found: tinygrad's own assembler takes its place, which "
                                                 "is slower; to have a compiler: pip install 'tinyvllm[cpu]'")
      DEV.value = "CPU:X86" if Device.DEFAULT == "CPU" else f"{repr(DEV) or Device.DEFAULT};CPU:X86"
    device = Device[Device.DEFAULT]
    if cpu_cores() and not device.graph: use_all_cores(device, cpu_cores())
    return free_memory(Device.DEFAULT)
  except Exception as e:   # a backend fails to open in its own way
    raise RuntimeError(f"tinygrad finds no usable device ({str(e).strip().splitlines()[0]}). For the CPU: pip install "
                       "'tinyvllm[cpu]', which brings a compiler; or name another: DEV=CUDA, METAL, AMD, ...") from e


def pick_dtype(asked: str) -> str:
  """The name of the dtype asked for, or where the device lacks it, of one that it has; a line of the log says so."""
  if asked == "auto": asked = "float32" if Device.DEFAULT == "CPU" else "float16"
  taken = next(name for name in (asked, "float16", "float32") if getattr(dtypes, name) in renderer().supported_dtypes())
  if taken != asked: logger.warning("%s has no %s: computing in %s", Device.DEFAULT, asked, taken)
  return taken


def free_memory(device: str) -> int:
  """Free bytes of the device; of the host where the device shares its memory or does not tell."""
  if device == "CUDA":
    from tinygrad.runtime.autogen import cuda
    cuda.cuMemGetInfo_v2(ctypes.byref(free := ctypes.c_size_t()), ctypes.byref(ctypes.c_size_t()))
    return free.value
  pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
  return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def allocate_caches(model: ModelConfig, config: EngineConfig, max_model_len: int, dtype: Any, left: int) -> list:
  """For each layer K, (num_blocks, n_kv_heads, head_dim, block_size), and V, its last axes the other way round, as the
  kernels read them. num_blocks, of which block 0 takes padding's writes, is the override, or what fits `left` bytes, at
  most what max_num_seqs sequences of max_model_len can use. Raises ValueError where not one such sequence fits."""
  KV, D, BS, layers = model.num_key_value_heads, model.head_dim, config.block_size, range(model.num_hidden_layers)
  size, per_sequence = 2 * len(layers) * KV * D * BS * dtype.itemsize, -(-max_model_len // BS)
  left = min(left, most := largest_tensor() * 2 * len(layers))
  fit = (n := left // size) - n % (1 << max(0, n.bit_length() - 6))   # one of few sizes: kernels know and cache it
  check(fit > per_sequence or config.num_gpu_blocks_override, f"max_model_len={max_model_len} needs "
        f"{per_sequence * size / 2**30:.2f} GiB of KV cache, of {left / 2**30:.2f} GiB free: lower it to "
        f"{max(0, fit - 1) * BS} or raise gpu_memory_utilization={config.gpu_memory_utilization}")
  num_blocks = config.num_gpu_blocks_override or min(fit, config.max_num_seqs * per_sequence + 1)
  check(num_blocks * size <= most, f"num_gpu_blocks_override={num_blocks} must be at most {most // size}, which is all "
        f"that {Device.DEFAULT} takes in one tensor")
  logger.log(30 if num_blocks <= per_sequence else 20, "KV cache: %d blocks of %d tokens = %d tokens, %.2f GiB: %.1f "
             "sequences of %d", num_blocks - 1, BS, (num_blocks - 1) * BS, num_blocks * size / 2**30,
             (num_blocks - 1) * BS / max_model_len, max_model_len)
  shapes = (num_blocks, KV, D, BS), (num_blocks, KV, BS, D)
  return [[Tensor.empty(*shape, dtype=dtype).contiguous().realize() for shape in shapes] for _ in layers]


def bucket(n: int) -> int: return 1 << (n - 1).bit_length()


def _upload(tensor: Tensor, array: np.ndarray) -> None:
  """Fill a tensor on the device. Tensor(array) would be scheduled, which takes 1 ms."""
  buffer: Any = tensor.uop.buffer
  buffer.allocator._copyin(buffer._buf, array.data.cast("B"))


def _zeros(*shape: int) -> Tensor: return Tensor.zeros(*shape, dtype=dtypes.int32).contiguous().realize()


class Runner:
  """model: a Llama. rope: (max_model_len, 2, head_dim / 2). caches: as allocate_caches makes them."""
  def __init__(self, model: Callable[..., Tensor], config: EngineConfig, vocab_size: int, rope: Tensor, caches: list):
    self.model, self.config, self.vocab_size, self.rope, self.caches = model, config, vocab_size, rope, caches
    self.num_blocks, self.max_blocks = int(caches[0][0].shape[0]), -(-int(rope.shape[0]) // config.block_size)
    # The last row is padding's; a CPU's launch waits; words: of 32 bits, in a mask of the vocabulary
    rows, self.overlaps, self.words = config.max_num_seqs + 1, not cpu_cores(), -(-vocab_size // 32)
    self.table, self.last_token = _zeros(rows, self.max_blocks), _zeros(rows)
    self.steps: dict[tuple, tuple[Tensor, Any]] = {}   # what each reads, and itself
    self.tables: dict[int | None, list[int]] = {}   # that the device has, by row

  def prepare(self, batch: dict[Sequence, int]) -> tuple:
    """Put the next n tokens of each sequence on the device. One that the host has not read is the device's last of a
    row. Returns the graph's key, who gets a token, and a dict: of which tokens, a sequence and a place in it, log
    probabilities are wanted, and of how many best ones."""
    size, spare, V, T = self.config.block_size, self.config.max_num_seqs, self.vocab_size, bucket(sum(batch.values()))
    tokens = [(seq.tokens[i] if i < len(seq.tokens) else -1, i, seq.block_table[i // size] * size + i % size, seq.row)
              for seq, n in batch.items() for i in range(seq.num_computed, seq.num_computed + n)]
    ends, samples = itertools.accumulate(batch.values()), [seq for seq, n in batch.items() if n == seq.remaining()]
    zero = {seq: end - seq.num_computed - batch[seq] for seq, end in zip(batch, ends, strict=True)}   # token 0's place
    wanted = {(seq, seq.length): k for seq in samples if (k := seq.params.logprobs) is not None}
    wanted |= {(seq, i): k for seq in batch if (k := seq.prompt_logprobs) is not None
               for i in range(seq.num_computed + 1, min(seq.num_computed + batch[seq] + 1, seq.num_prompt))}
    # Rows of logits, by the token that they are of
    rows = {key: row for row, key in enumerate(dict.fromkeys([*((seq, seq.length) for seq in samples), *wanted]))}
    S = min(T, bucket(spare)) if len(rows) == len(samples) else T
    # Of each token: id, position, slot, row; of each block: index in the table, itself; of each row of logits: place,
    # row, temperature, top_p, min_p, seed (2), top_k; of log probabilities: row of logits, token (-1: what is drawn)
    packed = np.zeros((16, T), np.int32)
    packed[[3, 7]] = spare
    packed[:4, :len(tokens)] = np.array(tokens).T
    packed[4:6] = packed[3] * self.max_blocks + packed[1] // size, packed[2] // size
    packed[6, :len(rows)] = [zero[seq] + i - 1 for seq, i in rows]
    fields = [(seq.row, p.temperature, p.top_p, p.min_p, seq.seed % 2**64, p.top_k)
              for seq in samples for p in [seq.params]]
    packed[7:14, :len(samples)] = np.array(fields, "i4,f4,f4,f4,u8,i4").view("i4").reshape(-1, 7).T
    asked = [(rows[seq, i], seq.tokens[i] if i < seq.length else -1) for seq, i in wanted]
    packed[14:, :len(asked)] = np.array(asked).reshape(-1, 2).T
    masks = {row: mask for row, seq in enumerate(samples) if (mask := seq.allowed(self.words)) is not None}
    bits = np.full((S if masks else 0, self.words), -1, np.int32)
    for row, mask in masks.items(): bits[row] = mask
    changes = np.concatenate([np.zeros(0, CHANGE), *(s.changes[:len(s.places)] for s in samples if s.places)])
    changes["at"] += np.repeat(np.arange(len(samples)) * V, [len(seq.places) for seq in samples]).astype(np.int32)
    changes.resize(len(changes) and 8 ** -(-len(changes).bit_length() // 3), refcheck=False)   # few sizes, few graphs
    array = np.concatenate([packed.ravel(), changes.view("i4"), bits.ravel()])
    key = (T, S, max((seq.params.sampler for seq in samples), default=0), bucket(len(wanted)) if wanted else 0,
           bucket(max(wanted.values(), default=1)), len(changes), bool(masks))
    if key not in self.steps:
      compute = functools.partial(self._compute, input := _zeros(len(array)), *key)
      self.steps[key] = input, compute if self.config.enforce_eager else TinyJit(compute)
    _upload(self.steps[key][0], array)
    known, self.tables = self.tables, self.tables | {seq.row: seq.block_table for seq in batch}
    if any(known.get(seq.row) is not seq.block_table and seq.num_computed for seq in batch):
      array = np.zeros(self.table.shape, np.int32)   # it begins with blocks that no token of the batch brings
      for at, table in self.tables.items(): array[at, :len(table)] = table
      _upload(self.table, array)
    return key, samples, wanted

  def launch(self, step: tuple) -> Callable[[], tuple[dict[Sequence, int], list[tuple]]]:
    """Start a step. What it returns waits for its end, and gives the tokens and what is wanted with its logprobs."""
    (key, samples, wanted), started, graph = step, time.perf_counter(), self.steps[step[0]][1]
    if first := getattr(graph, "cnt", 1) == 0: graph.cnt = 1   # capture now: all that it reads is realized
    parallel = {"PARALLEL": 0} if (os.cpu_count() or 1) <= 4 else {}   # a pool of compilers only starts slowly
    with Context(JIT_BATCH_SIZE=0, MAX_KERNEL_BUFFERS=8, **parallel): ids, found = graph()   # 8: WebGPU's
    if first: logger.info("captured a step of %d tokens in %.1f s", key[0], time.perf_counter() - started)
    return lambda: (dict(zip(samples, ids.tolist(), strict=False)),
                    [*zip(wanted.items(), found.tolist() if wanted else [], strict=False)])

  def _compute(self, step: Tensor, T: int, S: int, sampler: int, asked: int, top: int, E: int, masked: bool) -> Any:
    packed, changes, masks = step[:16 * T].reshape(16, T), step[16 * T:16 * T + 4 * E], step[16 * T + 4 * E:]
    ids, samples, rows = packed[0], packed[6, :S], packed[7, :S]
    table = self.table.custom_kernel(packed[4], packed[5], fxn=scatter_kernel)[0]
    ids = (ids < 0).where(self.last_token[packed[3]], ids).contiguous()
    raw = self.model(ids, samples, packed, table, self.rope, self.caches)   # (S, vocab)
    logits = restrict(raw, masks.reshape(S, -1)).contiguous() if masked else raw.clone() if E else raw
    if E: logits = logits.custom_kernel(changes.reshape(E, 4).contiguous(), fxn=adjust_kernel)[0]   # in place
    if sampler:
      f = packed[8:14, :S].contiguous()
      x, seeds = f[:3].bitcast(dtypes.float32), f[3:5].bitcast(dtypes.uint32).T
      ids = sample(logits, x[0], f[5], x[1], x[2], seeds, packed[1][samples], sampler > 1).contiguous()
    else: ids = argmax(logits).contiguous()
    outputs = [ids, self.last_token.custom_kernel(rows, ids, fxn=scatter_kernel)[0]]
    if asked:
      row, token = packed[14, :asked], packed[15, :asked]
      outputs.append(top_logprobs(raw[row], (token < 0).where(ids[row], token), top).contiguous())
    Tensor.realize(*outputs)
    return ids, outputs[-1]
