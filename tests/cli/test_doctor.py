"""`tinyvllm doctor` in this process: its estimates, reports and errors. Backends are facts of a table here."""
import importlib.metadata
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.commands import error_line, run_command
from helpers.gguf_files import write_gguf
from helpers.models import tensor_shapes, tiny_config, tiny_model
from helpers.record_models import write_model
from tinygrad import dtypes, nn
from tinygrad.device import ALL_DEVICES

import tinyvllm
from tinyvllm import LLM, backend, config
from tinyvllm_extra.cli import doctor
from tinyvllm_extra.fit import estimate_fit, prequantized

GIB = 2**30
CPU = {"opens": True, "device": "A CPU", "renderer": "CPU C", "dtype": "float32", "float32": True, "float16": True,
       "bfloat16": False, "free_gib": 8.0, "total_gib": 16.0, "largest_gib": 12.0, "gb_per_s": 10.0, "why": ""}
GPU = {**CPU, "device": "A GPU", "renderer": "CL R", "dtype": "float16", "bfloat16": True, "gb_per_s": 99.0}
TINY = tiny_config()   # instead of the models in shapes.json
CLOSED = {"opens": False, "reason": "no driver"}
CRASHED = {**{name: x for name, x in GPU.items() if name != "gb_per_s"}, "reason": "the process ended with a signal"}


# Code that runs in a backend's process

def test_probe_prints_facts_and_bandwidth(monkeypatch, capfd):
  monkeypatch.setattr(doctor, "BUFFER", 2**20)
  monkeypatch.setattr(doctor.kernels, "make_backend", doctor.kernels.FastBackend)
  monkeypatch.setattr(doctor, "bandwidth", lambda *args: sizes.append(args) or 5e9)
  sizes = []
  for seconds in (0.0, 0.5): doctor.probe(seconds)
  lines = [json.loads(line)["doctor"] for line in capfd.readouterr().out.splitlines() if line]
  facts = lines[0]
  assert {*facts} == {*CPU} - {"gb_per_s"} and facts["opens"] and facts["renderer"].startswith("CPU ")
  assert 0 < facts["free_gib"] < facts["total_gib"] and facts["largest_gib"] == facts["total_gib"]
  assert [{*line} for line in lines[1:]] == [{*facts}, {"gb_per_s"}] and lines[2] == {"gb_per_s": 5.0}
  assert sizes == [(doctor.kernels.FastBackend.Linear, 2**20, dtypes.float32, 0.5)]


def test_probe_prints_the_reason_of_an_error(monkeypatch, capfd):
  def fail(): raise RuntimeError("no device") from ExceptionGroup("all", [OSError("a\nb"), OSError(), OSError("a")])
  monkeypatch.setattr(doctor, "open_device", fail)
  doctor.probe(1.0)
  assert json.loads(capfd.readouterr().out) == {"doctor": {"reason": "a; OSError()"}}
  assert doctor.reason_of(ValueError("first\nsecond")) == "first" and doctor.reason_of(KeyError()) == "KeyError()"


@pytest.mark.parametrize("step,seconds,calls", [(0.001, 0, (3, 3)), (0.004, 0, (3, 3)), (0.001, 0.0085, (3, 11)),
                                                (0.004, 0.0185, (3, 7))])
def test_bandwidth_is_bytes_per_median_time(monkeypatch, step, seconds, calls):
  """A fast device, with less than 2 ms per read, reads the weights 16 times per measurement."""
  reads, times = [], itertools.count()

  def graph_of(function):
    reads.append(0)
    def graph(): reads[-1] += 1
    return graph
  monkeypatch.setattr(doctor, "TinyJit", graph_of)
  monkeypatch.setattr(doctor, "time", SimpleNamespace(perf_counter=lambda: next(times) * step))
  result = doctor.bandwidth(backend.Linear, 2**20 + 99, dtypes.float16, seconds)
  rows = 2**20 // 4096 // 2 // 16 * 16
  assert result == pytest.approx(rows * 4096 * 2 / step * (16 if step < 2e-3 else 1)) and tuple(reads) == calls


def test_bandwidth_reads_the_weights_in_a_graph():
  assert 0 < doctor.bandwidth(backend.Linear, 2**20, dtypes.float32, 0.0) < 1e15


