"""Free memory within the limits of a process and its cgroups, and models that are refused, with the remedy.
Also real processes with 4 GiB and 8 GiB."""
import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.common import SHAPES
from helpers.engines import ENGINE
from helpers.gguf_files import write_gguf
from helpers.models import (read_safetensors, sentencepiece_model, tensor_shapes, tiny_config, tiny_model,
                            write_safetensors)
from helpers.reference import reference_greedy
from tinygrad import dtypes

from tinyvllm import LLM, SamplingParams
from tinyvllm.backend import Backend, Devices
from tinyvllm.config import InputError
from tinyvllm_extra.cli import doctor, main
from tinyvllm_extra.fit import estimate_fit, weight_bytes
from tinyvllm_extra.kernels import RESERVE, FastBackend, drivers
from tinyvllm_extra.models import find_model
from tinyvllm_extra.weights import Checkpoint, open_checkpoint

pytestmark = pytest.mark.real

GIB = 2**30
ROOT = Path(__file__).parents[2]
UNLIMITED = 9223372036854771712   # a cgroup of v1 without a limit
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


# Limits

@pytest.fixture
def set_limits(monkeypatch, tmp_path):
  """A function that sets up a machine with 16 GiB, 12 of them free, on which this process uses 1 GiB. cgroup: the
  content of /proc/self/cgroup. files: by path below /sys/fs/cgroup. rlimit: RLIMIT_DATA in GiB, or None."""
  proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
  monkeypatch.setattr(drivers, "PROC", proc)
  monkeypatch.setattr(drivers, "CGROUPS", cgroups)

  def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

  def set_up(cgroup="0::/\n", files=(), rlimit=None):
    free, total = 12 * GIB // 1024, 16 * GIB // 1024
    write(proc / "meminfo", f"MemTotal:  {total} kB\nMemFree:  1024 kB\nMemAvailable: {free} kB\n")
    write(proc / "self/status", f"Name:\tpython3\nGroups:\t\nVmSize:\t 99999999 kB\nVmData:\t {GIB // 1024} kB\n")
    write(proc / "self/cgroup", cgroup)
    for name, content in dict(files).items(): write(cgroups / name, f"{content}\n")
    value = resource.RLIM_INFINITY if rlimit is None else rlimit * GIB
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_DATA: (value, value)}[kind])
  return set_up


def memory():
  """Return the free and the total memory of the CPU in GiB, as `tinyvllm doctor` sees them. The engine uses less."""
  free = drivers.host_memory().free
  assert FastBackend().free_memory("CPU") == max(0, free - RESERVE)
  return free / GIB, doctor.describe(SimpleNamespace(device="CPU", arch="x"))[1] / GIB


def group_v2(name, limit, usage, cache=0):
  return {f"{name}memory.max": limit, f"{name}memory.current": usage,
          f"{name}memory.stat": f"anon 5\ninactive_file {cache}"}


def group_v1(name, limit, usage, cache=0):
  return {f"memory/{name}memory.limit_in_bytes": limit, f"memory/{name}memory.usage_in_bytes": usage,
          f"memory/{name}memory.stat": f"inactive_file 7\ntotal_inactive_file {cache}"}


def test_free_memory_without_limits_includes_cache_of_files(set_limits):
  set_limits()
  assert memory() == (12, 16)


@pytest.mark.parametrize("rlimit, expected", [(4, (3, 4)), (1, (0, 1)), (14, (12, 14)), (64, (12, 16))])
def test_free_memory_is_data_limit_minus_used(set_limits, rlimit, expected):
  set_limits(rlimit=rlimit)
  assert memory() == expected


