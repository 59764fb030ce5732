"""LLaMA (Touvron et al. 2023) over a paged KV cache, and the checkpoint that its weights come from. One forward pass
serves prefill chunks, decode and draft tokens: a flat batch of T tokens, each with its position, block and slot.
Attributes are named after Hugging Face's weights, with q, k, v stored as one matrix and gate, up as one. Declares two
seams: Model and Checkpoint."""
import pathlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Tensor, dtypes, helpers, nn
from tinygrad.dtype import DType

from .backend import Backend, Devices, Module
from .config import ModelConfig, check, read_json
from .tokenizer import Tokenizer


class Checkpoint:
  """A model folder in Hugging Face's layout (seam for other formats: weights.py, gguf.py). Raises InputError with the
  name of a file or tensor that is missing, unexpected or of the wrong shape."""
  def __init__(self, path: pathlib.Path):
    self.path = path
    check(path.is_dir(), f"model='{path}' is not a folder (or, with tinyvllm_extra, a GGUF file or a name ORG/NAME)")
    self.hf_config = read_json(path / "config.json") | read_json(path / "generation_config.json")   # more end tokens

  def describe(self) -> str: return "safetensors"
  def tokenizer(self) -> Any: return Tokenizer(self.path)

  def load(self, model: "Llama") -> None:
    """Load the model's weights."""
    self.tensors: dict[str, Tensor] = {}
    index = read_json(self.path / "model.safetensors.index.json")
    for file in {self.path / name for name in index.get("weight_map", {"": "model.safetensors"}).values()}:
      try: safe_open(file, "np")   # validates the header
      except (OSError, SafetensorError) as e: check(False, f"model: {file} is missing, damaged or truncated: {e}")
      self.tensors |= nn.state.safe_load(file)
    for module in helpers.tqdm(model.modules(), desc="loading weights", disable=None): module.load(self)
    self.check_unused(self.tensors)

  def read(self, name: str, *shape: int) -> Tensor:
    """Return a tensor of the checkpoint. Raises InputError if it is missing or has another shape."""
    actual = list(self.tensors[name].shape) if name in self.tensors else "missing"
    check(actual == [*shape], f"model: {self.path}: tensor {name} is {actual}; its config says {[*shape]}")
    return self.tensors.pop(name)

  def check_unused(self, names: Iterable[str]) -> None:
    """Raise InputError for a tensor that no module has read, except tied and derived ones."""
    unused = [name for name in names if name != "lm_head.weight" and not name.endswith(".inv_freq")]
    check(not unused, f"model: {self.path}: tensor {''.join(unused[:1])} is not part of the model in config.json")


def rope_table(config: ModelConfig, length: int) -> Tensor:
  """Return cosines and sines of RoPE (Su et al. 2021) with scaled frequencies, (length, 2, D / 2)."""
  scaling = config.rope_scaling
  freqs = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)   # (D / 2,)
  if scaling["rope_type"] in ("linear", "factors"): freqs /= scaling["factors" if "factors" in scaling else "factor"]
  if scaling["rope_type"] == "llama3":   # divide low frequencies by factor, keep high ones, interpolate between
    rotations = scaling["original_max_position_embeddings"] * freqs / (2 * np.pi)
    freqs *= np.interp(rotations, [scaling["low_freq_factor"], scaling["high_freq_factor"]], [1 / scaling["factor"], 1])
  angles = np.outer(np.arange(length), freqs)                           # (length, D / 2)
  return Tensor(np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32))


