"""Turns conversations of clients into prompts. A client returns the answers of any server, and each chat template
accepts only some forms of them."""
import json, re
from collections.abc import Iterator
from typing import Any

from tinyvllm.config import InputError, check

from .chat_template import text_of
from .huggingface import ChatTokenizer

CHECKS_CALL_IDS = re.compile(r"length *!= *9")   # Mistral's templates require 9 letters or digits
INSTRUCTIONS = ("system", "developer")   # roles
Messages = list[dict[str, Any]]


def render_conversation(tokenizer: ChatTokenizer, messages: Messages, **options: Any) -> str:
  """Return a conversation's prompt. options: of ChatTokenizer.apply_chat_template.

  Raises InputError if the template fails for all forms of the conversation, or would leave out an instruction."""
  check(all(isinstance(x, dict) for x in messages), "messages: each message must be an object with role and content")
  source = tokenizer.template(bool(options.get("tools")), options.get("chat_template")) or ""
  later = [plain_text(x).strip() for x in messages[1:] if x.get("role") in INSTRUCTIONS]
  error: InputError | None = None
  for form in forms([adapt(message, source) for message in messages]):
    try: text = tokenizer.apply_chat_template(form, **options)
    except InputError as e:
      error = error or e
      continue
    missing = next((x for x in later if x not in text), None)
    if missing is None: return text
    error = error or InputError(f"messages: the chat template leaves out the instruction {missing[:100]!r}")
  raise error   # type: ignore[misc]   # there is at least one form


def encode(tokenizer: ChatTokenizer, messages: Messages, template: dict[str, Any] | None = None,
           **unknown: Any) -> tuple[str, list[int]]:
  """Return a conversation's prompt text and token ids. template: options of ChatTokenizer.apply_chat_template."""
  check(messages and not unknown, f"prompt: messages={messages!r} must not be empty, and only `template` may be added")
  text = render_conversation(tokenizer, messages, **template or {})
  return text, tokenizer.encode(text, False)   # the template adds BOS


def forms(messages: Messages) -> Iterator[Messages]:
  """Yield a conversation with calls' arguments as objects and as text, and with all instructions in one first message:
  templates accept one form, or drop a later instruction."""
  for form in (messages, with_first_instruction(messages)):
    yield form
    if any(message.get("tool_calls") for message in form):
      yield [with_arguments(message, lambda x: json.dumps(x, ensure_ascii=False)) for message in form]


def plain_text(message: dict[str, Any]) -> str:
  content = message.get("content") or ""
  return content if isinstance(content, str) else "\n".join(map(text_of, content))


def with_first_instruction(messages: Messages) -> Messages:
  instructions = [x for x in messages if x.get("role") in INSTRUCTIONS]
  first = {**instructions[0], "content": "\n\n".join(map(plain_text, instructions))} if instructions else None
  return [x for x in [first, *messages] if x and (x is first or x.get("role") not in INSTRUCTIONS)]


def adapt(message: dict[str, Any], source: str) -> dict[str, Any]:
  """Return a message with the role `developer` as `system`, calls' arguments as objects, and ids of calls as the chat
  template `source` requires them. Empty tool_calls are left out."""
  message = with_parsed_arguments(message)
  if message.get("role") == "developer" and "developer" not in source: message = {**message, "role": "system"}
  if not CHECKS_CALL_IDS.search(source): return message
  if message.get("tool_call_id"): message = {**message, "tool_call_id": short_id(message["tool_call_id"])}
  calls = [{**call, "id": short_id(call.get("id"))} for call in message.get("tool_calls", [])]
  return {**message, "tool_calls": calls} if calls else message


def short_id(call_id: Any) -> str: return re.sub("[^A-Za-z0-9]", "", str(call_id))[-9:].rjust(9, "0")


def parse_arguments(arguments: Any) -> dict[str, Any]:
  """Return a call's arguments as an object. "" is {}; text that is not a JSON object, such as a call cut off by
  max_tokens, becomes {"invalid_json": text}."""
  try: value = json.loads(arguments or "{}") if isinstance(arguments, str | None) else arguments
  except (ValueError, RecursionError): value = None
  return value if isinstance(value, dict) else {"invalid_json": arguments}


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
  """Return a message with its tool calls' arguments as objects, as chat templates expect: see parse_arguments."""
  calls = message.get("tool_calls")
  if not calls: return {key: value for key, value in message.items() if key != "tool_calls"}
  functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else [None]
  check(len(functions) == len(calls) and all(isinstance(x, dict) and isinstance(x.get("name"), str) for x in functions),
        "messages: every entry of tool_calls must be an object with a function that has a name")
  return with_arguments(message, parse_arguments)


def with_arguments(message: dict[str, Any], convert: Any) -> dict[str, Any]:
  if not message.get("tool_calls"): return message
  return {**message, "tool_calls": [{**call, "function": {
    **call["function"], "arguments": convert(call["function"].get("arguments"))}} for call in message["tool_calls"]]}
