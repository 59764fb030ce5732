"""One test for each of the project's milestones, through the public API."""
import json

import milestones
import pytest
from helpers.commands import run_process
from helpers.servers import Server

from tinyvllm import LLM, Parts, SamplingParams

pytestmark = pytest.mark.real


def test_1_hello_prompt_generates_hello_world(): milestones.hello()


@pytest.mark.parametrize("parts", [Parts(), LLM.parts], ids=["core", "extension"])
def test_2_paged_attention_equals_naive_attention(parts):
  milestones.paged_attention(parts.make_backend(), parts.config_class)


def test_3_ten_concurrent_requests_in_small_kv_cache_equal_single(folder):
  milestones.ten_requests(folder)


def test_4_continuous_batching_takes_fewer_steps_than_static_batching(folder): milestones.continuous_batching(folder)


def test_5_paging_in_same_memory_doubles_concurrent_sequences(folder): milestones.paging(folder)


def test_6_server_answer_to_curl_equals_generate(folder):
  body = {"prompt": ["the cat", "hello"], "n": 2, "seed": 3, "max_tokens": 5}
  with Server(folder, "--max-num-seqs", 8, "--max-num-batched-tokens", 16, "--block-size", 4) as server:
    command = ["curl", "-sS", "--fail", server.url + "/generate", "-H", "Content-Type: application/json"]
    run = run_process(*command, "-d", json.dumps(body))
  answer = json.loads(run.stdout)
  llm, params = LLM(folder, max_num_seqs=8, **milestones.FEW_GRAPHS), SamplingParams(n=2, seed=3, max_tokens=5)
  outputs = llm.generate(body["prompt"], params)
  assert answer["text"] == [c.text for o in outputs for c in o.outputs]
  assert [c["text"] for c in answer["choices"]] == answer["text"] and answer["usage"]["completion_tokens"] == 20
  assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]


def test_7_stream_yields_each_token_before_the_next(folder): milestones.streaming(folder)
