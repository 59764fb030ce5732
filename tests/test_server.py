"""`tinyvllm serve`, a process of its own, asked by the openai package and by hand. What it should answer is what
LLM.generate gives in this process for the same model, prompt and fields."""
import contextlib
import dataclasses
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import jsonschema
import openai
import pytest
from reference import ENGINE, tiny_model
from server import Server, events, wait_until

import tinyvllm
from tinyvllm import LLM, SamplingParams
from tinyvllm_extra.cli import main

SMALL = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4}   # few graphs
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
GREEDY = {"temperature": 0.0, "max_tokens": 8}
ENDLESS = {"temperature": 0.0, "max_tokens": 30000, "ignore_eos": True, "prompt": "the cat"}   # for a minute
TYPES = {400: "BadRequestError", 401: "UnauthorizedError", 404: "NotFoundError", 405: "MethodNotAllowedError",
         413: "RequestEntityTooLargeError", 429: "TooManyRequestsError", 500: "InternalServerError",
         501: "NotImplementedError", 503: "ServiceUnavailableError"}
KEY = {"Authorization": "Bearer secret"}
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0,
                                                                                    "maximum": 99}},
          "required": ["name", "age"], "additionalProperties": False}
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "you"}, {"role": "user", "content": "the cat"}]


def flags(**options): return [x for k, v in options.items() for x in ("--" + k.replace("_", "-"), str(v))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model of words with a chat template that shows all messages."""
  folder = tiny_model(tmp_path_factory.mktemp("served"), words=True)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
  return folder


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory):
  """One that can go on for a minute."""
  folder = tiny_model(tmp_path_factory.mktemp("long"), words=True, max_position_embeddings=32768)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
  return folder


@pytest.fixture(scope="module")
def twin(folder):
  """What the server should be, in this process."""
  return LLM(folder, **SMALL)


def ended_well(server):
  """The server, and at the module's end what a SIGTERM to an idle one gives."""
  with server:
    yield server
    # A client that left with the last test is seen to have gone within a step
    wait_until(lambda: server.metrics()["num_requests_running"] == server.metrics()["kv_cache_usage_perc"] == 0,
               "no request runs, and no block is held", 20)
    assert server.stop() == 0, server.log
    assert "Traceback" not in server.log, server.log


@pytest.fixture(scope="module")
def server(folder): yield from ended_well(Server(folder, *flags(**SMALL)))


@pytest.fixture(scope="module")
def shipped(): yield from ended_well(Server())


@pytest.fixture(scope="module")
def guarded(long_folder):
  """One request at a time, two in the queue, a key, a small body, one page that may ask; a name of its own."""
  options = flags(dtype="float32", max_num_seqs=1, max_num_batched_tokens=4, scheduling_policy="priority", max_queue=2,
                  api_key="secret", max_body_size=4096, allowed_origins="http://page.example", served_model_name="mine")
  yield from ended_well(Server(long_folder, *options))


@pytest.fixture
def client(server): return server.client()


@contextlib.contextmanager
def endless(server, **fields):
  """A request that runs meanwhile, whose first event has come."""
  with server.stream("/v1/completions", {**ENDLESS, **fields}, headers=KEY) as response:
    lines = response.iter_lines()
    next(lines)
    yield lines


def post(server, path, body=None, **options): return server.post(path, body, **options)


def stream(server, path, body, **options):
  """The events of a streamed answer, once it has ended."""
  with server.stream(path, body, **options) as response:
    assert response.status_code == 200 and response.headers["content-type"].split(";")[0] == "text/event-stream"
    return list(events(response.iter_lines()))


def error_of(response, status):
  """The error object of an answer, whose shape is checked."""
  assert response.status_code == status, response.text
  assert response.headers["content-type"] == "application/json"
  body = response.json()
  assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
  error = body["error"]
  assert error["code"] == status and error["type"] == TYPES[status] and error["message"], error
  assert "Traceback" not in error["message"]
  return error


def of_chat(twin, messages):
  """A conversation as the prompt that it is to the model."""
  return {"prompt_token_ids": twin.chat(messages, SamplingParams(max_tokens=1))[0].prompt_token_ids}


def expected(twin, prompt, **fields):
  """LLM's own answer to one prompt."""
  return twin.generate(prompt, SamplingParams(**fields), use_tqdm=False)[0]


def story(choices):
  """Index, text, and why it ended, of the choices of either kind, or of LLM's outputs."""
  text = [c.text if hasattr(c, "text") else c.message.content for c in choices]
  return [(i, c.index, t, c.finish_reason, c.stop_reason) for i, (c, t) in enumerate(zip(choices, text, strict=True))]


def ids_of(twin, text): return twin.tokenizer.encode(text)


# Completions

@pytest.mark.parametrize("form", ["str", "[str]", "[int]", "[[int]]"])
@pytest.mark.parametrize("n", [1, 3])
def test_every_form_of_prompt_is_completed_as_by_generate(client, folder, twin, form, n):
  texts = ["the cat sat", "hello world"]
  ids = [ids_of(twin, x) for x in texts]
  prompt = {"str": texts[0], "[str]": texts, "[int]": ids[0], "[[int]]": ids}[form]
  fields = {"seed": 7, "n": n, "max_tokens": 6}
  answer = client.completions.create(model=folder.name, prompt=prompt, **fields)
  outputs = [expected(twin, x, **fields) for x in (texts if form in ("[str]", "[[int]]") else texts[:1])]
  assert [c.index for c in answer.choices] == [*range(n * len(outputs))]
  assert [x[2:] for x in story(answer.choices)] == [x[2:] for o in outputs for x in story(o.outputs)]
  assert len({c.text for c in answer.choices}) == n * len(outputs), "samples of a prompt differ"
  prompts = sum(len(o.prompt_token_ids) for o in outputs)
  made = sum(len(c.token_ids) for o in outputs for c in o.outputs)
  usage = answer.usage
  assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompts, made, prompts + made)
  assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == folder.name
  assert abs(answer.created - time.time()) < 600 and all(c.logprobs is None for c in answer.choices)


def test_each_answer_has_an_id_of_its_own(client, folder):
  assert len({client.completions.create(model=folder.name, prompt="a", max_tokens=1).id for _ in range(3)}) == 3


def test_what_is_not_given_is_the_default_of_sampling_params(server, twin):
  answer = post(server, "/v1/completions", {"prompt": "the cat", "seed": 1}).json()
  output = expected(twin, "the cat", seed=1)
  assert answer["choices"][0]["text"] == output.outputs[0].text and answer["choices"][0]["finish_reason"] == "length"
  assert answer["usage"]["completion_tokens"] == len(output.outputs[0].token_ids)
  nulls = {f.name: None for f in dataclasses.fields(SamplingParams)} | {
    k: None for k in ("model", "stream", "stream_options", "priority", "user", "echo", "response_format")}
  again = post(server, "/v1/completions", {**nulls, "prompt": "the cat", "seed": 1}).json()
  assert again["choices"] == answer["choices"]


@pytest.mark.parametrize("ids", [False, True])
def test_echo_gives_the_prompt_before_the_text(client, server, folder, twin, ids):
  prompt, output = "the cat sat", expected(twin, "the cat sat", **GREEDY).outputs[0]
  body = {"prompt": ids_of(twin, prompt) if ids else prompt, "echo": True, **GREEDY}
  answer = client.completions.create(model=folder.name, **body)
  assert answer.choices[0].text == prompt + output.text and answer.usage.completion_tokens == 8
  found = stream(server, "/v1/completions", body)
  assert "".join(e["choices"][0]["text"] for e in found[:-1]) == prompt + output.text


def test_a_stop_string_ends_the_text_and_is_named(client, folder, twin):
  text = expected(twin, "the cat", temperature=0.0, max_tokens=20).outputs[0].text
  stop = text[4:6]
  for given in (stop, ["#", stop]):
    choice = client.completions.create(model=folder.name, prompt="the cat", temperature=0, max_tokens=20,
                                       stop=given).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[:text.index(stop)], "stop", stop)


