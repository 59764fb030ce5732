"""Run several replicas of `tinyvllm serve` with Ray Serve, on one or more machines. See README.md for commands.

  python examples/deploy/ray_serve.py MODEL --num-replicas 2 --port 8000

A replica is the server's app with its own engine. An ingress reads each request, forwards it to the replica of its
conversation, and streams the response back. The ingress stores no request: if a replica dies, its requests get HTTP
503, or a closed connection if their response has started."""
import asyncio, contextlib, dataclasses, hashlib, json, os, random, re, signal
import socket, sys
from collections.abc import AsyncIterator
from typing import Any, get_args

if __name__ == "__main__":   # Ray reads these when imported. If Ray is started elsewhere, set them there
  os.environ.update({
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",   # gRPC and no extra threads: saves some ms per request
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),   # limit of bodies and responses
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",   # throughput mode enables it, with an unnecessary proxy
    "RAY_worker_niceness": "0", **os.environ})   # Ray's default of 15 yields to every other process
import orjson, ray, uvicorn
from fastapi import Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RequestCancelledError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.routing import Mount, Route, Router
from tinygrad import Device

from tinyvllm import SamplingParams
from tinyvllm.config import Options, check, logger, option
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.cli import FAILURES
from tinyvllm_extra.formats import hub
from tinyvllm_extra.programs import prepare_device
from tinyvllm_extra.cli.flags import CommandParser, add_flags, parse_flags, select_options
from tinyvllm_extra.cli.doctor import read_model
from tinyvllm_extra.cli.serve import check_address
from tinyvllm_extra.serving.app import Server, ServerConfig
from tinyvllm_extra.serving.errors import ErrorJSON
from tinyvllm_extra.vllm_options import NO_EFFECT, read_options

NAME = "tinyvllm"   # application name
SLACK = 8    # a replica with this many requests more than the least busy one still gets its conversations
BLOCK = 64   # characters or token ids of a prompt that identify its conversation: about one KV cache block
SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")


@dataclasses.dataclass(frozen=True)
class RayConfig(Options):
  """Ray Serve's options: number of replicas, and resources of each."""
  num_replicas: int | None = option(None, "Number of replicas (default: 1)", min=1, max=4096)
  min_replicas: int | None = option(None, "Minimum replicas, with max_replicas (default: 1)", min=1, max=4096)
  max_replicas: int | None = option(None, "Maximum replicas, for autoscaling (default: off)", min=1, max=4096)
  target_ongoing_requests: float | None = option(None, "Target requests per replica (default: max_num_seqs / 2)",
                                                 min=0.01, max=2**31)
  num_ingresses: int = option(1, "Number of processes that forward requests", min=1, max=4096)
  gpus_per_replica: float | None = option(None, "GPUs per replica (default: one per device of a model, 0 without GPUs)",
                                          min=0, max=64)
  cpus_per_replica: float = option(1, "CPU cores per replica", min=0, max=1024)

  def __post_init__(self) -> None:
    super().__post_init__()
    check(not self.num_replicas or not self.max_replicas, "num_replicas: not allowed with max_replicas")
    check(self.max_replicas or not self.min_replicas, "min_replicas: requires max_replicas")
    check((self.min_replicas or 1) <= (self.max_replicas or 4096),
          f"min_replicas={self.min_replicas} must be at most max_replicas={self.max_replicas}")


def conversation(body: bytes) -> bytes:
  """Return a key that identifies a request's conversation: the messages up to the first user message, or the start of
  the prompt. Empty for a body without either, and for invalid JSON."""
  with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
    fields = orjson.loads(body)
    if "messages" in fields:
      users = [i for i, message in enumerate(fields["messages"]) if message["role"] == "user"]
      return orjson.dumps(fields["messages"][:users[0] + 1])
    prompt = fields["prompt"]
    return orjson.dumps((prompt if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt[0])[:BLOCK])
  return b""


