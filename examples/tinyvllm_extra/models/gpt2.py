"""GPT-2 (Radford et al. 2019), the model to read first. Unlike LLaMA it has learned positions instead of RoPE,
LayerNorm instead of RMSNorm, an MLP without gate, and biases everywhere. table.json has its names of tensors."""
from typing import Any

from tinygrad import Tensor
from tinygrad.dtype import DType

from tinyvllm import llama
from tinyvllm.backend import TOKENS, Backend, Devices, Norm

from .layers import LlamaVariant, Plain, VariantConfig, VariantLayer


class LayerNorm(Norm):
  """(x - mean(x)) / std(x), computed in float32, times weight plus bias (Ba et al. 2016), over the last axis."""
  def __init__(self, name: str, size: int, eps: float, dtype: DType):
    super().__init__(name, size, eps, dtype)
    self.bias = Tensor.empty(size, dtype=dtype)

  def load(self, checkpoint: llama.Checkpoint) -> None: super().load(checkpoint)   # see weights.py

  def __call__(self, x: Tensor) -> Tensor:
    return (x.float().layernorm(eps=self.eps) * self.weight + self.bias).cast(x.dtype)


class GPT2Layer(VariantLayer):
  """A transformer block."""
  def norm(self, source: str, size: int) -> Norm:
    return LayerNorm(f"{self.name}.{source}", size, self.config.rms_norm_eps, self.dtype)

  def make_mlp(self) -> None:
    hidden, inner = self.config.hidden_size, self.config.intermediate_size or 4 * self.config.hidden_size
    self.up_proj = self.linear(self.backend.Linear, hidden, {"mlp.up_proj": inner}, True)
    self.down_proj = self.linear(self.backend.Linear, inner, {"mlp.down_proj": hidden}, True)

  def mlp(self, h: Tensor) -> Tensor:
    return self.down_proj(self.up_proj(h).float().gelu().cast(h.dtype).contiguous())   # gelu's tanh approximation


class GPT2(LlamaVariant):
  """GPT-2 on one device."""
  def __init__(self, config: VariantConfig, dtype: DType, backend: Backend, devices: Devices):
    super().__init__(config, dtype, backend, devices)
    self.wpe = Plain("wpe", (config.max_position_embeddings, config.hidden_size), dtype)
    self.norm = LayerNorm("model.norm", config.hidden_size, config.rms_norm_eps, dtype)

  def arrange(self, tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: x.T if name.endswith("_proj.weight") else x   # Conv1D: (in, out). Old checkpoints have masks
            for name, x in super().arrange(tensors).items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}

  def embed(self, ids: Tensor, tokens: Tensor) -> Tensor:
    return (super().embed(ids, tokens) + self.wpe.weight[TOKENS.read(tokens)["position"]]).contiguous()   # (T, hidden)
