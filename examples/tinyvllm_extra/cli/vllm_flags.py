"""vLLM's command lines: short flags, JSON flags in parts, and --config FILE."""
import json, pathlib, re

from tinyvllm.config import InputError, JsonObject, check
from tinyvllm_extra.packages import optional
from tinyvllm_extra.vllm_options import TABLE

FLAG = re.compile(r"(--?[A-Za-z][\w-]*)((?:\.[\w-]+)*)(=.*)?", re.DOTALL)   # name, .keys, =value


def expand(argv: list[str]) -> list[str]:
  """Return a command line for argparse: full flags with dashes, and one JSON value for a flag in parts, as in
  `--speculative-config.method ngram`."""
  result: list[str] = []
  objects: JsonObject = {}   # by flag
  words = iter(argv)
  for word in words:
    match = FLAG.fullmatch(re.sub(r"^-O(?=\d)", "-O=", word))
    name, path, value = match.groups("") if match else ("", "", word)
    name = name.replace("_", "-")
    name = TABLE["flags"].get(name, name)
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
  yaml = optional("yaml", "server", "--config")
  try: content = yaml.safe_load(pathlib.Path(path).expanduser().read_text())
  except (OSError, yaml.YAMLError) as error: raise InputError(f"config={path!r} cannot be read: {error}") from error
  check(isinstance(content, dict), f"config={path!r} must hold lines `option: value`")
  return to_words(content)


def to_words(content: JsonObject) -> list[str]:
  """Return options as a command line."""
  words: list[str] = []
  for name, value in content.items():
    flag = f"--{name}".replace("_", "-")
    if isinstance(value, bool): words.append(flag if value else flag.replace("--", "--no-", 1))
    elif isinstance(value, list): words += [flag, *map(str, value)]
    elif value is not None: words.append(f"{flag}={json.dumps(value) if isinstance(value, dict) else value}")
  return words
