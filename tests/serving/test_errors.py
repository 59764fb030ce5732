"""An invalid request or option raises ValueError with field, value and limit. Other requests continue."""
from dataclasses import FrozenInstanceError, fields

import pytest
from helpers.engines import ENGINE, check_invariants
from helpers.invalid_values import BAD_SAMPLING, NAN
from helpers.models import tiny_model
from helpers.reference import reference_greedy

from tinyvllm import LLM, SamplingParams, StructuredOutputsParams
from tinyvllm_extra.options import LLMConfig

BAD_ENGINE = {
  "dtype": ["float8", "", 16, None], "kv_cache_dtype": ["fp16", "int4", "", 8, None, True],
  "max_model_len": [0, 1, -5, 1.5, "128", True],
  "max_num_seqs": [0, -1, 2.0, "4", None],
  "max_num_batched_tokens": [0, -1, 2.5, "16", 10**9], "block_size": [0, -4, 4.0, "16", None, True, 10**6],
  "gpu_memory_utilization": [0, -0.1, 1.01, NAN, "0.9", None], "num_gpu_blocks_override": [0, 1, -3, 8.0, "8", True],
  "tensor_parallel_size": [0, -1, 9, 2.0, "2", True, None],
  "enable_prefix_caching": [1, "yes", None], "enforce_eager": [1, "yes", None],
  "cudagraph_capture_sizes": [8, "8", [3], [0], [-8], [8, 12], [8.0], [True], [None], {8: 8}],
  "quantization": ["int3", "fp8", 8, ""], "seed": [1.5, "1", 2**63, True], "scheduling_policy": ["lifo", "", 1, None],
  "generation_config": ["model", "", 5, None], "runner": ["draft", "", 5, None],
  "speculative_config": ["ngram", 5, True, {}, [("method", "ngram")], {"method": "ngram"},
                         {"num_speculative_tokens": 5}],
}


def cases(bad): return [pytest.param(name, x, id=f"{name}={x!r}") for name, values in bad.items() for x in values]


def message(error): return str(error.value)


@pytest.mark.parametrize("options,bad", [(SamplingParams, BAD_SAMPLING), (LLMConfig, BAD_ENGINE)])
def test_every_field_has_invalid_values(options, bad): assert {f.name for f in fields(options)} == set(bad)


@pytest.mark.parametrize("name,value", cases(BAD_SAMPLING))
def test_sampling_params_invalid_value_raises(name, value):
  with pytest.raises(ValueError) as e: SamplingParams(**{name: value})
  assert name in message(e) and (repr(value) in message(e) or value in ("", [""])), message(e)


@pytest.mark.parametrize("name,value", cases(BAD_ENGINE))
def test_engine_config_invalid_value_raises(folder, name, value):
  with pytest.raises(ValueError) as e: LLM(folder, **{name: value})
  assert name in message(e) and repr(value) in message(e), message(e)


@pytest.mark.parametrize("options", [
  {"max_tokens": 1}, {"min_tokens": 256}, {"temperature": 0}, {"temperature": 1}, {"top_k": -1}, {"top_k": 10**6},
  {"top_p": 1}, {"min_p": 1}, {"seed": 2**63 - 1}, {"seed": -2**63}, {"seed": None}, {"stop": "x"},
  {"stop": ["x", "y"]}, {"stop": None}, {"stop": []}, {"stop_token_ids": []}, {"stop_token_ids": [0, 319]},
  {"stop_token_ids": [*range(300)], "min_tokens": 5}, {"repetition_penalty": 0.01}, {"repetition_penalty": 100},
  {"presence_penalty": -2}, {"presence_penalty": 2.0}, {"frequency_penalty": -2.0}, {"frequency_penalty": 2},
  {"logit_bias": {5: -100, "319": 100.0, 0: 0}}, {"logit_bias": None}, {"allowed_token_ids": [0, 319]},
  {"allowed_token_ids": None}, {"bad_words": ["a b", "c"]}, {"bad_words": None}, {"logprobs": 0}, {"logprobs": 20},
  {"logprobs": None}, {"prompt_logprobs": 0}, {"prompt_logprobs": 20}, {"prompt_logprobs": None},
  {"structured_outputs": None}, {"structured_outputs": {"regex": "a"}, "n": 2, "stop": "x", "logit_bias": {5: 1}},
])
def test_sampling_params_limits_are_valid(options): SamplingParams(**options)


def test_sampling_params_json_values_are_converted():
  assert SamplingParams(logit_bias={"5": 1, 7: 2.5}).logit_bias == {5: 1, 7: 2.5}
  structured_outputs = SamplingParams(structured_outputs={"choice": ["a", "b"]}).structured_outputs
  assert structured_outputs == StructuredOutputsParams(choice=["a", "b"])


@pytest.mark.parametrize("make,options,message", [
  (SamplingParams, {"top_p": 1.5}, r" 1\b"), (SamplingParams, {"temperature": -1.0}, r" 0\b"),
  (SamplingParams, {"top_k": -7}, r" -1\b"), (SamplingParams, {"max_tokens": 0}, r" 1\b"),
  (SamplingParams, {"presence_penalty": 3}, r" -2\b"), (SamplingParams, {"frequency_penalty": 3}, r" 2\b"),
  (SamplingParams, {"logprobs": -2}, r" -1\b"), (SamplingParams, {"prompt_logprobs": -3}, r" -1\b"),
  (SamplingParams, {"repetition_penalty": 101}, r" 100\b"), (SamplingParams, {"logit_bias": {1: 101}}, r" 100\b"),
  (SamplingParams, {"min_tokens": 9, "max_tokens": 5}, "min_tokens=9.*max_tokens=5"),
  (SamplingParams, {"temprature": 1.0}, "'temprature'.*temperature"),
  (LLM, {"max_seqs": 4}, "'max_seqs'.*max_num_seqs"), (LLMConfig, {"scheduling_policy": "lifo"}, "fcfs.*priority"),
  (LLM, {"max_num_batched_tokens": 16, "max_num_seqs": 32}, "max_num_seqs=32.*max_num_batched_tokens=16")], ids=str)
