"""`tinyvllm trace show`: write the page that plays a trace, and open it."""
import pathlib, tempfile, webbrowser

from tinyvllm.config import JsonObject
from tinyvllm_extra.trace import player


def main(args: JsonObject) -> None:
  """Print the page's path. The browser opens the page unless `output` is set."""
  text = player.page(args["file"])
  path = pathlib.Path(args["output"] or tempfile.mkstemp(".html", "trace-")[1]).absolute()
  path.write_text(text)
  print(path)
  if not args["output"]: webbrowser.open(path.as_uri())
