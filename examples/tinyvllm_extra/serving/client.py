"""A client for a running server, without packages of extras."""
import http.client, io, json, urllib.error, urllib.request
from collections.abc import Iterator
from types import SimpleNamespace

from tinyvllm.config import InputError, JsonObject, check


class Remote:
  """A running server, with the methods of LLM that the command line calls."""
  def __init__(self, flags: JsonObject, engine_options: JsonObject):
    """flags: of the command line. Raises InputError for engine options, which only the server can set."""
    check(flags["url"], "api_key: requires --url")
    names = ", ".join(name for name in engine_options if name != "seed")   # a sampling parameter, too
    check(not names, f"{names}: not allowed with --url: pass engine options to `tinyvllm serve`")
    self.flags = flags
    self.url = flags["url"].rstrip("/")

  def generate_stream(self, prompt: str | JsonObject | list[int], sampling: JsonObject) -> Iterator[SimpleNamespace]:
    """Run LLM.generate_stream on the server, for a str, token ids or {"messages": [...]}. sampling: fields of
    SamplingParams. Each output has outputs[0].text; the last one also has the finish_reason and the numbers of tokens.
    Raises InputError if the server rejects the request or does not respond, RuntimeError if a step fails there."""
    route, source = ("chat/completions", prompt) if isinstance(prompt, dict) else ("completions", {"prompt": prompt})
    body = {**source, **sampling, "model": self.flags["model"], "stream": True,
            "stream_options": {"include_usage": True}}
    headers: JsonObject = {"Content-Type": "application/json",
                           "Authorization": f"Bearer {self.flags['api_key']}".encode()}   # not always Latin-1
    request = urllib.request.Request(f"{self.url}/v1/{route}", json.dumps(body).encode(), headers)
    try:
      with urllib.request.urlopen(request) as response: yield from read_outputs(response)
    except urllib.error.HTTPError as error: raise InputError(f"{self.url}: {message_of(error)}") from error
    except (OSError, http.client.HTTPException) as error:
      raise InputError(f"url={self.url}: no connection to a server: {getattr(error, 'reason', error)}") from error


def read_outputs(response: http.client.HTTPResponse) -> Iterator[SimpleNamespace]:
  """Yield the outputs in a response's lines. See generate_stream."""
  finish_reason = None
  # TextIOWrapper reads all lines that have arrived at once
  for event in (json.loads(line[6:]) for line in io.TextIOWrapper(response, "utf-8") if line.startswith("data: {")):
    if "error" in event: raise RuntimeError(event["error"]["message"])
    for choice in event["choices"]:   # a delta of reasoning or of a tool call has no content
      finish_reason = choice.get("finish_reason")
      text = choice["delta"].get("content") if "delta" in choice else choice["text"]
      yield SimpleNamespace(outputs=[SimpleNamespace(text=text or "", finish_reason=finish_reason)], metrics=None)
    if usage := event.get("usage"):
      yield SimpleNamespace(outputs=[SimpleNamespace(text="", finish_reason=finish_reason)],
                            prompt_token_ids=range(usage["prompt_tokens"]),
                            num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0),
                            metrics=SimpleNamespace(num_generated=usage["completion_tokens"]))


def message_of(error: urllib.error.HTTPError) -> str:
  try: return json.load(error)["error"]["message"]
  except (ValueError, KeyError, TypeError): return str(error)   # not a tinyvllm server
