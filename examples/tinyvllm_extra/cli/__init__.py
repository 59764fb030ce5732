"""Run and serve language models on tinygrad.

examples:
  tinyvllm run                            Chat with the bundled model
  tinyvllm run HuggingFaceTB/SmolLM2-135M-Instruct "Why is the sky blue?"
  tinyvllm serve HuggingFaceTB/SmolLM2-135M-Instruct
  eval "$(tinyvllm completion bash)"      Complete commands and flags with Tab

Variables set flags, too: TINYVLLM_MODEL, TINYVLLM_PORT and so on, for each
flag that `tinyvllm COMMAND --help` shows.
"""
# The text above is the help. This module parses the command line and prints errors in one line. It imports neither
# tinygrad nor packages of extras; a command's module does.
import os, subprocess, sys

from tinyvllm import __version__
from tinyvllm_extra import options
from tinyvllm_extra.sampling.params import SamplingParams
from tinyvllm_extra.serving.server_config import ServerConfig

from .flags import FLAGS, BenchConfig, CommandParser, add_flags, parse_flags

FAILURES = (ValueError, options.MissingPackage, RuntimeError, subprocess.CalledProcessError)   # printed in one line
OPTIONS = {x.__name__: x for x in (options.LLMConfig, SamplingParams, ServerConfig, BenchConfig)}


def make_parser(argv: list[str]) -> CommandParser:
  """Return the parser of a command line. It sets "module", whose `main(args)` runs the command, and "extra", which
  installs the module's packages."""
  parser = CommandParser(prog="tinyvllm", description=__doc__)
  parser.add_argument("-V", "--version", action="version", version=__version__, help="Show the version and exit")
  commands = parser.add_subparsers(title="commands", metavar="COMMAND")
  parser.commands = commands.choices

  for name, row in FLAGS["commands"].items():
    words = row.get("words", "")
    command = commands.add_parser(name, help=row["text"], description=f"{row['text']}.", aliases=row.get("aliases", []),
                                  usage=f"tinyvllm {name} {words} [options]" if words else None)
    command.set_defaults(module=f"tinyvllm_extra.{row['module']}", extra=row.get("extra", "hf"), root=parser)
    if words: add_flags(command, words, argv, *[OPTIONS[x] for x in row["options"]], **row.get("variables", {}))
    for flag, form in row.get("arguments", {}).items():
      command.add_argument(flag, **form | ({"type": float} if type(form.get("default")) is float else {}))
  return parser


def main(argv: list[str] | None = None) -> int:
  """Run the command line. Return the exit code: 0, 130 after Ctrl-C, or 1 after an error in one line."""
  args: dict = {"variables": {}}
  try:
    try:
      argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
      args |= parse_flags(make_parser(argv), argv)
      return options.optional(args["module"], args["extra"], f"tinyvllm {args['command']}").main(args) or 0
    finally: sys.stdout.flush()
  except KeyboardInterrupt: return 130
  except BrokenPipeError:   # the reader, such as head, has closed the pipe
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
  except Exception as error:
    # A CompileError is known by its name, as importing it takes long
    if not isinstance(error, FAILURES) and type(error).__name__ != "CompileError": raise
    variable = args["variables"].get(getattr(error, "parameter", None))
    print(f"tinyvllm: {f'{variable}: ' if variable else ''}{error}", file=sys.stderr)
    return 1
