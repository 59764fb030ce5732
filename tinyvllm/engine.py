"""The engine: text in, text out. Requests are added at any time, and `step` advances all of them together; everything
below knows token ids only."""
import dataclasses, functools, itertools, pathlib, random, threading, time
from collections.abc import Callable, Iterator
from typing import Any, cast

from tinygrad import Device, dtypes, helpers, nn

from .config import EngineConfig, ModelConfig, check, logger
from .kernels import largest_tensor
from .llama import Llama, load_weights, read_model, rope_table
from .runner import Runner, allocate_caches, open_device, pick_dtype
from .scheduler import (BlockManager, CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams,
                        Scheduler, Sequence)
from .tokenizer import Tokenizer, load_tokenizer

Prompt = str | dict[str, Any]
Params = SamplingParams | None


class Request(Sequence):
  """A sequence and its text, of which `text[:shown]` may be seen: the rest could still become a stop string. Text once
  there never changes, half a character is held back, and all of it is the decoding at once."""
  def __init__(self, prompt: str | None, tokenizer: Tokenizer, *args: Any):
    super().__init__(*args)
    self.prompt, self.tokenizer, self.text, self.shown = prompt, tokenizer, "", 0
    self.decoded = self.num_prompt   # tokens whose text is there: it is made when it is read, or to find a stop string

  def append(self, token: int) -> None:
    super().append(token)
    if self.params.stop or self.finish_reason: self.decode()

  def decode(self) -> None:
    """Add the text of new tokens; finish at the first stop string."""
    params, stops, searched = self.params, self.params.stop or [], len(self.text)
    ended = self.finish_reason == "stop" and self.tokens[-1] in self.stop_ids
    ids = self.tokens[:-1] if ended and not params.include_stop_str_in_output else self.tokens
    for start in (max(0, self.decoded - 8), 0):   # a text depends on that before, on all if those have none or a half
      before = self.tokenizer.decode(ids[start:self.decoded], params.skip_special_tokens)
      if before and "\ufffd" not in before: break
    text = self.tokenizer.decode(ids[start:], params.skip_special_tokens)
    if self.finish_reason or not text.endswith("\ufffd"):   # else a character whose bytes have not all come
      self.text, self.decoded = self.text + text[len(before):], len(ids)
    found = [(at, s) for s in stops if (at := self.text.find(s, max(0, searched - len(s) + 1))) >= 0]
    if found and self.num_generated > params.min_tokens:
      at, stop = min(found)
      self.text = self.text[:at + len(stop) * params.include_stop_str_in_output]
      self.finish_reason, self.stop_reason = "stop", stop
    held = [n for s in stops for n in range(1, min(len(s), len(self.text) + 1)) if self.text.endswith(s[:n])]
    self.shown = len(self.text) - (0 if self.finish_reason else max(held, default=0))


def output_of(runs: list[Request], seen: list[tuple[int, int]] | None = None) -> RequestOutput:
  """The samples of a prompt, but for the characters and tokens that have been seen of each."""
  outputs, n = list[CompletionOutput](), runs[0].num_prompt
  for run, (text, tokens) in zip(runs, seen or [(0, 0)] * len(runs), strict=True):
    run.decode()
    chosen = None if run.params.logprobs is None else [run.logprobs[i] for i in range(n, len(run.tokens))]
    total = None if chosen is None else sum(p[i].logprob for p, i in zip(chosen, run.tokens[n:], strict=True))
    outputs.append(CompletionOutput(
      index=len(outputs), text=run.text[text:run.shown], token_ids=run.tokens[n + tokens:], stop_reason=run.stop_reason,
      finish_reason=run.finish_reason, cumulative_logprob=total, logprobs=chosen and chosen[tokens:]))
  of_prompt = None if runs[0].prompt_logprobs is None else [runs[0].logprobs.get(i) for i in range(n)]
  return RequestOutput(request_id=run.request_id, prompt=run.prompt, prompt_token_ids=run.tokens[:n], outputs=outputs,
                       metrics=run.metrics, num_cached_tokens=runs[0].num_cached, prompt_logprobs=of_prompt)


