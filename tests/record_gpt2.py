"""Records tests/data/models/gpt2.json: logits and greedy ids of a tiny random GPT-2 by Hugging Face's own class. Needs
torch and transformers: python tests/record_gpt2.py"""
import json
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).parent / "data" / "models" / "gpt2.json"
CONFIG = {"architectures": ["GPT2LMHeadModel"], "activation_function": "gelu_new", "vocab_size": 128, "n_embd": 64,
          "n_layer": 2, "n_head": 4, "n_positions": 64, "layer_norm_epsilon": 1e-5, "bos_token_id": 1,
          "eos_token_id": 2}
MAX_TOKENS = 12


def make_weights(shapes: dict[str, Any]) -> dict[str, np.ndarray]:
  """Return random weights, the same for the same names and shapes."""
  rng, weights = np.random.default_rng(0), {}
  for name, shape in sorted(shapes.items()):
    x = rng.standard_normal(shape)
    if len(shape) == 1: x = 0.2 * x + (".ln_" in name and name.endswith("weight"))
    elif name.endswith(("wte.weight", "wpe.weight")): x *= 0.4
    else: x *= 1.5 / np.sqrt(shape[0])
    weights[name] = x.astype(np.float32)
  return weights


def record() -> None:
  import torch
  import transformers
  model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**CONFIG)).eval()
  shapes = {name: [*x.shape] for name, x in model.named_parameters()}
  state = {name: torch.tensor(x) for name, x in make_weights(shapes).items()}
  model.load_state_dict(state, strict=False)
  rng = np.random.default_rng(1)
  prompts = [rng.integers(3, 128, n).tolist() for n in (1, 2, 3, 5, 8, 9, 13, 21)]
  cases = []
  for prompt in prompts:
    ids = [*prompt]
    with torch.no_grad():
      first = model(torch.tensor([ids])).logits[0, -1]
      for _ in range(MAX_TOKENS): ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    cases.append({"prompt": prompt, "logits": [round(x, 5) for x in first.tolist()], "ids": ids[len(prompt):]})
  FILE.parent.mkdir(parents=True, exist_ok=True)
  FILE.write_text(json.dumps({"config": CONFIG, "shapes": shapes, "cases": cases}) + "\n")


if __name__ == "__main__": record()
