"""The server as a process: loading, signals, shutdown."""
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest
from helpers.engines import ENGINE
from helpers.models import tiny_model
from helpers.requests import flags
from helpers.servers import Server, error_of, events, wait_until


SMALL = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4}
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ENDLESS = {"temperature": 0.0, "max_tokens": 30000, "ignore_eos": True, "prompt": "the cat"}   # runs for a minute
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory):
  """Like `folder`, with a context length of 32768: requests can run for a minute."""
  folder = tiny_model(tmp_path_factory.mktemp("long"), words=True, max_position_embeddings=32768)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
  return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model with a word tokenizer and a chat template that renders all messages."""
  folder = tiny_model(tmp_path_factory.mktemp("served"), words=True)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
  return folder


@pytest.fixture
def piped_folder(folder, tmp_path):
  """A model whose tokenizer_config.json is a named pipe: loading blocks until a test writes into it."""
  piped_folder = tmp_path / "slow"
  piped_folder.mkdir()
  for file in folder.iterdir(): (piped_folder / file.name).symlink_to(file)
  (piped_folder / "tokenizer_config.json").unlink()
  os.mkfifo(piped_folder / "tokenizer_config.json")
  return piped_folder


def open_writer(pipe):
  """Return the pipe opened for writing, or None while no process reads it."""
  try: return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w")
  except OSError: return None


def test_requests_are_503_until_the_model_is_loaded(piped_folder, folder):
  pipe, text = piped_folder / "tokenizer_config.json", (folder / "tokenizer_config.json").read_text()
  with Server(piped_folder, *flags(**SMALL), ready=False) as server:
    file = wait_until(lambda: open_writer(pipe), "the server reads the model's folder")
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
      response = server.post(path, {"prompt": "a"})
      error_of(response, 503)
      assert int(response.headers["retry-after"]) >= 1
    error_of(server.get("/v1/models"), 503)
    assert server.get("/health").status_code == 503
    for path in ("/", "/version", "/metrics", "/openapi.json"):
      assert server.get(path).status_code == 200, path
    with pytest.raises(openai.InternalServerError) as e: server.client().models.list()
    assert e.value.status_code == 503 and e.value.type == "ServiceUnavailableError"
    (piped_folder / "new").write_text(text)
    (piped_folder / "new").replace(pipe)
    with file: file.write(text)
    wait_until(server.healthy, "/health answers 200")
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert server.stop() == 0


def test_sigterm_during_model_loading_exits_at_once(piped_folder):
  with Server(piped_folder, *flags(**SMALL), "--shutdown-timeout", "1", ready=False) as server:
    with wait_until(lambda: open_writer(piped_folder / "tokenizer_config.json"), "the model loads"):
      assert server.stop(15) == 0, "exits without waiting for the model"
    assert "Traceback" not in server.log, server.log


def is_rejected(http):
  """True if the server rejects a new request with a 503 or closes the connection."""
  try: response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
  except httpx.TransportError: return True
  if response.status_code == 200: return False
  error_of(response, 503)
  return True


@pytest.mark.slow
def test_sigterm_lets_running_requests_finish(long_folder):
  with Server(long_folder, *flags(dtype="float32", max_num_seqs=4, max_num_batched_tokens=4)) as server:
    body = {**ENDLESS, "max_tokens": 1000}
    with server.http() as old, ThreadPoolExecutor(1) as pool:
      assert old.get("/health").status_code == 200   # a keep-alive connection
      with server.stream("/v1/completions", body) as response:
        lines = response.iter_lines()
        first = [next(lines), next(lines)]
        whole = pool.submit(server.post, "/v1/completions", body)
        wait_until(lambda: server.metrics()["num_requests_running"] == 2, "both run")
        server.signal()
        wait_until(lambda: is_rejected(old), "requests are rejected")
        assert is_rejected(old) and server.process.poll() is None, "the process still runs"
        assert not whole.done()
        *chunks, last = events([*first, *lines])
      assert last == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "length"
      answer = whole.result().json()
      assert answer["usage"]["completion_tokens"] == 1000
      assert "".join(e["choices"][0]["text"] for e in chunks) == answer["choices"][0]["text"]
    assert server.wait() == 0, server.log
    assert "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_shutdown_timeout_aborts_running_requests(long_folder):
  with Server(long_folder, *flags(dtype="float32", max_num_seqs=4, max_num_batched_tokens=4,
                                  shutdown_timeout=0.5)) as server, ThreadPoolExecutor(1) as pool:
    with server.stream("/v1/completions", ENDLESS) as response:
      lines = response.iter_lines()
      first = [next(lines), next(lines)]
      whole = pool.submit(server.post, "/v1/completions", ENDLESS)
      wait_until(lambda: server.metrics()["num_requests_running"] == 2, "both run")
      server.signal(signal.SIGINT)
      *chunks, last = events([*first, *lines])
    assert last == "[DONE]" and [e["choices"][0]["finish_reason"] for e in chunks[-2:]] == [None, "abort"]
    assert whole.result().status_code == 200 and whole.result().json()["choices"][0]["finish_reason"] == "abort"
    assert server.wait(20) == 0, server.log
    assert "Traceback" not in server.log, server.log
