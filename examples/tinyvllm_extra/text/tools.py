"""Tools: the functions that a response may call, in OpenAI's format; the JSON schema of a response that must call one;
and the formats of calls, functions that read the calls in the text of a section (see parsers.py). Calls of small models
with common errors are understood: an invalid escape keeps its backslash, a comma may be too many, arguments may be JSON
text."""
import ast, functools, json, re, typing, warnings

from tinyvllm.config import InputError, JsonObject, check

Choice = str | JsonObject | None   # a request's tool_choice
# Keywords that combine schemas: closing one part would exclude the properties of the others
COMBINATIONS = {"allOf", "anyOf", "oneOf", "$ref", "if", "patternProperties", "unevaluatedProperties",
                "additionalProperties"}


def allowed_tools(choice: Choice) -> JsonObject:
  """Return a tool_choice in the form of its type "allowed_tools". Without "tools", all are allowed."""
  if not isinstance(choice, dict): return {"mode": choice}
  return choice.get("allowed_tools") or {"mode": "required", "tools": [choice]}


def requires_call(choice: Choice) -> bool: return allowed_tools(choice)["mode"] == "required"


def callable_functions(tools: list[JsonObject], choice: Choice) -> dict[str, JsonObject]:
  """Return the parameters of the functions that the response may call, by name. Raises InputError for an unknown
  function in tool_choice, or if it requires tools."""
  functions = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
  check(functions or choice in (None, "none", "auto"), f"tool_choice={choice!r} requires tools")
  names = [x["function"]["name"] for x in allowed_tools(choice).get("tools", tools)]
  for name in names:
    check(name in functions, f"tool_choice: unknown function {name!r}; use one of {', '.join(functions)}")
  return {name: functions[name] for name in names}


def calls_schema(tools: list[JsonObject], choice: Choice, parallel: bool = True) -> JsonObject | None:
  """Return the JSON schema of a response that calls one tool, or several if `parallel`; None if no call is required.

  choice: "auto", "none", "required", {"type": "function", "function": {"name": ...}}, which is called once, or
  {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}. Raises InputError for an unknown function
  or for wrong $defs."""
  functions = callable_functions(tools, choice)
  if not requires_call(choice): return None
  functions = {name: close(schema or {"type": "object", "properties": {}}) for name, schema in functions.items()}
  # A schema with an $id is the root of the references in it. Not the parameters: drafts up to 7 ignore it next to $ref
  calls = [{"type": "object", "properties": {"name": {"const": name}, "arguments": {
              "$id": f"arguments-{i}", "allOf": [x], **{key: x[key] for key in ("$defs", "definitions") if key in x}}},
            "required": ["name", "arguments"], "additionalProperties": False}
           for i, (name, x) in enumerate(functions.items())]
  is_single = not parallel or isinstance(choice, dict) and choice["type"] == "function"
  return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **({"maxItems": 1} if is_single else {}),
          "x-guidance": {"whitespace_flexible": False}}   # small models may generate spaces forever


def close(schema: JsonObject) -> JsonObject:
  """Return a schema whose objects with properties allow no others, unless it says so or combines schemas by allOf.
  Raises InputError for wrong $defs or a schema that is nested too deeply."""
  check(isinstance(schema.get("$defs", {}), dict), f"tools: $defs={schema.get('$defs')!r} must be an object")
  try: return schema if '"allOf"' in json.dumps(schema) else close_objects(schema)
  except RecursionError as error: raise InputError("tools: parameters are nested too deeply: use $defs") from error


def close_objects(schema: object) -> typing.Any:
  if isinstance(schema, list): return [*map(close_objects, schema)]
  if not isinstance(schema, dict): return schema
  is_closed = isinstance(schema.get("properties"), dict) and not COMBINATIONS & schema.keys()
  parts = {key: {name: close_objects(x) for name, x in schema[key].items()}
           for key in ("properties", "$defs", "definitions") if isinstance(schema.get(key), dict)}
  parts |= {key: close_objects(schema[key]) for key in ("items", "anyOf", "oneOf")
            if key in schema and (key == "items" or "properties" not in schema)}
  return schema | parts | ({"additionalProperties": False} if is_closed else {})


# Formats of calls

# (kind, text, name). kind: content, reasoning, or call, whose text is its arguments as JSON. name: of its function
Event = tuple[str, str, str]
Call = tuple[str, JsonObject]       # name and arguments
Functions = dict[str, JsonObject]   # parameter schemas by name

