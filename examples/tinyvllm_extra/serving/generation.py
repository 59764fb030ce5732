"""Generation: turns a request body into engine requests, and their outputs into one JSON response or a stream of
events. A Builder decides the wire format. `Serving.requests` holds all unfinished requests."""
import asyncio, collections, contextlib, contextvars, functools, itertools, pathlib, time, uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable

from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from tinyvllm.config import JsonObject, check, check_ids
from tinyvllm_extra.llm import LLM, LoRARequest, add_fields
from tinyvllm_extra.text.parsers import OutputFormat, find_format

from . import errors, prometheus, protocol, server_config
from .answers import BlockBuilder, ChatBuilder, ChoicesBuilder, CompletionBuilder, GenerateBuilder
from .async_engine import AsyncLLM, IndexedOutput, Request
from .protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, GenerationRequest, TokenizeRequest

EVENT_STREAM = "text/event-stream"
# The engine's requests that answer the current HTTP request; set by the access log
SERVED = contextvars.ContextVar[list[Request]]("SERVED")
Builder = BlockBuilder | ChoicesBuilder   # writes an answer in its wire format


class Serving:
  """Runs the requests of all routes on one engine, and observes their metrics."""
  def __init__(self, model_names: list[str], options: server_config.ServerConfig):
    self.llm: AsyncLLM | None = None   # until the model is loaded
    self.requests = set[Request]()   # unfinished
    self.names = model_names   # responses and metrics have the first one
    # By the name that clients choose, which they may leave out; None: the model itself
    self.adapters: dict[str | None, LoRARequest | None] = dict.fromkeys([None, "", *model_names])
    self.adapter_ids = itertools.count(1)
    self.options = options
    self.observer = prometheus.Metrics(model_names[0], self.engine_metrics)

  def engine_metrics(self) -> JsonObject: return self.engine.get_metrics() if self.llm else collections.Counter()

  @property
  def loaded(self) -> AsyncLLM:
    assert self.llm, "`gate` answers requests until the model is loaded"
    return self.llm

  @property
  def engine(self) -> LLM: return self.loaded.llm

  @functools.cached_property
  def output_format(self) -> OutputFormat:
    templates = "\n".join(self.engine.tokenizer.templates.values())
    return find_format(templates, self.options.reasoning_parser, self.options.tool_call_parser)

  @functools.cached_property
  def chat_defaults(self) -> JsonObject:
    """The model's sampling defaults. Special tokens stay in the text if they mark reasoning or calls."""
    tokenizer = self.engine.tokenizer
    has_special = any(tokenizer.added_texts[i] in x for i in tokenizer.special_ids for x in self.output_format.markers)
    return {**self.engine.sampling_defaults, **({"skip_special_tokens": False} if has_special else {})}

  # Routes

  async def load(self) -> dict[str, int]: return {"server_load": len(self.requests)}
  async def models(self) -> JsonObject:
    return {"object": "list", "data": [await self.model(name) for name in [*self.adapters] if name]}

  async def model(self, name: str) -> JsonObject:
    adapter = self.check_model(name)
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "tinyvllm",
            "root": adapter.lora_path if adapter else self.names[0], "parent": self.names[0] if adapter else None,
            "max_model_len": self.engine.max_model_len}

  def add_adapter(self, name: str, path: str) -> None:
    """Read an adapter that clients choose by its name. Raises InputError or Refusal."""
    adapter = LoRARequest(name, next(self.adapter_ids), path)
    self.engine.add_lora(adapter)
    if self.adapters.setdefault(name, adapter) is adapter: return
    self.engine.remove_lora(adapter.lora_int_id)
    raise errors.Refusal(409, f"lora_name={name!r} is in use: unload that one or choose another name", "lora_name")

  def load_adapter(self, body: protocol.LoadAdapterRequest) -> Response:   # not async: runs in another thread
    if not pathlib.Path(body.lora_path).expanduser().is_dir():
      raise errors.Refusal(404, f"lora_path={body.lora_path!r} is not a folder of the server: choose one", "lora_path")
    self.add_adapter(body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")   # vLLM's text

  async def unload_adapter(self, body: protocol.UnloadAdapterRequest) -> Response:
    adapter = self.adapters.get(body.lora_name)
    if not adapter: raise errors.Refusal(404, f"lora_name={body.lora_name!r} is not a loaded adapter", "lora_name")
    del self.adapters[body.lora_name]
    self.engine.remove_lora(adapter.lora_int_id)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

  def tokenize(self, body: TokenizeRequest) -> JsonObject:   # not async: FastAPI calls it in another thread
    self.check_model(body.model)
    engine = self.engine
    chat = body.messages is not None
    check((body.prompt is None) == chat, "prompt: set either prompt or messages")
    text = protocol.chat_text(body, engine.tokenizer, self.options.trust_request_chat_template) if chat else body.prompt
    ids = engine.tokenizer.encode(text, body.add_special_tokens or body.add_special_tokens is None and not chat)
    return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids,
            "token_strs": engine.tokenizer.pieces(ids) if body.return_token_strs else None}

  def detokenize(self, body: DetokenizeRequest) -> dict[str, str]:
    self.check_model(body.model)
    check_ids(self.engine.model_config.vocab_size, tokens=body.tokens)
    return {"prompt": self.engine.tokenizer.decode(body.tokens, False)}

  async def generate(self, body: CompletionRequest) -> Response: return await self.answer(body, GenerateBuilder)
  async def completions(self, body: CompletionRequest) -> Response: return await self.answer(body, CompletionBuilder)
  async def chat(self, body: ChatCompletionRequest) -> Response: return await self.answer(body, ChatBuilder)

  # Generation

  async def answer(self, body: GenerationRequest, builder_class: Callable[..., Builder]) -> Response:
    """Run the requests of a body. Return the builder's response, or a stream of its events."""
    builder = await asyncio.to_thread(self.prepare, body, builder_class)
    self.check_queue(len(builder.requests), builder.params.n)   # again: others may have arrived in the meantime
    steps = self.steps(builder.requests)
    outputs = await anext(steps)   # the requests are now in the queue
    if body.stream: return StreamingResponse(self.events(builder, outputs, steps), media_type=EVENT_STREAM)
    async for _ in steps: pass
    # Decoding the tokens of log probabilities is slow
    has_logprobs = builder.params.logprobs is not None or builder.params.prompt_logprobs is not None
    return JSONResponse(await asyncio.to_thread(builder.response) if has_logprobs else builder.response())

  def prepare(self, body: GenerationRequest, builder_class: Callable[..., Builder]) -> Builder:
    """Return the builder of a body's answer. May take long: call it in another thread."""
    adapter = self.check_model(body.model)
    prompts = protocol.encode_prompts(body, self.engine, self.options.trust_request_chat_template)
    is_chat = isinstance(body, ChatCompletionRequest)
    prompt_end = self.engine.tokenizer.decode(prompts[0]["prompt_token_ids"][-16:], False) if is_chat else ""
    escapes = protocol.escapes_of(body, self.output_format, prompt_end) if is_chat else {}
    params = protocol.sampling_params(body, self.chat_defaults if is_chat else self.engine.sampling_defaults, escapes)
    self.check_queue(len(prompts), params.n)
    parsers = protocol.new_parsers(body, self.output_format, prompt_end, params.n) if is_chat else []
    name = uuid.uuid4().hex
    extended = [add_fields(x, cache_salt=body.cache_salt, lora_request=adapter) for x in prompts]
    requests = [self.engine.make_request(f"{name}-{i}", x, params, body.priority or 0) for i, x in enumerate(extended)]
    model = adapter.lora_name if adapter else self.names[0]
    return builder_class(body, name, model, params, self.engine.tokenizer, parsers, requests)

  def check_model(self, name: str | None) -> LoRARequest | None:
    """Return the adapter that a body names as its model, None for the model itself. Raises Refusal."""
    if name in self.adapters: return self.adapters[name]
    raise errors.Refusal(404, f"The model `{name}` does not exist. Models: {[*filter(None, self.adapters)]}.", "model")

  def check_queue(self, num_prompts: int, n: int) -> None:
    """Raise Refusal if `n` samples of each prompt do not fit into the queue now, InputError if they can never fit. Any
    thread may call this."""
    num_new = num_prompts * n
    limit = self.options.max_queue + self.engine.config.max_num_seqs
    name = f"n={n}" if n > 1 else "prompt"
    check(num_new <= limit, f"{name}: {num_new} sequences, but --max-queue and --max-num-seqs allow {limit}")
    num_unfinished = sum(not seq.finish_reason for request in [*self.requests] for seq in request.sequences)
    if num_unfinished + num_new > limit:
      raise errors.Refusal(429, f"queue full: --max-queue and --max-num-seqs allow {limit} sequences: retry later")

  async def steps(self, requests: list[Request]) -> AsyncGenerator[list[IndexedOutput], None]:
    """Yield AsyncLLM.stream's outputs; observe the requests' metrics; abort the requests after the timeout."""
    timer = asyncio.get_running_loop().call_later(self.options.request_timeout or 2**31, self.abort, requests)
    self.requests.update(requests)
    SERVED.get([]).extend(requests)
    try:
      async with contextlib.aclosing(self.loaded.stream(requests)) as stream:
        async for outputs in stream:
          for i in {i for i, _ in outputs}: self.observer.observe_tokens(requests[i])
          yield outputs
    finally:
      timer.cancel()
      self.requests.difference_update(requests)
      for request in requests: self.observer.observe_end(request)

  def abort(self, requests: Iterable[Request]) -> None:
    for request in requests: self.loaded.abort(request.request_id)

  async def events(self, builder: Builder, outputs: list[IndexedOutput],
                   steps: AsyncGenerator[list[IndexedOutput], None]) -> AsyncIterator[bytes]:
    """Yield server-sent events. A step's events are yielded together: writing to the socket is their main cost."""
    pending = [builder.first_events(outputs[0][1])]
    unfinished = {(i, sample) for i in range(len(builder.requests)) for sample in range(builder.params.n)}
    try:
      while outputs:
        for i, output in outputs:
          for completion in output.outputs:
            if (i, completion.index) not in unfinished: continue
            if completion.finish_reason: unfinished.remove((i, completion.index))
            elif not completion.token_ids: continue
            make = functools.partial(builder.events, i, output, completion)
            pending.append(await asyncio.to_thread(make) if output.prompt_logprobs else make())
        if unfinished and any(pending):   # else they are sent with the last event
          yield b"".join(pending)
          pending.clear()
        outputs = await anext(steps, [])
      yield b"".join([*pending, builder.last_events()])
    except Exception as error: yield builder.last_events(error)
    finally: await steps.aclose()
