"""GPT-2 (Radford et al. 2019), the model to read first. Unlike LLaMA it has learned positions instead of RoPE,
LayerNorm instead of RMSNorm, and biases everywhere. Attributes have Hugging Face's names unless llama.Llama fixes
them."""
import pathlib
from typing import Any

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinyvllm import llama
from tinyvllm.backend import TOKENS, Backend, Devices, Module, Norm
from tinyvllm.config import JsonObject, ModelConfig, check

from .layers import LlamaVariant, VariantConfig

# Field of ModelConfig -> GPT-2's name in config.json
NAMES = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
         "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "rms_norm_eps": "layer_norm_epsilon"}
# The values of config.json that this file computes with; the first one is the default
SUPPORTED = {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
             "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
             "quantization_config": (None,)}
BUFFERS = (".attn.bias", ".attn.masked_bias")   # the causal mask, which old checkpoints store
TRANSPOSED = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")   # Conv1D: (in, out)


class Plain(Module):
  """A weight, (*shape), in the model's dtype. It is never quantized."""
  def __init__(self, name: str, shape: tuple[int, ...], dtype: DType):
    self.sources = {name: shape[0]}
    self.weight = Tensor.empty(*shape, dtype=dtype)

  def load(self, checkpoint: llama.Checkpoint) -> None: super().load(checkpoint)   # see weights.py


class LayerNorm(Plain, Norm):
  """(x - mean(x)) / std(x), computed in float32, times weight plus bias (Ba et al. 2016), over the last axis."""
  def __init__(self, name: str, config: ModelConfig, dtype: DType):
    super().__init__(name, (config.hidden_size,), dtype)
    self.bias = Tensor.empty(config.hidden_size, dtype=dtype)
    self.eps = config.rms_norm_eps

  def __call__(self, x: Tensor) -> Tensor:
    return (x.float().layernorm(eps=self.eps) * self.weight + self.bias).cast(x.dtype)


class GPT2Layer(llama.Layer):
  """A transformer block."""
  def __init__(self, config: ModelConfig, index: int, dtype: DType, backend: Backend):
    self.config, self.backend = config, backend
    hidden, inner = config.hidden_size, config.intermediate_size
    def linear(name, rows, columns): return backend.Linear(columns, {f"h.{index}.{name}": rows}, True, dtype)
    self.ln_1 = LayerNorm(f"h.{index}.ln_1", config, dtype)
    self.c_attn = linear("attn.c_attn", 3 * hidden, hidden)             # q, k and v
    self.attn_c_proj = linear("attn.c_proj", hidden, hidden)
    self.ln_2 = LayerNorm(f"h.{index}.ln_2", config, dtype)
    self.c_fc = linear("mlp.c_fc", inner, hidden)
    self.mlp_c_proj = linear("mlp.c_proj", hidden, inner)

  def __call__(self, x: Tensor, delta: Tensor, cache: list[Tensor], ropes: list[Tensor], tokens: Tensor,
               block_tables: Tensor) -> tuple[Tensor, Tensor]:
    x, h = self.ln_1.add(x, delta)                                      # (T, hidden) each
    h = self.backend.attend(self.c_attn(h), cache, ropes[0], tokens, block_tables, self.config.num_attention_heads)
    x, h = self.ln_2.add(x, self.attn_c_proj(h))
    h = self.c_fc(h).float().gelu().cast(x.dtype).contiguous()          # (T, inner); the tanh approximation of gelu
    return x, self.mlp_c_proj(h)


class GPT2(LlamaVariant):
  """GPT-2 on one device."""
  Layer = GPT2Layer
  one_device = " for GPT-2"

  def __init__(self, config: VariantConfig, dtype: DType, backend: Backend, devices: Devices):
    super().__init__(config, dtype, backend, devices)
    self.wpe = Plain("wpe", (config.max_position_embeddings, config.hidden_size), dtype)
    self.norm = LayerNorm("ln_f", config, dtype)

  def arrange(self, tensors: dict[str, Any]) -> dict[str, Any]:
    renamed = {name.removeprefix("transformer.").replace("wte.", "model.embed_tokens."): x
               for name, x in tensors.items() if not name.endswith(BUFFERS)}
    return {name: x.T if name.endswith(TRANSPOSED) else x for name, x in renamed.items()}

  def embed(self, ids: Tensor, tokens: Tensor) -> Tensor:
    positions = TOKENS.read(tokens)["position"]                         # (T,)
    return (super().embed(ids, tokens) + self.wpe.weight[positions]).contiguous()   # (T, hidden)


def read_gpt2(hf: JsonObject, path: pathlib.Path) -> tuple[VariantConfig, type[GPT2]]:
  """Read config.json's content. Raises InputError for an unsupported value."""
  for name, values in SUPPORTED.items():
    value = hf.get(name, values[0])
    check(value in values, f"{path}: {name}={value!r} must be {' or '.join(map(repr, values))} for GPT-2: choose "
          "another checkpoint")
  fields = {ours: hf[name] for ours, name in NAMES.items() if hf.get(name) is not None}
  defaults = {"intermediate_size": 4 * hf.get("n_embd", 0), "tie_word_embeddings": True}
  core = ModelConfig.from_hf({**defaults, **hf, **fields, "architectures": ["LlamaForCausalLM"]}, path)
  return VariantConfig(**vars(core), ropes=(None,)), GPT2   # no rotation
