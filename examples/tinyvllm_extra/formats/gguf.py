"""Loads GGUF files (github.com/ggml-org/ggml, docs/gguf.md), which hold the config, the tokenizer and the weights.
Quantized weights keep their values: q * scale + offset in groups of inputs."""
import dataclasses, itertools, math, mmap, operator, os, pathlib, struct, types, typing
from collections.abc import Sequence

import numpy as np
from sentencepiece import SentencePieceProcessor
from tinygrad.llm.gguf import read_str, read_uint32, read_uint64, readers

from tinyvllm.config import InputError, JsonObject, check, read_json
from tinyvllm_extra.models.matrices import Matrix, Quantized, narrow
from tinyvllm_extra.options import optional
from tinyvllm_extra.text.huggingface import ChatTokenizer, wrap, wrap_sentencepiece

from . import quantization, weights

# Names in GGUF files and in Hugging Face's. keys: a metadata key without the architecture's prefix -> a field of
# config.json; scaling: -> a field of its rope_scaling. floats: those fields that are not integers. names: a component
# of a tensor's name -> Hugging Face's; own_names: of an architecture. windowed: of files with a sliding window.
# permuted: the two rows that RoPE rotates are adjacent in the file. missing: tensors that an architecture, or some of
# its layers, lack. layer_types: keys of a value for each layer, 0 or not. fixed: fields of config.json. partial: a part
# of a head may rotate. end_tokens: they end a turn in files without tokenizer.ggml.eot_token_id, as in llama.cpp
# (src/llama-vocab.cpp). types: see TensorType, by GGUF type id. other_types: names of unsupported types. splits: see
# SPLITS
TABLES = read_json(pathlib.Path(__file__).with_suffix(".json"))
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")   # in every part of a split model


# Tensor types (ggml-common.h): the layouts of their blocks, and their weights as q * scale + offset

class TensorType(typing.NamedTuple):
  """The layout of a GGUF tensor type: a row is a sequence of blocks of `inputs` weights, each a numpy record of
  `fields`, named as in ggml: q, d (scale), m (offset) or dmin (minus offset), and scales (factors of d, then dmin)."""
  name: str
  inputs: int
  fields: np.dtype
  bits: int = 16             # per weight in the model
  group_size: int = 0        # inputs that share a scale; 0: not quantized
  has_offset: bool = False
  q: tuple = ((16, 4),)      # arguments of `unpack`
  scales: tuple = ()         # likewise; (): none, or as `unpack_k_scales` reads them
  levels: Sequence[int] = ()   # value of each q; (): q itself


SIGNS = {"d": 1, "m": 1, "dmin": -1}
# numpy has no bfloat16. levels: kvalues_iq4nl in ggml-common.h
TYPES = {int(i): TensorType(**row | {"fields": np.dtype(row["fields"])}) for i, row in TABLES["types"].items()}


def unpack_planes(data: np.ndarray, width: int, bits: int) -> np.ndarray:
  """Unpack uint8, (..., n), to (..., n * 8 / bits): of every `width` bytes first their lowest `bits` bits, then the
  next ones."""
  planes = data.reshape(*data.shape[:-1], -1, 1, width) >> np.arange(0, 8, bits, dtype=np.uint8)[:, None]
  planes &= np.uint8(2**bits - 1)
  return planes.reshape(*data.shape[:-1], -1)


def unpack(blocks: np.ndarray, name: str, low: Sequence[int], high: Sequence[int] | None = None,
           zero_point: int = 0) -> np.ndarray:
  """Return the integers of a field, (..., n) int8: low + (high << bits of low) - zero_point. low, high: arguments of
  `unpack_planes`, width and bits, for the field `name` and, if it exists, for the field NAME_high."""
  values = unpack_planes(blocks[name], *low)
  if high: values |= unpack_planes(blocks[f"{name}_high"], *high) << np.uint8(low[1])
  values -= np.uint8(zero_point)
  return values.view(np.int8)


