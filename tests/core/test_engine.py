"""The engine compared with a numpy LLaMA: single, batched, chunked, preempted, streamed and aborted requests."""
import functools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.engines import (ENGINE, assert_same_outputs, count_bytecodes, greedy, ids_of, prompt, run_to_end,
                             set_overlap, tokens)
from helpers.reference import reference_greedy

from tinyvllm import LLM, LLMEngine, RequestOutput, generate, generate_stream
from tinyvllm.request import SamplerMode
from tinyvllm.scheduler import BlockManager
from tinyvllm_extra import graph_policy



# batches

@pytest.mark.parametrize("budget", [7, 64, 256])
def test_prefill_in_any_chunks_equals_reference(folder, budget):
  """Prompts in chunks of 7 and 64 tokens, and whole. Other tests have chunks of 16."""
  engine = LLM(folder, **{**ENGINE, "max_num_batched_tokens": budget})
  jobs = [prompt(length, length) for length in (1, 40, 64, 65, 100)]
  outputs = engine.generate([tokens(job) for job in jobs], greedy(6))
  assert [(o.prompt_token_ids, ids_of(o)) for o in outputs] == [(job, reference_greedy(folder, job, 6)) for job in jobs]
  assert all(o.finished and o.outputs[0].finish_reason == "length" and isinstance(o, RequestOutput) for o in outputs)


def test_generate_takes_text_dict_or_ids(llm):
  text = "the cat sat"
  ids = llm.tokenizer.encode(text)
  several = llm.generate([text, {"prompt": text}, tokens(ids)], greedy(5))
  assert len({tuple(ids_of(o)) for o in several}) == 1 and [o.prompt for o in several] == [text, text, None]
  assert all(o.prompt_token_ids == ids for o in several)
  assert_same_outputs(llm.generate(text, greedy(5)), several[:1])
  assert llm.generate([], greedy(5)) == []


def test_number_of_graphs_is_constant_after_warmup(llm, monkeypatch):
  monkeypatch.setattr(graph_policy, "CAPTURE_THRESHOLD", 0)   # capture each shape at its first request
  jobs = [tokens(prompt(1 + i, i)) for i in range(24)]
  llm.generate(jobs, greedy(9))
  for n in (1, 2, 4, 8, 16): llm.generate(tokens(prompt(n)), greedy(1))
  before = len(llm.runner.graphs)
  llm.generate(jobs[::-1], [greedy(1 + i % 7) for i in range(24)])
  llm.generate([tokens(prompt(90))] * 7, greedy(11))
  assert len(llm.runner.graphs) == before
  assert sum(key.sampler_mode == SamplerMode.GREEDY and key.plan is None for key in llm.runner.graphs) == 5


# overlapped steps

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


# aborts, streams, threads

def test_abort_of_waiting_or_running_request_does_not_change_others(small_llm, folder):
  for i in range(4): small_llm.add_request(str(i), tokens(prompt(20, i)), greedy(20))
  for _ in range(2): small_llm.step()
  metrics = small_llm.get_metrics()
  assert metrics["num_requests_running"] == metrics["num_requests_waiting"] == 2
  for name in ("3", "0", "0", "unknown"): small_llm.abort_request(name)   # waiting, running, aborted
  assert {int(name): ids_of(output) for name, output in run_to_end(small_llm).items()} == {
    i: reference_greedy(folder, prompt(20, i), 20) for i in (1, 2)}
  small_llm.add_request("0", tokens([5]), greedy(1))   # the id can be reused
  run_to_end(small_llm)


def test_stream_read_late_yields_all_tokens(llm, folder):
  """Another stream's steps finish the request before the first stream is read on."""
  slow, fast = (llm.generate_stream(tokens(prompt(4, i)), greedy(n)) for i, n in enumerate((6, 30)))
  outputs = [next(slow)]
  assert sum(len(ids_of(o)) for o in fast) == 30
  outputs += slow
  assert [i for o in outputs for i in ids_of(o)] == reference_greedy(folder, prompt(4), 6)
  assert [o.finished for o in outputs].count(True) == 1 and outputs[-1].outputs[0].finish_reason == "length"
  assert "".join(o.outputs[0].text for o in outputs) == llm.generate(tokens(prompt(4)), greedy(6))[0].outputs[0].text


def test_concurrent_first_calls_of_generate_share_one_engine(folder, monkeypatch):
  folders = []

  def load_slowly(folder):
    folders.append(folder)
    time.sleep(0.2)
    return LLM(folder, **ENGINE)
  monkeypatch.setattr("tinyvllm.shared_llm", functools.cache(load_slowly))
  with ThreadPoolExecutor(3) as pool: calls = [pool.submit(generate_stream, "Hello", folder) for _ in range(3)]
  for call in calls: call.result()
  assert generate("the cat", folder, max_tokens=3, ignore_eos=True) and folders == [str(folder)]


def test_generate_request_ids_differ_from_user_ids(folder):
  llm = LLM(folder, **ENGINE)
  for kind in ("generate", "stream"):
    for i in range(150, 250): llm.add_request(f"{kind}-{i}", tokens([3]), greedy(2))
  assert llm.generate(tokens([5]), greedy(2), use_tqdm=False)[0].finished
  assert [*llm.generate_stream(tokens([5]), greedy(2))][-1].finished


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
  def state(): return [engine.get_metrics()[f"num_requests_{name}"] for name in ("waiting", "running")]
  idle = engine.get_metrics()
  assert idle["tokens_per_second"] == idle["generation_tokens"] == idle["blocks_used"] == 0
  for i in range(3): engine.add_request(str(i), tokens(prompt(2 + i)), greedy(4 + i))
  assert state() == [3, 0]
  engine.step()
  assert state() == [0, 3] and engine.get_metrics()["blocks_used"] == 3
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


def refuse(*_): raise AssertionError("a step walks over all requests")
class Requests(dict): __iter__ = keys = values = items = refuse
class Queue(list): __iter__ = __contains__ = refuse


@pytest.mark.parametrize("one_finishes", [False, True], ids=["all decode", "one finishes and the next starts"])
def test_step_work_does_not_depend_on_waiting_requests(llm, one_finishes):
  """Six requests run. one_finishes: one finishes in the second step, and the next starts in the third."""
  def work(waiting):
    for i in range(6): llm.add_request(f"runs {i}", tokens([5 + i]), greedy(2 if one_finishes and i == 0 else 9))
    llm.step()
    for i in range(waiting): llm.add_request(f"waits {i}", tokens([3]), greedy(9))
    llm.requests, llm.scheduler.waiting = Requests(llm.requests), Queue(llm.scheduler.waiting)
    count = count_bytecodes(llm.step) + count_bytecodes(llm.step)   # without walks by C code, which these two refuse
    llm.requests, llm.scheduler.waiting = dict(dict.items(llm.requests)), llm.scheduler.waiting[:]
    metrics = llm.get_metrics()
    assert metrics["num_requests_running"] == 6 and metrics["num_requests_waiting"] == waiting - one_finishes
    for name in [*llm.requests]: llm.abort_request(name)
    return count
  work(10)   # captures the graphs
  assert work(10_000) < 1.05 * work(10)
