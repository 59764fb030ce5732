"""`tinyvllm doctor` in a separate process, as users start it. Many tests share a few runs, because each run tries many
backends. A sitecustomize module, which Python imports at startup, simulates drivers that hang or crash."""
import json
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from helpers.gguf_files import write_gguf
from helpers.models import tensor_shapes, tiny_config, tiny_model
from helpers.recorded_models import write_model
from tinygrad import nn
from tinygrad.device import ALL_DEVICES

import tinyvllm
from tinyvllm import LLM
from tinyvllm_extra.cli import main
from tinyvllm_extra.cli.doctor import estimate_fit, prequantized

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
GIB = 2**30
ORDER = [name for name in ALL_DEVICES if name != "DSP"]
FAULTS = '''
import os, sys
fault = {"CUDA": "crash", "QCOM": "exit", "NV": "hang"}.get(os.environ.get("DEV"))
if fault and "probe" in " ".join(sys.orig_argv):
  import ctypes, threading
  print('noise {"doctor"', flush=True)
  if fault == "crash": ctypes.string_at(0)
  if fault == "exit": os._exit(7)
  threading.Event().wait()
'''


def doctor(*options, python=sys.executable, order=None, limit=90, **env):
  """Run `tinyvllm doctor`. order: backends to try; each one starts a Python process. limit: timeout of a backend in
  seconds. env: environment variables; None removes one."""
  change = f"doctor.LIMIT, doctor.ORDER = {limit}, {order or ORDER}"
  code = f"import sys\nfrom tinyvllm_extra.cli import doctor, main\n{change}\nsys.exit(main())"
  path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), env.pop("PYTHONPATH", "")])
  environment = {k: v for k, v in {**os.environ, "PYTHONPATH": path, "DEV": None, **env}.items() if v is not None}
  run = subprocess.run([str(python), "-c", code, "doctor", *map(str, options)], env=environment, capture_output=True,
                       text=True, check=False, timeout=300, stdin=subprocess.DEVNULL)
  assert "Traceback" not in run.stdout + run.stderr, run.stdout + run.stderr
  return run


def parse_report(run): return json.loads(run.stdout)


def backends_by_name(report): return {row["backend"]: row for row in report["backends"]}


def parse_table(text, first_column):
  """Return the rows of the table with this first column, as dicts with the whole "line" and a cell per column."""
  lines = text.splitlines()
  start = next(i for i, line in enumerate(lines) if line.split()[:1] == [first_column])
  names = re.findall(r"\S+", lines[start])
  offsets = [m.start() for m in re.finditer(r"\S+", lines[start])] + [None]
  rows = []
  for line in lines[start + 1:]:
    if not line: break
    cells = [line[a:b].strip() for a, b in zip(offsets, offsets[1:], strict=False)]
    rows.append({"line": line, **dict(zip(names, cells, strict=True))})
  return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory, folder):
  """Concurrent runs: most of their time is spent starting Python."""
  bare = tmp_path_factory.mktemp("bare")   # the only folder on the PATH: a Python, and no clang next to it
  (bare / "python").symlink_to(os.path.realpath(sys.executable))
  faults = tmp_path_factory.mktemp("faults")
  (faults / "sitecustomize.py").write_text(FAULTS)
  fast = ("--seconds", "0.05")
  jobs = {
    "text": lambda: doctor(*fast, "--model", folder),
    "faults": lambda: doctor(*fast, "--json", "--model", folder, PYTHONPATH=str(faults), DEV="CPU", limit=15,
                             order=["NV", "CUDA", "QCOM", "CPU"]),
    "metal": lambda: doctor(*fast, "--json", DEV="METAL", order=["METAL", "CPU"]),
    "no clang": lambda: doctor(*fast, python=bare / "python", PATH=str(bare), CC=None, order=["CPU"],
                               XDG_CACHE_HOME=str(bare), PYTHONPATH=sysconfig.get_paths()["purelib"]),
  }
  with ThreadPoolExecutor(3) as pool: return dict(zip(jobs, pool.map(lambda f: f(), jobs.values()), strict=True))


def test_text_report_has_all_sections_in_order_within_120_columns(runs):
  run = runs["text"]
  assert run.returncode == 0, run.stderr
  offsets = [run.stdout.index(x) for x in ("tinyvllm ", "C compiler: ", "\nbackend ", "\ndefault ", "\nmodel ")]
  assert offsets == sorted(offsets)
  assert max(map(len, run.stdout.splitlines())) <= 120
  machine, = parse_table(run.stdout, "tinyvllm")
  assert machine["tinyvllm"] == tinyvllm.__version__ and machine["python"] == sys.version.split()[0]
  assert machine["cores"] == str(os.cpu_count()) and 0 < float(machine["free_gib"]) < float(machine["total_gib"])


