"""The engine: text in, text out. Requests are added at any time, and a step advances all of them together; everything
below knows token ids only. One thread drives an engine."""
import contextlib, dataclasses, functools, importlib, itertools, logging, pathlib, random, threading, time, uuid
from collections.abc import Callable, Iterator
from typing import Any

from tinygrad import dtypes, helpers, nn

from .batch import DRAWN_BY, Step, pack
from .config import EngineConfig, ModelConfig, check, effective, logger, read_json
from .device import cpu_cores, exclusive, largest_tensor, open_device, pick_dtype
from .llama import Llama
from .request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams, Sequence
from .runner import Runner
from .scheduler import BlockManager, Scheduler
from .tokenizer import Seen, TextStream, Tokenizer, load_tokenizer
from .weights import load_weights

Prompt = str | dict[str, Any]
Params = SamplingParams | None


@dataclasses.dataclass(eq=False)
class Request:
  """The samples of a prompt, with their texts."""
  request_id: str
  prompt: str | None
  metrics: RequestMetrics
  texts: list[TextStream]

  sequences = property(lambda self: [text.seq for text in self.texts])
  finished = property(lambda self: all(seq.finish_reason for seq in self.sequences))
  told = property(lambda self: all(text.seen == text.there for text in self.texts))   # of all of it

  def output(self, news: bool = False) -> RequestOutput:
    """All there is so far, or what has come since the last call for news."""
    first = self.sequences[0]
    scores = [first.logprobs.get(i) for i in range(first.num_prompt)] if first.scores_prompt else None
    return RequestOutput(self.request_id, self.prompt, first.tokens[:first.num_prompt], scores,
                         [self._completion(text, news) for text in self.texts], self.metrics, first.num_cached)

  def _completion(self, text: TextStream, news: bool) -> CompletionOutput:
    text.feed()
    seq = text.seq
    seen = text.seen if news else Seen(0, seq.num_prompt, None)
    if news: text.seen = text.there
    logprobs = None if seq.params.logprobs is None else [seq.logprobs[i] for i in range(seen.tokens, len(seq.tokens))]
    total = None if logprobs is None else sum(
      seq.logprobs[i][seq.tokens[i]].logprob for i in range(seq.num_prompt, len(seq.tokens)))
    return CompletionOutput(seq.index, text.text[seen.characters:text.shown], seq.tokens[seen.tokens:], total, logprobs,
                            seq.finish_reason, seq.stop_reason)


