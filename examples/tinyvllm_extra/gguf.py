"""Loads GGUF files (github.com/ggml-org/ggml, docs/gguf.md), which hold the config, the tokenizer and the weights.
Quantized weights keep their bits: q * scale + offset in groups of inputs, with scale and offset in float16."""
import dataclasses, itertools, math, mmap, os, pathlib, struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tinyvllm.config import check

from . import weights
from .gguf_tokenizer import make_tokenizer
from .huggingface import Tokenizer
from .quantization import Matrix, Quantized

# Metadata key without the architecture's prefix -> field of config.json. The first five are required
KEYS = {"embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
        "block_count": "num_hidden_layers", "attention.head_count": "num_attention_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim", "context_length": "max_position_embeddings", "rope.freq_base": "rope_theta",
        "attention.sliding_window": "sliding_window"}
REQUIRED = [*KEYS][:5]
# Mistral files have the architecture llama
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Component of a tensor name -> Hugging Face's name
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head", "blk": "model.layers",
         "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_output": "self_attn.o_proj",
         "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
         **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
         **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}}
LAYER_TENSORS = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]


class Format(NamedTuple):
  """The integer format of a quantized weight."""
  bits: int
  group_size: int    # inputs that share a scale
  has_offset: bool


class TensorType(NamedTuple):
  """The layout of a GGUF tensor type: a row is a sequence of blocks of `inputs` weights, each a numpy record of
  `fields`. q = low + 16 * high - zero_point."""
  name: str
  inputs: int
  fields: Any
  quant_format: Format | None = None   # None: not quantized
  zero_point: int = 0
  low: tuple[int, int] = (16, 4)    # arguments of `unpack_planes` for the field of this name
  high: tuple[int, int] = (1, 1)


