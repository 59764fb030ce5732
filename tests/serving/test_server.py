"""The server's completions and chats, other routes, metrics, errors and limits."""
import dataclasses
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import ANY

import openai
import pytest
from helpers.data import read_data
from helpers.protocol import (CHATS, COMPLETIONS, GREEDY, KEY, MESSAGES, PROMPT_FIELDS, answer, chat_prompt,
                              expected_output, expected_rows, rows_of)
from helpers.servers import error_of, stream

from tinyvllm import SamplingParams, __version__

CASES = read_data("server_cases.json")

# Metrics

def increases(server, ask):
  """Return the increase of each metric caused by `ask`."""
  before = server.metrics()
  ask()
  return {name: value - before.get(name, 0) for name, value in server.metrics().items()}


@pytest.mark.parametrize("streamed", [False, True])
def test_metrics_count_finish_reasons_per_choice_and_times_per_prompt(server, streamed):
  body = {"prompt": ["the cat", "hello"], "n": 3, "max_tokens": 4, "ignore_eos": True, "seed": 1}
  ask = stream if streamed else type(server).post
  increase = increases(server, lambda: ask(server, "/v1/completions", body))
  times, sizes = CASES["histograms of a prompt"]
  assert {name: increase[f"{name}_count"] for name in times + sizes} == dict.fromkeys(times + sizes, 2)
  latency, queue, prefill, decode, inference = [increase[f"{name}_sum"] for name in times[1:]]
  assert min(queue, prefill, decode) > 0 and inference == pytest.approx(prefill + decode)
  assert latency == pytest.approx(queue + prefill + decode)
  assert increase.items() >= CASES["increases"].items()
  assert increase["prompt_tokens_total"] == increase["request_prompt_tokens_sum"] > 0
  assert increase["inter_token_latency_seconds_count"] == 24 - 2, "a prompt's first token has no interval"
  assert increase["inter_token_latency_seconds_bucket{le=+Inf}"] == 24 - 2
  assert 0 < increase["inter_token_latency_seconds_sum"] <= 3 * latency   # of three samples each


def test_iteration_tokens_histogram_counts_tokens_of_each_step(server):
  body = {"prompt": [[3, 1, 4, 1, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5]], "max_tokens": 5, "ignore_eos": True}
  increase = increases(server, lambda: server.post("/v1/completions", body))
  cached = increase["prefix_cache_hits_total"]
  assert increase["iteration_tokens_total_sum"] == 6 + 9 + 2 * (5 - 1) - cached   # the last tokens are not computed
  steps = increase["iteration_tokens_total_count"]
  of_1, of_8, of_any = [increase[f"iteration_tokens_total_bucket{{le={size}}}"] for size in ("1.0", "8.0", "+Inf")]
  assert 0 <= of_1 < of_8 == of_any == steps >= 5


def test_cache_config_info_has_vllm_labels(server):
  line, = re.findall("^tinyvllm:cache_config_info{(.*)} 1.0$", server.get("/metrics").text, re.M)
  assert {'block_size="4"', 'cache_dtype="auto"', 'enable_prefix_caching="True"'} <= {*line.split(",")}
  assert re.search(r'num_gpu_blocks="\d+"', line)


# Fields of SamplingParams

def cases(llm, prompt):
  """Return {field: (fields with it, the same without it)}. The two must produce different outputs."""
  plain, sampled = {"temperature": 0.0, "max_tokens": 12}, {"temperature": 1.5, "seed": 3, "max_tokens": 8}
  output = expected_output(llm, prompt, **plain).outputs[0]
  ids, text = output.token_ids, output.text
  bad_words = [text[i:i + 2].strip() for i in range(len(text)) if text[i:i + 2].strip()]
  end = {**plain, "logit_bias": {"2": 100}}
  changes = [
    (sampled, {"n": 3, "temperature": 0.0, "top_k": 1, "top_p": 1e-6, "min_p": 1.0, "seed": 4}),
    (plain, {"max_tokens": 5, "stop": text[3:5], "stop_token_ids": ids[2:3], "repetition_penalty": 50.0,
             "presence_penalty": -2.0, "frequency_penalty": -2.0, "logit_bias": {"300": 5.5}, "bad_words": bad_words,
             "allowed_token_ids": [300, 301, 302], "structured_outputs": {"regex": "[xyz]{3}"}}),
    ({**plain, "stop_token_ids": ids[2:3]}, {"min_tokens": 9}),
    ({**plain, "stop": [text[3:5]]}, {"include_stop_str_in_output": True}),
    (end, {"ignore_eos": True}), ({**end, "ignore_eos": True}, {"skip_special_tokens": False})]
  return {name: ({**base, name: value}, base) for base, fields in changes for name, value in fields.items()}


