"""Model files: safetensors, whole or sharded, and GGUF, read one tensor at a time and checked against the shapes that
the config promises. q, k, v and gate, up are joined, and matrices tiled as `Linear` keeps them, on the way."""
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Tensor, dtypes, helpers, nn
from tinygrad.dtype import DType
from tinygrad.llm.gguf import gguf_load

from .config import ModelConfig, check, read_json
from .llama import Llama, features, pack

Reader = dict[str, partial[np.ndarray]]   # a tensor's name in Hugging Face's files, and how to read it
NORMS = {"qkv_proj": "input_layernorm", "gate_up_proj": "post_attention_layernorm"}   # whose weights are in these
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
              "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
              "blk": "model.layers", **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
              **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}}
GGUF_KEYS = {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
             "block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
             "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
             "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
             "rope.freq_base": "rope_theta"}


def read_hf(folder: Path) -> tuple[dict[str, Any], Reader, dict[str, Any]]:
  """The content of config.json, with generation_config.json's end tokens, and the tensors of model.safetensors or of
  the shards that model.safetensors.index.json names."""
  config, index = read_json(folder / "config.json"), read_json(folder / "model.safetensors.index.json")
  config["eos_token_id"] = (config | read_json(folder / "generation_config.json")).get("eos_token_id")
  reader: Reader = {}
  for path in {folder / name for name in index.get("weight_map", {"": "model.safetensors"}).values()}:
    try: safe_open(path, "np")   # it checks the file, but cannot read bfloat16
    except (OSError, SafetensorError) as e: raise ValueError(f"{path} is missing, damaged or cut short: {e}") from e
    with path.open("rb") as file: header = json.loads(file.read(size := int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    for name, entry in header.items():   # each is mapped by itself: the pages of a whole file would count as ours
      kind, shape, offset = entry["dtype"], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
      check(kind in DTYPES, f"{path}: tensor {name} is {kind}; supported: {', '.join(DTYPES)}")
      reader[name] = partial(np.memmap, path, DTYPES[kind], "c", offset, shape)
  return config, reader, config


def read_gguf(path: Path) -> tuple[dict[str, Any], Reader, dict[str, Any]]:
  """A GGUF file of the llama architecture: its config and tensors, dequantized, as Hugging Face's, and its metadata."""
  try: kv, tensors = gguf_load(path)
  except Exception as e: raise ValueError(f"{path} is not a readable GGUF file: {e}") from e   # fails in many ways
  arch = kv["general.architecture"]
  check(arch == "llama", f"{path}: GGUF architecture {arch} is not supported; supported: llama")
  config = {name: kv.get(f"llama.{key}") for key, name in GGUF_KEYS.items()} | {
    "architectures": ["LlamaForCausalLM"], "vocab_size": len(kv["tokenizer.ggml.tokens"]),
    "tie_word_embeddings": "output.weight" not in tensors,
    "eos_token_id": [kv[k] for n in ("eos", "eot") if (k := f"tokenizer.ggml.{n}_token_id") in kv],
    "rope_scaling": {"rope_type": kv.get("llama.rope.scaling.type", "none").replace("none", "default"),
                     "factor": kv.get("llama.rope.scaling.factor")}}
  if "rope_freqs.weight" in tensors:   # llama3's scaling, worked out by the converter
    config["rope_scaling"] = {"rope_type": "factors", "factors": tensors.pop("rope_freqs.weight").tolist()}
  heads = {"attn_q": (n := config["num_attention_heads"]), "attn_k": config["num_key_value_heads"] or n}
  reader: Reader = {}
  for name, tensor in tensors.items():
    parts = name.split(".")
    if n := heads.get(parts[-2]):   # rows of q and k lie in RoPE's pairs of neighbours: put them back into halves
      tensor = tensor.reshape(n, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    reader[".".join(GGUF_NAMES.get(part, part) for part in parts)] = partial(tensor.numpy)
  return config, reader, kv


def load_weights(model: Llama, config: ModelConfig, reader: Reader, source: Path, dtype: DType) -> None:
  """Fill the model's tensors. Raises ValueError naming the file and the tensor that is missing, surplus or
  misshapen."""
  def take(name: str, *shape: int) -> np.ndarray:
    check(name in reader, f"{source}: tensor {name} is missing")
    array = reader.pop(name)()
    check(array.shape == shape, f"{source}: tensor {name} has shape {list(array.shape)}; its config says {list(shape)}")
    # bfloat16 is the upper half of float32
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array

  q, kv = config.num_attention_heads, config.num_key_value_heads
  parts = {"qkv_proj": {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv},   # and shares of the rows
           "gate_up_proj": {"mlp.gate_proj": 1, "mlp.up_proj": 1}, "down_proj": {"mlp.down_proj": 1},
           "lm_head": {"model.embed_tokens" if config.tie_word_embeddings else "lm_head": 1},
           **{kind: {f"self_attn.{kind}": 1} for kind in ("o_proj", "q_norm", "k_norm")}}
  targets = nn.state.get_state_dict(model)
  for target, tensor in helpers.tqdm(targets.items(), desc="loading weights", unit=" tensors", disable=None):
    *path, kind, what = target.split(".")
    prefix, shares = "" if kind == "lm_head" else ".".join(["model", *path, ""]), parts.get(kind, {kind: 1})
    rows, *columns = features(tensor.shape) if tensor.ndim > 2 else tensor.shape   # a Linear's has an order of its own
    arrays = [take(f"{prefix}{part}.{what}", rows * n // sum(shares.values()), *columns) for part, n in shares.items()]
    array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    if kind in NORMS and columns: array = array * take(f"{prefix}{NORMS[kind]}.weight", *columns)
    if tensor.ndim > 2: array = pack(array, tensor.shape)
    # Cast here, or the device keeps a buffer of either kind
    array = np.ascontiguousarray(array, np.float32 if dtype == dtypes.float32 else None)
    tensor.replace(Tensor(array).cast(dtype).contiguous().realize())
  surplus = [n for n in reader if n != "lm_head.weight" and not n.endswith("rotary_emb.inv_freq")]   # but derived ones
  check(not surplus, f"{source}: tensor {' '.join(surplus[:1])} has no place in the model that its config describes")
