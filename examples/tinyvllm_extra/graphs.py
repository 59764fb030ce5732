"""Steps that are captured before they are met: of which sizes, and the captures one by one, so that a server can answer
between two of them."""
import itertools, time
from collections.abc import Iterator

from tinygrad import helpers

from tinyvllm.batch import Shape
from tinyvllm.config import logger
from tinyvllm.device import exclusive, num_compiled, renderer
from tinyvllm.engine import LLMEngine
from tinyvllm.runner import Runner


def usual_sizes(runner: Runner) -> list[int]:
  """Tokens of the steps that are worth a capture on this device. Tensor cores take 8 in the time of 2, and more than
  all sequences have at once are of prompts, and many."""
  sizes = [1 << i for i in range(runner.max_tokens.bit_length())]
  if not renderer().tensor_cores: return sizes
  return [size for size in sizes if size in (1, runner.max_tokens) or 8 <= size <= max(64, runner.max_rows)]


def capture(engine: LLMEngine, sizes: list[int] | None, rare: bool) -> Iterator[str]:
  """What LLMEngine.capture says."""
  started = time.perf_counter()
  known = num_compiled()
  sizes = [] if engine.config.enforce_eager else sorted(sizes or usual_sizes(engine.runner))
  for runner in engine.runners: runner.sizes = sizes
  kinds = [(1, False, 0, False), (2, True, 128, True)] if rare else [(0, False, 0, False), (2, False, 0, False)]
  shapes = [Shape(size, min(size, engine.runner.max_rows), *kind) for size in sizes for kind in kinds]
  steps = [*itertools.product(shapes, engine.runners)]
  for i, (shape, runner) in enumerate(helpers.tqdm(steps, desc="capturing steps", disable=rare or None), 1):
    yield f"preparing {i} of {len(steps)}"
    def fit(need, shape=shape): return shape
    with engine.alone(), exclusive: runner.launch(engine.pack({}, fit=fit))()
  logger.info(f"captured {len(steps)} steps in {time.perf_counter() - started:.1f} s, "
              f"{num_compiled() - known} new kernels")
