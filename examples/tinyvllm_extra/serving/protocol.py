"""OpenAI's API with vLLM's extra fields: request bodies, responses and stream events. A body accepts every
field of SamplingParams, which checks the values. No function here runs a request."""
import collections, dataclasses, functools, itertools, operator, time, types, typing, uuid
from typing import Annotated, Any, Literal

import orjson, pydantic

from tinyvllm import CompletionOutput, Logprob, RequestOutput, SamplingParams
from tinyvllm.config import check
from tinyvllm.engine import Prompt, Request
from tinyvllm_extra.text.conversations import plain_text, render_conversation
from tinyvllm_extra.text.huggingface import ChatTokenizer
from tinyvllm_extra.text.parsers import Event, OutputFormat, Parser

from .errors import internal_error
from .fields import NO_EFFECT, Body, Int, Prompts
from .tools import callable_tools, calls_schema, requires_call

UNLIMITED = 2**31 - 1   # max_tokens without a limit below max_model_len


# Request bodies

def body_model(title: str, **types: Any) -> Any:
  """Create a pydantic model. A field is optional and may be null, unless its type is a tuple (type, default)."""
  fields: Any = {name: x if isinstance(x, tuple) else (x | None, None) for name, x in types.items()}
  return pydantic.create_model(title, __base__=Body, **fields)


def plain_type(annotation: Any) -> Any:
  """Return a type without its element types, which SamplingParams checks with its own messages."""
  alternatives = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
  return functools.reduce(operator.or_, [Int if x is int else typing.get_origin(x) or x for x in alternatives])


SAMPLING = {f.name: plain_type(f.type) for f in dataclasses.fields(SamplingParams)} | {"structured_outputs": dict}
JSONSchema = body_model("JSONSchema", schema_=(dict, pydantic.Field(alias="schema")), name=str, description=str,
                        strict=bool)
FormatType = Literal["text", "json_object", "json_schema", "structural_tag"]
ResponseFormat = body_model("ResponseFormat", type=(FormatType, ...), json_schema=JSONSchema,
                            format=dict, structures=list[dict], triggers=list[str])   # the last three: structural_tag
StreamOptions = body_model("StreamOptions", include_usage=bool, include_obfuscation=bool, continuous_usage_stats=bool)
# vLLM's former names of structured_outputs
GUIDED = {"guided_json": str | dict, "guided_regex": str, "guided_choice": list, "guided_grammar": str,
          "guided_json_object": bool, "guided_whitespace_pattern": str}
COMMON = SAMPLING | NO_EFFECT | GUIDED | {
  "model": str, "stream": bool, "stream_options": StreamOptions, "response_format": ResponseFormat, "priority": Int,
  "truncation_side": Literal["left", "right"], "truncate_prompt_tokens": Int, "cache_salt": str,
  "repeat_penalty": float, **dict.fromkeys(["echo", "return_token_ids", "return_tokens_as_token_ids",
                                           "add_special_tokens"], bool)}
FunctionDefinition = body_model("FunctionDefinition", name=(str, ...), description=str, parameters=dict, strict=bool)
Tool = body_model("Tool", type=(Literal["function"], "function"), function=(FunctionDefinition, ...))
NamedToolChoice = body_model("NamedToolChoice", type=(Literal["function"], ...),
                             function=(body_model("FunctionName", name=(str, ...)), ...))
AllowedTools = body_model("AllowedTools", mode=(Literal["auto", "required"], ...),
                          tools=(list[Tool], ...))   # type: ignore[valid-type]
AllowedToolsChoice = body_model("AllowedToolsChoice", type=(Literal["allowed_tools"], ...),
                                allowed_tools=(AllowedTools, ...))
ToolChoice: Any = Annotated[NamedToolChoice | AllowedToolsChoice,   # type: ignore[valid-type]
                            pydantic.Field(discriminator="type")]
TEMPLATE = {"add_generation_prompt": bool, "continue_final_message": bool, "chat_template": str,
            "documents": list[dict]}   # variables of the chat template
TOOLS = {"tools": list[Tool], "chat_template_kwargs": dict}   # type: ignore[valid-type]
CompletionRequest: Any = body_model("CompletionRequest", **COMMON, prompt=(Prompts, ...))
ChatRequest: Any = body_model("ChatCompletionRequest", messages=(list[dict], ...), **COMMON | TOOLS | TEMPLATE | {
  "logprobs": bool, "top_logprobs": Int, "max_completion_tokens": Int,
  "tool_choice": Literal["none", "auto", "required"] | ToolChoice})
