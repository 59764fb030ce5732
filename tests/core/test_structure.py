"""Structure of core and extension: allowed imports, patches of tinygrad, length of functions. Parses the source with
`ast` instead of importing it."""
import ast
import graphlib
import re
import symtable
import tomllib
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import tinyvllm.engine
from helpers.data import read_data
from test_size import EXTENSION, PACKAGE, code_tokens

ROOT = PACKAGE.parent
CORE, EXTRA = PACKAGE.name, EXTENSION.name
FILES = {".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path
         for folder in (PACKAGE, EXTENSION) for path in sorted(folder.rglob("*.py"))}   # by module name
MAX_FUNCTION_LINES, MAX_LOCALS = 40, 20
MAX_ANY, MAX_TYPE_IGNORES = 104, 5   # occurrences in core and extension; only ever lower them
PATCHES = f"{EXTRA}.kernels.tinygrad_patches"
ALLOWED = read_data("structure.json")   # floors of rooms, names and assignments, with their reasons
PUBLIC = {f"tinygrad.{name}" for name in ALLOWED["public"]}


@cache
def parse(module: str) -> ast.Module: return ast.parse(FILES[module].read_text())


def nodes(module: str, *kinds: type) -> list:
  """Return a module's nodes of these classes."""
  return [node for node in ast.walk(parse(module)) if isinstance(node, kinds)]


def is_type_checking(node: ast.AST) -> bool:
  return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def walk(node: ast.AST, into: Callable[[ast.AST], bool]) -> Iterator[ast.AST]:
  """Yield all descendants, except below nodes for which `into` is False. Includes the `else` of TYPE_CHECKING."""
  children = node.orelse if is_type_checking(node) and not into(node) else [*ast.iter_child_nodes(node)]
  for child in children:
    yield child
    if into(child) or is_type_checking(child): yield from walk(child, into)


def runs(node: ast.AST) -> bool: return not is_type_checking(node)


def imported_names(module: str, node: ast.AST) -> list[str]:
  """Return the absolute names that a statement imports: modules, or attributes of modules."""
  if isinstance(node, ast.Import): return [alias.name for alias in node.names]
  if not isinstance(node, ast.ImportFrom): return []
  package = module.split(".")
  if FILES[module].name != "__init__.py": package.pop()
  base = package[:len(package) - node.level + 1] if node.level else []
  return [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]


def module_of(name: str) -> str | None:
  """Return the module in FILES that contains an imported name; None for other packages."""
  if name in FILES: return name
  return module_of(name.rpartition(".")[0]) if "." in name else None


def imports(module: str, into: Callable[[ast.AST], bool] = runs) -> set[str]:
  """Return the modules of core and extension that a module imports directly."""
  names = [name for node in walk(parse(module), into) for name in imported_names(module, node)]
  names += [node.value for node in nodes(module, ast.Constant) if node.value in FILES and "." in node.value]   # by name
  return {target for name in names if (target := module_of(name))} - {module}


def in_package(module: str, package: str) -> bool: return f"{module}.".startswith(f"{package}.")


def assigned_targets(node: ast.AST) -> list[ast.expr]:
  """Return the targets of an assignment or a deletion, including setattr and delattr."""
  if isinstance(node, ast.Assign | ast.Delete): targets = node.targets
  elif isinstance(node, ast.AugAssign | ast.AnnAssign): targets = [node.target]
  elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr", "object.__setattr__"):
    return [ast.Attribute(node.args[0], ast.unparse(node.args[1]))]
  else: targets = []
  return [x for target in targets for x in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])]


def root_name(expression: ast.expr) -> str | None:
  """Return the variable at the start of an expression: `a` for `a.b[0]().c`."""
  while isinstance(expression, ast.Attribute | ast.Subscript | ast.Call):
    expression = expression.func if isinstance(expression, ast.Call) else expression.value
  return expression.id if isinstance(expression, ast.Name) else None


def tinygrad_assignments(module: str) -> list[str]:
  """Return the targets of a module's assignments that are attributes or items of its imports from tinygrad."""
  imported = {alias.asname or alias.name.partition(".")[0] for node in nodes(module, ast.Import, ast.ImportFrom)
              for alias, name in zip(node.names, imported_names(module, node), strict=True)
              if in_package(name, "tinygrad")}
  return [ast.unparse(target) for node in nodes(module, ast.AST) for target in assigned_targets(node)
          if not isinstance(target, ast.Name) and root_name(target) in imported]


@pytest.mark.parametrize("package", [CORE, EXTRA])
def test_modules_have_no_import_cycle(package):
  """Including imports within functions."""
  graph = {module: {x for x in imports(module) if in_package(x, package)}
           for module in FILES if in_package(module, package)}
  try: [*graphlib.TopologicalSorter(graph).static_order()]
  except graphlib.CycleError as e: pytest.fail("import cycle: " + " <- ".join(e.args[1]))


def test_core_names_the_extension_in_one_place():
  """In the function `extension` of __init__.py, and in the names for type checkers there."""
  for module in FILES:
    if not in_package(module, CORE): continue
    for_types = (lambda node: True) if module != CORE else runs
    assert not [x for x in imports(module, for_types) if in_package(x, EXTRA)], f"{module} imports the extension"
    strings = [node.value for node in nodes(module, ast.Constant) if isinstance(node.value, str)]
    assert module == CORE or not [text for text in strings if text.startswith(EXTRA) and " " not in text], module
    names = [ast.unparse(node) for node in nodes(module, ast.Attribute, ast.Name)]
    assert module == CORE or not [name for name in names if name.endswith(("import_module", "__import__"))], module


