"""An engine, and a file with its prefix cache."""
import shutil
from pathlib import Path

import pytest
from helpers.engines import BS, ENGINE, prompt
from helpers.prefix_cache import contents, restart, run

from tinyvllm import LLM


@pytest.fixture(scope="module")
def engine(folder): return LLM(folder, **ENGINE)


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory):
  """A file with the blocks of three prompts, and the cached blocks of the engine that wrote it."""
  restart(engine)
  run(engine, *[prompt(5 * BS + i, "saved", i) for i in range(3)])
  path = tmp_path_factory.mktemp("saved") / "cache"
  assert engine.save_prefix_cache(path) == len(engine.blocks.cached_blocks)
  return path, contents(engine)


@pytest.fixture
def file(saved, tmp_path):
  """A copy of the saved file."""
  return Path(shutil.copy(saved[0], tmp_path / "cache"))
