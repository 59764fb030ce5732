"""The scripts in examples/ and two benchmarks run as processes, and the systemd unit's command starts a server."""
import json
import os
import re
import shlex
import signal
import subprocess
import sys

import httpx2 as httpx   # installed with openai
import pytest
from helpers.commands import PYTHONPATH, ROOT
from helpers.servers import Server, wait_until

DEPLOY, KEY = ROOT / "examples/deploy", "sk-examples"
SMALL = "--max-num-seqs", 2, "--max-num-batched-tokens", 2   # two graph shapes


@pytest.fixture(scope="module")
def server():
  """A server with the bundled model and an API key."""
  with Server(None, *SMALL, "--api-key", KEY) as server: yield server


def run(*command, key=KEY, code=0):
  """Run a command, and return its stdout. Raises AssertionError if the exit code differs from `code`."""
  environment = {**os.environ, "OPENAI_API_KEY": key, "PYTHONPATH": PYTHONPATH}
  process = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=120, env=environment, cwd=ROOT)
  assert process.returncode == code, f"exit code {process.returncode}\n{process.stdout}\n{process.stderr}"
  return process.stdout


@pytest.mark.parametrize("script,pattern", [
  ("quickstart", r"Hello, world!\n(.+ \[(stop|length)]\n){4}\d+ tokens/s\n"), ("streaming", r"The cat .+\n"),
  ("ten_users", r"(.+ \(\d+ pieces, first token after [\d.]+ s\)\n){10}\d+ tokens in \d+ steps, .+\n"),
  ("custom_backend", r"[^\n]*\bunchanged: The cat \w[^\n]{20,}\n")])
def test_example_prints_its_texts(script, pattern):
  assert re.fullmatch(pattern, run(sys.executable, f"examples/{script}.py"), re.DOTALL)


def test_beam_search_example_prints_three_beams_per_prompt():
  rows = re.findall(r"^ +(-\d+\.\d{3}) (stop|length) +'(The cat|Once upon a time)(.*)'$",
                    run(sys.executable, "examples/beam_search.py"), re.MULTILINE)
  assert [prompt for *_, prompt, _ in rows] == ["The cat"] * 3 + ["Once upon a time"] * 3
  assert len({text for *_, text in rows}) == 6 and all(float(total) < 0 for total, *_ in rows)


@pytest.mark.slow
def test_pool_over_time_example_draws_a_chart(tmp_path):
  out = run(sys.executable, "examples/pool_over_time.py", tmp_path / "pool.svg")
  assert re.search(r"[1-9]\d* blocks shared; [1-9]\d* of \d+ prompt tokens cached; [1-9]\d* preemptions", out)
  assert (tmp_path / "pool.svg").read_text().endswith("</svg>\n")


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


def test_curl_script_requests_every_route(server):
  out = run("bash", DEPLOY / "curl.sh", server.url)
  answers = dict(part.strip().split("\n", 1) for part in out.split("\n\n# ")[1:])
  assert len(answers) == (DEPLOY / "curl.sh").read_text().count("\ntitle ")
  parsed = [json.loads(answer) for answer in answers.values() if answer.startswith("{")]
  errors = [answer["error"]["message"] for answer in parsed if answer.get("error")]   # embeddings, scores
  assert len(parsed) == 19 and [x.partition(" ")[0] for x in errors] == ["runner:", "model:", "model:"]
  assert out.count("data: [DONE]") == 2 and "tinyvllm:num_requests_running{" in out
  structured, = (json.loads(answer) for title, answer in answers.items() if title.startswith("JSON"))
  assert json.loads(structured["choices"][0]["text"])["name"] in ("Tom", "Kim")
  assert out.count("\n200 text/html") == 1 and out.count("\n200 application/json") == 1


def test_scripts_with_a_wrong_key_end_at_the_first_failure(server):
  run(sys.executable, "examples/openai_client.py", server.url, key="sk-wrong", code=1)
  assert '"code":401' in run("bash", DEPLOY / "curl.sh", server.url, key="sk-wrong", code=22).replace(" ", "")


def test_unit_command_starts_server_hides_key_and_stops_at_sigterm(words_folder, tmp_path):
  unit = (DEPLOY / "tinyvllm.service").read_text().replace("\\\n", " ")
  words = {"/opt/tinyvllm/bin/python": sys.executable, "/srv/models/mine": str(words_folder), "8000": "0"}
  command = [words.get(x, x) for x in shlex.split(re.search(r"^ExecStart=(.*)", unit, re.MULTILINE)[1])]
  (tmp_path / "api-key").write_text(KEY + "\n")
  environment = {**os.environ, "CREDENTIALS_DIRECTORY": str(tmp_path), "PYTHONPATH": PYTHONPATH}
  log = tmp_path / "log"
  with log.open("wb") as file:
    process = subprocess.Popen([*command, *map(str, SMALL)], stdout=file, stderr=file, env=environment, cwd=tmp_path)
  try:
    def ready():
      assert process.poll() is None, log.read_text()
      match = re.search(r"Uvicorn running on (http://\S+)", log.read_text())
      return match and httpx.get(match[1] + "/health").status_code == 200 and match[1]
    url = wait_until(ready, "the unit's server answers")
    assert httpx.get(url + "/v1/models").status_code == 401
    arguments = run("ps", "-ww", "-o", "args=", "-p", process.pid)
    assert "--shutdown-timeout 30" in arguments and KEY not in arguments
    out = run(sys.executable, "examples/openai_client.py", url)
    assert "No chat: this is a base model" in out, "the model has no chat template"
  finally: process.send_signal(signal.SIGTERM)
  assert process.wait(60) == 0, log.read_text()


# Benchmarks

def figures(out): return {name: float(value) for name, value in re.findall(r"^(.+?): +([\d.]+)$", out, re.MULTILINE)}


def test_throughput_benchmark_runs_with_random_weights():
  sizes = ["--running", 2, "--input-len", 8, "--output-len", 4]
  out = run(sys.executable, "tests/benchmarks/throughput.py", *sizes)
  assert re.search(r"^2 +4 +[\d.]+ ", out, re.MULTILINE)   # 2 running, 4 prompts


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


def test_serving_benchmark_with_wrong_key_prints_failed_requests(server):
  out = run(sys.executable, "tests/benchmarks/serving.py", "--url", server.url, "--num-prompts", 2, "--input-len", 8,
            "--output-len", 5, "--no-stream", key="sk-wrong", code=1)
  assert figures(out)["Failed requests"] == 2 and "UnauthorizedError" in out
