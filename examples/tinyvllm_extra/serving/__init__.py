"""An asyncio engine and an OpenAI-compatible HTTP server, whose dependencies `tinyvllm[server]` installs."""
