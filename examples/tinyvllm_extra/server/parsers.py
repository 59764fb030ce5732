"""Reasoning and tool calls in generated text: the markers of each model family, and a parser that reads each character
once. Invariant: the merged events do not depend on how the text is split into deltas."""
import dataclasses, functools, itertools, json, re
from collections.abc import Callable, Generator, Iterable
from typing import Any

import orjson

Event = tuple[str, str]   # (kind, text); kinds: content, reasoning, call (the function's name), arguments (JSON)
Steps = Generator[None, None, Any]   # yields when it needs more text
Sink = Callable[[str], Any]


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of the output between two markers. kind: the Parser's method that reads it."""
  kind: str
  opening: str   # "": at the start of the answer, if that is { or [
  closings: tuple[str, ...] = ()


THINK = Section("reasoning", "<think>", ("\n</think>", "</think>"))
GRANITE_ANSWER = ("Here is my response:", "Here's my response:")
CHANNEL_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
HARMONY = (Section("channel", "<|channel|>", CHANNEL_ENDS), Section("channel", "<|start|>", CHANNEL_ENDS))
TAGGED = (Section("calls", "<tool_call>", ("</tool_call>",)), Section("xml_call", "<function="))
BARE_JSON = Section("calls", "")
PYTHONIC = (Section("pythonic", ""), Section("pythonic", "<|python_start|>", ("<|python_end|>",)))
Table = dict[str, tuple[str, tuple[Section, ...]]]   # vLLM's name: (template's regex, sections)
# By default, the first entry whose regular expression matches in the chat template applies
REASONING: Table = {
  "openai_gptoss": (r"<\|channel\|>", HARMONY),
  "gemma4": (r"<\|channel>", (Section("reasoning", "<|channel>thought\n", ("\n<channel|>", "<channel|>")),)),
  "granite": ("Here is my response:|<response>", (
    *(Section("reasoning", f"{here} my thought process:", GRANITE_ANSWER) for here in ("Here is", "Here's")),
    THINK, Section("content", "<response>", ("</response>",)))),
  "mistral": (r"\[THINK\]", (Section("reasoning", "[THINK]", ("[/THINK]",)),)),
  "qwen3": ("</think>", (THINK,)),
  "deepseek_r1": ("</think>", (THINK,))}
TOOLS: Table = {
  "openai": (r"<\|channel\|>", HARMONY),
  "gemma4": (r"<\|tool_call>", (Section("gemma", "<|tool_call>call:", ("<tool_call|>",)),)),
  "granite": (r"<\|tool_call\|>", (Section("calls", "<|tool_call|>"), *TAGGED)),
  **dict.fromkeys(["hermes", "qwen3_xml", "qwen3_coder"], ("<tool_call>", TAGGED)),
  "mistral": (r"\[TOOL_CALLS\]", (Section("mistral", "[TOOL_CALLS]"),)),
  "pythonic": (r"func_name1\(", PYTHONIC), "llama4_pythonic": (r"func_name1\(", PYTHONIC),
  "llama3_json": ('"parameters": dictionary', (BARE_JSON, Section("calls", "<|python_tag|>")))}
DEFAULT_TOOLS = (*TAGGED, BARE_JSON)
SPACE = re.compile(r"\s*")
SEPARATORS = re.compile(r"[\s,;\[\]]*")
NAME = re.compile(r"[\w.-]*")
WORD = re.compile(r"[\w.+-]*")
LITERALS = {"True": "true", "False": "false", "None": "null"}   # Python's
COLON = re.compile(r"[\s:]*")
ITEM_SEPARATORS = re.compile(r"[\s,]*")
NO_BRACE = re.compile(r"[^{]*")
PARAMETER_ENDS = ("\n</parameter>", "</parameter>")
TAG_NAME = re.compile(r"[^>\n]*")
STRING_PARTS = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
GEMMA_QUOTE = '<|"|>'
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")


