"""POST /v1/messages and /v1/messages/count_tokens with the anthropic package: text, thinking and tool calls, whole and
streamed; content blocks; errors; shortened bodies of Claude Code. POST /v1/responses with the openai package."""
import itertools
import json

import anthropic
import pytest
from helpers.agents import HERMES, NO_TAGS, WEATHER, named_events, start
from helpers.data import read_data
from helpers.servers import checked

KEY = "secret"
TOOL = {"name": "weather", "description": "of a city", "input_schema": WEATHER["parameters"]}
USER, CHOICES = {"role": "user", "content": "hello"}, read_data("server_cases.json")["tool choices"]
SCHEMA = {**WEATHER["parameters"], "x-guidance": {"whitespace_flexible": False}}
# Fields that differ between two equal messages, or that only the package's stream has
DIFFERENT = {"id": True, "usage": {"input_tokens", "cache_read_input_tokens"},
             "content": {"__all__": {"id", "signature", "parsed_output"}}}


@pytest.fixture(scope="module")
def server(tmp_path_factory): yield from checked(start(tmp_path_factory.mktemp("messages"), "--api-key", KEY))


def client(server, key=KEY):   # sends the key as x-api-key
  return anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60)


def num_input(usage): return usage.input_tokens + usage.cache_read_input_tokens


@pytest.fixture
def answer(server):
  """Return a function that returns a message, which must be the same streamed and whole. text: the output."""
  messages = client(server).messages
  def answer(text=None, **fields):
    extra = {"temperature": 0.0, **NO_TAGS, **({"structured_outputs": {"choice": [text]}} if text else {})}
    fields = {"model": "tiny", "messages": [USER], "max_tokens": 100, "extra_body": extra, **fields}
    whole = messages.create(**fields)
    with messages.stream(**fields) as stream:
      events = [x for x in stream if x.type.startswith(("message", "content_block"))]   # others are the package's
    final, first, last = stream.get_final_message(), events[0].message, events[-2]
    order = [(f"content_block_{x}", i) for i in range(len(final.content)) for x in ("start", "delta", "stop")]
    assert [key for key, _ in itertools.groupby((x.type, getattr(x, "index", None)) for x in events)] == [
      ("message_start", None), *order, ("message_delta", None), ("message_stop", None)]
    assert not first.content and first.stop_reason is None
    for name in ("input_tokens", "cache_read_input_tokens"):
      assert getattr(first.usage, name) == getattr(last.usage, name) == getattr(final.usage, name)
    assert final.model_dump(exclude=DIFFERENT) == whole.model_dump(exclude=DIFFERENT)
    assert num_input(final.usage) == num_input(whole.usage)
    return whole
  return answer


def test_text(answer):
  message = answer("the cat is", system="be kind", metadata={"user_id": "u"})
  assert (message.content[0].text, message.stop_reason) == ("the cat is", "end_turn")
  assert message.id.startswith("msg_") and message.usage.cache_creation_input_tokens == 0
  assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")


def test_message_cut_off_by_max_tokens_says_so_and_has_no_call(answer):
  message = answer(max_tokens=3)
  assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 3
  message = answer(tools=[TOOL], tool_choice={"type": "any"}, max_tokens=40)
  assert message.stop_reason == "max_tokens" and message.content[0].text.startswith('[{"name"')


def test_stop_sequence_ends_message_and_is_named(answer):
  text = answer(max_tokens=20).content[0].text
  stop = text[5:8]
  message = answer(max_tokens=20, stop_sequences=[stop])
  assert (message.content[0].text, message.stop_reason, message.stop_sequence) == (
    text[:text.index(stop)], "stop_sequence", stop)


def test_thinking_block_precedes_text(answer):
  thinking, text = answer("<think>it is red</think>a rose").content
  assert (thinking.thinking, text.text) == ("it is red", "a rose") and thinking.signature


@pytest.mark.parametrize("choice", CHOICES["/v1/messages"], ids=str)
def test_tool_use(answer, choice):
  is_auto = choice["type"] == "auto"
  server_tool = {"type": "web_search_20250305", "name": "web_search"}
  message = answer("I look: " + HERMES if is_auto else None, tools=[TOOL, server_tool], tool_choice=choice)
  *texts, call = message.content
  assert [block.type for block in texts] == ["text"] * is_auto and message.stop_reason == "tool_use"
  assert (call.type, call.name) == ("tool_use", "weather") and call.id.startswith("toolu_")
  assert call.input in ({"city": "Rom"}, {"city": "Ulm"})


