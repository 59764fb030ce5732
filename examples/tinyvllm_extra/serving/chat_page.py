"""The chat page: page/index.html with its style sheet and scripts, and a policy that allows only these scripts."""
import base64, functools, hashlib, pathlib

from fastapi.responses import HTMLResponse

FOLDER = pathlib.Path(__file__).with_name("page")


@functools.cache
def chat_page() -> HTMLResponse:
  index, style = ((FOLDER / name).read_text("utf-8") for name in ("index.html", "page.css"))
  scripts = [path.read_text("utf-8").replace("<!--", r"\x3C!--")   # in HTML, <!-- has a meaning
             for folder in ("vendored", ".") for path in sorted((FOLDER / folder).glob("*.js"))]
  sources = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(x.encode()).digest()).decode()}'" for x in scripts)
  tags = "".join(f"<script>{script}</script>\n" for script in scripts)
  page = index.replace("HASHES", sources).replace("STYLES", style).replace("SCRIPTS", tags)
  return HTMLResponse(page, headers={"Content-Security-Policy": "frame-ancestors 'none'"})   # meta cannot set it
