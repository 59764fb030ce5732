"""Kernels compared with numpy, in the shapes and dtypes of real models, on tinygrad's default device. In tinygrad's
interpreter (DEV=PYTHON) the shapes are smaller."""
import sys

import numpy as np
import pytest
from helpers.engines import token_rows
from helpers.kernels import as_stored, bytes_as_stored, check_quantized_cache, on_device, reference_attention, rotate
from helpers.parameters import mark_slow_except, slow
from helpers.reference import random_numbers, rope_frequencies
from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.uop.ops import Ops

from tinyvllm.backend import scatter_kernel
from tinyvllm_extra.kernels import generic as attention, matmul, shared_memory
from tinyvllm_extra.kernels.matmul import (GateUp, Linear, Norm, pack_numbers, prepare_scales, reorder, scales_shape,
                                           speaks_cuda, stored_shape)
from tinyvllm_extra.quantization import Quantized

KINDS = {"float32": (dtypes.float32, 2e-5), "float16": (dtypes.float16, 2e-3)}   # dtype, tolerance for rounding
SLOW = Device.DEFAULT == "PYTHON"
TENSOR_CORES = "sm_" in str(Device.default.renderer.target)   # CUDA, or the interpreter with CUDA's tensor cores
lacks_half = dtypes.float16 not in Device.default.renderer.supported_dtypes()   # the interpreter before Python 3.12
if lacks_half and not TENSOR_CORES: del KINDS["float16"]
kinds = pytest.mark.parametrize("kind", KINDS)
needs_tensor_cores = pytest.mark.skipif(not TENSOR_CORES, reason="this device has no tensor cores")


def normal(*shape: int, kind: str = "float32", seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape).astype(kind)


def close(output: Tensor, expected: np.ndarray, tolerance: float) -> None:
  assert output.shape == expected.shape
  array = output.numpy().astype(np.float32)
  np.testing.assert_allclose(array, expected, rtol=tolerance, atol=tolerance * max(1.0, np.abs(expected).max()))


def linear(inputs: int, outputs: int, kind: str, bias: bool = False) -> tuple[Linear, np.ndarray]:
  layer = Linear(in_features=inputs, sources={"w": outputs}, bias=bias, dtype=KINDS[kind][0])
  weight = normal(outputs, inputs, kind=kind, seed=1)
  layer.weight = on_device(reorder(weight, layer.weight.shape))
  return layer, weight.astype(np.float32)


@kinds
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (40, 24), (32, 17), *slow(
  (1120, 16), (72, 80) if SLOW else (576, 960), (160, 16) if SLOW else (1536, 64))])
def test_linear_equals_numpy_for_every_batch_size(inputs, outputs, kind):
  layer, weight = linear(inputs, outputs, kind)
  for i, rows in enumerate((1, 2, 3, 8) if SLOW else (1, 2, 3, 8, 16, 128)):
    x = normal(rows, inputs, kind=kind)
    expected = x.astype(np.float32) @ weight.T
    close(layer(on_device(x), dtype=dtypes.float32), expected, KINDS[kind][1])
    if i % 2 == 0: close(layer(on_device(x)), expected, KINDS[kind][1])


@needs_tensor_cores
@pytest.mark.parametrize("inputs", [96, 160])
def test_split_k_equals_numpy_for_uneven_splits(inputs):
  layer, weight = linear(inputs, 32, "float16")
  x = normal(128, inputs, kind="float16")
  close(layer(on_device(x), dtype=dtypes.float32), x.astype(np.float32) @ weight.T, KINDS["float16"][1])


@kinds
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (40, 24), (32, 17)])
def test_rows_returns_stored_weights_and_zeros_out_of_range(inputs, outputs, kind):
  layer, weight = linear(inputs, outputs, kind)
  for ids in (np.array([outputs - 1, 0, 3, 3], np.int32), np.arange(outputs, dtype=np.int32)):
    np.testing.assert_array_equal(layer.rows(on_device(ids), dtypes.float32).numpy(), weight[ids])
  zero = np.zeros(inputs)
  for ids, rows in (([-1, outputs, 2], [zero, zero, weight[2]]), ([-1], [zero]), ([outputs], [zero])):
    result = layer.rows(on_device(np.array(ids, np.int32)), dtypes.float32)   # other devices hold those rows
    np.testing.assert_array_equal(result.numpy(), rows)


