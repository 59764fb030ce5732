"""Codex and Claude Code against `tinyvllm serve`: both programs run the command that the model calls, and print its
answer. TINYVLLM_AGENTS is the folder with their commands (see tests/README.md)."""
import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers.agents import SCRIPT, TEMPLATE
from helpers.data import DATA, read_data
from helpers.engines import ENGINE
from helpers.models import tiny_model
from helpers.commands import flags
from helpers.servers import Server

# Each program's command line, the call of its tool that lists files, and its variables
PROGRAMS = read_data("agent_programs.json")
LENGTH = 131072   # the programs' instructions and tools have more than 10,000 tokens


@pytest.mark.parametrize("case", PROGRAMS, ids=lambda case: case["command"][0])
def test_agent_runs_command_and_prints_answer(tmp_path, case):
  name, *options = case["command"]
  program = Path(os.environ.get("TINYVLLM_AGENTS", ""), name)
  if not program.exists(): pytest.fail(f"TINYVLLM_AGENTS must be a folder with codex and claude: {program}")
  work, home = tmp_path / "work", tmp_path / "home"
  for path in (home, work): path.mkdir()
  (work / "hello.txt").write_text("hello\n")
  folder = tiny_model(tmp_path / "model", words=True, max_position_embeddings=LENGTH, chat_template=TEMPLATE)
  engine = flags(**{**ENGINE, "max_model_len": LENGTH, "max_num_batched_tokens": 2048, "block_size": 16})
  call = f"<tool_call>{json.dumps(case['call'])}</tool_call>"
  script = {"CALL": call, "RESULT": "hello.txt", "ANSWER": "there is a file"}
  with Server(folder, *engine, "--served-model-name", "tiny", "--strict-fields", before=SCRIPT,
              environment=script) as server:
    (home / "config.toml").write_text((DATA / "codex.toml").read_text().format(url=server.url))
    environment = {name: value.format(url=server.url, home=home) for name, value in case["variables"].items()}
    run = subprocess.run([program, *options], cwd=work, env={**os.environ, **environment},
                         stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}\nserver:\n{server.log}"
    assert "there is a file" in run.stdout and "Traceback" not in server.log, server.log
    metrics = server.metrics()
  hits, queries = (metrics[f"prefix_cache_{name}_total"] for name in ("hits", "queries"))
  assert hits > queries / 3, "the second turn reads the first one's blocks from the prefix cache"
