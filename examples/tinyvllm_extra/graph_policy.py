"""Captures steps as graphs at startup, so that no request waits for a capture, and chooses the graph that a step runs
with: its own shape, or a larger one that is captured."""
import collections, dataclasses, gc, itertools, logging, operator, time, typing
from collections.abc import Callable, Collection, Iterator

from tinygrad import Device

from tinyvllm.backend import Graphs, exclusive, renderer
from tinyvllm.config import logger
from tinyvllm.engine import Engine
from tinyvllm.request import SamplerMode
from tinyvllm.runner import GraphKey, Runner, build_step, next_power_of_two

FIRST_SIZE = 32   # minimum tokens of the step that is captured first, which runs short prompts and decodes
PROMPT = 128   # least limit of a step with prompts, in tokens
CAPTURE_THRESHOLD = 16   # requests for a graph shape before it gets its own capture


def sizes_of(key: GraphKey) -> tuple[int, ...]:
  """Return a key as numbers. A graph also runs every step that is smaller in all of them."""
  return *key[:3], *(key.plan[1:] if key.plan else (0,) * 5)   # without the plan's vocab_size


def cost(key: GraphKey) -> int:
  """Return a step's relative time: reading the weights takes as long as 16 tokens, an optional feature half a step."""
  return (16 + key.num_tokens) * (2 + sum(map(bool, sizes_of(key)[2:])))


class PaddedGraphs(Graphs):
  """A graph policy that pads steps, so that few graphs are captured. num_kernels: kernels that this process compiled,
  counted in the class by KernelFolder (kernel_cache.py). restore: kernel_cache.restore, which gives a graph its step
  from disk, or returns where to save it."""
  num_kernels = 0

  def __init__(self, restore: Callable[[Runner, object, GraphKey], typing.Any]) -> None:
    self.restore = restore
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
    larger = [x for owner, x in [*self.captured] if owner is runner and all(map(operator.ge, sizes_of(x), sizes))]
    best = min(larger, key=cost, default=key)
    self.num_requested[runner, key] += 1
    can_wait = self.num_requested[runner, key] <= CAPTURE_THRESHOLD and cost(best) < 2 * cost(key)
    return best if self.capture_sizes or can_wait else key

  def run(self, runner: Runner, graph: typing.Any, key: GraphKey) -> object:
    """Run a step. Restore or capture it first, and log that (with level DEBUG during startup)."""
    is_new = graph.cnt == 1
    start_time = time.perf_counter()
    num_kernels = PaddedGraphs.num_kernels
    stored = self.restore(runner, graph, key) if is_new else None
    results = graph()
    if stored and graph.captured: stored.save(graph.captured)   # not with tinygrad's JIT=0
    if is_new and graph.cnt > 1:   # not captured if eager
      self.captured.add((runner, key))
      Device.default.synchronize()
      logger.log(logging.DEBUG if self.capture_sizes else logging.INFO, f"captured a step of {key.num_tokens} tokens "
                 f"in {time.perf_counter() - start_time:.1f} s, {self.num_kernels - num_kernels} new kernels")
    return results


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
  num_kernels = PaddedGraphs.num_kernels
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
              f"{PaddedGraphs.num_kernels - num_kernels} new kernels")
