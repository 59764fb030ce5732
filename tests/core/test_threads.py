"""Only one thread at a time may drive an engine: a call from another thread raises RuntimeError and has no effect."""
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.engines import check_invariants
from helpers.faults import Failed
from helpers.reference import reference_greedy
from helpers.requests import greedy, ids_of, tokens


pytestmark = pytest.mark.timeout(120)
IDS, OTHER = [5, 60, 115, 170], [7, 80, 153]


def run_steps(llm):
  llm.add_request("first", tokens(IDS), greedy(6))
  while llm.has_unfinished_requests(): outputs = llm.step()
  return ids_of(outputs[0])


def run_generate(llm): return ids_of(llm.generate(tokens(IDS), greedy(6), use_tqdm=False)[0])
def run_stream(llm): return [i for output in llm.generate_stream(tokens(IDS), greedy(6)) for i in ids_of(output)]


# Calls from a second thread during a step
CALLS = {
  "add_request": lambda llm: llm.add_request("second", tokens(OTHER), greedy(3)),
  "abort_request": lambda llm: llm.abort_request(next(iter(llm.requests))),
  "step": lambda llm: llm.step(),
  "generate": lambda llm: llm.generate(tokens(OTHER), greedy(3), use_tqdm=False),
  "generate_stream": lambda llm: next(llm.generate_stream(tokens(OTHER), greedy(3))),
}


@pytest.fixture
def in_thread():
  """Return a function that runs a call on a second thread and returns its future."""
  with ThreadPoolExecutor(1) as pool: yield lambda call, *args: pool.submit(call, *args)


@pytest.fixture
def start_blocked(words_llm, monkeypatch):
  """Return a function that starts `work` on a thread and blocks it in its third launch. It returns the work's future
  and a function that unblocks the thread."""
  blocked, resume, launch, launched = threading.Event(), threading.Event(), words_llm.runner.launch, []

  def wait_and_launch(step):
    launched.append(step)
    if len(launched) == 3:
      blocked.set()
      assert resume.wait(60), "the thread was never unblocked"
    return launch(step)
  monkeypatch.setattr(words_llm.runner, "launch", wait_and_launch)
  with ThreadPoolExecutor(1) as pool:
    def start(work):
      future = pool.submit(work, words_llm)
      future.add_done_callback(lambda _: blocked.set())
      assert blocked.wait(60) and not future.done(), "the third step must be running"
      return future, resume.set
    yield start
    resume.set()


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("work", [run_steps, run_generate, run_stream])
def test_second_thread_during_step_raises_and_changes_nothing(words_llm, words_folder, in_thread, start_blocked, work,
                                                              name):
  first, resume = start_blocked(work)
  running, = words_llm.requests
  with pytest.raises(RuntimeError, match="AsyncLLM"): in_thread(CALLS[name], words_llm).result(10)
  assert [*words_llm.requests] == [running], "the refused call added or ended a request"
  resume()
  assert first.result(60) == reference_greedy(words_folder, IDS, 6)
  check_invariants(words_llm)
  assert in_thread(run_generate, words_llm).result(60) == reference_greedy(words_folder, IDS, 6), "free after the step"


def test_second_thread_during_step_may_read_metrics(words_llm, in_thread, start_blocked):
  first, resume = start_blocked(run_steps)
  metrics = in_thread(words_llm.get_metrics).result(10)
  assert metrics["num_requests_running"] == 1 and metrics["blocks_used"] == 2
  assert in_thread(words_llm.has_unfinished_requests).result(10)
  resume()
  first.result(60)


def test_failed_step_releases_engine_to_other_threads(words_llm, words_folder, in_thread, monkeypatch):
  def fail(step): raise Failed
  with monkeypatch.context() as patched, pytest.raises(Failed):
    patched.setattr(words_llm.runner, "launch", fail)
    run_generate(words_llm)
  assert in_thread(run_generate, words_llm).result(60) == reference_greedy(words_folder, IDS, 6)


def test_other_thread_may_use_engine_between_stream_tokens(words_llm, words_folder, in_thread):
  stream = words_llm.generate_stream(tokens(IDS), greedy(6))
  first_ids = ids_of(next(stream))
  assert in_thread(run_generate, words_llm).result(60) == reference_greedy(words_folder, IDS, 6)
  assert first_ids + [i for output in stream for i in ids_of(output)] == reference_greedy(words_folder, IDS, 6)
