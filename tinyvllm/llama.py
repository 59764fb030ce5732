"""A LLaMA (Touvron et al. 2023) over a paged KV cache. One forward serves prefill, chunks of a prefill and decode: a
flat batch of tokens, each with its position, block and row. Attributes are named as in Hugging Face's files, with q, k,
v stored as one matrix and gate, up as one."""
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes, function, helpers, nn
from tinygrad.dtype import DType
from tinygrad.uop.ops import Ops

from .attention import attend
from .config import ModelConfig
from .device import best


def rope_table(config: ModelConfig, length: int) -> Tensor:
  """Cosines and sines of rotary positions (Su et al. 2021), (length, 2, head_dim / 2), their frequencies scaled."""
  scaling = config.rope_scaling
  freqs = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)   # (D/2,)
  if scaling["rope_type"] == "linear": freqs /= scaling["factor"]
  if scaling["rope_type"] == "factors": freqs /= scaling["factors"]
  if scaling["rope_type"] == "llama3":   # long waves are stretched by factor, short ones left alone, others between
    turns = scaling["original_max_position_embeddings"] * freqs / (2 * np.pi)
    freqs *= np.interp(turns, [scaling["low_freq_factor"], scaling["high_freq_factor"]], [1 / scaling["factor"], 1])
  angles = np.outer(np.arange(length), freqs)   # (length, D/2)
  return Tensor(np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32))


def flat(x: Tensor) -> Tensor:
  """In one axis, and a buffer of its own: what a kernel has made is not copied where a traced function returns it."""
  if x.uop.op is not Ops.AFTER: return x.flatten().contiguous()
  return Tensor(x.uop.src[0].base.after(x.uop.src[1]))


class Linear:
  """x @ W.T + bias, accumulated in float32. sources: the matrices of the files whose rows follow each other in W, and
  how many each has. dtype: of x, and of W unless its file is narrower. axis: of W, (out, in), of which each device has
  a part; of inputs the results are parts of a sum."""
  def __init__(self, in_features: int, sources: dict[str, int], bias: bool, dtype: DType, axis: int = 0):
    self.out_features = sum(sources.values())
    self.sources = sources
    self.axis = axis
    self.weight = Tensor.empty(self.out_features, in_features, dtype=dtype)
    self.bias = Tensor.empty(self.out_features, dtype=dtype) if bias else None

  def stored(self, w: np.ndarray) -> np.ndarray: return w   # W, or a part of it, as the weight has it

  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    """x: (T, in). Returns (T, out), of x's type unless said."""
    return x.float().linear(self.weight.float().T, self.bias).cast(dtype or x.dtype).contiguous()

  def rows(self, ids: Tensor, dtype: DType) -> Tensor:
    """Of each id, (T,), a row of W, or zeros where it is beyond them: (T, in)."""
    return self.weight[ids].cast(dtype).contiguous()


class GateUp(Linear):
  """silu(gate) * up (Shazeer 2020), of which W has the rows of gate, and then those of up."""
  def __call__(self, x: Tensor, dtype: DType | None = None) -> Tensor:
    gate, up = super().__call__(x, dtype).chunk(2, 1)   # (T, out / 2) each
    return (gate.silu() * up).contiguous()


