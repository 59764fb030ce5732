"""Mixtures of experts (Shazeer et al. 2017, arXiv:1701.06538): a router chooses the experts, MLPs, that compute a
token's output. Only single devices are supported."""
from typing import Any

from tinygrad import Tensor, dtypes

from tinyvllm.backend import Backend
from tinyvllm.config import InputError

from .layers import VariantLayer


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
