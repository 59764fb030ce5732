"""A server under hostile traffic: requests generated from its OpenAPI schema, and ten thousand more from
data/hostile_requests.json. The server must not exit, leak memory, return a 500 or change another client's text."""
import json
import random
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from helpers.data import read_data
from helpers.servers import Server, checked, error_of

pytestmark = pytest.mark.slow
LIMIT = 256   # max_model_len
# Too few blocks for sixteen sequences, so some are preempted
OPTIONS = ["--max-model-len", LIMIT, "--max-num-seqs", 16, "--max-num-batched-tokens", 16, "--strict-fields",
           "--num-gpu-blocks-override", 33]
SHORT = ["--override-generation-config", '{"max_new_tokens": 4}']   # limits max_tokens of every request


@pytest.fixture
def server(request):
  # One malloc arena: with one per thread, memory depends on how many threads have compiled a grammar
  yield from checked(Server(None, *OPTIONS, *getattr(request, "param", ()), environment={"MALLOC_ARENA_MAX": "1"}))


@pytest.mark.parametrize("server", [SHORT], indirect=True, ids=["short"])
def test_requests_generated_from_openapi_schema_get_conforming_responses(server, tmp_path):
  checks = ("not_a_server_error,negative_data_rejection,response_schema_conformance,content_type_conformance,"
            "status_code_conformance")
  run = subprocess.run(
    [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", checks,
     "--phases", "coverage,fuzzing", "--max-examples", "15", "--generation-deterministic", "--no-shrink", "--no-color"],
    cwd=tmp_path, capture_output=True, text=True, timeout=200)
  assert run.returncode == 0, run.stdout[-8000:] + run.stderr
  summary = re.search(r"(\d+) generated, (\d+) passed", run.stdout)
  assert summary and summary[1] == summary[2] and int(summary[1]) > 500, run.stdout


# Hostile requests: pairs of the bytes to send and the expected response, which is refused (4xx with an error object),
# cut (like refused, and the client stops sending), answered (like refused, or 200), broken (invalid HTTP: 4xx or a
# closed connection), or dropped (the client disconnects before a response)
Hostile = tuple[str, bytes]
DATA = read_data("hostile_requests.json")
BODIES: dict[str, dict[str, Any]] = DATA["bodies"]   # path: a valid body
TEXT, CHAT, *_ = BODIES
VALID = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


def encode(body: Any, path: str = TEXT, method: str = "POST", **headers: Any) -> bytes:
  """Return an HTTP request. A `body` of bytes is sent unchanged, anything else as JSON. A header of None is omitted."""
  data = body if isinstance(body, bytes) else json.dumps(body).encode()
  headers = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": len(data), **headers}
  lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items() if v is not None), "", ""]
  return "\r\n".join(lines).encode("latin-1") + data


def chunked(body: bytes) -> bytes: return encode(body, **{"Content-Length": None, "Transfer-Encoding": "chunked"})


def from_group(group: dict[str, Any], rng: random.Random) -> Hostile:
  """Return a request of a group: a row's fields in a valid body, with one of the group's values instead of "@"."""
  expect, path, fields, *options = rng.choice(group["rows"])
  body = json.dumps({**BODIES.get(path, VALID), **fields} if isinstance(fields, dict) else fields)
  value = rng.choice(group.get("values", [""]))
  text = body.replace('"@"', value if group.get("raw") else json.dumps(value))
  return expect, encode(text.encode("latin-1"), path, **dict(*options))


def broken(rng: random.Random) -> Hostile:
  start = b"GET /none HTTP/1.1\r\nHost: x\r\n"
  large = [b"GET " + b"/a" * 200_000, start + b"A: " + b"a" * 200_000 + b"\r\n\r\n",
           start + b"A: b\r\n" * 20_000 + b"\r\n", chunked(b"5;" + b"x" * 100_000)]
  return "broken", rng.choice([*large, *(x.encode("latin-1") for x in DATA["broken"])])


