"""The chat page in headless Chromium, against a running server with an API key."""
import base64
import dataclasses
import hashlib
import json
import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import expect, sync_playwright
from helpers.models import tiny_model
from helpers.servers import Server, reserve_port, wait_until

from tinyvllm import SamplingParams

KEY, LONG = "a key", 8000   # LONG: more tokens than a test waits for
OWN_LINES = 847
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
ENGINE = ("--max-num-seqs", "1", "--max-num-batched-tokens", "1")   # one graph to capture
FOLDED = "<think>\nplan **one**\n</think>\n\nthe answer"
PHONE = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}
PAGE = Path(__file__).parents[2] / "examples/tinyvllm_extra/server/chat.html"
SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.S)
MARKUP = "<img src=x onerror='window.broken = 1'><script>window.broken = 1</script><b>bold</b> List<T>"
ANSWER = """# Reversed

A *slice* with a **negative** step, see [the docs](https://docs.python.org/3/):
it walks backwards.

```python
def reverse(text): return text[::-1]   # a line that is too long for a phone, so that it has to scroll in its block
```

1. One
   - `inner`
2. Two

| Input | Output |
|-------|:------:|
| `ab`  | `ba`   |

> Quoted

- [x] done
- [ ] open
"""
# Code: language, source, expected colored spans
CODE = {
  "python": ('@cache\ndef f(x):\n  """Say "hi"."""\n  return x[1.5] + "a#b" # end', [
    ("call", "@cache"), ("keyword", "def"), ("call", "f"), ("string", '"""Say "hi"."""'), ("keyword", "return"),
    ("number", "1.5"), ("string", '"a#b"'), ("comment", "# end")]),
  "js": ("/* a\n'b' */ const f = async () => g(`x ${1}`, 'it\\'s') // c", [
    ("comment", "/* a\n'b' */"), ("keyword", "const"), ("keyword", "async"), ("call", "g"), ("string", "`x ${1}`"),
    ("string", "'it\\'s'"), ("comment", "// c")]),
  "Rust": ("fn main<'a>(x: &'a str) { let c = 'x'; 0..0xff }", [
    ("keyword", "fn"), ("keyword", "let"), ("string", "'x'"), ("number", "0"), ("number", "0xff")]),
  "cpp": ("#include <x>\nint a = 2;", [("call", "#include"), ("keyword", "int"), ("number", "2")]),
  "json": ('{"a": ["b", 2, true]}', [("call", '"a"'), ("string", '"b"'), ("number", "2"), ("keyword", "true")]),
  "yaml": ("on: yes # c\nurl: http://x#y", [("call", "on"), ("keyword", "yes"), ("comment", "# c"), ("call", "url")]),
  "bash": ('for f in a#b; do echo "$f" $HOME; done # c', [
    ("keyword", "for"), ("keyword", "in"), ("keyword", "do"), ("keyword", "echo"), ("string", '"$f"'),
    ("call", "$HOME"), ("keyword", "done"), ("comment", "# c")]),
  "sql": ("SELECT count(*) from t -- c", [
    ("keyword", "SELECT"), ("call", "count"), ("keyword", "from"), ("comment", "-- c")]),
  "html": ("<!-- c --><a href='x'>Don't</a>", [
    ("comment", "<!-- c -->"), ("call", "<a"), ("string", "'x'"), ("call", ">"), ("call", "</a"), ("call", ">")]),
  "css": ("a { color: red } /* c */", [("call", "color"), ("comment", "/* c */")]),
  "diff": ("@@ 1\n-a\n+b", [("call", "@@ 1"), ("comment", "-a"), ("string", "+b")]),
  "text": ("if x: return 'y'", []), "": ("if x: return 'y'", []), "constructor": ("if 1", []),
}
ALL_CODE = "\n".join(f"```{language}\n{source}\n```" for language, (source, _) in CODE.items())
# Streamed deltas with two tool calls, whose arguments arrive in pieces
CALLS = [{"index": 0, "id": "call-1", "type": "function", "function": {
           "name": "get_weather", "arguments": '{"city": "Pa'}},
         {"index": 0, "function": {"arguments": 'ris", "days": 3}'}},
         {"index": 1, "id": "call-2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]
# Input that must be neutralized, one per line: markup, Markdown, and samples in the style of DOMPurify's test suite
HOSTILE = [line.replace(r"\n", "\n").replace(r"\t", "\t") for line in r"""
<script>broken=1</script>
<img src=x onerror='broken=1'>
<svg onload='broken=1'></svg>
<svg><a xlink:href='javascript:broken=1'><text y=9>x</text></a></svg>
<iframe srcdoc='<b>x</b>'></iframe>
<iframe src='javascript:parent.broken=1'></iframe>
<meta http-equiv=refresh content='0;url=http://e.test/'>
<style>body { background: url(http://e.test/) }</style>
<b style='background:url(http://e.test/)'>x</b>
<link rel=stylesheet href='http://e.test/'>
<base href='http://e.test/'>
<form action='http://e.test/'><input name=a autofocus onfocus='broken=1'><button>x</button></form>
<object data='http://e.test/'></object><embed src='http://e.test/'>
<a href='javascript:broken=1' target=_self>x</a>
<a href='http://e.test/' target=_self onclick='broken=1'>x</a>
<video src='http://e.test/' autoplay></video><audio src='http://e.test/'></audio>
[x](javascript:broken=1)
[x](JaVaScRiPt:broken=1)
[x](&#x6A;avascript:broken=1)
[x](java\tscript:broken=1)
[x](<java\nscript:broken=1>)
<javascript:broken=1>
[x]( vbscript:broken=1)
[x][y]\n\n[y]: javascript:broken=1
[x](data:text/html;base64,PHNjcmlwdD5icm9rZW49MTwvc2NyaXB0Pg==)
![x](javascript:broken=1)
![x](http://e.test/pixel.png)
![x](data:image/svg+xml,<svg onload='broken=1'/>)
[![x](http://e.test/pixel.png)](http://e.test/)
[x](http://e.test/"onmouseover="broken=1)
!["onerror="broken=1](x)
[x](/metrics)
[x](//e.test/)
[x](#text)
```"><img/src/onerror=broken=1>\nx\n```
`<img src=x onerror='broken=1'>`
# <img src=x onerror='broken=1'>
| <img src=x onerror='broken=1'> |\n|-|
<form><math><mtext></form><form><mglyph><style></math><img src onerror=broken=1>
<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=broken=1&gt;">
<svg></p><style><a id="</style><img src=1 onerror=broken=1>">
<math><mi//xlink:href="data:x,<script>broken=1</script>">
<noscript><p title="</noscript><img src=x onerror=broken=1>">
<form onmouseover='broken=1'><input name=attributes>
<option><style></option></select><b><img src=xx: onerror=broken=1></style></option>
<x/><title>&lt;/title&gt;&lt;img src=1 onerror=broken=1>
<svg><foreignobject><p><style><p title="</style><iframe onload&#x3d;broken=1></iframe>">
<img name=getElementById><a id=text name=text>x</a>
<template><img src=x onerror=broken=1></template>
```html\n<img src=x onerror='broken=1'><script>broken=1</script>\n```
""".strip().splitlines()]
TAGS = {"a", "blockquote", "br", "code", "del", "em", "h2", "hr", "li", "ol", "p", "pre", "strong", "table", "tbody",
        "td", "th", "thead", "tr", "ul"}
PAGE_TAGS = {"footer", "button", "details", "div", "small", "span", "summary"}   # added by the page
PAGE_ATTRIBUTES = {"aria-label", "class", "open", "role", "tabindex", "type"}
# Fields of SamplingParams without a setting on the page: token ids, n, logprobs, structured outputs
NOT_ON_PAGE = {"n", "stop_token_ids", "logit_bias", "allowed_token_ids", "logprobs", "prompt_logprobs",
                "structured_outputs"}
# Mock server controlled by the test: feed("text") streams a chunk, feed(null) ends the response
FEED = """
  const real = window.fetch
  window.fetch = (path, options) => {
    if (!path.endsWith("chat/completions")) return real(path, options)
    const body = new ReadableStream({start(controller) {
      const write = data => controller.enqueue(new TextEncoder().encode(`data: ${data}\n\n`))
      window.feed = text => {
        write(JSON.stringify({choices: [{delta: {content: text ?? ""}, finish_reason: text === null ? "stop" : null}]}))
        if (text === null) write("[DONE]")
      }
      options.signal.addEventListener("abort", () => controller.error(options.signal.reason))
    }})
    return Promise.resolve(new Response(body))
  }
"""
NO_RESPONSE = r"^The server .* not \w+\."   # the page's message without a status code
TIMEOUT = 60.0
expect.set_options(timeout=TIMEOUT * 1000)


@pytest.fixture(scope="module")
def browser():
  chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
  assert chromium, "no browser: apt-get install -y --no-install-recommends chromium"
  with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  folder = tiny_model(tmp_path_factory.mktemp("chat"), words=True, max_position_embeddings=2 * LONG)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
  with Server(folder, "--api-key", KEY, "--served-model-name", "words", *ENGINE) as server: yield server


@pytest.fixture
def visit(browser, server):
  """Return a function that opens the page as a new user. After each test, check that the page had no script error and
  sent requests only to its server."""
  contexts, requested, errors = [], [], []

  def visit(url=server.url, key=KEY, **options):
    context = browser.new_context(**options)
    contexts.append(context)
    page = context.new_page()
    page.posts = []   # (path, body) of each POST request

    def record(request):
      requested.append((url, request.url))
      if request.method == "POST": page.posts.append((urlsplit(request.url).path, request.post_data_json))
    page.on("request", record)
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(url)
    expect(page.locator("#model:not(:empty), #note:not(:empty)")).to_have_count(1)   # model name or error
    settings(page, temperature=0, max_tokens=20, api_key=key)
    return page
  yield visit
  for context in contexts: context.close()
  assert not errors
  assert requested
  assert not [target for origin, target in requested if not target.startswith((origin + "/", "data:"))]


def settings(page, **values):
  """Open the settings, and fill in `values`."""
  if not page.get_by_label("System prompt").is_visible(): page.get_by_text("Settings", exact=True).click()
  for name, value in values.items():
    page.get_by_label(name.replace("_", " "), exact=False).fill(str(value))
  page.get_by_label("Message").focus()


def send(page, text):
  page.get_by_label("Message").fill(text)
  page.get_by_role("button", name="Send").click()


def answers(page): return page.get_by_role("article", name="Model")
def answer_text(page): return answers(page).last.locator("> div").text_content().removesuffix("\n")


def wait_for_answers(page, count=1):
  """Wait until `count` answers are complete. Return the last one's text."""
  expect(answers(page)).to_have_count(count)
  expect(page.get_by_role("button", name="Send")).to_be_visible()
  return answer_text(page)


def expect_stats(page, pattern):
  expect(answers(page).locator("small")).to_have_text(re.compile(pattern))


def idle(server):
  wait_until(lambda: server.metrics()["num_requests_running"] == 0, "no request runs", TIMEOUT)


def num_aborted(server): return server.metrics().get("request_success_total{finished_reason=abort}", 0)


def expected(server, messages, **fields):
  """Return the server's answer without streaming."""
  body = {"messages": messages, "temperature": 0, **fields}
  answer = server.http().post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
  return answer.raise_for_status().json()["choices"][0]["message"]["content"]


def events(*events, done=True):
  """Return a mock streamed response."""
  body = "".join(f"data: {event}\n\n" for event in [*map(json.dumps, events), *["[DONE]"] * done])
  return {"content_type": "text/event-stream", "body": body}


def error_response(status, message):
  return {"status": status, "content_type": "application/json", "body": json.dumps({"error": {"message": message}})}


def respond_with(page, path, **answer):
  """Mock the server's response to `path`."""
  page.route(f"**/v1/{path}", lambda route: route.fulfill(**answer))


def chunk(text, finish_reason=None): return delta(finish_reason, content=text)


def delta(finish_reason=None, **fields):
  return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}], "usage": None}