def test_backend_table_lists_tinygrad_order_with_bandwidth_or_reason(runs):
  rows = parse_table(runs["text"].stdout, "backend")
  names = [row["line"].split()[0] for row in rows]
  assert names == ORDER
  for row in rows:
    if "does not open" not in row["line"]: assert float(row["gb_per_s"]) > 0, row["line"]
    else: assert re.search(r"does not open: \S+", row["line"]), row["line"]


def test_cpu_row_has_bandwidth_and_dtypes_of_tinygrad(runs):
  cpu = next(row for row in parse_table(runs["text"].stdout, "backend") if row["line"].split()[0] == "CPU")
  assert float(cpu["gb_per_s"]) > 0 and [cpu["float32"], cpu["float16"]] == ["yes", "yes"]
  cpu = backends_by_name(parse_report(runs["metal"]))["CPU"]
  assert 0.1 < cpu["gb_per_s"] < 10_000 and cpu["opens"] and cpu["dtype"] == "float32"
  assert 0 < cpu["free_gib"] < cpu["total_gib"] and cpu["largest_gib"] > 0


@pytest.mark.skipif(sys.platform == "darwin", reason="METAL opens on macOS")
def test_dev_backend_does_not_open_report_has_its_reason(runs):
  run, report = runs["metal"], parse_report(runs["metal"])
  assert run.returncode == 0, "another backend must open"
  metal = backends_by_name(report)["METAL"]
  assert not metal["opens"] and metal["reason"] and "\n" not in metal["reason"]
  assert report["chosen"] is None and report["why"] == f"DEV=METAL: {metal['reason']}"
  assert any(row["opens"] for row in report["backends"]) and len(report["fit"]) == 15


def test_json_report_equals_text_report(runs):
  text, report = runs["text"].stdout, parse_report(runs["metal"])
  text_rows = {row["line"].split()[0]: row for row in parse_table(text, "backend")}
  for row in report["backends"]:
    text_row = text_rows[row["backend"]]
    if not row["opens"]: assert row["reason"][:60] in text_row["line"]
    else:
      assert row["device"][:36] == text_row["device"]
      assert float(text_row["total_gib"]) == pytest.approx(row["total_gib"], abs=0.051)
      for dtype in ("float32", "float16", "bfloat16"): assert text_row[dtype] == ("yes" if row[dtype] else "no")
  assert f"C compiler: {report['compiler']['path']}\n{report['compiler']['version'][:120]}\n" in text
  models = [row["model"] for row in report["fit"]]
  assert [row["model"] for row in parse_table(text, "model")][:15] == models


def test_chosen_backend_is_dev_or_first_that_opens_except_opencl_on_cpu(runs):
  opened = [row["line"].split()[0] for row in parse_table(runs["text"].stdout, "backend")
            if "does not open" not in row["line"]]
  line, = [line for line in runs["text"].stdout.splitlines() if line.startswith("default backend: ")]
  if opened[0] == "CL" and "OpenCL on a CPU" in line:
    assert line.startswith("default backend: CPU ") and "DEV=CL" in line
  else: assert line.startswith(f"default backend: {opened[0]} ") and ", ".join(ORDER) in line
  report = parse_report(runs["faults"])
  assert (report["chosen"], report["why"]) == ("CPU", "DEV=CPU")


def test_report_without_compiler_names_package_to_install(runs):
  run = runs["no clang"]
  line, = [line for line in run.stdout.splitlines() if line.startswith("C compiler: ")]
  assert "none" in line and "pip install 'tinyvllm[cpu]'" in line
  opened = [row for row in parse_table(run.stdout, "backend") if "does not open" not in row["line"]]
  assert run.returncode == (0 if opened else 1)


def test_fit_equals_memory_computed_from_model_shape(runs):
  """Two models with 16-bit files: weights keep the files' dtype, K and V do not; tied embeddings are stored once."""
  report = parse_report(runs["faults"])
  cpu, fits = backends_by_name(report)["CPU"], {row["model"]: row for row in report["fit"][::3]}
  layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
  for name, weights, embeddings, token in (
      ("Llama-3.1-8B", 32 * (layer + 2 * 4096) + 4096 + 2 * 128256 * 4096, 128256 * 4096, 2 * 32 * 8 * 128),
      ("SmolLM2-135M", 134_515_008, 0, 2 * 30 * 3 * 64)):
    free = cpu["free_gib"] * GIB * 0.9 - 2 * weights
    assert (fits[name]["dtype"], fits[name]["stored"]) == ("float32", "bfloat16")
    assert fits[name]["weights_gib"] * GIB == 2 * weights
    assert abs(fits[name]["kv_tokens"] - max(0, free) / (4 * token)) <= 1
    assert fits[name]["fits"] == (free >= 4 * token)
    assert fits[name]["tokens_per_s_at_most"] == pytest.approx(cpu["gb_per_s"] * 1e9 / (2 * (weights - embeddings)))


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


