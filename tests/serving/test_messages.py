"""POST /v1/messages and /v1/messages/count_tokens with the anthropic package: text, thinking and tool calls, whole and
streamed; content blocks; errors; and shortened bodies of Claude Code."""
import itertools
import json

import anthropic
import pytest
from helpers.agents import DATA, HERMES, NO_TAGS, WEATHER, named_events, start
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


def request(text=None, **fields):
  """Return arguments for the package. text: the output."""
  extra = {"temperature": 0.0, **NO_TAGS, **({"structured_outputs": {"choice": [text]}} if text else {})}
  return {"model": "tiny", "messages": [USER], "max_tokens": 100, "extra_body": extra, **fields}


@pytest.fixture
def create(client): return lambda text=None, **fields: client.messages.create(**request(text, **fields))


@pytest.fixture
def answer(client, create):
  """Return a function that returns a message, which must be the same streamed and whole, except for ids and caching."""
  def contents(message):
    blocks = [x.model_dump(exclude={"id", "signature", "parsed_output"}, exclude_none=True) for x in message.content]
    return blocks, message.stop_reason, message.stop_sequence, message.usage.output_tokens

  def answer(text=None, **fields):
    whole = create(text, **fields)
    with client.messages.stream(**request(text, **fields)) as stream:
      events = [x for x in stream if x.type.startswith(("message", "content_block"))]   # others are the package's
    final, first, last = stream.get_final_message(), events[0].message, events[-2]
    order = [(f"content_block_{x}", i) for i in range(len(final.content)) for x in ("start", "delta", "stop")]
    assert [key for key, _ in itertools.groupby((x.type, getattr(x, "index", None)) for x in events)] == [
      ("message_start", None), *order, ("message_delta", None), ("message_stop", None)]
    assert not first.content and first.stop_reason is None
    for name in ("input_tokens", "cache_read_input_tokens"):
      assert getattr(first.usage, name) == getattr(last.usage, name) == getattr(final.usage, name)
    assert contents(final) == contents(whole)
    return whole
  return answer


def num_input(usage): return usage.input_tokens + usage.cache_read_input_tokens


def test_text_is_same_whole_and_streamed(answer):
  message = answer("the cat is", system="be kind", metadata={"user_id": "u"})
  assert message.content[0].text == "the cat is" and message.stop_reason == "end_turn" and message.role == "assistant"
  assert message.id.startswith("msg_") and message.model == "tiny" and message.type == "message"


def test_message_cut_off_by_max_tokens_says_so(answer):
  message = answer(max_tokens=3)
  assert message.stop_reason == "max_tokens" and message.usage.output_tokens == 3


def test_stop_sequence_ends_message_and_is_named(create, answer):
  text = create(max_tokens=20).content[0].text
  stop = text[5:8]
  message = answer(max_tokens=20, stop_sequences=[stop])
  assert message.content[0].text == text[:text.index(stop)]
  assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_usage_counts_cached_prompt_tokens(create):
  messages = [{"role": "user", "content": "a long question which fills some blocks of the cache"}]
  first, second = (create("yes", messages=messages).usage for _ in range(2))
  assert num_input(first) == num_input(second) and second.cache_creation_input_tokens == 0
  assert first.cache_read_input_tokens < second.cache_read_input_tokens


def test_thinking_block_precedes_text(answer):
  message = answer("<think>it is red</think>a rose")
  thinking, text = message.content
  assert (thinking.thinking, text.text) == ("it is red", "a rose") and thinking.signature


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any", "disable_parallel_tool_use": True},
                                    {"type": "tool", "name": "weather"}], ids=lambda x: x["type"])
def test_tool_use_is_same_whole_and_streamed(answer, choice):
  is_auto = choice["type"] == "auto"
  server_tool = {"type": "web_search_20250305", "name": "web_search"}
  message = answer("I look: " + HERMES if is_auto else None, tools=[TOOL, server_tool], tool_choice=choice)
  call = message.content[-1]
  assert [block.type for block in message.content] == ["text"] * is_auto + ["tool_use"]
  assert call.name == "weather" and call.input["city"] in ("Rom", "Ulm") and call.id.startswith("toolu_")
  assert message.stop_reason == "tool_use"


def test_output_format_schema_constrains_output(client):
  schema = {**WEATHER["parameters"], "x-guidance": {"whitespace_flexible": False}}
  message = client.messages.create(model="tiny", messages=[USER], max_tokens=100,
                                   output_config={"format": {"type": "json_schema", "schema": schema}})
  assert json.loads(message.content[0].text)["city"] in ("Rom", "Ulm")


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