@dataclasses.dataclass(frozen=True)
class OutputFormat:
  """The sections in a model's output. Create a Parser for each choice with `parser`."""
  reasoning: tuple[Section, ...] = ()
  tools: tuple[Section, ...] = DEFAULT_TOOLS

  def has_special(self, special_tokens: Iterable[str]) -> bool:
    """Return whether a marker contains a special token, so that skip_special_tokens would remove it."""
    markers = [marker for x in (*self.reasoning, *self.tools) for marker in (x.opening, *x.closings)]
    return any(token in marker for token in special_tokens for marker in markers)

  def parser(self, functions: dict[str, Any], prompt_end: str = "", is_forced: bool = False,
             parallel: bool = True) -> "Parser":
    """Return a Parser for one output.

    functions: parameter schemas of the functions that may be called, by name. prompt_end: the last characters of the
    prompt; if they open reasoning, the output starts within it. is_forced: the output is the JSON of calls_schema.
    parallel: False drops all calls except the first."""
    first = BARE_JSON if is_forced else next((x for x in self.reasoning if x.kind == "reasoning" and
                                              prompt_end.rstrip().endswith(x.opening.strip())), None)
    return Parser(self.reasoning + self.tools * bool(functions), functions, first, parallel)


def find_format(template: str, reasoning: str | None = None, tools: str | None = None) -> OutputFormat:
  """Return the format for two of vLLM's parser names; None: the chat template's model family decides."""
  def sections(table: Table, name: str | None, default: tuple[Section, ...]) -> tuple[Section, ...]:
    if name: return table[name][1]
    return next((x for expression, x in table.values() if re.search(expression, template)), default)
  return OutputFormat(sections(REASONING, reasoning, ()), sections(TOOLS, tools, DEFAULT_TOOLS))


@functools.cache
def marker_pattern(markers: tuple[str, ...]) -> re.Pattern: return re.compile("|".join(map(re.escape, markers)) or "$.")


def escape(text: str) -> str: return json.dumps(text, ensure_ascii=False)[1:-1]


def is_json(text: str) -> bool:
  try: orjson.loads(text)
  except ValueError: return False
  return True


def json_word(text: str) -> str:
  """Return a word outside strings as JSON: a literal of JSON or Python, else a string."""
  text = LITERALS.get(text, text)
  return text if is_json(text) else f'"{escape(text)}"'


def types_of(schema: Any) -> set[str]:
  """Return the JSON types that a schema and its alternatives name; empty if they name none."""
  if not isinstance(schema, dict): return set()
  schemas: list[Any] = [schema]
  for key in ("anyOf", "oneOf"): schemas += schema[key] if isinstance(schema.get(key), list) else []
  types: list[Any] = []
  for x in schemas:
    kind = x.get("type") if isinstance(x, dict) else None
    types += kind if isinstance(kind, list) else [kind]
  return {kind for kind in types if isinstance(kind, str)}


def discard(text: str) -> None: pass


def xml_json(text: str, types: set[str]) -> str:
  """Return a parameter as JSON: a string if it is not JSON or its schema says so."""
  value = LITERALS.get(text, text)
  if "string" in types and not (value == "null" and "null" in types) or not is_json(value): return f'"{escape(text)}"'
  return value


class NotACall(Exception):
  """The text of a section is not a call of a known function."""