def test_describe_returns_name_and_memory():
  name, total = doctor.describe(SimpleNamespace(device="NULL", arch="an architecture"))
  assert name == "an architecture" and total > GIB
  assert doctor.describe(SimpleNamespace(device="NULL", arch=None, device_name="A GPU"))[0] == "A GPU"
  info = Path("/proc/cpuinfo")
  names = re.findall(r"model name\s*: (.*)", info.read_text()) if info.exists() else []
  assert doctor.describe(SimpleNamespace(device="CPU", arch="an architecture"))[0] == [*names, "an architecture"][0]


# The user's process

@pytest.mark.parametrize("output,code,facts", [
  (b'x\n\n{"doctor": {"opens": true, "a": 1}}\nnoise {"doctor": {"a": 2}}\n\n{"doctor": {"b": 2}}\n', 0,
   {"opens": True, "a": 1, "b": 2}),
  (b'\n{"doctor": {"opens": true}}\n\xff', -11,
   {"opens": True, "reason": "the process ended with Segmentation fault"}),
  (b"", 7, {"opens": False, "reason": "the process ended with exit code 7"}),
  (b'{"doctor": {"reason": "no driver"}}\n', 1, {"opens": False, "reason": "no driver"}),
  (None, 0, {"opens": False, "reason": "no answer within 93 s"})])
def test_run_probe_returns_the_facts_that_the_process_printed(monkeypatch, output, code, facts):
  def run(command, env, timeout, **_):
    assert (env["DEV"], timeout, "HOME" in env) == ("CL", 92.75, "HOME" in os.environ)
    assert command[2].endswith("doctor.probe(2.75)")
    if output is None: raise subprocess.TimeoutExpired(command, timeout)
    return subprocess.CompletedProcess(command, code, output)
  monkeypatch.setattr(subprocess, "run", run)
  assert doctor.run_probe("CL", 2.75) == facts


@pytest.fixture
def machine(monkeypatch):
  """Return a function that sets the facts of this machine's backends, of its default one, and the variable DEV."""
  monkeypatch.setenv("DEV", "")
  monkeypatch.setattr(doctor, "ORDER", ["CL", "METAL", "CPU"])
  read = config.read_json
  monkeypatch.setattr(config, "read_json", lambda path: {"tiny": TINY} if path.name == "shapes.json" else read(path))

  def set_up(rows, default, dev=""):
    monkeypatch.setenv("DEV", dev)
    facts = {"CL": CLOSED, "METAL": CLOSED, "CPU": CPU, **rows}
    monkeypatch.setattr(doctor, "run_probe", lambda name, seconds: dict(facts[name] if seconds else default))
  set_up({}, CPU)
  return set_up


def report(*options):
  run = run_command("doctor", "--json", *options)
  return run.returncode, json.loads(run.stdout)


@pytest.mark.parametrize("rows,default,dev,chosen,why", [
  ({}, CPU, "", "CPU", "the first of CL, METAL, CPU that opens"),
  ({"CL": GPU}, GPU, "", "CL", "the first of CL, METAL, CPU that opens"),
  ({"CL": GPU}, {**CPU, "why": "CL is a CPU"}, "", "CPU", "CL is a CPU"),
  ({"CL": GPU}, CPU, "CPU", "CPU", "DEV=CPU"), ({}, CLOSED, "CL", None, "DEV=CL: no driver"),
  ({"NULL": {**GPU, "renderer": "NULL N"}}, {**GPU, "renderer": "NULL N"}, "null", "NULL", "DEV=null"),
  ({"CL": CRASHED}, CRASHED, "CL", "CL", "DEV=CL"),
  ({}, {"opens": False}, "", None, "the first of CL, METAL, CPU that opens: it failed in the second test"),
  ({"CPU": CLOSED}, CLOSED, "", None, "the first of CL, METAL, CPU that opens: no driver")])
def test_chosen_backend_is_the_default_of_a_second_process(machine, rows, default, dev, chosen, why):
  machine(rows, default, dev)
  code, result = report()
  names = ["CL", "METAL", "CPU"] + ["NULL"] * (dev == "null")
  opened = {row["backend"]: row for row in result["backends"] if row["opens"]}
  assert [row["backend"] for row in result["backends"]] == names and code == (0 if opened else 1)
  assert (result["chosen"], result["why"]) == (chosen, why)
  assert [row["dtype"] for row in result["fit"]] == ([opened[chosen or "CPU"]["dtype"]] * 3 if opened else [])


