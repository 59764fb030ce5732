"""`tinyvllm serve` as a separate process, tested with the openai package and with plain HTTP requests. Responses must
equal LLM.generate in this process with the same model, prompt and fields."""
import contextlib
import dataclasses
import http.client
import json
import random
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2 as httpx
import openai
import pytest
from helpers.engines import ENGINE
from helpers.models import tiny_model
from helpers.requests import flags
from helpers.servers import LocalServer, checked, error_of, stream, wait_until

import tinyvllm
from tinyvllm import LLM, SamplingParams
from tinyvllm.runner import Runner
from tinyvllm_extra.cli import main
from tinyvllm_extra.huggingface import Tokenizer

SMALL = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4}   # few graphs
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
GREEDY = {"temperature": 0.0, "max_tokens": 8}
ENDLESS = {"temperature": 0.0, "max_tokens": 30000, "ignore_eos": True, "prompt": "the cat"}   # runs for a minute
KEY = {"Authorization": "Bearer secret"}
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0,
                                                                                    "maximum": 99}},
          "required": ["name", "age"], "additionalProperties": False}
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "you"}, {"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A model with a word tokenizer and a chat template that renders all messages."""
  folder = tiny_model(tmp_path_factory.mktemp("served"), words=True)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
  return folder


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory):
  """Like `folder`, with a context length of 32768: requests can run for a minute."""
  folder = tiny_model(tmp_path_factory.mktemp("long"), words=True, max_position_embeddings=32768)
  (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT}))
  return folder


@pytest.fixture(scope="module")
def llm(folder):
  """The reference: the server's model in this process."""
  return LLM(folder, **SMALL)


@pytest.fixture(scope="module")
def server(folder): yield from checked(LocalServer(folder, *flags(**SMALL)))


@pytest.fixture(scope="module")
def bundled_server(): yield from checked(LocalServer())


@pytest.fixture(scope="module")
def limited(long_folder):
  """A server with an API key, a model name, one allowed origin and small limits: 1 running and 2 waiting requests."""
  options = flags(dtype="float32", max_num_seqs=1, max_num_batched_tokens=4, scheduling_policy="priority", max_queue=2,
                  api_key="secret", max_body_size=4096, allowed_origins="http://page.example", served_model_name="mine")
  yield from checked(LocalServer(long_folder, *options))


@pytest.fixture
def client(server): return server.client()


@contextlib.contextmanager
def running_request(server, **fields):
  """Keep an endless request running. Yield the lines of its stream after the first event."""
  with server.stream("/v1/completions", {**ENDLESS, **fields}, headers=KEY) as response:
    lines = response.iter_lines()
    next(lines)
    yield lines


def post(server, path, body=None, **options): return server.post(path, body, **options)


def chat_prompt(llm, messages):
  """Return `messages` as a prompt of token ids."""
  return {"prompt_token_ids": llm.chat(messages, SamplingParams(max_tokens=1))[0].prompt_token_ids}


def expected(llm, prompt, **fields):
  """Return LLM.generate's output for one prompt."""
  return llm.generate(prompt, SamplingParams(**fields), use_tqdm=False)[0]


def rows_of(choices):
  """Return index, text, finish_reason and stop_reason of completion choices, chat choices or LLM outputs."""
  text = [c.text if hasattr(c, "text") else c.message.content for c in choices]
  return [(i, c.index, t, c.finish_reason, c.stop_reason) for i, (c, t) in enumerate(zip(choices, text, strict=True))]


def ids_of(llm, text): return llm.tokenizer.encode(text)


# Completions

@pytest.mark.parametrize("form", ["str", "[str]", "[int]", "[[int]]"])
@pytest.mark.parametrize("n", [1, 3])
def test_completions_of_every_prompt_form_equal_generate(client, folder, llm, form, n):
  texts = ["the cat sat", "hello world"]
  ids = [ids_of(llm, x) for x in texts]
  prompt = {"str": texts[0], "[str]": texts, "[int]": ids[0], "[[int]]": ids}[form]
  fields = {"seed": 7, "n": n, "max_tokens": 6}
  answer = client.completions.create(model=folder.name, prompt=prompt, **fields)
  outputs = [expected(llm, x, **fields) for x in (texts if form in ("[str]", "[[int]]") else texts[:1])]
  assert [c.index for c in answer.choices] == [*range(n * len(outputs))]
  assert [x[2:] for x in rows_of(answer.choices)] == [x[2:] for o in outputs for x in rows_of(o.outputs)]
  assert len({c.text for c in answer.choices}) == n * len(outputs), "samples of a prompt must differ"
  num_prompt_tokens = sum(len(o.prompt_token_ids) for o in outputs)
  num_generated = sum(len(c.token_ids) for o in outputs for c in o.outputs)
  usage = answer.usage
  assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt_tokens, num_generated)
  assert usage.total_tokens == num_prompt_tokens + num_generated
  assert answer.id.startswith("cmpl-") and answer.object == "text_completion" and answer.model == folder.name
  assert abs(answer.created - time.time()) < 600 and all(c.logprobs is None for c in answer.choices)


def test_omitted_and_null_fields_use_sampling_params_defaults(server, llm):
  answer = post(server, "/v1/completions", {"prompt": "the cat", "seed": 1}).json()
  output = expected(llm, "the cat", seed=1)
  assert answer["choices"][0]["text"] == output.outputs[0].text and answer["choices"][0]["finish_reason"] == "length"
  assert answer["usage"]["completion_tokens"] == len(output.outputs[0].token_ids)
  nulls = {f.name: None for f in dataclasses.fields(SamplingParams)} | {
    k: None for k in ("model", "stream", "stream_options", "priority", "user", "echo", "response_format")}
  again = post(server, "/v1/completions", {**nulls, "prompt": "the cat", "seed": 1}).json()
  assert again["choices"] == answer["choices"]


@pytest.mark.parametrize("ids", [False, True])
def test_echo_puts_the_prompt_before_the_text(client, server, folder, llm, ids):
  prompt, output = "the cat sat", expected(llm, "the cat sat", **GREEDY).outputs[0]
  body = {"prompt": ids_of(llm, prompt) if ids else prompt, "echo": True, **GREEDY}
  text = ("<s>" if ids else "") + prompt + output.text   # as in vLLM, all ids of a prompt of ids are shown
  answer = client.completions.create(model=folder.name, **body)
  assert answer.choices[0].text == text and answer.usage.completion_tokens == 8
  chunks = stream(server, "/v1/completions", body)
  assert "".join(e["choices"][0]["text"] for e in chunks[:-1]) == text


def test_stop_string_ends_text_and_is_stop_reason(client, folder, llm):
  text = expected(llm, "the cat", temperature=0.0, max_tokens=20).outputs[0].text
  stop = text[4:6]
  for value in (stop, ["#", stop]):
    choice = client.completions.create(model=folder.name, prompt="the cat", temperature=0, max_tokens=20,
                                       stop=value).choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (text[:text.index(stop)], "stop", stop)


def test_stop_token_id_ends_text_and_is_stop_reason(client, folder, llm):
  token = expected(llm, "the cat", **GREEDY).outputs[0].token_ids[3]
  body = {"stop_token_ids": [token]}
  choice = client.completions.create(model=folder.name, prompt="the cat", temperature=0, max_tokens=8,
                                     extra_body=body).choices[0]
  assert choice.finish_reason == "stop" and choice.stop_reason == token
  assert choice.text == expected(llm, "the cat", **GREEDY, **body).outputs[0].text


# Chat

