"""The engine for asyncio. One thread owns it, and others reach it through an inbox: no lock is held anywhere. Who reads
a request is told its news, and exactly once its end."""
import asyncio, collections, contextlib, functools, itertools, pathlib, queue, threading, uuid, weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, NamedTuple

from tinyvllm import LLM, RequestOutput
from tinyvllm.config import EngineConfig, check, effective, logger
from tinyvllm.engine import Params, Prompt, Request

News = RequestOutput | Exception
Numbered = tuple[int, RequestOutput]   # which of some requests, and what is new of it
IDLE = 2.0   # seconds without a request, after which steps are captured that may never be met


class Reader(NamedTuple):
  """Who reads a request."""
  loop: asyncio.AbstractEventLoop
  take: Callable[[Request, News, bool], None]   # called in that loop with what is new, and whether it is the last


class Driver:
  """What the engine's thread does. Others put calls of it into its inbox."""
  def __init__(self, llm: LLM, interval: int, captures: Iterator[str], prefix_cache_file: str | None):
    self.llm = llm
    self.prefix_cache_file = prefix_cache_file
    self.interval = interval   # tokens from one piece of a text to the next
    self.captures: Iterator[str] | None = captures   # each next does one, and says what is still waited for
    self.state = next(captures)
    self.inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()   # None: end
    self.readers: dict[Request, Reader] = {}

  def run(self) -> None:
    """Between two steps all that is in the inbox; where there is nothing to step for, wait for it, and after a while
    capture what is rare."""
    while True:
      busy = self.inbox.empty() and self.llm.has_unfinished_requests()
      call: Any = self.capture if self.state else self.step if busy else None
      try: call = call or self.inbox.get(timeout=IDLE if self.captures else None)
      except queue.Empty: call = self.capture
      if call is None: return
      try: call()
      except BaseException: logger.exception("the engine's thread goes on")   # also where a library wants to exit

  def capture(self) -> None:
    try: self.state = next(self.captures)   # type: ignore[arg-type]
    except StopIteration: self.captures = None

  def save(self) -> None:
    try: self.llm.save_prefix_cache(self.prefix_cache_file)   # type: ignore[arg-type]   # there is one
    except Exception as error: logger.warning(f"prefix cache {self.prefix_cache_file!r} is not written: {error}")

  def add(self, request: Request, reader: Reader) -> None:
    self.readers[request] = reader
    try: self.llm.add(request)
    except Exception as error: self.tell({request: error})

  def end(self, request: Request | None, error: Exception | None = None) -> None:
    if request is None or request not in self.readers: return   # it has ended
    with contextlib.suppress(RuntimeError): self.llm.abort_request(request.request_id)   # if another thread is in there
    self.tell({request: error or request.output(news=True)})

  def step(self) -> None:
    try: changed = [request for request in self.llm.advance() if request in self.readers]
    except BaseException as error: return self.fail(error)
    self.tell({request: request.output(news=True) for request in changed if self.due(request)})

  def due(self, request: Request) -> bool:
    seen = sum(text.seen.tokens - text.seq.num_prompt for text in request.texts)
    return request.finished or not seen or request.metrics.num_generated >= seen + self.interval

  def fail(self, error: BaseException) -> None:
    """The engine goes on without the requests that have begun: one of them may have made the step fail."""
    if self.readers: logger.exception("a step failed, and the requests in it")
    begun = [request for request in self.readers if request.metrics.first_scheduled_time > 0]   # else it is NaN
    for request in begun or [*self.readers]:   # what has finished is told by the next step
      if not request.finished: self.end(request, RuntimeError(f"a step failed: {error}"))

  def tell(self, news: dict[Request, News]) -> None:
    """One call wakes all who read in a loop; where that is closed, nobody does."""
    calls: dict[Any, list[Callable[[], None]]] = collections.defaultdict(list)   # by loop
    for request, piece in news.items():
      last = isinstance(piece, Exception) or piece.finished
      reader = self.readers.pop(request) if last else self.readers[request]
      calls[reader.loop].append(functools.partial(reader.take, request, piece, last))
    for loop, own in calls.items():
      with contextlib.suppress(RuntimeError): loop.call_soon_threadsafe(lambda own=own: [call() for call in own])


