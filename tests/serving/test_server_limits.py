"""Limits of the server: API keys, sizes of headers and bodies, the queue, disconnects; its log; and options of vLLM's
server."""
import contextlib
import http.client
import itertools
import json
import logging
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import ANY, patch

import httpx2 as httpx
import openai
import pytest
from helpers.commands import flags, parse_command, start_process
from helpers.data import read_data
from helpers.protocol import COMPLETIONS, ENDLESS, KEY, MESSAGES, SMALL, running_request
from helpers.servers import LocalServer, error_of, wait_until

from tinyvllm_extra.cli import main, serve
from tinyvllm_extra.serving import app
from tinyvllm_extra.serving.app import Server, ServerConfig, access_log

CASES = read_data("server_cases.json")


def test_missing_or_wrong_api_key_is_401_and_right_one_200(limited):
  """Anthropic's clients send x-api-key."""
  def encoded(kind): return [{name: x.encode("latin-1") for name, x in headers.items()} for headers in CASES[kind]]
  for headers in encoded("wrong keys"):
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
      error_of(limited.post(path, {"prompt": "a"}, headers=headers), 401)
    error_of(limited.get("/v1/models", headers=headers), 401)
  for path in ("/", "/health", "/version", "/metrics", "/openapi.json"): assert limited.get(path).status_code == 200
  for headers in encoded("right keys"): assert limited.get("/v1/models", headers=headers).status_code == 200
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