def test_fit_of_int8_and_int4_uses_fewer_bytes(runs):
  """Matrices of the layers have a scale per 32 inputs, and in int4 a zero-point offset. Other weights have 16 bits."""
  layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
  rest = 2 * (32 * 2 * 4096 + 4096 + 2 * 128256 * 4096)
  rows = [row for row in parse_report(runs["faults"])["fit"] if row["model"] == "Llama-3.1-8B"]
  assert [row["stored"] for row in rows] == ["bfloat16", "int8", "int4"]
  assert [row["weights_gib"] * GIB for row in rows[1:]] == [32 * layer * 17 // 16 + rest, 32 * layer * 5 // 8 + rest]
  assert rows[1]["weights_gib"] < 9.3 and rows[2]["weights_gib"] < 6.4
  for narrow, wide in zip(rows[1:], rows, strict=False):
    assert narrow["kv_tokens"] >= wide["kv_tokens"] and narrow["tokens_per_s_at_most"] > wide["tokens_per_s_at_most"]


@pytest.mark.parametrize("quantization_config,dtype", [
  ({"quant_method": "gptq", "bits": 4}, "int4"), ({"quant_method": "awq", "w_bit": 4}, "int4"), (None, None),
  ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "int8"),
  ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "int8")])
def test_prequantized_model_returns_its_dtype(quantization_config, dtype):
  assert prequantized(tiny_config(quantization_config=quantization_config)) == dtype


def test_model_option_adds_model_to_fit(runs, folder):
  config = tiny_config()
  shapes = tensor_shapes(config)
  count = sum(a * (b[0] if b else 1) for a, *b in shapes.values())
  row = parse_report(runs["faults"])["fit"][-3]
  assert row["model"] == str(folder) and row["weights_gib"] * GIB == 4 * count and row["fits"]
  assert parse_table(runs["text"].stdout, "model")[-1]["line"].startswith(str(folder)[:36])


def test_model_option_describes_checkpoint(runs):
  assert runs["text"].stdout.endswith("\n\ncheckpoint: float32\n")
  assert parse_report(runs["faults"])["checkpoint"] == "float32" and "checkpoint" not in parse_report(runs["metal"])


def test_driver_crashes_exits_or_hangs_report_has_its_reason(runs):
  run, rows = runs["faults"], backends_by_name(parse_report(runs["faults"]))
  assert run.returncode == 0 and rows["CPU"]["opens"]
  for name, words in (("CUDA", "Segmentation fault"), ("QCOM", "exit code 7"), ("NV", "15 s")):
    assert not rows[name]["opens"] and words in rows[name]["reason"], rows[name]


def test_missing_model_folder_prints_one_line_and_exits_1():
  run = doctor("--model", "/nowhere/to/be/found")
  assert run.returncode == 1 and not run.stdout
  assert run.stderr.startswith("tinyvllm: ") and "/nowhere/to/be/found" in run.stderr and run.stderr.count("\n") == 1


@pytest.fixture
def error_line(monkeypatch, capsys):
  """Run doctor in this process, which must fail before it tries a backend, and return the line that it prints."""
  monkeypatch.setattr("tinyvllm_extra.cli.doctor.run_probe", lambda *_: pytest.fail("doctor tried a backend"))
  def run(*options):
    assert main(["doctor", *map(str, options)]) == 1
    output = capsys.readouterr()
    assert not output.out and output.err.startswith("tinyvllm: ") and output.err.count("\n") == 1
    return output.err
  return run


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "61"])
def test_seconds_out_of_range_exits_with_error(error_line, seconds):
  assert re.search(r"\bseconds=.* 60\b", error_line("--seconds", seconds))


@pytest.mark.parametrize("content, words", [
  ("{", "Expecting"), ("[]", ""), ("{}", "vocab_size"), (json.dumps(tiny_config(hidden_act="gelu")), "gelu"),
  (json.dumps(tiny_config(num_attention_heads=0)), "")],
  ids=["truncated", "list", "empty", "unknown activation", "no heads"])
