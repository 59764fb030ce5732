"""The command line as processes: Ctrl-C, missing devices, downloads, doctor and limits of memory; examples and the
commands of the documentation."""
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.common import SHAPES
from helpers.commands import FLAGS, PYTHONPATH, ROOT, error_line, process, run_process, run_python, start_process
from helpers.data import read_data
from helpers.hub import Hub
from helpers.models import sentencepiece_model, tensor_shapes
from helpers.parameters import mark_slow_except
from helpers.servers import Server, wait_until

from tinyvllm_extra.kernels.drivers import RESERVE

GIB, CASES = 2**30, read_data("command_lines.json")


@pytest.mark.parametrize("env,remedy", CASES["missing devices"])
def test_missing_device_or_compiler_error_names_the_remedy(words_folder, env, remedy, tmp_path):
  run = process("generate", "hello", "--model", words_folder, *FLAGS, **env, CACHEDB=str(tmp_path / "cache.db"))
  assert f"): {remedy}" in error_line(run) and run.stdout.strip() in ("", "hello")


def test_ctrl_c_stops_the_answer_then_ends_the_chat(chat_folder):
  options = ["--max-tokens", 19000, "--ignore-eos", *FLAGS[:2], "--max-num-batched-tokens", 8, "--max-num-seqs", 1]
  run = start_process("chat", "--model", chat_folder, *options)
  try:
    for _ in range(2):
      print("hello", file=run.stdin, flush=True)
      assert run.stdout.read(40), "the answer must start"
      run.send_signal(signal.SIGINT)
      while run.stdout.read(1) != "\n": pass   # the line ends thousands of tokens early
    # At the prompt; the first signal may still stop the answer
    wait_until(lambda: run.poll() is not None or run.send_signal(signal.SIGINT), "the process ends", 60)
    assert run.returncode == -signal.SIGINT
  finally: run.kill()


# A sitecustomize module, which Python imports at startup, simulates drivers that crash
FAULTS = '''
import os, sys
fault = {"CUDA": "crash", "QCOM": "exit"}.get(os.environ.get("DEV"))
if fault and "probe" in " ".join(sys.orig_argv):
  import ctypes
  print('noise {"doctor"', flush=True)
  if fault == "crash": ctypes.string_at(0)
  os._exit(7)
'''


def test_doctor_measures_the_cpu_and_reports_crashed_drivers(folder, tmp_path):
  (tmp_path / "sitecustomize.py").write_text(FAULTS)
  code = ("import sys\nfrom tinyvllm_extra.cli import doctor, main\n"
          "doctor.ORDER = ['CUDA', 'QCOM', 'METAL', 'CPU']\nsys.exit(main())")   # each one starts a process
  run = run_python(code, "doctor", "--json", "--seconds", 0.05, "--model", folder,
                   PYTHONPATH=os.pathsep.join([PYTHONPATH, str(tmp_path)]))
  report = json.loads(run.stdout)
  rows = {row["backend"]: row for row in report["backends"]}
  assert (run.returncode, report["chosen"], rows["CPU"]["opens"]) == (0, "CPU", True) and "Traceback" not in run.stderr
  assert rows["CPU"]["dtype"] == "float32" and 0.1 < rows["CPU"]["gb_per_s"] < 10_000
  reasons = {"CUDA": "Segmentation fault", "QCOM": "exit code 7", **({} if sys.platform == "darwin" else {"METAL": ""})}
  for name, text in reasons.items():
    assert not rows[name]["opens"] and text in rows[name]["reason"] != "" and "\n" not in rows[name]["reason"]


