"""Shared by the benchmarks: models with random weights in well-known shapes, generated on the device without a
download; random prompts; a watch that records steps and graphs; the measured memory bandwidth and the roofline."""
import argparse
import gc
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes, nn
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.device import Buffer
from tinygrad.engine.jit import CapturedJit
from tinygrad.uop.ops import KernelInfo

sys.path.append(str(Path(__file__).parents[1]))   # tests, for helpers.servers
import tinyvllm
from tinyvllm import LLM, SamplingParams
from tinyvllm.llama import Llama
from tinyvllm_extra.formats.weights import FastCheckpoint
from tinyvllm_extra.text.huggingface import ChatTokenizer
from tinyvllm_extra import graph_policy, programs
from tinyvllm_extra.kernels import drivers, make_backend
from tinyvllm_extra.kernels.matmul import FastLinear, new_flags, scales_shape
from tinyvllm_extra.kernels.parallel import Stages
from tinyvllm_extra.models.matrices import E4M3, NUMBER_FORMATS


# config.json of each shape
SHAPES = json.loads((Path(__file__).parent / "model_shapes.json").read_text())
SHAPES["bundled"] = json.loads((Path(tinyvllm.__file__).parent / "default_model/config.json").read_text())


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
  """Adds the default to a help text, unless the text states it or the option is off by default."""
  def _get_help_string(self, action: argparse.Action) -> str | None:
    has_no_default = action.default is None or action.default is False
    return action.help if has_no_default or "default:" in (action.help or "") else super()._get_help_string(action)


def make_parser(doc: str) -> argparse.ArgumentParser:
  """Return a parser with the options that all benchmarks share."""
  parser = argparse.ArgumentParser(description=doc, formatter_class=Formatter)
  parser.add_argument("--shape", choices=SHAPES, default="bundled", help="model shape, filled with random weights")
  parser.add_argument("--model", metavar="DIR", help="model folder; its own weights are loaded")
  parser.add_argument("--layers", type=positive, help="number of layers, for a quick check; weights are then random, "
                      "with --model too (in the shape of its config.json)")
  parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "float16", "bfloat16"),
                      help="data type of weights and KV cache; auto: float32 on CPU, else float16")
  parser.add_argument("--quantization", choices=("int8", "int4", "fp8"), help="quantize the layers' matrices while "
                      "loading; fp8: random weights as in an FP8 checkpoint with a scale per output")
  parser.add_argument("--activation-quantization", choices=("auto", "fp8", "none"), default="auto",
                      help="data type of activations, see LLM")
  parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8", "int8"), default="auto",
                      help="data type of the KV cache")
  for x in ("tensor", "pipeline"): parser.add_argument(f"--{x}-parallel-size", type=positive, default=1, help="devices")
  parser.add_argument("--max-num-batched-tokens", type=positive, default=512, help="maximum tokens per step")
  parser.add_argument("--seed", type=int, default=0, help="seed of prompts and arrival times")
  return parser


def positive(text: str) -> int:
  if (value := int(text)) < 1: raise argparse.ArgumentTypeError(f"{text} must be at least 1")
  return value


def add_workload(parser: argparse.ArgumentParser, output_len: int, input_len: int = 128) -> None:
  parser.add_argument("--input-len", type=positive, default=input_len, help="tokens per prompt")
  parser.add_argument("--output-len", type=positive, default=output_len, help="output tokens per prompt")


HOST_COLUMNS = ["host ms", "launch ms", "wait ms"]


def add_host(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--host", action="store_true", help="also print a step's milliseconds in Python, in launching "
                      "its graph (on a CPU: running it), and waiting for its result")


def host_columns(steps: list) -> list[str]:
  return [f"{1e3 * statistics.median(getattr(s, name) for s in steps):.2f}" for name in ("host", "launch", "wait")]


def hf_config(args: argparse.Namespace) -> dict:
  """Return the model's config.json with num_hidden_layers set to --layers."""
  path = Path(args.model or "").expanduser() / "config.json"
  if args.model and not path.exists(): raise SystemExit(f"--layers needs a folder with config.json: no {path}")
  config = json.loads(path.read_text()) if args.model else dict(SHAPES[args.shape])
  return {**config, "num_hidden_layers": args.layers or config["num_hidden_layers"]}


