"""Use tinyvllm's server with the openai package: completions, chats, streams, JSON schemas, log probabilities.

  tinyvllm serve                                                    # in one terminal: the bundled model on port 8000
  python examples/openai_client.py [URL] [PROMPT]                   # in another; default URL: http://127.0.0.1:8000

If the server was started with --api-key, set the key in OPENAI_API_KEY. The bundled model writes short English
sentences, and its chat template uses only the last user message; a larger model (tinyvllm serve FOLDER) uses the whole
conversation. A base model has no chat template: its server rejects chats, and this script skips them."""
import json
import os
import sys

import openai

# x-guidance is an option of llguidance. Here it forbids optional white space, which a small model may repeat forever
SCHEMA = {"type": "object", "x-guidance": {"whitespace_flexible": False}, "additionalProperties": False,
          "properties": {"animal": {"enum": ["cat", "dog", "bird"]}, "name": {"enum": ["Tom", "Kim", "Sam"]},
                         "age": {"type": "integer", "minimum": 0, "maximum": 20}},
          "required": ["animal", "name", "age"]}


def show(title: str, text: str) -> None: print(f"\n{title}\n  {text!r}", flush=True)


def completions(client: openai.OpenAI, model: str, prompt: str) -> None:
  answer = client.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0)
  show("A completion", prompt + answer.choices[0].text)
  print(f"  finish_reason {answer.choices[0].finish_reason}, {answer.usage.completion_tokens} tokens")
  # Several prompts, several samples of each: choice i * n + j is sample j of prompt i
  answer = client.completions.create(model=model, prompt=[prompt, "The sun"], n=2, seed=7, max_tokens=12, stop="\n")
  for choice in answer.choices: show(f"Choice {choice.index}", choice.text)
  # Parameters that are not in OpenAI's API go into extra_body, under vLLM's names
  extra = {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
  answer = client.completions.create(model=model, prompt=prompt, max_tokens=24, seed=7, extra_body=extra)
  show("With top_k, min_p and a repetition penalty", answer.choices[0].text)


def stream(client: openai.OpenAI, model: str, prompt: str) -> None:
  print(f"\nA stream\n  {prompt}", end="", flush=True)
  usage = {"include_usage": True}
  events = client.completions.create(model=model, prompt=prompt, max_tokens=40, stream=True, stream_options=usage)
  with events:   # leaving this block early closes the connection, and the server stops generating
    for event in events:
      if event.choices: print(event.choices[0].text, end="", flush=True)
      if event.usage: print(f"\n  {event.usage.completion_tokens} tokens of {event.usage.prompt_tokens} in the prompt")


def chat(client: openai.OpenAI, model: str, prompt: str) -> None:
  messages = [{"role": "user", "content": prompt}]
  try: answer = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=40, temperature=0)
  except openai.BadRequestError as e:
    if "chat template" not in str(e): raise
    return show("No chat: this is a base model", e.message)
  show("A chat", answer.choices[0].message.content)
  print("\nA chat as a stream\n  ", end="")
  for event in client.chat.completions.create(model=model, messages=messages, max_completion_tokens=40, stream=True):
    print(event.choices[0].delta.content or "", end="", flush=True)
  print()
  form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
  answer = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=60,
                                          response_format=form)   # type: ignore[arg-type]
  show("A chat that answers in JSON", answer.choices[0].message.content)
  answer = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=3, temperature=0,
                                          logprobs=True, top_logprobs=2)
  print("\nTokens of a chat, each with the two most probable ones")
  for token in answer.choices[0].logprobs.content:
    print(f"  {token.token!r} {token.logprob:.2f}", {best.token: round(best.logprob, 2) for best in token.top_logprobs})


def structured(client: openai.OpenAI, model: str) -> None:
  """Request JSON that matches a schema. The server needs llguidance: pip install 'tinyvllm[server,grammar]'."""
  form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
  answer = client.completions.create(model=model, prompt="My pet, as JSON:", max_tokens=60, seed=3,
                                     extra_body={"response_format": form})
  pet = json.loads(answer.choices[0].text)
  show("JSON that matches a schema", f"{pet['name']}, a {pet['animal']}, is {pet['age']}")


def logprobs(client: openai.OpenAI, model: str, prompt: str) -> None:
  answer = client.completions.create(model=model, prompt=prompt, max_tokens=3, temperature=0, logprobs=2)
  logprobs = answer.choices[0].logprobs
  print("\nTokens of a completion, each with the two most probable ones")
  for token, logprob, best in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
    print(f"  {token!r} {logprob:.2f}", {text: round(x, 2) for text, x in best.items()})


def main() -> None:
  url, prompt = (sys.argv[1:] + ["http://127.0.0.1:8000", "The cat"][len(sys.argv) - 1:])[:2]
  client = openai.OpenAI(base_url=url.rstrip("/") + "/v1", api_key=os.environ.get("OPENAI_API_KEY", "none"))
  model = client.models.list().data[0].id   # a server has one model; requests must name it
  print(f"{url} serves {model}")
  completions(client, model, prompt)
  stream(client, model, prompt)
  chat(client, model, prompt if len(sys.argv) > 2 else "Hello")
  structured(client, model)
  logprobs(client, model, prompt)


if __name__ == "__main__": main()
