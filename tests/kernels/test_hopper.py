"""Products of many rows and attention of prefill chunks on Hopper, compared with numpy: on a card, or with wgmma.cu and
attention_hopper.cu on the CPU."""
import numpy as np
import pytest
from helpers.data import read_data
from helpers.kernels import check_attention, close, on_device, random_quantized, store, swiglu
from helpers.parameters import mark_slow_except, slow
from helpers.reference import quantize_kv
from helpers.tensor_cores import run_on_cpu
from tinygrad import Device, Tensor, TinyJit, dtypes

from tinyvllm_extra.kernels import cuda_source, matmul
from tinyvllm_extra.kernels.matmul import FastGateUp, FastLinear

IS_HOPPER = matmul.new_flags("CUDA") is not None
# Maximum rows, inputs, outputs. With three multiprocessors: a tile that several share, also whole rounds, and both
SMALL = [(128, 576, 400), (512, 128, 256), (256, 192, 128), (384, 64, 272), (64, 384, 272)]
LARGE = [(512, 4096, 4096), (2048, 4096, 12288), (384, 576, 1024), (512, 11008, 4096)]
# Numbers of W, and inputs per scale; of e4m3 with one scale per output x is e4m3, too
KINDS = [("float16", 0), (8, 64), (8, 16), (4, 64), (4, 16), ("e4m3", 64), ("e4m3", 0)]
QUICK = [(SMALL[0], FastLinear, *KINDS[0]), (SMALL[1], FastGateUp, *KINDS[0]), (SMALL[2], FastGateUp, *KINDS[5]),
         (SMALL[3], FastLinear, *KINDS[3]), (SMALL[0], FastLinear, *KINDS[4]), (SMALL[1], FastGateUp, *KINDS[6]),
         (SMALL[4], FastLinear, *KINDS[6])]
REST = [case for sizes in SMALL + LARGE * IS_HOPPER for layer_class in (FastLinear, FastGateUp) for kind in KINDS
        if (case := (sizes, layer_class, *kind)) not in QUICK and (kind != KINDS[6] or sizes[1] % 128 == 0)]


@pytest.fixture
def hopper(monkeypatch):
  reset = matmul.current.set(None)
  monkeypatch.setattr(matmul, "LARGE", 0)
  if not IS_HOPPER:
    run_on_cpu(monkeypatch)
    monkeypatch.setattr(matmul, "new_flags", lambda devices: on_device(np.zeros(8 * 3, np.uint32)))
  yield
  matmul.current.reset(reset)


def tokens_of(T: int, count: int) -> Tensor:
  """Return the tokens of a step whose last ones are padding."""
  tokens = np.zeros((matmul.COUNT + 1, T), np.int32)
  tokens[matmul.COUNT] = count
  return on_device(tokens)


@pytest.mark.parametrize(("T", "K", "count"), [(128, 64, 128), (256, 192, 77), (512, 128, 300)])
def test_packed_order_is_that_of_wgmma(T, K, count, hopper):
  x, rows = np.arange(T * K).astype(np.uint16).reshape(T, K).view(np.float16), 128 if T % 256 else 256
  layout = x.reshape(T // rows, rows, K // 64, 2, 4, 2, 2, 2).transpose(0, 2, 1, 3, 5, 6, 4, 7)   # a, i, h, c, p last
  chunks = layout.reshape(T // rows, K // 64, rows, 8, 8)
  order = np.arange(8) ^ (np.arange(rows) % 8)[:, None]   # 128-byte swizzle
  expected = np.take_along_axis(chunks, order[None, None, :, :, None], 3).reshape(T // rows, K // 64, rows, 64)
  tokens = tokens_of(T, count)
  pack = {"T": T, "K": K, "ROWS": rows, "ROWS_OF_STEP": f"tokens[{matmul.COUNT * T}]", "TYPE": '"f16"', "IS_E4M3": 0}
  launch = cuda_source.Launch("pack", "pack.cu", pack, (T, 1, 1), 256, 32)
  out = Tensor.zeros(T, K, dtype=dtypes.float16).contiguous().realize()
  packed = cuda_source.run(launch, out=out, x=on_device(x), tokens=tokens)[0].numpy().reshape(expected.shape)
  exists = np.arange(T).reshape(T // rows, 1, rows, 1) < count
  np.testing.assert_array_equal(packed.view(np.uint16), np.where(exists, expected, 0).view(np.uint16))


@pytest.mark.parametrize(("sizes", "layer_class", "kind", "group"), [*QUICK, *slow(*REST)])
def test_product_equals_numpy_for_the_rows_that_exist(sizes, layer_class, kind, group, hopper):
  T, inputs, outputs = sizes
  has_e4m3_inputs, group = (kind, group) == ("e4m3", 0), group or inputs
  dtype = dtypes.bfloat16 if has_e4m3_inputs and layer_class is FastGateUp else dtypes.float16
  layer, rng = layer_class(inputs, {"w": outputs}, kind == "float16", dtype), np.random.default_rng(1)
  if kind == "float16":
    weight = (rng.standard_normal((outputs, inputs)) / 50).astype(np.float16)
    store(layer, weight)
    layer.bias = on_device(rng.standard_normal(outputs).astype(np.float32))
  else:
    matrix, weight = random_quantized(rng, (outputs, inputs), kind, group, 1 / 4096)
    store(layer, matrix, "fp8" if has_e4m3_inputs else "none")
  x = on_device(rng.standard_normal((T, inputs)).astype(np.float16)).cast(dtype).contiguous().realize()
  inputs = x.float().numpy()
  if has_e4m3_inputs:
    factor = 448 / np.abs(inputs).max(1, keepdims=True)
    inputs = quantize_kv(inputs * factor, "fp8")[0] / factor
  expected = inputs @ weight.astype(np.float32).T + (0 if layer.bias is None else layer.bias.numpy())
  if layer_class is FastGateUp: expected = swiglu(expected)

  def run(x: Tensor, tokens: Tensor) -> Tensor:
    matmul.current.set(tokens)
    return layer(x).realize()
  if IS_HOPPER: run = TinyJit(run)
  for count in (T, 1, T // 2 + 3, T - 1, T) if IS_HOPPER else (T // 2 + 3, T):
    close(run(x, tokens_of(T, count))[:count], expected[:count], 4e-3)


# Attention

# (first position, number of tokens) of each sequence, tokens with padding, (K/V heads, query heads of each, head_dim)
CHUNKS = read_data("kernel_cases.json")["Hopper's chunks"]


@pytest.fixture
def wgmma(monkeypatch):
  run_on_cpu(monkeypatch)
  if Device.DEFAULT != "CUDA": monkeypatch.setattr(cuda_source, "has_wgmma", lambda: True)


@pytest.mark.parametrize("case", mark_slow_except(["mixed step", "decodes"], CHUNKS))
@pytest.mark.parametrize("scale", [None, *mark_slow_except([], [0.4])])
def test_attention_of_chunks_equals_numpy(case, scale, wgmma):
  sequences, num_tokens, shape = CHUNKS[case]
  options = {} if scale is None else {"scale": scale}
  check_attention("tensor cores", sequences, shape, 3e-3, dtype="float16", num_tokens=num_tokens, **options)
