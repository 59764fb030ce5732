"""Metrics of requests and of a running engine, and the scheduler that collects them. It limits steps with prompts to a
captured size that they fill, and that sequences which decode do not wait long for."""
import bisect, collections, dataclasses, itertools, math, time

from tinyvllm.config import EngineConfig, JsonObject, logger
from tinyvllm.request import Sequence
from tinyvllm.scheduler import BlockManager
from tinyvllm_extra.cache.snapshots import SnapshotScheduler
from tinyvllm_extra.graph_policy import PROMPT
from tinyvllm_extra.options import LLMConfig

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


class MeteredScheduler(SnapshotScheduler):
  """A scheduler that counts events, sets the times of requests, and whose steps fill captured ones. While sequences
  decode, a step has at most half of the default of GPUs, 8 PROMPT tokens (or two per sequence), and one of more than
  PROMPT tokens takes about max_pause seconds at most.

  sizes: tokens of the captured steps, sorted; empty: no limits. seconds: time of the last step of each size."""
  config: LLMConfig

  def __init__(self, config: EngineConfig, blocks: BlockManager):
    super().__init__(config, blocks)
    self.sizes: list[int] = []
    self.seconds: dict[int, float] = {}
    self.launches = collections.deque[tuple[int, float]](maxlen=2)   # tokens and time of the steps in flight
    self.updated = 0.0   # when the last step ended
    self.counters = collections.Counter(
      steps=0, scheduled=0, seconds=0, num_preemptions=0, prompt_tokens=0, generation_tokens=0, requests_finished=0,
      prefix_cache_queries=0, prefix_cache_hits=0, step_tokens=0)
    self.step_sizes = dict.fromkeys(STEP_SIZES, 0)   # number of steps by size

  def schedule(self, budget: int = 0) -> dict[Sequence, int]:
    budget = budget or self.config.max_num_batched_tokens or 0   # the engine has set it
    return super().schedule(self.limit(budget) if self.sizes else budget)

  def limit(self, budget: int) -> int:
    """Return the maximum number of tokens of the next step, up to `budget`."""
    remaining = [seq.num_remaining for seq in self.running if not seq.reached_max_len]
    free_slots = self.config.max_num_seqs - len(self.running)
    total = sum(remaining) + sum(len(seq.tokens) for seq in itertools.islice(self.waiting, free_slots))
    num_decodes = remaining.count(1)
    if num_decodes and budget == 16 * PROMPT: budget = max(8 * PROMPT, 2 * num_decodes)   # more tokens hardly gain
    sizes = [*[size for size in self.sizes if max(PROMPT, num_decodes + 1) <= size < budget], budget]
    fits = [size for size in sizes if size <= total]
    # A padded step takes as long as a full one, and that as long as about three full ones of a fourth of its size
    if len(fits) < len(sizes) and (not fits or total >= 3 * fits[-1]): fits.append(sizes[len(fits)])
    while num_decodes and len(fits) > 1 and self.seconds.get(fits[-1], 0) > self.config.max_pause:
      self.seconds[fits.pop()] *= 0.999   # until the size is measured again
    return fits[-1]

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
    now, size = time.monotonic(), sum(map(len, computed.values()))
    for seq in sampled:   # first, as its last token may finish it
      if math.isnan(seq.metrics.first_token_time): seq.metrics.first_token_time = now
    for launch in [launch for launch in self.launches if launch[0] == size][:1]:   # not of a further draft token
      self.seconds[size] = now - max(self.updated, launch[1])
      self.launches.remove(launch)
    self.updated = now
    super().update(computed, sampled)
    self.counters.update(generation_tokens=len(sampled))

  def start_step(self, batch: dict[Sequence, int], num_behind: int = 0) -> None:
    super().start_step(batch, num_behind)
    num_tokens = sum(batch.values())
    if batch: self.step_sizes[STEP_SIZES[bisect.bisect_left(STEP_SIZES, num_tokens)]] += 1
    self.counters.update(scheduled=len(batch), step_tokens=num_tokens)
    self.launches.append((num_tokens, time.monotonic()))

  def finish(self, seq: Sequence, reason: str) -> None:
    seq.metrics.finished_time = time.monotonic()
    super().finish(seq, reason)

  def reset(self, unfinished: list[Sequence]) -> None:
    super().reset(unfinished)
    self.launches.clear()

  def metrics(self) -> JsonObject:
    """Return counters since startup, rates over the time spent in steps, the numbers of blocks and sequences, and the
    options of the KV cache under vLLM's names, as is kv_cache_usage_perc, which is a fraction."""
    blocks = self.blocks
    seconds = self.counters["seconds"] or 1
    return {**self.counters, **(self.states.metrics() if self.states else {}), "step_sizes": {**self.step_sizes},
            "blocks_used": blocks.num_used(), "blocks_free": blocks.num_free(), "blocks_cached": len(blocks.evictable),
            "blocks_shared": len(+blocks.shared), "kv_cache_usage_perc": blocks.num_used() / (blocks.num_blocks - 1),
            "num_requests_running": len(self.running), "num_requests_waiting": len(self.waiting),
            "mean_batch_size": self.counters["scheduled"] / (self.counters["steps"] or 1),
            "tokens_per_second": self.counters["generation_tokens"] / seconds,
            "requests_per_second": self.counters["requests_finished"] / seconds,
            "cache_config": {"cache_dtype": self.config.kv_cache_dtype, "num_gpu_blocks": blocks.num_blocks,
                             **{name: getattr(self.config, name) for name in CACHE_OPTIONS}}}