def test_a_stop_id_ends_the_text_and_is_named(client, folder, twin):
  token = expected(twin, "the cat", **GREEDY).outputs[0].token_ids[3]
  body = {"stop_token_ids": [token]}
  choice = client.completions.create(model=folder.name, prompt="the cat", temperature=0, max_tokens=8,
                                     extra_body=body).choices[0]
  assert choice.finish_reason == "stop" and choice.stop_reason == token
  assert choice.text == expected(twin, "the cat", **GREEDY, **body).outputs[0].text


# Chat

def test_chat_answers_through_the_template(client, folder, twin):
  output = twin.chat(MESSAGES, SamplingParams(**GREEDY, n=1))[0]
  parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
  for messages in (MESSAGES, parts):
    answer = client.chat.completions.create(model=folder.name, messages=messages, temperature=0,
                                            max_completion_tokens=8)
    assert story(answer.choices) == story([output.outputs[0]])[:1] and answer.choices[0].message.role == "assistant"
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == folder.name
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids) and answer.usage.completion_tokens == 8
    assert answer.choices[0].logprobs is None


def test_chat_goes_on_to_the_context_length_and_max_tokens_is_its_old_name(client, folder, twin):
  message = [{"role": "user", "content": "hello"}]
  answer = client.chat.completions.create(model=folder.name, messages=message, temperature=0)
  assert answer.usage.total_tokens == 128 and answer.choices[0].finish_reason == "length"
  assert client.chat.completions.create(model=folder.name, messages=message, max_tokens=3).usage.completion_tokens == 3


def test_chat_gives_n_choices(client, folder, twin):
  output = twin.chat(MESSAGES, SamplingParams(seed=5, max_tokens=6, n=3))[0]
  answer = client.chat.completions.create(model=folder.name, messages=MESSAGES, seed=5, max_tokens=6, n=3)
  assert story(answer.choices) == story(output.outputs) and len({c.message.content for c in answer.choices}) == 3
  assert answer.usage.prompt_tokens == len(output.prompt_token_ids), "counted once"


# Streams

def test_a_stream_of_completions_has_the_shape_that_clients_expect(server, folder, twin):
  body = {"prompt": ["the cat", "hello"], "n": 2, "seed": 3, "max_tokens": 5, "stream_options": {"include_usage": True}}
  *found, usage, done = stream(server, "/v1/completions", body)
  outputs = [expected(twin, x, n=2, seed=3, max_tokens=5) for x in body["prompt"]]
  choices = [c for o in outputs for c in o.outputs]
  assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 20
  assert usage["usage"]["prompt_tokens"] == sum(len(o.prompt_token_ids) for o in outputs)
  assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 20
  assert {(e["id"], e["object"], e["model"], e["created"]) for e in [*found, usage]} == {
    (found[0]["id"], "text_completion", folder.name, found[0]["created"])} and found[0]["id"].startswith("cmpl-")
  for e in found: assert len(e["choices"]) == 1 and e["usage"] is None
  for i, c in enumerate(choices):
    own = [e["choices"][0] for e in found if e["choices"][0]["index"] == i]
    assert "".join(x["text"] for x in own) == c.text and len(own) <= len(c.token_ids), "at most one event a token"
    assert [x["finish_reason"] for x in own] == [None] * (len(own) - 1) + ["length"]


def test_a_stream_of_chat_begins_with_the_role(server, folder, twin):
  output = twin.chat(MESSAGES, SamplingParams(seed=3, max_tokens=5, n=2))[0]
  *found, done = stream(server, "/v1/chat/completions", {"messages": MESSAGES, "n": 2, "seed": 3, "max_tokens": 5})
  assert done == "[DONE]"
  assert {(e["id"], e["object"], e["model"]) for e in found} == {(found[0]["id"], "chat.completion.chunk", folder.name)}
  assert found[0]["id"].startswith("chatcmpl-")
  for e in found: assert len(e["choices"]) == 1 and e.get("usage") is None
  for i, c in enumerate(output.outputs):
    first, *own = [e["choices"][0] for e in found if e["choices"][0]["index"] == i]
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    assert all("role" not in x["delta"] or x["delta"]["role"] is None for x in own)
    assert "".join(x["delta"].get("content") or "" for x in own) == c.text and len(own) <= len(c.token_ids)
    assert [x["finish_reason"] for x in own] == [None] * (len(own) - 1) + ["length"]


def test_events_are_exact_bytes(server):
  with server.stream("/v1/completions", {"prompt": "the cat", **GREEDY, "max_tokens": 2}) as response:
    raw = response.read()
  *parts, rest = raw.split(b"\n\n")
  assert rest == b"" and parts[-1] == b"data: [DONE]" and b"\r" not in raw
  for part in parts[:-1]: assert part.startswith(b"data: {") and b"\n" not in part and json.loads(part[6:])


def test_the_openai_client_reads_both_kinds_of_stream(client, folder, twin):
  usage = {"stream_options": {"include_usage": True}, "stream": True}
  chunks = list(client.completions.create(model=folder.name, prompt="the cat", temperature=0, max_tokens=8, **usage))
  output = expected(twin, "the cat", **GREEDY).outputs[0]
  assert "".join(c.choices[0].text for c in chunks[:-1]) == output.text
  assert chunks[-1].usage.completion_tokens == 8 and not chunks[-1].choices
  chunks = list(client.chat.completions.create(model=folder.name, messages=MESSAGES, temperature=0, max_tokens=8,
                                               **usage))
  assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == twin.chat(
    MESSAGES, SamplingParams(**GREEDY))[0].outputs[0].text
  assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens == 8


def test_the_first_event_is_read_while_later_tokens_do_not_exist(guarded, tell):
  client, times, before = guarded.client(api_key="secret"), [], guarded.metrics()["generation_tokens_total"]
  fields = {**ENDLESS, "extra_body": {"ignore_eos": True}}
  del fields["ignore_eos"]
  with client.completions.create(model="mine", stream=True, **fields) as found:
    for n, _ in enumerate(found):
      times.append(time.perf_counter())
      if n == 0: first = guarded.metrics()
      if n == 200: break
    last = guarded.metrics()
  assert first["num_requests_running"] == 1 and first["generation_tokens_total"] - before < 30000
  assert last["num_requests_running"] == 1 and last["generation_tokens_total"] > first["generation_tokens_total"]
  gaps = sorted(1e3 * (b - a) for a, b in zip(times, times[1:], strict=False))
  tell(f"gaps between events: median {gaps[100]:.2f} ms, 99% {gaps[197]:.2f} ms, most {gaps[-1]:.2f} ms")
  wait_until(lambda: guarded.metrics()["num_requests_running"] == 0, "who leaves the stream ends the request")