class ByConversation(RequestRouter):
  """Routes a conversation to the same replica, whose prefix cache holds it, by rendezvous hashing: all ingresses agree,
  and adding or removing a replica moves only its own conversations. If that replica is too busy, or a request has no
  conversation, the less busy of two random replicas gets it."""
  async def choose_replicas(self, candidate_replicas: list[RunningReplica],
                            pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
    pair = random.sample(candidate_replicas, min(2, len(candidate_replicas)))   # Serve picks the less busy one
    key = pending_request.args[0] if pending_request else b""
    if not key: return [pair]
    def rank(replica: Any) -> bytes: return hashlib.blake2b(key + replica.replica_id.unique_id.encode()).digest()
    def ongoing(replica: Any) -> int: return self.replica_queue_len_cache.get(replica.replica_id) or 0
    home = max(candidate_replicas, key=rank)
    return [pair] if ongoing(home) > SLACK + min(map(ongoing, candidate_replicas)) else [[home], pair]


class Replica:
  """The server's app with its own engine. Serve handles call its methods."""
  async def __init__(self, model: str | None, engine: dict[str, Any], options: ServerConfig,   # type: ignore[misc]
                     log_level: str):   # Serve awaits __init__
    logger.setLevel(log_level.upper())
    self.server = Server(model, engine, options)
    self.failed = False   # whether the last response had status 500
    await asyncio.to_thread(self.server.load)
    while self.server.state(): await asyncio.sleep(0.05)   # until graphs are captured

  async def http(self, key: bytes, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[dict[str, Any]]]:
    """Run a request and yield the app's ASGI messages, all available ones at once: forwarding one takes longer than
    making it. key: the conversation, which the router reads. Closing the generator disconnects the client."""
    messages: asyncio.Queue[Any] = asyncio.Queue()
    request = [{"type": "http.request", "body": body, "more_body": False}]
    async def receive() -> Any: return request.pop() if request else await asyncio.Future()
    serving: Any = self.server.config.app   # all middleware and routes
    route = asyncio.create_task(serving(scope, receive, messages.put))
    route.add_done_callback(lambda _: messages.put_nowait(None))
    try:
      while (message := await messages.get()) is not None:
        batch = [message]
        while not messages.empty() and (message := messages.get_nowait()) is not None: batch.append(message)
        for status in (message["status"] for message in batch if "status" in message): self.failed = status == 500
        yield batch
        if message is None: break
      await route
    finally: route.cancel()

  async def metrics(self) -> tuple[str, str]:
    """Return the replica's name and its metrics."""
    registry = self.server.serving.observer.registry
    return serve.get_replica_context().replica_id.unique_id, generate_latest(registry).decode()

  async def check_health(self) -> None:
    """Raise if /health would not return 200. After a failed step, generate one token, too: a replica with a lost device
    fails fast, looks idle, and would attract requests."""
    if self.server.state(): raise RuntimeError(self.server.state())
    if self.failed: _ = [_ async for _ in self.server.serving.loaded.generate("a", SamplingParams(max_tokens=1))]
    self.failed = False


def labelled(texts: list[tuple[str, str]]) -> str:
  """Merge the replicas' metrics: group samples by name and label each with its replica."""
  families: dict[str, dict[str, None]] = {}   # unique lines by metric, in order
  for replica, text in texts:
    lines: dict[str, None] = {}
    for line in text.splitlines():
      if line.startswith("# HELP"): lines = families.setdefault(line.split()[2], {})
      lines[line if line[0] == "#" else line.replace("{", f'{{replica="{replica}",', 1)] = None
  return "".join(f"{line}\n" for lines in families.values() for line in lines)


class Ingress:
  """Receives requests and forwards them to replicas. Truncates a body after the chunk that exceeds the size limit.
  listens: whether it opens a port."""
  def __init__(self, replicas: Any, options: ServerConfig, listens: bool):
    self.replicas = replicas   # Serve handle
    self.http = replicas.options(method_name="http", stream=True)
    self.options = options
    routes = [Route("/metrics", self.metrics), Mount("/", self.answer)]
    self.app = Router(routes, lifespan=self.listening if listens else None)

  async def metrics(self, request: Request) -> Response:
    """Return the metrics of all replicas that respond."""
    results = await self.replicas.broadcast("metrics").results_async(timeout_s=10, return_exceptions=True)
    texts = [text for text in results if not isinstance(text, BaseException)]
    return Response(labelled(texts), media_type=CONTENT_TYPE_LATEST)

  async def answer(self, scope: Any, receive: Any, send: Any) -> None:
    message: Any = {"more_body": True}
    body = bytearray()
    while message.get("more_body"):
      message = await receive()
      if message["type"] == "http.disconnect": return
      if len(body) <= self.options.max_body_size: body += message.get("body", b"")
    key = conversation(bytes(body)) if scope["method"] == "POST" else b""
    answer = self.http.remote(key, {name: scope[name] for name in SCOPE if name in scope}, bytes(body))
    is_started = is_complete = False

    async def forward() -> None:
      nonlocal is_started, is_complete
      try:
        async for messages in answer:
          for message in messages:
            is_complete = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)
            is_started = True
      except RequestCancelledError: return   # the client has disconnected
      except Exception as error:
        if is_started: raise   # closes the connection, so that the client sees an incomplete response
        await ErrorJSON(503, f"the replica died: retry the request ({type(error).__name__})")(scope, receive, send)

    forwarding = asyncio.create_task(forward())
    disconnect = asyncio.create_task(receive())   # returns after a disconnect or the whole response
    try: await asyncio.wait((forwarding, disconnect), return_when=asyncio.FIRST_COMPLETED)
    finally:
      disconnect.cancel()
      if not is_complete and not forwarding.done():
        answer.cancel()
        forwarding.cancel()
    with contextlib.suppress(asyncio.CancelledError): await forwarding

  @contextlib.asynccontextmanager
  async def listening(self, _: Any) -> AsyncIterator[None]:
    """Serve requests on a port, which other ingresses of this machine may share."""
    family = socket.AF_INET6 if ":" in self.options.host else socket.AF_INET
    with socket.create_server((self.options.host, self.options.port), family=family, backlog=2048,
                              reuse_port=True) as port:
      server = uvicorn.Server(uvicorn.Config(self.app, lifespan="off", access_log=False,
                                             timeout_graceful_shutdown=int(self.options.shutdown_timeout) + 5))
      serving = asyncio.create_task(server.serve([port]))
      yield
      server.should_exit = True
      await serving


