"""AsyncLLM: an output that cannot be built ends only its request, and a shutdown ends running and later requests."""
import asyncio
import io
import json

import pytest
from helpers.commands import run_command
from helpers.protocol import SMALL

from tinyvllm import SamplingParams
from tinyvllm_extra.serving import app
from tinyvllm_extra.serving.async_engine import AsyncLLM, StepError

LONG = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)


@pytest.fixture
def llm(words_folder): return AsyncLLM(words_folder, **SMALL)


async def collect(llm, name):
  return "".join([output.outputs[0].text async for output in llm.generate("the cat", LONG, request_id=name)])


def test_output_that_cannot_be_built_ends_only_its_request(llm):
  broken = llm.llm.make_request("broken", "the cat", LONG)
  def output(delta: bool = False): raise KeyError("no such text")
  broken.output = output

  async def run_broken(): return [outputs async for outputs in llm.stream([broken])]

  async def main():
    return await asyncio.gather(collect(llm, "a"), run_broken(), collect(llm, "b"), return_exceptions=True)
  first, error, second = asyncio.run(asyncio.wait_for(main(), 60))
  assert isinstance(error, StepError) and "no such text" in str(error)
  assert first == second == asyncio.run(collect(llm, "c")) != ""
  assert not llm.llm.has_unfinished_requests()
  llm.shutdown()


def test_shutdown_ends_running_and_later_requests(llm):
  async def main():
    stream = llm.generate("the cat", LONG)
    await anext(stream)
    shutdown = asyncio.create_task(asyncio.to_thread(llm.shutdown))
    with pytest.raises(StepError, match="shut down"):
      async for output in stream: assert not output.finished
    await shutdown
    with pytest.raises(StepError, match="shut down"): await collect(llm, "later")
    llm.abort("later")
  asyncio.run(asyncio.wait_for(main(), 60))
  llm.shutdown()   # does nothing
  assert not llm.llm.has_unfinished_requests() and "runner" not in vars(llm.llm)


DELTAS = [{"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"content": "Yes."},
          {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{}"}}]}]


def test_chat_command_skips_deltas_without_content(monkeypatch):
  events = [json.dumps({"choices": [{"delta": delta}]}) for delta in DELTAS] + ["[DONE]"]
  response = io.BytesIO("".join(f"data: {event}\n\n" for event in events).encode())
  monkeypatch.setattr("urllib.request.urlopen", lambda request: response)
  run = run_command("chat", "--url", "http://a.example", stdin="hello\n")
  assert (run.returncode, run.stdout.strip()) == (0, "Yes."), run.stderr


def test_body_of_a_request_without_key_is_not_kept(monkeypatch):
  """The key is checked before the body is read: nobody can fill the memory without one."""
  kept = []
  read_body = app.Gate.read_body

  async def reading(gate, request, limit):
    kept.append(limit)
    return await read_body(gate, request, limit)
  monkeypatch.setattr(app.Gate, "read_body", reading)
  gate = app.Gate(None, app.ServerConfig(api_key=["secret"], max_body_size=4096), lambda: None)
  sent, chunks = [], [{"type": "http.request", "body": b"x" * 1000, "more_body": i < 3} for i in range(4)]

  async def receive(): return chunks.pop(0)
  async def send(message): sent.append(message)
  asyncio.run(gate({"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send))
  assert sent[0]["status"] == 401 and kept == [0] and not chunks
