"""`tinyvllm completion`: shtab writes the script from the parser."""
import shtab


def main(args: dict) -> None:
  """Print the script for a shell."""
  print(shtab.complete(args["root"], args["shell"]))