K_SCALES = [("d", "<f2"), ("m", "<f2"), ("scales", "u1", 12)]
TYPES = {   # by GGUF type id. numpy has no bfloat16
  0: TensorType("F32", 1, "<f4"), 1: TensorType("F16", 1, "<f2"), 30: TensorType("BF16", 1, "<u2"),
  2: TensorType("Q4_0", 32, [("d", "<f2"), ("low", "u1", 16)], Format(4, 32, False), 8),
  3: TensorType("Q4_1", 32, [("d", "<f2"), ("m", "<f2"), ("low", "u1", 16)], Format(4, 32, True)),
  6: TensorType("Q5_0", 32, [("d", "<f2"), ("high", "u1", 4), ("low", "u1", 16)], Format(8, 32, False), 16),
  7: TensorType("Q5_1", 32, [("d", "<f2"), ("m", "<f2"), ("high", "u1", 4), ("low", "u1", 16)], Format(8, 32, True)),
  8: TensorType("Q8_0", 32, [("d", "<f2"), ("low", "u1", 32)], Format(8, 32, False), low=(32, 8)),
  12: TensorType("Q4_K", 256, [*K_SCALES, ("low", "u1", 128)], Format(4, 32, True), low=(32, 4)),
  13: TensorType("Q5_K", 256, [*K_SCALES, ("high", "u1", 32), ("low", "u1", 128)],
                  Format(8, 32, True), low=(32, 4), high=(32, 1)),
  14: TensorType("Q6_K", 256, [("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), ("d", "<f2")],
                  Format(8, 16, False), 32, (64, 4), (32, 2))}
OTHER_TYPES = dict(zip([9, 10, 11, *range(15, 30), 34, 35, 39], [
  "Q8_1", "Q2_K", "Q3_K", "Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",
  "I16", "I32", "I64", "F64", "IQ1_M", "TQ1_0", "TQ2_0", "MXFP4"], strict=True))


def unpack_planes(data: np.ndarray, width: int, bits: int) -> np.ndarray:
  """Unpack uint8, (..., n), to (..., n * 8 / bits): of every `width` bytes first their lowest `bits` bits, then the
  next ones."""
  shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
  planes = data.reshape(*data.shape[:-1], -1, 1, width) >> shifts
  planes &= np.uint8(2**bits - 1)
  return planes.reshape(*data.shape[:-1], -1)


def unpack_k_scales(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Unpack 12 bytes to 8 scales and 8 minima of 6 bits each. Bytes 0-3 and 4-7 hold the first four of each; their upper
  2 bits and the nibbles of bytes 8-11 form the last four."""
  scales, minima, nibbles = np.split(data, 3, -1)
  return (np.concatenate([scales & 63, nibbles & 15 | scales >> 2 & 48], -1),
          np.concatenate([minima & 63, nibbles >> 4 | minima >> 2 & 48], -1))


def decode(tensor_type: TensorType, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
  """Return q, (rows, inputs) int8, scale, (rows, groups) float32, and offset, like scale or None. blocks: (rows,
  blocks per row)."""
  rows = len(blocks)
  fields = blocks.dtype.names or ()
  q = unpack_planes(blocks["low"], *tensor_type.low)
  if "high" in fields: q |= unpack_planes(blocks["high"], *tensor_type.high) << np.uint8(4)
  q = q.view(np.int8).reshape(rows, -1)
  q -= np.int8(tensor_type.zero_point)
  scale = blocks["d"].astype(np.float32)[..., None]
  if "m" not in fields: return q, (scale * blocks["scales"] if "scales" in fields else scale).reshape(rows, -1), None
  offset = blocks["m"].astype(np.float32)[..., None]
  if "scales" in fields:
    scales, minima = unpack_k_scales(blocks["scales"])
    scale = scale * scales
    offset = -offset * minima
  return q, scale.reshape(rows, -1), offset.reshape(rows, -1)


@dataclasses.dataclass(frozen=True)
class StoredTensor(weights.StoredTensor):
  """A tensor in a GGUF file."""
  tensor_type: TensorType
  row_order: np.ndarray | None = None   # order of the rows in the model, if it differs

  nbytes = property(lambda self: math.prod(self.shape) // self.tensor_type.inputs * np.dtype(self.dtype).itemsize)

  def read(self) -> np.ndarray:
    """Return the tensor's values in its shape, or the blocks, (rows, blocks per row), of a quantized one."""
    shape = (*self.shape[:-1], self.shape[-1] // self.tensor_type.inputs)
    data = np.memmap(self.path, self.dtype, "c", self.start, shape)
    return data if self.row_order is None else data[self.row_order]

  def read_quantized(self, target: Format) -> Quantized:
    """Return the weight in this format: exact, except that scales and offsets are rounded to float16."""
    q, scale, offset = decode(self.tensor_type, self.read())
    repeats = q.shape[1] // target.group_size // scale.shape[1]   # a group of 32 becomes two of 16
    scale = scale.astype("<f2").repeat(repeats, 1)
    if target.bits == 4: q = (q if target.has_offset else q + np.int8(8)).view(np.uint8)
    if target.has_offset: offset = np.zeros_like(scale) if offset is None else offset.astype("<f2").repeat(repeats, 1)
    elif target.bits == 4: offset = -8 * scale
    return Quantized(q, scale, offset, np.arange(q.shape[1]))

  def read_float32(self) -> np.ndarray:
    """Return the weight, dequantized if necessary."""
    if not self.tensor_type.quant_format: return weights.to_float32(self.read())
    q, scale, offset = decode(self.tensor_type, self.read())
    return weights.dequantize(Quantized(q, scale, offset, np.arange(q.shape[1])), np.float32)


def common_format(types: Sequence[TensorType]) -> Format | str:
  """Return the format or dtype for matrices that are fused: their own if all have the same; int8 with the smallest
  group if all are quantized, which represents each exactly; else F32."""
  formats = [tensor_type.quant_format or tensor_type.name for tensor_type in types]
  quantized = [x for x in formats if isinstance(x, Format)]
  if len({*formats}) == 1: return formats[0]
  if len(quantized) < len(formats): return "F32"
  return Format(8, min(x.group_size for x in quantized), any(x.has_offset for x in quantized))


class HeaderReader(mmap.mmap):
  """Reads the values of a GGUF header in sequence."""
  STRING, ARRAY = 8, 9
  NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

  def number(self, code: str) -> Any: return struct.unpack("<" + code, self.read(struct.calcsize("<" + code)))[0]

  def string(self) -> str:
    size = self.number("Q")
    data = self.read(min(size, len(self)))
    if len(data) < size: raise EOFError("a string extends past the end of the file")
    return data.decode()

  def value(self, type_id: int, nested: bool = False) -> Any:
    if type_id == self.STRING: return self.string()
    if type_id != self.ARRAY or nested: return self.number(self.NUMBERS[type_id])
    element_type = self.number("I")
    return [self.value(element_type, nested=True) for _ in range(self.number("Q"))]


def read_header(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
  """Return a file's metadata and tensors. Raises InputError if it is not GGUF or is truncated."""
  check(path.is_file() and os.access(path, os.R_OK), f"model: {path} is not a readable file")
  size = path.stat().st_size
  check(size, f"model: {path} is empty: expected a GGUF file")
  with path.open("rb") as file: reader = HeaderReader(file.fileno(), 0, access=mmap.ACCESS_READ)
  check(reader.read(4) == b"GGUF", f"model: {path} is not a readable GGUF file: it must start with GGUF")
  metadata: dict[str, Any] = {}
  tensor_infos = []
  try:
    version = reader.number("I")
    check(version in (2, 3), f"model: {path} has GGUF version {version}; supported: 2, 3, little-endian")
    num_tensors = reader.number("Q")
    metadata |= {reader.string(): reader.value(reader.number("I")) for _ in range(reader.number("Q"))}
    for _ in range(num_tensors):
      name = reader.string()
      shape = [reader.number("Q") for _ in range(reader.number("I"))]
      tensor_infos.append((name, (*reversed(shape),), reader.number("I"), reader.number("Q")))
  except (EOFError, LookupError, UnicodeDecodeError, struct.error) as e:
    check(False, f"model: {path} is not a readable GGUF file or is truncated: at byte {reader.tell()} of {size}: {e}")
  alignment = metadata.get("general.alignment", 32)
  check(type(alignment) is int and alignment > 0, f"model: {path}: general.alignment={alignment!r} must be above 0")
  start = -(-reader.tell() // alignment) * alignment
  return metadata, {info[0]: locate_tensor(path, start, size, *info) for info in tensor_infos}


def locate_tensor(path: pathlib.Path, data_start: int, file_size: int, name: str, shape: tuple, type_id: int,
                  offset: int) -> StoredTensor:
  supported = ", ".join(x.name for x in TYPES.values())
  prefix = f"model: {path}: tensor {name}"
  check(type_id in TYPES, f"{prefix} has GGUF type {OTHER_TYPES.get(type_id, type_id)}; supported: {supported}")
  tensor_type = TYPES[type_id]
  tensor = StoredTensor(path, np.dtype(tensor_type.fields), shape, data_start + offset, tensor_type)
  min_axes = 2 if tensor_type.quant_format else 1
  is_valid = min_axes <= len(shape) <= 2 and math.prod(shape) and shape[-1] % tensor_type.inputs == 0
  check(is_valid, f"{prefix} has shape {[*shape]}; {tensor_type.name} needs {min_axes} or 2 axes, the last one a "
        f"multiple of {tensor_type.inputs}")
  end = tensor.start + tensor.nbytes
  check(end <= file_size, f"{prefix} ends at byte {end}, but the file has {file_size} bytes: it is truncated")
  return tensor


def read_config(path: pathlib.Path, metadata: dict[str, Any], tensors: dict[str, StoredTensor]) -> dict[str, Any]:
  """Return the content of an equivalent config.json. Raises InputError for an unsupported file."""
  arch = str(metadata.get("general.architecture"))
  num_files = metadata.get("split.count", 1)
  check(arch in ARCHITECTURES, f"model: {path} has architecture {arch}; supported: {', '.join(ARCHITECTURES)}")
  check(num_files == 1, f"model: {path} is one of {num_files} parts: merge them with llama-gguf-split --merge")
  config = {name: metadata[f"{arch}.{key}"] for key, name in KEYS.items() if metadata.get(f"{arch}.{key}")}
  for key in REQUIRED: check(KEYS[key] in config, f"model: {path} lacks {arch}.{key}")
  for name, value in config.items():
    value_type = float if name in ("rms_norm_eps", "rope_theta") else int
    text = f"model: {path}: {name}={str(value)[:40]}"
    check(type(value) is value_type and value > 0, f"{text} must be of type {value_type.__name__} and above 0")
    if value_type is float: config[name] = float(str(np.float32(value)))   # 1e-5, not its nearest float32
  layers = (f"blk.{i}.{name}.weight" for i in range(config["num_hidden_layers"]) for name in LAYER_TENSORS)
  for name in itertools.chain(["token_embd.weight", "output_norm.weight"], layers):
    check(name in tensors, f"model: {path}: tensor {name} is missing")
  head_dim = config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
  for key in ("rope.dimension_count", "attention.value_length"):
    value = metadata.get(f"{arch}.{key}", head_dim)
    check(value == head_dim, f"model: {path}: {arch}.{key}={value} must be {head_dim}, as the head size")
  scaling = f"{arch}.rope.scaling"
  if metadata.get(f"{scaling}.type", "none") != "none":
    factor = metadata.get(f"{scaling}.factor", 1.0)
    config["rope_scaling"] = {"rope_type": metadata[f"{scaling}.type"], "factor": factor}
  if "rope_freqs.weight" in tensors:   # llama3's scaling factors, computed by llama.cpp's converter
    factors = tensors["rope_freqs.weight"].read().tolist()
    config["rope_scaling"] = {"rope_type": "factors", "factors": factors}
  end_tokens = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
  return config | {
    "architectures": [ARCHITECTURES[arch]], "model_type": arch, "hidden_act": "silu",
    "vocab_size": tensors["token_embd.weight"].shape[0], "tie_word_embeddings": "output.weight" not in tensors,
    "attention_bias": "blk.0.attn_output.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    "eos_token_id": [token for token in end_tokens if token is not None]}


def rename(path: pathlib.Path, config: dict[str, Any], tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
  """Return the tensors under Hugging Face's names, with the rows of q and k in its order."""
  heads = config["num_attention_heads"]
  head_dim = config["head_dim"]
  permuted = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)}   # number of heads
  if config["model_type"] != "llama": permuted = {}
  renamed = {}
  for name, tensor in tensors.items():
    if name == "rope_freqs.weight": continue
    components = name.split(".")
    is_supported = len(components) > 1 and all(x in NAMES or x.isdecimal() for x in components[:-1])
    check(is_supported, f"model: {path}: tensor {name} is not supported; supported: {', '.join(NAMES)}")
    n = permuted.get(components[-2])
    if n:   # the two rows that RoPE rotates are adjacent in the file, but in different halves of a head here
      num_rows = tensor.shape[0]
      check(num_rows == n * head_dim, f"model: {path}: tensor {name} has {num_rows} rows; expected {n * head_dim}")
      tensor = dataclasses.replace(tensor, row_order=np.arange(num_rows).reshape(n, -1, 2).swapaxes(1, 2).ravel())
    renamed[".".join(NAMES.get(x, x) for x in components)] = tensor
  return renamed


class Checkpoint(weights.Checkpoint):
  """A GGUF file."""
  def __init__(self, path: pathlib.Path):
    self.path = path
    self.generation_config = {}
    self.metadata, tensors = read_header(path)
    self.hf_config = read_config(path, self.metadata, tensors)
    self.all_tensors = rename(path, self.hf_config, tensors)

  method = property(lambda self: "gguf" if any(x.tensor_type.quant_format for x in self.all_tensors.values()) else None)
  def stored_tensors(self) -> dict[str, Any]: return dict(self.all_tensors)
  def format_of(self, tensor: Any) -> str: return f"GGUF {tensor.tensor_type.name}"
  def tokenizer(self) -> Tokenizer: return make_tokenizer(self.path, self.metadata, self.hf_config["vocab_size"])

  def fused(self, shapes: dict[str, tuple[int, int]]) -> Sequence[Matrix]:
    """Read matrices in their `common_format`."""
    tensors: list[Any] = [self.take(f"{name}.weight", *shape) for name, shape in shapes.items()]
    common = common_format([tensor.tensor_type for tensor in tensors])
    if isinstance(common, Format): return [tensor.read_quantized(common) for tensor in tensors]
    return [tensor.read_float32() if common == "F32" else tensor.read() for tensor in tensors]
