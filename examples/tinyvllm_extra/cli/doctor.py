"""`tinyvllm doctor`: test each tinygrad backend on this machine; report which one the engine uses and why, and which
models fit. Each backend runs in its own process, since a driver may hang or crash. The bandwidth test runs the
engine's matmul, so that it predicts the engine's speed. `--tune` measures the tiles of matrix kernels in a model's
shapes, for steps that decode, and keeps the fastest ones in the file of programs.tiles_path."""
import copy, importlib.metadata, json, os, pathlib, platform, re, shlex, shutil, signal, subprocess, sys, time, typing
from collections.abc import Callable, Sequence

import numpy as np
from tinygrad import Context, Device, Tensor, TinyJit, dtypes, helpers, nn
from tinygrad.device import ALL_DEVICES

from tinyvllm import __version__
from tinyvllm.backend import Devices, Linear
from tinyvllm.config import InputError, JsonObject, check, read_json
from tinyvllm_extra import models, programs
from tinyvllm_extra.formats import fit, gguf, hub
from tinyvllm_extra.kernels import drivers, kernel_cache, make_backend, matmul
from tinyvllm_extra.models.matrices import NUMBER_FORMATS
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.programs import prepare_tuned_device, tiles_path

LIMIT = 90   # timeout of a backend's process, in seconds
BUFFER = 2**28   # maximum size of the weights that a measurement reads, in bytes: more than caches hold
INPUTS = 4096    # number of input features of the weights
ROWS = (1, 8, 16, 32, 64)   # tokens of a step that --tune measures
GAIN = 1.03      # minimum gain of a choice of tiles
KERNELS = 64     # products in a graph, so that it takes longer than its launch
WORDS = {"True": "yes", "False": "no"}
ORDER = [name for name in ALL_DEVICES if name != "DSP"]


# Code that runs in a backend's process