async def test_body_of_a_request_without_key_is_not_kept():
  """The key is checked before the body is read: nobody can fill the memory without one."""
  server = Server(None, {}, ServerConfig(api_key=["secret"], max_body_size=4096))
  sent, chunks = [], [{"type": "http.request", "body": b"x" * 1000, "more_body": i < 3} for i in range(4)]

  async def receive(): return chunks.pop(0)
  async def send(message): sent.append(message)
  with patch.object(app, "read_body", autospec=True, side_effect=app.read_body) as read_body:
    await server.gate(None, {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send)
  read_body.assert_called_once_with(ANY, 0, 8 * 4096)
  assert sent[0]["status"] == 401 and not chunks


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


# The server's log: a line for each request and the URLs; and hints for paths that do not exist

@pytest.fixture
def logged(caplog):
  """A function that waits for the line of a request with this id."""
  caplog.set_level(logging.DEBUG, "tinyvllm")
  def line(request_id): return next((x for x in caplog.messages if x.endswith(f", id {request_id}")), None)
  return lambda request_id: wait_until(lambda: line(request_id), f"a line of {request_id}")


@pytest.mark.parametrize("method,path,body,line", CASES["logged"])
def test_request_is_logged_with_status_duration_and_tokens(server, logged, caplog, method, path, body, line):
  server.request(method, path, json=body, headers={"X-Request-Id": "mine"})
  assert re.sub(r"\d+\.\d{3}", "S", logged("mine")) == f"{method} {line}, id mine"
  assert "the cat" not in caplog.text and "secret" not in caplog.text


def test_401_and_disconnect_are_logged_at_their_end_without_the_key(limited, logged, caplog):
  limited.post(COMPLETIONS, PROMPT, headers={"Authorization": "Bearer hunter2", "X-Request-Id": "wrong"})
  assert f"POST {COMPLETIONS} 401 in " in logged("wrong")
  with running_request(limited): assert f"{COMPLETIONS} 499" not in caplog.text
  wait_until(lambda: re.search(rf"{COMPLETIONS} 499 in [\d.]+ s, 5 prompt and \d+ output", caplog.text), "the line")
  assert "hunter2" not in caplog.text and KEY["Authorization"] not in caplog.text


@pytest.mark.parametrize("flags,level", CASES["access logs"])
async def test_access_log_flags_set_the_level(caplog, flags, level):
  """The app sends no end of its response."""
  async def app(scope, receive, send): await send({"type": "http.response.start", "status": 200, "headers": []})
  async def send(message): ...
  caplog.set_level(logging.DEBUG, "tinyvllm")
  def log(*asgi): return access_log(app, serve.read_arguments(parse_command("serve", *flags))[2], *asgi)
  scope = {"type": "http", "method": "GET", "headers": []}
  for path in ("/x", "/r/health"): await log({**scope, "path": path}, None, send)
  health = "DEBUG" if "--root-path" in flags else "INFO"
  expected = [("GET /x 499 in", level), ("GET /r/health", health)] if level else []
  assert [(x.getMessage()[:13], x.levelname) for x in caplog.records if "GET" in x.msg] == expected


@pytest.mark.parametrize("options,url", CASES["addresses"])
def test_address_is_usable_on_this_machine(options, url):
  listener = SimpleNamespace(sockets=[SimpleNamespace(getsockname=lambda: ("0.0.0.0", 8123))])
  assert Server.address(SimpleNamespace(options=ServerConfig(**options), servers=[listener])) == url


@pytest.mark.parametrize("path,status,message", CASES["hints"])
def test_wrong_path_or_method_is_404_or_405_with_a_hint(server, path, status, message):
  response = server.request("DELETE", path)
  assert error_of(response, status)["message"].endswith(message.replace("URL", server.url))
  assert response.headers.get("allow", "") == message[4:] * (status == 405)


# vLLM's options of `tinyvllm serve`: several names and keys, a path prefix, a limit of tokens, a Unix domain socket,
# TLS; and its routes for load balancers.

# Left out of the cases of vLLM's own tests (tests/entrypoints/openai and tests/tool_use, versions around 0.11):
# - features that tinyvllm lacks: LoRA, images, audio, prompt_embeds, HTTP beam search, /invocations, /tokenizer_info,
#   ORCA headers, middleware, run-batch, sleep mode, stored responses, log probabilities and reasoning_tokens there;
# - answers that need a trained model, unit tests of vLLM's classes, gpt-oss, Mistral and Kimi models;
# - differences on purpose: values of other types ("true" for a bool) are refused; tools=[] and tool_choice="auto"
#   without tools are accepted; usage has prompt_tokens_details; iteration_tokens_total counts computed tokens only;
#   no [DONE] follows an error event; a max_tokens beyond the context is cut to fit.

PROMPT = {"prompt": "the cat", "max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def named(folder):
  with LocalServer(folder, *flags(**SMALL), *CASES["options of vLLM"]) as named: yield named


def bearer(key): return {"Authorization": f"Bearer {key}"}


def test_every_served_model_name_is_listed_and_accepted(named):
  models = named.get("/v1/models", headers=bearer("key-1")).json()["data"]
  assert [(x["id"], x["root"]) for x in models] == [("first", "first"), ("second", "first")]
  for name in ("first", "second"):
    response = named.post("/v1/completions", {**PROMPT, "model": name}, headers=bearer("key-1"))
    assert response.status_code == 200 and response.json()["model"] == "first"
    assert named.get(f"/v1/models/{name}", headers=bearer("key-1")).json()["id"] == name
  assert named.post("/v1/completions", {**PROMPT, "model": "third"}, headers=bearer("key-1")).status_code == 404


def test_every_api_key_is_accepted_and_root_path_is_an_optional_prefix(named):
  for key, status in {"key-1": 200, "key-2": 200, "key-3": 401, "key-1 key-2": 401}.items():
    for path in ("/v1/models", "/llm/v1/models"): assert named.get(path, headers=bearer(key)).status_code == status
  assert named.post("/llm/v1/completions", PROMPT, headers=bearer("key-2")).status_code == 200
  assert named.get("/llm/v1/models").status_code == 401


def test_health_and_ping_need_no_key(named):
  for method, path in (("GET", "/llm/health"), ("GET", "/ping"), ("POST", "/ping"), ("HEAD", "/health")):
    response = named.request(method, path)
    assert (response.status_code, response.text) == (200, "" if method == "HEAD" else "{}")


def test_load_is_the_number_of_unfinished_requests_and_needs_no_key(limited):
  def load(): return limited.get("/load").json()["server_load"]
  assert load() == 0
  with running_request(limited) as lines:
    assert load() == 1, "its first event arrives before its end"
    assert len([*itertools.islice(lines, 400)]) == 400 and load() == 1, "and so do 200 more"
  wait_until(lambda: load() == 0, "the request has ended")


def test_response_has_the_request_id_of_its_request(named):
  response = named.get("/v1/models", headers={**bearer("key-1"), "X-Request-Id": "mine"})
  assert response.headers["x-request-id"] == "mine"
  ids = {named.get(path).headers["x-request-id"] for path in ("/health", "/health", "/v1/models", "/nowhere")}
  assert len(ids) == 4 and all(ids), "also for errors"


def test_chat_template_option_and_variables_apply(named):
  bodies = {"messages": MESSAGES[-1:]}, {"prompt": "the cat sat", "add_special_tokens": False}
  first, second = [named.post("/tokenize", body, headers=bearer("key-1")).json() for body in bodies]
  assert first == second and first["tokens"]


@pytest.mark.parametrize("path,prompt,name", CASES["output limits"])
@pytest.mark.parametrize("value,number", [(None, 6), (15, 6), (3, 3)])
def test_max_new_tokens_of_server_limits_every_request(named, path, prompt, name, value, number):
  body = {**prompt, name: value, "ignore_eos": True}
  usage = named.post(f"/v1/{path}", body, headers=bearer("key-1")).json()["usage"]
  assert usage.get("completion_tokens", usage.get("output_tokens")) == number


def test_uds_server_answers_and_removes_its_socket(folder, tmp_path):
  path = tmp_path / "vllm.sock"
  process = start_process("serve", folder, *flags(**SMALL), "--uds", path)
  try:
    wait_until(path.exists, "the socket exists")
    with httpx.Client(base_url="http://server", transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client:
      wait_until(lambda: client.get("/health").status_code == 200, "/health answers 200")
      assert client.post("/v1/completions", json=PROMPT).json()["choices"][0]["text"]
    process.terminate()
    assert process.wait(60) == 0 and not path.exists()
  finally: process.kill()


def test_tls_server_answers_https(folder, tmp_path):
  certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
  command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
  subprocess.run([*command.split(), "-out", certificate, "-keyout", key], check=True, capture_output=True)
  with LocalServer(folder, *flags(**SMALL), "--ssl-certfile", certificate, "--ssl-keyfile", key, ready=False) as server:
    assert server.url.startswith("https://")
    wait_until(server.healthy, "/health answers 200")
    assert server.post("/v1/completions", PROMPT).status_code == 200
    with pytest.raises(httpx.TransportError): httpx.get(server.url.replace("https", "http") + "/health")


@pytest.mark.parametrize("options,words", CASES["invalid options"], ids=str)
def test_invalid_server_option_is_one_line_and_exit_code_1(named, options, words, capfd):
  """PORT: a port in use. FILE: an existing file."""
  def filled(text): return text.replace("PORT", str(named.port)).replace("FILE", __file__)
  assert main(["serve", *map(filled, options)]) == 1
  line, = capfd.readouterr().err.splitlines()
  assert line.startswith(f"tinyvllm: {filled(words)}")
