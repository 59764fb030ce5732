"""`tinyvllm serve` with several models, each in a process of its own: who runs, what clients see when one dies, and
that no process stays behind."""
import json
import os
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.commands import flags
from helpers.protocol import COMPLETIONS, running_request
from helpers.servers import Server, error_of, wait_until

from tinyvllm_extra.kernels.drivers import RESERVE, host_memory


@pytest.fixture
def router(chat_folder, tmp_path):
  """A router of four models of which two fit. The last one cannot be loaded: its tokenizer is broken."""
  shutil.copytree(chat_folder, tmp_path / "d")
  (tmp_path / "d/tokenizer.model").write_text("none")
  models = {name: str(chat_folder) for name in "abc"} | {"d": {"model": str(tmp_path / "d")}}
  (tmp_path / "models.yaml").write_text(json.dumps({"model": models, "max-num-seqs": 4, "max-num-batched-tokens": 4}))
  limit = 2.5 * RESERVE / host_memory().free
  with Server(None, "--config", tmp_path / "models.yaml", *flags(gpu_memory_utilization=limit)) as server: yield server


def pids_of(server):
  """Return the processes of the children."""
  return subprocess.run(["pgrep", "-P", str(server.process.pid)], capture_output=True, text=True).stdout.split()


def complete(server, model):
  body = server.post(COMPLETIONS, {"model": model, "prompt": "the cat", "max_tokens": 3}, timeout=200).json()
  return body.get("model", body)


def test_children_start_die_and_end_with_their_router(router):
  with ThreadPoolExecutor(51) as pool:
    answers = [pool.submit(complete, router, "abc"[i % 3]) for i in range(50)]
    bad = pool.submit(router.post, COMPLETIONS, {"model": "d", "prompt": "a"}, timeout=200)
  assert [x.result() for x in answers] == [*"abc" * 16, *"ab"]
  message = error_of(bad.result(), 502)["message"]
  assert message.startswith("d: exit code 1: tinyvllm: ") and "tokenizer" in message, message
  states = {x["id"]: x["status"] for x in router.get("/v1/models").json()["data"]}
  ready = [name for name, state in states.items() if state == "ready"]
  assert 1 <= len(ready) <= 2, states

  with running_request(router, model=ready[0]) as lines:
    for pid in pids_of(router): os.kill(int(pid), signal.SIGKILL)
    *_, last, _ = lines
  error = json.loads(last.removeprefix("data: "))["error"]
  assert error["code"] == 502 and f"{ready[0]}: the process ended with Killed" in error["message"]
  assert complete(router, ready[0]) == ready[0], "it is started again"

  pids = pids_of(router)
  with running_request(router, model=ready[0], max_tokens=100) as lines:
    router.signal(signal.SIGTERM)
    assert [*lines][-2] == "data: [DONE]", "the running request ends first"
  assert pids and router.wait() == 0 and not any(Path("/proc", pid).exists() for pid in pids)
  assert "Traceback" not in router.log, router.log


def test_children_end_if_the_router_is_killed(router):
  with running_request(router, model="a"):
    pids = pids_of(router)
    router.signal(signal.SIGKILL)
  wait_until(lambda: pids and not any(Path("/proc", pid).exists() for pid in pids), "no process is left")