def test_report_describes_the_machine_and_its_compiler(machine, monkeypatch, tmp_path):
  program = tmp_path / "my clang"
  program.write_text("#!/bin/sh\necho clang version 1; echo more")
  program.chmod(0o755)
  monkeypatch.setattr(doctor.kernels, "find_compiler", lambda: str(program))
  result = report()[1]
  facts, compiler = result["machine"], result["compiler"]
  assert facts["tinyvllm"] == tinyvllm.__version__ and facts["tinygrad"] == importlib.metadata.version("tinygrad")
  assert facts["python"] == sys.version.split()[0] and facts["cores"] == os.cpu_count()
  assert 0 < facts["free_gib"] < facts["total_gib"]
  assert compiler == {"path": str(program), "version": "clang version 1"}


def test_text_report_has_a_table_of_each_part_within_120_columns(machine, monkeypatch):
  machine({"CL": CRASHED, "CPU": {**CPU, "device": "x" * 99}}, CPU)
  monkeypatch.setattr(doctor, "compiler", lambda: {"path": "/bin/clang", "version": "clang 1 " + "y" * 200})
  run = run_command("doctor")
  assert run.returncode == 0 and max(map(len, run.stdout.splitlines())) == 120
  facts, compiler, backends, default, models = run.stdout.split("\n\n")
  assert facts.split()[:6] == ["tinyvllm", "tinygrad", "python", "machine", "cores", "free_gib"]
  assert compiler.startswith("C compiler: /bin/clang\nclang 1 yyy")
  head, *failed, row = backends.splitlines()
  assert re.sub(" +", " ", head) == "backend device float32 float16 bfloat16 free_gib total_gib largest_gib gb_per_s"
  assert failed == ["CL       opens, but its test failed: the process ended with a signal",
                    "METAL    does not open: no driver"]
  assert row.split() == ["CPU", "x" * 36, "yes", "yes", "no", "8.000", "16.0", "12.0", "10.000"]
  assert row.index("yes") == head.index("float32")
  assert default.splitlines() == ["default backend: CPU (the first of CL, METAL, CPU that opens)",
                                  "fastest backend: CPU (to use it, set DEV=CPU)"]
  assert models.split()[:2] == ["model", "dtype"] and len(models.splitlines()) == 4
  machine({"CL": GPU}, CPU)
  assert "\nfastest backend: CL (to use it, set DEV=CL)\n" in run_command("doctor").stdout


def test_text_report_without_compiler_and_backend_names_a_remedy(machine, monkeypatch):
  monkeypatch.setattr(doctor.kernels, "find_compiler", lambda: None)
  machine({"CPU": CLOSED}, CLOSED)
  run = run_command("doctor")
  assert run.returncode == 1 and "fastest backend: None" in run.stdout
  assert f"\nC compiler: {doctor.NO_COMPILER}\n\n" in run.stdout and "pip install 'tinyvllm[cpu]'" in run.stdout


def test_order_is_tinygrads_without_dsp(): assert {*ALL_DEVICES} - {*doctor.ORDER} == {"DSP"}


@pytest.mark.parametrize("seconds,code", [("0", 1), ("nan", 1), ("60.1", 1), ("60", 0), ("0.1", 0)])
def test_seconds_are_above_0_and_at_most_60(machine, seconds, code):
  run = run_command("doctor", "--seconds", seconds)
  if code: assert re.search(r"\bseconds=.* 60\b", error_line(run))
  assert run.returncode == code


# Estimates

@pytest.mark.parametrize("dtype,row,stored", [
  ("float16", {"dtype": "float32"}, "float16"), ("bfloat16", {"dtype": "float32"}, "bfloat16"),
  ("bfloat16", {"dtype": "float32", "bfloat16": False}, "float32"), ("bfloat16", {"dtype": "float16"}, "float16"),
  ("float32", {"dtype": "float16"}, "float16"), ("float64", {"dtype": "float32"}, "float32"),
  (None, {"dtype": "float32"}, "float32")], ids=str)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_fit_keeps_file_dtype_if_narrower_and_supported(dtype, row, stored, key):
  row = {"float32": True, "float16": True, "bfloat16": True, "free_gib": 8.0, "gb_per_s": 10.0, **row}
  result, plain = (estimate_fit("x", hf, row) for hf in (tiny_config(**{key: dtype}), tiny_config()))
  assert (result["dtype"], result["stored"], plain["stored"]) == (row["dtype"], stored, row["dtype"])
  assert plain["weights_gib"] / result["weights_gib"] == (2 if (row["dtype"], stored[-2:]) == ("float32", "16") else 1)
  assert result["tokens_per_s_at_most"] > 0 and result["fits"] and result["kv_tokens"] >= plain["kv_tokens"]


