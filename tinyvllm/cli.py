"""The command line: `tinyvllm generate PROMPT` and `tinyvllm chat`, both streaming. Every option of EngineConfig and SamplingParams is a flag."""
import argparse
import logging
import sys
from dataclasses import Field, fields
from typing import Any

from .config import EngineConfig
from .sequence import SamplingParams


def _add_flags(parser: argparse.ArgumentParser, options: type) -> None:
  group = parser.add_argument_group(options.__name__)
  for f in fields(options): group.add_argument("--" + f.name.replace("_", "-"), default=argparse.SUPPRESS, help=f.metadata["help"], **_flag(f))


def _flag(f: Field) -> dict[str, Any]:
  kind = f.metadata["kind"]
  if kind is bool: return {"action": argparse.BooleanOptionalAction}
  if kind is list: return {"nargs": "+", "type": int if f.name.endswith("ids") else str, "metavar": f.name.upper()}
  return {"type": kind, "metavar": f.name.upper(), "choices": f.metadata["choices"] or None}


def main(argv: list[str] | None = None) -> int:
  """Run the command line; the exit code is 0, or 1 after one line that says what to change."""
  parser = argparse.ArgumentParser(prog="tinyvllm", description="A small, fast LLM engine on tinygrad.")
  commands = parser.add_subparsers(dest="command", required=True)
  for name, text in (("generate", "complete a prompt"), ("chat", "talk with a chat model")):
    command = commands.add_parser(name, help=text, description=text)
    if name == "generate": command.add_argument("prompt")
    command.add_argument("--model", help="a folder with config.json and *.safetensors, or a .gguf file; default: the shipped model")
    for options in (EngineConfig, SamplingParams): _add_flags(command, options)
  args = vars(parser.parse_args(argv))
  logging.basicConfig(format="%(message)s", stream=sys.stderr)
  logging.getLogger("tinyvllm").setLevel(logging.INFO)
  try: return _run(args)
  except (ValueError, RuntimeError) as e: print(f"tinyvllm: {e}", file=sys.stderr)
  except KeyboardInterrupt: print(file=sys.stderr)
  return 1


def _run(args: dict[str, Any]) -> int:
  from .engine import LLM
  engine, sampling = ({k: args[k] for f in fields(options) if (k := f.name) in args} for options in (EngineConfig, SamplingParams))
  params = SamplingParams(**{"temperature": 0.0, **sampling})
  llm = LLM(args["model"], **engine)

  def stream(prompt: Any) -> str:
    text = ""
    for output in llm.generate_stream(prompt, params):
      text += output.outputs[0].text
      print(output.outputs[0].text, end="", flush=True)
    print()
    return text

  if args["command"] == "generate":
    print(args["prompt"], end="", flush=True)
    stream(args["prompt"])
    return 0
  messages: list[dict[str, str]] = []
  while True:
    try: content = input("> " if sys.stdin.isatty() else "")
    except EOFError: return 0
    messages.append({"role": "user", "content": content})
    messages.append({"role": "assistant", "content": stream(llm.chat_prompt(messages))})
