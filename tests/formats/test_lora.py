"""Errors of adapters that are merged while a model loads; tests/outside/test_adapters.py compares results with PEFT."""
import json

import numpy as np
import pytest
from helpers.commands import FLAGS, error_line, run_command
from helpers.engines import ENGINE, greedy, ids_of, prompt, tokens
from safetensors.numpy import save_file

from tinyvllm import LLM, Backend, InputError

NAME = "base_model.model.model.layers.0.mlp.down_proj"
CONFIG = {"peft_type": "LORA", "lora_alpha": 8, "bias": "none"}


@pytest.fixture
def adapter(tmp_path):
  def make(name=NAME, rows=32, **fields):
    rng = np.random.default_rng(0)
    pair = {f"{name}.lora_{x}.weight": rng.standard_normal(shape, np.float32) for x, shape in
            (("A", (2, 64)), ("B", (rows, 2)))}
    save_file(pair, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({**CONFIG, **fields}))
    return str(tmp_path)
  return make


@pytest.mark.parametrize("fields,message", [
  ({"use_dora": True}, "use_dora=True is not supported: use False"),
  ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' is not supported: use True"),
  ({"alora_invocation_tokens": [5]}, r"alora_invocation_tokens=\[5\] is not supported: use None"),
  ({"bias": "all"}, "bias='all' is not supported: use 'none'"),
  ({"peft_type": "VERA"}, "peft_type='VERA' is not supported: use 'LORA'"),
  ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported: use None"),
  ({"name": "base_model.model.lm_head"}, "tensor base_model.model.lm_head.lora_A.weight is not supported: only "),
  ({"name": NAME.replace("down", "other")}, "layers.0.mlp.other_proj is not a matrix of "),
  ({"rows": 48}, r"layers.0.mlp.down_proj is \[48, 64\], of another model")])
def test_adapter_that_does_not_fit_is_refused(folder, adapter, fields, message):
  with pytest.raises(InputError, match=f"merge_lora.*{message}"): LLM(folder, merge_lora=adapter(**fields), **ENGINE)


def test_half_of_an_adapter_is_refused(folder, adapter, tmp_path):
  path = adapter()
  save_file({f"{NAME}.lora_A.weight": np.zeros((2, 64), np.float32)}, tmp_path / "adapter_model.safetensors")
  with pytest.raises(InputError, match="layers.0.mlp.down_proj lacks lora_A or lora_B"): LLM(folder, merge_lora=path)


def test_layers_of_the_core_are_merged_too(folder, adapter):
  def ids(**options): return ids_of(LLM(folder, **ENGINE, **options).generate(tokens(prompt(9)), greedy(9), False)[0])
  merged = ids(merge_lora=adapter())
  assert merged != ids() and merged == ids(merge_lora=adapter(), backend=Backend())


def test_adapter_changes_outputs_and_cannot_be_in_a_saved_prefix_cache(folder, adapter, tmp_path):
  with LLM(folder, **ENGINE) as llm: before = ids_of(llm.generate(tokens(prompt(9)), greedy(9), False)[0])
  with LLM(folder, merge_lora=adapter(), quantization="int8", **ENGINE) as llm:
    assert ids_of(llm.generate(tokens(prompt(9)), greedy(9), False)[0]) != before
    with pytest.raises(InputError, match="merge_lora: prefix caches"): llm.save_prefix_cache(tmp_path / "cache")
  command = "generate", "the cat", "--model", folder, *FLAGS, "--merge-lora", tmp_path / "missing"
  assert "has no adapter_config.json: name a folder that PEFT wrote" in error_line(run_command(*command))
