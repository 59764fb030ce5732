"""A server under load: requests generated from its OpenAPI schema, ten thousand hostile requests, and a hundred
clients, twenty of them killed. The server must not exit, leak memory, return a 500 or change another client's text."""
import asyncio
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from helpers.invalid_values import BAD_SAMPLING
from helpers.servers import Server, wait_until


LIMIT = 256   # max_model_len
# Too few blocks for sixteen sequences, so some are preempted
OPTIONS = ["--max-model-len", LIMIT, "--max-num-seqs", 16, "--max-num-batched-tokens", 16,
           "--num-gpu-blocks-override", 33]
ERRORS = {400: "BadRequestError", 404: "NotFoundError", 405: "MethodNotAllowedError", 413: "RequestEntityTooLargeError",
          429: "TooManyRequestsError"}
VALID = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def server():
  # One malloc arena: with one per thread, memory depends on how many threads have compiled a grammar
  with Server(None, *OPTIONS, "--strict-fields", environment={"MALLOC_ARENA_MAX": "1"}) as s:
    yield s
    assert s.process.poll() is None, f"the server ended on its own:\n{s.log[-4000:]}"


def idle(server: Server) -> bool:
  """True if no request runs, waits or holds a block."""
  metrics = server.metrics()
  return not any(metrics[x] for x in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"))


# --- requests within and outside the OpenAPI schema ---

CHECKS = ["not_a_server_error", "negative_data_rejection", "response_schema_conformance", "content_type_conformance",
          "status_code_conformance"]
HOOKS = """
import schemathesis

@schemathesis.hook
def before_call(context, case, kwargs):   # few tokens: the output does not matter here
  body = case.body
  if not isinstance(body, dict): return
  for name, most in ("max_tokens", 4), ("max_completion_tokens", 4), ("n", 3):
    if body.get(name) == -1: body[name] = most   # as many as fit
    if type(body.get(name)) is int: body[name] = min(body[name], most)
  if {"prompt", "messages"} & body.keys() and body.get("max_tokens") is None: body["max_tokens"] = 4
"""


@pytest.mark.slow
def test_requests_generated_from_openapi_schema_get_conforming_responses(server, tmp_path):
  (tmp_path / "hooks.py").write_text(HOOKS)
  run = subprocess.run(
    [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS),
     "--phases", "coverage,fuzzing", "--max-examples", "15", "--generation-deterministic", "--no-shrink", "--no-color"],
    env={**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(tmp_path)}, cwd=tmp_path, capture_output=True,
    text=True, timeout=200, check=False)
  assert run.returncode == 0, run.stdout[-8000:] + run.stderr
  summary = re.search(r"(\d+) generated, (\d+) passed", run.stdout)
  assert summary and summary[1] == summary[2] and int(summary[1]) > 500, run.stdout
  assert "Traceback" not in server.log, server.log[-4000:]


# --- ten thousand hostile requests ---

class Hostile(NamedTuple):
  """A request and its expected response: refused (4xx with an error object), cut (like refused, and the client stops
  sending), answered (like refused, or 200), broken (invalid HTTP: 4xx or a closed connection), dropped (the client
  disconnects before a response)."""
  expect: str
  raw: bytes


def http(body: Any, path: str = "/v1/completions", method: str = "POST", **headers: Any) -> bytes:
  """Return an HTTP request. A `body` of bytes is sent unchanged, anything else as JSON. A header of None is omitted."""
  data = body if isinstance(body, bytes) else json.dumps(body).encode()
  headers = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": len(data),
             **{name.replace("_", "-"): value for name, value in headers.items()}}
  lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items() if v is not None), "", ""]
  return "\r\n".join(lines).encode("latin-1") + data


BODIES: dict[str, dict[str, Any]] = {
  "/v1/completions": {"prompt": "Once", "max_tokens": 2, "temperature": 0, "stop": ["x"]},
  "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0.0},
  "/generate": {"prompt": [[5, 6], [7]], "max_tokens": 2, "temperature": 0},
  "/tokenize": {"prompt": "Once upon a time"},
  "/detokenize": {"tokens": [5, 6, 7]}}