def damaged(rng: random.Random) -> Hostile:
  """Return a request whose body is cut, has wrong bytes, or is random."""
  path = rng.choice([*BODIES])
  data = bytearray(json.dumps(BODIES[path]).encode())
  kind = rng.randrange(3)
  if kind == 0: return "refused", encode(bytes(data[:rng.randrange(len(data))]), path)
  if kind == 1: return "refused", encode(rng.randbytes(rng.randrange(300)), path)
  for _ in range(rng.randrange(1, 4)): data[rng.randrange(len(data))] = rng.randrange(256)
  return "answered", encode(bytes(data), path)


def dropped(rng: random.Random) -> Hostile:
  """Return the beginning of a request, cut in its headers, its body or its chunks."""
  path = rng.choice([*BODIES])
  pieces = b"".join(b"%x\r\n%b\r\n" % (n, b" " * n) for n in (1, 5, 3000))
  whole = rng.choice([encode(BODIES[path], path), encode({**BODIES[TEXT], "stream": True}), chunked(pieces)])
  return "dropped", whole[:rng.randrange(1, len(whole))]


def nested(rng: random.Random) -> Hostile:
  depth = rng.choice([70, 300, 900, 1100, 5000, 100_000])
  opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
  deep = opening * depth + "1" + closing * depth * rng.randrange(2)
  field = rng.choice(["", "prompt", "messages", "stop", "logit_bias", "user", "tokens", "structured_outputs"])
  body = f'{{"prompt": "x", "{field}": {deep}}}' if field else deep
  return "refused", encode(body.encode(), rng.choice([*BODIES]))


def too_large(rng: random.Random) -> Hostile:
  """Exceed --max-body-size. A huge Content-Length must be refused before the body arrives."""
  chunks = 65 * (b"%x\r\n" % 2**16 + b" " * 2**16 + b"\r\n")
  return rng.choice([
    ("refused", encode(b" " * (4 * 2**20 + 1))), ("refused", chunked(chunks + b"0\r\n\r\n")),
    ("broken", chunked(chunks)), ("cut", encode(b"", **{"Content-Length": rng.choice([10**9, 2**62])}))])


