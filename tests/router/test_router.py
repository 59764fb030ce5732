"""Several models behind one port: which of them run, without any process; and requests through a router whose children
are servers of this process."""
import asyncio
import json
import shutil
import socket
import time

import httpx2 as httpx
import openai
import pytest
from helpers.commands import check_error, flags, parse_command
from helpers.data import read_data
from helpers.models import tiny_model
from helpers.protocol import CHAT, COMPLETIONS, KEY, running_request
from helpers.servers import LocalServer, error_of, wait_until

from tinyvllm_extra.cli import serve
from tinyvllm_extra.formats.hub import named_models

from tinyvllm_extra.router.children import KEY as CHILD_KEY, Child, Children
from tinyvllm_extra.serving.errors import Refusal


class FakeChild(Child):
  """A child without a process. It records its starts and stops in `events`; a start waits for `gate`, if it is set."""
  gate: asyncio.Event | None = None
  error: Exception | None = None
  events: list[str]

  async def start(self, share):
    if self.gate: await self.gate.wait()
    if self.error: raise self.error
    self.events.append(f"+{self.name}")
    self.share, self.process = share, "runs"

  async def stop(self):
    self.events.append(f"-{self.name}")
    self.process = None


def family(*memories, limit=1.0, ttl=None):
  """Return children a, b, ... that take these parts of the memory, and the list of their events."""
  events, models = [], [FakeChild("abc"[i], [], memory) for i, memory in enumerate(memories)]
  for model in models: model.events = events
  return Children(models, limit, ttl), models, events


async def state_after_start(children, child):
  """Return the state of a child while a request uses it."""
  async with children.use(child): return child.state


async def test_first_request_starts_a_child_and_others_wait_for_it():
  children, (a,), events = family(0.5)
  a.gate = asyncio.Event()
  requests = [asyncio.create_task(state_after_start(children, a)) for _ in range(5)]
  while a.num_requests < 5: await asyncio.sleep(0)
  assert a.state == "loading"
  requests[0].cancel()   # the client that started it leaves
  a.gate.set()
  assert await asyncio.gather(*requests[1:]) == ["ready"] * 4 and requests[0].cancelled()
  assert events == ["+a"] and a.num_requests == 0 and a.share == 0.5


async def test_least_recently_used_child_without_requests_makes_room():
  children, (a, b, c), events = family(0.4, 0.4, 0.4)
  for child in (a, b):
    async with children.use(child): pass
  async with children.use(a), children.use(c): assert events == ["+a", "+b", "-b", "+c"]
  assert (a.state, b.state) == ("ready", "unloaded") and c.share == pytest.approx(0.4 / 0.6)
  async with children.use(b): assert events[4:] == ["-c", "+b"], "the request of a ended last"


async def test_busy_child_stops_when_its_requests_have_ended_and_later_ones_wait():
  children, (a, b), events = family(0.6, 0.6)
  order = []
  async def request(child):
    async with children.use(child): order.append(child.name)
  async with children.use(a):
    first = asyncio.create_task(request(b))
    while a.state != "stopping": await asyncio.sleep(0)
    assert (events, b.state) == (["+a"], "loading")
    second = asyncio.create_task(request(a))
    await asyncio.sleep(0)
  await asyncio.gather(first, second)
  assert order == ["b", "a"] and events == ["+a", "-a", "+b", "-b", "+a"]


async def test_clients_of_three_models_with_memory_for_two_all_get_an_answer():
  children, models, events = family(0.5, 0.5, 0.5)
  async def request(child):
    async with children.use(child):
      assert child.process and sum(x.process is not None for x in models) <= 2
      await asyncio.sleep(0)
      return child.name
  names = await asyncio.gather(*[request(models[i % 3]) for i in range(60)])
  assert names == ["a", "b", "c"] * 20 and len(events) == 4, events


async def test_idle_child_stops_after_its_time_to_live_which_runs_neither_with_requests_nor_while_it_starts():
  children, (a, b), events = family(0.4, 0.4, ttl=0.05)
  async with children.use(b): pass   # the clock runs from now on
  b.idle_since = a.idle_since = time.monotonic() - 1
  a.gate = asyncio.Event()
  waiting = asyncio.create_task(state_after_start(children, a))
  while not children.lock.locked(): await asyncio.sleep(0)
  await asyncio.sleep(0.1)   # longer than the time to live
  a.gate.set()
  assert await waiting == "ready"
  async with children.use(a):
    while b.state != "unloaded": await asyncio.sleep(0)
    assert a.state == "ready"
  while a.state != "unloaded": await asyncio.sleep(0)
  assert events == ["+b", "+a", "-b", "-a"]


