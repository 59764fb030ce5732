"""The core without the extension and without any package but its dependencies: it reaches the milestones with plain
attention and plain layers, and the error of each feature that needs the extension says so in one line."""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from reference import tiny_model

ROOT = Path(__file__).parents[1]
DEPENDENCIES = {"tinygrad", "numpy", "safetensors", "sentencepiece"}
ENVIRONMENT = {**os.environ, "DEV": "CPU", "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests"]))}


QUICK = ["hello", "paged_attention"]
SLOW = ["ten_requests", "continuous_batching", "paging", "streaming"]   # these lower their kernels in each process


def run_alone(tmp_path_factory, names):
  """The report of core_alone.py."""
  folder = tiny_model(tmp_path_factory.mktemp("model"))
  json_folder = tiny_model(tmp_path_factory.mktemp("json"), tokenizer=False)
  (json_folder / "tokenizer.json").write_text("{}")
  run = subprocess.run([sys.executable, ROOT / "tests" / "core_alone.py", folder, json_folder, *names], env=ENVIRONMENT,
                       capture_output=True, text=True, timeout=240)
  assert run.returncode == 0, run.stderr
  return json.loads(run.stdout)


@pytest.fixture(scope="module")
def alone(tmp_path_factory): return run_alone(tmp_path_factory, QUICK)


@pytest.fixture(scope="module")
def slow_milestones(tmp_path_factory): return run_alone(tmp_path_factory, SLOW)["milestones"]


def test_core_imports_its_dependencies_only(alone):
  packages = {name for name in alone["packages"] if not name.startswith("_sysconfigdata_")}
  assert packages >= {*DEPENDENCIES, "tinyvllm"}


@pytest.mark.parametrize("name", QUICK)
def test_core_alone_reaches_the_milestone(alone, name): assert not alone["milestones"][name], alone["milestones"][name]


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_core_alone_reaches_the_slow_milestone(slow_milestones, name):
  assert not slow_milestones[name], slow_milestones[name]


@pytest.mark.parametrize("feature, error, part", [
  ("logprobs", "InputError", "'logprobs'"), ("messages", "ImportError", "huggingface"),
  ("speculative_config", "ImportError", "speculation"), ("tensor_parallel_size", "ImportError", "parallel"),
  ("quantization", "InputError", "quantization='int8'"), ("kv_cache_dtype", "InputError", "kv_cache_dtype='int8'"),
  ("cudagraph_capture_sizes", "ImportError", "graphs"), ("gguf", "InputError", "GGUF"),
  ("tokenizer.json", "InputError", "tokenizer.model"), ("skip_special_tokens", "ImportError", "huggingface"),
  ("AsyncLLM", "ImportError", "AsyncLLM"), ("chat", "ImportError", "chat"), ("step", "ImportError", "step"),
  ("get_metrics", "ImportError", "get_metrics")])
def test_feature_of_the_extension_names_it_in_its_error(alone, feature, error, part):
  name, message = alone["errors"][feature]
  assert name == error, message
  assert part in message and "tinyvllm_extra" in message and "\n" not in message


def test_command_line_without_the_extension_names_it(tmp_path):
  shutil.copytree(ROOT / "tinyvllm", tmp_path / "tinyvllm", ignore=shutil.ignore_patterns("__pycache__"))
  block = "import sys\nsys.modules['tinyvllm_extra'] = None\n"   # the environment may have it installed
  (tmp_path / "sitecustomize.py").write_text(block)
  run = subprocess.run([sys.executable, "-m", "tinyvllm", "generate", "Hello"], cwd=tmp_path, capture_output=True,
                       env={**os.environ, "PYTHONPATH": str(tmp_path)}, text=True, timeout=60)
  assert run.returncode == 1 and run.stdout == ""
  assert run.stderr.splitlines()[-1] == (
    "ImportError: cli is part of the package tinyvllm_extra, which is not importable: pip install tinyvllm")
