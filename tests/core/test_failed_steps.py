"""Failed steps: no token is lost or repeated, no block without computed K and V is cached, and the engine continues."""
import dis
import functools
import inspect
import itertools
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.engines import BS, assert_same_outputs, check_invariants, greedy, ids_of, prompt, set_overlap, tokens
from helpers.faults import Failed, PLACES, add_fault, break_steps, fail_once, finish, finish_broken, run_random, step
from helpers.parameters import slow
from helpers.reference import reference_greedy

import tinyvllm.engine


@pytest.fixture(params=["", "overlapped", *slow("early")], ids=["plain", "overlapped", "early"])
def overlaps(request): return request.param


@pytest.fixture
def engine(small_llm, monkeypatch, overlaps):
  """An engine with 12 blocks of 4 tokens."""
  set_overlap(monkeypatch, small_llm.runner, overlaps)
  yield small_llm
  for name in list(small_llm.requests): small_llm.abort_request(name)   # so that later tests do not fail, too


def check_outputs(folder, last, jobs):
  """Check that each request finished with the reference ids. jobs: name -> prompt, length."""
  assert {name: ids_of(output) for name, output in last.items()} == {
    name: reference_greedy(folder, *job) for name, job in jobs.items()}
  assert all(output.finished for output in last.values())
  assert all(output.metrics.num_generated == len(ids_of(output)) for output in last.values())


@pytest.mark.parametrize("place", PLACES)
def test_failed_step_loses_and_repeats_no_token(engine, folder, overlaps, place):
  """Each of the first eight steps fails once; a request gets its last token in almost every one. Every second time the
  requests have log probabilities."""
  for number in range(1, 9):
    lengths = {"a": (3, 1), "b": (20, 2), "c": (4, 3), "d": (1, 5), "e": (7, 7)}
    jobs = {name: (prompt(length, place, overlaps, number, name), n) for name, (length, n) in lengths.items()}
    params = [greedy(n, logprobs=number % 2 or None) for _, n in jobs.values()]
    last = finish_broken(engine, place, number, {
      name: (tokens(ids), x) for (name, (ids, _)), x in zip(jobs.items(), params, strict=True)})
    check_outputs(folder, last, jobs)
    again = engine.generate([tokens(ids) for ids, _ in jobs.values()], params)
    check_outputs(folder, dict(zip(jobs, again, strict=True)), jobs)
    assert_same_outputs([last[name] for name in jobs], again)
    for (completion,), (expected,) in ((last[name].outputs, x.outputs) for name, x in zip(jobs, again, strict=True)):
      assert completion.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)
      if number % 2: assert completion.token_ids == [next(iter(logprobs)) for logprobs in completion.logprobs]


@pytest.mark.parametrize("place", PLACES)
def test_generate_failed_step_raises_and_aborts_all_requests(engine, folder, monkeypatch, overlaps, place):
  jobs = {i: (prompt(6 * i + 3, place, overlaps, i), 2 * i + 2) for i in range(3)}
  arguments = [tokens(ids) for ids, _ in jobs.values()], [greedy(n) for _, n in jobs.values()]
  for number in (1, 2, 3):
    with monkeypatch.context() as patch:
      break_steps(engine, patch, fail_once(place, number))
      with pytest.raises(Failed, match=place): engine.generate(*arguments)
    assert not engine.has_unfinished_requests()
    check_invariants(engine)
    check_outputs(folder, dict(enumerate(engine.generate(*arguments))), jobs)


@pytest.mark.parametrize("place", ["schedule", "start_step", "update"])
def test_stream_closed_during_a_step_ends_in_next_step(engine, folder, monkeypatch, overlaps, place):
  """A garbage collection may close a stream at any time, also in another request's step."""
  stream, before = engine.generate_stream(tokens(prompt(6, overlaps, place)), greedy(9)), engine.get_metrics()
  next(stream)
  job = prompt(5, overlaps, place), 4
  engine.add_request("other", tokens(job[0]), greedy(job[1]))
  call = getattr(engine.scheduler, place)

  def close_stream_after(*args):
    result = call(*args)
    stream.close()
    return result
  monkeypatch.setattr(engine.scheduler, place, close_stream_after)
  engine.step()
  check_outputs(folder, finish(engine)[0], {"other": job})
  assert not engine.requests and engine.blocks.num_used() == 0
  assert engine.get_metrics()["requests_finished"] == before["requests_finished"] + 1, "not of the closed one"


