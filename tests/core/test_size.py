"""Limits on lines of code and on tokens per line, without comments and docstrings. Prints both for each file."""
import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tinyvllm"
FREE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
        tokenize.ENDMARKER}
EXTENSION = PACKAGE.parent / "examples" / "tinyvllm_extra"
TESTS = PACKAGE.parent / "tests"
LINES = 980       # maximum lines of the core, below the goal of 1,000; only ever lower it
WIDTH = 120       # maximum columns
TOGETHER, MODULE_LINES = 9100, 350   # maximum lines of core and extension, and of a module of the extension
# Maximum lines of each room of the extension; C and CUDA sources count
ROOMS = {"kernels": 2050, "formats": 1150, "models": 750, "sampling": 620, "text": 600, "cache": 220, "pooling": 220,
         "serving": 1500, "trace": 180, "adapters": 160, "router": 170, "cli": 650, "": 460}
# Of tests and of benchmarks; only ever lower them
TEST_LINES, BENCHMARK_LINES, FILE_LINES = 13_500, 1_900, 500
MEAN, DENSEST = 16.5, 19.5   # maximum tokens per line: mean of the package, mean of any file


def tokens_of(source: str) -> Iterator[tokenize.TokenInfo]:
  """Yield Python's tokens, with each f-string as one token: Python 3.12 and later split it."""
  depth = 0
  for token in tokenize.generate_tokens(io.StringIO(source).readline):
    kind = tokenize.tok_name[token.type]
    if kind == "FSTRING_START":
      depth += 1
      if depth == 1: first = token
    if depth == 0: yield token
    if kind == "FSTRING_END":
      depth -= 1
      if depth == 0: yield token._replace(type=tokenize.STRING, start=first.start)


def code_tokens(source: str) -> list[tokenize.TokenInfo]:
  """Return the tokens except comments, layout and docstrings (a statement that is a string)."""
  tokens, statement = [], []
  for token in tokens_of(source):
    if token.type not in FREE: statement.append(token)
    if token.type in (tokenize.NEWLINE, tokenize.ENDMARKER):
      if [t.type for t in statement] != [tokenize.STRING]: tokens += statement
      statement = []
  return tokens


def count(path: Path) -> tuple[int, int]:
  """Return the numbers of code lines and code tokens. Raises AssertionError for a semicolon or a wide line. Of a C or
  CUDA source all lines count except those that are empty or a comment."""
  source = path.read_text()
  if path.suffix in (".c", ".cu", ".cuh"):
    assert max(map(len, source.splitlines())) <= WIDTH, f"{path.name} has a line over {WIDTH}"
    return len([line for line in source.splitlines() if line.strip() and not line.strip().startswith("//")]), 0
  tokens = code_tokens(source)
  assert not [t for t in tokens if t.string == ";"], f"{path.name} has a semicolon"
  assert max(map(len, source.splitlines()), default=0) <= WIDTH, f"{path.name} has a line over {WIDTH}"
  return len({n for t in tokens for n in range(t.start[0], t.end[0] + 1)}), len(tokens)


def counts(folder: Path) -> dict[str, tuple[int, int]]:
  files = [path for ending in ("py", "c", "cu", "cuh") for path in sorted(folder.rglob(f"*.{ending}"))]
  return {str(path.relative_to(folder)): count(path) for path in files}


def table(file_counts: dict[str, tuple[int, int]]) -> str:
  total = tuple(map(sum, zip(*file_counts.values(), strict=True)))
  return "\n".join(f"{name:22} {lines:4} lines {tokens / max(1, lines):5.1f} tokens per line"
                   for name, (lines, tokens) in {**file_counts, "total": total}.items())


def test_core_lines_are_within_limit(print_at_end):
  file_counts = counts(PACKAGE)
  print_at_end(table(file_counts))
  assert sum(lines for lines, _ in file_counts.values()) <= LINES


def test_core_tokens_per_line_are_within_limit():
  file_counts = counts(PACKAGE)
  assert sum(tokens for _, tokens in file_counts.values()) <= MEAN * sum(lines for lines, _ in file_counts.values())
  dense = {name: tokens / lines for name, (lines, tokens) in file_counts.items() if tokens > DENSEST * lines}
  assert not dense, f"more than {DENSEST} tokens per line: split long lines"


def test_extension_modules_rooms_and_sum_are_within_limits(print_at_end):
  modules, rooms = counts(EXTENSION), dict.fromkeys(ROOMS, 0)
  for name, (num_lines, _) in modules.items(): rooms[name.partition("/")[0] if "/" in name else ""] += num_lines
  ceilings = "\n".join(f"{room or '(top)':10} {n:5} of {ROOMS[room]} lines" for room, n in rooms.items())
  print_at_end(table(modules), ceilings)
  assert max(lines for lines, _ in modules.values()) <= MODULE_LINES
  assert not {room: n for room, n in rooms.items() if n > ROOMS[room]}
  assert sum(rooms.values()) + sum(lines for lines, _ in counts(PACKAGE).values()) <= TOGETHER


def test_lines_of_tests_are_within_limits(print_at_end):
  lines = {path: count(path)[0] for path in TESTS.rglob("*.py")}
  in_benchmarks = sum(n for path, n in lines.items() if "benchmarks" in path.parts)
  in_tests = sum(lines.values()) - in_benchmarks
  print_at_end(f"tests: {in_tests} lines, benchmarks: {in_benchmarks} lines")
  assert in_tests <= TEST_LINES and in_benchmarks <= BENCHMARK_LINES


def test_test_files_have_at_most_500_lines():
  lines = {str(path.relative_to(TESTS)): len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}
  assert not {name: n for name, n in lines.items() if n > FILE_LINES}


def test_shared_helpers_are_defined_only_in_helpers():
  shared = {"greedy", "sampled", "tokens", "ids_of", "flags", "tiny_model", "run_to_end"}
  for path in TESTS.rglob("*.py"):
    if path.relative_to(TESTS).parts[0] in ("helpers", "benchmarks"): continue
    defined = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert not defined & shared, f"{path} defines {defined & shared} again"


def test_code_tokens_excludes_comments_and_docstrings():
  source = '"""A docstring."""\nx = f"{a}b" + "c"   # a comment\n\ndef f():\n  """Another."""\n  return 1\n'
  assert len(code_tokens(source)) == len(["x", "=", 'f"{a}b"', "+", '"c"', "def", "f", "(", ")", ":", "return", "1"])
