"""Flags of the command line: one for each field of the option classes, in groups; vLLM's short flags, JSON flags in
parts and --config FILE; environment variables. Imports neither tinygrad nor numpy, so that --help is fast."""
import argparse, dataclasses, difflib, functools, json, math, os, pathlib, re, types, typing

from tinyvllm.config import InputError, JsonObject, Options, check, logger, option, read_json
from tinyvllm_extra import options, vllm_options

# Groups of flags in --help, which environment variables set, too (only --help-all shows other flags), variables:
# arguments of add_argument, by name; llama.cpp's letters, units of integers, `tinyvllm run`'s defaults, values of a
# bool's environment variable, arguments of add_argument for --log-level, and commands: arguments: of add_argument, by
# flag; variables of their own. With several models, of_router: options of the router alone; refused: of none;
# of_one_model: that only one of them can set; not_shared: other arguments that are not options of all models
FLAGS = read_json(pathlib.Path(__file__).with_suffix(".json"))
FLAG_SYNTAX = re.compile(r"(--?[A-Za-z][\w-]*)((?:\.[\w-]+)*)(=.*)?", re.DOTALL)   # name, .keys, =value


@dataclasses.dataclass(frozen=True)
class BenchConfig(Options):
  """Options of `tinyvllm bench` under llama-bench's names, then of `throughput` and `serve` under vLLM's."""
  n_prompt: int | None = option(None, "Prompt test: tokens; 0: none (default: 512)", min=0, max=2**24)
  n_gen: int | None = option(None, "Output test: tokens; 0: none (default: 128)", min=0, max=2**24)
  repetitions: int = option(5, "Runs per test", min=1, max=10**6)
  num_prompts: int = option(100, "With a MODE: requests", min=1, max=10**6)
  random_input_len: int = option(128, "With a MODE: tokens per prompt", min=1, max=2**24)
  random_output_len: int = option(128, "With a MODE: output tokens", min=1, max=2**24)
  dataset_name: str = option("random", "With a MODE: prompts of random tokens", choices=("random",))
  base_url: str = option("http://127.0.0.1:8000", "serve: URL (default: http://127.0.0.1:8000)")
  max_concurrency: int | None = option(None, "serve: requests at once (default: all)", min=1, max=10**6)
  request_rate: float = option(math.inf, "serve: mean requests/s", min=1e-6, max=math.inf)


def integer(text: str) -> int | None:
  """Parse an int. As in vLLM, 1k is 1000, 1K is 1024, 25.6k is 25600, and auto is None."""
  if text == "auto": return None
  return int(float(text[:-1]) * FLAGS["units"][text[-1]]) if text[-1:] in FLAGS["units"] else int(text)


def JSON(text: str) -> object: return json.loads(text)   # argparse's error has the name


# Arguments of argparse's add_argument that parse a value of a type; others are JSON
PARSING: dict[object, JsonObject] = {
  bool: {"action": argparse.BooleanOptionalAction}, int: {"type": integer, "metavar": "INT"},
  float: {"type": float, "metavar": "FLOAT"}, str: {"type": str, "metavar": "STR"}}


def form_of(field: dataclasses.Field, words: str) -> JsonObject:
  """Return the arguments of add_argument for a field's flag. The help text ends with the default value, unless it
  states it. words: of the command."""
  # int of int | None
  value_type = typing.get_args(field.type)[0] if isinstance(field.type, types.UnionType) else field.type
  several = {"nargs": "+", "action": "extend"} if typing.get_origin(value_type) is list else {}
  form = PARSING.get(typing.get_args(value_type)[0] if several else value_type, {"type": JSON, "metavar": "JSON"})
  choices, text = field.metadata["choices"], field.metadata["help"]
  if choices: form = form | {"metavar": f"{{{','.join(choices)}}}"}
  default: object = (FLAGS["run_defaults"] if "MODEL" in words else {"temperature": 0.0}).get(field.name, field.default)
  if field.type is bool: default = "on" if default else "off"
  if "(default: " not in text: text = f"{text} (default: {default})"
  return {**form, **several, "help": text.replace("%", "%%")}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
  """Help in two columns. The two flags of a bool are shown as --[no-]NAME, a long list of choices in part."""
  def _format_action_invocation(self, action: argparse.Action) -> str:
    text = re.sub(r"--(\S+), --no-\1", r"--[no-]\1", super()._format_action_invocation(action))
    text = re.sub(r"^(-\w) \S+,", r"\1,", text)   # Python 3.13 shows the value once, too
    return text if len(text) <= 78 else f"{text[:text.rindex(',', 0, 73)]},...}}"


class CommandParser(argparse.ArgumentParser):
  """Refuses abbreviated flags, and suggests the nearest name for an unknown flag or command."""
  def __init__(self, **options: typing.Any):
    form = functools.partial(HelpFormatter, max_help_position=32)
    super().__init__(allow_abbrev=False, argument_default=argparse.SUPPRESS, formatter_class=form, **options)
    self.commands: dict[str, CommandParser] = {}      # empty in the parser of a command
    self.words: list[str] = []                        # names of optional words, such as "model"
    self.source = ""                                  # start of error messages

  def parse_options(self, source: str, words: list[str]) -> JsonObject:
    """Parse options of a variable or a file. source: start of error messages."""
    self.source = f"{source}: "
    return vars(self.parse_args(words))

  def error(self, message: str) -> typing.NoReturn:
    word = re.search(r"(?:unrecognized arguments: (?=-)|invalid choice: ')([\w-]+)", message)
    names = [*self._option_string_actions, *(name for action in self._actions for name in action.choices or ())]
    close = difflib.get_close_matches(word[1], names, 1) if word else []
    if close: message = f"{message.partition(' (choose')[0]}: did you mean {close[0]}?"
    super().error(self.source + message)


