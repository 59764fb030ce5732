"""`tinyvllm chat --url`: answers of a server, and errors in one line."""
import pytest
from helpers.commands import error_line, run_command

from tinyvllm import SamplingParams


def test_chat_command_with_url_equals_llm_chat(server, llm):
  run = run_command("chat", "--url", server.url, "--max-tokens", 5, "--temperature", 0, stdin="hello\nis that all\n")
  messages, answers = [], []
  for line in ("hello", "is that all"):
    messages.append({"role": "user", "content": line})
    answers.append(llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=5))[0].outputs[0].text)
    messages.append({"role": "assistant", "content": answers[-1]})
  assert run.returncode == 0 and run.stdout.rstrip("\n") == "\n".join(answers), run.stderr


@pytest.mark.parametrize("url,options,message", [
  ("limited", [], "API key"), ("server", ["--temperature", "-1"], "temperature"),
  ("http://127.0.0.1:9", [], "127.0.0.1:9"), (None, ["--api-key", "k"], "--url"),
  ("server", ["--block-size", "4"], "block_size"), ("server", ["--model", "another"], "another")])
def test_chat_command_prints_errors_in_one_line(request, url, options, message):
  if url in ("server", "limited"): url = request.getfixturevalue(url).url + "/"
  assert message in error_line(run_command("chat", *(["--url", url] if url else []), *options, stdin="hello\n"))
