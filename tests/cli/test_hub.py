"""Models named ORG/NAME: a small HTTP server speaks the hub's protocol, and each command runs in its own process, since
huggingface_hub reads its environment variables once."""
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from helpers.commands import CHAT, FLAGS, process
from helpers.engines import ENGINE
from helpers.gguf_files import write_gguf
from helpers.models import tiny_config, tiny_model
from helpers.servers import Server, wait_until

from tinyvllm_extra.cli import main

COMMIT = "0123456789abcdef0123456789abcdef01234567"
UNUSED = ["README.md", "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth",
          "onnx/model.onnx", "original/model.safetensors"]
MIB = 2**20
GENERATE = ["generate", "the cat", "--max-tokens", "4", *FLAGS, "--model"]


class Hub(http.server.ThreadingHTTPServer):
  """Serves the repositories in the folder `root`, each in ORG/NAME, under the branches main and dev."""
  def __init__(self, root: Path):
    super().__init__(("127.0.0.1", 0), Handler)
    self.root = root
    self.requests: list[tuple[str, str, str | None]] = []   # method, path, range
    self.token: str | None = None        # required
    self.gated = False
    self.sizes: dict[str, int] = {}      # false sizes, by file
    self.broken: set[str] = set()        # files that are answered with HTTP 500
    self.limit: dict[str, int] = {}      # bytes of a file to send, once, before the connection is closed
    self.hold = threading.Event()        # set: a limited response ends; else it waits for this
    self.hold.set()
    self.paused = threading.Event()      # a limited response waits

  def downloads(self) -> list[str]:
    return sorted(path.rpartition("/resolve/")[2].partition("/")[2] for method, path, _ in self.requests
                  if method == "GET" and "/resolve/" in path)

  def environment(self, home: Path, **variables: str) -> dict[str, str]:
    return {"HF_ENDPOINT": f"http://127.0.0.1:{self.server_port}", "HF_HOME": str(home), "HF_TOKEN": "", **variables}


class Handler(http.server.BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: Hub

  def log_message(self, *_): pass

  def reply(self, status, content=b"", **headers):
    if not isinstance(content, bytes): content = json.dumps(content).encode()
    self.send_response(status)
    for name, value in {"Content-Length": len(content), **headers}.items():
      self.send_header(name.replace("_", "-"), str(value))
    self.end_headers()
    if self.command == "GET": self.wfile.write(content)

  def do_HEAD(self): self.do_GET()

  def do_GET(self):
    hub, path = self.server, urlsplit(self.path).path
    hub.requests.append((self.command, path, self.headers.get("Range")))
    if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
      return self.reply(401, X_Error_Code="GatedRepo" if hub.gated else "RepoNotFound")
    api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
    file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
    if not (api or file): return self.reply(404)
    folder = hub.root / (api or file)[1]
    revision = file[2] if file else api[3]
    if not folder.is_dir(): return self.reply(404, X_Error_Code="RepoNotFound")
    if revision not in (None, "main", "dev", COMMIT): return self.reply(404, X_Error_Code="RevisionNotFound")
    if file: return self.send_file(folder / file[3])
    paths = sorted(path for path in folder.rglob("*"))
    names = {str(path.relative_to(folder)): path for path in paths}
    if api[2] != "tree":
      siblings = [{"rfilename": name} for name, path in names.items() if path.is_file()]
      return self.reply(200, {"id": api[1], "sha": COMMIT, "siblings": siblings})
    entries = [{"type": "file", "path": name, "oid": "0" * 40, "size": hub.sizes.get(name, path.stat().st_size)}
               if path.is_file() else {"type": "directory", "path": name, "oid": "0" * 40}
               for name, path in names.items()]
    return self.reply(200, entries)

  def send_file(self, path):
    if not path.is_file(): return self.reply(404, X_Error_Code="EntryNotFound")
    if path.name in self.server.broken: return self.reply(500)
    content = path.read_bytes()
    etag = sha256(content).hexdigest()
    start = int(re.search(r"bytes=(\d+)-", self.headers.get("Range") or "bytes=0-")[1])
    part = content[start:]
    headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "X-Linked-Etag": f'"{etag}"', "Accept-Ranges": "bytes",
               "X-Linked-Size": len(content), "Content-Length": len(part)}
    if start: headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
    limit = self.server.limit.pop(path.name, None) if self.command == "GET" else None
    if limit is None: return self.reply(206 if start else 200, part, **headers)
    self.reply(206 if start else 200, part[:limit], **headers)
    self.server.paused.set()
    self.server.hold.wait()
    self.close_connection = True


