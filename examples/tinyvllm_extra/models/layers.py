"""LLaMA with options: where its norms are, how it attends, rotates and scales, also with methods of scaling RoPE that
the core lacks, and mixtures of experts. table.py has each architecture's."""
import dataclasses, functools, math, re
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from tinygrad import Tensor, dtypes, nn
from tinygrad.dtype import DType

from tinyvllm.backend import Backend, Devices, Linear, Module, Norm
from tinyvllm.config import InputError, JsonObject, ModelConfig, check
from tinyvllm.llama import Layer, Llama, rope_table
from tinyvllm_extra.options import check_one_device

L = TypeVar("L", bound=Linear)
ALL_EXPERTS = re.compile(r"(.*experts)\.(\w+)_proj(?:_(bias|blocks|scales))?")   # tensors with a matrix of each expert


@dataclasses.dataclass(frozen=True)
class VariantConfig(ModelConfig):
  """The shape of a model and the options of its layers; the defaults are LLaMA's. layers, windows and rope_kinds have a
  value for each layer. float16 overflows in models whose activations exceed 65504."""
  layers: tuple["type[VariantLayer]", ...] = ()   # classes
  windows: tuple[int, ...] = ()      # positions that a token attends to, its own included; 0: all
  ropes: tuple[JsonObject, ...] = ()   # parameters of RoPE, as rope_parameters in config.json
  rope_kinds: tuple[int, ...] = ()   # index into ropes
  norms: Sequence[str | None] = ("input_layernorm", None, "post_attention_layernorm", None)   # see VariantLayer
  norm_offset: int | None = None     # added to the weights of norms, which are then float32
  offset_norms: str = "norm.weight"  # ending of the names of norms with this offset
  post_norm_eps: float = 0           # eps of norms after attention and MLP; 0: rms_norm_eps
  qkv_bias: bool = False             # like attention_bias, but not of o_proj
  qk_norm: str | None = None         # RMS norm of q and k: of each "head", also without weights ("unit"), or of "all"
  gate: str = ""                     # matrix of gates: their sigmoids scale heads' outputs; q_proj: after each head's q
  attention_scale: float = 0         # factor of the scores; 0: 1 / sqrt(head_dim)
  attention_cap: float = 0           # soft cap of the scores; 0: none
  has_sinks: bool = False            # a score of each head that takes weight: see Backend.attend
  logits_scale: float = 1            # factor of the logits
  logits_cap: float = 0              # soft cap of the logits; 0: none
  unit_embeddings: bool = False      # RMS norm of embeddings, without weights
  embedding_multiplier: float = 1
  residual_multiplier: float = 1     # factor of what attention and MLP add to the residual stream
  activation: str = "silu"           # a method of Tensor; "gelu" is the tanh approximation
  fused: Sequence[str] = ()          # matrices that the checkpoint has as one: "qkv", "gate_up"
  overflows_float16: bool = False
  renamed: JsonObject = dataclasses.field(default_factory=dict)   # parts of the checkpoint's names -> of the modules'
  # Experts
  num_experts: int = 0
  num_experts_per_tok: int = 0
  moe_intermediate_size: int = 0
  norm_topk_prob: bool = True        # the weights of a token's experts sum to 1
  expert_bias: bool = False          # biases of the router and the experts, whose gate and up are one matrix (gpt-oss)
  has_shared_expert: bool = False    # the MLP computes all tokens, scaled by a gate
  swiglu_alpha: float = 0            # factor in gpt-oss's activation (arXiv:2508.10925); 0: silu instead
  swiglu_limit: float = 0            # limit of its inputs
  # Recurrent layers: see recurrent.py
  kernel_size: int = 3               # inputs of a convolution
  channels: int = 0                  # that the convolutions compute
  matrices: tuple[int, int] = (0, 0)   # K, 0 for no matrix, and the mixer's outputs, heads * V: see delta_kernel
  heads: tuple[int, int] = (0, 0)    # heads of the delta rule, and groups of neighbours with the same q and k