def test_every_sampling_params_field_affects_server_output(server, llm):
  fields_by_name = cases(llm, "the cat")
  other_fields = {"logprobs", "prompt_logprobs"}   # have their own tests
  assert set(fields_by_name) | other_fields == {f.name for f in dataclasses.fields(SamplingParams)}
  ids = server.post("/tokenize", {"messages": MESSAGES[-1:]}).json()["tokens"]
  for name, (fields, base_fields) in fields_by_name.items():
    rows = expected_rows(llm, "the cat", **fields)
    assert rows != expected_rows(llm, "the cat", **base_fields), f"{name} must change the output"
    assert rows_of(answer(server, "/v1/completions", {"prompt": "the cat", **fields})) == rows, name
    # Chat must equal the completion of the templated token ids
    chat = answer(server, "/v1/chat/completions", {"messages": MESSAGES[-1:], **fields})
    assert rows_of(chat) == rows_of(answer(server, "/v1/completions", {"prompt": ids, **fields})), name


# Other routes

def test_models_health_version_and_chat_page_return_200(server, folder):
  model = {"id": folder.name, "object": "model", "created": ANY, "owned_by": "tinyvllm", "root": folder.name,
           "parent": None, "max_model_len": 128}
  for path, body in (("/v1/models", {"object": "list", "data": [model]}), ("/health", {}),
                     ("/version", {"version": __version__})):
    response = server.get(path)
    assert (response.status_code, response.json()) == (200, body)
  page = server.get("/")
  assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
  assert "<html" in page.text.lower()
  assert page.headers["content-security-policy"] == "frame-ancestors 'none'", "ignored in a meta element"


def test_tokenize_and_detokenize_equal_the_tokenizer(server, llm):
  text = "hello world \xe9 \U0001f600"
  ids, bare = llm.tokenizer.encode(text), llm.tokenizer.encode(text, False)
  assert server.post("/tokenize", {"prompt": text}).json() == {"count": len(ids), "max_model_len": 128, "tokens": ids,
                                                                "token_strs": None}
  assert server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] == bare != ids
  tokens = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
  assert tokens == chat_prompt(llm, MESSAGES)["prompt_token_ids"]
  assert server.post("/detokenize", {"tokens": bare}).json() == {"prompt": text}
  names = server.post("/tokenize", {"prompt": "the cat", "return_token_strs": True}).json()["token_strs"]
  assert names == ["<s>", "\u2581the", "\u2581", "c", "at"]


def test_openapi_schema_has_every_route_and_field(server):
  schema, expected = server.get("/openapi.json").json(), CASES["openapi"]
  assert {*expected["paths"]} <= {*schema["paths"]}
  for name in [*(f.name for f in dataclasses.fields(SamplingParams)), *expected["fields"]]:
    assert f'"{name}"' in json.dumps(schema), name


# Errors

@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b"null", b'"a"', b'{"prompt": NaN}', b"\xff\xfe", b"[" * 3000,
                                     b'{"prompt": "a", "model": 1, "seed": 1' + b"0" * 3000 + b"}"],
                         ids=lambda x: repr(x[:12]))
def test_body_other_than_json_object_is_400(server, path, content):
  error_of(server.post(path, content=content, headers={"Content-Type": "application/json"}), 400)


def test_non_json_body_or_content_type_error_names_the_cause(server):
  def message_for(content, kind): return error_of(server.post("/v1/completions", content=content, headers={
    "Content-Type": kind} if kind else {}), 400)["message"]
  assert "JSON" in message_for(b'{"prompt": ', "application/json")
  for kind in ("text/plain", "application/x-www-form-urlencoded"):   # curl -d sends the second by default
    assert "Content-Type: application/json" in message_for(b'{"prompt": "a"}', kind)
    assert kind in message_for(b'{"prompt": "a"}', kind)
  assert "no Content-Type: send the header Content-Type: application/json" in message_for(b'{"prompt": "a"}', None)


