"""vLLM's options of `tinyvllm serve`: several names and keys, a path prefix, a limit of tokens, a Unix domain socket,
TLS; and its routes for load balancers."""
# Left out of the cases of vLLM's own tests (tests/entrypoints/openai and tests/tool_use, versions around 0.11):
# - features that tinyvllm lacks: LoRA, images, audio, prompt_embeds, HTTP beam search, /invocations, /tokenizer_info,
#   ORCA headers, middleware, run-batch, sleep mode, stored responses, log probabilities and reasoning_tokens there;
# - answers that need a trained model, unit tests of vLLM's classes, gpt-oss, Mistral and Kimi models;
# - differences on purpose: values of other types ("true" for a bool) are refused; tools=[] and tool_choice="auto"
#   without tools are accepted; usage has prompt_tokens_details; iteration_tokens_total counts computed tokens only;
#   no [DONE] follows an error event; a max_tokens beyond the context is cut to fit.
import subprocess

import httpx2 as httpx
import pytest
from helpers.commands import start_process
from helpers.data import read_data
from helpers.protocol import running_request
from helpers.servers import LocalServer, wait_until

from tinyvllm_extra.cli import main

CASES = read_data("server_cases.json")
SMALL = ["--dtype", "float32", "--max-num-seqs", "2", "--max-num-batched-tokens", "2"]
BODY = {"prompt": "the cat", "max_tokens": 2, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "the cat"}]}


@pytest.fixture(scope="module")
def server(folder):
  options = ["--served-model-name", "first", "second", "--api-key", "key-1", "key-2", "--root-path", "/llm",
             "--chat-template", "{{ messages[0].content }} {{ word }}", "--default-chat-template-kwargs.word", "sat",
             "--override-generation-config", '{"max_new_tokens": 6, "temperature": 0}']
  with LocalServer(folder, *SMALL, *options) as server: yield server


def bearer(key): return {"Authorization": f"Bearer {key}"}


def test_every_served_model_name_is_listed_and_accepted(server):
  models = server.get("/v1/models", headers=bearer("key-1")).json()["data"]
  assert [(x["id"], x["root"]) for x in models] == [("first", "first"), ("second", "first")]
  for name in ("first", "second"):
    response = server.post("/v1/completions", {**BODY, "model": name}, headers=bearer("key-1"))
    assert response.status_code == 200 and response.json()["model"] == "first"
    assert server.get(f"/v1/models/{name}", headers=bearer("key-1")).json()["id"] == name
  assert server.post("/v1/completions", {**BODY, "model": "third"}, headers=bearer("key-1")).status_code == 404


def test_every_api_key_is_accepted_and_root_path_is_an_optional_prefix(server):
  for key, status in {"key-1": 200, "key-2": 200, "key-3": 401, "key-1 key-2": 401}.items():
    for path in ("/v1/models", "/llm/v1/models"): assert server.get(path, headers=bearer(key)).status_code == status
  assert server.post("/llm/v1/completions", BODY, headers=bearer("key-2")).status_code == 200
  assert server.get("/llm/v1/models").status_code == 401


def test_health_and_ping_need_no_key(server):
  for method, path in (("GET", "/llm/health"), ("GET", "/ping"), ("POST", "/ping"), ("HEAD", "/health")):
    response = server.request(method, path)
    assert (response.status_code, response.text) == (200, "" if method == "HEAD" else "{}")


def test_load_is_the_number_of_unfinished_requests_and_needs_no_key(limited):
  def load(): return limited.get("/load").json()["server_load"]
  assert load() == 0
  with running_request(limited): assert load() == 1
  wait_until(lambda: load() == 0, "the request has ended")


def test_response_has_the_request_id_of_its_request(server):
  response = server.get("/v1/models", headers={**bearer("key-1"), "X-Request-Id": "mine"})
  assert response.headers["x-request-id"] == "mine"
  ids = {server.get(path).headers["x-request-id"] for path in ("/health", "/health", "/v1/models", "/nowhere")}
  assert len(ids) == 4 and all(ids), "also for errors"


def test_chat_template_option_and_variables_apply(server):
  plain = {"prompt": "the cat sat", "add_special_tokens": False}
  first, second = [server.post("/tokenize", x, headers=bearer("key-1")).json() for x in (CHAT, plain)]
  assert first == second and first["tokens"]


@pytest.mark.parametrize("path,prompt,name", [
  ("completions", {"prompt": "hello"}, "max_tokens"), ("chat/completions", CHAT, "max_tokens"),
  ("chat/completions", CHAT, "max_completion_tokens"), ("responses", {"input": "hello"}, "max_output_tokens")])
@pytest.mark.parametrize("value,number", [(None, 6), (15, 6), (3, 3)])
def test_max_new_tokens_of_server_limits_every_request(server, path, prompt, name, value, number):
  body = {**prompt, name: value, "ignore_eos": True}
  usage = server.post(f"/v1/{path}", body, headers=bearer("key-1")).json()["usage"]
  assert usage.get("completion_tokens", usage.get("output_tokens")) == number


def test_uds_server_answers_and_removes_its_socket(folder, tmp_path):
  path = tmp_path / "vllm.sock"
  process = start_process("serve", folder, *SMALL, "--uds", path)
  try:
    wait_until(path.exists, "the socket exists")
    with httpx.Client(base_url="http://server", transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client:
      wait_until(lambda: client.get("/health").status_code == 200, "/health answers 200")
      assert client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
    process.terminate()
    assert process.wait(60) == 0 and not path.exists()
  finally: process.kill()


def test_tls_server_answers_https(folder, tmp_path):
  certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
  command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
  subprocess.run([*command.split(), "-out", certificate, "-keyout", key], check=True, capture_output=True)
  with LocalServer(folder, *SMALL, "--ssl-certfile", certificate, "--ssl-keyfile", key, ready=False) as server:
    assert server.url.startswith("https://")
    wait_until(server.healthy, "/health answers 200")
    assert server.post("/v1/completions", BODY).status_code == 200
    with pytest.raises(httpx.TransportError): httpx.get(server.url.replace("https", "http") + "/health")


@pytest.mark.parametrize("options,words", CASES["invalid options"], ids=str)
def test_invalid_server_option_is_one_line_and_exit_code_1(server, options, words, capfd):
  """PORT: a port in use. FILE: an existing file."""
  def filled(text): return text.replace("PORT", str(server.port)).replace("FILE", __file__)
  assert main(["serve", *map(filled, options)]) == 1
  line, = capfd.readouterr().err.splitlines()
  assert line.startswith(f"tinyvllm: {filled(words)}")
