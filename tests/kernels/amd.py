"""Run the backend tests on tinygrad's emulator of AMD GPUs: RDNA3 (gfx1100) and RDNA4 (gfx1201), each with LLVM and
with HIP C. The emulator executes each instruction of the compiled kernels. It shows that results are correct, but
nothing about speed, memory limits or drivers. It is in tinygrad's repository, not in the installed package.

TINYGRAD_REPO=CHECKOUT python tests/kernels/amd.py [VARIANT ...] [-n PROCESSES] [-k TESTS] [--record]

Needs Debian's libllvm19 (LLVM) or clang-19 (HIP C). This file is also their pytest plugin."""
import argparse
import json
import os
import shutil
import sys
import tempfile
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
LLVM, HIP = "LLVM", "HIP C"
UNALIGNED = "-unaligned-access-mode"   # a feature of the target: the emulator rounds addresses down to whole words
# Replaces AMD's hipcc: clang, with definitions of the few functions of AMD's device libraries that kernels call
HIPCC = ROOT / "tests/data/amd_hipcc.sh"


class Variant(NamedTuple):
  device: str     # generation of the emulated GPU
  compiler: str
  target: str     # value of DEV


VARIANTS = {"rdna3-llvm": Variant("RDNA3", LLVM, "MOCKKFD+AMD:LLVM"),
            "rdna3-hip": Variant("RDNA3", HIP, "MOCKKFD+AMD:HIPCC"),
            "rdna4-llvm": Variant("RDNA4", LLVM, "MOCKKFD+AMD:LLVM:gfx1201"),
            "rdna4-hip": Variant("RDNA4", HIP, "MOCKKFD+AMD:HIPCC:gfx1201")}


def find_repository() -> Path:
  """Return tinygrad's checkout. Raises ValueError with what to set if it is missing."""
  name = os.environ.get("TINYGRAD_REPO", "")
  path = Path(name)
  if not path.is_absolute() or not (path / "test/mockgpu").is_dir():
    raise ValueError(f"TINYGRAD_REPO={name} must be the absolute path of a checkout of tinygrad's repository: "
                     "git clone https://github.com/tinygrad/tinygrad")
  return path


def environment(variant: Variant, folder: Path) -> dict[str, str]:
  """Return the variables of a run. folder: an empty folder for hipcc and compiled kernels. Raises ValueError if the
  checkout or clang-19 is missing."""
  find_repository()
  bin, path = folder / "bin", os.environ.get("PATH", "")
  if variant.compiler == HIP:
    if not shutil.which("clang-19"): raise ValueError("HIP C needs clang-19 on the PATH: apt-get install clang-19")
    bin.mkdir()
    shutil.copy(ROOT / "tests/data/amd_device_library.h", bin / "device_library.h")
    (bin / "hipcc").write_text(HIPCC.read_text().replace("@UNALIGNED@", UNALIGNED))
    (bin / "hipcc").chmod(0o755)
    path = f"{bin}{os.pathsep}{path}"
  python_path = os.pathsep.join([*(str(ROOT / name) for name in ("", "tests", "tests/kernels", "examples")),
                                 *filter(None, [os.environ.get("PYTHONPATH")])])
  return {**os.environ, "DEV": variant.target, "PATH": path, "PYTHONPATH": python_path,
          "CACHEDB": str(folder / "cache.db"),   # not the user's kernel cache: these kernels differ from a card's
          "HCQDEV_WAIT_TIMEOUT_MS": "600000"}    # for one kernel; the default is 30 s