def add_flags(command: CommandParser, words: str, argv: list[str], *classes: type[Options], **own: JsonObject) -> None:
  """Add `words`, such as "[MODEL]", which are all optional, and flags: `--model`, `--config`, the command's own ones,
  one for each field of the option dataclasses, `--log-level`, `--help-all`, and vLLM's without effect. argv: will be
  parsed. own: arguments of add_argument by name."""
  command.words = re.findall(r"\w+", words.lower())
  command.add_argument("words", nargs="*", help=argparse.SUPPRESS)
  command.add_argument("--help-all", action="help", help="Show rare flags, too, and exit")
  # Without n, which is 1 here
  forms = {x.name: form_of(x, words) for kind in reversed(classes) for x in dataclasses.fields(kind) if x.name != "n"}
  forms |= FLAGS["variables"] | own | {"log_level": FLAGS["log_level"]}
  rare = {f"Rare flags of {x.__name__}": [*x.__dataclass_fields__, "log_level"] for x in classes}
  for title, names in (FLAGS["groups"] | rare).items():
    group = command.add_argument_group(title) if title else command
    for name in [name for name in names if name in forms]:
      form = forms.pop(name) | ({"help": argparse.SUPPRESS} if title in rare and "--help-all" not in argv else {})
      group.add_argument(*FLAGS["letters"].get(name, ()), flag_of(name), **form)
  for name, values in vllm_options.NO_EFFECT.items():
    form = {"type": parse_value, **({"nargs": "+"} if name in vllm_options.TABLE["lists"] else {})}
    if values and isinstance(values[0], bool): form = {"action": argparse.BooleanOptionalAction}
    command.add_argument(flag_of(name), help=argparse.SUPPRESS, **form)


def flag_of(name: str) -> str: return f"--{name}".replace("_", "-")


def parse_flags(parser: CommandParser, argv: list[str]) -> JsonObject:
  """Parse a command line in vLLM's syntax, and set the log level. The command line wins over environment variables, and
  these win over `--config FILE`. The result's "variables" has the variable of each option that one sets."""
  if argv[0] not in parser.commands: parser.parse_args(argv)   # exits
  command = parser.commands.get(argv[0]) or parser.error("a COMMAND is required")
  args = vars(command.parse_intermixed_args(expand(argv[1:])))
  words = args.pop("words", [])
  names = [name for name in command.words if name not in args]
  if words[len(names):]: command.error(f"unrecognized arguments: {' '.join(words[len(names):])}")
  args |= {"command": argv[0], "variables": {}, **dict(zip(names, words, strict=False))}
  for name in [name for names in FLAGS["groups"].values() for name in names]:
    variable = f"TINYVLLM_{name.upper()}"
    text, action = os.environ.get(variable), command._option_string_actions.get(flag_of(name))
    if not text or not action or name in args: continue
    value = FLAGS["switch"].get(text, text) if isinstance(action, argparse.BooleanOptionalAction) else text
    args |= command.parse_options(f"{variable}={text!r}", to_words({name: value}))
    args["variables"][name] = variable
  if "config" in args: args = command.parse_options("--config", read_config(args["config"])) | args
  if "log_level" in args: logger.setLevel(args["log_level"].upper())
  return args


def select_options(args: JsonObject, option_class: type[Options]) -> JsonObject:
  """Return the fields of an option dataclass that the command line sets. LLMConfig: all options of LLM."""
  names = [*option_class.__dataclass_fields__, *(vllm_options.NO_EFFECT if option_class is options.LLMConfig else ())]
  return {name: args[name] for name in names if name in args}


# vLLM's command lines

def expand(argv: list[str]) -> list[str]:
  """Return a command line for argparse: full flags with dashes, and one JSON value for a flag in parts, as in
  `--speculative-config.method ngram`."""
  result = list[str]()
  objects: JsonObject = {}   # by flag
  words = iter(argv)
  for word in words:
    match = FLAG_SYNTAX.fullmatch(re.sub(r"^-O(?=\d)", "-O=", word))
    name, path, value = match.groups("") if match else ("", "", word)
    name = name.replace("_", "-")
    name = vllm_options.TABLE["flags"].get(name, name)
    if path:
      *keys, last = f"{name}{path}".split(".")
      target = objects
      for key in keys: target = target.setdefault(key, {})
      target[last] = parse_value(value[1:] if value else next(words, ""))
    else: result.append(name + value)
  return result + [x for name, content in objects.items() for x in (name, json.dumps(content))]


def parse_value(text: str) -> object:
  """Parse JSON. Other text is a string, except None."""
  try: return None if text == "None" else json.loads(text)
  except ValueError: return text


def read_config(path: str) -> list[str]:
  """Return the options in a YAML file as a command line. Raises InputError for a file that is not of options."""
  yaml = options.optional("yaml", "server", "--config")
  try: content = yaml.safe_load(pathlib.Path(path).expanduser().read_text())
  except (OSError, yaml.YAMLError) as error: raise InputError(f"config={path!r} cannot be read: {error}") from error
  check(isinstance(content, dict), f"config={path!r} must hold lines `option: value`")
  return to_words(content)


def to_words(content: JsonObject) -> list[str]:
  """Return options as a command line."""
  words = list[str]()
  for name, value in content.items():
    flag = flag_of(name)
    if isinstance(value, bool): words.append(flag if value else flag.replace("--", "--no-", 1))
    elif isinstance(value, list): words += [f"{flag}={x}" for x in value]
    elif value is not None: words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
  return words
