"""Client libraries in their default modes against the server: openai-agents, pydantic-ai and litellm, whose model calls
a tool and answers after the tool's result, and the benchmark guidellm. Installation: tests/README.md."""
import asyncio
import json
import os
import subprocess
import sys

import openai
import pydantic
import pytest
from helpers.agents import start
from helpers.servers import Server, events
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# A model that is good at this conversation: it calls the tool unless the last message is the tool's result
SCRIPT = """
from tinyvllm_extra.server import protocol
sampling_params = protocol.sampling_params
def scripted(body, defaults, escapes):   # a random model would use the escapes
  call = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm"}}</tool_call>'
  is_done = not body.tools or body.messages[-1]["role"] == "tool"
  if not body.response_format and body.tool_choice not in ("required", "none"):
    body = body.model_copy(update={"structured_outputs": {"choice": ["it rains in Ulm" if is_done else call]}})
  return sampling_params(body, defaults)
protocol.sampling_params = scripted
"""
ASK = "How is the weather in Ulm?"


class City(pydantic.BaseModel):
  name: str = pydantic.Field(pattern="^[a-z]{1,8}$")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
  with start(tmp_path_factory.mktemp("clients"), server=Server, before=SCRIPT) as server:
    yield server
    assert "Traceback" not in server.log, server.log


def weather(city: str) -> str:
  """Return the weather of a city."""
  assert city == "Ulm"
  return "rain"


# openai-agents: by default /v1/responses

@pytest.fixture
def agent(server):
  import agents
  agents.set_tracing_disabled(True)
  client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
  agents.set_default_openai_client(client, use_for_tracing=False)
  def agent(**options): return agents.Agent(name="Helper", instructions="Be kind.", model="tiny", **options)
  return agent


def test_openai_agents_run_calls_tool_and_answers(agent):
  import agents
  result = asyncio.run(agents.Runner.run(agent(tools=[agents.function_tool(weather)]), ASK))
  assert result.final_output == "it rains in Ulm" and len(result.raw_responses) == 2
  assert result.context_wrapper.usage.input_tokens > 0


def test_openai_agents_stream_calls_tool_and_answers(agent):
  import agents
  async def run():
    result = agents.Runner.run_streamed(agent(tools=[agents.function_tool(weather)]), ASK)
    deltas = [event.data.delta async for event in result.stream_events()
              if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]
    return result.final_output, "".join(deltas)
  assert asyncio.run(run()) == ("it rains in Ulm", "it rains in Ulm")


def test_openai_agents_output_type_is_parsed(agent):
  import agents
  result = asyncio.run(agents.Runner.run(agent(output_type=City), "Name a city."))
  assert isinstance(result.final_output, City)


# pydantic-ai: openai: is /v1/responses, openai-chat: /v1/chat/completions, anthropic: /v1/messages

def pydantic_ai_model(server, kind):
  from pydantic_ai.models.anthropic import AnthropicModel
  from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
  from pydantic_ai.providers.anthropic import AnthropicProvider
  from pydantic_ai.providers.openai import OpenAIProvider
  if kind == "anthropic": return AnthropicModel("tiny", provider=AnthropicProvider(base_url=server.url, api_key="none"))
  provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
  return {"responses": OpenAIResponsesModel, "chat": OpenAIChatModel}[kind]("tiny", provider=provider)


@pytest.mark.parametrize("kind", ["responses", "chat", "anthropic"])
def test_pydantic_ai_calls_tool_answers_and_parses_output(server, kind):
  """By default the output type is a tool that must be called."""
  from pydantic_ai import Agent
  def agent(**options): return Agent(pydantic_ai_model(server, kind), **options)
  result = agent(instructions="Be kind.", tools=[weather]).run_sync(ASK)
  assert result.output == "it rains in Ulm" and result.usage.requests == 2 and result.usage.input_tokens > 0
  async def run():
    async with agent(tools=[weather]).run_stream(ASK) as result:
      return [text async for text in result.stream_text(delta=True)]
  assert "".join(asyncio.run(run())) == "it rains in Ulm"
  assert isinstance(agent(output_type=City).run_sync("Name a city.").output, City)


