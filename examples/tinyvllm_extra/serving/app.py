"""The HTTP server: routes, the middleware in front of them, startup and shutdown. It listens before the
model is loaded; requests get HTTP 503 until then."""
import asyncio, base64, contextlib, functools, hashlib, hmac, logging, os, pathlib, signal, socket, threading, time
import typing, uuid
from collections.abc import Callable, Coroutine

import fastapi, fastapi.middleware.cors as cors, fastapi.routing, pydantic, starlette.requests, uvicorn
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tinyvllm import __version__
from tinyvllm.config import InputError, JsonObject, logger
from tinyvllm_extra.formats import hub
from tinyvllm_extra.pooling.pooling_routes import PoolingServing

from . import agents, answers, async_engine, generation, prometheus, protocol
from .errors import ErrorJSON, RequestValidationError, StarletteHTTPException, explain
from .server_config import ServerConfig

QUIET_PATHS = {"/health", "/ping", "/load", "/metrics"}   # their requests are logged at level DEBUG
OPEN_PATHS = {"/", "/debug", "/version", "/openapi.json", *QUIET_PATHS}   # need neither an API key nor a loaded model
PAGE = pathlib.Path(__file__).with_name("page")
MAX_HEADERS = 2**16   # maximum size of a request's headers in bytes
Routes = dict[str, Callable[..., object]]   # functions by path


async def read_body(request: fastapi.Request, limit: int, max_read: int) -> bytes | None:
  """Return the request body, or None if it is larger than `limit`. Read and discard up to `max_read` bytes first,
  because clients read the response only after sending the body. Raises ClientDisconnect."""
  length = request.headers.get("content-length", "")
  if length.isdecimal() and int(length) > max_read: return None
  size = 0
  chunks: list[bytes] = []
  async for chunk in request.stream():
    size += len(chunk)
    if size <= limit: chunks.append(chunk)
    if size > max_read: break
  return b"".join(chunks) if size <= limit else None


def refuse(path: str, headers: Headers, keys: list[bytes]) -> fastapi.Response | None:
  """Return the error response for a request's headers, or None. keys: of clients; empty: any may call the API."""
  if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADERS:
    return ErrorJSON(431, f"the headers are larger than {MAX_HEADERS} bytes")
  if path in OPEN_PATHS: return None
  encoding = headers.get("content-encoding", "identity")
  if encoding != "identity": return ErrorJSON(415, f"Content-Encoding: {encoding} is not supported: use none")
  scheme, _, token = headers.get("authorization", "").partition(" ")
  values = [token if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]   # bytes, decoded as latin-1
  if not keys or any(hmac.compare_digest(x.encode("latin-1"), key) for x in values for key in keys): return None
  return ErrorJSON(401, "missing or wrong API key: send the header Authorization: Bearer KEY")


async def access_log(app: ASGIApp, options: ServerConfig, scope: Scope, receive: Receive, send: Send) -> None:
  """ASGI middleware that gives each response the X-Request-Id of its request, or a new one, and logs its end."""
  started = time.monotonic()
  request_id = Headers(scope=scope).get("x-request-id") or uuid.uuid4().hex
  served = list[async_engine.Request]()
  generation.SERVED.set(served)
  sent = list[Message]()   # the first and the last message

  async def send_with_id(message: Message) -> None:
    if message["type"] == "http.response.start": MutableHeaders(scope=message)["X-Request-Id"] = request_id
    sent[1:] = [message]
    await send(message)

  try: await app(scope, receive, send_with_id)
  finally:
    # 499: nginx's code for a client that left early
    status = sent[0]["status"] if len(sent) > 1 and not sent[1].get("more_body") else 499
    tokens = "{} prompt and {} output tokens, ".format(*answers.num_tokens(served)) if served else ""
    line = (f"{scope['method']} {scope['path'][:256]} {status} in {time.monotonic() - started:.3f} s, {tokens}"
            f"id {request_id[:64]}")
    quiet_paths = {*QUIET_PATHS, *options.disable_access_log_for_endpoints.split(",")}
    is_quiet = scope["path"].removeprefix(options.root_path) in quiet_paths
    if not options.disable_uvicorn_access_log:   # ascii: clients choose the path, which may contain line breaks
      logger.log(logging.DEBUG if is_quiet else logging.INFO, ascii(line)[1:-1])


