"""Two replicas of the shipped model behind Ray Serve, as examples/deploy/ray_serve.py starts them, on this machine.
What they answer is what LLM.generate gives in this process. Replicas are killed and broken from outside. `pytest -m
ray`."""
import asyncio
import collections
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import httpx2 as httpx
import openai
import pytest
import yaml
from server import Server, held_port, wait_until

from tinyvllm import LLM, SamplingParams

pytestmark = pytest.mark.ray
FOLDER = Path(__file__).parents[1] / "examples" / "deploy"
SIZES = ["--cudagraph-capture-sizes", 1, 8, 16, "--max-num-batched-tokens", 64]   # few graphs
STORY = "The cat sat on the warm stone and closed its eyes. Then the dog came along the road and saw "   # over 64
LONG = {"temperature": 0, "max_tokens": 400, "ignore_eos": True, "n": 8}   # over a second


@pytest.fixture(scope="module")
def environment():
  """Ray's files are this run's own."""
  with tempfile.TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as m:
    m.setenv("RAY_TMPDIR", folder)
    m.setenv("RAY_USAGE_STATS_ENABLED", "0")
    m.setenv("PYTHONPATH", os.pathsep.join([str(FOLDER.parents[1]), str(FOLDER.parent)]))   # this checkout's
    yield


@pytest.fixture(scope="module")
def ray_serve(environment):
  with pytest.MonkeyPatch.context() as m:
    m.syspath_prepend(FOLDER)
    yield importlib.import_module("ray_serve")


class Cluster(Server):
  """What the command line starts. Replicas are known by the names that metrics give them."""
  def __init__(self, *options):
    self.holder = held_port()   # Ray's own programs take free ports, too, before ours listens
    super().__init__(None, *SIZES, "--port", self.holder.getsockname()[1], *options,
                     script=str(FOLDER / "ray_serve.py"))

  def close(self):
    super().close()
    self.holder.close()

  def by_replica(self):
    """Their metrics: {replica: {name and other labels: value}}."""
    found = collections.defaultdict(dict)
    for name, value in self.metrics().items():
      replica = re.search(r"replica=(\w+)", name)
      assert replica, f"{name} is of no replica"
      found[replica[1]][re.sub(r",?replica=\w+|\{(replica=\w+)?\}", "", name)] = value
    return dict(found)

  def actor(self, replica):
    import ray
    return ray.get_actor(f"SERVE_REPLICA::tinyvllm#Replica#{replica}", namespace="serve")

  def call(self, replica, function):
    """What a function says in the process of a replica, which it is given."""
    def there(_):
      from ray import serve
      return function(serve.get_replica_context().servable_object)
    import ray
    return ray.get(self.actor(replica).__ray_call__.remote(there))

  def pid(self, replica): return self.call(replica, lambda _: os.getpid())

  def two(self, without=()):
    """The names of two replicas that answer, none of which is among some."""
    def found():
      try: names = {*self.by_replica()}
      except (httpx.HTTPError, AssertionError): return None
      return names if len(names) == 2 and not names & {*without} else None
    return wait_until(found, f"two replicas, without {without}", 120)

  def home(self, prompt):
    """The replica that a prompt belongs to."""
    before = self.by_replica()
    self.client().completions.create(model="tinyvllm", prompt=prompt, max_tokens=1)
    return max(before, key=lambda name: self.by_replica()[name]["prompt_tokens_total"]
               - before[name]["prompt_tokens_total"])


@pytest.fixture(scope="module")
def cluster(environment):
  import ray
  with Cluster("--num-replicas", 2, "--allowed-origins", "http://page.example") as cluster:
    ray.init("auto", namespace="serve", log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])   # the replicas have no tests
    try: yield cluster
    finally: ray.shutdown()


@pytest.fixture(scope="module")
def twin(): return LLM()


def text_of(twin, prompt, **fields):
  return twin.generate(prompt, SamplingParams(temperature=0, **fields), use_tqdm=False)[0].outputs[0].text


# Requests

