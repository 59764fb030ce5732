"""Chooses the graph that a step runs with: its own shape, or a larger one that is captured."""
import collections, dataclasses, operator

from tinyvllm.backend import Backend
from tinyvllm.runner import GraphKey, Runner

CAPTURE_THRESHOLD = 16   # requests for a graph shape before it gets its own capture


@dataclasses.dataclass
class GraphState:
  """A backend's captured and requested graph shapes."""
  capture_sizes: list[int] = dataclasses.field(default_factory=list)   # tokens of the steps captured at startup
  num_requested: collections.Counter[tuple[Runner, GraphKey]] = dataclasses.field(default_factory=collections.Counter)


def state_of(backend: Backend) -> GraphState:
  """Return the backend's GraphState, creating it for the core's Backend."""
  return vars(backend).setdefault("graph_state", GraphState())


def sizes_of(key: GraphKey) -> tuple[int, ...]:
  """Return a key as numbers. A graph also runs every step that is smaller in all of them."""
  plan = key.plan
  features = (plan.has_logprobs, plan.num_adjustments, plan.has_bitmask, plan.has_all_logprobs) if plan else (0,) * 4
  return key.num_tokens, key.num_rows, key.sampler_mode, *features


def cost(key: GraphKey) -> int:
  """Return a step's relative time: reading the weights takes as long as 16 tokens, an optional feature half a step."""
  num_tokens, _, *features = sizes_of(key)
  return (16 + num_tokens) * (2 + sum(map(bool, features)))


def choose_graph(runner: Runner, key: GraphKey) -> GraphKey:
  """Return `key` or a larger captured one: the fastest if steps were captured at startup, else only one that takes less
  than twice the time, until `key` was requested CAPTURE_THRESHOLD times."""
  state = state_of(runner.backend)
  if state.capture_sizes:
    size = min([size for size in state.capture_sizes if size >= key.num_tokens], default=key.num_tokens)
    rows = max(key.num_rows, min(size, runner.max_rows)) if key.num_rows <= runner.max_rows else size
    key = key._replace(num_tokens=size, num_rows=rows)
  sizes = sizes_of(key)
  larger = [graph for graph in runner.graphs if all(map(operator.ge, sizes_of(graph), sizes))]
  best = min(larger, key=cost, default=key)
  state.num_requested[runner, key] += 1
  can_wait = state.num_requested[runner, key] <= CAPTURE_THRESHOLD and cost(best) < 2 * cost(key)
  return best if state.capture_sizes or can_wait else key