def test_chat_equals_llm_chat(client, folder, llm):
  output = llm.chat(MESSAGES, SamplingParams(**GREEDY, n=1))[0]
  parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
  for messages in (MESSAGES, parts):
    answer = client.chat.completions.create(model=folder.name, messages=messages, temperature=0,
                                            max_completion_tokens=8)
    assert rows_of(answer.choices) == rows_of([output.outputs[0]])[:1] and answer.choices[0].message.role == "assistant"
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == folder.name
    assert answer.usage.prompt_tokens == len(output.prompt_token_ids) and answer.usage.completion_tokens == 8
    assert answer.choices[0].logprobs is None


def test_chat_defaults_to_context_length_and_accepts_max_tokens(client, folder, llm):
  message = [{"role": "user", "content": "hello"}]
  answer = client.chat.completions.create(model=folder.name, messages=message, temperature=0)
  assert answer.usage.total_tokens == 128 and answer.choices[0].finish_reason == "length"
  assert client.chat.completions.create(model=folder.name, messages=message, max_tokens=3).usage.completion_tokens == 3


# Streams

def test_completion_stream_chunks_have_the_openai_format(server, folder, llm):
  body = {"prompt": ["the cat", "hello"], "n": 2, "seed": 3, "max_tokens": 5, "stream_options": {"include_usage": True}}
  *chunks, usage, last = stream(server, "/v1/completions", body)
  outputs = [expected(llm, x, n=2, seed=3, max_tokens=5) for x in body["prompt"]]
  choices = [c for o in outputs for c in o.outputs]
  assert last == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] == 20
  assert usage["usage"]["prompt_tokens"] == sum(len(o.prompt_token_ids) for o in outputs)
  assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + 20
  assert {(e["id"], e["object"], e["model"], e["created"]) for e in [*chunks, usage]} == {
    (chunks[0]["id"], "text_completion", folder.name, chunks[0]["created"])} and chunks[0]["id"].startswith("cmpl-")
  for e in chunks: assert len(e["choices"]) == 1 and e["usage"] is None
  for i, c in enumerate(choices):
    deltas = [e["choices"][0] for e in chunks if e["choices"][0]["index"] == i]
    assert "".join(x["text"] for x in deltas) == c.text
    assert len(deltas) <= len(c.token_ids), "at most one event per token"
    assert [x["finish_reason"] for x in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_chat_stream_starts_with_the_role(server, folder, llm):
  output = llm.chat(MESSAGES, SamplingParams(seed=3, max_tokens=5, n=2))[0]
  *chunks, last = stream(server, "/v1/chat/completions", {"messages": MESSAGES, "n": 2, "seed": 3, "max_tokens": 5})
  assert last == "[DONE]"
  assert {(e["id"], e["object"], e["model"]) for e in chunks} == {
    (chunks[0]["id"], "chat.completion.chunk", folder.name)}
  assert chunks[0]["id"].startswith("chatcmpl-")
  for e in chunks: assert len(e["choices"]) == 1 and e.get("usage") is None
  for i, c in enumerate(output.outputs):
    first, *deltas = [e["choices"][0] for e in chunks if e["choices"][0]["index"] == i]
    assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    assert all("role" not in x["delta"] or x["delta"]["role"] is None for x in deltas)
    assert "".join(x["delta"].get("content") or "" for x in deltas) == c.text and len(deltas) <= len(c.token_ids)
    assert [x["finish_reason"] for x in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_stream_events_have_exact_bytes(server):
  with server.stream("/v1/completions", {"prompt": "the cat", **GREEDY, "max_tokens": 2}) as response:
    raw = response.read()
  *parts, rest = raw.split(b"\n\n")
  assert rest == b"" and parts[-1] == b"data: [DONE]" and b"\r" not in raw
  for part in parts[:-1]: assert part.startswith(b"data: {") and b"\n" not in part and json.loads(part[6:])


def test_openai_client_reads_completion_and_chat_streams(client, folder, llm):
  usage = {"stream_options": {"include_usage": True}, "stream": True}
  chunks = list(client.completions.create(model=folder.name, prompt="the cat", temperature=0, max_tokens=8, **usage))
  output = expected(llm, "the cat", **GREEDY).outputs[0]
  assert "".join(c.choices[0].text for c in chunks[:-1]) == output.text
  assert chunks[-1].usage.completion_tokens == 8 and not chunks[-1].choices
  chunks = list(client.chat.completions.create(model=folder.name, messages=MESSAGES, temperature=0, max_tokens=8,
                                               **usage))
  assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == llm.chat(
    MESSAGES, SamplingParams(**GREEDY))[0].outputs[0].text
  assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].usage.completion_tokens == 8


def test_first_event_arrives_before_later_tokens_are_generated(limited, print_at_end):
  client, times, before = limited.client(api_key="secret"), [], limited.metrics()["generation_tokens_total"]
  fields = {**ENDLESS, "extra_body": {"ignore_eos": True}}
  del fields["ignore_eos"]
  with client.completions.create(model="mine", stream=True, **fields) as chunks:
    for n, _ in enumerate(chunks):
      times.append(time.perf_counter())
      if n == 0: first = limited.metrics()
      if n == 200: break
    last = limited.metrics()
  assert first["num_requests_running"] == 1 and first["generation_tokens_total"] - before < 30000
  assert last["num_requests_running"] == 1 and last["generation_tokens_total"] > first["generation_tokens_total"]
  gaps = sorted(1e3 * (b - a) for a, b in zip(times, times[1:], strict=False))
  print_at_end(f"gaps between events: median {gaps[100]:.2f} ms, 99% {gaps[197]:.2f} ms, max {gaps[-1]:.2f} ms")
  wait_until(lambda: limited.metrics()["num_requests_running"] == 0, "closing the stream aborts the request")


def random_body(rng, llm):
  """Return a path and a body with random fields."""
  words = ["the", "cat", "sat", "on", "mat", "and", "dog", "ran", "to", "a", "red", "house"]
  texts = [" ".join(rng.choices(words, k=rng.randint(1, 6))) for _ in range(2)]
  body = {"seed": rng.randrange(2**31), "max_tokens": rng.randint(1, 16), "temperature": rng.choice([0, 0.7, 1.5])}
  options = {"n": rng.randint(2, 3), "top_p": 0.8, "top_k": 5, "min_p": 0.05, "stop": rng.choices("aeths", k=2),
             "include_stop_str_in_output": True, "ignore_eos": True, "stop_token_ids": [rng.randrange(259, 320)],
             "skip_special_tokens": False, "logit_bias": {"198": 5, "172": 7, "233": 3}}   # bytes of letters
  body |= {k: v for k, v in options.items() if rng.random() < 0.25}
  if rng.random() < 0.4: return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": texts[0]}]}
  ids = [ids_of(llm, x) for x in texts]
  if rng.random() < 0.2: body["echo"] = True
  return rng.choice(["/v1/completions", "/generate"]), body | {"prompt": rng.choice([texts[0], texts, ids[0], ids])}


def test_streams_of_100_random_concurrent_requests_equal_complete_responses(server, llm):
  def both(seed):
    path, body = random_body(random.Random(seed), llm)
    whole, chunks = post(server, path, body).json(), stream(server, path, body)
    assert chunks[-1] == "[DONE]", (body, chunks)
    whole = {c["index"]: (c.get("text", c.get("message", {}).get("content")), c["finish_reason"], c["stop_reason"])
             for c in whole["choices"]}
    streamed = dict.fromkeys(whole, ("", None, None))
    for e in chunks[:-1]:
      c, = e["choices"]
      text, reason, stop = streamed[c["index"]]
      assert reason is None, "output after finish_reason"
      text += c["text"] if "text" in c else c["delta"].get("content") or ""
      streamed[c["index"]] = text, c["finish_reason"], c.get("stop_reason")
    assert streamed == whole, (path, body)
    return sorted(whole.items())
  with ThreadPoolExecutor(32) as pool: answers = list(pool.map(both, range(100)))
  texts = [text for answer in answers for _, (text, *_) in answer]
  reasons = {c[1:] for answer in answers for _, c in answer}
  assert len({*texts}) > 100 and len(reasons) > 5 and any("\xe9" in t for t in texts), "outputs must vary"


# Log probabilities

def check_logprobs(actual, expected_logprobs, k):
  """Compare a completion's logprobs with LLM's: a list of {token id: Logprob} or None, one per token."""
  assert set(actual) == {"tokens", "token_logprobs", "top_logprobs", "text_offset"}
  assert len(actual["tokens"]) == len(actual["token_logprobs"]) == len(actual["top_logprobs"]) == len(expected_logprobs)
  for token, own, best, options in zip(*(actual[x] for x in ("tokens", "token_logprobs", "top_logprobs")),
                                       expected_logprobs, strict=True):
    if options is None:
      assert own is None and best is None
      continue
    sampled = next(iter(options.values()))
    assert own == pytest.approx(sampled.logprob, abs=1e-4) and token.strip() == sampled.decoded_token.strip()
    for text, logprob in best.items():   # two tokens may have the same text
      assert logprob in [pytest.approx(x.logprob, abs=1e-4) for x in options.values()
                         if x.decoded_token == text.strip()]
    assert token in best and 1 <= len(best) <= k + 1 and len(best) >= len({x.decoded_token for x in options.values()})


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("streamed", [False, True])
def test_completion_logprobs_equal_generate(server, llm, k, streamed):
  fields = {"prompt": "the cat", "seed": 2, "max_tokens": 6, "logprobs": k, "temperature": 1.0}
  output = expected(llm, **fields).outputs[0]
  if streamed:
    parts = [e["choices"][0]["logprobs"] for e in stream(server, "/v1/completions", fields)[:-1]]
    logprobs = {key: [x for part in parts if part for x in part[key]] for key in parts[0]}
  else: logprobs = post(server, "/v1/completions", fields).json()["choices"][0]["logprobs"]
  check_logprobs(logprobs, output.logprobs, k)
  offsets = logprobs["text_offset"]
  assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] < len(output.text)
  for token, a, b in zip(logprobs["tokens"], offsets, [*offsets[1:], len(output.text)], strict=True):
    assert output.text[a:b].strip() == token.strip(), "the offset must point to the token's text"


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_with_logprobs_includes_prompt_logprobs(server, llm, streamed):
  fields = {"prompt": "the cat sat", "temperature": 0.0, "max_tokens": 4, "logprobs": 2}
  output = expected(llm, **fields, prompt_logprobs=2)
  if streamed:
    parts = [e["choices"][0]["logprobs"] for e in stream(server, "/v1/completions", {**fields, "echo": True})[:-1]]
    logprobs = {key: [x for part in parts if part for x in part[key]] for key in parts[0]}
  else: logprobs = post(server, "/v1/completions", {**fields, "echo": True}).json()["choices"][0]["logprobs"]
  assert len(logprobs["tokens"]) == len(output.prompt_token_ids) + 4 and output.prompt_logprobs[0] is None
  check_logprobs(logprobs, [*output.prompt_logprobs, *output.outputs[0].logprobs], 2)
  assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("streamed", [False, True])
