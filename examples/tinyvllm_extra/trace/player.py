"""A page that plays a trace, `tinyvllm trace show`, which serves it, and a server's routes with the page of its own
trace. player.html also opens traces by itself."""
import pathlib, secrets, threading, typing, webbrowser
from collections.abc import Callable
from wsgiref.simple_server import make_server

from tinyvllm.config import InputError, JsonObject

PAGE = pathlib.Path(__file__).with_suffix(".html")


def page(path: str) -> str:
  """Return the page with the complete lines of a trace in it. Raises InputError for other files."""
  try: *lines, _ = pathlib.Path(path).expanduser().read_text(errors="replace").split("\n")
  except OSError as error: raise InputError(f"trace: {path!r} cannot be read: {error.strerror}") from error
  if not lines or '"tinyvllm trace"' not in lines[0]: raise InputError(f"trace: {path!r} was not written with --trace")
  # No line may end the script
  return PAGE.read_text("utf-8").replace(">[]<", ">[" + ",\n".join(lines).replace("<", "\\u003c") + "]<")


def routes(path: str) -> dict[str, Callable[..., object]]:
  """Return the routes of a server that writes a trace: the page, and the trace's complete lines from byte `start`."""
  import fastapi, fastapi.responses as responses   # `tinyvllm trace show` does not need them
  policy = {"Content-Security-Policy": "frame-ancestors 'none'"}   # the page asks for the API key
  def show() -> responses.HTMLResponse: return responses.HTMLResponse(PAGE.read_text("utf-8"), headers=policy)
  def read(start: typing.Annotated[int, fastapi.Query(ge=0, lt=2**63)] = 0) -> responses.PlainTextResponse:
    with open(pathlib.Path(path).expanduser(), "rb") as file:
      file.seek(start)
      # readlines stops after this many bytes
      return responses.PlainTextResponse(b"".join(x for x in file.readlines(2**22) if x.endswith(b"\n")))
  return {"/debug": show, "/debug/steps": read}


def serve(text: str) -> None:
  """Serve the page on a loopback port until Ctrl+C, and open the browser. Its address has a secret, as the port is open
  to all users of the machine."""
  path = f"/{secrets.token_urlsafe()}"
  def answer(environ: JsonObject, start: Callable[..., object]) -> list[bytes]:
    is_known = environ["PATH_INFO"] == path
    start("200 OK" if is_known else "404 Not Found", [("Content-Type", "text/html; charset=utf-8")])
    return [text.encode()] * is_known
  with make_server("127.0.0.1", 0, answer) as server:
    print(url := f"http://127.0.0.1:{server.server_port}{path}", flush=True)
    webbrowser.open(url)
    # In a thread, as wsgiref catches a KeyboardInterrupt during a request
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


def main(args: JsonObject) -> None:
  """Write the page to `output` and print its path, or serve it."""
  if not args["output"]: return serve(page(args["file"]))
  path = pathlib.Path(args["output"]).absolute()
  try: path.write_text(page(args["file"]), "utf-8")
  except OSError as error: raise InputError(f"output={str(path)!r} cannot be written: {error.strerror}") from error
  print(path)
