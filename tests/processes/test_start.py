"""Processes that start an engine: the folder of kernels, the log, Ctrl-C during captures, a server that gets ready."""
import os
import re
import signal

import pytest
from helpers.commands import flags, process, run_python, start_process
from helpers.engines import ENGINE
from helpers.models import tiny_model
from helpers.servers import Server, wait_until


def hello(folder, **env):
  """Run the bundled model with its caches in `folder`. Return stderr, and the time stamps of the kernels' files."""
  run = process("generate", "Hello", CACHEDB=str(folder / "cache.db"), DEV="CPU", **env)
  assert (run.returncode, run.stdout) == (0, "Hello, world!\n"), run.stderr
  return run.stderr, {path.name: path.stat().st_mtime_ns for path in (folder / "tinyvllm").glob("*")}


def test_second_process_compiles_no_kernel(tmp_path):
  (_, before), (_, after) = hello(tmp_path), hello(tmp_path)
  assert before and all(len(name) == 64 for name in before)
  assert after == before, "a kernel was compiled"


@pytest.mark.slow
def test_start_without_folder_of_kernels_logs_one_line(tmp_path):
  """A file instead of the folder stops even root. CACHELEVEL=0 turns the folder off."""
  hello(tmp_path, CACHELEVEL="0")
  assert not any(tmp_path.iterdir())
  (tmp_path / "tinyvllm").touch()
  line, = [line for line in hello(tmp_path)[0].splitlines() if "each start compiles all kernels" in line]
  assert str(tmp_path / "tinyvllm") in line


def test_any_public_name_can_be_imported_first():
  """Each name in a new process, since modules are imported when a name is first used."""
  for module, name in (("", "StructuredOutputsParams"), ("", "AsyncLLM"), ("_extra.sampling.params", "Processor"),
                       ("_extra.sampling.speculation", "Drafter")):
    run = run_python(f"from tinyvllm{module} import {name}")
    assert run.returncode == 0, run.stderr


def test_script_without_logging_setup_gets_log_on_stderr():
  code = "import logging, tinyvllm\nprint(tinyvllm.generate('Hello'))"
  handler = "logging.getLogger('tinyvllm').addHandler(logging.NullHandler())"
  loud, quiet = run_python(code), run_python(code.replace("\n", f"\n{handler}\n"))
  assert loud.stdout == quiet.stdout == ", world!\n"
  assert loud.stderr.startswith("loaded default_model") and quiet.stderr == ""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's /proc")
def test_shutdown_gives_memory_back(tmp_path):
  """The first two engines allocate what the process keeps, such as the compiler and caches of tinygrad."""
  path = tiny_model(tmp_path, hidden_size=512, intermediate_size=8192, num_hidden_layers=1)
  code = """
import pathlib, sys, tinyvllm
for i in range(3):
  with tinyvllm.LLM(sys.argv[1], max_num_seqs=1) as llm:
    llm.generate("a", tinyvllm.SamplingParams(max_tokens=2))
    print(pathlib.Path("/proc/self/statm").read_text().split()[1])
  print(pathlib.Path("/proc/self/statm").read_text().split()[1])"""
  *_, before, loaded, after = [int(x) * os.sysconf("SC_PAGE_SIZE") for x in run_python(code, path).stdout.split()]
  size = (path / "model.safetensors").stat().st_size
  assert loaded - before >= 0.8 * size and loaded - after >= 0.8 * size and after - before < 0.1 * size


def test_ctrl_c_during_captures_ends_without_traceback(tmp_path):
  """Without cached kernels, capturing all graphs takes a while."""
  sizes = [2**i for i in range(10)]
  run = start_process("generate", "Hello", "--cudagraph-capture-sizes", *sizes, CACHEDB=str(tmp_path / "cache.db"),
                      DEV="CPU")
  next(line for line in run.stderr if line.startswith("KV cache"))
  run.send_signal(signal.SIGINT)
  out, err = run.communicate(timeout=60)
  assert (run.returncode, out.strip()) == (-signal.SIGINT, "") and "Traceback" not in err, err


def test_ctrl_c_during_server_captures_exits_130_without_traceback(words_folder, tmp_path):
  with Server(words_folder, ready=False, environment={"CACHEDB": str(tmp_path / "cache.db")}) as server:
    wait_until(lambda: "preparing" in server.get("/health").text, "captures have started")
    server.signal(signal.SIGINT)
    assert server.wait() == 130 and "Traceback" not in server.log, server.log


def test_server_is_ready_when_the_first_step_is_captured(words_folder):
  options = flags(**{**ENGINE, "max_num_seqs": 2, "max_num_batched_tokens": 2})
  with Server(words_folder, *options, ready=False) as server:
    wait_until(lambda: re.search(r"preparing \d of 4", server.get("/health").text), "captures are reported")
    wait_until(server.healthy, "the server is ready")
    for fields in ({"temperature": 0}, {"top_p": 0.9}, {"logprobs": 2}):
      assert server.post("/v1/completions", {"prompt": "the cat", "max_tokens": 20, **fields}).status_code == 200
    wait_until(lambda: "captured 4 steps in " in server.log, "the other steps are captured")
    assert server.stop() == 0
    log = server.log
    assert log.index("ready: ") < log.index("captured 4 steps") and "Traceback" not in log, log


def test_program_with_an_unfinished_request_exits():
  run = run_python("""
import asyncio
from tinyvllm import SamplingParams
from tinyvllm_extra.serving.async_engine import AsyncLLM
async def main():
  async for output in AsyncLLM().generate("Hello", SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)):
    return print("Hello" + output.outputs[0].text)
asyncio.run(main())
""")
  assert run.returncode == 0 and run.stdout.startswith("Hello") and "Traceback" not in run.stderr, run.stderr


@pytest.mark.parametrize("function", ["do_to_program", "call_layer.fxn"])
def test_program_exits_while_a_thread_captures(tmp_path, function):
  """During a capture tinygrad lowers kernels, or traces layers."""
  run = run_python("""
import pathlib, sys, threading, time
from tinygrad import Context, codegen
from tinyvllm import LLM
from tinyvllm_extra.kernels import kernel_cache, layer_calls
from tinyvllm_extra.serving import async_engine
llm = LLM()
codegen.do_to_program.path = pathlib.Path(sys.argv[1])
started = threading.Event()
def slow(function):
  def call(*arguments):
    started.set()
    time.sleep(0.5)
    return function(*arguments)
  return call
if sys.argv[2] == "do_to_program":
  lower = kernel_cache.do_to_program
  kernel_cache.do_to_program = Context(ALLOW_DEVICE_USAGE=0)(slow(lower))
else: layer_calls.call_layer.fxn = slow(layer_calls.call_layer.fxn)
async_engine.CaptureThread(llm.capture())
started.wait()
""", tmp_path, function)
  assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr
