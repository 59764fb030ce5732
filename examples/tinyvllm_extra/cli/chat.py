"""`tinyvllm run` and `tinyvllm generate`: chat in the terminal, answer one question, or complete a prompt, here or with
a server. During a chat a thread captures steps."""
import contextlib, dataclasses, difflib, functools, inspect, json, logging, os, pathlib, signal, sys, threading, time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import tinyvllm
from tinyvllm.config import InputError, JsonObject, check, logger
from tinyvllm.request import RequestOutput
from tinyvllm_extra.options import SAMPLING_DEFAULTS, LLMConfig
from tinyvllm_extra.sampling.params import SamplingParams
from tinyvllm_extra.serving.client import Remote

from .flags import parse_value, select_options

QUOTES = '"""'
Output = RequestOutput | SimpleNamespace   # an LLM's or a Remote's


@functools.cache
def capture_steps(llm: "tinyvllm.LLM") -> threading.Event:
  """Start to capture steps. Return the event after which requests run without captures."""
  from tinyvllm_extra.serving.async_engine import CAPTURING, CaptureThread   # tinygrad, which Remote does not need
  logger.info(CAPTURING)
  return CaptureThread(llm.capture(llm.config.cudagraph_capture_sizes)).ready


def start(llm: "tinyvllm.LLM | Remote", prompt: str | JsonObject, settings: JsonObject) -> Iterator[Output]:
  """Start a request with the model's sampling defaults, except `settings`. A chat may fill the context."""
  if isinstance(llm, Remote): return llm.generate_stream(prompt, settings)
  capture_steps(llm).wait()
  limit = {"max_tokens": None} if isinstance(prompt, dict) else {}
  return llm.generate_stream(prompt, SamplingParams(**{**limit, **llm.sampling_defaults, **settings}))


def print_stream(outputs: Any, text: str = "", stop: threading.Event | None = None) -> tuple[str, Output, list[float]]:
  """Print `text` and the outputs' text as it arrives, until they end or `stop` is set. Return all text, the last output
  and the times of the start and of each output."""
  times = [time.monotonic()]
  with contextlib.closing(outputs):
    for output in outputs:
      times.append(time.monotonic())
      text += output.outputs[0].text
      logger.setLevel(max(logger.level, logging.WARNING))   # from now on a log line would interrupt the text
      print(text if len(times) == 2 else output.outputs[0].text, end="", flush=True)   # the initial text first
      if stop and stop.is_set(): break
  print()
  return text, output, times


def use_history(action: str) -> None:
  """Edit lines with readline, and "read" or "write" the file of earlier lines."""
  folder = pathlib.Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "tinyvllm").expanduser()
  with contextlib.suppress(ImportError, OSError):   # Windows has no readline; the folder may be read-only
    import readline
    folder.mkdir(parents=True, exist_ok=True)
    readline.set_history_length(1000)
    getattr(readline, f"{action}_history_file")(folder / "chat_history")


