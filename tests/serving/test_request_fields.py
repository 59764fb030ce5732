"""Request fields of OpenAI's and vLLM's clients over HTTP: fields without effect, unknown fields, vLLM's extra fields.
Names and formats are vLLM's (vllm/entrypoints/openai)."""
import re

import pytest
from helpers.data import read_data
from helpers.protocol import CHATS, COMPLETIONS, MESSAGES, SMALL, answer
from helpers.commands import flags
from helpers.servers import LocalServer, checked, error_of, stream

from tinyvllm import SamplingParams

CASES = read_data("server_cases.json")
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
ROUTES = {COMPLETIONS: {"prompt": "the cat", **GREEDY}, CHATS: {"messages": MESSAGES[-1:], **GREEDY}}
both_routes = pytest.mark.parametrize("path", ROUTES)


@pytest.fixture(scope="module")
def server(folder):
  yield from checked(LocalServer(folder, *flags(**SMALL, max_logprobs=-1), "--trust-request-chat-template"))


def ask(server, path, **fields): return answer(server, path, {**ROUTES[path], **fields})
def complete(server, **fields): return ask(server, COMPLETIONS, **fields)["choices"][0]
def chat(server, **fields): return ask(server, CHATS, **fields)["choices"][0]
def tokenized(server, **fields): return server.post("/tokenize", fields).json()["tokens"]


# Requests with equal answers

NO_EFFECT = read_data("fields_without_effect.json")


def content(server, path, **fields):
  """Return the ids of the prompt, the ids of the answer, and its text."""
  body = ask(server, path, **{**fields, "return_token_ids": True})
  choice, = body["choices"]
  return (body | choice)["prompt_token_ids"], choice["token_ids"], choice.get("text") or choice["message"]["content"]


@both_routes
@pytest.mark.parametrize("name", NO_EFFECT)
def test_field_without_effect_is_accepted_silently(server, path, name):
  assert content(server, path, **{name: NO_EFFECT[name]}) == content(server, path)
  assert f"unknown request field '{name}'" not in server.log


@pytest.mark.parametrize("path,fields,other_path,other_fields", read_data("equal_requests.json"))
def test_field_equals_another_form_of_the_request(server, path, fields, other_path, other_fields):
  assert content(server, path) != content(server, path, **fields) == content(server, other_path, **other_fields)


@both_routes
def test_null_means_absent_for_every_field(server, path):
  schema = server.get("/openapi.json").json()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
  fields = server.get("/openapi.json").json()["components"]["schemas"][schema["schema"]["$ref"].split("/")[-1]]
  nulls = dict.fromkeys([*fields["properties"], "unknown_null_field"])
  assert len(nulls) > 60 and content(server, path, **nulls | ROUTES[path]) == content(server, path)
  assert content(server, path, response_format={"type": "text", "json_schema": None}) == content(server, path)
  assert "unknown_null_field" not in server.log


@pytest.mark.parametrize("options,has_usage", CASES["usage"])
def test_include_usage_adds_one_chunk(server, options, has_usage):
  """Other tests read the usage in each chunk: see helpers.protocol.answer."""
  *chunks, last = stream(server, COMPLETIONS, {**ROUTES[COMPLETIONS], "stream_options": options})
  if has_usage: assert chunks.pop()["usage"]["completion_tokens"] == 6
  assert {chunk.get("usage", "absent") for chunk in chunks} == {None if has_usage else "absent"} and last == "[DONE]"


def test_unknown_fields_are_logged_once_shortened_and_bounded(folder):
  with LocalServer(folder, *flags(**SMALL)) as server:
    unknown = {"temprature": 1, "stream_opts": {"a": 1}, "response_format": {"type": "text", "colour": "red"}}
    for _ in range(2): assert content(server, COMPLETIONS, **unknown) == content(server, COMPLETIONS)
    assert stream(server, COMPLETIONS, {**ROUTES[COMPLETIONS], "stream_options": {"chunk_size": 1}})
    complete(server, **dict.fromkeys(["x" * 100000, "two\nlines", *(f"field {i}" for i in range(300))], 1))
    warnings = re.findall("unknown request field '(.*)' is ignored", server.log)
    assert warnings[:6] == ["temprature", "stream_opts", "colour", "chunk_size", "x" * 50, "two\\nlines"]
    assert len(warnings) == len({*warnings}) == 100 and max(map(len, server.log.splitlines())) < 200


# Token ids and log probabilities

@both_routes
def test_token_ids_and_prompt_logprobs_equal_generate(server, llm, path):
  whole = ask(server, path, return_token_ids=True, prompt_logprobs=2, n=2)
  holders = [whole] if path == CHATS else whole["choices"]
  ids = tokenized(server, **{name: ROUTES[path][name] for name in ("messages", "prompt") if name in ROUTES[path]})
  output, = llm.generate({"prompt_token_ids": ids}, SamplingParams(**GREEDY, prompt_logprobs=2))
  logprobs = [entry and {str(i): {**x._asdict(), "logprob": pytest.approx(x.logprob, abs=1e-4)}
                         for i, x in entry.items()} for entry in output.prompt_logprobs]
  assert [(x["prompt_token_ids"], x["prompt_logprobs"]) for x in holders] == [(ids, logprobs)] * len(holders)
  assert [choice["token_ids"] for choice in whole["choices"]] == [output.outputs[0].token_ids] * 2
  assert path != CHATS or not any("prompt_logprobs" in choice for choice in whole["choices"])
  plain = ask(server, path, return_token_ids=False)
  plain |= plain["choices"][0]
  assert plain["prompt_token_ids"] is plain["prompt_logprobs"] is plain["token_ids"] is None


