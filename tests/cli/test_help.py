"""Flags that are made from the fields of option classes, and their help."""
import argparse
import contextlib
import dataclasses
import functools
import logging
import re

import pytest
from helpers.commands import run_command, run_python
from helpers.data import read_data

from tinyvllm import SamplingParams
from tinyvllm.config import Options, option
from tinyvllm_extra.cli import flags as product
from tinyvllm_extra.cli.flags import BenchConfig, CommandParser, HelpFormatter, add_flags, integer, select_options
from tinyvllm_extra.options import LLMConfig, setup_logging
from tinyvllm_extra.serving.app import ServerConfig

ANSWERING = ["generate", "chat", "serve"]
COMMANDS = read_data("command_lines.json")


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
  assert "--pipeline-parallel-size" not in everything, "vLLM's flags without effect stay hidden"
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
  words = "--sizes 1 2k --sizes 3 --names 4 --ratio 0.5 --limit auto --mode b --no-fast --deep --kind kind-9"
  assert select_options(vars(parser.parse_args([*words.split(), "--table", '{"a": 1}'])), Described) == {
    "sizes": [1, 2000, 3], "names": ["4"], "ratio": 0.5, "limit": None, "mode": "b", "fast": False, "deep": True,
    "table": {"a": 1}, "kind": "kind-9"}
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