SAMPLING = [*BODIES][:3]
INTEGERS = ["n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"]
NUMBERS = ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
BAD_NUMBERS = ["1e999", "-1e999", "NaN", "Infinity", "-Infinity", "9" * 5000, "-" + "9" * 400, "0x10", "01", "1_0",
               ".5", "+1", "1e", "--1", "1.", "nul", "True", "1e400e4", "123456789" * 40]
BAD_BODIES = [b"", b" ", b"null", b"true", b"0", b'"x"', b"[]", b"[1, 2]", b'[{"prompt": "x"}]', b"{}", b"{", b"}",
              b"[", b"{]", b"\x80\x04N.", b"\xef\xbb\xbf", b"%7B%7D", b"\x1f\x8b\x08\0", b"{1: 2}",
              b"{'prompt': 'x'}", b'{"prompt": "x",}', b'{"prompt": "x"} {}', b'{"prompt": }', b'{"prompt" "x"}', b"\0",
              b'{"prompt": "a\0b"}', b'{"prompt": "a\nb"}', b'{"prompt": "\xff\xfe"}', b'{"prompt": "\xed\xa0\x80"}',
              b'{"prompt": "\\ud8"}', b'{"prompt": "\\x41"}', b"// \n{}", b"prompt=x&max_tokens=1", b"<a/>",
              b'{"prompt": "x", "stop": undefined}']
BAD_MESSAGES: list[Any] = [
  [], None, "hi", 5, {}, {"role": "user", "content": "x"}, [None], [[]], ["hi"], [5], [{}], [{"role": "user"}],
  [{"content": "x"}], [{"role": 5, "content": "x"}], [{"role": "user", "content": 5}],
  [{"role": "user", "content": {}}], [{"role": "user", "content": [5]}], [{"role": "user", "content": [[]]}],
  [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}],
  [{"role": "user", "content": [{"type": "text"}]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
  [{"role": ["user"], "content": "x"}],
  [{"role": "assistant", "content": "no user has said anything"}], [[{"role": "user", "content": "x"}]]]
BAD_PROMPTS: list[Any] = [
  None, "", [], 5, 1.5, True, {}, {"prompt": "x"}, [None], [[]], ["a", 5], [5, "a"], [[5], "a"], [5.5], [[[5]]],
  [["a"]], [""], [True], [-1], [768], [2**40], [[5], [768]], ["a", ""], [[5], []], [5] * LIMIT, "a " * 5000,
  ["a", "b " * 5000]]
BAD_STRUCTURES: list[Any] = [
  {}, [], 5, "x", {"regex": 5}, {"regex": "("}, {"regex": "[z-a]"}, {"regex": "a{5,2}"}, {"regex": r"(a)\1"},
  {"regex": "(?=a)b"}, {"regex": "(" * 3000 + ")" * 3000}, {"regex": "a" * 10 + "(" * 500},
  {"regex": "\ud800"}, {"regex": "a", "choice": ["a"]}, {"choice": []}, {"choice": "ab"},
  {"choice": [5]}, {"choice": {}}, {"grammar": "{{{"}, {"grammar": "start: " + "(" * 3000 + ")" * 3000},
  {"grammar": 'start: "a'}, {"grammar": "start: missing"}, {"grammar": 5},
  {"json": {"type": "no such type"}}, {"json": "{"}, {"json": 5}, {"json": {"$ref": "#/nowhere"}}, {"json": []},
  {"json": {"$ref": "file:///etc/passwd"}}, {"json": {"$ref": "http://127.0.0.1:1/x"}}, {"json": {"pattern": "("}},
  {"json": {"enum": []}}, {"json": {"type": "integer", "minimum": 5, "maximum": 4}}, {"json_object": "yes"},
  {"json": {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(14)]}}, {"no such": "x"}]
