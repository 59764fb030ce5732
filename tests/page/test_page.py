"""Requests, conversations, settings and storage of the chat page."""
import dataclasses
import json
import re

import pytest
from helpers.requests import flags
from helpers.servers import LocalServer, wait_until
from playwright.sync_api import expect

from tinyvllm import SamplingParams

LONG = 16_000   # more tokens than a test waits for
TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]
# Streamed deltas with two tool calls, whose arguments arrive in pieces
CALLS = [{"index": 0, "id": "call-1", "type": "function", "function": {
           "name": "get_weather", "arguments": '{"city": "Pa'}},
         {"index": 0, "function": {"arguments": 'ris", "days": 3}'}},
         {"index": 1, "id": "call-2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}]
CALL_DELTAS = [{"tool_calls": [call]} for call in CALLS]
# Fields of SamplingParams without a setting on the page: token ids, n, logprobs, structured outputs
NOT_ON_PAGE = {"n", "stop_token_ids", "logit_bias", "allowed_token_ids", "logprobs", "prompt_logprobs",
               "structured_outputs"}
QUESTION, REPLY = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
# Chats of a file that cannot be imported, or the whole file, and the error
WRONG_FILES = [
  ("{", "it is not JSON"), (None, "no list of chats"), ({"format": "other", "chats": []}, "no list of chats"),
  ({"chats": []}, "no list of chats"), ({"format": "tinyvllm chats", "chats": {}}, "no list of chats"),
  ([None], "chat 1, messages must be a list"), ([{"messages": []}], "chat 1, messages must be a list"),
  ([[QUESTION, REPLY], [REPLY]], 'chat 2, message 1: role must be "user"'),
  ([[QUESTION, QUESTION]], 'chat 1, message 2: role must be "assistant"'),
  ([[QUESTION, None]], 'message 2: role must be "assistant"'),
  ([[{"role": "user", "content": ["q"]}]], "message 1: content must be a string"),
  ([[QUESTION, {**REPLY, "reasoning": 1}]], "message 2: reasoning and stats must be strings"),
  ([[QUESTION, {**REPLY, "calls": [{"name": "f"}]}]], "message 2: calls must be a list"),
]
BLOCKED_STORAGE = """for (const name of ["localStorage", "sessionStorage"])
  Object.defineProperty(window, name, {get() { throw new DOMException("no") }})"""
FULL_STORAGE = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }"
CORRUPT_STORAGE = """for (const [name, text] of [
  ["chat 1", "{"], ["chat 2", "3"], ["chat 3", "[{}]"], ["settings", "3"]])
  localStorage.setItem(`tinyvllm ${name}`, text)"""


def wait_until_idle(server): wait_until(lambda: server.metrics()["num_requests_running"] == 0, "no request runs")


def complete(server, messages, **fields):
  """Return the server's answer without streaming."""
  response = server.post("/v1/chat/completions", {"messages": messages, "temperature": 0, **fields})
  return response.raise_for_status().json()["choices"][0]["message"]["content"]


def test_conversation_and_system_prompt_are_sent_and_server_answers(visit, server):
  page = visit()
  page.settings(system_prompt="be kind", temperature=0, max_tokens=200)
  page.send("one")
  first = page.wait()
  page.send("two")
  second = page.wait(2)
  system, one, two = ({"role": r, "content": c} for r, c in (("system", "be kind"), ("user", "one"), ("user", "two")))
  messages = [system, one, {"role": "assistant", "content": first}, two]
  assert [path for path, _ in page.posts] == ["/v1/chat/completions"] * 2
  assert [body["messages"] for _, body in page.posts] == [[system, one], messages]
  assert second == complete(server, messages, max_tokens=200)
  page.expect_stats(r"^200 tokens, \d+\.\d tokens/s, first token after \d+\.\d\d s \(length\)$")
  page.new_chat()
  page.settings(system_prompt="")
  page.ask("two", "the cat sat", " on the mat", usage=9)
  assert page.posts[-1][1]["messages"] == [two]
  page.expect_stats(r"^9 tokens(, \d+\.\d tokens/s)?, first token after \d+\.\d\d s$")   # no rate if all arrive at once


def test_streamed_answer_grows_while_log_is_busy(visit):
  page = visit(feed=True)
  page.send("hello")
  for size, text in ((1000, "one"), (1, "é€😀"), (7, " two")):   # 1 splits characters, 7 events
    expect(page.log).to_have_attribute("aria-busy", "true")
    page.feed(text, size)
    expect(page.answers.locator("> div")).to_contain_text(text)
  page.feed(None)
  assert page.wait() == "oneé€😀 two"
  expect(page.log).to_have_attribute("aria-busy", "false")
  expect(page.log).to_have_attribute("aria-live", "polite")
  page.expect_stats("^3 tokens")


def test_stop_button_and_escape_abort_the_request_and_keep_its_text(visit, server):
  page, sent = visit(), []
  def num_aborted(): return server.metrics().get("request_success_total{finished_reason=abort}", 0)
  page.settings(temperature=0, max_tokens=LONG)
  button = page.tab.locator("form").get_by_role("button")
  for stop in (button.click, lambda: page.tab.keyboard.press("Escape")):
    before = num_aborted()
    expect(button).to_have_accessible_name("Send")
    page.message.fill("hello")
    button.dblclick()   # the second click does not stop
    expect(button).to_have_accessible_name("Stop")
    page.wait_for_text(20)
    assert server.metrics()["num_requests_running"] == 1
    page.message.fill("too early")
    page.message.press("Enter")
    stop()
    sent += ["hello", page.wait(len(sent) // 2 + 1)]
    wait_until(lambda before=before: num_aborted() == before + 1, "the request is aborted")
    page.expect_stats(r"^\d+ tokens, \d+\.\d tokens/s, .* s, stopped$")
    expect(page.alert).to_have_count(0)
    expect(page.message).to_be_focused()
    expect(page.message).to_have_value("too early")
  page.settings(max_tokens=5)
  page.send("again")
  assert page.wait(3)
  assert page.sent == [*sent, "again"]


def test_new_chat_and_closed_page_abort_the_request_and_keep_its_text(visit, server):
  page = visit()
  page.settings(temperature=0, max_tokens=LONG)
  page.send("first")
  page.wait_for_text()
  page.new_chat()
  wait_until_idle(server)
  expect(page.message).to_have_value("")
  page.send("second")
  page.wait_for_text()
  assert page.sent == ["second"]
  page.button("first").click()
  wait_until_idle(server)
  assert page.wait()
  expect(page.questions.locator("> div")).to_have_text("first")
  page.expect_stats("stopped$")
  page.send("third")
  page.wait_for_text()
  assert server.metrics()["num_requests_running"] == 1
  page.tab.close()
  wait_until_idle(server)


def test_api_key_is_asked_for_and_stored_for_the_session(visit, chat_folder, engine_flags):
  with LocalServer(chat_folder, *engine_flags, *flags(api_key="a key")) as server:
    assert server.get("/").status_code == 200
    page, message = visit(server.url), server.get("/v1/models").json()["error"]["message"]
    expect(page.status).to_have_text(f"401: {message}")
    key = page.tab.get_by_label("API key")
    expect(key).to_be_visible()   # the settings open
    page.settings(max_tokens=5, api_key="wrong")
    page.send("hello")
    expect(page.alert).to_have_text(f"401: {message}")
    expect(page.message).to_have_value("hello")
    page.settings(api_key="a key")
    expect(page.title).to_have_text("tinyvllm words")
    page.button("Send").click()
    assert page.wait()
    page.tab.reload()
    assert key.input_value() == "a key"
    assert page.tab.evaluate("[...Object.values(localStorage), document.cookie].filter(x => x.includes('a key'))") == []


def test_invalid_settings_show_an_error_and_keep_the_question(visit):
  page = visit()
  for tools in ("{", '{"type": "function"}'):
    page.settings(tools=tools)
    page.send("hello")
    expect(page.alert).to_contain_text("Tools must be a JSON list")
    expect(page.message).to_have_value("hello")
  assert not page.posts
  page.settings(tools="", temperature=-1)
  page.send("hello")
  expect(page.alert).to_have_text(re.compile(r"^400: .*temperature"))


def test_enter_sends_and_shift_enter_inserts_a_newline(visit):
  page = visit()
  page.respond("yes")
  page.message.press_sequentially("one")
  page.message.press("Shift+Enter")
  page.message.press_sequentially("two")
  expect(page.message).to_have_value("one\ntwo")
  page.message.evaluate("x => x.dispatchEvent(new KeyboardEvent('keydown', {key: 'Enter', isComposing: true}))")
  assert not page.posts, "Enter within an input method's composition must not send"
  page.message.press("Enter")
  expect(page.message).to_have_value("")
  page.wait()
  assert page.sent == ["one\ntwo"]
  page.message.press("Enter")
  page.message.fill(" \n ")
  page.message.press("Enter")
  expect(page.questions).to_have_count(1)


def test_interrupted_stream_keeps_its_text_and_shows_the_error(visit):
  page = visit()
  failed = {"error": {"message": "a step failed", "code": 500}}
  for events, is_done, error in ((["some", failed], True, "a step failed"),
                                 (["some"], False, "The connection closed")):
    assert page.ask("hello", *events, done=is_done) == "some"
    expect(page.alert).to_contain_text(error)
    page.new_chat()
  page.unmock()
  requests = []
  page.tab.route("**/v1/chat/completions", lambda route: (requests.append(route), route.abort()))
  page.send("hello")
  expect(page.alert).to_have_text("The server is not responding.")
  expect(page.message).to_have_value("hello")
  expect(page.articles).to_have_count(0)
  assert len(requests) == 2, "one retry, as the server responds to other requests"


def test_question_waits_while_the_server_is_down_or_loading(visit):
  page, state = visit(), {"message": "the model is loading"}

  def handle(route):
    if state["message"]: route.fulfill(status=503, json={"error": {"message": state["message"]}})
    elif state["message"] is None: route.abort()
    else: route.continue_()
  page.tab.route("**/v1/**", handle)
  page.tab.reload()
  expect(page.status).to_contain_text("(503: the model is loading)")
  page.settings(max_tokens=5)
  page.send("hello")
  state["message"] = "preparing 5 of 16"
  expect(page.status).to_contain_text("preparing 5 of 16")
  page.button("Stop").click()
  expect(page.message).to_have_value("hello")
  expect(page.articles).to_have_count(0)
  state["message"] = None
  page.button("Send").click()
  expect(page.status).to_have_text(re.compile(r"^The server is not responding\. Retrying"))
  expect(page.button("Stop")).to_be_visible()
  state["message"] = ""
  assert page.wait()
  expect(page.title).to_have_text("tinyvllm words")
  expect(page.status).to_be_empty()
  expect(page.alert).to_have_count(0)


def test_full_queue_shows_an_error_and_restores_the_conversation(visit):
  page = visit()
  page.ask("first", "one")
  page.fail(429, "at most 2 sequences may wait")

  def expect_unchanged(text):
    expect(page.alert).to_have_text(re.compile(r"queue is full.*\(429: at most 2 sequences may wait\)"))
    assert page.wait() == "one", "the previous answer"
    expect(page.message).to_have_value(text)
  page.send("second")
  expect_unchanged("second")
  page.button("Regenerate").click()
  expect_unchanged("second")
  page.edit("first")
  page.send("another")
  expect_unchanged("another")


def test_model_without_chat_template_uses_completions_and_shows_a_notice(visit, words_folder):
  with LocalServer(words_folder, *flags(max_num_seqs=2, max_num_batched_tokens=16)) as server:
    page = visit(server.url)
    page.settings(system_prompt="not sent", temperature=0, max_tokens=20)
    page.send("hello")
    texts = [page.wait()]
    expect(page.status).to_contain_text("no chat template")
    page.send("the cat")
    texts += [page.wait(2)]
    assert [path for path, _ in page.posts] == ["/v1/chat/completions", *["/v1/completions"] * 2]
    assert [body["prompt"] for _, body in page.posts[1:]] == ["hello", "the cat"]
    body = {"prompt": ["hello", "the cat"], "temperature": 0, "max_tokens": 20}
    assert [choice["text"] for choice in server.post("/v1/completions", body).json()["choices"]] == texts
    expect(page.alert).to_have_count(0)


def test_regenerate_replaces_the_last_answer(visit):
  page = visit()
  page.ask("question 1", "one")
  page.ask("question 2", "two")
  page.respond("three")
  page.button("Regenerate").click()   # there is only one such button
  expect(page.answers.locator("> div")).to_have_text(["one", "three"])
  page.wait(2)
  assert page.posts[-1] == page.posts[-2]
  expect(page.message).to_be_focused()


def test_editing_a_question_drops_the_messages_after_it(visit):
  page = visit()
  for question in ("first", "second", "third"): page.ask(question, "yes")
  page.message.fill("a draft")
  page.edit("second")
  expect(page.status).to_contain_text("Escape")
  page.tab.keyboard.press("Escape")
  expect(page.message).to_have_value("a draft")
  expect(page.articles).to_have_count(6)
  page.edit("second")
  page.send("other")
  page.wait(2)
  expect(page.questions.locator("> div")).to_have_text(["first", "other"])
  assert page.sent == ["first", "yes", "other"]
  expect(page.message).to_have_value("a draft")
  page.ask("next", "yes")
  assert page.sent == ["first", "yes", "other", "yes", "next"]


def test_conversations_survive_reload_and_can_be_selected_and_deleted(visit):
  page = visit()
  for name in ("red", "green", "blue"):
    page.new_chat()
    page.ask(f"what is {name}?", f"**{name}**")
  page.button("what is green?").click()
  expect(page.answers.locator("strong")).to_have_text("green")
  expect(page.message).to_be_focused()
  page.tab.reload()
  expect(page.answers.locator("strong")).to_have_text("green")
  page.expect_stats(r"^1 tokens.* \d+\.\d\d s$")
  expect(page.chats).to_have_text([f"what is {name}?✕" for name in ("blue", "green", "red")])
  expect(page.tab.locator("nav [aria-current=true]")).to_have_text("what is green?")
  page.ask("more", "yes")
  assert page.sent == ["what is green?", "**green**", "more"]
  page.tab.once("dialog", lambda dialog: dialog.dismiss())
  page.button("Delete what is green?").click()
  expect(page.chats).to_have_count(3)
  page.tab.on("dialog", lambda dialog: dialog.accept())
  page.button("Delete what is red?").click()
  expect(page.answers).to_have_count(2)
  page.button("Delete what is green?").click()
  expect(page.articles).to_have_count(0)
  other = page.tab.context.new_page()
  for tab in (page.tab, other):
    tab.goto(page.tab.url)
    expect(tab.locator("nav li")).to_have_text(["what is blue?✕"])
    expect(tab.get_by_role("article")).to_have_count(0)
  other.close()


def test_reload_during_an_answer_keeps_its_text(visit):
  page = visit(feed=True)
  page.send("first")
  expect(page.button("Stop")).to_be_visible()
  page.tab.reload()   # before the first token
  expect(page.message).to_have_value("first")
  expect(page.articles).to_have_count(0)
  page.button("Send").click()
  expect(page.button("Stop")).to_be_visible()
  page.feed("half an")
  expect(page.answers.locator("p")).to_have_text("half an")
  page.tab.reload()
  assert page.wait() == "half an"
  expect(page.chats).to_have_count(1)


@pytest.mark.parametrize("script", [BLOCKED_STORAGE, FULL_STORAGE, CORRUPT_STORAGE], ids=["blocked", "full", "corrupt"])
def test_failed_storage_shows_a_notice_and_page_works(visit, script):
  page = visit()
  page.tab.add_init_script(script)
  page.tab.reload()
  assert page.ask("hello", "yes") == "yes"
  if script != CORRUPT_STORAGE: expect(page.status).to_contain_text("lost when the page is closed")
  expect(page.chats).to_have_text(["hello✕"])
  page.new_chat()
  page.button("hello").click()
  assert page.wait() == "yes"


def test_every_sampling_setting_is_sent_and_survives_reload(visit):
  page = visit()
  names = set(page.tab.locator("fieldset [name]").evaluate_all("all => all.map(x => x.name)")) - {"system", "tools"}
  assert names == {field.name for field in dataclasses.fields(SamplingParams)} - NOT_ON_PAGE
  values = {"max_tokens": 9, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 7,
            "presence_penalty": 0.1, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
  page.settings(**values, bad_words="ugly", system_prompt="be kind")
  page.tab.locator("[name=stop]").fill("one\n\\n\\n")
  page.tab.locator("[name=ignore_eos]").select_option("yes")
  page.tab.locator("[name=skip_special_tokens]").select_option("no")
  expected = {**values, "bad_words": ["ugly"], "stop": ["one", "\n\n"], "ignore_eos": True,
              "skip_special_tokens": False, "include_stop_str_in_output": None}
  for count in (1, 2):
    page.send("hello")
    page.wait(count)
    body = page.posts[-1][1]
    assert {name: body[name] for name in names} == expected
    assert body["messages"][0] == {"role": "system", "content": "be kind"}
    page.tab.reload()
  page.settings(temperature="", max_tokens="")
  page.ask("again", "yes")
  assert page.posts[-1][1]["temperature"] is page.posts[-1][1]["max_tokens"] is None, "use the server's defaults"


def test_tool_calls_are_shown_and_sent_again(visit):
  page = visit()
  page.settings(tools=json.dumps(TOOLS), max_tokens=5)
  assert page.ask("hello", *CALL_DELTAS, finish="tool_calls") == ""
  assert page.posts[-1][1]["tools"] == TOOLS
  page.expect_stats(r"^3 tokens.*\(tool_calls\)$")
  calls = page.answers.locator("details")
  for is_reloaded in (False, True):
    if is_reloaded: page.tab.reload()
    expect(calls.locator("summary")).to_have_text(["Tool call: get_weather", "Tool call: get_time"])
    expect(calls.locator("pre").first).to_be_hidden()
    calls.locator("summary").first.click()
    expect(calls.locator("pre").first).to_be_visible()
    assert calls.locator("pre").first.text_content() == '{\n  "city": "Paris",\n  "days": 3\n}'
  page.unmock()
  page.settings(tools="")
  page.send("sunny")
  assert page.wait(2), "the server accepts the conversation"
  assert "tools" not in page.posts[-1][1]
  called = [{"name": "get_weather", "arguments": '{"city": "Paris", "days": 3}'},
            {"name": "get_time", "arguments": "{}"}]
  assert page.posts[-1][1]["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [
    {"id": f"call-{i}", "type": "function", "function": function} for i, function in enumerate(called, 1)]}


def test_search_finds_chats_by_title_and_text(visit):
  page = visit()
  for question in ("red apple", "green pear"):
    page.new_chat()
    page.ask(question, question.upper())
  page.ask("more", "only in the **answer**")
  for words, titles in (("APPLE", ["red apple✕"]), (" pear ", ["green pear✕"]), ("re", ["green pear✕", "red apple✕"]),
                        ("PEAR.", [])):
    page.search.fill(words)
    expect(page.chats).to_have_text(titles)
    expect(page.tab.get_by_text("No chat has this text")).to_be_visible(visible=not titles)
  page.search.fill("")
  page.tab.keyboard.press("Control+k")
  page.tab.keyboard.type("in the **ANSWER")
  expect(page.chats).to_have_text(["green pear✕"])
  page.tab.keyboard.press("Escape")
  expect(page.search).to_have_value("")
  expect(page.chats).to_have_count(2)


def export(page, name, path):
  """Click an export button, and save its file."""
  with page.tab.expect_download() as download: page.button(name).click()
  assert re.fullmatch(r"tinyvllm-chats-\d{4}-\d\d-\d\d\.json", download.value.suggested_filename)
  download.value.save_as(path)
  return json.loads(path.read_text())


def test_exported_chats_can_be_imported_once(visit, tmp_path):
  page, every, found = visit(), tmp_path / "chats.json", tmp_path / "found.json"
  expect(page.button("Export all")).to_be_disabled()
  page.ask("red apple", "RED")
  page.new_chat()
  page.ask("green pear", "GREEN")
  page.ask("more", {"reasoning_content": "plan one"}, "done", *CALL_DELTAS)
  file = export(page, "Export all", every)
  assert file["format"] == "tinyvllm chats"
  assert [[m["content"] for m in one["messages"]] for one in file["chats"]] == [
    ["red apple", "RED"], ["green pear", "GREEN", "more", "done"]]
  page.search.fill("apple")
  assert export(page, "Export 1 found", found)["chats"] == file["chats"][:1]
  other = visit()
  other.import_file(found)
  expect(other.status).to_have_text("1 of 1 chats imported.")
  for imported in ("1 of 2", "0 of 2"):
    other.import_file(every)
    expect(other.status).to_have_text(f"{imported} chats imported, the others are here already.")
  other.tab.reload()
  expect(other.chats).to_have_text(["green pear✕", "red apple✕"])
  other.button("green pear").click()
  assert other.wait(2) == "done"
  expect(other.answers.last.locator("summary")).to_have_text(
    ["Reasoning", "Tool call: get_weather", "Tool call: get_time"])
  assert export(other, "Export all", tmp_path / "again.json") == file


def test_import_of_a_wrong_file_shows_an_error_and_changes_nothing(visit, tmp_path):
  page = visit()
  for i, (content, error) in enumerate(WRONG_FILES):
    if isinstance(content, list):
      listed = [{"messages": one} if isinstance(one, list) else one for one in content]
      content = {"format": "tinyvllm chats", "chats": listed}
    page.import_file(tmp_path / f"wrong{i}.json", content if content is not None else "null")
    expect(page.status).to_contain_text(f"wrong{i}.json was not imported: ")
    expect(page.status).to_contain_text(error)
  expect(page.chats).to_have_count(0)
  assert not page.tab.evaluate("Object.keys(localStorage).filter(x => x.includes('chat'))")


def test_model_picker_appears_for_several_models_and_selects_one(visit):
  page = visit()
  picker = page.tab.get_by_role("combobox", name="Model", exact=True)
  expect(picker).to_have_count(0)
  page.ask("hello", "yes")
  assert "model" not in page.posts[-1][1]
  page.serve_models("words", "adapter")
  page.tab.reload()
  expect(picker).to_have_value("words")
  picker.select_option("adapter")
  page.tab.reload()
  expect(picker).to_have_value("adapter")
  page.ask("again", "yes")
  assert page.posts[-1][1]["model"] == "adapter"
  page.serve_models("words", "other")
  page.tab.reload()
  expect(picker).to_have_value("words")