def page_only(text):
  """Return the page's HTML without the two bundled libraries."""
  return text.partition("<!-- Third-party code")[0]


def policy(text): return re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]


def test_page_is_one_short_file_without_external_resources(server):
  response = server.http().get("/")
  assert response.status_code == 200 and response.headers["content-type"].startswith("text/html"), "no key needed"
  text = page_only(response.text)
  assert text != response.text == PAGE.read_text() and len(response.text) < 145_000
  assert len(text.splitlines()) <= OWN_LINES
  assert max(map(len, text.splitlines())) <= 120
  loads = r"https?:|\bsrc=|@import|(?<!Object)url\("
  assert not re.findall(rf"(inner|outer|adjacent)HTML|document\.write|eval\(|{loads}", text, re.I)
  assert not re.search(r"<script[^>]*src|<link[^>]*href=\"(?!data:)", response.text)


def test_content_security_policy_allows_three_scripts_and_own_server():
  rules = dict(rule.split(maxsplit=1) for rule in policy(PAGE.read_text()).split(";"))
  digests = [hashlib.sha256(script.encode()).digest() for script in SCRIPT.findall(PAGE.read_text())]
  hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
  assert len(digests) == 3 and " ".join(rules.pop("script-src").split()) == hashes, "script-src must list them"
  assert rules == {"default-src": "'none'", "connect-src": "'self'", "img-src": "data:", "style-src": "'unsafe-inline'",
                   "base-uri": "'none'", "form-action": "'none'", "require-trusted-types-for": "'script'",
                   "trusted-types": "dompurify"}


def test_bundled_libraries_match_their_versions_and_include_licenses(visit):
  comments = re.findall(r"<!-- (\w+) (\d+\.\d+\.\d+)(.*?)-->\n<script>(.*?)</script>", PAGE.read_text(), re.S)
  (marked, version, license, code), (purify, purify_version, purify_license, _) = comments
  assert (marked, purify) == ("marked", "DOMPurify")
  assert f"marked v{version} - a markdown parser" in code
  assert visit().evaluate("DOMPurify.version") == purify_version
  for words in ("Copyright (c) 2018+, MarkedJS", "Permission is hereby granted, free of charge", "John Gruber"):
    assert words in license
  for words in ("Apache License", "Version 2.0, January 2004", "END OF TERMS AND CONDITIONS", "under the License."):
    assert words in purify_license


def test_streamed_answer_grows_and_equals_server_response(visit, server):
  page = visit()
  settings(page, max_tokens=400)
  # Deliver the first bytes in slices, a frame apart: on a busy machine the whole response may arrive in one frame
  page.evaluate("""() => {
    window.observations = []
    const answer = () => document.querySelector("[aria-label=Model] > div")?.textContent ?? ""
    const observe = () => observations.push([answer().length, document.getElementById("log").ariaBusy])
    new MutationObserver(observe).observe(document.getElementById("log"), {childList: true, subtree: true})
    const frame = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))
    let slices = 20
    const slow = () => new TransformStream({async transform(chunk, controller) {
      for (; slices > 0 && chunk.length > 200; slices--) {
        controller.enqueue(chunk.slice(0, 200))
        chunk = chunk.slice(200)
        await frame()
      }
      controller.enqueue(chunk)
      if (slices-- > 0) await frame()
    }})
    const originalFetch = window.fetch
    window.fetch = async (...args) => {
      const response = await originalFetch(...args)
      return new Response(response.body.pipeThrough(slow()), response)
    }
  }""")
  send(page, "hello")
  text = wait_for_answers(page)
  assert text == expected(server, [{"role": "user", "content": "hello"}], max_tokens=400)
  lengths = {length for length, busy in page.evaluate("observations") if busy == "true"}
  assert len(lengths) > 3 and {n for n in lengths if 0 < n < len(text)}, lengths
  assert page.get_by_role("log").get_attribute("aria-busy") == "false"
  assert page.get_by_role("log").get_attribute("aria-live") == "polite"
  expect_stats(page, r"^400 tokens, \d+\.\d tokens/s, \D+ \d+\.\d\d s \(length\)$")


