"""Models and engines shared by several test files, so that each graph is captured once. Also settings of every run:
the quick tests, the number of processes, and lines that tests print at the end."""
import os
from collections.abc import Callable

import pytest
from reference import ENGINE, tiny_model
from tinygrad import Device

from tinyvllm import LLM
from tinyvllm_extra.kernels import prepare_device as open_device

# `pytest -m quick` runs the tests in these files that are not marked slow: they compile few kernels or none
QUICK = {"test_cli.py", "test_errors.py", "test_readme.py", "test_scheduler.py", "test_size.py", "test_stops.py",
         "test_tokenizer.py"}

open_device()   # finds a compiler that is not on the PATH; some tests query the device during collection


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  for item in items:
    if item.path.name in QUICK and not item.get_closest_marker("slow"): item.add_marker("quick")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
  """Return the number of processes for -n auto: two, because each one mostly compiles on a single core. Zero for a
  single file, for lanes that already use the whole machine, and on any device except the CPU."""
  one_file = len(config.args) == 1 and ".py" in config.args[0]
  alone = one_file or config.option.markexpr in ("backend", "model", "ray", "slow") or Device.DEFAULT != "CPU"
  return 0 if alone else min(2, os.cpu_count() or 1)


@pytest.fixture
def print_at_end(record_property: Callable[[str, str], None]) -> Callable[..., None]:
  """Return a function that prints lines at the end of the run, from any process, even if the test passes."""
  return lambda *lines: record_property("summary", "\n".join(lines))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
  for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
    for name, text in report.user_properties:
      if name == "summary" and report.when == "call": terminalreporter.write_line("\n" + text)


@pytest.fixture(scope="session")
def folder(tmp_path_factory): return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def words_folder(tmp_path_factory):
  """A model whose greedy output contains only letters."""
  return tiny_model(tmp_path_factory.mktemp("words"), words=True)


@pytest.fixture(scope="session")
def llm(folder):
  """An engine whose KV cache never runs out of blocks."""
  return LLM(folder, **ENGINE)


@pytest.fixture(scope="session")
def small_llm(folder):
  """An engine with a KV cache of 12 blocks of 4 tokens."""
  return LLM(folder, num_gpu_blocks_override=13, **ENGINE)


@pytest.fixture(scope="session")
def words_llm(words_folder): return LLM(words_folder, **ENGINE)
