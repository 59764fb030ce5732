"""tinyvllm: a small vLLM on tinygrad. Begin with `tinyvllm.generate("Hello")`, or with
`LLM(model).generate(prompts, SamplingParams(...))`."""
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from tinyvllm_extra.vllm_names import AsyncLLM, Logprob, RequestMetrics, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
  from .engine import LLM, Backend, InputError, LLMEngine, generate, generate_stream
  from .request import CompletionOutput, RequestOutput

__version__ = "0.1.0"
NAMES = {"engine": ["LLM", "LLMEngine", "Backend", "InputError", "generate", "generate_stream"],
         "request": ["CompletionOutput", "RequestOutput"]}
EXTENSION = ["AsyncLLM", "Logprob", "RequestMetrics", "SamplingParams", "StructuredOutputsParams", "TextPrompt", "TokensPrompt"]
__all__ = [*NAMES["engine"], *NAMES["request"], *EXTENSION]


def __getattr__(name: str) -> Any:
  """Import a public name when it is first used: tinygrad and numpy take a while."""
  if name not in __all__: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from .config import has_extension   # without it there is the core's SamplingParams, but no AsyncLLM
  rest = "tinyvllm_extra.vllm_names" if has_extension() else "tinyvllm.request"
  module = next((f"tinyvllm.{module}" for module, names in NAMES.items() if name in names), rest)
  return getattr(importlib.import_module(module), name)
