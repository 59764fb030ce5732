"""Record what llama.cpp computes with published GGUF files, as data/real_models.json: greedy ids, the margin of each
over the second best, and perplexity (pip install llama-cpp-python==0.3.36, which compiles llama.cpp).

python tests/outside/record_real_models.py FILE..."""
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llama_cpp import Llama

DATA = Path(__file__).parents[1] / "data" / "real_models.json"
PROMPTS = ["The capital of France is", "Once upon a time, there was a", "def fibonacci(n):\n", "1, 2, 3, 4,",
           "Der schnelle braune Fuchs", "The three laws of thermodynamics are", "今天天气很好，", "SELECT name FROM"]
TEXT = (Path(__file__).parents[2] / "ROADMAP.md").read_text()[:2000]


def greedy_ids(llm: Any, prompt: str, count: int) -> dict[str, Any]:
  ids, margins = llm.tokenize(prompt.encode(), add_bos=True, special=False), []
  prompt_ids = [*ids]
  llm.reset()
  llm.eval(ids)
  for _ in range(count):
    logits = llm.scores[llm.n_tokens - 1]
    second, best = np.sort(logits)[-2:]
    ids.append(int(logits.argmax()))
    margins.append(round(float(best - second), 3))
    llm.eval(ids[-1:])
  return {"prompt": prompt, "prompt_ids": prompt_ids, "ids": ids[len(prompt_ids):], "margins": margins}


def perplexity(llm: Any) -> float:
  ids = llm.tokenize(TEXT.encode(), add_bos=True, special=False)
  llm.reset()
  llm.eval(ids)
  logits = llm.scores[:len(ids)].astype(np.float64)
  totals = np.logaddexp.reduce(logits, -1)
  return float(np.exp((totals[:-1] - logits[np.arange(len(ids) - 1), ids[1:]]).mean()))


def main() -> None:
  records = json.loads(DATA.read_text()) if DATA.exists() else {}
  for file in map(Path, sys.argv[1:]):
    llm = Llama(str(file), n_ctx=1024, n_batch=1024, logits_all=True, verbose=False)
    records[file.name] = {"perplexity": round(perplexity(llm), 4), "text": TEXT,
                          "prompts": [greedy_ids(llm, prompt, 64) for prompt in PROMPTS]}
  DATA.write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__": main()
