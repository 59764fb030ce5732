"""`tinyvllm chat`, here and with `--url`: the same answers, commands and reports. Errors of a server in one line."""
import io
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers.commands import PYTHONPATH, error_line, flags, run_command
from helpers.data import read_data
from helpers.protocol import SMALL, chat_prompt
from helpers.servers import wait_until

from tinyvllm import SamplingParams
from tinyvllm_extra.cli import chat

# messages: lines of input, and the messages of the user. refused: words of the error by command. errors: the fixture of
# a server or a URL, flags, and words of the error. deltas: of a streamed answer
LINES = read_data("chat_lines.json")


@pytest.fixture(params=["here", "url"])
def where(request, server, folder):
  """Flags of a chat in this process, or with a server."""
  return ["--url", server.url] if request.param == "url" else ["--model", folder, *flags(**SMALL)]


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 3, "top_k": 20}])
def test_chat_command_equals_llm_chat(where, llm, sampling):
  messages, answers = [], []
  for line in ("hello", "is that all"):
    messages.append({"role": "user", "content": line})
    answers.append(llm.chat(messages, SamplingParams(max_tokens=5, **sampling))[0].outputs[0].text)
    messages.append({"role": "assistant", "content": answers[-1]})
  run = run_command("chat", *where, *flags(max_tokens=5, **sampling), stdin="hello\n\n  \nis that all")
  assert run.returncode == 0 and run.stdout.rstrip("\n") == "\n".join(answers), run.stderr


def test_chat_command_reports_cuts_and_rates(where, llm):
  """The first answer ends at max_tokens, the second with the context."""
  lines = ["hello", "/params max_tokens null", "/params ignore_eos true", "/retry"]
  run = run_command("chat", *where, "--verbose", *flags(max_tokens=5, temperature=0), stdin="\n".join(lines))
  cuts, rates = ([line for line in run.stderr.splitlines() if word in line] for word in ("(cut", " tokens/s"))
  assert "max_tokens=5" in cuts[0] and "context is full" in cuts[1] and len(cuts) == len(rates) == 2, run.stderr
  num_prompt = len(chat_prompt(llm, [{"role": "user", "content": "hello"}])["prompt_token_ids"])
  for line, num_generated in zip(rates, (5, llm.max_model_len - num_prompt), strict=True):
    assert line.startswith(f"({num_prompt} prompt tokens, ") and f"; {num_generated} output tokens, " in line


@pytest.mark.parametrize("url,options,message", LINES["errors"])
def test_chat_command_prints_errors_in_one_line(request, url, options, message):
  if url in ("server", "limited"): url = request.getfixturevalue(url).url + "/"
  assert message in error_line(run_command("chat", *(["--url", url] if url else []), *options, stdin="hello\n"))


def test_chat_command_skips_deltas_without_content(monkeypatch):
  events = [json.dumps({"choices": [{"delta": delta}]}) for delta in LINES["deltas"]] + ["[DONE]"]
  response = io.BytesIO("".join(f"data: {event}\n\n" for event in events).encode())
  monkeypatch.setattr("urllib.request.urlopen", lambda request: response)
  run = run_command("chat", "--url", "http://a.example", stdin="hello\n")
  assert (run.returncode, run.stdout.strip()) == (0, "Yes."), run.stderr


# Input and commands, without a model

def part(text, reason):
  """Return a part of a streamed answer."""
  return SimpleNamespace(outputs=[SimpleNamespace(text=text, finish_reason=reason)], metrics=None)


class Parrot(chat.Remote):
  """A server whose answer is the number of the request."""
  def __init__(self): self.requests = []

  def generate_stream(self, prompt, sampling):
    self.requests.append((prompt["messages"], sampling))
    yield part(f"answer {len(self.requests)}", "stop")


def talk(monkeypatch, lines):
  """Return a chat after these lines of input, and its exit code. An exception is raised instead of a line."""
  monkeypatch.setattr(chat.logger, "setLevel", lambda level: None)
  monkeypatch.setattr("builtins.input", mock.Mock(side_effect=itertools.chain(lines, [EOFError])))
  conversation = chat.Chat(Parrot(), {"temperature": 0.5})
  return conversation, conversation.run()


