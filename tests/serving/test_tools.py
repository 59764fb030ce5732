"""Reasoning and tool calls through the server with the openai package: tools in the chat template; calls that the
client requires or the model chooses, complete and streamed. The formats of all model families, by the parser alone."""
import json

import openai
import pytest
from helpers.agents import HERMES, NO_TAGS, SMALL, WEATHER, start
from helpers.models import tiny_model
from helpers.parameters import slow
from helpers.requests import flags
from helpers.servers import LocalServer, checked
from tinyvllm_extra.server.parsers import find_format
from tinyvllm_extra.server.protocol import ChatRequest, escapes_of, tools_of
from tinyvllm_extra.server.tools import calls_schema


TIME = {"type": "function", "function": {"name": "time", "parameters": {
  "type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"], "additionalProperties": False}}}
TOOLS = [{"type": "function", "function": WEATHER}, TIME]
USER = {"role": "user", "content": "hello"}
ASK = {"messages": [USER], "temperature": 0.0, "max_tokens": 300, **NO_TAGS}
LLAMA = '{"name": "time", "parameters": {"zone": "UTC"}}'


@pytest.fixture(scope="module")
def server(tmp_path_factory): yield from checked(start(tmp_path_factory.mktemp("tools")))


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory):
  """A server for a reasoning model: its template cannot render tools, and opens reasoning if `is_open` is set."""
  folder = tiny_model(tmp_path_factory.mktemp("thinking"), words=True, max_position_embeddings=1024)
  template = ("{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
              "{% if is_open is defined %}<think>\n{% endif %}")
  last = json.loads((folder / "config.json").read_text())["vocab_size"] - 1
  tokens = {last: {"content": "<think>", "special": True}}
  config = {"chat_template": template, "added_tokens_decoder": tokens}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  yield from checked(LocalServer(folder, *flags(**SMALL), "--tool-call-parser", "hermes", "--enable-auto-tool-choice"))


def asking(server):
  """Return a function that sends a chat, by default ASK."""
  client = server.client()
  name = client.models.list().data[0].id
  return lambda **fields: client.chat.completions.create(model=name, **{**ASK, **fields})


@pytest.fixture
def client(server): return asking(server)


@pytest.fixture
def thinking_client(thinking_server): return asking(thinking_server)


def forced_output(text):
  """Return request fields that make the model output `text`."""
  return {"extra_body": {"structured_outputs": {"choice": [text]}}}


def parse(answer):
  """Return the content, tool calls and finish_reason of a complete or streamed response."""
  text, calls, reason = "", {}, None
  for chunk in [answer] if hasattr(answer, "choices") else answer:
    choice, = chunk.choices
    part = choice.delta if hasattr(choice, "delta") else choice.message
    text += part.content or ""
    reason = choice.finish_reason or reason
    for i, call in enumerate(part.tool_calls or []):
      name, arguments = calls.get(getattr(call, "index", i), ("", ""))
      calls[getattr(call, "index", i)] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
  return text, [(name, json.loads(arguments)) for name, arguments in calls.values()], reason


