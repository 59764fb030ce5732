"""The default device, the memory that devices report, and edges of CUDA's graphs. Drivers are fakes of tinygrad's
objects here; test_backend.py checks real devices."""
import ctypes
import functools
import os
from types import SimpleNamespace

import pytest
from helpers.data import write_files
from tinygrad import Device, dtypes, helpers
from tinygrad.device import Buffer, DepsTracker
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.runtime.autogen import opencl, webgpu
from tinygrad.runtime.support import compiler_cuda

from tinyvllm_extra import kernels, programs
from tinyvllm_extra.kernels import tinygrad_patches

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
  monkeypatch.setattr(kernels.drivers, "host_memory", lambda: kernels.drivers.MemoryReport(HOST, HOST_TOTAL))

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
  policy = kernels.FastBackend.memory
  with helpers.Context(DEV=name):
    return policy.free((name,)), kernels.drivers.device_memory(name).total, policy.largest_tensor()


# The default device

CPU_TYPE, GPU_TYPE = opencl.CL_DEVICE_TYPE_CPU, opencl.CL_DEVICE_TYPE_GPU


@pytest.mark.parametrize(("device_type", "dev", "has_compiler", "expected"), [
  (CPU_TYPE, "", True, "CPU"), (CPU_TYPE, "", False, "CL"), (GPU_TYPE, "", True, "CL"), (CPU_TYPE, "CL", True, "CL"),
  (CPU_TYPE, "CPU", True, "CPU")])
def test_opencl_on_cpu_loses_to_cpu_backend_with_one_log_line(
    monkeypatch, fake_opencl, caplog, device_type, dev, has_compiler, expected):
  """tinygrad chooses OpenCL. dev: the user's DEV."""
  fake_opencl(TYPE=device_type)
  monkeypatch.setitem(vars(Device), "_select_device", "CL")
  monkeypatch.setattr(helpers.DEV, "_value", [helpers.Target.parse(dev)])
  monkeypatch.setenv("DEV", "CL")   # as tinygrad does when it chooses
  monkeypatch.setenv("CC", os.environ.get("CC", ""))
  monkeypatch.setattr(kernels.tinygrad_patches, "apply", lambda device: None)
  if not has_compiler: monkeypatch.setattr(programs, "find_compiler", lambda: None)
  with caplog.at_level("INFO", "tinyvllm"):
    for _ in range(2): programs.prepare_device()   # for two engines
  is_replaced = expected == "CPU" and not dev
  assert (Device.DEFAULT, os.environ["DEV"]) == (expected, "CPU" if is_replaced else "CL")
  assert len(caplog.messages) == is_replaced and all("some device" in x and "DEV=CL" in x for x in caplog.messages)


# Memory

def test_amd_memory_is_vram_of_kfd_minus_used(monkeypatch, tmp_path, open_fake):
  """The GPU's node in KFD's topology has two memory banks of VRAM and one of another kind."""
  files = {"nodes/3/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {2 * GIB}\nflags 0\nwidth 256\n",
           "nodes/3/mem_banks/1/properties": f"heap_type 2\nsize_in_bytes {14 * GIB}\n",
           "nodes/3/mem_banks/2/properties": f"heap_type 4\nsize_in_bytes {64 * 1024}\n",
           "card/mem_info_vram_used": f"{3 * GIB}\n"}
  write_files(tmp_path, files)
  monkeypatch.setattr(kernels.drivers, "KFD_NODES", tmp_path / "nodes")
  open_fake("AMD", device_id=1, iface=SimpleNamespace(gpus=["2", "3"], dev_sysfs_path=str(tmp_path / "card")))
  assert memory("AMD") == (13 * GIB, 16 * GIB, UNLIMITED)
  (tmp_path / "card/mem_info_vram_used").unlink()
  assert memory("AMD") == (HOST, HOST_TOTAL, UNLIMITED)
  open_fake("AMD", device_id=0, iface=SimpleNamespace(dev_impl=SimpleNamespace(vram_size=24 * GIB)))
  assert memory("AMD") == (24 * GIB, 24 * GIB, UNLIMITED), "tinygrad's own driver"


def test_metal_memory_is_recommended_working_set_minus_allocated(open_fake):
  open_fake("METAL", sysdevice=SimpleNamespace(
    recommendedMaxWorkingSetSize=lambda: 12 * GIB, currentAllocatedSize=lambda: GIB, maxBufferLength=lambda: 9 * GIB))
  assert memory("METAL") == (11 * GIB, 12 * GIB, 9 * GIB)


@pytest.mark.parametrize("device_type, unified, total, free", [
  (GPU_TYPE, 0, 24, 24), (GPU_TYPE, 1, 24, 12), (CPU_TYPE, 0, 24, 12), (GPU_TYPE, 1, 8, 8)])
