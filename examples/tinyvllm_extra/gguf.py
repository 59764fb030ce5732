"""`tinyvllm convert`: a model's folder, as Hugging Face lays it out, of a GGUF file. A quantized weight keeps its bits:
by groups of inputs w = q * scale + offset, as compressed-tensors lays that out, exact but for the rounding of scales to
float16. In 4 bits without offsets the files have q + 8, else q itself; `weight_offset` is an extension of ours. numpy
alone reads and writes: no device is opened, and nothing compiled."""
import argparse, collections, hashlib, itertools, json, math, os, pathlib, struct, tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from sentencepiece import SentencePieceProcessor

from tinyvllm import __version__
from tinyvllm.config import InputError, ModelConfig, check, logger
from tinyvllm_extra.flags import setup_logging
from tinyvllm_extra.packages import optional

# What a GGUF file says of a model, and what config.json calls that. The first are in every file
KEYS = {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim", "context_length": "max_position_embeddings", "rope.freq_base": "rope_theta",
        "attention.sliding_window": "sliding_window"}
REQUIRED = [*KEYS][:5]
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Parts of tensors' names. Mistral's files are of the architecture llama
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "blk": "model.layers",
         "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
         "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
         **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}}
IN_LAYER = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
FUSED = {**dict.fromkeys(["q_proj", "k_proj", "v_proj"], "qkv"), **dict.fromkeys(["gate_proj", "up_proj"], "gate_up")}
# How a byte-level BPE splits text before it merges, by tokenizer.ggml.pre; "": as GPT-2
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {**dict.fromkeys(["llama-bpe", "llama3", "llama-v3", "smaug-bpe"], LLAMA3), "tekken": TEKKEN,
          **dict.fromkeys(["qwen2", "deepseek-r1-qwen"], LLAMA3.replace("{1,3}", "")),
          **dict.fromkeys(["smollm", "starcoder", "refact"], r"\p{N}"), "gpt-2": "", "default": ""}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")   # a word that is a token is not merged; BOS begins a text
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)   # kinds of tokens, as sentencepiece numbers them


# Types of tensors

class Form(NamedTuple):
  """How a quantized weight is written."""
  bits: int
  group: int      # inputs that share a scale
  offsets: bool

  @property
  def format(self) -> str: return "pack-quantized" if self.bits == 4 else "int-quantized"


class Type(NamedTuple):
  """How a tensor lies in a file: a block of `inputs` of a row after the other, each with `fields`. q is made of the
  planes in `low`, with those in `high` 4 bits above them, minus `zero`."""
  name: str
  inputs: int
  fields: Any
  form: Form | None = None   # None: numbers, not quantized
  zero: int = 0
  low: tuple[int, int] = (16, 4)
  high: tuple[int, int] = (1, 1)


