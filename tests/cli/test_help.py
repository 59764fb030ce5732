"""Flags that are made from the fields of option classes, and their help."""
import argparse
import dataclasses
import functools
import logging
import re

import pytest
from helpers.commands import run_command

from tinyvllm import SamplingParams
from tinyvllm.config import EngineConfig, Options, option
from tinyvllm_extra import flags as product
from tinyvllm_extra.flags import HelpFormatter, add_flags, integer, select_options, setup_logging
from tinyvllm_extra.server.app import ServerConfig
from tinyvllm_extra.vllm_options import ModelOptions

COMMANDS = ["generate", "chat", "serve"]


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


@pytest.mark.parametrize("command", ["", *COMMANDS, "convert", "doctor"])
def test_help_fits_on_two_screens(command):
  lines = help_text(command).splitlines()
  assert len(lines) <= 48 and max(map(len, lines)) <= 80


def test_help_lists_commands():
  commands = re.findall(r"^    (\w+)(?: \((\w+)\))?(?: +\S|$)", help_text(""), re.M)
  assert commands == [("run", "chat"), ("generate", ""), ("serve", ""), ("convert", ""), ("doctor", "")]


@pytest.mark.parametrize("command,kinds", [
  ("generate", [EngineConfig, ModelOptions, SamplingParams]), ("chat", [EngineConfig, ModelOptions, SamplingParams]),
  ("serve", [EngineConfig, ModelOptions, ServerConfig])])
def test_help_all_every_option_has_text_and_default(command, kinds):
  text = help_text(command, "--help-all")
  entries = help_entries(text)
  flags = {re.sub(r"^--(\[no-])?", "", words.split()[0]) for words in entries}
  fields = {field.name.replace("_", "-") for kind in kinds for field in dataclasses.fields(kind)} - {"n"}
  assert fields | {"model", "log-level"} <= flags and "n" not in flags, "a terminal shows one sample"
  for name, words in entries.items():
    assert len(words.partition("(default")[0].split()) >= 3, name
    assert re.search(r"\(default: [^)]+\)$", words) or name.startswith(("-h,", "--help-all")), name
    assert "None" not in words, name
  assert "--pipeline-parallel-size" not in text, "vLLM's flags without effect stay hidden"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_grouped_and_hides_rare_flags(command):
  text, everything = help_text(command), help_text(command, "--help-all")
  headings = ["options", "Model", "Memory", "Scheduling", "Decoding", "Server"]
  assert re.findall(r"^(\w+):$", text, re.M) == re.findall(r"^(\w+):$", everything, re.M) == headings
  common, rare = (["--max-model-len", "--[no-]enable-prefix-caching", "--model"], ["--block-size", "--log-level"])
  assert all(name in text for name in common) and not any(name in text for name in rare)
  assert help_entries(text).items() < help_entries(everything).items() and all(name in everything for name in rare)


def test_every_grouped_flag_is_an_option_and_greedy_is_the_default():
  names = {name for names in product.GROUPS.values() for name in names.split()} - {"|"}
  kinds = (EngineConfig, ModelOptions, SamplingParams, ServerConfig)
  assert names <= {field.name for kind in kinds for field in dataclasses.fields(kind)}
  assert "(default: 0.0)" in help_entries(help_text("generate"))["--temperature FLOAT"]


@dataclasses.dataclass(frozen=True)
class Described(Options):
  """Options with each kind of type and default."""
  sizes: list[int] | None = option(None, "Sizes in bytes (default: none)")
  names: list[str] | None = option(None, "Names of things (default: none)")
  mode: str = option("a", "Mode of operation", choices=("a", "b"))
  kind: str = option("kind-1", "Kind of operation", choices=tuple(f"kind-{i}" for i in range(30)))
  ratio: float | None = option(None, "Ratio, 100% at most (default: half)")
  limit: int | None = option(3, "Maximum number of retries", min=1, max=9)
  table: dict[str, int] | None = option(None, "Numbers by name (default: none)")
  fast: bool = option(True, "Skip the slow part")
  deep: bool = option(False, "Visit all parts")
  dtype: str = option("auto", "A field of the group Model")


@pytest.fixture(scope="module")
def parser():
  parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
  add_flags(parser, Described)
  return parser


def test_add_flags_reads_types_from_fields(parser):
  flags = ["--sizes", "1", "2k", "--sizes", "3", "--names", "4", "--ratio", "0.5", "--limit", "auto", "--mode", "b",
           "--no-fast", "--deep", "--table", '{"a": 1}', "--kind", "kind-9"]
  assert select_options(vars(parser.parse_args(flags)), Described) == {
    "sizes": [1, 2000, 3], "names": ["4"], "ratio": 0.5, "limit": None, "mode": "b", "fast": False, "deep": True,
    "table": {"a": 1}, "kind": "kind-9"}
  assert select_options(vars(parser.parse_args([])), Described) == {}


def test_add_flags_reads_help_from_fields(parser, monkeypatch):
  monkeypatch.setenv("COLUMNS", "80")
  text = parser.format_help()
  entries = help_entries(text)
  expected = {"--sizes INT [INT ...]": "Sizes in bytes (default: none)",
              "--names STR [STR ...]": "Names of things (default: none)",
              "--mode {a,b}": "Mode of operation (default: a)", "--table JSON": "Numbers by name (default: none)",
              "--ratio FLOAT": "Ratio, 100% at most (default: half)", "--[no-]fast": "Skip the slow part (default: on)",
              "--limit INT": "Maximum number of retries (default: 3)", "--[no-]deep": "Visit all parts (default: off)"}
  assert {flags: words for flags, words in entries.items() if flags in expected} == expected
  assert re.findall(r"^(\w+):$", text, re.M) == ["options", "Model", "Other"]
  assert [name for name in entries if name in expected] == sorted(expected, key=lambda name: text.index(name))
  assert "--log-level" not in text


def test_help_formatter_cuts_long_lists_of_choices():
  def shown(count):
    action = argparse.Action(["--kind"], "kind", metavar=f"{{{','.join(f'{i:04}' for i in range(count))}}}")
    return HelpFormatter("x")._format_action_invocation(action)
  assert len(shown(14)) == 78 and shown(14).endswith(",0013}"), "it fits"
  assert shown(15) == f"--kind {{{','.join(f'{i:04}' for i in range(13))},...}}"


@pytest.mark.parametrize("text,value", [
  ("12", 12), ("-1", -1), ("1k", 1000), ("1K", 1024), ("25.6k", 25600), ("0.5M", 2**19), ("2m", 2 * 10**6),
  ("3g", 3 * 10**9), ("1G", 2**30), ("1T", 2**40), ("auto", None)])
def test_integer_reads_units_as_vllm_does(text, value): assert integer(text) == value


@pytest.mark.parametrize("text", ["", "k", "1kk", "1x", "1.5", "Auto"])
def test_integer_refuses_other_text(text):
  with pytest.raises(ValueError): integer(text)


def test_setup_logging_leaves_a_configured_logger_alone(monkeypatch):
  logger = logging.Logger("mine")
  monkeypatch.setattr(product, "logger", logger)
  setup_logging()
  assert len(logger.handlers) == 1 and logger.level == logging.INFO
  setup_logging()
  assert len(logger.handlers) == 1, "a second call adds nothing"
  quiet = logging.Logger("quiet", logging.ERROR)
  monkeypatch.setattr(product, "logger", quiet)
  setup_logging()
  assert len(quiet.handlers) == 1 and quiet.level == logging.ERROR
