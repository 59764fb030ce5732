"""Backends that are faster than the core's: attention and matrix kernels with a fixed schedule for CPUs, GPUs and
NVIDIA tensor cores; layers traced once; lowered kernels cached on disk."""
import contextlib, logging, os, time
from typing import Any

from tinygrad import Device, dtypes, helpers

from tinyvllm import backend
from tinyvllm.backend import cpu_cores, renderer
from tinyvllm.config import ModelConfig, check, extension, logger
from tinyvllm.runner import GraphKey, Runner

from . import drivers, experts, layers, matmul, sampling, tensor_cores, tinygrad_patches
from .cpu import find_compiler
from .tinygrad_patches import num_compiled


RESERVE = 2**29   # bytes of the host's memory that weights and KV cache do not use


class FastBackend(backend.Backend):
  """The backend for all devices except CUDA."""
  Linear = matmul.Linear
  GateUp = matmul.GateUp
  Norm = matmul.Norm
  Experts = experts.Experts
  sampler = sampling.Sampler()
  kv_layout = staticmethod(tensor_cores.kv_layout)
  attend = staticmethod(tensor_cores.attend)
  run_layers = staticmethod(layers.run_layers)

  def __init__(self) -> None: self.graph_state = extension("graphs").GraphState()

  def pick_dtype(self, name: str, model: ModelConfig | None = None) -> str:
    """Like the core's. A model that overflows float16 gets bfloat16 or, if the device lacks it, float32."""
    if getattr(model, "overflows_float16", False):
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
    return extension("graphs").choose_graph(runner, key)

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


def make_backend() -> backend.Backend:
  """Return the fastest backend for the default device."""
  return extension("kernels.cuda").CUDABackend() if Device.DEFAULT == "CUDA" else FastBackend()


def prefer_cpu_backend() -> str:
  """Make the CPU backend the default if tinygrad chooses OpenCL, and the OpenCL device is a CPU: the CPU backend's
  kernels are faster there. Return the reason, or "" if the default stays, as it does if the user has set DEV."""
  if repr(helpers.DEV) or Device.DEFAULT != "CL" or not drivers.is_opencl_cpu(Device.default): return ""
  name = Device.default.device_name   # type: ignore[attr-defined]
  reason = f"faster than OpenCL on a CPU; DEV=CL selects OpenCL on {name}"
  with contextlib.suppress(Exception):   # the CPU backend does not open; devices raise different types
    Device["CPU"].synchronize()
    helpers.DEV.value = os.environ["DEV"] = "CPU"   # the variable is for processes that this one starts
    logger.info(f"using the CPU backend: {reason}")
    return reason
  return ""


def prepare_device() -> str:
  """Find a C compiler, open the default device and patch tinygrad for it. Return why the default device is not the one
  that tinygrad chooses, or "". Raises RuntimeError with what to install if no device opens."""
  try:
    tinygrad_patches.check_cache()
    path = find_compiler()
    compiler = os.environ["CC"] = path or "echo"   # tinygrad needs a command even if it compiles nothing
    reason = prefer_cpu_backend() if path else ""
    if path is None: helpers.DEV.value = f"{repr(helpers.DEV) or Device.DEFAULT};CPU:X86"   # GPUs open a CPU, too
    if Device.DEFAULT == "CPU" and (path is None or helpers.DEV.renderer == "X86"):
      raise RuntimeError("no C compiler found, and tinygrad's own assembler cannot compile all kernels")
    renderer()   # opens the device
    tinygrad_patches.apply(compiler)
    return reason
  except Exception as e:   # devices raise different types
    raise RuntimeError(f"tinygrad finds no usable device ({str(e).strip().splitlines()[0]}). For the CPU: pip install "
                       "'tinyvllm[cpu]', which contains a compiler; or choose one: DEV=CUDA, METAL, AMD, ...") from e
