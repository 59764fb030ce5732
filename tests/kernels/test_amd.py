"""amd.py without the emulator: the environment and the command of each variant, its errors and its records."""
import json
import stat
import sys

import amd
import pytest
from benchmarks import backends


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


@pytest.mark.parametrize(("name", "target"), [
  ("rdna3-llvm", "MOCKKFD+AMD:LLVM"), ("rdna3-hip", "MOCKKFD+AMD:HIPCC"),
  ("rdna4-llvm", "MOCKKFD+AMD:LLVM:gfx1201"), ("rdna4-hip", "MOCKKFD+AMD:HIPCC:gfx1201")])
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
