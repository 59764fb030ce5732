"""`tinyvllm chat` in a terminal: lines of input, and answers that are printed as they are generated."""
import contextlib, itertools, logging, sys, threading
from collections.abc import Iterator
from typing import Any

from tinyvllm import LLM, SamplingParams
from tinyvllm.config import logger

from .client import Remote

CHAT = "Chat with a model. Commands: /new, /system TEXT, /exit"


def print_error(error: BaseException) -> int:
  """Print an error in one line, and return the exit code."""
  print(f"tinyvllm: {error}", file=sys.stderr)
  return 1


def print_stream(outputs: Any, text: str = "", running: threading.Event | None = None) -> str:
  """Print `text` and the outputs' text as it arrives, until they end or `running` is cleared. Return all text."""
  num_printed = 0
  with contextlib.closing(outputs):
    for output in outputs:
      text += output.outputs[0].text
      print(text[num_printed:], end="", flush=True)
      num_printed = len(text)
      logger.setLevel(max(logger.level, logging.WARNING))   # from now on a log line would interrupt the text
      if running and not running.is_set(): break
  print()
  return text


def input_lines() -> Iterator[str]:
  interactive = sys.stdin.isatty()
  with contextlib.suppress(EOFError):
    while True: yield input("> " if interactive else "")
  if interactive: print()


def chat(llm: LLM | Remote, params: SamplingParams, answering: threading.Event) -> int:
  """Answer each line of the input. A line that cannot be answered, such as one that is too long, is dropped. Return the
  exit code: 1 if the last line was dropped, else 0."""
  messages: list[dict[str, str]] = []
  code = 0
  for line in itertools.takewhile(lambda line: line != "/exit", input_lines()):
    command, _, text = line.partition(" ")
    if command == "/new": messages = []
    elif command == "/system": messages = [{"role": "system", "content": text}]
    else:
      prompt = [*messages, {"role": "user", "content": line}]
      answering.set()
      try:
        answer = print_stream(llm.generate_stream({"messages": prompt}, params), running=answering)
        messages = [*prompt, {"role": "assistant", "content": answer}]
        code = 0
      except ValueError as error: code = print_error(error)
      answering.clear()
  return code
