"""KV cache memory through the public API: prefix caching, parallel samples that share blocks, preemption. Ids equal a
numpy LLaMA's whatever was cached, shared or recomputed, and all blocks are free at the end."""
import dataclasses
import itertools
import random

import pytest
from helpers.engines import (BS, ENGINE, assert_all_blocks_freed, greedy, ids_of, prompt, run_watched, sampled,
                             tokens)
from helpers.faults import run_random
from helpers.models import tiny_model
from helpers.parameters import slow
from helpers.reference import reference_greedy
from tinygrad import nn

from tinyvllm import LLM

NARROW = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4}   # few graphs: each compiles for seconds
EDGES = [BS - 1, BS, BS + 1, 2 * BS - 1, 2 * BS, 2 * BS + 1]


def full_blocks(n): return n // BS * BS   # tokens


@pytest.fixture(scope="module")
def sampler(folder): return LLM(folder, **NARROW)


@pytest.fixture(scope="module")
def tight_sampler(folder):
  """At most two running sequences, in 12 blocks."""
  return LLM(folder, num_gpu_blocks_override=13, **{**NARROW, "max_num_seqs": 2, "max_num_batched_tokens": 2})


# prefix cache

def test_prefix_cache_hits_only_full_blocks_of_common_prefix(llm, folder):
  whole = prompt(4 * BS, 260)
  changed = [x % 300 + 4 for x in whole]
  lengths = 1, BS - 1, BS, BS + 1, 2 * BS, 3 * BS - 1, 3 * BS
  moved = whole[BS:3 * BS + 1], whole[2 * BS:3 * BS] + whole[BS:2 * BS] + whole[:BS + 1]   # after another prefix
  cases = [(tokens(whole), 0), *((tokens(whole[:n] + changed[n:]), full_blocks(n)) for n in lengths),
           *((tokens(ids), 0) for ids in moved)]
  cases += [(tokens(whole) | salt, hits) for salt, hits in (
    ({"cache_salt": "a"}, 0), ({"cache_salt": "b"}, 0), ({"cache_salt": "a"}, 3 * BS), ({}, 3 * BS))]
  for job, hits in cases:
    output, = llm.generate(job, greedy(5))
    assert ids_of(output) == reference_greedy(folder, job["prompt_token_ids"], 5) and output.num_cached_tokens == hits


@pytest.mark.parametrize("length", EDGES)
@pytest.mark.parametrize("answer", [1, BS, 2 * BS + 1, 2 * BS + 2, 2 * BS + 3])
def test_second_turn_hits_the_first_turns_answer(llm, folder, length, answer):
  first, least = prompt(length, 3000 + 16 * length + answer), 0
  for turn in range(3):
    output, = llm.generate(tokens(first), greedy(answer))
    assert ids_of(output) == reference_greedy(folder, first, answer)
    assert least <= output.num_cached_tokens <= (full_blocks(len(first) - 1) if turn else 0)
    # the last token's K and V are not computed
    text = [*first, *ids_of(output)]
    least, first = full_blocks(len(text) - 1), [*text, *prompt(3, turn)]


# preemption

def test_repeated_preemption_keeps_order_of_priority_then_arrival(small_llm, folder):
  priority_llm = LLM(folder, num_gpu_blocks_override=13, scheduling_policy="priority", **ENGINE)
  for engine, priorities in ((small_llm, [0] * 6), (priority_llm, [3, 0, 2, 0, -1, 2])):
    jobs = [prompt(9, 1300 + i) for i in range(6)]
    expected = [reference_greedy(folder, job, 30) for job in jobs]
    with assert_all_blocks_freed(engine) as before:
      for i, job in enumerate(jobs): engine.add_request(str(i), tokens(job), greedy(30), priority=priorities[i])
      last, finish_steps = run_watched(engine)
      assert engine.get_metrics()["num_preemptions"] > before["num_preemptions"] + 3, "too few preemptions"
    steps = [finish_steps[str(i)] for i in sorted(range(6), key=lambda i: priorities[i])]
    assert steps == sorted(steps) and steps[0] < steps[1]
    assert [ids_of(last[str(i)]) for i in range(6)] == expected
    assert [last[str(i)].num_cached_tokens for i in range(6)] == [0] * 6, "hits of the first start only"
    for _ in range(2): assert [ids_of(engine.generate(tokens(job), greedy(30))[0]) for job in jobs] == expected


# several samples of one prompt

def samples(output): return [c.token_ids for c in output.outputs]


@pytest.mark.parametrize("length", [10 * BS, 10 * BS + 2])
def test_samples_share_blocks_of_their_prompt(llm, folder, length):
  """10 blocks for a prompt of 40 tokens, and 2 for 6 output tokens of each of 4 samples: 18 blocks, not 48."""
  job, seen = prompt(length, 1900 + length), []
  with assert_all_blocks_freed(llm):
    llm.add_request("a", tokens(job), greedy(6, n=4))
    last, _ = run_watched(llm, watch=seen.append)
  assert samples(last["a"]) == [reference_greedy(folder, job, 6)] * 4
  assert max(metrics["blocks_used"] for metrics in seen) <= 10 + 4 * 3
  assert max(metrics["blocks_shared"] for metrics in seen) >= 9


STOPS = list(range(3, 320, 9))   # a ninth of the vocabulary, so that samples end one after another