TokenizeRequest: Any = body_model("TokenizeRequest", **TOOLS | TEMPLATE, model=str, prompt=str, messages=list[dict],
                                  add_special_tokens=bool, return_token_strs=bool)
DetokenizeRequest: Any = body_model("DetokenizeRequest", model=str, tokens=(list[int], ...))
ErrorResponse: Any = body_model("ErrorResponse", error=(dict[str, Any], ...))
AnthropicErrorResponse: Any = body_model("AnthropicErrorResponse", type=(Literal["error"], ...),
                                         error=(dict[str, Any], ...))


def tools_of(body: Any) -> list[dict[str, Any]]:
  """Return the tools that the chat template shows. The response may call only some of them: see callable_tools."""
  if getattr(body, "tool_choice", None) == "none": return []
  return [tool.model_dump(exclude_none=True) for tool in body.tools or []]


def tool_choice_of(body: Any) -> Any:
  choice = getattr(body, "tool_choice", None)
  return choice.model_dump() if isinstance(choice, pydantic.BaseModel) else choice


# Maximum entries of fields whose cost in each step grows with them, and maximum characters of all their strings
MAX_ENTRIES = {"stop": 128, "stop_token_ids": 1024, "bad_words": 1024, "logit_bias": 1024}
MAX_CHARACTERS = 2**14


def check_sizes(fields: dict[str, Any]) -> None:
  """Raises InputError for a field of MAX_ENTRIES that is too large."""
  for name, limit in MAX_ENTRIES.items():
    entries = fields.get(name) or ()
    num = 1 if isinstance(entries, str) else len(entries)
    check(num <= limit, f"{name} has {num} entries: use at most {limit}")
    size = sum(len(x) for x in ([entries] if isinstance(entries, str) else entries) if isinstance(x, str))
    check(size <= MAX_CHARACTERS, f"{name} has {size} characters: use at most {MAX_CHARACTERS}")


def sampling_params(body: Any, defaults: dict[str, Any], escapes: dict[str, Any] | None = None) -> SamplingParams:
  """Return a request body's SamplingParams. defaults: the model's values for fields that the body omits; its
  max_tokens, which only --override-generation-config sets, is also the maximum, as in vLLM. escapes: fields of
  StructuredOutputsParams for text before structured output."""
  check(body.stream or not body.stream_options, "stream_options: requires stream=true")
  fields = {**defaults, **{name: value for name, value in body if name in SAMPLING and value is not None}}
  check_sizes(fields)
  if body.repeat_penalty is not None: fields["repetition_penalty"] = body.repeat_penalty   # llama.cpp's name
  if fields.get("max_tokens") == -1: fields["max_tokens"] = UNLIMITED   # llama.cpp's "no limit"
  if isinstance(body, ChatRequest):
    fields.setdefault("max_tokens", UNLIMITED)
    if body.max_completion_tokens is not None: fields["max_tokens"] = body.max_completion_tokens
    check(body.logprobs or not body.top_logprobs, "top_logprobs: requires logprobs=true")
    fields["logprobs"] = body.top_logprobs or 0 if body.logprobs else None
  elif body.echo and fields.get("max_tokens") == 0: fields["max_tokens"] = 1   # its text is left out
  if "max_tokens" in defaults: fields["max_tokens"] = min(fields["max_tokens"], defaults["max_tokens"])
  if body.echo and fields.get("logprobs") is not None: fields.setdefault("prompt_logprobs", fields["logprobs"])
  structured = structured_outputs(body)
  if structured is not None: fields["structured_outputs"] = {**structured, **(escapes or {})}
  return SamplingParams(**fields)


def structured_outputs(body: Any) -> dict[str, Any] | None:
  """Return the constraint that structured_outputs, guided_*, response_format or tool_choice asks for."""
  guided = {name.removeprefix("guided_"): value for name, value in body if name in GUIDED and value is not None}
  constraints = {"structured_outputs": body.structured_outputs, "guided_*": guided or None,
                 "response_format": format_constraint(body.response_format)}
  if isinstance(body, ChatRequest):
    choice = tool_choice_of(body)
    schema = calls_schema(tools_of(body), choice, body.parallel_tool_calls is not False)
    constraints["tool_choice"] = {"json": schema} if schema else None
  names = [name for name, constraint in constraints.items() if constraint is not None]
  check(len(names) < 2, f"{' and '.join(names)} conflict: remove one")
  return constraints[names[0]] if names else None


