"""Loads a model's weights, whatever the format of its files, one tensor at a time. Tensors keep the file's dtype on the
device if it is narrower than the compute dtype."""
import collections, dataclasses, errno, functools, json, math, pathlib, re, typing
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Tensor, dtypes, helpers
from tinygrad.dtype import DType

from tinyvllm import llama
from tinyvllm.backend import Linear, Module, Norm, renderer
from tinyvllm.config import JsonObject, check, logger, read_json
from tinyvllm_extra.kernels import buffers, parallel
from tinyvllm_extra.models.layers import LlamaVariant, VariantConfig, row_order
from tinyvllm_extra.models.matrices import E4M3, Matrix, Quantized, StoredWeights, is_small_float
from tinyvllm_extra.options import check_one_device
from tinyvllm_extra.text.huggingface import ChatTokenizer, load_tokenizer

from . import fit
from .quantization import (READERS, UNUSED, dequantize, describe, find_layouts, map_rows, pad_rows, quantize,
                           read_matrix, round_scales, split, stack, to_float32)

EXACT = (".gate", "_expert_gate", ".in_proj_b")   # matrices of routers and gates, which are never quantized at load
MATRICES = (".weight", ".qweight", ".weight_packed")
# language_model.model.X or, in newer checkpoints, model.language_model.X; the other tensors are for images
TEXT_TENSORS = re.compile(r"(?:model\.language_model\.|language_model\.model\.)(.*)|(?:language_model\.)?(lm_head.*)")
# numpy's dtypes by their names in the files. It has no bfloat16
FLOATS: dict[str, np.dtype] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
NUMBERS: dict[str, np.dtype] = {   # in quantized matrices
  "U8": np.dtype("u1"), "I8": np.dtype("i1"), "I32": np.dtype("<i4"), "I64": np.dtype("<i8"), "F8_E4M3": E4M3}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a file. Each read maps it anew, as the pages of one map of the file would stay in resident memory."""
  path: pathlib.Path
  dtype: np.dtype          # element, or block of a GGUF type
  shape: tuple[int, ...]
  start: int               # byte offset in the file
  convert: Callable[[np.ndarray], np.ndarray] = dataclasses.field(default=np.asarray, kw_only=True)   # see read

  nbytes = property(lambda self: math.prod(self.shape) * self.dtype.itemsize)

  T = property(lambda self: dataclasses.replace(   # the file stores rows as columns
    self, shape=self.shape[::-1], convert=lambda x: self.convert(x.reshape(self.shape)).T))

  # The bytes in the file
  def raw(self) -> np.ndarray: return np.memmap(self.path, np.uint8, "c", self.start, (self.nbytes,))

  def read(self) -> np.ndarray:
    """Return the tensor, or the blocks of a GGUF type, (rows, blocks per row), after `convert`."""
    return self.convert(self.raw().view(self.dtype).reshape(*self.shape[:-1], -1))

  def describe(self, config: JsonObject) -> str:
    """Return the format of a matrix, such as "awq int4, groups of 128". config: the quantization_config."""
    name = "bfloat16" if self.dtype == np.uint16 else self.dtype.name
    if "float" in name and self.shape[1] > 1: return name   # bitsandbytes may store its bytes as a column of floats
    is_native = supports_e4m3() if self.dtype == E4M3 else config.get("quant_method") != "bitsandbytes"
    return describe(config) + ("" if is_native else ", dequantized")

  def split(self, names: list[str]) -> dict[str, "StoredTensor"]:
    """Return a tensor for each name: equal parts of this one, without its first axis."""
    part = dataclasses.replace(self, shape=(math.prod(self.shape[:2]) // len(names), *self.shape[2:]))
    return {name: dataclasses.replace(part, start=self.start + i * part.nbytes) for i, name in enumerate(names)}


class FastCheckpoint(llama.Checkpoint, StoredWeights):
  """A folder of safetensors, quantized or not. Weights are split for several devices and quantized while they load. A
  module's `load` gets them in these steps: read, merge, order, pad, split, quantize, and place on the devices. A class
  for another format defines __init__, method, tokenizer, stored_tensors and read_matrices."""
  quantization: str | None = None    # LLM's option
  quantization_config = property(lambda self: self.hf_config.get("quantization_config") or {})
  method = property(lambda self: self.quantization_config.get("quant_method"))
  tensors: typing.Any                # those that no module has read yet, by the names of the model's modules
  take: typing.Any = llama.Checkpoint.read   # name, *shape -> StoredTensor: removes and returns a tensor
  adapter: dict[str, tuple[np.ndarray, np.ndarray]] = {}   # A and B of matrices to merge, see peft_files.py

  def tokenizer(self) -> ChatTokenizer: return load_tokenizer(self.path)

  def stored_tensors(self) -> Mapping[str, StoredTensor]:
    """Return all tensors of the files by name. Raises InputError for an unreadable file or an unsupported dtype."""
    index = read_json(self.path / "model.safetensors.index.json")
    files = {self.path / name for name in index.get("weight_map", {"": "model.safetensors"}).values()}
    supported = FLOATS | NUMBERS if self.method else FLOATS
    tensors = {name: x for file in files for name, x in read_safetensors(file, supported).items()
               if not name.startswith("mtp.")}   # else of layers that draft tokens
    if "embed_tokens.weight" in tensors: return {f"model.{name}": x for name, x in tensors.items()}   # Qwen3-Embedding
    if "text_config" not in self.hf_config: return tensors
    matches = {TEXT_TENSORS.fullmatch(name): x for name, x in tensors.items()}
    return {match[2] or f"model.{match[1]}": x for match, x in matches.items() if match}

  def read_matrices(self, shapes: dict[str, tuple[int, int]]) -> Sequence[Matrix]:
    """Read matrices, (out, in), whose rows are stacked in one weight. shapes: by module name."""
    return [READERS.get(self.method, read_matrix)(self, name, shape) for name, shape in shapes.items()]

  def describe(self) -> str:
    """Return the formats of the matrices in the files, the most common one first: "awq int4, groups of 128; lm_head
    float16". Raises InputError like `stored_tensors`, or for an unsupported quantization_config."""
    config = self.quantization_config
    find_layouts(config)
    names: dict[str, list[str]] = collections.defaultdict(list)   # by format
    for name, tensor in self.stored_tensors().items():
      if name.endswith(MATRICES) and len(tensor.shape) == 2: names[tensor.describe(config)].append(name.split(".")[-2])
    formats = sorted(names, key=lambda x: (-len(names[x]), x))
    return "; ".join(f"{', '.join(sorted({*names[x]}))} {x}" if i else x for i, x in enumerate(formats))

  def load(self, model: llama.Llama) -> None:
    names = [self.method] if self.method else [*fit.QUANTIZED]
    check(self.quantization in (None, *names), f"quantization={self.quantization!r} does not match the model in "
          f"{self.path}, which is {self.method or 'not quantized'}: use {', '.join(map(repr, names))} or leave it out")
    self.model = model
    self.layouts = find_layouts(self.quantization_config)
    self.tensors = {**self.stored_tensors()}
    if isinstance(model, LlamaVariant): self.tensors = model.arrange(self.tensors)
    self.dtype = np.float32 if model.dtype == dtypes.float32 else np.float16
    # The core's layers
    plain = [type(x).__name__ for x in model.modules() if isinstance(x, Linear | Norm) and type(x).load is Module.load]
    layers = f"{type(model.backend).__name__}'s {', '.join(dict.fromkeys(plain))}"
    if plain: check_one_device(model.devices, f": {layers} support one device")
    check(not plain or self.quantization not in fit.QUANTIZED, f"quantization={self.quantization!r} must be None: "
          f"{layers} have no int8 or int4")
    fit.check_memory(self, self.quantization)
    size = functools.partial(fit.checkpoint_bytes, self, self.quantization)
    if isinstance(model.devices, parallel.Stages): model.devices.place(model, size)
    try:
      for module in helpers.tqdm(model.modules(), desc="loading weights", disable=None): module.load(self)
    except (MemoryError, OSError) as e:
      check(isinstance(e, OSError) and e.errno != errno.ENOMEM, f"model: {self.path} does not load, as memory ran out: "
            "free some, use quantization='int4' (--quantization int4) or choose a smaller model")
      raise
    self.check_unused(self.tensors)
    check(not self.adapter, f"merge_lora: {next(iter(self.adapter), '')} is not a matrix of {self.path}")

  def array(self, name: str, *shape: int) -> np.ndarray:
    """Take a tensor as a memory map, bfloat16 as uint16. Add the model's offset to the weight of a norm."""
    x = self.take(name, *shape).read()
    config = self.model.config
    offset = config.norm_offset if isinstance(config, VariantConfig) and name.endswith(config.offset_norms) else None
    return to_float32(x) + np.float32(offset) if offset else x

  def check_unused(self, names: Iterable[str]) -> None:
    """Like the core's, but quantized checkpoints may also hold UNUSED tensors, and zero biases for a model without."""
    def is_redundant(x): return x.endswith(UNUSED) or x.endswith(".bias") and not self.tensors[x].read().any()
    if "lm_head.weight" in names and self.model.config.tie_word_embeddings:
      logger.warning(f"{self.path}: lm_head.weight is not used, because config.json has tie_word_embeddings")
    super().check_unused([name for name in names if not (self.method and is_redundant(name))])

  def read(self, name: str, *shape: int) -> Tensor:
    """Read a tensor for a core module, dequantized."""
    module, _, suffix = name.rpartition(".")
    is_matrix = suffix == "weight" and len(shape) == 2
    x = self.array(name, *shape) if not is_matrix else self.merged(
      module, self.read_matrices({module: (shape[0], shape[1])})[0])
    return Tensor(to_float32(dequantize(self.ordered(module, x), self.dtype)))   # exact, and cast by the module

  def ordered(self, name: str, x: Matrix) -> Matrix:
    """Return a matrix or a bias with its rows in the model's order."""
    order = row_order(self.model.config, name, len(x.q if isinstance(x, Quantized) else x))
    return x if order is None else map_rows(lambda rows: rows[order], x)

  def merged(self, name: str, w: Matrix) -> Matrix:
    """Return a matrix with its adapter, if it has one."""
    if name not in self.adapter: return w
    a, b = self.adapter.pop(name)
    is_plain = not isinstance(w, Quantized) and self.method != "gguf"   # which has other orders of rows
    check(is_plain, f"merge_lora: {name} is quantized or GGUF in {self.path}: use the original safetensors")
    shape = len(b), a.shape[1]
    check(isinstance(w, np.ndarray) and w.shape == shape, f"merge_lora: {name} is {list(shape)}, of another model")
    return to_float32(np.asarray(w)) + b @ a

  def vectors(self, module: Module, suffix: str) -> list[np.ndarray]:
    """Read a norm's weight or a bias and return each device's shard. The first device adds the bias of partial sums."""
    num_devices = len(self.model.devices.shards)
    axis = module.axis if isinstance(module, Linear) else None
    count = num_devices if axis == 0 else 1
    whole = {name: self.array(f"{name}.{suffix}", n * count) for name, n in module.sources.items()}
    splits = [np.split(np.asarray(self.ordered(name, x)), count) for name, x in whole.items()]
    shards = [np.asarray(stack(parts)) for parts in zip(*splits, strict=True)]
    return shards + [np.zeros_like(shards[0]) if axis == 1 else shards[0]] * (num_devices - count)

  def matrices(self, module: Linear) -> list[Matrix]:
    """Read the matrix of a Linear and return each device's shard, quantized as requested, except embeddings."""
    count = len(self.model.devices.shards)
    in_layer = all(module is not x for x in vars(self.model).values())   # else a row for each token, and padding
    rows = {name: n * (count if module.axis == 0 else 1) for name, n in module.sources.items()}
    columns = module.weight.max_numel() // module.out_features * (count if module.axis == 1 else 1)
    limit = self.hf_config["vocab_size"]
    whole = self.read_matrices({name: (n if in_layer else min(n, limit), columns) for name, n in rows.items()})
    whole = [self.ordered(name, self.merged(name, w)) for name, w in zip(rows, whole, strict=True)]
    if not supports_e4m3(): whole = [dequantize(w, self.dtype) if is_small_float(w) else w for w in whole]
    whole = [pad_rows(w, n) for w, n in zip(whole, rows.values(), strict=True)]
    splits = [split(w, count, module.axis, self.dtype) for w in whole]
    shards = [self.quantized(module, stack(parts), in_layer) for parts in zip(*splits, strict=True)]
    return [dequantize(w, self.dtype) for w in shards] if module is self.model.embed_tokens else shards

  def quantized(self, module: Linear, w: Matrix, in_layer: bool) -> Matrix:
    """Return a shard as requested by LLM's option, with scales that kernels read fast."""
    if self.activations == "fp8" and isinstance(w, Quantized):
      check(w.q.dtype == E4M3 and w.scale.shape[1] == 1 and w.q.shape[1] % 128 == 0, "activation_quantization='fp8' "
            "needs fp8 weights with one scale per output and a multiple of 128 inputs, but "
            f"{', '.join(module.sources)} has {w.scale.shape[1]} scales and {w.q.shape[1]} inputs: use 'auto'")
    if self.dtype == np.float16 and self.method in ("gguf", "compressed-tensors"): w = round_scales(w)
    bits = {"int8": 8, "int4": 4}.get(self.quantization or "")
    is_exact = any(name.endswith(EXACT) for name in module.sources)
    if bits is None or not in_layer or is_exact or isinstance(w, Quantized): return w
    return quantize(w, 8 if w.shape[1] % 8 else bits)   # int4 is stored in words of eight

  def place(self, module: Module, arrays: Sequence[np.ndarray], dtype: DType | None = None) -> Tensor:
    """Copy each array to its device, in `dtype` or in its own if `dtype` is wider or None. Matrices in float32 get the
    backend's dtype for weights, if it has one."""
    stored_dtype = getattr(self.model.backend, "stored_dtype", "")
    if dtype == dtypes.float32 and arrays[0].ndim > 1: dtype = getattr(dtypes, stored_dtype, dtype)
    tensors = []
    devices = self.model.devices.shards if len(arrays) > 1 else (str(module.weight.device),)
    for array, device in zip(arrays, devices, strict=True):
      tensor = to_device(np.ascontiguousarray(array), dtype, device)
      size = max(array.nbytes, tensor.nbytes())   # the array is copied before it is cast
      limit = self.model.backend.memory.largest_tensor()
      check(size <= limit, f"model: {self.path}: {', '.join(module.sources)}: {size} bytes, but the device's "
            f"limit for a tensor is {limit}: choose another device, such as DEV=CPU")
      tensors.append(tensor.realize())
    return tensors[0] if len(tensors) == 1 else buffers.stack_shards(tensors)


