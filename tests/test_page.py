"""The chat page in a real browser, Chromium without a window, against a real server with a key."""
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
from server import Server, held_port, wait_until

from tinyvllm import SamplingParams

pytestmark = pytest.mark.browser
KEY, LONG = "a key", 8000   # LONG: more tokens than are streamed while a test looks
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
# What must not get through, one a line: markup by itself, Markdown, and samples in the manner of DOMPurify's own suite
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
SHOWN = {"a", "blockquote", "br", "button", "code", "del", "div", "em", "h2", "hr", "li", "ol", "p", "pre", "strong",
         "table", "tbody", "td", "th", "thead", "tr", "ul"}
# Settings of SamplingParams that are for programs: token ids, several samples, log probabilities, a schema
FOR_PROGRAMS = {"n", "stop_token_ids", "logit_bias", "allowed_token_ids", "logprobs", "prompt_logprobs",
                "structured_outputs"}
# A server that is fed by hand: feed("text") streams a piece, feed(null) ends the answer
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
SECONDS = 60.0
expect.set_options(timeout=SECONDS * 1000)


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
  """Opens the page as somebody new. After each test: no error in its script, no request to anywhere but its server."""
  contexts, requested, errors = [], [], []

  def visit(url=server.url, key=KEY, **options):
    context = browser.new_context(**options)
    contexts.append(context)
    page = context.new_page()
    page.posts = []   # (path, body) of each question

    def record(request):
      requested.append((url, request.url))
      if request.method == "POST": page.posts.append((urlsplit(request.url).path, request.post_data_json))
    page.on("request", record)
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(url)
    expect(page.locator("#model:not(:empty), #note:not(:empty)")).to_have_count(1)   # its name, or that it wants a key
    settings(page, temperature=0, max_tokens=20, api_key=key)
    return page
  yield visit
  for context in contexts: context.close()
  assert not errors
  assert requested
  assert not [there for here, there in requested if not there.startswith((here + "/", "data:"))]


def settings(page, **values):
  """Opens the settings, and fills in what is given."""
  if not page.get_by_label("System prompt").is_visible(): page.get_by_text("Settings", exact=True).click()
  for name, value in values.items():
    page.get_by_label(name.replace("_", " "), exact=False).fill(str(value))
  page.get_by_label("Message").focus()


def send(page, text):
  page.get_by_label("Message").fill(text)
  page.get_by_role("button", name="Send").click()


def answers(page): return page.get_by_role("article", name="Model")
def answer_text(page): return answers(page).last.locator("> div").text_content().removesuffix("\n")


def finished(page, count=1):
  """Waits until so many answers are there and none is streamed any more. The last one's text."""
  expect(answers(page)).to_have_count(count)
  expect(page.get_by_role("button", name="Send")).to_be_visible()
  return answer_text(page)


def expect_stats(page, pattern):
  expect(answers(page).locator("small")).to_have_text(re.compile(pattern))


def idle(server):
  wait_until(lambda: server.metrics()["num_requests_running"] == 0, "no request runs", SECONDS)


def aborted(server): return server.metrics().get("request_success_total{finished_reason=abort}", 0)


def expected(server, messages, **fields):
  """The server's answer in one piece."""
  body = {"messages": messages, "temperature": 0, **fields}
  answer = server.http().post("/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {KEY}"})
  return answer.raise_for_status().json()["choices"][0]["message"]["content"]


def events(*events, done=True):
  """A canned stream."""
  body = "".join(f"data: {event}\n\n" for event in [*map(json.dumps, events), *["[DONE]"] * done])
  return {"content_type": "text/event-stream", "body": body}


def refusal(status, message):
  return {"status": status, "content_type": "application/json", "body": json.dumps({"error": {"message": message}})}


def replace(page, path, **answer):
  """The page gets this answer in place of the server's."""
  page.route(f"**/v1/{path}", lambda route: route.fulfill(**answer))


def piece(text, finish_reason=None):
  return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}], "usage": None}


def own(text):
  """The page without its two libraries."""
  return text.partition("<!-- Third-party code from here on")[0]


def policy(text): return re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]


