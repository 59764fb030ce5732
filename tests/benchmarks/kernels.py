"""Time of each kernel of a step: which ones are far from the memory's speed.

  python tests/benchmarks/kernels.py --shape llama-7b --tokens 1 32 512 --context 256

The model has only --layers layers (2), whose captured step is run kernel by kernel, round after round: a kernel that
were repeated alone would find its weights in the cache. Microseconds are the median of the rounds. bytes: of all the
buffers that a kernel is given, but of an embedding table only the tokens' rows, and of the KV cache only what the
sequences hold, shared equally among the kernels that read it. FLOP/s: of matrix kernels. of copy: the bytes over the
time, as a share of the measured copy bandwidth; above 100% a cache held them. Kernels are told apart by their code."""
import ctypes
import random
import statistics
import time
from collections import Counter
from unittest.mock import patch

import common
from common import LLM, Watch
from tinygrad import Device, Tensor, TinyJit, dtypes, nn
from tinygrad.engine import realize
from tinygrad.engine.jit import CapturedJit
from tinygrad.helpers import ansistrip
from tinygrad.uop.ops import Ops, UOp


def calls_of(linear: UOp) -> list[UOp]:
  """A captured step's kernels and copies, those inside its graphs too."""
  def inside(call: UOp) -> tuple[UOp, ...]:
    graph = call.src[0].op is Ops.CUSTOM_FUNCTION and call.src[0].arg == "graph"
    return call.src[0].src[0].src if graph else (call,)
  return [inner for call in linear.src for inner in inside(call)]


def one_by_one(calls: list[UOp], context: realize.ExecContext) -> list[float]:
  """Seconds of each, waiting after each."""
  times = []
  for call in calls:
    started = time.perf_counter()
    measured = realize.pm_exec.rewrite(call, context)
    if not measured or None in measured:   # a copy has no time of its own
      Device[Device.DEFAULT].synchronize()
      measured = [time.perf_counter() - started]
    times.append(sum(measured))
  return times


def queued(calls: list[UOp], context: realize.ExecContext) -> list[float]:
  """On CUDA: seconds of each, all queued behind a long copy. Waiting after each would add the time from Python's
  recording of an event to the kernel's arrival, which is more than a small kernel takes."""
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
  for begin, end in zip(events, events[1:], strict=False):
    check(cuda.cuEventElapsedTime(ctypes.byref(milliseconds := ctypes.c_float()), begin, end))
    times.append(milliseconds.value / 1e3)
  for event in events: check(cuda.cuEventDestroy_v2(event))
  return times


def kernel_times(calls: list[UOp], values: dict[str, int], inputs: list[UOp], args) -> list[float]:
  """The median seconds of each call, over rounds through all of them."""
  context = realize.ExecContext(values, tuple(inputs), update_stats=False, jit=True, wait=True)
  measure = queued if Device.DEFAULT == "CUDA" and not args.one_by_one else one_by_one
  rounds = [measure(calls, context) for _ in range(args.rounds + 3)][3:]
  return [statistics.median(times) for times in zip(*rounds, strict=True)]


def capture(llm: LLM, tokens: int, context: int, decode: bool) -> tuple:
  """The captured step, its values and inputs."""
  rng = random.Random(0)
  for i in range(tokens if decode else 1):
    prompt = common.random_ids(llm.model_config.vocab_size, context if decode else context + tokens, rng)
    # Behind a chunk nothing is to come: where steps overlap, the last graph would be of what comes
    llm.add_request(str(i), prompt, common.greedy(llm.max_model_len - len(prompt["prompt_token_ids"]) if decode else 1))
  with Watch(llm) as watch:
    while not (watch.steps and watch.steps[-1].outputs and watch.steps[-1].decode == decode): llm.step()
  for i in range(tokens if decode else 1): llm.abort_request(str(i))
  if watch.last is None: raise SystemExit("error: the step ran no captured graph (TinyJit)")
  return watch.last


def step_time(jit: CapturedJit, inputs: list[UOp], values: dict[str, int], rounds: int) -> float:
  """Seconds of a captured step as the engine calls it, the median."""
  device = Device[Device.DEFAULT]
  times = []
  for _ in range(rounds + 3):
    device.synchronize()
    started = time.perf_counter()
    realize.run_linear(jit.linear, values, input_uops=inputs, jit=True, update_stats=False)
    device.synchronize()
    times.append(time.perf_counter() - started)
  return statistics.median(times[3:])


