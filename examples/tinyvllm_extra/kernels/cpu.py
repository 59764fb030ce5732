"""CPU: captured steps that run on all cores, allocation in huge pages, and exp2 without branches. tinygrad_patches.py
installs them in tinygrad."""
import concurrent.futures, ctypes, dataclasses, functools, mmap, os, pathlib, platform, threading, typing
from collections.abc import Callable

import numpy as np
from tinygrad import Device, UOp, device, helpers
from tinygrad.engine import jit, realize
from tinygrad.runtime.ops_cpu import CPUAllocator, CPUDevice, CPUProgram
from tinygrad.runtime.support.hcq import HCQBuffer
from tinygrad.uop.ops import Ops

# Read from Linux; False on other systems
AVX512 = os.path.exists("/proc/cpuinfo") and "avx512f" in pathlib.Path("/proc/cpuinfo").read_text()
SUMS = 8 if AVX512 else 4   # vectors of 16 sums in a CPU's registers: more would spill, fewer wait for latency
MAX_ARGUMENTS = 24   # passed to every kernel, which ignores the surplus
CHUNK = 2**25    # bytes requested from the system at once
CAPTURES = "tinyvllm-capture"   # name of the thread that captures steps in advance

# 2**x: Cephes' polynomial for x minus the nearest integer, accurate to one unit in the last place. Results below
# 2**-125 are 0. tinygrad's expansion has branches, which compilers do not vectorize
EXP2 = """static inline float tv_exp2(float x) {
  x = x < -126.0f ? -126.0f : x > 128.0f ? 128.0f : x;
  int n = (int)(x + 128.5f) - 128;
  float f = x - (float)n;
  float p = (((((1.535336188319500e-4f * f + 1.339887440266574e-3f) * f + 9.618437357674640e-3f) * f
              + 5.550332471162809e-2f) * f + 2.402264791363012e-1f) * f + 6.931472028550421e-1f) * f + 1.0f;
  return p * __builtin_bit_cast(float, (n + 126) << 23) * 2.0f;
}"""

PAUSE = "__builtin_ia32_pause()" if platform.machine() == "x86_64" else ""   # while a core waits
CALL_ARGUMENTS = ", ".join(f"call[{1 + i}]" for i in range(MAX_ARGUMENTS))
# Runs a step on one core. After its share of a kernel, the core waits for the others: it spins, then sleeps, because
# other threads may need the core
RUN_STEP = f"""typedef unsigned long long u64;
void run_step(u64 (*calls)[{1 + MAX_ARGUMENTS}], _Atomic u64 (*done)[8], u64 count, u64 cores,
              int (*usleep)(unsigned), u64 core) {{
  for (u64 n = 1; n <= count && *done[0] <= count; n++, calls += cores) {{
    u64 *call = calls[core];
    if (*call) ((void (*)({", ".join(["u64"] * MAX_ARGUMENTS)}))*call)({CALL_ARGUMENTS});
    __c11_atomic_store(done[core], n, __ATOMIC_RELEASE);
    for (u64 other = 0, spins = 0; other < cores; other++)
      while (*calls[other] && *done[other] < n && *done[0] <= count)
        if (spins++ < 10000) {PAUSE};
        else usleep(20);
  }}
}}"""


@functools.cache
def step_program() -> tuple[CPUProgram, int | None]:
  """Return the compiled RUN_STEP and the address of usleep, which it takes as an argument."""
  cpu = typing.cast(CPUDevice, Device["CPU"])
  elf = device.TinyELF(cpu.renderer.compiler.compile(RUN_STEP), "run_step", cpu.renderer.target, ())
  return CPUProgram(cpu, elf), ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value


class CPUGraph(jit.GraphRunner):
  """A captured step that every core runs from the first to the last kernel, without Python's lock. The cores
  synchronize after each kernel in about 1 us. tinygrad needs 50 us per kernel, and does not run its threads in
  parallel."""
  pool = concurrent.futures.ThreadPoolExecutor(max(1, helpers.NUM_CPU_THREADS.value - 1), "tinyvllm-core")
  running = threading.Lock()   # one step at a time: two would deadlock waiting for cores

  @staticmethod
  def supports_uop(devices: list[device.Compiled], call: UOp) -> bool:
    """Return whether each run makes the same call: no buffer changes, no variable except the core's number."""
    return (jit.GraphRunner.supports_uop(devices, call) and Ops.PARAM not in [x.op for x in call.src]
            and len(call.src) <= MAX_ARGUMENTS and {x.expr for x in call.src[0].arg.vars} <= {"core_id"})

  @functools.cached_property
  def table(self) -> np.ndarray:
    """Return the calls, (kernels, cores, 1 + MAX_ARGUMENTS): a kernel's address (0: no call) and its arguments."""
    kernels = typing.cast(list[CPUProgram], self.runtimes)
    cores = max(program.arg.global_size[0] for _, program, *_ in self.calls)
    table = np.zeros((len(kernels), cores, 1 + MAX_ARGUMENTS), np.uint64)
    for core_calls, (_, program, buffers, _), kernel in zip(table, self.calls, kernels, strict=True):
      for core in range(program.arg.global_size[0]):
        call = [kernel.addr, *(buffers[i]._buf.va_addr for i in program.arg.globals), core]
        core_calls[core, :len(call)] = call
    return table

  def __call__(self, input_uops: tuple[UOp, ...], var_vals: dict[str, int], wait: bool = False) -> None:
    program, usleep = step_program()
    count, cores, _ = self.table.shape
    done = np.zeros((cores, 8), np.uint64)   # kernels that each core has finished, a cache line per core
    def run(core: int) -> None:   # keeps `done` alive while a core runs
      program(vals=(self.table.ctypes.data, done.ctypes.data, count, cores, usleep, core))
    others: list[concurrent.futures.Future] = []
    with self.running:
      try:
        for core in range(1, cores): others.append(self.pool.submit(run, core))
        run(0)
      finally:
        done[0] = 2**63   # makes waiting cores return after an interrupt
        concurrent.futures.wait(others)


def run_captured(self: jit.CapturedJit, run: Callable, *inputs: object) -> object:
  """Run a captured step, or only build its graphs in the thread CAPTURES, whose steps are padding and would delay those
  of other threads. Replaces CapturedJit.__call__."""
  if threading.current_thread().name != CAPTURES: return run(self, *inputs)
  step_program()   # opens the device, which tinygrad forbids other threads during captures
  for call in self.linear.src:
    if call.src[0].op is Ops.CUSTOM_FUNCTION: realize.get_graph_runtime(call.src[0], ())
  return self.ret


def allocate(self: CPUAllocator, plain: Callable, size: int, options: device.BufferSpec) -> HCQBuffer:
  """Allocate a CPU buffer in a chunk of huge pages, next to the previous buffer. Replaces CPUAllocator._alloc. Calls
  hold a lock, see tinygrad_patches.apply."""
  if options.external_ptr is not None: return plain(self, size, options)
  chunk = vars(self).get("chunk")
  if chunk is None or size > len(chunk) - chunk.tell():
    chunk = vars(self)["chunk"] = mmap.mmap(-1, max(size, CHUNK), mmap.MAP_ANON | mmap.MAP_PRIVATE)
    if hasattr(mmap, "MADV_HUGEPAGE"): chunk.madvise(mmap.MADV_HUGEPAGE)   # Linux
  start = chunk.tell()
  chunk.seek(min(len(chunk), start + helpers.round_up(size, 128)))
  buffer = plain(self, size, dataclasses.replace(options, external_ptr=helpers.mv_address(chunk) + start))
  buffer.meta = chunk   # keeps the chunk alive
  return buffer