def unpack_k_scales(data: np.ndarray) -> np.ndarray:
  """Unpack 12 bytes to 8 scales and 8 minima of 6 bits each. Bytes 0-3 and 4-7 hold the first four of each; their upper
  2 bits and the nibbles of bytes 8-11 form the last four."""
  scales, minima, nibbles = np.split(data, 3, -1)
  return np.concatenate([scales & 63, nibbles & 15 | scales >> 2 & 48,
                         minima & 63, nibbles >> 4 | minima >> 2 & 48], -1)


def decode(tensor_type: TensorType, blocks: np.ndarray) -> Quantized:
  """Return int8 weights with float32 scales and offsets. blocks: (rows, blocks per row)."""
  fields = blocks.dtype.names or ()
  q = unpack(blocks, "q", *tensor_type.q)
  if tensor_type.levels:   # indexing an array would convert q to int64
    levels = np.array(tensor_type.levels, np.int8).tobytes().ljust(256)
    q = np.frombuffer(bytearray(q).translate(levels), np.int8)
  terms = [blocks[name].astype(np.float32)[..., None] * sign for name, sign in SIGNS.items() if name in fields]
  if "scales" in fields:
    scales = unpack(blocks, "scales", *tensor_type.scales) if tensor_type.scales else unpack_k_scales(blocks["scales"])
    terms = [x * y for x, y in zip(terms, np.split(scales, len(terms), -1), strict=True)]
  q, scale, *offset = [x.reshape(len(blocks), -1) for x in (q, *terms)]
  return Quantized(q, scale, offset[0] if offset else None, np.arange(q.shape[1]))


# Files