def test_the_page_is_one_file_whose_own_part_is_short_makes_no_markup_and_names_no_other_place(server):
  response = server.http().get("/")
  assert response.status_code == 200 and response.headers["content-type"].startswith("text/html"), "without a key"
  text = own(response.text)
  assert text != response.text == PAGE.read_text() and len(response.text) < 130_000
  assert len(text.splitlines()) <= OWN_LINES
  assert max(map(len, text.splitlines())) <= 120
  assert not re.findall(r"(inner|outer|adjacent)HTML|document\.write|eval\(|https?:|\bsrc=|@import|url\(", text, re.I)
  assert not re.search(r"<script[^>]*src|<link[^>]*href=\"(?!data:)", response.text)


def test_the_policy_runs_the_three_scripts_and_nothing_else_and_asks_its_server_alone():
  rules = dict(rule.split(maxsplit=1) for rule in policy(PAGE.read_text()).split(";"))
  digests = [hashlib.sha256(script.encode()).digest() for script in SCRIPT.findall(PAGE.read_text())]
  hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
  assert len(digests) == 3 and " ".join(rules.pop("script-src").split()) == hashes, "the hashes as they are now"
  assert rules == {"default-src": "'none'", "connect-src": "'self'", "img-src": "data:", "style-src": "'unsafe-inline'",
                   "base-uri": "'none'", "form-action": "'none'", "require-trusted-types-for": "'script'",
                   "trusted-types": "dompurify"}


def test_the_libraries_are_of_the_versions_that_are_named_and_stand_behind_their_licences(visit):
  comments = re.findall(r"<!-- (\w+) (\d+\.\d+\.\d+)(.*?)-->\n<script>(.*?)</script>", PAGE.read_text(), re.S)
  (marked, version, licence, code), (purify, its_version, its_licence, _) = comments
  assert (marked, purify) == ("marked", "DOMPurify")
  assert f"marked v{version} - a markdown parser" in code
  assert visit().evaluate("DOMPurify.version") == its_version
  for words in ("Copyright (c) 2018+, MarkedJS", "Permission is hereby granted, free of charge", "John Gruber"):
    assert words in licence
  for words in ("Apache License", "Version 2.0, January 2004", "END OF TERMS AND CONDITIONS", "under the License."):
    assert words in its_licence


def test_an_answer_grows_while_it_is_streamed_and_is_the_servers(visit, server):
  page = visit()
  settings(page, max_tokens=400)
  page.evaluate("""() => {
    window.seen = []
    const look = () => seen.push([document.querySelector("[aria-label=Model] > div")?.textContent.length ?? 0,
                                  document.getElementById("log").ariaBusy])
    new MutationObserver(look).observe(document.getElementById("log"), {childList: true, subtree: true})
  }""")
  send(page, "hello")
  text = finished(page)
  assert text == expected(server, [{"role": "user", "content": "hello"}], max_tokens=400)
  lengths = {length for length, busy in page.evaluate("seen") if busy == "true"}
  assert len(lengths) > 3 and {n for n in lengths if 0 < n < len(text)}, lengths
  assert page.get_by_role("log").get_attribute("aria-busy") == "false"
  assert page.get_by_role("log").get_attribute("aria-live") == "polite"
  expect_stats(page, r"^400 tokens, \d+\.\d tokens/s, first token after \d+\.\d\d s \(length\)$")


def test_the_conversation_is_sent_with_the_settings_and_a_new_chat_forgets_it(visit, server):
  page = visit()
  settings(page, system_prompt="be kind", temperature=0, max_tokens=7)
  send(page, "one")
  first = finished(page)
  send(page, "two")
  second = finished(page, 2)
  system, one, two = ({"role": r, "content": c} for r, c in (("system", "be kind"), ("user", "one"), ("user", "two")))
  messages = [system, one, {"role": "assistant", "content": first}, two]
  assert [body["messages"] for _, body in page.posts] == [[system, one], messages]
  assert second == expected(server, messages, max_tokens=7)
  assert [(path, body["temperature"], body["max_tokens"]) for path, body in page.posts] == [
    ("/v1/chat/completions", 0, 7)] * 2
  page.get_by_role("button", name="New chat").click()
  expect(page.get_by_role("article")).to_have_count(0)
  settings(page, system_prompt="", temperature="", max_tokens="")
  replace(page, "chat/completions", **events(piece("three", "stop")))
  send(page, "two")
  assert finished(page) == "three"
  assert page.posts[-1][1]["messages"] == [two]
  assert page.posts[-1][1]["temperature"] is page.posts[-1][1]["max_tokens"] is None, "the server's default"


