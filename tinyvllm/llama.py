"""A LLaMA (Touvron et al. 2023) over a paged KV cache. One forward serves prefill, chunks of a prefill and decode: a
flat batch of tokens, each with its position, slot and row. Attributes are named as in Hugging Face's files, with q, k,
v stored as one matrix and gate, up as one."""
import functools
import math
from typing import NamedTuple

from tinygrad import Device, Tensor, UOp, dtypes, function, nn
from tinygrad.codegen.opt import Opt, OptOps
from tinygrad.dtype import DType
from tinygrad.uop.ops import AxisType, KernelInfo, Ops

from .attention import paged_attention, write_kv, write_table
from .config import ModelConfig


class Batch(NamedTuple):
  """Where a flat batch's tokens stand. rope: their cosines and sines, (T, 2, head_dim / 2). table: (rows,
  max_blocks)."""
  positions: Tensor   # (T,)
  slots: Tensor       # (T,), block * block_size + offset
  rows: Tensor        # (T,), of the table
  rope: Tensor
  table: Tensor
  num_blocks: UOp     # bound variable: the most blocks that any of the sequences holds


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


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
  """Rotate x, (T, H, D), the first half of each head against the second. rope: (T, 2, D/2)."""
  cos, sin = rope[:, 0].unsqueeze(1), rope[:, 1].unsqueeze(1)   # (T, 1, D/2)
  a, b = x.float().chunk(2, dim=-1)
  return (a * cos - b * sin).cat(b * cos + a * sin, dim=-1).cast(x.dtype)


def _linear_kernel(cores: int, out: UOp, x: UOp, weight: UOp) -> UOp:
  T, tiles, K, lanes = (int(extent) for extent in (x.shape[0], *weight.shape))
  opts: list[tuple[OptOps, int, int]] = []   # none: tinygrad's heuristics
  n, t, lane = [UOp.range(extent, axis) for axis, extent in enumerate((tiles, T, lanes))]   # a tile stays in the cache
  k = UOp.range(K, 3, AxisType.REDUCE)
  dot = (x[t, k] * weight[n, k, lane]).cast(dtypes.float32).reduce(k, arg=Ops.ADD)
  if cores and lanes == 16:   # a CPU: 16 outputs x 2 rows in registers, more would spill, and the tiles on all cores
    of_rows = int(tiles > 1)   # an axis of extent 1 is gone when opts are applied
    large = T * K * tiles * lanes > 1 << 22   # another thread is worth its start
    parts = max(part for part in range(1, cores + 1) if tiles % part == 0 and (large or part == 1))
    opts = [(OptOps.UPCAST, of_rows + (T > 1), 16), (OptOps.UPCAST, of_rows, math.gcd(T, 2)), (OptOps.THREAD, 0, parts)]
  info = KernelInfo(name="linear", opts_to_apply=tuple(Opt(*opt) for opt in opts if opt[2] > 1) if opts else None)
  return out[t, n * lanes + lane].store(dot.cast(out.dtype)).end(n, t, lane).sink(arg=info)


def cpu_cores() -> int:
  """Cores that share a kernel, where the device is a CPU; else 0."""
  renderer = Device[Device.DEFAULT].renderer
  return 0 if renderer.has_local else (renderer.global_max or (1,))[0]


class Linear:
  """x @ W.T + bias, accumulated in float32. W, (out, in), is stored as (out / 16, in, 16): the lanes of a register hold
  16 neighbouring outputs, and a kernel reads memory from front to back."""
  def __init__(self, in_features: int, out_features: int, bias: bool = False):
    tile = math.gcd(out_features, 16)
    self.weight = Tensor.empty(out_features // tile, in_features, tile)
    if bias: self.bias = Tensor.empty(out_features)
    self.kernel = functools.partial(_linear_kernel, cpu_cores())

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    out = Tensor.empty(x.shape[0], self.weight.shape[0] * self.weight.shape[2], dtype=dtype or x.dtype, device=x.device)
    out = out.custom_kernel(x.contiguous(), self.weight, fxn=self.kernel)[0]   # (T, out)
    return out + self.bias if hasattr(self, "bias") else out


class Attention:
  def __init__(self, config: ModelConfig):
    self.heads, self.kv_heads, self.head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    self.simd = cpu_cores() > 0
    self.qkv_proj = Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, config.qkv_bias)
    self.o_proj = Linear(self.heads * self.head_dim, config.hidden_size, config.o_bias)
    if config.qk_norm: self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, config.rms_norm_eps) for _ in range(2))

  def __call__(self, x: Tensor, batch: Batch, cache: Tensor) -> Tensor:
    T, H, KV, D = x.shape[0], self.heads, self.kv_heads, self.head_dim
    q, k, v = self.qkv_proj(x).reshape(T, H + 2 * KV, D).split([H, KV, KV], dim=1)   # (T, H, D), (T, KV, D) twice
    if hasattr(self, "q_norm"): q, k = self.q_norm(q), self.k_norm(k)
    q = apply_rope(q, batch.rope).reshape(T, KV, H // KV, D)   # (T, KV, G, D)
    cache = write_kv(cache, apply_rope(k, batch.rope), v, batch.slots)
    out = paged_attention(q, cache, batch.table, batch.rows, batch.positions, batch.num_blocks, self.simd)
    return self.o_proj(out.cast(x.dtype).reshape(T, H * D))


class MLP:
  def __init__(self, config: ModelConfig):
    self.gate_up_proj = Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
    self.down_proj = Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

  def __call__(self, x: Tensor) -> Tensor:
    gate, up = self.gate_up_proj(x).chunk(2, dim=-1)   # (T, intermediate) each
    return self.down_proj(gate.silu() * up)


class Layer:
  def __init__(self, config: ModelConfig):
    self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
    self.self_attn = Attention(config)
    self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
    self.mlp = MLP(config)

  def __call__(self, x: Tensor, batch: Batch, cache: Tensor) -> Tensor:
    x = (x + self.self_attn(self.input_layernorm(x), batch, cache)).contiguous()
    return (x + self.mlp(self.post_attention_layernorm(x))).contiguous()


class Llama:
  def __init__(self, config: ModelConfig):
    self.lm_head = Linear(config.hidden_size, config.vocab_size)   # with tied embeddings, these too
    if not config.tie_word_embeddings: self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
    self.layers = [Layer(config) for _ in range(config.num_hidden_layers)]
    self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

  def __call__(self, ids: Tensor, samples: Tensor, batch: Batch, caches: list[Tensor]) -> Tensor:
    """Logits, (S, vocab) in float32, of the tokens that `samples`, (S,), indexes in the flat batch `ids`, (T,). The K
    and V of all of them are written to `caches`, a block tensor per layer."""
    table = write_table(batch.table, batch.rows, batch.positions, batch.slots, int(caches[0].shape[2]))
    batch = batch._replace(table=table)
    tied = self.lm_head.weight.permute(0, 2, 1).flatten(0, 1)   # (vocab, hidden)
    x = (self.embed_tokens.weight if hasattr(self, "embed_tokens") else tied)[ids].contiguous()   # (T, hidden)
    for layer, cache in zip(self.layers, caches, strict=True):
      x = function(layer, precompile=True, allow_implicit=True)(x, batch, cache)   # compiled once for all layers
    return self.lm_head(self.norm(x[samples]), dtypes.float32)
