"""`tinyvllm doctor`, as users start it: a process of its own. Few runs, looked at by many tests, as each tries many
backends. Drivers that hang or crash are played by a sitecustomize, which every Python imports at its start."""
import json
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from reference import tensor_shapes, tiny_config
from tinygrad.device import ALL_DEVICES

import tinyvllm
from tinyvllm_extra.cli import main
from tinyvllm_extra.cli.doctor import fit, prequantized

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
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
  """A run of its own. order: the backends that it is to try: each costs a start of Python. limit: the
  seconds that one may take. env: None takes a variable out."""
  change = f"doctor.LIMIT, doctor.ORDER = {limit}, {order or ORDER}"
  code = f"import sys\nfrom tinyvllm_extra.cli import doctor, main\n{change}\nsys.exit(main())"
  path = os.pathsep.join([str(ROOT), str(ROOT / "examples"), env.pop("PYTHONPATH", "")])
  kept = {k: v for k, v in {**os.environ, "PYTHONPATH": path, "DEV": None, **env}.items() if v is not None}
  done = subprocess.run([str(python), "-c", code, "doctor", *map(str, options)], env=kept, capture_output=True,
                        text=True, check=False, timeout=300, stdin=subprocess.DEVNULL)
  assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
  return done


def report_of(done): return json.loads(done.stdout)


def backends_of(report): return {row["backend"]: row for row in report["backends"]}


def rows_of(text, first):
  """The lines of the table whose first column has that name, cut where its header's columns begin."""
  lines = text.splitlines()
  start = next(i for i, line in enumerate(lines) if line.split()[:1] == [first])
  names = re.findall(r"\S+", lines[start])
  places = [m.start() for m in re.finditer(r"\S+", lines[start])] + [None]
  rows = []
  for line in lines[start + 1:]:
    if not line: break
    cells = [line[a:b].strip() for a, b in zip(places, places[1:], strict=False)]
    rows.append({"line": line, **dict(zip(names, cells, strict=True))})
  return rows


@pytest.fixture(scope="module")
def runs(tmp_path_factory, folder):
  """Side by side, as most of their time goes to starting Python."""
  bare = tmp_path_factory.mktemp("bare")   # a Python beside which there is no clang, and nothing else on the PATH
  (bare / "python").symlink_to(os.path.realpath(sys.executable))
  faults = tmp_path_factory.mktemp("faults")
  (faults / "sitecustomize.py").write_text(FAULTS)
  fast = ("--seconds", "0.05")
  todo = {
    "text": lambda: doctor(*fast, "--model", folder),
    "faults": lambda: doctor(*fast, "--json", "--model", folder, PYTHONPATH=str(faults), DEV="CPU", limit=15,
                             order=["NV", "CUDA", "QCOM", "CPU"]),
    "metal": lambda: doctor(*fast, "--json", DEV="METAL", order=["METAL", "CPU"]),
    "no clang": lambda: doctor(*fast, python=bare / "python", PATH=str(bare), CC=None, order=["CPU"],
                               XDG_CACHE_HOME=str(bare), PYTHONPATH=sysconfig.get_paths()["purelib"]),
  }
  with ThreadPoolExecutor(3) as pool: return dict(zip(todo, pool.map(lambda f: f(), todo.values()), strict=True))


def test_all_sections_are_there_in_their_order_within_120_columns(runs):
  done = runs["text"]
  assert done.returncode == 0, done.stderr
  places = [done.stdout.index(x) for x in ("tinyvllm ", "C compiler: ", "\nbackend ", "\ndefault ", "\nmodel ")]
  assert places == sorted(places)
  assert max(map(len, done.stdout.splitlines())) <= 120
  machine, = rows_of(done.stdout, "tinyvllm")
  assert machine["tinyvllm"] == tinyvllm.__version__ and machine["python"] == sys.version.split()[0]
  assert machine["cores"] == str(os.cpu_count()) and 0 < float(machine["free_gib"]) < float(machine["total_gib"])


def test_each_backend_of_tinygrads_order_is_a_row_or_has_a_reason(runs):
  rows = rows_of(runs["text"].stdout, "backend")
  names = [row["line"].split()[0] for row in rows]
  assert names == ORDER
  for row in rows:
    if "does not open" not in row["line"]: assert float(row["gb_per_s"]) > 0, row["line"]
    else: assert re.search(r"does not open: \S+", row["line"]), row["line"]


