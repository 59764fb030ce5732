"""The HTTP server: routes, the middleware in front of them, startup and shutdown. It listens before the model is
loaded; requests get HTTP 503 until then. `Server.requests` holds all unfinished requests."""
import argparse, asyncio, collections, contextlib, dataclasses, hmac, os, pathlib, signal, socket, threading, time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import fastapi, fastapi.middleware.cors as cors, fastapi_offline, uvicorn
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from tinyvllm import __version__
from tinyvllm.config import EngineConfig, InputError, Options, check, option
from tinyvllm_extra import hub
from tinyvllm_extra.flags import add_flags, select_options, set_log_level
from tinyvllm_extra.models import find_model
from tinyvllm_extra.weights import open_checkpoint

from . import protocol
from .async_engine import AsyncLLM, IndexedOutput, Request
from .metrics import Metrics, log_throughput
from .protocol import ChatRequest, CompletionRequest, ResponseBuilder, error_response, event
from .tools import with_parsed_arguments

# Paths that work without an API key and before the model is loaded
OPEN_PATHS = {"/", "/health", "/version", "/metrics", "/docs", "/openapi.json",
              *(f"/static-offline-docs/{x}" for x in ("swagger-ui-bundle.js", "swagger-ui.css", "favicon.png"))}
EVENT_STREAM = "text/event-stream"


@dataclasses.dataclass(frozen=True)
class ServerConfig(Options):
  """Server options, under vLLM's names."""
  host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: every network interface")
  port: int = option(8000, "TCP port; 0: any free port", min=0, max=65535)
  api_key: str | None = option(None, "API key of clients (default: $TINYVLLM_API_KEY)")
  served_model_name: str | None = option(None, "Model name in the API (default: folder name)")
  max_queue: int = option(256, "Maximum waiting sequences, then HTTP 429", min=0, max=2**31 - 1)
  request_timeout: float | None = option(None, "Seconds until a request aborts (default: none)", min=0.001, max=2**31)
  shutdown_timeout: float = option(30, "Seconds for requests to finish after a signal", min=0, max=2**31)
  max_body_size: int = option(2**22, "Maximum size of a request body in bytes", min=1, max=2**40)
  stream_interval: int = option(1, "Minimum number of new tokens per stream event", min=1, max=2**31)
  allowed_origins: list[str] | None = option(None, "Web origins that may call the API, CORS (default: none)")
  prefix_cache_file: str | None = option(None, "File to load and save the prefix cache (default: none)")


class Gate:
  """ASGI middleware in front of all routes: limits the body size, checks the API key, returns HTTP 503 until the server
  is ready, and cancels the route when the client disconnects. not_ready: returns the 503 response, None once ready."""
  def __init__(self, app: Any, options: ServerConfig, not_ready: Callable[[], fastapi.Response | None]):
    self.app = app
    self.limit = options.max_body_size
    self.key = options.api_key or os.environ.get("TINYVLLM_API_KEY")
    self.not_ready = not_ready

  async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http": return await self.app(scope, receive, send)
    headers = fastapi.Request(scope).headers
    try: body = await self.read_body(headers, receive)
    except ConnectionResetError: return
    refusal = self.refusal(scope["path"], headers, body)
    if refusal: return await refusal(scope, receive, send)
    request = [{"type": "http.request", "body": body}]
    disconnect = asyncio.create_task(receive())
    async def replay() -> Any: return request.pop() if request else await asyncio.shield(disconnect)
    route = asyncio.create_task(self.app(scope, replay, send))
    try: await asyncio.wait((disconnect, route), return_when=asyncio.FIRST_COMPLETED)
    finally:
      for task in (disconnect, route): task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception): await route   # `explain` has responded and logged it

  async def read_body(self, headers: Any, receive: Any) -> bytes | None:
    """Return the request body, or None if it is too large. Read and discard up to 8 times the limit first, because
    clients read the response only after sending the body. Raises ConnectionResetError if the client disconnects."""
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > 8 * self.limit: return None
    size = 0
    chunks: list[bytes] = []
    message: Any = {"more_body": True}
    while message["more_body"] and size <= 8 * self.limit:
      message = await receive()
      if message["type"] == "http.disconnect": raise ConnectionResetError
      size += len(message["body"])
      if size <= self.limit: chunks.append(message["body"])
    return b"".join(chunks) if size <= self.limit else None

  def refusal(self, path: str, headers: Any, body: bytes | None) -> fastapi.Response | None:
    """Return the error response to send instead of calling a route, or None."""
    if body is None: return error_response(413, f"the body is larger than --max-body-size={self.limit} bytes")
    if path in OPEN_PATHS: return None
    expected = f"Bearer {self.key}"
    if self.key and not hmac.compare_digest(headers.get("authorization", "").encode(), expected.encode()):
      return error_response(401, "missing or wrong API key: send the header Authorization: Bearer KEY")
    return self.not_ready()


