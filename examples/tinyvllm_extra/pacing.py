"""Limits the tokens of a step with prompts to a captured size that they fill, and that sequences which decode do not
wait long for."""
import collections, itertools, time

from tinyvllm.config import EngineConfig
from tinyvllm.request import Sequence
from tinyvllm.scheduler import BlockManager, Scheduler

from .kernels.graphs import PROMPT
from .options import LLMConfig


class PacedScheduler(Scheduler):
  """A Scheduler whose steps fill captured ones. While sequences decode, a step of more than PROMPT tokens takes about
  max_pause seconds at most.

  sizes: tokens of the captured steps, sorted; empty: no limits. seconds: time of the last step of each size."""
  config: LLMConfig

  def __init__(self, config: EngineConfig, blocks: BlockManager):
    super().__init__(config, blocks)
    self.sizes: list[int] = []
    self.seconds: dict[int, float] = {}
    self.launches = collections.deque[tuple[int, float]](maxlen=2)   # tokens and time of the steps in flight
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
    # A padded step takes as long as a full one, and that as long as about three full ones of a fourth of its size
    if len(fits) < len(sizes) and (not fits or total >= 3 * fits[-1]): fits.append(sizes[len(fits)])
    while num_decodes and len(fits) > 1 and self.seconds.get(fits[-1], 0) > self.config.max_pause:
      self.seconds[fits.pop()] *= 0.999   # until the size is measured again
    return fits[-1]

  def start_step(self, batch: dict[Sequence, int], num_behind: int = 0) -> None:
    super().start_step(batch, num_behind)
    self.launches.append((sum(batch.values()), time.monotonic()))

  def update(self, computed: dict[Sequence, range], sampled: dict[Sequence, int]) -> None:
    now, size = time.monotonic(), sum(map(len, computed.values()))
    for launch in [launch for launch in self.launches if launch[0] == size][:1]:   # not of a further draft token
      self.seconds[size] = now - max(self.updated, launch[1])
      self.launches.remove(launch)
    self.updated = now
    super().update(computed, sampled)

  def reset(self, unfinished: list[Sequence]) -> None:
    super().reset(unfinished)
    self.launches.clear()
