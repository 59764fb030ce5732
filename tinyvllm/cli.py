"""The command line: `tinyvllm generate PROMPT` and `tinyvllm chat`, both streaming."""
import argparse, json, logging, sys
from dataclasses import fields
from typing import Any, get_args

from .config import EngineConfig, kind_of, logger
from .engine import LLM
from .scheduler import SamplingParams

OPTIONS = (EngineConfig, SamplingParams)   # every field of them is a flag


def _stream(llm: LLM, prompt: Any, params: SamplingParams, shown: str = "") -> str:
  text = ""
  for output in llm.generate_stream(prompt, params):
    print(shown + output.outputs[0].text, end="", flush=True)
    text, shown = text + output.outputs[0].text, ""
    logger.setLevel(logging.WARNING)   # from here on a line of the log would break the text
  print()
  return text


def main(argv: list[str] | None = None) -> int:
  """Run the command line. Returns the exit code: 0, or 1 after one line that says what to change."""
  parser = argparse.ArgumentParser(prog="tinyvllm", description="A small, fast LLM engine on tinygrad.")
  commands = parser.add_subparsers(dest="command", required=True)
  for name, text in (("generate", "complete a prompt"), ("chat", "talk with a chat model, a line at a time")):
    command = commands.add_parser(name, help=text, description=text, argument_default=argparse.SUPPRESS)
    if name == "generate": command.add_argument("prompt")
    command.add_argument("--model", default=None, help="a model's folder; default: the shipped model")
    for f in {f.name: f for options in OPTIONS for f in fields(options) if f.name != "n"}.values():   # one text
      kind, flag = (*get_args(kind_of(f)[0]), kind_of(f)[0])[0], "--" + f.name.replace("_", "-")
      default = f"default: {0.0 if f.name == 'temperature' else f.default}"
      if kind is bool: command.add_argument(flag, action=argparse.BooleanOptionalAction, help=default)
      elif kind is list: command.add_argument(flag, nargs="+", type=kind_of(f)[1][0], help=default)
      elif kind not in (int, float, str): command.add_argument(flag, type=json.loads, metavar="JSON", help=default)
      else: command.add_argument(flag, type=kind, metavar=kind.__name__.upper(), help=default)
  args = vars(parser.parse_args(argv))
  logging.basicConfig(format="%(message)s")
  logger.setLevel(logging.INFO)   # ours, not every library's
  engine, sampling = ({f.name: args[f.name] for f in fields(options) if f.name in args} for options in OPTIONS)
  messages: list[dict[str, str]] = []
  try:
    params, llm = SamplingParams(**{"temperature": 0.0, **sampling}), LLM(args["model"], **engine)
    if args["command"] == "generate": _stream(llm, args["prompt"], params, shown=args["prompt"])
    while args["command"] == "chat":
      messages.append({"role": "user", "content": input("> " if sys.stdin.isatty() else "")})
      messages.append({"role": "assistant", "content": _stream(llm, llm.chat_prompt(messages), params)})
  except (ValueError, RuntimeError) as e: return print(f"tinyvllm: {e}", file=sys.stderr) or 1
  except (KeyboardInterrupt, EOFError): print()
  return 0


if __name__ == "__main__": sys.exit(main())
