"""Models for the libraries that users quantize with, compared by logits."""
from pathlib import Path
from typing import Any

import numpy as np

from tinyvllm import LLM
from .engines import ENGINE, LogitsRecorder
from .models import random_weights, tiny_config, tiny_model, write_safetensors
from .quantized_models import SIZES
from .reference import reference_greedy, reference_logits


PROMPT = [5, 17, 99, 250, 31]


def torch_llama(sizes: dict[str, Any] = SIZES) -> Any:
  """Return a transformers model with the weights of `tiny_model`."""
  import torch
  from transformers import LlamaConfig, LlamaForCausalLM
  model = LlamaForCausalLM(LlamaConfig(**tiny_config(**sizes)))
  model.load_state_dict({name: torch.tensor(x) for name, x in random_weights(tiny_config(**sizes)).items()})
  return model


def check_logits(folder: Path, weights: dict[str, np.ndarray], sizes: dict[str, Any] = SIZES, **options: Any) -> Any:
  """Check that the checkpoint in `folder` gives the same greedy ids as `weights`, and in float32 logits within
  1e-3 of theirs. Return the engine."""
  plain = tiny_model(folder / "dequantized", **sizes)
  write_safetensors(plain / "model.safetensors", weights)
  engine = LLM(folder, **ENGINE, **options)
  ids, logits = LogitsRecorder(engine).generate(PROMPT, 8)
  assert ids == reference_greedy(plain, PROMPT, 8)
  np.testing.assert_allclose(logits, reference_logits(plain, [*PROMPT, *ids])[len(PROMPT) - 1:-1], atol=1e-3)
  return engine
