"""Kernels compared with numpy, in the shapes and dtypes of real models, on tinygrad's default device. In tinygrad's
interpreter (DEV=PYTHON) the shapes are smaller."""
import numpy as np
import pytest
from helpers.data import read_data
from helpers.kernels import check_attention, check_rope, close, on_device, random_quantized, spread, store, swiglu
from helpers.parameters import mark_slow_except, slow
from helpers.tensor_cores import run_on_cpu
from tinygrad import Device, dtypes

from tinyvllm.backend import scatter_kernel
from tinyvllm_extra.kernels import attention, cuda_source, matmul
from tinyvllm_extra.kernels.matmul import FastGateUp, FastLinear, FastNorm
from tinyvllm_extra.formats.quantization import Quantized, dequantize, quantize
from tinyvllm_extra.models.matrices import reorder, stored_shape

MATRICES = read_data("kernel_cases.json")["matrices"]
KINDS = {"float32": (dtypes.float32, 2e-5), "float16": (dtypes.float16, 2e-3)}   # dtype, tolerance for rounding
SLOW = Device.DEFAULT == "PYTHON"
TENSOR_CORES = Device.DEFAULT == "CUDA"
lacks_half = dtypes.float16 not in Device.default.renderer.supported_dtypes()   # the interpreter before Python 3.12
if lacks_half: del KINDS["float16"]
kinds = pytest.mark.parametrize("kind", KINDS)


def normal(*shape: int, kind: str = "float32", seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).standard_normal(shape).astype(kind)


def make_layer(kind: str, inputs: int, outputs: int, bias: bool = False, layer_class: type[FastLinear] = FastLinear,
               axis: int = 0) -> tuple[FastLinear, np.ndarray]:
  """Return a layer with random weights, and the weights."""
  layer = layer_class(inputs, {"w": outputs}, bias, KINDS[kind][0], axis)
  weight = normal(outputs, inputs, kind=kind, seed=1) / 4
  layer.weight = on_device(reorder(layer.ordered(weight), layer.weight.shape))
  if bias: layer.bias = on_device(normal(outputs, seed=3))
  return layer, weight


def multiply(layer: FastLinear, weight: np.ndarray, x: np.ndarray) -> np.ndarray:
  """Return in numpy what a FastLinear or a FastGateUp with this weight computes."""
  both = x.astype(np.float32) @ weight.astype(np.float32).T + (0 if layer.bias is None else layer.bias.numpy())
  return swiglu(both) if isinstance(layer, FastGateUp) else both


@kinds
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (40, 24), (32, 17), *slow(
  (1120, 16), (72, 80) if SLOW else (576, 960), (160, 16) if SLOW else (1536, 64))])
def test_linear_equals_numpy_for_every_batch_size(inputs, outputs, kind):
  layer, weight = make_layer(kind, inputs, outputs)
  for i, rows in enumerate((1, 2, 3, 8) if SLOW else (1, 2, 3, 8, 16, 128)):
    x = normal(rows, inputs, kind=kind)
    close(layer(on_device(x), dtype=dtypes.float32), multiply(layer, weight, x), KINDS[kind][1])
    if i % 2 == 0: close(layer(on_device(x)), multiply(layer, weight, x), KINDS[kind][1])


@kinds
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (40, 24), (32, 17)])
def test_rows_returns_stored_weights_and_zeros_out_of_range(inputs, outputs, kind):
  """Other devices hold the rows out of range."""
  layer, weight = make_layer(kind, inputs, outputs)
  padded = np.concatenate([weight, np.zeros((2, inputs))])   # also for -1
  for ids in ([outputs - 1, 0, 3, 3], [*range(outputs)], [-1, outputs, 2], [-1], [outputs]):
    result = layer.rows(on_device(np.array(ids, np.int32)), dtypes.float32)
    np.testing.assert_array_equal(result.numpy(), padded[ids])