def random_body(rng, twin):
  """A request of either kind with random fields, and its path."""
  words = ["the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "a", "red", "house"]
  texts = [" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(2)]
  body = {"seed": rng.randrange(2**31), "max_tokens": rng.randint(1, 16), "temperature": rng.choice([0, 0.7, 1.5])}
  options = {"n": rng.randint(2, 3), "top_p": 0.8, "top_k": 5, "min_p": 0.05, "stop": rng.choices("aeths", k=2),
             "include_stop_str_in_output": True, "ignore_eos": True, "stop_token_ids": [rng.randrange(259, 320)],
             "skip_special_tokens": False, "logit_bias": {"198": 5, "172": 7, "233": 3}}   # bytes of letters
  body |= {k: v for k, v in options.items() if rng.random() < 0.25}
  if rng.random() < 0.4: return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": texts[0]}]}
  ids = [ids_of(twin, x) for x in texts]
  if rng.random() < 0.2: body["echo"] = True
  return rng.choice(["/v1/completions", "/generate"]), body | {"prompt": rng.choice([texts[0], texts, ids[0], ids])}


@pytest.mark.slow
def test_streamed_text_is_the_text_for_a_hundred_random_requests_32_at_a_time(server, twin):
  def both(seed):
    path, body = random_body(random.Random(seed), twin)
    whole, found = post(server, path, body).json(), stream(server, path, body)
    assert found[-1] == "[DONE]", (body, found)
    whole = {c["index"]: (c.get("text", c.get("message", {}).get("content")), c["finish_reason"], c["stop_reason"])
             for c in whole["choices"]}
    streamed = dict.fromkeys(whole, ("", None, None))
    for e in found[:-1]:
      c, = e["choices"]
      text, reason, stop = streamed[c["index"]]
      assert reason is None, "nothing comes after the finish_reason"
      text += c["text"] if "text" in c else c["delta"].get("content") or ""
      streamed[c["index"]] = text, c["finish_reason"], c.get("stop_reason")
    assert streamed == whole, (path, body)
    return sorted(whole.items())
  with ThreadPoolExecutor(32) as pool: answers = list(pool.map(both, range(100)))
  texts = [text for answer in answers for _, (text, *_) in answer]
  reasons = {c[1:] for answer in answers for _, c in answer}
  assert len({*texts}) > 100 and len(reasons) > 5 and any("\xe9" in t for t in texts), "they were meant to vary"


# Log probabilities

def check_logprobs(found, of_tokens, k):
  """A completion's logprobs against LLM's: for each token a dict of Logprobs, or None."""
  assert set(found) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
  assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(of_tokens)
  for token, own, best, wanted in zip(*(found[x] for x in ("tokens", "token_logprobs", "top_logprobs")), of_tokens,
                                      strict=True):
    if wanted is None:
      assert own is None and best is None
      continue
    mine = next(iter(wanted.values()))
    assert own == pytest.approx(mine.logprob, abs=1e-4) and token.strip() == mine.decoded_token.strip()
    for text, logprob in best.items():   # two tokens may have the same text
      assert logprob in [pytest.approx(x.logprob, abs=1e-4) for x in wanted.values() if x.decoded_token == text.strip()]
    assert token in best and 1 <= len(best) <= k + 1 and len(best) >= len({x.decoded_token for x in wanted.values()})


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_of_completions_are_those_of_generate(server, twin, k, streamed):
  fields = {"prompt": "the cat", "seed": 2, "max_tokens": 6, "logprobs": k, "temperature": 1.0}
  output = expected(twin, **fields).outputs[0]
  if streamed:
    parts = [e["choices"][0]["logprobs"] for e in stream(server, "/v1/completions", fields)[:-1]]
    found = {key: [x for part in parts if part for x in part[key]] for key in parts[0]}
  else: found = post(server, "/v1/completions", fields).json()["choices"][0]["logprobs"]
  check_logprobs(found, output.logprobs, k)
  offsets = found["text_offset"]
  assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] < len(output.text)
  for token, a, b in zip(found["tokens"], offsets, [*offsets[1:], len(output.text)], strict=True):
    assert output.text[a:b].strip() == token.strip(), "where the token's text is"


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_with_log_probabilities_gives_the_prompts_too(server, twin, streamed):
  fields = {"prompt": "the cat sat", "temperature": 0.0, "max_tokens": 4, "logprobs": 2}
  output = expected(twin, **fields, prompt_logprobs=2)
  if streamed:
    parts = [e["choices"][0]["logprobs"] for e in stream(server, "/v1/completions", {**fields, "echo": True})[:-1]]
    found = {key: [x for part in parts if part for x in part[key]] for key in parts[0]}
  else: found = post(server, "/v1/completions", {**fields, "echo": True}).json()["choices"][0]["logprobs"]
  assert len(found["tokens"]) == len(output.prompt_token_ids) + 4 and output.prompt_logprobs[0] is None
  check_logprobs(found, [*output.prompt_logprobs, *output.outputs[0].logprobs], 2)
  assert found["text_offset"] == sorted(found["text_offset"])


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_of_chat_are_those_of_generate(client, folder, twin, k, streamed):
  output = twin.chat(MESSAGES, SamplingParams(**GREEDY, logprobs=k))[0].outputs[0]
  options = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": k}
  if streamed:
    chunks = client.chat.completions.create(model=folder.name, stream=True, **options)
    content = [x for c in chunks if c.choices[0].logprobs for x in c.choices[0].logprobs.content]
  else: content = client.chat.completions.create(model=folder.name, **options).choices[0].logprobs.content
  assert len(content) == len(output.logprobs) == 8
  for found, wanted in zip(content, output.logprobs, strict=True):
    own, *_ = best = list(wanted.values())
    assert found.token.strip() == own.decoded_token.strip() and found.logprob == pytest.approx(own.logprob, abs=1e-4)
    assert bytes(found.bytes).decode() == found.token
    assert [x.token.strip() for x in found.top_logprobs] == [x.decoded_token.strip() for x in best[:k]]
    assert [x.logprob for x in found.top_logprobs] == pytest.approx([x.logprob for x in best[:k]], abs=1e-4)
    assert all(bytes(x.bytes).decode() == x.token for x in found.top_logprobs)


def test_a_drawn_token_is_beside_the_best_ones_of_chat(server, twin):
  fields = {"seed": 4, "max_tokens": 12, "temperature": 3.0}
  output = twin.chat(MESSAGES, SamplingParams(**fields, logprobs=2))[0].outputs[0]
  body = {"messages": MESSAGES, **fields, "logprobs": True, "top_logprobs": 2}
  content = post(server, "/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
  assert any(next(iter(x.values())).rank > 2 for x in output.logprobs), "those were meant to be drawn"
  for found, wanted in zip(content, output.logprobs, strict=True):
    own, best = next(iter(wanted.values())), sorted(wanted.values(), key=lambda x: -x.logprob)[:2]
    assert found["logprob"] == pytest.approx(own.logprob, abs=1e-4)
    assert [x["logprob"] for x in found["top_logprobs"]] == pytest.approx([x.logprob for x in best], abs=1e-4)


# Usage

@pytest.mark.parametrize("streamed", [False, True])
def test_usage_tells_what_the_prefix_cache_had(server, streamed):
  prompt = f"one two three four five six {'seven' if streamed else 'eight'} nine"
  body = {"prompt": prompt, "max_tokens": 2}

  def usage():
    if not streamed: return post(server, "/v1/completions", body).json()["usage"]
    return stream(server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})[-2]["usage"]
  first, second = usage(), usage()
  assert second["prompt_tokens_details"]["cached_tokens"] == (second["prompt_tokens"] - 1) // 4 * 4 >= 8
  assert first["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens_details"]["cached_tokens"]


# Metrics

def rises(server, ask):
  """How much each number of the metrics has risen by what `ask` asked."""
  before = server.metrics()
  ask()
  return {name: value - before.get(name, 0) for name, value in server.metrics().items()}


@pytest.mark.parametrize("streamed", [False, True])
def test_each_text_counts_by_its_end_and_each_prompts_times_once(server, streamed):
  body = {"prompt": ["the cat", "hello"], "n": 3, "max_tokens": 4, "ignore_eos": True, "seed": 1}
  found = rises(server, lambda: (stream if streamed else post)(server, "/v1/completions", body))
  assert found["request_success_total{finished_reason=length}"] == 6
  times = [f"{name}_seconds" for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time",
                                          "request_prefill_time", "request_decode_time")]
  for name in (*times, "request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"):
    assert found[f"{name}_count"] == 2, name
  latency, waited, prefill, decode = [found[f"{name}_sum"] for name in times[1:]]
  assert min(waited, prefill, decode) > 0 and latency == pytest.approx(waited + prefill + decode)
  assert found["generation_tokens_total"] == found["request_generation_tokens_sum"] == 24
  assert found["prompt_tokens_total"] == found["request_prompt_tokens_sum"] > 0
  assert found["request_params_max_tokens_sum"] == 8


def test_each_metric_says_what_it_is(server):
  said = dict(re.findall(r"^# HELP tinyvllm:(\w+) (.*)$", server.get("/metrics").text, re.M))
  assert said["request_decode_time_seconds"].startswith("Seconds from the first token") and len(said) > 15
  for name, text in said.items(): assert " " in text and name not in text, name


# Formats

