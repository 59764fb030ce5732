"""Parts that the command lines share: flags of the option dataclasses, and the log level."""
import argparse, dataclasses, json
from types import UnionType
from typing import Any, get_args, get_origin

from tinyvllm.config import EngineConfig, logger

from .vllm_names import NO_EFFECT


def parsing_of(field: dataclasses.Field) -> dict[str, Any]:
  """Return the arguments of argparse's add_argument that parse a value of the field's type."""
  kind: Any = get_args(field.type)[0] if isinstance(field.type, UnionType) else field.type   # int of int | None
  if kind is bool: return {"action": argparse.BooleanOptionalAction}
  if get_origin(kind) is list:
    item, = get_args(kind)
    return {"nargs": "+", "type": item, "action": "extend", "metavar": field.name.upper()}
  if kind not in (int, float, str): return {"type": json.loads, "metavar": "JSON"}
  choices = field.metadata["choices"]
  return {"type": kind, "metavar": f"{{{','.join(choices)}}}" if choices else kind.__name__.upper()}


def help_of(field: dataclasses.Field) -> str:
  """Return a field's help text, and its default value unless the text states it."""
  text = field.metadata["help"]
  default = 0.0 if field.name == "temperature" else field.default
  return (text if "default:" in text else f"{text} (default: {default})").replace("%", "%%")


def add_flags(command: argparse.ArgumentParser, *kinds: Any) -> None:
  """Add a flag for each field of the option dataclasses, `--log-level`, and vLLM's flags without effect."""
  added = {"n"}   # a terminal shows one sample
  for kind in kinds:
    group = command.add_argument_group(kind.__doc__.split(",")[0].strip("."))
    for field in dataclasses.fields(kind):
      if field.name in added: continue
      added.add(field.name)
      group.add_argument(flag_of(field.name), help=help_of(field), **parsing_of(field))
  levels = ["debug", "info", "warning", "error"]
  command.add_argument("--log-level", choices=levels, default="info", help="lowest level to log (default: info)")
  def value(text: str) -> Any: return int(text) if text.isdecimal() else text
  for name, values in NO_EFFECT.items():
    form: Any = {"action": argparse.BooleanOptionalAction} if isinstance(values[0], bool) else {"type": value}
    command.add_argument(flag_of(name), help=argparse.SUPPRESS, **form)


def flag_of(name: str) -> str: return "--" + name.replace("_", "-")


def select_options(args: dict[str, Any], kind: Any) -> dict[str, Any]:
  """Return the fields of an option dataclass that the command line sets."""
  names = [field.name for field in dataclasses.fields(kind)] + [*NO_EFFECT] * (kind is EngineConfig)
  return {name: args[name] for name in names if name in args}


def set_log_level(args: dict[str, Any]) -> None:
  if args["log_level"] != "info": logger.setLevel(args["log_level"].upper())
