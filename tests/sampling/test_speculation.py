"""Speculative decoding: outputs equal those without drafts, whatever proposes them, and drafts delay no other request.
Most tests use a fake model, which hashes a step's inputs and the content of its blocks into the next tokens: one wrong
token, position or block table changes the output."""

import pytest
from helpers.engines import check_invariants, run_to_end
from helpers.requests import greedy, ids_of, prompt, sampled, tokens
from helpers.speculation import (Counts, NGRAM, Oracle, PER_POSITION, STYLES, always_draft, other_than)


# Counters

@pytest.mark.parametrize("k", [1, 3, 5, 7, 16])
def test_right_drafts_are_all_accepted_and_save_steps(fake, monkeypatch, k):
  engine, model = fake({**NGRAM, "num_speculative_tokens": k}, max_num_batched_tokens=32)
  oracle, count, ids = Oracle(monkeypatch), Counts(engine), prompt(9, k)
  expected, _ = model.text(ids, greedy(200), 0, 200)
  oracle.texts.append([*ids, *expected])
  output, = engine.generate(tokens(ids), greedy(200), False)
  drafts, proposed, accepted = count()
  assert ids_of(output) == expected
  assert accepted == proposed == 200 - count.steps, "a step gives one token and the accepted drafts"
  # More than seven drafts may not save time
  assert -(-200 // (k + 1)) <= count.steps <= 200 // (min(k, 7) + 1) + 6, "drafts soon reach their maximum"
  assert max(oracle.requested_sizes) == k == len(engine.get_metrics()[PER_POSITION])
  assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (proposed, accepted)
  assert drafts == engine.get_metrics()[PER_POSITION][0]


def test_repetitive_text_takes_fewer_steps(fake):
  engine, _ = fake(NGRAM, alphabet=[300])
  count = Counts(engine)
  output, = engine.generate(tokens(prompt(5)), greedy(120), False)
  _, proposed, accepted = count()
  assert ids_of(output) == [300] * 120 and accepted == 120 - count.steps and count.steps < 40
  assert accepted == proposed == output.metrics.num_accepted_tokens


def test_request_metrics_count_drafts_of_all_samples(fake, monkeypatch):
  engine, model = fake()
  oracle, count, params, ids = Oracle(monkeypatch), Counts(engine), sampled(40, seed=3, n=2), prompt(6, "own")
  for i in range(2): oracle.texts.append([*ids, *model.text(ids, params, 3 + i, 40)[0]])
  alone = prompt(7, "own", 1)
  outputs = engine.generate([tokens(ids), tokens(alone)], [params, greedy(40)], False)
  _, proposed, accepted = count()
  metrics = [output.metrics for output in outputs]
  assert sum(m.num_accepted_tokens for m in metrics) == accepted > 40
  assert sum(m.num_draft_tokens for m in metrics) == proposed
  assert metrics[0].num_accepted_tokens >= metrics[0].num_draft_tokens - 4 > 40 > metrics[1].num_draft_tokens
  assert metrics[1].num_accepted_tokens < 3


@pytest.mark.parametrize("drafts", [None, NGRAM], ids=["without", "with"])
def test_max_tokens_and_max_model_len_are_never_exceeded(fake, monkeypatch, drafts):
  engine, model = fake(drafts, max_model_len=64)
  oracle = Oracle(monkeypatch)
  for length, n in [(5, n) for n in range(1, 14)] + [(64 - n, 100) for n in range(1, 14)]:
    ids = prompt(length, n, "length")
    expected, _ = model.text(ids, greedy(100), 0, 40)
    oracle.texts = [[*ids, *expected]]
    output, = engine.generate(tokens(ids), greedy(n), False)
    assert ids_of(output) == expected[:min(n, 64 - length)] and output.outputs[0].finish_reason == "length"
    check_invariants(engine)


# Wrong drafts

def test_wrong_drafts_become_rare_but_are_retried(fake, monkeypatch):
  engine, model = fake()
  oracle, count, ids = Oracle(monkeypatch, STYLES["wrong"]), Counts(engine), prompt(9, "wrong")
  expected, _ = model.text(ids, greedy(400), 0, 400)
  oracle.texts.append([*ids, *expected])
  engine.add_request("a", tokens(ids), greedy(400))
  proposed = [0]
  while engine.has_unfinished_requests():
    engine.step()
    proposed.append(count()[1])
  assert len(proposed) == 401 and count()[2] == 0
  assert 0 < proposed[200] <= 60 and proposed[400] - proposed[200] <= 30, "one step in seven at most, after some time"
  assert proposed[400] > proposed[200] or proposed[200] > proposed[100], "drafting is retried"


def test_right_drafts_after_wrong_ones_reach_maximum(fake, monkeypatch):
  engine, model = fake()
  oracle, ids = Oracle(monkeypatch, STYLES["wrong"]), prompt(9, "again")
  expected, _ = model.text(ids, greedy(400), 0, 400)
  oracle.texts.append([*ids, *expected])
  engine.add_request("a", tokens(ids), greedy(400))
  for _ in range(100): engine.step()
  oracle.style, count = STYLES["right"], Counts(engine)
  output = run_to_end(engine, 5000)["a"]
  assert ids_of(output) == expected and count()[2] > 150 and max(oracle.requested_sizes[-5:]) == 5
  assert count.steps < 64 + 10 + 300 // 6 + 10, "drafting is retried within 64 tokens"


@pytest.mark.parametrize("overlaps", [False, True])
def test_wrong_drafts_in_small_pool_change_no_step(fake, monkeypatch, overlaps):
  """Preemptions equal those without drafts; steps do, too, unless they overlap."""
  results = []
  for drafts in (None, NGRAM):
    engine, model = fake(drafts, num_gpu_blocks_override=13, max_num_seqs=4, max_num_batched_tokens=32,
                         overlaps=overlaps)
    oracle, count = Oracle(monkeypatch, STYLES["wrong"]), Counts(engine)
    jobs = [prompt(5 + i, "tight", i) for i in range(6)]
    expected = [model.text(ids, greedy(30), 0, 30)[0] for ids in jobs]
    oracle.texts += [[*ids, *text] for ids, text in zip(jobs, expected, strict=True)]
    for i, ids in enumerate(jobs): engine.add_request(str(i), tokens(ids), greedy(30))
    last = run_to_end(engine, 5000)
    assert [ids_of(last[str(i)]) for i in range(6)] == expected
    results.append((count.preemptions, count.steps))
  assert count()[1] > 0 and results[0][0] > 0, "the test must reach this case"
  if not overlaps: assert results[0] == results[1]


@pytest.mark.parametrize("style", ["right", "partly wrong", "wrong"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_in_small_pool_cause_no_preemption(fake, monkeypatch, style, overlaps):
  """The fixture `fake` checks each preemption."""
  for blocks in (10, 13, 17):
    engine, model = fake(num_gpu_blocks_override=blocks, max_model_len=64, overlaps=overlaps)
    oracle, jobs = Oracle(monkeypatch, STYLES[style]), [prompt(3 + 4 * i, "small", i) for i in range(5)]
    expected = [model.text(ids, greedy(60), 0, min(30, engine.max_model_len - len(ids)))[0] for ids in jobs]
    oracle.texts += [[*ids, *text] for ids, text in zip(jobs, expected, strict=True)]
    for i, ids in enumerate(jobs): engine.add_request(str(i), tokens(ids), greedy(30))
    last = run_to_end(engine, 5000)
    assert [ids_of(last[str(i)]) for i in range(5)] == expected


def test_drafts_without_free_blocks_are_not_proposed(fake, monkeypatch):
  engine, model = fake(num_gpu_blocks_override=11, block_size=4, max_model_len=64)
  oracle, count = Oracle(monkeypatch), Counts(engine)
  ids, other = prompt(19, "a"), prompt(15, "b")
  oracle.texts += [[*x, *model.text(x, greedy(9), 0, 9)[0]] for x in (ids, other)]
  engine.add_request("a", tokens(ids), greedy(2))
  engine.add_request("b", tokens(other), greedy(6))
  while not engine.blocks.num_free() < 2: engine.step()
  assert count()[0] == 0, "9 of 10 blocks are used: a sequence may need the last one"
  run_to_end(engine, 5000)
  count = Counts(engine)
  engine.generate(tokens(prompt(3, "c")), greedy(1), False)
  oracle.texts.append([*ids, *model.text(ids, greedy(12), 0, 12)[0]])
  engine.generate(tokens(ids), greedy(12), False)
  assert count()[2] > 4


def test_prompts_fill_token_budget_before_drafts(fake, monkeypatch):
  """A long prompt takes what decodes leave of the budget of 16 tokens."""
  engine, model = fake(max_num_batched_tokens=16)
  oracle, ids = Oracle(monkeypatch), prompt(3, "decodes")
  expected, _ = model.text(ids, greedy(60), 0, 60)
  oracle.texts.append([*ids, *expected])
  engine.add_request("a", tokens(ids), greedy(60))
  for _ in range(6): engine.step()
  count, drafting = Counts(engine), engine.scheduler.running[0]
  engine.add_request("b", tokens(prompt(60, "long")), greedy(1))
  for i in range(1, 5):
    engine.step()
    assert count() == (0, 0, 0)
    if i < 4: assert engine.scheduler.running[1].num_computed == 15 * i
  last = run_to_end(engine, 5000)
  assert ids_of(last["a"]) == expected and count()[0] > 0 and drafting.finish_reason


@pytest.mark.parametrize("style", ["partly wrong", "wrong", "right"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_prefix_cache_after_drafts_is_correct(fake, monkeypatch, style, overlaps):
  engine, model = fake(overlaps=overlaps)
  oracle, ids = Oracle(monkeypatch, STYLES[style]), prompt(6, "found")
  always_draft(monkeypatch)
  expected, _ = model.text(ids, greedy(60), 0, 60)
  oracle.texts.append([*ids, *expected])
  assert ids_of(engine.generate(tokens(ids), greedy(41), False)[0]) == expected[:41]
  for n in (41, 40, 33, 5):
    output, = engine.generate(tokens([*ids, *expected[:n]]), greedy(60 - n), False)
    assert output.num_cached_tokens == (6 + n - 1) // 4 * 4, "all except the last token"
    assert ids_of(output) == expected[n:]


def test_rejected_drafts_in_mixed_step_are_not_cached(fake, monkeypatch):
  """One sequence has only wrong drafts, the other only right ones."""
  engine, model = fake()
  oracle, jobs = Oracle(monkeypatch), [prompt(6, "wrong"), prompt(6, "right")]
  always_draft(monkeypatch)
  expected = [model.text(ids, greedy(40), 0, 40)[0] for ids in jobs]
  wrong, right = ([*ids, *text] for ids, text in zip(jobs, expected, strict=True))
  oracle.texts += [wrong, right]
  propose = oracle.propose
  oracle.propose = lambda ids, n: [*map(other_than, propose(ids, n))] if ids == wrong[:len(ids)] else propose(ids, n)
  for _ in range(2):
    outputs = engine.generate([tokens(ids) for ids in jobs], greedy(40), False)
    assert [ids_of(output) for output in outputs] == expected


@pytest.mark.parametrize("length", [16, 17, 20, 33])
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_after_last_prompt_chunk_are_counted_once_verified(fake, monkeypatch, length, overlaps):
  """Chunks of 16 tokens: when a chunk's results are read, a later step with drafts may be in flight."""
  engine, model = fake(max_num_batched_tokens=16, overlaps=overlaps)
  oracle, ids, count = Oracle(monkeypatch), prompt(length, "chunk", overlaps), Counts(engine)
  expected, _ = model.text(ids, greedy(30), 0, 30)
  oracle.texts.append([*ids, *expected])
  assert ids_of(engine.generate(tokens(ids), greedy(30), False)[0]) == expected
  drafts, proposed, accepted = count()
  assert accepted == proposed == 30 - (count.steps - overlaps - (length - 1) // 16) and drafts < 10


