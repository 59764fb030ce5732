"""`tinyvllm serve`: an engine for asyncio, and an HTTP server with OpenAI's protocol. `tinyvllm[server]` installs the
packages that the HTTP server needs."""
from tinyvllm_extra.packages import optional

from .async_engine import AsyncLLM as AsyncLLM
from .client import Remote as Remote


def main(argv: list[str]) -> int:
  """Run `tinyvllm serve` with the arguments after it, and return the exit code. Raises InputError for a bad option."""
  return optional("tinyvllm_extra.server.app", "server", "tinyvllm serve").main(argv)
