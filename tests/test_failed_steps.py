"""Steps that fail, wherever they do: no token is lost or comes twice, what was not computed is not found, and the
engine goes on."""
import dis
import functools
import inspect
import itertools
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
from reference import ENGINE, check_invariants, reference_greedy, same_outputs, set_overlap, slow

import tinyvllm.engine
from tinyvllm import LLM, SamplingParams

BS = ENGINE["block_size"]
# In launch; as its results are awaited, of a step that was never computed, or that was; around the recording of tokens
PLACES = ["launch", "compute", "read", "before update", "amid update", "after update"]


class Failed(BaseException):
  """Not an Exception, as Ctrl-C is none."""


def greedy(n): return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)
def tokens(ids): return {"prompt_token_ids": ids}
def ids_of(output): return output.outputs[0].token_ids


def prompt(length, *salt):
  """Random words, which no other salt has: of a new prompt nothing is in the prefix cache."""
  rng = random.Random(str(salt))
  return [rng.randrange(259, 320) for _ in range(length)]


@pytest.fixture(params=["", "overlapped", *slow("early")], ids=["plain", "overlapped", "early"])
def overlaps(request): return request.param


@pytest.fixture(scope="module")
def folder(words_folder): return words_folder


@pytest.fixture
def engine(words_llm, monkeypatch, overlaps):
  """With room for all."""
  set_overlap(monkeypatch, words_llm.runner, overlaps)
  yield words_llm
  for name in list(words_llm.requests): words_llm.abort_request(name)   # one test fails, not all behind it


@pytest.fixture(scope="module")
def small_words_llm(folder): return LLM(folder, num_gpu_blocks_override=13, **ENGINE)


@pytest.fixture
def small_engine(small_words_llm, monkeypatch, overlaps):
  """With 12 blocks of 4 tokens."""
  set_overlap(monkeypatch, small_words_llm.runner, overlaps)
  yield small_words_llm
  for name in list(small_words_llm.requests): small_words_llm.abort_request(name)


def break_steps(engine, patched, fails):
  """Let an engine's steps fail at each of PLACES that they come by where `fails(place)` says so."""
  launch, update = engine.runner.launch, engine.scheduler.update

  def fail_at(place):
    if fails(place): raise Failed(place)

  def faulty_launch(step):
    fail_at("launch")
    computed = not fails("compute")
    done = launch(step) if computed else None

    def faulty_done():
      if not computed: raise Failed("compute")
      fail_at("read")
      return done()
    return faulty_done

  def faulty_update(written, sampled):
    fail_at("before update")
    if sampled and fails("amid update"):
      update(written, dict(itertools.islice(sampled.items(), 1)))
      raise Failed("amid update")
    update(written, sampled)
    fail_at("after update")
  patched.setattr(engine.runner, "launch", faulty_launch)
  patched.setattr(engine.scheduler, "update", faulty_update)


def once(place, number):
  """At the so-manieth time that a step comes by this place."""
  left = {place: number}

  def fails(at):
    left[at] = left.get(at, 0) - 1
    return at == place and left[at] == 0
  return fails


def step(engine, last):
  """One step, with invariants after it. What it gives is added to `last`. Returns whether it failed."""
  failed = False
  try:
    for output in engine.step(): last[output.request_id] = output
  except Failed: failed = True
  check_invariants(engine)
  return failed


def finish(engine, last=None, limit=2000):
  """Step to the end, whatever fails: the last output of each request, and how many steps failed."""
  last, failures = {} if last is None else last, 0
  for _ in range(limit):
    if not engine.has_unfinished_requests(): return last, failures
    failures += step(engine, last)
  raise AssertionError(f"not finished after {limit} steps")


def check_story(folder, last, jobs):
  """Each request has come to its end, with the ids that it has when nothing fails. jobs: by name, prompt and length."""
  assert {name: ids_of(output) for name, output in last.items()} == {
    name: reference_greedy(folder, *job) for name, job in jobs.items()}
  assert all(output.finished for output in last.values())
  assert all(output.metrics.num_generated == len(ids_of(output)) for output in last.values())


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_fails_loses_and_doubles_no_token(engine, folder, monkeypatch, overlaps, place):
  """Whichever it is: of these requests one has its last token in almost every step."""
  for number in range(1, 9):
    lengths = {"a": (3, 1), "b": (20, 2), "c": (4, 3), "d": (1, 5), "e": (7, 7)}
    jobs = {name: (prompt(length, place, overlaps, number, name), n) for name, (length, n) in lengths.items()}
    for name, (ids, n) in jobs.items(): engine.add_request(name, tokens(ids), greedy(n))
    with monkeypatch.context() as patched:
      break_steps(engine, patched, once(place, number))
      last, failures = finish(engine)
    assert failures == 1, f"{place} {number} was meant to fail"
    check_story(folder, last, jobs)
    again = engine.generate([tokens(ids) for ids, _ in jobs.values()], [greedy(n) for _, n in jobs.values()])
    check_story(folder, dict(zip(jobs, again, strict=True)), jobs)
    same_outputs([last[name] for name in jobs], again)


