"""GPT-2 against logits and greedy ids that Hugging Face's class computed (record_gpt2.py), on both backends."""
import json

import numpy as np
import pytest
from record_gpt2 import FILE, MAX_TOKENS, make_weights
from reference import sentencepiece_model, write_safetensors

import tinyvllm
from tinyvllm import LLM, SamplingParams
from tinyvllm.config import InputError

DATA = json.loads(FILE.read_text())
CASES = DATA["cases"]
OPTIONS = {"dtype": "float32", "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 8}


def write_model(folder, prefix="transformer.", **config):
  folder.mkdir(exist_ok=True)
  weights = {name.replace("transformer.", prefix): x for name, x in make_weights(DATA["shapes"]).items()}
  weights[f"{prefix}h.0.attn.bias"] = np.tril(np.ones((1, 1, 64, 64)))
  weights[f"{prefix}h.0.attn.masked_bias"] = np.full(1, -1e4)
  (folder / "config.json").write_text(json.dumps(DATA["config"] | config))
  (folder / "tokenizer.model").write_bytes(sentencepiece_model())
  write_safetensors(folder / "model.safetensors", weights)
  return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return write_model(tmp_path_factory.mktemp("gpt2") / "model")


@pytest.fixture(scope="module", params=["fast", "plain"])
def llm(request, folder):
  """An engine with 14 usable blocks of 4 tokens, too few for all prompts, and steps of at most 8 tokens."""
  backend = tinyvllm.Backend() if request.param == "plain" else None
  return LLM(folder, backend=backend, num_gpu_blocks_override=15, max_model_len=48, **OPTIONS)


def generate(llm, cases, **fields):
  params = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **fields})
  return llm.generate([{"prompt_token_ids": case["prompt"]} for case in cases], params, use_tqdm=False)


def test_each_prompt_alone_gives_recorded_ids(llm):
  for case in CASES: assert generate(llm, [case])[0].outputs[0].token_ids == case["ids"]


def test_preempted_batch_gives_recorded_ids(llm):
  before = llm.get_metrics()["num_preemptions"]
  assert [x.outputs[0].token_ids for x in generate(llm, CASES)] == [case["ids"] for case in CASES]
  assert llm.get_metrics()["num_preemptions"] > before


def test_prefix_cache_hit_gives_recorded_ids(llm):
  for _ in range(2): output, = generate(llm, CASES[-1:])
  assert output.num_cached_tokens == 20 and output.outputs[0].token_ids == CASES[-1]["ids"]


def test_logprobs_are_within_tolerance(llm):
  for case in CASES:
    sample, = generate(llm, [case], max_tokens=1, logprobs=20)[0].outputs
    logits = np.array(case["logits"])
    expected = logits - np.log(np.exp(logits).sum())
    for token, x in sample.logprobs[0].items(): assert abs(x.logprob - expected[token]) < 1e-4


def test_names_without_prefix_load(tmp_path):
  llm = LLM(write_model(tmp_path / "bare", prefix=""), **OPTIONS)
  assert generate(llm, CASES[:1])[0].outputs[0].token_ids == CASES[0]["ids"]


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str)
def test_narrow_weights_give_similar_logprobs(folder, options):
  sample, = generate(LLM(folder, **OPTIONS | options), CASES[-1:], max_tokens=1, logprobs=5)[0].outputs
  logits = np.array(CASES[-1]["logits"])
  expected = logits - np.log(np.exp(logits).sum())
  limit = 0.05 if "dtype" in options else 0.2 if options["quantization"] == "int8" else 2
  for token, x in sample.logprobs[0].items(): assert abs(x.logprob - expected[token]) < limit


@pytest.mark.parametrize("config", [{"activation_function": "relu"}, {"add_cross_attention": True}], ids=str)
def test_unsupported_values_are_refused(tmp_path, config):
  with pytest.raises(InputError, match="for GPT-2"): LLM(write_model(tmp_path / "other", **config), **OPTIONS)


def test_length_beyond_positions_is_refused(folder):
  with pytest.raises(InputError, match="max_model_len=65 must be at most the model's 64"):
    LLM(folder, max_model_len=65, **OPTIONS)


def test_two_devices_are_refused(folder):
  with pytest.raises(InputError, match="tensor_parallel_size=2 must be 1 for GPT-2"):
    LLM(folder, tensor_parallel_size=2, **OPTIONS)
