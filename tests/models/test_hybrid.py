"""Models with recurrent states: what a step writes in place, snapshots, drafts and failures. test_models.py compares
their logits and ids with Hugging Face's classes."""
import itertools
import json
import random

import pytest
from helpers.engines import assert_all_blocks_freed, greedy, ids_of, set_overlap, tokens
from helpers.faults import break_steps, step
from helpers.parameters import slow
from helpers.record_models import NUM_TOKENS, OPTIONS, make_prompts, read, write_model

from tinyvllm import LLM, InputError
from tinyvllm_extra.cache import snapshots
from tinyvllm_extra.sampling import speculation

PROMPTS = make_prompts("lfm2")   # of all hybrids
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module", params=["lfm2", "qwen3_5", *slow("qwen3_5_moe")])
def folder(request, tmp_path_factory):
  return write_model(tmp_path_factory.mktemp("hybrid") / request.param, request.param)


@pytest.fixture
def ids(folder): return read(folder.name)["ids"]


@pytest.fixture(scope="module")
def llm(folder): return LLM(folder, **OPTIONS)


def generated(llm, prompts, count=NUM_TOKENS):
  return [ids_of(output) for output in llm.generate([tokens(ids) for ids in prompts], greedy(count))]


def check_states(llm):
  """Check that each row is free or a snapshot, once."""
  rows = [*llm.states.free_rows, *llm.states.snapshots.values()]
  assert len({*rows}) == len(rows) and min(rows) > llm.states.padding, "a row has two uses"
  assert len(rows) == llm.num_snapshot_rows, "a row is lost"


@pytest.mark.parametrize("overlaps", ["", "overlapped", "early"])
def test_ids_do_not_depend_on_when_results_are_read(llm, ids, monkeypatch, overlaps):
  set_overlap(monkeypatch, llm.runner, overlaps)
  for _ in range(2): assert generated(llm, PROMPTS) == ids


def test_next_turns_compute_only_the_new_tokens(llm):
  """Each turn's prompt is the whole conversation so far, with the generated answers."""
  conversation = [*PROMPTS[4]]
  whole = LLM(llm.path, **OPTIONS, enable_prefix_caching=False)
  for turn in range(3):
    with assert_all_blocks_freed(llm) as before: output, = llm.generate([tokens(conversation)], greedy(7))
    assert ids_of(output) == generated(whole, [conversation], 7)[0]
    hits = llm.get_metrics()["prefix_cache_hits"] - before["prefix_cache_hits"]
    if turn: assert hits >= len(conversation) - 3 - 2 * OPTIONS["block_size"]
    conversation += [*ids_of(output), 5, 6, 7]


def test_snapshots_are_before_the_last_block_of_a_prompt_and_at_the_end_of_an_answer(folder, ids, tmp_path):
  """A prompt of 23 tokens in chunks of at most 8: steps end at 8, 16, 20 and 23, then at 24, 25, ..., 39."""
  llm, conversation = LLM(folder, **OPTIONS, trace=str(tmp_path / "trace")), PROMPTS[5] + ids[5]
  generated(llm, [PROMPTS[5]], 17)
  for length, num_cached in ((23, 20), (33, 20), (23, 20)):
    output, = llm.generate([tokens(conversation[:length])], greedy(1))
    assert output.num_cached_tokens == num_cached
  generated(llm, [PROMPTS[5]])
  output, = llm.generate([tokens(conversation)], greedy(1))
  assert output.num_cached_tokens == 32
  assert llm.get_metrics()["state_snapshots"] == 3, "at 20, 32 and 36"
  assert llm.get_metrics()["state_snapshot_hits"] == 5
  llm.shutdown()
  states = [json.loads(line)["states"] for line in (tmp_path / "trace").read_text().splitlines()[1:]]
  assert [position for x in states[:6] for _, position in x["positions"]] == [8, 16, 20, 23, 24, 25]
  assert states[-1].items() >= {"state_snapshots": 3, "state_snapshot_hits": 5}.items()


def test_samples_of_a_prompt_share_its_snapshot(llm, ids):
  output, = llm.generate([tokens(PROMPTS[6])], greedy(NUM_TOKENS, n=3, temperature=0.0))
  assert [sample.token_ids for sample in output.outputs] == [ids[6]] * 3


@pytest.mark.parametrize("seed", range(3))
def test_random_failures_and_aborts_change_no_ids(folder, ids, monkeypatch, seed):
  """Few blocks, so that sequences are preempted, and snapshots, so that they are replaced."""
  rng = random.Random(seed)
  monkeypatch.setattr("tinyvllm_extra.cache.snapshots.MAX_SNAPSHOTS", 1)
  llm = LLM(folder, **OPTIONS, num_gpu_blocks_override=18)
  llm.num_snapshot_rows = len(llm.states.free_rows)
  set_overlap(monkeypatch, llm.runner, ["", "overlapped", "early"][seed])
  break_steps(llm, monkeypatch, lambda place: rng.random() < 0.03)
  last, numbers = {}, itertools.count()
  for _ in range(120):
    if rng.random() < 0.3:
      name = f"{rng.randrange(8)} {next(numbers)}"
      llm.add_request(name, tokens(PROMPTS[int(name[0])]), greedy(rng.randint(1, NUM_TOKENS)))
    if llm.requests and rng.random() < 0.05: llm.abort_request(rng.choice([*llm.requests]))
    if llm.requests: step(llm, last)
    check_states(llm)
  while llm.requests: step(llm, last)
  assert len(last) > 20
  for name, output in last.items(): assert ids_of(output) == ids[int(name[0])][:len(ids_of(output))]


def test_drafts_change_no_ids(folder, ids, monkeypatch):
  """Drafts with errors at random places: the state before them returns, and accepted tokens are computed again."""
  rng = random.Random(1)
  known = [prompt + answer for prompt, answer in zip(PROMPTS, ids, strict=True)]

  def propose(self, seen, n):
    rest = next((x[len(seen):] for x in known if x[:len(seen)] == seen), [])[:n]
    return [token if rng.random() < 0.7 else token ^ 1 for token in rest]
  monkeypatch.setattr(speculation.NGramDrafter, "propose", propose)
  monkeypatch.setattr(speculation.NGramDrafter, "needs_sync", lambda *_: True)
  llm = LLM(folder, **OPTIONS, speculative_config=DRAFTS)
  for _ in range(2): assert generated(llm, PROMPTS) == ids
  metrics = llm.get_metrics()
  assert 0 < metrics["spec_decode_num_accepted_tokens"] < metrics["spec_decode_num_draft_tokens"]


def test_what_states_do_not_support_is_refused(folder, llm, tmp_path, monkeypatch):
  with pytest.raises(InputError, match="tensor_parallel_size"): LLM(folder, **OPTIONS, tensor_parallel_size=2)
  generated(llm, [PROMPTS[6]])
  with pytest.raises(InputError, match="recurrent layers cannot be saved"): llm.save_prefix_cache(tmp_path / "cache")
  draft = {"model": str(folder), "num_speculative_tokens": 2}
  with pytest.raises(InputError, match="recurrent layers, which a draft model must not have"):
    LLM(folder, **OPTIONS, speculative_config=draft)
  monkeypatch.setattr(snapshots, "state_shapes", lambda config: [(2, 2**40), ()])
  with pytest.raises(InputError, match="max_num_seqs=4 needs .* of recurrent states"): LLM(folder, **OPTIONS)
