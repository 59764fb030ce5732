"""Server metrics under vLLM's names: a Prometheus registry and a periodic log line. Engine totals are read at each
scrape; request times are observed as tokens arrive."""
import asyncio, bisect, itertools, math, operator, pathlib, time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, core, registry, utils

from tinyvllm.config import JsonObject, logger, read_json
from tinyvllm.engine import Request

LOG_INTERVAL = 10   # seconds between log lines
# Help texts of metrics, by name in each kind. FAMILIES: the kinds that are built at each scrape. requests: also an
# attribute of a finished request's first Sequence, or two, whose difference is observed
TEXTS = read_json(pathlib.Path(__file__).with_suffix(".json"))
FAMILIES = {"counters": core.CounterMetricFamily, "gauges": core.GaugeMetricFamily,
            "infos": core.InfoMetricFamily, "histograms": core.HistogramMetricFamily}
ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
SECONDS = [*(digit * 10.0**power for power in range(-3, 4) for digit in (1, 2.5, 5)), math.inf]   # buckets
TOKENS = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]


class Metrics(registry.Collector):
  """A server's Prometheus registry. engine_metrics: returns LLM.get_metrics(), or zeros until the model is loaded."""
  def __init__(self, model_name: str, engine_metrics: Callable[[], JsonObject]):
    self.model_name = model_name
    self.engine_metrics = engine_metrics
    self.last_tokens: dict[Request, tuple[float, int]] = {}   # time of the last token, number of tokens
    self.intervals = dict.fromkeys(SECONDS, 0)   # between tokens: their number by upper limit in seconds
    self.interval_seconds = 0.0   # sum of all intervals
    self.registry = CollectorRegistry()
    self.histograms = {name: Histogram(f"tinyvllm:{name}", text, ["model_name"], registry=self.registry,
                                       buckets=SECONDS if name.endswith("seconds") else TOKENS).labels(model_name)
                       for name, (text, *_) in TEXTS["requests"].items()}
    self.finished = Counter("tinyvllm:request_success", TEXTS["others"]["request_success"],
                            ["model_name", "finished_reason"], registry=self.registry)
    self.registry.register(self)

  def collect(self) -> Iterator[core.Metric]:
    """Yield the engine's metric families. prometheus_client calls this at each scrape."""
    metrics = self.engine_metrics()
    config = {name: str(x) for name, x in metrics.get("cache_config", {}).items()}
    # By name: the values of the label `position`, if any, and the other arguments of add_metric
    rows: dict[str, list] = {name: [([], metrics.get(name, 0))] for kind in FAMILIES for name in TEXTS[kind]}
    rows[ACCEPTED] = [([str(position)], count) for position, count in enumerate(metrics.get(ACCEPTED, []))]
    rows["cache_config"] = [([], config)] if config else []
    for name, counts, total in (
      ("iteration_tokens_total", metrics.get("step_sizes", {math.inf: 0}), metrics["step_tokens"]),
      ("inter_token_latency_seconds", self.intervals, self.interval_seconds)):
      buckets = zip(map(utils.floatToGoString, counts), itertools.accumulate(counts.values()), strict=True)
      rows[name] = [([], [*buckets], total)]
    for kind, metric_class in FAMILIES.items():
      for name, text in TEXTS[kind].items():
        metric = metric_class(f"tinyvllm:{name}", text, labels=["model_name", *["position"] * (name == ACCEPTED)])
        for values, *arguments in rows[name]: metric.add_metric([self.model_name, *values], *arguments)
        yield metric

  def observe_tokens(self, request: Request) -> None:
    """Observe the time per token since the last call for this request."""
    now = time.monotonic()
    count = request.metrics.num_generated
    last_time, last_count = self.last_tokens.get(request, (now, 0))
    self.last_tokens[request] = now, count
    num_intervals = count - max(1, last_count)
    if num_intervals <= 0: return
    seconds = (now - last_time) / (count - last_count)
    self.intervals[SECONDS[bisect.bisect_left(SECONDS, seconds)]] += num_intervals
    self.interval_seconds += num_intervals * seconds

  def observe_end(self, request: Request) -> None:
    """Observe the times and token counts of a request that has ended for any reason."""
    self.observe_tokens(request)   # tokens that were not delivered
    del self.last_tokens[request]
    for seq in request.sequences: self.finished.labels(self.model_name, seq.finish_reason or "abort").inc()
    for name, (_, *attributes) in TEXTS["requests"].items():
      *start, end = [operator.attrgetter(x)(request.sequences[0]) for x in attributes]
      value = end - sum(start)
      if not math.isnan(value): self.histograms[name].observe(value)   # NaN: an event never happened


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
