"""examples/openai_client.py, beam_search.py, custom_backend.py and deploy/: the scripts run, the systemd unit starts a
server, and the dashboard queries existing metrics. Also the serving benchmark."""
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

import httpx2 as httpx   # installed with openai
import openai
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from helpers.servers import Server, wait_until

from examples import openai_client

ROOT = Path(__file__).parents[2]
DEPLOY, KEY = ROOT / "examples/deploy", "sk-examples"
PYTHONPATH = os.pathsep.join(map(str, [ROOT, ROOT / "examples"]))   # in case the packages are not installed
SMALL = "--max-num-seqs", 2, "--max-num-batched-tokens", 2   # two graph shapes
MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def server():
  """A server with the bundled model and an API key."""
  with Server(None, *SMALL, "--api-key", KEY) as server: yield server


@pytest.fixture(scope="module")
def unit():
  """The unit file without comments, with one line per setting."""
  lines = [line for line in (DEPLOY / "tinyvllm.service").read_text().splitlines() if not line.startswith("#")]
  return "\n".join(lines).replace("\\\n", " ")


@pytest.fixture(scope="module")
def service(unit):
  """The unit's [Service] section. Only the last value of a repeated name is kept."""
  parser = configparser.RawConfigParser(strict=False, delimiters="=", comment_prefixes="#")
  parser.optionxform = str
  parser.read_string(unit)
  assert parser.sections() == ["Unit", "Service", "Install"]
  return parser["Service"]


@pytest.fixture(scope="module")
def samples(server):
  """The labels of each metrics sample after a request, by the sample's name."""
  server.client(api_key=KEY).completions.create(model="tinyvllm", prompt="The cat", max_tokens=3, temperature=0)
  families = text_string_to_metric_families(httpx.get(server.url + "/metrics").raise_for_status().text)
  return {sample.name: set(sample.labels) for family in families for sample in family.samples}


@pytest.fixture(scope="module")
def dashboard(): return json.loads((DEPLOY / "grafana.json").read_text())


def run(*command, key=KEY, code=0):
  """Run a command, and return its stdout. Raises AssertionError if the exit code differs from `code`."""
  environment = {**os.environ, "OPENAI_API_KEY": key, "PYTHONPATH": PYTHONPATH}
  process = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
  assert process.returncode == code, f"exit code {process.returncode}\n{process.stdout}\n{process.stderr}"
  return process.stdout


@pytest.mark.slow
def test_openai_client_with_bundled_model_prints_all_answers(server):
  out = run(sys.executable, "examples/openai_client.py", server.url)
  assert out.startswith(f"{server.url} serves tinyvllm\n")
  assert "'The cat" in out and [int(i) for i in re.findall(r"Choice (\d)", out)] == [0, 1, 2, 3]
  assert re.search(r"\n  The cat.+\n  \d+ tokens\b[^\n]*\b\d+ [^\n]*\n", out, re.DOTALL), "the stream and its usage"
  assert "Hello! How can I help you?" in out and "base model" not in out
  pet = json.loads(re.search(r"\n  '(\{.*\"animal\".*\})'", out)[1])
  assert pet["animal"] in ("cat", "dog", "bird") and 0 <= pet["age"] <= 20
  assert re.search(r"\n  '(Tom|Kim|Sam), a (cat|dog|bird), is \d+'", out)
  tokens = re.findall(r"^  ('.*') (-\d+\.\d\d|-?0\.00) (\{.*\})$", out, re.MULTILINE)
  assert len(tokens) == 6, "log probabilities of three tokens of the chat and three of the completion"


@pytest.mark.slow
def test_openai_client_wrong_api_key_exits_1(server):
  run(sys.executable, "examples/openai_client.py", server.url, key="sk-wrong", code=1)


@pytest.mark.slow
def test_beam_search_example_prints_three_beams_per_prompt():
  rows = re.findall(r"^ +(-\d+\.\d{3}) (stop|length) +'(The cat|Once upon a time)(.*)'$",
                    run(sys.executable, "examples/beam_search.py"), re.MULTILINE)
  assert [prompt for *_, prompt, _ in rows] == ["The cat"] * 3 + ["Once upon a time"] * 3
  assert len({text for *_, text in rows}) == 6 and all(float(total) < 0 for total, *_ in rows)