def test_too_long_prompt_is_400_and_runs_nothing(server, folder):
  before, client = server.metrics(), server.client()
  message = r"This model's maximum context length is 128 tokens\. However, "
  with pytest.raises(openai.BadRequestError, match=message) as e:
    client.completions.create(model=folder.name, prompt=[[5] * 3, [5] * 128])
  assert e.value.status_code == e.value.body["code"] == 400 and e.value.type == "BadRequestError"
  after = server.metrics()
  assert after["generation_tokens_total"] == before["generation_tokens_total"] and not after["num_requests_waiting"]
  assert client.completions.create(model=folder.name, prompt=[5] * 127).usage.completion_tokens == 1


@pytest.mark.parametrize("path,prompt,name", CASES["output limits"][:3])
def test_output_beyond_the_context_is_400_as_in_vllm(server, path, prompt, name):
  """Without a limit, the text ends with the context."""
  def ask(**fields): return server.post(f"/v1/{path}", {**prompt, "ignore_eos": True, "temperature": 0, **fields})
  usage = ask().json()["usage"]
  rest = 128 - usage["prompt_tokens"]
  assert usage["total_tokens"] == ask(**{name: rest}).json()["usage"]["total_tokens"] == 128
  message = error_of(ask(**{name: rest + 1}), 400)["message"]
  assert message.startswith("This model's maximum context length is 128 tokens. However, you requested ")
  assert message.endswith(f"request at most {rest}")


@pytest.mark.parametrize("path,field,part,count,message", CASES["sizes"])
def test_field_of_hostile_size_is_400_and_names_its_limit(server, path, field, part, count, message):
  """A long prompt is refused without encoding it."""
  value, (name, *inner) = part * count, field.split(".")
  if name == "messages": value = [{"role": "user", "content": value}]
  if name == "logit_bias": value = dict.fromkeys(map(str, range(count)), 1)
  body = ({} if "chat" in path else {"prompt": "the cat"}) | {name: {inner[0]: value} if inner else value}
  assert message in error_of(server.post(path, body), 400)["message"]


# CORS

