"""/v1/responses and /v1/messages, the protocols of coding agents. Both translate their body into a chat, and answer
with a list of blocks of text, reasoning or tool calls."""
import pathlib, re
from typing import Any, Literal

import pydantic

from tinyvllm.config import InputError, JsonObject, check, read_json
from tinyvllm_extra.text.chat_template import INSTRUCTIONS, plain_text

from . import answers, errors
from .protocol import SAMPLING, Body, ChatCompletionRequest, Int, JsonBody, Limit, thinking, with_fields

# ignored: fields of the official clients without effect here. refused: fields of a body that need stored responses or
# prompts, or have another name in its protocol, with what to do instead. echo: properties of a response that repeat the
# request, with defaults. messages, responses: templates of an answer and of each kind of block, with names of values,
# see BlockBuilder: a whole one, and the events that open it, add text and close it; failed: after an error; usage: of a
# finished response. Clients drop thinking without signature
TABLES = read_json(pathlib.Path(__file__).with_suffix(".json"))
# Fields that the chat takes over unchanged
CHAT_FIELDS = {name: x for name, x in SAMPLING.items() if name not in ("n", "logprobs", "prompt_logprobs")} | {
  "model": str, "stream": bool, "priority": Int, "cache_salt": str, "chat_template_kwargs": (dict, {})}
COMMON = CHAT_FIELDS | dict.fromkeys(TABLES["ignored"], object)


@with_fields(text=str)
class Part(JsonBody): type: str


@with_fields(schema_=(JsonObject | None, pydantic.Field(None, alias="schema")))
class TextFormat(JsonBody): type: Literal["text", "json_object", "json_schema"]


@with_fields(format=TextFormat, effort=str)
class AnswerOptions(JsonBody):
  """The format of an answer's text, and the effort of its reasoning."""
  def response_format(self) -> JsonObject | None:
    """Return the format as a chat's response_format."""
    form = self.format
    return form and {"type": form.type, "json_schema": {"schema": form.schema_} if form.type == "json_schema" else None}


def text_of(content: str | list[Part] | None, path: str) -> str:
  """Return the text of a message's content. Raises InputError for images, files and audio."""
  parts = content if isinstance(content, str | None) else [part.model_dump() for part in content]
  try: return plain_text({"content": parts})
  except InputError as error: raise InputError(f"{path}: {error}") from error


def add_message(messages: list[JsonObject], role: str, text: str = "", tool_calls: list[JsonObject] | None = None,
                **fields: object) -> None:
  """Add a message to a chat. Merge it with the last one if both are the assistant's or the system's."""
  kind = [INSTRUCTIONS if x in INSTRUCTIONS else x for x in (role, messages[-1]["role"] if messages else None)]
  if kind[0] != kind[1] or role in ("user", "tool"): messages.append({"role": role, "content": ""})
  last = messages[-1]
  last["content"] = "\n".join(filter(None, [last["content"], text]))
  if tool_calls: fields["tool_calls"] = last.get("tool_calls", []) + tool_calls
  last |= fields


def function(name: str | None, **fields: object) -> JsonObject:
  return {"type": "function", "function": {"name": name, **fields}}


def chat_request(body: Body, **fields: object) -> ChatCompletionRequest:
  """Return a chat with `fields` and with the body's CHAT_FIELDS. Raises InputError or RequestValidationError."""
  for name, remedy in TABLES["refused"][type(body).__name__].items():
    check(not (x := getattr(body, name)) or (name, x) == ("n", 1), f"{name}={x!r}: {remedy}")
  options = {name: value for name, value in body if name in CHAT_FIELDS}
  try: return ChatCompletionRequest.model_validate({**options, **fields})
  except pydantic.ValidationError as error: raise errors.RequestValidationError(error.errors()) from error


# POST /v1/messages and /v1/messages/count_tokens, Anthropic's protocol. Its content blocks become a chat, and the
# answer's blocks become content blocks. https://docs.anthropic.com/en/api/messages

# Claude Code's first line of the system prompt, which differs in each request and so would defeat the prefix cache
BILLING_HEADER = re.compile(r"\Ax-anthropic-billing-header:.*\n*")


@with_fields(thinking=str, id=str, name=str, input=JsonObject, tool_use_id=str, content=str | list[Part])
class ContentBlock(Part):
  """A block of text, thinking, a tool's call or its result."""


@with_fields(content=(str | list[ContentBlock], ...))
class Message(JsonBody): role: Literal["user", "assistant", "system"]


@with_fields(type=str, name=(str, ...), description=str, input_schema=JsonObject)
class MessagesTool(JsonBody): ...


@with_fields(name=str, disable_parallel_tool_use=bool)
class MessagesToolChoice(JsonBody): type: Literal["auto", "any", "tool", "none"]


@with_fields(**COMMON | dict.fromkeys(TABLES["refused"]["MessagesRequest"], object), messages=(list[Message], ...),
             system=str | list[Part], stop_sequences=list[str], tools=list[MessagesTool],
             tool_choice=MessagesToolChoice, thinking=Part, output_config=(AnswerOptions, AnswerOptions()))
