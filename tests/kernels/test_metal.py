"""Kernels for Metal, rendered by metal.py without a Mac: within Metal's limits, and accepted by clang. amd.py without
the emulator."""
import json
import stat
import subprocess
import sys
from pathlib import Path

import amd
import pytest
from benchmarks import backends
from helpers.data import DATA, read_data
from metal import Kernel, make_kernel, make_record, parse, violations

SCRIPT, CASES = Path(__file__).with_name("metal.py"), read_data("kernel_cases.json")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
  """All kernels. metal.py renders them in a new process with DEV=METAL."""
  path = tmp_path_factory.mktemp("metal") / "kernels.json"
  run = subprocess.run([sys.executable, SCRIPT, "--kernels", path], capture_output=True, text=True)
  assert path.exists(), run.stderr
  return [Kernel(*fields) for fields in json.loads(path.read_text())]


def test_all_kernels_are_within_limits_and_parse(kernels, print_at_end):
  assert [line for kernel in kernels for line in violations(kernel)] == []
  assert parse(kernels) == ""
  print_at_end(f"Metal: {backends.cells(make_record(kernels))[1]}")


def test_kernels_cover_all_parts_of_the_engine(kernels):
  names, text = {kernel.name for kernel in kernels}, "".join(kernel.source for kernel in kernels)
  assert {"linear", "rms_norm", "attend", "rope_and_write", "scatter", "adjust_logits"} <= names
  for word in ("half4", "float4", "simdgroup_multiply_accumulate", "threadgroup_barrier", "log2"): assert word in text
  assert len(kernels) > 100


@pytest.mark.parametrize(("old", "new"), CASES["typos in Metal"])
def test_parse_rejects_a_typo(kernels, old, new):
  kernel = next(kernel for kernel in kernels if old in kernel.source)
  broken = kernel._replace(source=kernel.source.replace(old, new, 1))
  assert parse([kernel]) == "" and "error:" in parse([broken])


def test_violations_name_each_exceeded_limit():
  kernel = make_kernel("big", (DATA / "large_kernel.metal").read_text(), (32, 64))
  assert kernel[2:] == (2**15 + 16, 2, 2048)
  assert violations(kernel) == ["big: threadgroup_memory=32784 must be at most 32768",
                                "big: threads=2048 must be at most 1024"]
  assert violations(kernel._replace(buffers=32, **dict.fromkeys(("threads", "threadgroup_memory"), 1))) == [
    "big: buffers=32 must be at most 31"]


# amd.py: the environment and the command of each variant, its errors and its records

@pytest.fixture
def repository(tmp_path, monkeypatch):
  """An empty checkout of tinygrad, and a clang-19 that is never called."""
  (tmp_path / "tinygrad/test/mockgpu").mkdir(parents=True)
  (tmp_path / "bin").mkdir()
  (tmp_path / "bin/clang-19").touch(0o755)
  (tmp_path / "run").mkdir()
  monkeypatch.setenv("TINYGRAD_REPO", str(tmp_path / "tinygrad"))
  monkeypatch.setenv("PATH", str(tmp_path / "bin"))
  return tmp_path / "tinygrad"


@pytest.fixture
def main(tmp_path, monkeypatch):
  """Call amd.py with arguments. Its records go to a copy of backends.json."""
  (tmp_path / "records.json").write_text(json.dumps(backends.read_records()))
  monkeypatch.setattr(backends, "RECORDS", tmp_path / "records.json")
  def call(*args):
    monkeypatch.setattr(sys, "argv", ["amd.py", *args])
    return amd.main()
  return call


@pytest.mark.parametrize(("name", "target"), CASES["emulated devices"])
def test_environment_selects_emulated_device_and_compiler(repository, tmp_path, name, target):
  environment = amd.environment(amd.VARIANTS[name], tmp_path / "run")
  assert environment["DEV"] == target and environment["HCQDEV_WAIT_TIMEOUT_MS"] == "600000"
  assert environment["CACHEDB"] == str(tmp_path / "run/cache.db")
  hipcc = tmp_path / "run/bin/hipcc"
  assert hipcc.exists() == name.endswith("-hip") == environment["PATH"].startswith(str(hipcc.parent))
  if hipcc.exists():
    assert hipcc.stat().st_mode & stat.S_IXUSR and "-unaligned-access-mode" in hipcc.read_text()


@pytest.mark.parametrize("value", [None, "", "relative", "/nonexistent"])
def test_missing_checkout_is_an_error_that_names_the_variable(main, monkeypatch, capsys, value):
  if value is None: monkeypatch.delenv("TINYGRAD_REPO", raising=False)
  else: monkeypatch.setenv("TINYGRAD_REPO", value)
  assert main("rdna3-llvm") == 1
  assert f"TINYGRAD_REPO={value or ''} must be" in capsys.readouterr().err


def test_record_replaces_only_the_run_of_its_variant(main, repository, monkeypatch):
  answers = iter(["61 passed in 99.0s\n", "1 failed, 60 passed in 99.0s\n", "61 passed in 98.0s\n"])
  monkeypatch.setattr(backends, "run_with", lambda *args: next(answers))
  others = [x for x in backends.read_records() if x["backend"] != "AMD"]
  assert main("rdna3-llvm", "--record") == 0 and main("rdna4-hip", "--record") == 1
  assert main("rdna3-llvm", "--record") == 0
  record = next(x for x in backends.read_records() if x["backend"] == "AMD")
  runs = {(x["device"], x["compiler"]): (x["passed"], x["failed"], x["seconds"]) for x in record["runs"]}
  assert runs["RDNA3", "LLVM"] == (61, 0, 98) and runs["RDNA4", "HIP C"] == (60, 1, 99)
  assert [x for x in backends.read_records() if x["backend"] != "AMD"] == others
