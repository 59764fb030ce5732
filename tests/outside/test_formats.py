"""Checkpoints written by the libraries that users quantize with (pip install '.[formats]'). The reference is a plain
numpy LLaMA in float64 with the weights that the library itself dequantizes."""
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.engines import ENGINE, LogitsRecorder
from helpers.models import random_weights, tiny_config, tiny_model, write_safetensors
from helpers.reference import reference_greedy, reference_logits

from tinyvllm import LLM
from tinyvllm_extra.weights import open_checkpoint

pytestmark = pytest.mark.formats

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
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


# compressed-tensors

def write_compressed(folder: Path, quantization_format: str, **arguments: Any) -> dict[str, np.ndarray]:
  """Write a model as llm-compressor does, with min-max scales. Return the weights that the library decompresses.
  arguments: of QuantizationArgs."""
  from compressed_tensors.compressors import ModelCompressor
  from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
  from compressed_tensors.quantization.utils import calculate_qparams
  from safetensors.torch import save_file
  weights = QuantizationArgs(**arguments)
  group = {"targets": ["Linear"], "weights": weights}
  model = torch_llama()
  apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"]))
  for module in model.modules():
    if not hasattr(module, "weight_scale"): continue
    by_group = module.weight.detach().unflatten(1, (-1, weights.group_size or module.in_features))
    scale, zero_point = calculate_qparams(by_group.amin(2), by_group.amax(2), weights)
    module.weight_scale.data = scale
    if hasattr(module, "weight_zero_point"): module.weight_zero_point.data = zero_point
  compressor = ModelCompressor.from_pretrained_model(model, quantization_format)
  compressor.compress_model(model)
  tiny_model(folder, **SIZES)
  save_file(model.state_dict(), folder / "model.safetensors")
  compressor.update_config(folder)
  compressor.decompress_model(model)
  names = random_weights(tiny_config(**SIZES))
  return {name: x.float().numpy() for name, x in model.state_dict().items() if name in names}


# name: arguments of write_compressed, description
COMPRESSED: dict[str, tuple[dict[str, Any], str]] = {
  "int4 per group": ({"quantization_format": "pack-quantized", "num_bits": 4, "group_size": 32}, "int4, groups of 32"),
  "int4 per group, asymmetric": ({"quantization_format": "pack-quantized", "num_bits": 4, "group_size": 32,
                                  "symmetric": False}, "int4, groups of 32"),
  "int8 per channel": ({"quantization_format": "int-quantized", "num_bits": 8, "strategy": "channel"},
                       "int8, per channel"),
  "packed int8 per channel": ({"quantization_format": "pack-quantized", "num_bits": 8, "strategy": "channel"},
                              "int8, per channel")}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_logits_equal_decompressed_model(tmp_path, name):
  arguments, description = COMPRESSED[name]
  check_logits(tmp_path, write_compressed(tmp_path, **arguments))
  text = f"compressed-tensors {description}; embed_tokens, lm_head float32"
  assert open_checkpoint(tmp_path).describe() == text