def test_error_names_limit_or_known_options(make, options, message):
  with pytest.raises(ValueError, match=message): make(**options)


def test_sampling_params_are_frozen():
  with pytest.raises(FrozenInstanceError): SamplingParams().top_k = 5


def test_max_model_len_above_model_limit_raises(folder):
  with pytest.raises(ValueError, match="max_model_len=513.*512"): LLM(folder, max_model_len=513)


def test_kv_cache_without_memory_raises(folder, monkeypatch):
  free_memory = "tinyvllm_extra.kernels.FastBackend.free_memory"
  monkeypatch.setattr(free_memory, lambda backend, device: 100_000)   # below the weights
  with pytest.raises(ValueError, match=r"^model: .*needs 0.00 GiB.*smaller model"): LLM(folder)
  monkeypatch.setattr(free_memory, lambda backend, device: 160_000)   # the weights fit, but not in a fraction of 0.9
  with pytest.raises(ValueError, match=r"gpu_memory_utilization=0.9.* 0.00 GiB.*smaller model"): LLM(folder)
  monkeypatch.setattr(free_memory, lambda backend, device: 220_000)   # a few blocks
  with pytest.raises(ValueError, match=r"max_model_len=511.*GiB.*gpu_memory_utilization"):
    LLM(folder, max_model_len=511)


LIMIT = ENGINE["max_model_len"]
POOL = 12 * ENGINE["block_size"]
BAD_PROMPTS = {
  "empty str": ("", "empty"), "no ids": ({"prompt_token_ids": []}, "empty"),
  "empty prompt in dict": ({"prompt": ""}, "empty"),
  "exceeds pool": ({"prompt_token_ids": [5] * POOL}, f"{POOL}"),
  "exceeds max_model_len": ({"prompt_token_ids": [5] * LIMIT}, f"{LIMIT}"),
  "id outside vocabulary": ({"prompt_token_ids": [5, 320]}, "320.*319"),
  "negative id": ({"prompt_token_ids": [5, -1]}, "-1.*319"), "float id": ({"prompt_token_ids": [5, 1.0]}, "1.0"),
  "bool id": ({"prompt_token_ids": [5, True]}, "True"), "str id": ({"prompt_token_ids": ["5"]}, "'5'"),
  "None": (None, "None"), "int": (5, "5"), "bytes": (b"hello", "hello"), "empty dict": ({}, "prompt"),
  "ids as str": ({"prompt_token_ids": "567"}, "prompt"), "int prompt in dict": ({"prompt": 5}, "prompt"),
}
BAD_REQUESTS = {
  "stop id outside vocabulary": (SamplingParams(stop_token_ids=[320]), 0, "320.*319"),
  "negative stop id": (SamplingParams(stop_token_ids=[-1]), 0, "-1.*319"),
  "biased id outside vocabulary": (SamplingParams(logit_bias={"5": 1, "320": 1}), 0, "logit_bias.*320.*319"),
  "allowed id outside vocabulary": (SamplingParams(allowed_token_ids=[5, 320]), 0, "allowed_token_ids.*320.*319"),
  "params as dict": ({"temperature": 0.0}, 0, "SamplingParams"), "priority under fcfs": (None, 3, "priority=3"),
  "str priority": (None, "high", "priority='high'"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model without a chat template."""
  return tiny_model(tmp_path_factory.mktemp("errors"))


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
  outputs = []
  while small_llm.has_unfinished_requests(): outputs += small_llm.step()
  assert outputs[-1].outputs[0].token_ids == reference_greedy(folder, [5, 6, 7], 8)
  assert {o.request_id for o in outputs} == {"in flight"}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_invalid_prompt_raises_in_every_call(busy_llm, case):
  prompt, words = BAD_PROMPTS[case]
  good = {"prompt_token_ids": [9]}
  for call in (lambda: busy_llm.add_request("bad", prompt), lambda: busy_llm.generate([good, prompt, good]),
               lambda: busy_llm.generate_stream(prompt)):
    with pytest.raises(ValueError, match=words): call()


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_invalid_request_raises(busy_llm, case):
  params, priority, words = BAD_REQUESTS[case]
  good = {"prompt_token_ids": [9]}
  with pytest.raises(ValueError, match=words): busy_llm.add_request("bad", good, params, priority)


def test_request_id_in_use_or_too_few_params_raise(busy_llm):
  good = {"prompt_token_ids": [9]}
  with pytest.raises(ValueError, match="'in flight'"): busy_llm.add_request("in flight", good)
  with pytest.raises(ValueError, match="2.*3"): busy_llm.generate([good] * 3, [SamplingParams()] * 2)


def test_prompts_of_maximum_length_run(small_llm, llm):
  for engine, n in ((small_llm, POOL - 1), (llm, LIMIT - 1)):
    output, = engine.generate({"prompt_token_ids": [5] * n}, SamplingParams(temperature=0.0))
    assert len(output.outputs[0].token_ids) >= 1 and output.outputs[0].finish_reason == "length"