class AsyncLLM:
  """Takes what LLM takes. stream_interval: tokens from one piece of a text to the next. prepare: have its thread
  capture the steps of cudagraph_capture_sizes, or of what suits the device, before the first request, and rare ones
  when there is none; `state` says how far it is. prefix_cache_file: what `LLM.load_prefix_cache` reads at the start, if
  it is there and will do, and `LLM.save_prefix_cache` writes at the shutdown. llm: the engine, of which any thread may
  call `request` and `get_metrics`; all else is for its own thread, which ends with this object."""
  def __init__(self, model: str | pathlib.Path | None = None, stream_interval: int = 1, prepare: bool = False,
               prefix_cache_file: str | None = None, **options: Any):
    check(type(stream_interval) is int and stream_interval > 0, f"stream_interval={stream_interval!r}: no int above 0")
    sizes = EngineConfig(**effective(options)).cudagraph_capture_sizes
    self.llm = LLM(model, **{**options, "cudagraph_capture_sizes": None})
    if prefix_cache_file:
      there = pathlib.Path(prefix_cache_file).expanduser().exists()
      try: self.llm.load_prefix_cache(prefix_cache_file)
      except ValueError as error: logger.log(30 if there else 20, f"{error}; starting without it")
    rare = ("" for _ in self.llm.capture(sizes, rare=True))
    captures = itertools.chain(self.llm.capture(sizes), [""], rare) if prepare or sizes else iter([""])
    self._driver = Driver(self.llm, stream_interval, captures, prefix_cache_file)
    weakref.finalize(self, self._driver.inbox.put, None)
    self._thread = threading.Thread(target=self._driver.run, name="tinyvllm-engine", daemon=True)
    self._thread.start()

  def shutdown(self) -> None:
    """End its thread, once that is between two steps or captures: as it traces one tinygrad could close no device."""
    self._driver.captures = iter([""])
    self.save_prefix_cache()
    self._driver.inbox.put(None)
    self._thread.join()

  def save_prefix_cache(self) -> None:
    """Have its thread write the prefix cache's file, if it has one, between two steps; if that fails, the log says so.
    Any thread may call this, and a signal's handler."""
    if self._driver.prefix_cache_file: self._driver.inbox.put(self._driver.save)

  state = property(lambda self: self._driver.state)   # what it waits for before it takes requests, or ""

  async def generate(self, prompt: Prompt, params: Params = None, request_id: str | None = None,
                     priority: int = 0) -> AsyncGenerator[RequestOutput, None]:
    """Complete one prompt, yielding the new text and ids as they come. To leave the loop, or to cancel it, aborts the
    request. Raises ValueError for a bad request, RuntimeError if a step of it fails."""
    request = await asyncio.to_thread(self.llm.request, request_id or uuid.uuid4().hex, prompt, params, priority)
    async with contextlib.aclosing(self.stream([request])) as stream:
      async for news in stream:
        for _, output in news: yield output

  async def stream(self, requests: list[Request], ended: Any = None) -> AsyncGenerator[list[Numbered], None]:
    """As `generate`, of several requests that `llm.request` has made: all that is new since the last time, and the
    number of the request that each piece is of. Once this is closed all have ended, unless that is cancelled, too.
    ended: called with each one as it ends, come what may."""
    pieces: list[tuple[Request, News]] = []   # that came and were not yielded
    came = asyncio.Event()
    left = set(requests)   # those that have not ended

    def take(request: Request, news: News, last: bool) -> None:
      pieces.append((request, news))
      came.set()
      if last: left.remove(request)
      if last and ended: ended(request)

    reader = Reader(asyncio.get_running_loop(), take)
    for request in requests: self._driver.inbox.put(functools.partial(self._driver.add, request, reader))
    try:
      while left or pieces:
        await came.wait()
        came.clear()
        outputs = [(requests.index(request), news) for request, news in pieces if not isinstance(news, Exception)]
        errors = [news for _, news in pieces if isinstance(news, Exception)]
        pieces.clear()
        if outputs: yield outputs
        for error in errors: raise error
    finally:
      for request in left: self._driver.inbox.put(functools.partial(self._driver.end, request))
      while left:
        came.clear()
        await came.wait()

  def abort(self, request_id: str) -> None:
    """End a request with finish_reason "abort", wherever it is. Any thread may call this."""
    driver = self._driver   # not self, as the thread holds on to its last call
    driver.inbox.put(lambda: driver.end(driver.llm.requests.get(request_id)))
