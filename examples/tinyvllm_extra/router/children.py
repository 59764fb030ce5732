"""The processes of several models. Each is started by the first request that names its model, and stopped when it has
been idle for the time to live, or when another one needs its memory. It runs this module's last lines: `tinyvllm serve`
on a loopback port, with a key that only the router knows, which also ends if the router dies."""
import asyncio, contextlib, dataclasses, os, runpy, secrets, signal, socket, sys, threading, time, urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import h11, orjson

from tinyvllm.config import JsonObject
from tinyvllm_extra.serving import answers, errors, generation

KEY = secrets.token_urlsafe()
POLL = 0.02   # seconds between two looks at a child
# For a single connection, or set by the router
OWN_HEADERS = {b"authorization", b"x-api-key", b"connection", b"transfer-encoding", b"expect", b"date", b"server"}


@dataclasses.dataclass(eq=False)
class Child:
  """A model, which may run. words: its command line. memory: its part of all free memory, from 0 to 1. patience:
  seconds for a process to end after a signal; then it is killed."""
  name: str
  words: list[str]
  memory: float
  patience: float = 40.0
  process: asyncio.subprocess.Process | None = None   # None: it does not run
  card: JsonObject = dataclasses.field(default_factory=dict)   # its entry in /v1/models, after it has been ready
  end: str = ""               # why the last process has ended
  num_requests: int = 0       # that run, or wait for the start
  idle_since: float = 0.0     # end of the last request, or of the start
  is_stopping: bool = False   # its requests end, later ones wait
  loading: asyncio.Task[None] | None = None   # the last start

  @property
  def state(self) -> str:
    is_loading = self.loading and not self.loading.done()
    return "stopping" if self.is_stopping else "loading" if is_loading else "ready" if self.process else "unloaded"

  async def start(self, share: float) -> None:
    """Start the process, and return when requests can run. share: its part of the memory that is free now, from 0.01
    to 1. Raises Refusal if the process ends."""
    with socket.create_server(("127.0.0.1", 0)) as free: self.port = free.getsockname()[1]
    own = [f"--port={self.port}", f"--served-model-name={self.name}", f"--gpu-memory-utilization={share}"]
    # The router has read the variables of flags
    env = {name: value for name, value in os.environ.items() if not name.startswith("TINYVLLM_")}
    self.process = process = await asyncio.create_subprocess_exec(
      sys.executable, "-m", __name__, "serve", *self.words, *own, env=env | {"TINYVLLM_API_KEY": KEY}, limit=2**20,
      stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True)   # Ctrl-C: to the router
    self.log_task = asyncio.create_task(self.read_log(process))
    while self.process and not await self.get("/health"): await asyncio.sleep(POLL)
    if not self.process: raise errors.Refusal(502, await self.reason())
    self.card = orjson.loads(await self.get("/v1/models"))["data"][0]

  async def send(self, method: str, path: str, headers: list, body: bytes) -> AsyncGenerator[JsonObject, None]:
    """Send a request on a connection of its own. Yield its answer as ASGI messages. If the process ends, a stream ends
    with an event of an error. Raises Refusal if it ends before."""
    fields = {b"host": b"localhost", **{name: x.strip() for name, x in headers if name not in OWN_HEADERS},
              b"authorization": f"Bearer {KEY}".encode(), b"content-length": b"%d" % len(body), b"connection": b"close"}
    request = h11.Request(method=method, target=urllib.parse.quote(path), headers=[*fields.items()])
    connection, headers, end = h11.Connection(h11.CLIENT, 2**17), [], b""   # bytes of headers: X-Request-Id may be long
    try:
      reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
      with contextlib.closing(writer):
        writer.write(b"".join(connection.send(x) or b"" for x in (request, h11.Data(data=body), h11.EndOfMessage())))
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
          if isinstance(event, h11.Response):
            headers = [x for x in event.headers if x[0] not in OWN_HEADERS]
            yield {"type": "http.response.start", "status": event.status_code, "headers": headers}
          elif isinstance(event, h11.Data): yield {"type": "http.response.body", "body": event.data, "more_body": True}
          else: connection.receive_data(await reader.read(2**16))
    except (OSError, h11.ProtocolError) as error:
      content = errors.error_body(502, await self.reason())
      if generation.EVENT_STREAM not in str(headers): raise errors.Refusal(502, content["error"]["message"]) from error
      end = answers.event(errors.anthropic_error(content["error"]) if path.startswith("/v1/messages") else content)
    yield {"type": "http.response.body", "body": end}

  async def get(self, path: str) -> bytes:
    """Return the body of an answer, or b"" if the process is not ready or ends."""
    messages = list[JsonObject]()
    with contextlib.suppress(errors.Refusal): messages = [x async for x in self.send("GET", path, [], b"")]
    return b"".join(x.get("body", b"") for x in messages if messages[0]["status"] == 200)

  async def read_log(self, process: asyncio.subprocess.Process) -> None:
    """Print the log of a process until it ends."""
    assert process.stderr
    line = b""
    async for line in process.stderr: print(f"{self.name}: {line.decode(errors='replace')}", end="", file=sys.stderr)
    code = await process.wait()
    text = line.decode(errors="replace").strip()
    self.end = f"exit code {code}: {text}" if code >= 0 else f"the process ended with {signal.strsignal(-code)}"
    self.process = None

  async def reason(self) -> str:
    """Return why a connection has ended. The process may end a moment later."""
    # `start` looks again
    await asyncio.wait([self.log_task], timeout=POLL if self.state == "loading" else 1)
    return f"{self.name}: {'the connection was closed' if self.process else self.end}. The next request starts it again"

  async def stop(self) -> None:
    """End the process as a signal does: its requests end first."""
    for end in (signal.SIGTERM, signal.SIGKILL):
      if self.process and self.process.returncode is None: self.process.send_signal(end)
      await asyncio.wait([self.log_task], timeout=self.patience)