def test_request_has_conversation_and_settings_new_chat_clears_it(visit, server):
  page = visit()
  settings(page, system_prompt="be kind", temperature=0, max_tokens=7)
  send(page, "one")
  first = wait_for_answers(page)
  send(page, "two")
  second = wait_for_answers(page, 2)
  system, one, two = ({"role": r, "content": c} for r, c in (("system", "be kind"), ("user", "one"), ("user", "two")))
  messages = [system, one, {"role": "assistant", "content": first}, two]
  assert [body["messages"] for _, body in page.posts] == [[system, one], messages]
  assert second == expected(server, messages, max_tokens=7)
  assert [(path, body["temperature"], body["max_tokens"]) for path, body in page.posts] == [
    ("/v1/chat/completions", 0, 7)] * 2
  page.get_by_role("button", name="New chat").click()
  expect(page.get_by_role("article")).to_have_count(0)
  settings(page, system_prompt="", temperature="", max_tokens="")
  respond_with(page, "chat/completions", **events(chunk("three", "stop")))
  send(page, "two")
  assert wait_for_answers(page) == "three"
  assert page.posts[-1][1]["messages"] == [two]
  assert page.posts[-1][1]["temperature"] is page.posts[-1][1]["max_tokens"] is None, "use the server's defaults"


def test_stop_button_aborts_request_and_conversation_continues(visit, server):
  page = visit()
  settings(page, max_tokens=LONG)
  send(page, "hello")
  wait_until(lambda: len(answer_text(page)) > 20, "some text", TIMEOUT)
  assert server.metrics()["num_requests_running"] == 1
  before = num_aborted(server)
  expect(page.get_by_role("button", name="Send")).to_have_count(0)
  page.get_by_label("Message").fill("too early")
  page.get_by_label("Message").press("Enter")
  page.get_by_role("button", name="Stop").click()
  text = wait_for_answers(page)
  idle(server)
  assert answer_text(page) == text
  wait_until(lambda: num_aborted(server) == before + 1, "the request is aborted", TIMEOUT)
  expect_stats(page, r"^\d+ tokens, \d+\.\d tokens/s, .* s, stopped$")
  expect(page.get_by_role("alert")).to_have_count(0)
  expect(page.get_by_label("Message")).to_be_focused()
  expect(page.get_by_label("Message")).to_have_value("too early")
  settings(page, max_tokens=5)
  send(page, "again")
  assert wait_for_answers(page, 2)
  assert [m["content"] for m in page.posts[-1][1]["messages"]] == ["hello", text, "again"]


def test_new_chat_and_closed_page_abort_the_request(visit, server):
  page = visit()
  settings(page, max_tokens=LONG)
  send(page, "hello")
  wait_until(lambda: answer_text(page), "some text", TIMEOUT)
  page.get_by_role("button", name="New chat").click()
  idle(server)
  expect(page.get_by_role("article")).to_have_count(0)
  expect(page.get_by_label("Message")).to_have_value("")
  send(page, "again")
  wait_until(lambda: answer_text(page), "some text", TIMEOUT)
  assert page.posts[-1][1]["messages"] == [{"role": "user", "content": "again"}]
  assert server.metrics()["num_requests_running"] == 1
  page.close()
  idle(server)


def test_wrong_key_shows_server_error_and_keeps_the_question(visit, server):
  page = visit(key="wrong")
  message = server.http().get("/v1/models").json()["error"]["message"]
  expect(page.get_by_role("status")).to_have_text(f"401: {message}")
  send(page, "hello")
  expect(page.get_by_role("alert")).to_have_text(f"401: {message}")
  expect(page.get_by_label("Message")).to_have_value("hello")
  settings(page, api_key=KEY)
  expect(page.get_by_role("heading", level=1)).to_have_text("tinyvllm words")
  page.get_by_role("button", name="Send").click()
  assert wait_for_answers(page) == expected(server, [{"role": "user", "content": "hello"}], max_tokens=20)
  page.reload()
  assert page.get_by_label("API key").input_value() == KEY, "the key is stored for the session"
  assert page.evaluate("[...Object.values(localStorage), document.cookie].filter(x => x.includes('a key'))") == []


def test_invalid_field_shows_the_servers_error_message(visit):
  page = visit()
  settings(page, temperature=-1)
  send(page, "hello")
  expect(page.get_by_role("alert")).to_have_text(re.compile(r"^400: .*temperature"))


def test_enter_sends_and_shift_enter_inserts_a_newline(visit):
  page = visit()
  message = page.get_by_label("Message")
  message.press_sequentially("one")
  message.press("Shift+Enter")
  message.press_sequentially("two")
  expect(message).to_have_value("one\ntwo")
  message.evaluate("x => x.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true}))")
  assert not page.posts, "Enter within an input method's composition must not send"
  message.press("Enter")
  expect(message).to_have_value("")
  wait_for_answers(page)
  assert [m["content"] for m in page.posts[0][1]["messages"]] == ["one\ntwo"]
  message.press("Enter")
  message.fill(" \n ")
  message.press("Enter")
  expect(page.get_by_role("article", name="You")).to_have_count(1)


def test_log_follows_answer_until_user_scrolls_up(visit, server):
  page = visit(viewport={"width": 400, "height": 500})
  settings(page, max_tokens=LONG)
  page.get_by_text("Settings", exact=True).click()
  send(page, "hello")

  def place(name): return page.get_by_role("log").evaluate(f"x => x.{name}")
  def below(): return place("scrollHeight - x.scrollTop - x.clientHeight")

  def wait_for_growth():
    length = len(answer_text(page))
    wait_until(lambda: len(answer_text(page)) > length + 50, "more text", TIMEOUT)
  wait_until(lambda: place("scrollTop") > 100, "the log follows the text", TIMEOUT)
  page.get_by_role("log").hover()

  def wheel(delta, condition):
    page.mouse.wheel(0, delta)
    return condition()
  wait_until(lambda: wheel(-9999, lambda: place("scrollTop") == 0), "at the top", TIMEOUT)
  wait_for_growth()
  assert place("scrollTop") == 0
  wait_until(lambda: wheel(99999, lambda: below() < 40), "at the end", TIMEOUT)
  wait_for_growth()
  assert below() < 40
  assert server.metrics()["num_requests_running"] == 1
  page.get_by_role("button", name="Stop").click()
  idle(server)


def test_markup_of_user_model_and_server_is_shown_as_text(visit):
  page = visit()
  respond_with(page, "chat/completions", **events(chunk(MARKUP[:9]), chunk(MARKUP[9:], "stop")))
  send(page, MARKUP)
  assert wait_for_answers(page) == MARKUP
  assert page.get_by_role("article", name="You").locator("div").text_content() == MARKUP
  respond_with(page, "**", **error_response(400, MARKUP))
  send(page, "more")
  expect(page.get_by_role("alert")).to_have_text(f"400: {MARKUP}")
  settings(page, api_key="another")
  expect(page.get_by_role("status")).to_have_text(f"400: {MARKUP}")
  page.get_by_role("button", name="New chat").click()
  assert MARKUP[:60] in page.get_by_role("navigation").text_content()
  assert not page.locator("main img, main script, main b, nav img, nav b").count()
  assert page.evaluate("window.broken") is None


def test_token_count_is_the_completion_tokens_of_the_server(visit):
  page = visit()
  usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}}
  respond_with(page, "chat/completions", **events(chunk("the cat sat"), chunk(" on the mat", "stop"), usage))
  send(page, "hello")
  assert wait_for_answers(page) == "the cat sat on the mat"
  # No rate if all events arrive at once
  expect_stats(page, r"^9 tokens(, \d+\.\d tokens/s)?, \D+ \d+\.\d\d s$")


