"""Measure a model's start time, load memory, and decode and prefill speed, through the public API.

python tests/benchmarks/speed.py [--model DIR] [--decode-only]

Prints seconds from import to the first token; peak memory while loading, also relative to the weights; decode tokens/s
of one and of eight streams; prefill tokens/s of one prompt. Each rate is the median of three runs after a warm-up. The
roofline is the bandwidth measured in the same run divided by the bytes of the weights: numpy's sum on all cores of a
CPU, a copy on other devices. --decode-only measures one stream, for backends with slow captures."""
import argparse
import os
import platform
import resource
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

started = time.perf_counter()


def bandwidth() -> float:
  """Return the bytes per second that all cores read together, each summing its part of 512 MB."""
  import numpy as np
  from common import timed
  data = np.ones(1 << 27, np.float32)
  cores = os.cpu_count() or 1
  with ThreadPoolExecutor(cores) as pool:
    def read() -> list: return list(pool.map(np.sum, np.array_split(data, cores)))
    return data.nbytes / min(timed(read)[1] for _ in range(5))


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--model", metavar="DIR", help="model folder or GGUF file (default: the bundled model)")
  parser.add_argument("--max-model-len", type=int, default=512, help="maximum tokens per sequence (default: 512)")
  parser.add_argument("--decode-only", action="store_true", help="measure only the decode of one stream")
  args = parser.parse_args()
  from tinygrad import Device, nn   # late imports: part of the time to first token

  from tinyvllm import LLM, SamplingParams
  before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  llm = LLM(args.model, max_model_len=args.max_model_len, max_num_seqs=8, max_num_batched_tokens=256,
            enable_prefix_caching=False)
  load_time, peak = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
  next(iter(llm.generate_stream("Hello", SamplingParams(temperature=0.0, max_tokens=2))))
  first = time.perf_counter()
  weights = sum(t.nbytes() for part in llm.runner.model.modules() for t in nn.state.get_parameters(part))
  rows = []

  def rate(streams: int, length: int, new: int) -> float:
    """Return tokens per second of decode, or of prefill if new == 1."""
    rates = []
    for _ in range(4):
      arrival, first, finished = map(max, zip(*(x.times for x in run(llm, streams, length, new)), strict=True))
      rates.append(length / (finished - arrival) if new == 1 else streams * (new - 1) / (finished - first))
    return statistics.median(rates[1:])
  from common import measure_bandwidth   # not part of the time to first token
  from tinyvllm_extra.cli.bench import run
  limit = (bandwidth() if Device.DEFAULT == "CPU" else measure_bandwidth()) / weights
  rows += [("decode, 1 stream", rate(1, 8, 33), limit)]
  if not args.decode_only:
    rows += [("decode, 8 streams", rate(8, 8, 33), 8 * limit)]
    rows += [(f"prefill, {n} tokens", rate(1, n, 1), None) for n in (128, 256) if n < args.max_model_len]
  host = f"{platform.machine()}, Python {platform.python_version()}"
  print(f"{Device.DEFAULT}, {host}, weights {weights / 2**20:.0f} MiB")
  print(f"{'load':24} {load_time - started:8.1f} s\n{'start to first token':24} {first - started:8.1f} s")
  print(f"{'memory to load':24} {peak / 2**20:8.0f} MiB = {peak / weights:.2f} x weights")
  for name, value, roof in rows:
    share = f"   {value / roof:4.0%} of the roofline, {roof:.0f}" if roof else ""
    print(f"{name:24} {value:8.1f} tokens/s{share}")


if __name__ == "__main__": main()
