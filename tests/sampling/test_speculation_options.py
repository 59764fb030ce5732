"""Speculative decoding: its options, draft models that do not fit, the server's metrics, and prompt lookup."""
import json
import random
import re

import pytest
from helpers.commands import flags
from helpers.data import read_data
from helpers.engines import ENGINE
from helpers.models import tiny_model
from helpers.servers import LocalServer
from helpers.speculation import METRICS, NGRAM, PER_POSITION
from helpers.tokenizers import byte_level_bpe

from tinyvllm import LLM
from tinyvllm_extra.sampling.speculation import Drafter, SpeculativeConfig
from tinyvllm_extra.serving.prometheus import draft_statistics

@pytest.mark.parametrize("config, message", read_data("invalid_speculation.json"), ids=str)
def test_invalid_config_raises_with_remedy(words_folder, config, message):
  if "words" in str(config): config = {**config, "model": str(words_folder)}
  with pytest.raises(ValueError, match=message): LLM(words_folder, **ENGINE, speculative_config=config)


def test_draft_model_that_does_not_fit_the_target_raises(words_folder, tmp_path, monkeypatch):
  def open_with(model): LLM(words_folder, **ENGINE, speculative_config={"model": model, "num_speculative_tokens": 2})
  with pytest.raises(ValueError, match="vocab_size of 333, the target 320"):
    open_with(tiny_model(tmp_path / "size", vocab_size=333, tokenizer=False))
  folder = tiny_model(tmp_path / "vocabulary", tokenizer=False)
  byte_level_bpe().save(str(folder / "tokenizer.json"))
  with pytest.raises(ValueError, match="another vocabulary"): open_with(folder)
  # Enough bytes for one of the two models
  monkeypatch.setattr("tinyvllm_extra.kernels.drivers.DriverMemory.free", lambda memory, devices: 300_000)
  LLM(words_folder, **ENGINE)
  with pytest.raises(ValueError, match="speculative_config: the draft model .* smaller"): open_with(words_folder)


def test_server_metrics_count_drafts(words_folder):
  options = flags(**{**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4})
  with LocalServer(words_folder, *options, "--speculative-config", json.dumps(NGRAM)) as server:
    def counts(): return {name: x for name, x in server.metrics().items() if name.startswith("spec_decode")}
    assert sum(counts().values()) == 0
    body = {"prompt": "the cat", "temperature": 0, "max_tokens": 60, "logit_bias": {"300": 100}, "ignore_eos": True}
    assert server.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 60
    metrics = server.llm.get_metrics()
    assert metrics["spec_decode_num_accepted_tokens"] > 30 and counts() == {
      **{f"{name}_total": metrics[name] for name in METRICS},
      **{f"{PER_POSITION}_total{{position={i}}}": x for i, x in enumerate(metrics[PER_POSITION])}}
    help_texts = re.findall(r"^# HELP tinyvllm:(spec_decode_\w+?)(?:_total)? .", server.get("/metrics").text, re.M)
    assert {*help_texts} == {*METRICS, PER_POSITION}
    assert server.stop() == 0


def test_draft_statistics_of_server_log():
  assert draft_statistics({"steps": 5}) == draft_statistics({"spec_decode_num_draft_tokens": 0}) == ""
  metrics = {"spec_decode_num_drafts": 4, "spec_decode_num_draft_tokens": 20, "spec_decode_num_accepted_tokens": 15}
  assert draft_statistics(metrics) == ", Draft acceptance rate: 75.0%, Mean acceptance length: 4.75"


# Prompt lookup: the drafter of speculative decoding without a draft model

def naive_lookup(ids, n, longest, shortest):
  """Return up to n tokens after the last earlier occurrence of the longest n-gram at the end of ids."""
  for size in range(min(longest, len(ids) - 1), shortest - 1, -1):
    for end in range(len(ids) - 1, size - 1, -1):
      if ids[end - size:end] == ids[-size:]: return ids[end:end + n]
  return []


@pytest.mark.parametrize("longest, shortest", [(4, 2), (3, 1), (1, 1), (2, 2), (8, 3)])
def test_ngram_drafter_equals_naive_lookup(longest, shortest):
  rng, num_hits, num_misses = random.Random(longest), 0, 0
  config = SpeculativeConfig(**NGRAM | {"prompt_lookup_max": longest, "prompt_lookup_min": shortest})
  for _ in range(150):
    drafter, letters, ids = Drafter(config), rng.choice([1, 2, 3, 5, 12]), []
    for _ in range(rng.randrange(2, 12)):
      ids += [rng.randrange(letters) for _ in range(rng.randrange(1, 6))]   # several per call, as with accepted drafts
      n = rng.randrange(9)
      expected = naive_lookup(ids, n, longest, shortest)
      drafts = drafter.propose(list(ids), n)
      assert drafts[:len(expected)] == expected and len(drafts) <= n, (ids, n)
      # If fewer than n tokens follow, a repetition continues
      assert drafts == (expected * n)[:len(drafts)] and bool(drafts) == bool(expected), (ids, n)
      num_hits += bool(drafts)
      num_misses += not drafts
  assert num_hits > 100 and (num_misses > 100 or longest == 1), "both cases must occur"


class CountingList(list):
  """A list that counts the items that are read."""
  num_read = 0

  def __getitem__(self, i):
    out = super().__getitem__(i)
    self.num_read += len(out) if isinstance(i, slice) else 1
    return out

  def __iter__(self):
    self.num_read += len(self)
    return super().__iter__()


def test_ngram_drafter_reads_only_new_tokens():
  rng, ids, drafter = random.Random(0), CountingList(), Drafter(SpeculativeConfig(**NGRAM))
  for num_new in (8000, *[3] * 20):
    ids += [rng.randrange(20) for _ in range(num_new)]
    ids.num_read = 0
    drafter.propose(ids, 5)
    assert 0 < ids.num_read < 100 or num_new == 8000
