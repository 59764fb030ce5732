"""The wheel, installed with the core dependencies in a new environment. It runs outside of the checkout, without this
machine's environment variables, programs and caches. `pytest -m install`."""
import configparser
import os
import resource
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path

import pytest
from helpers.gguf_files import write_gguf
from helpers.models import tiny_model

ROOT = Path(__file__).parents[2]
CORE = {"tinygrad", "safetensors", "sentencepiece", "numpy"}
TOOLS = ("cat", "echo", "env", "false", "ls", "sh", "true", "uname")
IMPORT_SECONDS = 0.3
CONSTRAINTS = {"PIP_CONSTRAINT": str(ROOT / ".ci" / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def source_files(*folders: str) -> list[Path]:
  """Return the files of the working tree that git does not ignore."""
  names = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders], cwd=ROOT,
                         capture_output=True, text=True, check=True).stdout
  return [Path(name) for name in names.split("\0") if name and (ROOT / name).exists()]


@dataclass
class Installation:
  """A virtual environment with tinyvllm. Commands run with a minimal PATH and minimal environment variables."""
  folder: Path      # the environment
  elsewhere: Path   # the working directory of commands
  bare: Path        # a folder with TOOLS only, for the PATH
  compiler: Path    # a clang that is not on the PATH

  @property
  def python(self) -> str: return str(self.folder / "bin" / "python")

  def pip(self, *arguments: str | Path) -> None:
    """Run the environment's pip with this machine's settings, but without the checkout on PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run([self.python, "-m", "pip", *map(str, arguments)], env={**env, **CONSTRAINTS},
                         cwd=self.elsewhere, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr

  def run(self, home: Path, *command: str, programs: Path | None = None, stdin: str = "",
          **env: str) -> subprocess.CompletedProcess:
    """Run a command with `home` as the home folder, which has the caches, and only TOOLS and `programs` on the PATH."""
    empty = str(self.elsewhere / "none")   # no OpenCL or CUDA: tinygrad would prefer them to the CPU
    env = {"PATH": f"{programs or empty}:{self.bare}", "HOME": str(home), "LANG": "C.UTF-8", "OCL_ICD_VENDORS": empty,
           "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run(command, input=stdin, cwd=self.elsewhere, capture_output=True, text=True, check=False,
                          timeout=300, env=env)

  def tinyvllm(self, home: Path, *arguments: str, programs: Path | None = None,
               stdin: str = "") -> subprocess.CompletedProcess:
    """Run the `tinyvllm` command by its full path: its folder is not on the PATH."""
    return self.run(home, str(self.folder / "bin" / "tinyvllm"), *arguments, programs=programs, stdin=stdin)

  @contextmanager
  def compiler_next_to_python(self) -> Iterator[None]:
    """Add clang to the environment's bin folder, as the extra [cpu] does."""
    link = self.folder / "bin" / "clang"
    link.symlink_to(self.compiler)
    try: yield
    finally: link.unlink()


@pytest.fixture(scope="session")
def empty_environment(tmp_path_factory) -> Installation:
  folder = tmp_path_factory.mktemp("installed")
  venv.create(folder / "venv", with_pip=True)
  for name in ("elsewhere", "bare"): (folder / name).mkdir()
  for name in TOOLS: (folder / "bare" / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name}"))
  clang = shutil.which("clang", path=os.path.dirname(sys.executable)) or shutil.which("clang")
  assert clang, "no clang: pip install '.[test]' installs it"
  return Installation(folder / "venv", folder / "elsewhere", folder / "bare", Path(clang).resolve())


@pytest.fixture(scope="session")
def wheel(empty_environment, tmp_path_factory) -> Path:
  """The wheel of a copy of the checkout with compiled modules: pip leaves files behind in the folder that it builds."""
  copy, wheel_folder = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
  for name in source_files():
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / name, copy / name)
  subprocess.run([sys.executable, "-m", "compileall", "-q", "tinyvllm", "examples", "tests"], cwd=copy, check=True)
  empty_environment.pip("wheel", copy, "--no-deps", "--wheel-dir", wheel_folder)
  wheels = list(wheel_folder.iterdir())
  assert len(wheels) == 1 and wheels[0].suffix == ".whl"
  return wheels[0]


