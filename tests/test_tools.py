"""Tools through the server, as the openai package asks for them: rendered by the model's template, called where the
client wants it or the model does, in either format, whole or streamed."""
import json

import openai
import pytest
from reference import ENGINE, slow, tiny_model
from server import Server
from tinyvllm_extra.server.tools import calls_schema, num_plain_characters, parse_calls, with_parsed_arguments

from tinyvllm import LLM

# It shows what it is given, so that a test can see it
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


def made_to_say(text):
  """The tiny model says what it has to."""
  return {"extra_body": {"structured_outputs": {"choice": [text]}}}


def called(choice):
  return [(call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]


def joined(chunks):
  """What a client makes of a stream: the text, the calls, the reason."""
  text, calls, reason = "", {}, None
  for chunk in chunks:
    choice, = chunk.choices
    text += choice.delta.content or ""
    reason = choice.finish_reason or reason
    for call in choice.delta.tool_calls or []:
      name, arguments = calls.get(call.index, ("", ""))
      calls[call.index] = name + (call.function.name or ""), arguments + (call.function.arguments or "")
  return text, [(name, json.loads(arguments)) for name, arguments in calls.values()], reason


def answered(answer, streamed):
  """Its text, the calls, the reason."""
  if streamed: return joined(answer)
  choice = answer.choices[0]
  return choice.message.content, [call[1:] for call in called(choice)], choice.finish_reason


@pytest.mark.parametrize("choice,names", [("required", ["weather", "time"]), (
  {"type": "function", "function": {"name": "time"}}, ["time"])], ids=["required", "named"])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("parallel", [None, False, *slow(True)])
def test_a_call_that_is_wanted_is_made_by_the_functions_schema(client, choice, names, streamed, parallel):
  counts = []
  for seed in range(5):
    text, calls, reason = answered(client(tools=TOOLS, tool_choice=choice, temperature=1.0, seed=seed, stream=streamed,
                                          **({} if parallel is None else {"parallel_tool_calls": parallel})), streamed)
    assert not text and reason == "tool_calls" and calls
    for name, arguments in calls:
      assert name in names
      assert arguments in ([{"city": "Rom"}, {"city": "Ulm"}] if name == "weather" else [{"zone": "UTC"}])
    counts.append(len(calls))
  assert (max(counts) > 1) == (choice == "required" and parallel is not False), counts


def test_parameters_may_refer_to_definitions_of_their_own(client):
  """As pydantic writes them for what is nested."""
  city = {"type": "object", "properties": {"name": {"enum": ["Rom", "Ulm"]}}, "required": ["name"],
          "additionalProperties": False}
  def tool(name, city): return {"type": "function", "function": {"name": name, "parameters": {
    "$defs": {"City": city}, "type": "object", "properties": {"city": {"$ref": "#/$defs/City"}}, "required": ["city"],
    "additionalProperties": False}}}
  answer = client(tools=[tool("weather", city)], tool_choice="required", parallel_tool_calls=False)
  (name, arguments), = [call[1:] for call in called(answer.choices[0])]
  assert name == "weather" and arguments["city"]["name"] in ("Rom", "Ulm")
  with pytest.raises(openai.BadRequestError, match="'City'"):
    client(tools=[tool("weather", city), tool("time", {"type": "string"})], tool_choice="required")


@pytest.mark.parametrize("text,said,calls", [
  (HERMES, "", [("weather", {"city": "Ulm"})]), (LLAMA, "", [("time", {"zone": "UTC"})]),
  (f"[{LLAMA}, {LLAMA}]", "", [("time", {"zone": "UTC"})] * 2), ("[a link](x)", None, []), ("[", None, []),
  ("[1, 2]", None, []), ("[]", None, []), ("I look: " + HERMES, "I look: ", [("weather", {"city": "Ulm"})]),
  (HERMES + "\n" + HERMES.replace("Ulm", "Rom"), "", [("weather", {"city": "Ulm"}), ("weather", {"city": "Rom"})]),
  ("no call <tool", "no call <tool", []), ('{"name": "other", "arguments": {}}', None, []), ("{1 of 2}", None, []),
  ("<tool_call>{not JSON}</tool_call>", None, []), ('{"name": ["time"], "arguments": {}}', None, []),
])
def test_an_answers_calls_are_read_and_the_rest_is_text(client, text, said, calls):
  said = text if said is None else said
  choice = client(tools=TOOLS, **made_to_say(text)).choices[0]
  assert (choice.message.content or "") == said and choice.finish_reason == ("tool_calls" if calls else "stop")
  assert [call[1:] for call in called(choice)] == calls if calls else not choice.message.tool_calls
  streamed = joined(client(tools=TOOLS, stream=True, **made_to_say(text)))
  assert streamed == (said, calls, choice.finish_reason)
  one = client(tools=TOOLS, parallel_tool_calls=False, **made_to_say(text)).choices[0]
  assert [call[1:] for call in called(one)] == calls[:1] if calls else not one.message.tool_calls
  for tools in ({}, {"tools": TOOLS, "tool_choice": "none"}):   # then it is text
    assert client(**tools, **made_to_say(text)).choices[0].message.content == text


def test_a_text_is_streamed_as_it_comes_up_to_where_a_call_may_begin(client):
  chunks = [*client(tools=TOOLS, stream=True, **made_to_say("the cat is <b"))]
  assert len([chunk for chunk in chunks if chunk.choices[0].delta.content]) > 1


def test_the_template_gets_tools_calls_answers_and_other_variables(server, folder):
  tokenizer = LLM(folder, **SMALL).tokenizer
  call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
  messages = [USER, {"role": "assistant", "content": None, "tool_calls": [call]},
              {"role": "tool", "tool_call_id": "call_1", "content": "rain"}]

  def tokens(**fields): return server.post("/v1/chat/completions", {**ASK, "messages": messages, **fields}).json()[
    "usage"]["prompt_tokens"]
  talk = "user: hello\nassistant: weather(Ulm)\ntool: rain\n"
  told = "tool weather\ntool time\n"

  def length(text): return len(tokenizer.encode(text, False))
  assert tokens() == tokens(tools=TOOLS, tool_choice="none") == tokens(tools=[]) == length(talk)
  assert tokens(tools=TOOLS) == length(told + talk)
  assert tokens(chat_template_kwargs={"thinking": 7}) == length("thinking 7\n" + talk)
  assert tokens(add_generation_prompt=False, continue_final_message=True) == length(talk.rstrip())


@pytest.mark.parametrize("fields,word", [
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
def test_what_is_wrong_is_400_and_named(client, server, fields, word):
  answer = server.post("/v1/chat/completions", {**ASK, **fields})
  assert answer.status_code == 400 and word in answer.text, answer.text


def test_what_is_held_back_is_what_may_become_a_call():
  for text, plain in (("the <tool_ca", "the "), ("a < b", "a < b"), (' {"na', ""), ("so <tool_call>{}", "so ")):
    assert num_plain_characters(text) == len(plain)


def test_no_choice_is_no_schema_and_messages_without_calls_stay():
  assert calls_schema(TOOLS, "auto") is None and with_parsed_arguments(USER) is USER
  assert parse_calls(HERMES, [TIME]) == (HERMES, []) and parse_calls("[" * 50000, [TIME]) == ("[" * 50000, [])


def test_any_other_name_is_a_templates_variable(server):
  for name in ("self", "add_generation_prompt", "bos_token"):
    assert server.post("/v1/chat/completions", {**ASK, "max_tokens": 1, "chat_template_kwargs": {name: "x"}}).is_success
