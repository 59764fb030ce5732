"""The engine: text in, text out. Requests are added at any time, and a step advances all of them together; everything
below knows token ids only. One thread drives an engine."""
import contextlib, dataclasses, functools, itertools, pathlib, random, threading, time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from tinygrad import Device, dtypes, helpers, nn

from .batch import Step, pack
from .config import EngineConfig, ModelConfig, check, logger
from .device import exclusive, largest_tensor, open_device, pick_dtype
from .llama import Llama
from .request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams, Sequence
from .runner import Results, Runner, allocate_caches
from .scheduler import BlockManager, Scheduler
from .tokenizer import TextStream, Tokenizer, load_tokenizer
from .weights import load_weights

Prompt = str | dict[str, Any]
Params = SamplingParams | None


class Request:
  """The samples of a prompt, with their texts and what is known of their tokens."""
  def __init__(self, prompt: str | None, sequences: list[Sequence], tokenizer: Tokenizer):
    first = sequences[0]
    self.request_id = first.request_id
    self.prompt = prompt
    self.params = first.params
    self.metrics = first.metrics
    self.sequences = sequences
    self.texts = [TextStream(tokenizer, seq.params, seq.num_prompt) for seq in sequences]
    self.logprobs: list[dict[int, dict[int, Logprob]]] = [{} for _ in sequences]   # by place
    self.seen = [(0, 0) for _ in sequences]   # characters and tokens that `news` has given

  finished = property(lambda self: all(seq.finish_reason for seq in self.sequences))

  def read(self) -> list[tuple[Sequence, str]]:
    """Make text of new tokens. Returns the sequences that this ends, and their stop strings."""
    ended = list[tuple[Sequence, str]]()
    for seq, text in zip(self.sequences, self.texts, strict=True):
      hidden = seq.finish_reason == "stop" and seq.tokens[-1] in seq.stop_ids
      ids = seq.tokens[:-1] if hidden and not self.params.include_stop_str_in_output else seq.tokens
      stop = text.feed(ids, seq.finish_reason is not None)
      if stop is not None: ended.append((seq, stop))
    return ended

  def output(self) -> RequestOutput:
    """All there is so far."""
    return self._output([(0, 0) for _ in self.sequences])

  def news(self) -> RequestOutput:
    """What has come since the last call."""
    output = self._output(self.seen)
    self.seen = [(text.shown, seq.num_generated) for seq, text in zip(self.sequences, self.texts, strict=True)]
    return output

  def _output(self, seen: list[tuple[int, int]]) -> RequestOutput:
    self.read()
    first = self.sequences[0]
    places = range(first.num_prompt)
    return RequestOutput(
      request_id=self.request_id, prompt=self.prompt, prompt_token_ids=first.tokens[:first.num_prompt],
      prompt_logprobs=[self.logprobs[0].get(i) for i in places] if first.scores_prompt else None,
      outputs=[self._completion(i, *of) for i, of in enumerate(seen)], metrics=self.metrics,
      num_cached_tokens=first.num_cached)

  def _completion(self, index: int, characters: int, tokens: int) -> CompletionOutput:
    seq, text = self.sequences[index], self.texts[index]
    places = range(seq.num_prompt, len(seq.tokens))
    known = [self.logprobs[index][i] for i in places] if self.params.logprobs is not None else None
    total = None if known is None else sum(of[seq.tokens[i]].logprob for i, of in zip(places, known, strict=True))
    return CompletionOutput(
      index=index, text=text.text[characters:text.shown], token_ids=seq.tokens[seq.num_prompt + tokens:],
      cumulative_logprob=total, logprobs=None if known is None else known[tokens:], finish_reason=seq.finish_reason,
      stop_reason=seq.stop_reason)


