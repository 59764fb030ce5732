"""Text to token ids and back with sentencepiece's tokenizer.model, and the text of a sequence while it is generated.
The extension's huggingface.py reads tokenizer.json and renders chat templates."""
import dataclasses, itertools, pathlib, re
from collections.abc import Callable
from typing import Any, NamedTuple

from sentencepiece import SentencePieceProcessor

from .config import InputError, check, extension, read_json
from .request import Sequence


@dataclasses.dataclass(eq=False)
class Tokenizer:
  """Text to ids and back. Special tokens are encoded and decoded here, everything else by a library."""
  encode_plain: Callable[[str, bool], list[int]]   # (text, add special tokens) -> ids
  decode_plain: Callable[[list[int]], str]
  added_tokens: dict[str, int]  # tokens that are matched as text before the library splits it
  special_ids: set[int]         # those that skip_special_tokens leaves out
  config: dict[str, Any]        # tokenizer_config.json
  library: Any = None           # the tokenizers.Tokenizer or SentencePieceProcessor

  def __post_init__(self) -> None:
    self.config = {k: v.get("content", v) if isinstance(v, dict) else v for k, v in self.config.items()}
    self.added_texts = {i: text for text, i in self.added_tokens.items()}
    bos = self.config.get("add_bos_token") and self.config.get("bos_token")
    self.prefix = [self.added_tokens[bos]] if bos in self.added_tokens else []

  eos_token_id = property(lambda self: self.added_tokens.get(self.config.get("eos_token")))

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text, after a BOS token if the model's files ask for one. Raises InputError for text that is not
    Unicode."""
    try: text = text.encode().decode()
    except UnicodeEncodeError as e: raise InputError(f"prompt: {e}: half of a surrogate pair is no character") from e
    ids = self.encode_plain(text, add_special_tokens and "add_bos_token" not in self.config)
    return self.prefix + ids if add_special_tokens and ids[:1] != self.prefix else ids

  def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
    if self.added_texts.keys().isdisjoint(ids): return self.decode_plain(ids) if ids else ""   # the usual case
    hidden = self.special_ids if skip_special_tokens else ()
    runs = itertools.groupby([i for i in ids if i not in hidden], self.added_texts.get)   # plain ids have no text
    return "".join(self.decode_plain([*run]) if text is None else text * len([*run]) for text, run in runs)

  def apply_chat_template(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
    """Return the conversation as the model was trained to see it; see huggingface.render for the options."""
    return extension("huggingface").render(messages, self.config, **options)


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
  """Read tokenizer.json or tokenizer.model, with tokenizer_config.json and chat_template.jinja if they exist."""
  config = read_json(folder / "tokenizer_config.json")
  config |= {path.stem: path.read_text() for path in folder.glob("chat_template.jinja")}
  if (folder / "tokenizer.json").exists(): return extension("huggingface").load(folder / "tokenizer.json", config)
  check((folder / "tokenizer.model").exists(), f"model: {folder} has no tokenizer.json and no tokenizer.model")
  return wrap_sentencepiece(SentencePieceProcessor(model_file=str(folder / "tokenizer.model")), config)


def wrap_sentencepiece(model: SentencePieceProcessor, config: dict[str, Any]) -> Tokenizer:
  ids = range(model.GetPieceSize())
  tokens: dict[int, Any] = {i: {"content": model.IdToPiece(i), "special": True} for i in ids if model.IsControl(i)}
  tokens |= {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
  added = {token["content"]: i for i, token in tokens.items()}
  splitter = re.compile(f"({'|'.join(map(re.escape, added))})")

  def encode(text: str, special: bool) -> list[int]:
    parts = splitter.split(text)
    return [i for part in parts for i in ([added[part]] if part in added else model.EncodeAsIds(part))]
  def decode(plain: list[int]) -> str: return model.DecodeIds([i for i in plain if i in ids])   # others are padding
  config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **config}
  return Tokenizer(encode, decode, added, {i for i, token in tokens.items() if token["special"]}, config, model)


class Detokenizer:
  """Decodes a sequence incrementally. `text` only grows, half a character is held back, and it equals the decoding of
  all ids at once."""
  def __init__(self, tokenizer: Tokenizer, num_decoded: int, skip_special_tokens: bool):
    self.tokenizer = tokenizer
    self.num_decoded = num_decoded      # ids that were decoded, those of the prompt included
    self.skip_special_tokens = skip_special_tokens
    self.text = ""
    self.context: dict[int, str] = {}   # text of the last ids, by the position of the first: saves a decoding

  def update(self, ids: list[int], finished: bool) -> None:
    """Add the text of the ids after the decoded ones, unless it ends within a character."""
    # The text of a token depends on the tokens before it: on all of them if the last ones have no text, or half of one
    for start in (*self.context, max(0, self.num_decoded - 8), 0):
      before = self.context.get(start) or self._decode(ids[start:self.num_decoded])
      if before and "\ufffd" not in before and self.num_decoded - start < 16: break
    text = self._decode(ids[start:])
    if text.endswith("\ufffd") and not finished: return
    # In one call: a KeyboardInterrupt finds all of it changed, or nothing
    vars(self).update(text=self.text + text[len(before):], num_decoded=len(ids), context={start: text})

  def _decode(self, ids: list[int]) -> str: return self.tokenizer.decode(ids, self.skip_special_tokens)


def find_stop(text: str, start: int, stop: list[str]) -> tuple[int, str] | None:
  """The first stop string in `text` that ends after `start`: its position and itself."""
  matches = [(text.find(s, max(0, start - len(s) + 1)), s) for s in stop]
  return min((match for match in matches if match[0] >= 0), default=None)


def num_held_back(text: str, stop: list[str]) -> int:
  """The number of characters at the end of `text` that could become a stop string."""
  lengths = [n for s in stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])]
  return max(lengths, default=0)


class Cursor(NamedTuple):
  """How much of a sequence a reader has."""
  num_characters: int
  num_tokens: int              # prompt included
  finish_reason: str | None


class TextStream:
  """The text of a sequence up to its stop string, and the cursor of the reader who gets it part by part."""
  def __init__(self, tokenizer: Tokenizer, seq: Sequence):
    self.seq = seq
    self.detokenizer = Detokenizer(tokenizer, seq.num_prompt, seq.params.skip_special_tokens)
    self.num_searched = 0          # characters without a stop string
    self.end: int | None = None    # where a stop string cuts the text
    self.delivered = self.available

  text = property(lambda self: self.detokenizer.text[:self.end])

  @property
  def available(self) -> Cursor:
    """What may be delivered: the end of an unfinished text could still become a stop string."""
    held_back = 0 if self.seq.finish_reason else num_held_back(self.text, self.seq.params.stop or [])
    return Cursor(len(self.text) - held_back, len(self.seq.tokens), self.seq.finish_reason)

  def update(self) -> None:
    """Add the text of new tokens. A stop string ends the text and becomes the sequence's stop_reason."""
    seq = self.seq
    params = seq.params
    hides_last = seq.finish_reason == "stop" and seq.tokens[-1] in seq.stop_ids
    ids = seq.tokens[:-1] if hides_last and not params.include_stop_str_in_output else seq.tokens
    self.detokenizer.update(ids, bool(seq.finish_reason))
    text = self.detokenizer.text
    match = find_stop(text, self.num_searched, params.stop or []) if seq.num_generated > params.min_tokens else None
    if match:
      self.end = match[0] + (len(match[1]) if params.include_stop_str_in_output else 0)
      seq.stop_reason = match[1]
    else: self.num_searched = len(text)
