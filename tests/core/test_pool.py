"""The size of the KV cache: chosen by free memory, set by the user, filled to the last block."""
import random

import pytest
from helpers.engines import BS, ENGINE, greedy, prompt, tokens
from helpers.models import tiny_model
from helpers.reference import reference_greedy
from tinygrad import nn

from tinyvllm import LLM


@pytest.fixture
def set_free_memory(llm, monkeypatch):
  """A function that sets the device's free bytes."""
  return lambda num_bytes: monkeypatch.setattr(type(llm.backend).memory, "free", lambda devices: num_bytes)


def test_pool_size_is_all_sequences_or_as_many_as_fit(folder, llm, set_free_memory, tmp_path):
  """The null block is not counted in either case."""
  one = ENGINE["max_model_len"] // BS
  assert llm.get_metrics()["blocks_free"] == ENGINE["max_num_seqs"] * one
  weights = sum(x.nbytes() for module in llm.runner.model.modules() for x in nn.state.get_parameters(module))
  block = sum(x.nbytes() for cache in llm.runner.kv_caches for x in cache) // (ENGINE["max_num_seqs"] * one + 1)
  def load(free):
    set_free_memory(weights + free)
    return LLM(folder, gpu_memory_utilization=1.0, **ENGINE)
  for blocks in (one + 1, one + 5):
    engine = load(blocks * block)
    assert engine.get_metrics()["blocks_free"] == blocks - 1 and engine.max_model_len == ENGINE["max_model_len"]
  for free in (one * block, (one + 1) * block - 1):
    with pytest.raises(ValueError, match=f"lower max_model_len to {(one - 1) * BS},"): load(free)
  message = r"^max_model_len=128 needs .* gpu_memory_utilization=1.0 leaves 0.00 GiB: raise gpu_memory_utilization"
  for free in (0, block, 2 * block - 1):   # no block next to the null block: no length fits
    with pytest.raises(ValueError, match=message): load(free)
  set_free_memory(20 * 2**20)
  with pytest.raises(ValueError, match="=131000 needs 0.03 GiB of KV cache, but gpu.*=0.9 leaves 0.02 GiB: lower max"):
    LLM(tiny_model(tmp_path, max_position_embeddings=2**17), **{**ENGINE, "max_model_len": 131_000})


def test_length_of_the_model_need_not_fit(tmp_path, set_free_memory, caplog):
  """Without max_model_len, the engine starts with the tokens that fit, warns, and refuses longer prompts."""
  model = tiny_model(tmp_path, max_position_embeddings=2**12)
  set_free_memory(400 * 2**10)
  llm = LLM(model, block_size=BS, max_num_seqs=2, max_num_batched_tokens=64)
  fits = llm.max_model_len
  assert 64 < fits < 2**12 and fits == llm.get_metrics()["blocks_free"] * BS
  warning, = [record for record in caplog.records if record.levelname == "WARNING"]
  assert f"= {fits} tokens" in warning.message and " sequences of 4096, " in warning.message
  ids = random.Random(1).choices(range(3, 256), k=fits - 1)
  output, = llm.generate(tokens(ids), greedy(8))
  assert output.outputs[0].token_ids == reference_greedy(model, ids, 1) and output.outputs[0].finish_reason == "length"
  with pytest.raises(ValueError, match=f"maximum context length is {fits} tokens"):
    llm.generate(tokens([*ids, 5]))


@pytest.mark.parametrize("blocks", [2, 13, 32, 33])
def test_pool_below_max_model_len_lowers_it_with_warning(folder, caplog, blocks):
  capacity = (blocks - 1) * BS
  with caplog.at_level("WARNING", "tinyvllm"): engine = LLM(folder, num_gpu_blocks_override=blocks, **ENGINE)
  assert engine.max_model_len == capacity
  messages = [record.getMessage() for record in caplog.records]
  assert len(messages) == (capacity < ENGINE["max_model_len"])
  for message in messages:
    assert f"{blocks - 1} blocks" in message and f"= {capacity} tokens" in message
    assert f"{capacity / ENGINE['max_model_len']:.1f} sequences" in message
  with pytest.raises(ValueError, match=f"maximum context length is {capacity} tokens.* has {capacity}"):
    engine.generate(tokens(prompt(capacity)), greedy(1))
  assert not engine.has_unfinished_requests()
