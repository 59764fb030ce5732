"""Tokenizers with special tokens, from sentencepiece's tokenizer.model or Hugging Face's tokenizer.json (tokenizers),
and chat templates (jinja2)."""
import dataclasses, itertools, math, pathlib, re, typing
from collections.abc import Callable

from sentencepiece import SentencePieceProcessor

from tinyvllm import tokenizer
from tinyvllm.config import InputError, JsonObject, check, read_json
from tinyvllm_extra.options import optional

from .chat_template import END, INSTRUCTIONS, adapt, compile_template, forms, normalize, plain_text

if typing.TYPE_CHECKING: import tokenizers

BYTE = re.compile("<0x[0-9A-F]{2}>")   # a byte in vocabularies with byte fallback
# In byte-level vocabularies, the characters from 256 on that stand for bytes without a glyph in Latin-1; the others
# stand for their own byte (GPT-2's bytes_to_unicode)
BYTE_LEVEL = {256 + n: i for n, i in enumerate([*range(33), *range(127, 161), 173])}


@dataclasses.dataclass(eq=False)
class ChatTokenizer(tokenizer.Tokenizer):
  """Converts text to ids and back. Decodes added tokens itself; a library handles everything else."""
  encode_plain: Callable[[str, bool], list[int]]   # (text, add special tokens) -> ids
  decode_plain: Callable[[list[int]], str]
  get_vocab: Callable[[], dict[str, int]]   # returns all tokens with their ids, as the library spells them
  piece_of: Callable[[int], str | None]     # id -> entry in the vocabulary
  added_tokens: dict[str, int]  # text -> id; matched before the text is split
  special_ids: set[int]         # removed by skip_special_tokens
  config: JsonObject            # tokenizer_config.json
  library: "tokenizers.Tokenizer | SentencePieceProcessor"
  template_variables: JsonObject = dataclasses.field(default_factory=dict)   # for all conversations
  max_tokens: float = math.inf   # encode refuses prompts that must have more: encoding them could take seconds

  def __post_init__(self) -> None:
    self.config = {k: v.get("content", v) if isinstance(v, dict) else v for k, v in self.config.items()}
    found = self.config.get("chat_template") or {}
    if isinstance(found, list): found = {x["name"]: x["template"] for x in found}
    self.templates: dict[str, str] = {"default": found} if isinstance(found, str) else found   # chat templates by name
    self.added_texts = {i: text for text, i in self.added_tokens.items()}
    self.longest = max(map(len, self.get_vocab()))   # characters of a token
    self.prefix = [self.bos_token_id] if self.config.get("add_bos_token") and self.bos_token_id is not None else []

  bos_token_id = property(lambda self: self.added_tokens.get(self.config.get("bos_token")))
  eos_token_id = property(lambda self: self.added_tokens.get(self.config.get("eos_token")))
  max_characters = property(lambda self: self.max_tokens * self.longest)

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
    return [self.added_texts.get(i) or self.piece_of(i) or "" for i in ids]

  def template(self, has_tools: bool, source: str | None = None) -> str | None:
    """Return the chat template named `source`, or `source` itself. None: the model's default template, or the one named
    "tool_use" for tools."""
    names = [source] if source else ["tool_use", "default"] if has_tools else ["default"]
    return next((self.templates[name] for name in names if name in self.templates), source)

  def token_bytes(self, i: int) -> bytes:
    """Return the bytes of a token that may be a part of a character."""
    text, piece = self.decode([i], False), self.pieces([i])[0]
    if "\ufffd" not in text: return (piece.replace("\u2581", " ") if "\u2581" in piece else text).encode()
    if BYTE.fullmatch(piece): return bytes.fromhex(piece[3:-1])
    return piece.translate(BYTE_LEVEL).encode("latin-1", "replace")

  def apply_chat_template(self, messages: list[JsonObject], /, add_generation_prompt: bool = True,
                          continue_final_message: bool = False, **variables: typing.Any) -> str:
    """Render a conversation with the model's chat template and return the prompt.

    messages: each has a role, and content that is a str or a list of {"type": "text", "text": str}; see chat_template.
    add_generation_prompt: append the start of an answer. continue_final_message: leave the last message open instead,
    for the model to continue. variables: the template's other variables, such as tools, or another chat_template.
    Raises InputError without a template, or if the template fails."""
    source = self.template(bool(variables.get("tools")), variables.pop("chat_template", None)) or ""
    check(source, "tokenizer_config.json has no chat template: use generate")
    tokens = {k: v for k, v in self.config.items() if k.endswith("_token") and isinstance(v, str)}
    variables = {"tools": None, "documents": None, **tokens, **self.template_variables, **variables}
    variables["add_generation_prompt"] = add_generation_prompt and not continue_final_message
    optional("jinja2.sandbox", "hf", "a chat template")
    try:
      render, has_parts = compile_template(source)
      messages = [normalize(message, has_parts) for message in messages]
      if continue_final_message: messages[-1] = normalize(messages[-1], has_parts, END)
      text = render(variables, messages=messages)
      if not continue_final_message: return text
      end = text.rindex(END.strip())
      return text[:end] if text.startswith(END, end) else text[:end].rstrip()   # the template strips spaces
    except Exception as error:   # templates fail in many ways
      raise InputError(f"messages: the chat template failed: {error!r}") from error

  def render_conversation(self, messages: list[JsonObject], **options: typing.Any) -> str:
    """Like apply_chat_template, but in a form of the conversation that the template accepts. Raises InputError if it
    fails for all forms, or would leave out an instruction."""
    check(all(isinstance(x, dict) for x in messages), "messages: each message must be an object with role and content")
    source = self.template(bool(options.get("tools")), options.get("chat_template")) or ""
    later = [plain_text(x).strip() for x in messages[1:] if x.get("role") in INSTRUCTIONS]
    errors = []
    for form in forms([adapt(message, source) for message in messages]):
      try:
        text = self.apply_chat_template(form, **options)
        for x in later: check(x in text, f"messages: the chat template leaves out the instruction {x[:100]!r}")
        return text
      except InputError as e: errors.append(e)
    raise errors[0]   # there is at least one form

  def encode_chat(self, messages: list[JsonObject], template: JsonObject | None = None,
                  **unknown: object) -> tuple[str, list[int]]:
    """Return a conversation's prompt text and token ids. template: options of `apply_chat_template`."""
    is_list = isinstance(messages, list) and messages
    check(is_list, f"messages={messages!r} must be [{{'role': 'user', 'content': str}}]")
    check(not unknown, f"prompt: {', '.join(unknown)}: only messages and template are allowed together")
    text = self.render_conversation(messages, **template or {})
    return text, self.encode(text, False)   # the template adds BOS


