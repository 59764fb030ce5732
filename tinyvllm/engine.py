"""The engine: text in, text out. Requests are added at any time, and a step advances all of them together; everything
below knows token ids only. One thread drives an engine."""
import contextlib, dataclasses, functools, itertools, pathlib, random, threading, time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tinygrad import Device, dtypes, helpers, nn

from .batch import Step, pack
from .config import EngineConfig, ModelConfig, check, logger
from .device import exclusive, largest_tensor, open_device, pick_dtype
from .llama import Llama
from .request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams, Sequence
from .runner import Runner, allocate_caches
from .scheduler import BlockManager, Scheduler
from .tokenizer import TextStream, load_tokenizer
from .weights import load_weights

Prompt = str | dict[str, Any]
Params = SamplingParams | None


@dataclass(eq=False)
class Request:
  """The samples of a prompt, with their texts."""
  request_id: str
  prompt: str | None
  texts: list[TextStream]

  sequences = property(lambda self: [text.seq for text in self.texts])
  params = property(lambda self: self.texts[0].params)
  metrics = property(lambda self: self.texts[0].seq.metrics)
  finished = property(lambda self: all(text.seq.finish_reason for text in self.texts))

  def output(self, news: bool = False) -> RequestOutput:
    """All there is so far, or what has come since the last call for news."""
    first = self.texts[0].seq
    scores = [first.logprobs.get(i) for i in range(first.num_prompt)] if first.scores_prompt else None
    return RequestOutput(self.request_id, self.prompt, first.tokens[:first.num_prompt], scores,
                         [self._completion(text, news) for text in self.texts], first.metrics, first.num_cached)

  def _completion(self, text: TextStream, news: bool) -> CompletionOutput:
    text.feed()
    seq, logprobs, total = text.seq, None, None
    characters, tokens = text.seen if news else (0, seq.num_prompt)
    if news: text.seen = text.shown, len(seq.tokens)
    if self.params.logprobs is not None:
      logprobs = [seq.logprobs[i] for i in range(tokens, len(seq.tokens))]
      total = sum(seq.logprobs[i][seq.tokens[i]].logprob for i in range(seq.num_prompt, len(seq.tokens)))
    return CompletionOutput(seq.index, text.text[characters:text.shown], seq.tokens[tokens:], total, logprobs,
                            seq.finish_reason, seq.stop_reason)


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
    self._launched: tuple[Step, Any] | None = None   # the step that the device works on, and what reads it
    self._owed: list[Request] = []                   # that ended in a step which failed, and nobody was told
    self._driver = threading.RLock()
    self._arrivals = itertools.count()
    self._random = random.Random(config.seed)

  def _load(self, folder: pathlib.Path, config: EngineConfig) -> None:
    started, free = time.perf_counter(), open_device()
    shape = self.model_config = ModelConfig.load(folder)
    self.tokenizer = load_tokenizer(folder)
    limit = shape.max_position_embeddings
    length = config.max_model_len or limit
    check(length <= limit, f"max_model_len={length} must be at most the model's {limit}")
    rows = 1 << (largest_tensor() // (4 * shape.vocab_size)).bit_length() - 1   # of logits, in one tensor
    config = dataclasses.replace(config, max_num_batched_tokens=min(config.max_num_batched_tokens, rows))
    check(config.max_num_seqs <= config.max_num_batched_tokens, f"max_num_seqs={config.max_num_seqs} is above "
          f"max_num_batched_tokens={config.max_num_batched_tokens}: each running sequence decodes one token a step")
    kind = pick_dtype(config.dtype)
    dtype = getattr(dtypes, kind)
    llama = Llama(shape, dtype)
    load_weights(llama, folder, dtype)
    left = free * config.gpu_memory_utilization - sum(x.nbytes() for x in nn.state.get_parameters(llama))
    logger.info("loaded %s in %s on %s in %.1f s; a step takes %d tokens", folder.name, kind, Device.DEFAULT,
                time.perf_counter() - started, config.max_num_batched_tokens)
    caches = allocate_caches(shape, config, length, dtype, max(0, int(left)))
    self.config, self.runner = config, Runner(llama, shape, config, length, caches)
    self.blocks = BlockManager(self.runner.num_blocks, config)
    self.max_model_len = min(length, self.blocks.num_tokens)   # where an override holds less

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
    size, eos = self.model_config.vocab_size, self.model_config.eos_token_ids
    for name in ("prompt_token_ids", "stop_token_ids", "allowed_token_ids", "logit_bias"):
      for i in getattr(params, name, ids) or ():
        check(type(i) is int and 0 <= i < size, f"{name}: id {i!r} must be an int from 0 to {size - 1}")
    check(len(ids) < self.max_model_len, f"This model's maximum context length is {self.max_model_len} tokens. "
          f"However, the prompt has {len(ids)}: shorten it or raise max_model_len or num_gpu_blocks_override")
    ordered = type(priority) is int and (priority == 0 or self.config.scheduling_policy == "priority")
    check(ordered, f"priority={priority!r} must be an int, and 0 unless scheduling_policy='priority'")
    bad_words = [self.tokenizer.encode(space + w.lstrip(), False) for w in params.bad_words or () for space in ("", " ")]
    stop_ids = frozenset([*(() if params.ignore_eos else eos), *(params.stop_token_ids or ())])
    seed, arrival = self._random.getrandbits(63) if params.seed is None else params.seed, next(self._arrivals)
    structured: Any = params.structured_outputs
    make = functools.partial(
      Sequence, request_id=request_id, params=params, stop_ids=stop_ids, metrics=RequestMetrics(),
      bad_words=[*filter(None, bad_words)], max_len=min(self.max_model_len, len(ids) + params.max_tokens))
    runs = [make(tokens=[*ids], seed=seed + i, order=(priority, arrival, i), index=i,
                 constraint=structured and structured.constraint(self.tokenizer, size, eos)) for i in range(params.n)]
    runs[0].forks += runs[1:]
    return Request(request_id, text, [TextStream(self.tokenizer, seq) for seq in runs])

  def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
    """A prompt's text, if it has one, and its ids."""
    (form, given), *more = prompt.items() if isinstance(prompt, dict) and prompt else [("prompt", prompt)]
    kind = {"prompt": str, "prompt_token_ids": list, "messages": list}.get(form, ())
    check(given and isinstance(given, kind) and not more, f"prompt={prompt!r} must be a str, {{'prompt': str}}, "
          "{'prompt_token_ids': list of int} or {'messages': list of dict}, and not empty")
    if form == "prompt_token_ids": return None, given
    text = given if form == "prompt" else self.tokenizer.apply_chat_template(given)
    return text, self.tokenizer.encode(text, form == "prompt")   # a template brings its own BOS

  def add_request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> None:
    """Queue a request: a str, {"prompt": str}, {"prompt_token_ids": [int]} or {"messages": [{"role", "content"}]}.
    Lower priorities go first. Raises ValueError for a request that can never run."""
    self.add(self.request(request_id, prompt, params, priority))

  def add(self, request: Request) -> None:
    with self._alone():
      known = self.requests.setdefault(request.request_id, request)
      check(known is request, f"request_id={request.request_id!r} is in use")
      self.scheduler.add(request.sequences[0])

  def abort_request(self, request_id: str) -> None:
    """End a request with finish_reason "abort". One that has finished, or never was, is let be."""
    with self._alone():
      if request_id not in self.requests: return
      for seq in self.requests.pop(request_id).sequences:
        if not seq.finish_reason: self.scheduler.finish(seq, "abort")

  def has_unfinished_requests(self) -> bool: return bool(self.requests)

  def step(self) -> list[RequestOutput]:
    """Advance the running requests together, and return those that have something new. On a GPU a step is packed while
    the one before runs, whose tokens it returns."""
    with self._alone(): return [request.output() for request in self.advance()]

  def advance(self) -> list[Request]:
    """As `step`, for who makes no outputs of it."""
    with self._alone(), exclusive:   # another engine's capture would take in what this one reads
      started = time.perf_counter()
      try: changed = self._step()
      except BaseException:
        self._recover()
        raise
      self.scheduler.totals.update(seconds=time.perf_counter() - started)   # type: ignore[call-arg]
      return changed

  def _step(self) -> list[Request]:
    batch = self.scheduler.schedule()
    step = pack(batch, self.config, self.runner.max_blocks, self.model_config.vocab_size) if batch else None
    self.scheduler.advance(batch)
    if step and not self.runner.overlaps: self._launched = step, self.runner.launch(step)
    launched = self._launched
    results = launched[1]() if launched else None   # waits for the device
    self._launched = (step, self.runner.launch(step)) if step and self.runner.overlaps else None
    self.scheduler.totals.update(steps=1, scheduled=len(batch))
    return self._settle(self._record(launched[0], *results) if launched and results else [])

  def _record(self, step: Step, ids: list[int], logprobs: list[list[float]]) -> list[Request]:
    """Give a step's tokens to their sequences. Returns the requests that have new ones."""
    sampled = {seq: token for token, (seq, place) in zip(ids, step.targets, strict=False)
               if place == len(seq.tokens) and not seq.finish_reason}   # else it is the prompt's, or has ended meanwhile
    self.scheduler.update(step.written, sampled)
    for (seq, place), (own, rank, *best) in zip(step.targets, logprobs, strict=False):
      k = seq.params.logprobs if place >= seq.num_prompt else seq.params.prompt_logprobs
      if k is None or place >= len(seq.tokens): continue
      found = [(seq.tokens[place], own, rank), *zip(best[:2 * k:2], best[1:2 * k:2], range(1, k + 1), strict=True)]
      seq.logprobs[place] = {int(i): Logprob(x, int(r), self.tokenizer.decode([int(i)], False)) for i, x, r in found}
    return [self.requests[name] for name in dict.fromkeys(seq.request_id for seq in sampled)]

  def _settle(self, changed: list[Request]) -> list[Request]:
    """End what a stop string ends, and let go of requests that have ended."""
    changed += [request for request in self._owed if self.requests.get(request.request_id) is request]   # or aborted
    for request in changed:
      for text in request.texts if request.params.stop or request.finished else ():
        stop = text.feed()
        if stop is None: continue
        self.scheduler.finish(text.seq, "stop")
        text.seq.stop_reason = stop
    ended = [request.request_id for request in changed if request.finished]
    for name in ended: del self.requests[name]
    self.scheduler.totals.update(requests_finished=len(ended))
    self._owed = []
    return changed

  def _recover(self) -> None:
    """After a failed step: what was launched is forgotten, nobody holds blocks, what was not read is computed again."""
    self._launched, requests = None, self.requests.values()
    self._owed = [request for request in requests if request.finished]
    forks = {seq for request in requests for seq in request.sequences[0].forks}
    self.scheduler.reset({seq for x in requests for seq in x.sequences if not seq.finish_reason} - forks)

  def get_metrics(self) -> dict[str, float]:
    """Totals since the start, rates over the seconds spent in steps, and the state of the pool and the queue."""
    queue, pool, totals = self.scheduler, self.blocks, self.scheduler.totals
    seconds = max(totals["seconds"], 1e-6)
    return {**totals, "blocks_used": pool.num_used(), "blocks_free": pool.num_free(), "blocks_cached": len(pool.unused),
            "blocks_shared": pool.num_shared, "num_requests_running": len(queue.running),
            "num_requests_waiting": len(queue.waiting), "mean_batch_size": totals["scheduled"] / max(1, totals["steps"]),
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
    requests = [self.request(f"generate-{next(self._arrivals)}", *pair) for pair in zip(prompts, params, strict=True)]
    with self._alone():
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
    seen, finished = 0, False
    try:
      while not finished:
        while request.metrics.num_generated == seen and not request.finished: self.advance()
        seen, finished = request.metrics.num_generated, request.finished
        yield request.output(news=True)
    finally: self.abort_request(request.request_id)

  def chat(self, messages: list[dict[str, str]], sampling_params: Params = None) -> list[RequestOutput]:
    """Answer a conversation, a list of {"role": ..., "content": ...}, through the model's chat template."""
    return self.generate({"messages": messages}, sampling_params, use_tqdm=False)


shared = functools.cache(LLM)   # one engine for each model


def generate(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> str:
  """The text that follows a prompt. sampling: SamplingParams' fields, but greedy unless a temperature is given."""
  return "".join(generate_stream(prompt, model, **sampling))


def generate_stream(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> Iterator[str]:
  """As `generate`, a piece at a time, as tokens arrive."""
  with exclusive: llm = shared(model)   # two first callers get one engine
  outputs = llm.generate_stream(prompt, SamplingParams(**{"temperature": 0.0, **sampling}))
  return (output.outputs[0].text for output in outputs if output.outputs[0].text)
