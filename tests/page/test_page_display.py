"""What the chat page shows: Markdown, code, reasoning, hostile input, layouts, and accessibility. The page that plays a
trace."""
import base64
import hashlib
import json
import re
import signal
import urllib.error
import urllib.request

import pytest
from axe_playwright_python.sync_playwright import Axe
from helpers.commands import ROOT, error_line, flags, run_command, start_process
from helpers.data import DATA, read_data
from helpers.engines import BS, ENGINE, greedy, prompt, tokens
from helpers.servers import Server, wait_until
from playwright.sync_api import expect

from tinyvllm import LLM
from tinyvllm_extra.trace import player

PAGE = ROOT / "examples/tinyvllm_extra/serving/page"
# Safe elements and attributes, streamed reasoning, elements of answer.md, names of controls, and the page's policy
CASES = read_data("chat_page.json")
SAFE = CASES["elements"]
OWN_LINES = 700   # maximum lines of the page's own files, without blank lines and comments
PHONE = {"viewport": {"width": 360, "height": 640}, "is_mobile": True, "has_touch": True}
ANSWER = (DATA / "answer.md").read_text()
CODE = read_data("highlighted_code.json")   # language, source, expected colored spans
ALL_CODE = "\n".join(f"```{language}\n{source}\n```" for language, source, _ in CODE)
# Input that must be neutralized: markup, Markdown, and samples in the style of DOMPurify's test suite
HOSTILE = read_data("hostile_markdown.json")
MARKUP = "<img src=x onerror='window.broken = 1'><script>window.broken = 1</script><b>bold</b> List<T>"
COMMENTS = re.compile(r"<!--.*?-->|^ *//[^\n]*|^/\*.*?\*/", re.S | re.M)


def policy(text): return re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)[1]


def test_page_own_files_are_short_and_without_external_resources():
  sources = [path.read_text() for path in PAGE.iterdir() if path.is_file()]
  lines = [line for source in sources for line in COMMENTS.sub("", source).splitlines() if line.strip()]
  assert len(lines) <= OWN_LINES and max(map(len, lines)) <= 120
  loads = r"https?:(?!//www.w3.org|\|)|@import \"(?!page.css)|(?<!Object)url\("
  assert not re.findall(rf"(inner|outer|adjacent)HTML|document\.write|eval\(|{loads}", "\n".join(lines), re.I)


def test_page_is_one_file_whose_policy_allows_only_its_scripts(server):
  text = server.get("/").text
  assert not re.search(r"<script[^>]*src|<link[^>]*href=\"(?!data:)|@import \"", text)
  assert '<link rel="icon" href="data:image/svg+xml,' in text
  rules = dict(rule.split(maxsplit=1) for rule in policy(text).split(";"))
  scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.S)
  digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
  assert rules.pop("script-src").split() == [f"'sha256-{digest}'" for digest in digests]
  assert rules == CASES["policy"]
  assert len(digests) == len([*PAGE.glob("**/*.js")])


def test_vendored_files_are_those_of_the_table():
  packages = json.loads((PAGE / "vendored/packages.json").read_text())
  expected = {name: digest for package in packages for name, digest in package["sha256"].items()}
  files = {path.name: path.read_bytes() for path in (PAGE / "vendored").iterdir() if path.name != "packages.json"}
  assert {name: hashlib.sha256(data).hexdigest() for name, data in files.items()} == expected
  for package in packages: assert {"version", "license"} < package.keys() and "LICENSE" in str(package["sha256"])


def test_policy_blocks_what_the_sanitizer_would_miss(browser, server):
  tab, requests = browser.new_page(), []
  tab.route("http://e.test/**", lambda route: (requests.append(route), route.abort()))
  tab.goto(server.url)
  for directive, attack in CASES["attacks"]:
    blocked = tab.evaluate(f"""() => new Promise(done => {{
      document.addEventListener("securitypolicyviolation", e => done(e.effectiveDirective), {{once: true}})
      try {{ {attack} }} catch {{ }}
    }})""")
    assert blocked.startswith(directive)
  assert tab.evaluate("window.broken") is None and not requests
  tab.close()


