"""`tinyvllm completion`: shtab writes the script from the parser."""
import shtab

from tinyvllm.config import JsonObject


def main(args: JsonObject) -> None:
  """Print the script for a shell."""
  print(shtab.complete(args["root"], args["shell"]))
