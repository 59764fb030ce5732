"""Chooses the graph that a step runs with: its own shape, or a larger one that is captured. Captures graphs at startup,
so that no request waits for a capture."""
import collections, dataclasses, gc, itertools, logging, operator, time
from collections.abc import Iterator, Sequence
from typing import Any

from tinygrad import Device

from tinyvllm import backend
from tinyvllm.backend import exclusive, renderer
from tinyvllm.config import check, logger
from tinyvllm.engine import Engine
from tinyvllm.request import SamplerMode
from tinyvllm.runner import GraphKey, Runner, build_step, next_power_of_two

from .step_cache import restore
from .tinygrad_patches import num_compiled

PROMPT = 128   # least limit of a step with prompts, in tokens
CAPTURE_THRESHOLD = 16   # requests for a graph shape before it gets its own capture
FIRST_SIZE = 32   # minimum tokens of the step that is captured first, which runs short prompts and decodes
Variant = tuple[SamplerMode, object]   # a graph's sampler, and its LogitsPlan or None


def sizes_of(key: GraphKey) -> tuple[int, ...]:
  """Return a key as numbers. A graph also runs every step that is smaller in all of them."""
  plan = key.plan
  features = (plan.has_logprobs, plan.num_adjustments, plan.has_bitmask, plan.has_all_logprobs) if plan else (0,) * 4
  return key.num_tokens, key.num_rows, key.sampler_mode, *features


def cost(key: GraphKey) -> int:
  """Return a step's relative time: reading the weights takes as long as 16 tokens, an optional feature half a step."""
  num_tokens, _, *features = sizes_of(key)
  return (16 + num_tokens) * (2 + sum(map(bool, features)))


class FewGraphs(backend.Graphs):
  """A graph policy that pads steps, so that few graphs are captured."""
  def __init__(self) -> None:
    self.capture_sizes: list[int] = []   # tokens of the steps captured at startup
    self.captured: set[tuple[Runner, GraphKey]] = set()   # complete: another thread may be capturing
    self.num_requested: collections.Counter[tuple[Runner, GraphKey]] = collections.Counter()

  def choose(self, runner: Runner, key: GraphKey) -> GraphKey:
    """Return `key` or a larger captured one: the fastest if steps were captured at startup, else only one that takes
    less than twice the time, until `key` was requested CAPTURE_THRESHOLD times."""
    if self.capture_sizes:
      size = min([size for size in self.capture_sizes if size >= key.num_tokens], default=key.num_tokens)
      rows = max(key.num_rows, min(size, runner.max_rows)) if key.num_rows <= runner.max_rows else size
      key = key._replace(num_tokens=size, num_rows=rows)
    sizes = sizes_of(key)
    captured = [graph for owner, graph in [*self.captured] if owner is runner]
    larger = [graph for graph in captured if all(map(operator.ge, sizes_of(graph), sizes))]
    best = min(larger, key=cost, default=key)
    self.num_requested[runner, key] += 1
    can_wait = self.num_requested[runner, key] <= CAPTURE_THRESHOLD and cost(best) < 2 * cost(key)
    return best if self.capture_sizes or can_wait else key

  def run(self, runner: Runner, graph: Any, key: GraphKey) -> Any:
    """Run a step. Restore or capture it first, and log that (with level DEBUG during startup)."""
    is_new = graph.cnt == 1
    start_time = time.perf_counter()
    num_kernels = num_compiled()
    stored = restore(runner, graph, key) if is_new else None
    results = graph()
    if stored: stored.save(graph.captured)
    if is_new and graph.cnt > 1:   # not captured if eager
      self.captured.add((runner, key))
      Device.default.synchronize()
      level = logging.DEBUG if self.capture_sizes else logging.INFO
      logger.log(level, f"captured a step of {key.num_tokens} tokens in {time.perf_counter() - start_time:.1f} s, "
                 f"{num_compiled() - num_kernels} new kernels")
    return results


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


def capture(engine: Engine, sizes: list[int], variants: Sequence[Variant]) -> Iterator[str]:
  """Capture a step of each size and variant, and pad later steps to them. Before each capture, yields its progress, or
  "" once the captured graphs can run all steps. Then another thread may run steps, which have fewer tokens until all
  sizes are captured."""
  started = time.perf_counter()
  num_kernels = num_compiled()
  if isinstance(engine.backend.graphs, FewGraphs): engine.backend.graphs.capture_sizes = sizes
  first = min([size for size in sizes if size >= FIRST_SIZE], default=max(sizes, default=0))
  keys = [GraphKey(size, min(size, engine.runner.max_rows), *variant) for size in sizes for variant in variants]
  keys.sort(key=lambda key: (key.num_tokens != first, min(key.num_tokens, 2), [-x for x in sizes_of(key)[2:]]))
  steps = [*itertools.product(keys, engine.runners)]
  # Steps of several devices wait for each other in launch order, which a second thread would change
  num_needed = len(engine.runners) if len(engine.runner.model.devices.names) == 1 else len(steps)
  budget = engine.config.max_num_batched_tokens or 0   # the engine has set it
  try:
    for i, (key, runner) in enumerate(steps):
      yield f"preparing {i + 1} of {len(steps)}" if i < num_needed else ""
      with exclusive: runner.launch(build_step({}, runner, key))()
      largest = max(graph.num_tokens for graph in [*engine.runner.graphs])
      engine.scheduler.config = dataclasses.replace(engine.config, max_num_batched_tokens=min(budget, largest))
      gc.freeze()   # else each collection would take longer, and delay steps
  finally:
    engine.scheduler.config = engine.config
    gc.unfreeze()
  logger.info(f"captured {len(steps)} steps in {time.perf_counter() - started:.1f} s, "
              f"{num_compiled() - num_kernels} new kernels")
