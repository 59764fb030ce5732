"""Loads GGUF files (github.com/ggml-org/ggml, docs/gguf.md): the config, the tokenizer and the weights come from one
file. A quantized weight keeps its bits: q * scale + offset in groups of inputs, with scale and offset in float16."""
import dataclasses, itertools, math, mmap, os, pathlib, struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tinyvllm.config import check

from . import weights
from .gguf_tokenizer import make_tokenizer
from .huggingface import Tokenizer
from .quantization import Matrix, Quantized

# Keys of the metadata after the architecture's name -> config.json. The first five are required
KEYS = {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim", "context_length": "max_position_embeddings", "rope.freq_base": "rope_theta",
        "attention.sliding_window": "sliding_window"}
REQUIRED = [*KEYS][:5]
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Parts of tensor names -> Hugging Face's. Mistral's files have the architecture llama
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "blk": "model.layers",
         "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
         "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
         **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}}
IN_LAYER = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]


class Form(NamedTuple):
  """The numbers that a quantized weight is kept as."""
  bits: int
  group: int      # inputs that share a scale
  offsets: bool


class Type(NamedTuple):
  """The layout of a tensor: each row is a sequence of blocks of `inputs` numbers, with `fields`. q is `low`
  plus 16 times `high`, whose bit planes lie as `planes` reads them, minus `zero`."""
  name: str
  inputs: int
  fields: Any
  form: Form | None = None   # None: not quantized
  zero: int = 0
  low: tuple[int, int] = (16, 4)    # arguments of `planes`
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


def planes(data: np.ndarray, width: int, bits: int) -> np.ndarray:
  """(..., n) bytes to (..., n * 8 / bits) numbers: for each `width` bytes the lowest bits of all, then the next, ..."""
  shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
  spread = data.reshape(*data.shape[:-1], -1, 1, width) >> shifts
  spread &= np.uint8(2**bits - 1)
  return spread.reshape(*data.shape[:-1], -1)


