"""Graph shapes: the graph that a step runs with, and graphs that are captured at startup."""
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.models import tiny_config
from helpers.engines import greedy, ids_of_batch, prompt, tokens
from helpers.servers import wait_until
from tinygrad import Tensor, dtypes

from tinyvllm import LLM, AsyncLLM, SamplingParams
from tinyvllm.backend import Backend
from tinyvllm.config import ModelConfig
from tinyvllm.llama import Layer
from tinyvllm.request import SamplerMode
from tinyvllm.runner import GraphKey, allocate_kv_caches
from tinyvllm_extra import graph_policy
from tinyvllm_extra.graph_policy import CAPTURE_THRESHOLD
from tinyvllm_extra.kernels import FastBackend
from tinyvllm_extra.options import LLMConfig


@pytest.fixture
def fresh(words_folder):
  """A function that makes an engine without graphs, with at most 8 sequences and 32 tokens per step."""
  def make(**options):
    return LLM(words_folder, **{"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4, **options})
  return make


def first_ids(llm, length, params): return ids_of_batch(llm, [prompt(length)], params)[0]


def test_choose_graph_pads_to_captured_graph_until_requested_often(fresh, words_llm):
  llm = fresh()
  first_ids(llm, 7, greedy(1))
  assert [key.num_tokens for key in llm.runner.graphs] == [8]
  assert first_ids(llm, 7, greedy(CAPTURE_THRESHOLD + 1)) == first_ids(words_llm, 7, greedy(CAPTURE_THRESHOLD + 1))
  assert [key.num_tokens for key in llm.runner.graphs] == [8]
  first_ids(llm, 7, greedy(2))
  assert [key.num_tokens for key in llm.runner.graphs] == [8, 1], "a frequent shape gets its own graph"


def test_choose_graph_captures_immediately_if_padding_doubles_time(fresh):
  runner = fresh().runner
  captured = runner.backend.graphs.captured
  greedy_key, filtered_key = GraphKey(32, 8), GraphKey(32, 8, SamplerMode.FILTERED)
  assert runner.choose_key(GraphKey(3, 1)) == GraphKey(4, 4)
  captured.add((runner, greedy_key))
  assert runner.choose_key(GraphKey(20, 1)) == greedy_key
  random_key = GraphKey(20, 1, SamplerMode.RANDOM)
  assert runner.choose_key(random_key).sampler_mode == SamplerMode.RANDOM, "a greedy graph cannot sample"
  captured.add((runner, filtered_key))
  assert runner.choose_key(random_key) == filtered_key, "a sampling graph serves greedy requests, too"
  assert runner.choose_key(GraphKey(20, 1)) == greedy_key
  assert runner.choose_key(GraphKey(20, 20)).num_rows == 32, "prompt_logprobs need all logits of a prompt"
  # A step's cost is 16 tokens and its own: 16 + 16 < 2 * (16 + 1), but 16 + 32 = 2 * (16 + 8)
  for small, large, chosen in ((8, 16, 16), (8, 32, 8), (1, 16, 16), (1, 32, 1)):
    captured.clear()
    captured.add((runner, GraphKey(large, 8)))
    assert runner.choose_key(GraphKey(small, 1)).num_tokens == chosen


def test_capture_sizes_are_captured_only_at_start(fresh):
  llm = fresh(cudagraph_capture_sizes=[32, 8])
  keys = set(llm.runner.graphs)
  assert keys == {GraphKey(size, 8, mode) for size in (8, 32) for mode in (SamplerMode.GREEDY, SamplerMode.FILTERED)}
  params = [greedy(6), SamplingParams(max_tokens=5, seed=1), SamplingParams(max_tokens=4, seed=2, top_p=0.9), greedy(1)]
  prompts = [prompt(n, n) for n in (1, 9, 30, 3)]
  ids = ids_of_batch(llm, prompts, params)
  for x, param in zip(prompts, params, strict=True): llm.generate(tokens(x), param, use_tqdm=False)
  assert set(llm.runner.graphs) == keys and ids == ids_of_batch(fresh(), prompts, params)


def test_smallest_sufficient_capture_size_is_used(fresh):
  """More rows than the runner has in steps without prompt_logprobs need as many as tokens."""
  runner = fresh(cudagraph_capture_sizes=[1, 8, 16]).runner
  chosen = {(1, 1): (1, 1), (2, 2): (8, 8), (8, 8): (8, 8), (16, 4): (16, 8), (32, 8): (32, 8), (16, 16): (16, 16)}
  assert {key: runner.choose_key(GraphKey(*key))[:2] for key in chosen} == chosen


def test_capture_optional_covers_all_optional_features(fresh):
  llm = fresh(cudagraph_capture_sizes=[8, 32])
  assert len(list(llm.capture([8, 32], optional=True))) == 4
  keys = set(llm.runner.graphs)
  for extra in ({"logprobs": 3}, {"logit_bias": {5: 2.0}}, {"allowed_token_ids": [5, 6, 7]}, {"frequency_penalty": 1.0},
                {"bad_words": ["the"], "logprobs": 0}):
    params = greedy(4, **extra)
    assert first_ids(llm, 5, params) == first_ids(fresh(), 5, params)
  assert set(llm.runner.graphs) == keys


def test_capture_yields_its_progress_and_logs_its_end(fresh, caplog):
  with caplog.at_level("INFO", "tinyvllm"): llm = fresh(cudagraph_capture_sizes=[8])
  text = "\n".join(record.message for record in caplog.records)
  assert re.search(r"^loaded .* s; a step takes 32 tokens\nKV cache: .*\n"
                   r"captured 2 steps in [\d.]+ s, 0 new kernels$", text, re.M)
  assert [*llm.capture([1, 2])] == ["preparing 1 of 4", "", "", ""]
  assert {key.num_tokens for key in llm.runner.graphs} == {1, 2, 8}


def test_enforce_eager_captures_nothing(fresh):
  llm = fresh(enforce_eager=True, cudagraph_capture_sizes=[8])
  assert llm.runner.graphs == {} and list(llm.capture()) == []


def test_usual_sizes_end_with_the_largest_step(fresh, monkeypatch):
  assert graph_policy.usual_sizes(fresh().runner) == [1, 2, 4, 8, 16, 32]
  assert graph_policy.usual_sizes(fresh(max_num_batched_tokens=20).runner)[-1] == 32
  runner = fresh(max_num_batched_tokens=2048).runner
  monkeypatch.setattr(graph_policy, "renderer", lambda: SimpleNamespace(tensor_cores=True))
  assert graph_policy.usual_sizes(runner) == [1, 8, 16, 32, 64, 128, 512, 2048]
  monkeypatch.setattr(runner, "max_rows", 256)
  assert graph_policy.usual_sizes(runner) == [1, 8, 16, 32, 64, 128, 256, 512, 2048]


def test_async_llm_captures_optional_graphs_while_idle(words_folder, monkeypatch):
  monkeypatch.setattr("tinyvllm_extra.serving.async_engine.IDLE_SECONDS", 0.05)
  llm = AsyncLLM(words_folder, prepare=True, cudagraph_capture_sizes=[8], max_num_seqs=4, max_num_batched_tokens=8)
  wait_until(lambda: llm._driver.optional is None, "all graphs are captured")
  assert {key.sampler_mode for key in llm.llm.runner.graphs} == {*SamplerMode} and len(llm.llm.runner.graphs) == 4
  assert llm.state == ""
  llm.shutdown()


async def test_async_llm_runs_requests_while_it_captures(words_folder, monkeypatch):
  """The first step has 8 tokens. While the next one is captured, a prompt of 30 tokens takes steps of at most 8."""
  monkeypatch.setattr(graph_policy, "FIRST_SIZE", 8)
  may_capture = threading.Event()
  capture = LLM.capture
  def capture_later(*args, **options):
    for state in capture(*args, **options):
      yield state
      assert state or may_capture.wait(60)
  monkeypatch.setattr(LLM, "capture", capture_later)
  llm = AsyncLLM(words_folder, prepare=True, cudagraph_capture_sizes=[8, 32], max_num_seqs=8, max_num_batched_tokens=32)
  assert [output async for output in llm.generate(tokens(prompt(30)), greedy(2))][-1].finished
  keys = [*llm.llm.runner.graphs]
  assert keys == [GraphKey(8, 8, SamplerMode.FILTERED)] and llm.llm.scheduler.config.max_num_batched_tokens == 8
  may_capture.set()
  llm._driver.captures.join()
  assert len(llm.llm.runner.graphs) == 4 and llm.llm.scheduler.config is llm.llm.config
  llm.shutdown()


async def test_async_llm_failed_capture_is_logged_and_requests_finish(words_folder, monkeypatch, caplog):
  def fails(self, sizes=None, optional=False):
    yield "preparing 1 of 1"
    raise RuntimeError("out of memory")
  monkeypatch.setattr(LLM, "capture", fails)
  llm = AsyncLLM(words_folder, prepare=True, max_num_seqs=4, max_num_batched_tokens=8)
  assert [output async for output in llm.generate(tokens(prompt(3)), greedy(2))][-1].finished and llm.state == ""
  assert "out of memory" in caplog.text
  llm.shutdown()


@pytest.mark.parametrize("length,gib", [(2048, 4), (2**18, 6)], ids=["4 GiB", "one sequence"])
def test_allocate_kv_caches_on_cpu_gives_same_size_each_start(length, gib, monkeypatch):
  """30 layers with 3 KV heads of 64 dimensions: 23 KiB per token in float16."""
  config = ModelConfig.from_hf(tiny_config(hidden_size=576, num_hidden_layers=30, num_attention_heads=9,
                                           num_key_value_heads=3, max_position_embeddings=2**18), Path())
  layers, shapes = [Layer(config, 0, dtypes.float16, Backend())] * 30, []
  monkeypatch.setattr("tinyvllm.runner.Tensor.empty", lambda *shape, **_: shapes.append(shape) or Tensor(0.0))
  model = SimpleNamespace(config=config, backend=FastBackend(), dtype=dtypes.float16, layers=layers)
  for gib_free in (20, 17.3):
    allocate_kv_caches(model, LLMConfig(max_num_seqs=1024, max_model_len=length), int(gib_free * 2**30))
  assert len({tuple(shapes[:60]), tuple(shapes[60:])}) == 1
  blocks, heads, dim, size = shapes[0]
  assert 0.9 * gib * 2**30 <= 60 * blocks * heads * dim * size * 2 <= 1.02 * gib * 2**30
