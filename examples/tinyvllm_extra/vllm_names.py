"""What scripts written for vLLM pass or import and the engine does not need: options without an effect here, and public
names."""
import importlib, logging
from typing import TYPE_CHECKING, Any, TypedDict

from tinyvllm.config import check, logger

if TYPE_CHECKING:
  from .logits import Logprob as Logprob, SamplingParams as SamplingParams   # re-exported
  from .metrics import RequestMetrics as RequestMetrics
  from .server import AsyncLLM as AsyncLLM
  from .structured_outputs import StructuredOutputsParams as StructuredOutputsParams

# Public names of tinyvllm, imported when they are first used, and their modules
MODULES = {"AsyncLLM": "server", "Logprob": "logits", "RequestMetrics": "metrics", "SamplingParams": "logits",
           "StructuredOutputsParams": "structured_outputs"}

# vLLM's options without an effect, and the values at which that is true (...: at any)
NO_EFFECT: dict[str, list] = {name: values for names, values in {   # type: ignore[misc]   # lists of anything
  "pipeline_parallel_size data_parallel_size": [1], "cpu_offload_gb": [0], "enable_chunked_prefill": [True, None],
  "tokenizer revision tokenizer_revision hf_token hf_overrides distributed_executor_backend": [None],
  "tokenizer_mode load_format config_format device": ["auto"], "task runner": ["auto", "generate"],
  "trust_remote_code disable_log_stats disable_custom_all_reduce": [True, False],
  "enable_lora skip_tokenizer_init disable_sliding_window": [False],
  "swap_space download_dir max_seq_len_to_capture": [...]}.items() for name in names.split()}


def __getattr__(name: str) -> Any:
  if name not in MODULES: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"tinyvllm_extra.{MODULES[name]}"), name)


class TextPrompt(TypedDict): prompt: str
class TokensPrompt(TypedDict): prompt_token_ids: list[int]


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