def test_stop_ends_the_request_on_the_server_and_the_conversation_goes_on(visit, server):
  page = visit()
  settings(page, max_tokens=LONG)
  send(page, "hello")
  wait_until(lambda: len(answer_text(page)) > 20, "some text", SECONDS)
  assert server.metrics()["num_requests_running"] == 1
  before = aborted(server)
  expect(page.get_by_role("button", name="Send")).to_have_count(0)
  page.get_by_label("Message").fill("too early")
  page.get_by_label("Message").press("Enter")
  page.get_by_role("button", name="Stop").click()
  text = finished(page)
  idle(server)
  assert answer_text(page) == text
  wait_until(lambda: aborted(server) == before + 1, "it was aborted", SECONDS)
  expect_stats(page, r"^\d+ tokens, \d+\.\d tokens/s, first token .* s, stopped$")
  expect(page.get_by_role("alert")).to_have_count(0)
  expect(page.get_by_label("Message")).to_be_focused()
  expect(page.get_by_label("Message")).to_have_value("too early")
  settings(page, max_tokens=5)
  send(page, "again")
  assert finished(page, 2)
  assert [m["content"] for m in page.posts[-1][1]["messages"]] == ["hello", text, "again"]


def test_a_new_chat_and_a_closed_page_end_the_request_on_the_server(visit, server):
  page = visit()
  settings(page, max_tokens=LONG)
  send(page, "hello")
  wait_until(lambda: answer_text(page), "some text", SECONDS)
  page.get_by_role("button", name="New chat").click()
  idle(server)
  expect(page.get_by_role("article")).to_have_count(0)
  expect(page.get_by_label("Message")).to_have_value("")
  send(page, "again")
  wait_until(lambda: answer_text(page), "some text", SECONDS)
  assert page.posts[-1][1]["messages"] == [{"role": "user", "content": "again"}]
  assert server.metrics()["num_requests_running"] == 1
  page.close()
  idle(server)


def test_a_wrong_key_is_shown_as_the_servers_error_and_the_question_can_be_asked_again(visit, server):
  page = visit(key="wrong")
  said = server.http().get("/v1/models").json()["error"]["message"]
  expect(page.get_by_role("status")).to_have_text(f"401: {said}")
  send(page, "hello")
  expect(page.get_by_role("alert")).to_have_text(f"401: {said}")
  expect(page.get_by_label("Message")).to_have_value("hello")
  settings(page, api_key=KEY)
  expect(page.get_by_role("heading", level=1)).to_have_text("tinyvllm words")
  page.get_by_role("button", name="Send").click()
  assert finished(page) == expected(server, [{"role": "user", "content": "hello"}], max_tokens=20)
  page.reload()
  assert page.get_by_label("API key").input_value() == KEY, "kept for the session"
  assert page.evaluate("[...Object.values(localStorage), document.cookie].filter(x => x.includes('a key'))") == []


def test_a_field_that_the_server_refuses_is_shown_with_its_message(visit):
  page = visit()
  settings(page, temperature=-1)
  send(page, "hello")
  expect(page.get_by_role("alert")).to_have_text(re.compile(r"^400: .*temperature"))


def test_enter_sends_and_shift_enter_breaks_the_line(visit):
  page = visit()
  message = page.get_by_label("Message")
  message.press_sequentially("one")
  message.press("Shift+Enter")
  message.press_sequentially("two")
  expect(message).to_have_value("one\ntwo")
  message.evaluate("x => x.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true}))")
  assert not page.posts, "Enter that ends an input method's composition"
  message.press("Enter")
  expect(message).to_have_value("")
  finished(page)
  assert [m["content"] for m in page.posts[0][1]["messages"]] == ["one\ntwo"]
  message.press("Enter")
  message.fill(" \n ")
  message.press("Enter")
  expect(page.get_by_role("article", name="You")).to_have_count(1)


