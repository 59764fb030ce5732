"""A server's prefix cache file: saved on SIGUSR1 and at shutdown, loaded at startup, unharmed by signals."""
import os
import signal

import pytest
from helpers.engines import ENGINE
from helpers.commands import flags
from helpers.servers import Server, wait_until

SERVE = flags(**{**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4})


def ask(server, question):
  """Return the answer and the number of cached prompt tokens."""
  messages = [{"role": "system", "content": "the cat sat on the mat and the dog ran to the red house " * 2},
              {"role": "user", "content": question}]
  body = {"messages": messages, "temperature": 0.0, "max_tokens": 8}
  answer = server.post("/v1/chat/completions", body).raise_for_status().json()
  return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def warnings_of(server):
  return [line for line in server.log.splitlines() if "prefix cache '" in line and "does not exist" not in line]


def test_server_keeps_prefix_cache_across_restarts(chat_folder, tmp_path):
  """Saved on SIGUSR1 and SIGTERM, loaded at startup, and left alone by SIGKILL."""
  path = tmp_path / "cache"
  with Server(chat_folder, *SERVE, "--prefix-cache-file", path) as server:
    assert server.log.count("prefix cache") == 1 and "does not exist; starting without it" in server.log
    first = ask(server, "hello")
    server.signal(signal.SIGUSR1)
    wait_until(path.exists, "SIGUSR1 saves the file")
    again = ask(server, "hello")
    assert first == (again[0], 0) and again[1] > 40
    path.unlink()
    assert server.stop() == 0, server.log
    assert os.listdir(tmp_path) == ["cache"] and "Traceback" not in server.log
  raw = path.read_bytes()
  with Server(chat_folder, *SERVE, "--prefix-cache-file", path) as server:
    assert ask(server, "hello") == again
    assert ask(server, "the dog")[1] > 20, "the system prompt is cached"
    assert not warnings_of(server)
    server.signal(signal.SIGKILL)
    server.wait()
  assert path.read_bytes() == raw


@pytest.mark.slow
def test_signals_during_save_do_not_damage_file(chat_folder, tmp_path):
  path, slow = tmp_path / "cache", tmp_path / "slow"
  fault = f"""
import os, pathlib, time, tinyvllm_extra.cache.prefix_cache
replace = os.replace
def slowly(*paths):
  pathlib.Path({str(slow)!r}).touch()
  time.sleep(2)
  replace(*paths)
os.replace = slowly
"""
  with Server(chat_folder, *SERVE, "--prefix-cache-file", path, before=fault) as server:
    ask(server, "hello")
    server.signal()
    wait_until(slow.exists, "the save starts")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT): server.signal(number)
    code = server.wait()
    assert path.exists() and sorted(os.listdir(tmp_path)) == ["cache", "slow"] and "Traceback" not in server.log
    assert code in (0, 130), server.log
  with Server(chat_folder, *SERVE, "--prefix-cache-file", path) as server:
    assert ask(server, "hello")[1] > 40 and not warnings_of(server)
