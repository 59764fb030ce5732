"""int8 and fp8 KV cache: neither speculative decoding nor the number of devices changes ids; sizes of blocks and pools.
test_backend.py compares ids with a numpy LLaMA's, test_prefix_cache.py saves blocks."""
import math

import pytest
from helpers.engines import ENGINE, greedy, ids_of_batch, prompt
from helpers.models import tiny_config, tiny_model
from tinygrad import dtypes

from tinyvllm import LLM
from tinyvllm.config import ModelConfig
from tinyvllm_extra.kernels import FastBackend
from tinyvllm_extra.options import LLMConfig

KINDS = "int8", "fp8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tiny_model(tmp_path_factory.mktemp("eight"), head_dim=16)


@pytest.fixture(scope="module", params=KINDS)
def llm(request, folder): return LLM(folder, kv_cache_dtype=request.param, **ENGINE)


@pytest.mark.parametrize("other", ["ngram", "draft model", "two devices"])
def test_drafts_and_devices_change_no_ids_and_keep_the_dtype(llm, folder, other):
  options = {"ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
             "draft model": {"speculative_config": {"model": str(folder), "num_speculative_tokens": 2}},
             "two devices": {"tensor_parallel_size": 2}}[other]
  prompts = [3 * prompt(n, "drafts") for n in (1, 5, 11, 30, 17)]
  engine = LLM(folder, kv_cache_dtype=llm.config.kv_cache_dtype, **options, **ENGINE)
  ids, expected = (ids_of_batch(x, prompts, greedy(20)) for x in (engine, llm))
  assert ids == expected
  assert other == "two devices" or engine.get_metrics()["spec_decode_num_accepted_tokens"] > 0
  assert len({tuple(x.dtype for x in cache) for runner in engine.runners for cache in runner.kv_caches}) == 1


def block_bytes(kind, dtype, **config):
  model, options = ModelConfig.from_hf(tiny_config(**config), "x"), LLMConfig(kv_cache_dtype=kind)
  parts = FastBackend().kv_layout(model, options, dtype)
  return sum(math.prod(shape) * element.itemsize for shape, element in parts)


def test_bytes_per_token_are_half_of_float16():
  for D, min_ratio in ((64, 1.88), (128, 1.93)):
    half = block_bytes("auto", dtypes.float16, head_dim=D)
    assert half / block_bytes("int8", dtypes.float16, head_dim=D) > min_ratio
    assert half / block_bytes("fp8", dtypes.float16, head_dim=D) == 2


def test_number_of_blocks_follows_kv_cache_dtype(folder, monkeypatch, caplog):
  """The pool has as many blocks as fit in free memory."""
  monkeypatch.setattr(FastBackend.memory, "free", lambda devices: 300_000)
  blocks = {}
  for kind in ("auto", *KINDS):
    with caplog.at_level("INFO", "tinyvllm"): llm = LLM(folder, kv_cache_dtype=kind, **{**ENGINE, "max_num_seqs": 16})
    blocks[kind] = llm.runner.num_blocks
    assert f"KV cache: {blocks[kind] - 1} blocks" in caplog.messages[-1]
  assert blocks["auto"] * 2.5 < blocks["int8"] < blocks["fp8"]   # a head's K and V have 128, 40 and 32 bytes


def test_head_dim_not_multiple_of_8_raises(monkeypatch):
  monkeypatch.setattr("tinyvllm_extra.kernels.fast_backend.cpu_cores", lambda: 0)   # as on a GPU
  with pytest.raises(ValueError, match="kv_cache_dtype='int8'.*head_dim.*8.*12"):
    block_bytes("int8", dtypes.float16, head_dim=12)
