"""The engine compared with a numpy LLaMA: single, batched, chunked, preempted, streamed and aborted requests."""
import functools
import itertools
import logging
import random
import threading
import time

import numpy as np
import pytest
from helpers.engines import (ENGINE, LogitsRecorder, SAMPLING_ENGINE, assert_same_outputs, check_invariants,
                             count_bytecodes, run_to_end, set_overlap)
from helpers.models import tiny_model
from helpers.reference import cut_after_end_token, reference_greedy, reference_logits
from helpers.requests import greedy, ids_of, tokens

import tinyvllm
from tinyvllm import LLM, LLMEngine, RequestOutput, SamplingParams
from tinyvllm.request import SamplerMode
from tinyvllm.runner import NUM_WORDS, TILE, TOKENS, next_power_of_two
from tinyvllm.scheduler import BlockManager

BS = ENGINE["block_size"]


def prompt(length, salt=0): return [3 + (7 * i + 5 * salt + i * i) % 300 for i in range(length)]


run = functools.partial(run_to_end, limit=2000)


# ids and logits

@pytest.mark.parametrize("length", [1, BS - 1, BS, BS + 1, 4 * BS - 1, 4 * BS, 4 * BS + 1])
def test_greedy_ids_equal_reference(llm, folder, length):
  output, = llm.generate(tokens(prompt(length)), greedy(2 * BS + 1))
  assert ids_of(output) == reference_greedy(folder, prompt(length), 2 * BS + 1)


def test_decode_equals_prefill(llm):
  for length in (BS - 1, BS, BS + 1):
    decoded = ids_of(llm.generate(tokens(prompt(length)), greedy(10))[0])
    prefilled = [ids_of(llm.generate(tokens(prompt(length), *decoded[:i]), greedy(1))[0])[0] for i in range(10)]
    assert decoded == prefilled


def check_logits(engine, folder, ids, n):
  """Check that the greedy ids equal the reference's and all logits are within 1e-4."""
  out, logits = LogitsRecorder(engine).generate(ids, n)
  assert out == reference_greedy(folder, ids, n)
  np.testing.assert_allclose(logits, reference_logits(folder, [*ids, *out])[len(ids) - 1:-1], atol=1e-4)


