"""Files of examples/deploy: the systemd unit, Prometheus' rules and the dashboard, which query existing metrics, and
settings of chat front ends."""
import json
import re
import shutil
import sys

import pytest
import yaml
from helpers.commands import ROOT, flags, run_process
from helpers.servers import LocalServer

DEPLOY, KEY = ROOT / "examples/deploy", "sk-examples"


@pytest.fixture(scope="module")
def server():
  """A server with the bundled model and an API key."""
  with LocalServer(None, *flags(max_num_seqs=2, max_num_batched_tokens=2, api_key=KEY)) as server: yield server


@pytest.fixture(scope="module")
def samples(server):
  """The labels of each metrics sample after a request, by the sample's name."""
  server.client(api_key=KEY).completions.create(model="tinyvllm", prompt="The cat", max_tokens=3, temperature=0)
  return {sample.name: set(sample.labels) for sample in server.samples()}


def check_query(query, samples, text=""):
  """Check that a query, and the text of its alert, use existing metrics and labels. Return the metrics."""
  names = re.findall(r"tinyvllm:\w+", query)
  assert set(names) <= set(samples) and query.count("(") == query.count(")"), query
  grouped = {x.strip() for group in re.findall(r"by \((.*?)\)", query) for x in group.split(",")}
  labels = grouped.union(re.findall(r"(\w+)=~?\"", query), re.findall(r"\$labels\.(\w+)", text))
  existing = {"instance", "job"}.union(*(samples[name] for name in names))   # Prometheus adds the first two
  assert labels <= existing, query
  return names


# Prometheus and Grafana

def test_prometheus_config_and_alert_rules_use_served_metrics(server, samples):
  config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
  job, = config["scrape_configs"]
  assert set(config) <= {"global", "rule_files", "scrape_configs"}
  assert set(job) <= {"job_name", "metrics_path", "static_configs"}
  answer = server.get(job["metrics_path"]).raise_for_status()   # without a key
  assert answer.headers["content-type"].startswith("text/plain; version=")
  group, = yaml.safe_load((DEPLOY / config["rule_files"][0]).read_text())["groups"]
  rules = {rule["alert"]: rule for rule in group["rules"]}
  assert len(rules) == len(group["rules"]) >= 8
  assert f'up{{job="{job["job_name"]}"}} == 0' in [rule["expr"] for rule in rules.values()]
  for name, rule in rules.items():
    assert check_query(rule["expr"], samples, str(rule["annotations"])) or rule["expr"].startswith("up{"), name
    assert re.fullmatch(r"\d+m", rule["for"]) and set(rule["annotations"]) == {"summary", "description"}, name


def test_dashboard_shows_all_metrics_in_panels_that_do_not_overlap(samples):
  def stem(name): return re.sub("_(bucket|sum|count|created|total)$", "", name)
  dashboard = json.loads((DEPLOY / "grafana.json").read_text())
  source, model = dashboard["templating"]["list"]
  assert (source["name"], source["type"], source["query"]) == ("datasource", "datasource", "prometheus")
  assert (model["name"], model["type"]) == ("model_name", "query") and check_query(model["definition"], samples)
  occupied, queried, panels = set(), set(), dashboard["panels"]
  for panel in panels:
    for part in (panel, model, *panel["targets"]): assert part["datasource"]["uid"] == "${datasource}"
    x, y, w, h = (panel["gridPos"][name] for name in "xywh")
    cells = {(i, j) for i in range(x, x + w) for j in range(y, y + h)}
    assert x + w <= 24 and not cells & occupied, f"{panel['title']} overlaps another panel"
    occupied |= cells
    for query in [target["expr"] for target in panel["targets"]]:
      names = check_query(query, samples)
      assert names and 'model_name=~"$model_name"' in query
      queried |= set(map(stem, names))
  assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
  assert {stem(name) for name in samples if name.startswith("tinyvllm:")} <= queried


# Front ends

def test_front_end_settings_use_server_api_url():
  blocks = re.findall(r"(?ms)^```(yaml|sh)\n(.*?)^```", (DEPLOY / "front_end.md").read_text())
  assert len([yaml.safe_load(text) for language, text in blocks if language == "yaml"]) == 2
  urls = re.findall(r"https?://[\w.]+:8000[^\s`>,;\"]*", "".join(text for _, text in blocks))
  assert len(urls) == 3 and all(url.endswith(":8000/v1") for url in urls)


# systemd and curl

def test_unit_settings_are_hardened_and_allow_graceful_shutdown():
  service = dict(re.findall(r"(?m)^(\w+)=(.*)$", (DEPLOY / "tinyvllm.service").read_text().replace("\\\n", " ")))
  shutdown = int(re.search(r"--shutdown-timeout (\d+)", service["ExecStart"])[1])
  names = ("KillSignal", "DynamicUser", "NoNewPrivileges", "ProtectSystem", "CapabilityBoundingSet")
  assert [service[name] for name in names] == ["SIGTERM", "yes", "yes", "strict", ""]
  assert int(service["TimeoutStopSec"]) > shutdown + 5, "systemd must not send SIGKILL before the running requests end"
  assert "LoadCredential" in service and "sk-" not in service["ExecStart"], "the unit must not contain the key"
  assert "MemoryDenyWriteExecute" not in service, "kernels are compiled into memory"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_analyze_verify_reports_no_errors(tmp_path):
  unit = (DEPLOY / "tinyvllm.service").read_text()
  (tmp_path / "tinyvllm.service").write_text(unit.replace("/opt/tinyvllm/bin/python", sys.executable))
  verify = ["systemd-analyze", "verify", "--man=no", tmp_path / "tinyvllm.service"]
  run = run_process(*verify)
  assert (run.returncode, run.stderr) == (0, "")
  (tmp_path / "tinyvllm.service").write_text(unit.replace("KillSignal=", "KilSignal="))
  assert "KilSignal" in run_process(*verify).stderr


def test_curl_script_names_every_route(server):
  script = (DEPLOY / "curl.sh").read_text()
  for path in server.get("/openapi.json").raise_for_status().json()["paths"]:
    assert f'"$url{path.replace("{name}", "$model")}"' in script, f"{path} is not in curl.sh"
