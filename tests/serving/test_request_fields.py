"""Request fields of OpenAI's and vLLM's clients over HTTP: fields without effect, unknown fields, vLLM's extra fields.
Names and formats are vLLM's (vllm/entrypoints/openai)."""
import json
import re

import pytest
from helpers.agents import DATA
from helpers.protocol import SMALL
from helpers.requests import flags
from helpers.servers import LocalServer, checked, error_of, stream

from tinyvllm import SamplingParams

GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
MESSAGES = [{"role": "user", "content": "the cat"}]
TEXT = {"prompt": "the cat", **GREEDY}
TALK = {"messages": MESSAGES, **GREEDY}
USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.fixture(scope="module")
def server(folder):
  yield from checked(LocalServer(folder, *flags(**SMALL, max_logprobs=-1), "--trust-request-chat-template"))


@pytest.fixture(scope="module")
def strict_server(folder):
  yield from checked(LocalServer(folder, *flags(**SMALL), "--strict-fields"))


def complete(server, **fields): return answer(server, "/v1/completions", {**TEXT, **fields})
def chat(server, **fields): return answer(server, "/v1/chat/completions", {**TALK, **fields})


def answer(server, path, body):
  response = server.post(path, body)
  assert response.status_code == 200, response.text
  return response.json()


def chunks(server, path, body):
  *chunks, last = stream(server, path, body)
  assert last == "[DONE]"
  return chunks


def refused(server, path, body): return error_of(server.post(path, body), 400)


# Usage in each chunk

@pytest.mark.parametrize("path,body", [("/v1/completions", TEXT), ("/v1/chat/completions", TALK)])
def test_continuous_usage_stats_put_usage_into_each_chunk(server, path, body):
  *parts, last = chunks(server, path, {**body, "n": 2, "stream_options": USAGE})
  num_prompt = last["usage"]["prompt_tokens"]
  assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12 and num_prompt > 1
  for index in (0, 1):
    usages = [part["usage"] for part in parts if part["choices"][0]["index"] == index]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-1] == 6 and counts[0] == (0 if "messages" in body else counts[0])
    for usage, count in zip(usages, counts, strict=True):
      assert usage == {"prompt_tokens": num_prompt, "completion_tokens": count, "total_tokens": num_prompt + count}


def test_continuous_usage_stats_without_include_usage_have_no_effect(server):
  options = {"include_usage": False, "continuous_usage_stats": True}
  assert all("usage" not in part for part in chunks(server, "/v1/completions", {**TEXT, "stream_options": options}))


# Fields without effect

NO_EFFECT = json.loads((DATA / "fields_without_effect.json").read_text())


@pytest.mark.parametrize("name", NO_EFFECT)
def test_field_without_effect_is_accepted_silently(server, name):
  for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", TALK)):
    plain, with_it = [answer(server, path, x)["choices"] for x in (body, {**body, name: NO_EFFECT[name]})]
    assert with_it == plain
  assert f"unknown request field '{name}'" not in server.log


def test_null_means_absent_for_every_field(server):
  schema = server.get("/openapi.json").json()["components"]["schemas"]
  for path, body, title in (("/v1/completions", TEXT, "CompletionRequest"),
                            ("/v1/chat/completions", TALK, "ChatCompletionRequest")):
    nulls = dict.fromkeys(schema[title]["properties"]) | {"unknown_null_field": None}
    plain, with_nulls = [answer(server, path, x)["choices"] for x in (body, {**nulls, **body})]
    assert len(nulls) > 60 and with_nulls == plain
  body = {**TEXT, "stream_options": {"include_usage": None}, "response_format": {"type": "text", "json_schema": None}}
  assert chunks(server, "/v1/completions", body)
  assert "unknown_null_field" not in server.log


# Unknown fields

