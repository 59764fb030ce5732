"""Defaults and bounds of options, as their users know them. A change here changes what existing programs do."""
import dataclasses
from types import SimpleNamespace

import pytest

from tinyvllm import InputError, SamplingParams, StructuredOutputsParams
from tinyvllm.request import SamplingParams as CoreParams
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.speculation import SpeculativeConfig
from tinyvllm_extra.structured_outputs import MAX_SIZE, Constraint, tag_grammar

MAX = 2**31 - 1
# Default, and smallest and largest value, of each option with a number, a bool or a choice
OPTIONS = {
  SamplingParams: {
    "n": (1, 1, 1024), "max_tokens": (256, 1, MAX), "temperature": (1.0, 0, 100), "top_k": (0, -1, MAX),
    "top_p": (1.0, 1e-6, 1), "min_p": (0.0, 0, 1), "seed": (None, -2**63, 2**63 - 1), "min_tokens": (0, 0, MAX),
    "repetition_penalty": (1.0, 0.01, 100), "presence_penalty": (0.0, -2, 2), "frequency_penalty": (0.0, -2, 2),
    "logprobs": (None, -1, MAX), "prompt_logprobs": (None, -1, MAX), "logit_bias": (None, -100, 100),
    "include_stop_str_in_output": (False, None, None), "ignore_eos": (False, None, None),
    "skip_special_tokens": (True, None, None)},
  LLMConfig: {
    "dtype": ("auto", None, None), "max_model_len": (None, 2, 2**24), "max_num_seqs": (64, 1, 1024),
    "max_num_batched_tokens": (None, 1, 16384), "block_size": (16, 1, 256), "gpu_memory_utilization": (0.9, 0.01, 1.0),
    "kv_cache_dtype": ("auto", None, None), "num_gpu_blocks_override": (None, 2, 2**24),
    "tensor_parallel_size": (1, 1, 8), "enable_prefix_caching": (True, None, None),
    "enforce_eager": (False, None, None), "seed": (0, -2**63, 2**63 - 1),
    "scheduling_policy": ("fcfs", None, None)},
  SpeculativeConfig: {"num_speculative_tokens": (None, 1, 16), "prompt_lookup_max": (4, 1, 16),
                      "prompt_lookup_min": (2, 1, 16)}}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda kind: kind.__name__)
def test_option_defaults_and_bounds_are_documented_ones(options):
  fields = {field.name: (field.default, field.metadata.get("min"), field.metadata.get("max"))
            for field in dataclasses.fields(options)}
  expected = OPTIONS[options]
  assert {name: fields[name] for name in expected} == expected
  missing = {name for name, (_, low, _) in fields.items() if low is not None} - expected.keys()
  assert not missing, f"options with bounds and without a row above: {missing}"


def test_core_params_have_values_of_the_extensions_fields():
  core = CoreParams()
  assert (core.min_tokens, core.logprobs, core.prompt_logprobs) == (0, None, None)


def test_structured_outputs_defaults_are_unset():
  params = StructuredOutputsParams(regex="a")
  assert (params.disable_any_whitespace, params.whitespace_pattern, params.disable_fallback) == (False, None, False)
  assert params.json is params.choice is params.grammar is params.json_object is params.structural_tag is None


def test_structured_outputs_longer_than_limit_is_refused():
  with pytest.raises(InputError, match=f"regex has {2**19 + 1} characters: use at most {2**19}"):
    StructuredOutputsParams(regex="a" * (MAX_SIZE + 1)).constraint(SimpleNamespace(), 320, (2,))


@pytest.mark.parametrize("vocab_size, num_words", [(1, 1), (32, 1), (33, 2), (1056, 33), (1057, 34)])
def test_constraint_bitmask_has_a_bit_per_token(vocab_size, num_words):
  matcher = SimpleNamespace(compute_bitmask=lambda: b"\xff" * 4)
  bitmask = Constraint(matcher, vocab_size).bitmask()
  assert bitmask.tolist() == [-1] + [0] * (num_words - 1)


@pytest.mark.parametrize("added, is_special", [("<a <b", True), ("<a <b <c", True), ("<a", False), ("", False)])
def test_tag_grammar_gives_each_tag_its_own_trigger(added, is_special):
  class StructTag(SimpleNamespace):
    to_grammar = staticmethod(lambda tags, assume_special: ([tag.trigger for tag in tags], assume_special))
  tag = {"triggers": ["<a", "<b"], "structures": [
    {"begin": f"<{x}=1>", "schema": {}, "end": "</>"} for x in "bac"]}
  tokenizer = SimpleNamespace(added_tokens=dict.fromkeys(added.split(), 0))
  assert tag_grammar(SimpleNamespace(StructTag=StructTag), tag, tokenizer) == (["<b", "<a", ""], is_special)


def test_former_and_unsupported_parameters_of_vllm(words_llm):
  same = SamplingParams(guided_decoding={"choice": ["a"]}, spaces_between_special_tokens=False, extra_args={})
  assert same.structured_outputs == StructuredOutputsParams(choice=["a"])
  output, = words_llm.generate("the cat sat", SamplingParams(truncate_prompt_tokens=2, max_tokens=1))
  assert output.prompt_token_ids == words_llm.tokenizer.encode("the cat sat")[-2:]
  for name, value in {"logits_processors": [len], "extra_args": {"a": 1}, "truncate_prompt_tokens": 0}.items():
    with pytest.raises(InputError, match=f"{name}.*(logit_bias|at least 1)"): SamplingParams(**{name: value})
