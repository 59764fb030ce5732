"""The default device, and the memory that devices report. Drivers are fakes of tinygrad's objects here; test_backend.py
checks real devices."""
import ctypes
import os
from types import SimpleNamespace

import pytest
from tinygrad import Device, helpers
from tinygrad.runtime.autogen import opencl, webgpu

from tinyvllm_extra import kernels
from tinyvllm_extra.cli import doctor
from tinyvllm_extra.kernels import drivers

GIB = 2**30
HOST = 12 * GIB    # free memory of the host
HOST_TOTAL = 16 * GIB
UNLIMITED = 2**63


@pytest.fixture
def open_fake(monkeypatch):
  """A function that makes tinygrad open `device` under a name. The host has 12 GiB of free memory."""
  real = Device._Device__get_canonicalized_item
  renderer = Device["CPU"].renderer
  fakes = {}
  monkeypatch.setattr(Device, "_Device__get_canonicalized_item", lambda name: fakes.get(name) or real(name))
  monkeypatch.setattr(drivers, "host_memory", lambda: drivers.Memory(HOST, HOST_TOTAL))

  def add(name, **attributes):
    fakes[name] = SimpleNamespace(device=name, renderer=renderer, arch="", **attributes)
  return add


@pytest.fixture
def fake_opencl(monkeypatch, open_fake):
  """A function that adds an OpenCL device, CL, with these properties."""
  def add(**properties):
    values = {getattr(opencl, f"CL_DEVICE_{name}"): value for name, value in properties.items()}

    def get_info(handle, key, size, target, _):
      ctypes.memmove(target, ctypes.byref(ctypes.c_uint64(values[key])), size)
      return 0
    monkeypatch.setattr(opencl, "clGetDeviceInfo", get_info)
    open_fake("CL", cl_dev=None, device_name="some device")
  return add


def memory(name):
  """Return free bytes, total bytes and the maximum bytes of a tensor on a device."""
  backend = kernels.FastBackend()
  with helpers.Context(DEV=name):
    return backend.free_memory(name), doctor.describe(Device[name])[1], backend.largest_tensor()


# The default device

CPU_TYPE, GPU_TYPE = opencl.CL_DEVICE_TYPE_CPU, opencl.CL_DEVICE_TYPE_GPU


@pytest.fixture
def prepare(monkeypatch, fake_opencl, caplog):
  """A function that starts with OpenCL as tinygrad's default and the user's DEV, and returns the device that the engine
  chooses and the log lines."""
  def run(device_type=CPU_TYPE, dev=""):
    fake_opencl(TYPE=device_type)
    monkeypatch.setitem(vars(Device), "_select_device", "CL")
    monkeypatch.setattr(helpers.DEV, "_value", [helpers.Target.parse(dev)])
    monkeypatch.setenv("DEV", "CL")   # as tinygrad does when it chooses
    monkeypatch.setenv("CC", os.environ.get("CC", ""))
    monkeypatch.setattr(kernels.tinygrad_patches, "apply", lambda compiler: None)
    caplog.set_level("INFO", "tinyvllm")
    kernels.prepare_device()
    kernels.prepare_device()   # a second engine
    return Device.DEFAULT, [record.getMessage() for record in caplog.records]
  return run


def test_opencl_on_cpu_loses_to_cpu_backend_with_one_log_line(prepare):
  device, lines = prepare()
  assert device == "CPU" and os.environ["DEV"] == "CPU", "spawned processes must use the same device"
  line, = lines
  assert "some device" in line and "DEV=CL" in line


@pytest.mark.parametrize("dev", ["CL", "CPU"])
def test_dev_overrides_default_device(prepare, dev): assert prepare(dev=dev) == (dev, [])


def test_opencl_gpu_stays_default(prepare): assert prepare(GPU_TYPE) == ("CL", [])


def test_opencl_on_cpu_stays_default_without_compiler(prepare, monkeypatch):
  monkeypatch.setattr(kernels, "find_compiler", lambda: None)
  assert prepare() == ("CL", [])


# Memory

@pytest.fixture
def kfd(monkeypatch, tmp_path, open_fake):
  """A fake AMD GPU, AMD, whose node in KFD's topology has two memory banks of VRAM and one of another kind."""
  files = {"nodes/3/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {2 * GIB}\nflags 0\nwidth 256\n",
           "nodes/3/mem_banks/1/properties": f"heap_type 2\nsize_in_bytes {14 * GIB}\n",
           "nodes/3/mem_banks/2/properties": f"heap_type 4\nsize_in_bytes {64 * 1024}\n",
           "card/mem_info_vram_used": f"{3 * GIB}\n"}
  for name, text in files.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(text)
  monkeypatch.setattr(kernels.drivers, "KFD_NODES", tmp_path / "nodes")
  iface = SimpleNamespace(gpus=["2", "3"], dev_sysfs_path=str(tmp_path / "card"))
  open_fake("AMD", device_id=1, iface=iface)
  return tmp_path


