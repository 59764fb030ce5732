"""The command line as processes: Ctrl-C, missing devices, downloads, doctor and limits of memory."""
import json
import math
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
from benchmarks.common import SHAPES
from helpers.commands import FLAGS, PYTHONPATH, error_line, process, run_python, start_process
from helpers.hub import Hub
from helpers.models import sentencepiece_model, tensor_shapes
from helpers.servers import wait_until

from tinyvllm_extra.kernels.drivers import RESERVE

GIB = 2**30


@pytest.mark.parametrize("env,remedy", [({"DEV": "CPU", "CC": "/nonexistent/clang"}, "for the CPU: unset CC, or "),
                                        ({"DEV": "NOSUCH"}, "unset DEV=NOSUCH, or set DEV to one that opens here: ")])
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
