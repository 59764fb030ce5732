"""Makes kernels of tinygrad from CUDA sources."""
import functools, pathlib
from collections.abc import Callable
from typing import NamedTuple

from tinygrad import Tensor, UOp, dtypes
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.uop.ops import KernelInfo, Ops, ProgramInfo

from tinyvllm.backend import renderer

TYPES = {dtypes.half: "f16", dtypes.bfloat16: "bf16"}   # PTX's names
ARGUMENTS = {   # types of operands by name; HAS_... tells a source whether a kernel has the operand
  "out": "char*", "weight": "const char*", "x": "const char*", "partial": "float*", "flags": "u32*",
  "q": "const char*", "keys": "const char*", "values": "const char*", "scales": "const float*", "table": "const int*",
  "logs": "float*", "sinks": "const float*", "tokens": "const int*",
  "scale": "const u32*", "offset": "const u32*", "bias": "const float*"}


def speaks_cuda() -> bool:
  """Return whether kernels are compiled from CUDA C++ and may contain its statements."""
  return isinstance(renderer(), CUDARenderer)


class Launch(NamedTuple):
  """A source's macros and the sizes of its launch: work groups in x, y and z, threads per group, and bytes of dynamic
  shared memory."""
  name: str
  file: str   # is read after tensor_cores.cuh
  definitions: dict[str, object]
  groups: tuple[int, int, int]
  threads: int
  shared_bytes: int


@functools.cache
def read(file: str) -> str: return pathlib.Path(__file__).with_name(file).read_text()


def run(make: Callable[[dict[str, UOp]], Launch], **tensors: Tensor | None) -> list[Tensor]:
  """Return the tensors after a kernel. make: called with the operands of one device. tensors: by names of ARGUMENTS."""
  operands = {name: x for name, x in tensors.items() if x is not None}
  def program(*uops: UOp) -> UOp: return program_of(make, dict(zip(operands, uops, strict=True)))
  return Tensor.custom_kernel(*operands.values(), fxn=program)


def program_of(make: Callable[[dict[str, UOp]], Launch], operands: dict[str, UOp]) -> UOp:
  """Return a kernel whose source is still to be compiled."""
  launch = make(operands)
  name = f"{launch.name}_smem{launch.shared_bytes}"   # see use_dynamic_shared_memory
  definitions = {
    "NAME": name, "ARGUMENTS": ", ".join(f"{ARGUMENTS[x]} {x}" for x in operands),
    "OMITTED": " ".join(f"{kind} {x} = 0;" for x, kind in ARGUMENTS.items() if x not in operands),
    **{f"HAS_{x.upper()}": int(x in operands) for x in ARGUMENTS}, **launch.definitions}
  macros = [f"#define {key} {value}" for key, value in definitions.items()]
  source = "\n".join([*macros, read("tensor_cores.cuh"), read(launch.file)])
  slots = tuple(range(len(operands)))
  written = tuple(i for i, x in enumerate(operands) if not ARGUMENTS[x].startswith("const"))
  arguments = UOp(Ops.LINEAR, src=tuple(x.base for x in operands.values()))
  info = ProgramInfo(name, launch.groups, (launch.threads, 1, 1), (), slots, written, slots[1:], renderer().target)
  return UOp(Ops.PROGRAM, src=(UOp(Ops.SINK, arg=KernelInfo(name)), arguments, UOp(Ops.SOURCE, arg=source)), arg=info)