def expect_only_safe_elements(part, markdown):
  """Check that the page shows a part of an answer with harmless elements and attributes."""
  elements = part.evaluate("""part => [...part.querySelectorAll("*")].map(x =>
    [x.localName, x.namespaceURI, Object.fromEntries([...x.attributes].map(a => [a.name, a.value]))])""")
  for tag, namespace, attributes in elements:
    assert namespace.endswith("/MathML" if tag in SAFE["math"] else "/xhtml"), (markdown, tag)
    if tag in SAFE["math"]: continue
    kind = "page" if tag in SAFE["page"] else "html"
    assert tag in SAFE[kind] and attributes.keys() <= {*SAFE[f"{kind} attributes"]}, (markdown, tag, attributes)
    if "href" in attributes:
      assert attributes["href"].startswith("http://e.test/"), (markdown, attributes)
      assert (attributes["target"], attributes["rel"]) == ("_blank", "noopener noreferrer"), markdown


@pytest.mark.parametrize("defenses", ["all", "markdown only"])
def test_hostile_input_is_text_runs_no_script_and_sends_no_request(page, server, tmp_path, defenses):
  every = "\n\n".join(HOSTILE)
  if defenses == "markdown only":   # the page has no Content-Security-Policy
    text = server.get("/").text
    page.tab.route(server.url + "/", lambda route: route.fulfill(content_type="text/html",
                                                                 body=text.replace(policy(text), "")))
    page.tab.goto(server.url)
  answers = [*({"content": f"{markdown}\n\nend"} for markdown in [every, *HOSTILE, MARKUP, f"```{MARKUP}\nx\n```"]),
             {"content": "", "reasoning": every, "calls": [{"name": MARKUP, "arguments": json.dumps({MARKUP: every})}]}]
  messages = [message for answer in answers
              for message in ({"role": "user", "content": MARKUP}, {"role": "assistant", **answer})]
  page.import_file(tmp_path / "hostile.json", {"format": "tinyvllm chats", "chats": [{"messages": messages}]})
  page.expect(chats=[MARKUP[:60]])
  page.chats.click()
  page.expect(asked=[MARKUP] * len(answers), answers=len(answers), folds=["Reasoning", f"Tool call: {MARKUP}"])
  for answer, article in zip(answers, page.answers.all(), strict=True):
    markdown = answer["content"].removesuffix("\n\nend")
    expect_only_safe_elements(article, markdown)
    if markdown.startswith("<") and not re.search("[\n&]|<java", markdown):
      assert markdown in article.text_content(), "markup is shown as text"
  assert "broken=1" in page.answers.last.locator("details").first.text_content()
  assert page.ask("more", every[:9], every[9:])
  for path in ("models", "chat/completions"): page.fail(400, MARKUP, path)
  page.send("more")
  page.expect(alert=f"400: {MARKUP}", status=f"400: {MARKUP}")
  assert page.tab.evaluate("window.broken") is None and len(page.tab.frames) == 1
  assert page.tab.url.rstrip("/#") == server.url
  assert page.tab.evaluate("typeof document.getElementById") == "function"