def test_invalid_config_json_exits_before_opening_a_backend(error_line, tmp_path, content, words):
  (tmp_path / "config.json").write_text(content)
  assert words in error_line("--model", tmp_path)


@pytest.fixture
def report_of(monkeypatch, capsys):
  """Run doctor in this process, with a fake CPU instead of its tests of backends, and return its output. Options may
  include --json."""
  facts = {"opens": True, "device": "CPU", "renderer": "CPU", "dtype": "float32", "float32": True, "float16": True,
           "bfloat16": False, "free_gib": 8.0, "total_gib": 8.0, "largest_gib": 8.0, "gb_per_s": 10.0}
  monkeypatch.setattr("tinyvllm_extra.cli.doctor.run_probe", lambda *_: facts)
  monkeypatch.setattr("tinyvllm_extra.cli.doctor.ORDER", ["CPU"])
  def run(*options):
    assert main(["doctor", *map(str, options)]) == 0
    return capsys.readouterr().out
  return run


WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 320}
LAYER = 256 * (2 * 256 + 2 * 128) + 3 * 256 * 512   # weights of its matrices


@pytest.mark.parametrize("kind,kinds,stored,description,num_parts", [
  ("Q4_K", {"attn_v": "Q6_K"}, "int4", "GGUF Q4_K; v_proj GGUF Q6_K", 3), ("Q6_K", {}, "int8", "GGUF Q6_K", 1),
  ("Q8_0", {"token_embd": "F16"}, "int8", "GGUF Q8_0; embed_tokens GGUF F16", 1),
  ("F16", {}, "float16", "GGUF F16", 3)])
def test_model_option_describes_gguf_and_its_fit(report_of, tmp_path, kind, kinds, stored, description, num_parts):
  """A split file is given by its first part. The estimate names the nearest of int8 and int4."""
  folder = tiny_model(tmp_path, **WIDE)
  path = write_gguf(tmp_path / "model.gguf", folder, kind, kinds=kinds, tensors_per_file=8 if num_parts == 3 else 0)
  assert len([*tmp_path.glob("*.gguf")]) == num_parts
  assert report_of("--model", path).endswith(f"\n\ncheckpoint: {description}\n")
  report = json.loads(report_of("--model", path, "--json"))
  row = next(row for row in report["fit"] if row["model"] == str(path))
  assert report["checkpoint"] == description and row["stored"] == stored and row["fits"]
  bits = {"int8": 8.5, "int4": 5, "float16": 16}[stored]
  embeddings, norms = 2 * WIDE["vocab_size"] * 256, 5 * 256
  size = 2 if "F16" in (kind, *kinds.values()) else 4   # bytes
  assert row["weights_gib"] * GIB == 2 * LAYER * bits / 8 + (embeddings + norms) * size


@pytest.mark.parametrize("name", ["gemma3_vision", "gpt2", "qwen3_moe"])
def test_model_option_estimates_weights_of_other_architectures(report_of, tmp_path, name):
  folder = write_model(tmp_path, name)
  report = json.loads(report_of("--model", folder, "--json"))
  row = next(row for row in report["fit"] if row["model"] == str(folder))
  model = LLM(folder, dtype="float32", max_model_len=32).runner.model
  actual = sum(x.nbytes() for module in model.modules() for x in nn.state.get_parameters(module))
  assert row["weights_gib"] * GIB == actual and row["fits"]


def test_model_option_unusable_gguf_exits_before_opening_a_backend(error_line, tmp_path):
  write_gguf(tmp_path / "model.gguf", tiny_model(tmp_path), "Q8_0", tensors_per_file=8)
  first, second, _ = sorted(tmp_path.glob("*.gguf"))
  assert f"pass the first part, {first}" in error_line("--model", second)
  second.unlink()
  assert f"{second} is missing" in error_line("--model", first)
  first.write_bytes(b"GGUF")
  assert f"{first} is not a readable GGUF file" in error_line("--model", first)
  assert "nowhere.gguf is not a readable file" in error_line("--model", tmp_path / "nowhere.gguf")


def test_marlin_checkpoint_exits_before_opening_a_backend(error_line, tmp_path):
  config = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}
  assert "checkpoint_format='marlin'" in error_line("--model", tiny_model(tmp_path, quantization_config=config))


def test_help_lists_doctor(capsys):
  with pytest.raises(SystemExit) as e: main(["--help"])
  assert e.value.code == 0 and re.search(r"\n    doctor +\S", capsys.readouterr().out)
