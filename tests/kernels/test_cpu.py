"""CPU backend: graphs on all cores, allocation in huge pages, exp2, dtype and compiler selection."""
import functools
import re
import sys
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
from helpers.commands import run_python
from helpers.data import read_data
from helpers.engines import ENGINE, greedy
from helpers.kernels import on_device
from helpers.parameters import slow
from tinygrad import Context, Device, Tensor, TinyJit, dtypes
from tinygrad.engine.realize import get_graph_runtime

from tinyvllm import LLM
from tinyvllm.backend import cpu_cores
from tinyvllm_extra import programs
from tinyvllm_extra.kernels import cpu
from tinyvllm_extra.serving.async_engine import CaptureThread
from tinyvllm_extra.kernels.matmul import FastLinear
from tinyvllm_extra.models.matrices import reorder

pytestmark = pytest.mark.skipif(Device.DEFAULT != "CPU", reason="CPU only")
CASES = read_data("kernel_cases.json")
SIZE, DEPTH = 1024, 8   # two rows of this size are split among cores


def layers(seed: int) -> tuple[list[FastLinear], Callable[[np.ndarray], np.ndarray]]:
  """Return layers that reflect rows and reverse their order, so that each needs all results of the previous one, and
  the same function in numpy, without matrices: on a busy machine numpy takes minutes to multiply them."""
  normals = np.random.default_rng(seed).standard_normal((DEPTH, SIZE)).astype(np.float32)
  normals /= np.sqrt((normals * normals).sum(1, keepdims=True))
  linears = [FastLinear(SIZE, {"w": SIZE}, False, dtypes.float32) for _ in normals]
  for linear, normal in zip(linears, normals, strict=True):
    matrix = (np.eye(SIZE, dtype=np.float32) - 2 * np.outer(normal, normal))[::-1]
    linear.weight = on_device(reorder(matrix, linear.weight.shape))

  def reflect(x: np.ndarray) -> np.ndarray:
    for normal in normals: x = (x - 2 * (x * normal).sum(1, keepdims=True) * normal)[:, ::-1]
    return x
  return linears, reflect


def capture(linears: list[FastLinear], x: Tensor) -> TinyJit:
  jit = TinyJit(lambda: functools.reduce(lambda y, linear: linear(y), linears, x).realize())
  with Context(JIT_BATCH_SIZE=0):
    for _ in range(2): jit()
  return jit


def test_graph_kernels_wait_for_previous_kernel_on_all_cores():
  linears, reflect = layers(0)
  x = Tensor.zeros(2, SIZE).contiguous().realize()
  jit = capture(linears, x)
  calls = jit.captured.linear.src
  assert len(calls) == 1 and calls[0].src[0].arg == "graph", "a step must be one graph"
  graph = get_graph_runtime(calls[0].src[0])
  parts = [sum(row[:, 0] > 0) for row in graph.table]
  assert parts.count(cpu_cores()) == DEPTH, "each core must have a part of each matrix"
  for i in range(100):
    new = np.random.default_rng(i).standard_normal((2, SIZE)).astype(np.float32)
    buffer = x.uop.buffer
    buffer.allocator._copyin(buffer._buf, new.data.cast("B"))
    np.testing.assert_allclose(jit().numpy(), reflect(new), atol=1e-4)


def interrupt_starts() -> None:
  """Interrupt a graph when some of the other cores have started, but not the first one. Print each interrupt."""
  programs.prepare_device()
  jit = capture(layers(0)[0], Tensor.ones(2, SIZE).contiguous().realize())
  expected, submit = jit().numpy(), cpu.CPUGraph.pool.submit
  for num_started in range(1, cpu_cores()):
    started = []
    def interrupted(*args, started=started, num_started=num_started):
      started.append(submit(*args))
      if len(started) == num_started: raise KeyboardInterrupt
      return started[-1]
    cpu.CPUGraph.pool.submit = interrupted
    try: jit()
    except KeyboardInterrupt: print("interrupted")
    cpu.CPUGraph.pool.submit = submit
    for _ in range(3): np.testing.assert_array_equal(jit().numpy(), expected)


@pytest.mark.parametrize("cores", [2, *slow(4)])
def test_interrupt_while_cores_start_does_not_deadlock(cores):
  code = f"import sys\nsys.path = {sys.path}\nimport test_cpu\ntest_cpu.interrupt_starts()"
  run = run_python(code, NUM_CPU_THREADS=str(cores))
  assert (run.returncode, run.stdout) == (0, "interrupted\n" * (cores - 1)), run.stderr


def test_buffers_share_chunk_that_outlives_freed_buffers():
  first, second = [Tensor(np.full(1000, i, np.float32)).realize() for i in range(2)]
  addresses = [t.uop.buffer._buf.va_addr for t in (first, second)]
  assert 0 < addresses[1] - addresses[0] <= 2**25 and not any(address % 128 for address in addresses)
  large = Tensor(np.arange(2**24, dtype=np.int32)).realize()   # larger than a chunk
  chunk = first.uop.buffer._buf.meta
  del second
  Device["CPU"].allocator.free_cache()
  others = [Tensor(np.full(2**20, 7, np.int32)).realize() for _ in range(12)]
  assert first.numpy().sum() == 0 and len(chunk) >= 2**25 and large.numpy()[-1] == 2**24 - 1
  assert all(other.numpy().min() == 7 for other in others)


