"""Benchmark `tinyvllm serve` with the metrics of `vllm bench serve`, and measure the overhead of HTTP.

  python tests/benchmarks/serving.py [--model DIR] --num-prompts 100 --request-rate 8 --max-concurrency 32
  python tests/benchmarks/serving.py --url http://127.0.0.1:8000 --input-len 128 --output-len 64
  python tests/benchmarks/serving.py --compare [--model DIR | --shape smollm2-135m]
  python tests/benchmarks/serving.py --compare --step-ms 2.2

Starts a server of the bundled model (or --model, --shape), or uses the one at --url. Prompts are different random ids;
every response has --output-len tokens. Requests arrive in a Poisson process. TTFT: time from sending a request to the
first byte of the first event with text. ITL: time between events. TPOT: time per output token after the first.

--compare alternates HTTP and LLM.generate in several rounds of one run, on the same load without a prefix cache:
(a) one request at a time: its TTFT minus RequestMetrics.ttft of an engine without HTTP; (b) --streams requests at once:
output tokens/s over HTTP divided by those of LLM.generate. The engine without HTTP is in this process, idle while the
server works.

--step-ms computes nothing: a simulated device takes that long per step, parallel to the host like a GPU, and derives
tokens from their positions. The time left is the host work of server and client. The engine without HTTP uses the same
simulated device, so the ratio is the cost of HTTP at that step time.

The client runs asyncio on raw sockets in this process; the server is another process with its own interpreter lock. On
few cores they compete, so the client's CPU usage is printed."""
import argparse
import asyncio
import bisect
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import common
import numpy as np

import tinyvllm
from tinyvllm import LLM, SamplingParams
from tinyvllm.runner import Results, Step

sys.path.insert(0, str(Path(__file__).parents[1]))   # tests
from helpers import servers

KEY = os.environ.get("OPENAI_API_KEY", "none")


@dataclass
class Answer:
  """A response. `parse` fills the other fields from `reads`; the token counts are those of the usage field."""
  start_time: float = 0.0
  error: str = ""
  reads: list[tuple[float, bytes]] = field(default_factory=list)   # time and data of each read of the socket
  times: list[float] = field(default_factory=list)   # arrival of the first byte of each event with text
  tokens: int = 0
  prompt_tokens: int = 0

  def parse(self) -> None:
    head, _, body = b"".join(data for _, data in self.reads).partition(b"\r\n\r\n")
    if self.error: return
    if b" 200 " not in head.split(b"\r\n")[0]: self.error = body.decode(errors="replace")
    elif b"text/event-stream" in head.lower(): self._events(body, len(head) + 4)
    else: self._usage(json.loads(body))

  def _events(self, body: bytes, offset: int) -> None:
    ends, at = [], 0   # total bytes after each read
    for _, data in self.reads: ends.append(at := at + len(data))
    events, starts, at = b"", [], 0   # body without chunk frames; (offset in events, offset in the response)
    while at < len(body):
      line = body.index(b"\r\n", at)
      starts.append((len(events), offset + line + 2))
      events, at = events + body[line + 2:line + 2 + int(body[at:line], 16)], line + 4 + int(body[at:line], 16)
    at, *parts = 0, *events.split(b"\n\n")
    for event in parts:
      start, received = starts[bisect.bisect_right(starts, (at, math.inf)) - 1]
      at, received = at + len(event) + 2, received + at - start
      if event in (b"", b"data: [DONE]"): continue
      content = json.loads(event.removeprefix(b"data: "))
      if content.get("error"): self.error = json.dumps(content)
      if content.get("usage"): self._usage(content)
      if any(choice.get("text") for choice in content.get("choices", [])):
        self.times.append(self.reads[bisect.bisect_right(ends, received)][0])
    if not self.error and (parts[-2:] != [b"data: [DONE]", b""] or not self.times or not self.tokens):
      self.error = f"stream without text, usage or [DONE]: {events[-200:]!r}"

  def _usage(self, content: dict[str, Any]) -> None:
    self.tokens, self.prompt_tokens = (content["usage"][name] for name in ("completion_tokens", "prompt_tokens"))

  end = property(lambda self: self.reads[-1][0])
  ttft = property(lambda self: self.times[0] - self.start_time)
  tpot = property(lambda self: (self.times[-1] - self.times[0]) / (self.tokens - 1))
  itl = property(lambda self: [b - a for a, b in zip(self.times, self.times[1:], strict=False)])


