"""An invalid request or option raises ValueError with field, value and limit. Other requests continue."""
import math
from dataclasses import FrozenInstanceError, fields

import pytest
from helpers.data import read_data
from helpers.engines import check_invariants, ids_of, run_to_end
from helpers.reference import reference_greedy

from tinyvllm import LLM, BeamSearchParams, InputError, SamplingParams, StructuredOutputsParams
from tinyvllm_extra.options import LLMConfig

INVALID = read_data("invalid_values.json")   # by kind: by field, invalid values
# Invalid values that JSON has no form for
PYTHON_ONLY = {"stop": [b"x"], "bad_words": [b"x"], "logit_bias": [
  *({5: x} for x in (100.5, -101, math.nan, math.inf, "1", None, True)), {1.5: 1.0}, {None: 1.0}, {True: 1.0}]}
OPTIONS = {kind.__name__: kind for kind in (SamplingParams, BeamSearchParams, LLMConfig, LLM)}


def cases(bad): return [pytest.param(name, x, id=f"{name}={x!r}") for name, values in bad.items() for x in values]


@pytest.mark.parametrize("options,kind", [(SamplingParams, "sampling"), (LLMConfig, "engine")])
def test_every_field_has_invalid_values(options, kind): assert {f.name for f in fields(options)} == {*INVALID[kind]}


@pytest.mark.parametrize("name,value", cases(INVALID["sampling"]) + cases(PYTHON_ONLY))
def test_sampling_params_invalid_value_raises(name, value):
  with pytest.raises(InputError) as e: SamplingParams(**{name: value})
  assert e.value.parameter == name and (repr(e.value.value) == repr(value) or value in ("", [])), e.value.value
  assert name in str(e.value) and (repr(value) in str(e.value) or value in ("", [""])), str(e.value)


@pytest.mark.parametrize("name,value", cases(INVALID["engine"]))
def test_engine_config_invalid_value_raises(folder, name, value):
  with pytest.raises(ValueError) as e: LLM(folder, **{name: value})
  assert name in str(e.value) and repr(value) in str(e.value), str(e.value)


@pytest.mark.parametrize("options", INVALID["valid_sampling"])
def test_sampling_params_limits_are_valid(options): SamplingParams(**options)


def test_sampling_params_json_values_are_converted():
  params = SamplingParams(logit_bias={"5": 1, 7: 2.5}, structured_outputs={"choice": ["a", "b"]})
  assert params.logit_bias == {5: 1, 7: 2.5}
  assert params.structured_outputs == StructuredOutputsParams(choice=["a", "b"])


@pytest.mark.parametrize("name,options,message", INVALID["messages"])
def test_error_names_limit_or_known_options(name, options, message):
  with pytest.raises(ValueError, match=message): OPTIONS[name](**options)


def test_sampling_params_are_frozen():
  with pytest.raises(FrozenInstanceError): SamplingParams().top_k = 5


@pytest.mark.parametrize("free,options,message", INVALID["memory"])
def test_kv_cache_without_memory_raises(folder, monkeypatch, free, options, message):
  monkeypatch.setattr("tinyvllm_extra.kernels.drivers.DriverMemory.free", lambda memory, devices: free)
  with pytest.raises(ValueError, match=message): LLM(folder, **options)


@pytest.fixture
def busy_llm(small_llm, folder):
  """An engine with a running request, which must finish normally."""
  params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
  small_llm.add_request("in flight", {"prompt_token_ids": [5, 6, 7]}, params)
  small_llm.step()
  before = small_llm.get_metrics()
  yield small_llm
  check_invariants(small_llm)
  assert small_llm.get_metrics() == before, "an invalid request must not change the metrics"
  outputs = run_to_end(small_llm, 100)
  assert {name: ids_of(o) for name, o in outputs.items()} == {"in flight": reference_greedy(folder, [5, 6, 7], 8)}


@pytest.mark.parametrize("prompt,fields,words", [
  *((prompt, {}, words) for prompt, words in (*INVALID["prompts"].values(), (b"hello", "hello"))),
  *(("a", fields, words) for fields, words in (*INVALID["params"], ({"logit_bias": {-1: 1.0}}, "logit_bias.*-1")))])
def test_invalid_prompt_or_params_that_do_not_fit_the_model_raise_in_every_call(busy_llm, prompt, fields, words):
  good, params = {"prompt_token_ids": [9]}, SamplingParams(**fields)
  for call in (lambda: busy_llm.add_request("bad", prompt, params),
               lambda: busy_llm.generate([good, prompt, good], [SamplingParams(), params, SamplingParams()]),
               lambda: busy_llm.generate_stream(prompt, params)):
    with pytest.raises(ValueError, match=words): call()


@pytest.mark.parametrize("name,params,priority,words", INVALID["requests"])
def test_invalid_request_raises(busy_llm, name, params, priority, words):
  with pytest.raises(ValueError, match=words): busy_llm.add_request(name, {"prompt_token_ids": [9]}, params, priority)
