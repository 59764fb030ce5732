"""Fields of request bodies, treated as in vLLM: null means absent, fields without effect here are accepted, and an
unknown field is ignored with one warning, unless it would change the answer."""
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import pydantic

from tinyvllm.config import check, logger

MAX_NAMES = 100   # unknown names to remember: clients choose them
MAX_NAME_LENGTH = 50   # characters of an unknown name in a message
# An int; JSON writers of some languages send 5.0
Int = Annotated[int, pydantic.BeforeValidator(lambda x: int(x) if isinstance(x, float) and x.is_integer() else x)]
Nothing = pydantic.Field(max_length=0)


class FailFast(pydantic.FailFast):
  """Stops at the first error of a list, which may have a million elements."""
  __hash__ = object.__hash__   # for unions


# One or several prompts, each a string or token ids
Prompts = (str | Annotated[list[str], FailFast()] | Annotated[list[int], FailFast()] |
           Annotated[list[Annotated[list[int], FailFast()]], FailFast()])
# Fields of OpenAI and vLLM without effect here, limited to the values for which that is true
NO_EFFECT: dict[str, object] = {
  **dict.fromkeys(["user", "service_tier", "reasoning_effort", "verbosity", "prompt_cache_key", "safety_identifier",
                   "prompt_cache_retention", "request_id", "session_id"], str),
  **dict.fromkeys(["metadata", "prediction", "mm_processor_kwargs", "media_io_kwargs"], dict),
  **dict.fromkeys(["store", "parallel_tool_calls", "include_reasoning", "spaces_between_special_tokens"], bool),
  **dict.fromkeys(["tools", "functions", "documents", "logits_processors"], Annotated[list, Nothing]),
  **dict.fromkeys(["tool_choice", "function_call"], Literal["none", "auto"]),
  **dict.fromkeys(["use_beam_search", "early_stopping"], Literal[False]),
  "chat_template_kwargs": Annotated[dict, Nothing], "modalities": list[Literal["text"]], "best_of": Literal[1],
  "detokenize": Literal[True], "length_penalty": float}
# Fields that change the answer, of other routes or of features that tinyvllm lacks
REFUSED = {"audio", "images", "image_url", "prompt", "messages", "input", "suffix", "prompt_embeds",
           "logprob_token_ids", "web_search_options", "chat_template", "tools", "functions"}


class UnknownFields:
  """Logs each unknown field once, or refuses it."""
  def __init__(self) -> None:
    self.strict = False   # --strict-fields
    self.names = set[str]()   # logged

  def check(self, name: str, value: object) -> None:
    """Raises InputError for a field that must not be ignored."""
    short = name[:MAX_NAME_LENGTH].encode(errors="replace").decode()
    check(not name.startswith("guided_"), f"{short}: vLLM has removed it: use structured_outputs")
    check(not value or name not in REFUSED, f"{short}: not supported by this route: leave it out")
    check(not self.strict, f"{short}: unknown field: leave it out, or start the server without --strict-fields")
    if short in self.names or len(self.names) >= MAX_NAMES: return
    self.names.add(short)
    logger.warning(f"unknown request field {short!r} is ignored; this is logged once")


unknown_fields = UnknownFields()


class JsonBody(pydantic.BaseModel):
  """A JSON object of a request: its body, or an object inside it. with_fields adds most of its fields."""
  if TYPE_CHECKING:
    def __getattr__(self, name: str) -> Any: ...


class Body(JsonBody):
  """An object whose unknown fields are logged or refused."""
  model_config = pydantic.ConfigDict(extra="ignore", strict=True)

  @pydantic.model_validator(mode="before")
  @classmethod
  def select_known_fields(cls, data: object) -> object:
    if not isinstance(data, dict): return data   # pydantic reports its type
    names = {field.alias or name for name, field in cls.model_fields.items()}
    for name, value in data.items():
      if name not in names and value is not None: unknown_fields.check(name, value)
    return {name: value for name, value in data.items() if name in names and value is not None}


B = TypeVar("B", bound=JsonBody)


def with_fields(**types: object) -> Callable[[type[B]], type[B]]:
  """Class decorator: add fields to a body. A field is optional and may be null, unless its type is a tuple (type,
  default)."""
  fields: Any = {name: x if isinstance(x, tuple) else (operator.or_(x, None), None) for name, x in types.items()}
  return lambda base: pydantic.create_model(base.__name__, __base__=base, __doc__=base.__doc__, **fields)
