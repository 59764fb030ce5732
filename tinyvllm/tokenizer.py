"""Text to token ids and back: sentencepiece's tokenizer.model, Hugging Face's tokenizer.json, a GGUF's own vocabulary; chat templates; and decoding as
tokens arrive."""
import json
import re
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

# How a GGUF's byte-level BPE splits text before merging, by tokenizer.ggml.pre: a pattern, or None for GPT-2's own.
LLAMA3_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GGUF_SPLITS = {"llama-bpe": LLAMA3_SPLIT, "smaug-bpe": LLAMA3_SPLIT, "qwen2": LLAMA3_SPLIT.replace("{1,3}", ""), "smollm": r"\p{N}", "gpt-2": None,
               "default": None}


class Tokenizer:
  """config: as tokenizer_config.json. Subclasses set `specials`, the special tokens' texts and ids, and know how to code plain text."""
  specials: dict[str, int]

  def __init__(self, config: dict[str, Any], default_bos: bool | None = None):
    self.config = config
    self.add_bos = config.get("add_bos_token", default_bos)   # None: as the tokenizer's own post-processor does
    self.bos, self.eos = (t["content"] if isinstance(t := config.get(f"{name}_token"), dict) else t for name in ("bos", "eos"))

  def _encode(self, text: str) -> list[int]: raise NotImplementedError
  def _decode(self, ids: list[int]) -> str: raise NotImplementedError

  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    """Ids of a text, in which special tokens' texts stand for themselves, behind a BOS where the model's files want one."""
    ids = self._encode(text)
    bos = self.specials.get(self.bos or "")
    return [bos, *ids] if add_special_tokens and self.add_bos and bos is not None and ids[:1] != [bos] else ids

  def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
    specials = set(self.specials.values())
    if skip_special_tokens or not specials.intersection(ids): return self._decode([i for i in ids if i not in specials])
    texts, out, run = {i: text for text, i in self.specials.items()}, "", []
    for i in [*ids, -1]:
      if i >= 0 and i not in texts: run.append(i)
      else: out, run = out + (self._decode(run) if run else "") + texts.get(i, ""), []
    return out

  def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """The conversation as the model was trained to see it. Raises ValueError where its files bring no template, or the template refuses."""
    if not (template := self.config.get("chat_template")):
      raise ValueError("this model's files have no chat template (tokenizer_config.json, chat_template): use generate with a prompt")
    import jinja2.sandbox   # [hf]

    def raise_exception(message: str) -> None: raise ValueError(f"the chat template refuses these messages: {message}")
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    values = {"bos_token": self.bos, "eos_token": self.eos, "raise_exception": raise_exception}
    try: return env.from_string(template).render(messages=messages, add_generation_prompt=add_generation_prompt, **values)
    except jinja2.TemplateError as e: raise ValueError(f"the chat template does not take these messages: {e}") from e


class SentencePiece(Tokenizer):
  def __init__(self, path: Path, config: dict[str, Any]):
    self.model = SentencePieceProcessor(model_file=str(path))
    super().__init__({"bos_token": "<s>", "eos_token": "</s>", **config}, default_bos=True)
    self.specials = {self.model.IdToPiece(i): i for i in range(self.model.GetPieceSize()) if self.model.IsControl(i)}
    self.specials |= {t["content"]: int(i) for i, t in config.get("added_tokens_decoder", {}).items() if t["special"]}
    self.split = re.compile("(" + "|".join(map(re.escape, self.specials)) + ")")

  def _encode(self, text: str) -> list[int]:
    return [i for part in self.split.split(text) if part for i in ([self.specials[part]] if part in self.specials else self.model.EncodeAsIds(part))]
  def _decode(self, ids: list[int]) -> str: return self.model.DecodeIds([i for i in ids if i < self.model.GetPieceSize()])


class HFTokenizer(Tokenizer):
  """A `tokenizers.Tokenizer`."""
  def __init__(self, model: Any, config: dict[str, Any]):
    super().__init__(config)
    self.model = model
    self.specials = {t.content: i for i, t in model.get_added_tokens_decoder().items() if t.special}

  def _encode(self, text: str) -> list[int]: return self.model.encode(text, add_special_tokens=False).ids
  def _decode(self, ids: list[int]) -> str: return self.model.decode(ids, skip_special_tokens=False)
  def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
    if add_special_tokens and self.add_bos is None: return self.model.encode(text).ids
    return super().encode(text, add_special_tokens)


