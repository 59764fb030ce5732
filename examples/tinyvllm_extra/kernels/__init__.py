"""Kernels and backends that are faster than the core's."""
import contextlib, os

from tinygrad import Device, helpers

from tinyvllm.backend import Backend, renderer
from tinyvllm.config import logger

from tinyvllm_extra.programs import advice, find_compiler

from . import drivers, tinygrad_patches
from .fast_backend import FastBackend


def make_backend() -> Backend:
  """Return the fastest backend for the default device."""
  if Device.DEFAULT != "CUDA": return FastBackend()
  from .cuda import CUDABackend   # slow to import
  return CUDABackend()


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
  dev, cc = repr(helpers.DEV), find_compiler()
  try:
    tinygrad_patches.check_cache()
    os.environ["CC"] = cc or "echo"   # tinygrad needs a command even if it compiles nothing
    reason = prefer_cpu_backend() if cc else ""
    if cc is None: helpers.DEV.value = f"{repr(helpers.DEV) or Device.DEFAULT};CPU:X86"   # GPUs open a CPU, too
    if Device.DEFAULT == "CPU" and (cc is None or helpers.DEV.renderer == "X86"):
      raise RuntimeError("no C compiler found, and tinygrad's own assembler cannot compile all kernels")
    renderer()   # opens the device
    tinygrad_patches.apply(Device.DEFAULT)
    return reason
  except Exception as e:   # devices raise different types
    raise RuntimeError(f"tinygrad finds no usable device ({str(e).strip().splitlines()[0]}): {advice(dev, cc)}") from e