class Children:
  """All children. limit: of the memory of running ones. ttl: seconds until an idle one stops; None: never."""
  def __init__(self, children: Sequence[Child], limit: float, ttl: float | None = None):
    self.by_name = {child.name: child for child in children}
    self.limit = limit
    self.ttl = ttl
    self.lock = asyncio.Lock()   # fair: starts and stops happen one at a time, in the order of their requests
    self.is_closed = False
    self.expiry: asyncio.Task[None] | None = None

  def alive(self) -> list[Child]: return [child for child in self.by_name.values() if child.process]

  @contextlib.asynccontextmanager
  async def use(self, child: Child) -> AsyncIterator[None]:
    """Keep a child running for a request. Start it first if necessary, which goes on if the request is cancelled."""
    while child.is_stopping: await asyncio.sleep(POLL)
    child.num_requests += 1
    try:
      if child.state == "unloaded": child.loading = asyncio.create_task(self.load(child))
      if child.loading: await asyncio.shield(child.loading)
      self.expiry = self.expiry or asyncio.create_task(self.expire())
      yield
    finally:
      child.num_requests -= 1
      child.idle_since = time.monotonic()

  async def load(self, child: Child) -> None:
    """Stop others until the child's memory is free, then start it."""
    async with self.lock:
      while (used := sum(x.memory for x in self.alive())) and used + child.memory > self.limit:
        # The least recently used one, of those without requests if there are any
        await self.unload(min(self.alive(), key=lambda child: (child.num_requests > 0, child.idle_since)))
      if self.is_closed: raise errors.Refusal(503, "the server is shutting down")
      await child.start(max(0.01, min(child.memory / (1 - used), 1)))
      child.idle_since = time.monotonic()

  async def unload(self, child: Child) -> None:
    """Stop a child when its requests have ended; later ones wait. The caller has the lock."""
    child.is_stopping = True
    while child.num_requests: await asyncio.sleep(POLL)
    await child.stop()
    child.is_stopping = False

  async def expire(self) -> None:
    """Stop children after their time to live. Runs until it is cancelled."""
    while self.ttl:
      await asyncio.sleep(min(1.0, self.ttl / 4))
      async with self.lock:
        for child in self.alive():
          if not child.num_requests and time.monotonic() - child.idle_since >= self.ttl: await self.unload(child)

  async def close(self) -> None:
    """Stop all children, and start none."""
    self.is_closed = True
    await asyncio.gather(*[child.stop() for child in self.alive()])


if __name__ == "__main__":
  # The router has the other end of standard input: if it ends, so does this process, as with a signal
  def follow() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
  threading.Thread(target=follow, daemon=True).start()
  runpy.run_module("tinyvllm", run_name="__main__", alter_sys=True)
