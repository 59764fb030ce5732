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
from reference import tiny_model
from server import Server, reserve_port, wait_until

from tinyvllm import SamplingParams

pytestmark = pytest.mark.browser
KEY, LONG = "a key", 8000   # LONG: more tokens than a test waits for
OWN_LINES = 477
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
ENGINE = ("--max-num-seqs", "1", "--max-num-batched-tokens", "1")   # one graph to capture
PHONE = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}
PAGE = Path(__file__).parents[1] / "examples/tinyvllm_extra/server/chat.html"
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
""".strip().splitlines()]
TAGS = {"a", "blockquote", "br", "button", "code", "del", "div", "em", "h2", "hr", "li", "ol", "p", "pre", "strong",
         "table", "tbody", "td", "th", "thead", "tr", "ul"}
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


def chunk(text, finish_reason=None):
  return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}], "usage": None}


def page_only(text):
  """Return the page's HTML without the two bundled libraries."""
  return text.partition("<!-- Third-party code")[0]


def policy(text): return re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]


def test_page_is_one_short_file_without_external_resources(server):
  response = server.http().get("/")
  assert response.status_code == 200 and response.headers["content-type"].startswith("text/html"), "no key needed"
  text = page_only(response.text)
  assert text != response.text == PAGE.read_text() and len(response.text) < 130_000
  assert len(text.splitlines()) <= OWN_LINES
  assert max(map(len, text.splitlines())) <= 120
  assert not re.findall(r"(inner|outer|adjacent)HTML|document\.write|eval\(|https?:|\bsrc=|@import|url\(", text, re.I)
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
  assert len(sizes) == 18 and min(sizes) >= 16, "a phone zooms into anything smaller"


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
    elements = answers(page).evaluate("""article => [...article.firstElementChild.querySelectorAll("*")].map(x =>
      [x.localName, x.namespaceURI, Object.fromEntries([...x.attributes].map(a => [a.name, a.value]))])""")
    for tag, namespace, attributes in elements:
      assert tag in TAGS and namespace.endswith("/xhtml"), (markdown, tag)
      if tag in ("button", "div"): continue   # added by the page
      assert attributes.keys() <= {"href", "target", "rel", "align", "start"}, (markdown, attributes)
      if "href" in attributes:
        assert attributes["href"].startswith("http://e.test/"), (markdown, attributes)
        assert (attributes["target"], attributes["rel"]) == ("_blank", "noopener noreferrer"), markdown
    if defenses == "all" and markdown.startswith("<") and not re.search("[\n&]|<java", markdown):
      assert markdown in answer_text(page), "markup is shown as text"
  assert page.evaluate("window.broken") is None and len(page.frames) == 1
  assert page.url.rstrip("/#") == server.url and page.evaluate("typeof document.getElementById") == "function"


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
  names = set(page.locator("fieldset [name]").evaluate_all("all => all.map(x => x.name)")) - {"system"}
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
  assert {"Chats", "New chat", "hello", "Delete hello", "Settings", "Conversation", "Copy", "Edit", "Copy code", "Code",
          "Table", "the docs", "Regenerate", "Message", "Send"} <= set(focused), focused
  assert len([*page.locator("fieldset [name], #key").all()]) == 17


@pytest.mark.parametrize("options", [{}, {"color_scheme": "dark"}, PHONE, {**PHONE, "color_scheme": "dark"}],
                         ids=["light", "dark", "phone", "dark phone"])
def test_axe_finds_no_accessibility_violations(visit, options):
  page = visit(**options)
  def check(state):
    results = Axe().run(page)
    assert not results.violations_count, f"{state}: {results.generate_report()}"
  check("settings open")
  page.get_by_text("Settings", exact=True).click()
  check("empty")
  respond_with(page, "chat/completions", **events(chunk(ANSWER, "stop")))
  send(page, "hello")
  wait_for_answers(page)
  check("a conversation")
  if options.get("is_mobile"):
    page.get_by_text("Chats", exact=True).click()
    check("the list of chats")
  page.get_by_role("button", name="Edit").click()
  check("editing")
  page.keyboard.press("Escape")
  page.unroute("**/v1/chat/completions")
  respond_with(page, "chat/completions", **error_response(429, "at most 2 sequences may wait"))
  send(page, "more")
  expect(page.get_by_role("alert")).to_be_visible()
  check("an error")
