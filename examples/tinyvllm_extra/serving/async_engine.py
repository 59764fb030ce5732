"""An asyncio engine. One thread owns the engine; other threads put calls into its inbox, so no lock is needed. A
reader receives its requests' output in order, and the end of each request exactly once. A second thread captures steps
while a server or a chat already answers."""
import asyncio, atexit, collections, contextlib, functools, os, pathlib, queue, sys, threading, time, uuid, weakref
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from tinygrad import Device

from tinyvllm.backend import cpu_cores
from tinyvllm.config import logger, option
from tinyvllm.engine import Params, Prompt, Request, RequestOutput
from tinyvllm_extra.kernels.cpu import CAPTURES
from tinyvllm_extra.llm import LLM, LLMArguments
from tinyvllm_extra.options import LoRARequest, add_fields, takes

Delta = RequestOutput | Exception      # a request's new text and tokens, or the error that ended it
IndexedOutput = tuple[int, RequestOutput]   # index of the request, its new text and tokens
CAPTURE_SECONDS = 5.0   # maximum time that a shutdown waits for a capture on a CPU
CAPTURING = "capturing a step: below 1 s, or about 10 s if kernels compile"   # before the first capture
IDLE_SECONDS = 2.0   # time without a request before graphs of optional features are captured


class StepError(RuntimeError):
  """The engine ended the request: a step or its output failed (the traceback is logged), or the engine shut down."""


# Receives requests' outputs in an event loop
Reader = NamedTuple("Reader", [("loop", asyncio.AbstractEventLoop), ("arrived", asyncio.Queue[tuple[Request, Delta]])])


def is_last(delta: Delta) -> bool: return isinstance(delta, Exception) or delta.finished


class CaptureThread(threading.Thread):
  """Runs `capture`, with low priority once the captured steps can run all requests: see `ready`."""
  def __init__(self, captures: Iterator[str]):
    super().__init__(target=self.capture, args=(captures,), name=CAPTURES, daemon=True)
    self.progress = next(captures, "")
    self.ready = threading.Event()
    self.should_end = False
    atexit.register(self.allow_exit)
    self.start()

  def allow_exit(self) -> None:
    """Let the program exit: tinygrad cannot close devices during a capture. A CPU need not be closed."""
    self.should_end = True
    if cpu_cores(): Device._opened_devices.clear()
    else: self.join()

  def capture(self, captures: Iterator[str]) -> None:
    try:
      for self.progress in captures:
        if self.should_end: break
        if not self.progress and not self.ready.is_set():
          self.ready.set()
          if sys.platform == "linux": os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        time.sleep(1e-3)   # another thread may be waiting to capture
    except Exception:
      if threading.main_thread().is_alive():   # else the exit has ended the threads that compile
        logger.exception("a capture failed; its steps will be captured when they run")
    self.ready.set()
    atexit.unregister(self.allow_exit)


