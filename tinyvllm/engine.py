"""The engine, from text to text. Requests can be added at any time, and each step advances all of them together. Only
one thread at a time may use an engine."""
import contextlib, dataclasses, functools, itertools, pathlib, random, threading, time, uuid
from collections.abc import Callable, Collection, Iterator
from typing import Any

from tinygrad import dtypes, helpers, nn

from .backend import Backend, Devices, exclusive, renderer
from .config import EngineConfig, InputError, JsonObject, ModelConfig, check, check_ids, logger
from .llama import Checkpoint, Llama
from .request import MAX_INT, CompletionOutput, Proposer, RequestOutput, SamplingParams, Sequence
from .runner import Logits, Results, Runner, Step, build_step
from .scheduler import BlockManager, Scheduler
from .tokenizer import Cursor, TextStream

Prompt = str | JsonObject
Params = SamplingParams | None


@dataclasses.dataclass(eq=False)
class Request:
  """A prompt with its samples and their text streams."""
  request_id: str
  prompt: str | None
  metrics: Any
  streams: list[TextStream]

  sequences = property(lambda self: [stream.seq for stream in self.streams])
  finished = property(lambda self: all(seq.finish_reason for seq in self.sequences))
  is_delivered = property(lambda self: all(stream.delivered == stream.available for stream in self.streams))

  def output(self, delta: bool = False) -> RequestOutput:
    """Return all output so far, or with `delta` the output since the last such call."""
    first = self.sequences[0]
    scores = [first.logprobs.get(i) for i in range(first.num_prompt)] if first.wants_prompt_logprobs else None
    return RequestOutput(self.request_id, self.prompt, first.tokens[:first.num_prompt], scores,
                         [self._completion(x, delta) for x in self.streams], self.metrics, first.num_cached or 0)

  def _completion(self, stream: TextStream, delta: bool) -> CompletionOutput:
    stream.update()
    seq = stream.seq
    start, end = stream.delivered if delta else Cursor(0, seq.num_prompt, None), stream.available
    if delta: stream.delivered = end
    logprobs, total = seq.processor.output_logprobs(seq, start.num_tokens) if seq.processor else (None, None)
    return CompletionOutput(seq.index, stream.text[start.num_characters:end.num_characters],
                            seq.tokens[start.num_tokens:], total, logprobs, seq.finish_reason, seq.stop_reason)


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of an Engine: the core's by default, others in a subclass such as the extension's LLM.

  config_class: the class of its options. make_backend, open_devices: for the default device. open_checkpoint: reads the
  files of a model. find_model: config.json's content, path -> the config and the class of the model. params_class: of a
  request without parameters. scheduler_class: of its Scheduler. logits: computes what LogitsProcessors ask for, see
  Logits; None: there are none. open_proposer: target, a function that makes its runner from the bytes for its KV cache,
  these bytes -> the Proposer or None, and the runners, the target's first."""
  config_class: type[EngineConfig] = EngineConfig
  make_backend: Callable[[], Backend] = Backend
  open_devices: Callable[[Any], Devices] = lambda config: Devices()
  open_checkpoint: Callable[[pathlib.Path, Any], Checkpoint] = lambda path, config: Checkpoint(path)
  find_model: Callable[[dict, pathlib.Path, Any], tuple[ModelConfig, type[Llama]]] = (
    lambda hf_config, path, config: (ModelConfig.from_hf(hf_config, path), Llama))
  params_class: type[SamplingParams] = SamplingParams
  scheduler_class: type[Scheduler] = Scheduler
  logits: Logits | None = None
  open_proposer: Callable[[Any, Callable[[int], Runner], int], tuple[Proposer | None, list[Runner]]] = (
    lambda target, new_runner, num_bytes: (None, [new_runner(num_bytes)]))