HEAVY: list[Any] = [   # cost other servers seconds or all their memory
  {"regex": "(a+)+b"}, {"regex": "(a|aa)*c"}, {"regex": "a{1000}"}, {"regex": "(a|b)*a(a|b){200}"},
  {"regex": "a\0b"}, {"choice": [f"x{i}" for i in range(5000)]},
  {"choice": ["a" * 20_000]}, {"choice": ["\ud800"]}, {"json": {"$ref": "#"}}, {"json": {"not": {}}},
  {"json": {"type": "string", "minLength": 10**9}}, {"json": {"type": "array", "minItems": 10**9}},
  {"json": {"type": "string", "pattern": "(a+)+b"}}, {"json": {"const": "\ud800"}},
  {"json": {"properties": {f"x{i}": {} for i in range(500)}}}, {"json": {"enum": [f"x{i}" for i in range(2000)]}},
  {"grammar": 'start: start "a" | "a"'}, {"grammar": 'start: a a a\na: a a | "x" | ""'}, {"grammar": "start: start"},
  {"grammar": 'root ::= root root | "a"'}, {"json": {"allOf": [{"type": "string"}, {"type": "integer"}]}}]
SURROGATE, TEMPLATE = "\ud800", "{% for i in range(10**9) %}{{ i }}{% endfor %}{{ ''.__class__.__mro__ }}"
STRANGE = [SURROGATE, "\udfff\ud800", "\0", "a\0b", "\ufffe\uffff", "\U0010ffff", "\u202e", "<s></s><unk>",
           "</s>" * 50, "\x1b[2J", TEMPLATE, "${jndi:ldap://x}", "'; DROP TABLE x; --", "../../etc/passwd",
           "e\u0301" * 100, "\r\nX: y\r\n\r\n", "%s%n{0}"]
BROKEN = [   # invalid or ambiguous HTTP
  b"\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"hello\r\n\r\n", b"\0" * 200, b"GET " + b"/a" * 200_000,
  b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + b"\0" * 90, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
  b"POST /v1/completions HTTP/1.1\r\nHost\r\n\r\n", b"GET / HTTP/1.1\r\nHost: x\r\nA\0B: x\r\n\r\n",
  b"GET /none HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 200_000 + b"\r\n\r\n", b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
  b"GET /none HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 20_000 + b"\r\n", b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
  b"GET * HTTP/1.1\r\n\r\n",
  *(http(b"{}", Content_Length=x) for x in (-1, "abc", "1e3", "0x10", 2**70, "2, 3", "", "+2", "5", "99")),
  *(http(b, Content_Length=None, Transfer_Encoding="chunked")
    for b in (b"ZZ\r\n{}\r\n0\r\n\r\n", b"-1\r\n{}\r\n", b"2\r\n{}0\r\n\r\n", b"fffffffffffffffff\r\n{}",
              b"5;" + b"x" * 100_000)),
  http(b"2\r\n{}\r\n0\r\n\r\n", Transfer_Encoding="chunked"), http(b"{}", Transfer_Encoding="gzip, no such"),
  http(b"{}", Content_Length="2\r\nContent-Length: 3")]


def modify(rng: random.Random, *paths: str, **change: Any) -> bytes:
  """Return a valid request to one of `paths` (default: the routes that generate) with some fields replaced."""
  path = rng.choice(paths or SAMPLING)
  return http({**BODIES[path], **change}, path)


def raw_number(rng: random.Random) -> bytes:
  name, path = rng.choice(INTEGERS + NUMBERS), rng.choice(["/v1/completions", "/generate"])
  return http(json.dumps({**BODIES[path], name: "@"}).replace('"@"', rng.choice(BAD_NUMBERS)).encode(), path)


def wrong_type(rng: random.Random) -> bytes:
  """Send a value that SamplingParams rejects, except bytes and values that are valid in a body: null is a field's
  default, 2.0 is an integer in JSON, and max_tokens may be -1."""
  name = rng.choice([*BAD_SAMPLING])
  bad = [x for x in BAD_SAMPLING[name] if x is not None and not isinstance(x, bytes)
         and not (name in INTEGERS and isinstance(x, float) and x == int(x)) and (name, x) != ("max_tokens", -1)]
  return modify(rng, "/v1/completions", "/generate", **{name: rng.choice(bad)})


def nested(rng: random.Random) -> Hostile:
  depth = rng.choice([70, 300, 900, 1100, 5000, 100_000])
  opening, closing = rng.choice([("[", "]"), ('{"a":', "}")])
  deep = opening * depth + "1" + closing * depth * rng.randrange(2)
  field = rng.choice(["", "prompt", "messages", "stop", "logit_bias", "user", "tokens", "structured_outputs"])
  body = f'{{"prompt": "x", "{field}": {deep}}}' if field else deep
  return Hostile("refused", http(body.encode(), rng.choice([*BODIES])))


