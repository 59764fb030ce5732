"""KV cache memory through the public API: prefix caching, parallel samples that share blocks, preemption. Ids equal a
numpy LLaMA's whatever was cached, shared or recomputed, and all blocks are free at the end."""
import random

import pytest
from helpers.engines import ENGINE, assert_all_blocks_freed, check_metrics, run_watched
from helpers.reference import reference_greedy
from helpers.requests import greedy, ids_of, prompt, tokens

from tinyvllm import LLM, SamplingParams

BS = ENGINE["block_size"]
NARROW = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4}   # few graphs: each compiles for seconds
EDGES = [BS - 1, BS, BS + 1, 2 * BS - 1, 2 * BS, 2 * BS + 1]


def params(length, **options): return SamplingParams(max_tokens=length, ignore_eos=True, **options)
def seeded(length, seed, **options): return params(length, seed=seed, **options)
def full_blocks(n): return n // BS * BS   # tokens


@pytest.fixture(scope="module")
def uncached_llm(folder): return LLM(folder, enable_prefix_caching=False, **ENGINE)


@pytest.fixture(scope="module")
def sampler(folder): return LLM(folder, **NARROW)


@pytest.fixture(scope="module")
def tight_sampler(folder):
  """At most two running sequences, in 12 blocks."""
  return LLM(folder, num_gpu_blocks_override=13, **{**NARROW, "max_num_seqs": 2, "max_num_batched_tokens": 2})


def cached_tokens(engine, *names):
  """Step until each request has a token (on a GPU one step later). Return num_cached_tokens by request."""
  cached = {}
  while not {*names} <= {*cached}: cached |= {o.request_id: o.num_cached_tokens for o in engine.step()}
  return cached


# prefix cache

@pytest.mark.parametrize("length", [1, *EDGES, 10 * BS, 10 * BS + 1])
def test_repeated_prompt_is_cached_and_gives_same_output(llm, uncached_llm, folder, length):
  job, num_cached = tokens(prompt(length, 200 + length)), full_blocks(length - 1)
  with assert_all_blocks_freed(llm) as before:
    first, = llm.generate(job, greedy(6))
    between = llm.get_metrics()
    second, = llm.generate(job, greedy(6))
    after = llm.get_metrics()
  plain, = uncached_llm.generate(job, greedy(6))
  assert ids_of(first) == ids_of(second) == ids_of(plain) == reference_greedy(folder, job["prompt_token_ids"], 6)
  assert [o.num_cached_tokens for o in (first, second, plain)] == [0, num_cached, 0]
  for m, earlier, hits in ((between, before, 0), (after, between, num_cached)):
    assert m["prefix_cache_hits"] - earlier["prefix_cache_hits"] == hits, "tokens, not blocks"
    assert m["prefix_cache_queries"] - earlier["prefix_cache_queries"] == length
    assert m["prompt_tokens"] - earlier["prompt_tokens"] == length, "cached and computed tokens"


def test_cached_tokens_are_not_recomputed(llm):
  """A prompt of 41 tokens takes 3 steps of 16 tokens, and 1 step if all tokens except the last are cached."""
  job, steps = tokens(prompt(10 * BS + 1, 250)), []
  for _ in range(2):
    before = llm.get_metrics()["steps"]
    llm.generate(job, greedy(1))
    steps.append(llm.get_metrics()["steps"] - before)
  late = llm.runner.is_async   # a GPU's results are read one step later
  assert steps == [3 + late, 1 + late]


def test_prefix_cache_hits_only_full_blocks_of_common_prefix(llm, folder):
  whole = prompt(4 * BS, 260)
  llm.generate(tokens(whole), greedy(1))
  for length in (1, BS - 1, BS, BS + 1, 2 * BS, 3 * BS - 1, 3 * BS):
    changed = whole[:length] + [x % 300 + 4 for x in whole[length:]]   # other tokens after the prefix
    output, = llm.generate(tokens(changed), greedy(5))
    assert output.num_cached_tokens == full_blocks(length) and ids_of(output) == reference_greedy(folder, changed, 5)
  moved = whole[BS:3 * BS + 1]   # the same blocks after another prefix
  output, = llm.generate(tokens(moved), greedy(5))
  assert output.num_cached_tokens == 0 and ids_of(output) == reference_greedy(folder, moved, 5)
  moved = whole[2 * BS:3 * BS] + whole[BS:2 * BS] + whole[:BS + 1]
  output, = llm.generate(tokens(moved), greedy(5))
  assert output.num_cached_tokens == 0 and ids_of(output) == reference_greedy(folder, moved, 5)


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