def test_the_end_of_the_answer_stays_in_sight_until_the_reader_scrolls_up(visit, server):
  page = visit(viewport={"width": 400, "height": 500})
  settings(page, max_tokens=LONG)
  page.get_by_text("Settings", exact=True).click()
  send(page, "hello")

  def place(name): return page.get_by_role("log").evaluate(f"x => x.{name}")
  def below(): return place("scrollHeight - x.scrollTop - x.clientHeight")

  def grown():
    length = len(answer_text(page))
    wait_until(lambda: len(answer_text(page)) > length + 50, "more text", SECONDS)
  wait_until(lambda: place("scrollTop") > 100, "it follows the text", SECONDS)
  page.get_by_role("log").hover()

  def wheel(delta, there):
    page.mouse.wheel(0, delta)
    return there()
  wait_until(lambda: wheel(-9999, lambda: place("scrollTop") == 0), "at the top", SECONDS)
  grown()
  assert place("scrollTop") == 0
  wait_until(lambda: wheel(99999, lambda: below() < 40), "at the end", SECONDS)
  grown()
  assert below() < 40
  assert server.metrics()["num_requests_running"] == 1
  page.get_by_role("button", name="Stop").click()
  idle(server)


def test_markup_is_shown_as_text_whoever_wrote_it(visit):
  page = visit()
  replace(page, "chat/completions", **events(piece(MARKUP[:9]), piece(MARKUP[9:], "stop")))
  send(page, MARKUP)
  assert finished(page) == MARKUP
  assert page.get_by_role("article", name="You").locator("div").text_content() == MARKUP
  replace(page, "**", **refusal(400, MARKUP))
  send(page, "more")
  expect(page.get_by_role("alert")).to_have_text(f"400: {MARKUP}")
  settings(page, api_key="another")
  expect(page.get_by_role("status")).to_have_text(f"400: {MARKUP}")
  page.get_by_role("button", name="New chat").click()
  assert MARKUP[:60] in page.get_by_role("navigation").text_content()
  assert not page.locator("main img, main script, main b, nav img, nav b").count()
  assert page.evaluate("window.broken") is None


def test_the_count_of_tokens_is_the_servers_where_an_event_has_several(visit):
  page = visit()
  usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}}
  replace(page, "chat/completions", **events(piece("the cat sat"), piece(" on the mat", "stop"), usage))
  send(page, "hello")
  assert finished(page) == "the cat sat on the mat"
  # Events that come at once have no time to divide by
  expect_stats(page, r"^9 tokens(, \d+\.\d tokens/s)?, first token after \d+\.\d\d s$")


def test_a_stream_that_breaks_off_keeps_its_text_and_says_why(visit):
  page = visit()
  failed = {"error": {"message": "a step failed", "type": "InternalServerError", "param": None, "code": 500}}
  for canned, why in ((events(piece("some"), failed), "a step failed"),
                      (events(piece("some"), done=False), "The connection closed before the answer was complete.")):
    replace(page, "chat/completions", **canned)
    send(page, "hello")
    expect(page.get_by_role("alert")).to_have_text(why)
    assert finished(page) == "some"
    page.get_by_role("button", name="New chat").click()
  page.unroute("**/v1/chat/completions")
  asked = []
  page.route("**/v1/chat/completions", lambda route: (asked.append(route), route.abort()))
  send(page, "hello")
  expect(page.get_by_role("alert")).to_have_text("The server is not responding.")
  expect(page.get_by_label("Message")).to_have_value("hello")
  assert len(asked) == 2, "once more, as the server is there"


@pytest.fixture
def port():
  """Free whenever a server comes back to it."""
  with held_port() as holder: yield holder.getsockname()[1]


def test_a_server_that_goes_away_and_comes_back_is_said_and_then_answers_the_question(visit, words_folder, port):
  with Server(words_folder, *ENGINE, "--port", port) as server:
    page = visit(server.url, key="")
    server.stop()
  send(page, "hello")
  expect(page.get_by_role("status")).to_have_text("The server is not responding. Retrying automatically.")
  expect(page.get_by_role("button", name="Stop")).to_be_visible()
  with Server(words_folder, *ENGINE, "--port", port, ready=False):
    assert finished(page)
    expect(page.get_by_role("heading", level=1)).to_have_text(f"tinyvllm {words_folder.name}")
    expect(page.get_by_role("status")).not_to_contain_text("not responding")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_model_that_is_loading_is_said_and_the_question_waits_for_it(visit):
  page, state = visit(), {"status": 503}
  def either(route):
    if state["status"]: route.fulfill(**refusal(state["status"], state["message"]))
    else: route.continue_()
  page.route("**/v1/**", either)
  state["message"] = "the model is loading"
  page.reload()
  expect(page.get_by_role("status")).to_contain_text("not ready yet (503: the model is loading). Retrying")
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
  assert finished(page)
  expect(page.get_by_role("heading", level=1)).to_have_text("tinyvllm words")
  expect(page.get_by_role("status")).to_be_empty()


