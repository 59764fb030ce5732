"""Structured output by llguidance: what turns a schema, an expression or a grammar into a constraint, of which the
engine knows three things: `mask()`, `accept(token)`, `done`. `pip install 'tinyvllm[grammar]'` brings what it needs."""
import dataclasses, functools, json
from typing import Any

import numpy as np

from tinyvllm.config import InputError, check
from tinyvllm.request import SamplingParams
from tinyvllm.tokenizer import Tokenizer
from tinyvllm_extra.packages import optional

KINDS: dict[str, Any] = {"json": (str, dict), "regex": str, "choice": list, "grammar": str, "json_object": bool}


@dataclasses.dataclass(init=False)
class StructuredOutputsParams:
  """What a text must be, exactly one of these, with vLLM's names."""
  json: str | dict | None = None    # a JSON schema
  regex: str | None = None
  choice: list[str] | None = None   # one of these texts
  grammar: str | None = None        # in Lark's or GBNF's notation
  json_object: bool | None = None   # True: any JSON object

  def __init__(self, **given: Any):
    named = {kind: value for kind, value in given.items() if value not in (None, False)}
    typed = [kind for kind, value in named.items() if value and isinstance(value, KINDS.get(kind, ()))]
    texts = all(isinstance(text, str) for text in named.get("choice", []))
    check(len(typed) == len(named) == 1 and texts, f"structured_outputs={given}: use one of {(*KINDS,)}")
    vars(self).update(named)

  def constraint(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> "Constraint":
    """Raises ValueError for a schema, expression or grammar that llguidance does not take."""
    (kind, value), = vars(self).items()
    library = optional("llguidance", "grammar", "structured output")
    text = value if isinstance(value, str) else json.dumps({"type": "object"} if kind == "json_object" else value)
    guide = _guide(tokenizer, vocab_size, eos_token_ids)
    try: matcher = library.LLMatcher(guide, library.grammar_from(kind.removesuffix("_object"), text), log_level=0)
    except ValueError as e: raise InputError(f"structured_outputs: {kind}: {e}") from e
    check(not matcher.is_error(), f"structured_outputs: {kind}: {' '.join(matcher.get_error().split())}")
    return Constraint(matcher, vocab_size)


def normalize(params: SamplingParams) -> Any:
  """The structured_outputs of some SamplingParams, which JSON has as a dict. Raises ValueError for what is none, or
  conflicts with another field."""
  given = params.structured_outputs
  structured = StructuredOutputsParams(**given) if isinstance(given, dict) else given
  known = hasattr(structured, "constraint")
  check(known, f"structured_outputs={structured!r} must be of type StructuredOutputsParams")
  for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words"):
    value = getattr(params, name)
    check(not value, f"{name}={value!r} conflicts with structured_outputs: drop one")
  return structured


class Constraint:
  """What may follow, token by token."""
  def __init__(self, matcher: Any, vocab_size: int):
    self.matcher = matcher
    self.words = -(-vocab_size // 32)

  def bitmask(self) -> np.ndarray:
    """A bit for each token that may come next, in int32 words."""
    return np.pad(np.frombuffer(self.matcher.compute_bitmask(), np.int32), (0, self.words))[:self.words]

  def accept(self, token: int) -> None: self.matcher.consume_token(token)
  @property
  def is_done(self) -> bool: return self.matcher.is_stopped()


class Vocabulary:
  """What llguidance asks of a vocabulary that is a list of bytes. It forces text that has no choice, which
  sentencepiece begins with a space: it is told to spell as its own tables do."""
  is_tokenizer_wrapper = True
  bos_token_id = None
  eos_token_id = 0   # the real ones are given apart

  def __init__(self, tokenizer: Tokenizer):
    model = tokenizer.library
    def spelling(i: int) -> bytes:
      if model.IsByte(i): return bytes([int(model.IdToPiece(i)[1:-1], 16)])   # <0x0A>
      return b"" if model.IsUnknown(i) else model.IdToPiece(i).replace("\u2581", " ").encode()
    self.tokens = [spelling(i) for i in range(model.GetPieceSize())]
    self.special_token_ids = list(tokenizer.specials)
    self.guide: Any = None

  def __call__(self, text: str) -> list[int]: return self.guide.greedy_tokenize(text)


@functools.lru_cache(maxsize=8)   # it takes a second, and belongs to a model, not to a request
def _guide(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Any:
  plain = hasattr(tokenizer.library, "to_str")   # a tokenizer.json, which llguidance reads itself
  vocabulary: Any = tokenizer.library.to_str() if plain else Vocabulary(tokenizer)
  library = optional("llguidance", "grammar", "structured output")
  guide = library.LLTokenizer(vocabulary, vocab_size, list(eos_token_ids))
  if not plain: vocabulary.guide = guide
  return guide