@pytest.fixture(scope="session")
def installed(empty_environment, wheel) -> Installation:
  empty_environment.pip("install", wheel)
  return empty_environment


@pytest.fixture(scope="session")
def programs(installed, tmp_path_factory) -> Path:
  """A folder for the PATH with a compiler."""
  folder = tmp_path_factory.mktemp("programs")
  (folder / "clang").symlink_to(installed.compiler)
  return folder


@pytest.fixture(scope="session")
def used_home(installed, programs, tmp_path_factory) -> Path:
  """A home folder whose caches have all kernels of the bundled model."""
  home = tmp_path_factory.mktemp("used-home")
  assert says_hello(installed.tinyvllm(home, "generate", "Hello", programs=programs))
  return home


def says_hello(run: subprocess.CompletedProcess) -> bool:
  """Check that the command printed the output in the README."""
  assert (run.returncode, run.stdout) == (0, "Hello, world!\n"), run.stdout + run.stderr
  assert "Traceback" not in run.stderr
  return True


def compiler_lines(run: subprocess.CompletedProcess) -> list[str]:
  return [line for line in run.stderr.splitlines() if "tinyvllm[cpu]" in line]


def test_wheel_contains_files_of_both_packages_only(wheel):
  """With the bundled model and the chat page, and without tests, caches and CI scripts."""
  expected = {str(name): ROOT / name for name in source_files("tinyvllm")}
  expected |= {str(name.relative_to("examples")): ROOT / name for name in source_files("examples/tinyvllm_extra")}
  assert {"tinyvllm/default_model/model.safetensors", "tinyvllm_extra/server/chat.html"} <= expected.keys()
  with zipfile.ZipFile(wheel) as archive:
    names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected.keys()
    assert [name for name in names if archive.read(name) != expected[name].read_bytes()] == []


