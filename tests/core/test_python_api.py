"""The Python API as a user sees it: help(), signatures, type checkers, errors, and a shutdown."""
import inspect
import pydoc
import re
import sys

import pytest
import tinyvllm
from helpers.commands import PYTHONPATH, run_process, run_python
from helpers.data import DATA, read_data
from helpers.engines import ENGINE

from tinyvllm import LLM, AsyncLLM, InputError, SamplingParams
from tinyvllm_extra.llm import LLMArguments
from tinyvllm_extra.serving.async_engine import AsyncLLMArguments

MISTAKES = read_data("api_mistakes.json")   # call -> its message


def test_help_lists_public_names_and_import_is_lazy():
  code = ("import sys, tinyvllm\nprint(dir(tinyvllm) == sorted(tinyvllm.__all__), 'numpy' in sys.modules)\n"
          "import tinyvllm.engine\nprint([name for name in sys.modules if name.startswith('tinyvllm_extra')])")
  assert run_python(code).stdout == "True False\n[]\n", "the core loads the extension"
  text = pydoc.plain(pydoc.render_doc(tinyvllm))
  assert not [name for name in tinyvllm.__all__ if not re.search(rf"\b{name}( = |\()", text)]


@pytest.mark.parametrize("kind,options", [
  (LLM, LLMArguments), (AsyncLLM, AsyncLLMArguments), (SamplingParams, SamplingParams)])
def test_signature_and_help_have_every_option(kind, options):
  parameters, text = inspect.signature(kind).parameters, f"{kind.__init__.__doc__}\n{kind.__doc__}\n"
  assert parameters.keys() == options.__dataclass_fields__.keys()
  for name, field in options.__dataclass_fields__.items():
    help = re.escape("" if name == "model" else f"\n    {field.metadata['help']}")
    assert re.search(rf"^{name}: [^=\n]+ = {re.escape(repr(field.default))}{help}$", text, re.M), name
  assert kind is not LLM or "\nmax_model_len: int | None = None\n    Context length in tokens" in text


@pytest.mark.parametrize("checker", ["mypy", "pyright"])   # .ci/run outside installs pyright
def test_type_checker_reports_wrong_lines_only(tmp_path, checker):
  pytest.importorskip(checker)
  program = (DATA / "typed_program.txt").read_text()
  (tmp_path / "program.py").write_text(program)
  output = run_process(sys.executable, "-m", checker, tmp_path / "program.py", MYPYPATH=PYTHONPATH).stdout
  wrong = {str(i) for i, line in enumerate(program.splitlines(), 1) if line.endswith("# error")}
  assert {*re.findall(r"program\.py:(\d+):.* error", output)} == wrong, output


@pytest.mark.parametrize("call", MISTAKES)
def test_wrong_argument_raises_input_error(words_llm, call):
  with pytest.raises(InputError, match=re.escape(MISTAKES[call])): eval(call, {"tinyvllm": tinyvllm, "llm": words_llm})


def test_calls_after_shutdown_raise_input_error(folder):
  with LLM(folder, **ENGINE) as llm:
    stream = llm.generate_stream("a")
    next(stream)
  assert re.fullmatch(r"LLM\(.*: float32 on CPU, max_model_len=128\)", repr(llm))
  llm.shutdown()   # does nothing
  assert [output.outputs[0].finish_reason for output in stream] == ["abort"] and not llm.has_unfinished_requests()
  for call in (llm.step, lambda: llm.generate("a"), lambda: [*llm.capture([1])]):
    with pytest.raises(InputError, match="was shut down: create a new one"): call()
