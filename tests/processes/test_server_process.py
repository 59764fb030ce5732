"""The server as a process: loading, signals, shutdown."""
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest
from helpers.protocol import ENDLESS, SMALL
from helpers.commands import flags
from helpers.servers import Server, error_of, events, wait_until


@pytest.fixture
def pipe(chat_folder, tmp_path):
  """The tokenizer_config.json of a model's folder, as a named pipe: loading blocks until a test writes into it."""
  for file in chat_folder.iterdir(): (tmp_path / file.name).symlink_to(file)
  (tmp_path / "tokenizer_config.json").unlink()
  os.mkfifo(tmp_path / "tokenizer_config.json")
  return tmp_path / "tokenizer_config.json"


def open_writer(pipe):
  """Return the pipe opened for writing, or None while no process reads it."""
  try: return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w")
  except OSError: return None


def test_requests_are_503_until_the_model_is_loaded(pipe, chat_folder):
  with Server(pipe.parent, *flags(**SMALL), ready=False) as server:
    file = wait_until(lambda: open_writer(pipe), "the server reads the model's folder")
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
      response = server.post(path, {"prompt": "a"})
      error_of(response, 503)
      assert int(response.headers["retry-after"]) >= 1
    error_of(server.get("/v1/models"), 503)
    assert server.get("/health").status_code == 503
    for path in ("/", "/version", "/metrics", "/openapi.json"): assert server.get(path).status_code == 200, path
    with pytest.raises(openai.InternalServerError) as e: server.client().models.list()
    assert e.value.status_code == 503 and e.value.type == "ServiceUnavailableError"
    pipe.unlink()
    pipe.symlink_to(chat_folder / pipe.name)
    with file: file.write(pipe.read_text())
    wait_until(server.healthy, "/health answers 200")
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    wait_until(lambda: "ready: " in server.log, "the log has the URLs")
    assert server.stop() == 0
    for text in ("POST /generate 503 in 0.", "capturing ", f"ready: chat page {server.url}/, API {server.url}/v1\n"):
      assert f" INFO    {text}" in server.log and "GPU" not in server.log, server.log
    for line in server.log.splitlines(): assert re.match(r"[\d-]{10} [\d:]{8} (INFO   |WARNING|ERROR  ) \w", line), line


def test_sigterm_during_model_loading_exits_at_once(pipe):
  with Server(pipe.parent, *flags(**SMALL), "--shutdown-timeout", "1", ready=False) as server:
    with wait_until(lambda: open_writer(pipe), "the model loads"):
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
@pytest.mark.parametrize("number,options,size,reason", [
  (signal.SIGTERM, {}, 1000, "length"), (signal.SIGINT, {"shutdown_timeout": 0.5}, 30000, "abort")],
  ids=["end", "timeout"])
def test_running_requests_finish_or_are_aborted_after_shutdown_timeout(chat_folder, number, options, size, reason):
  body = {**ENDLESS, "max_tokens": size}
  with (Server(chat_folder, *flags(dtype="float32", max_num_seqs=4, max_num_batched_tokens=4, **options)) as server,
        server.http() as old, ThreadPoolExecutor(1) as pool):
    assert old.get("/health").status_code == 200   # a keep-alive connection
    with server.stream("/v1/completions", body) as response:
      lines = response.iter_lines()
      first = [next(lines), next(lines)]
      whole = pool.submit(server.post, "/v1/completions", body)
      wait_until(lambda: server.metrics()["num_requests_running"] == 2, "both run")
      server.signal(number)
      if reason == "length":
        wait_until(lambda: is_rejected(old), "requests are rejected")
        assert is_rejected(old) and server.process.poll() is None and not whole.done(), "the process still runs"
      *chunks, last = events([*first, *lines])
    answer = whole.result().json()
    assert last == "[DONE]" and [e["choices"][0]["finish_reason"] for e in chunks[-2:]] == [None, reason]
    assert whole.result().status_code == 200 and answer["choices"][0]["finish_reason"] == reason
    if reason == "length":
      assert answer["usage"]["completion_tokens"] == size
      assert "".join(e["choices"][0]["text"] for e in chunks) == answer["choices"][0]["text"]
    assert server.wait(20) == 0 and "Traceback" not in server.log, server.log
