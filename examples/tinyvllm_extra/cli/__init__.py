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
from tinyvllm.config import JsonObject
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.packages import MissingPackage, optional
from tinyvllm_extra.sampling.params import SamplingParams
from tinyvllm_extra.serving.server_config import ServerConfig

from .flags import BenchConfig, CommandParser, add_flags, parse_flags

FAILURES = (ValueError, MissingPackage, RuntimeError, subprocess.CalledProcessError)   # printed in one line


def make_parser(argv: list[str]) -> CommandParser:
  """Return the parser of a command line. It sets "module", whose `main(args)` runs the command, and "extra", which
  installs the module's packages."""
  parser = CommandParser(prog="tinyvllm", description=__doc__)
  parser.add_argument("-V", "--version", action="version", version=__version__, help="Show the version and exit")
  commands = parser.add_subparsers(title="commands", metavar="COMMAND")
  parser.commands = commands.choices

  def add(name: str, text: str, module: str, extra: str = "hf", words: str = "", *options: type) -> CommandParser:
    usage = f"tinyvllm {name} {words} [options]" if words else None
    command = commands.add_parser(name, help=text, description=f"{text}.", usage=usage,
                                  aliases=["chat"] if name == "run" else [])
    command.set_defaults(module=f"tinyvllm_extra.cli.{module}", extra=extra, root=parser)
    if options: add_flags(command, words, argv, *options)
    return command

  for name, text, words in (("run", "Chat, or answer one PROMPT (-: stdin)", "[MODEL [PROMPT]]"),
                            ("generate", "Complete a PROMPT (-: stdin)", "PROMPT")):
    command = add(name, text, "chat", "hf", words, LLMConfig, SamplingParams)
    if name == "run": command.add_argument("--verbose", action="store_true", help="Print token rates (default: off)")
    server = command.add_argument_group("Server")
    command.add_variable("url", "URL of a running server (default: run here)", server, metavar="URL")
    command.add_variable("api_key", "API key for that server (default: none)", server, metavar="STR")
    command.add_variable("prompt", "The prompt, instead of a word (default: none)", metavar="STR")
  add("serve", "Serve the OpenAI API over HTTP", "serve", "server", "[MODEL]", LLMConfig, ServerConfig)
  add("bench", "Measure speed; MODE: throughput, serve", "bench", "hf", "[MODE] [MODEL]", LLMConfig, BenchConfig)
  for name, text, words in (("pull", "Download a model and print its path", "MODEL"),
                            ("list", "List downloaded models", ""), ("rm", "Delete downloaded models", "MODEL...")):
    command = add(name, text, "downloads")
    command.add_argument("--download-dir", help="Folder for downloads (default: the hub's cache)", metavar="DIR")
    if words: command.add_argument("names", nargs="+" if name == "rm" else 1, metavar="MODEL", help="ORG/NAME[:TYPE]")
  command = add("doctor", "Test the devices of this machine", "doctor", "cpu")
  command.add_argument("--model", default=None, help="Also check if this folder or GGUF file fits (default: none)")
  command.add_argument("--seconds", type=float, default=1.0, help="Seconds per bandwidth test (default: 1)")
  command.add_argument("--kv-cache-dtype", choices=("auto", "fp8", "int8"), default="auto", help="KV cache's dtype")
  command.add_argument("--json", action="store_true", default=False, help="Print the report as JSON (default: text)")
  command = add("completion", "Print a script that completes flags in a shell", "completion", "completion")
  command.add_argument("shell", choices=("bash", "zsh", "fish"), help="Name of the shell")
  return parser


def main(argv: list[str] | None = None) -> int:
  """Run the command line. Return the exit code: 0, 130 after Ctrl-C, or 1 after an error in one line."""
  args: JsonObject = {"variables": {}}
  try:
    try:
      argv = (sys.argv[1:] if argv is None else argv) or ["--help"]
      args |= parse_flags(make_parser(argv), argv)
      return optional(args["module"], args["extra"], f"tinyvllm {args['command']}").main(args) or 0
    finally: sys.stdout.flush()
  except KeyboardInterrupt: return 130
  except BrokenPipeError:   # of a reader that wants no more, such as head
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141
  except Exception as error:
    # A CompileError is known by its name, as importing it takes long
    if not isinstance(error, FAILURES) and type(error).__name__ != "CompileError": raise
    variable = args["variables"].get(getattr(error, "parameter", None))
    print(f"tinyvllm: {f'{variable}: ' if variable else ''}{error}", file=sys.stderr)
    return 1