class Reader:
  """Reads text that arrives in pieces. Methods that may need more text are coroutines, called by `yield from`."""
  def __init__(self) -> None:
    self.text = ""      # not yet consumed from `position` on
    self.position = 0
    self.is_finished = False
    self.pending: list[str] | None = []   # text since the opening, which is content if no call follows

  def peek(self) -> Steps:
    """Return the next character without consuming it, "" at the end of the output."""
    while self.position == len(self.text) and not self.is_finished: yield
    return self.text[self.position:self.position + 1]

  def take(self, end: int) -> str:
    """Consume the text up to position `end` and return it."""
    text = self.text[self.position:end]
    self.position += len(text)
    if self.pending is not None: self.pending.append(text)
    return text

  def read(self, pattern: re.Pattern, sink: Sink | None = None) -> Steps:
    """Consume all characters that the pattern, a repeated class, matches. Return them, or write them to `sink`."""
    pieces: list[str] = []
    while True:
      match = pattern.match(self.text, self.position)
      text = self.take(match.end() if match else 0)
      if text: (sink or pieces.append)(text)
      if self.position < len(self.text) or self.is_finished: return "".join(pieces)
      yield

  def skip(self, pattern: re.Pattern) -> Steps: yield from self.read(pattern, discard)

  def expect(self, text: str) -> Steps:
    """Consume `text` if it comes next. Return whether it does."""
    while True:
      start = self.text[self.position:self.position + len(text)]
      if start == text: return bool(self.take(self.position + len(text)))
      if self.is_finished or not text.startswith(start): return False
      yield

  def until(self, markers: tuple[str, ...], sink: Sink) -> Steps:
    """Consume text up to the first marker, write it to `sink`, and return the marker, "" at the end of the output."""
    pattern = marker_pattern(markers)
    while True:
      match = pattern.search(self.text, self.position)
      end = match.start() if match else len(self.text)
      if not match and not self.is_finished: end = self.start_of_marker(markers)
      text = self.take(end)
      if text: sink(text)
      if match: return self.take(match.end())
      if self.is_finished: return ""
      yield

  def start_of_marker(self, markers: tuple[str, ...]) -> int:
    """Return the position of the shortest unread suffix that contains all beginnings of markers."""
    longest = max(map(len, markers), default=1)
    for i in range(max(self.position, len(self.text) - longest + 1), len(self.text)):
      if any(marker.startswith(self.text[i:]) for marker in markers): return i
    return len(self.text)

  # Values

  def value(self, sink: Sink) -> Steps:
    """Read a value of JSON, Python or Gemma, and write it as JSON to `sink`. A number or word ends before , or )."""
    depth = 0
    while character := (yield from self.peek()):
      if character in "\"'": yield from self.string(sink)
      elif character == "<" and (yield from self.expect(GEMMA_QUOTE)):
        sink('"')
        if (yield from self.until((GEMMA_QUOTE,), lambda text: sink(escape(text)))): sink('"')
      elif WORD.fullmatch(character): sink(json_word((yield from self.read(WORD))))
      elif depth == 0 and character not in "{[": return
      else:
        depth += (character in "{[") - (character in "}]")
        sink(self.take(self.position + 1))
      if depth == 0: return

  def string(self, sink: Sink) -> Steps:
    """Read a string in single or double quotes, and write it as JSON to `sink`; escape control characters."""
    quote = self.take(self.position + 1)
    sink('"')
    while True:
      yield from self.read(STRING_PARTS[quote], lambda text: sink(escape(text)))
      character = yield from self.peek()
      if not character: return
      self.take(self.position + 1)
      if character == quote: return sink('"')
      character = yield from self.peek()
      self.take(self.position + 1)
      sink("\\" + character if character in tuple('"\\/bfnrtu') else escape(character))

  def json_string(self) -> Steps:
    """Return a JSON string. Raises NotACall for other text."""
    if (yield from self.peek()) != '"': raise NotACall
    pieces: list[str] = []
    yield from self.string(pieces.append)
    try: return json.loads("".join(pieces))
    except ValueError as error: raise NotACall from error

  def next_item(self, closing: str) -> Steps:
    """Return whether an item follows, else consume the closing bracket. Raises NotACall at the end of the output."""
    yield from self.skip(ITEM_SEPARATORS)
    character = yield from self.peek()
    if character == closing: self.take(self.position + 1)
    if not character: raise NotACall
    return character != closing


