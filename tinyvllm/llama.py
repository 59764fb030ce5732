"""A LLaMA (Touvron et al. 2023) over a paged KV cache. One forward serves prefill, chunks of a prefill and decode: a
flat batch of tokens, each with its position, slot and row. Attributes are named as in Hugging Face's files, with q, k,
v stored as one matrix and gate, up as one."""
import math
from functools import partial
from typing import Any

from tinygrad import Tensor, dtypes, function, nn
from tinygrad.dtype import DType
from tinygrad.helpers import argsort

from .config import ModelConfig
from .kernels import attend_kernel, cpu_cores, has_tensor_cores, linear_kernel, rms_kernel, rope_kernel
from .kernels import tensor_core_linear_kernel


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


# How the axes of a split W, (out / 16, 16, in) or (out / 16, 2, 8, in / 32, 4, 2, 2, 2), are stored, by their number
STORED = {3: (0, 2, 1), 8: (0, 3, 5, 6, 2, 4, 1, 7)}


def pack(weight: Any, shape: tuple) -> Any:
  """W, (out, in), in the order of a stored shape."""
  axes = STORED[len(shape)]
  return weight.reshape([shape[i] for i in argsort(axes)]).transpose(axes)


def features(shape: tuple) -> tuple[int, int]:
  """(out, in) of a stored W."""
  return (shape[0] * 16, shape[1] * 32) if len(shape) == 8 else (shape[0] * shape[2], shape[1])


def unpack(stored: Tensor) -> Tensor:
  """A stored W as (out, in)."""
  return stored.permute(argsort(STORED[stored.ndim])).reshape(features(stored.shape))


class Linear:
  """x @ W.T + bias, accumulated in float32. norm_eps: x is first divided by its rows' root mean square (Zhang and Sennrich
  2019); the weights of such a norm belong into W."""
  def __init__(self, in_features: int, out_features: int, bias: bool = False, dtype: DType = dtypes.float32,
               norm_eps: float | None = None):
    tile, cores = math.gcd(out_features, 16), cpu_cores()
    tensor_cores = tile == 16 and in_features % 32 == 0 and has_tensor_cores(dtype)
    shape = (out_features // tile, tile, in_features)
    if tensor_cores: shape = (out_features // 16, 2, 8, in_features // 32, 4, 2, 2, 2)
    self.weight = Tensor.empty(*[shape[i] for i in STORED[len(shape)]], dtype=dtype)
    if bias: self.bias = Tensor.empty(out_features, dtype=dtype)
    self.kernel = tensor_core_linear_kernel if tensor_cores else partial(linear_kernel, cores)
    if norm_eps: self.rms = partial(rms_kernel, 1 if cores else math.gcd(in_features, 256), norm_eps)

  def __call__(self, x: Tensor, *residual: Tensor, dtype: DType | None = None) -> Tensor:
    """x: (T, in). residual: (T, out), added to the result. Returns (T, out)."""
    new, extras = partial(Tensor.empty, x.shape[0], device=x.device), residual
    if hasattr(self, "rms"): extras = (new(1, dtype=dtypes.float32).custom_kernel(x, fxn=self.rms)[0], *residual)
    out = new(features(self.weight.shape)[0], dtype=dtype or x.dtype)
    out = out.custom_kernel(x, self.weight, *extras, fxn=self.kernel)[0]   # (T, out)
    return out + self.bias if hasattr(self, "bias") else out


class Layer:
  """Norms are where they are used: their weights are part of qkv_proj's and gate_up_proj's."""
  def __init__(self, config: ModelConfig, dtype: DType):
    self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, intermediate, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
    self.qkv_proj = Linear(hidden, (self.heads + 2 * self.kv_heads) * self.head_dim, config.qkv_bias, dtype, eps)
    self.o_proj = Linear(self.heads * self.head_dim, hidden, config.o_bias, dtype)
    self.gate_up_proj = Linear(hidden, 2 * intermediate, config.mlp_bias, dtype, eps)
    self.down_proj = Linear(intermediate, hidden, config.mlp_bias, dtype)
    self.attend_kernel = partial(attend_kernel, cpu_cores())
    if config.qk_norm: self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps) for _ in range(2))

  def __call__(self, x: Tensor, cache: list[Tensor], tokens: Tensor, table: Tensor, rope: Tensor) -> Tensor:
    T, H, KV, D = x.shape[0], self.heads, self.kv_heads, self.head_dim
    qkv = self.qkv_proj(x)   # (T, (H + 2 KV) * D)
    if hasattr(self, "q_norm"):
      q, k, v = qkv.reshape(T, H + 2 * KV, D).split([H, KV, KV], dim=1)
      qkv = self.q_norm(q).cat(self.k_norm(k), v, dim=1).flatten(1).contiguous()
    q, out = (Tensor.empty(T, KV, H // KV, D, dtype=x.dtype, device=x.device) for _ in range(2))
    q, *cache = q.custom_kernel(*cache, qkv, rope, tokens, fxn=rope_kernel)[:3]
    out = out.custom_kernel(q, *cache, table, tokens, fxn=self.attend_kernel)[0]   # (T, KV, G, D)
    x = self.o_proj(out.reshape(T, H * D), x)
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)   # (T, intermediate) each
    return self.down_proj((gate.silu() * up).contiguous(), x)


class Llama:
  """dtype: of the weights and all that is computed but sums, norms and logits."""
  def __init__(self, config: ModelConfig, dtype: DType):
    self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype)   # with tied embeddings, these too
    if not config.tie_word_embeddings: self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    self.layers = [Layer(config, dtype) for _ in range(config.num_hidden_layers)]
    self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

  def __call__(self, ids: Tensor, samples: Tensor, tokens: Tensor, table: Tensor, rope: Tensor,
               caches: list[list[Tensor]]) -> Tensor:
    """Logits, (S, vocab) in float32, of the tokens that `samples`, (S,), indexes in the flat batch `ids`, (T,). The K
    and V of all of them are written to `caches`, keys and values per layer. tokens, table: as the kernels take them."""
    embedding = self.embed_tokens.weight if hasattr(self, "embed_tokens") else unpack(self.lm_head.weight)
    x = embedding[ids].contiguous()   # (T, hidden)
    for layer, cache in zip(self.layers, caches, strict=True):   # compiled once for all layers
      x = function(layer, precompile=True, allow_implicit=True)(x, cache, tokens, table, rope)
    return self.lm_head(self.norm(x[samples]).cast(x.dtype).contiguous(), dtype=dtypes.float32)
