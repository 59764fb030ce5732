"""Requests, conversations, settings and storage of the chat page."""
import dataclasses
import json
import re

import pytest
from helpers.data import read_data
from helpers.engines import ENGINE
from helpers.commands import flags
from helpers.servers import LocalServer, wait_until
from playwright.sync_api import expect

from tinyvllm import SamplingParams

# Settings: typed text and sent value. Streamed deltas with two tool calls whose arguments arrive in pieces, and the
# message that the page sends back. Files that cannot be imported, after their error. Fields of SamplingParams without a
# setting on the page: token ids, n, logprobs, structured outputs
DATA = read_data("chat_page.json")
LONG = 16_000   # more tokens than a test waits for


def test_conversation_and_system_prompt_are_sent_and_server_answers(page, server):
  page.settings(system_prompt="be kind", temperature=0, max_tokens=200)
  answers = [page.ask("one"), page.ask("two")]
  page.expect(stats=re.compile(r"^200 tokens, \d+\.\d tokens/s, first token after \d+\.\d\d s \(length\)$"))
  system, one, two = ({"role": r, "content": c} for r, c in (("system", "be kind"), ("user", "one"), ("user", "two")))
  messages = [system, one, {"role": "assistant", "content": answers[0]}, two]
  assert [path for path, _ in page.posts] == ["/v1/chat/completions"] * 2
  assert [body["messages"] for _, body in page.posts] == [[system, one], messages]
  body = {"messages": messages, "temperature": 0, "max_tokens": 200}
  assert server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"] == answers[1]
  page.new_chat()
  page.settings(system_prompt="")
  page.ask("two", "the cat sat", " on the mat", usage=9)
  assert page.posts[-1][1]["messages"] == [two]
  # No rate if all tokens arrive at once
  page.expect(stats=re.compile(r"^9 tokens(, \d+\.\d tokens/s)?, first token after \d+\.\d\d s$"))


def test_streamed_answer_grows_while_log_is_busy(page):
  page.stream()
  for size, text in ((1000, "one"), (1, "é€😀"), (7, " two")):   # 1 splits characters, 7 events
    expect(page.log).to_have_attribute("aria-busy", "true")
    page.feed(text, size=size)
    expect(page.texts).to_contain_text(text)
  page.feed()
  assert page.wait() == "oneé€😀 two"
  for name, value in (("busy", "false"), ("live", "polite")): expect(page.log).to_have_attribute(f"aria-{name}", value)
  page.expect(stats=re.compile("^3 tokens"))


