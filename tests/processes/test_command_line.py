"""The command line as processes: output, Ctrl-C, missing devices, downloads, doctor and limits of memory."""
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from benchmarks.common import SHAPES
from helpers.commands import CHAT, FLAGS, PYTHONPATH, error_line, process, start_process
from helpers.hub import Hub
from helpers.models import sentencepiece_model, tensor_shapes, tiny_model
from helpers.servers import wait_until

from tinyvllm_extra.kernels import RESERVE

GIB, MIB = 2**30, 2**20


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
  folder = tiny_model(tmp_path_factory.mktemp("chat"), words=True, max_position_embeddings=20000)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
  return folder


@pytest.mark.parametrize("env", [{"DEV": "CPU", "CC": "/nonexistent/clang"}, {"DEV": "NOSUCH"}], ids=str)
def test_missing_device_or_compiler_error_names_the_remedy(words_folder, env, tmp_path):
  run = process("generate", "hello", "--model", words_folder, *FLAGS, **env, CACHEDB=str(tmp_path / "cache.db"))
  assert "pip install 'tinyvllm[cpu]'" in error_line(run) and run.stdout.strip() in ("", "hello")


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
    assert run.returncode == 130
  finally: run.kill()


# Downloads

def test_run_name_downloads_with_progress_and_chats(chat_folder, tmp_path):
  shutil.copytree(chat_folder, tmp_path / "hub/org/tiny")
  with Hub(tmp_path / "hub") as hub:
    environment = hub.environment(tmp_path / "home", TQDM_POSITION="-1")   # progress bars without a terminal
    def chat(**env): return process("run", "org/tiny", *FLAGS, "--max-tokens", 5, stdin="hello\n", **environment, **env)
    run = chat()
    assert run.returncode == 0 and run.stdout.strip(), run.stderr
    assert f"files to {tmp_path}/home/hub; " in run.stderr and "model.safetensors: 100%" in run.stderr
    num_requests = len(hub.requests)
    again = chat(HF_HUB_OFFLINE="1")
    assert again.stdout == run.stdout and "downloading" not in again.stderr and len(hub.requests) == num_requests


def test_stopped_process_resumes_its_download(tmp_path):
  file = tmp_path / "hub/org/tiny/tiny-F16.gguf"
  file.parent.mkdir(parents=True)
  with file.open("wb") as weights: weights.truncate(25 * MIB)   # not a model, but downloaded before it is read
  with Hub(tmp_path / "hub") as hub:
    command = ["generate", "the cat", "--model", "org/tiny"]
    environment = hub.environment(tmp_path / "home")
    hub.limit[file.name] = 11 * MIB   # huggingface_hub writes blocks of 10 MiB
    hub.hold.clear()
    stopped = start_process(*command, **environment)
    blobs = tmp_path / "home/hub/models--org--tiny/blobs"
    try: wait_until(lambda: [x.stat().st_size for x in blobs.glob("*.part")] == [10 * MIB], "the start has arrived")
    finally: stopped.kill()
    stopped.communicate()
    hub.hold.set()
    assert "tiny-F16.gguf is not a readable GGUF file" in error_line(process(*command, **environment))
    assert hub.ranges(file.name) == [None, f"bytes={10 * MIB}-"]
    path, = blobs.iterdir()
    assert path.stat().st_size == 25 * MIB


# doctor: a sitecustomize module, which Python imports at startup, simulates drivers that crash

FAULTS = '''
import os, sys
fault = {"CUDA": "crash", "QCOM": "exit"}.get(os.environ.get("DEV"))
if fault and "probe" in " ".join(sys.orig_argv):
  import ctypes
  print('noise {"doctor"', flush=True)
  if fault == "crash": ctypes.string_at(0)
  os._exit(7)
'''


def doctor(*options, python=sys.executable, order=("CPU",), **env):
  """Run `tinyvllm doctor`. order: backends to try; each one starts a Python process. env: None removes a variable."""
  code = f"import sys\nfrom tinyvllm_extra.cli import doctor, main\ndoctor.ORDER = {[*order]}\nsys.exit(main())"
  path = os.pathsep.join([PYTHONPATH, env.pop("PYTHONPATH", "")])
  environment = {k: v for k, v in {**os.environ, "PYTHONPATH": path, "DEV": None, **env}.items() if v is not None}
  command = [str(python), "-c", code, "doctor", "--seconds", "0.05", *map(str, options)]
  run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
  assert "Traceback" not in run.stdout + run.stderr, run.stdout + run.stderr
  return run


