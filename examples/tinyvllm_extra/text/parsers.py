"""Reasoning and tool calls in generated text: the markers of each model family, and a parser. Text and reasoning are
delivered as they arrive, a call when it is complete; text that is no call is content. Invariant: the merged events do
not depend on how the text is split into deltas."""
import dataclasses, functools, itertools, json, re
from collections.abc import Iterable

from .tool_calls import MISTRAL, STARTS, Event, Functions, is_in_string, read_calls


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of the output between two markers. kind: reasoning, content, channel, or a format of tool_calls.READERS. A
  bracket as opening belongs to the section. is_first: only at the start of the answer."""
  kind: str
  opening: str
  closings: tuple[str, ...] = ()
  is_first: bool = False


THINK = Section("reasoning", "<think>", ("\n</think>", "</think>"))
GRANITE_ANSWER = ("Here is my response:", "Here's my response:")
CHANNEL_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
HARMONY = (*(Section("channel", opening, CHANNEL_ENDS) for opening in ("<|channel|>", "<|start|>")),
           Section("channel", "to=", CHANNEL_ENDS, is_first=True))   # the prompt ends with <|start|>assistant
TAGGED = (Section("tagged", "<tool_call>", ("</tool_call>",)), Section("xml", "<function=", ("</function>",)))
BARE_JSON = (*(Section("json", bracket, is_first=True) for bracket in "{["),
             Section("tagged", "```json", ("```",), is_first=True))   # a habit of small models
PYTHONIC = (Section("pythonic", "["), Section("pythonic", "<|python_start|>", ("<|python_end|>",)))
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
  "granite": (r"<\|tool_call\|>", (Section("json", "<|tool_call|>"), *TAGGED)),
  **dict.fromkeys(["hermes", "qwen3_xml", "qwen3_coder"], ("<tool_call>", (*TAGGED, *BARE_JSON))),
  "mistral": (r"\[TOOL_CALLS\]", (Section("mistral", "[TOOL_CALLS]"),)),
  "pythonic": (r"func_name1\(", PYTHONIC), "llama4_pythonic": (r"func_name1\(", PYTHONIC),
  "llama3_json": ('"parameters": dictionary', tuple(Section("json", x) for x in ("{", "[", "<|python_tag|>")))}
DEFAULT_TOOLS = (*TAGGED, *BARE_JSON)
BRACKETS = {False: re.compile(r'[\[\]{}"]'), True: re.compile(r"""[\[\](){}"']""")}   # True: Python's
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
WHITE_SPACE = " \t\r\n"
MAX_REJECTED = 100   # openings that are no calls; then the rest is content, because each may be read to the end


@dataclasses.dataclass(frozen=True)
class OutputFormat:
  """The sections in a model's output. Create a Parser for each choice with `parser`."""
  reasoning: tuple[Section, ...] = ()
  tools: tuple[Section, ...] = DEFAULT_TOOLS

  def has_special(self, special_tokens: Iterable[str]) -> bool:
    """Return whether a marker contains a special token, so that skip_special_tokens would remove it."""
    markers = [marker for x in (*self.reasoning, *self.tools) for marker in (x.opening, *x.closings)]
    return any(token in marker for token in special_tokens for marker in markers)

  def opened_by(self, prompt_end: str) -> Section | None:
    """Return the reasoning section that the end of a prompt opens."""
    return next((x for x in self.reasoning if x.kind == "reasoning" and
                 prompt_end.rstrip().endswith(x.opening.strip())), None)

  def escapes(self, has_tools: bool) -> dict[str, tuple[str, ...]]:
    """Return the openings of reasoning and calls that may precede structured output, with the markers after which it
    begins; (): it does not."""
    if self.reasoning is HARMONY: return {"<|channel|>": ("<|channel|>final<|message|>",)}
    reasoning = {x.opening: x.closings for x in self.reasoning if x.kind == "reasoning"}
    tags = [x.opening for x in self.tools if not x.is_first and x.opening != "{"] if has_tools else []
    return {**dict.fromkeys(tags, ()), **reasoning}

  def parser(self, functions: Functions, prompt_end: str = "", is_forced: bool = False,
             parallel: bool = True) -> "Parser":
    """Return a Parser for one output.

    functions: parameter schemas of the functions that may be called, by name. prompt_end: the last characters of the
    prompt; if they open reasoning, the output starts within it. is_forced: the answer is the JSON of calls_schema.
    parallel: False drops all calls except the first."""
    tools = BARE_JSON if is_forced else self.tools
    return Parser(self.reasoning, tools * bool(functions), functions, self.opened_by(prompt_end), parallel)