def test_interrupted_stream_keeps_its_text_and_shows_the_error(visit):
  page = visit()
  error_event = {"error": {"message": "a step failed", "type": "InternalServerError", "param": None, "code": 500}}
  for response, error in ((events(chunk("some"), error_event), "a step failed"),
                          (events(chunk("some"), done=False), "The connection")):
    respond_with(page, "chat/completions", **response)
    send(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text(error)
    assert wait_for_answers(page) == "some"
    page.get_by_role("button", name="New chat").click()
  page.unroute("**/v1/chat/completions")
  requests = []
  page.route("**/v1/chat/completions", lambda route: (requests.append(route), route.abort()))
  send(page, "hello")
  expect(page.get_by_role("alert")).to_have_text(re.compile(NO_RESPONSE))
  expect(page.get_by_label("Message")).to_have_value("hello")
  assert len(requests) == 2, "one retry, as the server responds to other requests"


@pytest.fixture
def port():
  """A free port that two successive servers can use."""
  with reserve_port() as holder: yield holder.getsockname()[1]


def test_question_waits_while_the_server_is_down(visit, words_folder, port):
  with Server(words_folder, *ENGINE, "--port", port) as server:
    page = visit(server.url, key="")
    server.stop()
  send(page, "hello")
  expect(page.get_by_role("status")).to_have_text(re.compile(NO_RESPONSE))
  expect(page.get_by_role("button", name="Stop")).to_be_visible()
  with Server(words_folder, *ENGINE, "--port", port, ready=False):
    assert wait_for_answers(page)
    expect(page.get_by_role("heading", level=1)).to_have_text(f"tinyvllm {words_folder.name}")
    expect(page.get_by_role("status")).not_to_contain_text("The server")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_question_waits_while_the_model_is_loading(visit):
  page, state = visit(), {"status": 503}
  def handle(route):
    if state["status"]: route.fulfill(**error_response(state["status"], state["message"]))
    else: route.continue_()
  page.route("**/v1/**", handle)
  state["message"] = "the model is loading"
  page.reload()
  expect(page.get_by_role("status")).to_contain_text("(503: the model is loading)")
  settings(page, max_tokens=5)
  send(page, "hello")
  state["message"] = "preparing 5 of 16"
  expect(page.get_by_role("status")).to_contain_text("preparing 5 of 16")
  page.get_by_role("button", name="Stop").click()
  expect(page.get_by_label("Message")).to_have_value("hello")
  expect(page.get_by_role("article")).to_have_count(0)
  page.get_by_role("button", name="Send").click()
  expect(page.get_by_role("article")).to_have_count(2)
  state["status"] = None
  assert wait_for_answers(page)
  expect(page.get_by_role("heading", level=1)).to_have_text("tinyvllm words")
  expect(page.get_by_role("status")).to_be_empty()


def test_full_queue_shows_an_error_and_keeps_the_conversation(visit):
  page = visit()
  respond_with(page, "chat/completions", **events(chunk("one", "stop")))
  send(page, "first")
  wait_for_answers(page)
  page.unroute("**/v1/chat/completions")
  respond_with(page, "chat/completions", **error_response(429, "at most 2 sequences may wait"))
  send(page, "second")
  expect(page.get_by_role("alert")).to_have_text(re.compile(r"queue is full.*\(429: at most 2 sequences may wait\)"))
  expect(page.get_by_label("Message")).to_have_value("second")
  page.get_by_role("button", name="Regenerate").click()
  expect(page.get_by_role("alert")).to_have_count(1)
  assert wait_for_answers(page) == "one", "the previous answer"
  expect(page.get_by_label("Message")).to_have_value("second")
  edit(page, "first", "another")
  expect(page.get_by_role("alert")).to_have_count(1)
  assert wait_for_answers(page) == "one"
  expect(page.get_by_label("Message")).to_have_value("another")


def test_phone_layout_fits_without_horizontal_scrolling(visit):
  page = visit(**PHONE)
  settings(page, system_prompt="w" * 300)
  respond_with(page, "chat/completions", **events(chunk(ANSWER), chunk("y" * 500, "stop")))
  send(page, "x" * 500)
  wait_for_answers(page)
  assert page.locator("pre").evaluate("x => x.parentElement.scrollWidth > x.parentElement.clientWidth")
  for is_open in (True, False):
    assert page.get_by_label("API key").is_visible() == is_open
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["viewport"]["width"]
    assert page.evaluate("document.documentElement.scrollHeight") <= PHONE["viewport"]["height"]
    assert page.get_by_role("log").evaluate("x => x.scrollWidth <= x.clientWidth")
    for control in (page.get_by_label("Message"), page.get_by_role("button", name="Send")):
      expect(control).to_be_in_viewport(ratio=1)
    page.get_by_text("Settings", exact=True).tap()
  assert not page.get_by_role("button", name="New chat").is_visible()
  page.get_by_text("Chats", exact=True).tap()
  expect(page.get_by_role("button", name="New chat")).to_be_in_viewport(ratio=1)
  page.get_by_role("button", name="New chat").tap()
  assert not page.get_by_role("button", name="New chat").is_visible(), "the list of chats is closed again"
  fields = page.locator("input, select, textarea")
  sizes = fields.evaluate_all("all => all.map(x => parseFloat(getComputedStyle(x).fontSize))")
  assert len(sizes) == 23 and min(sizes) >= 16, "a phone zooms into anything smaller"


def test_page_follows_prefers_color_scheme(visit):
  def luminance(scheme):
    body = visit(color_scheme=scheme).locator("body")
    colors = body.evaluate("x => [getComputedStyle(x).backgroundColor, getComputedStyle(x).color]")
    return [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]
  (light, on_light), (dark, on_dark) = luminance("light"), luminance("dark")
  assert light > 600 > 150 > on_light and dark < 150 < 600 < on_dark


def test_model_without_chat_template_uses_completions_and_shows_a_notice(visit, words_folder):
  with Server(words_folder, *ENGINE) as server:
    page = visit(server.url, key="")
    settings(page, system_prompt="not sent")
    send(page, "hello")
    first = wait_for_answers(page)
    expect(page.get_by_role("status")).to_contain_text("no chat template")
    send(page, "the cat")
    second = wait_for_answers(page, 2)
    assert [path for path, _ in page.posts] == ["/v1/chat/completions", *["/v1/completions"] * 2]
    assert [body["prompt"] for _, body in page.posts[1:]] == ["hello", "the cat"]
    body = {"prompt": ["hello", "the cat"], "temperature": 0, "max_tokens": 20}
    choices = server.http().post("/v1/completions", json=body).raise_for_status().json()["choices"]
    assert [c["text"] for c in choices] == [first, second]
    assert not page.get_by_role("alert").count()


def edit(page, question, text):
  """Edit a question, and send it again."""
  page.get_by_role("article", name="You").filter(has_text=question).get_by_role("button", name="Edit").click()
  expect(page.get_by_label("Message")).to_have_value(question)
  expect(page.get_by_label("Message")).to_be_focused()
  send(page, text)


def chats(page): return page.get_by_role("navigation", name="Chats").get_by_role("listitem")


def test_markdown_is_rendered(visit):
  page = visit()
  respond_with(page, "chat/completions", **events(chunk(ANSWER[:100]), chunk(ANSWER[100:], "stop")))
  send(page, "hello")
  wait_for_answers(page)
  answer = answers(page)
  expect(answer.get_by_role("heading", name="Reversed")).to_be_visible()
  expect(answer.locator("p > em")).to_have_text("slice")
  expect(answer.locator("p > strong")).to_have_text("negative")
  expect(answer.locator("p > br")).to_have_count(1)
  expect(answer.locator("ol > li > ul > li > code")).to_have_text("inner")
  expect(answer.locator("blockquote")).to_have_text("Quoted")
  expect(answer.get_by_role("cell").last).to_have_text("ba")
  assert answer.get_by_role("cell").last.evaluate("x => getComputedStyle(x).textAlign") in ("center", "-webkit-center")
  expect(answer.get_by_text("☑ done")).to_be_visible()
  link = answer.get_by_role("link", name="the docs")
  assert [link.get_attribute(name) for name in ("href", "target", "rel")] == [
    "https://docs.python.org/3/", "_blank", "noopener noreferrer"]


@pytest.mark.parametrize("clipboard", [True, False])
def test_copy_buttons_copy_markdown_and_single_code_blocks(visit, clipboard):
  page = visit(permissions=["clipboard-read", "clipboard-write"])
  if not clipboard: page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject('plain http') }")
  respond_with(page, "chat/completions", **events(chunk(ANSWER + "\n~~~\nlast\n~~~", "stop")))
  send(page, "hello\nyou")
  wait_for_answers(page)
  def copy(button):
    page.evaluate("navigator.clipboard.__proto__.writeText.call(navigator.clipboard, '')")
    button.click()
    expect(page.get_by_role("status")).to_have_text("Copied.")
    expect(button).to_be_focused()
    return page.evaluate("navigator.clipboard.readText()")
  blocks = answers(page).get_by_role("button", name="Copy code")
  assert copy(blocks.first) == ANSWER.partition("```python\n")[2].partition("```")[0]
  assert copy(blocks.last) == "last\n"
  assert copy(answers(page).get_by_role("button", name="Copy", exact=True)) == ANSWER + "\n~~~\nlast\n~~~"
  assert copy(page.get_by_role("article", name="You").get_by_role("button", name="Copy")) == "hello\nyou"


