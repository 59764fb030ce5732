"""`tinyvllm bench`: prompt and generation rates in llama-bench's table. `bench throughput` and `bench serve`: flags and
metrics of vllm bench. Prompts are random token ids, new in each run. Captures and warm-ups are not measured."""
import dataclasses, json, os, random, time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from tinygrad import Device

from tinyvllm import LLM, SamplingParams
from tinyvllm.backend import cpu_cores
from tinyvllm.config import JsonObject, check, logger
from tinyvllm.runner import next_power_of_two
from tinyvllm_extra.formats.fit import model_weights, plain_weights
from tinyvllm_extra.options import LLMConfig

from .client import Remote
from .flags import BenchConfig, select_options

# times: of the request, its first token, …, its last token. intervals: seconds between a server's events
Answer = NamedTuple("Answer", [("times", list[float]), ("num_tokens", int), ("intervals", list[float])])
# The columns of llama-bench
HEADER = """\
| model                     |          size |       params | backend | threads |    test |                t/s |
| ------------------------- | ------------: | -----------: | ------- | ------: | ------: | -----------------: |"""
ROW = ("| {model:25} | {size_mib:9.2f} MiB | {params_m:10.2f} M | {backend:7} | {threads:7} | {test:>7} | "
       "{avg_ts:9.2f} ± {stddev_ts:6.2f} |")
MODES = {"": slice(4), "throughput": slice(4, -3), "serve": slice(4, None)}   # -> fields of BenchConfig that it uses
WARM_UP = 32    # maximum requests that a server gets before the measurement
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
  return [Answer([x.arrival_time, x.first_token_time, x.finished_time], x.num_generated, []) for x in metrics]


def rates(llm: LLM, config: BenchConfig) -> None:
  """Print tokens/s of a prompt (pp) and of an output (tg), one sequence at a time."""
  half, budget, model = llm.max_model_len // 2, llm.config.max_num_batched_tokens or 1, llm.runner.model
  n_prompt = min(512, half) if config.n_prompt is None else config.n_prompt
  n_gen = min(128, half) if config.n_gen is None else config.n_gen
  for _ in llm.capture(sorted({next_power_of_two(x) for x in (1, min(n_prompt, budget), n_prompt % budget)})): pass
  facts = {"model": llm.path.name, "size_mib": sum(x.nbytes for x in model_weights(model)) / 2**20,
           "params_m": sum(x.num_elements for x in plain_weights(llm.model_config, type(model))) / 1e6}
  rows = []
  for test, n, shape in (("pp", n_prompt, (n_prompt, 1)), ("tg", n_gen, (1, n_gen))):
    if not n: continue
    times = np.array([run(llm, 1, *shape)[0].times for _ in range(config.repetitions + 1)][1:])
    samples = n / (times[:, -1] - times[:, 0])
    rows.append({**facts, "backend": Device.DEFAULT, "threads": cpu_cores(), "test": f"{test}{n}",
                 "avg_ts": float(samples.mean()), "stddev_ts": float(samples.std(ddof=min(1, len(samples) - 1)))})
  table = "\n".join([HEADER, *(ROW.format(**row) for row in rows)])
  print(json.dumps(rows, indent=2) if config.output == "json" else table)


def throughput(llm: LLM, config: BenchConfig) -> list[Answer]:
  """Complete all requests together."""
  for _ in llm.capture(): pass
  return run(llm, config.num_prompts, config.random_input_len, config.random_output_len)


def send(remote: Remote, config: BenchConfig) -> Answer:
  """Send a request. Raises InputError if the answer does not end with the number of its tokens."""
  ids, = random_ids(1, config.random_input_len)
  times, num_tokens = [time.monotonic()], 0
  for output in remote.generate_stream(ids, {**SAMPLING, "max_tokens": config.random_output_len}):
    times.append(time.monotonic())
    num_tokens = output.metrics.num_generated if output.metrics else 0   # the last output has metrics, and no token
  check(num_tokens, "an answer was cut")
  return Answer(times[:-1], num_tokens, np.diff(times[1:-1]).tolist())


def serve(model: str | None, config: BenchConfig) -> list[Answer]:
  """Send requests to a server, which arrive in a Poisson process."""
  remote = Remote({"url": config.base_url, "api_key": os.environ.get("OPENAI_API_KEY"), "model": model}, {})
  with ThreadPoolExecutor(config.max_concurrency or config.num_prompts) as pool:
    def submit() -> Future[Answer]: return pool.submit(send, remote, config)
    for warm_up in [submit() for _ in range(min(WARM_UP, config.num_prompts))]: warm_up.result()   # raises its error
    answers = []
    for _ in range(config.num_prompts):
      answers.append(submit())
      time.sleep(random.expovariate(config.request_rate))
  for error in {str(x.exception()) for x in answers if x.exception()}: logger.warning(f"a request failed: {error}")
  return [x.result() for x in answers if not x.exception()]


def print_metrics(config: BenchConfig, answers: list[Answer]) -> None:
  """Print metrics under vLLM's names."""
  check(answers, "all requests failed")
  n, seconds = len(answers), max(x.times[-1] for x in answers) - min(x.times[0] for x in answers)
  num_input, num_output = n * config.random_input_len, sum(x.num_tokens for x in answers)
  sections: dict[str, dict[str, float]] = {"Benchmark Result": {
    "Successful requests": n, "Failed requests": config.num_prompts - n, "Benchmark duration (s)": seconds,
    "Total input tokens": num_input, "Total generated tokens": num_output, "Request throughput (req/s)": n / seconds,
    "Output token throughput (tok/s)": num_output / seconds,
    "Total token throughput (tok/s)": (num_input + num_output) / seconds}}
  for title, name, values in (
      ("Time to First Token", "TTFT", [x.times[1] - x.times[0] for x in answers]),
      ("Time per Output Token (excl. 1st token)", "TPOT",
       [(x.times[-1] - x.times[1]) / (x.num_tokens - 1) for x in answers if x.num_tokens > 1]),
      ("Inter-token Latency", "ITL", [seconds for x in answers for seconds in x.intervals])):
    if not values: continue
    statistics = {"Mean": np.mean(values), "Median": np.median(values), "P99": np.percentile(values, 99)}
    sections[title] = {f"{key} {name} (ms)": 1e3 * float(value) for key, value in statistics.items()}
  for title, metrics in sections.items():
    print(f"{f' {title} ':-^50}")
    for name, value in metrics.items(): print(f"{name + ':':40} {value:<10{'' if isinstance(value, int) else '.2f'}}")


def main(args: JsonObject) -> int:
  """Run `tinyvllm bench`, and return the exit code."""
  mode, variables = args.get("mode", ""), args["variables"]
  if mode not in MODES:   # the word is a model
    check("model" not in args or "model" in variables, f"mode={mode!r} must be throughput or serve")
    mode, args = "", {**args, "model": mode}
  options, engine = select_options(args, BenchConfig), select_options(args, LLMConfig)
  used = [field.name for field in dataclasses.fields(BenchConfig)][MODES[mode]]
  unused = {*options, *(engine if mode == "serve" else ())}.difference(used, variables)
  check(not unused, f"{', '.join(unused)}: not a flag of `tinyvllm bench{mode and ' ' + mode}`")
  config, model = BenchConfig(**options), args.get("model")
  if mode == "serve": print_metrics(config, serve(model, config))
  elif mode: print_metrics(config, throughput(LLM(model, **engine), config))
  else: rates(LLM(model, **engine), config)
  return 0
