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
from helpers.agents import HERMES, SCRIPT, start
from helpers.servers import Server
from helpers.tokenizers import byte_level_bpe

ASK = "How is the weather in Ulm?"
ANSWER = "it rains in Ulm"
TOOL = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
  "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


class City(pydantic.BaseModel):
  name: str = pydantic.Field(pattern="^[a-z]{1,8}$")


def weather(city: str) -> str:
  """Return the weather of a city."""
  assert city == "Ulm"
  return "rain"


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory):
  """A server whose address is in the variables that the clients read."""
  script = {"CALL": HERMES, "RESULT": "rain", "ANSWER": ANSWER}
  with start(tmp_path_factory.mktemp("clients"), server=Server, before=SCRIPT, environment=script) as server, \
      pytest.MonkeyPatch.context() as patch:
    addresses = {"OPENAI": f"{server.url}/v1", "HOSTED_VLLM": f"{server.url}/v1", "ANTHROPIC": server.url}
    for name, url in addresses.items():
      for variable, value in {"API_KEY": "none", "BASE_URL": url, "API_BASE": url}.items():
        patch.setenv(f"{name}_{variable}", value)
    patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")   # else it is downloaded
    yield server
    assert "Traceback" not in server.log, server.log


def test_openai_agents_call_tool_answer_and_parse_output():
  """By default with /v1/responses."""
  import agents
  agents.set_tracing_disabled(True)
  agents.set_default_openai_client(openai.AsyncOpenAI(max_retries=0), use_for_tracing=False)
  def agent(**options): return agents.Agent(name="Helper", instructions="Be kind.", model="tiny", **options)
  helper = agent(tools=[agents.function_tool(weather)])

  async def run():
    result = await agents.Runner.run(helper, ASK)
    assert result.final_output == ANSWER and len(result.raw_responses) == 2
    assert result.context_wrapper.usage.input_tokens > 0
    result = agents.Runner.run_streamed(helper, ASK)
    deltas = [event.data.delta async for event in result.stream_events()
              if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"]
    assert result.final_output == "".join(deltas) == ANSWER
    result = await agents.Runner.run(agent(output_type=City), "Name a city.")
    assert isinstance(result.final_output, City)
  asyncio.run(run())


@pytest.mark.parametrize("api", ["openai-responses", "openai-chat", "anthropic"])
def test_pydantic_ai_calls_tool_answers_and_parses_output(api):
  """By default the output type is a tool that must be called."""
  from pydantic_ai import Agent
  def agent(**options): return Agent(f"{api}:tiny", **options)
  result = agent(instructions="Be kind.", tools=[weather]).run_sync(ASK)
  assert result.output == ANSWER and result.usage.requests == 2 and result.usage.input_tokens > 0
  async def run():
    async with agent(tools=[weather]).run_stream(ASK) as result:
      return [text async for text in result.stream_text(delta=True)]
  assert "".join(asyncio.run(run())) == ANSWER
  assert isinstance(agent(output_type=City).run_sync("Name a city.").output, City)


# litellm: hosted_vllm/ is /v1/chat/completions, anthropic/ is /v1/messages

@pytest.mark.parametrize("provider", ["hosted_vllm", "openai", "anthropic"])
def test_litellm_completion_calls_tool_and_answers(provider):
  import litellm
  messages = [{"role": "user", "content": ASK}]
  options = {"model": f"{provider}/tiny", "messages": messages, "tools": [TOOL], "num_retries": 0}
  message = litellm.completion(**options).choices[0].message
  call, = message.tool_calls
  assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
  messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
  assert litellm.completion(**options).choices[0].message.content == ANSWER
  chunks = litellm.completion(**options, stream=True)
  assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def test_litellm_responses_and_messages_answer():
  import litellm
  response = litellm.responses("hello", "openai/tiny")
  assert response.output[-1].content[0].text == ANSWER
  message = asyncio.run(litellm.anthropic.messages.acreate(
    model="anthropic/tiny", max_tokens=50, messages=[{"role": "user", "content": "hello"}]))
  assert message["content"][0]["text"] == ANSWER


def test_guidellm_report_has_output_tokens_and_first_token_times(tmp_path):
  """With /v1/chat/completions, and offline."""
  byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
  (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
  with Server() as server:
    options = {"tokenizer": f"kind=huggingface_auto,model={tmp_path}", "output": "kind=json,path=report.json",
               "backend": f"kind=openai_http,target={server.url}", "profile": "kind=concurrent,streams=4",
               "constraint": "kind=max_requests,count=12",
               "data": "kind=synthetic_text,prompt_tokens=24,output_tokens=16"}
    command = [sys.executable, "-m", "guidellm", "run", "--disable-progress",
               *[text for name, value in options.items() for text in (f"--{name}", value)]]
    result = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")})
    assert result.returncode == 0, result.stdout
    requests = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]["requests"]
    assert len(requests["successful"]) == 12 and requests["errored"] == requests["incomplete"] == []
    for stats in requests["successful"]:
      assert stats["output_metrics"]["total_tokens"] == 16 and stats["time_to_first_token_ms"] > 0
    # guidellm needs the usage in each chunk (continuous_usage_stats) only for a request that it cancels, so the report
    # does not show it: helpers.protocol.joined checks it
    assert "Traceback" not in server.log, server.log
