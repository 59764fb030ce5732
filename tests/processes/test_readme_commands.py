"""The README's commands and its Python example run unchanged, with a tiny model in place of the one they download. The
commands that install tinyvllm and run tests are left to .ci/run."""
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest
from helpers.commands import ROOT, run_process
from helpers.hub import Hub
from helpers.servers import Client, wait_until

README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S) for line in block.splitlines()]
PYTHON, = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
MODEL, = {*re.findall(r"\bHuggingFaceTB/[\w.-]+", README)}
BY_CI = "python3 -m venv ", ".venv/bin/pip install "
OURS = [line.split() for line in COMMANDS if not line.startswith(BY_CI)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory, chat_folder):
  """Variables for a hub that has a tiny model under the name of the README's."""
  folder = tmp_path_factory.mktemp("hub")
  shutil.copytree(chat_folder, folder / "root" / MODEL)
  with Hub(folder / "root") as hub: yield hub.environment(folder / "home")


def process_of(words):
  assert words[0] == ".venv/bin/tinyvllm"
  return [sys.executable, "-m", "tinyvllm", *words[1:]]


@pytest.mark.parametrize("words", [words for words in OURS if words[1] != "serve"], ids=" ".join)
def test_readme_command_ends_with_output(environment, words):
  run = run_process(*process_of(words), stdin="hello\n", **environment)
  assert run.returncode == 0 and run.stdout.strip() and "Traceback" not in run.stderr, run.stderr


@pytest.mark.parametrize("words", [words for words in OURS if words[1] == "serve"], ids=" ".join)
def test_readme_server_has_page_at_the_named_port(environment, words):
  with socket.socket() as free:   # in place of port 8000, which may be in use
    free.bind(("127.0.0.1", 0))
    port = str(free.getsockname()[1])
  assert "http://127.0.0.1:8000/" in README and words.count("8000") == 1
  command = [port if word == "8000" else word for word in process_of(words)]
  server = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stderr=subprocess.DEVNULL)
  try:
    client = Client()
    client.url = f"http://127.0.0.1:{port}"
    wait_until(client.healthy, "the server is ready", 240)
    assert "<html" in client.get("/").text and client.get("/v1/models").json()["data"][0]["id"] == MODEL
  finally: server.terminate()
  assert server.wait(60) == 0


def test_readme_python_example_prints_answers(environment):
  run = run_process(sys.executable, "-c", PYTHON, **environment)
  assert run.returncode == 0, run.stderr
  lines = run.stdout.splitlines()
  assert lines[0] == "Hello, world!" and lines[1].startswith("The cat sat on the warm stone") and len(lines) >= 4
  assert "Once upon a time" in run.stdout and "The capital of France is" in run.stdout