class Server(uvicorn.Server):
  """A uvicorn server that listens at once, loads the model in a thread, and runs until a signal arrives."""
  def __init__(self, model: str | None, engine_options: dict[str, Any], options: ServerConfig):
    self.llm: Any = None   # AsyncLLM once the model is loaded
    self.requests = set[Request]()   # unfinished
    self.error: Exception | None = None   # raised while loading the model
    self.code = 0   # exit code
    self.folder = model
    self.engine_options = engine_options
    self.options = options
    self.name = options.served_model_name or hub.served_name(model)
    self.observer = Metrics(self.name, self.engine_metrics)
    app: Any = Gate(self.routes(), options, self.not_ready)
    if options.allowed_origins:
      app = cors.CORSMiddleware(app, options.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    super().__init__(uvicorn.Config(app, options.host, options.port, interface="asgi3", access_log=False,
                                    timeout_graceful_shutdown=int(options.shutdown_timeout) + 5))

  def routes(self) -> fastapi.FastAPI:
    error: Any = {"model": protocol.ErrorResponse}
    app = fastapi_offline.FastAPIOffline(   # /docs loads nothing from a CDN
      title="tinyvllm", version=__version__, exception_handlers=protocol.EXCEPTION_HANDLERS, redoc_url=None,
      responses={"4XX": error, "5XX": error})
    app.get("/", response_class=HTMLResponse)(self.page)
    app.get("/metrics", response_class=PlainTextResponse)(self.metrics)
    reads: Any = {"/health": self.health, "/version": self.version, "/v1/models": self.models,
                  "/v1/models/{name:path}": self.model}
    for path, route in reads.items(): app.get(path)(route)
    for path, route in {"/tokenize": self.tokenize, "/detokenize": self.detokenize}.items(): app.post(path)(route)
    streams: Any = {"/generate": self.generate, "/v1/completions": self.completions, "/v1/chat/completions": self.chat}
    for path, route in streams.items(): app.post(path, responses={200: {"content": {EVENT_STREAM: {}}}})(route)
    return app

  # Start and shutdown

  async def startup(self, sockets: Any = None) -> None:
    threading.Thread(target=self.load, daemon=True).start()   # daemon: a signal does not wait for it
    self.log_task = asyncio.create_task(log_throughput(self.engine_metrics))
    await super().startup(sockets)

  def load(self) -> None:
    file = self.options.prefix_cache_file
    try: self.llm = AsyncLLM(self.folder, self.options.stream_interval, True, file, **self.engine_options)
    except Exception as error:
      self.error = error
      self.should_exit = True

  def state(self) -> str:
    """Return why the server is not ready, or "" if it is."""
    if self.should_exit: return "the server is shutting down"
    return self.llm.state if self.llm else "the model is loading"

  def not_ready(self) -> fastapi.Response | None:
    """Return HTTP 503, or None if the server is ready."""
    state = self.state()
    return error_response(503, state) if state else None

  def engine_metrics(self) -> dict[str, Any]: return self.llm.llm.get_metrics() if self.llm else collections.Counter()

  def handle_exit(self, sig: int, frame: Any) -> None:
    if sig == signal.SIGINT and self.state(): self.code = 128 + sig   # before the server was ready, or a second signal
    self.force_exit = self.should_exit and sig == signal.SIGINT   # a second signal
    self.should_exit = True

  async def shutdown(self, sockets: Any = None) -> None:
    """Wait for all responses, as uvicorn does, but abort requests after the shutdown timeout."""
    asyncio.get_running_loop().call_later(self.options.shutdown_timeout, self.abort, self.requests)
    await super().shutdown(sockets)
    if self.llm and self.options.prefix_cache_file: await asyncio.to_thread(self.llm.shutdown)   # ignores signals

  def abort(self, requests: Iterable[Request]) -> None:
    for request in requests: self.llm.abort(request.request_id)

  # Routes

  async def page(self) -> fastapi.Response: return FileResponse(pathlib.Path(__file__).parent / "chat.html")
  async def version(self) -> dict[str, str]: return {"version": __version__}

  async def health(self) -> fastapi.Response: return self.not_ready() or JSONResponse({})
  async def metrics(self) -> fastapi.Response:
    return fastapi.Response(generate_latest(self.observer.registry), media_type=CONTENT_TYPE_LATEST)

  async def models(self) -> dict[str, Any]: return {"object": "list", "data": [await self.model(self.name)]}

  async def model(self, name: str) -> Any:
    if name != self.name: return error_response(404, f"The model `{name}` does not exist.", "model")
    return {"id": self.name, "object": "model", "created": int(time.time()), "owned_by": "tinyvllm", "root": self.name,
            "parent": None, "max_model_len": self.llm.llm.max_model_len}

  async def tokenize(self, body: protocol.TokenizeRequest) -> dict[str, Any]:
    engine = self.llm.llm
    chat = body.messages is not None
    check((body.prompt is None) == chat, "prompt: set either prompt or messages")
    text = body.prompt
    if chat: text = engine.tokenizer.apply_chat_template([*map(with_parsed_arguments, body.messages)])
    ids = await asyncio.to_thread(engine.tokenizer.encode, text, not chat and body.add_special_tokens is not False)
    return {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids}

  async def detokenize(self, body: protocol.DetokenizeRequest) -> dict[str, str]:
    size = self.llm.llm.model_config.vocab_size
    check(all(0 <= i < size for i in body.tokens), f"tokens: each id must be between 0 and {size - 1}")
    return {"prompt": self.llm.llm.tokenizer.decode(body.tokens, False)}

  async def generate(self, body: CompletionRequest) -> fastapi.Response: return await self.answer("generate", body)
  async def completions(self, body: CompletionRequest) -> fastapi.Response: return await self.answer("cmpl", body)
  async def chat(self, body: ChatRequest) -> fastapi.Response: return await self.answer("chatcmpl", body)

  # Generation

  async def answer(self, kind: str, body: Any) -> fastapi.Response:
    """Run a request and return its response. kind: see ResponseBuilder."""
    if body.model not in (None, self.name): return await self.model(body.model)
    check(body.stream or not body.stream_options, "stream_options: requires stream=true")
    engine = self.llm.llm
    chat = kind == "chatcmpl"
    params = protocol.sampling_params(body, engine.sampling_defaults, chat)
    builder = ResponseBuilder(kind, self.name, body, params, engine.tokenizer)
    prompts = await asyncio.to_thread(protocol.chat_token_ids, body, engine.tokenizer) if chat else body.prompt
    if not isinstance(prompts, list) or prompts and isinstance(prompts[0], int): prompts = [prompts]
    check(prompts and all(prompts), "prompt: each prompt must have at least one token")
    num_new = len(prompts) * params.n
    limit = self.options.max_queue + engine.config.max_num_seqs
    check(params.n == 1 or num_new <= limit,
          f"n={params.n}: {num_new} sequences, but --max-queue and --max-num-seqs allow {limit}")
    full = error_response(429, f"queue full: --max-queue and --max-num-seqs allow {limit} sequences: retry later")
    # Check the queue again after make_request, which takes time: other requests may have arrived
    if self.num_unfinished() + num_new > limit: return full
    requests = [await asyncio.to_thread(engine.make_request, f"{builder.head['id']}-{i}",
                                        {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt,
                                        params, body.priority or 0) for i, prompt in enumerate(prompts)]
    if self.num_unfinished() + num_new > limit: return full
    stream = self.stream(requests)
    outputs = await anext(stream)   # the requests are now in the queue
    if body.stream:
      return StreamingResponse(self.events(builder, outputs, stream, requests), media_type=EVENT_STREAM)
    async for _ in stream: pass
    finished = enumerate(request.output() for request in requests)
    choices = [builder.choice(i, output, completion) for i, output in finished for completion in output.outputs]
    return JSONResponse({**builder.response(choices), "usage": protocol.usage_of(requests)})

  def num_unfinished(self) -> int:
    """Return the number of waiting and running sequences."""
    return sum(not seq.finish_reason for request in self.requests for seq in request.sequences)

  async def stream(self, requests: list[Request]) -> AsyncIterator[list[IndexedOutput]]:
    """Yield AsyncLLM.stream's outputs; observe the requests' metrics; abort the requests after the timeout."""
    timer = asyncio.get_running_loop().call_later(self.options.request_timeout or 2**31, self.abort, requests)

    def on_end(request: Request) -> None:
      self.requests.remove(request)
      self.observer.observe_end(request)

    self.requests.update(requests)
    try:
      async with contextlib.aclosing(self.llm.stream(requests, on_end)) as stream:
        async for outputs in stream:
          for i, _ in outputs:
            if requests[i] in self.requests: self.observer.observe_tokens(requests[i])
          yield outputs
    finally: timer.cancel()

  async def events(self, builder: ResponseBuilder, outputs: Any, stream: Any,
                   requests: list[Request]) -> AsyncIterator[bytes]:
    """Yield server-sent events. A step's events are yielded together: writing to the socket is their main cost."""
    usage = {"usage": None} if getattr(builder.body.stream_options, "include_usage", False) else {}
    role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    pending = [event({**builder.response([{"index": i, **role}]), **usage})
               for i in range(builder.params.n if builder.chat else 0)]
    finished = set[tuple[int, int]]()
    try:
      while outputs:
        for i, output in outputs:
          for completion in output.outputs:
            if (i, completion.index) in finished or not (completion.token_ids or completion.finish_reason): continue
            if completion.finish_reason: finished.add((i, completion.index))
            pending.append(event({**builder.response([builder.choice(i, output, completion)]), **usage}))
        if pending and len(finished) < len(requests) * builder.params.n:   # else they are sent with the last event
          yield b"".join(pending)
          pending.clear()
        outputs = await anext(stream, None)
      if usage: pending.append(event({**builder.response([]), "usage": protocol.usage_of(requests)}))
      yield b"".join([*pending, b"data: [DONE]\n\n"])
    except Exception as error: yield event(protocol.internal_error(error))
    finally: await stream.aclose()


def check_port(host: str, port: int) -> None:
  """Raise InputError if the server cannot listen on this address. Called before the model is loaded."""
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  try: socket.create_server((host, port), family=family).close()
  except OSError as error: raise InputError(f"host={host!r}, port={port}: {error.strerror}") from error


def main(argv: list[str]) -> int:
  """Run `tinyvllm serve` and return the exit code. Raises any exception that loading the model raised."""
  parser = argparse.ArgumentParser(usage="tinyvllm serve [MODEL] [options]", argument_default=argparse.SUPPRESS,
                                   description="Serve the OpenAI API over HTTP.")
  parser.add_argument("model", nargs="?", help=argparse.SUPPRESS)
  add_flags(parser, EngineConfig, ServerConfig)
  args = vars(parser.parse_args(argv))
  set_log_level(args)
  config = ServerConfig(**select_options(args, ServerConfig))
  folder = args.get("model")
  engine = select_options(args, EngineConfig)
  if folder:   # download it, or report a bad one, before listening
    path = hub.local_path(folder, **engine)
    find_model(open_checkpoint(path).hf_config, path)
  check_port(config.host, config.port)
  server = Server(folder, engine, config)
  if config.prefix_cache_file: signal.signal(signal.SIGUSR1, lambda *_: server.llm and server.llm.save_prefix_cache())
  server.run()
  if server.llm: server.llm.shutdown()
  if server.error: raise server.error
  return server.code
