"""Servers for tests: `Server` is a process, started as users start it, `LocalServer` a thread of this process, which
starts in milliseconds and may use the fake device. Both answer over HTTP on a free port, with the same methods."""
import contextlib
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx   # installed with openai
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from .commands import parse_command
from .data import read_data

TYPES = read_data("server_cases.json")["error types"]   # by status


def wait_until(condition: Callable[[], Any], description: str = "", seconds: float = 60.0) -> Any:
  """Poll the condition until it is truthy, and return its value. Raises AssertionError after `seconds`."""
  deadline = time.monotonic() + seconds
  while not (result := condition()):
    assert time.monotonic() < deadline, f"not within {seconds} s: {description}"
    time.sleep(0.01)
  return result


def reserve_port() -> socket.socket:
  """Return a socket bound to a free port, which reserves the port. A server may still listen on it, since this socket
  does not."""
  holder = socket.socket()
  holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  holder.bind(("127.0.0.1", 0))
  return holder


def events(lines: Iterable[str]) -> Iterator[Any]:
  """Yield the data of each server-sent event: parsed JSON, or the string "[DONE]". Raises AssertionError for any line
  that is not part of an event."""
  last = ""
  for line in lines:
    if line: assert line.startswith("data: ") and not last, f"{line!r} after {last!r}: an event must be one data line"
    else:
      assert last, "an empty line must follow an event"
      yield last[6:] if last == "data: [DONE]" else json.loads(last[6:])
    last = line
  assert not last, f"no empty line follows {last!r}"


class Client(contextlib.AbstractContextManager):
  """Requests to a server. url: its address, without a path."""
  url: str

  def healthy(self) -> bool:
    """Return True if /health answers 200."""
    try: return self.get("/health").status_code == 200
    except httpx.TransportError: return False

  @property
  def port(self) -> int: return int(self.url.rpartition(":")[2])

  def client(self, **options: Any) -> openai.OpenAI:
    """Return a client of the openai package, without retries."""
    defaults = {"base_url": self.url + "/v1", "api_key": "none", "max_retries": 0, "timeout": 60,
                "http_client": openai.DefaultHttpxClient(verify=False)}
    return openai.OpenAI(**{**defaults, **options})

  def http(self, **options: Any) -> httpx.Client:
    """Return a plain HTTP client. It skips reading certificates, the slowest part of its startup."""
    return httpx.Client(**{"base_url": self.url, "timeout": 60, "verify": False, **options})

  def request(self, method: str, path: str, **options: Any) -> httpx.Response:
    """Send one request on a new connection."""
    with self.http() as http: return http.request(method, path, **options)

  def get(self, path: str, **options: Any) -> httpx.Response: return self.request("GET", path, **options)

  def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
    """Send `body` as JSON, or raw bytes passed as `content`."""
    return self.request("POST", path, **options if body is None else {"json": body, **options})

  @contextlib.contextmanager
  def stream(self, path: str, body: Any, **options: Any) -> Iterator[httpx.Response]:
    """Yield a streaming response. Dropping the iterator over its lines closes the connection."""
    with self.http() as http, http.stream("POST", path, json={**body, "stream": True}, **options) as response:
      yield response

  def samples(self) -> list[Any]:
    """Return the samples of /metrics, each with name, labels and value."""
    text = self.get("/metrics").raise_for_status().text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]

  def metrics(self) -> dict[str, float]:
    """Return /metrics as {name: value}: names without the prefix, with all labels except model_name."""
    values = {}
    for sample in self.samples():
      labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()) if k != "model_name")
      values[sample.name.removeprefix("tinyvllm:") + f"{{{labels}}}" * bool(labels)] = sample.value
    return values


class Server(Client):
  """Start a server: `Server(model, "--max-queue", "2")`. A context manager, which terminates the server on exit.

  ready: wait for /health to answer 200; False waits only for the port. environment: additional variables. before:
  Python code to run first, to inject a fault. script: a script to run instead of `tinyvllm serve`, with its options.
  seconds: startup timeout; compiling all kernels of the bundled model takes 80 s on an idle machine."""
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
        cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})})
    try:
      self.url = wait_until(self._find_url, "the log has the URL", seconds)
      if ready: wait_until(self.healthy, "/health answers 200", seconds)
    except BaseException as e:
      log = self.log
      self.close()
      if isinstance(e, AssertionError): raise AssertionError(f"{e}\nstderr of the server:\n{log}") from None
      raise

  def _find_url(self) -> str:
    match = re.search(r"(?:listening|tinyvllm: running) on (https?://[^\s]*:\d+)", self.log)
    assert match or self.process.poll() is None, f"the server exited with code {self.process.poll()}"
    return match[1] if match else ""

  @property
  def log(self) -> str: return self.stderr_file.read_text(errors="replace")

  def healthy(self) -> bool:
    """Return True if /health answers 200. Raises AssertionError if the server has exited."""
    assert self.process.poll() is None, f"the server exited with code {self.process.poll()}"
    return super().healthy()

  def signal(self, number: int = signal.SIGTERM) -> None: self.process.send_signal(number)

  def wait(self, seconds: float = 60.0) -> int:
    """Wait for the process to exit, and return its exit code."""
    return self.process.wait(seconds)

  def stop(self, seconds: float = 60.0) -> int:
    """Send SIGTERM, and return the exit code."""
    self.signal()
    return self.wait(seconds)

  def close(self) -> None:
    """Terminate the process, or kill it after 20 s, and delete its files."""
    self.process.terminate()
    try: self.process.wait(20)
    except subprocess.TimeoutExpired:
      self.process.kill()
      self.process.wait(20)
    self.folder.cleanup()

  def __exit__(self, *error: Any) -> None: self.close()


