"""Tensors as kernels read them."""
from collections.abc import Callable
from typing import Any

import numpy as np
from helpers.reference import quantize_kv
from tinygrad import Tensor

from tinyvllm.backend import cpu_cores


def on_device(x: np.ndarray) -> Tensor: return Tensor(np.ascontiguousarray(x)).contiguous().realize()


def as_stored(cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Convert K and V, (2, blocks, block_size, KV, D), to the kernels' block layout."""
  return cache[0].transpose(0, 2, 3, 1), cache[1].transpose(0, 2, 1, 3)


def bytes_as_stored(keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Convert uint8 K and V, (blocks, block_size, KV, D), to the block layout: bytes on a CPU, else words of four."""
  if cpu_cores(): return keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)
  keys, values = (np.ascontiguousarray(x).view(np.uint32) for x in (keys, values))
  return keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)


def reference_attention(q: np.ndarray, cache: np.ndarray, table: np.ndarray, rows: np.ndarray, positions: np.ndarray,
                        first: int = 0, **options: Any) -> np.ndarray:
  """Return attention in float32, (T, KV, G, D), for queries of that shape. cache: K and V, (2, blocks, block_size, KV,
  D). first: positions before it are not visible. options: scale, window, cap, sinks."""
  expected, (KV, G, D) = np.zeros(q.shape, np.float32), q.shape[1:]
  for t, (r, p) in enumerate(zip(rows, positions, strict=True)):
    begin = max(first, p + 1 - (options.get("window") or p + 1))
    k, v = cache[:, table[r]].reshape(2, -1, KV, D)[:, begin:p + 1].astype(np.float32)
    scores = np.einsum("hgd,nhd->hgn", q[t].astype(np.float32), k) * options.get("scale", D**-0.5)
    if "cap" in options: scores = options["cap"] * np.tanh(scores / options["cap"])
    sinks = options.get("sinks", np.full(KV * G, -np.inf)).reshape(KV, G, 1)
    highest = np.maximum(scores.max(-1, keepdims=True), sinks)
    weights = np.exp(scores - highest)
    expected[t] = np.einsum("hgn,nhd->hgd", weights / (weights.sum(-1, keepdims=True) + np.exp(sinks - highest)), v)
  return expected


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
  a, b = np.split(x.astype(np.float32), 2, -1)
  return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def check_quantized_cache(outputs: list[Tensor], cache: np.ndarray, slots: np.ndarray, kind: str,
                          as_stored: Callable) -> None:
  """Check the bytes and scales that a kernel wrote into an empty cache. cache: the exact K and V, (2, blocks,
  block_size, KV, D). slots: the positions written. as_stored: converts bytes to the block layout."""
  (_, k_bytes, k_scales), (_, v_bytes, v_scales) = [quantize_kv(x, kind) for x in cache]
  blocks, block_size, KV = cache.shape[1:4]
  for output, reference in zip(outputs[:2], as_stored(k_bytes, v_bytes), strict=True):
    output, reference = [np.ascontiguousarray(x).view(np.uint8).astype(int) for x in (output.numpy(), reference)]
    nonzero = output != 0   # about 1 in 256 written bytes is 0 too
    error = np.abs(output - reference)[nonzero]
    assert error.max() <= 1 and (error != 0).mean() < 0.01   # cos is rounded too
    assert nonzero.mean() > 0.9 * len(slots) / (blocks * block_size)
  if k_scales:
    scales = outputs[2].numpy().transpose(2, 0, 3, 1), np.stack([*k_scales, *v_scales])   # (2, blocks, BS, KV) each
    scales, expected_scales = [x.reshape(2, -1, KV)[:, slots] for x in scales]
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-5)