def silu_product(both: np.ndarray) -> np.ndarray:
  """Return silu(gate) * up. both: gate's columns, then up's columns."""
  gate, up = np.split(both, 2, 1)
  return gate / (1 + np.exp(-gate)) * up


@kinds
@pytest.mark.parametrize(("inputs", "size", "bias"), [(64, 24, True), (160, 16, False), (64, 20, True),
                                                      (40, 24, False)])
def test_gate_up_equals_numpy_and_is_one_tensor_core_kernel(inputs, size, bias, kind):
  """2 * 20 outputs and 40 inputs do not fit the tiles of tensor cores."""
  layer = GateUp(inputs, {"gate": size, "up": size}, bias, KINDS[kind][0])
  assert (layer.weight.ndim == 8) == (TENSOR_CORES and kind == "float16" and (inputs, size) in [(64, 24), (160, 16)])
  weight = normal(2 * size, inputs, kind=kind, seed=1) / 4
  layer.weight, added = on_device(reorder(layer.ordered(weight), layer.weight.shape)), 0
  if bias:
    layer.bias = on_device(normal(2 * size, kind=kind, seed=3))
    added = layer.bias.numpy()
  for rows in (1, 8, 64):
    x = normal(rows, inputs, kind=kind)
    both = x.astype(np.float32) @ weight.astype(np.float32).T + added
    close(layer(on_device(x)), silu_product(both), KINDS[kind][1])


def kernel_names(x: Tensor) -> list[str]:
  return [u.src[0].arg.name for u in x.schedule_linear().toposort() if u.op is Ops.CALL and u.src[0].op is Ops.SINK]


def set_min_groups(monkeypatch, count):
  tiles = {key: [x._replace(min_groups=count) for x in tiles] for key, tiles in shared_memory.SHARED.items()}
  monkeypatch.setattr(shared_memory, "SHARED", tiles)


