"""Completions and chats over HTTP, whole and streamed, equal LLM.generate with the same model, prompt and fields."""
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.protocol import ENDLESS, GREEDY, MESSAGES, chat_prompt, expected_output, rows_of
from helpers.servers import stream, wait_until

from tinyvllm import SamplingParams


# Completions

@pytest.mark.parametrize("form", ["str", "[str]", "[int]", "[[int]]"])
@pytest.mark.parametrize("n", [1, 3])
def test_completions_of_every_prompt_form_equal_generate(client, folder, llm, form, n):
  texts = ["the cat sat", "hello world"]
  ids = [llm.tokenizer.encode(x) for x in texts]
  prompt = {"str": texts[0], "[str]": texts, "[int]": ids[0], "[[int]]": ids}[form]
  fields = {"seed": 7, "n": n, "max_tokens": 6}
  answer = client.completions.create(model=folder.name, prompt=prompt, **fields)
  outputs = [expected_output(llm, x, **fields) for x in (texts if form in ("[str]", "[[int]]") else texts[:1])]
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


@pytest.mark.parametrize("limit", [{}, {"max_tokens": -1}], ids=str)
@pytest.mark.parametrize("path,body", [("/v1/completions", {"prompt": "a"}), ("/generate", {"prompt": "a"}),
                                       ("/v1/chat/completions", {"messages": MESSAGES})])
def test_request_without_limit_fills_the_context(server, path, body, limit):
  answer = server.post(path, {"temperature": 0, "ignore_eos": True, **body, **limit}).json()
  assert answer["usage"]["total_tokens"] == 128 and answer["choices"][0]["finish_reason"] == "length"


# Streams

@pytest.mark.parametrize("path,body,kind,prefix", [
  ("/v1/completions", {"prompt": ["the cat", "hello"]}, "text_completion", "cmpl-"),
  ("/v1/chat/completions", {"messages": MESSAGES}, "chat.completion.chunk", "chatcmpl-")])
def test_stream_chunks_have_the_openai_format(server, folder, llm, path, body, kind, prefix):
  is_chat, fields = "messages" in body, {"n": 2, "seed": 3, "max_tokens": 5}
  prompts = [chat_prompt(llm, MESSAGES)] if is_chat else body["prompt"]
  *chunks, usage, last = stream(server, path, {**body, **fields, "stream_options": {"include_usage": True}})
  outputs = [expected_output(llm, x, **fields) for x in prompts]
  num_prompt, num_generated = sum(len(o.prompt_token_ids) for o in outputs), 10 * len(prompts)
  assert last == "[DONE]" and usage["choices"] == []
  assert usage["usage"].items() >= {"prompt_tokens": num_prompt, "completion_tokens": num_generated,
                                    "total_tokens": num_prompt + num_generated}.items()
  assert {(e["id"], e["object"], e["model"], e["created"]) for e in [*chunks, usage]} == {
    (chunks[0]["id"], kind, folder.name, chunks[0]["created"])} and chunks[0]["id"].startswith(prefix)
  for e in chunks: assert len(e["choices"]) == 1 and e["usage"] is None
  for i, c in enumerate(c for o in outputs for c in o.outputs):
    deltas = [e["choices"][0] for e in chunks if e["choices"][0]["index"] == i]
    if is_chat:
      first = deltas.pop(0)
      assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
      assert all(x["delta"].get("role") is None for x in deltas)
    assert "".join(x["delta"].get("content") or "" if is_chat else x["text"] for x in deltas) == c.text
    assert len(deltas) <= len(c.token_ids), "at most one event per token"
    assert [x["finish_reason"] for x in deltas] == [None] * (len(deltas) - 1) + ["length"]


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
  ids = [llm.tokenizer.encode(x) for x in texts]
  if rng.random() < 0.2: body["echo"] = True
  return rng.choice(["/v1/completions", "/generate"]), body | {"prompt": rng.choice([texts[0], texts, ids[0], ids])}


def test_streams_of_100_random_concurrent_requests_equal_complete_responses(server, llm):
  def both(seed):
    path, body = random_body(random.Random(seed), llm)
    whole, chunks = server.post(path, body).json(), stream(server, path, body)
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


