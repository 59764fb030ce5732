"""A page that plays a trace, and `tinyvllm trace show`, which writes and opens it. player.html also opens traces by
itself."""
import pathlib, tempfile, webbrowser

from tinyvllm.config import InputError, JsonObject


def page(path: str) -> str:
  """Return the page with the complete lines of a trace in it. Raises InputError for other files."""
  try: *lines, _ = pathlib.Path(path).expanduser().read_text(errors="replace").split("\n")
  except OSError as error: raise InputError(f"trace: {path!r} cannot be read: {error.strerror}") from error
  if not lines or '"tinyvllm trace"' not in lines[0]: raise InputError(f"trace: {path!r} was not written with --trace")
  data = ",\n".join(lines).replace("<", "\\u003c")   # no line may end the script
  return pathlib.Path(__file__).with_suffix(".html").read_text().replace(">[]<", f">[{data}]<")


def main(args: JsonObject) -> None:
  """Print the page's path. The browser opens the page unless `output` is set."""
  text = page(args["file"])
  path = pathlib.Path(args["output"] or tempfile.mkstemp(".html", "trace-")[1]).absolute()
  try: path.write_text(text)
  except OSError as error: raise InputError(f"output={str(path)!r} cannot be written: {error.strerror}") from error
  print(path)
  if not args["output"]: webbrowser.open(path.as_uri())
