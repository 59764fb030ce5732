"""Speculative decoding: outputs of a model equal those without drafts, for each field and each source of drafts, with
stops and failures."""
import dataclasses

import pytest
from helpers.engines import ENGINE, check_invariants, ids_of, prompt, sampled, tokens
from helpers.models import tiny_model
from helpers.parameters import slow
from helpers.speculation import (CASES, NGRAM, NO_DRAFTS, Counts, Oracle, add_outputs, check_equal_to_plain)

from tinyvllm import LLM


@pytest.fixture(scope="module")
def engines(words_folder, tmp_path_factory):
  """By source of drafts: n-grams, the target as draft model, or a smaller model with the same vocabulary."""
  small = tiny_model(tmp_path_factory.mktemp("small"), seed=7, words=True, num_hidden_layers=1, hidden_size=16)
  configs = {"n-grams": NGRAM | {"prompt_lookup_min": 1}, "own model": {"model": words_folder},
             "small model": {"model": small}}
  options = {**ENGINE, "max_num_seqs": 16}
  return {name: LLM(words_folder, **options, speculative_config={"num_speculative_tokens": 3, **config})
          for name, config in configs.items()}


@pytest.fixture(params=["plain", "overlapped"])
def engine(engines, monkeypatch, request):
  engine = engines["n-grams"]
  monkeypatch.setattr(engine.runner, "is_async", request.param == "overlapped")
  yield engine
  for name in list(engine.requests): engine.abort_request(name)   # so that only the failed test fails


@pytest.mark.parametrize("source, overlaps", [("n-grams", True), *slow(("n-grams", False)), ("own model", False),
                                              ("small model", False)])
@pytest.mark.parametrize("case", CASES)
def test_outputs_with_drafts_equal_outputs_without(plain, engines, monkeypatch, source, overlaps, case):
  engine = engines[source]
  monkeypatch.setattr(engine.runner, "is_async", overlaps)
  params = [sampled(24, **{"seed": i, **CASES[case]}) for i in range(3)]
  jobs, count = [tokens(prompt(5 + 6 * i, case, i)) for i in range(3)], Counts(engine)
  check_equal_to_plain(plain, engine, jobs, params)   # n-grams that repeat by chance
  if source == "n-grams":
    oracle = Oracle(monkeypatch, "partly wrong")
    if case not in NO_DRAFTS: add_outputs(oracle, plain, jobs, params)
    check_equal_to_plain(plain, engine, jobs, params)
    oracle.style = "right"
    check_equal_to_plain(plain, engine, jobs, params)
  _, proposed, accepted = count()
  assert (proposed > 0) == (case not in NO_DRAFTS) and (accepted > 0 or source != "n-grams" or not proposed)
  if source == "own model":
    assert accepted == proposed and (proposed > 50 or case in ("max_tokens", "min_tokens", "eos", *NO_DRAFTS))
  check_invariants(engine)


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
def test_stop_within_drafts_ends_text(plain, engine, monkeypatch, field):
  ids, whole = prompt(7, field), sampled(24, seed=4, top_k=3)
  output = plain.generate(tokens(ids), whole, False)[0].outputs[0]
  pieces = [output.text[i:i + 1 + i % 4] for i in range(2, len(output.text) - 4, 2)]
  stops = [[x] for x in (pieces if field == "stop" else output.token_ids)]
  params = [dataclasses.replace(whole, include_stop_str_in_output=i % 2 == 0, min_tokens=i % 3 * 4, logprobs=1,
                                **{field: stop}) for i, stop in enumerate(stops)]
  oracle, jobs, count = Oracle(monkeypatch), [tokens(ids)] * len(params), Counts(engine)
  add_outputs(oracle, plain, jobs[:1], [whole])
  expected = check_equal_to_plain(plain, engine, jobs, params)
  assert sum(o.outputs[0].finish_reason == "stop" for o in expected) > 7 and count()[2] > 30
  assert len({len(ids_of(o)) for o in expected}) > 6, "they must end at many positions"
  count = Counts(engine)
  for p in params[::3]: engine.generate(jobs[:1], p, False)
  assert count()[1] == count()[2] > 20, "drafts after the end are not counted"
  check_invariants(engine)