def test_chat_logprobs_equal_llm_chat(client, folder, llm, k, streamed):
  output = llm.chat(MESSAGES, SamplingParams(**GREEDY, logprobs=k))[0].outputs[0]
  options = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": k}
  if streamed:
    chunks = client.chat.completions.create(model=folder.name, stream=True, **options)
    content = [x for c in chunks if c.choices[0].logprobs for x in c.choices[0].logprobs.content]
  else: content = client.chat.completions.create(model=folder.name, **options).choices[0].logprobs.content
  assert len(content) == len(output.logprobs) == 8
  for token, expected in zip(content, output.logprobs, strict=True):
    sampled, *_ = best = list(expected.values())
    assert token.token.strip() == sampled.decoded_token.strip()
    assert token.logprob == pytest.approx(sampled.logprob, abs=1e-4)
    assert bytes(token.bytes).decode() == token.token
    assert [x.token.strip() for x in token.top_logprobs] == [x.decoded_token.strip() for x in best[:k]]
    assert [x.logprob for x in token.top_logprobs] == pytest.approx([x.logprob for x in best[:k]], abs=1e-4)
    assert all(bytes(x.bytes).decode() == x.token for x in token.top_logprobs)


def test_chat_logprobs_include_sampled_token_outside_top_logprobs(server, llm):
  fields = {"seed": 4, "max_tokens": 12, "temperature": 3.0}
  output = llm.chat(MESSAGES, SamplingParams(**fields, logprobs=2))[0].outputs[0]
  body = {"messages": MESSAGES, **fields, "logprobs": True, "top_logprobs": 2}
  content = post(server, "/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
  assert any(next(iter(x.values())).rank > 2 for x in output.logprobs), "sampling must pick a token of lower rank"
  for token, expected in zip(content, output.logprobs, strict=True):
    sampled, best = next(iter(expected.values())), sorted(expected.values(), key=lambda x: -x.logprob)[:2]
    assert token["logprob"] == pytest.approx(sampled.logprob, abs=1e-4)
    assert [x["logprob"] for x in token["top_logprobs"]] == pytest.approx([x.logprob for x in best], abs=1e-4)


# Usage

@pytest.mark.parametrize("streamed", [False, True])
def test_usage_counts_prefix_cache_hits(server, streamed):
  prompt = f"one two three four five six {'seven' if streamed else 'eight'} nine"
  body = {"prompt": prompt, "max_tokens": 2}

  def usage():
    if not streamed: return post(server, "/v1/completions", body).json()["usage"]
    return stream(server, "/v1/completions", {**body, "stream_options": {"include_usage": True}})[-2]["usage"]
  first, second = usage(), usage()
  assert second["prompt_tokens_details"]["cached_tokens"] == (second["prompt_tokens"] - 1) // 4 * 4 >= 8
  assert first["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens_details"]["cached_tokens"]


# Metrics

def increases(server, ask):
  """Return the increase of each metric caused by `ask`."""
  before = server.metrics()
  ask()
  return {name: value - before.get(name, 0) for name, value in server.metrics().items()}


@pytest.mark.parametrize("streamed", [False, True])
def test_metrics_count_finish_reasons_per_choice_and_times_per_prompt(server, streamed):
  body = {"prompt": ["the cat", "hello"], "n": 3, "max_tokens": 4, "ignore_eos": True, "seed": 1}
  increase = increases(server, lambda: (stream if streamed else post)(server, "/v1/completions", body))
  assert increase["request_success_total{finished_reason=length}"] == 6
  times = [f"{name}_seconds" for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time",
                                          "request_prefill_time", "request_decode_time")]
  for name in (*times, "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
               "request_params_max_tokens", "request_params_n"):
    assert increase[f"{name}_count"] == 2, name
  latency, queue, prefill, decode = [increase[f"{name}_sum"] for name in times[1:]]
  assert min(queue, prefill, decode) > 0 and latency == pytest.approx(queue + prefill + decode)
  assert increase["request_inference_time_seconds_sum"] == pytest.approx(prefill + decode)
  assert increase["request_params_n_sum"] == 6
  assert increase["generation_tokens_total"] == increase["request_generation_tokens_sum"] == 24
  assert increase["prompt_tokens_total"] == increase["request_prompt_tokens_sum"] > 0
  assert increase["request_params_max_tokens_sum"] == 8