def test_unknown_field_is_ignored_with_one_warning(server):
  plain = complete(server)["choices"]
  for _ in range(2): assert complete(server, temprature=1, stream_opts={"a": 1})["choices"] == plain
  nested = {"stream_options": {"chunk_size": 1}, "response_format": {"type": "text", "colour": "red"}}
  assert chunks(server, "/v1/completions", {**TEXT, **nested})
  for name in ("temprature", "stream_opts", "chunk_size", "colour"):
    assert len(re.findall(f"unknown request field '{name}' is ignored", server.log)) == 1, name


def test_hostile_unknown_names_are_truncated_escaped_and_bounded(folder):
  with LocalServer(folder, *flags(**SMALL)) as server:
    names = [f"field {i}" for i in range(300)]
    hostile = ["x" * 100000, "two\nlines"]
    body = {**TEXT, **dict.fromkeys(hostile + names, 1)}
    content = json.dumps(body).encode()
    response = server.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 200, response.text
    warnings = [line for line in server.log.splitlines() if "unknown request field" in line]
    assert len(warnings) == 100 and max(map(len, warnings)) < 200 and "two\\nlines" in warnings[1]


def test_strict_fields_flag_refuses_unknown_fields(strict_server):
  for name, body in {"temprature": {**TEXT, "temprature": 1}, "usage": {
      **TEXT, "stream": True, "stream_options": {"usage": True}}}.items():
    error = refused(strict_server, "/v1/completions", body)
    assert name in error["message"] and "--strict-fields" in error["message"] and error["param"] in body
  assert refused(strict_server, "/tokenize", {"prompt": "a", "pompt": 1})["param"] == "pompt"
  content = json.dumps({**TEXT, "\ud800": 1}).encode()
  error_of(strict_server.post("/v1/completions", content=content, headers={"Content-Type": "application/json"}), 400)
  assert complete(strict_server, user="u", suffix=None, unknown=None)["choices"]


# Token ids

@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_return_token_ids_adds_prompt_and_output_ids(server, llm, path):
  body = {**(TALK if "chat" in path else TEXT), "return_token_ids": True, "n": 2}
  whole = answer(server, path, body)
  prompt_holders = [whole] if "chat" in path else whole["choices"]
  prompt_ids = server.post("/tokenize", {k: body[k] for k in ("messages", "prompt") if k in body}).json()["tokens"]
  assert [holder["prompt_token_ids"] for holder in prompt_holders] == [prompt_ids] * len(prompt_holders)
  output, = llm.generate({"prompt_token_ids": prompt_ids}, SamplingParams(**GREEDY))
  assert [choice["token_ids"] for choice in whole["choices"]] == [output.outputs[0].token_ids] * 2
  parts = chunks(server, path, body)
  for index in (0, 1):
    mine = [part for part in parts if part["choices"][0]["index"] == index]
    ids = [(part if "chat" in path else part["choices"][0]).get("prompt_token_ids") for part in mine]
    assert ids == [prompt_ids] + [None] * (len(mine) - 1)
    assert sum((part["choices"][0].get("token_ids", []) for part in mine), []) == output.outputs[0].token_ids
  assert answer(server, path, {**body, "return_token_ids": False})["choices"][0]["token_ids"] is None


def test_return_tokens_as_token_ids_names_tokens_by_id(server):
  ids = complete(server, return_token_ids=True)["choices"][0]["token_ids"]
  fields = {"return_tokens_as_token_ids": True}
  logprobs = complete(server, logprobs=2, **fields)["choices"][0]["logprobs"]
  plain = complete(server, logprobs=2)["choices"][0]["logprobs"]
  assert logprobs["tokens"] == [f"token_id:{i}" for i in ids]
  assert all(name in best and re.fullmatch(r"token_id:\d+", key) for best, name in zip(
    logprobs["top_logprobs"], logprobs["tokens"], strict=True) for key in best)
  assert logprobs["text_offset"] == plain["text_offset"]
  content = chat(server, logprobs=True, top_logprobs=2, return_token_ids=True, **fields)["choices"][0]
  entries = content["logprobs"]["content"]
  assert [entry["token"] for entry in entries] == [f"token_id:{i}" for i in content["token_ids"]]
  assert all(re.fullmatch(r"token_id:\d+", x["token"]) for entry in entries for x in entry["top_logprobs"])


