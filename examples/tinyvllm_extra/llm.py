"""`tinyvllm.LLM`: the core's Engine with the extension's parts, options and methods."""
import contextlib, dataclasses, functools, hashlib, pathlib, time, types, typing
from collections.abc import Collection, Iterator, Sequence

from tinyvllm.backend import Backend, exclusive
from tinyvllm.config import InputError, JsonObject, check, logger, option, read_json
from tinyvllm.engine import Engine, Params, Parts, Prompt, Request, RequestOutput

from . import graph_policy, kernels, models, programs, vllm_options
from .adapters import lora
from .cache import prefix_cache, snapshots
from .formats import hub
from .kernels import drivers, parallel
from .options import SAMPLING_DEFAULTS, LLMConfig, LoRARequest, add_fields, document, setup_logging, takes
from .pooling import embeddings
from .sampling import beam_search, logits, speculation
from .sampling.params import SamplingParams
from .serving import engine_metrics
from .text.huggingface import ChatTokenizer
from .trace import observer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LLMArguments(LLMConfig):
  """The parameters of LLM. model: a folder, a GGUF file, or ORG/NAME on the Hugging Face hub; None: the bundled model.
  vLLM's options without effect here are accepted, too, but type checkers report them.

  Raises InputError for unsupported files or options, RuntimeError without a device or a compiler."""
  model: str | pathlib.Path | None = dataclasses.field(default=None, kw_only=False)
  backend: Backend | None = option(None, "Kernels (default: the fastest ones for the device)")


for _options in (SamplingParams, beam_search.BeamSearchParams, embeddings.PoolingParams): document(_options)


