"""POST /v1/messages and /v1/messages/count_tokens with the anthropic package: text, thinking and tool calls, whole and
streamed; content blocks; errors; and shortened bodies of Claude Code."""
import json

import anthropic
import pytest
from helpers.agents import DATA, HERMES, WEATHER, named_events, start
from helpers.servers import checked

KEY = "secret"
TOOL = {"name": "weather", "description": "of a city", "input_schema": WEATHER["parameters"]}
USER = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  yield from checked(start(tmp_path_factory.mktemp("messages"), "--api-key", KEY))


@pytest.fixture
def client(server):   # sends the key as x-api-key
  return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture
def create(client):
  def create(text=None, **fields):
    extra = {"extra_body": {"temperature": 0.0, **({"structured_outputs": {"choice": [text]}} if text else {})}}
    return client.messages.create(**{"model": "tiny", "messages": [USER], "max_tokens": 100, **extra, **fields})
  return create


def merge(events):
  """Return the content blocks, without ids, and the end of a stream, after checks of its events."""
  events = [*events]
  kinds = [event.type for event in events]
  assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
  assert not events[0].message.content and events[0].message.stop_reason is None
  blocks, is_open = [], False
  for event in events[1:-2]:
    if event.type == "content_block_start":
      assert not is_open and event.index == len(blocks)
      is_open = True
      blocks.append([event.content_block, ""])
    elif event.type == "content_block_delta":
      assert is_open and event.index == len(blocks) - 1
      names = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}
      if event.delta.type != "signature_delta": blocks[-1][1] += getattr(event.delta, names[event.delta.type])
    else:
      assert event.type == "content_block_stop" and is_open and event.index == len(blocks) - 1
      is_open = False
  assert not is_open
  return [(block.type, getattr(block, "name", None), text) for block, text in blocks], events[0], events[-2]


def answer(create, text=None, **fields):
  """Return the message, which must be the same streamed and whole, except for ids and cached tokens."""
  whole = create(text, **fields)
  streamed, first, last = merge(create(text, stream=True, **fields))
  def content(block):
    text = {"text": lambda: block.text, "thinking": lambda: block.thinking,
            "tool_use": lambda: json.dumps(block.input)}[block.type]()
    return block.type, getattr(block, "name", None), text
  parsed = [(kind, name, json.dumps(json.loads(text)) if kind == "tool_use" else text) for kind, name, text in streamed]
  assert parsed == [*map(content, whole.content)]
  assert (last.delta.stop_reason, last.delta.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
  assert last.usage.output_tokens == whole.usage.output_tokens
  usage = first.message.usage
  assert usage.input_tokens == last.usage.input_tokens
  assert usage.cache_read_input_tokens == last.usage.cache_read_input_tokens
  return whole


def num_input(usage): return usage.input_tokens + usage.cache_read_input_tokens


def test_text_is_same_whole_and_streamed(create):
  message = answer(create, "the cat is", system="be kind", metadata={"user_id": "u"})
  assert message.content[0].text == "the cat is" and message.stop_reason == "end_turn" and message.role == "assistant"
  assert message.id.startswith("msg_") and message.model == "tiny" and message.type == "message"


def test_message_cut_off_by_max_tokens_says_so(create):
  message = answer(create, max_tokens=3)
  assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 3


def test_stop_sequence_ends_message_and_is_named(create):
  text = create(max_tokens=20).content[0].text
  stop = text[5:8]
  message = answer(create, max_tokens=20, stop_sequences=[stop])
  assert message.content[0].text == text[:text.index(stop)]
  assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_usage_counts_cached_prompt_tokens(create):
  messages = [{"role": "user", "content": "a long question which fills some blocks of the cache"}]
  first, second = (create("yes", messages=messages).usage for _ in range(2))
  assert num_input(first) == num_input(second) and second.cache_creation_input_tokens == 0
  assert first.cache_read_input_tokens < second.cache_read_input_tokens


def test_thinking_block_precedes_text(create):
  message = answer(create, "<think>it is red</think>a rose")
  thinking, text = message.content
  assert (thinking.thinking, text.text) == ("it is red", "a rose") and thinking.signature


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any", "disable_parallel_tool_use": True},
                                    {"type": "tool", "name": "weather"}], ids=lambda x: x["type"])
def test_tool_use_is_same_whole_and_streamed(create, choice):
  is_auto = choice["type"] == "auto"
  server_tool = {"type": "web_search_20250305", "name": "web_search"}
  message = answer(create, "I look: " + HERMES if is_auto else None, tools=[TOOL, server_tool], tool_choice=choice)
  call = message.content[-1]
  assert [block.type for block in message.content] == ["text"] * is_auto + ["tool_use"]
  assert call.name == "weather" and call.input["city"] in ("Rom", "Ulm") and call.id.startswith("toolu_")
  assert message.stop_reason == "tool_use"


def test_output_format_schema_constrains_output(client):
  schema = {**WEATHER["parameters"], "x-guidance": {"whitespace_flexible": False}}
  message = client.messages.create(model="tiny", messages=[USER], max_tokens=100,
                                   output_config={"format": {"type": "json_schema", "schema": schema}})
  assert json.loads(message.content[0].text)["city"] in ("Rom", "Ulm")


def test_stream_helper_of_anthropic_package_returns_final_message(client):
  with client.messages.stream(model="tiny", messages=[USER], max_tokens=100, tools=[TOOL],
                              tool_choice={"type": "any", "disable_parallel_tool_use": True}) as stream:
    message = stream.get_final_message()
  assert message.content[0].input["city"] in ("Rom", "Ulm") and message.stop_reason == "tool_use"
  assert message.usage.output_tokens > 1 and num_input(message.usage) > 1


def test_other_errors_have_types_of_anthropic(server):
  with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
    anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0).messages.count_tokens(
      model="tiny", messages=[USER])
  too_large = server.post("/v1/messages", {"messages": "x" * 2**22}, headers={"x-api-key": KEY})
  assert too_large.status_code == 413 and too_large.json()["error"]["type"] == "request_too_large"
  assert "param" in server.post("/v1/completions", {}, headers={"x-api-key": KEY}).json()["error"], "OpenAI's format"


@pytest.mark.parametrize("name", ["claude_code_first_turn.json", "claude_code_tool_turn.json"])
def test_body_of_claude_code_is_answered(server, name):
  body = json.loads((DATA / name).read_text())
  headers = {"Authorization": f"Bearer {KEY}", "anthropic-version": "2023-06-01", "x-app": "cli",
             "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}
  count = server.post("/v1/messages/count_tokens?beta=true", body, headers=headers).json()["input_tokens"]
  with server.stream("/v1/messages?beta=true", {**body, "ignore_eos": True}, headers=headers) as response:
    data = named_events(response)
  assert data[0]["type"] == "message_start"
  assert [event["type"] for event in data[-2:]] == ["message_delta", "message_stop"]
  assert data[-2]["delta"]["stop_reason"] == "max_tokens", "max_tokens beyond the context means the rest of it"
  usage = data[-2]["usage"]
  assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count


def test_tool_use_cut_off_by_max_tokens_is_text(create):
  message = create(tools=[TOOL], tool_choice={"type": "any"}, max_tokens=40)
  assert message.stop_reason == "max_tokens" and message.content[0].text.startswith('[{"name"')
