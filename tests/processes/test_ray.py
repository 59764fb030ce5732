"""Two replicas of the bundled model behind Ray Serve, started by examples/deploy/ray_serve.py on this machine. Their
outputs must equal LLM.generate's in this process. Tests kill and break replicas. Needs `pip install '.[ray]'`."""
import asyncio
import importlib
import itertools
import os
import signal
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from types import SimpleNamespace
from unittest import mock

import httpx2 as httpx
import openai
import pytest
import yaml
from helpers.commands import PYTHONPATH, ROOT
from helpers.data import read_data
from helpers.servers import Server, reserve_port, wait_until

from tinyvllm import LLM, SamplingParams

SCRIPT = ROOT / "examples/deploy/ray_serve.py"
SIZES = ["--cudagraph-capture-sizes", 1, 8, 16, "--max-num-batched-tokens", 64]   # few graphs
STORY = "The cat sat on the warm stone and closed its eyes. Then the dog came along the road and saw "   # > 64 tokens
LONG = {"temperature": 0, "max_tokens": 400, "ignore_eos": True, "n": 8}   # takes over a second


@pytest.fixture(scope="module", autouse=True)
def ray_serve():
  """The module. Ray's files are in a temporary folder, and its processes import this checkout."""
  with (tempfile.TemporaryDirectory(prefix="ray") as folder, pytest.MonkeyPatch.context() as m,
        mock.patch.dict(os.environ, RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=PYTHONPATH)):
    m.syspath_prepend(SCRIPT.parent)
    yield importlib.import_module("ray_serve")


class Cluster(Server):
  """A running ray_serve.py. Replicas are identified by the `replica` label of the metrics."""
  def __init__(self, *options):
    self.holder = reserve_port()   # Ray's own processes could take the port first
    super().__init__(None, *SIZES, "--port", self.holder.getsockname()[1], *options, script=str(SCRIPT))

  def close(self):
    super().close()
    self.holder.close()

  def by_replica(self, metric, **labels):
    """Return {replica: value of a metric}."""
    return {x.labels["replica"]: x.value for x in self.samples()
            if x.name == f"tinyvllm:{metric}" and labels.items() <= x.labels.items()}

  def busiest(self, at_least):
    """Return the replica with the most running requests, or None if they are fewer than `at_least`."""
    num, name = max((num, name) for name, num in self.by_replica("num_requests_running").items())
    return name if num >= at_least else None

  def call(self, replica, function):
    """Return the result of `function(servable)` in the replica's process."""
    import ray
    def run_in_replica(_):
      from ray import serve
      return function(serve.get_replica_context().servable_object)
    actor = ray.get_actor(f"SERVE_REPLICA::tinyvllm#Replica#{replica}", namespace="serve")
    return ray.get(actor.__ray_call__.remote(run_in_replica))

  def pid(self, replica): return self.call(replica, lambda _: os.getpid())

  def wait_for_two(self, without=""):
    """Wait until exactly two replicas respond, not the one named `without`, and return their names."""
    def two_names():
      try: names = {*self.by_replica("num_requests_running")}
      except httpx.HTTPError: return None
      return names if len(names) == 2 and without not in names else None
    return wait_until(two_names, f"two replicas, without {without}", 120)

  def home_of(self, prompt):
    """Return the replica that receives `prompt`."""
    before = self.by_replica("prompt_tokens_total")
    self.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).raise_for_status()
    return max((num - before[name], name) for name, num in self.by_replica("prompt_tokens_total").items())[1]


@pytest.fixture(scope="module")
def cluster():
  import ray
  with Cluster("--num-replicas", 2, "--allowed-origins", "http://page.example") as cluster:
    ray.init("auto", namespace="serve", log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])   # replicas cannot import the tests
    try: yield cluster
    finally: ray.shutdown()


@pytest.fixture(scope="module")
def llm(): return LLM()


def generated_text(llm, prompt, **fields):
  return llm.generate(prompt, SamplingParams(temperature=0, **fields), use_tqdm=False)[0].outputs[0].text


# Requests

def test_completions_equal_generate_complete_and_streamed(cluster, llm):
  client, request = cluster.client(), {"model": "tinyvllm", "prompt": "The cat", "max_tokens": 24, "temperature": 0}
  expected = generated_text(llm, "The cat", max_tokens=24)
  assert client.completions.create(**request).choices[0].text == expected
  pieces = [piece.choices[0] for piece in client.completions.create(**request, stream=True)]
  assert "".join(piece.text for piece in pieces) == expected
  assert len(pieces) > 4 and pieces[-1].finish_reason == "stop"


