"""`tinyvllm serve` in several copies, on one machine or on many, by Ray Serve. README.md, beside this, has commands.

  python examples/deploy/ray_serve.py MODEL --num-replicas 2 --port 8000

A replica is the server's app over an engine of its own. Before the replicas stands an ingress, which reads a request,
passes it to the replica that its conversation belongs to, and passes back what that says, as it comes. Nothing of a
request is kept here: one whose replica dies gets a 503, and is cut off where its answer had begun."""
import argparse, asyncio, contextlib, dataclasses, hashlib, json, os, pathlib, random, re, signal
import socket, sys
from collections.abc import AsyncIterator
from typing import Any, get_args

if __name__ == "__main__":   # Ray and Serve read these as they are imported. Who starts them otherwise sets them there
  os.environ.update({
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",   # gRPC, no threads of its own: some ms less of a request
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),   # as long as bodies and answers may be
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",   # which the one before brings, and with it a proxy that nobody needs
    "RAY_worker_niceness": "0", **os.environ})   # of 15, with which all else on the machine comes first
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
from tinyvllm.config import EngineConfig, Options, check, option
from tinyvllm_extra.cli import FAILURES
from tinyvllm_extra.flags import NO_EFFECT, add_flags, select_options, set_log_level, without_no_effect
from tinyvllm_extra.models import find_model
from tinyvllm_extra.server.app import Server, ServerConfig, check_port
from tinyvllm_extra.server.protocol import error_response
from tinyvllm_extra.weights import open_checkpoint

NAME = "tinyvllm"   # of the application
SLACK = 8    # requests by which a replica may be busier than the least busy one and still get its conversations
BLOCK = 64   # characters or ids of a prompt that tell its conversation: where fewer are shared, hardly a block is
SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")


@dataclasses.dataclass(frozen=True)
class RayConfig(Options):
  """Ray Serve's: how many replicas, and what each takes."""
  num_replicas: int | None = option(None, "number of copies of the engine; None: 1", min=1, max=4096)
  min_replicas: int | None = option(None, "minimum number of copies, with max_replicas; None: 1", min=1, max=4096)
  max_replicas: int | None = option(None, "maximum number of copies, started as needed", min=1, max=4096)
  target_ongoing_requests: float | None = option(None, "requests per replica to aim at; None: max_num_seqs / 2",
                                                 min=0.01, max=2**31)
  num_ingresses: int = option(1, "number of processes that pass requests on", min=1, max=4096)
  gpus_per_replica: float | None = option(None, "GPUs per replica; None: tensor_parallel_size, 0 without any GPU",
                                          min=0, max=64)
  cpus_per_replica: float = option(1, "CPU cores per replica", min=0, max=1024)

  def __post_init__(self) -> None:
    super().__post_init__()
    check(not self.num_replicas or not self.max_replicas, "num_replicas: not with max_replicas, which scales")
    check(self.max_replicas or not self.min_replicas, "min_replicas: only with max_replicas")
    check((self.min_replicas or 1) <= (self.max_replicas or 4096),
          f"min_replicas={self.min_replicas} must be at most max_replicas={self.max_replicas}")


def conversation(body: bytes) -> bytes:
  """What the requests of one conversation begin with, and those of others do not: the messages up to a user's first, or
  the first of a prompt. Empty where there is none, as in what is not JSON."""
  with contextlib.suppress(ValueError, TypeError, AttributeError, LookupError):
    asked = orjson.loads(body)
    if "messages" in asked:
      users = [i for i, message in enumerate(asked["messages"]) if message["role"] == "user"]
      return orjson.dumps(asked["messages"][:users[0] + 1])
    prompt = asked["prompt"]
    return orjson.dumps((prompt if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt[0])[:BLOCK])
  return b""


class ByConversation(RequestRouter):
  """A conversation goes to the replica that its hash names, whose prefix cache has it: the same one from every ingress,
  and where replicas come and go only their own conversations move. Where that one is busier than others, and what is no
  conversation, goes to the less busy one of two."""
  async def choose_replicas(self, candidate_replicas: list[RunningReplica],
                            pending_request: PendingRequest | None = None) -> list[list[RunningReplica]]:
    two = random.sample(candidate_replicas, min(2, len(candidate_replicas)))   # Serve takes the one with fewer requests
    key = pending_request.args[0] if pending_request else b""
    if not key: return [two]
    def rank(replica: Any) -> bytes: return hashlib.blake2b(key + replica.replica_id.unique_id.encode()).digest()
    def ongoing(replica: Any) -> int: return self.replica_queue_len_cache.get(replica.replica_id) or 0
    home = max(candidate_replicas, key=rank)
    return [two] if ongoing(home) > SLACK + min(map(ongoing, candidate_replicas)) else [[home], two]