@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("place", ["launch", "compute", "read"])
def test_request_aborted_in_a_failed_step_stays_aborted(engine, folder, monkeypatch, overlaps, place, num_steps):
  """num_steps: steps before the failed one."""
  jobs, last = {name: (prompt(9, place, overlaps, num_steps, name), 6) for name in "abc"}, {}
  for name, (ids, n) in jobs.items(): engine.add_request(name, tokens(ids), greedy(n))
  for _ in range(num_steps): step(engine, last)
  with monkeypatch.context() as patch:
    break_steps(engine, patch, fail_once(place, 1))
    launch = engine.runner.launch
    patch.setattr(engine.runner, "launch", lambda step: (engine.abort_request("b"), launch(step))[1])
    while not step(engine, last): pass
  jobs["again"] = jobs.pop("b")
  engine.add_request("again", tokens(jobs["again"][0]), greedy(6))
  last, _ = finish(engine, last)
  if "b" in last: assert not last.pop("b").finished
  check_outputs(folder, last, jobs)
  assert num_steps or last["again"].num_cached_tokens == 0, "a failed step must cache no blocks of an aborted request"


# random failures

@pytest.mark.parametrize("seed", range(4))
def test_random_failures_change_no_output(engine, folder, monkeypatch, overlaps, seed):
  """About eight requests at once in a pool of 12 blocks; about one step in five fails."""
  rng, before = random.Random(seed), engine.get_metrics()["num_preemptions"]
  prompts = [[*prompt(2 * BS, seed, overlaps, i % 2), *prompt(n, seed, overlaps, i)]
             for i, n in enumerate((1, 4, 7, 11, 16, 20))] + [prompt(3, seed, overlaps)]
  with monkeypatch.context() as patch:
    break_steps(engine, patch, lambda place: rng.random() < 0.05)
    requests, last, failures = run_random(
      engine, rng, 200, lambda: (rng.choice(prompts), greedy(rng.choice((1, 2, 5, 12)))))
  check_outputs(folder, last, {name: (ids, params.max_tokens) for name, (ids, params) in requests.items()})
  assert len(requests) > 10 and failures > 20 and engine.get_metrics()["num_preemptions"] > before


def test_failed_output_is_returned_by_the_next_step(engine, folder, monkeypatch, overlaps):
  """Outputs are created after the tokens are appended: if that fails, the next step returns the finished request."""
  jobs = {name: (prompt(length, overlaps, name, "untold"), n) for name, length, n in (("a", 5, 1), ("b", 3, 4))}
  for name, (ids, n) in jobs.items(): engine.add_request(name, tokens(ids), greedy(n))
  for last_name in ("a", "b"):
    last = {}
    with monkeypatch.context() as patch, pytest.raises(Failed, match="output"):
      add_fault(patch, tinyvllm.engine.Request, "output", Failed("output"),
                lambda request, name=last_name: request.request_id == name and request.finished)
      while engine.has_unfinished_requests(): last |= {output.request_id: output for output in engine.step()}
    assert last_name not in last or not last[last_name].finished
    outputs = {output.request_id: output for output in engine.step()}
    assert outputs[last_name].finished and ids_of(outputs[last_name]) == reference_greedy(folder, *jobs[last_name])
  assert not engine.has_unfinished_requests()


# interrupts

PACKAGE = str(Path(tinyvllm.__file__).parent)
CHECKED_OPCODES = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}


@functools.cache
def signal_check_offsets(code):
  """The bytecode offsets, except a function's start, at which CPython checks for signals."""
  return {instruction.offset for instruction in dis.get_instructions(code) if instruction.opname in CHECKED_OPCODES}