def parse_option(value: Any, value_type: Any) -> Any:
  """Convert an option to its field's type: `serve run` passes strings."""
  types = (value_type, *get_args(value_type))
  if isinstance(value, str) and list[str] in types and value[:1] != "[": return [value]
  if not isinstance(value, str) or str in types: return value
  try: return json.loads(value)
  except ValueError: return value


def configs(args: dict[str, Any]) -> tuple[dict[str, Any], ServerConfig, RayConfig]:
  """Return the options of the engine, the server and Ray. Raises ValueError for errors unrelated to the model."""
  types = {field.name: field.type for x in (LLMConfig, ServerConfig, RayConfig)
           for field in dataclasses.fields(x)}
  for name in args: check(name in {"model", "log_level", *types, *NO_EFFECT}, f"{name}: unknown option")
  args = {name: parse_option(x, types.get(name)) for name, x in args.items() if x is not None}
  engine, server, own = (select_options(args, x) for x in (LLMConfig, ServerConfig, RayConfig))
  read_options(engine)
  for name in ("prefix_cache_file", "trace"):
    check(name not in engine | server, f"{name}: not supported, as all replicas would write it")
  for name in ("uds", "ssl_certfile", "models_dir", "model_ttl"):
    check(name not in server, f"{name}: not supported by ingresses: leave it out")
  key = os.environ.get("TINYVLLM_API_KEY")
  return engine, ServerConfig(**{"api_key": [key] if key else None, **server}), RayConfig(**own)


