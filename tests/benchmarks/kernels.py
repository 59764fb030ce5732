"""Measure the time and memory bandwidth of each kernel in a step.

  python tests/benchmarks/kernels.py --shape llama-7b --tokens 1 32 512 --context 256

The model has --layers layers (default 2). Each round runs all kernels of its captured step in order: repeating one
kernel alone would read its weights from a cache. Columns:
  us each   microseconds per launch, median of the rounds
  MB        bytes of all the kernel's buffers; of an embedding table only the rows of the step's tokens, of the KV cache
            only the sequences' tokens, divided equally among the kernels that read it
  TFLOP/s   matrix kernels only
  of copy   bandwidth as a share of the measured copy bandwidth; above 100% the data came from a cache
Kernels with the same code are grouped."""
import ctypes
import random
import statistics
import time
from collections import Counter
from itertools import pairwise
from unittest.mock import patch

import common
from common import LLM, Watch
from tinygrad import Device, Tensor, TinyJit, dtypes, nn
from tinygrad.engine import realize
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import Ops, UOp


def calls_of(linear: UOp) -> list[UOp]:
  """Return a captured step's kernels and copies, including those inside graphs."""
  def inside(call: UOp) -> tuple[UOp, ...]:
    graph = call.src[0].op is Ops.CUSTOM_FUNCTION and call.src[0].arg == "graph"
    return call.src[0].src[0].src if graph else (call,)
  return [inner for call in linear.src for inner in inside(call)]


def one_by_one(calls: list[UOp], context: realize.ExecContext) -> list[float]:
  """Return the seconds of each call, synchronizing after each."""
  times = []
  for call in calls:
    started = time.perf_counter()
    seconds = realize.pm_exec.rewrite(call, context)
    if not seconds or None in seconds:   # tinygrad does not time copies
      Device.default.synchronize()
      seconds = [time.perf_counter() - started]
    times.append(sum(seconds))
  return times


