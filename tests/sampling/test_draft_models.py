"""Speculative decoding with a draft model: outputs equal those without drafts, and its drafts equal its own outputs."""
import contextlib
import random

import pytest
import sentencepiece
from helpers.engines import ENGINE, check_invariants
from helpers.faults import Failed, break_steps, fail_once
from helpers.models import VOCAB, tiny_model
from helpers.requests import greedy, ids_of, prompt, sampled, tokens
from helpers.speculation import (CASES, Counts, NO_DRAFTS, check_same)

from tinyvllm import LLM
from tinyvllm_extra.server.metrics import draft_statistics

OPTIONS = {**ENGINE, "max_num_seqs": 16}   # one graph serves all requests


# Draft models

@pytest.fixture(scope="module")
def other_folder(tmp_path_factory):
  """A smaller model with the same vocabulary."""
  return tiny_model(tmp_path_factory.mktemp("other"), seed=7, words=True, num_hidden_layers=1, hidden_size=16)


@pytest.fixture(scope="module")
def own_draft_llm(words_folder):
  """An engine whose draft model is the target model."""
  engine = LLM(words_folder, **OPTIONS, speculative_config={"model": str(words_folder), "num_speculative_tokens": 3})
  for _ in engine.capture([16], optional=True): pass
  return engine


@pytest.fixture(scope="module")
def other_draft_llm(words_folder, other_folder):
  """An engine whose draft model is another, smaller model."""
  engine = LLM(words_folder, **OPTIONS, speculative_config={"model": other_folder, "num_speculative_tokens": 3})
  for _ in engine.capture([16], optional=True): pass
  return engine


