"""The promise to the reader: under 1000 lines of code in tinyvllm/. Prints each file's lines and their density."""
import io
import tokenize
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tinyvllm"
FREE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
        tokenize.ENDMARKER}
BESIDE = {"tinyvllm_server": 450, "tinyvllm_cli": 175}   # packages in examples/, and what each stays below
LIMIT, WIDTH, DENSITY = 1000, 120, 14


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
  """The tokens that count: no comments, no layout, no docstrings (a string that is a whole statement)."""
  tokens, statement = [], []
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    if token.type not in FREE: statement.append(token)
    if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
      if [t.type for t in statement] != [tokenize.STRING]: tokens += statement
      statement = []
  return tokens


def rows_of(folder: Path) -> tuple[list[str], int]:
  """Each file's lines and density, and all its lines."""
  total, rows = 0, []
  for path in sorted(folder.rglob("*.py")):
    source = path.read_text()
    tokens = code_tokens(source)
    lines = {n for t in tokens for n in range(t.start[0], t.end[0] + 1)}
    density = len(tokens) / max(1, len(lines))
    total += len(lines)
    dense = f"   more than {DENSITY}: untangle it" if density > DENSITY else ""
    rows.append(f"{path.relative_to(folder)!s:22} {len(lines):4} lines {density:5.1f} tokens a line{dense}")
    assert not [t for t in tokens if t.string == ";"], f"{path.name} has a semicolon"
    assert max(map(len, source.splitlines()), default=0) <= WIDTH, f"{path.name} has a line over {WIDTH}"
  return rows, total


def test_package_is_under_1000_lines_of_at_most_120_columns_and_no_semicolons(tell):
  rows, total = rows_of(PACKAGE)
  tell(*rows, f"{'total':22} {total:4} lines of {LIMIT}")
  assert total < LIMIT


@pytest.mark.parametrize("name", BESIDE)
def test_a_package_beside_it_is_counted_too(name, tell):
  """It is no part of the 1000: what it adds is said here, and in the README."""
  rows, total = rows_of(PACKAGE.parent / "examples" / name)
  engine = rows_of(PACKAGE)[1]
  tell(*rows, f"{name:22} {total:4} lines, {engine + total} in all")
  assert total < BESIDE[name]