@kinds
@pytest.mark.parametrize(("inputs", "size", "bias"), MATRICES["gate and up"])
def test_gate_up_equals_numpy_and_is_one_tensor_core_kernel(inputs, size, bias, kind):
  """2 * 20 outputs and 40 inputs do not fit the tiles of tensor cores, 2 * 24 outputs not those of GateUp."""
  layer, weight = make_layer(kind, inputs, 2 * size, bias, FastGateUp)
  assert (layer.weight.ndim == 8) == (TENSOR_CORES and kind == "float16" and (inputs, size) in [(64, 24), (160, 32)])
  for rows in (1, 8, 64):
    x = normal(rows, inputs, kind=kind)
    close(layer(on_device(x)), multiply(layer, weight, x), KINDS[kind][1])


def set_min_groups(monkeypatch, count):
  changed = {"min_groups": count}
  tiles = {key: [matmul.Tiles(**vars(x) | changed) for x in tiles] for key, tiles in matmul.TABLES.items()}
  monkeypatch.setattr(matmul, "TABLES", tiles)


@pytest.fixture
def sources(monkeypatch): run_on_cpu(monkeypatch)


@pytest.fixture
def use_many_rows(sources, monkeypatch):
  """Use linear.cu's tiles for many rows even for one work group."""
  monkeypatch.setitem(matmul.TABLES, "wgmma", [])
  set_min_groups(monkeypatch, 1)
  flags = on_device(np.zeros(8, np.uint32))   # as on Hopper
  monkeypatch.setattr(FastLinear, "flags", flags)
  monkeypatch.setattr(matmul, "new_flags", lambda devices: flags)


def check_many_rows(layer: FastLinear, weight: np.ndarray, rows: int, parts: int = 1) -> None:
  """Check the kernel for tensor cores. parts: the partial sums that it returns (split-K)."""
  x = normal(rows, weight.shape[1], kind="float16")
  assert matmul.choose_tiles(layer, on_device(x))
  pairs = zip(np.split(weight, parts, 1), np.split(x, parts, 1), strict=True)
  close(layer(on_device(x)), np.concatenate([multiply(layer, *pair) for pair in pairs]), KINDS["float16"][1])


@pytest.mark.parametrize(MATRICES["columns of kernels"], MATRICES["kernels"])
def test_kernel_for_tensor_cores_equals_numpy(request, fixture, rows, inputs, outputs, bias, layer_class):
  """The cases have more and fewer iterations than buffers, uneven parts of K, and parts without inputs."""
  request.getfixturevalue(fixture)
  check_many_rows(*make_layer("float16", inputs, outputs, bias, getattr(matmul, layer_class)), rows)


@pytest.mark.parametrize(("rows", "bits"), [(64, 0), (3, 0), (3, 8)])
def test_kernel_for_tensor_cores_in_bfloat16_equals_numpy(use_many_rows, rows, bits):
  x, weight = normal(rows, 96), normal(128, 96, seed=1) / 4
  layer = FastLinear(96, {"w": 128}, False, dtypes.bfloat16)
  if bits: store(layer, quantize(weight, bits))
  else: layer.weight = on_device(reorder(weight, layer.weight.shape)).cast(dtypes.bfloat16).realize()
  close(layer(on_device(x).cast(dtypes.bfloat16)).float(), x @ weight.T, 2e-2)


@pytest.mark.parametrize(("rows", "min_work_groups", "parts"), MATRICES["split-K"])
def test_kernel_with_split_k_equals_numpy_for_all_choices(use_many_rows, monkeypatch, rows, min_work_groups, parts):
  set_min_groups(monkeypatch, min_work_groups)
  layer, weight = make_layer("float16", 256, 256, axis=1)
  key, tiles = matmul.candidates(layer, on_device(normal(rows, 256)))
  for choice in tiles[::2]:
    monkeypatch.setattr(matmul, "choices", {key: str(choice)})
    check_many_rows(layer, weight, rows, parts)