class LoadedModel:
  """A model on its devices, with tokenizer, runner and KV cache."""
  parts = Parts()

  def __init__(self, path: pathlib.Path, config: EngineConfig, backend: Backend | None):
    start_time = time.perf_counter()
    renderer()   # opens the device
    self.path = path
    self.backend = backend = backend or self.parts.make_backend()
    devices = self.parts.open_devices(config)
    free = backend.memory.free(devices.names)
    checkpoint = self.parts.open_checkpoint(path, config)
    self.model_config, model_class = self.parts.find_model(checkpoint.hf_config, path, config)
    self.tokenizer = checkpoint.tokenizer()
    limit = self.model_config.max_position_embeddings
    length = config.max_model_len or limit
    check(length <= limit, f"max_model_len={length} must be at most the model's {limit}")
    rows = backend.memory.largest_tensor() // (4 * self.model_config.vocab_size)   # the logits of a step are one tensor
    budget = min(config.max_num_batched_tokens or max(config.max_num_seqs, backend.budget), 1 << rows.bit_length() - 1)
    check(config.max_num_seqs <= budget, f"max_num_seqs={config.max_num_seqs} must be at most max_num_batched_tokens="
          f"{budget}: a running sequence gets a token in each step")
    self.config = dataclasses.replace(config, max_model_len=length, max_num_batched_tokens=budget,
                                      dtype=backend.pick_dtype(config.dtype, self.model_config))
    model = model_class(self.model_config, getattr(dtypes, self.config.dtype), backend, devices)
    checkpoint.load(model)
    weights = sum(x.nbytes() for module in model.modules() for x in nn.state.get_parameters(module))
    logger.info(f"loaded {path.name} ({checkpoint.describe()}) in {self.config.dtype} on {', '.join(devices.names)} in "
                f"{time.perf_counter() - start_time:.1f} s; a step takes {self.config.max_num_batched_tokens} tokens")
    num_bytes = int(free * config.gpu_memory_utilization - weights)
    new_runner = functools.partial(Runner, model, self.config, logits=self.parts.logits)
    self.proposer, self.runners = self.parts.open_proposer(self, new_runner, num_bytes)
    self.runner = self.runners[0]   # a second runner, if any, runs the draft model


