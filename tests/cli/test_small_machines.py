"""Free memory within the limits of a process and its cgroups, and models that are refused, with the remedy."""
import json
import math
import resource
from unittest import mock

import pytest
from helpers import fake_device
from helpers.commands import FLAGS, error_line, run_command
from helpers.data import read_data
from helpers.engines import ENGINE
from helpers.gguf_files import write_gguf
from helpers.models import read_safetensors, tensor_shapes, tiny_config, tiny_model, write_safetensors
from helpers.quantized_models import open_model
from tinygrad import dtypes

from tinyvllm import LLM, InputError
from tinyvllm.backend import Memory
from tinyvllm_extra.formats import fit
from tinyvllm_extra import host_memory
from tinyvllm_extra.kernels import FastBackend, drivers

GIB = 2**30
# machine: files of all cases. cases: the content of /proc/self/cgroup, files below /sys/fs/cgroup, RLIMIT_DATA in GiB,
# and the expected free and total GiB
CGROUPS = read_data("cgroups.json")


# Limits

@pytest.mark.parametrize("case", CGROUPS["cases"], ids=lambda case: case["about"])
def test_free_memory_is_least_limit_minus_used(monkeypatch, tmp_path, case):
  """The machine has 16 GiB, 12 of them free; this process uses 1 GiB."""
  for name, text in {**CGROUPS["machine"], "proc/self/cgroup": case["cgroup"], **case["files"]}.items():
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text(f"{text}\n")
  monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
  monkeypatch.setattr(host_memory, "CGROUPS", tmp_path)
  limit = resource.RLIM_INFINITY if case["rlimit"] is None else case["rlimit"] * GIB
  monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_DATA: (limit, limit)}[kind])
  free, total = drivers.host_memory().free, drivers.device_memory("CPU").total
  assert [free / GIB, total / GIB] == case["expected"]
  assert FastBackend.memory.free(("CPU",)) == max(0, free - drivers.RESERVE)


def test_free_memory_without_proc_is_free_pages(tmp_path, monkeypatch):
  monkeypatch.setattr(host_memory, "PROC", tmp_path)
  monkeypatch.setattr(Memory, "free", lambda memory, devices: 9 * GIB)
  assert drivers.host_memory().free == 9 * GIB


# Models

def set_free_memory(monkeypatch, free):
  report = drivers.MemoryReport(free + drivers.RESERVE, free + drivers.RESERVE)
  monkeypatch.setattr(drivers, "host_memory", lambda: report)


@pytest.fixture
def error_of(monkeypatch):
  """A function that sets the free memory of every device, in bytes, and returns the error of a model that needs too
  much, "" if it would load."""
  def error_of(path, free, quantization=None, num_devices=1):
    set_free_memory(monkeypatch, int(free))
    try: fit.check_memory(open_model(path, count=num_devices, backend=FastBackend()), quantization)
    except InputError as error:
      assert error.parameter == "model"
      return str(error)
    return ""
  return error_of


def sizes_of(config):
  """Return the bytes of a model's weights by quantization, from its shapes."""
  shapes = tensor_shapes(config)
  matrices = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
  rest = 4 * (sum(map(math.prod, shapes.values())) - matrices)
  return {None: rest + 4 * matrices, "int8": rest + matrices * 17 // 16, "int4": rest + matrices * 5 // 8}


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory): return tiny_model(tmp_path_factory.mktemp("deep"), num_hidden_layers=12)


TINY = sizes_of(tiny_config())
DEEP = sizes_of(tiny_config(num_hidden_layers=12))   # most weights are in matrices
# Bytes that loading takes: the weights, and copies of the largest matrix of a layer, (64, 32) in float32
NEEDED = {name: size + 5 * 4 * 64 * 32 for name, size in DEEP.items()}


def test_model_whose_weights_just_fit_starts(folder, error_of):
  """The pool's size is given, so that only the weights must fit."""
  assert not error_of(folder, TINY[None])
  assert LLM(folder, **ENGINE, num_gpu_blocks_override=40)
  assert error_of(folder, TINY[None] - 1)
  run = run_command("generate", "x", "--model", folder, *FLAGS, "--num-gpu-blocks-override", 40)
  assert "GiB of free memory" in error_line(run) and run.stderr.count("\n") == 1


@pytest.mark.parametrize("quantization,free,remedy", [
  (None, NEEDED["int8"], "int8"), (None, NEEDED["int8"] - 1, "int4"), (None, NEEDED["int4"], "int4"),
  ("int8", NEEDED["int4"], "int4"), *[(name, DEEP["int4"] - 1, None) for name in DEEP]])
