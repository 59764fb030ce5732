"""AsyncLLM in this process: concurrent requests equal LLM.generate; closed, cancelled, invalid or failed requests do
not affect others; a shutdown ends all."""
import asyncio
import contextlib
import gc
import threading

import pytest
from helpers.data import read_data
from helpers.engines import check_invariants
from helpers.faults import add_fault
from helpers.protocol import SMALL
from helpers.servers import wait_until

from tinyvllm import AsyncLLM, SamplingParams, runner
from tinyvllm_extra.serving import async_engine

LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
PROMPTS = ["the cat", "hello world, this", "one two three", "where there is a will", "numbers: 0 1", "the dog ran"]


def argmax(n: int = 8, **fields) -> SamplingParams: return SamplingParams(temperature=0.0, max_tokens=n, **fields)


@pytest.fixture(scope="module")
def llm(words_folder):
  llm = AsyncLLM(words_folder, scheduling_policy="priority", **SMALL)
  yield llm
  llm.shutdown()


@pytest.fixture(autouse=True)
def all_blocks_are_free(llm):
  """Check that all blocks are free after each test."""
  yield
  wait_until(lambda: not llm.llm.has_unfinished_requests() and not llm.llm.get_metrics()["blocks_used"], seconds=20)
  check_invariants(llm.llm)


@pytest.fixture
def launches(llm, monkeypatch):
  """Request ids of each launched step, in order."""
  ids, launch = [], llm.llm.runner.launch
  monkeypatch.setattr(llm.llm.runner, "launch", lambda step: (ids.append([row.seq.request_id for row in step.rows]),
                                                              launch(step))[1])
  return ids


async def collect(llm, prompt, params=None, **options):
  """Run a request, and return its merged outputs in the form of `expected`."""
  outputs = [o async for o in llm.generate(prompt, params, **options)]
  assert outputs[-1].finished and not any(o.finished for o in outputs[:-1])
  columns = list(zip(*(o.outputs for o in outputs), strict=True))
  return [("".join(c.text for c in column), [i for c in column for i in c.token_ids], column[-1].finish_reason,
           column[-1].stop_reason, [x for c in column for x in c.logprobs or []]) for column in columns]


def expected(llm, prompt, params):
  output, = llm.llm.generate(prompt, params, use_tqdm=False)
  return [(c.text, c.token_ids, c.finish_reason, c.stop_reason, c.logprobs or []) for c in output.outputs]


async def together(llm, *jobs, **options):
  """Run several jobs, which start only after the engine's thread has received all of them: on a busy machine one could
  end before the next arrives."""
  resume = threading.Event()
  llm._driver.inbox.put(lambda: resume.wait(30))
  await until(llm._driver.inbox.empty)
  tasks = [asyncio.create_task(job) for job in jobs]
  await until(lambda: llm._driver.inbox.qsize() >= len(tasks))
  resume.set()
  return await asyncio.gather(*tasks, **options)


@contextlib.asynccontextmanager
async def paced(llm):
  """Make the engine's thread wait for ten iterations of this event loop before each step: on a busy machine a request
  could end before its reader can abort it. Yields a lock: no step starts while a test holds it."""
  lock = asyncio.Lock()
  loop = asyncio.get_running_loop()
  advance = llm.llm.advance

  async def run_event_loop():
    async with lock:
      for _ in range(10): await asyncio.sleep(0)

  def paced_advance(*args):
    asyncio.run_coroutine_threadsafe(run_event_loop(), loop).result(30)
    return advance(*args)

  llm.llm.advance = paced_advance
  try: yield lock
  finally: del llm.llm.advance


async def until(condition):
  """Wait like `wait_until`, but let other tasks run."""
  async with asyncio.timeout(30):
    while not condition(): await asyncio.sleep(0)


@pytest.fixture
def pause(llm, monkeypatch):
  """Let no output be due before the end of a request, except the first one."""
  monkeypatch.setattr(llm._driver, "delivery_time", 0.0)
  monkeypatch.setattr(llm._driver, "write_seconds", 1000)


async def num_tokens(llm):
  """Yield the number of tokens of each output of a request for six tokens."""
  async for outputs in llm.stream([llm.llm.make_request("id", "the cat", argmax(6, ignore_eos=True))]):
    for _, output in outputs: yield len(output.outputs[0].token_ids)


@pytest.mark.usefixtures("pause")
async def test_short_steps_deliver_first_and_last_outputs_at_once(llm):
  assert [n async for n in num_tokens(llm)] == [1, 5]