@pytest.fixture
def hub(tmp_path):
  hub = Hub(tmp_path / "hub")
  threading.Thread(target=hub.serve_forever, daemon=True).start()
  yield hub
  hub.hold.set()
  hub.shutdown()
  hub.server_close()


@pytest.fixture
def repository(hub):
  """A sharded safetensors model with a chat template, and files of other formats."""
  folder = tiny_model(hub.root / "org/tiny", words=True, shards=3)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
  for file in UNUSED:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(b"unused")
  return folder


@pytest.fixture
def gguf_repository(hub, words_folder):
  folder = hub.root / "org/tiny-GGUF"
  folder.mkdir(parents=True)
  for kind in ("F16", "Q8_0"): write_gguf(folder / f"tiny-{kind}.gguf", words_folder, kind, tokenizer="llama")
  (folder / "BF16").mkdir()
  write_gguf(folder / "BF16/tiny-BF16.gguf", words_folder, "BF16", tokenizer="llama", tensors_per_file=9)
  (folder / "mmproj-F16.gguf").write_bytes(b"GGUF")
  return folder


def test_run_name_downloads_model_and_chats(hub, repository, tmp_path):
  environment = hub.environment(tmp_path / "home", TQDM_POSITION="-1")   # progress bars without a terminal
  local = process("chat", "--model", repository, *FLAGS, "--max-tokens", 5, stdin="hello\n")
  run = process("run", "org/tiny", *FLAGS, "--max-tokens", 5, stdin="hello\n", **environment)
  assert run.returncode == 0, run.stderr
  assert run.stdout == local.stdout and run.stdout.strip()
  expected = [path.name for path in repository.iterdir() if path.is_file() and path.name not in UNUSED]
  assert hub.downloads() == sorted(expected)
  line, = [line for line in run.stderr.splitlines() if line.startswith("downloading org/tiny: ")]
  assert re.search(r"KB in 7 files to .*home/hub; the weights use 0.00 of \d+.\d\d GiB of free memory$", line)
  assert re.search(r"model-00001-of-00003.safetensors: 100%", run.stderr), "a progress bar"
  num_requests = len(hub.requests)
  for offline in ({"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}):
    again = process("run", "org/tiny", *FLAGS, "--max-tokens", 5, stdin="hello\n", **{**environment, **offline})
    assert again.stdout == local.stdout and "downloading" not in again.stderr, again.stderr
    shutil.rmtree(tmp_path / "home/hub/models--org--tiny/trees", ignore_errors=True)   # older programs write none
  assert len(hub.requests) == num_requests


def test_embedding_model_is_downloaded_with_its_modules(hub, repository, tmp_path):
  modules = {"modules.json": [{"type": "sentence_transformers.models.Pooling"}],
             "1_Pooling/config.json": {"pooling_mode_lasttoken": True}}
  (repository / "1_Pooling").mkdir()
  for file, content in modules.items(): (repository / file).write_text(json.dumps(content))
  run = process(*GENERATE, "org/tiny", **hub.environment(tmp_path / "home"))
  assert run.returncode == 1 and "this model computes embeddings" in run.stderr, run.stderr
  assert modules.keys() <= {*hub.downloads()}


@pytest.mark.parametrize("kind,files", [
  ("q8_0", ["tiny-Q8_0.gguf"]), ("TINY-F16.gguf", ["tiny-F16.gguf"]),
  ("bf16", [f"BF16/tiny-BF16-0000{i}-of-00003.gguf" for i in (1, 2, 3)])])
def test_gguf_name_downloads_selected_type_with_all_parts(hub, gguf_repository, tmp_path, kind, files):
  local = process(*GENERATE, gguf_repository / files[0])
  run = process(*GENERATE, f"org/tiny-GGUF:{kind}", **hub.environment(tmp_path / "home"))
  assert run.returncode == 0, run.stderr
  assert run.stdout == local.stdout and hub.downloads() == files


@pytest.mark.parametrize("name,words", [
  ("org/tiny-GGUF", "'org/tiny-GGUF' matches 3 GGUF models: use org/tiny-GGUF:TYPE with one of BF16, F16, Q8_0"),
  ("org/tiny-GGUF:Q4_K_M", "'org/tiny-GGUF:Q4_K_M' matches 0 GGUF models: .* BF16, F16, Q8_0"),
  ("org/none", "neither a path nor a public model, http://127.0.0.1:.*/org/none: if it is private, set HF_TOKEN")])
def test_unknown_name_or_type_raises_and_lists_choices(hub, gguf_repository, tmp_path, name, words):
  run = process(*GENERATE, name, **hub.environment(tmp_path / "home"))
  assert run.returncode == 1 and not hub.downloads()
  assert re.search(words, run.stderr.splitlines()[-1]) and "Traceback" not in run.stderr


def test_llm_name_applies_revision_and_download_dir(hub, repository, tmp_path):
  script = f"""if True:
    from tinyvllm import LLM
    llm = LLM("org/tiny", revision="dev", download_dir={str(tmp_path / 'models')!r}, **{ENGINE!r})
    print(llm.path)
    try: LLM("org/tiny", revision="none")
    except ValueError as error: print(error)
    try: LLM("org/tiny", download_dir={str(tmp_path / 'empty')!r}, tensor_paralel_size=1)
    except ValueError as error: print(error)"""
  run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120,
                       cwd=Path(__file__).parents[2], env={**os.environ, **hub.environment(tmp_path / "home")})
  path, revision, option = run.stdout.splitlines()
  assert path == str(tmp_path / "models/models--org--tiny/snapshots" / COMMIT)
  assert (tmp_path / "models/models--org--tiny/refs/dev").read_text() == COMMIT
  assert re.match("revision='none' does not exist: choose one of http://127.0.0.1:.*/org/tiny/commits", revision)
  assert "no field 'tensor_paralel_size'" in option and not (tmp_path / "empty").exists()


def test_server_name_is_model_id(hub, repository, tmp_path):
  with Server("org/tiny", *FLAGS, environment=hub.environment(tmp_path / "home")) as server:
    assert server.get("/v1/models").json()["data"][0]["id"] == "org/tiny"
    body = {"model": "org/tiny", "prompt": "the cat", "max_tokens": 2}
    assert server.post("/v1/completions", body).status_code == 200


def test_model_larger_than_memory_logs_warning_before_download(hub, repository, tmp_path):
  config = tiny_config(hidden_size=2**20, intermediate_size=2**20, num_hidden_layers=9)
  (repository / "config.json").write_text(json.dumps(config))
  hub.limit["model-00001-of-00003.safetensors"] = 9
  hub.hold.clear()
  command = [sys.executable, "-m", "tinyvllm", *GENERATE, "org/tiny"]
  run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
                         env={**os.environ, **hub.environment(tmp_path / "home")})
  try:
    line = next(line for line in run.stderr if line.startswith("downloading org/tiny: "))
    assert re.search(r"the weights use \d{5,}.\d\d of .* does not fit: choose a smaller or quantized one$", line)
    wait_until(hub.paused.is_set, "the first weights are requested")
  finally:
    run.kill()
    run.communicate()


