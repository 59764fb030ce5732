"""The common code of /v1/responses and /v1/messages: both translate their body into a chat, and answer with a list of
blocks of text, reasoning or tool calls. Invariant: at most the last block is open."""
import dataclasses, uuid
from collections.abc import Iterable
from typing import Literal

import orjson, pydantic
from fastapi.exceptions import RequestValidationError

from tinyvllm import CompletionOutput, RequestOutput
from tinyvllm.config import InputError, JsonObject
from tinyvllm_extra.serving.answers import Job
from tinyvllm_extra.serving.protocol import (FIELDS, SAMPLING, ChatCompletionRequest, JsonBody, check_unknown,
                                             with_fields)
from tinyvllm_extra.text.chat_template import INSTRUCTIONS, plain_text

# Fields that the chat takes over unchanged
CHAT_FIELDS = SAMPLING.keys() - {"n", "logprobs", "prompt_logprobs"} | {"model", "stream", "priority", "cache_salt"}


class Tolerant(JsonBody):
  """An object that may have unknown fields."""
  model_config = pydantic.ConfigDict(extra="allow", strict=True)


@with_fields(text=str)
class Part(Tolerant): type: str


@with_fields(schema_=(JsonObject | None, pydantic.Field(None, alias="schema")))
class TextFormat(Tolerant): type: Literal["text", "json_object", "json_schema"]


@with_fields(format=TextFormat, effort=str)
class AnswerOptions(Tolerant):
  """The format of an answer's text, and the effort of its reasoning."""
  def response_format(self) -> JsonObject | None:
    """Return the format as a chat's response_format."""
    if not self.format: return None
    schema = {"json_schema": {"schema": self.format.schema_}} if self.format.type == "json_schema" else {}
    return {"type": self.format.type, **schema}


def text_of(content: "str | Iterable[Part] | None", path: str) -> str:
  """Return the text of a message's content. Raises InputError for images, files and audio."""
  parts = content if isinstance(content, str | None) else [part.model_dump() for part in content]
  try: return plain_text({"content": parts})
  except InputError as error: raise InputError(f"{path}: {error}") from error


def add_message(messages: list[JsonObject], role: str, text: str = "", tool_calls: list[JsonObject] | None = None,
                **fields: object) -> None:
  """Add a message to a chat. Merge it with the last one if both are the assistant's or the system's."""
  kind = [INSTRUCTIONS if x in INSTRUCTIONS else x for x in (role, messages[-1]["role"] if messages else None)]
  if kind[0] != kind[1] or role in ("user", "tool"):
    messages.append({"role": role, "content": ""})
  last = messages[-1]
  last["content"] = "\n".join(filter(None, [last["content"], text]))
  if tool_calls: fields["tool_calls"] = last.get("tool_calls", []) + tool_calls
  last |= fields


def function(name: str | None, **fields: object) -> JsonObject:
  return {"type": "function", "function": {"name": name, **fields}}


def chat_request(body: Tolerant, chat_template_kwargs: JsonObject, **fields: object) -> ChatCompletionRequest:
  """Return a chat with `fields` and with the body's CHAT_FIELDS. chat_template_kwargs: defaults for the body's. Raises
  RequestValidationError, and InputError for a field that must not be ignored."""
  options = {name: value for name, value in body if name in CHAT_FIELDS}
  extra = body.model_extra or {}
  # Other fields of the official clients have no effect here
  for name in extra.keys() - options.keys() - {"chat_template_kwargs", *FIELDS["ignored_of_agents"]}:
    if extra[name] is not None: check_unknown(name, extra[name])
  variables = extra.get("chat_template_kwargs", {})
  if isinstance(variables, dict): variables = {**chat_template_kwargs, **variables}
  try: return ChatCompletionRequest.model_validate({**options, "chat_template_kwargs": variables, **fields})
  except pydantic.ValidationError as error:
    raise RequestValidationError([{**x, "loc": ("body", *x["loc"])} for x in error.errors()]) from error


@dataclasses.dataclass
class Block:
  kind: str   # content, reasoning or call
  index: int
  id: str
  name: str = ""   # function name of a call
  text: str = ""   # text so far; for a call, its arguments


def named_event(content: JsonObject) -> bytes:
  """Return a server-sent event whose name is the content's type."""
  return b"event: %b\ndata: %b\n\n" % (content["type"].encode(), orjson.dumps(content))


class BlockBuilder:
  """Writes an answer that is a list of blocks. Subclasses write the whole answer, the events of a block, and the first
  and last events."""
  def __init__(self, chat: ChatCompletionRequest, job: Job):
    self.job = job
    self.parser, = job.parsers(chat)
    self.blocks: list[Block] = []
    self.end: CompletionOutput | None = None   # the last output

  is_cut = property(lambda self: self.end is not None and self.end.finish_reason != "stop")
  has_calls = property(lambda self: any(block.kind == "call" for block in self.blocks))

  def response(self) -> JsonObject:
    output = self.job.requests[0].output()
    self.events(0, output, output.outputs[0])
    return self.whole()

  def events(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
    """Add a completion's new text to the blocks, and return the events."""
    events: list[bytes] = []
    for kind, text in self.parser.feed(completion.text, bool(completion.finish_reason)):
      if kind == "call": events += self.start(kind, text)
      elif kind != "arguments" and (not self.blocks or kind != self.blocks[-1].kind): events += self.start(kind)
      if kind == "call": continue
      self.blocks[-1].text += text
      events.append(self.delta(self.blocks[-1], text))
    if completion.finish_reason:
      if not self.blocks: events += self.start("content")
      self.end = completion
      events.append(self.closing(self.blocks[-1]))
    return b"".join(events)

  def start(self, kind: str, name: str = "") -> list[bytes]:
    """Close the last block and open a new one."""
    closing = [self.closing(block) for block in self.blocks[-1:]]
    self.blocks.append(Block(kind, len(self.blocks), uuid.uuid4().hex, name))
    return [*closing, self.opening(self.blocks[-1])]

  def whole(self) -> JsonObject: raise NotImplementedError
  def opening(self, block: Block) -> bytes: raise NotImplementedError
  def delta(self, block: Block, text: str) -> bytes: raise NotImplementedError
  def closing(self, block: Block) -> bytes: raise NotImplementedError