@pytest.mark.slow
def test_custom_backend_example_leaves_output_unchanged():
  out = run(sys.executable, "examples/custom_backend.py")
  assert re.fullmatch(r"[^\n]*\bunchanged: The cat \w[^\n]{20,}\n", out)


@pytest.mark.slow
def test_curl_script_requests_every_route(server):
  script = (DEPLOY / "curl.sh").read_text()
  for path in server.http().get("/openapi.json").raise_for_status().json()["paths"]:
    assert f'"$url{path.replace("{name}", "$model")}"' in script, f"{path} is not in curl.sh"
  out = run("bash", DEPLOY / "curl.sh", server.url)
  answers = dict(part.strip().split("\n", 1) for part in out.split("\n\n# ")[1:])
  assert len(answers) == script.count("\ntitle ")
  parsed = [json.loads(answer) for answer in answers.values() if answer.startswith("{")]
  errors = [answer["error"]["message"] for answer in parsed if answer.get("error")]   # embeddings, scores
  assert len(parsed) == 19 and [x.partition(" ")[0] for x in errors] == ["runner:", "model:", "model:"]
  assert out.count("data: [DONE]") == 2 and "tinyvllm:num_requests_running{" in out
  structured, = (json.loads(answer) for title, answer in answers.items() if title.startswith("JSON"))
  assert json.loads(structured["choices"][0]["text"])["name"] in ("Tom", "Kim")
  assert out.count("\n200 text/html") == 1 and out.count("\n200 application/json") == 1


@pytest.mark.slow
def test_curl_script_wrong_api_key_stops_at_first_failure(server):
  assert '"code":401' in run("bash", DEPLOY / "curl.sh", server.url, key="sk-wrong", code=22).replace(" ", "")


def code_blocks(language):
  return re.findall(rf"^```{language}\n(.*?)^```", (DEPLOY / "front_end.md").read_text(), re.MULTILINE | re.DOTALL)


def test_front_end_settings_use_server_api_url():
  libre_chat, silly_tavern = map(yaml.safe_load, code_blocks("yaml"))
  endpoint, = libre_chat["endpoints"]["custom"]
  assert endpoint["apiKey"] == "${TINYVLLM_API_KEY}" and endpoint["models"]["default"]
  assert silly_tavern == {"min_p": 0.05, "repetition_penalty": 1.1}
  urls = re.findall(r"https?://[\w.]+:8000[^\s`>,;]*", "".join([*code_blocks("yaml"), *code_blocks("sh")]))
  assert len(urls) == 3 and all(url.rstrip('"').endswith(":8000/v1") for url in urls)


@pytest.mark.parametrize("fields", [
  {"stream": True, "max_tokens": 4},                                                     # Open WebUI: chat
  {"stream": False, "max_completion_tokens": 4},                                         # Open WebUI: title
  {"stream": True, "max_tokens": 4, "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0,
   "user": "LibreChat_User_ID", "stream_options": {"include_usage": True}},              # LibreChat
  {"stream": True, "max_tokens": 4, "temperature": 1, "top_p": 1, "presence_penalty": 0, "frequency_penalty": 0,
   "seed": 7, "n": 1, "stop": ["\nUser:"], "logit_bias": {}, "min_p": 0.05, "repetition_penalty": 1.1}],   # SillyTavern
  ids=["Open WebUI", "Open WebUI title", "LibreChat", "SillyTavern"])
@pytest.mark.slow
def test_server_accepts_front_end_requests(server, fields):
  with server.http(headers={"Authorization": f"Bearer {KEY}"}) as client:
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    answer = client.post("/v1/chat/completions", json={"model": model, "messages": MESSAGES, **fields})
  assert answer.status_code == 200, answer.text
  assert ("data: [DONE]" in answer.text) == fields["stream"]


