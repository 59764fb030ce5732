"""tinyvllm: a vLLM in under 1000 lines on tinygrad. Begin with `tinyvllm.generate("Hello")`, or with
`LLM(model).generate(prompts, SamplingParams(...))`."""
from .engine import LLM, LLMEngine, generate, generate_stream
from .scheduler import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