def run_within(folder, gib, shape, *options):
  """Run a model of zeros, which takes no space on the disk, in a process that may use `gib` of memory on a CPU. shape:
  of the model."""
  if not Path("/proc/self/status").exists(): pytest.skip("limits memory as Linux does")
  tensors, end = {}, 0
  for name, sizes in tensor_shapes(SHAPES[shape]).items():
    tensors[name] = {"dtype": "F16", "shape": sizes, "data_offsets": [end, end := end + 2 * math.prod(sizes)]}
  header = json.dumps(tensors).encode()
  (folder / "config.json").write_text(json.dumps({**SHAPES[shape], "torch_dtype": "float16"}))
  (folder / "tokenizer.model").write_bytes(sentencepiece_model())
  (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
  os.truncate(folder / "model.safetensors", 8 + len(header) + end)
  code = (f"import resource, sys\nresource.setrlimit(resource.RLIMIT_DATA, 2 * ({gib * GIB},))\n"
          "from tinyvllm_extra.cli import main\nsys.exit(main())")
  return run_python(code, "generate", "Hello", "--model", folder, "--max-tokens", 1, *options)


def test_8b_is_refused_with_quantization_that_would_fit(tmp_path):
  run = run_within(tmp_path, 8, "llama-3.1-8b")
  assert "needs 14.96 GiB" in error_line(run) and not run.stdout and run.stderr.count("\n") == 1
  assert "(--quantization int4), which takes 6.02 GiB" in run.stderr


@pytest.mark.slow
def test_1b_in_int4_starts_and_says_what_fits(tmp_path):
  run = run_within(tmp_path, 4, "llama-3.2-1b", "--quantization", "int4")
  assert run.returncode == 0 and run.stdout.startswith("Hello"), run.stderr
  num_tokens, size = re.search(r"= (\d+) tokens: .*, ([\d.]+) GiB", run.stderr).groups()
  most = (4 - RESERVE / GIB) * 0.9 - 1.05   # the weights take 1.05 GiB
  assert most - 0.4 < float(size) < most
  assert int(num_tokens) == pytest.approx(float(size) * GIB / (16 * 2 * 8 * 64 * 4), rel=0.01)


# Scripts in examples/, the README's commands, a benchmark, and the command of the systemd unit

EXERCISES = (ROOT / "examples/docs/exercises.md").read_text().split("\n## ")[1:]
DEPLOY, KEY = ROOT / "examples/deploy", "sk-examples"
SMALL = "--max-num-seqs", 2, "--max-num-batched-tokens", 2   # two graph shapes


@pytest.fixture(scope="module")
def server():
  """A server with the bundled model and an API key."""
  with Server(None, *SMALL, "--api-key", KEY) as server: yield server


def run(*command, key=KEY, code=0):
  """Run a command, and return its stdout. Raises AssertionError if the exit code differs from `code`."""
  process = run_process(*command, OPENAI_API_KEY=key)
  assert process.returncode == code, f"{process.stdout}\n{process.stderr}"
  return process.stdout


EXAMPLES, DRAWN = CASES["examples"], ("terminal", "pool_over_time")


@pytest.mark.parametrize("script", mark_slow_except(EXAMPLES.keys() - DRAWN, EXAMPLES))
def test_example_prints_its_texts(script, tmp_path):
  pictures = [tmp_path / "picture.svg"] if script in DRAWN else []
  arguments = [*pictures, ROOT / "tinyvllm/default_model"] if pictures else []
  assert re.fullmatch(EXAMPLES[script], run(sys.executable, f"examples/{script}.py", *arguments), re.DOTALL)
  assert all(file.read_text().endswith("</svg>\n") for file in pictures)


def test_tour_scripts_print_their_outputs():
  page = (ROOT / "examples/docs/tour.md").read_text()
  scripts = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
  assert len(scripts) == page.count("```python") == 7
  for code, output in scripts: assert run(sys.executable, "-c", code) == output, code


def title(exercise): return exercise.splitlines()[0]


@pytest.mark.parametrize("exercise", EXERCISES[3:], ids=title)
def test_checks_of_exercises_pass_only_with_their_solutions(exercise):
  check, solution = re.findall(r"```python\n(.*?)```", exercise, re.DOTALL)
  with pytest.raises(NameError): exec(check, {"__name__": "exercise"})
  exec(solution + check, {"__name__": "exercise"})


@pytest.mark.parametrize("exercise", EXERCISES[:3], ids=title)
def test_removed_lines_of_exercises_fail_the_named_tests(exercise, tmp_path):
  (line,), (name,) = re.findall(r"```text\n(.*\n)```", exercise), re.findall(r"`(tests/\S+::\w+)`", exercise)
  for folder in ("tinyvllm", "examples", "tests"): shutil.copytree(ROOT / folder, tmp_path / folder)
  shutil.copy(ROOT / "pyproject.toml", tmp_path)
  file = tmp_path / "tinyvllm/scheduler.py"
  assert file.read_text().count(line) == 1
  file.write_text(file.read_text().replace(line, ""))
  command = sys.executable, "-m", "pytest", "-q", "-x", "-n0", name
  process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240,
                           env={**os.environ, "PYTHONPATH": f"{tmp_path}:{tmp_path / 'examples'}"})
  assert process.returncode == 1 and f"FAILED {name}" in process.stdout, process.stdout


def test_openai_client_with_bundled_model_prints_all_answers(server):
  out = run(sys.executable, "examples/openai_client.py", server.url)
  assert out.startswith(f"{server.url} serves tinyvllm\n")
  assert "'The cat" in out and [int(i) for i in re.findall(r"Choice (\d)", out)] == [0, 1, 2, 3]
  assert re.search(r"\n  The cat.+\n  \d+ tokens\b[^\n]*\b\d+ [^\n]*\n", out, re.DOTALL), "the stream and its usage"
  assert "Hello! How can I help you?" in out and "base model" not in out
  pet = json.loads(re.search(r"\n  '(\{.*\"animal\".*\})'", out)[1])
  assert pet["animal"] in ("cat", "dog", "bird") and 0 <= pet["age"] <= 20
  assert re.search(r"\n  '(Tom|Kim|Sam), a (cat|dog|bird), is \d+'", out)
  tokens = re.findall(r"^  ('.*') (-\d+\.\d\d|-?0\.00) (\{.*\})$", out, re.MULTILINE)
  assert len(tokens) == 6, "log probabilities of three tokens of the chat and three of the completion"


