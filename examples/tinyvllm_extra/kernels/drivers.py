"""Questions to the operating system and to the drivers of devices: how much memory this process may use, a device's
name and memory, and whether an OpenCL device is a CPU. Reads the attributes of tinygrad's device objects."""
import contextlib, ctypes, gc, os, pathlib, re, resource, typing
from collections.abc import Iterator

from tinygrad import Device
from tinygrad.device import Compiled, LRUAllocator
from tinygrad.runtime import autogen

from tinyvllm.backend import Memory, cpu_cores

PROC, CGROUPS = pathlib.Path("/proc"), pathlib.Path("/sys/fs/cgroup")
# By controller in /proc/self/cgroup, "" for cgroups v2: a folder, a group's files with its limit and use in bytes, and
# the field of memory.stat with the file cache that the kernel frees first
CGROUP_FILES = {"": ("", "memory.max", "memory.current", "inactive_file"),
                "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")}
KFD_NODES = pathlib.Path("/sys/devices/virtual/kfd/kfd/topology/nodes")
RESERVE = 2**29   # bytes of the host's memory that weights and KV cache do not use
CPU_CACHE = 2**32   # maximum bytes of the KV cache on a CPU, if one sequence fits in it
VRAM = (1, 2)   # KFD's heap types of a card's memory: accessible to the host, and not accessible


class MemoryReport(typing.NamedTuple):
  """A device's memory in bytes. largest: maximum bytes of a tensor; 0 if the driver has no such limit. is_known: False
  if the driver does not report its memory, and this is the host's."""
  free: int
  total: int
  largest: int = 0
  is_known: bool = True


def read_numbers(path: pathlib.Path) -> dict[str, int]:
  """Return the numbers in a file of lines like "name: number unit", by name."""
  return {name: int(value) for name, value in re.findall(r"^(\w+):?[ \t]+(\d+)", path.read_text(), re.M)}


def limited_memory() -> Iterator[MemoryReport]:
  """Yield the memory that this process may still use, for each limit: RLIMIT_DATA, and limits of its cgroup and the
  cgroup's parents (cgroups v1 and v2)."""
  limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
  usage = read_numbers(PROC / "self/status")["VmData"] * 1024
  if limit != resource.RLIM_INFINITY: yield MemoryReport(limit - usage, limit)
  for controllers, path in re.findall(r"^\d+:(.*?):(.*)$", (PROC / "self/cgroup").read_text(), re.M):
    folder, *files, cache = CGROUP_FILES.get(controllers, ("", ""))
    for group in pathlib.PurePosixPath(path, "any").parents if files else ():
      # A container sees its own group as the root, but the path may be the host's; a limit may be "max"
      with contextlib.suppress(OSError, ValueError):
        place = CGROUPS / folder / str(group)[1:]
        limit, usage = [int((place / file).read_text()) for file in files]
        yield MemoryReport(limit - usage + read_numbers(place / "memory.stat").get(cache, 0), limit)


def host_memory() -> MemoryReport:
  """Return the machine's memory, or the memory that this process may still use if RLIMIT_DATA or a cgroup limits it. On
  Linux, file cache that the kernel can free counts as free."""
  limits = [MemoryReport(Memory().free(("CPU",)), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))]
  with contextlib.suppress(OSError, KeyError):   # only Linux has these files
    meminfo = read_numbers(PROC / "meminfo")
    limits = [MemoryReport(meminfo["MemAvailable"] * 1024, meminfo["MemTotal"] * 1024)]
    limits += limited_memory()
  return MemoryReport(max(0, min(x.free for x in limits)), min(x.total for x in limits))


def device_memory(name: str) -> MemoryReport:
  """Return the memory that the driver of a device reports. The host's memory for a CPU and other devices."""
  kind = name.partition(":")[0]
  with contextlib.suppress(OSError):   # a file of the driver is missing
    if kind in READERS: return READERS[kind](Device[name])
  return host_memory()._replace(is_known=kind == "CPU")


def free_unused_buffers(names: tuple[str, ...]) -> None:
  """Give back the buffers that tinygrad keeps on these devices to use them again, when their steps have ended."""
  gc.collect()
  for name in names:
    Device[name].synchronize()
    allocator = Device[name].allocator
    if isinstance(allocator, LRUAllocator): allocator.free_cache()
    vars(allocator).pop("chunk", None)   # cpu.allocate keeps the newest one there


def can_access_peer(reader: str, owner: str) -> bool:
  """Return whether a CUDA device can read another one's memory."""
  from tinygrad.runtime.ops_cuda import check, cuda, init_c_var   # slow to import
  devices = [vars(Device[name])["cu_device"] for name in (reader, owner)]
  return bool(init_c_var(ctypes.c_int, lambda x: check(cuda.cuDeviceCanAccessPeer(ctypes.byref(x), *devices))).value)


def device_name(device: Compiled) -> str:
  """Return a device's name, or else its architecture."""
  if device.device == "CUDA":
    from tinygrad.runtime.ops_cuda import check, cuda, init_c_var   # slow to import
    name = init_c_var(ctypes.c_char * 256, lambda x: check(cuda.cuDeviceGetName(x, 256, vars(device)["cu_device"])))
    return name.value.decode()
  info = PROC / "cpuinfo"
  names = re.findall(r"model name\s*: (.*)", info.read_text()) if device.device == "CPU" and info.exists() else []
  return [*names, getattr(device, "device_name", device.arch or "")][0]


