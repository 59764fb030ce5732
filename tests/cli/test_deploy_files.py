"""Files of examples/deploy: the systemd unit, Prometheus' rules and the dashboard, which query existing metrics, and
settings of chat front ends."""
import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.requests import flags
from helpers.servers import LocalServer
from prometheus_client.parser import text_string_to_metric_families

DEPLOY, KEY = Path(__file__).parents[2] / "examples/deploy", "sk-examples"


@pytest.fixture(scope="module")
def server():
  """A server with the bundled model and an API key."""
  with LocalServer(None, *flags(max_num_seqs=2, max_num_batched_tokens=2, api_key=KEY)) as server: yield server


@pytest.fixture(scope="module")
def samples(server):
  """The labels of each metrics sample after a request, by the sample's name."""
  server.client(api_key=KEY).completions.create(model="tinyvllm", prompt="The cat", max_tokens=3, temperature=0)
  families = text_string_to_metric_families(server.get("/metrics").raise_for_status().text)
  return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def is_balanced(query): return query.count("(") == query.count(")")


def labels_of(query):
  """Return the labels that a query groups by or selects."""
  groups = {x.strip() for group in re.findall(r"by \((.*?)\)", query) for x in group.split(",")}
  return groups | set(re.findall(r"(\w+)=~?\"", query))


# Prometheus and Grafana

def test_prometheus_config_metrics_path_serves_metrics(server):
  config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
  job, = config["scrape_configs"]
  assert set(config) <= {"global", "rule_files", "scrape_configs"}
  assert set(job) <= {"job_name", "metrics_path", "static_configs"}
  assert job["static_configs"] == [{"targets": ["127.0.0.1:8000"]}]
  answer = server.get(job["metrics_path"]).raise_for_status()   # without a key
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
    assert labels_of(query) | set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"]))) <= labels, name
    assert is_balanced(query) and re.fullmatch(r"\d+m", rule["for"]), name
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert set(rule["annotations"]) == {"summary", "description"}
  job, = config["scrape_configs"]
  assert f'up{{job="{job["job_name"]}"}} == 0' in [rule["expr"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def dashboard(): return json.loads((DEPLOY / "grafana.json").read_text())


def queries(dashboard): return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_dashboard_queries_existing_metrics_and_labels(dashboard, samples):
  def stem(name): return re.sub("_(bucket|sum|count|created|total)$", "", name)
  queried = set()
  for query in [*queries(dashboard), dashboard["templating"]["list"][1]["definition"]]:
    names = re.findall(r"tinyvllm:\w+", query)
    assert names and set(names) <= set(samples), f"{set(names) - set(samples)} in {query}"
    assert labels_of(query) <= set.union(*(samples[name] for name in names)), query
    queried |= set(map(stem, names))
  unqueried = {stem(name) for name in samples if name.startswith("tinyvllm:")} - queried
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
  assert all(is_balanced(query) and 'model_name=~"$model_name"' in query for query in queries(dashboard))
  for title in ("Time to first token", "Inter-token latency"):
    panel = dashboard["panels"][titles.index(title)]
    assert [re.match(r"histogram_quantile\(([\d.]+)", t["expr"])[1] for t in panel["targets"]] == ["0.5", "0.99"]


# Front ends

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
def test_server_accepts_front_end_requests(server, fields):
  body = {"model": "tinyvllm", "messages": [{"role": "user", "content": "Hello"}], **fields}
  answer = server.post("/v1/chat/completions", body, headers={"Authorization": f"Bearer {KEY}"})
  assert answer.status_code == 200, answer.text
  assert ("data: [DONE]" in answer.text) == fields["stream"]


# systemd and curl

def test_unit_settings_are_hardened_and_allow_graceful_shutdown():
  parser = configparser.RawConfigParser(strict=False, delimiters="=", comment_prefixes="#")
  parser.optionxform = str
  parser.read_string((DEPLOY / "tinyvllm.service").read_text().replace("\\\n", " "))
  assert parser.sections() == ["Unit", "Service", "Install"]
  service = parser["Service"]
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
  run = subprocess.run(verify, capture_output=True, text=True, timeout=60)
  assert (run.returncode, run.stderr) == (0, "")
  (tmp_path / "tinyvllm.service").write_text(unit.replace("KillSignal=", "KilSignal="))
  assert "KilSignal" in subprocess.run(verify, capture_output=True, text=True, timeout=60).stderr


def test_curl_script_names_every_route(server):
  script = (DEPLOY / "curl.sh").read_text()
  for path in server.get("/openapi.json").raise_for_status().json()["paths"]:
    assert f'"$url{path.replace("{name}", "$model")}"' in script, f"{path} is not in curl.sh"
