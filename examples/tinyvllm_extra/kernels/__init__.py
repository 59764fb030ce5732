"""Backends that are faster than the core's: attention and matrices as kernels that state their schedule, for CPUs, for
any GPU and for NVIDIA's tensor cores; layers traced once; lowered kernels kept on disk."""
import logging, os, time
from collections.abc import Callable
from typing import Any

from tinygrad import Device, Tensor, helpers
from tinygrad.dtype import DType

from tinyvllm import backend
from tinyvllm.backend import cpu_cores, renderer
from tinyvllm.config import EngineConfig, ModelConfig, extension, logger
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

  def __init__(self) -> None:
    self.graph_state = extension("graphs").GraphState()

  def kv_layout(self, model: ModelConfig, config: EngineConfig, dtype: DType) -> list[tuple[tuple[int, ...], DType]]:
    return tensor_cores.block_parts(model, config, dtype)

  def attend(self, qkv: Tensor, cache: list[Tensor], rope: Tensor, tokens: Tensor, block_tables: Tensor,
             num_heads: int) -> Tensor:
    return tensor_cores.attend(qkv, cache, rope, tokens, block_tables, num_heads)

  def run_layers(self, layers_: list, x: Tensor, delta: Tensor, caches: list[list[Tensor]], *inputs: Any) -> tuple:
    return layers.run_layers(layers_, x, delta, caches, *inputs)

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


class CUDABackend(FastBackend):
  """For NVIDIA GPUs."""
  reads_early = True

  def free_memory(self, device: str) -> int:
    from .cuda import free_memory
    return free_memory(Device[device])   # type: ignore[arg-type]   # a CUDADevice

  def start_reading(self, tensor: Tensor) -> Callable[[], Any]:
    from .cuda import start_reading
    return start_reading(tensor)


def make_backend() -> backend.Backend:
  """The best backend for the default device."""
  return CUDABackend() if Device.DEFAULT == "CUDA" else FastBackend()


def prepare_device() -> None:
  """Find a C compiler, open the default device and patch tinygrad for it. Raises RuntimeError that says what to install
  if none opens."""
  try: _prepare_device()
  except Exception as e:   # each device fails in its own way
    raise RuntimeError(f"tinygrad finds no usable device ({str(e).strip().splitlines()[0]}). For the CPU: pip install "
                       "'tinyvllm[cpu]', which contains a compiler; or choose one: DEV=CUDA, METAL, AMD, ...") from e


def _prepare_device() -> None:
  found = find_compiler()
  compiler = os.environ["CC"] = found or "echo"   # tinygrad needs a command, even if nothing it compiles is called
  if found is None: helpers.DEV.value = f"{repr(helpers.DEV) or Device.DEFAULT};CPU:X86"   # GPUs open a CPU, too
  if Device.DEFAULT == "CPU" and (found is None or helpers.DEV.renderer == "X86"):
    raise RuntimeError("no C compiler found, and tinygrad's own assembler cannot compile all kernels")
  renderer()   # opens the device
  tinygrad_patches.apply(compiler)
