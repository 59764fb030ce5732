"""The chat page: page/index.html with its style sheet and scripts, and a policy that allows only these scripts."""
import base64, functools, hashlib, pathlib

from fastapi.responses import HTMLResponse

FOLDER = pathlib.Path(__file__).with_name("page")


@functools.cache
def chat_page() -> HTMLResponse:
  paths = [*sorted(FOLDER.glob("vendored/*.js")), *sorted(FOLDER.glob("*.js"))]
  scripts = [path.read_text("utf-8").replace("<!--", r"\x3C!--") for path in paths]   # in HTML, <!-- has a meaning
  digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
  parts = {"HASHES": " ".join(f"'sha256-{digest}'" for digest in digests),
           "SCRIPTS": "".join(f"<script>{script}</script>\n" for script in scripts),
           "STYLES": (FOLDER / "page.css").read_text("utf-8")}
  page = (FOLDER / "index.html").read_text("utf-8")
  for name, part in parts.items(): page = page.replace(name, part, 1)
  return HTMLResponse(page, headers={"Content-Security-Policy": "frame-ancestors 'none'"})   # meta cannot set it
