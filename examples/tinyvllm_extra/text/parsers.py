"""Reasoning and tool calls in generated text: the markers of each model family, and a parser. Text and reasoning are
delivered as they arrive, a call when it is complete; text that is no call is content. Invariant: the merged events do
not depend on how the text is split into deltas."""
import dataclasses, functools, json, pathlib, re

from tinyvllm import config, tokenizer

from .tools import MISTRAL, STARTS, Event, Functions, is_in_string, read_calls


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of the output between two markers. format: reasoning, content, channel, or one of tools.READERS. A
  bracket as opening belongs to the section. is_first: only at the start of the answer. function: whose arguments it
  contains, if a channel says so."""
  format: str
  opening: str
  closings: list[str] | tuple[str, ...] = ()
  is_first: bool = False
  function: str = ""


OUTSIDE = Section("outside", "")   # the text between sections
# groups: of sections. reasoning, tools: by vLLM's name, a regular expression and groups. By default, the first entry
# whose expression matches in the chat template applies
TABLES = config.read_json(pathlib.Path(__file__).with_suffix(".json"))
GROUPS = {name: tuple(Section(**x) for x in sections) for name, sections in TABLES["groups"].items()}
REASONING, TOOLS = TABLES["reasoning"], TABLES["tools"]
QUOTED = {quote: re.compile(rf"{quote}|\\.", re.DOTALL) for quote in "\"'"}
BRACKETS = {False: re.compile(r'[\[\]{}"]'), True: re.compile(r"""[\[\](){}"']""")}   # True: Python's
RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
WHITE_SPACE = " \t\r\n"
MAX_REJECTED = 100   # openings that are no calls; then the rest is content, because each may be read to the end


@dataclasses.dataclass(frozen=True)
class OutputFormat:
  """The sections in a model's output."""
  reasoning: tuple[Section, ...] = ()
  tools: tuple[Section, ...] = (*GROUPS["tagged"], *GROUPS["bare JSON"])

  markers = property(lambda self: [text for x in (*self.reasoning, *self.tools) for text in (x.opening, *x.closings)])

  def opened_by(self, prompt_end: str) -> Section | None:
    """Return the reasoning section that the end of a prompt opens."""
    sections = [x for x in self.reasoning if x.format == "reasoning"]
    return next((x for x in sections if prompt_end.rstrip().endswith(x.opening.strip())), None)

  def escapes(self, has_tools: bool) -> config.JsonObject:
    """Return the openings of reasoning and calls that may precede structured output, with the markers after which it
    begins, a list of str; (): it does not."""
    if self.reasoning == GROUPS["harmony"]: return {"<|channel|>": ("<|channel|>final<|message|>",)}
    reasoning = {x.opening: x.closings for x in self.reasoning if x.format == "reasoning"}
    tags = [x.opening for x in self.tools if not x.is_first and x.opening != "{"] if has_tools else []
    return {**dict.fromkeys(tags, ()), **reasoning}


def find_format(template: str, reasoning: str | None = None, tools: str | None = None) -> OutputFormat:
  """Return the format for two of vLLM's parser names; None: the chat template's model family decides."""
  def sections(table: config.JsonObject, name: str | None) -> tuple[Section, ...]:
    rows = [table[name]] if name else [row for row in table.values() if re.search(row["template"], template)]
    return tuple(section for row in rows[:1] for group in row["groups"] for section in GROUPS[group])
  return OutputFormat(sections(REASONING, reasoning), sections(TOOLS, tools) or OutputFormat.tools)


@functools.cache
def marker_pattern(*markers: str) -> re.Pattern: return re.compile("|".join(map(re.escape, markers)) or "$.")


