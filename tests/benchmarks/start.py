"""Measure the start time, and how long graph captures delay running streams.

python tests/benchmarks/start.py [--model DIR | --shape llama-3.1-8b] [--requests 200]

Starts a process with an empty kernel cache (cold) and a second one with the same cache (warm), and prints the seconds
from the start of the process until the model is loaded, until the first token, and until all graph shapes of the
server's list are captured (greedy and sampled). Without --shape, likewise the seconds until `tinyvllm serve` and
`tinyvllm run` have answered a first request with 4 tokens. Then runs the server's engine under requests with random
lengths and sampling (greedy or sampled), 16 at once, and prints the longest gap between two tokens of a stream and the
longest time to first token: once with graphs captured when first requested, once with graphs captured ahead."""
import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from tempfile import TemporaryDirectory
from unittest.mock import patch

import common

from tinyvllm import SamplingParams


def print_json(**values) -> None: print(json.dumps(values), flush=True)


def start(args: argparse.Namespace) -> None:
  """Print the time of each stage, from a clock that all processes share. Runs in a new process."""
  llm = common.open_llm(args, padded=True)
  print_json(stage="loaded", time=time.monotonic())
  next(llm.generate_stream({"prompt_token_ids": [5, 6, 7, 8, 9]}, common.greedy(2)))
  print_json(stage="first token", time=time.monotonic())
  steps = len(list(llm.capture()))
  print_json(stage="all captured", time=time.monotonic(), steps=steps)


def first_answer_of_serve(model: str | None, cache: str) -> float:
  """Return the seconds from the start of `tinyvllm serve` until its first answer is complete."""
  from helpers.servers import Server
  started = time.monotonic()
  with Server(model, ready=False, environment={"CACHEDB": cache}) as server, server.http() as http:
    while http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 4}).is_error:   # HTTP 503 at first
      time.sleep(0.02)
    return time.monotonic() - started


def first_answer_of_run(model: str | None, cache: str) -> float:
  """Return the seconds of a process of `tinyvllm run` that answers one message."""
  command = [sys.executable, "-m", "tinyvllm", "run", *([model] if model else []), "--max-tokens", "4"]
  _, seconds = common.timed(subprocess.run, command, env={**os.environ, "CACHEDB": cache}, input=b"Hello\n",
                            capture_output=True)
  return seconds


async def load(args: argparse.Namespace) -> None:
  """Print the longest gap and wait of many streams. Runs in a new process."""
  from tinyvllm_extra.serving.async_engine import AsyncLLM
  def open_llm(model, **options): return common.open_llm(args, padded=True, **options)
  with patch("tinyvllm_extra.serving.async_engine.LLM", open_llm):
    llm = AsyncLLM(args.model, prepare=args.prepare)
  while llm.state: await asyncio.sleep(0.1)
  rng = random.Random(args.seed)
  gaps: list[float] = []
  waits: list[float] = []
  free = asyncio.Semaphore(16)

  async def request() -> None:
    prompt = common.random_ids(llm.llm.model_config.vocab_size, rng.randint(1, args.input_len), rng)
    kind = rng.choice(({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}))
    params = SamplingParams(max_tokens=rng.randint(2, args.output_len), ignore_eos=True, **kind)
    async with free:
      last = time.monotonic()
      times = waits
      async for _ in llm.generate(prompt, params):
        times.append(time.monotonic() - last)
        last = time.monotonic()
        times = gaps
  await asyncio.gather(*[request() for _ in range(args.requests)])
  print_json(gap=max(gaps), wait=max(waits), graphs=len(llm.llm.runner.graphs))
  llm.shutdown()


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.set_defaults(shape=None)
  parser.add_argument("--requests", type=common.positive, default=200, help="requests of the load")
  common.add_workload(parser, output_len=32, input_len=400)   # maximums of the random lengths
  parser.add_argument("--only", choices=("start", "load"), help=argparse.SUPPRESS)   # task of a new process
  parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.only == "start": return start(args)
  if args.only == "load": return asyncio.run(load(args))
  with TemporaryDirectory() as folder:
    cache = os.path.join(folder, "cache.db")
    for name in ("cold", "warm"):
      started = time.monotonic()
      stages = common.results_of_process("--only", "start", CACHEDB=cache)
      times = ", ".join(f"{x['stage']} {x['time'] - started:.1f} s" for x in stages)
      print(f"{name}: {times} ({stages[-1]['steps']} graphs)", flush=True)
    for name in () if args.shape else ("cold", "warm"):
      serve = first_answer_of_serve(args.model, os.path.join(folder, "serve", "cache.db"))
      run = first_answer_of_run(args.model, os.path.join(folder, "run", "cache.db"))
      print(f"{name}: first answer of `serve` {serve:.1f} s, of `run` {run:.1f} s", flush=True)
    for name, flags in (("captured when requested", []), ("captured ahead", ["--prepare"])):
      result, = common.results_of_process("--only", "load", *flags, CACHEDB=cache)
      print(f"{name}: longest gap in a stream {result['gap']:.3f} s, longest time to first token "
            f"{result['wait']:.3f} s, {result['graphs']} graphs", flush=True)


if __name__ == "__main__": main()