def test_iteration_tokens_histogram_counts_tokens_of_each_step(server):
  body = {"prompt": [[3, 1, 4, 1, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5]], "max_tokens": 5, "ignore_eos": True}
  increase = increases(server, lambda: post(server, "/v1/completions", body))
  cached = increase["prefix_cache_hits_total"]
  assert increase["iteration_tokens_total_sum"] == 6 + 9 + 2 * (5 - 1) - cached   # the last tokens are not computed
  steps = increase["iteration_tokens_total_count"]
  of_1, of_8, of_any = [increase[f"iteration_tokens_total_bucket{{le={size}}}"] for size in ("1.0", "8.0", "+Inf")]
  assert 0 <= of_1 < of_8 == of_any == steps >= 5


def test_cache_config_info_has_vllm_labels(server):
  line, = re.findall("^tinyvllm:cache_config_info{(.*)} 1.0$", server.get("/metrics").text, re.M)
  assert {'block_size="4"', 'cache_dtype="auto"', 'enable_prefix_caching="True"'} <= {*line.split(",")}
  assert re.search(r'num_gpu_blocks="\d+"', line)


def test_every_metric_has_a_help_text(server):
  help_texts = dict(re.findall(r"^# HELP tinyvllm:(\w+) (.*)$", server.get("/metrics").text, re.M))
  assert "request_decode_time_seconds" in help_texts and len(help_texts) > 15
  for name, text in help_texts.items(): assert " " in text and name not in text, name


# Formats

@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_response_format_json_object_returns_an_object(server, llm, path):
  closing = next(i for i in range(320) if llm.tokenizer.decode([i], False) == "}")
  start = {"prompt": "the cat"} if path == "/v1/completions" else {"messages": MESSAGES}
  for seed in range(3):
    body = {**start, "response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 40,
            "logit_bias": {str(closing): 8}}
    choice = post(server, path, body).json()["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert choice["finish_reason"] == "stop" and isinstance(json.loads(text), dict)


# Fields of SamplingParams

def cases(llm, prompt):
  """Return {field: (fields with it, the same without it)}. The two must produce different outputs."""
  plain, sampled = {"temperature": 0.0, "max_tokens": 12}, {"temperature": 1.5, "seed": 3, "max_tokens": 8}
  output = expected(llm, prompt, **plain).outputs[0]
  ids, text = output.token_ids, output.text
  bad_words = [{"bad_words": [text[i:i + 2].strip()]} for i in range(len(text) - 1) if text[i:i + 2].strip()]
  end = {**plain, "logit_bias": {"2": 100}}
  return {
    "n": ({**sampled, "n": 3}, sampled), "max_tokens": ({**plain, "max_tokens": 5}, plain),
    "min_tokens": ({**plain, "stop_token_ids": ids[2:3], "min_tokens": 9}, {**plain, "stop_token_ids": ids[2:3]}),
    "temperature": (sampled, {**sampled, "temperature": 0.0}), "top_k": ({**sampled, "top_k": 1}, sampled),
    "top_p": ({**sampled, "top_p": 1e-6}, sampled), "min_p": ({**sampled, "min_p": 1.0}, sampled),
    "seed": ({**sampled, "seed": 4}, sampled), "stop": ({**plain, "stop": text[3:5]}, plain),
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
    "bad_words": next(({**plain, **x}, plain) for x in bad_words if expected(llm, prompt, **plain, **x).outputs[0].text
                      != text),
    "structured_outputs": ({**plain, "structured_outputs": {"regex": "[xyz]{3}"}}, plain),
  }


def test_every_sampling_params_field_affects_server_output(server, llm):
  fields_by_name = cases(llm, "the cat")
  other_fields = {"logprobs", "prompt_logprobs"}   # have their own tests
  assert set(fields_by_name) | other_fields == {f.name for f in dataclasses.fields(SamplingParams)}
  ids = post(server, "/tokenize", {"messages": MESSAGES[-1:]}).json()["tokens"]
  for name, (fields, base_fields) in fields_by_name.items():
    outputs, baseline = (rows_of(expected(llm, "the cat", **x).outputs) for x in (fields, base_fields))
    assert outputs != baseline, f"{name} must change the output"
    choices = post(server, "/v1/completions", {"prompt": "the cat", **fields}).json()["choices"]
    assert [(i, c["index"], c["text"], c["finish_reason"], c["stop_reason"])
            for i, c in enumerate(choices)] == outputs, name
    # Chat must equal the completion of the templated token ids
    choices = post(server, "/v1/chat/completions", {"messages": MESSAGES[-1:], **fields}).json()["choices"]
    same = post(server, "/v1/completions", {"prompt": ids, **fields}).json()["choices"]
    assert [(c["message"]["content"], c["finish_reason"], c["stop_reason"]) for c in choices] == [
      (c["text"], c["finish_reason"], c["stop_reason"]) for c in same], name


def test_openai_client_sends_vllm_fields_as_extra_body(client, folder, llm):
  token = expected(llm, "the cat", **GREEDY).outputs[0].token_ids[3]
  extra = {"repetition_penalty": 50.0, "stop_token_ids": [token], "include_stop_str_in_output": True}
  fields = {"temperature": 0.0, "max_tokens": 12}
  answer = client.completions.create(model=folder.name, prompt="the cat", **fields, extra_body=extra)
  assert rows_of(answer.choices) == rows_of(expected(llm, "the cat", **fields, **extra).outputs)
  answer = client.chat.completions.create(model=folder.name, messages=MESSAGES[-1:], **fields, extra_body=extra)
  assert rows_of(answer.choices) == rows_of(llm.chat(MESSAGES[-1:], SamplingParams(**fields, **extra))[0].outputs)


def test_prompt_logprobs_request_skips_the_prefix_cache(server):
  body = {"prompt": "there is a way, they say", "max_tokens": 1}
  cached = [post(server, "/v1/completions", {**body, **x}).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for x in ({}, {}, {"prompt_logprobs": 1})]
  assert cached[1] > 4 and cached[2] == 0


# Other routes

def test_tools_without_template_support_are_400(bundled_server):
  hello = {"role": "user", "content": "hello"}
  tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
  with pytest.raises(openai.BadRequestError, match="tools"):
    bundled_server.client().chat.completions.create(model="tinyvllm", messages=[hello], tools=[tool])


def test_models_lists_the_served_model(client, server, folder):
  model, = client.models.list().data
  assert (model.id, model.object, model.max_model_len) == (folder.name, "model", 128)
  assert model.owned_by and model.created
  assert server.get("/v1/models").json()["object"] == "list"


def test_bundled_model_is_named_tinyvllm(bundled_server):
  assert [x["id"] for x in bundled_server.get("/v1/models").json()["data"]] == ["tinyvllm"]


def test_health_version_and_chat_page_return_200(server):
  assert server.get("/health").status_code == 200 and server.get("/health").json() == {}
  assert server.get("/version").json() == {"version": tinyvllm.__version__}
  page = server.get("/")
  assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
  assert "<html" in page.text.lower()
  assert page.headers["content-security-policy"] == "frame-ancestors 'none'", "ignored in a meta element"


def test_tokenize_and_detokenize_equal_the_tokenizer(server, llm):
  text = "hello world \xe9 \U0001f600"
  ids, bare = ids_of(llm, text), llm.tokenizer.encode(text, False)
  assert post(server, "/tokenize", {"prompt": text}).json() == {"count": len(ids), "max_model_len": 128, "tokens": ids,
                                                                "token_strs": None}
  assert post(server, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"] == bare != ids
  tokens = post(server, "/tokenize", {"messages": MESSAGES}).json()["tokens"]
  assert tokens == chat_prompt(llm, MESSAGES)["prompt_token_ids"]
  assert post(server, "/detokenize", {"tokens": bare}).json() == {"prompt": text}
  assert "319" in error_of(post(server, "/detokenize", {"tokens": [320]}), 400)["message"]


def test_openapi_schema_has_every_route_and_field(server):
  schema = server.get("/openapi.json").json()
  assert {"/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/health",
          "/ping", "/load", "/version", "/metrics"} <= set(schema["paths"])
  text = json.dumps(schema)
  for name in [*(f.name for f in dataclasses.fields(SamplingParams)), "stream_options", "include_usage", "priority",
               "user", "echo", "response_format", "top_logprobs", "max_completion_tokens", "add_special_tokens"]:
    assert f'"{name}"' in text, name


# Errors

COMPLETIONS = [
  ({"temperature": -1}, "temperature"), ({"max_tokens": "x"}, "max_tokens"),
  ({"max_tokens": 0}, "max_tokens"), ({"n": 0}, "n"), ({"n": 1.5}, "n"), ({"stream": "maybe"}, "stream"),
  ({"prompt": ""}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [[]]}, "prompt"),
  ({"prompt": ["a", 1]}, "prompt"),
  ({"prompt": None}, "prompt"), ({"prompt": {"a": 1}}, "prompt"), ({"prompt": [320]}, "prompt"),
  ({"logit_bias": {"320": 1}}, "logit_bias"), ({"logit_bias": {"x": 1}}, "logit_bias"), ({"logprobs": 21}, "logprobs"),
  ({"stream_options": {"include_usage": True}}, "stream_options"), ({"suffix": "a"}, "suffix"),
  ({"stream": True, "stream_options": {"include_usage": 5}}, "include_usage"), ({"priority": 1}, "priority"),
  ({"stop": [""]}, "stop"),
  ({"response_format": {"type": "xml"}}, "response_format"),
  ({"response_format": {"type": "json_schema"}}, "json_schema"),
  ({"structured_outputs": {"regex": "(["}}, "structured_outputs"), ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
  ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "structured_outputs"), ({"seed": 2**70}, "seed"),
  ({"top_p": 0}, "top_p"), ({"stop_token_ids": [-1]}, "stop_token_ids"),
  ({"allowed_token_ids": []}, "allowed_token_ids"),
  ({"messages": ["a"]}, "messages"), ({"echo": "yes?"}, "echo"), ({"logprobs": True}, "logprobs"),
]
CHATS = [
  ({"messages": []}, "messages"), ({"messages": "hello"}, "messages"), ({"messages": None}, "messages"),
  ({"messages": [{"content": "a"}]}, "role"), ({"messages": [{"role": "user"}]}, "content"),
  ({"prompt": "a"}, "prompt"),
  ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, "content"),
  ({"temperature": 101}, "temperature"), ({"top_logprobs": 3}, "logprobs"),
  ({"logprobs": True, "top_logprobs": 21}, "logprobs"),
  ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"), ({"max_completion_tokens": 0}, "max_"),
  ({"logprobs": 2}, "logprobs"), ({"echo": 1}, "echo"),
  ({"tool_choice": "required"}, "tool_choice"), ({"best_of": 2}, "best_of"), ({"store": "yes"}, "store"),
  ({"max_tokens": -2}, "max_tokens"),
  ({"messages": [{"role": "user", "content": None}]}, "content"),
  ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"$defs": [1]}}}],
    "tool_choice": "required"}, "tools"),
]
# Fields that clients send by default
HARMLESS = {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto", "reasoning_effort": "low",
            "parallel_tool_calls": True, "tools": [], "tool_choice": "auto", "best_of": 1, "chat_template_kwargs": {}}


