"""The package on a machine that has only Python: its wheel, installed with the core dependencies in an environment of
its own, and run far from the checkout, without the checkout's variables, programs and caches. `pytest -m install`."""
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
from reference import tiny_model, write_gguf

pytestmark = pytest.mark.install
ROOT = Path(__file__).parents[1]
CORE = {"tinygrad", "safetensors", "sentencepiece", "numpy"}
TOOLS = ("cat", "echo", "env", "false", "ls", "sh", "true", "uname")
IMPORT_SECONDS = 0.3
CONSTRAINTS = {"PIP_CONSTRAINT": str(ROOT / ".ci" / "constraints.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def tracked(*folders: str) -> list[Path]:
  """What git would hand on of the checkout, as it is now: no caches, no environment, nothing built."""
  listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders], cwd=ROOT,
                          capture_output=True, text=True, check=True).stdout
  return [Path(name) for name in listed.split("\0") if name and (ROOT / name).exists()]


@dataclass
class Installation:
  """An environment with tinyvllm in it. What it runs sees a PATH of ours, and no variable that a user need not have
  set."""
  folder: Path      # of the environment
  elsewhere: Path   # the folder in which it is run
  bare: Path        # a PATH: what every machine has, of TOOLS
  compiler: Path    # a clang, which it does not see

  @property
  def python(self) -> str: return str(self.folder / "bin" / "python")

  def pip(self, *arguments: str | Path) -> None:
    """pip as this machine has it, which sees no checkout but what it is given."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    run = subprocess.run([self.python, "-m", "pip", *map(str, arguments)], env={**env, **CONSTRAINTS},
                         cwd=self.elsewhere, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr

  def run(self, home: Path, *command: str, programs: Path | None = None, stdin: str = "",
          **env: str) -> subprocess.CompletedProcess:
    """Run a command with its home, and so its caches, in a folder, and no program but the TOOLS and `programs`."""
    none = str(self.elsewhere / "none")   # no OpenCL, no CUDA, which tinygrad would take before the CPU
    env = {"PATH": f"{programs or none}:{self.bare}", "HOME": str(home), "LANG": "C.UTF-8", "OCL_ICD_VENDORS": none,
           "CUDA_VISIBLE_DEVICES": "", **env}
    return subprocess.run(command, input=stdin, cwd=self.elsewhere, capture_output=True, text=True, check=False,
                          timeout=300, env=env)

  def tinyvllm(self, home: Path, *arguments: str, programs: Path | None = None,
               stdin: str = "") -> subprocess.CompletedProcess:
    """The command that pip has put there, by its full path: its folder is on no PATH."""
    return self.run(home, str(self.folder / "bin" / "tinyvllm"), *arguments, programs=programs, stdin=stdin)

  @contextmanager
  def compiler_beside_python(self) -> Iterator[None]:
    """As with [cpu], whose clang lies in the environment."""
    link = self.folder / "bin" / "clang"
    link.symlink_to(self.compiler)
    try: yield
    finally: link.unlink()


@pytest.fixture(scope="session")
def empty_environment(tmp_path_factory) -> Installation:
  folder = tmp_path_factory.mktemp("stranger")
  venv.create(folder / "venv", with_pip=True)
  for name in ("elsewhere", "bare"): (folder / name).mkdir()
  for name in TOOLS: (folder / "bare" / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name}"))
  beside = shutil.which("clang", path=os.path.dirname(sys.executable)) or shutil.which("clang")
  assert beside, "no clang: pip install '.[test]' brings one"
  return Installation(folder / "venv", folder / "elsewhere", folder / "bare", Path(beside).resolve())


@pytest.fixture(scope="session")
def wheel(empty_environment, tmp_path_factory) -> Path:
  """Made of a copy of the checkout, as pip leaves things behind where it builds; modules have been run there, too."""
  copy, made = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("wheel")
  for name in tracked():
    (copy / name).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / name, copy / name)
  subprocess.run([sys.executable, "-m", "compileall", "-q", "tinyvllm", "examples", "tests"], cwd=copy, check=True)
  empty_environment.pip("wheel", copy, "--no-deps", "--wheel-dir", made)
  found = list(made.iterdir())
  assert len(found) == 1 and found[0].suffix == ".whl"
  return found[0]


@pytest.fixture(scope="session")
def installed(empty_environment, wheel) -> Installation:
  empty_environment.pip("install", wheel)
  return empty_environment


@pytest.fixture(scope="session")
def programs(installed, tmp_path_factory) -> Path:
  """A PATH on which there is a compiler."""
  folder = tmp_path_factory.mktemp("programs")
  (folder / "clang").symlink_to(installed.compiler)
  return folder


@pytest.fixture(scope="session")
def used_home(installed, programs, tmp_path_factory) -> Path:
  """A home in whose caches all is that the shipped model needs."""
  home = tmp_path_factory.mktemp("used-home")
  assert says_hello(installed.tinyvllm(home, "generate", "Hello", programs=programs))
  return home


def says_hello(run: subprocess.CompletedProcess) -> bool:
  """Whether it did what the README promises. AssertionError with its stderr if not."""
  assert (run.returncode, run.stdout) == (0, "Hello, world!\n"), run.stdout + run.stderr
  assert "Traceback" not in run.stderr
  return True


def lines_about_the_compiler(run: subprocess.CompletedProcess) -> list[str]:
  return [line for line in run.stderr.splitlines() if "tinyvllm[cpu]" in line]


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
  """Each file with its bytes, those of the shipped model and the chat page among them: no tests, no caches, no CI."""
  expected = {str(name): ROOT / name for name in tracked("tinyvllm")}
  expected |= {str(name.relative_to("examples")): ROOT / name for name in tracked("examples/tinyvllm_extra")}
  assert {"tinyvllm/default_model/model.safetensors", "tinyvllm_extra/server/chat.html"} <= expected.keys()
  with zipfile.ZipFile(wheel) as archive:
    found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected.keys()
    assert [name for name in found if archive.read(name) != expected[name].read_bytes()] == []


def test_the_wheel_says_what_it_is_and_what_it_needs(wheel):
  with zipfile.ZipFile(wheel) as archive:
    about = {name.partition(".dist-info/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
    assert archive.read(about["licenses/LICENSE"]) == (ROOT / "LICENSE").read_bytes()
    points = configparser.ConfigParser()
    points.read_string(archive.read(about["entry_points.txt"]).decode())
    metadata = message_from_string(archive.read(about["METADATA"]).decode())
  assert {name: dict(points[name]) for name in points.sections()} == {
    "console_scripts": {"tinyvllm": "tinyvllm_extra.cli:main"}}
  needed = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
  assert {line.partition("=")[0].rstrip("<>~!") for line in needed} == CORE
  assert metadata["Version"] in wheel.name and metadata["Requires-Python"] == ">=3.11"


def test_what_runs_is_the_installed_copy(installed, tmp_path):
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


def test_hello_with_a_compiler_on_the_path(installed, used_home, programs):
  """The first run, in `used_home`, filled its caches; this one finds them."""
  run = installed.tinyvllm(used_home, "generate", "Hello", programs=programs)
  assert says_hello(run) and "float32 on CPU" in run.stderr and lines_about_the_compiler(run) == []


def test_hello_with_a_compiler_only_beside_its_python(installed, tmp_path):
  with installed.compiler_beside_python(): run = installed.tinyvllm(tmp_path, "generate", "Hello")
  assert says_hello(run) and lines_about_the_compiler(run) == []
  assert any((tmp_path / ".cache" / "tinygrad").iterdir()), "it compiled for itself: its cache was empty"


def test_without_any_compiler_one_line_says_how_to_get_one_and_nothing_that_is_kept_breaks_when_it_comes(
    installed, tmp_path, programs):
  for _ in range(2):
    run = installed.tinyvllm(tmp_path, "generate", "Hello")
    assert (run.returncode, run.stdout) == (1, "") and "Traceback" not in run.stderr
    assert "no C compiler" in run.stderr and len(lines_about_the_compiler(run)) == 1
  came = installed.tinyvllm(tmp_path, "generate", "Hello", programs=programs)
  assert says_hello(came) and lines_about_the_compiler(came) == []
  assert says_hello(installed.tinyvllm(tmp_path, "generate", "Hello", programs=programs))


def test_import_opens_starts_writes_and_sets_nothing(installed, tmp_path):
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


def test_import_is_quick(installed, tmp_path):
  """In seconds of a core, the best of five, less what Python itself takes: others on the machine make it no slower."""
  def seconds(code: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run = installed.run(tmp_path, installed.python, "-c", code)
    assert run.returncode == 0, run.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  pairs = [(seconds("pass"), seconds("import tinyvllm")) for _ in range(5)]
  assert min(x for _, x in pairs) - min(x for x, _ in pairs) < IMPORT_SECONDS


def folder_of_tokenizer_json(folder: Path) -> Path:
  """The shipped model, but for its tokenizer: one of Hugging Face's kind."""
  shutil.copytree(ROOT / "tinyvllm" / "default_model", folder, ignore=shutil.ignore_patterns("tokenizer.model"))
  (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}')
  return folder


