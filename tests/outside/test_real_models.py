"""Gemma 3 270M, Qwen2.5-Coder-0.5B-Instruct and SmolLM2-135M as GGUF, in the folder TINYVLLM_REAL_MODELS: ids and
perplexity equal llama.cpp's, which record_real_models.py has written to data/real_models.json, and tool loops with a
real model's calls. llama.cpp rounds activations to int8, so that ids are compared up to the first near tie. Qwen is so
small that it answers by another call, unless tool_choice is none."""
import json
import math
import os
from pathlib import Path

import anthropic
import pytest
from helpers.servers import LocalServer

from tinyvllm import LLM, SamplingParams

FOLDER = Path(os.environ.get("TINYVLLM_REAL_MODELS", "/nowhere"))
RECORDS = json.loads((Path(__file__).parents[1] / "data/real_models.json").read_text())
QWEN = "qwen2.5-coder-0.5b-instruct.gguf"
NEAR_TIE = 0.6   # logits between the best and the second best id
WEATHER = {"name": "get_weather", "description": "Get the current weather of a city", "parameters": {
  "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}
CITIES = ["Rome", "Oslo", "Paris"]
RESULT = "21 degrees and sunny"
SYSTEM = "You are a helpful assistant."


@pytest.fixture(scope="module", params=RECORDS)
def recorded(request):
  options = {"max_model_len": 1024, "max_num_seqs": 2, "dtype": "float32", "enable_prefix_caching": False}
  return LLM(FOLDER / request.param, **options), RECORDS[request.param]


def test_greedy_ids_equal_llama_cpp_up_to_a_near_tie(recorded, print_at_end):
  llm, record = recorded
  compared = []
  for case in record["prompts"]:
    ids = case["prompt_ids"]
    assert llm.tokenizer.encode(case["prompt"]) == ids
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    actual = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)[0].outputs[0].token_ids
    same = next((i for i, pair in enumerate(zip(actual, case["ids"], strict=True)) if pair[0] != pair[1]), 64)
    compared.append(same)
    assert same == 64 or case["margins"][same] < NEAR_TIE, (case["prompt"], same, case["margins"][same])
  print_at_end(f"ids equal to llama.cpp's, of 64 for each prompt: {compared}")


def test_perplexity_is_within_1_percent_of_llama_cpp(recorded, print_at_end):
  llm, record = recorded
  output, = llm.generate(record["text"], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
  ids = output.prompt_token_ids
  values = [row[i].logprob for row, i in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
  perplexity = math.exp(-sum(values) / len(values))
  print_at_end(f"perplexity {perplexity:.3f}, llama.cpp's {record['perplexity']:.3f}")
  assert perplexity == pytest.approx(record["perplexity"], rel=0.01)


@pytest.fixture(scope="module")
def server():
  options = ["--max-model-len", 2048, "--max-num-seqs", 2, "--served-model-name", "qwen", "--dtype", "float32"]
  with LocalServer(FOLDER / QWEN, *options, seconds=900) as server: yield server


def question(city): return f"Call get_weather for {city}."


@pytest.mark.parametrize("streamed", [False, True])
def test_three_rounds_of_a_tool_loop_with_chat_completions(server, streamed):
  """The client returns the server's messages unchanged."""
  client, messages = server.client(timeout=600), [{"role": "system", "content": SYSTEM}]
  def ask(**fields):
    fields = {"model": "qwen", "messages": messages, "temperature": 0, "max_tokens": 60,
              "tools": [{"type": "function", "function": WEATHER}], **fields}
    if not streamed: return client.chat.completions.create(**fields).choices[0]
    with client.chat.completions.stream(**fields) as stream: return stream.get_final_completion().choices[0]
  for city in CITIES:
    messages.append({"role": "user", "content": question(city)})
    choice = ask()
    call, = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls" and call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] == city
    messages += [choice.message.model_dump(exclude_none=True),
                 {"role": "tool", "tool_call_id": call.id, "content": RESULT}]
    choice = ask(tool_choice="none")
    assert choice.message.content and not choice.message.tool_calls
    messages.append(choice.message.model_dump(exclude_none=True))


@pytest.mark.parametrize("streamed", [False, True])
def test_three_rounds_of_a_tool_loop_with_messages(server, streamed):
  client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=600)
  tool, messages = {**WEATHER, "input_schema": WEATHER["parameters"]}, []
  del tool["parameters"]
  def ask(**fields):
    fields = {"model": "qwen", "system": SYSTEM, "messages": messages, "max_tokens": 60, "tools": [tool],
              "extra_body": {"temperature": 0}, **fields}
    if not streamed: return client.messages.create(**fields)
    with client.messages.stream(**fields) as stream: return stream.get_final_message()
  for city in CITIES:
    messages.append({"role": "user", "content": question(city)})
    message = ask()
    call = message.content[-1]
    assert message.stop_reason == "tool_use" and (call.name, call.input["city"]) == ("get_weather", city)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    message = ask(tool_choice={"type": "none"})
    assert message.content[0].text
    messages.append({"role": "assistant", "content": message.content})


@pytest.mark.parametrize("streamed", [False, True])
def test_three_rounds_of_a_tool_loop_with_responses(server, streamed):
  client, items = server.client(timeout=600), []
  def ask(**fields):
    fields = {"model": "qwen", "instructions": SYSTEM, "input": items, "max_output_tokens": 60, "temperature": 0,
              "tools": [{"type": "function", **WEATHER}], **fields}
    if not streamed: return client.responses.create(**fields)
    with client.responses.stream(**fields) as stream:
      for _ in stream: pass
      return stream.get_final_response()
  for city in CITIES:
    items.append({"role": "user", "content": question(city)})
    call = ask().output[-1]
    assert (call.type, call.name, json.loads(call.arguments)["city"]) == ("function_call", "get_weather", city)
    items += [call.model_dump(exclude_none=True),
              {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}]
    answer = ask(tool_choice="none")
    assert answer.output_text
    items += [item.model_dump(exclude_none=True) for item in answer.output]
