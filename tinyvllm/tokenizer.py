"""Text to token ids and back: sentencepiece's tokenizer.model, Hugging Face's tokenizer.json; chat templates; a text as
its tokens come."""
import functools, importlib, itertools, pathlib, re
from typing import Any

from sentencepiece import SentencePieceProcessor

from .config import check, read_json
from .request import SamplingParams


def optional(name: str, extra: str = "hf") -> Any:
  """A module that an extra of this package brings."""
  try: return importlib.import_module(name)
  except ImportError as e: raise ValueError(f"this needs {name}: pip install 'tinyvllm[{extra}]'") from e


class Tokenizer:
  """named: ids of tokens that stand for a text of their own, and `specials` among them. config: the content of
  tokenizer_config.json. vocabulary: each token's bytes, or the text of tokenizer.json."""
  def __init__(self, encode: Any, decode: Any, named: dict[str, int], specials: set[int], config: dict,
               vocabulary: str | list[bytes]):
    self._encode = encode
    self._decode = decode
    self.texts = {i: text for text, i in named.items()}
    self.specials = specials
    self.vocabulary = vocabulary
    self.config = {k: v.get("content", v) if isinstance(v, dict) else v for k, v in config.items()}
    bos = self.config.get("bos_token")
    self.eos_token_id = named.get(self.config.get("eos_token", ""))
    self.prefix = [named[bos]] if config.get("add_bos_token") and bos in named else []

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
  config = read_json(folder / "tokenizer_config.json")
  template = folder / "chat_template.jinja"
  if template.exists(): config["chat_template"] = template.read_text()
  if (folder / "tokenizer.json").exists(): return _load_json(folder / "tokenizer.json", config)
  check((folder / "tokenizer.model").exists(), f"{folder} has no tokenizer.json and no tokenizer.model")
  return _load_sentencepiece(folder / "tokenizer.model", config)


def _load_json(path: pathlib.Path, config: dict[str, Any]) -> Tokenizer:
  library = optional("tokenizers").Tokenizer.from_file(str(path))
  named = {token.content: i for i, token in library.get_added_tokens_decoder().items() if token.special}
  def encode(text: str, special: bool) -> list[int]: return library.encode(text, add_special_tokens=special).ids
  decode = functools.partial(library.decode, skip_special_tokens=False)
  return Tokenizer(encode, decode, named, set(named.values()), config, library.to_str())


def _load_sentencepiece(path: pathlib.Path, config: dict[str, Any]) -> Tokenizer:
  model = SentencePieceProcessor(model_file=str(path))
  size = model.GetPieceSize()
  added = {int(i): token for i, token in config.get("added_tokens_decoder", {}).items()}
  specials = {*filter(model.IsControl, range(size)), *(i for i, token in added.items() if token["special"])}
  named = {model.IdToPiece(i): i for i in specials if i < size} | {token["content"]: i for i, token in added.items()}
  split = re.compile("(" + "|".join(map(re.escape, named)) + ")").split

  def encode(text: str, special: bool) -> list[int]:
    return [i for part in split(text) for i in ([named[part]] if part in named else model.EncodeAsIds(part))]
  def decode(ids: list[int]) -> str: return model.DecodeIds([i for i in ids if i < size])   # ids beyond are padding
  def spelling(i: int) -> bytes:
    if model.IsByte(i): return bytes([int(model.IdToPiece(i)[1:-1], 16)])   # <0x0A>
    return b"" if model.IsUnknown(i) else model.IdToPiece(i).replace("\u2581", " ").encode()
  config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **config}
  return Tokenizer(encode, decode, named, specials, config, [spelling(i) for i in range(size)])


class TextStream:
  """The text behind a prompt as its tokens come. `text[:shown]` may be seen: the rest could still become a stop string.
  Text once there never changes, half a character is held back, and all of it is the decoding at once."""
  def __init__(self, tokenizer: Tokenizer, params: SamplingParams, num_prompt: int):
    self.tokenizer = tokenizer
    self.params = params
    self.num_prompt = num_prompt
    self.num_decoded = num_prompt   # tokens whose text is there
    self.text = ""
    self.shown = 0
    self.ended = False

  def feed(self, ids: list[int], finished: bool) -> str | None:
    """Add the text of new tokens, ids being all with the prompt's. Returns the stop string that ends the text, if one
    does."""
    if self.ended: return None
    searched = len(self.text)
    self._decode(ids, finished)
    stop = self._find_stop(searched) if len(ids) - self.num_prompt > self.params.min_tokens else None
    self.ended = finished or stop is not None
    self.shown = len(self.text) - (0 if self.ended else self._held())
    return stop

  def _decode(self, ids: list[int], finished: bool) -> None:
    for start in (max(0, self.num_decoded - 8), 0):   # a text depends on that before: on all if those have none or half
      before = self.tokenizer.decode(ids[start:self.num_decoded], self.params.skip_special_tokens)
      if before and "\ufffd" not in before: break
    text = self.tokenizer.decode(ids[start:], self.params.skip_special_tokens)
    if text.endswith("\ufffd") and not finished: return   # a character whose bytes have not all come
    self.text += text[len(before):]
    self.num_decoded = len(ids)

  def _find_stop(self, searched: int) -> str | None:
    places = {stop: self.text.find(stop, max(0, searched - len(stop) + 1)) for stop in self.params.stop or []}
    found = [(place, stop) for stop, place in places.items() if place >= 0]
    if not found: return None
    place, stop = min(found)
    self.text = self.text[:place + len(stop) if self.params.include_stop_str_in_output else place]
    return stop

  def _held(self) -> int:
    """How many characters at the end begin a stop string."""
    lengths = [n for stop in self.params.stop or [] for n in range(1, min(len(stop), len(self.text) + 1))
               if self.text.endswith(stop[:n])]
    return max(lengths, default=0)
