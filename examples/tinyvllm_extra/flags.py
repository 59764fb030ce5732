"""Options: flags of the option dataclasses with grouped help texts, vLLM's options that have no effect here, and the
log level."""
import argparse, dataclasses, json, logging, re
from types import UnionType
from typing import Any, get_args, get_origin

from tinyvllm.config import EngineConfig, check, logger

# Groups of --help; flags after the bar are rare: only --help-all shows them
GROUPS = {
  "Model": "dtype quantization tensor_parallel_size | enforce_eager cudagraph_capture_sizes",
  "Memory": """max_model_len gpu_memory_utilization kv_cache_dtype enable_prefix_caching | block_size
    num_gpu_blocks_override prefix_cache_file""",
  "Scheduling": "max_num_seqs max_num_batched_tokens | scheduling_policy max_queue",
  "Decoding": """max_tokens temperature top_k top_p seed stop speculative_config | generation_config min_p
    stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens min_tokens repetition_penalty
    presence_penalty frequency_penalty logit_bias allowed_token_ids bad_words logprobs prompt_logprobs
    structured_outputs""",
  "Server": """host port api_key served_model_name | request_timeout shutdown_timeout max_body_size stream_interval
    allowed_origins strict_fields trust_request_chat_template"""}
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
    return {"nargs": "+", "type": item, "action": "extend", "metavar": item.__name__.upper()}
  if value_type not in (int, float, str): return {"type": json.loads, "metavar": "JSON"}
  choices = field.metadata["choices"]
  return {"type": value_type, "metavar": f"{{{','.join(choices)}}}" if choices else value_type.__name__.upper()}


def help_of(field: dataclasses.Field) -> str:
  """Return a field's help text, and its default value unless the text states it."""
  text = field.metadata["help"]
  default: Any = 0.0 if field.name == "temperature" else field.default
  if field.type is bool: default = "on" if default else "off"
  return (text if "(default: " in text else f"{text} (default: {default})").replace("%", "%%")


class HelpFormatter(argparse.HelpFormatter):
  """Help in two columns. The two flags of a bool are shown as --[no-]NAME."""
  def __init__(self, prog: str): super().__init__(prog, max_help_position=32)
  def _format_action_invocation(self, action: argparse.Action) -> str:
    return re.sub(r"--(\S+), --no-\1", r"--[no-]\1", super()._format_action_invocation(action))


class HelpAll(argparse.Action):
  """Print the help with rare flags, and exit."""
  def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
    for action in parser._actions: action.help = getattr(action, "rare_help", action.help)
    parser.print_help()
    parser.exit()


def add_flags(command: argparse.ArgumentParser, *option_classes: Any) -> None:
  """Add `--model`, a flag for each field of the option dataclasses in its group of GROUPS, or else in "Other",
  `--log-level`, `--help-all`, and vLLM's flags without effect."""
  def add(group: Any, name: str, text: str, is_rare: bool, **form: Any) -> None:
    group.add_argument(flag_of(name), help=argparse.SUPPRESS if is_rare else text, **form).rare_help = text
  command.formatter_class = HelpFormatter
  command.add_argument("--help-all", action=HelpAll, nargs=0, help="Show rare flags, too, and exit")
  levels = ["debug", "info", "warning", "error"]
  add(command, "log_level", "Lowest level to log (default: info)", True, choices=levels, default="info")
  fields = {field.name: field for x in reversed(option_classes) for field in dataclasses.fields(x)}
  fields.pop("n", None)   # a terminal shows one sample
  other = " ".join(name for name in fields if name not in " ".join(GROUPS.values()).split())
  for title, names in {**GROUPS, "Other": other}.items():
    group = command.add_argument_group(title)
    if title == "Model": add(group, "model", "Model folder or GGUF file (default: bundled)", False)
    common, _, rare = names.partition("|")
    for name in [name for name in [*common.split(), *rare.split()] if name in fields]:
      add(group, name, help_of(fields[name]), name in rare.split(), **parsing_of(fields[name]))
  def value(text: str) -> Any: return int(text) if text.isdecimal() else text
  for name, values in NO_EFFECT.items():
    form: Any = {"action": argparse.BooleanOptionalAction} if isinstance(values[0], bool) else {"type": value}
    command.add_argument(flag_of(name), help=argparse.SUPPRESS, **form)


def flag_of(name: str) -> str: return "--" + name.replace("_", "-")


def select_options(args: dict[str, Any], option_class: Any) -> dict[str, Any]:
  """Return the fields of an option dataclass that the command line sets."""
  names = [field.name for field in dataclasses.fields(option_class)] + [*NO_EFFECT] * (option_class is EngineConfig)
  return {name: args[name] for name in names if name in args}


def set_log_level(args: dict[str, Any]) -> None:
  if args["log_level"] != "info": logger.setLevel(args["log_level"].upper())


def setup_logging() -> None:
  """Log to stderr from level INFO on, unless the program has configured logging."""
  if logger.hasHandlers(): return
  logger.addHandler(logging.StreamHandler())
  logger.setLevel(logger.level or logging.INFO)


def without_no_effect(options: dict[str, Any]) -> dict[str, Any]:
  """Remove vLLM's options that have no effect here. Raises InputError for one of them with another value."""
  for name in options.keys() & NO_EFFECT.keys():
    values = NO_EFFECT[name]
    check(options[name] in values or ... in values,
          f"{name}={options[name]!r} is not supported, only {' or '.join(map(repr, values))}")
  return {name: value for name, value in options.items() if name not in NO_EFFECT}
