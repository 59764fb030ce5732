"""The command line: in this process, which reuses compiled kernels, and as its own process."""
import argparse
import dataclasses
import io
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers.commands import CHAT, FLAGS, process
from helpers.models import tiny_model
from helpers.reference import reference_greedy, reference_logits
from helpers.servers import wait_until
from tinygrad.device import CompileError

from tinyvllm import SamplingParams, generate, generate_stream
from tinyvllm.config import EngineConfig, Options, option
from tinyvllm_extra.cli import main
from tinyvllm_extra.flags import add_flags, select_options
from tinyvllm_extra.server.app import ServerConfig


def cli(folder, command, *options): return main([*command, "--model", str(folder), *FLAGS, *options])


def expected_text(words_llm, words_folder, prompt, n):
  """Return the text that follows a prompt, from the reference's ids."""
  ids = words_llm.tokenizer.encode(prompt)
  decode = words_llm.tokenizer.decode
  return decode([*ids, *reference_greedy(words_folder, ids, n)])[len(decode(ids)):]


def test_generate_prints_prompt_and_completion(words_folder, words_llm, capsys):
  assert cli(words_folder, ["generate", "the cat"], "--max-tokens", "12") == 0
  assert capsys.readouterr().out == "the cat" + expected_text(words_llm, words_folder, "the cat", 12) + "\n"


def test_sampling_options_apply_to_the_request(words_folder, words_llm, capsys):
  text = expected_text(words_llm, words_folder, "the cat", 12)
  stop = text[6:8]
  assert cli(words_folder, ["generate", "the cat"], "--stop", stop, "#", "--max-tokens", "12", "--ignore-eos") == 0
  assert capsys.readouterr().out == "the cat" + text[:text.index(stop)] + "\n"


def test_dict_options_are_parsed_as_json(words_folder, words_llm, capsys):
  ids = words_llm.tokenizer.encode("the cat")
  first, second = np.argsort(reference_logits(words_folder, ids)[-1])[:-3:-1].tolist()
  text = words_llm.tokenizer.decode([*ids, second])[len("the cat"):]
  assert text != words_llm.tokenizer.decode([*ids, first])[len("the cat"):]
  assert cli(words_folder, ["generate", "the cat"], "--max-tokens", "1", "--logit-bias", f'{{"{first}": -100}}') == 0
  assert capsys.readouterr().out == f"the cat{text}\n"
  constraint = '{"regex": "[xyz]{3}"}'
  assert cli(words_folder, ["generate", "the cat"], "--max-tokens", "12", "--structured-outputs", constraint) == 0
  assert re.fullmatch("the cat[xyz]{3}\n", capsys.readouterr().out)


def test_list_and_number_options_apply_to_the_request(words_folder, words_llm, capsys):
  ids = words_llm.tokenizer.encode("the cat")
  logits = reference_logits(words_folder, ids)[-1]
  best = max((259, 319), key=lambda i: logits[i])
  text = words_llm.tokenizer.decode([*ids, best])[len("the cat"):]
  options = ["--allowed-token-ids", "259", "319", "--bad-words", "house", "dog", "--logprobs", "2", "--max-tokens", "1"]
  assert cli(words_folder, ["generate", "the cat"], *options) == 0
  assert capsys.readouterr().out == f"the cat{text}\n", "log probabilities are not printed"
  plain = reference_greedy(words_folder, ids, 12)
  assert len({*plain}) < 12, "the text must repeat tokens"
  assert cli(words_folder, ["generate", "the cat"], "--max-tokens", "12", "--repetition-penalty", "100") == 0
  assert capsys.readouterr().out != "the cat" + expected_text(words_llm, words_folder, "the cat", 12) + "\n"


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
  folder = tiny_model(tmp_path_factory.mktemp("chat"), words=True)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
  return folder


