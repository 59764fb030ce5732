"""A server for several models: it passes each request on to the process of the model that the body names, and the
answer back as it arrives. Keys, sizes, the page and the access log are its own; everything else is its children's."""
import asyncio, contextlib, functools, socket, types

import fastapi, orjson
from prometheus_client import CONTENT_TYPE_LATEST, core, generate_latest, parser
from starlette.types import ASGIApp, Receive, Scope, Send

from tinyvllm.config import JsonObject
from tinyvllm_extra.serving import app, errors, server_config

from .children import Child, Children


class Router(app.Server):
  """A Server whose requests run in the processes of their models. limit: of their memory together, as a part of
  free memory."""
  def __init__(self, models: list[Child], limit: float, options: server_config.ServerConfig):
    self.children = Children(models, limit, options.model_ttl)
    super().__init__(None, {}, options)

  def routes(self, more: app.Routes) -> fastapi.FastAPI:
    app = super().routes({"/load": self.get_load, "/v1/models": self.models, "/v1/models/{name:path}": self.model})
    app.add_middleware(lambda app: functools.partial(self.route, app))
    return app

  def load(self) -> None: ...
  def state(self) -> str: return "the server is shutting down" if self.should_exit else ""

  async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
    await asyncio.gather(super().shutdown(sockets), self.children.close())

  # Routes

  async def get_load(self) -> JsonObject: return {"server_load": sum(x.num_requests for x in self.children.alive())}
  async def models(self) -> JsonObject:
    return {"object": "list", "data": [await self.model(name) for name in self.children.by_name]}

  async def model(self, name: str) -> JsonObject:
    child = self.find(name)
    return {"id": name, "object": "model", "created": 0, "owned_by": "tinyvllm", **child.card, "status": child.state}

  async def metrics(self) -> fastapi.Response:
    """Return the metrics of all children that run. Each has its label model_name."""
    families: dict[str, core.Metric] = {}
    for child in self.children.alive():
      for x in parser.text_string_to_metric_families((await child.get("/metrics")).decode()):
        families.setdefault(x.name, core.Metric(x.name, x.documentation, x.type)).samples += x.samples
    text = generate_latest(types.SimpleNamespace(collect=families.values))   # type: ignore[arg-type]
    return fastapi.Response(text, media_type=CONTENT_TYPE_LATEST)

  async def route(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request: one with a body in a child, others here, also SageMaker's POST /ping."""
    if scope["method"] != "POST" or scope["path"].endswith("/ping"): return await app(scope, receive, send)
    content, name = (await receive())["body"], None
    with contextlib.suppress(ValueError, AttributeError): name = orjson.loads(content).get("model")
    child = self.find(name)
    messages = child.send("POST", scope["path"].removeprefix(scope["root_path"]), scope["headers"], content)
    async with self.children.use(child), contextlib.aclosing(messages):
      async for message in messages: await send(message)

  def find(self, name: object) -> Child:
    """Return the child of a model. Raises Refusal."""
    by_name = self.children.by_name
    if not name and len(by_name) == 1: name, = by_name
    if isinstance(name, str) and name in by_name: return by_name[name]
    message = f"The model `{name}` does not exist" if name else "The body must be JSON and name its model"
    raise errors.Refusal(404 if name else 400, f"{message}: choose one of {', '.join(by_name)}", "model")