def test_wheel_metadata_has_license_command_version_and_dependencies(wheel):
  with zipfile.ZipFile(wheel) as archive:
    dist_info = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
    assert archive.read(dist_info["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    entry_points = configparser.ConfigParser()
    entry_points.read_string(archive.read(dist_info["entry_points.txt"]).decode())
    metadata = message_from_string(archive.read(dist_info["METADATA"]).decode())
  assert {name: dict(entry_points[name]) for name in entry_points.sections()} == {
    "console_scripts": {"tinyvllm": "tinyvllm_extra.cli:main"}}
  requirements = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
  assert {line.partition("=")[0].rstrip("<>~!") for line in requirements} == CORE
  assert metadata["Version"] in wheel.name and metadata["Requires-Python"] == ">=3.11"


def test_imported_modules_are_from_the_installed_wheel(installed, tmp_path):
  run = installed.run(tmp_path, installed.python, "-c", """
import sys, tinyvllm
from tinyvllm_extra import cli
from tinyvllm_extra.server import client
print(tinyvllm.__file__, cli.__file__, client.__file__, *sys.path[1:], sep="\\n")""")
  assert run.returncode == 0, run.stderr
  first, *rest = run.stdout.splitlines()
  assert Path(first).is_relative_to(installed.folder)
  assert all(Path(line).is_relative_to(installed.folder) for line in rest[:2])
  assert not any(Path(line).is_relative_to(ROOT) for line in rest)


def test_hello_compiler_on_path_prints_hello_world(installed, used_home, programs):
  run = installed.tinyvllm(used_home, "generate", "Hello", programs=programs)
  assert says_hello(run) and "float32 on CPU" in run.stderr and compiler_lines(run) == []


def test_hello_compiler_next_to_python_prints_hello_world(installed, tmp_path):
  with installed.compiler_next_to_python(): run = installed.tinyvllm(tmp_path, "generate", "Hello")
  assert says_hello(run) and compiler_lines(run) == []
  assert any((tmp_path / ".cache" / "tinygrad").iterdir()), "the run must compile kernels: its cache was empty"


def test_hello_without_compiler_names_remedy_and_works_with_one_later(installed, tmp_path, programs):
  for _ in range(2):
    run = installed.tinyvllm(tmp_path, "generate", "Hello")
    assert (run.returncode, run.stdout) == (1, "") and "Traceback" not in run.stderr
    assert "no C compiler" in run.stderr and len(compiler_lines(run)) == 1
  for _ in range(2):
    run = installed.tinyvllm(tmp_path, "generate", "Hello", programs=programs)
    assert says_hello(run) and compiler_lines(run) == []


def test_import_has_no_side_effects(installed, tmp_path):
  """No devices, threads, environment variables or files."""
  home, before = tmp_path / "home", set(installed.elsewhere.iterdir())
  home.mkdir()
  run = installed.run(home, installed.python, "-c", """
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
    run = installed.run(tmp_path, installed.python, "-c", code)
    assert run.returncode == 0, run.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  pairs = [(seconds("pass"), seconds("import tinyvllm")) for _ in range(5)]
  assert min(x for _, x in pairs) - min(x for x, _ in pairs) < IMPORT_SECONDS


def write_tokenizer_json_model(folder: Path) -> Path:
  """Copy the bundled model with a tokenizer.json instead of its tokenizer.model."""
  shutil.copytree(ROOT / "tinyvllm" / "default_model", folder, ignore=shutil.ignore_patterns("tokenizer.model"))
  (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
  return folder


@pytest.mark.parametrize("extra,arguments", [
  ("server", ["serve"]), ("server", ["serve", "--port", "0"]), ("hf", ["generate", "Hello", "--model", "MODEL"]),
  ("hf", ["chat"]), ("grammar", ["generate", "Hello", "--structured-outputs", '{"regex": "a"}']),
], ids=["serve", "serve with options", "tokenizer.json", "chat", "structured outputs"])
def test_command_without_its_extra_fails_and_names_it(installed, used_home, programs, tmp_path, extra, arguments):
  model = str(write_tokenizer_json_model(tmp_path / "model"))
  arguments = [model if x == "MODEL" else x for x in arguments]
  run = installed.tinyvllm(used_home, *arguments, programs=programs, stdin="Hello\n")
  *log, last = run.stderr.splitlines()
  assert run.returncode == 1 and run.stdout == "" and "Traceback" not in run.stderr
  assert last.startswith("tinyvllm: ") and f"pip install 'tinyvllm[{extra}]'" in last
  assert all(line.startswith(("loaded ", "KV cache")) for line in log), run.stderr


def test_convert_gguf_without_compiler_writes_model(installed, tmp_path):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf"), "Q8_0", tokenizer="llama")
  run = installed.tinyvllm(tmp_path / "home", "convert", str(path), str(tmp_path / "converted"))
  assert (run.returncode, run.stdout, run.stderr) == (0, f"{tmp_path / 'converted'}\n", "")
  assert (tmp_path / "converted" / "tokenizer.model").exists()


def test_source_archive_installs_without_git(installed, used_home, programs, tmp_path):
  """As downloaded from GitHub: no .git folder, and git is not on the PATH."""
  archive, folder = tmp_path / "tinyvllm.tar.gz", tmp_path / "installed"
  subprocess.run(["git", "archive", "--prefix=tinyvllm-main/", f"--output={archive}", "HEAD"], cwd=ROOT, check=True)
  installed.pip("install", "--no-deps", "--target", folder, archive)
  assert {path.name for path in (folder / "tinyvllm" / "default_model").iterdir()} == {
    path.name for path in source_files("tinyvllm/default_model")}
  run = installed.run(used_home, installed.python, "-c", "import tinyvllm; print(tinyvllm.__file__)",
                      PYTHONPATH=str(folder))
  assert run.stdout.strip() == str(folder / "tinyvllm" / "__init__.py"), run.stderr
  assert says_hello(installed.run(used_home, installed.python, "-m", "tinyvllm", "generate", "Hello",
                                  programs=programs, PYTHONPATH=str(folder)))
