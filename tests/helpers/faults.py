"""Steps that fail, to test that an engine recovers."""
import itertools

import pytest
from .engines import check_invariants, tokens


# compute: launched, fails while its results are awaited; read: computed, reading fails; update: in Scheduler.update
PLACES = ["launch", "compute", "read", "before update", "amid update", "after update"]


class Failed(BaseException):
  """A BaseException, like KeyboardInterrupt."""


def break_steps(engine, patch, should_fail):
  """Make an engine's steps fail at each of PLACES for which `should_fail(place)` is true."""
  launch, update = engine.runner.launch, engine.scheduler.update

  def fail(place): raise Failed(place)
  def fail_at(place):
    if should_fail(place): fail(place)

  def faulty_launch(step):
    fail_at("launch")
    if should_fail("compute"): return lambda: fail("compute")
    wait = launch(step)
    return lambda: (fail_at("read"), wait())[1]

  def faulty_update(positions, sampled):
    fail_at("before update")
    if sampled and should_fail("amid update"):
      update(positions, dict(itertools.islice(sampled.items(), 1)))
      fail("amid update")
    update(positions, sampled)
    fail_at("after update")
  patch.setattr(engine.runner, "launch", faulty_launch)
  patch.setattr(engine.scheduler, "update", faulty_update)


def add_fault(patch, owner, name, error, should_fail):
  """Make a function of `owner` raise the error if `should_fail` is true for its arguments."""
  function = getattr(owner, name)

  def faulty(*args):
    if should_fail(*args): raise type(error)(*error.args)
    return function(*args)
  patch.setattr(owner, name, faulty)


def fail_once(place, number):
  """Return a `should_fail` for break_steps that is true at visit `number` of a place, counted from 1."""
  visits = itertools.count(1)
  return lambda visited: visited == place and next(visits) == number


def step(engine, last, watch=lambda: None):
  """Run a step, add its outputs to `last`, check the invariants and call `watch`. Return whether it failed."""
  failed = False
  try:
    for output in engine.step(): last[output.request_id] = output
  except Failed: failed = True
  check_invariants(engine)
  watch()
  return failed


def finish_broken(engine, place, number, requests):
  """Run requests, (prompt, params) by name, while visit `number` of a place fails once. Return their last outputs."""
  for name, request in requests.items(): engine.add_request(name, *request)
  with pytest.MonkeyPatch.context() as patch:
    break_steps(engine, patch, fail_once(place, number))
    last, failures = finish(engine)
  assert failures == 1, f"{place} {number} must fail"
  return last


def run_random(engine, rng, count, make_request, *watch):
  """Run `count` random operations, which add, abort or step, then finish. make_request: returns a prompt's ids and its
  params. watch: called after each step. Return the requests that were not aborted, by name, their last outputs, and the
  number of failed steps."""
  requests, last, failures, aborted = {}, {}, 0, []
  for i in range(count):
    draw, live = rng.random(), [*engine.requests]
    if draw < 0.3 and len(live) < 8:
      ids, params = requests[str(i)] = make_request()
      engine.add_request(str(i), tokens(ids), params)
    elif draw < 0.35 and live:
      engine.abort_request(victim := rng.choice(live))
      aborted.append(requests.pop(victim))
      last.pop(victim, None)
    else: failures += step(engine, last, *watch)
  last, more = finish(engine, last, *watch)
  assert aborted, "too few operations"
  return requests, last, failures + more


def finish(engine, last=None, *watch):
  """Step until all requests finish. Return the last output of each one and the number of failed steps."""
  last, failures = {} if last is None else last, 0
  for _ in range(2000):
    if not engine.has_unfinished_requests(): return last, failures
    failures += step(engine, last, *watch)
  raise AssertionError("not finished after 2000 steps")
