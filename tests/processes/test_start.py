"""Engine startup: kernel files, damaged ones included; few graph shapes, captured ahead; log lines."""
import asyncio
import os
import pickle
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers.engines import ENGINE
from helpers.models import tiny_model
from helpers.reference import reference_greedy
from helpers.requests import greedy
from helpers.servers import Server, wait_until
from tinygrad import Tensor, UOp, dtypes, helpers
from tinygrad.uop.ops import KernelInfo, Ops
from tinyvllm_extra.graphs import CAPTURE_THRESHOLD, usual_sizes
from tinyvllm_extra.server import AsyncLLM
from tinyvllm_extra.kernels import kernel_cache as kernels, layers as traced_layers, make_backend

import tinyvllm
from tinyvllm import LLM, SamplingParams, backend as device
from tinyvllm.config import EngineConfig, ModelConfig
from tinyvllm.backend import Devices
from tinyvllm.request import SamplerMode
from tinyvllm.runner import GraphKey, allocate_kv_caches

ROOT = Path(tinyvllm.__file__).parents[1]


def files(folder): return [path for path in folder.rglob("*") if path.is_file()]


# kernel files

CLANG = "clang", 1, 2   # a compiler: its name, file size and modification time


@pytest.fixture
def lowered(monkeypatch):
  """The names of the lowered kernels."""
  names = []

  def do_to_program(ast, renderer):
    names.append(ast.arg.name)
    return UOp(Ops.PROGRAM, src=(UOp(Ops.BINARY, arg=renderer.compiler.compile_cached(f"void f{len(names)}() {{}}")),))
  monkeypatch.setattr(kernels, "do_to_program", do_to_program)
  return names


def build_kernel(folder, name="a", compiler=CLANG):
  ast = UOp.sink(UOp.const(1), arg=KernelInfo(name=name))
  return kernels.KernelFolder(folder, compiler).begin(ast, device.renderer())()


def test_kernel_folder_lowers_each_kernel_once(lowered, tmp_path):
  assert build_kernel(tmp_path) is build_kernel(tmp_path) and lowered == ["a"]
  assert build_kernel(tmp_path, "b") is not build_kernel(tmp_path) and lowered == ["a", "b"]
  assert len(files(tmp_path)) == 2 and all(len(path.name) == 64 for path in files(tmp_path)), "a temporary file remains"


def test_kernel_folder_separates_versions_compilers_and_settings(lowered, monkeypatch, tmp_path):
  build_kernel(tmp_path)
  with monkeypatch.context() as patch:
    patch.setattr("importlib.metadata.version", lambda name: "0.15.0")
    build_kernel(tmp_path)
  with helpers.Context(NOOPT=1): build_kernel(tmp_path)
  build_kernel(tmp_path, compiler=("clang", 1, 3))
  assert len(lowered) == 4
  build_kernel(tmp_path)
  assert len(lowered) == 4


@pytest.mark.parametrize("damage", [
  lambda path: path.write_bytes(b""), lambda path: path.write_bytes(path.read_bytes()[:-1]),
  lambda path: path.write_bytes(b"x" * 500), lambda path: path.write_bytes(path.read_bytes()[:40] + b"\xff" * 8),
  lambda path: path.write_bytes(pickle.dumps("no program")), lambda path: path.unlink(),
], ids=["empty", "truncated", "garbage", "changed", "other object", "missing"])
def test_kernel_folder_damaged_file_is_replaced(lowered, tmp_path, damage):
  first = build_kernel(tmp_path)
  damage(files(tmp_path)[0])
  again = build_kernel(tmp_path)
  assert again is not first
  assert build_kernel(tmp_path) is again and lowered == ["a", "a"]


def test_kernel_folder_on_full_disk_writes_nothing(lowered, monkeypatch, tmp_path):
  def full(path, content): raise OSError(28, "No space left on device")
  with monkeypatch.context() as patch:
    patch.setattr(Path, "write_bytes", full)
    assert build_kernel(tmp_path) is not build_kernel(tmp_path)
  assert build_kernel(tmp_path) is build_kernel(tmp_path) and lowered == ["a", "a", "a"]