def load_tokenizer(folder: pathlib.Path) -> ChatTokenizer:
  """Read tokenizer.json or tokenizer.model, with tokenizer_config.json and chat_template.jinja if they exist."""
  config = read_config(folder)
  file = folder / "tokenizer.json"
  if file.exists(): return wrap(optional("tokenizers", "hf", "tokenizer.json").Tokenizer.from_file(str(file)), config)
  check((folder / "tokenizer.model").exists(), f"model: {folder} has no tokenizer.json and no tokenizer.model")
  return wrap_sentencepiece(SentencePieceProcessor(model_file=str(folder / "tokenizer.model")), config)


def read_config(folder: pathlib.Path) -> JsonObject:
  """Return tokenizer_config.json with the special tokens and chat templates of other files, as transformers does."""
  config = read_json(folder / "tokenizer_config.json")
  special = read_json(folder / "special_tokens_map.json")
  config = {**special, **config} if "added_tokens_decoder" in config else {**config, **special}
  config = {**read_json(folder / "chat_template.json"), **config}   # {"chat_template": text} of a processor
  paths = [*folder.glob("additional_chat_templates/*.jinja"), *folder.glob("chat_template.jinja")]
  files = {path.stem.replace("chat_template", "default"): path.read_text() for path in paths}
  return {**config, "chat_template": files} if files else config


def wrap_sentencepiece(model: SentencePieceProcessor, config: JsonObject) -> ChatTokenizer:
  ids = range(model.GetPieceSize())
  tokens = {i: JsonObject(content=model.IdToPiece(i), special=True) for i in ids if model.IsControl(i)}
  tokens |= {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
  added = {token["content"]: i for i, token in tokens.items()}
  splitter = re.compile(f"({'|'.join(map(re.escape, sorted(added, key=len, reverse=True)))})")   # the longest first

  def encode(text: str, special: bool) -> list[int]:
    pieces = splitter.split(text)
    return [i for piece in pieces for i in ([added[piece]] if piece in added else model.EncodeAsIds(piece))]
  def decode(plain: list[int]) -> str: return model.DecodeIds([i for i in plain if i in ids])   # higher ids are padding
  def get_vocab() -> dict[str, int]: return {model.IdToPiece(i): i for i in ids} | added
  config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **config}
  special_ids = {i for i, token in tokens.items() if token["special"]}
  return ChatTokenizer(encode, decode, get_vocab, model.IdToPiece, added, special_ids, config, model)


def wrap(model: "tokenizers.Tokenizer", config: JsonObject) -> ChatTokenizer:
  """Make a ChatTokenizer from a tokenizers.Tokenizer, with the tokens that only tokenizer_config.json adds."""
  known = {token.content for token in model.get_added_tokens_decoder().values()}
  tokens = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
  model.add_tokens([optional("tokenizers", "hf", "tokenizer.json").AddedToken(**token)
                    for _, token in tokens if token["content"] not in known])
  ids = {token.content: i for i, token in model.get_added_tokens_decoder().items() if token.special}
  def encode(text: str, special: bool) -> list[int]:   # a batch, because other threads run in the meantime
    return model.encode_batch_fast([text], add_special_tokens=special)[0].ids
  return ChatTokenizer(encode, model.decode, model.get_vocab, model.id_to_token, ids, {*ids.values()}, config, model)
