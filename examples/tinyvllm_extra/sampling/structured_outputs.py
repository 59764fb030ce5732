"""Structured outputs: llguidance compiles a JSON schema, a regular expression or a grammar to a Constraint, which
returns the bitmask of allowed tokens at each position."""
import dataclasses, functools, json, pathlib, re, types
from typing import Any

import numpy as np
from sentencepiece import SentencePieceProcessor

from tinyvllm.config import InputError, JsonObject, check, has_type, read_json
from tinyvllm_extra.options import optional
from tinyvllm_extra.text.huggingface import ChatTokenizer

# Keywords of JSON Schema whose values are schemas, or objects of schemas (maps); formats that llguidance knows;
# names: in a supported propertyNames
KEYWORDS = read_json(pathlib.Path(__file__).with_suffix(".json"))
LOOK_AROUND = re.compile(r"\(\?<?[=!]")
MAX_MARKER = 16   # maximum tokens of a marker
MAX_SIZE = 2**19   # characters of a schema, regular expression or grammar
CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclasses.dataclass(init=False)
class StructuredOutputsParams:
  """The format of the output, under vLLM's names. Exactly one of the first six fields must be set."""
  json: str | dict | None = None    # a JSON schema
  regex: str | None = None
  choice: list[str] | None = None   # the allowed outputs
  grammar: str | None = None        # Lark or GBNF
  json_object: bool | None = None   # True: any JSON object
  structural_tag: str | dict | None = None   # text with tags, whose content follows JSON schemas
  disable_any_whitespace: bool = False       # JSON has no white space
  whitespace_pattern: str | None = None      # regular expression of JSON's white space
  # Free text before the format, such as reasoning: openings ("": the prompt's end) and the markers that end it; (): it
  # lasts to the end
  escapes: dict | None = None
  source: str = "structured_outputs"   # the field of a request that asks for the format, for messages

  def __init__(self, **fields: object):
    fields = {name: value for name, value in fields.items() if value not in (None, False)}
    kinds = {field.name: field.type for field in dataclasses.fields(self)}
    names = [name for name in fields if name in CONSTRAINTS or name not in kinds]
    vars(self).update(fields)
    check(len(names) == 1 and names[0] in kinds and fields[names[0]] not in ("", []),
          f"{self.source}={ {x: fields[x] for x in names} } must have exactly one of {', '.join(CONSTRAINTS)}", fields)
    for name, x in fields.items():
      check(has_type(x, kinds[name]), f"{self.source}: {name}={x!r} must be of type {kinds[name]}", fields)

  def constraint(self, tokenizer: ChatTokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "Constraint":
    """Return a Constraint for one sequence. Raises InputError for a schema, regular expression or grammar that
    llguidance rejects."""
    (name, value), = [(name, value) for name, value in vars(self).items() if name in CONSTRAINTS]
    library = optional("llguidance", "grammar", "structured output")
    text = value if isinstance(value, str) else json.dumps({"type": "object"} if name == "json_object" else value)
    check(len(text) <= MAX_SIZE, f"{self.source}: {name} has {len(text)} characters: use at most {MAX_SIZE}")
    vocabulary = load_vocabulary(library, tokenizer, vocab_size, eos_token_ids)
    try: matcher = library.LLMatcher(vocabulary, self.compile(library, name, text, tokenizer), log_level=0)
    except (ValueError, AssertionError) as e: raise InputError(f"{self.source}: {name}: {e}") from e
    except (TypeError, AttributeError, KeyError, RecursionError) as e:
      raise InputError(f"{self.source}: {name} has a wrong structure: {e!r}") from e
    check(not matcher.is_error(), f"{self.source}: {name}: {' '.join(matcher.get_error().split())}")
    return Constraint(self.escapes or {}, matcher, vocab_size, tokenizer)

  def compile(self, library: types.ModuleType, name: str, text: str, tokenizer: ChatTokenizer) -> str:
    """Return llguidance's grammar for a constraint."""
    if name == "structural_tag": return tag_grammar(library, json.loads(text), tokenizer)
    if name not in ("json", "json_object"): return library.grammar_from(name, text)
    spaces = {"whitespace_flexible": not self.disable_any_whitespace, "whitespace_pattern": self.whitespace_pattern}
    return library.LLMatcher.grammar_from_json_schema(json.dumps(narrowed(json.loads(text))), spaces)


def narrowed(schema: object) -> object:
  """Return a JSON schema without keywords that llguidance lacks, as generators write them: an equal schema, or one that
  allows less. Notes are dropped, as JSON Schema says, propertyNames becomes properties."""
  if isinstance(schema, list): return [*map(narrowed, schema)]
  if not isinstance(schema, dict): return schema
  schema = {key: narrowed(x) if key in KEYWORDS["schemas"] else {name: narrowed(y) for name, y in x.items()}
            if key in KEYWORDS["maps"] and isinstance(x, dict) else x for key, x in schema.items()
            if (key, x) != ("uniqueItems", False) and (key != "format" or x in KEYWORDS["formats"])}
  names, values = schema.get("propertyNames"), schema.get("additionalProperties", True)
  if isinstance(names, dict) and {*names} <= {*KEYWORDS["names"]} and "properties" not in schema:
    del schema["propertyNames"]
    keys = names.get("enum", [names["const"]] if "const" in names else None)
    if keys is not None: schema |= {"properties": dict.fromkeys(map(str, keys), values), "additionalProperties": False}
  alternatives = schema.get("anyOf")
  if isinstance(alternatives, list):   # Python's look-around, as in pydantic's Decimal
    schema["anyOf"] = [x for x in alternatives if not LOOK_AROUND.search(json.dumps(x))] or alternatives
  return schema


def tag_grammar(library: types.ModuleType, tag: JsonObject, tokenizer: ChatTokenizer) -> str:
  """Return the grammar for output with tags. tag: one of vLLM's formats: {"triggers": [...], "structures": [{"begin",
  "schema", "end"}]}, or {"format": {"type": "triggered_tags", "triggers": [...], "tags": [{"begin", "content":
  {"type": "json_schema", "json_schema"}, "end"}]}}. A trigger is the start of `begin`."""
  form = tag.get("format") or {"type": "triggered_tags", "triggers": tag["triggers"], "tags": [
    {**x, "content": {"type": "json_schema", "json_schema": x["schema"]}} for x in tag["structures"]]}
  triggers = form.get("triggers", [])
  format_types = {form["type"], *(x["content"]["type"] for x in form.get("tags", []))}
  unsupported = ", ".join(map(str, format_types - {"triggered_tags", "json_schema"}))
  check(not unsupported, f"{unsupported} is not supported, only triggered_tags with json_schema")
  def trigger_of(begin: str) -> str: return next((x for x in triggers if x and begin.startswith(x)), "")
  tags = [library.StructTag(trigger=trigger_of(x["begin"]), begin=x["begin"], grammar=x["content"]["json_schema"],
                            end=x["end"]) for x in form["tags"]]
  # Triggers are special tokens of the model, or else plain text
  return library.StructTag.to_grammar(tags, assume_special=tokenizer.added_tokens.keys() >= set(triggers))


def normalize(params: JsonObject) -> StructuredOutputsParams:
  """Return structured_outputs of SamplingParams' fields as StructuredOutputsParams, converting a dict (JSON). Raises
  InputError for another type or a conflict with another field."""
  structured = params["structured_outputs"]
  if isinstance(structured, dict): structured = StructuredOutputsParams(**structured)
  check(isinstance(structured, StructuredOutputsParams),
        f"structured_outputs={structured!r} must be of type StructuredOutputsParams", structured)
  for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words"):
    check(not params[name], f"{name}={params[name]!r} conflicts with structured_outputs: remove one", params[name])
  return structured


class Constraint:
  """The allowed next tokens of one sequence. escapes: see StructuredOutputsParams. matcher: llguidance's."""
  def __init__(self, escapes: JsonObject, matcher: Any, vocab_size: int, tokenizer: ChatTokenizer):
    self.matcher = matcher
    self.num_words = -(-vocab_size // 32)
    self.tokenizer = tokenizer
    start = len(tokenizer.encode("\n", False))   # at the start, sentencepiece would add a space
    self.escapes = {tokenizer.encode("\n" + x, False)[start]: ends for x, ends in escapes.items() if x}
    self.ends = escapes.get("")   # markers that end free text; None: the format applies
    self.ids: list[int] = []      # free text so far
    self.is_start = True          # no token of the format yet

  def bitmask(self) -> np.ndarray:
    """Return one bit per token, 1 if it may come next: (ceil(vocab / 32),) int32."""
    if self.ends is not None: return np.full(self.num_words, -1, np.int32)
    bitmask = np.pad(np.frombuffer(self.matcher.compute_bitmask(), np.uint32), (0, self.num_words))[:self.num_words]
    for token in self.escapes if self.is_start else (): bitmask[token // 32] |= np.uint32(1 << token % 32)
    return bitmask.view(np.int32)

  def accept(self, token: int) -> bool:
    """Take the next token. Return True if the output is complete."""
    if self.is_start and self.ends is None and not self.matcher.validate_tokens([token]):
      self.ends = self.escapes.get(token)
    self.is_start = False
    if self.ends is None: self.matcher.consume_token(token)
    elif self.ends:
      self.ids.append(token)
      text = self.tokenizer.decode(self.ids[-MAX_MARKER:], False)
      if any(end in text for end in self.ends): self.ends, self.ids, self.is_start = None, [], True
    return self.matcher.is_stopped()


@functools.lru_cache(maxsize=8)   # takes a second, once for each model
def load_vocabulary(library: types.ModuleType, tokenizer: ChatTokenizer, vocab_size: int, ends: tuple[int, ...]) -> Any:
  """Return an LLTokenizer of llguidance, which parses tokenizer.json itself. ends: the model's end tokens."""
  model = tokenizer.library
  if not isinstance(model, SentencePieceProcessor): return library.LLTokenizer(model.to_str(), vocab_size, [*ends])
  # llguidance calls this for text that the grammar requires; sentencepiece would add a space
  def encode(text: str) -> list[int]: return vocabulary.greedy_tokenize(text)
  tokens = [b"" if model.IsUnknown(i) else tokenizer.token_bytes(i) for i in range(model.GetPieceSize())]
  vars(encode).update(is_tokenizer_wrapper=True, tokens=tokens, special_token_ids=[*tokenizer.special_ids],
                      bos_token_id=None, eos_token_id=0)   # LLTokenizer takes the end tokens as an argument
  vocabulary = library.LLTokenizer(encode, vocab_size, [*ends])
  return vocabulary