def many(size: int) -> list[Hostile]:
  """Return requests with `size` items or characters in one field."""
  words, users = "a b " * size, [{"role": "user", "content": "x"}] * size
  refused = [
    (TEXT, {"prompt": [5] * size}), (TEXT, {"prompt": words}), (TEXT, {"prompt": [[5]] * size}),
    ("/generate", {"prompt": ["a"] * size}), (TEXT, {"model": "m" * size}), (CHAT, {"stop_token_ids": [*range(size)]}),
    (TEXT, {"logit_bias": {i: 1 for i in range(size)}}), ("/detokenize", {"tokens": [10**9] * size}),
    (CHAT, {f"no_such_{i}": i for i in range(size)}), (CHAT, {"messages": [{"role": "user", "content": words}]}),
    (TEXT, {"prompt": [5] * LIMIT}), (TEXT, {"prompt": ["a", words]})]
  structures = [
    {"regex": "(" * size + ")" * size}, {"regex": f"a{{{size}}}"}, {"regex": "(" * size}, {"choice": ["a" * 20 * size]},
    {"regex": ".*" * (size // 20)}, {"regex": "|".join(map(str, range(size // 5)))},
    {"grammar": "start: " + "(" * size + ")" * size}, {"choice": [f"x{i}" for i in range(5 * size)]},
    {"json": {"properties": {f"x{i}": {} for i in range(size // 2)}}}, {"json": {"enum": [*map(str, range(2 * size))]}}]
  answered = [
    (TEXT, {"stop": [f"x{i}" for i in range(size)]}), (CHAT, {"stop": "x" * 10 * size}),
    (TEXT, {"stop_token_ids": [5] * size}), (CHAT, {"allowed_token_ids": [5] * size}),
    (TEXT, {"bad_words": ["x" * size]}), ("/generate", {"bad_words": [f"x{i}" for i in range(size // 50)]}),
    (TEXT, {"n": 64, "max_tokens": 1}), (CHAT, {"messages": users}), ("/detokenize", {"tokens": [5] * size}),
    ("/tokenize", {"prompt": words}), (TEXT, {"user": "u" * size}),
    *((TEXT, {"structured_outputs": x}) for x in structures)]
  return [(expect, encode({**BODIES[path], **fields}, path))
          for expect, rows in (("refused", refused), ("answered", answered)) for path, fields in rows]


MANY = many(1000)
WEIGHTS = {damaged: 290, nested: 15, too_large: 8, broken: 17, dropped: 17, lambda rng: rng.choice(MANY): 9,
           **{partial(from_group, group): group["weight"] for group in DATA["groups"].values()}}   # per thousand
KINDS = [*WEIGHTS]


def hostile(i: int) -> Hostile:
  """Return request `i`. The first ones cycle through the kinds."""
  rng = random.Random(i)
  kind = KINDS[i % len(KINDS)] if i < 10 * len(KINDS) else rng.choices(KINDS, WEIGHTS.values())[0]
  return kind(rng)


class Wire:
  """A keep-alive connection that is opened on demand."""
  def __init__(self, port: int):
    self.address = "127.0.0.1", port
    self.socket: socket.socket | None = None

  def ask(self, raw: bytes, expect: str = "answered") -> httpx.Response | None:
    """Send a request, a broken or dropped one on a new connection. Return the response, or None without one."""
    if expect in ("broken", "dropped"): self.close()
    self.socket = self.socket or socket.create_connection(self.address, timeout=60)
    try:
      self.socket.sendall(raw)
      if expect == "dropped": return self.close()
      if expect == "broken": self.socket.shutdown(socket.SHUT_WR)
      response = HTTPResponse(self.socket)
      response.begin()
      body = response.read()
    except OSError as error:   # closed by the server
      if expect not in ("broken", "dropped") or isinstance(error, TimeoutError): raise
      return self.close()
    if response.will_close or expect in ("broken", "cut"): self.close()
    headers = {"Content-Type": response.getheader("Content-Type", "")}   # others echo bytes that httpx refuses
    return httpx.Response(response.status, headers=headers, content=body)

  def close(self) -> None:
    if self.socket: self.socket.close()
    self.socket = None

  def text(self) -> str:
    """Return the text that the server generates for a valid request."""
    response = self.ask(encode(VALID))
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]

  def attack(self, expect: str, raw: bytes) -> None:
    """Send a hostile request, and check that the response is as `expect` says."""
    response = self.ask(raw, expect)
    if not response or expect == "answered" and response.status_code == 200: return
    assert 400 <= response.status_code < 500, response.text[:300]
    if expect != "broken": error_of(response, response.status_code)


def attack(server: Server, make: Callable[[int], Hostile], numbers: range, every: int = 250) -> None:
  """Send the requests over six connections, and a valid one after every `every` of them."""
  text = Wire(server.port).text()
  assert len(text) > 8, "the valid request generates too little text"

  def work(part: range) -> list[str]:
    wire, failures = Wire(server.port), []
    for i in part:
      expect, raw = make(i)
      try:
        wire.attack(expect, raw)
        if i % every == 0: assert wire.text() == text, "a valid request's text has changed"
      except (AssertionError, OSError, HTTPException, httpx.HTTPError) as error:
        failures.append(f"{i} ({expect}) {raw[:300]!r}: {type(error).__name__} {str(error)[:400]}")
        wire.close()
    return failures
  with ThreadPoolExecutor(6) as pool: failures = sum(pool.map(work, [numbers[i::6] for i in range(6)]), [])
  assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])


def resident(server: Server) -> int:
  """Return the server's resident memory in KiB."""
  status = Path(f"/proc/{server.process.pid}/status")
  return int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1]) if status.exists() else 0


def test_ten_thousand_hostile_requests_leave_server_unchanged(server):
  structures = DATA["groups"]["structures"]["values"] + DATA["groups"]["heavy structures"]["values"]
  warm_up = MANY + [("answered", encode({**BODIES[TEXT], "structured_outputs": x})) for x in structures]
  attack(server, (5 * warm_up).__getitem__, range(5 * len(warm_up)))   # threads keep the memory of a compilation
  attack(server, hostile, range(1000))
  before = resident(server)
  attack(server, hostile, range(1000, 10_000))
  assert resident(server) - before < 16 * 1024, "memory grew in nine thousand requests"
  enormous = many(100_000)   # last: they leave free memory, which would hide a leak
  attack(server, enormous.__getitem__, range(len(enormous)), every=1)
