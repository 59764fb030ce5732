"""What models in Hugging Face's layout come with that takes a library of theirs: tokenizer.json, chat templates."""
import functools, importlib, pathlib
from typing import Any

from tinyvllm.config import check
from tinyvllm.engine import LLM
from tinyvllm.request import RequestOutput
from tinyvllm.tokenizer import Tokenizer


def optional(name: str, extra: str = "hf") -> Any:
  """A module that an extra of this package brings."""
  try: return importlib.import_module(name)
  except ImportError as e: raise ValueError(f"this needs {name}: pip install 'tinyvllm[{extra}]'") from e


def plain(message: dict[str, Any]) -> dict[str, Any]:
  """A chat's message whose content is a text, of the parts that it may have come in."""
  content = message.get("content")
  if message["role"] == "assistant" and content is None: content = ""   # it called a tool
  check(isinstance(content, str | list), f"content={content!r} must be a str or a list of parts")
  parts: Any = content if isinstance(content, list) else [{"type": "text", "text": content}]
  others = {part["type"] for part in parts} - {"text"}
  check(not others, f"content: parts of type {', '.join(map(str, others))} are not supported, only text")
  return {**message, "content": "".join(part["text"] for part in parts)}


def render(messages: list[dict[str, Any]], config: dict[str, Any], /, add_generation_prompt: bool = True,
           continue_final_message: bool = False, **variables: Any) -> str:
  """The conversation as the model was trained to see it. messages: each a role and a content, which is a str or a list
  of {"type": "text", "text": str}. config: of the tokenizer. add_generation_prompt: an answer begins behind it, unless
  continue_final_message: the last message goes on. variables: more of the template's, such as tools, or another
  chat_template. Raises ValueError without a template, or where it refuses."""
  variables = config | variables
  check(variables.get("chat_template"), "tokenizer_config.json has no chat template: use generate")
  env = optional("jinja2.sandbox").ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
  try:
    messages = [*map(plain, messages)]
    text = env.from_string(variables["chat_template"]).render(
      variables, messages=messages, add_generation_prompt=add_generation_prompt and not continue_final_message,
      raise_exception=functools.partial(check, False))
    if not continue_final_message: return text
    last = messages[-1]["content"].strip()
    return text[:text.rindex(last) + len(last)]
  # A template, or what it finds in a message, can fail in many ways
  except Exception as e: raise ValueError(f"messages: the chat template does not take them: {e!r}") from e


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
  return wrap(optional("tokenizers").Tokenizer.from_file(str(path)), config)


def wrap(library: Any, config: dict[str, Any]) -> Tokenizer:
  """Make a Tokenizer from a tokenizers.Tokenizer."""
  named = {token.content: i for i, token in library.get_added_tokens_decoder().items() if token.special}
  return Tokenizer(lambda text, special: library.encode(text, add_special_tokens=special).ids, library.decode, named,
                   set(named.values()), config, library)
