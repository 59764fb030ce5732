"""Measure the latency of streamed requests that arrive at random times.

  python tests/benchmarks/latency.py --shape llama-7b --running 32 --rate 2 --num-prompts 64 --plot latency.png

Requests arrive in a Poisson process of --rate requests/s (inf: all at once); the script calls LLM.step itself. TTFT:
time from arrival to the first token, including the wait for the step in flight. TPOT: time per output token after the
first. end-to-end: time from arrival to the last token."""
import math
import random
import time

import common
from common import LLM, Watch
from numpy import percentile


def warm_up(llm: LLM, requests: list, tokens: int) -> None:
  """Capture the graphs of all step sizes: prompts and decode batches of each power of two, then the first requests."""
  rng, vocabulary = random.Random(0), llm.model_config.vocab_size
  sizes = sorted({*(1 << i for i in range(tokens.bit_length())), tokens})
  for n in sizes:
    prompt = common.random_ids(vocabulary, min(n, llm.max_model_len - 1), rng)
    llm.generate(prompt, common.greedy(1), use_tqdm=False)
  for n in (n for n in sizes if n <= llm.config.max_num_seqs):
    llm.generate([common.random_ids(vocabulary, 4, rng) for _ in range(n)], common.greedy(3), use_tqdm=False)
  llm.generate([r[0] for r in requests], [r[1] for r in requests], use_tqdm=False)


def serve(llm: LLM, requests: list, arrivals: list[float]) -> tuple[dict[str, float], dict[str, float], float]:
  """Return the times of each request's first and last token, and the total time, in seconds from the start."""
  first: dict[str, float] = {}
  last: dict[str, float] = {}
  added, started = 0, time.perf_counter()
  while len(last) < len(requests):
    now = time.perf_counter() - started
    while added < len(requests) and arrivals[added] <= now:
      llm.add_request(str(added), *requests[added])
      added += 1
    if not llm.has_unfinished_requests():
      time.sleep(max(0.0, arrivals[added] - now))
      continue
    outputs, now = llm.step(), time.perf_counter() - started
    for output in outputs:
      first.setdefault(output.request_id, now)
      if output.finished: last[output.request_id] = now
  return first, last, now


def main() -> None:
  parser = common.make_parser(__doc__)
  common.add_workload(parser)
  parser.add_argument("--rate", type=float, default=math.inf, help="requests per second; inf: all at once")
  parser.add_argument("--num-prompts", type=common.positive, default=32, help="number of requests")
  parser.add_argument("--running", type=common.positive, default=32, help="maximum running sequences (max_num_seqs)")
  args = parser.parse_args()
  if not args.rate > 0: parser.error(f"--rate {args.rate:g} must be above 0")
  pyplot, _ = common.plotting() if args.plot else None, common.start(args)
  budget = max(args.max_num_batched_tokens, args.running)
  try: llm = common.open_llm(args, max_model_len=args.input_len + args.output_len, max_num_seqs=args.running,
                             max_num_batched_tokens=budget)
  except ValueError as e: raise SystemExit(f"error: {e}") from e
  requests, rng = common.make_requests(llm.model_config.vocab_size, args, args.num_prompts), random.Random(args.seed)
  arrivals, now = [], 0.0
  for _ in requests:
    arrivals.append(now)
    now += rng.expovariate(args.rate) if math.isfinite(args.rate) else 0.0
  started = time.perf_counter()
  warm_up(llm, requests[:args.running], budget)
  print(f"  warm-up and graph captures took {time.perf_counter() - started:.1f} s", flush=True)
  with Watch(llm) as watch: first, last, seconds = serve(llm, requests, arrivals)
  watch.warn()
  ids, new = [str(i) for i in range(len(requests))], [params.max_tokens for _, params in requests]
  series = {"TTFT": [1e3 * (first[i] - at) for i, at in zip(ids, arrivals, strict=True)],
            "TPOT": [1e3 * (last[i] - first[i]) / (n - 1) for i, n in zip(ids, new, strict=True) if n > 1],
            "end-to-end": [1e3 * (last[i] - at) for i, at in zip(ids, arrivals, strict=True)]}
  rows = [[name, *(f"{percentile(x, p):.1f}" for p in (50, 90, 99))] for name, x in series.items() if x]
  common.print_table(["ms", "p50", "p90", "p99"], rows)
  print(f"{len(requests)} requests at {args.rate:g}/s, at most {args.running} running: {len(requests) / seconds:.2f} "
        f"requests/s, {sum(new) / seconds:.1f} output tokens/s, {llm.get_metrics()['num_preemptions']} preemptions")
  if pyplot:
    figure, axes = pyplot.subplots(1, len(series), figsize=(12, 4))
    for ax, (name, x) in zip(axes, series.items(), strict=True):
      ax.hist(x, bins=30)
      ax.set(xlabel=f"{name} (ms)", ylabel="requests", xlim=(0, None))
    figure.tight_layout()
    figure.savefig(args.plot, dpi=150)


if __name__ == "__main__": main()