@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_response_format_json_object_gives_an_object(server, twin, path):
  closing = next(i for i in range(320) if twin.tokenizer.decode([i], False) == "}")
  start = {"prompt": "the cat"} if path == "/v1/completions" else {"messages": MESSAGES}
  for seed in range(3):
    body = {**start, "response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 40,
            "logit_bias": {str(closing): 8}}
    choice = post(server, path, body).json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert choice["finish_reason"] == "stop" and isinstance(json.loads(text), dict)


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
def test_response_format_json_schema_is_kept_by_the_shipped_model(shipped, streamed):
  client, texts = shipped.client(), set()
  given = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
  spaces = {str(i): -100 for i in spaces_of(LLM().tokenizer)}   # JSON may have any number of them
  for seed in range(4):
    options = {"model": "tinyvllm", "messages": [{"role": "user", "content": "Who are you?"}], "response_format": given,
               "seed": seed, "max_completion_tokens": 100, "logit_bias": spaces}
    if streamed:
      chunks = list(client.chat.completions.create(**options, stream=True))
      text = "".join(c.choices[0].delta.content or "" for c in chunks)
      reason = chunks[-1].choices[0].finish_reason
    else:
      choice = client.chat.completions.create(**options).choices[0]
      text, reason = choice.message.content, choice.finish_reason
    jsonschema.validate(json.loads(text), SCHEMA)
    assert reason == "stop"
    texts.add(text)
  answer = client.completions.create(model="tinyvllm", prompt="Ann is", max_tokens=100, seed=1, logit_bias=spaces,
                                     extra_body={"response_format": given})
  jsonschema.validate(json.loads(answer.choices[0].text), SCHEMA)
  assert len(texts) > 1


def spaces_of(tokenizer):
  texts = {i: tokenizer.decode([0, i], False) for i in range(3, 768)}
  return [i for i, text in texts.items() if not text.replace("<unk>", "").strip()]


def test_response_format_text_is_plain_text(server, twin):
  body = {"prompt": "the cat", **GREEDY, "response_format": {"type": "text"}}
  assert post(server, "/v1/completions", body).json()["choices"][0]["text"] == expected(
    twin, "the cat", **GREEDY).outputs[0].text


# vLLM's fields

def cases(twin, prompt):
  """For each field of SamplingParams: fields with it, and the same without, which give something else."""
  plain, drawn = {"temperature": 0.0, "max_tokens": 12}, {"temperature": 1.5, "seed": 3, "max_tokens": 8}
  output = expected(twin, prompt, **plain).outputs[0]
  ids, text = output.token_ids, output.text
  words = [{"bad_words": [text[i:i + 2].strip()]} for i in range(len(text) - 1) if text[i:i + 2].strip()]
  end = {**plain, "logit_bias": {"2": 100}}
  return {
    "n": ({**drawn, "n": 3}, drawn), "max_tokens": ({**plain, "max_tokens": 5}, plain),
    "min_tokens": ({**plain, "stop_token_ids": ids[2:3], "min_tokens": 9}, {**plain, "stop_token_ids": ids[2:3]}),
    "temperature": (drawn, {**drawn, "temperature": 0.0}), "top_k": ({**drawn, "top_k": 1}, drawn),
    "top_p": ({**drawn, "top_p": 1e-6}, drawn), "min_p": ({**drawn, "min_p": 1.0}, drawn),
    "seed": ({**drawn, "seed": 4}, drawn), "stop": ({**plain, "stop": text[3:5]}, plain),
    "stop_token_ids": ({**plain, "stop_token_ids": ids[2:3]}, plain),
    "include_stop_str_in_output": ({**plain, "stop": [text[3:5]], "include_stop_str_in_output": True},
                                   {**plain, "stop": [text[3:5]]}),
    "ignore_eos": ({**end, "ignore_eos": True}, end),
    "skip_special_tokens": ({**end, "ignore_eos": True, "skip_special_tokens": False}, {**end, "ignore_eos": True}),
    "repetition_penalty": ({**plain, "repetition_penalty": 50.0}, plain),
    "presence_penalty": ({**plain, "presence_penalty": -2.0}, plain),
    "frequency_penalty": ({**plain, "frequency_penalty": -2.0}, plain),
    "logit_bias": ({**plain, "logit_bias": {"300": 5.5}}, plain),
    "allowed_token_ids": ({**plain, "allowed_token_ids": [300, 301, 302]}, plain),
    "bad_words": next(({**plain, **x}, plain) for x in words if expected(twin, prompt, **plain, **x).outputs[0].text
                      != text),
    "structured_outputs": ({**plain, "structured_outputs": {"regex": "[xyz]{3}"}}, plain),
  }


@pytest.mark.slow
def test_each_field_of_sampling_params_reaches_the_sampler(server, twin):
  found = cases(twin, "the cat")
  elsewhere = {"logprobs", "prompt_logprobs"}   # tested by their numbers, and below
  assert set(found) | elsewhere == {f.name for f in dataclasses.fields(SamplingParams)}
  ids = post(server, "/tokenize", {"messages": MESSAGES[-1:]}).json()["tokens"]
  for name, (fields, without) in found.items():
    outputs, others = (story(expected(twin, "the cat", **x).outputs) for x in (fields, without))
    assert outputs != others, f"{name} was meant to change something"
    got = post(server, "/v1/completions", {"prompt": "the cat", **fields}).json()["choices"]
    assert [(i, c["index"], c["text"], c["finish_reason"], c["stop_reason"])
            for i, c in enumerate(got)] == outputs, name
    # Of a conversation, too, what is completed when it is given as ids
    got = post(server, "/v1/chat/completions", {"messages": MESSAGES[-1:], **fields}).json()["choices"]
    same = post(server, "/v1/completions", {"prompt": ids, **fields}).json()["choices"]
    assert [(c["message"]["content"], c["finish_reason"], c["stop_reason"]) for c in got] == [
      (c["text"], c["finish_reason"], c["stop_reason"]) for c in same], name


def test_the_openai_client_sends_vllms_fields_as_extra_body(client, folder, twin):
  token = expected(twin, "the cat", **GREEDY).outputs[0].token_ids[3]
  extra = {"repetition_penalty": 50.0, "stop_token_ids": [token], "include_stop_str_in_output": True}
  fields = {"temperature": 0.0, "max_tokens": 12}
  answer = client.completions.create(model=folder.name, prompt="the cat", **fields, extra_body=extra)
  assert story(answer.choices) == story(expected(twin, "the cat", **fields, **extra).outputs)
  answer = client.chat.completions.create(model=folder.name, messages=MESSAGES[-1:], **fields, extra_body=extra)
  assert story(answer.choices) == story(twin.chat(MESSAGES[-1:], SamplingParams(**fields, **extra))[0].outputs)


def test_a_request_for_the_prompts_log_probabilities_computes_all_of_it(server):
  body = {"prompt": "there is a way, they say", "max_tokens": 1}
  cached = [post(server, "/v1/completions", {**body, **x}).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for x in ({}, {}, {"prompt_logprobs": 1})]
  assert cached[1] > 4 and cached[2] == 0


def test_lower_priorities_go_first(guarded):
  done = []

  def ask(priority):
    post(guarded, "/v1/completions", {"prompt": "the cat", "max_tokens": 100, "priority": priority}, headers=KEY)
    done.append(priority)
  with ThreadPoolExecutor(2) as pool, endless(guarded):
    for i, priority in enumerate((5, -5)):
      pool.submit(ask, priority)
      wait_until(lambda i=i: guarded.metrics()["num_requests_waiting"] == i + 1, "it waits")
    assert done == []
  assert done == [-5, 5]


# Other routes

@pytest.mark.slow
def test_a_template_without_tools_refuses_them(shipped):
  hello = {"role": "user", "content": "hello"}
  tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
  with pytest.raises(openai.BadRequestError, match="template does not support tools"):
    shipped.client().chat.completions.create(model="tinyvllm", messages=[hello], tools=[tool])


def test_models_lists_the_one_there_is(client, server, folder):
  model, = client.models.list().data
  assert (model.id, model.object, model.max_model_len) == (folder.name, "model", 128)
  assert model.owned_by and model.created
  assert server.get("/v1/models").json()["object"] == "list"


@pytest.mark.slow
def test_the_shipped_model_is_called_tinyvllm(shipped):
  assert [x["id"] for x in shipped.get("/v1/models").json()["data"]] == ["tinyvllm"]


