"""Measure how long large or hostile request bodies delay other requests of a server.

  python tests/benchmarks/hostile.py --model DIR

Starts `tinyvllm serve`, sends each body, and prints the HTTP status, the seconds until its response, and the longest
delay of GET /health and the longest gap between two events of another stream in the meantime. The target is 0.5 s."""
import argparse
import http.client
import json
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))   # tests
from helpers.servers import Server

LIMIT = 2**22 - 2**10   # bytes of a body: the default of --max-body-size, less the other fields


def fill(text: str) -> str: return text * (LIMIT // len(text))


def function(name: str, parameters: dict) -> dict:
  return {"type": "function", "function": {"name": name, "parameters": parameters}}


def chat(content: str = "Hello", **fields) -> tuple[str, dict]:
  return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], "max_tokens": 8, **fields}


def completion(prompt: object = "Hello", **fields) -> tuple[str, dict]:
  return "/v1/completions", {"prompt": prompt, "max_tokens": 8, **fields}


def structured(**fields) -> tuple[str, dict]: return completion(structured_outputs=fields)


def nested(depth: int) -> dict:
  schema: dict = {"type": "string"}
  for _ in range(depth): schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
  return schema


TOOLS = [function("f", {"type": "object", "properties": {"x": {"type": "string"}}})]
BODIES: dict[str, tuple[str, dict]] = {
  "long prompt": completion(fill("Hello world. ")),
  "long prompt of one letter": completion(fill("a")),
  "long prompt of spaces": completion(fill(" ")),
  "long prompt, /tokenize": ("/tokenize", {"prompt": fill("Hello world. ")}),
  "long message": chat(fill("Hello world. ")),
  "318 prompts": completion([fill("Hello world. ")[:LIMIT // 318 - 8]] * 318),
  "318 short prompts": completion(["Hello"] * 318),
  "many messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * (LIMIT // 40)}),
  "many messages, /tokenize": ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * (LIMIT // 40)}),
  "prompt of token ids": completion([1] * (LIMIT // 3)),
  "/detokenize": ("/detokenize", {"tokens": [1] * (LIMIT // 3)}),
  "logit_bias of the vocabulary": completion(logit_bias={str(i): 1 for i in range(49000)}, max_tokens=200),
  "logit_bias of 300,000": completion(logit_bias={str(i): 1 for i in range(300000)}),
  "allowed_token_ids": completion(allowed_token_ids=[*range(49000)], max_tokens=200),
  "100,000 stop strings": completion(stop=[f"stop {i}" for i in range(100000)], max_tokens=200),
  "long stop string": completion(stop=[fill("a")], max_tokens=200),
  "100,000 stop ids": completion(stop_token_ids=[1] * 100000),
  "100,000 bad words": completion(bad_words=[f"word {i}" for i in range(100000)]),
  "100,000 choices": structured(choice=[f"choice {i}" for i in range(100000)]),
  "long choice": structured(choice=[fill("a")]),
  "long regex": structured(regex=fill("[ab]c?")),
  "regex [ ]{60000} with tools": chat(structured_outputs={"regex": "[ ]{60000}"}, tools=TOOLS, max_tokens=4000),
  "regex (a{1,1000}){1,1000}": structured(regex="(a{1,1000}){1,1000}"),
  "regex (.*a){50}b": structured(regex="(.*a){50}b(x|y.*z){30}"),
  "grammar of many rules": structured(grammar="start: " + " | ".join(f"r{i}" for i in range(20000)) + "\n"
                                      + "\n".join(f'r{i}: "{i}"' for i in range(20000))),
  "schema of many properties": structured(json={"type": "object", "properties": {
    f"p{i}": {"type": "string"} for i in range(50000)}, "required": [f"p{i}" for i in range(50000)]}),
  "schema of many alternatives": structured(json={"anyOf": [{"const": i} for i in range(100000)]}),
  "deep schema": structured(json=nested(90)),
  "schema with pattern": structured(json={"type": "string", "pattern": "^(a|aa)+" + "[a-z]{0,5000}" * 20 + "$"}),
  "10,000 tools": chat(tools=[function(f"f{i}", {"type": "object"}) for i in range(10000)], tool_choice="required"),
  "tools with large schemas": chat(tools=[function("f", {"type": "object", "properties": {
    f"p{i}": {"type": "string", "description": "x" * 50} for i in range(30000)}})], tool_choice="required"),
  "prompt_logprobs": completion("Hello world. " * 600, prompt_logprobs=20, logprobs=20),
  "echo with logprobs": completion("Hello world. " * 600, echo=True, logprobs=20),
  "chat_template_kwargs": chat(chat_template_kwargs={f"v{i}": "x" for i in range(200000)}),
  "deep JSON": completion(metadata={"x": json.loads("[" * 900 + "]" * 900)}),
  "long unknown model": completion(model=fill("m")),
}


def post(port: int, path: str, body: dict) -> tuple[int, float]:
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
  data = json.dumps(body).encode()
  start = time.perf_counter()
  connection.request("POST", path, data, {"Content-Type": "application/json"})
  response = connection.getresponse()
  response.read()
  return response.status, time.perf_counter() - start


class Watch(threading.Thread):
  """Repeats an action until `stopped`, and records the longest duration of one."""
  def __init__(self, port: int):
    super().__init__(daemon=True)
    self.port = port
    self.longest = 0.0
    self.stopped = threading.Event()


class Health(Watch):
  def run(self) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
    while not self.stopped.wait(0.01):
      start = time.perf_counter()
      connection.request("GET", "/health")
      connection.getresponse().read()
      self.longest = max(self.longest, time.perf_counter() - start)


class Stream(Watch):
  def run(self) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
    body = json.dumps({"prompt": "Hello", "stream": True, "max_tokens": 1000, "ignore_eos": True})
    while not self.stopped.is_set():
      connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
      response = connection.getresponse()
      last = time.perf_counter()
      while response.readline():
        now = time.perf_counter()
        self.longest = max(self.longest, now - last)
        last = now


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--model", metavar="DIR", help="model folder (default: the bundled model)")
  parser.add_argument("--only", metavar="TEXT", default="", help="run only the bodies whose name contains this")
  args = parser.parse_args()
  with Server(*([args.model] if args.model else [])) as server:
    watches = [Health(server.port), Stream(server.port)]
    for watch in watches: watch.start()
    time.sleep(5)   # captures the graphs
    print("| body | bytes | status | response, s | /health, s | stream, s |\n|---|---|---|---|---|---|")
    for name, (path, body) in BODIES.items():
      if args.only not in name: continue
      for watch in watches: watch.longest = 0.0
      status, seconds = post(server.port, path, body)
      time.sleep(0.3)
      delays = " | ".join(f"{watch.longest:.2f}" for watch in watches)
      print(f"| {name} | {len(json.dumps(body)):,} | {status} | {seconds:.2f} | {delays} |", flush=True)
    for watch in watches: watch.stopped.set()
    for watch in watches: watch.join()


if __name__ == "__main__": main()