def queued(calls: list[UOp], context: realize.ExecContext) -> list[float]:
  """Return the seconds of each call on CUDA, queued after a long copy so that no kernel waits for Python."""
  from tinygrad.runtime.ops_cuda import check, cuda, init_c_var
  def record() -> None:
    events.append(init_c_var(cuda.CUevent, lambda x: check(cuda.cuEventCreate(ctypes.byref(x), 0))))
    check(cuda.cuEventRecord(events[-1], None))
  def launch(callback, enable=False) -> float:
    callback()
    record()
    return 0.0
  if not hasattr(queued, "copy"): queued.copy = common.make_copy()[0]
  for _ in range(4 + len(calls) // 8): queued.copy()
  events: list = []
  record()
  with patch("tinygrad.runtime.ops_cuda.cu_time_execution", launch):
    for call in calls:
      before = len(events)
      realize.pm_exec.rewrite(call, context)
      if len(events) == before: record()   # a copy
  check(cuda.cuEventSynchronize(events[-1]))
  times = []
  for begin, end in pairwise(events):
    check(cuda.cuEventElapsedTime(ctypes.byref(milliseconds := ctypes.c_float()), begin, end))
    times.append(milliseconds.value / 1e3)
  for event in events: check(cuda.cuEventDestroy_v2(event))
  return times


def kernel_times(calls: list[UOp], values: dict[str, int], inputs: list[UOp], args) -> list[float]:
  """Return the median seconds of each call; every round runs all calls."""
  context = realize.ExecContext(values, tuple(inputs), update_stats=False, jit=True, wait=True)
  measure = queued if Device.DEFAULT == "CUDA" and not args.one_by_one else one_by_one
  rounds = [measure(calls, context) for _ in range(args.rounds + 3)][3:]
  return [statistics.median(times) for times in zip(*rounds, strict=True)]


def capture(llm: LLM, tokens: int, context: int, decode: bool) -> tuple:
  """Return the captured graph of a step, its inputs and its variables' values."""
  rng = random.Random(0)
  for i in range(tokens if decode else 1):
    prompt = common.random_ids(llm.model_config.vocab_size, context if decode else context + tokens, rng)
    # A prefill request ends with its chunk: with asynchronous scheduling the last graph would be the next step's
    llm.add_request(str(i), prompt, common.greedy(llm.max_model_len - len(prompt["prompt_token_ids"]) if decode else 1))
  with Watch(llm) as watch:
    while not (watch.steps and watch.steps[-1].outputs and watch.steps[-1].decode == decode): llm.step()
  for i in range(tokens if decode else 1): llm.abort_request(str(i))
  if watch.last is None: raise SystemExit("error: the step ran no captured graph (TinyJit)")
  return watch.last


def measure(args, tokens: int, bandwidth: float) -> None:
  decode = tokens <= args.max_num_seqs and not args.prefill
  context = args.context if decode else args.context // tokens * tokens   # prefill in chunks of `tokens`
  room = 8 + (tokens * (2 + context // args.max_num_batched_tokens) if decode else tokens)   # until all decode
  common.release()
  try: llm = common.open_llm(args, max_model_len=context + room, max_num_seqs=min(args.max_num_seqs, tokens),
                             max_num_batched_tokens=max(args.max_num_batched_tokens, tokens) if decode else tokens)
  except ValueError as e: raise SystemExit(f"error: {e}") from e
  jit, inputs, values = capture(llm, tokens, context, decode)
  calls = calls_of(jit.linear)
  whole = common.median_seconds(   # the step, called as the engine calls it
    lambda: realize.run_linear(jit.linear, values, input_uops=inputs, jit=True, update_stats=False), args.rounds)
  times = kernel_times(calls, values, inputs, args)
  kind = f"decode of {tokens} sequences" if decode else f"prefill chunk of {tokens} tokens"
  print(f"\n{kind} at context {context}: {len(calls)} launches, sum of kernel times {1e6 * sum(times):.0f} us, "
        f"whole step {1e6 * whole:.0f} us")
  print_kernels(llm, calls, inputs, times, tokens, tokens * context if decode else context + tokens, decode, bandwidth)


def print_kernels(llm: LLM, calls: list[UOp], inputs: list[UOp], times: list[float], tokens: int,
                  cached_tokens: int, decode: bool, bandwidth: float) -> None:
  """Print a row per kernel. cached_tokens: tokens of all sequences in the KV cache."""
  config = llm.model_config
  names = {t.uop.base.buffer.base: (name, t) for name, t in nn.state.get_state_dict(llm.runner.model).items()}
  caches = {t.uop.base.buffer.base for cache in llm.runner.kv_caches for t in cache}   # keys and values of each layer
  buffers = [[u.buffer for u in realize.resolve_params(call, tuple(inputs))] for call in calls]
  sides = [realize.get_call_outs_ins(call) for call in calls]
  read = [operands[k].base for operands, (_, ins) in zip(buffers, sides, strict=True) for k in set(ins)]
  readers = Counter(buffer for buffer in read if buffer in caches)
  groups: dict[tuple, list] = {}
  for call, operands, (_, ins), seconds in zip(calls, buffers, sides, times, strict=True):
    size = flops = 0
    labels = []
    for k, buffer in enumerate(operands):
      name, parameter = names.get(buffer.base, ("", None))
      if name: labels.append(name.split(".")[-2] if "." in name else name)
      table = parameter is not None and parameter.numel() == config.vocab_size * config.hidden_size
      gathered = table and any(operands[i].dtype == dtypes.int32 for i in ins)
      if buffer.base in caches:
        row = config.num_key_value_heads * config.head_dim * buffer.dtype.itemsize
        size += row * cached_tokens // readers[buffer.base] if k in ins else row * tokens
        labels.append("cache")
      elif gathered: size += tokens * config.hidden_size * buffer.dtype.itemsize
      else:
        size += buffer.nbytes
        if parameter is not None and parameter.ndim > 1:   # the head computes only sampled tokens
          flops += 2 * parameter.numel() * (tokens if decode or not table else 1)
    name = ansistrip(realize.get_call_name(call, operands))
    if labels: name += f" ({', '.join(dict.fromkeys(labels))})"
    groups.setdefault((call.src[0].key, name), []).append((seconds, size, flops))
  rows = []
  for (_, name), group in sorted(groups.items(), key=lambda item: -sum(g[0] for g in item[1])):
    seconds, size, flops = (statistics.fmean(column) for column in zip(*group, strict=True))
    rate = f"{flops / seconds / 1e12:.3f}" if flops else ""
    rows.append([name, str(len(group)), f"{1e6 * seconds:.1f}", f"{sum(g[0] for g in group) / sum(times):.0%}",
                 f"{size / 1e6:.3f}", f"{size / seconds / 1e9:.1f}", rate, f"{size / seconds / bandwidth:.0%}"])
  common.print_table(["kernel", "launches", "us each", "of step", "MB", "GB/s", "TFLOP/s", "of copy"], rows)


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.set_defaults(layers=2)
  parser.add_argument("--tokens", type=common.positive, nargs="+", default=[1, 32, 512], help="tokens per step; up to "
                      "--max-num-seqs a decode step of that many sequences, above it a prefill chunk")
  parser.add_argument("--prefill", action="store_true", help="measure prefill chunks for all --tokens")
  parser.add_argument("--context", type=common.positive, default=256, help="tokens per sequence before the step")
  parser.add_argument("--max-num-seqs", type=common.positive, default=64, help="maximum running sequences")
  parser.add_argument("--rounds", type=common.positive, default=20, help="runs of the step")
  parser.add_argument("--one-by-one", action="store_true", help="on CUDA, synchronize after each kernel (slower)")
  args = parser.parse_args()
  bandwidth = common.start(args)
  tiny = TinyJit(lambda x: (x + 1).realize())
  for _ in range(3): tiny(small := Tensor.zeros(16).clone().realize())
  floor, = kernel_times(calls_of(tiny.captured.linear), {}, [small.uop.base], args)
  print(f"smallest measurable time (a kernel of 16 numbers): {1e6 * floor:.1f} us")
  for tokens in args.tokens: measure(args, tokens, bandwidth)


if __name__ == "__main__": main()