def test_graph_with_changing_input_runs_without_cpu_graph():
  double = TinyJit(lambda x: (x * 2 + 1).contiguous().realize())   # each call has a different input buffer
  for i in range(5): assert double(Tensor([i, i + 1]).realize()).tolist() == [2 * i + 1, 2 * i + 3]


@pytest.mark.parametrize("devices", [1, 2])
def test_thread_builds_steps_without_running_them(folder, devices):
  """It opens the device first, which tinygrad forbids the thread that runs steps during a capture."""
  expected, llm = [LLM(folder, **ENGINE, tensor_parallel_size=devices) for _ in range(2)]
  cpu.step_program.cache_clear()
  with (patch.object(cpu.CPUGraph, "__call__") as run_graph,
        patch.object(cpu.CPUProgram, "__call__", autospec=True, side_effect=cpu.CPUProgram.__call__) as run_program):
    CaptureThread(llm.capture([8])).join()
  assert not run_graph.called and cpu.step_program.cache_info().currsize == 1 and len(llm.runner.graphs) == 2
  assert run_program.call_count <= 2, "only the words of each step may be set to zero"
  texts = [x.generate("ab", greedy(12), use_tqdm=False)[0].outputs[0].token_ids for x in (expected, llm)]
  assert texts[0] == texts[1] and len(llm.runner.graphs) == 2


def test_exp2_equals_numpy():
  x = np.concatenate([np.linspace(-125, 128, 100_001), np.linspace(-1, 1, 10_001)]).astype(np.float32)
  np.testing.assert_allclose(Tensor(x[x < 128]).exp2().numpy(), np.exp2(x[x < 128].astype(np.float64)), rtol=2**-23)
  edges = np.array([-np.inf, -1e30, -200, -127, 128, 1e30, np.inf, np.nan, 0, -1, 1], np.float32)
  np.testing.assert_array_equal(Tensor(edges).exp2().numpy(), [0, 0, 0, 0, *[np.inf] * 3, np.nan, 1, 0.5, 2])


IMPORTS = """
import importlib, pkgutil
from tinygrad import codegen
from tinygrad.renderer.cstyle import ClangRenderer
from tinygrad.runtime.ops_cpu import CPUAllocator
def patched():
  return (CPUAllocator._alloc, ClangRenderer.code_for_op, ClangRenderer._render_defines, codegen.do_to_program)
before = patched()
import tinyvllm, tinyvllm_extra.kernels, tinyvllm_extra.programs
for module in pkgutil.iter_modules(tinyvllm_extra.kernels.__path__):
  importlib.import_module("tinyvllm_extra.kernels." + module.name)
print([x is y for x, y in zip(before, patched())])
tinyvllm_extra.programs.prepare_device()
print([x is y for x, y in zip(before, patched())])
"""


def test_imports_change_nothing_in_tinygrad_until_device_opens():
  run = run_python(IMPORTS)
  assert run.stdout.splitlines() == [str([True] * 4), str([False] * 4)], run.stderr


@pytest.mark.parametrize(("requested", "unsupported", "replacement"), CASES["unsupported dtypes"])
def test_unsupported_dtype_is_replaced_with_one_warning(
    folder, caplog, monkeypatch, requested, unsupported, replacement):
  renderer = type(Device["CPU"].renderer)
  supported = renderer.supported_dtypes(Device["CPU"].renderer) - {getattr(dtypes, name) for name in unsupported}
  monkeypatch.setattr(renderer, "supported_dtypes", lambda self: supported)
  llm, expected = LLM(folder, **ENGINE | {"dtype": requested, "enforce_eager": True}), replacement or requested
  assert llm.runner.kv_caches[0][0].dtype == llm.runner.model.lm_head.weight.dtype == getattr(dtypes, expected)
  warnings = [record.getMessage() for record in caplog.records
              if record.levelname == "WARNING" and requested in record.getMessage()]
  assert len(warnings) == bool(replacement) and all(re.search(rf"\b{replacement}\b", text) for text in warnings)


@pytest.mark.parametrize(("cc", "path", "compiler"), CASES["compilers"])
def test_find_compiler_prefers_cc_except_gcc_then_clang(monkeypatch, tmp_path, cc, path, compiler):
  """prepare_device sets CC to echo if there is no compiler."""
  for name in ("path", "environment"):
    (tmp_path / name).mkdir()
    if path != "nowhere": (tmp_path / name / "clang").touch(0o755)
  monkeypatch.setattr("sys.executable", str(tmp_path / "environment" / "python"))
  monkeypatch.setenv("PATH", str(tmp_path / (path or "nowhere")))
  monkeypatch.setenv("CC", cc or "")
  if cc is None: monkeypatch.delenv("CC")
  assert programs.find_compiler() == (compiler and str(tmp_path / compiler))