@pytest.mark.parametrize("place", ["launch", "compute", "read"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_a_failed_step_was_to_compute_is_not_found(engine, folder, monkeypatch, overlaps, place, number):
  """A prompt of three steps of 16."""
  ids, last = prompt(11 * BS, place, number, overlaps), {}
  jobs = {name: (ids, 6) for name in "abc"}
  with monkeypatch.context() as patched:
    break_steps(engine, patched, once(place, number))
    engine.add_request("a", tokens(ids), greedy(6))
    while not step(engine, last): pass
  engine.add_request("b", tokens(ids), greedy(6))
  for _ in range(2): step(engine, last)
  engine.add_request("c", tokens(ids), greedy(6))
  last, _ = finish(engine, last)
  check_story(folder, last, jobs)


@pytest.mark.parametrize("place", PLACES)
def test_generate_raises_what_a_step_raised_and_leaves_nothing_behind(engine, folder, monkeypatch, overlaps, place):
  jobs = {i: (prompt(6 * i + 3, place, overlaps, i), 2 * i + 2) for i in range(3)}
  given = [tokens(ids) for ids, _ in jobs.values()], [greedy(n) for _, n in jobs.values()]
  for number in (1, 2, 3):
    with monkeypatch.context() as patched:
      break_steps(engine, patched, once(place, number))
      with pytest.raises(Failed, match=place): engine.generate(*given)
    assert not engine.has_unfinished_requests()
    check_invariants(engine)
    check_story(folder, dict(enumerate(engine.generate(*given))), jobs)


@pytest.mark.parametrize("place", ["amid update", "after update"])
def test_a_failed_step_loses_no_log_probability(engine, monkeypatch, overlaps, place):
  for number in (1, 2, 3):
    jobs = {name: tokens(prompt(3, place, overlaps, number, name)) for name in "ab"}
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1)
    for name, job in jobs.items(): engine.add_request(name, job, params)
    with monkeypatch.context() as patched:
      break_steps(engine, patched, once(place, number))
      last, failures = finish(engine, limit=50)
    assert failures == 1
    for name, output in zip(jobs, engine.generate([*jobs.values()], params), strict=True):
      (got,), (expected,) = last[name].outputs, output.outputs
      assert got.token_ids == [next(iter(of)) for of in got.logprobs] == expected.token_ids
      assert got.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("place", ["schedule", "start_step", "update"])
def test_a_stream_collected_within_a_step_ends_with_the_next(small_engine, folder, monkeypatch, overlaps, place):
  """A garbage collection closes it wherever it happens to run, in another request's step too."""
  stream = small_engine.generate_stream(tokens(prompt(6, overlaps, place)), greedy(9))
  next(stream)
  small_engine.add_request("other", tokens(prompt(5, overlaps, place)), greedy(4))
  scheduler = small_engine.scheduler
  usual = getattr(scheduler, place)

  def collected(*args):
    result = usual(*args)
    stream.close()
    return result
  with monkeypatch.context() as patched:
    patched.setattr(scheduler, place, collected)
    small_engine.step()
  last, _ = finish(small_engine, {})
  assert ids_of(last["other"]) == reference_greedy(folder, prompt(5, overlaps, place), 4)
  assert not small_engine.requests and small_engine.blocks.num_used() == 0


def test_a_stream_beside_one_whose_step_failed_goes_on(engine, folder, monkeypatch, overlaps):
  ids = [prompt(5, overlaps, i) for i in range(2)]
  other, broken = (engine.generate_stream(tokens(ids[i]), greedy(8)) for i in range(2))
  got = [*ids_of(next(other)), *ids_of(next(other))]
  next(broken)
  with monkeypatch.context() as patched:
    break_steps(engine, patched, once("launch", 1))
    with pytest.raises(Failed): next(broken)
  assert [*got, *(i for output in other for i in ids_of(output))] == reference_greedy(folder, ids[0], 8)
  check_invariants(engine)


# requests that are aborted meanwhile

@pytest.mark.parametrize("place", ["launch", "compute"])
def test_a_failed_step_leaves_alone_what_was_aborted_as_it_began(engine, folder, monkeypatch, overlaps, place):
  jobs, last = {name: (prompt(9, place, overlaps, name), 6) for name in "abc"}, {}
  for name, (ids, n) in jobs.items(): engine.add_request(name, tokens(ids), greedy(n))
  for _ in range(2): step(engine, last)
  with monkeypatch.context() as patched:
    break_steps(engine, patched, once(place, 1))
    launch = engine.runner.launch
    patched.setattr(engine.runner, "launch", lambda step: (engine.abort_request("b"), launch(step))[1])
    while not step(engine, last): pass
  last, _ = finish(engine, last)
  if "b" in last: assert not last.pop("b").finished
  del jobs["b"]
  check_story(folder, last, jobs)


def test_a_failed_step_leaves_alone_what_was_aborted_before_it_was_read(engine, folder, monkeypatch, overlaps):
  jobs, last = {name: (prompt(9, overlaps, name), 6) for name in "abc"}, {}
  for name, (ids, n) in jobs.items(): engine.add_request(name, tokens(ids), greedy(n))
  for _ in range(2): step(engine, last)
  engine.abort_request("b")
  with monkeypatch.context() as patched:
    break_steps(engine, patched, lambda place: place in ("compute", "read"))
    assert step(engine, last) or step(engine, last), "an overlapped one is read in the step after"
  last, _ = finish(engine, last)
  if "b" in last: assert not last.pop("b").finished
  del jobs["b"]
  check_story(folder, last, jobs)


@pytest.mark.parametrize("place", ["launch", "compute"])
def test_what_a_failed_step_was_to_compute_of_an_aborted_request_is_not_found(engine, folder, monkeypatch, overlaps,
                                                                              place):
  ids, last = prompt(3 * BS + 1, place, overlaps), {}
  engine.add_request("a", tokens(ids), greedy(6))
  with monkeypatch.context() as patched:
    break_steps(engine, patched, once(place, 1))
    launch = engine.runner.launch
    patched.setattr(engine.runner, "launch", lambda step: (engine.abort_request("a"), launch(step))[1])
    step(engine, last)
    engine.add_request("b", tokens(ids), greedy(6))
    last, _ = finish(engine, last)
  check_story(folder, last, {"b": (ids, 6)})
  assert last["b"].num_cached_tokens == 0


# random faults

@pytest.mark.parametrize("seed", range(4))
def test_random_faults_change_no_text(small_engine, folder, monkeypatch, overlaps, seed):
  """Some eight requests at once, in a pool of 12 blocks; every fifth step or so fails."""
  rng, jobs, last, failures = random.Random(seed), {}, {}, 0
  before = small_engine.get_metrics()["num_preemptions"]
  prompts = [[*prompt(2 * BS, seed, overlaps, i % 2), *prompt(n, seed, overlaps, i)]
             for i, n in enumerate((1, 4, 7, 11, 16, 20))] + [prompt(3, seed, overlaps)]
  with monkeypatch.context() as patched:
    break_steps(small_engine, patched, lambda place: rng.random() < 0.05)
    for i in range(200):
      what, live = rng.random(), [name for name in jobs if not (name in last and last[name].finished)]
      if what < 0.3 and len(live) < 8:
        jobs[str(i)] = rng.choice(prompts), rng.choice((1, 2, 5, 12))
        small_engine.add_request(str(i), tokens(jobs[str(i)][0]), greedy(jobs[str(i)][1]))
      elif what < 0.35 and live:
        small_engine.abort_request(victim := rng.choice(live))
        del jobs[victim]
        last.pop(victim, None)
      else: failures += step(small_engine, last)
    last, more = finish(small_engine, last)
  check_story(folder, last, jobs)
  assert len(jobs) > 10 and failures + more > 20 and small_engine.get_metrics()["num_preemptions"] > before


def test_what_could_not_be_told_is_told_by_the_next_step(engine, folder, monkeypatch, overlaps):
  """Outputs are made when the tokens are there: who is interrupted then has not lost who has just ended."""
  jobs = {name: (prompt(length, overlaps, name, "untold"), n) for name, length, n in (("a", 5, 1), ("b", 3, 4))}
  for name, (ids, n) in jobs.items(): engine.add_request(name, tokens(ids), greedy(n))
  made = tinyvllm.engine.Request.output
  for ends in ("a", "b"):
    def output(request, delta=False, ends=ends):
      if request.request_id == ends and request.finished: raise Failed("output")
      return made(request, delta)
    last = {}
    with monkeypatch.context() as patched:
      patched.setattr(tinyvllm.engine.Request, "output", output)
      with pytest.raises(Failed, match="output"):
        while engine.has_unfinished_requests(): last |= {output.request_id: output for output in engine.step()}
    assert ends not in last or not last[ends].finished
    told = {output.request_id: output for output in engine.step()}
    assert told[ends].finished and ids_of(told[ends]) == reference_greedy(folder, *jobs[ends])
  assert not engine.has_unfinished_requests()


# interrupts

PACKAGE = str(Path(tinyvllm.__file__).parent)
CHECKED = {"CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD"}


@functools.cache
def checks(code):
  """Where in a function CPython looks whether a signal has come, but for its beginning."""
  return {instruction.offset for instruction in dis.get_instructions(code) if instruction.opname in CHECKED}


class Interrupt:
  """Raises Failed where a Ctrl-C could: where CPython looks for a signal in a function of the package, which it does as
  one begins, as a loop goes round and as a call of what is not written in Python returns. place: the function and line,
  and which time that it is passed; None: never. passed: all places, and how often each was passed."""
  def __init__(self, place=None): self.place, self.passed, self.last = place, Counter(), {}

  def __enter__(self):
    sys._getframe().f_trace_opcodes = True   # Python 3.12 wants to know before
    sys.settrace(self.trace)

  def __exit__(self, *error):
    sys.settrace(None)
    self.last.clear()

  def trace(self, frame, event, argument):
    if event == "call":
      self.last.pop(frame.f_back, None)   # what was called there is written in Python
      if not frame.f_code.co_filename.startswith(PACKAGE): return None
      frame.f_trace_opcodes = True
      if not frame.f_code.co_flags & inspect.CO_GENERATOR: self.look(frame)   # it may be called to be closed
    if event == "opcode":
      if self.last.get(frame) in checks(frame.f_code): self.look(frame)
      self.last[frame] = frame.f_lasti
    return self.trace

  def look(self, frame):
    line = f"{frame.f_code.co_qualname}, line {frame.f_lineno}"
    self.passed[line] += 1
    if (line, self.passed[line]) == self.place: raise Failed(line)


def run_interrupted(engine, step=None, place=None):
  """Step to the end, and interrupt the so-manieth step in this place, or none. Returns the last output of each request,
  the places that each step passed, if none is to be interrupted, and whether one was."""
  last, passed, interrupted = {}, [], False
  while engine.has_unfinished_requests():
    interrupt = Interrupt(place if step == len(passed) else None)   # Python 3.13 tells late: watch all
    try:
      with interrupt: last |= {output.request_id: output for output in engine.step()}
    except Failed: interrupted = True
    passed.append(interrupt.passed)
    check_invariants(engine)
    assert len(passed) < 60, "requests that do not end"
  return last, passed, interrupted


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlaps", ["overlapped", *slow("", "early")], indirect=True,
                         ids=["overlapped", "plain", "early"])
