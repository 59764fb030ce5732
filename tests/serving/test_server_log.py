"""The server's log: a line for each request and the URLs; and hints for paths that do not exist."""
import logging
import re
from types import SimpleNamespace

import pytest
from helpers.commands import parse_command
from helpers.data import read_data
from helpers.protocol import KEY, running_request
from helpers.servers import error_of, wait_until

from tinyvllm_extra.cli import serve
from tinyvllm_extra.serving.app import AccessLog, Server, ServerConfig

CASES = read_data("server_cases.json")
COMPLETIONS, BODY = "/v1/completions", {"prompt": "the cat", "max_tokens": 4, "ignore_eos": True}


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
  limited.post(COMPLETIONS, BODY, headers={"Authorization": "Bearer hunter2", "X-Request-Id": "wrong"})
  assert f"POST {COMPLETIONS} 401 in " in logged("wrong")
  with running_request(limited): assert f"{COMPLETIONS} 499" not in caplog.text
  wait_until(lambda: re.search(rf"{COMPLETIONS} 499 in [\d.]+ s, 5 prompt and \d+ output", caplog.text), "the line")
  assert "hunter2" not in caplog.text and KEY["Authorization"] not in caplog.text


@pytest.mark.parametrize("flags,level", [
  ([], logging.INFO), (["--disable-access-log-for-endpoints", "/health,/x"], logging.DEBUG),
  (["--root-path", "/r"], logging.INFO), (["--disable-access-log"], None), (["--disable-uvicorn-access-log"], None)])
async def test_access_log_flags_set_the_level(caplog, flags, level):
  """The app sends no end of its response."""
  async def app(scope, receive, send): await send({"type": "http.response.start", "status": 200, "headers": []})
  async def send(message): ...
  caplog.set_level(logging.DEBUG, "tinyvllm")
  log = AccessLog(app, serve.read_arguments(parse_command("serve", *flags))[2])
  scope = {"type": "http", "method": "GET", "headers": []}
  for path in ("/x", "/r/health"): await log({**scope, "path": path}, None, send)
  health = logging.DEBUG if "--root-path" in flags else logging.INFO
  expected = [("GET /x 499 in", level), ("GET /r/health", health)] if level else []
  assert [(x.getMessage()[:13], x.levelno) for x in caplog.records if "GET" in x.msg] == expected


@pytest.mark.parametrize("options,url", CASES["addresses"])
def test_address_is_usable_on_this_machine(options, url):
  listener = SimpleNamespace(sockets=[SimpleNamespace(getsockname=lambda: ("0.0.0.0", 8123))])
  assert Server.address(SimpleNamespace(options=ServerConfig(**options), servers=[listener])) == url


@pytest.mark.parametrize("path,status,message", CASES["hints"])
def test_wrong_path_or_method_is_404_or_405_with_a_hint(server, path, status, message):
  response = server.request("DELETE", path)
  assert error_of(response, status)["message"].endswith(message.replace("URL", server.url))
  assert response.headers.get("allow", "") == message[4:] * (status == 405)