def test_ingress_returns_the_servers_status_codes_and_headers(cluster):
  for content, status in ((b'{"prompt": "a", "temperature": -1}', 400), (b"{", 400), (b" " * (2**22 + 1), 413)):
    assert cluster.post("/v1/completions", content=content).status_code == status
  assert cluster.get("/nowhere").status_code == 404
  models = cluster.get("/v1/models", headers={"Origin": "http://page.example"})
  assert models.json()["data"][0]["id"] == "tinyvllm"
  assert models.headers["access-control-allow-origin"] == "http://page.example"
  assert "tinyvllm" in cluster.get("/").text and cluster.get("/openapi.json").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_client_disconnect_aborts_its_request(cluster, stream):
  def num_aborted(): return sum(cluster.by_replica("request_success_total", finished_reason="abort").values())
  before, body = num_aborted(), {**LONG, "prompt": STORY}
  if stream:
    with cluster.stream("/v1/completions", body) as response: next(response.iter_lines())
  else:
    with pytest.raises(httpx.ReadTimeout): cluster.post("/v1/completions", body, timeout=0.3)
  wait_until(lambda: num_aborted() == before + LONG["n"], "all samples are aborted", 20)
  assert not any(cluster.by_replica("num_requests_running").values())


def test_metrics_have_a_replica_label(cluster):
  names = cluster.wait_for_two()
  before = cluster.by_replica("generation_tokens_total")
  home = cluster.home_of(STORY)
  assert cluster.by_replica("generation_tokens_total") == {name: before[name] + (name == home) for name in names}
  lines = cluster.get("/metrics").text.splitlines()
  assert all('replica="' in line for line in lines if not line.startswith("#"))
  kinds = [line for line in lines if line.startswith("# TYPE")]
  assert len(kinds) == len({*kinds}) > 20, "one TYPE line per metric"


def test_conversation_stays_on_the_replica_with_its_cached_prefix(cluster):
  homes = set()
  for i in range(16):
    prompt, num_cached = f"Story {i}. {STORY}", []
    homes.add(cluster.home_of(prompt))
    for _ in range(3):
      answer = cluster.post("/v1/completions", {"prompt": prompt, "max_tokens": 24, "temperature": 0}).json()
      prompt += answer["choices"][0]["text"] + " And then "
      num_cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert num_cached[0] >= 16 and num_cached == sorted(num_cached), num_cached
  assert len(homes) == 2, "both replicas have conversations"


# Failures

def test_200_requests_are_correct_when_a_replica_is_killed(cluster, llm):
  pids = {name: cluster.pid(name) for name in cluster.wait_for_two()}
  prompts = [f"{name} {verb}" for name in ("The cat", "The dog", "A boy", "The sun", "Tom")
             for verb in ("is", "was", "said", "ran", "saw")]
  lengths = {**dict.fromkeys(prompts, 48), STORY: 400}
  texts = {prompt: generated_text(llm, prompt, max_tokens=n, ignore_eos=True) for prompt, n in lengths.items()}
  failed = []

  def ask(prompt, n=1):
    request = {"model": "tinyvllm", "prompt": prompt, "max_tokens": lengths[prompt], "n": n, "temperature": 0,
               "extra_body": {"ignore_eos": True}}
    with cluster.client() as client:
      try: answer = client.completions.create(**request)
      except openai.APITimeoutError: raise   # the request hangs
      except (openai.APIConnectionError, openai.InternalServerError):   # openai retries these
        failed.append(prompt)
        answer = client.with_options(max_retries=8).completions.create(**request)
    assert {choice.text for choice in answer.choices} == {texts[prompt]}, prompt

  with ThreadPoolExecutor(16) as pool, ThreadPoolExecutor(1) as other_pool:
    answers = [pool.submit(ask, prompt) for prompt in prompts * 8]
    assert len([*itertools.islice(as_completed(answers, 60), 40)]) == 40
    # Short requests started together end together, so a replica may have none; a long one takes over a second
    answers.append(other_pool.submit(ask, STORY, n=17))
    victim = wait_until(lambda: cluster.busiest(17), "a replica runs the long request", 20)   # only it has as many
    os.kill(pids[victim], signal.SIGKILL)
    for answer in answers: answer.result()
  assert STORY in failed, "the killed replica ran the long request"
  cluster.wait_for_two(without=victim)


def test_stream_of_killed_replica_raises_in_the_client(cluster):
  cluster.wait_for_two()
  body = {**LONG, "messages": [{"role": "user", "content": STORY}]}
  with cluster.stream("/v1/chat/completions", body) as response:
    lines = response.iter_lines()
    next(lines)
    victim = cluster.busiest(1)
    os.kill(cluster.pid(victim), signal.SIGKILL)
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
      for line in lines: assert "[DONE]" not in line
  cluster.wait_for_two(without=victim)


def test_autoscaling_adds_a_replica_under_load():
  stopped = threading.Event()
  with (Cluster("--min-replicas", 1, "--max-replicas", 2, "--target-ongoing-requests", 1) as cluster,
        ThreadPoolExecutor(4) as pool):
    def ask():
      while not stopped.is_set(): assert cluster.post("/v1/completions", {**LONG, "prompt": STORY}).status_code == 200
    assert len(cluster.by_replica("num_requests_running")) == 1
    tasks = [pool.submit(ask) for _ in range(4)]
    try: cluster.wait_for_two()
    finally: stopped.set()
    for task in tasks: task.result()