@dataclasses.dataclass(frozen=True)
class GGUFTensor(weights.StoredTensor):
  """A tensor in a GGUF file."""
  tensor_type: TensorType

  nbytes = property(lambda self: math.prod(self.shape) // self.tensor_type.inputs * self.dtype.itemsize)

  def describe(self, config: JsonObject) -> str: return f"GGUF {self.tensor_type.name}"

  def read_matrix(self, group_size: int | None, bits: int = 8, has_offset: bool = False) -> Matrix:
    """Return a matrix with its exact values, in this format or, without a group size, dequantized."""
    if not self.tensor_type.group_size: return self.read()
    w = decode(self.tensor_type, self.read())
    if not group_size: return quantization.dequantize(w, np.float32)
    q, scale, offset, order = w
    repeats = q.shape[1] // group_size // scale.shape[1]   # a group of 32 becomes two of 16
    scale = narrow(scale).repeat(repeats, 1)
    if offset is not None: offset = narrow(offset).repeat(repeats, 1)
    elif bits == 4:   # from -8..7 to 0..15
      q += np.int8(8)
      offset = -8 * scale
    elif has_offset: offset = np.zeros_like(scale)
    return Quantized(q.view(np.uint8) if bits == 4 else q, scale, offset, order)


def read_header(path: pathlib.Path) -> tuple[JsonObject, dict[str, GGUFTensor]]:
  """Return a file's metadata and tensors. Raises InputError if it is not GGUF or is truncated."""
  check(path.is_file() and os.access(path, os.R_OK), f"model: {path} is not a readable file")
  size = path.stat().st_size
  check(size, f"model: {path} is empty: expected a GGUF file")
  with path.open("rb") as file: reader: typing.Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
  check(reader.read(4) == b"GGUF", f"model: {path} is not a readable GGUF file: it must start with GGUF")
  try:
    version = read_uint32(reader)
    check(version in (2, 3), f"model: {path} has GGUF version {version}; supported: 2, 3, little-endian")
    num_tensors = read_uint64(reader)
    metadata = {read_str(reader): readers[read_uint32(reader)](reader) for _ in range(read_uint64(reader))}
    tensor_infos = [(read_str(reader), (*[read_uint64(reader) for _ in range(read_uint32(reader))][::-1],),
                     read_uint32(reader), read_uint64(reader)) for _ in range(num_tensors)]
  except (LookupError, UnicodeDecodeError, OverflowError, RecursionError, struct.error) as e:
    raise InputError(f"model: {path} is not a readable GGUF file or is truncated: at byte {reader.tell()} of {size}: "
                     f"{e}") from e
  alignment = metadata.get("general.alignment", 32)
  check(type(alignment) is int and alignment > 0, f"model: {path}: general.alignment={alignment!r} must be above 0")
  start = -(-reader.tell() // alignment) * alignment
  return metadata, {info[0]: locate_tensor(path, start, size, *info) for info in tensor_infos}


def read_parts(path: pathlib.Path) -> tuple[JsonObject, dict[str, GGUFTensor]]:
  """Return the metadata and tensors of a file and, if it is the first part of a split model, of all parts. Their names
  end with -00001-of-00003.gguf and so on. Raises InputError naming a part that is missing or of another model."""
  metadata, tensors = read_header(path)
  number, count, num_tensors = [metadata.get(key, 0) for key in SPLIT_KEYS]
  if count in (0, 1): return metadata, tensors   # llama-gguf-split --merge writes 0
  is_valid = isinstance(number, int) and isinstance(count, int) and 0 <= number < count < 2**16
  check(is_valid, f"model: {path}: split.no={number!r} must be from 0 to split.count={count!r}, at most 65535")
  prefix = f"model: {path} is part {number + 1} of {count}"
  endings = [f"-{i + 1:05}-of-{count:05}.gguf" for i in range(count)]
  check(path.name.endswith(endings[number]), f"{prefix}: its name must end with {endings[number]}")
  parts = [path.with_name(path.name.removesuffix(endings[number]) + ending) for ending in endings]
  check(number == 0, f"{prefix}: pass the first part, {parts[0]}")
  for i, part in enumerate(parts[1:], 1):
    check(part.is_file(), f"{prefix}: {part} is missing: download it to the same folder")
    part_metadata, part_tensors = read_header(part)
    tensors |= part_tensors
    values = [part_metadata.get(key, 0) for key in SPLIT_KEYS]
    check(values == [i, count, num_tensors], f"{prefix}: {part} has {', '.join(SPLIT_KEYS)} = {values}; expected "
          f"{[i, count, num_tensors]}: download all parts of one model")
  check(len(tensors) == num_tensors, f"{prefix}: all parts have {len(tensors)} tensors, but "
        f"split.tensors.count={num_tensors}: download them again")
  return metadata, tensors


def locate_tensor(path: pathlib.Path, data_start: int, file_size: int, name: str, shape: tuple, type_id: int,
                  offset: int) -> GGUFTensor:
  prefix = f"model: {path}: tensor {name}"
  type_name = TABLES["other_types"].get(str(type_id), type_id)
  check(type_id in TYPES, f"{prefix} has GGUF type {type_name}; supported: {', '.join(x.name for x in TYPES.values())}")
  tensor_type = TYPES[type_id]
  tensor = GGUFTensor(path, tensor_type.fields, shape, data_start + offset, tensor_type)
  min_axes = 2 if tensor_type.group_size else 1
  is_valid = min_axes <= len(shape) <= 2 and math.prod(shape) and shape[-1] % tensor_type.inputs == 0
  check(is_valid, f"{prefix} has shape {[*shape]}; {tensor_type.name} needs {min_axes} or 2 axes, the last one a "
        f"multiple of {tensor_type.inputs}")
  end = tensor.start + tensor.nbytes
  check(end <= file_size, f"{prefix} ends at byte {end}, but the file has {file_size} bytes: it is truncated")
  return tensor


def read_config(path: pathlib.Path, metadata: JsonObject, tensors: dict[str, GGUFTensor]) -> JsonObject:
  """Return the content of an equivalent config.json. Raises InputError for an unsupported file."""
  arch = str(metadata.get("general.architecture"))
  architectures = TABLES["architectures"]
  check(arch in architectures, f"model: {path} has architecture {arch}; supported: {', '.join(architectures)}: use "
        "safetensors if config.json has a supported architecture, or choose another model")
  is_causal = metadata.get(f"{arch}.attention.causal", True)
  check(is_causal, f"model: {path}: {arch}.attention.causal=False: choose a model that generates text")
  config = {name: metadata[f"{arch}.{key}"] for key, name in TABLES["keys"].items() if metadata.get(f"{arch}.{key}")}
  heads = config.get("num_key_value_heads")   # a list has a value per layer, 0 for a convolution
  if arch in ("lfm2", "granite") and isinstance(heads, list): config["num_key_value_heads"] = max(heads)
  required = TABLES["required"] + TABLES["own_required"].get(arch, [])
  for key in required: check(TABLES["keys"][key] in config, f"model: {path} lacks {arch}.{key}")
  for name, value in config.items():
    value_type = float if name in TABLES["floats"] else int
    text = f"model: {path}: {name}={str(value)[:40]}"
    check(type(value) is value_type and value > 0, f"{text} must be of type {value_type.__name__} and above 0")
    if value_type is float: config[name] = float(str(np.float32(value)))   # 1e-5, not its nearest float32
  config["num_hidden_layers"] -= config.get("mtp_num_hidden_layers", 0)   # layers that draft tokens, the last ones
  check(config["num_hidden_layers"] > 0, f"model: {path}: {arch}.nextn_predict_layers are all of its layers")
  layers = (f"blk.{i}.{name}.weight" for i in range(config["num_hidden_layers"]) for name in TABLES["layer_tensors"]
            if name not in TABLES["missing"].get(arch, ()))
  for name in itertools.chain(["token_embd.weight", *TABLES["final_norms"].get(arch, ["output_norm.weight"])], layers):
    check(name in tensors, f"model: {path}: tensor {name} is missing")
  head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
  for key in ("rope.dimension_count", "attention.value_length"):
    value = metadata.get(f"{arch}.{key}", head_dim)
    is_partial = arch in TABLES["partial"] and key == "rope.dimension_count" and value in range(2, head_dim + 1, 2)
    check(value == head_dim or is_partial, f"model: {path}: {arch}.{key}={value} must be {head_dim}, as the head size")
    if is_partial: config["partial_rotary_factor"] = value / head_dim
  if rope := read_scaling(arch, metadata, tensors): config["rope_scaling"] = rope
  end_tokens = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
  tokens = metadata.get("tokenizer.ggml.tokens", ())
  if end_tokens[1] is None: end_tokens += [i for i, token in enumerate(tokens) if token in TABLES["end_tokens"]]
  return config | {
    "architectures": [architectures[arch]], "model_type": arch, "hidden_act": "silu",
    "dtype": {"F16": "float16", "BF16": "bfloat16"}.get(tensors["token_embd.weight"].tensor_type.name),
    "vocab_size": tensors["token_embd.weight"].shape[0], "tie_word_embeddings": "output.weight" not in tensors,
    "attention_bias": "blk.0.attn_output.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    "eos_token_id": [token for token in end_tokens if token is not None], **read_options(path, arch, metadata, config)}


def read_scaling(arch: str, metadata: JsonObject, tensors: dict[str, GGUFTensor]) -> JsonObject:
  """Return rope_scaling of an equivalent config.json, empty for none."""
  freqs, long, short = [tensors[name].read().tolist() if name in tensors else None for name in ROPE_TENSORS]
  if freqs: return {"rope_type": "factors", "factors": freqs}   # llama3's, computed by llama.cpp's converter
  rope = {name: metadata[f"{arch}.{key}"] for key, name in TABLES["scaling"].items() if f"{arch}.{key}" in metadata}
  if long: return {"rope_type": "longrope", "long_factor": long, "short_factor": short,
                   "attention_factor": rope.get("attention_factor")}
  if rope.get("rope_type", "none") == "none": return {}
  if rope.get("mscale_all_dim"): rope["mscale"] = 1.0
  if arch != "olmo2": rope.pop("attention_factor", None)
  return {"factor": 1.0, **rope}


def read_options(path: pathlib.Path, arch: str, metadata: JsonObject, config: JsonObject) -> JsonObject:
  """Return fields of an equivalent config.json that only some architectures have."""
  has_rope = metadata.get(f"{arch}.rope.scaling.finetuned", True)   # Granite's switch of RoPE
  options: JsonObject = {"position_embedding_type": "rope" if has_rope else "none", **TABLES["fixed"].get(arch, {})}
  for key, kinds in TABLES["layer_types"].items():
    values, count = metadata.get(f"{arch}.{key}"), config["num_hidden_layers"]
    if not isinstance(values, list): continue
    check(len(values) >= count, f"model: {path}: {arch}.{key} has {len(values)} values, but the model {count} layers")
    options["layer_types"] = [kinds[bool(x)] for x in values[:count]]
  if config.get("sliding_window") and arch in TABLES["windowed"]: options["architectures"] = [TABLES["windowed"][arch]]
  if arch == "qwen35":   # heads of V with the same K are not consecutive
    heads, size = config["linear_num_value_heads"], config["linear_size"]
    check(size % heads == 0, f"model: {path}: ssm.inner_size={size} must be a multiple of ssm.time_step_rank={heads}")
    options |= {"linear_groups": heads, "linear_value_head_dim": size // heads}
  if arch.startswith("gemma"):
    is_27b = config["num_hidden_layers"] in (46, 62)   # as llama.cpp does, because files lack this scale
    size = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    options["query_pre_attn_scalar"] = size
  return options


def rename(path: pathlib.Path, config: JsonObject, tensors: dict[str, GGUFTensor]) -> dict[str, GGUFTensor]:
  """Return the tensors under Hugging Face's names and with its values, shapes, and order of the rows of q and k."""
  heads = config["num_attention_heads"]
  permuted = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)}   # number of heads
  names = TABLES["names"] | TABLES["own_names"].get(config["model_type"], {})
  renamed = {}
  first, num_drafting = config["num_hidden_layers"], config.get("mtp_num_hidden_layers", 0)
  unused = *ROPE_TENSORS, *[f"blk.{i}." for i in range(first, first + num_drafting)]
  for name, tensor in tensors.items():
    if name.startswith(unused): continue
    components = name.split(".")
    is_supported = len(components) > 1 and all(x in names or x.isdecimal() for x in components[:-1])
    check(is_supported, f"model: {path}: tensor {name} is not supported; supported: {', '.join(names)}")
    n = permuted.get(components[-2]) if config["model_type"] in TABLES["permuted"] else None
    if n:   # these rows are in different halves of a head here
      rows = n * config["head_dim"]
      check(tensor.shape[0] == rows, f"model: {path}: tensor {name} has {tensor.shape[0]} rows; expected {rows}")
      order = np.arange(rows).reshape(n, -1, 2).swapaxes(1, 2).ravel()
      tensor = dataclasses.replace(tensor, convert=operator.itemgetter(order))
    if components[-2] in ("conv", "ssm_conv1d"):
      tensor = dataclasses.replace(tensor, shape=(tensor.shape[0], 1, tensor.shape[-1]))
    if components[-1] == "ssm_a": tensor = dataclasses.replace(tensor, convert=lambda x: np.log(-x))   # -exp(A_log)
    renamed[".".join(names.get(x, x) for x in components)] = tensor
  return renamed


# Tokenizers: a byte-level BPE for Hugging Face's tokenizers, or a sentencepiece vocabulary

# Regular expressions that split text before BPE merges, by tokenizer.ggml.pre; "": GPT-2's
SPLITS = {name: split["pattern"] for split in TABLES["splits"] for name in split["names"]}
# Words may be single tokens, and prompts start with BOS
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "lfm2", "tekken")
TEMPLATE = "tokenizer.chat_template."   # start of the keys of named templates
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)   # sentencepiece's token types
REQUIRED = {"gpt2": ("tokens", "merges"), "llama": ("tokens", "scores", "token_type")}   # by tokenizer.ggml.model