@pytest.fixture
def answer(chat_folder, words_llm):
  """Return a function that returns the five tokens after a conversation, from the reference."""
  encode, decode = words_llm.tokenizer.encode, words_llm.tokenizer.decode

  def answer(prompt):
    ids = encode(prompt, False)
    return decode([*ids, *reference_greedy(chat_folder, ids, 5)])[len(decode(ids)):]
  return answer


def test_chat_prompt_contains_the_whole_conversation(chat_folder, answer, capsys, monkeypatch):
  monkeypatch.setattr("sys.stdin", io.StringIO("hello\nis that all\n"))
  assert cli(chat_folder, ["chat"], "--max-tokens", "5") == 0
  first = answer("user: hello\n")
  second = answer(f"user: hello\nassistant: {first}\nuser: is that all\n")
  assert capsys.readouterr().out.rstrip("\n") == f"{first}\n{second}"


def test_chat_runs_commands_and_drops_messages_that_are_too_long(chat_folder, answer, capsys, monkeypatch):
  long = "is that all " * 99
  lines = [long, "hello", long, "is that all", "/new", "hello", "/system be kind", "hello", "/exit", "hello"]
  monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
  assert cli(chat_folder, ["chat"], "--max-tokens", "5") == 0
  first = answer("user: hello\n")
  expected = [first, answer(f"user: hello\nassistant: {first}\nuser: is that all\n"), first,
              answer("system: be kind\nuser: hello\n")]
  printed = capsys.readouterr()
  assert printed.out.rstrip("\n") == "\n".join(expected)
  assert len([line for line in printed.err.splitlines() if "maximum context length" in line]) == 2


def test_ctrl_c_stops_the_answer_then_ends_the_chat(tmp_path):
  folder = tiny_model(tmp_path, words=True, max_position_embeddings=20000)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
  command = [sys.executable, "-m", "tinyvllm", "chat", "--model", folder, "--max-tokens", "19000", "--ignore-eos",
             "--max-num-batched-tokens", "8", "--max-num-seqs", "1"]
  run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
  try:
    for _ in range(2):
      run.stdin.write(b"hello\n")
      run.stdin.flush()
      assert run.stdout.read(40), "the answer must start"
      run.send_signal(signal.SIGINT)
      while run.stdout.read(1) != b"\n": pass   # the line ends thousands of tokens early
    run.stdin.write(b"/exit\n")
    run.stdin.flush()
    assert run.wait(60) == 0
  finally: run.kill()


def test_ctrl_c_at_the_prompt_ends_the_chat(chat_folder):
  command = [sys.executable, "-m", "tinyvllm", "chat", "--model", chat_folder, *FLAGS, "--max-tokens", "3"]
  run = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
  try:
    run.stdin.write(b"hello\n")
    run.stdin.flush()
    while run.stdout.read(1) != b"\n": pass
    # The first signal may still stop the answer
    wait_until(lambda: run.poll() is not None or run.send_signal(signal.SIGINT), "the process ends", 60)
    assert run.returncode == 130
  finally: run.kill()


def test_repeated_stop_option_adds_strings(words_folder, words_llm, capsys):
  text = expected_text(words_llm, words_folder, "the cat", 12)
  options = ["--stop", "#", "--stop", text[6:8], "--max-tokens", "12", "--ignore-eos"]
  assert cli(words_folder, ["generate", "the cat"], *options) == 0
  assert capsys.readouterr().out == "the cat" + text[:text.index(text[6:8])] + "\n"


def test_log_level_error_hides_info_lines(words_folder):
  flags = ["--model", words_folder, "--max-tokens", 3, *FLAGS]
  assert "KV cache:" in process("generate", "the cat", *flags).stderr
  assert process("generate", "the cat", *flags, "--log-level", "error").stderr == ""