def stop(replica): replica.server.should_exit = True
def lose_device(replica): replica.server.serving.llm.llm.runner.launch = None   # each step fails


@pytest.mark.parametrize("fault", [stop, lose_device])
def test_unhealthy_replica_is_replaced(cluster, fault):
  cluster.wait_for_two()
  prompt = f"{STORY}{fault.__name__}"
  home = cluster.home_of(prompt)
  cluster.call(home, fault)
  answer = cluster.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
  assert answer.status_code in (500, 503) and answer.json()["error"]["message"]
  names = cluster.wait_for_two(without=home)
  assert [cluster.call(name, lambda replica: replica.server.state()) for name in names] == ["", ""]
  assert cluster.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).status_code == 200


# Options

def test_invalid_option_of_a_replica_prints_one_error_line():
  line = "tinyvllm: max_num_seqs=64 must be at most max_num_batched_tokens=32"
  with pytest.raises(AssertionError, match=rf"exited with code 1\n(.*\n)*{line}") as error:
    Cluster("--max-num-batched-tokens", 32)
  assert "Traceback" not in str(error.value)


@pytest.mark.parametrize(("args", "message"), read_data("server_cases.json")["ray options"])
def test_app_with_invalid_args_raises_value_error(ray_serve, args, message):
  with pytest.raises(ValueError, match=message): ray_serve.app(args)


def test_kubernetes_manifest_has_a_valid_serve_config(ray_serve):
  from ray.serve.schema import ServeDeploySchema
  config = yaml.safe_load(yaml.safe_load(SCRIPT.with_name("ray_service.yaml").read_text())["spec"]["serveConfigV2"])
  application = ServeDeploySchema.model_validate(config).applications[0]
  assert application.import_path == "ray_serve:app"
  assert ray_serve.configs(application.args)[2].max_replicas == 4


def test_string_arguments_of_serve_run_are_converted(ray_serve):
  engine, server, config = ray_serve.configs({"num_replicas": "2", "enable_prefix_caching": "false", "port": "80",
                                              "served_model_name": "7", "gpus_per_replica": "0.5", "dtype": "float32"})
  assert engine == {"enable_prefix_caching": False, "dtype": "float32"} and server.port == 80
  assert (config.num_replicas, config.gpus_per_replica, server.served_model_name) == (2, 0.5, ["7"])


# Routing

def test_conversation_key_depends_on_the_beginning_only(ray_serve):
  def key(**body): return ray_serve.conversation(httpx.Request("POST", "http://x", json=body).content)
  system, first, other = ({"role": role, "content": text} for role, text in
                          (("system", "be kind"), ("user", "hello"), ("user", "bye")))
  answer = {"role": "assistant", "content": "you"}
  assert key(messages=[system, first]) == key(messages=[system, first, answer, other], stream=True) != b""
  assert len({key(messages=[system, first]), key(messages=[system, other]), key(messages=[first])}) == 3
  assert key(prompt=STORY) == key(prompt=STORY + "more") == key(prompt=[STORY, "x"]) != key(prompt="My " + STORY)
  assert key(prompt=[*range(80)]) == key(prompt=[*range(90)]) == key(prompt=[[*range(80)], [1]]) != b""
  for body in ("", "{", "[]", "7", '{"messages": 7}', '{"messages": [7]}', '{"messages": []}', '{"prompt": []}'):
    assert ray_serve.conversation(body.encode()) == b"", body


def test_router_moves_a_conversation_off_a_busier_replica(ray_serve):
  from ray.serve._private.common import DeploymentID, ReplicaID
  class Router(ray_serve.ByConversation): replica_queue_len_cache = {}
  router = object.__new__(Router)
  ids = {name: ReplicaID(name, DeploymentID("Replica")) for name in "abcde"}

  def choose(key, names="abcde"):
    replicas = [SimpleNamespace(replica_id=ids[name]) for name in names]
    chosen = asyncio.run(router.choose_replicas(replicas, SimpleNamespace(args=[key])))
    return [[replica.replica_id.unique_id for replica in group] for group in chosen]
  homes = {key: choose(key)[0][0] for key in (b"%d" % i for i in range(64))}
  assert {*homes.values()} == {*"abcde"}
  assert all(choose(key)[0] == [home] for key, home in homes.items()), "routing must be deterministic"
  home = homes[b"0"]
  remaining = "abcde".replace(home, "")   # only the removed replica's conversations move
  assert all(choose(key, remaining)[0] == [x] for key, x in homes.items() if x != home)
  router.replica_queue_len_cache = {ids[home]: ray_serve.SLACK}
  assert choose(b"0")[0] == [home]
  router.replica_queue_len_cache = {ids[home]: ray_serve.SLACK + 1}
  assert [len(group) for group in choose(b"0")] == [2], "two candidates: Serve picks the less busy one"
  assert len(choose(b"")[0]) == 2
