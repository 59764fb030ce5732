"""The weights of a model, read one tensor at a time from safetensors, whole or sharded, and copied to each device in
the dtype of the file if that is narrower than the one to compute in. A part's `load` asks a Checkpoint for tensors."""
import dataclasses, importlib, json, math, pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from tinygrad import Tensor, UOp, dtypes, helpers
from tinygrad.dtype import DType

from tinyvllm import llama
from tinyvllm.backend import Module, renderer
from tinyvllm.config import check, read_json

from .quantization import Matrix, concatenate, dequantize, find_layouts, join, quantize, read_matrix, split, to_float32

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}   # numpy has no bfloat16: its bits
INTEGERS = {"I8": np.int8, "I32": np.int32, "I64": np.int64}         # in quantized matrices


@dataclasses.dataclass(frozen=True)
class Stored:
  """A tensor in a file. Each read maps it anew: pages of one map for a whole file would count as this process's."""
  path: pathlib.Path
  dtype: Any
  shape: tuple[int, ...]
  start: int               # in the file, in bytes

  nbytes = property(lambda self: math.prod(self.shape) * np.dtype(self.dtype).itemsize)

  def read(self) -> np.ndarray: return np.memmap(self.path, self.dtype, "c", self.start, self.shape)
  def raw(self) -> np.ndarray: return np.memmap(self.path, np.uint8, "c", self.start, (self.nbytes,))