@pytest.mark.parametrize("command,words", [
  (["generate", ""], "empty"), (["generate", "hello", "--temperature", "-1"], "temperature"),
  (["generate", "hello", "--max-model-len", "100000"], "max_model_len"), (["chat"], "template"),
  (["generate", "hello", "--logit-bias", '{"320": 1}'], "logit_bias"),
  (["generate", "hello", "--structured-outputs", '{"regex": "(["}'], "structured_outputs"),
])
def test_invalid_option_value_is_one_line_and_exit_code_1(words_folder, command, words, capsys, monkeypatch):
  monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
  assert main([*command[:2], "--model", str(words_folder), *FLAGS, *command[2:]]) == 1
  err = capsys.readouterr().err
  lines = [line for line in err.splitlines() if line.startswith("tinyvllm: ")]
  assert len(lines) == 1 and words in lines[0] and err.endswith(lines[0] + "\n") and "Traceback" not in err


def test_missing_model_is_one_line_and_exit_code_1(tmp_path, capsys):
  assert main(["generate", "hello", "--model", str(tmp_path / "nowhere")]) == 1
  assert "nowhere" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("arguments", ["generate a --config x", "chat --max-tok 3", "serve --conf x", "serve --host-",
                                       "convert a b --hel", "doctor --sec 1", "--vers doctor"])
def test_abbreviated_flag_is_exit_code_2(arguments, capsys):
  """`--config x` would otherwise set --config-format."""
  with pytest.raises(SystemExit) as e: main(arguments.split())
  assert e.value.code == 2 and "unrecognized arguments: --" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", ["", "generate", "generate a --no-such", "generate a --top-k x",
                                       "generate a --logit-bias {", "generate a --logprobs x"])
def test_unknown_argument_is_exit_code_2(arguments):
  with pytest.raises(SystemExit) as e: main(arguments.split())
  assert e.value.code == 2


def help_text(command, flag="--help"):
  """Return what `tinyvllm COMMAND --help` prints on a terminal of 80 columns."""
  run = process(*command.split(), flag, COLUMNS="80")
  assert run.returncode == 0 and not run.stderr
  return run.stdout


def help_entries(text):
  """Return the help text of each option, by its flags."""
  entries = re.findall(r"^  (-\S.*?)(?:  +|\n {32})(\S.*(?:\n {32}.*)*)", text, re.M)
  return {flags: " ".join(words.split()) for flags, words in entries}


@pytest.mark.parametrize("command", ["", "generate", "chat", "serve", "convert", "doctor"])
def test_help_fits_on_two_screens(command):
  lines = help_text(command).splitlines()
  assert len(lines) <= 48 and max(map(len, lines)) <= 80


@pytest.mark.parametrize("command,kinds", [
  ("generate", [EngineConfig, SamplingParams]), ("chat", [EngineConfig, SamplingParams]),
  ("serve", [EngineConfig, ServerConfig])])
def test_help_all_every_option_has_text_and_default(command, kinds):
  text = help_text(command, "--help-all")
  entries = help_entries(text)
  flags = {re.sub(r"^--(\[no-])?", "", words.split()[0]) for words in entries}
  fields = {field.name.replace("_", "-") for kind in kinds for field in dataclasses.fields(kind)} - {"n"}
  assert fields | {"model", "log-level"} <= flags, "a terminal shows one sample, so --n is missing"
  for name, words in entries.items():
    assert len(words.partition("(default")[0].split()) >= 3, name
    assert re.search(r"\(default: [^)]+\)$", words) or name.startswith(("-h,", "--help-all")), name
    assert "None" not in words, name
  assert "--pipeline-parallel-size" not in text, "vLLM's flags without effect stay hidden"


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_help_is_grouped_and_hides_rare_flags(command):
  text, everything = help_text(command), help_text(command, "--help-all")
  headings = ["options", "Model", "Memory", "Scheduling", "Decoding", "Server"]
  assert re.findall(r"^(\w+):$", text, re.M) == re.findall(r"^(\w+):$", everything, re.M) == headings
  assert "--max-model-len" in text and "--block-size" not in text and "--block-size" in everything
  assert "--[no-]enable-prefix-caching" in text


