"""`tinyvllm serve`: an asyncio engine and an OpenAI-compatible HTTP server, whose dependencies `tinyvllm[server]`
installs."""
from tinyvllm_extra.packages import optional

from .async_engine import AsyncLLM as AsyncLLM
from .client import Remote as Remote


def main(argv: list[str]) -> int:
  """Run `tinyvllm serve` with the arguments after it. Return the exit code. Raises InputError for an invalid option."""
  return optional("tinyvllm_extra.server.app", "server", "tinyvllm serve").main(argv)
