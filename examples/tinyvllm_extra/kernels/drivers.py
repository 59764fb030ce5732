"""Questions to the drivers of devices: how much memory a device has, and whether an OpenCL device is a CPU. Reads the
attributes of tinygrad's device objects."""
import contextlib, ctypes, os, pathlib
from typing import Any, NamedTuple

from tinygrad import Device

from tinyvllm.backend import Backend

KFD_NODES = pathlib.Path("/sys/devices/virtual/kfd/kfd/topology/nodes")
VRAM = ("1", "2")   # KFD's heap types of a card's memory: accessible to the host, and not accessible


class Memory(NamedTuple):
  """A device's memory in bytes. largest: maximum bytes of a tensor; 0 if the driver has no such limit."""
  free: int
  total: int
  largest: int = 0


def host_memory() -> Memory:
  return Memory(Backend().free_memory("CPU"), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def device_memory(name: str) -> Memory:
  """Return the memory that the driver of a device reports. The host's memory for a CPU and other devices."""
  read = READERS.get(name.partition(":")[0])
  with contextlib.suppress(OSError):   # a file of the driver is missing
    if read: return read(Device[name])
  return host_memory()


def amd_memory(device: Any) -> Memory:
  """Read the files of Linux's amdgpu and KFD drivers. A card that tinygrad's own driver runs is not shared."""
  iface = device.iface
  if hasattr(iface, "dev_impl"): return Memory(iface.dev_impl.vram_size, iface.dev_impl.vram_size)
  vram_used = int(pathlib.Path(iface.dev_sysfs_path, "mem_info_vram_used").read_text())
  files = (KFD_NODES / iface.gpus[device.device_id]).glob("mem_banks/*/properties")
  banks = [dict(line.split() for line in file.read_text().splitlines()) for file in files]
  total = sum(int(bank["size_in_bytes"]) for bank in banks if bank["heap_type"] in VRAM)
  return Memory(total - vram_used, total)


def metal_memory(device: Any) -> Memory:
  """Return the limit that Metal recommends for a process. On Apple silicon it is a part of the host's memory."""
  gpu = device.sysdevice
  total = gpu.recommendedMaxWorkingSetSize()
  return Memory(total - gpu.currentAllocatedSize(), total, gpu.maxBufferLength())


def opencl_info(device: Any, name: str, size: int = 8) -> int:
  """Return the property CL_DEVICE_`name`, an integer of `size` bytes."""
  from tinygrad.runtime.autogen import opencl
  value = ctypes.c_uint64()
  opencl.clGetDeviceInfo(device.cl_dev, getattr(opencl, f"CL_DEVICE_{name}"), size, ctypes.byref(value), None)
  return value.value


def is_opencl_cpu(device: Any) -> bool: return bool(opencl_info(device, "TYPE") & 2)   # CL_DEVICE_TYPE_CPU


def opencl_memory(device: Any) -> Memory:
  """OpenCL does not report free memory: it is the total, or less if the host's memory is used."""
  total = opencl_info(device, "GLOBAL_MEM_SIZE")
  uses_host = is_opencl_cpu(device) or opencl_info(device, "HOST_UNIFIED_MEMORY", 4)
  free = min(total, host_memory().free) if uses_host else total
  return Memory(free, total, opencl_info(device, "MAX_MEM_ALLOC_SIZE"))


def webgpu_memory(device: Any) -> Memory:
  """WebGPU limits buffers. Dawn also reports the sizes of an adapter's memory heaps, but not how much is free."""
  from tinygrad.runtime.autogen import webgpu
  limits = webgpu.WGPUSupportedLimits()
  webgpu.wgpuDeviceGetLimits(device.device_res, limits)
  largest = min(limits.limits.maxBufferSize, limits.limits.maxStorageBufferBindingSize)
  adapter = webgpu.wgpuDeviceGetAdapter(device.device_res)
  if not webgpu.wgpuAdapterHasFeature(adapter, webgpu.WGPUFeatureName_AdapterPropertiesMemoryHeaps):
    return host_memory()._replace(largest=largest)
  kind = webgpu.WGPUChainedStructOut(sType=webgpu.WGPUSType_AdapterPropertiesMemoryHeaps)
  heaps = webgpu.WGPUAdapterPropertiesMemoryHeaps(kind)
  info = webgpu.WGPUAdapterInfo(ctypes.cast(ctypes.pointer(heaps), ctypes.POINTER(webgpu.WGPUChainedStructOut)))
  webgpu.wgpuAdapterGetInfo(adapter, info)
  all_heaps = [heaps.heapInfo[i] for i in range(heaps.heapCount)]
  total = sum(heap.size for heap in all_heaps if heap.properties & webgpu.WGPUHeapProperty_DeviceLocal)
  is_discrete = info.adapterType == webgpu.WGPUAdapterType_DiscreteGPU
  return Memory(total if is_discrete else min(total, host_memory().free), total, largest)


READERS = {"AMD": amd_memory, "METAL": metal_memory, "CL": opencl_memory, "WEBGPU": webgpu_memory}
