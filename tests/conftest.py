"""Models and engines that several files share: each graph is captured once. And what is common to all runs: which tests
are quick, how many processes there are, and what tests have to tell."""
import os
from collections.abc import Callable

import pytest
from reference import ENGINE, tiny_model
from tinygrad import Device

from tinyvllm import LLM
from tinyvllm_extra.kernels import prepare_device as open_device

# `pytest -m quick`: these files' tests that are not slow. They compile little, or nothing
QUICK = {"test_cli.py", "test_errors.py", "test_readme.py", "test_scheduler.py", "test_size.py", "test_stops.py",
         "test_tokenizer.py"}

open_device()   # it finds a compiler that is not on the PATH; some tests ask the device as they are collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
  for item in items:
    if item.path.name in QUICK and not item.get_closest_marker("slow"): item.add_marker("quick")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
  """What -n auto stands for: as most of a run is compiling, on one core a process, two processes take turns with the
  files. Alone, in this process: one file, lanes that fill a machine as it is, and a device that is no CPU."""
  one_file = len(config.args) == 1 and ".py" in config.args[0]
  alone = one_file or config.option.markexpr in ("backend", "model", "ray", "slow") or Device.DEFAULT != "CPU"
  return 0 if alone else min(2, os.cpu_count() or 1)


@pytest.fixture
def tell(record_property: Callable[[str, str], None]) -> Callable[..., None]:
  """tell(*lines): shown at the end of the run, of tests that pass, too, in whatever process."""
  return lambda *lines: record_property("told", "\n".join(lines))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
  for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
    for name, text in report.user_properties:
      if name == "told" and report.when == "call": terminalreporter.write_line("\n" + text)


@pytest.fixture(scope="session")
def folder(tmp_path_factory): return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def words_folder(tmp_path_factory):
  """A model whose greedy text is of letters."""
  return tiny_model(tmp_path_factory.mktemp("words"), words=True)


@pytest.fixture(scope="session")
def llm(folder):
  """A pool that never runs out."""
  return LLM(folder, **ENGINE)


@pytest.fixture(scope="session")
def small_llm(folder):
  """A pool of 12 blocks of 4 tokens."""
  return LLM(folder, num_gpu_blocks_override=13, **ENGINE)


@pytest.fixture(scope="session")
def words_llm(words_folder): return LLM(words_folder, **ENGINE)
