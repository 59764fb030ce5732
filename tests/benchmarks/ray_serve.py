"""Measure the latency that Ray Serve adds to a request. Alternates the same request between `tinyvllm serve` and two
replicas of examples/deploy/ray_serve.py on this machine, both with the bundled model.

  python tests/benchmarks/ray_serve.py --requests 200 --output-len 16

Prints the median times to a complete response, to a stream's first event and to its end. The difference is the cost of
Ray Serve and the ingress. Each replica and the plain server run on one core."""
import argparse
import http.client
import json
import os
import statistics
import sys
import time
from pathlib import Path

import common

from helpers.servers import Server, reserve_port

SCRIPT = Path(__file__).parents[2] / "examples" / "deploy" / "ray_serve.py"


class Client:
  """A keep-alive connection to one server."""
  def __init__(self, port: int, tokens: int):
    self.connection = http.client.HTTPConnection("127.0.0.1", port)
    self.body = {"prompt": "The cat", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}

  def ask(self, stream: bool) -> tuple[float, float]:
    """Send the request; return the milliseconds to the first byte of the response body and to its end."""
    started = time.perf_counter()
    body = json.dumps({**self.body, "stream": stream})
    self.connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = self.connection.getresponse()
    response.read(1)
    first = time.perf_counter()
    text = response.read()
    if response.status != 200 or stream and not text.endswith(b"[DONE]\n\n"): raise SystemExit(f"error: {text!r}")
    return 1e3 * (first - started), 1e3 * (time.perf_counter() - started)


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--requests", type=common.positive, default=200, help="timed requests of each kind")
  parser.add_argument("--output-len", type=common.positive, default=16, help="output tokens per request")
  args = parser.parse_args()
  print(common.machine_line(), flush=True)
  with reserve_port() as free: port = free.getsockname()[1]
  os.environ["NUM_CPU_THREADS"] = "1"
  flags = ["--cudagraph-capture-sizes", 1, 4, 16]
  with Server(None, *flags) as plain, Server(None, *flags, "--num-replicas", 2, "--port", port,
                                             script=str(SCRIPT), seconds=300) as replicas:
    clients = [Client(server.port, args.output_len) for server in (plain, replicas)]
    rows = []
    for stream, name in ((False, "whole"), (True, "stream")):
      for client in clients:
        for _ in range(20): client.ask(stream)   # warm-up of both replicas
      times = [[client.ask(stream) for client in clients] for _ in range(args.requests)]
      for i, event in enumerate(["first event", "end"]):
        if not stream and i == 0: continue
        a, b = ([pair[server][i] for pair in times] for server in (0, 1))
        difference = statistics.median(b) - statistics.median(a)
        rows.append([name, event, f"{statistics.median(a):.2f}", f"{statistics.median(b):.2f}", f"{difference:.2f}",
                     f"{min(b) - min(a):.2f}"])
  common.print_table(["response", "time to", "tinyvllm serve, ms", "Ray Serve, ms", "difference, ms",
                      "difference of minimums, ms"], rows)
  return 0


if __name__ == "__main__": sys.exit(main())
