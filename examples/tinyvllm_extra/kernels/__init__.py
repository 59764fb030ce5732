"""Backends that are faster than the core's: attention and matrices as kernels that state their schedule, for CPUs, for
any GPU and for NVIDIA's tensor cores; layers traced once; lowered kernels kept on disk."""
import logging, os, time
from typing import Any

from tinygrad import Device, helpers

from tinyvllm import backend
from tinyvllm.backend import cpu_cores, renderer
from tinyvllm.config import extension, logger
from tinyvllm.runner import GraphKey, Runner

from . import layers, matmul, sampling, tensor_cores, tinygrad_patches
from .cpu import find_compiler
from .tinygrad_patches import num_compiled


class FastBackend(backend.Backend):
  """For every device."""
  Linear = matmul.Linear
  GateUp = matmul.GateUp
  Norm = matmul.Norm
  sampler = sampling.Sampler()
  kv_layout = staticmethod(tensor_cores.block_parts)
  attend = staticmethod(tensor_cores.attend)
  run_layers = staticmethod(layers.run_layers)

  def __init__(self) -> None: self.graph_state = extension("graphs").GraphState()

  def max_blocks(self, num_bytes: int, block_bytes: int, min_blocks: int) -> int:
    """One of few numbers, as kernels are cached by it; on a CPU at most 4 GiB of the user's memory."""
    fit = num_bytes // block_bytes
    fit -= fit % (1 << max(0, fit.bit_length() - 6))
    return min(fit, max(2**32 // block_bytes, min_blocks)) if cpu_cores() else fit

  def choose_graph(self, runner: Runner, key: GraphKey) -> GraphKey:
    return extension("graphs").choose_graph(runner, key)

  def run_graph(self, runner: Runner, graph: Any, key: GraphKey) -> Any:
    """Log captures: those of a startup only for debugging."""
    is_new = graph.cnt == 1
    started = time.perf_counter()
    num_kernels = num_compiled()
    results = graph()
    if is_new and graph.cnt > 1:   # an eager step is never captured
      Device.default.synchronize()
      level = logging.DEBUG if self.graph_state.capture_sizes else logging.INFO
      logger.log(level, f"captured a step of {key.num_tokens} tokens in {time.perf_counter() - started:.1f} s, "
                 f"{num_compiled() - num_kernels} new kernels")
    return results


def make_backend() -> backend.Backend:
  """The best backend for the default device."""
  return extension("kernels.cuda").CUDABackend() if Device.DEFAULT == "CUDA" else FastBackend()


def prepare_device() -> None:
  """Find a C compiler, open the default device and patch tinygrad for it. Raises RuntimeError that says what to install
  if none opens."""
  try:
    path = find_compiler()
    compiler = os.environ["CC"] = path or "echo"   # tinygrad needs a command, even if nothing it compiles is called
    if path is None: helpers.DEV.value = f"{repr(helpers.DEV) or Device.DEFAULT};CPU:X86"   # GPUs open a CPU, too
    if Device.DEFAULT == "CPU" and (path is None or helpers.DEV.renderer == "X86"):
      raise RuntimeError("no C compiler found, and tinygrad's own assembler cannot compile all kernels")
    renderer()   # opens the device
    tinygrad_patches.apply(compiler)
  except Exception as e:   # each device fails in its own way
    raise RuntimeError(f"tinygrad finds no usable device ({str(e).strip().splitlines()[0]}). For the CPU: pip install "
                       "'tinyvllm[cpu]', which contains a compiler; or choose one: DEV=CUDA, METAL, AMD, ...") from e
