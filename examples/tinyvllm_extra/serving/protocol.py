"""Request bodies of OpenAI's API with vLLM's extra fields, and the SamplingParams and prompts that they ask for. A body
accepts every field of SamplingParams, which checks the values. As in vLLM, null means absent, fields without effect
here are accepted, and an unknown field is ignored with one warning, unless it would change the answer."""
import dataclasses, functools, operator, pathlib, types, typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import pydantic

from tinyvllm.config import JsonObject, check, logger, read_json
from tinyvllm_extra.llm import LLM
from tinyvllm_extra.sampling.params import MAX_INT, SamplingParams
from tinyvllm_extra.text import huggingface, parsers, tools

# Fields

MAX_NAMES = 100   # unknown names to remember: clients choose them
MAX_NAME_LENGTH = 50   # characters of an unknown name in a message
# An int; JSON writers of some languages send 5.0
Int = Annotated[int, pydantic.BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)]
Nothing = pydantic.Field(max_length=0)
Limit = Annotated[Int, pydantic.Field(ge=1, le=MAX_INT)] | Literal[-1]   # maximum output tokens; -1: no limit


FailFast = pydantic.Field(fail_fast=True)   # stops at the first error of a list, which may have a million elements
# One or several prompts, each a string or token ids; the value is a list of prompts
Prompts = Annotated[str | Annotated[list[str], FailFast] | Annotated[list[int], FailFast] |
                    Annotated[list[Annotated[list[int], FailFast]], FailFast], pydantic.AfterValidator(
                      lambda x: [x] if isinstance(x, str) or x and isinstance(x[0], int) else x)]
# Names of fields, some by type. common: of completions and chats. template: variables of the chat template. no_effect:
# of OpenAI and vLLM; those of no_effect_at are limited to the values for which that is true. refused: they change the
# answer, and are of other routes or of features that tinyvllm lacks
FIELDS = read_json(pathlib.Path(__file__).with_suffix(".json"))
TYPES: dict[str, object] = {
  "str": str, "int": Int, "dict": dict, "dicts": list[dict], "bool": bool, "float": float,
  "texts": list[Literal["text"]], "empty list": Annotated[list, Nothing], "empty dict": Annotated[dict, Nothing]}
PLAIN, TEMPLATE, NO_EFFECT = ({name: TYPES[kind] for kind, names in FIELDS[group].items() for name in names}
                              for group in ("common", "template", "no_effect"))
NO_EFFECT |= {name: Literal.__getitem__((*values,)) for name, values in FIELDS["no_effect_at"].items()}


# strict: --strict-fields; names: the unknown fields that were logged
unknown_fields = types.SimpleNamespace(strict=False, names=set[str]())


def check_unknown(name: str, value: object) -> None:
  """Log an unknown field once. Raises InputError for one that must not be ignored."""
  short = name[:MAX_NAME_LENGTH].encode(errors="replace").decode()
  check(not name.startswith("guided_"), f"{short}: vLLM has removed it: use structured_outputs")
  check(not value or name not in FIELDS["refused"], f"{short}: not supported by this route: leave it out")
  check(not unknown_fields.strict, f"{short}: unknown field: leave it out, or start without --strict-fields")
  if short in unknown_fields.names or len(unknown_fields.names) >= MAX_NAMES: return
  unknown_fields.names.add(short)
  logger.warning(f"unknown request field {short!r} is ignored; this is logged once")


class JsonBody(pydantic.BaseModel):
  """A JSON object inside a request body, which may have unknown fields. with_fields adds most of its fields."""
  model_config = pydantic.ConfigDict(extra="allow", strict=True)
  if TYPE_CHECKING:
    def __getattr__(self, name: str) -> Any: ...


