"""Text to token ids and back, with sentencepiece's tokenizer.model, and a text as its tokens come. The extension's
huggingface.py reads Hugging Face's tokenizer.json and chat templates."""
import dataclasses, importlib, itertools, pathlib, re
from collections.abc import Callable
from typing import Any, NamedTuple

from sentencepiece import SentencePieceProcessor

from .config import check, read_json
from .request import Sequence


@dataclasses.dataclass(eq=False)
class Tokenizer:
  """Text to ids and back, for a model."""
  plain_encode: Callable[[str, bool], list[int]]   # of a text, with what the library adds to it or without
  plain_decode: Callable[[list[int]], str]         # of ids that are not named
  named: dict[str, int]         # tokens that stand for a text of their own
  specials: set[int]            # those of them that skip_special_tokens leaves out
  config: dict[str, Any]        # the content of tokenizer_config.json
  library: Any = None           # the tokenizers.Tokenizer or SentencePieceProcessor behind it

  def __post_init__(self) -> None:
    self.config = {k: v.get("content", v) if isinstance(v, dict) else v for k, v in self.config.items()}
    self.texts = {i: text for text, i in self.named.items()}
    bos = self.config.get("add_bos_token") and self.config.get("bos_token")
    self.prefix = [self.named[bos]] if bos in self.named else []

  eos_token_id = property(lambda self: self.named.get(self.config.get("eos_token")))

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """Ids of a text, in which special tokens' texts stand for themselves, behind a BOS if the model's files want it."""
    # Encoded first: half a character is a UnicodeEncodeError, a ValueError
    ids = self.plain_encode(text.encode().decode(), add_special_tokens and "add_bos_token" not in self.config)
    return self.prefix + ids if add_special_tokens and ids[:1] != self.prefix else ids

  def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
    if self.texts.keys().isdisjoint(ids): return self.plain_decode(ids) if ids else ""   # as nearly always
    hidden = self.specials if skip_special_tokens else ()   # the others: plain ids, whose text is None, or named ones
    runs = itertools.groupby([i for i in ids if i not in hidden], self.texts.get)
    return "".join(self.plain_decode([*run]) if text is None else text * len([*run]) for text, run in runs)

  def apply_chat_template(self, messages: list[dict[str, Any]], /, **options: Any) -> str:
    """The conversation as the model was trained to see it: huggingface.render, which says what it takes."""
    return importlib.import_module("tinyvllm_extra.huggingface").render(messages, self.config, **options)


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
  """From tokenizer.json or tokenizer.model, with tokenizer_config.json and chat_template.jinja where they are."""
  config = read_json(folder / "tokenizer_config.json")
  config |= {path.stem: path.read_text() for path in folder.glob("chat_template.jinja")}   # where there is one
  if not (folder / "tokenizer.json").exists(): return _load_sentencepiece(folder / "tokenizer.model", config)
  return importlib.import_module("tinyvllm_extra.huggingface").load(folder / "tokenizer.json", config)


def _load_sentencepiece(path: pathlib.Path, config: dict[str, Any]) -> Tokenizer:
  check(path.exists(), f"{path.parent} has no tokenizer.json and no tokenizer.model")
  model = SentencePieceProcessor(model_file=str(path))
  ids = range(model.GetPieceSize())
  tokens: dict[int, Any] = {i: {"content": model.IdToPiece(i), "special": True} for i in ids if model.IsControl(i)}
  tokens |= {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
  named = {token["content"]: i for i, token in tokens.items()}
  splitter = re.compile(f"({'|'.join(map(re.escape, named))})")

  def encode(text: str, special: bool) -> list[int]:
    return [i for part in splitter.split(text) for i in ([named[part]] if part in named else model.EncodeAsIds(part))]
  def decode(plain: list[int]) -> str: return model.DecodeIds([i for i in plain if i in ids])   # others are padding
  config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **config}
  return Tokenizer(encode, decode, named, {i for i, token in tokens.items() if token["special"]}, config, model)


class Seen(NamedTuple):
  """What a reader has of a text."""
  characters: int
  tokens: int                  # with the prompt's
  finish_reason: str | None    # if its end was told


@dataclasses.dataclass(eq=False)
class TextStream:
  """The text of a sequence as its tokens come. `text[:shown]` may be seen: the rest could still become a stop string.
  Text once there never changes, half a character is held back, and all of it is the decoding at once."""
  tokenizer: Tokenizer
  seq: Sequence
  text: str = ""

  def __post_init__(self) -> None:
    self.num_decoded = self.seq.num_prompt   # tokens whose text is there
    self.known: dict[int, str] = {}          # the text of those from a place on, if it was decoded
    self.seen = self.there

  there = property(lambda self: Seen(self.shown, len(self.seq.tokens), self.seq.finish_reason))   # what may be seen

  @property
  def shown(self) -> int:
    stops = () if self.seq.finish_reason else self.seq.params.stop or ()
    begun = [n for stop in stops for n in range(min(len(stop), len(self.text) + 1)) if self.text.endswith(stop[:n])]
    return len(self.text) - max(begun, default=0)

  def feed(self) -> None:
    """Add the text of new tokens, to the stop string that ends it, if one does, which becomes the stop_reason."""
    seq = self.seq
    params = seq.params
    hidden = seq.finish_reason == "stop" and seq.tokens[-1] in seq.stop_ids and not params.include_stop_str_in_output
    ids = seq.tokens[:-1] if hidden else seq.tokens
    # A text depends on that before: on all if the last have none or half. What is known is used until that is long
    for start in (*self.known, max(0, self.num_decoded - 8), 0):
      before = self.known.get(start) or self.tokenizer.decode(ids[start:self.num_decoded], params.skip_special_tokens)
      if before and "\ufffd" not in before and self.num_decoded - start < 16: break
    text = self.tokenizer.decode(ids[start:], params.skip_special_tokens)
    if text.endswith("\ufffd") and not seq.finish_reason: return   # a character whose bytes have not all come
    searched = len(self.text)
    # Both at once: an interrupt finds both done, or none
    vars(self).update(text=self.text + text[len(before):], num_decoded=len(ids), known={start: text})
    stops = params.stop or [] if seq.num_generated > params.min_tokens else []
    places = [(self.text.find(stop, max(0, searched - len(stop) + 1)), stop) for stop in stops]
    place, stop = min((found for found in places if found[0] >= 0), default=(0, ""))
    if not stop: return
    self.text = self.text[:place + len(stop) if params.include_stop_str_in_output else place]
    seq.stop_reason = stop
