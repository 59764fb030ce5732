"""Numbers about a running engine, as get_metrics returns them."""
from typing import Any

from tinyvllm.engine import LLMEngine


def get_metrics(engine: LLMEngine) -> dict[str, Any]:
  """Counters since the start, rates over the seconds spent in steps, and the state of the blocks and the queue."""
  counters = engine.scheduler.counters
  blocks = engine.blocks
  seconds = counters["seconds"] or 1
  return {**counters, **(engine.proposer.metrics() if engine.proposer else {}), "blocks_used": blocks.num_used(),
          "blocks_free": blocks.num_free(), "blocks_cached": len(blocks.evictable),
          "blocks_shared": len(blocks.shared), "num_requests_running": len(engine.scheduler.running),
          "num_requests_waiting": len(engine.scheduler.waiting),
          "mean_batch_size": counters["scheduled"] / (counters["steps"] or 1),
          "tokens_per_second": counters["generation_tokens"] / seconds,
          "requests_per_second": counters["requests_finished"] / seconds}
