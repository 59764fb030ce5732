"""Text to token ids and back: sentencepiece's tokenizer.model, Hugging Face's tokenizer.json; chat templates."""
import importlib, itertools, pathlib, re
from collections.abc import Callable
from typing import Any

from sentencepiece import SentencePieceProcessor

from .config import check, read_json


class Tokenizer:
  """encode(text, add_special_tokens) and decode(ids), the ids of tokens that stand for a text of their own and which of
  these are special, and tokenizer_config.json's content."""
  def __init__(self, encode: Callable[[str, bool], list[int]], decode: Callable[[list[int]], str],
               named: dict[str, int], specials: set[int], config: dict[str, Any]):
    self._encode, self._decode, self.specials, self.texts = encode, decode, specials, {i: t for t, i in named.items()}
    self.config = {k: v.get("content", v) if isinstance(v, dict) else v for k, v in config.items()}
    self.prefix = [named[bos]] if config.get("add_bos_token") and (bos := self.config.get("bos_token")) in named else []

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """Ids of a text, in which special tokens' texts stand for themselves, behind a BOS if the model's files want
    one."""
    ids = self._encode(text, add_special_tokens and "add_bos_token" not in self.config)
    return self.prefix + ids if add_special_tokens and ids[:1] != self.prefix else ids

  def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
    if self.texts.keys().isdisjoint(ids): return self._decode(ids)
    ids = [i for i in ids if not (skip_special_tokens and i in self.specials)]
    return "".join("".join(self.texts[i] for i in run) if named else self._decode(list(run))
                   for named, run in itertools.groupby(ids, self.texts.__contains__))

  def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The conversation as the model was trained to see it. Raises ValueError without a template, or where it
    refuses."""
    template = self.config.get("chat_template") or ""
    check(template, "the model has no chat template (chat_template in tokenizer_config.json): use generate")
    env = _library("jinja2.sandbox").ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.globals |= {**self.config, "raise_exception": lambda m: check(False, m)}
    try: return env.from_string(template).render(messages=messages, add_generation_prompt=add_generation_prompt)
    # A template, or what it finds in a message, can fail in many ways
    except Exception as e: raise ValueError(f"the chat template does not take these messages: {e}") from e


def load_tokenizer(folder: pathlib.Path) -> Tokenizer:
  """From tokenizer.json or tokenizer.model, with tokenizer_config.json and chat_template.jinja where they are."""
  config = read_json(folder / "tokenizer_config.json")
  if (path := folder / "chat_template.jinja").exists(): config["chat_template"] = path.read_text()
  if (path := folder / "tokenizer.json").exists():
    return _from_library(_library("tokenizers").Tokenizer.from_file(str(path)), config)
  path = folder / "tokenizer.model"
  check(path.exists(), f"{folder} has no tokenizer: neither tokenizer.json nor tokenizer.model")
  model = SentencePieceProcessor(model_file=str(path))
  added, size = config.get("added_tokens_decoder", {}), model.GetPieceSize()
  specials = {*filter(model.IsControl, range(size)), *(int(i) for i, token in added.items() if token["special"])}
  named = {model.IdToPiece(i): i for i in specials if i < size} | {t["content"]: int(i) for i, t in added.items()}
  split = re.compile("(" + "|".join(map(re.escape, named)) + ")").split

  def encode(text: str, add_special_tokens: bool) -> list[int]:
    return [i for part in split(text) for i in ([named[part]] if part in named else model.EncodeAsIds(part))]
  def decode(ids: list[int]) -> str: return model.DecodeIds([i for i in ids if i < size])   # others are padding
  config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **config}
  return Tokenizer(encode, decode, named, specials, config)


def _library(name: str) -> Any:
  try: return importlib.import_module(name)
  except ImportError as e: raise ValueError(f"the model needs {name}: pip install 'tinyvllm[hf]'") from e


def _from_library(model: Any, config: dict[str, Any]) -> Tokenizer:
  named = {t.content: i for i, t in model.get_added_tokens_decoder().items() if t.special}
  return Tokenizer(lambda text, special: model.encode(text, add_special_tokens=special).ids,
                   lambda ids: model.decode(ids, skip_special_tokens=False), named, set(named.values()), config)