def test_unit_settings_are_hardened_and_allow_graceful_shutdown(service):
  assert service["KillSignal"] == "SIGTERM" and service["DynamicUser"] == service["NoNewPrivileges"] == "yes"
  shutdown = int(re.search(r"--shutdown-timeout (\d+)", service["ExecStart"])[1])
  assert int(service["TimeoutStopSec"]) > shutdown + 5, "systemd must not send SIGKILL before the running requests end"
  assert "LoadCredential" in service and "sk-" not in service["ExecStart"], "the unit must not contain the key"
  assert service["ProtectSystem"] == "strict" and service["CapabilityBoundingSet"] == ""
  assert "MemoryDenyWriteExecute" not in service, "kernels are compiled into memory"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_analyze_verify_reports_no_errors(tmp_path):
  unit = (DEPLOY / "tinyvllm.service").read_text()
  (tmp_path / "tinyvllm.service").write_text(unit.replace("/opt/tinyvllm/bin/python", sys.executable))
  verify = ["systemd-analyze", "verify", "--man=no", tmp_path / "tinyvllm.service"]
  process = subprocess.run(verify, capture_output=True, text=True, timeout=60)
  assert (process.returncode, process.stderr) == (0, ""), process.stderr
  (tmp_path / "tinyvllm.service").write_text(unit.replace("KillSignal=", "KilSignal="))
  assert "KilSignal" in subprocess.run(verify, capture_output=True, text=True, timeout=60).stderr


@pytest.mark.slow
def test_unit_command_starts_server_hides_key_and_stops_at_sigterm(service, words_folder, tmp_path, capsys):
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
      match = re.search(r"Uvicorn running on (http://\S+)", (tmp_path / "log").read_text())
      return match and httpx.get(match[1] + "/health").status_code == 200 and match[1]
    url = wait_until(ready, "the unit's server answers")
    assert httpx.get(url + "/v1/models").status_code == 401
    arguments = run("ps", "-ww", "-o", "args=", "-p", process.pid)
    assert "--shutdown-timeout 30" in arguments and KEY not in arguments
    client = openai.OpenAI(base_url=url + "/v1", api_key=KEY)
    openai_client.chat(client, client.models.list().data[0].id, "Hello")   # the model has no chat template
    assert "base model" in capsys.readouterr().out
  finally: process.send_signal(signal.SIGTERM)
  assert process.wait(60) == 0, (tmp_path / "log").read_text()


@pytest.mark.slow
def test_prometheus_config_metrics_path_serves_metrics(server):
  config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
  job, = config["scrape_configs"]
  assert set(config) <= {"global", "rule_files", "scrape_configs"}
  assert set(job) <= {"job_name", "metrics_path", "static_configs"}
  assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
  answer = httpx.get(server.url + job["metrics_path"]).raise_for_status()   # without a key
  assert answer.headers["content-type"].startswith("text/plain; version=")
  assert [*text_string_to_metric_families(answer.text)]


def test_alert_rules_use_existing_metrics_and_labels(samples):
  config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
  file, = config["rule_files"]
  group, = yaml.safe_load((DEPLOY / file).read_text())["groups"]
  names = [rule["alert"] for rule in group["rules"]]
  assert len(names) == len(set(names)) >= 8 and all(name.startswith("Tinyvllm") for name in names)
  for rule in group["rules"]:
    query, name = rule["expr"], rule["alert"]
    metrics = re.findall(r"tinyvllm:\w+", query)
    assert set(metrics) <= set(samples) and (metrics or query.startswith("up{")), name
    labels = {"instance", "job"}.union(*(samples[metric] for metric in metrics))   # Prometheus adds the first two
    assert {x.strip() for group in re.findall(r"by \((.*?)\)", query) for x in group.split(",")} <= labels, name
    assert set(re.findall(r"(\w+)=~?\"", query)) <= labels, name
    assert set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= labels, name
    assert query.count("(") == query.count(")") and re.fullmatch(r"\d+m", rule["for"]), name
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
  job, = config["scrape_configs"]
  assert f'up{{job="{job["job_name"]}"}} == 0' in [rule["expr"] for rule in group["rules"]]