class Parser:
  """Splits one output into events.

  functions: parameter schemas of the functions that may be called, by name. prompt_end: the last characters of the
  prompt; if they open reasoning, the output starts within it. is_forced: the answer is the JSON of calls_schema.
  parallel: False drops all calls except the first."""
  def __init__(self, output_format: OutputFormat, functions: Functions, prompt_end: str = "", is_forced: bool = False,
               parallel: bool = True):
    self.functions = functions
    self.parallel = parallel
    tools = (GROUPS["bare JSON"] if is_forced else output_format.tools) * bool(functions)
    sections = {x.opening: x for x in (*tools, *output_format.reasoning)}
    self.first_sections = [x for x in sections.values() if x.is_first]
    self.sections = {x.opening: x for x in sections.values() if not x.is_first}
    # Openings that end a call or reasoning whose end is missing; <function= may be within a call
    self.tags = tuple(x.opening for x in tools
                      if not (x.is_first or x.format in ("xml", "channel") or x.opening in "{["))
    self.num_calls = self.num_rejected = 0
    self.text = ""   # not yet delivered, after the opening of the current section
    self.section = OUTSIDE
    self.is_start = True     # the answer has only white space so far
    self.skipped = ""        # characters to skip before the next text
    self.scanned = 0         # characters of the text that have been searched
    if opened := output_format.opened_by(prompt_end): self.open(opened, 0)

  def feed(self, delta: str, is_finished: bool = False) -> list[Event]:
    """Return the events of the next piece of text. is_finished: it is the last one."""
    self.text += delta
    self.is_finished = is_finished
    self.events: list[Event] = []
    while self.advance(): pass
    return self.events

  def emit(self, kind: str, text: str, name: str = "") -> None:
    """Add an event. Adjacent events of one kind are merged, except calls."""
    self.num_calls += kind == "call"
    if not text or kind == "call" and self.num_calls > 1 and not self.parallel: return
    if kind != "call" and self.events and self.events[-1][0] == kind: text = self.events.pop()[1] + text
    self.events.append((kind, text, name))

  def deliver(self, kind: str, end: int) -> None:
    """Make the text up to `end` an event."""
    self.emit(kind, self.text[:end])
    self.text = self.text[end:]
    self.scanned = max(0, self.scanned - end)

  def advance(self) -> bool:
    """Read up to the next border of a section. Return False if that needs more text."""
    self.text = self.text.lstrip(self.skipped)
    if self.text: self.skipped = ""
    elif self.section is OUTSIDE or not self.is_finished: return False
    if self.section is OUTSIDE: return self.read_content()
    if self.section.format in ("reasoning", "content"): return self.read_text()
    return self.read_channel() if self.section.format == "channel" else self.read_section()

  def open(self, section: Section, position: int) -> bool:
    """Enter a section whose opening is at `position`."""
    end = position if section.opening in "{[" else position + len(section.opening)
    self.head, self.text, self.section = self.text[:end], self.text[end:], section
    self.is_start = False
    self.skipped = WHITE_SPACE * (section.format in ("reasoning", "content"))
    self.scanned = 0
    self.depth = [""]   # then the open brackets and quotes before `scanned`
    return True

  def close(self, end: int) -> bool:
    """Leave a section whose text ends at `end`, and its closing, unless that also opens a section."""
    rest = self.text[end:]
    closing = next((x for x in self.section.closings if rest.startswith(x) and x not in self.sections), "")
    self.is_start = self.section.format == "reasoning"
    self.skipped = WHITE_SPACE + ";" * (self.section.format == "json")   # llama3_json separates calls by semicolons
    self.text, self.section = rest.removeprefix(closing), OUTSIDE
    return True

  def reject(self) -> bool:
    """Make a section that is no call content: its opening now, the rest when it is read again."""
    self.emit("content", self.head)
    self.deliver("content", int(self.section.opening in "{["))
    self.section = OUTSIDE
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
    opening = marker_pattern(*self.sections).search(self.text)
    self.deliver("content", opening.start() if opening else self.end_without([*self.sections]))
    return opening is not None and self.open(self.sections[opening[0]], 0)

  def read_text(self) -> bool:
    """Deliver the text of a section. A call in reasoning that is never closed ends it."""
    section = self.section
    closing = marker_pattern(*section.closings).search(self.text, self.scanned)
    tag = marker_pattern(*self.tags).search(self.text) if section.format == "reasoning" and not closing else None
    if tag: self.scanned = max(tag.start(), len(self.text) - 20)   # wait for the closing
    border = closing or tag
    self.deliver(section.format, border.start() if border else self.end_without([*section.closings, *self.tags]))
    return bool(closing or tag and self.is_finished) and self.close(0)

  def read_channel(self) -> bool:
    """Read the header of a message in OpenAI's harmony format, up to <|message|>."""
    header, marker, _ = self.text.partition("<|message|>")
    if not marker: return self.is_finished and self.reject()
    recipient = RECIPIENT.search(self.head + header)
    function = recipient[1] if recipient and recipient[1] in self.functions else ""
    contents = "harmony" if function else "reasoning" if "analysis" in header else "content"
    self.open(Section(contents, "", GROUPS["harmony"][0].closings, function=function), len(header) + len(marker))
    self.skipped = ""
    return True

  def read_section(self) -> bool:
    """Read the calls in a section. Its text is content if there are none."""
    section = self.section
    if section.format in STARTS and not STARTS[section.format].match(self.text): return self.reject()
    end = self.marker_start() if section.closings else self.value_end()
    if end is None: return False
    text = section.opening * (section.format == "xml") + self.text[:end]
    if section.function: text = json.dumps({"name": section.function, "arguments": text.strip()})
    is_cut = end == len(self.text)
    events = [] if self.depth[-1] in QUOTED else read_calls(section.format, text, self.functions, is_cut)
    if section.function and not events: events = [("content", self.text[:end], "")]
    for event in events: self.emit(*event)
    return self.close(end) if events else self.reject()

  def marker_start(self) -> int | None:
    """Return where a closing or a tag ends the section, or the end of the finished text; None if it needs more text."""
    section = self.section
    markers = [*section.closings, *self.tags * (not section.function)]
    while marker := marker_pattern(*markers).search(self.text, self.scanned):
      text = self.text[:marker.start()]
      is_json = section.format not in ("xml", "harmony") and text.lstrip()[:1] in "{["   # may have markers in strings
      if self.num_rejected > MAX_REJECTED or not (is_json and is_in_string(text)): return marker.start()
      self.num_rejected += 1
      self.scanned = marker.end()
    self.scanned = max(self.scanned, len(self.text) - max(map(len, markers)))
    return len(self.text) if self.is_finished else None

  def value_end(self) -> int | None:
    """Return the end of the first value in brackets, or of the finished text; None if it needs more text. Reads each
    character once."""
    if self.section.format == "mistral" and not self.scanned:   # [ARGS] is not a list
      if not (head := MISTRAL.match(self.text)): return 0 if self.is_finished else None
      self.scanned = head.end()
    brackets = BRACKETS[self.section.format == "pythonic"]
    while match := (QUOTED.get(self.depth[-1]) or brackets).search(self.text, self.scanned):
      self.scanned = match.end()
      if match[0] in "[({\"'" and self.depth[-1] not in QUOTED: self.depth.append(match[0])
      elif len(self.depth) > 1 and match[0][0] != "\\":
        self.depth.pop()
        if len(self.depth) == 1: return match.end()
    self.scanned = max(self.scanned, len(self.text) - self.text.endswith("\\"))
    return len(self.text) if self.is_finished else None

  def end_without(self, markers: list[str]) -> int:
    """Return where the text ends, before a possible start of a marker."""
    return len(self.text) - (0 if self.is_finished else tokenizer.num_held_back(self.text, markers))
