"""Completions and chats over HTTP equal LLM.generate with the same model, prompt and fields. `answer` checks that the
chunks of a stream add up to each response."""
import random
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import ANY

import pytest
from helpers.protocol import (CHATS, COMPLETIONS, ENDLESS, GREEDY, MESSAGES, PROMPT_FIELDS, answer, chat_prompt,
                              expected_output, expected_rows, rows_of)
from helpers.servers import wait_until

from tinyvllm import SamplingParams


# Text

@pytest.mark.parametrize("path,kind,prefix", [
  (COMPLETIONS, "text_completion", "cmpl-"), ("/generate", "text_completion", "generate-"),
  (CHATS, "chat.completion", "chatcmpl-")])
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


def test_chat_with_openai_package_equals_llm_chat(client, folder, llm):
  output = llm.chat(MESSAGES, SamplingParams(**GREEDY))[0]
  chat = client.chat.completions.create(model=folder.name, messages=MESSAGES, temperature=0, max_completion_tokens=8)
  assert rows_of(chat.model_dump()) == [(0, output.outputs[0].text, "length", None)]
  assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (len(output.prompt_token_ids), 8)


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
  assert first["num_requests_running"] == last["num_requests_running"] == 1
  assert before + 30000 > first["generation_tokens_total"] < last["generation_tokens_total"]
  gaps = sorted(1e3 * (b - a) for a, b in zip(times, times[1:], strict=False))
  print_at_end(f"gaps between events: median {gaps[100]:.2f} ms, 99% {gaps[197]:.2f} ms, max {gaps[-1]:.2f} ms")
  wait_until(lambda: limited.metrics()["num_requests_running"] == 0, "closing the stream aborts the request")


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
