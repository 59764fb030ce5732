"""`tinyvllm doctor` in this process: its estimates, reports and errors. Backends are facts of a table here. Free memory
within the limits of a process, and models that are refused."""
import importlib.metadata
import itertools
import json
import math
import os
import platform
import re
import resource
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from helpers import fake_device
from helpers.commands import FLAGS, error_line, run_command
from helpers.data import DATA, read_data, write_files
from helpers.engines import ENGINE
from helpers.gguf_files import write_gguf
from helpers.models import read_safetensors, tensor_shapes, tiny_config, tiny_model, write_safetensors
from helpers.quantized_models import open_model
from helpers.tensor_cores import run_on_cpu
from tinygrad import dtypes, helpers
from tinygrad.device import ALL_DEVICES

from tinyvllm import LLM, InputError, __version__, backend, config
from tinyvllm.backend import Memory
from tinyvllm_extra import programs
from tinyvllm_extra.cli import doctor
from tinyvllm_extra.formats import fit
from tinyvllm_extra.formats.fit import estimate_fit, prequantized
from tinyvllm_extra.kernels import FastBackend, cuda_source, drivers, matmul
from tinyvllm_extra.kernels.drivers import DriverMemory
from tinyvllm_extra.options import LLMConfig

GIB = 2**30
CASES = read_data("doctor.json")   # facts of backends, outputs of their processes, reports
CPU = CASES["facts"]["CPU"]
TINY = tiny_config()   # instead of the models in shapes.json


# Code that runs in a backend's process

def test_probe_prints_facts_and_bandwidth(monkeypatch, capfd):
  bandwidth = mock.Mock(wraps=doctor.bandwidth)
  monkeypatch.setattr(doctor, "bandwidth", bandwidth)
  monkeypatch.setattr(doctor, "BUFFER", 2**20)
  monkeypatch.setattr(doctor, "make_backend", FastBackend)
  for seconds in (0.0, 0.01): doctor.probe(seconds)
  plain, facts, speed = (json.loads(line)["doctor"] for line in capfd.readouterr().out.splitlines() if line)
  assert {*plain} == {*facts} == {*CPU} - {"gb_per_s"} and facts["opens"] and facts["renderer"].startswith("CPU ")
  assert 0 < facts["free_gib"] < facts["total_gib"] and facts["largest_gib"] == facts["total_gib"]
  bandwidth.assert_called_once_with(FastBackend.Linear, 2**20, dtypes.float32, 0.01)
  assert {*speed} == {"gb_per_s"} and 0 < speed["gb_per_s"] < 1e6


def test_probe_prints_the_reason_of_an_error(monkeypatch, capfd):
  def fail(): raise RuntimeError("no device") from ExceptionGroup("all", [OSError("a\nb"), OSError(), OSError("a")])
  monkeypatch.setattr(doctor.fit, "open_device", fail)
  doctor.probe(1.0)
  assert json.loads(capfd.readouterr().out) == {"doctor": {"reason": "a; OSError()"}}
  assert doctor.reason_of(ValueError("first\nsecond")) == "first" and doctor.reason_of(KeyError()) == "KeyError()"


@pytest.mark.parametrize("step,seconds,calls", CASES["calls of graphs"])
def test_bandwidth_is_bytes_per_median_time(monkeypatch, step, seconds, calls):
  """A fast device, with less than 2 ms per read, reads the weights 16 times per measurement."""
  graphs, times = [mock.Mock(), mock.Mock()], itertools.count()
  monkeypatch.setattr(doctor, "TinyJit", mock.Mock(side_effect=graphs))
  monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=lambda: next(times) * step))
  result = doctor.bandwidth(backend.Linear, 2**20 + 99, dtypes.float16, seconds)
  rows = 2**20 // 4096 // 2 // 16 * 16
  assert result == pytest.approx(rows * 4096 * 2 / step * (16 if step < 2e-3 else 1))
  assert [graph.call_count for graph in graphs] == calls