class Connection(asyncio.Protocol):
  """A keep-alive connection. It only detects the end of a response: parsing would take CPU time from the server."""
  answer: Answer | None = None
  open = True

  def connection_made(self, transport: Any) -> None: self.transport = transport

  def send(self, request: bytes) -> asyncio.Future:
    self.result, self.head, self.tail, self.left = asyncio.get_running_loop().create_future(), b"", b"", None
    self.answer = Answer(start_time=time.perf_counter())
    self.transport.write(request)
    return self.result

  def data_received(self, data: bytes) -> None:
    if not self.answer: return
    self.answer.reads.append((time.perf_counter(), data))
    if self.left is None:
      self.head += data
      head, end, data = self.head.partition(b"\r\n\r\n")
      if not end: return
      length = re.search(rb"content-length: *(\d+)", head, re.I)
      self.left = int(length[1]) if length else math.inf   # inf: chunked, ends with an empty chunk
    self.left, self.tail = self.left - len(data), (self.tail + data)[-5:]
    if self.left == 0 or self.left == math.inf and self.tail == b"0\r\n\r\n": self.finish()

  def connection_lost(self, error: Exception | None) -> None:
    self.open = False
    if self.answer: self.finish(f"connection closed: {error}")

  def finish(self, error: str = "") -> None:
    self.answer.error = error
    if not self.result.done(): self.result.set_result(self.answer)
    self.answer = None


@dataclass
class Run:
  answers: list[Answer]
  seconds: float     # from the first request to the last byte
  cpu_usage: float   # the client's CPU seconds per second

  @property
  def good(self) -> list[Answer]: return [a for a in self.answers if not a.error]


class Client:
  def __init__(self, args: argparse.Namespace, url: str):
    self.args, self.address, self.idle, self.rng = args, urlsplit(url), list[Connection](), random.Random(args.seed)
    self.vocabulary, self.loop = vocabulary(args), asyncio.new_event_loop()

  def ids(self, n: int) -> list[list[int]]:
    """Return `n` new random prompts."""
    return [common.random_ids(self.vocabulary, self.args.input_len, self.rng)["prompt_token_ids"] for _ in range(n)]

  def request(self, ids: list[int], tokens: int) -> bytes:
    """Return a request's bytes. Special tokens are not skipped: a generated end token must make an event too."""
    body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    if self.args.stream: body |= {"stream": True, "stream_options": {"include_usage": True}}
    data = json.dumps(body).encode()
    return (f"POST /v1/completions HTTP/1.1\r\nHost: {self.address.netloc}\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n").encode() + data

  def run(self, prompts: list[list[int]], tokens: int, delays: list[float] | None = None, at_once: int = 0) -> Run:
    """Send each prompt after its delay (seconds from the start), at most `at_once` at a time (0: no limit)."""
    requests, delays = [self.request(ids, tokens) for ids in prompts], delays or [0.0] * len(prompts)
    limit: Any = asyncio.Semaphore(at_once) if at_once else nullcontext()
    started, cpu_started = time.perf_counter(), time.process_time()

    async def one(request: bytes, delay: float) -> Answer:
      await asyncio.sleep(started + delay - time.perf_counter())
      async with limit:
        self.idle = [c for c in self.idle if c.open]
        try:
          if self.idle: connection = self.idle.pop()
          else: _, connection = await self.loop.create_connection(Connection, self.address.hostname, self.address.port)
          answer = await connection.send(request)
        except OSError as e: return Answer(start_time=time.perf_counter(), error=str(e))
        self.idle.append(connection)
        return answer

    async def send_all() -> list[Answer]: return await asyncio.gather(*map(one, requests, delays))
    answers = self.loop.run_until_complete(send_all())
    cpu_seconds = time.process_time() - cpu_started
    seconds = max((a.end for a in answers if a.reads), default=time.perf_counter()) - min(a.start_time for a in answers)
    for answer in answers: answer.parse()
    return Run(answers, seconds, cpu_seconds / max(seconds, 1e-9))

  def warm_up(self, at_once: int) -> None:
    """Run all step sizes, so that their graphs are captured before the measurement."""
    for n in powers(at_once): self.run(self.ids(n), min(8, self.args.output_len))