def pytest_load_initial_conftests() -> None:
  """Let tinygrad import the emulator from its repository before conftest.py opens the device, and correct both. Changes
  no results of real cards."""
  package: Any = ModuleType("test")   # Python's own package test has the same name
  package.__path__ = [str(find_repository() / "test")]
  sys.modules["test"] = package
  from test.mockgpu.amd import pcode   # type: ignore[import-not-found]

  from tinygrad import UOp, dtypes
  from tinygrad.runtime.support.compiler_llvm import AMDLLVMCompiler, LLVMCompiler
  from tinygrad.uop.ops import Ops

  def exp2(base: UOp, x: UOp) -> UOp:
    """The pseudocode of v_exp_*, pow(2, x). The emulator takes a float16's bits as a float32: github.com/tinygrad/
    tinygrad/pull/16876."""
    return UOp(Ops.EXP2, src=(x.bitcast(dtypes.float32) if x.dtype.itemsize == 4 else x.cast(dtypes.float32),))
  pcode._FUNCS["pow"] = exp2
  from test.mockgpu.amd import emu   # type: ignore[import-not-found]
  if not emu._get_ftz_lib()[0]: raise pytest.UsageError("the emulator needs a clang that can link, to round as GPUs do")

  def init(self: Any, arch: str) -> None:
    self.arch = arch
    LLVMCompiler.__init__(self, "AMDGPU", arch, f"+cumode,{UNALIGNED}")
  AMDLLVMCompiler.__init__ = init   # type: ignore[method-assign]


def measure(variant: Variant, processes: int, tests: str) -> dict:
  """Run the tests, print their output, and return a record. Raises ValueError if something is missing."""
  from benchmarks import backends
  print(f"\n== emulated {variant.device}, {variant.compiler}", flush=True)
  with tempfile.TemporaryDirectory() as folder:
    command = ["-m", "pytest", "-p", "amd", "tests/kernels/test_backend.py", "-k", tests, "-n", str(processes),
               "--dist", "worksteal", "-o", "timeout=7200", "-o", "faulthandler_timeout=0"]
    output = backends.run_with(environment(variant, Path(folder)), *command)
  passed, failed, seconds = backends.read_tests(output)
  return {"device": variant.device, "compiler": variant.compiler, "passed": passed, "failed": failed,
          "seconds": round(seconds), "date": str(date.today())}


def write_record(record: dict) -> None:
  """Add a run to AMD's record in backends.json. It replaces the variant's earlier run."""
  from benchmarks import backends
  records = {x["backend"]: x for x in backends.read_records()}
  runs = {(x["device"], x["compiler"]): x for x in [*records.get("AMD", {}).get("runs", []), record]}
  records["AMD"] = {"backend": "AMD", "status": "emulated", "runs": [*runs.values()], "tinygrad": version("tinygrad")}
  backends.RECORDS.write_text(json.dumps([*records.values()], indent=2, ensure_ascii=False) + "\n")


def main() -> int:
  from benchmarks import backends
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("variants", nargs="*", choices=VARIANTS, help="emulated GPU and compiler (default: all)")
  parser.add_argument("-n", type=int, default=os.cpu_count(), metavar="PROCESSES", help="default: one per core")
  parser.add_argument("-k", default="", metavar="TESTS", help="only tests that match, as in pytest")
  parser.add_argument("--record", action="store_true", help="write the results to backends.json")
  args = parser.parse_args()
  if args.record and args.k: parser.error("--record needs all tests: omit -k")
  if args.record and any(x["backend"] == "AMD" and "runs" not in x for x in backends.read_records()):
    parser.error("backends.json has the record of a card, which shows more: omit --record")
  problems = list[str]()
  for name in args.variants or VARIANTS:
    try: record = measure(VARIANTS[name], args.n, args.k)
    except ValueError as e:
      problems.append(f"{name}: {e}")
      continue
    if record["failed"]: problems.append(f"{name}: {record['failed']} tests failed")
    if args.record: write_record(record)
  for problem in problems: print(problem, file=sys.stderr)
  return 1 if problems else 0


if __name__ == "__main__":
  sys.path[:0] = [str(ROOT / name) for name in ("", "tests", "tests/kernels", "examples")]
  sys.exit(main())
