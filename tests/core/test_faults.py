"""Regression tests: errors that name the wrong cause, internal errors reported as the user's, engines that block each
other."""
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
from helpers.engines import ENGINE, check_invariants, run_to_end, set_overlap
from helpers.reference import reference_greedy
from helpers.requests import greedy, ids_of, tokens

from tinyvllm import LLM, SamplingParams, config

TIMEOUT = 60   # seconds


# Errors

@pytest.mark.parametrize("parameter, value", [
  ("top_p", 2), ("temperature", "hot"), ("stop", [""]), ("logit_bias", {5: 101}), ("n", 0), ("seed", 2**63),
  *(("logit_bias", bias) for bias in ({"a": 1}, {"1.5": 1.0}, {1.5: 1.0}, {None: 1.0}, {5: 1, "x": 2}))], ids=str)
def test_input_error_has_parameter_and_value(parameter, value):
  with pytest.raises(config.InputError, match=parameter) as e: SamplingParams(**{parameter: value})
  message = str(e.value)
  assert isinstance(e.value, ValueError) and (e.value.parameter, e.value.value) == (parameter, value)
  assert repr(value) in message
  if parameter == "logit_bias" and value != {5: 101}:
    assert "token ids" in message and "int" in message and "between" not in message, "the keys are wrong"


@pytest.mark.parametrize("function", ["concatenate", "zeros"])
def test_internal_value_error_is_not_an_input_error(llm, folder, monkeypatch, function):
  ids = [5, 6, 7]
  fail = Mock(side_effect=ValueError("all the input array dimensions must match exactly"))
  llm.add_request("a", tokens(ids), greedy(8))
  llm.step()
  with monkeypatch.context() as patch:
    patch.setattr(np, function, fail)
    with pytest.raises(ValueError, match="must match exactly") as e: llm.step()
  assert not isinstance(e.value, config.InputError)
  check_invariants(llm)
  assert ids_of(run_to_end(llm, 100)["a"]) == reference_greedy(folder, ids, 8)


# Engines in one process

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

  def generate(self, engine, ids, n):
    """Start a request, and return the future of its ids."""
    return self.submit(lambda: ids_of(engine.generate(tokens(ids), greedy(n), use_tqdm=False)[0]))

  def load(self, folder, backend):
    """Start to load an engine, which blocks at the gate when it chooses its dtype, once."""
    backend.pick_dtype = self.guard("load", backend.pick_dtype)
    return self.submit(LLM, folder, backend=backend, **ENGINE)


@pytest.fixture
def gate():
  with ThreadPoolExecutor(2) as pool:
    yield (gate := Gate(pool.submit))
    gate.is_open.set()


@pytest.mark.parametrize("overlaps", ["", "overlapped"])
@pytest.mark.parametrize("place", ["wait", "start_reading", "load"])
def test_captured_step_runs_while_another_engine_is_blocked(llm, small_llm, folder, monkeypatch, gate, place, overlaps):
  """The other engine waits for a step's results, launches a step, or loads."""
  jobs = [(llm, [5, 6, 7], 9), (small_llm, [9, 8, 7], 9)]
  expected = [reference_greedy(folder, ids, n) for _, ids, n in jobs]
  backend, launch = llm.runner.backend, llm.runner.launch
  monkeypatch.setattr(type(backend), "choose_graph", lambda backend, runner, key: key)
  set_overlap(monkeypatch, llm.runner, overlaps)
  gate.is_open.set()
  assert [gate.generate(*job).result(TIMEOUT) for job in jobs] == expected, "this captures their graphs"
  gate.is_open.clear()
  if place == "wait": monkeypatch.setattr(llm.runner, "launch", lambda step: gate.guard("wait", launch(step)))
  if place == "start_reading": monkeypatch.setattr(backend, place, gate.guard(place, backend.start_reading))
  blocked = gate.load(folder, type(backend)()) if place == "load" else gate.generate(*jobs[0])
  assert gate.is_entered.wait(TIMEOUT)
  assert gate.generate(*jobs[1]).result(TIMEOUT / 4) == expected[1]
  assert not blocked.done()
  gate.is_open.set()
  result = blocked.result(TIMEOUT)
  assert place == "load" or result == expected[0]


@pytest.mark.parametrize("second", ["capture", "load"])
@pytest.mark.parametrize("first", ["capture", "load"])
def test_captures_and_loads_exclude_each_other(folder, monkeypatch, gate, first, second):
  engines = [LLM(folder, **ENGINE) for _ in range(2)]   # nothing is captured yet
  for backend in (engine.runner.backend for engine in engines):
    monkeypatch.setattr(backend, "run_graph", gate.guard("capture", backend.run_graph))
  def start(kind, engine):
    return gate.load(folder, type(engine.backend)()) if kind == "load" else gate.generate(engine, [5, 6, 7], 1)
  futures = [start(first, engines[0])]
  assert gate.is_entered.wait(TIMEOUT)
  futures.append(start(second, engines[1]))
  time.sleep(0.3)
  assert gate.entered == [first], "the second one must wait until the first one ends"
  gate.is_open.set()
  for kind, future in zip((first, second), futures, strict=True):
    result = future.result(TIMEOUT)
    assert kind == "load" or result == reference_greedy(folder, [5, 6, 7], 1)
  assert gate.entered == [first, second]
