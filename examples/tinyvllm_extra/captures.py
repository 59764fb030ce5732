"""Captures steps as graphs at startup, so that no request waits for a capture, and limits steps with prompts to a
captured size that they fill, and that sequences which decode do not wait long for."""
import collections, dataclasses, gc, itertools, time
from collections.abc import Collection, Iterator

from tinyvllm.backend import exclusive, renderer
from tinyvllm.config import EngineConfig, check, logger
from tinyvllm.engine import Engine
from tinyvllm.request import SamplerMode, Sequence
from tinyvllm.runner import GraphKey, Runner, build_step, next_power_of_two
from tinyvllm.scheduler import BlockManager

from .cache.snapshots import SnapshotScheduler
from .graph_policy import PROMPT, PaddedGraphs, sizes_of
from .kernels.kernel_cache import KernelFolder
from .options import LLMConfig

FIRST_SIZE = 32   # minimum tokens of the step that is captured first, which runs short prompts and decodes
Variant = tuple[SamplerMode, object]   # a graph's sampler, and its LogitsPlan or None


def usual_sizes(runner: Runner) -> list[int]:
  """Return the step sizes in tokens to capture on this device. Tensor cores compute 8 tokens in the time of 2. Steps
  with more tokens than sequences have prompts, which PacedScheduler splits by size."""
  largest = next_power_of_two(runner.config.max_num_batched_tokens or 0)   # the engine has set it
  sizes = [1 << i for i in range(largest.bit_length())]
  if not renderer().tensor_cores: return sizes
  return [size for size in sizes if size in (1, PROMPT, 4 * PROMPT, largest) or 8 <= size <= max(64, runner.max_rows)]


def sizes_to_capture(engine: Engine, sizes: list[int] | None) -> list[int]:
  """Return the step sizes in tokens to capture, sorted: none in eager mode, else `sizes`, powers of two, or the
  device's usual ones."""
  are_powers = all(x > 0 and x.bit_count() == 1 for x in sizes or ())
  check(are_powers, f"cudagraph_capture_sizes={sizes} must be powers of two")
  return [] if engine.config.enforce_eager else sorted(sizes or usual_sizes(engine.runner))


def capture(engine: Engine, sizes: list[int], variants: Collection[Variant]) -> Iterator[str]:
  """Capture a step of each size and variant, and pad later steps to them. Before each capture, yields its progress, or
  "" once the captured graphs can run all steps. Then another thread may run steps, which have fewer tokens until all
  sizes are captured."""
  started = time.perf_counter()
  num_kernels = KernelFolder.compiled
  if isinstance(engine.backend.graphs, PaddedGraphs): engine.backend.graphs.capture_sizes = sizes
  first = min([size for size in sizes if size >= FIRST_SIZE], default=max(sizes, default=0))
  keys = [GraphKey(size, min(size, engine.runner.max_rows), *variant) for size in sizes for variant in variants]
  keys.sort(key=lambda key: (key.num_tokens != first, min(key.num_tokens, 2), [-x for x in sizes_of(key)[2:]]))
  steps = [*itertools.product(keys, engine.runners)]
  # Steps of several devices wait for each other in launch order, which a second thread would change
  num_needed = len(engine.runners) if len(engine.runner.model.devices.names) == 1 else len(steps)
  try:
    for i, (key, runner) in enumerate(steps):
      yield f"preparing {i + 1} of {len(steps)}" if i < num_needed else ""
      with exclusive: runner.launch(build_step({}, runner, key))()
      limit = min(engine.config.max_num_batched_tokens or 0, max(x.num_tokens for x in [*engine.runner.graphs]))
      engine.scheduler.config = dataclasses.replace(engine.config, max_num_batched_tokens=limit)
      gc.freeze()   # else each collection would take longer, and delay steps
  finally:
    engine.scheduler.config = engine.config
    gc.unfreeze()
  logger.info(f"captured {len(steps)} steps in {time.perf_counter() - started:.1f} s, "
              f"{KernelFolder.compiled - num_kernels} new kernels")


class PacedScheduler(SnapshotScheduler):
  """A Scheduler whose steps fill captured ones. While sequences decode, a step has at most half of the default of GPUs,
  8 PROMPT tokens (or two per sequence), and one of more than PROMPT tokens takes about max_pause seconds at most.

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
    remaining = [seq.num_remaining for seq in self.running if not seq.reached_max_len]
    free_slots = self.config.max_num_seqs - len(self.running)
    total = sum(remaining) + sum(len(seq.tokens) for seq in itertools.islice(self.waiting, free_slots))
    num_decodes = remaining.count(1)
    if num_decodes and budget == 16 * PROMPT: budget = max(8 * PROMPT, 2 * num_decodes)   # more tokens hardly gain
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
