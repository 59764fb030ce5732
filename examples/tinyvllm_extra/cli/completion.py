"""`tinyvllm completion`: shtab writes the script from the parser."""
import shtab

from tinyvllm.config import JsonObject


def main(args: JsonObject) -> int:
  """Print the script for a shell, and return 0."""
  print(shtab.complete(args["root"], args["shell"]))
  return 0