class Driver:
  """The loop of the engine thread. Other threads put calls into its inbox."""
  def __init__(self, llm: LLM, interval: int, captures: CaptureThread, optional: Iterator[str], prefix_cache_file: str):
    self.llm = llm
    self.prefix_cache_file = prefix_cache_file   # "": none
    self.interval = interval   # minimum number of new tokens per delta
    self.captures = captures
    self.optional: Iterator[str] | None = optional   # `next` captures a graph of optional features; None: all are
    self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    self.has_ended = False   # True: the thread runs no more calls
    self.readers: dict[Request, Reader] = {}   # by unfinished request
    self.due: dict[Request, None] = {}   # have new output, not delivered yet
    self.delivery_time = 0.0   # when the outputs of all requests in `due` are delivered
    # Minimum time between two deliveries, per request. On a CPU, writing to sockets takes cores from steps
    self.write_seconds = 0.0 if llm.runner.is_async else 0.001

  def run(self) -> None:
    """Loop: empty the inbox, run a step. Without requests, wait for the inbox; if idle, capture optional graphs."""
    self.captures.ready.wait()
    while not self.has_ended:
      busy = self.inbox.empty() and self.llm.has_unfinished_requests()
      try: call = self.step if busy else self.inbox.get(timeout=IDLE_SECONDS if self.optional else None)
      except queue.Empty: call = self.capture_optional
      try: call()
      except BaseException: logger.exception("unexpected error; the engine thread continues")   # or SystemExit

  def post(self, call: Callable[[], None]) -> None:
    """Have the engine thread run a call, or this thread if that one has ended. Several threads may do so at once."""
    self.inbox.put(call)
    with contextlib.suppress(queue.Empty):
      while self.has_ended: self.inbox.get_nowait()()

  def end_thread(self) -> None:
    """End the thread after this call, and all unfinished requests."""
    self.has_ended = True
    for request in [*self.readers]: self.end(request, StepError("the engine was shut down"))
    self.post(lambda: None)   # runs the remaining calls of the inbox

  def capture_optional(self) -> None:
    if self.optional and not self.captures.is_alive() and next(self.optional, None) is None: self.optional = None

  def save(self) -> None:
    try: self.llm.save_prefix_cache(self.prefix_cache_file)
    except Exception as error: logger.warning(f"prefix cache {self.prefix_cache_file!r} is not written: {error}")

  def add(self, request: Request, reader: Reader) -> None:
    self.readers[request] = reader
    if self.has_ended: return self.deliver([request], StepError("the engine was shut down"))
    try: self.llm.add(request)
    except Exception as error: self.deliver([request], error)

  def end(self, request: Request | None, error: Exception | None = None) -> None:
    """Abort a request, unless it has finished, and deliver its last output or the error."""
    if request is None or request not in self.readers: return
    # RuntimeError: another thread is using the engine
    with contextlib.suppress(RuntimeError): self.llm.abort_request(request.request_id)
    self.deliver([request], error)

  def step(self) -> None:
    """Run a step. Deliver first and last outputs at once, others at `delivery_time`: one output for several steps."""
    try: changed = [request for request in self.llm.advance() if request in self.readers]
    except BaseException as error: return self.fail(error)
    self.due |= dict.fromkeys(changed)
    urgent = [request for request in changed if request.request_id not in self.llm.requests   # it has finished
              or request.streams[0].delivered.num_tokens == request.streams[0].seq.num_prompt]
    now = time.monotonic()
    if now < self.delivery_time: return self.deliver(urgent)
    if self.due: self.delivery_time = now + self.write_seconds * min(32, len(self.readers))
    self.deliver([request for request in self.due if request in urgent or self.interval <= sum(
      len(stream.seq.tokens) - stream.delivered.num_tokens for stream in request.streams)])

  def new_output(self, request: Request) -> Delta:
    """Return a request's new output. If it cannot be built, end the request and return the error."""
    try: return request.output(delta=True)
    except Exception as error:
      logger.exception(f"the output of request {request.request_id} failed; it ends")
      with contextlib.suppress(RuntimeError): self.llm.abort_request(request.request_id)
      return StepError(f"the request's output failed: {error}")

  def fail(self, error: BaseException) -> None:
    """End the started requests, or all if none has started, since one of them may have caused the failure."""
    if self.readers: logger.exception("a step failed; its requests end")
    started = [request for request in self.readers if request.metrics.first_scheduled_time > 0]   # else it is NaN
    for request in started or [*self.readers]:   # the next step delivers requests that have finished
      if not request.finished: self.end(request, StepError(f"a step failed: {error}"))

  def deliver(self, requests: list[Request], error: Exception | None = None) -> None:
    """Pass the requests' new output, and the error that ended them, to their readers, with one call per event loop.
    Closed loops are skipped. On a CPU, wait until the readers have run: they and the next step would delay each
    other."""
    have_run = threading.Event()
    calls = collections.defaultdict[Any, list[Callable[[], None]]](list)   # by loop
    for request in requests:
      deltas = [self.new_output(request)] if request in self.due or not error else []
      if error: deltas.append(error)
      self.due.pop(request, None)
      reader = self.readers.pop(request) if is_last(deltas[-1]) else self.readers[request]
      calls[reader.loop] += [functools.partial(reader.arrived.put_nowait, (request, delta)) for delta in deltas]
    for loop, batch in calls.items():
      batch.append(functools.partial(loop.call_soon, have_run.set))   # runs after the readers
      with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(lambda batch=batch: [call() for call in batch])
        have_run.wait(self.write_seconds * min(32, len(requests)))


@dataclass(frozen=True)
class AsyncLLMArguments(LLMArguments):
  """The parameters of AsyncLLM: LLM's, and its own. With `prepare`, cudagraph_capture_sizes=None means the device's."""
  stream_interval: int = option(1, "Minimum number of new tokens per output", min=1, max=2**31)
  prepare: bool = option(False, "Capture graphs before the first request, and of optional features when idle")
  prefix_cache_file: str | None = option(None, "File to load and save the prefix cache (default: none)")


