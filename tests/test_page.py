"""The chat page in a real browser, Chromium without a window, against a real server with a key."""
import json
import re
import shutil
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import expect, sync_playwright
from reference import tiny_model
from server import Server, wait_until

pytestmark = pytest.mark.browser
KEY, LONG = "a key", 8000   # LONG: more tokens than are streamed while a test looks
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
ENGINE = ("--max-num-seqs", "1", "--max-num-batched-tokens", "1")   # one graph to capture
PHONE = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}
MARKUP = "<img src=x onerror='window.broken = 1'><script>window.broken = 1</script><b>bold</b> &amp;"
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
    expect(page.get_by_role("heading").locator("small")).not_to_be_empty()   # the model's name, or that it wants a key
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
def answer_text(page): return answers(page).last.locator("p").text_content()


def finished(page, count=1):
  """Waits until so many answers are there and none is streamed any more. The last one's text."""
  expect(answers(page)).to_have_count(count)
  expect(page.get_by_role("button", name="Stop")).to_be_disabled()
  return answer_text(page)


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


def replace(page, path, **answer):
  """The page gets this answer in place of the server's."""
  page.route(f"**/v1/{path}", lambda route: route.fulfill(**answer))


def piece(text, finish_reason=None):
  return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}], "usage": None}


def test_the_page_is_one_short_file_that_never_makes_markup_of_text_and_names_no_other_place(server):
  response = server.http().get("/")
  assert response.status_code == 200 and response.headers["content-type"].startswith("text/html"), "without a key"
  text = response.text
  assert len(text.splitlines()) <= 150
  assert max(map(len, text.splitlines())) <= 120
  assert not re.findall(r"(inner|outer|adjacent)HTML|document\.write|eval\(|https?:|\bsrc=|@import|url\(", text, re.I)


def test_an_answer_grows_while_it_is_streamed_and_is_the_servers(visit, server):
  page = visit()
  settings(page, max_tokens=400)
  page.evaluate("""() => {
    window.seen = []
    const look = () => seen.push([document.querySelector("[aria-label=Model] p")?.textContent.length ?? 0,
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
  expect(answers(page).locator("small")).to_have_text(re.compile(r"^400 tokens, \d+\.\d tokens/s \(length\)$"))


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
  expect(page.get_by_role("button", name="Send")).to_be_disabled()
  page.get_by_label("Message").fill("too early")
  page.get_by_label("Message").press("Enter")
  page.get_by_role("button", name="Stop").click()
  text = finished(page)
  idle(server)
  assert answer_text(page) == text
  wait_until(lambda: aborted(server) == before + 1, "it was aborted", SECONDS)
  expect(answers(page).locator("small")).to_have_text(re.compile(r"^\d+ tokens, \d+\.\d tokens/s, stopped$"))
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
  expect(page.get_by_role("heading")).to_contain_text(f"401: {said}")
  send(page, "hello")
  expect(page.get_by_role("alert")).to_have_text(f"401: {said}")
  expect(page.get_by_label("Message")).to_have_value("hello")
  settings(page, api_key=KEY)
  expect(page.get_by_role("heading")).to_have_text("tinyvllm words")
  page.get_by_role("button", name="Send").click()
  assert finished(page) == expected(server, [{"role": "user", "content": "hello"}], max_tokens=20)
  page.reload()
  assert page.get_by_label("API key").input_value() == KEY, "kept for the session"
  assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""], "and no longer"


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
  assert page.get_by_role("article", name="You").text_content() == MARKUP
  refusal = json.dumps({"error": {"message": MARKUP}})
  replace(page, "**", status=400, content_type="application/json", body=refusal)
  send(page, "more")
  expect(page.get_by_role("alert")).to_have_text(f"400: {MARKUP}")
  settings(page, api_key="another")
  expect(page.get_by_role("heading")).to_have_text(f"tinyvllm 400: {MARKUP}")
  assert not page.locator("main img, main script, main b, h1 img, h1 b").count()
  assert page.evaluate("window.broken") is None


def test_the_count_of_tokens_is_the_servers_where_an_event_has_several(visit):
  page = visit()
  usage = {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}}
  replace(page, "chat/completions", **events(piece("the cat sat"), piece(" on the mat", "stop"), usage))
  send(page, "hello")
  assert finished(page) == "the cat sat on the mat"
  # Events that come at once have no time to divide by
  expect(answers(page).locator("small")).to_have_text(re.compile(r"^9 tokens(, \d+\.\d tokens/s)?$"))


def test_a_stream_that_breaks_off_keeps_its_text_and_says_why(visit):
  page = visit()
  failed = {"error": {"message": "a step failed", "type": "InternalServerError", "param": None, "code": 500}}
  for canned, why in ((events(piece("some"), failed), "a step failed"),
                      (events(piece("some"), done=False), "The connection ended before the answer did.")):
    replace(page, "chat/completions", **canned)
    send(page, "hello")
    expect(page.get_by_role("alert")).to_have_text(why)
    assert finished(page) == "some"
    page.get_by_role("button", name="New chat").click()
  page.route("**/v1/chat/completions", lambda route: route.abort())
  send(page, "hello")
  expect(page.get_by_role("alert")).to_be_visible()
  expect(page.get_by_label("Message")).to_have_value("hello")


def test_the_models_name_comes_once_it_is_loaded(visit):
  page, loads = visit(), []
  refusal = json.dumps({"error": {"message": "the model is loading"}})

  def models(route):
    loads.append(route)
    if len(loads) < 2: route.fulfill(status=503, content_type="application/json", body=refusal)
    else: route.continue_()
  page.route("**/v1/models", models)
  page.reload()
  expect(page.get_by_role("heading")).to_have_text("tinyvllm 503: the model is loading")
  expect(page.get_by_role("heading")).to_have_text("tinyvllm words")


def test_a_phone_shows_all_of_it_and_never_scrolls_sideways(visit):
  page = visit(**PHONE)
  settings(page, system_prompt="w" * 300)
  send(page, "x" * 500)
  finished(page)
  for opened in (True, False):
    assert page.get_by_label("API key").is_visible() == opened
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["viewport"]["width"]
    assert page.evaluate("document.documentElement.scrollHeight") <= PHONE["viewport"]["height"]
    assert page.get_by_role("log").evaluate("x => x.scrollWidth <= x.clientWidth")
    for control in (page.get_by_label("Message"), *page.get_by_role("button").all()):
      expect(control).to_be_in_viewport(ratio=1)
    page.get_by_text("Settings", exact=True).tap()
  sizes = page.locator("input, textarea").evaluate_all("all => all.map(x => parseFloat(getComputedStyle(x).fontSize))")
  assert len(sizes) == 5 and min(sizes) >= 16, "a phone zooms into anything smaller"


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