@pytest.mark.parametrize("length", [BS + 3, 2 * BS])
def test_equal_prefixes_in_one_step_do_not_share_unwritten_blocks(llm, folder, length):
  """Both fit in a step of 16 tokens; later prompts hit the blocks that they wrote."""
  common, tail = prompt(BS, 400 + length), length - BS
  jobs = {name: [*common, *prompt(tail, 410 + i)] for i, name in enumerate("abc")}
  jobs["same as a"] = jobs["a"]
  with assert_all_blocks_freed(llm):
    for name in "ab": llm.add_request(name, tokens(jobs[name]), greedy(9))
    assert cached_tokens(llm, "a", "b") == {"a": 0, "b": 0}
    for name in ("c", "same as a"): llm.add_request(name, tokens(jobs[name]), greedy(9))
    last, _ = run_watched(llm)
  assert {name: ids_of(o) for name, o in last.items()} == {n: reference_greedy(folder, jobs[n], 9) for n in jobs}
  assert [last[n].num_cached_tokens for n in jobs] == [0, 0, BS, full_blocks(length - 1)]


@pytest.mark.parametrize("n", [2, 3])
def test_prompt_hits_computed_chunks_of_equal_running_prompt(llm, folder, n):
  """The first prompt of 40 tokens takes three steps of 16 tokens: the others hit only chunks computed by then."""
  job = prompt(10 * BS, 420 + n)
  with assert_all_blocks_freed(llm):
    for i in range(n): llm.add_request(str(i), tokens(job), greedy(9))
    last, _ = run_watched(llm)
  assert [ids_of(last[str(i)]) for i in range(n)] == [reference_greedy(folder, job, 9)] * n
  assert last["0"].num_cached_tokens == 0
  assert last["1"].num_cached_tokens in range(0, 8 * BS + 1, BS), "it starts in the step of the first one's last chunk"


def test_shared_blocks_survive_abort_of_first_owner(llm, folder):
  job = prompt(2 * BS + 1, 430)
  with assert_all_blocks_freed(llm):
    llm.add_request("a", tokens(job), greedy(20))
    llm.step()
    m = llm.get_metrics()
    assert m["blocks_used"] == 3 and m["blocks_shared"] == 0
    llm.add_request("b", tokens(job), greedy(20))
    assert cached_tokens(llm, "a", "b") == {"a": 0, "b": 2 * BS}
    m = llm.get_metrics()
    assert m["blocks_used"] == 4 and m["blocks_shared"] == 2, "each block counts once, and two are shared"
    llm.abort_request("a")
    m = llm.get_metrics()
    assert m["blocks_used"] == 3 and m["blocks_shared"] == 0
    last, _ = run_watched(llm)
    assert ids_of(last["b"]) == reference_greedy(folder, job, 20)


def test_metrics_count_free_cached_blocks(folder):
  engine = LLM(folder, num_gpu_blocks_override=13, **{**NARROW, "max_num_seqs": 1, "max_num_batched_tokens": 1})
  assert engine.get_metrics()["blocks_free"] == 12 and engine.get_metrics()["blocks_cached"] == 0
  job = prompt(2 * BS + 1, 440)
  for _ in range(2):
    engine.generate(tokens(job), greedy(2))
    m = engine.get_metrics()
    assert m["blocks_free"] == 12 and m["blocks_used"] == 0 and m["blocks_cached"] == 2
  engine.generate(tokens(prompt(11 * BS + 1, 441)), greedy(2))
  m = engine.get_metrics()
  assert m["blocks_free"] == 12 and m["blocks_cached"] == 11, "only the second prompt's, which used all blocks"
  output, = engine.generate(tokens(job), greedy(2))
  assert output.num_cached_tokens == 0 and ids_of(output) == reference_greedy(folder, job, 2)


# eviction