def test_a_full_queue_is_said_in_words_and_nothing_is_lost(visit):
  page = visit()
  replace(page, "chat/completions", **events(piece("one", "stop")))
  send(page, "first")
  finished(page)
  page.unroute("**/v1/chat/completions")
  replace(page, "chat/completions", **refusal(429, "at most 2 texts may wait"))
  send(page, "second")
  words = "The server's queue is full, try again later (429: at most 2 texts may wait)."
  expect(page.get_by_role("alert")).to_have_text(words)
  expect(page.get_by_label("Message")).to_have_value("second")
  page.get_by_role("button", name="Regenerate").click()
  expect(page.get_by_role("alert")).to_have_count(1)
  assert finished(page) == "one", "the old answer"
  expect(page.get_by_label("Message")).to_have_value("second")
  edit(page, "first", "another")
  expect(page.get_by_role("alert")).to_have_count(1)
  assert finished(page) == "one"
  expect(page.get_by_label("Message")).to_have_value("another")


def test_a_phone_shows_all_of_it_and_never_scrolls_sideways(visit):
  page = visit(**PHONE)
  settings(page, system_prompt="w" * 300)
  replace(page, "chat/completions", **events(piece(ANSWER), piece("y" * 500, "stop")))
  send(page, "x" * 500)
  finished(page)
  assert page.locator("pre").evaluate("x => x.parentElement.scrollWidth > x.parentElement.clientWidth")
  for opened in (True, False):
    assert page.get_by_label("API key").is_visible() == opened
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
  assert not page.get_by_role("button", name="New chat").is_visible(), "closed again"
  fields = page.locator("input, select, textarea")
  sizes = fields.evaluate_all("all => all.map(x => parseFloat(getComputedStyle(x).fontSize))")
  assert len(sizes) == 18 and min(sizes) >= 16, "a phone zooms into anything smaller"


def test_the_page_is_dark_where_the_reader_wants_it_dark(visit):
  def luminance(scheme):
    body = visit(color_scheme=scheme).locator("body")
    colors = body.evaluate("x => [getComputedStyle(x).backgroundColor, getComputedStyle(x).color]")
    return [sum(map(int, re.findall(r"\d+", color)[:3])) for color in colors]
  (light, on_light), (dark, on_dark) = luminance("light"), luminance("dark")
  assert light > 600 > 150 > on_light and dark < 150 < 600 < on_dark


def test_a_model_without_a_chat_template_continues_the_text_alone_and_the_page_says_so(visit, words_folder):
  with Server(words_folder, *ENGINE) as server:
    page = visit(server.url, key="")
    settings(page, system_prompt="not sent")
    send(page, "hello")
    first = finished(page)
    expect(page.get_by_role("status")).to_contain_text("no chat template")
    send(page, "the cat")
    second = finished(page, 2)
    assert [path for path, _ in page.posts] == ["/v1/chat/completions", *["/v1/completions"] * 2]
    assert [body["prompt"] for _, body in page.posts[1:]] == ["hello", "the cat"]
    body = {"prompt": ["hello", "the cat"], "temperature": 0, "max_tokens": 20}
    choices = server.http().post("/v1/completions", json=body).raise_for_status().json()["choices"]
    assert [c["text"] for c in choices] == [first, second]
    assert not page.get_by_role("alert").count()


def edit(page, question, words):
  """Changes a question that was asked, and asks it."""
  page.get_by_role("article", name="You").filter(has_text=question).get_by_role("button", name="Edit").click()
  expect(page.get_by_label("Message")).to_have_value(question)
  expect(page.get_by_label("Message")).to_be_focused()
  send(page, words)


def chats(page): return page.get_by_role("navigation", name="Chats").get_by_role("listitem")