def powers(n: int) -> list[int]:
  """Return 1, 2, 4, …, n."""
  return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]


def is_ready(url: str) -> bool:
  """Return whether a GET request returns status 200."""
  try: return urlopen(Request(url, headers={"Authorization": f"Bearer {KEY}"}), timeout=10).status == 200
  except (URLError, ConnectionError): return False


def options(args: argparse.Namespace) -> dict[str, Any]:
  """Return the engine's options, the same here and in the server."""
  running = args.max_num_seqs or (args.streams if args.compare else args.max_concurrency or 32)
  share = 0.4 if args.compare else 0.9   # --compare has two engines on the device
  return {"max_model_len": args.max_model_len or args.input_len + args.output_len, "max_num_seqs": running,
          "max_num_batched_tokens": max(args.max_num_batched_tokens, running), "gpu_memory_utilization": share}


def pretend(llm: LLM, seconds: float) -> None:
  """Replace the engine's device with a simulated one that takes `seconds` per step."""
  words, busy_until = [i for i in range(llm.model_config.vocab_size) if llm.tokenizer.decode([i]).isalpha()], 0.0

  def launch(step: Step) -> Callable[[], Results]:
    nonlocal busy_until
    end = busy_until = max(busy_until, time.perf_counter()) + seconds

    def read() -> Results:
      time.sleep(max(0.0, end - time.perf_counter()))
      return Results(step, [words[7 * row.position % len(words)] for row in step.rows], [])
    return read
  llm.runner.launch, llm.runner.is_async = launch, True
  llm.capture = lambda *_, **__: iter(())


def open_llm(args: argparse.Namespace, **engine_options: Any) -> LLM:
  llm = _open_llm(args, **engine_options)
  if args.step_ms: pretend(llm, args.step_ms / 1e3)
  return llm


def _open_llm(args: argparse.Namespace, **engine_options: Any) -> LLM:
  if args.shape or args.layers: return common.open_llm(args, **engine_options)
  return LLM(args.model, **{"dtype": args.dtype, "enable_prefix_caching": False, **engine_options})


def serve(args: argparse.Namespace) -> int:
  """Run `tinyvllm serve` with the engine of open_llm, whose weights may be random."""
  from tinyvllm_extra import cli
  from tinyvllm_extra.server import async_engine
  with patch.object(async_engine, "LLM", lambda model, **engine_options: open_llm(args, **engine_options)):
    return cli.main(["serve", "--port=0", *(f"--{k.replace('_', '-')}={v}" for k, v in options(args).items()),
                     f"--stream-interval={args.stream_interval}"])


@contextmanager
def server(args: argparse.Namespace) -> Iterator[str]:
  """Yield --url, or the URL of a new server process."""
  if args.url:
    if not is_ready(args.url + "/health"): raise SystemExit(f"error: {args.url}/health does not return 200")
    yield args.url
    return
  with servers.Server(None, *sys.argv[1:], "--serve", script=os.path.abspath(__file__), seconds=600) as process:
    yield process.url
    if code := process.stop(): print(f"warning: the server's exit code is {code}\n{process.log}")


def vocabulary(args: argparse.Namespace) -> int:
  if args.shape or args.layers: return common.hf_config(args)["vocab_size"]
  folder = Path(args.model).expanduser() if args.model else Path(tinyvllm.__file__).parent / "default_model"
  return json.loads((folder / "config.json").read_text())["vocab_size"]


