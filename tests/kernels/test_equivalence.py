"""The core's plain backend and the extension's fast one give equal token ids in float32: prefill chunks, decode, prefix
cache hits, preemption, sampling and logits features, for one model."""
import pytest

import tinyvllm
from tinyvllm import LLM, SamplingParams
from tinyvllm_extra.kernels import FastBackend

# Graphs of 1, 2 and 4 tokens. 11 blocks are too few for four sequences, but enough for any single one
OPTIONS = {"dtype": "float32", "max_model_len": 64, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 4,
           "num_gpu_blocks_override": 12}
PROMPTS = [[3, 7, 11], [5, 6, 7, 8, 9, 10, 12, 13, 14], [4] * 8, [21, 22, 23, 24, 25]]   # up to three chunks


class Pair:
  """Two engines with the same model and different backends."""
  def __init__(self, folder, **options):
    self.plain = LLM(folder, backend=tinyvllm.Backend(), **OPTIONS | options)
    self.fast = LLM(folder, **OPTIONS | options)
    assert type(self.plain.backend) is tinyvllm.Backend and isinstance(self.fast.backend, FastBackend)

  def generate(self, prompts, **params):
    """Check that both engines give equal ids, numbers of cached tokens and finish reasons. Returns pairs of fast and
    plain outputs."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **params})
    jobs = [{"prompt_token_ids": ids} for ids in prompts]
    expected, outputs = [llm.generate(jobs, params, use_tqdm=False) for llm in (self.plain, self.fast)]
    assert [summary(output) for output in outputs] == [summary(output) for output in expected]
    return list(zip(outputs, expected, strict=True))


def summary(output):
  return output.num_cached_tokens, [(sample.token_ids, sample.finish_reason) for sample in output.outputs]


def num_preemptions(llm): return llm.get_metrics()["num_preemptions"]


@pytest.fixture(scope="module")
def pair(folder): return Pair(folder)


@pytest.fixture(scope="module")
def sampling_pair(folder):
  """A pair with only two graph shapes: the plain sampler has many kernels."""
  return Pair(folder, max_num_seqs=2, max_num_batched_tokens=2)


def test_prefill_chunks_and_decode_give_equal_ids(pair):
  for prompt in PROMPTS: pair.generate([prompt])


def test_prefix_cache_hits_give_equal_ids(pair):
  pair.generate([PROMPTS[1]])
  (output, _), = pair.generate([[*PROMPTS[1], 31]])
  assert output.num_cached_tokens == 8


def test_preempted_batch_gives_equal_ids(pair):
  before = num_preemptions(pair.plain), num_preemptions(pair.fast)
  pair.generate(PROMPTS, max_tokens=12)
  assert num_preemptions(pair.plain) > before[0] and num_preemptions(pair.fast) > before[1]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"top_k": 40, "top_p": 0.9, "min_p": 0.05}], ids=str)
def test_seeded_sampling_gives_equal_ids(sampling_pair, fields):
  outputs = sampling_pair.generate(PROMPTS[:2], temperature=0.9, seed=7, **fields)
  other_seed = sampling_pair.generate(PROMPTS[:2], temperature=0.9, seed=8, **fields)
  assert summary(outputs[0][0]) != summary(other_seed[0][0]), "the seed must have an effect"


