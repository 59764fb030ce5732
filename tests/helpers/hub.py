"""A server of model repositories that speaks the protocol of the Hugging Face hub."""
import http.server
import json
import re
import threading
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(http.server.ThreadingHTTPServer):
  """Serves the repositories in the folder `root`, each in ORG/NAME, under the branches main and dev. A context
  manager."""
  def __init__(self, root: Path):
    super().__init__(("127.0.0.1", 0), Handler)
    self.url = f"http://127.0.0.1:{self.server_port}"
    self.root = root
    self.requests: list[tuple[str, str | None]] = []   # file (of a GET; else ""), range
    self.token: str | None = None        # required
    self.gated = False
    self.sizes: dict[str, int] = {}      # false sizes, by file
    self.broken: list[str] = []          # files that are answered with HTTP 500
    self.limit: dict[str, int] = {}      # bytes of a file to send, once, before the connection is closed

  def downloads(self) -> list[str]: return sorted(file for file, _ in self.requests if file)

  def ranges(self, file: str) -> list[str | None]:
    """Return the ranges of a file that were requested, None for the whole file."""
    return [ranges for name, ranges in self.requests if name == file]

  def environment(self, home: Path, **variables: str) -> dict[str, str]:
    return {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_TOKEN": "", **variables}

  def __enter__(self) -> "Hub":
    threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
    return self

  def __exit__(self, *error: Any) -> None:
    self.shutdown()
    self.server_close()


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: Hub

  def log_message(self, *_: Any) -> None: pass

  def reply(self, status: int, content: Any = b"", **headers: Any) -> None:
    if not isinstance(content, bytes): content = json.dumps(content).encode()
    self.send_response(status)
    for name, value in {"Content-Length": len(content), **headers}.items():
      self.send_header(name.replace("_", "-"), str(value))
    self.end_headers()
    if self.command == "GET": self.wfile.write(content)

  def do_HEAD(self) -> None: self.do_GET()

  def do_GET(self) -> None:
    hub = self.server
    path = r"/(?:api/models/)?([^/]+/[^/]+)(?:/(revision|tree|resolve)/([^/]+)(?:/(.+))?)?"
    name, kind, revision, file = re.fullmatch(path, urlsplit(self.path).path).groups()
    hub.requests.append((file or "" if self.command == "GET" else "", self.headers.get("Range")))
    folder = hub.root / name
    if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
      self.reply(401, X_Error_Code="GatedRepo" if hub.gated else "RepoNotFound")
    elif not folder.is_dir(): self.reply(404, X_Error_Code="RepoNotFound")
    elif revision not in (None, "main", "dev", COMMIT): self.reply(404, X_Error_Code="RevisionNotFound")
    elif kind == "resolve": self.send_file(folder / file)
    elif kind == "tree":
      names = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
      self.reply(200, [{"type": "file" if path.is_file() else "directory", "path": name, "oid": "0" * 40,
                        "size": hub.sizes.get(name, path.stat().st_size)} for name, path in names.items()])
    else: self.reply(200, {"id": name, "sha": COMMIT})

  def send_file(self, path: Path) -> None:
    if not path.is_file(): return self.reply(404, X_Error_Code="EntryNotFound")
    if path.name in self.server.broken: return self.reply(500)
    content = path.read_bytes()
    etag = sha256(content).hexdigest()
    bounds = re.search(r"bytes=(\d+)-", self.headers.get("Range") or "")
    start = int(bounds[1]) if bounds else 0
    part = content[start:]
    headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "X-Linked-Etag": f'"{etag}"', "Accept-Ranges": "bytes",
               "X-Linked-Size": len(content), "Content-Length": len(part)}
    if start: headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
    limit = self.server.limit.pop(path.name, None) if self.command == "GET" else None
    self.reply(206 if start else 200, part[:limit], **headers)
    if limit is not None: self.close_connection = True
