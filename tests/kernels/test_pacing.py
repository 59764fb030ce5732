"""How many tokens a step with prompts takes, on every device: it depends on captured sizes and measured times only."""
from types import SimpleNamespace

import pytest
from tinyvllm import LLM, SamplingParams
from tinyvllm.scheduler import BlockManager
from tinyvllm_extra.serving import engine_metrics
from tinyvllm_extra.serving.engine_metrics import MeteredScheduler
from tinyvllm_extra.options import LLMConfig


def sequence(n: int): return SimpleNamespace(num_remaining=n, tokens=range(n), reached_max_len=False)


def scheduler_of(running: list[int], waiting: list[int], **options) -> MeteredScheduler:
  """Return a scheduler with sequences that have these numbers of tokens left."""
  config = LLMConfig(max_num_seqs=200, **options)
  scheduler = MeteredScheduler(config, BlockManager(2, config))
  scheduler.sizes = [1, 8, 64, 128, 512]
  scheduler.running, scheduler.waiting = [*map(sequence, running)], [*map(sequence, waiting)]
  return scheduler


@pytest.mark.parametrize(("running", "waiting", "limit"), [
  ([1] * 64, [], 128), ([1] * 64, [20], 128), ([], [300], 128), ([], [400], 512), ([600], [], 512), ([1], [900], 512),
  ([1], [1600], 1024), ([], [500] * 9, 2048), ([1] * 150, [20], 512), ([1] * 200, [5000], 512)])
def test_step_with_prompts_fills_a_captured_size_or_is_padded_to_less_than_four_times(running, waiting, limit):
  """Sequences that wait for a slot do not count, and all that decode fit in a step."""
  assert scheduler_of(running, waiting).limit(2048) == limit


def test_budget_of_the_user_is_obeyed_while_sequences_decode(): assert scheduler_of([1], [5000]).limit(4096) == 4096


def test_sequences_that_will_end_do_not_limit_a_step():
  scheduler = scheduler_of([1], [5000])
  scheduler.running[0].reached_max_len = True   # its last token is in flight
  assert scheduler.limit(2048) == 2048


def test_steps_are_smaller_while_sequences_decode_until_they_are_fast_enough():
  scheduler = scheduler_of([1], [5000], max_pause=0.1)
  scheduler.seconds = {1024: 0.1005, 512: 0.11, 128: 5.0}
  assert scheduler.limit(2048) == 128, "the smallest size must remain"
  scheduler.seconds[512] = 0.09
  limits = [scheduler.limit(2048) for _ in range(8)]
  assert limits[0] == 512 and limits[-1] == 1024, "a size must be tried again"
  scheduler.seconds[1024] = 0.2
  assert scheduler_of([], [5000]).limit(2048) == 2048 and scheduler.limit(2048) == 512


def test_time_of_a_step_begins_at_its_launch_or_when_the_step_before_ended(monkeypatch):
  clock = iter([1.0, 1.5, 3.0, 4.0, 9.0, 10.0, 10.5]).__next__
  scheduler = scheduler_of([], [])
  monkeypatch.setattr(engine_metrics.SnapshotScheduler, "start_step", lambda *_: None)
  monkeypatch.setattr(engine_metrics.SnapshotScheduler, "update", lambda *_: None)
  monkeypatch.setattr(engine_metrics, "time", type("Clock", (), {"monotonic": staticmethod(clock)}))
  def launch(tokens): scheduler.start_step({"a": tokens - 1, "b": 1})
  def end(tokens): scheduler.update({"a": range(tokens - 1), "b": range(1)}, {})
  launch(128)     # at 1.0
  launch(512)     # at 1.5, while the first one runs
  end(128)        # at 3.0
  end(5)          # at 4.0: a further draft token of the same step
  end(512)        # at 9.0
  launch(64)      # at 10.0
  end(64)         # at 10.5
  assert scheduler.seconds == {128: 2.0, 512: 5.0, 64: 0.5}


def test_outputs_do_not_depend_on_the_pace(words_folder):
  prompts = [{"prompt_token_ids": [3 + i] * n} for i, n in enumerate((200, 3, 150, 40))]
  params = SamplingParams(max_tokens=6, temperature=0)
  def outputs(**options):
    llm = LLM(words_folder, max_model_len=256, max_num_batched_tokens=256, **options)
    for _ in llm.capture([8, 128]) if options else (): pass
    assert llm.scheduler.sizes == ([8, 128] if options else [])
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
  assert outputs(max_pause=0.0) == outputs()
