"""Layers with a state of fixed size instead of K and V, and models that have both kinds. The rows of a tensor, (rows,
...), hold a layer's states: one for each slot, one for padding, then others, see StateRows. A step reads a sequence's
row before the sequence's first token and writes it after the last one."""
import dataclasses, pathlib

import numpy as np
from tinygrad import Tensor, UOp, dtypes
from tinygrad.uop.ops import KernelInfo

from tinyvllm.backend import TOKENS, exclusive, scatter_kernel
from tinyvllm.config import JsonObject, ModelConfig, check
from tinyvllm.llama import Llama
from tinyvllm.runner import Runner, upload, zeros

from .gpt2 import Plain
from .layers import LlamaVariant, VariantConfig, VariantLayer
from .table import make_row

SLOT, POSITION = [[*TOKENS.formats].index(name) for name in ("slot", "position")]
PAIRS = 16   # rows that a copy moves together


@dataclasses.dataclass(frozen=True)
class HybridConfig(VariantConfig):
  """A config with the kind of each layer. kernel_size: of short convolutions."""
  layer_types: tuple[str, ...] = ()   # "full_attention" or "conv"
  kernel_size: int = 3

  def state_shape(self, index: int) -> tuple[int, ...]:
    """Return the shape of a layer's state, (columns, hidden), in float32; () for a layer with K and V."""
    return (self.kernel_size - 1, self.hidden_size) if self.layer_types[index] == "conv" else ()


def state_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
  """Return the shape of each layer's state; () for a layer with K and V."""
  layers = range(config.num_hidden_layers)
  return [config.state_shape(i) if isinstance(config, HybridConfig) else () for i in layers]


class StateRows:
  """The rows of all states of a runner, which are in its KV caches. shapes: see state_shapes."""
  def __init__(self, runner: Runner, shapes: list[tuple[int, ...]], num_rows: int):
    self.padding = runner.config.max_num_seqs   # row
    self.states = [Tensor.empty(num_rows, *shape, dtype=dtypes.float32).contiguous().realize()
                   for shape in shapes if shape]
    rest = iter(self.states)
    for cache, shape in zip(runner.kv_caches, shapes, strict=True): cache += [next(rest)] if shape else []
    self.rows = zeros(PAIRS), zeros(PAIRS)   # from, to
    self.graph = runner.model.devices.jit(self.run)
    self.graph.cnt = 1   # capture at the first call

  def run(self) -> None:
    Tensor.realize(*[x.custom_kernel(self.rows[1], x[self.rows[0]].contiguous(), fxn=scatter_kernel)[0]
                     for x in self.states])

  def copy(self, pairs: list[tuple[int, int]]) -> None:
    """Copy rows in the order of the device's other work. pairs: from and to; no row is in two of them."""
    for i in range(0, len(pairs), PAIRS):
      rows = np.full((PAIRS, 2), self.padding, np.int32)
      rows[:len(pairs[i:i + PAIRS])] = pairs[i:i + PAIRS]
      for tensor, column in zip(self.rows, rows.T, strict=True): upload(tensor, column.copy())
      with exclusive: self.graph()


def past_kernel(past: UOp, x: UOp, state: UOp, tokens: UOp) -> UOp:
  """Collect the inputs of a causal convolution before each token: of tokens of this step or of the state, zeros before
  the first token. past: (T, columns, hidden). x: (T, hidden). state: (rows, columns, hidden). tokens: (words, T)."""
  T, columns, hidden = past.max_shape
  t, j, h = [UOp.range(n, i) for i, n in enumerate((T, columns, hidden))]
  back = columns - j   # distance from t in tokens
  def is_same(n): return (t >= n) & tokens[SLOT, (t - n).maximum(0)].load().eq(tokens[SLOT, t].load())
  earlier = sum([is_same(n).cast(dtypes.weakint) for n in range(1, columns + 1)], UOp.const(0))   # in this step
  own = x.base.index(((t - back).maximum(0) * hidden + h).valid(is_same(back))).load().float()
  row = tokens[SLOT, t].load().cast(dtypes.weakint) % state.max_shape[0]
  stored = state.base.index(((row * columns + (j + earlier) % columns) * hidden + h).valid(earlier < back)).load()
  value = (tokens[POSITION, t].load().cast(dtypes.weakint) >= back).where((earlier >= back).where(own, stored), 0.0)
  return past[t, j, h].store(value).end(t, j, h).sink(arg=KernelInfo(name="past"))


