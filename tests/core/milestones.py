"""Milestones that the core passes without the extension. test_milestones.py runs them with the extension, core_alone.py
runs them with the core only."""
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from helpers.engines import greedy, token_rows
from helpers.reference import causal_attention
from tinygrad import Tensor, dtypes

import tinyvllm
from tinyvllm import LLM
from tinyvllm.config import EngineConfig

FEW_GRAPHS = {"max_num_batched_tokens": 16, "block_size": 4}   # few graph shapes, shared by most engines here
# Enough blocks for all requests. A fixed number, so that each run can use the kernels cached by the previous one
ONE = {"max_model_len": 128, "max_num_seqs": 1, "num_gpu_blocks_override": 33, **FEW_GRAPHS}
EIGHT = {"max_model_len": 256, "max_num_seqs": 8, "num_gpu_blocks_override": 8 * 64 + 1, **FEW_GRAPHS}


def hello() -> None: assert "Hello" + tinyvllm.generate("Hello") == "Hello, world!"


def paged_attention(backend: tinyvllm.Backend, config: type[EngineConfig] = EngineConfig) -> None:
  """Check five sequences: all tokens in one step, then a second step with the last token of each one."""
  rng = np.random.default_rng(0)
  BS, KV, G, D, max_blocks, lengths = 16, 2, 3, 8, 4, (1, 15, 16, 17, 40)
  model: Any = SimpleNamespace(num_key_value_heads=KV, num_attention_heads=KV * G, head_dim=D)
  layout = backend.kv_layout(model, config(block_size=BS), dtypes.float32)
  tables = (rng.permutation(len(lengths) * max_blocks) + 1).reshape(len(lengths), max_blocks)   # without block 0
  caches = [Tensor.full((len(lengths) * max_blocks + 1, *shape), np.nan, dtype=dtype).contiguous().realize()
            for shape, dtype in layout]   # NaN shows up if a position is read before it is written
  rope = np.stack([np.ones((99, D // 2)), np.zeros((99, D // 2))], 1)   # no rotation
  q = rng.standard_normal((sum(lengths), KV, G, D)).astype(np.float32)
  k, v = rng.standard_normal((2, sum(lengths), KV, D)).astype(np.float32)
  slots = np.repeat(np.arange(len(lengths)), lengths)
  positions = np.concatenate([np.arange(n) for n in lengths])

  def attend(batch: np.ndarray) -> np.ndarray:
    slot, position = slots[batch], positions[batch]
    qkv = np.concatenate([q[batch].reshape(len(batch), KV * G, D), k[batch], v[batch]], 1).reshape(len(batch), -1)
    tokens = token_rows(position, slot, tables[slot, position // BS])
    inputs = [Tensor(x).realize() for x in (rope.astype(np.float32), tokens, tables.astype(np.int32))]
    return backend.attend(Tensor(qkv).realize(), caches, *inputs, KV * G).numpy().reshape(len(batch), KV, G, D)

  each = [causal_attention(*[x[slots == i] for x in (q.reshape(-1, KV * G, D), k, v)]) for i in range(len(lengths))]
  expected = np.concatenate(each).reshape(q.shape)
  np.testing.assert_allclose(attend(np.arange(len(slots))), expected, atol=1e-5)
  last = np.cumsum(lengths) - 1
  np.testing.assert_allclose(attend(last), expected[last], atol=1e-5)


def ten_requests(folder: Path) -> None:
  """Run ten concurrent requests with too few KV cache blocks for all of them."""
  prompts: list = [{"prompt_token_ids": [3 + i, 7, 11 + i] * (1 + i % 4)} for i in range(10)]
  alone = LLM(folder, **ONE)
  expected = [alone.generate(p, greedy(20))[0].outputs[0].token_ids for p in prompts]
  small = LLM(folder, max_model_len=128, max_num_seqs=10, num_gpu_blocks_override=24, **FEW_GRAPHS)
  with patch.object(small.scheduler, "preempt", wraps=small.scheduler.preempt) as preempt:
    outputs = small.generate(prompts, greedy(20))
  assert [o.outputs[0].token_ids for o in outputs] == expected
  assert preempt.called, "the KV cache must be too small for all requests at once"
  assert small.blocks.num_used() == 0


def continuous_batching(folder: Path) -> None:
  """Check that continuous batching takes fewer steps than static batching. Steps of both have up to 8 sequences, so
  that they take about the same time."""
  llm = LLM(folder, **EIGHT)
  lengths = [8, 12, 16, 20, 24, 28, 32, 128] * 3
  jobs = [({"prompt_token_ids": [5 + i] * 4}, greedy(n)) for i, n in enumerate(lengths)]
  def run(groups: list) -> int:
    """Return the number of steps."""
    with patch.object(llm.runner, "launch", wraps=llm.runner.launch) as launch:
      outputs = [o for group in groups for o in llm.generate(*map(list, zip(*group, strict=True)))]
    assert sum(len(o.outputs[0].token_ids) for o in outputs) == sum(lengths)
    return launch.call_count
  static, continuous = run([jobs[i:i + 8] for i in range(0, len(jobs), 8)]), run([jobs])
  assert static >= 3 * 128 and static / continuous > 1.2, f"steps: static {static}, continuous {continuous}"


def paging(folder: Path) -> None:
  """Check that paging at least doubles the number of concurrent sequences in the same memory."""
  max_model_len, blocks = 256, 65   # 64 blocks of 16 tokens; preallocated, they hold 4 sequences of 256 tokens
  llm = LLM(folder, max_model_len=max_model_len, num_gpu_blocks_override=blocks, max_num_seqs=32,
            max_num_batched_tokens=32)
  for i in range(32): llm.add(llm.make_request(str(i), {"prompt_token_ids": [3 + i % 5] * 20}, greedy(20)))
  max_running = 0
  while llm.requests:
    llm.advance()
    max_running = max(max_running, len(llm.scheduler.running))
  assert max_running >= 2 * ((blocks - 1) * 16 // max_model_len), f"{max_running} sequences ran at once"


def streaming(folder: Path) -> None:
  """Check that a stream yields each token before the next one is computed."""
  llm = LLM(folder, **ONE)
  for i, output in enumerate(llm.generate_stream({"prompt_token_ids": [5, 6, 7]}, greedy(10))):
    if i == 0: sequence, = llm.scheduler.running
    assert len(output.outputs[0].token_ids) == 1
    assert sequence.num_generated == i + 1, "a later token must not exist yet"
  assert output.finished and i == 9
