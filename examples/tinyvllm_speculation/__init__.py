"""Drafts of what comes next (Leviathan et al. 2022, arXiv:2211.17192). A step that checks some takes little longer than
one without, as it is the weights that take time to read. Noise is a function of seed, position and token id, so that a
draft is right exactly where it is what would be drawn: the text is that without drafts. The engine checks drafts; who
makes them, and how many, is said here."""
import collections, dataclasses, pathlib
from typing import Annotated, Any

from tinyvllm.batch import DRAFT_ROWS, bucket
from tinyvllm.config import Options, check
from tinyvllm.device import cpu_cores
from tinyvllm.request import Sequence


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig(Options):
  """Who drafts, and how much, with vLLM's names."""
  num_speculative_tokens: Annotated[int | None, 1, 16] = None      # of a sequence in one step, at most
  method: Annotated[str | None, "ngram", "draft_model"] = None   # None: a draft model, if there is one
  model: str | pathlib.Path | None = None   # the draft model's folder
  prompt_lookup_max: Annotated[int, 1, 16] = 4   # tokens of the longest end of a text that is looked for in it
  prompt_lookup_min: Annotated[int, 1, 16] = 2   # and of the shortest

  def __post_init__(self) -> None:
    super().__post_init__()
    check(self.num_speculative_tokens, "speculative_config: num_speculative_tokens is missing: 5, say")
    check((self.method == "ngram") == (self.model is None), f"speculative_config: method={self.method!r} with "
          f"model={self.model!r}: give method='ngram', or the folder of a draft model")
    check(self.prompt_lookup_min <= self.prompt_lookup_max, f"prompt_lookup_min={self.prompt_lookup_min} must be at "
          f"most prompt_lookup_max={self.prompt_lookup_max}")


class Drafter:
  """How many drafts a sequence wants: more while they come true, and after a run of misses none for a while."""
  def __init__(self, config: SpeculativeConfig):
    self.most: int = config.num_speculative_tokens   # type: ignore[assignment]   # by now a number
    self.num_wanted = 1
    self.misses = 0   # in a row
    self.resume = 0   # the length from which on there are drafts again

  def wanted(self, length: int) -> int: return self.num_wanted if length >= self.resume else 0

  def judge(self, length: int, proposed: int, accepted: int) -> None:
    """So many came true of what was drafted for a text that now has this length."""
    self.num_wanted = min(self.most, max(1, 2 * (accepted if accepted < proposed else self.num_wanted)))
    self.misses = 0 if accepted else self.misses + 1
    if self.misses > 2: self.resume = length + min(64, 8 * self.misses)


class NGram(Drafter):
  """Prompt lookup: what followed the end of the text where that was there before, the last time; the longest end."""
  def __init__(self, config: SpeculativeConfig):
    super().__init__(config)
    self.sizes = range(config.prompt_lookup_max, config.prompt_lookup_min - 1, -1)
    self.places: dict[tuple[int, ...], int] = {}   # of what has followed these tokens last
    self.num_known = 0   # places that are in there

  def find(self, tokens: list[int]) -> int | None:
    """The place of what has followed the end of these tokens, which are those of the last time and perhaps more."""
    for place in range(self.num_known, len(tokens)):
      for size in self.sizes: self.places[tuple(tokens[max(0, place - size):place])] = place
    self.num_known = len(tokens)
    ends = (tuple(tokens[-size:]) for size in self.sizes)
    return next((self.places[end] for end in ends if end in self.places), None)

  def waits(self, tokens: list[int]) -> bool:
    """Whether drafts are worth it that its next step waits until the host has read the token before."""
    return self.wanted(len(tokens)) > 0 and self.find(tokens) is not None

  def propose(self, tokens: list[int], n: int) -> list[int]:
    """n drafts, or none. What has been repeated without a break is expected to go on so."""
    place = self.find(tokens) if n else None
    return [] if place is None else (tokens[place:place + n] * n)[:n]


class Speculation:
  """Of an engine: who drafts, which drafts a step checks, and what has come of them."""
  def __init__(self, config: dict[str, Any]):
    self.config = SpeculativeConfig(**config)
    self.read_time = 12 if cpu_cores() else 64   # of the weights: as long as so many tokens take
    self.totals = collections.Counter(num_drafts=0, num_draft_tokens=0, num_accepted_tokens=0)
    self.accepted_at: collections.Counter[int] = collections.Counter()   # by their place among those of a step

  def drafter(self) -> Drafter:
    """Of a sequence."""
    return NGram(self.config)

  def choose(self, batch: dict[Sequence, int], left: int) -> dict[Sequence, list[int]]:
    """Drafts for those of a step who are to get a token: as many as make most tokens of the time, half of them coming
    true, and the step has room for. First drafts go before second ones."""
    seqs = [seq for seq, n in batch.items() if seq.drafter and n == seq.remaining() and not seq.num_unread]
    drafts = [seq.drafter.propose(seq.tokens, min(seq.drafter.wanted(seq.length), seq.max_len - seq.length - 1))
              for seq in seqs]
    ranked = sorted((i, k) for k, tokens in enumerate(drafts) for i in range(len(tokens)))
    tokens = sum(batch.values())
    most = max(0, min(left, DRAFT_ROWS - len(batch), len(ranked)))
    def gain(size): return (len(batch) + min(most, size - tokens) / 2) / (self.read_time + size)
    room = min(most, max((bucket(tokens) << i for i in range(7)), key=gain) - tokens)
    counts = collections.Counter(k for _, k in ranked[:room])
    return {seqs[k]: drafts[k][:n] for k, n in counts.items()}

  def judge(self, seq: Sequence, proposed: int, accepted: int) -> None:
    """So many of a sequence's drafts came true."""
    seq.metrics.num_draft_tokens += proposed
    seq.metrics.num_accepted_tokens += accepted
    self.totals.update(num_drafts=1, num_draft_tokens=proposed, num_accepted_tokens=accepted)
    self.accepted_at.update(range(accepted))
    seq.drafter.judge(len(seq.tokens), proposed, accepted)

  def metrics(self) -> dict[str, Any]:
    """vLLM's, of get_metrics."""
    by_place = [self.accepted_at[i] for i in range(self.config.num_speculative_tokens or 0)]
    named = {**self.totals, "num_accepted_tokens_per_pos": by_place}
    return {f"spec_decode_{name}": value for name, value in named.items()}