SHAPES = json.loads((Path(doctor.__file__).parent / "shapes.json").read_text())
LAYER = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336   # weights of the 8B model's matrices
EMBEDDINGS = 128256 * 4096
REST = 2 * (32 * 2 * 4096 + 4096 + 2 * EMBEDDINGS)   # bytes of its norms and embeddings


@pytest.mark.parametrize("free", [8.0, 40.0])
@pytest.mark.parametrize("name,quantization,weights,embeddings,token", [
  ("Llama-3.1-8B", None, 64 * LAYER + REST, 2 * EMBEDDINGS, 2 * 32 * 8 * 128),
  ("Llama-3.1-8B", "int8", 32 * LAYER * 17 // 16 + REST, 2 * EMBEDDINGS, 2 * 32 * 8 * 128),
  ("Llama-3.1-8B", "int4", 32 * LAYER * 5 // 8 + REST, 2 * EMBEDDINGS, 2 * 32 * 8 * 128),
  ("SmolLM2-135M", None, 2 * 134_515_008, 0, 2 * 30 * 3 * 64)])
def test_fit_equals_memory_computed_from_model_shape(free, name, quantization, weights, embeddings, token):
  """Weights keep the files' 16 bits, K and V do not; tied embeddings are stored once. Quantized matrices of the layers
  have a scale per 32 inputs, and in int4 a zero-point offset. weights, embeddings: bytes. token: values of K and V."""
  fit = estimate_fit(name, SHAPES[name], {**CPU, "bfloat16": True, "free_gib": free}, quantization)
  left = free * GIB * 0.9 - weights
  assert (fit["dtype"], fit["stored"], fit["weights_gib"] * GIB) == ("float32", quantization or "bfloat16", weights)
  assert abs(fit["kv_tokens"] - max(0, left) / (4 * token)) <= 1 and fit["fits"] == (left >= 4 * token)
  assert fit["tokens_per_s_at_most"] == pytest.approx(10e9 / (weights - embeddings))


def test_fit_needs_room_for_one_token():
  def fit(free): return estimate_fit("x", TINY, {**CPU, "free_gib": free / GIB})
  weights, token = fit(1)["weights_gib"] * GIB, 2 * 2 * 2 * 8 * 4   # layers, K and V, heads, dimensions, bytes
  results = [fit(math.ceil((weights + token + extra) / 0.9)) for extra in (0, -2)]
  assert [(x["fits"], x["kv_tokens"]) for x in results] == [(True, 1), (False, 0)]


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_of_the_report_has_an_estimate(name):
  assert estimate_fit(name, SHAPES[name], CPU)["weights_gib"] > 0


def test_kv_cache_dtype_fits_more_tokens(machine):
  plain, fp8 = (report(*options)[1]["fit"][-1]["kv_tokens"] for options in ([], ["--kv-cache-dtype", "fp8"]))
  assert fp8 > 2 * plain > 0


@pytest.mark.parametrize("quantization_config,dtype", [
  ({"quant_method": "gptq", "bits": 4}, "int4"), ({"quant_method": "awq", "w_bit": 4}, "int4"), (None, None),
  ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "int8"),
  ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": None}}}, None),
  ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "int8"), ({"quant_method": "mxfp4"}, "int4")])
def test_prequantized_model_returns_its_dtype(quantization_config, dtype):
  assert prequantized(tiny_config(quantization_config=quantization_config)) == dtype


# --model

def test_model_option_adds_model_and_describes_its_checkpoint(machine, tmp_path):
  folder = tiny_model(tmp_path, dtype="float16")
  code, result = report("--model", folder)
  count = sum(a * (b[0] if b else 1) for a, *b in tensor_shapes(tiny_config()).values())
  row = result["fit"][-3]
  assert code == 0 and result["checkpoint"] == "float16" and len(result["fit"]) == 6
  assert row["model"] == str(folder) and row["weights_gib"] * GIB == 4 * count and row["fits"]
  assert run_command("doctor", "--model", folder).stdout.endswith("\n\ncheckpoint: float16\n")
  (folder / "model.safetensors").unlink()
  assert "checkpoint" not in report("--model", folder)[1], "config.json alone suffices"


