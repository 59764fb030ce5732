"""The command line: a flag for each field of the option classes, in groups; vLLM's flags; the log level."""
import argparse, dataclasses, functools, json, re
from types import UnionType
from typing import Any, get_args, get_origin

from tinyvllm.config import JsonObject, logger
from tinyvllm_extra.options import LLMConfig
from tinyvllm_extra.vllm_options import NO_EFFECT, TABLE

from .vllm_flags import expand, parse_value, read_config

# Groups of --help; flags after the bar are rare: only --help-all shows them
GROUPS = {
  "Model": """dtype quantization tensor_parallel_size | enforce_eager cudagraph_capture_sizes chat_template
    default_chat_template_kwargs revision download_dir max_logprobs runner""",
  "Memory": """max_model_len gpu_memory_utilization kv_cache_dtype enable_prefix_caching | block_size
    num_gpu_blocks_override prefix_cache_file""",
  "Scheduling": "max_num_seqs max_num_batched_tokens | scheduling_policy max_queue",
  "Decoding": """max_tokens temperature top_k top_p seed stop speculative_config | generation_config
    override_generation_config min_p stop_token_ids include_stop_str_in_output ignore_eos skip_special_tokens
    min_tokens repetition_penalty presence_penalty frequency_penalty logit_bias allowed_token_ids bad_words logprobs
    prompt_logprobs structured_outputs""",
  "Server": """host port api_key served_model_name | request_timeout shutdown_timeout max_body_size stream_interval
    allowed_origins strict_fields trust_request_chat_template reasoning_parser tool_call_parser root_path uds
    ssl_certfile ssl_keyfile ssl_ca_certs ssl_cert_reqs ssl_ciphers disable_uvicorn_access_log
    disable_access_log_for_endpoints"""}


UNITS = {unit: base**i for base, units in ((1000, "kmgt"), (1024, "KMGT")) for i, unit in enumerate(units, 1)}


def integer(text: str) -> int | None:
  """Parse an int. As in vLLM, 1k is 1000, 1K is 1024, 25.6k is 25600, and auto is None."""
  if text == "auto": return None
  return int(float(text[:-1]) * UNITS[text[-1]]) if text[-1:] in UNITS else int(text)


def parsing_of(field: dataclasses.Field) -> JsonObject:
  """Return the arguments of argparse's add_argument that parse a value of the field's type."""
  value_type = get_args(field.type)[0] if isinstance(field.type, UnionType) else field.type   # int of int | None
  if value_type is bool: return {"action": argparse.BooleanOptionalAction}
  is_list = get_origin(value_type) is list
  item = get_args(value_type)[0] if is_list else value_type
  if item not in (int, float, str): return {"type": json.loads, "metavar": "JSON"}
  choices = field.metadata["choices"]
  metavar = f"{{{','.join(choices)}}}" if choices else item.__name__.upper()
  several = {"nargs": "+", "action": "extend"} if is_list else {}
  return {"type": integer if item is int else item, "metavar": metavar, **several}


def help_of(field: dataclasses.Field) -> str:
  """Return a field's help text, and its default value unless the text states it."""
  text = field.metadata["help"]
  default: object = 0.0 if field.name == "temperature" else field.default
  if field.type is bool: default = "on" if default else "off"
  return (text if "(default: " in text else f"{text} (default: {default})").replace("%", "%%")


class HelpFormatter(argparse.HelpFormatter):
  """Help in two columns. The two flags of a bool are shown as --[no-]NAME, a long list of choices in part."""
  def _format_action_invocation(self, action: argparse.Action) -> str:
    text = re.sub(r"--(\S+), --no-\1", r"--[no-]\1", super()._format_action_invocation(action))
    return text if len(text) <= 78 else f"{text[:text.rindex(',', 0, 73)]},...}}"


class HelpAll(argparse.Action):
  """Print the help with rare flags, and exit. const: help texts by flag."""
  def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
    for action, text in self.const.items(): action.help = text
    parser.print_help()
    parser.exit()


def add_flags(command: argparse.ArgumentParser, *option_classes: Any) -> None:
  """Add `--model`, a flag for each field of the option dataclasses in its group of GROUPS, or else in "Other",
  `--log-level`, `--help-all`, and vLLM's flags without effect."""
  texts: dict[argparse.Action, str] = {}
  def add(group: argparse._ActionsContainer, name: str, text: str, is_rare: bool, **form: Any) -> None:
    texts[group.add_argument(flag_of(name), help=argparse.SUPPRESS if is_rare else text, **form)] = text
  command.formatter_class = functools.partial(HelpFormatter, max_help_position=32)
  command.allow_abbrev = False   # `--config x` would set --config-format
  command.add_argument("--help-all", action=HelpAll, const=texts, nargs=0, help="Show rare flags, too, and exit")
  add(command, "log_level", "Lowest level to log (default: info)", True, choices=["debug", "info", "warning", "error"])
  fields = {field.name: field for x in reversed(option_classes) for field in dataclasses.fields(x)}
  fields.pop("n", None)   # a terminal shows one sample
  other = " ".join(name for name in fields if name not in " ".join(GROUPS.values()).split())
  for title, names in {**GROUPS, "Other": other}.items():
    group = command.add_argument_group(title)
    if title == "Model": add(group, "model", "Folder, GGUF file or ORG/NAME[:TYPE] (default: bundled)", False)
    rare = names.partition("|")[2].split()
    for name in [name for name in names.split() if name in fields]:
      add(group, name, help_of(fields[name]), name in rare, **parsing_of(fields[name]))
  for name, values in NO_EFFECT.items():
    form: JsonObject = {"type": parse_value, **({"nargs": "+"} if name in TABLE["lists"] else {})}
    if values and isinstance(values[0], bool): form = {"action": argparse.BooleanOptionalAction}
    command.add_argument(flag_of(name), help=argparse.SUPPRESS, **form)


def flag_of(name: str) -> str: return "--" + name.replace("_", "-")


def parse_flags(parser: argparse.ArgumentParser, argv: list[str]) -> JsonObject:
  """Parse a command line in vLLM's syntax, and set the log level. The options of `--config FILE` apply unless the
  command line has them."""
  args = vars(parser.parse_args(expand(argv)))
  if "config" in args: args = {**vars(parser.parse_args(read_config(args.pop("config")))), **args}
  if "log_level" in args: logger.setLevel(args["log_level"].upper())
  return args


def select_options(args: JsonObject, option_class: Any) -> JsonObject:
  """Return the fields of an option dataclass that the command line sets. LLMConfig: all options of LLM."""
  names = [field.name for field in dataclasses.fields(option_class)]
  if option_class is LLMConfig: names += NO_EFFECT
  return {name: args[name] for name in names if name in args}