def expect_only_safe_elements(part, markdown):
  """Check that the page shows a part of an answer with harmless elements and attributes."""
  elements = part.evaluate("""part => [...part.querySelectorAll("*")].map(x =>
    [x.localName, x.namespaceURI, Object.fromEntries([...x.attributes].map(a => [a.name, a.value]))])""")
  for tag, namespace, attributes in elements:
    assert tag in TAGS | PAGE_TAGS and namespace.endswith("/xhtml"), (markdown, tag)
    safe = PAGE_ATTRIBUTES if tag in PAGE_TAGS else {"href", "target", "rel", "align", "start"}
    assert attributes.keys() <= safe, (markdown, attributes)
    if "href" in attributes:
      assert attributes["href"].startswith("http://e.test/"), (markdown, attributes)
      assert (attributes["target"], attributes["rel"]) == ("_blank", "noopener noreferrer"), markdown


@pytest.mark.parametrize("defenses", ["all", "sanitizer only"])
def test_hostile_markdown_runs_no_script_and_sends_no_request(visit, server, defenses):
  page = visit()
  if defenses == "sanitizer only":   # Markdown passes markup through, and the page has no Content-Security-Policy
    text = PAGE.read_text().replace("tokenizer: {html() {}, tag() {}},", "").replace(policy(PAGE.read_text()), "")
    assert len(text) < len(PAGE.read_text()) - 300
    page.route(server.url + "/", lambda route: route.fulfill(content_type="text/html", body=text))
    page.goto(server.url)
  for markdown in ["\n\n".join(HOSTILE), *HOSTILE]:
    page.unroute("**/v1/chat/completions")
    respond_with(page, "chat/completions", **events(chunk(f"{markdown}\n\nend", "stop")))
    page.get_by_role("button", name="New chat").click()
    send(page, "hello")
    wait_for_answers(page)
    expect_only_safe_elements(answers(page).locator("> div"), markdown)
    if defenses == "all" and markdown.startswith("<") and not re.search("[\n&]|<java", markdown):
      assert markdown in answer_text(page), "markup is shown as text"
  assert page.evaluate("window.broken") is None and len(page.frames) == 1
  assert page.url.rstrip("/#") == server.url and page.evaluate("typeof document.getElementById") == "function"


def test_hostile_reasoning_tool_calls_and_languages_run_no_script(visit):
  page = visit()
  markdown = "\n\n".join(HOSTILE)
  call = {"index": 0, "id": "1", "function": {"name": MARKUP, "arguments": json.dumps({MARKUP: markdown})}}
  respond_with(page, "chat/completions", **events(
    delta(reasoning_content=markdown), chunk(f"```{MARKUP}\nx\n```"), delta("tool_calls", tool_calls=[call])))
  send(page, "hello")
  wait_for_answers(page)
  for summary in answers(page).locator("summary").all(): summary.click()
  expect_only_safe_elements(answers(page), markdown)
  expect(answers(page).locator("summary")).to_have_text(["Reasoning", f"Tool call: {MARKUP}"])
  assert "<script>broken=1</script>" in answers(page).locator("details").first.text_content()
  assert page.evaluate("window.broken") is None and len(page.frames) == 1


def test_content_security_policy_blocks_what_the_sanitizer_would_miss(browser, server):
  page = browser.new_page()
  requests = []
  page.route("http://e.test/**", lambda route: (requests.append(route), route.abort()))
  page.goto(server.url)
  blocked = page.evaluate("""async () => {
    const blocked = [], create = (tag, values) => Object.assign(document.createElement(tag), values)
    const next = () => new Promise(done => document.addEventListener("securitypolicyviolation", done, {once: true}))
    for (const attack of [() => { new Image().src = "http://e.test/pixel.png" },
                          () => { fetch("http://e.test/").catch(() => null) },
                          () => create("a", {href: "javascript:window.broken=1"}).click(),
                          () => { document.body.innerHTML = "<b>markup</b>" },
                          () => document.body.append(create("iframe", {src: "/"}))]) {
      const violation = next()
      try { attack() } catch { }
      blocked.push((await violation).effectiveDirective)
    }
    return blocked
  }""")
  assert [rule.partition("-")[0] for rule in blocked] == ["img", "connect", "script", "require", "frame"]
  assert page.evaluate("window.broken") is None and not requests
  page.close()


def test_finished_block_keeps_selection_and_later_link_target_resolves(visit):
  page = visit()
  page.add_init_script(FEED)
  page.reload()
  send(page, "hello")
  page.evaluate("feed('First *one* [here][a].\\n\\nSecond')")
  expect(answers(page).locator("p").last).to_have_text("Second")
  page.evaluate("getSelection().selectAllChildren(document.querySelector('article em'))")
  for text, last in ((" more", "Second more"), ("\\n\\n```\\nx = 1", "x = 1"), ("\\n```\\n\\nThird", "Third")):
    page.evaluate(f"feed('{text}')")
    expect(answers(page).locator("p, code").last).to_have_text(last)
  assert page.evaluate("`${getSelection()}`") == "one"
  expect(answers(page).get_by_role("link")).to_have_count(0)
  page.evaluate("feed('\\n\\n[a]: https://a.test/')")
  expect(answers(page).get_by_role("link")).to_have_text("here")
  page.evaluate("feed(null)")
  wait_for_answers(page)
  expect(answers(page).locator("> div > *")).to_have_count(4)


def test_long_answer_is_not_rendered_for_every_chunk(visit):
  page = visit()
  page.add_init_script(FEED)
  page.reload()
  send(page, "hello")
  num_renders = page.evaluate("""async () => {
    let renders = 0
    new MutationObserver(() => renders++).observe(document.querySelector("[aria-label=Model] > div"), {childList: true})
    for (let i = 0; i < 3000; i++) {
      feed(`word ${i} of a **block** that grows\n`)
      await 0
    }
    feed(null)
    return new Promise(done => {
      const look = () => document.querySelector("[aria-busy=true]") ? requestAnimationFrame(look) : done(renders)
      look()
    })
  }""")
  assert 0 < num_renders < 100, num_renders
  assert wait_for_answers(page).count("word") == 3000


def test_regenerate_replaces_the_last_answer(visit):
  page = visit()
  for i, text in enumerate(("one", "two", "three")):
    page.unroute("**/v1/chat/completions")
    respond_with(page, "chat/completions", **events(chunk(text, "stop")))
    if i < 2: send(page, f"question {i}")
    else: page.get_by_role("button", name="Regenerate").click()   # there is only one such button
    expect(answers(page).last.locator("> div")).to_have_text(text)
    wait_for_answers(page, min(i + 1, 2))
  assert page.posts[-1] == page.posts[-2]
  expect(page.get_by_label("Message")).to_be_focused()


