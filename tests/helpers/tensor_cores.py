"""Kernels for tensor cores: on CUDA, or with their sources on the CPU (see cuda_on_cpu)."""
from types import SimpleNamespace

import pytest
from helpers import cuda_on_cpu
from tinygrad import Device, dtypes

from tinyvllm_extra.kernels import attention, cuda_source, fast_backend


TOLERANCE = {"auto": 2e-3, "int8": 4e-3, "fp8": 4e-3}
each_kind = pytest.mark.parametrize("kind", TOLERANCE)


def run_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
  """Run CUDA sources on the CPU unless the device is CUDA."""
  if Device.DEFAULT == "CUDA": return
  monkeypatch.setattr(cuda_source, "run", cuda_on_cpu.run)
  monkeypatch.setattr(cuda_source, "speaks_cuda", lambda: True)
  monkeypatch.setattr(attention, "MIN_WORK_GROUPS", 3)
  monkeypatch.setattr(cuda_source, "has_mma", lambda dtype: dtype != dtypes.float32)
  monkeypatch.setattr(fast_backend, "renderer", lambda: SimpleNamespace(supported_dtypes=lambda: {dtypes.half}))
