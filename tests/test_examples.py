"""examples/openai_client.py, beam_search.py and serving/, each as far as a machine can check it: the scripts run, the
unit starts a server, and the dashboard asks for what a server has. The serving benchmark, too, runs."""
import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import httpx2 as httpx   # what openai brings
import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from server import Server, wait_until

from examples import openai_client

ROOT = Path(__file__).parents[1]
SERVING, KEY = ROOT / "examples/deploy", "sk-examples"
PYTHONPATH = os.pathsep.join(map(str, [ROOT, ROOT / "examples"]))   # where the packages are not installed
SMALL = "--max-num-seqs", 2, "--max-num-batched-tokens", 2   # two shapes of step, so few graphs
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server():
  """The shipped model, behind a key."""
  with Server(None, *SMALL, "--api-key", KEY) as server: yield server


@pytest.fixture(scope="module")
def unit():
  """The unit's text without comments, a line to a setting."""
  lines = [line for line in (SERVING / "tinyvllm.service").read_text().splitlines() if not line.startswith("#")]
  return "\n".join(lines).replace("\\\n", " ")


@pytest.fixture(scope="module")
def service(unit):
  """The unit's [Service]; a name that comes twice has its last value."""
  parser = configparser.RawConfigParser(strict=False, delimiters="=", comment_prefixes="#")
  parser.optionxform = str
  parser.read_string(unit)
  assert parser.sections() == ["Unit", "Service", "Install"]
  return parser["Service"]


@pytest.fixture(scope="module")
def samples(server):
  """Every sample that the server's metrics have after a request: (name, its labels)."""
  server.client(api_key=KEY).completions.create(model="tinyvllm", prompt="The cat", max_tokens=3, temperature=0)
  families = text_string_to_metric_families(httpx.get(server.url + "/metrics").raise_for_status().text)
  return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.fixture(scope="module")
def dashboard(): return json.loads((SERVING / "grafana.json").read_text())


def run(*command, key=KEY, code=0):
  """What it prints. AssertionError unless it ends with that code."""
  environment = {**os.environ, "OPENAI_API_KEY": key, "PYTHONPATH": PYTHONPATH}
  done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
  assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
  return done.stdout


@pytest.mark.slow
def test_the_openai_client_talks_to_the_shipped_model(server):
  out = run(sys.executable, "examples/openai_client.py", server.url)
  assert out.startswith(f"{server.url} serves tinyvllm\n")
  assert "'The cat" in out and [int(i) for i in re.findall(r"Choice (\d)", out)] == [0, 1, 2, 3]
  assert re.search(r"A stream\n  The cat.+\n  \d+ tokens of \d+ in the prompt\n", out, re.DOTALL)
  assert "Hello! How can I help you?" in out and "base model" not in out
  pet = json.loads(re.search(r"A chat that answers in JSON\n  '(.*)'", out)[1])
  assert pet["animal"] in ("cat", "dog", "bird") and 0 <= pet["age"] <= 20
  assert re.search(r"JSON that matches a schema\n  '(Tom|Kim|Sam), a (cat|dog|bird), is \d+'", out)
  tokens = re.findall(r"^  ('.*') (-\d+\.\d\d|-?0\.00) (\{.*\})$", out, re.MULTILINE)
  assert len(tokens) == 6, "three tokens of the chat, three of the completion, with their log probabilities"


@pytest.mark.slow
def test_the_openai_client_needs_the_servers_key(server):
  run(sys.executable, "examples/openai_client.py", server.url, key="sk-wrong", code=1)


@pytest.mark.slow
def test_the_example_of_beam_search_prints_the_best_beams_of_each_prompt():
  rows = re.findall(r"^ +(-\d+\.\d{3}) (stop|length) +'(The cat|Once upon a time)(.*)'$",
                    run(sys.executable, "examples/beam_search.py"), re.MULTILINE)
  assert [prompt for *_, prompt, _ in rows] == ["The cat"] * 3 + ["Once upon a time"] * 3
  assert len({text for *_, text in rows}) == 6 and all(float(total) < 0 for total, *_ in rows)


@pytest.mark.slow
def test_custom_backend_leaves_the_output_unchanged():
  out = run(sys.executable, "examples/custom_backend.py")
  assert re.fullmatch(r"the output is unchanged: The cat \w[^\n]{20,}\n", out)


@pytest.mark.slow
def test_the_curl_script_asks_every_route(server):
  script = (SERVING / "curl.sh").read_text()
  for path in server.http().get("/openapi.json").raise_for_status().json()["paths"]:
    assert f'"$url{path.replace("{name}", "$model")}"' in script, f"{path} is not in curl.sh"
  out = run("bash", SERVING / "curl.sh", server.url)
  answers = dict(part.strip().split("\n", 1) for part in out.split("\n\n# ")[1:])
  assert len(answers) == script.count("\ntitle ")
  parsed = [json.loads(answer) for answer in answers.values() if answer.startswith("{")]
  assert len(parsed) == 11 and not any("error" in answer for answer in parsed)
  assert out.count("data: [DONE]") == 2 and "tinyvllm:num_requests_running{" in out
  form, = (json.loads(answer) for question, answer in answers.items() if question.startswith("JSON"))
  assert json.loads(form["choices"][0]["text"])["name"] in ("Tom", "Kim")
  assert out.count("\n200 text/html") == 2 and out.count("\n200 application/json") == 1