def probe(seconds: float) -> None:
  """Open the backend that the variable DEV names, or tinygrad's default. Print its properties as a line of JSON and,
  unless `seconds` is 0, its bandwidth as another one: a crash loses only later lines."""
  def emit(**facts: object) -> None: print("\n" + json.dumps({"doctor": facts}), flush=True)
  try:
    facts = fit.open_device()
    best = make_backend()
    total = drivers.device_memory(Device.DEFAULT).total
    most = best.memory.largest_tensor()
    emit(opens=True, device=drivers.device_name(Device.default), **facts, total_gib=total / fit.GIB,
         renderer=f"{Device.DEFAULT} {type(Device.default.renderer).__name__}", largest_gib=min(total, most) / fit.GIB)
    size = min(BUFFER, most, int(facts["free_gib"] * fit.GIB) // 4)
    if seconds: emit(gb_per_s=bandwidth(best.Linear, size, getattr(dtypes, facts["dtype"]), seconds) / 1e9)
  except Exception as error: emit(reason=reason_of(error))   # backends raise various exceptions


def reason_of(error: BaseException) -> str:
  """Return an error's message on one line."""
  cause = error.__cause__ or error   # prepare_device wraps errors; a backend with several drivers raises a group
  return "; ".join(dict.fromkeys(str(e).split("\n")[0] or repr(e) for e in getattr(cause, "exceptions", [cause])))


def seconds_per_layer(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor, seconds: float) -> float:
  """Return the median duration of a product of x with one of the layers, which a graph computes together. Its calls
  take at least `seconds` together."""
  graph, durations = TinyJit(lambda: Tensor.realize(*[layer(x) for layer in layers])), list[float]()
  while len(durations) < 3 or sum(durations[2:]) < seconds:   # the first two calls compile and capture
    started = time.perf_counter()
    with Context(JIT_BATCH_SIZE=0): graph()
    Device[Device.DEFAULT].synchronize()
    durations.append(time.perf_counter() - started)
  return float(np.median(durations[2:])) / len(layers)


def bandwidth(layer_type: type[Linear], size: int, dtype: typing.Any, seconds: float) -> float:
  """Return the median memory bandwidth, in bytes per second, of a backend's x @ W.T in a graph. size: bytes of W. On a
  fast device the graph reads W 16 times, like a model's layers: a single read would measure the host."""
  linear = layer_type(INPUTS, {"W": size // INPUTS // dtype.itemsize // 16 * 16}, False, dtype)
  linear.weight = linear.weight.contiguous().realize()
  x = Tensor.empty(1, INPUTS, dtype=dtype).contiguous().realize()
  is_fast = seconds_per_layer([linear], x, 0) < 2e-3
  return linear.weight.nbytes() / seconds_per_layer([linear] * (16 if is_fast else 1), x, seconds)


# --tune

def copies_of(layer: matmul.FastLinear, quantization: str | None) -> list[matmul.FastLinear]:
  """Return KERNELS layers, copies of one for tensor cores with zeros as weights. The same copy returns after BUFFER
  bytes of weights or more. quantization: "int8" or "int4" for a matrix in layers, or None."""
  if quantization and fit.is_in_layer(next(iter(layer.sources))):
    layer.number_format = NUMBER_FORMATS[np.dtype({"int8": np.int8, "int4": np.uint8}[quantization])]
    (tiles, parts), bits = layer.weight.max_shape[:2], layer.number_format.bits
    layer.weight = Tensor.empty(tiles, parts, 8, 4, bits // 2, dtype=dtypes.uint32)
    # int8 has no offset
    layer.scales = {x: Tensor.empty(tiles, parts, 8, 2, dtype=dtypes.half) for x in ("scale", "offset")[:8 // bits]}
  for x in nn.state.get_parameters(layer): x.replace(x.zeros_like().contiguous().realize())
  layer.flags = matmul.new_flags(Device.DEFAULT)
  copies = [copy.copy(layer) for _ in range(min(KERNELS, 1 + BUFFER // layer.weight.nbytes()))]
  for other in copies: other.weight = layer.weight.clone().realize()
  return (copies * KERNELS)[:KERNELS]


def choose(layers: list[matmul.FastLinear], x: Tensor, kept: dict[str, str]) -> JsonObject:
  """Add the fastest tiles for products of x with the same matrix to `kept`. Return facts for the report. The products
  in a graph share the buffer of their results, so that none starts before another has ended."""
  def measure(tiles: matmul.Tiles) -> float:   # microseconds, in calls that take at least 0.1 s together
    matmul.choices = {key: str(tiles)}
    return 1e6 * seconds_per_layer(layers, x, 0.1)
  key, (built_in, *others) = matmul.candidates(layers[0], x)
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
  kept = {**prepare_tuned_device()}
  backend = make_backend()
  config, model_class = models.choose_model(hf, pathlib.Path(name))
  model = model_class(config, getattr(dtypes, backend.pick_dtype("auto", config)), backend, Devices())
  layers = {(type(x), x.weight.shape, x.axis): x for x in model.modules()
            if isinstance(x, matmul.FastLinear) and x.num_experts == 1 and x.weight.ndim == 8}
  check(layers, f"DEV={Device.DEFAULT} has nothing to tune for {name}: only CUDA's tensor cores have several kernels")
  report: list[JsonObject] = []
  for layer in helpers.tqdm(layers.values(), desc="measuring", disable=None):
    copies = copies_of(layer, fit.prequantized(hf) or quantization)
    for x in [Tensor.ones(T, 32 * layer.weight.max_shape[1], dtype=model.dtype).contiguous().realize() for T in ROWS]:
      report.append({"matrix": ", ".join(name.rpartition(".")[2] for name in layer.sources), **choose(copies, x, kept)})
  kernel_cache.write(tiles_path(), json.dumps(kept, indent=1).encode())
  check(prepare_tuned_device() == kept, f"{tiles_path()} cannot be written: set CACHEDB to a file in another folder")
  return report


# Code that runs in the user's process, which opens no device

def run_probe(dev: str, seconds: float) -> JsonObject:
  """Run `probe` in a process and return its facts. dev: backend, or "" for tinygrad's default."""
  try: done = subprocess.run([sys.executable, "-c", f"from tinyvllm_extra.cli import doctor; doctor.probe({seconds})"],
                             env={**os.environ, "DEV": dev}, capture_output=True, timeout=LIMIT + seconds)
  except subprocess.TimeoutExpired: return {"opens": False, "reason": f"no answer within {LIMIT + seconds:.0f} s"}
  facts: JsonObject = {"opens": False}
  code = done.returncode
  if code: facts["reason"] = f"the process ended with {signal.strsignal(-code) if code < 0 else f'exit code {code}'}"
  for line in re.findall(r'(?m)^{"doctor": (.*)}$', done.stdout.decode(errors="replace")): facts |= json.loads(line)
  return facts


def make_report(seconds: float, models: dict[str, JsonObject], kv_cache_dtype: str) -> JsonObject:
  """Test all backends and return the report. models: the content of config.json, by name."""
  dev = os.environ.get("DEV", "")
  backends = [{"backend": name} | run_probe(name, seconds) for name in dict.fromkeys([*ORDER, dev.upper()]) if name]
  default = run_probe(dev, 0)
  opened = [row for row in backends if row["opens"]]
  default_rows = [row for row in opened if row["renderer"] == default.get("renderer")]
  why = f"DEV={dev}" if dev else default.get("why") or f"the first of {', '.join(ORDER)} that opens"
  machine = {"tinyvllm": __version__, "tinygrad": importlib.metadata.version("tinygrad"),
             "python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count(),
             "free_gib": drivers.host_memory().free / fit.GIB, "total_gib": drivers.host_memory().total / fit.GIB}
  compiler = shutil.which(programs.find_compiler() or "")
  version = subprocess.getoutput(shlex.join([compiler, "--version"])).split("\n")[0] if compiler else ""
  return {"machine": machine, "compiler": {"path": compiler, "version": version}, "backends": backends,
          "chosen": default_rows[0]["backend"] if default_rows else None,
          "why": why if default_rows else f"{why}: {default.get('reason', 'it failed in the second test')}",
          "fit": [fit.estimate_fit(name, hf, row, LLMConfig(quantization=x, kv_cache_dtype=kv_cache_dtype))
                  for row in (default_rows or opened)[:1] for name, hf in models.items()
                  for x in ([None] if fit.prequantized(hf) else [None, *fit.QUANTIZED])]}


def table(rows: list[JsonObject], *columns: str) -> list[str]:
  """Return the lines of a table, header first. columns: keys of the rows to print (default: all)."""
  def show(x) -> str: return f"{x:.{1 if x > 10 else 3}f}" if type(x) is float else WORDS.get(str(x), str(x)[:36])
  names = columns or [*dict.fromkeys(name for row in rows for name in row)]
  cells = [names, *[[show(row.get(name, "-")) for name in names] for row in rows]]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return ["  ".join(x.ljust(n) for x, n in zip(line, widths, strict=True)).rstrip() for line in cells]


def format_report(report: JsonObject) -> list[str]:
  """Return the report as lines of text."""
  rows = [row for row in report["backends"] if "reason" not in row]
  head, *lines = table(rows, "backend", "device", *fit.DTYPES, "free_gib", "total_gib", "largest_gib", "gb_per_s")
  lines = [f"{row['backend']:7}  {'opens, but its test failed' if row['opens'] else 'does not open'}: {row['reason']}"
           if "reason" in row else lines.pop(0) for row in report["backends"]]
  best = max(rows, key=lambda row: row["gb_per_s"])["backend"] if rows else None
  found = report["compiler"]["path"] or f"none; the CPU backend needs one: {programs.clang_command()}"
  return [*table([report["machine"]]), "", f"C compiler: {found}",
          report["compiler"]["version"], "", head, *lines, "", f"default backend: {report['chosen']} ({report['why']})",
          f"fastest backend: {best} (to use it, set DEV={best})", "", *table(report["fit"]),
          *(["", f"checkpoint: {report['checkpoint']}"] if "checkpoint" in report else [])]


def read_model(path: pathlib.Path, runner: str = "auto") -> tuple[JsonObject, JsonObject]:
  """Open a folder or a GGUF file. Return the content of config.json, which for GGUF has the mean bits of the layers'
  matrices on the device, rounded to 4 or 8, and an entry of the report. runner: LLM's option. Raises InputError if it
  is not usable."""
  try:
    checkpoint = hub.open_checkpoint(path)
    hf = checkpoint.hf_config
    models.choose_model(hf, path, runner)
  except InputError: raise
  except Exception as error: raise InputError(f"model={str(path)!r}: {reason_of(error)}") from error
  # config.json alone suffices for the fit
  description = {"checkpoint": checkpoint.describe()} if path.is_file() or any(path.glob("*.safetensors")) else {}
  if not isinstance(checkpoint, gguf.GGUFCheckpoint) or checkpoint.method != "gguf": return hf, description
  matrices = [x for name, x in checkpoint.all_tensors.items() if ".layers." in name and len(x.shape) == 2]
  bits = np.average([x.tensor_type.bits for x in matrices], weights=[np.prod(x.shape) for x in matrices])
  return hf | {"quantization_config": {"bits": 4 if bits < 6 else 8}}, description


def main(args: JsonObject) -> int:
  """Run `tinyvllm doctor`. Return the exit code: 0, or 1 if no backend opens. Raises InputError for a bad option."""
  seconds, model = args["seconds"], args["model"]
  check(0 < seconds <= 60, f"seconds={seconds} must be above 0 and at most 60")
  models = read_json(pathlib.Path(__file__).parent / "shapes.json")
  description: JsonObject = {}
  path = pathlib.Path(model or "").expanduser()
  check(model in models or path.exists() or path.suffix == ".gguf",
        f"model={model!r} must be a folder, a GGUF file or one of {', '.join(models)}")
  if model and model not in models: models[model], description = read_model(path)
  if args["tune"]:
    name = model or "Llama-3.2-1B"
    rows = tune(name, models[name], args["quantization"])
    print(json.dumps(rows, indent=2) if args["json"] else "\n".join([*table(rows), "", f"kept in {tiles_path()}"]))
    return 0
  report = make_report(seconds, models, args["kv_cache_dtype"]) | description
  print(json.dumps(report, indent=2) if args["json"] else "\n".join(line[:120] for line in format_report(report)))
  return 0 if any(row["opens"] for row in report["backends"]) else 1
