"""On a CPU: a captured step that all cores go through together, huge pages, powers of two without branches, vectors as
wide as can be."""
import concurrent.futures, ctypes, dataclasses, functools, mmap, os, pathlib, shutil, sys, threading
from collections.abc import Callable
from typing import Any

import numpy as np
from tinygrad import Device, UOp, device, helpers
from tinygrad.engine import jit
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.runtime.ops_cpu import CPUAllocator
from tinygrad.uop.ops import Ops

# As Linux says of its CPU
AVX512 = os.path.exists("/proc/cpuinfo") and "avx512f" in pathlib.Path("/proc/cpuinfo").read_text()
WIDE = "-mprefer-vector-width=512"   # else clang takes half of AVX-512's vectors
ARGUMENTS = 24   # of a kernel, at most; those that it does not take are not looked at
CHUNK = 2**25    # bytes of memory taken at once
allocating = threading.Lock()

# 2**x by a polynomial of Cephes' for what is left of x beside the nearest integer: it differs by at most a unit in the
# last place. What is below 2**-125 is 0. tinygrad's own has branches, so compilers leave it as it is, number by number
EXP2 = """static inline float tv_exp2(float x) {
  x = x < -126.0f ? -126.0f : x > 128.0f ? 128.0f : x;
  int n = (int)(x + 128.5f) - 128;
  float f = x - (float)n, p = 1.535336188319500e-4f;
  p = p * f + 1.339887440266574e-3f;
  p = p * f + 9.618437357674640e-3f;
  p = p * f + 5.550332471162809e-2f;
  p = p * f + 2.402264791363012e-1f;
  p = p * f + 6.931472028550421e-1f;
  p = p * f + 1.0f;
  return p * __builtin_bit_cast(float, (n + 126) << 23) * 2.0f;
}"""

GIVEN = ", ".join(f"call[{1 + i}]" for i in range(ARGUMENTS))
# A core's way through a step: its part of each kernel, if it has one, and then it waits for the cores that have one,
# after a while asleep, as they may wait for this one's time
WALK = f"""
typedef unsigned long long u64;
#ifndef __x86_64__
#define __builtin_ia32_pause()
#endif
void walk(u64 (*calls)[{1 + ARGUMENTS}], u64 (*done)[8], u64 count, u64 cores, int (*usleep)(unsigned), u64 core) {{
  for (u64 n = 1; n <= count; n++, calls += cores) {{
    u64 *call = calls[core];
    if (*call) ((void (*)({", ".join(["u64"] * ARGUMENTS)}))*call)({GIVEN});
    __atomic_store_n(done[core], n, __ATOMIC_RELEASE);
    for (u64 other = 0, turns = 0; other < cores; other++)
      while (*calls[other] && __atomic_load_n(done[other], __ATOMIC_ACQUIRE) < n) {{
        if (__atomic_load_n(done[0], __ATOMIC_ACQUIRE) > count) return;
        if (turns++ < 10000) __builtin_ia32_pause();
        else usleep(20);
      }}
    if (__atomic_load_n(done[0], __ATOMIC_ACQUIRE) > count) return;
  }}
}}"""


@functools.cache
def walker() -> Any:
  """The program of WALK, and the last but one of its arguments."""
  cpu: Any = Device["CPU"]
  program = cpu.runtime_t(cpu, device.TinyELF(cpu.compiler.compile(WALK), "walk", cpu.renderer.target, ()))
  program.fxn.argtypes = [ctypes.c_uint64] * 6
  return program, ctypes.cast(ctypes.CDLL(None).usleep, ctypes.c_void_p).value


