"""Tuned tiles of matrix kernels (kernels/products.choose_tiles): their file in the folder of compiled kernels, which
`tinyvllm doctor --tune` writes."""
import hashlib, json, pathlib, re
from typing import Any

from tinygrad import Device

from tinyvllm.config import logger
from tinyvllm_extra import kernels, programs
from tinyvllm_extra.kernels import products
from tinyvllm_extra.kernels.tinygrad_patches import cache_folder


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
