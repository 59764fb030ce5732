"""Measure the cost of sampling in a decode step, and of the sampler's functions on the device.

  python tests/benchmarks/sampling.py --shape smollm2-135m --running 8
  python tests/benchmarks/sampling.py --model DIR --running 8 --host
  python tests/benchmarks/sampling.py --device --rows 32 --vocab 128256

Each row is a set of sampling parameters that all running sequences use. Every round measures all rows, so that other
load on the machine affects all of them. Columns:
  ms/step       median decode step of all rounds
  over greedy   median of the rounds' differences to the greedy step
  share         the same in percent of that round's greedy step
  range         minimum and maximum share
Prompts have --context tokens (default 1): with little attention, sampling takes a larger share. Structured outputs need
a tokenizer, so --model.

With --device: microseconds of the token bitmask, of the logit adjustments (256 logits per row) and of sampling, as one
graph over random logits, compared with argmax alone and with reading the logits once.

Targets: 15% of a decode step of eight SmolLM2 sequences on a CPU; 0.3 ms for 32 rows of 128,256 logits on an H200."""
import random
import statistics
import time
from collections.abc import Callable

import common
import numpy as np
from common import LLM, SamplingParams, Watch
from tinygrad import Context, Device, Tensor, TinyJit

from tinyvllm.request import SAMPLING_FIELDS, SamplerMode
from tinyvllm_extra.kernels import make_backend
from tinyvllm_extra.logits import ADJUSTMENTS, adjust_kernel, apply_bitmask, top_logprobs

TARGET_SHARE, TARGET_SECONDS = 0.15, 0.3e-3
BEST = {"temperature": 0.8, "top_k": 50, "top_p": 0.95, "min_p": 0.02}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5,
             "logit_bias": {i: i / 10 for i in range(10, 42)}}
GREEDY, ALL, STRUCTURED = "greedy", "+ penalties, logit_bias, min_tokens", "structured outputs"


def sampling_params(tokens: int) -> dict[str, SamplingParams]:
  def params(**options) -> SamplingParams: return SamplingParams(max_tokens=tokens, **options)
  return {GREEDY: common.greedy(tokens), "temperature": params(temperature=0.8, ignore_eos=True),
          "+ top_k, top_p, min_p": params(**BEST, ignore_eos=True),
          ALL: params(**BEST, **PENALTIES, min_tokens=tokens), "logprobs=5": params(temperature=0.0, ignore_eos=True,
                                                                                    logprobs=5),
          STRUCTURED: params(temperature=0.8, structured_outputs={"regex": "[a-z ]{1,}"})}


def decode_steps(llm: LLM, params: SamplingParams, args, rng: random.Random) -> tuple[list, int]:
  """Return the steps in which all sequences decode, without the first two, and the number of graphs captured meanwhile.
  A finished sequence is replaced: structured outputs may end early."""
  live, number = set[str](), 0
  with Watch(llm) as watch:
    def decoding() -> list: return [s for s in watch.steps if s.decode and s.outputs == args.running][2:]
    while len(steps := decoding()) < args.steps:
      while len(live) < args.running:
        live.add(str(number := number + 1))
        llm.add_request(str(number), common.random_ids(llm.model_config.vocab_size, args.context, rng), params)
      live -= {output.request_id for output in llm.step() if output.finished}
  for request_id in live: llm.abort_request(request_id)
  while llm.has_unfinished_requests(): llm.step()
  return steps, watch.captured


def measure_steps(args) -> None:
  common.release()
  tokens = 2 * args.steps + 8 + args.running
  llm = common.open_llm(args, max_model_len=args.context + tokens, max_num_seqs=args.running,
                        max_num_batched_tokens=max(args.running, args.max_num_batched_tokens))
  names, rng = sampling_params(tokens), random.Random(args.seed)
  has_tokenizer = args.model and args.layers is None
  if not has_tokenizer: del names[STRUCTURED]
  started = time.perf_counter()
  for params in names.values(): decode_steps(llm, params, args, rng)
  print(f"  warm-up and graph captures took {time.perf_counter() - started:.1f} s", flush=True)
  rounds: list[dict[str, list]] = []
  for i in range(args.rounds):
    rounds.append({})
    for name in [*names][::-1 if i % 2 else 1]:   # alternate the order
      rounds[-1][name], captured = decode_steps(llm, names[name], args, rng)
      if captured: print(f"  warning: {captured} graphs were captured in round {i} of {name}; run it again")
  rows = []
  for name in names:
    steps = [s for each in rounds for s in each[name]]
    pairs = [tuple(statistics.median(s.seconds for s in each[x]) for x in (name, GREEDY)) for each in rounds]
    difference, shares = statistics.median(a - b for a, b in pairs), sorted(a / b - 1 for a, b in pairs)
    row = [name, f"{1e3 * statistics.median(s.seconds for s in steps):.2f}", f"{1e3 * difference:+.2f}",
           f"{statistics.median(shares):+.1%}", f"{shares[0]:+.1%} to {shares[-1]:+.1%}"]
    parts = ([s.host for s in steps], [s.launch for s in steps], [s.wait for s in steps]) if args.host else ()
    rows.append(row + [f"{1e3 * statistics.median(part):.2f}" for part in parts])
    if name == ALL: share = statistics.median(shares)
  print(f"{args.running} running, {args.rounds} rounds of {args.steps} decode steps at context {args.context}, "
        f"vocabulary {llm.model_config.vocab_size}")
  common.print_table(["sampling", "ms/step", "over greedy, ms", "share", "range",
                      *(["host ms", "launch ms", "wait ms"] if args.host else [])], rows)
  if not has_tokenizer: print(f"{STRUCTURED}: needs --model and its tokenizer")
  print(f"{ALL}: {share:+.1%} of a greedy step (target: at most {TARGET_SHARE:.0%} for 8 SmolLM2 sequences)")


