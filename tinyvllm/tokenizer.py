"""Text to token ids and back: sentencepiece's tokenizer.model, Hugging Face's tokenizer.json; chat templates; a text as
its tokens come."""
import functools, importlib, itertools, pathlib, re
from collections.abc import Callable
from typing import Any

from sentencepiece import SentencePieceProcessor

from .config import check, read_json
from .request import Sequence


def optional(name: str, extra: str = "hf") -> Any:
  """A module that an extra of this package brings."""
  try: return importlib.import_module(name)
  except ImportError as e: raise ValueError(f"this needs {name}: pip install 'tinyvllm[{extra}]'") from e


class Tokenizer:
  """named: ids of tokens that stand for a text of their own, and `specials` among them. config: the content of
  tokenizer_config.json. library: the tokenizers.Tokenizer or SentencePieceProcessor behind it."""
  def __init__(self, encode: Callable, decode: Callable, named: dict[str, int], specials: set[int], config: dict,
               library: Any = None):
    self._encode, self._decode = encode, decode
    self.texts = {i: text for text, i in named.items()}
    self.specials = specials
    self.library = library
    self.config = {k: v.get("content", v) if isinstance(v, dict) else v for k, v in config.items()}
    self.bos_token_id, self.eos_token_id = [named.get(self.config.get(f"{kind}_token")) for kind in ("bos", "eos")]
    self.prefix = [self.bos_token_id] if config.get("add_bos_token") and self.bos_token_id is not None else []

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """Ids of a text, in which special tokens' texts stand for themselves, behind a BOS if the model's files want it."""
    text = text.encode().decode()   # half a character is a UnicodeEncodeError, a ValueError
    ids = self._encode(text, add_special_tokens and "add_bos_token" not in self.config)
    return self.prefix + ids if add_special_tokens and ids[:1] != self.prefix else ids

  def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
    if self.texts.keys().isdisjoint(ids): return self._decode(ids)
    if skip_special_tokens: ids = [i for i in ids if i not in self.specials]
    runs = itertools.groupby(ids, self.texts.__contains__)
    return "".join("".join(self.texts[i] for i in run) if named else self._decode(list(run)) for named, run in runs)

  def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The conversation as the model was trained to see it. Raises ValueError without a template, or where it
    refuses."""
    template = self.config.get("chat_template")
    check(template, "tokenizer_config.json has no chat template: use generate")
    env = optional("jinja2.sandbox").ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.globals |= {**self.config, "raise_exception": lambda message: check(False, message)}
    try: return env.from_string(template).render(messages=messages, add_generation_prompt=add_generation_prompt)
    # A template, or what it finds in a message, can fail in many ways
    except Exception as e: raise ValueError(f"the chat template does not take these messages: {e}") from e


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
  """From tokenizer.json or tokenizer.model, with tokenizer_config.json and chat_template.jinja where they are."""
  config, template = read_json(folder / "tokenizer_config.json"), folder / "chat_template.jinja"
  if template.exists(): config["chat_template"] = template.read_text()
  if not (folder / "tokenizer.json").exists(): return _load_sentencepiece(folder / "tokenizer.model", config)
  library = optional("tokenizers").Tokenizer.from_file(str(folder / "tokenizer.json"))
  named = {token.content: i for i, token in library.get_added_tokens_decoder().items() if token.special}
  def encode(text: str, special: bool) -> list[int]: return library.encode(text, add_special_tokens=special).ids
  decode = functools.partial(library.decode, skip_special_tokens=False)
  return Tokenizer(encode, decode, named, set(named.values()), config, library)


def _load_sentencepiece(path: pathlib.Path, config: dict[str, Any]) -> Tokenizer:
  check(path.exists(), f"{path.parent} has no tokenizer.json and no tokenizer.model")
  model = SentencePieceProcessor(model_file=str(path))
  size, added = model.GetPieceSize(), config.get("added_tokens_decoder", {})
  specials = {*filter(model.IsControl, range(size)), *(int(i) for i, token in added.items() if token["special"])}
  named = {model.IdToPiece(i): i for i in specials if i < size} | {t["content"]: int(i) for i, t in added.items()}
  split = re.compile("(" + "|".join(map(re.escape, named)) + ")").split

  def encode(text: str, special: bool) -> list[int]:
    return [i for part in split(text) for i in ([named[part]] if part in named else model.EncodeAsIds(part))]
  def decode(ids: list[int]) -> str: return model.DecodeIds([i for i in ids if i < size])   # ids beyond are padding
  config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **config}
  return Tokenizer(encode, decode, named, specials, config, model)


class TextStream:
  """The text of a sequence as its tokens come. `text[:shown]` may be seen: the rest could still become a stop string.
  Text once there never changes, half a character is held back, and all of it is the decoding at once."""
  def __init__(self, tokenizer: Tokenizer, seq: Sequence):
    self.seq, self.params = seq, seq.params
    self.decode = functools.partial(tokenizer.decode, skip_special_tokens=seq.params.skip_special_tokens)
    self.text = ""
    self.shown = 0
    self.ended = False
    self.num_decoded = seq.num_prompt   # tokens whose text is there
    self.seen = 0, seq.num_prompt       # characters and tokens that the reader has had

  def feed(self) -> str | None:
    """Add the text of new tokens. Returns the stop string that ends it, when one does."""
    if self.ended: return None
    searched, stop, finished = len(self.text), None, self.seq.finish_reason is not None
    self._add(finished)
    stops = {stop: self.text.find(stop, max(0, searched - len(stop) + 1)) for stop in self.params.stop or []}
    found = [(place, stop) for stop, place in stops.items() if place >= 0]
    if found and self.seq.num_generated > self.params.min_tokens:
      place, stop = min(found)
      self.text = self.text[:place + len(stop) if self.params.include_stop_str_in_output else place]
    self.ended = finished or stop is not None
    begun = [n for s in stops for n in range(1, min(len(s), len(self.text) + 1)) if self.text.endswith(s[:n])]
    self.shown = len(self.text) - (0 if self.ended else max(begun, default=0))
    return stop

  def _add(self, finished: bool) -> None:
    ids = self.seq.tokens
    silent = self.seq.finish_reason == "stop" and ids[-1] in self.seq.stop_ids
    if silent and not self.params.include_stop_str_in_output: ids = ids[:-1]
    for start in (max(0, self.num_decoded - 8), 0):   # a text depends on that before: on all if those have none or half
      before = self.decode(ids[start:self.num_decoded])
      if before and "\ufffd" not in before: break
    text = self.decode(ids[start:])
    if text.endswith("\ufffd") and not finished: return   # a character whose bytes have not all come
    self.text += text[len(before):]
    self.num_decoded = len(ids)
