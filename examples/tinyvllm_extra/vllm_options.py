"""Reads LLM's options under vLLM's names. vllm_options.json lists vLLM's options without effect here and its spellings
of values, from the engine arguments and `vllm serve` arguments of vLLM 0.6 to 0.18."""
import dataclasses, pathlib

from tinyvllm.config import JsonObject, check, read_json

from .options import LLMConfig
from .sampling.params import sampling_defaults
from .text.chat_template import template_text

TABLE = read_json(pathlib.Path(__file__).with_suffix(".json"))
# vLLM's options without an effect, and the values at which that is true (None: at any)
NO_EFFECT: dict[str, list | None] = TABLE["only_at"] | {
  name: group["values"] for group in TABLE["without_effect"] for name in group["names"]}


def read_options(options: JsonObject, model: object = None) -> LLMConfig:
  """Check LLM's options under vLLM's names, and return the config, with the text of the chat template. Raises
  InputError for an unknown option, or for one without effect whose value would have one."""
  options = {**({"runner": "pooling"} if options.get("task") == "embed" else {}), **options}   # task: the former name
  if options.get("tokenizer") and str(options["tokenizer"]) == str(model): del options["tokenizer"]   # the model's own
  for name, values in [(name, NO_EFFECT[name]) for name in options if name in NO_EFFECT]:
    alternatives = ", ".join(repr(x) for x in values or () if x is not None)
    check(values is None or options[name] in values, f"{name}={options[name]!r} is not supported: "
          f"{f'use {alternatives}, or ' if alternatives else ''}leave it out")
  config = LLMConfig(**{name: TABLE["spellings"].get(name, {}).get(str(x), x) for name, x in options.items()
                        if name not in NO_EFFECT})
  return dataclasses.replace(config, chat_template=template_text(config.chat_template),
                             override_generation_config=sampling_defaults(config.override_generation_config or {}))
