"""Command lines of vLLM's documentation, recipes and deployment examples, at the level of parsing: each is accepted, or
refused in one line that names the option and its value. They are in data/vllm_options.json."""
import shlex
from string import Template

import pytest
from helpers.data import read_data
from helpers.commands import error_line, parse_command, run_command

from tinyvllm import LLM, InputError
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.cli.flags import expand, read_config
from tinyvllm_extra.cli.serve import read_arguments
from tinyvllm_extra.vllm_options import NO_EFFECT, read_options

# accepted: without `vllm serve`. refused: the start of the message by command line. expanded: words for argparse by
# words of the user. parsed: command, model, options of LLM, fields of ServerConfig. config: options of LLM, and the
# fields of its config
COMMANDS = read_data("vllm_options.json")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  folder = tmp_path_factory.mktemp("vllm")
  (folder / "template").write_text("{{ messages[0].content }}")
  (folder / "key").write_text("")
  (folder / "config").write_text(COMMANDS["config file"])
  return {path.name: path for path in folder.iterdir()}


def parse(command, files):
  return read_arguments(parse_command("serve", *shlex.split(Template(command).substitute(files))))[:3]


@pytest.mark.parametrize("command", COMMANDS["accepted"])
def test_command_of_vllm_is_accepted(command, files): assert parse(command, files)[0]


@pytest.mark.parametrize("command,message", COMMANDS["refused"].items())
def test_command_with_missing_feature_is_one_line_and_exit_code_1(command, message):
  assert error_line(run_command("serve", *shlex.split(command))).startswith(f"tinyvllm: {message}")


# Words of the command line

@pytest.mark.parametrize("command,model,engine,fields", COMMANDS["parsed"])
def test_command_line_and_config_file_reach_the_options(files, command, model, engine, fields):
  *parsed, server = parse(command, files)
  assert parsed == [model, engine] and vars(server).items() >= fields.items()


@pytest.mark.parametrize("words,expanded", COMMANDS["expanded"].items())
def test_expand_returns_full_flags_and_joins_parts_of_json(words, expanded):
  """The result is shown in one line: JSON holds spaces."""
  assert " ".join(expand(words.split())) == expanded


# --config

@pytest.mark.parametrize("content,words", [("a: [", "cannot be read"), ("- a", "must hold"), ("", "must hold")])
def test_invalid_config_file_raises(tmp_path, content, words):
  path = tmp_path / "config.yaml"
  path.write_text(content)
  with pytest.raises(InputError, match=f"^config='{path}' {words}"): read_config(str(path))


# Options

def test_ignored_options_are_logged_in_one_line(caplog):
  caplog.set_level("INFO", "tinyvllm")
  LLM(trust_remote_code=True, swap_space=4, max_num_seqs=2)
  line, = [line for line in caplog.messages if "without effect" in line]
  assert line.endswith(": swap_space=4, trust_remote_code=True")
  caplog.clear()
  LLM(max_num_seqs=2)
  assert "without effect" not in caplog.text


def test_options_are_disjoint(): assert not NO_EFFECT.keys() & {*LLMConfig.__dataclass_fields__}


@pytest.mark.parametrize("case", COMMANDS["config"])
def test_read_options_returns_the_config(case):
  options = dict(case["options"])
  assert read_options(options, "m") == LLMConfig(**{"override_generation_config": {}, **case["config"]})
  assert options == case["options"], "it is not changed"


@pytest.mark.parametrize("option,text", COMMANDS["chat templates"])
def test_chat_template_is_a_file_or_a_text_with_braces_or_lines(tmp_path, monkeypatch, option, text):
  (tmp_path / "a.jinja").write_text("content")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert read_options({"chat_template": option}).chat_template == text