def test_stop_button_and_escape_abort_the_request_and_keep_its_text(page, server):
  sent = []
  def num_aborted(): return server.metrics().get("request_success_total{finished_reason=abort}", 0)
  page.settings(temperature=0, max_tokens=LONG)
  for stop in (page.button("Stop").click, lambda: page.tab.keyboard.press("Escape")):
    before = num_aborted()
    page.start("hello", num_clicks=2)   # the second click does not stop
    assert server.metrics()["num_requests_running"] == 1
    page.message.fill("too early")
    page.message.press("Enter")
    stop()
    sent += ["hello", page.wait(len(sent) // 2 + 1)]
    wait_until(lambda before=before: num_aborted() == before + 1, "the request is aborted")
    page.expect(stats=re.compile(r"^\d+ tokens, \d+\.\d tokens/s, .* s, stopped$"), alert=0, message="too early")
    expect(page.message).to_be_focused()
  page.settings(max_tokens=5)
  assert page.ask("again") and page.sent == [*sent, "again"]


def test_new_chat_and_closed_page_abort_the_request_and_keep_its_text(page, server):
  page.settings(temperature=0, max_tokens=LONG)
  for question, leave in (("first", page.new_chat), ("second", page.button("first").click), ("third", page.tab.close)):
    page.start(question)
    assert server.metrics()["num_requests_running"] == 1
    leave()
    wait_until(lambda: server.metrics()["num_requests_running"] == 0, "no request runs")
    if question == "first": page.expect(message="")
    if question == "second": page.expect(asked=["first"], message="", stats=re.compile("stopped$"))
  contents = [[message["content"] for message in body["messages"]] for _, body in page.posts]
  assert contents[:2] == [["first"], ["second"]] and [contents[2][0], contents[2][2]] == ["first", "third"]
  assert len(contents[2][1]) >= 20, "the text of the aborted answer"


def test_api_key_is_asked_for_and_stored_for_the_session(visit, words_folder):
  with LocalServer(words_folder, *flags(**ENGINE, api_key="a key")) as server:
    page, refused = visit(server.url), "401: " + server.get("/v1/models").json()["error"]["message"]
    key = page.tab.get_by_label("API key")
    page.expect(status=refused)
    expect(key).to_be_visible()   # the settings open
    page.settings(max_tokens=5, api_key="wrong")
    page.send("hello")
    page.expect(alert=refused, message="hello")
    page.settings(api_key="a key")
    page.expect(title=f"tinyvllm {words_folder.name}")
    page.button("Send").click()
    assert page.wait()
    page.tab.reload()
    expect(key).to_have_value("a key")
    assert page.tab.evaluate("[...Object.values(localStorage), document.cookie].filter(x => x.includes('a key'))") == []


def test_failed_request_shows_an_error_and_keeps_the_question(page):
  for prepare, alert in ((lambda: page.settings(tools="{"), "Tools must be a JSON list"),
                         (lambda: page.settings(tools='{"type": "function"}'), "Tools must be a JSON list"),
                         (lambda: page.settings(tools="", temperature=-1), "^400: .*temperature"),
                         (page.mock, r"^The server is not responding\.$")):
    prepare()
    page.send("hello")
    page.expect(alert=re.compile(alert), message="hello", articles=0)
  assert len(page.posts) == 3, "none for invalid tools, and one retry, as the server responds to other requests"


def test_enter_sends_and_shift_enter_inserts_a_newline(page):
  page.respond("yes")
  page.message.press_sequentially("one")
  page.message.press("Shift+Enter")
  page.message.press_sequentially("two")
  page.expect(message="one\ntwo")
  page.message.evaluate("x => x.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true}))")
  assert not page.posts, "Enter within an input method's composition must not send"
  page.message.press("Enter")
  page.expect(message="")
  assert page.wait() and page.sent == ["one\ntwo"]
  for text in ("", " \n "):
    page.message.fill(text)
    page.message.press("Enter")
  page.expect(questions=1)


def test_interrupted_stream_keeps_its_text_and_shows_the_error(page):
  failed = {"error": {"message": "a step failed", "code": 500}}
  for events, is_done, error in ((["some", failed], True, "a step failed"), (["some"], False, "The connection closed")):
    assert page.ask("hello", *events, done=is_done) == "some"
    page.expect(alert=re.compile(error))
    page.new_chat()


def test_question_waits_while_the_server_is_down_or_loading(page):
  page.fail(503, "the model is loading", ".*|health")
  page.tab.reload()
  page.expect(status=re.compile(r"\(503: the model is loading\)"))
  page.settings(max_tokens=5)
  page.send("hello")
  page.fail(503, "preparing 5 of 16", ".*|health")
  page.expect(status=re.compile("preparing 5 of 16"), light="Loading 5 of 16")
  page.button("Stop").click()
  page.expect(message="hello", articles=0)
  page.mock(".*|health")
  page.button("Send").click()
  page.expect(status=re.compile(r"^The server is not responding\. Retrying"), light="Down")
  expect(page.button("Stop")).to_be_visible()
  page.unmock(".*|health")
  assert page.wait()
  page.expect(title="tinyvllm words", status="", alert=0, light="Ready")


def test_full_queue_shows_an_error_and_restores_the_conversation(page):
  page.ask("first", "one")
  page.fail(429, "at most 2 sequences may wait")
  for edited, text in (("", "second"), ("first", "another")):
    if edited: page.edit(edited)
    page.send(text)
    for is_sent_again in (False, True):
      if is_sent_again: page.button("Regenerate").click()
      page.expect(alert=re.compile(r"queue is full.*\(429: at most 2 sequences may wait\)"))
      assert page.wait() == "one", "the previous answer"
      page.expect(message=text)


def test_model_without_chat_template_uses_completions_and_shows_a_notice(visit, words_folder):
  with LocalServer(words_folder, *flags(max_num_seqs=2, max_num_batched_tokens=16)) as server:
    page = visit(server.url)
    page.settings(system_prompt="not sent", temperature=0, max_tokens=20)
    texts = [page.ask("hello")]
    page.expect(status=re.compile("no chat template"))
    texts += [page.ask("the cat")]
    assert [(path, body.get("prompt")) for path, body in page.posts] == [
      ("/v1/chat/completions", None), ("/v1/completions", "hello"), ("/v1/completions", "the cat")]
    body = {"prompt": ["hello", "the cat"], "temperature": 0, "max_tokens": 20}
    assert [choice["text"] for choice in server.post("/v1/completions", body).json()["choices"]] == texts
    page.expect(alert=0)


def test_regenerate_and_edit_replace_messages(page):
  for question in ("first", "second", "third"): page.ask(question, "yes")
  page.respond("no")
  page.button("Regenerate").click()   # there is only one such button
  page.expect(texts=["yes", "yes", "no"])
  page.wait(3)
  assert page.posts[-1] == page.posts[-2]
  expect(page.message).to_be_focused()
  page.message.fill("a draft")
  page.edit("second")
  page.expect(status=re.compile("Escape"))
  page.tab.keyboard.press("Escape")
  page.expect(message="a draft", articles=6)
  page.edit("second")
  page.send("other")
  page.wait(2)
  page.expect(asked=["first", "other"], message="a draft")
  assert page.sent == ["first", "yes", "other"]
  page.ask("next")
  assert page.sent == ["first", "yes", "other", "no", "next"]


def test_continue_extends_a_cut_answer(page):
  page.settings(max_tokens=5, temperature=0)
  start = page.ask("hello")
  page.expect(context=re.compile(r"^context: \d+ of 32,000$"))
  page.button("Continue").click()
  expect(page.texts).not_to_have_text(start)
  body = page.posts[-1][1]
  assert page.wait().startswith(start) and body["messages"][-1] == {"role": "assistant", "content": start}
  assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)


def test_versions_of_an_answer_are_kept_and_selected(page):
  page.ask("hello", "one")
  page.respond("two")
  page.button("Regenerate").click()
  page.expect(texts=["two"])
  for name, text in (("Previous version", "one"), ("Next version", "two"), ("Previous version", "one")):
    page.button(name).click()
    page.expect(texts=[text])
    page.tab.reload()
  page.ask("more", "yes")
  assert page.sent == ["hello", "one", "more"]


def test_files_and_long_pastes_are_attached(page):
  for name, data in (("notes.md", b"```\ncode\n```\n"), ("image.png", b"\0")):
    page.tab.locator("#files").set_input_files({"name": name, "mimeType": "text/plain", "buffer": data})
  page.expect(status="image.png was not attached: it is not a text file.")
  page.message.evaluate(DATA["long_paste"])
  page.button("Remove pasted 2.txt").click()
  page.ask("read this", "yes")
  assert page.sent == ["notes.md:\n````\n```\ncode\n```\n````\n\nread this"]


def test_chats_can_be_renamed_and_pinned(page):
  page.add_chats("red", "green")
  page.tab.on("dialog", lambda dialog: dialog.accept("apple"))
  page.button("red").hover()
  for name in ("Rename red", "Pin apple"): page.button(name).click()
  page.tab.reload()
  page.expect(chats=["apple", "green"])


def test_conversations_survive_reload_and_can_be_selected_and_deleted(page):
  page.add_chats("red", "green", "blue")
  page.button("green").click()
  page.expect(strong="green")
  expect(page.message).to_be_focused()
  page.tab.reload()
  chats = ["blue", "green", "red"]
  page.expect(strong="green", stats=re.compile(r"^1 tokens.* \d+\.\d\d s$"), chats=chats, current="green")
  page.ask("more", "yes")
  assert page.sent == ["green", "**green**", "more"]
  page.button("Delete green").click()
  page.expect(chats=2, articles=0, status="“green” is deleted.")
  page.button("Undo").click()
  page.expect(chats=3, answers=2)
  page.button("Delete red").click()
  page.expect(answers=2)
  page.button("Delete green").click()
  page.expect(articles=0)
  other = type(page)(page.tab.context.new_page())
  for one in (page, other):
    one.tab.goto(page.tab.url)
    one.expect(chats=["blue"], articles=0)


def test_reload_during_an_answer_keeps_its_text(page):
  page.stream()
  page.tab.reload()   # before the first token
  page.expect(message="hello", articles=0)
  page.stream()
  page.feed("half an")
  page.expect(texts="half an")
  page.tab.reload()
  assert page.wait() == "half an"
  page.expect(chats=1)


@pytest.mark.parametrize("kind", DATA["failed_storage"])
def test_failed_storage_shows_a_notice_and_page_works(page, kind):
  page.tab.add_init_script(DATA["failed_storage"][kind])
  page.tab.reload()
  assert page.ask("hello", "yes") == "yes"
  if kind != "corrupt": page.expect(status=re.compile("lost when the page is closed"))
  page.expect(chats=["hello"])
  page.new_chat()
  page.button("hello").click()
  assert page.wait() == "yes"


def test_every_sampling_setting_is_sent_and_survives_reload(page):
  names = {*page.tab.locator("fieldset [name]").evaluate_all("all => all.map(x => x.name)")} - {*DATA["other_settings"]}
  fields = {field.name for field in dataclasses.fields(SamplingParams)}
  assert names == fields - {*DATA["not_on_page"]} == {*DATA["settings"]}
  page.settings(system_prompt="be kind")
  for name, (text, value) in DATA["settings"].items():
    field = page.tab.locator(f"[name={name}]")
    if isinstance(value, bool | None): field.select_option(text)
    else: field.fill(text)
  expected = {name: value for name, (_, value) in DATA["settings"].items()}
  for _ in range(2):
    page.ask("hello")
    body = page.posts[-1][1]
    assert {name: body.get(name) for name in names} == expected and page.sent[0] == "be kind"
    page.tab.reload()
  page.settings(temperature="", max_tokens="")
  page.ask("again", "yes")
  assert not {"temperature", "max_tokens"} & page.posts[-1][1].keys(), "use the server's defaults"


def test_presets_fill_and_reset_the_settings(page):
  page.tab.get_by_label("Thinking").select_option("no", force=True)
  for preset, expected in (("Creative", {"temperature": 1.1, "min_p": 0.05}), ("Reset", {})):
    page.settings()
    page.button(preset).click()
    page.ask("hello", "yes")
    assert page.posts[-1][1] == DATA["request"] | expected | {"messages": page.posts[-1][1]["messages"]}


def test_shortcuts_are_listed_and_escape_closes(page):
  page.settings()
  page.log.press("?")
  for is_open in (True, False):
    page.tab.keyboard.press("Escape")
    expect(page.tab.get_by_role("dialog")).to_be_hidden()
    expect(page.tab.get_by_label("API key")).to_be_visible(visible=is_open)


def test_tool_calls_are_shown_and_sent_again(page):
  tools = [{"type": "function", "function": {"name": "get_weather"}}]
  page.settings(tools=json.dumps(tools), max_tokens=5)
  assert page.ask("hello", *DATA["tool_call_deltas"], finish="tool_calls") == ""
  assert page.posts[-1][1]["tools"] == tools
  page.expect(stats=re.compile(r"^3 tokens.*\(tool_calls\)$"))
  code = page.answers.locator("details pre").first
  for is_reloaded in (False, True):
    if is_reloaded: page.tab.reload()
    page.expect(folds=["Tool call: get_weather", "Tool call: get_time"])
    expect(code).to_be_hidden()
    page.folds.first.click()
    expect(code).to_be_visible()
    assert code.text_content() == '{\n  "city": "Paris",\n  "days": 3\n}'
  page.unmock()
  page.settings(tools="")
  assert page.ask("sunny"), "the server accepts the conversation"
  assert "tools" not in page.posts[-1][1]
  assert page.posts[-1][1]["messages"][1] == DATA["tool_call_message"]
  page.ask("hello", *DATA["tool_call_deltas"])
  for name in ("get_weather", "get_time"): page.tab.get_by_label(f"Result of {name}").fill(f"of {name}")
  page.respond("It is sunny.")
  page.button("Send results").click()
  assert page.wait(4) == "It is sunny."
  assert page.posts[-1][1]["messages"][-2:] == DATA["tool_results"]


def test_search_finds_chats_by_title_and_text(page):
  page.add_chats("red apple", "green pear")
  page.ask("more", "only in the **answer**")
  for words, titles in DATA["searches"]:
    page.search.fill(words)
    page.expect(chats=titles)
    expect(page.tab.get_by_text("No chat has this text")).to_be_visible(visible=not titles)
  page.search.fill("")
  page.tab.keyboard.press("Control+k")
  page.tab.keyboard.type("in the **ANSWER")
  page.expect(chats=["green pear"])
  page.tab.keyboard.press("Escape")
  page.expect(search="", chats=2)


def export(page, name, path):
  """Click an export button, and save its file."""
  with page.tab.expect_download() as download: page.button(name).click()
  assert re.fullmatch(r"tinyvllm-chats-\d{4}-\d\d-\d\d\.json", download.value.suggested_filename)
  download.value.save_as(path)
  return json.loads(path.read_text())


def test_exported_chats_can_be_imported_once(page, visit, tmp_path):
  every, found = tmp_path / "chats.json", tmp_path / "found.json"
  page.add_chats("red apple", "green pear")
  page.ask("more", {"reasoning_content": "plan one"}, "done", *DATA["tool_call_deltas"])
  file = export(page, "Export all", every)
  assert file["format"] == "tinyvllm chats"
  assert [[m["content"] for m in one["messages"]] for one in file["chats"]] == [
    ["red apple", "**red apple**"], ["green pear", "**green pear**", "more", "done"]]
  page.search.fill("apple")
  assert export(page, "Export 1 found", found)["chats"] == file["chats"][:1]
  other = visit()
  for path, status in ((found, "1 of 1 chats imported."),
                       (every, "1 of 2 chats imported, the others are here already."),
                       (every, "0 of 2 chats imported, the others are here already.")):
    other.import_file(path)
    other.expect(status=status)
  other.tab.reload()
  other.expect(chats=["green pear", "red apple"])
  other.button("green pear").click()
  assert other.wait(2) == "done"
  other.expect(folds=["Reasoning", "Tool call: get_weather", "Tool call: get_time"])
  assert export(other, "Export all", tmp_path / "again.json") == file


def test_import_of_a_wrong_file_shows_an_error_and_changes_nothing(page, tmp_path):
  for i, (error, content) in enumerate(DATA["wrong_files"]):
    page.import_file(tmp_path / f"wrong{i}.json", content)
    page.expect(status=re.compile(rf"wrong{i}\.json was not imported: .*{re.escape(error)}"))
  page.expect(chats=0)
  assert not page.tab.evaluate("Object.keys(localStorage).filter(x => x.includes('chat'))")


def test_model_picker_appears_for_several_models_and_selects_one(page):
  page.expect(picker=0)
  page.ask("hello", "yes")
  assert "model" not in page.posts[-1][1]
  page.serve_models("words", "adapter")
  page.expect(picker="words")
  page.picker.select_option("adapter")
  page.tab.reload()
  page.expect(picker="adapter")
  page.ask("again")
  assert page.posts[-1][1]["model"] == "adapter"
  page.serve_models("words", "other")
  page.expect(picker="words")
