"""tinyvllm: a small vLLM on tinygrad. Begin with `tinyvllm.generate("Hello")`, or with
`LLM(model).generate(prompts, SamplingParams(...))`."""
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from tinyvllm_extra.logits import Logprob
  from tinyvllm_extra.server import AsyncLLM
  from tinyvllm_extra.structured_outputs import StructuredOutputsParams
  from tinyvllm_extra.vllm_names import TextPrompt, TokensPrompt
  from .backend import Backend
  from .config import InputError
  from .engine import LLM, LLMEngine, generate, generate_stream
  from .request import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams

__version__ = "0.1.0"
MODULES = {"tinyvllm.engine": ["LLM", "LLMEngine", "generate", "generate_stream"],
           "tinyvllm.request": ["CompletionOutput", "RequestMetrics", "RequestOutput", "SamplingParams"],
           "tinyvllm.backend": ["Backend"], "tinyvllm.config": ["InputError"],
           "tinyvllm_extra.logits": ["Logprob"], "tinyvllm_extra.server": ["AsyncLLM"],
           "tinyvllm_extra.structured_outputs": ["StructuredOutputsParams"],
           "tinyvllm_extra.vllm_names": ["TextPrompt", "TokensPrompt"]}
PLACES = {name: module for module, names in MODULES.items() for name in names}
__all__ = [*PLACES]


def __getattr__(name: str) -> Any:
  """Import a public name when it is first used: tinygrad and numpy take a while."""
  if name not in PLACES: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(PLACES[name]), name)
