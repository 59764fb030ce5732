"""Weights from files into a Llama, one tensor at a time: safetensors, whole or sharded, and GGUF. Each is checked against the shape that config.json
promises; q, k, v and gate, up are joined, and matrices tiled as `Linear` keeps them, on the way."""
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Tensor, nn
from tinygrad.dtype import DType
from tinygrad.helpers import tqdm

from .llama import Linear, Llama

Named = Iterator[tuple[Path, str, np.ndarray]]
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "blk": "model.layers",
              "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
              "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
              "ffn_down": "mlp.down_proj"}


def read_safetensors(folder: Path) -> Named:
  """Every tensor of model.safetensors, or of the shards that model.safetensors.index.json names, read in the file's order."""
  index = folder / "model.safetensors.index.json"
  names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
  for path in (folder / name for name in names):
    if not path.exists(): raise ValueError(f"{path} is missing")
    try: header = safe_open(path, "np")
    except SafetensorError as e: raise ValueError(f"{path} is damaged or cut short: {e}") from e
    with path.open("rb") as file:   # tensors lie without gaps; read, not mapped: mapped pages would count as the process's memory
      file.seek(8 + int.from_bytes(file.read(8), "little"))
      for name in header.offset_keys():
        kind, shape = header.get_slice(name).get_dtype(), header.get_slice(name).get_shape()
        if kind not in ("F32", "F16", "BF16"): raise ValueError(f"{path}: {name} has dtype {kind}; supported: F32, F16, BF16")
        data = np.fromfile(file, {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[kind], math.prod(shape)).reshape(shape)
        yield path, name, (data.astype(np.uint32) << 16).view(np.float32) if kind == "BF16" else data   # bfloat16 is float32's upper half


def read_gguf(path: Path, tensors: dict[str, Tensor], heads: dict[str, int]) -> Named:
  """Every tensor of a GGUF file under Hugging Face's names, dequantized. Its q and k rows, which pair neighbours for RoPE, are put back into halves.
  heads: the heads of "attn_q" and "attn_k"."""
  for name in list(tensors):
    data, parts = tensors.pop(name).numpy(), name.split(".")
    if n := heads.get(parts[-2]): data = data.reshape(n, -1, 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
    if name != "rope_freqs.weight": yield path, ".".join(GGUF_NAMES.get(part, part) for part in parts), data


def load_weights(model: Llama, tied: bool, tensors: Named, dtype: DType) -> None:
  """Fill the model's tensors. Raises ValueError naming the file and the tensor that is missing, surplus or of the wrong shape."""
  linears = {id(x.weight): x for layer in model.layers for x in (*vars(layer.self_attn).values(), *vars(layer.mlp).values()) if isinstance(x, Linear)}
  linears[id(model.lm_head.weight)] = model.lm_head
  targets, source, path = nn.state.get_state_dict(model), {}, None
  for target in targets:
    name = target if target.startswith("lm_head") else f"model.{target}"
    if tied and target == "lm_head.weight": name = "model.embed_tokens.weight"
    stack = next((s for s in STACKED if s in name), None)
    for part in STACKED[stack] if stack else ("",): source[name.replace(stack or "\0", part)] = target
  parts: dict[str, dict[str, np.ndarray]] = {}
  progress = tqdm(desc="loading weights", total=len(source), unit=" tensors", disable=None)
  for path, name, data in tensors:
    if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"): continue   # derived, or the embedding again
    if name not in source: raise ValueError(f"{path}: tensor {name} has no place in the model that its config describes")
    target = source.pop(name)
    parts.setdefault(target, {})[name] = data
    progress.update(1)
    if target in source.values(): continue   # wait for the others that are stored with it
    names = sorted(parts[target], key=lambda n: [p in n for s in STACKED.values() for p in s], reverse=True)
    array = np.concatenate([parts[target][n] for n in names]) if len(names) > 1 else parts[target][names[0]]
    tensor, linear = targets[target], linears.get(id(targets[target]))
    shape = (linear.out_features, linear.weight.shape[1]) if linear else tensor.shape
    if array.shape != shape or any(parts[target][n].shape[1:] != shape[1:] for n in names):
      raise ValueError(f"{path}: tensor {' + '.join(names)} has shape {list(array.shape)}; the config says {list(shape)}")
    if linear: array = np.ascontiguousarray(array.reshape(-1, linear.tile, shape[1]).swapaxes(1, 2))
    tensor.replace(Tensor(array).cast(dtype).contiguous().realize())
    del parts[target], array, data
  progress.update(close=True)
  if source: raise ValueError(f"{path}: tensor {next(iter(source))} is missing" + (f" and {len(source) - 1} more" if len(source) > 1 else ""))
