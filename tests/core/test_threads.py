"""Engines and threads: only one thread at a time may drive an engine; a call from another thread raises RuntimeError
and has no effect. Engines of one process run independently, except while they load or capture."""
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import patch

import pytest
from helpers.engines import ENGINE, check_invariants, greedy, ids_of, run_to_end, set_overlap, tokens
from helpers.faults import Failed
from helpers.reference import reference_greedy

from tinyvllm import LLM

pytestmark = pytest.mark.timeout(120)
TIMEOUT = 60   # seconds
IDS, OTHER = [5, 60, 115, 170], [7, 80, 153]


class Gate:
  """Blocks calls of guarded functions until the gate opens. submit: run a function on one of two threads."""
  def __init__(self, submit):
    self.submit, self.is_entered, self.is_open = submit, threading.Event(), threading.Event()
    self.entered: list[str] = []   # names of all calls, including blocked ones

  def guard(self, name, function):
    def guarded(*args, **kwargs):
      self.entered.append(name)
      self.is_entered.set()
      assert self.is_open.wait(TIMEOUT), "the gate never opened"
      return function(*args, **kwargs)
    return guarded

  def start(self, call, *args):
    """Start a call on a thread, and wait until it blocks. Return its future."""
    future = self.submit(call, *args)
    assert self.is_entered.wait(TIMEOUT) and not future.done()
    return future

  def load(self, folder, backend):
    """Load an engine, which blocks at the gate when it chooses its dtype, once. Return what run_generate returns."""
    backend.pick_dtype = self.guard("load", backend.pick_dtype)
    return run_generate(LLM(folder, backend=backend, **ENGINE))


@pytest.fixture
def gate():
  with ThreadPoolExecutor(2) as pool:
    yield (gate := Gate(pool.submit))
    gate.is_open.set()


def run_generate(llm, ids=IDS, n=6): return ids_of(llm.generate(tokens(ids), greedy(n), use_tqdm=False)[0])
def run_stream(llm): return [i for output in llm.generate_stream(tokens(IDS), greedy(6)) for i in ids_of(output)]


def run_steps(llm):
  llm.add_request("first", tokens(IDS), greedy(6))
  return ids_of(run_to_end(llm, 100)["first"])


# One engine

# Calls from a second thread during a step
CALLS = {
  "add_request": lambda llm: llm.add_request("second", tokens(OTHER), greedy(3)),
  "abort_request": lambda llm: llm.abort_request(next(iter(llm.requests))),
  "step": lambda llm: llm.step(),
  "generate": lambda llm: run_generate(llm, OTHER, 3),
  "generate_stream": lambda llm: next(llm.generate_stream(tokens(OTHER), greedy(3))),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("work", [run_steps, run_generate, run_stream])
def test_second_thread_during_step_raises_and_changes_nothing(llm, folder, monkeypatch, gate, work, name):
  """It may read metrics, and may use the engine after the step."""
  monkeypatch.setattr(llm.runner, "launch", gate.guard("launch", llm.runner.launch))
  first = gate.start(work, llm)
  running, = llm.requests
  with pytest.raises(RuntimeError, match="AsyncLLM"): gate.submit(CALLS[name], llm).result(10)
  assert [*llm.requests] == [running], "the refused call added or ended a request"
  metrics = gate.submit(llm.get_metrics).result(10)
  assert metrics["num_requests_running"] == metrics["blocks_used"] == 1
  assert gate.submit(llm.has_unfinished_requests).result(10)
  gate.is_open.set()
  assert first.result(TIMEOUT) == reference_greedy(folder, IDS, 6)
  check_invariants(llm)
  assert gate.submit(run_generate, llm).result(TIMEOUT) == reference_greedy(folder, IDS, 6)


def test_failed_step_releases_engine_to_other_threads(llm, folder, gate):
  with patch.object(llm.runner, "launch", side_effect=Failed), pytest.raises(Failed): run_generate(llm)
  assert gate.submit(run_generate, llm).result(TIMEOUT) == reference_greedy(folder, IDS, 6)


def test_other_thread_may_use_engine_between_stream_tokens(llm, folder, gate):
  stream = llm.generate_stream(tokens(IDS), greedy(6))
  first_ids = ids_of(next(stream))
  assert gate.submit(run_generate, llm).result(TIMEOUT) == reference_greedy(folder, IDS, 6)
  assert first_ids + [i for output in stream for i in ids_of(output)] == reference_greedy(folder, IDS, 6)


# Several engines

@pytest.mark.parametrize("overlaps", ["", "overlapped"])
@pytest.mark.parametrize("place", ["wait", "start_reading", "load"])
def test_captured_step_runs_while_another_engine_is_blocked(llm, small_llm, folder, monkeypatch, gate, place, overlaps):
  """The other engine waits for a step's results, launches a step, or loads."""
  backend, launch = llm.runner.backend, llm.runner.launch
  monkeypatch.setattr(type(backend.graphs), "choose", lambda graphs, runner, key: key)
  set_overlap(monkeypatch, llm.runner, overlaps)
  for engine, ids in ((llm, IDS), (small_llm, OTHER)): run_generate(engine, ids)   # captures the graphs
  if place == "wait": monkeypatch.setattr(llm.runner, "launch", lambda step: gate.guard("wait", launch(step)))
  if place == "start_reading": monkeypatch.setattr(backend, place, gate.guard(place, backend.start_reading))
  call = (gate.load, folder, type(backend)()) if place == "load" else (run_generate, llm)
  blocked = gate.start(*call)
  assert gate.submit(run_generate, small_llm, OTHER).result(TIMEOUT / 4) == reference_greedy(folder, OTHER, 6)
  assert not blocked.done()
  gate.is_open.set()
  assert blocked.result(TIMEOUT) == reference_greedy(folder, IDS, 6)


@pytest.mark.parametrize("second", ["capture", "load"])
@pytest.mark.parametrize("first", ["capture", "load"])
def test_captures_and_loads_exclude_each_other(folder, monkeypatch, gate, first, second):
  calls, kinds = [], [first, second]
  for kind in kinds:
    engine = LLM(folder, **ENGINE)   # nothing is captured yet
    backend = engine.runner.backend
    monkeypatch.setattr(backend.graphs, "run", gate.guard("capture", backend.graphs.run))
    calls.append((gate.load, folder, type(backend)()) if kind == "load" else (run_generate, engine, IDS, 1))
  futures = [gate.start(*calls[0]), gate.submit(*calls[1])]
  time.sleep(0.3)
  assert gate.entered == [first], "the second one must wait until the first one ends"
  gate.is_open.set()
  for kind, future in zip(kinds, futures, strict=True):
    assert future.result(TIMEOUT) == reference_greedy(folder, IDS, 6 if kind == "load" else 1)
  assert gate.entered == kinds
