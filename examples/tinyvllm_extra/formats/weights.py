"""Loads weights from safetensors, sharded or not, one tensor at a time. Tensors keep the file's dtype on the device if
it is narrower than the compute dtype. A module's `load` reads its tensors from a Checkpoint."""
import collections, dataclasses, errno, json, math, pathlib, re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Tensor, dtypes, helpers
from tinygrad.dtype import DType

from tinyvllm import llama
from tinyvllm.backend import Module, renderer
from tinyvllm.config import check, logger, read_json
from tinyvllm_extra.kernels.quantized import E4M3, Matrix, Quantized, is_small_float
from tinyvllm_extra.kernels.shards import stack as stack_shards
from tinyvllm_extra.kernels.stored_weights import StoredWeights
from tinyvllm_extra.models.layers import LlamaVariant, VariantConfig, row_order
from tinyvllm_extra.models.table import text_config
from tinyvllm_extra.options import check_one_device
from tinyvllm_extra.text.huggingface import ChatTokenizer, load_tokenizer

from . import fit
from .float_formats import DEQUANTIZED, READERS, UNUSED, read_stacked
from .quantization import (concatenate, dequantize, describe, find_layouts, pad_rows, quantize, read_matrix,
                           round_scales, split, stack, to_float32)

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}   # numpy has no bfloat16
QUANTIZED = {"U8": np.uint8, "I8": np.int8, "I32": np.int32, "I64": np.int64, "F8_E4M3": E4M3}   # in quantized matrices
MATRICES = (".weight", ".qweight", ".weight_packed")


@dataclasses.dataclass(frozen=True)
class StoredTensor:
  """A tensor in a file. Each read maps it anew, as the pages of one map of the file would stay in resident memory."""
  path: pathlib.Path
  dtype: Any
  shape: tuple[int, ...]
  start: int               # byte offset in the file
  is_transposed: bool = dataclasses.field(default=False, kw_only=True)   # the file stores rows as columns

  nbytes = property(lambda self: math.prod(self.shape) * np.dtype(self.dtype).itemsize)

  T = property(lambda self: dataclasses.replace(self, shape=self.shape[::-1], is_transposed=not self.is_transposed))

  def read(self) -> np.ndarray:
    if self.is_transposed: return self.T.read().T
    return np.memmap(self.path, self.dtype, "c", self.start, self.shape)
  def raw(self) -> np.ndarray: return np.memmap(self.path, np.uint8, "c", self.start, (self.nbytes,))


