"""How long it takes to start, and what a capture costs those who are served.

python tests/benchmarks/start.py [--model DIR | --shape llama-3.1-8b] [--requests 200]

Prints, of a process with an empty cache folder and of the next one with that folder: seconds from the start of the
process to a loaded model, to the first token of `generate`, and to all steps of the server's list captured, greedy and
sampled. Then, of a server's engine with that folder, under requests of random lengths and kinds (greedy or drawn), 16
at once: the longest gap between two tokens of any stream, and the longest wait for a first token, where steps are
captured as they are met, and where a list was captured before."""
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


def tell(**facts) -> None: print(json.dumps(facts), flush=True)


def start(args: argparse.Namespace) -> None:
  """In a process of its own: the time of each stage, by a clock that all processes share."""
  llm = common.open_llm(args, padded=True)
  tell(stage="loaded", time=time.monotonic())
  next(llm.generate_stream({"prompt_token_ids": [5, 6, 7, 8, 9]}, common.greedy(2)))
  tell(stage="first token", time=time.monotonic())
  steps = len(list(llm.capture()))
  tell(stage="all captured", time=time.monotonic(), steps=steps)


async def load(args: argparse.Namespace) -> None:
  """In a process of its own: what the streams of many requests meet."""
  from tinyvllm_extra.server import AsyncLLM
  def opened(model, **options): return common.open_llm(args, padded=True, **options)
  with patch("tinyvllm_extra.server.async_engine.LLM", opened):
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
      of = waits
      async for _ in llm.generate(prompt, params):
        of.append(time.monotonic() - last)
        last = time.monotonic()
        of = gaps
  await asyncio.gather(*[request() for _ in range(args.requests)])
  tell(gap=max(gaps), wait=max(waits), graphs=len(llm.llm.runner.graphs))
  llm.shutdown()


def child(folder: str, *more: str) -> list[dict]:
  """What a process tells that starts with this cache folder."""
  env = {**os.environ, "CACHEDB": os.path.join(folder, "cache.db")}
  run = subprocess.run([sys.executable, *sys.argv, *more], env=env, stdout=subprocess.PIPE, text=True, check=True)
  return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.add_argument("--requests", type=common.positive, default=200, help="of the load")
  parser.add_argument("--input-len", type=common.positive, default=400, help="tokens of a prompt at most")
  parser.add_argument("--output-len", type=common.positive, default=32, help="tokens of an answer at most")
  parser.add_argument("--only", choices=("start", "load"), help=argparse.SUPPRESS)   # what a process of its own does
  parser.add_argument("--prepare", action="store_true", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.only == "start": return start(args)
  if args.only == "load": return asyncio.run(load(args))
  with TemporaryDirectory() as folder:
    for name in ("cold", "warm"):
      begun = time.monotonic()
      told = child(folder, "--only", "start")
      times = ", ".join(f"{x['stage']} {x['time'] - begun:.1f} s" for x in told)
      print(f"{name}: {times} ({told[-1]['steps']} steps)", flush=True)
    for name, more in (("captured when met", []), ("captured before", ["--prepare"])):
      facts, = child(folder, "--only", "load", *more)
      print(f"{name}: longest gap in a stream {facts['gap']:.3f} s, longest wait for a first token "
            f"{facts['wait']:.3f} s, {facts['graphs']} graphs", flush=True)


if __name__ == "__main__": main()
