"""Record tests/data/models for mixtures of experts: random checkpoints by Hugging Face's classes, and their logits and
greedy ids in float32. Needs torch and transformers: python tests/record_mixtures.py"""
import json
import pathlib
import tempfile

import numpy as np

FOLDER = pathlib.Path(__file__).parent / "data" / "models"
SIZES: dict = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
               "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3, "max_position_embeddings": 128,
               "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": False}
MODELS = {
  "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 48, "num_experts_per_tok": 2,
               "norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]},
  "Mixtral": {"num_local_experts": 4, "intermediate_size": 32, "num_experts_per_tok": 2, "sliding_window": 16},
  "Olmoe": {"num_experts": 8, "intermediate_size": 32, "num_experts_per_tok": 3, "head_dim": None},
  "GptOss": {"num_local_experts": 8, "intermediate_size": 32, "num_experts_per_tok": 2, "sliding_window": 16,
             "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": YARN}}
PROMPT_SIZES = (1, 2, 5, 9, 17, 24, 33, 40)
MAX_TOKENS = 8


def record(name: str) -> None:
  import torch
  import transformers
  from safetensors.torch import load_file, save_file
  torch.manual_seed(0)
  sizes = {key: x for key, x in (SIZES | MODELS[name]).items() if x is not None}
  config = getattr(transformers, f"{name}Config")(**sizes)
  model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
  recorded = {}
  with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
    for parameter_name, x in model.named_parameters():
      if parameter_name.endswith(("norm.weight", "bias", "sinks")): x.add_(torch.randn_like(x) * 0.3)
      x.copy_(x.bfloat16().float())   # stored in two bytes
    for i, size in enumerate(PROMPT_SIZES):
      ids = np.random.default_rng(i).integers(3, SIZES["vocab_size"], size).tolist()
      recorded[f"prompt.{i}"] = torch.tensor(ids)
      logits = []
      for _ in range(MAX_TOKENS):
        logits.append(model(torch.tensor([ids])).logits[0, -1])
        ids.append(int(logits[-1].argmax()))
      recorded[f"ids.{i}"], recorded[f"logits.{i}"] = torch.tensor(ids[size:]), torch.stack(logits)
    model.bfloat16().save_pretrained(folder)
    weights = load_file(pathlib.Path(folder) / "model.safetensors")
    config_text = (pathlib.Path(folder) / "config.json").read_text()
  save_file(weights, FOLDER / f"{name}.safetensors", {"format": "pt", "config": json.dumps(json.loads(config_text))})
  save_file(recorded, FOLDER / f"{name}.recorded.safetensors")


if __name__ == "__main__":
  FOLDER.mkdir(parents=True, exist_ok=True)
  for name in MODELS: record(name)