def test_markdown_is_shown_as_what_it_means(visit):
  page = visit()
  replace(page, "chat/completions", **events(piece(ANSWER[:100]), piece(ANSWER[100:], "stop")))
  send(page, "hello")
  finished(page)
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
def test_an_answer_is_copied_as_markdown_and_each_block_of_code_by_itself(visit, clipboard):
  page = visit(permissions=["clipboard-read", "clipboard-write"])
  if not clipboard: page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject('plain http') }")
  replace(page, "chat/completions", **events(piece(ANSWER + "\n~~~\nlast\n~~~", "stop")))
  send(page, "hello\nyou")
  finished(page)
  def copied(button):
    page.evaluate("navigator.clipboard.__proto__.writeText.call(navigator.clipboard, '')")
    button.click()
    expect(page.get_by_role("status")).to_have_text("Copied.")
    expect(button).to_be_focused()
    return page.evaluate("navigator.clipboard.readText()")
  blocks = answers(page).get_by_role("button", name="Copy code")
  assert copied(blocks.first) == ANSWER.partition("```python\n")[2].partition("```")[0]
  assert copied(blocks.last) == "last\n"
  assert copied(answers(page).get_by_role("button", name="Copy", exact=True)) == ANSWER + "\n~~~\nlast\n~~~"
  assert copied(page.get_by_role("article", name="You").get_by_role("button", name="Copy")) == "hello\nyou"


@pytest.mark.parametrize("walls", ["as it is", "the sanitizer alone"])
def test_hostile_markdown_does_nothing_and_asks_nobody(visit, server, walls):
  page = visit()
  if walls == "the sanitizer alone":   # markup is let through to it, and no policy of the browser's helps
    text = PAGE.read_text().replace("tokenizer: {html() {}, tag() {}},", "").replace(policy(PAGE.read_text()), "")
    assert len(text) < len(PAGE.read_text()) - 300
    page.route(server.url + "/", lambda route: route.fulfill(content_type="text/html", body=text))
    page.goto(server.url)
  for markdown in ["\n\n".join(HOSTILE), *HOSTILE]:
    page.unroute("**/v1/chat/completions")
    replace(page, "chat/completions", **events(piece(f"{markdown}\n\nend", "stop")))
    page.get_by_role("button", name="New chat").click()
    send(page, "hello")
    finished(page)
    found = answers(page).evaluate("""article => [...article.firstElementChild.querySelectorAll("*")].map(x =>
      [x.localName, x.namespaceURI, Object.fromEntries([...x.attributes].map(a => [a.name, a.value]))])""")
    for tag, namespace, attributes in found:
      assert tag in SHOWN and namespace.endswith("/xhtml"), (markdown, tag)
      if tag in ("button", "div"): continue   # the page's own
      assert attributes.keys() <= {"href", "target", "rel", "align", "start"}, (markdown, attributes)
      if "href" in attributes:
        assert attributes["href"].startswith("http://e.test/"), (markdown, attributes)
        assert (attributes["target"], attributes["rel"]) == ("_blank", "noopener noreferrer"), markdown
    if walls == "as it is" and markdown.startswith("<") and not re.search("[\n&]|<java", markdown):
      assert markdown in answer_text(page), "it can be read"
  assert page.evaluate("window.broken") is None and len(page.frames) == 1
  assert page.url.rstrip("/#") == server.url and page.evaluate("typeof document.getElementById") == "function"


def test_the_policy_stops_what_would_get_past_the_sanitizer(browser, server):
  page = browser.new_page()
  asked = []
  page.route("http://e.test/**", lambda route: (asked.append(route), route.abort()))
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
  assert page.evaluate("window.broken") is None and not asked
  page.close()


def test_a_finished_block_stays_while_more_is_streamed_and_a_later_address_is_found(visit):
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
  finished(page)
  expect(answers(page).locator("> div > *")).to_have_count(4)


def test_a_long_answer_is_not_drawn_at_every_piece(visit):
  page = visit()
  page.add_init_script(FEED)
  page.reload()
  send(page, "hello")
  drawn = page.evaluate("""async () => {
    let drawn = 0
    new MutationObserver(() => drawn++).observe(document.querySelector("[aria-label=Model] > div"), {childList: true})
    for (let i = 0; i < 3000; i++) {
      feed(`word ${i} of a **block** that grows\n`)
      await 0
    }
    feed(null)
    return new Promise(done => {
      const look = () => document.querySelector("[aria-busy=true]") ? requestAnimationFrame(look) : done(drawn)
      look()
    })
  }""")
  assert 0 < drawn < 100, drawn
  assert finished(page).count("word") == 3000


def test_the_last_answer_is_made_anew(visit):
  page = visit()
  for i, text in enumerate(("one", "two", "three")):
    page.unroute("**/v1/chat/completions")
    replace(page, "chat/completions", **events(piece(text, "stop")))
    if i < 2: send(page, f"question {i}")
    else: page.get_by_role("button", name="Regenerate").click()   # there is one such button
    expect(answers(page).last.locator("> div")).to_have_text(text)
    finished(page, min(i + 1, 2))
  assert page.posts[-1] == page.posts[-2]
  expect(page.get_by_label("Message")).to_be_focused()


