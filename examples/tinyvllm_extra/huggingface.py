"""Files of Hugging Face's layout that need a library: tokenizer.json (tokenizers) and chat templates (jinja2)."""
import functools, pathlib
from typing import Any

from tinyvllm.config import InputError, check
from tinyvllm.engine import LLM
from tinyvllm.request import RequestOutput
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


def encode(tokenizer: Tokenizer, messages: list[dict[str, Any]], template: dict[str, Any] | None = None,
           **unknown: Any) -> tuple[str, list[int]]:
  """The text and the token ids of a conversation. template: options of `render`."""
  check(messages and not unknown, f"prompt: messages={messages!r} must not be empty, and only `template` goes with them")
  text = tokenizer.apply_chat_template(messages, **template or {})
  return text, tokenizer.encode(text, False)   # the template adds BOS


def chat(llm: LLM, messages: list[dict[str, Any]] | list[list[dict[str, Any]]], sampling_params: Any = None,
         use_tqdm: bool = True, chat_template_kwargs: dict[str, Any] | None = None,
         **template: Any) -> list[RequestOutput]:
  """Answer a conversation, a list of {"role": ..., "content": ...}, or several, through the model's chat template.
  template, chat_template_kwargs: options of `render`."""
  chats: Any = messages if messages and isinstance(messages[0], list) else [messages]
  template |= chat_template_kwargs or {}
  return llm.generate([{"messages": messages, "template": template} for messages in chats], sampling_params, use_tqdm)


def load(path: pathlib.Path, config: dict[str, Any]) -> Tokenizer:
  """Read tokenizer.json. config: the content of tokenizer_config.json."""
  return wrap(optional("tokenizers", "hf", "tokenizer.json").Tokenizer.from_file(str(path)), config)


def wrap(library: Any, config: dict[str, Any]) -> Tokenizer:
  """Make a Tokenizer from a tokenizers.Tokenizer."""
  named = {token.content: i for i, token in library.get_added_tokens_decoder().items() if token.special}
  return Tokenizer(lambda text, special: library.encode(text, add_special_tokens=special).ids, library.decode, named,
                   set(named.values()), config, library)