@dataclasses.dataclass
class Chat:
  """Commands:
    /new                  start a new conversation
    /system TEXT          start a new conversation with these instructions
    /retry                answer the last message again
    /params [NAME VALUE]  show the sampling parameters, or set one
    /save FILE            write the conversation as JSON: a list of messages
    /load FILE            read a conversation
    /help                 show this text
    /bye, /exit           leave; so does Ctrl-D, and Ctrl-C stops an answer
  A line that ends with a backslash continues on the next one. Lines between triple quotes are one message."""
  llm: "tinyvllm.LLM | Remote"
  settings: JsonObject   # sampling parameters that differ from the model's defaults
  is_verbose: bool = False
  messages: list[JsonObject] = dataclasses.field(default_factory=list)
  code: int = 0

  def run(self) -> int:
    """Answer the input. Return the exit code: 1 if the last message or a command after it failed, else 0."""
    if sys.stdin.isatty():
      use_history("read")
      signal.signal(signal.SIGINT, signal.default_int_handler)   # at the prompt
      if not isinstance(self.llm, Remote): capture_steps(self.llm)
      logger.setLevel(max(logger.level, logging.WARNING))   # a line would land next to the prompt
    with contextlib.suppress(EOFError):   # raised by /bye
      for text in self.inputs():
        try: self.handle(text)
        except BrokenPipeError: raise   # the reader has closed the pipe
        except (ValueError, RuntimeError, OSError) as error:
          print(f"tinyvllm: {error}", file=sys.stderr)
          self.code = 1
    return self.code

  def inputs(self) -> Iterator[str]:
    """Yield commands and messages. A line that ends with a backslash continues, and so do lines between triple
    quotes, which are kept."""
    text = ""
    with contextlib.suppress(EOFError):
      while True:
        try: text += input(("... " if text else "> ") if sys.stdin.isatty() else "")
        except KeyboardInterrupt:
          text = ""
          print("\n(Ctrl-D or /bye leaves the chat)")
        if sys.stdin.isatty(): use_history("write")
        is_quoted = text.startswith(QUOTES)
        is_open = len(text) < 6 or not text.endswith(QUOTES) if is_quoted else text.endswith("\\")
        if not is_open: yield text
        text = "" if not is_open else text + "\n" if is_quoted else text[:-1] + "\n"
    if sys.stdin.isatty(): print()
    yield text

  def handle(self, text: str) -> None:
    """Run a command or answer a message."""
    name, _, argument = text.partition(" ")
    if text.startswith("/"):
      commands = [f"/{x[3:]}" for x in vars(Chat) if x.startswith("do_")]
      hint = " or ".join(difflib.get_close_matches(name, commands)) or "/help"
      check(name in commands, f"unknown command {name}: try {hint}")
      return getattr(self, f"do_{name[1:]}")(argument.strip())
    if text.startswith(QUOTES): text = text[3:].removesuffix(QUOTES).strip("\n")
    if text.strip(): self.answer([*self.messages, {"role": "user", "content": text}])

  def answer(self, messages: list[JsonObject], can_stop: bool = True) -> None:
    """Answer the last message, and print which limit cut the answer, and tokens per second. can_stop: Ctrl-C stops the
    answer; else it ends the process."""
    stop = threading.Event()
    previous = signal.signal(signal.SIGINT, (lambda *_: stop.set()) if can_stop else signal.SIG_DFL)
    try: text, output, times = print_stream(start(self.llm, {"messages": messages}, self.settings), stop=stop)
    finally: signal.signal(signal.SIGINT, previous)
    self.messages = [*messages, {"role": "assistant", "content": text}]
    self.code = 0
    limit, metrics = self.settings.get("max_tokens"), output.metrics
    if output.outputs[0].finish_reason == "length":
      is_full = not limit or metrics and metrics.num_generated < limit
      print("(cut: the context is full; /new starts a new conversation)" if is_full else
            f"(cut at max_tokens={limit}; `/params max_tokens N` raises it)", file=sys.stderr)
    if not self.is_verbose or not metrics: return
    num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
    print(f"({num_prompt} prompt tokens, {num_cached} cached, {(num_prompt - num_cached) / (times[1] - times[0]):.1f} "
          f"tokens/s; {metrics.num_generated} output tokens, "
          f"{(metrics.num_generated - 1) / max(times[-1] - times[1], 1e-9):.1f} tokens/s)", file=sys.stderr)

  def do_help(self, _: str) -> None: print(inspect.getdoc(Chat))
  def do_new(self, _: str) -> None: self.messages = []
  def do_system(self, text: str) -> None: self.messages = [{"role": "system", "content": text}]
  def do_save(self, path: str) -> None: pathlib.Path(path).expanduser().write_text(json.dumps(self.messages, indent=1))
  def do_bye(self, _: str) -> None: raise EOFError
  do_exit = do_bye

  def do_retry(self, _: str) -> None:
    check(len(self.messages) > 1, "there is no answer yet")
    self.answer(self.messages[:-1])

  def do_load(self, path: str) -> None:
    messages = parse_value(pathlib.Path(path).expanduser().read_text())
    if not isinstance(messages, list): raise InputError(f"{path} must hold a list of messages with role and content")
    self.messages = messages

  def do_params(self, text: str) -> None:
    name, _, value = text.partition(" ")
    settings = {**self.settings, **({name: parse_value(value)} if name else {})}
    check(SamplingParams(**settings).n == 1, f"n={value} must be 1: a chat shows one answer")
    self.settings = settings
    defaults = dict.fromkeys(["max_tokens", "seed", *SAMPLING_DEFAULTS], "default")
    values = {**defaults, **getattr(self.llm, "sampling_defaults", {}), **settings}
    print(*(f"{name} {value}" for name, value in values.items()), sep="\n")


def main(args: JsonObject) -> int:
  """Run `tinyvllm run` or `tinyvllm generate`, and return the exit code. Ctrl-C stops a chat's answer, or else ends the
  process."""
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
  chat = Chat(llm, settings, "verbose" in args)
  if prompt is None: return chat.run()
  if "explain" in args:
    if isinstance(llm, Remote): raise InputError("--explain shows no steps of a server: remove --url and --api-key")
    from tinyvllm_extra.trace.explain import explain   # tinygrad
    explain(llm)
    outputs = [*start(llm, prompt, {"logprobs": 5, **settings})]   # steps are printed before the text
    print(prompt + "".join(x.outputs[0].text for x in outputs))
  elif is_chat: chat.answer([{"role": "user", "content": prompt}], can_stop=False)
  else: print_stream(start(llm, prompt, settings), prompt)
  return 0
