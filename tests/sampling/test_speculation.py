"""Speculative decoding: outputs equal those without drafts, whatever proposes them, and drafts delay no other request.
A fake model hashes a step's inputs and the content of its blocks into the next tokens: one wrong token, position or
block table changes the output."""

import pytest
from helpers.engines import greedy, ids_of, prompt, run_to_end, sampled, tokens
from helpers.speculation import NGRAM, PER_POSITION, Counts


# Counters

@pytest.mark.parametrize("k", [1, 3, 5, 7, 16])
def test_right_drafts_are_all_accepted_and_save_steps(fake, k):
  engine, oracle, count = fake({**NGRAM, "num_speculative_tokens": k}, max_num_batched_tokens=32)
  ids = prompt(9, k)
  expected = oracle.expect(ids, 200)
  output, = engine.generate(tokens(ids), greedy(200), False)
  (drafts, proposed, accepted), per_position = count(), engine.get_metrics()[PER_POSITION]
  assert ids_of(output) == expected
  assert accepted == proposed == 200 - count.steps, "a step gives one token and the accepted drafts"
  # More than seven drafts may not save time
  assert -(-200 // (k + 1)) <= count.steps <= 200 // (min(k, 7) + 1) + 6, "drafts soon reach their maximum"
  assert max(oracle.requested_sizes) == k == len(per_position) and drafts == per_position[0]
  assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (proposed, accepted)


def test_request_metrics_count_drafts_of_all_samples(fake):
  engine, oracle, count = fake()
  params, ids = sampled(40, seed=3, n=2), prompt(6, "own")
  oracle.texts = [[*ids, *oracle.model.text(ids, params, 3 + i, 40)[0]] for i in range(2)]
  outputs = engine.generate([tokens(ids), tokens(prompt(7, "own", 1))], [params, greedy(40)], False)
  _, proposed, accepted = count()
  metrics = [output.metrics for output in outputs]
  assert sum(m.num_accepted_tokens for m in metrics) == accepted > 40
  assert sum(m.num_draft_tokens for m in metrics) == proposed
  assert metrics[0].num_accepted_tokens >= metrics[0].num_draft_tokens - 4 > 40 > metrics[1].num_draft_tokens
  assert metrics[1].num_accepted_tokens < 3


# Wrong drafts

def test_wrong_drafts_become_rare_but_are_retried(fake):
  engine, oracle, count = fake(style="wrong")
  ids, proposed = prompt(9, "wrong"), [0]
  expected = oracle.expect(ids, 500)
  engine.add_request("a", tokens(ids), greedy(500))
  for _ in range(300):
    engine.step()
    proposed.append(count()[1])
  assert 0 < proposed[200] <= 60 and count()[2] == 0
  assert 0 < proposed[300] - proposed[100] <= 30, "one step in seven at most, after some time"
  oracle.style, count = "right", Counts(engine)
  assert ids_of(run_to_end(engine, 5000)["a"]) == expected
  assert count()[2] > 80 and max(oracle.requested_sizes[-5:]) == 5
  assert count.steps < 64 + 10 + 130 // 6 + 10, "drafting is retried within 64 tokens"


def test_prompts_fill_token_budget_before_drafts(fake):
  """A long prompt takes what decodes leave of the budget of 16 tokens."""
  engine, oracle, _ = fake(max_num_batched_tokens=16)
  ids = prompt(3, "decodes")
  expected = oracle.expect(ids, 60)
  engine.add_request("a", tokens(ids), greedy(60))
  for _ in range(6): engine.step()
  count = Counts(engine)
  engine.add_request("b", tokens(prompt(60, "long")), greedy(1))
  for i in range(1, 5):
    engine.step()
    assert count() == (0, 0, 0)
    if i < 4: assert engine.scheduler.running[1].num_computed == 15 * i
  assert ids_of(run_to_end(engine, 5000)["a"]) == expected and count()[0] > 0


@pytest.mark.parametrize("length", [16, 17, 20, 33])
@pytest.mark.parametrize("overlaps", [False, True])
def test_drafts_after_last_prompt_chunk_are_counted_once_verified(fake, length, overlaps):
  """Chunks of 16 tokens: when a chunk's results are read, a later step with drafts may be in flight."""
  engine, oracle, count = fake(max_num_batched_tokens=16, overlaps=overlaps)
  ids = prompt(length, "chunk", overlaps)
  assert oracle.expect(ids, 30) == ids_of(engine.generate(tokens(ids), greedy(30), False)[0])
  drafts, proposed, accepted = count()
  assert accepted == proposed == 30 - (count.steps - overlaps - (length - 1) // 16) and drafts < 10