@pytest.mark.parametrize("more", [0, *slow(1)])
def test_an_interrupt_anywhere_in_a_step_leaves_an_engine_that_works(small_engine, folder, overlaps, more):
  """In each line where one could come, the last time that it is passed and some times more. The steps are of prompts in
  chunks, of texts that end, and of one that is preempted. Of what ends in a step that is interrupted as it returns no
  step may tell."""
  salts = itertools.count()

  def run(*when):
    jobs = {name: (prompt(length, overlaps, more, next(salts)), n)
            for name, length, n in (("a", 22, 6), ("b", 20, 5), ("c", 3, 1))}
    seqs = {}
    for name, (ids, n) in jobs.items():
      small_engine.add_request(name, tokens(ids), greedy(n))
      seqs[name] = small_engine.scheduler.waiting[-1]
    last, passed, interrupted = run_interrupted(small_engine, *when)
    assert all(seq.finish_reason == "length" for seq in seqs.values())
    expected = {name: reference_greedy(folder, *job) for name, job in jobs.items()}
    assert {name: seq.tokens[seq.num_prompt:] for name, seq in seqs.items()} == expected
    again = small_engine.generate([tokens(ids) for ids, _ in jobs.values()], [greedy(n) for _, n in jobs.values()])
    for name, output in zip(jobs, again, strict=True):
      assert ids_of(output) == expected[name]
      if name not in last or not last[name].finished: continue
      same_outputs([last[name]], [output])
      assert last[name].metrics.num_generated == jobs[name][1]
    return passed, interrupted

  run()   # its graphs are captured; Python 3.13 tells of a function's bytecodes from the second time on
  before, found, hits = small_engine.get_metrics()["num_preemptions"], {}, []   # found: of each line, when it is passed
  for step, passed in enumerate(run()[0]):
    for line, times in passed.items(): found.setdefault(line, []).extend((step, (line, i + 1)) for i in range(times))
  assert len(found) > 80, "that was meant to be all of a step"
  assert small_engine.get_metrics()["num_preemptions"] > before, "that was meant to be short of blocks"
  for line, times in found.items():
    for when in times[-1:] + random.Random(line).sample(times[:-1], min(more, len(times) - 1)):
      try: hits.append(run(*when)[1])
      except AssertionError as error: raise AssertionError(f"interrupted in {line}: {error}") from error
  assert sum(hits) > 0.9 * len(hits), "those were meant to be interrupts"   # a new graph makes a place rarer
