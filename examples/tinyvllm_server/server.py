"""An HTTP server that speaks OpenAI's protocol, with vLLM's further fields and metrics. It owns what a client sees:
bodies, answers, errors, limits. Each field of SamplingParams is one of a body, and what it may be is checked there."""
import argparse, asyncio, contextlib, dataclasses, hmac, http, itertools, json, os, pathlib, re
import signal, socket, threading, time, uuid
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Annotated, Any, Literal, cast

import fastapi, fastapi.middleware.cors as cors, pydantic, uvicorn
from fastapi.exceptions import RequestValidationError, StarletteHTTPException
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, core, generate_latest

from tinyvllm import CompletionOutput, RequestOutput, SamplingParams, __version__
from tinyvllm_cli import add_flags, given
from tinyvllm.config import EngineConfig, Options, check, kind_of, logger
from tinyvllm.engine import Request

from .async_engine import AsyncLLM

# Answered without a key, and before the model is there
OPEN = {"/", "/health", "/version", "/metrics", "/docs", "/openapi.json"}
COUNTERS = {"prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens"}
GAUGES = {"num_requests_running", "num_requests_waiting"}
# Of RequestMetrics
TIMES = {"ttft": "time_to_first_token", "latency": "e2e_request_latency", "queue_time": "request_queue_time"}
BUCKETS = [digit * 10.0**power for power in range(-3, 4) for digit in (1, 2.5, 5)]   # seconds


@dataclasses.dataclass(frozen=True)
class ServerConfig(Options):
  """What `tinyvllm serve` takes besides EngineConfig, with vLLM's names."""
  host: str = "127.0.0.1"
  port: Annotated[int, 0, 65535] = 8000                   # 0: any that is free
  api_key: str | None = None                              # what clients must send; None: TINYVLLM_API_KEY's, if set
  served_model_name: str | None = None                    # None: the folder's name
  max_queue: Annotated[int, 0, 2**31 - 1] = 256           # texts that may wait; more are refused with 429
  request_timeout: Annotated[float | int | None, 0.001, 2**31] = None   # seconds; then a request ends with "abort"
  shutdown_timeout: Annotated[float | int, 0, 2**31] = 30   # seconds for running requests once a signal has come
  max_body_size: Annotated[int, 1, 2**40] = 2**22         # bytes
  stream_interval: Annotated[int, 1, 2**31] = 1           # tokens in an event, if they come that fast
  allowed_origins: Annotated[list | None, str] = None     # of other pages in a browser (CORS)


def body(title: str, **types: Any) -> Any:
  """The type of a body, or of a part. What is no tuple may be left out, or null."""
  fields: Any = {name: kind if isinstance(kind, tuple) else (kind | None, None) for name, kind in types.items()}
  return pydantic.create_model(title, __config__=pydantic.ConfigDict(extra="forbid", strict=True), **fields)


FIELDS = {f.name: kind_of(f)[0] for f in dataclasses.fields(SamplingParams)} | {"structured_outputs": dict}
Schema = body("JSONSchema", schema_=(dict, pydantic.Field(alias="schema")), name=str, description=str, strict=bool)
Format = body("ResponseFormat", type=(Literal["text", "json_object", "json_schema"], ...), json_schema=Schema)
COMMON = FIELDS | {"model": str, "stream": bool, "stream_options": body("StreamOptions", include_usage=bool),
                   "response_format": Format, "priority": int, "user": str}
Completion: Any = body("CompletionRequest", **COMMON, echo=bool,
                       prompt=(str | list[str] | list[int] | list[list[int]], ...))
Chat: Any = body("ChatCompletionRequest", **COMMON | {"logprobs": bool}, top_logprobs=int, max_completion_tokens=int,
                 messages=(list[dict], ...))
Text: Any = body("TokenizeRequest", model=str, prompt=str, messages=list[dict], add_special_tokens=bool)
Tokens: Any = body("DetokenizeRequest", model=str, tokens=(list[int], ...))
Failure: Any = body("ErrorResponse", error=(dict[str, Any], ...))


def fields_of(route: Any) -> dict[str, Any]:
  """Of the body that a route takes, if any."""
  return getattr(route.__annotations__.get("body"), "model_fields", {})


def error_of(status: int, message: str, param: str | None = None) -> dict[str, dict]:
  name = "Request Entity Too Large" if status == 413 else http.HTTPStatus(status).phrase   # Python 3.13 names it anew
  kind = name.replace(" ", "").removesuffix("Error") + "Error"
  return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def refuse(status: int, message: str, param: str | None = None) -> fastapi.Response:
  return JSONResponse(error_of(status, message, param), status, {"Retry-After": "1"} if status in (429, 503) else None)


