"""Files of Hugging Face's layout that need a library: tokenizer.json (tokenizers) and chat templates (jinja2)."""
import functools, pathlib
from typing import Any

from tinyvllm.config import InputError, check
from tinyvllm.tokenizer import Tokenizer
from tinyvllm_extra.packages import optional


def with_plain_content(message: dict[str, Any]) -> dict[str, Any]:
  """Return a chat message whose content is a str: text parts are joined, an assistant's None becomes ""."""
  content = message.get("content")
  if message["role"] == "assistant" and content is None: content = ""   # it called a tool
  check(isinstance(content, str | list), f"content={content!r} must be a str or a list of parts")
  parts: Any = content if isinstance(content, list) else [{"type": "text", "text": content}]
  others = {part["type"] for part in parts} - {"text"}
  check(not others, f"content: parts of type {', '.join(map(str, others))} are not supported, only text")
  return {**message, "content": "".join(part["text"] for part in parts)}


def render(messages: list[dict[str, Any]], config: dict[str, Any], /, add_generation_prompt: bool = True,
           continue_final_message: bool = False, **variables: Any) -> str:
  """Return the prompt text of a conversation, by the model's chat template.

  messages: each has a role, and content that is a str or a list of {"type": "text", "text": str}. config: the content
  of tokenizer_config.json. add_generation_prompt: append the start of an answer. continue_final_message: end within the
  last message instead, so that it is continued. variables: the template's other variables, such as tools, or another
  chat_template. Raises InputError without a template, or if the template fails."""
  variables = config | variables
  check(variables.get("chat_template"), "tokenizer_config.json has no chat template: use generate")
  sandbox = optional("jinja2.sandbox", "hf", "a chat template")
  environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
  try:
    messages = [*map(with_plain_content, messages)]
    text = environment.from_string(variables["chat_template"]).render(
      variables, messages=messages, add_generation_prompt=add_generation_prompt and not continue_final_message,
      raise_exception=functools.partial(check, False))
    if not continue_final_message: return text
    last = messages[-1]["content"].strip()
    return text[:text.rindex(last) + len(last)]
  except Exception as error:   # a template can fail in many ways on the messages it gets
    raise InputError(f"messages: the chat template does not take them: {error!r}") from error


def load(path: pathlib.Path, config: dict[str, Any]) -> Tokenizer:
  """Load tokenizer.json. config: the content of tokenizer_config.json."""
  library = optional("tokenizers", "hf", "tokenizer.json").Tokenizer.from_file(str(path))
  named = {token.content: i for i, token in library.get_added_tokens_decoder().items() if token.special}
  return Tokenizer(lambda text, special: library.encode(text, add_special_tokens=special).ids, library.decode, named,
                   set(named.values()), config, library)