class Norm:
  """x / rms(x) * weight over the last axis (Zhang and Sennrich 2019), in float32. sources: the weight's name, size."""
  axis = None   # each device has all of it
  def __init__(self, name: str, size: int, eps: float, dtype: DType):
    self.eps = eps
    self.sources = {name: size}
    self.weight = Tensor.empty(size, dtype=dtype)

  def __call__(self, x: Tensor) -> Tensor:
    """x: (..., size), contiguous. Returns the same shape."""
    wide = x.float()
    scale = (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()   # (..., 1)
    return (wide * scale * self.weight).cast(x.dtype).contiguous()

  def add(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """x + delta, and the norm of that. Both (T, size)."""
    total = (x + delta).contiguous()
    return total, self(total)


class Layer:
  def __init__(self, config: ModelConfig, name: str, dtype: DType):
    self.shape = H, KV, D, hidden = (config.num_attention_heads, config.num_key_value_heads, config.head_dim,
                                     config.hidden_size)
    intermediate = config.intermediate_size
    def norm(kind, size): return best(Norm)(f"{name}.{kind}", size, config.rms_norm_eps, dtype)
    def linear(module, inputs, bias, kind=Linear, axis=0, **sources):
      named = {f"{name}.{module}.{source}": rows for source, rows in sources.items()}
      return best(kind)(inputs, named, bias, dtype, axis)
    self.input_layernorm = norm("input_layernorm", hidden)
    self.qkv_proj = linear("self_attn", hidden, config.qkv_bias, q_proj=H * D, k_proj=KV * D, v_proj=KV * D)
    self.o_proj = linear("self_attn", H * D, config.attention_bias, axis=1, o_proj=hidden)
    self.post_attention_layernorm = norm("post_attention_layernorm", hidden)
    self.gate_up_proj = linear("mlp", hidden, config.mlp_bias, GateUp, gate_proj=intermediate, up_proj=intermediate)
    self.down_proj = linear("mlp", intermediate, config.mlp_bias, axis=1, down_proj=hidden)
    self.attend = best(attend)
    if config.qk_norm: self.q_norm, self.k_norm = [norm(f"self_attn.{kind}", D) for kind in ("q_norm", "k_norm")]

  @function(precompile=True, allow_implicit=True)
  def __call__(self, x: Tensor, delta: Tensor, cache: list[Tensor], tokens: Tensor, table: Tensor,
               rope: Tensor) -> tuple[Tensor, Tensor]:
    """x: (T * hidden,), of the layers before but the last one's delta, which is what is to be added to it. Returns the
    same of this layer. Of deltas each device has a part, or several one behind the other, the sum of which is meant."""
    H, KV, D, hidden = self.shape
    x, normed = self.input_layernorm.add(*[t.reshape(-1, hidden) for t in (x, delta)])   # (T, hidden)
    qkv = self.qkv_proj(normed)   # (T, (H + 2 KV) * D)
    if hasattr(self, "q_norm"):
      q, k, v = qkv.unflatten(1, (-1, D)).split([H, KV, KV], 1)   # (T, heads, D) each
      qkv = self.q_norm(q.contiguous()).cat(self.k_norm(k.contiguous()), v, dim=1).flatten(1).contiguous()
    out = self.attend(qkv, cache, rope, tokens, table, H)   # (T, H * D)
    x, normed = self.post_attention_layernorm.add(x, self.o_proj(out))   # (T, hidden)
    return flat(x), flat(self.down_proj(self.gate_up_proj(normed)))


class Llama:
  """dtype: of all that is computed but sums, norms and logits."""
  fill: Any = None   # what else fills a part's tensor with those of the files, if anything does

  def __init__(self, config: ModelConfig, dtype: DType):
    def vocabulary(name): return best(Linear)(config.hidden_size, {name: config.vocab_size}, False, dtype)
    self.config = config   # of what the device has
    self.dtype = dtype
    self.devices: tuple[str, ...] = (Device.DEFAULT,)
    self.jit: Any = TinyJit   # what captures a step
    self.embed_tokens = self.lm_head = vocabulary("model.embed_tokens")
    if not config.tie_word_embeddings: self.lm_head = vocabulary("lm_head")
    self.layers = [Layer(config, f"model.layers.{i}", dtype) for i in range(config.num_hidden_layers)]
    self.norm = best(Norm)("model.norm", config.hidden_size, config.rms_norm_eps, dtype)

  def parts(self) -> list[Linear | Norm]:
    """All that has weights, each once."""
    attributes = (x for owner in (self, *self.layers) for x in vars(owner).values() if isinstance(x, Linear | Norm))
    return [*dict.fromkeys(attributes)]

  def __call__(self, ids: Tensor, samples: Tensor, tokens: Tensor, table: Tensor, rope: Tensor,
               caches: list[list[Tensor]]) -> Tensor:
    """Logits, (S, vocab) in float32, of the tokens that `samples`, (S,), indexes in the flat batch `ids`, (T,). The K
    and V of all of them are written to `caches`, keys and values per layer. tokens, table: as the kernels take them."""
    delta = flat(self.embed_tokens.rows(ids, self.dtype))   # (T * hidden,)
    x = Tensor.zeros(*delta.shape, dtype=self.dtype, device=delta.device).contiguous()
    traced: dict[Any, UOp] = {}   # once for all layers of a kind: they differ in what they read
    for layer, cache in zip(self.layers, caches, strict=True):
      state = layer, x, delta, cache, tokens, table, rope
      reads = helpers.dedup([t.uop for t in nn.state.get_parameters(state)])   # in a call's order
      kind = tuple((t.shape, t.dtype) for t in reads)
      if kind not in traced:
        traced[kind] = Layer.__call__(*state)[0].uop.src[0]
        assert traced[kind].src[1:len(reads) + 1] == (*reads,), "a call's inputs are in another order"
      body, *inputs = traced[kind].src
      call = traced[kind].replace(src=(body, *reads, *inputs[len(reads):]))   # behind what it is given: scratch
      x, delta = [Tensor(call.gettuple(i)) for i in range(2)]
    hidden = self.norm.weight.shape[0]
    x, delta = [t.reshape(-1, ids.shape[0], hidden)[:, samples].flatten(0, 1).contiguous() for t in (x, delta)]
    return self.lm_head(self.norm.add(x, delta)[1], dtype=dtypes.float32)   # (S, vocab)