@pytest.mark.parametrize("cgroup, files, expected", [
  ("0::/a/b\n", group_v2("a/b/", 8 * GIB, 3 * GIB), (5, 8)),
  ("0::/a/b\n", group_v2("a/b/", 8 * GIB, 3 * GIB, 2 * GIB), (7, 8)),
  ("0::/a/b\n", group_v2("a/b/", "max", 3 * GIB) | group_v2("a/", 4 * GIB, 3 * GIB), (1, 4)),
  ("0::/a/b\n", group_v2("a/b/", 4 * GIB, GIB) | group_v2("a/", 8 * GIB, 6 * GIB), (2, 4)),
  ("0::/docker/123\n", group_v2("", 4 * GIB, GIB), (3, 4)),
  ("0::/a\n", group_v2("a/", 4 * GIB, 5 * GIB), (0, 4)),
  ("0::/a\n", group_v2("a/", "max", GIB), (12, 16)), ("0::/a\n", group_v2("other/", 4 * GIB, GIB), (12, 16)),
  ("3:cpu,cpuacct:/a\n2:memory:/a:b/c\n0::/\n", group_v1("a:b/", 6 * GIB, 4 * GIB, GIB), (3, 6)),
  ("2:memory:/a\n", group_v1("a/", UNLIMITED, 4 * GIB) | group_v1("", UNLIMITED, 5 * GIB), (12, 16)),
  ("2:memory:/docker/123\n", group_v1("", 4 * GIB, GIB), (3, 4)), ("2:cpu:/a\n", group_v1("a/", GIB, 0), (12, 16))],
  ids=["v2", "v2 with cache", "v2 limit of parent", "v2 use of parent's other groups", "v2 in a container",
       "v2 exceeded", "v2 unlimited", "v2 of another group", "v1", "v1 unlimited", "v1 in a container",
       "v1 without memory"])
def test_free_memory_is_limit_of_cgroup_minus_used(set_limits, cgroup, files, expected):
  set_limits(cgroup, files)
  assert memory() == expected


def test_least_limit_counts(set_limits):
  set_limits("0::/a\n", group_v2("a/", 4 * GIB, 2 * GIB), rlimit=8)
  assert memory() == (2, 4)
  set_limits("0::/a\n", group_v2("a/", 8 * GIB, GIB), rlimit=4)
  assert memory() == (3, 4)


def test_free_memory_without_proc_is_free_pages(set_limits, monkeypatch):
  monkeypatch.setattr(Backend, "free_memory", lambda backend, device: 9 * GIB)
  assert memory()[0] == 9


# Models

@pytest.fixture
def set_free(monkeypatch):
  """A function that sets the free memory of every device, in bytes."""
  return lambda num_bytes: monkeypatch.setattr(FastBackend, "free_memory", lambda backend, device: int(num_bytes))


def sizes_of(config):
  """Return the bytes of a model's weights by quantization, from its shapes."""
  shapes = tensor_shapes(config)
  matrices = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and len(shape) == 2)
  rest = 4 * (sum(map(math.prod, shapes.values())) - matrices)
  return {None: rest + 4 * matrices, "int8": rest + matrices * 17 / 16, "int4": rest + matrices * 5 / 8}


@pytest.fixture
def sizes(): return sizes_of(tiny_config())


POOL = {**ENGINE, "num_gpu_blocks_override": 40}   # states the pool's size: the weights alone must fit


def generate(folder, **options):
  output, = LLM(folder, **{**POOL, **options}).generate({"prompt_token_ids": [5, 6, 7]}, GREEDY)
  return output.outputs[0].token_ids


def test_weights_that_just_fit_start(folder, sizes, set_free):
  set_free(sizes[None])
  assert generate(folder) == reference_greedy(folder, [5, 6, 7], 4)


@pytest.fixture(scope="module")
def deep_folder(tmp_path_factory): return tiny_model(tmp_path_factory.mktemp("deep"), num_hidden_layers=12)


DEEP = sizes_of(tiny_config(num_hidden_layers=12))   # most weights are in matrices
# Bytes that loading takes: the weights, and copies of the largest matrix of a layer, (64, 32) in float32
NEEDED = {name: size + 5 * 4 * 64 * 32 for name, size in DEEP.items()}


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_model_above_free_memory_is_refused_with_quantization_that_fits(deep_folder, set_free, quantization):
  set_free(NEEDED[quantization])
  with pytest.raises(InputError) as e: LLM(deep_folder, **POOL)
  assert e.value.parameter == "model" and str(deep_folder) in str(e.value)
  assert f"use quantization='{quantization}' (--quantization {quantization})" in str(e.value)
  assert len(generate(deep_folder, quantization=quantization)) == 4


