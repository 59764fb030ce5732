"""Times the candidates of matrix kernels (kernels/schedule.choose) with random weights in a checkpoint's format."""
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit
from tinygrad.dtype import DType

from tinyvllm.backend import Linear, Module, Norm, cpu_cores
from tinyvllm.config import JsonObject, logger
from tinyvllm.llama import Checkpoint
from tinyvllm_extra.kernels import schedule
from tinyvllm_extra.kernels.matmul import FastGateUp, FastLinear
from tinyvllm_extra.models.quantized import Matrix
from tinyvllm_extra.models.stored_weights import StoredWeights

from .fit import is_in_layer
from .quantization import map_rows, quantize, to_float32
from .weights import to_device

ROUNDS = 10   # in each, all candidates run once
GAIN = 1.03   # minimum gain of a choice, in each half of the rounds


class RandomWeights(StoredWeights, Checkpoint):
  """Weights of a model with this config.json. quantization: "int8" or "int4" for the matrices in layers, or None."""
  has_8bit_inputs = True

  def __init__(self, hf: JsonObject, quantization: str | None):
    floats = np.random.default_rng(0).standard_normal(2**16 - 1, np.float32)
    halves = {"float16": floats.astype(np.float16), "bfloat16": (floats.view(np.uint32) >> 16).astype(np.uint16)}
    self.numbers: np.ndarray = halves.get(hf.get("dtype") or hf.get("torch_dtype") or "", floats)
    self.bits = {"int8": 8, "int4": 4}.get(quantization or "", 0)

  def vectors(self, module: Module, suffix: str) -> list[np.ndarray]:
    return [np.zeros(sum(module.sources.values()), np.float32)]

  def matrices(self, module: Linear) -> list[Matrix]:
    block: Matrix = np.resize(self.numbers, (16, module.weight.max_numel() // module.out_features))
    if self.bits and is_in_layer(next(iter(module.sources))): block = quantize(to_float32(np.asarray(block)), self.bits)
    return [map_rows(lambda x: np.resize(x, (module.out_features, x.shape[1])), block)]

  def place(self, module: Module, arrays: Sequence[np.ndarray], dtype: DType | None = None) -> Tensor:
    return to_device(np.ascontiguousarray(arrays[0]), dtype, Device.DEFAULT).realize()


def capture(layers: list[FastLinear], x: Tensor, norm: Norm) -> Callable:
  """Capture the product of x with each layer and, where it may use split-K, the norm that adds the parts."""
  layer = layers[0]
  activation = layer.activation if isinstance(layer, FastGateUp) and layer.weight.ndim > 3 else ""
  height, width = FastLinear.__call__(layer, x).shape[0], layer.out_features // (2 if activation else 1)
  out, total = [Tensor.zeros(n, width, dtype=x.dtype).contiguous().realize() for n in (height, x.shape[0])]

  def step() -> Tensor:
    product, residual = out, total
    for layer in layers:   # all write the same buffer, so that a GPU runs them one after the other
      product = layer.multiply(product, x, activation=activation)
      if layer.axis == 1: residual, _ = norm.add(residual, product)
    return product.realize(residual)
  graph = TinyJit(step)
  with Context(JIT_BATCH_SIZE=0):
    for _ in range(3): graph()   # compiles, captures, runs
  return graph


def candidates(capture_graph: Callable[[], Callable]) -> tuple[str, dict[str, Callable]]:
  """Return the key of the choice in a graph, or "" for a graph without one, and the graph with each candidate, by its
  `str`, the built-in one first. Changes `choices`."""
  schedule.choices = {}
  schedule.candidates.clear()
  graph = capture_graph()
  key, texts = next(((key, [*map(str, x)]) for key, x in schedule.candidates.items()), ("", [""]))
  graphs = {texts[0]: graph}
  for text in [*dict.fromkeys(texts)][1:]:
    schedule.choices = {key: text}
    try: graphs[text] = capture_graph()
    except Exception as error: logger.warning(f"{key}: {text} fails: {error}")   # compilers raise various ones
  return key, graphs


def measure(graphs: dict[str, Callable], count: int) -> dict[str, list[float]]:
  """Return the microseconds per product of each graph in each round. count: products in a graph."""
  launches = 1 if cpu_cores() else 4
  times: dict[str, list[float]] = {text: [] for text in graphs}
  for text, graph in [*graphs.items()] * ROUNDS:
    started = time.perf_counter()
    for _ in range(launches): graph()
    Device[Device.DEFAULT].synchronize()
    times[text].append(1e6 * (time.perf_counter() - started) / launches / count)
  return times


def best_of(times: dict[str, list[float]]) -> tuple[str, float, float]:
  """Return the fastest candidate, or the first one, if no other is faster by GAIN in both halves of the rounds, and the
  medians of the first one and of it."""
  first, *_ = times
  def gain(x: str) -> float: return min(median(times[first][half::2]) / median(times[x][half::2]) for half in (0, 1))
  best = max(times, key=lambda x: gain(x) if gain(x) >= GAIN else 0)
  return best, median(times[first]), median(times[best])
