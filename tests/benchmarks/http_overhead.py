"""Measure the overhead of HTTP: a server and LLM.generate alternate in one run, on the same load.

  python tests/benchmarks/http_overhead.py [--model DIR | --shape smollm2-135m] [--streams 32] [--rounds 7]

Starts `tinyvllm serve` of the model without a prefix cache; an engine of the same model is in this process, idle while
the server works. Prompts are random ids, and each answer has --output-len tokens.
(a) one request at a time: time to the first event with text, minus RequestMetrics.ttft of the engine;
(b) --streams requests at once: output tokens/s over HTTP divided by those of LLM.generate.

`tinyvllm bench serve` measures a running server. Its client runs here in threads; the server is another process. On few
cores they compete, so the client's CPU usage is printed."""
import argparse
import functools
import os
import signal
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import common

from tinyvllm import LLM
from tinyvllm_extra import cli
from tinyvllm_extra.cli.bench import Answer, random_ids, run, send
from tinyvllm_extra.cli.client import Remote

sys.path.insert(0, str(Path(__file__).parents[1]))   # tests
from helpers import servers


def options(args: argparse.Namespace) -> dict[str, Any]:
  """Return the engine's options, the same here and in the server. Both engines are on one device."""
  return {"max_model_len": args.input_len + args.output_len, "max_num_seqs": args.streams,
          "max_num_batched_tokens": max(args.max_num_batched_tokens, args.streams), "gpu_memory_utilization": 0.4}


def open_llm(args: argparse.Namespace, **engine_options: Any) -> LLM:
  if args.shape or args.layers: return common.open_llm(args, **engine_options)
  return LLM(args.model, **{"dtype": args.dtype, "enable_prefix_caching": False, **engine_options})


def serve(args: argparse.Namespace) -> int:
  """Run `tinyvllm serve` with the engine of open_llm, whose weights may be random."""
  from tinyvllm_extra.serving import async_engine
  with patch.object(async_engine, "LLM", lambda model, **engine_options: open_llm(args, **engine_options)):
    return cli.main(["serve", "--port=0", *(f"--{k.replace('_', '-')}={v}" for k, v in options(args).items()),
                     f"--stream-interval={args.stream_interval}"])


def send_all(remote: Remote, prompts: list[list[int]], num_output: int) -> list[Answer]:
  """Send prompts at once."""
  call = functools.partial(send, remote, num_output)
  with ThreadPoolExecutor(len(prompts)) as pool: return [*pool.map(call, prompts)]


def ttft(llm: LLM, ids: list[int], num_output: int) -> float:
  *_, last = llm.generate_stream({"prompt_token_ids": ids}, common.greedy(num_output))
  return last.metrics.ttft


def compare(args: argparse.Namespace, remote: Remote, llm: LLM) -> None:
  n, tokens, rows, events = args.streams, args.output_len, list[list[float]](), list[int]()
  prompts = functools.partial(random_ids, llm.model_config.vocab_size)
  for _ in llm.capture(): pass
  for size in (1, n): send_all(remote, prompts(size, args.input_len), tokens)
  for i in range(args.rounds):   # alternate which runs first
    times: dict[str, list[float]] = {"http": [], "engine": []}
    seconds = {}
    for which in [*times][::-1 if i % 2 else 1] * args.requests:
      ids, = prompts(1, args.input_len)
      if which == "engine": times[which].append(1e3 * ttft(llm, ids, tokens))
      else: times[which].append(1e3 * send(remote, tokens, ids).metrics.ttft)
    for which in [*times][::-1 if i % 2 else 1]:
      if which == "engine":
        seconds[which] = run(llm, n, args.input_len, tokens)
        continue
      cpu_started = time.process_time()
      answers = send_all(remote, prompts(n, args.input_len), tokens)
      seconds[which] = max(x.times[-1] for x in answers) - min(x.times[0] for x in answers)
      usage = (time.process_time() - cpu_started) / seconds[which]
      events += [len(x.times) - 1 for x in answers]
    a, b = (statistics.median(x) for x in times.values())
    rows.append([i + 1, a, b, a - b, n * tokens / seconds["http"], n * tokens / seconds["engine"],
                 seconds["engine"] / seconds["http"], 100 * usage])
  header = ["round", "TTFT ms: HTTP", "engine", "difference", f"tokens/s of {n} streams: HTTP", "engine", "ratio",
            "client CPU %"]
  common.print_table(header, [[f"{x:.3g}" if i == 6 else f"{x:.2f}" if 0 < i < 4 else f"{x:.0f}"
                               for i, x in enumerate(row)] for row in rows])
  medians = [statistics.median(column) for column in zip(*rows, strict=True)]
  print(f"medians: (a) TTFT over HTTP {medians[1]:.2f} ms, engine {medians[2]:.2f} ms, difference {medians[3]:.2f} ms; "
        f"(b) HTTP / LLM.generate {medians[6]:.3f}; {statistics.median(events):.0f} events for {tokens} tokens")


def main() -> int:
  parser = common.make_parser(__doc__)
  parser.set_defaults(shape=None)
  common.add_workload(parser, output_len=64)
  parser.add_argument("--streams", type=common.positive, default=32, help="concurrent requests in (b)")
  parser.add_argument("--rounds", type=common.positive, default=7, help="rounds")
  parser.add_argument("--requests", type=common.positive, default=10, help="requests of (a) per round")
  parser.add_argument("--stream-interval", type=int, default=1, help="tokens per event of the server")
  parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)   # set in the server's process
  parser.add_argument("--port", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.serve: return serve(args)
  signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))   # also stops the server
  print(common.machine_line(), flush=True)
  with servers.Server(None, *sys.argv[1:], "--serve", script=os.path.abspath(__file__), seconds=600) as server:
    remote = Remote({"url": server.url, "api_key": None, "model": None}, {})
    compare(args, remote, open_llm(args, **options(args)))
  return 0


if __name__ == "__main__": sys.exit(main())
