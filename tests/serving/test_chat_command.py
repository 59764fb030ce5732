"""`tinyvllm chat --url` and options of the server that end it."""
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tinyvllm import SamplingParams


# Startup and shutdown


def command(*arguments, stdin=""):
  return subprocess.run([sys.executable, "-m", "tinyvllm", *map(str, arguments)], input=stdin, capture_output=True,
                        text=True, check=False, timeout=120, cwd=Path(__file__).parents[2])


def test_invalid_serve_options_print_one_line_and_exit_1(server):
  cases = {"nowhere": ["/nowhere"], "max_num_seqs": ["--max-num-seqs", "0"], str(server.port): ["--port", server.port]}
  with ThreadPoolExecutor(2) as pool:
    runs = list(pool.map(lambda options: command("serve", "--port", "0", *options), cases.values()))
  for message, run in zip(cases, runs, strict=True):
    lines = [line for line in run.stderr.splitlines() if line.startswith("tinyvllm: ")]
    assert run.returncode == 1 and len(lines) == 1 and message in lines[0], run.stderr
    assert "Traceback" not in run.stderr


# tinyvllm chat --url

def test_chat_command_with_url_equals_llm_chat(server, llm):
  run = command("chat", "--url", server.url, "--max-tokens", "5", stdin="hello\nis that all\n")
  messages, answers = [], []
  for line in ("hello", "is that all"):
    messages.append({"role": "user", "content": line})
    answers.append(llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=5))[0].outputs[0].text)
    messages.append({"role": "assistant", "content": answers[-1]})
  assert run.returncode == 0 and run.stdout.rstrip("\n") == "\n".join(answers), run.stderr


def test_chat_command_prints_server_errors_in_one_line(limited, server):
  run = command("chat", "--url", limited.url, stdin="hello\n")
  assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("tinyvllm: ") and "Traceback" not in run.stderr
  run = command("chat", "--url", server.url + "/", "--temperature", "-1", stdin="hello\n")
  assert run.returncode == 1 and "temperature" in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr
  run = command("chat", "--url", "http://127.0.0.1:9", stdin="hello\n")
  assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("tinyvllm: ") and "Traceback" not in run.stderr


@pytest.mark.parametrize("options,message", [
  (["--api-key", "k"], "--url"), (["--url", "U", "--block-size", "4"], "block_size"),
  (["--url", "U", "--model", "another"], "another")], ids=str)
def test_chat_flag_without_effect_with_url_is_an_error(server, options, message):
  run = command("chat", *(server.url if x == "U" else x for x in options), stdin="hello\n")
  assert run.returncode == 1 and message in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr
