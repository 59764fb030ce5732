"""Models whose logits record_models.py recorded."""
import json

from .models import sentencepiece_model, write_safetensors
from .record_models import DATA, make_weights


OPTIONS = {"dtype": "float32", "max_model_len": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 8}
def read(name): return json.loads((DATA / f"{name}.json").read_text())


def write_model(folder, name, rename=lambda name: name, weights=None, **overrides):
  """Write a recorded model. rename: of tensors. weights: instead of the recorded. overrides: of config.json."""
  recorded = read(name)
  folder.mkdir(exist_ok=True)
  (folder / "config.json").write_text(json.dumps({**recorded["config"], **overrides}))
  weights = weights or make_weights(recorded["shapes"], "gemma" in name)
  write_safetensors(folder / "model.safetensors", {rename(x): weight for x, weight in weights.items()})
  (folder / "tokenizer.model").write_bytes(sentencepiece_model())
  return folder
