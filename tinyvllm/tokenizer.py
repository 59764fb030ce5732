"""Text to token ids and back with sentencepiece's tokenizer.model, and the text of a sequence while it is generated.
The extension's huggingface.py reads tokenizer.json and renders chat templates."""
import pathlib
from typing import Any, NamedTuple

from sentencepiece import SentencePieceProcessor

from .config import InputError, check, extension, read_json
from .request import Sequence


class Tokenizer:
  """Converts text to ids and back with sentencepiece. The extension's tokenizer (huggingface.py) also handles special
  tokens in the text, tokenizer.json and chat templates."""
  def __init__(self, folder: pathlib.Path):
    check((folder / "tokenizer.model").exists(), f"model: {folder} has no tokenizer.model; others need tinyvllm_extra")
    self.model = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    config = read_json(folder / "tokenizer_config.json")
    self.prefix = [self.model.bos_id()] if config.get("add_bos_token", True) else []

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """Return the text's token ids, after a BOS token if tokenizer_config.json asks for one."""
    return [*(self.prefix if add_special_tokens else ()), *self.model.EncodeAsIds(checked_unicode(text))]

  def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
    if not skip_special_tokens: extension("huggingface")   # raises: here special tokens have no text
    return self.model.DecodeIds([i for i in ids if i < self.model.GetPieceSize()])   # higher ids are padding


def checked_unicode(text: str) -> str:
  """The text. Raises InputError for half of a surrogate pair, which is no character."""
  try: return text.encode().decode()
  except UnicodeEncodeError as e: raise InputError(f"prompt: {e}") from e


def find_stop(text: str, start: int, stop: list[str]) -> tuple[int, str] | None:
  """The first stop string in `text` that ends after `start`: its position and itself."""
  matches = [(text.find(s, max(0, start - len(s) + 1)), s) for s in stop]
  return min((match for match in matches if match[0] >= 0), default=None)


def num_held_back(text: str, stop: list[str]) -> int:
  """The number of characters at the end of `text` that could become a stop string."""
  lengths = [n for s in stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])]
  return max(lengths, default=0)


# The part of a sequence that was delivered; num_tokens includes the prompt's
Cursor = NamedTuple("Cursor", [("num_characters", int), ("num_tokens", int), ("finish_reason", str | None)])


class TextStream:
  """The text of a sequence up to its stop string, decoded as its tokens come, and the cursor of the delivered
  part. Decoded text only grows, an incomplete character is held back, and the whole equals one decoding of all ids."""
  def __init__(self, tokenizer: Any, seq: Sequence):
    self.tokenizer, self.seq = tokenizer, seq
    self.stop: Any = seq.params.stop or []   # a list by now
    self.decoded = ""                    # all text, also after a stop string
    self.num_decoded = seq.num_prompt    # ids whose text is in there, or of the prompt
    self.context: dict[int, str] = {}    # text of the last ids, by the position of the first: saves a decoding
    self.num_searched = 0                # characters without a stop string
    self.end: int | None = None          # index in `decoded` of the stop string
    self.delivered = self.available

  text = property(lambda self: self.decoded[:self.end])

  @property
  def available(self) -> Cursor:
    """The part that may be delivered. The end of unfinished text is held back while it could become a stop string."""
    held_back = 0 if self.seq.finish_reason else num_held_back(self.text, self.stop)
    return Cursor(len(self.text) - held_back, len(self.seq.tokens), self.seq.finish_reason)

  def decode(self, ids: list[int]) -> None:
    """Add the text of the ids after the decoded ones, unless it ends within a character."""
    def text_of(part: list[int]) -> str: return self.tokenizer.decode(part, self.seq.params.skip_special_tokens)
    # The text of a token depends on the tokens before it: on all of them if the last ones have no text, or half of one
    for start in (*self.context, max(0, self.num_decoded - 8), 0):
      before = self.context.get(start) or text_of(ids[start:self.num_decoded])
      if before and "\ufffd" not in before and self.num_decoded - start < 16: break
    text = text_of(ids[start:])
    if text.endswith("\ufffd") and not self.seq.finish_reason: return
    # In one call: a KeyboardInterrupt finds all of it changed, or nothing
    vars(self).update(decoded=self.decoded + text[len(before):], num_decoded=len(ids), context={start: text})

  def update(self) -> None:
    """Add the text of new tokens. A stop string ends the text and becomes the sequence's stop_reason."""
    seq, params = self.seq, self.seq.params
    hides_last = seq.finish_reason == "stop" and seq.tokens[-1] in seq.stop_ids
    self.decode(seq.tokens[:-1] if hides_last and not params.include_stop_str_in_output else seq.tokens)
    match = find_stop(self.decoded, self.num_searched, self.stop) if seq.num_generated > params.min_tokens else None
    if match:
      self.end = match[0] + (len(match[1]) if params.include_stop_str_in_output else 0)
      seq.stop_reason = match[1]
    else: self.num_searched = len(self.decoded)
