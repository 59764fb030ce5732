"""Renders conversations with a model's chat template, in the environment that transformers gives to templates
(transformers/utils/chat_template_utils.py)."""
import datetime, functools, json, re
from typing import TYPE_CHECKING

from tinyvllm.config import InputError, JsonObject, check
from tinyvllm_extra.packages import optional

if TYPE_CHECKING: import jinja2

END = "\ue0ff "   # end of a message to continue: a private character, and a space that shows whether spaces are kept
# The tag {% generation %}, which marks an answer for training, is only a scope here
GENERATION = re.compile(r"({%[-+]?\s*(?:end)?)generation\b")
PARTS = ("text", "refusal", "thinking")   # endings of the types of parts with text, such as input_text
REASONING = ("reasoning_content", "thinking", "reasoning")   # names of a message's reasoning


@functools.lru_cache(maxsize=16)
def compile_template(source: str) -> tuple["jinja2.Template", bool]:
  """Return the jinja2 template, and whether it renders content that is a list of parts."""
  from jinja2 import ext, sandbox
  env = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols])
  env.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)   # Jinja's own escapes HTML
  env.globals["raise_exception"] = functools.partial(check, False)
  env.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
  template = env.from_string(GENERATION.sub(r"\1with", source))
  try: text = template.render(messages=[{"role": "user", "content": [{"type": "text", "text": END}]}])
  except Exception: text = ""   # not with a list
  return template, END.strip() in text and "type'" not in text and 'type"' not in text


def render(source: str, messages: list[JsonObject], continue_final_message: bool = False, **variables: object) -> str:
  """Return the prompt of a conversation. variables: the template's. Raises InputError if the template fails."""
  optional("jinja2.sandbox", "hf", "a chat template")
  try:
    template, has_parts = compile_template(source)
    messages = [normalize(message, has_parts) for message in messages]
    if continue_final_message: messages[-1] = normalize(messages[-1], has_parts, END)
    text = template.render({"tools": None, "documents": None, **variables}, messages=messages)
    if not continue_final_message: return text
    end = text.rindex(END.strip())
    return text[:end] if text.startswith(END, end) else text[:end].rstrip()   # the template strips spaces
  except Exception as error:   # templates fail in many ways
    raise InputError(f"messages: the chat template failed: {error!r}") from error


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
  check(isinstance(text, str), f"content: type {name!r} is not supported: use parts {{'type': 'text', 'text': '...'}}")
  return str(text)