K_SCALES = [("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12)]
TYPES = {
  0: Type("F32", 1, "<f4"), 1: Type("F16", 1, "<f2"), 30: Type("BF16", 1, "<u2"),   # numpy has no bfloat16: its bits
  2: Type("Q4_0", 32, [("d", "<f2"), ("low", "u1", 16)], Form(4, 32, False), 8),
  3: Type("Q4_1", 32, [("d", "<f2"), ("m", "<f2"), ("low", "u1", 16)], Form(4, 32, True)),
  6: Type("Q5_0", 32, [("d", "<f2"), ("high", "u1", 4), ("low", "u1", 16)], Form(8, 32, False), 16),
  7: Type("Q5_1", 32, [("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("low", "u1", 16)], Form(8, 32, True)),
  8: Type("Q8_0", 32, [("d", "<f2"), ("low", "u1", 32)], Form(8, 32, False), low=(32, 8)),
  12: Type("Q4_K", 256, [*K_SCALES, ("low", "u1", 128)], Form(4, 32, True), low=(32, 4)),
  13: Type("Q5_K", 256, [*K_SCALES, ("high", "u1", 32), ("low", "u1", 128)], Form(8, 32, True), 0, (32, 4), (32, 1)),
  14: Type("Q6_K", 256, [("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")],
           Form(8, 16, False), 32, (64, 4), (32, 2))}
OTHER_TYPES = dict(zip([9, 10, 11, *range(15, 30), 34, 35, 39], [
  "Q8_1", "Q2_K", "Q3_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",
  "I16", "I32", "I64", "F64", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4"], strict=True))
STORED = {"f4": "F32", "f2": "F16", "u2": "BF16", "i1": "I8", "i4": "I32", "i8": "I64"}   # in safetensors


def planes(data: np.ndarray, width: int, bits: int) -> np.ndarray:
  """(…, n) bytes to (…, n * 8 / bits) numbers: of `width` bytes first the lowest bits of each, then the next, …"""
  shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
  spread = data.reshape(*data.shape[:-1], -1, 1, width) >> shifts
  spread &= np.uint8(2**bits - 1)
  return spread.reshape(*data.shape[:-1], -1)


def k_scales(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Of 12 bytes, the 8 scales and the 8 minima, of 6 bits each: four of each lie whole in 4 bytes, whose upper bits
  are those of the four others, and the last 4 bytes hold the others' lower bits."""
  scales, minima, rest = data[..., :4], data[..., 4:8], data[..., 8:]
  return (np.concatenate([scales & 63, rest & 15 | scales >> 2 & 48], -1),
          np.concatenate([minima & 63, rest >> 4 | minima >> 2 & 48], -1))


def quantized(kind: Type, data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """Of rows of bytes: q (rows, inputs) in int8, scale (rows, groups) and offset (rows, groups), or None for that."""
  blocks = data.view(kind.fields)   # (rows, blocks)
  q = planes(blocks["low"], *kind.low)
  if "high" in blocks.dtype.names: q |= planes(blocks["high"], *kind.high) << np.uint8(4)
  q = q.view(np.int8).reshape(len(data), -1)
  q -= np.int8(kind.zero)
  scale = blocks["d"].astype(np.float32)[..., None]
  offset = blocks["m"].astype(np.float32)[..., None] if "m" in blocks.dtype.names else None
  scaled = "scales" in blocks.dtype.names
  if scaled and offset is None: scale = scale * blocks["scales"]
  elif scaled and offset is not None:
    scales, minima = k_scales(blocks["scales"])
    scale = scale * scales
    offset = -offset * minima
  return q, scale.reshape(len(data), -1), None if offset is None else offset.reshape(len(data), -1)


def numbers(kind: Type, data: np.ndarray) -> np.ndarray:
  """What a tensor stands for, in float32."""
  if kind.name == "BF16": return (data.astype(np.uint32) << 16).view(np.float32)   # the upper half of float32
  if not kind.form: return data.astype(np.float32, copy=False)
  q, scale, offset = quantized(kind, data)
  values = q.reshape(*scale.shape, -1) * scale[..., None]
  if offset is not None: values += offset[..., None]
  return values.reshape(q.shape)


def written(kind: Type, data: np.ndarray, form: Form) -> Iterator[tuple[str, np.ndarray]]:
  """A quantized weight's tensors in a form that holds it exactly, by what stands behind its module's name."""
  q, scale, offset = quantized(kind, data)
  times = q.shape[1] // form.group // scale.shape[1]   # a group of 32 is two of 16
  if form.offsets and offset is None: offset = np.zeros_like(scale)
  if form.bits == 8: yield "weight", q
  else:
    nibbles = (q if form.offsets else q + np.int8(8)).view(np.uint8)
    yield "weight_packed", (nibbles[:, ::2] | nibbles[:, 1::2] << np.uint8(4)).view("<i4")
    yield "weight_shape", np.array(q.shape, "<i8")
  yield "weight_scale", scale.astype("<f2").repeat(times, 1)
  if offset is not None: yield "weight_offset", offset.astype("<f2").repeat(times, 1)


# The file

class Tensor(NamedTuple):
  kind: Type
  shape: tuple[int, ...]   # (out, in)
  start: int               # in the file
  rows: np.ndarray | None = None   # their order, where it is another

  def read(self, path: pathlib.Path) -> np.ndarray:
    """Its numbers, in their shape, or rows of bytes if they are quantized."""
    field = np.dtype(np.uint8 if self.kind.form else self.kind.fields)
    shape = (self.shape[0], self.nbytes // self.shape[0]) if self.kind.form else self.shape
    data = np.memmap(path, field, "r", self.start, shape)
    return np.ascontiguousarray(data if self.rows is None else data[self.rows])

  @property
  def nbytes(self) -> int: return math.prod(self.shape) // self.kind.inputs * np.dtype(self.kind.fields).itemsize


class Reader:
  """What stands before the tensors' data, read from front to end."""
  STRING, ARRAY = 8, 9
  NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

  def __init__(self, data: Any):
    self.data = data
    self.at = 0

  def number(self, form: str) -> Any:
    value, = struct.unpack_from("<" + form, self.data, self.at)
    self.at += struct.calcsize("<" + form)
    return value

  def text(self) -> str:
    size = self.number("Q")
    start = self.at
    self.at += size
    if self.at > len(self.data): raise EOFError("a text goes on behind the file's end")
    return bytes(self.data[start:self.at]).decode()

  def value(self, kind: int, nested: bool = False) -> Any:
    if kind == self.STRING: return self.text()
    if kind != self.ARRAY or nested: return self.number(self.NUMBERS[kind])
    of = self.number("I")
    return [self.value(of, nested=True) for _ in range(self.number("Q"))]


def read(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
  """A GGUF file's metadata and its tensors. Raises ValueError for a file that is none, or that is cut short."""
  check(path.is_file() and os.access(path, os.R_OK), f"{path} is no file that can be read")
  size = path.stat().st_size
  check(size, f"{path} is empty: expected a GGUF file")
  reader = Reader(np.memmap(path, np.uint8, "r"))
  try:
    check(bytes(reader.data[:4]) == b"GGUF", f"{path} is not a readable GGUF file: it does not begin with GGUF")
    reader.at = 4
    version = reader.number("I")
    check(version in (2, 3), f"{path} is GGUF of version {version}; supported: 2, 3, of little-endian machines")
    count = reader.number("Q")
    kv = {reader.text(): reader.value(reader.number("I")) for _ in range(reader.number("Q"))}
    found = []
    for _ in range(count):
      name = reader.text()
      sizes = [reader.number("Q") for _ in range(reader.number("I"))]
      found.append((name, (*reversed(sizes),), reader.number("I"), reader.number("Q")))
  except (EOFError, LookupError, UnicodeDecodeError, struct.error) as e:
    raise InputError(f"{path} is not a readable GGUF file, or is cut short: at byte {reader.at} of {size}: {e}") from e
  alignment = kv.get("general.alignment", 32)
  check(type(alignment) is int and alignment > 0, f"{path}: general.alignment={alignment!r}; expected a power of two")
  start = -(-reader.at // alignment) * alignment
  known = ", ".join(x.name for x in TYPES.values())
  tensors = {}
  for name, shape, kind, offset in found:
    said = f"{path}: tensor {name}"
    check(kind in TYPES, f"{said} is of GGUF type {OTHER_TYPES.get(kind, kind)}; supported: {known}")
    tensor = Tensor(TYPES[kind], shape, start + offset)
    tensors[name] = tensor
    least = 2 if tensor.kind.form else 1
    whole = least <= len(shape) <= 2 and math.prod(shape) and shape[-1] % tensor.kind.inputs == 0
    check(whole, f"{said} has the shape {[*shape]}; expected {least} or 2 axes, the last a multiple of "
          f"{tensor.kind.inputs}, as {tensor.kind.name} has it")
    end = tensor.start + tensor.nbytes
    check(end <= size, f"{said} should end at byte {end}, but the file has {size}: it is cut short")
  return kv, tensors


# What is made of it

def model(path: pathlib.Path, kv: dict[str, Any], found: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
  """config.json's content and the tensors by Hugging Face's names. Raises ValueError for what the engine lacks."""
  arch = str(kv.get("general.architecture"))
  check(arch in ARCHITECTURES, f"{path}: GGUF architecture {arch} is not supported; supported: "
        f"{', '.join(ARCHITECTURES)}")
  check(kv.get("split.count", 1) == 1, f"{path} is one of {kv.get('split.count')} parts: expected one file; "
        "llama-gguf-split --merge makes it")
  config = {name: kv[f"{arch}.{key}"] for key, name in KEYS.items() if kv.get(f"{arch}.{key}")}
  for key in REQUIRED: check(KEYS[key] in config, f"{path} lacks {arch}.{key}")
  for name, value in config.items():
    kind = float if name in ("rms_norm_eps", "rope_theta") else int
    check(type(value) is kind and value > 0, f"{path}: {name}={str(value)[:40]}; expected one {kind.__name__} above 0")
    if kind is float: config[name] = float(str(np.float32(value)))   # 1e-5, not the float32 nearest to it
  layers = (f"blk.{i}.{name}.weight" for i in range(config["num_hidden_layers"]) for name in IN_LAYER)
  for name in itertools.chain(["token_embd.weight", "output_norm.weight"], layers):
    check(name in found, f"{path}: tensor {name} is missing")
  heads = config["num_attention_heads"]
  width = config.setdefault("head_dim", config["hidden_size"] // heads)
  for key in ("rope.dimension_count", "attention.value_length"):
    check(kv.get(f"{arch}.{key}", width) == width, f"{path}: {arch}.{key}={kv.get(f'{arch}.{key}')}; expected {width}")
  config |= {"architectures": [ARCHITECTURES[arch]], "model_type": arch, "hidden_act": "silu",
             "vocab_size": found["token_embd.weight"].shape[0], "tie_word_embeddings": "output.weight" not in found,
             "attention_bias": "blk.0.attn_output.bias" in found, "mlp_bias": "blk.0.ffn_up.bias" in found,
             "eos_token_id": [kv[k] for n in ("eos", "eot") if (k := f"tokenizer.ggml.{n}_token_id") in kv]}
  scaling = f"{arch}.rope.scaling"
  if kv.get(f"{scaling}.type", "none") != "none":
    config["rope_scaling"] = {"rope_type": kv[f"{scaling}.type"], "factor": kv.get(f"{scaling}.factor", 1.0)}
  found = dict(found)
  if "rope_freqs.weight" in found:   # llama3's scaling, worked out by llama.cpp's converter
    config["rope_scaling"] = {"rope_type": "factors", "factors": found.pop("rope_freqs.weight").read(path).tolist()}
  ModelConfig.from_hf(config, path)   # it says what it lacks
  permuted = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)} if arch == "llama" else {}
  tensors = {}
  for name, tensor in found.items():
    parts = name.split(".")
    said = f"{path}: tensor {name}"
    known = len(parts) > 1 and all(part in NAMES or part.isdecimal() for part in parts[:-1])
    check(known, f"{said} is not known; known: {', '.join(NAMES)}")
    if n := permuted.get(parts[-2]):   # rows of q and k lie in RoPE's pairs of neighbours: put them back into halves
      check(tensor.shape[0] == n * width, f"{said} has {tensor.shape[0]} rows; expected {n * width}")
      tensor = tensor._replace(rows=np.arange(n * width).reshape(n, -1, 2).swapaxes(1, 2).ravel())
    tensors[".".join(NAMES.get(part, part) for part in parts)] = tensor
  return config, tensors


def forms(tensors: dict[str, Tensor]) -> dict[str, Form | str]:
  """How each matrix is written, by its module's name: quantized, or as numbers of a type. The engine fuses some into
  one, which has one form: the one they share, or else 8 bits by the smallest group, which hold any of them as exactly,
  or else float32."""
  matrices = {name.removesuffix(".weight"): tensor.kind for name, tensor in tensors.items() if len(tensor.shape) == 2}
  fused: dict[str, list[str]] = collections.defaultdict(list)
  for name in matrices:
    owner, _, kind = name.rpartition(".")
    fused[f"{owner}.{FUSED.get(kind, kind)}"].append(name)
  out: dict[str, Form | str] = {}
  for names in fused.values():
    kinds = [matrices[name].form or matrices[name].name for name in names]
    known = [kind for kind in kinds if isinstance(kind, Form)]
    form = kinds[0]
    if len({*kinds}) > 1: form = "F32"
    if len({*kinds}) > 1 and len(known) == len(kinds):
      form = Form(8, min(kind.group for kind in known), any(kind.offsets for kind in known))
    out |= dict.fromkeys(names, form)
  return out


def quantization(modules: dict[str, Form | str]) -> dict[str, Any]:
  """What config.json says of the weights' forms, in compressed-tensors' words; nothing if none is quantized."""
  groups: dict[Form, list[str]] = collections.defaultdict(list)
  for name, form in modules.items():
    if isinstance(form, Form): groups[form].append(name)
  if not groups: return {}
  formats = {form.format for form in groups}
  described = [{"targets": names, "format": form.format, "weights": {
    "num_bits": form.bits, "type": "int", "symmetric": not form.offsets, "strategy": "group",
    "group_size": form.group}} for form, names in groups.items()]
  return {"quantization_config": {
    "quant_method": "compressed-tensors", "format": formats.pop() if len(formats) == 1 else "mixed-precision",
    "quantization_status": "compressed", "config_groups": {f"group_{i}": x for i, x in enumerate(described)},
    "ignore": [name for name, form in modules.items() if isinstance(form, str)]}}


def weights(path: pathlib.Path, tensors: dict[str, Tensor], modules: dict[str, Form | str]
            ) -> Iterator[tuple[str, np.ndarray]]:
  """The tensors of model.safetensors, one after the other."""
  for name, tensor in tensors.items():
    module = name.removesuffix(".weight")
    form = modules.get(module)
    data = tensor.read(path)
    if isinstance(form, Form): yield from ((f"{module}.{kind}", x) for kind, x in written(tensor.kind, data, form))
    else: yield name, numbers(tensor.kind, data) if form == "F32" else data


def write_safetensors(path: pathlib.Path, tensors: Iterator[tuple[str, np.ndarray]], room: int) -> None:
  """The format by hand, as it comes: safetensors' own writer wants all tensors at once, and numpy has no bfloat16.
  room: bytes for the header, a multiple of 8; spaces fill it."""
  header = {}
  with path.open("wb") as file:
    file.seek(8 + room)
    for name, array in tensors:
      start = file.tell() - 8 - room
      file.write(np.ascontiguousarray(array).data)
      header[name] = {"dtype": STORED[array.dtype.str[1:]], "shape": array.shape,
                      "data_offsets": [start, start + array.nbytes]}
    text = json.dumps(header).encode().ljust(room)
    assert len(text) == room
    file.seek(0)
    file.write(room.to_bytes(8, "little") + text)


# Its tokenizer

def byte_level(config: dict[str, Any]) -> bytes:
  """tokenizer.json of a byte-level BPE. config: what the file says of its tokenizer."""
  lib = optional("tokenizers", "hf", "a byte-level tokenizer")
  pre = config.get("pre", "default")
  tokens = config["tokens"]
  merges = [tuple(merge.split(" ")) for merge in config["merges"]]
  bpe = lib.Tokenizer(lib.models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=pre in WHOLE_WORDS))
  split = lib.pre_tokenizers.Split(lib.Regex(SPLITS[pre] or "(?!)"), "isolated")   # (?!): nowhere
  as_gpt2 = SPLITS[pre] in ("", r"\p{N}")
  bytes_of = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=as_gpt2)
  bpe.pre_tokenizer = lib.pre_tokenizers.Sequence([split, bytes_of])
  bpe.decoder = lib.decoders.ByteLevel()
  if pre == "qwen2": bpe.normalizer = lib.normalizers.NFC()   # as Qwen's own; llama.cpp has none
  kinds = config.get("token_type", [NORMAL] * len(tokens))
  for add, kind in ((bpe.add_special_tokens, CONTROL), (bpe.add_tokens, USER_DEFINED)):
    named = [token for token, k in zip(tokens, kinds, strict=True) if k == kind]
    add([lib.AddedToken(token, special=kind == CONTROL, normalized=False) for token in named])
  return bpe.to_str().encode()


def proto(*fields: tuple[int, Any]) -> bytes:
  """A message in protobuf's encoding, of fields' numbers and values."""
  def varint(n: int) -> bytes: return bytes([n & 127 | 128]) + varint(n >> 7) if n > 127 else bytes([n])
  def field(number: int, value: Any) -> bytes:
    if isinstance(value, float): return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int): return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value
  return b"".join(field(number, value) for number, value in fields)


def sentencepiece(config: dict[str, Any]) -> bytes:
  """tokenizer.model of a sentencepiece vocabulary, which merges by the pieces' scores. Numbers: those of the fields
  in sentencepiece_model.proto."""
  pieces = [*zip(config["tokens"], config["scores"], config["token_type"], strict=True)]
  out = [(1, proto((1, text.encode()), (2, score), (3, kind))) for text, score, kind in pieces]
  merged_by_score = 2
  trainer = proto((3, merged_by_score), (4, len(pieces)), (35, any(kind == BYTE for *_, kind in pieces)))
  spaces = proto((1, b"identity"), (3, bool(config.get("add_space_prefix", True))),
                 (4, bool(config.get("remove_extra_whitespaces", False))))
  made = proto(*out, (2, trainer), (3, spaces))
  SentencePieceProcessor(model_proto=made)   # it says what it does not take
  return made


def tokenizer(path: pathlib.Path, kv: dict[str, Any], vocab_size: int) -> dict[str, bytes]:
  """The tokenizer's files, by name. vocab_size: ids that the model has."""
  config = {name.split(".")[-1]: value for name, value in kv.items() if name.startswith("tokenizer.")}
  makers: dict[str, Any] = {"gpt2": ("tokenizer.json", byte_level, ("merges",)),
                            "llama": ("tokenizer.model", sentencepiece, ("scores", "token_type"))}
  kind = str(config.get("model"))
  pre = str(config.get("pre", "default"))
  def supported(key: str, value: str, known: Any) -> None:
    check(value in known, f"{path}: tokenizer.ggml.{key} {value} is not supported; supported: {', '.join(known)}: use "
          "the model's folder with safetensors")
  supported("model", kind, makers)
  if kind == "gpt2": supported("pre", pre, SPLITS)
  name, make, required = makers[kind]
  for key in ("tokens", *required): check(isinstance(config.get(key), list), f"{path} lacks tokenizer.ggml.{key}")
  tokens = config["tokens"]
  check(len(tokens) <= vocab_size, f"{path}: {len(tokens)} tokens; expected at most token_embd's {vocab_size} rows")
  if kind == "gpt2": optional("tokenizers", "hf", "a byte-level tokenizer")   # or this says what is missing
  says: dict[str, Any] = {"add_bos_token": kind == "llama" or pre in WHOLE_WORDS}
  says |= {k: config[k] for k in ("chat_template", "add_bos_token") if k in config}
  ids = {f"{n}_token": config[f"{n}_token_id"] for n in ("bos", "eos") if f"{n}_token_id" in config}
  try:
    says |= {n: tokens[i] for n, i in ids.items()}
    if kind == "llama":   # those that are text, but split it first
      own = [i for i, k in enumerate(config["token_type"]) if k == USER_DEFINED]
      says["added_tokens_decoder"] = {str(i): {"content": tokens[i], "special": False} for i in own}
    return {name: make(config), "tokenizer_config.json": json.dumps(says).encode()}
  except Exception as e:   # the libraries fail in many ways
    raise InputError(f"{path}: expected a vocabulary of the kind {kind} in tokenizer.ggml: {e}") from e


# The folder

def convert(path: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Write the folder, and return it. Raises ValueError, and leaves nothing behind, for a file that is no GGUF, or of an
  architecture, a tokenizer or a type of tensors that is not known, and for a folder that has something in it."""
  free = folder.is_dir() and not any(folder.iterdir()) or not os.path.lexists(folder)
  check(free, f"{folder} is there already: choose an empty folder, or a new one")
  kv, found = read(path)
  config, tensors = model(path, kv, found)
  modules = forms(tensors)
  files = tokenizer(path, kv, config["vocab_size"])
  files["config.json"] = json.dumps(config | quantization(modules), indent=2).encode()
  home = next(parent for parent in folder.absolute().parents if parent.is_dir())
  try:
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=home) as work:
      made = pathlib.Path(work) / "model"
      made.mkdir()
      for name, content in files.items(): (made / name).write_bytes(content)
      write_safetensors(made / "model.safetensors", weights(path, tensors, modules), 1024 * len(tensors))
      folder.parent.mkdir(parents=True, exist_ok=True)
      if folder.is_dir(): folder.rmdir()
      made.replace(folder)
  except OSError as e: raise InputError(f"{folder}: {e.strerror}") from e
  return folder


def folder_of(name: str | None) -> str | None:
  """What --model names, or, for a GGUF file, the folder that it was made into, once, in the user's cache folder."""
  path = pathlib.Path(name or "").expanduser()
  if path.suffix != ".gguf" or path.is_dir(): return name
  check(path.is_file(), f"model={name!r} is no file")
  state = path.stat()
  stamp = repr((__version__, str(path.resolve()), state.st_size, state.st_mtime_ns))
  cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
  folder = cache / "tinyvllm" / "gguf" / hashlib.sha256(stamp.encode()).hexdigest()[:12] / path.stem
  if folder.exists(): return str(folder)
  setup_logging()
  logger.info("converting %s, this once, to %s", path, folder)
  try: convert(path, folder)
  except ValueError:
    if not folder.exists(): raise   # else another process was faster
  return str(folder)


def main(argv: list[str]) -> int:
  """`tinyvllm convert`. Returns 0. Raises ValueError as convert does."""
  parser = argparse.ArgumentParser(prog="tinyvllm convert", description="Make a model's folder of a GGUF file, whose "
                                   "quantized weights keep their bits.")
  parser.add_argument("file", type=pathlib.Path, help="the GGUF file")
  parser.add_argument("folder", type=pathlib.Path, help="a new or an empty folder")
  args = parser.parse_args(argv)
  print(convert(args.file.expanduser(), args.folder.expanduser()))
  return 0
