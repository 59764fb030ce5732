"""Answers as one JSON response, or a stream of server-sent events: choices in OpenAI's formats with vLLM's extra
fields, or blocks in the formats of agents.py. A builder is the generation for one request body, and writes its answer.
No function here runs a request."""
import collections, dataclasses, itertools, time, typing, uuid

import orjson

from tinyvllm import CompletionOutput, Logprob, RequestOutput, SamplingParams, engine
from tinyvllm.config import JsonObject, check
from tinyvllm_extra.text import chat_template, huggingface
from tinyvllm_extra.text.parsers import Parser

from . import errors, protocol


def num_tokens(requests: list[engine.Request]) -> tuple[int, int]:
  """Return the numbers of prompt tokens and of generated tokens."""
  prompt = sum(request.sequences[0].num_prompt for request in requests)   # samples share the prompt
  return prompt, sum(request.metrics.num_generated for request in requests)


def usage_of(prompt: int, generated: int) -> JsonObject:
  """Return these numbers of tokens in OpenAI's format."""
  return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


@dataclasses.dataclass
class Generation:
  """The requests of a body, and what their answer depends on."""
  body: protocol.GenerationRequest
  id: str
  model_name: str
  params: SamplingParams
  tokenizer: huggingface.ChatTokenizer
  parsers: list[Parser]   # one for each sample of a chat
  requests: list[engine.Request]   # one for each prompt
  created: int = dataclasses.field(default_factory=lambda: int(time.time()))

  def __post_init__(self) -> None: ...   # for subclasses
  def usage(self) -> JsonObject:
    cached = sum(request.sequences[0].num_cached or 0 for request in self.requests)
    return {**usage_of(*num_tokens(self.requests)), "prompt_tokens_details": {"cached_tokens": cached}}


# A token after the previous one, if any, with the log probabilities of it and of the best ones; the first token of a
# prompt has none
Token = typing.NamedTuple("Token", [("before", list[int]), ("id", int), ("logprobs", dict[int, Logprob])])


def event(content: JsonObject) -> bytes:
  """Return a server-sent event. Its name is the content's type, if it has one."""
  name = b"event: %b\n" % content["type"].encode() if "type" in content else b""
  return b"%bdata: %b\n\n" % (name, orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS))   # token ids are keys