def find_format(template: str, reasoning: str | None = None, tools: str | None = None) -> OutputFormat:
  """Return the format for two of vLLM's parser names; None: the chat template's model family decides."""
  def sections(table: Table, name: str | None, default: tuple[Section, ...]) -> tuple[Section, ...]:
    if name: return table[name][1]
    return next((x for expression, x in table.values() if re.search(expression, template)), default)
  return OutputFormat(sections(REASONING, reasoning, ()), sections(TOOLS, tools, DEFAULT_TOOLS))


@functools.cache
def marker_pattern(markers: tuple[str, ...]) -> re.Pattern: return re.compile("|".join(map(re.escape, markers)) or "$.")


class Parser:
  """Splits one output into events."""
  def __init__(self, reasoning: tuple[Section, ...], tools: tuple[Section, ...], functions: Functions,
               first: Section | None, parallel: bool):
    self.functions = functions
    self.parallel = parallel
    sections = {x.opening: x for x in (*tools, *reasoning)}
    self.first_sections = [x for x in sections.values() if x.is_first]
    self.sections = {x.opening: x for x in sections.values() if not x.is_first}
    # Openings that end a call or reasoning whose end is missing; <function= may be within a call
    self.tags = tuple(x.opening for x in tools if not (x.is_first or x.kind in ("xml", "channel") or x.opening in "{["))
    self.num_calls = self.num_rejected = 0
    self.events: list[Event] = []
    self.text = ""   # not yet delivered, after the opening of the current section
    self.section: Section | None = None
    self.is_start = True     # the answer has only white space so far
    self.skipped = ""        # characters to skip before the next text
    if first: self.open(first, 0)
    self.head = ""

  def feed(self, delta: str, is_finished: bool = False) -> list[Event]:
    """Return the events of the next piece of text. is_finished: it is the last one. Adjacent events of one kind are
    merged, except calls; arguments belong to the call before them."""
    self.text += delta
    self.is_finished = is_finished
    while self.advance(): pass
    groups = [(kind, [text for _, text in x]) for kind, x in itertools.groupby(self.events, lambda event: event[0])]
    self.events = []
    return [(kind, text) for kind, texts in groups for text in (texts if kind == "call" else ["".join(texts)])]

  def advance(self) -> bool:
    """Read up to the next border of a section. Return False if that needs more text."""
    if self.skipped:
      self.text = self.text.lstrip(self.skipped)
      if self.text: self.skipped = ""
    if not self.text and (not self.section or not self.is_finished): return False
    if not self.section: return self.read_content()
    if self.section.kind in ("reasoning", "content"): return self.read_text(self.section)
    return self.read_channel() if self.section.kind == "channel" else self.read_section(self.section)

  def open(self, section: Section, position: int) -> bool:
    """Enter a section whose opening is at `position`."""
    end = position if section.opening in "{[" else position + len(section.opening)
    self.head, self.text, self.section = self.text[:end], self.text[end:], section
    self.is_start = False
    self.skipped = WHITE_SPACE * (section.kind in ("reasoning", "content"))
    self.scanned = 0   # characters of the text that have been searched
    self.depth: list[str] = []   # open brackets and quotes before `scanned`
    return True

  def close(self, end: int) -> bool:
    """Leave a section whose end, with its closing, is at `end`."""
    kind = self.section.kind if self.section else ""
    self.is_start = kind == "reasoning"
    self.skipped = WHITE_SPACE + ";" * (kind == "json")   # llama3_json separates calls by semicolons
    self.text, self.section = self.text[end:], None
    return True

  def reject(self) -> bool:
    """Make a section that is no call content: its opening now, the rest when it is read again."""
    if self.section and self.section.opening in "{[": self.head, self.text = self.head + self.text[:1], self.text[1:]
    self.emit("content", self.head)
    self.section = None
    self.num_rejected += 1
    if self.num_rejected > MAX_REJECTED: self.sections = {}
    return True

  def read_content(self) -> bool:
    if self.is_start and self.first_sections:
      rest = self.text.lstrip()
      for section in self.first_sections:
        if rest.startswith(section.opening): return self.open(section, len(self.text) - len(rest))
      if not self.is_finished and any(x.opening.startswith(rest) for x in self.first_sections): return False
    self.is_start = self.is_start and not self.text.strip()
    match = marker_pattern((*self.sections,)).search(self.text)
    end = match.start() if match else self.end_without(tuple(self.sections))
    self.emit("content", self.text[:end])
    self.text = self.text[end:]
    return bool(match) and self.open(self.sections[match[0]], 0)   # type: ignore[index]

  def read_text(self, section: Section) -> bool:
    """Deliver the text of a section. A call in reasoning that is never closed ends it."""
    closing = marker_pattern(section.closings).search(self.text, self.scanned)
    tag = marker_pattern(self.tags).search(self.text) if section.kind == "reasoning" else None
    if tag and (not closing or tag.start() < closing.start()):   # wait for the closing
      if not closing and not self.is_finished:
        self.scanned = max(tag.start(), len(self.text) - 20)
        return self.deliver(section.kind, tag.start())
      if not closing:
        self.deliver(section.kind, tag.start())
        return self.close(0)
    if not closing: return self.deliver(section.kind, self.end_without(section.closings + self.tags))
    self.deliver(section.kind, closing.start())
    return self.close(0 if closing[0] in self.sections else len(closing[0]))

  def deliver(self, kind: str, end: int) -> bool:
    self.emit(kind, self.text[:end])
    self.text = self.text[end:]
    self.scanned = max(0, self.scanned - end)
    return False

  def read_channel(self) -> bool:
    """Read the header of a message in OpenAI's harmony format, up to <|message|>."""
    header, marker, self.text = self.text.partition("<|message|>")
    if not marker:
      self.text = header
      return self.is_finished and self.reject()
    recipient = RECIPIENT.search(self.head + header)
    kind = "reasoning" if "analysis" in header else "content"
    if recipient and recipient[1] in self.functions: kind = f"call {recipient[1]}"
    self.section = Section(kind, "", CHANNEL_ENDS)
    self.scanned = 0
    return True

  def read_section(self, section: Section) -> bool:
    """Read calls up to a marker, or up to the end of the first value if the format has no closing."""
    if section.kind.startswith("call "): return self.read_harmony_call(section)
    start = STARTS.get(section.kind)
    if start and not start.match(self.text): return self.reject()
    if not section.closings:
      if section.kind == "mistral" and not self.scanned:   # [ARGS] is not a list
        head = MISTRAL.match(self.text)
        if not head: return self.is_finished and self.reject()
        self.scanned = head.end()
      end = self.value_end(section.kind == "pythonic")
      if end is None and not self.is_finished: return False
      if self.depth and self.depth[-1] in "\"'": return self.reject()   # cut off within a string
      events = read_calls(section.kind, self.text[:end], self.functions, end is None)
      return self.deliver_calls(events, len(self.text) if end is None else end)
    match = self.find(section.closings + self.tags)
    if not match and not self.is_finished: return False
    end = match.start() if match else len(self.text)
    text = ("<function=" if section.kind == "xml" else "") + self.text[:end]
    in_string = text.lstrip()[:1] in "{[" and is_in_string(text)
    events = [] if in_string else read_calls(section.kind, text, self.functions, not match)
    if not in_string or not match or self.num_rejected > MAX_REJECTED:
      return self.deliver_calls(events, match.end() if match and match[0] in section.closings else end)
    self.num_rejected += 1
    self.scanned = match.end()   # the marker is part of a string
    return True

  def find(self, markers: tuple[str, ...]) -> re.Match | None:
    """Return the first marker in the text after `scanned`. Reads each character once."""
    match = marker_pattern(markers).search(self.text, self.scanned)
    if not match: self.scanned = max(self.scanned, len(self.text) - max(map(len, markers)))
    return match

  def read_harmony_call(self, section: Section) -> bool:
    match = self.find(CHANNEL_ENDS)
    if not match and not self.is_finished: return False
    body = self.text[:match.start()] if match else self.text
    call = json.dumps({"name": section.kind.removeprefix("call "), "arguments": body.strip()})
    events = read_calls("json", call, self.functions, False)
    for kind, text in events or [("content", body)]: self.emit(kind, text)
    return self.close(match.end() if match and match[0] not in self.sections else len(body))

  def deliver_calls(self, events: list[Event], end: int) -> bool:
    if not events: return self.reject()
    for kind, text in events: self.emit(kind, text)
    self.close(end)
    return True

  def value_end(self, is_python: bool) -> int | None:
    """Return the end of the first value in brackets, None if it is not complete. Reads each character once."""
    while True:
      quote = self.depth[-1] if self.depth and self.depth[-1] in "\"'" else ""
      pattern = re.compile(rf"{quote}|\\.", re.DOTALL) if quote else BRACKETS[is_python]
      match = pattern.search(self.text, self.scanned)
      if not match:
        self.scanned = max(self.scanned, len(self.text) - self.text.endswith("\\"))
        return None
      self.scanned = match.end()
      if quote:
        if match[0] == quote: self.depth.pop()
      elif match[0] in "[({\"'": self.depth.append(match[0])
      elif self.depth:
        self.depth.pop()
        if not self.depth: return match.end()

  def end_without(self, markers: tuple[str, ...]) -> int:
    """Return where the text ends, before a possible start of a marker."""
    if self.is_finished: return len(self.text)
    longest = max(map(len, markers), default=1)
    for i in range(max(0, len(self.text) - longest + 1), len(self.text)):
      if any(marker.startswith(self.text[i:]) for marker in markers): return i
    return len(self.text)

  def emit(self, kind: str, text: str) -> None:
    self.num_calls += kind == "call"
    if text and (kind not in ("call", "arguments") or self.parallel or self.num_calls < 2):
      self.events.append((kind, text))
