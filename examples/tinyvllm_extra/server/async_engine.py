"""An engine for asyncio. One thread owns the engine; other threads reach it through an inbox of calls, so no lock is
needed. Each reader gets all output of its requests in order, and the end of each exactly once."""
import asyncio, collections, contextlib, functools, itertools, logging, pathlib, queue, threading, uuid, weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, NamedTuple

from tinyvllm import LLM, RequestOutput
from tinyvllm.config import EngineConfig, check, logger
from tinyvllm.engine import Params, Prompt, Request
from tinyvllm_extra.flags import without_no_effect

Delta = RequestOutput | Exception      # a request's new text and tokens, or the reason why it ended
IndexedOutput = tuple[int, RequestOutput]   # index of the request in a list, its new text and tokens
IDLE_SECONDS = 2.0   # time without a request before graphs of optional features are captured


class StepError(RuntimeError):
  """A step failed, and the request with it. The engine's thread has logged the traceback."""


# Receiver of a request's output. receive is called in `loop`; True: this is the request's end
Receive = Callable[[Request, Delta, bool], None]
Reader = NamedTuple("Reader", [("loop", asyncio.AbstractEventLoop), ("receive", Receive)])


class Driver:
  """The engine's thread. Other threads put calls of it into its inbox."""
  def __init__(self, llm: LLM, interval: int, captures: Iterator[str], prefix_cache_file: str | None):
    self.llm = llm
    self.prefix_cache_file = prefix_cache_file
    self.interval = interval   # tokens from one delta to the next
    self.captures: Iterator[str] | None = captures   # each `next` captures a graph, and returns the next state
    self.state = next(captures)   # progress of the preparation, "" once requests can run
    self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()   # None ends the thread
    self.readers: dict[Request, Reader] = {}   # by unfinished request

  def run(self) -> None:
    """Loop: empty the inbox, then run a step. Without requests wait for the inbox; if idle, capture optional graphs."""
    while True:
      busy = self.inbox.empty() and self.llm.has_unfinished_requests()
      call: Any = self.capture if self.state else self.step if busy else None
      try: call = call or self.inbox.get(timeout=IDLE_SECONDS if self.captures else None)
      except queue.Empty: call = self.capture
      if call is None: return
      try: call()
      except BaseException: logger.exception("the engine's thread continues")   # also after a library's SystemExit

  def capture(self) -> None:
    try: self.state = next(self.captures)   # type: ignore[arg-type]
    except StopIteration: self.captures = None

  def save(self) -> None:
    try: self.llm.save_prefix_cache(self.prefix_cache_file)   # type: ignore[arg-type]   # not None here
    except Exception as error: logger.warning(f"prefix cache {self.prefix_cache_file!r} is not written: {error}")

  def add(self, request: Request, reader: Reader) -> None:
    self.readers[request] = reader
    try: self.llm.add(request)
    except Exception as error: self.deliver({request: error})

  def end(self, request: Request | None, error: Exception | None = None) -> None:
    """Abort a request, unless it has finished, and deliver its last output or the error."""
    if request is None or request not in self.readers: return
    with contextlib.suppress(RuntimeError): self.llm.abort_request(request.request_id)   # if another thread is inside
    self.deliver({request: error or request.output(delta=True)})

  def step(self) -> None:
    try: changed = [request for request in self.llm.advance() if request in self.readers]
    except BaseException as error: return self.fail(error)
    self.deliver({request: request.output(delta=True) for request in changed if self.is_due(request)})

  def is_due(self, request: Request) -> bool:
    delivered = sum(stream.delivered.num_tokens - stream.seq.num_prompt for stream in request.streams)
    return request.finished or not delivered or request.metrics.num_generated >= delivered + self.interval

  def fail(self, error: BaseException) -> None:
    """End the requests that have started, as one of them may have caused the failure. The others continue."""
    if self.readers: logger.exception("a step failed, and its requests with it")
    started = [request for request in self.readers if request.metrics.first_scheduled_time > 0]   # else it is NaN
    for request in started or [*self.readers]:   # the next step delivers requests that have finished
      if not request.finished: self.end(request, StepError(f"a step failed: {error}"))

  def deliver(self, deltas: dict[Request, Delta]) -> None:
    """Schedule one call in each event loop, which passes the deltas to its readers. A closed loop gets none."""
    calls: dict[Any, list[Callable[[], None]]] = collections.defaultdict(list)   # by loop
    for request, delta in deltas.items():
      last = isinstance(delta, Exception) or delta.finished
      reader = self.readers.pop(request) if last else self.readers[request]
      calls[reader.loop].append(functools.partial(reader.receive, request, delta, last))
    for loop, own in calls.items():
      with contextlib.suppress(RuntimeError): loop.call_soon_threadsafe(lambda own=own: [call() for call in own])


