"""How an engine starts: kernels from files, whatever has become of these; few shapes of step, captured before they are
needed; what is said of it meanwhile."""
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from tinygrad import Tensor, UOp, function, helpers
from tinygrad.uop.ops import KernelInfo

import tinyvllm
from tinyvllm import device
from tinyvllm.llama import with_inputs

ROOT = Path(tinyvllm.__file__).parents[1]


def files(folder): return [path for path in folder.rglob("*") if path.is_file()]


# one layer is traced for all

def test_a_trace_of_one_layer_serves_others_only_if_it_reads_all_that_is_theirs():
  weights = [Tensor.full((4,), float(i)).contiguous().realize() for i in range(3)]
  x = Tensor.ones(4).contiguous().realize()
  traced = function(lambda x: x + weights[0], precompile=True, allow_implicit=True)(x).uop

  def of(weight): return {x.uop: x.uop, weights[0].uop.buf_uop: weight.uop.buf_uop}
  for i, weight in enumerate(weights): assert Tensor(with_inputs(traced, of(weight))).tolist() == [i + 1.0] * 4
  with pytest.raises(AssertionError, match="not given"):
    with_inputs(traced, {weights[1].uop.buf_uop: weights[2].uop.buf_uop})


# kernels from files

CLANG = "clang", 1, 2   # a compiler: its name, size and age


@pytest.fixture
def lowered(monkeypatch):
  """The names of the kernels that tinygrad has lowered."""
  names = []

  def do_to_program(ast, renderer):
    names.append(ast.arg.name)
    return UOp.const(len(names))   # anything that can be told apart
  monkeypatch.setattr(device, "do_to_program", do_to_program)
  return names


def kept(folder, name="a", compiler=CLANG):
  ast = UOp.sink(UOp.const(1), arg=KernelInfo(name=name))
  return device.kept_program(folder, compiler, ast, device.renderer())


def test_a_kernel_is_lowered_once_for_all_runs(lowered, tmp_path):
  assert kept(tmp_path) is kept(tmp_path) and lowered == ["a"]
  assert kept(tmp_path, "b") is not kept(tmp_path) and lowered == ["a", "b"]
  assert len(files(tmp_path)) == 2 and all(len(path.name) == 64 for path in files(tmp_path)), "nothing is left behind"


def test_another_version_or_compiler_or_setting_has_kernels_of_its_own(lowered, monkeypatch, tmp_path):
  kept(tmp_path)
  with monkeypatch.context() as patched:
    patched.setattr("importlib.metadata.version", lambda name: "0.15.0")
    kept(tmp_path)
  with helpers.Context(NOOPT=1): kept(tmp_path)
  kept(tmp_path, compiler=("clang", 1, 3))
  assert len(lowered) == 4
  kept(tmp_path)
  assert len(lowered) == 4


@pytest.mark.parametrize("harm", [
  lambda path: path.write_bytes(b""), lambda path: path.write_bytes(path.read_bytes()[:-1]),
  lambda path: path.write_bytes(b"x" * 500), lambda path: path.write_bytes(path.read_bytes()[:40] + b"\xff" * 8),
  lambda path: path.write_bytes(pickle.dumps("no program")), lambda path: path.unlink(),
], ids=["empty", "cut short", "garbage", "changed", "of something else", "gone"])
def test_a_damaged_file_is_made_anew(lowered, tmp_path, harm):
  first = kept(tmp_path)
  harm(files(tmp_path)[0])
  again = kept(tmp_path)
  assert again is not first
  assert kept(tmp_path) is again and lowered == ["a", "a"]


def test_a_full_disk_keeps_nothing_and_harms_nothing(lowered, monkeypatch, tmp_path):
  def full(path, content): raise OSError(28, "No space left on device")
  with monkeypatch.context() as patched:
    patched.setattr(Path, "write_bytes", full)
    assert kept(tmp_path) is not kept(tmp_path)
  assert kept(tmp_path) is kept(tmp_path) and lowered == ["a", "a", "a"]


def start(folder, **env):
  """`tinyvllm generate Hello`, with its caches in a folder: a process that has begun."""
  env = {**os.environ, "CACHEDB": str(folder / "cache.db"), "DEV": "CPU",
         "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]), **env}
  return subprocess.Popen([sys.executable, "-m", "tinyvllm", "generate", "Hello"], env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def says_hello(run):
  """Its stderr."""
  out, err = run.communicate(timeout=120)
  assert (run.returncode, out) == (0, "Hello, world!\n"), err
  return err


def test_where_no_folder_can_be_made_one_line_says_so_and_all_goes_on(tmp_path):
  (tmp_path / "tinyvllm").write_text("a file in the folder's place, which stops root, too")
  lines = [line for line in says_hello(start(tmp_path)).splitlines() if "each start compiles all kernels" in line]
  assert len(lines) == 1 and str(tmp_path / "tinyvllm") in lines[0]


def test_cachelevel_0_keeps_nothing(tmp_path):
  says_hello(start(tmp_path, CACHELEVEL="0"))
  assert files(tmp_path) == []


def test_two_processes_that_start_at_once_share_a_folder(tmp_path):
  for run in [start(tmp_path) for _ in range(2)]: says_hello(run)
  found = files(tmp_path / "tinyvllm")
  assert found and all(len(path.name) == 64 for path in found)
  before = {path: path.stat().st_mtime_ns for path in found}
  says_hello(start(tmp_path))
  assert {path: path.stat().st_mtime_ns for path in files(tmp_path / "tinyvllm")} == before, "all was found"