class LLM(Engine, contextlib.AbstractContextManager["LLM"]):
  """An engine with all features. `with LLM(...) as llm:` calls `shutdown` at the end."""
  parts = Parts(
    config_class=LLMConfig, make_backend=lambda: kernels.make_backend(), open_devices=parallel.open_devices,
    open_checkpoint=lambda path, x: hub.open_checkpoint(path, x.quantization, x.activation_quantization, x.merge_lora),
    find_model=lambda hf_config, path, config: models.choose_model(hf_config, path, config.runner),
    params_class=SamplingParams, scheduler_class=lora.LoRAScheduler, logits=logits.ProcessedLogits(),
    open_proposer=lora.open_proposer)
  config: LLMConfig
  scheduler: lora.LoRAScheduler
  proposer: speculation.SpeculativeProposer | None
  states: snapshots.StatePool | None = None   # only for a model with recurrent layers
  adapters: lora.Adapters | None = None   # only with enable_lora
  tracer: observer.Tracer | None = None
  save_prefix_cache = prefix_cache.save_prefix_cache
  load_prefix_cache = prefix_cache.load_prefix_cache
  beam_search = beam_search.beam_search
  embed = embeddings.embed
  score = embeddings.score
  llm_engine = property(lambda self: self)   # vLLM's attribute

  @takes(LLMArguments)
  def __init__(self, model: str | pathlib.Path | None = None, *, backend: Backend | None = None, **options: object):
    LLMArguments(model=model, backend=backend)   # checks the types
    setup_logging()
    config = vllm_options.read_options(options, model)
    ignored = ", ".join(f"{name}={options[name]!r}" for name in sorted(options.keys() & vllm_options.NO_EFFECT.keys()))
    if ignored: logger.info(f"vLLM's options without effect here: {ignored}")
    path = hub.local_path(model, config) if model else None
    with exclusive: programs.prepare_tuned_device()
    check(config.kv_cache_dtype == "auto" or backend is None or type(backend).kv_layout is not Backend.kv_layout,
          f"kv_cache_dtype={config.kv_cache_dtype!r} must be 'auto': the core's Backend has no other one")
    trace = observer.open_trace(config.trace) if config.trace else None
    super().__init__(path, backend=backend, **vars(config))
    # The requested dtype, although a CPU computes in float32
    self.config = dataclasses.replace(self.config, dtype=getattr(self.backend, "stored_dtype", "") or self.config.dtype)
    self.devices = self.runner.model.devices.names
    self.scheduler.states, self.scheduler.adapters = self.states, self.adapters
    self.is_embedder = isinstance(self.runner.model, models.layers.Embedder)
    check(not (self.is_embedder and self.proposer), "speculative_config must be None for an embedding model")
    # Else `encode` leaves out tokenizer.json's end token, whose hidden state is the embedding
    if self.is_embedder: self.tokenizer.config.pop("add_bos_token", None)
    self.tokenizer.template_variables = config.default_chat_template_kwargs or {}
    if config.chat_template: self.tokenizer.templates = {"default": config.chat_template}
    generation_config = read_json(self.path / "generation_config.json") if config.generation_config == "auto" else {}
    defaults = {name: x for name, x in generation_config.items() if name in SAMPLING_DEFAULTS and x is not None}
    self.sampling_defaults = defaults | (config.override_generation_config or {})
    ends = {*self.model_config.eos_token_ids, *filter(None, [self.tokenizer.eos_token_id])}
    self.model_config = dataclasses.replace(self.model_config, eos_token_ids=tuple(sorted(ends)))
    if trace: self.tracer = observer.Tracer(self, self.scheduler, trace)
    if config.cudagraph_capture_sizes: [*self.capture(config.cudagraph_capture_sizes)]

  def __repr__(self) -> str:
    return f"LLM({self.path.name}: {self.config.dtype} on {'+'.join(self.devices)}, max_model_len={self.max_model_len})"

  def __exit__(self, *error: object) -> None: self.shutdown()

  def shutdown(self) -> None:
    """Give the memory of weights, KV cache and graphs back to the system, and abort unfinished requests. Later requests
    raise InputError; a second shutdown does nothing. Raises RuntimeError if another thread is using the engine."""
    with self.driving():
      for request_id in [*self.requests]: self.abort_request(request_id)
      self._in_flight = self.proposer = None
      if self.tracer: self.tracer.stop()
      for name in ("runner", "runners", "backend"): vars(self).pop(name, None)
    with exclusive: drivers.free_unused_buffers(self.devices)

  def refuse(self) -> None: raise InputError(f"{self!r} was shut down: create a new one")
  if not typing.TYPE_CHECKING: runner = functools.cached_property(refuse)   # after `shutdown` has deleted the attribute

  def make_request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> Request:
    params = params or self.get_default_sampling_params()
    check(isinstance(params, embeddings.PoolingParams) == self.is_embedder, embeddings.MISMATCH[self.is_embedder])
    check(not priority or self.config.scheduling_policy == "priority",
          f"priority={priority!r} must be 0 unless scheduling_policy='priority'")
    fields = {**prompt} if isinstance(prompt, dict) else {}
    salt, lora_request = fields.pop("cache_salt", None), fields.pop("lora_request", None)
    adapter = self.add_lora(lora_request) if lora_request else None
    check(salt is None or isinstance(salt, str) and salt, f"cache_salt={salt!r} must be a string that is not empty")
    if isinstance(params, SamplingParams): params.check_logprobs(self.config.max_logprobs, self.model_config.vocab_size)
    limit = getattr(params, "truncate_prompt_tokens", None)
    if limit: fields = {"prompt_token_ids": self.encode(fields or prompt)[1][-limit:]}
    request = super().make_request(request_id, fields or prompt, params, priority)
    request.metrics = engine_metrics.RequestMetrics(request.sequences)
    for seq in request.sequences:
      if salt: seq.salt = hashlib.sha256(salt.encode()).digest()
      if self.adapters and adapter: self.adapters.of_sequence[seq], seq.salt = adapter, seq.salt + adapter.salt
    decode = functools.partial(self.tokenizer.decode, skip_special_tokens=getattr(params, "skip_special_tokens", True))
    for stream in request.streams:
      stream.tokenizer = types.SimpleNamespace(decode=decode if getattr(params, "detokenize", True) else lambda ids: "")
    return request

  def add_lora(self, lora_request: LoRARequest) -> lora.Adapter:
    """Return an adapter, which is read before its first request. Any thread may call this. Raises InputError."""
    check(isinstance(lora_request, LoRARequest), f"lora_request={lora_request!r} must be LoRARequest(...)")
    if self.adapters: return self.adapters.add(lora_request)
    raise InputError(f"{lora_request=} requires enable_lora=True (--enable-lora)")

  def remove_lora(self, lora_int_id: int) -> bool:
    """Forget an adapter; requests that use it finish with it. Return whether it was known."""
    return bool(self.adapters and self.adapters.known.pop(lora_int_id, None))

  def capture(self, sizes: list[int] | None = None, optional: bool = False) -> Iterator[str]:
    """Capture greedy and sampled steps, or with `optional` steps with all features, and pad later steps to them, but
    none in eager mode. sizes: tokens of a step, powers of two; None: the device's usual ones. It yields what
    graph_policy.capture does."""
    are_powers = all(x > 0 and x.bit_count() == 1 for x in sizes or ())
    check(are_powers, f"cudagraph_capture_sizes={sizes} must be powers of two")
    self.scheduler.sizes = [] if self.config.enforce_eager else sorted(sizes or graph_policy.usual_sizes(self.runner))
    variants = logits.graph_variants(self.runner.model, optional, self.config.enable_lora)
    return graph_policy.capture(self, self.scheduler.sizes, variants)

  def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
    """Like Engine's. prompt: also {"messages": [{"role", "content"}], "template": {options of the chat template}}."""
    if isinstance(prompt, dict) and "messages" in prompt: return self.tokenizer.encode_chat(**prompt)
    return super().encode(prompt)

  def add_request(self, request_id: str, prompt: Prompt, params: Params = None, priority: int = 0) -> None:
    """Queue a request; see make_request. Raises InputError for a request that can never run."""
    self.add(self.make_request(request_id, prompt, params, priority))

  def get_metrics(self) -> JsonObject:
    """Return the metrics of the scheduler, see MeteredScheduler.metrics, and of speculative decoding."""
    return self.scheduler.metrics() | (self.proposer.metrics() if self.proposer else {})

  def has_unfinished_requests(self) -> bool: return bool(self.requests)

  def step(self) -> list[RequestOutput]:
    """Run one step and return the requests with new tokens. On a GPU these come from the previous step, which ran while
    this one was built. If an output cannot be built, the next step returns all of them."""
    requests = self.advance()
    try: return [request.output() for request in requests]
    except BaseException:
      self._updated = dict.fromkeys([*requests, *self._updated])
      self.requests |= {request.request_id: request for request in requests}
      raise

  def advance(self, only: Collection[Request] | None = None) -> list[Request]:
    started = time.perf_counter()
    requests = super().advance(only)
    seconds: typing.Any = time.perf_counter() - started
    self.scheduler.counters.update(steps=1, requests_finished=sum(x.finished for x in requests), seconds=seconds)
    return requests

  def generate(self, prompts: Prompt | Sequence[Prompt], sampling_params: Params | Sequence[Params] = None,
               use_tqdm: bool = True, priority: int | list[int] | None = None,
               lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None) -> list[RequestOutput]:
    """Engine.generate with vLLM's other arguments. prompts, sampling_params, lora_request: one, or a list or tuple."""
    jobs = [*prompts] if isinstance(prompts, Sequence) and not isinstance(prompts, str) else [prompts]
    adapters = lora_request if isinstance(lora_request, Sequence) else [lora_request] * len(jobs)
    check(len(adapters) == len(jobs), f"lora_request: {len(adapters)} for {len(jobs)} prompts: use 1 or one each")
    jobs = [add_fields(x, lora_request=y) for x, y in zip(jobs, adapters, strict=True)]
    params = [*sampling_params] if isinstance(sampling_params, Sequence) else sampling_params
    check(not isinstance(priority, list) or len(priority) == len(jobs), f"{priority=} must have length {len(jobs)}")
    return super().generate(jobs, params, use_tqdm, priority or 0)

  def chat(self, messages: list[JsonObject] | list[list[JsonObject]], sampling_params: Params | Sequence[Params] = None,
           use_tqdm: bool = True, chat_template_kwargs: JsonObject | None = None,
           lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
           **template: object) -> list[RequestOutput]:
    """Answer a conversation, a list of {"role": ..., "content": ...}, or a list of them, with the chat template.
    template, chat_template_kwargs: options of ChatTokenizer.apply_chat_template."""
    chats = messages if isinstance(messages, list) and messages and isinstance(messages[0], list) else [messages]
    options = template | (chat_template_kwargs or {})
    return self.generate([{"messages": chat, "template": options} for chat in chats], sampling_params, use_tqdm,
                         lora_request=lora_request)

  def get_tokenizer(self) -> ChatTokenizer: return self.tokenizer
  def get_default_sampling_params(self) -> SamplingParams: return SamplingParams(**self.sampling_defaults)
