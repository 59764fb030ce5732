"""Chooses the graph that a step runs with: its own shape, or a larger one that is captured (captures.py)."""
import collections, operator

from tinyvllm import backend
from tinyvllm.runner import GraphKey, Runner

PROMPT = 128   # least limit of a step with prompts, in tokens
CAPTURE_THRESHOLD = 16   # requests for a graph shape before it gets its own capture


def sizes_of(key: GraphKey) -> tuple[int, ...]:
  """Return a key as numbers. A graph also runs every step that is smaller in all of them."""
  plan = key.plan
  features = (plan.has_logprobs, plan.num_adjustments, plan.has_bitmask, plan.has_all_logprobs) if plan else (0,) * 4
  return key.num_tokens, key.num_rows, key.sampler_mode, *features


def cost(key: GraphKey) -> int:
  """Return a step's relative time: reading the weights takes as long as 16 tokens, an optional feature half a step."""
  num_tokens, _, *features = sizes_of(key)
  return (16 + num_tokens) * (2 + sum(map(bool, features)))


class PaddedGraphs(backend.Graphs):
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