@pytest.mark.parametrize("echo", [None, "text", "ids"])
@pytest.mark.parametrize("k", [None, 0, 3])
@pytest.mark.parametrize("streamed", [False, True])
def test_completion_text_and_logprobs_equal_generate(server, llm, k, streamed, echo):
  """As in vLLM, echo shows all tokens of a prompt of ids."""
  fields = {"seed": 2, "max_tokens": 6, "logprobs": k, "temperature": 1.0}
  output = expected_output(llm, "the cat sat", **fields, prompt_logprobs=k)
  body = {"prompt": output.prompt_token_ids if echo == "ids" else "the cat sat", "echo": bool(echo), **fields}
  if streamed: choices = [e["choices"][0] for e in stream(server, "/v1/completions", body)[:-1]]
  else: choices = server.post("/v1/completions", body).json()["choices"]
  text = {None: "", "text": "the cat sat", "ids": "<s>the cat sat"}[echo] + output.outputs[0].text
  assert "".join(c["text"] for c in choices) == text
  if k is None:
    assert not any(c["logprobs"] for c in choices)
    return
  parts = [c["logprobs"] for c in choices if c["logprobs"]]
  logprobs = {key: [x for part in parts for x in part[key]] for key in parts[0]}
  check_logprobs(logprobs, [*(output.prompt_logprobs if echo else []), *output.outputs[0].logprobs], k)
  offsets = logprobs["text_offset"]
  assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] < len(text)
  for token, a, b in zip(logprobs["tokens"], offsets, [*offsets[1:], len(text)], strict=True):
    assert text[a:b].strip() == ("" if echo == "text" and token == "<s>" else token.strip())


@pytest.mark.parametrize("fields,k", [
  (GREEDY, 0), (GREEDY, 3), ({"seed": 4, "max_tokens": 12, "temperature": 3.0}, 2)], ids=["0", "3", "other token"])
@pytest.mark.parametrize("streamed", [False, True])
def test_chat_logprobs_equal_llm_chat(client, folder, llm, fields, k, streamed):
  output = llm.chat(MESSAGES, SamplingParams(**fields, logprobs=k))[0].outputs[0]
  options = {"model": folder.name, "messages": MESSAGES, **fields, "logprobs": True, "top_logprobs": k}
  answer = client.chat.completions.create(stream=streamed, **options)
  parts = [chunk.choices[0].logprobs for chunk in (answer if streamed else [answer])]
  content = [x for part in parts if part for x in part.content]
  assert fields == GREEDY or any(next(iter(x.values())).rank > k for x in output.logprobs), "a token of lower rank"
  for token, expected in zip(content, output.logprobs, strict=True):
    sampled, best = next(iter(expected.values())), sorted(expected.values(), key=lambda x: -x.logprob)[:k]
    assert token.token.strip() == sampled.decoded_token.strip()
    assert token.logprob == pytest.approx(sampled.logprob, abs=1e-4)
    assert [x.token.strip() for x in token.top_logprobs] == [x.decoded_token.strip() for x in best]
    assert [x.logprob for x in token.top_logprobs] == pytest.approx([x.logprob for x in best], abs=1e-4)
  joined = b"".join(bytes(token.bytes) for token in content)
  assert joined.decode(errors="replace") == output.text, "clients join the bytes of characters in several tokens"


# Usage

@pytest.mark.parametrize("streamed", [False, True])
def test_usage_counts_prefix_cache_hits_except_with_prompt_logprobs(server, streamed):
  prompt = f"one two three four five six {'seven' if streamed else 'eight'} nine"
  body = {"prompt": prompt, "max_tokens": 2, **({"stream_options": {"include_usage": True}} if streamed else {})}

  def cached(**fields):
    if streamed: usage = stream(server, "/v1/completions", {**body, **fields})[-2]["usage"]
    else: usage = server.post("/v1/completions", {**body, **fields}).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], (usage["prompt_tokens"] - 1) // 4 * 4
  (first, most), second, with_logprobs = cached(), cached(), cached(prompt_logprobs=1)
  assert first < most >= 8 and second == (most, most) and with_logprobs[0] == 0
