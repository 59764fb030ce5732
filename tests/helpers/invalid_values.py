"""Invalid values of options and of request fields."""
import json
import math
from pathlib import Path
from typing import Any

from .servers import Client, error_of

NAN = math.nan
INF = math.inf


# field -> invalid values
BAD_SAMPLING = {
  "n": [0, -1, 1.5, "2", None, True, 10**6],
  "max_tokens": [0, -1, 1.5, "5", True], "min_tokens": [-1, 2.0, "1", None, True],
  "temperature": [-0.1, NAN, INF, -INF, "1", None, True], "top_k": [-2, 1.0, "5", None, False],
  "top_p": [0, 0.0, -0.5, 1.1, NAN, INF, "1", None, True], "min_p": [-0.1, 1.01, NAN, "0", None],
  "seed": [1.5, "1", 2**63, -2**63 - 1, True], "stop": [5, [5], [""], "", ["ok", None], b"x", {"a": 1}],
  "stop_token_ids": [5, "5", ["5"], [1.0], [True], [None]], "include_stop_str_in_output": [1, "yes", None],
  "ignore_eos": [0, "no", None], "skip_special_tokens": [1, "", None],
  "repetition_penalty": [0, 0.0, 0.009, 100.1, -1.0, NAN, INF, "1", None, True],
  "presence_penalty": [-2.1, 2.1, NAN, INF, -INF, "1", None, True],
  "frequency_penalty": [-2.1, 2.1, NAN, INF, -INF, "1", None, True],
  "logit_bias": [5, [5], "5", True, {5: 100.5}, {5: -101}, {5: NAN}, {5: INF}, {5: "1"}, {5: None}, {5: True},
                 {"x": 1.0}, {"": 1.0}, {"1.5": 1.0}, {1.5: 1.0}, {None: 1.0}, {True: 1.0}, {"²": 1.0}],
  "allowed_token_ids": [[], 5, "5", ["5"], [1.0], [True], [None], {5: 1}],
  "bad_words": ["a", 5, [5], [""], ["ok", None], b"x", {"a": 1}],
  "logprobs": [-2, 2**31, 1.5, "5", True, [1]], "prompt_logprobs": [-2, 2**31, 1.5, "5", True, [1]],
  "structured_outputs": [5, "x", ["x"], True],
}


# Requests

REQUESTS = json.loads((Path(__file__).parents[1] / "data/invalid_requests.json").read_text())
VALID: dict[str, dict[str, Any]] = REQUESTS["valid"]   # a body of each path


def refused_requests(server: str) -> list[tuple[Any, ...]]:
  """Return path, body, status, param and words of each request in data/invalid_requests.json to one kind of server.
  param: of the error, None if it is not a field of the body. words: parts of the message."""
  return [(path, {**VALID.get(path, {}), **fields}, group["status"], param, words or [param or ""])
          for group in REQUESTS["refused"] if group["server"] == server
          for path in group["paths"] for fields, param, *words in group["rows"]]


def check_refused(server: Client, path: str, body: Any, status: int, param: str | None, words: list[str]) -> None:
  """Check that a request gets an error of one line, in Anthropic's format on its routes."""
  response = server.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
  if "/v1/messages" in path:
    error = response.json()["error"]
    assert response.status_code == status and response.json() == {"type": "error", "error": {
      "type": {400: "invalid_request_error", 404: "not_found_error"}[status], "message": error["message"]}}
  else: error = error_of(response, status)
  assert param is None or error["param"] == param, error
  assert all(word in error["message"] for word in words) and "\n" not in error["message"], error
