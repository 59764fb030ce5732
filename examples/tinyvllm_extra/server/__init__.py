"""`tinyvllm serve`: the engine for asyncio, and an HTTP server over it that speaks OpenAI's protocol. It is no part of
the engine, which knows nothing of it; `pip install 'tinyvllm[server]'` brings what it needs."""
from tinyvllm_extra.huggingface import optional

from .async_engine import AsyncLLM as AsyncLLM
from .client import Remote as Remote


def main(argv: list[str]) -> int:
  """`tinyvllm serve`, with the arguments behind it. Raises ValueError for what will not do."""
  return optional("tinyvllm_extra.server.server", "server").main(argv)