@pytest.mark.slow
def test_the_curl_script_ends_at_the_first_failure(server):
  assert '"code":401' in run("bash", SERVING / "curl.sh", server.url, key="sk-wrong", code=22).replace(" ", "")


def blocks(language):
  return re.findall(rf"^```{language}\n(.*?)^```", (SERVING / "front_end.md").read_text(), re.MULTILINE | re.DOTALL)


def test_front_ends_are_pointed_at_the_servers_api():
  libre, silly = map(yaml.safe_load, blocks("yaml"))
  endpoint, = libre["endpoints"]["custom"]
  assert endpoint["apiKey"] == "${TINYVLLM_API_KEY}" and endpoint["models"]["default"]
  assert silly == {"min_p": 0.05, "repetition_penalty": 1.1}
  urls = re.findall(r"https?://[\w.]+:8000[^\s`>,;]*", "".join([*blocks("yaml"), *blocks("sh")]))
  assert len(urls) == 3 and all(url.rstrip('"').endswith(":8000/v1") for url in urls)


@pytest.mark.parametrize("fields", [
  {"stream": True, "max_tokens": 4},                                                     # Open WebUI: a chat
  {"stream": False, "max_completion_tokens": 4},                                         # its titles
  {"stream": True, "max_tokens": 4, "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0,
   "user": "LibreChat_User_ID", "stream_options": {"include_usage": True}},              # LibreChat
  {"stream": True, "max_tokens": 4, "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0,
   "seed": 7, "n": 1, "stop": ["\nUser:"], "logit_bias": {}, "min_p": 0.05, "repetition_penalty": 1.1}],   # SillyTavern
  ids=["Open WebUI", "Open WebUI's titles", "LibreChat", "SillyTavern"])
@pytest.mark.slow
def test_what_front_ends_send_is_accepted(server, fields):
  with server.http(headers={"Authorization": f"Bearer {KEY}"}) as client:
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    answer = client.post("/v1/chat/completions", json={"model": model, "messages": MESSAGES, **fields})
  assert answer.status_code == 200, answer.text
  assert ("data: [DONE]" in answer.text) == fields["stream"]


def test_the_units_settings_are_hardened_and_give_requests_time_to_end(service):
  assert service["KillSignal"] == "SIGTERM" and service["DynamicUser"] == service["NoNewPrivileges"] == "yes"
  shutdown = int(re.search(r"--shutdown-timeout (\d+)", service["ExecStart"])[1])
  assert int(service["TimeoutStopSec"]) > shutdown + 5, "SIGKILL comes before the running requests have ended"
  assert "LoadCredential" in service and "sk-" not in service["ExecStart"], "the key is not in the unit"
  assert service["ProtectSystem"] == "strict" and service["CapabilityBoundingSet"] == ""
  assert "MemoryDenyWriteExecute" not in service, "kernels are compiled into memory"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd here; the settings are checked above")
def test_systemd_finds_no_fault_with_the_unit(tmp_path):
  unit = (SERVING / "tinyvllm.service").read_text()
  (tmp_path / "tinyvllm.service").write_text(unit.replace("/opt/tinyvllm/bin/python", sys.executable))
  verify = ["systemd-analyze", "verify", "--man=no", tmp_path / "tinyvllm.service"]
  done = subprocess.run(verify, capture_output=True, text=True, timeout=60)
  assert (done.returncode, done.stderr) == (0, ""), done.stderr
  (tmp_path / "tinyvllm.service").write_text(unit.replace("KillSignal=", "KilSignal="))
  assert "KilSignal" in subprocess.run(verify, capture_output=True, text=True, timeout=60).stderr


@pytest.mark.slow
def test_the_units_command_starts_a_server_whose_key_nobody_sees_and_stops_at_sigterm(service, words_folder, tmp_path,
                                                                                        capsys):
  command = shlex.split(service["ExecStart"])
  command = [{"/opt/tinyvllm/bin/python": sys.executable, "/srv/models/mine": str(words_folder), "8000": "0"}.get(x, x)
             for x in command]
  (tmp_path / "api-key").write_text(KEY + "\n")
  environment = {**os.environ, "CREDENTIALS_DIRECTORY": str(tmp_path), "PYTHONPATH": PYTHONPATH}
  with open(tmp_path / "log", "wb") as file:
    process = subprocess.Popen([*command, *map(str, SMALL)], stdout=file, stderr=file, env=environment, cwd=tmp_path)
  try:
    def ready():
      assert process.poll() is None, (tmp_path / "log").read_text()
      found = re.search(r"Uvicorn running on (http://\S+)", (tmp_path / "log").read_text())
      return found and httpx.get(found[1] + "/health").status_code == 200 and found[1]
    url = wait_until(ready, "the unit's server answers")
    assert httpx.get(url + "/v1/models").status_code == 401
    shown = run("ps", "-ww", "-o", "args=", "-p", process.pid)
    assert "--shutdown-timeout 30" in shown and KEY not in shown
    client = openai.OpenAI(base_url=url + "/v1", api_key=KEY)   # a base model: the example says so, and goes on
    openai_client.chat(client, client.models.list().data[0].id, "Hello")
    assert "No chat: this is a base model" in capsys.readouterr().out
  finally: process.send_signal(signal.SIGTERM)
  assert process.wait(60) == 0, (tmp_path / "log").read_text()


