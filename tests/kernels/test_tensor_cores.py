"""Attention on tensor cores compared with numpy, on CUDA or in tinygrad's interpreter (DEV=PYTHON::sm_89), where shared
memory replaces warp shuffles. Other devices only test which kernels are selected."""
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.engines import token_rows
from helpers.kernels import check_quantized_cache, on_device, reference_attention, rotate
from helpers.reference import quantize_kv, rope_frequencies
from helpers.tensor_cores import SLOW, TOLERANCE, as_stored, each_kind, on_tensor_cores, replace_cuda_statements
from tinygrad import Device, dtypes

from tinyvllm.runner import TILE
from tinyvllm_extra.kernels import tensor_cores
from tinyvllm_extra.kernels.tensor_cores import BS


@pytest.fixture(autouse=True)
def emulate_cuda(monkeypatch): replace_cuda_statements(monkeypatch)


def parts(kv_heads: int, groups: int, head_dim: int, kind: str = "auto", block_size: int = BS,
          dtype=dtypes.float16) -> list:
  model = SimpleNamespace(num_key_value_heads=kv_heads, num_attention_heads=kv_heads * groups, head_dim=head_dim)
  return tensor_cores.kv_layout(model, SimpleNamespace(kv_cache_dtype=kind, block_size=block_size), dtype)


CASES = {  # tokens, K/V heads, query heads per K/V head, head_dim, longest context, sequences, minimum blocks per table
  "decode": (8, 2, 4, 64, 700, 8, 0), "one token": (1, 8, 4, 128, 1000, 1, 0),
  "one query head": (16, 32, 1, 128, 60, 16, 0), "many query heads": (2, 1, 12, 96, 300, 2, 0),
  "draft tokens": (10, 2, 2, 32, 90, 2, 0), "one chunk": (64, 2, 2, 64, 70, 1, 0),
  "split-KV": (2, 4, 4, 128, 900, 2, 65),
  "tiles": (128, 2, 2, 64, 300, 1, 0), "tiles of few tokens": (128, 2, 1, 128, 90, 9, 0),
  "mixed step": (256, 2, 4, 64, 200, 7, 0), "tiles of 16 tokens": (128, 1, 2, 32, 70, 8, 0)}
if SLOW:
  CASES = {"decode": (2, 1, 4, 32, 40, 2, 0), "many query heads": (1, 1, 12, 32, 20, 1, 0),
           "split-KV": (1, 1, 1, 32, 40, 1, 65), "draft tokens": (4, 1, 2, 64, 20, 2, 0),
           "tiles of few tokens": (80, 1, 1, 32, 20, 8, 0), "tiles": (72, 1, 1, 32, 80, 1, 0),
           "tile ends within a warp": (84, 1, 1, 32, 88, 1, 0)}


