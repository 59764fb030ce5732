"""Regression tests: errors that name the wrong cause, internal errors reported as the user's, repeated work for a
waiting request, engines that block each other."""
import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from helpers.engines import ENGINE, check_invariants, run_to_end, set_overlap
from helpers.reference import reference_greedy
from helpers.requests import greedy, ids_of, tokens

from tinyvllm import LLM, SamplingParams, config

BS = ENGINE["block_size"]
TIMEOUT = 60   # seconds


def generate(engine, ids, n): return ids_of(engine.generate(tokens(ids), greedy(n), use_tqdm=False)[0])


# Errors

@pytest.mark.parametrize("bias", [{"a": 1}, {"1.5": 1.0}, {1.5: 1.0}, {None: 1.0}, {5: 1, "x": 2}], ids=str)
def test_logit_bias_invalid_key_error_asks_for_token_ids(bias):
  with pytest.raises(config.InputError, match="logit_bias=.*token ids") as e:
    SamplingParams(logit_bias=bias)
  assert "between" not in str(e.value) and "int" in str(e.value)
  assert e.value.parameter == "logit_bias" and e.value.value == bias


@pytest.mark.parametrize("options, parameter, value", [
  ({"top_p": 2}, "top_p", 2), ({"temperature": "hot"}, "temperature", "hot"), ({"stop": [""]}, "stop", [""]),
  ({"logit_bias": {5: 101}}, "logit_bias", {5: 101}), ({"n": 0}, "n", 0), ({"seed": 2**63}, "seed", 2**63)], ids=str)
def test_input_error_has_parameter_and_value(options, parameter, value):
  with pytest.raises(config.InputError) as e: SamplingParams(**options)
  assert isinstance(e.value, ValueError)
  assert (e.value.parameter, e.value.value) == (parameter, value)
  assert parameter in str(e.value) and repr(value) in str(e.value)


@pytest.mark.parametrize("function", ["concatenate", "zeros"])
def test_internal_value_error_is_not_an_input_error(llm, folder, monkeypatch, function):
  ids = [5, 6, 7]

  def fail(*args, **kwargs): raise ValueError("all the input array dimensions must match exactly")
  llm.add_request("a", tokens(ids), greedy(8))
  llm.step()
  with monkeypatch.context() as patch:
    patch.setattr(np, function, fail)
    with pytest.raises(ValueError, match="must match exactly") as e: llm.step()
  assert not isinstance(e.value, config.InputError)
  check_invariants(llm)
  assert ids_of(run_to_end(llm, 100)["a"]) == reference_greedy(folder, ids, 8)


# Repeated work

def test_waiting_prompt_hashes_each_block_once(small_llm, folder, monkeypatch):
  """With 12 blocks and 7 of them used by the first request, the second one must wait: it needs 12 and shares 6."""
  first = [300 + i for i in range(6 * BS - 6)] + [290 + i for i in range(6)]
  second = first + [270 + i % 20 for i in range(6 * BS - 1)]
  small_llm.add_request("first", tokens(first), greedy(5 * BS))
  while not small_llm.scheduler.running or not small_llm.scheduler.running[0].num_generated: small_llm.step()
  small_llm.add_request("second", tokens(second), greedy(1))
  hashes = []

  def counting_sha256(data):
    hashes.append(data)
    return hashlib.sha256(data)
  monkeypatch.setattr("tinyvllm.scheduler.hashlib", SimpleNamespace(sha256=counting_sha256))
  num_steps = 0
  while small_llm.scheduler.waiting:
    small_llm.step()
    num_steps += 1
  num_hashes = len(hashes)
  outputs = run_to_end(small_llm, 100)
  assert num_steps > 3 * BS, "the second request must wait for many steps"
  assert num_hashes <= (len(first) + 5 * BS) // BS + len(second) // BS, "a block must not be hashed twice"
  assert ids_of(outputs["second"]) == reference_greedy(folder, second, 1)


# Engines in one process

class Gate:
  """Block calls of guarded functions until the gate opens."""
  def __init__(self):
    self.entered: list[str] = []   # names of all calls, including blocked ones
    self.is_open = threading.Event()

  def guard(self, name, function):
    def guarded(*args, **kwargs):
      self.entered.append(name)
      assert self.is_open.wait(TIMEOUT), "the gate never opened"
      return function(*args, **kwargs)
    return guarded

  def wait_for_entry(self):
    end = time.monotonic() + TIMEOUT
    while not self.entered and time.monotonic() < end: time.sleep(0.001)
    assert self.entered, "no call entered the gate"