class Replica:
  """The server's app over an engine. Its methods are called through Serve's handles."""
  async def __init__(self, model: str | None, engine: dict[str, Any], options: ServerConfig,   # type: ignore[misc]
                     log_level: str):   # Serve awaits it
    set_log_level({"log_level": log_level})
    self.server = Server(model, engine, options)
    self.failed = False   # whether the last answer was that a step failed
    await asyncio.to_thread(self.server.load)
    if self.server.error: raise self.server.error
    while self.server.state(): await asyncio.sleep(0.05)   # steps are captured

  async def http(self, key: bytes, scope: dict[str, Any], body: bytes) -> AsyncIterator[list[dict[str, Any]]]:
    """The app's messages, all that are there at a time: to pass one on takes longer than to make it. key: the router's.
    To close this is a client that goes away."""
    messages: asyncio.Queue[Any] = asyncio.Queue()
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    async def receive() -> Any: return unread.pop() if unread else await asyncio.Future()
    serving: Any = self.server.config.app   # the gate, and CORS before it
    route = asyncio.create_task(serving(scope, receive, messages.put))
    route.add_done_callback(lambda _: messages.put_nowait(None))
    try:
      while (message := await messages.get()) is not None:
        found = [message]
        while not messages.empty() and (message := messages.get_nowait()) is not None: found.append(message)
        for status in (message["status"] for message in found if "status" in message): self.failed = status == 500
        yield found
        if message is None: break
      await route
    finally: route.cancel()

  async def metrics(self) -> tuple[str, str]:
    """This replica's name, and its /metrics."""
    return serve.get_replica_context().replica_id.unique_id, generate_latest(self.server.observer.registry).decode()

  async def check_health(self) -> None:
    """Raises where /health would not say 200, and where a step has failed and another one does, too: a device that is
    lost would fail its requests faster than others answer, and so draw more of them."""
    if self.server.state(): raise RuntimeError(self.server.state())
    if self.failed: _ = [_ async for _ in self.server.llm.generate("a", SamplingParams(max_tokens=1))]
    self.failed = False


def labelled(texts: list[tuple[str, str]]) -> str:
  """The replicas' metrics as one text: each sample with the label `replica`, and those of a name together."""
  families: dict[str, dict[str, None]] = {}   # the lines of each, in order and once
  for replica, text in texts:
    lines: dict[str, None] = {}
    for line in text.splitlines():
      if line.startswith("# HELP"): lines = families.setdefault(line.split()[2], {})
      lines[line if line[0] == "#" else line.replace("{", f'{{replica="{replica}",', 1)] = None
  return "".join(f"{line}\n" for lines in families.values() for line in lines)


