"""tinyvllm: a vLLM in under 1000 lines on tinygrad. Begin with `tinyvllm.generate("Hello")`, or with
`LLM(model).generate(prompts, SamplingParams(...))`."""
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from .engine import LLM, LLMEngine, Logprob, RequestMetrics, generate, generate_stream
  from .scheduler import CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "LLMEngine", "generate", "generate_stream", "CompletionOutput", "Logprob", "RequestMetrics",
           "RequestOutput", "SamplingParams", "StructuredOutputsParams"]


def __getattr__(name: str) -> Any:
  """A public name, when it is first used: tinygrad and numpy take a while to import."""
  if name not in __all__: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from . import engine, scheduler
  return getattr(engine, name, None) or getattr(scheduler, name)
