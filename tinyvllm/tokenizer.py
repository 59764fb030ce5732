"""Text to token ids and back: sentencepiece's tokenizer.model, Hugging Face's tokenizer.json; chat templates."""
import functools, importlib, itertools, json, pathlib, re
from typing import Any, cast

from sentencepiece import SentencePieceProcessor

from .config import check, read_json
from .scheduler import StructuredOutputsParams


class Tokenizer:
  """encode(text, add_special_tokens) -> ids and decode(ids) -> text, the ids of tokens that stand for a text of their
  own and which of these are special, tokenizer_config.json's content, and tokenizer.json's or the tokens' bytes."""
  def __init__(self, encode: Any, decode: Any, named: dict[str, int], specials: set[int], config: dict, tokens: Any):
    self.tokens, self.special_token_ids, self._guide = tokens, list(specials), cast(Any, None)
    self._encode, self._decode, self.specials, self.texts = encode, decode, specials, {i: t for t, i in named.items()}
    self.config = {k: v.get("content", v) if isinstance(v, dict) else v for k, v in config.items()}
    self.prefix = [named[bos]] if config.get("add_bos_token") and (bos := self.config.get("bos_token")) in named else []

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """Ids of a text, in which special tokens' texts stand for themselves, behind a BOS if the model's files want it."""
    # Half a character is a UnicodeEncodeError, a ValueError
    ids = self._encode(text.encode().decode(), add_special_tokens and "add_bos_token" not in self.config)
    return self.prefix + ids if add_special_tokens and ids[:1] != self.prefix else ids

  def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
    if self.texts.keys().isdisjoint(ids): return self._decode(ids)
    ids = [i for i in ids if not (skip_special_tokens and i in self.specials)]
    return "".join("".join(self.texts[i] for i in run) if named else self._decode(list(run))
                   for named, run in itertools.groupby(ids, self.texts.__contains__))

  def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The conversation as the model was trained to see it. Raises ValueError without a template, or where it
    refuses."""
    check(template := self.config.get("chat_template"), "tokenizer_config.json has no chat template: use generate")
    env = optional("jinja2.sandbox").ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.globals |= {**self.config, "raise_exception": lambda m: check(False, m)}
    try: return env.from_string(template).render(messages=messages, add_generation_prompt=add_generation_prompt)
    # A template, or what it finds in a message, can fail in many ways
    except Exception as e: raise ValueError(f"the chat template does not take these messages: {e}") from e

  # What llguidance asks of a vocabulary. It forces text that has no choice, which sentencepiece begins with a space
  is_tokenizer_wrapper, bos_token_id, eos_token_id = True, None, 0
  def __call__(self, text: str) -> list[int]: return self._guide.greedy_tokenize(text)

  def matcher(self, params: StructuredOutputsParams, vocab_size: int, eos: tuple[int, ...]) -> Any:
    """What follows a text, token by token, and knows which may come next: an llguidance.LLMatcher. Raises ValueError
    for a schema, expression or grammar that it does not take."""
    (kind, value), = vars(params).items()
    text = value if isinstance(value, str) else json.dumps({"type": "object"} if kind == "json_object" else value)
    library, vocabulary = optional("llguidance", "grammar"), self.tokens if isinstance(self.tokens, str) else self
    self._guide = self._guide or library.LLTokenizer(vocabulary, vocab_size, list(eos))
    try: matcher = library.LLMatcher(self._guide, library.grammar_from(kind.removesuffix("_object"), text), log_level=0)
    except ValueError as e: raise ValueError(f"structured_outputs: {kind}: {e}") from e
    check(not matcher.is_error(), f"structured_outputs: {kind}: {' '.join(matcher.get_error().split())}")
    return matcher


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
  """From tokenizer.json or tokenizer.model, with tokenizer_config.json and chat_template.jinja where they are."""
  config = read_json(folder / "tokenizer_config.json")
  if (path := folder / "chat_template.jinja").exists(): config["chat_template"] = path.read_text()
  if (path := folder / "tokenizer.json").exists():
    library = optional("tokenizers").Tokenizer.from_file(str(path))
    named = {t.content: i for i, t in library.get_added_tokens_decoder().items() if t.special}
    decode = functools.partial(library.decode, skip_special_tokens=False)
    return Tokenizer(lambda text, special: library.encode(text, add_special_tokens=special).ids, decode, named,
                     set(named.values()), config, library.to_str())
  check((path := folder / "tokenizer.model").exists(), f"{folder} has no tokenizer.json and no tokenizer.model")
  model = SentencePieceProcessor(model_file=str(path))
  added, size = config.get("added_tokens_decoder", {}), model.GetPieceSize()
  specials = {*filter(model.IsControl, range(size)), *(int(i) for i, token in added.items() if token["special"])}
  named = {model.IdToPiece(i): i for i in specials if i < size} | {t["content"]: int(i) for i, t in added.items()}
  split = re.compile("(" + "|".join(map(re.escape, named)) + ")").split

  def encode(text: str, add_special_tokens: bool) -> list[int]:
    return [i for part in split(text) for i in ([named[part]] if part in named else model.EncodeAsIds(part))]
  config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **config}
  pieces = [("" if model.IsUnknown(i) else model.IdToPiece(i), model.IsByte(i)) for i in range(size)]
  tokens = [bytes([int(p[1:-1], 16)]) if byte else p.replace("\u2581", " ").encode() for p, byte in pieces]
  # Ids beyond its size are padding
  return Tokenizer(encode, lambda ids: model.DecodeIds([i for i in ids if i < size]), named, specials, config, tokens)


def optional(name: str, extra: str = "hf") -> Any:
  try: return importlib.import_module(name)
  except ImportError as e: raise ValueError(f"this needs {name}: pip install 'tinyvllm[{extra}]'") from e