def test_model_above_free_memory_is_refused_with_remedy(deep_folder, error_of, monkeypatch, quantization, free, remedy):
  monkeypatch.setattr(fit, "GIB", 1000)   # the tiny model would need 0.00 GiB
  text = f"no quantization fits: choose a smaller model, or provide {NEEDED['int4'] / 1000:.2f} GiB"
  if remedy:
    text = f"use quantization={remedy!r} (--quantization {remedy}), which takes {DEEP[remedy] / 1000:.2f} GiB"
    assert not error_of(deep_folder, free, remedy)
  start = f"model: {deep_folder} needs {DEEP[quantization] / 1000:.2f} GiB for its weights, but CPU has " \
    f"{free / 1000:.2f} GiB of free memory: {text}"
  assert error_of(deep_folder, free, quantization).startswith(start)


def test_remedy_leaves_room_for_a_kv_cache(tmp_path, error_of):
  """90% of the memory are for weights and KV cache. With 60 layers, loading a matrix takes less than the rest."""
  folder, size = tiny_model(tmp_path, num_hidden_layers=60), sizes_of(tiny_config(num_hidden_layers=60))["int8"] / 0.9
  for free, remedy in ((size + 1, "int8"), (size - 1, "int4")):
    assert f"use quantization='{remedy}'" in error_of(folder, free)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("config,quantization,needed", [
  *[({"num_hidden_layers": 12}, name, size) for name, size in NEEDED.items()],
  ({"vocab_size": 1000}, None, 4 * 1000 * 32 * 4)])   # large embeddings need four times their size
def test_model_that_just_fits_loads_with_warning(tmp_path, error_of, caplog, config, quantization, needed, missing):
  """Free memory is an estimate, and so is what loading takes: only weights above it are refused."""
  assert not error_of(tiny_model(tmp_path, **config), needed - missing, quantization)
  assert ("loading may take" in caplog.text) == bool(missing)


@pytest.mark.parametrize("error,expected,words", [
  (MemoryError("out of memory"), InputError, "^model: .* memory ran out: .*--quantization int4"),
  (OSError(12, "Cannot allocate memory"), InputError, "^model: .* memory ran out: .*--quantization int4"),
  (OSError(5, "Input/output error"), OSError, "Input/output")])
def test_memory_runs_out_while_loading_error_names_remedy(folder, monkeypatch, error, expected, words):
  monkeypatch.setattr(fake_device.Linear, "load", mock.Mock(side_effect=error))
  with pytest.raises(expected, match=words): LLM(folder, **ENGINE)


def test_devices_of_a_cpu_share_its_free_memory(folder, error_of):
  """Each device of two holds half of the matrices, and half of the host's memory."""
  assert "no quantization fits" in error_of(folder, TINY[None] - 2, num_devices=2)
  assert not error_of(folder, TINY[None], num_devices=2)


def test_gguf_file_is_refused_by_size_of_its_tensors(folder, tmp_path, error_of):
  path = write_gguf(tmp_path / "x.gguf", folder, "Q8_0")
  norms = sum(x[0] for x in tensor_shapes(tiny_config()).values() if len(x) == 1)
  size = 4 * norms + (TINY[None] // 4 - norms) * 34 // 32
  assert "cannot be quantized further: choose a smaller model, or provide" in error_of(path, size - 1)
  assert not error_of(path, size)


def test_device_whose_memory_is_unknown_is_not_checked(folder, error_of, monkeypatch):
  assert [drivers.device_memory(name).is_known for name in ("CPU", "CPU:1", "NULL")] == [True, True, False]
  assert error_of(folder, 1000)
  monkeypatch.setattr(drivers, "device_memory", lambda name: drivers.host_memory()._replace(is_known=False))
  assert not error_of(folder, 1000)


def test_buffers_of_freed_engines_count_as_free(folder, error_of, monkeypatch):
  """tinygrad keeps freed buffers, which the driver reports as used."""
  def free(names): set_free_memory(monkeypatch, GIB)
  monkeypatch.setattr(drivers, "free_unused_buffers", free)
  assert not error_of(folder, 1000)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stored, dtype", [("float32", "float32"), ("bfloat16", "float32"), ("float32", "float16")])
def test_bytes_of_weights_equal_fit_of_doctor(tmp_path, stored, dtype, tied, quantization):
  """config.json may state another dtype than the file has, and the file may hold a copy of tied embeddings."""
  path = tiny_model(tmp_path, dtype=stored, tie_word_embeddings=tied)
  if tied:
    file = path / "model.safetensors"
    weights = read_safetensors(file)
    write_safetensors(file, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}, stored)
  hf = json.loads((path / "config.json").read_text())
  row = {"dtype": dtype, "float32": True, "float16": True, "bfloat16": True, "free_gib": 1}
  expected = fit.estimate_fit("x", hf | {"dtype": stored}, row, quantization)["weights_gib"] * GIB
  (path / "config.json").write_text(json.dumps(hf | {"dtype": "float64"}))
  checkpoint = open_model(path, getattr(dtypes, dtype), backend=FastBackend())
  assert fit.checkpoint_bytes(checkpoint, quantization) == expected
