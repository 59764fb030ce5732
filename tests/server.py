"""A server of its own process, as users start it: `python -m tinyvllm serve` on a free port of this machine."""
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx   # what openai brings
import openai
from prometheus_client.parser import text_string_to_metric_families


def wait_until(condition: Callable[[], Any], what: str = "", seconds: float = 60.0) -> Any:
  """Ask again and again until the answer is true, and return it. AssertionError after so many seconds."""
  deadline = time.monotonic() + seconds
  while not (answer := condition()):
    assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
    time.sleep(0.01)   # between two looks at the condition, not instead of one
  return answer


def held_port() -> socket.socket:
  """Bound to a free port of this machine, that no other program is given while this is open. A server may listen there
  beside it, as this one does not."""
  holder = socket.socket()
  holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  holder.bind(("127.0.0.1", 0))
  return holder


def events(lines: Iterable[str]) -> Iterator[Any]:
  """What each event of a text/event-stream carries: JSON, or the text [DONE]. Whatever is not an event is an error."""
  last = ""
  for line in lines:
    if line: assert line.startswith("data: ") and not last, f"{line!r} after {last!r}: not an event of one data line"
    else:
      assert last, "an empty line without an event before it"
      yield last[6:] if last == "data: [DONE]" else json.loads(last[6:])
    last = line
  assert not last, f"{last!r} has no empty line after it"


class Server:
  """`Server(model, "--max-queue", "2")` starts one and waits until it answers; `ready=False` only until it listens.
  Its stderr goes to a file, `log` is its text. As a context manager it is terminated at the end. `environment`: more
  variables for it; `before`: Python that it runs first, to put a fault in; `seconds`: to wait at most; one
  that compiles all kernels of the shipped model takes 80 on an idle machine; `script`: one that serves in place of
  `tinyvllm serve`, and takes its options."""
  def __init__(self, model: str | os.PathLike | None = None, *options: Any, ready: bool = True, before: str = "",
               environment: dict[str, str] | None = None, seconds: float = 240.0, script: str = ""):
    self.folder = tempfile.TemporaryDirectory(prefix="tinyvllm-server-")
    self.stderr_file, self.url = Path(self.folder.name) / "stderr.txt", ""
    code = f"{before}\nimport sys, tinyvllm_extra.cli\nsys.exit(tinyvllm_extra.cli.main())"
    run = [script] if script else [*(["-c", code] if before else ["-m", "tinyvllm"]), "serve"]
    command = [sys.executable, *run, *([str(model)] if model else []), "--port", "0"]
    with open(self.stderr_file, "wb") as file:
      self.process = subprocess.Popen(
        [*command, *map(str, options)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file,
        cwd=Path(__file__).parents[1], env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})})
    try:
      self.url = wait_until(self._listens, "Uvicorn's line", seconds)
      if ready: wait_until(self.healthy, "/health answers 200", seconds)
    except BaseException as e:
      log = self.log
      self.close()
      if isinstance(e, AssertionError): raise AssertionError(f"{e}\nits stderr:\n{log}") from None
      raise

  def _listens(self) -> str:
    found = re.search(r"(?:Uvicorn|tinyvllm:) running on (http://[^\s]*:\d+)", self.log)
    assert found or self.process.poll() is None, f"the server ended with exit code {self.process.poll()}"
    return found[1] if found else ""

  @property
  def log(self) -> str: return self.stderr_file.read_text(errors="replace")

  @property
  def port(self) -> int: return int(self.url.rpartition(":")[2])

  def healthy(self) -> bool:
    """Whether /health answers 200. A server that has ended is an AssertionError."""
    assert self.process.poll() is None, f"the server ended with exit code {self.process.poll()}"
    try: return self.get("/health").status_code == 200
    except httpx.TransportError: return False

  def client(self, **options: Any) -> openai.OpenAI:
    """The openai package's client, which asks once: no retries."""
    defaults = {"base_url": self.url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 60,
                "http_client": openai.DefaultHttpxClient(verify=False)}
    return openai.OpenAI(**{**defaults, **options})

  def http(self, **options: Any) -> httpx.Client:
    """A client for requests by hand. It reads no certificates, which takes longer than all else."""
    return httpx.Client(**{"base_url": self.url, "timeout": 60, "verify": False, **options})

  def request(self, method: str, path: str, **options: Any) -> httpx.Response:
    """One request on a connection of its own."""
    with self.http() as http: return http.request(method, path, **options)

  def get(self, path: str, **options: Any) -> httpx.Response: return self.request("GET", path, **options)

  def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
    """A request whose body is JSON, or bytes as `content`."""
    return self.request("POST", path, **options if body is None else {"json": body, **options})

  @contextlib.contextmanager
  def stream(self, path: str, body: Any, **options: Any) -> Iterator[httpx.Response]:
    """A streamed answer while it comes. Who drops the iterator over its lines has ended it."""
    with self.http() as http, http.stream("POST", path, json={**body, "stream": True}, **options) as response:
      yield response

  def metrics(self) -> dict[str, float]:
    """/metrics as {name: value} without the prefix, a counter's {name and labels but model_name's: value}."""
    text = self.get("/metrics").raise_for_status().text
    found = {}
    for family in text_string_to_metric_families(text):
      for sample in family.samples:
        labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
        found[sample.name.removeprefix("tinyvllm:") + f"{{{labels}}}" * bool(labels)] = sample.value
    return found

  def signal(self, number: int = signal.SIGTERM) -> None: self.process.send_signal(number)

  def wait(self, seconds: float = 60.0) -> int:
    """The exit code, once it has ended."""
    return self.process.wait(seconds)

  def stop(self, seconds: float = 60.0) -> int:
    """SIGTERM, and the exit code."""
    self.signal()
    return self.wait(seconds)

  def close(self) -> None:
    """End it, by force if it does not go, and take its files away."""
    if self.process.poll() is None:
      self.process.terminate()
      try: self.process.wait(20)
      except subprocess.TimeoutExpired:
        self.process.kill()
        self.process.wait(20)
    self.folder.cleanup()

  def __enter__(self) -> "Server": return self
  def __exit__(self, *error: Any) -> None: self.close()