class Body(JsonBody):
  """A request body, or an object inside it, whose unknown fields are logged or refused."""
  model_config = pydantic.ConfigDict(extra="ignore")

  @pydantic.model_validator(mode="before")
  @classmethod
  def select_known_fields(cls, data: object) -> object:
    if not isinstance(data, dict): return data   # pydantic reports its type
    names = cls.__signature__.parameters   # also aliases
    fields = {name: value for name, value in data.items() if value is not None}
    for name in [x for x in fields if x not in names]: check_unknown(name, fields[name])
    return fields   # pydantic ignores unknown ones


B = TypeVar("B", bound=JsonBody)


def with_fields(**types: object) -> Callable[[type[B]], type[B]]:
  """Class decorator: add fields to a body. A field is optional and may be null, unless its type is a tuple (type,
  default)."""
  fields: Any = {name: x if isinstance(x, tuple) else (operator.or_(x, None), None) for name, x in types.items()}
  return lambda base: pydantic.create_model(base.__name__, __base__=base, __doc__=base.__doc__, **fields)


# Request bodies

def plain_type(annotation: object) -> object:
  """Return a type without its element types, which SamplingParams checks with its own messages."""
  alternatives = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
  return functools.reduce(operator.or_, [Int if x is int else typing.get_origin(x) or x for x in alternatives])


SAMPLING = {f.name: plain_type(f.type) for f in dataclasses.fields(SamplingParams)} | {"structured_outputs": dict}


@with_fields(schema_=(dict, pydantic.Field(alias="schema")), name=str, description=str, strict=bool)
class JSONSchema(Body): ...


@with_fields(json_schema=JSONSchema, format=dict, structures=list[dict], triggers=list[str])   # since format: of tags
class ResponseFormat(Body): type: Literal["text", "json_object", "json_schema", "structural_tag"]


@with_fields(include_usage=bool, include_obfuscation=bool, continuous_usage_stats=bool)
class StreamOptions(Body): ...


@with_fields(name=(Annotated[str, pydantic.Field(min_length=1)], ...), description=str, parameters=dict, strict=bool)
class FunctionDefinition(Body): ...


@with_fields(type=(Literal["function"], "function"), function=(FunctionDefinition, ...))
class Tool(Body):
  """A function, also as a tool_choice, which needs only its name."""


@with_fields(mode=(Literal["auto", "required"], ...))
class AllowedTools(Body): tools: Annotated[list[Tool], pydantic.Field(min_length=1)]


@with_fields(allowed_tools=(AllowedTools, ...))
class AllowedToolsChoice(Body): type: Literal["allowed_tools"]


COMMON = SAMPLING | NO_EFFECT | PLAIN | {
  "stream_options": StreamOptions, "response_format": ResponseFormat, "truncation_side": Literal["left", "right"]}
# Checked, but kept as objects, which templates and the functions of tools.py take
AsObject = pydantic.AfterValidator(lambda body: body.model_dump(exclude_none=True))
ToolChoice = Annotated[Tool | AllowedToolsChoice, pydantic.Field(discriminator="type"), AsObject]
TOOLS = {"tools": list[Annotated[Tool, AsObject]], "tool_choice": Literal["none", "auto", "required"] | ToolChoice,
         "chat_template_kwargs": dict}


@with_fields(**COMMON, prompt=(Prompts, ...))
class CompletionRequest(Body): ...


@with_fields(**COMMON | TOOLS | TEMPLATE | {"logprobs": bool, "top_logprobs": Int, "max_completion_tokens": Limit})
class ChatCompletionRequest(Body):
  messages: list[JsonObject]
  def model_post_init(self, _: object) -> None:   # the deprecated max_tokens yields, as in vLLM
    if self.max_completion_tokens is not None: self.max_tokens = self.max_completion_tokens


@with_fields(**TOOLS | TEMPLATE, model=str, prompt=str, messages=list[dict], add_special_tokens=bool,
             return_token_strs=bool)
class TokenizeRequest(Body): ...


@with_fields(model=str)
class DetokenizeRequest(Body): tokens: list[int]


class UnloadAdapterRequest(Body): lora_name: str
class LoadAdapterRequest(UnloadAdapterRequest): lora_path: str


class ErrorResponse(Body): error: JsonObject