def measure(args, tokens: int, bandwidth: float) -> None:
  decode = tokens <= args.max_num_seqs and not args.prefill
  context = args.context if decode else args.context // tokens * tokens   # prompts are read in chunks of `tokens`
  room = 8 + (tokens * (2 + context // args.max_num_batched_tokens) if decode else tokens)   # all must have joined
  common.release()
  try: llm = common.open_llm(args, max_model_len=context + room, max_num_seqs=min(args.max_num_seqs, tokens),
                             max_num_batched_tokens=max(args.max_num_batched_tokens, tokens) if decode else tokens)
  except ValueError as e: raise SystemExit(f"error: {e}") from e
  jit, inputs, values = capture(llm, tokens, context, decode)
  calls = calls_of(jit.linear)
  whole = step_time(jit, inputs, values, args.rounds)
  times = kernel_times(calls, values, inputs, args)
  kind = f"{tokens} sequences decoding at {context}" if decode else f"a chunk of {tokens} tokens behind {context}"
  print(f"\n{kind}: {len(calls)} launches, {1e6 * sum(times):.0f} us one after another, "
        f"{1e6 * whole:.0f} us as the step calls them")
  print_kernels(llm, calls, inputs, times, tokens, tokens * context if decode else context + tokens, decode, bandwidth)


def print_kernels(llm: LLM, calls: list[UOp], inputs: list[UOp], times: list[float], tokens: int, held: int,
                  decode: bool, bandwidth: float) -> None:
  """held: tokens in the KV cache, of all the sequences."""
  config = llm.model_config
  names = {t.uop.base.buffer.base: (name, t) for name, t in nn.state.get_state_dict(llm.runner.model).items()}
  caches = {t.uop.base.buffer.base for cache in llm.runner.kv_caches for t in cache}   # keys and values of each layer
  buffers = [[u.buffer for u in realize.resolve_params(call, tuple(inputs))] for call in calls]
  sides = [realize.get_call_outs_ins(call) for call in calls]
  read = [given[k].base for given, (_, ins) in zip(buffers, sides, strict=True) for k in set(ins)]
  readers = Counter(buffer for buffer in read if buffer in caches)
  groups: dict[tuple, list] = {}
  for call, given, (_, ins), seconds in zip(calls, buffers, sides, times, strict=True):
    size = flops = 0
    used = []
    for k, buffer in enumerate(given):
      name, parameter = names.get(buffer.base, ("", None))
      if name: used.append(name.split(".")[-2] if "." in name else name)
      table = parameter is not None and parameter.numel() == config.vocab_size * config.hidden_size
      gathered = table and any(given[i].dtype == dtypes.int32 for i in ins)
      if buffer.base in caches:
        row = config.num_key_value_heads * config.head_dim * buffer.dtype.itemsize
        size += row * held // readers[buffer.base] if k in ins else row * tokens
        used.append("cache")
      elif gathered: size += tokens * config.hidden_size * buffer.dtype.itemsize
      else:
        size += buffer.nbytes
        if parameter is not None and parameter.ndim > 1:   # the head computes the sampled tokens only
          flops += 2 * parameter.numel() * (tokens if decode or not table else 1)
    name = ansistrip(realize.get_call_name(call, given)) + (f" ({', '.join(dict.fromkeys(used))})" if used else "")
    groups.setdefault((call.src[0].key, name), []).append((seconds, size, flops))
  rows = []
  for (_, name), group in sorted(groups.items(), key=lambda item: -sum(g[0] for g in item[1])):
    seconds, size, flops = (statistics.fmean(column) for column in zip(*group, strict=True))
    rate = f"{flops / seconds / 1e12:.3f}" if flops else ""
    rows.append([name, str(len(group)), f"{1e6 * seconds:.1f}", f"{sum(g[0] for g in group) / sum(times):.0%}",
                 f"{size / 1e6:.3f}", f"{size / seconds / 1e9:.1f}", rate, f"{size / seconds / bandwidth:.0%}"])
  common.print_table(["kernel", "launches", "us each", "of step", "MB", "GB/s", "TFLOP/s", "of copy"], rows)
  first: dict[str, int] = {}   # the first launch that is given a parameter of the layer
  for i, given in enumerate(buffers):
    for part in (names.get(buffer.base, ("",))[0].split(".") for buffer in given):
      if part[0] == "layers": first.setdefault(part[1], i)
  if "1" not in first: print("kernels per layer: needs --layers 2 or more")
  else:
    each = first["1"] - first["0"]
    print(f"{each} kernels per layer per step, {len(calls) - each * config.num_hidden_layers} outside the layers")


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.set_defaults(layers=2)
  parser.add_argument("--tokens", type=common.positive, nargs="+", default=[1, 32, 512], help="tokens of a step; up to "
                      "--max-num-seqs so many sequences decode one token each, above it is a chunk of one prompt")
  parser.add_argument("--prefill", action="store_true", help="take --tokens as chunks of a prompt, however few")
  parser.add_argument("--context", type=common.positive, default=256, help="tokens that the sequences hold before")
  parser.add_argument("--max-num-seqs", type=common.positive, default=64, help="the most sequences that run together")
  parser.add_argument("--rounds", type=common.positive, default=20, help="times that the step is run through")
  parser.add_argument("--one-by-one", action="store_true", help="on CUDA, wait after each kernel; raises the floor")
  args = parser.parse_args()
  bandwidth = common.start(args)
  tiny = TinyJit(lambda x: (x + 1).realize())
  for _ in range(3): tiny(small := Tensor.zeros(16).clone().realize())
  floor, = kernel_times(calls_of(tiny.captured.linear), {}, [small.uop.base], args)
  print(f"floor: a kernel that does nothing measures {1e6 * floor:.1f} us")
  for tokens in args.tokens: measure(args, tokens, bandwidth)


if __name__ == "__main__": main()
