"""Questions to the operating system: how much memory the machine has, and how much of it this process may use."""
import contextlib, os, pathlib, re, resource
from collections.abc import Iterator
from typing import NamedTuple

from tinyvllm import backend

PROC, CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")
# By controller in /proc/self/cgroup, "" for cgroups v2: a folder, a group's files with its limit and use in bytes, and
# the field of memory.stat with the file cache that the kernel frees first
CGROUP_FILES = {"": ("", "memory.max", "memory.current", "inactive_file"),
                "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}


class MemoryReport(NamedTuple):
  """A device's memory in bytes. largest: maximum bytes of a tensor; 0 if the driver has no such limit. is_known: False
  if the driver does not report its memory, and this is the host's."""
  free: int
  total: int
  largest: int = 0
  is_known: bool = True


def read_numbers(path: pathlib.Path) -> dict[str, int]:
  """Return the numbers in a file of lines like "name: number unit", by name."""
  return {name: int(value) for name, value in re.findall(r"^(\w+):?[ \t]+(\d+)", path.read_text(), re.M)}


def machine_memory() -> MemoryReport:
  """Return the machine's memory. On Linux, file cache that the kernel can free counts as free."""
  with contextlib.suppress(OSError, KeyError):
    meminfo = read_numbers(PROC / "meminfo")
    return MemoryReport(meminfo["MemAvailable"] * 1024, meminfo["MemTotal"] * 1024)
  return MemoryReport(backend.Memory().free(("CPU",)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def cgroup_memory() -> Iterator[MemoryReport]:
  """Yield the memory that this process's cgroup and its parents may still use, for each limit (cgroups v1 and v2)."""
  for controllers, path in re.findall(r"^\d+:(.*?):(.*)$", (PROC / "self/cgroup").read_text(), re.M):
    folder, *files, cache = CGROUP_FILES.get(controllers, ("", ""))
    here = pathlib.PurePosixPath(path)
    for group in (here, *here.parents) if files else ():
      # A container sees its own group as the root, but the path may be the host's; a limit may be "max"
      with contextlib.suppress(OSError, ValueError):
        place = CGROUPS / folder / str(group)[1:]
        limit, usage = [int((place / file).read_text()) for file in files]
        yield MemoryReport(limit - usage + read_numbers(place / "memory.stat").get(cache, 0), limit)


def host_memory() -> MemoryReport:
  """Return the machine's memory, or the memory that this process may still use if RLIMIT_DATA or a cgroup limits it."""
  limits = [machine_memory()]
  with contextlib.suppress(OSError, KeyError):   # only Linux has these files
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    usage = read_numbers(PROC / "self/status")["VmData"] * 1024
    if limit != resource.RLIM_INFINITY: limits.append(MemoryReport(limit - usage, limit))
    limits += cgroup_memory()
  return MemoryReport(max(0, min(x.free for x in limits)), min(x.total for x in limits))
