"""Processes that start an engine: a server that loads, gets ready, and stops at signals; the folder of kernels, the log
and Ctrl-C; a server's prefix cache file."""
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx2 as httpx
import openai
import pytest
from helpers.commands import flags, process, run_python, start_process
from helpers.engines import ENGINE
from helpers.models import tiny_model
from helpers.protocol import ENDLESS, SMALL
from helpers.servers import Server, error_of, events, wait_until

@pytest.fixture
def pipe(chat_folder, tmp_path):
  """The tokenizer_config.json of a model's folder, as a named pipe: loading blocks until a test writes into it."""
  for file in chat_folder.iterdir(): (tmp_path / file.name).symlink_to(file)
  (tmp_path / "tokenizer_config.json").unlink()
  os.mkfifo(tmp_path / "tokenizer_config.json")
  return tmp_path / "tokenizer_config.json"


def open_writer(pipe):
  """Return the pipe opened for writing, or None while no process reads it."""
  try: return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w")
  except OSError: return None


def test_requests_are_503_until_the_model_is_loaded(pipe, chat_folder):
  with Server(pipe.parent, *flags(**SMALL), ready=False) as server:
    file = wait_until(lambda: open_writer(pipe), "the server reads the model's folder")
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
      response = server.post(path, {"prompt": "a"})
      error_of(response, 503)
      assert int(response.headers["retry-after"]) >= 1
    error_of(server.get("/v1/models"), 503)
    assert server.get("/health").status_code == 503
    for path in ("/", "/version", "/metrics", "/openapi.json"): assert server.get(path).status_code == 200, path
    with pytest.raises(openai.InternalServerError) as e: server.client().models.list()
    assert e.value.status_code == 503 and e.value.type == "ServiceUnavailableError"
    pipe.unlink()
    pipe.symlink_to(chat_folder / pipe.name)
    with file: file.write(pipe.read_text())
    wait_until(server.healthy, "/health answers 200")
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    wait_until(lambda: "ready: " in server.log, "the log has the URLs")
    assert server.stop() == 0
    for text in ("POST /generate 503 in 0.", "capturing ", f"ready: chat page {server.url}/, API {server.url}/v1\n"):
      assert f" INFO    {text}" in server.log and "GPU" not in server.log, server.log
    for line in server.log.splitlines(): assert re.match(r"[\d-]{10} [\d:]{8} (INFO   |WARNING|ERROR  ) \w", line), line


def test_sigterm_during_model_loading_exits_at_once(pipe):
  with Server(pipe.parent, *flags(**SMALL), "--shutdown-timeout", "1", ready=False) as server:
    with wait_until(lambda: open_writer(pipe), "the model loads"):
      assert server.stop(15) == 0, "exits without waiting for the model"
    assert "Traceback" not in server.log, server.log


def is_rejected(http):
  """True if the server rejects a new request with a 503 or closes the connection."""
  try: response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
  except httpx.TransportError: return True
  if response.status_code == 200: return False
  error_of(response, 503)
  return True


@pytest.mark.slow
@pytest.mark.parametrize("number,options,size,reason", [
  (signal.SIGTERM, {}, 1000, "length"), (signal.SIGINT, {"shutdown_timeout": 0.5}, 30000, "abort")],
  ids=["end", "timeout"])
def test_running_requests_finish_or_are_aborted_after_shutdown_timeout(chat_folder, number, options, size, reason):
  body = {**ENDLESS, "max_tokens": size}
  with (Server(chat_folder, *flags(dtype="float32", max_num_seqs=4, max_num_batched_tokens=4, **options)) as server,
        server.http() as old, ThreadPoolExecutor(1) as pool):
    assert old.get("/health").status_code == 200   # a keep-alive connection
    with server.stream("/v1/completions", body) as response:
      lines = response.iter_lines()
      first = [next(lines), next(lines)]
      whole = pool.submit(server.post, "/v1/completions", body)
      wait_until(lambda: server.metrics()["num_requests_running"] == 2, "both run")
      server.signal(number)
      if reason == "length":
        wait_until(lambda: is_rejected(old), "requests are rejected")
        assert is_rejected(old) and server.process.poll() is None and not whole.done(), "the process still runs"
      *chunks, last = events([*first, *lines])
    answer = whole.result().json()
    assert last == "[DONE]" and [e["choices"][0]["finish_reason"] for e in chunks[-2:]] == [None, reason]
    assert whole.result().status_code == 200 and answer["choices"][0]["finish_reason"] == reason
    if reason == "length":
      assert answer["usage"]["completion_tokens"] == size
      assert "".join(e["choices"][0]["text"] for e in chunks) == answer["choices"][0]["text"]
    assert server.wait(20) == 0 and "Traceback" not in server.log, server.log


