"""SmolLM2-135M compared with Hugging Face transformers in float32. TINYVLLM_MODEL: the model's folder, whose path plus
.gguf is the same model as GGUF. TINYVLLM_GOLDEN: prompts, their ids, last logits, greedy ids, and the margin of each
greedy id over the second best."""
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.engines import LogitsRecorder
from helpers.requests import greedy

from tinyvllm import LLM
from tinyvllm_extra.gguf_export import convert

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "smollm2.npz"
PROMPTS = range(5)


@pytest.fixture(scope="module")
def model():
  path = Path(os.environ.get("TINYVLLM_MODEL", ""))
  if "TINYVLLM_MODEL" not in os.environ or not (path / "config.json").exists():
    pytest.fail(f"TINYVLLM_MODEL={os.environ.get('TINYVLLM_MODEL')!r} must be SmolLM2-135M's folder, with config.json")
  return path


@pytest.fixture(scope="module")
def golden():
  path = Path(os.environ.get("TINYVLLM_GOLDEN", GOLDEN))
  if not path.exists(): pytest.fail(f"TINYVLLM_GOLDEN={str(path)!r} must be the golden file, smollm2.npz")
  with np.load(path) as data: return dict(data)


OPTIONS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def recorder(model): return LogitsRecorder(LLM(model, **OPTIONS))


@pytest.fixture(scope="module")
def llm(recorder): return recorder.engine


def text(golden, i): return golden[f"prompt_{i}"].tobytes().decode()


def check_ids(golden, i, ids):
  """Check that ids equal the golden ids, or that the first difference has a margin of at most 1e-2."""
  expected, margin = golden[f"greedy_ids_{i}"].tolist(), golden[f"margin_{i}"]
  assert len(ids) == len(expected)
  at = next((j for j in range(len(ids)) if ids[j] != expected[j]), None)
  if at is not None: assert margin[at] <= 1e-2, f"prompt {i}, position {at}: id {ids[at]} must be {expected[at]}"


@pytest.mark.parametrize("i", PROMPTS)
def test_last_prompt_logits_equal_golden(recorder, golden, i):
  _, logits = recorder.generate(golden[f"input_ids_{i}"].tolist(), 1)
  np.testing.assert_allclose(logits[0], golden[f"last_logits_{i}"], atol=2e-3)


@pytest.mark.parametrize("i", PROMPTS)
def test_greedy_ids_single_request_equal_golden(llm, golden, i):
  output, = llm.generate(text(golden, i), greedy(32))
  assert output.prompt_token_ids == golden[f"input_ids_{i}"].tolist()
  check_ids(golden, i, output.outputs[0].token_ids)


def test_greedy_ids_in_batch_of_5_equal_golden(llm, golden):
  outputs = llm.generate([text(golden, i) for i in PROMPTS], greedy(32))
  for i in PROMPTS: check_ids(golden, i, outputs[i].outputs[0].token_ids)


@pytest.mark.parametrize("converted", [False, True])
def test_gguf_ids_equal_safetensors(model, llm, golden, tmp_path, converted):
  path = Path(f"{model}.gguf")
  if not path.exists(): pytest.fail(f"{path} must be the same model as GGUF")
  gguf = LLM(convert(path, tmp_path / "converted") if converted else path, **OPTIONS)
  output, = gguf.generate(text(golden, 0), greedy(8))
  assert output.prompt_token_ids == golden["input_ids_0"].tolist()
  assert output.outputs[0].token_ids == llm.generate(text(golden, 0), greedy(8))[0].outputs[0].token_ids
