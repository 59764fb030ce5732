"""Tables of rotary position embeddings (Su et al. 2021) and the scaling methods of their frequencies."""
import math
from typing import Any

import numpy as np
from tinygrad import Tensor

from tinyvllm.config import ModelConfig


def rope_table(config: ModelConfig, rope: dict[str, Any] | None, length: int) -> Tensor:
  """Return cosines and sines, (length, 2, D / 2), of a model with at most `length` tokens. rope: rope_parameters of
  config.json, or None for no rotation. The last dimensions of each half are plain if a part of a head rotates."""
  half = config.head_dim // 2
  table = np.stack([np.ones((length, half)), np.zeros((length, half))], 1)   # no rotation
  if rope:
    size = int(config.head_dim * rope.get("partial_rotary_factor", 1))
    freqs = rope["rope_theta"] ** -(np.arange(0, size, 2) / size)       # (size / 2,)
    freqs, factor = SCALINGS[rope["rope_type"]](freqs, rope, length)
    angles = np.outer(np.arange(length), freqs)                         # (length, size / 2)
    table[:, :, :size // 2] = np.stack([np.cos(angles), np.sin(angles)], 1) * factor
  return Tensor(table.astype(np.float32))


def linear(freqs: np.ndarray, rope: dict[str, Any], length: int) -> tuple[np.ndarray, float]:
  return freqs / rope["factor"], 1


def llama3(freqs: np.ndarray, rope: dict[str, Any], length: int) -> tuple[np.ndarray, float]:
  """Divide low frequencies by factor, keep high ones, interpolate between."""
  rotations = rope["original_max_position_embeddings"] * freqs / (2 * np.pi)
  return freqs * np.interp(rotations, [rope["low_freq_factor"], rope["high_freq_factor"]], [1 / rope["factor"], 1]), 1


def yarn(freqs: np.ndarray, rope: dict[str, Any], length: int) -> tuple[np.ndarray, float]:
  """Peng et al. 2023: divide frequencies with few rotations by factor, and scale q and k."""
  factor, size = rope["factor"], len(freqs)
  original = rope["original_max_position_embeddings"]
  def dimension(rotations: float) -> float:   # with this many rotations over the original length
    return size * math.log(original / (rotations * 2 * math.pi)) / math.log(rope["rope_theta"])
  def mscale(m: Any) -> float: return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1
  low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
  if rope.get("truncate", True): low, high = math.floor(low), math.ceil(high)
  low, high = max(low, 0), min(high, 2 * size - 1)
  ramp = np.clip((np.arange(size) - low) / (high - low or 0.001), 0, 1)
  scales = [rope.get(name) for name in ("mscale", "mscale_all_dim")]
  default = mscale(scales[0]) / mscale(scales[1]) if all(scales) else mscale(1)
  attention_factor = rope.get("attention_factor")
  return freqs / factor * ramp + freqs * (1 - ramp), default if attention_factor is None else attention_factor


def longrope(freqs: np.ndarray, rope: dict[str, Any], length: int) -> tuple[np.ndarray, float]:
  """Ding et al. 2024: factors for each frequency, others if the model may see more than its original length."""
  original = rope["original_max_position_embeddings"]
  factor = rope.get("attention_factor")
  if factor is None: factor = math.sqrt(1 + math.log(rope["factor"]) / math.log(original)) if rope["factor"] > 1 else 1
  return freqs / np.array(rope["long_factor" if length > original else "short_factor"]), factor


SCALINGS = {"default": lambda freqs, *_: (freqs, 1), "linear": linear, "llama3": llama3, "yarn": yarn,
            "longrope": longrope, "factors": lambda freqs, rope, _: (freqs / rope["factors"], 1)}


def read_rope(hf: dict[str, Any]) -> dict[str, Any]:
  """Return config.json's parameters of RoPE as transformers 5 writes them, with all that its type needs."""
  rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
  length = hf.get("original_max_position_embeddings") or hf.get("max_position_embeddings")   # Phi-3 has the former
  kind = rope.get("rope_type") or rope.get("type") or "default"
  values = {"rope_theta": hf.get("rope_theta") or 10000.0, "partial_rotary_factor": hf.get("partial_rotary_factor", 1),
            "original_max_position_embeddings": length, **rope, "rope_type": "longrope" if kind == "su" else kind}
  if "original_max_position_embeddings" in hf: values["original_max_position_embeddings"] = length   # has priority
  original = values["original_max_position_embeddings"]
  if values.get("factor") is None: values["factor"] = hf.get("max_position_embeddings", 1) / (original or 1)
  return values
