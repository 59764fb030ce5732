"""Models and engines shared by several test files, the fake device, and settings of every run: the default lane, the
number of processes, and lines that tests print at the end."""
import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import fake_device
from helpers.commands import CHAT
from helpers.engines import ENGINE
from helpers.models import tiny_model
from tinygrad import Device
from tinygrad.helpers import CACHELEVEL

from tinyvllm import LLM
from tinyvllm_extra.programs import prepare_device as open_device
from tinyvllm_extra.serving.async_engine import CaptureThread

# Folders whose engines run on the fake device, except in modules with `pytestmark = pytest.mark.real`
FAKE = {"core", "sampling", "text", "cache", "trace", "serving", "router", "cli", "page"}
# `pytest -m quick` runs the tests in these files of the default lane
QUICK = {"test_errors.py", "test_fields.py", "test_memory.py", "test_scheduler.py", "test_size.py", "test_stops.py",
         "test_structure.py", "test_tokenizer.py", "test_tools.py", "test_vllm_commands.py"}

CACHELEVEL.value = 1   # no captured steps on disk: some tests replace functions that a capture calls
open_device()   # finds a compiler that is not on the PATH; some tests query the device during collection


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  for item in items:
    if item.path.name in QUICK: item.add_marker("quick")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
  """Return the number of processes for -n auto: two, because each one mostly computes on a single core. Zero for a
  single file, and on any device except the CPU."""
  one_file = len(config.args) == 1 and ".py" in config.args[0]
  return 0 if one_file or Device.DEFAULT != "CPU" else min(2, os.cpu_count() or 1)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
  """Run an async test, for 60 s at most."""
  if not inspect.iscoroutinefunction(pyfuncitem.obj): return None
  fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
  asyncio.run(asyncio.wait_for(pyfuncitem.obj(**fixtures), 60))
  return True


@pytest.fixture(scope="module", autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[None]:
  """Run a module's engines on the fake device, or on the real one. Then no thread may capture: tinygrad's settings
  are global, so that it would disturb tests that compute without an engine."""
  folder = request.path.relative_to(Path(__file__).parent).parts[0]
  with pytest.MonkeyPatch.context() as monkeypatch:
    if folder in FAKE and not request.node.get_closest_marker("real"): fake_device.install(monkeypatch)
    yield
    for thread in [x for x in threading.enumerate() if isinstance(x, CaptureThread)]:
      thread.should_end = True
      thread.join(60)
    assert "tinyvllm-engine" not in [x.name for x in threading.enumerate()], "shut the AsyncLLM down"


@pytest.fixture
def print_at_end(record_property: Callable[[str, str], None]) -> Callable[..., None]:
  """Return a function that prints lines at the end of the run, from any process, even if the test passes."""
  return lambda *lines: record_property("summary", "\n".join(lines))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
  for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
    for name, text in report.user_properties:
      if name == "summary" and report.when == "call": terminalreporter.write_line("\n" + text)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path: return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def words_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """A model whose greedy output contains only letters."""
  return tiny_model(tmp_path_factory.mktemp("words"), words=True)


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """As words_folder, with a chat template, and a context length with which requests can run for a minute."""
  return tiny_model(tmp_path_factory.mktemp("chat"), words=True, max_position_embeddings=32_768, chat_template=CHAT)


# Engines of a module, on the module's device

@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
  """An engine whose KV cache never runs out of blocks."""
  return LLM(folder, **ENGINE)


@pytest.fixture(scope="module")
def small_llm(folder: Path) -> LLM:
  """An engine with a KV cache of 12 blocks of 4 tokens."""
  return LLM(folder, num_gpu_blocks_override=13, **ENGINE)


@pytest.fixture(scope="module")
def words_llm(words_folder: Path) -> LLM: return LLM(words_folder, **ENGINE)