# Prompts

@pytest.mark.parametrize("side", [None, "left", "right"])
def test_truncate_prompt_tokens_keeps_last_or_first_tokens(server, side):
  ids = server.post("/tokenize", {"prompt": "the cat sat on the mat"}).json()["tokens"]
  part = ids[:3] if side == "right" else ids[-3:]
  for prompt in ("the cat sat on the mat", ids):
    choice = complete(server, prompt=prompt, truncate_prompt_tokens=3, truncation_side=side, return_token_ids=True)[
      "choices"][0]
    assert choice["prompt_token_ids"] == part
  assert choice["text"] == complete(server, prompt=part)["choices"][0]["text"]
  short = complete(server, prompt=ids, truncate_prompt_tokens=100, return_token_ids=True)["choices"][0]
  assert short["prompt_token_ids"] == ids


def test_truncate_prompt_tokens_of_chat_and_minus_1_fit_the_context(server):
  messages = [{"role": "user", "content": "the cat " * 100}]
  assert refused(server, "/v1/chat/completions", {"messages": messages})["message"].startswith("This model's maximum")
  assert chat(server, messages=messages, truncate_prompt_tokens=5)["usage"]["prompt_tokens"] == 5
  assert chat(server, messages=messages, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 128 - 6
  assert complete(server, prompt="the cat " * 100, truncate_prompt_tokens=-1)["usage"]["total_tokens"] == 128


def test_add_special_tokens_adds_or_omits_bos(server, llm):
  bos = llm.tokenizer.prefix
  def ids(body): return body.get("prompt_token_ids") or body["choices"][0]["prompt_token_ids"]
  plain, without = [ids(complete(server, return_token_ids=True, add_special_tokens=x)) for x in (True, False)]
  assert bos and plain == bos + without
  plain, with_bos = [ids(chat(server, return_token_ids=True, add_special_tokens=x)) for x in (False, True)]
  assert with_bos == bos + plain


def test_chat_template_of_request_replaces_the_models(server):
  template = "{{ messages[0].content }} sat"
  ids = server.post("/tokenize", {"prompt": "the cat sat", "add_special_tokens": False}).json()["tokens"]
  assert chat(server, chat_template=template, return_token_ids=True)["prompt_token_ids"] == ids
  assert server.post("/tokenize", {"messages": MESSAGES, "chat_template": template}).json()["tokens"] == ids
  assert "reserved" in refused(server, "/v1/chat/completions", {
    **TALK, "chat_template_kwargs": {"chat_template": "x"}})["message"]


# Echo

CONTINUED = [*MESSAGES, {"role": "assistant", "content": "sat on"}]


@pytest.mark.parametrize("messages,options,echo,role", [
  (CONTINUED, {"add_generation_prompt": False, "continue_final_message": True}, "sat on", "assistant"),
  (CONTINUED, {}, "sat on", "assistant"), (MESSAGES, {"add_generation_prompt": False}, "the cat", "user"),
  (MESSAGES, {}, "", "assistant")], ids=["continued", "same role", "no generation prompt", "other role"])
def test_chat_echo_puts_last_message_of_same_role_before_the_answer(server, messages, options, echo, role):
  options = {"messages": messages, **options}
  plain = chat(server, **options)["choices"][0]["message"]["content"]
  message = chat(server, echo=True, **options)["choices"][0]["message"]
  assert message["content"] == echo + plain and message["role"] == role
  parts = chunks(server, "/v1/chat/completions", {**TALK, "echo": True, **options})
  deltas = [part["choices"][0]["delta"] for part in parts]
  assert deltas[0] == {"role": role, "content": ""} and (not echo or deltas[1] == {"content": echo})
  assert "".join(delta["content"] for delta in deltas) == echo + plain


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", [str, list])
def test_max_tokens_0_with_echo_returns_the_prompt_alone(server, form, streamed):
  ids = server.post("/tokenize", {"prompt": "the cat sat"}).json()["tokens"]
  body = {**TEXT, "prompt": "the cat sat" if form is str else ids, "max_tokens": 0, "echo": True, "logprobs": 1}
  if streamed: choice, = [part["choices"][0] for part in chunks(server, "/v1/completions", body)]
  else: choice = answer(server, "/v1/completions", body)["choices"][0]
  assert choice["text"] == ("the cat sat" if form is str else "<s>the cat sat")
  assert choice["finish_reason"] == "length"
  logprobs = choice["logprobs"]
  assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(ids)
  assert logprobs["token_logprobs"][0] is None


# Values

def test_integral_floats_are_integers(server):
  assert complete(server, max_tokens=5.0, top_k=3.0, n=1.0, seed=7.0)["usage"]["completion_tokens"] == 5
  assert chat(server, max_tokens=None, max_completion_tokens=4.0)["usage"]["completion_tokens"] == 4


def test_repeat_penalty_is_repetition_penalty(server):
  renamed, own, plain = [complete(server, **{name: 50.0})["choices"][0]["text"]
                         for name in ("repeat_penalty", "repetition_penalty", "user_penalty")]
  assert renamed == own != plain


@pytest.mark.parametrize("k", [-1, 25])
def test_logprobs_beyond_20_equal_log_softmax(server, k):
  whole = complete(server, logprobs=k, prompt_logprobs=k, return_tokens_as_token_ids=True)["choices"][0]
  number = 320 if k == -1 else k
  best = whole["logprobs"]["top_logprobs"]
  assert {len(entry) for entry in best} <= {number, number + 1}
  few = complete(server, logprobs=20, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]["top_logprobs"]
  for many, twenty in zip(best, few, strict=True):
    first, expected = [sorted(entry.values(), reverse=True)[:20] for entry in (many, twenty)]
    assert first == pytest.approx(expected, abs=1e-4)
    assert {name: many[name] for name in twenty} == pytest.approx(twenty, abs=1e-4)
  ranks = [sorted(x["rank"] for x in entry.values()) for entry in whole["prompt_logprobs"][1:]]
  assert ranks and all(entry[:number] == [*range(1, number + 1)] for entry in ranks)
  content = chat(server, logprobs=True, top_logprobs=k)["choices"][0]["logprobs"]["content"]
  assert {len(entry["top_logprobs"]) for entry in content} == {number}


# Prompt log probabilities

@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_are_once_in_each_choice_or_chat(server, llm, path):
  is_chat, start = "chat" in path, TALK if "chat" in path else TEXT
  ids = server.post("/tokenize", {k: start[k] for k in ("messages", "prompt") if k in start}).json()["tokens"]
  output, = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=1, prompt_logprobs=2))
  expected = [entry and {str(i): {"logprob": pytest.approx(x.logprob, abs=1e-4), "rank": x.rank,
                                  "decoded_token": x.decoded_token} for i, x in entry.items()}
              for entry in output.prompt_logprobs]
  body = {**start, "prompt_logprobs": 2, "n": 2}
  whole = answer(server, path, body)
  holders = [whole] if is_chat else whole["choices"]
  assert [x["prompt_logprobs"] for x in holders] == [expected] * len(holders) and expected[0] is None
  assert not is_chat or all("prompt_logprobs" not in choice for choice in whole["choices"])
  parts = [x if is_chat else x["choices"][0] for x in chunks(server, path, {**body, "n": len(holders)})]
  assert [x["prompt_logprobs"] for x in parts if "prompt_logprobs" in x] == [expected] * len(holders)
  plain = answer(server, path, start)
  assert (plain if is_chat else plain["choices"][0])["prompt_logprobs"] is None


