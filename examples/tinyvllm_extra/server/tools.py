"""Tools, as OpenAI's clients have them: what an answer must be that has to call some, and the calls in its text. Two
formats are read: Hermes', <tool_call>{"name": ..., "arguments": {...}}</tool_call>, which Qwen has, too, and Llama
3's, a text that is {"name": ..., "parameters": {...}}, or a list of such, and nothing else."""
import json, re, uuid
from typing import Any

from tinyvllm.config import check

BEGIN = "<tool_call>"
CALLS = re.compile(rf"{BEGIN}\s*(.*?)\s*(?:</tool_call>|$)", re.DOTALL)


def schema_of(tools: list[dict[str, Any]], choice: Any, parallel: bool = True) -> dict[str, Any] | None:
  """What a text has to be that calls one of the tools, or, if parallel, several; None if it need not. choice: "auto",
  "none", "required", or {"type": "function", "function": {"name": ...}}, which is called once. Raises ValueError for a
  function that there is not."""
  functions = {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools}
  if choice in (None, "auto", "none"): return None
  named = choice["function"]["name"] if isinstance(choice, dict) else None
  check(functions, f"tool_choice={choice!r} needs tools")
  check(named is None or named in functions, f"tool_choice: there is no function {named!r}, but {', '.join(functions)}")
  wanted = {name: parameters for name, parameters in functions.items() if named in (None, name)}
  shared: dict[str, Any] = {}   # "#/$defs/X" is looked for at the top
  for parameters in wanted.values():
    for name, schema in (parameters.get("$defs") or {}).items():
      check(shared.setdefault(name, schema) == schema, f"tools: two functions have another {name!r} each in $defs")
  calls = [{"type": "object", "properties": {"name": {"const": name}, "arguments": parameters},
            "required": ["name", "arguments"], "additionalProperties": False} for name, parameters in wanted.items()]
  most = {} if parallel and named is None else {"maxItems": 1}
  return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": shared,
          "x-guidance": {"whitespace_flexible": False}}   # a small model could go on with spaces


def with_objects(message: dict[str, Any]) -> dict[str, Any]:
  """A message whose calls have their arguments as templates want them, where OpenAI has them as JSON in a str."""
  calls = message.get("tool_calls")
  if not calls: return message
  try: return {**message, "tool_calls": [{**call, "function": {
    **call["function"], "arguments": json.loads(call["function"]["arguments"])}} for call in calls]}
  except (KeyError, TypeError, ValueError, RecursionError) as e:
    raise ValueError(f"messages: each of tool_calls must have a function with name and arguments in JSON ({e})") from e


def certain(text: str) -> int:
  """How many characters at a text's beginning are of no call, whatever comes."""
  if re.match(r"\s*(\[?\s*\{|\[?\s*$)", text): return 0
  begun = (n for n in range(len(BEGIN)) if text.endswith(BEGIN[:n]))
  return text.index(BEGIN) if BEGIN in text else len(text) - max(begun, default=0)


def read_calls(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
  """What a text says beside its calls, and these. What is no call of one of the tools is text."""
  names = [tool["function"]["name"] for tool in tools]   # a list: what is looked for there may be anything
  try: found = [json.loads(call) for call in CALLS.findall(text) or [text]]
  except (ValueError, RecursionError): return text, []
  found = [call for some in found for call in (some if isinstance(some, list) else [some])]
  if not found or not all(isinstance(call, dict) and call.get("name") in names for call in found): return text, []
  functions = [{"name": call["name"], "arguments": json.dumps(call.get("arguments", call.get("parameters", {})))}
               for call in found]
  return text[:text.index(BEGIN)] if BEGIN in text else "", [
    {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function} for function in functions]