@pytest.mark.parametrize("change,message", COMPLETIONS, ids=lambda x: json.dumps(x)[:50])
@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_invalid_completions_field_is_400_and_named(server, path, change, message):
  error = error_of(post(server, path, {"prompt": "the cat", "max_tokens": 2, **change}), 400)
  assert message in error["message"] and (error["param"] is None or error["param"] in change), error


@pytest.mark.parametrize("change,message", CHATS, ids=lambda x: json.dumps(x)[:50])
def test_invalid_chat_field_is_400_and_named(server, change, message):
  error = error_of(post(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **change}), 400)
  assert message in error["message"] or message in (error["param"] or ""), error


def test_assistant_message_may_have_null_content(server):
  def choices_for(content): return post(server, "/v1/chat/completions", {"messages": [
    MESSAGES[1], {"role": "assistant", "content": content}, MESSAGES[1]], **GREEDY}).json()["choices"]
  assert choices_for(None) == choices_for("")


@pytest.mark.parametrize("path,body", [("/v1/chat/completions", {"messages": MESSAGES}),
                                       ("/generate", {"prompt": "a"})])
def test_max_tokens_minus_1_fills_the_context(server, path, body):
  usage = post(server, path, {**body, "temperature": 0, "ignore_eos": True, "max_tokens": -1}).json()["usage"]
  assert usage["total_tokens"] == 128


def test_model_is_retrieved_by_its_name(server, client, folder):
  assert client.models.retrieve(folder.name).id == folder.name
  with pytest.raises(openai.NotFoundError): client.models.retrieve("other")


@pytest.mark.parametrize("field", ["top_p", "max_tokens"])
def test_error_param_names_the_invalid_field(server, field):
  assert field in error_of(post(server, "/v1/completions", {"prompt": "a", field: "x"}), 400)["param"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("content", [b"{", b"", b"[1]", b"null", b'"a"', b'{"prompt": NaN}', b"\xff\xfe", b"[" * 3000,
                                     b'{"prompt": "a", "model": 1, "seed": 1' + b"0" * 3000 + b"}"],
                         ids=lambda x: repr(x[:12]))
def test_body_other_than_json_object_is_400(server, path, content):
  error_of(post(server, path, content=content, headers={"Content-Type": "application/json"}), 400)


def test_non_json_body_or_content_type_error_names_the_cause(server):
  def message_for(content, kind): return error_of(post(server, "/v1/completions", content=content, headers={
    "Content-Type": kind} if kind else {}), 400)["message"]
  assert "JSON" in message_for(b'{"prompt": ', "application/json")
  for kind in ("text/plain", "application/x-www-form-urlencoded"):   # curl -d sends the second by default
    assert "Content-Type: application/json" in message_for(b'{"prompt": "a"}', kind)
    assert kind in message_for(b'{"prompt": "a"}', kind)
  assert "no Content-Type: send the header Content-Type: application/json" in message_for(b'{"prompt": "a"}', None)


@pytest.mark.parametrize("path,body", [
  ("/v1/completions", {"prompt": "\ud800"}), ("/v1/completions", {"prompt": "a", "bad_words": ["\ud800"]}),
  ("/v1/chat/completions", {"messages": [{"role": "user", "content": "\ud800"}]}),
  ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "\ud800"}}), ("/tokenize", {"prompt": "\ud800"}),
  ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]})],
  ids=lambda x: json.dumps(x)[:50])
