"""`tinyvllm generate` and `tinyvllm chat`: output, sampling options, Ctrl-C, errors in one line; help of commands;
`tinyvllm bench`."""
import argparse
import contextlib
import dataclasses
import functools
import http.client
import io
import json
import logging
import math
import os
import re
import shlex
import subprocess
import sys
from unittest import mock

import pytest
from helpers.commands import FLAGS, PYTHONPATH, error_line, parse_command, run_command, run_process, run_python
from helpers.data import read_data
from helpers.engines import ENGINE, greedy, tokens
from helpers.models import tiny_model
from helpers.servers import LocalServer, checked
from safetensors.numpy import load_file
from tinygrad.device import CompileError

from tinyvllm import LLM, SamplingParams, __version__, generate, generate_stream
from tinyvllm.config import Options, option
from tinyvllm_extra.cli import bench, flags as product
from tinyvllm_extra.cli.flags import BenchConfig, CommandParser, HelpFormatter, add_flags, integer, select_options
from tinyvllm_extra.options import LLMConfig, MissingPackage, optional, setup_logging
from tinyvllm_extra.serving.app import ServerConfig

# sampling: flags and fields of SamplingParams. refused: words of the message by command line. unknown: command lines
# with unknown or abbreviated flags
COMMANDS = read_data("command_lines.json")


def generated(folder, *options):
  """Return the text that `generate "the cat"` prints after the prompt."""
  run = run_command("generate", "the cat", "--model", folder, *FLAGS, *options)
  assert run.returncode == 0 and run.stdout.startswith("the cat") and run.stdout.endswith("\n"), run.stderr
  return run.stdout[len("the cat"):-1]


def text_of(llm, **fields):
  params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **fields})
  return llm.generate("the cat", params, use_tqdm=False)[0].outputs[0].text


@pytest.mark.parametrize("case", COMMANDS["sampling"], ids=lambda case: case["options"])
def test_sampling_option_applies_to_the_request(words_folder, words_llm, case):
  text = generated(words_folder, "--max-tokens", 12, *shlex.split(case["options"]))
  assert text == text_of(words_llm, **case["fields"]) != text_of(words_llm)


def test_greedy_text_ends_before_each_of_several_stop_strings(words_folder, words_llm):
  text = text_of(words_llm)
  assert generated(words_folder, "--max-tokens", 12) == text
  for options in (["--stop", text[6:8], "#"], ["--stop", "#", "--stop", text[6:8]]):
    assert generated(words_folder, *options, "--max-tokens", 12) == text[:text.index(text[6:8])]


def test_log_goes_to_stderr_until_the_text_starts(words_folder):
  """A later line would interrupt the text. Captures may last longer, and then are not logged."""
  command = ["generate", "the cat", "--model", words_folder, *FLAGS, "--max-tokens", 3]
  assert re.findall(r"(?m)^\w+", run_command(*command).stderr)[:3] == ["loaded", "KV", "capturing"]
  run = run_command(*command, "--log-level", "error")
  assert (run.returncode, run.stderr) == (0, "")


def test_module_level_generate_and_generate_stream(words_folder, words_llm):
  text = text_of(words_llm, max_tokens=6)
  assert generate("the cat", model=words_folder, max_tokens=6) == text
  pieces = list(generate_stream("the cat", model=words_folder, max_tokens=6))
  assert "".join(pieces) == text and len(pieces) > 1 and all(pieces)
  with pytest.raises(ValueError, match="max_token"): generate("the cat", model=words_folder, max_token=6)


# chat

@pytest.fixture(scope="module")
def answer(chat_folder):
  """Return a function that returns the answer of five tokens to a prompt of the chat template's text."""
  llm = LLM(chat_folder, **ENGINE)
  return lambda prompt: llm.generate(tokens(llm.tokenizer.encode(prompt, False)), greedy(5))[0].outputs[0].text


LONG = "is that all " * 99


def chat(folder, *lines, terminal=False):
  stdin = io.StringIO("".join(f"{line}\n" for line in lines))
  stdin.isatty = lambda: terminal
  return run_command("chat", folder, *FLAGS, "--max-tokens", 5, "--temperature", 0, stdin=stdin,
                     XDG_STATE_HOME=str(folder.parent / "state"))