def test_a_question_is_edited_and_what_followed_it_is_dropped(visit):
  page = visit()
  replace(page, "chat/completions", **events(piece("yes", "stop")))
  for i, question in enumerate(("first", "second", "third")):
    send(page, question)
    finished(page, i + 1)
  page.get_by_label("Message").fill("a draft")
  page.get_by_role("article", name="You").nth(1).get_by_role("button", name="Edit").click()
  expect(page.get_by_role("status")).to_contain_text("Escape to cancel")
  page.keyboard.press("Escape")
  expect(page.get_by_label("Message")).to_have_value("a draft")
  expect(page.get_by_role("article")).to_have_count(6)
  edit(page, "second", "other")
  finished(page, 2)
  expect(page.get_by_role("article", name="You").locator("div")).to_have_text(["first", "other"])
  assert [m["content"] for m in page.posts[-1][1]["messages"]] == ["first", "yes", "other"]
  send(page, "next")
  finished(page, 3)
  assert [m["content"] for m in page.posts[-1][1]["messages"]] == ["first", "yes", "other", "yes", "next"]


def test_conversations_survive_a_reload_and_are_chosen_and_deleted(visit):
  page = visit()
  for name in ("red", "green", "blue"):
    page.get_by_role("button", name="New chat").click()
    page.unroute("**/v1/chat/completions")
    replace(page, "chat/completions", **events(piece(f"**{name}**", "stop")))
    send(page, f"what is {name}?")
    finished(page)
  titles = ["what is blue?", "what is green?", "what is red?"]
  expect(chats(page).get_by_role("button", name="what is", exact=False)).to_have_count(6)
  page.get_by_role("button", name="what is green?", exact=True).click()
  expect(answers(page).locator("strong")).to_have_text("green")
  expect(page.get_by_label("Message")).to_be_focused()
  page.reload()
  expect(answers(page).locator("strong")).to_have_text("green")
  expect_stats(page, r"^1 tokens.*, first token after")
  expect(chats(page)).to_have_text([f"{title}✕" for title in titles])
  expect(page.locator("nav [aria-current=true]")).to_have_text("what is green?")
  send(page, "more")
  finished(page, 2)
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


def test_a_reload_in_the_middle_of_an_answer_keeps_what_was_there(visit):
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
  assert finished(page) == "half an"
  expect(chats(page)).to_have_count(1)


def test_another_chat_ends_the_answer_and_keeps_what_was_said(visit):
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
  assert finished(page) == "whole"
  page.reload()
  page.get_by_role("button", name="first", exact=True).click()
  assert finished(page) == "half an"
  expect(answers(page).locator("small")).to_contain_text("stopped")


@pytest.mark.parametrize("fault", ["blocked", "full", "spoiled"])
def test_a_storage_that_fails_is_said_and_breaks_nothing(visit, fault):
  page = visit()
  page.add_init_script({
    "blocked": """for (const name of ["localStorage", "sessionStorage"])
                    Object.defineProperty(window, name, {get() { throw new DOMException("no") }})""",
    "full": "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }",
    "spoiled": """for (const [name, text] of [["chat 1", "{"], ["chat 2", "3"], ["chat 3", "[{}]"], ["settings", "3"]])
                    localStorage.setItem(`tinyvllm ${name}`, text)""",
  }[fault])
  page.reload()
  if fault == "blocked": settings(page, api_key=KEY)
  replace(page, "chat/completions", **events(piece("yes", "stop")))
  send(page, "hello")
  assert finished(page) == "yes"
  if fault != "spoiled": expect(page.get_by_role("status")).to_contain_text("lost when the page is closed")
  expect(chats(page)).to_have_text(["hello✕"])
  page.get_by_role("button", name="New chat").click()
  page.get_by_role("button", name="hello", exact=True).click()
  assert finished(page) == "yes"