# Starts: the folder of kernels, the log, Ctrl-C during captures, a server that gets ready

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
from tinyvllm_extra.kernels import fast_backend, kernel_cache
from tinyvllm_extra.serving import async_engine
llm = LLM()
codegen.do_to_program.path = pathlib.Path(sys.argv[1])
started = threading.Event()
def slow(function): return lambda *arguments: (started.set(), time.sleep(0.5), function(*arguments))[2]
if sys.argv[2] == "do_to_program":
  kernel_cache.do_to_program = Context(ALLOW_DEVICE_USAGE=0)(slow(kernel_cache.do_to_program))
else: fast_backend.call_layer.fxn = slow(fast_backend.call_layer.fxn)
async_engine.CaptureThread(llm.capture())
started.wait()
""", tmp_path, function)
  assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr


# A server's prefix cache file: saved on SIGUSR1 and at shutdown, loaded at startup, unharmed by signals

SERVE = flags(**SMALL)


def ask(server, question):
  """Return the answer and the number of cached prompt tokens."""
  messages = [{"role": "system", "content": "the cat sat on the mat and the dog ran to the red house " * 2},
              {"role": "user", "content": question}]
  body = {"messages": messages, "temperature": 0.0, "max_tokens": 8}
  answer = server.post("/v1/chat/completions", body).raise_for_status().json()
  return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def warnings_of(server):
  return [line for line in server.log.splitlines() if "prefix cache '" in line and "does not exist" not in line]


def test_server_keeps_prefix_cache_across_restarts(chat_folder, tmp_path):
  """Saved on SIGUSR1 and SIGTERM, loaded at startup, and left alone by SIGKILL."""
  path = tmp_path / "cache"
  with Server(chat_folder, *SERVE, "--prefix-cache-file", path) as server:
    assert server.log.count("prefix cache") == 1 and "does not exist; starting without it" in server.log
    first = ask(server, "hello")
    server.signal(signal.SIGUSR1)
    wait_until(path.exists, "SIGUSR1 saves the file")
    again = ask(server, "hello")
    assert first == (again[0], 0) and again[1] > 40
    path.unlink()
    assert server.stop() == 0, server.log
    assert os.listdir(tmp_path) == ["cache"] and "Traceback" not in server.log
  raw = path.read_bytes()
  with Server(chat_folder, *SERVE, "--prefix-cache-file", path) as server:
    assert ask(server, "hello") == again
    assert ask(server, "the dog")[1] > 20, "the system prompt is cached"
    assert not warnings_of(server)
    server.signal(signal.SIGKILL)
    server.wait()
  assert path.read_bytes() == raw


@pytest.mark.slow
def test_signals_during_save_do_not_damage_file(chat_folder, tmp_path):
  path, slow = tmp_path / "cache", tmp_path / "slow"
  fault = f"""
import os, pathlib, time, tinyvllm_extra.cache.prefix_cache
replace, slow = os.replace, pathlib.Path({str(slow)!r})
os.replace = lambda *paths: (slow.touch(), time.sleep(2), replace(*paths))
"""
  with Server(chat_folder, *SERVE, "--prefix-cache-file", path, before=fault) as server:
    ask(server, "hello")
    server.signal()
    wait_until(slow.exists, "the save starts")
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT): server.signal(number)
    code = server.wait()
    assert path.exists() and sorted(os.listdir(tmp_path)) == ["cache", "slow"] and "Traceback" not in server.log
    assert code in (0, 130), server.log
  with Server(chat_folder, *SERVE, "--prefix-cache-file", path) as server:
    assert ask(server, "hello")[1] > 40 and not warnings_of(server)
