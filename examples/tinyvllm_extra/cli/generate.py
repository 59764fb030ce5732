"""`tinyvllm generate` and `tinyvllm run`: complete a prompt, answer one question, or chat, here or with a server."""
import signal, sys

import tinyvllm
from tinyvllm.config import JsonObject, check
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.sampling.params import SamplingParams
from tinyvllm_extra.serving.client import Remote

from .chat import Chat, print_stream, start
from .flags import select_options


def main(args: JsonObject) -> int:
  """Run the command and return the exit code. Ctrl-C stops a chat's answer, or else ends the process."""
  args = {"model": None, "url": None, "prompt": None, "api_key": None, **args}
  if not args["url"] and "api_key" in args["variables"]: args["api_key"] = None   # it is for `tinyvllm serve`
  engine = select_options(args, LLMConfig)
  is_chat = args["command"] != "generate"
  settings = {**({} if is_chat else {"temperature": 0.0}), **select_options(args, SamplingParams)}
  SamplingParams(**settings)   # its checks, before the model is loaded
  prompt = sys.stdin.read().removesuffix("\n") if args["prompt"] == "-" else args["prompt"]
  check(is_chat or prompt is not None, "prompt: a prompt is required, or - to read it from stdin")
  signal.signal(signal.SIGINT, signal.SIG_DFL)   # a KeyboardInterrupt is lost when raised within a __del__ of tinygrad
  llm = Remote(args, engine) if args["url"] or args["api_key"] else tinyvllm.LLM(args["model"], **engine)
  if not is_chat: print_stream(start(llm, prompt, settings), prompt)
  else:
    chat = Chat(llm, settings, "verbose" in args)
    if prompt is None: return chat.run()
    _, output, times = print_stream(start(llm, {"messages": [{"role": "user", "content": prompt}]}, settings))
    chat.report(output, times)
  return 0