def chat(messages: Any, **change: Any) -> bytes:
  return http({**BODIES["/v1/chat/completions"], "messages": messages, **change}, "/v1/chat/completions")


def oversized(big: int) -> list[Hostile]:
  """Return requests with `big` items or characters in one field."""
  rng, text, words = random.Random(0), "/v1/completions", "a b " * big
  refused = [
    modify(rng, text, "/generate", prompt=[5] * big), modify(rng, text, prompt=words), modify(rng, model="m" * big),
    modify(rng, text, prompt=[[5]] * big), modify(rng, "/generate", prompt=["a"] * big),
    modify(rng, stop_token_ids=[*range(big)]), modify(rng, logit_bias={i: 1 for i in range(big)}),
    modify(rng, "/detokenize", tokens=[10**9] * big), modify(rng, **{f"no_such_{i}": i for i in range(big)}),
    chat([{"role": "user", "content": words}])]
  answered = [
    modify(rng, stop=[f"x{i}" for i in range(big)]), modify(rng, stop="x" * big), modify(rng, stop_token_ids=[5] * big),
    modify(rng, allowed_token_ids=[5] * big), modify(rng, bad_words=["x" * big]), modify(rng, text, n=64, max_tokens=1),
    modify(rng, bad_words=[f"x{i}" for i in range(big // 50)]), chat([{"role": "user", "content": "x"}] * big),
    modify(rng, "/detokenize", tokens=[5] * big), modify(rng, "/tokenize", prompt=words), modify(rng, user="u" * big),
    http(b" " * big + json.dumps(VALID).encode())]
  return [Hostile("refused", x) for x in refused] + [Hostile("answered", x) for x in answered]


MANY = oversized(1000)
ENORMOUS = [*oversized(100_000), Hostile("answered", modify(random.Random(0), stop="x" * 1_000_000)), *(
  Hostile("answered", modify(random.Random(0), structured_outputs={"regex": x}))
  for x in ("a{1000000}", "((a{1000}){1000}){1000}", "(" * 100_000, ".*" * 5000, "|".join(map(str, range(20_000)))))]


def too_large(rng: random.Random) -> Hostile:
  """Exceed --max-body-size. A huge Content-Length must be refused before the body arrives."""
  size, chunk = 4 * 2**20, b"%x\r\n" % 2**16 + b" " * 2**16 + b"\r\n"
  return rng.choice([
    lambda: Hostile("refused", http(b" " * (size + 1))),
    lambda: Hostile("cut", http(b"", Content_Length=rng.choice([10**9, 2**62]))),
    lambda: Hostile("refused", http(chunk * 65 + b"0\r\n\r\n", Content_Length=None, Transfer_Encoding="chunked")),
    lambda: Hostile("broken", http(chunk * 65, Content_Length=None, Transfer_Encoding="chunked")),
  ])()


def wrong_route(rng: random.Random) -> bytes:
  method, path = rng.choice([
    ("GET", "/v1/completions"), ("DELETE", "/v1/chat/completions"), ("PUT", "/generate"), ("PATCH", "/tokenize"),
    ("OPTIONS", "/v1/completions"), ("TRACE", "/"), ("POST", "/health"), ("POST", "/metrics"),
    ("POST", "/v1/models"), ("POST", "/no/such"), ("POST", "/v1/completions/../../etc/passwd"), ("POST", "/%00"),
    ("POST", "/v1/completions%00"), ("POST", "//v1/completions"), ("POST", "/" + "a" * 8000), ("POST", "/%ff%fe"),
    ("POST", "/V1/Completions"), ("GET", "/..%2f..%2fetc%2fpasswd"), ("GET", "/v1/models/%s%n")])
  return http(VALID, path, method)


def odd_headers(rng: random.Random) -> Hostile:
  kinds: Any = ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/xml", None, "",
                "multipart/form-data; boundary=", "application/json; charset=utf-16", "a" * 5000, "\xff"]
  return rng.choice([
    lambda: Hostile("answered", http(VALID, Content_Type=rng.choice(kinds))),
    lambda: Hostile("refused", http(b"prompt=x", Content_Type="application/x-www-form-urlencoded")),
    lambda: Hostile("refused", http(b'--b\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nx\r\n--b--\r\n',
                                    Content_Type="multipart/form-data; boundary=b")),
    lambda: Hostile("answered", http(json.dumps(VALID).encode("utf-16"))),
    lambda: Hostile("answered", http(b"\xef\xbb\xbf" + json.dumps(VALID).encode())),
    lambda: Hostile("refused", http(b"\x1f\x8b\x08\0\0\0\0\0\0\3\xab\xae\x05\0C\xbf\xa6\xa3", Content_Encoding="gzip")),
    lambda: Hostile("answered", http(VALID, Authorization="Bearer \xff" + "x" * 1000, Cookie="a=" + "b" * 4000)),
    lambda: Hostile("answered", http(VALID, X_Request_Id="\xff<>", Accept="no/such", Range="bytes=0-1", If_Match="*")),
    lambda: Hostile("answered", http(VALID, Accept_Encoding="br;q=9, *;q=nan", Connection="keep-alive, x",
                                     Upgrade="x")),
    lambda: Hostile("answered", http(VALID, **{f"X_{i}": "y" for i in range(90)})),
  ])()


def strange_text(rng: random.Random) -> Hostile:
  text = rng.choice(STRANGE)
  return rng.choice([
    lambda: Hostile("answered", modify(rng, "/v1/completions", "/generate", "/tokenize", prompt=text)),
    lambda: Hostile("answered", chat([{"role": "user", "content": text}])),
    lambda: Hostile("answered", chat([{"role": text, "content": "x"}, {"role": "user", "content": "x"}])),
    lambda: Hostile("answered", modify(rng, stop=[text], bad_words=[text], user=text)),
    lambda: Hostile("answered", modify(rng, structured_outputs={"choice": [text]})),
    lambda: Hostile("refused", modify(rng, model=text)),
    lambda: Hostile("refused", modify(rng, **{text: text})),
    lambda: Hostile("refused", modify(rng, temperature=text)),
    lambda: Hostile("refused", modify(rng, logit_bias={text: 1})),
    lambda: Hostile("refused", chat([{"role": "user", "content": "x"}], chat_template=text)),
    lambda: Hostile("refused", modify(rng, structured_outputs={text: text})),
  ])()


def wrong_field(rng: random.Random) -> bytes:
  a, chat, words, ids = rng.choice, "/v1/chat/completions", "/tokenize", "/detokenize"
  return a([
    lambda: modify(rng, stream_options={"include_usage": True}), lambda: modify(rng, max_tokens=5, min_tokens=6),
    lambda: modify(rng, stream=True, stream_options={"x": 1}), lambda: modify(rng, stream=a(["yes please", 5, [], {}])),
    lambda: modify(rng, priority=a([1, -1, "x", 2**70])), lambda: modify(rng, echo="maybe not"),
    lambda: modify(rng, model=a(["gpt-4", "../x", "a" * 4000, 5, [], {}])), lambda: modify(rng, user=a([5, [], {}])),
    lambda: modify(rng, chat, top_logprobs=a([21, -1, "x", []])), lambda: modify(rng, chat, logprobs=a(["x", 21, []])),
    lambda: modify(rng, response_format=a(["json", {"type": "xml"}, {"type": "json_schema"}, [], {"type": 5}])),
    lambda: modify(rng, stop_token_ids=[768]), lambda: modify(rng, allowed_token_ids=[a([-1, 768, 2**40])]),
    lambda: modify(rng, logit_bias={"768": 1}), lambda: modify(rng, ids, tokens=[a([-1, 768, 2**40, 2**70])]),
    lambda: modify(rng, ids, tokens=a(["x", 5, {}, ["5"], [[5]], [None], None])), lambda: modify(rng, temprature=1.0),
    lambda: modify(rng, words, prompt=a([None, 5, {}, [[]]])), lambda: modify(rng, words, add_special_tokens="?"),
    lambda: modify(rng, functions=[], tools=[{"type": "function"}]),
  ])()


def mutated(rng: random.Random) -> Hostile:
  path = rng.choice([*BODIES])
  data = bytearray(json.dumps(BODIES[path]).encode())
  for _ in range(rng.randrange(1, 4)): data[rng.randrange(len(data))] = rng.randrange(256)
  return Hostile("answered", http(bytes(data), path))


def truncated(rng: random.Random) -> bytes:
  path = rng.choice([*BODIES])
  data = json.dumps(BODIES[path]).encode()
  return http(data[:rng.randrange(len(data))], path)


def dropped(rng: random.Random) -> bytes:
  """Return the beginning of a request, cut in its headers, its body or its chunks."""
  whole = rng.choice([modify(rng, *BODIES), modify(rng, stream=True), http(
    b"".join(b"%x\r\n%b\r\n" % (n, b" " * n) for n in (1, 5, 3000)), Content_Length=None, Transfer_Encoding="chunked")])
  return whole[:rng.randrange(1, len(whole))]


# kind -> (number per thousand, function that makes one)
KINDS: dict[str, tuple[int, Callable[[random.Random], Hostile | bytes]]] = {
  "random bytes": (80, lambda rng: http(rng.randbytes(rng.randrange(300)), rng.choice([*BODIES]))),
  "truncated": (110, truncated), "mutated": (100, mutated), "number": (90, raw_number), "wrong type": (140, wrong_type),
  "no request": (80, lambda rng: http(rng.choice(BAD_BODIES), rng.choice([*BODIES]))),
  "wrong field": (100, wrong_field),
  "nested": (15, nested), "many": (9, lambda rng: rng.choice(MANY)), "too large": (8, too_large),
  "route": (40, wrong_route), "headers": (30, odd_headers), "strange text": (50, strange_text),
  "prompt": (30, lambda rng: modify(rng, *SAMPLING[::2], prompt=rng.choice(BAD_PROMPTS))),
  "messages": (40, lambda rng: chat(rng.choice(BAD_MESSAGES), stream=rng.random() < 0.3)),
  "structure": (36, lambda rng: modify(rng, structured_outputs=rng.choice(BAD_STRUCTURES))),
  "heavy structure": (8, lambda rng: Hostile("answered", modify(rng, structured_outputs=rng.choice(HEAVY)))),
  "broken": (17, lambda rng: Hostile("broken", rng.choice(BROKEN))),
  "dropped": (17, lambda rng: Hostile("dropped", dropped(rng)))}


def hostile(i: int) -> tuple[int, str, Hostile]:
  """Return request `i`. The first ones cycle through the kinds."""
  rng, names = random.Random(i), [*KINDS]
  name = names[i % len(names)] if i < 10 * len(names) else rng.choices(names, [w for w, _ in KINDS.values()])[0]
  request = KINDS[name][1](rng)
  return i, name, request if isinstance(request, Hostile) else Hostile("refused", request)


class Wire:
  """A keep-alive connection that is opened on demand."""
  def __init__(self, port: int): self.port, self.reader, self.writer = port, Any, None

  async def send(self, raw: bytes) -> None:
    if self.writer is None: self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
    self.writer.write(raw)

  async def head(self) -> tuple[int, dict[str, str]]:
    text = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status, *lines = text.rstrip().split("\r\n")
    return int(status.split()[1]), {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}

  async def answer(self) -> tuple[int, bytes]:
    status, headers = await self.head()
    if "content-length" in headers: body = await self.reader.readexactly(int(headers["content-length"]))
    else: body = b"".join([x async for x in self.chunks()])
    if headers.get("connection") == "close": self.close()
    return status, body

  async def chunks(self):
    while size := int(await self.reader.readuntil(b"\r\n"), 16):
      yield (await self.reader.readexactly(size + 2))[:-2]
    await self.reader.readexactly(2)

  def close(self, abort: bool = False) -> None:
    if self.writer: self.writer.transport.abort() if abort else self.writer.close()
    self.writer = None


def check_error(status: int, body: bytes) -> None:
  """Check that `status` is 4xx and that `body` is a matching error object."""
  assert 400 <= status < 500, "status is not 4xx"
  (key, error), = json.loads(body).items()
  assert key == "error" and set(error) == {"message", "type", "param", "code"}, "no error object"
  assert error["code"] == status and error["type"] == ERRORS[status], "wrong code or type"
  assert error["message"] and isinstance(error["message"], str), "no message"
  assert error["param"] is None or isinstance(error["param"], str), "param is not a string"


async def attack(wire: Wire, raw: bytes, expect: str) -> None:
  """Send a hostile request. AssertionError if the response is not as `expect` says."""
  if expect in ("broken", "dropped"):
    wire = Wire(wire.port)
    try:
      await wire.send(raw)
      if expect == "dropped": return
      wire.writer.write_eof()
      data = await wire.reader.read()
      assert re.match(rb"HTTP/1.1 4\d\d |$", data), f"neither 4xx nor closed: {data[:200]!r}"
    except OSError: pass   # closed by the server
    finally: wire.close(abort=expect == "dropped" and len(raw) % 2 == 0)
    return
  await wire.send(raw)
  try: status, body = await wire.answer()
  except (OSError, asyncio.IncompleteReadError) as e:
    wire.close()
    raise AssertionError(f"no answer: {e}") from None
  try:
    if expect != "answered" or status != 200: check_error(status, body)
  except AssertionError as e: raise AssertionError(f"{e}: {status} {body[:300]!r}") from None
  if expect == "cut": wire.close()


async def valid_text(wire: Wire) -> str:
  await wire.send(http(VALID))
  status, body = await wire.answer()
  assert status == 200, body
  return json.loads(body)["choices"][0]["text"]


def resident(server: Server) -> int:
  """Return the server's resident memory in KiB."""
  status = Path(f"/proc/{server.process.pid}/status")
  return int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1]) if status.exists() else 0