@pytest.mark.slow
def test_prometheus_finds_the_metrics_where_its_configuration_says(server):
  config = yaml.safe_load((SERVING / "prometheus.yml").read_text())
  job, = config["scrape_configs"]
  assert set(config) <= {"global", "scrape_configs"} and set(job) <= {"job_name", "metrics_path", "static_configs"}
  assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
  answer = httpx.get(server.url + job["metrics_path"]).raise_for_status()   # without a key
  assert answer.headers["content-type"].startswith("text/plain; version=")
  assert [*text_string_to_metric_families(answer.text)]


def queries(dashboard): return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_the_dashboard_asks_for_metrics_and_labels_that_the_server_has(dashboard, samples):
  asked = set()
  for query in [*queries(dashboard), dashboard["templating"]["list"][1]["definition"]]:
    names = re.findall(r"tinyvllm:\w+", query)
    assert names and set(names) <= set(samples), f"{set(names) - set(samples)} in {query}"
    labels = {x.strip() for group in re.findall(r"by \((.*?)\)", query) for x in group.split(",")}
    labels |= set(re.findall(r"(\w+)=~", query))
    assert labels <= set.union(*(samples[name] for name in names)), query
    asked |= set(names)
  def stem(name): return re.sub("_(bucket|sum|count|created|total)$", "", name)
  missing = {stem(name) for name in samples if name.startswith("tinyvllm:")} - set(map(stem, asked))
  assert not missing, f"no panel shows {missing}"


def test_the_dashboard_can_be_imported(dashboard):
  source, model = dashboard["templating"]["list"]
  assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
  assert (model["name"], model["type"]) == ("model_name", "query")
  places, titles = set(), [panel["title"] for panel in dashboard["panels"]]
  for panel in dashboard["panels"]:
    for thing in (panel, model, *panel["targets"]): assert thing["datasource"]["uid"] == "${datasource}"
    x, y, w, h = (panel["gridPos"][name] for name in "xywh")
    cells = {(i, j) for i in range(x, x + w) for j in range(y, y + h)}
    assert x + w <= 24 and not cells & places, f"{panel['title']} lies on another panel"
    places |= cells
  assert len({panel["id"] for panel in dashboard["panels"]}) == len(set(titles)) == len(titles)
  for query in queries(dashboard):
    assert query.count("(") == query.count(")") and 'model_name=~"$model_name"' in query
  for title in ("Time to first token", "Inter-token latency"):
    panel = dashboard["panels"][titles.index(title)]
    assert [re.match(r"histogram_quantile\(([\d.]+)", t["expr"])[1] for t in panel["targets"]] == ["0.5", "0.99"]


def figures(out): return {name: float(value) for name, value in re.findall(r"^(.+?): +([\d.]+)$", out, re.MULTILINE)}


@pytest.mark.slow
def test_the_serving_benchmark_prints_what_clients_get(server):
  found = figures(run(sys.executable, "tests/benchmarks/serving.py", "--url", server.url, "--num-prompts", 6,
                      "--input-len", 8, "--output-len", 5, "--request-rate", 50, "--max-concurrency", 3))
  assert (found["Successful requests"], found["Failed requests"], found["Total generated tokens"]) == (6, 0, 30)
  assert found["Total input tokens"] == 48
  rate = found["Total generated tokens"] / found["Benchmark duration (s)"]
  assert found["Output token throughput (tokens/s)"] == pytest.approx(rate, rel=0.1)   # both are rounded
  for name in ("TTFT", "TPOT", "ITL"):
    mean, median, most = (found[f"{which} {name} (ms)"] for which in ("Mean", "Median", "P99"))
    assert mean > 0 and most >= median >= 0   # a client that is late reads two tokens at once


@pytest.mark.slow
def test_the_serving_benchmark_says_what_failed(server):
  out = run(sys.executable, "tests/benchmarks/serving.py", "--url", server.url, "--num-prompts", 2, "--input-len", 8,
            "--output-len", 5, "--no-stream", key="sk-wrong", code=1)
  assert figures(out)["Failed requests"] == 2 and "UnauthorizedError" in out
