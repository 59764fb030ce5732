"""Measure the overhead of HTTP: a server and LLM.generate alternate in one run, on the same load.

  python tests/benchmarks/http_overhead.py [--model DIR | --shape smollm2-135m] [--streams 32] [--rounds 7]

Starts `tinyvllm serve` of the model without a prefix cache; an engine of the same model is in this process, idle while
the server works. Prompts are random ids, and each answer has --output-len tokens.
(a) one request at a time: time to the first event with text, minus the engine's;
(b) --streams requests at once: output tokens/s over HTTP divided by those of LLM.generate.

`tinyvllm bench serve` measures a running server. The client runs here; the server is another process. On few cores they
compete, so the client's CPU usage is printed. The client is one thread that counts events. With --threads it is
the client of `bench serve`: a thread per request, which reads all JSON."""
import argparse
import json
import os
import re
import selectors
import signal
import socket
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import common

from tinyvllm import LLM
from tinyvllm_extra import cli
from tinyvllm_extra.cli.bench import SAMPLING, Answer, random_ids, run, send
from tinyvllm_extra.serving.client import Remote
from tinyvllm_extra.cli.flags import BenchConfig

from helpers import servers


def options(args: argparse.Namespace) -> dict[str, Any]:
  """Return the engine's options, the same here and in the server. Both engines are on one device."""
  return {"max_model_len": args.input_len + args.output_len, "max_num_seqs": args.streams,
          "max_num_batched_tokens": max(args.max_num_batched_tokens, args.streams), "gpu_memory_utilization": 0.4}


def serve(args: argparse.Namespace) -> int:
  """Run `tinyvllm serve` with the engine of common.open_llm, whose weights may be random."""
  from tinyvllm_extra.serving import async_engine
  with patch.object(async_engine, "LLM", lambda model, **options: common.open_llm(args, padded=True, **options)):
    return cli.main(["serve", "--port=0", *(f"--{k.replace('_', '-')}={v}" for k, v in options(args).items()),
                     f"--stream-interval={args.stream_interval}"])


def seconds(answers: list[Answer]) -> float: return max(x.times[-1] for x in answers) - min(x.times[0] for x in answers)


def send_all(port: int, count: int, num_input: int, num_output: int) -> list[Answer]:
  """Send requests at once, and read the answers in one thread. Times: of the events with text."""
  answers, selector = list[tuple[list[float], bytearray]](), selectors.DefaultSelector()
  for ids in random_ids(count, num_input):
    answers.append(([time.monotonic()], bytearray()))
    body = json.dumps({**SAMPLING, "prompt": ids, "max_tokens": num_output, "stream": True,
                       "stream_options": {"include_usage": True}})
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                       f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
    selector.register(connection, selectors.EVENT_READ, answers[-1])
  while selector.get_map():
    for key, _ in selector.select():
      data = key.fileobj.recv(2**16)
      times, received = key.data
      received += data
      times += [time.monotonic()] * data.count(b'"text":')
      assert data, f"an answer was cut: {received}"
      if not data.endswith(b"\r\n0\r\n\r\n") and data != b"0\r\n\r\n": continue
      selector.unregister(key.fileobj)
      key.fileobj.close()
  return [Answer(times, int(re.search(rb'"completion_tokens":(\d+)', received)[1])) for times, received in answers]


def compare(args: argparse.Namespace, remote: Remote, llm: LLM) -> None:
  n, tokens, rows, events = args.streams, args.output_len, list[list[float]](), list[int]()
  load = BenchConfig(random_input_len=args.input_len, random_output_len=tokens)
  pool = ThreadPoolExecutor(n)
  port = int(remote.url.rpartition(":")[2])
  def http(count: int) -> list[Answer]:
    if args.threads: return [*pool.map(lambda _: send(remote, load), range(count))]
    return send_all(port, count, args.input_len, tokens)
  def engine(count: int) -> list[Answer]: return run(llm, count, args.input_len, tokens)
  for _ in llm.capture(): pass
  for count in (1, n): http(count)
  for i in range(args.rounds):   # alternate which runs first
    order = [http, engine][::-1 if i % 2 else 1]
    ttfts: dict[Callable, list[float]] = {http: [], engine: []}
    for measure in order * args.requests:
      answer, = measure(1)
      ttfts[measure].append(1e3 * (answer.times[1] - answer.times[0]))
    answers, cpu = {}, {}
    for measure in order:
      cpu_started = time.process_time()
      answers[measure] = measure(n)
      cpu[measure] = time.process_time() - cpu_started
    events += [len(x.times) - 1 for x in answers[http]]
    a, b = (statistics.median(ttfts[measure]) for measure in (http, engine))
    rates = [n * tokens / seconds(answers[measure]) for measure in (http, engine)]
    rows.append([i + 1, a, b, a - b, *rates, rates[0] / rates[1], 100 * cpu[http] / seconds(answers[http])])
  header = ["round", "TTFT ms: HTTP", "engine", "difference", f"tokens/s of {n} streams: HTTP", "engine", "ratio",
            "client CPU %"]
  common.print_table(header, [[f"{x:.3f}" if i == 6 else f"{x:.2f}" if 0 < i < 4 else f"{x:.0f}"
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
  parser.add_argument("--threads", action="store_true", help="use the client of `bench serve`")
  parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)   # set in the server's process
  parser.add_argument("--port", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.serve: return serve(args)
  signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))   # also stops the server
  print(common.machine_line(), flush=True)
  with servers.Server(None, *sys.argv[1:], "--serve", script=os.path.abspath(__file__), seconds=600) as server:
    servers.wait_until(lambda: "captured" in server.log, "all steps are captured", 600)
    remote = Remote({"url": server.url, "api_key": None, "model": None}, {})
    compare(args, remote, common.open_llm(args, padded=True, **options(args)))
  return 0


if __name__ == "__main__": sys.exit(main())