def test_amd_memory_is_vram_of_kfd_minus_used(kfd): assert memory("AMD") == (13 * GIB, 16 * GIB, UNLIMITED)


def test_amd_without_sysfs_files_reports_memory_of_host(kfd):
  (kfd / "card/mem_info_vram_used").unlink()
  assert memory("AMD") == (HOST, HOST_TOTAL, UNLIMITED)


def test_amd_without_kernel_driver_has_vram_of_card(open_fake):
  open_fake("AMD", device_id=0, iface=SimpleNamespace(dev_impl=SimpleNamespace(vram_size=24 * GIB)))
  assert memory("AMD") == (24 * GIB, 24 * GIB, UNLIMITED)


def test_metal_memory_is_recommended_working_set_minus_allocated(open_fake):
  open_fake("METAL", sysdevice=SimpleNamespace(
    recommendedMaxWorkingSetSize=lambda: 12 * GIB, currentAllocatedSize=lambda: GIB, maxBufferLength=lambda: 9 * GIB))
  assert memory("METAL") == (11 * GIB, 12 * GIB, 9 * GIB)


@pytest.mark.parametrize("device_type, unified, total, free", [
  (GPU_TYPE, 0, 24, 24), (GPU_TYPE, 1, 24, 12), (CPU_TYPE, 0, 24, 12), (GPU_TYPE, 1, 8, 8)])
def test_opencl_memory_is_device_memory_or_less_if_shared_with_host(fake_opencl, device_type, unified, total, free):
  fake_opencl(TYPE=device_type, GLOBAL_MEM_SIZE=total * GIB, MAX_MEM_ALLOC_SIZE=6 * GIB, HOST_UNIFIED_MEMORY=unified)
  assert memory("CL") == (free * GIB, total * GIB, 6 * GIB)


@pytest.fixture
def fake_webgpu(monkeypatch, open_fake):
  """A function that adds a WebGPU device with these limits and memory heaps: (properties, bytes)."""
  def add(kind, heaps, **limits):
    def get_limits(device, target):
      for name, value in limits.items(): setattr(target.limits, name, value)
      return 1

    def get_info(adapter, target):
      target.adapterType = kind
      if target.nextInChain:
        properties = ctypes.cast(target.nextInChain, ctypes.POINTER(webgpu.WGPUAdapterPropertiesMemoryHeaps)).contents
        array = (webgpu.WGPUMemoryHeapInfo * len(heaps))(*(webgpu.WGPUMemoryHeapInfo(*heap) for heap in heaps))
        properties.heapCount = len(heaps)
        properties.heapInfo = ctypes.cast(array, type(properties.heapInfo))
      return 1
    for name, function in {"DeviceGetLimits": get_limits, "DeviceGetAdapter": lambda device: None,
                           "AdapterHasFeature": lambda adapter, feature: bool(heaps), "AdapterGetInfo": get_info,
                           "AdapterRelease": lambda adapter: None, "AdapterInfoFreeMembers": lambda info: None,
                           "AdapterPropertiesMemoryHeapsFreeMembers": lambda heaps: None}.items():
      monkeypatch.setattr(webgpu, f"wgpu{name}", function)
    open_fake("WEBGPU", device_res=None)
  return add


LOCAL, SHARED = webgpu.WGPUHeapProperty_DeviceLocal, webgpu.WGPUHeapProperty_HostVisible


@pytest.mark.parametrize("kind, heaps, free, total", [
  ("DiscreteGPU", [(LOCAL, 24 * GIB), (SHARED, 64 * GIB)], 24, 24), ("CPU", [(LOCAL | SHARED, 20 * GIB)], 12, 20),
  ("IntegratedGPU", [(LOCAL, 6 * GIB), (LOCAL | SHARED, 2 * GIB)], 8, 8), ("DiscreteGPU", [], 12, None)])
def test_webgpu_memory_is_heaps_of_adapter_and_its_limits(fake_webgpu, kind, heaps, free, total):
  fake_webgpu(getattr(webgpu, f"WGPUAdapterType_{kind}"), heaps, maxBufferSize=4 * GIB, maxStorageBufferBindingSize=GIB)
  assert memory("WEBGPU") == (free * GIB, total * GIB if total else HOST_TOTAL, GIB)


def test_cpu_memory_is_memory_of_host_except_a_reserve(open_fake):
  assert memory("CPU") == (HOST - kernels.RESERVE, HOST_TOTAL, UNLIMITED)
