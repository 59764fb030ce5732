"""Reasoning and tool calls of chats: tools in the chat template; calls that the client requires or the model chooses.
`answer` checks that streams add up to each response. The formats of all model families are in test_parsers.py."""
import json

import pytest
from helpers.agents import HERMES, NO_TAGS, SMALL, TIME, WEATHER, start
from helpers.data import read_data
from helpers.models import tiny_model
from helpers.protocol import answer
from helpers.commands import flags
from helpers.servers import LocalServer, checked, error_of, stream
from tinyvllm_extra.text.parsers import find_format
from tinyvllm_extra.serving.protocol import ChatCompletionRequest, escapes_of, tools_of
from tinyvllm_extra.text.tools import calls_schema

CASES = read_data("server_cases.json")
TOOLS = [{"type": "function", "function": x} for x in (WEATHER, TIME)]
CHATS, USER = "/v1/chat/completions", {"role": "user", "content": "hello"}
ASK = {"messages": [USER], "temperature": 0.0, "max_tokens": 300, **NO_TAGS}
NAMED = {"type": "function", "function": {"name": "time"}}
LLAMA = '{"name": "time", "parameters": {"zone": "UTC"}}'
IN_ULM, IN_ROME, AT_UTC = ["weather", {"city": "Ulm"}], ["weather", {"city": "Rom"}], ["time", {"zone": "UTC"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory): yield from checked(start(tmp_path_factory.mktemp("tools")))


@pytest.fixture(scope="module")
def thinking_server(tmp_path_factory):
  """A server for a reasoning model: its template cannot render tools, and opens reasoning if `is_open` is set."""
  folder = tiny_model(tmp_path_factory.mktemp("thinking"), words=True, max_position_embeddings=1024)
  (folder / "tokenizer_config.json").write_text(json.dumps(CASES["reasoning tokenizer"]))
  yield from checked(LocalServer(folder, *flags(**SMALL), "--tool-call-parser", "hermes", "--enable-auto-tool-choice"))


def ask(server, **fields): return answer(server, CHATS, {**ASK, **fields})["choices"][0]
def refusal(server, **fields): return error_of(server.post(CHATS, {**ASK, **fields}), 400)["message"]
def forced_output(text): return {"structured_outputs": {"choice": [text]}}


def parse(choice):
  """Return the content, the calls and the finish reason of a choice."""
  calls = [call["function"] for call in choice["message"].get("tool_calls", [])]
  return (choice["message"]["content"] or "", [[call["name"], json.loads(call["arguments"])] for call in calls],
          choice["finish_reason"])


# Calls

@pytest.mark.parametrize("choice,valid", [("required", [IN_ULM, IN_ROME, AT_UTC]), (NAMED, [AT_UTC])],
                         ids=["required", "named"])
@pytest.mark.parametrize("parallel", [None, False])
def test_required_or_named_tool_call_follows_function_schema(server, choice, valid, parallel):
  fields = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.0, "parallel_tool_calls": parallel}
  answers = [parse(ask(server, **fields, seed=seed)) for seed in range(5)]
  for text, calls, reason in answers:
    assert (text, reason) == ("", "tool_calls") and calls and all(call in valid for call in calls)
  assert (max(len(calls) for _, calls, _ in answers) > 1) == (choice == "required" and parallel is None)


def test_openai_package_collects_streamed_tool_calls(server):
  fields = {**ASK, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
  with server.client().chat.completions.stream(model="tiny", **fields) as chunks:
    choice = chunks.get_final_completion().choices[0]
  assert parse(choice.model_dump()) == parse(ask(server, **fields))


def test_tool_parameters_may_reference_their_own_definitions(server):
  """pydantic writes nested models as `$defs`. Draft 7 ignores what is next to `$ref`."""
  tools, fields = CASES["tools with definitions"], {"tool_choice": "required", "parallel_tool_calls": False}
  (name, arguments), = parse(ask(server, tools=tools[:1], **fields))[1]
  assert name == "weather" and arguments["city"]["name"] in ("Rom", "Ulm")
  fields |= {"tools": tools, "temperature": 1.0}
  calls = [call for seed in range(6) for call in parse(ask(server, **fields, seed=seed))[1]]
  assert {(name, arguments["city"] == "UTC") for name, arguments in calls} == {("weather", False), ("time", True)}


@pytest.mark.parametrize("text,content,calls", CASES["tool calls"])
def test_tool_calls_in_output_are_parsed_rest_is_content(server, text, content, calls):
  fields = {"tools": TOOLS, **forced_output(text)}
  assert parse(ask(server, **fields)) == (content, calls, "tool_calls" if calls else "stop")
  assert parse(ask(server, **fields, parallel_tool_calls=False))[1] == calls[:1]
  for uncalled in ({"tools": None}, {"tool_choice": "none"}):
    assert parse(ask(server, **fields | uncalled)) == (text, [], "stop")


def test_allowed_tools_limit_calls(server):
  def allowed(mode, **fields):
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [NAMED]}}
    return parse(ask(server, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, **fields))
  assert allowed("required") == allowed("auto", **forced_output(LLAMA)) == ("", [AT_UTC], "tool_calls")
  assert allowed("auto", **forced_output(HERMES)) == (HERMES, [], "stop")