def byte_level(lib: types.ModuleType, pre: str, config: JsonObject) -> typing.Any:
  """Build a tokenizers.Tokenizer. lib: the package tokenizers. pre: key of SPLITS. config: the tokenizer's metadata."""
  tokens = config["tokens"]
  merges = [tuple(merge.split(" ")) for merge in config["merges"]]
  bpe = lib.Tokenizer(lib.models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre in WHOLE_WORDS))
  split = lib.pre_tokenizers.Split(lib.Regex(SPLITS[pre] or "(?!)"), "isolated")   # (?!) never matches
  to_bytes = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=SPLITS[pre] in ("", r"\p{N}"))
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


# Fields of a message in Protocol Buffers' format, by number
def varint(n: int) -> bytes: return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])
def integer(number: int, n: int) -> bytes: return varint(number << 3) + varint(n)
def real(number: int, x: float) -> bytes: return varint(number << 3 | 5) + struct.pack("<f", x)
def content(number: int, data: bytes) -> bytes: return varint(number << 3 | 2) + varint(len(data)) + data


def sentencepiece_model(config: JsonObject) -> bytes:
  """Return the content of tokenizer.model, for a vocabulary that merges by score. Field numbers are from
  sentencepiece_model.proto."""
  pieces = [*zip(config["tokens"], config["scores"], config["token_type"], strict=True)]
  messages = [content(1, text.encode()) + real(2, score) + integer(3, type_id) for text, score, type_id in pieces]
  has_bytes = any(type_id == BYTE for *_, type_id in pieces)
  trainer = integer(3, 2) + integer(4, len(pieces)) + integer(35, has_bytes)   # 2: BPE
  adds_prefix = bool(config.get("add_space_prefix", True))
  spaces = content(1, b"identity") + integer(3, adds_prefix) + integer(4, bool(config.get("remove_extra_whitespaces")))
  return b"".join(content(1, x) for x in messages) + content(2, trainer) + content(3, spaces)