class AsyncLLM:
  """An LLM for asyncio, with LLM's options.

  stream_interval: minimum number of new tokens per output. prepare: capture the graphs of cudagraph_capture_sizes, or
  the device's default sizes, before the first request, and graphs of optional features when idle; `state` is the
  progress. prefix_cache_file: read at the start if it is usable, written at shutdown. llm: the engine. Any thread may
  call its `make_request` and `get_metrics`; its other methods are for the engine's thread, which ends with this
  object."""
  def __init__(self, model: str | pathlib.Path | None = None, stream_interval: int = 1, prepare: bool = False,
               prefix_cache_file: str | None = None, **options: Any):
    check(type(stream_interval) is int and stream_interval > 0,
          f"stream_interval={stream_interval!r} must be an int of at least 1")
    sizes = EngineConfig(**without_no_effect(options)).cudagraph_capture_sizes
    self.llm = LLM(model, **{**options, "cudagraph_capture_sizes": None})
    if prefix_cache_file:
      level = logging.WARNING if pathlib.Path(prefix_cache_file).expanduser().exists() else logging.INFO
      try: self.llm.load_prefix_cache(prefix_cache_file)
      except ValueError as error: logger.log(level, f"{error}; starting without it")
    optional = ("" for _ in self.llm.capture(sizes, optional=True))
    captures = itertools.chain(self.llm.capture(sizes), [""], optional) if prepare or sizes else iter([""])
    self._driver = Driver(self.llm, stream_interval, captures, prefix_cache_file)
    weakref.finalize(self, self._driver.inbox.put, None)
    self._thread = threading.Thread(target=self._driver.run, name="tinyvllm-engine", daemon=True)
    self._thread.start()

  def shutdown(self) -> None:
    """End the thread after the current step or capture: tinygrad cannot close a device while it captures."""
    self._driver.captures = iter([""])
    self.save_prefix_cache()
    self._driver.inbox.put(None)
    self._thread.join()

  def save_prefix_cache(self) -> None:
    """Write the prefix cache's file, if there is one, after the current step; log a failure. Any thread or signal
    handler may call this."""
    if self._driver.prefix_cache_file: self._driver.inbox.put(self._driver.save)

  state = property(lambda self: self._driver.state)   # progress of the preparation, "" once requests can run

  async def generate(self, prompt: Prompt, params: Params = None, request_id: str | None = None,
                     priority: int = 0) -> AsyncGenerator[RequestOutput, None]:
    """Complete one prompt; yield its new text and tokens. Closing the generator or cancelling its task aborts the
    request. Raises InputError for a bad request, StepError if one of its steps fails."""
    request = await asyncio.to_thread(self.llm.make_request, request_id or uuid.uuid4().hex, prompt, params, priority)
    async with contextlib.aclosing(self.stream([request])) as stream:
      async for outputs in stream:
        for _, output in outputs: yield output

  async def stream(self, requests: list[Request], on_end: Any = None) -> AsyncGenerator[list[IndexedOutput], None]:
    """Run several requests made by `llm.make_request`; yield all new outputs since the last time, with each request's
    index. All requests have ended once this is closed, unless the closing is cancelled, too. on_end: called with each
    request at its end, whatever the reason."""
    received: list[tuple[Request, Delta]] = []   # not yielded yet
    arrival = asyncio.Event()
    unfinished = set(requests)

    def receive(request: Request, delta: Delta, last: bool) -> None:
      received.append((request, delta))
      arrival.set()
      if last: unfinished.remove(request)
      if last and on_end: on_end(request)

    reader = Reader(asyncio.get_running_loop(), receive)
    for request in requests: self._driver.inbox.put(functools.partial(self._driver.add, request, reader))
    try:
      while unfinished or received:
        await arrival.wait()
        arrival.clear()
        outputs = [(requests.index(request), delta) for request, delta in received if not isinstance(delta, Exception)]
        errors = [delta for _, delta in received if isinstance(delta, Exception)]
        received.clear()
        if outputs: yield outputs
        for error in errors: raise error
    finally:
      for request in unfinished: self._driver.inbox.put(functools.partial(self._driver.end, request))
      while unfinished:
        arrival.clear()
        await arrival.wait()

  def abort(self, request_id: str) -> None:
    """End a request with finish_reason "abort", in any state. Any thread may call this."""
    driver = self._driver   # not self: the thread keeps a reference to its last call
    driver.inbox.put(lambda: driver.end(driver.llm.requests.get(request_id)))
