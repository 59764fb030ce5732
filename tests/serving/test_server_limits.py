"""Limits of the server: API keys, sizes of headers and bodies, the queue, disconnects."""
import contextlib
import http.client
import json
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest
from helpers.protocol import ENDLESS, KEY, MESSAGES, SMALL, running_request
from helpers.commands import flags
from helpers.servers import LocalServer, error_of, wait_until

from tinyvllm_extra.cli import main
from tinyvllm_extra.serving import app


def test_missing_or_wrong_api_key_is_401_and_right_one_200(limited):
  wrong = [{"Authorization": x} for x in (
    "Bearer none", "Bearer secret2", "Bearer secre", "Bearer SECRET", "secret", "Basic secret", "", b"Bearer \xe9",
    "Bearer")]
  wrong += [{"X-API-Key": x} for x in ("secret2", "", "Bearer secret", b"\xe9")]
  for headers in (*wrong, {}):
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
      error_of(limited.post(path, {"prompt": "a"}, headers=headers), 401)
    error_of(limited.get("/v1/models", headers=headers), 401)
  for path in ("/", "/health", "/version", "/metrics", "/openapi.json"): assert limited.get(path).status_code == 200
  for headers in ({"Authorization": "bearer secret"}, {"Authorization": "BEARER secret"}, {"x-api-key": "secret"},
                  {"x-api-key": "secret", "Authorization": "Bearer other"}):   # Anthropic's clients send x-api-key
    assert limited.get("/v1/models", headers=headers).status_code == 200
  client = limited.client(api_key="secret")
  assert [x.id for x in client.models.list()] == ["mine"]
  assert client.completions.create(model="mine", prompt="a", max_tokens=1).model == "mine"


def test_api_key_of_environment_with_non_ascii_characters_is_compared_as_utf8(folder, capsys, monkeypatch):
  key = "schl\xfcssel\u20ac"
  monkeypatch.setenv("TINYVLLM_API_KEY", key)
  with LocalServer(folder, *flags(**SMALL)) as server:
    for headers in ({"Authorization": f"Bearer {key}".encode()}, {"x-api-key": key.encode()}):
      assert server.get("/v1/models", headers=headers).status_code == 200
    for headers in ({"Authorization": b"Bearer schl\xfcssel"}, {"x-api-key": "schluessel"}):
      error_of(server.get("/v1/models", headers=headers), 401)
    assert main(["generate", "the cat", "--url", server.url, "--api-key", key, "--max-tokens", "2"]) == 0
  assert capsys.readouterr().out.startswith("the cat")


def test_headers_over_64_kib_are_431_and_close_the_connection(server):
  for path, size in (("/v1/models", 70_000), ("/health", 2**18)):
    response = server.get(path, headers={"X-Padding": "a" * size})
    assert "65536" in error_of(response, 431)["message"] and response.headers["connection"] == "close"
  error_of(server.get("/v1/models", headers={f"X-{i}": "a" * 1000 for i in range(70)}), 431)
  assert server.get("/v1/models", headers={"X-Padding": "a" * 60_000}).status_code == 200


def test_body_over_limit_is_413_with_or_without_content_length(limited):
  body = json.dumps({"prompt": "the cat", "max_tokens": 1}).encode()
  valid, too_large = body + b" " * (4096 - len(body)), body + b" " * (4097 - len(body))
  headers = {**KEY, "Content-Type": "application/json"}

  def pieces(x): yield from (x[i:i + 1000] for i in range(0, len(x), 1000))
  for send in (bytes, pieces):   # with a Content-Length; in chunks
    assert limited.post("/v1/completions", content=send(valid), headers=headers).status_code == 200
    error_of(limited.post("/v1/completions", content=send(too_large), headers=headers), 413)