def timed(function: Callable, inputs: list[Tensor], calls: int) -> Callable[[], float]:
  """Capture `function` as a graph; return a function that queues `calls` calls and returns the seconds per call."""
  graph, device = TinyJit(function), Device[Device.DEFAULT]

  def run() -> float:
    device.synchronize()
    started = time.perf_counter()
    for _ in range(calls): graph(*inputs)
    device.synchronize()
    return (time.perf_counter() - started) / calls
  with Context(JIT_BATCH_SIZE=0):   # same capture setting as the engine's
    for _ in range(4): run()
  return run


def measure_device(args, bandwidth: float) -> None:
  S, V, rng = args.rows, args.vocab, np.random.default_rng(args.seed)
  def tensor(array: np.ndarray) -> Tensor: return Tensor(array).clone().realize()
  def full(value: float, kind: type) -> Tensor: return tensor(np.full(S, value, kind))
  logits = tensor(3 * rng.standard_normal((S, V), np.float32))
  bitmask = tensor(rng.integers(-2**31, 2**31 - 1, (S, -(-V // 32)), np.int32))
  changes = [(row, token, *rng.uniform(0.5, 1, 3)) for row in range(S) for token in range(0, 512, 2)]
  adjustments = tensor(ADJUSTMENTS.write(changes, len(changes)).reshape(ADJUSTMENTS.num_words, -1))
  settings = [full(0.8, np.float32), full(50, np.int32), full(0.95, np.float32), full(0.02, np.float32),
              *(tensor(rng.integers(0, 2**32, S, np.uint32)) for _ in range(2)), full(7, np.int32)]
  ids, inputs, sampler = full(5, np.int32), [logits, bitmask, adjustments], make_backend().sampler

  def best(x: Tensor) -> Tensor: return sampler.argmax(x).contiguous().realize()
  def prepare(x: Tensor, mask: Tensor, by: Tensor) -> Tensor:
    return apply_bitmask(x, mask).contiguous().custom_kernel(by, fxn=adjust_kernel)[0]
  def sample(x: Tensor, *columns: Tensor) -> Tensor:
    rows = dict(zip((*SAMPLING_FIELDS, "seed_low", "seed_high", "position"), columns, strict=True))
    return sampler.sample(x, rows, SamplerMode.FILTERED).contiguous().realize()
  functions: dict[str, tuple[Callable, list[Tensor]]] = {
    "argmax alone": (best, [logits]),
    "mask, adjust, argmax": (lambda *x: best(prepare(*x)), inputs), "sample": (sample, [logits, *settings]),
    "mask, adjust, sample": (lambda *x: sample(prepare(*x[:3]), *x[3:]), [*inputs, *settings]),
    "top_logprobs of 5": (lambda x, ids: top_logprobs(x, ids, 5).realize(), [logits, ids])}
  calls = 20 if Device[Device.DEFAULT].renderer.has_local else 1
  runs = {name: timed(*work, calls) for name, work in functions.items()}
  with Context(JIT_BATCH_SIZE=0): times = [{name: run() for name, run in runs.items()} for _ in range(args.rounds)]
  least, rows = S * V * 4 / bandwidth, []
  for name in functions:
    seconds = sorted(each[name] for each in times)
    ratio = statistics.median(each[name] / each["argmax alone"] for each in times)
    rows.append([name, f"{1e6 * (middle := statistics.median(seconds)):.1f}", f"{1e6 * seconds[0]:.1f} to "
                 f"{1e6 * seconds[-1]:.1f}", f"{ratio:.1f} x", f"{middle / least:.1f} x"])
    if name == "mask, adjust, sample": whole = middle
  print(f"{S} rows of {V} logits, {args.rounds} rounds of {calls} calls; reading the logits once takes "
        f"{1e6 * least:.1f} us")
  common.print_table(["function", "us per call", "range, us", "/ argmax", "/ one read"], rows)
  print(f"mask, adjust, sample: {1e3 * whole:.3f} ms (target: at most {1e3 * TARGET_SECONDS} ms for 32 rows of 128256 "
        "logits on an H200)")


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.add_argument("--running", type=common.positive, default=8, help="running sequences")
  parser.add_argument("--context", type=common.positive, default=1, help="tokens per prompt")
  parser.add_argument("--steps", type=common.positive, default=16, help="decode steps per row and round")
  parser.add_argument("--rounds", type=common.positive, default=9, help="rounds")
  parser.add_argument("--host", action="store_true", help="also print a step's milliseconds in Python, in launching "
                      "its graph (on a CPU: running it), and waiting for its result")
  parser.add_argument("--device", action="store_true", help="measure only the sampler's functions, without an engine")
  parser.add_argument("--rows", type=common.positive, default=32, help="rows of logits, with --device")
  parser.add_argument("--vocab", type=common.positive, default=128256, help="logits per row, with --device")
  args = parser.parse_args()
  bandwidth = common.start(args)
  if args.device: measure_device(args, bandwidth)
  else: measure_steps(args)


if __name__ == "__main__": main()