@pytest.mark.parametrize("lines,code", [("long hello", 0), ("hello long", 1), ("hello long /new", 1)])
def test_chat_drops_a_message_that_is_too_long(chat_folder, answer, lines, code):
  """The exit code is 1 if it is the last one."""
  run = chat(chat_folder, *[line.replace("long", LONG) for line in lines.split()])
  assert (run.returncode, run.stdout) == (code, answer("user: hello\n") + "\n")
  assert run.stderr.count("maximum context length") == 1


def test_chat_prints_a_prompt_in_a_terminal(chat_folder, answer):
  text = answer("user: hello\n")
  assert chat(chat_folder, "hello", terminal=True).stdout == f"> {text}\n> \n"


# Errors

@pytest.mark.parametrize("command,words", COMMANDS["refused"].items())
def test_invalid_option_value_is_one_line_and_exit_code_1(words_folder, command, words):
  name, *options = shlex.split(command)
  assert words in error_line(run_command(name, "--model", words_folder, *FLAGS, *options, stdin="hello\n"))


@pytest.mark.parametrize("command,file", COMMANDS["not JSON"])
def test_file_of_a_model_that_is_not_json_is_named(tmp_path, command, file):
  (tiny_model(tmp_path) / file).write_text("{")
  run = run_command(*command.split(), "--model", tmp_path)
  assert error_line(run).startswith(f"tinyvllm: {tmp_path}/{file} must be JSON: Expecting")


@pytest.mark.parametrize("command", COMMANDS["unknown"])
def test_unknown_argument_and_abbreviated_flag_exit_2_with_usage(command):
  """`--config x` would otherwise set --config-format."""
  run = run_command(*command.split())
  assert run.returncode == 2 and run.stderr.startswith("usage: tinyvllm") and not run.stdout
  assert "--logit-bias" not in command or "argument --logit-bias: invalid JSON value: '{'" in run.stderr


@pytest.mark.parametrize("command,name", COMMANDS["suggested"].items())
def test_misspelled_command_or_flag_suggests_the_nearest_one(command, name):
  """With the usage of the command."""
  run = run_command(*command.split())
  usage = f"usage: tinyvllm {command.split()[0] if ' ' in command else '[-h]'} "
  assert run.returncode == 2 and run.stderr.startswith(usage) and run.stderr.endswith(f": did you mean {name}?\n")


@pytest.mark.parametrize("command,words", COMMANDS["words"].items())
def test_words_of_a_command_may_follow_flags(command, words):
  args = parse_command(*command.split())
  assert [args.get("model"), args.get("prompt")] == words


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_flag_prints_version(flag):
  run = run_command(flag)
  assert (run.returncode, run.stdout) == (0, f"{__version__}\n")


# Prompts of the command line and of stdin

def test_prompt_is_a_word_a_flag_or_stdin(words_folder, words_llm):
  text = f"the cat{text_of(words_llm)}\n"
  options = ["-m", words_folder, *FLAGS, "-n", 12]
  for words, stdin in ((["the cat"], ""), (["-p", "the cat"], ""), (["-"], "the cat\n"), (["-p", "-"], "the cat")):
    assert run_command("generate", *options, *words, stdin=stdin).stdout == text


@pytest.mark.parametrize("words,stdin", [(["hello"], "x"), (["-p", "hello"], "x"), (["-"], "hello\n")])
def test_run_answers_one_question_and_ends(chat_folder, answer, words, stdin):
  run = run_command("run", chat_folder, *FLAGS, "--max-tokens", 5, "--temperature", 0, "--verbose", *words, stdin=stdin)
  assert (run.returncode, run.stdout) == (0, answer("user: hello\n") + "\n")
  assert "(cut at max_tokens=5" in run.stderr and "5 output tokens" in run.stderr