def test_gguf_larger_than_disk_raises_before_download(hub, gguf_repository, tmp_path):
  hub.sizes["tiny-F16.gguf"] = 2**50
  run = process(*GENERATE, "org/tiny-GGUF:F16", **hub.environment(tmp_path / "home"))
  assert run.returncode == 1 and not hub.downloads()
  assert re.search(r"download_dir='.*home/hub' has .* of free disk space, but org/tiny-GGUF needs 1048576.00 GB: free",
                   run.stderr.splitlines()[-1])


def test_unsupported_architecture_raises_before_weights_are_downloaded(hub, repository, tmp_path):
  (repository / "config.json").write_text(json.dumps(tiny_config(architectures=["OtherForCausalLM"])))
  run = process(*GENERATE, "org/tiny", **hub.environment(tmp_path / "home"))
  assert run.returncode == 1 and hub.downloads() == ["config.json"]
  assert "architecture 'OtherForCausalLM' is not supported" in run.stderr.splitlines()[-1]


def test_closed_connection_and_stopped_process_resume_download(hub, gguf_repository, tmp_path):
  with (gguf_repository / "tiny-F16.gguf").open("ab") as file: file.truncate(35 * MIB)
  environment = hub.environment(tmp_path / "home")
  hub.limit["tiny-F16.gguf"] = 21 * MIB   # huggingface_hub writes blocks of 10 MiB
  hub.hold.clear()
  command = [sys.executable, "-m", "tinyvllm", *GENERATE, "org/tiny-GGUF:F16"]
  stopped = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2],
                             env={**os.environ, **environment})
  folder = tmp_path / "home/hub/models--org--tiny-GGUF/blobs"
  def size(): return sum(part.stat().st_size for part in folder.glob("*.part"))
  try: wait_until(lambda: size() == 20 * MIB or stopped.poll() is not None, "the first process has received the start")
  finally:
    stopped.kill()
    stopped.wait()
  hub.limit["tiny-F16.gguf"] = 11 * MIB
  hub.hold.set()
  run = process(*GENERATE, "org/tiny-GGUF:F16", **environment)
  assert run.returncode == 0, run.stderr
  assert run.stdout == process(*GENERATE, gguf_repository / "tiny-F16.gguf").stdout
  ranges = [ranges for method, path, ranges in hub.requests if method == "GET" and path.endswith(".gguf")]
  assert ranges == [None, f"bytes={20 * MIB}-", f"bytes={30 * MIB}-"]


