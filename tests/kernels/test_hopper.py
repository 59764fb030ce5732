"""Products of many rows on Hopper, compared with numpy: on a card, or with wgmma.cu on the CPU."""
import functools

import numpy as np
import pytest
from helpers.kernels import close, on_device, store_quantized
from helpers.parameters import slow
from helpers.reference import random_numbers
from helpers.tensor_cores import run_on_cpu
from tinygrad import Tensor, TinyJit, dtypes

from tinyvllm_extra.kernels import cuda_source, products
from tinyvllm_extra.kernels.matmul import FastGateUp, FastLinear
from tinyvllm_extra.models.quantized import Quantized

IS_HOPPER = products.new_flags("CUDA") is not None
# Maximum rows, inputs, outputs. With three multiprocessors: a tile that several share, also whole rounds, and both
SMALL = [(128, 576, 400), (512, 128, 256), (256, 192, 128), (384, 64, 272)]
LARGE = [(512, 4096, 4096), (2048, 4096, 12288), (384, 576, 1024), (512, 11008, 4096)]
QUICK = [(SMALL[0], FastLinear, "float16"), (SMALL[1], FastGateUp, "float16"), (SMALL[2], FastGateUp, "e4m3"),
         (SMALL[3], FastLinear, 4)]
REST = [(sizes, layer_class, kind) for sizes in SMALL + LARGE * IS_HOPPER for layer_class in (FastLinear, FastGateUp)
        for kind in ("float16", 8, 4, "e4m3") if (sizes, layer_class, kind) not in QUICK]


@pytest.fixture
def hopper(monkeypatch):
  reset = products.current.set(None)
  if not IS_HOPPER:
    run_on_cpu(monkeypatch)
    monkeypatch.setattr(products, "new_flags", lambda devices: on_device(np.zeros(8 * 3, np.uint32)))
  yield
  products.current.reset(reset)


def tokens_of(T: int, count: int) -> Tensor:
  """Return the tokens of a step whose last ones are padding."""
  tokens = np.zeros((products.COUNT + 1, T), np.int32)
  tokens[products.COUNT] = count
  return on_device(tokens)


@pytest.mark.parametrize(("T", "K", "count"), [(128, 64, 128), (256, 192, 77), (512, 128, 300)])
def test_packed_order_is_that_of_wgmma(T, K, count, hopper):
  x, rows = np.arange(T * K).astype(np.uint16).reshape(T, K).view(np.float16), 128 if T % 256 else 256
  layout = x.reshape(T // rows, rows, K // 64, 2, 4, 2, 2, 2).transpose(0, 2, 1, 3, 5, 6, 4, 7)   # a, i, h, c, p last
  chunks = layout.reshape(T // rows, K // 64, rows, 8, 8)
  order = np.arange(8) ^ (np.arange(rows) % 8)[:, None]   # 128-byte swizzle
  expected = np.take_along_axis(chunks, order[None, None, :, :, None], 3).reshape(T // rows, K // 64, rows, 64)
  tokens = tokens_of(T, count)
  pack = functools.partial(products.launch_pack, tiles=products.WGMMA[rows == 128])
  out = Tensor.zeros(T, K, dtype=dtypes.float16).contiguous().realize()
  packed = cuda_source.run(pack, out=out, x=on_device(x), tokens=tokens)[0].numpy().reshape(expected.shape)
  exists = np.arange(T).reshape(T // rows, 1, rows, 1) < count
  np.testing.assert_array_equal(packed.view(np.uint16), np.where(exists, expected, 0).view(np.uint16))


@pytest.mark.parametrize("group", [64, 16])
@pytest.mark.parametrize(("sizes", "layer_class", "kind"), [*QUICK, *slow(*REST)])
def test_product_equals_numpy_for_the_rows_that_exist(sizes, layer_class, kind, group, hopper):
  T, inputs, outputs = sizes
  layer, rng = layer_class(inputs, {"w": outputs}, kind == "float16", dtypes.float16), np.random.default_rng(1)
  if kind == "float16":
    weight = (rng.standard_normal((outputs, inputs)) / 50).astype(np.float16)
    layer.store([weight], lambda arrays, dtype=None: on_device(*arrays))
    layer.bias = on_device(rng.standard_normal(outputs).astype(np.float32))
  else:
    q, numbers = random_numbers(rng, (outputs, inputs), kind)
    scale, offset = (rng.random((2, outputs, inputs // group)) / 4096).astype(np.float16)
    weight = numbers * scale.repeat(group, 1).astype(np.float32) + (0 if kind == "e4m3" else offset.repeat(group, 1))
    store_quantized(layer, Quantized(q, scale, None if kind == "e4m3" else offset, np.arange(inputs)))
  x = rng.standard_normal((T, inputs)).astype(np.float16)
  expected = x.astype(np.float32) @ weight.astype(np.float32).T + (0 if layer.bias is None else layer.bias.numpy())
  if layer_class is FastGateUp:
    gate, up = np.split(expected, 2, 1)
    expected = gate / (1 + np.exp(-gate)) * up

  def run(x: Tensor, tokens: Tensor) -> Tensor:
    products.current.set(tokens)
    return layer(x).realize()
  if IS_HOPPER: run = TinyJit(run)
  for count in (T, 1, T // 2 + 3, T - 1, T) if IS_HOPPER else (T // 2 + 3, T):
    close(run(on_device(x), tokens_of(T, count))[:count], expected[:count], 4e-3)
