"""Codex and Claude Code against `tinyvllm serve`: both programs run the command that the model calls, and print its
answer. TINYVLLM_AGENTS is the folder with their commands (see tests/README.md)."""
import json
import os
import subprocess
from pathlib import Path

import pytest
from helpers.agents import TEMPLATE
from helpers.engines import ENGINE
from helpers.models import tiny_model
from helpers.requests import flags
from helpers.servers import Server

LENGTH = 131072   # the programs' instructions and tools have more than 10,000 tokens
# A model that is good at this conversation: it calls the function in CALL, then names the file in its result
SCRIPT = """
import os
from tinyvllm_extra.server import protocol
sampling_params = protocol.sampling_params
def scripted(body, defaults, escapes):   # a random model would use the escapes
  last = body.messages[-1]
  text = os.environ["CALL"] if body.tools else "a title"
  if last["role"] == "tool": text = "there is a file" if "hello.txt" in str(last) else "there is no file"
  constraint = {"response_format": None, "structured_outputs": {"choice": [text]}}
  return sampling_params(body.model_copy(update=constraint), defaults)
protocol.sampling_params = scripted
"""
CODEX = """
model = "tiny"
model_provider = "local"
check_for_update_on_startup = false
[model_providers.local]
name = "tinyvllm"
base_url = "{url}/v1"
wire_api = "responses"
[analytics]
enabled = false
"""


@pytest.mark.parametrize("command,call,variables", [
  (["codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "List the files."],
   {"name": "exec_command", "arguments": {"cmd": "ls"}}, {"CODEX_HOME": "{home}"}),
  (["claude", "-p", "List the files.", "--allowedTools", "Bash"],
   {"name": "Bash", "arguments": {"command": "ls", "description": "List files"}},
   {"HOME": "{home}", "CLAUDE_CONFIG_DIR": "{home}", "ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_AUTH_TOKEN": "none",
    "ANTHROPIC_MODEL": "tiny", "ANTHROPIC_SMALL_FAST_MODEL": "tiny", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1"})], ids=["codex", "claude"])
def test_agent_runs_command_and_prints_answer(tmp_path, command, call, variables):
  program = Path(os.environ.get("TINYVLLM_AGENTS", ""), command[0])
  if not program.exists(): pytest.fail(f"TINYVLLM_AGENTS must be a folder with codex and claude: {program}")
  work, home = tmp_path / "work", tmp_path / "home"
  for path in (home, work): path.mkdir()
  (work / "hello.txt").write_text("hello\n")
  folder = tiny_model(tmp_path / "model", words=True, max_position_embeddings=LENGTH, chat_template=TEMPLATE)
  options = flags(**{**ENGINE, "max_model_len": LENGTH, "max_num_batched_tokens": 2048, "block_size": 16})
  with Server(folder, *options, "--served-model-name", "tiny", "--strict-fields", before=SCRIPT,
              environment={"CALL": f"<tool_call>{json.dumps(call)}</tool_call>"}) as server:
    (home / "config.toml").write_text(CODEX.format(url=server.url))
    environment = {name: value.format(url=server.url, home=home) for name, value in variables.items()}
    run = subprocess.run([program, *command[1:]], cwd=work, env={**os.environ, **environment},
                         stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}\nserver:\n{server.log}"
    assert "there is a file" in run.stdout and "Traceback" not in server.log, server.log
    metrics = server.metrics()
  hits, queries = (metrics[f"prefix_cache_{name}_total"] for name in ("hits", "queries"))
  assert hits > queries / 3, "the second turn reads the first one's blocks from the prefix cache"
