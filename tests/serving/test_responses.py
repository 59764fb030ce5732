"""POST /v1/responses with the openai package: text, reasoning and tool calls, whole and streamed; input items; errors;
and shortened bodies of Codex."""
import json

import pytest
from helpers.agents import DATA, HERMES, NO_TAGS, WEATHER, named_events, start
from helpers.servers import checked


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  yield from checked(start(tmp_path_factory.mktemp("responses")))


@pytest.fixture
def create(server):
  """Return a function that creates a response, with the openai package's default fields."""
  client = server.client()
  def create(text=None, **fields):
    extra = {"extra_body": {"structured_outputs": {"choice": [text]}} if text is not None else NO_TAGS}
    return client.responses.create(**{"model": "tiny", "input": "hello", "max_output_tokens": 100, "temperature": 0.0,
                                      **extra, **fields})
  return create


def collect(events):
  """Return the final response of a stream, after checks of its events."""
  events = [*events]
  assert [event.sequence_number for event in events] == [*range(len(events))]
  kinds = [event.type.removeprefix("response.") for event in events]
  assert kinds[:2] == ["created", "in_progress"] and kinds.count("completed") + kinds.count("incomplete") == 1
  assert events[0].response.status == "in_progress" and not events[0].response.output
  final = events[-1].response
  names = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
  rest = [*zip(kinds, events, strict=True)][2:-1]
  for index, item in enumerate(final.output):
    own = [(kind, event) for kind, event in rest if event.output_index == index]
    name, has_part = names[item.type], item.type != "function_call"
    deltas = [event.delta for kind, event in own if kind == f"{name}.delta"]
    assert [kind for kind, _ in own] == [
      "output_item.added", *["content_part.added"] * has_part, *[f"{name}.delta"] * len(deltas), f"{name}.done",
      *["content_part.done"] * has_part, "output_item.done"]
    text = item.content[0].text if has_part else item.arguments
    done = next(event for kind, event in own if kind == f"{name}.done")
    assert "".join(deltas) == text == (done.text if has_part else done.arguments)
    assert own[0][1].item.id == item.id == done.item_id and own[0][1].item.status == "in_progress"
    assert own[-1][1].item == item
  return final


def answer(create, text=None, **fields):
  """Return the response, which must be the same streamed and whole, except for ids and cached tokens."""
  whole = create(text, **fields)
  streamed = collect(create(text, stream=True, **fields))
  def content(response):
    return [item.model_dump(exclude={"id", "call_id"}) for item in response.output]
  assert content(streamed) == content(whole)
  assert (streamed.status, streamed.incomplete_details) == (whole.status, whole.incomplete_details)
  assert streamed.usage.output_tokens == whole.usage.output_tokens
  return whole


def test_text_of_string_input_is_same_whole_and_streamed(create):
  response = answer(create, "the cat is", instructions="be kind", metadata={"a": "b"}, store=True)
  assert response.output_text == "the cat is" and response.status == "completed" and response.id.startswith("resp_")
  assert response.instructions == "be kind" and response.metadata == {"a": "b"} and response.store is False
  message, = response.output
  assert message.role == "assistant" and message.status == "completed"


def test_response_cut_off_by_max_output_tokens_is_incomplete(create):
  response = answer(create, max_output_tokens=3)
  assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
  assert response.output[0].status == "incomplete" and response.usage.output_tokens == 3
  assert response.max_output_tokens == 3


def test_usage_counts_cached_prompt_tokens(create):
  text = "a long question which fills some blocks of the cache"
  first, second = (create("yes", input=text).usage for _ in range(2))
  assert first.total_tokens == first.input_tokens + first.output_tokens
  assert first.input_tokens_details.cached_tokens < second.input_tokens_details.cached_tokens < second.input_tokens


def test_reasoning_item_precedes_message(create):
  response = answer(create, "<think>it is red</think>a rose")
  reasoning, message = response.output
  assert (reasoning.type, reasoning.content[0].text) == ("reasoning", "it is red")
  assert (message.type, message.content[0].text) == ("message", "a rose")


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}, {
  "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}], ids=str)
def test_function_call_is_same_whole_and_streamed(create, choice):
  text = "I look: " + HERMES if choice == "auto" else None
  response = answer(create, text, tools=[WEATHER, {"type": "web_search"}], tool_choice=choice,
                    parallel_tool_calls=False)
  call = response.output[-1]
  assert call.type == "function_call" and call.name == "weather" and call.status == "completed"
  assert json.loads(call.arguments) in ({"city": "Rom"}, {"city": "Ulm"}) and call.call_id.startswith("call_")
  assert [item.type for item in response.output] == ["message"] * (choice == "auto") + ["function_call"]
  assert [tool.name for tool in response.tools] == ["weather"], "tools of other types are skipped"


def test_text_format_schema_constrains_output(create):
  schema = {"type": "object", "properties": {"city": {"enum": ["Rom", "Ulm"]}}, "required": ["city"],
            "additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
  form = {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}, "verbosity": "low"}
  response = collect(create(stream=True, extra_body={"text": form, **NO_TAGS}))
  assert json.loads(response.output_text)["city"] in ("Rom", "Ulm")
  assert response.text.format.schema_ == schema


def test_stream_helper_of_openai_package_returns_final_response(server):
  with server.client().responses.stream(
      model="tiny", input="hello", tools=[WEATHER], tool_choice="required", temperature=0.0,
      extra_body={"parallel_tool_calls": False, **NO_TAGS}) as stream:
    for _ in stream: pass
    call = stream.get_final_response().output[0]
  assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Rom", "Ulm")


@pytest.mark.parametrize("name", ["codex_first_turn.json", "codex_tool_turn.json"])
def test_body_of_codex_is_answered(server, name):
  body = json.loads((DATA / name).read_text())
  headers = {"Accept": "text/event-stream", "Authorization": "Bearer none", "originator": "codex_exec"}
  with server.stream("/v1/responses", {**body, "max_output_tokens": 5}, headers=headers) as response:
    events = named_events(response)
  assert events[0]["type"] == "response.created" and events[-1]["type"] == "response.incomplete"
  assert events[-1]["response"]["usage"]["input_tokens"] > 50
