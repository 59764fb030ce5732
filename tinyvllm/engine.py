"""The engine: text in, text out. Requests are added at any time, and `step` advances all of them together; everything
below knows token ids only."""
import functools, itertools, pathlib, random, threading, time
from collections.abc import Callable, Iterator
from typing import Any

from tinygrad import Device, Tensor, dtypes, helpers, nn

from .config import EngineConfig, ModelConfig, check, logger
from .llama import Llama, load_weights, read_model, rope_table
from .runner import Runner, allocate_caches, open_device
from .scheduler import (MAX_BANNED, BlockManager, CompletionOutput, RequestMetrics, RequestOutput, SamplingParams,
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
    ids = self.tokens[:-1] if self.finish_reason == "stop" and not params.include_stop_str_in_output else self.tokens
    for start in (max(0, self.decoded - 8), 0):   # a token's text depends on those before, on all if the last have none
      if before := self.tokenizer.decode(ids[start:self.decoded], params.skip_special_tokens): break
    text = self.tokenizer.decode(ids[start:], params.skip_special_tokens)
    if self.finish_reason or not text.endswith("\ufffd"):   # else a character whose bytes have not all come
      self.text, self.decoded = self.text + text[len(before):], len(ids)
    found = [(at, s) for s in stops if (at := self.text.find(s, max(0, searched - len(s) + 1))) >= 0]
    if found and self.num_generated > params.min_tokens:
      at, stop = min(found)
      self.text = self.text[:at + len(stop) * params.include_stop_str_in_output]
      self.finish_reason, self.stop_reason = "stop", stop
    held = [n for s in stops for n in range(1, len(s)) if self.text.endswith(s[:n])]
    self.shown = len(self.text) - (0 if self.finish_reason else max(held, default=0))


def _output(runs: list[Request], seen: list[tuple[int, int]] | None = None) -> RequestOutput:
  """The samples of a prompt, but for the characters and tokens that have been seen of each."""
  outputs: list[CompletionOutput] = []
  for run, (text, tokens) in zip(runs, seen or [(0, 0)] * len(runs), strict=True):
    run.decode()
    ids, new = run.tokens[run.num_prompt + tokens:], run.text[text:run.shown]
    outputs.append(CompletionOutput(len(outputs), new, ids, run.finish_reason, run.stop_reason))
  run = runs[0]
  return RequestOutput(run.request_id, run.prompt, run.tokens[:run.num_prompt], outputs, run.metrics, run.num_cached)


class LLMEngine:
  """Requests in, outputs out, one `step` at a time. Several threads may call it: a step serves the requests of all.

  model: a folder with config.json, *.safetensors and a tokenizer; None: the model shipped with tinyvllm. options:
  EngineConfig's. Raises ValueError for files or options that will not do, RuntimeError for no device or compiler."""
  def __init__(self, model: str | pathlib.Path | None = None, **options: Any):
    self.config = config = EngineConfig(**options)
    check(config.max_num_seqs <= config.max_num_batched_tokens, f"max_num_seqs={config.max_num_seqs} is above "
          f"max_num_batched_tokens={config.max_num_batched_tokens}: each running sequence decodes one token a step")
    started = time.perf_counter()
    path = pathlib.Path(model or pathlib.Path(__file__).parent / "default_model").expanduser()
    free = open_device()
    check((path / "config.json").exists(), f"model={str(path)!r} must be a folder with config.json; "
          "examples/convert_gguf.py makes one of a .gguf file")
    hf, reader = read_model(path)
    self.tokenizer = load_tokenizer(path)
    self.model_config = shape = ModelConfig.from_hf(hf, path)
    self.max_model_len, limit = config.max_model_len or shape.max_position_embeddings, shape.max_position_embeddings
    check(self.max_model_len <= limit, f"max_model_len={self.max_model_len} must be at most the model's {limit}")
    kind = self.config.dtype if self.config.dtype != "auto" else "float32" if Device.DEFAULT == "CPU" else "float16"
    llama = Llama(self.model_config, dtype := getattr(dtypes, kind))
    load_weights(llama, self.model_config, reader, path, dtype)
    left = max(0, free * config.gpu_memory_utilization - sum(x.nbytes() for x in nn.state.get_parameters(llama)))
    logger.info("loaded %s in %s on %s in %.1f s", path.name, kind, Device.DEFAULT, time.perf_counter() - started)
    caches = allocate_caches(self.model_config, config, self.max_model_len, dtype, int(left))
    self.runner = Runner(llama, config, rope_table(self.model_config, self.max_model_len).realize(), caches)
    host_blocks = int(config.swap_space * 2**30 * self.runner.num_blocks) // sum(x.nbytes() for c in caches for x in c)
    self.blocks = BlockManager(self.runner.num_blocks, config)
    self.scheduler = Scheduler(config, self.blocks, self.runner, host_blocks)
    self.requests: dict[str, list[Request]] = {}
    self._arrivals, self._random, self._lock = itertools.count(), random.Random(config.seed), threading.Condition()
    self._stepping, self.seconds, self.scheduled = False, 1e-6, 0   # spent in steps; sequences that they advanced
    self._running: tuple[list[Sequence], Tensor] | None = None   # the step that the device works on

  def add_request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> None:
    """Queue a request: a str, {"prompt": str} or {"prompt_token_ids": [int]}. Lower priorities go first. Raises
    ValueError for a request that can never run."""
    self._add(self._request(request_id, prompt, params, priority))

  def _request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> list[Request]:
    params, given = params or SamplingParams(), prompt if isinstance(prompt, dict) else {"prompt": prompt}
    check(isinstance(params, SamplingParams), f"sampling_params={params!r} must be SamplingParams")
    text, ids = given.get("prompt"), given.get("prompt_token_ids")
    check(len(given) == 1 and (text and isinstance(text, str) or ids and isinstance(ids, list)), f"prompt={prompt!r} "
          "must be a str, {'prompt': str} or {'prompt_token_ids': list of int}, and not empty")
    ids, pool = list(ids or self.tokenizer.encode(str(text))), self.blocks.num_tokens
    for i in (*ids, *(params.stop_token_ids or ())):
      check(type(i) is int and 0 <= i < self.model_config.vocab_size, f"token id {i!r} in prompt_token_ids or "
            f"stop_token_ids must be an int from 0 to {self.model_config.vocab_size - 1}")
    check(len(ids) < self.max_model_len, f"This model's maximum context length is {self.max_model_len} tokens. "
          f"However, the prompt has {len(ids)} and one more must fit: shorten it or raise max_model_len")
    check(len(ids) < pool, f"The KV cache holds {pool} tokens. However, the prompt has {len(ids)} and one more must "
          "fit: shorten it or raise gpu_memory_utilization or num_gpu_blocks_override")
    check(type(priority) is int and (not priority or self.config.scheduling_policy == "priority"),
          f"priority={priority!r} must be an int, and 0 unless scheduling_policy='priority'")
    stop_ids = {*(() if params.ignore_eos else self.model_config.eos_token_ids), *(params.stop_token_ids or ())}
    check(not params.min_tokens or len(stop_ids) <= MAX_BANNED, f"stop_token_ids: {len(stop_ids)} with the "
          f"model's end tokens; with min_tokens at most {MAX_BANNED}")
    seed = self._random.getrandbits(63) if params.seed is None else params.seed
    arrival, shared = next(self._arrivals), (params, frozenset(stop_ids), self.max_model_len, RequestMetrics())
    runs = [Request(text, self.tokenizer, request_id, ids.copy(), (priority, arrival, i), seed + i, *shared)
            for i in range(params.n)]
    runs[0].forks += runs[1:]
    return runs

  def _add(self, runs: list[Request]) -> None:
    with self._lock:
      check((name := runs[0].request_id) not in self.requests, f"request_id={name!r} is in use: take another")
      self.requests[name] = runs
      self.scheduler.add(runs[0])

  def abort_request(self, request_id: str) -> None:
    """End a request with finish_reason "abort". One that has finished, or never was, is let be."""
    with self._lock:
      for run in self.requests.pop(request_id, []):
        if not run.finish_reason: self.scheduler.finish(run, "abort")

  def has_unfinished_requests(self) -> bool: return bool(self.requests)

  def step(self, outputs: bool = True, ready: Callable[[], bool] = lambda: False) -> list[RequestOutput]:
    """Advance the running requests together, and return those that have something new, unless no `outputs` are wanted.
    One thread steps at a time, and no lock is held while the device works; a thread that waits for its turn goes
    without one once it is `ready`. On a GPU a step packs its batch while the one before runs, whose tokens it returns.
    """
    with self._lock:
      self._lock.wait_for(lambda: ready() or not self._stepping)
      if ready(): return []
      started, batch = time.perf_counter(), self.scheduler.schedule()
      step, self._stepping = self.runner.prepare(batch) if batch else None, True
      self.scheduler.advance(batch)
    try:
      done, self._running = self._running, None
      if not self.runner.overlaps and step: done = self.runner.launch(step)
      sampled = dict(zip(done[0], done[1].tolist(), strict=False)) if done else {}   # type: ignore[arg-type]
      if self.runner.overlaps and step: self._running = self.runner.launch(step)
      with self._lock: return [_output(runs) for runs in self._record(len(batch), sampled, started) if outputs]
    except BaseException:
      with self._lock:   # what the step was to compute is computed again
        for seq in [s for s in batch if s.row is not None]: self.scheduler.preempt(seq, lost=True)
      raise
    finally:
      with self._lock:
        self._stepping = False
        self._lock.notify_all()

  def _record(self, scheduled: int, sampled: dict[Sequence, int], started: float) -> list[list[Request]]:
    sampled = {seq: token for seq, token in sampled.items() if not seq.finish_reason}   # ended while the device worked
    self.scheduler.update(sampled)
    changed = [runs for runs in self.requests.values()
               if any(r in sampled for r in runs) or all(r.finish_reason for r in runs)]
    ended = [self.requests.pop(runs[0].request_id) for runs in changed if all(r.finish_reason for r in runs)]
    self.scheduler.totals.update(steps=1, generation_tokens=len(sampled), requests_finished=len(ended))
    self.seconds, self.scheduled = self.seconds + time.perf_counter() - started, self.scheduled + scheduled
    return changed

  def _advance(self, runs: list[Request], tokens: int = 2**31) -> None:
    """Step, or wait while another thread does, until the request has more than `tokens` or has ended."""
    def ready() -> bool:
      return runs[0].request_id not in self.requests or sum(r.num_generated for r in runs) > tokens
    while not ready(): self.step(False, ready)

  def get_metrics(self) -> dict[str, float]:
    """Totals since the start, rates over the seconds spent in steps, and the state of the pool and the queue."""
    queue, pool, totals = self.scheduler, self.blocks, self.scheduler.totals
    found, shared = (pool.cached.get(pool.keys[b]) == b for b in [*pool.free_blocks]), (n > 1 for n in pool.ref_counts)
    return {**totals, "tokens_per_second": totals["generation_tokens"] / self.seconds, "blocks_cached": sum(found),
            "requests_per_second": totals["requests_finished"] / self.seconds, "blocks_shared": sum(shared),
            "mean_batch_size": self.scheduled / max(1, totals["steps"]), "blocks_swapped": queue.num_swapped(),
            "num_requests_running": len(queue.running), "num_requests_waiting": len(queue.waiting),
            "blocks_used": pool.num_used(), "blocks_free": pool.num_free()}


class LLM(LLMEngine):
  """The engine, with calls that run requests to their end. Takes what LLMEngine takes."""
  def generate(self, prompts: Prompt | list[Prompt], sampling_params: Params | list[Params] = None,
               use_tqdm: bool = True) -> list[RequestOutput]:
    """Complete one prompt or a list, under one SamplingParams or one for each; outputs in the prompts' order. Raises
    ValueError, and runs none, if any is bad."""
    prompts = prompts if isinstance(prompts, list) else [prompts]
    params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
    check(len(params) == len(prompts), f"sampling_params: {len(params)} for {len(prompts)} prompts: give one or all")
    requests = [self._request(f"generate-{next(self._arrivals)}", *pair) for pair in zip(prompts, params, strict=True)]
    try:
      for runs in requests: self._add(runs)
      for runs in helpers.tqdm(requests, desc="generating", unit=" requests", disable=None if use_tqdm else True):
        self._advance(runs)
    finally:
      for runs in requests: self.abort_request(runs[0].request_id)
    return [_output(runs) for runs in requests]

  def generate_stream(self, prompt: Prompt, sampling_params: Params = None) -> Iterator[RequestOutput]:
    """Complete one prompt, yielding the new text and ids as they come. Raises ValueError at once for a bad request.
    Closing the iterator aborts it."""
    return self._stream(self._request(f"stream-{next(self._arrivals)}", prompt, sampling_params))

  def _stream(self, runs: list[Request]) -> Iterator[RequestOutput]:
    self._add(runs)
    seen, finished = [(0, 0)] * len(runs), False
    try:
      while not finished:
        self._advance(runs, sum(tokens for _, tokens in seen))
        with self._lock: output, seen = _output(runs, seen), [(r.shown, r.num_generated) for r in runs]
        finished = output.finished
        yield output
    finally: self.abort_request(runs[0].request_id)

  def chat(self, messages: list[dict[str, str]], sampling_params: Params = None) -> list[RequestOutput]:
    """Answer a conversation, a list of {"role": ..., "content": ...}, through the model's chat template."""
    return self.generate(self.chat_prompt(messages), sampling_params, use_tqdm=False)

  def chat_prompt(self, messages: list[dict[str, str]]) -> Prompt:
    """A conversation as a prompt, to stream or to queue."""
    text = self.tokenizer.apply_chat_template(messages)   # it brings its own BOS
    return {"prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}


@functools.cache
def _shared(model: str | pathlib.Path | None) -> LLM: return LLM(model)


def generate(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> str:
  """The text that follows a prompt. sampling: SamplingParams' fields, but greedy unless a temperature is given."""
  return "".join(generate_stream(prompt, model, **sampling))


def generate_stream(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> Iterator[str]:
  """As `generate`, a piece at a time, as tokens arrive."""
  outputs = _shared(model).generate_stream(prompt, SamplingParams(**{"temperature": 0.0, **sampling}))
  return (output.outputs[0].text for output in outputs if output.outputs[0].text)