class AnthropicErrorResponse(ErrorResponse): type: Literal["error"]


GenerationRequest = CompletionRequest | ChatCompletionRequest


def tools_of(body: Body) -> list[JsonObject]:
  """Return the tools that the chat template shows. The answer may call only some of them: see callable_functions."""
  return [] if body.tool_choice == "none" else body.tools or []


# Maximum entries of fields whose cost in each step grows with them, and maximum characters of all their strings
MAX_ENTRIES = {"stop": 128, "stop_token_ids": 1024, "bad_words": 1024, "logit_bias": 1024}
MAX_CHARACTERS = 2**14


def check_sizes(fields: JsonObject) -> None:
  """Raises InputError for a field of MAX_ENTRIES that is too large."""
  for name, limit in MAX_ENTRIES.items():
    entries = [fields[name]] if isinstance(fields.get(name), str) else fields.get(name) or ()
    check(len(entries) <= limit, f"{name} has {len(entries)} entries: use at most {limit}")
    size = sum(len(x) for x in entries if isinstance(x, str))
    check(size <= MAX_CHARACTERS, f"{name} has {size} characters: use at most {MAX_CHARACTERS}")


def sampling_params(body: GenerationRequest, defaults: JsonObject, escapes: JsonObject) -> SamplingParams:
  """Return a request body's SamplingParams. defaults: the model's values for fields that the body omits; its
  max_tokens, which only --override-generation-config sets, is also the maximum, as in vLLM. escapes: fields of
  StructuredOutputsParams for text before structured output."""
  check(body.stream or not body.stream_options, "stream_options: requires stream=true")
  fields = {**defaults, **{name: value for name, value in body if name in SAMPLING and value is not None}}
  check_sizes(fields)
  if body.repeat_penalty is not None: fields["repetition_penalty"] = body.repeat_penalty   # llama.cpp's name
  if fields.get("max_tokens") == -1: fields["max_tokens"] = MAX_INT   # llama.cpp's "no limit"
  if isinstance(body, ChatCompletionRequest):
    fields.setdefault("max_tokens", MAX_INT)
    check(body.logprobs or not body.top_logprobs, "top_logprobs: requires logprobs=true")
    fields["logprobs"] = body.top_logprobs or 0 if body.logprobs else None
  elif body.echo and fields.get("max_tokens") == 0: fields["max_tokens"] = 1   # its text is left out
  if "max_tokens" in defaults: fields["max_tokens"] = min(fields["max_tokens"], defaults["max_tokens"])
  if body.echo and fields.get("logprobs") is not None: fields.setdefault("prompt_logprobs", fields["logprobs"])
  if (structured := structured_outputs(body)) is not None: fields["structured_outputs"] = {**structured, **escapes}
  return SamplingParams(**fields)


def structured_outputs(body: GenerationRequest) -> JsonObject | None:
  """Return the constraint that structured_outputs, response_format or tool_choice asks for."""
  form = format_constraint(body.response_format)
  schema = tools.calls_schema(tools_of(body), body.tool_choice, body.parallel_tool_calls is not False)
  constraints = {"structured_outputs": body.structured_outputs, "response_format": form,
                 "tool_choice": {"json": schema} if schema else None}
  names = [name for name, constraint in constraints.items() if constraint is not None]
  check(len(names) < 2, f"{' and '.join(names)} conflict: remove one")
  return {**constraints[names[0]], "source": names[0]} if names else None


def format_constraint(form: ResponseFormat | None) -> JsonObject | None:
  """Return a ResponseFormat as structured_outputs."""
  if not form: return None
  check((form.type == "json_schema") == bool(form.json_schema), "response_format: type must match json_schema")
  if form.type == "structural_tag":
    return {"structural_tag": form.model_dump(include={"format", "structures", "triggers"}, exclude_none=True)}
  if form.json_schema: return {"json": form.json_schema.schema_}
  return {"json_object": True} if form.type == "json_object" else None


