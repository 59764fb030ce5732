"""Renders conversations with a model's chat template, in the environment that transformers gives to templates
(transformers/utils/chat_template_utils.py)."""
import datetime, functools, json
from typing import Any

from tinyvllm.config import InputError, check
from tinyvllm_extra.packages import optional

END = "\ue0ff "   # end of a message to continue: a private character, and a space that shows whether spaces are kept
PARTS = ("text", "refusal", "thinking")   # endings of the types of parts with text, such as input_text
REASONING = ("reasoning_content", "thinking", "reasoning")   # names of a message's reasoning


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> tuple[Any, bool]:
  """Return the jinja2 template, and whether it renders content that is a list of parts."""
  from jinja2 import ext, nodes, sandbox

  class Generation(ext.Extension):
    """The tag {% generation %}, which marks an answer for training. Here it is only a scope."""
    tags = {"generation"}
    def parse(self, parser: Any) -> Any:
      line = next(parser.stream).lineno
      return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

  environment = sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
  environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)   # Jinja's own escapes HTML
  environment.globals["raise_exception"] = functools.partial(check, False)
  environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  template = environment.from_string(source)
  try: text = template.render(messages=[{"role": "user", "content": [{"type": "text", "text": END}]}])
  except Exception: text = ""   # not with a list
  return template, END.strip() in text and "type'" not in text and 'type"' not in text


def render(source: str, messages: list[dict[str, Any]], continue_final_message: bool = False, **variables: Any) -> str:
  """Return the prompt of a conversation. variables: the template's. Raises InputError if the template fails."""
  optional("jinja2.sandbox", "hf", "a chat template")
  try:
    template, has_parts = compile_template(source)
    messages = [normalize(message, has_parts) for message in messages]
    if continue_final_message: messages[-1] = open_message(messages[-1])
    text = template.render({"tools": None, "documents": None, **variables}, messages=messages)
    if not continue_final_message: return text
    end = text.rindex(END.strip())
    return text[:end] if text.startswith(END, end) else text[:end].rstrip()   # the template strips spaces
  except Exception as error:   # templates fail in many ways
    raise InputError(f"messages: the chat template failed: {error!r}") from error


def normalize(message: dict[str, Any], has_parts: bool) -> dict[str, Any]:
  """Return a message without null fields, with its reasoning under all names, and with the content that the template
  understands: text, or parts if it iterates over them. An assistant's null content, as in a tool call, becomes ""."""
  message = {key: value for key, value in message.items() if value is not None}
  if message["role"] == "assistant": message = {"content": "", **message}
  reasoning = next((message[name] for name in REASONING if name in message), None)
  if reasoning is not None: message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
  content = message.get("content")
  check(isinstance(content, str | list), f"content={content!r} must be a str or a list of parts")
  if isinstance(content, list):
    texts = [*map(text_of, content)]
    message["content"] = [{"type": "text", "text": text} for text in texts] if has_parts else "\n".join(texts)
  return message


def text_of(part: Any) -> str:
  """Return the text of a part of a message's content."""
  kind = part.get("type") if isinstance(part, dict) else None
  text = part.get(kind if kind in ("refusal", "thinking") else "text") if str(kind).endswith(PARTS) else part
  check(isinstance(text, str), f"content: type {kind!r} is not supported: use parts {{'type': 'text', 'text': '...'}}")
  return text


def open_message(message: dict[str, Any]) -> dict[str, Any]:
  """Return the last message, which the answer continues, with END after its text."""
  content: Any = message.get("content")
  check(content is not None, "continue_final_message: the last message has no content")
  if isinstance(content, str): return {**message, "content": content + END}
  return {**message, "content": [*content[:-1], {**content[-1], "text": content[-1]["text"] + END}]}
