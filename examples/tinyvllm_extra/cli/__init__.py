"""The command line: `tinyvllm generate PROMPT` and `tinyvllm chat`, both streaming, `tinyvllm serve`, `tinyvllm
convert` and `tinyvllm doctor`. It is no part of the engine, and needs nothing but the engine's own dependencies."""
import argparse, contextlib, dataclasses, inspect, itertools, json, logging, os, re, signal, subprocess, sys, threading
from collections.abc import Iterator
from typing import Any, get_args

from tinygrad.device import CompileError

from tinyvllm import LLM, SamplingParams, __version__
from tinyvllm.config import NO_EFFECT, EngineConfig, kind_of, logger
from tinyvllm_extra.huggingface import optional

from tinyvllm_extra.gguf import folder_of as folder_of

FAILURES = (ValueError, RuntimeError, CompileError, subprocess.CalledProcessError)   # the last two: of a compiler
# What has a main of its own: what it is for, its module, and the extra that brings what that needs
TOOLS = {"serve": ("answer HTTP", "tinyvllm_extra.server", "server"),
         "convert": ("make a model's folder of a GGUF file", "tinyvllm_extra.gguf", "hf"),
         "doctor": ("try each device", "tinyvllm_extra.cli.doctor", "cpu")}


def _show(outputs: Any, text: str = "", going: threading.Event | None = None) -> str:
  """Print a text as more of it comes, as long as it may go on, and return it. text: what it begins with."""
  shown = 0
  with contextlib.closing(outputs):
    for output in outputs:
      text += output.outputs[0].text
      print(text[shown:], end="", flush=True)
      shown = len(text)
      logger.setLevel(max(logger.level, logging.WARNING))   # from here on a line of the log would break the text
      if going and not going.is_set(): break
  return print() or text


def _lines() -> Iterator[str]:
  asked = sys.stdin.isatty()
  with contextlib.suppress(EOFError):
    while True: yield input("> " if asked else "")
  if asked: print()


def _talk(llm: Any, params: SamplingParams, answering: threading.Event) -> int:
  """Answer each line, and drop those that get none, as they are too long, say. Returns 1 if the last did, else 0."""
  messages: list[dict[str, str]] = []
  failed = 0
  for line in itertools.takewhile(lambda line: line != "/exit", _lines()):
    command, _, text = line.partition(" ")
    if command == "/new": messages = []
    elif command == "/system": messages = [{"role": "system", "content": text}]
    else:
      turn = [*messages, {"role": "user", "content": line}]
      answering.set()
      try: messages = [*turn, {"role": "assistant", "content": _show(
        llm.generate_stream({"messages": turn}, params), going=answering)}]
      except ValueError as e:
        failed = 1
        print(f"tinyvllm: {e}", file=sys.stderr)
      else: failed = 0
      answering.clear()
  return failed


def _tool(name: str) -> Any: return optional(*TOOLS[name][1:])


def add_flags(command: argparse.ArgumentParser, *options: Any) -> None:
  """A flag for each field of some dataclasses, whose comments are the help."""
  taken = {"n"}   # one text
  for options_kind in options:
    group = command.add_argument_group(options_kind.__doc__.split(",")[0].strip("."))
    comments = dict(re.findall(r"^  (\w+): .*?  # (.*)$", inspect.getsource(options_kind), re.M))
    for f in dataclasses.fields(options_kind):
      if f.name in taken: continue
      taken.add(f.name)
      kind, limits = kind_of(f)
      kind = (*get_args(kind), kind)[0]   # of int | None, int
      form: dict[str, Any] = {"type": json.loads, "metavar": "JSON"}
      if kind in (int, float, str): form = {"type": kind, "metavar": kind.__name__.upper()}
      elif kind is bool: form = {"action": argparse.BooleanOptionalAction}
      elif kind is list: form = {"nargs": "+", "type": limits[0], "action": "extend", "metavar": f.name.upper()}
      if kind is str and limits: form["metavar"] = "{" + ",".join(limits) + "}"
      default = 0.0 if f.name == "temperature" else f.default
      said = f"{comments[f.name]} (default: {default})".replace("%", "%%")
      group.add_argument("--" + f.name.replace("_", "-"), help=said, **form)
  levels = ["debug", "info", "warning", "error"]
  command.add_argument("--log-level", choices=levels, default="info", help="what to log at least (default: info)")
  def value(text: str) -> Any: return int(text) if text.isdecimal() else text
  for name, values in NO_EFFECT.items():   # vLLM's, so that its commands are taken as they are
    form = {"action": argparse.BooleanOptionalAction} if isinstance(values[0], bool) else {"type": value}
    command.add_argument("--" + name.replace("_", "-"), help=argparse.SUPPRESS, **form)


def set_log_level(args: dict[str, Any]) -> None:
  if args["log_level"] != "info": logger.setLevel(args["log_level"].upper())


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
  talk = "talk, a line at a time: /new begins anew, /system TEXT does so with that, /exit or the input's end ends it"
  for name, (text, *_) in {"generate": ["complete a prompt"], "chat": [talk], **TOOLS}.items():
    command = commands.add_parser(name, help=text, description=text, argument_default=argparse.SUPPRESS)
    if name == "generate": command.add_argument("prompt")
    for flag, of in {"model": "folder or GGUF; default: shipped", "url": "server to ask", "api-key": "its key"}.items():
      command.add_argument("--" + flag, default=None, help=of)
    add_flags(command, EngineConfig, SamplingParams)
  try:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in TOOLS: return _tool(argv[0]).main(argv[1:])
    args = vars(parser.parse_args(argv))
    set_log_level(args)
    remote = args["url"] or args["api_key"]
    if not remote: args["model"] = folder_of(args["model"])
    answering = threading.Event()
    def interrupt(*_: Any) -> None:   # no KeyboardInterrupt, which is lost where it comes into a __del__ of tinygrad's
      if answering.is_set(): return answering.clear()   # the answer stops, the chat goes on
      os.write(1, b"\n")
      os._exit(130)
    signal.signal(signal.SIGINT, interrupt)
    engine = given(args, EngineConfig)
    params = SamplingParams(**{"temperature": 0.0, **given(args, SamplingParams)})
    llm = _tool("serve").Remote.of(args, engine) if remote else LLM(args["model"], **engine)
    if args["command"] == "generate": _show(llm.generate_stream(args["prompt"], params), args["prompt"])
    else: return _talk(llm, params, answering)
  except KeyboardInterrupt: return 130
  except FAILURES as e: return print(f"tinyvllm: {e}", file=sys.stderr) or 1
  return 0
