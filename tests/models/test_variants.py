"""Variants of LLaMA by logits, against the numpy reference."""
import pytest
from helpers.engines import check_logits
from helpers.models import tiny_model
from helpers.requests import prompt

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
VARIANTS = {
  "LLaMA": {},
  "tied": {"tie_word_embeddings": True},
  "no grouped KV heads": {"num_key_value_heads": None},
  "one KV head of 16": {"num_key_value_heads": 1, "head_dim": 16},
  "all biases": {"attention_bias": True, "mlp_bias": True},
  "rope llama3": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
  "rope linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
  "rope_parameters": {"rope_parameters": {**LLAMA3, "rope_theta": 300.0}, "rope_theta": None},
  "Mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
  "Qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
  "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 12},
  "odd sizes": {"hidden_size": 36, "head_dim": 6, "num_attention_heads": 6, "num_key_value_heads": 3,
                "intermediate_size": 50, "vocab_size": 333, "num_hidden_layers": 3, "rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_variant_equals_reference(tmp_path, variant):
  """A prompt in 3 chunks, then decodes."""
  folder = tiny_model(tmp_path, seed=1, **VARIANTS[variant])
  check_logits(folder, folder, prompt(12), 12, max_num_seqs=4, max_num_batched_tokens=4)   # graphs of 1, 2, 4 tokens
