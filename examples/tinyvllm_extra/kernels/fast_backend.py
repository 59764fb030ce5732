"""The backend that is faster than the core's: attention and matrix kernels with a fixed schedule for CPUs, GPUs and
NVIDIA tensor cores; layers traced once; lowered kernels cached on disk."""
import logging, time
from typing import Any

from tinygrad import Device, dtypes

from tinyvllm.backend import cpu_cores, renderer
from tinyvllm.config import ModelConfig, check, logger
from tinyvllm.runner import GraphKey, Runner
from tinyvllm_extra.models.experts import MixtureBackend
from tinyvllm_extra.models.layers import VariantConfig

from . import drivers, expert_kernels, fast_sampler, graph_choice, layer_calls, matmul, tensor_cores
from .tinygrad_patches import num_compiled

RESERVE = 2**29   # bytes of the host's memory that weights and KV cache do not use


class FastBackend(MixtureBackend):
  """The backend for all devices except CUDA."""
  Linear = matmul.Linear
  GateUp = matmul.GateUp
  Norm = matmul.Norm
  Experts = expert_kernels.Experts
  sampler = fast_sampler.Sampler()
  kv_layout = staticmethod(tensor_cores.kv_layout)
  attend = staticmethod(tensor_cores.attend)
  run_layers = staticmethod(layer_calls.run_layers)

  def __init__(self) -> None: self.graph_state = graph_choice.GraphState()

  def pick_dtype(self, name: str, model: ModelConfig | None = None) -> str:
    """Like the core's. A model that overflows float16 gets bfloat16 or, if the device lacks it, float32."""
    if isinstance(model, VariantConfig) and model.overflows_float16:
      is_wide = name not in ("float16", "half")
      check(is_wide, f"dtype={name!r} overflows in this model: use 'auto', 'bfloat16' or 'float32'", name)
      has_bfloat16 = dtypes.bfloat16 in renderer().supported_dtypes()
      if name == "auto" and Device.DEFAULT != "CPU": name = "bfloat16"
      if name == "bfloat16" and not has_bfloat16: name = "float32"
    return super().pick_dtype(name, model)

  def free_memory(self, device: str) -> int:
    """Return the device's free memory in bytes. Of a CPU's, RESERVE is left to Python, capture and a step's buffers."""
    free = drivers.device_memory(device).free
    return max(0, free - RESERVE) if device.startswith("CPU") else free

  def knows_memory(self, device: str) -> bool: return drivers.device_memory(device).is_known

  def largest_tensor(self) -> int:
    limit = drivers.device_memory(Device.DEFAULT).largest if Device.DEFAULT in drivers.READERS else 0
    return limit or super().largest_tensor()

  def max_blocks(self, num_bytes: int, block_bytes: int, min_blocks: int) -> int:
    """Round down, because the kernel cache depends on this number. On a CPU, use at most 4 GiB."""
    count = num_bytes // block_bytes
    count -= count % (1 << max(0, count.bit_length() - 6))
    return min(count, max(2**32 // block_bytes, min_blocks)) if cpu_cores() else count

  def choose_graph(self, runner: Runner, key: GraphKey) -> GraphKey:
    return graph_choice.choose_graph(runner, key)

  def run_graph(self, runner: Runner, graph: Any, key: GraphKey) -> Any:
    """Run a step, and log its capture (with level DEBUG during startup)."""
    is_new = graph.cnt == 1
    start_time = time.perf_counter()
    num_kernels = num_compiled()
    results = graph()
    if is_new and graph.cnt > 1:   # not captured if eager
      Device.default.synchronize()
      level = logging.DEBUG if self.graph_state.capture_sizes else logging.INFO
      logger.log(level, f"captured a step of {key.num_tokens} tokens in {time.perf_counter() - start_time:.1f} s, "
                 f"{num_compiled() - num_kernels} new kernels")
    return results
