"""Error responses in OpenAI's format, or in Anthropic's for /v1/messages, and the handlers of exceptions in routes."""
import http, json, pathlib, re
from collections.abc import Mapping

from fastapi import Request, responses
from fastapi.exceptions import RequestValidationError, StarletteHTTPException
from starlette import routing, types

from tinyvllm.config import InputError, JsonObject, logger, read_json
from tinyvllm_extra.options import MissingPackage

from .async_engine import StepError


def error_body(status: int, message: str, param: str | None = None) -> JsonObject:
  phrase = "Request Entity Too Large" if status == 413 else http.HTTPStatus(status).phrase   # Python 3.13 renamed it
  error_type = phrase.replace(" ", "").removesuffix("Error") + "Error"
  return {"error": {"message": message, "type": error_type, "param": param, "code": status}}


# By status: types of errors in Anthropic's format, and headers
TABLES = read_json(pathlib.Path(__file__).with_suffix(".json"))


def anthropic_error(error: JsonObject) -> JsonObject:
  """Return the body for an error in Anthropic's format. error: in OpenAI's format."""
  error_type = TABLES["anthropic"].get(str(error["code"]), "api_error")
  return {"type": "error", "error": {"type": error_type, "message": error["message"]}}


class ErrorJSON(responses.JSONResponse):
  """An error response in OpenAI's format, and in Anthropic's on its routes."""
  def __init__(self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None):
    super().__init__(error_body(status, message, param), status, headers or TABLES["headers"].get(str(status)))

  async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
    if "/v1/messages" in scope["path"]:
      self.body = self.render(anthropic_error(json.loads(bytes(self.body))["error"]))
      self.headers["content-length"] = str(len(self.body))
    await super().__call__(scope, receive, send)


class Refusal(RuntimeError):
  """An error response other than HTTP 400, raised in a route. It has ErrorJSON's arguments."""
  def __str__(self) -> str: return self.args[1]


async def explain(request: Request, error: Exception) -> responses.Response:
  """Return the error response for an exception that a route raised. Log it, unless it is the client's mistake."""
  if isinstance(error, Refusal): return ErrorJSON(*error.args)
  if isinstance(error, StarletteHTTPException):
    return ErrorJSON(error.status_code, explain_path(request, error), headers=error.headers)
  if isinstance(error, RequestValidationError): return explain_validation(request, error)
  if isinstance(error, UnicodeEncodeError): return ErrorJSON(400, f"text is not valid Unicode: {error}")
  if isinstance(error, InputError):
    return ErrorJSON(400, str(error), "prompt" if error.parameter == "prompt_token_ids" else error.parameter)
  if not isinstance(error, MissingPackage): return ErrorJSON(500, internal_error(error)["error"]["message"])
  logger.warning(f"{request.url.path}: {error}")
  return ErrorJSON(501, str(error))


def explain_path(request: Request, error: StarletteHTTPException) -> str:
  """Return the error message for a path without a route, or for a method that the route does not have."""
  allowed = (error.headers or {}).get("Allow")
  if error.status_code != 404: return f"{error.detail}: use {allowed}" if allowed else error.detail
  path = request.scope["path"][:256]
  # From /chat/completions, and from /v1/v1/chat/completions
  name = path.removeprefix(request.scope["root_path"]).rpartition("/v1/")[2].strip("/")
  scope = {**request.scope, "path": f"/v1/{name}"}
  if all(route.matches(scope)[0] == routing.Match.NONE for route in request.app.routes):
    return f"{path} does not exist: /openapi.json lists all paths"
  base_url = f"{request.base_url}{'' if name.startswith('messages') else 'v1'}".rstrip("/")
  return f"{path} does not exist: did you mean /v1/{name}? Set the client's base_url to {base_url}"


def explain_validation(request: Request, invalid: RequestValidationError) -> responses.Response:
  """Return the error response for a body that pydantic rejected, with its problem deepest in the body: a union has one
  for each type, and the one of the intended type is the deepest."""
  problem: JsonObject = max(invalid.errors(), key=lambda problem: len(problem["loc"]))
  if problem["type"] == "json_invalid": return ErrorJSON(400, f"the body is not JSON: {problem['ctx']['error']}")
  content_type = request.headers.get("content-type", "")
  if "json" not in content_type and "body" in problem["loc"]:
    sent = f"Content-Type={content_type}" if content_type else "no Content-Type"
    return ErrorJSON(400, f"{sent}: send the header Content-Type: application/json, and a body of JSON")
  # Without "body" or "query", with which FastAPI's begin, and without the types of unions
  path = [x for x in map(str, problem["loc"]) if re.fullmatch(r"\d+|(?!(?:body|query|str|int|bool)$)[a-z]\w*", x)]
  error = problem.get("ctx", {}).get("error")
  if isinstance(error, InputError):   # raised by protocol.Body
    return ErrorJSON(400, ".".join([*path, str(error)]), path[0] if path else error.parameter)
  return ErrorJSON(400, f"{'.'.join(path) or 'the body'}: {problem['msg']}", path[0] if path else None)


def internal_error(error: Exception) -> JsonObject:
  """Log an exception's traceback, unless the engine thread has done so. Return the body for HTTP 500."""
  if not isinstance(error, StepError): logger.error("internal error", exc_info=error)
  return error_body(500, str(error) or repr(error))