class TestDraftModel:
  @pytest.mark.parametrize("case", [case for case in CASES if case not in NO_DRAFTS and case != "n"] + ["n"])
  def test_own_draft_model_is_always_accepted(self, plain, own_draft_llm, case):
    params = [sampled(24, **{"seed": i, **CASES[case]}) for i in range(3)]
    jobs = [tokens(prompt(5 + 6 * i, case, i)) for i in range(3)]
    count, expected = Counts(own_draft_llm), plain.generate(jobs, params, False)
    check_same(own_draft_llm.generate(jobs, params, False), expected)
    for job, p, output in zip(jobs, params, expected, strict=True):
      check_same(own_draft_llm.generate([job], [p], False), [output])
    _, proposed, accepted = count()
    assert accepted == proposed and (proposed > 50 or params[0].max_tokens == 3 or not params[0].ignore_eos)
    check_invariants(own_draft_llm)

  @pytest.mark.parametrize("case", CASES)
  def test_other_draft_model_gives_equal_outputs(self, plain, other_draft_llm, case):
    params = [sampled(24, **{"seed": i, **CASES[case]}) for i in range(3)]
    jobs = [tokens(prompt(5 + 6 * i, case, i)) for i in range(3)]
    count, expected = Counts(other_draft_llm), plain.generate(jobs, params, False)
    check_same(other_draft_llm.generate(jobs, params, False), expected)
    for job, p, output in zip(jobs, params, expected, strict=True):
      check_same(other_draft_llm.generate([job], [p], False), [output])
    assert (count()[1] > 0) == (case not in NO_DRAFTS)
    check_invariants(other_draft_llm)

  @pytest.mark.parametrize("overlaps", [False, True])
  def test_draft_model_saves_steps(self, fake, words_folder, overlaps):
    engine, model = fake({"model": words_folder, "num_speculative_tokens": 3}, overlaps=overlaps)
    count, ids = Counts(engine), prompt(9, "steps")
    expected, _ = model.text(ids, greedy(120), 0, 120)
    assert ids_of(engine.generate(tokens(ids), greedy(120), False)[0]) == expected
    assert count()[1] == count()[2] >= 75 and (overlaps or count.steps == 120 - count()[2])

  def test_own_draft_model_after_prefix_cache_hit_is_accepted(self, plain, own_draft_llm):
    ids, count = prompt(30, "twins' cache"), Counts(own_draft_llm)
    expected, = plain.generate(tokens(ids), greedy(50), False)
    for n in (0, 3, 17, 30):
      output, = own_draft_llm.generate(tokens([*ids, *ids_of(expected)[:n]]), greedy(50 - n), False)
      assert ids_of(output) == ids_of(expected)[n:] and (n == 0 or output.num_cached_tokens >= 28)
    assert count()[1] == count()[2] > 80

  def test_own_draft_model_with_chunks_and_aborts_is_accepted(self, plain, own_draft_llm):
    rng, count = random.Random(0), Counts(own_draft_llm)
    jobs = [tokens(prompt([3, 50, 7, 41, 1][i % 5], "twins", i // 2)) for i in range(20)]
    params = [[greedy(30), sampled(20, seed=i), sampled(25, n=2, seed=i)][i % 3] for i in range(20)]
    expected, waiting, last = plain.generate(jobs, params, False), [*range(20)], {}
    while waiting or own_draft_llm.has_unfinished_requests():
      if waiting and rng.random() < 0.5:
        i = waiting.pop()
        own_draft_llm.add_request(str(i), jobs[i], params[i])
      if rng.random() < 0.05 and own_draft_llm.requests:
        name = rng.choice([*own_draft_llm.requests])
        own_draft_llm.abort_request(name)
        waiting.append(int(name))
      last |= {output.request_id: output for output in own_draft_llm.step()}
      check_invariants(own_draft_llm)
    check_same([last[str(i)] for i in range(20)], expected)
    assert count()[1] == count()[2] > 100

  def test_own_draft_model_after_preemptions_and_failures_is_accepted(self, plain, words_folder, monkeypatch):
    engine = LLM(words_folder, **ENGINE, num_gpu_blocks_override=13,
                 speculative_config={"model": words_folder, "num_speculative_tokens": 3})
    count, jobs = Counts(engine), [prompt(3 + 3 * i, "twins", "small", i) for i in range(5)]
    expected = [ids_of(o) for o in plain.generate([tokens(ids) for ids in jobs], greedy(28), False)]
    for place, number in (("never", 1), ("launch", 6), ("read", 9), ("amid update", 12)):
      engine.blocks.cached_blocks.clear()
      engine.blocks.reset()
      for i, ids in enumerate(jobs): engine.add_request(str(i), tokens(ids), greedy(28))
      last = {}
      with monkeypatch.context() as patch:
        break_steps(engine, patch, fail_once(place, number))
        while engine.has_unfinished_requests():
          with contextlib.suppress(Failed): last |= {output.request_id: output for output in engine.step()}
          check_invariants(engine)
      assert [ids_of(last[str(i)]) for i in range(5)] == expected
    assert count()[1] == count()[2] > 50 and count.preemptions > 0

  @pytest.mark.parametrize("config, parts", [
    ({"model": "/nowhere"}, ["/nowhere"]), ({"method": "ngram", "model": "words"}, ["method='ngram'", "model"]),
    ({"model": "words", "quantization": "int5"}, ["quantization='int5'", "int8"]), ({"model": 5}, ["model=5"]),
  ])
  def test_invalid_draft_model_config_raises(self, words_folder, config, parts):
    config = {"num_speculative_tokens": 2, **config}
    if config["model"] == "words": config["model"] = str(words_folder)
    with pytest.raises(ValueError) as error: LLM(words_folder, **ENGINE, speculative_config=config)
    assert all(x in str(error.value) for x in parts), str(error.value)

  @pytest.mark.parametrize("config, name", [
    ({"method": "ngram", "quantization": "int8"}, "quantization='int8'"),
    ({"model": "words", "prompt_lookup_max": 3}, "prompt_lookup_max=3")])
  def test_option_without_effect_raises(self, words_folder, config, name):
    with pytest.raises(ValueError, match=f"{name} has no effect"):
      LLM(words_folder, **ENGINE, speculative_config={"num_speculative_tokens": 2, **config})

  def test_draft_statistics_of_server_log(self):
    assert draft_statistics({"steps": 5}) == draft_statistics({"spec_decode_num_draft_tokens": 0}) == ""
    metrics = {"spec_decode_num_drafts": 4, "spec_decode_num_draft_tokens": 20, "spec_decode_num_accepted_tokens": 15}
    assert draft_statistics(metrics) == ", Draft acceptance rate: 75.0%, Mean acceptance length: 4.75"

  def test_draft_model_with_other_vocab_size_raises(self, words_folder, tmp_path):
    folder = tiny_model(tmp_path, vocab_size=333, tokenizer=False)
    with pytest.raises(ValueError, match="vocab_size") as e:
      LLM(words_folder, **ENGINE, speculative_config={"model": folder, "num_speculative_tokens": 2})
    assert "333" in str(e.value) and "320" in str(e.value)

  def test_draft_model_with_other_vocabulary_raises(self, words_folder, tmp_path):
    folder = tiny_model(tmp_path, words=True)
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter(["zebra quilts jump vex", "pyx fjord waltz bog", "sphinx of black quartz judge my vow",
                              "how vexingly quick daft zebras jump", "pack my box with five dozen liquor jugs"]),
      model_prefix=str(tmp_path / "tokenizer"), vocab_size=VOCAB, model_type="bpe", byte_fallback=True,
      character_coverage=1.0, hard_vocab_limit=False, num_threads=1, minloglevel=2)
    with pytest.raises(ValueError, match="another vocabulary"):
      LLM(words_folder, **ENGINE, speculative_config={"model": folder, "num_speculative_tokens": 2})

  def test_draft_model_without_memory_raises(self, words_folder, monkeypatch):
    free = 300_000   # bytes: enough for one of the two models
    monkeypatch.setattr("tinyvllm_extra.kernels.FastBackend.free_memory", lambda backend, device: free)
    LLM(words_folder, **ENGINE)
    with pytest.raises(ValueError) as e:
      LLM(words_folder, **ENGINE, speculative_config={"model": words_folder, "num_speculative_tokens": 2})
    assert "speculative_config" in str(e.value) or "draft" in str(e.value)
    assert any(x in str(e.value) for x in ("raise", "lower", "smaller", "free"))
