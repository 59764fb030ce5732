"""One test per milestone of the project, each through the public API. Speed is compared as a ratio within one run."""
import json
import subprocess
import time

import numpy as np
import pytest
from reference import tiny_model, token_rows
from server import Server

import tinyvllm
from tinyvllm import LLM, SamplingParams


FEW_GRAPHS = {"max_num_batched_tokens": 16, "block_size": 4}   # of few shapes, which most engines here share


def greedy(n: int) -> SamplingParams: return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tiny_model(tmp_path_factory.mktemp("model"))


def test_1_hello_continues_to_hello_world():
  assert "Hello" + tinyvllm.generate("Hello") == "Hello, world!"


def test_2_paged_attention_equals_naive_contiguous_attention():
  from tinygrad import Tensor

  from tinyvllm.attention import attend_kernel, rope_kernel
  rng, BS, KV, G, D, lengths = np.random.default_rng(0), 16, 2, 3, 8, (1, 15, 16, 17, 40)
  max_blocks = 4
  q = rng.standard_normal((len(lengths), KV, G, D)).astype(np.float32)
  k, v = rng.standard_normal((2, sum(lengths), KV, D)).astype(np.float32)
  tables = (rng.permutation(len(lengths) * max_blocks) + 1).reshape(len(lengths), max_blocks)   # block 0 in none
  rows = np.repeat(np.arange(len(lengths)), lengths)
  positions = np.concatenate([np.arange(n) for n in lengths])
  garbage = np.full((2, len(lengths) * max_blocks + 1, KV, BS * D), np.nan, np.float32)   # must not be seen
  keys, values = (Tensor(x.reshape(-1, KV, *y)).realize() for x, y in zip(garbage, ((D, BS), (BS, D)), strict=True))
  table = Tensor(tables.astype(np.int32)).realize()
  tokens = Tensor(token_rows(positions, rows, tables[rows, positions // BS], BS, max_blocks)).realize()
  qkv = Tensor(np.concatenate([np.zeros((len(k), KV * G, D), np.float32), k, v], axis=1).reshape(len(k), -1)).realize()
  unturned = Tensor(np.stack([np.ones((99, D // 2)), np.zeros((99, D // 2))], 1).astype(np.float32)).realize()
  unused = Tensor(np.zeros((len(k), KV, G, D), np.float32)).realize()
  _, keys, values, *_ = unused.custom_kernel(keys, values, qkv, unturned, tokens, fxn=rope_kernel)
  last, each = np.array(lengths) - 1, np.arange(len(lengths))
  ends = Tensor(token_rows(last, each, tables[each, last // BS], BS, max_blocks)).realize()
  inputs = (Tensor(q).realize(), keys, values, table, ends)
  out = Tensor.empty(*q.shape).custom_kernel(*inputs, fxn=attend_kernel)[0].numpy()
  for i, n in enumerate(lengths):
    mine = rows == i
    scores = np.einsum("hgd,nhd->hgn", q[i], k[mine]) / np.sqrt(D)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(out[i], np.einsum("hgn,nhd->hgd", p / p.sum(-1, keepdims=True), v[mine]), atol=1e-5)
    assert n == mine.sum()


def test_3_ten_concurrent_requests_finish_right_in_a_small_pool(folder):
  prompts = [{"prompt_token_ids": [3 + i, 7, 11 + i] * (1 + i % 4)} for i in range(10)]
  alone = LLM(folder, max_model_len=128, max_num_seqs=1, **FEW_GRAPHS)
  expected = [alone.generate(p, greedy(20))[0].outputs[0].token_ids for p in prompts]
  small = LLM(folder, max_model_len=128, max_num_seqs=10, num_gpu_blocks_override=24, **FEW_GRAPHS)
  outputs = small.generate(prompts, greedy(20))
  assert [o.outputs[0].token_ids for o in outputs] == expected
  assert small.get_metrics()["num_preemptions"] > 0, "the pool was meant to be too small for all at once"
  assert small.get_metrics()["blocks_used"] == 0


def test_4_continuous_batching_makes_more_tokens_per_second_than_static_batching(folder):
  llm = LLM(folder, max_model_len=256, max_num_seqs=8, **FEW_GRAPHS)
  lengths = [8, 12, 16, 20, 24, 28, 32, 128] * 3
  jobs = [({"prompt_token_ids": [5 + i] * 4}, greedy(n)) for i, n in enumerate(lengths)]

  def run(groups) -> float:
    started = time.perf_counter()
    outputs = [o for group in groups for o in llm.generate(*map(list, zip(*group, strict=True)))]
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
    assert tokens == sum(lengths)
    return tokens / (time.perf_counter() - started)
  static = [jobs[i:i + 8] for i in range(0, len(jobs), 8)]
  run(static), run([jobs])   # capture every bucket first
  rates = [(run([jobs]), run(static)) for _ in range(3)]
  ratio = sorted(a / b for a, b in rates)[1]
  assert ratio > 1.2, f"continuous over static: {ratio:.2f}"


def test_5_twice_the_concurrent_sequences_of_preallocated_caches_in_the_same_memory(folder):
  max_model_len, blocks = 256, 65   # 64 blocks of 16 tokens: preallocated, 4 sequences of 256
  llm = LLM(folder, max_model_len=max_model_len, num_gpu_blocks_override=blocks, max_num_seqs=32,
            max_num_batched_tokens=32)
  for i in range(32): llm.add_request(str(i), {"prompt_token_ids": [3 + i % 5] * 20}, greedy(20))
  most = 0
  while llm.has_unfinished_requests():
    llm.step()
    most = max(most, int(llm.get_metrics()["num_requests_running"]))
  assert most >= 2 * ((blocks - 1) * 16 // max_model_len), f"{most} at once"


def test_6_the_server_answers_curl_with_what_generate_gives(folder):
  body = {"prompt": ["the cat", "hello"], "n": 2, "seed": 3, "max_tokens": 5}
  with Server(folder, "--max-num-seqs", 8, "--max-num-batched-tokens", 16, "--block-size", 4) as server:
    command = ["curl", "-sS", "--fail", server.url + "/generate", "-H", "Content-Type: application/json"]
    run = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, text=True, check=True, timeout=60)
  answer = json.loads(run.stdout)
  llm, params = LLM(folder, max_num_seqs=8, **FEW_GRAPHS), SamplingParams(n=2, seed=3, max_tokens=5)
  outputs = llm.generate(body["prompt"], params)
  assert answer["text"] == [c.text for o in outputs for c in o.outputs]
  assert [c["text"] for c in answer["choices"]] == answer["text"] and answer["usage"]["completion_tokens"] == 20
  assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]


def test_7_tokens_arrive_one_by_one(folder):
  llm = LLM(folder, max_model_len=128, max_num_seqs=1, **FEW_GRAPHS)
  stream = llm.generate_stream({"prompt_token_ids": [5, 6, 7]}, greedy(10))
  for i, output in enumerate(stream):
    assert len(output.outputs[0].token_ids) == 1
    assert llm.get_metrics()["generation_tokens"] == i + 1, "later tokens do not exist yet"
  assert output.finished and i == 9
