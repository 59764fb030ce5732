"""Change one operator, constant or condition of the product at a time, run the tests of its module, and print the share
of changes that make a test fail, with the survivors.

python tests/mutation/mutate.py [--sample N] [--only scheduler] [--jobs 2]

Nothing on disk changes: each mutant is a forked process whose import system compiles the changed module. Strings,
annotations, decorators, messages and log lines are not changed. survivors.txt lists known survivors, each with the
reason why no test needs to see it."""
import argparse
import ast
import concurrent.futures
import importlib.abc
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Source file -> test files, the most likely to fail first: of the default lane; and of lanes with real engines, for
# changes that the default lane does not find: graphs and kernels
TARGETS, REAL = json.loads(Path(__file__).with_name("targets.json").read_text()).values()
PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn),
         (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.LShift, ast.RShift),
         (ast.BitOr, ast.BitAnd)]
SWAPS: dict[type, type] = {**dict(PAIRS), **{b: a for a, b in PAIRS}, ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}
TIMEOUT = 300   # seconds for the tests of one mutant


def untested_parts(node: ast.AST) -> list[Any]:
  """Return the children that are not changed: annotations, decorators, messages, help texts and log lines."""
  if isinstance(node, ast.JoinedStr): return node.values
  parts = [getattr(node, name, None) for name in ("annotation", "returns")] + getattr(node, "decorator_list", [])
  if isinstance(node, ast.Call):
    function = ast.unparse(node.func)
    if function.startswith("logger."): parts += node.args
    if function == "option": parts += [*node.args[1:]]
  return parts


def changes(tree: ast.AST) -> Iterator[tuple[int, str, tuple[ast.AST, str, Any]]]:
  """Yield each possible change of a tree: its line, its description, and setattr's arguments to make it in place."""
  nodes = [tree]
  for node in nodes:
    untested = untested_parts(node)
    nodes += [child for child in ast.iter_child_nodes(node) if child not in untested]
    line = getattr(node, "lineno", 0)
    if isinstance(node, ast.Compare):
      for i, old in enumerate(node.ops):
        ops = [*node.ops[:i], SWAPS[type(old)](), *node.ops[i + 1:]]
        yield line, f"{type(old).__name__} -> {type(ops[i]).__name__}", (node, "ops", ops)
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in SWAPS:
      op = SWAPS[type(node.op)]()
      yield line, f"{type(node.op).__name__} -> {type(op).__name__}", (node, "op", op)
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
      yield line, f"not {node.value}", (node, "value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
      yield line, f"{node.value} -> {node.value + 1}", (node, "value", node.value + 1)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):   # not x -> not not x
      yield line, "not removed", (node, "operand", ast.UnaryOp(ast.Not(), node.operand))
    is_condition = isinstance(node, ast.If | ast.IfExp | ast.While)
    if is_condition and not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp):
      yield line, "condition negated", (node, "test", ast.UnaryOp(ast.Not(), node.test))


class Mutant(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
  """Imports one module from a changed tree."""
  def __init__(self, path: str, tree: ast.AST):
    self.path, self.tree = ROOT / path, tree
    self.module = path.removeprefix("examples/").removesuffix(".py").replace("/", ".")

  def find_spec(self, name: str, *_: Any) -> Any:
    return importlib.util.spec_from_file_location(name, self.path, loader=self) if name == self.module else None
  def get_source(self, fullname: str) -> str: return self.path.read_text()
  def get_code(self, fullname: str) -> Any: return compile(self.tree, str(self.path), "exec")   # type: ignore[arg-type]


def run_tests(path: str, index: int | None, patterns: str, selection: str = "not slow and not real") -> int:
  """Run test files in a fork with change number `index` of a source file, None for no change. Return the exit code."""
  pid = os.fork()
  if pid: return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
  os.setpgid(0, 0)
  signal.alarm(TIMEOUT)   # ends the process with a negative exit code
  tree = ast.parse((ROOT / path).read_text())
  if index is not None: setattr(*[*changes(tree)][index][2])
  sys.meta_path.insert(0, Mutant(path, ast.fix_missing_locations(tree)))
  output = os.open(os.devnull, os.O_WRONLY)
  for stream in (1, 2): os.dup2(output, stream)
  import pytest
  files = [str(file) for pattern in ["sampling/test_option_defaults", *patterns.split()]
           for file in sorted((ROOT / "tests").glob(f"{pattern}.py"))]
  code = pytest.main(["-x", "-n0", "-p", "no:cacheprovider", "-m", selection, *dict.fromkeys(files)])
  os._exit(int(code))


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--sample", type=int, default=24, help="changes per file, evenly spread; 0: all (default: 24)")
  parser.add_argument("--only", default="", help="part of the source files' names (default: all files)")
  parser.add_argument("--jobs", type=int, default=2, help="processes (default: 2)")
  args = parser.parse_args()
  import numpy, openai, fastapi, tinygrad, pytest   # noqa: E401, F401   # once, before the forks
  known = {x.rpartition("  # ")[0] for x in (Path(__file__).parent / "survivors.txt").read_text().splitlines()}
  total = by_default = by_real = explained = 0
  for path in [path for path in TARGETS if args.only in path]:
    source = (ROOT / path).read_text().splitlines()
    all_changes = [(line, text) for line, text, _ in changes(ast.parse("\n".join(source)))]
    count = min(args.sample or len(all_changes), len(all_changes))
    assert run_tests(path, None, TARGETS[path]) == 0, f"the tests of {path} fail without a change"

    def run(index: int, path: str = path) -> tuple[int, bool, bool]:
      in_default = run_tests(path, index, TARGETS[path]) != 0
      return index, in_default, in_default or path in REAL and run_tests(path, index, REAL[path], "not slow") != 0
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
      for index, in_default, in_any in pool.map(run, [i * len(all_changes) // count for i in range(count)]):
        total, by_default, by_real = total + 1, by_default + in_default, by_real + in_any
        line, text = all_changes[index]
        name = f"{path.rpartition('/')[2]}: {source[line - 1].strip()}: {text}"
        explained += not in_any and name in known
        kind = "only real" if in_any else "known" if name in known else "survived"
        if not in_default: print(f"  {kind}: {name}", flush=True)
    print(f"{path}: {count} of {len(all_changes)} changes; {by_default} and {by_real} of {total} found", flush=True)
  print(f"mutation score: {by_default / total:.1%} in the default lane, {by_real / total:.1%} in all; {explained} of "
        f"{total - by_real} survivors are known")
  return 0


if __name__ == "__main__": sys.exit(main())