def test_an_answer_is_what_the_engine_says_whole_and_streamed(cluster, twin):
  client = cluster.client()
  asked = {"model": "tinyvllm", "prompt": "The cat", "max_tokens": 24, "temperature": 0}
  expected = text_of(twin, "The cat", max_tokens=24)
  assert client.completions.create(**asked).choices[0].text == expected
  *pieces, last = client.completions.create(**asked, stream=True)
  assert "".join(c.text for piece in [*pieces, last] for c in piece.choices) == expected
  assert len(pieces) > 3 and last.choices[0].finish_reason == "stop"
  chat = client.chat.completions.create(model="tinyvllm", messages=[{"role": "user", "content": "Hello"}], max_tokens=4)
  assert chat.usage.completion_tokens == 4


def test_what_the_server_refuses_is_refused(cluster):
  assert cluster.post("/v1/completions", {"prompt": "a", "nonsense": 1}).status_code == 400
  assert cluster.post("/v1/completions", content=b" " * (2**22 + 1)).status_code == 413
  assert cluster.post("/v1/completions", content=b"{").status_code == 400
  assert cluster.get("/nowhere").status_code == 404
  assert cluster.get("/v1/models").json()["data"][0]["id"] == "tinyvllm"
  page = cluster.get("/v1/models", headers={"Origin": "http://page.example"})
  assert page.headers["access-control-allow-origin"] == "http://page.example"
  assert "tinyvllm" in cluster.get("/").text and cluster.get("/docs").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(cluster, stream):
  def aborted():
    return sum(of.get("request_success_total{finished_reason=abort}", 0) for of in cluster.by_replica().values())
  before = aborted()
  body = {**LONG, "prompt": STORY}
  if stream:
    with cluster.stream("/v1/completions", body) as response: next(response.iter_lines())
  else:
    with pytest.raises(httpx.ReadTimeout): cluster.post("/v1/completions", body, timeout=0.3)
  wait_until(lambda: aborted() == before + LONG["n"], "its texts are aborted", 20)
  assert all(of["num_requests_running"] == 0 for of in cluster.by_replica().values())


def test_metrics_tell_the_replicas_apart(cluster):
  names = cluster.two()
  before = cluster.by_replica()
  assert {*before} == names
  home = cluster.home(STORY)
  after = cluster.by_replica()
  for name in names:
    assert after[name]["generation_tokens_total"] - before[name]["generation_tokens_total"] == (name == home)
  text = cluster.get("/metrics").text
  kinds = [line for line in text.splitlines() if line.startswith("# TYPE")]
  assert len(kinds) == len({*kinds}) > 20, "each family once"


def test_a_conversation_stays_with_the_replica_that_has_its_prefix(cluster):
  client = cluster.client()
  homes = collections.Counter()
  for i in range(16):
    prompt, found = f"Story {i}. {STORY}", []
    homes[cluster.home(prompt)] += 1
    for _ in range(3):
      answer = client.completions.create(model="tinyvllm", prompt=prompt, max_tokens=24, temperature=0)
      prompt += answer.choices[0].text + " And then "
      found.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert found[0] >= 16 and found == sorted(found), found
  assert len(homes) == 2, "both have some"


# Failures

