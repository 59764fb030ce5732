"""A LLaMA (Touvron et al. 2023) over a paged KV cache. One forward serves prefill, chunks of a prefill and decode: a flat batch of tokens, each with
its position, slot and row. Attributes are named as in Hugging Face's files, with q, k, v stored as one matrix and gate, up as one."""
import functools
import math

from tinygrad import Device, Tensor, UOp, dtypes, function, nn
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.dtype import DType
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from .attention import paged_attention, write_kv, write_table
from .config import ModelConfig


def rope_table(config: ModelConfig, length: int) -> Tensor:
  """Cosines and sines of rotary positions (Su et al. 2021), (length, 2, head_dim / 2), with llama3 or linear frequency scaling."""
  freqs = [config.rope_theta ** (-i / config.head_dim) for i in range(0, config.head_dim, 2)]
  scaling = config.rope_scaling or {"rope_type": "default"}
  if scaling["rope_type"] == "linear": freqs = [f / scaling["factor"] for f in freqs]
  if scaling["rope_type"] == "factors": freqs = [f / factor for f, factor in zip(freqs, scaling["factors"], strict=True)]
  if scaling["rope_type"] == "llama3":   # long wavelengths are stretched by factor, short ones left alone, those between interpolated
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = [scaling["original_max_position_embeddings"] * f / (2 * math.pi) for f in freqs]
    kept = [min(1.0, max(0.0, (t - low) / (high - low))) for t in turns]
    freqs = [f * k + f / scaling["factor"] * (1 - k) for f, k in zip(freqs, kept, strict=True)]
  angles = Tensor.arange(length, dtype=dtypes.float32).reshape(length, 1) * Tensor(freqs, dtype=dtypes.float32)
  return Tensor.stack(angles.cos(), angles.sin(), dim=1).contiguous()   # (length, 2, D/2)


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
  """Rotate x, (T, H, D), the first half of each head against the second, as Hugging Face lays them out. rope: (T, 2, D/2)."""
  cos, sin = rope[:, 0].unsqueeze(1), rope[:, 1].unsqueeze(1)   # (T, 1, D/2)
  a, b = x.float().chunk(2, dim=-1)
  return (a * cos - b * sin).cat(b * cos + a * sin, dim=-1).cast(x.dtype)


def _linear_kernel(opts: tuple[Opt, ...] | None, out: UOp, x: UOp, weight: UOp) -> UOp:
  t, n, lane, k = [UOp.range(extent, i) for i, extent in enumerate((x.shape[0], weight.shape[0], weight.shape[2]))] + \
    [UOp.range(weight.shape[1], 3, AxisType.REDUCE)]
  dot = (x[t, k] * weight[n, k, lane]).cast(dtypes.float32).reduce(k, arg=Ops.ADD)
  store = out[t, n * weight.shape[2] + lane].store(dot.cast(out.dtype))
  return store.end(t, n, lane).sink(arg=KernelInfo(name="linear", opts_to_apply=opts))


class Linear:
  """x @ W.T + bias, accumulated in float32. W, (out, in), is stored as (out / 16, in, 16): one register's lanes hold 16 neighbouring outputs, and a
  kernel reads memory from front to back."""
  def __init__(self, in_features: int, out_features: int, bias: bool = False):
    self.tile, self.out_features = math.gcd(out_features, 16), out_features
    self.weight = Tensor.empty(out_features // self.tile, in_features, self.tile)
    if bias: self.bias = Tensor.empty(out_features)
    self.has_local = Device[Device.DEFAULT].renderer.has_local

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    opts = None   # GPUs: tinygrad's heuristics
    if not self.has_local and self.tile == 16:   # 4 x 16 outputs in registers: measured 2 times the speed of the heuristics
      rows = math.gcd(x.shape[0], 4)
      opts = (Opt(OptOps.UPCAST, 2, 16), Opt(OptOps.UPCAST, 0, rows)) if rows > 1 else (Opt(OptOps.UPCAST, 1, 16),)
    out = Tensor.empty(x.shape[0], self.out_features, dtype=dtype or x.dtype, device=x.device)
    out = out.custom_kernel(x.contiguous(), self.weight, fxn=functools.partial(_linear_kernel, opts))[0]   # (T, out)
    return out + self.bias if hasattr(self, "bias") else out


class Attention:
  def __init__(self, config: ModelConfig):
    self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    self.qkv_proj = Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=config.qkv_bias)
    self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, bias=config.o_bias)
    if config.qk_norm:
      self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))

  def __call__(self, x: Tensor, cache: Tensor, rope: Tensor, slots: Tensor, seen: tuple) -> Tensor:
    T, H, KV, D = x.shape[0], self.heads, self.kv_heads, self.head_dim
    q, k, v = self.qkv_proj(x).reshape(T, H + 2 * KV, D).split([H, KV, KV], dim=1)   # (T, H, D), (T, KV, D), (T, KV, D)
    if hasattr(self, "q_norm"): q, k = self.q_norm(q), self.k_norm(k)
    cache = write_kv(cache, apply_rope(k, rope), v, slots)
    out = paged_attention(apply_rope(q, rope).reshape(T, KV, H // KV, D), cache, *seen)   # (T, KV, G, D)
    return self.o_proj(out.cast(x.dtype).reshape(T, H * D))


class MLP:
  def __init__(self, config: ModelConfig):
    self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
    self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

  def __call__(self, x: Tensor) -> Tensor:
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)   # (T, intermediate) each
    return self.down_proj(gate.silu() * up)


class Layer:
  def __init__(self, config: ModelConfig):
    self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
    self.self_attn = Attention(config)
    self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
    self.mlp = MLP(config)

  def __call__(self, x: Tensor, cache: Tensor, rope: Tensor, slots: Tensor, seen: tuple) -> Tensor:
    x = (x + self.self_attn(self.input_layernorm(x), cache, rope, slots, seen)).contiguous()
    return (x + self.mlp(self.post_attention_layernorm(x))).contiguous()


class Llama:
  def __init__(self, config: ModelConfig):
    self.lm_head = Linear(config.hidden_size, config.vocab_size)
    if not config.tie_word_embeddings: self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    self.layers = [Layer(config) for _ in range(config.num_hidden_layers)]
    self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

  def __call__(self, ids: Tensor, positions: Tensor, slots: Tensor, rows: Tensor, samples: Tensor,
               rope: Tensor, caches: list[Tensor], table: Tensor, num_blocks: UOp) -> Tensor:
    """ids, positions, slots, rows: (T,) of the flat batch. samples: (S,) indices into it whose next token is wanted. rope: from
    `rope_table`. caches: a block tensor per layer. table: (rows, max_blocks). num_blocks: bound variable. Returns logits (S, vocab) in float32."""
    table = write_table(table, rows, positions, slots, caches[0].shape[2])
    rope = rope[positions].contiguous()   # (T, 2, D/2)
    embedding = self.embed_tokens.weight if hasattr(self, "embed_tokens") else self.lm_head.weight.permute(0, 2, 1).flatten(0, 1)   # (vocab, hidden)
    x = embedding[ids].contiguous()   # (T, hidden)
    for layer, cache in zip(self.layers, caches, strict=True):   # a function of its own: traced and compiled once for all layers
      run = function(layer, precompile=True, allow_implicit=True)
      x = run(x, cache, rope, slots, (table, rows, positions, num_blocks))
    return self.lm_head(self.norm(x[samples]), dtypes.float32)   # (S, vocab_size)