class Checkpoint(llama.Checkpoint):
  """A folder of safetensors, quantized or not."""
  tensors: dict[str, Any]   # name -> Stored: everything that no part has read yet
  quantization_config = property(lambda self: self.hf_config.get("quantization_config") or {})
  method = property(lambda self: self.quantization_config.get("quant_method"))   # format of quantized matrices, or None

  def stored(self) -> dict[str, Any]:
    """All tensors of the files. Raises InputError for a file or a dtype that cannot be read."""
    supported = DTYPES | INTEGERS if self.method else DTYPES
    index = read_json(self.path / "model.safetensors.index.json")
    tensors = {}
    for file in {self.path / name for name in index.get("weight_map", {"": "model.safetensors"}).values()}:
      try: safe_open(file, "np")   # checks the whole file, but cannot read bfloat16
      except (OSError, SafetensorError) as e: check(False, f"model: {file} is missing, damaged or cut short: {e}")
      size = int(np.fromfile(file, "<u8", 1)[0])
      header = json.loads(bytes(np.fromfile(file, np.uint8, size, offset=8)))
      header.pop("__metadata__", None)
      for name, entry in header.items():
        dtype = entry["dtype"]
        check(dtype in supported, f"model: {file}: tensor {name} is {dtype}; supported: {', '.join(supported)}")
        tensors[name] = Stored(file, supported[dtype], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
    return tensors

  def fingerprint_pieces(self) -> Iterator[tuple[str, str, tuple[int, ...], np.ndarray]]:
    """Name, dtype, shape and bytes, as a memory map, of each tensor of the files, by name."""
    for name, tensor in sorted(self.stored().items()):
      yield name, np.dtype(tensor.dtype).str, tensor.shape, tensor.raw()

  def load(self, model: llama.Llama, quantization: str | None = None) -> None:
    self.layouts = find_layouts(self.quantization_config)
    self.bits = {"int8": 8, "int4": 4}.get(quantization or "")
    state = f"{self.method} already" if self.method else "not quantized"
    check(quantization in (None, self.method) or self.bits and not self.method,
          f"quantization={quantization!r}: the model in {self.path} is {state}")
    self.model = model
    self.count = len(model.devices.names)
    self.tensors = self.stored()
    plain = [type(x).__name__ for x in model.modules() if type(x).load is Module.load]   # parts of the core
    backend = f"{type(model.backend).__name__}, whose {', '.join(dict.fromkeys(plain))}"
    check(not plain or self.count == 1, f"tensor_parallel_size={self.count} must be 1 for {backend} know one device")
    check(not plain or not self.bits, f"quantization={quantization!r} must be None for {backend} take no int8 or int4")
    for module in helpers.tqdm(model.modules(), desc="loading weights", disable=None): module.load(self)
    self.check_unused(self.tensors)

  def check_unused(self, names: Iterable[str]) -> None:
    """As the core's. Quantized checkpoints may also have shapes, and biases of zeros for a model without biases."""
    def is_empty(name: str) -> bool:
      return name.endswith(".weight_shape") or name.endswith(".bias") and not self.tensors[name].read().any()
    super().check_unused([name for name in names if not (self.method and is_empty(name))])

  # Called by `load` of a part

  def take(self, name: str, *shape: int) -> Any:
    """The Stored tensor of this name, which must have this shape."""
    return super().read(name, *shape)

  def array(self, name: str, *shape: int) -> np.ndarray:
    """Read a tensor of the files as a memory map. uint16 holds the bits of bfloat16."""
    return self.take(name, *shape).read()

  def fused(self, shapes: dict[str, tuple[int, int]]) -> Sequence[Matrix]:
    """Read matrices, (out, in), whose rows follow each other in one."""
    return [read_matrix(name, shape, self.layouts, self.tensors, self.array) for name, shape in shapes.items()]

  def read(self, name: str, *shape: int) -> Tensor:
    """Read a tensor for a part of the core, dequantized."""
    module, _, suffix = name.rpartition(".")
    is_matrix = suffix == "weight" and len(shape) == 2
    x = dequantize(*self.fused({module: shape})) if is_matrix else self.array(name, *shape)   # type: ignore[dict-item]
    return Tensor(to_float32(x) if x.dtype == np.uint16 else np.asarray(x))

  def vectors(self, module: Any, kind: str) -> list[Any]:
    """Read a norm's weight or a bias: a part for each device. A bias of partial sums is added by the first."""
    scale = self.count if module.axis == 0 else 1
    whole = [self.array(f"{name}.{kind}", n * scale) for name, n in module.sources.items()]
    if module.axis == 0: return [concatenate(parts) for parts in zip(*[np.split(x, scale) for x in whole], strict=True)]
    vector = concatenate(whole)
    rest = np.zeros_like(vector) if module.axis == 1 else vector
    return [vector] + [rest] * (self.count - 1)

  def matrices(self, module: Any) -> list[Matrix]:
    """Read the matrix of a Linear: a part for each device, quantized as `load` was told. Embeddings never are."""
    model: Any = self.model
    columns = module.weight.numel() // module.out_features * (self.count if module.axis == 1 else 1)
    rows = self.count if module.axis == 0 else 1
    whole = self.fused({name: (n * rows, columns) for name, n in module.sources.items()})
    parts = [join(part) for part in zip(*[split(w, self.count, module.axis) for w in whole], strict=True)]
    in_layer = all(module is not x for x in vars(model).values())
    if self.bits and in_layer:   # int4 is stored in words of eight
      parts = [quantize(w, self.bits if w.shape[1] % 8 == 0 else 8) if isinstance(w, np.ndarray) else w for w in parts]
    return [dequantize(w) for w in parts] if module is getattr(model, "embed_tokens", None) else parts

  def place(self, module: Module, arrays: Sequence[np.ndarray], dtype: DType | None = None) -> Tensor:
    """Copy each array to its device, in `dtype` or in its own if that is narrower; None: in its own."""
    tensors = []
    for array, device in zip(arrays, self.model.devices.names, strict=True):
      tensor = to_device(np.ascontiguousarray(array), dtype, device)
      size = max(array.nbytes, tensor.nbytes())   # it is copied first, then cast
      limit = self.model.backend.largest_tensor()
      check(size <= limit, f"model: {self.path}: {', '.join(module.sources)}: {size} bytes, but a tensor may have "
            f"{limit} on this device: choose another one, as in DEV=CPU")
      tensors.append(tensor.realize())
    if len(tensors) == 1: return tensors[0]
    return Tensor(UOp.mstack(*[x.uop for x in tensors])).clone().realize()


def to_device(array: np.ndarray, dtype: DType | None, device: str) -> Tensor:
  is_bfloat16 = array.dtype == np.uint16
  tensor = Tensor(array, device=device)
  if is_bfloat16: tensor = tensor.bitcast(dtypes.bfloat16)
  if dtype is None or (array.itemsize < dtype.itemsize and tensor.dtype in renderer().supported_dtypes()):
    return tensor.contiguous()
  if is_bfloat16 or dtype == dtypes.float32: array = to_float32(array)   # on the host: the device would keep both
  return Tensor(array, device=device).cast(dtype).contiguous()


def open_checkpoint(path: pathlib.Path) -> Checkpoint:
  """Open a folder in Hugging Face's layout or a GGUF file. Raises InputError for anything else."""
  is_gguf = path.suffix == ".gguf" and not path.is_dir()
  return importlib.import_module("tinyvllm_extra.gguf").Checkpoint(path) if is_gguf else Checkpoint(path)