def report(run: Run, args: argparse.Namespace) -> int:
  """Print the metrics; return the exit code."""
  good, seconds, failures = run.good, run.seconds, len(run.answers) - len(run.good)
  tokens, prompt_tokens = sum(a.tokens for a in good), sum(a.prompt_tokens for a in good)
  rows: list[tuple[str, float] | str] = [
    "Serving", ("Successful requests", len(good)), ("Failed requests", failures),
    ("Request rate (requests/s)", args.request_rate), ("Maximum concurrency", args.max_concurrency or math.inf),
    ("Benchmark duration (s)", seconds), ("Total input tokens", prompt_tokens), ("Total generated tokens", tokens),
    ("Request throughput (requests/s)", len(good) / seconds), ("Output token throughput (tokens/s)", tokens / seconds),
    ("Total token throughput (tokens/s)", (tokens + prompt_tokens) / seconds),
    ("Client CPU usage (% of a core)", 100 * run.cpu_usage)]
  for title, name, values in (("Time to first token", "TTFT", [a.ttft for a in good if a.times]),
                              ("Time per output token, after the first", "TPOT",
                               [a.tpot for a in good if a.times and a.tokens > 1]),
                              ("Inter-token latency", "ITL", [x for a in good for x in a.itl])):
    if not values: continue   # --no-stream
    figures = {"Mean": statistics.fmean(values), "Median": statistics.median(values), "P99": np.percentile(values, 99)}
    rows += [title, *((f"{which} {name} (ms)", 1e3 * value) for which, value in figures.items())]
  for row in rows:
    if isinstance(row, str): print(f"{f' {row} ':-^52}")
    else: print(f"{row[0] + ':':40}{row[1]:>12{'' if isinstance(row[1], int) else '.2f'}}")
  for error in sorted({a.error for a in run.answers if a.error})[:3]: print(f"failed: {error[-400:]}")
  return int(failures > 0)


def bench(args: argparse.Namespace) -> int:
  with server(args) as url:
    client, delays = Client(args, url), [0.0]
    client.warm_up(min(args.num_prompts, args.max_concurrency or args.num_prompts, 32))
    for _ in range(args.num_prompts - 1):
      delays.append(delays[-1] + (client.rng.expovariate(args.request_rate) if args.request_rate < math.inf else 0.0))
    run = client.run(client.ids(args.num_prompts), args.output_len, delays, args.max_concurrency or 0)
  return report(run, args)


