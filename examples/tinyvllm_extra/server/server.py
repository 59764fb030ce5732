"""An HTTP server that speaks OpenAI's protocol, with vLLM's further fields and metrics. It owns what a client sees:
bodies, answers, errors, limits. Each field of SamplingParams is one of a body, and what it may be is checked there."""
import argparse, asyncio, contextlib, dataclasses, hmac, http, itertools, math, os, pathlib
import re, signal, socket, threading, time, uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

import fastapi, fastapi.exceptions as exceptions, fastapi.middleware.cors as cors, fastapi_offline, orjson, pydantic
import uvicorn
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, core, generate_latest

from tinyvllm import CompletionOutput, Logprob, RequestOutput, SamplingParams, __version__
from tinyvllm_extra.cli import add_flags, folder_of, given, set_log_level
from tinyvllm.config import EngineConfig, ModelConfig, Options, check, kind_of, logger

from .async_engine import AsyncLLM, Numbered, Request
from .tools import certain, read_calls, schema_of, with_objects

# Answered without a key, and before the model is there
OPEN = {"/", "/health", "/version", "/metrics", "/docs", "/openapi.json",
        *(f"/static-offline-docs/{name}" for name in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"))}
# vLLM's metrics, and what they say
COUNTERS = {"prefix_cache_queries": "Tokens of prompts that were looked for in the prefix cache",
            "prefix_cache_hits": "Tokens of prompts that were found there",
            "num_preemptions": "Sequences that had to give their blocks back", "prompt_tokens": "Tokens of prompts",
            "generation_tokens": "Tokens generated",
            "spec_decode_num_drafts": "Times that drafts of a sequence were checked",
            "spec_decode_num_draft_tokens": "Tokens drafted", "spec_decode_num_accepted_tokens": "Drafts come true"}
GAUGES = {"num_requests_running": "Sequences that run", "num_requests_waiting": "Sequences that wait",
          "kv_cache_usage_perc": "Share of the KV cache's blocks that are in use, from 0 to 1"}
# Of each request: what it says, and how it is found when the request has ended
TIMES: dict[str, tuple[str, Callable[[Request], float]]] = {
  "time_to_first_token_seconds": ("From arrival to the first token", lambda x: x.metrics.ttft),
  "e2e_request_latency_seconds": ("From arrival to the end", lambda x: x.metrics.latency),
  "request_queue_time_seconds": ("From arrival to the first step", lambda x: x.metrics.queue_time),
  "request_prefill_time_seconds": ("From the first step to the first token",
                                   lambda x: x.metrics.first_token_time - x.metrics.first_scheduled_time),
  "request_decode_time_seconds": ("From the first token to the end",
                                  lambda x: x.metrics.finished_time - x.metrics.first_token_time),
  "request_prompt_tokens": ("Tokens of the prompt", lambda x: x.sequences[0].num_prompt),
  "request_generation_tokens": ("Tokens generated, of all samples", lambda x: x.metrics.num_generated),
  "request_params_max_tokens": ("max_tokens, as asked", lambda x: x.sequences[0].params.max_tokens)}
GAP = "inter_token_latency_seconds"
EVENTS = "text/event-stream"
KEYS = orjson.OPT_NON_STR_KEYS   # ids of tokens are
SECONDS = [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2.5, 5)]
TOKENS = [digit * 10**power for power in range(7) for digit in (1, 2, 5)]


@dataclasses.dataclass(frozen=True)
class ServerConfig(Options):
  """The server's own, with vLLM's names."""
  host: str = "127.0.0.1"                                 # where it listens; 0.0.0.0: to other machines, too
  port: Annotated[int, 0, 65535] = 8000                   # of TCP; 0: any that is free
  api_key: str | None = None                              # what clients must send; None: TINYVLLM_API_KEY's, if set
  served_model_name: str | None = None                    # what clients call it; None: the folder's name
  max_queue: Annotated[int, 0, 2**31 - 1] = 256           # texts that may wait; more are refused with 429
  request_timeout: Annotated[float | int | None, 0.001, 2**31] = None   # seconds; then a request ends with "abort"
  shutdown_timeout: Annotated[float | int, 0, 2**31] = 30   # seconds for running requests once a signal has come
  max_body_size: Annotated[int, 1, 2**40] = 2**22         # bytes of a request
  stream_interval: Annotated[int, 1, 2**31] = 1           # tokens in an event, if they come that fast
  allowed_origins: Annotated[list | None, str] = None     # of other pages in a browser (CORS)
  prefix_cache_file: str | None = None                    # keeps the prefix cache: read at start, written at the end


def body(title: str, **types: Any) -> Any:
  """The type of a body, or of a part. What is no tuple may be left out, or null."""
  fields: Any = {name: kind if isinstance(kind, tuple) else (kind | None, None) for name, kind in types.items()}
  return pydantic.create_model(title, __config__=pydantic.ConfigDict(extra="forbid", strict=True), **fields)


FIELDS = {f.name: kind_of(f)[0] for f in dataclasses.fields(SamplingParams)} | {"structured_outputs": dict}
Schema = body("JSONSchema", schema_=(dict, pydantic.Field(alias="schema")), name=str, description=str, strict=bool)
Format = body("ResponseFormat", type=(Literal["text", "json_object", "json_schema"], ...), json_schema=Schema)
Streaming = body("StreamOptions", include_usage=bool, include_obfuscation=bool)
# What OpenAI's clients send unasked, at values that change nothing here
HARMLESS = {"user": str, "store": bool, "metadata": dict, "service_tier": str, "reasoning_effort": str,
            "parallel_tool_calls": bool, "tools": Annotated[list, pydantic.Field(max_length=0)],
            "tool_choice": Literal["none", "auto"], "best_of": Literal[1],
            "chat_template_kwargs": Annotated[dict, pydantic.Field(max_length=0)]}
COMMON = FIELDS | HARMLESS | {"model": str, "stream": bool, "stream_options": Streaming, "response_format": Format,
                              "priority": int}
Function = body("FunctionDefinition", name=(str, ...), description=str, parameters=dict, strict=bool)
Tool = body("Tool", type=(Literal["function"], ...), function=(Function, ...))
Named = body("NamedToolChoice", type=(Literal["function"], ...), function=(body("FunctionName", name=(str, ...)), ...))
TOOLS = {"tools": list[Tool],   # type: ignore[valid-type]
         "tool_choice": Literal["none", "auto", "required"] | Named, "chat_template_kwargs": dict}
TEMPLATE = dict.fromkeys(["add_generation_prompt", "continue_final_message"], bool)   # what its variables are, too
Completion: Any = body("CompletionRequest", **COMMON, echo=bool,
                       prompt=(str | list[str] | list[int] | list[list[int]], ...))
Chat: Any = body("ChatCompletionRequest", **COMMON | TOOLS | TEMPLATE | {"logprobs": bool}, top_logprobs=int,
                 max_completion_tokens=int, messages=(list[dict], ...))
Text: Any = body("TokenizeRequest", model=str, prompt=str, messages=list[dict], add_special_tokens=bool)
Tokens: Any = body("DetokenizeRequest", model=str, tokens=(list[int], ...))
Failure: Any = body("ErrorResponse", error=(dict[str, Any], ...))


def error_of(status: int, message: str, param: str | None = None) -> dict[str, dict]:
  name = "Request Entity Too Large" if status == 413 else http.HTTPStatus(status).phrase   # Python 3.13 names it anew
  kind = name.replace(" ", "").removesuffix("Error") + "Error"
  return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def refuse(status: int, message: str, param: str | None = None) -> fastapi.Response:
  return JSONResponse(error_of(status, message, param), status, {"Retry-After": "1"} if status in (429, 503) else None)


async def explain(request: fastapi.Request, error: Any) -> fastapi.Response:
  """The answer to what a route raises."""
  if isinstance(error, exceptions.StarletteHTTPException): return refuse(error.status_code, error.detail)
  if isinstance(error, RuntimeError): return refuse(500, str(error))
  if isinstance(error, exceptions.RequestValidationError):
    found = error.errors()[0]
    if found["type"] == "json_invalid": return refuse(400, f"the body is not JSON: {found['ctx']['error']}")
    if "json" not in request.headers.get("content-type", "json"):
      return refuse(400, "the body is not said to be JSON: send the header Content-Type: application/json")
    where = [str(x) for x in found["loc"][1:]]
    return refuse(400, f"{'.'.join(where) or 'the body'}: {found['msg']}", where[0] if where else None)
  found = re.match(r"(\w+)[=:]", str(error))   # how this project's errors begin
  return refuse(400, str(error), found and {"prompt_token_ids": "prompt"}.get(found[1], found[1]))


def usage_of(requests: list[Request]) -> dict[str, Any]:
  prompt = sum(request.sequences[0].num_prompt for request in requests)   # samples share it
  new = sum(request.metrics.num_generated for request in requests)
  return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
          "prompt_tokens_details": {"cached_tokens": sum(request.sequences[0].num_cached for request in requests)}}