@pytest.mark.parametrize("bits", [8, 4, "e4m3"])
@pytest.mark.parametrize(MATRICES["columns of quantized"], MATRICES["quantized"])
def test_many_rows_kernel_quantized_equals_numpy(use_many_rows, bits, rows, inputs, outputs, group, layer_class):
  layer = getattr(matmul, layer_class)(inputs, {"w": outputs}, False, dtypes.float16)
  matrix, weight = random_quantized(np.random.default_rng(1), (outputs, inputs), bits, group)
  store(layer, matrix)
  check_many_rows(layer, weight, rows)


@pytest.mark.parametrize(MATRICES["columns of LoRA"], MATRICES["LoRA"])
def test_kernel_adds_the_adapter_of_each_row(request, fixture, rows, inputs, outputs, rank, layer_class, axis):
  """Of four adapters the step has the third and the first; some rows have none."""
  request.getfixturevalue(fixture)
  layer, weight = make_layer("float16", inputs, outputs, not axis, getattr(matmul, layer_class), axis)
  x, a, b = [normal(*shape, kind="float16") / 4 for shape in ((rows, inputs), (5, rank, inputs), (5, outputs, rank))]
  own = np.random.default_rng(rows).choice(np.array([0, 3, 1], np.int32), rows)
  stored = [np.concatenate([reorder(order(w), stored_shape(*w.shape, True)) for w in matrices])
            for matrices, order in ((a, np.asarray), (b, layer.ordered))]
  layer.lora = dict(zip(("a", "b", "flags"), map(on_device, [*stored, np.zeros(64, np.int32)]), strict=True))
  reset = matmul.adapters.set((None, on_device(np.append(own, np.array([2, 3, 1, 0], np.int32)))))
  sums = layer(on_device(x)).float().reshape(-1, rows, outputs // (1 + (layer_class == "FastGateUp"))).sum(0).realize()
  matmul.adapters.reset(reset)
  ax = np.einsum("ti,tri->tr", x.astype(np.float32), a[own].astype(np.float32)).astype(np.float16)
  both = np.hstack([x, *[ax * (own == i)[:, None] for i in range(1, 5)]])
  close(sums, multiply(layer, np.hstack([weight, *b[1:]]), both), KINDS["float16"][1])


@pytest.mark.parametrize(("groups", "factor"), [(4, 1), (3, 2e7)])
def test_scales_that_tensor_cores_cannot_use_select_the_generic_layout(monkeypatch, groups, factor):
  """Groups of 24 inputs, and scales above float16's range."""
  monkeypatch.setattr(cuda_source, "has_mma", lambda dtype: True)
  layer = FastLinear(96, {"w": 32}, False, dtypes.float16)
  assert layer.weight.ndim == 8
  q = np.random.default_rng(0).integers(-127, 128, (32, 96)).astype(np.int8)
  w = Quantized(q, (1 + np.arange(32 * groups).reshape(32, groups)).astype(np.float32) * factor, None, np.arange(96))
  store(layer, w)
  x = normal(2, 96) / (1000 * factor)
  close(layer(on_device(x)), x @ dequantize(w, np.float32).T, 2e-3)


def test_shared_tiles_fit_shared_memory():
  for key in matmul.TABLES.keys() - {"wgmma"}:
    for tiles in matmul.TABLES[key]:
      weight_bytes = tiles.outputs * (32 + 4 if "quantized" in key else 64)   # int8 with scales and offsets
      limit = (96 if tiles.max_groups > 132 else 227) * 1024
      assert tiles.buffers > 2 and tiles.deep * tiles.buffers * (tiles.rows * 64 + weight_bytes) <= limit
      assert tiles.outputs <= 256
      assert tiles.deep == 1 or tiles.deep * tiles.rows * tiles.outputs * 4 <= limit   # of sums


def rms_norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
  x = x.astype(np.float32)
  return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight.astype(np.float32)


@kinds
@pytest.mark.parametrize("size", [64, 72, 125] if SLOW else [64, 1000, *slow(576, 2048)])
def test_norm_equals_numpy(size, kind):
  norm, weight = FastNorm("norm", size, 1e-5, KINDS[kind][0]), (1 + normal(size, seed=1) / 4).astype(kind)
  norm.weight = on_device(weight)
  for rows in (1, 2, 8) if SLOW else (1, 2, 8, 32):
    x = normal(rows, size, kind=kind) * np.arange(1, rows + 1, dtype=kind)[:, None]
    close(norm(on_device(x)), rms_norm(x, weight), KINDS[kind][1])


@kinds
@pytest.mark.parametrize(("rows", "size", "parts"), [
  (1, 64, 1), (8, 64, 1), (8, 64, 3), *([(8, 125, 1)] if SLOW else [
    (1, 1000, 1), (8, 1000, 1), (3, 256, 2), (3, 2048, 2), *slow((1, 576, 1), (8, 2048, 1))])])
def test_norm_add_returns_sum_of_stacked_parts_and_its_norm(rows, size, parts, kind):
  norm, weight = FastNorm("norm", size, 1e-5, KINDS[kind][0]), np.full(size, 0.5, kind)
  norm.weight = on_device(weight)
  x, added = normal(rows, size, kind=kind), 3 * normal(parts, rows, size, kind=kind, seed=1)
  summed, normed = norm.add(on_device(x), on_device(added.reshape(-1, size)))
  total = (x.astype(np.float32) + added.astype(np.float32).sum(0)).astype(kind)   # rounded before the norm
  close(summed, total, 0 if parts == 1 else KINDS[kind][1])
  close(normed, rms_norm(total, weight), KINDS[kind][1])


# Tokens, K/V heads, query heads per K/V head, head_dim, longest context, sequences
CASES = read_data("kernel_cases.json")["attention"]
QUICK = "decode", "one query head", "many query heads", "narrow", "chunks"
if SLOW: CASES = {name: (min(T, 4), min(KV, 2), min(G, 3), D // 4, min(longest, 20), min(R, 2))
                  for name, (T, KV, G, D, longest, R) in CASES.items()}


@pytest.mark.parametrize(("block_size", "case", "kind"), [
  *mark_slow_except([(16, case, "float32") for case in QUICK], [(16, case, "float32") for case in CASES]),
  *slow((4, "decode", "float32"), (4, "chunks", "float32"),
        *[(16, case, "float16") for case in ("decode", "narrow", "chunks") if not lacks_half])])
def test_attention_equals_numpy_and_reads_only_own_sequence(case, block_size, kind):
  T, *shape, longest, R = CASES[case]
  check_attention("generic", spread(T, longest, R), shape, KINDS[kind][1], dtype=kind, block_size=block_size)


@pytest.mark.parametrize(("kind", "stored_as"), [*[(kind, "auto") for kind in KINDS], ("float32", "int8"), pytest.param(
  "float32", "fp8", marks=pytest.mark.skipif(lacks_half, reason="the interpreter rounds small float16 to 0"))])
def test_rope_kernel_equals_numpy_and_rounds_to_nearest(kind, stored_as):
  check_rope("generic", attention.rope_kernel, 8, (2, 3, 32), KINDS[kind][1], stored_as, kind, block_size=4)


def test_scatter_kernel_writes_only_its_flat_indices():
  index, values = (on_device(np.array(x, np.int32)) for x in ([0, 1, 14], [7, 9, 5]))
  out = on_device(np.full((3, 5), 2, np.int32)).custom_kernel(index, values, fxn=scatter_kernel)[0]
  assert out.numpy().tolist() == [[7, 9, 2, 2, 2], [2] * 5, [2, 2, 2, 2, 5]]
