"""Captures steps as graphs at startup, so that no request waits for a capture."""
import dataclasses, gc, itertools, time
from collections.abc import Collection, Iterator

from tinyvllm.backend import exclusive, renderer
from tinyvllm.config import logger
from tinyvllm.engine import Engine
from tinyvllm.request import SamplerMode
from tinyvllm.runner import GraphKey, Runner, build_step, next_power_of_two

from .graph_policy import PROMPT, PaddedGraphs, sizes_of
from .kernels.kernel_cache import KernelFolder

FIRST_SIZE = 32   # minimum tokens of the step that is captured first, which runs short prompts and decodes


def usual_sizes(runner: Runner) -> list[int]:
  """Return the step sizes in tokens to capture on this device. Tensor cores compute 8 tokens in the time of 2. Steps
  with more tokens than sequences have prompts, which MeteredScheduler splits by size."""
  largest = next_power_of_two(runner.config.max_num_batched_tokens or 0)   # the engine has set it
  sizes = [1 << i for i in range(largest.bit_length())]
  if not renderer().tensor_cores: return sizes
  return [size for size in sizes if size in (1, PROMPT, 4 * PROMPT, largest) or 8 <= size <= max(64, runner.max_rows)]


def capture(engine: Engine, sizes: list[int], variants: Collection[tuple[SamplerMode, object]]) -> Iterator[str]:
  """Capture a step of each size and variant, a sampler with its LogitsPlan or None, and pad later steps to them. Before
  each capture, yields its progress, or "" once the captured graphs can run all steps. Then another thread may run
  steps, which have fewer tokens until all sizes are captured."""
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
