"""The promise to the reader: few lines of code in tinyvllm/, and each of them readable. Prints each file's lines and
tokens a line."""
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tinyvllm"
FREE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
        tokenize.ENDMARKER}
EXTENSION = PACKAGE.parent / "examples" / "tinyvllm_extra"
# The promise is under 1000 lines: this is where the engine stands, and it may only fall
LINES, WIDTH = 999, 120
TOGETHER = 4200   # lines of core and extension: the ceiling, which they exceed (ROADMAP.md)
TODAY = 4803      # where they stand, and this may only fall
MEAN, DENSEST = 16.5, 19.5   # tokens a line: over the package, in any file


def tokens_of(source: str) -> Iterator[tokenize.TokenInfo]:
  """Python's tokens, an f-string as one: since 3.12 Python gives its parts."""
  depth = 0
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    kind = tokenize.tok_name[token.type]
    if kind == "FSTRING_START":
      depth += 1
      if depth == 1: begun = token
    if depth == 0: yield token
    if kind == "FSTRING_END":
      depth -= 1
      if depth == 0: yield token._replace(type=tokenize.STRING, start=begun.start)


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
  """The tokens that count: no comments, no layout, no docstrings (a string that is a whole statement)."""
  tokens, statement = [], []
  for token in tokens_of(source):
    if token.type not in FREE: statement.append(token)
    if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
      if [t.type for t in statement] != [tokenize.STRING]: tokens += statement
      statement = []
  return tokens


def count(path: Path) -> tuple[int, int]:
  """Lines that hold a code token, and code tokens. A semicolon or a line too wide fails."""
  source = path.read_text()
  tokens = code_tokens(source)
  assert not [t for t in tokens if t.string == ";"], f"{path.name} has a semicolon"
  assert max(map(len, source.splitlines()), default=0) <= WIDTH, f"{path.name} has a line over {WIDTH}"
  return len({n for t in tokens for n in range(t.start[0], t.end[0] + 1)}), len(tokens)


def counts(folder: Path) -> dict[str, tuple[int, int]]:
  return {str(path.relative_to(folder)): count(path) for path in sorted(folder.rglob("*.py"))}


def table(found: dict[str, tuple[int, int]]) -> str:
  total = tuple(map(sum, zip(*found.values(), strict=True)))
  return "\n".join(f"{name:22} {lines:4} lines {tokens / max(1, lines):5.1f} tokens a line"
                   for name, (lines, tokens) in {**found, "total": total}.items())


def test_the_engine_keeps_to_its_lines(tell):
  found = counts(PACKAGE)
  tell(table(found))
  assert sum(lines for lines, _ in found.values()) <= LINES


def test_a_line_of_the_engine_can_be_read():
  found = counts(PACKAGE)
  assert sum(tokens for _, tokens in found.values()) <= MEAN * sum(lines for lines, _ in found.values())
  dense = {name: tokens / lines for name, (lines, tokens) in found.items() if tokens > DENSEST * lines}
  assert not dense, "tokens a line: untangle it"


def lines_together() -> int: return sum(lines for lines, _ in [*counts(EXTENSION).values(), *counts(PACKAGE).values()])


@pytest.mark.xfail(strict=True, reason="an honest shortfall: smaller kernels, server and loaders are still to come")
def test_extension_and_core_stay_within_their_ceiling(): assert lines_together() <= TOGETHER


def test_extension_and_core_do_not_grow(tell):
  tell(table(counts(EXTENSION)))
  assert lines_together() <= TODAY


def test_module_of_the_extension_has_at_most_350_lines():
  assert max(lines for lines, _ in counts(EXTENSION).values()) <= 350


def test_what_counts_as_a_token():
  source = '"""A docstring."""\nx = f"{a}b" + "c"   # a comment\n\ndef f():\n  """Another."""\n  return 1\n'
  assert len(code_tokens(source)) == len(["x", "=", 'f"{a}b"', "+", '"c"', "def", "f", "(", ")", ":", "return", "1"])