@pytest.mark.parametrize("choice,names", [("required", ["weather", "time"]), (
  {"type": "function", "function": {"name": "time"}}, ["time"])], ids=["required", "named"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("parallel", [None, False, *slow(True)])
def test_required_or_named_tool_call_follows_function_schema(client, choice, names, streamed, parallel):
  counts = []
  for seed in range(5):
    text, calls, reason = parse(client(tools=TOOLS, tool_choice=choice, temperature=1.0, seed=seed, stream=streamed,
                                      **({} if parallel is None else {"parallel_tool_calls": parallel})))
    assert not text and reason == "tool_calls" and calls
    for name, arguments in calls:
      assert name in names
      assert arguments in ([{"city": "Rom"}, {"city": "Ulm"}] if name == "weather" else [{"zone": "UTC"}])
    counts.append(len(calls))
  assert (max(counts) > 1) == (choice == "required" and parallel is not False), counts


def test_tool_parameters_may_reference_their_own_definitions(client):
  """pydantic writes nested models as `$defs`."""
  city = {"type": "object", "properties": {"name": {"enum": ["Rom", "Ulm"]}}, "required": ["name"],
          "additionalProperties": False}
  def tool(name, city): return {"type": "function", "function": {"name": name, "parameters": {
    "$defs": {"City": city}, "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
    "additionalProperties": False}}}
  answer = client(tools=[tool("weather", city)], tool_choice="required", parallel_tool_calls=False)
  (name, arguments), = parse(answer)[1]
  assert name == "weather" and arguments["city"]["name"] in ("Rom", "Ulm")
  with pytest.raises(openai.BadRequestError, match="'City'"):
    client(tools=[tool("weather", city), tool("time", {"type": "string"})], tool_choice="required")


@pytest.mark.parametrize("text,content,calls", [
  (HERMES, "", [("weather", {"city": "Ulm"})]), (LLAMA, "", [("time", {"zone": "UTC"})]),
  (f"[{LLAMA}, {LLAMA}]", "", [("time", {"zone": "UTC"})] * 2), ("[a link](x)", None, []), ("[", None, []),
  ("[1, 2]", None, []), ("[]", None, []), ("I look: " + HERMES, "I look: ", [("weather", {"city": "Ulm"})]),
  (HERMES + "\n" + HERMES.replace("Ulm", "Rom"), "", [("weather", {"city": "Ulm"}), ("weather", {"city": "Rom"})]),
  ("no call <tool", "no call <tool", []), ('{"name": "other", "arguments": {}}', None, []), ("{1 of 2}", None, []),
  ("<tool_call>{not JSON}</tool_call>", None, []), ('{"name": ["time"], "arguments": {}}', None, []),
])
def test_tool_calls_in_output_are_parsed_rest_is_content(client, text, content, calls):
  content = text if content is None else content
  for streamed in (False, True):
    answer = parse(client(tools=TOOLS, stream=streamed, **forced_output(text)))
    assert answer == (content, calls, "tool_calls" if calls else "stop")
  assert parse(client(tools=TOOLS, parallel_tool_calls=False, **forced_output(text)))[1] == calls[:1]
  for tools in ({}, {"tools": TOOLS, "tool_choice": "none"}):   # calls are not parsed
    assert client(**tools, **forced_output(text)).choices[0].message.content == text


# Reasoning

THOUGHT = "hm, I call"
THINKING = f"<think>\n{THOUGHT}\n</think>\n\nthe answer"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("include", [None, True, False])
def test_reasoning_is_separate_from_content_unless_excluded(thinking_client, streamed, include):
  extra = {"structured_outputs": {"choice": [THINKING]}, "include_reasoning": include}
  answer = thinking_client(stream=streamed, extra_body=extra)
  parts = [chunk.choices[0].delta for chunk in answer] if streamed else [answer.choices[0].message]
  def text(name): return "".join(getattr(part, name, None) or "" for part in parts)
  reasoning = "" if include is False else THOUGHT
  assert text("content") == "the answer" and text("reasoning_content") == text("reasoning") == reasoning
  pieces = sum(hasattr(part, "reasoning") for part in parts)
  assert not pieces if include is False else pieces > 1 or not streamed, "reasoning must arrive in pieces"


@pytest.mark.parametrize("streamed", [False, True])
def test_output_starts_in_reasoning_that_the_prompt_opened(thinking_client, streamed):
  fields = {"max_tokens": 5, "stream": streamed}
  plain = thinking_client(max_tokens=5)
  assert plain.choices[0].message.content and not hasattr(plain.choices[0].message, "reasoning")
  answer = thinking_client(extra_body={"chat_template_kwargs": {"is_open": True}}, **fields)
  parts = [chunk.choices[0].delta for chunk in answer] if streamed else [answer.choices[0].message]
  assert not any(part.content for part in parts)
  assert "".join(getattr(part, "reasoning_content", None) or "" for part in parts)


def test_special_token_may_open_reasoning(thinking_client, thinking_server):
  token, = thinking_server.post("/tokenize", {"prompt": "<think>", "add_special_tokens": False}).json()["tokens"]
  fields = {"max_tokens": 3, "logit_bias": {str(token): 100}}
  message = thinking_client(**fields).choices[0].message
  assert message.content is None and message.reasoning_content == "<think><think>"
  message = thinking_client(**fields, extra_body={"skip_special_tokens": True}).choices[0].message
  assert message.content == "" and not hasattr(message, "reasoning_content")


@pytest.mark.parametrize("streamed", [False, True])
def test_template_without_tools_allows_forced_calls_only(thinking_client, streamed):
  fields = {"tools": TOOLS, "stream": streamed}
  text, calls, reason = parse(thinking_client(tool_choice="required", parallel_tool_calls=False, **fields))
  assert not text and reason == "tool_calls" and calls[0][0] in ("weather", "time")
  with pytest.raises(openai.BadRequestError, match="template does not support tools"): thinking_client(**fields)


# Calls


def test_forced_arguments_hold_only_properties_of_schema(client):
  city = {"enum": ["Rom", "Ulm"]}
  closed = {"type": "function", "function": {"name": "f", "parameters": {
    "type": "object", "properties": {"city": city, "in": {"type": "object", "properties": {"city": city},
                                                           "required": ["city"]}}, "required": ["in"]}}}
  empty = {"type": "function", "function": {"name": "g"}}
  for seed in range(4):
    answer = client(tools=[closed], tool_choice="required", temperature=1.0, seed=seed, parallel_tool_calls=False)
    arguments = parse(answer)[1][0][1]
    assert set(arguments) <= {"city", "in"} and set(arguments["in"]) == {"city"}
  answer = client(tools=[empty], tool_choice="required", temperature=1.0, parallel_tool_calls=False)
  assert parse(answer)[1] == [("g", {})]


def test_schema_that_opens_or_combines_objects_stays_open():
  def parameters(schema):
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return calls_schema([tool], "required")["items"]["anyOf"][0]["properties"]["arguments"]
  for schema in ({"type": "object", "properties": {}, "additionalProperties": True}, {"type": "object"},
                 {"properties": {"a": {}}, "anyOf": [{"properties": {"b": {}}}]},
                 {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}): assert parameters(schema) == schema
  nested = {"properties": {"a": {"items": {"properties": {}}}}, "$defs": {"X": {"properties": {}}}}
  text = json.dumps(parameters(nested))
  assert text.count('"additionalProperties": false') == 3


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("streamed", [False, True])
def test_allowed_tools_limit_calls(client, mode, streamed):
  choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [
    {"type": "function", "function": {"name": "time"}}]}}
  fields = {"tools": TOOLS, "tool_choice": choice, "stream": streamed, "parallel_tool_calls": False}
  if mode == "required":
    assert parse(client(**fields))[:2] == ("", [("time", {"zone": "UTC"})])
  else:
    assert parse(client(**fields, **forced_output(LLAMA)))[:2] == ("", [("time", {"zone": "UTC"})])
    assert parse(client(**fields, **forced_output(HERMES)))[:2] == (HERMES, [])