class AsyncLLM:
  """An LLM for asyncio, with LLM's options. Its engine thread ends when this object is deleted.

  `state` reports the progress of `prepare`. llm: the engine. Any thread may call its `make_request` and `get_metrics`;
  only the engine thread may call its other methods."""
  @takes(AsyncLLMArguments)
  def __init__(self, model: str | pathlib.Path | None = None, stream_interval: int = 1, prepare: bool = False,
               prefix_cache_file: str | None = None, **options: Any):
    sizes = options.pop("cudagraph_capture_sizes", None)
    AsyncLLMArguments(model, stream_interval, prepare, prefix_cache_file, cudagraph_capture_sizes=sizes)   # checks them
    self.llm = LLM(model, **options)
    self.llm.tokenizer.max_tokens = self.llm.max_model_len
    if prefix_cache_file:
      log = logger.warning if pathlib.Path(prefix_cache_file).expanduser().exists() else logger.info
      try: self.llm.load_prefix_cache(prefix_cache_file)
      except ValueError as error: log(f"{error}; starting without it")
    captures, optional = [self.llm.capture(sizes, x) if prepare or sizes else iter(()) for x in (False, True)]
    self._driver = Driver(self.llm, stream_interval, CaptureThread(captures), optional, prefix_cache_file or "")
    weakref.finalize(self, self._driver.inbox.put, self._driver.end_thread)
    self._thread = threading.Thread(target=self._driver.run, name="tinyvllm-engine", daemon=True)
    self._thread.start()

  def shutdown(self) -> None:
    """Stop the engine thread after the current step or capture: tinygrad cannot close a device during a capture.
    Unfinished and later requests end with StepError. Give the memory back to the system; on a CPU not if a capture
    lasts longer than CAPTURE_SECONDS, as its thread has a low priority and a CPU need not be closed."""
    self._driver.captures.should_end = True
    self.save_prefix_cache()
    self._driver.inbox.put(self._driver.end_thread)
    self._thread.join()
    self._driver.captures.join(CAPTURE_SECONDS if cpu_cores() else None)
    if not self._driver.captures.is_alive(): self.llm.shutdown()

  def save_prefix_cache(self) -> None:
    """Write the prefix cache file, if one is set, after the current step; log a failure. Any thread or signal handler
    may call this."""
    if self._driver.prefix_cache_file: self._driver.inbox.put(self._driver.save)

  # Capture progress, "" once requests can run
  state = property(lambda self: "" if self._driver.captures.ready.is_set() else self._driver.captures.progress)

  async def generate(self, prompt: Prompt, params: Params = None, request_id: str | None = None,
                     priority: int = 0, lora_request: LoRARequest | None = None) -> AsyncGenerator[RequestOutput, None]:
    """Complete one prompt; yield new text and tokens as they arrive. Closing the generator or cancelling its task
    aborts the request. Raises InputError for an invalid request, StepError if one of its steps fails."""
    prompt, name = add_fields(prompt, lora_request=lora_request), request_id or uuid.uuid4().hex
    request = await asyncio.to_thread(self.llm.make_request, name, prompt, params, priority)
    async with contextlib.aclosing(self.stream([request])) as stream:
      async for outputs in stream:
        for _, output in outputs: yield output

  async def stream(self, requests: list[Request]) -> AsyncGenerator[list[IndexedOutput], None]:
    """Run requests from `llm.make_request`; yield the outputs since the last yield, with each request's index. Closing
    the generator ends all requests, unless the close is cancelled, too."""
    arrived = asyncio.Queue[tuple[Request, Delta]]()   # not yielded yet
    reader = Reader(asyncio.get_running_loop(), arrived)
    unfinished = set(requests)
    for request in requests: self._driver.post(functools.partial(self._driver.add, request, reader))
    try:
      while unfinished:
        received = [await arrived.get()]
        while not arrived.empty(): received.append(arrived.get_nowait())
        unfinished.difference_update(request for request, delta in received if is_last(delta))
        outputs = [(requests.index(request), delta) for request, delta in received if not isinstance(delta, Exception)]
        errors = [delta for _, delta in received if isinstance(delta, Exception)]
        if outputs: yield outputs
        for error in errors: raise error
    finally:
      for request in unfinished: self._driver.post(functools.partial(self._driver.end, request))
      while unfinished: unfinished.difference_update(x for x, delta in [await arrived.get()] if is_last(delta))

  def abort(self, request_id: str) -> None:
    """End a request in any state with finish_reason "abort". Any thread may call this."""
    driver = self._driver   # not self: the thread keeps a reference to its last call
    driver.post(lambda: driver.end(driver.llm.requests.get(request_id)))
