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
from helpers.data import read_data
from helpers.servers import LocalServer

from tinyvllm import LLM, SamplingParams

FOLDER = Path(os.environ.get("TINYVLLM_REAL_MODELS", "/nowhere"))
RECORDS = read_data("real_models.json")
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


# The APIs: each function sends the items of a conversation, and returns the items of the answer, its call (name,
# arguments, id) or None, and its text

def ask_chat(server, items, streamed, **fields):
  completions = server.client(timeout=600).chat.completions
  fields = {"model": "qwen", "messages": [{"role": "system", "content": SYSTEM}, *items], "temperature": 0,
            "max_tokens": 60, "tools": [{"type": "function", "function": WEATHER}], **fields}
  if streamed:
    with completions.stream(**fields) as stream: choice = stream.get_final_completion().choices[0]
  else: choice = completions.create(**fields).choices[0]
  calls = [(x.function.name, json.loads(x.function.arguments), x.id) for x in choice.message.tool_calls or []]
  assert (choice.finish_reason == "tool_calls") == bool(calls) and len(calls) <= 1
  return [choice.message.model_dump(exclude_none=True)], calls[0] if calls else None, choice.message.content


def ask_messages(server, items, streamed, tool_choice="auto"):
  messages = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=600).messages
  tool = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
  fields = {"model": "qwen", "system": SYSTEM, "messages": items, "max_tokens": 60, "extra_body": {"temperature": 0},
            "tools": [tool], "tool_choice": {"type": tool_choice}}
  if streamed:
    with messages.stream(**fields) as stream: message = stream.get_final_message()
  else: message = messages.create(**fields)
  last = message.content[-1]
  assert (message.stop_reason == "tool_use") == (last.type == "tool_use")
  call = (last.name, last.input, last.id) if last.type == "tool_use" else None
  return [{"role": "assistant", "content": message.content}], call, getattr(message.content[0], "text", None)


def ask_responses(server, items, streamed, **fields):
  responses = server.client(timeout=600).responses
  fields = {"model": "qwen", "instructions": SYSTEM, "input": items, "max_output_tokens": 60, "temperature": 0,
            "tools": [{"type": "function", **WEATHER}], **fields}
  if streamed:
    with responses.stream(**fields) as stream: response = stream.until_done().get_final_response()
  else: response = responses.create(**fields)
  last = response.output[-1]
  call = (last.name, json.loads(last.arguments), last.call_id) if last.type == "function_call" else None
  return [item.model_dump(exclude_none=True) for item in response.output], call, response.output_text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("ask,result", [
  (ask_chat, lambda i: {"role": "tool", "tool_call_id": i, "content": RESULT}),
  (ask_messages, lambda i: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": RESULT}]}),
  (ask_responses, lambda i: {"type": "function_call_output", "call_id": i, "output": RESULT})])
def test_three_rounds_of_a_tool_loop(server, ask, result, streamed):
  """The client returns the server's items unchanged."""
  items = []
  for city in CITIES:
    items.append({"role": "user", "content": f"Call get_weather for {city}."})
    answer, (name, arguments, call_id), _ = ask(server, items, streamed)
    assert (name, arguments["city"]) == ("get_weather", city)
    items += [*answer, result(call_id)]
    answer, call, text = ask(server, items, streamed, tool_choice="none")
    assert text and not call
    items += answer