def tools_of(body: Any) -> list[dict[str, Any]]:
  """Those that a chat's answer may call."""
  return [] if body.tool_choice == "none" else [tool.model_dump(exclude_none=True) for tool in body.tools or []]


def drafts_of(metrics: dict[str, Any]) -> str:
  """For the line of the log: how many drafts came true, and tokens that a sequence gets of a step with some."""
  if not metrics.get("spec_decode_num_draft_tokens"): return ""
  accepted = metrics["spec_decode_num_accepted_tokens"]
  return (f", Draft acceptance rate: {accepted / metrics['spec_decode_num_draft_tokens']:.1%}, "
          f"Mean acceptance length: {1 + accepted / metrics['spec_decode_num_drafts']:.2f}")


def event(content: dict[str, Any]) -> bytes: return b"data: %b\n\n" % orjson.dumps(content, option=KEYS)


class Answer:
  """What a request is answered with: the object around its choices, and each choice, whole or a part of it. kind:
  "cmpl", "chatcmpl" or "generate"."""
  def __init__(self, kind: str, name: str, body: Any, params: SamplingParams, tokenizer: Any):
    self.chat = kind == "chatcmpl"
    self.kind = kind
    self.body = body
    self.params = params
    self.tokenizer = tokenizer
    self.head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
    self.begun = dict[int, tuple[int, list[int]]]()   # of each choice, the length of its text and its last token
    self.tools = tools_of(body) if self.chat else []
    self.held = dict[int, tuple[str, int]]()   # of each choice that may call a tool, its text, and how much was sent

  def called(self, index: int, text: str, ended: bool) -> tuple[str, list[dict]]:
    """Of more text what may be sent as such, and the calls that it has come to."""
    before, sent = self.held.get(index, ("", 0))
    text = before + text
    said, calls = read_calls(text, self.tools) if ended else (text[:certain(text)], [])
    if self.body.parallel_tool_calls is False: calls = calls[:1]
    self.held[index] = text, len(said)
    return said[sent:], calls

  def whole(self, choices: list[dict]) -> dict[str, Any]:
    chat = "chat.completion.chunk" if self.body.stream else "chat.completion"
    texts = {"text": [choice["text"] for choice in choices]} if self.kind == "generate" else {}
    return {**self.head, "object": chat if self.chat else "text_completion", "choices": choices, **texts}

  def choice(self, number: int, output: RequestOutput, c: CompletionOutput) -> dict[str, Any]:
    index = number * self.params.n + c.index
    text = c.text
    ids = c.token_ids
    known: Any = c.logprobs
    offset, before = self.begun.get(index, (0, output.prompt_token_ids[-1:]))
    first = index not in self.begun
    extra: dict[str, Any] = {}
    if first and self.body.prompt_logprobs is not None:   # vLLM's name and form
      extra["prompt_logprobs"] = [of and {i: x._asdict() for i, x in of.items()} for of in output.prompt_logprobs or []]
    if first and not self.chat and self.body.echo:
      text = (output.prompt or self.tokenizer.decode(output.prompt_token_ids)) + text
      ids = output.prompt_token_ids + ids
      before = []
      known = None if known is None else [*(output.prompt_logprobs or []), *known]
    self.begun[index] = offset + len(text), ids[-1:] or before
    calls: list[dict] = []
    if self.tools: text, calls = self.called(index, text, bool(c.finish_reason))
    message: dict[str, Any] = {"content": text}
    if calls and self.body.stream: message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
    elif calls: message = {"content": text or None, "tool_calls": calls}
    whole = {"message": {"role": "assistant", **message}}
    said: Any = {"text": text} if not self.chat else {"delta": message} if self.body.stream else whole
    reason = "tool_calls" if calls and c.finish_reason == "stop" else c.finish_reason
    return {"index": index, **said, "logprobs": None if known is None else self.logprobs(before, ids, known, offset),
            "finish_reason": reason, "stop_reason": c.stop_reason, **extra}

  def logprobs(self, before: list[int], ids: list[int], known: list, offset: int) -> dict[str, list]:
    """OpenAI's two forms of what is known of each token; nothing is of a prompt's first."""
    decode = self.tokenizer.decode
    rows = [*zip([before, *([i] for i in ids)], ids, known, strict=False)]
    def piece(before: list[int], token: int, skip: bool = False) -> str:   # alone, some would lose their space
      return decode([*before, token], skip)[len(decode(before, skip)):]
    def entry(before: list[int], token: int, of: dict[int, Logprob]) -> dict[str, Any]:
      text = piece(before, token)
      return {"token": text, "logprob": of[token].logprob, "bytes": [*text.encode()]}
    def best(of: dict[int, Logprob]) -> list[int]:
      return sorted((i for i in of if of[i].rank <= (self.params.logprobs or 0)), key=lambda i: (of[i].rank, i))
    if self.chat:
      return {"content": [{**entry(b, i, x), "top_logprobs": [entry(b, j, x) for j in best(x)]} for b, i, x in rows]}
    lengths = [len(piece(b, i, self.params.skip_special_tokens)) for b, i, _ in rows]
    return {"tokens": [piece(b, i) for b, i, _ in rows], "token_logprobs": [of and of[i].logprob for _, i, of in rows],
            "top_logprobs": [of and {piece(b, j): x.logprob for j, x in of.items()} for b, _, of in rows],
            "text_offset": [*itertools.accumulate(lengths, initial=offset)][:-1]}