def k_scales(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The 8 scales and 8 minima, of 6 bits each, in 12 bytes: the first four of each are the lower bits of a byte, whose
  upper bits belong to the other four; the last 4 bytes hold the lower bits of those."""
  scales, minima, rest = np.split(data, 3, -1)
  return (np.concatenate([scales & 63, rest & 15 | scales >> 2 & 48], -1),
          np.concatenate([minima & 63, rest >> 4 | minima >> 2 & 48], -1))


def decode(tensor_type: Type, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """q, (rows, inputs) int8, scale, (rows, groups) float32, and offset, likewise or None. blocks: (rows, blocks)."""
  rows = len(blocks)
  fields = blocks.dtype.names or ()
  q = planes(blocks["low"], *tensor_type.low)
  if "high" in fields: q |= planes(blocks["high"], *tensor_type.high) << np.uint8(4)
  q = q.view(np.int8).reshape(rows, -1)
  q -= np.int8(tensor_type.zero)
  scale = blocks["d"].astype(np.float32)[..., None]
  if "m" not in fields: return q, (scale * blocks["scales"] if "scales" in fields else scale).reshape(rows, -1), None
  offset = blocks["m"].astype(np.float32)[..., None]
  if "scales" in fields:
    scales, minima = k_scales(blocks["scales"])
    scale = scale * scales
    offset = -offset * minima
  return q, scale.reshape(rows, -1), offset.reshape(rows, -1)


@dataclasses.dataclass(frozen=True)
class Stored(weights.Stored):
  """A tensor in a GGUF file."""
  tensor_type: Type
  rows: np.ndarray | None = None   # their order in the model, if it differs

  nbytes = property(lambda self: math.prod(self.shape) // self.tensor_type.inputs * np.dtype(self.dtype).itemsize)

  def read(self) -> np.ndarray:
    """Its numbers in their shape; blocks, (rows, blocks), if it is quantized."""
    shape = (*self.shape[:-1], self.shape[-1] // self.tensor_type.inputs)
    data = np.memmap(self.path, self.dtype, "c", self.start, shape)
    return data if self.rows is None else data[self.rows]

  def quantized(self, form: Form) -> Quantized:
    """A form that holds the weight exactly, except that scales and offsets are rounded to float16."""
    q, scale, offset = decode(self.tensor_type, self.read())
    times = q.shape[1] // form.group // scale.shape[1]   # a group of 32 becomes two of 16
    scale = scale.astype("<f2").repeat(times, 1)
    if form.bits == 4: q = (q if form.offsets else q + np.int8(8)).view(np.uint8)
    if form.offsets: offset = np.zeros_like(scale) if offset is None else offset.astype("<f2").repeat(times, 1)
    elif form.bits == 4: offset = -8 * scale
    return Quantized(q, scale, offset, np.arange(q.shape[1]))

  def numbers(self) -> np.ndarray:
    """The weight in float32."""
    if not self.tensor_type.form: return weights.to_float32(self.read())
    q, scale, offset = decode(self.tensor_type, self.read())
    return weights.dequantize(Quantized(q, scale, offset, np.arange(q.shape[1])), np.float32)


def shared_form(types: Sequence[Type]) -> Form | str:
  """How to keep matrices that are fused: in their form or dtype if they have the same; if all are quantized in 8 bits
  by the smallest group, which holds any of them exactly; else in float32."""
  forms = [tensor_type.form or tensor_type.name for tensor_type in types]
  quantized = [form for form in forms if isinstance(form, Form)]
  if len({*forms}) == 1: return forms[0]
  if len(quantized) < len(forms): return "F32"
  return Form(8, min(form.group for form in quantized), any(form.offsets for form in quantized))


class Reader(mmap.mmap):
  """Reads the header of a file from front to end."""
  STRING, ARRAY = 8, 9
  NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

  def number(self, form: str) -> Any: return struct.unpack("<" + form, self.read(struct.calcsize("<" + form)))[0]

  def text(self) -> str:
    size = self.number("Q")
    data = self.read(min(size, len(self)))
    if len(data) < size: raise EOFError("a string goes beyond the end of the file")
    return data.decode()

  def value(self, type_id: int, nested: bool = False) -> Any:
    if type_id == self.STRING: return self.text()
    if type_id != self.ARRAY or nested: return self.number(self.NUMBERS[type_id])
    element = self.number("I")
    return [self.value(element, nested=True) for _ in range(self.number("Q"))]


def read_header(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, Stored]]:
  """The metadata and the tensors of a file. Raises InputError for one that is not GGUF, or is cut short."""
  check(path.is_file() and os.access(path, os.R_OK), f"model: {path} is no file that can be read")
  size = path.stat().st_size
  check(size, f"model: {path} is empty: expected a GGUF file")
  with path.open("rb") as file: reader = Reader(file.fileno(), 0, access=mmap.ACCESS_READ)
  check(reader.read(4) == b"GGUF", f"model: {path} is not a readable GGUF file: it does not begin with GGUF")
  metadata: dict[str, Any] = {}
  entries = []
  try:
    version = reader.number("I")
    check(version in (2, 3), f"model: {path} is GGUF of version {version}; supported: 2, 3, little-endian")
    count = reader.number("Q")
    metadata |= {reader.text(): reader.value(reader.number("I")) for _ in range(reader.number("Q"))}
    for _ in range(count):
      name = reader.text()
      sizes = [reader.number("Q") for _ in range(reader.number("I"))]
      entries.append((name, (*reversed(sizes),), reader.number("I"), reader.number("Q")))
  except (EOFError, LookupError, UnicodeDecodeError, struct.error) as e:
    check(False, f"model: {path} is not a readable GGUF file, or cut short: at byte {reader.tell()} of {size}: {e}")
  alignment = metadata.get("general.alignment", 32)
  valid = type(alignment) is int and alignment > 0
  check(valid, f"model: {path}: general.alignment={alignment!r}; expected a power of two")
  start = -(-reader.tell() // alignment) * alignment
  return metadata, {entry[0]: make_stored(path, start, size, *entry) for entry in entries}


def make_stored(path: pathlib.Path, start: int, size: int, name: str, shape: tuple, number: int, offset: int) -> Stored:
  supported = ", ".join(x.name for x in TYPES.values())
  text = f"model: {path}: tensor {name}"
  check(number in TYPES, f"{text} is of GGUF type {OTHER_TYPES.get(number, number)}; supported: {supported}")
  tensor_type = TYPES[number]
  stored = Stored(path, np.dtype(tensor_type.fields), shape, start + offset, tensor_type)
  least = 2 if tensor_type.form else 1
  whole = least <= len(shape) <= 2 and math.prod(shape) and shape[-1] % tensor_type.inputs == 0
  check(whole, f"{text} has the shape {[*shape]}; expected {least} or 2 axes, the last a multiple of "
        f"{tensor_type.inputs}, as {tensor_type.name} requires")
  end = stored.start + stored.nbytes
  check(end <= size, f"{text} should end at byte {end}, but the file has {size}: it is cut short")
  return stored


def read_config(path: pathlib.Path, metadata: dict[str, Any], tensors: dict[str, Stored]) -> dict[str, Any]:
  """The content of config.json. Raises InputError for an unsupported file."""
  arch = str(metadata.get("general.architecture"))
  parts = metadata.get("split.count", 1)
  supported = ", ".join(ARCHITECTURES)
  check(arch in ARCHITECTURES, f"model: {path}: GGUF architecture {arch} is not supported; supported: {supported}")
  check(parts == 1, f"model: {path} is one of {parts} parts; expected one file: llama-gguf-split --merge makes it")
  config = {name: metadata[f"{arch}.{key}"] for key, name in KEYS.items() if metadata.get(f"{arch}.{key}")}
  for key in REQUIRED: check(KEYS[key] in config, f"model: {path} lacks {arch}.{key}")
  for name, value in config.items():
    value_type = float if name in ("rms_norm_eps", "rope_theta") else int
    text = f"model: {path}: {name}={str(value)[:40]}"
    check(type(value) is value_type and value > 0, f"{text}; expected one {value_type.__name__} above 0")
    if value_type is float: config[name] = float(str(np.float32(value)))   # 1e-5, not the float32 nearest to it
  layers = (f"blk.{i}.{name}.weight" for i in range(config["num_hidden_layers"]) for name in IN_LAYER)
  for name in itertools.chain(["token_embd.weight", "output_norm.weight"], layers):
    check(name in tensors, f"model: {path}: tensor {name} is missing")
  width = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
  for key in ("rope.dimension_count", "attention.value_length"):
    value = metadata.get(f"{arch}.{key}", width)
    check(value == width, f"model: {path}: {arch}.{key}={value}; expected {width}")
  scaling = f"{arch}.rope.scaling"
  if metadata.get(f"{scaling}.type", "none") != "none":
    factor = metadata.get(f"{scaling}.factor", 1.0)
    config["rope_scaling"] = {"rope_type": metadata[f"{scaling}.type"], "factor": factor}
  if "rope_freqs.weight" in tensors:   # llama3's scaling, evaluated by llama.cpp's converter
    factors = tensors["rope_freqs.weight"].read().tolist()
    config["rope_scaling"] = {"rope_type": "factors", "factors": factors}
  end_tokens = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
  return config | {
    "architectures": [ARCHITECTURES[arch]], "model_type": arch, "hidden_act": "silu",
    "vocab_size": tensors["token_embd.weight"].shape[0], "tie_word_embeddings": "output.weight" not in tensors,
    "attention_bias": "blk.0.attn_output.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    "eos_token_id": [token for token in end_tokens if token is not None]}


def rename(path: pathlib.Path, config: dict[str, Any], tensors: dict[str, Stored]) -> dict[str, Stored]:
  """The tensors under Hugging Face's names, with the rows of q and k in its order."""
  heads = config["num_attention_heads"]
  width = config["head_dim"]
  permuted = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)}
  if config["model_type"] != "llama": permuted = {}
  renamed = {}
  for name, tensor in tensors.items():
    if name == "rope_freqs.weight": continue
    parts = name.split(".")
    is_known = len(parts) > 1 and all(part in NAMES or part.isdecimal() for part in parts[:-1])
    check(is_known, f"model: {path}: tensor {name} is not known; known: {', '.join(NAMES)}")
    n = permuted.get(parts[-2])
    if n:   # RoPE's pairs of rows are neighbors in the file, and in different halves of a head here
      rows = tensor.shape[0]
      check(rows == n * width, f"model: {path}: tensor {name} has {rows} rows; expected {n * width}")
      tensor = dataclasses.replace(tensor, rows=np.arange(rows).reshape(n, -1, 2).swapaxes(1, 2).ravel())
    renamed[".".join(NAMES.get(part, part) for part in parts)] = tensor
  return renamed


class Checkpoint(weights.Checkpoint):
  """A GGUF file."""
  def __init__(self, path: pathlib.Path):
    self.path = path
    self.generation_config = {}
    self.metadata, tensors = read_header(path)
    self.hf_config = read_config(path, self.metadata, tensors)
    self.all_tensors = rename(path, self.hf_config, tensors)

  method = property(lambda self: "gguf" if any(x.tensor_type.form for x in self.all_tensors.values()) else None)
  def stored(self) -> dict[str, Any]: return dict(self.all_tensors)
  def tokenizer(self) -> Tokenizer: return make_tokenizer(self.path, self.metadata, self.hf_config["vocab_size"])

  def fused(self, shapes: dict[str, tuple[int, int]]) -> Sequence[Matrix]:
    """Read matrices, which `shared_form` unifies."""
    tensors: list[Any] = [self.take(f"{name}.weight", *shape) for name, shape in shapes.items()]
    form = shared_form([tensor.tensor_type for tensor in tensors])
    if isinstance(form, Form): return [tensor.quantized(form) for tensor in tensors]
    return [tensor.numbers() if form == "F32" else tensor.read() for tensor in tensors]
