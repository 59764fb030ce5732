"""A LLaMA (Touvron et al. 2023) over a paged KV cache. One forward serves prefill, chunks of a prefill and decode: a
flat batch of tokens, each with its position, slot and row. Attributes are named as in Hugging Face's files, with q, k,
v stored as one matrix and gate, up as one."""
import functools, math

from tinygrad import Tensor, dtypes, function
from tinygrad.dtype import DType

from .attention import attend_kernel, rope_kernel
from .config import ModelConfig
from .matmul import linear, norm_kernel, stored_shape, unpack


def rope_table(config: ModelConfig, length: int) -> Tensor:
  """Cosines and sines of rotary positions (Su et al. 2021), (length, 2, head_dim / 2), their frequencies scaled."""
  D, scaling = config.head_dim, config.rope_scaling
  freqs = [config.rope_theta ** (-i / D) for i in range(0, D, 2)]
  factors = [scaling["factor"]] * len(freqs) if scaling["rope_type"] == "linear" else scaling.get("factors")
  if factors: freqs = [f / x for f, x in zip(freqs, factors, strict=True)]
  if scaling["rope_type"] == "llama3":   # long waves are stretched by factor, short ones left alone, others between
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = [scaling["original_max_position_embeddings"] * f / (2 * math.pi) for f in freqs]
    kept = [min(1.0, max(0.0, (t - low) / (high - low))) for t in turns]
    freqs = [f * k + f / scaling["factor"] * (1 - k) for f, k in zip(freqs, kept, strict=True)]
  angles = Tensor.arange(length, dtype=dtypes.float32).reshape(length, 1) * Tensor(freqs, dtype=dtypes.float32)
  return Tensor.stack(angles.cos(), angles.sin(), dim=1).contiguous()   # (length, 2, D/2)


class Linear:
  """x @ W.T + bias, accumulated in float32. sources: the matrices of the files whose rows follow each other in W, and
  how many each has."""
  def __init__(self, in_features: int, sources: dict[str, int], bias: bool, dtype: DType):
    self.in_features = in_features
    self.sources = sources
    out_features = sum(sources.values())
    self.weight = Tensor.empty(*stored_shape(out_features, in_features, dtype), dtype=dtype)
    if bias: self.bias = Tensor.empty(out_features, dtype=dtype)

  def __call__(self, x: Tensor, *residual: Tensor, dtype: DType | None = None) -> Tensor:
    """x: (T, in). residual: (T, out), added to the result. Returns (T, out)."""
    bias = [self.bias.unsqueeze(0)] if hasattr(self, "bias") else []
    return linear(x, self.weight, *bias, *residual, dtype=dtype or x.dtype)

  def rows(self, ids: Tensor, dtype: DType) -> Tensor:
    """Of each id, (T,), a row of W: (T, in)."""
    return unpack(self.weight)[ids].cast(dtype).contiguous()


class Norm:
  """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019), in float32."""
  def __init__(self, name: str, size: int, eps: float, dtype: DType):
    self.sources = {name: size}
    self.weight = Tensor.empty(size, dtype=dtype)
    self.kernel = functools.partial(norm_kernel, eps)

  def __call__(self, x: Tensor) -> Tensor:
    """x: (..., size). Returns the same shape."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return Tensor.empty_like(rows).custom_kernel(rows, self.weight, fxn=self.kernel)[0].reshape(x.shape)


class Layer:
  def __init__(self, config: ModelConfig, name: str, dtype: DType):
    self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    self.head_dim = config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
    attn, mlp = f"{name}.self_attn", f"{name}.mlp"
    qkv = {f"{attn}.q_proj": q_size, f"{attn}.k_proj": kv_size, f"{attn}.v_proj": kv_size}
    gate_up = {f"{mlp}.gate_proj": intermediate, f"{mlp}.up_proj": intermediate}
    self.input_layernorm = Norm(f"{name}.input_layernorm", hidden, config.rms_norm_eps, dtype)
    self.qkv_proj = Linear(hidden, qkv, config.qkv_bias, dtype)
    self.o_proj = Linear(q_size, {f"{attn}.o_proj": hidden}, config.o_bias, dtype)
    self.post_attention_layernorm = Norm(f"{name}.post_attention_layernorm", hidden, config.rms_norm_eps, dtype)
    self.gate_up_proj = Linear(hidden, gate_up, config.mlp_bias, dtype)
    self.down_proj = Linear(intermediate, {f"{mlp}.down_proj": hidden}, config.mlp_bias, dtype)
    if config.qk_norm:
      self.q_norm = Norm(f"{attn}.q_norm", self.head_dim, config.rms_norm_eps, dtype)
      self.k_norm = Norm(f"{attn}.k_norm", self.head_dim, config.rms_norm_eps, dtype)

  def __call__(self, x: Tensor, cache: list[Tensor], tokens: Tensor, table: Tensor, rope: Tensor) -> Tensor:
    H, KV, D = self.num_heads, self.num_kv_heads, self.head_dim
    T = x.shape[0]
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
  """dtype: of the weights, unless their files are narrower, and of all that is computed but sums, norms and logits."""
  def __init__(self, config: ModelConfig, dtype: DType):
    self.dtype = dtype
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    self.lm_head = Linear(config.hidden_size, {head: config.vocab_size}, False, dtype)
    if not config.tie_word_embeddings:
      self.embed_tokens = Linear(config.hidden_size, {"model.embed_tokens": config.vocab_size}, False, dtype)
    self.layers = [Layer(config, f"model.layers.{i}", dtype) for i in range(config.num_hidden_layers)]
    self.norm = Norm("model.norm", config.hidden_size, config.rms_norm_eps, dtype)

  def parts(self) -> list[Linear | Norm]:
    """All that has weights."""
    return [x for owner in (self, *self.layers) for x in vars(owner).values() if isinstance(x, Linear | Norm)]

  def __call__(self, ids: Tensor, samples: Tensor, tokens: Tensor, table: Tensor, rope: Tensor,
               caches: list[list[Tensor]]) -> Tensor:
    """Logits, (S, vocab) in float32, of the tokens that `samples`, (S,), indexes in the flat batch `ids`, (T,). The K
    and V of all of them are written to `caches`, keys and values per layer. tokens, table: as the kernels take them."""
    x = getattr(self, "embed_tokens", self.lm_head).rows(ids, self.dtype)   # (T, hidden)
    for layer, cache in zip(self.layers, caches, strict=True):   # compiled once for all layers
      x = function(layer, precompile=True, allow_implicit=True)(x, cache, tokens, table, rope)
    return self.lm_head(self.norm(x[samples]), dtype=dtypes.float32)