# litellm: hosted_vllm/ is /v1/chat/completions, anthropic/ is /v1/messages

@pytest.fixture
def litellm(monkeypatch):
  monkeypatch.setitem(os.environ, "LITELLM_LOCAL_MODEL_COST_MAP", "True")   # else it is downloaded
  import litellm
  return litellm


TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
  "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai", "anthropic"])
def test_litellm_completion_calls_tool_and_answers(server, litellm, provider):
  base = server.url if provider == "anthropic" else f"{server.url}/v1"
  options = {"model": f"{provider}/tiny", "api_base": base, "api_key": "none", "tools": [TOOL], "num_retries": 0}
  messages = [{"role": "user", "content": ASK}]
  message = litellm.completion(messages=messages, **options).choices[0].message
  call, = message.tool_calls
  assert (call.function.name, call.function.arguments.replace(" ", "")) == ("weather", '{"city":"Ulm"}')
  messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
  assert litellm.completion(messages=messages, **options).choices[0].message.content == "it rains in Ulm"
  chunks = litellm.completion(messages=messages, stream=True, **options)
  assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "it rains in Ulm"


def test_litellm_responses_and_messages_answer(server, litellm):
  options = {"model": "openai/tiny", "api_base": f"{server.url}/v1", "api_key": "none"}
  response = litellm.responses(input="hello", **options)
  assert response.output[-1].content[0].text == "it rains in Ulm"
  message = asyncio.run(litellm.anthropic.messages.acreate(
    model="anthropic/tiny", api_base=server.url, api_key="none", max_tokens=50,
    messages=[{"role": "user", "content": "hello"}]))
  assert message["content"][0]["text"] == "it rains in Ulm"


# guidellm: /v1/chat/completions

@pytest.fixture
def guidellm(tmp_path):
  """Return a function that runs `guidellm run` with a tokenizer of single bytes, offline, and returns its report."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
  tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
  environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
  def run(**options):
    report = tmp_path / "report.json"
    options = {"tokenizer": f"kind=huggingface_auto,model={tmp_path}", "output": f"kind=json,path={report}", **options}
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    result = subprocess.run([sys.executable, "-m", "guidellm", "run", *flags, "--disable-progress"], cwd=tmp_path,
                            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert result.returncode == 0, result.stdout
    return json.loads(report.read_text())
  return run


def test_guidellm_report_has_output_tokens_and_first_token_times(guidellm):
  with Server() as server:
    report = guidellm(
      backend=f"kind=openai_http,target={server.url}", profile="kind=concurrent,streams=4",
      constraint="kind=max_requests,count=12", data="kind=synthetic_text,prompt_tokens=24,output_tokens=16")
    requests = report["benchmarks"][0]["requests"]
    assert len(requests["successful"]) == 12 and requests["errored"] == requests["incomplete"] == []
    for stats in requests["successful"]:
      assert stats["output_metrics"]["total_tokens"] == 16 and stats["time_to_first_token_ms"] > 0
    # guidellm needs the usage in each chunk (continuous_usage_stats) only for a request that it cancels, so the report
    # does not show it: send its last request again, and check the chunks
    body = json.loads(stats["request_args"])["body"]
    with server.stream("/v1/chat/completions", body) as response: *chunks, last = events(response.iter_lines())
    usages = [chunk["usage"] for chunk in chunks]
    assert last == "[DONE]" and all(usages), usages
    assert {usage["prompt_tokens"] for usage in usages} == {stats["prompt_tokens"]}
    assert [usage["completion_tokens"] for usage in usages[-2:]] == [16, 16]
    assert "Traceback" not in server.log, server.log