def test_doctor_measures_the_cpu_and_reports_crashed_drivers(folder, tmp_path):
  (tmp_path / "sitecustomize.py").write_text(FAULTS)
  run = doctor("--json", "--model", folder, PYTHONPATH=str(tmp_path), DEV="CPU", order=["CUDA", "QCOM", "METAL", "CPU"])
  report = json.loads(run.stdout)
  rows = {row["backend"]: row for row in report["backends"]}
  assert run.returncode == 0 and report["chosen"] == "CPU" and rows["CPU"]["opens"]
  assert rows["CPU"]["dtype"] == "float32" and 0.1 < rows["CPU"]["gb_per_s"] < 10_000
  reasons = {"CUDA": "Segmentation fault", "QCOM": "exit code 7", **({} if sys.platform == "darwin" else {"METAL": ""})}
  for name, text in reasons.items():
    assert not rows[name]["opens"] and text in rows[name]["reason"] != "" and "\n" not in rows[name]["reason"]


def test_doctor_without_compiler_names_the_package_to_install(tmp_path):
  (tmp_path / "python").symlink_to(os.path.realpath(sys.executable))   # no clang next to it or on the PATH
  run = doctor(python=tmp_path / "python", PATH=str(tmp_path), CC=None, XDG_CACHE_HOME=str(tmp_path),
               PYTHONPATH=sysconfig.get_paths()["purelib"])
  line, = [line for line in run.stdout.splitlines() if line.startswith("C compiler: ")]
  assert "none" in line and "pip install 'tinyvllm[cpu]'" in line and run.returncode == 1
  assert re.search(r"^CPU +does not open: \S", run.stdout, re.M)


# Limits of memory

@pytest.fixture
def run_within(tmp_path):
  """Return a function that runs a model of zeros, which takes no space on the disk, in a process that may use `gib` of
  memory on a CPU. shape: of the model."""
  def run(gib, shape, *options):
    tensors, end = {}, 0
    for name, tensor in tensor_shapes(SHAPES[shape]).items():
      start, end = end, end + 2 * math.prod(tensor)
      tensors[name] = {"dtype": "F16", "shape": tensor, "data_offsets": [start, end]}
    header = json.dumps(tensors).encode()
    (tmp_path / "config.json").write_text(json.dumps({**SHAPES[shape], "torch_dtype": "float16"}))
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model())
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(tmp_path / "model.safetensors", 8 + len(header) + end)
    code = (f"import resource, sys\nresource.setrlimit(resource.RLIMIT_DATA, 2 * ({gib * GIB},))\n"
            "from tinyvllm_extra.cli import main\nsys.exit(main())")
    command = [sys.executable, "-c", code, "generate", "Hello", "--model", tmp_path, "--max-tokens", "1", *options]
    environment = {**os.environ, "DEV": "CPU", "PYTHONPATH": PYTHONPATH}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
  if not Path("/proc/self/status").exists(): pytest.skip("limits memory as Linux does")
  return run


def test_8b_is_refused_with_quantization_that_would_fit(run_within):
  run = run_within(8, "llama-3.1-8b")
  assert "needs 14.96 GiB" in error_line(run) and not run.stdout and run.stderr.count("\n") == 1
  assert "(--quantization int4), which takes 6.02 GiB" in run.stderr


@pytest.mark.slow
def test_1b_in_int4_starts_and_says_what_fits(run_within):
  run = run_within(4, "llama-3.2-1b", "--quantization", "int4")
  assert run.returncode == 0 and run.stdout.startswith("Hello"), run.stderr
  num_tokens, size = re.search(r"= (\d+) tokens, ([\d.]+) GiB", run.stderr).groups()
  most = (4 - RESERVE / GIB) * 0.9 - 1.05   # the weights take 1.05 GiB
  assert most - 0.4 < float(size) < most
  assert int(num_tokens) == pytest.approx(float(size) * GIB / (16 * 2 * 8 * 64 * 4), rel=0.01)
