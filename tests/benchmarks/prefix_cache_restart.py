"""Measure the time to first token after a restart with the prefix cache saved to disk.

  python tests/benchmarks/prefix_cache_restart.py --model DIR

The first process answers a request with a system prompt of --system-len tokens and saves its prefix cache to a file.
The second process loads that file and answers the same request. Prints the time to first token of both, the median of
--repeats pairs, and the file's size, save time and load time. As in `tinyvllm serve`, graphs are captured before, on
other prompts. Both outputs must be equal."""
import argparse
import json
import os
import statistics
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import common


def run(args: argparse.Namespace) -> None:
  """Start an engine, answer one request, and print the results as JSON. Runs in a new process."""
  llm = common.open_llm(args, enable_prefix_caching=True)
  vocabulary = llm.model_config.vocab_size
  length = args.system_len + args.question_len
  count, loading = 0, 0.0
  if Path(args.file).exists(): count, loading = common.timed(llm.load_prefix_cache, args.file)
  other = Random(args.seed + 1)
  for n in (args.question_len, length):   # captures the graphs
    llm.generate(common.random_ids(vocabulary, n, other), common.greedy(2), use_tqdm=False)
  prompt = common.random_ids(vocabulary, length, Random(args.seed))
  output, = llm.generate(prompt, common.greedy(args.output_len), use_tqdm=False)
  saving = 0.0
  if not count: _, saving = common.timed(llm.save_prefix_cache, args.file)
  results = {"ttft": output.metrics.ttft, "cached": output.num_cached_tokens, "ids": output.outputs[0].token_ids,
             "blocks": count, "loading": loading, "saving": saving}
  print(json.dumps(results), flush=True)


def main() -> None:
  parser = common.make_parser(__doc__)
  parser.add_argument("--system-len", type=common.positive, default=1000, help="tokens of the system prompt")
  parser.add_argument("--question-len", type=common.positive, default=24, help="tokens of the question after it")
  parser.add_argument("--output-len", type=common.positive, default=32, help="output tokens")
  parser.add_argument("--repeats", type=common.positive, default=3, help="starts without the file, and with it")
  parser.add_argument("--file", help=argparse.SUPPRESS)   # set in the new process: file to load, or to save
  args = parser.parse_args()
  if args.file: return run(args)
  print(common.machine_line())
  cold, warm = [], []
  with TemporaryDirectory() as folder:
    for i in range(args.repeats):
      file = os.path.join(folder, f"prefix-cache-{i}")
      cold += common.results_of_process("--file", file)
      warm += common.results_of_process("--file", file)
    size = os.path.getsize(file)
  assert all(x["ids"] == cold[0]["ids"] for x in (*cold, *warm)), "the outputs differ"
  def median(results: list[dict], name: str) -> float: return statistics.median(x[name] for x in results)
  before = median(cold, "ttft")
  after = median(warm, "ttft")
  print(f"{args.system_len} + {args.question_len} tokens: time to first token {before * 1000:.0f} ms cold, "
        f"{after * 1000:.0f} ms after a restart ({warm[-1]['cached']} cached tokens), ratio {after / before:.3f}")
  print(f"file: {size / 2**20:.0f} MiB, {warm[-1]['blocks']} blocks; saved in {median(cold, 'saving'):.2f} s, "
        f"loaded in {median(warm, 'loading'):.2f} s")


if __name__ == "__main__": main()