def test_math_is_rendered_outside_code_and_prices(page):
  for source, formulas in read_data("math.json"):
    page.ask("hello", source)
    assert page.answers.last.locator("math").all_text_contents() == formulas, source


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_markdown_is_rendered_and_copied(visit, has_clipboard):
  page = visit(permissions=["clipboard-read", "clipboard-write"])
  if not has_clipboard: page.tab.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject('http') }")
  page.ask("hello\nyou", ANSWER[:100], ANSWER[100:], "\n~~~\nlast\n~~~")
  for selector, text in CASES["markdown"]: expect(page.answers.locator(selector)).to_have_text(text)
  expect(page.answers.locator("p > br")).to_have_count(1)
  link = page.answers.get_by_role("link", name="the docs")
  assert [link.get_attribute(name) for name in ("href", "target", "rel")] == [
    "https://docs.python.org/3/", "_blank", "noopener noreferrer"]
  blocks = page.answers.get_by_role("button", name="Copy code")
  for button, text in ((blocks.first, ANSWER.partition("```python\n")[2].partition("```")[0]), (blocks.last, "last\n"),
                       (page.answers.get_by_role("button", name="Copy", exact=True), ANSWER + "\n~~~\nlast\n~~~"),
                       (page.questions.get_by_role("button", name="Copy"), "hello\nyou")):
    page.tab.evaluate("navigator.clipboard.__proto__.writeText.call(navigator.clipboard, '')")
    button.click()
    page.expect(status="Copied.")
    expect(button).to_be_focused()
    assert page.tab.evaluate("navigator.clipboard.readText()") == text
    page.tab.evaluate("note('')")


def test_streaming_keeps_open_reasoning_and_selection_and_resolves_links(page):
  page.stream()
  page.feed("<think>one")
  page.answers.get_by_text("Reasoning", exact=True).click()
  page.feed(" two</think>First *one* [here][a].\n\nSecond")
  expect(page.texts.locator("p").last).to_have_text("Second")
  page.tab.evaluate("getSelection().selectAllChildren(document.querySelector('article em'))")
  for text, last in ((" more", "Second more"), ("\n\n```\nx = 1", "x = 1"), ("\n```\n\nThird", "Third")):
    page.feed(text)
    expect(page.texts.locator("p, code").last).to_have_text(last)
  assert page.tab.evaluate("`${getSelection()}`") == "one"
  expect(page.answers.get_by_role("link")).to_have_count(0)
  page.feed("\n\n[a]: https://a.test/")   # the target of the link in the first block
  expect(page.answers.get_by_role("link")).to_have_text("here")
  expect(page.answers.get_by_text("one two")).to_be_visible()
  page.feed()
  page.wait()
  expect(page.texts.locator("> *")).to_have_count(4)
  expect(page.answers.get_by_text("one two")).to_be_visible()


def test_long_answer_is_not_rendered_for_every_chunk(page):
  page.stream()
  page.tab.evaluate((DATA / "chat_page_chunks.js").read_text())
  page.feed()
  assert page.wait().count("word") == 3000
  assert 0 < page.tab.evaluate("renders") < 100


def test_log_follows_answer_until_user_scrolls_up(visit):
  page = visit(viewport={"width": 400, "height": 500})
  page.stream()
  def look(expression): return page.log.evaluate(f"x => {expression}")
  def grow():
    height = look("x.scrollHeight")
    page.feed("- a line\n" * 40)
    wait_until(lambda: look("x.scrollHeight") > height + 100, "the answer grows")
  start, end = "x.scrollTop === 0", "x.scrollTop > 100 && x.scrollHeight - x.scrollTop - x.clientHeight < 40"
  grow()
  assert look(end)
  for delta, place in ((-99999, start), (99999, end)):
    page.log.hover()
    page.tab.mouse.wheel(0, delta)
    wait_until(lambda place=place: look(place), place)
    grow()
    assert look(place)


def test_code_is_highlighted_by_its_language(page):
  page.ask("hello", f"- item\n\n  ```py\n  if 1\n  ```\n\n{ALL_CODE}")
  blocks = page.answers.locator(".code").all()
  expected = [["py", "if 1", [["keyword", "if"], ["number", "1"]]], *CODE]
  for (language, source, spans), block in zip(expected, blocks, strict=True):
    colored = block.locator("code span").evaluate_all("all => all.map(x => [x.className.slice(5), x.textContent])")
    assert colored == spans, language
    assert block.locator("pre").text_content() == source + "\n"
    expect(block.locator("small")).to_have_text(language)
  colors = blocks[1].locator("code, code span").evaluate_all("all => all.map(x => getComputedStyle(x).color)")
  assert len(set(colors)) == 6, "five colors and the text's"