def cuda_memory(device: typing.Any) -> MemoryReport:
  """Return the device's memory. Makes its context current."""
  from tinygrad.runtime.ops_cuda import check, cuda   # slow to import
  check(cuda.cuCtxSetCurrent(device.context))
  check(cuda.cuMemGetInfo_v2(ctypes.byref(free := ctypes.c_size_t()), ctypes.byref(total := ctypes.c_size_t())))
  return MemoryReport(free.value, total.value)


def amd_memory(device: typing.Any) -> MemoryReport:
  """Read the files of Linux's amdgpu and KFD drivers. A card that tinygrad's own driver runs is not shared."""
  iface = device.iface
  if hasattr(iface, "dev_impl"): return MemoryReport(iface.dev_impl.vram_size, iface.dev_impl.vram_size)
  vram_used = int(pathlib.Path(iface.dev_sysfs_path, "mem_info_vram_used").read_text())
  files = (KFD_NODES / iface.gpus[device.device_id]).glob("mem_banks/*/properties")
  total = sum(bank["size_in_bytes"] for bank in map(read_numbers, files) if bank["heap_type"] in VRAM)
  return MemoryReport(total - vram_used, total)


def metal_memory(device: typing.Any) -> MemoryReport:
  """Return the limit that Metal recommends for a process. On Apple silicon it is a part of the host's memory."""
  gpu = device.sysdevice
  total = gpu.recommendedMaxWorkingSetSize()
  return MemoryReport(total - gpu.currentAllocatedSize(), total, gpu.maxBufferLength())


def opencl_info(device: typing.Any, name: str) -> int:
  """Return the property CL_DEVICE_`name`, an integer of at most 8 bytes."""
  key = getattr(autogen.opencl, f"CL_DEVICE_{name}")
  autogen.opencl.clGetDeviceInfo(device.cl_dev, key, 8, ctypes.byref(value := ctypes.c_uint64()), None)
  return value.value


def is_opencl_cpu(device: typing.Any) -> bool: return bool(opencl_info(device, "TYPE") & 2)   # CL_DEVICE_TYPE_CPU


def opencl_memory(device: typing.Any) -> MemoryReport:
  """OpenCL does not report free memory: it is the total, or less if the host's memory is used."""
  total = opencl_info(device, "GLOBAL_MEM_SIZE")
  uses_host = is_opencl_cpu(device) or opencl_info(device, "HOST_UNIFIED_MEMORY")
  free = min(total, host_memory().free) if uses_host else total
  return MemoryReport(free, total, opencl_info(device, "MAX_MEM_ALLOC_SIZE"))


def webgpu_memory(device: typing.Any) -> MemoryReport:
  """WebGPU limits buffers. Dawn also reports the sizes of an adapter's memory heaps, but not how much is free."""
  webgpu = autogen.webgpu
  webgpu.wgpuDeviceGetLimits(device.device_res, limits := webgpu.WGPUSupportedLimits())
  largest = min(limits.limits.maxBufferSize, limits.limits.maxStorageBufferBindingSize)
  adapter = webgpu.wgpuDeviceGetAdapter(device.device_res)
  if not webgpu.wgpuAdapterHasFeature(adapter, webgpu.WGPUFeatureName_AdapterPropertiesMemoryHeaps):
    return host_memory()._replace(largest=largest, is_known=False)
  kind = webgpu.WGPUChainedStructOut(sType=webgpu.WGPUSType_AdapterPropertiesMemoryHeaps)
  heaps = webgpu.WGPUAdapterPropertiesMemoryHeaps(kind)
  info = webgpu.WGPUAdapterInfo(ctypes.cast(ctypes.pointer(heaps), ctypes.POINTER(webgpu.WGPUChainedStructOut)))
  webgpu.wgpuAdapterGetInfo(adapter, info)
  total = sum(x.size for x in heaps.heapInfo[:heaps.heapCount] if x.properties & webgpu.WGPUHeapProperty_DeviceLocal)
  is_discrete = info.adapterType == webgpu.WGPUAdapterType_DiscreteGPU
  return MemoryReport(total if is_discrete else min(total, host_memory().free), total, largest)


READERS = {"CUDA": cuda_memory, "AMD": amd_memory, "METAL": metal_memory, "CL": opencl_memory, "WEBGPU": webgpu_memory}


class DriverMemory(Memory):
  """A memory policy that asks the devices' drivers."""
  def free(self, devices: tuple[str, ...]) -> int:
    """Return the free bytes of each device. CPU devices share the host's, except RESERVE, which is left to Python,
    capture and a step's buffers."""
    free = min(device_memory(name).free for name in reversed(devices))   # first last: its CUDA context stays current
    return max(0, free - RESERVE) // len(devices) if devices[0].startswith("CPU") else free

  def largest_tensor(self) -> int:
    return device_memory(Device.DEFAULT).largest or super().largest_tensor()

  def max_blocks(self, num_bytes: int, block_bytes: int, min_blocks: int) -> int:
    """Round down, because the kernel cache depends on this number. On a CPU, use at most CPU_CACHE."""
    count = num_bytes // block_bytes
    count -= count % (1 << max(0, count.bit_length() - 6))
    return min(count, max(CPU_CACHE // block_bytes, min_blocks)) if cpu_cores() else count