def test_device_name_is_the_architecture_of_unnamed_devices():
  assert drivers.device_name(SimpleNamespace(device="NULL", arch="an architecture")) == "an architecture"
  assert drivers.device_name(SimpleNamespace(device="NULL", arch=None, device_name="A GPU")) == "A GPU"
  names = re.findall(r"model name\s*: (.*)", subprocess.getoutput("cat /proc/cpuinfo"))
  assert drivers.device_name(SimpleNamespace(device="CPU", arch="an architecture")) == [*names, "an architecture"][0]


# The user's process

@pytest.mark.parametrize("case", CASES["outputs"])
def test_run_probe_returns_the_facts_that_the_process_printed(monkeypatch, case):
  def run(command, env, timeout, **_):
    assert (env["DEV"], timeout, "HOME" in env) == ("CL", 92.75, "HOME" in os.environ)
    assert command[2].endswith("doctor.probe(2.75)")
    if case["output"] is None: raise subprocess.TimeoutExpired(command, timeout)
    return subprocess.CompletedProcess(command, case["code"], case["output"].encode("latin-1"))
  monkeypatch.setattr(subprocess, "run", run)
  assert doctor.run_probe("CL", 2.75) == case["facts"]


@pytest.fixture
def machine(monkeypatch):
  """Return a function that sets the backends of this machine and its default one, by their facts' names, and DEV."""
  monkeypatch.setattr(doctor, "ORDER", ["CL", "METAL", "CPU"])
  read = config.read_json
  monkeypatch.setattr(doctor, "read_json", lambda path: {"tiny": TINY} if path.name == "shapes.json" else read(path))

  def set_up(backends, default="CPU", dev=""):
    monkeypatch.setenv("DEV", dev)
    names = {"CL": "closed", "METAL": "closed", "CPU": "CPU", **backends}
    monkeypatch.setattr(doctor, "run_probe", lambda x, seconds: {**CASES["facts"][names[x] if seconds else default]})
  set_up({})
  return set_up


def report(*options):
  run = run_command("doctor", "--json", *options)
  return run.returncode, json.loads(run.stdout)


@pytest.mark.parametrize("case", CASES["machines"])
def test_chosen_backend_is_the_default_of_a_second_process(machine, case):
  machine(case["backends"], case["default"], case["dev"])
  code, result = report()
  opened = {row["backend"]: row for row in result["backends"] if row["opens"]}
  assert [row["backend"] for row in result["backends"]] == [*dict.fromkeys(["CL", "METAL", "CPU", *case["backends"]])]
  assert (result["chosen"], result["why"], code) == (case["chosen"], case["why"], 0 if opened else 1)
  dtypes_of_fit = [opened[case["chosen"] or "CPU"]["dtype"]] * 3 if opened else []
  assert [row["dtype"] for row in result["fit"]] == dtypes_of_fit


