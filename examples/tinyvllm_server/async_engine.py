"""The engine for asyncio: it steps on a thread of its own, and wakes those whose request has something new."""
import asyncio, concurrent.futures, functools, pathlib, uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from tinyvllm import LLM, RequestOutput
from tinyvllm.config import check, logger
from tinyvllm.engine import Params, Prompt, Request, output_of


class AsyncLLM:
  """Takes what LLM takes. stream_interval: tokens from one piece of a text to the next. llm: the engine; other threads
  may use it, too."""
  def __init__(self, model: str | pathlib.Path | None = None, stream_interval: int = 1, **options: Any):
    check(type(stream_interval) is int and stream_interval > 0, f"stream_interval={stream_interval!r} must be an int, "
          "1 or more")
    self.stream_interval = stream_interval
    self.llm, self._thread = LLM(model, **options), concurrent.futures.ThreadPoolExecutor(1, "tinyvllm-engine")
    # By request_id: the request, the loop of its reader and what takes the news there; why a step of it failed
    self._readers = dict[str, tuple[list[Request], asyncio.AbstractEventLoop, Callable[[], None]]]()
    self._errors = dict[str, Exception]()

  async def generate(self, prompt: Prompt, params: Params = None, request_id: str | None = None,
                     priority: int = 0) -> AsyncIterator[RequestOutput]:
    """Complete one prompt, yielding the new text and ids as they come. To leave the loop, or to cancel it, aborts the
    request. Raises ValueError for a bad request, RuntimeError if a step of it fails."""
    name = request_id or uuid.uuid4().hex
    async for _, output in self.stream([await asyncio.to_thread(self.llm.request, name, prompt, params, priority)]):
      yield output

  async def stream(self, requests: list[list[Request]]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """As `generate`, of several requests that `llm.request` has made: the number of each, and what is new."""
    loop, news, running = asyncio.get_running_loop(), asyncio.Queue[int](), dict[int, str]()   # running: by its number
    seen = [[(0, 0)] * len(runs) for runs in requests]
    try:
      for i, runs in enumerate(requests):
        self.llm.add(runs)
        running[i] = name = runs[0].request_id
        self._readers[name] = runs, loop, functools.partial(news.put_nowait, i)
      self._thread.submit(self._drive)
      while running:
        if (i := await news.get()) not in running: continue
        if error := self._errors.get(running[i]): raise RuntimeError(f"a step failed: {error}") from error
        with self.llm.lock:
          output, seen[i] = output_of(requests[i], seen[i]), [(run.shown, run.num_generated) for run in requests[i]]
        if output.finished: del running[i]
        yield i, output
    finally:
      for name in running.values():
        self._readers.pop(name, None)
        self._errors.pop(name, None)
        self.llm.abort_request(name)

  def abort(self, request_id: str) -> None:
    """End a request with finish_reason "abort", wherever it is."""
    self.llm.abort_request(request_id)
    if reader := self._readers.get(request_id): reader[1].call_soon_threadsafe(reader[2])

  def _drive(self) -> None:
    before = dict[str, int]()   # tokens of each request
    while self._readers:
      try: self.llm.step(outputs=False)
      except Exception as error:
        logger.exception("a step failed, and the requests in it")
        for name in {seq.request_id for seq in self.llm.batch} & self._readers.keys() or {*self._readers}:
          self._errors[name] = error
          self.abort(name)
      now, wakes = dict[str, int](), dict[asyncio.AbstractEventLoop, list[Callable[[], None]]]()
      for name, (runs, loop, wake) in [*self._readers.items()]:
        count, last = runs[0].metrics.num_generated, before.get(name, 0)
        ended, due = name not in self.llm.requests, last + self.stream_interval if last else 1
        now[name] = count if ended or count >= due else last
        if ended: self._readers.pop(name, None)
        if ended or count >= due: wakes.setdefault(loop, []).append(wake)
      before = now
      for loop, calls in wakes.items(): loop.call_soon_threadsafe(_each, calls)   # one call wakes all


def _each(calls: list[Callable[[], None]]) -> None:
  for call in calls: call()
