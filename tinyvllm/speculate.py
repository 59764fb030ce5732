"""Drafts of a sequence's next tokens (Leviathan et al. 2022, arXiv:2211.17192). A step that checks some takes little
longer than one without, as it is the weights that take time to read. Noise is a function of seed, position and token
id, so that a draft is right exactly where it is what would be drawn: the text is that without drafts."""
import dataclasses, pathlib
from typing import Annotated

from .config import Options, check


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
    self.config = config
    self.num_wanted = 1
    self.misses = 0   # in a row
    self.resume = 0   # the length from which on there are drafts again

  def wanted(self, length: int) -> int: return self.num_wanted if length >= self.resume else 0

  def judge(self, length: int, accepted: int) -> None:
    """So many came true of what was drafted for a text that now has this length."""
    self.num_wanted = min(max(1, 2 * accepted), self.config.num_speculative_tokens)   # type: ignore[type-var]
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

  def waits(self, tokens: list[int]) -> bool: return self.wanted(len(tokens)) > 0 and self.find(tokens) is not None

  def propose(self, tokens: list[int], n: int) -> list[int]:
    """n drafts, or none. What has been repeated without a break is expected to go on so."""
    place = self.find(tokens)
    return [] if place is None else (tokens[place:place + n] * n)[:n]
