"""The architectures of models/table.py compared with Hugging Face's classes: data/models has the logits and greedy ids
that record_models.py recorded. Prompts are longer than the windows and the original lengths of YaRN and LongRoPE."""
import json

import numpy as np
import pytest
from record_models import DATA, MODELS, NUM_TOKENS, make_prompts, make_weights
from reference import LogitsRecorder, mark_slow_except, sentencepiece_model, write_safetensors

import tinyvllm
from tinyvllm import LLM, SamplingParams

OPTIONS = {"dtype": "float32", "max_model_len": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
LAYER_OPTIONS = ("gemma2", "gemma3_vision", "olmo3", "phi3_long", "smollm3")   # together, they use every option


def read(name): return json.loads((DATA / f"{name}.json").read_text())
def prompts(name): return [{"prompt_token_ids": ids} for ids in make_prompts(MODELS[name][2])]
def ids_of(outputs): return [output.outputs[0].token_ids for output in outputs]


def write_model(folder, name, rename=lambda name: name, **overrides):
  """Write a recorded model. rename: of tensors. overrides: of config.json."""
  recorded = read(name)
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps({**recorded["config"], **overrides}))
  weights = make_weights(recorded["shapes"], "gemma" in name)
  write_safetensors(folder / "model.safetensors", {rename(x): weight for x, weight in weights.items()})
  (folder / "tokenizer.model").write_bytes(sentencepiece_model())
  return folder


def check_recorded(recorder, name):
  """Compare each prompt's logits and ids, alone."""
  logits = np.load(DATA / f"{name}.npy")
  for prompt, expected, ids in zip(make_prompts(MODELS[name][2]), logits, read(name)["ids"], strict=True):
    found, own_logits = recorder.generate(prompt, NUM_TOKENS)
    assert found == ids
    np.testing.assert_allclose(own_logits[0], expected, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_ids_equal_recorded_ones(tmp_path, name):
  recorder = LogitsRecorder(LLM(write_model(tmp_path, name), **OPTIONS))
  check_recorded(recorder, name)
  llm = recorder.engine
  before = llm.get_metrics()["prefix_cache_hits"]
  assert ids_of(llm.generate(prompts(name), GREEDY)) == read(name)["ids"]   # batched and chunked
  assert llm.get_metrics()["prefix_cache_hits"] > before


@pytest.mark.parametrize("name", MODELS)
def test_preempted_ids_equal_recorded_ones(tmp_path, name):
  llm = LLM(write_model(tmp_path, name), **OPTIONS, num_gpu_blocks_override=14, enable_prefix_caching=False)
  assert ids_of(llm.generate(prompts(name), GREEDY)) == read(name)["ids"]
  assert llm.get_metrics()["num_preemptions"] > 0


@pytest.mark.parametrize("name", mark_slow_except(LAYER_OPTIONS, MODELS))
def test_core_backend_equals_recorded_logits(tmp_path, name):
  llm = LLM(write_model(tmp_path, name), backend=tinyvllm.Backend(), **{**OPTIONS, "max_num_seqs": 1})
  check_recorded(LogitsRecorder(llm), name)