def test_the_cpu_is_measured_and_its_dtypes_are_what_tinygrad_says(runs):
  cpu = next(row for row in rows_of(runs["text"].stdout, "backend") if row["line"].split()[0] == "CPU")
  assert float(cpu["gb_per_s"]) > 0 and [cpu["float32"], cpu["float16"]] == ["yes", "yes"]
  cpu = backends_of(report_of(runs["metal"]))["CPU"]
  assert 0.1 < cpu["gb_per_s"] < 10_000 and cpu["opens"] and cpu["dtype"] == "float32"
  assert 0 < cpu["free_gib"] < cpu["total_gib"] and cpu["largest_gib"] > 0


@pytest.mark.skipif(sys.platform == "darwin", reason="METAL opens there")
def test_a_device_that_was_asked_for_and_does_not_open_is_told_and_the_rest_is_there(runs):
  done, report = runs["metal"], report_of(runs["metal"])
  assert done.returncode == 0, "others open"
  metal = backends_of(report)["METAL"]
  assert not metal["opens"] and metal["reason"] and "\n" not in metal["reason"]
  assert report["chosen"] is None and report["why"] == f"DEV=METAL: {metal['reason']}"
  assert any(row["opens"] for row in report["backends"]) and len(report["fit"]) == 15


def test_json_has_what_the_text_says(runs):
  text, report = runs["text"].stdout, report_of(runs["metal"])
  rows = {row["line"].split()[0]: row for row in rows_of(text, "backend")}
  for row in report["backends"]:
    shown = rows[row["backend"]]
    if not row["opens"]: assert row["reason"][:60] in shown["line"]
    else:
      assert row["device"][:36] == shown["device"]
      assert float(shown["total_gib"]) == pytest.approx(row["total_gib"], abs=0.051)
      for dtype in ("float32", "float16", "bfloat16"): assert shown[dtype] == ("yes" if row[dtype] else "no")
  assert f"C compiler: {report['compiler']['path']}\n{report['compiler']['version'][:120]}\n" in text
  fits = [row["model"] for row in report["fit"]]
  assert [row["model"] for row in rows_of(text, "model")][:15] == fits


def test_the_first_that_opens_is_chosen_unless_dev_says_another(runs):
  opened = [row["line"].split()[0] for row in rows_of(runs["text"].stdout, "backend")
            if "does not open" not in row["line"]]
  assert f"\ndefault backend: {opened[0]} (the first of {', '.join(ORDER)} that opens)\n" in runs["text"].stdout
  report = report_of(runs["faults"])
  assert (report["chosen"], report["why"]) == ("CPU", "DEV=CPU")


def test_a_machine_without_a_compiler_is_told_what_to_install(runs):
  done = runs["no clang"]
  line, = [line for line in done.stdout.splitlines() if line.startswith("C compiler: ")]
  assert "none" in line and "pip install 'tinyvllm[cpu]'" in line
  opened = [row for row in rows_of(done.stdout, "backend") if "does not open" not in row["line"]]
  assert done.returncode == (0 if opened else 1)


def test_what_fits_is_what_the_models_numbers_give(runs):
  """By hand, for two, whose files are of 16 bits: weights stay so, K and V are not; tied embeddings are there once."""
  report = report_of(runs["faults"])
  cpu, fits = backends_of(report)["CPU"], {row["model"]: row for row in report["fit"][::3]}
  layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
  for name, weights, embeddings, token in (
      ("Llama-3.1-8B", 32 * (layer + 2 * 4096) + 4096 + 2 * 128256 * 4096, 128256 * 4096, 2 * 32 * 8 * 128),
      ("SmolLM2-135M", 134_515_008, 0, 2 * 30 * 3 * 64)):
    left = cpu["free_gib"] * GIB * 0.9 - 2 * weights
    assert (fits[name]["dtype"], fits[name]["stored"]) == ("float32", "bfloat16")
    assert fits[name]["weights_gib"] * GIB == 2 * weights
    assert abs(fits[name]["kv_tokens"] - max(0, left) / (4 * token)) <= 1
    assert fits[name]["fits"] == (left >= 4 * token)
    assert fits[name]["tokens_per_s_at_most"] == pytest.approx(cpu["gb_per_s"] * 1e9 / (2 * (weights - embeddings)))


@pytest.mark.parametrize("said,row,stored", [
  ("float16", {"dtype": "float32"}, "float16"), ("bfloat16", {"dtype": "float32"}, "bfloat16"),
  ("bfloat16", {"dtype": "float32", "bfloat16": False}, "float32"), ("bfloat16", {"dtype": "float16"}, "float16"),
  ("float32", {"dtype": "float16"}, "float16"), ("float64", {"dtype": "float32"}, "float32"),
  (None, {"dtype": "float32"}, "float32")], ids=str)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_weight_stays_in_its_files_type_where_that_is_narrower_and_the_device_has_it(said, row, stored, key):
  row = {"float32": True, "float16": True, "bfloat16": True, "free_gib": 8.0, "gb_per_s": 10.0, **row}
  found, plain = (fit("x", hf, row) for hf in (tiny_config(**{key: said}), tiny_config()))
  assert (found["dtype"], found["stored"], plain["stored"]) == (row["dtype"], stored, row["dtype"])
  assert plain["weights_gib"] / found["weights_gib"] == (2 if (row["dtype"], stored[-2:]) == ("float32", "16") else 1)
  assert found["tokens_per_s_at_most"] > 0 and found["fits"] and found["kv_tokens"] >= plain["kv_tokens"]


