"""A LLaMA (Touvron et al. 2023) over a paged KV cache. One forward serves prefill, chunks of a prefill and decode: a
flat batch of tokens, each with its position, slot and row. Attributes are named as in Hugging Face's files, with q, k,
v stored as one matrix and gate, up as one."""
import math

import numpy as np
from tinygrad import Tensor, dtypes, function
from tinygrad.dtype import DType

from .attention import attend_kernel, rope_kernel
from .config import ModelConfig
from .matmul import Linear, Norm


def rope_table(config: ModelConfig, length: int) -> Tensor:
  """Cosines and sines of rotary positions (Su et al. 2021), (length, 2, head_dim / 2), their frequencies scaled."""
  scaling = config.rope_scaling
  freqs = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)   # (D/2,)
  if scaling["rope_type"] == "linear": freqs /= scaling["factor"]
  if scaling["rope_type"] == "factors": freqs /= scaling["factors"]
  if scaling["rope_type"] == "llama3":   # long waves are stretched by factor, short ones left alone, others between
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * freqs / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    freqs = freqs * (kept + (1 - kept) / scaling["factor"])
  angles = np.outer(np.arange(length), freqs)   # (length, D/2)
  return Tensor(np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)).realize()


class Layer:
  def __init__(self, config: ModelConfig, name: str, dtype: DType):
    self.shape = H, KV, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
    def norm(kind: str, size: int) -> Norm: return Norm(f"{name}.{kind}", size, config.rms_norm_eps, dtype)
    def linear(inputs: int, bias: bool, **sources: int) -> Linear:
      module = "self_attn" if "o_proj" in sources or "q_proj" in sources else "mlp"
      return Linear(inputs, {f"{name}.{module}.{kind}": rows for kind, rows in sources.items()}, bias, dtype)
    self.input_layernorm = norm("input_layernorm", hidden)
    self.qkv_proj = linear(hidden, config.qkv_bias, q_proj=H * D, k_proj=KV * D, v_proj=KV * D)
    self.o_proj = linear(H * D, config.o_bias, o_proj=hidden)
    self.post_attention_layernorm = norm("post_attention_layernorm", hidden)
    self.gate_up_proj = linear(hidden, bias, gate_proj=intermediate, up_proj=intermediate)
    self.down_proj = linear(intermediate, bias, down_proj=hidden)
    if config.qk_norm: self.q_norm, self.k_norm = norm("self_attn.q_norm", D), norm("self_attn.k_norm", D)

  def __call__(self, x: Tensor, cache: list[Tensor], tokens: Tensor, table: Tensor, rope: Tensor) -> Tensor:
    T, (H, KV, D) = x.shape[0], self.shape
    qkv = self.qkv_proj(self.input_layernorm(x))   # (T, (H + 2 KV) * D)
    if hasattr(self, "q_norm"):
      q, k, v = qkv.reshape(T, H + 2 * KV, D).split([H, KV, KV], dim=1)
      qkv = self.q_norm(q).cat(self.k_norm(k), v, dim=1).flatten(1).contiguous()
    q, out = [Tensor.empty(T, KV, H // KV, D, dtype=x.dtype, device=x.device) for _ in range(2)]
    q, *cache = q.custom_kernel(*cache, qkv, rope, tokens, fxn=rope_kernel)[:3]
    out = out.custom_kernel(q, *cache, table, tokens, fxn=attend_kernel)[0]   # (T, KV, G, D)
    x = self.o_proj(out.reshape(T, H * D), x)   # (T, hidden)
    gate, up = self.gate_up_proj(self.post_attention_layernorm(x)).chunk(2, dim=-1)   # (T, intermediate) each
    return self.down_proj((gate.silu() * up).contiguous(), x)


class Llama:
  """dtype: of all that is computed but sums, norms and logits."""
  def __init__(self, config: ModelConfig, dtype: DType):
    self.dtype, tied = dtype, config.tie_word_embeddings
    def vocabulary(name: str) -> Linear: return Linear(config.hidden_size, {name: config.vocab_size}, False, dtype)
    self.lm_head = vocabulary("model.embed_tokens" if tied else "lm_head")
    self.embed_tokens = self.lm_head if tied else vocabulary("model.embed_tokens")
    self.layers = [Layer(config, f"model.layers.{i}", dtype) for i in range(config.num_hidden_layers)]
    self.norm = Norm("model.norm", config.hidden_size, config.rms_norm_eps, dtype)

  def parts(self) -> list[Linear | Norm]:
    """All that has weights, each once."""
    found = [x for owner in (self, *self.layers) for x in vars(owner).values() if isinstance(x, Linear | Norm)]
    return [*dict.fromkeys(found)]

  def __call__(self, ids: Tensor, samples: Tensor, tokens: Tensor, table: Tensor, rope: Tensor,
               caches: list[list[Tensor]]) -> Tensor:
    """Logits, (S, vocab) in float32, of the tokens that `samples`, (S,), indexes in the flat batch `ids`, (T,). The K
    and V of all of them are written to `caches`, keys and values per layer. tokens, table: as the kernels take them."""
    x = self.embed_tokens.rows(ids, self.dtype)   # (T, hidden)
    for layer, cache in zip(self.layers, caches, strict=True):   # compiled once for all layers
      x = function(layer, precompile=True, allow_implicit=True)(x, cache, tokens, table, rope)
    return self.lm_head(self.norm(x[samples]), dtype=dtypes.float32)