def test_editing_a_question_drops_the_messages_after_it(visit):
  page = visit()
  respond_with(page, "chat/completions", **events(chunk("yes", "stop")))
  for i, question in enumerate(("first", "second", "third")):
    send(page, question)
    wait_for_answers(page, i + 1)
  page.get_by_label("Message").fill("a draft")
  page.get_by_role("article", name="You").nth(1).get_by_role("button", name="Edit").click()
  expect(page.get_by_role("status")).to_contain_text("Escape")
  page.keyboard.press("Escape")
  expect(page.get_by_label("Message")).to_have_value("a draft")
  expect(page.get_by_role("article")).to_have_count(6)
  edit(page, "second", "other")
  wait_for_answers(page, 2)
  expect(page.get_by_role("article", name="You").locator("div")).to_have_text(["first", "other"])
  assert [m["content"] for m in page.posts[-1][1]["messages"]] == ["first", "yes", "other"]
  send(page, "next")
  wait_for_answers(page, 3)
  assert [m["content"] for m in page.posts[-1][1]["messages"]] == ["first", "yes", "other", "yes", "next"]


def test_conversations_survive_reload_and_can_be_selected_and_deleted(visit):
  page = visit()
  for name in ("red", "green", "blue"):
    page.get_by_role("button", name="New chat").click()
    page.unroute("**/v1/chat/completions")
    respond_with(page, "chat/completions", **events(chunk(f"**{name}**", "stop")))
    send(page, f"what is {name}?")
    wait_for_answers(page)
  titles = ["what is blue?", "what is green?", "what is red?"]
  expect(chats(page).get_by_role("button", name="what is", exact=False)).to_have_count(6)
  page.get_by_role("button", name="what is green?", exact=True).click()
  expect(answers(page).locator("strong")).to_have_text("green")
  expect(page.get_by_label("Message")).to_be_focused()
  page.reload()
  expect(answers(page).locator("strong")).to_have_text("green")
  expect_stats(page, r"^1 tokens.* \d+\.\d\d s$")
  expect(chats(page)).to_have_text([f"{title}✕" for title in titles])
  expect(page.locator("nav [aria-current=true]")).to_have_text("what is green?")
  send(page, "more")
  wait_for_answers(page, 2)
  assert [m["content"] for m in page.posts[-1][1]["messages"]] == ["what is green?", "**green**", "more"]
  page.once("dialog", lambda dialog: dialog.dismiss())
  page.get_by_role("button", name="Delete what is green?").click()
  expect(chats(page)).to_have_count(3)
  page.on("dialog", lambda dialog: dialog.accept())
  page.get_by_role("button", name="Delete what is red?").click()
  expect(answers(page)).to_have_count(2)
  page.get_by_role("button", name="Delete what is green?").click()
  expect(page.get_by_role("article")).to_have_count(0)
  page.reload()
  expect(chats(page)).to_have_text(["what is blue?✕"])
  other = page.context.new_page()
  other.goto(page.url)
  expect(chats(other)).to_have_text(["what is blue?✕"])
  expect(other.get_by_role("article")).to_have_count(0)
  other.close()


def test_reload_during_an_answer_keeps_its_text(visit):
  page = visit()
  page.add_init_script(FEED)
  page.reload()
  send(page, "first")
  expect(page.get_by_role("button", name="Stop")).to_be_visible()
  page.reload()
  expect(page.get_by_label("Message")).to_have_value("first")
  expect(page.get_by_role("article")).to_have_count(0)
  page.get_by_role("button", name="Send").click()
  expect(page.get_by_role("button", name="Stop")).to_be_visible()
  page.evaluate("feed('half an')")
  expect(answers(page).locator("p")).to_have_text("half an")
  page.reload()
  assert wait_for_answers(page) == "half an"
  expect(chats(page)).to_have_count(1)


def test_new_chat_during_an_answer_keeps_its_text(visit):
  page = visit()
  page.add_init_script(FEED)
  page.reload()
  send(page, "first")
  expect(page.get_by_role("button", name="Stop")).to_be_visible()
  page.evaluate("feed('half an')")
  expect(answers(page).locator("p")).to_have_text("half an")
  page.get_by_role("button", name="New chat").click()
  expect(page.get_by_role("article")).to_have_count(0)
  send(page, "second")
  page.evaluate("feed('whole')")
  page.evaluate("feed(null)")
  assert wait_for_answers(page) == "whole"
  page.reload()
  page.get_by_role("button", name="first", exact=True).click()
  assert wait_for_answers(page) == "half an"
  expect(answers(page).locator("small")).to_contain_text("stopped")


@pytest.mark.parametrize("fault", ["blocked", "full", "corrupt"])
def test_failed_storage_shows_a_notice_and_page_works(visit, fault):
  page = visit()
  page.add_init_script({
    "blocked": """for (const name of ["localStorage", "sessionStorage"])
                    Object.defineProperty(window, name, {get() { throw new DOMException("no") }})""",
    "full": "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }",
    "corrupt": """for (const [name, text] of [["chat 1", "{"], ["chat 2", "3"], ["chat 3", "[{}]"], ["settings", "3"]])
                    localStorage.setItem(`tinyvllm ${name}`, text)""",
  }[fault])
  page.reload()
  if fault == "blocked": settings(page, api_key=KEY)
  respond_with(page, "chat/completions", **events(chunk("yes", "stop")))
  send(page, "hello")
  assert wait_for_answers(page) == "yes"
  if fault != "corrupt": expect(page.get_by_role("status")).to_contain_text("lost when the page is closed")
  expect(chats(page)).to_have_text(["hello✕"])
  page.get_by_role("button", name="New chat").click()
  page.get_by_role("button", name="hello", exact=True).click()
  assert wait_for_answers(page) == "yes"


def test_every_sampling_setting_is_sent_and_survives_reload(visit):
  page = visit()
  names = set(page.locator("fieldset [name]").evaluate_all("all => all.map(x => x.name)")) - {"system", "tools"}
  assert names == {field.name for field in dataclasses.fields(SamplingParams)} - NOT_ON_PAGE
  settings(page, max_tokens=9, min_tokens=1, temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, presence_penalty=0.1,
           frequency_penalty=0.2, repetition_penalty=1.1, seed=7, bad_words="ugly", system_prompt="be kind")
  page.locator("[name=stop]").fill("one\n\\n\\n")
  page.locator("[name=ignore_eos]").select_option("yes")
  page.locator("[name=skip_special_tokens]").select_option("no")
  send(page, "hello")
  wait_for_answers(page)
  expected_fields = {"max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
          "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "seed": 7,
          "bad_words": ["ugly"], "stop": ["one", "\n\n"], "ignore_eos": True, "skip_special_tokens": False,
          "include_stop_str_in_output": None}
  assert {name: page.posts[-1][1][name] for name in names} == expected_fields
  expect(page.get_by_role("alert")).to_have_count(0)
  page.reload()
  send(page, "again")
  wait_for_answers(page, 2)
  assert {name: page.posts[-1][1][name] for name in names} == expected_fields
  assert page.posts[-1][1]["messages"][0] == {"role": "system", "content": "be kind"}


def test_empty_chat_has_three_examples_that_are_sent_on_click(visit):
  page = visit()
  respond_with(page, "chat/completions", **events(chunk("yes", "stop")))
  examples = page.get_by_role("region", name="Examples").get_by_role("button")
  expect(examples).to_have_count(3)
  for i, words in enumerate(examples.all_text_contents()):
    examples.nth(i).click()
    wait_for_answers(page)
    assert page.posts[-1][1]["messages"] == [{"role": "user", "content": words}]
    expect(examples).to_have_count(0)
    page.get_by_role("button", name="New chat").click()
    expect(examples).to_have_count(3)


def test_send_button_and_escape_stop_the_answer(visit, server):
  page = visit()
  settings(page, max_tokens=LONG)
  button = page.locator("form").get_by_role("button")
  for stop in (lambda: button.click(), lambda: page.keyboard.press("Escape")):
    expect(button).to_have_accessible_name("Send")
    page.get_by_label("Message").fill("hello")
    button.dblclick()
    expect(button).to_have_accessible_name("Stop")
    wait_until(lambda: answer_text(page), "some text", TIMEOUT)
    stop()
    expect(button).to_have_accessible_name("Send")
    idle(server)
    expect(page.get_by_label("Message")).to_be_focused()