class Parser(Reader):
  """Splits one output into events. A section's kind names the method that reads it."""
  def __init__(self, sections: tuple[Section, ...], functions: dict[str, Any], first: Section | None, parallel: bool):
    super().__init__()
    self.functions = functions
    self.parallel = parallel
    self.has_content = first != BARE_JSON   # not if the output is forced to be calls: see OutputFormat.parser
    self.sections = {x.opening: x for x in sections}
    self.bare = self.sections.pop("", None)
    self.openings = tuple(self.sections)
    self.num_calls = 0   # in the text so far
    self.events: list[Event] = []
    self.sink = {kind: functools.partial(self.emit, kind) for kind in ("content", "reasoning", "arguments")}
    self.arguments = self.sink["arguments"]
    self.steps = self.run(first)

  def feed(self, delta: str, is_finished: bool = False) -> list[Event]:
    """Return the events of the next piece of text. is_finished: it is the last one. Adjacent events of one kind are
    merged, except calls; arguments belong to the call before them."""
    self.text = self.text[self.position:] + delta
    self.position = 0
    self.is_finished = is_finished
    next(self.steps, None)
    groups = [(kind, [text for _, text in x]) for kind, x in itertools.groupby(self.events, lambda event: event[0])]
    self.events.clear()
    return [(kind, text) for kind, texts in groups for text in (texts if kind == "call" else ["".join(texts)])]

  def run(self, section: Section | None) -> Steps:
    """Read the whole output. section: the first one, if the output starts within it."""
    if not section: section = yield from self.read_start()
    while True:
      if not section:
        self.pending = None
        section = self.sections.get((yield from self.until(self.openings, self.sink["content"])))
        if not section: return
      marker = None
      if section.opening: self.pending = [section.opening]
      try: marker = yield from getattr(self, section.kind)(section)
      except NotACall:
        if self.pending is None: marker = yield from self.end(section)   # a call whose arguments are malformed
        self.flush()
      section = (yield from self.read_start()) if section.kind == "reasoning" else self.sections.get(marker or "")

  def read_start(self) -> Steps:
    """Return the section without opening if the answer starts with its first character."""
    if not self.bare: return None
    self.pending = []
    yield from self.skip(SPACE)
    if (yield from self.peek()) in ("{", "["): return self.bare
    return self.flush()

  # Sections: each method returns the last marker, which may be the next section's opening

  def reasoning(self, section: Section) -> Steps:
    self.pending = None
    yield from self.skip(SPACE)
    yield from self.until(section.closings, self.sink[section.kind])
    yield from self.skip(SPACE)

  content = reasoning

  def channel(self, section: Section) -> Steps:
    """Read a message of OpenAI's harmony format: header, <|message|>, body."""
    header: list[str] = []
    if not (yield from self.until(("<|message|>",), header.append)): raise NotACall
    self.pending = None
    text = "".join(header)
    recipient = RECIPIENT.search(text)
    is_call = recipient is not None and recipient[1] in self.functions
    if recipient and is_call: self.call(recipient[1])
    kind = "arguments" if is_call else "reasoning" if "analysis" in text else "content"
    return (yield from self.until(section.closings, self.sink[kind]))

  def calls(self, section: Section) -> Steps:
    """Read JSON objects, in a list or not, or functions in XML."""
    num_before = self.num_calls
    while True:
      yield from self.skip(SEPARATORS)
      if (yield from self.expect("{")): yield from self.json_call()
      elif section in TAGGED and (yield from self.expect("<function=")): return (yield from self.xml_call(section))
      else: break
      self.pending = []
    if self.num_calls == num_before: raise NotACall
    return (yield from self.end(section))

  def mistral(self, section: Section) -> Steps:
    """Read [TOOL_CALLS][{"name": ..., "arguments": ...}] or [TOOL_CALLS]name{...}, with [ARGS] before the object."""
    yield from self.skip(SPACE)
    if (yield from self.peek()) in "[{": return (yield from self.calls(section))
    self.call((yield from self.read(NAME)))
    yield from self.skip(NO_BRACE)
    yield from self.value(self.arguments)
    return (yield from self.end(section))

  def gemma(self, section: Section) -> Steps:
    """Read name{key:<|"|>text<|"|>,other:1}."""
    self.call((yield from self.read(NAME)))
    yield from self.value(self.arguments)
    return (yield from self.end(section))

  def pythonic(self, section: Section) -> Steps:
    """Read [name(key='text', other=1), ...]."""
    if not (yield from self.expect("[")): raise NotACall
    while (yield from self.next_item("]")):
      name = yield from self.read(NAME)
      if not (yield from self.expect("(")): raise NotACall
      self.call(name)
      separator = "{"
      while (yield from self.next_item(")")):
        key = yield from self.read(NAME)
        if not key or not (yield from self.expect("=")): raise NotACall
        self.arguments(f'{separator}"{key}": ')
        separator = ", "
        yield from self.value(self.arguments)
      self.arguments("{}" if separator == "{" else "}")
      self.pending = []
    return (yield from self.end(section))

  # Parts of sections

  def end(self, section: Section) -> Steps:
    """Read up to the section's end, or a following opening if the end is missing."""
    self.pending = None
    marker = (yield from self.until(section.closings + self.openings, discard)) if section.closings else ""
    if marker not in self.openings: yield from self.skip(SPACE)
    return marker

  def call(self, name: str) -> None:
    """Start a call. Raises NotACall for an unknown function."""
    if name not in self.functions: raise NotACall
    self.num_calls += 1
    self.pending = None
    self.emit("call", name)

  def json_call(self) -> Steps:
    """Read "name": ..., "arguments" or "parameters": ...}, in any order."""
    num_before = self.num_calls
    early: list[str] | None = None   # arguments before the name
    has_arguments = False
    while (yield from self.next_item("}")):
      key = yield from self.json_string()
      yield from self.skip(COLON)
      if key == "name":
        self.call((yield from self.json_string()))
        for piece in early or []: self.arguments(piece)
      elif key in ("arguments", "parameters"):
        has_arguments = True
        if self.num_calls == num_before: early = []
        yield from self.value(self.arguments if early is None else early.append)
      else: yield from self.value(discard)
    if self.num_calls == num_before: raise NotACall
    if not has_arguments: self.arguments("{}")

  def xml_call(self, section: Section) -> Steps:
    """Read NAME> and parameters: <parameter=KEY>text</parameter>, up to </function>."""
    name = yield from self.read(TAG_NAME)
    self.call(name.strip())
    properties = self.functions[name.strip()].get("properties")
    separator = "{"
    while (marker := (yield from self.until(("<parameter=", "</function>"), discard))) == "<parameter=":
      key = yield from self.read(TAG_NAME)
      yield from self.expect(">")
      yield from self.expect("\n")
      self.arguments(f'{separator}"{escape(key)}": ')
      separator = ", "
      yield from self.xml_value(types_of(properties.get(key) if isinstance(properties, dict) else None))
    if marker: self.arguments("{}" if separator == "{" else "}")
    return (yield from self.end(section))

  def xml_value(self, types: set[str]) -> Steps:
    """Read a parameter. A string is written as it arrives if the schema allows no other type."""
    is_text = types == {"string"}
    pieces: list[str] = []
    if is_text: self.arguments('"')
    sink: Sink = (lambda text: self.arguments(escape(text))) if is_text else pieces.append
    marker = yield from self.until(PARAMETER_ENDS, sink)
    self.arguments('"' * bool(marker) if is_text else xml_json("".join(pieces), types))

  def emit(self, kind: str, text: str) -> None:
    is_call = kind in ("call", "arguments")
    is_dropped = self.num_calls > 1 and not self.parallel if is_call else not self.has_content
    if text and not is_dropped: self.events.append((kind, text))

  def flush(self) -> None:
    """Write the pending text as content."""
    for text in self.pending or []: self.emit("content", text)
    self.pending = None
