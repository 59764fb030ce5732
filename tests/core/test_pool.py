"""The size of the KV cache: chosen by free memory, set by the user, filled to the last block."""
import logging
import random
import re

import pytest
from helpers.engines import ENGINE, check_invariants, run_to_end
from helpers.models import tiny_model
from helpers.reference import reference_greedy
from helpers.requests import greedy, ids_of, prompt, tokens
from tinygrad import nn

from tinyvllm import LLM, SamplingParams
from tinyvllm.runner import allocate_kv_caches
from tinyvllm_extra.options import LLMConfig

BS = ENGINE["block_size"]


@pytest.fixture
def set_free_memory(llm, monkeypatch):
  """A function that sets the device's free bytes."""
  kind = type(llm.backend)
  return lambda num_bytes: monkeypatch.setattr(kind, "free_memory", lambda backend, device: num_bytes)


def test_pool_size_is_all_sequences_or_as_many_as_fit(folder, llm, set_free_memory):
  """The null block is not counted in either case."""
  one = ENGINE["max_model_len"] // BS
  assert llm.get_metrics()["blocks_free"] == ENGINE["max_num_seqs"] * one
  weights = sum(x.nbytes() for module in llm.runner.model.modules() for x in nn.state.get_parameters(module))
  block = sum(x.nbytes() for cache in llm.runner.kv_caches for x in cache) // (ENGINE["max_num_seqs"] * one + 1)
  for blocks in (one + 1, one + 5):
    set_free_memory(weights + blocks * block)
    engine = LLM(folder, gpu_memory_utilization=1.0, **ENGINE)
    assert engine.get_metrics()["blocks_free"] == blocks - 1 and engine.max_model_len == ENGINE["max_model_len"]
  set_free_memory(weights + one * block)
  with pytest.raises(ValueError, match=f"lower max_model_len to {(one - 1) * BS},"):
    LLM(folder, gpu_memory_utilization=1.0, **ENGINE)
  for left in (0, block, 2 * block - 1):   # no block next to the null block: no length fits
    set_free_memory(weights + left)
    with pytest.raises(ValueError, match=r"^max_model_len=128 needs .* gpu_memory_utilization=1.0 leaves 0.00 GiB: "
                                         "raise gpu_memory_utilization"):
      LLM(folder, gpu_memory_utilization=1.0, **ENGINE)


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
  assert f"= {fits} tokens" in warning.message and warning.message.endswith(" sequences of 4096")
  ids = random.Random(1).choices(range(3, 256), k=fits - 1)
  output, = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
  assert output.outputs[0].token_ids == reference_greedy(model, ids, 1) and output.outputs[0].finish_reason == "length"
  with pytest.raises(ValueError, match=f"maximum context length is {fits} tokens"):
    llm.generate({"prompt_token_ids": ids + [5]})


@pytest.fixture
def num_pool_blocks(llm):
  """A function that returns the pool size for `free` bytes and sequences of up to 8 blocks, null block included."""
  def num_pool_blocks(free):
    caches = allocate_kv_caches(llm.runner.model, LLMConfig(block_size=BS, max_model_len=8 * BS), free)
    return caches[0][0].shape[0]
  return num_pool_blocks


@pytest.fixture
def block_bytes(llm):
  config = llm.model_config
  return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * BS * 4


def test_pool_holds_max_model_len_and_null_block(num_pool_blocks, block_bytes):
  assert num_pool_blocks(9 * block_bytes) == 9
  with pytest.raises(ValueError, match=f"max_model_len={8 * BS} needs .*: lower max_model_len to {7 * BS},"):
    num_pool_blocks(9 * block_bytes - 1)


@pytest.mark.parametrize("blocks", [2, 13, 32])
def test_pool_below_max_model_len_lowers_it_with_warning(folder, caplog, blocks):
  capacity = (blocks - 1) * BS
  with caplog.at_level(logging.WARNING, "tinyvllm"): engine = LLM(folder, num_gpu_blocks_override=blocks, **ENGINE)
  message, = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
  assert f"{blocks - 1} blocks" in message and f"= {capacity} tokens" in message
  assert f"{capacity / ENGINE['max_model_len']:.1f} sequences" in message
  assert engine.max_model_len == capacity
  with pytest.raises(ValueError, match=f"maximum context length is {capacity} tokens.* has {capacity}"):
    engine.generate(tokens(prompt(capacity)), greedy(1))
  assert not engine.has_unfinished_requests()


def test_pool_of_exactly_max_model_len_keeps_it(folder, caplog):
  blocks = ENGINE["max_model_len"] // BS + 1
  with caplog.at_level(logging.WARNING, "tinyvllm"): engine = LLM(folder, num_gpu_blocks_override=blocks, **ENGINE)
  assert engine.max_model_len == ENGINE["max_model_len"] and not caplog.records


@pytest.mark.parametrize("length", [1, 30, 12 * BS - BS, 12 * BS - 2, 12 * BS - 1])
@pytest.mark.parametrize("overlaps", [False, True])
def test_single_request_filling_the_pool_ends_with_length(small_llm, folder, monkeypatch, length, overlaps):
  monkeypatch.setattr(small_llm.runner, "is_async", overlaps)
  before, room = small_llm.get_metrics()["num_preemptions"], 12 * BS - length
  output, = small_llm.generate(tokens(prompt(length)), greedy(60))
  assert output.outputs[0].finish_reason == "length" and output.finished
  assert ids_of(output) == reference_greedy(folder, prompt(length), room), "the whole pool must be used"
  assert small_llm.get_metrics()["num_preemptions"] == before
  check_invariants(small_llm)


def test_pool_of_one_block_generates_what_fits(folder):
  engine = LLM(folder, num_gpu_blocks_override=2, **ENGINE)
  for i in range(3): engine.add_request(str(i), tokens(prompt(1 + i, i)), greedy(60))
  outputs = run_to_end(engine, 2000)
  assert [ids_of(outputs[str(i)]) for i in range(3)] == [reference_greedy(folder, prompt(1 + i, i), BS - 1 - i)
                                                         for i in range(3)]
  assert {o.outputs[0].finish_reason for o in outputs.values()} == {"length"}
