"""Tensors as kernels read them, and kernels for attention and RoPE compared with numpy. A version is "core" (Backend),
"generic", "C" (CPUs) or "tensor cores". A shape is KV, G, D: K/V heads, query heads per K/V head, and head_dim."""
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from helpers.engines import token_rows
from helpers.reference import E4M3, quantize_kv, rope_frequencies
from tinygrad import Tensor, codegen

from tinyvllm.backend import Backend, cpu_cores, renderer
from tinyvllm_extra.kernels import FastBackend, cuda_source
from tinyvllm_extra.kernels.cuda_source import speaks_c
from tinyvllm_extra.kernels.matmul import FastLinear
from tinyvllm_extra.kernels.attention import add_query_tiles
from tinyvllm_extra.formats.quantization import Quantized

# Attention for any device, and for this one
VERSIONS = ["generic", *["C"] * speaks_c()]

# A CPU with each set of instructions, and its flag in /proc/cpuinfo. ivybridge runs the portable form
CPUS = {"native": "", "icelake-server": "avx512_vnni", "alderlake": "avx_vnni", "haswell": "avx2", "ivybridge": "f16c"}
INFO = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
each_cpu = pytest.mark.parametrize("cpu", [
  name for name, flag in CPUS.items() if not flag or re.search(rf"\b{flag}\b", INFO)])


def use_cpu(monkeypatch: pytest.MonkeyPatch, cpu: str) -> None:
  """Compile kernels for one of CPUS."""
  monkeypatch.setattr(codegen, "to_program_cache", {})
  if cpu != "native": monkeypatch.setattr(renderer().compiler, "args", [f"-march={cpu}"])


def on_device(x: np.ndarray) -> Tensor: return Tensor(np.ascontiguousarray(x)).contiguous().realize()


def close(output: Tensor, expected: np.ndarray, tolerance: float) -> None:
  assert output.shape == expected.shape
  array = output.numpy().astype(np.float32)
  np.testing.assert_allclose(array, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max()))


def store(layer: FastLinear, w: Quantized | np.ndarray, activations: str = "none") -> None:
  """Give a layer a matrix. activations: see FastLinear.store."""
  layer.store([w], lambda arrays, dtype=None: on_device(*arrays), activations)


