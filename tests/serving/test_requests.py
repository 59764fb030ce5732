"""Bodies of requests to all routes: the prompts of data/rendered_requests.json, and the errors of
data/invalid_requests.json."""
import json

import pytest
from helpers.agents import DATA, TEMPLATE, num_tokens, start
from helpers.invalid_requests import VALID, check_refused, refused_requests
from helpers.servers import checked

RENDERED = [(path, body, prompt) for path, rows in json.loads((DATA / "rendered_requests.json").read_text()).items()
            for body, prompt in rows]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  template = TEMPLATE + ("{% if enable_thinking is defined %}thinking {{ enable_thinking }}{% endif %}"
                         "{{ documents[0].text if documents }}")
  yield from checked(start(tmp_path_factory.mktemp("bodies"), template=template))


@pytest.mark.parametrize("path,body,prompt", RENDERED, ids=lambda x: str(x)[:60])
def test_request_is_rendered_to_its_prompt(server, path, body, prompt):
  """Chats return the ids of their prompt, other routes only the number of its tokens."""
  limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
  response = server.post(path, {**body, limit: 1, **({"return_token_ids": True} if "chat" in path else {})})
  assert response.status_code == 200, response.text
  answer, usage = response.json(), response.json()["usage"]
  if "chat" in path:
    tokens = server.post("/tokenize", {"prompt": prompt, "add_special_tokens": False}).json()["tokens"]
    assert answer["prompt_token_ids"] == tokens and usage["prompt_tokens"] == len(tokens)
  else: assert usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) == num_tokens(server, prompt)
  if path == "/v1/messages":
    count = server.post("/v1/messages/count_tokens", body).json()
    assert count == {"input_tokens": num_tokens(server, prompt)}


@pytest.mark.parametrize("path,body,status,param,words", refused_requests("text"), ids=lambda x: str(x)[:60])
def test_invalid_request_is_refused_and_its_field_named(server, path, body, status, param, words):
  check_refused(server, path, body, status, param, words)


def test_strict_fields_flag_refuses_only_fields_unknown_to_official_clients(tmp_path):
  with start(tmp_path, "--strict-fields", "--max-model-len", 1024) as server:
    for row in refused_requests("strict"): check_refused(server, *row)
    ignored = {"metadata": {}, "service_tier": "auto", "user": "u", "suffix": None, "unknown": None}
    for path, body in VALID.items(): assert server.post(path, {**body, **ignored}).status_code == 200, path
    for path, limit, name in (("/v1/responses", "max_output_tokens", "codex_first_turn.json"),
                              ("/v1/messages", "max_tokens", "claude_code_first_turn.json")):
      response = server.post(path, {**json.loads((DATA / name).read_text()), limit: 4})
      assert response.status_code == 200, response.text