@pytest.mark.usefixtures("pause")
async def test_failed_step_delivers_tokens_of_earlier_steps_first(llm, monkeypatch):
  steps, received = iter(range(4)), []
  add_fault(monkeypatch, llm.llm.runner, "launch", RuntimeError("boom"), lambda step: next(steps) == 3)
  with pytest.raises(async_engine.StepError, match="boom"):
    async for n in num_tokens(llm): received.append(n)
  assert received == [1, 2]


@pytest.mark.parametrize("fields", read_data("server_cases.json")["joined"], ids=str)
async def test_joined_outputs_equal_generate(llm, fields):
  params = SamplingParams(**fields)
  assert await collect(llm, "the cat", params) == expected(llm, "the cat", params)


async def test_duplicate_request_id_is_refused_until_first_request_ends(llm):
  stream = llm.generate("the cat", LONG, request_id="mine")
  async with paced(llm):
    assert (await anext(stream)).request_id == "mine"
    with pytest.raises(ValueError, match="mine"): await anext(llm.generate("the cat", argmax(), request_id="mine"))
    cancelled = asyncio.create_task(anext(llm.stream([llm.llm.make_request("mine", "the cat", argmax())])))
    await asyncio.sleep(0)   # the request has been sent, but not answered
    cancelled.cancel()
    with pytest.raises((asyncio.CancelledError, ValueError)): await cancelled
  assert [o async for o in stream][-1].outputs[0].finish_reason == "length", "the first request continues"
  stream = llm.generate("the cat", LONG, request_id="mine")
  await anext(stream)
  await stream.aclose()
  assert "mine" not in llm.llm.requests and not llm.llm.get_metrics()["blocks_used"], "closing the stream aborts"


async def test_abort_from_other_thread_finishes_stream_with_reason_abort(llm):
  outputs = []
  async with paced(llm) as lock:
    async for output in llm.generate("the cat", LONG, request_id="mine"):
      outputs.append(output)
      if len(outputs) != 3: continue
      async with lock: await asyncio.to_thread(llm.abort, "mine")
  for name in ("mine", "unknown"): llm.abort(name)   # ignored
  assert outputs[-1].outputs[0].finish_reason == "abort" and outputs[-1].finished and len(outputs) < 100
  assert expected(llm, "the cat", LONG)[0][0].startswith("".join(o.outputs[0].text for o in outputs))


async def test_step_makes_one_call_per_event_loop(llm, launches):
  threads, loop = [], asyncio.get_running_loop()
  wake = loop.call_soon_threadsafe
  loop.call_soon_threadsafe = lambda *args: (threads.append(threading.current_thread().name), wake(*args))[1]
  await together(llm, *(collect(llm, prompt, LONG) for prompt in PROMPTS[:4]))
  assert threads.count("tinyvllm-engine") <= len(launches) < 150, "one call per step, not per output (400)"


async def test_engine_thread_ends_when_async_llm_is_deleted(llm):
  def threads(): return sum(thread.name == "tinyvllm-engine" for thread in threading.enumerate())
  before, another = threads(), AsyncLLM(max_num_seqs=1, max_num_batched_tokens=1)
  assert await collect(another, "Hello", argmax(2)) and threads() == before + 1
  del another
  gc.collect()
  wait_until(lambda: threads() == before, "the thread ends", 20)


async def test_cancelling_the_task_frees_blocks_within_one_step(llm, launches):
  expected_output = expected(llm, "hello world, this", LONG)
  other = asyncio.create_task(collect(llm, "hello world, this", LONG, request_id="other"))
  mine = asyncio.create_task(collect(llm, "the cat", LONG, request_id="aborted"))
  async with paced(llm):
    await until(lambda: sum("aborted" in x for x in launches) > 3)
    mine.cancel()
    with pytest.raises(asyncio.CancelledError): await mine
  assert "aborted" not in llm.llm.requests
  end = len(launches)
  assert await other == expected_output
  assert "aborted" not in sum(launches[end + 1:], []) and sum("other" in x for x in launches[end + 1:]) > 1


@pytest.mark.parametrize("error", [RuntimeError("boom"), MemoryError("boom"), ValueError("boom"), KeyError("boom")],
                         ids=lambda e: type(e).__name__)
