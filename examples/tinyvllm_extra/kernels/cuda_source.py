"""Makes kernels of tinygrad from CUDA sources and, for CPUs, from C sources."""
import functools, pathlib, typing

from tinygrad import Device, Tensor, UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.renderer.cstyle import ClangRenderer, CUDARenderer
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

from tinyvllm.backend import renderer

from . import cpu, schedule

TYPES = {dtypes.half: "f16", dtypes.bfloat16: "bf16"}   # PTX's names
# Types of operands by name. HAS_... tells a source whether a kernel has the operand, else a constant has its name
OPERANDS = {name: kind for kind, names in {
  "char*": "out scratch ax", "const char*": "weight x q keys values a b", "float*": "partial logs",
  "const float*": "scales sinks bias goals", "unsigned*": "flags", "const unsigned*": "scale offset",
  "const int*": "table tokens row_groups adapters"}.items() for name in names.split()}


# Whether kernels are compiled from CUDA C++ and may have dynamic shared memory, which DEV=NV does not support
def speaks_cuda() -> bool: return isinstance(renderer(), CUDARenderer) and Device.DEFAULT != "NV"
def speaks_c() -> bool: return isinstance(renderer(), ClangRenderer)   # whether clang compiles kernels from C


def has_mma(dtype: DType) -> bool:
  """Return whether kernels may multiply numbers of this dtype with the statement mma of tensor_cores.cuh."""
  return speaks_cuda() and ((8, 16, 16), dtype) in [(core.dims, core.dtype_in) for core in renderer().tensor_cores]


# Whether the device has warpgroup products (Hopper), and tinygrad_patches.py lets its compiler use them
def has_wgmma() -> bool: return Device.DEFAULT == "CUDA" and speaks_cuda() and renderer().target.arch == "sm_90"


def wgmma(n: int, is_e4m3: bool = False) -> dict[str, object]:
  """Return the macros with which hopper.cuh defines wgmma for n rows of x. is_e4m3: numbers of x and W."""
  sums, pointers = [", ".join(form.format(i) for i in range(n // 2)) for form in ("%{0}", '"+f"(sums[{0}])')]
  # Then the descriptor of x, whether to add to the sums, and whether x is stored transposed (16 bits only)
  w = ", ".join(f"%{n // 2 + i}" for i in range(4))
  kind = f'm64n{n}k32.f32.e4m3.e4m3"' if is_e4m3 else f'm64n{n}k16.f32." TYPE "." TYPE'
  return {"SUMS": pointers, "WGMMA":
    f'"setp.ne.b32 p, %{n // 2 + 5}, 0; wgmma.mma_async.sync.aligned.{kind} " {{{sums}}},"'
    f'" {{{w}}}, %{n // 2 + 4}, p, 1, 1{f", %{n // 2 + 6}" * (not is_e4m3)};"'}


class Launch(typing.NamedTuple):
  """A source's macros and the sizes of its launch: work groups in x, y and z, threads per group, and bytes of dynamic
  shared memory."""
  name: str
  file: str   # is read after tensor_cores.cuh and, with wgmma, hopper.cuh; in C, after EXP2
  definitions: dict[str, object]
  groups: tuple[int, int, int]   # C: cores, 1, 1
  threads: int = 1
  shared_bytes: int = 0


def run(launch: Launch, **tensors: Tensor | None) -> list[Tensor]:
  """Return the tensors after a kernel. tensors: by names of OPERANDS."""
  return schedule.call(functools.partial(program_of, launch), **tensors)


def program_of(launch: Launch, operands: dict[str, UOp]) -> UOp:
  """Return a kernel whose source is still to be compiled."""
  slots = tuple(range(len(operands)))
  name = f"{launch.name}_smem{launch.shared_bytes}"   # see use_dynamic_shared_memory
  is_c, last_core = not speaks_cuda(), launch.groups[0] - 1
  core = UOp.param(len(slots), dtypes.int, (), vmin_vmax=(0, last_core), name="core_id", addrspace=AddrSpace.ALU)
  definitions = {
    "NAME": name, "ARGUMENTS": ", ".join(f"{OPERANDS[x]} {x}" for x in operands),
    **{f"HAS_{x.upper()}": int(x in operands) for x in OPERANDS}, **launch.definitions}
  macros = [f"#define {key} {value}" for key, value in definitions.items()]
  headers = [] if is_c else ["tensor_cores.cuh", *["hopper.cuh"] * ("WGMMA" in definitions)]
  texts = [pathlib.Path(__file__).with_name(file).read_text() for file in (*headers, launch.file)]
  constant = "static" if is_c else "constexpr"
  omitted = [f"{constant} {kind} const {x} = 0;" for x, kind in OPERANDS.items() if x not in operands]
  source = "\n".join([*macros, *omitted, *[cpu.EXP2] * is_c, *texts])
  written = tuple(i for i, x in enumerate(operands) if not OPERANDS[x].startswith("const"))
  arguments = UOp(Ops.LINEAR, src=tuple(x.base for x in operands.values()))
  info = ProgramInfo(name, launch.groups, (launch.threads, 1, 1), (core,) if is_c else (), slots, written,
                     slots[1:], renderer().target)
  return UOp(Ops.PROGRAM, src=(UOp(Ops.SINK, arg=KernelInfo(name)), arguments, UOp(Ops.SOURCE, arg=source)), arg=info)