def test_unpaired_surrogate_is_400(server, path, body):
  error_of(post(server, path, content=json.dumps(body), headers={"Content-Type": "application/json"}), 400)


def test_too_long_prompt_is_400_and_runs_nothing(server, client, folder):
  before = server.metrics()
  message = r"This model's maximum context length is 128 tokens\. However, "
  with pytest.raises(openai.BadRequestError, match=message) as e:
    client.completions.create(model=folder.name, prompt=[[5] * 3, [5] * 128])
  assert e.value.status_code == e.value.body["code"] == 400 and e.value.type == "BadRequestError"
  after = server.metrics()
  assert after["generation_tokens_total"] == before["generation_tokens_total"] and not after["num_requests_waiting"]
  with pytest.raises(openai.BadRequestError, match="maximum context length is 128 tokens"):
    client.chat.completions.create(model=folder.name, messages=[{"role": "user", "content": "the cat " * 100}])
  assert client.completions.create(model=folder.name, prompt=[5] * 127).usage.completion_tokens == 1


LONG = "a" * 10**6


@pytest.mark.parametrize("path,body", [
  ("/v1/completions", {"prompt": LONG}), ("/tokenize", {"prompt": LONG}),
  ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]})], ids=lambda x: str(x)[:30])
def test_text_with_too_many_characters_is_400_before_encoding(server, path, body):
  assert "at most 768 characters. However, the prompt has 1000" in error_of(post(server, path, body), 400)["message"]


@pytest.mark.parametrize("fields,message", [
  ({"stop": ["a"] * 129}, "stop has 129 entries: use at most 128"),
  ({"stop": "a" * 20000}, "stop has 20000 characters: use at most 16384"),
  ({"bad_words": ["a"] * 1025}, "bad_words has 1025 entries: use at most 1024"),
  ({"stop_token_ids": [1] * 1025}, "stop_token_ids has 1025 entries"),
  ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias has 1025 entries"),
  ({"structured_outputs": {"regex": "ab" * 2**18 + "c"}}, "regex has 524289 characters: use at most 524288"),
  ({"structured_outputs": {"choice": ["choice"] * 10**5}}, "choice has"),
], ids=lambda x: str(x)[:30])
def test_field_of_hostile_size_is_400_and_names_its_limit(server, fields, message):
  assert message in error_of(post(server, "/v1/completions", {"prompt": "the cat", **fields}), 400)["message"]


def test_invalid_stream_request_is_400_before_any_event(client, folder):
  with pytest.raises(openai.BadRequestError, match="temperature"):
    client.completions.create(model=folder.name, prompt="a", temperature=-1, stream=True)


def test_unknown_model_and_unknown_route_are_404(server, client):
  with pytest.raises(openai.NotFoundError) as e: client.completions.create(model="other", prompt="a")
  assert e.value.body["message"] == "The model `other` does not exist." and e.value.param == "model"
  assert e.value.body["code"] == 404 and e.value.type == "NotFoundError"
  with pytest.raises(openai.NotFoundError): client.chat.completions.create(model="other", messages=MESSAGES)
  with pytest.raises(openai.NotFoundError): client.embeddings.create(model="other", input="a")
  error_of(post(server, "/nowhere", {}), 404)
  error_of(post(server, "/generate", {"model": "other", "prompt": "a"}), 404)


def test_wrong_method_is_405(server):
  for path in ("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"):
    error_of(server.get(path), 405)
  error_of(post(server, "/v1/models", {}), 405)


def test_missing_or_wrong_api_key_is_401(limited):
  for key in ("none", "secret2", "secre", "SECRET"):
    with pytest.raises(openai.AuthenticationError) as e: limited.client(api_key=key).models.list()
    assert e.value.status_code == e.value.body["code"] == 401 and e.value.type == "UnauthorizedError"
  for headers in ({}, {"Authorization": "secret"}, {"Authorization": "Basic secret"}, {"Authorization": ""},
                  {"Authorization": b"Bearer \xe9"}, {"Authorization": "Bearer"}, {"X-API-Key": "secret2"},
                  {"X-API-Key": ""}, {"X-API-Key": "Bearer secret"}, {"X-API-Key": b"\xe9"}):
    for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
      error_of(post(limited, path, {"prompt": "a"}, headers=headers), 401)
    error_of(limited.get("/v1/models", headers=headers), 401)
  for path in ("/", "/health", "/version", "/metrics", "/openapi.json"):
    assert limited.get(path).status_code == 200
  assert [x.id for x in limited.client(api_key="secret").models.list()] == ["mine"]
  assert limited.client(api_key="secret").completions.create(model="mine", prompt="a", max_tokens=1).model == "mine"


@pytest.mark.parametrize("headers", [{"Authorization": "bearer secret"}, {"Authorization": "BEARER secret"},
                                     {"x-api-key": "secret"}, {"x-api-key": "secret", "Authorization": "Bearer other"}],
                         ids=str)
def test_api_key_in_any_accepted_header_is_200(limited, headers):
  """Anthropic's clients send x-api-key."""
  assert limited.get("/v1/models", headers=headers).status_code == 200


def test_api_key_with_non_ascii_characters_is_compared_as_utf8(folder, capsys):
  key = "schl\xfcssel\u20ac"
  with LocalServer(folder, *flags(**SMALL), "--api-key", key) as server:
    for headers in ({"Authorization": f"Bearer {key}".encode()}, {"x-api-key": key.encode()}):
      assert server.get("/v1/models", headers=headers).status_code == 200
    for headers in ({"Authorization": b"Bearer schl\xfcssel"}, {"x-api-key": "schluessel"}):
      error_of(server.get("/v1/models", headers=headers), 401)
    assert main(["generate", "the cat", "--url", server.url, "--api-key", key, "--max-tokens", "2"]) == 0
  assert capsys.readouterr().out.startswith("the cat")


def test_headers_over_64_kib_are_431_and_close_the_connection(server):
  for path, size in (("/v1/models", 70_000), ("/health", 2**18)):
    response = server.get(path, headers={"X-Padding": "a" * size})
    assert "65536" in error_of(response, 431)["message"] and response.headers["connection"] == "close"
  error_of(server.get("/v1/models", headers={f"X-{i}": "a" * 1000 for i in range(70)}), 431)
  assert server.get("/v1/models", headers={"X-Padding": "a" * 60_000}).status_code == 200


def test_body_over_limit_is_413_with_or_without_content_length(limited):
  body = json.dumps({"prompt": "the cat", "max_tokens": 1}).encode()
  valid, too_large = body + b" " * (4096 - len(body)), body + b" " * (4097 - len(body))
  headers = {**KEY, "Content-Type": "application/json"}

  def pieces(x): yield from (x[i:i + 1000] for i in range(0, len(x), 1000))
  for send in (bytes, pieces):   # with a Content-Length; in chunks
    assert post(limited, "/v1/completions", content=send(valid), headers=headers).status_code == 200
    error_of(post(limited, "/v1/completions", content=send(too_large), headers=headers), 413)
  with pytest.raises(openai.APIStatusError) as e:
    limited.client(api_key="secret").completions.create(model="mine", prompt="a" * 5000)
  assert e.value.status_code == e.value.body["code"] == 413 and e.value.type == "RequestEntityTooLargeError"


def test_endless_chunked_body_is_413_before_its_end(limited):
  connection = http.client.HTTPConnection("127.0.0.1", limited.port, timeout=30)
  connection.putrequest("POST", "/v1/completions")
  for name, value in {**KEY, "Content-Type": "application/json", "Transfer-Encoding": "chunked"}.items():
    connection.putheader(name, value)
  connection.endheaders()
  with contextlib.suppress(ConnectionError):   # the server may stop reading
    for _ in range(64): connection.send(b"400\r\n" + b" " * 1024 + b"\r\n")
  assert connection.getresponse().status == 413, "before the last chunk is sent"
  connection.close()


