"""Tokenizers with special tokens, from sentencepiece's tokenizer.model or Hugging Face's tokenizer.json (tokenizers),
and chat templates (jinja2)."""
import dataclasses, functools, itertools, math, pathlib, re
from collections.abc import Callable
from typing import Any

from sentencepiece import SentencePieceProcessor

from tinyvllm import tokenizer
from tinyvllm.config import InputError, check, read_json
from tinyvllm_extra.packages import optional


@dataclasses.dataclass(eq=False)
class Tokenizer(tokenizer.Tokenizer):
  """Converts text to ids and back. Decodes added tokens itself; a library handles everything else."""
  encode_plain: Callable[[str, bool], list[int]]   # (text, add special tokens) -> ids
  decode_plain: Callable[[list[int]], str]
  added_tokens: dict[str, int]  # text -> id; matched before the text is split
  special_ids: set[int]         # removed by skip_special_tokens
  config: dict[str, Any]        # tokenizer_config.json
  library: Any = None           # the tokenizers.Tokenizer or SentencePieceProcessor
  max_tokens: float = math.inf       # limit named in the error for a prompt that is too long to encode
  max_characters: float = math.inf   # encode refuses longer prompts

  def __post_init__(self) -> None:
    self.config = {k: v.get("content", v) if isinstance(v, dict) else v for k, v in self.config.items()}
    self.added_texts = {i: text for text, i in self.added_tokens.items()}
    bos = self.config.get("add_bos_token") and self.config.get("bos_token")
    self.prefix = [self.added_tokens[bos]] if bos in self.added_tokens else []

  bos_token_id = property(lambda self: self.added_tokens.get(self.config.get("bos_token")))
  eos_token_id = property(lambda self: self.added_tokens.get(self.config.get("eos_token")))

  def get_vocab(self) -> dict[str, int]:
    """Return all tokens with their ids, as the library spells them."""
    if hasattr(self.library, "get_vocab"): return self.library.get_vocab()
    return {self.library.IdToPiece(i): i for i in range(self.library.GetPieceSize())} | self.added_tokens

  def limit_text(self, max_tokens: int) -> None:
    """Make `encode` refuse prompts too long for `max_tokens` tokens: encoding them could take seconds."""
    self.max_tokens = max_tokens
    self.max_characters = max_tokens * max(map(len, self.get_vocab()))

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    check(len(text) <= self.max_characters, f"This model's maximum context length is {self.max_tokens} tokens, at most "
          f"{self.max_characters} characters. However, the prompt has {len(text)}: shorten it or raise max_model_len")
    ids = self.encode_plain(tokenizer.checked_unicode(text), add_special_tokens and "add_bos_token" not in self.config)
    return self.prefix + ids if add_special_tokens and ids[:1] != self.prefix else ids

  def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
    if self.added_texts.keys().isdisjoint(ids): return self.decode_plain(ids) if ids else ""   # the usual case
    hidden = self.special_ids if skip_special_tokens else ()
    runs = itertools.groupby([i for i in ids if i not in hidden], self.added_texts.get)   # None for plain ids
    return "".join(self.decode_plain([*run]) if text is None else text * len([*run]) for text, run in runs)

  def pieces(self, ids: list[int]) -> list[str]:
    """Return each id's entry in the vocabulary, such as "\u2581the"."""
    name_of: Any = getattr(self.library, "id_to_token", None) or self.library.IdToPiece
    return [self.added_texts.get(i) or name_of(i) for i in ids]

  def apply_chat_template(self, messages: list[dict[str, Any]], /, add_generation_prompt: bool = True,
                          continue_final_message: bool = False, **variables: Any) -> str:
    """Render a conversation with the model's chat template and return the prompt.

    messages: each has a role, and content that is a str or a list of {"type": "text", "text": str}.
    add_generation_prompt: append the start of an answer. continue_final_message: leave the last message open instead,
    for the model to continue. variables: the template's other variables, such as tools, or another chat_template.
    Raises InputError without a template, or if the template fails."""
    variables = self.config | variables
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
    except Exception as error:   # templates fail in many ways
      raise InputError(f"messages: the chat template failed: {error!r}") from error


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
  """Read tokenizer.json or tokenizer.model, with tokenizer_config.json and chat_template.jinja if they exist."""
  config = read_json(folder / "tokenizer_config.json")
  config |= {path.stem: path.read_text() for path in folder.glob("chat_template.jinja")}
  file = folder / "tokenizer.json"
  if file.exists(): return wrap(optional("tokenizers", "hf", "tokenizer.json").Tokenizer.from_file(str(file)), config)
  check((folder / "tokenizer.model").exists(), f"model: {folder} has no tokenizer.json and no tokenizer.model")
  return wrap_sentencepiece(SentencePieceProcessor(model_file=str(folder / "tokenizer.model")), config)


def wrap_sentencepiece(model: SentencePieceProcessor, config: dict[str, Any]) -> Tokenizer:
  ids = range(model.GetPieceSize())
  tokens: dict[int, Any] = {i: {"content": model.IdToPiece(i), "special": True} for i in ids if model.IsControl(i)}
  tokens |= {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
  added = {token["content"]: i for i, token in tokens.items()}
  splitter = re.compile(f"({'|'.join(map(re.escape, added))})")

  def encode(text: str, special: bool) -> list[int]:
    pieces = splitter.split(text)
    return [i for piece in pieces for i in ([added[piece]] if piece in added else model.EncodeAsIds(piece))]
  def decode(plain: list[int]) -> str: return model.DecodeIds([i for i in plain if i in ids])   # higher ids are padding
  config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **config}
  return Tokenizer(encode, decode, added, {i for i, token in tokens.items() if token["special"]}, config, model)


def with_plain_content(message: dict[str, Any]) -> dict[str, Any]:
  """Return a chat message with content of type str: parts are joined by newlines, as in vLLM, an assistant's None
  becomes ""."""
  content = message.get("content")
  if message["role"] == "assistant" and content is None: content = ""   # a tool call
  check(isinstance(content, str | list), f"content={content!r} must be a str or a list of parts")
  return {**message, "content": "\n".join(map(text_of, content)) if isinstance(content, list) else content}


def text_of(part: Any) -> str:
  """Return the text of a part of a message's content."""
  kind = part.get("type") if isinstance(part, dict) else None
  text = part.get(kind.removeprefix("input_")) if kind in ("text", "input_text", "refusal") else part
  check(isinstance(text, str), f"content: type {kind!r} is not supported: use parts {{'type': 'text', 'text': '...'}}")
  return text


def encode(converter: Tokenizer, messages: list[dict[str, Any]], template: dict[str, Any] | None = None,
           **unknown: Any) -> tuple[str, list[int]]:
  """Return a conversation's prompt text and token ids. template: options of Tokenizer.apply_chat_template."""
  check(messages and not unknown, f"prompt: messages={messages!r} must not be empty, and only `template` may be added")
  text = converter.apply_chat_template(messages, **template or {})
  return text, converter.encode(text, False)   # the template adds BOS


def wrap(library: Any, config: dict[str, Any]) -> Tokenizer:
  """Make a Tokenizer from a tokenizers.Tokenizer."""
  special_ids = {token.content: i for i, token in library.get_added_tokens_decoder().items() if token.special}
  def encode(text: str, special: bool) -> list[int]:   # a batch, because other threads run in the meantime
    return library.encode_batch_fast([text], add_special_tokens=special)[0].ids
  return Tokenizer(encode, library.decode, special_ids, set(special_ids.values()), config, library)
