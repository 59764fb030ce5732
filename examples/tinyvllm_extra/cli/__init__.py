"""The command line: `tinyvllm run MODEL` and `tinyvllm generate PROMPT`, which print text as it is generated, `tinyvllm
serve`, `tinyvllm convert` and `tinyvllm doctor`. The first two need the core's dependencies only."""
import argparse, os, signal, subprocess, sys

from tinygrad.device import CompileError

from tinyvllm import LLM, SamplingParams, __version__
from tinyvllm.config import JsonObject
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.packages import MissingPackage, optional

from . import chat
from .chat import CHAT, print_error, print_stream, start
from .client import Remote
from .flags import add_flags, parse_flags, select_options

# Errors that are printed in one line; the last two come from a compiler
FAILURES = (ValueError, MissingPackage, RuntimeError, CompileError, subprocess.CalledProcessError)
# Commands with their own `main`: help text, module, and the extra that installs their packages
COMMANDS = {"serve": ("Serve the OpenAI API over HTTP", "tinyvllm_extra.cli.serve", "server"),
            "convert": ("Convert a GGUF file to a model folder", "tinyvllm_extra.cli.convert", "hf"),
            "doctor": ("Test the devices of this machine", "tinyvllm_extra.cli.doctor", "cpu")}


def parse(argv: list[str]) -> JsonObject:
  """Return the arguments of `run`, `chat` or `generate`, without options that are not set."""
  parser = argparse.ArgumentParser(prog="tinyvllm", description="Run and serve language models on tinygrad.",
                                   allow_abbrev=False)
  parser.add_argument("--version", action="version", version=__version__, help="Show the version and exit")
  commands = parser.add_subparsers(dest="command", required=True, title="commands", metavar="COMMAND")
  for name, (text, *_) in {"run": [CHAT], "generate": ["Complete a prompt"], **COMMANDS}.items():
    usage = f"tinyvllm {name} {'PROMPT' if name == 'generate' else '[MODEL]'} [options]"
    command = commands.add_parser(name, help=text, description=text, usage=usage, argument_default=argparse.SUPPRESS,
                                  aliases=["chat"] if name == "run" else [])
    if name == "generate": command.add_argument("prompt", help=argparse.SUPPRESS)
    else: command.add_argument("model", nargs="?", help=argparse.SUPPRESS)
    if name == "run": command.add_argument("--verbose", action="store_true", help="Print tokens/s after each answer")
    add_flags(command, LLMConfig, SamplingParams)
    server = command.add_argument_group("Server")
    server.add_argument("--url", default=None, help="URL of a running server (default: run here)")
    server.add_argument("--api-key", default=None, help="API key for that server (default: none)")
  return {"model": None, **parse_flags(parser, argv)}


def run(args: JsonObject) -> int:
  """Run a command except COMMANDS and return the exit code. Ctrl-C stops a chat's answer, or else ends the process."""

  def interrupt(*_: object) -> None:   # not a KeyboardInterrupt, which is lost when raised within a __del__ of tinygrad
    os.write(1, b"\n")
    os._exit(130)

  engine = select_options(args, LLMConfig)
  signal.signal(signal.SIGINT, interrupt)
  settings = select_options(args, SamplingParams)
  if args["command"] == "generate": settings = {"temperature": 0.0, **settings}
  SamplingParams(**settings)   # its checks, before the model is loaded
  llm = Remote(args, engine) if args["url"] or args["api_key"] else LLM(args["model"], **engine)
  if args["command"] != "generate": return chat.Chat(llm, settings, "verbose" in args).run()
  print_stream(start(llm, args["prompt"], settings), args["prompt"])
  return 0


def main(argv: list[str] | None = None) -> int:
  """Run the command line. Return the exit code: 0, 130 after Ctrl-C, or 1 after an error in one line."""
  argv = sys.argv[1:] if argv is None else argv
  try:
    if argv and argv[0] in COMMANDS: return optional(*COMMANDS[argv[0]][1:], f"tinyvllm {argv[0]}").main(argv[1:])
    return run(parse(argv))
  except KeyboardInterrupt: return 130
  except FAILURES as error: return print_error(error)