def read_safetensors(path: pathlib.Path, supported: dict[str, np.dtype]) -> dict[str, StoredTensor]:
  """Return the tensors of a file by name. supported: dtypes by their names in the file. Raises InputError for another
  dtype or an unreadable file."""
  try: safe_open(path, "np")   # validates the header
  except (OSError, SafetensorError) as e: check(False, f"model: {path} is missing, damaged or truncated: {e}")
  size = int(np.fromfile(path, "<u8", 1)[0])
  header = json.loads(np.fromfile(path, "u1", size, offset=8).tobytes())
  header.pop("__metadata__", None)
  for name, x in header.items():
    check(x["dtype"] in supported, f"model: {path}: tensor {name} is {x['dtype']}; supported: {', '.join(supported)}")
  return {name: StoredTensor(path, supported[x["dtype"]], tuple(x["shape"]), 8 + size + x["data_offsets"][0])
          for name, x in header.items()}


def supports_e4m3() -> bool:
  """Return whether kernels can read e4m3, which they convert to float16. Otherwise it is dequantized while loading."""
  return dtypes.half in renderer().supported_dtypes()


def to_device(array: np.ndarray, dtype: DType | None, device: str) -> Tensor:
  own = buffers.dtype_of(array)
  if dtype is None or dtype == own or array.itemsize < dtype.itemsize and own in renderer().supported_dtypes():
    return buffers.new_tensor(array, device)
  # On the host, since the device would keep both
  if own == dtypes.bfloat16 or dtype == dtypes.float32: array = to_float32(array)
  return Tensor(array, device=device).cast(dtype).contiguous()