async def all_attacks(server: Server, requests: Iterable[tuple[Any, str, Hostile]], connections: int = 6) -> list[str]:
  """Send all requests over a few connections, and a valid one among every 250. Return the failures."""
  queue, failures, text = iter(requests), list[str](), await valid_text(Wire(server.port))
  assert len(text) > 8, "the valid request generates too little text"

  async def work() -> None:
    wire = Wire(server.port)
    for i, name, (expect, raw) in queue:
      try:
        async with asyncio.timeout(60):
          await attack(wire, raw, expect)
          if i % 250 == 0 or name == "enormous":
            assert (text_now := await valid_text(wire)) == text, f"a valid request's text is now {text_now!r}"
      except (AssertionError, TimeoutError) as e:
        failures.append(f"{i} ({name}, {expect}) {raw[:300]!r}: {type(e).__name__} {str(e)[:400]}")
        wire.close()
        if len(failures) >= 100: return
    wire.close()
  await asyncio.gather(*(work() for _ in range(connections)))
  return failures


@pytest.mark.slow
def test_ten_thousand_hostile_requests_leave_server_unchanged(server):
  wait_until(lambda: idle(server), "the server is idle at the start")
  failures = asyncio.run(all_attacks(server, [*map(hostile, range(1000)), *(
    (i, "structure", Hostile("answered", modify(random.Random(i), structured_outputs=x)))
    for i, x in enumerate(5 * (BAD_STRUCTURES + HEAVY)))]))   # warm up: threads keep the memory of a compilation
  before = resident(server)
  failures += asyncio.run(all_attacks(server, map(hostile, range(1000, 10_000))))
  after = resident(server)
  assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:20])
  wait_until(lambda: idle(server), "the server is idle afterwards")
  assert after - before < 16 * 1024, f"memory grew by {after - before} KiB in nine thousand requests"
  assert "Traceback" not in server.log, server.log[-4000:]


@pytest.mark.slow
def test_valid_request_after_each_enormous_request_is_unchanged(server):
  failures = asyncio.run(all_attacks(server, [(i, "enormous", x) for i, x in enumerate(ENORMOUS)], connections=2))
  assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures)
  wait_until(lambda: idle(server), "the server is idle afterwards")
  assert "Traceback" not in server.log, server.log[-4000:]


# --- a hundred clients, twenty of them killed ---