def test_output_format_schema_constrains_output(answer):
  message = answer(output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
  assert json.loads(message.content[0].text)["city"] in ("Rom", "Ulm")


def test_other_errors_have_types_of_anthropic(server):
  with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
    client(server, "wrong").messages.count_tokens(model="tiny", messages=[USER])
  too_large = server.post("/v1/messages", {"messages": "x" * 2**22}, headers={"x-api-key": KEY})
  assert too_large.status_code == 413 and too_large.json()["error"]["type"] == "request_too_large"
  assert "param" in server.post("/v1/completions", {}, headers={"x-api-key": KEY}).json()["error"], "OpenAI's format"


@pytest.mark.parametrize("name", ["claude_code_first_turn.json", "claude_code_tool_turn.json"])
def test_body_of_claude_code_is_answered(server, name):
  body = read_data(name)
  headers = {"Authorization": f"Bearer {KEY}", "anthropic-version": "2023-06-01", "x-app": "cli",
             "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}
  count = server.post("/v1/messages/count_tokens?beta=true", body, headers=headers).json()["input_tokens"]
  with server.stream("/v1/messages?beta=true", {**body, "ignore_eos": True}, headers=headers) as response:
    data = named_events(response)
  assert data[0]["type"] == "message_start"
  assert [event["type"] for event in data[-2:]] == ["message_delta", "message_stop"]
  assert data[-2]["delta"]["stop_reason"] == "max_tokens", "max_tokens beyond the context means the rest of it"
  assert data[-2]["usage"]["input_tokens"] + data[-2]["usage"]["cache_read_input_tokens"] == count


# POST /v1/responses with the openai package: text, reasoning and tool calls, whole and streamed. Shortened bodies of
# Codex, input items and errors are in test_requests.py

NAMES = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
DIFFERENT_RESPONSES = {"id": True, "created_at": True, "usage": {"input_tokens_details"},
             "output": {"__all__": {"id", "call_id"}}}   # fields that differ between two equal responses


@pytest.fixture
def respond(server):
  """Return a function that returns a response, which must be the same streamed and whole. text: the output."""
  create = server.client(api_key=KEY).responses.create
  def respond(text=None, **fields):
    extra = {"structured_outputs": {"choice": [text]}} if text else NO_TAGS
    fields = {"model": "tiny", "input": "hello", "max_output_tokens": 100, "temperature": 0.0, "extra_body": extra,
              **fields}
    whole, streamed = create(**fields), collect([*create(**fields, stream=True)])
    assert streamed.model_dump(exclude=DIFFERENT_RESPONSES) == whole.model_dump(exclude=DIFFERENT_RESPONSES)
    return whole
  return respond


def collect(events):
  """Return the final response of a stream, after checks of its events."""
  assert [event.sequence_number for event in events] == [*range(len(events))]
  first, final = events[0].response, events[-1].response
  assert first.status == "in_progress" and not first.output
  order = [("created", None), ("in_progress", None)]
  for index, item in enumerate(final.output):
    name, has_part = NAMES[item.type], item.type != "function_call"
    own = [event for event in events if getattr(event, "output_index", None) == index]
    text = item.content[0].text if has_part else item.arguments
    done, = [event for event in own if event.type == f"response.{name}.done"]
    deltas = [event.delta for event in own if event.type == f"response.{name}.delta"]
    assert "".join(deltas) == text == (done.text if has_part else done.arguments)
    assert own[0].item.id == item.id == done.item_id and own[0].item.status == "in_progress"
    assert own[-1].item == item
    kinds = [f"{name}.delta"] * bool(deltas) + [f"{name}.done"]
    if has_part: kinds = ["content_part.added", *kinds, "content_part.done"]
    order += [(kind, index) for kind in ("output_item.added", *kinds, "output_item.done")]
  kinds = [(event.type.removeprefix("response."), getattr(event, "output_index", None)) for event in events]
  assert [kind for kind, _ in itertools.groupby(kinds)] == [*order, (final.status, None)]
  return final


def test_text_of_string_input(respond):
  response = respond("the cat is", instructions="be kind", metadata={"a": "b"}, store=True)
  message, = response.output
  assert (message.role, message.status, response.output_text) == ("assistant", "completed", "the cat is")
  assert response.id.startswith("resp_") and (response.status, response.instructions, response.metadata,
                                              response.store) == ("completed", "be kind", {"a": "b"}, False)


def test_response_cut_off_by_max_output_tokens_is_incomplete(respond):
  response = respond(max_output_tokens=3)
  assert response.status == response.output[0].status == "incomplete"
  assert response.incomplete_details.reason == "max_output_tokens"
  assert response.max_output_tokens == response.usage.output_tokens == 3
  assert response.usage.total_tokens == response.usage.input_tokens + 3


def test_reasoning_item_precedes_message(respond):
  items = respond("<think>it is red</think>a rose").output
  assert [(x.type, x.content[0].text) for x in items] == [("reasoning", "it is red"), ("message", "a rose")]


@pytest.mark.parametrize("choice", CHOICES["/v1/responses"], ids=str)
def test_function_call(respond, choice):
  response = respond("I look: " + HERMES if choice == "auto" else None, tools=[WEATHER, {"type": "web_search"}],
                    tool_choice=choice, parallel_tool_calls=False)
  *messages, call = response.output
  assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
  assert json.loads(call.arguments) in ({"city": "Rom"}, {"city": "Ulm"}) and call.call_id.startswith("call_")
  assert [item.type for item in messages] == ["message"] * (choice == "auto")
  assert [tool.name for tool in response.tools] == ["weather"], "tools of other types are skipped"


def test_text_format_schema_constrains_output(respond):
  form = {"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}, "verbosity": "low"}
  response = respond(extra_body={"text": form, **NO_TAGS})
  assert json.loads(response.output_text)["city"] in ("Rom", "Ulm") and response.text.format.schema_ == SCHEMA


def test_stream_helper_of_openai_package_returns_final_response(server):
  with server.client(api_key=KEY).responses.stream(
      model="tiny", input="hello", tools=[WEATHER], tool_choice="required", temperature=0.0,
      extra_body={"parallel_tool_calls": False, **NO_TAGS}) as stream:
    call = stream.get_final_response().output[0]
  assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Rom", "Ulm")
