"""The command line: `tinyvllm generate PROMPT` and `tinyvllm chat`, both streaming, `tinyvllm serve` and `tinyvllm
doctor`. It is no part of the engine, and needs nothing but the engine's own dependencies."""
import argparse, dataclasses, json, logging, os, signal, subprocess, sys
from typing import Any, get_args

from tinygrad.device import CompileError

from tinyvllm import LLM, SamplingParams, __version__
from tinyvllm.config import NO_EFFECT, EngineConfig, kind_of, logger
from tinyvllm.tokenizer import optional

FAILURES = (ValueError, RuntimeError, CompileError, subprocess.CalledProcessError)   # the last two: of a compiler
# What has a main of its own: what it is for, its module, and the extra that brings what that needs
TOOLS = {"serve": ("answer HTTP", "tinyvllm_server", "server"),
         "doctor": ("try each device", "tinyvllm_cli.doctor", "cpu")}


def _show(outputs: Any, text: str = "") -> str:
  """Print a text as more of it comes, and return it. text: what it begins with."""
  shown = 0
  for output in outputs:
    text += output.outputs[0].text
    print(text[shown:], end="", flush=True)
    shown = len(text)
    logger.setLevel(logging.WARNING)   # from here on a line of the log would break the text
  return print() or text


def _tool(name: str) -> Any: return optional(*TOOLS[name][1:])


def add_flags(command: argparse.ArgumentParser, *options: Any) -> None:
  """A flag for each field of some dataclasses."""
  for f in {f.name: f for kind in options for f in dataclasses.fields(kind) if f.name != "n"}.values():   # one text
    kind, limits = kind_of(f)
    kind = (*get_args(kind), kind)[0]   # of int | None, int
    form: dict[str, Any] = {"type": json.loads, "metavar": "JSON"}
    if kind in (int, float, str): form = {"type": kind, "metavar": kind.__name__.upper()}
    elif kind is bool: form = {"action": argparse.BooleanOptionalAction}
    elif kind is list: form = {"nargs": "+", "type": limits[0]}
    default = 0.0 if f.name == "temperature" else f.default
    command.add_argument("--" + f.name.replace("_", "-"), help=f"default: {default}", **form)
  def value(text: str) -> Any: return int(text) if text.isdecimal() else text
  for name, values in NO_EFFECT.items():   # vLLM's, so that its commands are taken as they are
    form = {"action": argparse.BooleanOptionalAction} if isinstance(values[0], bool) else {"type": value}
    command.add_argument("--" + name.replace("_", "-"), help=argparse.SUPPRESS, **form)


def given(args: dict[str, Any], kind: Any) -> dict[str, Any]:
  """Those of a dataclass's fields that the command line names."""
  names = [f.name for f in dataclasses.fields(kind)] + [*NO_EFFECT] * (kind is EngineConfig)
  return {name: args[name] for name in names if name in args}


def main(argv: list[str] | None = None) -> int:
  """Run the command line. Returns the exit code: 0, 130 for Ctrl-C, or 1 after one line that says what to
  change."""
  parser = argparse.ArgumentParser(prog="tinyvllm", description="A small, fast LLM engine on tinygrad.")
  parser.add_argument("--version", action="version", version=__version__)
  commands = parser.add_subparsers(dest="command", required=True)
  for name, (text, *_) in {"generate": ["complete a prompt"], "chat": ["talk, a line at a time"], **TOOLS}.items():
    command = commands.add_parser(name, help=text, description=text, argument_default=argparse.SUPPRESS)
    if name == "generate": command.add_argument("prompt")
    for flag, of in {"model": "folder; default: the shipped one", "url": "server to ask", "api-key": "its key"}.items():
      command.add_argument("--" + flag, default=None, help=of)
    add_flags(command, EngineConfig, SamplingParams)
  try:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in TOOLS: return _tool(argv[0]).main(argv[1:])
    args = vars(parser.parse_args(argv))
    # No KeyboardInterrupt, which is lost where it comes into a __del__ of tinygrad's
    signal.signal(signal.SIGINT, lambda *_: os.write(1, b"\n") and os._exit(130))
    engine = given(args, EngineConfig)
    params = SamplingParams(**{"temperature": 0.0, **given(args, SamplingParams)})
    llm = _tool("serve").Remote.of(args, engine) if args["url"] or args["api_key"] else LLM(args["model"], **engine)
    if args["command"] == "generate": _show(llm.generate_stream(args["prompt"], params), args["prompt"])
    messages: list[dict[str, str]] = []
    while args["command"] == "chat":
      messages.append({"role": "user", "content": input("> " if sys.stdin.isatty() else "")})
      messages.append({"role": "assistant", "content": _show(llm.generate_stream({"messages": [*messages]}, params))})
  except FAILURES as e: return print(f"tinyvllm: {e}", file=sys.stderr) or 1
  except EOFError: print()
  return 0