def escapes_of(body: Body, output_format: parsers.OutputFormat, prompt_end: str) -> dict[str, object]:
  """Return the fields of StructuredOutputsParams for text before a chat's format: reasoning that the prompt opened;
  with response_format or tools also reasoning that the model opens, and calls, which it may make instead. prompt_end:
  see Parser."""
  opened = output_format.opened_by(prompt_end)
  has_tools = bool(tools_of(body)) and not tools.requires_call(body.tool_choice)
  escapes = output_format.escapes(has_tools) if body.structured_outputs is None else {}
  return {"escapes": {**escapes, "": opened.closings} if opened else escapes}


def new_parsers(body: Body, output_format: parsers.OutputFormat, prompt_end: str, count: int) -> list[parsers.Parser]:
  """Return a parser for each sample of a chat. prompt_end: see Parser. count: of samples."""
  functions = tools.callable_functions(tools_of(body), body.tool_choice)
  parallel = body.parallel_tool_calls is not False
  is_forced = tools.requires_call(body.tool_choice)
  return [parsers.Parser(output_format, functions, prompt_end, is_forced, parallel) for _ in range(count)]


def encode_prompts(body: GenerationRequest, engine: LLM, trusts_template: bool) -> list[JsonObject]:
  """Return the engine's form of a body's prompts."""
  is_chat = isinstance(body, ChatCompletionRequest)
  prompts = [chat_text(body, engine.tokenizer, trusts_template)] if is_chat else body.prompt
  check(prompts and all(prompts), "prompt: each prompt must have at least one token")
  has_special = body.add_special_tokens or body.add_special_tokens is None and not is_chat
  is_plain = has_special and not is_chat   # the engine encodes like this
  limit = body.truncate_prompt_tokens
  check(limit is None or limit == -1 or limit > 0, f"truncate_prompt_tokens={limit} must be at least 1, or -1")
  if limit == -1: limit = max(1, engine.max_model_len - max(1, body.max_tokens or 1))
  def kept(size: int) -> slice: return slice(size) if body.truncation_side == "right" else slice(-size, None)

  def encode(prompt: str | list[int]) -> JsonObject:
    if isinstance(prompt, list): return {"prompt_token_ids": prompt[kept(limit or MAX_INT)]}
    if limit is None and is_plain: return {"prompt": prompt}
    text = prompt[kept(int(min(engine.tokenizer.max_characters, MAX_INT)))] if limit else prompt
    ids = engine.tokenizer.encode(text, has_special)
    if is_plain and len(ids) <= limit and text == prompt: return {"prompt": prompt}
    return {"prompt_token_ids": ids[kept(limit or MAX_INT)]}

  return [encode(prompt) for prompt in prompts]


def chat_text(body: Body, tokenizer: huggingface.ChatTokenizer, trusts_template: bool) -> str:
  """Return a chat, formatted with the model's chat template, or with the body's if that is trusted."""
  check(body.messages, "messages=[] must not be empty")
  shown = tools_of(body)
  variables = body.chat_template_kwargs or {}
  for name in ("messages", "raise_exception", "chat_template", "strftime_now"):
    check(name not in variables, f"chat_template_kwargs: {name} is reserved")
  if body.reasoning_effort: variables = {**thinking(body.reasoning_effort != "none"), **variables}
  variables = {**variables, **{name: value for name, value in body if name in TEMPLATE and value not in (None, "")}}
  check(trusts_template or "chat_template" not in variables,
        "chat_template: refused, because the server runs without --trust-request-chat-template")
  if shown: variables["tools"] = shown
  template = tokenizer.template(bool(shown), variables.get("chat_template")) or ""
  check("tools" not in variables or "tools" in template or tools.requires_call(body.tool_choice),
        "tools: the model's chat template does not support tools")
  return tokenizer.render_conversation(body.messages, **variables)


def thinking(is_on: bool) -> dict[str, bool]:
  """Return variables of chat templates that turn reasoning on or off: Qwen's name, and Granite's and DeepSeek's."""
  return {"enable_thinking": is_on, "thinking": is_on}
