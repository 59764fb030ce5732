"""Options: flags of the option dataclasses, vLLM's options that have no effect here, and the log level."""
import argparse, dataclasses, json, logging
from types import UnionType
from typing import Any, get_args, get_origin

from tinyvllm.config import EngineConfig, check, logger

# vLLM's options without an effect, and the values at which that is true (...: at any)
NO_EFFECT: dict[str, list] = {name: values for names, values in {   # type: ignore[misc]   # lists of anything
  "pipeline_parallel_size data_parallel_size": [1], "cpu_offload_gb": [0], "enable_chunked_prefill": [True, None],
  "tokenizer revision tokenizer_revision hf_token hf_overrides distributed_executor_backend": [None],
  "tokenizer_mode load_format config_format device": ["auto"], "task runner": ["auto", "generate"],
  "trust_remote_code disable_log_stats disable_custom_all_reduce": [True, False],
  "enable_lora skip_tokenizer_init disable_sliding_window": [False],
  "swap_space download_dir max_seq_len_to_capture": [...]}.items() for name in names.split()}


def parsing_of(field: dataclasses.Field) -> dict[str, Any]:
  """Return the arguments of argparse's add_argument that parse a value of the field's type."""
  value_type: Any = get_args(field.type)[0] if isinstance(field.type, UnionType) else field.type   # int of int | None
  if value_type is bool: return {"action": argparse.BooleanOptionalAction}
  if get_origin(value_type) is list:
    item, = get_args(value_type)
    return {"nargs": "+", "type": item, "action": "extend", "metavar": field.name.upper()}
  if value_type not in (int, float, str): return {"type": json.loads, "metavar": "JSON"}
  choices = field.metadata["choices"]
  return {"type": value_type, "metavar": f"{{{','.join(choices)}}}" if choices else value_type.__name__.upper()}


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


def setup_logging() -> None:
  """Log to stderr from level INFO on, unless the program has configured logging."""
  if logger.hasHandlers(): return
  logger.addHandler(logging.StreamHandler())
  logger.setLevel(logger.level or logging.INFO)


def without_no_effect(options: dict[str, Any]) -> dict[str, Any]:
  """Options without vLLM's that have no effect here. Raises InputError for one of them at another value."""
  for name in options.keys() & NO_EFFECT.keys():
    allowed = NO_EFFECT[name]
    check(options[name] in allowed or ... in allowed,
          f"{name}={options[name]!r} is not supported, only {' or '.join(map(repr, allowed))}")
  return {name: value for name, value in options.items() if name not in NO_EFFECT}
