"""Server metrics under vLLM's names: a Prometheus registry and a periodic log line. Engine totals are read at each
scrape; request times are observed as tokens arrive."""
import asyncio, bisect, itertools, math, pathlib, time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, core
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tinyvllm.config import JsonObject, logger, read_json
from tinyvllm.engine import Request

LOG_INTERVAL = 10   # seconds between log lines
# Help texts of metrics by kind: "counters", "gauges", "histograms"
TEXTS = read_json(pathlib.Path(__file__).with_suffix(".json"))
# A finished request's values for histograms
VALUES: dict[str, Callable[[Request], float]] = {
  "time_to_first_token_seconds": lambda x: x.metrics.ttft,
  "e2e_request_latency_seconds": lambda x: x.metrics.latency,
  "request_queue_time_seconds": lambda x: x.metrics.queue_time,
  "request_inference_time_seconds": lambda x: x.metrics.finished_time - x.metrics.first_scheduled_time,
  "request_prefill_time_seconds": lambda x: x.metrics.first_token_time - x.metrics.first_scheduled_time,
  "request_decode_time_seconds": lambda x: x.metrics.finished_time - x.metrics.first_token_time,
  "request_prompt_tokens": lambda x: x.sequences[0].num_prompt,
  "request_generation_tokens": lambda x: x.metrics.num_generated,
  "request_params_n": lambda x: len(x.sequences),
  "request_params_max_tokens": lambda x: x.sequences[0].params.max_tokens}
ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
SECONDS = [*(digit * 10.0**power for power in range(-3, 4) for digit in (1, 2.5, 5)), math.inf]   # buckets
TOKENS = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]


class Metrics(Collector):
  """A server's Prometheus registry. engine_metrics: returns LLM.get_metrics(), or zeros until the model is loaded."""
  def __init__(self, model_name: str, engine_metrics: Callable[[], JsonObject]):
    self.model_name = model_name
    self.engine_metrics = engine_metrics
    self.last_tokens: dict[Request, tuple[float, int]] = {}   # time of the last token, number of tokens
    self.intervals = dict.fromkeys(SECONDS, 0)   # number of tokens by time since the one before
    self.interval_sum = 0.0
    self.registry = CollectorRegistry()
    self.histograms = {name: Histogram(f"tinyvllm:{name}", text, ["model_name"], registry=self.registry,
                                       buckets=SECONDS if name.endswith("seconds") else TOKENS).labels(model_name)
                       for name, text in TEXTS["histograms"].items()}
    self.finished = Counter("tinyvllm:request_success", "Finished sequences, by finish reason",
                            ["model_name", "finished_reason"], registry=self.registry)
    self.registry.register(self)

  def collect(self) -> Iterator[core.Metric]:
    """Yield the engine's metric families. prometheus_client calls this at each scrape."""
    metrics = self.engine_metrics()

    # samples: suffix of the name, labels and value of each
    def family(name: str, metric_type: str, text: str, samples: list[tuple[str, dict[str, str], float]]) -> core.Metric:
      metric = core.Metric(f"tinyvllm:{name}", text, metric_type)
      for suffix, labels, value in samples:
        metric.add_sample(f"{metric.name}{suffix}", {"model_name": self.model_name, **labels}, value)
      return metric

    # counts: number of observations in each bucket, by its upper limit. total: the sum of all observations
    def histogram(name: str, text: str, counts: dict[float, int], total: float) -> core.Metric:
      at_most = [*itertools.accumulate(counts.values())]
      buckets = [("_bucket", {"le": floatToGoString(limit)}, n) for limit, n in zip(counts, at_most, strict=True)]
      return family(name, "histogram", text, [*buckets, ("_count", {}, at_most[-1]), ("_sum", {}, total)])
    for kind, suffix in (("counter", "_total"), ("gauge", "")):
      for name, text in TEXTS[f"{kind}s"].items(): yield family(name, kind, text, [(suffix, {}, metrics.get(name, 0))])
    accepted = enumerate(metrics.get(ACCEPTED, []))
    yield family(ACCEPTED, "counter", "Draft tokens accepted, by position in the draft",
                 [("_total", {"position": str(position)}, count) for position, count in accepted])
    sizes = metrics.get("step_sizes", {math.inf: 0})
    yield histogram("iteration_tokens_total", "Tokens per step", sizes, metrics["step_tokens"])
    yield histogram("inter_token_latency_seconds", "Seconds between output tokens", self.intervals,
                    self.interval_sum)
    config = {name: str(value) for name, value in metrics.get("cache_config", {}).items()}
    yield family("cache_config_info", "gauge", "Options of the KV cache", [("", config, 1)] if config else [])

  def observe_tokens(self, request: Request) -> None:
    """Observe the time per token since the last call for this request."""
    now = time.monotonic()
    count = request.metrics.num_generated
    last_time, last_count = self.last_tokens.get(request, (now, 0))
    self.last_tokens[request] = now, count
    num_intervals = count - max(1, last_count)
    if num_intervals <= 0: return
    interval = (now - last_time) / (count - last_count)
    self.intervals[SECONDS[bisect.bisect_left(SECONDS, interval)]] += num_intervals
    self.interval_sum += num_intervals * interval

  def observe_end(self, request: Request) -> None:
    """Observe the times and token counts of a request that has ended for any reason."""
    self.observe_tokens(request)   # tokens that were not delivered
    del self.last_tokens[request]
    for seq in request.sequences: self.finished.labels(self.model_name, seq.finish_reason).inc()
    for name, value_of in VALUES.items():
      value = value_of(request)
      if not math.isnan(value): self.histograms[name].observe(value)   # NaN: the event never happened


def draft_statistics(metrics: JsonObject) -> str:
  """Return the log line's speculative decoding part. Acceptance length: tokens per verification."""
  if not metrics.get("spec_decode_num_draft_tokens"): return ""
  accepted = metrics["spec_decode_num_accepted_tokens"]
  return (f", Draft acceptance rate: {accepted / metrics['spec_decode_num_draft_tokens']:.1%}, "
          f"Mean acceptance length: {1 + accepted / metrics['spec_decode_num_drafts']:.2f}")


async def log_throughput(engine_metrics: Callable[[], JsonObject]) -> None:
  """Log vLLM's line every LOG_INTERVAL seconds if a step has run since the last one. Runs until it is cancelled."""
  before = engine_metrics()
  while True:
    await asyncio.sleep(LOG_INTERVAL)
    now = engine_metrics()
    if now["steps"] > before["steps"]:
      prompt, generation = ((now[x] - before[x]) / LOG_INTERVAL for x in ("prompt_tokens", "generation_tokens"))
      hit_rate = now["prefix_cache_hits"] / max(1, now["prefix_cache_queries"])
      logger.info(f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: "
                  f"{generation:.1f} tokens/s, Running: {now['num_requests_running']} reqs, Waiting: "
                  f"{now['num_requests_waiting']} reqs, KV cache usage: {now['kv_cache_usage_perc']:.1%}, "
                  f"Prefix cache hit rate: {hit_rate:.1%}{draft_statistics(now)}")
    before = now