# Formats


ARRAY = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}


@pytest.mark.parametrize("options,pattern", [
  ({"disable_any_whitespace": True}, r"\[1,1\]"), ({"whitespace_pattern": "_?"}, r"_?\[_?1_?,_?1_?\]_?"),
  ({"disable_fallback": True}, r"\s*\[\s*1\s*,\s*1\s*\]\s*")], ids=str)
def test_white_space_options_of_structured_outputs(server, options, pattern):
  tokens = [i for i in range(3, 320) if server.post("/detokenize", {"tokens": [i]}).json()["prompt"] in "_ \n"]
  body = {**TEXT, "ignore_eos": False, "max_tokens": 20, "logit_bias": dict.fromkeys(map(str, tokens), 5),
          "structured_outputs": {"json": ARRAY, **options}}
  assert re.fullmatch(pattern, complete(server, **body)["choices"][0]["text"], re.DOTALL) or "fallback" in str(options)


@pytest.mark.parametrize("form", ["legacy", "new", "structured_outputs"])
def test_structural_tag_constrains_the_content_of_tags(server, form):
  legacy = {"triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": {"enum": ["on", "off"]}, "end": "</f>"}]}
  tags = [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"enum": ["on", "off"]}}, "end": "</f>"}]
  format = {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}
  fields = {"legacy": {"response_format": {"type": "structural_tag", **legacy}},
            "new": {"response_format": {"type": "structural_tag", "format": format}},
            "structured_outputs": {"structured_outputs": {"structural_tag": json.dumps(legacy)}}}[form]
  trigger = [i for i in range(3, 320) if server.post("/detokenize", {"tokens": [i]}).json()["prompt"] in ("<", "f")]
  bias = dict.fromkeys(map(str, trigger), 9)
  text = complete(server, ignore_eos=False, max_tokens=60, logit_bias=bias, **fields)["choices"][0]["text"]
  assert re.search(r"<f", text), "the trigger must occur"
  assert re.fullmatch(r'(?:(?!<f).)*(?:<f=a>"(?:on|off)"</f>(?:(?!<f).)*)*(?:<f.{0,15})?', text, re.DOTALL), text


