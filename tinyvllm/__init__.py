"""tinyvllm: a small vLLM on tinygrad. Begin with `tinyvllm.generate("Hello")`, or with
`LLM(model).generate(prompts, SamplingParams(...))`."""
import functools, importlib, importlib.util, pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING: from tinyvllm_extra.vllm_names import *

__version__ = "0.1.0"
__all__ = ["LLM", "LLMEngine", "SamplingParams", "Backend", "CompletionOutput", "InputError", "Parts", "RequestOutput",
           "AsyncLLM", "BeamSearchParams", "Logprob", "RequestMetrics", "StructuredOutputsParams", "TextPrompt",
           "TokensPrompt", "PoolingParams", "PoolingRequestOutput", "LoRARequest", "generate", "generate_stream"]


def extension(name: str) -> Any:
  """Import tinyvllm_extra.NAME, the package with everything that a plain request does not use. Raises ImportError."""
  if importlib.util.find_spec("tinyvllm_extra"): return importlib.import_module(f"tinyvllm_extra.{name}")
  raise ImportError(f"{name} is part of the package tinyvllm_extra, which is not importable: pip install tinyvllm")


if not TYPE_CHECKING:   # or type checkers would accept every name
  def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: tinygrad and numpy take a while. Without the extension, LLM is the
    core's Engine. Raises ImportError for a name that only the extension has."""
    if name not in __all__: raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if importlib.util.find_spec("tinyvllm_extra"): return getattr(extension("vllm_names"), name)
    core_name = "Engine" if name in ("LLM", "LLMEngine") else name
    return getattr(importlib.import_module("tinyvllm.engine"), core_name, None) or extension(name)


# For help(). The core alone cannot import all names
def __dir__() -> list[str]: return __all__ if importlib.util.find_spec("tinyvllm_extra") else [*globals()]


# One LLM for each model
shared_llm = functools.cache(lambda model: importlib.import_module(__name__).LLM(model))


def generate(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> str:
  """Return the text that follows a prompt. sampling: fields of SamplingParams (default: temperature 0, greedy)."""
  return "".join(generate_stream(prompt, model, **sampling))


def generate_stream(prompt: str, model: str | pathlib.Path | None = None, **sampling: Any) -> Iterator[str]:
  """Like `generate`, but yield pieces of text as tokens are generated."""
  from .backend import exclusive
  with exclusive: llm = shared_llm(model and str(model))   # concurrent first calls get one engine
  outputs = llm.generate_stream(prompt, llm.parts.params_class(**{"temperature": 0.0, **sampling}))
  return (output.outputs[0].text for output in outputs if output.outputs[0].text)