class SafetensorsCheckpoint(StoredWeights, llama.Checkpoint):
  """A folder of safetensors, quantized or not."""
  tensors: dict[str, Any]   # name -> StoredTensor that no module has read yet
  quantization_config = property(lambda self: self.hf_config.get("quantization_config") or {})
  method = property(lambda self: self.quantization_config.get("quant_method"))   # quantization method, or None

  def __init__(self, path: pathlib.Path, quantization: str | None = None):
    super().__init__(path)
    self.hf_config = text_config(self.hf_config)
    self.quantization = quantization   # LLM's option

  def tokenizer(self) -> ChatTokenizer: return load_tokenizer(self.path)

  def stored_tensors(self) -> dict[str, Any]:
    """Return all tensors of the files by name. Raises InputError for an unreadable file or an unsupported dtype."""
    supported = DTYPES | QUANTIZED if self.method else DTYPES
    index = read_json(self.path / "model.safetensors.index.json")
    tensors = {}
    for file in {self.path / name for name in index.get("weight_map", {"": "model.safetensors"}).values()}:
      try: safe_open(file, "np")   # validates the file, but cannot read bfloat16
      except (OSError, SafetensorError) as e: check(False, f"model: {file} is missing, damaged or truncated: {e}")
      size = int(np.fromfile(file, "<u8", 1)[0])
      header = json.loads(bytes(np.fromfile(file, np.uint8, size, offset=8)))
      header.pop("__metadata__", None)
      for name, info in header.items():
        dtype = info["dtype"]
        check(dtype in supported, f"model: {file}: tensor {name} is {dtype}; supported: {', '.join(supported)}")
        shape = tuple(info["shape"])
        if "experts." in name:   # gpt-oss: all experts in one tensor
          name = re.sub(r"(_proj)(?:_(bias|blocks|scales))?$", lambda x: f"{x[1]}.{x[2] or 'weight'}", name)
          if name.endswith(".bias"): shape = math.prod(shape),
        tensors[name] = StoredTensor(file, supported[dtype], shape, 8 + size + info["data_offsets"][0])
    if "embed_tokens.weight" in tensors: return {f"model.{name}": x for name, x in tensors.items()}   # Qwen3-Embedding
    if "text_config" not in self.hf_config: return tensors
    # language_model.model.X or, in newer checkpoints, model.language_model.X; the other tensors are for images
    pattern = re.compile(r"(?:model\.language_model\.|language_model\.model\.)(.*)|(?:language_model\.)?(lm_head.*)")
    matches = {pattern.fullmatch(name): x for name, x in tensors.items()}
    return {match[2] or f"model.{match[1]}": x for match, x in matches.items() if match}

  def fingerprint_pieces(self) -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray]]:
    """Yield name, dtype, shape and bytes, as a memory map, of each tensor, sorted by name."""
    for name, tensor in sorted(self.stored_tensors().items()):
      yield name, np.dtype(tensor.dtype).str, tensor.shape, tensor.raw()

  def describe(self) -> str:
    """Return the formats of the matrices in the files, the most common one first: "awq int4, groups of 128; lm_head
    float16". Raises InputError like `stored_tensors`, or for an unsupported quantization_config."""
    find_layouts(self.quantization_config)
    names: dict[str, list[str]] = collections.defaultdict(list)   # by format
    for name, tensor in self.stored_tensors().items():
      if name.endswith(MATRICES) and len(tensor.shape) == 2: names[self.format_of(tensor)].append(name.split(".")[-2])
    formats = sorted(names, key=lambda x: (-len(names[x]), x))
    return "; ".join(f"{', '.join(sorted({*names[x]}))} {x}" if i else x for i, x in enumerate(formats))

  def format_of(self, tensor: Any) -> str:
    dtype = np.dtype(tensor.dtype)
    name = "bfloat16" if dtype == np.uint16 else dtype.name
    if "float" in name and tensor.shape[1] > 1: return name   # bitsandbytes may store its bytes as a column of floats
    is_native = supports_e4m3() if dtype == E4M3 else self.method not in DEQUANTIZED
    return describe(self.quantization_config) + ("" if is_native else ", dequantized")

  def load(self, model: llama.Llama) -> None:
    quantization = self.quantization
    self.layouts = find_layouts(self.quantization_config)
    self.bits = {"int8": 8, "int4": 4}.get(quantization or "")
    names = [self.method] if self.method else ["int8", "int4"]
    check(quantization in (None, *names), f"quantization={quantization!r} does not match the model in {self.path}, "
          f"which is {self.method or 'not quantized'}: use {', '.join(map(repr, names))} or leave it out")
    self.model = model
    self.num_devices = count = len(model.devices.names)
    tensors = self.stored_tensors()
    self.tensors = model.arrange(tensors) if isinstance(model, LlamaVariant) else tensors
    self.dtype = np.float32 if model.dtype == dtypes.float32 else np.float16   # dtype to dequantize to
    plain = [type(x).__name__ for x in model.modules() if type(x).load is Module.load]   # the core's modules
    layers = f"{type(model.backend).__name__}'s {', '.join(dict.fromkeys(plain))}"
    if plain: check_one_device(count, f": {layers} support one device")
    check(not plain or not self.bits, f"quantization={quantization!r} must be None: {layers} have no int8 or int4")
    fit.check_memory(self, quantization)
    try:
      for module in helpers.tqdm(model.modules(), desc="loading weights", disable=None): module.load(self)
    except (MemoryError, OSError) as e:
      check(isinstance(e, OSError) and e.errno != errno.ENOMEM, f"model: {self.path} does not load, as memory ran out: "
            "free some, use quantization='int4' (--quantization int4) or choose a smaller model")
      raise
    self.check_unused(self.tensors)

  def check_unused(self, names: Iterable[str]) -> None:
    """Like the core's, but quantized checkpoints may also hold UNUSED tensors, and zero biases for a model without."""
    def is_redundant(name: str) -> bool:
      return name.endswith(UNUSED) or name.endswith(".bias") and not self.tensors[name].read().any()
    if "lm_head.weight" in names and self.model.config.tie_word_embeddings:
      logger.warning(f"{self.path}: lm_head.weight is not used, because config.json has tie_word_embeddings")
    super().check_unused([name for name in names if not (self.method and is_redundant(name))])

  # Called by the `load` method of modules

  def take(self, name: str, *shape: int) -> Any:
    """Remove and return the StoredTensor of this name, which must have this shape."""
    return super().read(name, *shape)

  def array(self, name: str, *shape: int) -> np.ndarray:
    """Return a tensor as a memory map, bfloat16 as uint16. Add the model's offset to the weight of a norm."""
    x = self.take(name, *shape).read()
    config = self.model.config
    offset = config.norm_offset if isinstance(config, VariantConfig) and name.endswith("norm.weight") else None
    return to_float32(x) + np.float32(offset) if offset else x

  def fused(self, shapes: dict[str, tuple[int, int]]) -> Sequence[Matrix]:
    """Read matrices, (out, in), whose rows are stacked in one weight. shapes: by module name."""
    def read(name: str, shape: tuple[int, int]) -> Matrix:
      matrix = READERS[self.method](self, name, shape) if self.method in READERS else read_stacked(self, name, shape)
      if matrix is not None: return matrix
      return read_matrix(name, shape, self.layouts, self.tensors, self.array, self.quantization_config)
    return [read(name, shape) for name, shape in shapes.items()]

  def ordered(self, name: str, x: Any) -> Any:
    """Return a Matrix or a bias with its rows in the model's order."""
    order = row_order(self.model.config, name, len(x.q if isinstance(x, Quantized) else x))
    if order is None: return x
    if not isinstance(x, Quantized): return x[order]
    return Quantized._make([*[part if part is None else part[order] for part in x[:3]], x.order])

  def read(self, name: str, *shape: int) -> Tensor:
    """Read a tensor for a core module, dequantized."""
    module, _, suffix = name.rpartition(".")
    if suffix == "weight" and len(shape) == 2: x = dequantize(self.fused({module: (shape[0], shape[1])})[0], self.dtype)
    else: x = self.array(name, *shape)
    x = self.ordered(module, x)
    return Tensor(to_float32(x) if x.dtype == np.uint16 else np.asarray(x))

  def vectors(self, module: Any, suffix: str) -> list[Any]:
    """Read a norm's weight or a bias and return each device's shard. The first device adds the bias of partial sums."""
    count = self.num_devices if module.axis == 0 else 1
    whole = [self.ordered(name, self.array(f"{name}.{suffix}", n * count)) for name, n in module.sources.items()]
    if module.axis == 0: return [concatenate(shard) for shard in zip(*[np.split(x, count) for x in whole], strict=True)]
    vector = concatenate(whole)
    other = np.zeros_like(vector) if module.axis == 1 else vector
    return [vector] + [other] * (self.num_devices - 1)

  def matrices(self, module: Any) -> list[Matrix]:
    """Read the matrix of a Linear and return each device's shard, quantized as requested, except embeddings."""
    model: Any = self.model
    columns = module.weight.numel() // module.out_features * (self.num_devices if module.axis == 1 else 1)
    rows = self.num_devices if module.axis == 0 else 1
    in_layer = all(module is not x for x in vars(model).values())   # else a row for each token, and padding
    sizes = {name: n * rows for name, n in module.sources.items()}
    vocab_size = math.inf if in_layer else self.hf_config["vocab_size"]
    whole = self.fused({name: (min(n, vocab_size), columns) for name, n in sizes.items()})
    whole = [self.ordered(name, w) for name, w in zip(sizes, whole, strict=True)]
    if not supports_e4m3(): whole = [dequantize(w, self.dtype) if is_small_float(w) else w for w in whole]
    whole = [pad_rows(w, n) for w, n in zip(whole, sizes.values(), strict=True)]
    splits = [split(w, self.num_devices, module.axis, self.dtype) for w in whole]
    shards = [stack(shard) for shard in zip(*splits, strict=True)]
    if self.dtype == np.float16 and self.method in ("gguf", "compressed-tensors"): shards = [*map(round_scales, shards)]
    is_exact = isinstance(model, LlamaVariant) and model.is_exact(module)
    if self.bits and in_layer and not is_exact:   # int4 is stored in words of eight
      shards = [quantize(w, 8 if w.shape[1] % 8 else self.bits) if isinstance(w, np.ndarray) else w for w in shards]
    return [dequantize(w, self.dtype) for w in shards] if module is model.embed_tokens else shards

  def place(self, module: Module, arrays: Sequence[np.ndarray], dtype: DType | None = None) -> Tensor:
    """Copy each array to its device, in `dtype` or in its own if `dtype` is wider or None."""
    tensors = []
    for array, device in zip(arrays, self.model.devices.names, strict=True):
      tensor = to_device(np.ascontiguousarray(array), dtype, device)
      size = max(array.nbytes, tensor.nbytes())   # the array is copied before it is cast
      limit = self.model.backend.memory.largest_tensor()
      check(size <= limit, f"model: {self.path}: {', '.join(module.sources)}: {size} bytes, but the device's "
            f"limit for a tensor is {limit}: choose another device, such as DEV=CPU")
      tensors.append(tensor.realize())
    return tensors[0] if len(tensors) == 1 else stack_shards(tensors)


def supports_e4m3() -> bool:
  """Return whether kernels can read e4m3, which they convert to float16. Otherwise it is dequantized while loading."""
  return dtypes.half in renderer().supported_dtypes()


def to_device(array: np.ndarray, dtype: DType | None, device: str) -> Tensor:
  is_bfloat16 = array.dtype == np.uint16
  tensor = Tensor(array, device=device)
  if is_bfloat16: tensor = tensor.bitcast(dtypes.bfloat16)
  if dtype is None or (array.itemsize < dtype.itemsize and tensor.dtype in renderer().supported_dtypes()):
    return tensor.contiguous()
  if is_bfloat16 or dtype == dtypes.float32: array = to_float32(array)   # on the host, as the device would keep both
  return Tensor(array, device=device).cast(dtype).contiguous()