# Tokenize

def test_tokenize_takes_template_fields_and_returns_token_strs(server, llm):
  body = {"messages": CONTINUED}
  plain = server.post("/tokenize", body).json()["tokens"]
  open_ended = server.post("/tokenize", {**body, "add_generation_prompt": False, "continue_final_message": True}).json()
  assert plain != open_ended["tokens"] and llm.tokenizer.decode(open_ended["tokens"]).endswith("sat on")
  mood = server.post("/tokenize", {**body, "chat_template_kwargs": {"mood": "happy"}}).json()["tokens"]
  assert llm.tokenizer.decode(mood).count("happy") == 1
  special = server.post("/tokenize", {**body, "add_special_tokens": True}).json()["tokens"]
  assert special == llm.tokenizer.prefix + plain
  answer = server.post("/tokenize", {"prompt": "the cat", "return_token_strs": True}).json()
  names = [llm.tokenizer.library.IdToPiece(i) for i in answer["tokens"]]
  assert answer["token_strs"] == names and names[0] == "<s>" and any("\u2581" in name for name in names)


@pytest.mark.parametrize("path,body", [
  ("/v1/completions", TEXT), ("/v1/chat/completions", TALK), ("/generate", TEXT),
  ("/v1/responses", {"input": "the cat", "max_output_tokens": 2}),
  ("/v1/messages", {"messages": MESSAGES, "max_tokens": 2})])
def test_cache_salt_separates_prefixes_in_each_route(server, path, body):
  def cached(salt):
    text = f"{path[1:]} and some words that fill a few blocks"
    messages = [{"role": "user", "content": text}]
    own = {"prompt": text, "messages": messages, "input": text}
    own = {name: value for name, value in own.items() if name in body} | {"cache_salt": salt + path}
    usage = answer(server, path, {**body, **own})["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return details.get("cached_tokens", usage.get("cache_read_input_tokens"))
  assert cached("one") == 0 == cached("two") and cached("one") > 4
  assert "cache_salt" in server.post(path, {**body, "cache_salt": ""}).text