def test_prompt_with_evicted_blocks_is_recomputed(small_llm, folder):
  with assert_all_blocks_freed(small_llm):
    for length in (6 * BS, 7 * BS, 8 * BS, 10 * BS, 11 * BS):   # 12 blocks in all
      chain, other = prompt(8 * BS + 1, 500 + length), prompt(length, 550 + length)
      for job in (chain, other, chain, other, chain[:3 * BS + 1], chain):
        output, = small_llm.generate(tokens(job), greedy(3))
        assert ids_of(output) == reference_greedy(folder, job, 3)
        assert output.num_cached_tokens in range(0, len(job), BS)
        if job is other: assert output.num_cached_tokens < length
      assert output.num_cached_tokens >= 3 * BS, "the most recently used blocks are cached"


@pytest.mark.parametrize("length", range(4, 26, 3))
def test_block_with_evicted_parent_does_not_match_another_parent(small_llm, folder, length):
  """Two requests with a common prefix in one step write it twice. One copy is freed and reused; the next block stays
  cached: first because the other request uses it, then because it was used most recently."""
  a = prompt(BS + 3, 50_000 + length)
  b = [*a[:BS], *prompt(3, 600)]
  child = [*b, *reference_greedy(folder, b, 1)][BS:]

  def num_hits(ids):
    small_llm.add_request("ask", tokens(ids), greedy(2))
    while True:
      for output in small_llm.step():
        if output.request_id != "ask" or not output.finished: continue
        assert ids_of(output) == reference_greedy(folder, ids, 2)
        return output.num_cached_tokens
  with assert_all_blocks_freed(small_llm):
    small_llm.add_request("a", tokens(a), greedy(1))
    small_llm.add_request("b", tokens(b), greedy(length))
    small_llm.step()
    for i in range(8):   # each free block becomes the first block of another prompt
      others = [prompt(BS - 1, 1000 * length + 3 * i + j) for j in range(3)]
      assert [num_hits(other) for other in others] == [0] * 3
      others = [[*other, *reference_greedy(folder, other, 1)] for other in others]
      assert {num_hits([*other, *child, 5]) for other in others} <= {0, BS}, "a hit on a block of another prompt"
    assert ids_of(small_llm.generate(tokens(b), greedy(length))[0]) == reference_greedy(folder, b, length)


def test_prefix_tree_in_a_small_pool_equals_reference(small_llm, folder):
  """About 120 branches of 4 blocks in a pool of 12: parents and children are evicted and hit in random order."""
  rng, hits = random.Random(0), small_llm.get_metrics()["prefix_cache_hits"]
  nodes = [[prompt(BS, 700 + 10 * level + i) for i in range(3)] for level in range(4)]
  with assert_all_blocks_freed(small_llm):
    for round in range(40):
      branches = [[rng.choice(level) for level in nodes[:rng.randrange(1, 5)]] for _ in range(rng.randrange(1, 5))]
      jobs = [[*sum(branch, []), *prompt(rng.randrange(BS), rng.randrange(3))] for branch in branches]
      for i, job in enumerate(jobs): small_llm.add_request(f"{round}-{i}", tokens(job), greedy(4))
      last, _ = run_watched(small_llm)
      for i, job in enumerate(jobs):
        assert ids_of(last[f"{round}-{i}"]) == reference_greedy(folder, job, 4)
        assert last[f"{round}-{i}"].num_cached_tokens in range(0, len(job), BS)
  assert small_llm.get_metrics()["prefix_cache_hits"] > hits, "the cache must have hits"


# preemption

def test_prefix_hit_after_preemption_equals_a_fresh_run(small_llm, folder):
  jobs = [prompt(9 + i, 800 + i) for i in range(4)]
  with assert_all_blocks_freed(small_llm) as before:
    for i, job in enumerate(jobs): small_llm.add_request(str(i), tokens(job), greedy(24))
    last, _ = run_watched(small_llm)
    assert small_llm.get_metrics()["num_preemptions"] > before["num_preemptions"], "the pool must be too small"
    assert [ids_of(last[str(i)]) for i in range(4)] == [reference_greedy(folder, job, 24) for job in jobs]
    assert [last[str(i)].num_cached_tokens for i in range(4)] == [0] * 4, "hits of the first start only"
    for job in jobs:
      for valid_hits in (range(0, len(job), BS), [full_blocks(len(job) - 1)]):   # remaining hits, then all
        output, = small_llm.generate(tokens(job), greedy(24))
        assert ids_of(output) == reference_greedy(folder, job, 24) and output.num_cached_tokens in valid_hits