def format_constraint(form: Any) -> dict[str, Any] | None:
  """Return a ResponseFormat as structured_outputs."""
  if not form or form.type == "text": return None
  check((form.type == "json_schema") == bool(form.json_schema), "response_format: type must match json_schema")
  if form.type == "structural_tag":
    return {"structural_tag": form.model_dump(include={"format", "structures", "triggers"}, exclude_none=True)}
  return {"json": form.json_schema.schema_} if form.json_schema else {"json_object": True}


def escapes_of(body: Any, ids: list[int], output_format: OutputFormat, tokenizer: ChatTokenizer) -> dict[str, Any]:
  """Return the fields of StructuredOutputsParams for text before a chat's format: reasoning that the prompt opened;
  with response_format or tools also reasoning that the model opens, and calls, which it may make instead. ids:
  the prompt's."""
  if not isinstance(body, ChatRequest): return {}
  opened = output_format.opened_by(prompt_end(ids, tokenizer))
  has_tools = bool(tools_of(body)) and not requires_call(tool_choice_of(body))
  is_exact = any(value is not None for name, value in body if name in GUIDED or name == "structured_outputs")
  return {"escapes": {} if is_exact else output_format.escapes(has_tools), "opened": opened.closings if opened else ()}


def prompt_end(ids: list[int], tokenizer: ChatTokenizer) -> str: return tokenizer.decode(ids[-16:], False)


