"""Tuned tiles of matrix kernels (kernels/products.choose_tiles): their file in the folder of compiled kernels, and
matrices for `tinyvllm doctor --tune` to measure."""
import copy, hashlib, json, pathlib, re
from typing import Any

import numpy as np
from tinygrad import Device, Tensor, dtypes, nn

from tinyvllm.config import logger
from tinyvllm_extra import kernels, programs
from tinyvllm_extra.kernels import matmul, products
from tinyvllm_extra.kernels.tinygrad_patches import cache_folder
from tinyvllm_extra.models.quantized import NUMBER_FORMATS

from .fit import is_in_layer

COPIES = 2**28   # bytes of a matrix's copies, more than caches hold
KERNELS = 64     # products in a graph, so that it takes longer than its launch


def device_name(opened: Any) -> str:
  """Return a device's name, or else its architecture."""
  if opened.device == "CUDA":
    from tinyvllm_extra.kernels import cuda
    return cuda.device_name(opened)
  info = pathlib.Path("/proc/cpuinfo")
  names = re.findall(r"model name\s*: (.*)", info.read_text()) if opened.device == "CPU" and info.exists() else []
  return [*names, getattr(opened, "device_name", opened.arch or "")][0]


def path() -> pathlib.Path:
  """Return the file for the default device and these kernels. Other devices and kernels have other files."""
  files = sorted(x for x in pathlib.Path(kernels.__file__).parent.iterdir() if x.is_file())
  kernels_hash = hashlib.sha256(b"".join(x.read_bytes() for x in files)).hexdigest()[:8]
  return cache_folder() / re.sub(r"[^\w.]+", "_", f"tuned {device_name(Device.default)} {kernels_hash}.json")


def prepare_device() -> dict[str, str]:
  """Like programs.prepare_device. Then use the choices in the device's file, if it has one, and return them. A damaged
  file is ignored with a warning."""
  programs.prepare_device()
  products.choices = {}
  try: products.choices = dict(json.loads(path().read_text())) if path().exists() else {}
  except (OSError, ValueError, TypeError) as error:
    logger.warning(f"{path()} is ignored: {error}; `tinyvllm doctor --tune` measures again")
  return products.choices


def copies_of(layer: matmul.FastLinear, quantization: str | None) -> list[matmul.FastLinear]:
  """Return KERNELS layers, copies of one for tensor cores with zeros as weights. The same copy returns after COPIES
  bytes of weights or more. quantization: "int8" or "int4" for a matrix in layers, or None."""
  if quantization and is_in_layer(next(iter(layer.sources))):
    layer.number_format = NUMBER_FORMATS[np.dtype({"int8": np.int8, "int4": np.uint8}[quantization])]
    (tiles, parts), bits = layer.weight.max_shape[:2], layer.number_format.bits
    layer.weight = Tensor.empty(tiles, parts, 8, 4, bits // 2, dtype=dtypes.uint32)
    names = ("scale", "offset")[:8 // bits]   # int8 has no offset
    layer.scales = {name: Tensor.empty(tiles, parts, 8, 2, dtype=dtypes.half) for name in names}
  for x in nn.state.get_parameters(layer): x.replace(x.zeros_like().contiguous().realize())
  layer.flags = products.new_flags(Device.DEFAULT)
  copies = [copy.copy(layer) for _ in range(min(KERNELS, 1 + COPIES // layer.weight.nbytes()))]
  for other in copies: other.weight = layer.weight.clone().realize()
  return (copies * KERNELS)[:KERNELS]