class LLMEngine:
  """Requests in, outputs out, one `step` at a time. It is for one thread at a time: a second one gets a RuntimeError.

  model: a folder with config.json, *.safetensors and a tokenizer; None: the model shipped with tinyvllm. options:
  EngineConfig's. Raises ValueError for files or options that will not do, RuntimeError for no device or compiler."""
  def __init__(self, model: str | pathlib.Path | None = None, **options: Any):
    folder = self.folder = pathlib.Path(model or pathlib.Path(__file__).with_name("default_model")).expanduser()
    with exclusive: self._load(folder, EngineConfig(**effective(options)))
    self.scheduler = Scheduler(self.config, self.blocks)
    self.requests: dict[str, Request] = {}
    self._read: Callable[[], tuple] = tuple   # waits for what the device works on; tuple: for nothing
    self._changed: dict[Request, None] = {}   # have tokens that nobody was told of, also where a step failed
    self._driver = threading.RLock()
    self._stepping = threading.Lock()
    self._abandoned: list[str] = []   # requests whose streams were thrown away within a step
    self._arrivals = itertools.count()
    self._random = random.Random(self.config.seed)
    for _ in self.capture(self.config.cudagraph_capture_sizes) if self.config.cudagraph_capture_sizes else (): pass

  def _load(self, folder: pathlib.Path, config: EngineConfig) -> None:
    started = time.perf_counter()
    if not logger.hasHandlers():   # the program has not said where logs go
      logger.addHandler(logging.StreamHandler())
      logger.setLevel(logger.level or logging.INFO)
    free = open_device()
    kind: Any = Llama
    if config.tensor_parallel_size > 1:
      free, kind = importlib.import_module("tinyvllm_extra.parallel").open_peers(config.tensor_parallel_size)
    drafts = config.speculative_config
    self.speculation: Any = None
    if drafts is not None: self.speculation = importlib.import_module("tinyvllm_extra.speculation").Speculation(drafts)
    shape = self.model_config = ModelConfig.load(folder)
    self.tokenizer = load_tokenizer(folder)
    own = read_json(folder / "generation_config.json") if config.generation_config == "auto" else {}
    self.sampling = {name: own[name] for name in (*DRAWN_BY, "repetition_penalty") if own.get(name) is not None}
    limit = shape.max_position_embeddings
    length = config.max_model_len or limit
    check(length <= limit, f"max_model_len={length} must be at most the model's {limit}")
    seqs = config.max_num_seqs
    # A CPU takes a second for 512, in which nobody else gets a token
    budget = config.max_num_batched_tokens or max(seqs, 128 if cpu_cores() else 512)
    # The logits of a step are in one tensor
    most = min(budget, 1 << (largest_tensor() // (4 * shape.vocab_size)).bit_length() - 1)
    check(seqs <= most, f"max_num_seqs={seqs} must be at most max_num_batched_tokens={most}: each decodes one a step")
    config = self.config = dataclasses.replace(config, max_num_batched_tokens=most, dtype=pick_dtype(config.dtype))
    llama = kind(shape, getattr(dtypes, config.dtype))
    load_weights(llama, folder, llama.dtype, config.quantization)
    weights = sum(x.nbytes() for part in llama.parts() for x in nn.state.get_parameters(part))
    logger.info(f"loaded {folder.name} in {config.dtype} on {', '.join(llama.devices)} in "
                f"{time.perf_counter() - started:.1f} s; a step takes {most} tokens")
    left = max(0, int(free * config.gpu_memory_utilization - weights))
    target = functools.partial(Runner, llama, config, length)
    if self.speculation: self.runners = self.speculation.open(target, shape, self.tokenizer, config, length, left)
    else: self.runners = [target(left)]
    self.runner = self.runners[0]
    self.blocks = BlockManager(self.runner.num_blocks, config)
    self.max_model_len = min(length, self.blocks.num_tokens)   # where an override holds less
    self.pack = functools.partial(pack, config=config, max_blocks=self.runner.max_blocks, vocab_size=shape.vocab_size)

  @contextlib.contextmanager
  def alone(self) -> Iterator[None]:
    """What one thread does with the engine. Raises RuntimeError if another one is in there."""
    if not self._driver.acquire(False): raise RuntimeError("another thread has this LLM: use AsyncLLM")
    try: yield
    finally: self._driver.release()

  def request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> Request:
    """A request for `add`. Any thread may make one. Raises as add_request."""
    params = params or SamplingParams(**self.sampling)
    check(isinstance(params, SamplingParams), f"sampling_params={params!r} must be SamplingParams")
    text, ids = self._encode(prompt)
    size = self.model_config.vocab_size
    eos = self.model_config.eos_token_ids
    for name in ("prompt_token_ids", "stop_token_ids", "allowed_token_ids", "logit_bias"):
      for i in getattr(params, name, ids) or ():
        check(type(i) is int and 0 <= i < size, f"{name}: id {i!r} must be an int from 0 to {size - 1}")
    check(len(ids) < self.max_model_len, f"This model's maximum context length is {self.max_model_len} tokens. "
          f"However, the prompt has {len(ids)}: shorten it or raise max_model_len or num_gpu_blocks_override")
    check(type(priority) is int and (priority == 0 or self.config.scheduling_policy == "priority"),
          f"priority={priority!r} must be an int, and 0 unless scheduling_policy='priority'")
    spellings = [space + word.lstrip() for word in params.bad_words or () for space in ("", " ")]
    bad_words = [*filter(None, (self.tokenizer.encode(spelling, False) for spelling in spellings))]
    seed = self._random.getrandbits(63) if params.seed is None else params.seed
    structured: Any = params.structured_outputs
    metrics = RequestMetrics()
    runs = [Sequence(
      request_id=request_id, tokens=[*ids], params=params, seed=seed + i, order=(priority, next(self._arrivals)),
      max_len=min(self.max_model_len, len(ids) + params.max_tokens),   # type: ignore[operator]   # by now a number
      index=i, bad_words=bad_words, metrics=metrics,
      stop_ids=frozenset([*(() if params.ignore_eos else eos), *(params.stop_token_ids or ())]),
      constraint=structured and structured.constraint(self.tokenizer, size, eos),
      drafter=self.speculation and self.speculation.drafter(params)) for i in range(params.n)]
    runs[0].forks += runs[1:]
    return Request(request_id, text, metrics, [TextStream(self.tokenizer, seq) for seq in runs])

  def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
    """A prompt's text, if it has one, and its ids."""
    match [*prompt.items()] if isinstance(prompt, dict) else [("prompt", prompt)]:
      case [("prompt", str(text))] if text: return text, self.tokenizer.encode(text)
      case [("prompt_token_ids", list(ids))] if ids: return None, ids
      case [("messages", list(messages)), *rest] if messages and dict(rest).keys() <= {"template"}:
        text = self.tokenizer.apply_chat_template(messages, **dict(rest).get("template", {}))
        return text, self.tokenizer.encode(text, False)   # a template brings its own BOS
    raise ValueError(f"prompt={prompt!r} must be a str, or a dict of prompt, prompt_token_ids or messages, not empty")

  def add_request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> None:
    """Queue a request: a str, {"prompt": str}, {"prompt_token_ids": [int]} or {"messages": [{"role", "content"}]},
    the last with "template": what Tokenizer.apply_chat_template takes, if that is wanted.
    Lower priorities go first. Raises ValueError for a request that can never run."""
    self.add(self.request(request_id, prompt, params, priority))

  def add(self, request: Request) -> None:
    with self.alone():
      name = request.request_id
      check(self.requests.setdefault(name, request) is request, f"request_id={name!r} is in use")
      self.scheduler.add(request.sequences[0])

  def abort_request(self, request_id: str) -> None:
    """End a request with finish_reason "abort". One that has finished, or never was, is let be."""
    with self.alone():
      if self._stepping.locked(): return self._abandoned.append(request_id)   # a garbage collection closed its stream
      if request_id not in self.requests: return
      request = self.requests.pop(request_id)
      self._changed.pop(request, None)
      for seq in request.sequences:
        if not seq.finish_reason: self.scheduler.finish(seq, "abort")

  def has_unfinished_requests(self) -> bool: return bool(self.requests)

  def step(self) -> list[RequestOutput]:
    """Advance the running requests together, and return those that have something new. On a GPU a step is packed while
    the one before runs, whose tokens it returns."""
    return self.advance(Request.output)

  def advance(self, told: Callable[[Request], Any] = lambda request: request) -> list[Any]:
    """As `step`, for who wants something else of each request that has news. If `told` fails, the next step tells."""
    with self.alone(), exclusive:   # another engine's capture would take in what this one reads
      started = time.perf_counter()
      while self._abandoned: self.abort_request(self._abandoned.pop())
      try:
        with self._stepping: changed = self._step()
      except BaseException:
        # What was launched is forgotten, nobody holds blocks, what was not read is computed again
        self._read = tuple
        self.scheduler.reset([seq for request in self.requests.values() for seq in request.sequences
                              if not seq.finish_reason and seq not in request.sequences[0].forks])
        raise
      news = [told(request) for request in changed]
      ended = [request for request in changed if request.finished]
      for request in ended: self.requests.pop(request.request_id, None)   # an interrupted step may have
      self._changed.clear()
      self.scheduler.totals.update(   # type: ignore[call-overload]
        steps=1, requests_finished=len(ended), seconds=time.perf_counter() - started)
      return news

  def _step(self) -> list[Request]:
    self._find_stops()   # of tokens that came with a step which failed
    if any(seq.waits() for seq in self.scheduler.running):   # then all do, or they would take turns
      self._record(*self._read())
      self._read = tuple
    batch = self.scheduler.schedule()
    if self.speculation: self.speculation.draft(self.scheduler, batch, self.pack)
    step = self.pack(batch, fit=self.runner.fit) if batch else None
    self.scheduler.advance(batch)
    def launch(): return self.runner.launch(step) if step else tuple
    ahead = launch() if self.runner.reads_early else None   # the device goes on with it at once
    results = self._read() if self.runner.overlaps else launch()()   # waits for the device
    self._read = ahead or launch() if self.runner.overlaps else tuple
    if results: self._record(*results)
    return [*self._changed]

  def capture(self, sizes: list[int] | None = None, rare: bool = False) -> Iterator[str]:
    """Capture steps of so many tokens, greedy and sampled, or those with all that is rare, so that none of them stalls
    the requests that meet it first, and pad to them from now on. sizes: powers of two; None: what suits the device.
    Yields how far it is, before each."""
    return importlib.import_module("tinyvllm_extra.graphs").capture(self, sizes, rare)

  def save_prefix_cache(self, path: str | pathlib.Path) -> int:
    """Write the blocks in which something is found to a file, whole or not at all. Returns how many; none: no file.
    Raises OSError where it cannot be written."""
    with self.alone(), exclusive: return importlib.import_module("tinyvllm_extra.prefix_cache").save(self, path)

  def load_prefix_cache(self, path: str | pathlib.Path) -> int:
    """Find what is in such a file, too: as many blocks as are free, those used last first. Returns how many. Raises
    ValueError for a file that is damaged, or of another model or other options that its blocks hang on."""
    with self.alone(), exclusive: return importlib.import_module("tinyvllm_extra.prefix_cache").load(self, path)

  def _find_stops(self) -> None:
    """End the texts in which a stop string has come."""
    for text in [text for request in self._changed for text in request.texts if text.seq.params.stop]:
      text.feed()
      if text.seq.stop_reason is not None: self.scheduler.finish(text.seq, "stop")

  def _record(self, step: Step, ids: list[int], logprobs: list[list[float]]) -> None:
    """Give a step's tokens to their sequences."""
    for token, (seq, place, _), (own, rank, *best) in zip(ids, step.targets, logprobs, strict=False):
      k = seq.params.logprobs if place >= seq.num_prompt else seq.params.prompt_logprobs
      if k is None: continue
      if place < len(seq.tokens): token = seq.tokens[place]
      rows = [(token, own, rank), *zip(best[::2], best[1::2], range(1, k + 1), strict=False)]
      seq.logprobs[place] = {int(i): Logprob(x, int(r), self.tokenizer.decode([int(i)], False)) for i, x, r in rows}
    self.scheduler.totals.update(scheduled=len(step.computed))
    begun = {seq: len(seq.tokens) for seq, place, _ in step.targets if place > len(seq.tokens) and seq.drafts}
    # A token at a time, as a text may end at each; last, as one that counts has all that belongs to it. Behind a draft
    # it does if that came true
    for i in itertools.count():
      sampled = {seq: token for token, (seq, place, before) in zip(ids, step.targets, strict=False)
                 if place == len(seq.tokens) and before in (-1, seq.tokens[-1]) and not seq.finish_reason}
      self._changed |= dict.fromkeys(self.requests[seq.request_id] for seq in sampled)
      self.scheduler.update({seq: step.computed[seq] for seq in (sampled if i else step.computed)}, sampled)
      self._find_stops()
      if not (begun and sampled): break
    for seq, length in begun.items(): self.speculation.judge(self.blocks, seq, len(seq.tokens) - length - 1)

  def get_metrics(self) -> dict[str, Any]:
    """Totals since the start, rates over the seconds spent in steps, and the state of the pool and the queue."""
    totals = self.scheduler.totals
    return {**totals, **(self.speculation.metrics() if self.speculation else {}), "blocks_used": self.blocks.num_used(),
            "blocks_free": self.blocks.num_free(), "blocks_cached": len(self.blocks.unused),
            "blocks_shared": len(self.blocks.shared), "num_requests_running": len(self.scheduler.running),
            "num_requests_waiting": len(self.scheduler.waiting),
            "mean_batch_size": totals["scheduled"] / (totals["steps"] or 1),
            "tokens_per_second": totals["generation_tokens"] / (totals["seconds"] or 1),
            "requests_per_second": totals["requests_finished"] / (totals["seconds"] or 1)}


class LLM(LLMEngine):
  """The engine, with calls that run requests to their end. Takes what LLMEngine takes."""
  llm_engine = property(lambda self: self)   # as vLLM's scripts find it

  def generate(self, prompts: Prompt | list[Prompt], sampling_params: Params | list[Params] = None,
               use_tqdm: bool = True) -> list[RequestOutput]:
    """Complete one prompt or a list, under one SamplingParams or one for each; outputs in the prompts' order. Raises
    ValueError, and runs none, if any is bad."""
    prompts = prompts if isinstance(prompts, list) else [prompts]
    params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
    check(len(params) == len(prompts), f"sampling_params: {len(params)} for {len(prompts)} prompts: give one or all")
    requests = [self.request(uuid.uuid4().hex, *pair) for pair in zip(prompts, params, strict=True)]
    with self.alone(), contextlib.ExitStack() as aborts:
      for request in requests:
        aborts.callback(self.abort_request, request.request_id)
        self.add(request)
      for request in helpers.tqdm(requests, "generating", not use_tqdm or None, unit=" requests"):
        while not request.finished: self.advance()
    return [request.output() for request in requests]

  def generate_stream(self, prompt: Prompt, sampling_params: Params = None) -> Iterator[RequestOutput]:
    """Complete one prompt, yielding the new text and ids as they come. Raises ValueError at once for a bad request.
    Closing the iterator aborts it."""
    return self._stream(self.request(uuid.uuid4().hex, prompt, sampling_params))

  def _stream(self, request: Request) -> Iterator[RequestOutput]:
    self.add(request)
    try:
      while not (request.finished and request.told):
        while request.told: self.advance()
        yield request.output(news=True)
    finally: self.abort_request(request.request_id)

  def chat(self, messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
           sampling_params: Params | list[Params] = None, use_tqdm: bool = True,
           chat_template_kwargs: dict[str, Any] | None = None, **template: Any) -> list[RequestOutput]:
    """Answer a conversation, a list of {"role": ..., "content": ...}, through the model's chat template, or several.
    template, chat_template_kwargs: what Tokenizer.apply_chat_template takes."""
    chats: Any = messages if messages and isinstance(messages[0], list) else [messages]
    template |= chat_template_kwargs or {}
    return self.generate([{"messages": chat, "template": template} for chat in chats], sampling_params, use_tqdm)

  def get_tokenizer(self) -> Tokenizer: return self.tokenizer
  def get_default_sampling_params(self) -> SamplingParams: return SamplingParams(**self.sampling)


shared = functools.cache(LLM)   # one engine for each model


def generate(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> str:
  """The text that follows a prompt. sampling: SamplingParams' fields, but greedy unless a temperature is given."""
  return "".join(generate_stream(prompt, model, **sampling))


def generate_stream(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> Iterator[str]:
  """As `generate`, a piece at a time, as tokens arrive."""
  with exclusive: llm = shared(model)   # two first callers get one engine
  outputs = llm.generate_stream(prompt, SamplingParams(**{"temperature": 0.0, **sampling}))
  return (output.outputs[0].text for output in outputs if output.outputs[0].text)
