"""Kernels for tensor cores in tinygrad's interpreter (DEV=PYTHON::sm_89): shared memory replaces warp shuffles."""
import sys
from collections.abc import Iterator

import pytest
from tinygrad import Device, UOp, dtypes
from tinygrad.dtype import AddrSpace
from tinygrad.uop.ops import Ops

from tinyvllm_extra.kernels import tensor_cores

SLOW = Device.DEFAULT == "PYTHON"
on_tensor_cores = pytest.mark.skipif("sm_" not in str(Device.default.renderer.target), reason="needs tensor cores")
# Under Python 3.11 the interpreter has no float16 vectors and rounds small float16 numbers to 0
each_kind = pytest.mark.parametrize("kind", ["auto", *[pytest.param(kind, marks=pytest.mark.skipif(
  SLOW and sys.version_info < (3, 12), reason="small float16 numbers need Python 3.12")) for kind in ("int8", "fp8")]])
TOLERANCE = {"auto": 2e-3, "int8": 4e-3, "fp8": 4e-3}


def shuffle_in_shared_memory(x: UOp, bit: int, slots: Iterator[int]) -> UOp:
  warp, = {u for u in x.toposort() if u.op is Ops.SPECIAL and u.arg == "lidx1"} or [UOp.const(0)]
  count = warp.src[0].arg if warp.op is Ops.SPECIAL else 1
  lane = UOp.special(32, "lidx0")
  shared = UOp.placeholder((count * 32,), x.dtype, next(slots), AddrSpace.LOCAL)
  shared = shared.after(shared[warp * 32 + lane].store(x))
  return shared[warp * 32 + lane + bit - lane // bit % 2 * (2 * bit)].load()


def replace_cuda_statements(monkeypatch: pytest.MonkeyPatch) -> None:
  """Replace the CUDA statements that tinygrad's interpreter lacks: shuffle through shared memory, and never exit."""
  if not SLOW: return
  slots = iter(range(500, 10**6))
  monkeypatch.setattr(tensor_cores, "shuffle_xor", lambda x, bit: shuffle_in_shared_memory(x, bit, slots))
  monkeypatch.setattr(tensor_cores, "MIN_WORK_GROUPS", 3)
  monkeypatch.setattr(tensor_cores, "exit_if", lambda condition: UOp(Ops.BARRIER, dtypes.void))
  monkeypatch.setattr(tensor_cores, "speaks_cuda", lambda: True)