class MessagesRequest(Body):
  """Also accepts the sampling parameters of a chat."""
  def to_chat(self) -> ChatCompletionRequest:
    """Return the chat for a body. Raises InputError for content that is not text."""
    messages: list[JsonObject] = []
    instructions = BILLING_HEADER.sub("", text_of(self.system, "system"))
    if instructions: add_message(messages, "system", instructions)
    for i, message in enumerate(self.messages): add_turn(messages, message, f"messages.{i}.content")
    is_prefilled = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
    choice = self.tool_choice or MessagesToolChoice(type="auto")
    names = {"any": "required", "tool": function(choice.name)}
    variables = thinking(self.thinking.type != "disabled") if self.thinking else {}
    return chat_request(
      self, messages=messages, stop=self.stop_sequences, reasoning_effort=self.output_config.effort,
      chat_template_kwargs={**variables, **self.chat_template_kwargs},
      tools=[function(x.name, description=x.description, parameters=x.input_schema) for x in self.tools or []
             if x.input_schema is not None or x.type in (None, "custom")],   # others run on Anthropic's servers
      tool_choice=names.get(choice.type, choice.type), parallel_tool_calls=not choice.disable_parallel_tool_use,
      response_format=self.output_config.response_format(), continue_final_message=is_prefilled or None)


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


class MessagesBuilder(answers.BlockBuilder):
  """Writes a message, or all events from message_start to message_stop."""
  templates = TABLES["messages"]

  def values(self) -> JsonObject:
    sequence = self.end.stop_reason if self.end and isinstance(self.end.stop_reason, str) else None
    has_calls = any(block["$kind"] == "call" for block in self.blocks)
    reason = "max_tokens" if self.is_cut else "tool_use" if has_calls else "stop_sequence" if sequence else "end_turn"
    return {**super().values(), "$reason": reason if self.end else None, "$sequence": sequence,
            "$error": self.error and errors.anthropic_error(self.error)}


# POST /v1/responses, OpenAI's newer protocol, without stored state: the client sends the whole conversation. Its items
# become a chat, and the answer's blocks become items. https://platform.openai.com/docs/api-reference/responses


@with_fields(type=str, role=Literal["user", "assistant", "system", "developer"], content=str | list[Part],
             summary=list[Part], call_id=str, name=str, arguments=str, input=str, output=str | list[Part])
class Item(JsonBody):
  """An input item: a message (type: also None), a function call, its output, or reasoning with a summary. input: the
  argument of a custom tool's call."""


@with_fields(name=str, description=str, parameters=JsonObject)
class ResponsesTool(JsonBody): type: str


@with_fields(name=str, mode=(Literal["auto", "required"], "auto"), tools=(list[ResponsesTool], []))
class ResponsesToolChoice(JsonBody):
  type: Literal["function", "allowed_tools"]

  def for_chat(self) -> JsonObject:
    if self.type == "function": return function(self.name)
    functions = [function(tool.name) for tool in self.tools if tool.type == "function"]
    return {"type": "allowed_tools", "allowed_tools": {"mode": self.mode, "tools": functions}}


@with_fields(**COMMON | dict.fromkeys(TABLES["refused"]["ResponsesRequest"], object) | {"metadata": JsonObject},
             input=(str | list[Item], ...), instructions=str, max_output_tokens=Limit, tools=list[ResponsesTool],
             tool_choice=Literal["none", "auto", "required"] | ResponsesToolChoice, parallel_tool_calls=bool,
             text=AnswerOptions, reasoning=AnswerOptions)
class ResponsesRequest(Body):
  """Also accepts the sampling parameters of a chat."""
  def to_chat(self) -> ChatCompletionRequest:
    """Return the chat for a body. Raises InputError for what needs state or is not text."""
    messages: list[JsonObject] = []
    if self.instructions: add_message(messages, "system", self.instructions)
    if isinstance(self.input, str): add_message(messages, "user", self.input)
    for i, item in enumerate(self.input if isinstance(self.input, list) else ()): add_item(messages, item, f"input.{i}")
    choice = self.tool_choice.for_chat() if isinstance(self.tool_choice, ResponsesToolChoice) else self.tool_choice
    return chat_request(
      self, messages=messages, max_tokens=self.max_output_tokens, tool_choice=choice,
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
    check(item.role and item.content is not None, f"{path}.role, {path}.content: a message must have both")
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


class ResponsesBuilder(answers.BlockBuilder):
  """Writes a response object, or all events up to response.completed."""
  templates = TABLES["responses"]

  def __init__(self, source: ResponsesRequest, *generation: Any):
    super().__init__(*generation)
    fields = TABLES["echo"] | source.model_dump(by_alias=True, exclude_unset=True, include={*TABLES["echo"]})
    fields["tools"] = [tool.model_dump(exclude_unset=True) for tool in functions_of(source)]
    self.echo = {f"${name}": x for name, x in fields.items()}

  def values(self) -> JsonObject:
    status = "failed" if self.error else "in_progress" if not self.end else "incomplete" if self.is_cut else "completed"
    values = {**super().values(), **self.echo, "$status": status, "$event": f"response.{status}",
              "$error": self.error and {"code": "server_error", "message": self.error["message"]},
              "$details": {"reason": "max_output_tokens"} if self.is_cut else None,
              "$temperature": self.params.temperature, "$top_p": self.params.top_p}
    return {**values, "$usage": answers.fill(self.templates["usage"], values) if self.end and not self.error else None}
