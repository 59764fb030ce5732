"""tinyvllm: a small vLLM on tinygrad. Begin with `tinyvllm.generate("Hello")`, or with
`LLM(model).generate(prompts, SamplingParams(...))`."""
import importlib
from typing import TYPE_CHECKING, Any

from .config import extension, has_extension

if TYPE_CHECKING:
  from tinyvllm_extra.vllm_names import AsyncLLM, Logprob, RequestMetrics, SamplingParams, StructuredOutputsParams
  from tinyvllm_extra.vllm_names import BeamSearchParams, TextPrompt, TokensPrompt
  from .engine import LLM, Backend, CompletionOutput, InputError, LLMEngine, RequestOutput, generate, generate_stream

__version__ = "0.1.0"
__all__ = ["AsyncLLM", "BeamSearchParams", "Logprob", "RequestMetrics", "SamplingParams", "StructuredOutputsParams",
           "TextPrompt", "TokensPrompt", "LLM", "Backend", "CompletionOutput", "InputError", "LLMEngine",
           "RequestOutput", "generate", "generate_stream"]


def __getattr__(name: str) -> Any:
  """Import a public name when it is first used: tinygrad and numpy take a while. The core has SamplingParams, too."""
  if name not in __all__: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  if name in __all__[:8] and has_extension(): return getattr(extension("vllm_names"), name)
  return getattr(importlib.import_module("tinyvllm.engine"), name, None) or extension(name)   # which raises ImportError
