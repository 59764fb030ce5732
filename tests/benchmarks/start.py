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
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.request
from tempfile import TemporaryDirectory
from unittest.mock import patch

import common

from tinyvllm import SamplingParams


COMMANDS = "serve", "run"


def print_json(**values) -> None: print(json.dumps(values), flush=True)


def start(args: argparse.Namespace) -> None:
  """Print the time of each stage, from a clock that all processes share. Runs in a new process."""
  llm = common.open_llm(args, padded=True)
  print_json(stage="loaded", time=time.monotonic())
  next(llm.generate_stream({"prompt_token_ids": [5, 6, 7, 8, 9]}, common.greedy(2)))
  print_json(stage="first token", time=time.monotonic())
  steps = len(list(llm.capture()))
  print_json(stage="all captured", time=time.monotonic(), steps=steps)


def first_answer(command: str, model: str | None, cache: str) -> float:
  """Return the seconds from the start of `tinyvllm serve` or `tinyvllm run` until its first answer is complete."""
  with socket.create_server(("127.0.0.1", 0)) as free: port = free.getsockname()[1]
  options = ["--port", str(port)] if command == "serve" else ["--max-tokens", "4"]
  body = json.dumps({"prompt": "Hello", "max_tokens": 4}).encode()
  url, headers = f"http://127.0.0.1:{port}/v1/completions", {"content-type": "application/json"}
  request = urllib.request.Request(url, body, headers)
  started = time.monotonic()
  with subprocess.Popen([sys.executable, "-m", "tinyvllm", command, *([model] if model else []), *options], text=True,
                        env={**os.environ, "CACHEDB": cache}, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL,
                        stdout=subprocess.PIPE) as process:
    if command == "run": process.communicate("Hello\n")
    while command == "serve":
      with contextlib.suppress(OSError): command = urllib.request.urlopen(request).reason   # HTTP 503 at first
      time.sleep(0.02)
    seconds = time.monotonic() - started
    process.terminate()
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
  parser.add_argument("--requests", type=common.positive, default=200, help="requests of the load")
  parser.add_argument("--input-len", type=common.positive, default=400, help="maximum tokens per prompt")
  parser.add_argument("--output-len", type=common.positive, default=32, help="maximum output tokens per request")
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
      seconds = [first_answer(command, args.model, os.path.join(folder, command, "cache.db")) for command in COMMANDS]
      print(f"{name}: first answer of `serve` {seconds[0]:.1f} s, of `run` {seconds[1]:.1f} s", flush=True)
    for name, flags in (("captured when requested", []), ("captured ahead", ["--prepare"])):
      result, = common.results_of_process("--only", "load", *flags, CACHEDB=cache)
      print(f"{name}: longest gap in a stream {result['gap']:.3f} s, longest time to first token "
            f"{result['wait']:.3f} s, {result['graphs']} graphs", flush=True)


if __name__ == "__main__": main()