@pytest.mark.parametrize("form", CASES["reasoning"])
def test_reasoning_is_collapsed_and_not_copied_or_sent_again(visit, form):
  page = visit(permissions=["clipboard-read", "clipboard-write"])
  assert page.ask("hello", *CASES["reasoning"][form]) == "the answer"
  thought = page.answers.first.get_by_text("plan one")
  expect(thought).to_be_hidden()
  page.answers.get_by_text("Reasoning", exact=True).click()
  expect(thought).to_be_visible()
  expect(thought.locator("strong")).to_have_text("one")
  page.answers.get_by_role("button", name="Copy").click()
  page.expect(status="Copied.")
  assert page.tab.evaluate("navigator.clipboard.readText()") == "the answer"
  page.tab.reload()
  assert page.wait() == "the answer"
  expect(thought).to_be_hidden()
  page.ask("more", "yes")
  assert page.posts[-1][1]["messages"][1] == {"role": "assistant", "content": "the answer"}


def test_answer_that_mentions_think_tags_is_not_folded(page):
  for text in ("Write </think> to end.", "Use\n\n```\n<think>\n</think>\n```"):
    assert "</think>" in page.ask("hello", text)
  expect(page.answers.locator("details")).to_have_count(0)


def test_empty_chat_has_three_examples_that_are_sent_on_click(page):
  page.respond("yes")
  examples = page.tab.get_by_role("region", name="Examples").get_by_role("button")
  expect(examples).to_have_count(3)
  for i, words in enumerate(examples.all_text_contents()):
    examples.nth(i).click()
    assert page.wait() and page.sent == [words]
    expect(examples).to_have_count(0)
    page.new_chat()


def test_every_control_is_reachable_with_the_keyboard(page):
  page.settings()
  page.ask("hello", ANSWER)
  focused = []
  while focused.count("BODY") < 2:   # from the current focus to the end of the page, then once around
    page.tab.keyboard.press("Tab")
    focused.append(page.tab.evaluate((DATA / "chat_page_focus.js").read_text()))
    assert len(focused) < 100
  assert {*CASES["controls"]} <= set(focused), focused