class Layer:
  """A transformer block. It returns the residual stream as two terms, x and delta, which the next norm adds. has_kv:
  whether it has K and V in the cache."""
  has_kv = True

  def __init__(self, config: ModelConfig, index: int, dtype: DType, backend: Backend):
    self.config, self.backend = config, backend
    hidden = config.hidden_size
    q_size = config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    name = f"model.layers.{index}"
    def norm(source): return backend.Norm(f"{name}.{source}", hidden, config.rms_norm_eps, dtype)
    def linear(layer_type, in_features, bias, axis, **rows):
      return layer_type(in_features, {f"{name}.{x.replace('__', '.')}": n for x, n in rows.items()}, bias, dtype, axis)
    self.input_layernorm = norm("input_layernorm")
    self.qkv_proj = linear(backend.Linear, hidden, config.attention_bias, 0, self_attn__q_proj=q_size,
                           self_attn__k_proj=kv_size, self_attn__v_proj=kv_size)
    self.o_proj = linear(backend.Linear, q_size, config.attention_bias, 1, self_attn__o_proj=hidden)
    self.post_attention_layernorm = norm("post_attention_layernorm")
    self.gate_up_proj = linear(backend.GateUp, hidden, config.mlp_bias, 0, mlp__gate_proj=config.intermediate_size,
                               mlp__up_proj=config.intermediate_size)
    self.down_proj = linear(backend.Linear, config.intermediate_size, config.mlp_bias, 1, mlp__down_proj=hidden)

  def __call__(self, x: Tensor, delta: Tensor, cache: list[Tensor], ropes: list[Tensor], tokens: Tensor,
               block_tables: Tensor) -> tuple[Tensor, Tensor]:
    """x, delta: (T, hidden) each. With several devices, delta holds partial sums. Return the next x and delta."""
    x, h = self.input_layernorm.add(x, delta)                         # (T, hidden) each
    qkv = self.qkv_proj(h)                                              # (T, (H + 2 KV) * D)
    h = self.backend.attend(qkv, cache, ropes[0], tokens, block_tables, self.config.num_attention_heads)
    x, h = self.post_attention_layernorm.add(x, self.o_proj(h))
    return x, self.down_proj(self.gate_up_proj(h))


class Llama:
  """LLaMA, and the interface of any Model (seam; tinyvllm_extra/models): its methods and these attributes. config: one
  device's share of the model. dtype: dtype of activations; norms, sums and logits are float32. The backend's layers
  hide weight formats and kernels, `devices` hides their number. Layer: the class of its layers."""
  Layer: type[Any] = Layer

  def __init__(self, config: ModelConfig, dtype: DType, backend: Backend, devices: Devices):
    self.vocab_size = config.vocab_size
    self.config = config = devices.shard(config)
    self.dtype, self.backend, self.devices = dtype, backend, devices
    def vocabulary(name): return backend.Linear(config.hidden_size, {name: config.vocab_size}, False, dtype)
    self.embed_tokens = vocabulary("model.embed_tokens")
    self.lm_head = self.embed_tokens if config.tie_word_embeddings else vocabulary("lm_head")
    self.layers = [self.Layer(config, i, dtype, backend) for i in range(config.num_hidden_layers)]
    self.norm = backend.Norm("model.norm", config.hidden_size, config.rms_norm_eps, dtype)

  def modules(self) -> list[Module]:
    """Return every module with weights, each once."""
    values = [x for owner in (self, *self.layers) for x in vars(owner).values()]
    return [*dict.fromkeys(x for x in values if isinstance(x, Module))]

  def ropes(self, length: int) -> list[Tensor]:
    """Return RoPE's tables, (length, 2, D / 2) each. A layer picks one of them."""
    return [rope_table(self.config, length)]

  def embed(self, ids: Tensor, tokens: Tensor) -> Tensor:
    """Return the input of the first layer, (T, hidden). With several devices, it holds partial sums."""
    return self.embed_tokens.rows(ids, self.dtype)

  def __call__(self, ids: Tensor, rows: Tensor, tokens: Tensor, block_tables: Tensor, ropes: list[Tensor],
               caches: list[list[Tensor]]) -> Tensor:
    """Return float32 logits, (S, V), after the tokens `rows`, (S,) indices into the batch `ids`, (T,). Write K and V of
    all T tokens to `caches`, a list for each layer. tokens, block_tables: see Backend.attend. ropes: see ropes()."""
    ids, rows, tokens, block_tables = [t.to(self.devices.shards) for t in (ids, rows, tokens, block_tables)]
    delta = self.embed(ids, tokens)                                     # (T, hidden)
    x = Tensor.zeros(*delta.shape, dtype=self.dtype, device=delta.device).contiguous()
    x, delta = self.backend.run_layers(self.layers, x, delta, caches, ropes, tokens, block_tables)
    # Keep the rows that need logits. delta may hold the partial sums of several devices, (T, hidden) each
    x, delta = [t.reshape(-1, *ids.shape, t.shape[1])[:, rows].flatten(0, 1).contiguous() for t in (x, delta)]
    h = self.norm.add(x, delta)[1]                                      # (S, hidden)
    return self.devices.gather(self.lm_head(h, dtype=dtypes.float32))   # (S, V)