def test_quantized_model_above_free_memory_is_refused_with_smaller_quantization(deep_folder, set_free):
  set_free(NEEDED["int4"])
  with pytest.raises(InputError, match="use quantization='int4'"): LLM(deep_folder, **POOL, quantization="int8")


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_no_quantization_fits_error_names_memory_needed(deep_folder, set_free, monkeypatch, quantization):
  monkeypatch.setattr("tinyvllm_extra.fit.GIB", 1000)   # the tiny model would need 0.00 GiB
  set_free(DEEP["int4"] - 1)
  with pytest.raises(InputError) as e: LLM(deep_folder, **POOL, quantization=quantization)
  assert f"no quantization fits: choose a smaller model, or provide {NEEDED['int4'] / 1000:.2f} GiB" in str(e.value)
  assert f"needs {DEEP[quantization] / 1000:.2f} GiB" in str(e.value)


@pytest.mark.parametrize("quantization, missing", [("int4", 0), ("int4", 1000), (None, 0), (None, 1000)])
def test_model_that_just_fits_starts_with_warning(deep_folder, set_free, caplog, quantization, missing):
  """Free memory is an estimate, and so is what loading takes: only weights above it are refused."""
  set_free(NEEDED[quantization] - missing)
  assert len(generate(deep_folder, quantization=quantization)) == 4
  assert any("loading may take" in line for line in caplog.messages) == bool(missing)


@pytest.mark.parametrize("error", [MemoryError("out of memory"), OSError(12, "Cannot allocate memory")])
def test_memory_runs_out_while_loading_error_names_remedy(folder, monkeypatch, error):
  def fail(*_): raise error
  monkeypatch.setattr(Checkpoint, "place", fail)
  with pytest.raises(InputError, match="^model: .* memory ran out: .*--quantization int4"): LLM(folder, **POOL)


def test_error_of_disk_while_loading_stays(folder, monkeypatch):
  def fail(*_): raise OSError(5, "Input/output error")
  monkeypatch.setattr(Checkpoint, "place", fail)
  with pytest.raises(OSError, match="Input/output"): LLM(folder, **POOL)


def test_refused_model_exits_with_one_line(folder, sizes, set_free, capsys):
  set_free(sizes[None] - 1)
  assert main(["generate", "x", "--model", str(folder)]) == 1
  error = capsys.readouterr().err
  assert error.count("\n") == 1 and "free memory" in error


def test_devices_of_a_cpu_share_its_free_memory(folder, sizes, set_free):
  """Each device of two holds half of the matrices, but whole norms."""
  set_free(sizes[None] * 0.98)
  with pytest.raises(InputError, match="no quantization fits"): LLM(folder, **POOL, tensor_parallel_size=2)
  set_free(sizes[None] * 1.02)
  assert generate(folder, tensor_parallel_size=2) == reference_greedy(folder, [5, 6, 7], 4)


def test_gguf_file_is_refused_by_size_of_its_tensors(folder, tmp_path, sizes, set_free):
  path = write_gguf(tmp_path / "x.gguf", folder, "Q8_0")
  size = (sizes[None] - 4 * sum(x[0] for x in tensor_shapes(tiny_config()).values() if len(x) == 1)) / 4 * 34 / 32
  set_free(size * 0.95)
  with pytest.raises(InputError, match="cannot be quantized further: choose a smaller model, or"): LLM(path, **POOL)
  set_free(size * 1.05)
  assert len(generate(path)) == 4


def test_device_whose_memory_is_unknown_is_not_checked(folder, set_free, monkeypatch):
  set_free(1000)
  monkeypatch.setattr(drivers, "device_memory", lambda name: drivers.host_memory()._replace(is_known=False))
  assert generate(folder) == reference_greedy(folder, [5, 6, 7], 4)


