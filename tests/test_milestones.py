"""One test per milestone of the project, each through the public API. Speeds are compared as ratios within one run."""
import json
import subprocess
import time
from types import SimpleNamespace

import numpy as np
import pytest
from reference import tiny_model, token_rows
from server import Server
from tinygrad import Tensor, dtypes
from tinyvllm_extra import kernels

import tinyvllm
from tinyvllm import LLM, SamplingParams
from tinyvllm.config import EngineConfig

FEW_GRAPHS = {"max_num_batched_tokens": 16, "block_size": 4}   # few graph shapes, shared by most engines here


def greedy(n: int) -> SamplingParams: return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory): return tiny_model(tmp_path_factory.mktemp("model"))


def test_1_hello_continues_to_hello_world():
  assert "Hello" + tinyvllm.generate("Hello") == "Hello, world!"


def naive_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
  """Causal attention over contiguous K and V, (N, KV, D), of one sequence. q: (N, KV, G, D)."""
  scores = np.einsum("mhgd,nhd->mhgn", q, k) / np.sqrt(q.shape[-1])
  scores = np.where(np.tri(len(q), dtype=bool)[:, None, None], scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  return np.einsum("mhgn,nhd->mhgd", weights / weights.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("make_backend", [tinyvllm.Backend, kernels.make_backend], ids=["core", "extension"])
def test_2_paged_attention_equals_naive_contiguous_attention(folder, make_backend):
  """All tokens of five sequences in one step, then the last token of each one again in a step of its own."""
  rng = np.random.default_rng(0)
  backend = make_backend()
  BS, KV, G, D, max_blocks, lengths = 16, 2, 3, 8, 4, (1, 15, 16, 17, 40)
  model = SimpleNamespace(num_key_value_heads=KV, num_attention_heads=KV * G, head_dim=D)
  layout = backend.kv_layout(model, EngineConfig(block_size=BS), dtypes.float32)
  tables = (rng.permutation(len(lengths) * max_blocks) + 1).reshape(len(lengths), max_blocks)   # block 0 in none
  caches = [Tensor.full((len(lengths) * max_blocks + 1, *shape), np.nan, dtype=dtype).contiguous().realize()
            for shape, dtype in layout]   # must not be read before it is written
  rope = np.stack([np.ones((99, D // 2)), np.zeros((99, D // 2))], 1)   # no rotation
  q = rng.standard_normal((sum(lengths), KV, G, D)).astype(np.float32)
  k, v = rng.standard_normal((2, sum(lengths), KV, D)).astype(np.float32)
  slots = np.repeat(np.arange(len(lengths)), lengths)
  positions = np.concatenate([np.arange(n) for n in lengths])

  def attend(batch: np.ndarray) -> np.ndarray:
    slot, position = slots[batch], positions[batch]
    qkv = np.concatenate([q[batch].reshape(len(batch), KV * G, D), k[batch], v[batch]], 1).reshape(len(batch), -1)
    tokens = token_rows(position, slot, tables[slot, position // BS], BS, max_blocks)
    inputs = [Tensor(x).realize() for x in (rope.astype(np.float32), tokens, tables.astype(np.int32))]
    return backend.attend(Tensor(qkv).realize(), caches, *inputs, KV * G).numpy().reshape(len(batch), KV, G, D)

  expected = np.concatenate([naive_attention(q[slots == i], k[slots == i], v[slots == i]) for i in range(len(lengths))])
  np.testing.assert_allclose(attend(np.arange(len(slots))), expected, atol=1e-5)
  last = np.cumsum(lengths) - 1
  np.testing.assert_allclose(attend(last), expected[last], atol=1e-5)


def test_3_ten_concurrent_requests_in_a_small_pool_are_correct(folder):
  prompts = [{"prompt_token_ids": [3 + i, 7, 11 + i] * (1 + i % 4)} for i in range(10)]
  alone = LLM(folder, max_model_len=128, max_num_seqs=1, **FEW_GRAPHS)
  expected = [alone.generate(p, greedy(20))[0].outputs[0].token_ids for p in prompts]
  small = LLM(folder, max_model_len=128, max_num_seqs=10, num_gpu_blocks_override=24, **FEW_GRAPHS)
  outputs = small.generate(prompts, greedy(20))
  assert [o.outputs[0].token_ids for o in outputs] == expected
  assert small.get_metrics()["num_preemptions"] > 0, "the pool must be too small for all requests at once"
  assert small.get_metrics()["blocks_used"] == 0


def test_4_continuous_batching_is_faster_than_static_batching(folder):
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
  run(static), run([jobs])   # captures every graph
  rates = [(run([jobs]), run(static)) for _ in range(3)]
  ratio = sorted(a / b for a, b in rates)[1]
  assert ratio > 1.2, f"continuous over static: {ratio:.2f}"


def test_5_paging_doubles_concurrent_sequences_in_the_same_memory(folder):
  max_model_len, blocks = 256, 65   # 64 blocks of 16 tokens; preallocated, they hold 4 sequences of 256 tokens
  llm = LLM(folder, max_model_len=max_model_len, num_gpu_blocks_override=blocks, max_num_seqs=32,
            max_num_batched_tokens=32)
  for i in range(32): llm.add_request(str(i), {"prompt_token_ids": [3 + i % 5] * 20}, greedy(20))
  most = 0
  while llm.has_unfinished_requests():
    llm.step()
    most = max(most, int(llm.get_metrics()["num_requests_running"]))
  assert most >= 2 * ((blocks - 1) * 16 // max_model_len), f"{most} sequences ran at once"


def test_6_server_answers_curl_as_generate_does(folder):
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


def test_7_stream_yields_tokens_one_by_one(folder):
  llm = LLM(folder, max_model_len=128, max_num_seqs=1, **FEW_GRAPHS)
  stream = llm.generate_stream({"prompt_token_ids": [5, 6, 7]}, greedy(10))
  for i, output in enumerate(stream):
    assert len(output.outputs[0].token_ids) == 1
    assert llm.get_metrics()["generation_tokens"] == i + 1, "later tokens do not exist yet"
  assert output.finished and i == 9