@pytest.mark.parametrize("length", [7, *slow(*EDGES)])
def test_samples_of_generate_step_and_stream_equal_single_requests(sampler, length):
  job, stops = tokens(prompt(length, 2000)), {"stop_token_ids": STOPS, "stop": ["e", "no"]}
  request = job, sampled(30, 7, n=4, **stops)
  with assert_all_blocks_freed(sampler):
    alone = [sampler.generate(job, sampled(30, 7 + i, **stops))[0].outputs[0] for i in range(4)]
    (whole,), parts, outputs = sampler.generate(*request), [*sampler.generate_stream(*request)], []
    sampler.add_request("a", *request)
    while sampler.has_unfinished_requests(): outputs += sampler.step()
  assert len({len(c.token_ids) for c in alone}) >= 3, "lengths must differ"
  assert {type(c.stop_reason) for c in alone} == {int, str}, "stop tokens and stop strings must end them"
  assert whole.outputs == outputs[-1].outputs == [dataclasses.replace(c, index=i) for i, c in enumerate(alone)]
  for i, expected in enumerate(alone):
    assert "".join(part.outputs[i].text for part in parts) == expected.text
    assert [x for part in parts for x in part.outputs[i].token_ids] == expected.token_ids
    assert {part.outputs[i].index for part in parts} == {i}
    assert parts[-1].outputs[i].finish_reason == expected.finish_reason
  for a, b in itertools.pairwise(outputs):
    for before, after in zip(a.outputs, b.outputs, strict=True):
      assert after.token_ids[:len(before.token_ids)] == before.token_ids and after.text.startswith(before.text)
      if before.finish_reason: assert before == after
  for xs in (parts, outputs): assert [x.finished for x in xs] == [False] * (len(xs) - 1) + [True]
  assert len(parts) >= max(map(len, samples(whole))), "a part has at most one token per sample"


@pytest.mark.parametrize("length, num_tokens, n", [(6, 9, 3), (6, 9, 5), (2 * BS, 26, 3), (2 * BS + 1, 26, 3)])
def test_samples_in_two_slots_equal_single_requests(tight_sampler, sampler, length, num_tokens, n):
  """26 tokens need 9 of the 12 blocks, 2 of them shared."""
  job, most = tokens(prompt(length, 2100)), []
  alone = [ids_of(sampler.generate(job, sampled(num_tokens, 60 + i))[0]) for i in range(n)]
  for _ in range(2):
    with assert_all_blocks_freed(tight_sampler) as before:
      tight_sampler.add_request("a", job, sampled(num_tokens, 60, n=n))
      last, _ = run_watched(tight_sampler, watch=lambda m: most.append(m["num_requests_running"]))
    after, names = tight_sampler.get_metrics(), ("prompt_tokens", "num_preemptions")
    prompt_tokens, preemptions = [after[name] - before[name] for name in names]
    assert prompt_tokens == length and (preemptions > 0) == (num_tokens == 26)
    assert last["a"].finished and [completion.index for completion in last["a"].outputs] == [*range(n)]
    assert samples(last["a"]) == alone and max(most) <= 2


def test_abort_ends_all_samples(sampler, tight_sampler):
  for engine in (sampler, tight_sampler):   # in tight_sampler some samples have no slot yet
    for steps in (0, 1, 2, 3, 6, 9, 16):   # while waiting, during prefill, between samples, after some have ended
      with assert_all_blocks_freed(engine):
        engine.add_request("a", tokens(prompt(7, 2500 + steps)), sampled(30, 7, n=4, stop_token_ids=STOPS))
        outputs = [output for _ in range(steps) for output in engine.step()]
        engine.abort_request("a")
        assert not engine.has_unfinished_requests() and engine.step() == []
        m = engine.get_metrics()
        assert m["num_requests_running"] == m["num_requests_waiting"] == 0
    assert len({bool(c.finish_reason) for c in outputs[-1].outputs}) == 2, "only some samples must have ended"
    with assert_all_blocks_freed(engine):
      stream = engine.generate_stream(tokens(prompt(7, 2510)), sampled(20, 5, n=2))
      next(stream)
      stream.close()


# random operations

@pytest.mark.parametrize("seed", range(2))
def test_random_requests_with_common_prefixes_and_samples_equal_reference(small_llm, folder, seed):
  rng = random.Random(seed)
  prompts = [[*prompt(2 * BS, 2700 + i % 3), *prompt(length, 2710 + length)] for i, length in
             enumerate((1, BS - 1, BS, BS + 1, 3 * BS))] + [prompt(length, 2703) for length in (1, BS, 2 * BS + 1)]
  with assert_all_blocks_freed(small_llm):
    requests, last, _ = run_random(small_llm, rng, 300, lambda: (
      rng.choice(prompts), greedy(rng.choice((1, 2, 5, 16)), n=rng.choice((1, 1, 2, 3)))))
  for name, (ids, params) in requests.items():
    assert samples(last[name]) == [reference_greedy(folder, ids, params.max_tokens)] * params.n and last[name].finished
  assert len(requests) > 30


# The size of the KV cache: chosen by free memory, set by the user, filled to the last block

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
  with pytest.raises(ValueError, match=f"maximum context length is {fits} tokens"): llm.generate(tokens([*ids, 5]))


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
