"""GPT-2: names and stored masks of its checkpoints, and refused values. test_models.py compares its output."""
import numpy as np
import pytest
from helpers.record_models import DATA, LENGTHS, make_prompts, make_weights
from helpers.engines import LogitsRecorder
from helpers.parameters import slow
from helpers.recorded_models import OPTIONS, read, write_model
from test_models import GREEDY, ids_of, prompts

from tinyvllm import LLM
from tinyvllm.config import InputError


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_names_without_prefix_and_stored_masks_load(tmp_path, prefix):
  weights = {name.replace("transformer.", prefix): x for name, x in make_weights(read("gpt2")["shapes"], False).items()}
  weights[f"{prefix}h.0.attn.bias"] = np.tril(np.ones((1, 1, 128, 128)))
  weights[f"{prefix}h.0.attn.masked_bias"] = np.full(1, -1e4)
  llm = LLM(write_model(tmp_path, "gpt2", weights=weights), **OPTIONS)
  assert ids_of(llm.generate(prompts("gpt2")[:2], GREEDY)) == read("gpt2")["ids"][:2]


# The least correlation measured on the CPU: 0.99998 in float16, 0.9976 in int8, 0.874 in int4
@pytest.mark.parametrize("options,limit", [
  ({"quantization": "int8"}, 0.995), *slow(({"dtype": "float16"}, 0.9999), ({"quantization": "int4"}, 0.85))])
def test_narrow_weights_give_similar_logits(tmp_path, options, limit):
  recorder = LogitsRecorder(LLM(write_model(tmp_path, "gpt2"), **OPTIONS | options))
  for ids, expected in zip(make_prompts(LENGTHS), np.load(DATA / "gpt2.npy"), strict=True):
    assert np.corrcoef(recorder.generate(ids, 1)[1][0], expected)[0, 1] > limit


@pytest.mark.parametrize("field,value", [
  ("activation_function", "relu"), ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True),
  ("add_cross_attention", True), ("quantization_config", {"quant_method": "gptq", "bits": 4})])
def test_unsupported_values_are_refused(tmp_path, field, value):
  with pytest.raises(InputError, match=f"{field}=.* for GPT-2"):
    LLM(write_model(tmp_path, "gpt2", **{field: value}), **OPTIONS)


def test_length_beyond_positions_is_refused(tmp_path):
  with pytest.raises(InputError, match="max_model_len=129 must be at most the model's 128"):
    LLM(write_model(tmp_path, "gpt2"), **{**OPTIONS, "max_model_len": 129})
