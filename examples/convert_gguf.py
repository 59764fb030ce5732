"""Makes a model's folder, as Hugging Face lays it out, of a GGUF file of the llama architecture: config.json,
model.safetensors (dequantized), tokenizer.json and tokenizer_config.json. Needs `pip install 'tinyvllm[hf]'`.

python examples/convert_gguf.py MODEL.gguf FOLDER [--dtype float16]"""
import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tinygrad.llm.gguf import gguf_load

# Names in GGUF files, of tensors and of what describes the model
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "blk": "model.layers",
         "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
         **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
         **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}}
KEYS = {"attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps", "feed_forward_length": "intermediate_size",
        "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "attention.key_length": "head_dim",
        "context_length": "max_position_embeddings", "rope.freq_base": "rope_theta"}
# How a byte-level BPE splits text before it merges, by tokenizer.ggml.pre; "": as GPT-2
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {"llama-bpe": LLAMA3, "qwen2": LLAMA3.replace("{1,3}", ""), "smollm": r"\p{N}", "gpt-2": "", "default": ""}


def model(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
  """A GGUF file's config and tensors under Hugging Face's names, and its metadata."""
  try: kv, tensors = gguf_load(path)
  except Exception as e: raise ValueError(f"{path} is not a readable GGUF file: {e}") from e   # fails in many ways
  if (arch := kv["general.architecture"]) != "llama":
    raise ValueError(f"{path}: GGUF architecture {arch} is not supported; supported: llama")
  config = {name: kv.get(f"llama.{key}") for key, name in KEYS.items()} | {
    "architectures": ["LlamaForCausalLM"], "vocab_size": len(kv["tokenizer.ggml.tokens"]),
    "tie_word_embeddings": "output.weight" not in tensors,
    "eos_token_id": [kv[k] for n in ("eos", "eot") if (k := f"tokenizer.ggml.{n}_token_id") in kv],
    "rope_scaling": {"rope_type": kv.get("llama.rope.scaling.type", "none").replace("none", "default"),
                     "factor": kv.get("llama.rope.scaling.factor")}}
  if "rope_freqs.weight" in tensors:   # llama3's scaling, worked out by llama.cpp's converter
    config["rope_scaling"] = {"rope_type": "factors", "factors": tensors.pop("rope_freqs.weight").tolist()}
  heads = {"attn_q": (n := config["num_attention_heads"]), "attn_k": config["num_key_value_heads"] or n}
  for name in list(tensors):
    parts, tensor = name.split("."), tensors.pop(name)
    if n := heads.get(parts[-2]):   # rows of q and k lie in RoPE's pairs of neighbours: put them back into halves
      tensor = tensor.reshape(n, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    tensors[".".join(NAMES.get(part, part) for part in parts)] = tensor
  return config, tensors, kv


def tokenizer(kv: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
  """The tokenizer of a GGUF file with a byte-level BPE vocabulary (tokenizer.ggml.model gpt2), and what belongs in its
  tokenizer_config.json."""
  import tokenizers as lib
  config = {k.split(".")[-1]: v for k, v in kv.items() if k.startswith("tokenizer.")}   # chat_template and others
  kind, pre = config.get("model"), config.get("pre", "default")
  if kind != "gpt2" or pre not in SPLITS:
    raise ValueError(f"GGUF tokenizer {kind} ({pre}) is not supported; supported: gpt2 ({', '.join(SPLITS)}): use the "
                     "model's folder with safetensors")
  tokens, merges = config["tokens"], [tuple(m.split(" ")) for m in config["merges"]]
  bpe = lib.Tokenizer(lib.models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre == "llama-bpe"))
  split = lib.pre_tokenizers.Split(lib.Regex(SPLITS[pre] or "(?!)"), "isolated")   # (?!): nowhere
  byte_level = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("smollm", "gpt-2", "default"))
  bpe.pre_tokenizer, bpe.decoder = lib.pre_tokenizers.Sequence([split, byte_level]), lib.decoders.ByteLevel()
  bpe.add_special_tokens([t for t, kind in zip(tokens, config["token_type"], strict=True) if kind == 3])
  names = {f"{n}_token": tokens[config[k]] for n in ("bos", "eos") if (k := f"{n}_token_id") in config}
  kept = {k: config[k] for k in ("chat_template", "add_bos_token") if k in config}
  return bpe, {"add_bos_token": pre == "llama-bpe", **kept, **names}


def convert(path: Path, folder: Path, dtype: str = "float16") -> Path:
  """Write the folder, and return it. dtype: float16 or float32, of the weights. Raises ValueError, and writes nothing,
  for a file that is no GGUF, or of another architecture or tokenizer than those above."""
  config, tensors, kv = model(path)
  bpe, names = tokenizer(kv)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / "config.json").write_text(json.dumps(config))
  (folder / "tokenizer_config.json").write_text(json.dumps(names))
  bpe.save(str(folder / "tokenizer.json"))
  weights = {name: np.ascontiguousarray(tensors.pop(name).numpy(), dtype) for name in list(tensors)}
  save_file(weights, folder / "model.safetensors")
  return folder


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
  parser.add_argument("gguf", type=Path)
  parser.add_argument("folder", type=Path)
  parser.add_argument("--dtype", choices=["float16", "float32"], default="float16")
  args = parser.parse_args()
  try: print(convert(args.gguf, args.folder, args.dtype))
  except ValueError as e: sys.exit(f"convert_gguf: {e}")