@pytest.mark.parametrize("command", ["generate Once -n 9", "run -n 3", "--help", "serve --help"])
def test_closed_pipe_ends_quietly(command):
  """As after `| head -1`: nobody reads."""
  reader, writer = os.pipe()
  os.close(reader)
  run = subprocess.run([sys.executable, "-m", "tinyvllm", *command.split()], input="hello\nhello\n", stdout=writer,
                       stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": PYTHONPATH})
  os.close(writer)
  assert run.returncode in (0, 141) and not re.search("Traceback|Exception|Broken", run.stderr), run.stderr


# Environment variables

def test_environment_variables_set_flags_below_the_command_line(words_folder, words_llm, tmp_path):
  (tmp_path / "config.yaml").write_text("max-tokens: 3\ntemperature: 0.5\ndtype: float16\n")
  env = {"TINYVLLM_MODEL": str(words_folder), "TINYVLLM_MAX_TOKENS": "12", "TINYVLLM_TEMPERATURE": "0.7",
         "TINYVLLM_ENABLE_PREFIX_CACHING": "0", "TINYVLLM_CONFIG": str(tmp_path / "config.yaml"),
         "TINYVLLM_BLOCK_SIZE": "7", "TINYVLLM_API_KEY": "only for serve", "TINYVLLM_SEED": ""}
  with mock.patch.dict(os.environ, env):
    args = parse_command("generate", "the cat", "--temperature", 0)
    assert select_options(args, SamplingParams) == {"max_tokens": 12, "temperature": 0.0}
    assert select_options(args, LLMConfig) == {"dtype": "float16", "enable_prefix_caching": False}
  run = run_command("generate", "the cat", *FLAGS, "-n", 12, TINYVLLM_MODEL=str(words_folder), TINYVLLM_API_KEY="a key")
  assert run.stdout == f"the cat{text_of(words_llm)}\n"


@pytest.mark.parametrize("name,value,code", COMMANDS["invalid variables"])
def test_error_names_the_environment_variable(name, value, code):
  run = run_command("serve", **{f"TINYVLLM_{name}": value})
  assert run.returncode == code and f"TINYVLLM_{name}" in run.stderr.splitlines()[-1]


# Completion

@pytest.mark.parametrize("words,expected", COMMANDS["completed"].items())
def test_bash_completes_commands_and_flags(words, expected):
  """The function that bash calls after Tab at the end of the last word."""
  script = run_command("completion", "bash").stdout
  call = f"COMP_WORDS=(tinyvllm {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_tinyvllm"
  run = run_process("bash", "-c", f"{script}\n{call}; echo ${{COMPREPLY[@]}}")
  assert sorted(run.stdout.split()) == sorted(expected.split()), run.stderr


@pytest.mark.parametrize("error", [
  CompileError("unknown type"), subprocess.CalledProcessError(1, ["clang"]), RuntimeError("no device"),
  MissingPackage("install it"), ValueError("a bad value"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_expected_error_is_one_line_and_exit_code_1_or_130(monkeypatch, error):
  monkeypatch.setattr("tinyvllm.LLM", mock.Mock(side_effect=error))
  run = run_command("generate", "Hello")
  expected = (130, "") if isinstance(error, KeyboardInterrupt) else (1, f"tinyvllm: {error}\n")
  assert (run.returncode, run.stderr, run.stdout) == (*expected, "")


@pytest.mark.parametrize("command,module,extra", COMMANDS["missing packages"])
def test_missing_package_error_names_its_extra(chat_folder, monkeypatch, command, module, extra):
  monkeypatch.setitem(sys.modules, module, None)
  options = {"chat": ["--model", chat_folder, *FLAGS], "completion": ["bash"]}.get(command, [])
  run = run_command(command, *options, stdin="hello\n")
  error = error_line(run)
  assert module.partition(".")[0] in error and f"pip install 'tinyvllm[{extra}]'" in error and run.stdout == ""


def test_optional_imports_modules_and_passes_other_errors(tmp_path, monkeypatch):
  assert optional("json.decoder", "hf", "reading") is json.decoder
  (tmp_path / "needs_another.py").write_text("import another_package.part")
  (tmp_path / "broken_module.py").write_text("from json import no_such_name")
  monkeypatch.syspath_prepend(tmp_path)
  text = r"^reading needs another_package: pip install 'tinyvllm\[hf]'$"
  with pytest.raises(MissingPackage, match=text): optional("needs_another", "hf", "reading")
  with pytest.raises(ImportError, match="no_such_name") as error: optional("broken_module", "hf", "reading")
  assert not isinstance(error.value, MissingPackage)


# Flags that are made from the fields of option classes, and their help

ANSWERING = ["generate", "chat", "serve"]


@functools.cache
def help_text(command, flag="--help"):
  """Return what `tinyvllm COMMAND --help` prints on a terminal of 80 columns."""
  run = run_command(*command.split(), flag, COLUMNS="80")
  assert run.returncode == 0 and not run.stderr
  return run.stdout


def help_entries(text):
  """Return the help text of each option, by its flags."""
  entries = re.findall(r"^  (-\S.*?)(?:  +|\n {32})(\S.*(?:\n {32}.*)*)", text, re.M)
  return {flags: " ".join(words.split()) for flags, words in entries}


ALL = ["run", "generate", "serve", "bench", "pull", "list", "rm", "doctor", "trace", "completion"]


@pytest.mark.parametrize("command", ["", *ANSWERING, *ALL])
def test_help_fits_on_two_screens(command):
  lines = help_text(command).splitlines()
  assert len(lines) <= 48 and max(map(len, lines)) <= 80


def test_help_lists_commands():
  commands = re.findall(r"^    (\w+)(?: \((\w+)\))?(?: +\S|$)", help_text(""), re.M)
  assert commands == [(name, "chat" if name == "run" else "") for name in ALL]
  assert run_command(COLUMNS="80").stdout == help_text("") and "examples:\n  tinyvllm run " in help_text("")


def test_help_and_url_import_no_slow_packages():
  """Parsing needs 0.1 s of CPU time, these packages another 0.5 s."""
  slow = {"tinygrad", "numpy", "fastapi", "pydantic", "huggingface_hub", "jinja2"}
  code = "import atexit, sys, tinyvllm_extra.cli as cli\natexit.register(lambda: print(*sys.modules))\ncli.main()"
  for command in (*(f"{name} --help" for name in ALL), "run --url http://127.0.0.1:9 -p Hello"):
    run = run_python(code, *command.split())
    assert "tinyvllm_extra.cli" in run.stdout and not slow & {*run.stdout.split()}, command


@pytest.mark.parametrize("command", ANSWERING)
def test_help_all_describes_every_option_and_help_hides_rare_ones(command):
  text, everything = help_text(command), help_text(command, "--help-all")
  headings = ["options", "Model", "Memory", "Scheduling", "Decoding", "Server"]
  assert re.findall(r"^(\w+):$", text, re.M) == re.findall(r"^(\w+):$", everything, re.M) == headings
  common, rare = (["--max-model-len", "--[no-]enable-prefix-caching", "--model"], ["--block-size", "--log-level"])
  assert all(name in text for name in common) and not any(name in text for name in rare)
  entries = help_entries(everything)
  assert help_entries(text).items() < entries.items()
  flags = {re.sub(r"^(-\w, )?--(\[no-])?", "", words).split()[0] for words in entries}
  kinds = (LLMConfig, ServerConfig if command == "serve" else SamplingParams)
  fields = {field.name.replace("_", "-") for kind in kinds for field in dataclasses.fields(kind)} - {"n"}
  assert fields | {"model", "log-level"} <= flags and "n" not in flags, "a terminal shows one sample"
  assert "--data-parallel-size" not in everything, "vLLM's flags without effect stay hidden"
  for name, words in entries.items():
    assert len(words.partition("(default")[0].split()) >= 3 and "None" not in words, name
    assert re.search(r"\(default: [^)]+\)$", words) or name.startswith(("-h,", "--help-all")), name


def test_every_grouped_flag_is_an_option_and_greedy_is_the_default():
  names = {name for names in product.FLAGS["groups"].values() for name in names}
  kinds = (LLMConfig, SamplingParams, ServerConfig, BenchConfig)
  tables = [product.FLAGS["variables"], *(row.get("variables", {}) for row in product.FLAGS["commands"].values())]
  own = {name for table in tables for name in table}
  assert own <= names <= own | {field.name for kind in kinds for field in dataclasses.fields(kind)}
  assert "(default: 0.0)" in help_entries(help_text("generate"))["--temperature FLOAT"]


@dataclasses.dataclass(frozen=True)
class Described(Options):
  """Options with each kind of type and default."""
  sizes: list[int] | None = option(None, "Sizes, bytes (default: none)")
  names: list[str] | None = option(None, "Names of things (default: none)")
  mode: str = option("a", "Mode of operation", choices=("a", "b"))
  kind: str = option("kind-1", "Kind of operation", choices=tuple(f"kind-{i}" for i in range(30)))
  ratio: float | None = option(None, "Ratio, 100% at most (default: half)")
  limit: int | None = option(3, "Maximum number of retries", min=1, max=9)
  table: dict[str, int] | None = option(None, "Numbers by name (default: none)")
  fast: bool = option(True, "Skip the slow part")
  deep: bool = option(False, "Visit all parts")
  dtype: str = option("auto", "A field of the group Model")


def test_add_flags_reads_types_and_help_from_fields(monkeypatch, capsys):
  monkeypatch.setenv("COLUMNS", "80")
  parser, helper = CommandParser(), CommandParser()
  add_flags(parser, "", [], Described)
  add_flags(helper, "", ["--help-all"], Described)
  words, expected = COMMANDS["parsed options"]
  assert select_options(vars(parser.parse_args(words)), Described) == expected
  assert select_options(vars(parser.parse_args([])), Described) == {}
  assert re.findall(r"^(\w+):$", parser.format_help(), re.M) == ["options", "Model"]
  with pytest.raises(SystemExit): helper.parse_args(["--help-all"])
  text = capsys.readouterr().out
  assert help_entries(text).items() >= COMMANDS["described options"].items()
  assert re.findall(r"^(\w.*):$", text, re.M) == ["options", "Model", "Rare flags of Described"]


def test_help_formatter_cuts_long_lists_of_choices():
  def shown(count):
    action = argparse.Action(["--kind"], "kind", metavar=f"{{{','.join(f'{i:04}' for i in range(count))}}}")
    return HelpFormatter("x")._format_action_invocation(action)
  assert len(shown(14)) == 78 and shown(14).endswith(",0013}"), "it fits"
  assert shown(15) == f"--kind {{{','.join(f'{i:04}' for i in range(13))},...}}"


@pytest.mark.parametrize("text,value", COMMANDS["integers"])
def test_integer_reads_units_as_vllm_does(text, value):
  with pytest.raises(ValueError) if value == "error" else contextlib.nullcontext(): assert integer(text) == value


@pytest.mark.parametrize("level,expected", [(logging.NOTSET, logging.INFO), (logging.ERROR, logging.ERROR)])
def test_setup_logging_leaves_a_configured_logger_alone(monkeypatch, level, expected):
  logger = logging.Logger("mine", level)
  monkeypatch.setattr("tinyvllm_extra.options.logger", logger)
  for _ in range(2):   # a second call adds nothing
    setup_logging()
    assert len(logger.handlers) == 1 and logger.level == expected


# `tinyvllm bench`: the table of rates, throughput, and the metrics of a server

LOAD = "--random-input-len", 8, "--random-output-len", 5


@pytest.fixture(scope="module")
def server(words_folder): yield from checked(LocalServer(words_folder, *FLAGS))


def figures(out): return {name: float(value) for name, value in re.findall(r"^(\S.+?): +([\d.]+)\s*$", out, re.M)}


@pytest.mark.parametrize("options,tests", COMMANDS["bench tests"])
def test_bench_prints_a_row_for_each_test_without_captures_in_it(words_folder, monkeypatch, options, tests):
  graphs, run = [], bench.run
  def spy(llm, *shape):
    seconds = run(llm, *shape)
    graphs.append(len(llm.runner.graphs))
    return seconds
  monkeypatch.setattr(bench, "run", spy)
  out = run_command("bench", words_folder, *FLAGS, *options)
  table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in out.stdout.splitlines()]
  assert table[0] == ["model", "size", "params", "backend", "threads", "test", "t/s"], out.stderr
  num_params = sum(x.size for x in load_file(words_folder / "model.safetensors").values())
  for row, test in zip(table[2:], tests, strict=True):
    assert row[:1] + row[2:3] + row[5:6] == [words_folder.name, f"{num_params / 1e6:.2f} M", test]
    assert re.fullmatch(r"[1-9]\d*\.\d\d ± +\d+\.\d\d", row[6])
  assert len({*graphs}) == 1 and len(graphs) == len(tests) * (2 if "-r" in options else 6)


def test_bench_prints_mean_and_deviation_of_the_runs_after_the_first(words_folder, monkeypatch):
  seconds = iter([9.0, 1.0, 2.0, 4.0])
  monkeypatch.setattr(bench, "run", lambda *_: [bench.Answer([1.0, 1.5, 1 + next(seconds)], 1)])
  out = run_command("bench", words_folder, *FLAGS, "-p", 8, "-n", 0, "-r", 3).stdout
  assert out.endswith(f"|     pp8 | {14 / 3:9.2f} ± {(28 / 3) ** 0.5:6.2f} |\n")


def test_bench_throughput_prints_rates_of_all_requests_together(words_folder):
  values = figures(run_command("bench", "throughput", words_folder, *FLAGS, *LOAD, "--num-prompts", 9).stdout)
  counts = {"Successful requests": 9, "Failed requests": 0, "Total input tokens": 72, "Total generated tokens": 45}
  assert {name: values[name] for name in counts} == counts and "Mean ITL (ms)" not in values
  assert values["Output token throughput (tok/s)"] == pytest.approx(5 * values["Request throughput (req/s)"], rel=1e-3)


def test_bench_serve_sends_a_warm_up_and_a_poisson_process(server, monkeypatch):
  rates = []
  monkeypatch.setattr("random.expovariate", lambda rate: rates.append(rate) or 0.0)
  before = server.metrics()["generation_tokens_total"]
  out = run_command("bench", "serve", "--base-url", server.url, *LOAD, "--num-prompts", 6, "--max-concurrency", 2,
                    "--request-rate", 50, "--dataset-name", "random")
  values = figures(out.stdout)
  assert values["Successful requests"] == 6 and rates == [math.inf] * 6 + [50.0] * 6, out.stderr
  assert values["Total generated tokens"] == 30
  assert server.metrics()["generation_tokens_total"] - before == 2 * 30


def test_bench_serve_prints_metrics_of_the_answers_under_names_of_vllm(monkeypatch):
  """The last of three requests fails. Events of the first answer may have several tokens."""
  answers = iter([0, 0, 0, bench.Answer([0.0, 1.0, 2.0, 4.0], 5),   # after three of the warm-up
                  bench.Answer([1.0, 3.0, 11.0], 5), None])
  def send(*_):
    result = next(answers)
    if result is None: raise ValueError("broken")
    return result
  monkeypatch.setattr(bench, "send", send)
  run = run_command("bench", "serve", *LOAD, "--num-prompts", 3, "--max-concurrency", 1)
  assert figures(run.stdout) == COMMANDS["bench metrics"]
  assert "a request failed: broken" in run.stderr


@pytest.mark.parametrize("error", [ConnectionResetError("reset"), http.client.IncompleteRead(b"")])
def test_bench_serve_prints_the_end_of_a_server_in_one_line(monkeypatch, error):
  response = mock.MagicMock()
  response.__enter__.return_value.closed = False
  response.__enter__.return_value.read1.side_effect = [b": the first line", error]
  monkeypatch.setattr("urllib.request.urlopen", lambda _: response)
  assert f"no connection to a server: {error}" in error_line(run_command("bench", "serve", "--num-prompts", 1))


@pytest.mark.parametrize("arguments,message", COMMANDS["bench errors"])
def test_bench_prints_errors_in_one_line(server, words_folder, arguments, message):
  words = arguments.replace("URL", server.url).split()
  model = [] if words[0] == "serve" else ["--model", words_folder, *FLAGS]
  assert message in error_line(run_command("bench", *words, *model))