@functools.cache
def chat_page() -> HTMLResponse:
  """Return page/index.html with its style sheet and scripts, and a policy that allows only these scripts."""
  index, style = ((PAGE / name).read_text("utf-8") for name in ("index.html", "page.css"))
  scripts = [path.read_text("utf-8").replace("<!--", r"\x3C!--")   # in HTML, <!-- has a meaning
             for folder in ("vendored", ".") for path in sorted((PAGE / folder).glob("*.js"))]
  sources = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'" for x in scripts)
  tags = "".join(f"<script>{script}</script>\n" for script in scripts)
  page = index.replace("HASHES", sources).replace("STYLES", style).replace("SCRIPTS", tags)
  return HTMLResponse(page, headers={"Content-Security-Policy": "frame-ancestors 'none'"})   # meta cannot set it


class BodyRoute(fastapi.routing.APIRoute):
  """A route whose only argument is the body. FastAPI's own handler, which is slower, answers invalid ones."""
  def get_route_handler(self) -> Callable[[fastapi.Request], Coroutine[object, object, fastapi.Response]]:
    explain = super().get_route_handler()
    body_class = typing.get_type_hints(self.endpoint)["body"]

    async def handle(request: fastapi.Request) -> fastapi.Response:
      if request.headers.get("content-type") != "application/json": return await explain(request)
      try: body = body_class.model_validate(await request.json())
      except Exception: return await explain(request)
      return await self.endpoint(body)
    return handle


