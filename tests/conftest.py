"""Models and engines that several files share: each graph is captured once."""
import pytest
from reference import ENGINE, tiny_model

from tinyvllm import LLM
from tinyvllm.device import open_device

open_device()   # it finds a compiler that is not on the PATH; some tests ask the device as they are collected


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
