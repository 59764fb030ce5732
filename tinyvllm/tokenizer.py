"""Text to token ids and back with sentencepiece's tokenizer.model, and the text of a sequence while it is generated.
The extension's huggingface.py reads tokenizer.json and renders chat templates."""
import pathlib
from typing import Any, NamedTuple

from sentencepiece import SentencePieceProcessor

from .config import InputError, check, extension, has_extension, read_json
from .request import Sequence


class Tokenizer:
  """Text to ids and back with sentencepiece. The extension's (huggingface.py) also knows special tokens within a text,
  tokenizer.json and chat templates."""
  def __init__(self, folder: pathlib.Path):
    check((folder / "tokenizer.model").exists(), f"model: {folder} has no tokenizer.model")
    self.model = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    has_bos = read_json(folder / "tokenizer_config.json").get("add_bos_token", True)
    self.prefix = [self.model.bos_id()] if has_bos else []

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text, after a BOS token if the model's files ask for one."""
    return [*(self.prefix if add_special_tokens else ()), *self.model.EncodeAsIds(checked_unicode(text))]

  def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
    if not skip_special_tokens: extension("huggingface")   # raises: here special tokens have no text
    return self.model.DecodeIds([i for i in ids if i < self.model.GetPieceSize()])   # higher ids are padding


def checked_unicode(text: str) -> str:
  """The text. Raises InputError for half of a surrogate pair, which is no character."""
  try: return text.encode().decode()
  except UnicodeEncodeError as e: raise InputError(f"prompt: {e}") from e


def load_tokenizer(folder: pathlib.Path) -> Any:
  return extension("huggingface").load_tokenizer(folder) if has_extension() else Tokenizer(folder)


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


# How much of a sequence a reader has; num_tokens includes the prompt's
Cursor = NamedTuple("Cursor", [("num_characters", int), ("num_tokens", int), ("finish_reason", str | None)])


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