def test_public_names_exist():
  """tinyvllm.NAME is imported at its first use."""
  for name in tinyvllm.__all__: assert getattr(tinyvllm, name) is not None
  assert issubclass(tinyvllm.LLM, tinyvllm.engine.Engine) and tinyvllm.LLM.__module__ == f"{EXTRA}.llm"
  with pytest.raises(AttributeError, match="no attribute 'Nonsense'"): tinyvllm.Nonsense   # noqa: B018


def rank(module: str) -> int:
  """Return a module's floor. The longest matching name decides."""
  places = {name: i for i, names in enumerate(ALLOWED["floors"]) for name in names}
  while module not in places: module = module.rpartition(".")[0]
  return places[module]


def test_rooms_import_only_from_rooms_below():
  """Also within functions and for type checkers."""
  for module in FILES:
    if not in_package(module, EXTRA): continue
    for target in imports(module, lambda node: True):
      is_allowed = in_package(target, CORE) or rank(target) <= rank(module)
      assert is_allowed, f"{module} imports {target}, which is in a higher room"


def test_module_names_are_unique():
  names = [module.rpartition(".")[2] for module in FILES]
  assert not {name for name in names if names.count(name) > 1}


def test_only_tinygrad_patches_assigns_to_tinygrad():
  assert tinygrad_assignments(PATCHES), "the check must find the patches"
  assignments = {(module, target) for module in FILES if module != PATCHES for target in tinygrad_assignments(module)}
  assert assignments == {(f"{EXTRA}.programs", target) for target in ALLOWED["assignments of programs"]}


def tinygrad_imports(module: str) -> set[str]:
  """Return a module's imports from tinygrad's submodules, which are not its public interface, as "submodule.name"."""
  names = {name for node in walk(parse(module), lambda node: True) for name in imported_names(module, node)}
  return {name.removeprefix("tinygrad.") for name in names if name.startswith("tinygrad.") and name not in PUBLIC}


def test_only_kernels_import_tinygrad_internals():
  assert tinygrad_imports(f"{EXTRA}.kernels.schedule"), "the check must find imports"
  for module in FILES:
    if not in_package(module, f"{EXTRA}.kernels"): assert tinygrad_imports(module) <= ALLOWED["tinygrad"].keys(), module


def test_only_kernels_and_two_core_functions_access_buffers_of_tensors():
  attributes = {(module, node.attr) for module in FILES if not in_package(module, f"{EXTRA}.kernels")
                for node in nodes(module, ast.Attribute) if node.attr in ALLOWED["internal"]}
  functions = {f"{CORE}.backend": ("uop", "_buf", "_copyout"), f"{CORE}.runner": ("uop", "_buf", "_copyin")}
  assert attributes == {(module, name) for module, names in functions.items() for name in names}


def test_tinygrad_is_pinned_to_the_version_that_the_patches_were_checked_with():
  dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
  version, = [name.removeprefix("tinygrad==") for name in dependencies if name.startswith("tinygrad")]
  constraint, = re.findall(r"^tinygrad==(.*)$", (ROOT / ".ci" / "constraints.txt").read_text(), re.M)
  assert version == constraint and re.fullmatch(r"\d+\.\d+\.\d+", version)
  assert f'VERSION = "{version}"' in FILES[PATCHES].read_text()


def function_lines(module: str) -> Iterator[tuple[str, int]]:
  """Yield each function's name with its number of code lines."""
  lines = {line for token in code_tokens(FILES[module].read_text()) for line in range(token.start[0], token.end[0] + 1)}
  for node in nodes(module, ast.FunctionDef, ast.AsyncFunctionDef):
    yield node.name, len(lines & {*range(node.lineno, (node.end_lineno or 0) + 1)})


def function_locals(table: symtable.SymbolTable) -> Iterator[tuple[str, int]]:
  """Yield each function's name with its number of local variables, parameters included."""
  if table.get_type() == "function": yield table.get_name(), sum(x.is_local() for x in table.get_symbols())
  for child in table.get_children(): yield from function_locals(child)


def test_functions_have_at_most_40_lines_and_20_locals():
  for module, path in FILES.items():
    assert not [(name, n) for name, n in function_lines(module) if n > MAX_FUNCTION_LINES], f"{module}: lines"
    variables = function_locals(symtable.symtable(path.read_text(), str(path), "exec"))
    assert not [(name, n) for name, n in variables if n > MAX_LOCALS], f"{module}: local variables"


def test_public_class_names_are_unique():
  names = [node.name for module in FILES for node in parse(module).body
           if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
  assert {name for name in names if names.count(name) > 1} == ALLOWED["classes"].keys()


def test_any_and_type_ignore_are_within_limits(print_at_end):
  num_any = sum("Any" in (vars(node).get("id"), vars(node).get("attr")) for module in FILES
                for node in nodes(module, ast.Name, ast.Attribute))
  num_ignores = sum(path.read_text().count("# type: ignore") for path in FILES.values())
  print_at_end(f"Any: {num_any}, type: ignore: {num_ignores}")
  assert num_any <= MAX_ANY and num_ignores <= MAX_TYPE_IGNORES
