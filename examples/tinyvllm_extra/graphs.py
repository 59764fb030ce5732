"""Which graph a step runs with, and captures ahead of need, so that no request waits for one."""
import collections, dataclasses, itertools, operator, time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tinygrad import helpers

from tinyvllm.backend import Backend, exclusive, renderer
from tinyvllm.config import check, logger
from tinyvllm.request import SamplerMode
from tinyvllm.runner import GraphKey, Runner, build_step, next_power_of_two

from .kernels.tinygrad_patches import num_compiled
from .logits import LogitsPlan

if TYPE_CHECKING: from tinyvllm.engine import Engine

OFTEN = 16   # times that a graph shape is requested before it is worth a capture of its own


@dataclasses.dataclass
class GraphState:
  """What a backend knows of its engine's graphs."""
  capture_sizes: list[int] = dataclasses.field(default_factory=list)   # of steps captured ahead, in tokens
  num_requested: collections.Counter[tuple[Runner, GraphKey]] = dataclasses.field(default_factory=collections.Counter)


def state_of(backend: Backend) -> GraphState:
  """The backend's state, which the core's Backend gets here."""
  return vars(backend).setdefault("graph_state", GraphState())


def sizes_of(key: GraphKey) -> tuple[int, ...]:
  """A key as numbers: a graph runs every step that is smaller in each."""
  plan = key.plan or LogitsPlan(0, False, 0, False)
  return key.num_tokens, key.num_rows, key.sampler_mode, plan.has_logprobs, plan.num_adjustments, plan.has_bitmask


def cost(key: GraphKey) -> int:
  """Relative time of a step: reading the weights takes as long as 16 tokens, each optional feature half a step."""
  num_tokens, _, *features = sizes_of(key)
  return (16 + num_tokens) * (2 + sum(map(bool, features)))


def choose_graph(runner: Runner, key: GraphKey) -> GraphKey:
  """Return `key`, or a captured larger one: any if steps were captured ahead, else at first one that takes less than
  twice the time."""
  state = state_of(runner.backend)
  if state.capture_sizes:
    size = min([size for size in state.capture_sizes if size >= key.num_tokens], default=key.num_tokens)
    rows = max(key.num_rows, min(size, runner.max_rows)) if key.num_rows <= runner.max_rows else size
    key = key._replace(num_tokens=size, num_rows=rows)
  sizes = sizes_of(key)
  larger = [graph for graph in runner.graphs if all(map(operator.ge, sizes_of(graph), sizes))]
  best = min(larger, key=cost, default=key)
  state.num_requested[runner, key] += 1
  can_wait = state.num_requested[runner, key] <= OFTEN and cost(best) < 2 * cost(key)
  return best if state.capture_sizes or can_wait else key


def usual_sizes(runner: Runner) -> list[int]:
  """Step sizes in tokens that are worth a capture on this device. Tensor cores compute 8 tokens in the time of 2, and
  steps beyond the number of sequences are of prefill, with many tokens."""
  largest = next_power_of_two(runner.config.max_num_batched_tokens)   # type: ignore[arg-type]   # by now an int
  sizes = [1 << i for i in range(largest.bit_length())]
  if not renderer().tensor_cores: return sizes
  return [size for size in sizes if size in (1, largest) or 8 <= size <= max(64, runner.max_rows)]


def capture(engine: "Engine", sizes: list[int] | None = None, optional: bool = False) -> Iterator[str]:
  """Capture steps ahead, and pad to them from then on: of these numbers of tokens, greedy and sampled, or with
  `optional` features. sizes: powers of two; None: what suits the device. Yields its progress before each capture."""
  are_powers = all(x > 0 and x.bit_count() == 1 for x in sizes or ())
  check(are_powers, f"cudagraph_capture_sizes={sizes} must be powers of two")
  return _capture(engine, sizes, optional)


def _capture(engine: "Engine", sizes: list[int] | None, optional: bool) -> Iterator[str]:
  started = time.perf_counter()
  num_kernels = num_compiled()
  sizes = [] if engine.config.enforce_eager else sorted(sizes or usual_sizes(engine.runner))
  state_of(engine.runner.backend).capture_sizes = sizes
  plan = LogitsPlan(engine.model_config.vocab_size, True, 128, True)
  kinds = [(SamplerMode.RANDOM, None), (SamplerMode.FILTERED, plan)] if optional else [
    (SamplerMode.GREEDY, None), (SamplerMode.FILTERED, None)]
  keys = [GraphKey(size, min(size, engine.runner.max_rows), *kind) for size in sizes for kind in kinds]
  steps = [*itertools.product(keys, engine.runners)]
  for i, (key, runner) in enumerate(helpers.tqdm(steps, desc="capturing steps", disable=optional or None), 1):
    yield f"preparing {i} of {len(steps)}"
    with engine.driving(), exclusive: runner.launch(build_step({}, runner, key))()
  logger.info(f"captured {len(steps)} steps in {time.perf_counter() - started:.1f} s, "
              f"{num_compiled() - num_kernels} new kernels")
