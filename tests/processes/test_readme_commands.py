"""The README's commands and its Python example run unchanged, with a tiny model in place of the one they download. The
commands that install tinyvllm and run tests are left to .ci/run."""
import re
import shutil
import sys

import pytest
from helpers.commands import ROOT, process, run_process
from helpers.hub import Hub
from helpers.servers import Server

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


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_readme_command_answers(environment, words):
  program, command, model, *options = words
  assert (program, model) == (".venv/bin/tinyvllm", MODEL)
  if command == "serve":
    assert options == ["--port", "8000"] and "at http://127.0.0.1:8000/." in README
    with Server(MODEL, environment=environment) as server:   # at a free port
      assert "<html" in server.get("/").text and server.get("/v1/models").json()["data"][0]["id"] == MODEL
      return
  run = process(command, model, *options, stdin="hello\n", **environment)
  assert run.returncode == 0 and run.stdout.strip() and "Traceback" not in run.stderr, run.stderr


def test_readme_python_example_prints_answers(environment):
  run = run_process(sys.executable, "-c", PYTHON, **environment)
  assert run.returncode == 0, run.stderr
  lines = run.stdout.splitlines()
  assert lines[0] == "Hello, world!" and lines[1].startswith("The cat sat on the warm stone") and len(lines) >= 4
  assert "Once upon a time" in run.stdout and "The capital of France is" in run.stdout