async def test_failed_start_fails_its_requests_and_the_next_one_starts_it_again():
  children, (a,), events = family(2.0)   # more than there is: it is tried
  a.error = Refusal(502, "no memory")
  for _ in range(2):
    with pytest.raises(Refusal):
      async with children.use(a): pass
    assert a.state == "unloaded" and a.num_requests == 0
  a.error = None
  async with children.use(a): assert a.share == 1
  a.process = None   # it has died
  assert a.state == "unloaded"
  async with children.use(a): assert events == ["+a", "+a"]
  await children.close()
  with pytest.raises(Refusal, match="^the server is shutting down$") as e:
    async with children.use(a): pass
  assert e.value.args[0] == 503


# Requests through a router

# Without the prefix cache, and with all tokens between the first and the last one in one event, answers are equal
OPTIONS = [*flags(dtype="float32", max_num_seqs=4, max_num_batched_tokens=4, stream_interval=10000),
           "--no-enable-prefix-caching"]


def run_children_here(patch):
  """Let a router's children be servers of this process."""
  async def start(self, share):
    own = flags(served_model_name=self.name, gpu_memory_utilization=share, api_key=CHILD_KEY)
    self.server = await asyncio.to_thread(LocalServer, None, *self.words, *own)
    self.port = self.server.port
    self.card = json.loads(await self.get("/v1/models"))["data"][0]
    self.process, self.log_task = self.server, asyncio.create_task(asyncio.sleep(0))

  async def stop(self):
    await asyncio.to_thread(self.server.stop)
    self.process = None
  patch.setattr(Child, "start", start)
  patch.setattr(Child, "stop", stop)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
  """A folder of two models, a and b, with different weights, and of a file that is none."""
  folder = tmp_path_factory.mktemp("models")
  for seed, name in enumerate("ab"):
    tiny_model(folder / name, words=True, seed=seed, chat_template=CHAT, max_position_embeddings=32768)
  for name in ("notes.txt", "c-00002-of-00002.gguf"): (folder / name).write_text("none")
  return folder


# Before `router`: an estimate of memory would disturb its engines

def test_one_model_needs_no_name_and_stops_after_its_time_to_live(models):
  words = "--model", f"only={models / 'a'}", "--model-ttl", "0.2"
  with LocalServer(None, *words, *OPTIONS, before=run_children_here) as server:
    assert server.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1}).json()["model"] == "only"
    wait_until(lambda: server.get("/v1/models/only").json()["status"] == "unloaded", "its time to live has passed")


def test_models_are_named_by_folder_by_pairs_and_in_a_file(models, tmp_path):
  a, b = str(models / "a"), str(models / "b")
  shutil.copytree(a, tmp_path / "x=y")
  config = tmp_path / "models.yaml"
  config.write_text(f"model: {{a: {a}, c: {{model: {b}, max-model-len: 64}}}}\n")
  for words, expected in (
    ([a], {}), (["--model", a], {}), (["--models-dir", models], {"a": a, "b": b}),
    (["--model", f"x={a}", "--model", f"y={b}"], {"x": a, "y": b}), (["--model", a, "--model", b], {"a": a, "b": b}),
    ([tmp_path / "x=y"], {}), (["--model", f"x={tmp_path}/x=y"], {"x": f"{tmp_path}/x=y"})):
    args = parse_command("serve", *words)
    read = named_models(args.get("model", []), args.get("models_dir"))
    assert read == {name: {"model": path} for name, path in expected.items()}, words
  args = parse_command("serve", "--config", config, "--max-num-seqs", 4)
  router = serve.make_router(args, named_models(args["model"], None))
  assert [child.words for child in router.children.by_name.values()] == [
    ["--max-num-seqs=4", f"--model={a}"], ["--max-num-seqs=4", f"--model={b}", "--max-model-len=64"]]
  assert router.children.by_name["c"].memory < router.children.by_name["a"].memory


@pytest.mark.parametrize("words,parts", read_data("server_cases.json")["options of routers"].items())
def test_wrong_options_of_a_router_are_refused_at_start(models, tmp_path, words, parts):
  """MODELS: the models' folder. EMPTY: a folder without models."""
  args = parse_command("serve", *words.replace("MODELS", str(models)).replace("EMPTY", str(tmp_path)).split())
  check_error(lambda: serve.main(args), *parts)


@pytest.fixture(scope="module")
def router(models):
  with LocalServer(None, "--models-dir", models, *OPTIONS, "--api-key", "secret", before=run_children_here) as server:
    yield server
    assert server.stop() == 0 and "Traceback" not in server.log, server.log


@pytest.fixture(scope="module")
def direct(models):
  """Servers of the same models, by name."""
  with LocalServer(models / "a", *OPTIONS) as a, LocalServer(models / "b", *OPTIONS) as b:
    yield {"a": a, "b": b}


