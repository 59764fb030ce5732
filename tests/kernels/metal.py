"""Render the engine's kernels for Metal on any machine, check Metal's limits, and parse each kernel with clang. Nothing
runs: a stand-in replaces tinygrad's Metal device, whose buffers hold no data and whose kernels compute nothing.

python tests/kernels/metal.py [--kernels FOLDER] [--record]"""
import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
LIMITS = {"threadgroup_memory": 2**15, "buffers": 31, "threads": 1024}   # bytes; Metal's limits for a kernel
TYPES = {"bool": 1, "char": 1, "uchar": 1, "short": 2, "ushort": 2, "int": 4, "uint": 4, "long": 8, "ulong": 8,
         "half": 2, "bfloat": 2, "float": 4}   # Metal's scalar types that have vectors, in bytes
SIZES = {**TYPES, "signed char": 1, "unsigned char": 1, "unsigned short": 2, "unsigned long": 8}
VECTORS = "".join(f"typedef {name} {name}{n} __attribute__((ext_vector_type({n})));\n"
                  f"#define {name}{n}(...) ({name}{n}{{__VA_ARGS__}})\n" for name in TYPES for n in (2, 3, 4))
# A header for a C++ compiler with the names that tinygrad's MetalRenderer uses
SHIM = (ROOT / "tests/data/metal_stdlib.h").read_text() + VECTORS


class Kernel(NamedTuple):
  """A rendered kernel. threadgroup_memory: bytes. buffers: arguments, scalars included. threads: per threadgroup."""
  name: str
  source: str
  threadgroup_memory: int
  buffers: int
  threads: int