def open_llm(args: argparse.Namespace, padded: bool = False, **options) -> LLM:
  """Return an engine of the model in `args`. The prefix cache is off by default, because runs repeat their prompts.
  padded: pad a new graph shape to a captured one, as a server does. Otherwise capture each shape at its first use, so
  that a warm-up captures all of them."""
  if not padded: graph_policy.CAPTURE_THRESHOLD = 0
  if running := options.get("max_num_seqs"):
    options = {"max_num_batched_tokens": max(args.max_num_batched_tokens, running), **options}
  options = {"enable_prefix_caching": False, "quantization": args.quantization, "kv_cache_dtype": args.kv_cache_dtype,
             "activation_quantization": args.activation_quantization, "tensor_parallel_size": args.tensor_parallel_size,
             "pipeline_parallel_size": args.pipeline_parallel_size, **options}
  if args.layers is None and (args.model or not args.shape): return LLM(args.model, dtype=args.dtype, **options)
  with model_folder(hf_config(args)) as folder, random_weights(): return LLM(folder, dtype=args.dtype, **options)


@contextmanager
def model_folder(config: dict) -> Iterator[str]:
  """Yield a temporary folder with this config.json."""
  with TemporaryDirectory() as folder:
    (Path(folder) / "config.json").write_text(json.dumps(config))
    yield folder


class RandomCheckpoint(FastCheckpoint):
  """A checkpoint that needs only config.json: random weights, and a tokenizer that decodes each id to one letter."""
  def describe(self) -> str: return "random weights"

  def tokenizer(self) -> ChatTokenizer:
    def decode(ids: list[int]) -> str: return "".join(chr(97 + i % 26) for i in ids)
    return ChatTokenizer(lambda *_: [3], decode, lambda: {"a": 0}, lambda i: decode([i]), {}, set(), {}, None)

  def load(self, model: Llama) -> None: fill_weights(model, self.quantization, self.activations)


class OwnWeights(RandomCheckpoint):
  """A model folder with its own weights, but no tokenizer."""
  load = FastCheckpoint.load


def random_weights(checkpoint: type[FastCheckpoint] = RandomCheckpoint) -> AbstractContextManager:
  """Return a context in which models and draft models load through `checkpoint`."""
  def open_checkpoint(path: Path, quantization: str | None, activations: str, *_: object) -> FastCheckpoint:
    opened = checkpoint(path)
    opened.quantization, opened.activations = quantization, activations
    return opened
  return patch("tinyvllm_extra.formats.hub.open_checkpoint", open_checkpoint)


_filled: dict[tuple, Tensor] = {}   # weights shared by consecutive engines