@pytest.mark.parametrize("k", [-1, 25])
def test_logprobs_beyond_20_equal_log_softmax(server, k):
  number = 320 if k == -1 else k
  choice = complete(server, logprobs=k, prompt_logprobs=k, return_tokens_as_token_ids=True)
  few = complete(server, logprobs=20, return_tokens_as_token_ids=True)
  for many, best in zip(*(x["logprobs"]["top_logprobs"] for x in (choice, few)), strict=True):
    assert len(many) in (number, number + 1) and {name: many[name] for name in best} == pytest.approx(best, abs=1e-4)
    assert sorted(many.values())[-20:] == pytest.approx(sorted(best.values())[-20:], abs=1e-4)
  ranks = [sorted(x["rank"] for x in entry.values())[:number] for entry in choice["prompt_logprobs"][1:]]
  assert ranks == [[*range(1, number + 1)]] * 4
  content = chat(server, logprobs=True, top_logprobs=k)["logprobs"]["content"]
  assert {len(entry["top_logprobs"]) for entry in content} == {number}


# Prompts

def test_truncate_prompt_tokens_of_chat_and_minus_1_fit_the_context(server):
  messages = [{"role": "user", "content": "the cat " * 100}]
  assert error_of(server.post(CHATS, {"messages": messages}), 400)["message"].startswith("This model's maximum")
  for path, size, num in ((CHATS, 5, 5), (CHATS, -1, 128 - 4), (COMPLETIONS, -1, 128 - 6)):
    prompt = {"messages": messages} if path == CHATS else {"prompt": "the cat " * 100}
    fields = {**prompt, "truncate_prompt_tokens": size, **({"max_completion_tokens": 4} if path == CHATS else {})}
    assert ask(server, path, **fields)["usage"]["prompt_tokens"] == num


CONTINUED = [MESSAGES[-1], {"role": "assistant", "content": "sat on"}]


@pytest.mark.parametrize("messages,options,echo,role", CASES["echoed"])
def test_chat_echo_puts_last_message_of_same_role_before_the_answer(server, messages, options, echo, role):
  plain, echoed = [chat(server, messages=messages, echo=x, **options)["message"] for x in (False, True)]
  assert echoed == {"role": role, "content": echo + plain["content"]}


@pytest.mark.parametrize("prompt,text", CASES["prompts"])
def test_max_tokens_0_with_echo_returns_the_prompt_alone(server, prompt, text):
  choice = complete(server, prompt=prompt, max_tokens=0, echo=True, logprobs=1)
  assert (choice["text"], choice["finish_reason"]) == (text, "length")
  logprobs = choice["logprobs"]["token_logprobs"]
  assert len(choice["logprobs"]["tokens"]) == len(logprobs) == 7 and logprobs[0] is None


# Formats

ARRAY = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}


def bias(llm, texts, value):
  """Return a logit bias for the tokens with one of these texts."""
  return {"logit_bias": {str(i): value for i in range(3, 320) if llm.tokenizer.decode([i], False) in texts}}


@pytest.mark.parametrize("options,pattern", CASES["white space"], ids=str)
def test_white_space_options_of_structured_outputs(server, llm, options, pattern):
  fields = {"ignore_eos": False, "max_tokens": 20, **bias(llm, "_ \n", 5)}
  text = complete(server, **fields, structured_outputs={"json": ARRAY, **options})["text"]
  assert re.fullmatch(pattern, text, re.DOTALL)


@pytest.mark.parametrize("fields", CASES["structural tags"])
def test_structural_tag_constrains_the_content_of_tags(server, llm, fields):
  text = complete(server, ignore_eos=False, max_tokens=60, **bias(llm, ("<", "f"), 9), **fields)["text"]
  assert re.search(r"<f", text), "the trigger must occur"
  assert re.fullmatch(r'(?:(?!<f).)*(?:<f=a>"(?:on|off)"</f>(?:(?!<f).)*)*(?:<f.{0,15})?', text, re.DOTALL), text


# Other routes

def test_valid_bodies_of_generation_skip_the_slower_handler_of_fastapi(server, monkeypatch):
  monkeypatch.setattr("fastapi.routing.solve_dependencies", None)   # it cannot be called
  for path, body in ROUTES.items(): assert server.post(path, body).status_code == 200


@pytest.mark.parametrize("fields,text", CASES["tokenized"], ids=str)
def test_tokenize_takes_template_fields(server, fields, text):
  ids = tokenized(server, messages=CONTINUED, **fields)
  assert ids == tokenized(server, prompt=text.removeprefix("<s>"), add_special_tokens=text.startswith("<s>"))


@pytest.mark.parametrize("path,body", [
  *ROUTES.items(), ("/generate", ROUTES[COMPLETIONS]), ("/v1/responses", {"input": "the cat", "max_output_tokens": 2}),
  ("/v1/messages", {"messages": MESSAGES[-1:], "max_tokens": 2})])
def test_cache_salt_separates_prefixes_in_each_route(server, path, body):
  text = f"{path[1:]} and some words that fill a few blocks"
  own = {"prompt": text, "messages": [{"role": "user", "content": text}], "input": text}
  own = body | {name: value for name, value in own.items() if name in body}

  def cached(salt):
    usage = server.post(path, {**own, "cache_salt": salt + path}).json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens", usage.get("cache_read_input_tokens"))
  assert cached("one") == 0 == cached("two") and cached("one") > 4
  assert "cache_salt" in server.post(path, {**body, "cache_salt": ""}).text
