"""The size of the KV cache: chosen by free memory, set by the user, filled to the last block."""
import random
import re

import pytest
from helpers.engines import BS, ENGINE, check_invariants, greedy, ids_of, prompt, tokens
from helpers.models import tiny_model
from helpers.reference import reference_greedy
from tinygrad import nn

from tinyvllm import LLM


@pytest.fixture
def set_free_memory(llm, monkeypatch):
  """A function that sets the device's free bytes."""
  return lambda num_bytes: monkeypatch.setattr(type(llm.backend).memory, "free", lambda devices: num_bytes)


def test_pool_size_is_all_sequences_or_as_many_as_fit(folder, llm, set_free_memory):
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


def test_pool_too_small_error_suggests_valid_max_model_len(tmp_path, set_free_memory):
  model = tiny_model(tmp_path, max_position_embeddings=2**17)
  set_free_memory(20 * 2**20)   # less than the 32 MiB needed
  options = {**ENGINE, "block_size": 16, "max_num_seqs": 2, "max_model_len": 2**17 - 16}
  with pytest.raises(ValueError, match=r"gpu_memory_utilization") as error: LLM(model, **options)
  pattern = (r"max_model_len=(\d+) needs ([\d.]+) GiB .*gpu_memory_utilization=0.9 leaves ([\d.]+) GiB: "
             r"lower max_model_len to (\d+)")
  match = re.search(pattern, str(error.value))
  assert match and int(match[1]) == 2**17 - 16 and float(match[2]) > float(match[3]), str(error.value)
  length = int(match[4])
  assert 0 < length < 2**17
  assert LLM(model, **options | {"max_model_len": length}).get_metrics()["blocks_free"] >= length // 16
  with pytest.raises(ValueError, match="needs"): LLM(model, **options | {"max_model_len": length + length // 10})


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


@pytest.mark.parametrize("length", [1, 30, 12 * BS - BS, 12 * BS - 2, 12 * BS - 1])
@pytest.mark.parametrize("overlaps", [False, True])
def test_single_request_filling_the_pool_ends_with_length(small_llm, folder, monkeypatch, length, overlaps):
  monkeypatch.setattr(small_llm.runner, "is_async", overlaps)
  before = small_llm.get_metrics()["num_preemptions"]
  output, = small_llm.generate(tokens(prompt(length)), greedy(60))
  assert output.outputs[0].finish_reason == "length" and output.finished
  assert ids_of(output) == reference_greedy(folder, prompt(length), 12 * BS - length), "the whole pool must be used"
  assert small_llm.get_metrics()["num_preemptions"] == before
  check_invariants(small_llm)