def test_200_requests_end_right_while_a_replica_is_killed(cluster, twin):
  names = cluster.two()
  prompts = [f"{name} {verb}" for name in ("The cat", "The dog", "A boy", "The sun", "Tom")
             for verb in ("is", "was", "said", "ran", "saw")]
  params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
  outputs = twin.generate(prompts, params, use_tqdm=False)
  texts = {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}
  victim = cluster.pid(min(names))
  answered, failed = threading.Semaphore(0), []

  def ask(prompt):
    asked = {"model": "tinyvllm", "prompt": prompt, "max_tokens": 48, "temperature": 0,
             "extra_body": {"ignore_eos": True}}
    with cluster.client() as client:
      try: answer = client.completions.create(**asked)
      except openai.APITimeoutError: raise   # it hung
      except (openai.APIConnectionError, openai.InternalServerError) as error:   # those that the package tries again
        failed.append(error)
        answer = client.with_options(max_retries=8).completions.create(**asked)
    answered.release()
    return answer.choices[0].text

  with ThreadPoolExecutor(16) as pool:
    found = [(prompt, pool.submit(ask, prompt)) for prompt in prompts * 8]
    for _ in range(40): assert answered.acquire(timeout=60)
    os.kill(victim, signal.SIGKILL)
    wrong = [(prompt, text.result()) for prompt, text in found if text.result() != texts[prompt]]
  assert len(found) == 200 and not wrong, wrong[:3]
  assert failed, "no request was on the replica that was killed"
  assert min(names) not in cluster.two(without=[min(names)]), "another one has come for it"


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_that_is_cut_is_seen_to_be_cut(cluster, chat):
  content = f"{STORY}{chat}"
  body = {"messages": [{"role": "user", "content": content}]} if chat else {"prompt": content}
  path = "/v1/chat/completions" if chat else "/v1/completions"
  cluster.two()
  with cluster.stream(path, {**LONG, **body}) as response:
    lines = response.iter_lines()
    next(lines)
    running = {name: of["num_requests_running"] for name, of in cluster.by_replica().items()}
    victim = max(running, key=running.get)
    assert running[victim] > 0
    os.kill(cluster.pid(victim), signal.SIGKILL)
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
      for line in lines: assert "[DONE]" not in line
  cluster.two(without=[victim])
  with pytest.raises(openai.APIError), cluster.client() as client:   # what users of the package see
    victim = None
    for piece in (client.chat if chat else client).completions.create(
        model="tinyvllm", **body, stream=True, n=8, extra_body={"ignore_eos": True}, max_tokens=400, temperature=0):
      assert not piece.choices[0].finish_reason
      if victim: continue
      running = {name: of["num_requests_running"] for name, of in cluster.by_replica().items()}
      victim = max(running, key=running.get)
      os.kill(cluster.pid(victim), signal.SIGKILL)
  cluster.two(without=[victim])


def test_replicas_come_as_requests_do(environment):
  options = ["--min-replicas", 1, "--max-replicas", 2, "--target-ongoing-requests", 1]
  ended = threading.Event()
  with Cluster(*options) as cluster, ThreadPoolExecutor(4) as pool:
    def ask():
      while not ended.is_set(): assert cluster.post("/v1/completions", {**LONG, "prompt": STORY}).status_code == 200
    assert len(cluster.by_replica()) == 1
    asked = [pool.submit(ask) for _ in range(4)]
    try: cluster.two()
    finally: ended.set()
    for each in asked: each.result()


def stop(replica): replica.server.should_exit = True


def lose_device(replica):
  def launch(step): raise RuntimeError("the device is lost")
  replica.server.llm.llm.runner.launch = launch


@pytest.mark.parametrize("fault", [stop, lose_device])
def test_a_replica_that_is_not_healthy_is_replaced(cluster, fault):
  cluster.two()
  prompt = f"{STORY}{fault.__name__}"
  home = cluster.home(prompt)
  cluster.call(home, fault)
  answer = cluster.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
  assert answer.status_code in (500, 503) and answer.json()["error"]["message"]
  names = cluster.two(without=[home])
  for name in names:
    assert cluster.call(name, lambda replica: replica.server.state()) == ""
  assert cluster.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).status_code == 200


# Options

@pytest.mark.parametrize(("flags", "line"), [
  (["--max-num-seqs", "0"], "max_num_seqs=0 must be between 1 and 1024"),
  (["--max-num-batched-tokens", "32"], "max_num_seqs=64 must be at most max_num_batched_tokens=32"),   # a replica's
])
def test_options_that_will_not_do_are_one_line(environment, flags, line):
  with held_port() as holder:
    command = [sys.executable, FOLDER / "ray_serve.py", "--port", str(holder.getsockname()[1]), *flags]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
  assert run.returncode == 1 and f"\ntinyvllm: {line}" in "\n" + run.stderr, run.stderr
  assert "Traceback" not in run.stderr


