"""A file with an engine's prefix cache."""
import shutil
from pathlib import Path

import pytest
from helpers.engines import BS, prompt
from helpers.prefix_cache import contents, restart, run


@pytest.fixture(scope="module")
def saved(llm, tmp_path_factory):
  """A file with the blocks of three prompts, and the cached blocks of the engine that wrote it."""
  restart(llm)
  run(llm, *[prompt(5 * BS + i, "saved", i) for i in range(3)])
  path = tmp_path_factory.mktemp("saved") / "cache"
  assert llm.save_prefix_cache(path) == len(llm.blocks.cached_blocks)
  return path, contents(llm)


@pytest.fixture
def file(saved, tmp_path):
  """A copy of the saved file."""
  return Path(shutil.copy(saved[0], tmp_path / "cache"))
