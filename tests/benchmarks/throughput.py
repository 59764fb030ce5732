"""Measure the throughput of continuous batching through `LLM.generate`, and the time of a decode step.

  python tests/benchmarks/throughput.py --shape llama-7b --running 1 8 32 --input-len 128 --output-len 128
  python tests/benchmarks/throughput.py --shape llama-7b --running 1 8 32 --context 256 4096 --host

Prints one row per number of running sequences. Columns, in tokens/s unless stated:
  output, total   of the whole run: output tokens, and all tokens including prompts
  prefill         of one prompt that fills a step
  decode          of the median step in which all sequences decode
  of roofline     time to read weights and KV cache at the measured copy bandwidth / time of that step
With --context: the decode step with all sequences at that context."""
import random
import statistics
import time

import common
from common import LLM, Watch


def decode_columns(llm: LLM, steps: list, running: int, bandwidth: float, host: bool) -> tuple[float, list[str]]:
  """Return the seconds of the median step in which all sequences decode, and its columns."""
  steps = [s for s in steps if s.decode and s.outputs == running]
  if not steps: return float("nan"), ["-"] * (7 if host else 4)
  seconds = statistics.median(s.seconds for s in steps)
  context = statistics.fmean(s.context for s in steps)
  least = common.roofline(llm, bandwidth, running, context)
  columns = [f"{1e3 * seconds:.2f}", f"{running / seconds:.1f}", f"{least / seconds:.0%}", f"{context:.0f}"]
  return seconds, columns + (common.host_columns(steps) if host else [])


def measure_throughput(args, running: int, bandwidth: float) -> list[str]:
  length = args.input_len + args.output_len
  llm = engine(args, running, max(length, args.max_num_batched_tokens + 1), length)   # a prompt may fill a step
  requests = common.make_requests(llm.model_config.vocab_size, args, args.num_prompts or 2 * running)
  prompts, params = zip(*requests, strict=True)
  started = time.perf_counter()
  llm.generate(prompts, params, use_tqdm=False)   # the same run captures the same graphs
  length = min(args.max_num_batched_tokens, llm.max_model_len - 1)   # a prompt that fills a step
  prompt = common.random_ids(llm.model_config.vocab_size, length, random.Random(args.seed))
  prefill = common.median_seconds(lambda: llm.generate(prompt, common.greedy(1), use_tqdm=False), 3)
  print(f"  {running} running: warm-up and graph captures took {time.perf_counter() - started:.1f} s", flush=True)
  with Watch(llm) as watch:
    outputs, seconds = common.timed(llm.generate, prompts, params, use_tqdm=False)
  watch.warn()
  new = sum(len(o.outputs[0].token_ids) for o in outputs)
  prompt_tokens = sum(len(p["prompt_token_ids"]) for p in prompts)
  _, decode = decode_columns(llm, watch.steps, running, bandwidth, args.host)
  rates = [f"{x:.1f}" for x in (new / seconds, (new + prompt_tokens) / seconds, length / prefill)]
  return [str(running), str(len(prompts)), *rates, *decode]


def measure_context(args, running: int, context: int, bandwidth: float) -> tuple[list[str], float]:
  budget = max(args.max_num_batched_tokens, running)
  # during chunked prefill, finished prompts already decode: their outputs must last until all decode
  room = running * (-(-context // max(1, budget - running)) + 1) + args.steps + 4
  llm = engine(args, running, context + room)
  rng = random.Random(args.seed)
  for i in range(running):
    llm.add_request(str(i), common.random_ids(llm.model_config.vocab_size, context, rng), common.greedy(room))
  started = time.perf_counter()
  with Watch(llm) as watch:
    def all_decode() -> int: return sum(s.decode and s.outputs == running for s in watch.steps)
    while all_decode() < 3 and llm.has_unfinished_requests(): llm.step()
    seconds = time.perf_counter() - started
    print(f"  {running} running at context {context}: prefill and graph captures took {seconds:.1f} s", flush=True)
    watch.steps.clear()
    watch.captured = 0
    while all_decode() < args.steps and llm.has_unfinished_requests(): llm.step()
  watch.warn()
  for i in range(running): llm.abort_request(str(i))
  seconds, columns = decode_columns(llm, watch.steps, running, bandwidth, args.host)
  return [str(running), str(context), *columns], seconds


def engine(args, running: int, *lengths: int) -> LLM:
  """Return an engine with the first max_model_len in `lengths` that model and memory allow."""
  common.release()
  for length in lengths:
    try: return common.open_llm(args, max_model_len=length, max_num_seqs=running)
    except ValueError as e: error = e
  raise SystemExit(f"error: {error}")


def main() -> None:
  parser = common.make_parser(__doc__)
  common.add_workload(parser, output_len=128)
  parser.add_argument("--running", type=common.positive, nargs="+", default=[1, 8, 32], help="running "
                      "sequences (max_num_seqs), one row each")
  parser.add_argument("--num-prompts", type=common.positive, help="prompts per run (default: 2 * --running)")
  parser.add_argument("--context", type=common.positive, nargs="+", help="measure only a decode "
                      "step at each of these contexts")
  parser.add_argument("--steps", type=common.positive, default=32, help="decode steps, with --context")
  common.add_host(parser)
  args = parser.parse_args()
  bandwidth = common.start(args)
  decode = ["ms/step", "decode tokens/s", "of roofline", "mean context"]
  if args.host: decode += common.HOST_COLUMNS
  if args.context:
    results = {(r, c): measure_context(args, r, c, bandwidth) for r in args.running for c in args.context}
    common.print_table(["running", "context", *decode], [row for row, _ in results.values()])
    for r in args.running:
      for c in args.context[1:]:
        ratio = results[r, c][1] / results[r, args.context[0]][1]
        print(f"{r} running: step time at context {c} / at {args.context[0]} = {ratio:.2f}")
  else:
    header = ["running", "prompts", "output tokens/s", "total tokens/s", "prefill tokens/s", *decode]
    common.print_table(header, [measure_throughput(args, r, bandwidth) for r in args.running])


if __name__ == "__main__": main()
