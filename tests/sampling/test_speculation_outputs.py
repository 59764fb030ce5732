"""Speculative decoding: outputs of a model equal those without drafts, for each field, with stops and failures."""
import dataclasses
import itertools

import pytest
from helpers.engines import ENGINE, check_invariants
from helpers.faults import Failed, PLACES, break_steps, fail_once
from helpers.parameters import slow
from helpers.reference import reference_greedy
from helpers.requests import greedy, ids_of, prompt, sampled, tokens
from helpers.speculation import (CASES, Counts, NGRAM, NO_DRAFTS, Oracle, STYLES, add_outputs,
                                 always_draft, check_same)

from tinyvllm import LLM

OPTIONS = {**ENGINE, "max_num_seqs": 16}   # one graph serves all requests


# The engine with a real model


@pytest.fixture(scope="module")
def drafting(words_folder):
  engine = LLM(words_folder, **OPTIONS, speculative_config=NGRAM | {"prompt_lookup_min": 1})
  for _ in engine.capture([16], optional=True): pass
  return engine


@pytest.fixture(params=["plain", "overlapped"])
def engine(drafting, monkeypatch, request):
  monkeypatch.setattr(drafting.runner, "is_async", request.param == "overlapped")
  yield drafting
  for name in list(drafting.requests): drafting.abort_request(name)   # so that only the failed test fails


@pytest.mark.parametrize("engine", ["overlapped", *slow("plain")], indirect=True)
@pytest.mark.parametrize("case", CASES)
def test_outputs_with_drafts_equal_outputs_without(plain, engine, monkeypatch, case):
  params = [sampled(24, **{"seed": i, **CASES[case]}) for i in range(3)]
  jobs = [tokens(prompt(5 + 6 * i, case, i)) for i in range(3)]
  expected = plain.generate(jobs, params, False)
  count = Counts(engine)
  outputs = engine.generate(jobs, params, False)   # n-grams that repeat by chance
  check_same(outputs, expected)
  oracle = Oracle(monkeypatch, STYLES["partly wrong"])
  if case not in NO_DRAFTS: add_outputs(oracle, plain, jobs, params)
  check_same(engine.generate(jobs, params, False), expected)
  for style in ("right", "partly wrong"):
    oracle.style = STYLES[style]
    for job, p, output in zip(jobs, params, expected, strict=True):
      check_same(engine.generate([job], [p], False), [output])
  assert (count()[2] > 0) == (case not in NO_DRAFTS) and (count()[0] > 0) == (case not in NO_DRAFTS)
  check_invariants(engine)


def test_stop_string_within_drafts_ends_text(plain, engine, monkeypatch):
  ids, whole = prompt(7, "stops"), sampled(24, seed=4, top_k=3)
  text = plain.generate(tokens(ids), whole, False)[0].outputs[0].text
  params = [dataclasses.replace(whole, stop=[text[i:i + 1 + i % 4], "#"], include_stop_str_in_output=i % 2 == 0,
                                min_tokens=i % 3 * 4, logprobs=1) for i in range(2, len(text) - 4, 2)]
  assert len(params) > 10
  oracle, count, jobs = Oracle(monkeypatch), Counts(engine), [tokens(ids)] * len(params)
  add_outputs(oracle, plain, jobs[:1], [whole])
  expected = plain.generate(jobs, params, False)
  check_same(engine.generate(jobs, params, False), expected)
  for job, p, output in zip(jobs, params, expected, strict=True):
    check_same(engine.generate([job], [p], False), [output])
  assert sum(o.outputs[0].finish_reason == "stop" for o in expected) > 7 and count()[2] > 30
  assert len({len(ids_of(o)) for o in expected}) > 6, "they must end at many positions"
  assert engine.blocks.num_used() == 0


def test_stop_token_within_drafts_ends_text(plain, engine, monkeypatch):
  ids, whole = prompt(7, "stop ids"), sampled(24, seed=5)
  output_ids = ids_of(plain.generate(tokens(ids), whole, False)[0])
  params = [dataclasses.replace(whole, stop_token_ids=[token], min_tokens=i % 3 * 5)
            for i, token in enumerate(output_ids)]
  oracle, count, jobs = Oracle(monkeypatch), Counts(engine), [tokens(ids)] * len(params)
  add_outputs(oracle, plain, jobs[:1], [whole])
  expected = plain.generate(jobs, params, False)
  for job, p, output in zip(jobs, params, expected, strict=True):
    check_same(engine.generate([job], [p], False), [output])
  assert sum(o.outputs[0].finish_reason == "stop" for o in expected) > 15 and count()[2] > 40
  count = Counts(engine)
  for p in params[::3]: engine.generate(jobs[:1], p, False)
  assert count()[1] == count()[2] > 20, "drafts after the end are not counted"


def test_stream_delivers_accepted_drafts_together(plain, engine, monkeypatch):
  ids, params = prompt(9, "stream"), sampled(40, seed=2, logprobs=0)
  oracle = Oracle(monkeypatch)
  add_outputs(oracle, plain, [tokens(ids)], [params])
  expected, = plain.generate(tokens(ids), params, False)
  pieces = [output.outputs[0] for output in engine.generate_stream(tokens(ids), params)]
  assert "".join(piece.text for piece in pieces) == expected.outputs[0].text
  assert [token for piece in pieces for token in piece.token_ids] == ids_of(expected)
  assert [len(piece.logprobs) for piece in pieces] == [len(piece.token_ids) for piece in pieces]
  assert len(pieces) < 20 and max(len(piece.token_ids) for piece in pieces) == 6
  assert pieces[-1].finish_reason == "length"


@pytest.mark.parametrize("place", PLACES)
def test_failed_step_with_drafts_loses_and_repeats_no_token(engine, words_folder, monkeypatch, place):
  always_draft(monkeypatch)
  for number, style in itertools.product(range(1, 6), ("right", "partly wrong")):
    oracle, last, failures = Oracle(monkeypatch, STYLES[style]), {}, 0
    jobs = {name: prompt(length, "fails", name) for name, length in (("a", 3), ("b", 20), ("c", 6))}
    expected = {name: reference_greedy(words_folder, ids, 16) for name, ids in jobs.items()}
    oracle.texts += [[*ids, *expected[name]] for name, ids in jobs.items()]
    engine.blocks.cached_blocks.clear()
    engine.blocks.reset()
    for name, ids in jobs.items(): engine.add_request(name, tokens(ids), greedy(14, logprobs=0))
    with monkeypatch.context() as patch:
      break_steps(engine, patch, fail_once(place, number))
      for _ in range(200):
        if not engine.has_unfinished_requests(): break
        try: last |= {output.request_id: output for output in engine.step()}
        except Failed: failures += 1
        check_invariants(engine)
    assert failures == 1, f"{place} {number} must fail"
    assert {name: ids_of(output) for name, output in last.items()} == {name: x[:14] for name, x in expected.items()}
    assert all(len(output.outputs[0].logprobs) == 14 for output in last.values())
    again = engine.generate([tokens(ids) for ids in jobs.values()], greedy(14, logprobs=0), False)
    check_same(again, [last[name] for name in jobs])
