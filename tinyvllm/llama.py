"""A LLaMA (Touvron et al. 2023) over a paged KV cache. One forward serves prefill, chunks of a prefill and decode: a
flat batch of tokens, each with its position, slot and row. Attributes are named as in Hugging Face's files, with q, k,
v stored as one matrix and gate, up as one."""
import math
from functools import partial
from typing import NamedTuple

from tinygrad import Tensor, dtypes, function, nn
from tinygrad.dtype import DType

from .attention import attention_kernel, paged_attention, rope_kernel, write_table_kernel
from .config import ModelConfig
from .linear import Linear, RMSNorm, unpack


class Batch(NamedTuple):
  """Where a flat batch's tokens stand, as the kernels in attention.py take it."""
  tokens: Tensor
  table: Tensor
  rope: Tensor


def rope_table(config: ModelConfig, length: int) -> Tensor:
  """Cosines and sines of rotary positions (Su et al. 2021), (length, 2, head_dim / 2), their frequencies scaled."""
  D, scaling = config.head_dim, config.rope_scaling
  freqs = [config.rope_theta ** (-i / D) for i in range(0, D, 2)]
  if scaling["rope_type"] == "linear": freqs = [f / scaling["factor"] for f in freqs]
  if scaling["rope_type"] == "factors": freqs = [f / x for f, x in zip(freqs, scaling["factors"], strict=True)]
  if scaling["rope_type"] == "llama3":   # long waves are stretched by factor, short ones left alone, others between
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = [scaling["original_max_position_embeddings"] * f / (2 * math.pi) for f in freqs]
    kept = [min(1.0, max(0.0, (t - low) / (high - low))) for t in turns]
    freqs = [f * k + f / scaling["factor"] * (1 - k) for f, k in zip(freqs, kept, strict=True)]
  angles = Tensor.arange(length, dtype=dtypes.float32).reshape(length, 1) * Tensor(freqs, dtype=dtypes.float32)
  return Tensor.stack(angles.cos(), angles.sin(), dim=1).contiguous()   # (length, 2, D/2)


class Attention:
  def __init__(self, config: ModelConfig, dtype: DType, block_size: int):
    self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    self.kernel = attention_kernel(dtype, self.head_dim, block_size)
    self.qkv_proj = Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, config.qkv_bias, dtype)
    self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, config.o_bias, dtype)
    if config.qk_norm: self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.rms_norm_eps, dtype) for _ in range(2))

  def __call__(self, x: Tensor, residual: Tensor, batch: Batch, cache: Tensor) -> Tensor:
    T, H, KV, D = x.shape[0], self.heads, self.kv_heads, self.head_dim
    qkv = self.qkv_proj(x)   # (T, (H + 2 KV) * D)
    if hasattr(self, "q_norm"):
      q, k, v = qkv.reshape(T, H + 2 * KV, D).split([H, KV, KV], dim=1)
      qkv = self.q_norm(q).cat(self.k_norm(k), v, dim=1).flatten(1).contiguous()
    q = Tensor.empty(T, KV, H // KV, D, dtype=x.dtype, device=x.device)
    q, cache, *_ = q.custom_kernel(cache, qkv, batch.rope, batch.tokens, fxn=rope_kernel)
    out = paged_attention(self.kernel, q, cache, batch.table, batch.tokens)   # (T, KV, G, D)
    return self.o_proj(out.reshape(T, H * D), residual)


class MLP:
  def __init__(self, config: ModelConfig, dtype: DType):
    self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias, dtype)
    self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias, dtype)

  def __call__(self, x: Tensor, residual: Tensor) -> Tensor:
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)   # (T, intermediate) each
    return self.down_proj((gate.silu() * up).contiguous(), residual)


class Layer:
  def __init__(self, config: ModelConfig, dtype: DType, block_size: int):
    self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
    self.self_attn = Attention(config, dtype, block_size)
    self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
    self.mlp = MLP(config, dtype)

  def __call__(self, x: Tensor, batch: Batch, cache: Tensor) -> Tensor:
    x = self.self_attn(self.input_layernorm(x), x, batch, cache)
    return self.mlp(self.post_attention_layernorm(x), x)


class Llama:
  """dtype: of the weights and all that is computed but sums, norms and logits. block_size: of the KV cache."""
  def __init__(self, config: ModelConfig, dtype: DType, block_size: int):
    self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype)   # with tied embeddings, these too
    if not config.tie_word_embeddings: self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    self.layers = [Layer(config, dtype, block_size) for _ in range(config.num_hidden_layers)]
    self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

  def __call__(self, ids: Tensor, samples: Tensor, batch: Batch, caches: list[Tensor]) -> Tensor:
    """Logits, (S, vocab) in float32, of the tokens that `samples`, (S,), indexes in the flat batch `ids`, (T,). The K
    and V of all of them are written to `caches`, a block tensor per layer."""
    kernel = partial(write_table_kernel, int(caches[0].shape[2]))
    batch = batch._replace(table=batch.table.custom_kernel(batch.tokens, fxn=kernel)[0])
    embedding = self.embed_tokens.weight if hasattr(self, "embed_tokens") else unpack(self.lm_head.weight)
    x = embedding[ids].contiguous()   # (T, hidden)
    for layer, cache in zip(self.layers, caches, strict=True):
      x = function(layer, precompile=True, allow_implicit=True)(x, batch, cache)   # compiled once for all layers
    return self.lm_head(self.norm(x[samples].contiguous()), dtype=dtypes.float32)