@pytest.fixture
def gate():
  gate = Gate()
  yield gate
  gate.is_open.set()


@pytest.fixture
def pool(gate):
  """Two threads, which end after the gate opens."""
  executor = ThreadPoolExecutor(2)
  yield executor
  gate.is_open.set()
  executor.shutdown()


@pytest.fixture
def engines(llm, small_llm, folder, monkeypatch):
  """Two engines that have captured the graphs for PROMPTS."""
  for engine, ids in zip((llm, small_llm), PROMPTS, strict=True):
    monkeypatch.setattr(engine.runner.backend, "choose_graph", lambda runner, key: key)
    assert generate(engine, ids, 9) == reference_greedy(folder, ids, 9)
  return llm, small_llm


PROMPTS = [5, 6, 7], [9, 8, 7]


def block_wait(engine, monkeypatch, gate):
  """Block the engine at the gate before it reads the results of a step."""
  launch = engine.runner.launch
  monkeypatch.setattr(engine.runner, "launch", lambda step: gate.guard("wait", launch(step)))


def block_start_reading(engine, monkeypatch, gate):
  """Block the engine at the gate while it launches a step."""
  start_reading = engine.runner.backend.start_reading
  monkeypatch.setattr(engine.runner.backend, "start_reading", gate.guard("start_reading", start_reading))


@pytest.mark.parametrize("overlaps", ["", "overlapped"])
@pytest.mark.parametrize("block", [block_wait, block_start_reading])
def test_step_of_blocked_engine_does_not_block_other_engine(engines, folder, monkeypatch, gate, pool, block, overlaps):
  first, second = engines
  set_overlap(monkeypatch, first.runner, overlaps)
  block(first, monkeypatch, gate)
  blocked = pool.submit(generate, first, PROMPTS[0], 9)
  gate.wait_for_entry()
  assert pool.submit(generate, second, PROMPTS[1], 9).result(TIMEOUT / 4) == reference_greedy(folder, PROMPTS[1], 9)
  assert not blocked.done()
  gate.is_open.set()
  assert blocked.result(TIMEOUT) == reference_greedy(folder, PROMPTS[0], 9)


def test_two_engines_on_two_threads_equal_reference(engines, folder, pool):
  def generate_repeatedly(engine, ids): return [generate(engine, ids, 9) for _ in range(10)]
  futures = [pool.submit(generate_repeatedly, *pair) for pair in zip(engines, PROMPTS, strict=True)]
  expected = [[reference_greedy(folder, ids, 9)] * 10 for ids in PROMPTS]
  assert [future.result(TIMEOUT) for future in futures] == expected


def load(folder, gate, backend_class):
  """Load an engine, which blocks at the gate when it chooses its dtype, once."""
  backend = backend_class()
  backend.pick_dtype = gate.guard("load", backend.pick_dtype)
  return LLM(folder, backend=backend, **ENGINE)


def test_captured_step_runs_during_load(engines, folder, gate, pool):
  loading = pool.submit(load, folder, gate, type(engines[0].backend))
  gate.wait_for_entry()
  generating = pool.submit(generate, engines[0], PROMPTS[0], 9)
  assert generating.result(TIMEOUT / 4) == reference_greedy(folder, PROMPTS[0], 9)
  assert not loading.done()
  gate.is_open.set()
  loading.result(TIMEOUT)


@pytest.mark.parametrize("second", ["capture", "load"])
@pytest.mark.parametrize("first", ["capture", "load"])
def test_captures_and_loads_exclude_each_other(folder, monkeypatch, gate, pool, first, second):
  engines = [LLM(folder, **ENGINE) for _ in range(2)]   # nothing is captured yet
  for engine in engines:
    backend = engine.runner.backend
    monkeypatch.setattr(backend, "run_graph", gate.guard("capture", backend.run_graph))
  def start(kind, engine):
    if kind == "load": return pool.submit(load, folder, gate, type(engine.backend))
    return pool.submit(generate, engine, PROMPTS[0], 1)
  futures = [start(first, engines[0])]
  gate.wait_for_entry()
  futures.append(start(second, engines[1]))
  time.sleep(0.3)
  assert gate.entered == [first], "the second one must wait until the first one ends"
  gate.is_open.set()
  for kind, future in zip((first, second), futures, strict=True):
    result = future.result(TIMEOUT)
    if kind == "capture": assert result == reference_greedy(folder, PROMPTS[0], 1)
  assert gate.entered == [first, second]
