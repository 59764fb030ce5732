"""The core with its dependencies only: it passes the milestones with its plain backend, and each feature that needs the
extension raises a one-line error that names tinyvllm_extra."""
import json
import sys

import pytest
from helpers.commands import ROOT, process, run_process
from helpers.data import read_data
from helpers.models import tiny_model
from helpers.parameters import slow

DEPENDENCIES = {"tinygrad", "numpy", "safetensors", "sentencepiece"}


QUICK = ["hello", "paged_attention"]
SLOW = ["ten_requests", "continuous_batching", "paging", "streaming"]   # lower many kernels in each process


def run_alone(tmp_path_factory, names):
  """Run core_alone.py, and return its report."""
  folder = tiny_model(tmp_path_factory.mktemp("model"))
  json_folder = tiny_model(tmp_path_factory.mktemp("json"), tokenizer=False)
  (json_folder / "tokenizer.json").write_text("{}")
  script = ROOT / "tests" / "core" / "core_alone.py"
  run = run_process(sys.executable, script, folder, json_folder, *names, DEV="CPU", PYTHONPATH=f"{ROOT}:{ROOT}/tests")
  assert run.returncode == 0, run.stderr
  return json.loads(run.stdout)


@pytest.fixture(scope="module")
def alone(tmp_path_factory): return run_alone(tmp_path_factory, QUICK)


@pytest.fixture(scope="module")
def run_slow(tmp_path_factory): return run_alone(tmp_path_factory, SLOW)


def test_core_alone_imports_its_dependencies(alone):
  packages = {name for name in alone["packages"] if not name.startswith("_sysconfigdata_")}
  assert packages >= {*DEPENDENCIES, "tinyvllm"}


@pytest.mark.parametrize("name,run", [*((name, "alone") for name in QUICK), *slow(*((x, "run_slow") for x in SLOW))])
def test_core_alone_passes_milestone(request, name, run):
  traceback = request.getfixturevalue(run)["milestones"][name]
  assert not traceback, traceback


@pytest.mark.parametrize("feature,part", read_data("extension_features.json").items())
def test_extension_feature_in_core_raises_error_naming_tinyvllm_extra(alone, feature, part):
  error_type, message = alone["errors"][feature]
  assert error_type == ("ImportError" if feature == "AsyncLLM" else "InputError"), message
  assert part in message and "tinyvllm_extra" in message and "\n" not in message


def test_core_alone_has_no_methods_of_the_extension_and_ignores_a_default_that_it_lacks(alone):
  assert alone["missing"] == ["chat", "get_metrics", "step"]   # hasattr does not raise
  assert alone["defaults"] == 1.0


def test_command_line_without_extension_exits_with_error_naming_it(tmp_path):
  block = "import sys\nsys.modules['tinyvllm_extra'] = None\n"   # the environment may have it installed
  (tmp_path / "sitecustomize.py").write_text(block)
  run = process("generate", "Hello", PYTHONPATH=str(tmp_path))
  assert run.returncode == 1 and run.stdout == ""
  last_line = run.stderr.splitlines()[-1]
  assert last_line.startswith("ImportError: cli ") and "tinyvllm_extra" in last_line
  assert "pip install tinyvllm" in last_line