def queries(dashboard): return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_dashboard_queries_existing_metrics_and_labels(dashboard, samples):
  queried = set()
  for query in [*queries(dashboard), dashboard["templating"]["list"][1]["definition"]]:
    names = re.findall(r"tinyvllm:\w+", query)
    assert names and set(names) <= set(samples), f"{set(names) - set(samples)} in {query}"
    labels = {x.strip() for group in re.findall(r"by \((.*?)\)", query) for x in group.split(",")}
    labels |= set(re.findall(r"(\w+)=~", query))
    assert labels <= set.union(*(samples[name] for name in names)), query
    queried |= set(names)
  def stem(name): return re.sub("_(bucket|sum|count|created|total)$", "", name)
  unqueried = {stem(name) for name in samples if name.startswith("tinyvllm:")} - set(map(stem, queried))
  assert not unqueried, f"no panel shows {unqueried}"


def test_dashboard_panels_have_datasource_and_do_not_overlap(dashboard):
  source, model = dashboard["templating"]["list"]
  assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
  assert (model["name"], model["type"]) == ("model_name", "query")
  occupied, titles = set(), [panel["title"] for panel in dashboard["panels"]]
  for panel in dashboard["panels"]:
    for part in (panel, model, *panel["targets"]): assert part["datasource"]["uid"] == "${datasource}"
    x, y, w, h = (panel["gridPos"][name] for name in "xywh")
    cells = {(i, j) for i in range(x, x + w) for j in range(y, y + h)}
    assert x + w <= 24 and not cells & occupied, f"{panel['title']} overlaps another panel"
    occupied |= cells
  assert len({panel["id"] for panel in dashboard["panels"]}) == len(set(titles)) == len(titles)
  for query in queries(dashboard):
    assert query.count("(") == query.count(")") and 'model_name=~"$model_name"' in query
  for title in ("Time to first token", "Inter-token latency"):
    panel = dashboard["panels"][titles.index(title)]
    assert [re.match(r"histogram_quantile\(([\d.]+)", t["expr"])[1] for t in panel["targets"]] == ["0.5", "0.99"]


def figures(out): return {name: float(value) for name, value in re.findall(r"^(.+?): +([\d.]+)$", out, re.MULTILINE)}


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--quantization", "int4")], ids=lambda x: "".join(x[1:]) or "plain")
def test_throughput_benchmark_runs_with_random_weights(options):
  sizes = ["--running", 2, "--input-len", 8, "--output-len", 4]
  out = run(sys.executable, "tests/benchmarks/throughput.py", *sizes, *options)
  assert re.search(r"^2 +4 +[\d.]+ ", out, re.MULTILINE)   # 2 running, 4 prompts


@pytest.mark.slow
def test_serving_benchmark_prints_throughput_and_latency(server):
  values = figures(run(sys.executable, "tests/benchmarks/serving.py", "--url", server.url, "--num-prompts", 6,
                       "--input-len", 8, "--output-len", 100, "--request-rate", 50, "--max-concurrency", 3))
  assert (values["Successful requests"], values["Failed requests"], values["Total generated tokens"]) == (6, 0, 600)
  assert values["Total input tokens"] == 48
  rate = values["Total generated tokens"] / values["Benchmark duration (s)"]
  assert values["Output token throughput (tokens/s)"] == pytest.approx(rate, rel=0.1)   # both are rounded
  for name in ("TTFT", "TPOT", "ITL"):
    mean, median, p99 = (values[f"{statistic} {name} (ms)"] for statistic in ("Mean", "Median", "P99"))
    # Outputs are long, because a client on a busy machine may read a short one at once: then TPOT and ITL are 0
    assert mean > 0 and p99 >= median >= 0


@pytest.mark.slow
def test_serving_benchmark_with_wrong_key_prints_failed_requests(server):
  out = run(sys.executable, "tests/benchmarks/serving.py", "--url", server.url, "--num-prompts", 2, "--input-len", 8,
            "--output-len", 5, "--no-stream", key="sk-wrong", code=1)
  assert figures(out)["Failed requests"] == 2 and "UnauthorizedError" in out