@pytest.mark.parametrize("opening,closing,depth", [('{"items":', "}", 5000), ('{"anyOf":[', "]}", 900)])
def test_forced_call_with_deep_schema_is_400(server, opening, closing, depth):
  schema = opening * depth + "{}" + closing * depth
  tool = {"type": "function", "function": {"name": "f", "parameters": "SCHEMA"}}   # json.dumps cannot nest so deeply
  body = json.dumps({**ASK, "tools": [tool], "tool_choice": "required"}).replace('"SCHEMA"', schema)
  answer = server.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
  assert answer.status_code == 400, answer.text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("is_forced", [False, True])
def test_call_cut_off_by_max_tokens_is_text(client, streamed, is_forced):
  choice = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
  fields = {"tools": TOOLS, "seed": 1, **(choice if is_forced else forced_output(HERMES))}
  length = client(**fields).usage.completion_tokens
  text, calls, reason = parse(client(**fields, max_tokens=length - 16, stream=streamed))
  assert text.startswith("[{" if is_forced else "<tool_call>{") and not calls and reason == "length"


def test_format_applies_after_the_reasoning_that_the_prompt_opened(thinking_client):
  fields = {"response_format": {"type": "json_object"}, "max_tokens": 5}
  assert thinking_client(**fields).choices[0].message.content[0] == "{"
  message = thinking_client(**fields, extra_body={"chat_template_kwargs": {"is_open": True}}).choices[0].message
  assert message.content is None and message.reasoning_content[0] != "{", "the reasoning has not ended"


def test_call_is_possible_beside_response_format(server):
  def openings(**fields):
    body = ChatRequest(messages=[USER], tools=[TIME], response_format={"type": "json_object"}, **fields)
    return {*escapes_of(body, [5], find_format("", None, "hermes"), server.llm.tokenizer)["escapes"]}
  assert openings() == {"<tool_call>", "<function="} and not openings(tool_choice="none")


def test_template_gets_tools_without_absent_fields():
  assert tools_of(ChatRequest(messages=[USER], tools=[TIME])) == [TIME]