def make_tokenizer(path: pathlib.Path, metadata: JsonObject, vocab_size: int) -> ChatTokenizer:
  """Build a file's tokenizer. vocab_size: rows of the embeddings. Raises InputError naming the missing or unsupported
  key."""
  named = {name.removeprefix(TEMPLATE): text for name, text in metadata.items() if name.startswith(TEMPLATE) and text}
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


# Checkpoints

class GGUFCheckpoint(weights.FastCheckpoint):
  """A GGUF file, or several parts, given by the first."""
  def __init__(self, path: pathlib.Path):
    self.path = path
    self.metadata, tensors = read_parts(path)
    self.hf_config = read_config(path, self.metadata, tensors)
    self.all_tensors = rename(path, self.hf_config, tensors)

  method = property(lambda self: "gguf" if any(x.tensor_type.group_size for x in self.all_tensors.values()) else None)

  def tokenizer(self) -> ChatTokenizer: return make_tokenizer(self.path, self.metadata, self.hf_config["vocab_size"])
  def stored_tensors(self) -> dict[str, GGUFTensor]: return {**self.all_tensors}

  def read_matrices(self, shapes: dict[str, tuple[int, int]]) -> Sequence[Matrix]:
    """Read matrices in the format that represents each exactly: the most bits and the smallest group, 0 if one is not
    quantized: then all are dequantized. If their dtypes differ, `stack` converts them to float32."""
    tensors = [self.take(f"{name}.weight", *shape) for name, shape in shapes.items()]
    types = [tensor.tensor_type for tensor in tensors]
    common = min(x.group_size for x in types), max(x.bits for x in types), any(x.has_offset for x in types)
    return [tensor.read_matrix(*common) for tensor in tensors]