def engine_prompts(prompts: Any) -> list[Prompt]:
  """Return the engine's form of one or several prompts, each a str or token ids."""
  if not isinstance(prompts, list) or prompts and isinstance(prompts[0], int): prompts = [prompts]
  check(prompts and all(prompts), "prompt: each prompt must have at least one token")
  return [{"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt for prompt in prompts]


def encode_prompts(body: Any, engine: Any, trusts_template: bool) -> list[Prompt]:
  """Return the engine's prompts of a CompletionRequest or a ChatRequest."""
  is_chat = isinstance(body, ChatRequest)
  prompts = engine_prompts(chat_text(body, engine.tokenizer, trusts_template) if is_chat else body.prompt)
  has_special = body.add_special_tokens or body.add_special_tokens is None and not is_chat
  limit = body.truncate_prompt_tokens
  check(limit is None or limit == -1 or limit > 0, f"truncate_prompt_tokens={limit} must be at least 1, or -1")
  num_output = body.max_tokens or getattr(body, "max_completion_tokens", None) or 1
  if limit == -1: limit = max(1, engine.max_model_len - max(1, num_output))
  def truncate(x: Any, size: Any) -> Any: return x[:size] if body.truncation_side == "right" else x[-size:]

  def encode(prompt: Prompt) -> Prompt:
    if isinstance(prompt, dict): return {"prompt_token_ids": truncate(prompt["prompt_token_ids"], limit or UNLIMITED)}
    if limit is None and has_special and not is_chat: return prompt
    text = truncate(prompt, int(min(engine.tokenizer.max_characters, UNLIMITED))) if limit else prompt
    ids = engine.tokenizer.encode(text, has_special)
    is_same = has_special and not is_chat and len(ids) <= limit and text == prompt
    return prompt if is_same else {"prompt_token_ids": truncate(ids, limit or UNLIMITED)}

  return with_salt(body, [*map(encode, prompts)])


def with_salt(body: Any, prompts: list[Prompt]) -> list[Any]:
  """Return prompts that share cached blocks only with prompts of the body's cache_salt."""
  if body.cache_salt is None: return prompts
  return [{**({"prompt": x} if isinstance(x, str) else x), "cache_salt": body.cache_salt} for x in prompts]


def chat_text(body: Any, tokenizer: ChatTokenizer, trusts_template: bool) -> str:
  """Return a chat, formatted with the model's chat template, or with the body's if that is trusted."""
  check(body.messages, "messages=[] must not be empty")
  tools = tools_of(body)
  variables = body.chat_template_kwargs or {}
  for name in ("messages", "raise_exception", "chat_template", "strftime_now"):
    check(name not in variables, f"chat_template_kwargs: {name} is reserved")
  effort = getattr(body, "reasoning_effort", None)
  if effort: variables = {"reasoning_effort": effort, **thinking(effort != "none"), **variables}
  variables = {**variables, **{name: value for name, value in body if name in TEMPLATE and value not in (None, "")}}
  check(trusts_template or "chat_template" not in variables,
        "chat_template: refused, because the server runs without --trust-request-chat-template")
  if tools: variables["tools"] = tools
  template = tokenizer.template(bool(tools), variables.get("chat_template")) or ""
  check("tools" not in variables or "tools" in template or requires_call(tool_choice_of(body)),
        "tools: the model's chat template does not support tools")
  return render_conversation(tokenizer, body.messages, **variables)


def thinking(is_on: bool) -> dict[str, Any]:
  """Return variables of chat templates that turn reasoning on or off: Qwen's name, and Granite's and DeepSeek's."""
  return {"enable_thinking": is_on, "thinking": is_on}


# Responses

def usage_of(requests: list[Request]) -> dict[str, Any]:
  prompt = sum(request.sequences[0].num_prompt for request in requests)   # samples share the prompt
  generated = sum(request.metrics.num_generated for request in requests)
  cached = sum(request.sequences[0].num_cached or 0 for request in requests)
  return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated,
          "prompt_tokens_details": {"cached_tokens": cached}}


def event(content: dict[str, Any]) -> bytes:
  """Return a server-sent event."""
  return b"data: %b\n\n" % orjson.dumps(content, option=orjson.OPT_NON_STR_KEYS)   # token ids are keys


class CompletionBuilder:
  """Builds the response of /v1/completions: `response` whole, or the bytes of a stream's events.

  Other wire formats override methods. `id` is the start of the engine's request ids. `first_events` come before the
  first output, `events` for each sample with new tokens, `last_events` after all samples have finished, `error_event`
  instead of them after an internal error."""
  kind = "cmpl"   # start of the response's id
  objects = ["text_completion", "text_completion"]   # types of the whole response and of a chunk
  has_prompt_in_choices = True   # the fields that describe the prompt are in each choice, as in vLLM

  def __init__(self, model_name: str, body: Any, params: SamplingParams, tokenizer: ChatTokenizer,
               output_format: OutputFormat):
    self.body = body
    self.params = params
    self.tokenizer = tokenizer
    self.id = f"{self.kind}-{uuid.uuid4().hex}"
    self.head: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": model_name,
                                 "object": self.objects[bool(body.stream)]}
    self.requests: list[Request] = []   # set before the first output
    running_usage = bool(getattr(body.stream_options, "continuous_usage_stats", None))
    has_usage = getattr(body.stream_options, "include_usage", None)
    if has_usage is None: has_usage = running_usage
    if has_usage: self.head["usage"] = None   # until the last chunk
    self.has_running_usage = has_usage and running_usage   # in each chunk
    self.last_tokens = dict[int, list[int]]()   # by choice; also of the prompt
    self.offsets = collections.Counter[int]()   # text_offset of the next token, by choice
    self.num_generated = collections.Counter[int]()   # tokens so far, by choice
    self.num_echoed_ids = 0   # tokens of an echoed prompt that was given as token ids
    self.output_format = output_format
    self.parsers = dict[int, Parser]()   # by choice; of formats that split the text

  def response(self, requests: list[Request]) -> dict[str, Any]:
    outputs = enumerate(request.output() for request in requests)
    choices = [self.choice(i, output, completion) for i, output in outputs for completion in output.outputs]
    return {**self.wrap(choices), "usage": usage_of(requests)}

  def first_events(self) -> bytes: return b""

  def events(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> bytes:
    return event(self.wrap([self.choice(prompt_index, output, completion)]))

  def last_events(self, requests: list[Request]) -> bytes:
    usage = event({**self.wrap([]), "usage": usage_of(requests)}) if "usage" in self.head else b""
    return usage + b"data: [DONE]\n\n"

  def error_event(self, error: Exception) -> bytes: return event(internal_error(error))

  def wrap(self, choices: list[dict]) -> dict[str, Any]:
    """Return a response or chunk object with these choices."""
    usage = self.running_usage(choices[0]["index"]) if choices and self.has_running_usage else {}
    return {**self.head, **usage, "choices": choices}

  def running_usage(self, index: int) -> dict[str, dict[str, int]]:
    """Return the usage of one choice so far (stream_options.continuous_usage_stats)."""
    num_prompt = self.requests[index // self.params.n].sequences[0].num_prompt
    num_generated = self.num_generated[index]
    return {"usage": {"prompt_tokens": num_prompt, "completion_tokens": num_generated,
                      "total_tokens": num_prompt + num_generated}}

  def prompt_fields(self, ids: list[int], rows: Any) -> dict[str, Any]:
    """Return the fields that describe a prompt, under vLLM's names. rows: its log probabilities."""
    has_logprobs = self.body.prompt_logprobs is not None
    logprobs = [x and {i: y._asdict() for i, y in x.items()} for x in rows or []] if has_logprobs else None
    return self.optional(prompt_token_ids=ids if self.body.return_token_ids else None, prompt_logprobs=logprobs)

  def optional(self, **fields: Any) -> dict[str, Any]:
    """Return fields that are None unless requested. As in vLLM, chunks leave None out, whole responses have null."""
    return {name: x for name, x in fields.items() if x is not None or not self.body.stream}

  def choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    """Return a choice object with a completion's text and tokens, in a stream only the new ones."""
    index = prompt_index * self.params.n + completion.index
    self.num_generated[index] += len(completion.token_ids)
    if self.body.max_tokens == 0:   # echo only; the engine has generated one token
      completion = dataclasses.replace(completion, text="", token_ids=[], logprobs=completion.logprobs and [])
    text = completion.text
    ids = completion.token_ids
    rows: Any = completion.logprobs
    first = index not in self.last_tokens
    before = self.last_tokens.get(index, output.prompt_token_ids[-1:])
    extra = self.optional(token_ids=ids if self.body.return_token_ids else None)
    if first and self.has_prompt_in_choices:
      extra |= self.prompt_fields(output.prompt_token_ids, output.prompt_logprobs)
    self.num_echoed_ids = 0
    if first and self.body.echo and self.has_prompt_in_choices:
      if output.prompt is None: self.num_echoed_ids = len(output.prompt_token_ids)
      text = (output.prompt or self.tokenizer.decode(output.prompt_token_ids, False)) + text
      ids = output.prompt_token_ids + ids
      before = []
      rows = None if rows is None else [*(output.prompt_logprobs or []), *rows]
    self.last_tokens[index] = ids[-1:] or before
    # strict=False: no token follows the last one
    if rows is not None: rows = self.logprobs([*zip([before, *([i] for i in ids)], ids, rows, strict=False)], index)
    return {"index": index, "logprobs": rows, "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason, **self.content(text, output, completion), **extra}

  def content(self, text: str, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    """Return the fields of a choice object that hold its new text. text: with the prompt if echoed."""
    return {"text": text}

  def parse(self, output: RequestOutput, completion: CompletionOutput) -> list[Event]:
    """Return the events (kind, text) in a completion's new text: see Parser.feed. Call it once for each output."""
    if completion.index not in self.parsers:
      choice = tool_choice_of(self.body)
      functions = {tool["function"]["name"]: tool["function"].get("parameters") or {}
                   for tool in callable_tools(tools_of(self.body), choice)}
      self.parsers[completion.index] = Parser(
        self.output_format, functions, prompt_end(output.prompt_token_ids, self.tokenizer), requires_call(choice),
        self.body.parallel_tool_calls is not False)
    return self.parsers[completion.index].feed(completion.text, bool(completion.finish_reason))

  def logprobs(self, rows: list[tuple], index: int) -> dict[str, list]:
    """Return a choice's log probabilities in OpenAI's format. rows: the previous token (in a list), the token, its
    entries or None. Call it once for each output."""
    skip = self.params.skip_special_tokens
    lengths = [len(self.piece(b, i, skip and n >= self.num_echoed_ids)) for n, (b, i, _) in enumerate(rows)]
    *offsets, self.offsets[index] = itertools.accumulate(lengths, initial=self.offsets[index])
    return {"tokens": [self.label(b, i) for b, i, _ in rows], "text_offset": offsets,
            "token_logprobs": [x and x[i].logprob for _, i, x in rows],
            "top_logprobs": [x and {self.label(b, j): y.logprob for j, y in x.items()} for b, _, x in rows]}

  def label(self, before: list[int], token: int) -> str:
    """Return a token's text, or its id as text if the body asks for it."""
    return f"token_id:{token}" if self.body.return_tokens_as_token_ids else self.piece(before, token)

  def piece(self, before: list[int], token: int, skip: bool = False) -> str:
    """Return a token's text after the token `before`: alone, some tokens lose their space."""
    return self.tokenizer.decode([*before, token], skip)[len(self.tokenizer.decode(before, skip)):]


class GenerateBuilder(CompletionBuilder):
  """Builds the response of /generate, which adds a list of the generated strings."""
  kind = "generate"

  def wrap(self, choices: list[dict]) -> dict[str, Any]:
    return {**super().wrap(choices), "text": [choice["text"] for choice in choices]}


class ChatBuilder(CompletionBuilder):
  """Builds the response of /v1/chat/completions, whole or as events."""
  kind = "chatcmpl"
  objects = ["chat.completion", "chat.completion.chunk"]
  has_prompt_in_choices = False   # but in the response, or in the chunks with the role

  def __init__(self, *args: Any):
    super().__init__(*args)
    self.num_calls = collections.Counter[int]()   # by choice

  @property
  def role(self) -> str:
    """The role of the answer: the last message's role if the template does not start a new message."""
    is_new = self.body.add_generation_prompt is not False and not self.body.continue_final_message
    return "assistant" if is_new else self.body.messages[-1].get("role", "assistant")

  @property
  def echoed(self) -> str:
    """The text of the last message, if the answer continues it and must include it."""
    last = self.body.messages[-1]
    return plain_text(last) if self.body.echo and last.get("role") == self.role else ""

  def prompt_fields_of(self, request: Request) -> dict[str, Any]:
    first = request.sequences[0]
    return self.prompt_fields(first.tokens[:first.num_prompt], [first.logprobs.get(i) for i in range(first.num_prompt)])

  def response(self, requests: list[Request]) -> dict[str, Any]:
    return {**super().response(requests), **self.prompt_fields_of(requests[0])}

  def first_events(self) -> bytes:
    rest = {"logprobs": None, "finish_reason": None}
    roles = [{"index": i, "delta": {"role": self.role, "content": ""}, **rest} for i in range(self.params.n)]
    echoes = [{"index": i, "delta": {"content": self.echoed}, **rest} for i in range(self.params.n) if self.echoed]
    prompt = self.prompt_fields_of(self.requests[0])
    return b"".join([*(event({**self.wrap([x]), **prompt}) for x in roles), *(event(self.wrap([x])) for x in echoes)])

  def choice(self, prompt_index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    choice = super().choice(prompt_index, output, completion)
    message = choice.get("message")
    if message: message["role"] = self.role
    if message and self.echoed: message["content"] = self.echoed + (message["content"] or "")
    return choice

  def content(self, text: str, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    texts = {"content": "", "reasoning": ""}
    calls = dict[int, dict[str, Any]]()   # new or with new arguments, by index
    for kind, piece in self.parse(output, completion):
      if kind in texts: texts[kind] += piece
      if kind == "call": self.num_calls[completion.index] += 1
      i = self.num_calls[completion.index] - 1
      if kind == "call": calls[i] = {"id": f"call_{uuid.uuid4().hex}", "type": "function",
                                     "function": {"name": piece, "arguments": ""}}
      if kind == "arguments": calls.setdefault(i, {"function": {"arguments": ""}})["function"]["arguments"] += piece
    is_call = completion.finish_reason == "stop" and self.num_calls[completion.index]
    fields: dict[str, Any] = {"reasoning_content": texts["reasoning"], "reasoning": texts["reasoning"]}
    if not texts["reasoning"] or self.body.include_reasoning is False: fields = {}
    if self.body.stream:
      if calls: fields["tool_calls"] = [{"index": i, **call} for i, call in calls.items()]
      if texts["content"] or not fields: fields["content"] = texts["content"]
      return {"delta": fields, **({"finish_reason": "tool_calls"} if is_call else {})}
    content = texts["content"] or (None if calls or fields else "")
    if calls: fields["tool_calls"] = [*calls.values()]
    return {"message": {"role": "assistant", "content": content, **fields},
            **({"finish_reason": "tool_calls"} if is_call else {})}

  def logprobs(self, rows: list[tuple], index: int) -> dict[str, list]:
    def entry(before: list[int], token: int, entries: dict[int, Logprob]) -> dict[str, Any]:
      text = self.piece(before, token)
      return {"token": self.label(before, token), "logprob": entries[token].logprob,
              "bytes": [*(text.encode() if text and "\ufffd" not in text else self.tokenizer.token_bytes(token))]}
    def best(x: dict[int, Logprob]) -> list[int]:
      k = self.params.logprobs or 0
      return sorted((i for i in x if k == -1 or x[i].rank <= k), key=lambda i: (x[i].rank, i))
    return {"content": [{**entry(b, i, x), "top_logprobs": [entry(b, j, x) for j in best(x)]} for b, i, x in rows]}