def test_token_is_sent_and_missing_token_is_explained(hub, gguf_repository, tmp_path):
  hub.token = "secret"
  name = "org/tiny-GGUF:Q8_0"
  assert "if it is private, set HF_TOKEN" in process(*GENERATE, name, **hub.environment(tmp_path / "home")).stderr
  hub.gated = True
  last = process(*GENERATE, name, **hub.environment(tmp_path / "home")).stderr.splitlines()[-1]
  assert re.search("is gated: accept its license on http.*/org/tiny-GGUF and set HF_TOKEN", last)
  run = process(*GENERATE, name, **hub.environment(tmp_path / "home", HF_TOKEN="secret"))
  assert run.returncode == 0, run.stderr


def test_name_offline_without_cache_raises(hub, repository, tmp_path):
  run = process(*GENERATE, "org/tiny", **hub.environment(tmp_path / "home", HF_HUB_OFFLINE="1"))
  assert run.returncode == 1 and not hub.requests
  assert "'org/tiny' is neither a path nor in the cache" in run.stderr.splitlines()[-1]


def test_local_folder_precedes_name_on_the_hub(words_folder, tmp_path, monkeypatch, capsys):
  shutil.copytree(words_folder, tmp_path / "org/tiny")
  monkeypatch.chdir(tmp_path)
  assert main([*GENERATE, "org/tiny"]) == 0
  assert "downloading" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["/nope", "./org/tiny", "~/org/tiny", "org/tiny/more", "model.gguf", "org/model.gguf",
                                  "tiny"])
def test_missing_path_is_reported_without_download(name, tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  for command in (["generate", "hello", "--model", name], ["run", name], ["serve", name]):
    assert main(command) == 1
    assert f"model={name!r} does not exist" in capsys.readouterr().err


def test_failed_download_is_one_line_and_exit_code_1(hub, gguf_repository, tmp_path):
  hub.broken.add("tiny-F16.gguf")
  run = process(*GENERATE, "org/tiny-GGUF:F16", **hub.environment(tmp_path / "home"))
  assert run.returncode == 1 and "Traceback" not in run.stderr
  assert "'org/tiny-GGUF:F16': the download failed, repeat it to continue: " in run.stderr.splitlines()[-1]
