"""The engine on the real device: captures by threads, interrupted captures, steps without graphs."""
import threading

import pytest
from helpers.engines import ENGINE, assert_same_outputs
from helpers.models import tiny_model
from helpers.reference import reference_greedy
from helpers.requests import greedy, ids_of, prompt, tokens

from tinyvllm import LLM

pytestmark = pytest.mark.real


class Interrupted(BaseException): """Used instead of KeyboardInterrupt, which would end the tests."""


def test_enforce_eager_equals_captured(llm, folder):
  eager = LLM(folder, enforce_eager=True, **ENGINE)
  jobs = [tokens(prompt(4)), tokens(prompt(12, 1))]
  assert_same_outputs(eager.generate(jobs, greedy(4)), llm.generate(jobs, greedy(4)))
  assert not any(hasattr(graph, "captured") for _, graph in eager.runner.graphs.values())


def test_engines_on_two_threads_capture_separately(tmp_path):
  """tinygrad's capture records kernels of all threads and forbids reading tensors."""
  folders, results = [tiny_model(tmp_path / str(i), seed=i, intermediate_size=64 + 16 * i) for i in range(2)], {}

  def generate(i):
    for run in range(2):
      engine = LLM(folders[i], **ENGINE)
      for n in (1, 2, 4, 8, 3):
        results[i, run, n] = ids_of(engine.generate(tokens(prompt(n)), greedy(5), use_tqdm=False)[0])
  threads = [threading.Thread(target=generate, args=(i,), daemon=True) for i in range(2)]
  for thread in threads: thread.start()
  for thread in threads: thread.join(240)
  assert results == {(i, run, n): reference_greedy(folders[i], prompt(n), 5)
                     for i in range(2) for run in range(2) for n in (1, 2, 4, 8, 3)}


def test_load_waits_for_a_capture(folder, monkeypatch):
  engine, threads, is_loaded = LLM(folder, **ENGINE), [], threading.Event()
  def load():
    LLM(folder, **ENGINE)
    is_loaded.set()

  def compute(*args):
    if not threads:
      threads.append(threading.Thread(target=load, daemon=True))
      threads[0].start()
      assert not is_loaded.wait(1)
    return plain(*args)
  plain = engine.runner._compute
  monkeypatch.setattr(engine.runner, "_compute", compute)
  assert ids_of(engine.generate(tokens([5]), greedy(3))[0]) == reference_greedy(folder, [5], 3)
  assert is_loaded.wait(60)


def test_interrupted_capture_is_repeated_as_one_graph(folder, monkeypatch):
  engine, calls = LLM(folder, **ENGINE), []
  compute = engine.runner._compute
  def interrupted(*args):
    calls.append(compute(*args))
    if len(calls) == 1: raise Interrupted
    return calls[-1]
  monkeypatch.setattr(engine.runner, "_compute", interrupted)
  with pytest.raises(Interrupted): engine.generate(tokens([5]), greedy(3))
  assert ids_of(engine.generate(tokens([5]), greedy(3))[0]) == reference_greedy(folder, [5], 3)
  assert [len(graph.captured.linear.src) for _, graph in engine.runner.graphs.values()] == [1] and len(calls) == 2


def test_capture_works_on_any_thread(tmp_path):
  """The kernels are not compiled yet, and tinygrad's disk cache belongs to the thread that opened it."""
  llm = LLM(tiny_model(tmp_path, intermediate_size=80), **ENGINE)
  results = {}

  def generate(n): results[n] = ids_of(llm.generate(tokens(prompt(n)), greedy(4), use_tqdm=False)[0])
  for n in (3, 9):
    thread = threading.Thread(target=generate, args=(n,), daemon=True)
    thread.start()
    thread.join(120)
  assert results == {n: reference_greedy(tmp_path, prompt(n), 4) for n in (3, 9)}
