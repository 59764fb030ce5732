"""Chooses how many tokens a step with prompts takes: as many as a captured graph is efficient for, but few enough that
sequences which decode do not wait long for their next token."""
import collections, itertools, time
from collections.abc import Sequence as Sequences

from tinyvllm.config import EngineConfig
from tinyvllm.request import Sequence
from tinyvllm.scheduler import BlockManager, Scheduler
from tinyvllm_extra.options import LLMConfig

PROMPT = 128   # minimum tokens of a step to which prompts are limited


class PacedScheduler(Scheduler):
  """A Scheduler whose steps fill captured graphs. While sequences decode, a step takes at most about max_pause seconds.

  sizes: tokens of the captured steps, sorted; empty: no limits. seconds: time of the last step of each size."""
  config: LLMConfig
  sizes: Sequences[int] = ()

  def __init__(self, config: EngineConfig, blocks: BlockManager):
    super().__init__(config, blocks)
    self.seconds: dict[int, float] = {}
    self.launches: collections.deque[float] = collections.deque()   # of the steps in flight
    self.updated = 0.0   # when the last step ended

  def schedule(self, budget: int = 0) -> dict[Sequence, int]:
    budget = budget or self.config.max_num_batched_tokens or 0   # the engine has set it
    return super().schedule(self.limit(budget) if self.sizes else budget)

  def limit(self, budget: int) -> int:
    """Return the maximum number of tokens of the next step, up to `budget`."""
    remaining = [seq.num_remaining for seq in self.running]
    free_slots = self.config.max_num_seqs - len(self.running)
    total = sum(remaining) + sum(len(seq.tokens) for seq in itertools.islice(self.waiting, free_slots))
    num_decodes = remaining.count(1)
    sizes = [*[size for size in self.sizes if max(PROMPT, num_decodes + 1) <= size < budget], budget]
    fits = [size for size in sizes if size <= total]
    # A graph takes its time even if it is not filled, as long as about three filled ones of a fourth of its size
    if len(fits) < len(sizes) and (not fits or total >= 3 * fits[-1]): fits.append(sizes[len(fits)])
    while num_decodes and len(fits) > 1 and self.seconds.get(fits[-1], 0) > self.config.max_pause:
      self.seconds[fits.pop()] *= 0.999   # until the size is measured again
    return fits[-1]

  def start_step(self, batch: dict[Sequence, int], num_behind: int = 0) -> None:
    super().start_step(batch, num_behind)
    self.launches.append(time.monotonic())

  def update(self, computed: dict[Sequence, range], sampled: dict[Sequence, int]) -> None:
    now = time.monotonic()
    if self.launches:
      self.seconds[sum(map(len, computed.values()))] = now - max(self.updated, self.launches.popleft())
    self.updated = now
    super().update(computed, sampled)

  def reset(self, unfinished: list[Sequence]) -> None:
    super().reset(unfinished)
    self.launches.clear()
