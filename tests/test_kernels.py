"""The matmul against numpy in the shapes and types that models have, on whatever device tinygrad finds."""
import threading

import numpy as np
import pytest
from tinygrad import Device, Tensor, dtypes

from tinyvllm.engine import open_device
from tinyvllm.llama import Linear


def normal(*shape: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def linear(inputs: int, outputs: int, kind: str) -> tuple[Linear, np.ndarray]:
  layer, weight = Linear(inputs, outputs), normal(outputs, inputs, seed=1).astype(kind)
  tile = layer.weight.shape[2]
  layer.weight = Tensor(np.ascontiguousarray(weight.reshape(-1, tile, inputs).swapaxes(1, 2))).contiguous().realize()
  return layer, weight.astype(np.float32)


@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 2e-5), ("float16", 2e-3)])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (576, 960), (1536, 64), (40, 24), (32, 16), (32, 17)])
def test_linear_equals_numpy_for_every_bucket(inputs, outputs, kind, tolerance):
  layer, weight = linear(inputs, outputs, kind)
  for rows in (1, 2, 3, 4, 8, 16, 128):
    x = normal(rows, inputs).astype(kind)
    expected = x.astype(np.float32) @ weight.T
    got = layer(Tensor(x).realize(), dtypes.float32).numpy()
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


@pytest.mark.skipif(Device.DEFAULT != "CPU", reason="of CPUs only")
def test_the_parts_of_a_large_kernel_run_at_once_on_all_cores_and_are_right():
  open_device()
  cores = Device["CPU"].renderer.global_max[0]
  layer, weight = linear(512, 16 * cores * 60, "float32")
  x = normal(64, 512)
  for _ in range(3): np.testing.assert_allclose(layer(Tensor(x).realize()).numpy(), x @ weight.T, rtol=1e-4, atol=1e-3)
  helpers = [t for t in threading.enumerate() if t.name.startswith("tinyvllm-kernel")]
  assert bool(helpers) == (cores > 1), "no thread was asked for help"


def test_opening_the_device_again_changes_nothing():
  from tinygrad.runtime.ops_cpu import CPUProgram
  open_device()
  before = CPUProgram.__call__
  open_device()
  assert CPUProgram.__call__ is before