@pytest.fixture
def many_rows(monkeypatch):
  """Use the kernel for many rows even for one work group. Devices other than CUDA copy with plain loads."""
  if lacks_half: pytest.skip("tinygrad's interpreter has no float16 in shared memory before Python 3.12")
  set_min_groups(monkeypatch, 1)
  if speaks_cuda(): return
  def copy_async(copies, is_needed):   # a copy that is not needed stores zeros
    parts = [(to.src, source.src, condition, i) for to, source, condition in copies
             for i in range(16 // source.dtype.itemsize)]
    return UOp.group(*[
      to.index((at + i).valid(condition)).store(source.index((start + i).valid(is_needed & condition)))
      for (to, at), (source, start), condition, i in parts])
  def scale_pair(pair, zero_point, scale, offset):
    def halves(word): return [(word >> 16 * i).cast(dtypes.uint16).bitcast(dtypes.half) for i in range(2)]
    zero = UOp.const(zero_point, dtypes.uint32)
    numbers = [(x - z) * s + o for x, z, s, o in zip(*map(halves, (pair, zero, scale, offset)), strict=True)]
    low, high = [x.bitcast(dtypes.uint16).cast(dtypes.uint32) for x in numbers]
    return low | high << 16
  monkeypatch.setattr(matmul, "speaks_cuda", lambda: True)
  monkeypatch.setattr(shared_memory, "copy_async", copy_async)
  monkeypatch.setattr(shared_memory, "scale_pair", scale_pair)
  monkeypatch.setattr(matmul, "wait", lambda copies, iteration, _: UOp(Ops.BARRIER, src=(copies, iteration)))


@needs_tensor_cores
@pytest.mark.parametrize(("rows", "inputs", "outputs", "bias", "gated"), [
  (128, 64, 128, True, False), (128, 96, 256, False, False), (128, 160, 128, False, False), (128, 96, 256, True, True),
  (32, 64, 64, True, False), (32, 352, 64, False, False), (96, 96, 128, False, True), (64, 64, 64, False, False),
  (64, 288, 128, True, False), (64, 96, 192, True, True)])
def test_many_rows_kernel_equals_numpy(many_rows, rows, inputs, outputs, bias, gated):
  """The cases have both more and fewer iterations than buffers."""
  layer = (GateUp if gated else Linear)(inputs, {"a": outputs // 2, "b": outputs // 2}, bias, dtypes.float16)
  weight, x = normal(outputs, inputs, kind="float16", seed=1) / 4, normal(rows, inputs, kind="float16")
  layer.weight = on_device(reorder(layer.ordered(weight), layer.weight.shape))
  expected = x.astype(np.float32) @ weight.astype(np.float32).T
  if bias:
    layer.bias = on_device(normal(outputs, kind="float16", seed=3))
    expected += layer.bias.numpy()
  assert kernel_names(layer(on_device(x))) == ["linear_many"]
  close(layer(on_device(x)), silu_product(expected) if gated else expected, KINDS["float16"][1])


@needs_tensor_cores
@pytest.mark.parametrize(("rows", "min_work_groups", "parts"), [
  (128, 3, 2), (64, 5, 2), (64, 16, 4), (32, 8, 2), (32, 32, 8)])
def test_many_rows_kernel_split_k_equals_numpy(many_rows, monkeypatch, rows, min_work_groups, parts):
  set_min_groups(monkeypatch, min_work_groups)
  layer = Linear(256, {"w": 256}, False, dtypes.float16, axis=1)
  weight, x = normal(256, 256, kind="float16", seed=1) / 4, normal(rows, 256, kind="float16")
  layer.weight = on_device(reorder(layer.ordered(weight), layer.weight.shape))
  assert kernel_names(layer(on_device(x))) == ["linear_many"]
  expected = [a.astype(np.float32) @ b.astype(np.float32).T
              for a, b in zip(np.split(x, parts, 1), np.split(weight, parts, 1), strict=True)]
  close(layer(on_device(x)), np.concatenate(expected), KINDS["float16"][1])


@needs_tensor_cores
@pytest.mark.parametrize("bits", [8, 4, "e4m3"])
@pytest.mark.parametrize(("rows", "inputs", "outputs", "group", "gated"), [
  (128, 96, 128, 32, False), (64, 256, 128, 64, True), (32, 320, 64, 32, False), (32, 64, 32, 64, True),
  (16, 96, 32, 96, False), (48, 64, 64, 32, False)])
def test_many_rows_kernel_quantized_equals_numpy(many_rows, bits, rows, inputs, outputs, group, gated):
  layer = (GateUp if gated else Linear)(inputs, {"a": outputs // 2, "b": outputs // 2}, False, dtypes.float16)
  shape = layer.weight.shape
  rng = np.random.default_rng(1)
  q, numbers = random_numbers(rng, (outputs, inputs), bits)
  terms = [(rng.random((outputs, inputs // group)) / 99).astype(np.float16) for _ in range(1 if bits == "e4m3" else 2)]
  layer.weight = on_device(pack_numbers(layer.ordered(q), shape))
  w = Quantized(q, terms[0], None, np.arange(inputs))
  stored = [prepare_scales(w, dtypes.float16), *terms[1:]]
  layer.scales = [on_device(reorder(layer.ordered(x), scales_shape(shape, x.shape[1]))) for x in stored]
  scale, offset = [x.repeat(group, 1).astype(np.float32) for x in terms] + [0] * (2 - len(terms))
  x = normal(rows, inputs, kind="float16")
  expected = x.astype(np.float32) @ (numbers * scale + offset).T
  assert kernel_names(layer(on_device(x))) == ["linear_many"]
  close(layer(on_device(x)), silu_product(expected) if gated else expected, KINDS["float16"][1])


def test_shared_tiles_fit_shared_memory():
  for is_quantized, candidates in shared_memory.SHARED.items():
    for tiles in candidates:
      weight_bytes = tiles.outputs * (32 + 4 if is_quantized else 64)   # int8 with scales and offsets
      assert tiles.buffers > 2 and tiles.buffers * (tiles.rows * 64 + weight_bytes) <= 48 * 1024
      assert tiles.outputs <= 256 and tiles.wide * tiles.high >= 2, "one warp copies scales, another one offsets"


def test_float16_weights_use_tensor_core_layout_if_available():
  assert len(stored_shape(48, 64, dtypes.float16)) == (8 if TENSOR_CORES else 3)
  assert len(stored_shape(48, 64, dtypes.float32)) == len(stored_shape(40, 64, dtypes.float16)) == 3


@kinds
@pytest.mark.parametrize("size", [64, 72, 125] if SLOW else [64, 1000, *slow(576, 2048)])
def test_norm_equals_numpy(size, kind):
  norm, weight = Norm("norm", size, 1e-5, KINDS[kind][0]), 1 + normal(size, kind=kind, seed=1) / 4
  norm.weight = on_device(weight.astype(kind))
  for rows in (1, 2, 8) if SLOW else (1, 2, 8, 32):
    x = normal(rows, size, kind=kind) * np.arange(1, rows + 1, dtype=kind)[:, None]
    wide = x.astype(np.float32)
    expected = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * weight.astype(kind).astype(np.float32)
    close(norm(on_device(x)), expected, KINDS[kind][1])


@kinds
@pytest.mark.parametrize("size", [64, 125] if SLOW else [64, 1000, *slow(576, 2048)])
def test_norm_add_returns_sum_and_its_norm(size, kind):
  norm = Norm("norm", size, 1e-5, KINDS[kind][0])
  norm.weight = on_device(np.full(size, 0.5, kind))
  for rows in (1, 8):
    x, delta = normal(rows, size, kind=kind), 3 * normal(rows, size, kind=kind, seed=1)
    total = (x.astype(np.float32) + delta).astype(kind)   # rounded to the stored dtype before the norm
    wide = total.astype(np.float32)
    summed, normed = norm.add(on_device(x), on_device(delta))
    np.testing.assert_array_equal(summed.numpy(), total)
    close(normed, wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * np.float32(0.5), KINDS[kind][1])


@kinds
def test_norm_add_sums_stacked_partial_sums(kind):
  norm = Norm("norm", 64, 1e-5, KINDS[kind][0])
  norm.weight = on_device(np.full(64, 0.5, kind))
  x, parts = normal(8, 64, kind=kind), normal(3, 8, 64, kind=kind, seed=1)
  summed, normed = norm.add(on_device(x), on_device(parts.reshape(-1, 64)))
  wide = x.astype(np.float32) + parts.astype(np.float32).sum(0)
  close(summed, wide, KINDS[kind][1])
  close(normed, wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + 1e-5) * np.float32(0.5), KINDS[kind][1])


@pytest.mark.skipif(len(KINDS) < 2, reason="this device has no float16")
def test_float16_weight_with_float32_input_equals_numpy():
  layer, weight = linear(72, 48, "float16", bias=True)
  layer.bias, x = on_device(normal(48, kind="float16", seed=3)), normal(4, 72)
  layer.weight = on_device(reorder(weight.astype(np.float16), stored_shape(48, 72, dtypes.float32)))
  close(layer(on_device(x)), x @ weight.T + layer.bias.numpy(), KINDS["float32"][1])
  norm, weight = Norm("norm", 72, 1e-5, dtypes.float32), 1 + normal(72, kind="float16", seed=1)
  norm.weight = on_device(weight)
  close(norm(on_device(x)), x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight, KINDS["float32"][1])


CASES = {   # tokens, K/V heads, query heads per K/V head, head_dim, longest context, sequences
  "decode": (8, 2, 4, 64, 100, 8), "one token": (1, 2, 4, 64, 70, 1), "one query head": (16, 4, 1, 128, 60, 16),
  "few tokens, one query head": (4, 2, 1, 64, 150, 4),
  "three query heads": (4, 3, 3, 64, 40, 4), "many query heads": (2, 1, 12, 32, 40, 2), "narrow": (4, 2, 2, 24, 40, 4),
  "one chunk": (64, 2, 2, 64, 64, 1), "long chunk": (128, 1, 4, 32, 130, 1), "chunks": (128, 2, 1, 64, 90, 3)}
QUICK = "decode", "one query head", "many query heads", "narrow", "chunks"
if SLOW: CASES = {name: (min(T, 4), min(KV, 2), min(G, 3), D // 4, min(longest, 20), min(R, 2))
                  for name, (T, KV, G, D, longest, R) in CASES.items()}


in_bytes = pytest.mark.parametrize("stored_as", ["int8", pytest.param("fp8", marks=pytest.mark.skipif(
  SLOW and sys.version_info < (3, 12), reason="tinygrad's interpreter rounds small float16 to 0 before Python 3.12"))])


@pytest.mark.parametrize(("block_size", "case", "kind"), [
  *mark_slow_except([(16, case, "float32") for case in QUICK], [(16, case, "float32") for case in CASES]),
  *slow((4, "decode", "float32"), (4, "chunks", "float32"),
        *[(16, case, "float16") for case in ("decode", "narrow", "chunks") if not lacks_half])])
def test_attention_equals_numpy_and_reads_only_own_sequence(case, block_size, kind):
  (T, KV, G, D, longest, R), (_, tolerance), rng = CASES[case], KINDS[kind], np.random.default_rng(5)
  M = -(-longest // block_size) + 1
  lengths = rng.integers(1, longest + 1, R)
  lengths[0] = longest
  rows = np.sort(np.resize(np.arange(R), T))
  offsets = [lengths[r] - (rows == r).sum() - np.flatnonzero(rows == r)[0] for r in rows]
  positions = np.array([max(0, i + offset) for i, offset in enumerate(offsets)])
  table = (rng.permutation(R * M) + 1).reshape(R, M)
  cache = np.full((2, R * M + 1, block_size, KV, D), np.nan, kind)   # unwritten positions must not be read
  for r in range(R):
    for p in range(positions[rows == r].max() + 1):
      cache[:, table[r, p // block_size], p % block_size] = rng.standard_normal((2, KV, D))
  q = normal(T, KV, G, D, kind=kind)
  expected = reference_attention(q, cache, table, rows, positions)
  tokens = token_rows(positions, rows, table[rows, positions // block_size], block_size, M)
  tables = table.astype(np.int32)
  tensors = [on_device(x) for x in (q, *as_stored(cache), tables, tokens)]
  out = Tensor.empty_like(tensors[0]).custom_kernel(*tensors, fxn=attention.attend_kernel)[0]
  close(out, expected, tolerance)


@in_bytes
def test_rope_kernel_rounds_int8_and_fp8_to_nearest(stored_as):
  rope_equals_numpy("float32", stored_as)


@kinds
def test_rope_kernel_equals_numpy(kind): rope_equals_numpy(kind)


def rope_equals_numpy(kind: str, stored_as: str = "auto") -> None:
  T, KV, G, D, BS, rng = 8, 2, 3, 32, 4, np.random.default_rng(0)
  blocks, positions = rng.permutation(10)[:T], rng.integers(0, 99, T)
  slots = blocks * BS + positions % BS
  qkv, cache = normal(T, KV * (G + 2), D, kind=kind), np.zeros((2, 10, BS, KV, D), kind)
  angles = positions[:, None] * rope_frequencies({"rope_theta": 1e4}, D)
  all_angles = np.arange(99)[:, None] * rope_frequencies({"rope_theta": 1e4}, D)
  table, rope = (np.stack([np.cos(x), np.sin(x)], 1).astype(np.float32) for x in (all_angles, angles))
  tokens = token_rows(positions, 0 * positions, blocks, BS)
  caches = list(as_stored(cache))
  if stored_as != "auto": caches = list(bytes_as_stored(*np.zeros(cache.shape, np.uint8)))
  if stored_as == "int8": caches.append(np.zeros((10, KV, 2, BS), np.float32))
  inputs = [on_device(x) for x in (*caches, qkv.reshape(T, -1), table, tokens)]
  q, *outputs = on_device(np.zeros((T, KV, G, D), kind)).custom_kernel(*inputs, fxn=attention.rope_kernel)
  rotated = rotate(qkv, rope[:, 0, None], rope[:, 1, None])
  close(q, rotated[:, :KV * G].reshape(T, KV, G, D), KINDS[kind][1])
  cache = cache.reshape(2, -1, KV, D).astype(np.float32)
  cache[0, slots], cache[1, slots] = rotated[:, KV * G:KV * (G + 1)], qkv[:, KV * (G + 1):]
  cache = cache.reshape(2, -1, BS, KV, D)
  expected = list(as_stored(cache))
  if stored_as == "auto":
    for output, reference in zip(outputs[:2], expected, strict=True): close(output, reference, KINDS[kind][1])
    return
  check_quantized_cache(outputs, cache, slots, stored_as, bytes_as_stored)


def test_scatter_kernel_writes_only_its_flat_indices():
  index, values = (on_device(np.array(x, np.int32)) for x in ([0, 1, 14], [7, 9, 5]))
  out = on_device(np.full((3, 5), 2, np.int32)).custom_kernel(index, values, fxn=scatter_kernel)[0]
  assert out.numpy().tolist() == [[7, 9, 2, 2, 2], [2] * 5, [2, 2, 2, 2, 5]]
