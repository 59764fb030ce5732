"""Names: variables, parameters and attributes are nouns for their content, never participles such as `found`."""
import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTICIPLES = {
  "allowed", "asked", "begun", "brought", "caught", "chosen", "counted", "cut", "drawn", "ended", "found", "given",
  "gone", "got", "held", "kept", "known", "loaded", "lost", "made", "measured", "met", "named", "needed", "paid",
  "put", "said", "seen", "sent", "shown", "taken", "told", "used", "wanted", "written"}


def names_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
  """Yield (name, line) of every variable and attribute that is assigned, and of every parameter."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store): yield node.id, node.lineno
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store): yield node.attr, node.lineno
    elif isinstance(node, ast.arg): yield node.arg, node.lineno


def participles(source: str) -> list[tuple[str, int]]:
  return [(name, line) for name, line in names_of(ast.parse(source)) if name.strip("_") in PARTICIPLES]


@pytest.mark.parametrize("folder", ["tinyvllm", "examples", "tests"])
def test_variables_are_not_participles(folder):
  files = [path for path in (ROOT / folder).rglob("*.py") if ".venv" not in path.parts]
  names = {str(path.relative_to(ROOT)): participles(path.read_text()) for path in files}
  assert files and not {path: hits for path, hits in names.items() if hits}


def test_participles_assignment_attribute_and_parameter_are_listed():
  source = "found = 1\nx.told = 2\ndef f(given, *, _kept=1): return [met for met in given]\nwords = found\n"
  assert sorted(participles(source)) == [("_kept", 3), ("found", 1), ("given", 3), ("met", 3), ("told", 2)]
