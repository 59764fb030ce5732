"""GGUF files as llama.cpp's converter writes them, and their tensors."""
import functools
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tinyvllm_extra.formats.hub import open_checkpoint
from tinyvllm_extra.formats.quantization import dequantize

from .data import read_data
from .models import load
from .reference import rope_frequencies

# Fields of config.json, and the names of GGUFWriter's methods that add them
FIELDS = read_data("gguf_fields.json")
PERMUTED = ("llama", "granite", "mistral3", "smollm3")   # the rows of q and k that RoPE rotates are neighbors
SCALES = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0],
          "IQ4_XS": [0], "IQ3_S": [0], "TQ1_0": [52]}   # byte offsets of d and dmin in a block


def ggml_blocks(x: np.ndarray, kind: Any) -> np.ndarray:
  """Quantize a matrix to a GGUF type. gguf cannot quantize to IQ4_NL and to types with super-blocks of 256: for them,
  return random blocks with scales of a typical size, independent of x."""
  if kind.name not in SCALES: return gguf.quants.quantize(np.ascontiguousarray(x, np.float32), kind)
  rng = np.random.default_rng(x.size)
  block, size = gguf.GGML_QUANT_SIZES[kind]
  out = rng.integers(0, 256, (x.shape[0], x.shape[1] // block, size), dtype=np.uint8)
  for at in SCALES[kind.name]:
    d = rng.uniform(1e-5, 1e-3, out.shape[:2]).astype(np.float16)
    out[:, :, at:at + 2] = d[..., None].view(np.uint8)
  return out.reshape(len(x), -1)


@functools.cache
def gguf_names(arch: str) -> Any:
  """Return gguf's map from Hugging Face's names, of up to 4 layers."""
  return gguf.get_tensor_name_map({name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}[arch], 4)


def gguf_name(arch: str, name: str) -> str: return gguf_names(arch).get_name(name, (".weight", ".bias"))


def swap_rows(x: np.ndarray, heads: int, *sizes: int) -> np.ndarray:
  """Interleave the two halves of each head's rows with sizes 2, -1. Undo it with -1, 2."""
  return x.reshape(heads, *sizes, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def qwen35_tensor(config: dict[str, Any], name: str, x: np.ndarray) -> tuple[str, np.ndarray]:
  """Return a tensor and its name as the converter changes them. Heads of V with the same K are not consecutive."""
  keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
  first = 2 * keys * config["linear_key_head_dim"] if "qkv" in name or "conv1d" in name else 0   # rows of q and k
  if "norm" in name: x = x + (".linear_attn." not in name)
  elif "out_proj" in name: x = swap_rows(x.T, 1, keys, heads // keys, -1).T
  elif ".linear_attn." in name: x = np.concatenate([x[:first], swap_rows(x[first:], 1, keys, heads // keys, -1)])
  return name.replace("dt_bias", "dt_proj.bias"), -np.exp(x) if name.endswith("A_log") else x


def write_gguf(path: Path, folder: Path, kind: str = "F32", tokens: list[str] | None = None,
               merges: list[str] | None = None, specials: Iterable[str] = (), template: Any = None,
               tokenizer: str = "gpt2", kinds: dict[str, str] | None = None, tensors_per_file: int = 0,
               small_first_shard: bool = False, metadata: dict[str, Any] | None = None,
               tensors: dict[str, np.ndarray | None] | None = None) -> Path:
  """Write the model in `folder`, norms and biases in float32. kind: GGUF type of the matrices; kinds: exceptions by
  name. tokenizer: gpt2, built from tokens and merges, or llama, the folder's tokenizer.model. tensors_per_file: limit,
  above which gguf splits the file. metadata, tensors: instead of the model's; None leaves a tensor out. Return the
  first file."""
  config, weights = load(folder)
  arch = config["architectures"][0].split("For")[0].lower()
  arch = {"mistral": "llama", "olmo3": "olmo2", "ministral3": "mistral3", "qwen3_5": "qwen35"}.get(arch, arch)
  config = config | config.get("text_config", {})
  heads = {"q_proj": config["num_attention_heads"]} if arch in PERMUTED else {}
  if heads: heads["k_proj"] = config.get("num_key_value_heads") or heads["q_proj"]
  own: dict[str, Any] = {}
  for name, x in weights.items():
    name = name.removeprefix("language_model.").replace("model.language_model.", "model.")
    if name.startswith(("vision", "multi", "model.visual")): continue
    if "gemma" in arch and name.endswith("norm.weight"): x = x + 1
    if arch == "qwen35": name, x = qwen35_tensor(config, name, x)
    if name.endswith(("conv.weight", "conv1d.weight")): x = x.squeeze(1)
    own[gguf_name(arch, name)] = swap_rows(x, heads[part], 2, -1) if (part := name.split(".")[-2]) in heads else x
  fields = {method: config.get(name) for name, method in FIELDS.items()}
  ropes = config.get("rope_parameters") or config.get("rope_scaling") or {}
  rope = {"rope_type": ropes.get("type"), **ropes.get("full_attention", ropes)}
  fields["rope_freq_base"] = rope.get("rope_theta") or config["rope_theta"]
  if arch == "gemma3": fields["rope_freq_base_swa"] = ropes["sliding_attention"]["rope_theta"]
  if rope["rope_type"] in ("linear", "yarn"):
    fields |= {"rope_scaling_type": gguf.RopeScalingType(rope["rope_type"]), "rope_scaling_factor": rope["factor"]}
  if rope["rope_type"] == "yarn":
    fields |= {"rope_scaling_orig_ctx_len": rope["original_max_position_embeddings"],
               "rope_scaling_attn_factors": 0.1 * math.log(rope["factor"]) + 1 if arch == "olmo2" else None,
               "rope_scaling_yarn_log_mul": rope.get("mscale_all_dim"),
               "attn_temperature_scale": rope.get("llama_4_scaling_beta")}
  if rope["rope_type"] == "llama3":   # the converter writes each frequency's factor instead of a type
    D = config["hidden_size"] // config["num_attention_heads"]
    plain = rope_frequencies({"rope_theta": fields["rope_freq_base"]}, D)
    own["rope_freqs.weight"] = plain / rope_frequencies(config, D)
  if arch == "phi3":
    length, original = config["max_position_embeddings"], config["original_max_position_embeddings"]
    fields |= {"rope_dimension_count": int(config["partial_rotary_factor"] * 16), "rope_scaling_orig_ctx_len": original,
               "sliding_window": config["sliding_window"] or 0}
    if "long_factor" in rope:
      fields["rope_scaling_attn_factors"] = math.sqrt(1 + math.log(length / original) / math.log(original))
      own |= {f"rope_factors_{x}.weight": np.array(rope[f"{x}_factor"]) for x in ("long", "short")}
  if arch in ("olmo2", "gemma3") and config.get("layer_types"):
    fields["sliding_window_pattern"] = [x == "sliding_attention" for x in config["layer_types"]]
  fields |= {"tokenizer_model": tokenizer, "bos_token_id": 1, "eos_token_id": 2, "chat_template": template}
  if tokenizer == "llama":
    texts, scores, types = map(list, zip(*gguf.vocab.SentencePieceVocab(folder).all_tokens(), strict=True))
    fields |= {"token_list": texts, "token_scores": scores, "token_types": types}
  else:
    tokens = tokens or ["a", "b", "ab", *(f"t{i}" for i in range(config["vocab_size"] - 3))]
    fields |= {"tokenizer_pre": "gpt-2", "token_list": tokens, "token_merges": merges or ["a b"],
               "token_types": [3 if t in specials else 1 for t in tokens]}
  writer = gguf.GGUFWriter(path, arch, split_max_tensors=tensors_per_file, small_first_shard=small_first_shard)
  for method, value in fields.items():
    if value is not None: getattr(writer, f"add_{method}")(value)
  for key, value in (metadata or {}).items():
    writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
  for name, x in (own | (tensors or {})).items():
    if x is None: continue
    dtype = gguf.GGMLQuantizationType["F32" if x.ndim == 1 else (kinds or {}).get(name.split(".")[-2], kind)]
    writer.add_tensor(name, x.astype(np.float32) if x.ndim == 1 else ggml_blocks(x, dtype), raw_dtype=dtype)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return writer.format_shard_names(path)[0]


def decoded(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
  """Return the tensors with Hugging Face's names, dequantized by gguf. The file, or its parts, must have no others."""
  readers = [gguf.GGUFReader(x) for x in sorted(path.parent.glob(path.name.replace("-00001-of-", "-*-of-")))]
  arch = readers[0].fields["general.architecture"].contents()
  tensors = {x.name: gguf.quants.dequantize(x.data, x.tensor_type) for reader in readers for x in reader.tensors}
  found = {name: tensors.pop(gguf_name(arch, name)) for name in names}
  assert not tensors
  heads = {"q_proj": 4, "k_proj": 2} if arch == "llama" else {}
  return {name: swap_rows(x, heads[part], -1, 2) if (part := name.split(".")[-2]) in heads else x
          for name, x in found.items()}


def read_matrices(path: Path) -> dict[str, Any]:
  """Return the matrices as a checkpoint reads them, with q, k and v, and gate and up, in one format. Check that all
  tensors have the values that gguf decodes."""
  checkpoint = open_checkpoint(path)
  checkpoint.tensors = checkpoint.stored_tensors()
  groups: dict[str, dict[str, tuple[int, ...]]] = {}
  for name, tensor in checkpoint.tensors.items():
    fused = re.sub("[qkv]_proj|(gate|up)_proj", lambda match: match[1] and "gate_up" or "qkv", name)
    if len(tensor.shape) == 2: groups.setdefault(fused, {})[name.removesuffix(".weight")] = tensor.shape
  expected = decoded(path, checkpoint.all_tensors)
  matrices = {name: w for shapes in groups.values()
              for name, w in zip(shapes, checkpoint.read_matrices(shapes), strict=True)}
  for name, x in [(f"{name}.weight", dequantize(w, np.float32)) for name, w in matrices.items()] + [
      (name, tensor.read_matrix(None)) for name, tensor in checkpoint.all_tensors.items()]:
    if x.dtype == np.uint16: x = (x.astype(np.uint32) << 16).view(np.float32)   # bfloat16
    np.testing.assert_array_equal(x, expected[name], name)
  return matrices
