"""`tinyvllm trace show`: write the page that plays a trace, and open it."""
import pathlib, tempfile, webbrowser

from tinyvllm.config import InputError, JsonObject
from tinyvllm_extra.trace import player


def main(args: JsonObject) -> None:
  """Print the page's path. The browser opens the page unless `output` is set."""
  text = player.page(args["file"])
  path = pathlib.Path(args["output"] or tempfile.mkstemp(".html", "trace-")[1]).absolute()
  try: path.write_text(text)
  except OSError as error: raise InputError(f"output={str(path)!r} cannot be written: {error.strerror}") from error
  print(path)
  if not args["output"]: webbrowser.open(path.as_uri())
