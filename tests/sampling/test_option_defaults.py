"""Defaults and bounds of options, as their users know them. A change here changes what existing programs do."""
import dataclasses
from types import SimpleNamespace

import pytest
from helpers.data import read_data

from tinyvllm import SamplingParams, StructuredOutputsParams
from tinyvllm.request import SamplingParams as CoreParams
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.sampling.speculation import SpeculativeConfig
from tinyvllm_extra.sampling.structured_outputs import tag_grammar

LIMITS = read_data("option_limits.json")


@pytest.mark.parametrize("options", [SamplingParams, LLMConfig, SpeculativeConfig, StructuredOutputsParams])
def test_option_defaults_and_bounds_are_documented_ones(options):
  fields = {field.name: [field.default, field.metadata.get("min"), field.metadata.get("max")]
            for field in dataclasses.fields(options)}
  expected = LIMITS[options.__name__]
  assert {name: fields[name] for name in expected} == expected
  missing = {name for name, (_, low, _) in fields.items() if low is not None} - expected.keys()
  assert not missing, f"options with bounds that data/option_limits.json lacks: {missing}"


def test_core_params_have_values_of_the_extensions_fields():
  core = CoreParams()
  assert (core.min_tokens, core.logprobs, core.prompt_logprobs) == (0, None, None)


@pytest.mark.parametrize("added, is_special", [("<a <b", True), ("<a <b <c", True), ("<a", False), ("", False)])
def test_tag_grammar_gives_each_tag_its_own_trigger(added, is_special):
  class StructTag(SimpleNamespace):
    to_grammar = staticmethod(lambda tags, assume_special: ([tag.trigger for tag in tags], assume_special))
  tag = {"triggers": ["<a", "<b"], "structures": [{"begin": f"<{x}=1>", "schema": {}, "end": "</>"} for x in "bac"]}
  tokenizer = SimpleNamespace(added_tokens=dict.fromkeys(added.split(), 0))
  assert tag_grammar(SimpleNamespace(StructTag=StructTag), tag, tokenizer) == (["<b", "<a", ""], is_special)


def test_former_parameters_of_vllm(words_llm):
  assert SamplingParams(spaces_between_special_tokens=False, extra_args={}) == SamplingParams()
  output, = words_llm.generate("the cat sat", SamplingParams(truncate_prompt_tokens=2, max_tokens=1))
  assert output.prompt_token_ids == words_llm.tokenizer.encode("the cat sat")[-2:]
