"""Tables of rotary position embeddings (Su et al. 2021): the core's, and scaling methods that the core lacks."""
import dataclasses, math

import numpy as np
from tinygrad import Tensor

from tinyvllm.config import SUPPORTED, JsonObject, ModelConfig
from tinyvllm.llama import rope_table

NO_ROTATION: JsonObject = {"rope_type": "factors", "factors": math.inf, "rope_theta": 1.0}


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
ROPE_TYPES = (*SUPPORTED["rope_type"], *SCALINGS)


def read_rope(hf: JsonObject) -> JsonObject:
  """Return config.json's parameters of RoPE as transformers 5 writes them, with all that its type needs."""
  rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
  length = hf.get("original_max_position_embeddings") or hf.get("max_position_embeddings")   # Phi-3 has the former
  rope_type = rope.get("rope_type") or rope.get("type") or "default"
  values = {"rope_theta": hf.get("rope_theta") or 10000.0, "partial_rotary_factor": hf.get("partial_rotary_factor", 1),
            "original_max_position_embeddings": length, **rope,
            "rope_type": "longrope" if rope_type == "su" else rope_type}
  if "original_max_position_embeddings" in hf: values["original_max_position_embeddings"] = length   # has priority
  if values.get("factor") is None:
    values["factor"] = hf.get("max_position_embeddings", 1) / (values["original_max_position_embeddings"] or 1)
  return values