def conv_kernel(out: UOp, state: UOp, past: UOp, x: UOp, weight: UOp, tokens: UOp) -> UOp:
  """Compute a causal convolution for each channel, and write the state after each sequence's last token. weight:
  (hidden, 1, kernel_size). Other arguments: see past_kernel."""
  T, columns, hidden = past.max_shape
  t, h = [UOp.range(n, i) for i, n in enumerate((T, hidden))]
  inputs = [*[past[t, j, h].load() for j in range(columns)], x[t, h].load().float()]
  total = sum([value * weight[h, 0, j].load().float() for j, value in enumerate(inputs)], UOp.const(0.0))
  slot = tokens[SLOT, t].load()
  is_last = (t >= T - 1) | slot.ne(tokens[SLOT, (t + 1).minimum(T - 1)].load())
  row = slot.cast(dtypes.weakint) % state.max_shape[0]
  stores = [state.base.index(((row * columns + j) * hidden + h).valid(is_last)).store(inputs[j + 1])
            for j in range(columns)]
  stores.append(out[t, h].store(total.cast(out.dtype)))
  return UOp.group(*stores).end(t, h).sink(arg=KernelInfo(name="conv"))


def causal_conv(x: Tensor, state: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
  """Return the convolution of each channel over a sequence's tokens, (T, hidden), and update the states in place."""
  past = Tensor.empty(x.shape[0], *state.shape[1:], dtype=dtypes.float32).custom_kernel(
    x, state, tokens, fxn=past_kernel)[0]
  return Tensor.empty(*x.shape, dtype=x.dtype).custom_kernel(state, past, x, weight, tokens, fxn=conv_kernel)[0]


class HybridLayer(VariantLayer):
  """A transformer block whose attention may be a gated short convolution (LFM2): out_proj(C * conv(B * x))."""
  config: HybridConfig

  def make_attention(self) -> None:
    config, index = self.config, int(self.name.split(".")[-1])
    self.has_kv = not config.state_shape(index)
    self.options = *self.options, self.has_kv
    if self.has_kv: return super().make_attention()
    hidden = config.hidden_size
    self.in_proj = self.linear(self.backend.Linear, hidden, {"conv.in_proj": 3 * hidden}, False)
    self.conv = Plain(f"{self.name}.conv.conv", (hidden, 1, config.kernel_size), self.dtype)
    self.out_proj = self.linear(self.backend.Linear, hidden, {"conv.out_proj": hidden}, False)

  def attention(self, h: Tensor, cache: list[Tensor], ropes: list[Tensor], tokens: Tensor,
                block_tables: Tensor) -> Tensor:
    if self.has_kv: return super().attention(h, cache, ropes, tokens, block_tables)
    b, c, x = self.in_proj(h).chunk(3, 1)                               # (T, hidden) each
    x = causal_conv((b.float() * x).contiguous(), cache[0], self.conv.weight, tokens)
    return self.out_proj((c * x).cast(h.dtype).contiguous())


NAMES = {"operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "out_proj": "o_proj",
         "q_layernorm": "q_norm", "k_layernorm": "k_norm", "feed_forward": "mlp", "w1": "gate_proj", "w3": "up_proj",
         "w2": "down_proj", "embedding_norm": "norm"}   # LFM2's names -> LLaMA's


class Hybrid(LlamaVariant):
  """A model with attention in some layers, and a recurrent state in the others."""
  Layer = HybridLayer
  config: HybridConfig
  config_class = HybridConfig
  one_device = " for models with recurrent layers"

  def arrange(self, tensors: dict[str, object]) -> dict[str, object]:
    return {name if ".conv." in name else ".".join(NAMES.get(x, x) for x in name.split(".")): tensor
            for name, tensor in tensors.items()}


def lfm2(hf: JsonObject) -> JsonObject:
  attention = hf.get("full_attn_idxs")
  types = hf.get("layer_types") or ["conv" if attention is not None and i not in attention else "full_attention"
                                    for i in range(hf["num_hidden_layers"])]
  check(not hf.get("conv_bias"), "model: conv_bias=True is not supported; supported: false")
  return {"layer_types": tuple(types), "kernel_size": hf.get("conv_L_cache", 3), "qk_norm": "head"}


def read_lfm2(hf: JsonObject, path: pathlib.Path) -> tuple[ModelConfig, type[Llama]]:
  """Read the config.json of LFM2 (Liquid AI 2025, arXiv:2511.23404)."""
  hf = {name: value for name, value in hf.items() if value is not None}
  size = hf.get("intermediate_size") or hf.get("block_ff_dim") or 12288
  if hf.get("block_auto_adjust_ff_dim", True):
    multiple = hf.get("block_multiple_of", 256)
    size = int(int(2 * size / 3) * hf.get("block_ffn_dim_multiplier", 1.0))
    size = -(-size // multiple) * multiple
  tied = hf.get("tie_word_embeddings", hf.get("tie_embedding", True))
  fields = {"rms_norm_eps": hf.get("norm_eps", 1e-5), "intermediate_size": size, "tie_word_embeddings": tied}
  return make_row(lfm2, Hybrid)({"rope_theta": 1e6, **hf, **fields}, path)
