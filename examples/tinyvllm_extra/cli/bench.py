"""`tinyvllm bench`: prompt and generation rates in llama-bench's table. `bench throughput` and `bench serve`: flags and
metrics of vllm bench. Prompts are random token ids, new in each run. Captures and warm-ups are not measured."""
import concurrent.futures, functools, math, os, random, time, typing
from collections.abc import Callable, Iterable

import numpy as np

from tinyvllm import LLM, SamplingParams, backend
from tinyvllm.config import JsonObject, check, logger
from tinyvllm_extra.formats.fit import model_weights, plain_weights
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.serving.client import Remote

from .flags import FLAGS, BenchConfig, select_options

# times: of the request, its first token, …, its last token; of a server's answer one for each event
Answer = typing.NamedTuple("Answer", [("times", list[float]), ("num_tokens", int)])
MODES = {"": slice(3), "throughput": slice(3, -3), "serve": slice(3, None)}   # -> fields of BenchConfig that it uses
STATISTICS: dict[str, Callable[[list[float]], float]] = {
  "Mean": np.mean, "Median": np.median, "P99": functools.partial(np.percentile, q=99)}
LATENCIES: dict[str, Callable[[Answer], Iterable[float]]] = {   # seconds, of an answer
  "TTFT": lambda x: [x.times[1] - x.times[0]], "ITL": lambda x: np.diff(x.times[1:]),
  "TPOT": lambda x: [(x.times[-1] - x.times[1]) / (x.num_tokens - 1)] if x.num_tokens > 1 else []}
SAMPLING: JsonObject = {"temperature": 0.0, "ignore_eos": True, "skip_special_tokens": False}


# Ids below 256, which every model has
def random_ids(*shape: int) -> list[list[int]]: return np.random.default_rng().integers(3, 256, shape).tolist()


def run(llm: LLM, num_prompts: int, num_input: int, num_output: int) -> list[Answer]:
  """Complete random prompts together."""
  check(num_input + num_output <= llm.max_model_len, f"{num_input} prompt tokens and {num_output} output tokens are "
        f"more than max_model_len={llm.max_model_len}: choose fewer")
  prompts: list[str | JsonObject] = [{"prompt_token_ids": ids} for ids in random_ids(num_prompts, num_input)]
  outputs = llm.generate(prompts, SamplingParams(max_tokens=num_output, **SAMPLING), use_tqdm=False)
  metrics = [output.metrics for output in outputs]
  return [Answer([x.arrival_time, x.first_token_time, x.finished_time], x.num_generated) for x in metrics]


def rates(llm: LLM, config: BenchConfig) -> None:
  """Print tokens/s of a prompt (pp) and of an output (tg), one sequence at a time."""
  half, model = llm.max_model_len // 2, llm.runner.model
  n_prompt = min(512, half) if config.n_prompt is None else config.n_prompt
  n_gen = min(128, half) if config.n_gen is None else config.n_gen
  size = sum(x.nbytes for x in model_weights(model)) / 2**20
  params = sum(math.prod(x.shape) for x in plain_weights(llm.model_config, type(model))) / 1e6
  print(*FLAGS["bench_header"], sep="\n")   # llama-bench's columns
  for test, n, shape in (("pp", n_prompt, (n_prompt, 1)), ("tg", n_gen, (1, n_gen))):
    if not n: continue
    times = np.array([run(llm, 1, *shape)[0].times for _ in range(config.repetitions + 1)][1:])
    samples = n / (times[:, -1] - times[:, 0])
    print(f"| {llm.path.name:25} | {size:9.2f} MiB | {params:10.2f} M | {llm.devices[0]:7} | {backend.cpu_cores():7} | "
          f"{test + str(n):>7} | {samples.mean():9.2f} ± {samples.std(ddof=min(1, len(samples) - 1)):6.2f} |")


def send(remote: Remote, config: BenchConfig) -> Answer:
  """Send a request. Raises InputError if the answer does not end with the number of its tokens."""
  ids, = random_ids(1, config.random_input_len)
  outputs = remote.generate_stream(ids, {**SAMPLING, "max_tokens": config.random_output_len})
  started = time.monotonic()
  events = [(time.monotonic(), output.metrics) for output in outputs]
  check(events and events[-1][1], "an answer was cut")   # the last output has metrics, and no token
  return Answer([started, *(at for at, _ in events[:-1])], events[-1][1].num_generated)


def serve(model: str | None, config: BenchConfig) -> list[Answer]:
  """Send requests to a server, which arrive in a Poisson process."""
  remote = Remote({"url": config.base_url, "api_key": os.environ.get("OPENAI_API_KEY"), "model": model}, {})
  def submit(rate: float) -> concurrent.futures.Future[Answer]:
    time.sleep(random.expovariate(rate))
    return pool.submit(send, remote, config)
  with concurrent.futures.ThreadPoolExecutor(config.max_concurrency or config.num_prompts) as pool:
    for warm_up in [submit(math.inf) for _ in range(min(32, config.num_prompts))]: warm_up.result()   # may raise
    answers = [submit(config.request_rate) for _ in range(config.num_prompts)]
  for error in {str(x.exception()) for x in answers if x.exception()}: logger.warning(f"a request failed: {error}")
  return [x.result() for x in answers if not x.exception()]


def print_metrics(config: BenchConfig, answers: list[Answer], latencies: Iterable[str] = ()) -> None:
  """Print metrics under vLLM's names. latencies: of LATENCIES."""
  check(answers, "all requests failed")
  n, seconds = len(answers), max(x.times[-1] for x in answers) - min(x.times[0] for x in answers)
  num_input, num_output = n * config.random_input_len, sum(x.num_tokens for x in answers)
  metrics = {
    "Successful requests": n, "Failed requests": config.num_prompts - n, "Benchmark duration (s)": seconds,
    "Total input tokens": num_input, "Total generated tokens": num_output, "Request throughput (req/s)": n / seconds,
    "Output token throughput (tok/s)": num_output / seconds,
    "Total token throughput (tok/s)": (num_input + num_output) / seconds}
  for name in latencies:
    values = [1e3 * value for x in answers for value in LATENCIES[name](x)]
    if values: metrics |= {f"{key} {name} (ms)": statistic(values) for key, statistic in STATISTICS.items()}
  for name, value in metrics.items(): print(f"{name + ':':40} {value:<10{'' if isinstance(value, int) else '.2f'}}")


def main(args: JsonObject) -> None:
  """Run `tinyvllm bench`."""
  mode, variables = args.get("mode", ""), args["variables"]
  if mode not in MODES:   # the word is a model
    check("model" not in args or "model" in variables, f"mode={mode!r} must be throughput or serve")
    mode, args = "", args | {"model": mode}
  options, engine = select_options(args, BenchConfig), select_options(args, LLMConfig)
  used = [*BenchConfig.__dataclass_fields__][MODES[mode]]
  unused = {*options, *(engine if mode == "serve" else ())}.difference(used, variables)
  check(not unused, f"{', '.join(unused)}: not a flag of `tinyvllm bench{mode and ' ' + mode}`")
  config, model = BenchConfig(**options), args.get("model")
  if mode == "serve": return print_metrics(config, serve(model, config), LATENCIES)
  llm = LLM(model, **engine)
  for _ in llm.capture(): pass
  if not mode: return rates(llm, config)
  print_metrics(config, run(llm, config.num_prompts, config.random_input_len, config.random_output_len))
