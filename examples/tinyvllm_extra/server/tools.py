"""Tool calls in OpenAI's format: the JSON schema of a response that must call tools, and a parser for calls in text.
It parses two formats: <tool_call>{"name": ..., "arguments": {...}}</tool_call> of Hermes and Qwen, and a whole text
that is {"name": ..., "parameters": {...}} or a list of such objects, of Llama 3."""
import json, re, uuid
from typing import Any

from tinyvllm.config import InputError, check

BEGIN = "<tool_call>"
CALLS = re.compile(rf"{BEGIN}\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


def calls_schema(tools: list[dict[str, Any]], choice: Any, parallel: bool = True) -> dict[str, Any] | None:
  """Return the JSON schema of a response that calls one tool, or several if `parallel`; None if no call is required.

  choice: "auto", "none", "required", or {"type": "function", "function": {"name": ...}}, which is called once. Raises
  InputError for an unknown function or for schemas that cannot be merged."""
  functions = {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools}
  if choice in (None, "auto", "none"): return None
  name = choice["function"]["name"] if isinstance(choice, dict) else None
  check(functions, f"tool_choice={choice!r} requires tools")
  check(name is None or name in functions, f"tool_choice: unknown function {name!r}; use one of {', '.join(functions)}")
  if name: functions = {name: functions[name]}
  calls = [{"type": "object", "properties": {"name": {"const": name}, "arguments": parameters},
            "required": ["name", "arguments"], "additionalProperties": False} for name, parameters in functions.items()]
  limit = {} if parallel and name is None else {"maxItems": 1}
  return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit, "$defs": merged_definitions(functions),
          "x-guidance": {"whitespace_flexible": False}}   # small models may generate spaces forever


def merged_definitions(functions: dict[str, dict[str, Any]]) -> dict[str, Any]:
  """Merge the functions' $defs, because a reference "#/$defs/X" is resolved at the top of the schema."""
  merged: dict[str, Any] = {}
  for parameters in functions.values():
    definitions = parameters.get("$defs") or {}
    check(isinstance(definitions, dict), f"tools: $defs={definitions!r} must be an object")
    for name, schema in definitions.items():
      check(merged.setdefault(name, schema) == schema, f"tools: two functions define {name!r} differently in $defs")
  return merged


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
  """Return a message with its tool calls' JSON arguments parsed to objects, as chat templates expect."""
  calls = message.get("tool_calls")
  if not calls: return message
  try: return {**message, "tool_calls": [{**call, "function": {
    **call["function"], "arguments": json.loads(call["function"]["arguments"])}} for call in calls]}
  except (KeyError, TypeError, ValueError, RecursionError) as error:
    raise InputError("messages: every entry of tool_calls must have a function with a name and JSON arguments "
                     f"({error})") from error


def num_plain_characters(text: str) -> int:
  """Return how many characters at the start of an unfinished text cannot be part of a tool call."""
  if re.match(r"\s*(\[?\s*\{|\[?\s*$)", text): return 0
  if BEGIN in text: return text.index(BEGIN)
  return len(text) - max(n for n in range(len(BEGIN)) if text.endswith(BEGIN[:n]))


def parse_calls(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
  """Split a finished text into plain text and tool calls. Without a valid call of a known tool, all text is plain."""
  names = [tool["function"]["name"] for tool in tools]   # a list, since a call's name may be unhashable
  try: values = [json.loads(call) for call in CALLS.findall(text) or [text]]
  except (ValueError, RecursionError): return text, []
  calls = [call for value in values for call in (value if isinstance(value, list) else [value])]
  if not calls or not all(isinstance(call, dict) and call.get("name") in names for call in calls): return text, []
  functions = [{"name": call["name"], "arguments": json.dumps(call.get("arguments", call.get("parameters", {})))}
               for call in calls]
  return text[:text.index(BEGIN)] if BEGIN in text else "", [
    {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function} for function in functions]
