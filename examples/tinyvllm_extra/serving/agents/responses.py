"""POST /v1/responses, OpenAI's newer protocol, without stored state: the client sends the whole conversation. Its items
become a chat, and the answer's blocks become items. https://platform.openai.com/docs/api-reference/responses"""
from typing import Literal

from tinyvllm import RequestOutput
from tinyvllm.config import JsonObject, check
from tinyvllm_extra.serving.answers import Job
from tinyvllm_extra.serving.errors import internal_error
from tinyvllm_extra.serving.protocol import ChatCompletionRequest, with_fields

from .blocks import (AnswerOptions, Block, BlockBuilder, Part, Tolerant, add_message, chat_request, function,
                     named_event, text_of)

STATEFUL = ("previous_response_id", "conversation", "background", "prompt")   # need stored responses or prompts
# Properties of the response that repeat the request, with defaults
ECHO: JsonObject = {"instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
                    "reasoning": None, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": []}
# By kind of block: type and id prefix of its item, and the events of its text
ITEMS = {"content": ("message", "msg", "output_text"), "reasoning": ("reasoning", "rs", "reasoning_text"),
         "call": ("function_call", "fc", "function_call_arguments")}


@with_fields(type=str, role=Literal["user", "assistant", "system", "developer"], content=str | list[Part],
             summary=list[Part], call_id=str, name=str, arguments=str, input=str, output=str | list[Part])
class Item(Tolerant):
  """An input item: a message (type: also None), a function call, its output, or reasoning with a summary. input: the
  argument of a custom tool's call."""


@with_fields(name=str, description=str, parameters=JsonObject)
class ResponsesTool(Tolerant): type: str


@with_fields(name=str, mode=(Literal["auto", "required"], "auto"), tools=(list[ResponsesTool], []))
class ResponsesToolChoice(Tolerant):
  type: Literal["function", "allowed_tools"]

  def for_chat(self) -> JsonObject:
    if self.type == "function": return function(self.name)
    functions = [function(tool.name) for tool in self.tools if tool.type == "function"]
    return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": functions}}


@with_fields(input=(str | list[Item], ...), model=str, instructions=str, max_output_tokens=int,
             tools=list[ResponsesTool], tool_choice=Literal["none", "auto", "required"] | ResponsesToolChoice,
             parallel_tool_calls=bool, text=AnswerOptions, reasoning=AnswerOptions, metadata=JsonObject, stream=bool)
class ResponsesRequest(Tolerant):
  """Also accepts the sampling parameters of a chat."""
  def to_chat(self) -> ChatCompletionRequest:
    """Return the chat for a body. Raises InputError for what needs state or is not text."""
    for name in STATEFUL:
      check(not (self.model_extra or {}).get(name), f"{name}: the server stores nothing: send the whole input instead")
    messages: list[JsonObject] = []
    if self.instructions: add_message(messages, "system", self.instructions)
    if isinstance(self.input, str): add_message(messages, "user", self.input)
    else:
      for i, item in enumerate(self.input): add_item(messages, item, f"input.{i}")
    choice = self.tool_choice.for_chat() if isinstance(self.tool_choice, ResponsesToolChoice) else self.tool_choice
    return chat_request(
      self, {}, messages=messages, max_tokens=self.max_output_tokens, tool_choice=choice,
      tools=[function(x.name, description=x.description, parameters=x.parameters) for x in functions_of(self)],
      parallel_tool_calls=self.parallel_tool_calls, reasoning_effort=self.reasoning and self.reasoning.effort,
      response_format=self.text and self.text.response_format())


def functions_of(body: ResponsesRequest) -> list[ResponsesTool]:
  """Return the function tools. Tools of other types run on OpenAI's servers, or have no JSON arguments."""
  return [tool for tool in body.tools or [] if tool.type == "function"]


def add_item(messages: list[JsonObject], item: Item, path: str) -> None:
  """Add an input item to the chat. A custom tool's call is one with the argument `input`."""
  kind = item.type or "message"
  if kind == "message":
    check(item.role, f"{path}.role: a message must have a role")
    add_message(messages, str(item.role), text_of(item.content, f"{path}.content"))
  elif kind == "reasoning":   # with content or a summary, else encrypted
    text = text_of(item.content or item.summary, f"{path}.content")
    if text: add_message(messages, "assistant", reasoning_content=text)
  elif kind in ("function_call", "custom_tool_call"):
    arguments = item.arguments if kind == "function_call" else {"input": item.input}
    add_message(messages, "assistant", tool_calls=[{"id": item.call_id, **function(item.name, arguments=arguments)}])
  else:
    check(kind in ("function_call_output", "custom_tool_call_output"),
          f"{path}: items of type {kind!r} are not supported: leave it out, or send its text as a message")
    add_message(messages, "tool", text_of(item.output, f"{path}.output"), tool_call_id=item.call_id)


class ResponsesBuilder(BlockBuilder):
  """Writes a response object, or all events up to response.completed."""
  def __init__(self, source: ResponsesRequest, chat: ChatCompletionRequest, job: Job):
    super().__init__(chat, job)
    self.num_events = 0
    values = source.model_dump(by_alias=True, exclude_unset=True)
    self.echo = {**ECHO, **{name: values[name] for name in ECHO if values.get(name) is not None}}
    self.echo["tools"] = [tool.model_dump(exclude_unset=True) for tool in functions_of(source)]

  def event(self, event_name: str, **fields: object) -> bytes:
    self.num_events += 1
    return named_event({"type": f"response.{event_name}", "sequence_number": self.num_events - 1, **fields})

  def whole(self, error: str | None = None) -> JsonObject:
    """Return the response object so far."""
    is_cut = self.is_cut and not error
    status = "failed" if error else "in_progress" if not self.end else "incomplete" if is_cut else "completed"
    usage = self.job.usage() if self.end and not error else None
    return {
      "id": f"resp_{self.job.id}", "object": "response", "created_at": self.job.created, "status": status,
      "background": False, "model": self.job.model_name, "output": [self.item(block) for block in self.blocks],
      "store": False, "error": {"code": "server_error", "message": error} if error else None,
      "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None, "previous_response_id": None,
      "temperature": self.job.params.temperature, "top_p": self.job.params.top_p, "truncation": "disabled", **self.echo,
      "usage": usage and {
        "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": usage["total_tokens"]}}

  def item(self, block: Block, is_open: bool = False) -> JsonObject:
    """Return an output item. is_open: without its text."""
    kind, prefix, _ = ITEMS[block.kind]
    is_cut = self.is_cut and block is self.blocks[-1]
    status = "in_progress" if is_open else "incomplete" if is_cut else "completed"
    head = {"id": f"{prefix}_{block.id}", "type": kind, "status": status}
    content = [] if is_open else [self.part(block)]
    if block.kind == "content": return {**head, "role": "assistant", "content": content}
    if block.kind == "reasoning": return {**head, "summary": [], "content": content}
    return {**head, "call_id": f"call_{block.id}", "name": block.name, "arguments": block.text}

  def part(self, block: Block) -> JsonObject:
    if block.kind == "reasoning": return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

  def block_event(self, event_name: str, block: Block, **fields: object) -> bytes:
    """Return an event of a block's text."""
    place = {"item_id": f"{ITEMS[block.kind][1]}_{block.id}", "output_index": block.index}
    if block.kind != "call": place["content_index"] = 0
    if event_name.startswith("output_text"): fields["logprobs"] = []
    return self.event(event_name, **place, **fields)

  def opening(self, block: Block) -> bytes:
    item = self.event("output_item.added", output_index=block.index, item=self.item(block, is_open=True))
    return item if block.kind == "call" else item + self.block_event("content_part.added", block, part=self.part(block))

  def delta(self, block: Block, text: str) -> bytes:
    return self.block_event(f"{ITEMS[block.kind][2]}.delta", block, delta=text)

  def closing(self, block: Block) -> bytes:
    is_call = block.kind == "call"
    fields = {"arguments": block.text, "name": block.name} if is_call else {"text": block.text}
    done = self.block_event(f"{ITEMS[block.kind][2]}.done", block, **fields)
    if not is_call: done += self.block_event("content_part.done", block, part=self.part(block))
    return done + self.event("output_item.done", output_index=block.index, item=self.item(block))

  def first_events(self, output: RequestOutput) -> bytes:
    return b"".join(self.event(name, response=self.whole()) for name in ("created", "in_progress"))

  def last_events(self, error: Exception | None = None) -> bytes:
    response = self.whole(internal_error(error)["error"]["message"] if error else None)
    return self.event(response["status"], response=response)