class Server(uvicorn.Server):
  """A uvicorn server that listens at once, loads the model in a thread, and runs until a signal arrives. more: further
  routes of GET requests. Raises InputError for TLS files that it cannot use."""
  def __init__(self, model: str | None, engine_options: JsonObject, options: ServerConfig, more: Routes | None = None):
    self.error: Exception | None = None   # raised while loading the model
    self.is_loading = True   # also of --lora-modules
    self.code = 0   # exit code
    self.options = options
    self.open_engine = functools.partial(async_engine.AsyncLLM, model, options.stream_interval, True,
                                         options.prefix_cache_file, **engine_options)
    allows_loads = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true")
    self.loads_adapters = engine_options.get("enable_lora") and (options.keys or allows_loads)
    self.serving = PoolingServing(options.served_model_name or [hub.served_name(model)], options)
    protocol.unknown_fields.strict = options.strict_fields
    self.keys = [*map(os.fsencode, options.keys)]
    app: ASGIApp = functools.partial(self.gate, self.routes(more or {}))
    if options.allowed_origins:
      app = cors.CORSMiddleware(app, parse_origins(options.allowed_origins), allow_methods=["*"], allow_headers=["*"])
    super().__init__(uvicorn.Config(
      functools.partial(access_log, app, options), options.host, options.port, options.uds, log_config=None, ws="none",
      interface="asgi3", timeout_graceful_shutdown=int(options.shutdown_timeout) + 5, lifespan="off", **options.tls))
    try: self.config.load()
    except OSError as error:
      names = ", ".join(f"{name}={value!r}" for name, value in options.tls.items() if value)
      raise InputError(f"{names}: {error}") from error

  def routes(self, more: Routes) -> fastapi.FastAPI:
    # OpenAPI's responses by status
    openai: dict[int | str, JsonObject] = dict.fromkeys(["4XX", "5XX"], {"model": protocol.ErrorResponse})
    anthropic: dict[int | str, JsonObject] = dict.fromkeys(["4XX", "5XX"], {"model": protocol.AnthropicErrorResponse})
    events: dict[int | str, JsonObject] = {200: {"content": {generation.EVENT_STREAM: {}}}}
    app = fastapi.FastAPI(title="tinyvllm", version=__version__, docs_url=None, redoc_url=None, responses=openai)
    for kind in (StarletteHTTPException, RequestValidationError, Exception): app.exception_handler(kind)(explain)
    serving = self.serving
    reads: Routes = {"/health": self.health, "/ping": self.health, "/load": serving.load, "/version": self.version,
                     "/v1/models": serving.models, "/v1/models/{name:path}": serving.model}
    posts: Routes = {"/tokenize": serving.tokenize, "/detokenize": serving.detokenize,
                     "/v1/embeddings": serving.embeddings, "/v1/rerank": serving.rerank, "/v1/score": serving.score}
    aliases: Routes = {"/rerank": serving.rerank, "/v2/rerank": serving.rerank, "/score": serving.score,
                       "/ping": self.health}   # vLLM's, Cohere's, SageMaker's
    streams: Routes = {"/generate": serving.generate, "/v1/completions": serving.completions,
                       "/v1/chat/completions": serving.chat, "/v1/responses": self.responses}
    if self.loads_adapters:
      posts |= {"/v1/load_lora_adapter": serving.load_adapter, "/v1/unload_lora_adapter": serving.unload_adapter}
    for path, route in streams.items():   # first, as most requests are for them
      app.router.add_api_route(path, route, methods=["POST"], responses=events, route_class_override=BodyRoute)
    app.get("/", response_class=HTMLResponse)(chat_page)
    app.get("/metrics", response_class=PlainTextResponse)(self.metrics)
    for path, route in (reads | more).items(): app.get(path)(route)
    app.head("/health", include_in_schema=False)(self.health)
    for path, route in (posts | aliases).items(): app.post(path, include_in_schema=path in posts)(route)
    app.post("/v1/messages", responses=anthropic | events)(self.messages)
    app.post("/v1/messages/count_tokens", responses=anthropic)(self.count_tokens)
    return app

  async def gate(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """ASGI middleware in front of all routes: limits the body size, checks the API key, returns HTTP 503 until the
    server is ready, and cancels the route when the client disconnects."""
    # ASGI 2.4: else each stream has another task, which waits for the disconnect, too
    scope.update(root_path=self.options.root_path, asgi={"version": "3.0", "spec_version": "2.4"})
    path, headers = scope["path"].removeprefix(scope["root_path"]), Headers(scope=scope)
    limit = self.options.max_body_size
    refusal = refuse(path, headers, self.keys) or (None if path in OPEN_PATHS else self.not_ready())
    try: body = await read_body(fastapi.Request(scope, receive), 0 if refusal else limit, 8 * limit)
    except starlette.requests.ClientDisconnect: return
    if body is None: refusal = refusal or ErrorJSON(413, f"the body is larger than --max-body-size={limit} bytes")
    if refusal: return await refusal(scope, receive, send)
    request = [{"type": "http.request", "body": body}]
    disconnect = asyncio.ensure_future(receive())
    async def replay() -> Message: return request.pop() if request else await asyncio.shield(disconnect)
    route = asyncio.ensure_future(app(scope, replay, send))
    try: await asyncio.wait((disconnect, route), return_when=asyncio.FIRST_COMPLETED)
    finally:
      for task in (disconnect, route): task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception): await route   # `explain` has responded and logged it

  # Start and shutdown

  async def startup(self, sockets: list[socket.socket] | None = None) -> None:
    self.log_task = asyncio.create_task(prometheus.log_throughput(self.serving.engine_metrics))
    await super().startup(sockets)
    logger.info(f"listening on {self.options.uds or self.address()}; requests get HTTP 503 until the model is ready")
    threading.Thread(target=self.prepare, daemon=True).start()   # daemon: a signal does not wait for it

  def load(self) -> None:
    """Load the model and the adapters of --lora-modules."""
    self.serving.llm = self.open_engine()
    for name, path in self.options.adapters.items(): self.serving.add_adapter(name, path)
    self.is_loading = False

  def prepare(self) -> None:
    """Load the model, wait until requests can run, and log the URLs."""
    try: self.load()
    except Exception as error:
      self.error = error
      self.should_exit = True
    if self.state() and not self.should_exit: logger.info(async_engine.CAPTURING)
    while self.state() and not self.should_exit: time.sleep(0.05)
    if not self.should_exit: logger.info(f"ready: chat page {self.address()}/, API {self.address()}/v1")

  def address(self) -> str:
    """Return the server's URL for clients of this machine."""
    options = self.options
    host = "localhost" if options.uds or options.host in ("", "0.0.0.0", "::") else options.host
    port = "" if options.uds else f":{self.servers[0].sockets[0].getsockname()[1]}"
    return f"http{'s' * bool(options.ssl_certfile)}://{f'[{host}]' if ':' in host else host}{port}{options.root_path}"

  def state(self) -> str:
    """Return why the server is not ready, or "" if it is."""
    if self.should_exit: return "the server is shutting down"
    return self.serving.llm.state if self.serving.llm and not self.is_loading else "the model is loading"

  def not_ready(self) -> fastapi.Response | None:
    """Return HTTP 503, or None if the server is ready."""
    return ErrorJSON(503, state) if (state := self.state()) else None

  def handle_exit(self, sig: int, frame: object) -> None:
    if sig == signal.SIGINT and self.state(): self.code = 128 + sig   # before the server was ready, or a second signal
    self.force_exit = self.should_exit and sig == signal.SIGINT   # a second signal
    self.should_exit = True

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    """Wait for all responses, as uvicorn does, but abort requests after the shutdown timeout."""
    serving, seconds = self.serving, self.options.shutdown_timeout
    logger.info(f"shutting down: {len(self.server_state.tasks)} requests have {seconds} s to finish")
    asyncio.get_running_loop().call_later(seconds, serving.abort, serving.requests)
    await super().shutdown(sockets)
    if serving.llm and self.options.prefix_cache_file: await asyncio.to_thread(serving.llm.shutdown)   # ignores signals

  # Routes without generation

  async def version(self) -> dict[str, str]: return {"version": __version__}
  async def health(self) -> fastapi.Response: return self.not_ready() or JSONResponse({})
  async def metrics(self) -> fastapi.Response:
    return fastapi.Response(generate_latest(self.serving.observer.registry), media_type=CONTENT_TYPE_LATEST)

  # Routes of coding agents, which run as chats

  async def responses(self, body: agents.ResponsesRequest) -> fastapi.Response:
    return await self.serving.answer(body.to_chat(), functools.partial(agents.ResponsesBuilder, body))

  async def messages(self, body: agents.MessagesRequest) -> fastapi.Response:
    return await self.serving.answer(body.to_chat(), agents.MessagesBuilder)

  def count_tokens(self, body: agents.MessagesRequest) -> dict[str, int]:   # not async: runs in another thread
    self.serving.check_model(body.model or None)
    prompt, = protocol.encode_prompts(body.to_chat(), self.serving.engine, self.options.trust_request_chat_template)
    return {"input_tokens": len(prompt["prompt_token_ids"])}


def parse_origins(words: list[str]) -> list[str]:
  """Return the origins in allowed_origins, whose words are origins or vLLM's JSON lists of them."""
  read = pydantic.TypeAdapter(list[str]).validate_json
  try: return [origin for word in words for origin in (read(word) if word.startswith("[") else [word])]
  except ValueError as error:
    raise InputError(f"allowed_origins={words!r} must be origins, or JSON lists of strings, as in '[\"*\"]'") from error
