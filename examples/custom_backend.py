"""A custom backend whose attention loops over the tokens of a step. Its output equals the default backend's.

python examples/custom_backend.py [MODEL]"""
import math
import sys

from tinygrad import Tensor

from tinyvllm import LLM, Backend, SamplingParams
from tinyvllm.backend import TOKENS, scatter_kernel


class LoopBackend(Backend):
  """Replaces attention; inherits linear layers, norms and the sampler, which are plain tinygrad."""
  def attend(self, qkv: Tensor, cache: list[Tensor], rope: Tensor, tokens: Tensor, block_tables: Tensor,
             num_heads: int, scale: float = 0, window: int = 0, cap: float = 0, sinks: Tensor | None = None) -> Tensor:
    block_size, KV, D = [int(n) for n in cache[0].shape[1:]]
    position, slot, block = [TOKENS.read(tokens)[name] for name in ("position", "slot", "block")]   # (T,) each
    x = qkv.reshape(len(position), -1, D)                               # (T, H + 2 KV, D)
    cos, sin = rope[position].chunk(2, 1)                               # (T, 1, D / 2) each
    a, b = x[:, :-KV].float().chunk(2, 2)                               # all except V: (T, H + KV, D / 2) each
    rotated = Tensor.cat(a * cos - b * sin, b * cos + a * sin, dim=2)   # (T, H + KV, D)
    rows = (block * block_size + position % block_size).contiguous()    # cache slots of the new K and V
    new = [rotated[:, num_heads:].cast(qkv.dtype).contiguous(), x[:, -KV:].contiguous()]
    keys, values = [part.custom_kernel(rows, y, fxn=scatter_kernel)[0] for part, y in zip(cache, new, strict=True)]
    outputs = []
    for t in range(len(position)):
      k, v = [part[block_tables[slot[t]]].flatten(0, 1).float() for part in (keys, values)]   # (length, KV, D) each
      distance = (position[t] - Tensor.arange(len(k))).reshape(-1, 1, 1)
      is_visible = (distance >= 0) & (distance < (window or len(k)))
      q = rotated[t, :num_heads].reshape(KV, -1, D)                     # (KV, G, D)
      scores = q @ k.permute(1, 2, 0) * (scale or D**-0.5)              # (KV, G, length)
      if cap: scores = (scores / cap).tanh() * cap
      scores = is_visible.permute(1, 2, 0).where(scores, -math.inf)
      if sinks is not None: scores = scores.cat(sinks.float().reshape(KV, -1, 1), dim=2)
      weights = scores.softmax()[:, :, :len(k)]
      outputs.append((weights @ is_visible.where(v, 0).transpose(0, 1)).flatten())   # (H * D,)
    return Tensor.stack(*outputs).cast(qkv.dtype).contiguous()


def main() -> None:
  texts = []
  for backend in (None, LoopBackend()):
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else None, backend=backend, max_model_len=64, max_num_batched_tokens=2,
              max_num_seqs=2)
    output, = llm.generate("The cat", SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    texts.append("The cat" + output.outputs[0].text)
  print(f"the output is {'unchanged' if texts[0] == texts[1] else 'different'}:", *dict.fromkeys(texts), sep=" ")


if __name__ == "__main__": main()