class Interrupt:
  """Raises Failed where Ctrl-C could: where CPython checks for signals in the package's functions, which is at the
  start of a function, at the end of a loop's iteration and after a call of native code. place: the function and line,
  and the number of the visit at which to raise; None: never. num_visits: number of visits by function and line."""
  def __init__(self, place=None): self.place, self.num_visits, self.last_offset = place, Counter(), {}

  def __enter__(self):
    sys._getframe().f_trace_opcodes = True   # Python 3.12 needs it set first
    sys.settrace(self.trace)

  def __exit__(self, *error):
    sys.settrace(None)
    self.last_offset.clear()

  def trace(self, frame, event, argument):
    if event == "call":
      self.last_offset.pop(frame.f_back, None)   # the caller called Python code
      if not frame.f_code.co_filename.startswith(PACKAGE): return None
      frame.f_trace_opcodes = True
      if not frame.f_code.co_flags & inspect.CO_GENERATOR: self.count_visit(frame)   # the call may close a generator
    if event == "opcode":
      if self.last_offset.get(frame) in signal_check_offsets(frame.f_code): self.count_visit(frame)
      self.last_offset[frame] = frame.f_lasti
    return self.trace

  def count_visit(self, frame):
    line = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
    self.num_visits[line] += 1
    if (line, self.num_visits[line]) == self.place: raise Failed(line)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("overlaps", "more"), [("overlapped", 0), *slow(("overlapped", 1), ("", 0), ("early", 0))],
                         indirect=["overlaps"])
def test_interrupt_anywhere_in_a_step_loses_no_token(engine, folder, overlaps, more):
  """Interrupts each line at its last visit, and at `more` random ones. The steps contain prefill chunks, sequences that
  finish and a preempted one. A request that finishes in a step interrupted on return may never be returned."""
  salts = itertools.count()

  def run(step=None, place=None):
    """Run three requests, and interrupt step number `step` at `place` unless they are None. Return the number of visits
    by line in each step, and whether a step was interrupted."""
    jobs = {name: (prompt(length, overlaps, more, next(salts)), n)
            for name, length, n in (("a", 22, 6), ("b", 20, 5), ("c", 3, 1))}
    for name, (ids, n) in jobs.items(): engine.add_request(name, tokens(ids), greedy(n))
    seqs, last, visits_by_step, interrupted = [*engine.scheduler.waiting], {}, [], False
    while engine.has_unfinished_requests():
      interrupt = Interrupt(place if step == len(visits_by_step) else None)   # Python 3.13 traces late: watch all steps
      try:
        with interrupt: last |= {output.request_id: output for output in engine.step()}
      except Failed: interrupted = True
      visits_by_step.append(interrupt.num_visits)
      check_invariants(engine)
      assert len(visits_by_step) < 60, "the requests do not finish"
    expected = {name: reference_greedy(folder, *job) for name, job in jobs.items()}
    assert {seq.request_id: seq.tokens[seq.num_prompt:] for seq in seqs} == expected
    assert {seq.finish_reason for seq in seqs} == {"length"}
    again = engine.generate([tokens(ids) for ids, _ in jobs.values()], [greedy(n) for _, n in jobs.values()])
    check_outputs(folder, dict(zip(jobs, again, strict=True)), jobs)
    for name, output in zip(jobs, again, strict=True):
      if name not in last or not last[name].finished: continue
      assert_same_outputs([last[name]], [output])
      assert last[name].metrics.num_generated == jobs[name][1]
    return visits_by_step, interrupted

  run()   # captures the graphs; Python 3.13 traces a function's bytecodes from its second call on
  before, visits, interruptions = engine.get_metrics()["num_preemptions"], {}, []   # visits: line -> step, visit
  for i, num_visits in enumerate(run()[0]):
    for line, count in num_visits.items():
      visits.setdefault(line, []).extend((i, (line, visit)) for visit in range(1, count + 1))
  assert len(visits) > 80, "all of a step must be traced"
  assert engine.get_metrics()["num_preemptions"] > before, "the pool must be short of blocks"
  for line, places in visits.items():
    for step_and_place in places[-1:] + random.Random(line).sample(places[:-1], min(more, len(places) - 1)):
      try: interruptions.append(run(*step_and_place)[1])
      except AssertionError as error: raise AssertionError(f"interrupted in {line}: {error}") from error
  assert sum(interruptions) > 0.9 * len(interruptions), "too few interrupts"   # a new graph makes a place rarer