def load_tokenizer(folder: Path) -> Tokenizer:
  """From tokenizer.json or tokenizer.model, with tokenizer_config.json and chat_template.jinja where they are."""
  config = json.loads(p.read_text()) if (p := folder / "tokenizer_config.json").exists() else {}
  if (p := folder / "chat_template.jinja").exists(): config["chat_template"] = p.read_text()
  if (p := folder / "tokenizer.json").exists():
    try: import tokenizers
    except ImportError as e: raise ValueError(f"{p} needs the tokenizers library: pip install 'tinyvllm[hf]'") from e
    return HFTokenizer(tokenizers.Tokenizer.from_file(str(p)), config)
  if (p := folder / "tokenizer.model").exists(): return SentencePiece(p, config)
  raise ValueError(f"{folder} has no tokenizer: neither tokenizer.json nor tokenizer.model")


def gguf_tokenizer(kv: dict[str, Any]) -> Tokenizer:
  """From the metadata of a GGUF file with a byte-level BPE vocabulary (tokenizer.ggml.model gpt2)."""
  ggml = {k.removeprefix("tokenizer.ggml."): v for k, v in kv.items() if k.startswith("tokenizer.ggml.")}
  kind, pre = ggml.get("model"), ggml.get("pre", "default")
  if kind != "gpt2" or pre not in GGUF_SPLITS:
    raise ValueError(f"GGUF tokenizer {kind!r} ({pre}) is not supported; supported: gpt2 with {', '.join(GGUF_SPLITS)}: use the model's safetensors folder")
  try: from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
  except ImportError as e: raise ValueError("a GGUF's tokenizer needs the tokenizers library: pip install 'tinyvllm[hf]'") from e
  from tokenizers import Tokenizer as Model
  tokens = ggml["tokens"]
  model = Model(models.BPE({t: i for i, t in enumerate(tokens)}, [tuple(m.split(" ")) for m in ggml["merges"]], ignore_merges=pre == "llama-bpe"))
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=GGUF_SPLITS[pre] is None or pre == "smollm")
  splits = [pre_tokenizers.Split(Regex(GGUF_SPLITS[pre]), "isolated")] if GGUF_SPLITS[pre] else []
  model.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
  model.decoder = decoders.ByteLevel()
  model.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, kind in zip(tokens, ggml["token_type"], strict=True) if kind == 3])
  names = {f"{name}_token": tokens[ggml[f"{name}_token_id"]] for name in ("bos", "eos") if f"{name}_token_id" in ggml}
  add_bos = ggml.get("add_bos_token", pre == "llama-bpe")
  return HFTokenizer(model, {**names, "add_bos_token": add_bos, "chat_template": kv.get("tokenizer.chat_template")})


class StreamDecoder:
  """Decodes a sequence as it grows. Text once given never changes, half a character is held back, and all of it joined is the decoding at once."""
  def __init__(self, tokenizer: Tokenizer, prompt_ids: list[int], skip_special_tokens: bool):
    self.tokenizer, self.skip = tokenizer, skip_special_tokens
    self.ids, self.shown = list(prompt_ids[-8:]), 0   # some context: what a token's text is can depend on what stands before it
    self.shown = len(self._text())

  def _text(self) -> str: return self.tokenizer.decode(self.ids, self.skip)

  def push(self, token: int) -> str:
    """The text that is certain with this token."""
    self.ids.append(token)
    text = self._text()
    certain = text.rstrip("\ufffd")   # a character whose bytes have not all come
    new, self.shown = certain[self.shown:], max(self.shown, len(certain))
    if certain == text and len(self.ids) > 16:   # start again, from a whole character, before decoding grows long
      self.ids = self.ids[-8:]
      self.shown = len(self._text())
    return new

  def flush(self) -> str:
    """What was held back, when nothing follows."""
    text = self._text()
    new, self.shown = text[self.shown:], len(text)
    return new
