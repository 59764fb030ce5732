"""Requests that a server refuses, from data/invalid_requests.json."""
import json
from typing import Any

from .data import read_data
from .servers import Client, error_of

REQUESTS = read_data("invalid_requests.json")
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