def test_health_version_and_the_chat_page(server):
  assert server.get("/health").status_code == 200 and server.get("/health").json() == {}
  assert server.get("/version").json() == {"version": tinyvllm.__version__}
  page = server.get("/")
  assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
  assert "<html" in page.text.lower()


def test_tokenize_and_detokenize(server, twin):
  text = "hello world \xe9 \U0001f600"
  ids, bare = ids_of(twin, text), twin.tokenizer.encode(text, False)
  assert post(server, "/tokenize", {"prompt": text}).json() == {"count": len(ids), "max_model_len": 128, "tokens": ids}
  assert post(server, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] == bare != ids
  tokens = post(server, "/tokenize", {"messages": MESSAGES}).json()["tokens"]
  assert tokens == of_chat(twin, MESSAGES)["prompt_token_ids"]
  assert post(server, "/detokenize", {"tokens": bare}).json() == {"prompt": text}
  assert "319" in error_of(post(server, "/detokenize", {"tokens": [320]}), 400)["message"]


def test_the_schema_names_every_field(server):
  schema = server.get("/openapi.json").json()
  assert {"/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/health",
          "/version", "/metrics"} <= set(schema["paths"])
  text = json.dumps(schema)
  for name in [*(f.name for f in dataclasses.fields(SamplingParams)), "stream_options", "include_usage", "priority",
               "user", "echo", "response_format", "top_logprobs", "max_completion_tokens", "add_special_tokens"]:
    assert f'"{name}"' in text, name


def test_the_page_of_the_routes_loads_nothing_from_elsewhere(server):
  page = server.get("/docs").text
  assert not re.findall(r"(?:src|href)=.?https?:", page) and "swagger" in page
  own = re.findall(r'(?:src|href)="(/[^"]+)"', page)
  assert len(own) == 3
  for path in own: assert server.get(path).status_code == 200 and len(server.get(path).content) > 1000
  assert server.get("/redoc").status_code == 404


# Errors

COMPLETIONS = [
  ({"temperature": -1}, "temperature"), ({"temprature": 1}, "temprature"), ({"max_tokens": "x"}, "max_tokens"),
  ({"max_tokens": 0}, "max_tokens"), ({"n": 0}, "n"), ({"n": 1.5}, "n"), ({"stream": "maybe"}, "stream"),
  ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
  ({"prompt": ["a", 1]}, "prompt"),
  ({"prompt": None}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [320]}, "prompt"),
  ({"logit_bias": {"320": 1}}, "logit_bias"), ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logprobs": 21}, "logprobs"),
  ({"stream_options": {"include_usage": True}}, "stream_options"), ({"suffix": "a"}, "suffix"),
  ({"stream": True, "stream_options": {"usage": True}}, "usage"), ({"priority": 1}, "priority"),
  ({"stop": [""]}, "stop"),
  ({"response_format": {"type": "xml"}}, "response_format"),
  ({"response_format": {"type": "json_schema"}}, "json_schema"),
  ({"structured_outputs": {"regex": "(["}}, "structured_outputs"), ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
  ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "structured_outputs"), ({"seed": 2**70}, "seed"),
  ({"top_p": 0}, "top_p"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
  ({"allowed_token_ids": []}, "allowed_token_ids"),
  ({"messages": []}, "messages"), ({"echo": "yes?"}, "echo"), ({"logprobs": True}, "logprobs"),
]
CHATS = [
  ({"messages": []}, "messages"), ({"messages": "hello"}, "messages"), ({"messages": None}, "messages"),
  ({"messages": [{"content": "a"}]}, "role"), ({"messages": [{"role": "user"}]}, "content"),
  ({"prompt": "a"}, "prompt"),
  ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "content"),
  ({"temperature": 101}, "temperature"), ({"top_logprobs": 3}, "logprobs"),
  ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
  ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"), ({"max_completion_tokens": 0}, "max_"),
  ({"logprobs": 2}, "logprobs"), ({"echo": True}, "echo"),
  ({"tool_choice": "required"}, "tool_choice"), ({"best_of": 2}, "best_of"), ({"store": "yes"}, "store"),
  ({"max_tokens": -2}, "max_tokens"),
  ({"messages": [{"role": "user", "content": None}]}, "content"),
  ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$defs": [1]}}}],
    "tool_choice": "required"}, "tools"),
]
# What clients send unasked
HARMLESS = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "reasoning_effort": "low",
            "parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "best_of": 1, "chat_template_kwargs": {}}


@pytest.mark.parametrize("change,word", COMPLETIONS, ids=lambda x: json.dumps(x)[:50])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_a_bad_field_of_completions_is_400_and_named(server, path, change, word):
  error = error_of(post(server, path, {"prompt": "the cat", "max_tokens": 2, **change}), 400)
  assert word in error["message"] and (error["param"] is None or error["param"] in change), error


@pytest.mark.parametrize("change,word", CHATS, ids=lambda x: json.dumps(x)[:50])
def test_a_bad_field_of_chat_is_400_and_named(server, change, word):
  error = error_of(post(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **change}), 400)
  assert word in error["message"] or word in (error["param"] or ""), error


@pytest.mark.parametrize("fields", [*[{name: x} for name, x in HARMLESS.items()], dict.fromkeys(HARMLESS), HARMLESS],
                         ids=lambda x: "+".join(x)[:20])
def test_what_clients_send_unasked_changes_nothing(server, fields):
  for path, body in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": "the cat"})):
    plain, with_it = [post(server, path, {**body, **GREEDY, **more}).json()["choices"] for more in ({}, fields)]
    assert with_it == plain
  events = stream(server, "/v1/chat/completions", {"messages": MESSAGES, "stream": True, **GREEDY, **fields,
                                                   "stream_options": {"include_obfuscation": False}})
  assert events[-2]["choices"][0]["finish_reason"]


def test_an_assistants_message_may_have_no_content(server):
  def said(content): return post(server, "/v1/chat/completions", {"messages": [
    MESSAGES[1], {"role": "assistant", "content": content}, MESSAGES[1]], **GREEDY}).json()["choices"]
  assert said(None) == said("")


@pytest.mark.parametrize("path,body", [("/v1/chat/completions", {"messages": MESSAGES}),
                                       ("/generate", {"prompt": "a"})])
def test_max_tokens_may_be_as_many_as_there_is_room_for(server, path, body):
  usage = post(server, path, {**body, "temperature": 0, "ignore_eos": True, "max_tokens": -1}).json()["usage"]
  assert usage["total_tokens"] == 128


def test_a_model_is_found_by_its_name(server, client, folder):
  assert client.models.retrieve(folder.name).id == folder.name
  with pytest.raises(openai.NotFoundError): client.models.retrieve("other")


@pytest.mark.parametrize("field", ["temprature", "max_tokens"])
def test_param_names_the_field_that_is_wrong(server, field):
  assert field in error_of(post(server, "/v1/completions", {"prompt": "a", field: "x"}), 400)["param"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b"null", b'"a"', b'{"prompt": NaN}', b"\xff\xfe", b"[" * 3000,
                                     b'{"prompt": "a", "seed": 1' + b"0" * 3000 + b"}"], ids=lambda x: repr(x[:12]))
def test_what_is_not_a_json_object_is_400(server, path, content):
  error_of(post(server, path, content=content, headers={"Content-Type": "application/json"}), 400)


def test_a_body_that_is_no_json_or_not_said_to_be_is_told(server):
  def said(content, kind): return error_of(post(server, "/v1/completions", content=content, headers={
    "Content-Type": kind}), 400)["message"]
  assert said(b'{"prompt": ', "application/json").startswith("the body is not JSON: ")
  for kind in ("text/plain", "application/x-www-form-urlencoded"):   # curl -d without -H sends the second
    assert "send the header Content-Type: application/json" in said(b'{"prompt": "a"}', kind)


@pytest.mark.parametrize("path,body", [
  ("/v1/completions", {"prompt": "\ud800"}), ("/v1/completions", {"prompt": "a", "bad_words": ["\ud800"]}),
  ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
  ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "\ud800"}}), ("/tokenize", {"prompt": "\ud800"}),
  ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}), ("/tokenize", {"prompt": "a", "\ud800": 1})],
  ids=lambda x: json.dumps(x)[:50])
