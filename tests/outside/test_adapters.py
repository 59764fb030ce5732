"""Adapters that PEFT writes (pip install --group formats), merged while a model loads or chosen by a request. The
reference is PEFT's own model."""
import numpy as np
import pytest
from helpers.data import read_data
from helpers.engines import ENGINE, PROMPT_IDS, LogitsRecorder
from helpers.models import tiny_model

from tinyvllm import LLM, LoRARequest



@pytest.mark.parametrize("architecture,options", read_data("adapters.json")["peft"])
def test_adapter_gives_the_ids_and_logits_of_peft(tmp_path, architecture, options):
  import peft
  import torch
  import transformers
  kind = architecture.removesuffix("ForCausalLM").lower()
  folder = tiny_model(tmp_path / "model", architectures=[architecture], model_type=kind, head_dim=8)
  torch.manual_seed(0)
  plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
  model = peft.get_peft_model(plain, peft.LoraConfig(r=8, task_type="CAUSAL_LM", **options))
  for name, x in model.named_parameters():
    if "lora_" in name: torch.nn.init.normal_(x, std=0.3)
  model.save_pretrained(tmp_path / "adapter")
  ids, logits = [*PROMPT_IDS], []
  with torch.no_grad():
    for _ in range(8):
      logits.append(model(torch.tensor([ids])).logits[0, -1].numpy())
      ids.append(int(logits[-1].argmax()))
  path = str(tmp_path / "adapter")
  for llm_options, fields in (({"merge_lora": path}, {}),
                              ({"enable_lora": True}, {"lora_request": LoRARequest("a", 1, path)})):
    out, actual = LogitsRecorder(LLM(folder, **llm_options, **ENGINE)).generate(PROMPT_IDS, 8, **fields)
    assert out == ids[len(PROMPT_IDS):]
    np.testing.assert_allclose(actual, logits, atol=1e-4)
