"""Tiny random models of Hugging Face's classes, and logits and greedy ids that the classes computed in float32, for
test_models.py. To add a model, write a config.json of such sizes and lengths of prompts as tests/data/models/NAME.json,
install torch and transformers, and run python -m tests.helpers.record_models [NAME...]"""
import hashlib
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from .models import read_safetensors, sentencepiece_model, write_safetensors

DATA = Path(__file__).parents[1] / "data" / "models"
MODELS = sorted(path.stem for path in DATA.glob("*.json"))
NUM_TOKENS = 10   # greedy ids of each prompt
OPTIONS = {"dtype": "float32", "max_model_len": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}


def read(name: str) -> dict[str, Any]: return json.loads((DATA / f"{name}.json").read_text())


def make_weights(shapes: dict[str, list[int]], is_gemma: bool) -> dict[str, np.ndarray]:
  """Return weights that depend on names and shapes only. Gemma adds 1 to norms and multiplies its embeddings."""
  weights = {}
  for name, shape in shapes.items():
    x = np.random.default_rng(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)).standard_normal(shape)
    if "norm" in name or ".ln_" in name and name.endswith("weight"): x = (not is_gemma) + 0.2 * x
    elif len(shape) == 1 or name.endswith("bias"): x = 0.2 * x
    elif len(shape) == 3: x = 4 * x / math.sqrt(shape[1])   # experts, (count, in, out): swiglu clamps some activations
    elif ".h." in name: x = (2.25 if "attn.c_attn" in name else 3.15) * x / math.sqrt(shape[0])   # GPT-2, (in, out)
    else: x = (1.5 if ".layers." in name else 0.5 if is_gemma else 2) * x / math.sqrt(shape[-1])
    weights[name] = x.astype(np.float32)
  return weights


def make_prompts(name: str) -> list[list[int]]:
  rng = np.random.default_rng(40)
  return [rng.integers(3, 128, n).tolist() for n in read(name)["lengths"]]


def write_model(folder: Path, name: str, weights: dict[str, np.ndarray] | None = None, **overrides: Any) -> Path:
  """Write a recorded model. weights: instead of the recorded. overrides: of config.json."""
  recorded = read(name)
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps({**recorded["config"], **overrides}))
  write_safetensors(folder / "model.safetensors", weights or make_weights(recorded["shapes"], "gemma" in name))
  (folder / "tokenizer.model").write_bytes(sentencepiece_model())
  return folder


def record(name: str) -> None:
  """Write NAME.json and NAME.npy: config, shapes and greedy ids, and the logits after each prompt, (8, V)."""
  import torch
  import transformers
  from safetensors.numpy import save_file
  config, file = read(name)["config"], "model.safetensors"
  model_class = getattr(transformers, config["architectures"][0])
  with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model_class(model_class.config_class.from_dict(config)).save_pretrained(folder)
    config = json.loads((Path(folder) / "config.json").read_text())
    shapes = {tensor: [*x.shape] for tensor, x in read_safetensors(Path(folder) / file).items()}
    save_file(make_weights(shapes, "gemma" in name), Path(folder) / file, {"format": "pt"})
    model = model_class.from_pretrained(folder, dtype="float32", attn_implementation="eager")
    has_routers = getattr(model.config, "num_experts_per_tok", 0) > 0
    if has_routers: model.config.output_router_logits = True
    ids, logits, margin = [], [], math.inf
    for prompt in make_prompts(name):
      tokens = list(prompt)
      for i in range(NUM_TOKENS):   # without a cache: each forward pass is whole
        outputs = model(input_ids=torch.tensor([tokens]), use_cache=False)
        out = outputs.logits[0, -1]
        if not i: logits.append(out.numpy())
        best = out.topk(2).values
        margin = min(margin, float(best[0] - best[1]))
        tokens.append(int(out.argmax()))
      ids.append(tokens[len(prompt):])
  for router in outputs.router_logits if has_routers else ():   # (T, experts), of the longest prompt
    counts = router.argmax(-1).bincount()
    assert (counts > 0).sum() > 2 and counts.max() < 0.8 * len(router), f"{name}: tokens choose the same experts"
  assert margin > 1e-3, f"{name}: a greedy id is only {margin:.1e} above the next: change the weights"
  text = {"config": config, "lengths": read(name)["lengths"], "shapes": shapes, "ids": ids}
  (DATA / f"{name}.json").write_text(json.dumps(text, separators=(",", ":")) + "\n")
  np.save(DATA / f"{name}.npy", np.stack(logits))
  print(f"{name}: margin {margin:.1e}, {len({*sum(ids, [])})} different ids")


if __name__ == "__main__":
  for name in sys.argv[1:] or MODELS: record(name)