def app(args: dict[str, Any]) -> Any:
  """Build the application, for `serve run ray_serve:app` and KubeRay's `import_path`. args: the command line's options,
  with underscores. With `port`, the ingresses listen there, else Serve's proxies receive requests."""
  engine, server, own = configs(args)
  folder = args.get("model")
  if folder:
    config = read_options(engine, folder)
    path = hub.local_path(folder, config).resolve()   # replicas have another working directory
    read_model(path, config.runner)   # its checks
    if not hub.match_name(folder): folder = str(path)   # replicas on other machines download it again
  seqs = engine.get("max_num_seqs", LLMConfig.max_num_seqs)
  # `serve run` calls this before Ray starts: look at this machine instead of the cluster
  if not ray.is_initialized(): prepare_device()   # chooses the default device; replicas get the variable DEV
  any_gpu = ray.cluster_resources().get("GPU") if ray.is_initialized() else Device.DEFAULT in ("AMD", "CUDA", "NV")
  gpus = own.gpus_per_replica
  devices = max(engine.get(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline"))
  if gpus is None: gpus = int(devices) if any_gpu else 0
  copies: dict[str, Any] = {"num_replicas": own.num_replicas or 1}
  if own.max_replicas:
    copies = {"autoscaling_config": {"min_replicas": own.min_replicas or 1, "max_replicas": own.max_replicas,
                                     "target_ongoing_requests": own.target_ongoing_requests or seqs / 2}}
  variables = {"NUM_CPU_THREADS": str(max(1, int(own.cpus_per_replica)))} if not gpus else {}
  variables |= {name: os.environ[name] for name in ("DEV", "NUM_CPU_THREADS") if name in os.environ}
  common: Any = {"logging_config": {"enable_access_log": False}, "graceful_shutdown_timeout_s": server.shutdown_timeout}
  replica: Any = serve.deployment(
    Replica, **common, **copies, health_check_period_s=5, health_check_timeout_s=30,
    max_constructor_retry_count=3,   # the deployment fails after the third failure
    max_ongoing_requests=2 * (seqs + server.max_queue),   # above the server's limit, so that the server returns 429
    request_router_config=RequestRouterConfig(request_router_class=ByConversation),   # type: ignore[arg-type]
    ray_actor_options={"num_cpus": own.cpus_per_replica, "num_gpus": gpus, "runtime_env": {"env_vars": variables}})

  def make() -> Any:   # runs in the ingress's process
    return Ingress(serve.get_deployment_handle("Replica"), server, "port" in args).app
  ingress: Any = serve.deployment(name="Ingress", num_replicas=own.num_ingresses, max_ongoing_requests=2**20,
                                  ray_actor_options={"num_cpus": 0}, **common)
  return ingress(serve.ingress(make)()).bind(replica.bind(folder, engine, server, args.get("log_level", "info")))


def deploy(application: Any) -> None:
  """Deploy and wait until all replicas are ready. Raises ValueError with a failed replica's error."""
  try: serve.run(application, name=NAME)
  except RuntimeError as error:
    messages = "".join(x.message for x in serve.status().applications[NAME].deployments.values())
    causes = re.findall(r"^[\w.]*Error: (.+)$", messages, re.M)   # with the module, as in a traceback
    raise ValueError(causes[-1] if causes else str(error)) from error


def main(argv: list[str] | None = None) -> int:
  """Start Ray if it is not running, deploy, and wait for a signal. Return the exit code."""
  parser = CommandParser(description="Run an OpenAI-compatible HTTP server with several replicas.")
  argv = ["ray_serve", *(sys.argv[1:] if argv is None else argv)]
  add_flags(parser, "[MODEL]", argv, LLMConfig, ServerConfig, RayConfig)
  parser.commands["ray_serve"] = parser
  flags = parse_flags(parser, argv)
  for name in ("command", "variables", "config"): flags.pop(name, None)
  args = {"port": ServerConfig.port, "log_level": "info", **flags}
  logger.setLevel(args["log_level"].upper())
  try:
    _, server, _ = configs(args)
    ray.init(log_to_driver=args["log_level"] == "debug")
    signal.signal(signal.SIGTERM, signal.default_int_handler)   # Ray has replaced it
    serve.start(proxy_location="Disabled")
    if NAME not in serve.status().applications: check_address(server.host, server.port, None)
    deploy(app(args))
    print(f"tinyvllm: running on http://{server.host}:{server.port}", file=sys.stderr, flush=True)
    signal.pause()
  except KeyboardInterrupt: return 0
  except FAILURES as error: return print(f"tinyvllm: {error}", file=sys.stderr) or 1
  finally:
    if ray.is_initialized():
      serve.shutdown()
      ray.shutdown()
  return 0


if __name__ == "__main__":
  import ray_serve   # replicas import classes from `ray_serve`, not `__main__`
  sys.exit(ray_serve.main())