def test_half_of_a_surrogate_pair_is_400(server, path, body):
  error_of(post(server, path, content=json.dumps(body), headers={"Content-Type": "application/json"}), 400)


def test_a_prompt_that_is_too_long_is_400_and_none_of_its_request_runs(server, client, folder):
  before = server.metrics()
  begins = r"This model's maximum context length is 128 tokens\. However, "
  with pytest.raises(openai.BadRequestError, match=begins) as e:
    client.completions.create(model=folder.name, prompt=[[5] * 3, [5] * 128])
  assert e.value.status_code == e.value.body["code"] == 400 and e.value.type == "BadRequestError"
  after = server.metrics()
  assert after["generation_tokens_total"] == before["generation_tokens_total"] and not after["num_requests_waiting"]
  with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens"):
    client.chat.completions.create(model=folder.name, messages=[{"role": "user", "content": "the cat " * 100}])
  assert client.completions.create(model=folder.name, prompt=[5] * 127).usage.completion_tokens == 1


def test_a_bad_stream_is_400_before_it_begins(client, folder):
  with pytest.raises(openai.BadRequestError, match="temperature"):
    client.completions.create(model=folder.name, prompt="a", temperature=-1, stream=True)


def test_no_such_model_and_no_such_route_are_404(server, client):
  with pytest.raises(openai.NotFoundError) as e: client.completions.create(model="other", prompt="a")
  assert e.value.body["message"] == "The model `other` does not exist." and e.value.param == "model"
  assert e.value.body["code"] == 404 and e.value.type == "NotFoundError"
  with pytest.raises(openai.NotFoundError): client.chat.completions.create(model="other", messages=MESSAGES)
  with pytest.raises(openai.NotFoundError): client.embeddings.create(model="other", input="a")
  error_of(post(server, "/nowhere", {}), 404)
  error_of(post(server, "/generate", {"model": "other", "prompt": "a"}), 404)


def test_the_wrong_method_is_405(server):
  for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"):
    error_of(server.get(path), 405)
  error_of(post(server, "/v1/models", {}), 405)


def test_without_the_key_there_is_401(guarded):
  for key in ("none", "secret2", "secre", "SECRET"):
    with pytest.raises(openai.AuthenticationError) as e: guarded.client(api_key=key).models.list()
    assert e.value.status_code == e.value.body["code"] == 401 and e.value.type == "UnauthorizedError"
  for headers in ({}, {"Authorization": "secret"}, {"Authorization": "Basic secret"}, {"Authorization": ""},
                  {"Authorization": b"Bearer \xe9"}):
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
      error_of(post(guarded, path, {"prompt": "a"}, headers=headers), 401)
    error_of(guarded.get("/v1/models", headers=headers), 401)
  for path in ("/", "/health", "/version", "/metrics", "/docs", "/openapi.json",
               "/static-offline-docs/swagger-ui-bundle.js"):
    assert guarded.get(path).status_code == 200
  assert [x.id for x in guarded.client(api_key="secret").models.list()] == ["mine"]
  assert guarded.client(api_key="secret").completions.create(model="mine", prompt="a", max_tokens=1).model == "mine"


def test_a_body_over_the_limit_is_413_with_and_without_its_length(guarded):
  body = json.dumps({"prompt": "the cat", "max_tokens": 1}).encode()
  fits, over = body + b" " * (4096 - len(body)), body + b" " * (4097 - len(body))
  headers = {**KEY, "Content-Type": "application/json"}

  def pieces(x): yield from (x[i:i + 1000] for i in range(0, len(x), 1000))
  for send in (bytes, pieces):   # with a Content-Length; in chunks
    assert post(guarded, "/v1/completions", content=send(fits), headers=headers).status_code == 200
    error_of(post(guarded, "/v1/completions", content=send(over), headers=headers), 413)
  with pytest.raises(openai.APIStatusError) as e:
    guarded.client(api_key="secret").completions.create(model="mine", prompt="a" * 5000)
  assert e.value.status_code == e.value.body["code"] == 413 and e.value.type == "RequestEntityTooLargeError"


def test_a_body_that_never_ends_is_413_before_it_does(guarded):
  connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=30)
  connection.putrequest("POST", "/v1/completions")
  for name, value in {**KEY, "Content-Type": "application/json", "Transfer-Encoding": "chunked"}.items():
    connection.putheader(name, value)
  connection.endheaders()
  with contextlib.suppress(ConnectionError):   # it need not read on
    for _ in range(64): connection.send(b"400\r\n" + b" " * 1024 + b"\r\n")
  assert connection.getresponse().status == 413, "and no last chunk was sent"
  connection.close()


def test_more_than_max_queue_waiting_is_429_and_says_when_to_come_back(guarded):
  client, body = guarded.client(api_key="secret"), {"prompt": "the cat", "max_tokens": 3}
  with ThreadPoolExecutor(2) as pool:
    with endless(guarded):
      waiting = [pool.submit(post, guarded, "/v1/completions", body, headers=KEY) for _ in range(2)]
      wait_until(lambda: guarded.metrics()["num_requests_waiting"] == 2, "two wait")
      for streamed in (False, True):
        with pytest.raises(openai.RateLimitError) as e:
          client.completions.create(model="mine", stream=streamed, **body)
        assert e.value.body["code"] == e.value.status_code == 429 and e.value.type == "TooManyRequestsError"
        assert int(e.value.response.headers["retry-after"]) >= 1
      with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="mine", messages=MESSAGES)
      assert not any(x.done() for x in waiting)
    for x in waiting: assert x.result().json()["usage"]["completion_tokens"] == 3, "those in the queue get their turn"
  assert client.completions.create(model="mine", **body).usage.completion_tokens == 3


def test_of_a_burst_no_more_wait_than_may(guarded):
  def ask(streamed):
    body = {"prompt": "the cat", "max_tokens": 2, "stream": streamed}
    return post(guarded, "/v1/completions", body, headers=KEY).status_code
  with ThreadPoolExecutor(20) as pool:
    with endless(guarded):
      asked = [pool.submit(ask, i % 2 == 0) for i in range(20)]
      wait_until(lambda: sum(x.done() for x in asked) + guarded.metrics()["num_requests_waiting"] == 20, "all asked")
      assert guarded.metrics()["num_requests_waiting"] == 2
    assert sorted(x.result() for x in asked) == [200] * 2 + [429] * 18


def test_a_list_of_prompts_longer_than_the_queue_is_429_and_runs_none(guarded):
  before = guarded.metrics()["generation_tokens_total"]
  error_of(post(guarded, "/v1/completions", {"prompt": ["the cat"] * 9, "max_tokens": 2}, headers=KEY), 429)
  assert guarded.metrics()["generation_tokens_total"] == before and not guarded.metrics()["num_requests_waiting"]


def test_each_sample_of_a_request_counts_in_the_queue(guarded):
  def ask(n): return post(guarded, "/v1/completions", {"prompt": "the cat", "max_tokens": 2, "n": n}, headers=KEY)
  assert len(ask(3).json()["choices"]) == 3, "one runs, two wait"
  assert "n=4" in error_of(ask(4), 400)["message"], "so many never may"
  with ThreadPoolExecutor(1) as pool:
    with endless(guarded):
      error_of(ask(3), 429)
      assert guarded.metrics()["num_requests_waiting"] == 0
      two = pool.submit(ask, 2)
      wait_until(lambda: guarded.metrics()["num_requests_waiting"], "both wait")
      error_of(ask(1), 429)
      assert not two.done()
    assert len(two.result().json()["choices"]) == 2
  with endless(guarded, n=3): error_of(ask(1), 429)
  def left(): return guarded.metrics()["num_requests_running"] + guarded.metrics()["num_requests_waiting"]
  wait_until(lambda: not left(), "who leaves the stream ends all three")
  assert len(ask(3).json()["choices"]) == 3, "and they count no more"