def test_curl_script_requests_every_route(server):
  out = run("bash", DEPLOY / "curl.sh", server.url)
  answers = dict(part.strip().split("\n", 1) for part in out.split("\n\n# ")[1:])
  assert len(answers) == (DEPLOY / "curl.sh").read_text().count("\ntitle ")
  parsed = [json.loads(answer) for answer in answers.values() if answer.startswith("{")]
  errors = [answer["error"]["message"] for answer in parsed if answer.get("error")]   # embeddings, scores
  assert len(parsed) == 19 and [x.partition(" ")[0] for x in errors] == ["runner:", "model:", "model:"]
  assert out.count("data: [DONE]") == 2 and "tinyvllm:num_requests_running{" in out
  structured, = (json.loads(answer) for title, answer in answers.items() if title.startswith("JSON"))
  assert json.loads(structured["choices"][0]["text"])["name"] in ("Tom", "Kim")
  assert out.count("\n200 text/html") == 1 and out.count("\n200 application/json") == 1


def test_unit_command_starts_server_hides_key_and_stops_at_sigterm(words_folder, tmp_path):
  unit = (DEPLOY / "tinyvllm.service").read_text().replace("\\\n", " ")
  command = re.search(r"^ExecStart=/opt/tinyvllm/bin/python -c (.*)", unit, re.MULTILINE)[1].replace("8000", "0")
  code, *arguments = shlex.split(command)
  assert arguments[:2] == ["serve", "/srv/models/mine"]
  (tmp_path / "api-key").write_text(KEY + "\n")
  environment = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
  with Server(words_folder, *arguments[2:], *SMALL, before=code, environment=environment) as server:
    assert server.get("/v1/models").status_code == 401
    assert KEY not in run("ps", "-ww", "-o", "args=", "-p", server.process.pid)
    out = run(sys.executable, "examples/openai_client.py", server.url)
    assert "No chat: this is a base model" in out, "the model has no chat template"
    assert server.stop() == 0, server.log


# Benchmarks

def test_throughput_benchmark_runs_with_random_weights():
  out = run(sys.executable, "tests/benchmarks/throughput.py", "--running", 2, "--input-len", 8, "--output-len", 4)
  assert re.search(r"^2 +4 +[\d.]+ ", out, re.MULTILINE)   # 2 running, 4 prompts


def test_scripts_with_a_wrong_key_end_with_the_failure(server):
  run(sys.executable, "examples/openai_client.py", server.url, key="sk-wrong", code=1)
  assert '"code":401' in run("bash", DEPLOY / "curl.sh", server.url, key="sk-wrong", code=22).replace(" ", "")


# The README's commands and its Python example run unchanged, with a tiny model in place of the one they download. The
# commands that install tinyvllm and run tests are left to .ci/run

README = (ROOT / "README.md").read_text()
COMMANDS = [line for block in re.findall(r"^```sh\n(.*?)^```", README, re.M | re.S) for line in block.splitlines()]
PYTHON, = re.findall(r"^```python\n(.*?)^```", README, re.M | re.S)
MODEL, = {*re.findall(r"\bHuggingFaceTB/[\w.-]+", README)}
BY_CI = "python3 -m venv ", ".venv/bin/pip install "
OURS = [line.split() for line in COMMANDS if not line.startswith(BY_CI)]


@pytest.fixture
def environment(tmp_path, chat_folder):
  """Variables for a hub that has a tiny model under the name of the README's, and for progress without a terminal."""
  shutil.copytree(chat_folder, tmp_path / "root" / MODEL)
  with Hub(tmp_path / "root") as hub: yield hub.environment(tmp_path / "home", TQDM_POSITION="-1")


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_readme_command_answers(environment, words):
  program, command, model, *options = words
  assert (program, model) == (".venv/bin/tinyvllm", MODEL)
  if command == "serve":
    assert options == ["--port", "8000"] and "at http://127.0.0.1:8000/." in README
    with Server(MODEL, environment=environment) as server:   # at a free port
      assert "<html" in server.get("/").text and server.get("/v1/models").json()["data"][0]["id"] == MODEL
      return
  run = process(command, model, *options, stdin="hello\n", **environment)
  assert run.returncode == 0 and run.stdout.strip() and "Traceback" not in run.stderr, run.stderr
  assert f"files to {environment['HF_HOME']}/hub; " in run.stderr and "model.safetensors: 100%" in run.stderr


def test_readme_python_example_prints_answers(environment):
  run = run_process(sys.executable, "-c", PYTHON, **environment)
  assert run.returncode == 0, run.stderr
  lines = run.stdout.splitlines()
  assert lines[0] == "Hello, world!" and lines[1].startswith("The cat sat on the warm stone") and len(lines) >= 4
  assert "Once upon a time" in run.stdout and "The capital of France is" in run.stdout
