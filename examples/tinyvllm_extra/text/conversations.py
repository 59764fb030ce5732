"""Turns conversations of clients into prompts. A client returns the answers of any server, and each chat template
accepts only some forms of them."""
import json, re
from collections.abc import Callable, Iterator
from typing import Any

from tinyvllm.config import InputError, JsonObject, check

from .chat_template import text_of
from .huggingface import ChatTokenizer

CHECKS_CALL_IDS = re.compile(r"length *!= *9")   # Mistral's templates require 9 letters or digits
INSTRUCTIONS = ("system", "developer")   # roles
Messages = list[JsonObject]


def render_conversation(tokenizer: ChatTokenizer, messages: Messages, **options: Any) -> str:
  """Return a conversation's prompt. options: of ChatTokenizer.apply_chat_template.

  Raises InputError if the template fails for all forms of the conversation, or would leave out an instruction."""
  check(all(isinstance(x, dict) for x in messages), "messages: each message must be an object with role and content")
  source = tokenizer.template(bool(options.get("tools")), options.get("chat_template")) or ""
  later = [plain_text(x).strip() for x in messages[1:] if x.get("role") in INSTRUCTIONS]
  errors = []
  for form in forms([adapt(message, source) for message in messages]):
    try:
      text = tokenizer.apply_chat_template(form, **options)
      for x in later: check(x in text, f"messages: the chat template leaves out the instruction {x[:100]!r}")
      return text
    except InputError as e: errors.append(e)
  raise errors[0]   # there is at least one form


def encode(tokenizer: ChatTokenizer, messages: Messages, template: JsonObject | None = None,
           **unknown: object) -> tuple[str, list[int]]:
  """Return a conversation's prompt text and token ids. template: options of ChatTokenizer.apply_chat_template."""
  check(isinstance(messages, list) and messages, f"messages={messages!r} must be [{{'role': 'user', 'content': str}}]")
  check(not unknown, f"prompt: {', '.join(unknown)}: only messages and template are allowed together")
  text = render_conversation(tokenizer, messages, **template or {})
  return text, tokenizer.encode(text, False)   # the template adds BOS


def forms(messages: Messages) -> Iterator[Messages]:
  """Yield a conversation with calls' arguments as objects and as text, and with all instructions in one first message:
  templates accept one form, or drop a later instruction."""
  for form in (messages, with_first_instruction(messages)):
    yield form
    if any(message.get("tool_calls") for message in form):
      yield [with_arguments(message, lambda x: json.dumps(x, ensure_ascii=False)) for message in form]


def plain_text(message: JsonObject) -> str:
  content = message.get("content") or ""
  return content if isinstance(content, str) else "\n".join(map(text_of, content))


def with_first_instruction(messages: Messages) -> Messages:
  instructions = [x for x in messages if x.get("role") in INSTRUCTIONS]
  first = [{**x, "content": "\n\n".join(map(plain_text, instructions))} for x in instructions[:1]]
  return [*first, *(x for x in messages if x and x.get("role") not in INSTRUCTIONS)]


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