async def test_failed_step_fails_only_its_requests(llm, monkeypatch, error):
  launch, failed = llm.llm.runner.launch, []

  def faulty(step):
    ids = [row.seq.request_id for row in step.rows]
    if not failed and len(ids) == 4 and all(row.seq.num_generated > 2 for row in step.rows):
      failed.extend(ids)
      raise error
    return launch(step)
  monkeypatch.setattr(llm.llm.runner, "launch", faulty)
  jobs = [collect(llm, prompt, argmax(30), request_id=str(i)) for i, prompt in enumerate(PROMPTS)]
  results = await together(llm, *jobs, return_exceptions=True)
  assert len({*failed}) == 4, "four requests run at once"
  for i, result in enumerate(results):
    if str(i) in failed: assert type(result) is async_engine.StepError and "boom" in str(result), repr(result)
    else: assert result == expected(llm, PROMPTS[i], argmax(30))
  assert await collect(llm, PROMPTS[0], argmax(30)) == expected(llm, PROMPTS[0], argmax(30)), "later requests work"


async def test_stream_interval_gives_fewer_outputs_with_same_text(llm, monkeypatch):
  monkeypatch.setattr(llm._driver, "interval", 4)
  pieces = [o.outputs[0] async for o in llm.generate(PROMPTS[0], argmax(13))]
  assert len(pieces) <= 4, "at tokens 1, 5, 9 and 13, or later if the reader is late"
  assert "".join(c.text for c in pieces) == expected(llm, PROMPTS[0], argmax(13))[0][0]


@pytest.mark.parametrize("prompt,options,message", [("", {}, "empty"), ("the cat", {"priority": 1.5}, "priority")])
async def test_bad_request_raises_value_error_before_any_step(llm, launches, prompt, options, message):
  with pytest.raises(ValueError, match=message): await collect(llm, prompt, **options)
  assert not launches and not llm.llm.has_unfinished_requests()


async def test_blocked_upload_does_not_block_other_calls(llm, monkeypatch):
  """On METAL and QCOM an upload waits for the previous step: other threads can still make, add and abort requests, and
  read metrics."""
  uploads, resume = threading.Event(), threading.Event()
  upload = runner.upload

  def blocked_upload(tensor, array):
    uploads.set()
    assert resume.wait(60)
    upload(tensor, array)
  monkeypatch.setattr(runner, "upload", blocked_upload)
  first = asyncio.create_task(collect(llm, "the cat", argmax(3)))
  await asyncio.to_thread(uploads.wait, 60)
  def make_request(): return llm.llm.make_request("mine", "the cat", argmax(3))
  for call in (make_request, llm.llm.get_metrics, lambda: llm.abort("none")):
    await asyncio.wait_for(asyncio.to_thread(call), 20)
  second = asyncio.create_task(collect(llm, "the dog", argmax(3)))
  await asyncio.sleep(0)   # the request is sent
  assert not first.done()
  resume.set()
  assert [await first, await second] == [expected(llm, prompt, argmax(3)) for prompt in ("the cat", "the dog")]


async def test_output_that_cannot_be_built_ends_only_its_request(llm):
  broken = llm.llm.make_request("broken", "the cat", LONG)
  def output(delta: bool = False): raise KeyError("no such text")
  broken.output = output
  async def run_broken(): return [outputs async for outputs in llm.stream([broken])]
  others = [collect(llm, "the cat", LONG) for _ in range(2)]
  first, error, second = await asyncio.gather(others[0], run_broken(), others[1], return_exceptions=True)
  assert isinstance(error, async_engine.StepError) and "no such text" in str(error)
  assert first == second == expected(llm, "the cat", LONG)


async def test_shutdown_ends_running_and_later_requests(words_folder):
  llm = AsyncLLM(words_folder, **SMALL)
  stream = llm.generate("the cat", LONG)
  await anext(stream)
  llm.shutdown()   # in this thread: another one might start after the request's last step
  with pytest.raises(async_engine.StepError, match="shut down"):
    async for output in stream: assert not output.finished
  with pytest.raises(async_engine.StepError, match="shut down"): await collect(llm, "the cat", LONG)
  llm.abort("later")
  llm.shutdown()   # does nothing
  assert not llm.llm.has_unfinished_requests() and "runner" not in vars(llm.llm)


def test_shutdown_on_a_cpu_does_not_wait_for_a_slow_capture(words_folder, monkeypatch):
  monkeypatch.setattr(async_engine, "CAPTURE_SECONDS", 0.05)
  monkeypatch.setattr(async_engine, "cpu_cores", lambda: 2)
  llm, gate = AsyncLLM(words_folder, **SMALL), threading.Event()
  llm._driver.captures = threading.Thread(target=gate.wait, daemon=True)
  llm._driver.captures.start()
  llm.shutdown()
  assert not llm._thread.is_alive() and "runner" in vars(llm.llm), "its thread still uses the memory"
  gate.set()
  llm._driver.captures.join()
  llm.shutdown()
  assert "runner" not in vars(llm.llm)
