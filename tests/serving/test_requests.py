"""Bodies of requests to all routes: the prompts of data/rendered_requests.json, and the errors of
data/invalid_requests.json."""

import pytest
from helpers.agents import start
from helpers.data import read_data
from helpers.invalid_requests import VALID, check_refused, refused_requests
from helpers.servers import checked

RENDERED = [(path, body, prompt) for path, rows in read_data("rendered_requests.json").items() for body, prompt in rows]


@pytest.fixture(scope="module")
def server(tmp_path_factory): yield from checked(start(tmp_path_factory.mktemp("bodies")))


@pytest.mark.parametrize("path,body,prompt", RENDERED, ids=lambda x: str(x)[:60])
def test_request_is_rendered_to_its_prompt(server, path, body, prompt):
  """Chats return the ids of their prompt, other routes only the number of its tokens."""
  limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
  response = server.post(path, {**body, limit: 1, **({"return_token_ids": True} if "chat" in path else {})})
  assert response.status_code == 200, response.text
  answer, usage = response.json(), response.json()["usage"]
  tokens = server.post("/tokenize", {"prompt": prompt, "add_special_tokens": False}).json()["tokens"]
  if "chat" in path: assert answer["prompt_token_ids"] == tokens and usage["prompt_tokens"] == len(tokens)
  else: assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == len(tokens)
  if path == "/v1/messages":
    assert server.post("/v1/messages/count_tokens", body).json() == {"input_tokens": len(tokens)}


@pytest.mark.parametrize("path,body,status,param,words", refused_requests("text"), ids=lambda x: str(x)[:60])
def test_invalid_request_is_refused_and_its_field_named(server, path, body, status, param, words):
  check_refused(server, path, body, status, param, words)


def test_strict_fields_flag_refuses_only_fields_unknown_to_official_clients(tmp_path):
  with start(tmp_path, "--strict-fields", "--max-model-len", 1024) as server:
    for row in refused_requests("strict"): check_refused(server, *row)
    ignored = {"metadata": {}, "service_tier": "auto", "user": "u", "suffix": None, "unknown": None}
    for path, body in VALID.items(): assert server.post(path, {**body, **ignored}).status_code == 200, path
    for path, limit, name, end in read_data("server_cases.json")["agent bodies"]:
      response = server.post(path, {**read_data(name), limit: 4})
      assert response.status_code == 200 and end in response.text.splitlines()[-3], response.text