def explain(request: fastapi.Request, error: Exception) -> fastapi.Response:
  """The answer to what a route raises."""
  if isinstance(error, StarletteHTTPException): return refuse(error.status_code, error.detail)
  if isinstance(error, RuntimeError): return refuse(500, str(error))
  if isinstance(error, RequestValidationError):
    where = [str(x) for x in error.errors()[0]["loc"][1:]]
    return refuse(400, f"{'.'.join(where) or 'the body'}: {error.errors()[0]['msg']}", where[0] if where else None)
  found = re.match(r"(\w+)[=:]", str(error))   # how this project's errors begin
  return refuse(400, str(error), found and {"prompt_token_ids": "prompt"}.get(found[1], found[1]))


def usage_of(requests: list[Request]) -> dict[str, Any]:
  prompt = sum(request.sequences[0].num_prompt for request in requests)   # samples share it
  new = sum(request.metrics.num_generated for request in requests)
  return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
          "prompt_tokens_details": {"cached_tokens": sum(request.sequences[0].num_cached for request in requests)}}


def plain(message: dict[str, Any]) -> dict[str, Any]:
  """A message whose content is a text, of the parts that it may have come in."""
  content, said = message.get("content"), isinstance(message.get("role"), str)
  parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
  texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
  check(said and all(isinstance(text, str) for text in texts),
        "messages: each must have a role, and content that is a str or a list of parts of type text")
  return {**message, "content": "".join(map(str, texts))}


