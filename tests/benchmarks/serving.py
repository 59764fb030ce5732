"""Benchmark `tinyvllm serve` with the metrics of `vllm bench serve`, and measure the overhead of HTTP.

  python tests/benchmarks/serving.py [--model DIR] --num-prompts 100 --request-rate 8 --max-concurrency 32
  python tests/benchmarks/serving.py --url http://127.0.0.1:8000 --input-len 128 --output-len 64
  python tests/benchmarks/serving.py --compare [--model DIR | --shape smollm2-135m]

Starts a server of the bundled model (or --model, --shape), or uses the one at --url. Prompts are different random ids;
every response has --output-len tokens. Requests arrive in a Poisson process. TTFT: time from sending a request to the
end of the first event with text. ITL: time between events. TPOT: time per output token after the first.

--compare alternates HTTP and LLM.generate in several rounds of one run, on the same load without a prefix cache:
(a) one request at a time: its TTFT minus RequestMetrics.ttft of an engine without HTTP; (b) --streams requests at once:
output tokens/s over HTTP divided by those of LLM.generate. The engine without HTTP is in this process, idle while the
server works.

The client runs asyncio's streams in this process; the server is another process with its own interpreter lock. On
few cores they compete, so the client's CPU usage is printed."""
import argparse
import asyncio
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit
from urllib.request import urlopen

import common
import numpy as np

import tinyvllm
from tinyvllm import LLM, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1]))   # tests
from helpers import servers

KEY = os.environ.get("OPENAI_API_KEY", "none")


@dataclass
class Answer:
  """A response. `parse` fills the other fields from head and parts; the token counts are those of the usage field."""
  start_time: float
  error: str = ""
  head: bytes = b""
  parts: list[tuple[float, bytes]] = field(default_factory=list)   # time and data of each part of the body
  times: list[float] = field(default_factory=list)   # arrival of each event with text
  tokens: int = 0
  prompt_tokens: int = 0

  def parse(self) -> None:
    if self.error: return
    body = b"".join(data for _, data in self.parts)
    if b" 200 " not in self.head.split(b"\r\n")[0]: self.error = body.decode(errors="replace")
    elif b"text/event-stream" not in self.head: self._usage(json.loads(body))
    else: self._events()

  def _events(self) -> None:
    rest = event = b""
    for received, data in self.parts:
      *events, rest = (rest + data).split(b"\n\n")
      for event in events:
        if event == b"data: [DONE]": continue
        content = json.loads(event.removeprefix(b"data: "))
        if content.get("error"): self.error = json.dumps(content)
        if content.get("usage"): self._usage(content)
        if any(choice.get("text") for choice in content.get("choices", [])): self.times.append(received)
    if not self.error and (event + rest != b"data: [DONE]" or not self.times or not self.tokens):
      self.error = f"stream without text, usage or [DONE]: {(event + rest)[-200:]!r}"

  def _usage(self, content: dict[str, Any]) -> None:
    self.tokens, self.prompt_tokens = (content["usage"][name] for name in ("completion_tokens", "prompt_tokens"))

  end = property(lambda self: self.parts[-1][0])
  ttft = property(lambda self: self.times[0] - self.start_time)
  tpot = property(lambda self: (self.times[-1] - self.times[0]) / (self.tokens - 1))
  itl = property(lambda self: [b - a for a, b in zip(self.times, self.times[1:], strict=False)])


async def send(request: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
  """Send a request and return its answer, not yet parsed: parsing now would take CPU time from the server."""
  answer = Answer(time.perf_counter())
  writer.write(request)
  answer.head = (await reader.readuntil(b"\r\n\r\n")).lower()
  if length := re.search(rb"content-length: *(\d+)", answer.head):
    answer.parts.append((time.perf_counter(), await reader.readexactly(int(length[1]))))
  while not length and (size := int(await reader.readline(), 16)):   # chunks; the last one is empty
    answer.parts.append((time.perf_counter(), (await reader.readexactly(size + 2))[:-2]))
  if not length: await reader.readexactly(2)
  return answer


@dataclass
class Run:
  answers: list[Answer]
  seconds: float     # from the first request to the last byte
  cpu_usage: float   # the client's CPU seconds per second

  @property
  def good(self) -> list[Answer]: return [a for a in self.answers if not a.error]


class Client:
  def __init__(self, args: argparse.Namespace, url: str):
    self.args, self.address, self.idle, self.rng = args, urlsplit(url), list[tuple](), random.Random(args.seed)
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
        try:
          connection = (self.idle.pop() if self.idle else
                        await asyncio.open_connection(self.address.hostname, self.address.port, limit=2**24))
          answer = await send(request, *connection)
        except (OSError, EOFError) as e: return Answer(time.perf_counter(), error=repr(e))
        self.idle.append(connection)
        return answer

    async def send_all() -> list[Answer]: return await asyncio.gather(*map(one, requests, delays))
    answers = self.loop.run_until_complete(send_all())
    cpu_seconds = time.process_time() - cpu_started
    seconds = max((a.end for a in answers if a.parts), default=time.perf_counter()) - min(a.start_time for a in answers)
    for answer in answers: answer.parse()
    return Run(answers, seconds, cpu_seconds / max(seconds, 1e-9))

  def warm_up(self, at_once: int) -> None:
    """Run all step sizes, so that their graphs are captured before the measurement."""
    for n in powers(at_once): self.run(self.ids(n), min(8, self.args.output_len))


def powers(n: int) -> list[int]:
  """Return 1, 2, 4, …, n."""
  return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]


def options(args: argparse.Namespace) -> dict[str, Any]:
  """Return the engine's options, the same here and in the server."""
  running = args.max_num_seqs or (args.streams if args.compare else args.max_concurrency or 32)
  share = 0.4 if args.compare else 0.9   # --compare has two engines on the device
  return {"max_model_len": args.max_model_len or args.input_len + args.output_len, "max_num_seqs": running,
          "max_num_batched_tokens": max(args.max_num_batched_tokens, running), "gpu_memory_utilization": share}


def open_llm(args: argparse.Namespace, **engine_options: Any) -> LLM:
  if args.shape or args.layers: return common.open_llm(args, **engine_options)
  return LLM(args.model, **{"dtype": args.dtype, "enable_prefix_caching": False, **engine_options})


def serve(args: argparse.Namespace) -> int:
  """Run `tinyvllm serve` with the engine of open_llm, whose weights may be random."""
  from tinyvllm_extra import cli
  from tinyvllm_extra.serving import async_engine
  with patch.object(async_engine, "LLM", lambda model, **engine_options: open_llm(args, **engine_options)):
    return cli.main(["serve", "--port=0", *(f"--{k.replace('_', '-')}={v}" for k, v in options(args).items()),
                     f"--stream-interval={args.stream_interval}"])


@contextmanager
def server(args: argparse.Namespace) -> Iterator[str]:
  """Yield --url, or the URL of a new server process."""
  if args.url:
    try: urlopen(f"{args.url}/health", timeout=10).close()   # an error for every status from 400 on
    except OSError as e: raise SystemExit(f"error: {args.url}/health: {e}") from e
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
  print(f"(a) TTFT, one request at a time: HTTP {a:.2f} ms, engine {b:.2f} ms, difference {a - b:.2f} ms "
        f"(medians of {len(http_ttfts)}; rounds: {min(differences):.2f} to {max(differences):.2f})")
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
  common.add_workload(parser, output_len=64)
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