def test_every_control_is_reachable_with_the_keyboard(visit):
  page = visit()
  respond_with(page, "chat/completions", **events(chunk(ANSWER, "stop")))
  send(page, "hello")
  wait_for_answers(page)
  focused = []
  while focused.count("BODY") < 2:   # from the current focus to the end of the page, then once around
    page.keyboard.press("Tab")
    focused.append(page.evaluate("""() => {
      const x = document.activeElement
      if (x === document.body) return "BODY"
      return x.ariaLabel ?? (x.textContent.trim() || x.closest("label")?.textContent.trim())
    }"""))
    assert len(focused) < 100
  assert {"Chats", "New chat", "Search chats", "hello", "Delete hello", "Import", "Export all",
          "Settings", "Conversation", "Copy", "Edit", "Copy code", "Code",
          "Table", "the docs", "Regenerate", "Message", "Send"} <= set(focused), focused
  assert len([*page.locator("fieldset [name], #key").all()]) == 18


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, PHONE, {**PHONE, "color_scheme": "dark"}],
                         ids=["light", "dark", "phone", "dark phone"])
def test_axe_finds_no_accessibility_violations(visit, options):
  page = visit(**options)
  def check(state):
    results = Axe().run(page)
    assert not results.violations_count, f"{state}: {results.generate_report()}"
  serve_models(page, "first", "second")
  page.reload()
  settings(page)
  check("settings open")
  page.get_by_text("Settings", exact=True).click()
  check("empty")
  text = f"{ANSWER}\n{ALL_CODE}"
  respond_with(page, "chat/completions", **events(
    delta(reasoning=text), chunk(text), *(delta(tool_calls=[call]) for call in CALLS), delta("tool_calls")))
  send(page, "hello")
  wait_for_answers(page)
  check("a conversation")
  for summary in answers(page).locator("summary").all(): summary.click()
  check("reasoning and tool calls open")
  if options.get("is_mobile"): page.get_by_text("Chats", exact=True).tap()
  check("the list of chats")
  page.get_by_label("Search chats").fill("nothing like it")
  check("no chat found")
  page.get_by_label("Search chats").fill("")
  if options.get("is_mobile"): page.get_by_text("Chats", exact=True).tap()
  page.get_by_role("button", name="Edit").click()
  check("editing")
  page.keyboard.press("Escape")
  page.unroute("**/v1/chat/completions")
  respond_with(page, "chat/completions", **error_response(429, "at most 2 sequences may wait"))
  send(page, "more")
  expect(page.get_by_role("alert")).to_be_visible()
  check("an error")


def spans(part):
  """Return the class and text of each colored span."""
  return [tuple(x) for x in part.locator("code span").evaluate_all("all => all.map(x => [x.className, x.textContent])")]


def test_code_is_highlighted_by_its_language(visit):
  page = visit()
  respond_with(page, "chat/completions", **events(chunk(f"- item\n\n  ```py\n  if 1\n  ```\n\n{ALL_CODE}", "stop")))
  send(page, "hello")
  wait_for_answers(page)
  nested, *blocks = answers(page).locator(".code").all()
  assert spans(nested) == [("keyword", "if"), ("number", "1")]
  for (language, (source, expected_spans)), block in zip(CODE.items(), blocks, strict=True):
    assert spans(block) == expected_spans, language
    assert block.locator("pre").text_content() == source + "\n"
    expect(block.locator("small")).to_have_text(language)
  colors = blocks[0].locator("code, code span").evaluate_all("all => all.map(x => getComputedStyle(x).color)")
  assert len(set(colors)) == 6, "five colors and the text's"


@pytest.mark.parametrize("deltas", [
  [{"reasoning_content": "plan "}, {"reasoning_content": "**one**"}, {"content": "the answer"}],
  [{"reasoning": "plan **one**"}, {"content": "the answer"}],
  [{"content": FOLDED[:3]}, {"content": FOLDED[3:20]}, {"content": FOLDED[20:]}],
  [{"content": FOLDED.removeprefix("<think>")}],   # the chat template has put <think> into the prompt
], ids=["reasoning_content", "reasoning", "inline", "inline without start"])
def test_reasoning_is_collapsed_and_not_sent_again(visit, deltas):
  page = visit(permissions=["clipboard-read", "clipboard-write"])
  respond_with(page, "chat/completions", **events(*(delta(**fields) for fields in deltas), delta("stop")))
  send(page, "hello")
  assert wait_for_answers(page) == "the answer"
  thought = answers(page).get_by_text("plan one")
  expect(thought).to_be_hidden()
  answers(page).get_by_text("Reasoning", exact=True).click()
  expect(thought).to_be_visible()
  expect(thought.locator("strong")).to_have_text("one")
  answers(page).get_by_role("button", name="Copy").click()
  assert page.evaluate("navigator.clipboard.readText()") == "the answer"
  page.reload()
  assert wait_for_answers(page) == "the answer"
  expect(thought).to_be_hidden()
  send(page, "more")
  wait_for_answers(page, 2)
  assert page.posts[-1][1]["messages"][1] == {"role": "assistant", "content": "the answer"}


@pytest.mark.parametrize("text", ["Write </think> to end.", "Use\n\n```\n<think>\n</think>\n```"])
def test_answer_that_mentions_think_tags_is_not_folded(visit, text):
  page = visit()
  respond_with(page, "chat/completions", **events(chunk(text, "stop")))
  send(page, "hello")
  assert "</think>" in wait_for_answers(page)
  expect(answers(page).locator("details")).to_have_count(0)


def test_open_reasoning_stays_open_while_it_streams(visit):
  page = visit()
  page.add_init_script(FEED)
  page.reload()
  send(page, "hello")
  page.evaluate("feed('<think>one')")
  answers(page).get_by_text("Reasoning", exact=True).click()
  page.evaluate("feed(' two</think>done')")
  expect(answers(page).locator("> div")).to_have_text("done")
  expect(answers(page).get_by_text("one two")).to_be_visible()
  page.evaluate("feed(null)")
  assert wait_for_answers(page) == "done"
  expect(answers(page).get_by_text("one two")).to_be_visible()


def test_tool_calls_are_shown_and_sent_again(visit):
  page = visit()
  tools = [{"type": "function", "function": {"name": "get_weather"}}]
  settings(page, tools=json.dumps(tools))
  respond_with(page, "chat/completions", **events(*(delta(tool_calls=[call]) for call in CALLS), delta("tool_calls")))
  send(page, "hello")
  assert wait_for_answers(page) == ""
  assert page.posts[-1][1]["tools"] == tools
  for reloaded in (False, True):
    if reloaded: page.reload()
    calls = answers(page).locator("details")
    expect(calls.locator("summary")).to_have_text(["Tool call: get_weather", "Tool call: get_time"])
    expect(calls.locator("pre").first).to_be_hidden()
    calls.locator("summary").first.click()
    expect(calls.locator("pre").first).to_be_visible()
    assert calls.locator("pre").first.text_content() == '{\n  "city": "Paris",\n  "days": 3\n}'
  page.unroute("**/v1/chat/completions")
  settings(page, tools="")
  send(page, "sunny")
  assert wait_for_answers(page, 2), "the server accepts the conversation"
  called = [{"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'},
            {"name": "get_time", "arguments": "{}"}]
  assert "tools" not in page.posts[-1][1]
  assert page.posts[-1][1]["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [
    {"id": f"call-{i}", "type": "function", "function": function} for i, function in enumerate(called, 1)]}