def compare(args: argparse.Namespace) -> int:
  streams, tokens = args.streams, args.output_len
  with server(args) as url:
    llm, client, runs = open_llm(args, **options(args)), Client(args, url), list[Run]()

    def params(n: int) -> SamplingParams:
      return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, skip_special_tokens=False)

    def http(n: int) -> Run:
      run = client.run(client.ids(n), tokens)
      for a in run.answers:
        if a.error or a.tokens != tokens: raise SystemExit(f"error: {a.tokens} tokens of {tokens} {a.error[-400:]}")
      return run

    def engine(n: int, tokens: int = tokens) -> float:
      """Return the seconds that n prompts take."""
      prompts: list = [{"prompt_token_ids": ids} for ids in client.ids(n)]
      started = time.perf_counter()
      outputs = llm.generate(prompts, params(tokens), use_tqdm=False)
      seconds = time.perf_counter() - started
      assert all(len(o.outputs[0].token_ids) == tokens for o in outputs)
      return seconds

    def engine_ttft() -> float:
      *_, last = llm.generate_stream({"prompt_token_ids": client.ids(1)[0]}, params(tokens))
      return last.metrics.ttft

    client.warm_up(streams)
    for n in powers(streams): engine(n, min(8, tokens))
    http(streams), engine(streams)
    http_ttfts, engine_ttfts, rates, rows = list[float](), list[float](), list[tuple[float, float]](), []
    for i in range(args.rounds):   # alternate which runs first
      for j in range(args.requests):
        for which in ("http", "engine") if (i + j) % 2 else ("engine", "http"):
          if which == "http": http_ttfts.append(1e3 * http(1).answers[0].ttft)
          else: engine_ttfts.append(1e3 * engine_ttft())
      for which in ("http", "engine") if i % 2 else ("engine", "http"):
        if which == "http": runs.append(http(streams))
        else: seconds = engine(streams)
      rates.append((streams * tokens / runs[-1].seconds, streams * tokens / seconds))
      a, b = (statistics.median(x[-args.requests:]) for x in (http_ttfts, engine_ttfts))
      rows.append([f"{i + 1}", f"{a:.2f}", f"{b:.2f}", f"{a - b:.2f}", *(f"{rate:.0f}" for rate in rates[-1]),
                   f"{rates[-1][0] / rates[-1][1]:.3f}", f"{runs[-1].cpu_usage:.0%}"])
  common.print_table(["round", "TTFT ms: HTTP", "engine", "difference", f"tokens/s of {streams} streams: HTTP",
                      "engine", "ratio", "client CPU usage"], rows)
  differences, ratios = ([float(row[column]) for row in rows] for column in (3, 6))
  a, b = map(statistics.median, (http_ttfts, engine_ttfts))
  best_http, best_engine = min(http_ttfts), min(engine_ttfts)
  print(f"(a) TTFT, one request at a time: HTTP {a:.2f} ms, engine {b:.2f} ms, difference {a - b:.2f} ms "
        f"(medians of {len(http_ttfts)}; rounds: {min(differences):.2f} to {max(differences):.2f}); minimums "
        f"{best_http:.2f} and {best_engine:.2f} ms, difference {best_http - best_engine:.2f} ms")
  events = statistics.median(len(x.times) for r in runs for x in r.answers)
  best = [max(column) for column in zip(*rates, strict=True)]
  print(f"(b) output tokens/s of {streams} streams, HTTP / LLM.generate: {statistics.median(ratios):.3f} (rounds: "
        f"{min(ratios):.3f} to {max(ratios):.3f}); best rounds {best[0]:.0f} / {best[1]:.0f}, {best[0] / best[1]:.3f}; "
        f"{events:.0f} events for {tokens} tokens")
  return 0


def main() -> int:
  parser = common.make_parser(__doc__)
  parser.set_defaults(shape=None, max_num_batched_tokens=512)
  parser.add_argument("--url", help="URL of a running server (default: start one)")
  parser.add_argument("--num-prompts", type=common.positive, default=100, help="number of requests")
  parser.add_argument("--input-len", type=common.positive, default=128, help="tokens per prompt")
  parser.add_argument("--output-len", type=common.positive, default=64, help="output tokens per prompt")
  parser.add_argument("--request-rate", type=float, default=math.inf, help="mean requests per second")
  parser.add_argument("--max-concurrency", type=common.positive, help="maximum concurrent requests")
  parser.add_argument("--stream", action=argparse.BooleanOptionalAction, default=True, help="stream the responses")
  parser.add_argument("--max-model-len", type=common.positive, help="default: --input-len + --output-len")
  parser.add_argument("--max-num-seqs", type=common.positive, help="default: --max-concurrency, or 32")
  parser.add_argument("--compare", action="store_true", help="compare HTTP with LLM.generate")
  parser.add_argument("--streams", type=common.positive, default=32, help="--compare: concurrent requests in (b)")
  parser.add_argument("--rounds", type=common.positive, default=7, help="--compare: rounds")
  parser.add_argument("--requests", type=common.positive, default=10, help="--compare: requests of (a) per round")
  parser.add_argument("--stream-interval", type=int, default=1, help="tokens per event of the server")
  parser.add_argument("--step-ms", type=float, help="simulate a device with this step time in milliseconds")
  parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)   # set in the server's process
  parser.add_argument("--port", help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.serve: return serve(args)
  if args.request_rate <= 0: parser.error(f"--request-rate {args.request_rate:g} must be above 0")
  if args.compare and (args.url or not args.stream): parser.error("--compare does not support --url or --no-stream")
  signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))   # also stops the server
  print(common.machine_line(), flush=True)
  return compare(args) if args.compare else bench(args)


if __name__ == "__main__": sys.exit(main())