def make_kernel(name: str, source: str, local_size: tuple[int, ...]) -> Kernel:
  arrays = re.findall(r"^\s*threadgroup __attribute__\(\(aligned\(16\)\)\) ([\w ]+) \w+\[(\d+)\];$", source, re.M)
  assert len(arrays) == len(re.findall(r"^\s*threadgroup\b", source, re.M)), f"unknown array in {source}"
  parameters = re.search(r"^kernel void \w+\((.*)\) \{$", source, re.M)
  assert parameters, source
  buffers = len(re.findall(r"(?:^|, )(?:volatile )?(?:device|constant) ", parameters[1]))
  memory = sum(-(-SIZES[kind] * int(n) // 16) * 16 for kind, n in arrays)
  return Kernel(name, source, memory, buffers, math.prod(local_size))


def violations(kernel: Kernel) -> list[str]:
  """Return one line for each of Metal's limits that a kernel exceeds."""
  return [f"{kernel.name}: {name}={getattr(kernel, name)} must be at most {limit}"
          for name, limit in LIMITS.items() if getattr(kernel, name) > limit]


def parse(kernels: list[Kernel]) -> str:
  """Parse the kernels with clang++. Return its errors, or ""."""
  from tinyvllm_extra.programs import find_compiler
  if not (compiler := find_compiler()): raise RuntimeError("no clang found: pip install '.[cpu]'")
  with tempfile.TemporaryDirectory() as folder:
    Path(folder, "metal_stdlib").write_text(SHIM)
    for i, kernel in enumerate(kernels): Path(folder, f"{i}_{kernel.name}.metal").write_text(kernel.source)
    files = [path.name for path in Path(folder).glob("*.metal")]
    flags = ["-std=c++17", "-fsyntax-only", "-nostdinc", "-I.", "-Wno-unknown-attributes", "-Wno-unused"]
    run = subprocess.run([compiler, "-x", "c++", *flags, *files], cwd=folder, capture_output=True, text=True)
  return run.stderr if run.returncode else ""


def install_device() -> None:
  """Replace tinygrad's Metal device with one that renders kernels and does not run them. Call it before the device is
  opened. The values that it returns to the engine are 0."""
  from tinygrad.device import Compiled, Compiler
  from tinygrad.renderer.cstyle import MetalRenderer
  from tinygrad.runtime.ops_null import NullAllocator, NullGraph, NullProgram

  class ZeroAllocator(NullAllocator):
    def _copyout(self, dest: memoryview, src: Any) -> None: dest[:] = bytes(len(dest))

  class MetalDevice(Compiled):
    def __init__(self, device: str):
      self.sysdevice = SimpleNamespace(recommendedMaxWorkingSetSize=lambda: 2**34, currentAllocatedSize=lambda: 0,
                                       maxBufferLength=lambda: 2**33)
      super().__init__(device, ZeroAllocator(self), [MetalRenderer],   # type: ignore
                       NullProgram, NullGraph, arch="Apple9")

  module: Any = ModuleType("tinygrad.runtime.ops_metal")
  module.MetalDevice, module.MetalCompiler = MetalDevice, type("MetalCompiler", (Compiler,), {})
  sys.modules[module.__name__] = module


def render_kernels() -> list[Kernel]:
  """Run the engine on the stand-in, and return all kernels that it compiled, including a few that fill random weights.
  Needs a process with DEV=METAL."""
  install_device()
  from benchmarks.common import SHAPES, random_weights
  from tinygrad import Device
  from tinygrad.codegen import to_program_cache
  from tinygrad.uop.ops import Ops

  import tinyvllm
  from helpers.engines import greedy, tokens
  from tinyvllm import LLM
  from tinyvllm_extra import graph_policy
  graph_policy.CAPTURE_THRESHOLD = 0   # capture each graph instead of running a larger one
  bundled = Path(tinyvllm.__file__).parent / "default_model"
  seeded = {"temperature": 0.8, "seed": 1}
  filtered = {**seeded, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
  fields: list[dict] = [seeded, filtered, {"logprobs": 3, "prompt_logprobs": 3}, {"allowed_token_ids": [4, 5]},
                        {**filtered, "logprobs": 2, "presence_penalty": 0.2, "frequency_penalty": 0.1,
                         "repetition_penalty": 1.1, "logit_bias": {5: 1.0}}]

  def run(folder: Path, lengths: tuple[int, ...], fields: list[dict], **options: Any) -> None:
    """Run prompts of these lengths, a batch of six if there are `fields`, and a prompt with each of the fields."""
    llm = LLM(str(folder), max_model_len=256, max_num_seqs=8, max_num_batched_tokens=64, **options)
    jobs = [*((length, 1, {}) for length in lengths), *[(1, 6, {})] * bool(fields), *((5, 1, x) for x in fields)]
    for length, count, params in jobs:
      prompts = [tokens(3 + (7 * i + j) % 700 for j in range(length)) for i in range(count)]
      llm.generate(prompts, greedy(2, **params))   # type: ignore[arg-type]

  run(bundled, (1, 9, 64), fields, dtype="float16")
  run(bundled, (1, 64), [seeded], dtype="float32")
  run(bundled, (1, 64), [], dtype="float16", kv_cache_dtype="int8")
  run(bundled, (1, 64), [], dtype="float16", quantization="int4")
  for quantization in (None, "int4"):
    with tempfile.TemporaryDirectory() as folder, random_weights():
      Path(folder, "config.json").write_text(json.dumps({**SHAPES["llama-3.1-8b"], "num_hidden_layers": 1}))
      run(Path(folder), (1, 64), [], dtype="float16", quantization=quantization)
  assert Device.DEFAULT == "METAL"
  programs = [x for x in to_program_cache.values() if x.arg.target.device == "METAL"]
  sources = {next(part.arg for part in x.src if part.op is Ops.SOURCE): x.arg for x in programs}
  return [make_kernel(info.function_name, source, info.local_size or ()) for source, info in sources.items()]


def make_record(kernels: list[Kernel]) -> dict[str, Any]:
  """Return Metal's record in backends.json, whose table shows the largest numbers of all kernels."""
  return {"backend": "METAL", "status": "rendered and parsed", "kernels": len(kernels),
          **{name: max(getattr(kernel, name) for kernel in kernels) for name in LIMITS},
          "tinygrad": version("tinygrad"), "date": str(date.today())}


def main() -> int:
  from benchmarks import backends
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--kernels", metavar="FILE", type=Path, help="write the kernels to FILE as JSON")
  parser.add_argument("--record", action="store_true", help="write the result to backends.json")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:   # not the user's kernel cache: its kernels come from a device
    os.environ |= {"DEV": "METAL", "CACHEDB": f"{folder}/cache.db"}
    os.environ.pop("DMC", None)   # which kernels/tinygrad_patches.py sets for CPUs: no vectors
    kernels = render_kernels()
  if args.kernels: args.kernels.write_text(json.dumps(kernels))
  problems = [line for kernel in kernels for line in violations(kernel)]
  problems += parse(kernels).splitlines()
  for problem in problems: print(problem, file=sys.stderr)
  if problems: return 1
  records = {x["backend"]: x for x in [*backends.read_records(), make_record(kernels)]}
  print("Metal:", backends.cells(records["METAL"])[1])
  if args.record: backends.RECORDS.write_text(json.dumps([*records.values()], indent=2, ensure_ascii=False) + "\n")
  return 0


if __name__ == "__main__":
  sys.path[:0] = [str(ROOT / name) for name in ("", "tests", "examples")]
  sys.exit(main())
