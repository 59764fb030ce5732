"""Tool calling through the server with the openai package: tools in the chat template; calls that the client requires
or the model chooses, in the Hermes and Llama formats, complete and streamed."""
import json

import openai
import pytest
from reference import ENGINE, slow, tiny_model
from server import Server
from tinyvllm_extra.server.tools import calls_schema, with_parsed_arguments

from tinyvllm import LLM

# Renders all its inputs, so that tests can check them
TEMPLATE = """
{%- if thinking is defined %}thinking {{ thinking }}{{ '\\n' }}{% endif %}
{%- for tool in tools or [] %}tool {{ tool.function.name }}{{ '\\n' }}{% endfor %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
  {%- for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments.city }}){% endfor %}
  {{- '\\n' }}
{%- endfor %}"""
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
  "type": "object", "properties": {"city": {"enum": ["Rom", "Ulm"]}}, "required": ["city"],
  "additionalProperties": False}}}
TIME = {"type": "function", "function": {"name": "time", "parameters": {
  "type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"], "additionalProperties": False}}}
TOOLS = [WEATHER, TIME]
USER = {"role": "user", "content": "hello"}
ASK = {"messages": [USER], "temperature": 0.0, "max_tokens": 300}
SMALL = {**ENGINE, "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 16}
HERMES = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
LLAMA = '{"name": "time", "parameters": {"zone": "UTC"}}'


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tiny_model(tmp_path_factory.mktemp("tools"), words=True, max_position_embeddings=512)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
  return folder


@pytest.fixture(scope="module")
def server(folder):
  flags = [x for name, value in SMALL.items() for x in ("--" + name.replace("_", "-"), value)]
  with Server(folder, *flags) as server:
    yield server
    assert "Traceback" not in server.log, server.log


@pytest.fixture
def client(server, folder):
  client = server.client()
  def ask(**fields): return client.chat.completions.create(model=folder.name, **{**ASK, **fields})
  return ask


def forced_output(text):
  """Return request fields that make the model output `text`."""
  return {"extra_body": {"structured_outputs": {"choice": [text]}}}


def tool_calls_of(choice):
  return [(call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


def merge_chunks(chunks):
  """Return a stream's content, tool calls and finish_reason."""
  text, calls, reason = "", {}, None
  for chunk in chunks:
    choice, = chunk.choices
    text += choice.delta.content or ""
    reason = choice.finish_reason or reason
    for call in choice.delta.tool_calls or []:
      name, arguments = calls.get(call.index, ("", ""))
      calls[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
  return text, [(name, json.loads(arguments)) for name, arguments in calls.values()], reason


def parse(answer, streamed):
  """Return the content, tool calls and finish_reason of a complete or streamed response."""
  if streamed: return merge_chunks(answer)
  choice = answer.choices[0]
  return choice.message.content, [call[1:] for call in tool_calls_of(choice)], choice.finish_reason


@pytest.mark.parametrize("choice,names", [("required", ["weather", "time"]), (
  {"type": "function", "function": {"name": "time"}}, ["time"])], ids=["required", "named"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("parallel", [None, False, *slow(True)])
def test_required_or_named_tool_call_follows_function_schema(client, choice, names, streamed, parallel):
  counts = []
  for seed in range(5):
    text, calls, reason = parse(client(tools=TOOLS, tool_choice=choice, temperature=1.0, seed=seed, stream=streamed,
                                      **({} if parallel is None else {"parallel_tool_calls": parallel})), streamed)
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
  (name, arguments), = [call[1:] for call in tool_calls_of(answer.choices[0])]
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
  choice = client(tools=TOOLS, **forced_output(text)).choices[0]
  assert (choice.message.content or "") == content and choice.finish_reason == ("tool_calls" if calls else "stop")
  assert [call[1:] for call in tool_calls_of(choice)] == calls if calls else not choice.message.tool_calls
  streamed = merge_chunks(client(tools=TOOLS, stream=True, **forced_output(text)))
  assert streamed == (content, calls, choice.finish_reason)
  first_call = client(tools=TOOLS, parallel_tool_calls=False, **forced_output(text)).choices[0]
  assert [call[1:] for call in tool_calls_of(first_call)] == calls[:1] if calls else not first_call.message.tool_calls
  for tools in ({}, {"tools": TOOLS, "tool_choice": "none"}):   # calls are not parsed
    assert client(**tools, **forced_output(text)).choices[0].message.content == text


def test_stream_with_tools_delivers_plain_text_token_by_token(client):
  chunks = [*client(tools=TOOLS, stream=True, **forced_output("the cat is <b"))]
  assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) > 1


def test_chat_template_receives_tools_calls_results_and_kwargs(server, folder):
  tokenizer = LLM(folder, **SMALL).tokenizer
  call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
  messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
              {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]

  def tokens(**fields): return server.post("/v1/chat/completions", {**ASK, "messages": messages, **fields}).json()[
    "usage"]["prompt_tokens"]
  conversation = "user: hello\nassistant: weather(Ulm)\ntool: rain\n"
  tools = "tool weather\ntool time\n"

  def length(text): return len(tokenizer.encode(text, False))
  assert tokens() == tokens(tools=TOOLS, tool_choice="none") == tokens(tools=[]) == length(conversation)
  assert tokens(tools=TOOLS) == length(tools + conversation)
  assert tokens(chat_template_kwargs={"thinking": 7}) == length("thinking 7\n" + conversation)
  assert tokens(add_generation_prompt=False, continue_final_message=True) == length(conversation.rstrip())


@pytest.mark.parametrize("fields,message", [
  ({"tool_choice": "required"}, "tools"), ({"tools": TOOLS, "tool_choice": "maybe"}, "tool_choice"),
  ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "other"),
  ({"tools": [{"type": "web_search"}]}, "tools"), ({"tools": [{"type": "function", "function": {}}]}, "tools"),
  ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
  ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"arguments": "{"}}]}]},
   "tool_calls"), ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
  ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 50000}}]}]}, "tool_calls"),
  ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
  ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
  ({"add_generation_prompt": "yes"}, "add_generation_prompt")], ids=lambda x: json.dumps(x)[:40])
def test_invalid_tool_field_is_400_and_named(client, server, fields, message):
  answer = server.post("/v1/chat/completions", {**ASK, **fields})
  assert answer.status_code == 400 and message in answer.text, answer.text


def test_output_without_tool_calls_is_unchanged():
  assert calls_schema(TOOLS, "auto") is None and with_parsed_arguments(USER) is USER


def test_chat_template_kwargs_may_have_any_other_name(server):
  for name in ("self", "add_generation_prompt", "bos_token"):
    assert server.post("/v1/chat/completions", {**ASK, "max_tokens": 1, "chat_template_kwargs": {name: "x"}}).is_success
