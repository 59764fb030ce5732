"""A page that plays a trace. player.html also opens traces by itself."""
import pathlib

from tinyvllm.config import InputError


def page(path: str) -> str:
  """Return the page with the complete lines of a trace in it. Raises InputError for other files."""
  try: *lines, _ = pathlib.Path(path).expanduser().read_text(errors="replace").split("\n")
  except OSError as error: raise InputError(f"trace: {path!r} cannot be read: {error.strerror}") from error
  if not lines or '"tinyvllm trace"' not in lines[0]: raise InputError(f"trace: {path!r} was not written with --trace")
  data = ",\n".join(lines).replace("<", "\\u003c")   # no line may end the script
  return pathlib.Path(__file__).with_suffix(".html").read_text().replace(">[]<", f">[{data}]<")
