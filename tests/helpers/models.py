"""Tiny random models on disk, in Hugging Face's layout, and their weights in numpy."""
import functools
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from safetensors import deserialize

from .data import read_data


VOCAB = 320
CORPUS = read_data("corpus.json")["SentencePiece"]   # texts to train a tokenizer on
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
VARIANTS = read_data("model_variants.json")   # fields of config.json
NUMPY = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1", "I32": "<i4", "I64": "<i8"}
# architecture -> (q, k and v have biases; o has a bias; q and k have norms); None: config.json's attention_bias
KINDS = {"LlamaForCausalLM": (None, None, False), "MistralForCausalLM": (False, False, False),
         "Qwen2ForCausalLM": (True, False, False), "Qwen3ForCausalLM": (None, None, True)}


@functools.cache
def sentencepiece_model() -> bytes:
  """Return a tokenizer of 320 pieces: <unk>, <s>, </s>, 256 bytes, and pieces from CORPUS. Trained once per process."""
  out = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(CORPUS), model_writer=out, vocab_size=VOCAB, model_type="bpe", byte_fallback=True,
    character_coverage=1.0, normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1,
    minloglevel=2)
  return out.getvalue()


def tiny_config(**overrides: Any) -> dict[str, Any]:
  """Return config.json of a LLaMA with 2 layers and 2 query heads per KV head. An override of None removes the key."""
  config = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "vocab_size": VOCAB, "hidden_size": 32,
            "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
            "bos_token_id": 1, "eos_token_id": 2, **overrides}
  return {k: v for k, v in config.items() if v is not None}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
  """Return the shape of every tensor by its Hugging Face name."""
  kind, bias = KINDS[config["architectures"][0]], config.get("attention_bias", False)
  qkv_bias, o_bias, qk_norm = (bias if x is None else x for x in kind)
  E, F, V, H = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "num_attention_heads"))
  KV, D = config.get("num_key_value_heads") or H, config.get("head_dim") or E // H
  shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, E)}
  linears = [(f"self_attn.{n}_proj", rows, E, qkv_bias) for n, rows in (("q", H * D), ("k", KV * D), ("v", KV * D))]
  linears += [("self_attn.o_proj", E, H * D, o_bias)]
  mlp_bias = config.get("mlp_bias", False)
  linears += [(f"mlp.{n}_proj", *s, mlp_bias) for n, s in (("gate", (F, E)), ("up", (F, E)), ("down", (E, F)))]
  norms = {"input_layernorm": E, "post_attention_layernorm": E}
  if qk_norm: norms |= {"self_attn.q_norm": D, "self_attn.k_norm": D}
  for layer in [f"model.layers.{i}" for i in range(config["num_hidden_layers"])]:
    for name, rows, columns, has_bias in linears:
      shapes[f"{layer}.{name}.weight"] = (rows, columns)
      if has_bias: shapes[f"{layer}.{name}.bias"] = (rows,)
    shapes |= {f"{layer}.{name}.weight": (size,) for name, size in norms.items()}
  shapes["model.norm.weight"] = (E,)
  if not config.get("tie_word_embeddings"): shapes["lm_head.weight"] = (V, E)
  return shapes


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
  """Return weights whose logits have a standard deviation of about 2 and depend on all tokens, so that greedy output
  varies."""
  rng, weights = np.random.default_rng(seed), {}
  for name, shape in tensor_shapes(config).items():
    x = rng.standard_normal(shape)
    if name.endswith("norm.weight"): x = 1 + 0.1 * x
    elif name.endswith(".bias"): x = 0.2 * x
    elif name.startswith(("lm_head", "model.embed_tokens")): x = 2 * x / math.sqrt(shape[1])
    else: x = 1.5 * x / math.sqrt(shape[1])
    weights[name] = x.astype(np.float32)
  return weights


def to_bytes(x: np.ndarray, dtype: str) -> bytes:
  if dtype == "bfloat16": return ((x.astype(np.float32).view(np.uint32) + 0x8000) >> 16).astype(np.uint16).tobytes()
  return x.astype(dtype).tobytes()


def write_safetensors(path: Path, weights: dict[str, np.ndarray], dtype: str = "float32") -> None:
  """Write a safetensors file without the library: length of the header, header, data."""
  header, start = {}, 0
  parts = {name: to_bytes(x, dtype) for name, x in weights.items()}
  for name, part in parts.items():
    offsets = [start, start := start + len(part)]
    header[name] = {"dtype": DTYPES.get(dtype, "I32"), "shape": list(weights[name].shape), "data_offsets": offsets}
  text, data = json.dumps(header).encode(), b"".join(parts.values())
  text += b" " * (-len(text) % 8)
  path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tiny_model(folder: Path, seed: int = 0, tokenizer: bool = True, shards: int = 1, dtype: str = "float32",
               words: bool = False, chat_template: str = "", weights: dict[str, np.ndarray] | None = None,
               **config_overrides: Any) -> Path:
  """Write a tiny random model into `folder` in Hugging Face's layout: config.json, safetensors (with an index if
  shards > 1), tokenizer.model. words: greedy output contains only letters, no byte or special tokens. chat_template: of
  tokenizer_config.json. weights: instead of random ones. config_overrides: keys of config.json; None removes a key."""
  folder = Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  config = tiny_config(**config_overrides)
  (folder / "config.json").write_text(json.dumps(config))
  weights = weights or random_weights(config, seed)
  if words: weights["lm_head.weight"][:259] = 0
  if shards == 1: write_safetensors(folder / "model.safetensors", weights, dtype)
  else:
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    file_of = {name: files[i * shards // len(weights)] for i, name in enumerate(weights)}
    for file in files: write_safetensors(folder / file, {n: weights[n] for n in weights if file_of[n] == file}, dtype)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
  if tokenizer: (folder / "tokenizer.model").write_bytes(sentencepiece_model())
  if chat_template: (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": chat_template}))
  return folder


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
  """Return a file's tensors by name, sorted, bfloat16 in float32."""
  out = {}
  for name, entry in sorted(deserialize(path.read_bytes())):
    x = np.frombuffer(entry["data"], NUMPY[entry["dtype"]])
    if entry["dtype"] == "BF16": x = (x.astype(np.uint32) << 16).view(np.float32)
    out[name] = x.reshape(entry["shape"])
  return out


@functools.lru_cache(maxsize=8)
def _load(folder: Path, stamp: tuple) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  weights: dict[str, np.ndarray] = {}
  for path in sorted(folder.glob("*.safetensors")): weights |= read_safetensors(path)
  weights = {name: x.astype(np.float64) for name, x in weights.items()}
  return json.loads((folder / "config.json").read_text()), weights


def load(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
  """Return config.json and the weights in float64. Cached until a file changes."""
  files = sorted([*Path(folder).glob("*.safetensors"), Path(folder) / "config.json"])
  return _load(Path(folder), tuple((f.name, f.stat().st_mtime_ns, f.stat().st_size) for f in files))