def test_endless_chunked_body_is_413_before_its_end(limited):
  connection = http.client.HTTPConnection("127.0.0.1", limited.port, timeout=30)
  connection.putrequest("POST", "/v1/completions")
  for name, value in {**KEY, "Content-Type": "application/json", "Transfer-Encoding": "chunked"}.items():
    connection.putheader(name, value)
  connection.endheaders()
  with contextlib.suppress(ConnectionError):   # the server may stop reading
    for _ in range(64): connection.send(b"400\r\n" + b" " * 1024 + b"\r\n")
  assert connection.getresponse().status == 413, "before the last chunk is sent"
  connection.close()


async def test_body_of_a_request_without_key_is_not_kept(monkeypatch):
  """The key is checked before the body is read: nobody can fill the memory without one."""
  kept = []
  read_body = app.Gate.read_body

  async def reading(gate, request, limit):
    kept.append(limit)
    return await read_body(gate, request, limit)
  monkeypatch.setattr(app.Gate, "read_body", reading)
  gate = app.Gate(None, app.ServerConfig(api_key=["secret"], max_body_size=4096), lambda: None)
  sent, chunks = [], [{"type": "http.request", "body": b"x" * 1000, "more_body": i < 3} for i in range(4)]

  async def receive(): return chunks.pop(0)
  async def send(message): sent.append(message)
  await gate({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send)
  assert sent[0]["status"] == 401 and kept == [0] and not chunks


def test_requests_beyond_max_queue_are_429_and_waiting_ones_run(limited):
  """Each sample and each prompt counts."""
  client = limited.client(api_key="secret")
  def ask(n): return limited.post("/v1/completions", {"prompt": "the cat", "max_tokens": 2, "n": n}, headers=KEY)
  def num_waiting(): return limited.metrics()["num_requests_waiting"]
  assert len(ask(3).json()["choices"]) == 3, "one runs, two wait"
  before = limited.metrics()["generation_tokens_total"]
  assert "n=4" in error_of(ask(4), 400)["message"], "more than the server's limits ever allow"
  response = limited.post("/v1/completions", {"prompt": ["the cat"] * 9, "max_tokens": 2}, headers=KEY)
  assert "prompt: 9 sequences" in error_of(response, 400)["message"]
  assert limited.metrics()["generation_tokens_total"] == before, "no prompt runs"
  with ThreadPoolExecutor(1) as pool:
    with running_request(limited):
      error_of(ask(3), 429)
      assert not num_waiting()
      two = pool.submit(ask, 2)
      wait_until(num_waiting, "both wait")
      for create, fields in ((client.completions.create, {"prompt": "the cat"}),
                             (client.completions.create, {"prompt": "the cat", "stream": True}),
                             (client.chat.completions.create, {"messages": MESSAGES})):
        with pytest.raises(openai.RateLimitError) as e: create(model="mine", **fields)
        assert e.value.body["code"] == e.value.status_code == 429 and e.value.type == "TooManyRequestsError"
        assert int(e.value.response.headers["retry-after"]) >= 1
      assert not two.done()
    assert len(two.result().json()["choices"]) == 2, "waiting requests must run"
  with running_request(limited, n=3): error_of(ask(1), 429)
  wait_until(lambda: not limited.metrics()["num_requests_running"] + num_waiting(), "closing the stream aborts all")
  assert len(ask(3).json()["choices"]) == 3, "aborted samples must not count"


def test_client_disconnect_aborts_its_request(limited):
  def num_aborted(): return limited.metrics().get("request_success_total{finished_reason=abort}", 0)
  before = num_aborted()
  with pytest.raises(httpx.ReadTimeout): limited.post("/v1/completions", ENDLESS, headers=KEY, timeout=1)
  wait_until(lambda: limited.metrics()["num_requests_running"] == 0, "the request is aborted")
  wait_until(lambda: num_aborted() == before + 1, "the abort is counted")


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_compressed_body_is_415_and_named(server, encoding):
  response = server.post("/v1/completions", content=b"x", headers={"Content-Encoding": encoding})
  assert encoding in error_of(response, 415)["message"]