class Server(uvicorn.Server):
  """It listens at once, loads the model meanwhile, and answers until a signal comes."""
  def __init__(self, model: str | None, engine: dict[str, Any], options: ServerConfig):
    self.llm: Any = None   # until it is loaded
    self.requests = set[Request]()   # those that clients wait for
    self.error: Exception | None = None
    self.code = 0
    self.loading = model, engine
    self.options = options
    self.key = options.api_key or os.environ.get("TINYVLLM_API_KEY")
    self.name = options.served_model_name or (pathlib.Path(model).resolve().name if model else "tinyvllm")
    self.registry = CollectorRegistry()
    says = {**{name: text for name, (text, _) in TIMES.items()}, GAP: "From a text's token to its next one"}
    self.times = {name: Histogram(f"tinyvllm:{name}", text, ["model_name"], registry=self.registry,
                                  buckets=SECONDS if name.endswith("seconds") else TOKENS).labels(self.name)
                  for name, text in says.items()}
    self.ended = Counter("tinyvllm:request_success", "Texts that ended, by the reason why",
                         ["model_name", "finished_reason"], registry=self.registry)
    self.registry.register(self)   # type: ignore[arg-type]
    raised: Any = (exceptions.StarletteHTTPException, exceptions.RequestValidationError, RuntimeError, ValueError)
    self.app = fastapi_offline.FastAPIOffline(   # its /docs loads nothing from elsewhere
      title="tinyvllm", version=__version__, exception_handlers=dict.fromkeys(raised, explain), redoc_url=None,
      responses={"4XX": {"model": Failure}, "5XX": {"model": Failure}})
    self.app.get("/", response_class=HTMLResponse)(self.page)
    self.app.get("/metrics", response_class=PlainTextResponse)(self.metrics)
    facts: Any = {"/health": self.health, "/version": self.version, "/v1/models": self.models,
                  "/v1/models/{name:path}": self.model}
    for path, route in facts.items(): self.app.get(path)(route)
    self.app.post("/tokenize")(self.tokenize)
    self.app.post("/detokenize")(self.detokenize)
    answers: Any = {"/generate": self.generate, "/v1/completions": self.completions, "/v1/chat/completions": self.chat}
    for path, route in answers.items(): self.app.post(path, responses={200: {"content": {EVENTS: {}}}})(route)
    app: Any = self.gate
    # The lists: of methods, of headers
    if options.allowed_origins: app = cors.CORSMiddleware(app, options.allowed_origins, ["*"], ["*"])
    super().__init__(uvicorn.Config(app, options.host, options.port, interface="asgi3", access_log=False,
                                    timeout_graceful_shutdown=int(options.shutdown_timeout) + 5))

  # From start to end

  async def startup(self, sockets: Any = None) -> None:
    threading.Thread(target=self.load, daemon=True).start()   # a signal does not wait for it
    self.reporting = asyncio.create_task(self.report())   # as long as the loop
    await super().startup(sockets)

  def load(self) -> None:
    model, engine = self.loading
    file = self.options.prefix_cache_file
    try: self.llm = AsyncLLM(model, self.options.stream_interval, True, file, **engine)
    except Exception as error:
      self.error = error
      self.should_exit = True

  def state(self) -> str:
    return "the server is shutting down" if self.should_exit else self.llm.state if self.llm else "the model is loading"

  def handle_exit(self, sig: int, frame: Any) -> None:
    if sig == signal.SIGINT and self.state(): self.code = 128 + sig   # it was never ready, or is told again
    self.force_exit = self.should_exit and sig == signal.SIGINT   # told a second time
    self.should_exit = True

  async def shutdown(self, sockets: Any = None) -> None:
    """uvicorn's, which waits for all answers: what runs when the time is up is aborted."""
    asyncio.get_running_loop().call_later(self.options.shutdown_timeout, self.abort, self.requests)
    await super().shutdown(sockets)
    if self.llm and self.options.prefix_cache_file: await asyncio.to_thread(self.llm.shutdown)   # whatever signals come

  def save(self, sig: int, frame: Any) -> None:
    if self.llm: self.llm.save_prefix_cache()

  def abort(self, requests: Iterable[Request]) -> None:
    for request in requests: self.llm.abort(request.request_id)

  async def gate(self, scope: Any, receive: Any, send: Any) -> None:
    """What comes before any route: the body's size, the key, and that a client which goes away ends its request."""
    if scope["type"] != "http": return await self.app(scope, receive, send)
    headers = fastapi.Request(scope).headers
    length = headers.get("content-length", "")
    limit = self.options.max_body_size
    size = int(length) if length.isdecimal() and int(length) > 8 * limit else 0   # such a body is not read
    sent: list[bytes] = []
    message: Any = {"more_body": True}
    while message["more_body"] and size <= 8 * limit:   # a client reads an answer once it has sent all
      message = await receive()
      if message["type"] == "http.disconnect": return
      size += len(message["body"])
      if size <= limit: sent.append(message["body"])
    if size > limit: refused = refuse(413, f"the body is larger than {limit} bytes: see --max-body-size")
    elif scope["path"] in OPEN: refused = None
    elif self.key and not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self.key}".encode()):
      refused = refuse(401, "missing or wrong API key: send the header Authorization: Bearer KEY")
    else: refused = refuse(503, self.state()) if self.state() else None
    if refused: return await refused(scope, receive, send)
    gone = asyncio.create_task(receive())
    unread = [{"type": "http.request", "body": b"".join(sent)}]
    async def replay() -> Any: return unread.pop() if unread else await asyncio.shield(gone)
    route = asyncio.create_task(self.app(scope, replay, send))
    try: await asyncio.wait((gone, route), return_when=asyncio.FIRST_COMPLETED)
    finally:
      for task in (gone, route): task.cancel()
    with contextlib.suppress(asyncio.CancelledError): await route

  # What operators see

  def collect(self) -> Iterator[Any]:
    """What prometheus_client asks for."""
    found: dict[str, Any] = self.llm.llm.get_metrics() if self.llm else {"blocks_used": 0, "blocks_free": 1}
    found["kv_cache_usage_perc"] = found["blocks_used"] / (found["blocks_used"] + found["blocks_free"])
    for name, text in {**COUNTERS, **GAUGES}.items():
      kind = core.CounterMetricFamily if name in COUNTERS else core.GaugeMetricFamily
      family = kind(f"tinyvllm:{name}", text, labels=["model_name"])
      family.add_metric([self.name], found.get(name, 0))
      yield family
    family = core.CounterMetricFamily("tinyvllm:spec_decode_num_accepted_tokens_per_pos", "Drafts that came true, by "
                                      "their place among those of a step", labels=["model_name", "position"])
    for position, count in enumerate(found.get("spec_decode_num_accepted_tokens_per_pos", [])):
      family.add_metric([self.name, str(position)], count)
    yield family

  async def report(self) -> None:
    """vLLM's line of the log, every 10 s while there is work."""
    before = dict.fromkeys(("steps", "prompt_tokens", "generation_tokens"), 0)
    while True:
      await asyncio.sleep(10)
      now = self.llm.llm.get_metrics() if self.llm else before
      if now["steps"] > before["steps"]:
        prompt, generation = ((now[name] - before[name]) / 10 for name in ("prompt_tokens", "generation_tokens"))
        used = now["blocks_used"] / (now["blocks_used"] + now["blocks_free"])
        hits = now["prefix_cache_hits"] / max(1, now["prefix_cache_queries"])
        logger.info(f"Engine 000: Avg prompt throughput: {prompt:.1f} tokens/s, Avg generation throughput: "
                    f"{generation:.1f} tokens/s, Running: {now['num_requests_running']} reqs, Waiting: "
                    f"{now['num_requests_waiting']} reqs, GPU KV cache usage: {used:.1%}, "
                    f"Prefix cache hit rate: {hits:.1%}{drafts_of(now)}")
      before = now

  async def watched(self, requests: list[Request]) -> AsyncIterator[list[Numbered]]:
    """AsyncLLM.stream, with its times taken and its time limited."""
    timer = asyncio.get_running_loop().call_later(self.options.request_timeout or 2**31, self.abort, requests)
    last: dict[Request, tuple[float, int]] = {}   # when, and how many tokens there were
    def observe(request: Request) -> None:
      now = time.monotonic()
      count = request.metrics.num_generated
      when, before = last.get(request, (now, 0))
      last[request] = now, count
      for _ in range(max(1, before), count): self.times[GAP].observe((now - when) / (count - before))
    def ended(request: Request) -> None:
      self.requests.remove(request)
      observe(request)   # the tokens that nobody has waited for
      for seq in request.sequences: self.ended.labels(self.name, seq.finish_reason).inc()
      for name, (_, found) in TIMES.items():
        if not math.isnan(found(request)): self.times[name].observe(found(request))   # else it never came
    self.requests.update(requests)
    try:
      async with contextlib.aclosing(self.llm.stream(requests, ended)) as stream:
        async for news in stream:
          for number, _ in news: observe(requests[number])
          yield news
    finally: timer.cancel()

  # Routes

  async def page(self) -> fastapi.Response: return FileResponse(pathlib.Path(__file__).parent / "chat.html")
  async def version(self) -> dict[str, str]: return {"version": __version__}
  async def health(self) -> fastapi.Response: return refuse(503, self.state()) if self.state() else JSONResponse({})
  async def metrics(self) -> fastapi.Response:
    return fastapi.Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

  async def models(self) -> dict[str, Any]: return {"object": "list", "data": [await self.model(self.name)]}

  async def model(self, name: str) -> Any:
    if name != self.name: return refuse(404, f"The model `{name}` does not exist.", "model")
    return {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "tinyvllm", "root": self.name,
            "parent": None, "max_model_len": self.llm.llm.max_model_len}

  async def tokenize(self, body: Text) -> dict[str, Any]:
    engine = self.llm.llm
    chat = body.messages is not None
    check((body.prompt is None) == chat, "prompt: give either prompt or messages")
    text = engine.tokenizer.apply_chat_template([*map(with_objects, body.messages)]) if chat else body.prompt
    ids = await asyncio.to_thread(engine.tokenizer.encode, text, not chat and body.add_special_tokens is not False)
    return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}

  async def detokenize(self, body: Tokens) -> dict[str, str]:
    size = self.llm.llm.model_config.vocab_size
    check(all(0 <= i < size for i in body.tokens), f"tokens: an id must be from 0 to {size - 1}")
    return {"prompt": self.llm.llm.tokenizer.decode(body.tokens, False)}

  async def generate(self, body: Completion) -> fastapi.Response: return await self.answer("generate", body)
  async def completions(self, body: Completion) -> fastapi.Response: return await self.answer("cmpl", body)
  async def chat(self, body: Chat) -> fastapi.Response: return await self.answer("chatcmpl", body)

  def params(self, body: Any, chat: bool) -> SamplingParams:
    given = {name: value for name, value in body if name in FIELDS and value is not None}
    given = {**self.llm.llm.sampling, **given}
    if given.get("max_tokens") == -1: given["max_tokens"] = 2**31 - 1   # up to max_model_len, as llama.cpp has it
    if chat:
      given.setdefault("max_tokens", 2**31 - 1)   # up to max_model_len
      if body.max_completion_tokens is not None: given["max_tokens"] = body.max_completion_tokens
      check(body.logprobs or body.top_logprobs is None, "top_logprobs: only with logprobs=true")
      given["logprobs"] = body.top_logprobs or 0 if body.logprobs else None
      choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, Named) else body.tool_choice
      schema = schema_of(tools_of(body), choice, body.parallel_tool_calls is not False)
      check(not schema or "structured_outputs" not in given and not body.response_format,
            f"tool_choice={choice!r} conflicts with structured_outputs and response_format: drop one")
      if schema: given["structured_outputs"] = {"json": schema}
    elif body.echo and "logprobs" in given: given.setdefault("prompt_logprobs", given["logprobs"])
    form = body.response_format
    if form and form.type != "text":
      check("structured_outputs" not in given, "response_format: only without structured_outputs")
      check((form.type == "json_schema") == bool(form.json_schema), "response_format: json_schema belongs to its type")
      given["structured_outputs"] = {"json": form.json_schema.schema_} if form.json_schema else {"json_object": True}
    return SamplingParams(**given)

  def conversation(self, body: Any) -> list[int]:
    """The ids of a chat's messages, through the model's template."""
    check(body.messages, "messages=[] must not be empty")
    tokenizer = self.llm.llm.tokenizer
    own = {name: value for name, value in body if name in TEMPLATE and value is not None}
    variables = {**(body.chat_template_kwargs or {}), **own, **({"tools": tools_of(body)} if tools_of(body) else {})}
    for name in ("messages", "raise_exception", "chat_template"):
      check(name not in variables, f"chat_template_kwargs: not {name}")
    check("tools" not in variables or "tools" in (tokenizer.config.get("chat_template") or ""),
          "tools: the model's chat template knows none")
    return tokenizer.encode(tokenizer.apply_chat_template([*map(with_objects, body.messages)], **variables), False)

  async def answer(self, kind: str, body: Any) -> fastapi.Response:
    if body.model not in (None, self.name): return refuse(404, f"The model `{body.model}` does not exist.", "model")
    check(body.stream or not body.stream_options, "stream_options: only with stream=true")
    engine = self.llm.llm
    params = self.params(body, kind == "chatcmpl")
    answer = Answer(kind, self.name, body, params, engine.tokenizer)
    given = await asyncio.to_thread(self.conversation, body) if kind == "chatcmpl" else body.prompt
    if not isinstance(given, list) or given and isinstance(given[0], int): given = [given]
    check(given, "prompt=[] must not be empty")
    prompts = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in given]
    most = self.options.max_queue + engine.config.max_num_seqs
    new = len(prompts) * params.n
    check(params.n == 1 or new <= most, f"n={params.n}: {new} texts, but --max-queue and --max-num-seqs allow {most}")
    def texts() -> int: return sum(not seq.finish_reason for request in self.requests for seq in request.sequences)
    busy = refuse(429, f"at most {most} texts may wait (--max-queue) and run (--max-num-seqs): try again")
    if texts() + new > most: return busy   # before they are made, which takes time, and after: others may have come
    requests = [await asyncio.to_thread(engine.request, f"{answer.head['id']}-{i}", prompt, params, body.priority or 0)
                for i, prompt in enumerate(prompts)]
    if texts() + new > most: return busy
    stream = self.watched(requests)
    news = await anext(stream)   # from here on they are in the queue
    if body.stream: return StreamingResponse(self.events(answer, news, stream, requests), media_type=EVENTS)
    async for _ in stream: pass
    outputs = enumerate(request.output() for request in requests)
    choices = [answer.choice(i, output, c) for i, output in outputs for c in output.outputs]
    return JSONResponse({**answer.whole(choices), "usage": usage_of(requests)})

  async def events(self, answer: Answer, news: Any, stream: Any, requests: list[Request]) -> AsyncIterator[bytes]:
    """What arrives together is yielded together: each write to a socket takes longer than all else of an event."""
    usage = {"usage": None} if getattr(answer.body.stream_options, "include_usage", False) else {}
    roles = [{"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
             for i in range(answer.params.n if answer.chat else 0)]
    found = [event({**answer.whole([role]), **usage}) for role in roles]
    ended = set[tuple[int, int]]()
    try:
      while news:
        for i, output in news:
          for c in output.outputs:
            if (i, c.index) in ended or not (c.token_ids or c.finish_reason): continue
            if c.finish_reason: ended.add((i, c.index))
            found.append(event({**answer.whole([answer.choice(i, output, c)]), **usage}))
        if found and len(ended) < len(requests) * answer.params.n:   # else what is last comes with them
          yield b"".join(found)
          found.clear()
        news = await anext(stream, None)
      if usage: found.append(event({**answer.whole([]), "usage": usage_of(requests)}))
      yield b"".join([*found, b"data: [DONE]\n\n"])
    except RuntimeError as error: yield event(error_of(500, str(error)))
    finally: await stream.aclose()


def main(argv: list[str]) -> int:
  """`tinyvllm serve`. Raises what loading the model raised."""
  parser = argparse.ArgumentParser(prog="tinyvllm serve", argument_default=argparse.SUPPRESS,
                                   description="Answer HTTP requests in OpenAI's protocol.")
  for model in ("model", "--model"): parser.add_argument(model, nargs="?", help="folder or GGUF; default: shipped")
  add_flags(parser, EngineConfig, ServerConfig)
  args = vars(parser.parse_args(argv))
  set_log_level(args)
  config = ServerConfig(**given(args, ServerConfig))
  folder = folder_of(args.get("model"))
  if folder: ModelConfig.load(pathlib.Path(folder).expanduser())   # before a port is taken
  family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
  try: socket.create_server((config.host, config.port), family=family).close()   # before a model is loaded for nothing
  except OSError as error: raise ValueError(f"host={config.host!r}, port={config.port}: {error.strerror}") from error
  server = Server(folder, given(args, EngineConfig), config)
  if config.prefix_cache_file and hasattr(signal, "SIGUSR1"): signal.signal(signal.SIGUSR1, server.save)
  server.run()
  if server.llm: server.llm.shutdown()
  if server.error: raise server.error
  return server.code
