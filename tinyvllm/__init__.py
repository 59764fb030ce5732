"""tinyvllm: a small vLLM on tinygrad. Begin with `tinyvllm.generate("Hello")`, or with
`LLM(model).generate(prompts, SamplingParams(...))`."""
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from tinyvllm_extra.structured_outputs import StructuredOutputsParams
  from .engine import LLM, LLMEngine, generate, generate_stream
  from .request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams
  from .request import TextPrompt, TokensPrompt

__version__ = "0.1.0"
__all__ = ["LLM", "LLMEngine", "generate", "generate_stream", "CompletionOutput", "Logprob", "RequestMetrics",
           "RequestOutput", "SamplingParams", "StructuredOutputsParams", "TextPrompt", "TokensPrompt"]
# What is not in tinyvllm.request: one name is of a package beside the engine, the first four are the engine's
PLACES: dict[str, str] = {"StructuredOutputsParams": "tinyvllm_extra.structured_outputs",
          **dict.fromkeys(__all__[:4], "tinyvllm.engine")}


def __getattr__(name: str) -> Any:
  """A public name, when it is first used: tinygrad and numpy take a while to import."""
  if name not in __all__: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(PLACES.get(name, "tinyvllm.request")), name)