class Ingress:
  """What takes requests. Of a body no more is passed on than shows that it is too large. listens: at a port of its
  own."""
  def __init__(self, replicas: Any, options: ServerConfig, listens: bool):
    self.replicas = replicas   # Serve's handle
    self.http = replicas.options(method_name="http", stream=True)
    self.options = options
    routes = [Route("/metrics", self.metrics), Mount("/", self.answer)]
    self.app = Router(routes, lifespan=self.listening if listens else None)

  async def metrics(self, request: Request) -> Response:
    """Those of all replicas but such as are just dying."""
    found = await self.replicas.broadcast("metrics").results_async(timeout_s=10, return_exceptions=True)
    texts = [text for text in found if not isinstance(text, BaseException)]
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
    begun = ended = False

    async def pass_on() -> None:
      nonlocal begun, ended
      try:
        async for messages in answer:
          for message in messages:
            ended = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)
            begun = True
      except RequestCancelledError: return   # the client has gone
      except Exception as error:
        if begun: raise   # the connection is cut, so that nobody takes this for the end
        await error_response(503, f"the replica is gone: try again ({type(error).__name__})")(scope, receive, send)

    passing = asyncio.create_task(pass_on())
    gone = asyncio.create_task(receive())   # which returns once the client has gone, or has all
    try: await asyncio.wait((passing, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
      gone.cancel()
      if not ended and not passing.done():
        answer.cancel()
        passing.cancel()
    with contextlib.suppress(asyncio.CancelledError): await passing

  @contextlib.asynccontextmanager
  async def listening(self, _: Any) -> AsyncIterator[None]:
    """Meanwhile take requests at a port, which others of this machine may share."""
    family = socket.AF_INET6 if ":" in self.options.host else socket.AF_INET
    with socket.create_server((self.options.host, self.options.port), family=family, backlog=2048,
                              reuse_port=True) as port:
      server = uvicorn.Server(uvicorn.Config(self.app, lifespan="off", access_log=False,
                                             timeout_graceful_shutdown=int(self.options.shutdown_timeout) + 5))
      serving = asyncio.create_task(server.serve([port]))
      yield
      server.should_exit = True
      await serving


def value(brought: Any, kind: Any) -> Any:
  """An option as what its field is: `serve run` brings texts."""
  if not isinstance(brought, str) or str in (kind, *get_args(kind)): return brought
  try: return json.loads(brought)
  except ValueError: return brought


def configs(args: dict[str, Any]) -> tuple[dict[str, Any], ServerConfig, RayConfig]:
  """The options of the engine, the server and Ray. Raises ValueError for what will not do, as far as that is known
  before a model is loaded."""
  kinds = (EngineConfig, ServerConfig, RayConfig)
  types = {field.name: field.type for kind in kinds for field in dataclasses.fields(kind)}
  for name in args: check(name in {"model", "log_level", *types, *NO_EFFECT}, f"{name}: there is no such option")
  args = {name: value(of, types.get(name)) for name, of in args.items() if of is not None}
  engine, server, own = (select_options(args, kind) for kind in kinds)
  EngineConfig(**without_no_effect(engine))
  check("prefix_cache_file" not in server, "prefix_cache_file: each replica would write it: tinyvllm serve has one")
  return engine, ServerConfig(**{"api_key": os.environ.get("TINYVLLM_API_KEY"), **server}), RayConfig(**own)


def app(args: dict[str, Any]) -> Any:
  """The application, for `serve run ray_serve:app` and for KubeRay's `import_path`. args: the command line's options,
  with underscores. With `port` its ingresses listen there, else Serve's proxies take requests."""
  engine, server, own = configs(args)
  folder = args.get("model")
  if folder:
    folder = str(pathlib.Path(folder).expanduser().resolve())   # a replica is elsewhere
    path = pathlib.Path(folder)
    find_model(open_checkpoint(path).hf_config, path)   # raises InputError for another kind of model
  seqs = engine.get("max_num_seqs", EngineConfig.max_num_seqs)
  # `serve run` asks before Ray is there, and then this machine is what is known
  any_gpu = ray.cluster_resources().get("GPU") if ray.is_initialized() else Device.DEFAULT in ("AMD", "CUDA", "NV")
  gpus = own.gpus_per_replica
  if gpus is None: gpus = int(engine.get("tensor_parallel_size", 1)) if any_gpu else 0
  copies: dict[str, Any] = {"num_replicas": own.num_replicas or 1}
  if own.max_replicas:
    copies = {"autoscaling_config": {"min_replicas": own.min_replicas or 1, "max_replicas": own.max_replicas,
                                     "target_ongoing_requests": own.target_ongoing_requests or seqs / 2}}
  variables = {"NUM_CPU_THREADS": str(max(1, int(own.cpus_per_replica)))} if not gpus else {}
  variables |= {name: os.environ[name] for name in ("DEV", "NUM_CPU_THREADS") if name in os.environ}
  common: Any = {"logging_config": {"enable_access_log": False}, "graceful_shutdown_timeout_s": server.shutdown_timeout}
  replica: Any = serve.deployment(
    Replica, **common, **copies, health_check_period_s=5, health_check_timeout_s=30,
    max_constructor_retry_count=3,   # what fails then, fails
    max_ongoing_requests=2 * (seqs + server.max_queue),   # what is too many the server says itself
    request_router_config=RequestRouterConfig(request_router_class=ByConversation),   # type: ignore[arg-type]
    ray_actor_options={"num_cpus": own.cpus_per_replica, "num_gpus": gpus, "runtime_env": {"env_vars": variables}})

  def make() -> Any:   # in its process
    return Ingress(serve.get_deployment_handle("Replica"), server, "port" in args).app
  ingress: Any = serve.deployment(name="Ingress", num_replicas=own.num_ingresses, max_ongoing_requests=2**20,
                                  ray_actor_options={"num_cpus": 0}, **common)
  return ingress(serve.ingress(make)()).bind(replica.bind(folder, engine, server, args.get("log_level", "info")))


def deploy(application: Any) -> None:
  """Returns once all answer. Raises ValueError with what a replica said, where Serve says only that one has failed."""
  try: serve.run(application, name=NAME)
  except RuntimeError as error:
    said = "".join(of.message for of in serve.status().applications[NAME].deployments.values())
    causes = re.findall(r"^[\w.]*Error: (.+)$", said, re.M)   # with its module, as in a traceback
    raise ValueError(causes[-1] if causes else str(error)) from error


def main(argv: list[str] | None = None) -> int:
  """The command line: start Ray if there is none, deploy, and stay until a signal comes. Returns the exit code."""
  parser = argparse.ArgumentParser(description="Answer HTTP requests in OpenAI's protocol by several replicas.",
                                   argument_default=argparse.SUPPRESS)
  for model in ("model", "--model"): parser.add_argument(model, nargs="?", help="folder or GGUF; default: shipped")
  add_flags(parser, EngineConfig, ServerConfig, RayConfig)
  args = {"port": ServerConfig.port, **vars(parser.parse_args(argv))}
  set_log_level(args)
  try:
    _, server, _ = configs(args)
    ray.init(log_to_driver=args["log_level"] == "debug")
    signal.signal(signal.SIGTERM, signal.default_int_handler)   # Ray has taken it
    serve.start(proxy_location="Disabled")
    if NAME not in serve.status().applications: check_port(server.host, server.port)
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
  import ray_serve   # as which the replicas and Ray's own commands know what is here
  sys.exit(ray_serve.main())
