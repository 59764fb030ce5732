"""SmolLM2-135M compared with Hugging Face transformers in float32. TINYVLLM_MODEL: the model's folder. TINYVLLM_GOLDEN:
prompts, their ids, last logits, greedy ids, and the margin of each greedy id over the second best. test_real_models.py
has the model as GGUF."""
import os
from pathlib import Path

import numpy as np
import pytest
from helpers.engines import LogitsRecorder, greedy, ids_of

from tinyvllm import LLM

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden" / "smollm2.npz"
PROMPTS = range(5)


OPTIONS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}


def existing(variable, file, default=None):
  """Return the path in an environment variable, or the default one. Fail if `file` in it does not exist."""
  path = os.environ.get(variable, default)
  if path is None or not Path(path, file).exists(): pytest.fail(f"{variable}={path!r} must have the file {file}")
  return Path(path)


@pytest.fixture(scope="module")
def golden():
  with np.load(existing("TINYVLLM_GOLDEN", "", GOLDEN)) as data: return dict(data)


@pytest.fixture(scope="module")
def recorder(): return LogitsRecorder(LLM(existing("TINYVLLM_MODEL", "config.json"), **OPTIONS))


def text(golden, i): return golden[f"prompt_{i}"].tobytes().decode()


def check_ids(golden, i, ids):
  """Check that ids equal the golden ids, or that the first difference has a margin of at most 1e-2."""
  expected, margin = golden[f"greedy_ids_{i}"].tolist(), golden[f"margin_{i}"]
  assert len(ids) == len(expected)
  at = next((j for j in range(len(ids)) if ids[j] != expected[j]), None)
  if at is not None: assert margin[at] <= 1e-2, f"prompt {i}, position {at}: id {ids[at]} must be {expected[at]}"


@pytest.mark.parametrize("i", PROMPTS)
def test_last_prompt_logits_and_greedy_ids_equal_golden(recorder, golden, i):
  prompt_ids = golden[f"input_ids_{i}"].tolist()
  _, logits = recorder.generate(prompt_ids, 1)
  np.testing.assert_allclose(logits[0], golden[f"last_logits_{i}"], atol=2e-3)
  output, = recorder.engine.generate(text(golden, i), greedy(32))
  assert output.prompt_token_ids == prompt_ids
  check_ids(golden, i, ids_of(output))


def test_greedy_ids_in_batch_of_5_equal_golden(recorder, golden):
  outputs = recorder.engine.generate([text(golden, i) for i in PROMPTS], greedy(32))
  for i in PROMPTS: check_ids(golden, i, ids_of(outputs[i]))