HEAD = ("id", "item_id", "created", "created_at")
REQUESTS = read_data("routed_requests.json")


def content_of(response):
  """Return an answer without what differs between two of the same request."""
  def clean(x): return {k: y for k, y in x.items() if k not in HEAD}
  lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
  return response.status_code, [json.loads(line, object_hook=clean) if line[0] == "{" else line for line in lines]


@pytest.mark.parametrize("path,body", REQUESTS)
def test_answer_and_stream_and_error_equal_those_of_the_model_itself(router, direct, path, body):
  for name in "aab":
    body = {**body, "model": name}
    assert content_of(router.post(path, body, headers=KEY)) == content_of(direct[name].post(path, body)), path


@pytest.mark.parametrize("line,field", [
  ("/v1/completions HTTP/1.0", "Accept: */*"), ("//b/%C3%BC%0d%0a%3Fa HTTP/1.1", "Host: a"),
  ("/v1/completions HTTP/1.1", "Host: b\r\nX: \xfc \r\nExpect: 100-continue\r\nX-Request-Id: " + "x" * 60000)])
def test_head_of_any_client_passes_and_its_answer_has_a_length(router, direct, line, field):
  def answer(server):
    with socket.create_connection(("127.0.0.1", server.port), 20) as client:
      client.sendall(f"POST {line}\r\n{field}\r\nAuthorization: Bearer secret\r\nContent-Type: application/json\r\n"
                     'Connection: close\r\nContent-Length: 13\r\n\r\n{"model":"a"}'.encode("latin-1"))
      return {x for x in client.makefile("rb") if not x.lower().startswith((b"date:", b"x-request-id:"))}
  assert answer(router) == answer(direct["a"])


def test_body_without_a_known_model_or_key_is_refused_by_the_router(router):
  for body, status, words in (({}, 400, "name its model"), ({"model": "c"}, 404, "choose one of a, b")):
    error = error_of(router.post(COMPLETIONS, {"prompt": "a", **body}, headers=KEY), status)
    assert words in error["message"] and error["param"] == "model"
  assert "must be JSON" in error_of(router.post(COMPLETIONS, content="{", headers=KEY), 400)["message"]
  error_of(router.post(COMPLETIONS, {"model": "a", "prompt": "a"}), 401)
  assert router.post("/v1/messages", {"model": "c"}, headers=KEY).json()["error"]["type"] == "not_found_error"


def test_models_have_their_states_and_metrics_their_names(router):
  for name in "ab": router.post(COMPLETIONS, {"model": name, "prompt": "a", "max_tokens": 1}, headers=KEY)
  client = router.client(api_key="secret")
  assert [(x.id, x.status, x.max_model_len) for x in client.models.list()] == [(x, "ready", 32768) for x in "ab"]
  assert client.models.retrieve("b").id == "b" and router.server.serving.llm is None, "it loads no model itself"
  samples = [x for x in router.samples() if x.name == "tinyvllm:request_success_total"]
  assert {x.labels["model_name"] for x in samples if x.value} == {"a", "b"}
  assert len({(x.name, *x.labels.items()) for x in router.samples()}) == len(router.samples())
  for path in ("/", "/health", "/version", "/openapi.json"): assert router.get(path).status_code == 200, path
  assert router.post("/ping").status_code == 200


def test_disconnect_ends_the_request_in_the_child(router):
  child = router.server.children.by_name["a"]
  with running_request(router, model="a"):
    assert child.num_requests == 1 == router.get("/load", headers=KEY).json()["server_load"]
  wait_until(lambda: not child.num_requests and not child.server.server.serving.requests, "the request ends")


def test_request_to_a_child_that_has_just_died_is_502(router, monkeypatch):
  monkeypatch.setattr(router.server.children.by_name["a"], "port", 1)
  error = error_of(router.post(COMPLETIONS, {"model": "a", "prompt": "a"}, headers=KEY), 502)
  assert error["message"].startswith("a: the connection was closed")


def test_stream_of_a_child_that_dies_ends_with_an_error_event(router, monkeypatch):
  async def read(self, size):
    head = await self.readuntil(b"\r\n\r\n")
    self.set_exception(ConnectionResetError())   # raised by the next call
    return head
  monkeypatch.setattr(asyncio.StreamReader, "read", read)
  body = {"model": "a", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
  with pytest.raises(openai.APIError, match="a: the connection was closed"):
    for _ in router.client(api_key="secret").completions.create(model="a", prompt="a", stream=True): pass
  with router.stream("/v1/messages", body, headers=KEY) as response: *_, name, data, _ = response.iter_lines()
  assert name == "event: error" and json.loads(data[6:])["error"]["type"] == "api_error"
  with pytest.raises(httpx.TransportError): router.post("/v1/messages", body, headers=KEY)   # cut
