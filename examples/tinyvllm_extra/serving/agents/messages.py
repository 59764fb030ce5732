"""POST /v1/messages and /v1/messages/count_tokens, Anthropic's protocol. Its content blocks become a chat, and the
answer's blocks become content blocks. https://docs.anthropic.com/en/api/messages"""
import re
from typing import Literal

from tinyvllm import RequestOutput
from tinyvllm.config import JsonObject, check
from tinyvllm_extra.serving.errors import anthropic_error, internal_error
from tinyvllm_extra.serving.protocol import ChatCompletionRequest, thinking, with_fields
from tinyvllm_extra.text.chat_template import parse_arguments

from .blocks import (AnswerOptions, Block, BlockBuilder, Part, Tolerant, add_message, chat_request, function,
                     named_event, text_of)

# Claude Code's first line of the system prompt, which differs in each request and so would defeat the prefix cache
BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:.*\n?")


@with_fields(thinking=str, id=str, name=str, input=JsonObject, tool_use_id=str, content=str | list[Part])
class ContentBlock(Part):
  """A block of text, thinking, a tool's call or its result."""


@with_fields(content=(str | list[ContentBlock], ...))
class Message(Tolerant): role: Literal["user", "assistant", "system"]


@with_fields(name=(str, ...), description=str, input_schema=JsonObject)   # no schema: runs on Anthropic's servers
class MessagesTool(Tolerant): ...


@with_fields(name=str, disable_parallel_tool_use=bool)
class MessagesToolChoice(Tolerant): type: Literal["auto", "any", "tool", "none"]


@with_fields(messages=(list[Message], ...), model=str, system=str | list[Part], max_tokens=int,
             stop_sequences=list[str], tools=list[MessagesTool], tool_choice=MessagesToolChoice, thinking=Part,
             output_config=AnswerOptions, stream=bool)
class MessagesRequest(Tolerant):
  """Also accepts the sampling parameters of a chat."""
  def to_chat(self) -> ChatCompletionRequest:
    """Return the chat for a body. Raises InputError for content that is not text."""
    messages: list[JsonObject] = []
    for part in [self.system] if isinstance(self.system, str) else self.system or []:
      text = BILLING_HEADER.sub("", part if isinstance(part, str) else text_of([part], "system"))
      if text: add_message(messages, "system", text)
    for i, message in enumerate(self.messages): add_turn(messages, message, f"messages.{i}.content")
    is_prefilled = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    choice = self.tool_choice or MessagesToolChoice(type="auto")
    names = {"any": "required", "tool": function(choice.name)}
    config = self.output_config or AnswerOptions()
    check(not config.format or config.format.type == "json_schema", "output_config: format.type must be json_schema")
    variables = thinking(self.thinking.type != "disabled") if self.thinking else {}
    return chat_request(
      self, variables, messages=messages, max_tokens=self.max_tokens, stop=self.stop_sequences,
      reasoning_effort=config.effort,
      tools=[function(x.name, description=x.description, parameters=x.input_schema) for x in self.tools or []
             if x.input_schema is not None],
      tool_choice=names.get(choice.type, choice.type), parallel_tool_calls=not choice.disable_parallel_tool_use,
      response_format=config.response_format(), continue_final_message=is_prefilled or None)


def add_turn(messages: list[JsonObject], message: Message, path: str) -> None:
  """Add a message to the chat. Each tool result in it becomes a message."""
  texts = [message.content] if isinstance(message.content, str) else []
  for block in message.content if isinstance(message.content, list) else []:
    if block.type == "tool_result":
      add_message(messages, "tool", text_of(block.content, path), tool_call_id=block.tool_use_id)
    elif block.type == "tool_use":
      call = {"id": block.id, **function(block.name, arguments=block.input or {})}
      add_message(messages, "assistant", tool_calls=[call])
    elif block.type == "thinking": add_message(messages, "assistant", reasoning_content=block.thinking or "")
    elif block.type != "redacted_thinking": texts.append(text_of([block], path))
  if texts: add_message(messages, message.role, "\n".join(texts))


class MessagesBuilder(BlockBuilder):
  """Writes a message, or all events from message_start to message_stop."""
  def whole(self) -> JsonObject:
    """Return the message so far."""
    return {"id": f"msg_{self.job.id}", "type": "message", "role": "assistant", "model": self.job.model_name,
            "content": [*map(self.content_block, self.blocks)], **self.stop(), "usage": self.usage()}

  def content_block(self, block: Block, is_open: bool = False) -> JsonObject:
    """Return a content block. is_open: without its text."""
    text = "" if is_open else block.text
    if block.kind == "content": return {"type": "text", "text": text}
    if block.kind == "reasoning":   # clients drop thinking without a signature
      return {"type": "thinking", "thinking": text, "signature": "" if is_open else block.id}
    return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": parse_arguments(text)}

  def usage(self) -> JsonObject:
    usage = self.job.usage()
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"input_tokens": usage["prompt_tokens"] - num_cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached, "output_tokens": usage["completion_tokens"] if self.end else 0}

  def stop(self) -> dict[str, str | None]:
    if not self.end: return {"stop_reason": None, "stop_sequence": None}
    sequence = self.end.stop_reason if isinstance(self.end.stop_reason, str) else None
    reason = "tool_use" if self.has_calls else "stop_sequence" if sequence else "end_turn"
    return {"stop_reason": "max_tokens" if self.is_cut else reason, "stop_sequence": sequence}

  def first_events(self, output: RequestOutput) -> bytes:
    return named_event({"type": "message_start", "message": self.whole()})

  def block_event(self, name: str, block: Block, **fields: object) -> bytes:
    return named_event({"type": f"content_block_{name}", "index": block.index, **fields})

  def opening(self, block: Block) -> bytes:
    return self.block_event("start", block, content_block=self.content_block(block, is_open=True))

  def delta(self, block: Block, text: str) -> bytes:
    kind, field = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking"),
                   "call": ("input_json_delta", "partial_json")}[block.kind]
    return self.block_event("delta", block, delta={"type": kind, field: text})

  def closing(self, block: Block) -> bytes:
    signature = {"type": "signature_delta", "signature": block.id}
    start = self.block_event("delta", block, delta=signature) if block.kind == "reasoning" else b""
    return start + self.block_event("stop", block)

  def last_events(self, error: Exception | None = None) -> bytes:
    if error: return named_event(anthropic_error(internal_error(error)["error"]))
    end = {"type": "message_delta", "delta": self.stop(), "usage": self.usage()}
    return named_event(end) + named_event({"type": "message_stop"})