def test_request_beyond_max_queue_is_429_with_retry_after(limited):
  client, body = limited.client(api_key="secret"), {"prompt": "the cat", "max_tokens": 3}
  with ThreadPoolExecutor(2) as pool:
    with running_request(limited):
      waiting = [pool.submit(post, limited, "/v1/completions", body, headers=KEY) for _ in range(2)]
      wait_until(lambda: limited.metrics()["num_requests_waiting"] == 2, "two wait")
      for streamed in (False, True):
        with pytest.raises(openai.RateLimitError) as e:
          client.completions.create(model="mine", stream=streamed, **body)
        assert e.value.body["code"] == e.value.status_code == 429 and e.value.type == "TooManyRequestsError"
        assert int(e.value.response.headers["retry-after"]) >= 1
      with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="mine", messages=MESSAGES)
      assert not any(x.done() for x in waiting)
    for x in waiting: assert x.result().json()["usage"]["completion_tokens"] == 3, "waiting requests must run"
  assert client.completions.create(model="mine", **body).usage.completion_tokens == 3


def test_prompt_list_longer_than_queue_is_429_and_runs_none(limited):
  before = limited.metrics()["generation_tokens_total"]
  error_of(post(limited, "/v1/completions", {"prompt": ["the cat"] * 9, "max_tokens": 2}, headers=KEY), 429)
  assert limited.metrics()["generation_tokens_total"] == before and not limited.metrics()["num_requests_waiting"]


def test_queue_limit_counts_each_sample(limited):
  def ask(n): return post(limited, "/v1/completions", {"prompt": "the cat", "max_tokens": 2, "n": n}, headers=KEY)
  assert len(ask(3).json()["choices"]) == 3, "one runs, two wait"
  assert "n=4" in error_of(ask(4), 400)["message"], "more than the server's limits ever allow"
  with ThreadPoolExecutor(1) as pool:
    with running_request(limited):
      error_of(ask(3), 429)
      assert limited.metrics()["num_requests_waiting"] == 0
      two = pool.submit(ask, 2)
      wait_until(lambda: limited.metrics()["num_requests_waiting"], "both wait")
      error_of(ask(1), 429)
      assert not two.done()
    assert len(two.result().json()["choices"]) == 2
  with running_request(limited, n=3): error_of(ask(1), 429)
  def num_unfinished(): return limited.metrics()["num_requests_running"] + limited.metrics()["num_requests_waiting"]
  wait_until(lambda: not num_unfinished(), "closing the stream aborts all three")
  assert len(ask(3).json()["choices"]) == 3, "aborted samples must not count"


def test_client_disconnect_aborts_its_request(limited):
  def num_aborted(): return limited.metrics()["request_success_total{finished_reason=abort}"]
  before = num_aborted() if "request_success_total{finished_reason=abort}" in limited.metrics() else 0
  with pytest.raises(httpx.ReadTimeout): post(limited, "/v1/completions", ENDLESS, headers=KEY, timeout=1)
  wait_until(lambda: limited.metrics()["num_requests_running"] == 0, "the request is aborted")
  wait_until(lambda: num_aborted() == before + 1, "the abort is counted")


# Faults

def break_server(patch):
  """Steps and requests that fail, by max_tokens; packages that are not installed."""
  launch, encode, make_request = Runner.launch, Tokenizer.encode, LLM.make_request

  def faulty(self, step):
    if any(s.params.max_tokens == 13 and s.num_generated > 2 for s, *_ in step.rows): raise RuntimeError("boom")
    if any(s.params.max_tokens == 14 for s, *_ in step.rows): raise SystemExit("bye")   # would end the engine's thread
    return launch(self, step)

  def broken_encode(self, text, *options):
    if text == "broken": raise ValueError("operands could not be broadcast")
    return encode(self, text, *options)

  def broken_request(self, request_id, prompt, params, priority):
    if params.max_tokens == 15: raise KeyError("absent")
    return make_request(self, request_id, prompt, params, priority)
  for name in ("llguidance", "jinja2.sandbox"): patch.setitem(sys.modules, name, None)   # not installed
  patch.setattr(Runner, "launch", faulty)
  patch.setattr(Tokenizer, "encode", broken_encode)
  patch.setattr(LLM, "make_request", broken_request)


@pytest.fixture(scope="module")
def faulty(long_folder):
  """A server with a 1.5 s request timeout whose steps fail for requests with max_tokens 13 (after 3 tokens) or 14."""
  options = flags(dtype="float32", max_num_seqs=1, max_num_batched_tokens=4, request_timeout=1.5)
  with LocalServer(long_folder, *options, before=break_server) as server:
    body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0}   # warm up
    wait_until(lambda: post(server, "/v1/completions", body).json()["usage"]["completion_tokens"] == 12, "warm-up")
    yield server


@pytest.mark.parametrize("size", [13, 14])
def test_failed_step_is_500_and_next_request_works(faulty, long_folder, size):
  client = faulty.client()
  options = {"model": long_folder.name, "prompt": "the cat", "max_tokens": size, "temperature": 0}
  with pytest.raises(openai.InternalServerError) as e: client.completions.create(**options)
  assert e.value.status_code == e.value.body["code"] == 500 and e.value.type == "InternalServerError"
  error_of(post(faulty, "/v1/completions", options), 500)
  assert client.completions.create(**{**options, "max_tokens": 12}).usage.completion_tokens == 12
  assert faulty.get("/health").status_code == 200


def test_failed_step_ends_a_stream_with_an_error_event(faulty, long_folder):
  *chunks, last = stream(faulty, "/v1/completions", {"prompt": "the cat", "max_tokens": 13, "temperature": 0})
  assert chunks and all(e["choices"][0]["finish_reason"] is None for e in chunks)
  assert set(last) == {"error"} and last["error"]["code"] == 500 and last["error"]["type"] == "InternalServerError"
  assert set(last["error"]) == {"message", "type", "param", "code"}
  with pytest.raises(openai.APIError):
    list(faulty.client().completions.create(model=long_folder.name, prompt="the cat", max_tokens=13, stream=True,
                                            temperature=0))


@pytest.mark.parametrize("path,fields,message", [
  ("/tokenize", {"prompt": "broken"}, "operands could not be broadcast"),
  ("/v1/completions", {"prompt": "broken"}, "operands could not be broadcast"),
  ("/v1/completions", {"prompt": "broken", "stream": True}, "operands could not be broadcast"),
  ("/v1/completions", {"prompt": "the cat", "max_tokens": 15}, "absent")],
  ids=["tokenize", "tokenizer", "tokenizer of a stream", "engine"])
def test_internal_error_is_500_with_a_logged_traceback(faulty, path, fields, message):
  before = len(faulty.log)
  error = error_of(post(faulty, path, fields), 500)
  assert message in error["message"] and error["param"] is None
  wait_until(lambda: message in faulty.log[before:], "the log has the exception")
  assert faulty.log[before:].count("Traceback") == 1, faulty.log[before:]
  body = {"prompt": "the cat", "max_tokens": 12, "temperature": 0}
  assert post(faulty, "/v1/completions", body).json()["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("path,fields,package,extra", [
  ("/v1/completions", {"prompt": "a", "structured_outputs": {"regex": "a"}}, "llguidance", "grammar"),
  ("/v1/completions", {"prompt": "a", "response_format": {"type": "json_object"}}, "llguidance", "grammar"),
  ("/v1/chat/completions", {"messages": MESSAGES}, "jinja2", "hf"),
  ("/tokenize", {"messages": MESSAGES}, "jinja2", "hf")],
  ids=["structured_outputs", "response_format", "chat", "tokenize"])