class LLMEngine:
  """Requests in, outputs out, one `step` at a time. It is for one thread at a time: a second one gets a RuntimeError.

  model: a folder with config.json, *.safetensors and a tokenizer; None: the model shipped with tinyvllm. options:
  EngineConfig's. Raises ValueError for files or options that will not do, RuntimeError for no device or compiler."""
  def __init__(self, model: str | pathlib.Path | None = None, **options: Any):
    config = EngineConfig(**options)
    folder = pathlib.Path(model or pathlib.Path(__file__).parent / "default_model").expanduser()
    with exclusive: self._load(folder, config)
    self.scheduler = Scheduler(self.config, self.blocks)
    self.requests: dict[str, Request] = {}
    self.totals = Counter(dict.fromkeys(("steps", "generation_tokens", "requests_finished", "seconds", "scheduled"), 0))
    self._arrivals = itertools.count()
    self._random = random.Random(config.seed)
    self._driver = threading.RLock()
    self._launched: tuple[Step, Any] | None = None   # the step that the device works on, and what reads it
    self._owed: list[Request] = []                   # what ended in a step that failed, and nobody was told

  def _load(self, folder: pathlib.Path, config: EngineConfig) -> None:
    started = time.perf_counter()
    free = open_device()
    shape = ModelConfig.load(folder)
    limit = shape.max_position_embeddings
    max_model_len = config.max_model_len or limit
    check(max_model_len <= limit, f"max_model_len={max_model_len} must be at most the model's {limit}")
    rows = 1 << (largest_tensor() // (4 * shape.vocab_size)).bit_length() - 1   # of logits, in one tensor
    config = dataclasses.replace(config, max_num_batched_tokens=min(config.max_num_batched_tokens, rows))
    check(config.max_num_seqs <= config.max_num_batched_tokens, f"max_num_seqs={config.max_num_seqs} is above "
          f"max_num_batched_tokens={config.max_num_batched_tokens}: each running sequence decodes one token a step")
    self.tokenizer = load_tokenizer(folder)
    kind = pick_dtype(config.dtype)
    dtype = getattr(dtypes, kind)
    llama = Llama(shape, dtype)
    load_weights(llama, folder, dtype)
    left = free * config.gpu_memory_utilization - sum(x.nbytes() for x in nn.state.get_parameters(llama))
    logger.info("loaded %s in %s on %s in %.1f s; a step takes %d tokens", folder.name, kind, Device.DEFAULT,
                time.perf_counter() - started, config.max_num_batched_tokens)
    caches = allocate_caches(shape, config, max_model_len, dtype, max(0, int(left)))
    self.config = config
    self.model_config = shape
    self.runner = Runner(llama, shape, config, max_model_len, caches)
    self.blocks = BlockManager(self.runner.num_blocks, config)
    self.max_model_len = min(max_model_len, self.blocks.num_tokens)   # where an override holds less

  @contextlib.contextmanager
  def _alone(self) -> Iterator[None]:
    if not self._driver.acquire(blocking=False):
      raise RuntimeError("another thread is using this LLM: for several at once there is tinyvllm_server.AsyncLLM")
    try: yield
    finally: self._driver.release()

  def request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> Request:
    """A request for `add`. Any thread may make one. Raises as add_request."""
    params = params or SamplingParams()
    check(isinstance(params, SamplingParams), f"sampling_params={params!r} must be SamplingParams")
    text, ids = self._encode(prompt)
    self._check_ids(ids, params)
    check(len(ids) < self.max_model_len, f"This model's maximum context length is {self.max_model_len} tokens. "
          f"However, the prompt has {len(ids)}: shorten it or raise max_model_len or num_gpu_blocks_override")
    ordered = type(priority) is int and (priority == 0 or self.config.scheduling_policy == "priority")
    check(ordered, f"priority={priority!r} must be an int, and 0 unless scheduling_policy='priority'")
    eos = self.model_config.eos_token_ids
    words = [self.tokenizer.encode(space + word.lstrip(), False) for word in params.bad_words or () for space in ("", " ")]
    arrival = next(self._arrivals)
    common: dict[str, Any] = {
      "request_id": request_id, "params": params, "metrics": RequestMetrics(),
      "stop_ids": frozenset([*(() if params.ignore_eos else eos), *(params.stop_token_ids or ())]),
      "max_len": min(self.max_model_len, len(ids) + params.max_tokens),
      "bad_words": [word for word in words if word]}
    seed = self._random.getrandbits(63) if params.seed is None else params.seed
    sequences = [Sequence(tokens=ids.copy(), seed=seed + i, order=(priority, arrival, i), index=i,
                          constraint=self._constraint(params), **common) for i in range(params.n)]
    sequences[0].forks += sequences[1:]
    return Request(text, sequences, self.tokenizer)

  def _constraint(self, params: SamplingParams) -> Any:
    asked: Any = params.structured_outputs
    if asked is None: return None
    return asked.constraint(self.tokenizer, self.model_config.vocab_size, self.model_config.eos_token_ids)

  def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
    """A prompt's text, if it has one, and its ids."""
    given = prompt if isinstance(prompt, dict) else {"prompt": prompt}
    kinds = {"prompt": str, "prompt_token_ids": list, "messages": list}
    known = [value and isinstance(value, kinds.get(form, ())) for form, value in given.items()]
    check(known and all(known) and len(known) == 1, f"prompt={prompt!r} must be a str, {{'prompt': str}}, "
          "{'prompt_token_ids': list of int} or {'messages': list of dict}, and not empty")
    if "prompt_token_ids" in given: return None, given["prompt_token_ids"]
    text = given.get("prompt") or self.tokenizer.apply_chat_template(given["messages"])
    return text, self.tokenizer.encode(text, "prompt" in given)   # a template brings its own BOS

  def _check_ids(self, ids: list[int], params: SamplingParams) -> None:
    size = self.model_config.vocab_size
    for name in ("prompt_token_ids", "stop_token_ids", "allowed_token_ids", "logit_bias"):
      for i in (ids if name == "prompt_token_ids" else getattr(params, name)) or ():
        check(type(i) is int and 0 <= i < size, f"{name}: id {i!r} must be an int from 0 to {size - 1}")

  def add_request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> None:
    """Queue a request: a str, {"prompt": str}, {"prompt_token_ids": [int]} or {"messages": [{"role", "content"}]}.
    Lower priorities go first. Raises ValueError for a request that can never run."""
    self.add(self.request(request_id, prompt, params, priority))

  def add(self, request: Request) -> None:
    with self._alone():
      check(request.request_id not in self.requests, f"request_id={request.request_id!r} is in use")
      self.requests[request.request_id] = request
      self.scheduler.add(request.sequences[0])

  def abort_request(self, request_id: str) -> None:
    """End a request with finish_reason "abort". One that has finished, or never was, is let be."""
    with self._alone():
      request = self.requests.pop(request_id, None)
      for seq in request.sequences if request else []:
        if not seq.finish_reason: self.scheduler.finish(seq, "abort")

  def has_unfinished_requests(self) -> bool: return bool(self.requests)

  def step(self) -> list[RequestOutput]:
    """Advance the running requests together, and return those that have something new. On a GPU a step is packed while
    the one before runs, whose tokens it returns."""
    with self._alone(): return [request.output() for request in self.advance()]

  def advance(self) -> list[Request]:
    """As `step`, for who makes no outputs of it."""
    started = time.perf_counter()
    with self._alone(), exclusive:   # another engine's capture would take in what this one reads
      try:
        changed = self._step()
      except BaseException:
        self._recover()
        raise
    self.totals["seconds"] += time.perf_counter() - started   # type: ignore[assignment]
    return changed

  def _step(self) -> list[Request]:
    batch = self.scheduler.schedule()
    step = pack(batch, self.config, self.model_config.vocab_size) if batch else None
    self.scheduler.advance(batch)
    if step and not self.runner.overlaps: self._launched = step, self.runner.launch(step)
    launched = self._launched
    results = launched[1]() if launched else None   # waits for the device
    self._launched = None
    if step and self.runner.overlaps: self._launched = step, self.runner.launch(step)
    self.totals.update(steps=1, scheduled=len(batch))
    return self._settle(self._record(launched[0], results) if launched and results else [])

  def _record(self, step: Step, results: Results) -> list[Request]:
    """Give a step's tokens to their sequences. Returns the requests that have new ones."""
    sampled = {seq: results.ids[row] for seq, row in step.samples.items() if not seq.finish_reason}
    if step.shape.logprobs: self._note_logprobs(step, results)   # first: a token that is there has its own
    self.scheduler.update(step.written, sampled)
    self.totals["generation_tokens"] += len(sampled)
    return [self.requests[name] for name in dict.fromkeys(seq.request_id for seq in sampled)]

  def _note_logprobs(self, step: Step, results: Results) -> None:
    for (seq, place), chosen, (own, rank, *best) in zip(step.targets, results.ids, results.logprobs, strict=False):
      k = seq.params.logprobs if place >= seq.num_prompt else seq.params.prompt_logprobs
      if k is None or seq.finish_reason: continue
      request = self.requests[seq.request_id]
      token = seq.tokens[place] if place < len(seq.tokens) else chosen
      found = [(token, own, rank), *zip(best[:2 * k:2], best[1:2 * k:2], range(1, k + 1), strict=False)]
      request.logprobs[seq.index][place] = {
        int(i): Logprob(x, int(r), self.tokenizer.decode([int(i)], False)) for i, x, r in found}

  def _settle(self, changed: list[Request]) -> list[Request]:
    """End what a stop string ends, and let go of requests that have ended."""
    changed = [request for request in self._owed if self.requests.get(request.request_id) is request] + changed
    self._stop(changed)
    for request in changed:
      if request.finished: del self.requests[request.request_id]
    self.totals["requests_finished"] += sum(request.finished for request in changed)
    self._owed = []
    return changed

  def _stop(self, requests: Iterable[Request]) -> None:
    """End sequences whose new text has a stop string."""
    for request in requests:
      if request.params.stop or request.finished:
        for seq, stop in request.read():
          self.scheduler.finish(seq, "stop")
          seq.stop_reason = stop

  def _recover(self) -> None:
    """After a failed step: what was launched is forgotten, nobody holds blocks, and what was not read is computed
    again."""
    self._launched = None
    requests = self.requests.values()
    forks = {seq for request in requests for seq in request.sequences[0].forks}
    unfinished = {seq for request in requests for seq in request.sequences if not seq.finish_reason}
    self.scheduler.reset(unfinished - forks)
    self._stop(requests)
    self._owed = [request for request in requests if request.finished]

  def get_metrics(self) -> dict[str, float]:
    """Totals since the start, rates over the seconds spent in steps, and the state of the pool and the queue."""
    totals = {**self.scheduler.totals, **self.totals}
    seconds = max(totals["seconds"], 1e-6)
    return {**totals, "blocks_used": self.blocks.num_used(), "blocks_free": self.blocks.num_free(),
            "blocks_cached": len(self.blocks.unused), "blocks_shared": self.blocks.num_shared,
            "num_requests_running": len(self.scheduler.running), "num_requests_waiting": len(self.scheduler.waiting),
            "mean_batch_size": totals["scheduled"] / max(1, totals["steps"]),
            "tokens_per_second": totals["generation_tokens"] / seconds,
            "requests_per_second": totals["requests_finished"] / seconds}


class LLM(LLMEngine):
  """The engine, with calls that run requests to their end. Takes what LLMEngine takes."""
  def generate(self, prompts: Prompt | list[Prompt], sampling_params: Params | list[Params] = None,
               use_tqdm: bool = True) -> list[RequestOutput]:
    """Complete one prompt or a list, under one SamplingParams or one for each; outputs in the prompts' order. Raises
    ValueError, and runs none, if any is bad."""
    prompts = prompts if isinstance(prompts, list) else [prompts]
    params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
    check(len(params) == len(prompts), f"sampling_params: {len(params)} for {len(prompts)} prompts: give one or all")
    with self._alone():
      requests = [self.request(f"generate-{next(self._arrivals)}", *pair) for pair in zip(prompts, params, strict=True)]
      try:
        for request in requests: self.add(request)
        for request in helpers.tqdm(requests, "generating", not use_tqdm or None, unit=" requests"):
          while not request.finished: self.advance()
      finally:
        for request in requests: self.abort_request(request.request_id)
    return [request.output() for request in requests]

  def generate_stream(self, prompt: Prompt, sampling_params: Params = None) -> Iterator[RequestOutput]:
    """Complete one prompt, yielding the new text and ids as they come. Raises ValueError at once for a bad request.
    Closing the iterator aborts it."""
    return self._stream(self.request(f"stream-{next(self._arrivals)}", prompt, sampling_params))

  def _stream(self, request: Request) -> Iterator[RequestOutput]:
    self.add(request)
    try:
      output = None
      while output is None or not output.finished:
        seen = sum(tokens for _, tokens in request.seen)
        while not request.finished and request.metrics.num_generated <= seen: self.advance()
        output = request.news()
        yield output
    finally: self.abort_request(request.request_id)

  def chat(self, messages: list[dict[str, str]], sampling_params: Params = None) -> list[RequestOutput]:
    """Answer a conversation, a list of {"role": ..., "content": ...}, through the model's chat template."""
    return self.generate({"messages": messages}, sampling_params, use_tqdm=False)


@functools.cache
def _shared(model: str | pathlib.Path | None) -> LLM: return LLM(model)   # one engine for each model


def generate(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> str:
  """The text that follows a prompt. sampling: SamplingParams' fields, but greedy unless a temperature is given."""
  return "".join(generate_stream(prompt, model, **sampling))


def generate_stream(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> Iterator[str]:
  """As `generate`, a piece at a time, as tokens arrive."""
  with exclusive: llm = _shared(model)   # two first callers get one engine
  outputs = llm.generate_stream(prompt, SamplingParams(**{"temperature": 0.0, **sampling}))
  return (output.outputs[0].text for output in outputs if output.outputs[0].text)