def test_a_client_that_goes_away_ends_its_request(guarded):
  def left(): return guarded.metrics()["request_success_total{finished_reason=abort}"]
  before = left() if "request_success_total{finished_reason=abort}" in guarded.metrics() else 0
  with pytest.raises(httpx.ReadTimeout): post(guarded, "/v1/completions", ENDLESS, headers=KEY, timeout=1)
  wait_until(lambda: guarded.metrics()["num_requests_running"] == 0, "it is aborted")
  wait_until(lambda: left() == before + 1, "and counted as such")


# Faults

FAULTS = """
import time
from tinyvllm.runner import Runner
launch = Runner.launch
def faulty(self, step):
  if any(s.params.max_tokens == 13 and s.num_generated > 2 for s, *_ in step.rows):
    time.sleep(0.2)   # the tokens before are on their way, as from a model that takes longer
    raise RuntimeError("boom")
  if any(s.params.max_tokens == 14 for s, *_ in step.rows): raise SystemExit("bye")   # it would end a thread
  return launch(self, step)
Runner.launch = faulty

import sys
from tinyvllm import LLM
from tinyvllm_extra.huggingface import Tokenizer
sys.modules.update({"llguidance": None, "jinja2.sandbox": None})   # as if they were not installed
encode, make_request = Tokenizer.encode, LLM.make_request
def broken_encode(self, text, *options):
  if text == "broken": raise ValueError("operands could not be broadcast")
  return encode(self, text, *options)
def broken_request(self, request_id, prompt, params, priority):
  if params.max_tokens == 15: raise KeyError("absent")
  return make_request(self, request_id, prompt, params, priority)
Tokenizer.encode, LLM.make_request = broken_encode, broken_request
"""


@pytest.fixture(scope="module")
def faulty(long_folder):
  """A server whose steps fail for a request of 13 tokens once it has three, and which lets none run for long."""
  options = flags(dtype="float32", max_num_seqs=1, max_num_batched_tokens=4, request_timeout=1.5)
  with Server(long_folder, *options, before=FAULTS) as server:
    body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0}   # not the first time that its steps are met
    wait_until(lambda: post(server, "/v1/completions", body).json()["usage"]["completion_tokens"] == 12, "it is warm")
    yield server


@pytest.mark.parametrize("size", [13, 14])
def test_a_failing_step_is_500_and_the_next_request_works(faulty, long_folder, size):
  client = faulty.client()
  options = {"model": long_folder.name, "prompt": "the cat", "max_tokens": size, "temperature": 0}
  with pytest.raises(openai.InternalServerError) as e: client.completions.create(**options)
  assert e.value.status_code == e.value.body["code"] == 500 and e.value.type == "InternalServerError"
  error_of(post(faulty, "/v1/completions", options), 500)
  assert client.completions.create(**{**options, "max_tokens": 12}).usage.completion_tokens == 12
  assert faulty.get("/health").status_code == 200


def test_a_failure_in_the_middle_of_a_stream_is_an_error_event_and_its_end(faulty, long_folder):
  *found, last = stream(faulty, "/v1/completions", {"prompt": "the cat", "max_tokens": 13, "temperature": 0})
  assert found and all(e["choices"][0]["finish_reason"] is None for e in found)
  assert set(last) == {"error"} and last["error"]["code"] == 500 and last["error"]["type"] == "InternalServerError"
  assert set(last["error"]) == {"message", "type", "param", "code"}
  with pytest.raises(openai.APIError):
    list(faulty.client().completions.create(model=long_folder.name, prompt="the cat", max_tokens=13, stream=True,
                                            temperature=0))


@pytest.mark.parametrize("path,fields,words", [
  ("/tokenize", {"prompt": "broken"}, "operands could not be broadcast"),
  ("/v1/completions", {"prompt": "broken"}, "operands could not be broadcast"),
  ("/v1/completions", {"prompt": "broken", "stream": True}, "operands could not be broadcast"),
  ("/v1/completions", {"prompt": "the cat", "max_tokens": 15}, "absent")],
  ids=["tokenize", "tokenizer", "tokenizer of a stream", "engine"])
def test_internal_error_is_500_with_a_logged_traceback(faulty, path, fields, words):
  before = len(faulty.log)
  error = error_of(post(faulty, path, fields), 500)
  assert words in error["message"] and error["param"] is None
  wait_until(lambda: words in faulty.log[before:], "the log has the exception")
  assert faulty.log[before:].count("Traceback") == 1, faulty.log[before:]
  body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0}
  assert post(faulty, "/v1/completions", body).json()["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("path,fields,package,extra", [
  ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a"}}, "llguidance", "grammar"),
  ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_object"}}, "llguidance", "grammar"),
  ("/v1/chat/completions", {"messages": MESSAGES}, "jinja2", "hf"),
  ("/tokenize", {"messages": MESSAGES}, "jinja2", "hf")],
  ids=["structured_outputs", "response_format", "chat", "tokenize"])
def test_package_missing_on_the_server_is_501_and_a_warning(faulty, path, fields, package, extra):
  before = len(faulty.log)
  error = error_of(post(faulty, path, fields), 501)
  assert package in error["message"] and f"pip install 'tinyvllm[{extra}]'" in error["message"]
  wait_until(lambda: error["message"] in faulty.log[before:], "the log has the message")
  assert "Traceback" not in faulty.log[before:]


@pytest.mark.slow
def test_the_request_timeout_ends_it_with_abort(faulty):
  answer = post(faulty, "/v1/completions", ENDLESS).json()
  assert answer["choices"][0]["finish_reason"] == "abort" and answer["choices"][0]["text"]
  assert 0 < answer["usage"]["completion_tokens"] < 30000
  *found, done = stream(faulty, "/v1/completions", ENDLESS)
  assert done == "[DONE]" and [e["choices"][0]["finish_reason"] for e in found] == [None] * (len(found) - 1) + ["abort"]
  assert faulty.metrics()["num_requests_running"] == 0


def test_the_request_timeout_ends_all_prompts_of_a_request(faulty):
  """One runs, and one waits."""
  answer = post(faulty, "/v1/completions", {**ENDLESS, "prompt": ["the cat", "hello"]}, timeout=30).json()
  assert [c["finish_reason"] for c in answer["choices"]] == ["abort"] * 2
  assert answer["choices"][0]["text"] and not answer["choices"][1]["text"]
  assert faulty.metrics()["num_requests_running"] == faulty.metrics()["num_requests_waiting"] == 0


# Pages of other origins

def preflight(server, origin):
  return server.request("OPTIONS", "/v1/completions", headers={
    "Origin": origin, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type"})


def test_pages_of_other_origins_may_not_ask_unless_allowed(server, guarded):
  name, page, other = "access-control-allow-origin", "http://page.example", "http://other.example"
  assert name not in preflight(server, page).headers
  assert name not in post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"Origin": page}).headers
  assert preflight(guarded, page).status_code == 200, "a browser sends no key with it"
  allowed = preflight(guarded, page).headers
  assert allowed[name] == page and name not in preflight(guarded, other).headers
  asked = {x.strip().lower() for x in allowed["access-control-allow-headers"].split(",")}
  assert asked >= {"authorization", "content-type"}
  for origin in (page, other):
    for key in (KEY, {}):   # a page must be able to read errors, too
      found = post(guarded, "/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"Origin": origin, **key})
      assert found.status_code == (200 if key else 401) and (name in found.headers) == (origin == page)


# Start and end

@pytest.fixture
def slow(folder, tmp_path):
  """A model whose template is a pipe: to load it takes until something is written into it."""
  slow = tmp_path / "slow"
  slow.mkdir()
  for file in folder.iterdir(): (slow / file.name).symlink_to(file)
  (slow / "tokenizer_config.json").unlink()
  os.mkfifo(slow / "tokenizer_config.json")
  return slow


def opened(pipe):
  """The pipe to write to, once somebody reads it."""
  try: return os.fdopen(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK), "w")
  except OSError: return None


