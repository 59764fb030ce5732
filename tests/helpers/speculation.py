"""Speculative decoding: counters, and drafts in every step."""
from tinyvllm_extra.speculation import Drafter


NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
METRICS = ["spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"]
PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


class Counts:
  """The increase of an engine's draft counters, which must be consistent at any time."""
  def __init__(self, engine):
    self.engine, self.start = engine, engine.get_metrics()

  def __call__(self):
    metrics = self.engine.get_metrics()
    if not self.engine.config.speculative_config: return 0, 0, 0
    drafts, proposed, accepted = (metrics[name] - self.start[name] for name in METRICS)
    per_position, before = metrics[PER_POSITION], self.start[PER_POSITION]
    growth = [x - y for x, y in zip(per_position, before, strict=True)]
    assert sum(growth) == accepted <= proposed
    assert growth == sorted(growth, reverse=True), "a draft is accepted only if all drafts before it are"
    assert growth[0] <= drafts
    return drafts, proposed, accepted

  steps = property(lambda self: self.engine.get_metrics()["steps"] - self.start["steps"])
  preemptions = property(lambda self: self.engine.get_metrics()["num_preemptions"] - self.start["num_preemptions"])


def always_draft(monkeypatch):
  """Propose as many drafts as possible, regardless of the acceptance rate."""
  monkeypatch.setattr(Drafter, "rate", property(lambda self: 0.99, lambda self, value: None), raising=False)