class LLMEngine:
  """Requests in, outputs out, one `step` at a time. Several threads may call it: a step serves the requests of all.

  model: a folder with config.json, *.safetensors and a tokenizer; None: the model shipped with tinyvllm. options:
  EngineConfig's. Raises ValueError for files or options that will not do, RuntimeError for no device or compiler."""
  def __init__(self, model: str | pathlib.Path | None = None, **options: Any):
    config = EngineConfig(**options)
    path = pathlib.Path(model or pathlib.Path(__file__).parent / "default_model").expanduser()
    started, free = time.perf_counter(), open_device()
    check((path / "config.json").exists(), f"model={str(path)!r} has no config.json (.gguf: examples/convert_gguf.py)")
    hf, reader = read_model(path)
    self.tokenizer, self.model_config = load_tokenizer(path), (shape := ModelConfig.from_hf(hf, path))
    self.max_model_len, limit = config.max_model_len or shape.max_position_embeddings, shape.max_position_embeddings
    check(self.max_model_len <= limit, f"max_model_len={self.max_model_len} must be at most the model's {limit}")
    rows = 1 << (largest_tensor() // (4 * shape.vocab_size)).bit_length() - 1   # of logits, in one tensor
    config = dataclasses.replace(config, max_num_batched_tokens=min(config.max_num_batched_tokens, rows))
    check(config.max_num_seqs <= config.max_num_batched_tokens, f"max_num_seqs={config.max_num_seqs} is above "
          f"max_num_batched_tokens={config.max_num_batched_tokens}: each running sequence decodes one token a step")
    llama = Llama(shape, dtype := getattr(dtypes, kind := pick_dtype(config.dtype)))
    load_weights(llama, shape, reader, path, dtype)
    left = max(0, free * config.gpu_memory_utilization - sum(x.nbytes() for x in nn.state.get_parameters(llama)))
    logger.info("loaded %s in %s on %s in %.1f s; a step takes %d tokens", path.name, kind, Device.DEFAULT,
                time.perf_counter() - started, config.max_num_batched_tokens)
    caches = allocate_caches(shape, config, self.max_model_len, dtype, int(left))
    self.runner = Runner(llama, config, shape.vocab_size, rope_table(shape, self.max_model_len).realize(), caches)
    self.blocks = BlockManager(self.runner.num_blocks, config)
    self.config, self.scheduler, self.requests = config, Scheduler(config, self.blocks), dict[str, list[Request]]()
    self.max_model_len = min(self.max_model_len, self.blocks.num_tokens)   # where an override holds less
    self._arrivals, self._random, self.lock = itertools.count(), random.Random(config.seed), threading.Condition()
    # _running: reads the step that the device works on
    self.batch, self._stepping, self._running = dict[Sequence, int](), False, cast(Any, None)

  def add_request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> None:
    """Queue a request: a str, {"prompt": str}, {"prompt_token_ids": [int]} or {"messages": [{"role", "content"}]}.
    Lower priorities go first. Raises ValueError for a request that can never run."""
    self.add(self.request(request_id, prompt, params, priority))

  def request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> list[Request]:
    """The samples of a request, for `add`. Raises as add_request."""
    params, given = params or SamplingParams(), prompt if isinstance(prompt, dict) else {"prompt": prompt}
    check(isinstance(params, SamplingParams), f"sampling_params={params!r} must be SamplingParams")
    text, ids, messages = (given.get(form) for form in ("prompt", "prompt_token_ids", "messages"))
    ok = text and isinstance(text, str) or ids and isinstance(ids, list) or messages and isinstance(messages, list)
    check(ok and len(given) == 1, f"prompt={prompt!r} must be a str, {{'prompt': str}}, {{'prompt_token_ids': list of "
          "int} or {'messages': list of dict}, and not empty")
    if messages: text = self.tokenizer.apply_chat_template(cast(list, messages))   # it brings its own BOS
    ids = list(ids or self.tokenizer.encode(str(text), not messages))
    vocab_size, eos = self.model_config.vocab_size, self.model_config.eos_token_ids
    for name in ("prompt_token_ids", "stop_token_ids", "allowed_token_ids", "logit_bias"):
      for i in {"prompt_token_ids": ids, **vars(params)}[name] or ():
        check(type(i) is int and 0 <= i < vocab_size, f"{name}: id {i!r} must be an int from 0 to {vocab_size - 1}")
    check(len(ids) < self.max_model_len, f"This model's maximum context length is {self.max_model_len} tokens. "
          f"However, the prompt has {len(ids)}: shorten it or raise max_model_len or num_gpu_blocks_override")
    ordered = type(priority) is int and (not priority or self.config.scheduling_policy == "priority")
    check(ordered, f"priority={priority!r} must be an int, and 0 unless scheduling_policy='priority'")
    stop_ids = frozenset([*(() if params.ignore_eos else eos), *(params.stop_token_ids or ())])
    matcher = (form := params.structured_outputs) and self.tokenizer.matcher(form, vocab_size, eos)
    seed = self._random.getrandbits(63) if params.seed is None else params.seed
    bad = [self.tokenizer.encode(space + w.lstrip(), False) for w in params.bad_words or () for space in ("", " ")]
    first, shared = (priority, next(self._arrivals)), (params, stop_ids, self.max_model_len, RequestMetrics(), bad)
    runs = [Request(text, self.tokenizer, request_id, ids.copy(), (*first, i), seed + i, *shared,
                    matcher and matcher.deep_copy()) for i in range(params.n)]
    runs[0].forks += runs[1:]
    return runs

  def add(self, runs: list[Request]) -> None:
    with self.lock:
      check(self.requests.setdefault(name := runs[0].request_id, runs) is runs, f"request_id={name!r} is in use")
      self.scheduler.add(runs[0])

  def abort_request(self, request_id: str) -> None:
    """End a request with finish_reason "abort". One that has finished, or never was, is let be."""
    with self.lock:
      for run in self.requests.pop(request_id, []):
        if not run.finish_reason: self.scheduler.finish(run, "abort")

  def has_unfinished_requests(self) -> bool: return bool(self.requests)

  def step(self, outputs: bool = True, ready: Callable[[], bool] = lambda: False) -> list[RequestOutput]:
    """Advance the running requests together, and return those that have something new, unless no `outputs` are wanted.
    One thread steps at a time, and no lock is held while the device works; a thread that waits for its turn goes
    without one once it is `ready`. On a GPU a step packs its batch while the one before runs, whose tokens it returns.
    """
    with self.lock:
      self.lock.wait_for(lambda: ready() or not self._stepping)
      if ready(): return []
      started, self.batch = time.perf_counter(), self.scheduler.schedule()
      batch, self._stepping, step = self.batch, True, self.runner.prepare(self.batch) if self.batch else None
      self.scheduler.advance(batch)
    try:
      done, self._running = self._running, None
      if not self.runner.overlaps and step: done = self.runner.launch(step)
      sampled, logprobs = done() if done else ({}, [])
      if self.runner.overlaps and step: self._running = self.runner.launch(step)
      with self.lock: return [output_of(x) for x in self._record(len(batch), sampled, logprobs, started) if outputs]
    except BaseException:
      with self.lock:   # what the step was to compute is computed again
        for seq in [s for s in batch if s.row is not None]: self.scheduler.preempt(seq)
      raise
    finally:
      with self.lock:
        self._stepping = False
        self.lock.notify_all()

  def _record(self, n: int, sampled: dict[Sequence, int], logprobs: list, started: float) -> list[list[Request]]:
    sampled = {seq: token for seq, token in sampled.items() if not seq.finish_reason}   # ended while the device worked
    self.scheduler.update(sampled)
    for ((seq, at), k), (own, rank, *best) in logprobs:
      if at >= len(seq.tokens): continue   # ended, too
      found = [(seq.tokens[at], own, rank), *zip(best[:2 * k:2], best[1:2 * k:2], range(1, k + 1), strict=True)]
      seq.logprobs[at] = {int(i): Logprob(x, int(r), self.tokenizer.decode([int(i)], False)) for i, x, r in found}
    ended = {name for name, runs in self.requests.items() if all(run.finish_reason for run in runs)}
    changed = [runs for name, runs in self.requests.items() if name in ended or not sampled.keys().isdisjoint(runs)]
    for name in ended: del self.requests[name]
    self.scheduler.totals.update(steps=1, generation_tokens=len(sampled), requests_finished=len(ended),
                                 scheduled=n, seconds=time.perf_counter() - started)   # type: ignore
    return changed

  def _advance(self, runs: list[Request], tokens: int = 2**31) -> None:
    """Step, or wait while another thread does, until the request has more than `tokens` or has ended."""
    def ready() -> bool: return runs[0].request_id not in self.requests or runs[0].metrics.num_generated > tokens
    while not ready(): self.step(False, ready)

  def get_metrics(self) -> dict[str, float]:
    """Totals since the start, rates over the seconds spent in steps, and the state of the pool and the queue."""
    queue, pool, totals = self.scheduler, self.blocks, self.scheduler.totals
    found, seconds = (pool.cached.get(pool.keys[b]) == b for b in [*pool.free_blocks]), max(totals["seconds"], 1e-6)
    blocks = {"blocks_used": pool.num_used(), "blocks_free": pool.num_free(), "blocks_cached": sum(found)}
    return {**totals, **blocks, "blocks_shared": sum(n > 1 for n in pool.ref_counts),
            "num_requests_running": len(queue.running), "num_requests_waiting": len(queue.waiting),
            "mean_batch_size": totals["scheduled"] / max(1, totals["steps"]), "tokens_per_second":
            totals["generation_tokens"] / seconds, "requests_per_second": totals["requests_finished"] / seconds}


class LLM(LLMEngine):
  """The engine, with calls that run requests to their end. Takes what LLMEngine takes."""
  def generate(self, prompts: Prompt | list[Prompt], sampling_params: Params | list[Params] = None,
               use_tqdm: bool = True) -> list[RequestOutput]:
    """Complete one prompt or a list, under one SamplingParams or one for each; outputs in the prompts' order. Raises
    ValueError, and runs none, if any is bad."""
    prompts = prompts if isinstance(prompts, list) else [prompts]
    params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
    check(len(params) == len(prompts), f"sampling_params: {len(params)} for {len(prompts)} prompts: give one or all")
    requests = [self.request(f"generate-{next(self._arrivals)}", *pair) for pair in zip(prompts, params, strict=True)]
    try:
      for runs in requests: self.add(runs)
      for runs in helpers.tqdm(requests, "generating", not use_tqdm or None, unit=" requests"): self._advance(runs)
    finally:
      for runs in requests: self.abort_request(runs[0].request_id)
    return [output_of(runs) for runs in requests]

  def generate_stream(self, prompt: Prompt, sampling_params: Params = None) -> Iterator[RequestOutput]:
    """Complete one prompt, yielding the new text and ids as they come. Raises ValueError at once for a bad request.
    Closing the iterator aborts it."""
    return self._stream(self.request(f"stream-{next(self._arrivals)}", prompt, sampling_params))

  def _stream(self, runs: list[Request]) -> Iterator[RequestOutput]:
    self.add(runs)
    seen, output = [(0, 0)] * len(runs), None
    try:
      while not output or not output.finished:
        self._advance(runs, sum(tokens for _, tokens in seen))
        with self.lock: output, seen = output_of(runs, seen), [(r.shown, r.num_generated) for r in runs]
        yield output
    finally: self.abort_request(runs[0].request_id)

  def chat(self, messages: list[dict[str, str]], sampling_params: Params = None) -> list[RequestOutput]:
    """Answer a conversation, a list of {"role": ..., "content": ...}, through the model's chat template."""
    return self.generate({"messages": messages}, sampling_params, use_tqdm=False)


_shared = functools.cache(LLM)   # one engine for each model


def generate(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> str:
  """The text that follows a prompt. sampling: SamplingParams' fields, but greedy unless a temperature is given."""
  return "".join(generate_stream(prompt, model, **sampling))


def generate_stream(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> Iterator[str]:
  """As `generate`, a piece at a time, as tokens arrive."""
  outputs = _shared(model).generate_stream(prompt, SamplingParams(**{"temperature": 0.0, **sampling}))
  return (output.outputs[0].text for output in outputs if output.outputs[0].text)