def test_until_the_model_is_there_answers_are_503(slow, folder):
  pipe, text = slow / "tokenizer_config.json", (folder / "tokenizer_config.json").read_text()
  with Server(slow, *flags(**SMALL), ready=False) as server:
    file = wait_until(lambda: opened(pipe), "it reads the model's folder")
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
      response = post(server, path, {"prompt": "a"})
      error_of(response, 503)
      assert int(response.headers["retry-after"]) >= 1
    error_of(server.get("/v1/models"), 503)
    assert server.get("/health").status_code == 503
    for path in ("/", "/version", "/metrics", "/docs", "/openapi.json"):
      assert server.get(path).status_code == 200, path
    with pytest.raises(openai.InternalServerError) as e: server.client().models.list()
    assert e.value.status_code == 503 and e.value.type == "ServiceUnavailableError"
    (slow / "new").write_text(text)
    (slow / "new").replace(pipe)
    with file: file.write(text)
    wait_until(server.healthy, "/health answers 200")
    assert post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
    assert server.stop() == 0


def test_sigterm_while_the_model_loads_ends_it(slow):
  with Server(slow, *flags(**SMALL), "--shutdown-timeout", "1", ready=False) as server:
    with wait_until(lambda: opened(slow / "tokenizer_config.json"), "it loads"):
      assert server.stop(15) == 0, "and does not wait for the model"
    assert "Traceback" not in server.log, server.log


def refused(http):
  """Whether a new request is turned away, or its connection closed; never answered."""
  try: response = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
  except httpx.TransportError: return True
  if response.status_code == 200: return False
  error_of(response, 503)
  return True


@pytest.mark.slow
def test_sigterm_lets_what_runs_come_to_its_end(long_folder):
  with Server(long_folder, *flags(dtype="float32", max_num_seqs=4, max_num_batched_tokens=4)) as server:
    body = {**ENDLESS, "max_tokens": 1000}
    with server.http() as old, ThreadPoolExecutor(1) as pool:
      assert old.get("/health").status_code == 200   # a connection that stays
      with server.stream("/v1/completions", body) as response:
        lines = response.iter_lines()
        first = [next(lines), next(lines)]
        whole = pool.submit(post, server, "/v1/completions", body)
        wait_until(lambda: server.metrics()["num_requests_running"] == 2, "both run")
        server.signal()
        wait_until(lambda: refused(old), "requests are refused")
        assert refused(old) and server.process.poll() is None, "it still runs"
        assert not whole.done()
        *found, done = events([*first, *lines])
      assert done == "[DONE]" and found[-1]["choices"][0]["finish_reason"] == "length"
      answer = whole.result().json()
      assert answer["usage"]["completion_tokens"] == 1000
      assert "".join(e["choices"][0]["text"] for e in found) == answer["choices"][0]["text"]
    assert server.wait() == 0, server.log
    assert "Traceback" not in server.log, server.log


@pytest.mark.slow
def test_after_the_shutdown_timeout_what_runs_ends_with_abort(long_folder):
  with Server(long_folder, *flags(dtype="float32", max_num_seqs=4, max_num_batched_tokens=4,
                                  shutdown_timeout=0.5)) as server, ThreadPoolExecutor(1) as pool:
    with server.stream("/v1/completions", ENDLESS) as response:
      lines = response.iter_lines()
      first = [next(lines), next(lines)]
      whole = pool.submit(post, server, "/v1/completions", ENDLESS)
      wait_until(lambda: server.metrics()["num_requests_running"] == 2, "both run")
      server.signal(signal.SIGINT)
      *found, done = events([*first, *lines])
    assert done == "[DONE]" and [e["choices"][0]["finish_reason"] for e in found[-2:]] == [None, "abort"]
    assert whole.result().status_code == 200 and whole.result().json()["choices"][0]["finish_reason"] == "abort"
    assert server.wait(20) == 0, server.log
    assert "Traceback" not in server.log, server.log


def command(*arguments, stdin=""):
  return subprocess.run([sys.executable, "-m", "tinyvllm", *map(str, arguments)], input=stdin, capture_output=True,
                        text=True, check=False, timeout=120, cwd=Path(__file__).parents[1])


def test_what_cannot_be_served_is_one_line_and_exit_code_1(server):
  words = {"nowhere": ["/nowhere"], "max_num_seqs": ["--max-num-seqs", "0"], str(server.port): ["--port", server.port]}
  with ThreadPoolExecutor(2) as pool:
    runs = list(pool.map(lambda options: command("serve", "--port", "0", *options), words.values()))
  for word, run in zip(words, runs, strict=True):
    lines = [line for line in run.stderr.splitlines() if line.startswith("tinyvllm: ")]
    assert run.returncode == 1 and len(lines) == 1 and word in lines[0], run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("options", [["--port", "x"], ["--no-such"], ["a", "b"]], ids=str)
def test_what_the_parser_does_not_know_is_exit_code_2(options):
  with pytest.raises(SystemExit) as e: main(["serve", *options])
  assert e.value.code == 2


# The command line's client

def test_chat_talks_to_a_server(server, twin):
  run = command("chat", "--url", server.url, "--max-tokens", "5", stdin="hello\nis that all\n")
  messages, answers = [], []
  for line in ("hello", "is that all"):
    messages.append({"role": "user", "content": line})
    answers.append(twin.chat(messages, SamplingParams(temperature=0.0, max_tokens=5))[0].outputs[0].text)
    messages.append({"role": "assistant", "content": answers[-1]})
  assert run.returncode == 0 and run.stdout.rstrip("\n") == "\n".join(answers), run.stderr


def test_chat_brings_the_key_and_tells_what_the_server_refuses(guarded, server):
  run = command("chat", "--url", guarded.url, stdin="hello\n")
  assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("tinyvllm: ") and "Traceback" not in run.stderr
  run = command("chat", "--url", server.url + "/", "--temperature", "-1", stdin="hello\n")
  assert run.returncode == 1 and "temperature" in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr
  run = command("chat", "--url", "http://127.0.0.1:9", stdin="hello\n")
  assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("tinyvllm: ") and "Traceback" not in run.stderr


@pytest.mark.parametrize("options,words", [
  (["--api-key", "k"], "--url"), (["--url", "U", "--block-size", "4"], "block_size"),
  (["--url", "U", "--model", "another"], "another")], ids=str)
def test_flags_that_would_be_without_effect_beside_a_url_are_refused(server, options, words):
  run = command("chat", *(server.url if x == "U" else x for x in options), stdin="hello\n")
  assert run.returncode == 1 and words in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr


def test_prompt_logprobs_come_with_each_choice_once(server, twin):
  params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2)
  expected = twin.generate("the cat", params)[0].prompt_logprobs
  expected = [of and {str(i): x.rank for i, x in of.items()} for of in expected]
  asked = {"prompt": "the cat", "max_tokens": 4, "temperature": 0, "prompt_logprobs": 2, "n": 2}
  def ranks(choice): return [of and {i: x["rank"] for i, x in of.items()} for of in choice["prompt_logprobs"]]
  whole = post(server, "/v1/completions", asked).json()["choices"]
  assert [ranks(choice) for choice in whole] == [expected] * 2 and expected[0] is None and len(expected) > 1
  *found, done = stream(server, "/v1/completions", asked)
  parts = [event["choices"][0] for event in found]
  assert done == "[DONE]" and [ranks(part) for part in parts if "prompt_logprobs" in part] == [expected] * 2
  plain = post(server, "/v1/completions", {"prompt": "the cat", "max_tokens": 1}).json()["choices"][0]
  assert "prompt_logprobs" not in plain


@pytest.mark.slow
def test_the_key_may_come_from_the_environment(folder):
  with Server(folder, *flags(**SMALL), environment={"TINYVLLM_API_KEY": "secret"}) as kept:
    assert kept.http().get("/v1/models").status_code == 401
    assert kept.http().get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


# The log

@pytest.mark.slow
def test_a_line_of_the_log_tells_what_it_does_every_ten_seconds(guarded):
  pattern = (r"Engine 000: Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: (?!0\.0 )[\d.]+ "
             r"tokens/s, Running: 1 reqs, Waiting: 0 reqs, GPU KV cache usage: [\d.]+%, Prefix cache hit rate: [\d.]+%")
  with endless(guarded):
    wait_until(lambda: re.search(pattern, guarded.log), "a line of the log", 25)