class Answer:
  """What a request is answered with: the object around its choices, and each choice, whole or a part of it. kind:
  "cmpl", "chatcmpl" or "generate"."""
  def __init__(self, kind: str, name: str, body: Any, params: SamplingParams, tokenizer: Any):
    self.chat, self.kind, self.body, self.params, self.tokenizer = kind == "chatcmpl", kind, body, params, tokenizer
    self.head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}
    self.begun = dict[int, tuple[int, list[int]]]()   # of each choice, the length of its text and its last token

  def whole(self, choices: list[dict], streamed: bool) -> dict[str, Any]:
    kind = "chat.completion" + ".chunk" * streamed if self.chat else "text_completion"
    texts = {"text": [choice["text"] for choice in choices]} if self.kind == "generate" else {}
    return {**self.head, "object": kind, "choices": choices, **texts}

  def choice(self, number: int, output: RequestOutput, c: CompletionOutput, streamed: bool) -> dict[str, Any]:
    index, text, ids, known = number * self.params.n + c.index, c.text, c.token_ids, cast(Any, c.logprobs)
    offset, before = self.begun.get(index, (0, output.prompt_token_ids[-1:]))
    first, extra = index not in self.begun, dict[str, Any]()
    if first and self.body.prompt_logprobs is not None:   # vLLM's name and form
      extra["prompt_logprobs"] = [of and {i: x._asdict() for i, x in of.items()} for of in output.prompt_logprobs or []]
    if first and not self.chat and self.body.echo:
      text = (output.prompt or self.tokenizer.decode(output.prompt_token_ids)) + text
      ids, before = output.prompt_token_ids + ids, []
      known = None if known is None else [*(output.prompt_logprobs or []), *known]
    self.begun[index] = offset + len(text), ids[-1:] or before
    said = {"content": text} if streamed else {"role": "assistant", "content": text}
    return {"index": index, **({"delta" if streamed else "message": said} if self.chat else {"text": text}),
            "logprobs": None if known is None else self.logprobs(before, ids, known, offset),
            "finish_reason": c.finish_reason, "stop_reason": c.stop_reason, **extra}

  def logprobs(self, before: list[int], ids: list[int], known: list, offset: int) -> dict[str, list]:
    """OpenAI's two forms of what is known of each token; nothing is of a prompt's first."""
    decode, befores = self.tokenizer.decode, [before, *([i] for i in ids)]
    def piece(before: list[int], token: int, skip: bool = False) -> str:   # alone, some would lose their space
      return decode([*before, token], skip)[len(decode(before, skip)):]
    def entry(before: list[int], token: int, logprob: float) -> dict[str, Any]:
      return {"token": (text := piece(before, token)), "logprob": logprob, "bytes": [*text.encode()]}
    rows = [*zip(befores, ids, known, strict=False)]
    if self.chat:
      best = [sorted((x.rank, j, x.logprob) for j, x in of.items() if x.rank <= self.params.logprobs) for of in known]
      return {"content": [{**entry(b, i, of[i].logprob), "top_logprobs": [entry(b, j, x) for _, j, x in top]}
                          for (b, i, of), top in zip(rows, best, strict=True)]}
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
    self.loading, self.options = (model, engine), options
    self.key = options.api_key or os.environ.get("TINYVLLM_API_KEY")
    self.name = options.served_model_name or (pathlib.Path(model).resolve().name if model else "tinyvllm")
    self.registry = CollectorRegistry()
    def histogram(name: str) -> Histogram:
      found = Histogram(f"tinyvllm:{name}_seconds", name, ["model_name"], registry=self.registry, buckets=BUCKETS)
      return found.labels(self.name)
    self.times = {field: histogram(name) for field, name in TIMES.items()}
    self.gaps = histogram("inter_token_latency")
    self.ended = Counter("tinyvllm:request_success", "texts", ["model_name", "finished_reason"], registry=self.registry)
    self.registry.register(self)   # type: ignore[arg-type]
    failures: Any = dict.fromkeys(("4XX", "5XX"), {"model": Failure})
    self.app = fastapi.FastAPI(title="tinyvllm", version=__version__, lifespan=self.lifespan, responses=failures)
    for raised in (StarletteHTTPException, RequestValidationError, RuntimeError, ValueError):
      self.app.add_exception_handler(raised, explain)
    routes: dict[str, Any] = {
      "/": self.page, "/health": self.health, "/version": self.version, "/metrics": self.metrics,
      "/v1/models": self.models, "/v1/completions": self.completions, "/v1/chat/completions": self.chat,
      "/generate": self.generate, "/tokenize": self.tokenize, "/detokenize": self.detokenize}
    for path, route in routes.items():
      kind = {"/": HTMLResponse, "/metrics": PlainTextResponse}.get(path, JSONResponse)
      streamed: Any = {200: {"content": {"text/event-stream": {}}}} if "stream" in fields_of(route) else {}
      self.app.add_api_route(path, route, methods=["POST" if fields_of(route) else "GET"], response_class=kind,
                             responses=streamed)
    app: Any = self.gate
    # The lists: of methods, of headers
    if options.allowed_origins: app = cors.CORSMiddleware(app, options.allowed_origins, ["*"], ["*"])
    super().__init__(uvicorn.Config(app, options.host, options.port, interface="asgi3", access_log=False,
                                    timeout_graceful_shutdown=int(options.shutdown_timeout) + 5))

  # From start to end

  @contextlib.asynccontextmanager
  async def lifespan(self, app: Any) -> AsyncIterator[None]:
    threading.Thread(target=self.load, daemon=True).start()   # a signal does not wait for it
    report = asyncio.create_task(self.report())
    yield
    report.cancel()

  def load(self) -> None:
    try: self.llm = AsyncLLM(self.loading[0], self.options.stream_interval, prepare=True, **self.loading[1])
    except Exception as error: self.error, self.should_exit = error, True

  def state(self) -> str:
    return "the server is shutting down" if self.should_exit else self.llm.state if self.llm else "the model is loading"

  def handle_exit(self, sig: int, frame: Any) -> None:
    self.should_exit, self.force_exit = True, self.should_exit and sig == signal.SIGINT

  async def shutdown(self, sockets: Any = None) -> None:
    """uvicorn's, which waits for all answers: what runs when the time is up is aborted."""
    asyncio.get_running_loop().call_later(self.options.shutdown_timeout, self.abort, self.requests)
    await super().shutdown(sockets)

  def abort(self, requests: Iterable[Request]) -> None:
    for request in requests: self.llm.abort(request.request_id)

  async def gate(self, scope: Any, receive: Any, send: Any) -> None:
    """What comes before any route: the body's size, the key, and that a client which goes away ends its request."""
    if scope["type"] != "http": return await self.app(scope, receive, send)
    sent, size, more, limit = list[bytes](), 0, True, self.options.max_body_size
    headers = fastapi.Request(scope).headers
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > 8 * limit: size, more = int(length), False
    while more and size <= 8 * limit:   # a client reads an answer once it has sent all
      message = await receive()
      if message["type"] == "http.disconnect": return
      size, more = size + len(message["body"]), message["more_body"]
      if size <= limit: sent.append(message["body"])
    refused = None
    if size > limit: refused = refuse(413, f"the body is larger than {limit} bytes: see --max-body-size")
    elif scope["path"] not in OPEN:
      if self.key and not hmac.compare_digest(headers.get("authorization", "").encode(), f"Bearer {self.key}".encode()):
        refused = refuse(401, "missing or wrong API key: send the header Authorization: Bearer KEY")
      elif self.state(): refused = refuse(503, self.state())
    if refused: return await refused(scope, receive, send)
    unread, gone = [{"type": "http.request", "body": b"".join(sent)}], asyncio.create_task(receive())
    async def replay() -> Any: return unread.pop() if unread else await asyncio.shield(gone)
    route = asyncio.create_task(self.app(scope, replay, send))
    try: await asyncio.wait((gone, route), return_when=asyncio.FIRST_COMPLETED)
    finally:
      for task in (gone, route): task.cancel()
    with contextlib.suppress(asyncio.CancelledError): await route

  # What operators see

  def collect(self) -> Iterator[Any]:
    """What prometheus_client asks for."""
    found = self.llm.llm.get_metrics() if self.llm else {"blocks_used": 0, "blocks_free": 1}
    found["kv_cache_usage_perc"] = found["blocks_used"] / (found["blocks_used"] + found["blocks_free"])
    for name in sorted({*COUNTERS, *GAUGES, "kv_cache_usage_perc"}):
      kind = core.CounterMetricFamily if name in COUNTERS else core.GaugeMetricFamily
      family = kind(f"tinyvllm:{name}", name, labels=["model_name"])
      family.add_metric([self.name], found.get(name, 0))
      yield family

  async def report(self) -> None:
    """vLLM's line of the log, every 10 s while there is work."""
    before = dict.fromkeys(("steps", "prompt_tokens", "generation_tokens"), 0)
    while True:
      await asyncio.sleep(10)
      now = self.llm.llm.get_metrics() if self.llm else before
      if now["steps"] > before["steps"]:
        prompt, generation = ((now[name] - before[name]) / 10 for name in ("prompt_tokens", "generation_tokens"))
        logger.info(
          "Engine 000: Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d "
          "reqs, Waiting: %d reqs, GPU KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%", prompt, generation,
          now["num_requests_running"], now["num_requests_waiting"],
          100 * now["blocks_used"] / (now["blocks_used"] + now["blocks_free"]),
          100 * now["prefix_cache_hits"] / max(1, now["prefix_cache_queries"]))
      before = now

  async def watched(self, requests: list[Request]) -> AsyncIterator[tuple[int, RequestOutput]]:
    """AsyncLLM.stream, with its times taken and its time limited."""
    timer = asyncio.get_running_loop().call_later(self.options.request_timeout or 2**31, self.abort, requests)
    last: dict[Request, tuple[float, int]] = {}   # when, and how many tokens there were
    def observe(request: Request) -> None:
      now, count = time.monotonic(), request.metrics.num_generated
      when, before = last.get(request, (now, 0))
      last[request] = now, count
      for _ in range(max(1, before), count): self.gaps.observe((now - when) / (count - before))
    def ended(request: Request) -> None:
      self.requests.remove(request)
      observe(request)   # the tokens that nobody has waited for
      for seq in request.sequences: self.ended.labels(self.name, seq.finish_reason).inc()
      for field, histogram in self.times.items():
        if (seconds := getattr(request.metrics, field)) == seconds: histogram.observe(seconds)   # else NaN: never
    self.requests.update(requests)
    try:
      async with contextlib.aclosing(self.llm.stream(requests, ended)) as stream:
        async for number, output in stream:
          observe(requests[number])
          yield number, output
    finally: timer.cancel()

  # Routes

  async def page(self) -> fastapi.Response: return FileResponse(pathlib.Path(__file__).parent / "chat.html")
  async def version(self) -> dict[str, str]: return {"version": __version__}
  async def health(self) -> fastapi.Response: return refuse(503, self.state()) if self.state() else JSONResponse({})
  async def metrics(self) -> fastapi.Response:
    return fastapi.Response(generate_latest(self.registry), media_type=CONTENT_TYPE_LATEST)

  async def models(self) -> dict[str, Any]:
    return {"object": "list", "data": [{
      "id": self.name, "object": "model", "created": int(time.time()), "owned_by": "tinyvllm", "root": self.name,
      "parent": None, "max_model_len": self.llm.llm.max_model_len}]}

  async def tokenize(self, body: Text) -> dict[str, Any]:
    engine, chat = self.llm.llm, body.messages is not None
    check((body.prompt is None) == chat, "prompt: give either prompt or messages")
    text = engine.tokenizer.apply_chat_template([*map(plain, body.messages)]) if chat else body.prompt
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
    given = {name: value for name in FIELDS if (value := getattr(body, name)) is not None}
    if chat:
      limits = (body.max_completion_tokens, body.max_tokens, 2**31 - 1)   # the last: up to max_model_len
      given["max_tokens"] = next(limit for limit in limits if limit is not None)
      check(body.logprobs or body.top_logprobs is None, "top_logprobs: only with logprobs=true")
      given["logprobs"] = body.top_logprobs or 0 if body.logprobs else None
    elif body.echo and "logprobs" in given: given.setdefault("prompt_logprobs", given["logprobs"])
    if (form := body.response_format) and form.type != "text":
      check("structured_outputs" not in given, "response_format: only without structured_outputs")
      check((form.type == "json_schema") == bool(form.json_schema), "response_format: json_schema belongs to its type")
      given["structured_outputs"] = {"json": form.json_schema.schema_} if form.json_schema else {"json_object": True}
    return SamplingParams(**given)

  async def answer(self, kind: str, body: Any) -> fastapi.Response:
    if body.model not in (None, self.name): return refuse(404, f"The model `{body.model}` does not exist.", "model")
    check(body.stream or not body.stream_options, "stream_options: only with stream=true")
    engine, params = self.llm.llm, self.params(body, kind == "chatcmpl")
    answer = Answer(kind, self.name, body, params, engine.tokenizer)
    given = {"messages": [*map(plain, body.messages)]} if kind == "chatcmpl" else body.prompt
    if not isinstance(given, list) or given and isinstance(given[0], int): given = [given]
    check(given, "prompt=[] must not be empty")
    prompts = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in given]
    most = self.options.max_queue + engine.config.max_num_seqs
    new = len(prompts) * params.n
    check(params.n == 1 or new <= most, f"n={params.n} for {len(prompts)} prompts: at most {most} texts may wait "
          "(--max-queue) and run (--max-num-seqs)")
    def texts() -> int: return sum(not seq.finish_reason for request in self.requests for seq in request.sequences)
    busy = refuse(429, f"at most {most} texts may wait (--max-queue) and run (--max-num-seqs): try again")
    if texts() + new > most: return busy   # before they are made, which takes time, and after: others may have come
    requests = [await asyncio.to_thread(engine.request, f"{answer.head['id']}-{i}", prompt, params, body.priority or 0)
                for i, prompt in enumerate(prompts)]
    if texts() + new > most: return busy
    stream = self.watched(requests)
    first = await anext(stream)   # from here on they are in the queue
    if body.stream:
      return StreamingResponse(self.events(answer, first, stream, requests), media_type="text/event-stream")
    async for _ in stream: pass
    outputs = enumerate(request.output() for request in requests)
    choices = [answer.choice(i, output, c, False) for i, output in outputs for c in output.outputs]
    return JSONResponse({**answer.whole(choices, False), "usage": usage_of(requests)})

  async def events(self, answer: Answer, news: Any, stream: Any, requests: list[Request]) -> AsyncIterator[str]:
    def event(content: dict) -> str: return f"data: {json.dumps(content)}\n\n"
    options, ended = answer.body.stream_options, set[tuple[int, int]]()
    usage = {"usage": None} if options and options.include_usage else {}
    if answer.chat:
      for i in range(answer.params.n):
        role = {"index": i, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        yield event({**answer.whole([role], True), **usage})
    try:
      while news:
        i, output = news
        for c in output.outputs:
          if (i, c.index) in ended or not (c.token_ids or c.finish_reason): continue
          if c.finish_reason: ended.add((i, c.index))
          yield event({**answer.whole([answer.choice(i, output, c, True)], True), **usage})
        news = await anext(stream, None)
    except RuntimeError as error: yield event(error_of(500, str(error)))
    else:
      if usage: yield event({**answer.whole([], True), "usage": usage_of(requests)})
      yield "data: [DONE]\n\n"
    finally: await stream.aclose()


def main(argv: list[str]) -> int:
  """`tinyvllm serve`. Raises what loading the model raised."""
  parser = argparse.ArgumentParser(prog="tinyvllm serve", argument_default=argparse.SUPPRESS,
                                   description="Answer HTTP requests in OpenAI's protocol.")
  parser.add_argument("model", nargs="?", default=None, help="a model's folder; default: the shipped model")
  add_flags(parser, EngineConfig, ServerConfig)
  args = vars(parser.parse_args(argv))
  config = ServerConfig(**given(args, ServerConfig))
  family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
  try: socket.create_server((config.host, config.port), family=family).close()   # before a model is loaded for nothing
  except OSError as error: raise ValueError(f"host={config.host!r}, port={config.port}: {error.strerror}") from error
  server = Server(args["model"], given(args, EngineConfig), config)
  server.run()
  if server.llm: server.llm.shutdown()
  if server.error: raise server.error
  return 0
