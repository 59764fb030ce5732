"""The file of `tinyvllm doctor --tune`, in the folder of compiled kernels: each device's fastest choices (see
kernels/schedule.choose), and a hash of the kernels that were measured."""
import hashlib, json, pathlib, re
from typing import Any

from tinygrad import Device

from tinyvllm.config import check, logger
from tinyvllm_extra import kernels
from tinyvllm_extra.kernels import kernel_cache, schedule
from tinyvllm_extra.kernels.tinygrad_patches import cache_folder


def device_name(opened: Any) -> str:
  """Return a device's name, or else its architecture."""
  if opened.device == "CUDA":
    from tinyvllm_extra.kernels import cuda
    return cuda.device_name(opened)
  info = pathlib.Path("/proc/cpuinfo")
  names = re.findall(r"model name\s*: (.*)", info.read_text()) if opened.device == "CPU" and info.exists() else []
  return [*names, getattr(opened, "device_name", opened.arch or "")][0]


def path() -> pathlib.Path: return cache_folder() / "tuned.json"


def kernels_hash() -> str:
  files = sorted(x for x in pathlib.Path(kernels.__file__).parent.iterdir() if x.is_file())
  return hashlib.sha256(b"".join(x.read_bytes() for x in files)).hexdigest()


def read() -> dict[str, dict[str, str]]:
  """Return the choices by the device's name. A file of other kernels, or a damaged one, is ignored with a warning."""
  if not path().exists(): return {}
  try:
    content = json.loads(path().read_text())
    check(content["kernels"] == kernels_hash(), "its kernels were other ones")
    check({type(x) for y in content["devices"].values() for x in y.values()} <= {str}, "a choice must be a string")
    return content["devices"]
  except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
    logger.warning(f"{path()} is ignored: {error}; `tinyvllm doctor --tune` measures again")
  return {}


def prepare_device() -> dict[str, str]:
  """Like kernels.prepare_device. Then use the file's choices for the device, and return them."""
  kernels.prepare_device()
  schedule.choices = read().get(device_name(Device.default), {})
  return schedule.choices


def write(choices: dict[str, str]) -> None:
  """Store the choices for the device, next to those for other ones. Raises InputError if that is not possible."""
  devices = read() | {device_name(Device.default): choices}
  kernel_cache.write(path(), json.dumps({"kernels": kernels_hash(), "devices": devices}, indent=1).encode())
  check(read() == devices, f"{path()} cannot be written: set CACHEDB to a file in another folder")
