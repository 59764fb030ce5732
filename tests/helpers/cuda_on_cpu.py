"""Runs the extension's CUDA sources on a CPU: tests/data/cuda_on_cpu.h replaces the statements of PTX."""
import ctypes
import functools
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np
from tinygrad import Tensor, UOp, dtypes

from tinyvllm_extra.kernels import cuda_source

HEADER = pathlib.Path(__file__).parents[1] / "data" / "cuda_on_cpu.h"
COMPILER = pathlib.Path(sys.executable).with_name("clang++")
REPLACED = ["mma", "copy_async", "commit_copies", "wait_for_copies", "pack", "transposed", "scaled", "power_of_2",
            "address", "float_of", "read_flag", "count"]
HOPPER = ["init", "arrive", "wait", "wgmma", "copy", "arrive_after_copies", "pack_e4m3"]


@functools.cache
def compiled(source: str) -> ctypes.CDLL:
  """Compile a kernel's source with the header, without the functions that the header replaces."""
  assert not {*re.findall(r"#define (\w+)", source)} & {*re.findall(r"template <\w+ (\w+)", source)}, "macros"
  for name in REPLACED + HOPPER:   # from its first line to one that ends with a brace
    pattern = rf"^(template <.*>[ \n])?DEVICE \w+ {name}\((.*\}}$|(.*\n)*?\}}$)"
    source, count = re.subn(pattern, "", source, count=1, flags=re.M)
    assert count == 1 or name in HOPPER, name
  source = re.sub(r"^#define PTX\(.*$", "#define PTX(...)", source, flags=re.M)
  name, = re.findall(r"^#define NAME (\w+)", source, re.M)
  types = re.findall(r"([\w* ]+[*]) \w+", re.findall(r"^#define ARGUMENTS (.*)$", source, re.M)[0])
  arguments = ", ".join(f"({kind})pointers[{i}]" for i, kind in enumerate(types))
  run = (f"static void** pointers;\nstatic void call() {{ {name}({arguments}); }}\n"
         'extern "C" void run(void** given, Index groups, int threads) {\n'
         "  pointers = given; gridDim = groups; launch(call, threads); }")
  with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder, "kernel.cpp")
    numbers = "\n".join(re.findall(r"^#define (?:TYPE|IS_E4M3) .*$", source, re.M))
    file.write_text(f'{numbers}\n#include "{HEADER}"\n{source}\n{run}\n')
    library = file.with_suffix(".so")
    options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-nostdlib++"]
    subprocess.run([COMPILER, *options, file, "-o", library, "-lm"], check=True)
    return ctypes.CDLL(library)


def run(launch: cuda_source.Launch, **tensors: Tensor | None) -> list[Tensor]:
  """Like cuda_source.run, at once."""
  given = {name: x for name, x in tensors.items() if x is not None}
  operands = {name: UOp.placeholder(x.max_shape, x.dtype, i) for i, (name, x) in enumerate(given.items())}
  program = cuda_source.program_of(launch, operands)
  # numpy has no bfloat16
  is_bf16 = [x.dtype == dtypes.bfloat16 for x in given.values()]
  words = [x.bitcast(dtypes.uint16) if bf16 else x for x, bf16 in zip(given.values(), is_bf16, strict=True)]
  arrays = [np.ascontiguousarray(x.numpy()) for x in words]
  pointers = (ctypes.c_void_p * len(arrays))(*[x.ctypes.data for x in arrays])
  groups = (ctypes.c_uint * 3)(*program.arg.global_size)
  class Index(ctypes.Structure): _fields_ = [(name, ctypes.c_uint) for name in "xyz"]
  compiled(program.src[2].arg).run(pointers, Index(*groups), ctypes.c_int(program.arg.local_size[0]))
  assert not dict(zip(given, arrays, strict=True)).get("flags", np.zeros(1)).any(), "flags are zeros after a kernel"
  outputs = [Tensor(x) for x in arrays]
  return [x.bitcast(dtypes.bfloat16) if bf16 else x for x, bf16 in zip(outputs, is_bf16, strict=True)]