def test_every_sampling_setting_is_there_is_sent_and_survives_a_reload(visit):
  page = visit()
  names = set(page.locator("fieldset [name]").evaluate_all("all => all.map(x => x.name)")) - {"system"}
  assert names == {field.name for field in dataclasses.fields(SamplingParams)} - FOR_PROGRAMS
  settings(page, max_tokens=9, min_tokens=1, temperature=0.5, top_p=0.9, top_k=40, min_p=0.05, presence_penalty=0.1,
           frequency_penalty=0.2, repetition_penalty=1.1, seed=7, bad_words="ugly", system_prompt="be kind")
  page.get_by_label("Stop strings").fill("one\n\\n\\n")
  page.get_by_label("Ignore EOS token").select_option("yes")
  page.get_by_label("Skip special tokens").select_option("no")
  send(page, "hello")
  finished(page)
  sent = {"max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
          "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "seed": 7,
          "bad_words": ["ugly"], "stop": ["one", "\n\n"], "ignore_eos": True, "skip_special_tokens": False,
          "include_stop_str_in_output": None}
  assert {name: page.posts[-1][1][name] for name in names} == sent
  expect(page.get_by_role("alert")).to_have_count(0)
  page.reload()
  send(page, "again")
  finished(page, 2)
  assert {name: page.posts[-1][1][name] for name in names} == sent
  assert page.posts[-1][1]["messages"][0] == {"role": "system", "content": "be kind"}


def test_an_empty_chat_has_three_examples_and_each_is_asked_by_a_click(visit):
  page = visit()
  replace(page, "chat/completions", **events(piece("yes", "stop")))
  examples = page.get_by_role("region", name="Examples").get_by_role("button")
  expect(examples).to_have_count(3)
  for i, words in enumerate(examples.all_text_contents()):
    examples.nth(i).click()
    finished(page)
    assert page.posts[-1][1]["messages"] == [{"role": "user", "content": words}]
    expect(examples).to_have_count(0)
    page.get_by_role("button", name="New chat").click()
    expect(examples).to_have_count(3)


def test_one_button_sends_and_stops_and_escape_stops_too(visit, server):
  page = visit()
  settings(page, max_tokens=LONG)
  button = page.locator("form").get_by_role("button")
  for stop in (lambda: button.click(), lambda: page.keyboard.press("Escape")):
    expect(button).to_have_accessible_name("Send")
    page.get_by_label("Message").fill("hello")
    button.dblclick()
    expect(button).to_have_accessible_name("Stop")
    wait_until(lambda: answer_text(page), "some text", SECONDS)
    stop()
    expect(button).to_have_accessible_name("Send")
    idle(server)
    expect(page.get_by_label("Message")).to_be_focused()


def test_all_of_it_is_reached_with_the_keyboard(visit):
  page = visit()
  replace(page, "chat/completions", **events(piece(ANSWER, "stop")))
  send(page, "hello")
  finished(page)
  reached = []
  while reached.count("BODY") < 2:   # from where it stands to the page's end, and once around
    page.keyboard.press("Tab")
    reached.append(page.evaluate("""() => {
      const x = document.activeElement
      if (x === document.body) return "BODY"
      return x.ariaLabel ?? (x.textContent.trim() || x.closest("label")?.textContent.trim())
    }"""))
    assert len(reached) < 100
  assert {"Chats", "New chat", "hello", "Delete hello", "Settings", "Conversation", "Copy", "Edit", "Copy code", "Code",
          "Table", "the docs", "Regenerate", "Message", "Send"} <= set(reached), reached
  assert len([*page.locator("fieldset [name], #key").all()]) == 17


@pytest.mark.parametrize("look", [{}, {"color_scheme": "dark"}, PHONE, {**PHONE, "color_scheme": "dark"}],
                         ids=["light", "dark", "phone", "dark phone"])
def test_axe_finds_nothing(visit, look):
  page = visit(**look)
  def check(state):
    results = Axe().run(page)
    assert not results.violations_count, f"{state}: {results.generate_report()}"
  check("settings open")
  page.get_by_text("Settings", exact=True).click()
  check("empty")
  replace(page, "chat/completions", **events(piece(ANSWER, "stop")))
  send(page, "hello")
  finished(page)
  check("a conversation")
  if look.get("is_mobile"):
    page.get_by_text("Chats", exact=True).click()
    check("the list of chats")
  page.get_by_role("button", name="Edit").click()
  check("editing")
  page.keyboard.press("Escape")
  page.unroute("**/v1/chat/completions")
  replace(page, "chat/completions", **refusal(429, "at most 2 texts may wait"))
  send(page, "more")
  expect(page.get_by_role("alert")).to_be_visible()
  check("an error")