@pytest.mark.parametrize("lines,messages", LINES["messages"])
def test_chat_input_becomes_messages(monkeypatch, lines, messages):
  conversation, code = talk(monkeypatch, lines)
  assert code == 0 and [x["content"] for x in conversation.messages if x["role"] == "user"] == messages


def test_chat_commands_save_load_and_set(monkeypatch, tmp_path, capsys):
  path = tmp_path / "chat.json"
  lines = ["/system be kind", "h\u00e9", "/params top_k 5", "/params stop END", "/retry", f"/save {path}"]
  first, _ = talk(monkeypatch, lines)
  roles = [(x["role"], x["content"]) for x in json.loads(path.read_text())]
  assert roles == [("system", "be kind"), ("user", "h\u00e9"), ("assistant", "answer 2")]
  assert first.llm.requests[1] == (first.messages[:2], {"temperature": 0.5, "top_k": 5, "stop": "END"})
  second, _ = talk(monkeypatch, [f"/load {path}", "and", "/params"])
  assert second.llm.requests == [([*first.messages, {"role": "user", "content": "and"}], {"temperature": 0.5})]
  assert "temperature 0.5\n" in capsys.readouterr().out


@pytest.mark.parametrize("line,words", LINES["refused"].items())
def test_chat_command_is_refused_and_the_chat_continues(monkeypatch, capsys, line, words):
  assert talk(monkeypatch, [line])[1] == 1 and words in capsys.readouterr().err
  conversation, code = talk(monkeypatch, [line, "x"])
  assert code == 0 and conversation.llm.requests == [([{"role": "user", "content": "x"}], {"temperature": 0.5})]


def test_chat_answers_after_the_first_capture():
  events, has_answered = [], threading.Event()

  def capture(sizes):
    for name in ("first", "second"):
      yield f"preparing {name}"
      assert name == "first" or has_answered.wait(60)
      events.append(name)
      yield ""

  def generate_stream(prompt, params):
    events.append("answer")
    has_answered.set()
    yield part("yes", "stop")
  llm = mock.Mock(sampling_defaults={}, capture=capture, generate_stream=generate_stream)
  llm.config.cudagraph_capture_sizes = None
  chat.Chat(llm, {}).answer([{"role": "user", "content": "x"}])
  wait_until(lambda: events == ["first", "answer", "second"], "the other steps are captured")


def test_chat_ctrl_c_ends_an_answer_and_the_chat_continues(monkeypatch):
  def stream(*_):
    for text in "abc":
      yield part(text, None)
      signal.raise_signal(signal.SIGINT)
  monkeypatch.setattr(Parrot, "generate_stream", stream)
  conversation, code = talk(monkeypatch, ["x", "y"])
  assert code == 0 and [x["content"] for x in conversation.messages] == ["x", "ab", "y", "ab"]


def test_chat_ctrl_c_at_the_prompt_drops_the_text(monkeypatch, tmp_path):
  monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
  monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
  conversation, code = talk(monkeypatch, ['"""', "one", KeyboardInterrupt, "two"])
  assert code == 0 and conversation.messages[0]["content"] == "two"


def test_chat_recalls_lines_of_earlier_chats(server, tmp_path):
  """In a terminal: the second chat sends the first one's line after the key Up, twice."""
  env = {**os.environ, "PYTHONPATH": PYTHONPATH, "XDG_STATE_HOME": str(tmp_path), "TERM": "xterm"}
  for keys in ("hello\n", "\x1b[A\x1b[A\n"):
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "tinyvllm", "run", "--url", server.url, "--max-tokens", "1"]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=env)
    for text in (keys, f"/save {tmp_path}/{len(keys)}.json\n", "\x04"):
      screen = b""
      while not screen.rstrip().endswith(b">"): screen += os.read(terminal, 4096)
      os.write(terminal, text.encode())
    assert process.wait(60) == 0
  assert [json.loads(x.read_text())[0]["content"] for x in tmp_path.glob("*.json")] == ["hello"] * 2