def test_abort_while_preempted_leaves_no_block_in_use(small_llm, folder):
  def until_preempted():
    before = small_llm.get_metrics()["num_preemptions"]
    while small_llm.get_metrics()["num_preemptions"] == before: small_llm.step()

  jobs = [prompt(13, 1200 + i) for i in range(3)]   # they use all 12 blocks; the newest is preempted at the 17th token
  with assert_all_blocks_freed(small_llm) as before:
    for i, job in enumerate(jobs): small_llm.add_request(str(i), tokens(job), greedy(20))
    until_preempted()
    m = check_metrics(small_llm, before["blocks_free"])
    assert m["num_requests_waiting"] == 1 and m["num_requests_running"] == 2
    small_llm.abort_request("2")
    m = check_metrics(small_llm, before["blocks_free"])
    assert m["num_requests_waiting"] == 0 and m["num_requests_running"] == 2
    small_llm.add_request("3", tokens(prompt(13, 1203)), greedy(20))
    last, _ = run_watched(small_llm)
    assert set(last) == {"0", "1", "3"}, "aborted requests have no further outputs"
    for i in (0, 1, 3): assert ids_of(last[str(i)]) == reference_greedy(folder, prompt(13, 1200 + i), 20)
    for i, job in enumerate(jobs): small_llm.add_request(str(i), tokens(job), greedy(20))
    until_preempted()
    for i in (1, 2, 0): small_llm.abort_request(str(i))
    m = small_llm.get_metrics()
    assert m["blocks_used"] == 0 and m["blocks_free"] == before["blocks_free"]


def test_repeated_preemption_finishes_oldest_first(small_llm, folder):
  jobs = [prompt(9, 1300 + i) for i in range(6)]
  with assert_all_blocks_freed(small_llm) as before:
    for i, job in enumerate(jobs): small_llm.add_request(str(i), tokens(job), greedy(30))
    last, finish_steps = run_watched(small_llm)
    assert small_llm.get_metrics()["num_preemptions"] > before["num_preemptions"] + 3, "too few preemptions"
  steps = [finish_steps[str(i)] for i in range(6)]
  assert steps == sorted(steps) and steps[0] < steps[1], "requests of equal length finish in order of arrival"
  assert [ids_of(last[str(i)]) for i in range(6)] == [reference_greedy(folder, job, 30) for job in jobs]


@pytest.fixture(scope="module")
def priority_llm(folder):
  return LLM(folder, num_gpu_blocks_override=13, scheduling_policy="priority", **ENGINE)


def test_repeated_preemption_keeps_priority_order(priority_llm, folder):
  priorities = [3, 0, 2, 0, -1, 2]
  jobs = [prompt(9, 1400 + i) for i in range(6)]
  with assert_all_blocks_freed(priority_llm) as before:
    for i, job in enumerate(jobs): priority_llm.add_request(str(i), tokens(job), greedy(24), priority=priorities[i])
    last, finish_steps = run_watched(priority_llm)
    assert priority_llm.get_metrics()["num_preemptions"] > before["num_preemptions"]
  steps = [finish_steps[str(i)] for i in (4, 1, 3, 2, 5, 0)]   # by priority, then by arrival
  assert steps == sorted(steps) and steps[0] < steps[1]
  assert [ids_of(last[str(i)]) for i in range(6)] == [reference_greedy(folder, job, 24) for job in jobs]


# several samples of one prompt

def samples(output): return [c.token_ids for c in output.outputs]


def check_whole(output, n):
  assert output.finished and [c.index for c in output.outputs] == list(range(n))
  assert all(c.finish_reason in ("stop", "length") for c in output.outputs)


@pytest.mark.parametrize("length", EDGES)
def test_greedy_parallel_samples_equal_single_sample(llm, folder, length):
  job, expected = prompt(length, 1600 + length), reference_greedy(folder, prompt(length, 1600 + length), 2 * BS + 1)
  one_text = None
  for n, num_cached in ((3, 0), (1, full_blocks(length - 1)), (3, full_blocks(length - 1))):
    with assert_all_blocks_freed(llm) as before: output, = llm.generate(tokens(job), greedy(2 * BS + 1, n=n))
    check_whole(output, n)
    assert samples(output) == [expected] * n and output.num_cached_tokens == num_cached
    one_text = one_text or output.outputs[0].text
    assert {c.text for c in output.outputs} == {one_text} and output.prompt_token_ids == job
    m = llm.get_metrics()
    assert m["prompt_tokens"] - before["prompt_tokens"] == length, "the prompt counts once"
    assert m["generation_tokens"] - before["generation_tokens"] == n * (2 * BS + 1)