def row_order(config: ModelConfig, name: str, count: int) -> np.ndarray | None:
  """Return the order of a projection's `count` rows in the model, or None if it is the checkpoint's. If a part of each
  head rotates, a half of it begins each half of a head, as attention rotates the two halves of a head with each other:
  the scores do not change, as the order is the same for q and k. Gates follow the queries of all heads."""
  if not re.search(r"\.(q|k|qkv)_(proj|norm)$", name) or not isinstance(config, VariantConfig): return None
  sizes = [int(config.head_dim * rope.get("partial_rotary_factor", 1)) for rope in config.ropes]
  if set(sizes) <= {config.head_dim} and not config.gate: return None
  parts = 1 + (bool(config.gate) and name.endswith(config.gate))
  rows = np.arange(count).reshape(-1, parts, config.head_dim).swapaxes(0, 1).reshape(-1, config.head_dim)   # (heads, D)
  heads = config.num_attention_heads + config.num_key_value_heads if name.endswith("qkv_proj") else len(rows) // parts
  a, b, c, d = np.split(rows[:heads], [sizes[0] // 2, sizes[0], (sizes[0] + config.head_dim) // 2], 1)   # c, d: plain
  rows[:heads] = np.hstack([a, c, b, d])
  return rows.ravel()


class Plain(Module):
  """A tensor of the checkpoint, (*shape), that is never quantized. name: without its ending .weight."""
  def __init__(self, name: str, shape: tuple[int, ...], dtype: DType):
    self.sources = {name: shape[0]}
    self.weight = Tensor.empty(*shape, dtype=dtype)


class VariantLayer(Layer):
  """A transformer block with options. config.norms: the checkpoint's names of the norms before attention, after it,
  before the MLP and after it. Layers with equal `options` and tensors of equal shapes compute the same."""
  config: VariantConfig

  def __init__(self, config: VariantConfig, index: int, dtype: DType, backend: Backend):
    self.config, self.backend, self.dtype = config, backend, dtype
    self.name = f"model.layers.{index}"
    self.window, self.rope = config.windows[index], config.rope_kinds[index]
    self.options: tuple[int, ...] = self.window, self.rope
    norms = [self.norm(source, config.hidden_size) if source else None for source in config.norms]
    self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = norms
    self.make_attention()
    self.make_mlp()

  def make_attention(self) -> None:
    """Make the modules of `attention`."""
    config, linear = self.config, self.backend.Linear
    q_size, kv_size = [n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads)]
    rows = {"self_attn.q_proj": q_size}
    if config.gate: rows[config.gate] = rows.get(config.gate, 0) + q_size
    rows |= {"self_attn.k_proj": kv_size, "self_attn.v_proj": kv_size}
    if "qkv" in config.fused: rows = {"self_attn.qkv_proj": sum(rows.values())}
    self.qkv_proj = self.linear(linear, config.hidden_size, rows, config.qkv_bias or config.attention_bias)
    if config.qk_norm in ("all", "head"):
      sizes = (q_size, kv_size) if config.qk_norm == "all" else (config.head_dim,) * 2
      self.q_norm, self.k_norm = [self.norm(f"self_attn.{x}_norm", n) for x, n in zip("qk", sizes, strict=True)]
    # With a norm after it, an output must be one sum
    self.o_proj = self.linear(linear, q_size, {"self_attn.o_proj": config.hidden_size}, config.attention_bias,
                              0 if config.norms[1] else 1)
    self.sinks = self.plain("self_attn.sinks", config.num_attention_heads) if config.has_sinks else None

  def norm(self, source: str, size: int) -> Norm:
    dtype = self.dtype if self.config.norm_offset is None else dtypes.float32   # 1 + w needs more digits than w
    eps = source in self.config.norms[1::2] and self.config.post_norm_eps or self.config.rms_norm_eps
    return self.backend.Norm(f"{self.name}.{source}", size, eps, dtype)

  def linear(self, layer_type: type[L], in_features: int, rows: dict[str, int], bias: bool, axis: int = 0) -> L:
    return layer_type(in_features, {f"{self.name}.{x}": n for x, n in rows.items()}, bias, self.dtype, axis)

  def plain(self, name: str, *shape: int) -> Plain: return Plain(f"{self.name}.{name}", shape, dtypes.float32)

  def make_mlp(self) -> None:
    """Make the modules of `mlp`."""
    config = self.config
    rows = {"mlp.gate_proj": config.intermediate_size, "mlp.up_proj": config.intermediate_size}
    if "gate_up" in config.fused: rows = {"mlp.gate_up_proj": sum(rows.values())}
    self.gate_up_proj = self.linear(self.backend.GateUp, config.hidden_size, rows, config.mlp_bias)
    self.gate_up_proj.activation = config.activation
    self.down_proj = self.linear(self.backend.Linear, config.intermediate_size, {"mlp.down_proj": config.hidden_size},
                                 config.mlp_bias, 0 if config.norms[3] else 1)

  def mlp(self, h: Tensor) -> Tensor:
    """Return the MLP's output, (T, hidden), for normed h, (T, hidden)."""
    return self.down_proj(self.gate_up_proj(h))

  def attention(self, h: Tensor, cache: list[Tensor], ropes: list[Tensor], tokens: Tensor,
                block_tables: Tensor) -> Tensor:
    """Return the attention's output, (T, hidden), for normed h, (T, hidden)."""
    config = self.config
    qkv = self.qkv_proj(h)                                              # (T, (H + 2 KV) * D), and gates
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = [n * config.head_dim for n in (*[heads] * (1 + bool(config.gate)), kv_heads, kv_heads)]
    q, *gates, k, v = qkv.split(sizes, 1)                               # (T, heads * D) each
    if config.qk_norm == "unit":
      qk = q.cat(k, dim=1).unflatten(1, (-1, config.head_dim))          # (T, H + KV, D)
      qkv = nn.RMSNorm(config.head_dim, config.rms_norm_eps, False)(qk).flatten(1).cat(v, dim=1).contiguous()
    elif config.qk_norm:
      def normed(x, norm):
        return norm(x.reshape(x.shape[0], -1, norm.weight.shape[0]).contiguous()).reshape(x.shape)
      qkv = Tensor.cat(normed(q, self.q_norm), normed(k, self.k_norm), v, dim=1).contiguous()
    h = self.backend.attend(qkv, cache, ropes[self.rope], tokens, block_tables, heads, config.attention_scale,
                            self.window, config.attention_cap, self.sinks.weight if self.sinks else None)   # (T, H * D)
    for gate in gates: h = (h * gate.float().sigmoid()).cast(h.dtype).contiguous()
    return self.o_proj(h)

  def __call__(self, x: Tensor, delta: Tensor, cache: list[Tensor], ropes: list[Tensor], tokens: Tensor,
               block_tables: Tensor) -> tuple[Tensor, Tensor]:
    def add(norm, x, delta):   # without a norm, its input
      return norm.add(x, delta) if norm else ((x + delta).contiguous(),) * 2
    def scaled(norm, out):
      out = norm(out) if norm else out
      return out if self.config.residual_multiplier == 1 else out * self.config.residual_multiplier
    x, h = add(self.before_attention, x, delta)
    x, h = add(self.before_mlp, x, scaled(self.after_attention, self.attention(h, cache, ropes, tokens, block_tables)))
    return x, scaled(self.after_mlp, self.mlp(h))


# Mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538), on one device: a router chooses the experts, MLPs, that
# compute a token's output

class MixtureBackend(Backend):
  """A Backend with a module for the matrices of several experts: see FastExperts."""
  Experts: type[Any]


def choose_experts(logits: Tensor, k: int, is_normalized: bool) -> tuple[Tensor, Tensor]:
  """Return the experts with the k largest logits, (T, k) int32, the first of equal ones, and their weights, (T, k): the
  softmax over all logits or, normalized, over the chosen ones. logits: (T, E) float32."""
  count = int(logits.shape[1])
  expert = Tensor.arange(count)                                         # (E,)
  others, own = logits.unsqueeze(1), logits.unsqueeze(2)
  is_before = (others > own) | ((others == own) & (expert < expert.unsqueeze(1)))   # (T, E, E)
  rank = is_before.sum(2, dtype=dtypes.int32).contiguous()              # (T, E)
  is_chosen = rank.unsqueeze(1) == Tensor.arange(k).unsqueeze(1)        # (T, k, E)
  ids = is_chosen.where(expert, 0).sum(2, dtype=dtypes.int32).minimum(count - 1)   # NaN may sum to more
  scores = is_chosen.where(others, 0).sum(2)
  weights = scores.softmax(1) if is_normalized else (scores - logits.logsumexp(1, keepdim=True)).exp()
  return ids.contiguous(), weights.contiguous()


def group_rows(ids: Tensor, count: int, sizes: tuple[int, int]) -> Tensor:
  """Return row_groups (see matmul.linear_kernel), sorted by expert: (G, 1 + rows) int32, each group's expert and up to
  `rows` pairs of a token and an expert, P for none. With few pairs, each has its own group. ids: (P,) int32, the
  expert of each pair. count: E. sizes: `rows` for few and for many pairs."""
  num_pairs = ids.max_shape[0]
  if num_pairs <= count: return ids.reshape(-1, 1).contiguous()
  rows = sizes[num_pairs > 16 * count]
  num_groups = (num_pairs + count * (rows - 1)) // rows                 # at most
  expert, pair = Tensor.arange(count), Tensor.arange(num_pairs)
  def sums(x: Tensor) -> Tensor: return x.sum(1, dtype=dtypes.int32)
  groups = ((sums(ids == expert.unsqueeze(1)) + rows - 1) // rows).contiguous()   # (E,), of each expert
  before = sums((expert < ids.unsqueeze(1)).where(groups, 0))           # (P,), groups of earlier experts
  rank = sums((ids == ids.unsqueeze(1)) & (pair < pair.unsqueeze(1)))   # (P,), earlier pairs of the expert
  place = (before * rows + rank).contiguous()                           # (P,), a pair's place in the groups
  places = Tensor.arange(num_groups * rows).unsqueeze(1)
  targets = (sums((place == places).where(pair - num_pairs, 0)) + num_pairs).reshape(-1, rows).contiguous()
  return ids[targets[:, :1].minimum(num_pairs - 1)].cat(targets, dim=1).contiguous()   # without pairs: any expert


class MixtureLayer(VariantLayer):
  """A transformer block with experts and, with config.has_shared_expert, an MLP for all tokens: see `mlp`."""
  def make_mlp(self) -> None:
    config, backend = self.config, self.backend
    count, size = config.num_experts, config.moe_intermediate_size
    self.router = self.linear(self.backend.Linear, config.hidden_size, {"mlp.gate": count}, config.expert_bias)

    if not isinstance(backend, MixtureBackend):
      raise InputError(f"backend: {type(backend).__name__} has no experts: leave it out")

    def experts(names: list[str], in_features: int, out_features: int) -> Any:
      sources = [f"{self.name}.mlp.experts.{i}.{name}_proj" for i in range(count) for name in names]
      rows = dict.fromkeys(sources, count * out_features // len(sources))
      return backend.Experts(in_features, rows, config.expert_bias, self.dtype, num_experts=count)
    self.gate_up = experts(["gate_up"] if config.expert_bias else ["gate", "up"], config.hidden_size, 2 * size)
    self.down = experts(["down"], size, config.hidden_size)
    if not config.has_shared_expert: return
    super().make_mlp()
    self.shared_gate = self.linear(backend.Linear, config.hidden_size, {"mlp.shared_expert_gate": 1}, False)

  def activate(self, x: Tensor) -> Tensor:
    """Return the activations, (P, size), for x, (P, 2 * size): gate, then up or, in gpt-oss, alternating."""
    alpha, limit = self.config.swiglu_alpha, self.config.swiglu_limit
    if not alpha:
      gate, up = x.float().chunk(2, 1)
      return (getattr(gate, self.config.activation)() * up).cast(x.dtype).contiguous()
    both = x.float().unflatten(1, (-1, 2))
    gate, up = both[:, :, 0].minimum(limit), both[:, :, 1].clamp(-limit, limit)
    return ((up + 1) * gate * (alpha * gate).sigmoid()).cast(x.dtype).contiguous()

  def mlp(self, h: Tensor) -> Tensor:
    T, k = h.shape[0], self.config.num_experts_per_tok
    ids, weights = choose_experts(self.router(h, dtype=dtypes.float32), k, self.config.norm_topk_prob)
    row_groups = self.gate_up.group_rows(ids)
    activations = self.activate(self.gate_up.multiply(h, row_groups=row_groups, count=T * k))
    outputs = self.down.multiply(activations, row_groups=row_groups, count=T * k)   # (T * k, hidden)
    out = (outputs.float().unflatten(0, (T, k)) * weights.unsqueeze(2)).sum(1)
    if self.config.has_shared_expert: out = out + super().mlp(h) * self.shared_gate(h, dtype=dtypes.float32).sigmoid()
    return out.cast(h.dtype).contiguous()


# RoPE with more types of scaling than the core's

def scaled_rope_table(config: ModelConfig, rope: JsonObject, length: int) -> Tensor:
  """Return cosines and sines, (length, 2, D / 2), of a model with at most `length` tokens. rope: rope_parameters of
  config.json. The last dimensions of each half are plain if a part of a head rotates."""
  scale = 1.0
  size = int(config.head_dim * rope.get("partial_rotary_factor", 1))
  if rope["rope_type"] in SCALINGS:
    factors, scale = SCALINGS[rope["rope_type"]](rope, size // 2, length)
    if rope.get("attention_factor") is not None: scale = rope["attention_factor"]
    rope = {**rope, "rope_type": "factors", "factors": factors}
  config_of_part = dataclasses.replace(config, head_dim=size, rope_theta=rope["rope_theta"], rope_scaling=rope)
  cos, sin = (rope_table(config_of_part, length) * scale).chunk(2, 1)   # (length, 1, size / 2) each
  plain = None, None, (0, (config.head_dim - size) // 2)
  return cos.pad(plain, value=1.0).cat(sin.pad(plain), dim=1).contiguous()


def yarn(rope: JsonObject, count: int, length: int) -> tuple[np.ndarray, float]:
  """Peng et al. 2023: divide frequencies with few rotations by factor, and scale q and k."""
  factor, original = rope["factor"], rope["original_max_position_embeddings"]
  def dimension(rotations: float) -> float:   # with this many rotations over the original length
    return count * math.log(original / (rotations * 2 * math.pi)) / math.log(rope["rope_theta"])
  def mscale(m: float) -> float: return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1
  low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
  if rope.get("truncate", True): low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, 2 * count - 1)
  ramp = np.clip((np.arange(count) - low) / (high - low or 0.001), 0, 1)
  scales = [rope.get(name, 0) for name in ("mscale", "mscale_all_dim")]
  return 1 / (ramp / factor + 1 - ramp), mscale(scales[0]) / mscale(scales[1]) if all(scales) else mscale(1)


def longrope(rope: JsonObject, count: int, length: int) -> tuple[np.ndarray, float]:
  """Ding et al. 2024: factors for each frequency, others if the model may see more than its original length."""
  original = rope["original_max_position_embeddings"]
  scale = math.sqrt(1 + math.log(rope["factor"]) / math.log(original)) if rope["factor"] > 1 else 1.0
  return np.array(rope["long_factor" if length > original else "short_factor"]), scale


SCALINGS = {"yarn": yarn, "longrope": longrope}


# Models

class LlamaVariant(Llama):
  """A model whose layers have options."""
  config: VariantConfig
  Layer: Any = staticmethod(lambda config, index, *others: config.layers[index](config, index, *others))

  def __init__(self, config: VariantConfig, dtype: DType, backend: Backend, devices: Devices):
    is_whole = any(config.norms[1::2]) or config.qk_norm == "all" or config.fused or config.has_sinks
    if len(devices.shards) > 1 and (is_whole or {*config.layers} != {VariantLayer}):
      check_one_device(devices, ": this model has experts, recurrent layers, learned positions, sinks, "
                       "norms of whole outputs, or q, k and v or gate and up in one matrix")
    check(dtype != dtypes.float16 or not config.overflows_float16, "dtype='float16' overflows in this model: use "
          "'auto', 'bfloat16' or 'float32'", "float16")
    super().__init__(config, dtype, backend, devices)
    if config.norm_offset is not None: self.norm.weight = Tensor.empty(config.hidden_size, dtype=dtypes.float32)

  def arrange(self, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's tensors with the names and shapes of this model's modules. The matrices of all experts may
    be in one tensor, (count, out, in) or, in gpt-oss, (count, in, out)."""
    renamed = {functools.reduce(lambda text, parts: text.replace(*parts), self.config.renamed.items(), name): x
               for name, x in tensors.items()}
    for match in filter(None, map(ALL_EXPERTS.fullmatch, [*renamed])):
      experts, matrix, suffix = match.groups("weight")
      names = [matrix] if self.config.expert_bias else matrix.split("_")
      matrices = renamed.pop(match[0]).split([f"{experts}.{i}.{name}_proj.{suffix}"
                                              for i in range(self.config.num_experts) for name in names])
      renamed |= {x: y.T if self.config.expert_bias and suffix == "weight" else y for x, y in matrices.items()}
    return renamed

  def ropes(self, length: int) -> list[Tensor]:
    return [scaled_rope_table(self.config, rope, length) for rope in self.config.ropes]

  def embed(self, ids: Tensor, tokens: Tensor) -> Tensor:
    x = super().embed(ids, tokens)
    if self.config.unit_embeddings: x = nn.RMSNorm(int(x.shape[1]), self.config.rms_norm_eps, False)(x).contiguous()
    return x if self.config.embedding_multiplier == 1 else x * self.config.embedding_multiplier

  def __call__(self, *inputs: Any) -> Tensor:
    logits = super().__call__(*inputs)
    if self.config.logits_scale != 1: logits = logits * self.config.logits_scale
    cap = self.config.logits_cap
    return (logits / cap).tanh() * cap if cap else logits


class Embedder(Llama):
  """A model without lm_head: returns float32 hidden states, (S, hidden), after the final norm, in place of logits. An
  embedding is the one of the last token."""
  def __init__(self, config: ModelConfig, dtype: DType, backend: Backend, devices: Devices):
    check_one_device(devices, " for an embedding model")
    super().__init__(dataclasses.replace(config, tie_word_embeddings=True), dtype, backend, devices)
    self.lm_head = lambda h, dtype: h.cast(dtype).contiguous()   # type: ignore[assignment]

  __call__ = Llama.__call__   # hidden states are not scaled as LlamaVariant's logits