@pytest.mark.parametrize("extra,arguments", [
  ("server", ["serve"]), ("server", ["serve", "--port", "0"]), ("hf", ["generate", "Hello", "--model", "MODEL"]),
  ("hf", ["chat"]), ("grammar", ["generate", "Hello", "--structured-outputs", '{"regex": "a"}']),
], ids=["serve", "serve with options", "tokenizer.json", "chat", "structured outputs"])
def test_what_needs_an_extra_says_in_one_line_which(installed, used_home, programs, tmp_path, extra, arguments):
  model = str(folder_of_tokenizer_json(tmp_path / "model"))
  arguments = [model if x == "MODEL" else x for x in arguments]
  run = installed.tinyvllm(used_home, *arguments, programs=programs, stdin="Hello\n")
  *log, last = run.stderr.splitlines()
  assert run.returncode == 1 and run.stdout == "" and "Traceback" not in run.stderr
  assert last.startswith("tinyvllm: ") and f"pip install 'tinyvllm[{extra}]'" in last
  assert all(line.startswith(("loaded ", "KV cache")) for line in log), run.stderr


def test_a_gguf_is_converted_without_any_compiler(installed, tmp_path):
  path = write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path / "hf"), "Q8_0", tokenizer="llama")
  run = installed.tinyvllm(tmp_path / "home", "convert", str(path), str(tmp_path / "converted"))
  assert (run.returncode, run.stdout, run.stderr) == (0, f"{tmp_path / 'converted'}\n", "")
  assert (tmp_path / "converted" / "tokenizer.model").exists()


def test_an_archive_of_the_checkout_installs_without_git(installed, used_home, programs, tmp_path):
  """As one downloads it: no .git folder, and git is on no PATH."""
  archive, folder = tmp_path / "tinyvllm.tar.gz", tmp_path / "installed"
  subprocess.run(["git", "archive", "--prefix=tinyvllm-main/", f"--output={archive}", "HEAD"], cwd=ROOT, check=True)
  installed.pip("install", "--no-deps", "--target", folder, archive)
  assert {path.name for path in (folder / "tinyvllm" / "default_model").iterdir()} == {
    path.name for path in tracked("tinyvllm/default_model")}
  run = installed.run(used_home, installed.python, "-c", "import tinyvllm; print(tinyvllm.__file__)",
                      PYTHONPATH=str(folder))
  assert run.stdout.strip() == str(folder / "tinyvllm" / "__init__.py"), run.stderr
  assert says_hello(installed.run(used_home, installed.python, "-m", "tinyvllm", "generate", "Hello",
                                  programs=programs, PYTHONPATH=str(folder)))