def test_report_describes_the_machine_and_its_compiler(machine, monkeypatch, tmp_path):
  program = tmp_path / "my clang"
  program.write_text("#!/bin/sh\necho clang version 1; echo more")
  program.chmod(0o755)
  monkeypatch.setattr(doctor.programs, "find_compiler", lambda: str(program))
  result = report()[1]
  facts = result["machine"]
  assert 0 < facts.pop("free_gib") < facts.pop("total_gib")
  assert facts == {"tinyvllm": __version__, "tinygrad": importlib.metadata.version("tinygrad"),
                   "python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
  assert result["compiler"] == {"path": str(program), "version": "clang version 1"}


def test_text_report_equals_recorded_text_within_120_columns(machine, monkeypatch):
  """The table of this machine's facts precedes the recorded text."""
  machine({"CL": "crashed", "CPU": "CPU with a long name"})
  monkeypatch.setattr("shutil.which", lambda name: "/bin/clang")
  monkeypatch.setattr("subprocess.getoutput", lambda command: "clang 1 " + "y" * 200)
  run = run_command("doctor")
  facts, _, text = run.stdout.partition("\n\n")
  assert (run.returncode, text) == (0, (DATA / "doctor_report.txt").read_text())
  assert [len(line.split()) for line in facts.splitlines()] == [7, 7]
  machine({"CL": "GPU"})
  assert "\nfastest backend: CL (to use it, set DEV=CL)\n" in run_command("doctor").stdout


def test_text_report_without_compiler_and_backend_names_a_remedy(machine, monkeypatch):
  monkeypatch.setattr(doctor.programs, "find_compiler", lambda: None)
  machine({"CPU": "closed"}, "closed")
  run = run_command("doctor")
  assert run.returncode == 1 and "fastest backend: None" in run.stdout
  assert f"\nC compiler: none; the CPU backend needs one: {doctor.programs.clang_command()}\n\n" in run.stdout


@pytest.mark.parametrize("system,release,command", CASES["compilers"])
def test_clang_command_fits_the_system(monkeypatch, system, release, command):
  names = dict(zip(("system.return_value", "machine.return_value", "libc_ver.return_value"), system, strict=True))
  fake = mock.Mock(**names, **{"freedesktop_os_release.side_effect": [release or OSError("no such file")]})
  monkeypatch.setattr(doctor.programs, "platform", fake)
  assert doctor.programs.clang_command() == command


def test_order_is_tinygrads_without_dsp(): assert {*ALL_DEVICES} - {*doctor.ORDER} == {"DSP"}


@pytest.mark.parametrize("seconds,code", [("0", 1), ("nan", 1), ("60.1", 1), ("60", 0), ("0.1", 0)])
def test_seconds_are_above_0_and_at_most_60(machine, seconds, code):
  run = run_command("doctor", "--seconds", seconds)
  if code: assert re.search(r"\bseconds=.* 60\b", error_line(run))
  assert run.returncode == code


# Estimates

@pytest.mark.parametrize("case", CASES["stored_dtypes"])
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_fit_keeps_file_dtype_if_narrower_and_supported(case, key):
  dtype, stored = case["device"], case["stored"]
  row = {**CPU, "dtype": dtype, "bfloat16": case["has_bfloat16"]}
  result, plain = (estimate_fit("x", hf, row) for hf in (tiny_config(**{key: case["file"]}), tiny_config()))
  assert (result["dtype"], result["stored"], plain["stored"]) == (dtype, stored, dtype)
  assert plain["weights_gib"] / result["weights_gib"] == (2 if (dtype, stored[-2:]) == ("float32", "16") else 1)
  assert result["tokens_per_s_at_most"] > 0 and result["fits"] and result["kv_tokens"] >= plain["kv_tokens"]


SHAPES = json.loads((Path(doctor.__file__).parent / "shapes.json").read_text())


@pytest.mark.parametrize("name", SHAPES)
def test_fit_of_published_model_equals_its_number_of_parameters(name):
  """In 16 bits. Tied embeddings are stored once, and read by each step; others are not read."""
  shape, size = SHAPES[name], CASES["parameters"][name]
  fit = estimate_fit(name, shape, {**CPU, "bfloat16": True})
  unread = 0 if shape.get("tie_word_embeddings") else shape["vocab_size"] * shape["hidden_size"]
  assert (fit["dtype"], fit["stored"], fit["weights_gib"] * GIB) == ("float32", "bfloat16", 2 * size)
  assert fit["tokens_per_s_at_most"] == pytest.approx(10e9 / 2 / (size - unread))


def test_fit_needs_room_for_one_token():
  def fit(free): return estimate_fit("x", TINY, {**CPU, "free_gib": free / GIB})
  weights, token = fit(1)["weights_gib"] * GIB, 2 * 2 * 2 * 8 * 4   # layers, K and V, heads, dimensions, bytes
  results = [fit(math.ceil((weights + token + extra) / 0.9)) for extra in (0, -2)]
  assert [(x["fits"], x["kv_tokens"]) for x in results] == [(True, 1), (False, 0)]
  sizes = [estimate_fit("x", TINY, CPU | {"renderer": x}, LLMConfig(**{name: 2}))["shared_gib"] - drivers.RESERVE / GIB
           for x in ("CPU", "CUDA") for name in ("tensor_parallel_size", "pipeline_parallel_size")]
  assert sizes == pytest.approx([sizes[0], sizes[0], sizes[0] / 2, sizes[0] / 2]), "CPU devices share the host's memory"


@pytest.mark.parametrize("backend,length", [("CPU", 1000), ("CPU", 10**8), ("CUDA", 1000)])
def test_fit_on_a_cpu_has_the_engines_maximum_of_kv_tokens(monkeypatch, backend, length):
  monkeypatch.setattr("tinyvllm_extra.kernels.drivers.cpu_cores", lambda: int(backend == "CPU"))
  fit = estimate_fit("x", TINY | {"max_position_embeddings": length}, {**CPU, "backend": backend, "free_gib": 64})
  token = 2 * 2 * 2 * 8 * 4   # layers, K and V, heads, dimensions, bytes
  blocks = DriverMemory().max_blocks(int(64 * GIB * 0.9), 16 * token, -(-length // 16))
  assert fit["kv_tokens"] == pytest.approx(16 * blocks, rel=0.04)   # the engine rounds down


@pytest.mark.parametrize("case", CASES["prequantized"])
def test_prequantized_model_returns_its_dtype(case):
  assert prequantized(tiny_config(quantization_config=case["quantization_config"])) == case["dtype"]


# --model

def test_model_option_adds_model_and_describes_its_checkpoint(machine, tmp_path):
  folder = tiny_model(tmp_path, dtype="float16")
  code, result = report("--model", folder)
  count = sum(map(math.prod, tensor_shapes(tiny_config()).values()))
  row = result["fit"][-3]
  assert code == 0 and result["checkpoint"] == "float16" and len(result["fit"]) == 6
  assert row["model"] == str(folder) and row["weights_gib"] * GIB == 4 * count and row["fits"]
  fp8 = report("--model", folder, "--kv-cache-dtype", "fp8")[1]["fit"][-3]
  assert fp8["kv_tokens"] > 2 * row["kv_tokens"] > 0
  assert run_command("doctor", "--model", folder).stdout.endswith("\n\ncheckpoint: float16\n")
  (folder / "model.safetensors").unlink()
  assert "checkpoint" not in report("--model", folder)[1], "config.json alone suffices"


@pytest.mark.parametrize("case", CASES["gguf"], ids=lambda case: case["kind"])
def test_model_option_describes_gguf_and_its_fit(machine, tmp_path, case):
  """A split file is given by its first part. The estimate names the nearest of int8 and int4."""
  folder = tiny_model(tmp_path, hidden_size=256, intermediate_size=512, vocab_size=320)
  kind, others, stored = case["kind"], case["others"], case["stored"]
  path = write_gguf(tmp_path / "model.gguf", folder, kind, kinds=others, tensors_per_file=case["tensors_per_file"])
  result = report("--model", path)[1]
  row, *quantized = [row for row in result["fit"] if row["model"] == str(path)]
  assert result["checkpoint"] == case["checkpoint"] and row["stored"] == stored and row["fits"]
  assert [x["stored"] for x in quantized] == (["int8", "int4"] if kind == "F16" else []), "it can be quantized"
  matrices = 2 * (256 * (2 * 256 + 2 * 128) + 3 * 256 * 512) * {"int8": 8.5, "int4": 5, "float16": 16}[stored] / 8
  rest = (2 * 320 * 256 + 5 * 256) * (2 if "F16" in (kind, *others.values()) else 4)   # embeddings and norms
  assert row["weights_gib"] * GIB == matrices + rest


@pytest.mark.parametrize("case", CASES["unusable"])
def test_unusable_folder_exits_before_opening_a_backend(monkeypatch, tmp_path, case):
  monkeypatch.setattr(doctor, "run_probe", lambda *_: pytest.fail("doctor opens a backend"))
  config = tiny_model(tmp_path) / "config.json"
  if case["config"] is None: config.unlink()
  else: config.write_text(case["config"] or json.dumps(tiny_config(**case["fields"])))
  run = run_command("doctor", "--model", tmp_path)
  assert case["error"] in error_line(run) and not run.stdout and run.stderr.count("\n") == 1


# --tune

@pytest.fixture
def tuned(monkeypatch, tmp_path):
  """Return the path of the file of choices, in an empty folder."""
  monkeypatch.setattr(helpers, "CACHEDB", str(tmp_path / "cache.db"))
  monkeypatch.setattr(matmul, "choices", {})
  programs.tiles_path().parent.mkdir()
  return programs.tiles_path()


@pytest.mark.parametrize("text,choices", CASES["tuned"])
def test_choices_that_are_damaged_or_of_other_kernels_are_ignored(tuned, caplog, monkeypatch, text, choices):
  tuned.write_text(text)
  assert programs.prepare_tuned_device() == matmul.choices == choices
  assert caplog.text.count(f"{tuned} is ignored: ") == (not choices)
  monkeypatch.setattr(drivers, "device_name", lambda device: "A GPU/2")
  monkeypatch.setattr(programs.drivers, "__file__", str(tuned))
  name, kernels_hash = programs.tiles_path().stem.rsplit("_", 1)
  assert name == "tuned_A_GPU_2" and len(kernels_hash) == 8 and kernels_hash not in tuned.name


@pytest.mark.parametrize("quantization,times,gain", CASES["times of tiles"])
def test_tune_keeps_tiles_that_are_faster_twice(tuned, monkeypatch, tmp_path, quantization, times, gain):
  folder = tiny_model(tmp_path, num_hidden_layers=1, hidden_size=64, intermediate_size=96)
  calls, built_in = [], {}
  def seconds(layers, x, least):
    """Return 2e-6 for the built-in tiles, which are a matrix's first, or else a time of the case. Run a step once."""
    calls.append(choice := [*matmul.choices.items()][0])
    if calls.count(choice) == 2: [layer(x).realize() for layer in layers]
    return 2e-6 if built_in.setdefault(*choice) == choice[1] else times[calls.count(choice) > 1] / 1e6
  def run(): return run_command("doctor", "--tune", "--model", folder, *quantization)
  with monkeypatch.context() as patch, mock.patch.multiple(doctor, ROWS=(8,), seconds_per_layer=seconds):
    run_on_cpu(patch)
    patch.setattr(doctor, "KERNELS", 1)
    patch.setattr(FastBackend, "pick_dtype", lambda *_: "float16")
    assert re.search(rf"8 +\d +2.000 .* {gain} .*\n\nkept in {tuned}\n", run().stdout)
    patch.setattr(helpers, "CACHEDB", "/proc/none/cache.db")
    assert f"{tuned.name} cannot be written" in error_line(run())
  LLM(folder)
  assert len(matmul.choices) == len(built_in) == 5 and (matmul.choices != built_in) == (gain > "0.000")
  monkeypatch.setattr(cuda_source, "has_mma", lambda dtype: False)
  assert "has nothing to tune" in error_line(run())


# Free memory within the limits of a process and its cgroups

# machine: files of all cases. cases: the content of /proc/self/cgroup, files below /sys/fs/cgroup, RLIMIT_DATA in GiB,
# and the expected free and total GiB
CGROUPS = read_data("cgroups.json")


@pytest.mark.parametrize("case", CGROUPS["cases"], ids=lambda case: case["about"])
def test_free_memory_is_least_limit_minus_used(monkeypatch, tmp_path, case):
  """The machine has 16 GiB, 12 of them free; this process uses 1 GiB."""
  files = {**CGROUPS["machine"], "proc/self/cgroup": case["cgroup"], **case["files"]}
  write_files(tmp_path, {name: f"{text}\n" for name, text in files.items()})
  monkeypatch.setattr(drivers, "PROC", tmp_path / "proc")
  monkeypatch.setattr(drivers, "CGROUPS", tmp_path)
  limit = resource.RLIM_INFINITY if case["rlimit"] is None else case["rlimit"] * GIB
  monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_DATA: (limit, limit)}[kind])
  free, total = drivers.host_memory().free, drivers.device_memory("CPU").total
  assert [free / GIB, total / GIB] == case["expected"]
  assert FastBackend.memory.free(("CPU",)) == max(0, free - drivers.RESERVE)


def test_free_memory_without_proc_is_free_pages(tmp_path, monkeypatch):
  monkeypatch.setattr(drivers, "PROC", tmp_path)
  monkeypatch.setattr(Memory, "free", lambda memory, devices: 9 * GIB)
  assert drivers.host_memory().free == 9 * GIB


# Models that are refused, with the remedy

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


TINY_BYTES = sizes_of(tiny_config())
DEEP_BYTES = sizes_of(tiny_config(num_hidden_layers=12))   # most weights are in matrices
# Bytes that loading takes: the weights, and copies of the largest matrix of a layer, (64, 32) in float32
NEEDED = {name: size + 5 * 4 * 64 * 32 for name, size in DEEP_BYTES.items()}


def test_model_whose_weights_just_fit_starts(folder, error_of):
  """The pool's size is given, so that only the weights must fit."""
  assert not error_of(folder, TINY_BYTES[None])
  assert LLM(folder, **ENGINE, num_gpu_blocks_override=40)
  assert error_of(folder, TINY_BYTES[None] - 1)
  run = run_command("generate", "x", "--model", folder, *FLAGS, "--num-gpu-blocks-override", 40)
  assert "GiB of free memory" in error_line(run) and run.stderr.count("\n") == 1


@pytest.mark.parametrize("quantization,free,remedy", [
  (None, NEEDED["int8"], "int8"), (None, NEEDED["int8"] - 1, "int4"), (None, NEEDED["int4"], "int4"),
  ("int8", NEEDED["int4"], "int4"), *[(name, DEEP_BYTES["int4"] - 1, None) for name in DEEP_BYTES]])
def test_model_above_free_memory_is_refused_with_remedy(tmp_path, error_of, monkeypatch, quantization, free, remedy):
  tiny_model(tmp_path, num_hidden_layers=12)
  monkeypatch.setattr(fit, "GIB", 1000)   # the tiny model would need 0.00 GiB
  text = f"no quantization fits: choose a smaller model, or provide {NEEDED['int4'] / 1000:.2f} GiB"
  if remedy:
    text = f"use quantization={remedy!r} (--quantization {remedy}), which takes {DEEP_BYTES[remedy] / 1000:.2f} GiB"
    assert not error_of(tmp_path, free, remedy)
  start = f"model: {tmp_path} needs {DEEP_BYTES[quantization] / 1000:.2f} GiB for its weights, but CPU has " \
    f"{free / 1000:.2f} GiB of free memory: {text}"
  assert error_of(tmp_path, free, quantization).startswith(start)


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
  assert "no quantization fits" in error_of(folder, TINY_BYTES[None] - 2, num_devices=2)
  assert not error_of(folder, TINY_BYTES[None], num_devices=2)


def test_gguf_file_is_refused_by_size_of_its_tensors(folder, tmp_path, error_of):
  path = write_gguf(tmp_path / "x.gguf", folder, "Q8_0")
  norms = sum(x[0] for x in tensor_shapes(tiny_config()).values() if len(x) == 1)
  size = 4 * norms + (TINY_BYTES[None] // 4 - norms) * 34 // 32
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
  config = LLMConfig(quantization=quantization)
  expected = fit.estimate_fit("x", hf | {"dtype": stored}, row, config)["weights_gib"] * GIB
  (path / "config.json").write_text(json.dumps(hf | {"dtype": "float64"}))
  checkpoint = open_model(path, getattr(dtypes, dtype), backend=FastBackend())
  assert fit.checkpoint_bytes(checkpoint, quantization) == expected