class ChoicesBuilder(Generation):
  """Writes an answer that has choices, one for each sample of each prompt. Subclasses write the choice objects."""
  kind = ""            # start of the answer's id
  objects = ("", "")   # types of a whole answer and of a chunk

  def __post_init__(self) -> None:
    """Raises InputError if a prompt and the requested output exceed the context, as vLLM does."""
    size = self.body.max_tokens or 0
    self.sequences = [seq for request in self.requests for seq in request.sequences]   # by choice
    for seq in self.sequences:
      check(seq.num_prompt + size <= seq.max_len or self.params.max_tokens != size,   # --override-generation-config
            f"This model's maximum context length is {seq.max_len} tokens. However, you requested {size} output tokens "
            f"and your prompt contains {seq.num_prompt} input tokens: request at most {seq.max_len - seq.num_prompt}")
    self.head: JsonObject = {"id": f"{self.kind}-{self.id}", "created": self.created, "model": self.model_name,
                             "object": self.objects[bool(self.body.stream)]}
    options = self.body.stream_options or protocol.StreamOptions()
    self.has_running_usage = options.continuous_usage_stats and options.include_usage is not False   # in each chunk
    if options.include_usage or self.has_running_usage: self.head["usage"] = None   # until the last chunk
    self.num_generated = collections.Counter[int]()   # tokens so far, by choice
    self.offsets = collections.Counter[int]()         # text_offset of a completion's next token, by choice

  def choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> JsonObject:
    """Return a choice object with a completion's text and tokens, in a stream only the new ones."""
    raise NotImplementedError

  def response(self) -> JsonObject:
    outputs = enumerate(request.output() for request in self.requests)
    choices = [self.choice(i * self.params.n + x.index, output, x) for i, output in outputs for x in output.outputs]
    return self.wrap(choices, usage=self.usage())

  def first_events(self, output: RequestOutput) -> bytes: return b""   # before all others

  def events(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
    """Return the events of a sample with new tokens."""
    index = prompt_index * self.params.n + completion.index
    choice = self.choice(index, output, completion)
    self.num_generated[index] += len(completion.token_ids)
    return self.chunk(choice)

  def last_events(self, error: Exception | None = None) -> bytes:
    """Return the events after all samples have finished, or instead of them the event of an internal error."""
    if error: return event(errors.internal_error(error))
    return (event(self.wrap([], usage=self.usage())) if "usage" in self.head else b"") + b"data: [DONE]\n\n"

  def wrap(self, choices: list[JsonObject], **fields: object) -> JsonObject:
    """Return a whole answer or a chunk."""
    return {**self.head, "choices": choices, **fields}

  def chunk(self, choice: JsonObject, **fields: object) -> bytes:
    """Return the event of one choice, with its usage so far if requested (stream_options.continuous_usage_stats)."""
    i = choice["index"]
    if self.has_running_usage: fields["usage"] = usage_of(self.sequences[i].num_prompt, self.num_generated[i])
    return event(self.wrap([choice], **fields))

  def optional(self, **fields: object) -> JsonObject:
    """Return fields that are None unless requested. As in vLLM, chunks leave None out, whole answers have null."""
    return {name: x for name, x in fields.items() if x is not None or not self.body.stream}

  def prompt_fields(self, output: RequestOutput) -> JsonObject:
    """Return the fields that describe a prompt, under vLLM's names."""
    rows = output.prompt_logprobs if self.body.prompt_logprobs is not None else None
    return self.optional(prompt_token_ids=output.prompt_token_ids if self.body.return_token_ids else None,
                         prompt_logprobs=rows and [x and {i: y._asdict() for i, y in x.items()} for x in rows])

  def choice_fields(self, index: int, completion: CompletionOutput, **own: object) -> JsonObject:
    """Return a choice object. own: the fields that only completions or only chats have."""
    ids = completion.token_ids if self.body.return_token_ids else None
    return {"index": index, "logprobs": None, "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason, **own, **self.optional(token_ids=ids)}

  def tokens(self, index: int, rows: list[dict[int, Logprob]], with_prompt: bool = False) -> list[Token]:
    """Return a choice's new tokens, with_prompt: after its prompt. rows: each token's log probabilities."""
    seq = self.sequences[index]
    start = 0 if with_prompt else seq.num_prompt + self.num_generated[index]
    return [Token(seq.tokens[max(0, i - 1):i], seq.tokens[i], row) for i, row in enumerate(rows, start)]

  def label(self, before: list[int], token: int) -> str:
    """Return a token's text, or its id as text if the body asks for it."""
    return f"token_id:{token}" if self.body.return_tokens_as_token_ids else self.piece(before, token)

  def piece(self, before: list[int], token: int, skip: bool = False) -> str:
    """Return a token's text after the token `before`: alone, some tokens lose their space."""
    decode = self.tokenizer.decode
    return decode([*before, token], skip)[len(decode(before, skip)):]


class CompletionBuilder(ChoicesBuilder):
  """Writes the answer of /v1/completions."""
  kind = "cmpl"
  objects = ("text_completion", "text_completion")

  def choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> JsonObject:
    if self.body.max_tokens == 0:   # echo only; the engine has generated one token
      completion = dataclasses.replace(completion, text="", token_ids=[], logprobs=completion.logprobs and [])
    is_first = not self.num_generated[index]
    is_echo = is_first and self.body.echo
    prompt = output.prompt or self.tokenizer.decode(output.prompt_token_ids, False) if is_echo else ""
    rows = [x or {} for x in output.prompt_logprobs or ()] if is_echo else []
    num_exact = len(output.prompt_token_ids) if is_echo and output.prompt is None else 0
    logprobs = None if completion.logprobs is None else self.logprobs(
      index, self.tokens(index, rows + completion.logprobs, is_echo), num_exact)
    choice = self.choice_fields(index, completion, text=prompt + completion.text, logprobs=logprobs)
    return {**choice, **(self.prompt_fields(output) if is_first else {})}

  def logprobs(self, index: int, tokens: list[Token], num_exact: int) -> JsonObject:
    """Return new tokens in OpenAI's format. num_exact: tokens at the start whose text is complete, even if special."""
    skip = self.params.skip_special_tokens
    lengths = [len(self.piece(x.before, x.id, skip and n >= num_exact)) for n, x in enumerate(tokens)]
    *offsets, self.offsets[index] = itertools.accumulate(lengths, initial=self.offsets[index])
    return {"tokens": [self.label(x.before, x.id) for x in tokens], "text_offset": offsets,
            "token_logprobs": [x.logprobs[x.id].logprob if x.logprobs else None for x in tokens],
            "top_logprobs": [{self.label(x.before, i): y.logprob for i, y in x.logprobs.items()} or None
                             for x in tokens]}


class GenerateBuilder(CompletionBuilder):
  """Writes the answer of /generate, which adds a list of the generated strings."""
  kind = "generate"

  def wrap(self, choices: list[JsonObject], **fields: object) -> JsonObject:
    return super().wrap(choices, text=[choice["text"] for choice in choices], **fields)


class ChatBuilder(ChoicesBuilder):
  """Writes the answer of /v1/chat/completions."""
  kind = "chatcmpl"
  objects = ("chat.completion", "chat.completion.chunk")

  def __post_init__(self) -> None:
    super().__post_init__()
    last = self.body.messages[-1]
    # The answer continues the last message if the template does not start a new one
    is_new = self.body.add_generation_prompt is not False and not self.body.continue_final_message
    self.role = "assistant" if is_new else last.get("role", "assistant")
    self.echoed = chat_template.plain_text(last) if self.body.echo and last.get("role") == self.role else ""

  def response(self) -> JsonObject:
    return {**super().response(), **self.prompt_fields(self.requests[0].output())}

  def first_events(self, output: RequestOutput) -> bytes:
    deltas = [({"role": self.role, "content": ""}, self.prompt_fields(output))]
    if self.echoed: deltas.append(({"content": self.echoed}, {}))
    return b"".join(self.chunk({"index": i, "delta": delta, "logprobs": None, "finish_reason": None}, **fields)
                    for delta, fields in deltas for i in range(self.params.n))

  def choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> JsonObject:
    tokens = self.tokens(index, completion.logprobs or [])
    logprobs = None if completion.logprobs is None else {"content": [*map(self.logprobs, tokens)]}
    choice = self.choice_fields(index, completion, **self.content(index, completion), logprobs=logprobs)
    if completion.finish_reason == "stop" and self.parsers[index].num_calls: choice["finish_reason"] = "tool_calls"
    return choice

  def content(self, index: int, completion: CompletionOutput) -> JsonObject:
    """Return the field of a choice object that holds its new text and calls."""
    first_call = self.parsers[index].num_calls
    events = self.parsers[index].feed(completion.text, bool(completion.finish_reason))
    content, reasoning = ("".join(text for x, text, _ in events if x == kind) for kind in ("content", "reasoning"))
    calls: list[JsonObject] = [
      {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": name, "arguments": text}}
      for kind, text, name in events if kind == "call"]
    if self.body.stream: calls = [{"index": i, **call} for i, call in enumerate(calls, first_call)]
    fields: JsonObject = {"reasoning_content": reasoning, "reasoning": reasoning}
    if not reasoning or self.body.include_reasoning is False: fields = {}
    if calls: fields["tool_calls"] = calls
    if not self.body.stream:
      return {"message": {"role": self.role, "content": self.echoed + content or (None if fields else ""), **fields}}
    if content or not fields: fields["content"] = content
    return {"delta": fields}

  def logprobs(self, token: Token) -> JsonObject:
    """Return a token and the best ones in OpenAI's format."""
    rows = token.logprobs
    def entry(i: int) -> JsonObject:
      text = self.piece(token.before, i)
      raw = text.encode() if text and "\ufffd" not in text else self.tokenizer.token_bytes(i)
      return {"token": self.label(token.before, i), "logprob": rows[i].logprob, "bytes": [*raw]}
    k = self.params.logprobs or 0
    best = sorted((i for i in rows if k == -1 or rows[i].rank <= k), key=lambda i: (rows[i].rank, i))
    return {**entry(token.id), "top_logprobs": [*map(entry, best)]}


def fill(template: object, values: JsonObject) -> typing.Any:
  """Return the template with each value in place of its name, such as "$text". Only "$id" may be a part of a string."""
  if isinstance(template, list): return [fill(x, values) for x in template]
  if isinstance(template, dict): return {key: fill(x, values) for key, x in template.items()}
  if not isinstance(template, str): return template
  return values[template] if template in values else template.replace("$id", values["$id"])


class BlockBuilder(Generation):
  """Writes an answer that is a list of blocks of text, reasoning or tool calls. At most the last block is open.
  The answer has templates as a block has. Subclasses add values of the answer. templates: see TABLES of agents.py."""
  templates: JsonObject

  def __post_init__(self) -> None:
    self.event_numbers = itertools.count()
    self.blocks: list[JsonObject] = []   # values by name; of a call, $text is its arguments
    self.end: CompletionOutput | None = None   # the last output
    self.error: JsonObject | None = None   # in OpenAI's format

  is_cut = property(lambda self: self.end is not None and self.end.finish_reason != "stop" and not self.error)

  def response(self) -> JsonObject:
    output = self.requests[0].output()
    self.events(0, output, output.outputs[0])
    return self.whole(self.values())

  def events(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
    """Add a completion's new text to the blocks, and return the events."""
    events = b""
    for kind, text, name in self.parsers[0].feed(completion.text, bool(completion.finish_reason)):
      if kind == "call" or not self.blocks or kind != self.blocks[-1]["$kind"]: events += self.start(kind, name)
      block = self.blocks[-1]
      block["$text"] += text
      if kind == "call": block["$arguments"] = chat_template.parse_arguments(text)
      events += self.write("delta", block, text)
    if not completion.finish_reason: return events
    if not self.blocks: events += self.start("content")
    self.end = completion
    if self.is_cut: self.blocks[-1]["$status"] = "incomplete"
    return events + self.write("closing", self.blocks[-1])

  def start(self, kind: str, name: str = "") -> bytes:
    """Close the last block and open a new one. name: of a call's function."""
    closing = self.write("closing", self.blocks[-1]) if self.blocks else b""
    self.blocks.append({"$kind": kind, "$id": uuid.uuid4().hex, "$index": len(self.blocks), "$name": name,
                        "$text": "", "$arguments": {}, "$status": "completed"})
    return closing + self.write("opening", self.blocks[-1])

  def whole(self, block: JsonObject) -> JsonObject: return fill(self.templates[block["$kind"]]["whole"], block)

  def write(self, step: str, block: JsonObject, delta: str = "") -> bytes:
    """Return the events of a block or of the answer: its opening, a delta or its closing."""
    values = {**block, "$delta": delta, "$whole": {} if step == "delta" else self.whole(block)}
    templates = self.templates[block["$kind"]][step]
    return b"".join(event(fill(x, {**values, "$number": next(self.event_numbers)})) for x in templates)

  def values(self) -> JsonObject:
    """Return the values of the answer so far."""
    num_prompt, num_generated = num_tokens(self.requests)
    num_cached = self.requests[0].sequences[0].num_cached or 0
    return {"$kind": "answer", "$id": self.id, "$model": self.model_name, "$created": self.created,
            "$blocks": [*map(self.whole, self.blocks)], "$input": num_prompt, "$cached": num_cached,
            "$uncached": num_prompt - num_cached, "$output": num_generated if self.end else 0,
            "$total": num_prompt + num_generated}

  def first_events(self, output: RequestOutput) -> bytes: return self.write("opening", self.values())

  def last_events(self, error: Exception | None = None) -> bytes:
    """Return the events after all blocks, or after an internal error."""
    if error: self.error = errors.internal_error(error)["error"]
    return self.write("failed" if error else "closing", self.values())
