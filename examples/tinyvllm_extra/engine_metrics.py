"""Metrics of requests and of a running engine. The core's scheduler collects none."""
import bisect, collections, dataclasses, math, time

from tinyvllm.config import EngineConfig, JsonObject, logger
from tinyvllm.request import Sequence
from tinyvllm.scheduler import BlockManager

from .captures import PacedScheduler

CACHE_OPTIONS = "block_size", "enable_prefix_caching", "gpu_memory_utilization", "num_gpu_blocks_override"
STEP_SIZES = (1, *(2**i for i in range(3, 15)), math.inf)   # upper limits, in tokens


@dataclasses.dataclass
class RequestMetrics:
  """Monotonic times of a request's events and the seconds between them; NaN for future events."""
  samples: list[Sequence] = dataclasses.field(default_factory=list, repr=False)
  arrival_time: float = dataclasses.field(default_factory=time.monotonic)
  first_scheduled_time: float = math.nan
  first_token_time: float = math.nan
  finished_time: float = math.nan
  num_draft_tokens: int = 0
  num_accepted_tokens: int = 0   # draft tokens that were accepted

  def __post_init__(self) -> None:
    for seq in self.samples: seq.metrics = self

  num_generated = property(lambda self: sum(seq.num_generated for seq in self.samples))   # tokens of all samples
  queue_time = property(lambda self: self.first_scheduled_time - self.arrival_time)
  ttft = property(lambda self: self.first_token_time - self.arrival_time)
  tpot = property(lambda self: (self.finished_time - self.first_token_time) / max(1, self.num_generated - 1))
  latency = property(lambda self: self.finished_time - self.arrival_time)


class MeteredScheduler(PacedScheduler):
  """A scheduler that counts events and sets the times of requests."""
  def __init__(self, config: EngineConfig, blocks: BlockManager):
    super().__init__(config, blocks)
    self.counters = collections.Counter(
      steps=0, scheduled=0, seconds=0, num_preemptions=0, prompt_tokens=0, generation_tokens=0, requests_finished=0,
      prefix_cache_queries=0, prefix_cache_hits=0, step_tokens=0)
    self.step_sizes = dict.fromkeys(STEP_SIZES, 0)   # number of steps by size

  def start(self, seq: Sequence, free_slots: set[int]) -> bool:
    if not super().start(seq, free_slots): return False
    self.counters.update(prefix_cache_queries=len(seq.tokens), prefix_cache_hits=seq.num_computed)
    if math.isnan(seq.metrics.first_scheduled_time):
      self.counters["prompt_tokens"] += seq.num_prompt
      seq.metrics.first_scheduled_time = time.monotonic()
    return True

  def preempt(self, seq: Sequence) -> None:
    super().preempt(seq)
    count = self.counters["num_preemptions"] = self.counters["num_preemptions"] + 1
    if count.bit_count() == 1:   # at 1, 2, 4, 8, ...
      logger.warning(f"{count} preemptions: lower max_num_seqs or raise gpu_memory_utilization")

  def update(self, computed: dict[Sequence, range], sampled: dict[Sequence, int]) -> None:
    for seq in sampled:   # first, as its last token may finish it
      if math.isnan(seq.metrics.first_token_time): seq.metrics.first_token_time = time.monotonic()
    super().update(computed, sampled)
    self.counters.update(generation_tokens=len(sampled))

  def start_step(self, batch: dict[Sequence, int], num_behind: int = 0) -> None:
    super().start_step(batch, num_behind)
    num_tokens = sum(batch.values())
    if batch: self.step_sizes[STEP_SIZES[bisect.bisect_left(STEP_SIZES, num_tokens)]] += 1
    self.counters.update(scheduled=len(batch), step_tokens=num_tokens)

  def finish(self, seq: Sequence, reason: str) -> None:
    seq.metrics.finished_time = time.monotonic()
    super().finish(seq, reason)

  def metrics(self) -> JsonObject:
    """Return counters since startup, rates over the time spent in steps, the numbers of blocks and sequences, and the
    options of the KV cache under vLLM's names."""
    blocks = self.blocks
    seconds = self.counters["seconds"] or 1
    return {**self.counters, **(self.states.metrics() if self.states else {}), "blocks_used": blocks.num_used(),
            "blocks_free": blocks.num_free(), "blocks_cached": len(blocks.evictable),
            "blocks_shared": len(+blocks.shared), "num_requests_running": len(self.running),
            "kv_cache_usage_perc": blocks.num_used() / (blocks.num_blocks - 1),   # a fraction, under vLLM's name
            "num_requests_waiting": len(self.waiting),
            "mean_batch_size": self.counters["scheduled"] / (self.counters["steps"] or 1),
            "tokens_per_second": self.counters["generation_tokens"] / seconds,
            "requests_per_second": self.counters["requests_finished"] / seconds, "step_sizes": {**self.step_sizes},
            "cache_config": {"cache_dtype": vars(self.config)["kv_cache_dtype"], "num_gpu_blocks": blocks.num_blocks,
                             **{name: getattr(self.config, name) for name in CACHE_OPTIONS}}}
