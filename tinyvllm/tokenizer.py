"""Converts text to token ids and back with sentencepiece's tokenizer.model, and streams the text of a sequence. The
extension's huggingface.py reads tokenizer.json and renders chat templates."""
import pathlib
from typing import Any, NamedTuple

from sentencepiece import SentencePieceProcessor

from .config import InputError, check, read_json
from .request import Sequence


class Tokenizer:
  """Converts text to token ids and back with sentencepiece. Does not parse special tokens in text."""
  def __init__(self, path: pathlib.Path):
    check((path / "tokenizer.model").exists(), f"model: {path} has no tokenizer.model; others need tinyvllm_extra")
    self.model = SentencePieceProcessor(model_file=str(path / "tokenizer.model"))
    self.prefix = [self.model.bos_id()] if read_json(path / "tokenizer_config.json").get("add_bos_token", True) else []

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """Return the text's token ids, with a BOS token first if tokenizer_config.json says so."""
    return [*(self.prefix if add_special_tokens else ()), *self.model.EncodeAsIds(checked_unicode(text))]

  def decode(self, ids: list[int]) -> str:
    """Return the text of token ids, without special tokens."""
    return self.model.DecodeIds([i for i in ids if i < self.model.GetPieceSize()])   # higher ids are padding


def checked_unicode(text: str) -> str:
  """Return the text. Raises InputError for half of a surrogate pair, which is not a character."""
  try: return text.encode().decode()
  except UnicodeEncodeError as e: raise InputError(f"prompt: {e}") from e


def find_stop(text: str, start: int, stop: list[str]) -> tuple[int, str] | None:
  """Return the position and the string of the first stop string in `text` that ends after `start`."""
  matches = [(text.find(s, max(0, start - len(s) + 1)), s) for s in stop]
  return min((match for match in matches if match[0] >= 0), default=None)


def num_held_back(text: str, stop: list[str]) -> int:
  """Return how many characters at the end of `text` could become a stop string."""
  return max((n for s in stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])), default=0)


# The delivered part of a sequence; num_tokens includes the prompt
Cursor = NamedTuple("Cursor", [("num_characters", int), ("num_tokens", int), ("finish_reason", str | None)])


class TextStream:
  """The text of a sequence up to its stop string, decoded incrementally, and the cursor of its delivered part. Text is
  never taken back, incomplete characters are held back, and the complete text equals one decoding of all token ids."""
  def __init__(self, tokenizer: Any, seq: Sequence):
    self.tokenizer, self.seq = tokenizer, seq
    self.stop: Any = seq.params.stop or []   # a list after __post_init__
    self.decoded = ""                    # all text, including text after a stop string
    self.read_offset = seq.num_prompt    # number of token ids whose text is in `decoded`, or in the prompt
    self.prefix_offset = max(0, seq.num_prompt - 8)   # start of the ids that the next text depends on
    self.num_searched = 0                # characters already searched for a stop string
    self.end: int | None = None          # index of the stop string in `decoded`
    self.delivered = self.available

  text = property(lambda self: self.decoded[:self.end])

  @property
  def available(self) -> Cursor:
    """The part that may be delivered. The end of unfinished text is held back while it could become a stop string."""
    held_back = num_held_back(self.text, self.stop) if self.stop and not self.seq.finish_reason else 0
    return Cursor(len(self.text) - held_back, len(self.seq.tokens), self.seq.finish_reason)

  def decode(self, ids: list[int]) -> None:
    """Add the text of the ids that are not decoded yet, unless it ends within a character. A token's text depends on
    the tokens before it: decode both, as vLLM does, from the last ids that had text of their own."""
    before = self.tokenizer.decode(ids[self.prefix_offset:self.read_offset])
    text = self.tokenizer.decode(ids[self.prefix_offset:])
    if len(text) <= len(before) or text.endswith("\ufffd") and not self.seq.finish_reason: return
    # One call, so a KeyboardInterrupt cannot leave it half done
    vars(self).update(decoded=self.decoded + text[len(before):], prefix_offset=self.read_offset, read_offset=len(ids))

  def update(self) -> None:
    """Decode new tokens. A stop string ends the text and becomes the sequence's stop_reason."""
    seq = self.seq
    hides_last = seq.finish_reason == "stop" and seq.tokens[-1] in seq.stop_ids
    self.decode(seq.tokens[:-1] if hides_last and not seq.params.include_stop_str_in_output else seq.tokens)
    is_sought = self.stop and seq.num_generated > seq.params.min_tokens
    if is_sought and (match := find_stop(self.decoded, self.num_searched, self.stop)):
      self.end = match[0] + (len(match[1]) if seq.params.include_stop_str_in_output else 0)
      seq.stop_reason = match[1]
    else: self.num_searched = len(self.decoded)