def test_invalid_tools_show_an_error_and_keep_the_question(visit):
  page = visit()
  for tools in ("{", '{"type": "function"}'):
    settings(page, tools=tools)
    send(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("Tools must be a JSON list")
    expect(page.get_by_label("Message")).to_have_value("hello")
  assert not page.posts


def start_chats(page, *questions):
  """Start a chat with each question. The answer is the question in capital letters."""
  for question in questions:
    page.get_by_role("button", name="New chat").click()
    page.unroute("**/v1/chat/completions")
    respond_with(page, "chat/completions", **events(chunk(question.upper(), "stop")))
    send(page, question)
    wait_for_answers(page)


def test_search_finds_chats_by_title_and_text(visit):
  page = visit()
  start_chats(page, "red apple", "green pear")
  search = page.get_by_label("Search chats")
  for words, titles in (("APPLE", ["red apple✕"]), (" pear ", ["green pear✕"]), ("re", ["green pear✕", "red apple✕"]),
                        ("PEAR.", [])):
    search.fill(words)
    expect(chats(page)).to_have_text(titles)
    expect(page.get_by_text("No chat has this text")).to_be_visible(visible=not titles)
  page.unroute("**/v1/chat/completions")
  respond_with(page, "chat/completions", **events(chunk("only in the **answer**", "stop")))
  search.fill("")
  send(page, "more")
  wait_for_answers(page, 2)
  page.keyboard.press("Control+k")
  page.keyboard.type("in the **ANSWER")
  expect(chats(page)).to_have_text(["green pear✕"])
  page.keyboard.press("Escape")
  expect(search).to_have_value("")
  expect(chats(page)).to_have_count(2)


def export(page, name, path):
  """Click an export button, and save its file."""
  with page.expect_download() as download: page.get_by_role("button", name=name, exact=True).click()
  assert re.fullmatch(r"tinyvllm-chats-\d{4}-\d\d-\d\d\.json", download.value.suggested_filename)
  download.value.save_as(path)
  return json.loads(path.read_text())


def import_file(page, path):
  if not page.get_by_role("button", name="Import").is_visible(): page.get_by_text("Chats", exact=True).click()
  with page.expect_file_chooser() as chooser: page.get_by_role("button", name="Import").click()
  chooser.value.set_files(path)


def test_exported_chats_can_be_imported_once(visit, tmp_path):
  page = visit()
  expect(page.get_by_role("button", name="Export all")).to_be_disabled()
  start_chats(page, "red apple", "green pear")
  page.unroute("**/v1/chat/completions")
  respond_with(page, "chat/completions", **events(
    delta(reasoning_content="plan one"), chunk("done"), delta("tool_calls", tool_calls=CALLS)))
  send(page, "more")
  wait_for_answers(page, 2)
  file = export(page, "Export all", tmp_path / "chats.json")
  assert file["format"] == "tinyvllm chats"
  assert [[m["content"] for m in one["messages"]] for one in file["chats"]] == [
    ["red apple", "RED APPLE"], ["green pear", "GREEN PEAR", "more", "done"]]
  page.get_by_label("Search chats").fill("apple")
  assert export(page, "Export 1 found", tmp_path / "found.json")["chats"] == file["chats"][:1]
  other = visit(**PHONE)
  import_file(other, tmp_path / "found.json")
  expect(other.get_by_role("status")).to_have_text("1 of 1 chats imported.")
  for imported in ("1 of 2", "0 of 2"):
    import_file(other, tmp_path / "chats.json")
    expect(other.get_by_role("status")).to_have_text(f"{imported} chats imported, the others are here already.")
  other.reload()
  other.get_by_text("Chats", exact=True).tap()
  expect(chats(other)).to_have_text(["green pear✕", "red apple✕"])
  other.get_by_role("button", name="green pear", exact=True).click()
  assert wait_for_answers(other, 2) == "done"
  expect(answers(other).last.locator("summary")).to_have_text(
    ["Reasoning", "Tool call: get_weather", "Tool call: get_time"])
  other.get_by_text("Chats", exact=True).tap()
  assert export(other, "Export all", tmp_path / "again.json") == file


QUESTION, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("content, error", [
  ("{", "it is not JSON"), (None, "no list of chats"), ({"format": "other", "chats": []}, "no list of chats"),
  ({"chats": []}, "no list of chats"), ({"format": "tinyvllm chats", "chats": {}}, "no list of chats"),
  ([None], "chat 1, messages must be a list"), ([{"messages": []}], "chat 1, messages must be a list"),
  ([[QUESTION, REPLY], [REPLY]], 'chat 2, message 1: role must be "user"'),
  ([[QUESTION, QUESTION]], 'chat 1, message 2: role must be "assistant"'),
  ([[QUESTION, None]], 'message 2: role must be "assistant"'),
  ([[{"role": "user", "content": ["q"]}]], "message 1: content must be a string"),
  ([[QUESTION, {**REPLY, "reasoning": 1}]], "message 2: reasoning and stats must be strings"),
  ([[QUESTION, {**REPLY, "calls": [{"name": "f"}]}]], "message 2: calls must be a list"),
], ids=str)
def test_import_of_a_wrong_file_shows_an_error_and_changes_nothing(visit, tmp_path, content, error):
  page = visit()
  if isinstance(content, list):
    listed = [{"messages": one} if isinstance(one, list) else one for one in content]
    content = {"format": "tinyvllm chats", "chats": [{"messages": [QUESTION, REPLY]}, *listed][-len(listed):]}
  (tmp_path / "wrong.json").write_text(content if isinstance(content, str) else json.dumps(content))
  import_file(page, tmp_path / "wrong.json")
  expect(page.get_by_role("status")).to_contain_text("wrong.json was not imported: ")
  expect(page.get_by_role("status")).to_contain_text(error)
  expect(chats(page)).to_have_count(0)
  assert not page.evaluate("Object.keys(localStorage).filter(x => x.includes('chat'))")


def serve_models(page, *names):
  page.unroute("**/v1/models")
  respond_with(page, "models", json={"object": "list", "data": [{"id": name, "object": "model"} for name in names]})


def test_model_picker_appears_for_several_models_and_selects_one(visit):
  page = visit()
  picker = page.get_by_role("combobox", name="Model", exact=True)
  expect(picker).to_have_count(0)
  respond_with(page, "chat/completions", **events(chunk("yes", "stop")))
  send(page, "hello")
  wait_for_answers(page)
  assert "model" not in page.posts[-1][1]
  serve_models(page, "words", "adapter")
  page.reload()
  expect(picker).to_have_value("words")
  picker.select_option("adapter")
  page.reload()
  expect(picker).to_have_value("adapter")
  send(page, "again")
  wait_for_answers(page, 2)
  assert page.posts[-1][1]["model"] == "adapter"
  serve_models(page, "words", "other")
  page.reload()
  expect(picker).to_have_value("words")


def test_theme_setting_overrides_prefers_color_scheme(visit):
  page = visit(color_scheme="light")
  def is_dark(): return page.locator("body").evaluate("x => getComputedStyle(x).backgroundColor") == "rgb(21, 23, 27)"
  assert not is_dark()
  page.get_by_label("Theme").select_option("dark")
  assert is_dark()
  page.reload()
  assert is_dark()
  settings(page)
  page.get_by_label("Theme").select_option("system")
  assert not is_dark()


def test_drawer_on_a_phone_closes_by_escape_tap_outside_and_button(visit):
  page = visit(**PHONE)
  toggle, new = page.get_by_role("button", name="Chats"), page.get_by_role("button", name="New chat")
  for close in (lambda: page.keyboard.press("Escape"), lambda: page.touchscreen.tap(350, 400), toggle.tap):
    expect(toggle).to_have_attribute("aria-expanded", "false")
    toggle.tap()
    expect(toggle).to_have_attribute("aria-expanded", "true")
    expect(new).to_be_focused()
    page.locator("main").evaluate("x => x.querySelector('textarea').focus()")
    expect(new).to_be_focused()   # the rest of the page is inert
    close()
    expect(new).to_be_hidden()
  page.get_by_label("Message").focus()
  expect(page.get_by_label("Message")).to_be_focused()


def test_list_of_chats_can_be_hidden_on_a_wide_page(visit):
  page = visit()
  toggle, new = page.get_by_role("button", name="Chats"), page.get_by_role("button", name="New chat")
  expect(new).to_be_visible()
  toggle.click()
  expect(new).to_be_hidden()
  toggle.click()
  expect(new).to_be_visible()
  page.set_viewport_size({"width": 500, "height": 700})
  expect(new).to_be_hidden()