def random_quantized(rng: np.random.Generator, shape: tuple[int, int], bits: int | str, group: int, size: float = 0.01,
                     has_offset: bool = True) -> tuple[Quantized, np.ndarray]:
  """Return a random matrix, (outputs, inputs), and its values in float32. bits: 8, 4 or "e4m3", which has no offsets.
  group: inputs per scale. size: limit of the scales."""
  if bits == "e4m3":
    code, sign = rng.integers(0, 127, shape, np.uint8), rng.integers(0, 2, shape, np.uint8)
    q, numbers = (code + 128 * sign).view([("e4m3", np.uint8)]), E4M3[code] * (1 - 2.0 * sign)
  else: q = numbers = rng.integers(-128, 128, shape, np.int8) if bits == 8 else rng.integers(0, 16, shape, np.uint8)
  scale, offset = (size * rng.random((2, shape[0], shape[1] // group)) * [[[1]], [[-8]]]).astype(np.float16)
  if not has_offset or bits == "e4m3": offset = None
  values = numbers.astype(np.float32) * scale.astype(np.float32).repeat(group, 1)
  if offset is not None: values += offset.repeat(group, 1)
  return Quantized(q, scale, offset, np.arange(shape[1])), values


def swiglu(x: np.ndarray) -> np.ndarray:
  """Return silu(gate) * up, (rows, size), of x = [gate, up], (rows, 2 * size)."""
  gate, up = np.split(x, 2, 1)
  with np.errstate(over="ignore"): return gate / (1 + np.exp(-gate)) * up


def as_stored(version: str, keys: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
  """Convert K and V, (blocks, block_size, KV, D), to a version's block layout; uint8 to bytes on a CPU, else, and for
  tensor cores, to words of four."""
  if keys.dtype == np.uint8 and (version == "tensor cores" or not cpu_cores()):
    keys, values = [np.ascontiguousarray(x).view(np.uint32) for x in (keys, values)]
  if version == "core": return [keys, values]
  if version != "tensor cores": return [keys.transpose(0, 2, 3, 1), values.transpose(0, 2, 1, 3)]
  width = 32 if keys.dtype == np.float16 else 8
  return [x.reshape(*x.shape[:3], -1, width).transpose(0, 2, 3, 1, 4) for x in (keys, values)]


def reference_attention(q: np.ndarray, cache: np.ndarray, table: np.ndarray, rows: np.ndarray, positions: np.ndarray,
                        first: int, **options: Any) -> np.ndarray:
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


def spread(num_tokens: int, longest: int, count: int) -> list[tuple[int, int]]:
  """Return the first position and the number of tokens of `count` sequences, the first one of length `longest`."""
  shares = [len(x) for x in np.array_split(range(num_tokens), count)]
  lengths = [longest, *np.random.default_rng(5).integers(1, longest + 1, count - 1)]
  return [(max(0, length - n), n) for length, n in zip(lengths, shares, strict=True)]


def check_attention(version: str, sequences: list[tuple[int, int]], shape: tuple[int, int, int], tolerance: float,
                    kind: str = "auto", dtype: str = "float32", block_size: int = 16, num_tokens: int = 0,
                    max_blocks: int = 0, first: int = 0, **options: Any) -> None:
  """Compare a version with numpy. sequences: first position and number of tokens of each. kind: kv_cache_dtype.
  num_tokens: with padding. max_blocks: minimum blocks per table. first: numpy's first position."""
  rng, (KV, G, D), R = np.random.default_rng(5), shape, len(sequences)
  rows = np.repeat(np.arange(R), [n for _, n in sequences])
  positions = np.concatenate([np.arange(start, start + n) for start, n in sequences])
  M, num_padding = max(positions.max() // block_size + 2, max_blocks), max(0, num_tokens - len(rows))
  table = np.concatenate([(rng.permutation(R * M) + 1).reshape(R, M), np.zeros((1, M), int)])   # the last is padding's
  cache = np.full((2, R * M + 1, block_size, KV, D), np.nan, dtype)   # unwritten positions hold NaN or random bytes
  for r, (start, n) in enumerate(sequences):
    at = np.arange(start + n)
    cache[:, table[r, at // block_size], at % block_size] = rng.standard_normal((2, len(at), KV, D))
  unwritten, stored, scales = np.isnan(cache), cache, []
  if kind != "auto":
    (keys, k_bytes, k_scales), (values, v_bytes, v_scales) = [quantize_kv(np.nan_to_num(x), kind) for x in cache]
    stored = np.where(unwritten, rng.integers(0, 256, cache.shape).astype(np.uint8), [k_bytes, v_bytes])
    cache = np.stack([keys, values])
    if k_scales: scales = [np.where(unwritten[..., 0], np.nan, [*k_scales, *v_scales]).transpose(1, 3, 0, 2)]
  q = rng.standard_normal((len(rows), KV, G, D)).astype(dtype)
  blocks, offsets = table[rows, positions // block_size], positions % block_size
  # attend() writes the step's K and V again; cosine 1 and sine 0 do not rotate
  kv = cache[:, blocks, offsets].astype(dtype)   # (2, tokens, KV, D)
  if kind != "auto": cache[:, blocks, offsets] = [quantize_kv(x, kind)[0] for x in kv]
  expected = reference_attention(q, cache, table, rows, positions, first, **options)
  qkv = np.concatenate([x.reshape(len(rows), -1) for x in (q, *kv)], 1)
  tokens = np.concatenate([token_rows(positions, rows, blocks), *[token_rows([0], [R], [0])] * num_padding], 1)
  rope = np.stack([np.ones((M * block_size, D // 2)), np.zeros((M * block_size, D // 2))], 1).astype(np.float32)
  caches = [on_device(x) for x in (*as_stored(version, *stored), *[x.astype(np.float32) for x in scales])]
  if "sinks" in options: options["sinks"] = on_device(options["sinks"])
  qkv, *inputs = [on_device(x) for x in (np.pad(qkv, ((0, num_padding), (0, 0))), rope, tokens, table.astype(np.int32))]
  if version == "tensor cores": inputs[1] = add_query_tiles(*inputs[1:]).realize()
  with patch.object(cuda_source, "speaks_c", lambda: version == "C"):
    output = (Backend() if version == "core" else FastBackend()).attend(qkv, caches, *inputs, KV * G, **options)
  output = output.numpy()[:len(rows)].reshape(q.shape).astype(np.float32)
  np.testing.assert_allclose(output, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


def check_rope(version: str, kernel: Callable, num_tokens: int, shape: tuple[int, int, int], tolerance: float,
               kind: str = "auto", dtype: str = "float32", block_size: int = 16) -> None:
  """Check that a kernel rotates q and k, and writes k and v to an empty cache, as numpy does. kind: kv_cache_dtype."""
  rng, (KV, G, D), num_blocks = np.random.default_rng(0), shape, 10
  slots = rng.permutation(num_blocks * block_size)[:num_tokens]
  positions = slots % block_size + block_size * rng.integers(0, 5, num_tokens)
  qkv = rng.standard_normal((num_tokens, KV * (G + 2), D)).astype(dtype)
  angles = np.arange(5 * block_size)[:, None] * rope_frequencies({"rope_theta": 1e4}, D)
  rope = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
  tokens = token_rows(positions, 0 * positions, slots // block_size)
  empty = np.zeros((2, num_blocks, block_size, KV, D), dtype if kind == "auto" else np.uint8)
  scales = [np.zeros((num_blocks, KV, 2, block_size), np.float32)] if kind == "int8" else []
  arrays = *as_stored(version, *empty), *scales, qkv.reshape(num_tokens, -1), rope, tokens
  q, *outputs = on_device(np.zeros((num_tokens, KV, G, D), dtype)).custom_kernel(*map(on_device, arrays), fxn=kernel)
  (a, b), (cos, sin) = np.split(qkv.astype(np.float32), 2, -1), rope[positions].transpose(1, 0, 2)[:, :, None]
  rotated = np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
  close(q, rotated[:, :KV * G].reshape(q.shape), tolerance)
  cache = np.zeros((2, num_blocks * block_size, KV, D), np.float32)
  cache[:, slots] = rotated[:, KV * G:-KV], qkv[:, -KV:]
  cache = cache.reshape(empty.shape)
  if kind == "auto":
    for output, reference in zip(outputs[:2], as_stored(version, *cache.astype(dtype)), strict=True):
      close(output, reference, tolerance)
    return
  (_, k_bytes, k_scales), (_, v_bytes, v_scales) = [quantize_kv(x, kind) for x in cache]
  for output, reference in zip(outputs[:2], as_stored(version, k_bytes, v_bytes), strict=True):
    written, reference = [np.ascontiguousarray(x).view(np.uint8).astype(int) for x in (output.numpy(), reference)]
    nonzero = written != 0   # about 1 in 256 written bytes is 0 too
    error = np.abs(written - reference)[nonzero]
    assert error.max() <= 1 and (error != 0).mean() < 0.01   # cos is rounded too
    assert nonzero.mean() > 0.9 * num_tokens / (num_blocks * block_size)
  if k_scales:
    written = outputs[2].numpy().transpose(2, 0, 3, 1)   # (2, blocks, block_size, KV)
    written, reference = [x.reshape(2, -1, KV)[:, slots] for x in (written, np.stack([*k_scales, *v_scales]))]
    np.testing.assert_allclose(written, reference, rtol=1e-5)
