"""`tinyvllm doctor --tune`: measure the matrix kernels in a model's shapes, for steps that decode, and keep the fastest
ones in the file of formats/tuned_file.py."""
import copy, functools, pathlib, re

from tinygrad import Device, Tensor, dtypes, helpers

from tinyvllm.backend import Devices, cpu_cores
from tinyvllm.config import JsonObject, check
from tinyvllm_extra import kernels
from tinyvllm_extra.formats import fit, tuned_file, tuning
from tinyvllm_extra.kernels.matmul import FastGateUp, FastLinear
from tinyvllm_extra.models import find_model

ROWS = (1, 8, 16, 32, 64)
COPIES = 2**28   # bytes of all copies of a matrix, more than caches hold
KERNELS = 32     # maximum copies, and on a GPU minimum kernels of a graph, so that it takes longer than its launch


def tune(name: str, hf: JsonObject, quantization: str | None) -> list[JsonObject]:
  """Measure the matrices of a model, and write the file. Return a row of the report per matrix and number of rows. hf:
  the content of config.json. quantization: of a model that is not pre-quantized, "int8", "int4" or None."""
  kept = tuned_file.prepare_device()
  backend = kernels.make_backend()
  config, model_class = find_model(hf, pathlib.Path(name))
  model = model_class(config, getattr(dtypes, backend.pick_dtype("auto", config)), backend, Devices())
  weights = tuning.RandomWeights(hf, fit.prequantized(hf) or quantization)
  model.norm = backend.Norm("norm", config.hidden_size, 1e-5, model.dtype)   # GPT-2 has another kind
  model.norm.load(weights)
  layers = {(type(x), x.weight.shape, x.axis): x for x in model.modules()
            if isinstance(x, FastLinear) and type(x) in (FastLinear, FastGateUp)}
  report: list[JsonObject] = []
  for layer in helpers.tqdm([*layers.values()], desc="measuring", disable=None):
    shapes = [(T, layer.weight.max_numel() // layer.out_features) for T in ROWS]   # x of each product
    layer.load(weights)
    copies = [copy.copy(layer) for _ in range(min(KERNELS, 1 + COPIES // layer.weight.nbytes()))]
    for other in copies: other.weight = layer.weight.clone().realize()
    if not cpu_cores(): copies *= -(-KERNELS // len(copies))
    for x in [Tensor.ones(*shape, dtype=model.dtype).contiguous().realize() for shape in shapes]:
      key, graphs = tuning.candidates(functools.partial(tuning.capture, copies, x, model.norm))
      if not key: continue   # the kernel has no candidates
      best, *times = tuning.best_of(tuning.measure(graphs, len(copies)))
      kept = kept | {key: best}
      report.append({"matrix": ", ".join(name.rpartition(".")[2] for name in layer.sources), "rows": x.shape[0],
                     "candidates": len(graphs), "built_in_us": times[0], "best_us": times[1],
                     "gain_percent": 100 * (times[0] / times[1] - 1), "choice": re.sub(r"m.*?, |\w+=|Tiles", "", best)})
  check(report, f"DEV={Device.DEFAULT} has nothing to tune: the kernels of {name} have no candidates there")
  tuned_file.write(kept)
  return report