class LocalServer(Client):
  """`tinyvllm serve MODEL *options` in a thread of this process. A context manager, which stops the server on exit.

  ready: wait for /health to answer 200; False waits only for the port. before: a function that gets a MonkeyPatch, to
  inject faults until the server stops. llm: the engine, once the model is loaded."""
  def __init__(self, model: str | os.PathLike | None = None, *options: Any, ready: bool = True,
               before: Callable[[pytest.MonkeyPatch], None] = lambda patch: None, seconds: float = 60.0):
    from tinyvllm_extra.cli import serve
    from tinyvllm_extra.serving import app   # here, so that other lanes need no server
    self.patch = pytest.MonkeyPatch()
    # Each server has its own unknown fields: they are global in a process
    self.patch.setattr(app.protocol, "unknown_fields", SimpleNamespace(strict=False, names=set()))
    before(self.patch)
    args = parse_command("serve", *([model] if model else []), *options, "--port", "0")
    models = serve.hub.named_models(args.get("model", []), args.get("models_dir"))
    self.server = serve.make_router(args, models) if models else app.Server(*serve.read_arguments(args)[:3])
    config = self.server.options
    self.stderr = io.StringIO()
    self.handler = logging.StreamHandler(self.stderr)
    for name in ("tinyvllm", "uvicorn.error"): logging.getLogger(name).addHandler(self.handler)   # after uvicorn's own
    self.thread = threading.Thread(target=self.server.run, daemon=True)
    self.thread.start()
    wait_until(lambda: self.server.started or not self.thread.is_alive(), "the server listens", seconds)
    assert self.server.started, f"the server ended: {self.server.error}"
    host, port, *_ = self.server.servers[0].sockets[0].getsockname()
    self.url = f"http{'s' * bool(config.ssl_certfile)}://{host}:{port}"
    if ready: wait_until(lambda: self.healthy() or self.server.error, "/health answers 200", seconds)
    if self.server.error:
      self.stop()
      raise self.server.error

  @property
  def log(self) -> str: return self.stderr.getvalue()

  @property
  def llm(self) -> Any: return self.server.serving.llm.llm

  def signal(self, number: int = signal.SIGTERM) -> None: self.server.handle_exit(number, None)

  def stop(self, seconds: float = 60.0) -> int:
    """Stop as after SIGTERM, and return the exit code."""
    self.signal()
    self.thread.join(seconds)
    assert not self.thread.is_alive(), f"the server does not stop within {seconds} s"
    if self.server.serving.llm: self.server.serving.llm.shutdown()
    for name in ("tinyvllm", "uvicorn.error"): logging.getLogger(name).removeHandler(self.handler)
    self.patch.undo()
    return self.server.code

  def __exit__(self, *error: Any) -> None:
    if self.thread.is_alive(): self.stop()


def checked(server: Any) -> Iterator[Any]:
  """Yield the server. At the end of the module, check that it is idle and that SIGTERM makes it exit with 0."""
  with server:
    yield server
    # The server detects a disconnect in the last test within one step
    names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
    wait_until(lambda: {server.metrics()[x] for x in names} == {0}, "no request runs, and all blocks are free", 20)
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
  """Check the format of an error response, and return its error object."""
  assert response.status_code == status, response.text
  assert response.headers["content-type"] == "application/json"
  body = response.json()
  assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
  error = body["error"]
  assert error["code"] == status and error["type"] == TYPES[str(status)] and error["message"], error
  assert "Traceback" not in error["message"]
  return error


def stream(server: "Client", path: str, body: Any, **options: Any) -> list[Any]:
  """Return all events of a streamed response."""
  with server.stream(path, body, **options) as response:
    assert response.status_code == 200 and response.headers["content-type"].split(";")[0] == "text/event-stream"
    return list(events(response.iter_lines()))
