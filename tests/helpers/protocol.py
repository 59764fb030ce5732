"""Bodies of requests, a running request, responses whole and streamed, and outputs of an engine in their form."""
import contextlib

from tinyvllm import SamplingParams

from .engines import ENGINE
from .servers import stream

SMALL = {**ENGINE, "max_num_seqs": 4, "max_num_batched_tokens": 4}   # few graphs
CHAT = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood }}"
        "{% if add_generation_prompt %}bot: {% endif %}")
GREEDY = {"temperature": 0.0, "max_tokens": 8}
ENDLESS = {"temperature": 0.0, "max_tokens": 30000, "ignore_eos": True, "prompt": "the cat"}   # runs for a minute
KEY = {"Authorization": "Bearer secret"}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "you"}, {"role": "user", "content": "the cat"}]


@contextlib.contextmanager
def running_request(server, **fields):
  """Keep an endless request running. Yield the lines of its stream after the first event."""
  with server.stream("/v1/completions", {**ENDLESS, **fields}, headers=KEY) as response:
    lines = response.iter_lines()
    next(lines)
    yield lines


def chat_prompt(llm, messages):
  """Return `messages` as a prompt of token ids."""
  return {"prompt_token_ids": llm.chat(messages, SamplingParams(max_tokens=1))[0].prompt_token_ids}


def expected_output(llm, prompt, **fields):
  """Return LLM.generate's output for one prompt."""
  return llm.generate(prompt, SamplingParams(**fields), use_tqdm=False)[0]


def expected_rows(llm, prompt, **fields):
  """Return what `rows_of` returns for LLM.generate's outputs for one or several prompts."""
  outputs = llm.generate(prompt, SamplingParams(**fields), use_tqdm=False)
  completions = [completion for output in outputs for completion in output.outputs]
  return [(i, c.text, c.finish_reason, c.stop_reason) for i, c in enumerate(completions)]


def rows_of(body):
  """Return index, text, finish_reason and stop_reason of the choices of a response."""
  return [(c["index"], c["text"] if "text" in c else c["message"]["content"], c["finish_reason"], c["stop_reason"])
          for c in body["choices"]]


# Responses of /generate, /v1/completions and /v1/chat/completions

HEAD = ("id", "object", "model", "created")
PROMPT_FIELDS = ("prompt_token_ids", "prompt_logprobs")
USAGE = {"include_usage": True, "continuous_usage_stats": True}


def answer(server, path, body):
  """Return the response to a request, after a check that the chunks of a stream add up to it."""
  response = server.post(path, body)
  assert response.status_code == 200, response.text
  whole = response.json()
  *chunks, last = stream(server, path, {**body, "stream_options": USAGE})
  assert last == "[DONE]" and without_ids(joined(chunks)) == without_ids(whole), body
  return whole


def joined(chunks):
  """Return the chunks of a stream with USAGE as one response, after checks of each chunk."""
  *chunks, whole = chunks
  choices, counts = {}, {}
  for chunk in chunks:
    assert [chunk[name] for name in HEAD] == [whole[name] for name in HEAD]
    choice, = chunk["choices"]
    i, message = choice["index"], choice.pop("delta", {})
    before, num_prompt, count, total = choices.get(i, {}), *chunk["usage"].values()
    assert total == num_prompt + count and (not count or "role" not in message)
    is_new = count > counts.get(i, 0) or not count and any(message.values())   # role and echo come before all tokens
    assert is_new or choice["finish_reason"], "each chunk has new tokens"
    assert not before.get("finish_reason"), "the last chunk has the reason"
    if "tool_calls" in message: message["tool_calls"] = {call.pop("index"): call for call in message["tool_calls"]}
    prompt = {name: chunk[name] for name in PROMPT_FIELDS if name in chunk}
    choices[i], counts[i] = add(before, {**choice, **prompt, **({"message": message} if message else {})}), count
  assert whole["choices"] == [] and sum(counts.values()) == whole["usage"]["completion_tokens"]
  whole["choices"] = [choices[i] for i in sorted(choices)]
  for choice in whole["choices"]:
    calls = choice.get("message", {}).get("tool_calls")
    if calls: choice["message"]["tool_calls"] = [*calls.values()]
    if "message" in choice: whole |= {name: choice.pop(name) for name in PROMPT_FIELDS if name in choice}
  if "text" in whole: whole["text"] = [choice["text"] for choice in whole["choices"]]
  return whole


def add(a, b):
  """Return the values of two chunks as one: texts and lists are joined, objects are merged."""
  if isinstance(a, dict) and isinstance(b, dict): return {name: add(a.get(name), b.get(name)) for name in a | b}
  if isinstance(a, str | list) and b is not None: return a + b
  return a if b is None else b


def without_ids(value):
  """Return a response without ids, and without empty fields, which chunks leave out."""
  if isinstance(value, list): return [without_ids(x) for x in value]
  if not isinstance(value, dict): return value
  return {name: without_ids(x) for name, x in value.items()
          if x not in (None, "") and name not in ("id", "object", "created", "cached_tokens")}