def test_module_prints_only_the_text_to_stdout(words_folder, words_llm):
  run = process("generate", "the cat", "--model", words_folder, "--max-tokens", 3, *FLAGS, "--max-num-seqs", 1)
  assert run.returncode == 0, run.stderr
  assert run.stdout == "the cat" + expected_text(words_llm, words_folder, "the cat", 3) + "\n"


@pytest.mark.parametrize("env", [{"DEV": "CPU", "CC": "/nonexistent/clang"}, {"DEV": "NOSUCH"}], ids=str)
def test_missing_device_or_compiler_error_names_the_remedy(words_folder, env, tmp_path):
  run = process("generate", "hello", "--model", words_folder, *FLAGS, **env, CACHEDB=str(tmp_path / "cache.db"))
  assert run.returncode == 1 and run.stdout.strip() in ("", "hello")
  last = run.stderr.splitlines()[-1]
  assert "Traceback" not in run.stderr and last.startswith("tinyvllm: ") and "pip install 'tinyvllm[cpu]'" in last


def test_module_level_generate_and_generate_stream(words_folder, words_llm):
  text = expected_text(words_llm, words_folder, "the cat", 6)
  assert generate("the cat", model=words_folder, max_tokens=6) == text
  pieces = list(generate_stream("the cat", model=words_folder, max_tokens=6))
  assert "".join(pieces) == text and len(pieces) > 1 and all(pieces)
  with pytest.raises(ValueError, match="max_token"): generate("the cat", model=words_folder, max_token=6)


@pytest.mark.parametrize("error", [CompileError("unknown type"), subprocess.CalledProcessError(1, ["clang"])])
def test_compile_error_is_one_line_and_exit_code_1(monkeypatch, capsys, error):
  def fail(*_, **__): raise error
  monkeypatch.setattr("tinyvllm_extra.cli.LLM", fail)
  assert main(["generate", "Hello"]) == 1
  assert capsys.readouterr().err == f"tinyvllm: {error}\n"


def test_missing_package_is_one_line_and_exit_code_1(chat_folder, capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, "jinja2.sandbox", None)
  monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
  assert cli(chat_folder, ["chat"]) == 1
  printed = capsys.readouterr()
  last_line = printed.err.splitlines()[-1]
  assert "jinja2" in last_line and "pip install 'tinyvllm[hf]'" in last_line
  assert printed.out == "" and "Traceback" not in printed.err


@dataclasses.dataclass(frozen=True)
class Described(Options):
  """Options with each kind of type and default."""
  sizes: list[int] | None = option(None, "Sizes in bytes (default: none)")
  mode: str = option("a", "Mode of operation", choices=("a", "b"))
  ratio: float | None = option(None, "Ratio, 100% at most (default: half)")
  limit: int | None = option(3, "Maximum number of retries", min=1, max=9)
  fast: bool = option(True, "Skip the slow part")


def test_add_flags_reads_types_and_help_from_metadata():
  parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
  add_flags(parser, Described)
  offsets = [parser.format_help().index(text) for text in ("Sizes", "Mode of", "Ratio", "Maximum number", "Skip")]
  assert offsets == sorted(offsets), "fields of no group are listed in their order"
  flags = ["--sizes", "1", "2", "--sizes", "3", "--ratio", "0.5", "--limit", "4", "--mode", "b", "--no-fast"]
  args = vars(parser.parse_args(flags))
  assert select_options(args, Described) == {"sizes": [1, 2, 3], "ratio": 0.5, "limit": 4, "mode": "b", "fast": False}
  entries = help_entries(parser.format_help())
  expected = {"--sizes INT [INT ...]": "Sizes in bytes (default: none)",
              "--mode {a,b}": "Mode of operation (default: a)",
              "--ratio FLOAT": "Ratio, 100% at most (default: half)", "--[no-]fast": "Skip the slow part (default: on)",
              "--limit INT": "Maximum number of retries (default: 3)"}
  assert {flags: words for flags, words in entries.items() if flags in expected} == expected