@on_tensor_cores
@each_kind
@pytest.mark.parametrize("case", CASES)
def test_attention_equals_numpy_and_reads_only_own_sequence(case, kind):
  (T, KV, G, D, longest, R, min_blocks), rng = CASES[case], np.random.default_rng(5)
  M = max(-(-longest // BS), min_blocks)
  lengths = rng.integers(T // R + 2, longest + 1, R)
  lengths[0] = longest
  rows = np.sort(np.resize(np.arange(R), T))
  positions = np.concatenate([np.arange(length - (rows == r).sum(), length) for r, length in enumerate(lengths)])
  if case == "mixed step":   # a long chunk of one sequence, one token each of the others
    rows = np.concatenate([np.zeros(T - R + 1, int), np.arange(1, R)])
    M, lengths[0] = max(M, -(-T // BS)), T - R + 1
    positions = np.concatenate([np.arange(lengths[0]), lengths[1:] - 1])
  table = np.concatenate([(rng.permutation(R * M) + 1).reshape(R, M), np.zeros((1, M), int)])
  unwritten = np.full((R * M + 1, BS), True)
  for r, length in enumerate(lengths):
    for p in range(length): unwritten[table[r, p // BS], p % BS] = False
  keys, values = rng.standard_normal((2, R * M + 1, BS, KV, D)).astype(np.float16)
  scales = []
  if kind == "auto": stored = [np.where(unwritten[..., None, None], np.float16(np.nan), x) for x in (keys, values)]
  else:   # unwritten positions hold random bytes
    both = [quantize_kv(x.astype(np.float32), kind) for x in (keys, values)]
    (keys, k_bytes, k_scales), (values, v_bytes, v_scales) = both
    garbage = rng.integers(0, 256, keys.shape).astype(np.uint8)
    stored = [np.where(unwritten[..., None, None], garbage, x) for x in (k_bytes, v_bytes)]
    if k_scales: scales = [np.where(unwritten[..., None], np.nan, [*k_scales, *v_scales]).transpose(1, 3, 0, 2)]
  stored = [*as_stored(*stored), *[x.astype(np.float32) for x in scales]]
  assert [x.shape[1:] for x in stored] == [shape for shape, _ in parts(KV, G, D, kind)]
  q = rng.standard_normal((T, KV, G, D)).astype(np.float16)
  expected = reference_attention(q, np.stack([keys, values]), table, rows, positions)
  tokens = token_rows(positions, rows, table[rows, positions // BS], BS, M)
  inputs = on_device(q), [on_device(x) for x in stored], on_device(tokens), on_device(table.astype(np.int32))
  output = tensor_cores.read(*inputs).numpy().astype(np.float32)
  np.testing.assert_allclose(output, expected, rtol=TOLERANCE[kind], atol=TOLERANCE[kind] * np.abs(expected).max())


@on_tensor_cores
@each_kind
@pytest.mark.parametrize("T", [1, 8, 32])
def test_rope_kernel_equals_numpy(T, kind):
  KV, G, D, blocks, rng = 2, 3, 64, 6, np.random.default_rng(0)
  if SLOW: KV, G, D = 1, 1, 32
  slots = rng.permutation(blocks * BS)[:T]
  positions = slots % BS + BS * rng.integers(0, 5, T)
  qkv = rng.standard_normal((T, KV * (G + 2), D)).astype(np.float16)
  angles = np.arange(99)[:, None] * rope_frequencies({"rope_theta": 1e4}, D)
  rope = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
  tokens = token_rows(positions, 0 * positions, slots // BS, BS)
  names = {dtypes.float16: np.float16, dtypes.uint32: np.uint32, dtypes.float32: np.float32}
  cache = [on_device(np.zeros((blocks, *shape), names[x])) for shape, x in parts(KV, G, D, kind)]
  inputs = [*cache, *[on_device(x) for x in (qkv.reshape(T, -1), rope, tokens)]]
  q, *outputs = on_device(np.zeros((T, KV, G, D), np.float16)).custom_kernel(*inputs, fxn=tensor_cores.rope_kernel)
  cos, sin = rope[positions].transpose(1, 0, 2)[:, :, None]
  rotated = rotate(qkv, cos, sin)
  np.testing.assert_allclose(q.numpy(), rotated[:, :KV * G].reshape(T, KV, G, D), atol=4e-3)
  expected = np.zeros((2, blocks * BS, KV, D), np.float32)
  expected[:, slots] = rotated[:, KV * G:-KV], qkv[:, -KV:]
  expected = expected.reshape(2, blocks, BS, KV, D)
  if kind == "auto":
    for output, reference in zip(outputs[:2], as_stored(*expected.astype(np.float16)), strict=True):
      np.testing.assert_allclose(output.numpy(), reference, atol=4e-3)
    return
  check_quantized_cache(outputs, expected, slots, kind, as_stored)


def test_tensor_cores_selected_only_for_supported_block_and_head_sizes():
  has_tensor_cores = "sm_" in str(Device.default.renderer.target)
  def uses(*sizes, **options): return len(parts(*sizes, **options)[0][0]) == 4
  assert uses(8, 4, 128) == uses(2, 16, 32) == has_tensor_cores
  assert not any([uses(8, 4, 128, block_size=32), uses(8, 4, 80), uses(1, 17, 64), uses(1, 1, 256),
                  uses(8, 4, 128, dtype=dtypes.float32)])
  assert TILE % 16 == 0