def test_missing_optional_package_is_501_and_logged(faulty, path, fields, package, extra):
  before = len(faulty.log)
  error = error_of(post(faulty, path, fields), 501)
  assert package in error["message"] and f"pip install 'tinyvllm[{extra}]'" in error["message"]
  wait_until(lambda: error["message"] in faulty.log[before:], "the log has the message")
  assert "Traceback" not in faulty.log[before:]


def test_request_timeout_finishes_request_with_abort(faulty):
  answer = post(faulty, "/v1/completions", ENDLESS).json()
  assert answer["choices"][0]["finish_reason"] == "abort" and answer["choices"][0]["text"]
  assert 0 < answer["usage"]["completion_tokens"] < 30000
  *chunks, last = stream(faulty, "/v1/completions", ENDLESS)
  assert last == "[DONE]"
  assert [e["choices"][0]["finish_reason"] for e in chunks] == [None] * (len(chunks) - 1) + ["abort"]
  assert faulty.metrics()["num_requests_running"] == 0


def test_request_timeout_aborts_running_and_waiting_prompts(faulty):
  """One prompt runs, the other waits."""
  answer = post(faulty, "/v1/completions", {**ENDLESS, "prompt": ["the cat", "hello"]}, timeout=30).json()
  assert [c["finish_reason"] for c in answer["choices"]] == ["abort"] * 2
  assert answer["choices"][0]["text"] and not answer["choices"][1]["text"]
  assert faulty.metrics()["num_requests_running"] == faulty.metrics()["num_requests_waiting"] == 0


# CORS

def preflight(server, origin):
  return server.request("OPTIONS", "/v1/completions", headers={
    "Origin": origin, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type"})


@pytest.mark.parametrize("words", [["[\"http://page.example\", \"http://b.example\"]"],
                                   ["http://b.example", "[\"http://page.example\"]"]], ids=["list", "word and list"])
def test_allowed_origins_accept_json_lists(folder, words):
  with LocalServer(folder, *flags(**SMALL), "--allowed-origins", *words, ready=False) as server:
    for page in ("http://page.example", "http://b.example"):
      assert preflight(server, page).headers["access-control-allow-origin"] == page
    assert "access-control-allow-origin" not in preflight(server, "http://other.example").headers


def test_cors_allows_only_the_allowed_origins(server, limited):
  name, page, other = "access-control-allow-origin", "http://page.example", "http://other.example"
  assert name not in preflight(server, page).headers
  assert name not in post(server, "/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"Origin": page}).headers
  assert preflight(limited, page).status_code == 200, "browsers send preflights without the key"
  headers = preflight(limited, page).headers
  assert headers[name] == page and name not in preflight(limited, other).headers
  allowed_headers = {x.strip().lower() for x in headers["access-control-allow-headers"].split(",")}
  assert allowed_headers >= {"authorization", "content-type"}
  for origin in (page, other):
    for key in (KEY, {}):   # pages must be able to read errors, too
      response = post(limited, "/v1/completions", {"prompt": "a", "max_tokens": 1}, headers={"Origin": origin, **key})
      assert response.status_code == (200 if key else 401) and (name in response.headers) == (origin == page)


# Startup and shutdown


def command(*arguments, stdin=""):
  return subprocess.run([sys.executable, "-m", "tinyvllm", *map(str, arguments)], input=stdin, capture_output=True,
                        text=True, check=False, timeout=120, cwd=Path(__file__).parents[2])


def test_invalid_serve_options_print_one_line_and_exit_1(server):
  cases = {"nowhere": ["/nowhere"], "max_num_seqs": ["--max-num-seqs", "0"], str(server.port): ["--port", server.port]}
  with ThreadPoolExecutor(2) as pool:
    runs = list(pool.map(lambda options: command("serve", "--port", "0", *options), cases.values()))
  for message, run in zip(cases, runs, strict=True):
    lines = [line for line in run.stderr.splitlines() if line.startswith("tinyvllm: ")]
    assert run.returncode == 1 and len(lines) == 1 and message in lines[0], run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("options", [["--port", "x"], ["--no-such"], ["a", "b"]], ids=str)
def test_unknown_command_line_arguments_exit_2(options):
  with pytest.raises(SystemExit) as e: main(["serve", *options])
  assert e.value.code == 2


# tinyvllm chat --url

def test_chat_command_with_url_equals_llm_chat(server, llm):
  run = command("chat", "--url", server.url, "--max-tokens", "5", stdin="hello\nis that all\n")
  messages, answers = [], []
  for line in ("hello", "is that all"):
    messages.append({"role": "user", "content": line})
    answers.append(llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=5))[0].outputs[0].text)
    messages.append({"role": "assistant", "content": answers[-1]})
  assert run.returncode == 0 and run.stdout.rstrip("\n") == "\n".join(answers), run.stderr


def test_chat_command_prints_server_errors_in_one_line(limited, server):
  run = command("chat", "--url", limited.url, stdin="hello\n")
  assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("tinyvllm: ") and "Traceback" not in run.stderr
  run = command("chat", "--url", server.url + "/", "--temperature", "-1", stdin="hello\n")
  assert run.returncode == 1 and "temperature" in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr
  run = command("chat", "--url", "http://127.0.0.1:9", stdin="hello\n")
  assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("tinyvllm: ") and "Traceback" not in run.stderr


@pytest.mark.parametrize("options,message", [
  (["--api-key", "k"], "--url"), (["--url", "U", "--block-size", "4"], "block_size"),
  (["--url", "U", "--model", "another"], "another")], ids=str)
def test_chat_flag_without_effect_with_url_is_an_error(server, options, message):
  run = command("chat", *(server.url if x == "U" else x for x in options), stdin="hello\n")
  assert run.returncode == 1 and message in run.stderr.splitlines()[-1] and "Traceback" not in run.stderr


def test_prompt_logprobs_are_in_each_choice_once(server, llm):
  params = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=2)
  expected = llm.generate("the cat", params)[0].prompt_logprobs
  expected = [entry and {str(i): x.rank for i, x in entry.items()} for entry in expected]
  body = {"prompt": "the cat", "max_tokens": 4, "temperature": 0, "prompt_logprobs": 2, "n": 2}
  def ranks(choice): return [entry and {i: x["rank"] for i, x in entry.items()} for entry in choice["prompt_logprobs"]]
  whole = post(server, "/v1/completions", body).json()["choices"]
  assert [ranks(choice) for choice in whole] == [expected] * 2 and expected[0] is None and len(expected) > 1
  *chunks, last = stream(server, "/v1/completions", body)
  parts = [event["choices"][0] for event in chunks]
  assert last == "[DONE]" and [ranks(part) for part in parts if "prompt_logprobs" in part] == [expected] * 2
  plain = post(server, "/v1/completions", {"prompt": "the cat", "max_tokens": 1}).json()["choices"][0]
  assert plain["prompt_logprobs"] is None


def test_api_key_is_read_from_the_environment(folder):
  with LocalServer(folder, *flags(**SMALL), environment={"TINYVLLM_API_KEY": "secret"}) as server:
    assert server.http().get("/v1/models").status_code == 401
    assert server.http().get("/v1/models", headers={"Authorization": "Bearer secret"}).status_code == 200


# The log

