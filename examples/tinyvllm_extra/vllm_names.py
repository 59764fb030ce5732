"""The public names of tinyvllm, spelled as in vLLM."""
from typing import TypedDict

from tinyvllm.engine import (Backend as Backend, CompletionOutput as CompletionOutput, InputError as InputError,
                             Parts as Parts, RequestOutput as RequestOutput)

from .sampling.beam_search import BeamSearchParams as BeamSearchParams   # re-exported
from .sampling.params import Logprob as Logprob, SamplingParams as SamplingParams
from .llm import LLM as LLM
from .options import LoRARequest as LoRARequest
from .pooling.embeddings import PoolingParams as PoolingParams, PoolingRequestOutput as PoolingRequestOutput
from .serving.engine_metrics import RequestMetrics as RequestMetrics
from .sampling.structured_outputs import StructuredOutputsParams as StructuredOutputsParams

from .serving.async_engine import AsyncLLM as AsyncLLM   # last, as it imports the names above

LLMEngine = LLM   # vLLM's name


class TextPrompt(TypedDict): prompt: str
class TokensPrompt(TypedDict): prompt_token_ids: list[int]
