"""Public names of tinyvllm beyond the core's, spelled as in vLLM."""
from typing import TypedDict

from .beam_search import BeamSearchParams as BeamSearchParams   # re-exported
from .logits import Logprob as Logprob, SamplingParams as SamplingParams
from .pooling import PoolingParams as PoolingParams, PoolingRequestOutput as PoolingRequestOutput
from .metrics import RequestMetrics as RequestMetrics
from .structured_outputs import StructuredOutputsParams as StructuredOutputsParams

from .server import AsyncLLM as AsyncLLM   # last, as it imports the names above


class TextPrompt(TypedDict): prompt: str
class TokensPrompt(TypedDict): prompt_token_ids: list[int]
