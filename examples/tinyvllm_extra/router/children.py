"""The processes of several models. Each is started by the first request that names its model, and stopped when it has
been idle for the time to live, or when another one needs its memory. It runs this module's last lines: `tinyvllm serve`
on a loopback port, with a key that only the router knows, which also ends if the router dies."""
import asyncio, contextlib, dataclasses, os, runpy, secrets, signal, socket, sys, threading, time
from collections.abc import AsyncIterator, Sequence

import httpx2 as httpx

from tinyvllm.config import JsonObject
from tinyvllm_extra.serving.errors import Refusal

KEY = secrets.token_urlsafe()
POLL = 0.02   # seconds between two looks at a child


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
    with socket.create_server(("127.0.0.1", 0)) as free: port = free.getsockname()[1]
    own = [f"--port={port}", f"--served-model-name={self.name}", f"--gpu-memory-utilization={share}"]
    # The router has read the variables of flags
    env = {name: value for name, value in os.environ.items() if not name.startswith("TINYVLLM_")}
    self.process = process = await asyncio.create_subprocess_exec(
      sys.executable, "-m", __name__, "serve", *self.words, *own, env=env | {"TINYVLLM_API_KEY": KEY}, limit=2**20,
      stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True)   # Ctrl-C: to the router
    self.log_task = asyncio.create_task(self.read_log(process))
    # The server closes connections that are idle for 5 s
    self.client = httpx.AsyncClient(
      base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {KEY}"}, timeout=None, trust_env=False,
      limits=httpx.Limits(max_connections=None, keepalive_expiry=2))
    while True:
      await asyncio.sleep(POLL)
      if not self.process: raise Refusal(502, await self.reason())
      with contextlib.suppress(httpx.TransportError):   # it does not listen yet
        if (await self.client.get("/health")).is_success: break
    self.card = (await self.client.get("/v1/models")).json()["data"][0]

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
    await asyncio.wait([self.log_task], timeout=1)
    return f"{self.name}: {'the connection was closed' if self.process else self.end}. The next request starts it again"

  async def stop(self) -> None:
    """End the process as a signal does: its requests end first."""
    if self.process and self.process.returncode is None: self.process.terminate()
    await asyncio.wait([self.log_task], timeout=self.patience)
    if self.process and self.process.returncode is None: self.process.kill()
    await self.log_task
    await self.client.aclose()


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
      if self.is_closed: raise Refusal(503, "the server is shutting down")
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