@pytest.mark.parametrize("kind,kinds,stored,description,tensors_per_file", [
  ("Q4_K", {"attn_v": "Q6_K"}, "int4", "GGUF Q4_K; v_proj GGUF Q6_K", 8), ("Q6_K", {}, "int8", "GGUF Q6_K", 0),
  ("Q8_0", {"token_embd": "F16"}, "int8", "GGUF Q8_0; embed_tokens GGUF F16", 0),
  ("F16", {}, "float16", "GGUF F16", 8)])
def test_model_option_describes_gguf_and_its_fit(machine, tmp_path, kind, kinds, stored, description, tensors_per_file):
  """A split file is given by its first part. The estimate names the nearest of int8 and int4."""
  folder = tiny_model(tmp_path, hidden_size=256, intermediate_size=512, vocab_size=320)
  path = write_gguf(tmp_path / "model.gguf", folder, kind, kinds=kinds, tensors_per_file=tensors_per_file)
  result = report("--model", path)[1]
  row, *quantized = [row for row in result["fit"] if row["model"] == str(path)]
  assert result["checkpoint"] == description and row["stored"] == stored and row["fits"]
  assert [x["stored"] for x in quantized] == (["int8", "int4"] if kind == "F16" else []), "it can be quantized"
  matrices = 2 * (256 * (2 * 256 + 2 * 128) + 3 * 256 * 512) * {"int8": 8.5, "int4": 5, "float16": 16}[stored] / 8
  others = (2 * 320 * 256 + 5 * 256) * (2 if "F16" in (kind, *kinds.values()) else 4)   # embeddings and norms
  assert row["weights_gib"] * GIB == matrices + others


@pytest.mark.parametrize("name", ["gemma3_vision", "gpt2", "qwen3_moe"])
def test_fit_of_other_architectures_equals_the_loaded_weights(monkeypatch, tmp_path, name):
  folder = write_model(tmp_path, name)
  fit = estimate_fit(name, json.loads((folder / "config.json").read_text()), CPU)
  monkeypatch.setattr("tinyvllm_extra.kernels.make_backend", doctor.kernels.FastBackend)
  model = LLM(folder, dtype="float32", max_model_len=32).runner.model
  actual = sum(x.nbytes() for module in model.modules() for x in nn.state.get_parameters(module))
  assert fit["weights_gib"] * GIB == actual and fit["fits"]


@pytest.fixture
def closed(monkeypatch):
  """doctor must fail before it opens a backend."""
  monkeypatch.setattr(doctor, "run_probe", lambda *_: pytest.fail("doctor opens a backend"))


@pytest.mark.parametrize("content,words", [
  (None, "config.json"), ("{", "Expecting"), ("[]", ""), ("{}", "vocab_size"),
  (json.dumps(tiny_config(hidden_act="gelu")), "gelu"), (json.dumps(tiny_config(num_attention_heads=0)), ""),
  (json.dumps(tiny_config(quantization_config={"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"})),
   "checkpoint_format='marlin'")])
def test_unusable_folder_exits_before_opening_a_backend(closed, tmp_path, content, words):
  tiny_model(tmp_path)
  (tmp_path / "config.json").unlink()
  if content: (tmp_path / "config.json").write_text(content)
  run = run_command("doctor", "--model", tmp_path)
  assert words in error_line(run) and not run.stdout and run.stderr.count("\n") == 1


def test_unusable_gguf_exits_before_opening_a_backend(closed, tmp_path):
  def error(path): return error_line(run_command("doctor", "--model", path))
  write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path), "Q8_0", tensors_per_file=8)
  first, second, _ = sorted(tmp_path.glob("*.gguf"))
  assert f"pass the first part, {first}" in error(second)
  second.unlink()
  assert f"{second} is missing" in error(first)
  first.write_bytes(b"GGUF")
  assert f"{first} is not a readable GGUF file" in error(first)
  assert "nowhere.gguf is not a readable file" in error(tmp_path / "nowhere.gguf")
