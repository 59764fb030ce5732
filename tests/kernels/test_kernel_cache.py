"""Kernels are compiled once: the folder of kernels on disk, damaged files included, layers that are traced once, and
captured steps on disk."""
import pickle
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest
from helpers.engines import ENGINE, greedy, ids_of, prompt, tokens
from helpers.reference import reference_greedy
from tinygrad import Tensor, UOp, codegen, helpers
from tinygrad.uop.ops import KernelInfo, Ops

from tinyvllm import LLM, SamplingParams, backend
from tinyvllm_extra import programs
from tinyvllm_extra.kernels import FastBackend, fast_backend, kernel_cache as kernels

CLANG = "clang", 1, 2   # a compiler: its name, file size and modification time


def files(folder): return [path for path in folder.rglob("*") if path.is_file()]


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
  return kernels.KernelFolder(folder, compiler)(ast, backend.renderer())


def test_kernel_folder_lowers_each_kernel_once(lowered, tmp_path):
  assert build_kernel(tmp_path) is build_kernel(tmp_path) is not build_kernel(tmp_path, "b")
  assert lowered == ["a", "b"]
  assert len(files(tmp_path)) == 2 and all(len(path.name) == 64 for path in files(tmp_path)), "a temporary file remains"


def test_kernel_folder_separates_versions_patches_compilers_and_settings(lowered, tmp_path):
  (tmp_path / "kernels").mkdir()
  (tmp_path / "patches.py").write_text("# changed\n")
  others = ((f"{kernels.__name__}.TINYGRAD", "0.15.0"), ("tinyvllm.__version__", "0.0.1"),
            (f"{kernels.__name__}.PATCHES", tmp_path / "patches.py"))
  for _ in range(2):
    build_kernel(tmp_path / "kernels")
    for name, value in others:
      with patch(name, value): build_kernel(tmp_path / "kernels")
    with helpers.Context(NOOPT=1): build_kernel(tmp_path / "kernels")
    build_kernel(tmp_path / "kernels", compiler=("clang", 1, 3))
    assert len(lowered) == 6


def test_kernel_folder_damaged_file_is_replaced(lowered, tmp_path):
  last = build_kernel(tmp_path)
  path, = files(tmp_path)
  content = path.read_bytes()
  for damaged in (b"", content[:-1], b"x" * 500, content[:40] + b"\xff" * 8, pickle.dumps("no program"), None):
    path.unlink()
    if damaged is not None: path.write_bytes(damaged)
    again = build_kernel(tmp_path)
    assert again is not last and build_kernel(tmp_path) is again, damaged
    last = again


def test_kernel_folder_on_full_disk_writes_nothing(lowered, tmp_path):
  with patch.object(Path, "write_bytes", side_effect=OSError(28, "No space left on device")):
    assert build_kernel(tmp_path) is not build_kernel(tmp_path)
  assert build_kernel(tmp_path) is build_kernel(tmp_path) and lowered == ["a", "a", "a"]


def test_run_layers_traces_equal_layers_once(words_folder, monkeypatch):
  num_traces = Counter()
  call_layer = fast_backend.call_layer
  trace = call_layer.fxn
  monkeypatch.setattr(call_layer, "fxn", lambda layer, *args: num_traces.update([layer]) or trace(layer, *args))
  for num_kinds in (1, 2):
    llm = LLM(words_folder, **ENGINE)
    layers = llm.runner.model.layers
    assert len(layers) == 2
    if num_kinds == 2:   # a layer with one more tensor
      linear = layers[1].o_proj
      linear.bias = Tensor.zeros(linear.out_features).contiguous().realize()
    num_traces.clear()
    output, = llm.generate(tokens(prompt(7)), greedy(4), use_tqdm=False)
    assert num_traces == dict.fromkeys(layers[:num_kinds], len(llm.runner.graphs))
    assert ids_of(output) == reference_greedy(words_folder, prompt(7), 4)


def test_cache_folder_that_cannot_be_written_costs_one_warning(monkeypatch, caplog):
  monkeypatch.setattr(helpers, "CACHEDB", "/proc/none/cache.db")
  monkeypatch.setattr(helpers.CACHELEVEL, "value", 2)
  monkeypatch.setenv("CACHELEVEL", "2")
  programs.check_cache.__wrapped__()
  assert helpers.CACHELEVEL.value == 0 and len(caplog.records) == 1 and "/proc/none" in caplog.text


# Captured steps on disk: a later engine restores them, and only if nothing that determines them has changed

PROMPTS = [prompt(n) for n in (3, 20)]
PARAMS = [greedy(6), SamplingParams(temperature=1.0, top_p=0.9, seed=1, logprobs=2, max_tokens=6)]


class OtherBackend(FastBackend): pass


@pytest.fixture
def run(folder, monkeypatch, tmp_path):
  """A function that makes an engine, generates, and returns the token ids and the number of captures."""
  monkeypatch.setattr(helpers.CACHELEVEL, "value", 2)
  monkeypatch.setattr(codegen.do_to_program, "path", tmp_path)

  def make(**options):
    with patch.object(kernels.StoredStep, "save", autospec=True, side_effect=kernels.StoredStep.save) as save:
      llm = LLM(folder, **{**ENGINE, **options})
      ids = [ids_of(llm.generate(tokens(x), params, False)[0]) for x in PROMPTS for params in PARAMS]
    return ids, save.call_count
  return make


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_engine_restores_the_steps_of_an_earlier_one(run, tmp_path, quantization):
  expected, num_captured = run(quantization=quantization)
  assert num_captured >= 3 and run(quantization=quantization) == (expected, 0)
  for path in tmp_path.iterdir(): path.write_bytes(path.read_bytes()[:-1])
  for num in (num_captured, 0): assert run(quantization=quantization) == (expected, num), "a damaged file is replaced"


@pytest.mark.parametrize("change", ["option", "code", "choices", "backend", "level"])
def test_changed_step_is_captured(run, monkeypatch, tmp_path, change):
  run()
  if change == "code": monkeypatch.setattr(kernels, "source_hash", lambda *folders: "other")
  if change == "level": monkeypatch.setattr(helpers.CACHELEVEL, "value", 1)
  (path := tmp_path / "tuned.json").write_text('{"linear": "4"}')
  if change == "choices": monkeypatch.setattr(programs, "tiles_path", lambda: path)
  options = {"option": {"max_num_seqs": 3}, "backend": {"backend": OtherBackend()}}.get(change, {})
  _, num_captured = run(**options)
  assert bool(num_captured) == (change in ("option", "code", "choices")), "a step of unknown code is not stored"