VALUE_START = re.compile(r"[^\s,;\[\]]")
FENCE = re.compile(r"\A\s*```\w*|```\s*\Z")
# Parts of JSON text that may need a repair: strings, commas before a closing bracket, Python's literals
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|,(?=\s*[}\]])|\b(?:True|False|None)\b', re.DOTALL)
ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}|(.?))', re.DOTALL)
REPAIRS = {",": "", "True": "true", "False": "false", "None": "null"}
PYTHON_TOKEN = re.compile(r"""(["'])(?:(?!\1)[^\\]|\\.)*\1|\b(?:true|false|null)\b""", re.DOTALL)
FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(</function>|(?=<function=)|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?(</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
MISTRAL = re.compile(r"\s*([\w.-]*)(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?\s*(?=\{|\[\s*\{)")
# Text in quotes, a key, or text without quotes
GEMMA = re.compile(r'<\|"\|>(.*?)<\|"\|>|(?<=[{,])\s*([\w.-]+):|(?<=[:\[,])\s*([^\s{}\[\],<][^{}\[\]<]*?)'
                   r'(?=,\s*[\w.-]+:|\]|\}|\Z)', re.DOTALL)
BARE = "\ue0fe"   # a private character
# Beginnings of calls: other text is content at once
STARTS = {"json": re.compile(r'[\[\s]*(?:\Z|\{\s*(?:\Z|"))'),
          "mistral": re.compile(r"(?s).{0,200}\Z|" + MISTRAL.pattern),
          "pythonic": re.compile(r"\s*\[\s*(?:\Z|[A-Za-z_][\w.]*\s*(?:\Z|\())")}


def repair(token: re.Match) -> str:
  """Return a part of JSON text with the backslashes of invalid escapes doubled."""
  if token[0][0] != '"': return REPAIRS[token[0]]
  return ESCAPE.sub(lambda x: x[0] if x[1] is None else rf"\\{x[1]}", token[0])


def json_values(text: str) -> list[typing.Any]:
  """Return all JSON values, separated by commas, semicolons or brackets of a list. Raises ValueError."""
  text = TOKEN.sub(repair, FENCE.sub("", text))
  values, position = [], 0
  while start := VALUE_START.search(text, position):
    value, position = json.JSONDecoder(strict=False).raw_decode(text, start.start())
    values.append(value)
  return values


def named(name: object, functions: Functions) -> str:
  """Return a function's name without the prefix `functions.`. Raises StopIteration for an unknown one."""
  name = str(name).strip()
  return next(x for x in (name, name.removeprefix("functions.")) if x in functions)


def as_object(arguments: JsonObject | str | None) -> JsonObject:
  """Return a call's arguments, which may be JSON text or null. Raises TypeError if they are no object."""
  value, = (json_values(arguments) or [None]) if isinstance(arguments, str) else [arguments]
  return {**(value or {})}


def json_calls(text: str, functions: Functions, is_cut: bool) -> list[Call]:
  """Read {"name": ..., "arguments" or "parameters": ...}, alone or in a list, or nested under "function"."""
  values = [x["function"] if isinstance(x.get("function"), dict) else x for x in json_values(text)]
  return [(named(x.get("name"), functions), as_object(x.get("arguments", x.get("parameters")))) for x in values]


def tagged_calls(text: str, functions: Functions, is_cut: bool) -> list[Call]:
  """Read <function=NAME> with <parameter=KEY>text</parameter>, or JSON. is_cut: the text ends where the output ends."""
  if not text.lstrip().startswith("<function="): return json_calls(text, functions, is_cut)
  calls = []
  for function in FUNCTION.finditer(text):
    name = named(function[1], functions)
    schema = functions[name]
    properties = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
    parameters = [*PARAMETER.finditer(function[2])]
    if is_cut and not function[3] and parameters and not parameters[-1][3]: raise ValueError("cut off")
    calls.append((name, {x[1]: fit(x[2], types_of(properties.get(x[1]), schema)) for x in parameters}))
  return calls


def mistral_calls(text: str, functions: Functions, is_cut: bool) -> list[Call]:
  """Read a JSON list of calls, or name{...}, with [CALL_ID]id and [ARGS] before the object."""
  head = MISTRAL.match(text)
  if not head or not head[1]: return json_calls(text, functions, is_cut)
  return [(named(head[1], functions), as_object(text[head.end():]))]


def gemma_calls(text: str, functions: Functions, is_cut: bool) -> list[Call]:
  """Read name{key:<|"|>text<|"|>,other:1}; quotes may be absent."""
  name = named(text.partition("{")[0], functions)
  properties = functions[name].get("properties") or {}
  arguments = json.loads(GEMMA.sub(gemma_json, text[text.index("{"):]))
  return [(name, {key: from_gemma(x, properties.get(key), functions[name]) for key, x in arguments.items()})]


def gemma_json(token: re.Match) -> str:
  """Return a part of Gemma's syntax as JSON: quoted text, a key, or BARE text, whose type is not known yet."""
  text, key, bare = token.groups()
  return f"{json.dumps(key)}:" if key else json.dumps(text if bare is None else BARE + bare.strip())


def from_gemma(value: object, schema: object, root: JsonObject) -> object:
  if isinstance(value, list): return [from_gemma(x, None, root) for x in value]
  if isinstance(value, dict): return {key: from_gemma(x, None, root) for key, x in value.items()}
  if not isinstance(value, str) or not value.startswith(BARE): return value
  return fit(value.removeprefix(BARE), types_of(schema, root) or {"string", "null", "boolean", "integer", "number"})


def pythonic_calls(text: str, functions: Functions, is_cut: bool) -> list[Call]:
  """Read [name(key='text', other=1), ...], Python's syntax, also with true, false and null."""
  python = {"true": "True", "false": "False", "null": "None"}
  with warnings.catch_warnings(action="ignore"):   # invalid escapes, which keep their backslash
    tree = ast.parse(PYTHON_TOKEN.sub(lambda x: python.get(x[0], x[0]), text.strip()), mode="eval").body
  calls: list[typing.Any] = tree.elts if isinstance(tree, ast.List) else []
  if any(call.args for call in calls): raise ValueError("only keywords have names")
  return [(named(ast.unparse(call.func), functions), {str(x.arg): ast.literal_eval(x.value) for x in call.keywords})
          for call in calls]   # AttributeError: no call


READERS = {   # by the format of a section
  "json": json_calls, "harmony": json_calls, "tagged": tagged_calls, "xml": tagged_calls, "mistral": mistral_calls,
  "gemma": gemma_calls, "pythonic": pythonic_calls}


def is_in_string(text: str) -> bool:
  """Return whether JSON text ends within a string, which may contain a marker."""
  return re.sub(r"(?s)\\.", "", text).count('"') % 2 == 1


def read_calls(section_format: str, text: str, functions: Functions, is_cut: bool) -> list[Event]:
  """Return the events of the calls in a section's text; [] for other text, including calls of unknown functions."""
  try:
    return [("call", json.dumps(arguments, ensure_ascii=False), name)
            for name, arguments in READERS[section_format](text, functions, is_cut)]
  except (ValueError, TypeError, AttributeError, LookupError, StopIteration, SyntaxError, RecursionError, MemoryError):
    return []


# Parameters without JSON syntax

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object",
              type(None): "null"}


def types_of(schema: object, root: JsonObject, depth: int = 0) -> set[str]:
  """Return the JSON types that a schema allows, through $ref, enum, const and combinations; empty if it names none."""
  if not isinstance(schema, dict) or depth > 9: return set()
  values = [*(schema.get("enum") or []), *([schema["const"]] if "const" in schema else [])]
  declared = schema.get("type") or [JSON_TYPES[type(value)] for value in values]
  types = {x for x in (declared if isinstance(declared, list) else [declared]) if isinstance(x, str)}
  parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or []]
  reference = schema.get("$ref")
  if isinstance(reference, str) and reference.startswith("#/"):
    parts.append(functools.reduce(lambda x, key: x.get(key, {}), reference[2:].split("/"), root))
  return types.union(*(types_of(part, root, depth + 1) for part in parts))


def fit(text: str, types: set[str]) -> object:
  """Return a parameter as a value of one of the types, in JSON's or Python's syntax, else as text."""
  words = {"true": True, "false": False, "null": None} | ({} if "string" in types else {"none": None})
  for read in (lambda x: words[x.lower()], json.loads, ast.literal_eval):
    try: value = json.loads(json.dumps(read(text.strip()), allow_nan=False))
    except (ValueError, TypeError, LookupError, SyntaxError, RecursionError, MemoryError): continue
    json_type = JSON_TYPES[type(value)]
    allowed = types & {"object", "array"} if read is ast.literal_eval else types - {"string"}
    if json_type in allowed or json_type == "integer" and "number" in types: return value
  return text
