"""Model files: safetensors, whole or sharded, and GGUF, read one tensor at a time and checked against the shapes that
the config promises. q, k, v and gate, up are joined, and matrices tiled as `Linear` keeps them, on the way."""
import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import dtypes, nn
from tinygrad.dtype import DType
from tinygrad.helpers import tqdm
from tinygrad.llm.gguf import gguf_load
from tinygrad.tensor import Tensor

from .config import ModelConfig, check
from .linear import features, pack
from .llama import Llama

Reader = dict[str, Callable[[], np.ndarray]]   # a tensor's name in Hugging Face's files, and how to read it
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
              "blk": "model.layers", "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj",
              "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
              "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
              "ffn_down": "mlp.down_proj"}
GGUF_KEYS = {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
             "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
             "attention.head_count_kv": "num_key_value_heads",
             "attention.key_length": "head_dim", "context_length": "max_position_embeddings",
             "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}


def read_hf(folder: Path) -> tuple[dict[str, Any], Reader]:
  """The content of config.json, with generation_config.json's end tokens, and the tensors of model.safetensors or of
  the shards that model.safetensors.index.json names."""
  config, index = json.loads((folder / "config.json").read_text()), folder / "model.safetensors.index.json"
  if (path := folder / "generation_config.json").exists():
    config["eos_token_id"] = json.loads(path.read_text()).get("eos_token_id", config.get("eos_token_id"))
  files = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else ["model.safetensors"]
  reader: Reader = {}
  for path in (folder / name for name in files):
    try: header = safe_open(path, "np")
    except (OSError, SafetensorError) as e: raise ValueError(f"{path} is missing, damaged or cut short: {e}") from e
    with path.open("rb") as file: offset = 8 + int.from_bytes(file.read(8), "little")
    for name in header.offset_keys():   # in this order they lie without gaps; read, as mapped pages would count as ours
      part = header.get_slice(name)
      kind = part.get_dtype()
      check(kind in DTYPES, f"{path}: tensor {name} is {kind}; supported: {', '.join(DTYPES)}")
      reader[name] = partial(_read, path, DTYPES[kind], part.get_shape(), offset)
      offset += math.prod(part.get_shape()) * np.dtype(DTYPES[kind]).itemsize
  return config, reader


def _read(path: Path, dtype: type, shape: list[int], offset: int) -> np.ndarray:
  data: np.ndarray = np.fromfile(path, dtype, math.prod(shape), offset=offset).reshape(shape)
  return (data.astype(np.uint32) << 16).view(np.float32) if dtype is np.uint16 else data   # bf16: f32's upper half


def read_gguf(path: Path) -> tuple[dict[str, Any], Reader, dict[str, Any]]:
  """A GGUF file of the llama architecture: its config and tensors, dequantized, as Hugging Face's, and its metadata."""
  try: kv, tensors = gguf_load(path)
  except Exception as e: raise ValueError(f"{path} is not a readable GGUF file: {e}") from e   # fails in many ways
  arch = kv["general.architecture"]
  check(arch == "llama", f"{path}: GGUF architecture {arch} is not supported; supported: llama")
  config = {name: kv[f"{arch}.{key}"] for key, name in GGUF_KEYS.items() if f"{arch}.{key}" in kv}
  config |= {"architectures": ["LlamaForCausalLM"],
             "vocab_size": len(kv["tokenizer.ggml.tokens"]), "tie_word_embeddings": "output.weight" not in tensors,
             "eos_token_id": [kv[k] for n in ("eos", "eot") if (k := f"tokenizer.ggml.{n}_token_id") in kv],
             "rope_scaling": {"rope_type": kv.get(f"{arch}.rope.scaling.type", "default").replace("none", "default"),
                              "factor": kv.get(f"{arch}.rope.scaling.factor")}}
  if "rope_freqs.weight" in tensors:   # llama3's scaling, worked out by the converter
    config["rope_scaling"] = {"rope_type": "factors", "factors": tensors.pop("rope_freqs.weight").tolist()}

  def read(tensor: Tensor, heads: int | None) -> np.ndarray:
    data = tensor.numpy()   # q and k rows lie in RoPE's pairs of neighbours: put them back into halves
    return data.reshape(heads, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape) if heads else data
  heads = {"attn_q": (n := config["num_attention_heads"]), "attn_k": config.get("num_key_value_heads", n)}
  reader: Reader = {}
  for name, tensor in tensors.items():
    parts = name.split(".")
    reader[".".join(GGUF_NAMES.get(part, part) for part in parts)] = partial(read, tensor, heads.get(parts[-2]))
  return config, reader, kv


def load_weights(model: Llama, config: ModelConfig, reader: Reader, source: Path, dtype: DType) -> None:
  """Fill the model's tensors. Raises ValueError naming the file and the tensor that is missing, surplus or
  misshapen."""
  targets = nn.state.get_state_dict(model)
  kv_rows, D, tied = config.num_key_value_heads * config.head_dim, config.head_dim, config.tie_word_embeddings
  rows = {"q_proj": config.num_attention_heads * D, "k_proj": kv_rows, "v_proj": kv_rows,
          "gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
  for target, tensor in tqdm(targets.items(), desc="loading weights", unit=" tensors", disable=None):
    name = target if target == "lm_head.weight" else f"model.{target}"
    if tied and target == "lm_head.weight": name = "model.embed_tokens.weight"
    stack = next((s for s in STACKED if s in name), "")
    names = [name.replace(stack, part) for part in STACKED.get(stack, [stack])]
    for n in names: check(n in reader, f"{source}: tensor {n} is missing")
    arrays = [reader.pop(n)() for n in names]
    shape = features(tensor.shape) if tensor.ndim > 2 else tensor.shape   # a Linear's is stored in an order of its own
    for n, array in zip(names, arrays, strict=True):
      found, expected = list(array.shape), [rows.get(n.split(".")[-2], shape[0]), *shape[1:]]
      check(found == expected, f"{source}: tensor {n} has shape {found}; its config says {expected}")
    array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    if tensor.ndim > 2: array = np.ascontiguousarray(pack(array, tensor.shape))
    if dtype == dtypes.float32: array = array.astype(np.float32)   # here, or the device keeps a buffer of either kind
    tensor.replace(Tensor(array).cast(dtype).contiguous().realize())
  for n in reader:
    derived = n.endswith("rotary_emb.inv_freq") or (tied and n == "lm_head.weight")
    check(derived, f"{source}: tensor {n} has no place in the model that its config describes")
