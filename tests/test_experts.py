"""Mixtures of experts: the kernel for selected experts compared with numpy, and models with Hugging Face's results."""
import numpy as np
import pytest
from reference import slow
from tinygrad import Device, Tensor, TinyJit, dtypes

from tinyvllm_extra.kernels.experts import Experts
from tinyvllm_extra.kernels.matmul import pack_numbers, prepare_scales, reorder, scales_shape
from tinyvllm_extra.quantization import E2M1, Quantized, dequantize, quantize

SLOW = Device.DEFAULT == "PYTHON"
KINDS = {"float32": 2e-5, "float16": 2e-3, "int8": 2e-3, "int4": 2e-3, "mxfp4": 2e-3}   # tolerance for rounding


def on_device(x: np.ndarray) -> Tensor: return Tensor(np.ascontiguousarray(x)).contiguous().realize()


def make_experts(count: int, inputs: int, outputs: int, kind: str, bias: bool = False) -> tuple[Experts, np.ndarray]:
  """Return random Experts and their matrices, (experts, out, in)."""
  rng = np.random.default_rng(1)
  dtype = dtypes.float32 if kind == "float32" else dtypes.float16
  layer = Experts(count, inputs, {f"{i}": outputs for i in range(count)}, bias, dtype)
  weight = rng.standard_normal((count * outputs, inputs)).astype(np.float32)
  shape = layer.weight.shape
  if kind.startswith("float"):
    weight = weight.astype(kind)
    layer.weight = on_device(reorder(weight, shape))
  else:
    if kind == "mxfp4":
      codes = rng.integers(0, 16, weight.shape).astype(np.uint8)
      scale = 2.0 ** rng.integers(-6, -1, (len(codes), inputs // 32)).astype(np.float32)
      matrix = Quantized(codes.view(E2M1), scale, None, np.arange(inputs))
    else: matrix = quantize(weight, int(kind[3:]))
    layer.weight = on_device(pack_numbers(matrix.q, shape))
    layer.scales = [on_device(reorder(x, scales_shape(shape, x.shape[1])))
                    for x in (prepare_scales(matrix, dtype), matrix.offset) if x is not None]
    weight = dequantize(matrix, np.float32)
  if bias: layer.bias = on_device(rng.standard_normal(count * outputs).astype(np.float32))
  return layer, weight.reshape(count, outputs, inputs).astype(np.float32)


def choose(tokens: int, k: int, count: int, case: str) -> np.ndarray:
  """Return distinct experts of each token, (tokens, k)."""
  rng = np.random.default_rng(tokens)
  if case == "one": return np.tile(rng.permutation(count)[:k], (tokens, 1)).astype(np.int32)
  allowed = rng.permutation(count)[:max(k, count // 2)] if case == "half" else np.arange(count)
  return np.array([rng.permutation(allowed)[:k] for _ in range(tokens)], np.int32)


def check_experts(layer: Experts, weight: np.ndarray, ids: np.ndarray, tolerance: float) -> None:
  dtype = layer.weight.dtype.name if False else None
  x = np.random.default_rng(5).standard_normal((len(ids), weight.shape[2]))
  x = x.astype(np.float32 if layer.x_kind == "float32" else np.float16)
  expected = np.einsum("ti,tkoi->tko", x.astype(np.float32), weight[ids]).reshape(ids.size, -1)
  if layer.bias is not None: expected += layer.bias.numpy().reshape(len(weight), -1)[ids.flatten()]
  plan = layer.plan(on_device(ids))
  result = layer.route(on_device(x), plan, ids.size).numpy().astype(np.float32)
  np.testing.assert_allclose(result, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max()))
