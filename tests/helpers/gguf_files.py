"""GGUF files as llama.cpp's converter writes them."""
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import sentencepiece
from safetensors import safe_open

from .models import load
from .reference import rope_frequencies


def ggml_blocks(x: np.ndarray, kind: Any) -> np.ndarray:
  """Quantize a matrix to a GGUF type. gguf cannot quantize to IQ4_NL and to types with super-blocks of 256: for them,
  return random blocks with scales of a typical size, independent of x."""
  d_at = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0],
          "IQ4_XS": [0]}   # byte offsets of d and dmin in a block
  if kind.name not in d_at: return gguf.quants.quantize(np.ascontiguousarray(x, np.float32), kind)
  rng = np.random.default_rng(x.size)
  block, size = gguf.GGML_QUANT_SIZES[kind]
  out = rng.integers(0, 256, (x.shape[0], x.shape[1] // block, size), dtype=np.uint8)
  for at in d_at[kind.name]:
    d = rng.uniform(1e-5, 1e-3, out.shape[:2]).astype(np.float16)
    out[:, :, at:at + 2] = d[..., None].view(np.uint8)
  return out.reshape(len(x), -1)


def write_gguf(path: Path, folder: Path, kind: str = "F32", tokens: list[str] | None = None,
               merges: list[str] | None = None, specials: Iterable[str] = (), template: Any = None,
               tokenizer: str = "gpt2", kinds: dict[str, str] | None = None, pre: str = "gpt-2",
               architecture: str | None = None, tensors_per_file: int = 0, add_eos: bool = False) -> Path:
  """Write the model in `folder` as llama.cpp's converter does: LLaMA's q and k rows interleaved, norms and biases in
  float32. kind: GGUF type of the matrices; kinds: exceptions by name. tokenizer: gpt2, built from tokens and merges, or
  llama, the folder's tokenizer.model. tensors_per_file: limit, above which gguf splits the file. Return the first
  file."""
  config, weights = load(folder)
  tokens = tokens or ["a", "b", "ab", *(f"t{i}" for i in range(config["vocab_size"] - 3))]
  arch = {"Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}.get(config["architectures"][0], "llama")
  writer = gguf.GGUFWriter(path, architecture or arch, split_max_tensors=tensors_per_file)
  writer.add_block_count(config["num_hidden_layers"])
  writer.add_context_length(config["max_position_embeddings"])
  writer.add_embedding_length(config["hidden_size"])
  writer.add_feed_forward_length(config["intermediate_size"])
  writer.add_head_count(config["num_attention_heads"])
  if config.get("num_key_value_heads"): writer.add_head_count_kv(config["num_key_value_heads"])
  if config.get("head_dim"): writer.add_key_length(config["head_dim"])
  writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
  writer.add_rope_freq_base(config["rope_theta"])
  scaling = config.get("rope_scaling") or {}
  if scaling.get("rope_type") == "llama3":   # the converter writes each frequency's factor instead of a type
    D = config["hidden_size"] // config["num_attention_heads"]
    plain = rope_frequencies({**config, "rope_scaling": None}, D)
    writer.add_tensor("rope_freqs.weight", (plain / rope_frequencies(config, D)).astype(np.float32))
  elif scaling:
    writer.add_rope_scaling_type(gguf.RopeScalingType(scaling["rope_type"]))
    writer.add_rope_scaling_factor(scaling["factor"])
  writer.add_tokenizer_model(tokenizer)
  if tokenizer == "llama":
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    ids = range(model.GetPieceSize())
    writer.add_token_list([model.IdToPiece(i) for i in ids])
    writer.add_token_scores([model.GetScore(i) for i in ids])
    kind_of = [(model.IsUnknown, 2), (model.IsControl, 3), (model.IsUnused, 5), (model.IsByte, 6), (lambda _: True, 1)]
    writer.add_token_types([next(number for test, number in kind_of if test(i)) for i in ids])
  else:
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in specials else 1 for t in tokens])
    writer.add_token_merges(merges or ["a b"])
  if template: writer.add_chat_template(template)
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  if add_eos: writer.add_add_eos_token(True)
  names: dict[str, str] = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
  parts = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
           "self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
           "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
           "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
  layers = range(config["num_hidden_layers"])
  names |= {f"model.layers.{i}.{k}": f"blk.{i}.{v}" for i in layers for k, v in parts.items()}
  H = config["num_attention_heads"]
  heads = {"attn_q": H, "attn_k": config.get("num_key_value_heads") or H} if arch == "llama" else {}
  for name, x in weights.items():
    module, _, suffix = name.rpartition(".")
    name = names[module]
    part = name.split(".")[-1]
    if n := heads.get(part): x = x.reshape(n, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    dtype = gguf.GGMLQuantizationType["F32" if x.ndim == 1 else (kinds or {}).get(part, kind)]
    data = x.astype(np.float32) if x.ndim == 1 else ggml_blocks(x, dtype)
    writer.add_tensor(f"{name}.{suffix}", data, raw_dtype=dtype)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return writer.format_shard_names(path)[0]


HEADS = {"attn_q": 4, "attn_k": 2}


def tensors_of(folder):
  with safe_open(folder / "model.safetensors", "np") as file: return {x: file.get_tensor(x) for x in file.offset_keys()}


def values(tensors, module):
  """Return a module's dequantized weight."""
  if f"{module}.weight_packed" in tensors:
    rows, columns = tensors[f"{module}.weight_shape"]
    words = tensors[f"{module}.weight_packed"].view(np.uint32)
    q = np.array([[word >> 4 * i & 15 for word in row for i in range(8)] for row in words.tolist()], np.float32)
    assert q.shape == (rows, columns)
    if f"{module}.weight_offset" not in tensors: q -= 8
  else:
    q = tensors[f"{module}.weight"]
    if f"{module}.weight_scale" not in tensors: return q.astype(np.float32)
    assert q.dtype == np.int8
  scale = tensors[f"{module}.weight_scale"]
  offset = tensors.get(f"{module}.weight_offset", np.zeros_like(scale))
  scale, offset = (x.astype(np.float32).repeat(q.shape[1] // x.shape[1], 1) for x in (scale, offset))
  return q * scale + offset


def decoded(path):
  """Return the tensors of one or more files by Hugging Face's names, dequantized by gguf."""
  names = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
  parts = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
           "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
           "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
           "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
  readers = [gguf.GGUFReader(x) for x in sorted(path.parent.glob(path.name.replace("-00001-of-", "-*-of-")))]
  llama = readers[0].fields["general.architecture"].contents() == "llama"
  tensors = {}
  for tensor in (x for reader in readers for x in reader.tensors):
    first, *rest = tensor.name.split(".")
    module = f"model.layers.{rest[0]}.{parts[rest[1]]}" if first == "blk" else names[first]
    x = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if llama and (heads := HEADS.get(rest[1] if first == "blk" else "")):
      x = x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
    tensors[f"{module}.{rest[-1]}"] = x
  return tensors


def check_conversion(folder, path):
  """Check that the folder has all tensors of the file, with the values that gguf decodes, and no others."""
  tensors = tensors_of(folder)
  checked = set()
  for name, expected in decoded(path).items():
    module, _, suffix = name.rpartition(".")
    np.testing.assert_array_equal(tensors[name] if suffix == "bias" else values(tensors, module), expected, name)
    checked |= {name for name in tensors if name.startswith(f"{module}.")}
  assert checked == tensors.keys()
