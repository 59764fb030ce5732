"""The chat page in headless Chromium, against a server of this process. `page` is the ChatPage of a new user."""
import json
import re
import shutil
from urllib.parse import urlsplit

import pytest
from helpers.data import DATA
from helpers.engines import ENGINE
from helpers.commands import flags
from helpers.servers import LocalServer, wait_until
from playwright.sync_api import expect, sync_playwright

FEED = (DATA / "chat_page_feed.js").read_text()
expect.set_options(timeout=60_000)


def event_stream(*deltas, finish="stop", usage=None, done=True):
  """Return a streamed answer of texts, other fields of a delta, or error events. done: the answer ends."""
  events = [x if "error" in x else {"choices": [{"index": 0, "delta": x}]}
            for x in ({"content": x} if isinstance(x, str) else x for x in deltas)]
  if done: events += [{"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}]
  if usage: events += [{"choices": [], "usage": {"completion_tokens": usage}}]
  lines = [*(json.dumps(event, ensure_ascii=False) for event in events), *["[DONE]"] * done]
  return "".join(f"data: {line}\n\n" for line in lines)


class ChatPage:
  """The page in a tab. posts: path and body of each POST request. A mocked response stays until the next one."""
  def __init__(self, tab):
    self.tab, self.posts = tab, []
    self.message, self.alert, self.status = tab.get_by_label("Message"), tab.get_by_role("alert"), tab.locator("#note")
    self.questions, self.answers = (tab.get_by_role("article", name=name) for name in ("You", "Model"))
    self.asked, self.texts = self.questions.locator("> div"), self.answers.locator("> div")
    self.context, self.light = self.answers.last.locator("footer span"), tab.locator("#state")
    self.stats, self.folds = self.answers.last.locator("footer small"), self.answers.last.locator("summary")
    self.strong, self.current = self.answers.locator("strong"), tab.locator("nav [aria-current=true]")
    self.articles, self.log = tab.get_by_role("article"), tab.get_by_role("log")
    self.chats = tab.get_by_role("navigation", name="Chats").get_by_role("listitem").locator("button:first-child")
    self.search, self.title = tab.get_by_label("Search chats"), tab.get_by_role("heading", level=1)
    self.picker = tab.get_by_role("combobox", name="Model", exact=True)
    tab.on("request", self._record)

  def _record(self, request):
    if request.method == "POST": self.posts.append((urlsplit(request.url).path, request.post_data_json))

  @property
  def sent(self):
    """The contents of the last request's messages."""
    return [message["content"] for message in self.posts[-1][1]["messages"]]

  @property
  def text(self):
    """The text of the last answer, without its reasoning."""
    return self.texts.last.text_content().removesuffix("\n")

  def expect(self, **places):
    """Wait until each place shows a number of elements, a list of texts, or one text or pattern."""
    for name, expected in places.items():
      place = getattr(self, name)
      if isinstance(expected, int): expect(place).to_have_count(expected)
      elif name in ("message", "search", "picker"): expect(place).to_have_value(expected)
      else: expect(place).to_have_text(expected)

  def button(self, name): return self.tab.get_by_role("button", name=name, exact=True)

  def settings(self, **values):
    """Open the settings, and fill in `values`."""
    if not self.tab.get_by_label("System prompt").is_visible(): self.button("Settings").click()
    for name, value in values.items(): self.tab.get_by_label(name.replace("_", " ")).fill(str(value))
    self.message.focus()

  def send(self, text, num_clicks=1):
    self.message.fill(text)
    self.button("Send").click(click_count=num_clicks)

  def start(self, question, num_clicks=1):
    """Send a question, and wait for the first 20 characters of its answer."""
    self.send(question, num_clicks)
    expect(self.button("Stop")).to_be_visible()
    wait_until(lambda: len(self.text) >= 20, "20 characters")

  def wait(self, count=1):
    """Wait until `count` answers are complete. Return the last one's text."""
    self.expect(answers=count)
    expect(self.button("Send")).to_be_visible()
    return self.text

  def ask(self, question, *deltas, **options):
    """Send a question that the server answers, or a mocked response with `deltas`. Return the answer's text."""
    if deltas: self.respond(*deltas, **options)
    count = self.answers.count() + 1
    self.send(question)
    return self.wait(count)

  def respond(self, *deltas, **options):
    self.mock(content_type="text/event-stream", body=event_stream(*deltas, **options))

  def fail(self, status, message, path="chat/completions"):
    self.mock(path, status=status, json={"error": {"message": message}})

  def serve_models(self, *names):
    """Reload the page from a server with these models."""
    self.mock("models", json={"data": [{"id": name} for name in names]})
    self.tab.reload()

  def mock(self, path="chat/completions", **response):
    """Mock the response to requests of a path. Without a response, the connection fails."""
    self.tab.route(re.compile(f"/(v1/{path})$"), lambda route: route.fulfill(**response) if response else route.abort())

  def unmock(self, path="chat/completions"): self.tab.unroute(re.compile(f"/(v1/{path})$"))

  def stream(self):
    """Send a question whose answer comes from `feed`."""
    self.tab.evaluate(FEED)
    self.send("hello")
    expect(self.button("Stop")).to_be_visible()

  def feed(self, *texts, size=1000):
    """Stream texts in chunks of `size` bytes. Without texts, the answer ends."""
    data = event_stream(*texts, done=not texts).encode()
    for i in range(0, len(data), size): self.tab.evaluate("data => enqueue(data)", [*data[i:i + size]])

  def new_chat(self):
    self.button("New chat").click()
    self.expect(articles=0)

  def add_chats(self, *questions):
    """Start a chat with each question. The answer is the question in bold type."""
    for question in questions:
      self.new_chat()
      self.ask(question, f"**{question}**")

  def edit(self, question):
    self.questions.filter(has_text=question).get_by_role("button", name="Edit").click()
    self.expect(message=question)
    expect(self.message).to_be_focused()

  def import_file(self, path, content=None):
    """Import a file, after writing `content` to it."""
    if content is not None: path.write_text(content if isinstance(content, str) else json.dumps(content))
    if not self.button("Import").is_visible(): self.button("Chats").click()
    with self.tab.expect_file_chooser() as chooser: self.button("Import").click()
    chooser.value.set_files(path)


@pytest.fixture(scope="session")
def browser():
  chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
  assert chromium, "no browser: apt-get install -y --no-install-recommends chromium"
  with sync_playwright() as playwright:
    yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def server(chat_folder):
  options = flags(**{**ENGINE, "max_model_len": 32_000}, served_model_name="words")
  with LocalServer(chat_folder, *options) as server: yield server


@pytest.fixture
def visit(browser, server):
  """Return a function that opens the page as a new user. After each test, check that the page had no script error and
  sent requests only to its server."""
  contexts, requested, errors = [], [], []

  def visit(url=server.url, **options):
    contexts.append(browser.new_context(**{"viewport": {"width": 1280, "height": 720}, **options}))
    tab = contexts[-1].new_page()
    tab.on("request", lambda request: requested.append((url, request.url)))
    tab.on("pageerror", lambda error: errors.append(error))
    page = ChatPage(tab)
    tab.goto(url)
    expect(tab.locator("#model:not(:empty), #note:not(:empty)")).to_have_count(1)   # model name or error
    return page
  yield visit
  for context in contexts: context.close()
  assert requested and not errors
  assert not [target for origin, target in requested if not target.startswith((origin + "/", "data:"))]


@pytest.fixture
def page(visit): return visit()