class CPUGraph(jit.GraphRunner):
  """A captured step. tinygrad runs one at 50 us a kernel, and the parts of a kernel in sequence. Here each core goes
  through the step by itself, without Python's lock, and they meet after each kernel, which takes a microsecond."""
  pool = concurrent.futures.ThreadPoolExecutor(max(1, helpers.NUM_CPU_THREADS.value - 1), "tinyvllm-core")
  alone = threading.Lock()   # the cores of two steps would wait for each other

  @staticmethod
  def supports_uop(devices: Any, call: UOp) -> bool:   # type: ignore[override]
    """Whether a call is always the same: no buffer of it changes, and no variable but the part's number."""
    return (jit.GraphRunner.supports_uop(devices, call) and Ops.PARAM not in [x.op for x in call.src]
            and len(call.src) <= ARGUMENTS and {x.expr for x in call.src[0].arg.vars} <= {"core_id"})

  @functools.cached_property
  def table(self) -> np.ndarray:
    """Of each kernel and core, (kernels, cores, 1 + ARGUMENTS): the address of the kernel, or 0, and its arguments."""
    kernels: list[Any] = self.runtimes
    sizes = [program.arg.global_size[0] for _, program, *_ in self.calls]
    table = np.zeros((len(sizes), max(sizes), 1 + ARGUMENTS), np.uint64)
    for of_cores, size, (_, program, buffers, _), kernel in zip(table, sizes, self.calls, kernels, strict=True):
      for core in range(size):
        call = [kernel.addr, *(buffers[i]._buf.va_addr for i in program.arg.globals), core]
        of_cores[core, :len(call)] = call
    return table

  def __call__(self, *args: Any, **kwargs: Any) -> None:
    program, usleep = walker()
    count, cores, _ = self.table.shape
    done = np.zeros((cores, 8), np.uint64)   # kernels that each core is done with, in a cache line of its own
    walk: Any = functools.partial(program.fxn, self.table.ctypes.data, done.ctypes.data, count, cores, usleep)
    walk.done = done   # which lives as long as a core goes through it
    others: list[concurrent.futures.Future] = []
    with self.alone:
      try:
        for core in range(1, cores): others.append(self.pool.submit(walk, core))
        walk(0)
      finally:
        done[0] = 2**63   # the end for who waits, where an interrupt came before that
        concurrent.futures.wait(others)


def allocate(self: Any, size: int, options: Any, plain: Callable = CPUAllocator._alloc) -> Any:
  """A CPU's buffers side by side in huge pages. tinygrad takes pages of 4 KiB, from which a core reads half as fast."""
  if options.external_ptr is not None: return plain(self, size, options)
  with allocating:
    chunk = vars(self).get("chunk")
    if chunk is None or size > len(chunk) - chunk.tell():
      chunk = self.chunk = mmap.mmap(-1, max(size, CHUNK), mmap.MAP_ANON | mmap.MAP_PRIVATE)
      if hasattr(mmap, "MADV_HUGEPAGE"): chunk.madvise(mmap.MADV_HUGEPAGE)   # Linux has them
    start = chunk.tell()
    chunk.seek(min(len(chunk), start + helpers.round_up(size, 128)))
  buffer = plain(self, size, dataclasses.replace(options, external_ptr=helpers.mv_address(chunk) + start))
  buffer.meta = chunk   # which lives as long as a buffer in it
  return buffer


@functools.cache
def patch_exp2() -> None:
  """Have C call EXP2, in place of what tinygrad makes of a power of two."""
  defines = ClangRenderer._render_defines
  ClangRenderer.code_for_op = {**ClangRenderer.code_for_op, Ops.EXP2: lambda x, dtype: f"tv_exp2({x})"}
  def with_exp2(self: ClangRenderer, uops: Any) -> list[str]: return [EXP2, *defines(self, uops)]
  ClangRenderer._render_defines = with_exp2   # type: ignore[method-assign, assignment]


def cpu_sums() -> int:
  """Of 16 float32, as many as a CPU's registers hold beside what is added to them: more spill, fewer wait."""
  return 8 if AVX512 else 4


def widen(compiler: Any) -> None:
  """Have C's compiler take the widest vectors there are."""
  if AVX512 and WIDE not in compiler.args: compiler.args.append(WIDE)
  os.environ["DMC"] = "1"   # else tinygrad packs loads into float4, and clang stays in 128-bit vectors
  helpers.getenv.cache_clear()   # type: ignore[attr-defined]


def find_compiler() -> str | None:
  """The C compiler for the CPU device: $CC, except gcc, which tinygrad cannot use, or clang on the PATH or next to this
  Python, where pip installs it; None if there is none."""
  name = os.environ.get("CC") or "echo"   # echo: as prepare_device leaves it without a compiler
  if name != "echo" and "gcc" not in os.path.basename(name): return name
  return shutil.which("clang") or shutil.which("clang", path=os.path.dirname(sys.executable))