def test_memory_of_device_without_reader_is_unknown():
  assert [drivers.device_memory(name).is_known for name in ("CPU", "CPU:1", "NULL")] == [True, True, False]


def test_buffers_of_freed_engines_count_as_free(folder, sizes, monkeypatch):
  """tinygrad keeps freed buffers, which the driver reports as used."""
  monkeypatch.setattr(drivers, "free_unused_buffers", lambda names: monkeypatch.setattr(
    FastBackend, "free_memory", lambda backend, device: GIB))
  monkeypatch.setattr(FastBackend, "free_memory", lambda backend, device: 1000)
  assert generate(folder) == reference_greedy(folder, [5, 6, 7], 4)


def open_model(path, dtype, quantization=None):
  """Return the bytes of a checkpoint's weights without loading it."""
  checkpoint = open_checkpoint(path)
  shape, model_class = find_model(checkpoint.hf_config, path)
  checkpoint.model = model_class(shape, getattr(dtypes, dtype), FastBackend(), Devices())
  checkpoint.tensors = checkpoint.stored_tensors()
  return weight_bytes(checkpoint, quantization)


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
  expected = estimate_fit("x", hf | {"dtype": stored}, row, quantization)["weights_gib"] * GIB
  (path / "config.json").write_text(json.dumps(hf | {"dtype": "float64"}))
  assert open_model(path, dtype, quantization) == expected


# Real processes

def sparse_model(path, shape):
  """Write a model of zeros in float16, which takes no space on the disk."""
  (path / "config.json").write_text(json.dumps({**SHAPES[shape], "torch_dtype": "float16"}))
  (path / "tokenizer.model").write_bytes(sentencepiece_model())
  header, size = {}, 0
  for name, tensor in tensor_shapes(SHAPES[shape]).items():
    end = size + 2 * math.prod(tensor)
    header[name] = {"dtype": "F16", "shape": tensor, "data_offsets": [size, end]}
    size = end
  text = json.dumps(header).encode()
  with (path / "model.safetensors").open("wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    file.truncate(8 + len(text) + size)
  return path


def run_within(gib, *arguments):
  """Run the command line in a process that may use this much memory on a CPU. Return exit code, stdout and stderr."""
  limit = (gib * GIB, gib * GIB)
  command = [sys.executable, "-m", "tinyvllm", *map(str, arguments)]
  done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280, cwd=ROOT,
                        env={**os.environ, "DEV": "CPU"},
                        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, limit))
  return done.returncode, done.stdout, done.stderr


needs_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="limits memory as Linux does")


@pytest.mark.slow
@needs_linux
def test_1b_in_int4_starts_and_says_what_fits(tmp_path):
  path = sparse_model(tmp_path, "llama-3.2-1b")
  code, out, err = run_within(4, "generate", "Hello", "--model", path, "--quantization", "int4", "--max-tokens", 1)
  assert code == 0 and out.startswith("Hello"), err
  num_tokens, size = re.search(r"= (\d+) tokens, ([\d.]+) GiB", err).groups()
  most = (4 - RESERVE / GIB) * 0.9 - 1.05   # the weights take 1.05 GiB
  assert most - 0.4 < float(size) < most
  assert int(num_tokens) == pytest.approx(float(size) * GIB / (16 * 2 * 8 * 64 * 4), rel=0.01)
  assert "sequences of 131072" in err


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("gib, options, words", [
  (8, [], "needs 14.96 GiB"), (8, ["--quantization", "int8"], "needs 8.86 GiB"),
  (4, [], "no quantization fits: choose a smaller model, or provide 6.69 GiB"),
  (4, ["--quantization", "int4"], "needs 6.02 GiB")])
def test_8b_is_refused_with_quantization_that_would_fit(tmp_path, gib, options, words):
  path = sparse_model(tmp_path, "llama-3.1-8b")
  code, out, err = run_within(gib, "generate", "Hello", "--model", path, "--max-tokens", 1, *options)
  assert code == 1 and not out and err.count("\n") == 1, err
  assert words in err and ("(--quantization int4), which takes 6.02 GiB" in err) == (gib == 8)