@pytest.mark.slow
@pytest.mark.parametrize("length", EDGES)
def test_seeded_samples_equal_single_requests_with_each_seed(sampler, length):
  job = tokens(prompt(length, 1700 + length))
  with assert_all_blocks_freed(sampler):
    alone = [ids_of(sampler.generate(job, seeded(2 * BS + 1, 40 + i))[0]) for i in range(3)]
    output, = sampler.generate(job, seeded(2 * BS + 1, 40, n=3))
    fresh = tokens(prompt(length, 1750 + length))   # not cached
    together, = sampler.generate(fresh, seeded(2 * BS + 1, 40, n=3))
    later = [ids_of(sampler.generate(fresh, seeded(2 * BS + 1, 40 + i))[0]) for i in range(3)]
  check_whole(output, 3)
  assert samples(output) == alone and samples(together) == later and len({*map(tuple, alone)}) == 3


def test_samples_without_seed_differ(sampler):
  output, = sampler.generate(tokens(prompt(6, 1800)), params(10, n=3))
  assert len({*map(tuple, samples(output))}) == 3


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


def test_samples_end_independently(sampler):
  job, stops = tokens(prompt(7, 2000)), {"stop_token_ids": STOPS}
  alone = [sampler.generate(job, seeded(30, 7 + i, **stops))[0].outputs[0] for i in range(4)]
  assert len({len(c.token_ids) for c in alone}) >= 3, "lengths must differ"
  with assert_all_blocks_freed(sampler):
    sampler.add_request("a", job, seeded(30, 7, n=4, **stops))
    outputs = []
    while sampler.has_unfinished_requests(): outputs += sampler.step()
  check_whole(outputs[-1], 4)
  for actual, expected in zip(outputs[-1].outputs, alone, strict=True):
    assert (actual.token_ids, actual.text, actual.finish_reason, actual.stop_reason) == (
      expected.token_ids, expected.text, expected.finish_reason, expected.stop_reason)
  for o in outputs[:-1]: assert not o.finished and len(o.outputs) == 4
  for before, after in zip(outputs, outputs[1:], strict=False):
    for a, b in zip(before.outputs, after.outputs, strict=True):
      assert b.token_ids[:len(a.token_ids)] == a.token_ids and b.text.startswith(a.text)
      if a.finish_reason: assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)


@pytest.mark.parametrize("n", [3, 5])
def test_more_samples_than_max_num_seqs_equal_single_requests(tight_sampler, sampler, n):
  """Two slots, and enough blocks for all samples."""
  job, most = tokens(prompt(6, 2100)), []
  alone = [ids_of(sampler.generate(job, seeded(9, 60 + i))[0]) for i in range(n)]
  with assert_all_blocks_freed(tight_sampler) as before:
    tight_sampler.add_request("a", job, seeded(9, 60, n=n))
    last, _ = run_watched(tight_sampler, watch=lambda m: most.append(m["num_requests_running"]))
    assert tight_sampler.get_metrics()["prompt_tokens"] - before["prompt_tokens"] == 6
  check_whole(last["a"], n)
  assert samples(last["a"]) == alone and max(most) <= 2


@pytest.mark.parametrize("length", [2 * BS, 2 * BS + 1])
def test_preempted_samples_continue_unchanged(tight_sampler, sampler, length):
  """Each sample needs 9 of the 12 blocks, 2 of them shared."""
  job = tokens(prompt(length, 2200 + length))
  alone = [ids_of(sampler.generate(job, seeded(26, 80 + i))[0]) for i in range(3)]
  with assert_all_blocks_freed(tight_sampler) as before:
    for _ in range(2):
      output, = tight_sampler.generate(job, seeded(26, 80, n=3))
      check_whole(output, 3)
      assert samples(output) == alone
    assert tight_sampler.get_metrics()["num_preemptions"] > before["num_preemptions"], "the pool must be too small"


