"""Reads the tokenizer in a GGUF file's metadata: a byte-level BPE for Hugging Face's tokenizers, or a sentencepiece
vocabulary."""
import pathlib, struct, types
from typing import Any

from sentencepiece import SentencePieceProcessor

from tinyvllm.config import InputError, JsonObject, check, read_json
from tinyvllm_extra.options import optional
from tinyvllm_extra.text.huggingface import ChatTokenizer, wrap, wrap_sentencepiece

# Regular expressions that split text before BPE merges, by tokenizer.ggml.pre; "": GPT-2's
SPLITS = {name: split["pattern"] for split in read_json(pathlib.Path(__file__).with_suffix(".json"))["splits"]
          for name in split["names"]}
# Words may be single tokens, and prompts start with BOS
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "lfm2", "tekken")
TEMPLATE = "tokenizer.chat_template."   # start of the keys of named templates
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)   # sentencepiece's token types
REQUIRED = {"gpt2": ("tokens", "merges"), "llama": ("tokens", "scores", "token_type")}   # by tokenizer.ggml.model


def byte_level(lib: types.ModuleType, pre: str, config: JsonObject) -> Any:
  """Build a tokenizers.Tokenizer. lib: the package tokenizers. pre: key of SPLITS. config: the tokenizer's metadata."""
  tokens = config["tokens"]
  merges = [tuple(merge.split(" ")) for merge in config["merges"]]
  bpe = lib.Tokenizer(lib.models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre in WHOLE_WORDS))
  split = lib.pre_tokenizers.Split(lib.Regex(SPLITS[pre] or "(?!)"), "isolated")   # (?!) never matches
  splits_as_gpt2 = SPLITS[pre] in ("", r"\p{N}")
  to_bytes = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits_as_gpt2)
  bpe.pre_tokenizer = lib.pre_tokenizers.Sequence([split, to_bytes])
  bpe.decoder = lib.decoders.ByteLevel()
  if pre in ("qwen2", "qwen35"): bpe.normalizer = lib.normalizers.NFC()   # as Qwen's tokenizer; llama.cpp has none
  typed_tokens = zip(tokens, config.get("token_type", [NORMAL] * len(tokens)), strict=True)
  bpe.add_tokens([lib.AddedToken(token, special=token_type == CONTROL, normalized=False)
                  for token, token_type in typed_tokens if token_type in (CONTROL, USER_DEFINED)])
  if config.get("add_eos_token"):   # embedding models; text generation ignores it
    end = config["eos_token_id"]
    bpe.post_processor = lib.processors.TemplateProcessing(f"$A {tokens[end]}", special_tokens=[(tokens[end], end)])
  return bpe


def encode_protobuf(*fields: tuple[int, int | float | bytes]) -> bytes:
  """Encode a message of (field number, value) pairs."""
  def varint(n: int) -> bytes: return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])
  def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, float): return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int): return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value
  return b"".join(field(number, value) for number, value in fields)


def sentencepiece_model(config: JsonObject) -> bytes:
  """Return the content of tokenizer.model, for a vocabulary that merges by score. Field numbers are from
  sentencepiece_model.proto."""
  pieces = [*zip(config["tokens"], config["scores"], config["token_type"], strict=True)]
  messages = [(1, encode_protobuf((1, text.encode()), (2, score), (3, type_id))) for text, score, type_id in pieces]
  bpe = 2
  has_bytes = any(type_id == BYTE for *_, type_id in pieces)
  trainer = encode_protobuf((3, bpe), (4, len(pieces)), (35, has_bytes))
  spaces = encode_protobuf((1, b"identity"), (3, bool(config.get("add_space_prefix", True))),
                           (4, bool(config.get("remove_extra_whitespaces", False))))
  return encode_protobuf(*messages, (2, trainer), (3, spaces))


def make_tokenizer(path: pathlib.Path, metadata: JsonObject, vocab_size: int) -> ChatTokenizer:
  """Build a file's tokenizer. vocab_size: rows of the embeddings. Raises InputError naming the missing or unsupported
  key."""
  named = {name.removeprefix(TEMPLATE): text for name, text in metadata.items() if name.startswith(TEMPLATE)}
  config = {name.split(".")[-1]: value for name, value in metadata.items()
            if name.startswith("tokenizer.") and not name.startswith(TEMPLATE)}
  model_type = str(config.get("model"))
  pre = str(config.get("pre", "default"))
  def check_supported(key: str, value: str, *values: str) -> None:
    check(value in values, f"model: {path}: tokenizer.ggml.{key} {value} is not supported; supported: "
          f"{', '.join(values)}: use the model's folder with safetensors")
  check_supported("model", model_type, *REQUIRED)
  if model_type == "gpt2": check_supported("pre", pre, *SPLITS)
  for key in REQUIRED[model_type]: check(isinstance(config.get(key), list), f"model: {path} lacks tokenizer.ggml.{key}")
  tokens = config["tokens"]
  fits = len(tokens) <= vocab_size
  check(fits, f"model: {path} has {len(tokens)} tokens; expected at most {vocab_size}, the rows of token_embd")
  lib = optional("tokenizers", "hf", "a byte-level vocabulary") if model_type == "gpt2" else None
  settings: JsonObject = {"add_bos_token": model_type == "llama" or pre in WHOLE_WORDS}
  settings |= {key: config[key] for key in ("chat_template", "add_bos_token") if key in config}
  if named: settings["chat_template"] = {"default": config.get("chat_template", ""), **named}
  try:
    for name in ("bos", "eos"):
      if f"{name}_token_id" in config: settings[f"{name}_token"] = tokens[config[f"{name}_token_id"]]
    if lib: return wrap(byte_level(lib, pre, config), settings)
    added = [i for i, x in enumerate(config["token_type"]) if x == USER_DEFINED]   # matched before splitting
    settings["added_tokens_decoder"] = {str(i): {"content": tokens[i], "special": False} for i in added}
    return wrap_sentencepiece(SentencePieceProcessor(model_proto=sentencepiece_model(config)), settings)
  except Exception as e:   # the libraries fail in many ways
    raise InputError(f"model: {path}: tokenizer.ggml is not a valid {model_type} vocabulary: {e}") from e

