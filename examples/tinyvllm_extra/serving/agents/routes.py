"""The routes of coding agents. They run as chats."""
import asyncio, functools

from fastapi.responses import Response

from tinyvllm_extra.serving import protocol
from tinyvllm_extra.serving.generation import Serving

from .messages import MessagesBuilder, MessagesRequest
from .responses import ResponsesBuilder, ResponsesRequest


class Agents:
  """The routes of /v1/responses and /v1/messages."""
  def __init__(self, serving: Serving): self.serving = serving

  async def responses(self, body: ResponsesRequest) -> Response:
    return await self.serving.answer(body.to_chat(), functools.partial(ResponsesBuilder, body))

  async def messages(self, body: MessagesRequest) -> Response:
    return await self.serving.answer(body.to_chat(), MessagesBuilder)

  async def count_tokens(self, body: MessagesRequest) -> dict[str, int]:
    serving = self.serving
    serving.check_model(body.model or None)
    prompt, = await asyncio.to_thread(protocol.encode_prompts, body.to_chat(), serving.engine, serving.trusts_template)
    return {"input_tokens": len(prompt["prompt_token_ids"])}
