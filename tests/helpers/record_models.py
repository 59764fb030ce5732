"""Records logits and greedy ids of tiny random models, computed by Hugging Face's own classes in float32, for
test_models.py. Run it with torch and transformers installed: python -m tests.helpers.record_models [NAME...]"""
import hashlib
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "data" / "models"
LENGTHS = [1, 4, 8, 9, 15, 23, 34, 41]   # prompts' tokens
NUM_TOKENS = 10                          # greedy ids of each prompt
SMALL = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
          "image_size": 28, "patch_size": 14}
FACTORS = {"short_factor": [1 + 0.1 * i for i in range(6)], "long_factor": [2 + 0.7 * i for i in range(6)]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
OLMO3 = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
MINISTRAL3 = {"rope_parameters": {**YARN, "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 1.0,
                                  "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.6, "attention_multiplier": 0.3}
PHI3 = {"hidden_size": 64, "partial_rotary_factor": 0.75, "tie_word_embeddings": True}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 24, "sliding_window": 8}
GEMMA3 = {**GEMMA, "sliding_window_pattern": 3, "num_hidden_layers": 3, "rope_parameters": {
  "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100000.0},
  "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0}}}
QWEN3_MOE = {"num_experts": 8, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True,
             "mlp_only_layers": [1], "head_dim": 8}
GPT_OSS = {"num_local_experts": 8, "intermediate_size": 32, "num_experts_per_tok": 2, "sliding_window": 8,
           "head_dim": 8, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
           "rope_parameters": {**YARN, "truncate": False}}
MINISTRAL = {"sliding_window": 8, "layer_types": ["full_attention", *["sliding_attention"] * 3]}
# Name -> class, maybe without "ForCausalLM"; fields of config.json beyond SMALL; and lengths of prompts
MODELS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
  "gemma2": ("Gemma2", {**GEMMA, "query_pre_attn_scalar": 10, "attn_logit_softcapping": 3.0,
                        "final_logit_softcapping": 5.0}, LENGTHS),
  "gemma3": ("Gemma3", GEMMA3, LENGTHS),
  "gemma3_vision": ("Gemma3ForConditionalGeneration", GEMMA3, LENGTHS),
  "gpt2": ("GPT2LMHeadModel", {"n_inner": 96}, LENGTHS),
  "gpt_oss": ("GptOss", GPT_OSS, LENGTHS),
  "granite": ("Granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}, LENGTHS),
  "ministral": ("Ministral", {**MINISTRAL, "head_dim": 8}, LENGTHS),
  "ministral3": ("Ministral3", {**MINISTRAL3, "head_dim": 8}, LENGTHS),
  "mistral": ("Mistral", {"sliding_window": 8, "head_dim": 8}, LENGTHS),
  "mistral3": ("Mistral3ForConditionalGeneration", {"sliding_window": None, "head_dim": 8}, LENGTHS),
  "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}, LENGTHS),
  "olmo2": ("Olmo2", {}, LENGTHS),
  "olmo3": ("Olmo3", {"sliding_window": 8, "rope_parameters": OLMO3}, LENGTHS),
  "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}, LENGTHS),
  "phi3": ("Phi3", {**PHI3, "sliding_window": 8}, LENGTHS),
  "phi3_short": ("Phi3", {**PHI3, "original_max_position_embeddings": 64,
                          "rope_parameters": {"rope_type": "longrope", **FACTORS}}, LENGTHS),
  "phi3_long": ("Phi3", {**PHI3, "original_max_position_embeddings": 16,
                         "rope_parameters": {"rope_type": "longrope", **FACTORS}}, [17, 18, 20, 24, 31, 32, 40, 41]),
  "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}, LENGTHS),
  "qwen3": ("Qwen3", {"head_dim": 8, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}}, LENGTHS),
  "qwen3_moe": ("Qwen3Moe", QWEN3_MOE, LENGTHS),
  "smollm3": ("SmolLM3", {"use_sliding_window": False}, LENGTHS)}


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


def make_prompts(lengths: list[int], vocab_size: int = SMALL["vocab_size"]) -> list[list[int]]:
  rng = np.random.default_rng(40)
  return [rng.integers(3, vocab_size, n).tolist() for n in lengths]


def make_model(name: str, folder: Path) -> Any:
  """Save a model of Hugging Face's class with make_weights in `folder`, and return it as loaded from there."""
  import transformers
  from safetensors import safe_open
  from safetensors.numpy import save_file
  class_name, fields, _ = MODELS[name]
  model_class = getattr(transformers, class_name, None) or getattr(transformers, f"{class_name}ForCausalLM")
  small = {x: value for x, value in SMALL.items() if "For" in class_name or hasattr(model_class.config_class(), x)}
  fields = {**small, **fields}
  if "For" in class_name:
    special = {"image_token_index": 5} | ({"mm_tokens_per_image": 1} if "Gemma" in class_name else {})
    config = model_class.config_class(text_config=fields, vision_config=VISION, **special)
  else: config = model_class.config_class(**fields)
  config.architectures = [model_class.__name__]
  model_class(config).save_pretrained(folder)
  with safe_open(folder / "model.safetensors", "np") as file:
    shapes = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
  weights = make_weights(shapes, "gemma" in name)
  save_file(weights, folder / "model.safetensors", {"format": "pt"})
  return model_class.from_pretrained(folder, dtype="float32", attn_implementation="eager"), shapes


def record(name: str) -> None:
  """Write NAME.json and NAME.npy: config, shapes and greedy ids, and the logits after each prompt, (8, V)."""
  import torch
  with tempfile.TemporaryDirectory() as folder, torch.no_grad():
    model, shapes = make_model(name, Path(folder))
    config = json.loads((Path(folder) / "config.json").read_text())
    has_routers = hasattr(model.config, "output_router_logits")
    if has_routers: model.config.output_router_logits = True
    ids, logits, margin = [], [], math.inf
    for prompt in make_prompts(MODELS[name][2]):
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
  text = {"config": config, "shapes": shapes, "ids": ids}
  DATA.mkdir(exist_ok=True)
  (DATA / f"{name}.json").write_text(json.dumps(text, separators=(",", ":")) + "\n")
  np.save(DATA / f"{name}.npy", np.stack(logits))
  print(f"{name}: margin {margin:.1e}, {len({*sum(ids, [])})} different ids")


if __name__ == "__main__":
  for name in sys.argv[1:] or MODELS: record(name)