def fill_weights(model: Llama, quantization: str | None, activations: str) -> None:
  """Fill norm weights with 1, biases with 0, quantized matrices with random bits, and all other weights with uniform
  noise (standard deviation 0.02)."""
  if isinstance(model.devices, Stages):
    model.devices.place(model, lambda modules: sum(x.nbytes() for x in nn.state.get_parameters(modules)))
  matrices = [x for layer in model.layers for x in vars(layer).values() if isinstance(x, FastLinear) and quantization]
  for matrix in matrices:
    plain = matrix.weight.shape
    matrix.number_format = NUMBER_FORMATS[{"fp8": E4M3, "int4": numpy.dtype("u1")}.get(quantization, numpy.dtype("i1"))]
    bits, is_e4m3 = matrix.number_format.bits, matrix.number_format.is_float
    lanes = len(plain) == 8   # the layout for tensor cores, packed in 32-bit words
    shape = (*plain[:2], 8, 4, bits // 2) if lanes else (plain[0], plain[1] * bits // 32 if bits == 4 else plain[1], 16)
    unsigned = dtypes.uint32 if lanes or bits == 4 else dtypes.uint8
    kind = {(4, True): dtypes.int32, (1, False): dtypes.int8}.get((unsigned.itemsize, is_e4m3), unsigned)
    mask = 0xb7b7b7b7 if is_e4m3 else 2**32 - 1   # no NaN
    scales = scales_shape(plain, 1 if is_e4m3 else math.prod(plain) // plain[0] // 16 // 32)
    matrix.has_e4m3_inputs = activations == "fp8"
    def random_bits(device: str, shape=shape, unsigned=unsigned, kind=kind, mask=mask) -> Tensor:
      levels = 2.0**(8 * unsigned.itemsize)
      noise = (_noise(math.prod(shape), 1, device) * levels).cast(unsigned) & mask % 2**(8 * unsigned.itemsize)
      return noise.bitcast(kind).reshape(shape).clone()
    matrix.weight = _on_each(random_bits, matrix.weight.device, "quantized", shape, kind).clone().realize()
    matrix.scales = {name: _on_each(lambda device, x=x, scales=scales: Tensor.full(
      scales, x, dtype=dtypes.float16, device=device).clone(), matrix.weight.device, "scales", scales, x)
      for name, x in ({"scale": 0.004, "offset": -0.03} if bits == 4 else {"scale": (0.0003, 12.8)[is_e4m3]}).items()}
  tensors = {id(tensor): (f"{i}.{name}", tensor) for i, module in enumerate(model.modules())
             for name, tensor in nn.state.get_state_dict(module).items()}
  quantized_ids = {id(x) for matrix in matrices for x in (matrix.weight, *matrix.scales.values())}
  for seed, (name, tensor) in enumerate(tensors.values()):
    if id(tensor) in quantized_ids: continue
    kind = model.dtype if dtypes.is_float(tensor.dtype) else tensor.dtype
    def values(device: str, name=name, shape=tensor.shape, kind=kind, seed=seed) -> Tensor:
      if len(shape) == 1: return Tensor.full(shape, float(name.endswith("weight")), dtype=kind, device=device).clone()
      noise = (_noise(math.prod(shape), seed, device) - 0.5) * (0.02 * math.sqrt(12))
      return noise.reshape(shape).cast(kind).clone()   # without clone, every use recomputes arange
    tensor.replace(_on_each(values, tensor.device, name, tensor.shape, kind))
  for module in model.modules():
    if isinstance(module, FastLinear): module.flags = new_flags(module.weight.device)


def _on_each(make: Callable[[str], Tensor], device: str | tuple[str, ...], *key) -> Tensor:
  """Return `make(name)` of each device as one tensor, cached by `key`. device: a tensor's."""
  if (device, *key) not in _filled:
    tensors = [make(name).realize() for name in ((device,) if isinstance(device, str) else device)]
    stack = tensors[0] if len(tensors) == 1 else Tensor(UOp.mstack(*[x.uop for x in tensors])).clone().realize()
    _filled[device, *key] = stack
  return _filled[device, *key]


def _noise(n: int, seed: int, device: str) -> Tensor:
  """Return `n` numbers in [0, 1): a hash of the index, in one kernel without temporary memory."""
  # The seed is a tensor, not a constant, so that tensors of one shape share a kernel
  offset = Tensor([seed * 0x9e3779b9 % 2**32], dtype=dtypes.uint32, device=device)
  x = (Tensor.arange(n, dtype=dtypes.uint32) + offset) * 2654435761
  x = (x ^ (x >> 15)) * 2246822519
  return ((x ^ (x >> 13)) >> 8).float() * 2.0**-24


def first_difference(expected: list[list[int]], ids: list[list[int]]) -> str:
  """Return where the outputs first differ, or an empty string."""
  differences = [(i, prompt, a, b) for prompt, pair in enumerate(zip(expected, ids, strict=True))
                 for i, (a, b) in enumerate(zip(*pair, strict=True)) if a != b]
  return "output token {} of prompt {}: {}, and here {}".format(*min(differences)) if differences else ""


def results_of_process(*arguments: str, **variables: str) -> list[dict]:
  """Return the JSON lines that this script prints in a new process with these arguments and variables."""
  command = [sys.executable, *sys.argv, *arguments]
  run = subprocess.run(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True)
  return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def timed(function: Callable, *args: Any, **options: Any) -> tuple[Any, float]:
  """Call the function; return its result and the seconds it takes."""
  started = time.perf_counter()
  result = function(*args, **options)
  return result, time.perf_counter() - started


def median_seconds(function: Callable, rounds: int) -> float:
  """Return the median seconds of `rounds` calls, each until the device is idle, after a warm-up of three."""
  def run() -> None:
    function()
    Device.default.synchronize()
  return statistics.median([timed(run)[1] for _ in range(rounds + 3)][3:])


def release() -> None:
  """Free the memory of unused engines: the next engine sizes its KV cache by the free memory."""
  gc.collect()
  for name in Device._opened_devices:
    if hasattr(allocator := Device[name].allocator, "free_cache"): allocator.free_cache()


def random_ids(vocabulary: int, n: int, rng: random.Random) -> dict:
  return {"prompt_token_ids": [rng.randrange(3, vocabulary) for _ in range(n)]}


def greedy(tokens: int) -> SamplingParams: return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def make_requests(vocabulary: int, args: argparse.Namespace, n: int) -> list[tuple[dict, SamplingParams]]:
  rng = random.Random(args.seed)
  return [(random_ids(vocabulary, args.input_len, rng), greedy(args.output_len)) for _ in range(n)]


@dataclass
class Step:
  """One engine step, measured from outside."""
  seconds: float
  launch: float      # seconds in calls of graphs
  wait: float        # seconds waiting for results
  outputs: int       # sequences with new tokens
  decode: bool       # True if all running sequences have new tokens and none its first
  context: float     # mean tokens per sequence

  @property
  def host(self) -> float: return self.seconds - self.launch - self.wait


class Watch:
  """Context manager that records an engine's steps, the number of captured graphs, and the last graph call. It wraps
  `advance` and tinygrad's classes, so it does not depend on the runner's code."""
  def __init__(self, llm: LLM):
    self.llm = llm
    self.steps: list[Step] = []
    self.captured = 0
    self.last: tuple | None = None
    self.launch = self.wait = 0.0
    self._inside = False

  def __enter__(self) -> "Watch":
    self._stack = ExitStack()
    self._advance = self.llm.advance
    original, capture = CapturedJit.__call__, CapturedJit.__init__
    def init(*args, **kwargs) -> None:
      self.captured += 1
      capture(*args, **kwargs)
    def call(jit, inputs, values):
      self.last = jit, inputs, values
      return original(jit, inputs, values)
    backend, reading = self.llm.runner.backend, self.llm.runner.backend.start_reading
    for owner, name, value in ((CapturedJit, "__init__", init), (CapturedJit, "__call__", self._timed("launch", call)),
                               (Buffer, "as_memoryview", self._timed("wait", Buffer.as_memoryview)),
                               (backend, "start_reading", lambda x: self._timed("wait", reading(x))),
                               (self.llm, "advance", self._record)):
      self._stack.enter_context(patch.object(owner, name, value))
    return self

  def __exit__(self, *error) -> None: self._stack.close()

  def _timed(self, total: str, function: Callable) -> Callable:
    def timed(*args, **kwargs):
      if self._inside: return function(*args, **kwargs)   # do not count nested calls twice
      self._inside, started = True, time.perf_counter()
      try: return function(*args, **kwargs)
      finally:
        self._inside = False
        setattr(self, total, getattr(self, total) + time.perf_counter() - started)
    return timed

  def _record(self, only: Any = None) -> list:
    launch, wait, started = self.launch, self.wait, time.perf_counter()
    changed = self._advance(only=only)
    seconds = time.perf_counter() - started
    sequences = [seq for request in changed for seq in request.sequences]
    running = self.llm.get_metrics()["num_requests_running"] + sum(seq.finish_reason is not None for seq in sequences)
    decode = len(sequences) == running > 0 and all(seq.num_generated > 1 for seq in sequences)   # else prefill
    self.steps.append(Step(seconds, self.launch - launch, self.wait - wait, len(sequences), decode,
                           statistics.fmean([len(seq.tokens) for seq in sequences] or [0])))
    return changed

  def warn(self) -> None:
    if self.captured: print(f"  warning: {self.captured} graphs were captured during the measurement; run it again")


def make_copy() -> tuple[Callable[[], Tensor], int]:
  """Return a kernel that copies more than the caches hold, and its bytes read plus written. On a GPU each thread copies
  16 bytes: tinygrad's heuristics reach 40% of that bandwidth."""
  gpu = Device[Device.DEFAULT].renderer.has_local
  size = min(2**30 if gpu else 2**28, make_backend().memory.largest_tensor())   # bytes
  source, target = (Tensor.zeros(size // 4).clone().realize() for _ in range(2))
  opts = (Opt(OptOps.UPCAST, 0, 4), Opt(OptOps.LOCAL, 0, 256)) if gpu else None

  def kernel(target: UOp, source: UOp) -> UOp:
    i = UOp.range(size // 4, 0)
    return target[i].store(source[i]).end(i).sink(arg=KernelInfo(name="copy", opts_to_apply=opts))
  copy = TinyJit(lambda: target.custom_kernel(source, fxn=kernel)[0].realize())
  return copy, 2 * size


def measure_bandwidth(repeats: int = 9) -> float:
  """Return the copy kernel's bytes per second, read plus written: the median of `repeats` after a warm-up."""
  copy, size = make_copy()
  calls = 10 if Device.default.renderer.has_local else 1   # on a GPU, many calls hide the launch
  return calls * size / median_seconds(lambda: [copy() for _ in range(calls)], repeats)


def bytes_read(model: Llama, running: int) -> float:
  """Return the bytes of weights that a decode step reads: all except the embedding table, unless it is also the head.
  Experts count by the share that `running` tokens choose if each chooses at random."""
  parts = [part for part in model.modules() if part is not model.embed_tokens or part is model.lm_head]
  def share(part: Any) -> float:
    if getattr(part, "num_experts", 1) == 1: return 1
    return 1 - (1 - model.config.num_experts_per_tok / part.num_experts)**running   # type: ignore[attr-defined]
  return sum({id(t): t.nbytes() * share(part) for part in parts for t in nn.state.get_parameters(part)}.values())


def roofline(llm: LLM, bandwidth: float, running: int, context: float) -> float:
  """Return the minimum seconds of a decode step: reading the weights and the running sequences' KV once, split over
  the devices."""
  embeddings = running * llm.model_config.hidden_size * llm.runner.model.embed_tokens.weight.dtype.itemsize
  return (bytes_read(llm.runner.model, running) + embeddings + token_bytes(llm) * context * running) / bandwidth


def token_bytes(llm: LLM) -> int:
  """Return one device's KV-cache bytes per token, all layers together."""
  return sum(x.nbytes() for x in chain(*llm.runner.kv_caches)) // (llm.runner.num_blocks * llm.config.block_size)


def machine_line() -> str:
  host = f"{drivers.device_name(Device['CPU'])}, {os.cpu_count()} cores"
  device = [] if Device.DEFAULT == "CPU" else [drivers.device_name(Device.default)]
  versions = f"Python {platform.python_version()}, tinygrad {version('tinygrad')}, numpy {numpy.__version__}"
  backend = f"{Device.DEFAULT} ({type(Device.default.renderer).__name__})"
  return ", ".join([host, *device, backend, versions, str(date.today())])


def start(args: argparse.Namespace) -> float:
  """Print machine, model and copy bandwidth; return the bandwidth in bytes per second."""
  programs.prepare_device()
  layers = f", {args.layers} layers" if args.layers else ""
  source = f"{args.model}{', random weights' if args.layers else ''}" if args.model else f"{args.shape}, random weights"
  print(machine_line())
  bandwidth = measure_bandwidth()
  release()
  print(f"{source}{layers}, dtype {args.dtype}; copy bandwidth (the roofline): {bandwidth / 1e9:.1f} GB/s", flush=True)
  return bandwidth


def print_table(header: list[str], rows: list[list[str]]) -> None:
  """Print a table: first column left-aligned, the others right-aligned."""
  widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
  for row in (header, *rows):
    print("  ".join(x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True))))