def preflight(server, origin):
  return server.request("OPTIONS", "/v1/completions", headers={
    "Origin": origin, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type"})


def test_cors_allows_only_the_allowed_origins(server, limited):
  name, body, page = "access-control-allow-origin", {"prompt": "a", "max_tokens": 1}, "http://page.example"
  assert name not in preflight(server, page).headers
  assert name not in server.post("/v1/completions", body, headers={"Origin": page}).headers
  for origin, is_allowed in {page: True, "http://b.example": True, "http://other.example": False}.items():
    response = preflight(limited, origin)
    assert response.headers.get(name) == (origin if is_allowed else None)
    assert response.status_code == 200 or not is_allowed, "browsers send preflights without the key"
    for key in (KEY, {}):   # pages must be able to read errors, too
      response = limited.post("/v1/completions", body, headers={"Origin": origin, **key})
      assert response.status_code == (200 if key else 401) and (name in response.headers) == is_allowed
  allowed = preflight(limited, page).headers["access-control-allow-headers"].lower()
  assert {x.strip() for x in allowed.split(",")} >= {"authorization", "content-type"}


# Completions and chats over HTTP equal LLM.generate with the same model, prompt and fields. `answer` checks that the
# chunks of a stream add up to each response

@pytest.mark.parametrize("path,kind,prefix", CASES["responses"])
def test_response_has_the_fields_of_openai_and_vllm(server, folder, llm, path, kind, prefix):
  is_chat = path == CHATS
  output = expected_output(llm, chat_prompt(llm, MESSAGES) if is_chat else "the cat", **GREEDY)
  text, num_prompt = output.outputs[0].text, len(output.prompt_token_ids)
  nothing = dict.fromkeys(PROMPT_FIELDS)   # in the response of a chat, in each choice of others
  choice = {"index": 0, "finish_reason": "length", **dict.fromkeys(("stop_reason", "token_ids", "logprobs")),
            **({"message": {"role": "assistant", "content": text}} if is_chat else {"text": text, **nothing})}
  body = answer(server, path, {**({"messages": MESSAGES} if is_chat else {"prompt": "the cat"}), **GREEDY})
  assert body == {"id": ANY, "object": kind, "created": ANY, "model": folder.name, "choices": [choice], "usage": {
    "prompt_tokens": num_prompt, "completion_tokens": 8, "total_tokens": num_prompt + 8, "prompt_tokens_details": ANY},
    **(nothing if is_chat else {}), **({"text": [text]} if path == "/generate" else {})}
  assert body["id"].startswith(prefix) and abs(body["created"] - time.time()) < 600


@pytest.mark.parametrize("form", ["str", "[str]", "[int]", "[[int]]"])
@pytest.mark.parametrize("n", [1, 3])
def test_completions_of_every_prompt_form_equal_generate(server, llm, form, n):
  texts = ["the cat sat", "hello world"]
  ids = [llm.tokenizer.encode(x) for x in texts]
  prompt, num = {"str": (texts[0], 1), "[str]": (texts, 2), "[int]": (ids[0], 1), "[[int]]": (ids, 2)}[form]
  fields = {"seed": 7, "n": n, "max_tokens": 6, "ignore_eos": True}
  body = answer(server, COMPLETIONS, {"prompt": prompt, **fields})
  assert rows_of(body) == expected_rows(llm, texts[:num], **fields)
  assert len({text for _, text, *_ in rows_of(body)}) == n * num, "samples of a prompt must differ"
  usage = {"prompt_tokens": sum(map(len, ids[:num])), "completion_tokens": 6 * n * num}
  assert body["usage"] == {**usage, "total_tokens": sum(usage.values()), "prompt_tokens_details": ANY}


@pytest.mark.parametrize("limit", [{}, {"max_tokens": -1}], ids=str)
@pytest.mark.parametrize("path,body", [(COMPLETIONS, {"prompt": "a"}), ("/generate", {"prompt": "a"}),
                                       (CHATS, {"messages": MESSAGES})])
def test_request_without_limit_fills_the_context(server, path, body, limit):
  body = answer(server, path, {"temperature": 0, "ignore_eos": True, **body, **limit})
  assert body["usage"]["total_tokens"] == 128 and body["choices"][0]["finish_reason"] == "length"


def random_body(rng, llm):
  """Return a path and a body with random fields."""
  words = ["the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "a", "red", "house"]
  texts = [" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(2)]
  body = {"seed": rng.randrange(2**31), "max_tokens": rng.randint(1, 16), "temperature": rng.choice([0, 0.7, 1.5])}
  options = {"n": rng.randint(2, 3), "top_p": 0.8, "top_k": 5, "min_p": 0.05, "stop": rng.choices("aeths", k=2),
             "include_stop_str_in_output": True, "ignore_eos": True, "stop_token_ids": [rng.randrange(259, 320)],
             "skip_special_tokens": False, "logit_bias": {"198": 5, "172": 7, "233": 3}}   # bytes of letters
  body |= {k: v for k, v in options.items() if rng.random() < 0.25}
  if rng.random() < 0.4: return CHATS, body | {"messages": [{"role": "user", "content": texts[0]}]}
  ids = [llm.tokenizer.encode(x) for x in texts]
  if rng.random() < 0.2: body["echo"] = True
  return rng.choice([COMPLETIONS, "/generate"]), body | {"prompt": rng.choice([texts[0], texts, ids[0], ids])}


def test_streams_of_100_random_concurrent_requests_equal_complete_responses(server, llm):
  def ask(seed): return rows_of(answer(server, *random_body(random.Random(seed), llm)))
  with ThreadPoolExecutor(32) as pool: rows = [row for rows in pool.map(ask, range(100)) for row in rows]
  texts, reasons = {text for _, text, *_ in rows}, {tuple(reasons) for _, _, *reasons in rows}
  assert len(texts) > 100 and len(reasons) > 5 and any("\xe9" in text for text in texts), "outputs must vary"


# Log probabilities

def near(x): return pytest.approx(x, abs=1e-4)


@pytest.mark.parametrize("echo", [None, "text", "ids"])
@pytest.mark.parametrize("k", [None, 0, 3])
def test_completion_text_and_logprobs_equal_generate(server, llm, k, echo):
  """As in vLLM, echo shows all tokens of a prompt of ids."""
  fields = {"seed": 2, "max_tokens": 6, "logprobs": k, "temperature": 1.0}
  output = expected_output(llm, "the cat sat", **fields, prompt_logprobs=k)
  body = {"prompt": output.prompt_token_ids if echo == "ids" else "the cat sat", "echo": bool(echo), **fields}
  choice, = answer(server, COMPLETIONS, body)["choices"]
  text, logprobs = choice["text"], choice["logprobs"]
  assert text == {None: "", "text": "the cat sat", "ids": "<s>the cat sat"}[echo] + output.outputs[0].text
  if k is None:
    assert logprobs is None
    return
  entries = [*(output.prompt_logprobs if echo else []), *output.outputs[0].logprobs]
  tokens = [*(output.prompt_token_ids if echo else []), *output.outputs[0].token_ids]
  named = answer(server, COMPLETIONS, {**body, "return_tokens_as_token_ids": True})["choices"][0]["logprobs"]
  offsets = logprobs["text_offset"]
  assert named == {
    "tokens": [f"token_id:{i}" for i in tokens], "text_offset": offsets,
    "token_logprobs": [x and near(x[i].logprob) for i, x in zip(tokens, entries, strict=True)],
    "top_logprobs": [x and {f"token_id:{i}": near(y.logprob) for i, y in x.items()} for x in entries]}
  names = [x and {y.decoded_token.strip() for y in x.values()} for x in entries]
  assert [x and {name.strip() for name in x} for x in logprobs["top_logprobs"]] == names
  assert all(x is None or token in x for token, x in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
  assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] < len(text)
  for token, a, b in zip(logprobs["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
    assert text[a:b].strip() == ("" if echo == "text" and token == "<s>" else token.strip())


@pytest.mark.parametrize("fields,k", [
  (GREEDY, 0), (GREEDY, 3), ({"seed": 4, "max_tokens": 12, "temperature": 3.0}, 2)], ids=["0", "3", "other token"])
def test_chat_logprobs_equal_llm_chat(server, llm, fields, k):
  output = llm.chat(MESSAGES, SamplingParams(**fields, logprobs=k))[0].outputs[0]
  assert fields == GREEDY or any(next(iter(x.values())).rank > k for x in output.logprobs), "a token of lower rank"
  body = {"messages": MESSAGES, **fields, "logprobs": True, "top_logprobs": k}
  content, named = [answer(server, CHATS, {**body, "return_tokens_as_token_ids": x})["choices"][0]["logprobs"]
                    for x in (False, True)]
  rows = [*zip(output.token_ids, output.logprobs, strict=True)]
  def best(x): return sorted(x, key=lambda j: x[j].rank)[:k]
  def entry(i, x): return {"token": f"token_id:{i}", "logprob": near(x[i].logprob), "bytes": ANY}
  assert named == {"content": [{**entry(i, x), "top_logprobs": [entry(j, x) for j in best(x)]} for i, x in rows]}
  for token, (i, x) in zip(content["content"], rows, strict=True):
    names = [x[j].decoded_token.strip() for j in (i, *best(x))]
    assert [y["token"].strip() for y in (token, *token["top_logprobs"])] == names
  joined = b"".join(bytes(token["bytes"]) for token in content["content"])
  assert joined.decode(errors="replace") == output.text, "clients join the bytes of characters in several tokens"


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_text_offsets_of_stream_equal_whole_response(server, size, echo):
  """A stop string that begins like the output holds text back: the text of a stream then lags behind its tokens."""
  body = {"prompt": "hello, my name is", "temperature": 0, "max_tokens": 12}
  text = answer(server, COMPLETIONS, body)["choices"][0]["text"]
  stop = [text[i:i + size] + "#" for i in range(len(text) - size)][:16]
  choice, = answer(server, COMPLETIONS, {**body, "logprobs": 0, "stop": stop, "echo": echo})["choices"]
  assert choice["text"].endswith(text) and len(choice["logprobs"]["text_offset"]) >= 12


# Usage

def test_usage_counts_prefix_cache_hits_except_with_prompt_logprobs(server):
  def cached(**fields):
    prompt = "one two three four five six seven eight nine"
    usage = server.post(COMPLETIONS, {"prompt": prompt, "max_tokens": 2, **fields}).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], (usage["prompt_tokens"] - 1) // 4 * 4
  (first, most), second, with_logprobs = cached(), cached(), cached(prompt_logprobs=1)
  assert first < most >= 8 and second == (most, most) and with_logprobs[0] == 0
