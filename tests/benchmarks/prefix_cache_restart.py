"""What the prefix cache on disk saves a server that starts anew.

  python tests/benchmarks/prefix_cache_restart.py --model DIR

A process with an empty prefix cache takes requests that begin with one system prompt of --system-len tokens, and ends;
it leaves a file of its prefix cache. The next process begins with that file. Prints of both the time to the first token
of a request, the median of --repeats engines' first ones: the steps that it needs are captured before, by other
prompts, as `tinyvllm serve` does, and the prefix cache is empty but for what came of the file. And of the file its
size, and the seconds that it takes to write and to load. The texts must be the same."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import common


def run(args: argparse.Namespace) -> None:
  """In a process of its own: one start."""
  llm = common.open_llm(args, enable_prefix_caching=True)
  vocabulary = llm.model_config.vocab_size
  count, loading = 0, 0.0
  if Path(args.file).exists():
    started = time.perf_counter()
    count = llm.load_prefix_cache(args.file)
    loading = time.perf_counter() - started
  rng = Random(args.seed)
  system = common.random_ids(vocabulary, args.system_len, rng)["prompt_token_ids"]
  question = common.random_ids(vocabulary, args.question_len, rng)["prompt_token_ids"]
  other = Random(args.seed + 1)
  for length in (args.question_len, args.system_len + args.question_len):   # captures; nothing of them is found later
    llm.generate(common.random_ids(vocabulary, length, other), common.greedy(2), use_tqdm=False)
  prompt = {"prompt_token_ids": system + question}
  output, = llm.generate(prompt, common.greedy(args.output_len), use_tqdm=False)
  started = time.perf_counter()
  if not count: llm.save_prefix_cache(args.file)
  facts = {"ttft": output.metrics.ttft, "cached": output.num_cached_tokens, "ids": output.outputs[0].token_ids,
           "blocks": count, "loading": loading, "saving": time.perf_counter() - started}
  print(json.dumps(facts), flush=True)


def start(file: str) -> dict:
  """What a new process tells."""
  child = subprocess.run([sys.executable, *sys.argv, "--file", file], stdout=subprocess.PIPE, text=True, check=True)
  return json.loads(child.stdout.splitlines()[-1])


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.add_argument("--system-len", type=common.positive, default=1000, help="tokens that all requests begin with")
  parser.add_argument("--question-len", type=common.positive, default=24, help="tokens that follow")
  parser.add_argument("--output-len", type=common.positive, default=32, help="tokens of the answer")
  parser.add_argument("--repeats", type=common.positive, default=3, help="starts of either kind")
  parser.add_argument("--file", help=argparse.SUPPRESS)   # what a process of its own begins with, or leaves
  args = parser.parse_args()
  if args.file: return run(args)
  print(common.machine_line())
  cold, warm = [], []
  with TemporaryDirectory() as folder:
    for i in range(args.repeats):
      file = os.path.join(folder, f"prefix-cache-{i}")
      cold.append(start(file))
      warm.append(start(file))
    size = os.path.getsize(file)
  assert all(x["ids"] == cold[0]["ids"] for x in (*cold, *warm)), "another text"
  def median(facts: list[dict], name: str) -> float: return statistics.median(x[name] for x in facts)
  before, after = median(cold, "ttft"), median(warm, "ttft")
  print(f"{args.system_len} + {args.question_len} tokens: time to the first token {before * 1000:.0f} ms cold, "
        f"{after * 1000:.0f} ms after a restart ({warm[-1]['cached']} tokens found): {after / before:.3f}")
  print(f"the file: {size / 2**20:.0f} MiB, {warm[-1]['blocks']} blocks; written in {median(cold, 'saving'):.2f} s, "
        f"loaded in {median(warm, 'loading'):.2f} s")


if __name__ == "__main__": main()