def start(folder, *options, **env):
  """Start a process of `tinyvllm generate Hello` with its caches in `folder`."""
  env = {**os.environ, "CACHEDB": str(folder / "cache.db"), "DEV": "CPU",
         "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")]), **env}
  return subprocess.Popen([sys.executable, "-m", "tinyvllm", "generate", "Hello", *options], env=env, text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def check_hello(run):
  """Check the exit code and output of a process, and return its stderr."""
  out, err = run.communicate(timeout=120)
  assert (run.returncode, out) == (0, "Hello, world!\n"), err
  return err


@pytest.mark.slow
def test_kernel_folder_creation_failure_logs_one_line(tmp_path):
  (tmp_path / "tinyvllm").write_text("a file instead of the folder, which stops even root")
  lines = [line for line in check_hello(start(tmp_path)).splitlines() if "each start compiles all kernels" in line]
  assert len(lines) == 1 and str(tmp_path / "tinyvllm") in lines[0]


@pytest.mark.slow
def test_cachelevel_0_writes_no_files(tmp_path):
  check_hello(start(tmp_path, CACHELEVEL="0"))
  assert files(tmp_path) == []


@pytest.mark.slow
def test_two_processes_share_a_kernel_folder(tmp_path):
  for run in [start(tmp_path) for _ in range(2)]: check_hello(run)
  kernel_files = files(tmp_path / "tinyvllm")
  assert kernel_files and all(len(path.name) == 64 for path in kernel_files)
  before = {path: path.stat().st_mtime_ns for path in kernel_files}
  check_hello(start(tmp_path))
  assert {path: path.stat().st_mtime_ns for path in files(tmp_path / "tinyvllm")} == before, "a kernel was compiled"


# graph shapes

@pytest.fixture(scope="module")
def fresh(words_folder):
  """A function that makes an engine without graphs, with at most 8 sequences and 32 tokens per step."""
  def make(**options):
    return LLM(words_folder, **{"max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4, **options})
  return make


def prompt_of(n, salt=0): return {"prompt_token_ids": [3 + (7 * i + 5 * salt) % 300 for i in range(n)]}


def test_choose_key_pads_to_captured_graph_until_requested_often(fresh, words_folder):
  llm = fresh()
  llm.generate(prompt_of(7), greedy(1), use_tqdm=False)
  assert [key.num_tokens for key in llm.runner.graphs] == [8]
  output = llm.generate(prompt_of(7), greedy(30), use_tqdm=False)[0]
  assert [key.num_tokens for key in llm.runner.graphs] == [8, 1], "a frequent shape gets its own graph"
  assert llm.backend.graph_state.num_requested[llm.runner, GraphKey(1, 1)] > CAPTURE_THRESHOLD
  assert output.outputs[0].token_ids == reference_greedy(words_folder, prompt_of(7)["prompt_token_ids"], 30)


def test_choose_key_captures_immediately_if_padding_doubles_time(fresh):
  llm = fresh()
  choose_key = llm.runner.choose_key
  greedy_key, filtered_key = GraphKey(32, 8), GraphKey(32, 8, SamplerMode.FILTERED)
  assert choose_key(GraphKey(3, 1)) == GraphKey(4, 4)
  llm.runner.graphs[greedy_key] = None
  assert choose_key(GraphKey(1, 1)) == GraphKey(1, 1), "a step of 32 tokens takes more than twice as long as one of 1"
  assert choose_key(GraphKey(20, 1)) == greedy_key
  random_key = GraphKey(20, 1, SamplerMode.RANDOM)
  assert choose_key(random_key).sampler_mode == SamplerMode.RANDOM, "a greedy graph cannot sample"
  llm.runner.graphs[filtered_key] = None
  assert choose_key(random_key) == filtered_key, "a sampling graph serves greedy requests, too"
  assert choose_key(GraphKey(20, 1)) == greedy_key
  assert choose_key(GraphKey(20, 20)).num_rows == 32, "prompt_logprobs need all logits of a prompt"


def test_capture_sizes_are_captured_only_at_start(fresh, words_folder):
  llm = fresh(cudagraph_capture_sizes=[32, 8])
  keys = set(llm.runner.graphs)
  assert keys == {GraphKey(size, 8, mode) for size in (8, 32) for mode in (SamplerMode.GREEDY, SamplerMode.FILTERED)}
  params = [greedy(6), SamplingParams(max_tokens=5, seed=1), SamplingParams(max_tokens=4, seed=2, top_p=0.9), greedy(1)]
  prompts = [prompt_of(n, n) for n in (1, 9, 30, 3)]
  outputs = llm.generate(prompts, params, use_tqdm=False)
  for prompt, param in zip(prompts, params, strict=True): llm.generate(prompt, param, use_tqdm=False)
  assert set(llm.runner.graphs) == keys
  plain = fresh().generate(prompts, params, use_tqdm=False)
  assert [x.outputs[0].token_ids for x in outputs] == [x.outputs[0].token_ids for x in plain]
  assert outputs[0].outputs[0].token_ids == reference_greedy(words_folder, prompts[0]["prompt_token_ids"], 6)


@pytest.mark.slow
def test_capture_optional_covers_all_optional_features(fresh):
  llm = fresh(cudagraph_capture_sizes=[8, 32])
  assert len(list(llm.capture([8, 32], optional=True))) == 4
  keys = set(llm.runner.graphs)
  for extra in ({"logprobs": 3}, {"logit_bias": {5: 2.0}}, {"allowed_token_ids": [5, 6, 7]}, {"frequency_penalty": 1.0},
               {"bad_words": ["the"], "logprobs": 0}):
    params = SamplingParams(temperature=0, max_tokens=4, **extra)
    actual = llm.generate(prompt_of(5), params, use_tqdm=False)[0].outputs[0]
    expected = fresh().generate(prompt_of(5), params, use_tqdm=False)[0].outputs[0]
    assert actual.token_ids == expected.token_ids and (actual.logprobs is None) == (extra.get("logprobs") is None)
  assert set(llm.runner.graphs) == keys


@pytest.mark.parametrize("sizes", [[3], [0], [-8], [8, 12]])
def test_capture_sizes_not_powers_of_two_raise(fresh, sizes):
  with pytest.raises(ValueError, match="cudagraph_capture_sizes"): fresh(cudagraph_capture_sizes=sizes)


def test_enforce_eager_captures_nothing(fresh):
  llm = fresh(enforce_eager=True, cudagraph_capture_sizes=[8])
  assert llm.runner.graphs == {} and list(llm.capture()) == []


def test_usual_sizes_end_with_the_largest_step(fresh):
  assert usual_sizes(fresh().runner) == [1, 2, 4, 8, 16, 32]
  assert usual_sizes(fresh(max_num_batched_tokens=20).runner)[-1] == 32


@pytest.mark.parametrize("length,gib", [(2048, 4), (2**18, 6)], ids=["4 GiB", "one sequence"])
def test_allocate_kv_caches_on_cpu_gives_same_size_each_start(length, gib, monkeypatch):
  """30 layers with 3 KV heads of 64 dimensions: 23 KiB per token in float16."""
  model_config = ModelConfig.from_hf(dict(
    vocab_size=32, hidden_size=576, intermediate_size=64, num_hidden_layers=30, num_attention_heads=9,
    rms_norm_eps=1e-5, num_key_value_heads=3, max_position_embeddings=2**18,
    architectures=["LlamaForCausalLM"]), Path())
  shapes = []
  monkeypatch.setattr("tinyvllm.runner.Tensor.empty", lambda *shape, **_: shapes.append(shape) or Tensor(0.0))
  config = EngineConfig(max_num_seqs=1024, max_model_len=length)
  model = SimpleNamespace(config=model_config, backend=make_backend(), dtype=dtypes.float16, devices=Devices())
  for gib_free in (20, 17.3): allocate_kv_caches(model, config, int(gib_free * 2**30))
  assert len({tuple(shapes[:60]), tuple(shapes[60:])}) == 1
  blocks, heads, dim, size = shapes[0]
  assert 0.9 * gib * 2**30 <= 60 * blocks * heads * dim * size * 2 <= 1.02 * gib * 2**30


# layers traced once

def test_run_layers_traces_equal_layers_once(fresh, words_folder, monkeypatch):
  num_traces = Counter()
  call_layer = traced_layers.call_layer
  trace = call_layer.fxn
  monkeypatch.setattr(call_layer, "fxn", lambda layer, *args: num_traces.update([layer]) or trace(layer, *args))
  for num_kinds in (1, 2):
    llm = fresh()
    layers = llm.runner.model.layers
    assert len(layers) == 2
    if num_kinds == 2:   # a layer with one more tensor
      linear = layers[1].o_proj
      linear.bias = Tensor.zeros(linear.out_features).contiguous().realize()
    num_traces.clear()
    ids = llm.generate(prompt_of(7), greedy(4), use_tqdm=False)[0].outputs[0].token_ids
    assert num_traces == dict.fromkeys(layers[:num_kinds], len(llm.runner.graphs))
    assert ids == reference_greedy(words_folder, prompt_of(7)["prompt_token_ids"], 4)


# log

def test_engine_start_logs_a_line_per_stage(fresh, caplog):
  with caplog.at_level("INFO", "tinyvllm"): fresh(cudagraph_capture_sizes=[8])
  text = "\n".join(record.message for record in caplog.records)
  assert re.search(r"^loaded .* s; a step takes 32 tokens\nKV cache: .*\n"
                   r"captured 2 steps in [\d.]+ s, \d+ new kernels$", text, re.M)


def test_script_without_logging_setup_gets_log_on_stderr(tmp_path):
  def run(code):
    env = {**os.environ, "DEV": "CPU", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
  loud = run("import tinyvllm; print(tinyvllm.generate('Hello'))")
  assert loud.stdout == ", world!\n" and loud.stderr.startswith("loaded default_model")
  quiet = run("import logging, tinyvllm; logging.getLogger('tinyvllm').addHandler(logging.NullHandler())\n"
              "print(tinyvllm.generate('Hello'))")
  assert (quiet.stdout, quiet.stderr) == (", world!\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"dtype": "float16"}], ids=str)
def test_core_alone_gives_same_ids_as_extension(tmp_path, options):
  """The model has every optional part. The core uses one device; the extension's two add their partial sums."""
  folder = tiny_model(tmp_path, dtype="bfloat16", head_dim=16, attention_bias=True,
                      num_key_value_heads=None, mlp_bias=True, tie_word_embeddings=True)
  code = ("import sys\nfor name in sys.argv[2:]: sys.modules[name] = None   # as if not installed\n"
          "import tinyvllm; llm = tinyvllm.LLM(sys.argv[1], **{options})\n"
          "output, = llm.generate('ab', tinyvllm.SamplingParams(temperature=0, max_tokens=20), False)\n"
          "print(type(llm.runner.model.norm).__module__, output.outputs[0].token_ids)")
  env = {**os.environ, "DEV": "CPU", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}

  def run(*missing, **extra):
    command = [sys.executable, "-c", code.replace("{options}", str({**ENGINE, **options, **extra})), folder, *missing]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout.split(maxsplit=1)
  modules, ids = zip(run(), run("tinyvllm_extra", tensor_parallel_size=1), strict=True)
  assert modules == ("tinyvllm_extra.kernels.matmul", "tinyvllm.backend") and ids[0] == ids[1] and len(ids[0]) > 60


def test_core_backend_with_two_devices_raises(folder):
  with pytest.raises(tinyvllm.InputError, match="^tensor_parallel_size=2 must be 1"):
    LLM(folder, backend=tinyvllm.Backend(), tensor_parallel_size=2, **ENGINE)


def test_ctrl_c_during_captures_exits_130_without_traceback(tmp_path):
  run = start(tmp_path, "--cudagraph-capture-sizes", "1", "2", "4", "8", "16", "32", "64", "128", "256", "512")
  for line in run.stderr:
    if line.startswith("KV cache"): break   # without cached kernels, capturing all graphs takes a while
  run.send_signal(signal.SIGINT)
  out, err = run.communicate(timeout=60)
  assert (run.returncode, out.strip()) == (130, "") and "Traceback" not in err, err


# server

@pytest.mark.slow
def test_server_is_ready_when_steps_are_captured(words_folder):
  options = ["--max-num-seqs", 8, "--max-num-batched-tokens", 32, "--block-size", 4]
  with Server(words_folder, *options, ready=False) as server:
    messages = []
    while not server.healthy():
      error = server.get("/health").json().get("error", {"message": ""})
      messages.append(error["message"])
    assert {text for text in messages if re.fullmatch(r"preparing \d+ of 12", text)}, messages
    body = {"prompt": "the cat", "max_tokens": 20}
    for fields in ({"temperature": 0}, {"top_p": 0.9}, {"logprobs": 2}):
      assert server.post("/v1/completions", {**body, **fields}).status_code == 200
    assert server.stop() == 0
    lines = [line for line in server.log.splitlines() if line.startswith("captured")]
    assert lines[0].startswith("captured 12 steps in ") and "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_ctrl_c_during_server_captures_exits_130_without_traceback(words_folder, tmp_path):
  empty = {"CACHEDB": str(tmp_path / "cache.db")}   # no cached kernels, so that captures take a while
  with Server(words_folder, ready=False, environment=empty) as server:
    wait_until(lambda: "preparing" in server.get("/health").text, "captures have started")
    server.signal(signal.SIGINT)
    assert server.wait() == 130 and "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_async_llm_captures_optional_graphs_while_idle(words_folder):
  llm = AsyncLLM(words_folder, prepare=True, cudagraph_capture_sizes=[8], max_num_seqs=4, max_num_batched_tokens=8)
  driver = llm._driver
  wait_until(lambda: driver.captures is None, "all graphs are captured")
  assert {key.sampler_mode for key in llm.llm.runner.graphs} == {*SamplerMode} and len(llm.llm.runner.graphs) == 4
  assert llm.state == ""


def test_async_llm_failed_capture_is_logged_and_requests_finish(words_folder, monkeypatch, caplog):
  def fails(self, sizes=None, optional=False):
    yield "preparing 1 of 1"
    raise RuntimeError("out of memory")
  monkeypatch.setattr(LLM, "capture", fails)
  llm = AsyncLLM(words_folder, prepare=True, max_num_seqs=4, max_num_batched_tokens=8)

  async def ask(): return [output async for output in llm.generate(prompt_of(3), greedy(2))]
  assert asyncio.run(ask())[-1].finished and llm.state == ""
  assert "out of memory" in caplog.text


@pytest.mark.slow
def test_program_with_an_unfinished_request_exits():
  program = """
import asyncio
from tinyvllm import SamplingParams
from tinyvllm_extra.server import AsyncLLM
from tinyvllm_extra.server.async_engine import StepError
async def main():
  async for output in AsyncLLM().generate("Hello", SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=400)):
    return print("Hello" + output.outputs[0].text)
asyncio.run(main())
"""
  run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120,
                       cwd=Path(__file__).parents[2], env={**os.environ})
  assert run.returncode == 0 and run.stdout.startswith("Hello") and "Traceback" not in run.stderr, run.stderr