@pytest.mark.parametrize("length", [BS, 4 * BS + 3])
def test_logits_equal_reference(folder, length): check_logits(LLM(folder, **ENGINE), folder, prompt(length), BS + 2)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}
VARIANTS = {
  "tied": {"tie_word_embeddings": True},
  "no grouped KV heads": {"num_key_value_heads": None},
  "one KV head of 16": {"num_key_value_heads": 1, "head_dim": 16},
  "all biases": {"attention_bias": True, "mlp_bias": True},
  "rope llama3": {"rope_scaling": LLAMA3, "rope_theta": 500.0},
  "rope linear": {"rope_scaling": {"type": "linear", "factor": 4.0}},
  "rope_parameters": {"rope_parameters": {**LLAMA3, "rope_theta": 300.0}, "rope_theta": None},
  "Mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
  "Qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
  "Qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 12},
  "odd sizes": {"hidden_size": 36, "head_dim": 6, "num_attention_heads": 6, "num_key_value_heads": 3,
                "intermediate_size": 50, "vocab_size": 333, "num_hidden_layers": 3, "rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_model_variant_equals_reference(tmp_path, variant):
  """Graphs for 1 and 4 tokens: a prompt in 3 chunks, then decodes."""
  variant_folder = tiny_model(tmp_path, seed=1, **VARIANTS[variant])
  engine = LLM(variant_folder, max_model_len=64, block_size=4, max_num_seqs=4, max_num_batched_tokens=4)
  check_logits(engine, variant_folder, prompt(12), 12)


def test_enforce_eager_equals_captured(llm, folder):
  eager = LLM(folder, enforce_eager=True, **ENGINE)
  jobs = [tokens(prompt(4)), tokens(prompt(12, 1))]
  assert_same_outputs(eager.generate(jobs, greedy(4)), llm.generate(jobs, greedy(4)))
  assert not any(hasattr(graph, "captured") for _, graph in eager.runner.graphs.values())


# batches

def test_batch_in_any_arrival_order_equals_single_requests(llm, folder):
  jobs = {str(i): (prompt(1 + 5 * i, i), 4 + 3 * i) for i in range(8)}
  rng = random.Random(0)
  for _ in range(4):
    order, outputs = rng.sample(sorted(jobs), len(jobs)), {}
    while order or llm.has_unfinished_requests():
      for request_id in [order.pop() for _ in range(min(len(order), rng.randrange(3)))]:
        llm.add_request(request_id, tokens(jobs[request_id][0]), greedy(jobs[request_id][1]))
      outputs |= {output.request_id: output for output in llm.step()}
      check_invariants(llm)
    assert {i: ids_of(o) for i, o in outputs.items()} == {i: reference_greedy(folder, *job) for i, job in jobs.items()}


@pytest.mark.parametrize("budget", [7, 64])
def test_chunked_prefill_equals_whole_prefill(llm, folder, budget):
  """A prompt of 40 tokens in chunks of 7, in chunks of 16, and whole."""
  other = LLM(folder, **{**ENGINE, "max_num_batched_tokens": budget})
  jobs = [tokens(prompt(40, salt)) for salt in range(2)]
  expected = [reference_greedy(folder, job["prompt_token_ids"], 6) for job in jobs]
  for engine in (other, llm): assert [ids_of(engine.generate(job, greedy(6))[0]) for job in jobs] == expected


def test_generate_with_params_per_prompt_keeps_order(llm, folder):
  jobs, lengths = [prompt(3 + i, i) for i in range(9)], [9, 1, 7, 3, 8, 2, 5, 4, 6]
  outputs = llm.generate([tokens(job) for job in jobs], [greedy(n) for n in lengths])
  assert [o.prompt_token_ids for o in outputs] == jobs
  assert [ids_of(o) for o in outputs] == [reference_greedy(folder, *job) for job in zip(jobs, lengths, strict=True)]
  assert all(o.finished and o.outputs[0].finish_reason == "length" and isinstance(o, RequestOutput) for o in outputs)


def test_generate_takes_text_dict_or_ids(llm):
  text = "the cat sat"
  ids = llm.tokenizer.encode(text)
  several = llm.generate([text, {"prompt": text}, tokens(ids)], greedy(5))
  assert len({tuple(ids_of(o)) for o in several}) == 1 and [o.prompt for o in several] == [text, text, None]
  assert all(o.prompt_token_ids == ids for o in several)
  assert_same_outputs(llm.generate(text, greedy(5)), several[:1])
  assert llm.generate([], greedy(5)) == []


def test_one_token_request_takes_one_step(llm, folder):
  steps = llm.get_metrics()["steps"]
  output, = llm.generate(tokens(prompt(9)), greedy(1))
  assert ids_of(output) == reference_greedy(folder, prompt(9), 1) and llm.get_metrics()["steps"] == steps + 1


def test_request_ends_at_max_model_len(llm, folder):
  ids = prompt(ENGINE["max_model_len"] - 3)
  output, = llm.generate(tokens(ids), greedy(50))
  assert ids_of(output) == reference_greedy(folder, ids, 3) and output.outputs[0].finish_reason == "length"


def test_long_prompt_does_not_stall_running_requests(llm):
  for i in range(2): llm.add_request(f"stream-{i}", tokens(prompt(3, i)), greedy(40))
  llm.step()
  llm.add_request("long", tokens(prompt(100, 77)), greedy(2))
  steps = 0
  while True:
    num_tokens = {output.request_id: len(ids_of(output)) for output in llm.step()}
    steps += 1
    assert num_tokens["stream-0"] == num_tokens["stream-1"] == steps + 1, "a running request was stalled"
    if "long" in num_tokens: break
  assert steps == -(-100 // (ENGINE["max_num_batched_tokens"] - 2)), "prefill chunks must fill the rest of the budget"
  run(llm)


def test_number_of_graphs_is_constant_after_warmup(llm, monkeypatch):
  monkeypatch.setattr("tinyvllm_extra.graphs.CAPTURE_THRESHOLD", 0)   # capture each shape at its first request
  jobs = [tokens(prompt(1 + i, i)) for i in range(24)]
  llm.generate(jobs, greedy(9))
  for n in (1, 2, 4, 8, 16): llm.generate(tokens(prompt(n)), greedy(1))
  before = len(llm.runner.graphs)
  llm.generate(jobs[::-1], [greedy(1 + i % 7) for i in range(24)])
  llm.generate([tokens(prompt(90))] * 7, greedy(11))
  assert len(llm.runner.graphs) == before
  assert sum(key.sampler_mode == SamplerMode.GREEDY and key.plan is None for key in llm.runner.graphs) == 5


def test_next_power_of_two():
  assert [next_power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 8, 9, 512)] == [1, 1, 2, 4, 4, 8, 8, 16, 512]


# overlapped steps

@pytest.fixture(params=["llm", "small_llm", "words_llm"])
def any_llm(request): return request.getfixturevalue(request.param)


@pytest.mark.slow
def test_overlapped_steps_give_same_outputs(any_llm, monkeypatch):
  ids = any_llm.generate(tokens(prompt(6)), greedy(9))[0].outputs[0].token_ids
  jobs = [(tokens(prompt(n)), params) for n, params in (
    (6, greedy(9)), (6, greedy(9, stop_token_ids=[ids[4]], ignore_eos=False)), (3, greedy(1)), (20, greedy(12)),
    (1, greedy(2)), (6, greedy(9, stop_token_ids=[ids[1]], min_tokens=5)),
    (9, SamplingParams(seed=3, max_tokens=10, ignore_eos=True)),
    (12, SamplingParams(seed=4, max_tokens=7, top_k=5)), (6, greedy(9, stop=["e", "no"])), (17, greedy(20)))]
  expected = any_llm.generate(*map(list, zip(*jobs, strict=True)))
  for overlaps in ("early", "overlapped"):
    set_overlap(monkeypatch, any_llm.runner, overlaps)
    assert_same_outputs(any_llm.generate(*map(list, zip(*jobs, strict=True))), expected)
  for job, output in zip(jobs, expected, strict=True):   # single requests and streams
    assert_same_outputs(any_llm.generate(*job), [output])
    assert "".join(x.outputs[0].text for x in any_llm.generate_stream(*job)) == output.outputs[0].text
  check_invariants(any_llm)


@pytest.mark.parametrize("overlaps,order", [("overlapped", ["read", "launch", "update"]),
                                            ("early", ["launch", "read", "update"])])
def test_overlapped_step_is_launched_before_previous_update(llm, monkeypatch, overlaps, order):
  set_overlap(monkeypatch, llm.runner, overlaps)
  events = []
  def recorded(name, call): return lambda *args: (events.append(name), call(*args))[1]
  launch = recorded("launch", llm.runner.launch)
  monkeypatch.setattr(llm.runner, "launch", lambda step: recorded("read", launch(step)))
  monkeypatch.setattr(llm, "_update", recorded("update", llm._update))
  before = llm.get_metrics()
  llm.generate(tokens(prompt(5)), greedy(4))
  assert events == ["launch", *order * 3, "read", "update"], "an update follows the next launch"
  assert llm.get_metrics()["generation_tokens"] - before["generation_tokens"] == 4


@pytest.mark.parametrize("overlaps", ["overlapped", "early"])
def test_abort_during_overlapped_step_leaves_others_unchanged(llm, folder, monkeypatch, overlaps):
  set_overlap(monkeypatch, llm.runner, overlaps)
  for i in range(3): llm.add_request(f"r{i}", tokens(prompt(5, i)), greedy(8))
  for _ in range(3): llm.step()
  llm.abort_request("r1")
  llm.add_request("r3", tokens(prompt(7, 3)), greedy(8))   # takes the slot and the blocks of r1
  finished_ids = {}
  while llm.has_unfinished_requests(): finished_ids |= {o.request_id: ids_of(o) for o in llm.step() if o.finished}
  assert finished_ids == {f"r{i}": reference_greedy(folder, prompt(7 if i == 3 else 5, i), 8) for i in (0, 2, 3)}
  check_invariants(llm)


# failed steps

class Interrupted(BaseException): """Used instead of KeyboardInterrupt, which would end the tests."""


@pytest.fixture
def failing(words_llm, monkeypatch):
  """A function that makes call `n`, counted from 0, of one of five places in a step raise. With overlapped steps,
  `update` gets the results of the previous step."""
  def fail(place, n, overlaps):
    launch, update, calls = type(words_llm.runner).launch, type(words_llm.scheduler).update, itertools.count()
    def fail_at(current_place):
      if current_place == place and next(calls) == n: raise Interrupted

    def failing_launch(step):
      fail_at("launch")
      read = launch(words_llm.runner, step)
      fail_at("launched")
      return lambda: (fail_at("read"), read())[1]

    def failing_update(*args):
      fail_at("update")
      update(words_llm.scheduler, *args)
      fail_at("updated")
    monkeypatch.setattr(words_llm.runner, "is_async", overlaps)
    monkeypatch.setattr(words_llm.runner, "launch", failing_launch)
    monkeypatch.setattr(words_llm.scheduler, "update", failing_update)
  yield fail
  for name in list(words_llm.requests): words_llm.abort_request(name)   # so that later tests do not fail, too


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("place", ["launch", "launched", "read", "update", "updated"])
def test_failed_step_loses_no_token_and_caches_no_wrong_block(words_llm, words_folder, failing, place, overlaps):
  kinds = {"short": greedy(2), "two": greedy(5, n=2), "ends": greedy(12),
           "scored": greedy(4, logprobs=2, prompt_logprobs=1), "chunks": greedy(3)}
  for n in range(6):
    failing(place, n, overlaps)
    prompts = {name: prompt(length, 1000 + len(place) * 100 + 10 * n + i + 50 * overlaps)   # not cached by other tests
               for i, (name, length) in enumerate(zip(kinds, (BS, 2 * BS + 1, 3, BS + 1, 20), strict=True))}
    third = words_llm.tokenizer.decode(reference_greedy(words_folder, prompts["ends"], 3))
    kinds["ends"] = greedy(12, stop=[third[-2:]])
    for name, params in kinds.items(): words_llm.add_request(name, tokens(prompts[name]), params)
    last, failures = {}, 0
    for _ in range(100):
      try: outputs = words_llm.step()
      except Interrupted:
        outputs, failures = [], failures + 1
        assert not words_llm.scheduler.running and words_llm.get_metrics()["blocks_used"] == 0
      check_invariants(words_llm)
      for output in outputs:
        assert output.request_id not in last or not last[output.request_id].finished, "it finished twice"
        last[output.request_id] = output
    assert failures == 1 and last.keys() == kinds.keys()
    for name, output in last.items():
      again, = words_llm.generate(tokens(prompts[name]), kinds[name])   # with cached blocks
      assert_same_outputs([output], [again])
      for c in output.outputs:
        assert c.token_ids == reference_greedy(words_folder, prompts[name], 12)[:len(c.token_ids)]
        assert len(c.token_ids) == kinds[name].max_tokens or c.finish_reason == "stop"
    assert [len(x) for x in (last["scored"].outputs[0].logprobs, last["scored"].prompt_logprobs)] == [4, BS + 1]


@pytest.mark.parametrize("overlaps", [False, True])
def test_request_finished_in_failed_step_can_be_aborted_and_readded(words_llm, words_folder, failing, overlaps):
  failing("updated", 0, overlaps)
  for name, n in (("a", 1), ("b", 4)): words_llm.add_request(name, tokens(prompt(5, n)), greedy(n))
  with pytest.raises(Interrupted):
    for _ in range(2): words_llm.step()
  words_llm.abort_request("a")
  words_llm.add_request("a", tokens(prompt(6)), greedy(3))
  last = run(words_llm)
  assert {name: ids_of(o) for name, o in last.items()} == {"a": reference_greedy(words_folder, prompt(6), 3),
                                                           "b": reference_greedy(words_folder, prompt(5, 4), 4)}


@pytest.mark.parametrize("overlaps", [False, True])
def test_request_aborted_in_a_failed_step_stays_aborted(words_llm, words_folder, failing, monkeypatch, overlaps):
  failing("launched", 1, overlaps)
  launch = words_llm.runner.launch
  monkeypatch.setattr(words_llm.runner, "launch", lambda step: (words_llm.abort_request("b"), launch(step))[1])
  for i, name in enumerate("abc"): words_llm.add_request(name, tokens(prompt(5, i)), greedy(4))
  with pytest.raises(Interrupted):
    for _ in range(3): words_llm.step()
  check_invariants(words_llm)
  assert len(words_llm.scheduler.waiting) == 2
  thread = threading.Thread(target=words_llm.step, daemon=True)   # the failed step must have released the engine
  thread.start()
  thread.join(60)
  assert words_llm.get_metrics()["num_requests_running"] == 2
  last = run(words_llm)
  assert {n: ids_of(o) for n, o in last.items()} == {n: reference_greedy(words_folder, prompt(5, i), 4)
                                                     for n, i in (("a", 0), ("c", 2))}


def test_interrupted_capture_is_repeated_as_one_graph(folder, monkeypatch):
  engine, calls = LLM(folder, **ENGINE), []
  compute = engine.runner._compute
  def interrupted(*args):
    calls.append(compute(*args))
    if len(calls) == 1: raise Interrupted
    return calls[-1]
  monkeypatch.setattr(engine.runner, "_compute", interrupted)
  with pytest.raises(Interrupted): engine.generate(tokens([5]), greedy(3))
  assert ids_of(engine.generate(tokens([5]), greedy(3))[0]) == reference_greedy(folder, [5], 3)
  assert [len(graph.captured.linear.src) for _, graph in engine.runner.graphs.values()] == [1] and len(calls) == 2


# preemption and a full pool

def test_preempted_requests_equal_reference(small_llm, folder):
  before, jobs = small_llm.get_metrics()["num_preemptions"], [prompt(5 + i, i) for i in range(6)]
  for i, job in enumerate(jobs): small_llm.add_request(str(i), tokens(job), greedy(24))
  outputs = run(small_llm)
  assert small_llm.get_metrics()["num_preemptions"] > before, "the pool must be too small for all requests at once"
  assert [ids_of(outputs[str(i)]) for i in range(6)] == [reference_greedy(folder, job, 24) for job in jobs]


def test_preemption_takes_newest_and_never_oldest(small_llm):
  for i in range(3): small_llm.add_request(str(i), tokens(prompt(13, i)), greedy(20))
  finished, lengths = [], {"0": 0}
  while small_llm.has_unfinished_requests():
    outputs = {o.request_id: o for o in small_llm.step()}
    check_invariants(small_llm)
    finished += [i for i, o in sorted(outputs.items()) if o.finished]
    if "0" not in finished: assert "0" in outputs, "the oldest must get a token in every step"
    lengths |= {i: len(ids_of(o)) for i, o in outputs.items()}
  assert finished == ["0", "1", "2"] and set(lengths.values()) == {20}


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
  outputs = run(engine)
  assert [ids_of(outputs[str(i)]) for i in range(3)] == [reference_greedy(folder, prompt(1 + i, i), BS - 1 - i)
                                                         for i in range(3)]
  assert {o.outputs[0].finish_reason for o in outputs.values()} == {"length"}


def test_pool_for_one_request_finishes_every_request(small_llm, folder):
  jobs = [prompt(n, n) for n in (40, 46, 33, 44)]
  for i, job in enumerate(jobs): small_llm.add_request(str(i), tokens(job), greedy(100))
  outputs = run(small_llm, limit=4 * 40)
  for i, job in enumerate(jobs):
    assert ids_of(outputs[str(i)]) == reference_greedy(folder, job, 12 * BS - len(job))
    assert outputs[str(i)].outputs[0].finish_reason == "length"


# aborts, streams, threads

def test_abort_frees_blocks_of_waiting_and_running_requests(small_llm, folder):
  for i in range(4): small_llm.add_request(str(i), tokens(prompt(20, i)), greedy(20))
  small_llm.step()
  small_llm.step()
  metrics = small_llm.get_metrics()
  assert metrics["num_requests_running"] == 2 and metrics["num_requests_waiting"] == 2
  small_llm.abort_request("3")   # waiting
  small_llm.abort_request("0")   # running
  small_llm.abort_request("0")
  small_llm.abort_request("unknown")
  check_invariants(small_llm)
  outputs = run(small_llm)
  assert set(outputs) == {"1", "2"}, "aborted requests have no further outputs"
  assert all(ids_of(outputs[i]) == reference_greedy(folder, prompt(20, int(i)), 20) for i in ("1", "2"))
  small_llm.add_request("0", tokens([5]), greedy(1))   # the id can be reused
  run(small_llm)


def test_joined_stream_equals_generate(words_llm, llm):
  for engine in (words_llm, llm):
    job = tokens(prompt(7))
    whole, parts = engine.generate(job, greedy(40))[0].outputs[0], list(engine.generate_stream(job, greedy(40)))
    assert "".join(p.outputs[0].text for p in parts) == whole.text
    assert [i for p in parts for i in ids_of(p)] == whole.token_ids
    assert all(len(ids_of(p)) == 1 for p in parts) and [p.finished for p in parts] == [False] * 39 + [True]
    assert parts[-1].outputs[0].finish_reason == "length" and parts[0].outputs[0].finish_reason is None


def test_step_outputs_are_cumulative(words_llm):
  words_llm.add_request("a", tokens(prompt(7)), greedy(12))
  texts = []
  while words_llm.has_unfinished_requests(): texts += [o.outputs[0].text for o in words_llm.step()]
  expected = words_llm.generate(tokens(prompt(7)), greedy(12))[0].outputs[0].text
  assert texts[-1] == expected and len(texts) == 12
  assert all(after.startswith(before) for before, after in zip(texts, texts[1:], strict=False))


def test_interleaved_streams_get_their_own_tokens(llm, folder):
  streams = [llm.generate_stream(tokens(prompt(4, i)), greedy(12 + i)) for i in range(3)]
  stream_ids = [[] for _ in streams]
  rng, live = random.Random(1), {0, 1, 2}
  while live:
    i = rng.choice(sorted(live))
    output = next(streams[i], None)
    if output is None: live.remove(i)
    else: stream_ids[i] += ids_of(output)
    check_invariants(llm)
  assert stream_ids == [reference_greedy(folder, prompt(4, i), 12 + i) for i in range(3)]


def test_stream_read_late_yields_all_tokens(llm, folder):
  """Another stream's steps finish the request before the first stream is read on."""
  slow, fast = (llm.generate_stream(tokens(prompt(4, i)), greedy(n)) for i, n in enumerate((6, 30)))
  outputs = [next(slow)]
  assert sum(len(ids_of(o)) for o in fast) == 30
  outputs += slow
  assert [i for o in outputs for i in ids_of(o)] == reference_greedy(folder, prompt(4), 6)
  assert [o.finished for o in outputs].count(True) == 1 and outputs[-1].outputs[0].finish_reason == "length"
  assert "".join(o.outputs[0].text for o in outputs) == llm.generate(tokens(prompt(4)), greedy(6))[0].outputs[0].text


def test_stream_during_generate_yields_all_tokens(llm, folder):
  stream = llm.generate_stream(tokens(prompt(4)), greedy(6))
  first_outputs = [next(stream)]
  assert ids_of(llm.generate(tokens(prompt(5)), greedy(20))[0]) == reference_greedy(folder, prompt(5), 20)
  assert [i for o in [*first_outputs, *stream] for i in ids_of(o)] == reference_greedy(folder, prompt(4), 6)


def test_calls_from_second_thread_during_a_step_raise(llm, folder, monkeypatch):
  """Calls from another thread during a step raise and change nothing; after the step they succeed."""
  errors, launch, ids = [], llm.runner.launch, prompt(5)
  calls = [lambda: llm.generate(tokens([7]), greedy(1)), lambda: next(llm.generate_stream(tokens([7]), greedy(1))),
           llm.step, lambda: llm.add_request("b", tokens([7]), greedy(1)), lambda: llm.abort_request("generate-0")]

  def make_calls():
    for call in calls:
      try: call()
      except RuntimeError as e: errors.append(str(e))

  def run_on_other_thread():
    thread = threading.Thread(target=make_calls, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()

  def launch_with_calls(step):
    monkeypatch.undo()
    run_on_other_thread()
    return launch(step)
  monkeypatch.setattr(llm.runner, "launch", launch_with_calls)
  before = llm.get_metrics()["generation_tokens"]
  assert ids_of(llm.generate(tokens(ids), greedy(6))[0]) == reference_greedy(folder, ids, 6)
  assert len(errors) == len(calls) and all("AsyncLLM" in message for message in errors)
  assert llm.get_metrics()["generation_tokens"] == before + 6
  errors.clear()
  calls[2:] = []
  run_on_other_thread()
  assert not errors, "calls after the step must succeed"
  check_invariants(llm)


def test_stream_can_continue_on_other_threads(llm, folder):
  """Each token is read on a new thread."""
  stream, stream_ids = llm.generate_stream(tokens(prompt(4)), greedy(8)), []
  for _ in range(8):
    thread = threading.Thread(target=lambda: stream_ids.extend(ids_of(next(stream))), daemon=True)
    thread.start()
    thread.join(60)
  assert stream_ids == reference_greedy(folder, prompt(4), 8)
  assert list(stream) == []


def test_engines_on_two_threads_capture_separately(tmp_path):
  """tinygrad's capture records kernels of all threads and forbids reading tensors."""
  folders, results = [tiny_model(tmp_path / str(i), seed=i, intermediate_size=64 + 16 * i) for i in range(2)], {}

  def generate(i):
    for run in range(2):
      engine = LLM(folders[i], **ENGINE)
      for n in (1, 2, 4, 8, 3):
        results[i, run, n] = ids_of(engine.generate(tokens(prompt(n)), greedy(5), use_tqdm=False)[0])
  threads = [threading.Thread(target=generate, args=(i,), daemon=True) for i in range(2)]
  for thread in threads: thread.start()
  for thread in threads: thread.join(240)
  assert results == {(i, run, n): reference_greedy(folders[i], prompt(n), 5)
                     for i in range(2) for run in range(2) for n in (1, 2, 4, 8, 3)}


def test_load_waits_for_a_capture(folder, monkeypatch):
  engine, threads, is_loaded = LLM(folder, **ENGINE), [], threading.Event()
  def load():
    LLM(folder, **ENGINE)
    is_loaded.set()

  def compute(*args):
    if not threads:
      threads.append(threading.Thread(target=load, daemon=True))
      threads[0].start()
      assert not is_loaded.wait(1)
    return plain(*args)
  plain = engine.runner._compute
  monkeypatch.setattr(engine.runner, "_compute", compute)
  assert ids_of(engine.generate(tokens([5]), greedy(3))[0]) == reference_greedy(folder, [5], 3)
  assert is_loaded.wait(60)


def test_concurrent_first_calls_of_generate_share_one_engine(folder, monkeypatch):
  instances = []
  class CountedLLM(LLM):
    def __init__(self, *args):
      instances.append(args)
      time.sleep(0.2)
      super().__init__(*args, **ENGINE)
  monkeypatch.setattr("tinyvllm.engine.shared_llm", functools.cache(CountedLLM))
  threads = [threading.Thread(target=tinyvllm.generate_stream, args=("Hello", folder), daemon=True) for _ in range(3)]
  for thread in threads: thread.start()
  for thread in threads: thread.join(60)
  assert len(instances) == 1
  assert tinyvllm.generate("the cat", folder, max_tokens=3, ignore_eos=True) and len(instances) == 1


def test_generate_request_ids_differ_from_user_ids(folder):
  llm = LLM(folder, **ENGINE)
  names = [f"{kind}-{i}" for kind in ("generate", "stream") for i in range(150, 250)]   # 200 of them
  for name in names: llm.add_request(name, tokens([3]), greedy(2))
  output, = llm.generate(tokens([5]), greedy(2), use_tqdm=False)
  *_, last = llm.generate_stream(tokens([5]), greedy(2))
  assert output.finished and last.finished


def test_closing_a_stream_aborts_its_request(llm):
  stream = llm.generate_stream(tokens(prompt(9)), greedy(50))
  next(stream)
  assert llm.has_unfinished_requests() and llm.get_metrics()["blocks_used"] > 0
  stream.close()
  assert not llm.has_unfinished_requests() and llm.get_metrics()["blocks_used"] == 0


def test_stream_of_an_aborted_request_ends_with_abort(llm):
  stream = llm.generate_stream(tokens(prompt(9)), greedy(50))
  first = next(stream)
  llm.abort_request(first.request_id)
  last = list(stream)[-1]
  assert last.finished and last.outputs[0].finish_reason == "abort" and last.outputs[0].token_ids == []
  check_invariants(llm)


def test_error_in_a_step_raises_and_aborts_the_request(llm, folder, monkeypatch):
  def fail(batch): raise RuntimeError("device lost")
  with monkeypatch.context() as patch:
    patch.setattr(llm.runner, "launch", fail)
    with pytest.raises(RuntimeError, match="device lost"): llm.generate(tokens(prompt(5)), greedy(5))
  assert not llm.has_unfinished_requests()
  check_invariants(llm)
  assert ids_of(llm.generate(tokens(prompt(5)), greedy(5))[0]) == reference_greedy(folder, prompt(5), 5)


def test_step_does_not_iterate_over_all_requests(folder, monkeypatch):
  class NotIterable(dict):
    def __iter__(self): raise AssertionError("a step iterates over all requests")
    keys = values = items = __iter__
  engine = LLM(folder, **ENGINE)
  for i in range(50): engine.add_request(str(i), tokens(prompt(3, i)), greedy(3))
  requests, engine.requests = engine.requests, NotIterable(engine.requests)
  finished_ids = {}
  for _ in range(30): finished_ids |= {o.request_id: ids_of(o) for o in engine.step() if o.finished}
  assert len(finished_ids) > 20
  assert all(ids == reference_greedy(folder, prompt(3, int(i)), 3) for i, ids in finished_ids.items())
  for i in requests: engine.abort_request(i)


# priorities

@pytest.fixture(scope="module")
def priority_llm(folder): return LLM(folder, num_gpu_blocks_override=13, scheduling_policy="priority", **ENGINE)


def test_requests_run_by_priority_then_arrival(priority_llm, folder):
  priorities = {"a": 3, "b": 1, "c": 2, "d": 0, "e": 1}
  for i, (name, priority) in enumerate(priorities.items()):
    priority_llm.add_request(name, tokens(prompt(30, i)), greedy(3), priority=priority)   # each uses most of the pool
  finished, last = [], {}
  while priority_llm.has_unfinished_requests():
    for output in priority_llm.step():
      last[output.request_id] = output
      if output.finished: finished.append(output.request_id)
    check_invariants(priority_llm)
  assert finished == ["d", "b", "e", "c", "a"]
  assert all(ids_of(last[name]) == reference_greedy(folder, prompt(30, i), 3) for i, name in enumerate(priorities))


def test_preemption_takes_lowest_priority(priority_llm, folder):
  for i, (name, priority) in enumerate({"low": 9, "high": 0}.items()):
    priority_llm.add_request(name, tokens(prompt(18, i)), greedy(20), priority=priority)
  finished, last = [], {}
  while priority_llm.has_unfinished_requests():
    for output in priority_llm.step():
      last[output.request_id] = output
      if output.finished: finished.append(output.request_id)
    check_invariants(priority_llm)
  assert finished == ["high", "low"] and priority_llm.get_metrics()["num_preemptions"] > 0
  assert [ids_of(last[n]) for n in ("low", "high")] == [reference_greedy(folder, prompt(18, i), 20) for i in range(2)]


def test_negative_priority_is_accepted(priority_llm):
  priority_llm.add_request("a", tokens([5]), greedy(1), priority=-3)
  assert [o.request_id for o in priority_llm.step()] == ["a"]


# random operations

@pytest.mark.parametrize("seed", range(3))
def test_random_adds_steps_and_aborts_equal_reference(small_llm, folder, seed):
  rng, jobs, last, aborted, number = random.Random(seed), {}, {}, set(), 0
  prompts = [prompt(n, n) for n in (1, 3, 4, 5, 8, 15, 16, 17, 22, 31)]
  for _ in range(300):
    draw = rng.random()
    if draw < 0.25 and len(jobs) - len(last) < 12:
      jobs[str(number)] = job = (rng.choice(prompts), rng.choice((1, 2, 5, 16)), rng.random() < 0.5)
      small_llm.add_request(str(number), tokens(job[0]), greedy(job[1], ignore_eos=job[2]))
      number += 1
    elif draw < 0.30 and (live := [i for i in jobs if i not in aborted and not (i in last and last[i].finished)]):
      aborted.add(victim := rng.choice(live))
      small_llm.abort_request(victim)
    else: last |= {o.request_id: o for o in small_llm.step()}
    check_invariants(small_llm)
  last |= run(small_llm)
  for i, (ids, n, ignore_eos) in jobs.items():
    expected = cut_after_end_token(reference_greedy(folder, ids, n), () if ignore_eos else (2,))
    if i in aborted: assert i not in last or ids_of(last[i]) == expected[:len(ids_of(last[i]))]
    else: assert ids_of(last[i]) == expected and last[i].finished
  assert aborted and len(jobs) > 40


# stop strings and stop tokens

@pytest.fixture(scope="module")
def greedy_text(words_llm):
  """The text of a greedy request, its ids, and each token's piece of text."""
  parts = list(words_llm.generate_stream(tokens(prompt(7, 1)), greedy(24)))
  pieces = [p.outputs[0].text for p in parts]
  assert sum(len(p) > 1 for p in pieces) > 6, "pieces must be longer than a character"
  return "".join(pieces), [i for p in parts for i in ids_of(p)], pieces


def run_with_stop(engine, **options):
  """Run the same request with generate and as a stream. Return the completion and the stream's pieces of text."""
  job, params = tokens(prompt(7, 1)), greedy(24, **options)
  whole, parts = engine.generate(job, params)[0].outputs[0], list(engine.generate_stream(job, params))
  pieces, last = [p.outputs[0].text for p in parts], parts[-1].outputs[0]
  assert "".join(pieces) == whole.text and [i for p in parts for i in ids_of(p)] == whole.token_ids
  assert (last.finish_reason, last.stop_reason) == (whole.finish_reason, whole.stop_reason)
  return whole, pieces


def stop_across_tokens(pieces, min_tokens=4):
  """Return a stop string from the end of a token to the start of a later one, and the number of tokens up to there."""
  for i in range(min_tokens, len(pieces) - 3):
    stop = pieces[i][-1:] + pieces[i + 1] + pieces[i + 2][:1]
    if pieces[i + 1] and "".join(pieces).find(stop) == len("".join(pieces[:i + 1])) - 1: return stop, i + 3
  raise AssertionError("the text has no such stop string")


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_across_tokens_ends_the_text(words_llm, greedy_text, include):
  text, ids, pieces = greedy_text
  stop, n = stop_across_tokens(pieces)
  completion, _ = run_with_stop(words_llm, stop=stop, include_stop_str_in_output=include)
  start = text.index(stop)
  assert completion.text == text[:start + len(stop) * include] and completion.token_ids == ids[:n]
  assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_stream_never_yields_a_stop_string(words_llm, greedy_text):
  text, _, pieces = greedy_text
  stop, _ = stop_across_tokens(pieces)
  text_so_far = ""
  for output in words_llm.generate_stream(tokens(prompt(7, 1)), greedy(24, stop=[stop])):
    text_so_far += output.outputs[0].text
    assert text.startswith(text_so_far) and len(text_so_far) <= text.index(stop)


def test_stop_string_at_end_of_text_is_removed(words_llm, greedy_text):
  text, ids, _ = greedy_text
  stop = text[-3:]
  assert text.index(stop) == len(text) - 3
  completion, _ = run_with_stop(words_llm, stop=[stop])
  assert completion.text == text[:-3] and completion.token_ids == ids
  assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


def test_earliest_of_two_stop_strings_wins(words_llm, greedy_text):
  text, _, pieces = greedy_text
  stop, _ = stop_across_tokens(pieces)
  start = text.index(stop)
  late = text[start + 1:start + len(stop)]   # starts one character later, with the same end
  assert text.index(late) == start + 1
  completion, _ = run_with_stop(words_llm, stop=[late, stop])
  assert completion.text == text[:start] and completion.stop_reason == stop


def test_buffered_text_without_stop_is_flushed_once(words_llm, greedy_text):
  text, ids, _ = greedy_text
  completion, parts = run_with_stop(words_llm, stop=[text[-2:] + "#", text[4:9] + "#"])
  assert completion.text == text and completion.token_ids == ids
  assert (completion.finish_reason, completion.stop_reason) == ("length", None)
  assert parts[-1].endswith(text[-2:])


def test_stop_string_in_the_prompt_is_ignored(words_llm):
  text = "the cat sat on the mat"
  assert words_llm.generate(text, greedy(5, stop="cat"))[0].outputs[0].finish_reason == "length"


@pytest.mark.parametrize("include", [False, True])
def test_stop_token_is_in_ids_but_not_in_text(words_llm, greedy_text, include):
  text, ids, pieces = greedy_text
  n = next(i for i in range(4, 24) if ids.index(ids[i]) == i and pieces[i])
  completion, _ = run_with_stop(words_llm, stop_token_ids=[ids[n], 300], include_stop_str_in_output=include)
  assert completion.token_ids == ids[:n + 1] and completion.text == "".join(pieces[:n + include])
  assert (completion.finish_reason, completion.stop_reason) == ("stop", ids[n])


@pytest.fixture(scope="module")
def eos_llm(tmp_path_factory, folder):
  """The shared model with output tokens 4 and 7 of prompt(5) as EOS tokens in generation_config.json."""
  copy = tiny_model(tmp_path_factory.mktemp("eos"))
  ids = reference_greedy(folder, prompt(5), 7)
  assert len(set(ids)) == 7
  (copy / "generation_config.json").write_text(f'{{"eos_token_id": [{ids[6]}, {ids[3]}]}}')
  return LLM(copy, **SAMPLING_ENGINE)


def test_any_of_several_eos_tokens_ends_the_text(eos_llm, folder):
  expected = reference_greedy(folder, prompt(5), 20)
  completion = eos_llm.generate(tokens(prompt(5)), greedy(20, ignore_eos=False))[0].outputs[0]
  assert completion.token_ids == expected[:4] and (completion.finish_reason, completion.stop_reason) == ("stop", None)
  assert completion.text == eos_llm.generate(tokens(prompt(5)), greedy(3))[0].outputs[0].text, "EOS has no text"


def test_ignore_eos_continues_to_max_tokens(eos_llm, folder):
  completion = eos_llm.generate(tokens(prompt(5)), greedy(20))[0].outputs[0]
  assert completion.token_ids == reference_greedy(folder, prompt(5), 20) and completion.finish_reason == "length"


def test_min_tokens_suppresses_eos_and_stop_tokens(eos_llm, folder):
  ends = {reference_greedy(folder, prompt(5), 7)[i] for i in (3, 6)} | {77}
  ids = prompt(5)
  for i in range(12):
    logits = reference_logits(folder, ids)[-1]
    if i < 6: logits[list(ends)] = -np.inf
    ids.append(int(logits.argmax()))
  expected = cut_after_end_token(ids[5 + 6:], ends)
  params = greedy(12, ignore_eos=False, min_tokens=6, stop_token_ids=[77])
  completion = eos_llm.generate(tokens(prompt(5)), params)[0].outputs[0]
  assert completion.token_ids == ids[5:5 + 6] + expected
  assert not ends & set(completion.token_ids[:6])


def test_stop_string_before_min_tokens_is_ignored(words_llm, greedy_text):
  text, ids, pieces = greedy_text
  stop, n = stop_across_tokens(pieces)
  assert text.count(stop) == 1
  completion, _ = run_with_stop(words_llm, stop=stop, min_tokens=n)
  assert completion.text == text and completion.token_ids == ids and completion.finish_reason == "length"


# metrics

def test_request_metrics_equal_event_times(llm):
  output, = llm.generate(tokens(prompt(20)), greedy(5))
  m = output.metrics
  assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time and m.num_generated == 5
  assert m.ttft == m.first_token_time - m.arrival_time and m.latency == m.finished_time - m.arrival_time
  assert m.queue_time == m.first_scheduled_time - m.arrival_time
  assert m.tpot == pytest.approx((m.finished_time - m.first_token_time) / 4) and m.tpot > 0


def test_engine_metrics_equal_observed_counts(folder):
  engine = LLMEngine(folder, **ENGINE)
  idle = engine.get_metrics()
  assert idle["tokens_per_second"] == 0 and idle["generation_tokens"] == 0 and idle["blocks_used"] == 0
  for i in range(3): engine.add_request(str(i), tokens(prompt(2 + i)), greedy(4 + i))
  assert engine.get_metrics()["num_requests_waiting"] == 3
  engine.step()
  metrics = engine.get_metrics()
  assert metrics["num_requests_running"] == 3 and metrics["num_requests_waiting"] == 0 and metrics["blocks_used"] == 3
  steps = 1
  while engine.has_unfinished_requests():
    engine.step()
    steps += 1
  m = engine.get_metrics()
  assert m["prompt_tokens"] == 2 + 3 + 4 and m["generation_tokens"] == 4 + 5 + 6 and m["requests_finished"] == 3
  assert steps == 6 and m["mean_batch_size"] == pytest.approx(15 / 6)
  assert m["tokens_per_second"] > 0 and m["requests_per_second"] == pytest.approx(m["tokens_per_second"] * 3 / 15)
  assert m["blocks_used"] == 0 and m["blocks_free"] == engine.blocks.num_blocks - 1 and m["num_preemptions"] == 0


def test_get_metrics_work_does_not_depend_on_pool_size(llm, monkeypatch):
  def work(size):
    blocks = BlockManager(size, llm.config)
    monkeypatch.setattr(llm, "blocks", blocks)
    monkeypatch.setattr(llm.scheduler, "blocks", blocks)
    return count_bytecodes(llm.get_metrics)
  work(10)
  assert work(250_000) == work(100)


@pytest.mark.parametrize("one_finishes", [False, True], ids=["all decode", "one finishes and the next starts"])
def test_step_work_does_not_depend_on_waiting_requests(llm, one_finishes):
  """Six requests run. one_finishes: one finishes in the second step, and the next starts in the third."""
  def work(waiting):
    for i in range(6): llm.add_request(f"runs {i}", tokens([5 + i]), greedy(2 if one_finishes and i == 0 else 9))
    llm.step()
    for i in range(waiting): llm.add_request(f"waits {i}", tokens([3]), greedy(9))
    count = count_bytecodes(llm.step) + count_bytecodes(llm.step)
    metrics = llm.get_metrics()
    assert metrics["num_requests_running"] == 6 and metrics["num_requests_waiting"] == waiting - one_finishes
    for name in [*llm.requests]: llm.abort_request(name)
    return count
  work(10)   # captures the graphs
  assert work(10_000) < 1.05 * work(10)


def test_capture_works_on_any_thread(tmp_path):
  """The kernels are not compiled yet, and tinygrad's disk cache belongs to the thread that opened it."""
  llm = LLM(tiny_model(tmp_path, intermediate_size=80), **ENGINE)
  results = {}

  def generate(n): results[n] = ids_of(llm.generate(tokens(prompt(n)), greedy(4), use_tqdm=False)[0])
  for n in (3, 9):
    thread = threading.Thread(target=generate, args=(n,), daemon=True)
    thread.start()
    thread.join(120)
  assert results == {n: reference_greedy(tmp_path, prompt(n), 4) for n in (3, 9)}


def test_abort_during_launch_leaves_other_requests_unchanged(llm, folder, monkeypatch):
  launch = llm.runner.launch
  def abort_and_launch(step):
    llm.abort_request("r1")
    return launch(step)
  for i in range(3): llm.add_request(f"r{i}", tokens(prompt(5, i)), greedy(6))
  for _ in range(2): llm.step()
  monkeypatch.setattr(llm.runner, "launch", abort_and_launch)
  finished_ids = {}
  while llm.has_unfinished_requests(): finished_ids |= {o.request_id: ids_of(o) for o in llm.step() if o.finished}
  assert finished_ids == {f"r{i}": reference_greedy(folder, prompt(5, i), 6) for i in (0, 2)}
  check_invariants(llm)


def test_query_tiles_cover_each_token_once(tmp_path, monkeypatch):
  """A query tile has consecutive tokens of one sequence, in prefill chunks and decodes alike."""
  llm = LLM(str(tiny_model(tmp_path, max_position_embeddings=512)), max_num_seqs=6, max_num_batched_tokens=256,
            max_model_len=400, num_gpu_blocks_override=200)
  launch, sizes = llm.runner.launch, []
  def checked_launch(step):
    T = step.key.num_tokens
    fields = dict(zip(TOKENS.dtype.names, step.words[:NUM_WORDS * T].reshape(NUM_WORDS, T).tolist(), strict=False))
    tiles = list(itertools.takewhile(lambda tile: tile >= 0, fields["query_tile"]))
    assert set(fields["query_tile"][len(tiles):]) <= {-1} and len(tiles) <= T // TILE + llm.config.max_num_seqs
    spans = [range(tile // TILE, tile // TILE + tile % TILE + 1) for tile in tiles]
    num_tokens = sum(map(len, step.computed.values()))
    assert sorted(itertools.chain(*spans)) == [*range(num_tokens)]
    for span in spans:
      assert len({fields["slot"][i] for i in span}) == 1
      assert [fields["position"][i] for i in span] == [fields["position"][span[0]] + i for i in range(len(span))]
    sizes.append([len(span) for span in spans])
    return launch(step)
  monkeypatch.setattr(llm.runner, "launch", checked_launch)
  llm.generate([tokens(prompt(length, length)) for length in (5, 300, 64, 65, 1, 130)], greedy(6))
  assert any(1 in step and TILE in step for step in sizes), "decodes must share a step with prefill chunks"