def test_joined_stream_of_two_samples_equals_generate(sampler):
  request = tokens(prompt(7, 2400)), seeded(24, 7, n=2, stop_token_ids=STOPS)
  with assert_all_blocks_freed(sampler):
    whole, = sampler.generate(*request)
    parts = list(sampler.generate_stream(*request))
  for part in parts: assert [c.index for c in part.outputs] == [0, 1]
  for i, completion in enumerate(whole.outputs):
    assert "".join(part.outputs[i].text for part in parts) == completion.text
    assert [x for part in parts for x in part.outputs[i].token_ids] == completion.token_ids
    assert parts[-1].outputs[i].finish_reason == completion.finish_reason
  assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
  assert len(parts) >= max(map(len, samples(whole))), "a part has at most one token per sample"
  assert len({*map(len, samples(whole))}) == 2, "samples must end in different steps"


def test_abort_ends_all_samples(sampler, tight_sampler):
  for engine in (sampler, tight_sampler):   # in tight_sampler some samples have no slot yet
    for steps in (0, 1, 2, 3, 6, 9):   # while waiting, during prefill, between samples
      with assert_all_blocks_freed(engine):
        engine.add_request("a", tokens(prompt(7, 2500 + steps)), seeded(20, 5, n=4))
        for _ in range(steps): engine.step()
        engine.abort_request("a")
        assert not engine.has_unfinished_requests() and engine.step() == []
        m = engine.get_metrics()
        assert m["num_requests_running"] == m["num_requests_waiting"] == 0
    with assert_all_blocks_freed(engine):   # after one sample has ended
      engine.add_request("a", tokens(prompt(7, 2000)), seeded(30, 7, n=4, stop_token_ids=STOPS))
      while not any(c.finish_reason for o in engine.step() for c in o.outputs): pass
      assert engine.has_unfinished_requests()
      engine.abort_request("a")
    with assert_all_blocks_freed(engine):
      stream = engine.generate_stream(tokens(prompt(7, 2510)), seeded(20, 5, n=2))
      next(stream)
      stream.close()


# random operations

@pytest.mark.parametrize("seed", range(2))
def test_random_requests_with_common_prefixes_and_samples_equal_reference(small_llm, folder, seed):
  rng, jobs, last, aborted = random.Random(seed), {}, {}, set()
  prompts = [[*prompt(2 * BS, 2700 + i % 3), *prompt(length, 2710 + length)] for i, length in
             enumerate((1, BS - 1, BS, BS + 1, 3 * BS))] + [prompt(length, 2703) for length in (1, BS, 2 * BS + 1)]
  with assert_all_blocks_freed(small_llm) as before:
    total = before["blocks_free"]
    for _ in range(300):
      draw, live = rng.random(), [i for i in jobs if i not in aborted and not (i in last and last[i].finished)]
      if draw < 0.25 and len(live) < 8:
        name = str(len(jobs))
        jobs[name] = rng.choice(prompts), rng.choice((1, 2, 5, 16)), rng.choice((1, 1, 2, 3))
        small_llm.add_request(name, tokens(jobs[name][0]), greedy(jobs[name][1], n=jobs[name][2]))
      elif draw < 0.30 and live:
        aborted.add(victim := rng.choice(live))
        small_llm.abort_request(victim)
      else: last |= {o.request_id: o for o in small_llm.step()}
      check_metrics(small_llm, total)
    last |= run_watched(small_llm)[0]
  for i, (ids, length, n) in jobs.items():
    expected = reference_greedy(folder, ids, length)
    if i in aborted: assert i not in last or all(x == expected[:len(x)] for x in samples(last[i]))
    else: assert samples(last[i]) == [expected] * n and last[i].finished
  assert aborted and len(jobs) > 30


# errors and pool sizes


def test_cache_salt_separates_prefixes(llm, folder):
  ids = prompt(3 * BS, 3100)
  hits = []
  for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": "a"}, {}):
    output, = llm.generate({**tokens(ids), **salt}, greedy(3))
    assert ids_of(output) == reference_greedy(folder, ids, 3)
    hits.append(output.num_cached_tokens)
  assert hits == [0, 0, 0, 2 * BS, 2 * BS]
  for salt in ("", 5):
    with pytest.raises(ValueError, match="cache_salt"): llm.generate({**tokens(ids), "cache_salt": salt}, greedy(1))