def test_opencl_memory_is_device_memory_or_less_if_shared_with_host(fake_opencl, device_type, unified, total, free):
  fake_opencl(TYPE=device_type, GLOBAL_MEM_SIZE=total * GIB, MAX_MEM_ALLOC_SIZE=6 * GIB, HOST_UNIFIED_MEMORY=unified)
  assert memory("CL") == (free * GIB, total * GIB, 6 * GIB)


LOCAL, SHARED = webgpu.WGPUHeapProperty_DeviceLocal, webgpu.WGPUHeapProperty_HostVisible


@pytest.mark.parametrize("kind, heaps, free, total", [
  ("DiscreteGPU", [(LOCAL, 24 * GIB), (SHARED, 64 * GIB)], 24, 24), ("CPU", [(LOCAL | SHARED, 20 * GIB)], 12, 20),
  ("IntegratedGPU", [(LOCAL, 6 * GIB), (LOCAL | SHARED, 2 * GIB)], 8, 8), ("DiscreteGPU", [], 12, 16)])
def test_webgpu_memory_is_heaps_of_adapter_and_its_limits(monkeypatch, open_fake, kind, heaps, free, total):
  def get_limits(device, target): target.limits.maxBufferSize, target.limits.maxStorageBufferBindingSize = 4 * GIB, GIB
  def get_info(adapter, target):
    target.adapterType = getattr(webgpu, f"WGPUAdapterType_{kind}")
    properties = ctypes.cast(target.nextInChain, ctypes.POINTER(webgpu.WGPUAdapterPropertiesMemoryHeaps)).contents
    array = (webgpu.WGPUMemoryHeapInfo * len(heaps))(*(webgpu.WGPUMemoryHeapInfo(*heap) for heap in heaps))
    properties.heapCount = len(heaps)
    properties.heapInfo = ctypes.cast(array, type(properties.heapInfo))
  for name, function in {"DeviceGetLimits": get_limits, "DeviceGetAdapter": lambda device: None, "AdapterGetInfo":
                         get_info, "AdapterHasFeature": lambda adapter, feature: bool(heaps)}.items():
    monkeypatch.setattr(webgpu, f"wgpu{name}", function)
  open_fake("WEBGPU", device_res=None)
  assert memory("WEBGPU") == (free * GIB, total * GIB, GIB)


@pytest.mark.parametrize(("name", "expected"), [("CUDA", True), ("NV", False)])
def test_cuda_sources_need_dynamic_shared_memory_which_nv_lacks(open_fake, name, expected):
  open_fake(name)
  with helpers.Context(DEV=name):
    Device[name].renderer = object.__new__(CUDARenderer)
    assert kernels.cuda_source.speaks_cuda() == expected


def test_a_captured_kernel_waits_for_none_that_another_one_waits_for():
  a, b, c = [Buffer("CPU", 4, dtypes.int32) for _ in range(3)]
  graph, tracker, nodes = SimpleNamespace(calls=[], nodes=[]), DepsTracker(), [object() for _ in range(6)]
  cases = [([a], [0], []), ([b, a], [0], [0]), ([c, a, b], [0], [1]), ([a], [0], [2]), ([b, c], [], [2]),
           ([a, b], [0, 1], [3, 4])]   # the third one reads what the first and the second write
  for node, (buffers, write, expected) in zip(nodes, cases, strict=True):
    graph.calls.append((None, None, buffers))   # the buffers in CUDAGraph's call are whole ones
    def access(_, *operands): return tracker.access_resources(*operands)
    found = tinygrad_patches.required_nodes(graph, access, None, write, node)
    graph.nodes.append(node)
    assert [*map(nodes.index, found)] == expected


def test_every_cuda_device_compiles_to_machine_code_with_wgmma(monkeypatch):
  """Also the second one, which pipeline parallelism compiles for. patch_cuda is undone at the end."""
  def wrap(owner, name, function):
    monkeypatch.setattr(owner, name, functools.partialmethod(function, getattr(owner, name)))
  monkeypatch.setattr(tinygrad_patches, "wrap", wrap)
  monkeypatch.setattr(compiler_cuda.nvrtc, "nvrtcVersion", lambda *_: 0)
  monkeypatch.setattr(compiler_cuda.NVRTCCompiler, "compile", lambda self, _: (self.ptx, self.compile_options[0]))
  first = compiler_cuda.NVRTCCompiler("sm_90")
  tinygrad_patches.patch_cuda()
  for compiler in (first, first, compiler_cuda.NVRTCCompiler("sm_90")):
    assert compiler.compile_cached("") == (False, "--gpu-architecture=sm_90a")
