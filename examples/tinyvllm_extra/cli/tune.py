"""`tinyvllm doctor --tune`: measure the tiles of matrix kernels in a model's shapes, for steps that decode, and keep
the fastest ones in the file of formats/tuning.py."""
import json, pathlib, re, statistics, time
from collections.abc import Callable

from tinygrad import Context, Device, Tensor, TinyJit, dtypes, helpers

from tinyvllm.backend import Devices
from tinyvllm.config import JsonObject, check
from tinyvllm_extra.formats import architecture, fit, tuning
from tinyvllm_extra.kernels import kernel_cache, make_backend, matmul, products

ROWS = (1, 8, 16, 32, 64)
GAIN = 1.03   # minimum gain of a choice


def seconds_per_call(step: Callable[[], object], seconds: float) -> float:
  """Return the median duration of a step in a graph, in calls that take at least `seconds` together."""
  graph, durations = TinyJit(step), list[float]()
  while len(durations) < 3 or sum(durations[2:]) < seconds:   # the first two calls compile and capture
    started = time.perf_counter()
    with Context(JIT_BATCH_SIZE=0): graph()
    Device[Device.DEFAULT].synchronize()
    durations.append(time.perf_counter() - started)
  return statistics.median(durations[2:])


def choose(layers: list[matmul.FastLinear], x: Tensor, kept: dict[str, str]) -> JsonObject:
  """Add the fastest tiles for products of x with the same matrix to `kept`. Return facts for the report. The products
  in a graph share the buffer of their results, so that none starts before another has ended."""
  def measure(tiles: products.Tiles) -> float:   # microseconds, in calls that take at least 0.1 s together
    products.choices = {key: str(tiles)}
    return seconds_per_call(lambda: Tensor.realize(*[layer(x) for layer in layers]), 0.1) / len(layers) * 1e6
  key, (built_in, *others) = products.candidates(layers[0], x)
  fastest = min((built_in, *others), key=measure)
  times = {tiles: measure(tiles) for tiles in (built_in, fastest)}   # again, as the fastest of many was also lucky
  best = fastest if GAIN * times[fastest] < times[built_in] else built_in
  kept[key] = str(best)
  sizes = re.sub(r"m.*?, |\w+=|Tiles", "", str(best))
  return {"rows": x.shape[0], "candidates": 1 + len(others), "built_in_us": times[built_in], "best_us": times[best],
          "gain_percent": 100 * (times[built_in] / times[best] - 1), "choice": sizes}


def tune(name: str, hf: JsonObject, quantization: str | None) -> list[JsonObject]:
  """Measure the matrices of a model, and write the file. Return a row of the report per matrix and number of rows. hf:
  the content of config.json. quantization: of a model that is not pre-quantized, "int8", "int4" or None."""
  kept = {**tuning.prepare_device()}
  backend = make_backend()
  config, model_class = architecture.choose_model(hf, pathlib.Path(name))
  model = model_class(config, getattr(dtypes, backend.pick_dtype("auto", config)), backend, Devices())
  layers = {(type(x), x.weight.shape, x.axis): x for x in model.modules()
            if isinstance(x, matmul.FastLinear) and x.num_experts == 1 and x.weight.ndim == 8}
  check(layers, f"DEV={Device.DEFAULT} has nothing to tune for {name}: only CUDA's tensor cores have several kernels")
  report: list[JsonObject] = []
  for layer in helpers.tqdm([*layers.values()], desc="measuring", disable=None):
    copies = tuning.copies_of(layer, fit.prequantized(hf) or quantization)
    for x in [Tensor.ones(T, 32 * layer.weight.max_shape[1], dtype=model.dtype).contiguous().realize() for T in ROWS]:
      report.append({"matrix": ", ".join(name.rpartition(".")[2] for name in layer.sources), **choose(copies, x, kept)})
  kernel_cache.write(tuning.path(), json.dumps(kept, indent=1).encode())
  check(tuning.prepare_device() == kept, f"{tuning.path()} cannot be written: set CACHEDB to a file in another folder")
  return report
