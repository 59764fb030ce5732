"""Captures graphs at startup, so that no request waits for a capture."""
import itertools, time
from collections.abc import Iterator
from typing import Any

from tinygrad import helpers

from tinyvllm.backend import exclusive, renderer
from tinyvllm.config import check, logger
from tinyvllm.engine import Engine
from tinyvllm.request import SamplerMode
from tinyvllm.runner import GraphKey, Runner, build_step, next_power_of_two

from .graph_choice import state_of
from .tinygrad_patches import num_compiled

Variant = tuple[SamplerMode, Any]   # of a graph: its sampler and its LogitsPlan or None


def usual_sizes(runner: Runner) -> list[int]:
  """Return the step sizes in tokens to capture on this device. Tensor cores compute 8 tokens in the time of 2, and
  steps with more tokens than sequences are prefill, with many tokens."""
  largest = next_power_of_two(runner.config.max_num_batched_tokens)   # type: ignore[arg-type]   # by now an int
  sizes = [1 << i for i in range(largest.bit_length())]
  if not renderer().tensor_cores: return sizes
  return [size for size in sizes if size in (1, largest) or 8 <= size <= max(64, runner.max_rows)]


def capture(engine: Engine, sizes: list[int] | None, variants: list[Variant], quiet: bool) -> Iterator[str]:
  """Capture a step of each size and variant, and pad later steps to them. sizes: tokens of a step, powers of two; None:
  the device's `usual_sizes`. Yields its progress before each capture."""
  are_powers = all(x > 0 and x.bit_count() == 1 for x in sizes or ())
  check(are_powers, f"cudagraph_capture_sizes={sizes} must be powers of two")
  return _capture(engine, sizes, variants, quiet)


def _capture(engine: Engine, sizes: list[int] | None, variants: list[Variant], quiet: bool) -> Iterator[str]:
  started = time.perf_counter()
  num_kernels = num_compiled()
  sizes = [] if engine.config.enforce_eager else sorted(sizes or usual_sizes(engine.runner))
  state_of(engine.runner.backend).capture_sizes = sizes
  keys = [GraphKey(size, min(size, engine.runner.max_rows), *variant) for size in sizes for variant in variants]
  steps = [*itertools.product(keys, engine.runners)]
  for i, (key, runner) in enumerate(helpers.tqdm(steps, desc="capturing steps", disable=quiet or None), 1):
    yield f"preparing {i} of {len(steps)}"
    with engine.driving(), exclusive: runner.launch(build_step({}, runner, key))()
  logger.info(f"captured {len(steps)} steps in {time.perf_counter() - started:.1f} s, "
              f"{num_compiled() - num_kernels} new kernels")
