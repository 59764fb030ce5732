"""Renders conversations with a model's chat template, in the environment that transformers gives to templates
(transformers/utils/chat_template_utils.py). A client returns the answers of any server, and each chat template accepts
only some forms of them."""
import datetime, functools, json, pathlib, re
from collections.abc import Callable, Iterator

from tinyvllm.config import InputError, JsonObject, check

END = "\ue0ff "   # end of a message to continue: a private character, and a space that shows whether spaces are kept
# The tag {% generation %}, which marks an answer for training, is only a scope here
GENERATION = re.compile(r"({%[-+]?\s*(?:end)?)generation\b")
PARTS = ("text", "refusal", "thinking")   # endings of the types of parts with text, such as input_text
CHECKS_CALL_IDS = re.compile(r"length *!= *9")   # Mistral's templates require 9 letters or digits
INSTRUCTIONS = ("system", "developer")   # roles
REASONING = ("reasoning_content", "thinking", "reasoning")   # names of a message's reasoning


def template_text(template: str | None) -> str | None:
  """Return the text of a chat template. template: a text with braces or several lines, or else a file."""
  if not template or "{" in template or "\n" in template: return template
  try: return pathlib.Path(template).expanduser().read_text()
  except OSError as error: raise InputError(f"chat_template={template!r} cannot be read: {error.strerror}") from error


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> tuple[Callable[..., str], bool]:
  """Return the function that renders a template, and whether it renders content that is a list of parts."""
  from jinja2 import ext, sandbox
  env = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols])
  env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)   # Jinja's own escapes HTML
  env.globals["raise_exception"] = functools.partial(check, False)
  env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  render = env.from_string(GENERATION.sub(r"\1with", source)).render
  try: text = render(messages=[{"role": "user", "content": [{"type": "text", "text": END}]}])
  except Exception: text = ""   # not with a list
  return render, END.strip() in text and "type'" not in text and 'type"' not in text


def normalize(message: JsonObject, has_parts: bool, end: str = "") -> JsonObject:
  """Return a message without null fields, with its reasoning under all names, and with the content that the template
  understands, then `end`: text, or parts if it iterates over them. An assistant's null content, as in a tool call,
  becomes ""."""
  message = {key: value for key, value in message.items() if value is not None}
  if message["role"] == "assistant": message = {"content": "", **message}
  reasoning = next((message[name] for name in REASONING if name in message), None)
  if reasoning is not None: message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
  content = message.get("content")
  check(isinstance(content, str | list), f"content={content!r} must be a str or a list of parts")
  texts = [content] if isinstance(content, str) else [*map(text_of, content or [])]
  if isinstance(content, str) or not has_parts: return {**message, "content": "\n".join(texts) + end}
  if end: texts[-1] += end
  return {**message, "content": [{"type": "text", "text": text} for text in texts]}


def text_of(part: JsonObject | str) -> str:
  """Return the text of a part of a message's content."""
  fields = part if isinstance(part, dict) else {}
  name = fields.get("type")
  text = fields.get(name if name in ("refusal", "thinking") else "text") if str(name).endswith(PARTS) else part
  check(isinstance(text, str), f"content: {part!r:.99} is not supported: use parts {{'type': 'text', 'text': '...'}}")
  return str(text)


def forms(messages: list[JsonObject]) -> Iterator[list[JsonObject]]:
  """Yield a conversation with calls' arguments as objects and as text, and with all instructions in one first message:
  templates accept one form, or drop a later instruction."""
  instructions = [x for x in messages if x.get("role") in INSTRUCTIONS]
  first = [{**x, "content": "\n\n".join(map(plain_text, instructions))} for x in instructions[:1]]
  for form in (messages, [*first, *(x for x in messages if x and x.get("role") not in INSTRUCTIONS)]):
    yield form
    if any(message.get("tool_calls") for message in form):
      yield [with_arguments(message, lambda x: json.dumps(x, ensure_ascii=False)) for message in form]


def plain_text(message: JsonObject) -> str:
  content = message.get("content") or ""
  return content if isinstance(content, str) else "\n".join(map(text_of, content))


def adapt(message: JsonObject, source: str) -> JsonObject:
  """Return a message with the role `developer` as `system`, calls' arguments as objects (see parse_arguments), and ids
  of calls as the chat template `source` requires them. Empty tool_calls are left out."""
  calls = message.get("tool_calls") or []
  check(isinstance(calls, list) and all(map(is_call, calls)),
        "messages: every entry of tool_calls must be an object with a function that has a name")
  message = {key: value for key, value in message.items() if value or key != "tool_calls"}
  message = with_arguments(message, parse_arguments)
  if message.get("role") == "developer" and "developer" not in source: message = {**message, "role": "system"}
  if not CHECKS_CALL_IDS.search(source): return message
  if message.get("tool_call_id"): message = {**message, "tool_call_id": short_id(message["tool_call_id"])}
  calls = [{**call, "id": short_id(call.get("id"))} for call in message.get("tool_calls", [])]
  return {**message, "tool_calls": calls} if calls else message


def is_call(call: object) -> bool:
  function = call.get("function") if isinstance(call, dict) else None
  return isinstance(function, dict) and isinstance(function.get("name"), str)


def short_id(call_id: object) -> str: return re.sub("[^A-Za-z0-9]", "", str(call_id))[-9:].rjust(9, "0")


def parse_arguments(arguments: JsonObject | str | None) -> JsonObject:
  """Return a call's arguments as an object. "" is {}; text that is not a JSON object, such as a call cut off by
  max_tokens, becomes {"invalid_json": text}."""
  try: value = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
  except (ValueError, RecursionError): value = None
  return value if isinstance(value, dict) else {"invalid_json": arguments}


def with_arguments(message: JsonObject, convert: Callable[[JsonObject], JsonObject | str]) -> JsonObject:
  if not message.get("tool_calls"): return message
  return {**message, "tool_calls": [{**call, "function": {
    **call["function"], "arguments": convert(call["function"].get("arguments"))}} for call in message["tool_calls"]]}
