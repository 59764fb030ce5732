"""Tools in OpenAI's format: the functions that a response may call, and the JSON schema of a response that must call
one. parsers.py reads calls in generated text."""
import json
from typing import Any

from tinyvllm.config import InputError, JsonObject, check

Choice = str | JsonObject | None   # a request's tool_choice
NO_PARAMETERS = {"type": "object", "properties": {}}
# Keywords that combine schemas: closing one part would exclude the properties of the others
COMBINATIONS = {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "unevaluatedProperties",
                "additionalProperties"}


def requires_call(choice: Choice) -> bool:
  """Return whether a tool_choice requires a call."""
  if not isinstance(choice, dict): return choice == "required"
  return choice["type"] == "function" or choice["allowed_tools"]["mode"] == "required"


def callable_functions(tools: list[JsonObject], choice: Choice) -> dict[str, JsonObject]:
  """Return the parameters of the functions that the response may call, by name. Raises InputError for an unknown
  function in tool_choice."""
  functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
  if not isinstance(choice, dict): return functions
  choices = [choice] if choice["type"] == "function" else choice["allowed_tools"]["tools"]
  check(functions, f"tool_choice={choice!r} requires tools")
  names = [x["function"]["name"] for x in choices]
  for name in names:
    check(name in functions, f"tool_choice: unknown function {name!r}; use one of {', '.join(functions)}")
  return {name: functions[name] for name in names}


def calls_schema(tools: list[JsonObject], choice: Choice, parallel: bool = True) -> JsonObject | None:
  """Return the JSON schema of a response that calls one tool, or several if `parallel`; None if no call is required.

  choice: "auto", "none", "required", {"type": "function", "function": {"name": ...}}, which is called once, or
  {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}. Raises InputError for an unknown function
  or for schemas that cannot be merged."""
  functions = callable_functions(tools, choice)
  if not requires_call(choice): return None
  check(functions, f"tool_choice={choice!r} requires tools")
  functions = {name: close(parameters or NO_PARAMETERS) for name, parameters in functions.items()}
  calls = [{"type": "object", "properties": {"name": {"const": name}, "arguments": parameters},
            "required": ["name", "arguments"], "additionalProperties": False} for name, parameters in functions.items()]
  is_single = not parallel or isinstance(choice, dict) and choice["type"] == "function"
  return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({"maxItems": 1} if is_single else {}),
          "$defs": merged_definitions(functions),
          "x-guidance": {"whitespace_flexible": False}}   # small models may generate spaces forever


def close(schema: JsonObject) -> JsonObject:
  """Return a schema whose objects with properties allow no others, unless it says so or combines schemas by allOf."""
  try: return schema if '"allOf"' in json.dumps(schema) else close_objects(schema)
  except RecursionError as error: raise InputError("tools: parameters are nested too deeply: use $defs") from error


def close_objects(schema: object) -> Any:
  if isinstance(schema, list): return [*map(close_objects, schema)]
  if not isinstance(schema, dict): return schema
  is_closed = isinstance(schema.get("properties"), dict) and not COMBINATIONS & schema.keys()
  parts = {key: {name: close_objects(x) for name, x in schema[key].items()}
           for key in ("properties", "$defs", "definitions") if isinstance(schema.get(key), dict)}
  parts |= {key: close_objects(schema[key]) for key in ("items", "anyOf", "oneOf")
            if key in schema and (key == "items" or "properties" not in schema)}
  return {**schema, **parts, **({"additionalProperties": False} if is_closed else {})}


def merged_definitions(functions: dict[str, JsonObject]) -> JsonObject:
  """Merge the functions' $defs, because a reference "#/$defs/X" is resolved at the top of the schema."""
  merged: JsonObject = {}
  for parameters in functions.values():
    definitions = parameters.get("$defs", {})
    check(isinstance(definitions, dict), f"tools: $defs={definitions!r} must be an object")
    for name, schema in definitions.items():
      check(merged.setdefault(name, schema) == schema, f"tools: two functions define {name!r} differently in $defs")
  return merged