def test_what_fits_in_8_and_in_4_bits_is_told(runs):
  """The layers' matrices with a scale for each 32 inputs, and of 4 bits an offset; all else in 16 bits."""
  layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
  rest = 2 * (32 * 2 * 4096 + 4096 + 2 * 128256 * 4096)
  rows = [row for row in report_of(runs["faults"])["fit"] if row["model"] == "Llama-3.1-8B"]
  assert [row["stored"] for row in rows] == ["bfloat16", "int8", "int4"]
  assert [row["weights_gib"] * GIB for row in rows[1:]] == [32 * layer * 17 // 16 + rest, 32 * layer * 5 // 8 + rest]
  assert rows[1]["weights_gib"] < 9.3 and rows[2]["weights_gib"] < 6.4
  for narrow, wide in zip(rows[1:], rows, strict=False):
    assert narrow["kv_tokens"] >= wide["kv_tokens"] and narrow["tokens_per_s_at_most"] > wide["tokens_per_s_at_most"]


@pytest.mark.parametrize("said,found", [
  ({"quant_method": "gptq", "bits": 4}, "int4"), ({"quant_method": "awq", "w_bit": 4}, "int4"), (None, None),
  ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}, "int8")])
def test_a_model_that_is_quantized_is_told_as_it_is(said, found):
  assert prequantized(tiny_config(quantization_config=said)) == found


def test_a_models_folder_is_added(runs, folder):
  config = tiny_config()
  shapes = tensor_shapes(config)
  count = sum(a * (b[0] if b else 1) for a, *b in shapes.values())
  row = report_of(runs["faults"])["fit"][-3]
  assert row["model"] == str(folder) and row["weights_gib"] * GIB == 4 * count and row["fits"]
  assert rows_of(runs["text"].stdout, "model")[-1]["line"].startswith(str(folder)[:36])


def test_a_driver_that_crashes_ends_or_hangs_is_told_and_the_rest_is_there(runs):
  done, rows = runs["faults"], backends_of(report_of(runs["faults"]))
  assert done.returncode == 0 and rows["CPU"]["opens"]
  for name, words in (("CUDA", "Segmentation fault"), ("QCOM", "exit code 7"), ("NV", "no answer within 15 s")):
    assert not rows[name]["opens"] and words in rows[name]["reason"], rows[name]


def test_a_folder_that_is_not_there_is_one_line_and_exit_1():
  done = doctor("--model", "/nowhere/to/be/found")
  assert done.returncode == 1 and not done.stdout
  assert done.stderr.startswith("tinyvllm: ") and "/nowhere/to/be/found" in done.stderr and done.stderr.count("\n") == 1


@pytest.fixture
def refused(monkeypatch, capsys):
  """The one line of a run in this process that must end before a backend is tried."""
  monkeypatch.setattr("tinyvllm_extra.cli.doctor.run_probe", lambda *_: pytest.fail("a backend was tried"))
  def run(*options):
    assert main(["doctor", *map(str, options)]) == 1
    said = capsys.readouterr()
    assert not said.out and said.err.startswith("tinyvllm: ") and said.err.count("\n") == 1
    return said.err
  return run


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "61"])
def test_seconds_that_will_not_do_are_refused(refused, seconds): assert "at most 60" in refused("--seconds", seconds)


@pytest.mark.parametrize("content, words", [
  ("{", "Expecting"), ("[]", ""), ("{}", "vocab_size"), (json.dumps(tiny_config(hidden_act="gelu")), "gelu"),
  (json.dumps(tiny_config(num_attention_heads=0)), "")], ids=["cut", "a list", "empty", "unknown", "no heads"])
def test_a_config_that_will_not_do_is_refused_before_anything_is_opened(refused, tmp_path, content, words):
  (tmp_path / "config.json").write_text(content)
  assert words in refused("--model", tmp_path)


def test_help_lists_it(capsys):
  with pytest.raises(SystemExit) as e: main(["--help"])
  assert e.value.code == 0 and re.search(r"\n    doctor +\S", capsys.readouterr().out)