@pytest.mark.parametrize("options", [{}, {**PHONE, "color_scheme": "dark"}], ids=["light", "dark phone"])
def test_axe_finds_no_accessibility_violations(visit, options):
  page, text = visit(**options), f"{ANSWER}\n{ALL_CODE}"

  def check(state):
    results = Axe().run(page.tab)
    assert not results.violations_count, f"{state}: {results.generate_report()}"
  page.serve_models("first", "second")
  page.settings()
  check("settings open")
  page.button("Settings").click()
  check("empty")
  call = {"index": 0, "id": "1", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
  page.ask("hello", {"reasoning": text}, text, {"tool_calls": [call]})
  check("a conversation")
  for summary in page.folds.all(): summary.click()
  check("reasoning and tool calls open")
  if options: page.button("Chats").tap()
  check("the list of chats")
  page.search.fill("nothing like it")
  check("no chat found")
  page.search.fill("")
  if options: page.button("Chats").tap()
  page.edit("hello")
  check("editing")
  page.tab.keyboard.press("Escape")
  page.fail(429, "at most 2 sequences may wait")
  page.send("more")
  page.expect(alert=re.compile("429"))
  check("an error")
  page.log.press("?")
  check("shortcuts")


def test_phone_layout_fits_without_horizontal_scrolling(visit):
  page = visit(**PHONE)
  page.settings(system_prompt="w" * 300)
  page.ask("x" * 500, ANSWER, "y" * 500)
  assert page.tab.locator("pre").evaluate("x => x.parentElement.scrollWidth > x.parentElement.clientWidth")
  for is_open in (True, False):
    assert page.tab.get_by_label("API key").is_visible() == is_open
    width, height = page.tab.evaluate("(x => [x.scrollWidth, x.scrollHeight])(document.documentElement)")
    assert width <= PHONE["viewport"]["width"] and height <= PHONE["viewport"]["height"]
    assert page.log.evaluate("x => x.scrollWidth <= x.clientWidth")
    for control in (page.message, page.button("Send")): expect(control).to_be_in_viewport(ratio=1)
    page.button("Settings").tap()
  fields = page.tab.locator("input, select, textarea")
  sizes = fields.evaluate_all("all => all.map(x => parseFloat(getComputedStyle(x).fontSize))")
  assert len(sizes) == 25 and min(sizes) >= 16, "a phone zooms into anything smaller"


def test_list_of_chats_is_a_drawer_on_a_phone_and_can_be_hidden(visit):
  page = visit(has_touch=True)
  toggle, new = page.button("Chats"), page.button("New chat")
  for is_visible in (True, False, True):
    expect(new).to_be_visible(visible=is_visible)
    toggle.click()
  page.tab.set_viewport_size(PHONE["viewport"])
  expect(new).to_be_hidden()
  for close in (lambda: page.tab.keyboard.press("Escape"), lambda: page.tab.touchscreen.tap(350, 400), toggle.tap,
                new.tap):
    expect(toggle).to_have_attribute("aria-expanded", "false")
    toggle.tap()
    expect(toggle).to_have_attribute("aria-expanded", "true")
    expect(new).to_be_in_viewport(ratio=1)
    expect(new).to_be_focused()
    page.message.evaluate("x => x.focus()")
    expect(new).to_be_focused()   # the rest of the page is inert
    close()
    expect(new).to_be_hidden()
  page.message.focus()
  expect(page.message).to_be_focused()


def is_dark(page):
  style = page.tab.locator("body").evaluate("x => [getComputedStyle(x).backgroundColor, getComputedStyle(x).color]")
  background, text = (sum(map(int, re.findall(r"\d+", color)[:3])) for color in style)
  assert min(background, text) < 150 < 600 < max(background, text)
  return background < text


def test_colors_follow_the_system_until_a_theme_is_chosen(visit):
  dark, page = visit(color_scheme="dark"), visit(color_scheme="light")
  assert is_dark(dark) and not is_dark(page)
  for theme in ("dark", "system"):
    page.settings()
    page.tab.get_by_label("Theme").select_option(theme)
    for _ in range(2):
      assert is_dark(page) == (theme == "dark")
      page.tab.reload()


# The page that plays a trace: each step equals the engine's, with the keyboard alone

@pytest.fixture
def recorded(folder, tmp_path):
  """A trace of requests with hostile names and a common prefix in a pool of 12 blocks, and the blocks of each step."""
  path, used = tmp_path / "trace", []
  with LLM(folder, num_gpu_blocks_override=13, trace=str(path), **ENGINE) as llm:
    launch = llm.runner.launch
    def record(step):
      used.append({block for seq in llm.scheduler.running for block in seq.block_table})
      return launch(step)
    llm.runner.launch = record
    for i in range(3):
      llm.add_request(f"</script><b>{i}", tokens([*prompt(2 * BS), *prompt(3, i)]), greedy(12, n=1 + i % 2))
    while llm.has_unfinished_requests(): llm.step()
  return path, used


def used(tab):
  """Return the blocks that the page shows as used or shared."""
  labels = tab.locator("#grid button").evaluate_all("all => all.map(x => x.ariaLabel)")
  return {int(re.search(r"\d+", label)[0]) for label in labels if ": free" not in label}


def test_page_shows_each_step_and_scrubs_ten_thousand(recorded, browser, tmp_path):
  """With the keyboard alone. The page sends no request. The longer file ends within a line."""
  (path, blocks), page, tab, faults = recorded, tmp_path / "page.html", browser.new_page(), []
  assert run_command("trace", "show", path, "--output", page).stdout == f"{page}\n"
  tab.on("request", lambda request: faults.append(request.url))
  tab.on("pageerror", lambda error: faults.append(error))
  tab.goto(page.as_uri())
  for i, expected in enumerate(blocks):
    expect(tab.locator("#status")).to_contain_text(f"Step {i + 1} of {len(blocks)}: host ")
    assert used(tab) == expected
    tab.keyboard.press("ArrowRight")
  events = tab.locator("#events")
  expect(events).to_contain_text("ends: length")
  tab.keyboard.press("Home")
  expect(events).to_contain_text("A gets blocks")
  expect(tab.locator("#batch .prefill")).not_to_have_count(0)
  tab.locator("#grid button").first.focus()
  ids = " ".join(map(str, prompt(2 * BS)[:BS]))
  expect(tab.locator("#block")).to_have_text(re.compile(rf"^Block 1: of A \(</script><b>0\); hash \w+; tokens: {ids}$"))
  assert not Axe().run(tab).violations_count and tab.locator("b").count() == 0
  tab.locator("h1").click()
  tab.keyboard.press(" ")
  expect(tab.locator("#status")).to_contain_text(f"Step {len(blocks)} of")
  expect(tab.get_by_role("button", name="Play")).to_be_visible()

  header, *steps = path.read_text().splitlines()
  many = [json.dumps({**json.loads(x), "step": i}) for i, x in enumerate(steps * (10_000 // len(steps)))]
  (tmp_path / "long").write_text("\n".join([header, *many, '{"step']))
  tab.locator("#file").set_input_files(tmp_path / "long")
  expect(tab.locator("#status")).to_contain_text(f"of {len(many)}:")
  assert not {*faults} - {page.as_uri(), "data:,"}
  tab.close()
  assert "'nowhere' cannot be read: No such file" in error_line(run_command("trace", "show", "nowhere"))


def test_command_serves_the_page_at_an_address_with_a_secret(recorded):
  signal.signal(signal.SIGINT, signal.default_int_handler)   # processes in a shell's background ignore it
  run = start_process("trace", "show", recorded[0], BROWSER="true")   # a browser that does nothing
  url = run.stdout.readline().strip()
  with urllib.request.urlopen(url) as answer: assert answer.read().decode() == player.page(str(recorded[0]))
  for other in ("", "favicon.ico", url[:-1].rpartition("/")[2]):
    with pytest.raises(urllib.error.HTTPError, match="404"): urllib.request.urlopen(f"{url.rpartition('/')[0]}/{other}")
  run.send_signal(signal.SIGINT)
  assert run.communicate()[0] == "" and run.returncode == 130 and len(url.rpartition("/")[2]) > 40


def test_debug_follows_a_running_server(folder, browser, tmp_path):
  """The page asks for the API key, shows the last step, and stays at another one that was chosen."""
  with Server(folder, *flags(**ENGINE, trace=tmp_path / "trace", api_key="secret", served_model_name="x")) as server:
    def lines(start=0, key="secret"):
      return server.get(f"/debug/steps?start={start}", headers={"Authorization": f"Bearer {key}"})
    def generate(num_requests):
      """Complete the num_requests-th request. Return the number of steps."""
      server.client(api_key="secret").completions.create(model="x", prompt=prompt(3), max_tokens=4)
      wait_until(lambda: lines().text.count('"finished":"length"') == num_requests, "the last line")
      return lines().text.count("\n") - 1
    tab, keys = browser.new_page(), ["wrong", "secret"]
    tab.on("dialog", lambda dialog: dialog.accept(keys.pop(0)))
    tab.goto(f"{server.url}/debug")
    num_steps = generate(1)
    expect(tab.locator("#status")).to_contain_text(f"Step {num_steps} of {num_steps}:")
    tab.keyboard.press("Home")
    num_steps = generate(2)
    expect(tab.locator("#status")).to_contain_text(f"Step 1 of {num_steps}:")
    assert not keys and not Axe().run(tab).violations_count and lines(key="wrong").status_code == 401
    assert lines().content == (tmp_path / "trace").read_bytes() and not lines(10**9).content
    assert all((x["code"], x["param"]) == (400, "start") for x in (lines(i).json()["error"] for i in (-1, 2**70)))
    tab.close()