@pytest.mark.parametrize("fields,beginning", [
  ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "[{"),
  (forced_output(HERMES), "<tool_call>{")], ids=["forced", "chosen"])
def test_call_cut_off_by_max_tokens_is_text(server, fields, beginning):
  fields = {"tools": TOOLS, "seed": 1, **fields}
  length = answer(server, CHATS, {**ASK, **fields})["usage"]["completion_tokens"]
  text, calls, reason = parse(ask(server, **fields, max_tokens=length - 16))
  assert text.startswith(beginning) and (calls, reason) == ([], "length")


@pytest.mark.parametrize("function,arguments", CASES["forced calls"])
def test_forced_call_closes_objects_unless_the_schema_opens_or_combines_them(function, arguments):
  """arguments: their schema, None if it is the function's."""
  schema = calls_schema([{"type": "function", "function": {"name": "f", **function}}], "required")
  assert schema["items"]["anyOf"][0]["properties"]["arguments"]["allOf"] == [arguments or function["parameters"]]


@pytest.mark.parametrize("opening,closing,depth", [('{"items":', "}", 5000), ('{"anyOf":[', "]}", 900)])
def test_forced_call_with_deep_schema_is_400(server, opening, closing, depth):
  tool = {"type": "function", "function": {"name": "f", "parameters": "SCHEMA"}}   # json.dumps cannot nest so deeply
  body = json.dumps({**ASK, "tools": [tool], "tool_choice": "required"})
  body = body.replace('"SCHEMA"', opening * depth + "{}" + closing * depth)
  error_of(server.post(CHATS, content=body, headers={"Content-Type": "application/json"}), 400)


def test_call_is_possible_beside_response_format(server):
  def openings(**fields):
    body = ChatCompletionRequest(messages=[USER], tools=TOOLS[1:], response_format={"type": "json_object"}, **fields)
    return {*escapes_of(body, find_format("", None, "hermes"), server.llm.tokenizer.decode([5]))["escapes"]}
  assert openings() == {"<tool_call>", "<function="} and not openings(tool_choice="none")


def test_template_gets_tools_without_absent_fields():
  assert tools_of(ChatCompletionRequest(messages=[USER], tools=TOOLS[1:])) == TOOLS[1:]


def test_template_without_tools_allows_forced_calls_only(thinking_server):
  fields = {"tools": TOOLS, "parallel_tool_calls": False}
  text, calls, reason = parse(ask(thinking_server, tool_choice="required", **fields))
  assert (text, reason) == ("", "tool_calls") and calls[0] in (IN_ULM, IN_ROME, AT_UTC)
  assert "template does not support tools" in refusal(thinking_server, **fields)


# Reasoning

@pytest.mark.parametrize("include", [None, True, False])
def test_reasoning_is_separate_from_content_unless_excluded(thinking_server, include):
  thought = "hm, I call"
  fields = {**forced_output(f"<think>\n{thought}\n</think>\n\nthe answer"), "include_reasoning": include}
  reasoning = {} if include is False else {"reasoning": thought, "reasoning_content": thought}
  assert ask(thinking_server, **fields)["message"] == {"role": "assistant", "content": "the answer", **reasoning}
  deltas = [chunk["choices"][0]["delta"] for chunk in stream(thinking_server, CHATS, {**ASK, **fields})[:-1]]
  assert sum("reasoning" in delta for delta in deltas) > 1 or include is False, "reasoning must arrive in pieces"


def test_output_starts_in_reasoning_that_the_prompt_opened(thinking_server):
  fields = {"max_tokens": 5, "chat_template_kwargs": {"is_open": True}}
  plain, opened = ask(thinking_server, max_tokens=5)["message"], ask(thinking_server, **fields)["message"]
  assert plain["content"] and "reasoning" not in plain
  assert opened["content"] is None and opened["reasoning_content"]
  form = {"response_format": {"type": "json_object"}}
  assert ask(thinking_server, **form, max_tokens=5)["message"]["content"][0] == "{"
  opened = ask(thinking_server, **form, **fields)["message"]
  assert opened["content"] is None and opened["reasoning_content"][0] != "{", "the reasoning has not ended"


def test_special_token_may_open_reasoning(thinking_server):
  token, = thinking_server.llm.tokenizer.encode("<think>", False)
  fields, text = {"max_tokens": 3, "logit_bias": {str(token): 100}}, "<think><think>"
  assert ask(thinking_server, **fields)["message"] == {
    "role": "assistant", "content": None, "reasoning": text, "reasoning_content": text}
  assert ask(thinking_server, **fields, skip_special_tokens=True)["message"] == {"role": "assistant", "content": ""}
