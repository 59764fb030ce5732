"""The engine on the real device: captures by threads, interrupted captures, steps without graphs."""
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.engines import ENGINE, assert_same_outputs, greedy, ids_of, prompt, tokens
from helpers.faults import Failed
from helpers.models import tiny_model
from helpers.reference import reference_greedy

from tinyvllm import LLM

pytestmark = pytest.mark.real


def generate(engine, ids, n): return ids_of(engine.generate(tokens(ids), greedy(n), use_tqdm=False)[0])


def test_enforce_eager_equals_captured(llm, folder):
  eager = LLM(folder, enforce_eager=True, **ENGINE)
  jobs = [tokens(prompt(4)), tokens(prompt(12, 1))]
  assert_same_outputs(eager.generate(jobs, greedy(4)), llm.generate(jobs, greedy(4)))
  assert not any(hasattr(graph, "captured") for _, graph in eager.runner.graphs.values())


def test_engines_on_two_threads_capture_separately(tmp_path):
  """tinygrad's capture records kernels of all threads and forbids reading tensors."""
  folders = [tiny_model(tmp_path / str(i), seed=i, intermediate_size=64 + 16 * i) for i in range(2)]
  lengths = 1, 2, 4, 8, 3

  def run_two_engines(folder):
    engines = (LLM(folder, **ENGINE) for _ in range(2))
    return [[generate(engine, prompt(n), 5) for n in lengths] for engine in engines]
  with ThreadPoolExecutor(2) as pool: results = [*pool.map(run_two_engines, folders, timeout=240)]
  assert results == [[[reference_greedy(folder, prompt(n), 5) for n in lengths]] * 2 for folder in folders]


def test_interrupted_capture_is_repeated_as_one_graph(folder, monkeypatch):
  engine, calls = LLM(folder, **ENGINE), []
  compute = engine.runner._compute
  def interrupted(*args):
    calls.append(compute(*args))
    if len(calls) == 1: raise Failed
    return calls[-1]
  monkeypatch.setattr(engine.runner, "_compute", interrupted)
  with pytest.raises(Failed): generate(engine, [5], 3)
  assert generate(engine, [5], 3) == reference_greedy(folder, [5], 3)
  assert [len(graph.captured.linear.src) for _, graph in engine.runner.graphs.values()] == [1] and len(calls) == 2
