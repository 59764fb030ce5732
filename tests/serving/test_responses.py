"""POST /v1/responses with the openai package: text, reasoning and tool calls, whole and streamed. Shortened bodies
of Codex, input items and errors are in test_requests.py."""
import itertools
import json

import pytest
from helpers.agents import HERMES, NO_TAGS, WEATHER, start
from helpers.servers import checked

NAMES = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
DIFFERENT = {"id": True, "created_at": True, "usage": {"input_tokens_details"},
             "output": {"__all__": {"id", "call_id"}}}   # fields that differ between two equal responses


@pytest.fixture(scope="module")
def server(tmp_path_factory): yield from checked(start(tmp_path_factory.mktemp("responses")))


@pytest.fixture
def answer(server):
  """Return a function that returns a response, which must be the same streamed and whole. text: the output."""
  create = server.client().responses.create
  def answer(text=None, **fields):
    extra = {"structured_outputs": {"choice": [text]}} if text else NO_TAGS
    fields = {"model": "tiny", "input": "hello", "max_output_tokens": 100, "temperature": 0.0, "extra_body": extra,
              **fields}
    whole, streamed = create(**fields), collect([*create(**fields, stream=True)])
    assert streamed.model_dump(exclude=DIFFERENT) == whole.model_dump(exclude=DIFFERENT)
    return whole
  return answer


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


def test_text_of_string_input(answer):
  response = answer("the cat is", instructions="be kind", metadata={"a": "b"}, store=True)
  message, = response.output
  assert (message.role, message.status, response.output_text) == ("assistant", "completed", "the cat is")
  assert response.id.startswith("resp_") and (response.status, response.instructions, response.metadata,
                                              response.store) == ("completed", "be kind", {"a": "b"}, False)


def test_response_cut_off_by_max_output_tokens_is_incomplete(answer):
  response = answer(max_output_tokens=3)
  assert response.status == response.output[0].status == "incomplete"
  assert response.incomplete_details.reason == "max_output_tokens"
  assert response.max_output_tokens == response.usage.output_tokens == 3
  assert response.usage.total_tokens == response.usage.input_tokens + 3


def test_reasoning_item_precedes_message(answer):
  items = answer("<think>it is red</think>a rose").output
  assert [(x.type, x.content[0].text) for x in items] == [("reasoning", "it is red"), ("message", "a rose")]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}, {
  "type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}], ids=str)
def test_function_call(answer, choice):
  response = answer("I look: " + HERMES if choice == "auto" else None, tools=[WEATHER, {"type": "web_search"}],
                    tool_choice=choice, parallel_tool_calls=False)
  *messages, call = response.output
  assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
  assert json.loads(call.arguments) in ({"city": "Rom"}, {"city": "Ulm"}) and call.call_id.startswith("call_")
  assert [item.type for item in messages] == ["message"] * (choice == "auto")
  assert [tool.name for tool in response.tools] == ["weather"], "tools of other types are skipped"


def test_text_format_schema_constrains_output(answer):
  schema = {**WEATHER["parameters"], "x-guidance": {"whitespace_flexible": False}}
  form = {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}, "verbosity": "low"}
  response = answer(extra_body={"text": form, **NO_TAGS})
  assert json.loads(response.output_text)["city"] in ("Rom", "Ulm") and response.text.format.schema_ == schema


def test_stream_helper_of_openai_package_returns_final_response(server):
  with server.client().responses.stream(
      model="tiny", input="hello", tools=[WEATHER], tool_choice="required", temperature=0.0,
      extra_body={"parallel_tool_calls": False, **NO_TAGS}) as stream:
    call = stream.get_final_response().output[0]
  assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Rom", "Ulm")