class Engine(LoadedModel):
  """Schedules and runs steps for all requests. A second thread that calls it at the same time gets a RuntimeError.

  model: a folder with config.json, *.safetensors and a tokenizer, or a GGUF file (extension). None: the bundled model.
  backend: a Backend. None: the fastest one for the device. options: fields of EngineConfig.
  Raises InputError for unsupported files or options, RuntimeError without a device or a compiler."""
  def __init__(self, model: str | pathlib.Path | None = None, *, backend: Backend | None = None, **options: Any):
    path = pathlib.Path(model or pathlib.Path(__file__).with_name("default_model")).expanduser()
    with exclusive: super().__init__(path, self.parts.config_class(**options), backend)
    self.blocks = BlockManager(self.runner.num_blocks, self.config)
    self.max_model_len = min(self.config.max_model_len or 0, self.blocks.num_free() * self.config.block_size)
    self.scheduler = self.parts.scheduler_class(self.config, self.blocks)
    self.requests: dict[str, Request] = {}
    self._in_flight: Callable[[], Results] | None = None   # waits for the step in flight
    self._updated: dict[Request, None] = {}   # requests with tokens not yet returned by a step
    self._driver, self._stepping = threading.RLock(), threading.Lock()
    self._abandoned: list[str] = []           # requests whose streams were closed during a step
    self._arrivals = itertools.count()
    self._random = random.Random(self.config.seed)

  @contextlib.contextmanager
  def driving(self) -> Iterator[None]:
    """Reserve the engine for the calling thread. Raises RuntimeError if another thread is using it."""
    if not self._driver.acquire(False): raise RuntimeError("another thread uses this LLM: use tinyvllm.AsyncLLM")
    try: yield
    finally: self._driver.release()

  # Requests

  def make_request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> Request:
    """Check a request and return it for `add`. prompt: see `encode`. Lower priorities run first. May be called from any
    thread. Raises InputError for a request that can never run."""
    params = params or self.parts.params_class()
    check(isinstance(params, SamplingParams), f"sampling_params={params!r} must be SamplingParams(...)")
    text, ids = self.encode(prompt)
    check_ids(self.model_config.vocab_size, prompt_token_ids=ids, stop_token_ids=params.stop_token_ids)
    check(len(ids) < self.max_model_len, f"This model's maximum context length is {self.max_model_len} tokens. "
          f"However, the prompt has {len(ids)}: shorten it or raise max_model_len or num_gpu_blocks_override")
    check(type(priority) is int, f"priority={priority!r} must be an int")
    seed = self._random.getrandbits(63) if params.seed is None else params.seed
    stop_ids = {*(() if params.ignore_eos else self.model_config.eos_token_ids), *(params.stop_token_ids or ())}
    max_len = min(self.max_model_len, len(ids) + (params.max_tokens or MAX_INT))
    samples = [Sequence(request_id=request_id, tokens=[*ids], params=params, seed=seed + i, index=i, max_len=max_len,
                        order=(priority, next(self._arrivals)), stop_ids=stop_ids,
                        processor=params.processor(self.tokenizer, self.model_config)) for i in range(params.n)]
    samples[0].siblings += samples[1:]
    return Request(request_id, text, None, [TextStream(self.tokenizer, seq) for seq in samples])

  def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
    """Return a prompt's text (None for a prompt of token ids) and its token ids. prompt: a str, {"prompt": str} or
    {"prompt_token_ids": [int]}."""
    match [*prompt.items()] if isinstance(prompt, dict) else [("prompt", prompt)]:
      case [("prompt", str(text))] if text: return text, self.tokenizer.encode(text)
      case [("prompt_token_ids", list(ids))] if ids: return None, ids
    raise InputError(f"prompt={prompt!r} must be a str, {{'prompt': str}}, {{'prompt_token_ids': [int]}} or (with "
                     "tinyvllm_extra) {'messages': [...]}, not empty")

  def add(self, request: Request) -> None:
    with self.driving():
      name = request.request_id
      check(self.requests.setdefault(name, request) is request, f"request_id={name!r} is in use: choose another")
      self.scheduler.add(request.sequences[0])

  def abort_request(self, request_id: str) -> None:
    """End a request with finish_reason "abort". Does nothing for a finished or unknown request."""
    with self.driving():
      if self._stepping.locked(): return self._abandoned.append(request_id)   # garbage collection closed its stream
      if request := self.requests.pop(request_id, None):
        self._updated.pop(request, None)
        for seq in request.sequences:
          if not seq.finish_reason: self.scheduler.finish(seq, "abort")

  # Steps

  def advance(self, only: Collection[Request] | None = None) -> list[Request]:
    """Run one step, and return the requests with new tokens. On a GPU these tokens come from the previous step, which
    ran while this one was built. The next step returns requests that are not in `only`. After a failed step the engine
    still works, and no token is lost or duplicated."""
    with self.driving():
      while self._abandoned: self.abort_request(self._abandoned.pop())
      try:
        with self._stepping: (self._step_async if self.runner.is_async else self._step_sync)()
      except BaseException:
        self._reset()
        raise
      updated = [request for request in self._updated if only is None or request in only]
      for request in updated:   # an interrupted step may have removed it, and its id may be in use again
        if request.finished and self.requests.get(request.request_id) is request: del self.requests[request.request_id]
        del self._updated[request]
      return updated

  def _step_sync(self) -> None:
    """Schedule, build, run, update."""
    if step := self._next_step(): self._update(self.runner.launch(step)())

  def _step_async(self) -> None:
    """Build a step while the device runs the previous one, then process that one's results."""
    if self._in_flight and any(map(self._needs_sync, self.scheduler.running)):   # for all, or they would alternate
      self._update(self._in_flight())
      self._in_flight = None
    step = self._next_step()
    launched = self.runner.launch(step) if step and self.backend.reads_early else None
    results = self._in_flight() if self._in_flight else None
    self._in_flight = launched or (self.runner.launch(step) if step else None)
    if results: self._update(results)

  def _needs_sync(self, seq: Sequence) -> bool:
    """Return True if sampling the next token needs a token that is still on the device."""
    needs_tokens = seq.processor and seq.processor.depends_on_output or self.proposer and self.proposer.needs_sync(seq)
    return bool(seq.num_in_flight and needs_tokens)

  def _next_step(self) -> Step | None:
    """Schedule and build a step. Return None if no sequence can run."""
    self._find_stops()   # in tokens that a failed step appended
    batch = self.scheduler.schedule()
    if self.proposer: self.proposer.propose(self.scheduler, batch)
    if not batch: return None
    step = build_step(batch, self.runner)
    self.scheduler.start_step(batch, self.proposer.num_behind if self.proposer else 0)
    return step

  def _update(self, results: Results) -> None:
    if self.parts.logits: self.parts.logits.record(results, self.tokenizer)
    if self.proposer: return self.proposer.update(self, results)
    self.append(results.step.computed, {   # not strict: rows of padding follow
      row.seq: token for token, row in zip(results.token_ids, results.step.rows, strict=False)
      if row.position == len(row.seq.tokens) and not row.seq.finish_reason})

  def append(self, computed: dict[Sequence, range], sampled: dict[Sequence, int]) -> None:
    """Append the sampled tokens (see Scheduler.update), and finish sequences at stop strings."""
    self._updated |= dict.fromkeys(self.requests[seq.request_id] for seq in sampled)
    self.scheduler.update(computed, sampled)
    self._find_stops()

  def _find_stops(self) -> None:
    """Finish the sequences whose text contains a stop string."""
    for stream in [stream for request in self._updated for stream in request.streams if stream.seq.params.stop]:
      stream.update()
      if stream.seq.stop_reason is not None and stream.seq.finish_reason != "stop":
        self.scheduler.finish(stream.seq, "stop")

  def _reset(self) -> None:
    """Recover from a failed step: discard the step in flight, free all blocks, recompute all unfinished sequences."""
    self._in_flight = None
    self.scheduler.reset([seq for request in self.requests.values() for seq in request.sequences
                          if not seq.finish_reason and seq not in request.sequences[0].siblings])

  # Requests to completion

  def generate(self, prompts: Prompt | list[Prompt] | list[str], sampling_params: Params | list[Params] = None,
               use_tqdm: bool = True, priority: Any = 0) -> list[RequestOutput]:
    """Complete one or several prompts, with one SamplingParams and priority (int) for all or a list with one for each.
    Return outputs in prompt order. Raises InputError, before any prompt runs, if one of them is invalid."""
    prompts = prompts if isinstance(prompts, list) else [prompts]
    params, priorities = (x if isinstance(x, list) else [x] * len(prompts) for x in (sampling_params, priority))
    check(len(params) == len(prompts), f"sampling_params: {len(params)} for {len(prompts)} prompts: use 1 or one each")
    jobs = zip(prompts, params, priorities, strict=True)
    requests = dict.fromkeys(self.make_request(uuid.uuid4().hex, *job) for job in jobs)
    with self.driving(), contextlib.ExitStack() as aborts:
      for request in requests:
        aborts.callback(self.abort_request, request.request_id)
        self.add(request)
      for request in helpers.tqdm(requests, "generating", not use_tqdm or None, unit=" requests"):
        while not request.finished: self.advance(only=requests)
    return [request.output() for request in requests]

  def generate_stream(self, prompt: Prompt, sampling_params: Params = None) -> Iterator[RequestOutput]:
    """Complete one prompt, and yield new text and token ids as they are generated. Closing the iterator aborts the
    request. Raises InputError for an invalid request at the call, not at the first iteration."""
    return self._stream(self.make_request(uuid.uuid4().hex, prompt, sampling_params))

  def _stream(self, request: Request) -> Iterator[RequestOutput]:
    self.add(request)
    try:
      while not (request.finished and request.is_delivered):
        while request.is_delivered: self.advance(only=(request,))
        yield request.output(delta=True)
    finally: self.abort_request(request.request_id)
