"""Checkpoints written by the libraries that users quantize with (pip install '.[formats]'). The reference is a plain
numpy LLaMA in float64 with the weights that the library itself dequantizes."""
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.library_models import check_logits, torch_llama
from helpers.models import random_weights, tiny_config, tiny_model
from helpers.quantized_models import SIZES

from tinyvllm_extra.weights import open_checkpoint


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