@pytest.mark.parametrize(("args", "message"), [
  ({"replicas": 2}, "replicas: there is no such option"),
  ({"num_replicas": 0}, "num_replicas=0 must be between 1 and 4096"),
  ({"num_replicas": "two"}, "num_replicas='two' must be of type"),
  ({"num_replicas": 2, "max_replicas": 3}, "num_replicas: not with max_replicas"),
  ({"min_replicas": 2}, "min_replicas: only with max_replicas"),
  ({"min_replicas": 3, "max_replicas": 2}, "min_replicas=3 must be at most max_replicas=2"),
  ({"model": "/nowhere"}, "/nowhere"),
  ({"max_model_len": "1"}, "max_model_len=1 must be between 2"),
  ({"prefix_cache_file": "/tmp/file"}, "prefix_cache_file: each replica would write it"),
])
def test_an_application_says_what_will_not_do(ray_serve, args, message):
  with pytest.raises(ValueError, match=re.escape(message)): ray_serve.app(args)


def test_the_application_for_kubernetes_is_what_ray_and_we_take(ray_serve):
  from ray.serve.schema import ServeDeploySchema
  text = (FOLDER / "ray_service.yaml").read_text()
  config = yaml.safe_load(yaml.safe_load(text)["spec"]["serveConfigV2"])
  application = ServeDeploySchema.model_validate(config).applications[0]
  assert application.import_path == "ray_serve:app"
  assert ray_serve.configs(application.args)[2].max_replicas == 4


def test_texts_as_serve_run_brings_them_are_options(ray_serve):
  engine, server, own = ray_serve.configs({"num_replicas": "2", "enable_prefix_caching": "false", "port": "80",
                                           "served_model_name": "7", "gpus_per_replica": "0.5", "dtype": "float32"})
  assert engine == {"enable_prefix_caching": False, "dtype": "float32"} and server.port == 80
  assert (own.num_replicas, own.gpus_per_replica, server.served_model_name) == (2, 0.5, "7")


# Routing

def test_what_a_conversation_is(ray_serve):
  def key(**body): return ray_serve.conversation(httpx.Request("POST", "http://x", json=body).content)
  system, first, other = ({"role": role, "content": text} for role, text in
                          (("system", "be kind"), ("user", "hello"), ("user", "bye")))
  answer = {"role": "assistant", "content": "you"}
  assert key(messages=[system, first]) == key(messages=[system, first, answer, other], stream=True) != b""
  assert len({key(messages=[system, first]), key(messages=[system, other]), key(messages=[first])}) == 3
  assert key(prompt=STORY) == key(prompt=STORY + "more") == key(prompt=[STORY, "x"]) != key(prompt="My " + STORY)
  assert key(prompt=[*range(80)]) == key(prompt=[*range(90)]) == key(prompt=[[*range(80)], [1]]) != b""
  for body in (b"", b"{", b"[]", b"7", b'{"messages": 7}', b'{"messages": [7]}', b'{"messages": []}',
               b'{"prompt": []}'):
    assert ray_serve.conversation(body) == b"", body


def test_a_conversation_leaves_a_replica_that_is_busier(ray_serve):
  from ray.serve._private.common import DeploymentID, ReplicaID
  class Router(ray_serve.ByConversation):
    replica_queue_len_cache = {}
    def __init__(self): pass
  router = Router()
  replicas = [SimpleNamespace(replica_id=ReplicaID(name, DeploymentID("Replica"))) for name in "abcde"]
  def choose(key):
    return asyncio.run(router.choose_replicas(replicas, SimpleNamespace(args=[key])))
  homes = {key: choose(key)[0][0] for key in (b"%d" % i for i in range(64))}
  assert {id(x) for x in homes.values()} == {id(x) for x in replicas}
  assert all(choose(key)[0] == [home] for key, home in homes.items()), "always the same"
  left = [x for x in replicas if x is not homes[b"0"]]
  for key, home in homes.items():
    if home in left:
      assert asyncio.run(router.choose_replicas(left, SimpleNamespace(args=[key])))[0] == [home], "only its own move"
  router.replica_queue_len_cache = {homes[b"0"].replica_id: ray_serve.SLACK}
  assert choose(b"0")[0] == [homes[b"0"]]
  router.replica_queue_len_cache = {homes[b"0"].replica_id: ray_serve.SLACK + 1}
  assert len(choose(b"0")) == 1 and len(choose(b"0")[0]) == 2, "two, of which Serve takes the less busy one"
  assert len(choose(b"")[0]) == 2
