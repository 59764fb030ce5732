"""Products of linear.c and attention of attention.c compared with numpy, with each instruction set of this CPU."""
import numpy as np
import pytest
from helpers.engines import ENGINE, greedy, ids_of_batch, prompt, token_rows
from helpers.kernels import check_attention, each_cpu, on_device, store, use_cpu
from helpers.models import tiny_model
from helpers.parameters import slow
from tinygrad import Tensor, dtypes

from tinyvllm import LLM
from tinyvllm_extra.formats import hub
from tinyvllm_extra.formats.quantization import Quantized, dequantize
from tinyvllm_extra.kernels import attention
from tinyvllm_extra.kernels.cuda_source import speaks_c
from tinyvllm_extra.kernels.matmul import FastExperts, FastGateUp, FastLinear
from tinyvllm_extra.models.matrices import E2M1, E4M3, reorder

pytestmark = pytest.mark.skipif(not speaks_c(), reason="other devices do not compile C")
K, ROWS = 192, 70   # inputs, rows of x


def make_layer(layer: FastLinear, kind: str, group: int) -> Quantized:
  """Store a random W in the layer, and return it. kind: int8 or int4, then + and the dtype of offsets."""
  rng, rows = np.random.default_rng(1), layer.out_features
  q = rng.integers(-128, 128, (rows, K), np.int8) if "8" in kind else rng.integers(0, 16, (rows, K), np.uint8)
  scale, offset = rng.random((2, rows, K // group)).astype(np.float16 if group < K else np.float32)
  w = Quantized(q, scale, offset.astype(kind[-1]) if "+" in kind else None, np.arange(K))
  if layer.bias is not None: layer.bias = on_device(np.linspace(-9, 9, rows, dtype=np.float32))
  store(layer, w, "auto")
  assert layer.has_8bit_inputs
  return w


def random_x(rows: int) -> np.ndarray:
  x = np.random.default_rng(2).standard_normal((rows, K), np.float32) / 100
  x[0, :32] = 0
  return x


def multiply(layer: FastLinear, w: Quantized, x: np.ndarray) -> np.ndarray:
  """Quantize x as the kernel does, to the same integers and float32 scales, and multiply in float64."""
  groups = x.reshape(len(x), -1, np.gcd(32, K // w.scale.shape[1]))
  largest = np.abs(groups).max(-1, keepdims=True)
  factor = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
  quantized = np.rint(groups * factor) * (largest / np.float32(127)).astype(np.float64)
  both = quantized.reshape(x.shape) @ dequantize(w, np.float64).T + (0 if layer.bias is None else layer.bias.numpy())
  if not isinstance(layer, FastGateUp): return both
  gate, up = np.split(both, 2, 1)
  if layer.activation == "silu": return gate / (1 + np.exp(-gate)) * up
  return gate * (0.5 + 0.5 * np.tanh(0.79788456 * (gate + 0.044715 * gate**3))) * up


def check(output: np.ndarray, expected: np.ndarray) -> None:
  """The sums of a group are exact: only the sum over groups is rounded."""
  np.testing.assert_allclose(output, expected, rtol=0, atol=2e-6 * np.abs(expected).max())


@each_cpu
@pytest.mark.parametrize(("kind", "group", "activation"), [
  ("int8", 32, ""), ("int8+f", 64, ""), ("int4+e", 16, ""), ("int4", K, ""), ("int8", 8, ""), ("int4+f", 32, "silu"),
  ("int8", 64, "gelu")])
def test_products_equal_numpy_and_do_not_depend_on_batch(monkeypatch, cpu, kind, group, activation):
  use_cpu(monkeypatch, cpu)
  layer = (FastGateUp if activation else FastLinear)(K, {"w": 160 if activation else 80}, True, dtypes.float32)
  if isinstance(layer, FastGateUp): layer.activation = activation
  w = make_layer(layer, kind, group)
  outputs = {rows: layer(on_device(random_x(ROWS)[:rows])).numpy() for rows in (1, 2, 7, ROWS)}
  check(outputs[ROWS], multiply(layer, w, random_x(ROWS)))
  for rows, output in outputs.items(): np.testing.assert_array_equal(output, outputs[ROWS][:rows])


@each_cpu
@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16", np.int8, np.uint8, E4M3, E2M1])
def test_products_of_floats_equal_numpy_and_do_not_depend_on_batch(monkeypatch, cpu, kind):
  use_cpu(monkeypatch, cpu)
  layer, rng = FastLinear(K, {"w": 80}, True, dtypes.float32), np.random.default_rng(1)
  layer.bias = on_device(np.linspace(-9, 9, 80, dtype=np.float32))
  if isinstance(kind, str):
    weight = Tensor(rng.standard_normal((80, K), np.float32)).cast(kind).contiguous().float().numpy()   # rounded
    layer.weight = on_device(reorder(weight, layer.weight.shape)).cast(kind).realize()
  else:
    scale, offset = rng.random((2, 80, 6)).astype(np.float16)
    quantized = Quantized(rng.integers(0, 16, (80, K), np.uint8).view(kind), scale, offset, np.arange(K))
    store(layer, quantized)
    weight = dequantize(quantized, np.float64)
  outputs = {rows: layer(on_device(random_x(ROWS)[:rows])).numpy() for rows in (1, 3, 8, ROWS)}
  check(outputs[ROWS], random_x(ROWS) @ weight.astype(np.float64).T + layer.bias.numpy())
  for rows, output in outputs.items(): np.testing.assert_array_equal(output, outputs[ROWS][:rows])


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_experts_equal_numpy(num_tokens):
  """With few tokens, each row has its own group."""
  layer, x, count = FastExperts(K, {"w": 4 * 48}, False, dtypes.float32, num_experts=4), random_x(num_tokens), 4
  w = make_layer(layer, "int8", 32)
  ids = np.random.default_rng(1).permuted(np.tile(np.arange(count, dtype=np.int32), (num_tokens, 1)), axis=1)[:, :2]
  output = layer.multiply(on_device(x), row_groups=layer.group_rows(Tensor(ids)), count=ids.size).numpy()
  of_experts = multiply(layer, w, x).reshape(num_tokens, count, -1)
  check(output, np.take_along_axis(of_experts, ids[:, :, None], 1).reshape(ids.size, -1))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_engine_outputs_do_not_depend_on_batch_or_chunks(tmp_path, quantization):
  folder = tiny_model(tmp_path, hidden_size=64, intermediate_size=96)
  whole, chunked = [LLM(folder, **ENGINE | {"max_num_batched_tokens": n}, quantization=quantization) for n in (64, 6)]
  assert all(layer.down_proj.has_8bit_inputs for layer in whole.runner.model.layers)
  prompts = [prompt(n) for n in (3, 17, 9)]
  expected = [ids_of_batch(whole, [ids], greedy(8))[0] for ids in prompts]
  assert expected == ids_of_batch(chunked, prompts, greedy(8)) == ids_of_batch(whole, prompts, greedy(8))


@pytest.mark.parametrize(("kind", "needs"), [("int8", "a CPU with clang"), ("fp8", "DEV=CUDA and Hopper")])
def test_quantized_activations_are_refused_on_other_devices(tmp_path, monkeypatch, kind, needs):
  monkeypatch.setattr(hub, "speaks_c", lambda: False)
  with pytest.raises(ValueError, match=f"activation_quantization='{kind}' needs {needs}: use 'auto'"):
    LLM(tiny_model(tmp_path), **ENGINE, activation_quantization=kind)


# Attention

@each_cpu
@pytest.mark.parametrize(("shape", "block_size", "kind"), [
  ((3, 3, 64), 16, "auto"), ((1, 5, 80), 4, "int8"), *slow(((2, 1, 12), 10, "auto"), ((1, 60, 128), 256, "fp8"))])
def test_attention_equals_numpy(monkeypatch, cpu, shape, block_size, kind):
  use_cpu(monkeypatch, cpu)
  check_attention("C", [(69, 1), (0, 1), (140, 70), (63, 3)], shape, 2e-5, kind, num_tokens=80, block_size=block_size)


@each_cpu
@pytest.mark.parametrize("options", [{}, {"window": 70, "cap": 1.5}])
def test_rows_do_not_depend_on_batch_or_chunks(monkeypatch, cpu, options):
  """Tokens of two sequences, at once, in steps of 7, and one at a time."""
  use_cpu(monkeypatch, cpu)
  rng, (KV, G, D), n = np.random.default_rng(0), (2, 3, 40), 130
  cache = [on_device(rng.standard_normal((27, KV, *size), np.float32)) for size in ((D, 16), (16, D))]
  q, table = rng.standard_normal((2 * n, KV, G, D), np.float32), on_device(np.arange(27, dtype=np.int32).reshape(3, 9))
  tokens = token_rows([*range(n)] * 2, [0] * n + [1] * n, [0] * 2 * n)
  def attend(i: int, size: int) -> np.ndarray:
    x = on_device(q[i:i + size])
    return attention.read({"out": x.empty_like(), "q": x, "keys": cache[0], "values": cache[1], "table": table,
                         "tokens": on_device(tokens[:, i:i + size])}, attention.ScoreOptions(**options)).numpy()
  together = attend(0, 2 * n)
  for size in (7, 1):
    np.testing.assert_array_equal(np.concatenate([attend(i, size) for i in range(0, 2 * n, size)]), together)
